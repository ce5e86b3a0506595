//! [`Ready`]: completions by a file descriptor, for event loops that are not Rust executors.
//!
//! ```text
//!   add ──► entries ──── poll ────► done ──► take        in the threads that call, with one lock
//!              ▲
//!   waker ──► woken ──► eventfd                           in any thread: two short steps, no future runs
//! ```
//!
//! A waker only notes its entry and writes the eventfd; futures are polled and dropped in
//! [`Ready::add`] and [`Ready::take`]. So what a future holds, buffers for example, is never
//! dropped by a thread of Aquifer.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use aquifer_cache::CacheError;
use aquifer_vm::ProcessMark;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// A set of operations under way, whose completions make a file descriptor readable.
///
/// Any thread may use it. It needs no executor and no thread of its own: a program adds
/// [`Ready::fd`] to its event loop (`epoll`, `poll`, libuv, asyncio) and calls [`Ready::take`] when
/// the descriptor is readable.
///
/// ```
/// use aquifer::{Cache, MemoryDevice, Ready};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let cache = Cache::builder().budget_bytes(8 << 20).build()?;
/// let mapping = cache.map(MemoryDevice::new(1 << 20)?)?;
/// let ready = Ready::new()?;
/// ready.add(7, mapping.touch_many_async(&[0..10, 40_960..40_970]))?;
/// let mut done = Vec::new();
/// while done.is_empty() {
///     ready.wait()?; //               or an event loop, with `ready.fd()`
///     done = ready.take(16);
/// }
/// assert!(matches!(done[0], (7, Ok(()))));
/// # Ok(())
/// # }
/// ```
///
/// Dropping it drops the futures; their operations go on.
pub struct Ready<T> {
    entries: Mutex<Entries<T>>,
    shared: Arc<Shared>,
    mark: ProcessMark,
}

struct Entries<T> {
    pending: HashMap<u64, Entry<T>>,
    done: VecDeque<(u64, T)>,
    next_key: u64,
    /// Threads in [`Ready::wait`].
    waiters: usize,
}

struct Entry<T> {
    token: u64,
    future: Pin<Box<dyn Future<Output = T> + Send>>,
    waker: Waker,
}

/// What wakers reach.
struct Shared {
    event: OwnedFd,
    woken: Mutex<Vec<u64>>,
}

struct WakeEntry {
    shared: Arc<Shared>,
    key: u64,
}

impl Wake for WakeEntry {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        lock(&self.shared.woken).push(self.key);
        self.shared.signal();
    }
}

impl Shared {
    /// After the change that it announces: a thread that clears the event sees it.
    fn signal(&self) {
        // Fails only if the count would overflow; then the descriptor is readable already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

impl<T> Ready<T> {
    /// Creates an empty set.
    ///
    /// # Errors
    /// The system's, if no descriptor is left.
    pub fn new() -> io::Result<Ready<T>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Ready {
            entries: Mutex::new(Entries {
                pending: HashMap::new(),
                done: VecDeque::new(),
                next_key: 0,
                waiters: 0,
            }),
            shared: Arc::new(Shared { event, woken: Mutex::new(Vec::new()) }),
            mark: ProcessMark::new(),
        })
    }

    /// The descriptor, readable when [`Ready::take`] may have something. It is not to be read,
    /// written or closed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Adds an operation; `token` comes back with its result.
    ///
    /// The future is polled here and in [`Ready::take`], with a lock held: it must not use this
    /// `Ready`.
    ///
    /// # Errors
    /// [`CacheError::Forked`] in a forked child, which would share the parent's descriptor.
    pub fn add(
        &self,
        token: u64,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<(), CacheError> {
        if !self.mark.is_current() {
            return Err(CacheError::Forked);
        }
        let mut entries = lock(&self.entries);
        let key = entries.next_key;
        entries.next_key += 1;
        let waker = Waker::from(Arc::new(WakeEntry { shared: self.shared.clone(), key }));
        let entry = Entry { token, future: Box::pin(future), waker };
        if entries.advance(key, entry) {
            self.shared.signal();
        }
        Ok(())
    }

    /// The results of at most `most` operations that have completed, with their tokens, in the
    /// order of completion. Does not wait; empty in a forked child.
    ///
    /// # Panics
    /// If a future does: its operation is out of the set, and no other is affected.
    pub fn take(&self, most: usize) -> Vec<(u64, T)> {
        if !self.mark.is_current() {
            return Vec::new();
        }
        let mut entries = lock(&self.entries);
        // Cleared before what it announces is looked at, so that what comes later is announced
        // again. It fails if nothing was announced.
        let _ = rustix::io::read(&self.shared.event, &mut [0u8; 8]);
        let mut woken = std::mem::take(&mut *lock(&self.shared.woken)).into_iter();
        while let Some(key) = woken.next() {
            // An entry is woken more than once at times.
            let Some(entry) = entries.pending.remove(&key) else { continue };
            let polled = catch_unwind(AssertUnwindSafe(|| entries.advance(key, entry)));
            if let Err(panic) = polled {
                // The others were woken, and the event that said so is cleared.
                lock(&self.shared.woken).extend(woken);
                self.shared.signal();
                resume_unwind(panic);
            }
        }
        let count = most.min(entries.done.len());
        let taken = entries.done.drain(..count).collect();
        // What is left; or that nothing is, which no completion will tell the waiters any more.
        if !entries.done.is_empty() || entries.waiters > 0 && entries.is_empty() {
            self.shared.signal();
        }
        taken
    }

    /// The number of operations that were added and not taken yet.
    pub fn len(&self) -> usize {
        let entries = lock(&self.entries);
        entries.pending.len() + entries.done.len()
    }

    /// Whether no operation is under way or waits to be taken.
    pub fn is_empty(&self) -> bool {
        lock(&self.entries).is_empty()
    }

    /// Waits until [`Ready::take`] may have something. Returns false if nothing is under way: at
    /// once, or when other threads have taken all there was; and in a forked child. Any number of
    /// threads may wait; one that waits for [`Ready::fd`] itself may miss what another takes.
    ///
    /// # Errors
    /// [`io::ErrorKind::Interrupted`] after a signal.
    pub fn wait(&self) -> io::Result<bool> {
        if !self.mark.is_current() {
            return Ok(false);
        }
        {
            let mut entries = lock(&self.entries);
            if entries.is_empty() {
                return Ok(false);
            }
            // From here on, `take` says so when it takes the last.
            entries.waiters += 1;
        }
        let polled = poll(&mut [PollFd::new(&self.shared.event, PollFlags::IN)], None);
        let mut entries = lock(&self.entries);
        entries.waiters -= 1;
        if entries.is_empty() && entries.waiters == 0 {
            // All waiters have seen it; an event loop with the descriptor need not.
            let _ = rustix::io::read(&self.shared.event, &mut [0u8; 8]);
        }
        polled?;
        Ok(!entries.is_empty())
    }
}

impl<T> Entries<T> {
    fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.done.is_empty()
    }

    /// Polls an entry that is not in `pending`; whether it is done.
    fn advance(&mut self, key: u64, mut entry: Entry<T>) -> bool {
        match entry.future.as_mut().poll(&mut Context::from_waker(&entry.waker)) {
            Poll::Ready(result) => {
                self.done.push_back((entry.token, result));
                true
            }
            Poll::Pending => {
                self.pending.insert(key, entry);
                false
            }
        }
    }
}

impl<T> std::fmt::Debug for Ready<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ready").field("len", &self.len()).finish()
    }
}

/// A panic of a future leaves its entry out, and the rest as it was.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A future that waits for a message; the sender wakes it.
    fn coming() -> (impl Fn(u32), impl Future<Output = u32> + Send + 'static) {
        let (send, receive) = mpsc::channel();
        let wakers = Arc::new(Mutex::new(None::<Waker>));
        let wakes = wakers.clone();
        let future = std::future::poll_fn(move |context| {
            *lock(&wakers) = Some(context.waker().clone());
            receive.try_recv().map_or(Poll::Pending, Poll::Ready)
        });
        let complete = move |value| {
            send.send(value).unwrap();
            if let Some(waker) = lock(&wakes).take() {
                waker.wake();
            }
        };
        (complete, future)
    }

    fn is_readable(ready: &Ready<u32>) -> bool {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&ready.fd(), PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn a_completion_makes_the_descriptor_readable_until_it_is_taken() {
        let ready = Ready::new().unwrap();
        let (complete, future) = coming();
        ready.add(7, future).unwrap();
        assert!(!is_readable(&ready) && ready.take(10).is_empty());
        complete(42);
        assert!(is_readable(&ready));
        assert!(ready.wait().unwrap());
        assert_eq!((ready.take(10), ready.len()), (vec![(7, 42)], 0));
        assert!(!is_readable(&ready) && !ready.wait().unwrap());
    }

    #[test]
    fn what_was_not_taken_is_announced_again() {
        let ready = Ready::new().unwrap();
        for token in 0..3 {
            ready.add(token, std::future::ready(1)).unwrap();
        }
        assert!(is_readable(&ready));
        assert_eq!(ready.take(2).len(), 2);
        assert!(is_readable(&ready));
        assert_eq!(ready.take(2), [(2, 1)]);
        assert!(!is_readable(&ready));
    }

    #[test]
    fn all_that_wait_return_when_nothing_is_left() {
        let ready = Ready::new().unwrap();
        for round in 0..2_000 {
            let (complete, future) = coming();
            ready.add(round, future).unwrap();
            let take = || {
                let mut taken = 0;
                while ready.wait().unwrap() {
                    taken += ready.take(1).len();
                }
                taken
            };
            std::thread::scope(|scope| {
                let waiting = [scope.spawn(take), scope.spawn(take)];
                if round % 2 == 0 {
                    std::thread::yield_now();
                }
                complete(1);
                assert_eq!(waiting.map(|one| one.join().unwrap()).iter().sum::<usize>(), 1);
            });
            assert!(!is_readable(&ready) && !ready.wait().unwrap());
        }
    }

    #[test]
    fn a_panic_affects_no_other_operation() {
        let ready = Ready::new().unwrap();
        let mut complete = Vec::new();
        for token in 0..4 {
            let (completes, future) = coming();
            let future = async move {
                let value = future.await;
                assert!(value > 0, "a defect");
                value
            };
            ready.add(token, future).unwrap();
            complete.push(completes);
        }
        // The one that panics is the first that is polled.
        for (value, complete) in complete.iter().enumerate() {
            complete(value as u32);
        }
        let mut taken = Vec::new();
        let mut panics = 0;
        while let Ok(true) = ready.wait() {
            match catch_unwind(AssertUnwindSafe(|| ready.take(1))) {
                Ok(some) => taken.extend(some),
                Err(_) => panics += 1,
            }
        }
        assert_eq!((taken, panics), (vec![(1, 1), (2, 2), (3, 3)], 1));
    }

    #[test]
    fn no_completion_is_lost_among_threads() {
        let ready = Ready::new().unwrap();
        const EACH: u64 = 500;
        let taken = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let ready = &ready;
                scope.spawn(move || {
                    for i in 0..EACH {
                        let (complete, future) = coming();
                        ready.add(thread * EACH + i, future).unwrap();
                        complete(1);
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    use std::sync::atomic::Ordering::Relaxed;
                    while taken.load(Relaxed) < 2 * EACH {
                        taken.fetch_add(ready.take(3).len() as u64, Relaxed);
                        std::thread::yield_now();
                    }
                });
            }
        });
        assert!(ready.is_empty());
    }
}
