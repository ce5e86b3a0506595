//! The committed content of objects: finding it in the log, and copying it to its place.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::fence;

use crate::error::{PoolError, Result};
use crate::format::patch::{self, Patch};
use crate::format::record::{Entry, Record};
use crate::format::{Checksum, FormatError, PAGE_BYTES};
use crate::log::locks::{Log, Maintaining};
use crate::log::logged_page::LoggedPage;
use crate::log::reader::LogReader;
use crate::media::{ByteRange, Media};
use crate::owners::Owners;
use crate::shared::appends::{at_place, note_at_place};
use crate::shared::failure::FailureKind;
use crate::shared::handle::Handle;
use crate::shared::heartbeat::Held;

/// The newest content that records have for each page of objects. A page that was committed many
/// times is copied once.
#[derive(Debug, Default)]
pub(crate) struct Committed {
    pages: BTreeMap<u64, LoggedPage>,
    /// How many bytes of copied content were read to verify their checksums.
    checked_bytes: u64,
}

impl Committed {
    /// Adds the pages of one record, in log order; with `owners`, only those that still belong to
    /// the inode that the record names. Verifies the checksum of copied content.
    pub fn add(
        &mut self,
        reader: &LogReader<'_>,
        record: &Record,
        owners: Option<&Owners>,
    ) -> Result<()> {
        // The part of a range that is still owned: an object may have shrunk in place since.
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

    /// Adds the places of the pages of `range` that a record is for, with their present content.
    /// Returns whether there are any.
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

    /// Replaces the pages of `part`, which lies in `target`; the content of `target` begins at
    /// `source`.
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

    /// Patches those pages of `target` that lie in `part`. Returns whether there are any.
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

    /// Pages inside `range` that have newer content in the log, with their place.
    pub fn within(&self, range: ByteRange) -> impl Iterator<Item = (u64, &LoggedPage)> + '_ {
        self.pages.range(range.offset_bytes..range.end_bytes()).map(|(place, page)| (*place, page))
    }

    /// The places of all pages, adjacent ones merged.
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
    ///
    /// # Errors
    /// Those of `check`, which is called before each write, and of the media.
    pub fn copy_to_place(&self, media: &dyn Media, check: impl Fn() -> Result<()>) -> Result<()> {
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
            check()?;
            // SAFETY: the page belongs to an object, and the record was committed by the holder of
            // its write lock. Attached objects are private mappings of their media: the content
            // that replaces a committed page is the content that the object has.
            unsafe { media.write_at(place, &buffer)? };
        }
        Ok(())
    }
}

/// Reads the content of adjacent pages, the first of which has its place at `place`; consecutive
/// sources in one read.
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

/// The limit of copied content in a log with this data range: a page holds content for one record
/// at most, and is reused only when the tail has passed that record. A forged log may have any
/// number of entries for one place, and each is read.
pub fn most_copied_bytes(data: &ByteRange) -> u64 {
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

impl Log {
    /// Copies what committed records before `lsn` contain for objects to its place. `lsn` is at
    /// most the durable position.
    pub fn apply_through(&self, lsn: u64) -> Result<()> {
        if at_place(&self.control().applied_lsn) >= lsn {
            return Ok(());
        }
        let maintaining = self.maintain()?;
        let from_lsn = self.control().applied_lsn.load(Relaxed);
        if from_lsn >= lsn {
            return Ok(());
        }
        maintaining.apply(&self.committed_between(from_lsn, lsn)?, lsn)
    }

    pub(crate) fn committed_between(&self, from_lsn: u64, to_lsn: u64) -> Result<Committed> {
        let reader = self.handle.log_reader();
        let mut committed = Committed::default();
        if self.control().content_end_lsn.load(Relaxed) <= from_lsn {
            return Ok(committed);
        }
        let end = reader.scan(from_lsn, to_lsn, |record| {
            // Pages that were freed since are not reused yet, so writing to them is harmless.
            committed.add(&reader, record, None)
        })?;
        if end.lsn == to_lsn {
            Ok(committed)
        } else {
            Err(self.handle.damaged(format!("the log at {}", end.lsn), end.reason))
        }
    }
}

impl Maintaining<'_> {
    /// Copies to its place what was committed before `lsn` and is not there yet.
    pub fn apply(&self, committed: &Committed, lsn: u64) -> Result<()> {
        let Handle { media, heartbeat, members, .. } = &*self.log().handle;
        let control = self.log().control();
        if control.applied_lsn.load(Relaxed) >= lsn {
            return Ok(());
        }
        let copy = || committed.copy_to_place(&**media, || members.check_kept());
        let copied = heartbeat.while_media_work(Held::Maintenance, copy);
        copied.inspect_err(|error| {
            if let PoolError::Media(error) = error {
                self.log().handle.fail_at_media(FailureKind::Data, &error.source);
            }
        })?;
        note_at_place(&control.applied_lsn, lsn);
        Ok(())
    }
}

impl Log {
    /// Passes to `read` what a reader, which cannot change the media, must see in place of their
    /// content. `read` runs again if the log was reused during it, or if a record for `range` that
    /// was undecided was decided. A reader that shares nothing with the writers has only `overlay`.
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
            // Before the positions: a record that is decided later is before the durable position,
            // or found undecided.
            let pending = control.appends.lsns();
            let from_lsn = at_place(&control.applied_lsn);
            let to_lsn = control.appends.durable_lsn();
            let value = self.committed_between(from_lsn, to_lsn).and_then(|committed| {
                let undecided = self.undecided(range, pending.iter().filter(|l| **l >= to_lsn));
                read(&Seen { committed: &committed, undecided: &undecided.pages })
                    .map(|value| (value, undecided.lsn))
            });
            // Acquire: the reads above come before the load below.
            fence(Acquire);
            if control.tail_lsn.load(Relaxed) > from_lsn {
                continue;
            }
            let (value, undecided_lsn) = value?;
            // The undecided records were not copied to their place during the read if the durable
            // position is still not past them.
            if undecided_lsn.is_none_or(|lsn| control.appends.durable_lsn.load(Relaxed) <= lsn) {
                return Ok(value);
            }
        }
    }

    /// Pages of `range` that whole records at these positions are for: it is undecided whether the
    /// records will count.
    fn undecided<'a>(
        &self,
        range: ByteRange,
        positions: impl Iterator<Item = &'a u64>,
    ) -> Undecided {
        let reader = self.handle.log_reader();
        let mut undecided = Undecided { pages: Committed::default(), lsn: None };
        for &lsn in positions {
            // An incomplete record is for an object whose writer lives, so not for one that the
            // caller could lock.
            let Ok(record) = reader.read(lsn) else { continue };
            if let Ok(true) = undecided.pages.add_targets(&reader, &record, range) {
                undecided.lsn = Some(undecided.lsn.map_or(lsn, |first: u64| first.min(lsn)));
            }
        }
        undecided
    }
}

struct Undecided {
    pages: Committed,
    /// The position of the first such record.
    lsn: Option<u64>,
}

/// The log's content for a reader.
pub(crate) struct Seen<'a> {
    pub committed: &'a Committed,
    /// Pages that may be written to during the read; the copies have their present content.
    undecided: &'a Committed,
}

impl Seen<'_> {
    /// Pages inside `range` that a reader must copy, with their place.
    pub fn within(&self, range: ByteRange) -> impl Iterator<Item = (u64, &LoggedPage)> + '_ {
        let undecided = (self.undecided.within(range))
            .filter(|(place, _)| !self.committed.pages.contains_key(place));
        self.committed.within(range).chain(undecided)
    }
}
