//! Freed pages, until they may be reused.
//!
//! ```text
//!   a change frees a run ──▶ freed: a ring, in the order of the log
//!                              │ the durable tail has passed the record     (rules 1 and 2)
//!                              ├─▶ not pinned: free
//!                              └─▶ held: a list, checked again at each checkpoint ──▶ free
//! ```
//!
//! # The tail
//! When the *durable tail* has passed the record that freed a page, that record is durable and at
//! its place, so no crash restores the old name (rule 2); and no record before it, with content for
//! this page, is ever replayed over a new owner (rule 1), because what was logged for the page was
//! logged before it was freed.
//!
//! # Pins
//! Each entry records the run's owner, and the layout version before the change. A pin of that
//! version or of an older one keeps the run ([`PinSet::covers`]). Entries that are pinned move to
//! `held`, so that a long-lived view keeps what it sees and nothing else. Only when `held` is full
//! does the ring wait, and when the ring is full as well, freeing fails:
//! [`PoolError::TooMuchPinned`].
//!
//! Pins are read only once the tail has passed an entry; then all pins are read once, for all
//! entries.
//!
//! # Runs that change their inode
//! A reader that pins inode A does not pin a run that moved from A to B and that B frees. So a run
//! that a change moves from one inode to another is noted in `moved` with its first owner, until
//! that is no longer pinned, and keeps every freed run that overlaps with it.
//!
//! # A death in between
//! Each list is changed so that its next holder can continue after a death at any point:
//!
//! | list | a death may leave | why that is harmless |
//! |---|---|---|
//! | `freed` | entries of a change that is not in the image yet | the change is applied again, and finds its own entries |
//! | `freed` → `held` | the run in both | [`settle`] finishes the step |
//! | `held`, `moved` | the last entry twice, or an empty entry | one check decides about both |
//! | map of used pages | anything | it is rebuilt from all of these |

use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::error::{PoolError, Result};
use crate::format::inode::{HEAD_SLOT, PoolHead};
use crate::format::run::Run;
use crate::format::slot::{changes_runs, named_runs, owner_of_runs};
use crate::format::slot_bytes::SlotBytes;
use crate::format::slot_change::SlotChange;
use crate::log::locks::Locked;
use crate::metadata::alloc::{self, from_word, to_word};
use crate::metadata::image_slots::{file_version, load_slot};
use crate::mutant::{self, Mutant};
use crate::pins::{PinPlaces, PinSet, PinValue};
use crate::point;
use crate::shared::segment::{Control, FREED, Freed, HELD, Kept, List, MOVED, Segment};
use crate::sync::AtomicU64;

/// A run, and the inode and layout version that name it, or named it.
type Owned = (Run, PinValue);

/// The pages of `runs` that are not in `others`, which must be sorted; sorted.
pub(crate) fn without<T: Copy + Ord>(
    mut runs: Vec<(Run, T)>,
    others: impl Iterator<Item = Run>,
) -> Vec<(Run, T)> {
    runs.sort_unstable();
    let mut left = Vec::new();
    let mut others = others.peekable();
    for (run, owner) in runs {
        let mut page = run.start_page;
        while page < run.end_page() {
            // What ends before this page overlaps neither with it nor with later pages.
            while others.next_if(|other| other.end_page() <= page).is_some() {}
            let next = others.peek().map_or(run.end_page(), |other| other.start_page);
            if next > page {
                let end_page = next.min(run.end_page());
                left.push((Run { start_page: page, pages: end_page - page }, owner));
            }
            page = others.peek().map_or(run.end_page(), |other| other.end_page());
        }
    }
    left
}

fn runs_of(owned: &[Owned]) -> impl Iterator<Item = Run> + '_ {
    owned.iter().map(|(run, _)| *run)
}

/// The pages of `before` that another inode has in `after`. Both must be sorted, without overlaps.
fn between_inodes(before: &[Owned], after: &[Owned]) -> Vec<Owned> {
    let (mut moved, mut at_before, mut at_after) = (Vec::<Owned>::new(), 0, 0);
    while let (Some((old, from)), Some((new, to))) = (before.get(at_before), after.get(at_after)) {
        let start_page = old.start_page.max(new.start_page);
        let end_page = old.end_page().min(new.end_page());
        if start_page < end_page && from.inode() != to.inode() {
            match moved.last_mut() {
                Some((last, owner)) if last.end_page() == start_page && owner == from => {
                    last.pages += end_page - start_page;
                }
                _ => moved.push((Run { start_page, pages: end_page - start_page }, *from)),
            }
        }
        if old.end_page() <= new.end_page() { at_before += 1 } else { at_after += 1 }
    }
    moved
}

/// The runs that slots name before and after a change of the image, each sorted.
#[derive(Debug, Default)]
pub(crate) struct Change {
    before: Vec<Owned>,
    after: Vec<Owned>,
    /// The pool's head after the change, if it changes.
    head: Option<PoolHead>,
}

impl Change {
    /// The change of these slots, before it is applied.
    pub fn of<'a>(segment: &Segment, changes: impl Iterator<Item = SlotChange<'a>>) -> Change {
        let mut all = Change::default();
        let mut runs = Vec::new();
        let mut add = |bytes: &SlotBytes, number: u64, list: &mut Vec<Owned>| {
            named_runs(bytes, &mut runs);
            if !runs.is_empty() {
                let inode = owner_of_runs(bytes, number);
                let version = file_version(segment, inode).map_or(0, |(_, version)| version);
                let owner = PinValue::of_freed(inode, version);
                list.extend(runs.drain(..).map(|run| (run, owner)));
            }
        };
        for change in changes {
            // A replayed log may contain any slot number.
            let Some(before) = segment.slot(change.slot) else { continue };
            let before = |index: usize| before[index].load(Relaxed).to_ne_bytes();
            if change.slot != HEAD_SLOT && !changes_runs(before, &change) {
                continue;
            }
            let before = load_slot(segment, change.slot);
            let mut after = before;
            change.apply(&mut after);
            if change.slot == HEAD_SLOT {
                all.head = PoolHead::decode(&after).ok();
                continue;
            }
            add(&before, change.slot, &mut all.before);
            add(&after, change.slot, &mut all.after);
        }
        all.before.sort_unstable();
        all.after.sort_unstable();
        all
    }

    /// Whether it may free pages.
    pub fn frees(&self) -> bool {
        !self.before.is_empty() && self.before != self.after
    }

    fn moved(&self) -> Vec<Owned> {
        between_inodes(&self.before, &self.after)
    }
}

/// Notes the effect of a change on pages, before it is applied:
///
/// * pages that one of the slots named before, and none does after, stay used until [`release`];
/// * pages that move from one inode to another;
/// * pages that are no longer fresh: those of them that are free are known to be zero.
pub(crate) fn note_change(locked: &Locked<'_>, change: Change, end_lsn: u64) {
    if let Some(head) = change.head {
        alloc::raise_fresh(locked, head.fresh_from_page);
    }
    if change.before == change.after {
        return;
    }
    for (run, _) in without(change.after.clone(), runs_of(&change.before)) {
        // They were reserved, and so have memory; in recovery the map is made afterwards.
        let _ = alloc::mark_used(locked, run);
    }
    let control = locked.control();
    let segment = &locked.handle().segment;
    for moved in change.moved() {
        note_moved(segment, moved);
    }
    // After a death in between, this runs again: the entries for this record are the last ones.
    let noted: Vec<Run> = (control.freed_first.load(Relaxed)..control.freed_next.load(Relaxed))
        .rev()
        .map(|index| entry(control, index))
        .take_while(|freed| freed.lsn.load(Relaxed) == end_lsn)
        .map(|freed| freed.kept.get().0)
        .collect();
    for (run, owner) in without(change.before, runs_of(&change.after)) {
        if noted.contains(&run) {
            continue;
        }
        if mutant::is(locked.handle().mutant, Mutant::EarlyReuse) {
            alloc::mark_free(locked, run);
            continue;
        }
        // A transaction has checked that there is an entry; recovery frees all runs at its end.
        if freed_left(control) > 0 && segment.has_entries(List::Freed, freed_to(control, 1)) {
            let next = control.freed_next.load(Relaxed);
            let freed = entry(control, next);
            freed.kept.set((run, owner));
            freed.lsn.store(end_lsn, Relaxed);
            control.behind_tail_pages.fetch_add(run.pages, Relaxed);
            point::pass("apply-noting");
            // Release: the entry counts from here on.
            control.freed_next.store(next + 1, Release);
        }
    }
}

fn note_moved(segment: &Segment, moved: Owned) {
    let control = segment.control();
    let count = control.moved_count.load(Relaxed) as usize;
    let is_noted = control.moved[..count].iter().any(|kept| kept.get() == moved);
    // A transaction has checked that there is an entry; recovery forgets all runs at its end.
    if !is_noted && count < MOVED && segment.has_entries(List::Moved, count + 1) {
        control.moved[count].set(moved);
        // Release: the entry counts from here on.
        control.moved_count.store(count as u64 + 1, Release);
        point::pass("apply-moved");
    }
}

impl Kept {
    fn get(&self) -> Owned {
        let owner = PinValue::from_bits(self.owner.load(Relaxed));
        (from_word(self.run.load(Relaxed)), owner)
    }

    /// Stores an entry, which is empty in between.
    fn set(&self, (run, owner): Owned) {
        self.run.store(0, Relaxed);
        self.owner.store(owner.to_bits(), Relaxed);
        self.run.store(to_word(run), Relaxed);
    }
}

fn entry(control: &Control, index: u64) -> &Freed {
    &control.freed[index as usize % FREED]
}

/// How many entries of the ring, from its start in memory, `count` more entries take.
fn freed_to(control: &Control, count: usize) -> usize {
    (control.freed_next.load(Relaxed) as usize).saturating_add(count).min(FREED)
}

fn freed_left(control: &Control) -> usize {
    let noted = control.freed_next.load(Relaxed) - control.freed_first.load(Relaxed);
    FREED - noted as usize
}

/// All pins and what they keep, as of one moment.
struct Look<'a> {
    segment: &'a Segment,
    pins: PinSet,
    /// Runs that belonged to another inode and are pinned through it.
    moved: Vec<Run>,
}

impl<'a> Look<'a> {
    fn new(locked: &'a Locked<'_>, pins: &PinPlaces) -> Look<'a> {
        let (handle, control) = (locked.handle(), locked.control());
        let pins = pins.look(&handle.members.locks);
        let mut look = Look { segment: &handle.segment, pins, moved: Vec::new() };
        drop_unless(&control.moved, &control.moved_count, |(run, owner)| {
            let is_kept = look.covers(owner);
            if is_kept {
                look.moved.push(run);
            }
            is_kept
        });
        look
    }

    fn covers(&self, owner: PinValue) -> bool {
        self.pins.len() > 0 && {
            let version = file_version(self.segment, owner.inode()).map(|(_, version)| version);
            self.pins.covers(owner, version)
        }
    }

    fn keeps(&self, (run, owner): Owned) -> bool {
        self.covers(owner) || self.moved.iter().any(|moved| moved.overlaps(run))
    }
}

/// Keeps the entries of a list for which `is_kept` returns true.
fn drop_unless(list: &[Kept], count: &AtomicU64, mut is_kept: impl FnMut(Owned) -> bool) {
    let mut index = 0;
    while index < count.load(Relaxed) as usize {
        let found = list[index].get();
        if !found.0.is_empty() && is_kept(found) {
            index += 1;
            continue;
        }
        let last = count.load(Relaxed) as usize - 1;
        if index != last {
            list[index].set(list[last].get());
        }
        point::pass("held-moved");
        // Release: the last entry has been copied to its new position.
        count.store(last as u64, Release);
    }
}

/// Frees the runs that the tail has passed and that are not pinned.
pub(crate) fn release(locked: &Locked<'_>, pins: &PinPlaces) {
    let control = locked.control();
    let passed_lsn = if mutant::is(locked.handle().mutant, Mutant::NoRevoke) {
        control.appends.durable_lsn.load(Relaxed)
    } else {
        control.tail_lsn.load(Relaxed)
    };
    let due = || {
        let first = control.freed_first.load(Relaxed);
        (first != control.freed_next.load(Relaxed))
            .then(|| (first, entry(control, first)))
            .filter(|(_, freed)| freed.lsn.load(Relaxed) <= passed_lsn)
    };
    // Pins are checked when the tail has moved, and not on each call.
    if due().is_none() || control.freed_looked_lsn.load(Relaxed) == passed_lsn {
        return;
    }
    count_behind_tail(control);
    let look = Look::new(locked, pins);
    while let Some((first, freed)) = due() {
        let found = freed.kept.get();
        if !look.keeps(found) {
            alloc::mark_free(locked, found.0);
            point::pass("release-run");
        } else if !hold(&locked.handle().segment, found) {
            control.freed_looked_lsn.store(passed_lsn, Relaxed);
            return;
        }
        // Release: if this process dies before it, the run is freed twice, before any process can
        // have taken it.
        control.freed_first.store(first + 1, Release);
        point::pass("release-count");
    }
}

/// Moves a run to `held`; false if that is full, or has no memory.
fn hold(segment: &Segment, found: Owned) -> bool {
    let control = segment.control();
    let count = control.held_count.load(Relaxed) as usize;
    let (run, owner) = found;
    if let Some(last) = count.checked_sub(1).map(|last| &control.held[last]) {
        let (before, of) = last.get();
        let merged = Run { pages: before.pages + run.pages, ..before };
        // As one word, so that a death leaves either the old or the new run.
        if of == owner && before.end_page() == run.start_page && alloc::is_one_run(merged) {
            last.run.store(to_word(merged), Relaxed);
            point::pass("held-noted");
            return true;
        }
    }
    if count == HELD || segment.allocate_entries(List::Held, count + 1).is_err() {
        return false;
    }
    control.held[count].set(found);
    control.held_count.store(count as u64 + 1, Release);
    point::pass("held-noted");
    true
}

/// Frees held runs that are no longer pinned, and then calls [`release`].
pub(crate) fn look_again(locked: &Locked<'_>, pins: &PinPlaces) {
    let control = locked.control();
    if control.held_count.load(Relaxed) != 0 || control.moved_count.load(Relaxed) != 0 {
        let look = Look::new(locked, pins);
        drop_unless(&control.held, &control.held_count, |found| {
            let is_kept = look.keeps(found);
            if !is_kept {
                alloc::mark_free(locked, found.0);
                point::pass("held-freed");
            }
            is_kept
        });
    }
    control.freed_looked_lsn.store(u64::MAX, Relaxed);
    release(locked, pins);
}

/// Finishes the step of a dead process: a run that it was moving is in both lists.
pub(crate) fn settle(control: &Control) {
    let first = control.freed_first.load(Relaxed);
    let count = control.held_count.load(Relaxed) as usize;
    if first == control.freed_next.load(Relaxed) || count == 0 {
        return;
    }
    let ((run, owner), (held, of)) =
        (entry(control, first).kept.get(), control.held[count - 1].get());
    if owner == of && held.start_page <= run.start_page && run.end_page() <= held.end_page() {
        control.freed_first.store(first + 1, Release);
    }
}

/// Forgets everything: in a pool that was just recovered, no inode names freed pages, and there are
/// no pins.
pub(crate) fn forget(locked: &Locked<'_>) {
    let control = locked.control();
    control.freed_first.store(control.freed_next.load(Relaxed), Relaxed);
    control.behind_tail_pages.store(0, Relaxed);
    control.held_count.store(0, Relaxed);
    control.moved_count.store(0, Relaxed);
}

/// Freed runs that wait for the tail, and those that wait for pins.
pub(crate) fn waiting(control: &Control) -> (impl Iterator<Item = Run>, impl Iterator<Item = Run>) {
    let ring = control.freed_first.load(Relaxed)..control.freed_next.load(Relaxed);
    let held = (control.held_count.load(Relaxed) as usize).min(HELD);
    (
        ring.take(FREED).map(|index| entry(control, index).kept.get().0),
        control.held[..held].iter().map(|kept| kept.get().0),
    )
}

/// How many of the freed pages a checkpoint would free now: those that no pin keeps.
pub(crate) fn freeable_pages(locked: &Locked<'_>, pins: &PinPlaces) -> u64 {
    let control = locked.control();
    let ring = control.freed_first.load(Relaxed)..control.freed_next.load(Relaxed);
    let held = control.held_count.load(Relaxed) as usize;
    if ring.is_empty() && held == 0 {
        return 0;
    }
    let look = Look::new(locked, pins);
    let ring = ring.map(|index| entry(control, index).kept.get());
    let all = ring.chain(control.held[..held].iter().map(Kept::get));
    all.filter(|found| !look.keeps(*found)).map(|(run, _)| run.pages).sum()
}

/// Counts the pages that wait for the tail. Not those that it has passed: these wait for pins, and
/// no checkpoint frees them.
pub(crate) fn count_behind_tail(control: &Control) {
    let tail_lsn = control.tail_lsn.load(Relaxed);
    let pages = (control.freed_first.load(Relaxed)..control.freed_next.load(Relaxed))
        .rev()
        .take(FREED)
        .map(|index| entry(control, index))
        .take_while(|freed| freed.lsn.load(Relaxed) > tail_lsn)
        .map(|freed| freed.kept.get().0.pages)
        .sum();
    control.behind_tail_pages.store(pages, Relaxed);
}

/// The tail, if so many pages wait for it to move that a checkpoint is due: more than a quarter of
/// the free ones, and enough to be worth one.
pub(crate) fn due_tail(locked: &Locked<'_>) -> Option<u64> {
    const LEAST_PART: u64 = 64;
    let control = locked.control();
    let least_pages = locked.handle().layout.page_count / LEAST_PART;
    let most_pages = (control.free_count.load(Relaxed) / 4).max(least_pages);
    (control.behind_tail_pages.load(Relaxed) > most_pages).then(|| control.tail_lsn.load(Relaxed))
}

/// The runs that records between these positions have freed, in no order: there may be 65,536, too
/// many to sort while the metadata mutex is held. Nothing names them at `end_lsn`, if the log is not
/// durable up to there: pages are reused only after that.
pub(crate) fn freed_between(locked: &Locked<'_>, lsn: u64, end_lsn: u64) -> Vec<Run> {
    let control = locked.control();
    // What later records have freed has a name at `end_lsn`.
    let is_before = |freed_lsn| {
        freed_lsn <= end_lsn || mutant::is(locked.handle().mutant, Mutant::FreedTooEarly)
    };
    (control.freed_first.load(Relaxed)..control.freed_next.load(Relaxed))
        .rev()
        .take(FREED)
        .map(|index| entry(control, index))
        .take_while(|freed| freed.lsn.load(Relaxed) > lsn)
        .filter(|freed| is_before(freed.lsn.load(Relaxed)))
        .map(|freed| freed.kept.get().0)
        .collect()
}

/// Whether a change that frees at most `freed` runs can be noted.
///
/// # Errors
/// [`PoolError::TooManyRuns`] if it never can; [`PoolError::SharedMemory`] if the lists get no
/// memory.
pub(crate) fn has_room(locked: &Locked<'_>, change: &Change, freed: usize) -> Result<bool> {
    let control = locked.control();
    let moved = change.moved().len();
    if moved > MOVED || freed > FREED {
        return Err(PoolError::TooManyRuns { freed, most_freed: FREED, moved, most_moved: MOVED });
    }
    let moved_count = control.moved_count.load(Relaxed) as usize;
    if freed_left(control) < freed || MOVED - moved_count < moved {
        return Ok(false);
    }
    let segment = &locked.handle().segment;
    segment.allocate_entries(List::Freed, freed_to(control, freed))?;
    segment.allocate_entries(List::Moved, moved_count + moved)?;
    Ok(true)
}

/// Returns an error if freed or moved runs wait for pins, and not only for the tail.
pub(crate) fn check_not_pinned(locked: &Locked<'_>) -> Result<()> {
    let control = locked.control();
    let held_runs = control.held_count.load(Relaxed);
    if held_runs as usize == HELD || control.moved_count.load(Relaxed) > 0 {
        Err(PoolError::TooMuchPinned { held_runs })
    } else {
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::background::Worker;

    use super::*;
    use crate::format::file::{FileInode, FileKind};
    use crate::format::slots::ChangeSlots;
    use crate::metadata::repair;
    use crate::metadata::transaction::{Durability, Transaction};
    use crate::pool::Pool;

    fn owned(inode: u64, start_page: u64, pages: u64) -> Owned {
        (Run { start_page, pages }, PinValue::of_freed(inode, 3))
    }

    #[test]
    fn pages_that_stay_are_not_freed() {
        let before = vec![owned(1, 10, 10), owned(2, 30, 5)];
        let after = [owned(1, 12, 3), owned(3, 30, 1), owned(3, 34, 9)];
        let left = without(before, runs_of(&after));
        assert_eq!(left, [owned(1, 10, 2), owned(1, 15, 5), owned(2, 31, 3)]);
    }

    #[test]
    fn pages_that_change_their_inode_are_found() {
        let before = [owned(1, 10, 10), owned(2, 20, 5), owned(2, 25, 5)];
        let after = [owned(1, 10, 4), owned(2, 14, 8), owned(3, 22, 3), owned(3, 25, 1)];
        let moved = between_inodes(&before, &after);
        assert_eq!(moved, [owned(1, 14, 6), owned(2, 22, 4)]);
        assert_eq!(between_inodes(&before, &before), []);
    }

    /// A view keeps so many runs that the ring waits for it: then no checkpoint frees what is in it.
    #[test]
    fn what_only_pins_keep_calls_for_no_checkpoint() {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let options = Pool::options().log_bytes(64 << 10).exclusive(true).background(false);
        let pool = options.create(directory.path().join("pool"), 4 << 20).unwrap();
        let (core, control) = (pool.core(), pool.core().handle.control());
        // A thread that makes no checkpoint.
        let bell = core.checkpointer.get_or_init(|| Worker::new(c"test", |_| true)).bell();
        let create = |pages| {
            let reservation = pool.reserve(pages, 1).unwrap();
            let runs = reservation.runs().to_vec();
            core.transact(Durability::Later, vec![reservation], |transaction| {
                let number = transaction.take_slot()?;
                let generation = transaction.new_generation(number)?;
                let mut file = FileInode::new(FileKind::File, number, generation);
                (file.runs, file.pages) = (runs.clone(), pages);
                ChangeSlots::put(transaction, number, file.encode().unwrap());
                Ok::<_, PoolError>(file)
            })
            .unwrap()
        };
        let remove = |file: &FileInode| {
            let remove = |transaction: &mut Transaction<'_>| transaction.give_back(file.number);
            core.transact(Durability::Later, vec![], remove).unwrap();
        };
        let is_due = || due_tail(&core.log.lock().unwrap()).is_some();
        let [pinned, other, another] = [300, 200, 200].map(create);
        let _pin = pool.pin(pinned.number, pinned.layout_version).unwrap();
        let owner = PinValue::of_freed(pinned.number, pinned.layout_version);
        for (index, kept) in (0..).zip(&control.held) {
            kept.set((Run { start_page: 2 * index, pages: 1 }, owner));
        }
        control.held_count.store(HELD as u64, Relaxed);

        let before = bell.ticket();
        remove(&pinned);
        let rung = bell.ticket();
        assert!(is_due() && rung != before);
        pool.checkpoint().unwrap();
        assert_eq!(waiting(control).0.map(|run| run.pages).sum::<u64>(), 300);
        for _ in 0..5 {
            remove(&create(1));
            assert!(!is_due() && bell.ticket() == rung);
            pool.checkpoint().unwrap();
        }
        // What the tail has not passed calls for one, once.
        remove(&other);
        let rung_again = bell.ticket();
        assert!(is_due() && rung_again != rung);
        remove(&another);
        assert!(is_due() && bell.ticket() == rung_again);
        repair::rebuild(&core.log.lock().unwrap()).unwrap();
        assert!(is_due());
        pool.checkpoint().unwrap();
        assert!(!is_due());
        // The runs in it were never freed.
        control.held_count.store(0, Relaxed);
    }
}
