//! Buffers whose pages are there, for system calls that must not meet a page fault.

use std::io;
use std::ops::{Deref, DerefMut};

use crate::memory::{self, Advice, SMALL_PAGE_BYTES};

/// Memory of its own pages, all of them resident: written to once, and locked where the limit of
/// locked memory permits. A forked child does not have it.
///
/// The kernel gives up a transfer of `/dev/fuse` if its user memory must be paged in while the
/// process is being killed, and then the *client's* request fails.
#[derive(Debug)]
pub struct Resident {
    start: *mut u8,
    len_bytes: usize,
}

// SAFETY: owns its mapping, as a boxed slice owns its memory.
unsafe impl Send for Resident {}
// SAFETY: as above.
unsafe impl Sync for Resident {}

impl Resident {
    /// Zeroed memory.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn new(len_bytes: usize) -> io::Result<Resident> {
        let len_bytes = len_bytes.next_multiple_of(SMALL_PAGE_BYTES);
        let start = memory::map_anonymous(len_bytes)?;
        let mut buffer = Resident { start, len_bytes };
        // SAFETY: the range was mapped above, and is in no child yet.
        unsafe { memory::advise(start, len_bytes, Advice::DontFork) }?;
        // Before Linux 5.14 stores do it.
        buffer.iter_mut().step_by(SMALL_PAGE_BYTES).for_each(|byte| *byte = 0);
        // SAFETY: locks pages of a mapping, and changes nothing else. Without the right to lock as
        // much, they are resident as long as memory is not short.
        let _ = unsafe { libc::mlock(start.cast(), len_bytes) };
        Ok(buffer)
    }
}

impl Deref for Resident {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped and initialised with this length, until it is dropped; changed only through
        // an exclusive reference.
        unsafe { std::slice::from_raw_parts(self.start, self.len_bytes) }
    }
}

impl DerefMut for Resident {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; this reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len_bytes) }
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; nothing refers to it any more.
        let _ = unsafe { memory::unmap(self.start, self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_zeroed_memory_of_whole_pages() {
        let mut buffer = Resident::new(SMALL_PAGE_BYTES + 1).unwrap();
        assert_eq!(buffer.len(), 2 * SMALL_PAGE_BYTES);
        assert!(buffer.iter().all(|&byte| byte == 0));
        buffer[SMALL_PAGE_BYTES] = 7;
        assert_eq!(buffer[SMALL_PAGE_BYTES], 7);
    }
}
