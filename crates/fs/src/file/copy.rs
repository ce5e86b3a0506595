//! Copying a range from one open file to another.

use std::ops::Range;

use aquifer_pool::format::file::MAX_FILE_BYTES;

use super::write::{At, WriteHow};
use super::written::Written;
use super::{FallocateMode, File};
use crate::error::{FsError, Result};

/// How much is copied at a time.
const COPIED_AT_ONCE_BYTES: u64 = 1 << 20;

impl File {
    /// Copies `range` of this file to `to`, from `at_bytes` on, and returns how many bytes were
    /// copied: fewer if this file ends before the range does. Holes stay holes, also at the end. As
    /// `copy_file_range`.
    ///
    /// The bytes are copied front to back, in parts; other calls may come in between. If the call
    /// fails, the parts before that are there; [`File::copy_range_with`] tells how long they are. In a [noted](aquifer_pool::Pool::noting) request, the
    /// result of a transaction that makes a hole is that of the one before.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.write("/f", "some text")?;
    /// let from = files.open_file("/f")?;
    /// let to = files.create_file("/g")?;
    /// assert_eq!(from.copy_range(5..100, &to, 2)?, 4);
    /// assert_eq!(files.read("/g")?, b"\0\0text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Options`] if the ranges overlap in one file, or `to` belongs to another pool
    /// ([`FsError::OtherPool`]); [`FsError::NotOpenFor`] if `to` is open for appending; those of
    /// [`File::read_at`] and [`File::write_at`].
    pub fn copy_range(&self, range: Range<u64>, to: &File, at_bytes: u64) -> Result<u64> {
        let copied = self.copy_range_with(range, to, at_bytes, WriteHow::default()).all()?;
        Ok(copied.end - copied.start)
    }

    /// As [`File::copy_range`], and writes `to` as `how` says. Returns the range of `to` that was
    /// written, with the error that ended the copy early.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::WriteHow;
    ///
    /// files.write("/f", "some text")?;
    /// let (from, to) = (files.open_file("/f")?, files.create_file("/g")?);
    /// let modified = to.metadata()?.modified()?;
    /// let how = WriteHow { keeps_times: true, ..WriteHow::default() };
    /// assert_eq!(from.copy_range_with(0..4, &to, 0, how).all()?, 0..4);
    /// assert_eq!(to.metadata()?.modified()?, modified);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The errors are those of [`File::copy_range`].
    pub fn copy_range_with(
        &self,
        range: Range<u64>,
        to: &File,
        at_bytes: u64,
        how: WriteHow,
    ) -> Written {
        Written::by(at_bytes..at_bytes, |written| self.copy_from(range, to, written, how))
    }

    /// As [`File::copy_range_with`], to the start of the empty range `written`, which becomes what was
    /// written, also if the call fails.
    fn copy_from(
        &self,
        range: Range<u64>,
        to: &File,
        written: &mut Range<u64>,
        how: WriteHow,
    ) -> Result<()> {
        let at_bytes = written.start;
        self.check_reads()?;
        to.check_writes()?;
        if to.opened.flags.append {
            return Err(FsError::NotOpenFor { what: "writing at offsets, but for appending" });
        }
        if self.files().shared.pool.uuid() != to.files().shared.pool.uuid() {
            return Err(FsError::OtherPool);
        }
        let end = range.end.min(self.metadata()?.len());
        let len_bytes = end.saturating_sub(range.start);
        let target_end = at_bytes.checked_add(len_bytes).filter(|end| *end <= MAX_FILE_BYTES);
        let target_end = target_end.ok_or(FsError::FileTooLarge)?;
        if self.node() == to.node() && range.start < target_end && at_bytes < end {
            return Err(FsError::Options {
                path: self.as_path(),
                reason: "a range cannot be copied over itself",
            });
        }
        let mut buffer = vec![0; COPIED_AT_ONCE_BYTES.min(len_bytes) as usize];
        let at = |from_bytes: u64| at_bytes + (from_bytes - range.start);
        let mut done = range.start;
        while done < end {
            // What is not known to be a hole is copied.
            let data = self.next_data(done)?.filter(|data| data.start < end);
            let hole_end = data.as_ref().map_or(end, |data| data.start.max(done));
            to.copy_hole(at(hole_end), written, how)?;
            done = hole_end;
            let data_end = data.map_or(done, |data| data.end.min(end));
            while done < data_end {
                let part = &mut buffer[..COPIED_AT_ONCE_BYTES.min(data_end - done) as usize];
                let count = self.read_at(part, done)?;
                if count == 0 {
                    // It has become shorter.
                    return Ok(());
                }
                let copied = to.write_with(&part[..count], At::Offset(written.end), how);
                written.end = copied.range().end;
                copied.all()?;
                done += count as u64;
            }
        }
        Ok(())
    }

    /// Makes what lies between the end of `written` and `end_bytes` read as zeros, as a hole; it comes
    /// to lie inside the file. Extends `written` by it.
    fn copy_hole(&self, end_bytes: u64, written: &mut Range<u64>, how: WriteHow) -> Result<()> {
        if end_bytes <= written.end {
            return Ok(());
        }
        // Also what lies behind the end: room that the file was given to grow. The length changes
        // last, so that a failed copy does not make the file longer than it says.
        let len_bytes = end_bytes - written.end;
        self.allocate_with(FallocateMode::PunchHole, written.end, len_bytes, how)?;
        // Another writer may have made it longer meanwhile.
        self.extend_to(end_bytes, how)?;
        written.end = end_bytes;
        Ok(())
    }
}
