//! Files that are read once: read or mapped, whichever costs less.
//!
//! Reading copies every byte; mapping costs faults and an unmap. With a warm buffer, reading wins
//! up to a few hundred KiB; with a fresh one it loses by 3 to 5 times, so each thread keeps its
//! buffer.
//!
//! ```text
//!  open ─ read 32 KiB ─┬─ end of file reached ─▶ buffer            (one read if all of it is cached)
//!                      └─ statx ─┬─ a regular file below the threshold ─▶ read the rest ─▶ buffer
//!                                ├─ a regular file above it ─▶ map
//!                                └─ length unknown ─▶ read to the end of the file ─▶ buffer
//! ```
//! Most files are short, and `statx` costs three times as much as a read at the end of the file. If
//! the thread's previous file was longer than 32 KiB, the next one probably is, too: then `statx`
//! comes first, and the file is read at once, or mapped.
//!
//! The end is detected by a read of 0 bytes, not by a short read: pipes and generated files arrive in
//! pieces. Only the first read can do without, because it asks for what is cached (`RWF_NOWAIT`).
//! Where that is possible a file consists of pages of the page cache, and a read that does not end
//! where a page ends has met the end of the file (or, on a DAX device, broken memory, which a load
//! from a mapping would report). Pipes and generated files refuse it, as do some
//! file systems: then it is not tried again for a while.
//!
//! # The threshold
//! 256 KiB at first. Measured for files in memory and for those on storage ([`calibrate`]), when
//! files of at least 128 KiB with 256 MiB in all have passed, so that a program that reads less does
//! not pay for it: measuring takes 1 to 2 ms. Lengths up to 1 MiB are measured; if the file is
//! shorter, those above it on a later file. After measuring took too long three times, the threshold
//! stays 256 KiB. The threshold of a device is looked up by its number, without a lock. Files on
//! hugetlbfs are read.
//!
//! ```
//! use aquifer_mapper::{Mapper, read_once};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("numbers");
//! # std::fs::write(&path, vec![7; 4 << 20])?;
//! let mapper = Mapper::builder().build()?;
//! let sum = mapper.read_once(&path, |bytes| {
//!     let mut sum = 0;
//!     bytes.for_each_block(|block| sum += block.iter().map(|byte| u64::from(*byte)).sum::<u64>());
//!     sum
//! })?;
//! assert_eq!(sum, 7 * (4 << 20));
//! for found in read_once::calibrations() {
//!     println!("in memory: {}; mapped from {} bytes on", found.in_memory, found.threshold_bytes);
//! }
//! # Ok(())
//! # }
//! ```

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_sys::memory::{self, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{self, Backing, FileStatus};
use aquifer_sys::{fallible, io as file_io};

use super::by_device::ByDevice;
use super::error::{MapError, Result};
use super::page_buffer::PageBuffer;
use aquifer_vm::PerProcess;
use aquifer_vm::bytes::Bytes;

/// Bytes that are read before the file's status is queried. Nine of ten source files are shorter.
const FIRST_BYTES: usize = 32 << 10;
/// Files read in the usual way after one that refused to be read from the page cache only: the
/// others are probably on the same file system.
const UNASKED_AFTER_REFUSAL: u32 = 256;
/// The threshold without a measurement.
const USUAL_THRESHOLD_BYTES: u32 = 256 << 10;
/// Bounds of the threshold.
const LEAST_THRESHOLD_BYTES: u64 = 128 << 10;
const MOST_THRESHOLD_BYTES: u64 = 2 << 20;
/// Most bytes that are read from a file of unknown length.
const UNKNOWN_LENGTH_BYTES: usize = 1 << 30;
/// The smallest file that is used for measuring.
const SMALLEST_MEASURED_BYTES: u64 = 256 << 10;
/// The longest part of it that is mapped and read to measure.
const MOST_MEASURED_BYTES: u64 = 1 << 20;
/// Bytes that pass in files that could be mapped before the first measurement.
const PASSED_BEFORE_BYTES: u64 = 256 << 20;
/// Time limit of a measurement, without the first read of the file.
const TIME_LIMIT: Duration = Duration::from_millis(8);
const ROUNDS: usize = 3;
/// How many measurements may fail.
const ATTEMPTS: u32 = 3;
/// The threshold where files are never mapped.
const NEVER: u32 = u32::MAX;
/// Bit in a threshold that is provisional until all lengths were measured.
const FOR_NOW: u32 = 1;

thread_local! {
    /// Taken while in use, so that a nested call gets another buffer.
    static BUFFER: Cell<PageBuffer> = const { Cell::new(PageBuffer::new()) };
    /// How many files are read in the usual way before the page cache is asked again: 0 unless it
    /// has refused.
    static UNASKED_FILES: Cell<u32> = const { Cell::new(0) };
    /// Whether the previous file was longer than [`FIRST_BYTES`].
    static EXPECTS_LONG: Cell<bool> = const { Cell::new(false) };
}

/// The measured costs of reading and mapping on one kind of file system.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadOnceCalibration {
    /// Whether the file system is in memory (tmpfs).
    pub in_memory: bool,
    /// Files of this length and longer are mapped.
    pub threshold_bytes: u64,
    /// Length, and the nanoseconds that reading and accessing it took, and mapping and accessing
    /// it: the least of several times each.
    pub measured: Vec<(u64, u64, u64)>,
}

/// What a process has measured.
#[derive(Default)]
struct Measurements {
    done: Mutex<Vec<ReadOnceCalibration>>,
    /// Whether a thread is measuring; other threads do not wait.
    is_under_way: AtomicBool,
}

/// A child measures anew: a thread of the parent may have held the lock, or been measuring, at the fork.
static MEASUREMENTS: PerProcess<Measurements> = PerProcess::new();
static FAILED_ATTEMPTS: AtomicU32 = AtomicU32::new(0);
/// Bytes of files that could be mapped, by a threshold that is provisional, since the last
/// measurement.
static PASSED_BYTES: AtomicU64 = AtomicU64::new(0);
/// The threshold of each device.
static BY_DEVICE: ByDevice = ByDevice::new();

fn done() -> MutexGuard<'static, Vec<ReadOnceCalibration>> {
    MEASUREMENTS.get().done.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the calibrations of this process so far.
pub fn calibrations() -> Vec<ReadOnceCalibration> {
    done().clone()
}

/// Returns the calibration for the kind of file system that a file is on, measured on this file if
/// none was measured on a file that is as long (from 1 MiB on, all are). `None` if the file is
/// smaller than 256 KiB, cannot be mapped, consists of huge pages, or if measuring took too long.
pub fn calibrate(file: &File) -> Option<ReadOnceCalibration> {
    match residency::backing(file.as_fd()).ok()? {
        Backing::HugePages => None,
        backing => calibrated(file, backing == Backing::Memory, true, Clone::clone).ok()?,
    }
}

impl ReadOnceCalibration {
    /// The greatest length that was measured.
    fn measured_to_bytes(&self) -> u64 {
        self.measured.last().map_or(0, |(len_bytes, ..)| *len_bytes)
    }
}

/// Applies `ask` to the calibration of a kind of file system; `None` if there is none yet and the
/// file is too small to measure on, or `measures` is not set. With `measures`, lengths are measured
/// that this file has and the calibration has not.
fn calibrated<T>(
    file: &File,
    in_memory: bool,
    measures: bool,
    ask: impl Fn(&ReadOnceCalibration) -> T,
) -> std::result::Result<Option<T>, CannotMeasure> {
    let is_it = |known: &ReadOnceCalibration| known.in_memory == in_memory;
    let known = || done().iter().find(|known| is_it(known)).map(&ask);
    let measured_to_bytes =
        done().iter().find(|known| is_it(known)).map_or(0, ReadOnceCalibration::measured_to_bytes);
    if !measures || measured_to_bytes == MOST_MEASURED_BYTES {
        return Ok(known());
    }
    let len_bytes = residency::file_len_bytes(file.as_fd()).map_err(|_| CannotMeasure)?;
    if len_bytes < SMALLEST_MEASURED_BYTES || len_bytes < 2 * measured_to_bytes {
        return Ok(known());
    }
    aquifer_vm::router::install().map_err(|_| CannotMeasure)?;
    let measured = measure(file, len_bytes).ok_or(CannotMeasure)?;
    let threshold_bytes = threshold_of(&measured);
    let found = ReadOnceCalibration { in_memory, threshold_bytes, measured };
    let answer = ask(&found);
    let mut done = done();
    done.retain(|known| !is_it(known));
    done.push(found);
    Ok(Some(answer))
}

/// Measuring took too long, or the file cannot be mapped.
struct CannotMeasure;

/// The length from which on mapping was never slower.
fn threshold_of(measured: &[(u64, u64, u64)]) -> u64 {
    let wins = measured.iter().rev().take_while(|(_, read, map)| map <= read).last();
    wins.map_or(MOST_THRESHOLD_BYTES, |(len_bytes, ..)| *len_bytes)
        .clamp(LEAST_THRESHOLD_BYTES, MOST_THRESHOLD_BYTES)
}

fn measure(file: &File, len_bytes: u64) -> Option<Vec<(u64, u64, u64)>> {
    let lens = (17..=20).map(|shift| 1_u64 << shift).filter(|len| *len <= len_bytes);
    let mut buffer = vec![0; len_bytes.min(MOST_MEASURED_BYTES) as usize];
    file_io::read_exact_at(file.as_fd(), &mut buffer, 0).ok()?;
    let start = Instant::now();
    let mut measured = Vec::new();
    for len in lens {
        let (mut least_read, mut least_map) = (u64::MAX, u64::MAX);
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            file_io::read_exact_at(file.as_fd(), &mut buffer[..len as usize], 0).ok()?;
            look_through(buffer.as_ptr(), len as usize)?;
            least_read = least_read.min(begin.elapsed().as_nanos() as u64);
            let begin = Instant::now();
            look_mapped(file, len as usize)?;
            least_map = least_map.min(begin.elapsed().as_nanos() as u64);
            if start.elapsed() > TIME_LIMIT {
                return None;
            }
        }
        measured.push((len, least_read, least_map));
    }
    Some(measured)
}

fn look_mapped(file: &File, len: usize) -> Option<()> {
    let address = memory::map_file(len, Protection::Read, file.as_fd(), 0).ok()?;
    let seen = look_through(address, len);
    // SAFETY: mapped above; no other reference to it exists.
    unsafe { memory::unmap(address, len) }.ok()?;
    seen
}

/// A stand-in for the work of a closure: loads each byte once.
fn look_through(start: *const u8, len: usize) -> Option<()> {
    let mut block = [0; SMALL_PAGE_BYTES];
    for offset in (0..len).step_by(SMALL_PAGE_BYTES) {
        // SAFETY: the caller passes whole pages, loads from which may fail; the block is a local of
        // one page.
        let read = unsafe {
            fallible::try_copy(start.wrapping_add(offset), block.as_mut_ptr(), SMALL_PAGE_BYTES)
        };
        read.then_some(())?;
    }
    Some(())
}

/// Whether a file is to be mapped.
fn is_mapped(file: &File, status: &FileStatus) -> bool {
    let len_bytes = status.len_bytes;
    if len_bytes < LEAST_THRESHOLD_BYTES {
        return false;
    }
    let device = status.identity.device;
    let known = BY_DEVICE.get(device);
    let threshold = match known {
        Some(known) if known == NEVER || known & FOR_NOW == 0 => known,
        _ => {
            // Relaxed: a counter that guards nothing.
            let passed = PASSED_BYTES.fetch_add(len_bytes, Ordering::Relaxed) + len_bytes;
            let measures = passed >= PASSED_BEFORE_BYTES && len_bytes >= SMALLEST_MEASURED_BYTES;
            match known {
                Some(known) if !measures => known,
                _ => find_threshold(file, device, measures),
            }
        }
    };
    threshold != NEVER && len_bytes >= u64::from(threshold & !FOR_NOW)
}

#[cold]
fn find_threshold(file: &File, device: u64, measures: bool) -> u32 {
    // Relaxed, here and below: it orders nothing, it only spares a second thread the work.
    let is_under_way = &MEASUREMENTS.get().is_under_way;
    let measures = measures && !is_under_way.swap(true, Ordering::Relaxed);
    if measures {
        PASSED_BYTES.store(0, Ordering::Relaxed);
    }
    let found = match residency::backing(file.as_fd()) {
        Ok(Backing::HugePages) => Ok(Some(NEVER)),
        Ok(backing) => calibrated(file, backing == Backing::Memory, measures, |found| {
            let is_for_now = found.measured_to_bytes() < MOST_MEASURED_BYTES;
            found.threshold_bytes as u32 | if is_for_now { FOR_NOW } else { 0 }
        }),
        Err(_) => Err(CannotMeasure),
    };
    if measures {
        is_under_way.store(false, Ordering::Relaxed);
    }
    let threshold_bytes = match found {
        Ok(Some(threshold_bytes)) => threshold_bytes,
        Ok(None) => USUAL_THRESHOLD_BYTES | FOR_NOW,
        // Relaxed: a counter of attempts.
        Err(_) if FAILED_ATTEMPTS.fetch_add(1, Ordering::Relaxed) + 1 < ATTEMPTS => {
            USUAL_THRESHOLD_BYTES | FOR_NOW
        }
        Err(_) => USUAL_THRESHOLD_BYTES,
    };
    BY_DEVICE.remember(device, threshold_bytes);
    threshold_bytes
}

/// Passes an open file to `look`: read, or mapped by `map`, which gets the file and its status.
/// `path` is for messages.
pub(crate) fn read_once_with<T, L: FnOnce(Bytes<'_>) -> T>(
    path: &Path,
    file: File,
    look: L,
    map: impl FnOnce(File, FileStatus, L) -> Result<T>,
) -> Result<T> {
    let mut buffer = BUFFER.take();
    let content = read(path, &file, &mut buffer, UNKNOWN_LENGTH_BYTES, EXPECTS_LONG.get());
    EXPECTS_LONG.set(match content {
        Ok(Content::Here(len)) => len > FIRST_BYTES,
        Ok(Content::Large(_)) => true,
        Err(_) => false,
    });
    match content {
        Ok(Content::Here(len)) => {
            // SAFETY: `len` bytes of the buffer are initialised, and the buffer is not changed
            // until `look` has returned.
            let seen = look(unsafe { Bytes::new(buffer.bytes().as_ptr(), len) });
            keep(buffer);
            Ok(seen)
        }
        Ok(Content::Large(status)) => {
            keep(buffer);
            map(file, status, look)
        }
        Err(error) => {
            keep(buffer);
            Err(error)
        }
    }
}

fn keep(mut buffer: PageBuffer) {
    if buffer.bytes().len() <= MOST_THRESHOLD_BYTES as usize {
        BUFFER.set(buffer);
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Content {
    /// The whole file, of this many bytes, is in the buffer.
    Here(usize),
    /// A regular file that should be mapped, and its status.
    Large(FileStatus),
}

/// Reads the whole file, unless it should be mapped.
fn read(
    path: &Path,
    file: &File,
    buffer: &mut PageBuffer,
    most_bytes: usize,
    expects_long: bool,
) -> Result<Content> {
    let failed = |source| MapError::Read { path: path.to_owned(), source };
    let ask = || residency::file_status(file.as_fd()).map_err(failed);
    let is_long = |status: &FileStatus| {
        status.mode & libc::S_IFMT == libc::S_IFREG && status.len_bytes > FIRST_BYTES as u64
    };
    let mut len = 0;
    let known = expects_long.then(ask).transpose()?.filter(is_long);
    // Whether to read at offsets. A file without them is read from its position.
    let mut has_offsets = false;
    if known.is_none() {
        buffer.lengthen(FIRST_BYTES);
        if let Some(got) = read_cached(file, &mut buffer.bytes()[..FIRST_BYTES]) {
            if !got.is_multiple_of(SMALL_PAGE_BYTES) {
                return Ok(Content::Here(got));
            }
            (len, has_offsets) = (got, true);
        }
        while len < FIRST_BYTES {
            let target = &mut buffer.bytes()[len..FIRST_BYTES];
            match read_some(file, has_offsets.then_some(len), target).map_err(failed)? {
                0 => return Ok(Content::Here(len)),
                got => len += got,
            }
        }
    }
    let status = known.map_or_else(ask, Ok)?;
    let is_regular = status.mode & libc::S_IFMT == libc::S_IFREG;
    if is_regular && is_mapped(file, &status) {
        return Ok(Content::Large(status));
    }
    // A regular file that was truncated, or whose content is generated, has no reliable length.
    let expected =
        Some(status.len_bytes as usize).filter(|expected| is_regular && *expected >= len);
    buffer.lengthen(expected.unwrap_or(0));
    while expected != Some(len) {
        if len == buffer.bytes().len() {
            if len >= most_bytes {
                return Err(MapError::TooLong {
                    path: path.to_owned(),
                    limit_bytes: most_bytes as u64,
                });
            }
            buffer.lengthen((2 * len).min(most_bytes));
        }
        let end = expected.unwrap_or(usize::MAX).min(buffer.bytes().len());
        let target = &mut buffer.bytes()[len..end];
        match read_some(file, has_offsets.then_some(len), target).map_err(failed)? {
            0 => break,
            got => len += got,
        }
    }
    Ok(Content::Here(len))
}

/// Reads the beginning of a file as far as it is cached; `None` if the file does not allow that.
fn read_cached(file: &File, target: &mut [u8]) -> Option<usize> {
    if let Some(left) = UNASKED_FILES.get().checked_sub(1) {
        UNASKED_FILES.set(left);
        return None;
    }
    let read = file_io::read_resident_at(file.as_fd(), target, 0);
    if read.is_err() {
        UNASKED_FILES.set(UNASKED_AFTER_REFUSAL);
    }
    // The usual read reports what is wrong with the file, if anything is.
    read.ok()
}

/// Reads once, at an offset or from the position of the file.
fn read_some(mut file: &File, offset: Option<usize>, target: &mut [u8]) -> io::Result<usize> {
    loop {
        let read = match offset {
            Some(offset) => file.read_at(target, offset as u64),
            None => file.read(target),
        };
        match read {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threshold_is_where_mapping_begins_to_win_for_good() {
        let kib = |kib: u64| kib << 10;
        let measured = [(kib(128), 2, 3), (kib(256), 4, 3), (kib(512), 8, 9), (kib(1024), 16, 12)];
        assert_eq!(threshold_of(&measured), kib(1024), "256 KiB won by chance");
        assert_eq!(threshold_of(&measured[..3]), MOST_THRESHOLD_BYTES);
        assert_eq!(threshold_of(&[(kib(128), 2, 1), (kib(256), 2, 1)]), kib(128));
        assert_eq!(threshold_of(&[]), MOST_THRESHOLD_BYTES);
    }

    #[test]
    fn what_never_ends_is_refused() {
        let path = Path::new("/dev/zero");
        let file = File::open(path).unwrap();
        let limit = 3 * FIRST_BYTES;
        let error = read(path, &file, &mut PageBuffer::new(), limit, false).unwrap_err();
        assert!(
            matches!(error, MapError::TooLong { limit_bytes, .. } if limit_bytes == limit as u64)
        );
    }

    #[test]
    fn a_file_that_was_expected_to_be_long_is_read_as_any() {
        let mut file = tempfile::tempfile().unwrap();
        let path = Path::new("file");
        let of = |file: &File, expects_long| {
            let mut buffer = PageBuffer::new();
            let content = read(path, file, &mut buffer, 1 << 20, expects_long).unwrap();
            (content, buffer.bytes().first().copied())
        };
        let page = SMALL_PAGE_BYTES;
        for len in [0, 1, page, 2 * page, 2 * page + 1, FIRST_BYTES, FIRST_BYTES + 1, 100_000] {
            file.set_len(0).unwrap();
            file_io::write_all_at(file.as_fd(), &vec![7; len], 0).unwrap();
            for expects_long in [false, true] {
                std::io::Seek::rewind(&mut file).unwrap();
                let (content, first) = of(&file, expects_long);
                assert_eq!(content, Content::Here(len));
                assert!(len == 0 || first == Some(7));
            }
        }
        for expects_long in [true, false, false] {
            let generated = File::open("/proc/self/status").unwrap();
            let (content, first) = of(&generated, expects_long);
            assert!(matches!(content, Content::Here(1..)) && first == Some(b'N'), "{content:?}");
        }
    }

    /// Every byte of a pipe is read, in however many pieces it arrives; and files of all lengths
    /// after it, which is not asked for its cached pages.
    #[test]
    fn what_arrives_in_pieces_is_read_to_its_end() {
        for round in 0..2 {
            let (reading, mut writing) = io::pipe().unwrap();
            UNASKED_FILES.set(0);
            let writer = std::thread::spawn(move || {
                for piece in 0..10 {
                    io::Write::write_all(&mut writing, &[piece; 1001]).unwrap();
                    std::thread::yield_now();
                }
            });
            let mut buffer = PageBuffer::new();
            let pipe = File::from(std::os::fd::OwnedFd::from(reading));
            let content = read(Path::new("pipe"), &pipe, &mut buffer, 1 << 20, round == 1);
            assert_eq!(content.unwrap(), Content::Here(10_010));
            assert_eq!(buffer.bytes()[10_009], 9);
            writer.join().unwrap();
        }
    }

    #[test]
    fn calibrations_are_kept_for_both_kinds() {
        for directory in ["/dev/shm", env!("CARGO_MANIFEST_DIR")] {
            let Ok(file) = tempfile::tempfile_in(directory) else { continue };
            file.set_len(1 << 10).unwrap();
            let before = calibrations().len();
            if before == 0 {
                assert_eq!(calibrate(&file), None, "too small to measure on");
            }
            file_io::write_all_at(file.as_fd(), &vec![1; 4 << 20], 0).unwrap();
            if let Some(found) = calibrate(&file) {
                assert!(calibrations().contains(&found));
                assert!(
                    (LEAST_THRESHOLD_BYTES..=MOST_THRESHOLD_BYTES).contains(&found.threshold_bytes)
                );
                assert_eq!(calibrate(&file), Some(found));
            }
        }
    }
}
