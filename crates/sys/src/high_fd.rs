//! Descriptors that a library holds for long, kept apart from those of the program.
//!
//! A program may close descriptors that it does not know (`closefrom`, a daemon that starts by
//! closing everything), and what it opens next gets their numbers. A library that then used a number
//! would write into the program's file. So such descriptors
//!
//! * get numbers that the program cannot get: from its soft limit of open files on, where the hard
//!   limit is higher; otherwise high ones ([`lift`]);
//! * are compared with what was opened, at most one tick of the clock (1 to 4 ms) before each use
//!   ([`HeldFile`]). An open file description that the library has opened is [marked](mark), so that
//!   another one of the same file does not pass for it, such as that of a pool that the program has
//!   opened again.
//!
//! What remains is a program that closes a number and makes it another file's within one tick, by
//! `dup2` or after it has raised its soft limit.

use std::cell::Cell;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64};

use crate::open_file::{Identity, mark};
use crate::{check, clock, thread};

/// A soft limit up to which numbers behind it are used: a process's table of descriptors is as long
/// as its highest number.
const MOST_SKIPPED: u64 = 4096;
/// The first number otherwise, if the limit permits.
const USUAL_FIRST: u64 = 1024;
/// How many numbers are used before those that became free are used again, so that the number of a
/// descriptor that the program has closed is not soon that of another one of the library.
const CYCLE: i32 = 1024;
/// A number that no file has: its use fails with `EBADF`.
const NOWHERE: RawFd = RawFd::MAX - 1;

/// The ID of the thread that raises the limit of open files, or forks; 0 if none does.
static RAISING: AtomicI32 = AtomicI32::new(0);
/// Counts lifted descriptors.
static NEXT: AtomicI32 = AtomicI32::new(0);

/// Moves a descriptor to a number out of the program's reach, with `CLOEXEC`. Keeps its number if
/// that is not possible.
///
/// For one system call, this raises the soft limit of open files of the process to the hard limit. A
/// limit that the program sets in that time stays; a program that another thread starts in that time
/// by other ways than `fork` ([`before_fork`]) begins with the raised limit.
pub fn lift(file: OwnedFd) -> OwnedFd {
    match lifted(file.as_fd()) {
        Ok(lifted) => lifted,
        Err(_) => file,
    }
}

fn lifted(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // Before the limit is read, which another thread may be raising.
    let raising = Raising::begin();
    let limit = limit()?;
    if let Some(raising) = raising
        && limit.rlim_cur <= MOST_SKIPPED
        && limit.rlim_cur < limit.rlim_max
        && let Some(lifted) = raising.duplicate_behind(file, limit)
    {
        return Ok(lifted);
    }
    let first = USUAL_FIRST.min(limit.rlim_cur.saturating_sub(64)).max(3);
    in_turn(file, first as RawFd, limit.rlim_cur.saturating_sub(first).min(CYCLE as u64) as i32)
}

/// Duplicates a descriptor to the next of `count` numbers from `first` on, or to the first free one.
fn in_turn(file: BorrowedFd<'_>, first: RawFd, count: i32) -> io::Result<OwnedFd> {
    let place = first + NEXT.fetch_add(1, Relaxed).rem_euclid(count.max(1));
    duplicate(file, place).or_else(|_| duplicate(file, first))
}

/// The right of a thread to raise the limit.
struct Raising;

impl Raising {
    /// Waits for the thread that has the right. `None` if that is the calling thread: a signal has
    /// interrupted it, in whose handler this is called. Async-signal-safe.
    fn begin() -> Option<Raising> {
        let own = thread::this_thread();
        loop {
            // Acquire, here and below, pairs with the Release in `drop`.
            let Err(holder) = RAISING.compare_exchange(0, own, Acquire, Relaxed) else {
                return Some(Raising);
            };
            if holder == own {
                return None;
            }
            // In a child that was made by a bare `clone` there is no such thread.
            if thread::is_gone(holder)
                && RAISING.compare_exchange(holder, own, Acquire, Relaxed).is_ok()
            {
                return Some(Raising);
            }
            std::thread::yield_now();
        }
    }

    /// Duplicates a descriptor to a number behind the soft limit; `None` if the system refuses it.
    fn duplicate_behind(&self, file: BorrowedFd<'_>, limit: libc::rlimit) -> Option<OwnedFd> {
        let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
        let before = exchange_limit(&raised).ok()?;
        let made = in_turn(file, limit.rlim_cur as RawFd, CYCLE);
        restore(&before, &raised);
        made.ok()
    }
}

impl Drop for Raising {
    fn drop(&mut self) {
        // Release pairs with the Acquire in `begin`.
        RAISING.store(0, Release);
    }
}

/// Sets the limit that was raised to what it was, unless the program has changed it meanwhile. If that
/// is refused, the program has lowered its hard limit, or it may not change limits any more.
fn restore(before: &libc::rlimit, raised: &libc::rlimit) {
    if let Ok(now) = exchange_limit(before)
        && (now.rlim_cur, now.rlim_max) != (raised.rlim_cur, raised.rlim_max)
    {
        let _ = exchange_limit(&now);
    }
}

thread_local! {
    /// Whether this thread holds [`RAISING`] while it forks.
    static IS_FORKING: Cell<bool> = const { Cell::new(false) };
}

/// Waits until no other thread raises the limit, and keeps it so until [`after_fork`]: for
/// `pthread_atfork`, so that no child inherits the raised limit.
pub fn before_fork() {
    // None as well in the second of two handlers: two threads may register them at once.
    if let Some(raising) = Raising::begin() {
        IS_FORKING.set(true);
        std::mem::forget(raising);
    }
}

/// Ends what [`before_fork`] began, in the parent and in the child. Async-signal-safe.
pub fn after_fork(is_child: bool) {
    // In a child there is no other thread that could hold it.
    if IS_FORKING.replace(false) || is_child {
        drop(Raising);
    }
}

/// Lets a command inherit standard input, output and error, and no other descriptor, whatever the
/// program that this library is part of has left open.
pub fn keep_from(command: &mut Command) {
    let close = || {
        // SAFETY: makes descriptors close at the start of the program, and changes no memory.
        let closed =
            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        check(closed).map(drop)
    };
    // SAFETY: the closure makes one system call, and allocates nothing.
    unsafe { command.pre_exec(close) };
}

fn limit() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills in the structure.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }.into())?;
    Ok(limit)
}

/// Sets the limit, and returns what it was before.
fn exchange_limit(new: &libc::rlimit) -> io::Result<libc::rlimit> {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads one structure and fills in the other.
    check(unsafe { libc::prlimit(0, libc::RLIMIT_NOFILE, new, &raw mut old) }.into())?;
    Ok(old)
}

fn duplicate(file: BorrowedFd<'_>, first: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: changes no memory.
    let made =
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, first) }.into())?;
    // SAFETY: just made, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(made as RawFd) })
}

/// A descriptor that is held for long. If the program has closed it, every use fails with `EBADF`,
/// and the end of this closes nothing. See the module's documentation.
///
/// ```
/// use std::os::fd::{AsFd, AsRawFd};
///
/// use aquifer_sys::high_fd::HeldFile;
///
/// let held = HeldFile::new(std::fs::File::open("/proc/self/exe")?.into())?;
/// assert!(held.as_fd().as_raw_fd() > 3 && held.is_there());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct HeldFile {
    file: ManuallyDrop<OwnedFd>,
    identity: Identity,
    /// When it was last compared.
    checked_ns: AtomicI64,
    /// Whether it was found to be another file's, or closed. Changes once.
    is_lost: AtomicBool,
}

impl HeldFile {
    /// Takes a descriptor, and [lifts](lift) it. If its open file description is [marked](mark), its
    /// file offset must not change from now on.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn new(file: OwnedFd) -> io::Result<HeldFile> {
        let file = lift(file);
        let identity = Identity::of(file.as_fd())?;
        let (checked_ns, is_lost) = (AtomicI64::new(clock::coarse_ns()), AtomicBool::new(false));
        Ok(HeldFile { file: ManuallyDrop::new(file), identity, checked_ns, is_lost })
    }

    /// As [`HeldFile::new`], for an open file description that the caller has opened and that has no
    /// other user: [marks](mark) it.
    ///
    /// # Errors
    /// As for [`HeldFile::new`].
    pub fn own(file: OwnedFd) -> io::Result<HeldFile> {
        mark(file.as_fd());
        HeldFile::new(file)
    }

    /// Opens another open file description of the same file.
    ///
    /// # Errors
    /// Those of [`reopen`](crate::io::reopen); `EBADF` if it is lost.
    pub fn reopen(&self, flags: libc::c_int) -> io::Result<HeldFile> {
        let another = HeldFile::own(crate::io::reopen(self.as_fd(), flags)?)?;
        // It was made by the number, which may have become another file's.
        Self::check(another.identity.is_same_file(&self.identity)).map(|()| another)
    }

    /// Duplicates the descriptor, for the same open file description.
    ///
    /// # Errors
    /// `EBADF` if it is lost; `EMFILE`.
    pub fn try_clone(&self) -> io::Result<HeldFile> {
        let duplicate = HeldFile::new(self.as_fd().try_clone_to_owned()?)?;
        // As above.
        Self::check(duplicate.identity == self.identity).map(|()| duplicate)
    }

    fn check(is_right: bool) -> io::Result<()> {
        if is_right { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EBADF)) }
    }

    /// The error of a call that has used the descriptor, where `EBADF` says that it is lost, and
    /// nothing else: file systems, such as those in user space, return that number for reasons of their
    /// own, which becomes `EIO`.
    pub fn explain(&self, error: io::Error) -> io::Error {
        if error.raw_os_error() == Some(libc::EBADF) && self.is_there() {
            io::Error::from_raw_os_error(libc::EIO)
        } else {
            error
        }
    }

    /// What it is compared with.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether the number still is this file's, as of now.
    pub fn is_there(&self) -> bool {
        // Relaxed, here and below: the comparison orders nothing else.
        if self.is_lost.load(Relaxed) {
            return false;
        }
        let is_there = self.identity.is_of(self.file.as_fd());
        if !is_there {
            self.is_lost.store(true, Relaxed);
        }
        is_there
    }

    /// Whether the number was this file's at most one tick of the clock (1 to 4 ms) ago.
    #[inline]
    pub fn was_there_lately(&self) -> bool {
        let now_ns = clock::coarse_ns();
        // Acquire pairs with the Release below: a thread that sees the time of another thread's
        // comparison relies on its result, and sees it.
        if self.checked_ns.load(Acquire) == now_ns {
            return !self.is_lost.load(Relaxed);
        }
        let is_there = self.is_there();
        self.checked_ns.store(now_ns, Release);
        is_there
    }
}

impl AsFd for HeldFile {
    /// The descriptor; one that no file has if it is lost.
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        if self.was_there_lately() {
            self.file.as_fd()
        } else {
            // SAFETY: it is not -1, and its use fails.
            unsafe { BorrowedFd::borrow_raw(NOWHERE) }
        }
    }
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        if self.is_there() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use super::*;

    fn held() -> HeldFile {
        HeldFile::new(tempfile::tempfile().unwrap().into()).unwrap()
    }

    /// Waits until what was compared counts no more.
    fn next_tick() {
        let before = clock::coarse_ns();
        while clock::coarse_ns() == before {
            std::thread::yield_now();
        }
    }

    /// As in a child that was made by a bare `clone` while a thread of its parent raised the limit.
    #[test]
    fn a_thread_that_does_not_exist_is_not_waited_for() {
        let gone = std::thread::spawn(thread::this_thread).join().unwrap();
        while !thread::is_gone(gone) {
            std::thread::yield_now();
        }
        // Other tests lift descriptors meanwhile.
        while RAISING.compare_exchange(0, gone, Relaxed, Relaxed).is_err() {
            std::thread::yield_now();
        }
        drop(held());
        assert_ne!(RAISING.load(Relaxed), gone);
    }

    #[test]
    fn what_was_closed_is_lost() {
        let held = held();
        let number = held.as_fd().as_raw_fd();
        // SAFETY: closed on purpose; `held` notices.
        unsafe { libc::close(number) };
        next_tick();
        let error = crate::io::write_all_at(held.as_fd(), b"text", 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        assert!(!held.is_there() && held.reopen(libc::O_RDWR).is_err());
    }

    /// What the number refers to is the same file, opened by another: as when the program has closed
    /// everything and opened the same pool again.
    #[test]
    fn another_description_of_the_same_file_is_not_taken_for_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let held = HeldFile::own(file.reopen().unwrap().into()).unwrap();
        let number = held.as_fd().as_raw_fd();
        // SAFETY: closed on purpose; `held` notices.
        unsafe { libc::close(number) };
        let again = duplicate(file.reopen().unwrap().as_fd(), number).unwrap();
        assert_eq!(again.as_raw_fd(), number);
        mark(again.as_fd());
        assert!(!held.is_there() && held.try_clone().is_err());
        drop(held);
        assert!(Identity::of(again.as_fd()).is_ok(), "it is not closed");
    }

    /// The number belongs to a file of the program: nothing writes to it, and nothing closes it.
    #[test]
    fn another_file_of_that_number_stays_as_it_is() {
        let (held, mut other) = (held(), tempfile::tempfile().unwrap());
        // As in a program that has raised its limit since.
        let limit = limit().unwrap();
        exchange_limit(&libc::rlimit { rlim_cur: limit.rlim_max, ..limit }).unwrap();
        let number = held.as_fd().as_raw_fd();
        // SAFETY: replaces a descriptor on purpose; `held` notices.
        let taken = unsafe { libc::dup2(other.as_raw_fd(), number) };
        exchange_limit(&limit).unwrap();
        assert_eq!(taken, number);
        next_tick();
        assert!(crate::io::write_all_at(held.as_fd(), b"text", 0).is_err());
        assert!(held.try_clone().is_err());
        drop(held);
        // SAFETY: made by `dup2`, and not closed by `held`.
        let mut again = File::from(unsafe { OwnedFd::from_raw_fd(number) });
        again.write_all(b"own").unwrap();
        let mut found = String::new();
        other.rewind().unwrap();
        other.read_to_string(&mut found).unwrap();
        assert_eq!(found, "own");
    }
}
