//! Named moments at which tests end a process, or hold it.
//!
//! Between any two stores to shared memory a process may die, and the others must cope. Luck finds few of these moments;
//! so the interesting ones have names, and tests visit each. Only built with the feature `mutants`; otherwise
//! passing a point is nothing.
//!
//! * `AQUIFER_DIE_AT=name` or `name*n`: the process aborts when it passes the point the first, or `n`-th, time.
//! * `AQUIFER_HOLD_AT=name`: the thread says `held` on its standard output and goes on when a line comes in.

/// All points, in no particular order.
#[cfg(feature = "mutants")]
pub const POINTS: &[&str] = &[
    "reserve-filler",
    "reserve-pending",
    "append-written",
    "complete-durable",
    "advance-between",
    "transact-reserved",
    "transact-published",
    "apply-noting",
    "apply-noted",
    "apply-odd",
    "apply-half",
    "apply-stored",
    "apply-counted",
    "transact-applied",
    "keep-cleared",
    "transact-unlocked",
    "capture-reserved",
    "finish-filler",
    "pages-noted",
    "pages-marked",
    "pages-cleared",
    "apply-moved",
    "release-run",
    "release-count",
    "held-noted",
    "held-freed",
    "held-moved",
    "zero-taken",
    "zero-written",
    "zero-noted",
    "checkpoint-begun",
    "checkpoint-taken",
    "checkpoint-durable",
    "checkpoint-applied",
    "checkpoint-written",
    "checkpoint-flushed",
    "superblock-first",
    "checkpoint-superblocks",
    "checkpoint-sequence",
    "checkpoint-tail",
    "create-formatted",
    "create-named",
    "open-locked",
    "open-made",
    "open-segment",
    "open-replayed",
    "open-secured",
    "open-slot",
    "open-written",
    "open-recovered",
    "open-rebuilt",
    "open-shared",
    "join-slot",
    "join-inherited",
    "close-last",
    "close-checkpoint",
    "close-superblock",
    "close-removed",
    "packed-written",
    "packed-published",
    "packed-closed",
    "packed-flushed",
    "packed-marked",
    "help-adopted",
    "help-decided",
    "help-void",
];

/// Passes a point.
#[cfg(feature = "mutants")]
pub(crate) fn pass(name: &'static str) {
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    static DIE_AT: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static HOLD_AT: OnceLock<Option<String>> = OnceLock::new();
    static PASSED: AtomicU64 = AtomicU64::new(0);
    debug_assert!(POINTS.contains(&name), "{name}");
    let die_at = DIE_AT.get_or_init(|| {
        let wanted = std::env::var("AQUIFER_DIE_AT").ok()?;
        let (name, count) = wanted.split_once('*').unwrap_or((&wanted, "1"));
        Some((name.to_owned(), count.parse().expect("a number")))
    });
    if let Some((wanted, count)) = die_at
        && wanted == name
        && PASSED.fetch_add(1, Relaxed) + 1 == *count
    {
        std::process::abort();
    }
    if HOLD_AT.get_or_init(|| std::env::var("AQUIFER_HOLD_AT").ok()).as_deref() == Some(name) {
        println!("held");
        let _ = std::io::stdin().read_line(&mut String::new());
    }
}

/// Passes a point: nothing, unless built for the tests that stop there.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub(crate) fn pass(_name: &'static str) {}
