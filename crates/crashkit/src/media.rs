//! The recording media: a memory file behind [`Media`], with a log of all operations.
//!
//! # One order
//! One lock orders everything: under it an operation makes its bytes visible and appends its event,
//! so the log's order is the order in which readers saw the bytes. Operations that take time on
//! real media (all but `write_at`) release the lock between their first and their last event, and
//! yield: operations of other threads, and marks, come in between. Lock order: `growing`, then
//! `log`. A thread that waits for a [`Gate`] holds no lock but `growing`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_pool::media::{ByteRange, Media, MediaError, MediaOperation, PersistenceDomain};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use crate::fault::{Door, Fault, Gate, Script, Trigger};
use crate::mark::Mark;
use crate::recording::{Event, Operation, Recording};
use crate::settle::Settling;

/// Maximum length of a medium: enumeration keeps whole images in memory.
const MAX_LEN_BYTES: u64 = 1 << 30;

/// An image is written to the file in pages of this size; zero pages are skipped.
const PAGE_BYTES: usize = 4096;

/// Media that record all operations, to enumerate what a crash would have left.
///
/// See the [module](super) for the model and an example. Only calls of [`Media`] methods are
/// recorded: stores to a shared mapping of [`Media::file`] are not. A clone is another handle to
/// the same media, so that a test can keep one while the code under test owns the other. Dropping
/// the last handle frees the memory.
#[derive(Debug, Clone)]
pub struct CrashMedia {
    shared: Arc<Shared>,
    unit_bytes: usize,
    writable: bool,
    writes_flush: bool,
}

/// The state that the handles share.
#[derive(Debug)]
struct Shared {
    path: PathBuf,
    file: File,
    domain: PersistenceDomain,
    initial: Arc<[u8]>,
    growing: Mutex<()>,
    log: Mutex<Log>,
}

#[derive(Debug, Default)]
struct Log {
    len_bytes: u64,
    operations: Vec<Operation>,
    events: Vec<Event>,
    script: Script,
    /// A flush of a durable write has failed: the system tells it once, and files remember it.
    has_lost: bool,
}

impl Log {
    fn begin(&mut self, kind: MediaOperation, ranges: &[ByteRange]) -> usize {
        self.operations.push(Operation { kind, ranges: ranges.into(), error: None });
        self.operations.len() - 1
    }

    fn fail(&mut self, op: usize, errno: i32) {
        self.operations[op].error = Some(errno);
        self.events.push(Event::Failed { op });
    }
}

/// The script's decision about an operation.
struct Fate {
    fault: Option<Fault>,
    door: Option<Arc<Door>>,
}

impl CrashMedia {
    /// Creates media of zeros, all durable.
    pub fn new(len_bytes: u64, domain: PersistenceDomain) -> io::Result<CrashMedia> {
        if len_bytes > MAX_LEN_BYTES {
            return Err(Errno::FBIG.into());
        }
        CrashMedia::from_image(&vec![0; len_bytes as usize], domain)
    }

    /// Creates media with these bytes, all durable: for instance a crash state, to record its
    /// recovery.
    pub fn from_image(image: &[u8], domain: PersistenceDomain) -> io::Result<CrashMedia> {
        if image.len() as u64 > MAX_LEN_BYTES {
            return Err(Errno::FBIG.into());
        }
        let file = File::from(rustix::fs::memfd_create("crash-media", MemfdFlags::CLOEXEC)?);
        file.set_len(image.len() as u64)?;
        write_sparsely(&file, image)?;
        let shared = Shared {
            path: PathBuf::from("crash-media"),
            file,
            domain,
            initial: image.into(),
            growing: Mutex::new(()),
            log: Mutex::new(Log { len_bytes: image.len() as u64, ..Log::default() }),
        };
        let unit_bytes = domain.atomic_bytes();
        let writes_flush = false;
        Ok(CrashMedia { shared: Arc::new(shared), unit_bytes, writable: true, writes_flush })
    }

    /// Changes the unit that a crash does not tear, a power of two of at least 8 bytes. A smaller
    /// one makes the model stricter than the contract: sectors are torn at 8 bytes, as by disks
    /// without a guarantee.
    pub fn with_unit_bytes(mut self, unit_bytes: usize) -> CrashMedia {
        assert!(unit_bytes >= 8 && unit_bytes.is_power_of_two(), "no unit: {unit_bytes} bytes");
        self.unit_bytes = unit_bytes;
        self
    }

    /// Makes a durable write also flush what was handed over before, as files through the page cache
    /// do: it is recorded as a write, the hand-over of its range, and a flush. If that flush fails, so
    /// does every [`Media::flush`] from then on.
    pub fn with_writes_that_flush(mut self, writes_flush: bool) -> CrashMedia {
        self.writes_flush = writes_flush;
        self
    }

    /// Returns a handle through which every write fails with EROFS.
    pub fn read_only(mut self) -> CrashMedia {
        self.writable = false;
        self
    }

    /// Sets a mark.
    pub fn mark(&self, mark: Mark) {
        self.log().events.push(Event::Mark(mark));
    }

    /// [`Mark::Begun`]: call it before transaction `id` touches the media.
    pub fn begin(&self, id: u64) {
        self.mark(Mark::Begun(id));
    }

    /// [`Mark::Acknowledged`]: call it when transaction `id` has been reported as durable.
    pub fn acknowledge(&self, id: u64) {
        self.mark(Mark::Acknowledged(id));
    }

    /// [`Mark::Withdrawn`]: call it when a recovery has shown a state without transaction `id`.
    pub fn withdraw(&self, id: u64) {
        self.mark(Mark::Withdrawn(id));
    }

    /// Makes operations fail from now on.
    pub fn fail(&self, fault: Fault) {
        self.log().script.fail(fault);
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        self.log().script.clear();
    }

    /// Holds an operation in its middle until the gate is opened. Reads and plain writes cannot be
    /// held.
    pub fn hold(&self, trigger: Trigger) -> Gate {
        self.log().script.hold(trigger)
    }

    /// Returns what has happened so far.
    pub fn recording(&self) -> Recording {
        self.recording_of(&self.log())
    }

    /// Returns the bytes as readers see them.
    pub fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.log().len_bytes as usize];
        match self.shared.file.read_exact_at(&mut image, 0) {
            Ok(()) => image,
            Err(error) => panic!("a memory file must be readable: {error}"),
        }
    }

    fn recording_of(&self, log: &Log) -> Recording {
        Recording {
            domain: self.shared.domain,
            unit_bytes: self.unit_bytes,
            initial: Arc::clone(&self.shared.initial),
            operations: log.operations.clone(),
            events: log.events.clone(),
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.shared.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, operation: MediaOperation, range: ByteRange, source: io::Error) -> MediaError {
        MediaError {
            operation,
            path: self.shared.path.clone(),
            offset_bytes: range.offset_bytes,
            len_bytes: range.len_bytes,
            source,
        }
    }

    fn scripted(&self, operation: MediaOperation, range: ByteRange, errno: i32) -> MediaError {
        self.error(operation, range, io::Error::from_raw_os_error(errno))
    }

    /// Refuses ranges outside the media, and writes to read-only media.
    fn check(
        &self,
        log: &Log,
        operation: MediaOperation,
        ranges: &[ByteRange],
    ) -> Result<(), MediaError> {
        for &range in ranges {
            let end = range.offset_bytes.checked_add(range.len_bytes);
            if end.is_none_or(|end| end > log.len_bytes) {
                return Err(self.error(operation, range, io::ErrorKind::UnexpectedEof.into()));
            }
        }
        if operation != MediaOperation::Read && !self.writable {
            return Err(self.error(operation, hull(ranges), Errno::ROFS.into()));
        }
        Ok(())
    }

    /// A flush, as if nothing had been lost.
    fn flush_all(&self) -> Result<(), MediaError> {
        let mut log = self.log();
        self.check(&log, MediaOperation::Flush, &[])?;
        let fate = fate(&mut log, MediaOperation::Flush, &[]);
        let op = log.begin(MediaOperation::Flush, &[]);
        log.events.push(Event::FlushBegin { op });
        let mut log = self.middle(log, &fate);
        match &fate.fault {
            None => {
                log.events.push(Event::Flushed { op });
                Ok(())
            }
            Some(fault) => Err(self.end_failed(&mut log, op, fault)),
        }
    }

    /// The middle of an operation: no lock is held, so other threads make progress.
    fn middle<'m>(&'m self, log: MutexGuard<'m, Log>, fate: &Fate) -> MutexGuard<'m, Log> {
        drop(log);
        match &fate.door {
            Some(door) => door.pass(),
            None => std::thread::yield_now(),
        }
        self.log()
    }

    fn write(
        &self,
        kind: MediaOperation,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        let mut log = self.log();
        self.check(&log, kind, &[range])?;
        let fate = fate(&mut log, kind, &[range]);
        let left = fate.fault.as_ref().map_or(bytes.len(), |fault| fault.left_of(bytes.len()));
        let left = &bytes[..left];
        self.shared
            .file
            .write_all_at(left, offset_bytes)
            .map_err(|error| self.error(kind, range, error))?;
        let op = log.begin(kind, &[range]);
        log.events.push(Event::Write { op, offset_bytes, bytes: left.into() });
        let durable = kind == MediaOperation::WriteDurable || !self.needs_flushing();
        if durable {
            log = self.middle(log, &fate);
        }
        match fate.fault {
            None => {
                if durable {
                    log.events.push(Event::Persisted { op });
                }
                Ok(())
            }
            Some(fault) => {
                if fault.reaches_media {
                    log.events.push(Event::Persisted { op });
                }
                log.fail(op, fault.errno);
                Err(self.scripted(kind, range, fault.errno))
            }
        }
    }

    /// Returns whether a plain write can be lost.
    fn needs_flushing(&self) -> bool {
        self.shared.domain != PersistenceDomain::Volatile
    }

    /// Ends a `write_back` or `flush` with an error.
    fn end_failed(&self, log: &mut Log, op: usize, fault: &Fault) -> MediaError {
        let operation = &log.operations[op];
        let (kind, range) = (operation.kind, hull(&operation.ranges));
        if !fault.forgets {
            log.fail(op, fault.errno);
            return self.scripted(kind, range, fault.errno);
        }
        let recording = self.recording_of(log);
        let settled = Settling::at_the_end(&recording);
        let ranges = settled.forgettable(op);
        for range in &ranges {
            let bytes = &settled.durable[range.offset_bytes as usize..range.end_bytes() as usize];
            if let Err(error) = self.shared.file.write_all_at(bytes, range.offset_bytes) {
                return self.error(kind, *range, error);
            }
        }
        log.fail(op, fault.errno);
        log.events.push(Event::Forgotten { op, ranges: ranges.into() });
        self.scripted(kind, range, fault.errno)
    }
}

#[allow(unsafe_code)] // `Media` declares its writes unsafe; these record bytes, and no memory is mapped from them.
impl Media for CrashMedia {
    fn path(&self) -> &Path {
        &self.shared.path
    }

    fn len_bytes(&self) -> u64 {
        self.log().len_bytes
    }

    fn domain(&self) -> PersistenceDomain {
        self.shared.domain
    }

    fn is_writable(&self) -> bool {
        self.writable
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        let mut log = self.log();
        self.check(&log, MediaOperation::Read, &[range])?;
        if let Some(fault) = log.script.fault(MediaOperation::Read, &[range]) {
            return Err(self.scripted(MediaOperation::Read, range, fault.errno));
        }
        drop(log);
        let read = self.shared.file.read_exact_at(bytes, offset_bytes);
        read.map_err(|error| self.error(MediaOperation::Read, range, error))
    }

    unsafe fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.write(MediaOperation::Write, offset_bytes, bytes)
    }

    unsafe fn write_durable(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        if self.writes_flush {
            self.write(MediaOperation::Write, offset_bytes, bytes)?;
            self.write_back(&[ByteRange { offset_bytes, len_bytes: bytes.len() as u64 }])?;
            return self.flush_all().inspect_err(|_| self.log().has_lost = true);
        }
        self.write(MediaOperation::WriteDurable, offset_bytes, bytes)
    }

    fn check_kept(&self) -> Result<(), MediaError> {
        if self.log().has_lost {
            return Err(self.error(MediaOperation::Flush, hull(&[]), Errno::IO.into()));
        }
        Ok(())
    }

    fn durable_writes_flush(&self) -> bool {
        self.writes_flush
    }

    fn write_back(&self, ranges: &[ByteRange]) -> Result<(), MediaError> {
        let mut log = self.log();
        self.check(&log, MediaOperation::WriteBack, ranges)?;
        let fate = fate(&mut log, MediaOperation::WriteBack, ranges);
        let op = log.begin(MediaOperation::WriteBack, ranges);
        log.events.push(Event::HandOver { op });
        let mut log = self.middle(log, &fate);
        match &fate.fault {
            None => {
                log.events.push(Event::HandedOver { op });
                Ok(())
            }
            Some(fault) => Err(self.end_failed(&mut log, op, fault)),
        }
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.check_kept()?;
        self.flush_all()
    }

    fn grow(&self, len_bytes: u64) -> Result<(), MediaError> {
        let _one_at_a_time = self.shared.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = MediaOperation::Resize;
        let mut log = self.log();
        let offset_bytes = log.len_bytes;
        let Some(added_bytes) = len_bytes.checked_sub(offset_bytes) else {
            let shorter = ByteRange { offset_bytes: len_bytes, len_bytes: 0 };
            return Err(self.error(kind, shorter, io::ErrorKind::InvalidInput.into()));
        };
        let range = ByteRange { offset_bytes, len_bytes: added_bytes };
        if !self.writable {
            return Err(self.error(kind, range, Errno::ROFS.into()));
        }
        if len_bytes > MAX_LEN_BYTES {
            return Err(self.error(kind, range, Errno::FBIG.into()));
        }
        let fate = fate(&mut log, kind, &[range]);
        let op = log.begin(kind, &[range]);
        log.events.push(Event::GrowBegin { op });
        let mut log = self.middle(log, &fate);
        if let Some(fault) = &fate.fault {
            log.fail(op, fault.errno);
            return Err(self.scripted(kind, range, fault.errno));
        }
        if let Err(error) = self.shared.file.set_len(len_bytes) {
            log.fail(op, error.raw_os_error().unwrap_or_default());
            return Err(self.error(kind, range, error));
        }
        log.len_bytes = len_bytes;
        log.events.push(Event::Grown { op });
        Ok(())
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.shared.file.as_fd()
    }

    fn maps_privately(&self) -> bool {
        true
    }
}

/// Returns the script's decision about an operation that begins now.
fn fate(log: &mut Log, kind: MediaOperation, ranges: &[ByteRange]) -> Fate {
    Fate { fault: log.script.fault(kind, ranges), door: log.script.door(kind, ranges) }
}

/// Returns the smallest range that contains all of these, for messages.
fn hull(ranges: &[ByteRange]) -> ByteRange {
    let start = ranges.iter().map(|range| range.offset_bytes).min().unwrap_or_default();
    let end = ranges.iter().map(|range| range.end_bytes()).max().unwrap_or_default();
    ByteRange { offset_bytes: start, len_bytes: end - start }
}

/// Writes an image to a file that is all zeros.
fn write_sparsely(file: &File, image: &[u8]) -> io::Result<()> {
    let is_zero = |page: &[u8]| *page == [0; PAGE_BYTES][..page.len()];
    let mut start = 0;
    while start < image.len() {
        let page_end = |from: usize| (from + PAGE_BYTES).min(image.len());
        let mut end = start;
        while end < image.len() && !is_zero(&image[end..page_end(end)]) {
            end = page_end(end);
        }
        file.write_all_at(&image[start..end], start as u64)?;
        start = page_end(end); // after the run there is a page of zeros, or the end
    }
    Ok(())
}
