//! The page tables of this process, read through `/proc/self/pagemap`.
//!
//! Two interfaces, of which the second needs Linux 6.7:
//! * *entries*: one 64-bit word a page ([`Pagemap::present`], [`Pagemap::private_pages`]);
//! * *scan* ([`Pagemap::scan`], PAGEMAP_SCAN): finds runs of pages that meet a condition, and in
//!   the same step write-protects them again where userfaultfd tracks stores
//!   ([`Uffd::open_tracking`](crate::uffd::Uffd::open_tracking)). For each page, finding and
//!   protecting are one atomic step: a concurrent store comes before it and is found now, or after
//!   it and is found by the next scan.
//!
//! The kernel's categories, where their meaning is not obvious:
//! * `WRITTEN`: the entry is not write-protected by userfaultfd. Where nothing is tracked, every
//!   present entry is WRITTEN.
//! * `FILE`: the page belongs to the page cache (or shared memory). A private copy does not. The
//!   kernel reads the page's descriptor for it: 8 ns a page where the bare entry costs 1.
//! * `SWAPPED`: the entry is neither a page nor empty. That is a swapped-out page, but also the
//!   *marker* that records the write protection of an absent page. A marker is never WRITTEN; a
//!   swapped page may be.
//! * A scan with the condition WRITTEN alone ([`Query::UNPROTECTED`]) takes a fast path in the
//!   kernel, where empty entries count too, and get markers.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use linux_raw_sys::general as raw;

use crate::memory::SMALL_PAGE_BYTES;

/// The page tables of the process that opened it (in a forked child: still the parent's).
#[derive(Debug)]
pub struct Pagemap(File);

/// Bit 63 of an entry: the page is present.
const ENTRY_PRESENT: u64 = 1 << 63;
/// Bit 62: the page is swapped out.
const ENTRY_SWAPPED: u64 = 1 << 62;
/// Bit 61: the page belongs to a file or to shared memory.
const ENTRY_FILE: u64 = 1 << 61;

/// A set of page categories, as in `linux/fs.h` (`PAGE_IS_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Categories(u64);

impl Categories {
    /// The empty set.
    pub const NONE: Categories = Categories(0);
    /// In a mapping whose stores a userfaultfd tracks.
    pub const TRACKED: Categories = Categories(raw::PAGE_IS_WPALLOWED as u64);
    /// Not write-protected by userfaultfd.
    pub const WRITTEN: Categories = Categories(raw::PAGE_IS_WRITTEN as u64);
    /// A page of a file or of shared memory.
    pub const FILE: Categories = Categories(raw::PAGE_IS_FILE as u64);
    /// In memory.
    pub const PRESENT: Categories = Categories(raw::PAGE_IS_PRESENT as u64);
    /// Swapped out, or a marker.
    pub const SWAPPED: Categories = Categories(raw::PAGE_IS_SWAPPED as u64);
    /// The page of zeros that loads of untouched anonymous memory share.
    pub const ZERO: Categories = Categories(raw::PAGE_IS_PFNZERO as u64);
    /// Mapped by a huge entry.
    pub const HUGE: Categories = Categories(raw::PAGE_IS_HUGE as u64);

    /// Returns the union with `others`.
    pub const fn or(self, others: Categories) -> Categories {
        Categories(self.0 | others.0)
    }

    /// Returns whether any of `others` is in the set.
    pub fn intersects(self, others: Categories) -> bool {
        self.0 & others.0 != 0
    }
}

/// The condition of a scan: every category of `all`, none of `none`, and one of `any` unless that
/// is empty. `report` selects the categories that the result distinguishes.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    /// Must all apply.
    pub all: Categories,
    /// Must not apply.
    pub none: Categories,
    /// One of these must apply.
    pub any: Categories,
    /// Reported in [`Region::categories`].
    pub report: Categories,
}

impl Query {
    /// Every entry without write protection, empty ones included: the kernel's fast path.
    pub const UNPROTECTED: Query = Query {
        all: Categories::WRITTEN,
        none: Categories::NONE,
        any: Categories::NONE,
        report: Categories::WRITTEN,
    };
}

/// Whether a scan write-protects what it reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protect {
    /// Does not protect.
    No,
    /// Protects where a [tracking userfaultfd](crate::uffd::Uffd::open_tracking) is registered; the
    /// condition must require [`Categories::TRACKED`], which excludes everything else.
    Tracked,
    /// Protects everything; fails with `EPERM` if a part of the range is not tracked.
    All,
}

/// A run of pages with the same categories; layout of `struct page_region`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Region {
    /// Address of the first page.
    pub start: u64,
    /// Address past the last page.
    pub end: u64,
    /// The categories selected by [`Query::report`].
    pub categories: Categories,
}

const _: () = assert!(size_of::<Region>() == size_of::<raw::page_region>());
const _: () = assert!(size_of::<raw::pm_scan_arg>() == 96);

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u32 =
    (3 << 30) | ((size_of::<raw::pm_scan_arg>() as u32) << 16) | ((b'f' as u32) << 8) | 16;
/// Regions per system call. The kernel allocates a buffer of this size for each call: 128 cost 0.1
/// µs less than 512, the most it would take.
const REGIONS_AT_A_TIME: usize = 128;
/// Entries per read.
const ENTRIES_AT_A_TIME: usize = 512;

impl Pagemap {
    /// Opens the pagemap. `/proc` must be mounted, and the process must be dumpable
    /// (`prctl(PR_SET_DUMPABLE)`, a change of user).
    pub fn open() -> io::Result<Pagemap> {
        File::open("/proc/self/pagemap").map(Pagemap)
    }

    fn read_entries(&self, address: usize, entries: &mut [u64]) -> io::Result<()> {
        let first = (address / SMALL_PAGE_BYTES) as u64;
        // SAFETY: any bytes are valid integers, and the slice has exactly this many.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(entries.as_mut_ptr().cast(), size_of_val(entries))
        };
        self.0.read_exact_at(bytes, first * 8)
    }

    /// Returns how many of the pages from `address` are present, one for each word of the scratch
    /// space `entries`.
    pub fn present(&self, address: *const u8, entries: &mut [u64]) -> io::Result<u64> {
        self.read_entries(address as usize, entries)?;
        Ok(entries.iter().filter(|&&entry| entry & ENTRY_PRESENT != 0).count() as u64)
    }

    /// Reports the pages of a range of addresses that are present or swapped out and not of a file,
    /// in ascending runs. Works on every kernel; 45 ns a page. The zero page counts: these words do
    /// not distinguish it.
    pub fn private_pages(
        &self,
        addresses: Range<usize>,
        each: &mut dyn FnMut(Range<usize>),
    ) -> io::Result<()> {
        let mut entries = [0u64; ENTRIES_AT_A_TIME];
        let mut address = addresses.start;
        while address < addresses.end {
            let pages = (addresses.end - address).div_ceil(SMALL_PAGE_BYTES).min(ENTRIES_AT_A_TIME);
            let entries = &mut entries[..pages];
            self.read_entries(address, entries)?;
            for run in entries.chunk_by(|a, b| is_private(*a) == is_private(*b)) {
                let end = address + run.len() * SMALL_PAGE_BYTES;
                if is_private(run[0]) {
                    each(address..end);
                }
                address = end;
            }
        }
        Ok(())
    }

    /// Reports the regions of a range of addresses that meet the condition, ascending. With
    /// `protect` it write-protects them again in the same step.
    ///
    /// A region may be reported twice: the kernel can return early with a `walk_end` before the
    /// point it reached, and the scan resumes from there. After an error, pages may have been
    /// protected that were not reported.
    pub fn scan(
        &self,
        addresses: Range<usize>,
        query: Query,
        protect: Protect,
        each: &mut dyn FnMut(Region),
    ) -> io::Result<()> {
        let mut regions = [Region::default(); REGIONS_AT_A_TIME];
        let flags = match protect {
            Protect::No => 0,
            Protect::Tracked => raw::PM_SCAN_WP_MATCHING,
            Protect::All => raw::PM_SCAN_WP_MATCHING | raw::PM_SCAN_CHECK_WPASYNC,
        };
        // Linux 6.7 would also protect untracked pages.
        debug_assert!(protect != Protect::Tracked || query.all.intersects(Categories::TRACKED));
        debug_assert!(
            !query.none.intersects(query.all.or(query.any)),
            "a category is inverted for all"
        );
        let mut start = addresses.start as u64;
        let end = addresses.end as u64;
        while start < end {
            let mut argument = raw::pm_scan_arg {
                size: size_of::<raw::pm_scan_arg>() as u64,
                flags: u64::from(flags),
                start,
                end,
                walk_end: 0,
                vec: regions.as_mut_ptr() as u64,
                vec_len: regions.len() as u64,
                max_pages: 0,
                category_inverted: query.none.0,
                // The kernel requires an inverted category only if it is also in the mask.
                category_mask: query.all.0 | query.none.0,
                category_anyof_mask: query.any.0,
                return_mask: query.report.0,
            };
            let request = libc::Ioctl::from(PAGEMAP_SCAN);
            // SAFETY: argument and vector have the kernel's layout and outlive the call.
            let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request, &raw mut argument) };
            let count = crate::check(result.into())?;
            regions[..count].iter().copied().for_each(&mut *each);
            if argument.walk_end <= start {
                return Err(io::Error::other("PAGEMAP_SCAN makes no progress"));
            }
            start = argument.walk_end;
        }
        Ok(())
    }

    /// Checks that the kernel has [`scan`](Pagemap::scan): Linux 6.7 or later.
    pub fn can_scan(&self) -> io::Result<()> {
        // Nothing is mapped at the lowest addresses, so this reports and changes nothing.
        self.scan(0..SMALL_PAGE_BYTES, Query::UNPROTECTED, Protect::No, &mut |_| ())
    }
}

fn is_private(entry: u64) -> bool {
    entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0 && entry & ENTRY_FILE == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{self, Advice, Protection};
    use std::os::fd::AsFd;

    fn anonymous(pages: usize) -> *mut u8 {
        let base = memory::map_anonymous(pages * SMALL_PAGE_BYTES).unwrap();
        // SAFETY: our own mapping; huge pages would make one touch bring all of it.
        let _ = unsafe { memory::advise(base, pages * SMALL_PAGE_BYTES, Advice::NoHugePage) };
        base
    }

    fn touch(base: *mut u8, page: usize) {
        // SAFETY: the callers stay inside their mapping.
        unsafe { base.add(page * SMALL_PAGE_BYTES).write_volatile(1) };
    }

    fn range(base: *mut u8, pages: usize) -> Range<usize> {
        base as usize..base as usize + pages * SMALL_PAGE_BYTES
    }

    #[test]
    fn present_pages_are_those_touched() {
        let pages = 16;
        let base = anonymous(pages);
        for page in [1, 2, 5] {
            touch(base, page);
        }
        let mut entries = vec![0; pages];
        assert_eq!(Pagemap::open().unwrap().present(base, &mut entries).unwrap(), 3);
        // SAFETY: mapped above, and not used after this.
        unsafe { memory::unmap(base, pages * SMALL_PAGE_BYTES).unwrap() };
    }

    /// More regions than one scan call returns, and more entries than one read.
    #[test]
    fn entries_and_scan_find_the_same_private_pages() {
        let pages = 3 * ENTRIES_AT_A_TIME + 7;
        let base = anonymous(pages);
        let stored: Vec<usize> = (0..pages).filter(|page| page % 3 == 1).collect();
        for &page in &stored {
            touch(base, page);
        }
        let map = Pagemap::open().unwrap();
        let page_of = |address: usize| (address - base as usize) / SMALL_PAGE_BYTES;
        let mut found = Vec::new();
        map.private_pages(range(base, pages), &mut |run| {
            found.extend(page_of(run.start)..page_of(run.end));
        })
        .unwrap();
        assert_eq!(found, stored);
        match map.can_scan() {
            Err(error) => println!("skipped the scan: {error}"),
            Ok(()) => {
                let query = Query {
                    all: Categories::NONE,
                    none: Categories::FILE.or(Categories::ZERO),
                    any: Categories::PRESENT.or(Categories::SWAPPED),
                    report: Categories::PRESENT,
                };
                let mut found = Vec::new();
                map.scan(range(base, pages), query, Protect::No, &mut |region| {
                    assert!(region.categories.intersects(Categories::PRESENT));
                    found.extend(page_of(region.start as usize)..page_of(region.end as usize));
                })
                .unwrap();
                found.sort_unstable();
                found.dedup();
                assert_eq!(found, stored);
            }
        }
        // SAFETY: mapped above, and not used after this.
        unsafe { memory::unmap(base, pages * SMALL_PAGE_BYTES).unwrap() };
    }

    #[test]
    fn pages_of_a_file_are_not_private_until_stored_to() {
        let pages = 4;
        let program = File::open("/proc/self/exe").unwrap();
        let base = memory::map_private(
            pages * SMALL_PAGE_BYTES,
            Protection::ReadWrite,
            program.as_fd(),
            0,
        )
        .unwrap();
        // SAFETY: inside the mapping.
        unsafe { base.read_volatile() };
        touch(base, 2);
        let mut found = Vec::new();
        let map = Pagemap::open().unwrap();
        map.private_pages(range(base, pages), &mut |run| found.push(run)).unwrap();
        let stored = base as usize + 2 * SMALL_PAGE_BYTES;
        assert_eq!(found, vec![stored..stored + SMALL_PAGE_BYTES]);
        // SAFETY: mapped above, and not used after this.
        unsafe { memory::unmap(base, pages * SMALL_PAGE_BYTES).unwrap() };
    }

    #[test]
    fn protecting_where_nothing_is_tracked_is_refused() {
        let map = Pagemap::open().unwrap();
        if let Err(error) = map.can_scan() {
            println!("skipped: {error}");
            return;
        }
        let base = anonymous(2);
        touch(base, 0);
        let result = map.scan(range(base, 2), Query::UNPROTECTED, Protect::All, &mut |_| ());
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPERM));
        // SAFETY: mapped above, and not used after this.
        unsafe { memory::unmap(base, 2 * SMALL_PAGE_BYTES).unwrap() };
    }
}
