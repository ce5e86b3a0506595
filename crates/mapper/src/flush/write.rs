//! One pass that writes pages of a private mapping to the file.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use aquifer_sys::io::{read_at, reopen, start_write_back, write_all_at, write_parts_from};
use aquifer_sys::lease::SoleOpener;
use aquifer_sys::memory::{self, SMALL_PAGE_BYTES, drop_cached};
use aquifer_sys::{accounting, fallible};

use super::base::{Bases, differences};
use super::cached_range::CachedRange;
use super::content::Contents;
use super::plan::{self, Choice};
use crate::error::{FaultCause, FlushCause, MapError};
use crate::page_buffer::PageBuffer;
use crate::writable::Writable;
use aquifer_vm::PageRun;
use aquifer_vm::dirty::runs;

const PAGE: u64 = SMALL_PAGE_BYTES as u64;
/// Pages copied at a time where content is remembered.
const BUFFER_PAGES: u64 = 64;
/// If more parts of a page than this differ from what was last written, the page is written whole,
/// provided the file is unchanged.
const FEW_PARTS: usize = 2;
/// Pages sampled to measure the folio size, and the least number of runs for which its 0.3 ms are
/// worthwhile.
const FOLIO_SAMPLES: usize = 3;
const FOLIO_RUNS: usize = 64;

/// The result of a pass.
#[derive(Default)]
pub(super) struct Written {
    /// Pages written, in no order.
    pub pages: Vec<PageRun>,
    /// Bytes written, including the gaps between the pages.
    pub bytes: u64,
    /// The first bytes that could not be written.
    pub failed: Option<(Range<u64>, FlushCause)>,
}

/// A pass.
pub(super) struct Pass<'a> {
    mapping: &'a Writable,
    /// Where the content of written pages is remembered, if it is.
    contents: Option<&'a mut Contents>,
    /// The last written content of copies that were not dropped.
    bases: &'a mut Bases,
    /// Whether the copies of written pages stay, so that they get a base.
    keeps_copies: bool,
    /// Buffer for a chunk; allocated at first use.
    buffer: PageBuffer,
    written: Written,
}

impl<'a> Pass<'a> {
    pub fn new(
        mapping: &'a Writable,
        contents: Option<&'a mut Contents>,
        bases: &'a mut Bases,
        keeps_copies: bool,
    ) -> Pass<'a> {
        let (buffer, written) = (PageBuffer::new(), Written::default());
        Pass { mapping, contents, bases, keeps_copies, buffer, written }
    }

    pub fn into_written(self) -> Written {
        self.written
    }

    /// Writes normalised runs, and starts their I/O. A failure does not keep the other runs from
    /// being written.
    pub fn write(&mut self, dirty: &[PageRun], choice: &mut Choice) {
        let mut rest = dirty.to_vec();
        if choice.folio_bytes.is_none()
            && choice.forced_gap_pages.is_none()
            && dirty.len() >= FOLIO_RUNS
        {
            choice.folio_bytes = self.sample_folios(dirty);
            let mut written = self.written.pages.clone();
            runs::normalise(&mut written);
            rest = runs::subtract(dirty, &written);
        }
        // Where content is remembered, only that of dirty pages is: write no gaps.
        let gap_pages = if self.contents.is_none() { choice.gap_pages() } else { 0 };
        for piece in plan::pieces(&rest, self.mapping.first_byte()) {
            let (Some(first), Some(last)) = (piece.first(), piece.last()) else { continue };
            let hull = PageRun::new(first.first.0..last.end().0);
            let has_gaps = plan::join(&piece, gap_pages).any(|joined| joined.len() > 1);
            // Held for one piece at a time: a process that opens the file in the meantime waits no
            // longer than that.
            let alone = has_gaps.then(|| SoleOpener::stay(self.mapping.file())).flatten();
            let cached = alone.as_ref().and_then(|_| self.cached_range(hull));
            let is_alone = || alone.as_ref().is_some_and(SoleOpener::is_alone);
            match &cached {
                Some(cached) => plan::join(&piece, gap_pages).for_each(|joined| match joined {
                    [run] => self.put(*run),
                    _ if is_alone() => self.put_joined(joined, cached),
                    _ => joined.iter().for_each(|&run| self.put(run)),
                }),
                None => piece.iter().for_each(|&run| self.put(run)),
            }
            drop(alone);
            self.start(self.bytes_of(hull));
        }
    }

    /// Maps the page cache of some pages, if all of them are cached.
    fn cached_range(&self, pages: PageRun) -> Option<CachedRange> {
        let start = self.mapping.first_byte() + pages.first.0 * PAGE;
        CachedRange::new(self.mapping.file(), start..self.bytes_of(pages).end)
    }

    /// Writes pages that the device has lost again, past the page cache.
    ///
    /// The kernel marks lost pages clean. Writing them once more is not enough: where ext4 had just
    /// allocated the block, the page records that it has a block but not that the block is still
    /// marked unwritten; all later syncs succeed, and when the page is evicted from the cache, it
    /// reads as zeros (seen on Linux 6.18). A direct write evicts such pages, even mapped ones, and
    /// does not depend on their state.
    pub fn write_lost(&mut self, lost: &[PageRun]) {
        let direct = reopen(self.mapping.file(), libc::O_RDWR | libc::O_DIRECT).ok();
        for run in lost {
            for from in (run.first.0..run.end().0).step_by(BUFFER_PAGES as usize) {
                let chunk = PageRun::new(from..run.end().0.min(from + BUFFER_PAGES));
                let direct = direct.as_ref().map(AsFd::as_fd);
                match direct.map(|direct| self.put_directly(direct, chunk)) {
                    Some(true) => self.written.pages.push(chunk),
                    // Direct I/O failed, or this is no whole page: evict the clean pages that are
                    // not mapped, and write normally.
                    _ => {
                        let bytes = self.bytes_of(chunk);
                        let len_bytes = bytes.end - bytes.start;
                        let _ = drop_cached(self.mapping.file(), bytes.start, len_bytes);
                        chunk.pages().for_each(|first| self.put(PageRun { first, count: 1 }));
                    }
                }
            }
        }
    }

    /// Writes a chunk past the page cache. Returns false if that fails, or if it is not whole pages
    /// inside the file.
    fn put_directly(&mut self, direct: BorrowedFd<'_>, chunk: PageRun) -> bool {
        let bytes = self.bytes_of(chunk);
        let is_there = self.mapping.file_len_bytes().is_ok_and(|len_bytes| bytes.end <= len_bytes);
        if !is_there || bytes.end - bytes.start != chunk.count * PAGE {
            return false;
        }
        if self.copy(chunk, &bytes, 0).is_err() {
            return false;
        }
        let content = &self.buffer.bytes()[..(chunk.count * PAGE) as usize];
        if write_all_at(direct, content, bytes.start).is_err() {
            return false;
        }
        self.written.bytes += chunk.count * PAGE;
        self.remember(chunk, 0);
        true
    }

    /// Starts the I/O of written bytes. Only a hint: the sync reports failures.
    pub fn start(&self, bytes: Range<u64>) {
        if !bytes.is_empty() {
            let _ = start_write_back(self.mapping.file(), bytes.start, bytes.end - bytes.start);
        }
    }

    /// The bytes of the file that a run of pages has in the view; possibly none.
    fn bytes_of(&self, run: PageRun) -> Range<u64> {
        let first = self.mapping.first_byte();
        let view = self.mapping.view_in_file();
        let (start, end) = (first + run.first.0 * PAGE, first + run.end().0 * PAGE);
        start.clamp(view.start, view.end)..end.clamp(view.start, view.end)
    }

    fn note_failure(&mut self, bytes: Range<u64>, cause: FlushCause) {
        self.written.failed.get_or_insert((bytes, cause));
    }

    /// Writes runs and the gaps between them in one call.
    fn put_joined(&mut self, joined: &[PageRun], cached: &CachedRange) {
        match self.try_put_joined(joined, cached) {
            Ok(()) => self.written.pages.extend_from_slice(joined),
            // Write them one by one, to find the one that fails.
            Err(_) => joined.iter().for_each(|&run| self.put(run)),
        }
    }

    fn try_put_joined(
        &mut self,
        joined: &[PageRun],
        cached: &CachedRange,
    ) -> Result<(), FlushCause> {
        let is_copied = self.keeps_copies || joined.iter().any(|&run| self.bases.has_any(run));
        if is_copied {
            // Grow the buffer first: `parts` will point into it.
            self.buffer.lengthen(joined.iter().map(|run| run.count * PAGE).sum::<u64>() as usize);
        }
        let mut parts = Vec::with_capacity(2 * joined.len());
        let mut all: Option<Range<u64>> = None;
        let mut at = 0;
        for &run in joined {
            let bytes = self.bytes_of(run);
            if let Some(before) = &all {
                parts.push(cached.memory_of(before.end..bytes.start));
            }
            let mut part = self.memory_of(&bytes);
            if is_copied {
                self.copy(run, &bytes, at)?;
                if !self.is_as_written(run, cached) {
                    return Err(FlushCause::Io(libc::ESTALE));
                }
                let lead = bytes.start - (self.mapping.first_byte() + run.first.0 * PAGE);
                part.address = self.buffer.bytes()[at + lead as usize..].as_mut_ptr();
                at += (run.count * PAGE) as usize;
            }
            parts.push(part);
            all = Some(all.map_or(bytes.start, |before| before.start)..bytes.end);
        }
        let Some(all) = all else { return Ok(()) };
        self.put_parts(&mut parts, &all)?;
        if is_copied {
            let mut at = 0;
            for &run in joined {
                self.remember(run, at);
                at += (run.count * PAGE) as usize;
            }
        }
        Ok(())
    }

    /// Whether the file still holds the last written content of those pages of a run that have a
    /// base.
    fn is_as_written(&self, run: PageRun, cached: &CachedRange) -> bool {
        run.pages().all(|page| {
            let Some(base) = self.bases.get(page) else { return true };
            let start = self.mapping.first_byte() + page.0 * PAGE;
            let inside = self.bytes_of(PageRun { first: page, count: 1 });
            let (from, to) = ((inside.start - start) as usize, (inside.end - start) as usize);
            let mut there = [0; SMALL_PAGE_BYTES];
            let source = cached.memory_of(inside).address;
            // SAFETY: the source lies inside the cached range, and the target is a buffer of one page.
            let copied =
                unsafe { fallible::try_copy(source, there[from..to].as_mut_ptr(), to - from) };
            copied && there[from..to] == base[from..to]
        })
    }

    /// Writes a run, up to the end of the file.
    fn put(&mut self, run: PageRun) {
        let bytes = self.bytes_of(run);
        let file_len_bytes = match self.mapping.file_len_bytes() {
            Ok(len_bytes) => len_bytes,
            Err(error) => return self.note_failure(bytes, FlushCause::of_write(&error)),
        };
        let (there, gone) = split_at_end(run, &bytes, self.mapping.first_byte(), file_len_bytes);
        if gone.count > 0 {
            self.note_failure(self.bytes_of(gone), FlushCause::Truncated);
        }
        let is_copied = self.keeps_copies || self.contents.is_some() || self.bases.has_any(there);
        let chunk_pages = if is_copied { BUFFER_PAGES } else { u64::MAX };
        let mut from = there.first.0;
        while from < there.end().0 {
            let chunk = PageRun::new(from..there.end().0.min(from.saturating_add(chunk_pages)));
            let bytes = self.bytes_of(chunk);
            let put = if is_copied {
                self.put_copied(chunk, &bytes)
            } else {
                self.put_parts(&mut [self.memory_of(&bytes)], &bytes)
            };
            match put {
                Ok(()) => self.written.pages.push(chunk),
                Err(cause) => self.note_failure(bytes, cause),
            }
            from = chunk.end().0;
        }
    }

    /// The memory in the mapping that holds `bytes` of the file.
    fn memory_of(&self, bytes: &Range<u64>) -> memory::Range {
        let len_bytes = (bytes.end - bytes.start) as usize;
        memory::Range { address: self.mapping.address_of(bytes.start), len_bytes }
    }

    /// Writes parts of the mapping and of the page cache that together make up `bytes` of the file.
    fn put_parts(
        &mut self,
        parts: &mut [memory::Range],
        bytes: &Range<u64>,
    ) -> Result<(), FlushCause> {
        // The write would extend a truncated file again. A truncation between this check and the
        // write is not detected.
        if self.mapping.file_len_bytes().is_ok_and(|len_bytes| len_bytes < bytes.end) {
            return Err(FlushCause::Truncated);
        }
        // SAFETY: each part lies inside the mapping, or in a cached range that outlives the call.
        let written = unsafe { write_parts_from(self.mapping.file(), parts, bytes.start) };
        written.map_err(|error| self.why(&error, bytes))?;
        self.written.bytes += bytes.end - bytes.start;
        Ok(())
    }

    /// Writes a chunk from a copy in the buffer, and remembers it.
    fn put_copied(&mut self, chunk: PageRun, bytes: &Range<u64>) -> Result<(), FlushCause> {
        self.copy(chunk, bytes, 0)?;
        let first_byte = self.mapping.first_byte() + chunk.first.0 * PAGE;
        let mut parts: Vec<Range<u64>> = Vec::new();
        for (index, page) in chunk.pages().enumerate() {
            let content = &self.buffer.bytes()[index * SMALL_PAGE_BYTES..][..SMALL_PAGE_BYTES];
            let start = first_byte + index as u64 * PAGE;
            let inside = start.max(bytes.start)..(start + PAGE).min(bytes.end);
            let stored = match self.bases.get(page) {
                Some(base) => stored_to(self.mapping, base, content, start, inside),
                None => vec![inside],
            };
            for part in stored {
                match parts.last_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => parts.push(part),
                }
            }
        }
        // As in `put_parts`.
        if self.mapping.file_len_bytes().is_ok_and(|len_bytes| len_bytes < bytes.end) {
            return Err(FlushCause::Truncated);
        }
        for part in parts {
            let (from, to) = (part.start - first_byte, part.end - first_byte);
            let content = &self.buffer.bytes()[from as usize..to as usize];
            let put = write_all_at(self.mapping.file(), content, part.start);
            put.map_err(|error| self.why(&error, bytes))?;
            self.written.bytes += to - from;
        }
        self.remember(chunk, 0);
        Ok(())
    }

    /// Copies the pages of a chunk, whose bytes in the file are `bytes`, to offset `at` of the
    /// buffer.
    fn copy(&mut self, chunk: PageRun, bytes: &Range<u64>, at: usize) -> Result<(), FlushCause> {
        let source = self.mapping.base().wrapping_add((chunk.first.0 * PAGE) as usize);
        let len = (chunk.count * PAGE) as usize;
        self.buffer.lengthen(at + len);
        let target = self.buffer.bytes()[at..at + len].as_mut_ptr();
        // SAFETY: the source is pages of the mapping, and the buffer has room for them.
        if unsafe { fallible::try_copy(source, target, len) } {
            Ok(())
        } else {
            Err(self.missing(bytes))
        }
    }

    /// Remembers the written content of a chunk, which is at offset `at` of the buffer.
    fn remember(&mut self, chunk: PageRun, at: usize) {
        let contents = self.buffer.bytes()[at..].chunks_exact(SMALL_PAGE_BYTES);
        for (page, content) in chunk.pages().zip(contents) {
            if let Some(contents) = &mut self.contents {
                contents.note(page, content);
            }
            if self.keeps_copies || self.bases.get(page).is_some() {
                self.bases.set(page, content);
            }
        }
    }

    fn why(&self, error: &std::io::Error, bytes: &Range<u64>) -> FlushCause {
        match error.raw_os_error() {
            // The source memory could not be read.
            Some(libc::EFAULT) => self.missing(bytes),
            _ => FlushCause::of_write(error),
        }
    }

    /// Finds out why pages of the mapping cannot be read.
    fn missing(&self, bytes: &Range<u64>) -> FlushCause {
        match self.mapping.fault(bytes) {
            MapError::Fault { cause: FaultCause::Truncated, .. } => FlushCause::Truncated,
            MapError::Fault { cause: FaultCause::Io(errno), .. } => FlushCause::Io(errno),
            _ => FlushCause::Io(libc::EFAULT),
        }
    }

    /// Writes the first page of some runs, far apart, and returns the median size of the folios
    /// dirtied by that.
    fn sample_folios(&mut self, dirty: &[PageRun]) -> Option<u64> {
        let mut sizes = Vec::with_capacity(FOLIO_SAMPLES);
        for sample in 0..FOLIO_SAMPLES {
            let run = dirty[dirty.len() * sample / FOLIO_SAMPLES];
            let before = accounting::dirtied_bytes().ok()?;
            self.put(PageRun { count: 1, ..run });
            let size = accounting::dirtied_bytes().ok()?.saturating_sub(before);
            // Zero if the folio was dirty already.
            if size > 0 {
                sizes.push(size);
            }
        }
        sizes.sort_unstable();
        sizes.get(sizes.len() / 2).copied()
    }
}

/// The bytes of the file in `inside`, a part of one page, that were stored to since its copy was
/// written with the content `base`. The page begins at `start`.
fn stored_to(
    mapping: &Writable,
    base: &[u8],
    now: &[u8],
    start: u64,
    inside: Range<u64>,
) -> Vec<Range<u64>> {
    let (from, to) = ((inside.start - start) as usize, (inside.end - start) as usize);
    let parts = differences(&base[from..to], &now[from..to]);
    if parts.len() > FEW_PARTS {
        let mut there = [0; SMALL_PAGE_BYTES];
        let read = read_at(mapping.file(), &mut there[from..to], inside.start);
        if read.is_ok_and(|len| len == to - from) && there[from..to] == base[from..to] {
            return vec![inside];
        }
    }
    parts
        .into_iter()
        .map(|part| inside.start + part.start as u64..inside.start + part.end as u64)
        .collect()
}

/// Splits a run into the pages that lie before the end of the file, and the rest.
fn split_at_end(
    run: PageRun,
    bytes: &Range<u64>,
    first_byte: u64,
    file_len_bytes: u64,
) -> (PageRun, PageRun) {
    if bytes.end <= file_len_bytes {
        return (run, PageRun::new(run.end().0..run.end().0));
    }
    let whole_pages = file_len_bytes.saturating_sub(first_byte) / PAGE;
    let end = whole_pages.clamp(run.first.0, run.end().0);
    (PageRun::new(run.first.0..end), PageRun::new(end..run.end().0))
}
