//! Dirty pages unrelated to a commit, in the file that is committed to.
//!
//! A contender that makes the whole file durable pays for them. They are rewritten with their
//! current content, so only their state changes, and only when the kernel has written some of them
//! back.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::raw::{PAGE_BYTES, cache_state, system_page_bytes};

/// A range of a file whose pages are kept dirty.
#[derive(Debug)]
pub struct DirtyPages {
    file: File,
    offset_bytes: u64,
    content: Vec<u8>,
}

impl DirtyPages {
    /// The `pages` pages of `file` from `offset_bytes` on. No other writer may write there while
    /// this lives.
    pub fn new(file: File, offset_bytes: u64, pages: usize) -> io::Result<Self> {
        let mut content = vec![0; pages * PAGE_BYTES];
        file.read_exact_at(&mut content, offset_bytes)?;
        Ok(Self { file, offset_bytes, content })
    }

    /// The number of pages.
    pub fn pages(&self) -> usize {
        self.content.len() / PAGE_BYTES
    }

    /// Makes all of them dirty unless they are.
    pub fn refresh(&self) -> io::Result<()> {
        let len_bytes = self.content.len() as u64;
        if let Some(state) = cache_state(&self.file, self.offset_bytes, len_bytes)?
            && state.dirty_pages * system_page_bytes() >= len_bytes
        {
            return Ok(());
        }
        // Page by page: large requests would make large folios, which count once.
        for (page, at) in self.content.chunks(PAGE_BYTES).zip((0_u64..).step_by(PAGE_BYTES)) {
            self.file.write_all_at(page, self.offset_bytes + at)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_become_dirty_and_keep_their_content() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let content: Vec<u8> = (0..20 * PAGE_BYTES).map(|at| (at / 7) as u8).collect();
        file.write_all_at(&content, 0).unwrap();
        file.sync_all().unwrap();
        let offset_bytes = 4 * PAGE_BYTES as u64;
        let dirty = DirtyPages::new(file.try_clone().unwrap(), offset_bytes, 16).unwrap();
        dirty.refresh().unwrap();
        let mut found = vec![0; content.len()];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found, content);
        let of = |offset_bytes, pages: usize| {
            cache_state(&file, offset_bytes, (pages * PAGE_BYTES) as u64).unwrap()
        };
        let Some(state) = of(offset_bytes, 16) else {
            return eprintln!("skipped: this kernel has no cachestat");
        };
        assert_eq!(state.dirty_pages * system_page_bytes(), 16 * PAGE_BYTES as u64);
        file.sync_all().unwrap();
        assert_eq!(of(offset_bytes, 16).unwrap().dirty_pages, 0);
    }
}
