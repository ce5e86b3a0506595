//! Background threads that can be started in a process that has all the mappings it may have.
//!
//! A thread of the standard library maps an alternate signal stack when it begins, and the allocator maps memory for the
//! first allocation of each thread. Neither can fail without aborting the process. Here a new thread finds out whether it
//! can work before [`start`] returns, and if not, that is an error like any other.
//!
//! What else is different: the thread blocks every signal that can wait for others; it has no alternate signal stack, so a
//! stack overflow is a SIGSEGV without a message; and a [`Thread`] that is dropped goes on by itself.

use std::alloc::{self, Layout};
use std::ffi::{CStr, c_void};
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{futex, signal};

/// As the standard library's.
const STACK_BYTES: usize = 2 << 20;
/// What must be had for a thread to work: an arena of the allocator comes with it.
const FIRST_ALLOCATION: Layout = Layout::new::<[u64; 512]>();

/// Transitions of `Beginning::state`: once, by the new thread.
const BEGINNING: u32 = 0;
const WORKS: u32 = 1;
const HAS_NO_MEMORY: u32 = 2;

/// A thread that was started here.
#[derive(Debug)]
pub struct Thread {
    /// Of a thread that is neither joined nor detached.
    id: libc::pthread_t,
}

struct Beginning<F> {
    work: F,
    name: &'static CStr,
    state: Arc<AtomicU32>,
}

/// Starts a thread. The kernel keeps names of up to 15 bytes.
///
/// # Errors
/// `EAGAIN` and `ENOMEM` where there can be no more threads, or no memory for them.
pub fn start<F: FnOnce() + Send + 'static>(name: &'static CStr, work: F) -> io::Result<Thread> {
    let state = Arc::new(AtomicU32::new(BEGINNING));
    let beginning = Box::into_raw(Box::new(Beginning { work, name, state: state.clone() }));
    let id = match create(run::<F>, beginning.cast()) {
        Ok(id) => id,
        Err(error) => {
            // SAFETY: made above, and no thread has it.
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
    // SAFETY: initialises them.
    checked(unsafe { libc::pthread_attr_init(&raw mut attributes) })?;
    // SAFETY: initialised above.
    let sized =
        checked(unsafe { libc::pthread_attr_setstacksize(&raw mut attributes, STACK_BYTES) });
    let mut id = 0;
    let created = sized.and_then(|()| {
        // SAFETY: valid attributes; `run` takes what it is given.
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
    // SAFETY: a string; the calling thread.
    unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
    let can_work = can_allocate();
    let outcome = if can_work { WORKS } else { HAS_NO_MEMORY };
    // Release pairs with the acquire in `start`.
    state.store(outcome, Ordering::Release);
    futex::wake(&state, 1);
    drop(state);
    if can_work {
        // A panic has been printed.
        let _ = panic::catch_unwind(AssertUnwindSafe(work));
    }
    std::ptr::null_mut()
}

fn can_allocate() -> bool {
    // SAFETY: a layout of some bytes.
    let memory = std::hint::black_box(unsafe { alloc::alloc(FIRST_ALLOCATION) });
    if !memory.is_null() {
        // SAFETY: allocated above.
        unsafe { alloc::dealloc(memory, FIRST_ALLOCATION) };
    }
    !memory.is_null()
}

impl Thread {
    /// Whether it is the calling thread, which cannot wait for itself.
    pub fn is_current(&self) -> bool {
        // SAFETY: numbers only.
        unsafe { libc::pthread_equal(self.id, libc::pthread_self()) != 0 }
    }

    /// Waits for its end.
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

    /// With any amount of addresses left a thread is started and works, or is an error; and what it was to do is dropped.
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
                // They stay: the stack of one that has ended would be used again.
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
