//! Threads that run the steps of a kernel together.
//!
//! ```text
//! thread 0   step 0 ┃ between ┃ step 1 ┃ between ┃ …
//! thread 1   step 0 ┃    ·    ┃ step 1 ┃    ·    ┃
//! ```
//! `between` runs in thread 0 while all others wait, so no thread stores while it makes the result
//! durable. The barriers spin briefly, because steps are short, and then yield, because there may
//! be fewer processors than threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::Result;

/// Barrier polls before the thread yields.
const SPINS: u32 = 2_000;

/// Runs `step(step, thread)` on every thread for each of `steps`, and `between(step)` after each
/// step. Stops at the first error of `between`.
pub fn run(
    threads: usize,
    steps: usize,
    step: impl Fn(usize, usize) + Sync,
    mut between: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    let barrier = Barrier::new(threads);
    let stopped = AtomicBool::new(false);
    let work = |thread: usize| {
        for number in 0..steps {
            step(number, thread);
            barrier.wait();
            barrier.wait();
            // Relaxed: stored before the barrier that this thread has just passed.
            if stopped.load(Ordering::Relaxed) {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        for thread in 1..threads {
            let work = &work;
            scope.spawn(move || work(thread));
        }
        for number in 0..steps {
            step(number, 0);
            barrier.wait();
            let result = between(number);
            // Relaxed: published by the barrier.
            stopped.store(result.is_err(), Ordering::Relaxed);
            barrier.wait();
            result?;
        }
        Ok(())
    })
}

/// A reusable barrier.
struct Barrier {
    threads: usize,
    arrived: AtomicUsize,
    round: AtomicUsize,
}

impl Barrier {
    const fn new(threads: usize) -> Self {
        Self { threads, arrived: AtomicUsize::new(0), round: AtomicUsize::new(0) }
    }

    fn wait(&self) {
        // Acquire: pairs with the release below in the previous round; the count was reset before
        // it.
        let round = self.round.load(Ordering::Acquire);
        // AcqRel: the last thread to arrive synchronizes with all earlier arrivals, so it sees
        // their writes.
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            // Relaxed: no thread arrives again before the store below releases the waiters.
            self.arrived.store(0, Ordering::Relaxed);
            // Release: pairs with the acquire loads of the waiting threads.
            self.round.store(round.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut polls = 0;
        // Acquire: pairs with the release above.
        while self.round.load(Ordering::Acquire) == round {
            polls += 1;
            if polls < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn steps_do_not_overlap() {
        for threads in [1, 2, 5] {
            let done = Mutex::new(Vec::new());
            let mut seen = Vec::new();
            run(
                threads,
                30,
                |step, thread| done.lock().unwrap().push((step, thread)),
                |step| {
                    let mut found = std::mem::take(&mut *done.lock().unwrap());
                    found.sort_unstable();
                    seen.push(step);
                    // No assertion: a panic here would leave the other threads waiting.
                    let all = found.iter().copied().eq((0..threads).map(|thread| (step, thread)));
                    anyhow::ensure!(all, "step {step}: {found:?}");
                    Ok(())
                },
            )
            .unwrap();
            assert!(seen.into_iter().eq(0..30));
        }
    }

    #[test]
    fn an_error_between_steps_ends_all_threads() {
        let steps = AtomicUsize::new(0);
        let result = run(
            3,
            1000,
            |_, _| {
                steps.fetch_add(1, Ordering::Relaxed);
            },
            |step| if step == 4 { anyhow::bail!("enough") } else { Ok(()) },
        );
        assert_eq!(result.unwrap_err().to_string(), "enough");
        assert_eq!(steps.into_inner(), 15);
    }
}
