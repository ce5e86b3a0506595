//! Commits under way: captured, and not yet known to be durable.
//!
//! A [`Flight`] carries one commit of one or several objects from its capture to its end, on the caller's
//! thread or on the one for background commits. However it ends, also by a panic, it *lands* at each of its objects,
//! with the pages it carried if it failed: the next capture takes those along, so that a failed psync forgets nothing.
//!
//! # Locks
//! [`Flights`] has a lock of its own, below the one of the attachment: a capture may wait for landings while it
//! holds the attachment, and landing takes nothing else.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use aquifer_pool::{Commit, InodeLock};
use aquifer_vm::dirty::PageRun;

use crate::committer::Completion;
use crate::error::{ObjectError, Result, text};

/// The commits of one attachment that are under way, and what failed ones have left.
#[derive(Default)]
pub(crate) struct Flights {
    state: Mutex<State>,
    landed: Condvar,
}

#[derive(Default)]
struct State {
    /// How many were ever begun.
    begun: u64,
    /// Numbers of those under way.
    under_way: Vec<u64>,
    /// Threads that wait for a landing.
    waiting: usize,
    /// Pages of failed ones.
    returned: Vec<PageRun>,
    /// For each [`Earlier`] whose commits are under way: the number of the last of them, and whether one has failed.
    outcomes: Vec<(u64, Arc<AtomicBool>)>,
    /// Who wants to hear when none up to a number is under way.
    watchers: Vec<(u64, Earlier, Arc<Completion>)>,
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

    /// Ends one. The lock is given up before anybody hears of the end: who detaches then is the last to have it.
    fn land(&self, number: u64, lock: Arc<InodeLock>, returned: Vec<PageRun>) {
        let mut state = self.state();
        let State { under_way, outcomes, .. } = &mut *state;
        under_way.retain(|other| *other != number);
        outcomes.retain(|(last, has_failed)| {
            if number <= *last && !returned.is_empty() {
                // Relaxed: read after this lock was held, or by this thread.
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
        for (_, earlier, completion) in done {
            completion.end_part(earlier.outcome());
        }
    }

    /// What must have landed, besides the capture under way, which has taken its pages and has no flight yet, for everything that was
    /// stored before it to be durable.
    pub fn earlier(self: &Arc<Flights>, name: &[u8]) -> Earlier {
        let mut state = self.state();
        // Of those that have landed, what failed and was left by the capture counts. What a capture has taken along is in its own flight.
        let has_failed = Arc::new(AtomicBool::new(!state.returned.is_empty()));
        let number = state.begun;
        if !state.has_landed(number) {
            state.outcomes.push((number, has_failed.clone()));
        }
        Earlier { flights: self.clone(), number, has_failed, name: name.to_vec() }
    }

    /// The number of the last one begun, for [`Flights::wait_landed`].
    pub fn last_begun(&self) -> u64 {
        self.state().begun
    }

    /// Waits until none up to `number` is under way.
    pub fn wait_landed(&self, number: u64) {
        let mut state = self.state();
        while !state.has_landed(number) {
            state.waiting += 1;
            state = self.landed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Whether failed ones left pages that no capture has taken along yet.
    pub fn has_returned(&self) -> bool {
        !self.state().returned.is_empty()
    }

    /// Takes what failed ones left.
    pub fn take_returned(&self) -> Vec<PageRun> {
        std::mem::take(&mut self.state().returned)
    }
}

/// What an object must have behind it for everything stored to it before a capture to be durable, besides what the
/// capture took: the commits begun before.
#[derive(Clone)]
pub(crate) struct Earlier {
    flights: Arc<Flights>,
    number: u64,
    /// Whether one of these has failed. If so, it is not durable, also if another capture has taken its pages along: that may fail as well.
    has_failed: Arc<AtomicBool>,
    name: Vec<u8>,
}

impl Earlier {
    /// Waits for it.
    pub fn wait(&self) -> Result<()> {
        self.flights.wait_landed(self.number);
        self.outcome()
    }

    /// Ends a part of `completion` when it is there.
    pub fn watch(&self, completion: &Arc<Completion>) {
        let mut state = self.flights.state();
        if !state.has_landed(self.number) {
            state.watchers.push((self.number, self.clone(), completion.clone()));
            return;
        }
        drop(state);
        completion.end_part(self.outcome());
    }

    /// How all of it ended, once it has.
    fn outcome(&self) -> Result<()> {
        // Relaxed: stored under the lock of the flights, which this thread has held since.
        match self.has_failed.load(Relaxed) {
            true => Err(ObjectError::Unsynced { name: text(&self.name) }),
            false => Ok(()),
        }
    }
}

/// What a flight carries of one object.
struct Part {
    flights: Arc<Flights>,
    number: u64,
    lock: Arc<InodeLock>,
    runs: Vec<PageRun>,
}

/// A commit under way.
pub(crate) struct Flight {
    commit: Option<Commit>,
    parts: Vec<Part>,
}

impl Flight {
    /// Begins with a commit that was captured.
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
        // What fails, or panics, lands when this is dropped.
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
        // The commit first: it holds the pool's media.
        self.commit = None;
        self.land(|runs| runs);
    }
}

#[cfg(test)]
mod tests {
    use aquifer_pool::{CreateOptions, LockMode, OpenOptions, Pool};
    use aquifer_vm::dirty::PageIndex;

    use super::*;

    /// Another thread's psync takes along what a failed one left, and is not durable yet.
    #[test]
    fn a_failure_whose_pages_another_capture_took_is_told_to_those_that_wait_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let (create, open) = (CreateOptions::default(), OpenOptions::default());
        let pool = Pool::create(path, 1 << 20, &create, &open).unwrap();
        let lock = Arc::new(pool.lock_inode(1, LockMode::Exclusive).unwrap());
        let page = || vec![PageRun { first: PageIndex(0), count: 1 }];
        let flights = Arc::new(Flights::default());
        let first = flights.begin(&lock);
        let waiting = flights.earlier(b"object");
        flights.land(first, lock.clone(), page());
        assert_eq!(flights.take_returned().len(), 1);
        let second = flights.begin(&lock);
        waiting.wait().unwrap_err();
        // One that waits for the second is told of that one.
        let later = flights.earlier(b"object");
        flights.land(second, lock.clone(), Vec::new());
        later.wait().unwrap();
        waiting.wait().unwrap_err();
    }

    /// What was captured later has no part in what an earlier commit made durable.
    #[test]
    fn a_failure_of_a_later_commit_is_not_told_to_those_that_wait_for_earlier_ones() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let (create, open) = (CreateOptions::default(), OpenOptions::default());
        let pool = Pool::create(path, 1 << 20, &create, &open).unwrap();
        let lock = Arc::new(pool.lock_inode(1, LockMode::Exclusive).unwrap());
        let page = || vec![PageRun { first: PageIndex(0), count: 1 }];
        let flights = Arc::new(Flights::default());
        let first = flights.begin(&lock);
        let waiting = flights.earlier(b"object");
        let second = flights.begin(&lock);
        let later = flights.earlier(b"object");
        flights.land(second, lock.clone(), page());
        // After the failure, and before a capture takes its pages along.
        let after = flights.earlier(b"object");
        flights.land(first, lock.clone(), Vec::new());
        waiting.wait().unwrap();
        later.wait().unwrap_err();
        after.wait().unwrap_err();
        flights.take_returned();
        flights.earlier(b"object").wait().unwrap();
    }
}
