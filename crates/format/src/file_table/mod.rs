//! Where the pages of a file lie: its runs, in memory.
//!
//! ```text
//!  stored   inode: 40 runs ──► slot: 59 runs ──► slot: 59 runs ──► …        a chain (format::run_list)
//!              │                  │                  │
//!  here     List, from page 0   List, from page …  List, from page …        with sums, for searching
//!              └── shared between a table and its clones, until one is changed ──┘
//! ```
//!
//! A table has the same lists as its stored form, so that an edit is stored by putting the lists
//! that it changed and no others. (Only edits that undo each other before they are stored put an
//! unchanged list.) Lists need not be full:
//!
//! * An edit in the middle changes one list. If that gets too long it is split in half, as a leaf
//!   of a B-tree is; later lists stay as they are.
//! * An edit at the end fills the last list before it starts another one: an append changes the
//!   last list, or only the inode, and one time in 59 the last list and a new one.
//! * Two short neighbours are merged if one of them was changed anyway.
//!
//! A list stores the page it starts at, and the end of each of its runs relative to that: finding a
//! page takes two binary searches over contiguous numbers, and an edit renumbers the later lists
//! but not their runs.
//!
//! # Invariants
//! * Only the first list, that of the inode, can be empty; no list has more runs than fit into its
//!   slot.
//! * After an edit, no run in or next to the edited range continues the one before it, unless that
//!   has the maximum length. So a file whose pages are contiguous has one run, whatever its
//!   history.
//! * The last run is not a hole: everything beyond it is one anyway.
//!
//! # Use
//! A table belongs to one state of the inode ([`FileTable::is_current`]). Readers use a published
//! table, which never changes. A writer clones it (which copies no runs), edits the clone, stores
//! it in a transaction, and publishes it after the commit. A clone whose transaction failed or is
//! retried must be dropped.
//!
//! ```
//! use aquifer_format::file_table::{FileBytes, FilePage, FilePages, FileTable};
//! use aquifer_format::file::{FileInode, FileKind};
//! use aquifer_format::run::Run;
//!
//! let mut table = FileTable::empty(&FileInode::new(FileKind::File, 7, 1));
//! let run = Run { start_page: 500, pages: 10 };
//! table.splice(FilePages { first: FilePage(2), pages: 10 }, &[run])?;
//! assert_eq!(table.find(FilePage(3)).unwrap().run, Run { start_page: 501, pages: 9 });
//! assert!(table.find(FilePage(0)).unwrap().run.is_hole());
//! assert!(table.find(FilePage(12)).is_none());
//! let bytes = table.contiguous(FileBytes { offset_bytes: 8192 + 100, len_bytes: 5000 }).unwrap();
//! assert_eq!(bytes.offset_bytes, 500 * 4096 + 100);
//! # Ok::<(), aquifer_format::slots::StructureError>(())
//! ```

mod chain;
mod extents;
mod list;
mod splice;
mod store;
mod units;

use crate::ByteRange;
use crate::file::FileInode;
use crate::run::Run;
use crate::slots::ReadSlots;
use chain::{Chain, Totals};
pub use chain::{check, give_back};
pub use extents::Extents;
use list::List;
pub use units::{Extent, FileBytes, FilePage, FilePages, Piece};

/// The runs of a file.
#[derive(Debug, Clone)]
pub struct FileTable {
    owner: u64,
    generation: u64,
    layout_version: u64,
    /// The inode's list, then those of the chain.
    lists: Vec<List>,
    /// Pages that are not in holes.
    mapped_pages: u64,
    /// Slots of removed lists: reused for new lists, or given back.
    unused_slots: Vec<u64>,
    /// Whether there are edits to store.
    is_edited: bool,
}

impl FileTable {
    /// Returns the table of a file without pages.
    pub fn empty(inode: &FileInode) -> FileTable {
        FileTable {
            owner: inode.number,
            generation: inode.generation,
            layout_version: inode.layout_version,
            lists: vec![List::stored(FilePage(0), 0, 0, Vec::new())],
            mapped_pages: 0,
            unused_slots: Vec::new(),
            is_edited: false,
        }
    }

    /// Reads the table of a file.
    ///
    /// # Errors
    /// [`StructureError::Damaged`](crate::slots::StructureError::Damaged) if the stored table is
    /// incomplete or another file's; those of `slots`.
    pub fn load<S: ReadSlots>(inode: &FileInode, slots: &S) -> Result<FileTable, S::Error> {
        let mut table = FileTable::empty(inode);
        let mut totals = Totals::default();
        totals.add(inode.number, &inode.runs)?;
        table.lists[0] = List::stored(FilePage(0), 0, inode.part, inode.runs.clone());
        for list in Chain::new(inode, slots) {
            let list = list?;
            let first = FilePage(totals.pages);
            totals.add(inode.number, &list.runs)?;
            table.lists.push(List::stored(first, list.number, list.next, list.runs));
        }
        totals.check(inode)?;
        table.mapped_pages = totals.mapped_pages;
        Ok(table)
    }

    /// As [`FileTable::is_current`], by the fields that matter.
    #[inline]
    pub fn is_of(&self, number: u64, generation: u64, layout_version: u64) -> bool {
        (self.owner, self.generation, self.layout_version) == (number, generation, layout_version)
    }

    /// Whether it is the stored table of this inode: same file, and its runs have not changed
    /// since.
    pub fn is_current(&self, inode: &FileInode) -> bool {
        self.is_of(inode.number, inode.generation, inode.layout_version)
    }

    /// Pages up to the end of the last run, holes included.
    pub fn pages(&self) -> u64 {
        self.lists[self.lists.len() - 1].end().0
    }

    /// Pages of the pool that it refers to.
    pub fn mapped_pages(&self) -> u64 {
        self.mapped_pages
    }

    /// Number of runs, holes included.
    pub fn run_count(&self) -> usize {
        self.lists.iter().map(List::len).sum()
    }

    /// Number of slots, not counting the inode.
    pub fn slot_count(&self) -> usize {
        self.lists.len() - 1
    }

    /// Returns the runs in order, holes included.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.lists.iter().flat_map(|list| list.runs().iter().copied())
    }

    /// The index of the list with a page; the last one if the page is beyond all of them.
    fn list_with(&self, page: FilePage) -> usize {
        match self.lists.len() {
            1 => 0,
            // The first list begins at page 0.
            _ => self.lists.partition_point(|list| list.first <= page) - 1,
        }
    }

    /// Returns where a page lies, and how many pages follow it there: the rest of its run. `None`
    /// if the page is beyond the last run, where there is only a hole.
    pub fn find(&self, page: FilePage) -> Option<Extent> {
        let list = &self.lists[self.list_with(page)];
        let stored = list.extent(list.find(page))?;
        Some(Extent { first: page, run: list::skip(stored.run, page.0 - stored.first.0) })
    }

    /// Returns the extents of a range of pages, in order and without a gap. Runs that continue each
    /// other are one extent, as are holes; beyond the last run there is a hole.
    pub fn extents(&self, range: FilePages) -> Extents<'_> {
        Extents::new(&self.lists[self.list_with(range.first)..], range)
    }

    /// Returns the pieces of a range of bytes, in order and without a gap, clipped to the range.
    pub fn pieces(&self, range: FileBytes) -> impl Iterator<Item = Piece> + '_ {
        self.extents(range.pages()).map(move |extent| extent.piece(range))
    }

    /// Returns where a range of bytes lies if it is contiguous and has no hole, so that one pointer
    /// reaches all of it. `None` for an empty range.
    pub fn contiguous(&self, range: FileBytes) -> Option<ByteRange> {
        let piece = self.pieces(range).next()?;
        piece.pool.filter(|_| piece.file == range)
    }

    /// Returns the table as one run if it is contiguous and has no hole; the run may be longer than
    /// a stored one can be. `None` for an empty table.
    pub fn as_one_run(&self) -> Option<Run> {
        let all = FilePages { first: FilePage(0), pages: self.pages() };
        let extent = self.extents(all).next()?;
        (extent.pages() == all && !extent.run.is_hole()).then_some(extent.run)
    }

    /// Returns the first page of the last `max_runs` runs (at least 1), or page 0 if there are
    /// fewer: where to cut a table with very many runs that is truncated in several transactions.
    pub fn start_of_last_runs(&self, max_runs: usize) -> FilePage {
        let mut left = max_runs;
        for list in self.lists.iter().rev() {
            match list.len().checked_sub(left) {
                Some(index) => return list.extent(index).map_or(list.end(), |extent| extent.first),
                None => left -= list.len(),
            }
        }
        FilePage(0)
    }
}
