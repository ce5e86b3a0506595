//! Advice about a view's accesses: see [`crate::advice`].

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::FileView;
use crate::advice::Advice;
use crate::error::{MapError, Result};
use crate::populate::Span;
use crate::random::Refused;

impl FileView {
    /// Advises how a range of the view, counted from its first byte, will be used. The advice ends
    /// with the view. Has no effect on a snapshot ([`FileView::is_snapshot`]) or an empty view,
    /// which are in memory.
    ///
    /// # Errors
    /// [`MapError::OutsideView`]; [`MapError::TooManyMappings`], because each random range splits
    /// the mapping in the kernel; [`MapError::Map`] if the kernel refused.
    ///
    /// ```
    /// use aquifer_mapper::{Advice, FileAccess, Mapper};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("log");
    /// # std::fs::write(&path, vec![7; 1 << 20])?;
    /// let view = Mapper::builder().build()?.map(&path, FileAccess::Read, ..)?;
    /// view.advise(Advice::Sequential, 0..view.len_bytes())?; // mapped ahead by a helper
    /// assert_eq!(view.read(|bytes| bytes.to_vec().len())?, 1 << 20);
    /// # Ok(())
    /// # }
    /// ```
    pub fn advise(&self, advice: Advice, range: Range<u64>) -> Result<()> {
        let range = self.in_file(&range)?;
        let ahead = &self.shared.ahead;
        let followed = match (&self.mapped, &self.stores) {
            (Some(mapped), _) => {
                let span: Arc<dyn Span> = mapped.clone();
                let (offsets, random) = (mapped.in_mapping(&range), &mapped.random);
                self.advised.follow(advice, ahead, &span, offsets, &mapped.may_park, random)
            }
            (None, Some(stores)) => {
                let span = stores.file.fetched();
                let offsets = span.offset_of(range.start)..span.offset_of(range.end);
                let (span, never): (Arc<dyn Span>, _) = (span, AtomicBool::new(false));
                self.advised.follow(advice, ahead, &span, offsets, &never, &stores.random)
            }
            (None, None) => return Ok(()),
        };
        followed.map_err(|refused| {
            let (path, vmas) = (self.path().to_owned(), self.shared.heap.vmas());
            match refused {
                Refused::Vmas => {
                    let (used, limit) = (vmas.used(), vmas.limit());
                    MapError::TooManyMappings { path, used, limit }
                }
                Refused::Kernel(source) => {
                    MapError::Map { path, len_bytes: range.end - range.start, source }
                }
            }
        })
    }
}
