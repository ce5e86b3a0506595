//! Copies to and from byte-addressable devices, and the cache-line flush that makes stores durable.
//!
//! * To the device ([`copy_to_device`]) with *non-temporal* stores: they go to memory without first
//!   reading the line they overwrite, do not displace the working set from the CPU's caches, and on
//!   persistent memory need no flush afterwards.
//! * From the device ([`copy_racy`](crate::memory::copy_racy)) with ordinary stores, because the
//!   bytes read are about to be used. The non-temporal *load* instruction is no different from an ordinary load on
//!   write-back memory, which all of this is.
//!
//! The widest form that the CPU supports is detected once, at run time. [`CopyForm`] names the
//! forms, so that tests and measurements can force each.
//!
//! # Ordering
//! Non-temporal stores are weakly ordered. Every copy with them ends with a store fence, so that to
//! other threads it is as ordered as a `memcpy`.

/// Cache-line size assumed for splitting copies; smaller lines are only flushed more often than
/// necessary.
const LINE_BYTES: usize = 64;

/// An implementation of the non-temporal copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyForm {
    /// 64-byte stores.
    Avx512,
    /// 32-byte stores.
    Avx2,
    /// 16-byte stores.
    Sse2,
    /// `memcpy`: no non-temporal stores on this architecture.
    Portable,
}

impl CopyForm {
    /// Returns the forms this CPU can execute, widest first. `Portable` is always one of them.
    pub fn available() -> impl Iterator<Item = CopyForm> {
        [CopyForm::Avx512, CopyForm::Avx2, CopyForm::Sse2, CopyForm::Portable]
            .into_iter()
            .filter(|form| form.is_available())
    }

    /// Returns the best available form. Async-signal-safe.
    #[inline]
    pub fn best() -> CopyForm {
        Self::available().next().unwrap_or(CopyForm::Portable)
    }

    /// Returns whether this CPU can execute the form.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return match self {
            CopyForm::Avx512 => std::arch::is_x86_feature_detected!("avx512f"),
            CopyForm::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
            CopyForm::Sse2 | CopyForm::Portable => true,
        };
        #[cfg(not(target_arch = "x86_64"))]
        return self == CopyForm::Portable;
    }

    /// Returns whether its stores bypass the cache, so that whole lines need no flush.
    pub fn is_non_temporal(self) -> bool {
        self != CopyForm::Portable
    }

    /// [`copy_to_device`] by this form.
    ///
    /// # Safety
    /// As for [`copy_to_device`], and the form is available.
    pub unsafe fn copy_to_device(self, destination: *mut u8, source: *const u8, len_bytes: usize) {
        let head_bytes = destination.align_offset(LINE_BYTES).min(len_bytes);
        let lines = (len_bytes - head_bytes) / LINE_BYTES;
        if lines == 0 || self == CopyForm::Portable {
            // SAFETY: by the caller's contract both ranges are valid and do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(source, destination, len_bytes) };
            return;
        }
        let body_bytes = lines * LINE_BYTES;
        let tail_bytes = len_bytes - head_bytes - body_bytes;
        // SAFETY: the first `head_bytes` of both ranges.
        unsafe { std::ptr::copy_nonoverlapping(source, destination, head_bytes) };
        // SAFETY: within the source, as `head_bytes` is at most its length.
        let body_source = unsafe { source.add(head_bytes) };
        // SAFETY: as above, for the destination.
        let body = unsafe { destination.add(head_bytes) };
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `body` is line-aligned, both ranges hold `lines` lines, the form is available.
        unsafe {
            match self {
                CopyForm::Avx512 => x86::stream_avx512(body, body_source, lines),
                CopyForm::Avx2 => x86::stream_avx2(body, body_source, lines),
                CopyForm::Sse2 | CopyForm::Portable => x86::stream_sse2(body, body_source, lines),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: `lines` lines of both ranges; unreachable, as only `Portable` is available.
        unsafe {
            std::ptr::copy_nonoverlapping(body_source, body, body_bytes);
        }
        // SAFETY: what is left of the source after head and body.
        let tail_source = unsafe { body_source.add(body_bytes) };
        // SAFETY: as above, for the destination.
        let tail = unsafe { body.add(body_bytes) };
        // SAFETY: the last `tail_bytes` of both ranges.
        unsafe { std::ptr::copy_nonoverlapping(tail_source, tail, tail_bytes) };
        store_fence();
    }
}

/// Copies `len_bytes` to a byte-addressable device with non-temporal stores, in the widest form
/// this CPU has. To other threads it is as ordered as a `memcpy`. Partial lines at the ends are stored
/// normally.
///
/// # Safety
/// `source` is valid for reads and `destination` for writes of `len_bytes`; they do not overlap.
#[inline]
pub unsafe fn copy_to_device(destination: *mut u8, source: *const u8, len_bytes: usize) {
    // SAFETY: forwarded to the caller; `best` is available.
    unsafe { CopyForm::best().copy_to_device(destination, source, len_bytes) }
}

/// Copies to persistent memory and makes the bytes durable: on return they are in the persistence
/// domain. False, with the bytes copied but not durable, where this CPU cannot flush a cache line.
///
/// # Safety
/// As for [`copy_to_device`].
pub unsafe fn copy_and_persist(destination: *mut u8, source: *const u8, len_bytes: usize) -> bool {
    let form = CopyForm::best();
    // SAFETY: forwarded to the caller; `best` is available.
    unsafe { form.copy_to_device(destination, source, len_bytes) };
    let Some(flush) = FlushForm::best() else {
        return len_bytes == 0;
    };
    if !form.is_non_temporal() || len_bytes < 2 * LINE_BYTES {
        // SAFETY: the destination is valid memory.
        unsafe { flush.flush(destination, len_bytes) };
    } else {
        // Partial lines at the ends were stored through the cache.
        // SAFETY: the first byte of the destination.
        unsafe { flush.flush(destination, 1) };
        // SAFETY: within the destination.
        let last = unsafe { destination.add(len_bytes - 1) };
        // SAFETY: the last byte of the destination.
        unsafe { flush.flush(last, 1) };
    }
    store_fence();
    true
}

/// Orders all earlier stores of this thread, including non-temporal ones and flushes, before later
/// ones.
#[inline]
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has SSE; a barrier, touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier; touches no memory. The full-system domain includes persistent memory.
    unsafe {
        std::arch::asm!("dsb sy", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// An instruction that writes a cache line back to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlushForm {
    /// `clwb`: unordered, may keep the line.
    Clwb,
    /// `clflushopt`: unordered, drops the line.
    ClflushOpt,
    /// `clflush`: ordered and slow.
    Clflush,
    /// `dc cvap` of ARMv8.2: to the point of persistence.
    DcCvap,
}

impl FlushForm {
    /// Returns the forms this CPU can execute, cheapest first.
    pub fn available() -> impl Iterator<Item = FlushForm> {
        [FlushForm::Clwb, FlushForm::ClflushOpt, FlushForm::Clflush, FlushForm::DcCvap]
            .into_iter()
            .filter(|form| form.is_available())
    }

    /// Returns the cheapest available form; `None` where user space cannot make stores durable.
    /// Async-signal-safe.
    #[inline]
    pub fn best() -> Option<FlushForm> {
        Self::available().next()
    }

    /// Returns whether this CPU can execute the form.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return match self {
            FlushForm::Clwb => x86::structured_features() & 1 << 24 != 0,
            FlushForm::ClflushOpt => x86::structured_features() & 1 << 23 != 0,
            FlushForm::Clflush => true,
            FlushForm::DcCvap => false,
        };
        #[cfg(target_arch = "aarch64")]
        {
            const HWCAP_DCPOP: libc::c_ulong = 1 << 16;
            // SAFETY: reads the auxiliary vector, no preconditions.
            let has_dcpop = unsafe { libc::getauxval(libc::AT_HWCAP) } & HWCAP_DCPOP != 0;
            self == FlushForm::DcCvap && has_dcpop
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        return false;
    }

    /// Writes back every line that the range touches. Durable after a following [`store_fence`].
    ///
    /// # Safety
    /// The range is mapped, and the form is available.
    pub unsafe fn flush(self, start: *const u8, len_bytes: usize) {
        if len_bytes == 0 {
            return;
        }
        let lead_bytes = start as usize % LINE_BYTES;
        let first = start.wrapping_sub(lead_bytes);
        for line in 0..(lead_bytes + len_bytes).div_ceil(LINE_BYTES) {
            // SAFETY: a line that overlaps the caller's mapped range, and so is in a mapped page.
            unsafe { self.flush_line(first.wrapping_add(line * LINE_BYTES)) };
        }
    }

    /// # Safety
    /// The line is mapped, and the form is available.
    #[inline]
    unsafe fn flush_line(self, line: *const u8) {
        #[cfg(target_arch = "x86_64")]
        match self {
            // SAFETY: forwarded to the caller.
            FlushForm::Clwb => unsafe {
                std::arch::asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags));
            },
            // SAFETY: forwarded to the caller.
            FlushForm::ClflushOpt => unsafe {
                std::arch::asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
            },
            // SAFETY: forwarded to the caller; every x86-64 CPU has the instruction.
            FlushForm::Clflush | FlushForm::DcCvap => unsafe {
                std::arch::x86_64::_mm_clflush(line);
            },
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: forwarded to the caller. The encoding is `dc cvap, x`, which assemblers accept
        // only with ARMv8.2 enabled.
        unsafe {
            std::arch::asm!("sys #3, c7, c12, #1, {}", in(reg) line, options(nostack, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = line;
    }
}

/// Writes the cache lines of a range back to memory; durable after a following [`store_fence`].
/// False where this CPU has no instruction for it.
///
/// # Safety
/// The range is mapped.
pub unsafe fn flush_cache_lines(start: *const u8, len_bytes: usize) -> bool {
    let Some(form) = FlushForm::best() else {
        return false;
    };
    // SAFETY: forwarded to the caller; `best` is available.
    unsafe { form.flush(start, len_bytes) };
    true
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::LINE_BYTES;
    use std::arch::asm;
    use std::arch::x86_64::{
        __cpuid_count, __get_cpuid_max, __m128i, __m256i, _mm_loadu_si128, _mm_stream_si128,
        _mm256_loadu_si256, _mm256_stream_si256,
    };
    use std::sync::atomic::{AtomicU64, Ordering};

    /// CPUID leaf 7, EBX. Kept, because CPUID takes microseconds in virtual machines.
    pub(super) fn structured_features() -> u32 {
        /// Set when the lower half is known.
        const KNOWN: u64 = 1 << 32;
        static FEATURES: AtomicU64 = AtomicU64::new(0);
        // Relaxed, as below: the value is complete in itself, and every thread finds the same.
        match FEATURES.load(Ordering::Relaxed) {
            0 => {
                let found = ask_structured_features();
                FEATURES.store(KNOWN | u64::from(found), Ordering::Relaxed);
                found
            }
            known => known as u32,
        }
    }

    #[allow(unused_unsafe, reason = "the intrinsics are unsafe in the oldest supported compiler")]
    fn ask_structured_features() -> u32 {
        // SAFETY: every x86-64 CPU has CPUID.
        let (highest_leaf, _) = unsafe { __get_cpuid_max(0) };
        if highest_leaf < 7 {
            return 0;
        }
        // SAFETY: as above, and it has this leaf.
        unsafe { __cpuid_count(7, 0) }.ebx
    }

    /// Written in assembly because the intrinsics need a newer compiler than the rest of the
    /// workspace.
    ///
    /// # Safety
    /// AVX-512F is available; `lines` > 0 lines are valid at both, which do not overlap; the
    /// destination is aligned to a line.
    pub(super) unsafe fn stream_avx512(destination: *mut u8, source: *const u8, lines: usize) {
        // SAFETY: touches exactly the two ranges; every vector register is declared clobbered, as
        // `vzeroupper` clears the upper parts.
        unsafe {
            asm!(
                "2:",
                "vmovdqu64 zmm0, [rsi]",
                "vmovntdq [rdi], zmm0",
                "add rsi, 64",
                "add rdi, 64",
                "dec rcx",
                "jnz 2b",
                "vzeroupper",
                inout("rsi") source => _,
                inout("rdi") destination => _,
                inout("rcx") lines => _,
                clobber_abi("C"),
                options(nostack),
            );
        }
    }

    /// # Safety
    /// AVX2 is available; `lines` lines are valid at both, which do not overlap; the destination is
    /// aligned to a line.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream_avx2(destination: *mut u8, source: *const u8, lines: usize) {
        for at_bytes in (0..lines * LINE_BYTES).step_by(32) {
            // SAFETY: within the source.
            let part = unsafe { _mm256_loadu_si256(source.add(at_bytes).cast::<__m256i>()) };
            // SAFETY: within the destination, aligned to 32 bytes as lines are.
            unsafe { _mm256_stream_si256(destination.add(at_bytes).cast::<__m256i>(), part) };
        }
    }

    /// # Safety
    /// `lines` lines are valid at both, which do not overlap; the destination is aligned to a line.
    pub(super) unsafe fn stream_sse2(destination: *mut u8, source: *const u8, lines: usize) {
        for at_bytes in (0..lines * LINE_BYTES).step_by(16) {
            // SAFETY: within the source.
            let part = unsafe { _mm_loadu_si128(source.add(at_bytes).cast::<__m128i>()) };
            // SAFETY: within the destination, aligned to 16 bytes as lines are.
            unsafe { _mm_stream_si128(destination.add(at_bytes).cast::<__m128i>(), part) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUARD_BYTES: usize = 80;

    /// Bytes whose value depends on their position, so that a shifted copy is detected.
    fn pattern(len_bytes: usize) -> Vec<u8> {
        (0..len_bytes).map(|at| (at * 31 + at / 251) as u8).collect()
    }

    /// Copies at every combination of small misalignments and around every line boundary, and
    /// checks that nothing outside the range changed.
    fn check(copy: impl Fn(*mut u8, *const u8, usize)) {
        let lengths = (0..=200).chain([255, 256, 257, 1000, 4095, 4096, 4097, 10_000]);
        for len_bytes in lengths {
            for (shift, source_shift) in [(0, 0), (1, 0), (0, 1), (7, 3), (31, 33), (63, 16)] {
                let source = pattern(len_bytes + source_shift);
                let mut target = vec![0xEE; len_bytes + shift + 2 * GUARD_BYTES];
                let start = GUARD_BYTES + shift;
                copy(target[start..].as_mut_ptr(), source[source_shift..].as_ptr(), len_bytes);
                let what = format!("{len_bytes} bytes, shifts {shift} and {source_shift}");
                assert_eq!(target[start..start + len_bytes], source[source_shift..], "{what}");
                assert!(target[..start].iter().all(|byte| *byte == 0xEE), "before: {what}");
                assert!(target[start + len_bytes..].iter().all(|byte| *byte == 0xEE), "{what}");
            }
        }
    }

    #[test]
    fn every_form_copies_exactly_its_range() {
        for form in CopyForm::available() {
            check(|destination, source, len_bytes| {
                // SAFETY: `check` hands valid, separate ranges; the form is available.
                unsafe { form.copy_to_device(destination, source, len_bytes) }
            });
        }
        for form in [CopyForm::Avx512, CopyForm::Avx2, CopyForm::Sse2] {
            if !form.is_available() {
                eprintln!("skipped: {form:?} is not available on this CPU");
            }
        }
    }

    #[test]
    fn chosen_copies_copy_exactly_their_range() {
        // SAFETY: `check` hands valid, separate ranges.
        check(|to, from, len_bytes| unsafe { copy_to_device(to, from, len_bytes) });
        check(|to, from, len_bytes| {
            // SAFETY: as above.
            let durable = unsafe { copy_and_persist(to, from, len_bytes) };
            assert_eq!(durable, len_bytes == 0 || FlushForm::best().is_some());
        });
    }

    #[test]
    fn flushing_leaves_bytes_alone() {
        let bytes = pattern(1000);
        for form in FlushForm::available() {
            for (start, len_bytes) in [(0, 0), (0, 1), (63, 2), (1, 999), (500, 64)] {
                // SAFETY: a part of `bytes`; the form is available.
                unsafe { form.flush(bytes[start..].as_ptr(), len_bytes) };
            }
            store_fence();
            assert_eq!(bytes, pattern(1000), "{form:?}");
        }
    }

    #[test]
    fn the_widest_available_form_is_used() {
        assert_eq!(CopyForm::available().next(), Some(CopyForm::best()));
        assert!(CopyForm::available().any(|form| form == CopyForm::Portable));
    }
}
