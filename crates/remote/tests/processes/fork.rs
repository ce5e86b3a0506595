//! Forks. A single test: a child has only the thread that forked.

use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use aquifer_cache::{Cache, PageId};
use aquifer_device::{Batch, Device, DeviceError, IoOperation, Request};
use aquifer_remote::{RemoteDevice, Tier};
use aquifer_sys::lock::{LockKind, LockRange, conflict};

use crate::support::{Answer, Server, pattern, quick};

pub const ROLES: &[aquifer_testkit::child::Role] = &[("forks", forks)];

/// Forks, and returns whether the child's work succeeded; it ends without running any of the parent's code.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the C library keeps its allocator usable in a child; the child leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        aquifer_testkit::child::dies_with_its_parent();
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!done.unwrap_or(false))) };
    }
    succeeds(child)
}

fn succeeds(child: i32) -> bool {
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status == 0
}

/// Transfers next to each other, which share a request; forks in one of its calls.
struct Forking {
    buffer: Vec<u8>,
    started: usize,
    completed: usize,
    /// `next` after so many, or `complete`.
    fork_in_next: Option<usize>,
    child: i32,
}

impl Forking {
    const TRANSFERS: usize = 8;
    const LEN: usize = 4096;

    fn fork(&mut self) {
        // SAFETY: as in `in_child`.
        self.child = unsafe { libc::fork() };
        if self.child == 0 {
            aquifer_testkit::child::dies_with_its_parent();
        }
    }
}

// SAFETY: the memory of the requests is a part of `buffer` each, which only the device writes.
unsafe impl Batch for Forking {
    fn next(&mut self) -> Option<Request> {
        if self.fork_in_next == Some(self.started) {
            self.fork_in_next = None;
            self.fork();
        }
        if self.started == Self::TRANSFERS {
            return None;
        }
        let at = self.started * Self::LEN;
        self.started += 1;
        Some(Request {
            operation: IoOperation::Read,
            offset_bytes: at as u64,
            memory: self.buffer[at..].as_mut_ptr(),
            len_bytes: Self::LEN,
            tag: 0,
        })
    }

    fn complete(&mut self, _tag: u64, result: Result<usize, DeviceError>) {
        assert_eq!(result.unwrap(), Self::LEN);
        self.completed += 1;
        if self.child < 0 && self.completed == 2 {
            self.fork();
        }
    }
}

/// In a child that a batch forks, the device completes nothing.
fn fork_in_batch(device: &impl Device, bytes: &[u8], fork_in_next: Option<usize>) {
    let buffer = vec![0; Forking::TRANSFERS * Forking::LEN];
    let mut batch = Forking { buffer, started: 0, completed: 0, fork_in_next, child: -1 };
    device.run(&mut batch, 64);
    if batch.child == 0 {
        let expected = if fork_in_next.is_some() { 0 } else { 2 };
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(batch.completed != expected)) };
    }
    assert_eq!(batch.completed, Forking::TRANSFERS);
    assert!(batch.buffer == bytes[..batch.buffer.len()]);
    assert!(succeeds(batch.child), "{fork_in_next:?}");
}

/// What a cache in a child leaves for answers bounds the child's requests.
fn children_have_buffers_of_their_own() {
    const THREADS: u64 = 12;
    let server = Server::new(pattern(1 << 20, 1));
    let device = server.open();
    server.plan(|_| Answer::Late(Duration::from_millis(200)));
    assert!(in_child(|| {
        let claimed = device.claim_buffers(0);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let device = &device;
                scope.spawn(move || device.read_at(thread * 50_000, &mut [0; 4096]).unwrap());
            }
        });
        claimed == 8 * 4096
    }));
    // Half of the memory is for requests under way.
    assert!(server.most_at_once() <= 4, "{}", server.most_at_once());
}

#[test]
fn children_have_a_thread_of_their_own() {
    aquifer_testkit::child::succeeds("forks");
}

fn forks() {
    children_have_buffers_of_their_own();
    let bytes = pattern(1_000_000, 1);
    let server = Server::new(bytes.clone());
    let device = Arc::new(server.open());
    let read = |at: usize| {
        let mut buffer = [0; 5000];
        device.read_at(at as u64, &mut buffer).is_ok() && buffer[..] == bytes[at..at + 5000]
    };
    assert!(read(0));
    assert!(in_child(|| read(5000) && in_child(|| read(6000)) && read(7000)));
    assert!(read(10_000));

    // A cache made in the child: its mapping's misses are signals.
    let mapped = |at: usize| {
        let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
        let mapping = cache.map(device.clone()).unwrap();
        // SAFETY: inside the mapping.
        let byte = unsafe { mapping.as_ptr().add(at).read_volatile() };
        byte == bytes[at] && mapping.get::<u8>(at as u64 + 70_000).unwrap() == bytes[at + 70_000]
    };
    assert!(in_child(|| mapped(300_000)));
    assert!(mapped(400_000));

    // A batch that forks: the child leaves it, the parent ends it.
    let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
    let pages = cache.pages(device.clone()).unwrap();
    let parent = std::process::id();
    let (mut visits, mut child) = (0, 0);
    let result = pages.visit_many((0..200).map(PageId), |page, got| {
        assert!(got[0] == bytes[page.0 as usize * 4096]);
        visits += 1;
        if visits == 3 {
            // SAFETY: as in `in_child`.
            child = unsafe { libc::fork() };
            if child == 0 {
                aquifer_testkit::child::dies_with_its_parent();
            }
        }
        ControlFlow::Continue(())
    });
    if std::process::id() != parent {
        let code = i32::from(result.is_ok() || !read(20_000));
        // SAFETY: ends the child.
        unsafe { libc::_exit(code) };
    }
    result.unwrap();
    assert_eq!(visits, 200);
    assert!(succeeds(child));

    for fork_in_next in [None, Some(0), Some(3), Some(8)] {
        fork_in_batch(&device, &bytes, fork_in_next);
    }
    children_of_a_tier(&server, &bytes);
}

/// A child uses its parent's tier, and shares neither its leases nor the locks that tell which openers there are.
fn children_of_a_tier(server: &Server, bytes: &[u8]) {
    let directory = tempfile::tempdir().unwrap();
    let tier = Tier::open(directory.path().join("tier")).unwrap();
    tier.set_budget_bytes(10 << 20).unwrap();
    let open = || quick().tier(&tier).open(&server.url()).unwrap();
    let read = |device: &RemoteDevice, at: usize| {
        let mut buffer = [0; 5000];
        device.read_at(at as u64, &mut buffer).is_ok() && buffer[..] == bytes[at..at + 5000]
    };
    let device = open();
    assert!(read(&device, 0));
    // Its parent has written this, or is about to.
    assert!(in_child(|| read(&device, 0) && read(&device, 500_000)));
    assert!(read(&device, 0) && read(&device, 600_000));

    // A parent that is killed with a lease, because its download does not end; its child lives on, and does nothing.
    server.plan(|number| if number == 0 { Answer::Proper } else { Answer::Silence });
    let files = std::fs::read_dir(tier.path()).unwrap().map(|file| file.unwrap().path());
    let file = files.into_iter().find(|path| path.extension().is_some()).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(file).unwrap();
    let leases = LockRange { offset_bytes: 1 << 60, len_bytes: 0 };
    let is_leased = || conflict(file.as_fd(), leases, LockKind::Exclusive).unwrap().is_some();
    // With it, what it had to write.
    drop(device);
    assert!(!is_leased());
    let (mut is_forked, says) = std::io::pipe().unwrap();
    let (told, end) = std::io::pipe().unwrap();
    // SAFETY: as in `in_child`.
    let parent = unsafe { libc::fork() };
    if parent == 0 {
        aquifer_testkit::child::dies_with_its_parent();
        let device = open();
        std::thread::spawn(move || device.read_at(800_000, &mut [0; 10]).is_err());
        while !is_leased() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: the child makes system calls only.
        if unsafe { libc::fork() } == 0 {
            drop(end);
            let _ = (&says).write(&[1]);
            let _ = (&told).read(&mut [0]);
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        loop {
            std::thread::park();
        }
    }
    is_forked.read_exact(&mut [0]).unwrap();
    assert!(is_leased());
    // SAFETY: the child made above, which was not waited for.
    assert_eq!(unsafe { libc::kill(parent, libc::SIGKILL) }, 0);
    assert!(!succeeds(parent));
    assert!(!is_leased(), "the child has its parent's leases");
    drop(end);
}
