//! The base of a page: its content as of the object's last commit. Patches are relative to it.
//!
//! | the page | its base | how it is committed |
//! |---|---|---|
//! | has a *twin* | the twin | patched, if little changed |
//! | was committed since the primary was brought up to date, and has no twin | not available (the page is *behind*) | whole; it gets a twin |
//! | otherwise | the page on media (the primary) | patched, if little changed; it gets a twin |
//!
//! A twin is a copy in memory; each commit patches it exactly as the log does. A page that was
//! mostly changed at its last comparison gets no twin until it is compared with the primary again.
//! No page gets a twin once twins and private copies together exceed the budget.
//!
//! # Invariant
//! Applying everything the log holds for a page, up to the last captured commit, to the primary
//! gives the page's base: the twin if there is one, otherwise, unless the page is behind, the
//! primary itself. Captured commits count, not durable ones: if a commit fails, all commits behind
//! it fail too, and their pages are returned ([`Bases::forget`]).

use aquifer_pool::Patches;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::media::PersistenceDomain;
use aquifer_sys::memory::copy_racy;
use aquifer_vm::dirty::{PageBits, PageIndex, PageRun, runs};

use crate::memory::Object;
use crate::ranges::NamedRanges;
use crate::twins::{PAGE, Page, Twins};

/// A page whose patches would exceed this is committed whole. On a disk, because writing the whole
/// page costs about the same and is simpler to read; where writing is copying, because finding the
/// differences takes longer than copying the page.
fn most_patch_bytes(domain: PersistenceDomain) -> usize {
    match domain {
        PersistenceDomain::PageCache => PAGE / 2,
        PersistenceDomain::Dax | PersistenceDomain::Volatile => PAGE / 16,
    }
}

/// The bases of an object's pages.
pub(crate) struct Bases {
    twins: Twins,
    behind: Behind,
    /// Pages of which most changed when they were compared last.
    rewritten: PageBits,
    most_patch_bytes: usize,
}

/// Pages that are committed but not yet applied to the primary. Commits continue while the primary
/// is brought up to date, so the set is kept in two parts: pages committed up to `mark_lsn`, and
/// pages committed later.
struct Behind {
    older: PageBits,
    newer: PageBits,
    mark_lsn: u64,
}

impl Behind {
    fn contains(&self, page: PageIndex) -> bool {
        self.older.contains(page) || self.newer.contains(page)
    }

    /// Everything before `applied_lsn` is applied to the primary, and nothing was committed from
    /// `last_lsn` on.
    fn catch_up(&mut self, applied_lsn: u64, last_lsn: u64) {
        if applied_lsn < self.mark_lsn {
            return;
        }
        if self.older.count() > 0 {
            self.older.clear();
        }
        std::mem::swap(&mut self.older, &mut self.newer);
        self.mark_lsn = last_lsn;
        if applied_lsn >= last_lsn && self.older.count() > 0 {
            self.older.clear();
        }
    }
}

/// What a capture commits of an object, in two disjoint parts. Pages equal to their base are in
/// neither.
#[derive(Default)]
pub(crate) struct Changes {
    pub patches: Patches,
    pub whole: Vec<PageRun>,
    /// The whole pages that are to get a twin.
    wanted: Vec<PageIndex>,
}

impl Changes {
    /// Copies the whole pages into `target`, which has their total length. Returns the content of
    /// those that are to get a twin, in order, copied from `target`, so that a twin equals what is
    /// logged even if the page is stored to concurrently.
    pub fn copy_whole(&self, object: &Object, target: &mut [u8]) -> Vec<Page> {
        let mut twins = Vec::with_capacity(self.wanted.len());
        let mut wanted = self.wanted.iter().copied().peekable();
        let pages = self.whole.iter().flat_map(|run| run.pages());
        for (page, bytes) in pages.zip(target.as_chunks_mut::<PAGE>().0) {
            // SAFETY: a page of the mapping, and a buffer of one page.
            unsafe { copy_racy(object.page(page), bytes.as_mut_ptr(), PAGE) };
            if wanted.next_if_eq(&page).is_some() {
                twins.push(Page(*bytes));
            }
        }
        twins
    }

    /// Bytes of the whole pages.
    pub fn whole_bytes(&self) -> u64 {
        self.whole.iter().map(|run| run.count).sum::<u64>() * PAGE_BYTES
    }

    /// Bytes that the changes occupy in the log.
    pub fn len_bytes(&self) -> u64 {
        self.patches.len_bytes() + self.whole_bytes()
    }

    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.patches.is_empty() && self.whole.is_empty()
    }

    /// Makes them whole pages, without twins: they are put aside.
    pub fn make_whole(&mut self, pages: &[PageRun]) {
        self.clear();
        self.whole.extend_from_slice(pages);
    }

    fn clear(&mut self) {
        self.patches.clear();
        self.whole.clear();
        self.wanted.clear();
    }

    fn push_whole(&mut self, page: PageIndex) {
        match self.whole.last_mut() {
            Some(last) if last.end() == page => last.count += 1,
            _ => self.whole.push(PageRun { first: page, count: 1 }),
        }
    }
}

impl Bases {
    /// The bases of an object of `pages` pages whose primary is up to date.
    pub fn new(pages: u64, domain: PersistenceDomain) -> Bases {
        let none = || PageBits::new(pages);
        Bases {
            twins: Twins::default(),
            behind: Behind { older: none(), newer: none(), mark_lsn: 0 },
            rewritten: none(),
            most_patch_bytes: most_patch_bytes(domain),
        }
    }

    /// The number of twins.
    pub fn twins(&self) -> u64 {
        self.twins.count()
    }

    /// How many pages twins take memory for.
    pub fn held_pages(&self) -> u64 {
        self.twins.held()
    }

    /// Notes that everything committed before `applied_lsn` is applied. The last commit ends at
    /// `last_lsn`.
    pub fn catch_up(&mut self, applied_lsn: u64, last_lsn: u64) {
        self.behind.catch_up(applied_lsn, last_lsn);
    }

    /// Forgets the bases of these pages: their commits failed, or the log got their content
    /// elsewhere.
    pub fn forget(&mut self, runs: &[PageRun]) {
        for &run in runs {
            self.behind.newer.insert_run(run);
            if !self.twins.is_empty() {
                run.pages().for_each(|page| self.twins.remove(page));
            }
        }
    }

    /// Drops all twins.
    pub fn drop_twins(&mut self) {
        for page in self.twins.take() {
            self.behind.newer.insert_run(PageRun { first: page, count: 1 });
        }
    }

    /// Finds the changes in `captured`. Pages get a twin as long as there are fewer than
    /// `most_twins`.
    pub fn compare(
        &mut self,
        object: &Object,
        captured: &[PageRun],
        most_twins: u64,
        changes: &mut Changes,
    ) {
        changes.clear();
        let (mut now, mut place) = (Page([0; PAGE]), Page([0; PAGE]));
        for page in captured.iter().flat_map(|run| run.pages()) {
            let twin = self.twins.get(page);
            let has_twin = twin.is_some();
            let may_have_twin = most_twins > self.twins() + changes.wanted.len() as u64;
            if !has_twin && self.behind.contains(page) {
                changes.push_whole(page);
                if may_have_twin && !self.rewritten.contains(page) {
                    changes.wanted.push(page);
                }
                continue;
            }
            if !has_twin && !read_primary(object, page, &mut place.0) {
                changes.push_whole(page);
                continue;
            }
            let base = twin.unwrap_or(&place.0);
            // SAFETY: a page of the mapping, and a buffer of one page.
            unsafe { copy_racy(object.page(page), now.0.as_mut_ptr(), PAGE) };
            let run = PageRun { first: page, count: 1 };
            // The cast is lossless: an object has at most 2^24 pages.
            let most_bytes = self.most_patch_bytes;
            if !changes.patches.push_difference(page.0 as u32, base, &now.0, most_bytes) {
                self.rewritten.insert_run(run);
                changes.push_whole(page);
                continue;
            }
            self.rewritten.remove_run(run);
            if !has_twin && may_have_twin {
                // The content as of the last commit: correct whether the current one succeeds or
                // not.
                self.twins.insert(page, &place);
            }
        }
    }

    /// Takes exactly the named bytes as the changes, whatever their bases: whole pages, and patches
    /// of the others. Replaces `captured` by their pages.
    pub fn take_named(
        &self,
        object: &Object,
        ranges: &NamedRanges,
        captured: &mut Vec<PageRun>,
        changes: &mut Changes,
    ) {
        changes.clear();
        captured.clear();
        for part in ranges.parts() {
            let page = part.page;
            runs::push(captured, PageRun { first: page, count: 1 });
            if part.is_whole() {
                changes.push_whole(page);
                if self.twins.get(page).is_some() {
                    changes.wanted.push(page);
                }
                continue;
            }
            // The cast is lossless: an object has at most 2^24 pages.
            let bytes = changes.patches.push(page.0 as u32, part.offset, part.len_bytes);
            let source = object.page(page).wrapping_add(part.offset);
            // SAFETY: inside a page of the mapping, and a buffer of the same length.
            unsafe { copy_racy(source, bytes.as_mut_ptr(), bytes.len()) };
        }
    }

    /// Notes that the changes are in the log, with `twins` as the content of the pages that are to get one.
    pub fn commit(&mut self, changes: &Changes, twins: &[Page]) {
        self.forget(&changes.whole);
        changes.wanted.iter().zip(twins).for_each(|(page, twin)| self.twins.insert(*page, twin));
        for patch in changes.patches.iter() {
            let page = PageIndex(patch.page.into());
            match self.twins.get_mut(page) {
                Some(twin) => {
                    twin[patch.offset.into()..][..patch.bytes.len()].copy_from_slice(patch.bytes);
                }
                None => self.behind.newer.insert_run(PageRun { first: page, count: 1 }),
            }
        }
    }
}

/// Reads a page of the primary if that needs no I/O.
fn read_primary(object: &Object, page: PageIndex, base: &mut [u8]) -> bool {
    let offset_bytes = object.media.offset_bytes + page.0 * PAGE_BYTES;
    object.shared.pool.media().read_resident_at(offset_bytes, base).unwrap_or(false)
}
