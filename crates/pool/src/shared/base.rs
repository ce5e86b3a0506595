//! The base of a segment: the pages of metadata that did not change since the pool was closed
//! cleanly.
//!
//! A pool that was closed cleanly opens without reading its metadata. A page of the image is
//! *absent* until it is about to be changed: it is read from media by each process that needs it,
//! into memory of that process, and verified against the digest that the close has saved. Before its
//! first change a page becomes *present*: it is copied into the segment, where all processes see it
//! from then on ([`Segment::materialise`](crate::shared::segment::Segment::materialise)).
//!
//! ```text
//!   slot n, page n / 8
//!     present? ── yes ──▶ the image, in shared memory
//!        │ no
//!     in the base? ── no ──▶ never used
//!        │ yes
//!     read by this process? ── yes ──▶ its own copy
//!        │ no
//!     read 4 KiB, verify ──▶ store into its own memory, then say so
//! ```
//!
//! # Why a copy is right
//! An absent page does not change on media: a checkpoint writes only pages that were changed, and a
//! changed page is present. So any process may read it at any time, without a lock, and copies never
//! differ. A reader whose read of the media overlaps with the first checkpoint of the page finds a
//! digest that does not match, and then the page present.
//!
//! A thread that does not find the bit of presence, and uses its copy, may be late: but a present
//! page is changed only while the version of the image is odd, so consistent reads notice it, and
//! checks of a layout version load the bit behind the fence that they need in any case
//! ([`image_words::has_layout`](crate::shared::image_words::has_layout)).

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer_vm::ZeroedSlice;

use crate::error::{PoolError, Result};
use crate::format::inode::HEAD_SLOT;
use crate::format::layout::{Layout, SLOTS_PER_PAGE};
use crate::format::run::Run;
use crate::format::saved::{
    ENTRY_BYTES, HEADER_BYTES, Map, SavedHeader, SavedLayout, block_sum, check_page, header_sum,
    table_sum,
};
use crate::format::slot::named_runs;
use crate::format::slot_change::SLOT_WORDS;
use crate::format::superblock::Superblock;
use crate::format::{FormatError, PAGE_BYTES};
use crate::media::Media;
use crate::mutant::{self, Mutant};
use crate::shared::image_words::ImageSlot;

const BLOCK_BYTES: usize = PAGE_BYTES as usize;
const DIGESTS_PER_BLOCK: u64 = PAGE_BYTES / 8;
const PAGE_WORDS: usize = PAGE_BYTES as usize / 8;
/// If an eighth of so many pages was read, the others are.
const GROUP_PAGES: u64 = 64;
/// Pages that are read at once.
const AHEAD_PAGES: u64 = 8;

/// The saved state that the media have, verified as far as it was read, and the pages of metadata
/// that this process has read.
pub(crate) struct Base {
    media: Arc<dyn Media>,
    pool: Layout,
    pub header: SavedHeader,
    sum: u64,
    pub layout: SavedLayout,
    pub table: Vec<u8>,
    mutant: Option<Mutant>,
    /// The words of the pages, as in the image.
    words: ZeroedSlice<AtomicU64>,
    /// One bit for each page that was read.
    is_read: ZeroedSlice<AtomicU64>,
    /// One bit for each group whose pages were read together. Those of them that did not match then
    /// are present by now, or damaged.
    was_group_read: ZeroedSlice<AtomicU64>,
    /// The digests of the pages.
    digests: Vec<u8>,
}

fn no_addresses(source: std::io::Error) -> PoolError {
    PoolError::SharedMemory(aquifer_sys::shared_memory::SharedMemoryError::NoSpace {
        len_bytes: 0,
        source,
    })
}

impl Base {
    /// Reads the header with this checksum, its table and the digests; `None` if they do not match, or
    /// cannot be read.
    ///
    /// # Errors
    /// [`PoolError::SharedMemory`] if there are no addresses for the pages.
    pub fn open(
        media: &Arc<dyn Media>,
        superblock: &Superblock,
        sum: u64,
        mutant: Option<Mutant>,
    ) -> Result<Option<Base>> {
        let (pool, run) = (superblock.layout, superblock.saved);
        let layout = SavedLayout::new(&pool);
        if sum == 0 || run.pages < layout.pages() {
            return Ok(None);
        }
        let mut bytes = vec![0; (layout.table_pages * PAGE_BYTES) as usize];
        if media.read_at(run.bytes().offset_bytes, &mut bytes).is_err() {
            return Ok(None);
        }
        let encoded = bytes.first_chunk().expect("at least a page");
        let Some(header) = SavedHeader::decode(encoded).ok().filter(|_| header_sum(encoded) == sum)
        else {
            return Ok(None);
        };
        let table = bytes[HEADER_BYTES..][..layout.table_bytes()].to_vec();
        if header.run != run
            || header.table_sum != table_sum(&table)
            || header.used_slots > pool.slots()
        {
            return Ok(None);
        }
        let pages = header.used_slots.div_ceil(SLOTS_PER_PAGE);
        let slice = |words: u64| ZeroedSlice::new(words as usize).map_err(no_addresses);
        let mut base = Base {
            media: media.clone(),
            pool,
            header,
            sum,
            layout,
            table,
            mutant,
            words: slice(pages * PAGE_WORDS as u64)?,
            is_read: slice(pages.div_ceil(64))?,
            was_group_read: slice(pages.div_ceil(64 * GROUP_PAGES))?,
            digests: Vec::new(),
        };
        // Without them the pages would be lost, which may be sound. They are few: 8 bytes for 4 KiB.
        let first = base.layout.blocks_of(Map::Digests).start;
        let digests = base.blocks(first..first + pages.div_ceil(DIGESTS_PER_BLOCK));
        Ok(digests.map(|digests| {
            base.digests = digests;
            base
        }))
    }

    /// Whether this handle makes a deliberate mistake.
    pub fn has(&self, mutant: Mutant) -> bool {
        mutant::is(self.mutant, mutant)
    }

    /// The checksum of its header.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The number of pages of metadata that were ever used.
    #[inline]
    pub fn pages(&self) -> u64 {
        (self.words.len() / PAGE_WORDS) as u64
    }

    fn entry(&self, block: u64) -> u64 {
        let entry = &self.table[block as usize * ENTRY_BYTES..][..ENTRY_BYTES];
        u64::from_le_bytes(entry.try_into().expect("eight bytes"))
    }

    /// The blocks of a map up to the last one that is not all zero.
    pub fn stored_blocks(&self, map: Map) -> std::ops::Range<u64> {
        let blocks = self.layout.blocks_of(map);
        let last = blocks.clone().rev().find(|block| self.entry(*block) != 0);
        blocks.start..last.map_or(blocks.start, |last| last + 1)
    }

    /// Reads blocks; `None` if one of them does not match, or cannot be read.
    pub fn blocks(&self, blocks: std::ops::Range<u64>) -> Option<Vec<u8>> {
        let mut bytes = vec![0; (blocks.end - blocks.start) as usize * BLOCK_BYTES];
        let first_page = self.header.run.start_page + self.layout.page_of_block(blocks.start);
        self.media.read_at(first_page * PAGE_BYTES, &mut bytes).ok()?;
        for (block, bytes) in blocks.zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
            match self.entry(block) {
                0 => bytes.fill(0),
                sum if sum == block_sum(block, bytes) => {}
                _ if mutant::is(self.mutant, Mutant::TornBlocks) => {}
                _ => return None,
            }
        }
        Some(bytes)
    }

    /// Whether this process has read a page; false for one that is not in the base.
    #[inline(always)]
    fn has_read(&self, page: u64) -> bool {
        // Acquire: pairs with the Release in `store`. A thread that loads the bit sees the words.
        let word = self.is_read.get((page / 64) as usize).map_or(0, |word| word.load(Acquire));
        word & 1 << (page % 64) != 0
    }

    /// A slot of a page that this process has read.
    #[inline(always)]
    pub fn slot_in_memory(&self, slot: u64) -> Option<&ImageSlot> {
        self.has_read(slot / SLOTS_PER_PAGE).then(|| {
            // SAFETY: only pages of the base are marked as read, and this slot is in such a page.
            let words = unsafe { self.words.as_ptr().add(slot as usize * SLOT_WORDS) };
            // SAFETY: so many words, aligned, that live as long as `self`; outside of models both are
            // the same type, and models do not come here.
            unsafe { &*words.cast::<ImageSlot>() }
        })
    }

    /// Reads a page, and verifies it; and some around it, where others were read that are near: a
    /// page that is read alone takes three times as long.
    ///
    /// # Errors
    /// [`PoolError::Media`]; [`PoolError::Damaged`] if it is not the page that was there when the
    /// pool was closed, or names pages that no slot can name.
    #[cold]
    pub fn read(&self, page: u64) -> Result<()> {
        self.read_pages(page, 1)?;
        let group = page / GROUP_PAGES;
        let were_read = self.is_read[group as usize].load(Relaxed);
        let around = match page.checked_sub(1) {
            _ if were_read.count_ones() > GROUP_PAGES as u32 / 8 => {
                let bit = 1 << (group % 64);
                if self.was_group_read[(group / 64) as usize].fetch_or(bit, Relaxed) & bit != 0 {
                    return Ok(());
                }
                group * GROUP_PAGES..(group + 1) * GROUP_PAGES
            }
            Some(before) if self.has_read(before) => page + 1..page + AHEAD_PAGES,
            _ => return Ok(()),
        };
        let end = around.end.min(self.pages());
        for first in (around.start..end).step_by(AHEAD_PAGES as usize) {
            // Whatever is wrong with them is found when they are needed.
            let _ = self.read_pages(first, AHEAD_PAGES.min(end - first));
        }
        Ok(())
    }

    /// Reads those of some pages that this process has not read, and keeps those that match.
    ///
    /// # Errors
    /// Those of [`Base::read`], for any of them.
    fn read_pages(&self, first: u64, count: u64) -> Result<()> {
        let pages = first..first + count;
        let unread = || pages.clone().filter(|&page| !self.has_read(page));
        let Some(first) = unread().next() else { return Ok(()) };
        let mut bytes = vec![0; ((pages.end - first) * PAGE_BYTES) as usize];
        self.media.read_at(self.pool.metadata().offset_bytes + first * PAGE_BYTES, &mut bytes)?;
        if count > 1 {
            self.words.populate(first as usize * PAGE_WORDS..pages.end as usize * PAGE_WORDS);
        }
        let kept = unread().map(|page| {
            self.store(page, &bytes[((page - first) * PAGE_BYTES) as usize..][..BLOCK_BYTES])
        });
        kept.fold(Ok(()), std::result::Result::and)
    }

    /// Verifies a page, and keeps it.
    fn store(&self, page: u64, bytes: &[u8]) -> Result<()> {
        let digest = self.digest(page);
        if !mutant::is(self.mutant, Mutant::UncheckedPages) {
            let checked = check_page(bytes, digest).and_then(|()| self.check_runs(page, bytes));
            checked.map_err(|(index, error)| {
                self.damaged(page * SLOTS_PER_PAGE + index as u64, error)
            })?;
        }
        let words = &self.words[page as usize * PAGE_WORDS..][..PAGE_WORDS];
        for (word, source) in words.iter().zip(bytes.as_chunks::<8>().0) {
            // Another thread that reads the same page stores the same.
            word.store(u64::from_ne_bytes(*source), Relaxed);
        }
        // Release: pairs with the Acquire in `has_read`.
        self.is_read[(page / 64) as usize].fetch_or(1 << (page % 64), Release);
        Ok(())
    }

    /// Checks that slots name pages that can be named. A full recovery also checks that no page is
    /// named twice: the digests say that nothing has changed since.
    fn check_runs(&self, page: u64, bytes: &[u8]) -> std::result::Result<(), (usize, FormatError)> {
        let mut runs = Vec::new();
        for (index, slot) in bytes.as_chunks().0.iter().enumerate() {
            if page * SLOTS_PER_PAGE + index as u64 == HEAD_SLOT {
                continue;
            }
            named_runs(slot, &mut runs);
            let is_misplaced = |run: &Run| {
                run.start_page < self.pool.data_start_page
                    || run.end_page() > self.header.fresh_from_page
                    || run.overlaps(self.header.run)
            };
            if let Some(run) = runs.drain(..).find(is_misplaced) {
                return Err((index, FormatError::Field { field: "run", value: run.start_page }));
            }
        }
        Ok(())
    }

    fn damaged(&self, slot: u64, error: FormatError) -> PoolError {
        let structure = format!("inode {slot}");
        PoolError::Damaged { path: self.media.path().to_path_buf(), structure, error }
    }

    /// The digest of a page.
    fn digest(&self, page: u64) -> u64 {
        self.digests
            .as_chunks()
            .0
            .get(page as usize)
            .map_or(0, |digest| u64::from_le_bytes(*digest))
    }

    /// A block of digests, as it is on media; zeros behind the last page.
    pub fn block_of_digests(&self, index: u64) -> Vec<u8> {
        let from = self.digests.get(index as usize * BLOCK_BYTES..).unwrap_or_default();
        let mut bytes = from[..BLOCK_BYTES.min(from.len())].to_vec();
        bytes.resize(BLOCK_BYTES, 0);
        bytes
    }
}
