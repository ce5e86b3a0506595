//! The content that the log has for one page: a whole page, if there is one, and the later patches.
//!
//! Patches of a page that is patched repeatedly are merged from time to time: the memory for a page
//! is bounded by its size, however long the log is.

use crate::format::PAGE_BYTES;
use crate::format::patch::GRAIN_BYTES;
use crate::media::{Media, MediaError};

const PAGE: usize = PAGE_BYTES as usize;
/// The length from which patches are merged, and then each time it has doubled.
const MERGE_FROM_BYTES: usize = 1024;

/// The content of a page as of some position in the log.
#[derive(Debug, Clone, Default)]
pub(crate) struct LoggedPage {
    /// The offset on media of the page that is patched: `None` for its place.
    source: Option<u64>,
    /// Offset, length and bytes of each patch, in the order of the log.
    patches: Vec<u8>,
    merged_bytes: usize,
}

impl LoggedPage {
    /// Sets the offset of the whole page on media: earlier patches no longer count.
    pub fn replace(&mut self, source: u64) {
        *self = LoggedPage { source: Some(source), ..LoggedPage::default() };
    }

    /// Adds a patch.
    pub fn patch(&mut self, offset: u16, bytes: &[u8]) {
        push(&mut self.patches, offset, bytes);
        if self.patches.len() >= MERGE_FROM_BYTES.max(2 * self.merged_bytes) {
            self.patches = merge(&self.patches);
            self.merged_bytes = self.patches.len();
        }
    }

    /// The offset on media of the page to be patched, given its place.
    pub fn source(&self, place: u64) -> u64 {
        self.source.unwrap_or(place)
    }

    /// Applies the patches to what lies at [`LoggedPage::source`].
    pub fn apply_patches(&self, page: &mut [u8]) {
        for_each(&self.patches, |offset, bytes| {
            page[offset..offset + bytes.len()].copy_from_slice(bytes);
        });
    }

    /// Reads the content of the page whose place is `place`.
    pub fn read(&self, media: &dyn Media, place: u64, page: &mut [u8]) -> Result<(), MediaError> {
        media.read_at(self.source(place), page)?;
        self.apply_patches(page);
        Ok(())
    }
}

fn push(patches: &mut Vec<u8>, offset: u16, bytes: &[u8]) {
    patches.extend_from_slice(&offset.to_le_bytes());
    patches.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    patches.extend_from_slice(bytes);
}

fn for_each(mut patches: &[u8], mut visit: impl FnMut(usize, &[u8])) {
    while let Some(([o0, o1, l0, l1], rest)) = patches.split_first_chunk::<4>() {
        let (bytes, behind) = rest.split_at(u16::from_le_bytes([*l0, *l1]).into());
        visit(u16::from_le_bytes([*o0, *o1]).into(), bytes);
        patches = behind;
    }
}

/// Merges patches into equivalent ones that do not overlap.
fn merge(patches: &[u8]) -> Vec<u8> {
    let mut page = [0; PAGE];
    let mut is_known = [false; PAGE / GRAIN_BYTES];
    for_each(patches, |offset, bytes| {
        page[offset..offset + bytes.len()].copy_from_slice(bytes);
        is_known[offset / GRAIN_BYTES..(offset + bytes.len()) / GRAIN_BYTES].fill(true);
    });
    let mut merged = Vec::with_capacity(patches.len());
    let mut grain = 0;
    while grain < is_known.len() {
        let count = is_known[grain..].iter().take_while(|known| **known).count();
        if count > 0 {
            let start = grain * GRAIN_BYTES;
            push(&mut merged, start as u16, &page[start..start + count * GRAIN_BYTES]);
        }
        grain += count.max(1);
    }
    merged
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_counter_that_is_written_for_ever_takes_no_more_room() {
        let mut page = LoggedPage::default();
        for value in 0..100_000u64 {
            page.patch(800, &value.to_le_bytes());
            page.patch(1600, &value.to_le_bytes());
        }
        assert!(page.patches.len() <= MERGE_FROM_BYTES);
        let mut bytes = [0; PAGE];
        page.apply_patches(&mut bytes);
        assert_eq!(bytes[800..808], 99_999u64.to_le_bytes());
        assert_eq!(bytes[1600..1608], 99_999u64.to_le_bytes());
    }

    #[test]
    fn a_whole_image_makes_earlier_patches_void() {
        let mut page = LoggedPage::default();
        page.patch(0, &[1; 8]);
        assert_eq!(page.source(4096), 4096);
        page.replace(8192);
        page.patch(8, &[2; 8]);
        assert_eq!(page.source(4096), 8192);
        let mut bytes = [0; PAGE];
        page.apply_patches(&mut bytes);
        assert_eq!(bytes[..16], [0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2]);
    }

    proptest! {
        #[test]
        fn merging_changes_nothing(patches in prop::collection::vec((0..500usize, 1..12usize, 1u8..), 0..400)) {
            let (mut page, mut wanted) = (LoggedPage::default(), [0; PAGE]);
            for (grain, grains, value) in patches {
                let bytes = vec![value; grains * GRAIN_BYTES];
                page.patch((grain * GRAIN_BYTES) as u16, &bytes);
                wanted[grain * GRAIN_BYTES..][..bytes.len()].copy_from_slice(&bytes);
            }
            let mut found = [0; PAGE];
            page.apply_patches(&mut found);
            prop_assert_eq!(&found[..], &wanted[..]);
            page.patches = merge(&page.patches);
            let mut merged = [0; PAGE];
            page.apply_patches(&mut merged);
            prop_assert_eq!(&merged[..], &wanted[..]);
        }
    }
}
