//! What survives a fork: nothing, on purpose.
//!
//! Managed ranges are not copied into a child (`MADV_DONTFORK`), because an inherited userfaultfd
//! still addresses the *parent's* memory: serving a child's fault through it would corrupt the
//! parent. A child is detected by a page with `MADV_WIPEONFORK`: whatever the parent wrote there
//! reads as zero, even after a bare `clone`. Every object that owns kernel resources holds a
//! [`ProcessMark`] and becomes inert in a child: its operations fail with
//! [`VmError::Forked`](crate::VmError::Forked) and its destructor does nothing.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64};

use aquifer_sys::memory::{self, Advice, SMALL_PAGE_BYTES};
use aquifer_sys::open_file::Identity;

/// The page that a fork clears; null if no mark was made in this process yet. Not behind a lock: a
/// child must be able to make it, whatever other threads did at the fork.
static SENTINEL: AtomicPtr<u64> = AtomicPtr::new(ptr::null_mut());
static NEXT_MARK: AtomicU64 = AtomicU64::new(1);

/// The word that a fork clears. Zero if no mark was made in this process yet.
fn word() -> Option<&'static AtomicU64> {
    // Acquire pairs with the release in `sentinel`: the advice was given.
    let page = SENTINEL.load(Acquire);
    // SAFETY: a published page is never unmapped, aligned, and only used as this atomic.
    (!page.is_null()).then(|| unsafe { AtomicU64::from_ptr(page) })
}

fn sentinel() -> &'static AtomicU64 {
    if let Some(word) = word() {
        return word;
    }
    let page =
        memory::map_anonymous(SMALL_PAGE_BYTES).expect("one page of memory for the fork sentinel");
    // SAFETY: the page is fresh and owned by this function. If the kernel refuses (before
    // 4.14), the atfork handler below still detects children.
    let _ = unsafe { memory::advise(page, SMALL_PAGE_BYTES, Advice::WipeOnFork) };
    // Before the page is published: a process with marks has the handlers. Several threads, or a
    // child that was forked in between, may register them again, and they may run twice.
    // SAFETY: the handlers are async-signal-safe: they make stores and system calls.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    // Release publishes the advice. No acquire: `word` loads with acquire.
    if SENTINEL.compare_exchange(ptr::null_mut(), page.cast(), Release, Relaxed).is_err() {
        // SAFETY: mapped above and not published.
        let _ = unsafe { memory::unmap(page, SMALL_PAGE_BYTES) };
    }
    word().expect("just published")
}

/// Calls a function in each child that is forked from now on, after the marks of its parent are cleared there and before any
/// code but such functions runs.
///
/// # Safety
/// The function may be called by the only thread of a process just forked, more than once: it is async-signal-safe.
pub(crate) unsafe fn in_each_child(function: unsafe extern "C" fn()) {
    // Its handler is registered first, so it runs first.
    sentinel();
    // SAFETY: forwarded to the caller.
    unsafe { libc::pthread_atfork(None, None, Some(function)) };
}

extern "C" fn before_fork() {
    aquifer_sys::high_fd::before_fork();
}

extern "C" fn in_parent() {
    aquifer_sys::high_fd::after_fork(false);
}

extern "C" fn in_child() {
    if let Some(word) = word() {
        word.store(0, Relaxed);
    }
    aquifer_sys::high_fd::after_fork(true);
    detach_files();
}

/// A descriptor that a child must not share.
#[derive(Debug)]
struct ParentsFile {
    /// The descriptor plus 1; 0 if this is free, -1 while it is being filled in.
    number: AtomicI32,
    /// The file that it referred to: the program may have closed it, and given its number to
    /// another.
    identity: [AtomicU64; 3],
}

impl ParentsFile {
    const FREE: i32 = 0;
    const TAKEN: i32 = -1;

    const fn new() -> ParentsFile {
        let identity = [const { AtomicU64::new(0) }; 3];
        ParentsFile { number: AtomicI32::new(Self::FREE), identity }
    }

    /// Takes a free one.
    fn take(&self, number: RawFd, identity: Identity) -> bool {
        // Relaxed: a thread that takes it relies on nothing that was stored here before.
        let taken = self.number.compare_exchange(Self::FREE, Self::TAKEN, Relaxed, Relaxed);
        if taken.is_ok() {
            for (word, value) in self.identity.iter().zip(identity.to_words()) {
                word.store(value, Relaxed);
            }
            // Release pairs with the Acquire in `get`.
            self.number.store(number + 1, Release);
        }
        taken.is_ok()
    }

    /// The descriptor, if it still refers to the file. Async-signal-safe.
    fn get(&self) -> Option<BorrowedFd<'_>> {
        // Acquire: then the identity is that of this number.
        let number = self.number.load(Acquire) - 1;
        if number < 0 {
            return None;
        }
        // SAFETY: it is not -1. If it is closed, comparing it fails.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        let words = self.identity.each_ref().map(|word| word.load(Relaxed));
        Identity::from_words(words).is_of(file).then_some(file)
    }
}

/// A block of descriptors that a child must not share, and the next block. Never freed: a child may
/// be forked at any time.
struct ParentsFiles {
    files: [ParentsFile; 1024],
    next: AtomicPtr<ParentsFiles>,
}

static PARENTS_FILES: ParentsFiles = ParentsFiles::new();

impl ParentsFiles {
    const fn new() -> ParentsFiles {
        ParentsFiles {
            files: [const { ParentsFile::new() }; 1024],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Iterates over all places. Async-signal-safe.
    fn all() -> impl Iterator<Item = &'static ParentsFile> {
        let blocks = std::iter::successors(Some(&PARENTS_FILES), |block| block.next());
        blocks.flat_map(|block| &block.files)
    }

    fn next(&self) -> Option<&'static ParentsFiles> {
        // Acquire pairs with the release in `extend`.
        // SAFETY: null, or never freed.
        unsafe { self.next.load(Acquire).as_ref() }
    }

    /// Appends a block of places.
    fn extend() {
        let more = Box::into_raw(Box::new(ParentsFiles::new()));
        let mut last = &PARENTS_FILES;
        // Release: a thread that finds the block finds it initialised.
        while last.next.compare_exchange(ptr::null_mut(), more, Release, Relaxed).is_err() {
            last = last.next().expect("it is not the last");
        }
    }
}

/// Replaces the registered descriptors by descriptors of `/dev/null`. Async-signal-safe.
fn detach_files() {
    // SAFETY: a NUL-terminated path.
    let nothing = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    for file in ParentsFiles::all().filter_map(ParentsFile::get) {
        if nothing >= 0 {
            // The number stays in use, so that an owner that does not compare it closes `/dev/null`
            // and no other file.
            // SAFETY: both are descriptors of this process.
            if unsafe { libc::dup3(nothing, file.as_raw_fd(), libc::O_CLOEXEC) } >= 0 {
                continue;
            }
        }
        // Numbers behind the limit of open files cannot be replaced, nor taken by another file. And
        // closing is better than keeping: otherwise a lock would outlive the parent.
        // SAFETY: a descriptor of this process.
        unsafe { libc::close(file.as_raw_fd()) };
    }
    if nothing >= 0 {
        // SAFETY: opened above.
        unsafe { libc::close(nothing) };
    }
}

/// Keeps a forked child from sharing an open file: in the child, the descriptor refers to
/// `/dev/null`. If the program has given its number to another file, the child has that file.
///
/// An open-file-description lock lives as long as any descriptor of its open file, including a
/// child's: without this, the locks of a process that dies would stay with its children.
#[derive(Debug)]
pub struct NotInherited {
    /// `None` if the descriptor was closed already.
    place: Option<&'static ParentsFile>,
}

impl NotInherited {
    /// Registers a descriptor until the result is dropped, which must be before the descriptor is
    /// closed.
    pub fn new(file: BorrowedFd<'_>) -> NotInherited {
        sentinel();
        let Ok(identity) = Identity::of(file) else { return NotInherited { place: None } };
        loop {
            let place = ParentsFiles::all().find(|place| place.take(file.as_raw_fd(), identity));
            if place.is_some() {
                return NotInherited { place };
            }
            ParentsFiles::extend();
        }
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            // Relaxed: as in `take`.
            place.number.store(ParentsFile::FREE, Relaxed);
        }
    }
}

/// Identifies the process in which an object was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMark(u64);

impl ProcessMark {
    /// Creates a mark of the calling process.
    pub fn new() -> ProcessMark {
        let word = sentinel();
        let mut value = word.load(Relaxed);
        if value == 0 {
            let fresh = NEXT_MARK.fetch_add(1, Relaxed) | (u64::from(std::process::id()) << 32);
            // Another thread may have set it first; then its mark is the process's.
            value = match word.compare_exchange(0, fresh, Relaxed, Relaxed) {
                Ok(_) => fresh,
                Err(other) => other,
            };
        }
        ProcessMark(value)
    }

    /// Whether the calling process made the mark. Async-signal-safe.
    #[inline]
    pub fn is_current(self) -> bool {
        word().is_some_and(|word| word.load(Relaxed) == self.0)
    }
}

impl Default for ProcessMark {
    fn default() -> Self {
        ProcessMark::new()
    }
}

/// A [`ProcessMark`] of an object that can become inert in its own process as well.
#[derive(Debug)]
pub struct LifeMark(AtomicU64);

impl LifeMark {
    /// No process has this mark.
    const ENDED: u64 = u64::MAX;

    /// Creates a mark of the calling process.
    pub fn new() -> LifeMark {
        LifeMark(AtomicU64::new(ProcessMark::new().0))
    }

    /// Whether the calling process made the mark, and it was not [ended](LifeMark::end).
    /// Async-signal-safe.
    #[inline]
    pub fn is_current(&self) -> bool {
        // Relaxed: the mark guards nothing that was stored before it was ended.
        ProcessMark(self.0.load(Relaxed)).is_current()
    }

    /// From now on it is the mark of no process. True for the first call.
    pub fn end(&self) -> bool {
        self.0.swap(Self::ENDED, Relaxed) != Self::ENDED
    }

    /// Whether it was ended.
    pub fn has_ended(&self) -> bool {
        self.0.load(Relaxed) == Self::ENDED
    }
}

impl Default for LifeMark {
    fn default() -> Self {
        LifeMark::new()
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
            let seen = self.0.load(Acquire);
            // SAFETY: null, or made below and never freed.
            if let Some((process, value)) = unsafe { seen.as_ref() }
                && process.is_current()
            {
                return value;
            }
            let fresh = Box::into_raw(Box::new((ProcessMark::new(), T::default())));
            // Release publishes the value. No acquire: if the exchange fails, the next iteration
            // loads with acquire.
            if self.0.compare_exchange(seen, fresh, Release, Relaxed).is_err() {
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
    use std::io::{Read, Seek, Write};
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

    /// The program has closed what was registered, and given the number to a file of its own.
    #[test]
    fn a_child_keeps_what_the_program_put_in_place_of_a_descriptor() {
        let registered = tempfile::tempfile().unwrap();
        let not_inherited = NotInherited::new(registered.as_fd());
        let mut own = tempfile::tempfile().unwrap();
        // SAFETY: replaces a descriptor on purpose; what it had is not used any more.
        assert!(unsafe { libc::dup2(own.as_raw_fd(), registered.as_raw_fd()) } >= 0);
        // SAFETY: the child makes one call, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: writes one byte of a constant.
            unsafe { libc::write(registered.as_raw_fd(), c"c".as_ptr().cast(), 1) };
            // SAFETY: ends the child without running the parent's destructors or exit handlers.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        drop(not_inherited);
        let mut written = String::new();
        own.rewind().unwrap();
        own.read_to_string(&mut written).unwrap();
        assert_eq!(written, "c");
    }

    /// Another thread raises the limit of open files for a moment, again and again.
    #[test]
    fn a_child_begins_with_the_limit_that_its_parent_has() {
        let set = |soft| {
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: the calls only read and write the structure.
            unsafe {
                libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
                limit.rlim_cur = soft;
                assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
            }
        };
        // In a process of its own: the limit is that of the whole process.
        // SAFETY: the child leaves by `_exit`. Other threads of the parent may hold locks of the
        // allocator, which the C library releases in the child.
        let process = unsafe { libc::fork() };
        if process == 0 {
            set(1000);
            let _ = ProcessMark::new();
            let file = tempfile::tempfile().unwrap();
            let is_done = std::sync::atomic::AtomicBool::new(false);
            let wrong = std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !is_done.load(Relaxed) {
                        aquifer_sys::high_fd::lift(file.try_clone().unwrap().into());
                    }
                });
                let wrong = (0..700).filter(|_| !child_has_limit(1000)).count();
                is_done.store(true, Relaxed);
                wrong
            });
            // SAFETY: as in the other tests.
            unsafe { libc::_exit(i32::from(wrong != 0)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(process, &raw mut status, 0) }, process);
        assert_eq!(status, 0);
    }

    fn child_has_limit(soft: u64) -> bool {
        // SAFETY: the child makes two calls, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: fills in the structure; then ends the child.
            unsafe {
                libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
                libc::_exit(i32::from(limit.rlim_cur != soft));
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        unsafe { libc::waitpid(child, &raw mut status, 0) == child && status == 0 }
    }
}
