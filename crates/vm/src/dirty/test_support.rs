//! Shared code of the tracker tests: a mapping with known content, in every combination of form and
//! source that the machine supports.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_sys::memory::{Protection, REGION_BYTES, SMALL_PAGE_BYTES};

use super::pieces::State;
use super::*;
use crate::fixed::{FixedRange, random_base};

pub(super) const PAGES_PER_PIECE: u64 = (REGION_BYTES / SMALL_PAGE_BYTES) as u64;

/// The source of the tracked content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A file in the directory for temporary files.
    Storage,
    /// A file in memory.
    Memory,
    /// No file.
    Anonymous,
}

/// The form of tracking, and how private pages are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// All pages, at each take.
    Scan,
    /// The pages that faulted, where all faults are known and no store is in progress.
    ScanFaulted,
    Compare,
    /// Comparing, with the page table entries read as before Linux 6.7.
    CompareEntries,
}

/// The combinations that can be tested here; prints the others as skipped.
pub(super) fn combinations() -> Vec<(Source, Way)> {
    let mut ways = vec![Way::Compare, Way::CompareEntries];
    match TrackerForm::Scan.available() {
        Ok(()) => ways.extend([Way::Scan, Way::ScanFaulted]),
        Err(error) => println!("skipped the form `scan`: {error}"),
    }
    let mut sources = vec![Source::Storage, Source::Anonymous];
    if Path::new("/dev/shm").is_dir() {
        sources.push(Source::Memory);
    } else {
        println!("skipped files in memory: no /dev/shm");
    }
    sources.iter().flat_map(|&source| ways.iter().map(move |&way| (source, way))).collect()
}

/// Whether the form `Scan` can be tested; prints the reason if not.
pub(super) fn can_scan() -> bool {
    TrackerForm::Scan.available().inspect_err(|error| println!("skipped: {error}")).is_ok()
}

/// A tracked mapping. The first word of each page is its content.
pub(super) struct Subject {
    // Dropped before or after the mapping: both orders must work.
    pub tracker: DirtyTracker,
    /// What takes are told.
    pub stores: Stores,
    pub range: FixedRange,
    pub file: Option<File>,
    /// The content at the last commit, which the file holds too.
    pub committed: Vec<u64>,
    next_value: u64,
}

impl Subject {
    /// A mapping of `pages` pages, not aligned to pieces.
    pub fn new(source: Source, way: Way, pages: u64) -> Subject {
        let page_bytes = SMALL_PAGE_BYTES as u64;
        let len_bytes = pages * page_bytes;
        let base = random_base(len_bytes + REGION_BYTES as u64, &[]).unwrap() + 300 * page_bytes;
        let file = match source {
            Source::Storage => Some(tempfile::tempfile().unwrap()),
            Source::Memory => Some(tempfile::tempfile_in("/dev/shm").unwrap()),
            Source::Anonymous => None,
        };
        let mut committed = vec![0; pages as usize];
        let range = match &file {
            Some(file) => {
                let mut content = vec![0u8; len_bytes as usize];
                for (page, bytes) in content.chunks_exact_mut(SMALL_PAGE_BYTES).enumerate() {
                    committed[page] = 1 + page as u64;
                    bytes[..8].copy_from_slice(&committed[page].to_le_bytes());
                }
                (&*file).write_all(&content).unwrap();
                let access = Protection::ReadWrite;
                FixedRange::map_private(base, len_bytes, access, file.as_fd(), 0)
            }
            None => FixedRange::map_anonymous(base, len_bytes),
        }
        .unwrap();
        let kind = if file.is_some() { TrackedKind::PrivateFile } else { TrackedKind::Anonymous };
        let scans = matches!(way, Way::Scan | Way::ScanFaulted);
        let form = if scans { TrackerForm::Scan } else { TrackerForm::Compare };
        // SAFETY: a private mapping that no other code uses.
        let tracker = unsafe { DirtyTracker::new(range.address(), len_bytes, Some(form), kind) };
        let mut tracker = tracker.unwrap();
        tracker.scans_private &= way != Way::CompareEntries;
        assert_eq!(tracker.form(), form);
        let stores = if way == Way::Scan { Stores::InProgress } else { Stores::Excluded };
        Subject { tracker, stores, range, file, committed, next_value: 1 << 32 }
    }

    pub fn pages(&self) -> u64 {
        self.committed.len() as u64
    }

    /// The content of a page. Atomic, because another thread may store to it.
    pub fn word(&self, page: u64) -> &AtomicU64 {
        word(self.range.address(), self.pages(), page)
    }

    pub fn load(&self, page: u64) -> u64 {
        self.word(page).load(Ordering::Relaxed)
    }

    pub fn next_value(&mut self) -> u64 {
        self.next_value += 1;
        self.next_value
    }

    pub fn store(&mut self, page: u64) {
        let value = self.next_value();
        self.word(page).store(value, Ordering::Relaxed);
    }

    /// Takes; compares with the last commit where the tracker requests it.
    pub fn take(&mut self) -> Result<Vec<PageRun>, VmError> {
        let (base, committed) = (self.range.address(), &self.committed);
        let pages = committed.len() as u64;
        let mut out = vec![PageRun::new(0..1)];
        let mut is_changed = |page: PageIndex| {
            word(base, pages, page.0).load(Ordering::Relaxed) != committed[page.0 as usize]
        };
        self.tracker.take(self.stores, &mut is_changed, &mut out)?;
        let gaps = out.windows(2).all(|two| two[0].end() < two[1].first);
        assert!(gaps && out.iter().all(|run| run.count > 0), "not normalised: {out:?}");
        Ok(out)
    }

    /// Takes, and commits the pages taken.
    pub fn commit(&mut self) -> Vec<u64> {
        let taken: Vec<_> = self.take().unwrap().iter().flat_map(|run| run.pages()).collect();
        for page in &taken {
            let value = self.load(page.0);
            self.committed[page.0 as usize] = value;
            if let Some(file) = &self.file {
                file.write_all_at(&value.to_le_bytes(), page.0 * SMALL_PAGE_BYTES as u64).unwrap();
            }
        }
        taken.into_iter().map(|page| page.0).collect()
    }

    /// Drops clean copies of pages for which `may_drop` returns true.
    pub fn drop_clean(&mut self, wanted: u64, may_drop: &mut dyn FnMut(u64) -> bool) -> u64 {
        let (base, committed) = (self.range.address(), &self.committed);
        let pages = committed.len() as u64;
        let mut is_changed = |page: PageIndex| {
            word(base, pages, page.0).load(Ordering::Relaxed) != committed[page.0 as usize]
        };
        // SAFETY: no thread stores during the call, and commits wrote the file.
        unsafe {
            self.tracker.drop_clean(wanted, &mut is_changed, &mut |page| may_drop(page.0)).unwrap()
        }
    }

    /// Private copies as the kernel counts them: `Anonymous` and `Swap` of `/proc/self/smaps`.
    pub fn private_in_smaps(&self) -> u64 {
        let start = self.range.address() as u64;
        let inside = start..start + self.range.len_bytes();
        let mut counts = false;
        let mut kilobytes = 0;
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let word = line.split(' ').next().unwrap();
            if let Some((first, _)) = word.split_once('-') {
                counts = inside.contains(&u64::from_str_radix(first, 16).unwrap());
            } else if counts && (word == "Anonymous:" || word == "Swap:") {
                let number = line.split_ascii_whitespace().nth(1).unwrap();
                kilobytes += number.parse::<u64>().unwrap();
            }
        }
        kilobytes / (SMALL_PAGE_BYTES as u64 / 1024)
    }

    pub fn mappings(&self) -> usize {
        let start = self.range.address() as u64;
        let inside = start..start + self.range.len_bytes();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let first = |line: &str| u64::from_str_radix(line.split_once('-').unwrap().0, 16).unwrap();
        maps.lines().filter(|line| inside.contains(&first(line))).count()
    }

    pub fn state_of(&self, page: u64) -> State {
        let piece = self.tracker.range.piece_of(PageIndex(page));
        self.tracker.scan.as_ref().unwrap().pieces().state(piece)
    }
}

pub(super) fn word<'a>(base: *mut u8, pages: u64, page: u64) -> &'a AtomicU64 {
    assert!(page < pages);
    let address = base.wrapping_add(page as usize * SMALL_PAGE_BYTES);
    // SAFETY: inside a mapping that outlives the test's use, aligned, only used as this atomic.
    unsafe { AtomicU64::from_ptr(address.cast()) }
}

/// Reclaims the pages of a range as the kernel does when memory is scarce.
pub(super) fn reclaim(subject: &Subject, run: PageRun) {
    let addresses = subject.tracker.range.address_of(run);
    // SAFETY: pages of the mapping; their content stays.
    unsafe { libc::madvise(addresses.start as *mut _, addresses.len(), libc::MADV_PAGEOUT) };
}
