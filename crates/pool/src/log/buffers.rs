//! Memory for the records of commits.

use std::sync::Mutex;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct AlignedPage([u8; 4096]);

/// Page-aligned memory for records, kept for reuse.
pub(crate) struct CommitBuffer {
    pages: Vec<AlignedPage>,
    len_bytes: usize,
}

/// Larger buffers are not kept.
const KEPT_BYTES: usize = 4 << 20;
/// The number of buffers that are kept.
const KEPT: usize = 8;
impl CommitBuffer {
    pub fn bytes(&self) -> &[u8] {
        &self.pages.as_bytes()[..self.len_bytes]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_bytes()[..self.len_bytes]
    }
}

/// The memory that a handle keeps for its next commits.
#[derive(Default)]
pub(crate) struct Buffers {
    kept: Mutex<Vec<CommitBuffer>>,
}

impl Buffers {
    pub fn take(&self, len_bytes: usize) -> CommitBuffer {
        let pages = len_bytes.div_ceil(4096);
        let kept = self.kept.lock().unwrap_or_else(|broken| broken.into_inner()).pop();
        let mut buffer = kept.unwrap_or(CommitBuffer { pages: Vec::new(), len_bytes: 0 });
        if buffer.pages.len() < pages {
            buffer.pages.resize(pages, AlignedPage::new_zeroed());
        }
        buffer.len_bytes = len_bytes;
        buffer
    }

    pub fn keep(&self, buffer: CommitBuffer) {
        let mut kept = self.kept.lock().unwrap_or_else(|broken| broken.into_inner());
        if kept.len() < KEPT && buffer.pages.len() * 4096 <= KEPT_BYTES {
            kept.push(buffer);
        }
    }
}
