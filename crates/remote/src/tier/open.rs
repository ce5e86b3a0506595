//! A tier as one device of one process uses it: reads from any thread, downloads through leases, and two threads: one that
//! writes what was downloaded, and one that reads for downloads, so that a slow disk does not hold up the thread of the
//! requests.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use aquifer_sys::thread::{self, Thread};
use futures_util::future::try_join_all;
use tokio::sync::{Notify, OwnedSemaphorePermit, oneshot};

use super::directory::{ControlFile, Directory};
use super::evict;
use super::layout::{BLOCK_BYTES, Header, SUB_BLOCK_BYTES};
use super::object::ObjectFile;
use super::{Tier, TierError};
use crate::body::Body;
use crate::buffers::Buffers;

/// How often a lease of another process is tried again, at first and at last.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(16);
/// Most time that a download waits for memory that other requests have.
const MEMORY_PATIENCE: Duration = Duration::from_millis(100);
/// Most bytes copied together for one write.
const WRITE_BYTES: usize = 1 << 20;
/// After so many bytes the disk is asked to write them: memory that is full of bytes to be written holds up readers.
const WRITE_BACK_BYTES: u64 = 8 << 20;
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
    /// The last download did not fit into the budget, or into what of it is not leased.
    has_no_room: AtomicBool,
    /// The disk has made no room in time: it is not waited for again until all that waits is written.
    is_slow: AtomicBool,
    /// Bytes that wait to be written, and that some were.
    waiting_bytes: AtomicU64,
    written: Notify,
}

/// An object's version in a tier, open for a device.
pub(crate) struct OpenTier {
    core: Arc<Core>,
    jobs: Mutex<Option<Sender<Work>>>,
    reads: Mutex<Option<Sender<Reading>>>,
    threads: Mutex<Vec<Thread>>,
}

/// Runs of sub-blocks with their bytes.
type Found = Vec<(Range<u64>, Body)>;

/// Runs to be read as far as they are there.
struct Reading {
    runs: Vec<Range<u64>>,
    found: oneshot::Sender<Found>,
}

/// How [`OpenTier::obtain`] goes about it.
pub(crate) struct Terms {
    /// Most time for waiting for others and for the disk.
    pub patience: Duration,
    /// Most time for waiting until what was downloaded can wait to be written; after that it is not written.
    pub room_patience: Duration,
    /// Gaps up to this length, which are there, are downloaded along rather than requested around.
    pub gap_bytes: u64,
    pub tally: Option<Arc<Tally>>,
}

/// What becomes of downloads.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Bytes that were not there.
    pub missing_bytes: AtomicU64,
    /// Bytes that were requested, with gaps.
    pub downloaded_bytes: AtomicU64,
    /// Bytes that were written.
    pub stored_bytes: AtomicU64,
}

/// From [`OpenTier::obtain`].
pub(crate) struct Obtained {
    pub body: Body,
    /// It is in the tier, or about to be.
    pub is_kept: bool,
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
    tally: Option<Arc<Tally>>,
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
    /// Opens the version's file, and starts its threads.
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
            has_no_room: AtomicBool::new(false),
            is_slow: AtomicBool::new(false),
            waiting_bytes: AtomicU64::new(0),
            written: Notify::new(),
        });
        let (sender, jobs) = mpsc::channel::<Work>();
        let writing = core.clone();
        let writer = thread::start(c"aquifer-tier", move || {
            // Sub-blocks.
            let mut unwritten = 0;
            for work in jobs {
                match work {
                    Work::Write(job) => {
                        writing.write(&job);
                        unwritten += job.sub_blocks.end - job.sub_blocks.start;
                        if unwritten * SUB_BLOCK_BYTES >= WRITE_BACK_BYTES {
                            unwritten = 0;
                            writing.object.start_write_back();
                        }
                    }
                    // Without a receiver the caller has given up.
                    Work::Say(done) => drop(done.send(())),
                }
            }
        });
        let failed = |error| TierError::system(tier.path(), "cannot start a thread", error);
        let writer = writer.map_err(failed)?;
        let (read_sender, reads) = mpsc::channel::<Reading>();
        let reading = core.clone();
        let reader = thread::start(c"aquifer-tier-r", move || {
            for Reading { runs, found } in reads {
                // The request may have been given up.
                if !found.is_closed() {
                    let _ = found.send(read_runs(&reading.object, runs));
                }
            }
        });
        let (jobs, reads) = (Mutex::new(Some(sender)), Mutex::new(Some(read_sender)));
        // If this fails, the writer ends with its sender.
        let threads = Mutex::new(vec![writer, reader.map_err(failed)?]);
        Ok(OpenTier { core, jobs, reads, threads })
    }

    /// See [`ObjectFile::read`]. Async-signal-safe.
    pub fn read(&self, start: u64, to: &mut [u8]) -> bool {
        self.core.object.read(start, to)
    }

    /// See [`ObjectFile::has`].
    pub fn has(&self, range: Range<u64>) -> bool {
        self.core.object.has(range)
    }

    /// See [`ObjectFile::is_in_file`].
    pub fn is_in_file(&self, range: Range<u64>) -> bool {
        self.core.object.is_in_file(range)
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
    /// What the disk takes too long to read is downloaded, and what it has not written in time is not written.
    pub async fn obtain<F, E>(
        &self,
        range: Range<u64>,
        terms: &Terms,
        buffers: &Buffers,
        fetch: impl Fn(Range<u64>) -> F,
    ) -> Result<Obtained, E>
    where
        F: Future<Output = Result<Body, E>>,
    {
        let geometry = self.core.object.geometry;
        let len_bytes = |run: &Range<u64>| {
            let bytes = geometry.bytes_of(run.clone());
            bytes.end - bytes.start
        };
        let mut parts = Parts::new(geometry.touched(range.clone()));
        let lease = self.lease(&mut parts, Instant::now() + terms.patience).await;
        let mut is_kept = true;
        let groups = near_runs(parts.missing_runs(), terms.gap_bytes / SUB_BLOCK_BYTES);
        let wanted = groups.iter().map(|group| group[0].start..group[group.len() - 1].end);
        let wanted: Vec<Range<u64>> = wanted.collect();
        let fetched = try_join_all(wanted.iter().map(|run| fetch(geometry.bytes_of(run.clone()))));
        let fetched = fetched.await?;
        if let Some(tally) = &terms.tally {
            // Relaxed: counters, read when all is done.
            let bytes = |runs: &[Range<u64>]| runs.iter().map(len_bytes).sum::<u64>();
            tally.downloaded_bytes.fetch_add(bytes(&wanted), Ordering::Relaxed);
            tally.missing_bytes.fetch_add(bytes(&groups.concat()), Ordering::Relaxed);
        }
        let room_until = Instant::now() + terms.room_patience;
        for ((group, whole), body) in groups.into_iter().zip(wanted).zip(fetched) {
            for run in group {
                let mut room = None;
                if lease.is_some() && self.problem().is_none() {
                    room = self.room(len_bytes(&run), room_until, buffers).await;
                }
                let (Some(lease), Some(room)) = (&lease, room) else {
                    is_kept = false;
                    continue;
                };
                let body = body.after(((run.start - whole.start) * SUB_BLOCK_BYTES) as usize);
                self.write_later(Job {
                    sub_blocks: run,
                    body,
                    tally: terms.tally.clone(),
                    lease: lease.clone(),
                    _room: room,
                });
            }
            // A gap's bytes are replaced by the same.
            parts.put(whole, body);
        }
        // Relaxed: a hint. What is under way now may still find room.
        is_kept &= !self.core.has_no_room.load(Ordering::Relaxed);
        let skip = range.start - geometry.bytes_of(parts.sub_blocks.clone()).start;
        Ok(Obtained { body: parts.into_body(skip as usize), is_kept })
    }

    /// Reads what is missing here and there in the file, if the disk is in time.
    async fn read_missing(&self, parts: &mut Parts, patience: Instant) {
        let (sender, found) = oneshot::channel();
        let reading = Reading { runs: parts.missing_runs(), found: sender };
        if let Some(reads) = &*self.reads.lock().unwrap_or_else(PoisonError::into_inner) {
            // Without a receiver the thread has panicked, and nothing is found.
            let _ = reads.send(reading);
        }
        if let Ok(Ok(found)) = tokio::time::timeout_at(patience.into(), found).await {
            found.into_iter().for_each(|(run, body)| parts.put(run, body));
        }
    }

    /// Leases what is missing, or waits until it is there. Without a lease, what is missing is not to be written.
    async fn lease(&self, parts: &mut Parts, patience: Instant) -> Option<Arc<Lease>> {
        let mut wait = SHORTEST_WAIT;
        loop {
            let released = self.core.released.notified();
            self.read_missing(parts, patience).await;
            let sub_blocks = parts.missing_hull()?;
            if self.problem().is_some() || Instant::now() >= patience {
                return None;
            }
            match self.core.object.try_lease(sub_blocks.clone()) {
                Ok(true) => {
                    // Another process may have written it, and ended its lease, since it was looked for.
                    self.read_missing(parts, patience).await;
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

    /// Takes memory in which bytes can wait to be written; `None` if the disk makes none free in time. What waits takes half
    /// of what requests have, so that these go on also when the disk, or another process with a lock, does not.
    async fn room(&self, bytes: u64, until: Instant, buffers: &Buffers) -> Option<Room> {
        let waiting_bytes = &self.core.waiting_bytes;
        let fits = async {
            loop {
                let written = self.core.written.notified();
                // Relaxed: a number; it grows in this thread only.
                let waiting = waiting_bytes.load(Ordering::Relaxed);
                if waiting == 0 {
                    self.core.is_slow.store(false, Ordering::Relaxed);
                }
                if waiting == 0 || waiting + bytes <= buffers.waiting_bytes() {
                    break;
                }
                written.await;
            }
        };
        let is_slow = self.core.is_slow.load(Ordering::Relaxed);
        let until = if is_slow { Instant::now() } else { until };
        // What fits at once is taken also if the time is over.
        if tokio::time::timeout_at(until.into(), fits).await.is_err() {
            self.core.is_slow.store(true, Ordering::Relaxed);
            return None;
        }
        waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut room = Room { core: self.core.clone(), bytes, memory: None };
        // Not for the disk but for other requests, which go on.
        let memory = tokio::time::timeout(MEMORY_PATIENCE, buffers.take(bytes)).await;
        room.memory = Some(memory.ok()?);
        Some(room)
    }

    fn write_later(&self, job: Job) {
        if let Some(jobs) = &*self.jobs.lock().unwrap_or_else(PoisonError::into_inner) {
            // Without a receiver the thread has panicked.
            let _ = jobs.send(Work::Write(job));
        }
    }
}

impl Drop for OpenTier {
    /// Writes what was downloaded.
    fn drop(&mut self) {
        // Their threads end with them.
        drop(self.jobs.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        drop(self.reads.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        threads.drain(..).for_each(Thread::join);
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
            self.has_no_room.store(true, Ordering::Relaxed);
            return Ok(());
        }
        self.has_no_room.store(false, Ordering::Relaxed);
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
        if let Some(tally) = &job.tally {
            tally.stored_bytes.fetch_add(all_bytes, Ordering::Relaxed);
        }
        // What other processes wrote to the file meanwhile is in this too, and so counts twice until the next eviction counts
        // all anew: it only comes a little earlier.
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

/// Reads of the runs what is there.
fn read_runs(object: &ObjectFile, wanted: Vec<Range<u64>>) -> Found {
    let mut found = vec![];
    for run in wanted {
        let mut is_present = object.present(run.clone()).into_iter();
        let present = run.filter(|_| is_present.next() == Some(true));
        for run in runs(present, READ_SUB_BLOCKS) {
            if !read_run(object, run.clone(), &mut found) && run.end - run.start > 1 {
                for sub_block in run {
                    read_run(object, sub_block..sub_block + 1, &mut found);
                }
            }
        }
    }
    found
}

fn read_run(object: &ObjectFile, run: Range<u64>, found: &mut Found) -> bool {
    let range = object.geometry.bytes_of(run.clone());
    let mut bytes = vec![0; (range.end - range.start) as usize];
    let is_right = object.read(range.start, &mut bytes);
    if is_right {
        found.push((run, Body::of(bytes)));
    }
    is_right
}

/// Groups runs that are at most so many sub-blocks apart.
fn near_runs(runs: Vec<Range<u64>>, gap: u64) -> Vec<Vec<Range<u64>>> {
    let mut groups: Vec<Vec<Range<u64>>> = vec![];
    for run in runs {
        match groups.last_mut() {
            Some(group) if run.start - group[group.len() - 1].end <= gap => group.push(run),
            _ => groups.push(vec![run]),
        }
    }
    groups
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

#[cfg(test)]
mod tests {
    use super::*;

    /// As one that is stuck in a read would be: what it does not bring in time is downloaded.
    #[test]
    fn the_disk_is_read_in_a_thread_that_is_not_waited_for_without_end() {
        const LEN: u64 = 100_000;
        let directory = tempfile::tempdir().unwrap();
        let tier = Tier::open(directory.path().join("tier")).unwrap();
        tier.set_budget_bytes(10 << 20).unwrap();
        let open = OpenTier::open(&tier, "s3://bucket/one", "\"1\"", LEN).unwrap();
        let (buffers, fetched) = (Buffers::new(8 << 20), AtomicU64::new(0));
        let fetch = async |range: Range<u64>| {
            let bytes = range.end - range.start;
            fetched.fetch_add(bytes, Ordering::Relaxed);
            Ok::<_, ()>(Body::of(vec![7; bytes as usize]))
        };
        let obtain = |patience| {
            let room_patience = Duration::ZERO;
            let terms = Terms { patience, room_patience, gap_bytes: 0, tally: None };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
            runtime.unwrap().block_on(async {
                let obtained = open.obtain(0..LEN, &terms, &buffers, fetch);
                let obtained = tokio::time::timeout(Duration::from_secs(60), obtained).await;
                drop(obtained.expect("waited in vain").unwrap());
            });
            open.flush();
            fetched.swap(0, Ordering::Relaxed)
        };
        let long = Duration::from_secs(60);
        assert_eq!((obtain(long), obtain(long)), (LEN, 0));
        let (stuck, _reads) = mpsc::channel();
        let reads = open.reads.lock().unwrap().replace(stuck);
        assert_eq!(obtain(Duration::from_millis(10)), LEN);
        *open.reads.lock().unwrap() = reads;
        assert_eq!(obtain(long), 0);
    }
}
