//! Which mapped files stay open, and what they are called.
//!
//! A mapping needs no descriptor; finding out why a page could not be had does, and so does mapping it anew. It is at
//! hand for the first files in use, up to a quarter of what the process may have open. The files beyond are opened
//! again by their path when need be, which fails only if it leads elsewhere by then. A file without such a path (removed,
//! or never in a directory) stays open as long as it is in use: it could not be had again.
//!
//! # Ranges of an open file
//! Duplicating a descriptor and closing it takes the lock of the process's table twice: with two threads 0.8 µs, a fifth of
//! what a mapping of 32 KiB costs otherwise. So all mappings of a file that a program has open share one duplicate
//! ([`Duplicates`]), which is closed when the heap lets go of retired mappings, and no later. Those keep the file in use
//! for as long anyway.
//!
//! What a file is called that was given open is found out when somebody asks ([`FileName`]): from the duplicate.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use aquifer_sys::futex::Mutex;
use aquifer_sys::residency::FileIdentity;

use super::identity::{FileId, Status};
use super::mapped::Mapped;

/// At most, however many descriptors there may be.
const MOST: u64 = 1024;
/// Files whose duplicates are found again.
const DUPLICATES: usize = 128;

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
    file: File,
    is_counted: bool,
}

impl Kept {
    /// Keeps it open if there are not too many; otherwise it comes back.
    pub fn new(file: File) -> Result<Arc<Kept>, File> {
        // Relaxed: a number, which guards nothing.
        let (set, read) = (Ordering::Relaxed, Ordering::Relaxed);
        match KEPT.fetch_update(set, read, |kept| (kept < limit()).then_some(kept + 1)) {
            Ok(_) => Ok(Arc::new(Kept { file, is_counted: true })),
            Err(_) => Err(file),
        }
    }

    /// One that does not count, for a moment or because it could not be had again.
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

/// A file that is being mapped: open, and perhaps for as long as it is in use.
pub(crate) enum Opened<'a> {
    /// It stays open.
    Kept(Arc<Kept>),
    /// Opened here, and to be closed.
    Own(File),
    /// The caller's.
    Given(&'a File),
}

impl<'a> Opened<'a> {
    /// Keeps a file open that was opened by its path, if there are not too many or if the path does not lead to it.
    pub fn by_path(file: File, path: &Path, id: FileId) -> Opened<'a> {
        match Kept::new(file) {
            Ok(kept) => Opened::Kept(kept),
            Err(file) if leads_to(path, id) => Opened::Own(file),
            Err(file) => Opened::Kept(Kept::uncounted(file)),
        }
    }

    /// Keeps a file open that the caller has open, as `by_path`; and what it is called. Without descriptors it is done
    /// without.
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

    /// If it stays open.
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

/// A duplicate to read from, if there can be one more.
fn duplicate(file: &File) -> Option<Arc<Kept>> {
    // Others who have the file open to be read get this one as well.
    let can_be_read = aquifer_sys::io::can_be_read(file.as_fd());
    can_be_read.then(|| file.try_clone().ok()).flatten().and_then(|file| Kept::new(file).ok())
}

/// What an open file is called at the moment.
pub(crate) fn path_of(file: &File) -> PathBuf {
    let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()));
    std::fs::read_link(&link).unwrap_or(link)
}

/// Duplicates of descriptors that programs gave, by file. Each place has a lock of its own, and is overwritten by another
/// file's.
pub(crate) struct Duplicates {
    places: Box<[Place]>,
}

/// In a cache line of its own: threads use different ones.
#[repr(align(64))]
#[derive(Default)]
struct Place {
    last: Mutex<Option<(FileIdentity, Arc<Kept>)>>,
}

impl Duplicates {
    /// Remembers duplicates, or makes one each time.
    pub fn new(are_shared: bool) -> Duplicates {
        let places = if are_shared { DUPLICATES } else { 0 };
        Duplicates { places: (0..places).map(|_| Place::default()).collect() }
    }

    /// One of this file; `None` if there are too many, or it cannot be read.
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

    /// Closes those that no mapping uses.
    pub fn close_unused(&self) {
        for place in &self.places {
            let mut last = place.last.lock();
            let unused = last.take_if(|(_, kept)| Arc::strong_count(kept) == 1);
            drop(last);
            drop(unused);
        }
    }
}

/// What a file is called, found out when somebody asks if it was given open.
#[derive(Debug)]
pub(crate) struct FileName {
    known: OnceLock<PathBuf>,
}

impl FileName {
    /// So.
    pub fn of(path: PathBuf) -> FileName {
        FileName { known: OnceLock::from(path) }
    }

    /// Of a mapping that keeps its file open.
    pub fn later() -> FileName {
        FileName { known: OnceLock::new() }
    }

    /// Whether nobody has asked yet.
    pub fn is_unknown(&self) -> bool {
        self.known.get().is_none()
    }

    /// The path; from what `mapped` keeps open if it is not known yet.
    pub fn path(&self, mapped: Option<&Mapped>) -> &Path {
        self.known.get_or_init(|| mapped.and_then(Mapped::path_now).unwrap_or_default())
    }
}
