//! Stacks for the fault handler.
//!
//! A handler on an alternate stack starts with the kernel's frame: 3.4 KiB with AVX-512 state, more
//! with AMX. Rust gives its threads an alternate stack of 8 KiB or the hardware's minimum, so
//! serving a fault there would overflow it; a thread without one may fault with its ordinary stack
//! nearly full. Threads of other libraries, and threads that only use bare pointers, cannot be
//! prepared in advance. So the handler itself continues on a stack from a lock-free pool. Only the
//! kernel's frame has to fit on the interrupted stack.
//!
//! The pool is one reservation of addresses. A few stacks are accessible from the start; the handler
//! makes each of the others accessible when it first takes it, but for its lowest page. At the
//! process's limit of mappings it cannot: then threads wait for a stack that is. (More threads than
//! stacks that wait for each other's pages, in caches over mappings of other caches, wait for ever.)
//!
//! ```text
//!  │ guard │ stack 0          │ guard │ stack 1          │ guard │ …
//!  └ never accessible         └ accessible from its first use
//! ```
//!
//! While the handler runs on a pooled stack, that stack is the thread's alternate stack: otherwise
//! the kernel would consider the thread to be off its alternate stack, and put a nested fault's
//! frame on top of the first one's. Returning from the handler restores the old setting
//! (`rt_sigreturn` does). Before a foreign handler is called, which may fault itself or never
//! return, [`restore_alternate`] restores it.
//!
//! A thread without an alternate stack whose ordinary stack has no room for the kernel's frame is
//! killed; [`prepare_thread`] gives it an alternate stack.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_sys::memory::{self, Protection};
use aquifer_sys::signal;
use once_cell::race::OnceBox;

use crate::VmError;

/// Between two attempts to take a stack.
const AGAIN: Duration = Duration::from_micros(50);

/// Size of a pooled stack: serving a fault takes less than 48 KiB in a debug build.
const STACK_BYTES: usize = 256 << 10;
const OWN_STACK_BYTES: usize = 64 << 10;
const GUARD_BYTES: usize = 4 << 10;
/// Zeros above the first frame of a pooled stack. A panic in the handler prints a backtrace before
/// it aborts, and the unwinder does not know that the stack was switched: it must find no return
/// address, rather than read past the end.
const END_BYTES: usize = 1 << 10;
const POOL_STACKS: usize = 256;
/// How many are accessible from the start.
const MADE_AHEAD: usize = 4;

struct Pool {
    base: *mut u8,
    taken: [AtomicBool; POOL_STACKS],
    /// Whether a stack is accessible. Read and set by the thread that has taken it.
    made: [AtomicBool; POOL_STACKS],
}

// SAFETY: `taken` gives each stack to one thread at a time.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

static POOL: OnceBox<Pool> = OnceBox::new();

/// Reserves the pool's address space.
pub(crate) fn prepare_pool() -> Result<(), VmError> {
    if POOL.get().is_some() {
        return Ok(());
    }
    let pool = Box::new(Pool::reserve().map_err(VmError::Handler)?);
    if let Err(second) = POOL.set(pool) {
        // SAFETY: another thread was first; this mapping was never published.
        let _ = unsafe { memory::unmap(second.base, POOL_STACKS * STACK_BYTES) };
    }
    Ok(())
}

impl Pool {
    /// Reserves the pool, and makes the first stacks.
    fn reserve() -> io::Result<Pool> {
        let len_bytes = POOL_STACKS * STACK_BYTES;
        let none = || [const { AtomicBool::new(false) }; POOL_STACKS];
        let pool = Pool { base: memory::reserve(len_bytes)?, taken: none(), made: none() };
        if let Err(error) = (0..MADE_AHEAD).try_for_each(|index| pool.make(index)) {
            // SAFETY: reserved above, and not known to any other code.
            let _ = unsafe { memory::unmap(pool.base, len_bytes) };
            return Err(error);
        }
        Ok(pool)
    }

    fn start_of(&self, index: usize) -> *mut u8 {
        self.base.wrapping_add(index * STACK_BYTES)
    }

    /// Takes a free stack. Allocates nothing and takes no lock of the process.
    fn take(&self) -> Option<usize> {
        let start = aquifer_sys::cpu::current() * 7 % POOL_STACKS;
        // At the limit of mappings, every attempt would fail.
        let mut may_make = true;
        (0..POOL_STACKS).map(|step| (start + step) % POOL_STACKS).find(|&index| {
            let flag = &self.taken[index];
            // Acquire pairs with the release in `give_back`.
            let is_taken = !flag.load(Ordering::Relaxed)
                && flag.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
            if !is_taken {
                return false;
            }
            // Relaxed: ordered by `taken`.
            let is_made =
                self.made[index].load(Ordering::Relaxed) || may_make && self.make(index).is_ok();
            if !is_made {
                may_make = false;
                self.give_back(index);
            }
            is_made
        })
    }

    /// Makes a taken stack accessible. A child that was forked in between does so again.
    fn make(&self, index: usize) -> io::Result<()> {
        let (start, len_bytes) =
            (self.start_of(index).wrapping_add(GUARD_BYTES), STACK_BYTES - GUARD_BYTES);
        // SAFETY: inside the reservation, in a stack that this thread has taken.
        unsafe { memory::protect(start, len_bytes, Protection::ReadWrite) }?;
        // Relaxed: ordered by `taken`.
        self.made[index].store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Frees all stacks, unless the address of a local variable lies in one: then the thread has
    /// taken that one, and perhaps others for the faults inside which it took this one.
    fn free_those_of_others(&self, address: usize) {
        let pool = self.base.addr()..self.base.addr() + POOL_STACKS * STACK_BYTES;
        if !pool.contains(&address) {
            (0..POOL_STACKS).for_each(|index| self.give_back(index));
        }
    }

    fn give_back(&self, index: usize) {
        // Release pairs with the acquire in `take`: the next user sees the stack unused.
        self.taken[index].store(false, Ordering::Release);
    }
}

/// Frees the stacks of threads that a child does not have.
///
/// # Safety
/// The calling thread is the only thread of a process just forked.
pub(crate) unsafe fn reset_in_child() {
    if let Some(pool) = POOL.get() {
        let here = 0_u8;
        pool.free_those_of_others(std::ptr::from_ref(&here).addr());
    }
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
        let pool = POOL.get();
        if let Some(taken) = pool.and_then(|pool| Some((pool, pool.take()?))) {
            break taken;
        }
        if pool.is_none() || !on_alternate || alternate.ss_size >= OWN_STACK_BYTES {
            return function(argument);
        }
        // Holders may be waiting for something, and it may take this processor.
        std::thread::sleep(AGAIN);
    };
    let base = pool.start_of(index);
    let call = Call {
        function,
        argument,
        becomes_alternate: on_alternate,
        base: base.wrapping_add(GUARD_BYTES),
    };
    let top = base.wrapping_add(STACK_BYTES - END_BYTES);
    // SAFETY: `top` is the end of a stack that this thread owns until the flag is cleared.
    unsafe { call_on(top, enter, std::ptr::from_ref(&call) as *mut _) };
    pool.give_back(index);
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
    use std::os::fd::AsFd;

    use super::*;

    extern "C" fn note_place(place: *mut libc::c_void) {
        let local = 0u8;
        // SAFETY: the test passes the address of its own variable.
        unsafe { *place.cast::<usize>() = std::hint::black_box(&raw const local).addr() };
    }

    /// Whether the byte at an address can be stored to, by `/proc/self/maps`.
    fn is_accessible(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let number = |digits| usize::from_str_radix(digits, 16).unwrap();
        maps.lines().any(|line| {
            let (range, rest) = line.split_once(' ').unwrap();
            let (start, end) = range.split_once('-').unwrap();
            (number(start)..number(end)).contains(&address) && rest.starts_with("rw")
        })
    }

    #[test]
    fn a_function_has_a_pooled_stack_and_returns_to_where_it_was_called() {
        let pool = Pool::reserve().unwrap();
        let index = pool.take().expect("a stack is free");
        let (base, mut place) = (pool.start_of(index), 0usize);
        // SAFETY: the end of a stack that was taken; the function writes to the variable it is
        // passed.
        unsafe {
            let top = base.wrapping_add(STACK_BYTES - END_BYTES);
            call_on(top, note_place, (&raw mut place).cast());
        }
        assert!((base.addr() + GUARD_BYTES..base.addr() + STACK_BYTES).contains(&place));
        pool.give_back(index);
    }

    #[test]
    fn only_stacks_that_were_taken_are_accessible_and_never_their_guards() {
        let pool = Pool::reserve().unwrap();
        let taken: Vec<usize> = std::iter::from_fn(|| pool.take()).take(3).collect();
        for index in 0..POOL_STACKS {
            let start = pool.start_of(index).addr();
            assert!(!is_accessible(start), "the guard of stack {index}");
            for place in [GUARD_BYTES, STACK_BYTES - 1] {
                let is_made = index < MADE_AHEAD || taken.contains(&index);
                assert_eq!(is_accessible(start + place), is_made, "stack {index}");
            }
        }
    }

    /// Each thread has a stack of its own, however they meet.
    #[test]
    fn a_stack_has_one_owner() {
        let pool = Pool::reserve().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..2000_usize {
                        let index = pool.take().expect("a stack is free");
                        let word = pool.start_of(index).wrapping_add(STACK_BYTES - 8);
                        let mine = std::ptr::from_ref(&round).addr() + round;
                        // SAFETY: inside the stack that this thread has taken.
                        unsafe { word.cast::<usize>().write_volatile(mine) };
                        std::thread::yield_now();
                        // SAFETY: as above.
                        assert_eq!(unsafe { word.cast::<usize>().read_volatile() }, mine);
                        pool.give_back(index);
                    }
                });
            }
        });
    }

    /// A thread that can make no stack gets the first one, once it is free.
    #[test]
    fn stacks_that_cannot_be_made_are_left() {
        let pool = Pool::reserve().unwrap();
        // Memory that cannot be made writable, over all other stacks.
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        for index in MADE_AHEAD..POOL_STACKS {
            let (start, none) = (pool.start_of(index), Protection::None);
            // SAFETY: nothing uses these stacks.
            unsafe { memory::map_file_at(start, STACK_BYTES, none, file.as_fd(), 0) }.unwrap();
        }
        let taken: Vec<usize> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken.len(), MADE_AHEAD, "no other stack can be made");
        let held = || pool.taken.iter().filter(|&taken| taken.load(Ordering::Relaxed)).count();
        assert_eq!(held(), MADE_AHEAD);
        pool.give_back(2);
        assert_eq!(pool.take(), Some(2));
        // In a child, other threads' stacks are free: it has none of these threads.
        let local = 0_u8;
        pool.free_those_of_others((&raw const local).addr());
        assert_eq!(held(), 0);
        // It may have forked in a nested fault: nothing says that only one stack is its own.
        let (_outer, inner) = (pool.take().unwrap(), pool.take().unwrap());
        pool.free_those_of_others(pool.start_of(inner).addr() + GUARD_BYTES);
        assert_eq!(held(), 2);
    }
}
