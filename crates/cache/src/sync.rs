//! Atomics and waiting, real or modelled: the page word runs unchanged under loom (`--cfg loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

/// Sleeps until the low half of `word` differs from that of `seen`, or spuriously less long.
#[cfg(not(loom))]
pub(crate) fn wait(word: &AtomicU64, seen: u64) {
    aquifer_sys::futex::wait(low_half(word), seen as u32, None);
}

/// Wakes everyone who waits on `word`.
#[cfg(not(loom))]
pub(crate) fn wake_all(word: &AtomicU64) {
    aquifer_sys::futex::wake(low_half(word), u32::MAX);
}

#[cfg(not(loom))]
fn low_half(word: &AtomicU64) -> &std::sync::atomic::AtomicU32 {
    let half =
        std::ptr::from_ref(word).cast::<u32>().wrapping_add(cfg!(target_endian = "big") as usize);
    // SAFETY: half of a live, aligned atomic word. The kernel reads it; nobody else writes through it.
    unsafe { std::sync::atomic::AtomicU32::from_ptr(half.cast_mut()) }
}

#[cfg(loom)]
pub(crate) fn wait(_word: &AtomicU64, _seen: u64) {
    loom::thread::yield_now();
}

#[cfg(loom)]
pub(crate) fn wake_all(_word: &AtomicU64) {}
