//! Sets of pages: as sorted runs for reports, and as bits for look-ups.

/// The index of a page in a tracked range; 0 is the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub u64);

/// Consecutive pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRun {
    /// The first page.
    pub first: PageIndex,
    /// Number of pages.
    pub count: u64,
}

impl PageRun {
    /// The run of the pages in the range.
    pub fn new(pages: std::ops::Range<u64>) -> PageRun {
        PageRun { first: PageIndex(pages.start), count: pages.end.saturating_sub(pages.start) }
    }

    /// The page behind the last one.
    pub fn end(self) -> PageIndex {
        PageIndex(self.first.0 + self.count)
    }

    /// Iterates over the pages.
    pub fn pages(self) -> impl Iterator<Item = PageIndex> {
        (self.first.0..self.end().0).map(PageIndex)
    }
}

/// Appends a run, or merges it into the last one if they touch.
pub fn push(runs: &mut Vec<PageRun>, run: PageRun) {
    match runs.last_mut() {
        Some(last) if last.first <= run.first && run.first <= last.end() => {
            let end = last.end().max(run.end());
            last.count = end.0 - last.first.0;
        }
        _ => runs.push(run),
    }
}

/// Sorts and merges runs: afterwards they ascend, with a gap between any two.
pub fn normalise(runs: &mut Vec<PageRun>) {
    runs.retain(|run| run.count > 0);
    runs.sort_unstable();
    runs.dedup_by(|next, before| {
        let touches = next.first <= before.end();
        if touches {
            let end = before.end().max(next.end());
            before.count = end.0 - before.first.0;
        }
        touches
    });
}

/// Whether a page is in a normalised set.
pub fn contains(runs: &[PageRun], page: PageIndex) -> bool {
    let behind = runs.partition_point(|run| run.first <= page);
    behind > 0 && page < runs[behind - 1].end()
}

/// Calls `each` with the parts of a normalised set that lie in `run`.
pub fn intersect(runs: &[PageRun], run: PageRun, each: &mut dyn FnMut(PageRun)) {
    let from = runs.partition_point(|other| other.end() <= run.first);
    for other in &runs[from..] {
        if other.first >= run.end() {
            break;
        }
        let common = other.first.max(run.first).0..other.end().min(run.end()).0;
        each(PageRun::new(common));
    }
}

/// A normalised set without the pages of another; the result is normalised.
pub fn subtract(runs: &[PageRun], others: &[PageRun]) -> Vec<PageRun> {
    let mut rest = Vec::new();
    for &run in runs {
        let mut from = run.first;
        intersect(others, run, &mut |common| {
            if from < common.first {
                rest.push(PageRun::new(from.0..common.first.0));
            }
            from = common.end();
        });
        if from < run.end() {
            rest.push(PageRun::new(from.0..run.end().0));
        }
    }
    rest
}

/// Joins runs of a normalised set whose gaps are at most `gap` pages.
pub(super) fn clusters(runs: &[PageRun], gap: u64) -> impl Iterator<Item = PageRun> {
    runs.chunk_by(move |a, b| b.first.0 - a.end().0 <= gap).map(|chunk| {
        let (first, last) = (chunk[0], chunk[chunk.len() - 1]);
        PageRun::new(first.first.0..last.end().0)
    })
}

/// One bit per page, and the number of bits set. Memory for bits that are never set is never
/// touched.
pub struct PageBits {
    words: Vec<u64>,
    /// One bit per word: it is not zero.
    summary: Vec<u64>,
    count: u64,
    /// Words outside this range are zero: searching a large set with few, clustered pages does not
    /// scan all of it.
    used: std::ops::Range<usize>,
}

impl std::fmt::Debug for PageBits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pages", self.count)
    }
}

impl PageBits {
    /// An empty set of pages below `pages`.
    pub fn new(pages: u64) -> PageBits {
        let words = pages.div_ceil(64) as usize;
        let summary = vec![0; words.div_ceil(64)];
        PageBits { words: vec![0; words], summary, count: 0, used: 0..0 }
    }

    /// Number of pages in the set.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether the set contains a page.
    pub fn contains(&self, page: PageIndex) -> bool {
        self.words[(page.0 / 64) as usize] & (1 << (page.0 % 64)) != 0
    }

    /// Adds pages.
    pub fn insert_run(&mut self, run: PageRun) {
        for (index, mask) in words_of(run) {
            let word = &mut self.words[index];
            self.count += u64::from((mask & !*word).count_ones());
            *word |= mask;
            self.summary[index / 64] |= u64::from(*word != 0) << (index % 64);
            self.used = if self.used.is_empty() {
                index..index + 1
            } else {
                self.used.start.min(index)..self.used.end.max(index + 1)
            };
        }
    }

    /// Removes pages.
    pub fn remove_run(&mut self, run: PageRun) {
        for (index, mask) in words_of(run) {
            let word = &mut self.words[index];
            self.count -= u64::from((mask & *word).count_ones());
            *word &= !mask;
            if *word == 0 {
                self.summary[index / 64] &= !(1 << (index % 64));
            }
        }
        if self.count == 0 {
            self.used = 0..0;
        }
    }

    /// Splits a run into parts that are wholly in the set or wholly not.
    pub fn split(&self, run: PageRun, each: &mut dyn FnMut(PageRun, bool)) {
        let mut from = run.first;
        while from < run.end() {
            let inside = self.contains(from);
            // Do not search behind the run: in a set with few pages each search would scan to the
            // end.
            let flip = if inside { u64::MAX } else { 0 };
            let to = self.next(from, run.end(), flip).unwrap_or(run.end());
            each(PageRun::new(from.0..to.0), inside);
            from = to;
        }
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        let mut from = self.used.start;
        while let Some(index) = self.next_word(from, self.used.end) {
            self.words[index] = 0;
            self.summary[index / 64] &= !(1 << (index % 64));
            from = index + 1;
        }
        self.count = 0;
        self.used = 0..0;
    }

    /// The whole set, as normalised runs.
    pub fn runs(&self) -> Vec<PageRun> {
        let mut runs = Vec::new();
        let all = PageIndex(self.words.len() as u64 * 64);
        let mut from = PageIndex(0);
        while let Some(first) = self.next_from(from) {
            let end = self.next(first, all, u64::MAX).unwrap_or(all);
            runs.push(PageRun::new(first.0..end.0));
            from = end;
        }
        runs
    }

    /// The first page of the set at or after `page`.
    pub fn next_from(&self, page: PageIndex) -> Option<PageIndex> {
        let used = self.used.start as u64 * 64..self.used.end as u64 * 64;
        self.next(PageIndex(page.0.max(used.start)), PageIndex(used.end), 0)
    }

    /// The first page from `page` on and before `end` whose bit differs from that of `flip`.
    fn next(&self, page: PageIndex, end: PageIndex, flip: u64) -> Option<PageIndex> {
        let words = self.words.get(..end.0.div_ceil(64) as usize).unwrap_or(&self.words);
        let mut index = (page.0 / 64) as usize;
        let mut word = (words.get(index)? ^ flip) & (u64::MAX << (page.0 % 64));
        while word == 0 {
            let is_set_wanted = flip == 0;
            index = if is_set_wanted { self.next_word(index + 1, words.len())? } else { index + 1 };
            word = *words.get(index)? ^ flip;
        }
        let found = PageIndex(index as u64 * 64 + u64::from(word.trailing_zeros()));
        (found < end).then_some(found)
    }

    /// The first word from `from` on and before `end` that is not zero.
    fn next_word(&self, from: usize, end: usize) -> Option<usize> {
        let mut at = from / 64;
        let mut bits = self.summary.get(at)? & (u64::MAX << (from % 64));
        while bits == 0 {
            at += 1;
            bits = *self.summary.get(at).filter(|_| at * 64 < end)?;
        }
        Some(at * 64 + bits.trailing_zeros() as usize).filter(|&word| word < end)
    }
}

/// The words that contain a run, with the mask of its bits in each.
fn words_of(run: PageRun) -> impl Iterator<Item = (usize, u64)> {
    let (from, to) = (run.first.0, run.end().0);
    (from / 64..to.div_ceil(64)).map(move |word| {
        let low = from.saturating_sub(word * 64);
        let high = (to - word * 64).min(64);
        (word as usize, (u64::MAX << low) & (u64::MAX >> (64 - high)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_testkit::rng::Rng;
    use std::collections::BTreeSet;

    fn pages(runs: &[PageRun]) -> Vec<u64> {
        runs.iter().flat_map(|run| run.pages()).map(|page| page.0).collect()
    }

    /// Compares all operations with a plain set.
    #[test]
    fn runs_and_bits_are_sets() {
        let mut rng = Rng::new(7);
        for _ in 0..500 {
            let mut runs = Vec::new();
            let mut bits = PageBits::new(200);
            let mut model = BTreeSet::new();
            for _ in 0..rng.below(12) {
                let first = rng.below(180);
                let run = PageRun::new(first..first + rng.below(20));
                model.extend(run.pages().map(|page| page.0));
                bits.insert_run(run);
                if rng.chance(0.5) { runs.push(run) } else { push(&mut runs, run) }
            }
            normalise(&mut runs);
            assert!(runs.windows(2).all(|two| two[0].end() < two[1].first), "{runs:?}");
            assert_eq!(pages(&runs), model.iter().copied().collect::<Vec<_>>());
            for page in 0..200 {
                let expected = model.contains(&page);
                assert_eq!(contains(&runs, PageIndex(page)), expected);
                assert_eq!(bits.contains(PageIndex(page)), expected);
                let next = model.range(page..).next().copied().map(PageIndex);
                assert_eq!(bits.next_from(PageIndex(page)), next);
            }
            assert_eq!(bits.runs(), runs);
            let window = PageRun::new(50..120);
            let mut common = Vec::new();
            intersect(&runs, window, &mut |run| common.push(run));
            assert_eq!(pages(&common), model.range(50..120).copied().collect::<Vec<_>>());
            let others = [window, PageRun::new(150..151), PageRun::new(160..199)];
            let rest: Vec<_> =
                model.iter().copied().filter(|&page| !contains(&others, PageIndex(page))).collect();
            assert_eq!(pages(&subtract(&runs, &others)), rest);
            let gap = rng.below(10);
            let joined: Vec<_> = clusters(&runs, gap).collect();
            assert!(joined.windows(2).all(|two| two[1].first.0 - two[0].end().0 > gap));
            assert!(model.iter().all(|&page| contains(&joined, PageIndex(page))));
            let mut parts = Vec::new();
            bits.split(window, &mut |part, inside| {
                assert!(part.pages().all(|page| model.contains(&page.0) == inside));
                parts.push(part);
            });
            assert_eq!(pages(&parts), (50..120).collect::<Vec<_>>());
            bits.remove_run(window);
            model.retain(|page| !(50..120).contains(page));
            assert_eq!(bits.count(), model.len() as u64);
        }
    }

    /// Few pages of a large set, which are found by its summary.
    #[test]
    fn far_bits_are_found() {
        const PAGES: u64 = 1 << 22;
        let mut rng = Rng::new(11);
        let (mut bits, mut model) = (PageBits::new(PAGES), BTreeSet::new());
        for step in 0..2000 {
            let page = if rng.chance(0.5) { rng.below(PAGES) } else { rng.below(200) };
            let run = PageRun::new(page..page + 1);
            if rng.chance(0.6) {
                bits.insert_run(run);
                model.insert(page);
            } else {
                // One that is there, if any follows.
                let page = model.range(page..).next().copied().unwrap_or(page);
                bits.remove_run(PageRun::new(page..page + 1));
                model.remove(&page);
            }
            if step % 500 == 499 {
                assert_eq!(pages(&bits.runs()), model.iter().copied().collect::<Vec<_>>());
                bits.clear();
                model.clear();
            }
            let from = rng.below(PAGES);
            let next = model.range(from..).next().copied().map(PageIndex);
            assert_eq!(bits.next_from(PageIndex(from)), next);
            let mut inside = vec![];
            bits.split(PageRun::new(from..(from + 100_000).min(PAGES)), &mut |part, is_set| {
                inside.extend(part.pages().filter(|_| is_set).map(|page| page.0));
            });
            let expected = model.range(from..(from + 100_000).min(PAGES)).copied();
            assert_eq!(inside, expected.collect::<Vec<_>>());
        }
        assert!(bits.summary.iter().all(|&word| word == 0) == model.is_empty());
    }
}
