//! Clocks that the standard library does not have.
//!
//! They are read by libc, which finds the vDSO as valgrind shows it to programs; what rustix finds of it in
//! the auxiliary vector is not mapped there.

use std::time::Duration;

/// The clock of file systems: nanoseconds since 1970, as of the kernel's last tick: at most a few milliseconds old,
/// and cheaper than the exact time.
pub fn coarse_ns() -> i64 {
    let time = now(libc::CLOCK_REALTIME_COARSE);
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

/// Returns how long the calling thread has run on a CPU.
pub fn thread_cpu_time() -> Duration {
    let time = now(libc::CLOCK_THREAD_CPUTIME_ID);
    // Neither is ever negative.
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn now(clock: libc::clockid_t) -> libc::timespec {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure lives on this stack. It fails only for a clock that the system does not have.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time
}
