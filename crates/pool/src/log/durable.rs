//! Making ranges of the media durable, and what a failure of that does to the pool.

use crate::error::Result;
use crate::log::locks::Log;
use crate::media::{ByteRange, MediaError};
use crate::shared::failure::FailureKind;
use crate::shared::handle::Handle;
use crate::shared::heartbeat::Held;

/// How many bytes are written back between two reports of progress.
pub(crate) const PART_BYTES: u64 = 16 << 20;

impl Log {
    /// Makes ranges durable that were written with
    /// [`Media::write_at`](crate::media::Media::write_at).
    pub fn make_durable(&self, ranges: &[ByteRange]) -> Result<()> {
        self.handle.check_writable()?;
        let Handle { media, heartbeat, .. } = &*self.handle;
        let written = heartbeat
            .while_media_work(Held::Log, || media.write_back(ranges).and_then(|()| media.flush()));
        self.or_fail(written)
    }

    /// The first half of [`Log::make_durable`].
    pub fn write_back(&self, ranges: &[ByteRange]) -> Result<()> {
        self.handle.check_writable()?;
        let Handle { media, heartbeat, .. } = &*self.handle;
        self.or_fail(heartbeat.while_media_work(Held::Log, || media.write_back(ranges)))
    }

    /// An error if bytes that were handed to the media were lost since.
    pub fn check_nothing_lost(&self) -> Result<()> {
        self.or_fail(self.handle.media.check_kept())
    }

    /// The second half of it.
    pub fn flush(&self) -> Result<()> {
        let Handle { media, heartbeat, .. } = &*self.handle;
        self.or_fail(heartbeat.while_media_work(Held::Log, || media.flush()))
    }

    /// [`Log::make_durable`] while the pool is being opened: the caller handles the failure.
    pub fn make_durable_in_recovery(&self, ranges: &[ByteRange]) -> Result<()> {
        let media = &self.handle.media;
        let written = media.write_back(ranges).and_then(|()| media.flush());
        Ok(written
            .inspect_err(|error| self.handle.fail_at_media(FailureKind::Data, &error.source))?)
    }

    /// [`Log::make_durable`] for any amount of data; calls `note_part` after each part.
    pub fn make_durable_in_parts(
        &self,
        mut ranges: Vec<ByteRange>,
        note_part: impl Fn(),
    ) -> Result<()> {
        self.handle.check_writable()?;
        ranges.sort_unstable();
        let Handle { media, heartbeat, .. } = &*self.handle;
        let written = heartbeat.while_media_work(Held::Log, || {
            parts(&ranges, PART_BYTES).try_for_each(|part| {
                media.write_back(&part)?;
                note_part();
                Ok(())
            })?;
            media.flush()
        });
        self.or_fail(written)
    }

    fn or_fail(&self, written: std::result::Result<(), MediaError>) -> Result<()> {
        if let Err(error) = written {
            self.handle.fail_at_media(FailureKind::Data, &error.source);
            self.note_loss();
            return Err(error.into());
        }
        // The kernel may have reported lost bytes to another process and not to this one.
        self.control().check_not_failed()
    }
}

/// The ranges in their order, split and grouped into parts of at most `most_bytes`.
pub(crate) fn parts(ranges: &[ByteRange], most_bytes: u64) -> impl Iterator<Item = Vec<ByteRange>> {
    let mut rest = ranges.iter().copied().filter(|range| range.len_bytes > 0);
    let mut cut: Option<ByteRange> = None;
    std::iter::from_fn(move || {
        let (mut part, mut left_bytes) = (Vec::new(), most_bytes);
        while left_bytes > 0
            && let Some(range) = cut.take().or_else(|| rest.next())
        {
            let len_bytes = range.len_bytes.min(left_bytes);
            part.push(ByteRange { len_bytes, ..range });
            left_bytes -= len_bytes;
            cut = (len_bytes < range.len_bytes).then(|| ByteRange {
                offset_bytes: range.offset_bytes + len_bytes,
                len_bytes: range.len_bytes - len_bytes,
            });
        }
        (!part.is_empty()).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_all_there_is_and_none_is_too_large() {
        let range = |offset_bytes, len_bytes| ByteRange { offset_bytes, len_bytes };
        let ranges = [range(0, 10), range(20, 0), range(30, 25), range(70, 5)];
        let cut: Vec<_> = parts(&ranges, 16).collect();
        let expected = [
            vec![range(0, 10), range(30, 6)],
            vec![range(36, 16)],
            vec![range(52, 3), range(70, 5)],
        ];
        assert_eq!(cut, expected);
        assert_eq!(parts(&[], 16).count(), 0);
    }
}
