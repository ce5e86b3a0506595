//! Where the pages of a file lie: its runs, as an open file keeps them in memory.
//!
//! ```text
//!  stored   inode: 40 runs ──► slot: 59 runs ──► slot: 59 runs ──► …        a chain (format::run_list)
//!              │                  │                  │
//!  here     List, from page 0   List, from page …  List, from page …        with sums, to be searched
//!              └── shared between a table and its clones, until one is changed ──┘
//! ```
//!
//! A table has the same lists as its stored form, so that an edit is stored by putting the lists it has touched and no others
//! (those it has changed: only edits that undo each other before they are stored put a list as it was). They need not be full:
//!
//! * An edit in the middle changes one list. If that gets too long it is cut in two of half the length, as a leaf of a B-tree
//!   is; what is behind stays as it is.
//! * An edit at the end fills the last list before it begins another one: pages that are appended change the last list, or
//!   only the inode, and one time in 59 the last list and a new one.
//! * Where two neighbours, one of which was changed anyway, have become short, they become one.
//!
//! Lists know the page they begin at, and runs the page they end at within their list: finding a page is two binary
//! searches, over contiguous numbers, and an edit moves the numbers of the lists behind it but not of their runs.
//!
//! # What always holds
//! * Only the first list, that of the inode, can be empty; no list has more runs than fit into its slot.
//! * After an edit, no run in the range edited or beside it continues the one before it, unless that is as long as a run can be.
//!   So a file whose pages lie next to each other has one run, at any history.
//! * The last run is not a hole: what is behind it is one anyway.
//!
//! # How it is used
//! A table belongs to one state of the inode ([`FileTable::is_current`]). Readers look pages up in a table that is never changed. Who
//! changes the file clones it, which copies no runs, edits and stores the clone in a transaction, and when that has succeeded, shows
//! the clone to the readers. A clone whose transaction failed, or is to be repeated, is thrown away.
//!
//! ```
//! use aquifer_fs::file_table::{FileBytes, FilePage, FilePages, FileTable};
//! use aquifer_pool::format::file::{FileInode, FileKind};
//! use aquifer_pool::format::run::Run;
//!
//! let mut table = FileTable::empty(&FileInode::new(FileKind::File, 7, 1));
//! let run = Run { start_page: 500, pages: 10 };
//! table.splice(FilePages { first: FilePage(2), pages: 10 }, &[run])?;
//! assert_eq!(table.find(FilePage(3)).unwrap().run, Run { start_page: 501, pages: 9 });
//! assert!(table.find(FilePage(0)).unwrap().run.is_hole());
//! assert!(table.find(FilePage(12)).is_none());
//! let bytes = table.contiguous(FileBytes { offset_bytes: 8192 + 100, len_bytes: 5000 }).unwrap();
//! assert_eq!(bytes.offset_bytes, 500 * 4096 + 100);
//! # Ok::<(), aquifer_fs::FsError>(())
//! ```

mod chain;
mod extents;
mod list;
mod splice;
mod store;
mod units;

use aquifer_pool::ReadSlots;
use aquifer_pool::format::file::FileInode;
use aquifer_pool::format::run::Run;
use aquifer_pool::media::ByteRange;

use crate::error::Result;
use chain::{Chain, Totals};
pub use chain::{check, give_back};
pub use extents::Extents;
use list::List;
pub use units::{Extent, FileBytes, FilePage, FilePages, Piece};

/// The runs of a file.
#[derive(Debug, Clone)]
pub struct FileTable {
    owner: u64,
    incarnation: u64,
    layout_version: u64,
    /// The inode's, then those of the chain.
    lists: Vec<List>,
    /// Pages that are no hole.
    mapped_pages: u64,
    /// Slots of lists that are gone: to be used for new ones, or given back.
    unused_slots: Vec<u64>,
    /// Whether it is to be stored.
    is_edited: bool,
}

impl FileTable {
    /// The table of a file without pages.
    pub fn empty(inode: &FileInode) -> FileTable {
        FileTable {
            owner: inode.number,
            incarnation: inode.incarnation,
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
    /// [`FsError::Damaged`](crate::FsError::Damaged) if what is stored is not the whole table of this file; those of `slots`.
    pub fn load(inode: &FileInode, slots: &impl ReadSlots) -> Result<FileTable> {
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

    /// [`FileTable::is_current`] by the fields that count.
    #[inline]
    pub fn is_of(&self, number: u64, incarnation: u64, layout_version: u64) -> bool {
        (self.owner, self.incarnation, self.layout_version) == (number, incarnation, layout_version)
    }

    /// Whether it is what is stored for this inode: of the same file, and its runs have not been changed since.
    pub fn is_current(&self, inode: &FileInode) -> bool {
        self.is_of(inode.number, inode.incarnation, inode.layout_version)
    }

    /// Pages up to the end of the last run, holes included.
    pub fn pages(&self) -> u64 {
        self.lists[self.lists.len() - 1].end().0
    }

    /// Pages of the pool that it names.
    pub fn mapped_pages(&self) -> u64 {
        self.mapped_pages
    }

    /// How many runs it has, holes included.
    pub fn run_count(&self) -> usize {
        self.lists.iter().map(List::len).sum()
    }

    /// How many slots it takes, that of the inode not counted.
    pub fn slot_count(&self) -> usize {
        self.lists.len() - 1
    }

    /// Its runs in order, holes included.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.lists.iter().flat_map(|list| list.runs().iter().copied())
    }

    /// The list with a page; the last one if the page is behind all of them.
    fn list_with(&self, page: FilePage) -> usize {
        match self.lists.len() {
            1 => 0,
            // The first list begins at page 0.
            _ => self.lists.partition_point(|list| list.first <= page) - 1,
        }
    }

    /// Where a page lies, and how many behind it follow it there: what its run has from this page on. `None` if the page is behind
    /// the last run, where there is nothing but a hole.
    pub fn find(&self, page: FilePage) -> Option<Extent> {
        let list = &self.lists[self.list_with(page)];
        let stored = list.extent(list.find(page))?;
        Some(Extent { first: page, run: list::skip(stored.run, page.0 - stored.first.0) })
    }

    /// What lies in a range of pages, in order and without a gap. Runs that continue each other are one extent, as are holes;
    /// behind the last run there is a hole.
    pub fn extents(&self, range: FilePages) -> Extents<'_> {
        Extents::new(&self.lists[self.list_with(range.first)..], range)
    }

    /// What lies in a range of bytes, in order and without a gap, cut off at its ends.
    pub fn pieces(&self, range: FileBytes) -> impl Iterator<Item = Piece> + '_ {
        self.extents(range.pages()).map(move |extent| extent.piece(range))
    }

    /// Where a range of bytes lies, if it lies in one piece and has no hole: then it can be read through one pointer. `None` for
    /// a range without bytes.
    pub fn contiguous(&self, range: FileBytes) -> Option<ByteRange> {
        let piece = self.pieces(range).next()?;
        piece.pool.filter(|_| piece.file == range)
    }

    /// The only run, if there is one run only; it may be longer than a stored run can be. `None` for an empty table.
    pub fn as_one_run(&self) -> Option<Run> {
        let all = FilePages { first: FilePage(0), pages: self.pages() };
        let extent = self.extents(all).next()?;
        (extent.pages() == all && !extent.run.is_hole()).then_some(extent.run)
    }

    /// A page such that as many runs as possible, but at most `max_runs`, which is at least 1, lie behind it or begin there: where
    /// to cut a table of very many runs that is to be shortened in several transactions.
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
