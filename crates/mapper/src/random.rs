//! The ranges of a mapping for which the kernel's read-ahead is off, by view.
//!
//! Several views share one mapping, and the kernel knows only the mapping: a range is random as
//! long as any view has advised so. The ranges of each view are kept here, and the kernel is told
//! of changes in their union.
//!
//! A range splits the mapping's VMA: one more VMA for each of its ends, except at the start of the
//! mapping. They are taken from the budget first, so advice is refused where the process could make
//! no further mappings.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use aquifer_sys::futex::Mutex;

use aquifer_vm::ephemeral::VmaBudget;

/// Identifies a view among those of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Adviser(u64);

/// Why a range could not be made random.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The VMAs would exceed the budget.
    Vmas,
    /// The kernel refused.
    Kernel(io::Error),
}

/// See the module documentation.
pub(crate) struct RandomRanges {
    vmas: Arc<VmaBudget>,
    given: Mutex<Given>,
}

#[derive(Debug, Default)]
struct Given {
    advisers: u64,
    /// Offsets in the mapping. The ranges of one view do not overlap each other.
    ranges: Vec<(Adviser, Range<usize>)>,
    vmas_taken: usize,
}

impl RandomRanges {
    /// Starts without ranges. Dropping it returns its VMAs to the budget.
    pub fn new(vmas: Arc<VmaBudget>) -> RandomRanges {
        RandomRanges { vmas, given: Mutex::default() }
    }

    /// Registers a view.
    pub fn adviser(&self) -> Adviser {
        let mut given = self.given.lock();
        given.advisers += 1;
        Adviser(given.advisers)
    }

    /// Makes `range` random for this view. `tell` tells the kernel whether a range is random.
    pub fn add(
        &self,
        adviser: Adviser,
        range: &Range<usize>,
        tell: impl FnMut(&Range<usize>, bool) -> io::Result<()>,
    ) -> Result<(), Refused> {
        self.change(tell, |ranges| {
            ranges.push((adviser, range.clone()));
        })
    }

    /// Makes `range` not random for this view.
    pub fn remove(
        &self,
        adviser: Adviser,
        range: &Range<usize>,
        tell: impl FnMut(&Range<usize>, bool) -> io::Result<()>,
    ) -> Result<(), Refused> {
        self.change(tell, |ranges| {
            let own: Vec<_> = ranges.extract_if(.., |(of, _)| *of == adviser).collect();
            for (_, before) in own {
                let rest = without(vec![before], std::slice::from_ref(range));
                ranges.extend(rest.into_iter().map(|rest| (adviser, rest)));
            }
        })
    }

    /// Applies a change. If it is refused, the recorded ranges are unchanged.
    fn change(
        &self,
        mut tell: impl FnMut(&Range<usize>, bool) -> io::Result<()>,
        change: impl FnOnce(&mut Vec<(Adviser, Range<usize>)>),
    ) -> Result<(), Refused> {
        let mut given = self.given.lock();
        let before = union(&given.ranges);
        let mut ranges = given.ranges.clone();
        change(&mut ranges);
        let after = union(&ranges);
        let (had, wanted) = (given.vmas_taken, cuts(&after));
        if wanted > had && !self.vmas.try_take(wanted - had) {
            return Err(Refused::Vmas);
        }
        given.vmas_taken = had.max(wanted);
        let begins = without(after.clone(), &before).into_iter().map(|range| (range, true));
        let ends = without(before, &after).into_iter().map(|range| (range, false));
        for (range, is_random) in begins.chain(ends) {
            // The kernel keeps what it was told before the error: that costs only speed, and its
            // VMAs stay taken.
            tell(&range, is_random).map_err(Refused::Kernel)?;
        }
        given.ranges = ranges;
        self.vmas.give_back(given.vmas_taken - wanted);
        given.vmas_taken = wanted;
        Ok(())
    }
}

impl Drop for RandomRanges {
    fn drop(&mut self) {
        self.vmas.give_back(self.given.lock().vmas_taken);
    }
}

/// The union of the ranges: sorted, without empty or adjacent ranges.
fn union(ranges: &[(Adviser, Range<usize>)]) -> Vec<Range<usize>> {
    let mut sorted: Vec<_> = ranges.iter().map(|(_, range)| range.clone()).collect();
    sorted.retain(|range| !range.is_empty());
    sorted.sort_unstable_by_key(|range| range.start);
    let mut all: Vec<Range<usize>> = Vec::new();
    for range in sorted {
        match all.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}

/// `ranges` without the parts that are in `taken`.
fn without(ranges: Vec<Range<usize>>, taken: &[Range<usize>]) -> Vec<Range<usize>> {
    taken.iter().fold(ranges, |left, taken| {
        let rest = |range: Range<usize>| {
            [range.start..range.end.min(taken.start), range.start.max(taken.end)..range.end]
        };
        left.into_iter().flat_map(rest).filter(|range| !range.is_empty()).collect()
    })
}

/// The additional VMAs of a mapping with these random ranges.
fn cuts(union: &[Range<usize>]) -> usize {
    union.iter().map(|range| 1 + usize::from(range.start > 0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_testkit::campaign::seed;
    use aquifer_testkit::rng::Rng;

    const PLACES: usize = 32;

    /// The state that the kernel was told.
    struct Told([bool; PLACES]);

    impl Told {
        fn tell(&mut self) -> impl FnMut(&Range<usize>, bool) -> io::Result<()> + '_ {
            |range, is_random| {
                self.0[range.clone()].fill(is_random);
                Ok(())
            }
        }

        /// VMAs in addition to the first.
        fn cuts(&self) -> usize {
            self.0.windows(2).filter(|pair| pair[0] != pair[1]).count()
        }
    }

    #[test]
    fn a_range_is_random_as_long_as_one_view_says_so_and_its_vmas_are_taken() {
        let mut random = Rng::new(seed(11));
        let budget = Arc::new(VmaBudget::new(1000));
        let ranges = RandomRanges::new(budget.clone());
        let views = [ranges.adviser(), ranges.adviser(), ranges.adviser()];
        let mut model = [[false; PLACES]; 3];
        let mut told = Told([false; PLACES]);
        for _ in 0..3000 {
            let view = random.below(3) as usize;
            let (a, b) = (random.below(33) as usize, random.below(33) as usize);
            let range = a.min(b)..a.max(b);
            let adds = random.below(2) == 0;
            if adds {
                ranges.add(views[view], &range, told.tell()).unwrap()
            } else {
                ranges.remove(views[view], &range, told.tell()).unwrap()
            }
            model[view][range].fill(adds);
            let expected: [bool; PLACES] =
                std::array::from_fn(|place| model.iter().any(|view| view[place]));
            assert_eq!(told.0, expected);
            let uncounted = usize::from(told.0[PLACES - 1]);
            assert_eq!(
                budget.used(),
                told.cuts() + uncounted,
                "one more for the end of the mapping"
            );
        }
        drop(ranges);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn without_vmas_it_is_refused_and_nothing_changes() {
        let budget = Arc::new(VmaBudget::new(3));
        let ranges = RandomRanges::new(budget.clone());
        let view = ranges.adviser();
        let mut told = Told([false; PLACES]);
        ranges.add(view, &(4..8), told.tell()).unwrap();
        let refused = ranges.add(view, &(12..16), told.tell()).unwrap_err();
        assert!(matches!(refused, Refused::Vmas), "{refused:?}");
        assert_eq!((told.cuts(), budget.used()), (2, 2));
        let broken = |_: &Range<usize>, _| Err(io::Error::from_raw_os_error(libc::ENOMEM));
        let refused = ranges.remove(view, &(0..32), broken).unwrap_err();
        assert!(matches!(refused, Refused::Kernel(_)), "{refused:?}");
        assert_eq!(budget.used(), 2);
        ranges.remove(view, &(0..32), told.tell()).unwrap();
        assert_eq!((told.cuts(), budget.used()), (0, 0));
    }
}
