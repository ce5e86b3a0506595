//! The clock of file systems.

/// Returns nanoseconds since 1970, as of the kernel's last tick: at most a few milliseconds old,
/// and cheaper than the exact time.
pub fn coarse_ns() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: valid for writes; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &mut time) };
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}
