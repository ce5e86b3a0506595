//! Stacks for the fault handler.
//!
//! A handler on an alternate stack starts with the kernel's frame: 3.4 KiB with AVX-512 state, more
//! with AMX. Rust gives its threads an alternate stack of 8 KiB or the hardware's minimum, so
//! serving a fault there would overflow it; a thread without one may fault with its ordinary stack
//! nearly full. Threads of other libraries, and threads that only use bare pointers, cannot be
//! prepared in advance. So the handler itself continues on a stack from a lock-free pool. Only the
//! kernel's frame has to fit on the interrupted stack.
//!
//! While the handler runs on a pooled stack, that stack is the thread's alternate stack: otherwise
//! the kernel would consider the thread to be off its alternate stack, and put a nested fault's
//! frame on top of the first one's. Returning from the handler restores the old setting
//! (`rt_sigreturn` does). Before a foreign handler is called, which may fault itself or never
//! return, [`restore_alternate`] restores it.
//!
//! A thread without an alternate stack whose ordinary stack has no room for the kernel's frame is
//! killed; [`prepare_thread`] gives it an alternate stack.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_sys::memory::{self, Protection};
use aquifer_sys::signal;

use crate::VmError;

/// Size of a pooled stack: serving a fault takes less than 48 KiB in a debug build.
const STACK_BYTES: usize = 256 << 10;
const OWN_STACK_BYTES: usize = 64 << 10;
const GUARD_BYTES: usize = 4 << 10;
/// Zeros above the first frame of a pooled stack. A panic in the handler prints a backtrace before
/// it aborts, and the unwinder does not know that the stack was switched: it must find no return
/// address, rather than read past the end.
const END_BYTES: usize = 1 << 10;
const POOL_STACKS: usize = 256;

struct Pool {
    base: *mut u8,
    taken: [AtomicBool; POOL_STACKS],
}

// SAFETY: the flags give each stack to one thread at a time.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

static POOL: OnceLock<Pool> = OnceLock::new();

/// Reserves the pool's address space; its pages are allocated on first use.
pub(crate) fn prepare_pool() -> Result<(), VmError> {
    if POOL.get().is_some() {
        return Ok(());
    }
    let len = POOL_STACKS * STACK_BYTES;
    let base = memory::map_anonymous(len).map_err(VmError::Handler)?;
    for index in 0..POOL_STACKS {
        // SAFETY: inside the fresh mapping; a stack grows down onto its guard page.
        unsafe {
            let guard = base.add(index * STACK_BYTES);
            memory::map_anonymous_at(guard, GUARD_BYTES, Protection::None)
                .map_err(VmError::Handler)?;
        }
    }
    let pool = Pool { base, taken: [const { AtomicBool::new(false) }; POOL_STACKS] };
    if let Err(second) = POOL.set(pool) {
        // SAFETY: another thread was first; this mapping was never published.
        let _ = unsafe { memory::unmap(second.base, len) };
    }
    Ok(())
}

/// Calls `function(argument)` on a pooled stack. If the pool is exhausted, it calls on the current
/// stack or, if that is a small alternate stack, waits until another thread returns a pooled stack.
///
/// # Safety
/// `context` is the handler's third argument; `function` may be called with `argument`.
#[inline]
pub(crate) unsafe fn with_room(
    context: *const libc::ucontext_t,
    function: extern "C" fn(*mut libc::c_void),
    argument: *mut libc::c_void,
) {
    // SAFETY: the caller passes the handler's context.
    let alternate = unsafe { (*context).uc_stack };
    let here = std::ptr::from_ref(&alternate) as usize;
    let old = alternate.ss_sp as usize;
    let on_alternate = (old..old + alternate.ss_size).contains(&here);
    let (pool, index) = loop {
        if let Some(taken) = take() {
            break taken;
        }
        if POOL.get().is_none() || !on_alternate || alternate.ss_size >= OWN_STACK_BYTES {
            return function(argument);
        }
        std::thread::yield_now();
    };
    let base = pool.base.wrapping_add(index * STACK_BYTES);
    let call = Call {
        function,
        argument,
        becomes_alternate: on_alternate,
        base: base.wrapping_add(GUARD_BYTES),
    };
    let top = base.wrapping_add(STACK_BYTES - END_BYTES);
    // SAFETY: `top` is the end of a stack that this thread owns until the flag is cleared.
    unsafe { call_on(top, enter, std::ptr::from_ref(&call) as *mut _) };
    // Release pairs with the acquire in `take`: the next user sees the stack unused.
    pool.taken[index].store(false, Ordering::Release);
}

/// Restores the thread's alternate stack after [`with_room`]: another thread may use the pooled
/// one.
///
/// # Safety
/// `context` is the handler's third argument, and the caller runs on the stack on which the handler
/// was started.
pub(crate) unsafe fn restore_alternate(context: *const libc::ucontext_t) {
    // SAFETY: the caller passes the handler's context.
    let alternate = unsafe { (*context).uc_stack };
    if alternate.ss_flags & libc::SS_DISABLE == 0 {
        // Fails if the setting was not changed and the handler runs on that stack: then there is
        // nothing to restore.
        // SAFETY: it was the thread's alternate stack when the handler was started, and still
        // exists.
        let _ = unsafe { signal::set_alternate_stack(alternate.ss_sp.cast(), alternate.ss_size) };
    }
}

struct Call {
    function: extern "C" fn(*mut libc::c_void),
    argument: *mut libc::c_void,
    becomes_alternate: bool,
    base: *mut u8,
}

/// The first function on the pooled stack.
extern "C" fn enter(call: *mut libc::c_void) {
    // SAFETY: `with_room` passes its own `Call`, which outlives this call.
    let call = unsafe { &*call.cast::<Call>() };
    if call.becomes_alternate {
        // Fails only if the kernel's minimum exceeds the size of the pool's stacks; then a nested
        // fault is handled as without this call.
        // SAFETY: this thread owns the pooled stack and runs on it, off its alternate stack.
        let _ = unsafe { signal::set_alternate_stack(call.base, STACK_BYTES - GUARD_BYTES) };
    }
    (call.function)(call.argument);
}

fn take() -> Option<(&'static Pool, usize)> {
    let pool = POOL.get()?;
    let start = aquifer_sys::cpu::current() * 7 % POOL_STACKS;
    (0..POOL_STACKS).map(|step| (start + step) % POOL_STACKS).find_map(|index| {
        let flag = &pool.taken[index];
        // Acquire pairs with the release in `with_room`.
        let free = !flag.load(Ordering::Relaxed)
            && flag.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then_some((pool, index))
    })
}

/// Switches the stack pointer to `top`, calls `function`, and switches back.
///
/// # Safety
/// `top` is 16-byte aligned and the end of an unused stack; `function` does not unwind.
#[cfg(target_arch = "x86_64")]
unsafe fn call_on(
    top: *mut u8,
    function: extern "C" fn(*mut libc::c_void),
    argument: *mut libc::c_void,
) {
    // SAFETY: r12 is callee-saved, so it holds the old stack pointer across the call; everything
    // else that the C ABI lets the callee change is declared.
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {function}",
            "mov rsp, r12",
            top = in(reg) top,
            function = in(reg) function,
            in("rdi") argument,
            out("r12") _,
            clobber_abi("C"),
        );
    }
}

/// Switches the stack pointer to `top`, calls `function`, and switches back.
///
/// # Safety
/// As on x86-64.
#[cfg(target_arch = "aarch64")]
unsafe fn call_on(
    top: *mut u8,
    function: extern "C" fn(*mut libc::c_void),
    argument: *mut libc::c_void,
) {
    // SAFETY: x20 is callee-saved, so it holds the old stack pointer across the call; everything
    // else that the C ABI lets the callee change is declared, including the link register.
    unsafe {
        std::arch::asm!(
            "mov x20, sp",
            "mov sp, {top}",
            "blr {function}",
            "mov sp, x20",
            top = in(reg) top,
            function = in(reg) function,
            in("x0") argument,
            out("x20") _,
            clobber_abi("C"),
        );
    }
}

/// Prepares the calling thread for faults through bare pointers: unblocks SIGBUS and SIGSEGV, and
/// gives the thread an alternate stack of 64 KiB where it has none or a smaller one.
///
/// Only needed in threads that block all signals or may touch a mapping with their stack nearly
/// full. The stack exists for the life of the thread and is freed at its end.
pub fn prepare_thread() -> Result<(), VmError> {
    thread_local! {
        static OWN: std::cell::RefCell<Option<OwnStack>> = const { std::cell::RefCell::new(None) };
    }
    signal::unblock_faults();
    if signal::alternate_stack().is_some_and(|(_, len)| len >= OWN_STACK_BYTES) {
        return Ok(());
    }
    let base = memory::map_anonymous(OWN_STACK_BYTES).map_err(VmError::Handler)?;
    // SAFETY: the thread-local keeps the memory until the thread ends.
    unsafe { signal::set_alternate_stack(base, OWN_STACK_BYTES) }.map_err(VmError::Handler)?;
    OWN.with(|own| *own.borrow_mut() = Some(OwnStack(base)));
    Ok(())
}

struct OwnStack(*mut u8);

impl Drop for OwnStack {
    fn drop(&mut self) {
        signal::disable_alternate_stack();
        // SAFETY: it is no longer the thread's alternate stack.
        let _ = unsafe { memory::unmap(self.0, OWN_STACK_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn note_place(place: *mut libc::c_void) {
        let local = 0u8;
        // SAFETY: the test passes the address of its own variable.
        unsafe { *place.cast::<usize>() = std::hint::black_box(&raw const local).addr() };
    }

    #[test]
    fn a_function_has_a_pooled_stack_and_returns_to_where_it_was_called() {
        prepare_pool().unwrap();
        let pool = POOL.get().unwrap().base.addr();
        let (top, mut place) = (take().expect("a stack is free"), 0usize);
        let base = top.0.base.wrapping_add(top.1 * STACK_BYTES);
        // SAFETY: the end of a stack that was taken; the function writes to the variable it is
        // passed.
        unsafe {
            let top = base.wrapping_add(STACK_BYTES - END_BYTES);
            call_on(top, note_place, (&raw mut place).cast());
        }
        assert!((base.addr() + GUARD_BYTES..base.addr() + STACK_BYTES).contains(&place));
        assert!((pool..pool + POOL_STACKS * STACK_BYTES).contains(&place));
        // Release pairs with the acquire in `take`.
        top.0.taken[top.1].store(false, Ordering::Release);
    }
}
