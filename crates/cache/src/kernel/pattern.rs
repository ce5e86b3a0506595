//! Detects whether read-ahead pays off for a kernel-backed mapping, from the pages it leaves
//! behind.
//!
//! The kernel's read-around loads 16 pages or more on each side of a fault. That makes scans fast
//! (measured on a virtual disk with ext4: 2.4 µs a page against 77). For random accesses beyond the
//! budget it fills memory with unused pages, and costs a multiple of the I/O (36 µs an access
//! against 6 on a compressed RAM disk). The kernel does not learn this itself, because fault-around
//! makes the neighbours of a fault look like hits.
//!
//! User space does not see the faults on a file mapping. It sees each region when the drop manager
//! unmaps it:
//! * with read-ahead, how many of its cached pages are mapped: nearly all after a scan, half or
//!   fewer after random accesses;
//! * without read-ahead, how full it is: a scan leaves full regions, random accesses sparse ones.
//!
//! Of data little larger than the budget, random accesses leave full regions of mapped pages, too.
//! But there, some pages of a region that was dropped come back soon, and not all: the drop manager
//! sees that, and says that accesses are *scattered*.
//!
//! So a mapping starts with read-ahead, which below the budget never hurts for long, and is
//! switched after it has streamed through the budget, or when the application prefetches scattered
//! pages. Each change doubles the evidence needed for the next one.

use aquifer_vm::drop_behind::REGION_PAGES;

/// Cached pages that the first decision is based on.
const FIRST_EVIDENCE_PAGES: u64 = 2048;
const MOST_EVIDENCE_PAGES: u64 = 1 << 18;

/// The detector's state for one mapping.
#[derive(Debug)]
pub(crate) struct Detector {
    reads_ahead: bool,
    evidence_pages: u64,
    cached: u64,
    mapped: u64,
    regions: u64,
}

impl Detector {
    pub fn new() -> Detector {
        Detector {
            reads_ahead: true,
            evidence_pages: FIRST_EVIDENCE_PAGES,
            cached: 0,
            mapped: 0,
            regions: 0,
        }
    }

    /// The application prefetches scattered pages: read-around each fault is waste from now on,
    /// until regions show otherwise.
    pub fn expect_random(&mut self) {
        self.reads_ahead = false;
        (self.cached, self.mapped, self.regions) = (0, 0, 0);
    }

    /// Records a region that is being unmapped with `cached` of its pages cached; returns whether to
    /// read ahead, if that changes.
    ///
    /// `is_scattered`: a full region is no sign of a scan, see the module documentation. `mapped` counts the mapped pages; it is called only if the count matters.
    pub fn observe(
        &mut self,
        cached: u64,
        is_scattered: bool,
        mapped: impl FnOnce() -> u64,
    ) -> Option<bool> {
        // Without read-ahead, all pages of a sparse region were accessed.
        let is_dense = cached * 4 >= REGION_PAGES * 3;
        let mapped = if self.reads_ahead || is_dense { mapped() } else { cached };
        // Cached by another process or mapping: no evidence about accesses here.
        if mapped == 0 {
            return None;
        }
        self.cached += cached;
        self.mapped += mapped.min(cached);
        self.regions += 1;
        if self.cached < self.evidence_pages {
            return None;
        }
        let looks_scanned = if self.reads_ahead {
            self.mapped * 4 >= self.cached * 3
        } else {
            self.cached * 4 >= self.regions * REGION_PAGES * 3
        };
        let reads_ahead = looks_scanned && !is_scattered;
        let changed = reads_ahead != self.reads_ahead;
        if changed {
            self.evidence_pages = (self.evidence_pages * 2).min(MOST_EVIDENCE_PAGES);
            self.reads_ahead = reads_ahead;
        }
        (self.cached, self.mapped, self.regions) = (0, 0, 0);
        changed.then_some(reads_ahead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decide(detector: &mut Detector, cached: u64, mapped: u64) -> Option<bool> {
        (0..4096).find_map(|_| detector.observe(cached, false, || mapped))
    }

    #[test]
    fn a_scan_keeps_read_ahead_and_random_accesses_end_it() {
        let mut detector = Detector::new();
        assert_eq!(decide(&mut detector, REGION_PAGES, REGION_PAGES - 20), None);
        assert_eq!(decide(&mut detector, 64, 24), Some(false));
        assert_eq!(decide(&mut detector, 60, 60), None, "still random");
        assert_eq!(decide(&mut detector, REGION_PAGES, REGION_PAGES), Some(true), "a scan again");
    }

    #[test]
    fn a_scattered_prefetch_ends_read_ahead_until_there_is_a_scan() {
        let mut detector = Detector::new();
        detector.expect_random();
        assert_eq!(decide(&mut detector, 60, 60), None);
        assert_eq!(decide(&mut detector, REGION_PAGES, REGION_PAGES), Some(true));
    }

    #[test]
    fn full_regions_are_no_scan_while_accesses_are_scattered() {
        let mut detector = Detector::new();
        let full = || REGION_PAGES;
        let ends = (0..4096).find_map(|_| detector.observe(REGION_PAGES, true, full));
        assert_eq!(ends, Some(false));
        assert!((0..4096).all(|_| detector.observe(REGION_PAGES, true, full).is_none()));
        assert_eq!(decide(&mut detector, REGION_PAGES, REGION_PAGES), Some(true));
    }

    #[test]
    fn pages_cached_by_others_are_no_evidence() {
        assert_eq!(decide(&mut Detector::new(), REGION_PAGES, 0), None);
    }

    #[test]
    fn each_change_of_mind_needs_more_evidence() {
        let mut detector = Detector::new();
        let mut needed = vec![];
        for turn in 0..6 {
            let mut pages = 0;
            loop {
                let seen = if turn % 2 == 0 { (64, 20) } else { (REGION_PAGES, REGION_PAGES) };
                pages += seen.0;
                if detector.observe(seen.0, false, || seen.1).is_some() {
                    break;
                }
            }
            needed.push(pages);
        }
        assert!(needed.windows(2).all(|pair| pair[0] < pair[1]), "{needed:?}");
    }
}
