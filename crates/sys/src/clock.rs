//! The clock of file systems.

use rustix::time::{ClockId, clock_gettime};

/// Returns nanoseconds since 1970, as of the kernel's last tick: at most a few milliseconds old,
/// and cheaper than the exact time.
pub fn coarse_ns() -> i64 {
    let time = clock_gettime(ClockId::RealtimeCoarse);
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}
