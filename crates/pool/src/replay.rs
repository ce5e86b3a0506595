//! Reading the log from its tail, and copying what objects committed to its place.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::fence;

use crate::appends::at_place;
use crate::core::Core;
use crate::error::{PoolError, Result};
use crate::format::layout::Layout;
use crate::format::patch::{self, Patch};
use crate::format::record::{Entry, Header, LogIdentity, RECORD_UNIT_BYTES, Record};
use crate::format::{Checksum, FormatError, PAGE_BYTES};
use crate::log::{ReadError, read_record};
use crate::logged_page::LoggedPage;
use crate::media::{ByteRange, Media};
use crate::mutant::{self, Mutant};
use crate::owners::Owners;

/// How far the log could be read, and why not further.
#[derive(Debug)]
pub(crate) struct LogEnd {
    /// Behind the last whole record.
    pub lsn: u64,
    /// Why there is no record there.
    pub reason: FormatError,
}

/// What is wrong with a record that does not count for want of a mark.
pub(crate) const UNMARKED: &str = "mark";

/// The part of a log that counts.
pub(crate) struct Counted {
    pub end: LogEnd,
    /// What its records expose that no mark says is durable.
    pub unmarked: Vec<ByteRange>,
}

/// A log as it lies on media.
#[derive(Clone, Copy)]
pub(crate) struct LogReader<'a> {
    pub media: &'a dyn Media,
    pub layout: Layout,
    pub identity: LogIdentity,
    pub mutant: Option<Mutant>,
}

impl LogReader<'_> {
    /// Calls `visit` for each whole record from `from_lsn` on, at most to `to_lsn`, in order.
    pub fn scan(
        &self,
        from_lsn: u64,
        to_lsn: u64,
        mut visit: impl FnMut(&Record) -> Result<()>,
    ) -> Result<LogEnd> {
        self.scan_owned(from_lsn, to_lsn, |record| visit(&record))
    }

    fn scan_owned(
        &self,
        from_lsn: u64,
        to_lsn: u64,
        mut visit: impl FnMut(Record) -> Result<()>,
    ) -> Result<LogEnd> {
        let mut lsn = from_lsn;
        // More than one round of the ring cannot be: its records would have overwritten the first ones.
        let limit = to_lsn.min(from_lsn + self.layout.log().len_bytes);
        while lsn < limit {
            match read_record(self.media, &self.layout, lsn, self.identity, self.mutant) {
                Ok(record) if record.header.end_lsn() <= limit => {
                    lsn = record.header.end_lsn();
                    visit(record)?;
                }
                Ok(_) => {
                    let reason = FormatError::Field { field: "length", value: lsn };
                    return Ok(LogEnd { lsn, reason });
                }
                Err(ReadError::Format(reason)) => return Ok(LogEnd { lsn, reason }),
                Err(ReadError::Media(error)) => return Err(error.into()),
            }
        }
        Ok(LogEnd { lsn, reason: FormatError::Magic })
    }

    /// Calls `visit` for each record from `from_lsn` on that counts, in order. The log ends before the first packed record that
    /// exposes what may not be durable: no marked record follows, and it was written in another life, or bytes were lost.
    pub fn scan_counting(
        &self,
        from_lsn: u64,
        counts_unmarked: bool,
        mut visit: impl FnMut(&Record) -> Result<()>,
    ) -> Result<Counted> {
        let believes_all = counts_unmarked || mutant::is(self.mutant, Mutant::CountExposed);
        // From the first record on that counts only if a marked one follows.
        let mut waiting: Vec<Record> = Vec::new();
        let mut unmarked = Vec::new();
        let end = self.scan_owned(from_lsn, u64::MAX, |record| {
            let exposes = record.exposed().next().is_some();
            let is_marked = record.is_marked();
            if is_marked {
                unmarked.clear();
            }
            if believes_all || (waiting.is_empty() && !exposes) {
                unmarked.extend(record.exposed());
                return visit(&record);
            }
            waiting.push(record);
            if is_marked {
                waiting.drain(..).try_for_each(|record| visit(&record))?;
            }
            Ok(())
        })?;
        let end = match waiting.first() {
            Some(first) => LogEnd {
                lsn: first.header.lsn,
                reason: FormatError::Field { field: UNMARKED, value: 0 },
            },
            None => end,
        };
        Ok(Counted { end, unmarked })
    }

    /// The highest position above `end_lsn` that any record behind it says was acknowledged: proof that the log was
    /// longer once. None if nothing says so.
    pub fn acknowledged_behind(&self, tail_lsn: u64, end_lsn: u64) -> Result<Option<u64>> {
        const CHUNK_BYTES: u64 = 1 << 20;
        let log = self.layout.log();
        let limit_lsn = tail_lsn + log.len_bytes;
        let mut chunk = vec![0; CHUNK_BYTES.min(log.len_bytes) as usize];
        let mut acknowledged_lsn = None;
        // Headers that are made up may have records overlap, and each would be read whole.
        let mut to_read_bytes = 4 * log.len_bytes;
        let mut first_lsn = end_lsn.next_multiple_of(RECORD_UNIT_BYTES);
        while first_lsn < limit_lsn {
            let position = first_lsn % log.len_bytes;
            let len_bytes =
                CHUNK_BYTES.min(log.len_bytes - position).min(limit_lsn - first_lsn) as usize;
            self.media.read_at(log.offset_bytes + position, &mut chunk[..len_bytes])?;
            // Packed records begin anywhere, and what was lost may be the closing of those that came to lie before these.
            let units = chunk[..len_bytes].chunks_exact(RECORD_UNIT_BYTES as usize);
            for (unit, lsn) in units.zip((first_lsn..).step_by(RECORD_UNIT_BYTES as usize)) {
                if let Ok(header) = Header::decode(unit, lsn, log.len_bytes, self.identity)
                    && header.acknowledged_lsn > acknowledged_lsn.unwrap_or(end_lsn)
                    && header.len_bytes <= to_read_bytes
                {
                    to_read_bytes -= header.len_bytes;
                    if read_record(self.media, &self.layout, lsn, self.identity, None).is_ok() {
                        acknowledged_lsn = Some(header.acknowledged_lsn);
                    }
                }
            }
            first_lsn += len_bytes as u64;
        }
        Ok(acknowledged_lsn)
    }
}

/// Content that records have for pages of objects: for each page the newest. A page that was committed many times is
/// copied once.
#[derive(Debug, Default)]
pub(crate) struct Committed {
    pages: BTreeMap<u64, LoggedPage>,
    /// How much content was read that was put elsewhere, to compare it with its checksum.
    checked_bytes: u64,
}

impl Committed {
    /// Adds the pages of one record, in log order; of all of them only those that `owners` gives to the inode the
    /// record names. Checks copied content against its checksum.
    pub fn add(
        &mut self,
        reader: &LogReader<'_>,
        record: &Record,
        owners: Option<&Owners>,
    ) -> Result<()> {
        // What is left of a range: an object may have shrunk in place since.
        let owned = |inode, range| match owners {
            Some(owners) => owners.owned(inode, range),
            None => range,
        };
        let mut inodes: Vec<u64> = record.content_inodes().collect();
        inodes.sort_unstable();
        inodes.dedup();
        let log = reader.layout.log();
        let record_offset = log.offset_bytes + record.header.lsn % log.len_bytes;
        for entry in &record.entries {
            match *entry {
                Entry::Pages { inode, target, payload_offset } => {
                    let part = owned(inode, target);
                    self.replace(reader, target, part, record_offset + payload_offset)?;
                }
                Entry::Patches { inode, target, payload_offset, len_bytes } => {
                    let part = owned(inode, target);
                    let bytes = record.payload(payload_offset, len_bytes);
                    self.patch(reader, target, part, patch::iter(bytes))?;
                }
                Entry::Copied { inode, target, source_offset_bytes, checksum: sum } => {
                    let part = owned(inode, target);
                    if part.len_bytes == 0 {
                        continue;
                    }
                    let source = ByteRange { offset_bytes: source_offset_bytes, ..target };
                    check_in_data(reader, source)?;
                    if owners.is_some_and(|owners| !owners.may_hold_content_for(&inodes, source)) {
                        let error =
                            FormatError::Field { field: "source", value: source_offset_bytes };
                        return Err(damaged(reader, error));
                    }
                    self.checked_bytes = self.checked_bytes.saturating_add(source.len_bytes);
                    if self.checked_bytes > most_copied_bytes(&reader.layout.data()) {
                        let error = FormatError::Field { field: "length", value: source.len_bytes };
                        return Err(damaged(reader, error));
                    }
                    check_content(reader, source, sum)?;
                    self.replace(reader, target, part, source_offset_bytes)?;
                }
                Entry::Exposed { range } => check_in_data(reader, range)?,
                Entry::Slot { .. } | Entry::NewRun { .. } => {}
            }
        }
        Ok(())
    }

    /// Adds the places of the pages of `range` that a record is for, with the content they have there. Says
    /// whether there are any.
    fn add_targets(
        &mut self,
        reader: &LogReader<'_>,
        record: &Record,
        range: ByteRange,
    ) -> Result<bool> {
        let mut has_any = false;
        for entry in &record.entries {
            match *entry {
                Entry::Pages { target, .. } | Entry::Copied { target, .. } => {
                    let part = target.intersection(range);
                    self.replace(reader, target, part, target.offset_bytes)?;
                    has_any |= part.len_bytes > 0;
                }
                Entry::Patches { target, payload_offset, len_bytes, .. } => {
                    let bytes = record.payload(payload_offset, len_bytes);
                    let places = patch::iter(bytes).map(|patch| Patch { bytes: &[], ..patch });
                    has_any |= self.patch(reader, target, target.intersection(range), places)?;
                }
                Entry::Slot { .. } | Entry::NewRun { .. } | Entry::Exposed { .. } => {}
            }
        }
        Ok(has_any)
    }

    /// Replaces the pages of `part`, which lies in `target`, whose content begins at `source`.
    fn replace(
        &mut self,
        reader: &LogReader<'_>,
        target: ByteRange,
        part: ByteRange,
        source: u64,
    ) -> Result<()> {
        if part.len_bytes == 0 {
            return Ok(());
        }
        check_in_data(reader, part)?;
        for offset in (0..part.len_bytes).step_by(PAGE_BYTES as usize) {
            let page = part.offset_bytes + offset;
            let source = source + (page - target.offset_bytes);
            self.pages.entry(page).or_default().replace(source);
        }
        Ok(())
    }

    /// Patches pages of `target`, those that lie in `part`. Says whether there are any.
    fn patch<'a>(
        &mut self,
        reader: &LogReader<'_>,
        target: ByteRange,
        part: ByteRange,
        patches: impl Iterator<Item = Patch<'a>>,
    ) -> Result<bool> {
        if part.len_bytes == 0 {
            return Ok(false);
        }
        check_in_data(reader, part)?;
        let mut has_any = false;
        for patch in patches {
            let page = target.offset_bytes + u64::from(patch.page) * PAGE_BYTES;
            if (part.offset_bytes..part.end_bytes()).contains(&page) {
                self.pages.entry(page).or_default().patch(patch.offset, patch.bytes);
                has_any = true;
            }
        }
        Ok(has_any)
    }

    /// Pages inside `range` that have newer content in the log, and their place.
    pub fn within(&self, range: ByteRange) -> impl Iterator<Item = (u64, &LoggedPage)> + '_ {
        self.pages.range(range.offset_bytes..range.end_bytes()).map(|(place, page)| (*place, page))
    }

    /// Places of all pages, adjacent ones merged.
    pub fn ranges(&self) -> Vec<ByteRange> {
        let mut ranges: Vec<ByteRange> = Vec::new();
        for &offset_bytes in self.pages.keys() {
            match ranges.last_mut() {
                Some(last) if last.end_bytes() == offset_bytes => last.len_bytes += PAGE_BYTES,
                _ => ranges.push(ByteRange { offset_bytes, len_bytes: PAGE_BYTES }),
            }
        }
        ranges
    }

    /// Copies each page to its place: visible, not durable.
    pub fn copy_to_place(&self, media: &dyn Media) -> Result<()> {
        const BATCH_PAGES: u64 = 64;
        let mut buffer: Vec<u8> = Vec::with_capacity((BATCH_PAGES * PAGE_BYTES) as usize);
        let mut batch: Vec<&LoggedPage> = Vec::with_capacity(BATCH_PAGES as usize);
        let mut pages = self.pages.iter().peekable();
        while let Some((&place, page)) = pages.next() {
            let next_place = |count: usize| place + count as u64 * PAGE_BYTES;
            batch.clear();
            batch.push(page);
            while batch.len() < BATCH_PAGES as usize
                && let Some((_, page)) =
                    pages.next_if(|(other, _)| **other == next_place(batch.len()))
            {
                batch.push(page);
            }
            buffer.resize(batch.len() * PAGE_BYTES as usize, 0);
            read_batch(media, place, &batch, &mut buffer)?;
            // SAFETY: the page is an object's, and the record was committed by the holder of its write lock. Attached objects are private
            // mappings of their media: what replaces a committed page there is what the object has.
            unsafe { media.write_at(place, &buffer)? };
        }
        Ok(())
    }
}

/// Reads adjacent pages, the first of which has its place at `place`: those that lie together at once.
fn read_batch(
    media: &dyn Media,
    place: u64,
    batch: &[&LoggedPage],
    buffer: &mut [u8],
) -> Result<()> {
    let source = |index: usize| batch[index].source(place + index as u64 * PAGE_BYTES);
    let mut first = 0;
    while first < batch.len() {
        let lies_behind = |index: &usize| source(*index) == source(*index - 1) + PAGE_BYTES;
        let end = first + 1 + (first + 1..batch.len()).take_while(lies_behind).count();
        let bytes = first * PAGE_BYTES as usize..end * PAGE_BYTES as usize;
        media.read_at(source(first), &mut buffer[bytes])?;
        first = end;
    }
    for (page, bytes) in batch.iter().zip(buffer.chunks_exact_mut(PAGE_BYTES as usize)) {
        page.apply_patches(bytes);
    }
    Ok(())
}

fn damaged(reader: &LogReader<'_>, error: FormatError) -> PoolError {
    PoolError::Damaged {
        path: reader.media.path().to_path_buf(),
        structure: "a record of the log".to_owned(),
        error,
    }
}

/// No log takes more content from data of this range: a page holds content for one record at most, and is used again when the tail has passed
/// that. A forged log may have any number of entries for one place, and each is read.
pub(crate) fn most_copied_bytes(data: &ByteRange) -> u64 {
    data.len_bytes.saturating_mul(2)
}

fn check_in_data(reader: &LogReader<'_>, range: ByteRange) -> Result<()> {
    let data = reader.layout.data();
    if range.offset_bytes < data.offset_bytes || range.end_bytes() > data.end_bytes() {
        let error = FormatError::Field { field: "target", value: range.offset_bytes };
        return Err(damaged(reader, error));
    }
    Ok(())
}

fn check_content(reader: &LogReader<'_>, range: ByteRange, stored: u64) -> Result<()> {
    const PIECE_BYTES: u64 = 1 << 20;
    let mut bytes = vec![0; PIECE_BYTES.min(range.len_bytes) as usize];
    let mut sum = Checksum::new();
    for done in (0..range.len_bytes).step_by(PIECE_BYTES as usize) {
        let piece = &mut bytes[..PIECE_BYTES.min(range.len_bytes - done) as usize];
        reader.media.read_at(range.offset_bytes + done, piece)?;
        sum.update(piece);
    }
    let computed = sum.finish();
    if computed != stored {
        return Err(damaged(reader, FormatError::Checksum { stored, computed }));
    }
    Ok(())
}

impl Core {
    pub(crate) fn log_reader(&self) -> LogReader<'_> {
        LogReader {
            media: &*self.media,
            layout: self.layout,
            identity: self.identity(),
            mutant: self.mutant,
        }
    }

    /// What a reader must see instead of what is on media, which it cannot change. `read` is run again if the log was
    /// reused meanwhile, or if something undecided in `range` was decided. `overlay` is all there is for a reader that
    /// shares nothing with the writers.
    pub(crate) fn committed_for_reader<T>(
        &self,
        range: ByteRange,
        overlay: Option<&Committed>,
        read: impl Fn(&Seen<'_>) -> Result<T>,
    ) -> Result<T> {
        if let Some(committed) = overlay {
            return read(&Seen { committed, undecided: &Committed::default() });
        }
        let control = self.control();
        loop {
            // Before the positions: what is decided after this is before the durable position, or found undecided.
            let pending = control.appends.lsns();
            let from_lsn = at_place(&control.applied_lsn);
            let to_lsn = control.appends.durable_lsn();
            let value = self.committed_between(from_lsn, to_lsn).and_then(|committed| {
                let undecided = self.undecided(range, pending.iter().filter(|l| **l >= to_lsn));
                read(&Seen { committed: &committed, undecided: &undecided.pages })
                    .map(|value| (value, undecided.lsn))
            });
            // Acquire: the reads above come before it.
            fence(Acquire);
            if control.tail_lsn.load(Relaxed) > from_lsn {
                continue;
            }
            let (value, undecided_lsn) = value?;
            // What was taken for undecided was not copied to its place meanwhile if it still is.
            if undecided_lsn.is_none_or(|lsn| control.appends.durable_lsn.load(Relaxed) <= lsn) {
                return Ok(value);
            }
        }
    }

    /// Pages of `range` that whole records at these positions are for: nobody knows whether they will count.
    fn undecided<'a>(
        &self,
        range: ByteRange,
        positions: impl Iterator<Item = &'a u64>,
    ) -> Undecided {
        let reader = self.log_reader();
        let mut undecided = Undecided { pages: Committed::default(), lsn: None };
        for &lsn in positions {
            // One that is not whole yet is for an object whose writer lives: not for one that can be locked.
            let Ok(record) = self.read_record(lsn) else { continue };
            if let Ok(true) = undecided.pages.add_targets(&reader, &record, range) {
                undecided.lsn = Some(undecided.lsn.map_or(lsn, |first: u64| first.min(lsn)));
            }
        }
        undecided
    }
}

struct Undecided {
    pages: Committed,
    /// The first record of them.
    lsn: Option<u64>,
}

/// What the log has for a reader.
pub(crate) struct Seen<'a> {
    pub committed: &'a Committed,
    /// Pages that may be written to while the reader looks; their content is the present one.
    undecided: &'a Committed,
}

impl Seen<'_> {
    /// Pages inside `range` that a reader must have copies of, and their place.
    pub fn within(&self, range: ByteRange) -> impl Iterator<Item = (u64, &LoggedPage)> + '_ {
        let undecided = (self.undecided.within(range))
            .filter(|(place, _)| !self.committed.pages.contains_key(place));
        self.committed.within(range).chain(undecided)
    }
}
