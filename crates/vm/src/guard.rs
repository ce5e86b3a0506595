//! Turns faults on a mapping that the kernel serves into errors, inside calls that return `Result`.
//!
//! A load from the mapping of a truncated or unreadable file raises SIGBUS. Loads that Aquifer
//! makes itself report failure instead (`aquifer_sys::fallible`). Loads in an application's closure
//! cannot. While such a closure runs, a guard marks its thread, and the fault handler replaces the
//! faulting page by a zero page, so that the closure can finish. Its result is then discarded, the
//! file is mapped again, and the call returns an error.
//!
//! Until then *other* threads see the zero page too. Calls on the same mapping detect that from the
//! count of replacements and discard what they read; a bare load cannot.
//!
//! The guards of a thread form a list through its stack, innermost first. The handler runs in the
//! same thread: the fields are atomics only to tell the compiler that they may change.
//!
//! If the file cannot be mapped again at once (its path names another file, no descriptors are
//! left), the next call retries.
//!
//! # Invariant
//! The count of replacements is incremented before a zero page appears and decremented after the
//! file is mapped again.

use std::cell::Cell;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence};
use std::sync::{Mutex, PoisonError};

use aquifer_sys::fallible;
use aquifer_sys::memory::{self, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::signal::FaultContext;

use crate::fault_owner::Served;

thread_local! {
    /// Const-initialised and without a destructor: the handler's access does not allocate.
    static INNERMOST: Cell<*const Guard> = const { Cell::new(ptr::null()) };
}

/// Increment for one replacement (both halves), and mask of the number in force.
const REPLACEMENT: u64 = 1 << 32 | 1;
const IN_FORCE: u64 = (1 << 32) - 1;

/// A mapping whose unreadable pages are replaced while closures access it.
#[derive(Debug)]
pub struct Replaceable {
    /// Unit of replacement: the page size of the mapping.
    unit_bytes: usize,
    /// Whether the mapping has no fault owner in the arena: then [`serve_unowned`] serves its
    /// faults.
    is_unowned: bool,
    /// Replacements by zero pages: total (high half), in force (low half).
    replacements: AtomicU64,
    /// Replacements that outlived their call because the file could not be mapped again.
    left: Mutex<Left>,
    bare: Bare,
}

/// Replacements under bare faults, as a handler notes them.
#[derive(Debug)]
struct Bare {
    /// Bounds that contain all of them. They only grow: mapping the file again where it is mapped changes nothing.
    start: AtomicUsize,
    end: AtomicUsize,
    count: AtomicU64,
}

impl Bare {
    const fn new() -> Bare {
        Bare {
            start: AtomicUsize::new(usize::MAX),
            end: AtomicUsize::new(0),
            count: AtomicU64::new(0),
        }
    }
}

/// Replacements that have not been undone.
#[derive(Debug)]
struct Left {
    /// Bounds that contain all of them.
    start: usize,
    end: usize,
    count: u64,
}

const NOTHING_LEFT: Left = Left { start: usize::MAX, end: 0, count: 0 };

impl Default for Left {
    fn default() -> Self {
        NOTHING_LEFT
    }
}

/// Why the bytes of a mapping could not be accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// The page at this address could not be read.
    Failed {
        /// The first such address.
        address: usize,
        /// Whether the file ends before it.
        truncated: bool,
    },
    /// Another thread's closure faulted at the same time: the bytes read may be from its zero page.
    Unsettled,
}

/// Addresses under a guard of the calling thread.
#[derive(Debug, Clone, Copy)]
pub struct Guarded {
    /// Behind the last address, or where the file was found to end.
    pub end: usize,
    /// Whether the file was already found to end.
    pub has_ended: bool,
    /// Whether so many pages are missing that replacing them one by one could use up the mappings
    /// of the process.
    pub has_many_gone: bool,
}

/// Limit of pages replaced one by one under a guard: each may cost two mappings of the 65,530.
const MANY: u32 = 1024;

impl Default for Replaceable {
    fn default() -> Self {
        Replaceable::new()
    }
}

impl Replaceable {
    /// A mapping in the arena, without replacements.
    pub const fn new() -> Replaceable {
        Replaceable {
            unit_bytes: SMALL_PAGE_BYTES,
            is_unowned: false,
            replacements: AtomicU64::new(0),
            left: Mutex::new(NOTHING_LEFT),
            bare: Bare::new(),
        }
    }

    /// A mapping outside the arena, with pages of this size.
    pub const fn outside_arena(unit_bytes: usize) -> Replaceable {
        Replaceable { unit_bytes, is_unowned: true, ..Replaceable::new() }
    }

    /// Maps the file again where earlier calls could not, or bare faults were answered. Returns whether that succeeded.
    #[cold]
    pub fn settle(&self, mut map_again: impl FnMut(Range<usize>) -> bool) -> bool {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        // Acquire pairs with the release in `replace_bare`: the bounds contain what is counted.
        let bare = self.bare.count.swap(0, Ordering::Acquire);
        if bare > 0 {
            left.start = left.start.min(self.bare.start.load(Ordering::Relaxed));
            left.end = left.end.max(self.bare.end.load(Ordering::Relaxed));
            left.count += bare;
        }
        let is_back = left.count > 0 && map_again(left.start..left.end);
        if is_back {
            self.replacements.fetch_sub(left.count, Ordering::AcqRel);
            *left = NOTHING_LEFT;
        }
        is_back
    }

    fn leave(&self, addresses: Range<usize>, count: u64) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.start = left.start.min(addresses.start);
        left.end = left.end.max(addresses.end);
        left.count += count;
    }

    /// Whether no page is replaced at the moment.
    pub fn is_settled(&self) -> bool {
        // Acquire: pairs with the release in `replace`.
        self.replacements.load(Ordering::Acquire) & IN_FORCE == 0
    }

    /// Runs `access`, and returns whether everything it read was the file's.
    #[inline]
    pub fn is_settled_during<T>(&self, access: impl FnOnce() -> T) -> (T, bool) {
        // Acquire, here and below, pairs with the handler's increment before the zero page appears.
        let before = self.replacements.load(Ordering::Acquire);
        let value = access();
        fence(Ordering::Acquire);
        let after = self.replacements.load(Ordering::Acquire);
        (value, before & IN_FORCE == 0 && before == after)
    }

    /// Copies out of the mapping; false if a byte cannot be read, or may not be the file's.
    ///
    /// # Safety
    /// `target.len()` bytes from `source` are mapped, in this mapping.
    pub unsafe fn try_copy(&self, source: *const u8, target: &mut [u8]) -> bool {
        // SAFETY: forwarded to the caller.
        unsafe { self.try_copy_and_tell(source, target) == (true, true) }
    }

    /// Whether all bytes could be read, and whether they are the file's.
    unsafe fn try_copy_and_tell(&self, source: *const u8, target: &mut [u8]) -> (bool, bool) {
        self.is_settled_during(|| {
            // SAFETY: the source is mapped, as the caller states; the target is borrowed.
            unsafe { fallible::try_copy(source, target.as_mut_ptr(), target.len()) }
        })
    }

    /// Copies out of the mapping, where earlier calls could not map the file again after doing so;
    /// false if a byte cannot be read.
    ///
    /// # Safety
    /// As for [`Replaceable::try_copy`].
    pub unsafe fn copy(
        &self,
        source: *const u8,
        target: &mut [u8],
        map_again: impl FnMut(Range<usize>) -> bool,
    ) -> bool {
        if !fallible::SUPPORTED {
            let addresses = source.addr()..source.addr() + target.len();
            let copied = self.guarded(addresses, map_again, || {
                // SAFETY: the source is mapped, as the caller states, and the guard catches faults;
                // the target is borrowed.
                unsafe { memory::copy_racy(source, target.as_mut_ptr(), target.len()) };
            });
            return copied.is_ok();
        }
        // SAFETY: forwarded to the caller.
        match unsafe { self.try_copy_and_tell(source, target) } {
            // SAFETY: as above.
            (true, false) if self.settle(map_again) => unsafe { self.try_copy(source, target) },
            outcome => outcome == (true, true),
        }
    }

    /// Runs `access` and turns faults at the pages of `addresses` into an error. `map_again` maps
    /// the file where zero pages are and returns whether it could; it also runs when `access`
    /// panics.
    pub fn guarded<T>(
        &self,
        addresses: Range<usize>,
        mut map_again: impl FnMut(Range<usize>) -> bool,
        access: impl FnOnce() -> T,
    ) -> Result<T, Trouble> {
        if !self.is_settled() {
            self.settle(&mut map_again);
        }
        let unit_bytes = self.unit_bytes;
        let pages =
            addresses.start / unit_bytes * unit_bytes..addresses.end.next_multiple_of(unit_bytes);
        let guard = Guard::new(self, pages);
        // Dropped after the mark.
        let restore = Restore { guard: &guard, map_again };
        let (value, is_settled) = self.is_settled_during(|| {
            let _entered = guard.enter();
            access()
        });
        drop(restore);
        let address = guard.failed_at.load(Ordering::Relaxed);
        if address != 0 {
            let truncated = guard.ended_from.load(Ordering::Relaxed) < guard.end;
            return Err(Trouble::Failed { address, truncated });
        }
        if is_settled { Ok(value) } else { Err(Trouble::Unsettled) }
    }

    /// Replaces the page of a failed guarded load of this thread by a zero page or, if the file has
    /// ended, all pages up to the end of the guarded addresses. Called by the fault handler;
    /// returns whether the load can be repeated.
    ///
    /// # Safety
    /// The guarded addresses are this mapping's, and no references into them exist.
    pub unsafe fn replace(&self, address: usize, truncated: bool) -> bool {
        let Some(guard) = self.covering(address) else { return false };
        let start = address / self.unit_bytes * self.unit_bytes;
        let end = if truncated { guard.rest_end(start) } else { start + self.unit_bytes };
        // Release pairs with the acquire loads in `is_settled` and `is_settled_during`, which
        // validate what was read.
        self.replacements.fetch_add(REPLACEMENT, Ordering::AcqRel);
        // SAFETY: forwarded to the caller.
        let replaced =
            unsafe { memory::map_anonymous_at(start as *mut u8, end - start, Protection::Read) };
        if replaced.is_err() {
            self.replacements.fetch_sub(1, Ordering::AcqRel);
            return false;
        }
        guard.note(start, end, truncated);
        true
    }

    /// Replaces pages under a load or store that no call guards. They stay until the next call that settles. Called by the
    /// fault handler; returns whether the access can be repeated.
    ///
    /// # Safety
    /// The pages are this mapping's, hold no stores, and no references into them exist.
    pub unsafe fn replace_bare(&self, pages: Range<usize>, protection: Protection) -> bool {
        // Release pairs with the acquires in `is_settled` and `is_settled_during`, as in `replace`.
        self.replacements.fetch_add(REPLACEMENT, Ordering::AcqRel);
        // SAFETY: forwarded to the caller.
        let replaced = unsafe {
            memory::map_anonymous_at(pages.start as *mut u8, pages.end - pages.start, protection)
        };
        if replaced.is_err() {
            self.replacements.fetch_sub(1, Ordering::AcqRel);
            return false;
        }
        self.bare.start.fetch_min(pages.start, Ordering::Relaxed);
        self.bare.end.fetch_max(pages.end, Ordering::Relaxed);
        // Release pairs with the acquire in `settle`.
        self.bare.count.fetch_add(1, Ordering::Release);
        true
    }

    /// Whether very many pages were replaced under bare faults since the file was mapped there again.
    pub fn has_many_bare(&self) -> bool {
        // Relaxed: a bound.
        self.bare.count.load(Ordering::Relaxed) >= MANY.into()
    }

    /// Serves a fault that the calling thread guards, one page at a time, so that other threads
    /// lose no readable page. After very many missing pages, replaces all the rest. Called by the
    /// fault handler.
    ///
    /// # Safety
    /// As for [`Replaceable::replace`].
    pub unsafe fn serve(&self, fault: &FaultContext) -> Served {
        // SAFETY: forwarded to the caller.
        unsafe { self.serve_unless(fault, |_| false) }
    }

    /// As [`Replaceable::serve`], but after very many missing pages first asks whether the last of
    /// the guarded pages, at the address passed to `is_there`, is readable; then replaces one page
    /// only.
    ///
    /// # Safety
    /// As for [`Replaceable::replace`].
    pub unsafe fn serve_unless(
        &self,
        fault: &FaultContext,
        is_there: impl FnOnce(usize) -> bool,
    ) -> Served {
        let Some(guarded) = self.guarded_in(fault) else { return Served::No };
        let last = guarded.end - self.unit_bytes;
        let has_ended = guarded.has_ended || guarded.has_many_gone && !is_there(last);
        // SAFETY: forwarded to the caller.
        if unsafe { self.replace(fault.address, has_ended) } { Served::Yes } else { Served::No }
    }

    /// The addresses that the calling thread guards around a failed load of a byte that cannot be
    /// read. `None` for other faults: a store to a read-only mapping raises SIGSEGV, and a fallible
    /// load handles its own fault. Async-signal-safe.
    pub fn guarded_in(&self, fault: &FaultContext) -> Option<Guarded> {
        let is_read = fault.signal == libc::SIGBUS && !fault.fallible;
        if is_read { self.guarded_around(fault.address) } else { None }
    }

    /// The addresses that the calling thread guards around `address`. Async-signal-safe.
    pub fn guarded_around(&self, address: usize) -> Option<Guarded> {
        // Relaxed: the guard belongs to this thread.
        self.covering(address).map(|guard| Guarded {
            end: guard.rest_end(address),
            has_ended: guard.ended_from.load(Ordering::Relaxed) < guard.end,
            has_many_gone: guard.replacements.load(Ordering::Relaxed) >= MANY,
        })
    }

    /// The innermost guard of the calling thread that covers `address` in this mapping.
    /// Async-signal-safe.
    fn covering(&self, address: usize) -> Option<&Guard> {
        Guard::innermost(address, |guard| ptr::eq(guard.mapping, self))
    }
}

/// Serves a fault at an address outside the arena, if the calling thread guards it.
/// Async-signal-safe.
pub(crate) fn serve_unowned(fault: &FaultContext) -> Served {
    // SAFETY: a guard in the list is alive, and so is its mapping.
    let mapping = |guard: &Guard| unsafe { &*guard.mapping };
    match Guard::innermost(fault.address, |guard| mapping(guard).is_unowned) {
        // SAFETY: the guarded addresses are the mapping's, and no references into them exist.
        Some(guard) => unsafe { mapping(guard).serve(fault) },
        None => Served::No,
    }
}

/// A call in progress that turns faults into errors.
struct Guard {
    mapping: *const Replaceable,
    start: usize,
    end: usize,
    outer: Cell<*const Guard>,
    /// The first address that could not be read, or 0.
    failed_at: AtomicUsize,
    /// Start of the part replaced as a whole because the file has ended; `usize::MAX` if none.
    ended_from: AtomicUsize,
    /// Bounds of the pages replaced by zero pages.
    replaced_start: AtomicUsize,
    replaced_end: AtomicUsize,
    replacements: AtomicU32,
}

impl Guard {
    fn new(mapping: &Replaceable, addresses: Range<usize>) -> Guard {
        Guard {
            mapping,
            start: addresses.start,
            end: addresses.end,
            outer: Cell::new(ptr::null()),
            failed_at: AtomicUsize::new(0),
            ended_from: AtomicUsize::new(usize::MAX),
            replaced_start: AtomicUsize::new(usize::MAX),
            replaced_end: AtomicUsize::new(0),
            replacements: AtomicU32::new(0),
        }
    }

    /// The innermost guard of the calling thread that covers `address` and for which `is_wanted`.
    /// Async-signal-safe.
    fn innermost<'a>(address: usize, is_wanted: impl Fn(&Guard) -> bool) -> Option<&'a Guard> {
        let mut at = INNERMOST.get();
        // SAFETY: guards in the list are alive: each is unlinked before it leaves its stack frame,
        // and the handler that walks the list has interrupted this very thread.
        while let Some(guard) = unsafe { at.as_ref() } {
            if (guard.start..guard.end).contains(&address) && is_wanted(guard) {
                return Some(guard);
            }
            at = guard.outer.get();
        }
        None
    }

    /// Marks the thread until the result is dropped.
    fn enter(&self) -> Entered<'_> {
        self.outer.set(INNERMOST.get());
        INNERMOST.set(self);
        // Sets the mark before the first load of the guarded code.
        compiler_fence(Ordering::SeqCst);
        Entered { guard: self }
    }

    /// The end of the addresses from `start` on that were not replaced as a whole.
    fn rest_end(&self, start: usize) -> usize {
        let ended_from = self.ended_from.load(Ordering::Relaxed);
        // Behind that, another thread's call may have mapped the file again.
        if start < ended_from { self.end.min(ended_from) } else { self.end }
    }

    /// Records that the handler has replaced `start..end` because of a fault there.
    fn note(&self, start: usize, end: usize, truncated: bool) {
        let _ = self.failed_at.compare_exchange(0, start, Ordering::Relaxed, Ordering::Relaxed);
        if truncated {
            self.ended_from.fetch_min(start, Ordering::Relaxed);
        }
        self.replaced_start.fetch_min(start, Ordering::Relaxed);
        self.replaced_end.fetch_max(end, Ordering::Relaxed);
        self.replacements.fetch_add(1, Ordering::Relaxed);
    }
}

/// The mark of a thread inside a guarded call.
struct Entered<'a> {
    guard: &'a Guard,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        INNERMOST.set(self.guard.outer.get());
    }
}

/// Maps the file again, when dropped, where a guarded call had pages replaced.
struct Restore<'a, F: FnMut(Range<usize>) -> bool> {
    guard: &'a Guard,
    map_again: F,
}

impl<F: FnMut(Range<usize>) -> bool> Drop for Restore<'_, F> {
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        let replacements = self.guard.replacements.load(Ordering::Relaxed);
        if replacements == 0 {
            return;
        }
        let start = self.guard.replaced_start.load(Ordering::Relaxed);
        let end = self.guard.replaced_end.load(Ordering::Relaxed);
        // SAFETY: the guard was made from a reference that its caller still holds.
        let mapping = unsafe { &*self.guard.mapping };
        if (self.map_again)(start..end) {
            mapping.replacements.fetch_sub(u64::from(replacements), Ordering::AcqRel);
        } else {
            // The count stays up, so that no call trusts these pages.
            mapping.leave(start..end, u64::from(replacements));
        }
    }
}
