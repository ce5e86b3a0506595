//! Requests that wait for locks.
//!
//! The system's own wait for such a lock cannot be ended by another thread. So a thread tries what is
//! waited for again: at once those of an inode of which something was unlocked here, and all after a
//! pause that grows to [`LONGEST_PAUSE`], as others unlock too. Deadlocks are not detected.
//!
//! # What it may cost
//! A program can let very many requests wait, and unlock in a loop. So at most [`MOST_WAITING`] wait; of
//! those that want the same, one is tried where that has to fail for the others too; and the thread rests
//! [`REST`] times as long as it took to try all, and as long as it took after some.
//!
//! # Locks
//! *While requests are tried they are not in the queue*, so that no thread which answers requests waits
//! for the attempts. Their inode stays listed, and an interrupt of one is remembered until it is put
//! back. The queue's lock may be taken while owners are locked ([`super::locks`]), not the other way
//! round.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_pool::{LockArea, LockMode};

use super::lock_owners::LockOwner;
use crate::answer::Answer;
use crate::state::{MOST_WAITING, WaitNote, Waits};
use crate::wire::Unique;

/// How long a lock that others have is not tried again, at first and at the most.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);
/// How many times as long as it took to try all the thread rests at least.
const REST: u32 = 8;
/// After shorter attempts it does not: to rest takes as long.
const SHORT: Duration = Duration::from_millis(1);
/// How many interrupts are remembered whose request does not wait. Most are of other requests. So many
/// do not come while a request that was read is about to wait: it has one, and so has each other one
/// that is being answered.
const INTERRUPTED: usize = 4096;

/// A lock that is wanted.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub owner: LockOwner,
    /// The open file.
    pub fh: u64,
    pub area: LockArea,
    pub mode: LockMode,
}

/// A request that waits for one.
pub(super) struct Wait {
    pub unique: Unique,
    pub answer: Option<Answer<'static>>,
    pub wanted: Wanted,
    /// [`Queue::wakes`] before it was tried.
    pub tried_at: u64,
    /// Goes behind the answer.
    note: Option<WaitNote>,
}

/// Those that wait. See the [module](self).
#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    /// Something was unlocked, or all has ended.
    changed: Condvar,
    /// How often something was unlocked.
    wakes: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    /// By inode number, the first ones first. Of those that are being tried, the inode is listed.
    of: HashMap<u64, Vec<Wait>>,
    count: usize,
    /// How many are of an owner.
    owners: HashMap<LockOwner, usize>,
    /// Inodes of which something was unlocked.
    freed: HashSet<u64>,
    interrupted: Interrupted,
    has_thread: bool,
    ended: bool,
}

/// Requests that are not to begin to wait, or to go on.
#[derive(Default)]
struct Interrupted {
    keys: HashSet<u64>,
    order: VecDeque<u64>,
}

impl Interrupted {
    fn add(&mut self, key: u64) {
        if self.keys.insert(key) {
            self.order.push_back(key);
        }
        if self.order.len() > INTERRUPTED
            && let Some(oldest) = self.order.pop_front()
        {
            self.keys.remove(&oldest);
        }
    }

    fn has(&self, key: u64) -> bool {
        self.keys.contains(&key)
    }
}

/// What the thread tries next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Requests about these inodes.
    Some(Vec<u64>),
    /// All: nothing was unlocked here for a while.
    All(Vec<u64>),
}

impl Wait {
    pub fn new(unique: Unique, answer: Answer<'static>, wanted: Wanted, tried_at: u64) -> Wait {
        Wait { unique, answer: Some(answer), wanted, tried_at, note: None }
    }

    /// Answers with an error.
    pub fn end(&mut self, errno: i32) {
        if let Some(answer) = self.answer.take() {
            let _ = answer.error(errno);
        }
    }
}

impl Waiting {
    fn is_gone(&mut self, owner: LockOwner) {
        self.count -= 1;
        if let Some(count) = self.owners.get_mut(&owner) {
            *count -= 1;
            if *count == 0 {
                self.owners.remove(&owner);
            }
        }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // No panic leaves it half changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often something was unlocked here: for [`Wait::tried_at`].
    pub fn wakes(&self) -> u64 {
        // SeqCst, here and in `wake`: with the attempt behind it, which finds what was unlocked before.
        self.wakes.load(SeqCst)
    }

    /// Lets a request wait, unless it was interrupted before. Returns whether a thread is to be started
    /// that tries it.
    pub fn add(&self, mut wait: Wait, waits: Option<&Waits>) -> bool {
        let mut waiting = self.lock();
        let key = wait.unique.key();
        if waiting.interrupted.has(key) {
            wait.end(libc::EINTR);
            return false;
        }
        if waiting.count >= MOST_WAITING {
            wait.end(libc::ENOLCK);
            return false;
        }
        wait.note = waits.and_then(|waits| waits.add(key));
        let node = wait.wanted.owner.node;
        if wait.tried_at != self.wakes() {
            // Perhaps what it waits for was unlocked since.
            waiting.freed.insert(node);
            self.changed.notify_all();
        }
        waiting.count += 1;
        *waiting.owners.entry(wait.wanted.owner).or_default() += 1;
        waiting.of.entry(node).or_default().push(wait);
        !std::mem::replace(&mut waiting.has_thread, true)
    }

    /// No thread could be started: none waits.
    pub fn without_thread(&self) {
        let mut waiting = self.lock();
        waiting.has_thread = false;
        let nodes: Vec<u64> = waiting.of.keys().copied().collect();
        drop(waiting);
        nodes.into_iter().for_each(|node| self.end_all(node, libc::ENOLCK));
    }

    /// Something of an inode was unlocked.
    pub fn wake(&self, node: u64) {
        self.wakes.fetch_add(1, SeqCst);
        let mut waiting = self.lock();
        if waiting.of.contains_key(&node) {
            waiting.freed.insert(node);
            self.changed.notify_all();
        }
    }

    /// Whether an owner waits for a lock.
    pub fn has(&self, owner: LockOwner) -> bool {
        self.lock().owners.contains_key(&owner)
    }

    /// Ends a wait. A request that does not wait may be about to, or is another one.
    pub fn interrupt(&self, of: Unique) {
        let mut waiting = self.lock();
        let found = waiting.of.iter().find_map(|(node, waits)| {
            let at = waits.iter().position(|wait| wait.unique.key() == of.key());
            Some((*node, at?))
        });
        let Some((node, at)) = found else { return waiting.interrupted.add(of.key()) };
        if let Some(waits) = waiting.of.get_mut(&node) {
            let mut wait = waits.remove(at);
            let is_last = waits.is_empty();
            waiting.is_gone(wait.wanted.owner);
            // While others of it are being tried, it stays listed: `put_back` takes it out.
            if is_last && !waiting.owners.keys().any(|owner| owner.node == node) {
                waiting.of.remove(&node);
            }
            wait.end(libc::EINTR);
        }
    }

    /// Ends all waits for locks of an inode.
    pub fn end_all(&self, node: u64, errno: i32) {
        let mut waiting = self.lock();
        // Those that are being tried find that it is not listed.
        for mut wait in waiting.of.remove(&node).unwrap_or_default() {
            waiting.is_gone(wait.wanted.owner);
            wait.end(errno);
        }
    }

    /// All that waits is dropped, and the thread ends.
    pub fn end(&self) {
        let mut waiting = self.lock();
        waiting.ended = true;
        self.changed.notify_all();
    }

    /// Takes out the requests about an inode.
    pub fn take(&self, node: u64) -> Vec<Wait> {
        self.lock().of.get_mut(&node).map(std::mem::take).unwrap_or_default()
    }

    /// Puts back those that go on waiting, before those that have come since; `ended` are the owners of
    /// those that do not.
    pub fn put_back(&self, node: u64, waits: Vec<Wait>, ended: &[LockOwner]) {
        let mut waiting = self.lock();
        ended.iter().for_each(|owner| waiting.is_gone(*owner));
        let is_listed = waiting.of.contains_key(&node);
        let mut left = Vec::with_capacity(waits.len());
        for mut wait in waits {
            let errno = match waiting.interrupted.has(wait.unique.key()) {
                true => libc::EINTR,
                false if !is_listed => libc::ESTALE,
                false => {
                    left.push(wait);
                    continue;
                }
            };
            waiting.is_gone(wait.wanted.owner);
            wait.end(errno);
        }
        if let Some(come) = waiting.of.get_mut(&node) {
            left.append(come);
            if left.is_empty() {
                waiting.of.remove(&node);
            } else {
                *come = left;
            }
        }
    }

    /// What is to be tried next, when it is time; `None` when nothing waits any more, and the thread
    /// that asks is to end.
    pub fn next(&self, pauses: &mut Pauses) -> Option<Next> {
        let mut waiting = self.lock();
        loop {
            if waiting.ended || waiting.count == 0 {
                waiting.has_thread = false;
                return None;
            }
            let now = Instant::now();
            pauses.began = now;
            // However often something is unlocked, the others have their turn.
            if pauses.all_at <= now {
                waiting.freed.clear();
                return Some(Next::All(waiting.of.keys().copied().collect()));
            }
            let has_freed = !waiting.freed.is_empty();
            if has_freed && pauses.rest_until <= now {
                pauses.pause = FIRST_PAUSE;
                return Some(Next::Some(waiting.freed.drain().collect()));
            }
            let freed_at = if has_freed { pauses.rest_until } else { pauses.all_at };
            let waited = self.changed.wait_timeout(waiting, freed_at.min(pauses.all_at) - now);
            waiting = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// When the thread tries again.
pub(super) struct Pauses {
    pause: Duration,
    /// When all are tried.
    all_at: Instant,
    /// Before that, none.
    rest_until: Instant,
    /// When the last attempts began.
    began: Instant,
}

impl Pauses {
    pub fn new() -> Pauses {
        let now = Instant::now();
        Pauses { pause: FIRST_PAUSE, all_at: now + FIRST_PAUSE, rest_until: now, began: now }
    }

    /// After the attempts.
    pub fn tried(&mut self, tried: &Next) {
        let now = Instant::now();
        let took = now - self.began;
        self.rest_until = if took < SHORT { now } else { now + took };
        if let Next::All(_) = tried {
            self.pause = (2 * self.pause).min(LONGEST_PAUSE);
            self.all_at = now + self.pause.max(REST * took);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use super::super::lock_owners::OwnerName;
    use super::*;
    use crate::answer::{Channel, Delivered};

    struct Nowhere;

    impl Channel for Nowhere {
        fn send(&self, _: &[IoSlice<'_>]) -> Delivered {
            Delivered::Yes
        }

        fn another(&self) -> Option<Box<dyn Channel + Send>> {
            Some(Box::new(Nowhere))
        }
    }

    fn owner(node: u64) -> LockOwner {
        LockOwner { node, name: OwnerName::Address(1) }
    }

    fn add(queue: &Queue, key: u64, node: u64) -> bool {
        let unique = Unique(key);
        let answer = Answer::new(&Nowhere, unique).detach().unwrap();
        let (area, mode) = (LockArea::File, LockMode::Exclusive);
        let wanted = Wanted { owner: owner(node), fh: 1, area, mode };
        queue.add(Wait::new(unique, answer, wanted, queue.wakes()), None)
    }

    fn freed(queue: &Queue) -> Vec<u64> {
        queue.lock().freed.drain().collect()
    }

    #[test]
    fn an_unlock_wakes_only_those_that_wait_for_the_same_inode() {
        let queue = Queue::default();
        assert!(add(&queue, 2, 1));
        assert!(!add(&queue, 4, 2), "there is a thread");
        queue.wake(2);
        assert_eq!(freed(&queue), [2]);
        queue.wake(3);
        assert!(freed(&queue).is_empty());
        // While they are tried as well.
        let tried = queue.take(1);
        queue.wake(1);
        assert_eq!((tried.len(), freed(&queue)), (1, vec![1]));
        queue.put_back(1, tried, &[]);
        // And what was unlocked between the attempt and the wait.
        let before = queue.wakes();
        queue.wake(5);
        let answer = Answer::new(&Nowhere, Unique(6)).detach().unwrap();
        let (area, mode) = (LockArea::File, LockMode::Shared);
        let wanted = Wanted { owner: owner(5), fh: 1, area, mode };
        queue.add(Wait::new(Unique(6), answer, wanted, before), None);
        assert_eq!(freed(&queue), [5]);
    }

    #[test]
    fn an_interrupt_ends_a_wait_before_during_and_between_attempts() {
        let queue = Queue::default();
        let is_empty = || {
            let waiting = queue.lock();
            assert_eq!(waiting.count == 0, waiting.owners.is_empty());
            waiting.count == 0 && waiting.of.is_empty()
        };
        // Before it waits, with very many of other requests behind it.
        queue.interrupt(Unique(2));
        (0..1000).for_each(|other| queue.interrupt(Unique(1001 + 2 * other)));
        add(&queue, 2, 1);
        assert!(is_empty());
        add(&queue, 4, 1);
        queue.interrupt(Unique(4 | 1 << 63));
        assert!(is_empty());
        add(&queue, 6, 1);
        let tried = queue.take(1);
        queue.interrupt(Unique(6));
        queue.put_back(1, tried, &[]);
        assert!(is_empty());
        // One that has come meanwhile.
        add(&queue, 8, 1);
        let tried = queue.take(1);
        add(&queue, 10, 1);
        queue.interrupt(Unique(10));
        queue.put_back(1, tried, &[]);
        assert!(!is_empty() && queue.has(owner(1)));
        // Of a file that is gone, also while they are tried.
        let tried = queue.take(1);
        queue.end_all(1, libc::ESTALE);
        queue.put_back(1, tried, &[]);
        assert!(is_empty());
        assert_eq!(queue.next(&mut Pauses::new()), None);
        assert!(queue.lock().interrupted.keys.len() <= INTERRUPTED);
    }

    #[test]
    fn what_takes_long_is_done_seldom() {
        let mut pauses = Pauses::new();
        let took = Duration::from_secs(1);
        pauses.began = Instant::now() - took;
        pauses.tried(&Next::All(vec![1]));
        let now = Instant::now();
        assert!(pauses.all_at - pauses.began >= took * REST);
        assert!(pauses.rest_until >= pauses.began + 2 * took);
        // What is unlocked meanwhile does not put off the others.
        let all_at = pauses.all_at;
        pauses.began = now;
        pauses.tried(&Next::Some(vec![1]));
        assert_eq!(pauses.all_at, all_at);
        let queue = Queue::default();
        add(&queue, 2, 1);
        queue.wake(1);
        pauses.all_at = now;
        assert_eq!(queue.next(&mut pauses), Some(Next::All(vec![1])));
    }
}
