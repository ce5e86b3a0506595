//! What survives a fork: nothing, on purpose.
//!
//! Managed ranges are not copied into a child (`MADV_DONTFORK`), because an inherited userfaultfd
//! still addresses the *parent's* memory: serving a child's fault through it would corrupt the
//! parent. A child is detected by a page with `MADV_WIPEONFORK`: whatever the parent wrote there
//! reads as zero, even after a bare `clone`. Every object that owns kernel resources holds a
//! [`ProcessMark`] and becomes inert in a child: its operations fail with
//! [`VmError::Forked`](crate::VmError::Forked) and its destructor does nothing.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use aquifer_sys::memory::{self, Advice, SMALL_PAGE_BYTES};

struct Sentinel(*mut u8);

// SAFETY: the page is only accessed as an atomic.
unsafe impl Send for Sentinel {}
// SAFETY: as above.
unsafe impl Sync for Sentinel {}

static SENTINEL: OnceLock<Sentinel> = OnceLock::new();
static NEXT_MARK: AtomicU64 = AtomicU64::new(1);

/// The word that a fork clears. Zero if no mark was made in this process yet.
fn word() -> Option<&'static AtomicU64> {
    let page = SENTINEL.get()?.0;
    // SAFETY: the page is never unmapped, aligned, and only used as this atomic.
    Some(unsafe { AtomicU64::from_ptr(page.cast()) })
}

fn sentinel() -> &'static AtomicU64 {
    SENTINEL.get_or_init(|| {
        let page = memory::map_anonymous(SMALL_PAGE_BYTES)
            .expect("one page of memory for the fork sentinel");
        // SAFETY: the page is fresh and owned by this function. If the kernel refuses (before
        // 4.14), the atfork handler below still detects children.
        let _ = unsafe { memory::advise(page, SMALL_PAGE_BYTES, Advice::WipeOnFork) };
        // SAFETY: the handler is async-signal-safe: it makes stores and system calls.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        Sentinel(page)
    });
    word().expect("just initialised")
}

extern "C" fn in_child() {
    if let Some(word) = word() {
        word.store(0, Ordering::Relaxed);
    }
    // SAFETY: `fork` calls this in the child, before any other code runs there.
    unsafe { crate::arena::reserve_again_in_child() };
    // SAFETY: as above.
    unsafe { crate::router::reset_in_child() };
    detach_files();
}

/// A block of descriptors that a child must not share, and the next block. Never freed: a child may
/// be forked at any time.
struct ParentsFiles {
    /// The descriptor plus 1, or 0.
    files: [AtomicI32; 1024],
    next: AtomicPtr<ParentsFiles>,
}

static PARENTS_FILES: ParentsFiles = ParentsFiles::new();

impl ParentsFiles {
    const fn new() -> ParentsFiles {
        ParentsFiles {
            files: [const { AtomicI32::new(0) }; 1024],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Iterates over all places. Async-signal-safe.
    fn all() -> impl Iterator<Item = &'static AtomicI32> {
        let blocks = std::iter::successors(Some(&PARENTS_FILES), |block| block.next());
        blocks.flat_map(|block| &block.files)
    }

    fn next(&self) -> Option<&'static ParentsFiles> {
        // Acquire pairs with the release in `extend`.
        // SAFETY: null, or never freed.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    /// Appends a block of places.
    fn extend() {
        let more = Box::into_raw(Box::new(ParentsFiles::new()));
        let mut last = &PARENTS_FILES;
        // Release: a thread that finds the block finds it initialised.
        while last
            .next
            .compare_exchange(ptr::null_mut(), more, Ordering::Release, Ordering::Relaxed)
            .is_err()
        {
            last = last.next().expect("it is not the last");
        }
    }
}

/// Replaces the registered descriptors by descriptors of `/dev/null`. Async-signal-safe.
fn detach_files() {
    // SAFETY: a NUL-terminated path.
    let nothing = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    for slot in ParentsFiles::all() {
        let file = slot.load(Ordering::Relaxed) - 1;
        if file < 0 {
            continue;
        }
        if nothing >= 0 {
            // The number stays in use, so that its owner closes `/dev/null` and no other file.
            // SAFETY: both are descriptors of this process.
            unsafe { libc::dup3(nothing, file, libc::O_CLOEXEC) };
        } else {
            // SAFETY: as above. Closing is better than keeping: otherwise a lock would outlive the
            // parent.
            unsafe { libc::close(file) };
        }
    }
    if nothing >= 0 {
        // SAFETY: opened above.
        unsafe { libc::close(nothing) };
    }
}

/// Keeps a forked child from sharing an open file: in the child, the descriptor refers to
/// `/dev/null`.
///
/// An open-file-description lock lives as long as any descriptor of its open file, including a
/// child's: without this, the locks of a process that dies would stay with its children.
#[derive(Debug)]
pub struct NotInherited {
    slot: &'static AtomicI32,
}

impl NotInherited {
    /// Registers a descriptor until the result is dropped, which must be before the descriptor is
    /// closed.
    pub fn new(file: BorrowedFd<'_>) -> NotInherited {
        sentinel();
        let number = file.as_raw_fd() + 1;
        loop {
            let slot = ParentsFiles::all().find(|slot| {
                slot.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            });
            match slot {
                Some(slot) => return NotInherited { slot },
                None => ParentsFiles::extend(),
            }
        }
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        self.slot.store(0, Ordering::Relaxed);
    }
}

/// Identifies the process in which an object was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMark(u64);

impl ProcessMark {
    /// Creates a mark of the calling process.
    pub fn new() -> ProcessMark {
        let word = sentinel();
        let mut value = word.load(Ordering::Relaxed);
        if value == 0 {
            let fresh =
                NEXT_MARK.fetch_add(1, Ordering::Relaxed) | (u64::from(std::process::id()) << 32);
            // Another thread may have set it first; then its mark is the process's.
            value = match word.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => fresh,
                Err(other) => other,
            };
        }
        ProcessMark(value)
    }

    /// Whether the calling process made the mark. Async-signal-safe.
    #[inline]
    pub fn is_current(self) -> bool {
        word().is_some_and(|word| word.load(Ordering::Relaxed) == self.0)
    }
}

impl Default for ProcessMark {
    fn default() -> Self {
        ProcessMark::new()
    }
}

/// A value that exists once per process. A child gets a new one, because a thread that exists only
/// in the parent may hold a lock in the parent's.
#[derive(Debug)]
pub struct PerProcess<T>(AtomicPtr<(ProcessMark, T)>);

impl<T: Default + Sync> PerProcess<T> {
    /// Creates it without a value; the first `get` makes it.
    pub const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the value of the calling process.
    pub fn get(&'static self) -> &'static T {
        loop {
            // Acquire pairs with the release below.
            let seen = self.0.load(Ordering::Acquire);
            // SAFETY: null, or made below and never freed.
            if let Some((process, value)) = unsafe { seen.as_ref() }
                && process.is_current()
            {
                return value;
            }
            let fresh = Box::into_raw(Box::new((ProcessMark::new(), T::default())));
            // Release publishes the value. No acquire: if the exchange fails, the next iteration
            // loads with acquire.
            if self.0.compare_exchange(seen, fresh, Ordering::Release, Ordering::Relaxed).is_err() {
                // SAFETY: made above and not published.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }
}

impl<T: Default + Sync> Default for PerProcess<T> {
    fn default() -> Self {
        PerProcess::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    /// Also if very many descriptors are registered before it.
    #[test]
    fn a_child_has_none_of_very_many_descriptors() {
        let (mut reading, mut writing) = std::io::pipe().unwrap();
        let before: Vec<_> = (0..3000).map(|_| NotInherited::new(reading.as_fd())).collect();
        let not_inherited = NotInherited::new(writing.as_fd());
        // SAFETY: the child makes one call, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: writes one byte of a constant.
            unsafe { libc::write(writing.as_raw_fd(), c"c".as_ptr().cast(), 1) };
            // SAFETY: ends the child without running the parent's destructors or exit handlers.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        drop((before, not_inherited));
        writing.write_all(b"p").unwrap();
        drop(writing);
        let mut written = String::new();
        reading.read_to_string(&mut written).unwrap();
        assert_eq!(written, "p");
    }
}
