//! Takes that scan only pages with recorded faults: no store is lost, whichever thread makes it, and
//! whatever becomes of its record.
//!
//! Each test is a process of its own, because every thread of a process counts.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use aquifer_sys::memory::Protection;
use aquifer_sys::page_faults::FaultLog;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child;
use aquifer_testkit::rng::Rng;
use aquifer_vm::dirty::{DirtyTracker, Stores, TrackedKind, TrackerForm};
use aquifer_vm::fixed::{FixedRange, random_base};

const PAGE: usize = 4096;
const PAGES: usize = 3000;

/// A tracked mapping, and the pages stored to since the last take.
struct Tracked {
    tracker: DirtyTracker,
    range: FixedRange,
    stored: BTreeSet<usize>,
    _file: Option<File>,
}

impl Tracked {
    fn new(is_file: bool) -> Tracked {
        let len_bytes = (PAGES * PAGE) as u64;
        let base = random_base(len_bytes, &[]).unwrap();
        let file = is_file.then(|| {
            let file = tempfile::tempfile().unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &vec![7; PAGES * PAGE], 0).unwrap();
            file
        });
        let range = match &file {
            Some(file) => {
                FixedRange::map_private(base, len_bytes, Protection::ReadWrite, file.as_fd(), 0)
            }
            None => FixedRange::map_anonymous(base, len_bytes),
        }
        .unwrap();
        let kind = if is_file { TrackedKind::PrivateFile } else { TrackedKind::Anonymous };
        let form = Some(TrackerForm::Scan);
        // SAFETY: a private mapping that no other code uses.
        let tracker = unsafe { DirtyTracker::new(range.address(), len_bytes, form, kind) };
        Tracked { tracker: tracker.unwrap(), range, stored: BTreeSet::new(), _file: file }
    }

    fn page(&self, page: usize) -> usize {
        self.range.address().addr() + page * PAGE
    }

    fn take(&mut self, what: &str, stores: Stores) {
        let mut runs = Vec::new();
        self.tracker.take(stores, &mut |_| true, &mut runs).unwrap();
        let taken: BTreeSet<usize> =
            runs.iter().flat_map(|run| run.pages()).map(|page| page.0 as usize).collect();
        let lost: Vec<_> = self.stored.difference(&taken).collect();
        assert!(lost.is_empty(), "{what}: lost {lost:?}");
        assert!(taken == self.stored, "{what}: {taken:?} instead of {:?}", self.stored);
        self.stored.clear();
    }
}

/// Stores to one byte of each page.
fn store(addresses: &[usize]) {
    for &address in addresses {
        // SAFETY: inside a mapping of the test; other threads do not access it at the same time.
        unsafe { (address as *mut u8).add(9).write_volatile(1) };
    }
}

/// A thread that stores where it is told, and answers when it has.
struct Storing {
    orders: Sender<Vec<usize>>,
    thread: JoinHandle<()>,
    answers: std::sync::mpsc::Receiver<()>,
}

impl Storing {
    fn start() -> Storing {
        let (orders, received) = channel::<Vec<usize>>();
        let (answer, answers) = channel();
        let thread = std::thread::spawn(move || {
            for order in received {
                store(&order);
                answer.send(()).unwrap();
            }
        });
        Storing { orders, thread, answers }
    }

    fn end(self) {
        drop(self.orders);
        self.thread.join().unwrap();
    }
}

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("permitted", permitted), ("refused", refused), ("ends", ends), ("uncounted", uncounted)];

#[test]
fn no_store_is_lost() {
    child::succeeds("permitted");
}

#[test]
fn no_store_is_lost_where_recording_is_refused() {
    child::succeeds("refused");
}

/// Threads that start after a sandbox was entered have no logs.
#[test]
fn no_store_is_lost_where_recording_is_refused_later() {
    child::succeeds("ends");
}

#[test]
fn no_store_is_lost_where_counting_is_refused() {
    child::succeeds("uncounted");
}

fn permitted() {
    let (narrow, takes) = store_and_take();
    if FaultLog::open(0).is_ok() {
        assert!(narrow > takes / 4, "{narrow} of {takes}");
    }
}

fn refused() {
    if forbid(libc::SYS_perf_event_open, libc::EPERM) {
        let (narrow, takes) = store_and_take();
        assert!(takes > 0 && narrow == 0);
    }
}

/// Without the kernel's count no take knows that all faults were recorded.
fn uncounted() {
    store_and_take();
    if forbid(libc::SYS_getrusage, libc::EPERM) {
        let (narrow, takes) = store_and_take();
        assert!(takes > 0 && narrow == 0);
    }
}

fn ends() {
    store_and_take();
    if forbid(libc::SYS_perf_event_open, libc::EACCES) {
        store_and_take();
    }
}

/// Lets the calling thread, and those that it starts, make no such call.
fn forbid(call: libc::c_long, errno: i32) -> bool {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let filter = [
        // The number of the call is the first word of what a filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: call as u32,
        },
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: no memory is involved.
    let privileged = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0;
    // SAFETY: `program` and `filter` outlive the call, which copies them.
    let is_forbidden = !privileged
        && unsafe {
            let mode = libc::SECCOMP_MODE_FILTER;
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program, 0, 0) == 0
        };
    if !is_forbidden {
        println!("skipped: cannot install a seccomp filter");
    }
    is_forbidden
}

/// Stores in all ways, and takes. Returns how many takes scanned only pages with faults, and how
/// many there were.
fn store_and_take() -> (usize, usize) {
    if let Err(error) = TrackerForm::Scan.available() {
        println!("skipped: {error}");
        return (1, 1);
    }
    let seed = seed(1);
    let mut rng = Rng::new(seed);
    let mut both = [Tracked::new(true), Tracked::new(false)];
    // Started before any log is opened.
    let mut threads: Vec<Storing> = (0..3).map(|_| Storing::start()).collect();
    let zero = File::open("/dev/zero").unwrap();
    let (mut takes, mut narrow) = (0, 0);
    for step in 0..steps(4000) {
        let what = format!("seed {seed}, step {step}");
        let kind = rng.below(400);
        let many = match rng.below(60) {
            // More than is scanned page by page, and more than a log has room for.
            0 => 100,
            1 => 2600,
            _ => rng.below(5),
        };
        let one = &mut both[rng.below(2) as usize];
        let pages: BTreeSet<usize> = (0..many).map(|_| rng.below(PAGES as u64) as usize).collect();
        let addresses: Vec<usize> = pages.iter().map(|&page| one.page(page)).collect();
        one.stored.extend(&pages);
        match kind {
            // A thread that nothing knows.
            0..4 => std::thread::spawn(move || store(&addresses)).join().unwrap(),
            // System calls.
            4..12 => {
                for &address in &addresses {
                    // SAFETY: inside a mapping of the test, to which no references exist.
                    let got =
                        unsafe { libc::pread(zero.as_raw_fd(), address as *mut _, PAGE / 2, 0) };
                    assert_eq!(got, PAGE as isize / 2);
                }
            }
            12..16 => {
                let old = rng.below(threads.len() as u64) as usize;
                threads.swap_remove(old).end();
                threads.push(Storing::start());
                store(&addresses);
            }
            // Afterwards this process's pages are shared with the child's until they are stored to.
            16..20 => {
                // SAFETY: the child makes async-signal-safe calls only.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: ends the child.
                    unsafe { libc::_exit(0) };
                }
                store(&addresses);
                let mut status = 0;
                // SAFETY: waits for the child made above.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            }
            _ if kind.is_multiple_of(2) => store(&addresses),
            _ => {
                let thread = &threads[rng.below(threads.len() as u64) as usize];
                thread.orders.send(addresses).unwrap();
                thread.answers.recv().unwrap();
            }
        }
        // Loads fault as well.
        for _ in 0..rng.below(3) {
            let address = both[0].page(rng.below(PAGES as u64) as usize) as *const u8;
            // SAFETY: inside a mapping of the test.
            unsafe { address.read_volatile() };
        }
        for one in &mut both {
            if rng.chance(0.8) {
                let stores = if rng.chance(0.1) { Stores::InProgress } else { Stores::Excluded };
                let before = one.tracker.complete_scans();
                one.take(&what, stores);
                let is_narrow = one.tracker.complete_scans() == before;
                assert!(!is_narrow || stores == Stores::Excluded, "{what}");
                takes += 1;
                narrow += usize::from(is_narrow);
            }
        }
    }
    println!("{narrow} of {takes} takes scanned only pages with faults");
    threads.into_iter().for_each(Storing::end);
    (narrow, takes)
}
