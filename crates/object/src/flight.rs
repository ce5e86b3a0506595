//! Commits in flight: captured, but not yet known to be durable.
//!
//! A [`Flight`] carries one commit of one or several objects from its capture to its end, on the
//! caller's thread or on the background thread. However it ends, including by a panic, it *lands*
//! at each of its objects. If it failed, it returns the pages it carried, and the next capture
//! takes them again, so that a failed psync loses nothing.
//!
//! # Locks
//! [`Flights`] has a private lock, ordered below the attachment's lock: a capture may wait for
//! landings while it holds the attachment's lock, and landing takes no other lock.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use aquifer_pool::{Commit, InodeLock};
use aquifer_vm::dirty::PageRun;

use crate::completion::Countdown;
use crate::error::{ObjectError, Result, text};

/// The commits of one attachment in flight, and the pages of failed ones.
#[derive(Default)]
pub(crate) struct Flights {
    state: Mutex<State>,
    landed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of commits ever begun.
    begun: u64,
    /// Numbers of the commits in flight.
    under_way: Vec<u64>,
    /// Threads waiting for a landing.
    waiting: usize,
    /// Pages of failed commits that no capture has taken yet.
    returned: Vec<PageRun>,
    /// For each [`Earlier`] with commits in flight: the number of the last of them, and whether one
    /// has failed.
    outcomes: Vec<(u64, Arc<AtomicBool>)>,
    /// Psyncs to notify once no commit up to a number is in flight.
    watchers: Vec<(u64, Earlier, Arc<Countdown>)>,
}

impl State {
    fn has_landed(&self, number: u64) -> bool {
        has_landed(&self.under_way, number)
    }
}

fn has_landed(under_way: &[u64], number: u64) -> bool {
    !under_way.iter().any(|other| *other <= number)
}

impl Flights {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, lock: &InodeLock) -> u64 {
        let mut state = self.state();
        state.begun += 1;
        let number = state.begun;
        if state.under_way.is_empty() {
            lock.set_committing(true);
        }
        state.under_way.push(number);
        number
    }

    /// Ends a commit. The inode lock is dropped before waiters are notified, so that a thread that
    /// detaches then drops the last reference.
    fn land(&self, number: u64, lock: Arc<InodeLock>, returned: Vec<PageRun>) {
        let mut state = self.state();
        let State { under_way, outcomes, .. } = &mut *state;
        under_way.retain(|other| *other != number);
        outcomes.retain(|(last, has_failed)| {
            if number <= *last && !returned.is_empty() {
                // Relaxed: read after acquiring this lock, or by this thread.
                has_failed.store(true, Relaxed);
            }
            !has_landed(under_way, *last)
        });
        state.returned.extend(returned);
        if state.under_way.is_empty() {
            lock.set_committing(false);
        }
        drop(lock);
        let (done, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut state.watchers)
            .into_iter()
            .partition(|(number, ..)| state.has_landed(*number));
        state.watchers = waiting;
        let is_awaited = state.waiting > 0;
        drop(state);
        if is_awaited {
            self.landed.notify_all();
        }
        for (_, earlier, countdown) in done {
            countdown.end_one(earlier.outcome());
        }
    }

    /// The commits that must land before everything stored before the current capture is durable.
    /// The current capture has taken its pages and has no flight yet; it does not count.
    pub fn earlier(self: &Arc<Flights>, name: &[u8]) -> Earlier {
        let mut state = self.state();
        // Failed commits that have landed count only if their pages are still here: pages that a
        // capture has taken belong to that capture's flight.
        let has_failed = Arc::new(AtomicBool::new(!state.returned.is_empty()));
        let number = state.begun;
        if !state.has_landed(number) {
            state.outcomes.push((number, has_failed.clone()));
        }
        Earlier { flights: self.clone(), number, has_failed, name: name.to_vec() }
    }

    /// The number of the last commit begun, for [`Flights::wait_landed`].
    pub fn last_begun(&self) -> u64 {
        self.state().begun
    }

    /// Waits until no commit up to `number` is in flight.
    pub fn wait_landed(&self, number: u64) {
        let mut state = self.state();
        while !state.has_landed(number) {
            state.waiting += 1;
            state = self.landed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Whether failed commits left pages that no capture has taken yet.
    pub fn has_returned(&self) -> bool {
        !self.state().returned.is_empty()
    }

    /// Takes the pages that failed commits left.
    pub fn take_returned(&self) -> Vec<PageRun> {
        std::mem::take(&mut self.state().returned)
    }
}

/// The commits begun before a capture. They must land before everything stored to the object before
/// the capture is durable, in addition to the capture's own commit.
#[derive(Clone)]
pub(crate) struct Earlier {
    flights: Arc<Flights>,
    number: u64,
    /// Whether one of these commits has failed. Then its content is not durable, even if another
    /// capture has taken its pages: that commit may fail as well.
    has_failed: Arc<AtomicBool>,
    name: Vec<u8>,
}

impl Earlier {
    /// Waits until all of these commits have landed.
    pub fn wait(&self) -> Result<()> {
        self.flights.wait_landed(self.number);
        self.outcome()
    }

    /// Ends one part of `countdown` once these commits have landed.
    pub fn watch(&self, countdown: &Arc<Countdown>) {
        let mut state = self.flights.state();
        if !state.has_landed(self.number) {
            state.watchers.push((self.number, self.clone(), countdown.clone()));
            return;
        }
        drop(state);
        countdown.end_one(self.outcome());
    }

    /// The outcome of all these commits, once they have landed.
    fn outcome(&self) -> Result<()> {
        // Relaxed: stored under the lock of the flights, which this thread has acquired since.
        if self.has_failed.load(Relaxed) {
            Err(ObjectError::Unsynced { name: text(&self.name) })
        } else {
            Ok(())
        }
    }
}

/// One object's share of a flight.
struct Part {
    flights: Arc<Flights>,
    number: u64,
    lock: Arc<InodeLock>,
    runs: Vec<PageRun>,
}

/// A commit in flight.
pub(crate) struct Flight {
    commit: Option<Commit>,
    parts: Vec<Part>,
}

impl Flight {
    /// Starts a flight with a captured commit.
    pub fn new(commit: Commit) -> Flight {
        Flight { commit: Some(commit), parts: Vec::new() }
    }

    /// Adds an object and the pages that were captured of it.
    pub fn add(&mut self, flights: &Arc<Flights>, lock: &Arc<InodeLock>, runs: Vec<PageRun>) {
        let number = flights.begin(lock);
        self.parts.push(Part { flights: flights.clone(), number, lock: lock.clone(), runs });
    }

    /// Makes the commit durable.
    pub fn finish(mut self) -> Result<()> {
        let commit = self.commit.take().expect("a flight ends once");
        // If this fails or panics, the drop lands the flight with its pages.
        commit.finish()?;
        self.land(|_| Vec::new());
        Ok(())
    }

    fn land(&mut self, mut returned: impl FnMut(Vec<PageRun>) -> Vec<PageRun>) {
        for Part { flights, number, lock, runs } in self.parts.drain(..) {
            flights.land(number, lock, returned(runs));
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        // Drop the commit first: it holds the pool's media.
        self.commit = None;
        self.land(|runs| runs);
    }
}

/// The result of a capture: the commit to finish, if anything has changed, and the earlier commits
/// that must land before everything stored so far is durable.
pub(crate) struct Captured {
    pub flight: Option<Flight>,
    pub earlier: Vec<Earlier>,
}

#[cfg(test)]
mod tests {
    use aquifer_pool::{LockMode, Pool};
    use aquifer_vm::dirty::PageIndex;

    use super::*;

    /// Another thread's psync takes the pages of a failed one, and is not durable yet.
    #[test]
    fn waiters_see_the_failure_of_pages_taken_by_another_capture() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let pool = Pool::create(path, 1 << 20).unwrap();
        let lock = Arc::new(pool.lock_inode(1, LockMode::Exclusive).unwrap());
        let page = || vec![PageRun { first: PageIndex(0), count: 1 }];
        let flights = Arc::new(Flights::default());
        let first = flights.begin(&lock);
        let waiting = flights.earlier(b"object");
        flights.land(first, lock.clone(), page());
        assert_eq!(flights.take_returned().len(), 1);
        let second = flights.begin(&lock);
        waiting.wait().unwrap_err();
        // A waiter for the second commit gets the second commit's outcome.
        let later = flights.earlier(b"object");
        flights.land(second, lock.clone(), Vec::new());
        later.wait().unwrap();
        waiting.wait().unwrap_err();
    }

    /// The failure of a later capture does not affect the outcome of earlier commits.
    #[test]
    fn a_failure_of_a_later_commit_is_not_told_to_those_that_wait_for_earlier_ones() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let pool = Pool::create(path, 1 << 20).unwrap();
        let lock = Arc::new(pool.lock_inode(1, LockMode::Exclusive).unwrap());
        let page = || vec![PageRun { first: PageIndex(0), count: 1 }];
        let flights = Arc::new(Flights::default());
        let first = flights.begin(&lock);
        let waiting = flights.earlier(b"object");
        let second = flights.begin(&lock);
        let later = flights.earlier(b"object");
        flights.land(second, lock.clone(), page());
        // After the failure, before a capture takes its pages.
        let after = flights.earlier(b"object");
        flights.land(first, lock.clone(), Vec::new());
        waiting.wait().unwrap();
        later.wait().unwrap_err();
        after.wait().unwrap_err();
        flights.take_returned();
        flights.earlier(b"object").wait().unwrap();
    }
}
