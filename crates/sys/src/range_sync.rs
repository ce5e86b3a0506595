//! Makes ranges of a file durable, and nothing else.
//!
//! A sync of the whole file also writes the pages that other threads have dirtied in it, and takes
//! correspondingly longer.
//!
//! | | ext2–4, XFS, block devices, files in memory | other file systems |
//! |---|---|---|
//! | [`RangeSync::write_back`] | `sync_file_range` of each range | `msync` of each range |
//! | [`RangeSync::commit`] | `msync` of one page, which commits the inode and flushes the device | nothing to do |
//!
//! [`commits_whole_inodes`] explains why the file systems differ. `msync` is the `fsync` of a
//! range; where a file cannot be mapped shared, `fdatasync` takes its place.
//!
//! The I/O of all ranges is started before the first wait. The second pass writes again instead of
//! only waiting: the first one skips pages that are under write-back with older contents. It waits
//! for all ranges, even after one has failed: I/O that fails later would otherwise be reported to
//! the next call, which may have written everything successfully.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::file_system::{self, commits_whole_inodes};
use crate::io::{SyncableRange, finish_write_back, start_write_back, sync_data};
use crate::memory::SMALL_PAGE_BYTES;

/// More ranges than this are synced as one range where each sync commits.
const SINGLE_SYNCS_MAX: usize = 8;
/// With more ranges than this, those at most [`REACH_BYTES`] apart are written back together:
/// separate calls for many pages cost more than writing the dirty pages between them, and the
/// kernel then issues larger requests.
const MANY_RANGES: usize = 64;
const REACH_BYTES: u64 = 256 << 10;

/// Makes ranges of one file durable.
#[derive(Debug)]
pub struct RangeSync {
    /// Whether ranges written back are durable after a sync of any page. Changes only from true to
    /// false.
    commits_whole_inodes: AtomicBool,
}

impl RangeSync {
    /// Creates it for a file for which [`commits_whole_inodes`] is known.
    pub fn new(commits_whole_inodes: bool) -> RangeSync {
        RangeSync { commits_whole_inodes: AtomicBool::new(commits_whole_inodes) }
    }

    /// Creates it for a regular file.
    pub fn of_file(file: BorrowedFd<'_>) -> io::Result<RangeSync> {
        let magic = file_system::magic(file)?;
        // Files in memory have nothing to commit.
        Ok(RangeSync::new(commits_whole_inodes(magic) || file_system::in_memory(magic).is_some()))
    }

    /// Returns whether ranges written back are durable after a sync of any page.
    pub fn commits_whole_inodes(&self) -> bool {
        // Relaxed: a thread that still reads true gets `ENOSYS` as the first one did.
        self.commits_whole_inodes.load(Ordering::Relaxed)
    }

    /// Writes back ranges ordered by [`merge`], and waits for them. They are durable after a
    /// [`commit`](RangeSync::commit).
    pub fn write_back(&self, file: BorrowedFd<'_>, ranges: &[Range<u64>]) -> io::Result<()> {
        if ranges.len() > 1 {
            for range in ranges {
                // A range that fails to start also fails to finish, and the error is reported
                // there.
                let _ = start_write_back(file, range.start, range.end - range.start);
            }
        }
        if self.commits_whole_inodes() {
            let finish =
                |range: &Range<u64>| finish_write_back(file, range.start, range.end - range.start);
            match for_all(ranges, finish) {
                // Not the file system refuses but a sandbox, which lacks the call.
                Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                    self.commits_whole_inodes.store(false, Ordering::Relaxed);
                }
                finished => return finished,
            }
        }
        match (ranges.first(), ranges.last()) {
            (Some(first), Some(last)) if ranges.len() > SINGLE_SYNCS_MAX => {
                sync_range(file, first.start..last.end)
            }
            _ => for_all(ranges, |range| sync_range(file, range.clone())),
        }
    }

    /// Makes what was written back durable. `page` is any page of the file, if the caller keeps
    /// one.
    pub fn commit(&self, file: BorrowedFd<'_>, page: Option<&SyncableRange>) -> io::Result<()> {
        match page {
            _ if !self.commits_whole_inodes() => Ok(()),
            Some(page) => page.sync(),
            None => sync_range(file, 0..1),
        }
    }

    /// Makes ranges durable.
    pub fn make_durable(&self, file: BorrowedFd<'_>, ranges: &[Range<u64>]) -> io::Result<()> {
        match &merge(ranges)[..] {
            [] => Ok(()),
            [range] => sync_range(file, range.clone()),
            ranges => self.write_back(file, ranges).and_then(|()| self.commit(file, None)),
        }
    }
}

/// Calls `finish` for all ranges, and returns the first error.
fn for_all(
    ranges: &[Range<u64>],
    finish: impl Fn(&Range<u64>) -> io::Result<()>,
) -> io::Result<()> {
    ranges.iter().map(finish).fold(Ok(()), io::Result::and)
}

/// Makes one range durable with the metadata needed to read it.
pub fn sync_range(file: BorrowedFd<'_>, range: Range<u64>) -> io::Result<()> {
    match SyncableRange::new(file, range.start, range.end - range.start) {
        Ok(pages) => pages.sync(),
        Err(_) => sync_data(file),
    }
}

/// Returns the ranges sorted, without empty ones, with adjacent and overlapping ones joined; pages
/// touched by two are written once. Many ranges are joined over small gaps as well.
pub fn merge(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let reach_bytes = if ranges.len() > MANY_RANGES { REACH_BYTES } else { 0 };
    let mut sorted: Vec<Range<u64>> =
        ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
    sorted.sort_unstable_by_key(|range| (range.start, range.end));
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match merged.last_mut() {
            Some(last) if range.start <= reach(last.end, reach_bytes) => {
                last.end = last.end.max(range.end);
            }
            _ => merged.push(range),
        }
    }
    merged
}

/// Returns the highest start of a range to be joined with one that ends at `end_bytes`.
fn reach(end_bytes: u64, reach_bytes: u64) -> u64 {
    let page_end = end_bytes.checked_next_multiple_of(SMALL_PAGE_BYTES as u64);
    page_end.unwrap_or(end_bytes).saturating_add(reach_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn ranges_are_merged_by_pages_and_many_over_gaps() {
        assert_eq!(merge(&[]), []);
        let few = [9000..9001, 5..5, 0..10, 4090..4100, 20..4000];
        assert_eq!(merge(&few), [0..4100, 9000..9001]);
        let many: Vec<_> = (0..100).map(|n| n * 100_000..n * 100_000 + 1).collect();
        assert_eq!(merge(&many[..64]).len(), 64);
        let one = merge(&many);
        assert_eq!((one.len(), one[0].clone()), (1, 0..9_900_001));
        assert_eq!(merge(&[u64::MAX - 1..u64::MAX, 0..1]).len(), 2);
    }

    #[test]
    fn ranges_of_files_are_synced_in_both_ways() {
        let path = std::env::temp_dir().join(format!("aquifer-range-sync-{}", std::process::id()));
        let file = std::fs::File::create_new(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        // Reopened readable: a write-only descriptor cannot be mapped.
        let readable = crate::io::reopen(file.as_fd(), libc::O_RDWR).unwrap();
        file.set_len(1 << 20).unwrap();
        for sync in [RangeSync::of_file(file.as_fd()).unwrap(), RangeSync::new(false)] {
            for file in [file.as_fd(), readable.as_fd()] {
                for count in [0, 1, 3, 20] {
                    let ranges: Vec<_> = (0..count).map(|n| n * 8192..n * 8192 + 4096).collect();
                    for range in &ranges {
                        crate::io::write_all_at(file, &[1; 4096], range.start).unwrap();
                    }
                    sync.make_durable(file, &ranges).unwrap();
                    for range in &ranges {
                        let len_bytes = range.end - range.start;
                        match crate::memory::cachestat(file, range.start, len_bytes) {
                            Err(error) => println!("skipped in part: {error}"),
                            Ok(_)
                                if file_system::magic(file)
                                    .is_ok_and(|magic| file_system::in_memory(magic).is_some()) => {
                            }
                            Ok(stat) => assert_eq!((stat.dirty, stat.writeback), (0, 0)),
                        }
                    }
                }
            }
        }
    }
}
