//! The one handler of SIGBUS and SIGSEGV.
//!
//! Installed once, at the first mapping that needs it. A fault inside the arena goes to its owner,
//! which serves it in the faulting thread. Everything else, and faults that the owner refuses, goes
//! to the handler that was installed before, exactly as the kernel would have delivered it.
//!
//! The handler does not allocate or log, preserves errno, and runs with asynchronous signals
//! blocked and with SIGBUS and SIGSEGV deliverable, because serving one fault may cause another (a
//! custom device whose data is itself mapped).
//!
//! A handler installed *after* ours gets the faults first and must pass on those it does not
//! handle, as language run-times do. [`is_installed`] returns whether ours is the outermost one.
//!
//! A thread that blocks SIGBUS is killed at its first miss through a bare pointer, because the
//! kernel turns a blocked synchronous signal into termination. Calls of a cache or a mapping that
//! return `Result` need no signal. Reads and writes of files in pools need it where the bytes are not
//! there: in a file that was cut short, or on a disk that fails.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_sys::futex::Mutex;
use aquifer_sys::signal::{self, FaultContext};
use once_cell::race::OnceBox;

use crate::arena::{Arena, Reservation};
use crate::fault_owner::{FaultOwner, Served};
use crate::{VmError, fork, guard, stack};

struct Router {
    previous_sigbus: libc::sigaction,
    previous_sigsegv: libc::sigaction,
}

static ROUTER: OnceBox<Router> = OnceBox::new();
static INSTALLING: Mutex<()> = Mutex::new(());
/// Whether both handlers were installed: a child may have been forked between the two.
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// Whether children reset `INSTALLING`.
static RESETS_IN_CHILDREN: AtomicBool = AtomicBool::new(false);
static FOREIGN_FAULTS: AtomicU64 = AtomicU64::new(0);

/// Installs the handler, once.
pub fn install() -> Result<(), VmError> {
    // Acquire and release: a thread that takes the lock knows that children reset it. Two threads may register this; a second
    // call changes nothing.
    if !RESETS_IN_CHILDREN.load(Ordering::Acquire) {
        // SAFETY: it stores to atomics, which is async-signal-safe.
        unsafe { fork::in_each_child(reset_in_child) };
        RESETS_IN_CHILDREN.store(true, Ordering::Release);
    }
    let _installing = INSTALLING.lock();
    // Relaxed: ordered by the lock.
    if INSTALLED.load(Ordering::Relaxed) {
        return Ok(());
    }
    stack::prepare_pool()?;
    if ROUTER.get().is_none() {
        // Record the previous handlers before replacing them, so that a foreign fault in between is
        // already passed on; and only once, or our own handler would be recorded as a previous one.
        let _ = ROUTER.set(Box::new(Router {
            previous_sigbus: signal::installed(libc::SIGBUS).map_err(VmError::Handler)?,
            previous_sigsegv: signal::installed(libc::SIGSEGV).map_err(VmError::Handler)?,
        }));
    }
    signal::install(libc::SIGBUS, on_fault).map_err(VmError::Handler)?;
    signal::install(libc::SIGSEGV, on_fault).map_err(VmError::Handler)?;
    INSTALLED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Makes [`install`] usable in a child that was forked while another thread was in it.
///
/// # Safety
/// The calling thread is the only thread of a process just forked.
unsafe extern "C" fn reset_in_child() {
    // SAFETY: forwarded to the caller; `fork` is not called under this lock.
    unsafe { INSTALLING.reset_in_child() };
    // SAFETY: forwarded to the caller.
    unsafe { stack::reset_in_child() };
}

impl Reservation {
    /// Sets the owner that serves the faults of this reservation, and installs the fault router.
    ///
    /// # Safety
    /// `owner` stays valid until this reservation is dropped.
    pub unsafe fn set_owner(&mut self, owner: *const dyn FaultOwner) -> Result<(), VmError> {
        install()?;
        // SAFETY: forwarded to the caller.
        unsafe { self.put_owner(owner) };
        Ok(())
    }
}

/// Whether our handler is the one the kernel calls.
pub fn is_installed() -> bool {
    [libc::SIGBUS, libc::SIGSEGV].iter().all(|&signal| {
        signal::installed(signal)
            .is_ok_and(|action| action.sa_sigaction == on_fault as *const () as usize)
    })
}

/// Faults passed on to the previous handler so far.
pub fn foreign_faults() -> u64 {
    FOREIGN_FAULTS.load(Ordering::Relaxed)
}

/// Serves a fault as the handler would: for tests.
///
/// # Safety
/// No other thread unmaps the address during the call.
pub unsafe fn serve(fault: &FaultContext) -> Served {
    // SAFETY: forwarded to the caller.
    unsafe { Arena::owner_of(fault.address) }.map_or(Served::No, |owner| owner.serve(fault))
}

struct Arguments {
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
    served: Served,
}

extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let errno = aquifer_sys::errno();
    let mut arguments = Arguments { signal, info, context, served: Served::No };
    // SAFETY: `serve_managed` only uses the arguments, which live until it returns.
    unsafe {
        stack::with_room(context.cast(), serve_managed, std::ptr::from_mut(&mut arguments).cast());
    }
    aquifer_sys::set_errno(errno);
    if arguments.served == Served::No {
        FOREIGN_FAULTS.fetch_add(1, Ordering::Relaxed);
        let Some(router) = ROUTER.get() else { return };
        let previous =
            if signal == libc::SIGBUS { &router.previous_sigbus } else { &router.previous_sigsegv };
        // SAFETY: the handler's own argument; this function runs on the stack on which the handler
        // was started.
        unsafe { stack::restore_alternate(context.cast()) };
        // SAFETY: these are the handler's own arguments, and `previous` was installed for this
        // signal.
        unsafe { signal::chain(previous, signal, info, context) };
    }
}

/// Runs the owner of the fault. Does not unwind: a panic in here aborts.
extern "C" fn serve_managed(arguments: *mut libc::c_void) {
    // SAFETY: `on_fault` passes its own `Arguments`.
    let arguments = unsafe { &mut *arguments.cast::<Arguments>() };
    // A signal that was sent (kill, raise) has no fault address.
    // SAFETY: the kernel filled in the structure.
    if unsafe { (*arguments.info).si_code } <= 0 {
        return;
    }
    // SAFETY: the handler's own arguments.
    let fault =
        unsafe { signal::fault_context(arguments.signal, arguments.info, arguments.context) };
    // SAFETY: this thread is interrupted in an access to the address, so the mapping there is in use: its user may not drop it.
    arguments.served = match unsafe { Arena::owner_of(fault.address) } {
        Some(owner) => owner.serve(&fault),
        None => guard::serve_unowned(&fault),
    };
    if arguments.served == Served::No {
        // Makes a fallible load report failure instead of terminating the process.
        // SAFETY: the handler's own context.
        if unsafe { aquifer_sys::fallible::fail(arguments.context.cast()) } {
            arguments.served = Served::Yes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates another thread that held both locks at the fork.
    #[test]
    fn a_child_is_not_stopped_by_locks_of_its_parents_threads() {
        let arena = Arena::global().unwrap();
        let installing = INSTALLING.lock();
        let taken = arena.lock_for_test();
        // SAFETY: the child makes a few calls that allocate nothing, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: no preconditions; the alarm ends a child that hangs.
            unsafe { libc::alarm(20) };
            let works = arena.allocate(1).is_ok() && install().is_ok() && is_installed();
            // SAFETY: ends the child without running the parent's destructors or exit handlers.
            unsafe { libc::_exit(i32::from(!works)) };
        }
        drop((taken, installing));
        let mut status = 0;
        // SAFETY: waits for the child made above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "14 is the alarm: the child hung");
    }
}
