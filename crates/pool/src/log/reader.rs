//! Reading the log as it lies on media.

use crate::error::Result;
use crate::format::layout::Layout;
use crate::format::record::{Header, LogIdentity, MIN_CLOSE_BYTES, RECORD_UNIT_BYTES, Record};
use crate::format::{FormatError, PAGE_BYTES};
use crate::media::{ByteRange, Media, MediaError};
use crate::mutant::{self, Mutant};
use crate::shared::handle::Handle;

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The media cannot be read.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// There is no whole record.
    #[error(transparent)]
    Format(#[from] FormatError),
}

/// The end of the readable log, and the reason.
#[derive(Debug)]
pub struct LogEnd {
    /// The position behind the last whole record.
    pub lsn: u64,
    /// Why there is no further record.
    pub reason: FormatError,
}

/// The error field of a record that does not count because no marked record follows.
pub const UNMARKED: &str = "mark";

/// The part of a log that counts.
pub struct Counted {
    /// The end of the records that count.
    pub end: LogEnd,
    /// Exposed ranges that no mark shows to be durable.
    pub unmarked: Vec<ByteRange>,
}

/// A log as it lies on media.
#[derive(Clone, Copy)]
pub struct LogReader<'a> {
    /// The media.
    pub media: &'a dyn Media,
    /// The places of the pool's parts.
    pub layout: Layout,
    /// What its records carry.
    pub identity: LogIdentity,
    /// A deliberate mistake, for tests.
    pub mutant: Option<Mutant>,
}

impl LogReader<'_> {
    /// Reads and checks the record at `lsn`.
    pub fn read(&self, lsn: u64) -> std::result::Result<Record, ReadError> {
        let log = self.layout.log();
        let offset = lsn % log.len_bytes;
        let position = log.offset_bytes + offset;
        // Up to the next page boundary: in most cases the whole record.
        let first_bytes = PAGE_BYTES - offset % PAGE_BYTES;
        let mut page = vec![0; first_bytes as usize];
        self.media.read_at(position, &mut page)?;
        let header = Header::decode(&page, lsn, log.len_bytes, self.identity)?;
        let wanted_bytes = match (header.is_close, header.is_skip) {
            (true, _) => MIN_CLOSE_BYTES,
            (false, true) => RECORD_UNIT_BYTES,
            (false, false) => header.len_bytes,
        };
        page.resize(wanted_bytes as usize, 0);
        if wanted_bytes > first_bytes {
            self.media.read_at(position + first_bytes, &mut page[first_bytes as usize..])?;
        }
        if mutant::is(self.mutant, Mutant::NoChecksum) {
            return Ok(Record::decode_unchecked(header, page)?);
        }
        Ok(Record::decode(header, page)?)
    }

    /// Calls `visit` for each whole record from `from_lsn` on, at most up to `to_lsn`, in order.
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
        // The log is at most one round of the ring: more records would have overwritten the first
        // ones.
        let limit = to_lsn.min(from_lsn + self.layout.log().len_bytes);
        while lsn < limit {
            match self.read(lsn) {
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

    /// Calls `visit` for each record from `from_lsn` on that counts, in order. The log ends before
    /// the first packed record that exposes bytes that may not be durable: no marked record
    /// follows, and it was written in another life, or bytes were lost.
    pub fn scan_counting(
        &self,
        from_lsn: u64,
        counts_unmarked: bool,
        mut visit: impl FnMut(&Record) -> Result<()>,
    ) -> Result<Counted> {
        let believes_all = counts_unmarked || mutant::is(self.mutant, Mutant::CountExposed);
        // The records from the first one on that counts only if a marked one follows.
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

    /// The highest position above `end_lsn` that a later record states as acknowledged: proof that
    /// the log was longer. `None` if there is no such record.
    pub fn acknowledged_behind(&self, tail_lsn: u64, end_lsn: u64) -> Result<Option<u64>> {
        const CHUNK_BYTES: u64 = 1 << 20;
        let log = self.layout.log();
        let limit_lsn = tail_lsn + log.len_bytes;
        let mut chunk = vec![0; CHUNK_BYTES.min(log.len_bytes) as usize];
        let mut acknowledged_lsn = None;
        // Bounds the work: forged headers may describe overlapping records, and each would be read
        // completely.
        let mut to_read_bytes = 4 * log.len_bytes;
        let mut first_lsn = end_lsn.next_multiple_of(RECORD_UNIT_BYTES);
        while first_lsn < limit_lsn {
            let position = first_lsn % log.len_bytes;
            let len_bytes =
                CHUNK_BYTES.min(log.len_bytes - position).min(limit_lsn - first_lsn) as usize;
            self.media.read_at(log.offset_bytes + position, &mut chunk[..len_bytes])?;
            // Scan every unit: packed records begin at any unit, and the lost record may be the
            // close before these.
            let units = chunk[..len_bytes].chunks_exact(RECORD_UNIT_BYTES as usize);
            for (unit, lsn) in units.zip((first_lsn..).step_by(RECORD_UNIT_BYTES as usize)) {
                if let Ok(header) = Header::decode(unit, lsn, log.len_bytes, self.identity)
                    && header.acknowledged_lsn > acknowledged_lsn.unwrap_or(end_lsn)
                    && header.len_bytes <= to_read_bytes
                {
                    to_read_bytes -= header.len_bytes;
                    if (LogReader { mutant: None, ..*self }).read(lsn).is_ok() {
                        acknowledged_lsn = Some(header.acknowledged_lsn);
                    }
                }
            }
            first_lsn += len_bytes as u64;
        }
        Ok(acknowledged_lsn)
    }
}

impl Handle {
    /// The log of this pool.
    pub fn log_reader(&self) -> LogReader<'_> {
        LogReader {
            media: &*self.media,
            layout: self.layout,
            identity: self.identity(),
            mutant: self.mutant,
        }
    }
}
