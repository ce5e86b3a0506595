//! Advice from the program about its accesses.
//!
//! | advice | effect |
//! |---|---|
//! | `Sequential`, `WillNeed` | a helper maps the range ahead ([`super::map_ahead`]), reading it if necessary |
//! | `Random` | no helper maps ahead, and the kernel does not read ahead |
//! | `DontNeed` | no helper maps ahead; the mapping is not parked (a writable one never is) |
//! | `Normal` | as without advice |
//! | none | a large file in memory is mapped ahead once its reader is seen to be sequential; `Normal` ends that |
//!
//! Besides the faulting page, a fault maps the surrounding pages that are already in the page
//! cache, 64 KiB by default. The kernel does that whatever the advice, at hardly any cost. So after
//! `Random` a program sees more pages mapped than it has touched, but none of them was read for
//! that.
//!
//! `MADV_SEQUENTIAL` is never used: with several streams in one mapping it halves the speed.
//! `DontNeed` does not discard pages, unlike the `madvise` of that name.
//!
//! Advice ends with the view that gave it; other views' advice about the same mapping stays
//! ([`super::random`]).

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_sys::memory;

use super::map_ahead::{MapAhead, Ticket};
use super::mapped::Mapped;
use super::populate::{Span, whole_pages};
use super::random::{Adviser, RandomRanges, Refused};

/// How a range of a view will be used ([`FileView::advise`](crate::FileView::advise)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Advice {
    /// Unknown.
    Normal,
    /// In order, from start to end: it is mapped ahead in the background, and read ahead if
    /// necessary.
    Sequential,
    /// In random order: nothing is read ahead. A fault still maps surrounding pages that are in
    /// memory.
    Random,
    /// Soon: as for `Sequential`.
    WillNeed,
    /// Not again: the mapping is not parked after its last view. Discards nothing.
    DontNeed,
}

/// The advice of one view.
#[derive(Default)]
pub(crate) struct Advised {
    given: Mutex<Given>,
}

#[derive(Default)]
struct Given {
    tickets: Vec<Ticket>,
    /// Identifies the view in [`RandomRanges`], once it has advised `Random`.
    adviser: Option<Adviser>,
    /// Whether `DontNeed` of this view keeps the mapping from being parked.
    was_kept: bool,
}

impl Advised {
    fn lock(&self) -> MutexGuard<'_, Given> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies advice about `range` of a span; `may_park` is the flag of its mapping that allows
    /// parking.
    pub fn follow(
        &self,
        advice: Advice,
        ahead: &MapAhead,
        span: &Arc<dyn Span>,
        range: Range<usize>,
        may_park: &AtomicBool,
        random: &RandomRanges,
    ) -> std::result::Result<(), Refused> {
        let range = whole_pages(&**span, range);
        let mut given = self.lock();
        // Ranges are mapped ahead in the order of the requests; a request replaces those that it
        // overlaps.
        given.tickets.retain(|ticket| !overlap(&ticket.range(), &range));
        if range.is_empty() {
            return Ok(());
        }
        if advice == Advice::Random {
            let adviser = *given.adviser.get_or_insert_with(|| random.adviser());
            return random.add(adviser, &range, |range, on| tell(&**span, range, on));
        }
        if let Some(adviser) = given.adviser {
            random.remove(adviser, &range, |range, on| tell(&**span, range, on))?;
        }
        match advice {
            Advice::Sequential | Advice::WillNeed => {
                given.tickets.retain(|ticket| !ticket.is_done());
                given.tickets.extend(ahead.request(span, range));
            }
            // Relaxed: read when the last view is closed, under a lock that orders it.
            Advice::DontNeed => given.was_kept |= may_park.swap(false, Ordering::Relaxed),
            Advice::Normal => {
                if std::mem::take(&mut given.was_kept) {
                    may_park.store(true, Ordering::Relaxed);
                }
            }
            Advice::Random => unreachable!("followed above"),
        }
        Ok(())
    }

    /// Watches a range without advice, until there is some.
    pub fn watch(&self, ahead: &MapAhead, span: &Arc<dyn Span>, range: Range<usize>) {
        self.lock().tickets.extend(ahead.watch(span, range));
    }

    /// Ends the advice of a view that is being closed, except for `DontNeed`: that still decides
    /// whether the mapping is parked.
    pub fn end(&self, span: &dyn Span, random: &RandomRanges) {
        let given = std::mem::take(&mut *self.lock());
        drop(given.tickets);
        if let Some(adviser) = given.adviser {
            // An error leaves the range without read-ahead, which affects only speed.
            let _ = random.remove(adviser, &(0..usize::MAX), |range, on| tell(span, range, on));
        }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Tells the kernel whether a range is random.
fn tell(span: &dyn Span, range: &Range<usize>, is_random: bool) -> io::Result<()> {
    let advice = if is_random { memory::Advice::Random } else { memory::Advice::Normal };
    let address = span.address().wrapping_add(range.start).cast_mut();
    // SAFETY: mapped as long as the span lives; this advice changes no contents.
    unsafe { memory::advise(address, range.len(), advice) }
}

// SAFETY: the extent is mapped until it is retired, when the value is dropped.
unsafe impl Span for Mapped {
    fn address(&self) -> *const u8 {
        Mapped::address(self)
    }

    fn len_bytes(&self) -> usize {
        self.mapped_bytes as usize
    }
}

#[cfg(test)]
mod tests {
    use super::super::map_ahead::MapAheadLimits;
    use super::super::populate::tests::Mapping;
    use super::*;
    use aquifer_vm::ephemeral::VmaBudget;

    const PAGE: usize = memory::SMALL_PAGE_BYTES;

    /// Whether the kernel's read-ahead is off for an offset, according to `/proc/self/smaps`.
    fn is_random(mapping: &Mapping, offset: usize) -> bool {
        let at = mapping.address() as usize + offset;
        let mut inside = false;
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let first = line.split(' ').next().unwrap();
            if let Some((start, end)) = first.split_once('-') {
                let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
                inside = (number(start)..number(end)).contains(&at);
            } else if inside && line.starts_with("VmFlags:") {
                return line.split(' ').any(|flag| flag == "rr");
            }
        }
        panic!("not mapped");
    }

    struct Rig {
        ahead: MapAhead,
        mapping: Arc<Mapping>,
        advised: Advised,
        may_park: AtomicBool,
        random: RandomRanges,
    }

    impl Rig {
        fn new(workers: usize) -> Rig {
            Rig {
                ahead: MapAhead::new(MapAheadLimits { workers, in_flight_bytes: 1 << 30 }),
                mapping: Mapping::of_pages(512),
                advised: Advised::default(),
                may_park: AtomicBool::new(true),
                random: RandomRanges::new(Arc::new(VmaBudget::new(8))),
            }
        }

        fn advise(&self, advice: Advice, pages: Range<usize>) {
            self.advise_for(&self.advised, advice, pages);
        }

        fn advise_for(&self, view: &Advised, advice: Advice, pages: Range<usize>) {
            let span: Arc<dyn Span> = self.mapping.clone();
            let range = pages.start * PAGE..pages.end * PAGE;
            view.follow(advice, &self.ahead, &span, range, &self.may_park, &self.random).unwrap();
        }

        fn is_kept(&self) -> bool {
            self.may_park.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn random_is_undone_by_any_other_advice_and_at_the_end() {
        let rig = Rig::new(0);
        rig.advise(Advice::Random, 0..256);
        assert!(is_random(&rig.mapping, 0) && is_random(&rig.mapping, 255 * PAGE));
        assert!(!is_random(&rig.mapping, 256 * PAGE));
        rig.advise(Advice::Sequential, 0..64);
        assert!(!is_random(&rig.mapping, 0) && is_random(&rig.mapping, 64 * PAGE));
        rig.advise(Advice::Normal, 64..128);
        assert!(!is_random(&rig.mapping, 64 * PAGE) && is_random(&rig.mapping, 128 * PAGE));
        rig.advised.end(&*rig.mapping, &rig.random);
        assert!((0..512).step_by(64).all(|page| !is_random(&rig.mapping, page * PAGE)));
    }

    #[test]
    fn what_another_view_advised_stays() {
        let rig = Rig::new(0);
        let other = Advised::default();
        rig.advise(Advice::Random, 0..256);
        rig.advise_for(&other, Advice::Random, 128..384);
        rig.advised.end(&*rig.mapping, &rig.random);
        assert!(!is_random(&rig.mapping, 127 * PAGE) && is_random(&rig.mapping, 128 * PAGE));
        rig.advise(Advice::Normal, 0..512);
        assert!(is_random(&rig.mapping, 383 * PAGE));
        other.end(&*rig.mapping, &rig.random);
        assert!((0..512).step_by(64).all(|page| !is_random(&rig.mapping, page * PAGE)));
    }

    #[test]
    fn sequential_and_will_need_map_ahead_and_random_ends_it() {
        for advice in [Advice::Sequential, Advice::WillNeed] {
            let rig = Rig::new(1);
            rig.advise(advice, 0..512);
            while rig.mapping.mapped_pages(0..512 * PAGE) < 512 {
                std::thread::yield_now();
            }
            assert_eq!(rig.ahead.stats().requests, 1);
            rig.advise(Advice::Random, 0..512);
            assert!(rig.advised.lock().tickets.is_empty());
        }
        let rig = Rig::new(1);
        for advice in [Advice::Normal, Advice::Random, Advice::DontNeed] {
            rig.advise(advice, 0..512);
        }
        assert_eq!(rig.ahead.stats().requests, 0);
    }

    #[test]
    fn dont_need_keeps_the_mapping_out_of_the_cache_until_normal() {
        let rig = Rig::new(0);
        rig.advise(Advice::DontNeed, 0..512);
        assert!(!rig.is_kept());
        rig.advise(Advice::DontNeed, 0..512);
        rig.advise(Advice::Normal, 0..512);
        assert!(rig.is_kept());
        // Advice never allows parking a mapping that must not be parked.
        rig.may_park.store(false, Ordering::Relaxed);
        rig.advise(Advice::DontNeed, 0..512);
        rig.advise(Advice::Normal, 0..512);
        assert!(!rig.is_kept());
    }
}
