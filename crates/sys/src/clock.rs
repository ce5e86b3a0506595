//! Clocks that the standard library does not have.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The clock of file systems: nanoseconds since 1970, as of the kernel's last tick: at most a few milliseconds old,
/// and cheaper than the exact time.
pub fn coarse_ns() -> i64 {
    let time = clock_gettime(ClockId::RealtimeCoarse);
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

/// Returns how long the calling thread has run on a CPU.
pub fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // Neither is ever negative.
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
