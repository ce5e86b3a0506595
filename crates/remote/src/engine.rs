//! The thread that makes a device's requests: one for each device and process.
//!
//! It runs a tokio runtime, blocks asynchronous signals and touches no caller's memory. A forked child has neither the
//! thread nor, of the connections, its own: there the device makes a new engine, and leaks its parent's, in which a
//! thread that does not exist in the child may hold locks.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use aquifer_sys::thread::Thread;
use aquifer_vm::ProcessMark;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::Notify;

use crate::ahead::{Ahead, Step};
use crate::body::Body;
use crate::buffers::Buffers;
use crate::connection::Connector;
use crate::costs::Costs;
use crate::fetch::{Fetcher, Version};
use crate::location::{Configured, Location};
use crate::mailbox::{Answer, Mailbox};
use crate::options::Cancel;
use crate::runtime::{self, refused};
use crate::store::received;
use crate::tier::{Obtained, OpenTier, SUB_BLOCK_BYTES, Tally, Terms};
use crate::{RemoteError, RemoteOptions};

/// Of the timeout, the part that a reader gives a disk that is late with its writes, before it goes on without.
const DISK_PART: u32 = 100;

/// The version that is read, and where it is kept.
struct Served {
    version: Arc<Version>,
    tier: Option<OpenTier>,
}

/// What the thread and its callers share.
struct Shared {
    name_in_tier: String,
    fetcher: Fetcher,
    mailbox: Mailbox,
    costs: Arc<Costs>,
    buffers: Arc<Buffers>,
    ahead: Mutex<Ahead>,
    /// What was asked for ahead has come, or has failed.
    landed: Notify,
    /// Unset until the object is open.
    served: OnceLock<Served>,
    is_ending: AtomicBool,
    url: String,
}

pub(crate) struct Engine {
    shared: Arc<Shared>,
    handle: Handle,
    thread: Option<Thread>,
    mark: ProcessMark,
}

impl Engine {
    pub fn start(
        location: &Location,
        options: &RemoteOptions,
        connector: Connector,
        costs: Arc<Costs>,
        buffers: Arc<Buffers>,
    ) -> Result<Engine, RemoteError> {
        let shown = &location.shown;
        let runtime = runtime::new(shown)?;
        let Configured { store, server } = location.configure(options, connector)?;
        let shared = Arc::new(Shared {
            name_in_tier: location.canonical(server),
            fetcher: Fetcher::new(store, location.clone(), options, costs.clone(), buffers.clone()),
            mailbox: Mailbox::new().map_err(refused(shown, "cannot make an eventfd"))?,
            served: OnceLock::new(),
            costs,
            buffers,
            ahead: Mutex::default(),
            landed: Notify::new(),
            is_ending: AtomicBool::new(false),
            url: location.shown.clone(),
        });
        let event = {
            let _entered = runtime.enter();
            rustix::io::fcntl_dupfd_cloexec(shared.mailbox.event(), 0)
                .map_err(std::io::Error::from)
                .and_then(|event| {
                    // SAFETY: an `OwnedFd` returns the same open descriptor until it is dropped.
                    unsafe { AsyncFd::register(event) }.map_err(std::io::Error::from)
                })
                .map_err(refused(shown, "cannot watch an eventfd"))?
        };
        let handle = runtime.handle().clone();
        let served = shared.clone();
        let work = move |runtime: &Runtime| runtime.block_on(serve(event, &served));
        let thread = runtime::run(runtime, shown, work)?;
        Ok(Engine { shared, handle, thread: Some(thread), mark: ProcessMark::new() })
    }

    /// See [`Location::canonical`].
    pub fn name_in_tier(&self) -> &str {
        &self.shared.name_in_tier
    }

    /// The memory for this engine's answers.
    pub fn buffers(&self) -> &Buffers {
        &self.shared.buffers
    }

    /// Whether it is this process's. Async-signal-safe.
    pub fn is_current(&self) -> bool {
        self.mark.is_current()
    }

    /// See [`Mailbox`].
    pub fn mailbox(&self) -> &Mailbox {
        &self.shared.mailbox
    }

    /// Finds the object's version; waits, unless that is cancelled.
    pub fn open(&self, cancel: Option<&Cancel>) -> Result<Version, RemoteError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let shared = self.shared.clone();
        self.handle.spawn(async move {
            let _ = sender.send(shared.fetcher.open().await);
        });
        received(&receiver, &self.shared.url, cancel)?
    }

    /// Starts a request, whose answer is sent to `inbox` with `number`.
    pub fn request(&self, range: Range<u64>, number: usize, inbox: mpsc::Sender<(usize, Answer)>) {
        let promise = self.promise(number, inbox);
        let shared = self.shared.clone();
        self.handle.spawn(async move {
            if let Some((answer, _)) = shared.read(range).await {
                promise.keep(answer);
            }
        });
    }

    /// Starts bringing a range into the tier. The answer comes when it is downloaded and waits to be written, which
    /// it waits for up to the timeout.
    pub fn warm(
        &self,
        range: Range<u64>,
        number: usize,
        tally: Arc<Tally>,
        inbox: mpsc::Sender<(usize, Answer)>,
    ) {
        let promise = self.promise(number, inbox);
        let shared = self.shared.clone();
        self.handle.spawn(async move {
            let Some(Served { version, tier: Some(tier) }) = shared.served.get() else { return };
            let terms = shared.terms(shared.fetcher.timeout, Some(tally));
            let fetch = |range| shared.fetcher.fetch(range, version);
            let obtained = tier.obtain(range, &terms, &shared.buffers, fetch).await;
            promise.keep(obtained.map(|obtained| obtained.body).map_err(Arc::new));
        });
    }

    fn promise(
        &self,
        number: usize,
        inbox: mpsc::Sender<(usize, Answer)>,
    ) -> Promise<impl FnOnce(Answer) + use<>> {
        Promise::new(&self.shared, move |answer| {
            // Without a receiver the batch has panicked, or is a parent's.
            let _ = inbox.send((number, answer));
        })
    }

    /// Sets the version that is read, and its tier, before the first read.
    pub fn serve(&self, version: Arc<Version>, tier: Option<OpenTier>) {
        let _ = self.shared.served.set(Served { version, tier });
    }

    /// Async-signal-safe.
    pub fn tier(&self) -> Option<&OpenTier> {
        self.shared.served.get()?.tier.as_ref()
    }
}

impl Drop for Engine {
    /// Ends the thread. Requests under way are given up.
    fn drop(&mut self) {
        if !self.mark.is_current() {
            return;
        }
        // Release: pairs with the acquire in `serve`.
        self.shared.is_ending.store(true, Ordering::Release);
        self.shared.mailbox.ring();
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
    }
}

impl Shared {
    /// Reads a range of the object, if it is open; whether the tier keeps it.
    async fn read(&self, range: Range<u64>) -> Option<(Answer, bool)> {
        let Served { version, tier } = self.served.get()?;
        let fetch = |range| self.fetcher.fetch(range, version);
        let read = match tier {
            None => fetch(range).await.map(|body| (body, false)),
            Some(tier) => {
                let terms = self.terms(self.fetcher.timeout / DISK_PART, None);
                let obtained = tier.obtain(range.clone(), &terms, &self.buffers, fetch);
                let in_time = tokio::time::timeout(self.fetcher.timeout, obtained).await;
                let obtained = in_time.unwrap_or_else(|_| Err(self.fetcher.timed_out(range, None)));
                obtained.map(|Obtained { body, is_kept }| (body, is_kept))
            }
        };
        Some(match read {
            Ok((body, is_kept)) => (Ok(body), is_kept),
            Err(error) => (Err(Arc::new(error)), false),
        })
    }

    fn terms(&self, room_patience: Duration, tally: Option<Arc<Tally>>) -> Terms {
        Terms {
            // A part of the timeout is for the wait for others, and at least half for a download.
            patience: self.fetcher.timeout / 2,
            room_patience,
            // Only warming reads along what is there: others download each byte once for a node.
            gap_bytes: if tally.is_some() { self.costs.gap_bytes() } else { 0 },
            tally,
        }
    }
}

/// Reading ahead.
impl Shared {
    /// Reads a range, and what may be asked for next.
    async fn read_alone(&self, range: Range<u64>) -> Option<Answer> {
        let timeout = self.fetcher.timeout;
        let in_time = tokio::time::timeout(timeout, self.read_in_time(range.clone())).await;
        in_time.unwrap_or_else(|_| Some(Err(Arc::new(self.fetcher.timed_out(range, None)))))
    }

    async fn read_in_time(&self, read: Range<u64>) -> Option<Answer> {
        let Served { version, tier } = self.served.get()?;
        let kept_bytes = self.buffers.ahead_bytes() as u64;
        let mut most_bytes =
            self.costs.merged_bytes().min(self.buffers.request_bytes() as u64).min(kept_bytes);
        if tier.is_some() {
            // What is asked for becomes whole sub-blocks.
            most_bytes = most_bytes.saturating_sub(2 * SUB_BLOCK_BYTES);
        }
        loop {
            let landed = self.landed.notified();
            let step = self.ahead().step(read.clone(), most_bytes, version.len_bytes);
            match step {
                Step::Here(body) => return Some(Ok(body)),
                Step::Wait(outcome) => {
                    landed.await;
                    // Otherwise each that waited would try, one after another.
                    if let Some(error) = outcome.get() {
                        return Some(Err(error.clone()));
                    }
                }
                Step::Bring(range) => {
                    let mut bringing = Bringing {
                        shared: self,
                        read_bytes: read.end - read.start,
                        range: range.clone(),
                        body: None,
                        kept_bytes,
                    };
                    let (answer, is_in_tier) = self.read(range.clone()).await?;
                    match &answer {
                        Ok(body) if !is_in_tier => bringing.body = Some(body.clone()),
                        Ok(_) => {}
                        Err(error) => self.ahead().failed(&range, error),
                    }
                    return Some(answer);
                }
            }
        }
    }

    fn ahead(&self) -> MutexGuard<'_, Ahead> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A range is being brought: ends also if it is given up.
struct Bringing<'a> {
    shared: &'a Shared,
    read_bytes: u64,
    range: Range<u64>,
    body: Option<Body>,
    kept_bytes: u64,
}

impl Drop for Bringing<'_> {
    fn drop(&mut self) {
        let mut ahead = self.shared.ahead();
        ahead.done(&self.range, self.read_bytes, self.body.as_ref(), self.kept_bytes);
        drop(ahead);
        self.shared.landed.notify_waiters();
    }
}

/// Starts the requests of the mailbox, until the engine ends.
async fn serve(event: AsyncFd<OwnedFd>, shared: &Arc<Shared>) {
    // Acquire: pairs with the release in `drop`.
    while !shared.is_ending.load(Ordering::Acquire) {
        let Ok(mut ready) = event.readable().await else { return };
        shared.mailbox.hear();
        ready.clear_ready();
        shared.mailbox.look(|number, range| {
            let promise = Promise::new(shared, {
                let shared = shared.clone();
                move |answer| shared.mailbox.answer(number, answer)
            });
            let shared = shared.clone();
            tokio::spawn(async move {
                if let Some(answer) = shared.read_alone(range).await {
                    promise.keep(answer);
                }
            });
        });
    }
}

/// An answer that is owed: given also when the request is dropped, because it panicked or the thread ends.
struct Promise<F: FnOnce(Answer)> {
    give: Option<F>,
    shared: Arc<Shared>,
}

impl<F: FnOnce(Answer)> Promise<F> {
    fn new(shared: &Arc<Shared>, give: F) -> Promise<F> {
        Promise { give: Some(give), shared: shared.clone() }
    }

    fn keep(mut self, answer: Answer) {
        if let Some(give) = self.give.take() {
            give(answer);
        }
    }
}

impl<F: FnOnce(Answer)> Drop for Promise<F> {
    fn drop(&mut self) {
        if let Some(give) = self.give.take() {
            give(Err(Arc::new(RemoteError::Stopped { url: self.shared.url.clone() })));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_dropped_is_answered() {
        let location = Location::parse("file:///no/such/file").unwrap();
        let options = RemoteOptions::default();
        let costs = Arc::new(Costs::new(&options));
        let buffers = Arc::new(Buffers::new(1 << 20));
        let engine =
            Engine::start(&location, &options, Connector::default(), costs, buffers).unwrap();
        // Without a version the thread drops the request.
        let answer = engine.mailbox().read(0..10, Duration::from_secs(60), |answer| {
            matches!(answer.as_ref().map_err(Arc::as_ref), Err(RemoteError::Stopped { .. }))
        });
        assert!(matches!(answer, Ok(true)));
    }
}
