//! Which way pages are written, piece by piece of 16 MiB.
//!
//! | way | what it does | where it is the cheapest |
//! |---|---|---|
//! | `Pipeline` | a write for each run of pages, and every 64 MiB the I/O is started while the rest is written | few runs |
//! | `Runs` | the same, and the I/O of all is started at the end: the kernel puts more of it together | up to a twentieth |
//! | `Window` | copies the pages into a shared mapping, which is started piece by piece | more, in large folios |
//!
//! A store to a shared mapping makes its whole folio dirty, a write only what is written. With large folios (up to
//! 2 MiB, in files that were read or written in large requests), and stores all over it, few large requests are faster than
//! many small ones: the window writes 20 times the bytes at 0.6 times the time where a tenth of the pages is dirty, and the
//! bytes between are written as they are. With small folios it has nothing to offer.
//!
//! Flush of 1 GiB with that part of its pages dirty, ms:
//!
//! | | 0.1 % | 2 % | 5 % | 10 % | small folios, 0.1 % | 10 % |
//! |---|---|---|---|---|---|---|
//! | `Pipeline` | **10** | 141 | 315 | 451 | **8** | 210 |
//! | `Runs` | 17 | **132** | 272 | 402 | 11 | **196** |
//! | `Window` | 52 | 272 | **270** | **250** | 9 | 213 |
//! | shared mapping, `msync` | 55 | 263 | 273 | 252 | 4 | 151 |
//!
//! So a file of small folios with few stores, or with very many, is better mapped with
//! [`FileAccess::SharedWrite`](crate::mapper::FileAccess): `msync` is exact there by itself.
//!
//! What counts is the number of runs, not of pages: a long run is one write, however many pages it has.

use crate::PageRun;

/// Pages of a piece: 16 MiB.
pub(super) const PIECE_PAGES: u64 = 4096;
/// Bytes between the starts of I/O of a pipeline.
pub(super) const PIPELINE_BYTES: u64 = 64 << 20;
/// Runs of a piece below which the I/O is started early.
const PIPELINE_RUNS: usize = PIECE_PAGES as usize / 100;
/// Runs of a piece from which on it is stored through a window.
const WINDOW_RUNS: usize = PIECE_PAGES as usize / 20;
/// The smallest folios that are large.
const LARGE_FOLIO_BYTES: u64 = 64 << 10;
/// Gaps of so many pages are written along, where a window would be better and cannot be had.
const GAP_PAGES: u64 = 2;

/// How a piece is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Pipeline,
    Runs,
    Window,
}

/// What is known about a file, and what a caller insists on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Choice {
    pub forced: Option<Way>,
    /// Joins runs over clean gaps of so many pages.
    pub forced_gap_pages: Option<u64>,
    /// The size of the file's folios, if it was found out.
    pub folio_bytes: Option<u64>,
    /// Whether a window was refused.
    pub no_window: bool,
}

impl Choice {
    /// The way of a piece with so many runs.
    pub fn way(&self, runs: usize) -> Way {
        let large_folios = self.folio_bytes.is_none_or(|bytes| bytes >= LARGE_FOLIO_BYTES);
        match self.forced {
            Some(Way::Window) if self.no_window => Way::Runs,
            Some(way) => way,
            None if runs < PIPELINE_RUNS => Way::Pipeline,
            None if runs >= WINDOW_RUNS && large_folios && !self.no_window => Way::Window,
            None => Way::Runs,
        }
    }

    /// Clean gaps that are written along with the runs of a piece around them.
    pub fn gap_pages(&self, runs: usize) -> u64 {
        let wants_window = runs >= WINDOW_RUNS && self.no_window;
        self.forced_gap_pages.unwrap_or(if wants_window { GAP_PAGES } else { 0 })
    }
}

/// Cuts normalised runs at the borders of pieces.
pub(super) fn pieces(runs: &[PageRun]) -> Vec<Vec<PageRun>> {
    let mut pieces: Vec<Vec<PageRun>> = Vec::new();
    let mut last = u64::MAX;
    for run in runs {
        let mut from = run.first.0;
        while from < run.end().0 {
            let piece = from / PIECE_PAGES;
            let to = run.end().0.min((piece + 1) * PIECE_PAGES);
            if piece != last {
                pieces.push(Vec::new());
                last = piece;
            }
            if let Some(runs) = pieces.last_mut() {
                runs.push(PageRun::new(from..to));
            }
            from = to;
        }
    }
    pieces
}

/// Joins runs of a piece whose gaps are at most `gap_pages`, if `may_join` agrees to the gap.
pub(super) fn join(
    runs: &[PageRun],
    gap_pages: u64,
    may_join: impl Fn(PageRun) -> bool,
) -> Vec<&[PageRun]> {
    runs.chunk_by(|before, next| {
        let gap = PageRun::new(before.end().0..next.first.0);
        gap.count <= gap_pages && may_join(gap)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_cut_at_pieces() {
        let runs = [PageRun::new(1..3), PageRun::new(4000..9000), PageRun::new(9001..9002)];
        let cut = pieces(&runs);
        assert_eq!(cut[0], [PageRun::new(1..3), PageRun::new(4000..4096)]);
        assert_eq!(cut[1], [PageRun::new(4096..8192)]);
        assert_eq!(cut[2], [PageRun::new(8192..9000), PageRun::new(9001..9002)]);
        assert_eq!(cut.len(), 3);
    }

    #[test]
    fn runs_are_joined_over_gaps_that_may_be_written() {
        let runs: Vec<_> = [0..1, 2..3, 5..6, 9..10].map(PageRun::new).into();
        assert_eq!(join(&runs, 0, |_| true).len(), 4);
        let joined = join(&runs, 2, |gap| gap != PageRun::new(1..2));
        assert_eq!(joined, [&runs[..1], &runs[1..3], &runs[3..]]);
    }

    #[test]
    fn dense_pieces_of_large_folios_are_stored_and_others_written() {
        let choice =
            |folio_bytes, no_window| Choice { folio_bytes, no_window, ..Choice::default() };
        let ways = |choice: Choice| [1, 39, 40, 203, 204, 4096].map(|runs| choice.way(runs));
        let (few, some) = (Way::Pipeline, Way::Runs);
        for folio_bytes in [None, Some(2 << 20)] {
            let all = Way::Window;
            assert_eq!(ways(choice(folio_bytes, false)), [few, few, some, some, all, all]);
            assert_eq!(ways(choice(folio_bytes, true)), [few, few, some, some, some, some]);
        }
        assert_eq!(ways(choice(Some(4096), false)), [few, few, some, some, some, some]);
        assert_eq!(choice(None, true).gap_pages(300), 2);
        assert_eq!(choice(None, false).gap_pages(300), 0);
        assert_eq!(choice(None, true).gap_pages(100), 0);
    }
}
