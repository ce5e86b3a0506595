//! The line between a server and its clients: a latency for each request, and one bandwidth for all.
//!
//! A thread measures time: the timer of a runtime has a resolution of milliseconds, of which ten make a request. The
//! bandwidth is a virtual clock: bytes pass when the clock that each of them moves on has come so far. It lags behind the
//! real one by [`BURST`] at most, so that what a late wake-up lost is made up for, and an idle line gains nothing else.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

const BURST: Duration = Duration::from_millis(1);

/// A bandwidth that all share.
#[derive(Debug, Default)]
pub(super) struct Bandwidth {
    /// 0 is no limit.
    bytes_per_second: AtomicU64,
    /// Until when the line is taken.
    taken_until: Mutex<Option<Instant>>,
}

impl Bandwidth {
    pub fn limit(&self, bytes_per_second: u64) {
        self.bytes_per_second.store(bytes_per_second, Ordering::Relaxed);
    }

    /// Takes the line for so many bytes; returns when they have passed.
    fn take(&self, bytes: usize, now: Instant) -> Option<Instant> {
        let bytes_per_second = self.bytes_per_second.load(Ordering::Relaxed);
        if bytes_per_second == 0 {
            return None;
        }
        let mut taken_until = self.taken_until.lock().unwrap();
        let begin = taken_until.map_or(now, |at| at.max(now.checked_sub(BURST).unwrap_or(now)));
        let end = begin + Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64);
        *taken_until = Some(end);
        (end > now).then_some(end)
    }

    pub async fn pass(&self, bytes: usize, timer: &Timer) {
        if let Some(end) = self.take(bytes, Instant::now()) {
            timer.until(end).await;
        }
    }
}

type Waiting = BinaryHeap<(Reverse<Instant>, Wake)>;

/// Not compared: any order of equal times will do.
struct Wake(oneshot::Sender<()>);

impl PartialEq for Wake {
    fn eq(&self, _: &Wake) -> bool {
        true
    }
}

impl Eq for Wake {}

impl PartialOrd for Wake {
    fn partial_cmp(&self, other: &Wake) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Wake {
    fn cmp(&self, _: &Wake) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

#[derive(Default)]
struct Shared {
    /// None when it ends.
    waiting: Mutex<Option<Waiting>>,
    changed: Condvar,
}

/// A thread that wakes tasks at the times that they name.
pub(super) struct Timer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Timer {
    pub fn start() -> Timer {
        let shared =
            Arc::new(Shared { waiting: Mutex::new(Some(Waiting::new())), ..Shared::default() });
        let waited = shared.clone();
        let thread = std::thread::Builder::new().name("timer".into()).spawn(move || run(&waited));
        Timer { shared, thread: Some(thread.expect("a thread")) }
    }

    pub async fn until(&self, time: Instant) {
        let (sender, receiver) = oneshot::channel();
        {
            let mut waiting = self.shared.waiting.lock().unwrap();
            let Some(waiting) = waiting.as_mut() else { return };
            let is_first = waiting.peek().is_none_or(|(Reverse(first), _)| time < *first);
            waiting.push((Reverse(time), Wake(sender)));
            if is_first {
                self.shared.changed.notify_one();
            }
        }
        let _ = receiver.await;
    }

    pub async fn sleep(&self, duration: Duration) {
        if !duration.is_zero() {
            self.until(Instant::now() + duration).await;
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        *self.shared.waiting.lock().unwrap() = None;
        self.shared.changed.notify_one();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn run(shared: &Shared) {
    let mut guard = shared.waiting.lock().unwrap();
    while let Some(waiting) = guard.as_mut() {
        let now = Instant::now();
        let left = waiting.peek().map(|(Reverse(first), _)| first.saturating_duration_since(now));
        guard = match left {
            None => shared.changed.wait(guard).unwrap(),
            Some(Duration::ZERO) => {
                let (_, Wake(sender)) = waiting.pop().expect("looked at");
                let _ = sender.send(());
                guard
            }
            Some(left) => shared.changed.wait_timeout(guard, left).unwrap().0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In virtual time: what passes in a second is the limit, whether pieces come early or late.
    #[test]
    fn the_bandwidth_is_the_limit() {
        for late in [Duration::ZERO, BURST / 2] {
            let line = Bandwidth::default();
            line.limit(125_000_000);
            let start = Instant::now() + BURST;
            let mut now = start;
            let mut passed = 0;
            while now < start + Duration::from_secs(1) {
                if let Some(end) = line.take(64 << 10, now) {
                    now = end + late;
                }
                passed += 64 << 10;
            }
            assert!((124_500_000..125_500_000).contains(&passed), "{passed}");
            // An idle line gains a burst only.
            now += Duration::from_secs(1);
            let free = (0..).take_while(|_| line.take(1 << 10, now).is_none()).count();
            assert!((100..=125).contains(&free), "{free}");
        }
    }

    #[test]
    fn sleepers_wake_in_the_order_of_their_times() {
        let timer = Timer::start();
        let start = Instant::now();
        let times = [30u64, 10, 20].map(|ms| start + Duration::from_millis(ms));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let woken = Mutex::new(vec![]);
        runtime.block_on(async {
            let wait = async |number: usize| {
                timer.until(times[number]).await;
                assert!(Instant::now() >= times[number]);
                woken.lock().unwrap().push(number);
            };
            tokio::join!(wait(0), wait(1), wait(2));
        });
        assert_eq!(woken.into_inner().unwrap(), [1, 2, 0]);
    }
}
