//! Patches: the changed bytes of pages that a commit changed only a little.
//!
//! ```text
//!  ┌──────────┬────────────┬─────────┬────────────┐┌──────────
//!  │ page u32 │ offset u16 │ len u16 │ len bytes  ││ next …      page: from the start of the entry's target;
//!  └──────────┴────────────┴─────────┴────────────┘└──────────   offset: inside the page
//! ```
//!
//! Offsets and lengths are multiples of eight. Patches ascend and do not overlap, so each byte
//! occurs at most once.
//!
//! ```
//! use aquifer_format::patch::Patches;
//!
//! let (base, mut now) = ([0; 4096], [0; 4096]);
//! now[100] = 1;
//! let mut patches = Patches::new();
//! assert!(patches.push_difference(3, &base, &now, 2048));
//! let patch = patches.iter().next().expect("one word differs");
//! assert_eq!((patch.page, patch.offset, patch.bytes), (3, 96, &[0, 0, 0, 0, 1, 0, 0, 0][..]));
//! ```
//!
//! # Why replay is correct
//! A patch holds the new values of bytes, and every byte that changed since the durable tail is in
//! a patch, or a whole page, after the tail. On media a page has its state at the tail, or a later
//! one, or is torn between such states: replay writes each byte that differs between them, the last
//! value last. So the result is the state at the end of the log, wherever replay began and however
//! often it is repeated.

use crate::{FormatError, PAGE_BYTES};

/// Patches begin and end at multiples of this.
pub const GRAIN_BYTES: usize = 8;
/// Bytes before the content of each patch.
pub const HEADER_BYTES: usize = 8;

const PAGE: usize = PAGE_BYTES as usize;
/// The unit of the comparison where nothing differs.
const LINE_BYTES: usize = 64;

/// New bytes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patch<'a> {
    /// The page, counted from the start of the target.
    pub page: u32,
    /// Their offset in the page.
    pub offset: u16,
    /// Their new values.
    pub bytes: &'a [u8],
}

/// Patches as they are encoded in a record: valid by construction.
#[derive(Debug, Clone, Default)]
pub struct Patches {
    bytes: Vec<u8>,
    last: Option<(u32, u16)>,
}

impl Patches {
    /// Creates an empty list.
    pub fn new() -> Patches {
        Patches::default()
    }

    /// Removes all patches and keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.last = None;
    }

    /// Their encoding in a record.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The length of that encoding.
    pub fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The number of pages from the start of the target up to and including the last patched one.
    pub fn page_count(&self) -> u64 {
        self.last.map_or(0, |(page, _)| u64::from(page) + 1)
    }

    /// All patches, in order.
    pub fn iter(&self) -> impl Iterator<Item = Patch<'_>> {
        iter(&self.bytes)
    }

    /// Adds the patches that turn `base` into `now`, both a page long, if they take at most
    /// `most_bytes`. Returns whether it did.
    ///
    /// # Panics
    /// If `page` is not after all pages patched so far.
    pub fn push_difference(
        &mut self,
        page: u32,
        base: &[u8],
        now: &[u8],
        most_bytes: usize,
    ) -> bool {
        assert!(self.last.is_none_or(|(last, _)| last < page), "pages are patched in order");
        let start = self.bytes.len();
        let mut last = None;
        for_each_difference(base, now, |from, to| {
            self.bytes.extend_from_slice(&page.to_le_bytes());
            self.bytes.extend_from_slice(&(from as u16).to_le_bytes());
            self.bytes.extend_from_slice(&((to - from) as u16).to_le_bytes());
            self.bytes.extend_from_slice(&now[from..to]);
            last = Some((page, to as u16));
            self.bytes.len() - start <= most_bytes
        });
        if self.bytes.len() - start > most_bytes {
            self.bytes.truncate(start);
            return false;
        }
        self.last = last.or(self.last);
        true
    }
}

impl Patches {
    /// Adds a patch of `len_bytes` bytes of a page, and returns them for the caller to fill.
    ///
    /// # Panics
    /// If the patch is empty, not whole grains, not inside the page, or not behind all others.
    pub fn push(&mut self, page: u32, offset: usize, len_bytes: usize) -> &mut [u8] {
        let is_whole = offset.is_multiple_of(GRAIN_BYTES) && len_bytes.is_multiple_of(GRAIN_BYTES);
        assert!(is_whole && len_bytes > 0 && offset + len_bytes <= PAGE, "grains of a page");
        let first = (page, offset as u16);
        assert!(self.last.is_none_or(|last| last <= first), "patches ascend");
        self.bytes.extend_from_slice(&page.to_le_bytes());
        self.bytes.extend_from_slice(&(offset as u16).to_le_bytes());
        self.bytes.extend_from_slice(&(len_bytes as u16).to_le_bytes());
        self.last = Some((page, (offset + len_bytes) as u16));
        let start = self.bytes.len();
        self.bytes.resize(start + len_bytes, 0);
        &mut self.bytes[start..]
    }
}

/// Calls `visit` with each range of grains that differs, until it returns false. Ranges with a gap
/// of at most a header's length are joined.
fn for_each_difference(base: &[u8], now: &[u8], mut visit: impl FnMut(usize, usize) -> bool) {
    assert!(base.len() == PAGE && now.len() == PAGE, "pages are compared");
    let mut open: Option<(usize, usize)> = None;
    let lines = base.as_chunks::<LINE_BYTES>().0.iter().zip(now.as_chunks::<LINE_BYTES>().0);
    for (line, (base, now)) in lines.enumerate().filter(|(_, (base, now))| differ(base, now)) {
        let grains = base.as_chunks::<GRAIN_BYTES>().0.iter().zip(now.as_chunks::<GRAIN_BYTES>().0);
        for (grain, _) in grains.enumerate().filter(|(_, (base, now))| base != now) {
            let from = line * LINE_BYTES + grain * GRAIN_BYTES;
            let to = from + GRAIN_BYTES;
            match &mut open {
                Some((_, end)) if from <= *end + HEADER_BYTES => *end = to,
                _ => {
                    if let Some((from, to)) = open.replace((from, to))
                        && !visit(from, to)
                    {
                        return;
                    }
                }
            }
        }
    }
    if let Some((from, to)) = open {
        visit(from, to);
    }
}

/// Whether two lines differ, without a call of `memcmp` for each.
fn differ(base: &[u8; LINE_BYTES], now: &[u8; LINE_BYTES]) -> bool {
    let words = base.as_chunks::<8>().0.iter().zip(now.as_chunks::<8>().0);
    words.fold(0, |bits, (base, now)| bits | u64::from_ne_bytes(*base) ^ u64::from_ne_bytes(*now))
        != 0
}

/// Validates the patches of a record, for a target of `pages` pages.
///
/// # Errors
/// What is wrong with them.
pub fn validate(bytes: &[u8], pages: u64) -> Result<(), FormatError> {
    let field = |field, value| Err(FormatError::Field { field, value });
    let mut rest = bytes;
    let mut end = (0, 0);
    while !rest.is_empty() {
        let Some((page, offset, len)) = header(rest) else { return Err(FormatError::Short) };
        let is_aligned = offset.is_multiple_of(GRAIN_BYTES) && len.is_multiple_of(GRAIN_BYTES);
        if !is_aligned || len == 0 || offset + len > PAGE {
            return field("patch", (offset as u64) << 16 | len as u64);
        }
        if u64::from(page) >= pages || (page, offset) < end {
            return field("patched page", page.into());
        }
        end = (page, offset + len);
        match rest.split_at_checked(HEADER_BYTES + len) {
            Some((_, behind)) => rest = behind,
            None => return Err(FormatError::Short),
        }
    }
    Ok(())
}

fn header(bytes: &[u8]) -> Option<(u32, usize, usize)> {
    let (header, _) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let [p0, p1, p2, p3, o0, o1, l0, l1] = *header;
    let (offset, len) = (u16::from_le_bytes([o0, o1]), u16::from_le_bytes([l0, l1]));
    Some((u32::from_le_bytes([p0, p1, p2, p3]), offset.into(), len.into()))
}

/// Iterates over valid patches, in order.
pub fn iter(bytes: &[u8]) -> impl Iterator<Item = Patch<'_>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (page, offset, len) = header(rest)?;
        let (patch, behind) = rest[HEADER_BYTES..].split_at_checked(len)?;
        rest = behind;
        Some(Patch { page, offset: offset as u16, bytes: patch })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn page_of(words: &[(usize, u64)]) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        for &(word, value) in words {
            page[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        page
    }

    fn apply(patches: &Patches, page: u32, target: &mut [u8]) {
        for patch in patches.iter().filter(|patch| patch.page == page) {
            let offset = usize::from(patch.offset);
            target[offset..offset + patch.bytes.len()].copy_from_slice(patch.bytes);
        }
    }

    #[test]
    fn near_differences_are_one_patch_and_far_ones_are_two() {
        let base = page_of(&[]);
        let now = page_of(&[(0, 1), (2, 1), (5, 1), (511, 1)]);
        let mut patches = Patches::new();
        assert!(patches.push_difference(7, &base, &now, PAGE));
        let found: Vec<_> = patches.iter().map(|patch| (patch.offset, patch.bytes.len())).collect();
        assert_eq!(found, [(0, 24), (40, 8), (4088, 8)]);
        assert_eq!(patches.len_bytes(), 3 * 8 + 24 + 8 + 8);
        assert_eq!(patches.page_count(), 8);
    }

    #[test]
    fn equal_pages_need_no_patch_and_different_ones_too_many_bytes() {
        let (zero, one) = (page_of(&[]), vec![1; PAGE]);
        let mut patches = Patches::new();
        assert!(patches.push_difference(0, &one, &one, 0));
        assert!(patches.is_empty());
        assert!(!patches.push_difference(1, &zero, &one, PAGE));
        assert!(patches.is_empty(), "nothing of what did not fit is left");
        assert!(patches.push_difference(1, &zero, &one, PAGE + HEADER_BYTES));
        validate(patches.as_bytes(), 2).unwrap();
        assert!(validate(patches.as_bytes(), 1).is_err(), "beyond the target");
    }

    #[test]
    fn patches_of_given_bytes_follow_each_other() {
        let mut patches = Patches::new();
        patches.push(2, 8, 8).fill(1);
        patches.push(2, 16, 4080).fill(2);
        patches.push(5, 0, PAGE).fill(3);
        validate(patches.as_bytes(), 6).unwrap();
        let found: Vec<_> = patches.iter().map(|patch| (patch.page, patch.bytes[0])).collect();
        assert_eq!(found, [(2, 1), (2, 2), (5, 3)]);
        let refused = [(5, 8, 8), (6, 4, 8), (6, 0, 12), (6, 0, 0), (6, 4088, 16)];
        for (page, offset, len_bytes) in refused {
            let mut patches = patches.clone();
            let push = std::panic::AssertUnwindSafe(|| {
                patches.push(page, offset, len_bytes);
            });
            std::panic::catch_unwind(push).expect_err("not a patch that may follow");
        }
    }

    #[test]
    fn what_is_not_in_order_or_not_whole_is_refused() {
        let patch = |page: u32, offset: u16, len: u16| {
            let mut bytes = page.to_le_bytes().to_vec();
            bytes.extend(offset.to_le_bytes());
            bytes.extend(len.to_le_bytes());
            bytes.resize(bytes.len() + usize::from(len), 5);
            bytes
        };
        let of = |patches: &[Vec<u8>]| validate(&patches.concat(), 10);
        of(&[patch(1, 0, 8), patch(1, 8, 8), patch(2, 0, 4096)]).unwrap();
        assert!(of(&[patch(1, 8, 8), patch(1, 0, 8)]).is_err(), "descending");
        assert!(of(&[patch(2, 8, 8), patch(1, 16, 8)]).is_err(), "descending pages");
        assert!(of(&[patch(1, 0, 16), patch(1, 8, 8)]).is_err(), "overlapping");
        assert!(of(&[patch(1, 0, 0)]).is_err(), "empty");
        assert!(of(&[patch(1, 4, 8)]).is_err(), "offset not aligned");
        assert!(of(&[patch(1, 0, 12)]).is_err(), "length not aligned");
        assert!(of(&[patch(1, 4088, 16)]).is_err(), "beyond the page");
        assert!(of(&[patch(10, 0, 8)]).is_err(), "beyond the target");
        assert!(validate(&patch(1, 0, 16)[..20], 10).is_err(), "cut short");
        assert!(validate(&[0; 7], 10).is_err(), "no whole header");
    }

    proptest! {
        #[test]
        fn patches_make_one_page_of_another(
            base in prop::collection::vec((0..512usize, any::<u64>()), 0..40),
            now in prop::collection::vec((0..512usize, any::<u64>()), 0..40),
        ) {
            let (mut base, now) = (page_of(&base), page_of(&now));
            let mut patches = Patches::new();
            prop_assert!(patches.push_difference(3, &base, &now, usize::MAX));
            validate(patches.as_bytes(), 4).unwrap();
            apply(&patches, 3, &mut base);
            prop_assert_eq!(base, now);
        }
    }
}
