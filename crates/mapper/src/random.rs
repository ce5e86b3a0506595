//! Where in a mapping the kernel was told to read nothing ahead, and for whom.
//!
//! Several views share one mapping, and the kernel knows only the mapping: a range is random as long as one view says so. So
//! each view's ranges are kept here, and the kernel is told what changes in their union.
//!
//! A range cuts the mapping's VMA: one more for each of its ends, but at the start of the mapping. They are taken from the
//! budget before the kernel is told, so advice is refused where the process could not make further mappings any more.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use aquifer_sys::futex::Mutex;

use aquifer_vm::ephemeral::VmaBudget;

/// Which view it is, among those of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Adviser(u64);

/// Why a range is not random.
#[derive(Debug)]
pub(crate) enum Refused {
    /// There would be too many VMAs.
    Vmas,
    /// The kernel says so.
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
    /// Offsets in the mapping. Of one view there may be several, which do not overlap.
    ranges: Vec<(Adviser, Range<usize>)>,
    vmas_taken: usize,
}

impl RandomRanges {
    /// None. What they take of the budget is given back at the end.
    pub fn new(vmas: Arc<VmaBudget>) -> RandomRanges {
        RandomRanges { vmas, given: Mutex::default() }
    }

    /// A new view.
    pub fn adviser(&self) -> Adviser {
        let mut given = self.given.lock();
        given.advisers += 1;
        Adviser(given.advisers)
    }

    /// From now on, `range` is random for this view. `tell` tells the kernel whether a range is.
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

    /// From now on, nothing in `range` is random for this view.
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

    /// Applies a change; if it is refused there was none.
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
            // What was told already stays told: it costs speed at worst, and its VMAs stay taken.
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

/// All that is in any of them: sorted, and neither touching nor empty.
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

/// What is in `ranges` and in none of `taken`.
fn without(ranges: Vec<Range<usize>>, taken: &[Range<usize>]) -> Vec<Range<usize>> {
    taken.iter().fold(ranges, |left, taken| {
        let rest = |range: Range<usize>| {
            [range.start..range.end.min(taken.start), range.start.max(taken.end)..range.end]
        };
        left.into_iter().flat_map(rest).filter(|range| !range.is_empty()).collect()
    })
}

/// VMAs that a mapping has more because these are random in it.
fn cuts(union: &[Range<usize>]) -> usize {
    union.iter().map(|range| 1 + usize::from(range.start > 0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_testkit::campaign::seed;
    use aquifer_testkit::rng::Rng;

    const PLACES: usize = 32;

    /// What the kernel was told.
    struct Told([bool; PLACES]);

    impl Told {
        fn tell(&mut self) -> impl FnMut(&Range<usize>, bool) -> io::Result<()> + '_ {
            |range, is_random| {
                self.0[range.clone()].fill(is_random);
                Ok(())
            }
        }

        /// VMAs besides one.
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
            match adds {
                true => ranges.add(views[view], &range, told.tell()).unwrap(),
                false => ranges.remove(views[view], &range, told.tell()).unwrap(),
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
