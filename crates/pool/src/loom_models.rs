//! Loom models of the lock-free parts. Run them with
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p aquifer-pool --release --lib loom
//! ```
//!
//! The image's words, the pins, the appends and the signal are the real ones. Their environment is
//! as small as the property allows: the metadata mutex is loom's, a page or a record is a word, and
//! a page that a reader accesses under a pin is a cell whose every access loom checks for races.
//!
//! Not modelled is what happens only under the metadata mutex, in one process at a time: which
//! pages are free, held or moved ([`freed`](crate::metadata::freed)), where records are placed, and what is
//! repaired after a death. The tests with killed processes and the crash tests cover that.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;

use crate::format::file::{FileInode, FileKind};
use crate::format::slot_bytes::{SLOT_BYTES, SlotBytes, word};
use crate::format::slot_change::{SlotChange, SlotWords};
use crate::pins::{InodeUse, PinSet, PinValue, PinWord};
use crate::shared::appends::{Appends, NewAppend, append, at_place, note_at_place};
use crate::shared::dead_holders::DeadHolders;
use crate::shared::image_words::{
    ImageSlot, ImageVersion, change, has_layout, image_slot, pin_in_time, state_of_file,
    version_of_file,
};
use crate::shared::signal::Signal;
use crate::sync::AtomicU64;

/// Explores every schedule with at most this many preemptions: all the bugs these models were tried
/// with need at most two.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Runs `first` and `second` in threads and `third` in this one.
fn together(first: impl FnOnce() + 'static, second: impl FnOnce() + 'static, third: impl FnOnce()) {
    let threads = [thread::spawn(first), thread::spawn(second)];
    third();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

// ---- the image ----------------------------------------------------------------------------------

const INODE: u64 = 7;
const RUNS_SLOT: u64 = 8;
const INCARNATION: u64 = 3;
/// The word of the slot with runs that the models read.
const RUN_WORD: usize = 2;

/// The inode of a file at a layout version, with as many pages as the version number.
fn inode_bytes(layout_version: u64) -> SlotBytes {
    let size_bytes = layout_version * 4096;
    let new = FileInode::new(FileKind::File, INODE, INCARNATION);
    FileInode { layout_version, size_bytes, links: 1, ..new }.encode().unwrap()
}

/// An inode and a slot with its runs, in one page of the image, which is absent at first: readers
/// use the base.
struct Image {
    version: ImageVersion,
    present: AtomicU64,
    inode: ImageSlot,
    runs: ImageSlot,
    base_inode: ImageSlot,
    base_runs: ImageSlot,
    metadata_mutex: Mutex<()>,
}

/// The word of the inode with its layout version.
const VERSION_WORD: usize = 3;

/// What a reader has read from an image: the size in pages, the layout version, and the run.
type Seen = (u64, u64, u64);

impl Image {
    fn new() -> Image {
        let mut runs = [0; SLOT_BYTES];
        runs[RUN_WORD * 8..][..8].copy_from_slice(&1_u64.to_ne_bytes());
        let mut absent = inode_bytes(1);
        // As few words as possible differ from the base, or the model would take too long.
        absent[VERSION_WORD * 8..][..8].fill(0);
        Image {
            version: ImageVersion::new(),
            present: AtomicU64::new(0),
            inode: image_slot(&absent),
            runs: image_slot(&[0; SLOT_BYTES]),
            base_inode: image_slot(&inode_bytes(1)),
            base_runs: image_slot(&runs),
            metadata_mutex: Mutex::new(()),
        }
    }

    /// As `Segment::slot`.
    fn slots(&self) -> (&ImageSlot, &ImageSlot) {
        match self.present.load(Acquire) {
            0 => (&self.base_inode, &self.base_runs),
            _ => (&self.inode, &self.runs),
        }
    }

    /// As `Segment::materialise`.
    fn materialise(&self) {
        if self.present.load(Acquire) == 0 {
            self.copy_base();
            self.present.store(1, Release);
        }
    }

    fn copy_base(&self) {
        let copy = |word: usize, from: &ImageSlot, to: &ImageSlot| {
            to[word].store(from[word].load(Relaxed), Relaxed);
        };
        copy(VERSION_WORD, &self.base_inode, &self.inode);
        copy(RUN_WORD, &self.base_runs, &self.runs);
    }

    /// As `apply::apply_noted`, behind `Core::prepare`.
    fn apply(&self, layout_version: u64, count: impl FnOnce()) {
        self.materialise();
        let odd = self.version.begin_change();
        let (before, after) = (inode_bytes(layout_version - 1), inode_bytes(layout_version));
        let words = SlotWords::patch(|index| word(&before, index), &after);
        let mut bytes = vec![0; words.len_bytes() as usize];
        words.copy_from(&after, &mut bytes);
        // The checksum is never set.
        let set = words.set & crate::format::slot_change::SETTABLE_WORDS;
        let words = SlotWords { set, ..words };
        change(&self.inode, &SlotChange { slot: INODE, words, bytes: &bytes });
        let words = SlotWords { is_whole: false, set: 1 << RUN_WORD };
        let bytes = &layout_version.to_ne_bytes();
        change(&self.runs, &SlotChange { slot: RUNS_SLOT, words, bytes });
        count();
        self.version.end_change(odd);
    }

    fn seen(&self) -> Seen {
        let (inode, runs) = self.slots();
        let state = state_of_file(inode).expect("it is a file's");
        let run = u64::from_ne_bytes(crate::shared::image_words::word(runs, RUN_WORD));
        (state.size_bytes / 4096, state.layout_version, run)
    }
}

/// Size, layout version and runs are of one change, with a concurrent writer.
#[test]
fn loom_size_and_layout_are_of_one_version() {
    explore(3, || {
        let image = Arc::new(Image::new());
        let changing = image.clone();
        let changer = thread::spawn(move || {
            for layout_version in 2..=3 {
                let _locked = changing.metadata_mutex.lock().unwrap();
                changing.apply(layout_version, || ());
            }
        });
        for _ in 0..2 {
            if let Some((size, version, run)) = image.version.at_rest(|| image.seen()) {
                assert!(size == version && run == version, "{size} {version} {run}");
            }
        }
        changer.join().unwrap();
    });
}

/// A page that counts as present before it was copied shows what it never had.
#[test]
fn loom_a_page_that_is_present_too_early_is_noticed() {
    let outcome = std::panic::catch_unwind(|| {
        explore(3, || {
            let image = Arc::new(Image::new());
            let changing = image.clone();
            let changer = thread::spawn(move || {
                changing.present.store(1, Release);
                changing.copy_base();
            });
            if let Some((size, version, run)) = image.version.at_rest(|| image.seen()) {
                assert!(size == version && run == version, "{size} {version} {run}");
            }
            changer.join().unwrap();
        });
    });
    assert!(outcome.is_err(), "the model notices nothing");
}

// ---- dead holders of files ----------------------------------------------------------------------

/// One holder has died, and two others repair after it. Meanwhile another one dies, right after it has
/// published a change: the next holder of its file sees that in the image.
#[test]
fn loom_the_last_change_of_a_dead_holder_is_in_the_image() {
    struct Shared {
        holders: DeadHolders,
        /// Behind the metadata mutex: the last change that was published.
        published: Mutex<u64>,
        image: AtomicU64,
    }

    impl Shared {
        fn settle(&self) {
            let repair = || {
                let published = self.published.lock().unwrap();
                self.image.store(*published, Relaxed);
                Ok::<_, ()>(())
            };
            self.holders.settle(repair).unwrap();
        }
    }

    explore(3, || {
        let shared = Arc::new(Shared {
            holders: DeadHolders::new(),
            published: Mutex::new(0),
            image: AtomicU64::new(0),
        });
        shared.holders.note();
        let [one, other] = [shared.clone(), shared.clone()];
        let next = || {
            *shared.published.lock().unwrap() = 1;
            shared.holders.note();
            shared.settle();
            assert_eq!(shared.image.load(Relaxed), 1);
        };
        together(move || one.settle(), move || other.settle(), next);
    });
}

// ---- pins ---------------------------------------------------------------------------------------

/// A pin without its fences.
struct Unfenced(AtomicU64);

impl PinWord for Unfenced {
    fn try_set(&self, value: PinValue) -> bool {
        self.0.compare_exchange(0, value.to_bits(), Acquire, Relaxed).is_ok()
    }

    fn clear(&self) {
        self.0.store(0, Release);
    }

    fn clear_if(&self, value: PinValue) -> bool {
        self.0.clear_if(value)
    }

    fn get(&self) -> Option<PinValue> {
        self.0.get()
    }

    fn fence_before_look() {}
}

/// A reader's pin as the kernel keeps it: in a list with its own lock. Without the fences that the
/// code has in addition.
struct ReaderLock(Mutex<Option<PinValue>>);

impl PinWord for ReaderLock {
    /// As `Locks::set`.
    fn try_set(&self, value: PinValue) -> bool {
        self.0.lock().unwrap().replace(value).is_none()
    }

    fn clear(&self) {
        *self.0.lock().unwrap() = None;
    }

    fn clear_if(&self, value: PinValue) -> bool {
        self.0.lock().unwrap().take_if(|held| *held == value).is_some()
    }

    fn get(&self) -> Option<PinValue> {
        *self.0.lock().unwrap()
    }

    fn fence_before_look() {}
}

/// A file whose page is freed and reused.
struct Pinned<W> {
    image: Image,
    pins: [W; 2],
    /// Loom fails the model if a reader accesses it while the next owner writes to it.
    page: UnsafeCell<u64>,
}

// SAFETY: loom checks every access of the cell.
unsafe impl<W: Sync> Sync for Pinned<W> {}
// SAFETY: as above.
unsafe impl<W: Send> Send for Pinned<W> {}

impl<W: PinWord> Pinned<W> {
    fn new(word: impl Fn() -> W) -> Arc<Pinned<W>> {
        Arc::new(Pinned { image: Image::new(), pins: [word(), word()], page: UnsafeCell::new(1) })
    }

    /// Reads the page, if `is_unchanged` returns after the pin that the page belongs to the file.
    fn view(&self, index: usize, layout_version: u64, is_unchanged: impl FnOnce() -> bool) {
        let pin = &self.pins[index];
        let value = PinValue::of_version(INODE, layout_version).unwrap();
        let set = || if pin.try_set(value) { Ok(()) } else { Err("there is a pin") };
        if pin_in_time(set, || Ok(is_unchanged())).unwrap().is_some() {
            // SAFETY: loom verifies that no thread writes during the access.
            self.page.with(|page| assert_eq!(unsafe { *page }, 1));
        }
        pin.clear();
    }

    /// As `Pool::pin_current`.
    fn view_current(&self, index: usize) {
        let state = self.image.version.at_rest(|| state_of_file(self.image.slots().0)).flatten();
        let Some(state) = state.filter(|state| state.layout_version == 1) else { return };
        self.view(index, 1, || has_layout(|| Some(self.image.slots().0), state.generation, 1));
    }

    /// The same, looking the slot up before the pin.
    fn view_looked_up_too_early(&self) {
        let inode = self.image.slots().0;
        self.view(0, 1, || has_layout(|| Some(inode), INCARNATION, 1));
    }

    /// As `Pool::pin_unchanged`.
    fn view_unchanged(&self, index: usize) {
        let version = self.image.version.now();
        let Some((_, layout_version, _)) = self.image.version.at_rest(|| self.image.seen()) else {
            return;
        };
        if version % 2 == 1 || self.image.version.now() != version || layout_version != 1 {
            return;
        }
        self.view(index, 1, || self.image.version.now() == version);
    }

    fn change(&self) {
        let _locked = self.image.metadata_mutex.lock().unwrap();
        self.image.apply(2, || ());
    }

    /// As `freed::release`, and the next owner.
    fn reuse(&self) {
        let locked = self.image.metadata_mutex.lock().unwrap();
        let current = version_of_file(self.image.slots().0).map(|(_, version)| version);
        if current == Some(1) {
            return; // Nothing was freed yet.
        }
        W::fence_before_look();
        let pins = PinSet::new(self.pins.iter().filter_map(PinWord::get).collect(), vec![]);
        drop(locked);
        if !pins.covers(PinValue::of_freed(INODE, 1), current) {
            // SAFETY: as above.
            self.page.with_mut(|page| unsafe { *page = 2 });
        }
    }
}

/// One thread changes the file, another one checks the pins and reuses the page.
fn one_view<W: PinWord + Send + Sync + 'static>(
    word: impl Fn() -> W,
    view: impl Fn(&Pinned<W>) + 'static,
) {
    let file = Pinned::new(word);
    let (viewing, changing) = (file.clone(), file.clone());
    together(move || view(&viewing), move || changing.change(), || file.reuse());
}

fn no_pin() -> AtomicU64 {
    AtomicU64::new(0)
}

#[test]
fn loom_a_page_of_the_current_layout_is_not_used_again() {
    explore(3, || one_view(no_pin, |file| file.view_current(0)));
}

#[test]
fn loom_a_page_of_unchanged_metadata_is_not_used_again() {
    explore(3, || one_view(no_pin, |file| file.view_unchanged(0)));
}

#[test]
fn loom_two_readers_keep_a_page() {
    explore(2, || {
        let file = Pinned::new(no_pin);
        let (first, second) = (file.clone(), file.clone());
        together(
            move || first.view_current(0),
            move || second.view_unchanged(1),
            || {
                file.change();
                file.reuse();
            },
        );
    });
}

#[test]
fn loom_without_fences_a_page_is_used_again_under_its_reader() {
    let outcome = std::panic::catch_unwind(|| {
        explore(3, || one_view(|| Unfenced(no_pin()), |file| file.view_current(0)));
    });
    assert!(outcome.is_err(), "the model notices nothing");
}

#[test]
fn loom_a_page_is_used_again_under_a_reader_that_looks_its_slot_up_too_early() {
    let outcome = std::panic::catch_unwind(|| {
        explore(3, || one_view(no_pin, Pinned::view_looked_up_too_early));
    });
    assert!(outcome.is_err(), "the model notices nothing");
}

#[test]
fn loom_a_page_that_a_reader_has_locked_is_not_used_again() {
    let no_lock = || ReaderLock(Mutex::new(None));
    explore(3, move || one_view(no_lock, |file| file.view_current(0)));
    explore(3, move || one_view(no_lock, |file| file.view_unchanged(0)));
}

/// The kernel's lock orders a reader's pin only before the reader's later loads.
#[test]
fn loom_a_page_is_used_again_under_a_reader_that_locks_too_late() {
    let outcome = std::panic::catch_unwind(|| {
        explore(3, || {
            one_view(
                || ReaderLock(Mutex::new(None)),
                |file| {
                    let is_unchanged = has_layout(|| Some(file.image.slots().0), INCARNATION, 1);
                    file.view(0, 1, || is_unchanged);
                },
            );
        });
    });
    assert!(outcome.is_err(), "the model notices nothing");
}

// ---- open files ---------------------------------------------------------------------------------

/// A file that is given back when it has no name and is not open.
struct Opened {
    pins: [AtomicU64; 2],
    claimed: AtomicU64,
    links: AtomicU64,
    metadata_mutex: Mutex<()>,
    /// Loom fails the model if a thread that has the file open accesses it while it is given back.
    content: UnsafeCell<u64>,
}

// SAFETY: loom checks every access of the cell.
unsafe impl Sync for Opened {}
// SAFETY: as above.
unsafe impl Send for Opened {}

impl Opened {
    fn new(links: u64) -> Arc<Opened> {
        Arc::new(Opened {
            pins: [no_pin(), no_pin()],
            claimed: AtomicU64::new(0),
            links: AtomicU64::new(links),
            metadata_mutex: Mutex::new(()),
            content: UnsafeCell::new(1),
        })
    }

    fn pin(&self, index: usize) {
        let value = PinValue::of_use(INODE, InodeUse::Open).unwrap();
        assert!(PinWord::try_set(&self.pins[index], value));
    }

    fn read(&self) {
        // SAFETY: loom verifies that no thread writes during the access.
        self.content.with(|content| assert_eq!(unsafe { *content }, 1));
    }

    /// Gives it back unless there is a pin; the caller has the metadata mutex.
    fn give_back_unless_open(&self) {
        <AtomicU64 as PinWord>::fence_before_look();
        // One after the other, as `Blocks::look` does.
        if self.pins.iter().filter_map(PinWord::get).next().is_none() {
            // SAFETY: as above.
            self.content.with_mut(|content| unsafe { *content = 2 });
        }
    }

    /// Opens it by its name: as `Pool::pin_inode`, and the caller's check.
    fn open(&self, waits: bool) {
        self.pin(0);
        // As `Pins::wait_while_claimed`.
        while waits && self.claimed.load(Acquire) == INODE {
            drop(self.metadata_mutex.lock().unwrap());
        }
        if self.links.load(Acquire) != 0 {
            self.read();
        }
        PinWord::clear(&self.pins[0]);
    }

    /// Removes the last name: as `Transaction::claim_unused`, and the transaction around it.
    fn remove(&self) {
        let _locked = self.metadata_mutex.lock().unwrap();
        self.claimed.store(INODE, Relaxed);
        self.give_back_unless_open();
        self.links.store(0, Release);
        self.claimed.store(0, Release);
    }

    /// Gives it back if it has neither a name nor a pin.
    fn reap(&self) {
        let _locked = self.metadata_mutex.lock().unwrap();
        self.give_back_unless_open();
    }

    /// Another process takes it over: its pin comes before the one that it has in the order of a
    /// scan.
    fn hand_over(&self, with_mutex: bool) {
        if with_mutex {
            let _locked = self.metadata_mutex.lock().unwrap();
            self.pin(0);
        } else {
            self.pin(0);
        }
        PinWord::clear(&self.pins[1]);
        self.read();
    }
}

fn one_opener(waits: bool) {
    let file = Opened::new(1);
    let opening = file.clone();
    let opener = thread::spawn(move || opening.open(waits));
    file.remove();
    opener.join().unwrap();
}

fn one_taker(with_mutex: bool) {
    let file = Opened::new(0);
    file.pin(1);
    let taking = file.clone();
    let taker = thread::spawn(move || taking.hand_over(with_mutex));
    file.reap();
    taker.join().unwrap();
}

#[test]
fn loom_a_file_that_is_opened_is_not_given_back() {
    explore(4, || one_opener(true));
}

#[test]
fn loom_a_file_whose_opener_ignores_the_claim_is_given_back() {
    let outcome = std::panic::catch_unwind(|| explore(4, || one_opener(false)));
    assert!(outcome.is_err(), "the model notices nothing");
}

/// A scan reads the pins one after another: only a pin that is set with the mutex is not set behind
/// its back.
#[test]
fn loom_a_file_that_is_handed_over_is_not_given_back() {
    explore(4, || one_taker(true));
}

#[test]
fn loom_a_file_whose_taker_does_not_wait_for_a_scan_is_given_back() {
    let outcome = std::panic::catch_unwind(|| explore(4, || one_taker(false)));
    assert!(outcome.is_err(), "the model notices nothing");
}

// ---- the log ------------------------------------------------------------------------------------

/// The states of a record.
const NOTHING_YET: u64 = 0;
const WHOLE: u64 = 1;
const VOID: u64 = 2;

/// A log whose records take one position each, and consist of one word.
struct Log {
    appends: Appends,
    signal: Signal,
    failure: AtomicU64,
    metadata_mutex: Mutex<()>,
    records: [AtomicU64; 3],
}

impl Log {
    fn new() -> Log {
        Log {
            appends: Appends::new(),
            signal: Signal::new(),
            failure: AtomicU64::new(0),
            metadata_mutex: Mutex::new(()),
            records: std::array::from_fn(|_| AtomicU64::new(NOTHING_YET)),
        }
    }

    /// Reserves the room for one record, with the mutex. Returns the index of the append, and its
    /// position.
    fn push(&self, state: u64, depends_lsn: u64) -> (u64, u64) {
        let (lsn, is_metadata) = (self.appends.head_lsn(), state == append::PACKED);
        let end_lsn = if state == append::PACKED { lsn } else { lsn + 1 };
        let new = NewAppend { lsn, end_lsn, state, owner: 0, is_metadata, depends_lsn };
        (self.appends.push(new), lsn)
    }

    fn write(&self, lsn: u64, record: u64) {
        self.records[lsn as usize].store(record, Relaxed);
    }

    fn read(&self, lsn: u64) -> u64 {
        self.records[lsn as usize].load(Relaxed)
    }

    /// As `Log::complete`.
    fn complete(&self, index: u64) {
        let locked = self.metadata_mutex.lock().unwrap();
        self.appends.note_durable(index);
        let has_moved = self.appends.advance(false, || ());
        drop(locked);
        if has_moved {
            self.signal.ring();
        }
    }

    /// As `Log::wait_durable`; false if the log has failed.
    fn wait_durable(&self, lsn: u64) -> bool {
        loop {
            let signal = self.signal.now();
            if self.appends.durable_lsn() >= lsn {
                return true;
            }
            if self.failure.load(Acquire) != 0 {
                return false;
            }
            if !self.help() {
                self.signal.wait(signal, Duration::ZERO);
            }
        }
    }

    /// As `Log::help` for an append that its owner gave up and that is not in the log.
    fn help(&self) -> bool {
        let locked = self.metadata_mutex.lock().unwrap();
        let Some(first) = self.appends.indexes().next() else { return false };
        if !self.appends.is_given_up(first) || self.failure.load(Acquire) != 0 {
            return false;
        }
        self.appends.adopt(first, 1);
        let lsn = self.appends.entry(first).lsn.load(Relaxed);
        drop(locked);
        let dependents = {
            let _locked = self.metadata_mutex.lock().unwrap();
            self.appends.dependents_of(first)
        };
        Appends::close_hole::<()>(&dependents, (lsn, lsn + 1), |lsn, _| {
            // Release: it is durable when this returns, before the next write.
            self.records[lsn as usize].store(VOID, Release);
            Ok(())
        })
        .unwrap();
        self.complete(first);
        true
    }

    /// Every acknowledged record has the expected state.
    fn check(&self, durable_lsn: u64, expected: u64) {
        for lsn in 0..durable_lsn {
            assert_eq!(self.read(lsn), expected, "at {lsn} of {durable_lsn}");
        }
    }
}

/// Commits that are written at the same time are acknowledged in log order: what is before a
/// durable position is there, for waiters and for readers of the log.
#[test]
fn loom_what_is_acknowledged_is_whole() {
    explore(3, || {
        let log = Arc::new(Log::new());
        let commit = |log: Arc<Log>| {
            move || {
                let (index, lsn) = {
                    let _locked = log.metadata_mutex.lock().unwrap();
                    log.push(append::RESERVED, append::NOTHING)
                };
                log.write(lsn, WHOLE);
                log.complete(index);
                assert!(log.wait_durable(lsn + 1));
                log.check(lsn + 1, WHOLE);
            }
        };
        together(commit(log.clone()), commit(log.clone()), || {
            log.check(log.appends.durable_lsn(), WHOLE);
        });
        assert_eq!(log.appends.durable_lsn(), 2);
    });
}

/// An abandoned append is filled by a waiter, and what depends on it does not count, neither for
/// readers up to the durable position nor after a power cut.
#[test]
fn loom_what_depends_on_a_hole_does_not_count() {
    explore(3, || {
        let log = Arc::new(Log::new());
        let (hole, hole_lsn) = log.push(append::RESERVED, append::NOTHING);
        let (dependent, lsn) = log.push(append::RESERVED, hole_lsn);
        let (dying, waiting) = (log.clone(), log.clone());
        together(
            move || {
                dying.write(lsn, WHOLE);
                dying.complete(dependent);
                dying.appends.give_up(hole);
                dying.signal.ring();
            },
            move || {
                assert!(waiting.wait_durable(2));
                waiting.check(2, VOID);
            },
            || {
                log.check(log.appends.durable_lsn(), VOID);
                // The state that a power cut would leave.
                if log.records[hole_lsn as usize].load(Acquire) == VOID {
                    assert_eq!(log.read(lsn), VOID, "recovery reads on behind the hole");
                }
            },
        );
    });
}

/// No process completes an append that was given up because the log failed.
#[test]
fn loom_nothing_is_acknowledged_behind_a_failure() {
    explore(3, || {
        let log = Arc::new(Log::new());
        let (failing, lsn) = log.push(append::RESERVED, append::NOTHING);
        let (dying, waiting) = (log.clone(), log.clone());
        together(
            move || {
                dying.failure.store(1, Release);
                dying.appends.give_up(failing);
                dying.signal.ring();
            },
            move || assert!(!waiting.wait_durable(lsn + 1)),
            || assert!(!log.wait_durable(lsn + 1)),
        );
        assert_eq!(log.appends.durable_lsn(), 0);
    });
}

/// A process that lists the pending appends finds one there, or afterwards finds it durable; also
/// when its entry is reused.
#[test]
fn loom_what_is_pending_is_found() {
    explore(3, || {
        let log = Arc::new(Log::new());
        let (first, _) = log.push(append::RESERVED, append::NOTHING);
        let (completing, pushing) = (log.clone(), log.clone());
        together(
            move || completing.complete(first),
            move || {
                let _locked = pushing.metadata_mutex.lock().unwrap();
                if pushing.appends.are_none() {
                    pushing.push(append::RESERVED, append::NOTHING);
                    pushing.push(append::RESERVED, append::NOTHING);
                }
            },
            || {
                let lsns = log.appends.lsns();
                let durable_lsn = log.appends.durable_lsn();
                assert!(lsns.contains(&0) || durable_lsn > 0, "{lsns:?} {durable_lsn}");
            },
        );
    });
}

/// A log with the image that its records change.
struct Published {
    log: Log,
    image: Image,
}

impl Published {
    /// As `Core::publish_packed`: the record is added to packed ones.
    fn change_later(&self, layout_version: u64) {
        let _locked = self.image.metadata_mutex.lock().unwrap();
        let (index, end_lsn) = self.log.appends.open_packed().unwrap();
        self.log.write(end_lsn, layout_version);
        self.log.appends.extend_packed(index, end_lsn + 1);
        self.image.apply(layout_version, || self.log.appends.note_applied(end_lsn + 1));
    }

    /// As `Core::publish`: the record has a separate append.
    fn change_now(&self, layout_version: u64) {
        let _locked = self.image.metadata_mutex.lock().unwrap();
        let lsn = self.log.appends.head_lsn();
        let (state, depends_lsn) = (append::RESERVED, append::NOTHING);
        let index = self.log.appends.push(NewAppend {
            lsn,
            end_lsn: lsn + 1,
            state,
            owner: 0,
            is_metadata: true,
            depends_lsn,
        });
        self.log.write(lsn, layout_version);
        self.log.appends.note_written(index);
        self.image.apply(layout_version, || self.log.appends.note_applied(lsn + 1));
    }

    /// As `Image::consistent_in_time` for a late reader: with the record that is being applied. Also
    /// returns the layout version that the image's version stands for.
    fn read(&self) -> Option<(Seen, u64)> {
        self.image.version.unchanged_during(|version| {
            let lsn = (!version.is_multiple_of(2)).then(|| self.log.appends.being_applied());
            let mut seen = self.image.seen();
            if let Some(lsn) = lsn.flatten() {
                let record = self.log.read(lsn);
                seen = (record, record, record);
            }
            Some((seen, 1 + version.div_ceil(2)))
        })
    }
}

/// A reader that does not wait for a writer of the image finds either the whole record that is
/// being applied, or an image at rest.
fn late_reader(
    preemptions: usize,
    change: impl Fn(&Published, u64) + Copy + Send + Sync + 'static,
) {
    explore(preemptions, move || {
        let published = Arc::new(Published { log: Log::new(), image: Image::new() });
        published.log.push(append::PACKED, append::NOTHING);
        let changing = published.clone();
        let changer = thread::spawn(move || change(&changing, 2));
        for _ in 0..2 {
            if let Some((seen, expected)) = published.read() {
                assert_ne!(seen.1, NOTHING_YET, "the record was read before it was whole");
                assert_eq!(seen, (expected, expected, expected));
            }
        }
        changer.join().unwrap();
    });
}

#[test]
fn loom_a_late_reader_finds_the_packed_record_that_is_applied() {
    late_reader(3, |published, layout_version| published.change_later(layout_version));
    late_reader(2, |published, layout_version| {
        published.change_later(layout_version);
        published.change_later(layout_version + 1);
    });
}

#[test]
fn loom_a_late_reader_finds_the_record_that_is_applied() {
    late_reader(3, |published, layout_version| published.change_now(layout_version));
}

// ---- what was committed, at its place -----------------------------------------------------------

/// A thread that sees that a commit was copied to its place, such as one that compares a page with
/// its base, finds the committed bytes there.
#[test]
fn loom_what_was_applied_lies_at_its_place() {
    explore(3, || {
        let place = Arc::new(UnsafeCell::new(0));
        let applied_lsn = Arc::new(AtomicU64::new(0));
        let (copied, noted) = (place.clone(), applied_lsn.clone());
        let applying = thread::spawn(move || {
            // SAFETY: no thread reads before it is noted; loom checks that.
            copied.with_mut(|page| unsafe { *page = 1 });
            note_at_place(&noted, 64);
        });
        if at_place(&applied_lsn) >= 64 {
            // SAFETY: no thread writes after it was noted; loom checks that.
            assert_eq!(place.with(|page| unsafe { *page }), 1);
        }
        applying.join().unwrap();
    });
}
