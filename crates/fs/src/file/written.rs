//! The result of a write that takes several steps: a count and an error.
//!
//! A write takes several transactions if the free pages of the pool lie in many pieces, and each
//! transaction may fail. A count alone loses the error, an error alone loses the count. So such calls
//! return both, and the caller names the one that it needs.

use std::ops::Range;

use crate::error::{FsError, Result};

/// The bytes that a write has written, and the error that ended it early, if one did.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::{At, WriteHow};
///
/// let file = files.create_file("/f")?;
/// let written = file.write_with(b"text", At::End, WriteHow::default());
/// assert_eq!(written.range(), 0..4);
/// assert_eq!(written.all()?, 0..4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a write that ended early returns its error here"]
pub struct Written {
    range: Range<u64>,
    error: Option<FsError>,
}

impl Written {
    /// Runs `write`, which extends the end of `range` by what it writes, also if it fails.
    pub(super) fn by(
        mut range: Range<u64>,
        write: impl FnOnce(&mut Range<u64>) -> Result<()>,
    ) -> Written {
        let error = write(&mut range).err();
        Written { range, error }
    }

    /// Returns the range of the file that was written, also if the write ended early.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Returns the written range, or the error if the write ended early: for callers that cannot
    /// write the rest later.
    ///
    /// # Errors
    /// The error that ended the write; [`Written::range`] is written nevertheless.
    pub fn all(self) -> Result<Range<u64>> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.range),
        }
    }

    /// Returns the written range, which may be short, as `write(2)` does: for callers that write the
    /// rest in another call, which returns the error if it persists.
    ///
    /// # Errors
    /// The error that ended the write, if no byte was written.
    pub fn part(self) -> Result<Range<u64>> {
        match self.error {
            Some(error) if self.range.is_empty() => Err(error),
            _ => Ok(self.range),
        }
    }
}
