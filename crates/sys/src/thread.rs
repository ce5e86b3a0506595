//! Background threads that can be started even in a process at its limit of mappings.
//!
//! A thread of the standard library maps an alternate signal stack when it starts, and the
//! allocator maps memory for a thread's first allocation. Failure of either aborts the process.
//! Here a new thread checks that it can work before [`start`] returns; if not, that is an ordinary
//! error.
//!
//! Other differences: the thread blocks all asynchronous signals, leaving them to other threads; it
//! has no alternate signal stack, so a stack overflow is a SIGSEGV without a message; and a
//! [`Thread`] that is dropped is detached.

use std::alloc::{self, Layout};
use std::ffi::{CStr, c_void};
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{check, futex, signal};

/// The standard library's default.
const STACK_BYTES: usize = 2 << 20;
/// A test allocation that makes the allocator set up the thread's arena.
const FIRST_ALLOCATION: Layout = Layout::new::<[u64; 512]>();

/// Values of `Beginning::state`, which the new thread changes once.
const BEGINNING: u32 = 0;
const WORKS: u32 = 1;
const HAS_NO_MEMORY: u32 = 2;

/// The calling thread, by the kernel's number. Async-signal-safe.
pub fn this_thread() -> libc::pid_t {
    // SAFETY: returns the calling thread's number.
    unsafe { libc::syscall(libc::SYS_gettid) as libc::pid_t }
}

/// Whether the calling process has no thread of this number. Async-signal-safe.
pub(crate) fn is_gone(thread: libc::pid_t) -> bool {
    // SAFETY: signal 0 is not sent.
    let sent = check(unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) });
    sent.is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
}

/// A thread started by [`start`].
#[derive(Debug)]
pub struct Thread {
    /// The ID of a thread that is neither joined nor detached.
    id: libc::pthread_t,
}

struct Beginning<F> {
    work: F,
    name: &'static CStr,
    state: Arc<AtomicU32>,
}

/// Starts a thread. The kernel truncates names to 15 bytes.
///
/// # Errors
/// `EAGAIN` and `ENOMEM` where no more threads can be created, or memory is short.
pub fn start<F: FnOnce() + Send + 'static>(name: &'static CStr, work: F) -> io::Result<Thread> {
    let state = Arc::new(AtomicU32::new(BEGINNING));
    let beginning = Box::into_raw(Box::new(Beginning { work, name, state: state.clone() }));
    let id = match create(run::<F>, beginning.cast()) {
        Ok(id) => id,
        Err(error) => {
            // SAFETY: made above, and no thread took it over.
            drop(unsafe { Box::from_raw(beginning) });
            return Err(error);
        }
    };
    let thread = Thread { id };
    // Acquire pairs with the release in `run`.
    while state.load(Ordering::Acquire) == BEGINNING {
        futex::wait(&state, BEGINNING, None);
    }
    if state.load(Ordering::Acquire) == WORKS {
        return Ok(thread);
    }
    thread.join();
    Err(io::Error::from_raw_os_error(libc::ENOMEM))
}

fn create(
    run: extern "C" fn(*mut c_void) -> *mut c_void,
    beginning: *mut c_void,
) -> io::Result<libc::pthread_t> {
    let checked = |errno| match errno {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    };
    // SAFETY: all-zero bytes are a valid value to be initialised.
    let mut attributes: libc::pthread_attr_t = unsafe { std::mem::zeroed() };
    // SAFETY: a structure on this stack.
    checked(unsafe { libc::pthread_attr_init(&raw mut attributes) })?;
    // SAFETY: initialised above.
    let sized =
        checked(unsafe { libc::pthread_attr_setstacksize(&raw mut attributes, STACK_BYTES) });
    let mut id = 0;
    let created = sized.and_then(|()| {
        // SAFETY: valid attributes; `run` takes ownership of `beginning`.
        checked(unsafe { libc::pthread_create(&raw mut id, &raw const attributes, run, beginning) })
    });
    // SAFETY: initialised above, and not used again.
    unsafe { libc::pthread_attr_destroy(&raw mut attributes) };
    created.map(|()| id)
}

extern "C" fn run<F: FnOnce()>(beginning: *mut c_void) -> *mut c_void {
    signal::block_asynchronous();
    // SAFETY: made by `start` for this thread alone.
    let beginning = unsafe { Box::from_raw(beginning.cast::<Beginning<F>>()) };
    let Beginning { work, name, state } = *beginning;
    // SAFETY: a C string, and the calling thread's ID.
    unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
    let can_work = can_allocate();
    let outcome = if can_work { WORKS } else { HAS_NO_MEMORY };
    // Release pairs with the acquire in `start`.
    state.store(outcome, Ordering::Release);
    futex::wake(&state, 1);
    drop(state);
    if can_work {
        // The panic hook has already printed a panic.
        let _ = panic::catch_unwind(AssertUnwindSafe(work));
    }
    std::ptr::null_mut()
}

fn can_allocate() -> bool {
    // SAFETY: the layout has a non-zero size.
    let memory = std::hint::black_box(unsafe { alloc::alloc(FIRST_ALLOCATION) });
    if !memory.is_null() {
        // SAFETY: allocated above.
        unsafe { alloc::dealloc(memory, FIRST_ALLOCATION) };
    }
    !memory.is_null()
}

impl Thread {
    /// Returns whether it is the calling thread, which cannot join itself.
    pub fn is_current(&self) -> bool {
        // SAFETY: compares two IDs.
        unsafe { libc::pthread_equal(self.id, libc::pthread_self()) != 0 }
    }

    /// Waits until the thread ends.
    pub fn join(self) {
        // SAFETY: it was neither joined nor detached, and is not from here on.
        unsafe { libc::pthread_join(self.id, std::ptr::null_mut()) };
        std::mem::forget(self);
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // SAFETY: it was neither joined nor detached, and is not from here on.
        unsafe { libc::pthread_detach(self.id) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_works_under_its_name_and_is_waited_for() {
        let (sender, receiver) = mpsc::channel();
        let thread = start(c"fifteen-letters", move || {
            let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
            sender.send(name).unwrap();
        });
        let thread = thread.unwrap();
        assert!(!thread.is_current());
        thread.join();
        assert_eq!(receiver.try_recv().unwrap(), "fifteen-letters\n");
    }

    #[test]
    fn one_that_is_dropped_goes_on_and_one_that_panics_ends_alone() {
        let (sender, receiver) = mpsc::channel();
        let (go_on, told) = mpsc::channel();
        drop(start(c"dropped", move || {
            told.recv().unwrap();
            sender.send(7).unwrap();
        }));
        start(c"panics", || panic::resume_unwind(Box::new("quietly"))).unwrap().join();
        go_on.send(()).unwrap();
        assert_eq!(receiver.recv().unwrap(), 7);
    }

    fn address_space_bytes() -> u64 {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
    }

    /// With any amount of address space left, a thread either works or starting it fails; on
    /// failure its closure is dropped.
    #[test]
    fn without_memory_it_is_an_error() {
        // SAFETY: the child calls only this.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let (mut started, mut refused) = (0, 0);
            for room in (0..6 << 20).step_by(64 << 10) {
                let value = Arc::new(());
                let given = value.clone();
                let bytes = address_space_bytes() + room;
                let limit = libc::rlimit64 { rlim_cur: bytes, rlim_max: libc::RLIM64_INFINITY };
                // SAFETY: a limit of this process.
                unsafe { libc::setrlimit64(libc::RLIMIT_AS, &raw const limit) };
                // The threads stay alive: otherwise the stack of an ended one would be reused.
                let started_here = start(c"in-need", move || {
                    drop(given);
                    loop {
                        std::thread::park();
                    }
                });
                match started_here {
                    Ok(thread) => {
                        std::mem::forget(thread);
                        started += 1;
                    }
                    Err(_) if Arc::strong_count(&value) == 1 => refused += 1,
                    // SAFETY: ends the child.
                    Err(_) => unsafe { libc::_exit(2) },
                }
            }
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(started == 0 || refused == 0)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child failed");
    }
}
