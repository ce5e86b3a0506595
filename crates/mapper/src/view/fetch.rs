//! Bringing ranges of a view in at once: see [`crate::prefetch`].

use std::ops::Range;
use std::sync::Arc;

use super::FileView;
use crate::descriptors::FileName;
#[allow(unused_imports, reason = "for the documentation")]
use crate::error::MapError;
use crate::error::Result;
use crate::prefetch::{Fetched, Prefetch, ToFetch, bring_in};

impl FileView {
    /// Checks some ranges. `None` if there is nothing to bring in.
    fn to_fetch(&self, ranges: &[Range<u64>]) -> Result<Option<ToFetch>> {
        let ranges: Vec<_> =
            ranges.iter().map(|range| self.in_file(range)).collect::<Result<_>>()?;
        let span: Arc<dyn Fetched> = match (&self.stores, &self.mapped) {
            (Some(stores), _) => stores.file.fetched(),
            (None, Some(mapped)) => mapped.clone(),
            (None, None) => return Ok(None),
        };
        let offsets = |range: Range<u64>| span.offset_of(range.start)..span.offset_of(range.end);
        let ranges: Vec<_> =
            ranges.into_iter().filter(|range| !range.is_empty()).map(offsets).collect();
        Ok((!ranges.is_empty()).then_some((span, ranges)))
    }

    /// Brings ranges of the view, counted from its first byte, into memory and maps them. They are
    /// read concurrently, where loads would read them one by one. Does not affect stores.
    ///
    /// # Errors
    /// [`MapError::OutsideView`], before anything is read; [`MapError::Fault`] with the first byte
    /// that could not be read.
    pub fn touch_many(&self, ranges: &[Range<u64>]) -> Result<()> {
        let Some((span, ranges)) = self.to_fetch(ranges)? else { return Ok(()) };
        bring_in(&*span, &ranges).map_err(|missing| span.why(&self.name, missing.offset))
    }

    /// As [`FileView::touch_many`], in the background: await the result, or wait for it. The view
    /// may be dropped before that.
    ///
    /// # Errors
    /// [`MapError::OutsideView`], immediately.
    ///
    /// ```
    /// use aquifer_mapper::{FileAccess, Mapper};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("records");
    /// # std::fs::write(&path, vec![7; 1 << 20])?;
    /// let view = Mapper::builder().build()?.map(&path, FileAccess::Read, ..)?;
    /// let records = [4096..8192, 500_000..500_100, 0..100];
    /// let coming = view.prefetch(&records)?; //  all at once, in the background
    /// coming.wait()?; //                         or `coming.await?`, in any executor
    /// assert_eq!(view.get::<u8>(500_000)?, 7);
    /// # Ok(())
    /// # }
    /// ```
    pub fn prefetch(&self, ranges: &[Range<u64>]) -> Result<Prefetch> {
        let ranges = self.to_fetch(ranges)?;
        let (name, mark) = (FileName::of(self.path().to_owned()), self.shared.mark);
        Ok(Prefetch::start(ranges, &self.shared.prefetcher, name, mark))
    }
}
