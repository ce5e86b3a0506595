//! Credentials from a function of Python.
//!
//! Requests wait for credentials, and the function for the interpreter's lock. A load from an array's memory may hold that lock while
//! it waits for a request. So what the function supplied is kept here, the library's question is answered with it as long as it is
//! good, and a thread asks the function for the next ones in time: so early, if they live long enough, that no load that waits for
//! its timeout keeps the thread from the lock until their end. The first ones are asked for while the object is opened, without the
//! lock.
//!
//! When they have expired all the same, a request waits for the thread, but not for all of its time: if the request is that of a
//! load with the lock, the thread waits for it. Then the expired ones are tried, which a server may take for a while.
//!
//! What the function raises is dropped, as it may contain secrets.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use aquifer::remote::Credentials;
use aquifer_sys::thread;
use aquifer_vm::ProcessMark;
use pyo3::prelude::*;

/// The least time before their end at which credentials are replaced, if they live twice as long.
const MARGIN: Duration = Duration::from_secs(300);
/// How much longer than its timeout a load waits at most.
const GRACE: Duration = Duration::from_secs(10);
/// The longest wait of a request for credentials to replace expired ones.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two calls of the function.
const PAUSE: Duration = Duration::from_secs(1);
/// Most of one wait, so that a clock that was set is noticed.
const WAIT: Duration = Duration::from_secs(60);

/// Access key, secret, session token, bearer token, and seconds of the epoch at which they expire.
type Answer = (Option<String>, Option<String>, Option<String>, Option<String>, Option<f64>);

#[derive(Debug)]
struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the function of credentials failed")
    }
}

impl std::error::Error for Failed {}

/// What is kept of one object's function. The lock is held for moments, and never with the interpreter's.
struct Kept {
    supply: Py<PyAny>,
    /// How long before their end credentials are replaced.
    margin: Duration,
    /// How long a request waits for new ones when these have expired.
    patience: Duration,
    mark: ProcessMark,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    last: Option<Supplied>,
    /// How often the keeper's calls have failed.
    failures: u64,
    has_keeper: bool,
    is_ended: bool,
}

#[derive(Clone)]
struct Supplied {
    credentials: Credentials,
    /// When the next ones are asked for, and the end.
    times: Option<(SystemTime, SystemTime)>,
}

impl Supplied {
    fn is_good(&self) -> bool {
        self.times.is_none_or(|(_, end)| end > SystemTime::now() + PAUSE)
    }
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the function.
    fn ask(&self) -> Result<Supplied, Failed> {
        let began = SystemTime::now();
        // None when the interpreter ends.
        let answer = Python::try_attach(|py| -> PyResult<Answer> {
            self.supply.bind(py).call0()?.extract()
        });
        let (credentials, end) = match answer {
            Some(Ok((Some(id), Some(secret), None, None, end))) => {
                (Credentials::key(id, secret), end)
            }
            Some(Ok((Some(id), Some(secret), Some(token), None, end))) => {
                (Credentials::session_key(id, secret, token), end)
            }
            Some(Ok((None, None, None, Some(token), end))) => (Credentials::bearer(token), end),
            _ => return Err(Failed),
        };
        let Some(seconds) = end else { return Ok(Supplied { credentials, times: None }) };
        let since = Duration::try_from_secs_f64(seconds).map_err(|_| Failed)?;
        let end = SystemTime::UNIX_EPOCH.checked_add(since).ok_or(Failed)?;
        // Those of the past are none.
        let life = end.duration_since(began).map_err(|_| Failed)?;
        let renewal = end - self.margin.min(life / 2);
        Ok(Supplied { credentials: credentials.expires(end), times: Some((renewal, end)) })
    }

    fn keep(&self, supplied: Supplied) {
        self.lock().last = Some(supplied);
        self.changed.notify_all();
    }

    /// Replaces what is kept in time, until it is ended.
    fn renew_in_time(&self) {
        let mut earliest = SystemTime::now();
        loop {
            let mut state = self.lock();
            loop {
                let times = state.last.as_ref().and_then(|last| last.times);
                let Some((renewal, _)) = times.filter(|_| !state.is_ended) else { return };
                let wait = renewal.max(earliest).duration_since(SystemTime::now());
                let Some(wait) = wait.ok().filter(|wait| !wait.is_zero()) else { break };
                let waited = self.changed.wait_timeout(state, wait.min(WAIT));
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            drop(state);
            match self.ask() {
                Ok(supplied) => self.keep(supplied),
                // The old ones stay, until their end.
                Err(Failed) => {
                    self.lock().failures += 1;
                    self.changed.notify_all();
                }
            }
            earliest = SystemTime::now() + PAUSE;
        }
    }
}

impl Kept {
    /// Waits for the keeper to replace what has expired. If it neither succeeds nor fails in time, the expired ones are
    /// returned.
    fn replaced(&self, mut state: MutexGuard<'_, State>) -> Result<Credentials, Failed> {
        let failures = state.failures;
        // It may be asleep until the end, if the clock was set or the machine slept.
        self.changed.notify_all();
        let deadline = Instant::now() + self.patience;
        loop {
            let last = state.last.as_ref().ok_or(Failed)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if last.is_good() || left.is_zero() {
                return Ok(last.credentials.clone());
            }
            if state.failures > failures {
                return Err(Failed);
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The function as the library asks it.
pub(crate) struct Provider(Arc<Kept>);

impl Provider {
    /// For requests with this timeout.
    pub fn new(supply: Py<PyAny>, timeout: Duration) -> Provider {
        Provider(Arc::new(Kept {
            supply,
            margin: MARGIN.max(timeout.saturating_add(GRACE).saturating_mul(2)),
            patience: PATIENCE.min(timeout / 2),
            mark: ProcessMark::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    pub fn get(&self) -> Result<Credentials, Box<dyn std::error::Error + Send + Sync>> {
        let kept = &self.0;
        if !kept.mark.is_current() {
            // A thread of the parent may have had the lock, and there is none to renew them.
            return Ok(kept.ask()?.credentials);
        }
        let state = kept.lock();
        if let Some(last) = state.last.as_ref().filter(|last| last.is_good()) {
            return Ok(last.credentials.clone());
        }
        if state.has_keeper {
            return Ok(kept.replaced(state)?);
        }
        drop(state);
        let supplied = kept.ask()?;
        kept.keep(supplied.clone());
        let is_first =
            supplied.times.is_some() && !std::mem::replace(&mut kept.lock().has_keeper, true);
        if is_first {
            let keeper = kept.clone();
            let started = thread::start(c"aquifer-renewal", move || keeper.renew_in_time());
            started.inspect_err(|_| kept.lock().has_keeper = false)?;
        }
        Ok(supplied.credentials)
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        if self.0.mark.is_current() {
            self.0.lock().is_ended = true;
            self.0.changed.notify_all();
        }
    }
}
