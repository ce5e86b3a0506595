//! The base of a page: its content as of the object's last commit, which patches are relative to.
//!
//! | the page | its base | how it is committed |
//! |---|---|---|
//! | has a *twin* | the twin | patched, if little changed |
//! | was committed since the primary was brought up to date, and has no twin | not at hand (it is *behind*) | whole |
//! | else | what lies at its place | patched, if little changed; and it gets a twin |
//!
//! A twin is a copy in memory; after a commit it is patched as the log is. Pages of which much changes at a time get
//! none, and neither does any page once twins and private copies together fill the budget.
//!
//! # Invariant
//! What the log has of a page, up to the last commit captured, makes of its place what the twin holds; without a twin,
//! and not behind, what the place holds. It is the captured commits that count, not the durable ones: one that
//! fails takes all behind it along, and its pages come back ([`Bases::forget`]).

use std::collections::HashMap;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::{Patches, Pool};
use aquifer_sys::memory::copy_racy;
use aquifer_vm::dirty::{PageBits, PageIndex, PageRun};

use crate::attach::Attached;

const PAGE: usize = PAGE_BYTES as usize;
/// A page that takes more than this to patch is committed whole: about as much to write, and simpler to read.
const MOST_PATCH_BYTES: usize = PAGE / 2;

type Page = Box<[u8; PAGE]>;

/// The bases of an object's pages.
pub(crate) struct Bases {
    twins: HashMap<PageIndex, Page>,
    behind: PageBits,
}

/// What a capture commits of an object, in two parts. No page is in both, and one that has its base's content is
/// in neither.
#[derive(Default)]
pub(crate) struct Changes {
    pub patches: Patches,
    pub whole: Vec<PageRun>,
}

impl Changes {
    /// Bytes of it in the log.
    pub fn len_bytes(&self) -> u64 {
        let pages: u64 = self.whole.iter().map(|run| run.count).sum();
        self.patches.len_bytes() + pages * PAGE_BYTES
    }

    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.patches.is_empty() && self.whole.is_empty()
    }

    fn clear(&mut self) {
        self.patches.clear();
        self.whole.clear();
    }

    fn push_whole(&mut self, page: PageIndex) {
        match self.whole.last_mut() {
            Some(last) if last.end() == page => last.count += 1,
            _ => self.whole.push(PageRun { first: page, count: 1 }),
        }
    }
}

impl Bases {
    /// Of an object of so many pages whose primary is up to date.
    pub fn new(pages: u64) -> Bases {
        Bases { twins: HashMap::new(), behind: PageBits::new(pages) }
    }

    /// How many pages have a twin.
    pub fn twins(&self) -> u64 {
        self.twins.len() as u64
    }

    /// The primary has everything that was committed.
    pub fn catch_up(&mut self) {
        if self.behind.count() > 0 {
            self.behind.clear();
        }
    }

    /// Nothing is known about these pages: commits of them have failed, or the log has them from elsewhere.
    pub fn forget(&mut self, runs: &[PageRun]) {
        for &run in runs {
            self.behind.insert_run(run);
            if !self.twins.is_empty() {
                run.pages().for_each(|page| _ = self.twins.remove(&page));
            }
        }
    }

    /// Gives up all twins.
    pub fn drop_twins(&mut self) {
        for (page, _) in std::mem::take(&mut self.twins) {
            self.behind.insert_run(PageRun { first: page, count: 1 });
        }
    }

    /// Finds out what has changed in `captured`. Pages get a twin as long as there are at most `most_twins`.
    pub fn compare(
        &mut self,
        attached: &Attached,
        captured: &[PageRun],
        most_twins: u64,
        changes: &mut Changes,
    ) {
        changes.clear();
        let mut now = [0; PAGE];
        let mut base = [0; PAGE];
        for page in captured.iter().flat_map(|run| run.pages()) {
            // SAFETY: a page of the mapping, and a buffer of one page.
            unsafe { copy_racy(attached.page(page), now.as_mut_ptr(), PAGE) };
            let base: &[u8; PAGE] = match self.twins.get(&page) {
                Some(twin) => twin,
                None if self.behind.contains(page) => {
                    changes.push_whole(page);
                    continue;
                }
                None if read_primary(&attached.shared.pool, attached, page, &mut base) => &base,
                None => {
                    changes.push_whole(page);
                    continue;
                }
            };
            // Runs have at most 2^24 pages.
            if !changes.patches.push_difference(page.0 as u32, base, &now, MOST_PATCH_BYTES) {
                changes.push_whole(page);
            } else if !self.twins.contains_key(&page) && self.twins() < most_twins {
                // As of the last commit, which is right whether this one succeeds or not.
                self.twins.insert(page, Box::new(*base));
            }
        }
    }

    /// The changes are in the log.
    pub fn commit(&mut self, changes: &Changes) {
        self.forget(&changes.whole);
        for patch in changes.patches.iter() {
            let page = PageIndex(patch.page.into());
            match self.twins.get_mut(&page) {
                Some(twin) => {
                    twin[patch.offset.into()..][..patch.bytes.len()].copy_from_slice(patch.bytes);
                }
                None => self.behind.insert_run(PageRun { first: page, count: 1 }),
            }
        }
    }
}

/// Reads a page at its place, if that takes no I/O.
fn read_primary(pool: &Pool, attached: &Attached, page: PageIndex, base: &mut [u8]) -> bool {
    let offset_bytes = attached.media.offset_bytes + page.0 * PAGE_BYTES;
    pool.media().read_resident_at(offset_bytes, base).unwrap_or(false)
}
