//! Brings in pages of a mapping ahead of their faults.
//!
//! Two forms: `MADV_POPULATE_READ`, one call for a range; and, on kernels without it (before 5.14),
//! a load from each page that reports failure instead of raising a signal. Neither changes what is
//! mapped, and neither terminates the process if the file was truncated.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_sys::fallible;
use aquifer_sys::memory::{self, Advice, SMALL_PAGE_BYTES};

/// A mapping that exists as long as this value.
///
/// # Safety
/// `len_bytes` bytes from `address` (page-aligned) are mapped readable as long as the value lives,
/// even if the contents cannot be read.
pub(crate) unsafe trait Span: Send + Sync + 'static {
    /// The first byte.
    fn address(&self) -> *const u8;
    /// Length of the mapping in bytes.
    fn len_bytes(&self) -> usize;
}

/// How pages are brought in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// `MADV_POPULATE_READ`.
    Advice,
    /// A load from each page.
    Touch,
}

/// A page of a range could not be brought in; those before it are in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Missing {
    /// The offset in the span of the first missing page.
    pub offset: usize,
}

/// Set once the kernel has refused the advice. Relaxed: at worst it is refused again.
static REFUSED: AtomicBool = AtomicBool::new(false);

impl Form {
    /// The better form, given what is known so far.
    pub fn best() -> Form {
        if REFUSED.load(Ordering::Relaxed) { Form::Touch } else { Form::Advice }
    }

    /// Brings in the pages of `range`, which are offsets in the span.
    ///
    /// Does nothing if the kernel lacks the advice and fallible loads are not supported.
    pub fn populate(self, span: &dyn Span, range: Range<usize>) -> Result<(), Missing> {
        let range = whole_pages(span, range);
        if range.is_empty() {
            return Ok(());
        }
        if self == Form::Touch {
            return touch(span, range);
        }
        match advise(span, &range) {
            Ok(()) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                REFUSED.store(true, Ordering::Relaxed);
                touch(span, range)
            }
            Err(_) => first_missing(span, range),
        }
    }
}

/// Rounds a range out to whole pages, inside the span.
pub(crate) fn whole_pages(span: &dyn Span, range: Range<usize>) -> Range<usize> {
    let end = range.end.min(span.len_bytes());
    let start = range.start.min(end) / SMALL_PAGE_BYTES * SMALL_PAGE_BYTES;
    start
        ..end
            .next_multiple_of(SMALL_PAGE_BYTES)
            .min(span.len_bytes().next_multiple_of(SMALL_PAGE_BYTES))
}

fn advise(span: &dyn Span, range: &Range<usize>) -> io::Result<()> {
    let address = span.address().wrapping_add(range.start).cast_mut();
    // SAFETY: mapped as long as the span lives; populating changes no contents.
    again(|| unsafe { memory::advise(address, range.len(), Advice::PopulateRead) })
}

/// Repeats a call while it fails with `EINTR` or `EAGAIN`.
fn again(mut call: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match call() {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            result => return result,
        }
    }
}

fn touch(span: &dyn Span, range: Range<usize>) -> Result<(), Missing> {
    if !fallible::SUPPORTED {
        return Ok(());
    }
    for offset in range.step_by(SMALL_PAGE_BYTES) {
        // SAFETY: mapped readable as long as the span lives.
        if !unsafe { fallible::try_touch(span.address().wrapping_add(offset)) } {
            return Err(Missing { offset });
        }
    }
    Ok(())
}

/// Finds the page that made populating `range` fail, by bisection: pages that are already in memory
/// cost little.
fn first_missing(span: &dyn Span, range: Range<usize>) -> Result<(), Missing> {
    let (mut start, mut end) = (range.start, range.end);
    if advise(span, &range).is_ok() {
        return Ok(());
    }
    while end - start > SMALL_PAGE_BYTES {
        let middle = start + (end - start) / SMALL_PAGE_BYTES / 2 * SMALL_PAGE_BYTES;
        match advise(span, &(start..middle)) {
            Ok(()) => start = middle,
            Err(_) => end = middle,
        }
    }
    Err(Missing { offset: start })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use aquifer_sys::memory::Protection;
    use aquifer_sys::pagemap::Pagemap;

    use aquifer_vm::router;

    /// A whole file, mapped for tests.
    pub(crate) struct Mapping {
        address: *mut u8,
        len_bytes: usize,
        pub file: File,
    }

    // SAFETY: the address is only passed to the kernel and to loads.
    unsafe impl Send for Mapping {}
    // SAFETY: as above.
    unsafe impl Sync for Mapping {}

    impl Mapping {
        /// A new file of `pages` pages, each filled with the low byte of its number.
        pub fn of_pages(pages: usize) -> Arc<Mapping> {
            let file = tempfile::tempfile().unwrap();
            for page in 0..pages {
                let bytes = [page as u8; SMALL_PAGE_BYTES];
                let at = (page * SMALL_PAGE_BYTES) as u64;
                aquifer_sys::io::write_all_at(file.as_fd(), &bytes, at).unwrap();
            }
            Mapping::of_file(file, pages * SMALL_PAGE_BYTES)
        }

        pub fn of_file(file: File, len_bytes: usize) -> Arc<Mapping> {
            router::install().unwrap();
            let address = memory::map_file(len_bytes, Protection::Read, file.as_fd(), 0).unwrap();
            Arc::new(Mapping { address, len_bytes, file })
        }

        /// How many pages of `range` are mapped in.
        pub fn mapped_pages(&self, range: Range<usize>) -> u64 {
            let mut entries = vec![0; range.len().div_ceil(SMALL_PAGE_BYTES)];
            let start = self.address.wrapping_add(range.start);
            Pagemap::open().unwrap().present(start, &mut entries).unwrap()
        }
    }

    // SAFETY: mapped from the constructor until `drop`.
    unsafe impl Span for Mapping {
        fn address(&self) -> *const u8 {
            self.address
        }
        fn len_bytes(&self) -> usize {
            self.len_bytes
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: mapped by the constructor, and the last reference to the span is being
            // dropped.
            unsafe { memory::unmap(self.address, self.len_bytes) }.unwrap();
        }
    }

    #[test]
    fn both_forms_map_the_range_and_leave_the_rest() {
        for form in [Form::Advice, Form::Touch] {
            let mapping = Mapping::of_pages(256);
            let range = 64 * SMALL_PAGE_BYTES + 5..128 * SMALL_PAGE_BYTES + 1;
            form.populate(&*mapping, range).unwrap();
            let page = SMALL_PAGE_BYTES;
            assert_eq!(mapping.mapped_pages(64 * page..129 * page), 65, "{form:?}");
            // The kernel also maps surrounding pages, 64 KiB by default.
            assert_eq!(mapping.mapped_pages(192 * page..256 * page), 0, "{form:?}");
        }
    }

    #[test]
    fn both_forms_name_the_first_page_that_is_gone() {
        for form in [Form::Advice, Form::Touch] {
            for pages_left in [0, 1, 77, 255] {
                let mapping = Mapping::of_pages(256);
                mapping.file.set_len((pages_left * SMALL_PAGE_BYTES) as u64).unwrap();
                let gone = form.populate(&*mapping, 0..mapping.len_bytes());
                assert_eq!(
                    gone,
                    Err(Missing { offset: pages_left * SMALL_PAGE_BYTES }),
                    "{form:?}"
                );
            }
        }
    }

    /// Simulated, because today only a fatal signal interrupts this call.
    #[test]
    fn an_interrupted_call_is_made_again_and_a_failed_one_is_not() {
        let mut left = vec![libc::EIO, libc::EAGAIN, libc::EINTR, libc::EINTR];
        let failed = again(|| Err(io::Error::from_raw_os_error(left.pop().unwrap())));
        assert_eq!(failed.unwrap_err().raw_os_error(), Some(libc::EIO));
        assert!(left.is_empty());
    }

    #[test]
    fn ranges_outside_the_span_are_cut() {
        let mapping = Mapping::of_pages(4);
        assert_eq!(Form::best().populate(&*mapping, 0..usize::MAX), Ok(()));
        assert_eq!(Form::best().populate(&*mapping, usize::MAX - 1..usize::MAX), Ok(()));
        let backwards = Range { start: 9 * SMALL_PAGE_BYTES, end: SMALL_PAGE_BYTES };
        assert!(whole_pages(&*mapping, backwards).is_empty());
    }
}
