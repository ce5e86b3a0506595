//! Events of the crate `tracing`, for all crates.

/// Emits an event: `event!(warn, path = %path, "message")`, in the form of `tracing::warn!`. Nothing,
/// with its arguments not evaluated, unless the feature `tracing` is on.
///
/// Not in the fault path and not while a lock is held that other processes wait for: a subscriber
/// may allocate, block, and call back.
#[cfg(feature = "tracing")]
#[macro_export]
macro_rules! event {
    ($level:ident, $($argument:tt)*) => {
        $crate::tracing::$level!($($argument)*)
    };
}

/// See the other form.
#[cfg(not(feature = "tracing"))]
#[macro_export]
macro_rules! event {
    ($($argument:tt)*) => {
        ()
    };
}
