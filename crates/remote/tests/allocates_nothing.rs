//! A read can wait in a fault handler: its thread neither allocates nor frees, also when it drops an error.
//! A program of its own: its allocator counts.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use aquifer_device::{Device, DeviceError};
use aquifer_remote::{RemoteError, Tier};

use support::{Answer, Server, pattern, quick, remote};

struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    CALLS.set(CALLS.get() + 1);
}

// SAFETY: passes on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of some work, and its thread's calls of the allocator.
fn counted<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = CALLS.get();
    let result = work();
    (result, CALLS.get() - before)
}

#[test]
fn reads_and_their_errors() {
    let bytes = pattern(100_000, 1);
    let server = Server::new(bytes.clone());
    let device = server.open();
    let mut buffer = vec![0; 50_000];
    let (got, calls) = counted(|| device.read_at(100, &mut buffer));
    assert_eq!((got.unwrap(), calls), (50_000, 0));
    assert!(buffer == bytes[100..50_100]);
    server.plan(|_| Answer::Status(404));
    let (error, calls) = counted(|| device.read_at(100, &mut buffer));
    let error: DeviceError = error.unwrap_err();
    assert_eq!(calls, 0);
    assert!(matches!(remote(&error), RemoteError::NotFound { .. }), "{error}");
    // After all other shares of it: the device's thread ends the last request before it starts the next one.
    server.plan(|_| Answer::Proper);
    device.read_at(50_000, &mut buffer[..10]).unwrap();
    assert_eq!(counted(|| drop(error)).1, 0);
    // Each of them is freed, by the device's thread.
    server.plan(|_| Answer::Status(404));
    let mut errors = vec![];
    for _ in 0..1000 {
        let failed = device.read_at(100, &mut buffer[..10]);
        let Err(DeviceError::Other { source, .. }) = failed else { panic!("{failed:?}") };
        errors.push(Arc::downgrade(&source));
    }
    let kept = errors.iter().filter(|error| error.strong_count() > 0).count();
    assert!(kept < 100, "{kept} errors");
    let (out, calls) = counted(|| device.read_at(100_001, &mut buffer).is_err());
    assert_eq!((out, calls), (true, 0));
}

#[test]
fn reads_with_a_tier() {
    let bytes = pattern(1_000_000, 1);
    let server = Server::new(bytes.clone());
    let directory = tempfile::tempdir().unwrap();
    let tier = Tier::open(directory.path().join("tier")).unwrap();
    tier.set_budget_bytes(10 << 20).unwrap();
    let open = || quick().tier(&tier).open(&server.url()).unwrap();
    let device = open();
    let mut buffer = vec![0; 700_000];
    let (got, calls) = counted(|| device.read_at(100, &mut buffer));
    assert_eq!((got.unwrap(), calls), (700_000, 0), "a miss");
    assert!(buffer == bytes[100..700_100]);
    drop(device);
    let device = open();
    // Whole sub-blocks, parts of them, and the mark of the first use.
    for (at, len) in [(100, 700_000), (4096, 8192), (5000, 10)] {
        let (got, calls) = counted(|| device.read_at(at, &mut buffer[..len]));
        assert_eq!((got.unwrap(), calls), (len, 0), "a hit");
        assert!(buffer[..len] == bytes[at as usize..][..len]);
    }
    assert_eq!(device.stats().tier_bytes, 708_202);
    // A part of it is missing.
    let (got, calls) = counted(|| device.read_at(600_000, &mut buffer[..400_000]));
    assert_eq!((got.unwrap(), calls), (400_000, 0), "a hit and a miss");
    assert!(buffer[..400_000] == bytes[600_000..]);
}
