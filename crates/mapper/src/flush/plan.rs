//! How pages are written: in pieces of 2 MiB of the file. The I/O of each piece is started when it
//! is written.
//!
//! A piece is as large as the largest folio of the file systems. So no folio is already under
//! write-back when its next page is written, and the device works while the next piece is copied.
//! With larger steps the I/O waits for the copying, and the copying for a free request.
//!
//! In a large folio, a write costs the kernel a walk over all blocks of the folio, 6 µs besides the
//! request to the device, and 1.2 µs for each further page. So clean gaps of up to 8 pages are
//! written along with their neighbours; in folios of one page, gaps of up to 2. No gaps are written
//! before the folio size is known, so none in files in memory. Holes in the gaps get blocks.
//!
//! No gaps are written either while the file is open through another description, in any process:
//! then each run is written separately, as in the row "by 2 MiB". Compared with gaps of 8, that
//! takes a third less CPU time at 2 %, a tenth less at 10 %, a third more at 20 %, and 2.4 times as
//! much at 50 %; but at 10 % it takes twice as many requests, which is where this device spends its
//! time.
//!
//! Time in ms to flush 1 GiB in the page cache, by the share of dirty pages, without finding the
//! pages. On the left the file was read in requests of 4 MiB, which makes large folios; on the
//! right it was written page by page:
//!
//! | | 0.1 % | 2 % | 5 % | 10 % | 20 % | 50 % | small folios, 0.1 % | 10 % |
//! |---|---|---|---|---|---|---|---|---|
//! | started at the end | 23 | 131 | 251 | 417 | | | | 186 |
//! | by 64 MiB | 15 | 134 | 246 | | | | | |
//! | by 2 MiB | 16 | 88 | 164 | 232 | 410 | 1044 | 3.3 | 162 |
//! | with gaps of 4 | | | | 190 | 257 | 215 | | 152 |
//! | **with gaps of 8** (2 on the right) | **16** | **80** | **123** | **164** | **191** | **245** | **3.3** | **149** |
//! | two threads, one of them starts I/O | | | | 227 | | | | |
//! | `RWF_DONTCACHE` | | | | 398 | | | | |
//! | stores through a shared mapping | | | | 254 | 262 | 262 | | 258 |
//! | shared mapping, `msync` | 100 | 248 | 256 | 254 | 256 | 256 | 3.4 | 150 |
//! | past the page cache, 128 requests at once | | | | 131 | | | | |
//!
//! `msync` writes whole folios. The last row is the device's lower bound; it would evict the file
//! from the page cache, 2 MiB for each page stored to, and later readers would wait for the device.

use aquifer_sys::memory::SMALL_PAGE_BYTES;

use aquifer_vm::PageRun;

const PAGE: u64 = SMALL_PAGE_BYTES as u64;
/// Size of a piece.
pub(super) const PIECE_BYTES: u64 = 2 << 20;
/// Least size of a large folio.
const LARGE_FOLIO_BYTES: u64 = 64 << 10;
/// Longest gap that is written along, in large folios and in small ones.
const GAP_PAGES: u64 = 8;
const SMALL_FOLIO_GAP_PAGES: u64 = 2;

/// What is known about a file, and what the caller requires.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Choice {
    /// Overrides the longest gap that is written along.
    pub forced_gap_pages: Option<u64>,
    /// The size of the file's folios, if measured.
    pub folio_bytes: Option<u64>,
}

impl Choice {
    /// The longest clean gap that is written along.
    pub fn gap_pages(&self) -> u64 {
        self.forced_gap_pages.unwrap_or(match self.folio_bytes {
            None => 0,
            Some(LARGE_FOLIO_BYTES..) => GAP_PAGES,
            Some(_) => SMALL_FOLIO_GAP_PAGES,
        })
    }
}

/// Cuts normalised runs at the borders of pieces of the file. Page 0 is at `first_byte`.
pub(super) fn pieces(runs: &[PageRun], first_byte: u64) -> Vec<Vec<PageRun>> {
    let piece_pages = PIECE_BYTES / PAGE;
    let lead_pages = first_byte / PAGE % piece_pages;
    let mut pieces: Vec<Vec<PageRun>> = Vec::new();
    let mut last = u64::MAX;
    for run in runs {
        let mut from = run.first.0;
        while from < run.end().0 {
            let piece = (from + lead_pages) / piece_pages;
            let to = run.end().0.min((piece + 1) * piece_pages - lead_pages);
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

/// Groups the runs of a piece whose gaps are at most `gap_pages`.
pub(super) fn join(runs: &[PageRun], gap_pages: u64) -> impl Iterator<Item = &[PageRun]> {
    runs.chunk_by(move |before, next| next.first.0 - before.end().0 <= gap_pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_cut_at_pieces_of_the_file() {
        let runs = [PageRun::new(1..3), PageRun::new(500..1100), PageRun::new(1101..1102)];
        let cut = pieces(&runs, 0);
        assert_eq!(cut[0], [PageRun::new(1..3), PageRun::new(500..512)]);
        assert_eq!(cut[1], [PageRun::new(512..1024)]);
        assert_eq!(cut[2], [PageRun::new(1024..1100), PageRun::new(1101..1102)]);
        assert_eq!(cut.len(), 3);
        // The view begins ten pages before a piece ends.
        let cut = pieces(&runs, PIECE_BYTES * 4 - 10 * PAGE);
        assert_eq!(cut[0], [PageRun::new(1..3)]);
        assert_eq!(cut[1], [PageRun::new(500..522)]);
        assert_eq!(cut[2], [PageRun::new(522..1034)]);
        assert_eq!(cut[3], [PageRun::new(1034..1100), PageRun::new(1101..1102)]);
    }

    #[test]
    fn runs_are_joined_over_small_gaps() {
        let runs: Vec<_> = [0..1, 2..3, 5..6, 9..10].map(PageRun::new).into();
        let join = |gap_pages| join(&runs, gap_pages).collect::<Vec<_>>();
        assert_eq!(join(0).len(), 4);
        assert_eq!(join(1), [&runs[..2], &runs[2..3], &runs[3..]]);
        assert_eq!(join(2), [&runs[..3], &runs[3..]]);
        assert_eq!(join(3), [&runs[..]]);
    }

    #[test]
    fn nothing_is_written_along_before_the_folios_are_known() {
        let gap_pages = |folio_bytes| Choice { folio_bytes, ..Choice::default() }.gap_pages();
        assert_eq!([None, Some(4096), Some(1 << 16), Some(2 << 20)].map(gap_pages), [0, 2, 8, 8]);
    }
}
