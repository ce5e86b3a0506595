//! Signal handlers, alternate stacks and the hardware's report of a fault.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::check;

/// The details of a fault signal.
#[derive(Debug, Clone, Copy)]
pub struct FaultContext {
    /// SIGBUS or SIGSEGV.
    pub signal: i32,
    /// The address of the access.
    pub address: usize,
    /// Whether the access was a store. `None` where neither the hardware nor its emulator reports
    /// it.
    pub write: Option<bool>,
    /// Whether the access is a load of [`fallible`](crate::fallible), which can report failure: the
    /// owner of the address need not make it succeed.
    pub fallible: bool,
    /// Whether the memory itself is broken: the page is mapped, and repeating the access would
    /// never end.
    pub hardware_error: bool,
}

/// The C form of a three-argument handler.
pub type RawHandler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// Reads address and kind of access out of a handler's arguments.
///
/// # Safety
/// The arguments are those the kernel passed to a SA_SIGINFO handler of SIGBUS or SIGSEGV.
pub unsafe fn fault_context(
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) -> FaultContext {
    // SAFETY: for these two signals the kernel fills in si_addr.
    let address = unsafe { (*info).si_addr() } as usize;
    // SAFETY: the third argument of a SA_SIGINFO handler is a ucontext_t.
    let write = unsafe { store_bit(context.cast()) };
    // SAFETY: as above.
    let fallible = unsafe { crate::fallible::is_at(context.cast()) };
    // SAFETY: si_code is always valid.
    let code = unsafe { (*info).si_code };
    let hardware_error =
        signal == libc::SIGBUS && matches!(code, libc::BUS_MCEERR_AR | libc::BUS_MCEERR_AO);
    FaultContext { signal, address, write, fallible, hardware_error }
}

#[cfg(target_arch = "x86_64")]
unsafe fn store_bit(context: *const libc::ucontext_t) -> Option<bool> {
    // SAFETY: forwarded to the caller; gregs is part of every x86-64 ucontext.
    let code = unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] };
    // Bit 1 of the page-fault error code: the access was a write (Intel SDM vol. 3, 4.7).
    Some(code & 2 != 0)
}

/// The kernel appends records to the registers of a signal frame; one of them is the fault's
/// syndrome.
#[cfg(target_arch = "aarch64")]
unsafe fn store_bit(context: *const libc::ucontext_t) -> Option<bool> {
    let registers = size_of::<libc::mcontext_t>() - syndrome::RECORDS_BYTES;
    // SAFETY: the kernel's `sigcontext` ends with this many bytes of records in every aarch64
    // ucontext.
    let records = unsafe {
        let start = (&raw const (*context).uc_mcontext).cast::<u8>().add(registers);
        std::slice::from_raw_parts(start, syndrome::RECORDS_BYTES)
    };
    syndrome::store_bit(records)
}

/// The fault syndrome of an aarch64 kernel (arch/arm64/include/uapi/asm/sigcontext.h).
#[cfg(any(target_arch = "aarch64", test))]
mod syndrome {
    /// `__reserved` of `struct sigcontext`.
    pub const RECORDS_BYTES: usize = 4096;
    /// Magic and length of a record.
    const HEADER_BYTES: usize = 8;
    const ESR_MAGIC: u32 = 0x4553_5201;

    #[cfg(target_arch = "aarch64")]
    const _: () = assert!(
        size_of::<libc::mcontext_t>() == 288 + RECORDS_BYTES,
        "the registers are 280 bytes, and the records begin at a multiple of 16"
    );

    /// Returns whether the access was a store, from the records of a signal frame; `None` if no
    /// record tells.
    pub fn store_bit(records: &[u8]) -> Option<bool> {
        let mut rest = records;
        loop {
            let (header, behind) = rest.split_at_checked(HEADER_BYTES)?;
            let word = |at: usize| header[at..at + 4].try_into().map(u32::from_le_bytes).ok();
            let (magic, len_bytes) = (word(0)?, word(4)? as usize);
            if magic == ESR_MAGIC {
                let syndrome = behind.first_chunk().copied().map(u64::from_le_bytes)?;
                return is_store(syndrome);
            }
            // The last record is empty.
            if len_bytes < HEADER_BYTES {
                return None;
            }
            rest = rest.get(len_bytes..)?;
        }
    }

    /// Decodes ESR_EL1 (Arm ARM, D17.2.37): the exception class, and for a data abort the bits
    /// "write, not read" and "cache maintenance", which sets the former but is not a store.
    fn is_store(syndrome: u64) -> Option<bool> {
        match syndrome >> 26 & 0x3f {
            0x24 | 0x25 => Some(syndrome & 1 << 6 != 0 && syndrome & 1 << 8 == 0),
            // An instruction fetch.
            0x20 | 0x21 => Some(false),
            _ => None,
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn record(magic: u32, content: &[u8]) -> Vec<u8> {
            let len_bytes = (HEADER_BYTES + content.len()) as u32;
            [&magic.to_le_bytes()[..], &len_bytes.to_le_bytes(), content].concat()
        }

        fn with_syndrome(syndrome: u64) -> Vec<u8> {
            let mut records = record(0x4650_8001, &[0; 520]); // the vector registers come first
            records.extend(record(ESR_MAGIC, &syndrome.to_le_bytes()));
            records.resize(RECORDS_BYTES, 0);
            records
        }

        #[test]
        fn loads_stores_and_jumps_are_told_apart() {
            // Exception class, instruction length, the bits under test, a level 3 translation
            // fault.
            let data_abort = |bits: u64| with_syndrome(0x24 << 26 | 1 << 25 | bits | 0b111);
            assert_eq!(store_bit(&data_abort(0)), Some(false));
            assert_eq!(store_bit(&data_abort(1 << 6)), Some(true));
            assert_eq!(store_bit(&data_abort(1 << 6 | 1 << 8)), Some(false), "cache maintenance");
            assert_eq!(store_bit(&with_syndrome(0x20 << 26 | 1 << 25 | 0b111)), Some(false));
            assert_eq!(store_bit(&with_syndrome(0)), None);
        }

        #[test]
        fn records_that_do_not_tell_or_do_not_fit_end_the_search() {
            assert_eq!(store_bit(&[0; RECORDS_BYTES]), None);
            assert_eq!(store_bit(&[]), None);
            assert_eq!(store_bit(&record(7, &[1; 24])), None);
            let mut cut = record(7, &[]);
            cut.extend(&ESR_MAGIC.to_le_bytes());
            assert_eq!(store_bit(&cut), None);
            let mut endless = record(7, &[0; 64]);
            endless[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
            assert_eq!(store_bit(&endless), None);
        }
    }
}

/// Installs a fault handler that runs on the alternate stack, with asynchronous signals blocked,
/// and re-entrant for nested faults. Returns the previous action.
pub fn install(signal: i32, handler: RawHandler) -> io::Result<libc::sigaction> {
    // SAFETY: an all-zero sigaction is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: the set lives in `action`.
    unsafe { libc::sigfillset(&raw mut action.sa_mask) };
    // Synchronous signals stay deliverable: the kernel kills a process that raises a blocked one.
    for synchronous in [libc::SIGBUS, libc::SIGSEGV, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
        // SAFETY: as above.
        unsafe { libc::sigdelset(&raw mut action.sa_mask, synchronous) };
    }
    // SAFETY: an all-zero sigaction is valid.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: both structures live on this stack.
    let result = unsafe { libc::sigaction(signal, &raw const action, &raw mut previous) };
    check(result.into())?;
    Ok(previous)
}

/// Returns the action installed for `signal`.
pub fn installed(signal: i32) -> io::Result<libc::sigaction> {
    // SAFETY: an all-zero sigaction is valid.
    let mut current: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a null action only queries.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut current) };
    check(result.into())?;
    Ok(current)
}

/// Passes a fault on to the previously installed action, as the kernel would have: a handler is
/// called; for the default action, the default is restored so that the repeated access triggers it.
/// SIG_IGN, which the kernel does not honour for synchronous faults, counts as the default for
/// them. A signal sent by a process is ignored under SIG_IGN.
///
/// # Safety
/// Called inside a fault handler with its arguments; `previous` came from [`install`].
pub unsafe fn chain(
    previous: &libc::sigaction,
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: si_code is always valid.
    let sent = unsafe { (*info).si_code } <= 0;
    match previous.sa_sigaction {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: an all-zero sigaction is SIG_DFL without flags.
            let default: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: returning from the handler repeats the access under the default action.
            unsafe { libc::sigaction(signal, &raw const default, std::ptr::null_mut()) };
            // A signal sent by a process (kill, raise) is not repeated by returning: send it again.
            if sent {
                // SAFETY: raise has no preconditions.
                unsafe { libc::raise(signal) };
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with SA_SIGINFO the field holds a three-argument handler.
            let handler: RawHandler = unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without SA_SIGINFO the field holds a one-argument handler.
            let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// Returns the calling thread's alternate signal stack: base and size, or `None` if it has none.
pub fn alternate_stack() -> Option<(*mut u8, usize)> {
    // SAFETY: an all-zero stack_t is valid, and a null first argument only queries.
    let mut stack: libc::stack_t = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let result = unsafe { libc::sigaltstack(std::ptr::null(), &raw mut stack) };
    (result == 0 && stack.ss_flags & libc::SS_DISABLE == 0)
        .then_some((stack.ss_sp.cast(), stack.ss_size))
}

/// Makes `memory` the calling thread's alternate signal stack.
///
/// # Safety
/// The memory stays valid until another stack is set or the thread has ended, and the thread is not
/// running on its current alternate stack.
pub unsafe fn set_alternate_stack(memory: *mut u8, len_bytes: usize) -> io::Result<()> {
    let stack = libc::stack_t { ss_sp: memory.cast(), ss_flags: 0, ss_size: len_bytes };
    // SAFETY: forwarded to the caller.
    check(unsafe { libc::sigaltstack(&raw const stack, std::ptr::null_mut()) }.into()).map(drop)
}

/// Removes the calling thread's alternate stack.
pub fn disable_alternate_stack() {
    let stack =
        libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
    // SAFETY: disabling has no preconditions; it fails harmlessly while the thread runs on that
    // stack.
    unsafe { libc::sigaltstack(&raw const stack, std::ptr::null_mut()) };
}

/// Returns whether the calling thread blocks `signal`.
pub fn is_blocked(signal: i32) -> bool {
    // SAFETY: an all-zero set is valid; a null new set only queries.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut set) };
    // SAFETY: the set was filled in.
    unsafe { libc::sigismember(&raw const set, signal) == 1 }
}

/// Blocks all asynchronous signals in the calling thread: for background threads that must not run
/// the application's handlers.
pub fn block_asynchronous() {
    // SAFETY: an all-zero set is valid.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set lives on this stack.
    unsafe { libc::sigfillset(&raw mut set) };
    for synchronous in [libc::SIGBUS, libc::SIGSEGV, libc::SIGFPE, libc::SIGILL] {
        // SAFETY: as above.
        unsafe { libc::sigdelset(&raw mut set, synchronous) };
    }
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()) };
}

/// Lets a write behind the limit of file lengths (`RLIMIT_FSIZE`) fail with `EFBIG`, also in programs
/// that are started later: by default it ends the process.
pub fn ignore_length_limit() {
    // SAFETY: the signal stays unhandled; the call has no other preconditions.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Termination requests as a descriptor that becomes readable: SIGTERM, SIGINT and SIGHUP, unless
/// ignored. While it exists, these signals do not terminate the process.
#[derive(Debug)]
pub struct Ending {
    signals: OwnedFd,
    former: libc::sigset_t,
}

impl Ending {
    /// Blocks the signals in the calling thread and in threads it starts later. Threads that exist
    /// already would still take the signals, so call this before starting any.
    pub fn wait_for() -> io::Result<Ending> {
        // SAFETY: an all-zero set is valid.
        let mut wanted: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set lives on this stack.
        unsafe { libc::sigemptyset(&raw mut wanted) };
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            // The parent asked to ignore it (nohup). A blocked signal would be queued nevertheless.
            if installed(signal)?.sa_sigaction != libc::SIG_IGN {
                // SAFETY: as above.
                unsafe { libc::sigaddset(&raw mut wanted, signal) };
            }
        }
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: a set that outlives the call.
        let signals = check(unsafe { libc::signalfd(-1, &raw const wanted, flags) }.into())?;
        // SAFETY: just made, so nothing else owns the descriptor.
        let signals = unsafe { OwnedFd::from_raw_fd(signals as libc::c_int) };
        // SAFETY: as above.
        let mut former: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: two sets that outlive the call.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const wanted, &raw mut former) };
        Ok(Ending { signals, former })
    }

    /// Lets a command take these signals, as its caller does not: a program inherits which are blocked.
    pub fn leave_to(&self, command: &mut Command) {
        let former = self.former;
        let unblock = move || {
            // SAFETY: a set that outlives the call.
            let set = unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const former, std::ptr::null_mut())
            };
            if set == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(set)) }
        };
        // SAFETY: the closure makes one system call, and allocates nothing.
        unsafe { command.pre_exec(unblock) };
    }

    /// Takes one signal that has come; `None` if there is none.
    pub fn take(&self) -> Option<i32> {
        let mut taken = [0_u8; size_of::<libc::signalfd_siginfo>()];
        let len = rustix::io::read(&self.signals, &mut taken).ok()?;
        // The number comes first in the structure.
        let number = taken[..len].first_chunk().map(|number| u32::from_ne_bytes(*number));
        number.and_then(|number| i32::try_from(number).ok())
    }
}

impl AsFd for Ending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // Consume pending signals: they were meant for this object, and would terminate the process
        // when unblocked.
        let mut taken = [0_u8; size_of::<libc::signalfd_siginfo>()];
        // SAFETY: as many bytes as there is room for.
        while unsafe {
            libc::read(self.signals.as_raw_fd(), taken.as_mut_ptr().cast(), taken.len())
        } > 0
        {}
        // SAFETY: the signal mask from before.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.former, std::ptr::null_mut());
        }
    }
}

/// Unblocks SIGBUS and SIGSEGV in the calling thread.
pub fn unblock_faults() {
    // SAFETY: an all-zero set is valid.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    for fault in [libc::SIGBUS, libc::SIGSEGV] {
        // SAFETY: the set lives on this stack.
        unsafe { libc::sigaddset(&raw mut set, fault) };
    }
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
}
