//! Copies of pages, in chunks: an allocation for each page would take a system call, because the C
//! library extends the memory of threads other than the first one by what is asked for.

use std::collections::HashMap;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_vm::dirty::PageIndex;

pub(crate) const PAGE: usize = PAGE_BYTES as usize;

/// The bytes of a page. A copy of a page takes several times as long if the buffer lies a few bytes
/// ahead of the page modulo 4,096 ([`copy_racy`](aquifer_sys::memory::copy_racy)), which this
/// alignment excludes.
#[derive(Clone)]
#[repr(align(64))]
pub(crate) struct Page(pub [u8; PAGE]);

/// The pages of a chunk.
const CHUNK_PAGES: usize = 64;

/// Pages by their index. They take memory until all are dropped.
#[derive(Default)]
pub(crate) struct Twins {
    places: HashMap<PageIndex, usize>,
    /// All but the last one are full.
    chunks: Vec<Vec<Page>>,
    unused: Vec<usize>,
}

impl Twins {
    pub fn count(&self) -> u64 {
        self.places.len() as u64
    }

    /// How many pages they take memory for.
    pub fn held(&self) -> u64 {
        (self.places.len() + self.unused.len()) as u64
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub fn get(&self, page: PageIndex) -> Option<&[u8; PAGE]> {
        let place = *self.places.get(&page)?;
        Some(&self.chunks[place / CHUNK_PAGES][place % CHUNK_PAGES].0)
    }

    pub fn get_mut(&mut self, page: PageIndex) -> Option<&mut [u8; PAGE]> {
        let place = *self.places.get(&page)?;
        Some(&mut self.chunks[place / CHUNK_PAGES][place % CHUNK_PAGES].0)
    }

    /// Adds a page, or replaces it.
    pub fn insert(&mut self, page: PageIndex, bytes: &Page) {
        let reused = self.places.get(&page).copied().or_else(|| self.unused.pop());
        let place = reused.unwrap_or_else(|| self.extend(bytes));
        if reused.is_some() {
            self.chunks[place / CHUNK_PAGES][place % CHUNK_PAGES].0.copy_from_slice(&bytes.0);
        }
        self.places.insert(page, place);
    }

    fn extend(&mut self, bytes: &Page) -> usize {
        if self.chunks.last().is_none_or(|last| last.len() == CHUNK_PAGES) {
            self.chunks.push(Vec::with_capacity(CHUNK_PAGES));
        }
        let before = self.chunks.len() - 1;
        let last = &mut self.chunks[before];
        last.extend_from_slice(std::slice::from_ref(bytes));
        before * CHUNK_PAGES + last.len() - 1
    }

    pub fn remove(&mut self, page: PageIndex) {
        self.unused.extend(self.places.remove(&page));
        if self.places.is_empty() {
            *self = Twins::default();
        }
    }

    /// Drops all pages, and returns which there were.
    pub fn take(&mut self) -> impl Iterator<Item = PageIndex> {
        std::mem::take(self).places.into_keys()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use aquifer_testkit::rng::Rng;

    use super::*;

    #[test]
    fn pages_are_found_as_in_a_map() {
        let mut rng = Rng::new(3);
        let (mut twins, mut model) = (Twins::default(), BTreeMap::new());
        for _ in 0..5000 {
            let page = PageIndex(rng.below(300));
            match rng.below(100) {
                0 => {
                    let mut taken: Vec<_> = twins.take().collect();
                    taken.sort_unstable();
                    assert!(taken.into_iter().eq(std::mem::take(&mut model).into_keys()));
                }
                1..40 => {
                    twins.remove(page);
                    model.remove(&page);
                }
                number => {
                    twins.insert(page, &Page([number as u8; PAGE]));
                    model.insert(page, number as u8);
                }
            }
            if let Some(bytes) = twins.get_mut(PageIndex(7)) {
                bytes[9] = 200;
            }
            assert_eq!((twins.count(), twins.is_empty()), (model.len() as u64, model.is_empty()));
            assert!(twins.held() >= twins.count() && (twins.held() == 0) == twins.is_empty());
            for (&page, &number) in &model {
                let bytes = twins.get(page).unwrap();
                let changed = if page.0 == 7 { 200 } else { number };
                assert_eq!((bytes[8], bytes[9], bytes[PAGE - 1]), (number, changed, number));
            }
        }
        assert!(twins.chunks.len() <= 300usize.div_ceil(CHUNK_PAGES), "places are used again");
    }
}
