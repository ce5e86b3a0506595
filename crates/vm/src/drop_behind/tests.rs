use super::*;
use aquifer_sys::memory::{self, Protection};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

const MIB: u64 = 1 << 20;
const BOUND: u64 = 32 * MIB;

/// A file with the given number of pages in memory, by region.
struct Fake {
    regions: Vec<AtomicU64>,
    /// Pages of each region that are mapped in.
    mapped: Vec<AtomicU64>,
    hands: Hands,
    len_bytes: AtomicU64,
    /// Whether `cached` or `mapped` returns its pages.
    has_cachestat: bool,
    discarded: AtomicU64,
}

impl Fake {
    fn with(bytes: u64, has_cachestat: bool) -> Arc<Fake> {
        Arc::new(Fake {
            regions: (0..bytes / REGION_BYTES as u64)
                .map(|_| AtomicU64::new(REGION_PAGES))
                .collect(),
            mapped: (0..bytes / REGION_BYTES as u64)
                .map(|_| AtomicU64::new(REGION_PAGES))
                .collect(),
            hands: Hands::default(),
            len_bytes: AtomicU64::new(bytes),
            has_cachestat,
            discarded: AtomicU64::new(0),
        })
    }

    fn pages(&self) -> u64 {
        self.regions.iter().map(|region| region.load(Ordering::Relaxed)).sum()
    }

    fn in_range(&self, range: &Range<u64>) -> impl Iterator<Item = &AtomicU64> {
        let first = ((range.start / REGION) as usize).min(self.regions.len());
        let end = (range.end.div_ceil(REGION) as usize).min(self.regions.len());
        self.regions[first..end.max(first)].iter()
    }
}

fn pages_of(region: &AtomicU64) -> u64 {
    region.load(Ordering::Relaxed)
}

impl Droppable for Fake {
    fn identity(&self) -> FileIdentity {
        FileIdentity { device: 0, inode: std::ptr::from_ref(self).addr() as u64 }
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }

    fn hands(&self) -> &Hands {
        &self.hands
    }

    fn cached(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
        self.has_cachestat.then(|| match len_bytes {
            0 => self.pages(),
            _ => self.in_range(&(offset_bytes..offset_bytes + len_bytes)).map(pages_of).sum(),
        })
    }

    fn mapped(&self, _tables: &mut PageTables) -> Option<u64> {
        Some(self.pages())
    }

    fn present(&self, region: &Range<u64>, _tables: &mut PageTables) -> Option<u64> {
        Some(self.mapped[(region.start / REGION) as usize].load(Ordering::Relaxed))
    }

    fn unmap(&self, pages: &Range<u64>) {
        for (at, region) in self.mapped.iter().enumerate() {
            if pages.contains(&(at as u64 * REGION)) {
                region.store(0, Ordering::Relaxed);
            }
        }
    }

    fn drop_unmapped(&self, pages: &Range<u64>) {
        for (region, mapped) in self
            .regions
            .iter()
            .zip(&self.mapped)
            .enumerate()
            .filter_map(|(at, region)| pages.contains(&(at as u64 * REGION)).then_some(region))
        {
            let stay = mapped.load(Ordering::Relaxed);
            let gone = region.swap(stay, Ordering::Relaxed) - stay;
            self.discarded.fetch_add(gone, Ordering::Relaxed);
        }
    }
}

/// Maps a foreign file of this size, and faults it in.
fn unrelated(bytes: u64) {
    // SAFETY: a NUL-terminated name.
    let memory = unsafe { libc::memfd_create(c"aquifer-unrelated".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: made above, and owned by nothing else.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(memory) });
    file.set_len(bytes).unwrap();
    let len = bytes as usize;
    let address = memory::map_anonymous(len).unwrap();
    // SAFETY: replaces the mapping made above, which stays until the process ends.
    unsafe {
        memory::map_file_at(address, len, Protection::Read, file.as_fd(), 0).unwrap();
        memory::advise(address, len, memory::Advice::PopulateRead).unwrap();
    }
}

#[test]
fn what_others_map_does_not_drop_our_pages() {
    for has_cachestat in [true, false] {
        let fake = Fake::with(16 * MIB, has_cachestat);
        let (behind, mut state) = (DropBehind::new(), State::new());
        let published = AtomicU64::new(0);
        let check_once = |state: &mut State| {
            let publish = |pages, _| published.store(pages, Ordering::Relaxed);
            behind.check(state, std::slice::from_ref(&fake), BOUND, &publish);
            published.load(Ordering::Relaxed)
        };
        check_once(&mut state);
        // As after a measurement that took long.
        state.resident.measured_long_ago();
        unrelated(2 * BOUND);
        assert_eq!(check_once(&mut state), fake.pages(), "with cachestat: {has_cachestat}");
        assert_eq!(fake.discarded.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn what_others_read_drops_a_quarter_of_our_pages_at_most_and_none_after_a_change_of_files() {
    let fake = Fake::with(30 * MIB, true);
    let (behind, mut state) = (DropBehind::new(), State::new());
    let check = |state: &mut State| {
        for _ in 0..200 {
            behind.check(state, std::slice::from_ref(&fake), BOUND, &|_, _| {});
        }
        fake.discarded.load(Ordering::Relaxed)
    };
    assert_eq!(check(&mut state), 0);
    state.resident.others_were_read(5000);
    state.resident.doubt();
    assert_eq!(check(&mut state), 0);
    state.resident.others_were_read(5000);
    let dropped = check(&mut state);
    let quarter = BOUND / SMALL_PAGE_BYTES as u64 / 4;
    assert!((1..=quarter + REGION_PAGES).contains(&dropped), "{dropped} pages");
}

#[test]
fn what_is_ours_and_too_much_is_dropped() {
    let fake = Fake::with(40 * MIB, true);
    let (behind, mut state) = (DropBehind::new(), State::new());
    behind.check(&mut state, std::slice::from_ref(&fake), BOUND, &|_, _| ());
    let most = BOUND / SMALL_PAGE_BYTES as u64 * (1000 - ROOM_PERMILLE) / 1000;
    assert!((most / 8 * 7 - REGION_PAGES..=most).contains(&fake.pages()), "{} pages", fake.pages());
}

#[test]
fn what_is_mapped_again_stays() {
    let fake = Fake::with(40 * MIB, true);
    let (behind, mut state) = (DropBehind::new(), State::new());
    let files = std::slice::from_ref(&fake);
    let is_hot = |at: u64| at.is_multiple_of(7);
    let hot = || (0..).zip(&fake.regions).filter(|(at, _)| is_hot(*at)).map(|(_, region)| region);
    for step in 0..200 {
        // In the first lap nothing is known.
        if step > 50 {
            assert_eq!(hot().map(pages_of).min(), Some(REGION_PAGES), "at step {step}");
        }
        // The hot regions are read all the time, of the others one that is absent is loaded.
        let load = |at: usize| {
            fake.regions[at].store(REGION_PAGES, Ordering::Relaxed);
            fake.mapped[at].store(REGION_PAGES, Ordering::Relaxed);
        };
        (0..fake.regions.len()).filter(|&at| is_hot(at as u64)).for_each(load);
        let absent = |at: &usize| pages_of(&fake.regions[*at]) == 0;
        let mut others = (0..fake.regions.len()).map(|at| (at + 11 * step) % 20);
        if let Some(at) = others.find(absent) {
            load(at);
        }
        // This is about the hands, not about cycles.
        state.cyclic.forget();
        // The process's counters know nothing of this file.
        state.resident.forget();
        behind.check(&mut state, files, BOUND, &|_, _| ());
    }
    assert!(fake.discarded.load(Ordering::Relaxed) > 100 * REGION_PAGES);
}

impl Fake {
    /// Accesses whole regions, checking after each. Returns how many had to be loaded.
    fn access(
        self: &Arc<Fake>,
        behind: &DropBehind<Fake>,
        state: &mut State,
        order: impl Iterator<Item = u64>,
    ) -> u64 {
        let mut loaded = 0;
        for region in order {
            let at = region as usize;
            loaded += u64::from(self.regions[at].swap(REGION_PAGES, Ordering::Relaxed) == 0);
            self.mapped[at].store(REGION_PAGES, Ordering::Relaxed);
            // The process's counters know nothing of this file.
            state.resident.forget();
            behind.check(state, std::slice::from_ref(self), 2 * BOUND, &|_, _| ());
            assert!(self.pages() <= 2 * BOUND / SMALL_PAGE_BYTES as u64);
        }
        loaded
    }
}

/// 32 regions are the bound; the file has 41, 1.28 times as many, and as many again.
const CYCLE: u64 = 41;

fn empty(regions: u64) -> Arc<Fake> {
    let fake = Fake::with(regions * REGION, true);
    for region in fake.regions.iter().chain(&fake.mapped) {
        region.store(0, Ordering::Relaxed);
    }
    fake
}

#[test]
fn a_part_of_a_repeated_scan_is_kept_and_let_go_afterwards() {
    let fake = empty(2 * CYCLE);
    let (behind, mut state) = (DropBehind::new(), State::new());
    let passes: Vec<u64> = (0..10).map(|_| fake.access(&behind, &mut state, 0..CYCLE)).collect();
    assert_eq!(passes[0], CYCLE);
    assert!(passes[4..].iter().all(|&loaded| loaded <= CYCLE * 3 / 5), "{passes:?}");
    // Another part of the file is scanned, first once and then repeatedly.
    let passes: Vec<u64> =
        (0..10).map(|_| fake.access(&behind, &mut state, CYCLE..2 * CYCLE)).collect();
    assert_eq!(passes[0], CYCLE);
    assert!(passes[6..].iter().all(|&loaded| loaded <= CYCLE * 3 / 5), "{passes:?}");
}

#[test]
fn nothing_is_kept_of_one_scan_or_of_accesses_in_any_order() {
    let (behind, mut state) = (DropBehind::new(), State::new());
    empty(400).access(&behind, &mut state, 0..400);
    assert!(!state.cyclic.is_keeping());
    let (fake, mut random) = (empty(CYCLE), 1u64);
    let order = (0..2000).map(|_| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % CYCLE
    });
    fake.access(&behind, &mut state, order);
    assert!(!state.cyclic.is_keeping());
}

#[test]
fn a_part_of_a_scan_over_several_files_is_kept() {
    let files: Vec<_> = (0..4).map(|_| empty(CYCLE / 4)).collect();
    let (behind, mut state) = (DropBehind::new(), State::new());
    let mut pass = || {
        let mut loaded = 0;
        let regions = files.iter().flat_map(|file| file.regions.iter().zip(&file.mapped));
        for (pages, mapped) in regions {
            loaded += u64::from(pages.swap(REGION_PAGES, Ordering::Relaxed) == 0);
            mapped.store(REGION_PAGES, Ordering::Relaxed);
            state.resident.forget();
            behind.check(&mut state, &files, 2 * BOUND, &|_, _| ());
        }
        loaded
    };
    let passes: Vec<u64> = (0..10).map(|_| pass()).collect();
    assert!(passes[6..].iter().all(|&loaded| loaded <= CYCLE * 3 / 5), "{passes:?}");
}

#[test]
fn a_file_may_become_shorter() {
    let fake = Fake::with(100 * MIB, true);
    let (behind, mut state) = (DropBehind::new(), State::new());
    for len_bytes in [100 * MIB, 100 * MIB, 70 * MIB + 5, 40 * MIB, 3, 0, 90 * MIB] {
        fake.len_bytes.store(len_bytes, Ordering::Relaxed);
        for region in fake.regions.iter().take(len_bytes.div_ceil(REGION) as usize) {
            region.store(REGION_PAGES, Ordering::Relaxed);
        }
        state.resident.forget();
        behind.check(&mut state, std::slice::from_ref(&fake), BOUND, &|_, _| ());
    }
}

/// There may be thousands, and checks are many a second.
#[test]
fn a_check_takes_no_reference_to_each_file() {
    let files = Arc::new(DropBehind::new());
    let file = empty(1);
    files.add(file.clone());
    let (counts, counted) = std::sync::mpsc::channel();
    let thread = std::thread::spawn({
        let (files, file) = (files.clone(), Arc::downgrade(&file));
        move || {
            let bound = || {
                let _ = counts.send(file.strong_count());
                1 << 30
            };
            files.run(bound, |_, _| {});
        }
    });
    // This one and that of the list.
    let count = counted.recv().unwrap();
    files.stop();
    thread.join().unwrap();
    assert_eq!(count, 2);
}
