//! Whether read-ahead serves a kernel-backed mapping, found out from what it leaves behind.
//!
//! The kernel's read-around brings 16 pages or more to each side of a fault. For a scan that is what
//! makes it fast (measured on a virtual disk with ext4: 2.4 µs a page against 77); for random accesses
//! beyond the budget it fills memory with pages that nobody uses, and costs as many times the I/O (36 µs
//! an access against 6 on a compressed RAM disk). The kernel does not learn this by itself, because
//! fault-around makes the neighbours of a fault look like hits.
//!
//! Faults on a file mapping are not seen in user space. What is seen is each region when the drop manager
//! gives it back:
//! * under read-ahead, how many of its cached pages were mapped in: nearly all of them after a scan, a
//!   half or less after random accesses;
//! * without read-ahead, how full it is: a scan leaves full regions, random accesses sparse ones.
//!
//! So a mapping starts with read-ahead, which below the budget never hurts for long, and is switched when
//! it has streamed through the budget. Each change of mind doubles the evidence the next one needs.

use aquifer_vm::drop_behind::REGION_PAGES;

/// Pages that the first decision is based on.
const FIRST_EVIDENCE_PAGES: u64 = 2048;
const MOST_EVIDENCE_PAGES: u64 = 1 << 18;

/// The state of a mapping whose pattern is to be found out.
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

    /// A region is being given back with so many of its pages cached; `mapped` counts those mapped in,
    /// where that is of interest. Returns whether there should be read-ahead, where that changes.
    pub fn observe(&mut self, cached: u64, mapped: impl FnOnce() -> u64) -> Option<bool> {
        // Without read-ahead the pages of a sparse region were all asked for.
        let is_dense = cached * 4 >= REGION_PAGES * 3;
        let mapped = if self.reads_ahead || is_dense { mapped() } else { cached };
        // Cached by somebody else: says nothing about the accesses here.
        if mapped == 0 {
            return None;
        }
        self.cached += cached;
        self.mapped += mapped.min(cached);
        self.regions += 1;
        if self.cached < self.evidence_pages {
            return None;
        }
        let reads_ahead = if self.reads_ahead {
            self.mapped * 4 >= self.cached * 3
        } else {
            self.cached * 4 >= self.regions * REGION_PAGES * 3
        };
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
        (0..4096).find_map(|_| detector.observe(cached, || mapped))
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
                if detector.observe(seen.0, || seen.1).is_some() {
                    break;
                }
            }
            needed.push(pages);
        }
        assert!(needed.windows(2).all(|pair| pair[0] < pair[1]), "{needed:?}");
    }
}
