//! Faults inside a call that returns `Result`, on a kernel-backed mapping.
//!
//! A load from the mapping of a truncated or unreadable file raises SIGBUS. Loads that the engine makes
//! itself report failure instead (`aquifer_sys::fallible`). Loads made by the application's closure in
//! [`Mapping::read`](crate::Mapping::read) cannot; so while such a closure runs, its thread is marked by a
//! [`Guard`], and the fault handler puts a zero page where the fault was, for the closure to finish with.
//! Its result is then discarded, the file is mapped again, and the call returns an error.
//!
//! Meanwhile *other* threads see the zero page too. Calls on the same mapping notice that from the count
//! of replacements (`KernelFile::replacements`) and do not trust what they read; a bare load cannot. The
//! pages are brought in before the closure runs, so a replacement happens only where the file changes, or
//! its pages are reclaimed and cannot be read again, during the closure itself.
//!
//! Guards of a thread form a list through its stack, innermost first. The handler runs in the same
//! thread: the fields are atomics only so that the compiler expects them to change.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, compiler_fence};

use crate::mapping::kernel::KernelFile;

thread_local! {
    /// Initialised at compile time and without a destructor: the handler's access allocates nothing.
    static INNERMOST: Cell<*const Guard> = const { Cell::new(ptr::null()) };
}

/// A call in progress that wants faults as errors.
pub(crate) struct Guard {
    file: *const KernelFile,
    /// Addresses covered: whole pages.
    start: usize,
    end: usize,
    outer: Cell<*const Guard>,
    /// The first address that could not be read, or 0.
    failed_at: AtomicUsize,
    truncated: AtomicBool,
    /// What has been replaced by zero pages lies within these addresses.
    replaced_start: AtomicUsize,
    replaced_end: AtomicUsize,
    replacements: AtomicU32,
}

/// What went wrong under a guard.
pub(crate) struct Failure {
    pub address: usize,
    pub truncated: bool,
    /// Addresses that hold zero pages now, and in how many replacements.
    pub replaced: std::ops::Range<usize>,
    pub replacements: u32,
}

impl Guard {
    pub fn new(file: &KernelFile, start: usize, end: usize) -> Guard {
        Guard {
            file,
            start,
            end,
            outer: Cell::new(ptr::null()),
            failed_at: AtomicUsize::new(0),
            truncated: AtomicBool::new(false),
            replaced_start: AtomicUsize::new(usize::MAX),
            replaced_end: AtomicUsize::new(0),
            replacements: AtomicU32::new(0),
        }
    }

    /// End of the addresses covered.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Marks the thread until the result is dropped.
    pub fn enter(&self) -> Entered<'_> {
        self.outer.set(INNERMOST.get());
        INNERMOST.set(self);
        // The mark is set before the first load of what follows.
        compiler_fence(Ordering::SeqCst);
        Entered { guard: self }
    }

    /// Called by the handler before it replaces `start..end` because of a fault there.
    pub fn note(&self, start: usize, end: usize, truncated: bool) {
        let _ = self.failed_at.compare_exchange(0, start, Ordering::Relaxed, Ordering::Relaxed);
        self.truncated.fetch_or(truncated, Ordering::Relaxed);
        self.replaced_start.fetch_min(start, Ordering::Relaxed);
        self.replaced_end.fetch_max(end, Ordering::Relaxed);
        self.replacements.fetch_add(1, Ordering::Relaxed);
    }

    /// What has gone wrong since the guard was made.
    pub fn failure(&self) -> Option<Failure> {
        compiler_fence(Ordering::SeqCst);
        let address = self.failed_at.load(Ordering::Relaxed);
        (address != 0).then(|| Failure {
            address,
            truncated: self.truncated.load(Ordering::Relaxed),
            replaced: self.replaced_start.load(Ordering::Relaxed)
                ..self.replaced_end.load(Ordering::Relaxed),
            replacements: self.replacements.load(Ordering::Relaxed),
        })
    }
}

/// The mark of a thread inside a guarded call.
pub(crate) struct Entered<'a> {
    guard: &'a Guard,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        INNERMOST.set(self.guard.outer.get());
    }
}

/// The innermost guard of the calling thread that covers `address` in `file`. Async-signal-safe.
pub(crate) fn covering(file: &KernelFile, address: usize) -> Option<&Guard> {
    let mut at = INNERMOST.get();
    // SAFETY: guards in the list are alive: each is unlinked before it leaves its stack frame, and the
    // handler that walks the list has interrupted this very thread.
    while let Some(guard) = unsafe { at.as_ref() } {
        if ptr::eq(guard.file, file) && (guard.start..guard.end).contains(&address) {
            return Some(guard);
        }
        at = guard.outer.get();
    }
    None
}
