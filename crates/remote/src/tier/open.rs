//! A tier as one device of one process uses it: reads from any thread, downloads through leases, and a thread that writes
//! what was downloaded.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use aquifer_sys::thread::{self, Thread};
use futures_util::future::try_join_all;
use tokio::sync::{Notify, OwnedSemaphorePermit};

use super::directory::{ControlFile, Directory};
use super::evict;
use super::layout::{BLOCK_BYTES, Header, SUB_BLOCK_BYTES};
use super::object::ObjectFile;
use super::{Tier, TierError};
use crate::buffers::Buffers;
use crate::fetch::Body;

/// How often a lease of another process is tried again, at first and at last.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(16);
/// Most bytes copied together for one write.
const WRITE_BYTES: usize = 1 << 20;
/// Sub-blocks read at a time.
const READ_SUB_BLOCKS: u64 = 64;

struct Core {
    directory: Directory,
    /// Used by the writing thread only, after the opening.
    control: ControlFile,
    object: ObjectFile,
    /// Why nothing is written any more.
    problem: OnceLock<TierError>,
    /// Leases of this device end.
    released: Notify,
    /// Bytes that wait to be written, and that some were.
    waiting_bytes: AtomicU64,
    written: Notify,
}

/// An object's version in a tier, open for a device.
pub(crate) struct OpenTier {
    core: Arc<Core>,
    jobs: Mutex<Option<Sender<Work>>>,
    writer: Mutex<Option<Thread>>,
}

enum Work {
    Write(Job),
    /// Say when all before it is done.
    Say(Sender<()>),
}

/// Sub-blocks to be written, under their lease.
struct Job {
    sub_blocks: Range<u64>,
    body: Body,
    lease: Arc<Lease>,
    _room: Room,
}

/// Memory in which bytes wait to be written.
struct Room {
    core: Arc<Core>,
    bytes: u64,
    memory: Option<OwnedSemaphorePermit>,
}

impl Drop for Room {
    fn drop(&mut self) {
        // Relaxed: as in `room`.
        self.core.waiting_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.core.written.notify_waiters();
    }
}

struct Lease {
    core: Arc<Core>,
    sub_blocks: Range<u64>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.core.object.end_lease(&self.sub_blocks);
        self.core.released.notify_waiters();
    }
}

impl OpenTier {
    /// Opens the version's file, and starts the thread that writes it.
    pub fn open(tier: &Tier, url: &str, etag: &str, len_bytes: u64) -> Result<OpenTier, TierError> {
        let control = tier.control()?;
        let open = || ObjectFile::open(&tier.directory, url, etag, len_bytes);
        let object = match open() {
            Err(error) if error.is_full() => {
                evict::give_way(&tier.directory, &control, BLOCK_BYTES)?;
                open()?
            }
            opened => opened?,
        };
        object.prefetch_proofs();
        let core = Arc::new(Core {
            control,
            object,
            directory: tier.directory.clone(),
            problem: OnceLock::new(),
            released: Notify::new(),
            waiting_bytes: AtomicU64::new(0),
            written: Notify::new(),
        });
        let (sender, jobs) = mpsc::channel::<Work>();
        let writing = core.clone();
        let writer = thread::start(c"aquifer-tier", move || {
            for work in jobs {
                match work {
                    Work::Write(job) => writing.write(&job),
                    // Without a receiver the caller has given up.
                    Work::Say(done) => drop(done.send(())),
                }
            }
        });
        let writer = writer
            .map_err(|error| TierError::system(tier.path(), "cannot start a thread", error))?;
        Ok(OpenTier { core, jobs: Mutex::new(Some(sender)), writer: Mutex::new(Some(writer)) })
    }

    /// See [`ObjectFile::read`]. Async-signal-safe.
    pub fn read(&self, start: u64, to: &mut [u8]) -> bool {
        self.core.object.read(start, to)
    }

    /// See [`ObjectFile::has`].
    pub fn has(&self, range: Range<u64>) -> bool {
        self.core.object.has(range)
    }

    /// See [`ObjectFile::prefetch`].
    pub fn prefetch(&self, range: Range<u64>) {
        self.core.object.prefetch(range);
    }

    /// Waits until what was downloaded is written.
    pub fn flush(&self) {
        let (done, said) = mpsc::channel();
        if let Some(jobs) = &*self.jobs.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = jobs.send(Work::Say(done));
        }
        // Fails if the thread has panicked.
        let _ = said.recv();
    }

    /// Why nothing is written any more, if that is so.
    pub fn problem(&self) -> Option<&TierError> {
        self.core.problem.get()
    }

    /// The range of whole sub-blocks around a range.
    pub fn whole(&self, range: Range<u64>) -> Range<u64> {
        let geometry = self.core.object.geometry;
        geometry.bytes_of(geometry.touched(range))
    }

    /// Brings a range: what is there from the file, the rest by `fetch`, unless another process is about to bring it.
    /// Waits for others, and for a slow disk, not longer than `patience`.
    pub async fn obtain<F, E>(
        &self,
        range: Range<u64>,
        patience: Duration,
        buffers: &Buffers,
        fetch: impl Fn(Range<u64>) -> F,
    ) -> Result<Body, E>
    where
        F: Future<Output = Result<Body, E>>,
    {
        let geometry = self.core.object.geometry;
        let mut parts = Parts::new(geometry.touched(range.clone()));
        let patience = Instant::now() + patience;
        let lease = self.lease(&mut parts, patience).await;
        let missing = parts.missing_runs();
        let fetched = try_join_all(missing.iter().map(|run| fetch(geometry.bytes_of(run.clone()))));
        for (run, body) in missing.into_iter().zip(fetched.await?) {
            if let Some(lease) = &lease
                && self.problem().is_none()
            {
                let bytes = geometry.bytes_of(run.clone());
                let room = self.room(bytes.end - bytes.start, patience, buffers).await;
                self.write_later(run.clone(), body.clone(), lease.clone(), room);
            }
            parts.put(run, body);
        }
        let skip = range.start - geometry.bytes_of(parts.sub_blocks.clone()).start;
        Ok(parts.into_body(skip as usize))
    }

    /// Leases what is missing, or waits until it is there. Without a lease, what is missing is not to be written.
    async fn lease(&self, parts: &mut Parts, patience: Instant) -> Option<Arc<Lease>> {
        let mut wait = SHORTEST_WAIT;
        loop {
            let released = self.core.released.notified();
            parts.read(&self.core.object);
            let sub_blocks = parts.missing_hull()?;
            if self.problem().is_some() || Instant::now() >= patience {
                return None;
            }
            match self.core.object.try_lease(sub_blocks.clone()) {
                Ok(true) => {
                    // Another process may have written it, and ended its lease, since it was looked for.
                    parts.read(&self.core.object);
                    return Some(Arc::new(Lease { core: self.core.clone(), sub_blocks }));
                }
                Ok(false) => {
                    let _ = tokio::time::timeout(wait, released).await;
                    wait = (wait * 2).min(LONGEST_WAIT);
                }
                Err(error) => {
                    self.core.fail("cannot lock", error);
                    return None;
                }
            }
        }
    }

    /// Waits for memory in which bytes can wait to be written; `None` if that takes too long. What waits takes half of what
    /// requests have, so that these go on also when the disk, or another process with a lock, does not.
    async fn room(&self, bytes: u64, patience: Instant, buffers: &Buffers) -> Option<Room> {
        let waiting_bytes = &self.core.waiting_bytes;
        let in_time = async {
            loop {
                let written = self.core.written.notified();
                // Relaxed: a number; it grows in this thread only.
                let waiting = waiting_bytes.load(Ordering::Relaxed);
                if waiting == 0 || waiting + bytes <= buffers.waiting_bytes() {
                    break;
                }
                written.await;
            }
            waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
            let mut room = Room { core: self.core.clone(), bytes, memory: None };
            room.memory = Some(buffers.take(bytes).await);
            room
        };
        tokio::time::timeout_at(patience.into(), in_time).await.ok()
    }

    fn write_later(
        &self,
        sub_blocks: Range<u64>,
        body: Body,
        lease: Arc<Lease>,
        room: Option<Room>,
    ) {
        let Some(room) = room else { return };
        if let Some(jobs) = &*self.jobs.lock().unwrap_or_else(PoisonError::into_inner) {
            // Without a receiver the thread has panicked.
            let _ = jobs.send(Work::Write(Job { sub_blocks, body, lease, _room: room }));
        }
    }
}

impl Drop for OpenTier {
    /// Writes what was downloaded.
    fn drop(&mut self) {
        let lock = |error: PoisonError<_>| error.into_inner();
        drop(self.jobs.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(writer) = self.writer.get_mut().unwrap_or_else(lock).take() {
            writer.join();
        }
    }
}

impl Core {
    fn fail(&self, what: &'static str, error: io::Error) {
        let _ = self.problem.set(TierError::system(self.directory.path(), what, error));
    }

    /// Writes a download, in the tier's thread.
    fn write(&self, job: &Job) {
        if self.problem.get().is_some() {
            return;
        }
        debug_assert!(job.lease.sub_blocks.start <= job.sub_blocks.start);
        let written = match self.try_write(job) {
            // Its disk is smaller than the budget, or others have filled it.
            Err(error) if error.is_full() => self.give_way(job).and_then(|()| self.try_write(job)),
            written => written,
        };
        if let Err(error) = written {
            let _ = self.problem.set(error);
        }
    }

    fn give_way(&self, job: &Job) -> Result<(), TierError> {
        let bytes = (job.sub_blocks.end - job.sub_blocks.start) * SUB_BLOCK_BYTES;
        evict::give_way(&self.directory, &self.control, bytes + BLOCK_BYTES)
    }

    fn try_write(&self, job: &Job) -> Result<(), TierError> {
        let geometry = self.object.geometry;
        let failed = |error| TierError::system(self.directory.path(), "cannot write", error);
        if self.object.is_removed().map_err(failed)? {
            let error = io::ErrorKind::NotFound.into();
            let what = "a file was removed while in use; open the device again";
            return Err(TierError::system(self.directory.path(), what, error));
        }
        let all = geometry.bytes_of(job.sub_blocks.clone());
        let all_bytes = all.end - all.start;
        if !evict::reserve(&self.directory, &self.control, all_bytes)? {
            // All that is there is leased, or the budget is smaller than this.
            return Ok(());
        }
        let before = self.object.allocated_bytes().map_err(failed)?;
        let mut at = job.sub_blocks.start;
        let mut bytes = Vec::with_capacity(WRITE_BYTES);
        while at < job.sub_blocks.end {
            let end = (at + WRITE_BYTES as u64 / SUB_BLOCK_BYTES).min(job.sub_blocks.end);
            let part = geometry.bytes_of(at..end);
            bytes.clear();
            let skip = (part.start - all.start) as usize;
            for (_, piece) in job.body.parts(skip, (part.end - part.start) as usize) {
                bytes.extend_from_slice(piece);
            }
            self.object.write(at..end, &bytes).map_err(failed)?;
            at = end;
        }
        let is_new = before <= size_of::<Header>() as u64;
        let before = if is_new { 0 } else { before };
        let grown = self.object.allocated_bytes().map_err(failed)?.saturating_sub(before);
        match grown.saturating_sub(all_bytes) {
            0 => Ok(()),
            more => evict::note(&self.control, more),
        }
    }
}

/// The sub-blocks of a range, as far as they have been brought.
struct Parts {
    sub_blocks: Range<u64>,
    /// One for each; a body of several is with its first, and the others are empty.
    brought: Vec<Option<Body>>,
}

impl Parts {
    fn new(sub_blocks: Range<u64>) -> Parts {
        let count = (sub_blocks.end - sub_blocks.start) as usize;
        Parts { sub_blocks, brought: (0..count).map(|_| None).collect() }
    }

    fn index(&self, sub_block: u64) -> usize {
        (sub_block - self.sub_blocks.start) as usize
    }

    fn put(&mut self, run: Range<u64>, body: Body) {
        let (first, end) = (self.index(run.start), self.index(run.end));
        self.brought[first..end].fill_with(|| Some(Body::default()));
        self.brought[first] = Some(body);
    }

    /// Reads what is missing here and there in the file.
    fn read(&mut self, object: &ObjectFile) {
        for run in self.missing_runs() {
            let mut is_present = object.present(run.clone()).into_iter();
            let present = run.filter(|_| is_present.next() == Some(true));
            for run in runs(present, READ_SUB_BLOCKS) {
                if !self.read_run(object, run.clone()) && run.end - run.start > 1 {
                    for sub_block in run {
                        self.read_run(object, sub_block..sub_block + 1);
                    }
                }
            }
        }
    }

    fn read_run(&mut self, object: &ObjectFile, run: Range<u64>) -> bool {
        let range = object.geometry.bytes_of(run.clone());
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let is_right = object.read(range.start, &mut bytes);
        if is_right {
            self.put(run, Body::of(bytes));
        }
        is_right
    }

    fn missing(&self) -> impl Iterator<Item = u64> {
        self.sub_blocks.clone().filter(|&sub_block| self.brought[self.index(sub_block)].is_none())
    }

    fn missing_runs(&self) -> Vec<Range<u64>> {
        runs(self.missing(), u64::MAX)
    }

    /// From the first missing one to the last.
    fn missing_hull(&self) -> Option<Range<u64>> {
        let first = self.missing().next()?;
        Some(first..self.missing().last()? + 1)
    }

    fn into_body(self, skip: usize) -> Body {
        Body::joined(self.brought.into_iter().flatten(), skip)
    }
}

/// Joins numbers that follow each other, at most so many.
fn runs(numbers: impl Iterator<Item = u64>, most: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = vec![];
    for number in numbers {
        match runs.last_mut() {
            Some(run) if run.end == number && run.end - run.start < most => run.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs
}
