//! Which mapped files stay open.
//!
//! A mapping needs no descriptor; finding out why a page could not be had does, and so does mapping it anew. It is at
//! hand for the first files in use, up to a quarter of what the process may have open. The files beyond are opened
//! again by their path when need be, which fails only if it leads elsewhere by then. A file without such a path (removed,
//! or never in a directory) stays open as long as it is in use: it could not be had again.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::identity::{FileId, Status};

/// At most, however many descriptors there may be.
const MOST: u64 = 1024;

/// Kept open by all mappers of the process: descriptors are the process's.
static KEPT: AtomicUsize = AtomicUsize::new(0);

fn limit() -> usize {
    static LIMIT: OnceLock<usize> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let open_files = aquifer_sys::features::limits().open_files;
        (open_files.unwrap_or(u64::MAX) / 4).min(MOST) as usize
    })
}

/// A file that stays open.
pub(crate) struct Kept {
    file: Arc<File>,
    is_counted: bool,
}

impl Kept {
    /// Keeps it open if there are not too many.
    pub fn new(file: &Arc<File>) -> Option<Kept> {
        // Relaxed: a number, which guards nothing.
        let (set, read) = (Ordering::Relaxed, Ordering::Relaxed);
        KEPT.fetch_update(set, read, |kept| (kept < limit()).then_some(kept + 1)).ok()?;
        Some(Kept { file: file.clone(), is_counted: true })
    }

    /// Keeps one open that could not be had again.
    pub fn anyway(file: &Arc<File>) -> Kept {
        Kept::new(file).unwrap_or_else(|| Kept { file: file.clone(), is_counted: false })
    }

    pub fn file(&self) -> &Arc<File> {
        &self.file
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.is_counted {
            KEPT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Keeps a file open if there are not too many, or if its path does not lead to it.
pub(crate) fn keep(file: &Arc<File>, path: &Path, id: FileId) -> Option<Kept> {
    Kept::new(file).or_else(|| {
        let is_reachable = Status::of_path(path).is_ok_and(|status| status.id == id);
        (!is_reachable).then(|| Kept::anyway(file))
    })
}
