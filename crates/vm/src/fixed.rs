//! Mappings at fixed addresses, for data that contains pointers into itself: persistent objects.
//!
//! The addresses lie in a window that ordinary programs do not use otherwise:
//!
//! ```text
//! 0x0000_5500_…  …0x7fff_…   executable, heap, libraries, stacks, the arena
//! 0x0000_5000_0000_0000  ──┐
//!                          │ WINDOW: 48 TiB
//! 0x0000_2000_0000_0000  ──┘
//! 0x0000_0000_0040_0000       executables linked at fixed addresses
//! ```
//!
//! An existing mapping is never replaced: the kernel maps the range only if it is free, and the
//! error names the mapping that occupies it. Sanitizers need special care. ThreadSanitizer keeps a
//! shadow in the window and terminates the process on a request for addresses it does not expect;
//! MemorySanitizer occupies the whole window. Both are detected first, and the mapping fails with
//! an error. AddressSanitizer's shadow ends below the window, so it does not interfere.
//!
//! Ranges are excluded from core dumps and from forked children. A child has holes in their place,
//! and may map the same object there itself; a [`FixedRange`] it inherited is inert.
//!
//! ```
//! use aquifer_vm::VmError;
//! use aquifer_vm::fixed::{FixedRange, random_base};
//!
//! # fn main() -> Result<(), VmError> {
//! let base = random_base(4096, &[])?;
//! let range = FixedRange::map_anonymous(base, 4096)?;
//! assert_eq!(range.address() as u64, base);
//! // An existing mapping is never replaced.
//! assert!(matches!(FixedRange::map_anonymous(base, 4096), Err(VmError::AddressTaken { .. })));
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use aquifer_sys::memory::{self, Advice, Protection, REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::random;
use aquifer_sys::sanitizer::Sanitizer;

use crate::VmError;
use crate::fork::ProcessMark;

/// The range that fixed addresses are taken from.
pub const WINDOW: Range<u64> = 0x2000_0000_0000..0x5000_0000_0000;

/// What is wrong with a requested range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RangeProblem {
    /// It is empty.
    Empty,
    /// Address, length or file offset is not a multiple of the page size.
    Unaligned,
    /// It is not contained in [`WINDOW`].
    OutsideWindow,
}

impl fmt::Display for RangeProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RangeProblem::Empty => f.write_str("ask for at least one page"),
            RangeProblem::Unaligned => write!(
                f,
                "address, length and offset in the file must be multiples of {SMALL_PAGE_BYTES}"
            ),
            RangeProblem::OutsideWindow => {
                write!(f, "fixed addresses lie in {:#x}..{:#x}", WINDOW.start, WINDOW.end)
            }
        }
    }
}

/// A private mapping at an address chosen by the caller, unmapped when dropped.
#[derive(Debug)]
pub struct FixedRange {
    address: u64,
    len_bytes: u64,
    mark: ProcessMark,
}

impl FixedRange {
    /// Maps part of a file privately: a store copies its page and stays in this process.
    ///
    /// Memory is charged page by page, as pages are stored to. If the file is shorter than the
    /// mapping, an access behind its end raises SIGBUS.
    pub fn map_private(
        address: u64,
        len_bytes: u64,
        protection: Protection,
        file: BorrowedFd<'_>,
        offset_bytes: u64,
    ) -> Result<FixedRange, VmError> {
        if !offset_bytes.is_multiple_of(SMALL_PAGE_BYTES as u64) {
            return Err(bad_range(address, len_bytes, RangeProblem::Unaligned));
        }
        FixedRange::map(address, len_bytes, protection, Some((file, offset_bytes)))
    }

    /// Maps fresh zeroed memory, charged page by page as it is stored to.
    pub fn map_anonymous(address: u64, len_bytes: u64) -> Result<FixedRange, VmError> {
        FixedRange::map(address, len_bytes, Protection::ReadWrite, None)
    }

    fn map(
        address: u64,
        len_bytes: u64,
        protection: Protection,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<FixedRange, VmError> {
        check_range(address, len_bytes)
            .map_err(|problem| bad_range(address, len_bytes, problem))?;
        let running: Vec<_> = Sanitizer::ALL.into_iter().filter(|one| one.is_running()).collect();
        may_map(address, len_bytes, &running, &mappings())?;
        let start = address as *mut u8;
        memory::map_private_at_free(start, len_bytes as usize, protection, file).map_err(
            |source| match source.raw_os_error() {
                // Another thread mapped it after the check.
                Some(libc::EEXIST) => taken(address, len_bytes, &mappings()),
                _ => VmError::Map { len_bytes, source },
            },
        )?;
        // From here on, dropping the range undoes the mapping.
        let range = FixedRange { address, len_bytes, mark: ProcessMark::new() };
        for advice in [Advice::DontFork, Advice::DontDump] {
            // SAFETY: the range was mapped above; this advice keeps its contents.
            unsafe { memory::advise(start, len_bytes as usize, advice) }
                .map_err(|source| VmError::Map { len_bytes, source })?;
        }
        Ok(range)
    }

    /// The first byte.
    pub fn address(&self) -> *mut u8 {
        self.address as *mut u8
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Changes the protection of the mapping.
    ///
    /// # Safety
    /// No thread makes accesses that are no longer allowed, or holds references that imply them.
    pub unsafe fn protect(&self, protection: Protection) -> Result<(), VmError> {
        if !self.mark.is_current() {
            return Err(VmError::Forked);
        }
        // SAFETY: this owns the range; the rest is forwarded to the caller.
        unsafe { memory::protect(self.address(), self.len_bytes as usize, protection) }
            .map_err(|source| VmError::Map { len_bytes: self.len_bytes, source })
    }
}

impl Drop for FixedRange {
    fn drop(&mut self) {
        // A child has a hole there, or its own mapping.
        if self.mark.is_current() {
            // SAFETY: this owns the range, and users of it borrow it.
            let _ = unsafe { memory::unmap(self.address(), self.len_bytes as usize) };
        }
    }
}

/// Returns a random base for a new object: a multiple of 2 MiB inside [`WINDOW`] such that
/// `len_bytes` from there overlap none of `taken` (address and length of each, in any order). Every
/// free position is equally likely, so that pools made independently rarely collide.
pub fn random_base(len_bytes: u64, taken: &[(u64, u64)]) -> Result<u64, VmError> {
    let free = free_positions(len_bytes, taken);
    let total: u64 = free.iter().map(|(_, count)| count).sum();
    if total == 0 {
        return Err(VmError::WindowFull { len_bytes });
    }
    let mut choice = random::below(total).map_err(VmError::Random)?;
    for (first, count) in free {
        if choice < count {
            return Ok(first + choice * REGION_BYTES as u64);
        }
        choice -= count;
    }
    unreachable!("the choice is below the sum of the counts")
}

/// Runs of possible bases: the first one, and their number at steps of [`REGION_BYTES`].
fn free_positions(len_bytes: u64, taken: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let step = REGION_BYTES as u64;
    let mut taken: Vec<_> =
        taken.iter().map(|&(address, len)| (address, address.saturating_add(len))).collect();
    // A sentinel that ends the last gap.
    taken.push((WINDOW.end, WINDOW.end));
    taken.sort_unstable();
    let mut free = Vec::new();
    let mut from = WINDOW.start;
    for (start, end) in taken {
        let start = start.min(WINDOW.end);
        let first = from.next_multiple_of(step);
        if let Some(last) = start.checked_sub(len_bytes.max(1))
            && last >= first
        {
            free.push((first, (last - first) / step + 1));
        }
        from = from.max(end.min(WINDOW.end));
    }
    free
}

fn bad_range(address: u64, len_bytes: u64, problem: RangeProblem) -> VmError {
    VmError::FixedRange { address, len_bytes, problem }
}

fn check_range(address: u64, len_bytes: u64) -> Result<(), RangeProblem> {
    let page = SMALL_PAGE_BYTES as u64;
    if len_bytes == 0 {
        return Err(RangeProblem::Empty);
    }
    if !address.is_multiple_of(page) || !len_bytes.is_multiple_of(page) {
        return Err(RangeProblem::Unaligned);
    }
    match address.checked_add(len_bytes) {
        Some(end) if address >= WINDOW.start && end <= WINDOW.end => Ok(()),
        _ => Err(RangeProblem::OutsideWindow),
    }
}

/// A line of `/proc/self/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapped {
    addresses: Range<u64>,
    /// Path or `[…]`; empty for plain anonymous memory.
    name: String,
}

impl Mapped {
    fn parse(line: &str) -> Option<Mapped> {
        // "start-end perms offset device inode   name": five fields, and a name that may contain
        // blanks.
        let mut rest = line;
        let mut fields = [""; 5];
        for field in &mut fields {
            let (first, behind) = rest.split_once(' ').unwrap_or((rest, ""));
            *field = first;
            rest = behind;
        }
        let (start, end) = fields[0].split_once('-')?;
        let address = |text| u64::from_str_radix(text, 16).ok();
        Some(Mapped {
            addresses: address(start)?..address(end)?,
            name: rest.trim_start().to_owned(),
        })
    }
}

/// Reads the mappings of the process. Empty if `/proc` is not mounted: then only the kernel's check
/// remains.
fn mappings() -> Vec<Mapped> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter_map(Mapped::parse).collect()
}

/// Checks whether a range may be mapped, given the running sanitizers and the existing mappings.
/// Does not try it: under ThreadSanitizer trying terminates the process.
fn may_map(
    address: u64,
    len_bytes: u64,
    running: &[Sanitizer],
    mapped: &[Mapped],
) -> Result<(), VmError> {
    for &sanitizer in running {
        match sanitizer {
            Sanitizer::Thread | Sanitizer::Memory => {
                return Err(VmError::SanitizerAddress { sanitizer, address, len_bytes });
            }
            // Its shadow occupies addresses only where it is mapped, like any mapping.
            Sanitizer::Address => {}
        }
    }
    let wanted = address..address + len_bytes;
    if mapped.iter().any(|one| overlap(&one.addresses, &wanted)) {
        Err(taken(address, len_bytes, mapped))
    } else {
        Ok(())
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn taken(address: u64, len_bytes: u64, mapped: &[Mapped]) -> VmError {
    let wanted = address..address.saturating_add(len_bytes);
    let by = mapped.iter().find(|one| overlap(&one.addresses, &wanted)).map_or_else(
        || "something that /proc/self/maps does not show".to_owned(),
        |one| {
            let name = if one.name.is_empty() { "anonymous memory" } else { &one.name };
            format!("{name} at {:#x}..{:#x}", one.addresses.start, one.addresses.end)
        },
    );
    VmError::AddressTaken { address, len_bytes, by }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;

    const PAGE: u64 = SMALL_PAGE_BYTES as u64;

    fn temporary_file(pages: u64) -> File {
        let mut file = tempfile::tempfile().unwrap();
        for page in 0..pages {
            file.write_all(&vec![page as u8 + 1; SMALL_PAGE_BYTES]).unwrap();
        }
        file
    }

    fn byte(range: &FixedRange, offset: u64) -> u8 {
        assert!(offset < range.len_bytes());
        // SAFETY: inside the mapping, and the callers' files reach that far.
        unsafe { range.address().add(offset as usize).read_volatile() }
    }

    #[test]
    fn a_file_appears_at_its_address_and_stores_stay_here() {
        let file = temporary_file(3);
        let base = random_base(2 * PAGE, &[]).unwrap();
        let map =
            || FixedRange::map_private(base, 2 * PAGE, Protection::ReadWrite, file.as_fd(), PAGE);
        let range = map().unwrap();
        assert_eq!(range.address() as u64, base);
        assert_eq!((byte(&range, 0), byte(&range, PAGE)), (2, 3));
        // SAFETY: inside the mapping.
        unsafe { range.address().write_volatile(9) };
        let result = map();
        assert!(
            matches!(&result, Err(VmError::AddressTaken { address, .. }) if *address == base),
            "{result:?}"
        );
        drop(range);
        let again = map().unwrap();
        assert_eq!(byte(&again, 0), 2, "the store was private");
        // SAFETY: no thread stores.
        unsafe { again.protect(Protection::Read) }.unwrap();
        assert_eq!(byte(&again, PAGE), 3);
    }

    #[test]
    fn a_taken_range_is_refused_with_the_name_of_what_is_there() {
        let file = tempfile::Builder::new().prefix("in the way").tempfile().unwrap();
        file.as_file().set_len(PAGE).unwrap();
        let base = random_base(4 * PAGE, &[]).unwrap();
        let _first = FixedRange::map_private(
            base + 2 * PAGE,
            PAGE,
            Protection::Read,
            file.as_file().as_fd(),
            0,
        )
        .unwrap();
        let error = FixedRange::map_anonymous(base, 4 * PAGE).unwrap_err();
        let path = file.path().to_str().unwrap();
        assert!(error.to_string().contains(path), "{error}");
        assert!(FixedRange::map_anonymous(base, 2 * PAGE).is_ok());
    }

    /// The kernel must refuse too: another thread may map after the check.
    #[test]
    fn the_kernel_does_not_replace_what_is_there() {
        let base = random_base(PAGE, &[]).unwrap();
        let range = FixedRange::map_anonymous(base, PAGE).unwrap();
        // SAFETY: inside the mapping.
        unsafe { range.address().write_volatile(7) };
        let address = range.address();
        let result =
            memory::map_private_at_free(address, SMALL_PAGE_BYTES, Protection::ReadWrite, None);
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EEXIST));
        assert_eq!(byte(&range, 0), 7);
    }

    #[test]
    fn bad_ranges_are_refused() {
        let start = WINDOW.start;
        let cases = [
            (start, 0, RangeProblem::Empty),
            (start + 1, PAGE, RangeProblem::Unaligned),
            (start, PAGE + 1, RangeProblem::Unaligned),
            (start - PAGE, PAGE, RangeProblem::OutsideWindow),
            (start - PAGE, 2 * PAGE, RangeProblem::OutsideWindow),
            (WINDOW.end - PAGE, 2 * PAGE, RangeProblem::OutsideWindow),
            (WINDOW.end, PAGE, RangeProblem::OutsideWindow),
            (0, PAGE, RangeProblem::OutsideWindow),
            (start, u64::MAX - PAGE + 1, RangeProblem::OutsideWindow),
        ];
        for (address, len_bytes, expected) in cases {
            let result = FixedRange::map_anonymous(address, len_bytes);
            assert!(
                matches!(&result, Err(VmError::FixedRange { problem, .. }) if *problem == expected),
                "{address:#x} + {len_bytes:#x}: {result:?}"
            );
        }
        let file = temporary_file(1);
        let result = FixedRange::map_private(start, PAGE, Protection::Read, file.as_fd(), 7);
        assert!(matches!(
            result,
            Err(VmError::FixedRange { problem: RangeProblem::Unaligned, .. })
        ));
    }

    #[test]
    fn lines_of_maps_are_understood() {
        let line = "55d8-55d9 r--p 00001000 fe:00 1234                       /a path/with blanks";
        let parsed = Mapped::parse(line).unwrap();
        assert_eq!(
            parsed,
            Mapped { addresses: 0x55d8..0x55d9, name: "/a path/with blanks".into() }
        );
        let line = "200000000000-200000001000 rw-p 00000000 00:00 0 ";
        assert_eq!(Mapped::parse(line).unwrap().name, "");
        assert_eq!(Mapped::parse("no line of maps"), None);
        assert!(mappings().iter().any(|one| one.name == "[stack]"));
    }

    #[test]
    fn sanitizers_are_refused_before_anything_is_mapped() {
        let base = WINDOW.start;
        let shadow = [Mapped { addresses: base + PAGE..base + (1 << 40), name: String::new() }];
        for sanitizer in [Sanitizer::Thread, Sanitizer::Memory] {
            for mapped in [&shadow[..], &[]] {
                let result = may_map(base, PAGE, &[sanitizer], mapped);
                assert!(matches!(result, Err(VmError::SanitizerAddress { sanitizer: found, .. })
                        if found == sanitizer));
            }
        }
        assert!(may_map(base, PAGE, &[Sanitizer::Address], &shadow).is_ok());
        for running in [&[Sanitizer::Address][..], &[]] {
            let result = may_map(base, 2 * PAGE, running, &shadow);
            assert!(matches!(result, Err(VmError::AddressTaken { .. })));
        }
    }

    #[test]
    fn random_bases_avoid_what_is_taken() {
        let step = REGION_BYTES as u64;
        // All but three positions are taken, one of them between unaligned neighbours.
        let hole = WINDOW.start + 10 * step;
        let taken = [
            (hole + 3 * step + 5, WINDOW.end),
            (WINDOW.start - step, 11 * step),
            (WINDOW.start, step),
        ];
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..200 {
            seen.insert(random_base(step, &taken).unwrap());
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [hole, hole + step, hole + 2 * step]);
        assert_eq!(random_base(3 * step + 5, &taken).unwrap(), hole);
        let result = random_base(3 * step + 6, &taken);
        assert!(matches!(result, Err(VmError::WindowFull { .. })));
        let whole = WINDOW.end - WINDOW.start;
        assert_eq!(random_base(whole, &[]).unwrap(), WINDOW.start);
        assert!(random_base(whole + 1, &[]).is_err());
        assert!(random_base(u64::MAX, &[]).is_err());
    }

    #[test]
    fn a_forked_child_has_a_hole_and_an_inert_range() {
        let base = random_base(PAGE, &[]).unwrap();
        let range = FixedRange::map_anonymous(base, PAGE).unwrap();
        // SAFETY: inside the mapping.
        unsafe { range.address().write_volatile(1) };
        // SAFETY: the child only makes system calls and leaves with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut failures = 0;
            // The child's own mapping there stays when the inherited range is dropped.
            let own = memory::map_private_at_free(
                base as *mut u8,
                SMALL_PAGE_BYTES,
                Protection::ReadWrite,
                None,
            );
            failures |= i32::from(own.is_err());
            // SAFETY: fails before it changes anything.
            failures |= i32::from(unsafe { range.protect(Protection::None) }.is_ok()) << 1;
            drop(range);
            // SAFETY: mapped above; if it is not, the crash fails the test.
            failures |= i32::from(unsafe { (base as *const u8).read_volatile() } != 0) << 2;
            // SAFETY: ends the child without running the test harness's exit handlers.
            unsafe { libc::_exit(failures) };
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: waits for the child made above.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        assert_eq!(byte(&range, 0), 1);
    }
}
