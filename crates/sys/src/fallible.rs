//! Accesses to mapped memory that report failure instead of raising a signal.
//!
//! An access to a file mapping raises SIGBUS where the file has been truncated or cannot be read,
//! or where no page can be allocated. The functions here fault only at known addresses, as the
//! kernel's own copies from and to user space do: a SIGBUS handler that finds the thread at one of
//! them ([`is_at`]) resumes it at the function's failure exit ([`fail`]). No memory mapping is
//! changed and no other thread is affected.
//!
//! Stores never tear a naturally aligned word of eight bytes, whatever the length: another thread,
//! or recovery after a crash on persistent memory, sees it old or new.
//!
//! This needs a handler that calls [`fail`]; without one the signal has its usual effect. Where the
//! architecture is not supported, [`SUPPORTED`] is false and the functions are ordinary loads and
//! stores.

use crate::copy::{self, FlushForm};

/// Whether the accesses here can fail without a signal's default action.
pub const SUPPORTED: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

const WORD_BYTES: usize = 8;
const LINE_BYTES: usize = 64;

/// The machine code of the functions. The faulting instruction is the first one of each, except in
/// loops: these begin with a jump over their failure exit, and may fault anywhere.
#[cfg(target_arch = "x86_64")]
mod code {
    pub const REP_MOVSB_BYTES: usize = 2;
    /// Distance from the start of a loop to its exit, which returns the count in rcx: a short jump.
    pub const LOOP_EXIT_BYTES: usize = 2;
    pub const STREAM_BYTES: usize = 59;
    pub const COPY_WORDS_BYTES: usize = 27;
    pub const COPY_LINES_BYTES: usize = 59;
    pub const COPY_LINES_AVX_BYTES: usize = 42;
    pub const FLUSH_CLWB_BYTES: usize = 21;
    pub const FLUSH_CLFLUSHOPT_BYTES: usize = 21;
    pub const FLUSH_CLFLUSH_BYTES: usize = 20;
    /// Distance from the load to the failure exit: the load (3), `xor` (2), `ret` (1).
    pub const LOAD_TO_FAILURE_BYTES: usize = 6;

    /// Returns the bytes *not* copied. The third argument exists only to make the length the fourth
    /// one, which is passed in rcx, where `rep movsb` expects it.
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

    /// A loop that copies one unit of `bytes` per iteration. The `exit` instructions run before it returns.
    macro_rules! copy_loop {
        ($(#[$attribute:meta])* $name:ident, $bytes:literal, [$first:literal $(, $more:literal)*], exit: [$($exit:literal),*]) => {
            $(#[$attribute])*
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name(
                target: *mut u8,
                source: *const u8,
                unused: usize,
                units: usize,
            ) -> usize {
                std::arch::naked_asm!(
                    "jmp 3f",
                    "2: mov rax, rcx",
                    $($exit,)*
                    "ret",
                    concat!("3: ", $first),
                    $($more,)*
                    concat!("add rsi, ", $bytes),
                    concat!("add rdi, ", $bytes),
                    "dec rcx",
                    "jnz 3b",
                    "jmp 2b",
                    "ud2",
                )
            }
        };
    }
    copy_loop!(
        /// As [`copy`], by words of eight bytes; returns the words *not* copied. It is called for less
        /// than a line, which takes less time than a string move takes to start.
        ///
        /// # Safety
        /// As for [`copy`], for `units` > 0 words.
        copy_words,
        8,
        ["mov rax, [rsi]", "mov [rdi], rax"],
        exit: []
    );
    copy_loop!(
        /// Copies lines of 64 bytes with non-temporal stores; returns the lines *not* copied.
        ///
        /// # Safety
        /// As for [`copy`], for `units` > 0 lines; `target` is aligned to a line.
        stream,
        64,
        [
            "movdqu xmm0, [rsi]",
            "movdqu xmm1, [rsi + 16]",
            "movdqu xmm2, [rsi + 32]",
            "movdqu xmm3, [rsi + 48]",
            "movntdq [rdi], xmm0",
            "movntdq [rdi + 16], xmm1",
            "movntdq [rdi + 32], xmm2",
            "movntdq [rdi + 48], xmm3"
        ],
        exit: []
    );
    copy_loop!(
        /// As [`copy`], by lines of 64 bytes; returns the lines *not* copied. A string move has a
        /// start-up cost that exceeds the copy of a few hundred bytes, and handles lines serially.
        ///
        /// # Safety
        /// As for [`copy`], for `units` > 0 lines.
        copy_lines,
        64,
        [
            "movdqu xmm0, [rsi]",
            "movdqu xmm1, [rsi + 16]",
            "movdqu xmm2, [rsi + 32]",
            "movdqu xmm3, [rsi + 48]",
            "movdqu [rdi], xmm0",
            "movdqu [rdi + 16], xmm1",
            "movdqu [rdi + 32], xmm2",
            "movdqu [rdi + 48], xmm3"
        ],
        exit: []
    );
    copy_loop!(
        /// As [`copy_lines`], with half as many loads and stores: a page takes 150 ns less.
        ///
        /// # Safety
        /// As for [`copy_lines`], and the CPU has AVX.
        copy_lines_avx,
        64,
        [
            "vmovdqu ymm0, [rsi]",
            "vmovdqu ymm1, [rsi + 32]",
            "vmovdqu [rdi], ymm0",
            "vmovdqu [rdi + 32], ymm1"
        ],
        exit: ["vzeroupper"]
    );

    macro_rules! flush {
        ($name:ident, $instruction:literal) => {
            /// Flushes lines; returns those *not* flushed.
            ///
            /// # Safety
            /// `lines` > 0 lines from `first` are mapped, and the CPU has the instruction.
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name(
                first: *const u8,
                unused: usize,
                unused_too: usize,
                lines: usize,
            ) -> usize {
                std::arch::naked_asm!(
                    "jmp 3f",
                    "2: mov rax, rcx",
                    "ret",
                    concat!("3: ", $instruction, " [rdi]"),
                    "add rdi, 64",
                    "dec rcx",
                    "jnz 3b",
                    "jmp 2b",
                    "ud2",
                )
            }
        };
    }
    flush!(flush_clwb, "clwb");
    flush!(flush_clflushopt, "clflushopt");
    flush!(flush_clflush, "clflush");

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

    /// Returns the eight bytes in the low half, and in the high half 0 if they could be loaded,
    /// else 1.
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

/// The machine code of the functions: each may fault anywhere, and begins with a jump over its
/// failure exit.
#[cfg(target_arch = "aarch64")]
mod code {
    /// Distance from the start of a function to its exit, which returns what was not done: a jump.
    pub const EXIT_BYTES: usize = 4;
    pub const COPY_BYTES: usize = 36 * 4;
    pub const FLUSH_BYTES: usize = 10 * 4;

    /// Copies lines of 64 bytes, then words, then bytes; returns the bytes *not* copied. Words are
    /// stored whole where `target` is aligned to them.
    ///
    /// # Safety
    /// `target` is mapped for `len` bytes, and so is `source`.
    #[unsafe(naked)]
    pub unsafe extern "C" fn copy(target: *mut u8, source: *const u8, len: usize) -> usize {
        std::arch::naked_asm!(
            "b 2f",
            "mov x0, x2",
            "ret",
            "2:",
            "cmp x2, #64",
            "b.lo 4f",
            "3:",
            "ldp x3, x4, [x1]",
            "ldp x5, x6, [x1, #16]",
            "ldp x7, x8, [x1, #32]",
            "ldp x9, x10, [x1, #48]",
            "stp x3, x4, [x0]",
            "stp x5, x6, [x0, #16]",
            "stp x7, x8, [x0, #32]",
            "stp x9, x10, [x0, #48]",
            "add x1, x1, #64",
            "add x0, x0, #64",
            "sub x2, x2, #64",
            "cmp x2, #64",
            "b.hs 3b",
            "4:",
            "cmp x2, #8",
            "b.lo 6f",
            "5:",
            "ldr x3, [x1]",
            "str x3, [x0]",
            "add x1, x1, #8",
            "add x0, x0, #8",
            "sub x2, x2, #8",
            "cmp x2, #8",
            "b.hs 5b",
            "6:",
            "cbz x2, 8f",
            "7:",
            "ldrb w3, [x1]",
            "strb w3, [x0]",
            "add x1, x1, #1",
            "add x0, x0, #1",
            "subs x2, x2, #1",
            "b.ne 7b",
            "8:",
            "mov x0, #0",
            "ret",
            "udf #0",
        )
    }

    /// Writes lines of 64 bytes back (`dc cvap`); returns the lines *not* written back.
    ///
    /// # Safety
    /// The lines are mapped, and the CPU has the instruction.
    #[unsafe(naked)]
    pub unsafe extern "C" fn flush(first: *const u8, lines: usize) -> usize {
        std::arch::naked_asm!(
            "b 2f",
            "mov x0, x1",
            "ret",
            "2:",
            "cbz x1, 4f",
            "3:",
            "sys #3, c7, c12, #1, x0",
            "add x0, x0, #64",
            "subs x1, x1, #1",
            "b.ne 3b",
            "4:",
            "mov x0, #0",
            "ret",
            "udf #0",
        )
    }
}

/// Copies lines of 64 bytes by the fastest available form; returns those *not* copied.
///
/// # Safety
/// As for [`code::copy_lines`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_lines(target: *mut u8, source: *const u8, lines: usize) -> usize {
    if is_x86_feature_detected!("avx") {
        // SAFETY: forwarded to the caller; the CPU has AVX.
        unsafe { code::copy_lines_avx(target, source, 0, lines) }
    } else {
        // SAFETY: forwarded to the caller.
        unsafe { code::copy_lines(target, source, 0, lines) }
    }
}

/// Copies bytes that other threads may be changing, as [`copy_racy`](crate::memory::copy_racy)
/// does. False if a byte could not be read; the bytes copied before it are unspecified.
///
/// # Safety
/// `target` is writable for `len_bytes`; `source` is mapped readable for as many, even if accesses
/// to the mapping may fail; they do not overlap.
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
        let lines = len_bytes / LINE_BYTES;
        // SAFETY: whole lines inside both ranges.
        if lines > 0 && unsafe { copy_lines(target, source, lines) } != 0 {
            return false;
        }
        let done = lines * LINE_BYTES;
        let (target, source) = (target.wrapping_add(done), source.wrapping_add(done));
        // SAFETY: the last bytes of both ranges.
        done == len_bytes || unsafe { code::copy(target, source, 0, len_bytes - done) } == 0
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        code::copy(target, source, len_bytes) == 0
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        // SAFETY: forwarded to the caller.
        unsafe { crate::memory::copy_racy(source, target, len_bytes) };
        true
    }
}

/// Lines prefetched at a time: those of a page.
#[cfg(target_arch = "x86_64")]
const FETCHED_LINES: usize = 64;

/// Stores lines of 64 bytes; false if one could not be written.
///
/// A line that is not in the cache is fetched before it is stored to, and stores retire in order,
/// about a dozen lines at a time. So all lines are prefetched first: a page takes 390 to 470 ns
/// instead of 530.
///
/// # Safety
/// As for [`try_store`].
#[cfg(target_arch = "x86_64")]
unsafe fn store_lines(target: *mut u8, source: *const u8, lines: usize) -> bool {
    use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};

    (0..lines).step_by(FETCHED_LINES).all(|done| {
        let count = FETCHED_LINES.min(lines - done);
        let at = |line: usize| (done + line) * LINE_BYTES;
        for line in 0..count {
            // SAFETY: a prefetch is a hint, and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(target.wrapping_add(at(line)).cast()) };
        }
        let (to, from) = (target.wrapping_add(at(0)), source.wrapping_add(at(0)));
        // SAFETY: inside both ranges, which are valid by the caller's contract.
        unsafe { copy_lines(to, from, count) == 0 }
    })
}

/// Copies bytes into mapped memory. False if a byte could not be written; the bytes copied before
/// it are unspecified.
///
/// # Safety
/// `source` is readable for `len_bytes`; `target` is mapped writable for as many, even if accesses
/// to the mapping may fail; they do not overlap.
pub unsafe fn try_store(source: *const u8, target: *mut u8, len_bytes: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let head_bytes = target.align_offset(WORD_BYTES).min(len_bytes);
        let lines = (len_bytes - head_bytes) / LINE_BYTES;
        let words_at = head_bytes + lines * LINE_BYTES;
        let words = (len_bytes - words_at) / WORD_BYTES;
        let tail_at = words_at + words * WORD_BYTES;
        let at = |offset: usize| (target.wrapping_add(offset), source.wrapping_add(offset));
        let (to, from) = at(0);
        // SAFETY: the first bytes of both ranges.
        if head_bytes > 0 && unsafe { code::copy(to, from, 0, head_bytes) } != 0 {
            return false;
        }
        let (to, from) = at(head_bytes);
        // Stores of 16 bytes at multiples of 8 tear, if at all, at the end of a cache line.
        // SAFETY: whole lines inside both ranges.
        if !unsafe { store_lines(to, from, lines) } {
            return false;
        }
        let (to, from) = at(words_at);
        // SAFETY: whole words inside both ranges.
        if words > 0 && unsafe { code::copy_words(to, from, 0, words) } != 0 {
            return false;
        }
        let (to, from) = at(tail_at);
        // SAFETY: the last bytes of both ranges.
        tail_at == len_bytes || unsafe { code::copy(to, from, 0, len_bytes - tail_at) } == 0
    }
    #[cfg(target_arch = "aarch64")]
    {
        let head_bytes = target.align_offset(WORD_BYTES).min(len_bytes);
        let (to, from) = (target.wrapping_add(head_bytes), source.wrapping_add(head_bytes));
        // SAFETY: the first bytes of both ranges, then the others, which are aligned in the target.
        unsafe {
            code::copy(target, source, head_bytes) == 0
                && code::copy(to, from, len_bytes - head_bytes) == 0
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let mut done = 0;
        while done < len_bytes {
            let (to, from) = (target.wrapping_add(done), source.wrapping_add(done));
            if to.align_offset(WORD_BYTES) == 0 && len_bytes - done >= WORD_BYTES {
                // SAFETY: a word inside the source.
                let word = unsafe { from.cast::<u64>().read_unaligned() };
                // SAFETY: an aligned word inside the target.
                unsafe { to.cast::<u64>().write_volatile(word) };
                done += WORD_BYTES;
            } else {
                // SAFETY: a byte inside the source.
                let byte = unsafe { from.read() };
                // SAFETY: a byte inside the target.
                unsafe { to.write_volatile(byte) };
                done += 1;
            }
        }
        true
    }
}

/// Copies bytes into mapped persistent memory, bypassing or flushing the CPU's caches: on return
/// they are in the persistence domain. False if a byte could not be written; the bytes copied
/// before it are unspecified.
///
/// # Safety
/// As for [`try_store`], and `flush` is available.
pub unsafe fn try_persist(
    source: *const u8,
    target: *mut u8,
    len_bytes: usize,
    flush: FlushForm,
) -> bool {
    let head_bytes = target.align_offset(LINE_BYTES).min(len_bytes);
    let lines = (len_bytes - head_bytes) / LINE_BYTES;
    let tail_at = head_bytes + lines * LINE_BYTES;
    let tail_bytes = len_bytes - tail_at;
    let at = |offset: usize| (source.wrapping_add(offset), target.wrapping_add(offset));
    let (from, to) = at(0);
    // SAFETY: the first bytes of both ranges.
    let copied = unsafe { try_store_and_flush(from, to, head_bytes, flush) };
    let (from, to) = at(head_bytes);
    // SAFETY: whole lines inside both ranges; the target is aligned to a line.
    let copied = copied && (lines == 0 || unsafe { try_stream(from, to, lines, flush) });
    let (from, to) = at(tail_at);
    // SAFETY: the last bytes of both ranges.
    let copied = copied && unsafe { try_store_and_flush(from, to, tail_bytes, flush) };
    copy::store_fence();
    copied
}

/// # Safety
/// As for [`try_persist`].
unsafe fn try_store_and_flush(
    source: *const u8,
    target: *mut u8,
    len_bytes: usize,
    flush: FlushForm,
) -> bool {
    // SAFETY: forwarded to the caller.
    let stored = unsafe { try_store(source, target, len_bytes) };
    // SAFETY: forwarded to the caller.
    stored && unsafe { try_flush(target, len_bytes, flush) }
}

/// # Safety
/// As for [`try_persist`], for `lines` > 0 lines; the target is aligned to a line.
unsafe fn try_stream(source: *const u8, target: *mut u8, lines: usize, flush: FlushForm) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let _ = flush;
        // SAFETY: forwarded to the caller.
        unsafe { code::stream(target, source, 0, lines) == 0 }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: forwarded to the caller.
    unsafe {
        try_store_and_flush(source, target, lines * LINE_BYTES, flush)
    }
}

/// Writes back every cache line that the range touches; durable after a following
/// [`store_fence`](copy::store_fence). False if a page of the range could not be accessed.
///
/// # Safety
/// The range is mapped, even if accesses to it may fail, and `flush` is available.
pub unsafe fn try_flush(start: *const u8, len_bytes: usize, flush: FlushForm) -> bool {
    if len_bytes == 0 {
        return true;
    }
    #[cfg(target_arch = "x86_64")]
    {
        let lead_bytes = start as usize % LINE_BYTES;
        let first = start.wrapping_sub(lead_bytes);
        let lines = (lead_bytes + len_bytes).div_ceil(LINE_BYTES);
        let left = match flush {
            // SAFETY: lines that overlap the caller's range and so are in its pages; the form is
            // available.
            FlushForm::Clwb => unsafe { code::flush_clwb(first, 0, 0, lines) },
            // SAFETY: as above.
            FlushForm::ClflushOpt => unsafe { code::flush_clflushopt(first, 0, 0, lines) },
            // SAFETY: as above.
            FlushForm::Clflush | FlushForm::DcCvap => unsafe {
                code::flush_clflush(first, 0, 0, lines)
            },
        };
        left == 0
    }
    #[cfg(target_arch = "aarch64")]
    {
        let FlushForm::DcCvap = flush else { return false };
        let lead_bytes = start as usize % LINE_BYTES;
        let first = start.wrapping_sub(lead_bytes);
        // SAFETY: lines that overlap the caller's range and so are in its pages; the form is
        // available.
        unsafe { code::flush(first, (lead_bytes + len_bytes).div_ceil(LINE_BYTES)) == 0 }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        // SAFETY: forwarded to the caller.
        unsafe { flush.flush(start, len_bytes) };
        true
    }
}

/// Loads one byte and discards it, which faults its page in. False if it could not be read.
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
    #[cfg(target_arch = "aarch64")]
    {
        let mut byte = 0;
        // SAFETY: forwarded to the caller; the target is a local variable.
        unsafe { code::copy(&raw mut byte, address, 1) == 0 }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        // SAFETY: forwarded to the caller.
        unsafe { address.read_volatile() };
        true
    }
}

/// Returns whether a fault came from one of the accesses here. Async-signal-safe.
///
/// # Safety
/// `context` is the third argument of a SA_SIGINFO handler.
pub unsafe fn is_at(context: *const libc::ucontext_t) -> bool {
    // SAFETY: forwarded to the caller.
    unsafe { exit_of(context) }.is_some()
}

/// Makes the interrupted access return its failure when the handler returns. Returns false and
/// changes nothing if the fault did not come from one of the accesses here.
///
/// # Safety
/// As for [`is_at`].
pub unsafe fn fail(context: *mut libc::ucontext_t) -> bool {
    // SAFETY: forwarded to the caller.
    let Some(exit) = (unsafe { exit_of(context) }) else { return false };
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the context is valid, and the exit is in the function that was interrupted.
    unsafe {
        (*context).uc_mcontext.gregs[libc::REG_RIP as usize] = exit as i64;
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        (*context).uc_mcontext.pc = exit as u64;
    }
    let _ = exit;
    true
}

#[cfg(target_arch = "x86_64")]
unsafe fn exit_of(context: *const libc::ucontext_t) -> Option<usize> {
    // SAFETY: gregs is part of every x86-64 ucontext; the caller passes a valid one.
    let at = unsafe { (*context).uc_mcontext.gregs[libc::REG_RIP as usize] } as usize;
    let copy = code::copy as *const () as usize;
    let loads = [code::touch as *const () as usize, code::load_eight as *const () as usize];
    let loops = [
        (code::stream as *const () as usize, code::STREAM_BYTES),
        (code::copy_words as *const () as usize, code::COPY_WORDS_BYTES),
        (code::copy_lines as *const () as usize, code::COPY_LINES_BYTES),
        (code::copy_lines_avx as *const () as usize, code::COPY_LINES_AVX_BYTES),
        (code::flush_clwb as *const () as usize, code::FLUSH_CLWB_BYTES),
        (code::flush_clflushopt as *const () as usize, code::FLUSH_CLFLUSHOPT_BYTES),
        (code::flush_clflush as *const () as usize, code::FLUSH_CLFLUSH_BYTES),
    ];
    // rcx counts the rest of copies and loops, so their ordinary exits report the failure.
    if at == copy {
        Some(copy + code::REP_MOVSB_BYTES)
    } else if let Some((start, _)) =
        loops.iter().find(|(start, len)| at.wrapping_sub(*start) < *len)
    {
        Some(start + code::LOOP_EXIT_BYTES)
    } else {
        loads.contains(&at).then_some(at + code::LOAD_TO_FAILURE_BYTES)
    }
}

#[cfg(target_arch = "aarch64")]
unsafe fn exit_of(context: *const libc::ucontext_t) -> Option<usize> {
    // SAFETY: the program counter is part of every aarch64 ucontext; the caller passes a valid one.
    let at = unsafe { (*context).uc_mcontext.pc } as usize;
    let functions = [
        (code::copy as *const () as usize, code::COPY_BYTES),
        (code::flush as *const () as usize, code::FLUSH_BYTES),
    ];
    let found = functions.iter().find(|(start, len)| at.wrapping_sub(*start) < *len);
    found.map(|(start, _)| start + code::EXIT_BYTES)
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
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

    /// Tests every offset and length around words and lines, and that nothing outside the range
    /// changes.
    #[test]
    fn stored_bytes_arrive_and_no_others() {
        let source: Vec<u8> = (0..400u32).map(|index| (index % 251) as u8 + 1).collect();
        let forms = FlushForm::available().map(Some).chain([None]);
        for flush in forms {
            for (offset, len) in (0..70).flat_map(|at| (0..200).map(move |len| (at, len))) {
                let mut target = vec![0u8; 300];
                let from = source.as_ptr().wrapping_add(offset % 9);
                let to = target.as_mut_ptr().wrapping_add(offset);
                let stored = match flush {
                    // SAFETY: both ranges lie inside the vectors.
                    None => unsafe { try_store(from, to, len) },
                    // SAFETY: as above, and the form is available.
                    Some(flush) => unsafe { try_persist(from, to, len, flush) },
                };
                assert!(stored);
                let (before, rest) = target.split_at(offset);
                let (inside, behind) = rest.split_at(len);
                assert_eq!(inside, &source[offset % 9..][..len], "{flush:?} {offset} {len}");
                assert!(before.iter().chain(behind).all(|byte| *byte == 0));
            }
        }
    }

    #[cfg(target_arch = "aarch64")]
    #[test]
    fn the_instructions_are_where_the_exits_assume() {
        let functions = [
            (code::copy as *const (), code::COPY_BYTES),
            (code::flush as *const (), code::FLUSH_BYTES),
        ];
        for (function, len) in functions {
            // SAFETY: code is readable.
            let words = unsafe { std::slice::from_raw_parts(function.cast::<u32>(), len / 4 + 1) };
            assert_eq!(words[0], 0x1400_0003, "a jump over the exit");
            assert_eq!(words[2], 0xd65f_03c0, "which ends with `ret`");
            assert_eq!(words[len / 4], 0, "the function ends before `udf`");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_instructions_are_where_the_exits_assume() {
        let bytes = |function: *const (), len| {
            // SAFETY: code is readable.
            unsafe { std::slice::from_raw_parts(function.cast::<u8>(), len) }.to_vec()
        };
        assert_eq!(bytes(code::copy as *const (), code::REP_MOVSB_BYTES), [0xf3, 0xa4]);
        let loops = [
            (code::stream as *const (), code::STREAM_BYTES),
            (code::copy_words as *const (), code::COPY_WORDS_BYTES),
            (code::copy_lines as *const (), code::COPY_LINES_BYTES),
            (code::flush_clwb as *const (), code::FLUSH_CLWB_BYTES),
            (code::flush_clflushopt as *const (), code::FLUSH_CLFLUSHOPT_BYTES),
            (code::flush_clflush as *const (), code::FLUSH_CLFLUSH_BYTES),
        ];
        for (function, len) in loops {
            let code = bytes(function, len + 2);
            assert_eq!(code[..2], [0xeb, 4], "a short jump over the exit");
            assert_eq!(code[2..6], [0x48, 0x89, 0xc8, 0xc3], "the exit: `mov rax, rcx`, `ret`");
            assert_eq!(code[len..], [0x0f, 0x0b], "the loop ends before `ud2`");
        }
        let code = bytes(code::copy_lines_avx as *const (), code::COPY_LINES_AVX_BYTES + 2);
        assert_eq!(code[..5], [0xeb, 7, 0x48, 0x89, 0xc8], "a longer exit");
        assert_eq!(code[5..9], [0xc5, 0xf8, 0x77, 0xc3], "with `vzeroupper`");
        assert_eq!(code[code::COPY_LINES_AVX_BYTES..], [0x0f, 0x0b], "the loop ends before `ud2`");
        let touch = bytes(code::touch as *const (), code::LOAD_TO_FAILURE_BYTES + 1);
        assert_eq!(touch[..3], [0x0f, 0xb6, 0x07]);
        assert_eq!(touch[5], 0xc3, "the exit follows the first return");
        assert_eq!(touch[6], 0xb8, "and is `mov eax, 1`");
        let load = bytes(code::load_eight as *const (), code::LOAD_TO_FAILURE_BYTES + 1);
        assert_eq!(load[..3], [0x48, 0x8b, 0x07]);
        assert_eq!((load[5], load[6]), (0xc3, 0xba), "and here `mov edx, 1`");
    }
}
