//! Named points at which tests end or hold a process.
//!
//! A process may die between any two stores to shared memory, and the other processes must cope.
//! Random tests hit few of these points; so the interesting ones have names, and tests visit each.
//! Only built with the feature `mutants`; otherwise passing a point does nothing.
//!
//! * `AQUIFER_DIE_AT=name` or `name*n`: the process aborts when it passes the point the first, or
//!   `n`-th, time.
//! * `AQUIFER_HOLD_AT=name`: the thread prints `held` on its standard output and continues when it
//!   reads a line.
//!
//! Where the process must survive, because the test inspects its memory, a thread ends instead:
//! [`end_thread_at`].

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
    "materialise-begun",
    "materialise-copied",
    "materialise-present",
    "materialise-cleared",
    "apply-noting",
    "apply-noted",
    "apply-odd",
    "apply-half",
    "apply-names",
    "names-step",
    "names-inserted",
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
    "open-resumed",
    "open-replayed",
    "open-secured",
    "open-slot",
    "open-written",
    "open-recovered",
    "open-rebuilt",
    "open-shared",
    "join-locked",
    "join-memory",
    "join-slot",
    "join-inherited",
    "close-last",
    "close-saved",
    "close-superblock",
    "close-removed",
    "close-leave",
    "packed-written",
    "note-begun",
    "note-counted",
    "packed-published",
    "note-ended",
    "note-listed",
    "packed-closed",
    "packed-flushed",
    "packed-marked",
    "help-adopted",
    "help-decided",
    "help-void",
    "file-stored",
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
    pass_other(name);
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

/// Passes a point of another crate, at which only [`end_thread_at`] ends a thread.
#[cfg(feature = "mutants")]
pub fn pass_other(name: &'static str) {
    if ENDS_AT.get() == Some(name) {
        // SAFETY: ends this thread and never returns; `end_thread_at`, which has set the point, is
        // responsible for what it leaves.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

#[cfg(feature = "mutants")]
thread_local! {
    /// The point at which this thread ends.
    static ENDS_AT: std::cell::Cell<Option<&'static str>> = const { std::cell::Cell::new(None) };
}

/// Runs `work` in a new thread that ends when it passes the point, as if its process were killed
/// there: it drops nothing, and the kernel marks the robust mutexes that it holds. Returns the
/// result of `work`, or `None` if the thread has ended before.
///
/// Memory that the thread has allocated is leaked. At no point does a thread hold a process-local
/// lock.
#[cfg(feature = "mutants")]
pub fn end_thread_at<T: Send>(name: &'static str, work: impl FnOnce() -> T + Send) -> Option<T> {
    use std::sync::mpsc::channel;

    let (thread_sender, thread) = channel();
    let (result_sender, result) = channel();
    let dying = move || {
        // SAFETY: only returns the calling thread's id.
        thread_sender.send(unsafe { libc::gettid() }).expect("it is waited for");
        ENDS_AT.set(Some(name));
        let value = work();
        ENDS_AT.set(None);
        // The caller waits for the end of the thread, and then receives the value.
        result_sender.send(value).expect("it is waited for");
    };
    // SAFETY: this function returns, or unwinds, only after the thread has ended: what `work`
    // borrows outlives that.
    let started = unsafe { std::thread::Builder::new().spawn_unchecked(dying) };
    let started = started.expect("a thread");
    let thread = thread.recv().expect("the first thing it does");
    loop {
        // SAFETY: signal 0 is not delivered; the call only checks that the thread exists in this
        // process.
        let is_there = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) } == 0;
        if !is_there {
            break;
        }
        std::thread::yield_now();
    }
    // A thread that ended at the point cannot be joined.
    drop(started);
    result.try_recv().ok()
}

/// Passes a point: does nothing, unless built for the tests that stop there.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub(crate) fn pass(_name: &'static str) {}
