//! Ranges of bytes: of mappings, views and files, and the functions of a program that get their bytes.

use std::ffi::c_void;
use std::ops::{Bound, Range};

use aquifer::Bytes;

use crate::call::{Failure, Result};
use crate::memory::list;

/// A range of bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_range {
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
}

impl aq_range {
    pub(crate) fn to_range(self) -> Result<Range<u64>> {
        let end = self.offset.checked_add(self.length);
        let end = end.ok_or_else(|| Failure::invalid("a range ends beyond 2^64"))?;
        Ok(self.offset..end)
    }
}

pub(crate) type Bounds = (Bound<u64>, Bound<u64>);

/// A range; to the end if its length is UINT64_MAX.
pub(crate) fn bounds(range: aq_range) -> Result<Bounds> {
    if range.length == u64::MAX {
        return Ok((Bound::Included(range.offset), Bound::Unbounded));
    }
    Ok((Bound::Included(range.offset), Bound::Excluded(range.to_range()?.end)))
}

/// A range; to the end, which is `len_bytes`, if its length is UINT64_MAX.
pub(crate) fn whole_or(range: aq_range, len_bytes: u64) -> Result<Range<u64>> {
    if range.length == u64::MAX {
        return Ok(range.offset..len_bytes.max(range.offset));
    }
    range.to_range()
}

/// # Safety
/// As for [`list`].
pub(crate) unsafe fn ranges(ranges: *const aq_range, count: usize) -> Result<Vec<Range<u64>>> {
    // SAFETY: guaranteed by the caller.
    let ranges = unsafe { list(ranges, count, "ranges") }?;
    ranges.iter().map(|range| range.to_range()).collect()
}

/// Called with bytes of a file, which are valid during the call. It must not throw, longjmp out,
/// call pthread_exit, or fork.
pub type aq_bytes_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, data: *const c_void, size: usize)>;

/// What passes bytes to a function of the program.
///
/// # Safety
/// `look` may be called with `context`.
pub(crate) unsafe fn passing(
    look: aq_bytes_fn,
    context: *mut c_void,
) -> Result<impl Fn(Bytes<'_>)> {
    let look = look.ok_or_else(|| Failure::invalid("`look` is null"))?;
    // SAFETY: guaranteed by the caller; the bytes are borrowed for the call.
    Ok(move |bytes: Bytes<'_>| unsafe { look(context, bytes.as_ptr().cast(), bytes.len()) })
}
