//! Which mapped files stay open, and their paths.
//!
//! A mapping needs no descriptor, but finding out why a page could not be read does, and so does
//! mapping it again. The first files in use stay open, up to a quarter of the process's limit of
//! descriptors. Further files are reopened by their path when necessary, which fails only if the
//! path names another file by then. A file that no path names (removed, or never in a directory)
//! stays open as long as it is in use, because it could not be reopened.
//!
//! # Duplicates of descriptors
//! Duplicating and closing a descriptor takes the lock of the process's table twice: with two
//! threads 0.8 µs, a fifth of the other costs of a 32 KiB mapping. So all mappings of a file that a
//! program has open share one duplicate ([`Duplicates`]). It is closed when the heap unmaps retired
//! mappings, and no later; until then those keep the file in use anyway.
//!
//! The path of a file given as a descriptor is read from the duplicate when it is first needed
//! ([`FileName`]).

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use aquifer_sys::futex::Mutex;
use aquifer_sys::residency::FileIdentity;
use once_cell::race::OnceBox;

use super::identity::{FileId, Status};

/// Upper bound on the limit, whatever the process may have open.
const MOST: u64 = 1024;
/// Number of places for duplicates.
const DUPLICATES: usize = 128;

/// Files kept open by all mappers of the process, which share its descriptors.
static KEPT: AtomicUsize = AtomicUsize::new(0);

fn limit() -> usize {
    static LIMIT: OnceBox<usize> = OnceBox::new();
    *LIMIT.get_or_init(|| {
        let open_files = aquifer_sys::features::limits().open_files;
        Box::new((open_files.unwrap_or(u64::MAX) / 4).min(MOST) as usize)
    })
}

/// A file that stays open.
pub(crate) struct Kept {
    file: File,
    is_counted: bool,
}

impl Kept {
    /// Keeps a file open, or returns it if too many are.
    pub fn new(file: File) -> Result<Arc<Kept>, File> {
        // Relaxed: a number, which guards nothing.
        let (set, read) = (Ordering::Relaxed, Ordering::Relaxed);
        match KEPT.fetch_update(set, read, |kept| (kept < limit()).then_some(kept + 1)) {
            Ok(_) => Ok(Arc::new(Kept { file, is_counted: true })),
            Err(_) => Err(file),
        }
    }

    /// Keeps a file open without counting it: temporarily, or because it could not be reopened.
    pub fn uncounted(file: File) -> Arc<Kept> {
        Arc::new(Kept { file, is_counted: false })
    }

    pub fn file(&self) -> &File {
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

/// A file that is being mapped: open now, and possibly as long as it is in use.
pub(crate) enum Opened<'a> {
    /// It stays open.
    Kept(Arc<Kept>),
    /// Opened here; closed after mapping.
    Own(File),
    /// The caller's.
    Given(&'a File),
}

impl<'a> Opened<'a> {
    /// Keeps a file that was opened by its path open, if not too many are or if the path does not
    /// name it.
    pub fn by_path(file: File, path: &Path, id: FileId) -> Opened<'a> {
        match Kept::new(file) {
            Ok(kept) => Opened::Kept(kept),
            Err(file) if leads_to(path, id) => Opened::Own(file),
            Err(file) => Opened::Kept(Kept::uncounted(file)),
        }
    }

    /// Keeps a file that the caller has open, as `by_path`, and returns its name. If no descriptor
    /// is left, uses the caller's.
    pub fn given(file: &'a File, id: FileId, duplicates: &Duplicates) -> (Opened<'a>, FileName) {
        if let Some(kept) = duplicates.of(file, id) {
            return (Opened::Kept(kept), FileName::later());
        }
        let path = path_of(file);
        let duplicate = if leads_to(&path, id) { None } else { file.try_clone().ok() };
        let opened = match duplicate {
            None => Opened::Given(file),
            Some(file) => Opened::Kept(Kept::uncounted(file)),
        };
        (opened, FileName::of(path))
    }

    pub fn file(&self) -> &File {
        match self {
            Opened::Kept(kept) => kept.file(),
            Opened::Own(file) => file,
            Opened::Given(file) => file,
        }
    }

    /// The file, if it stays open.
    pub fn kept(&self) -> Option<Arc<Kept>> {
        match self {
            Opened::Kept(kept) => Some(kept.clone()),
            Opened::Own(_) | Opened::Given(_) => None,
        }
    }
}

fn leads_to(path: &Path, id: FileId) -> bool {
    Status::of_path(path).is_ok_and(|status| status.id == id)
}

/// Duplicates a readable descriptor, if not too many files are open.
fn duplicate(file: &File) -> Option<Arc<Kept>> {
    // Other mappings of the file share this duplicate, and they need to read from it.
    let can_be_read = aquifer_sys::io::can_be_read(file.as_fd());
    can_be_read.then(|| file.try_clone().ok()).flatten().and_then(|file| Kept::new(file).ok())
}

/// The current path of an open file.
pub(crate) fn path_of(file: &File) -> PathBuf {
    let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()));
    std::fs::read_link(&link).unwrap_or(link)
}

/// Duplicates of descriptors given by programs, by file. Each place has its own lock, and is
/// overwritten by other files with the same place.
pub(crate) struct Duplicates {
    places: Box<[Place]>,
}

/// Aligned to a cache line: threads use different places.
#[repr(align(64))]
#[derive(Default)]
struct Place {
    last: Mutex<Option<(FileIdentity, Arc<Kept>)>>,
}

impl Duplicates {
    /// If not `are_shared`, each mapping gets a new duplicate.
    pub fn new(are_shared: bool) -> Duplicates {
        let places = if are_shared { DUPLICATES } else { 0 };
        Duplicates { places: (0..places).map(|_| Place::default()).collect() }
    }

    /// The duplicate of this file; `None` if too many files are open, or it cannot be read.
    fn of(&self, file: &File, id: FileId) -> Option<Arc<Kept>> {
        let identity = id.identity();
        let number = (identity.inode ^ identity.device.rotate_left(3)) as usize;
        let Some(place) = number.checked_rem(self.places.len()) else {
            return duplicate(file);
        };
        let mut last = self.places[place].last.lock();
        if let Some((of, kept)) = &*last
            && *of == identity
        {
            return Some(kept.clone());
        }
        let made = duplicate(file);
        let before = made.as_ref().and_then(|kept| last.replace((identity, kept.clone())));
        drop(last);
        drop(before);
        made
    }

    /// Closes duplicates that no mapping uses.
    pub fn close_unused(&self) {
        for place in &self.places {
            let mut last = place.last.lock();
            let unused = last.take_if(|(_, kept)| Arc::strong_count(kept) == 1);
            drop(last);
            drop(unused);
        }
    }
}

/// The path of a file. For a file given as a descriptor it is determined at first use.
#[derive(Debug)]
pub(crate) struct FileName {
    known: OnceLock<PathBuf>,
}

impl FileName {
    /// A known path.
    pub fn of(path: PathBuf) -> FileName {
        FileName { known: OnceLock::from(path) }
    }

    /// The path of a mapping that keeps its file open, determined later.
    pub fn later() -> FileName {
        FileName { known: OnceLock::new() }
    }

    /// Whether the path has not been determined yet.
    pub fn is_unknown(&self) -> bool {
        self.known.get().is_none()
    }

    /// The path; if not known yet, that which `now` finds.
    pub fn path(&self, now: impl FnOnce() -> Option<PathBuf>) -> &Path {
        self.known.get_or_init(|| now().unwrap_or_default())
    }
}
