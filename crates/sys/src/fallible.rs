//! Loads of mapped memory that report failure instead of raising a signal.
//!
//! A load from a file mapping raises SIGBUS where the file has been truncated or cannot be read. The
//! functions here have one faulting instruction each, at a known address, as the kernel's own
//! copies from user space do: a SIGBUS handler that finds the thread at that instruction
//! ([`is_at`]) lets it go on at the function's failure exit ([`fail`]). No memory mapping is changed and
//! no other thread notices.
//!
//! This needs a handler that calls [`fail`]; without one the signal takes its usual course. Where the
//! architecture is not supported, [`SUPPORTED`] is false and the functions are ordinary loads.

/// Whether the loads here can fail without a signal's default action.
pub const SUPPORTED: bool = cfg!(target_arch = "x86_64");

/// The code of the functions. The faulting instruction is the first one of each.
#[cfg(target_arch = "x86_64")]
mod code {
    pub const REP_MOVSB_BYTES: usize = 2;
    /// From the load to the exit that reports failure: the load (3), `xor` (2), `ret` (1).
    pub const LOAD_TO_FAILURE_BYTES: usize = 6;

    /// Returns the bytes *not* copied. The third argument only makes the length the fourth one, which
    /// arrives in rcx, where `rep movsb` wants it.
    ///
    /// # Safety
    /// `target` is writable for `len` bytes; `source` is mapped for as many.
    #[unsafe(naked)]
    pub unsafe extern "C" fn copy(
        target: *mut u8,
        source: *const u8,
        unused: usize,
        len: usize,
    ) -> usize {
        std::arch::naked_asm!("rep movsb", "mov rax, rcx", "ret")
    }

    /// Returns 0 if the byte could be loaded, else 1.
    ///
    /// # Safety
    /// `address` is mapped.
    #[unsafe(naked)]
    pub unsafe extern "C" fn touch(address: *const u8) -> usize {
        std::arch::naked_asm!(
            "movzx eax, byte ptr [rdi]",
            "xor eax, eax",
            "ret",
            "mov eax, 1",
            "ret",
        )
    }

    /// Returns the eight bytes in the low half, and in the high half 0 if they could be loaded, else 1.
    ///
    /// # Safety
    /// `address` is mapped for eight bytes.
    #[unsafe(naked)]
    pub unsafe extern "C" fn load_eight(address: *const u8) -> u128 {
        std::arch::naked_asm!(
            "mov rax, qword ptr [rdi]",
            "xor edx, edx",
            "ret",
            "mov edx, 1",
            "ret",
        )
    }
}

/// Copies bytes that others may be changing, as [`copy_racy`](crate::memory::copy_racy) does. False if a
/// byte could not be read; what was copied before it is unspecified.
///
/// # Safety
/// `target` is writable for `len_bytes`; `source` is mapped readable for as many, whether or not what is
/// behind the mapping can be read; they do not overlap.
#[inline]
pub unsafe fn try_copy(source: *const u8, target: *mut u8, len_bytes: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // A string move takes many times longer to start than a load.
        if len_bytes == 8 {
            // SAFETY: forwarded to the caller.
            let loaded = unsafe { code::load_eight(source) };
            // SAFETY: forwarded to the caller.
            unsafe { target.cast::<u64>().write_unaligned(loaded as u64) };
            return loaded >> 64 == 0;
        }
        // SAFETY: forwarded to the caller.
        unsafe { code::copy(target, source, 0, len_bytes) == 0 }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        // SAFETY: forwarded to the caller.
        unsafe { crate::memory::copy_racy(source, target, len_bytes) };
        true
    }
}

/// Loads one byte and forgets it: brings its page in. False if it could not be read.
///
/// # Safety
/// `address` is mapped readable.
#[inline]
pub unsafe fn try_touch(address: *const u8) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: forwarded to the caller.
        unsafe { code::touch(address) == 0 }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        // SAFETY: forwarded to the caller.
        unsafe { address.read_volatile() };
        true
    }
}

/// Whether a fault came from one of the loads here. Async-signal-safe.
///
/// # Safety
/// `context` is the third argument of a SA_SIGINFO handler.
pub unsafe fn is_at(context: *const libc::ucontext_t) -> bool {
    // SAFETY: forwarded to the caller.
    unsafe { exit_of(context) }.is_some()
}

/// Makes the interrupted load return its failure when the handler returns. False, and nothing is changed,
/// if the fault did not come from one.
///
/// # Safety
/// As for [`is_at`].
pub unsafe fn fail(context: *mut libc::ucontext_t) -> bool {
    // SAFETY: forwarded to the caller.
    let Some(exit) = (unsafe { exit_of(context) }) else { return false };
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the context is valid, and the exit lies in the function that was interrupted.
    unsafe {
        (*context).uc_mcontext.gregs[libc::REG_RIP as usize] = exit as i64;
    }
    let _ = exit;
    true
}

#[cfg(target_arch = "x86_64")]
unsafe fn exit_of(context: *const libc::ucontext_t) -> Option<usize> {
    // SAFETY: gregs is part of every x86-64 ucontext, which the caller vouches for.
    let at = unsafe { (*context).uc_mcontext.gregs[libc::REG_RIP as usize] } as usize;
    let copy = code::copy as *const () as usize;
    let loads = [code::touch as *const () as usize, code::load_eight as *const () as usize];
    if at == copy {
        // rcx counts what is left, so the ordinary exit reports the failure.
        Some(copy + code::REP_MOVSB_BYTES)
    } else {
        loads.contains(&at).then_some(at + code::LOAD_TO_FAILURE_BYTES)
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn exit_of(_context: *const libc::ucontext_t) -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readable_bytes_arrive() {
        let source: Vec<u8> = (0..=255).collect();
        let mut target = vec![0u8; 256];
        // SAFETY: both vectors hold 256 bytes.
        assert!(unsafe { try_copy(source.as_ptr(), target.as_mut_ptr(), 256) });
        assert_eq!(source, target);
        // SAFETY: as above.
        assert!(unsafe { try_copy(source.as_ptr().add(3), target.as_mut_ptr().add(1), 8) });
        assert_eq!(source[3..11], target[1..9]);
        // SAFETY: inside the vector.
        assert!(unsafe { try_touch(source.as_ptr()) });
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_instructions_are_where_the_exits_assume() {
        let bytes = |function: *const (), len| {
            // SAFETY: code is readable.
            unsafe { std::slice::from_raw_parts(function.cast::<u8>(), len) }.to_vec()
        };
        assert_eq!(bytes(code::copy as *const (), code::REP_MOVSB_BYTES), [0xf3, 0xa4]);
        let touch = bytes(code::touch as *const (), code::LOAD_TO_FAILURE_BYTES + 1);
        assert_eq!(touch[..3], [0x0f, 0xb6, 0x07]);
        assert_eq!(touch[5], 0xc3, "the exit follows the first return");
        assert_eq!(touch[6], 0xb8, "and is `mov eax, 1`");
        let load = bytes(code::load_eight as *const (), code::LOAD_TO_FAILURE_BYTES + 1);
        assert_eq!(load[..3], [0x48, 0x8b, 0x07]);
        assert_eq!((load[5], load[6]), (0xc3, 0xba), "and here `mov edx, 1`");
    }
}
