//! Writers beside other writers, and a writer that is alone with the pool.
//!
//! Some writers must know that no other one changes files: a server whose clients cache names and
//! pages without end. Such a *sole* writer locks a byte of the pool file for as long as it has the
//! pool open, and leaves a note in the segment that tells the writers which it keeps out what they
//! can do. Readers are not concerned.
//!
//! | opens | if there is a sole writer | if there are other writers |
//! |---|---|---|
//! | among others (the default) | `SoleWriter` | joins |
//! | as sole writer | `SoleWriter` | `HasWriters` |
//! | beside a sole writer, whose nonce it knows | joins | joins |
//! | passively: it promises to change no file | joins | joins |
//!
//! Writers open a pool one at a time ([`Byte::Recovery`]), so the decision and what it is based on,
//! the locks, the note and the process slots, cannot change in between; a writer that leaves
//! meanwhile only makes room. Whether there is a sole writer is told by a lock that a read-only
//! descriptor cannot have: a reader can delay a sole writer, as any writer, and be taken for none.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_sys::lock::LockKind;

use crate::error::{PoolError, Result};
use crate::format::superblock::Superblock;
use crate::handle::Handle;
use crate::media::Media;
use crate::membership::{Byte, Membership};
use crate::options::PoolOptions;
use crate::random::new_uuid;
use crate::segment::Segment;
use crate::segment_place::{self, Part, Places};
use crate::sync::AtomicU64;

/// The longest note.
pub(crate) const NOTE_BYTES: usize = 256;

/// What a writer is to other writers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Company {
    /// It joins them.
    Among,
    /// It keeps them out, and tells them this.
    Sole(String),
    /// It belongs to the sole writer that has this nonce.
    Beside(u64),
    /// It changes no files.
    Passive,
}

/// What the sole writer tells the others, in the segment. Changed only by a process that is opening
/// the pool for writing. Meaningless while no handle has locked [`Byte::Sole`].
#[repr(C)]
pub(crate) struct SoleNote {
    /// As numbered in its own PID namespace.
    pid: AtomicU64,
    nonce: AtomicU64,
    len_bytes: AtomicU64,
    text: [AtomicU64; NOTE_BYTES / 8],
}

/// The start of a text that has room in a note.
fn cut(text: &str) -> &[u8] {
    let mut ends = (0..=text.len().min(NOTE_BYTES)).rev();
    let end = ends.find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    &text.as_bytes()[..end]
}

impl SoleNote {
    // Relaxed, here and below: the lock of `Byte::Recovery` orders it.
    fn set(&self, text: &str, nonce: u64) {
        let text = cut(text);
        let mut bytes = [0; NOTE_BYTES];
        bytes[..text.len()].copy_from_slice(text);
        for (word, bytes) in self.text.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Relaxed);
        }
        self.len_bytes.store(text.len() as u64, Relaxed);
        self.pid.store(u64::from(std::process::id()), Relaxed);
        self.nonce.store(nonce, Relaxed);
    }

    /// By which others may join the sole writer. That keeps it itself: once it has lost its locks, this
    /// may be that of the next one.
    fn nonce(&self) -> u64 {
        self.nonce.load(Relaxed)
    }

    fn error(&self, path: PathBuf) -> PoolError {
        let bytes: Vec<u8> =
            self.text.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        let len_bytes = (self.len_bytes.load(Relaxed) as usize).min(NOTE_BYTES);
        // Any writer of the pool may have stored this, and it is printed.
        let text = String::from_utf8_lossy(&bytes[..len_bytes]);
        let note = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        PoolError::SoleWriter { path, pid: self.pid.load(Relaxed) as u32, note }
    }
}

/// Whether a handle keeps other writers out: its lock is one that a read-only descriptor cannot
/// have.
fn is_kept_alone(locks: &Membership) -> bool {
    locks.is_locked_by_other(Byte::Sole, LockKind::Shared)
}

/// Lets a writer in that holds [`Byte::Recovery`] and has no process slot yet, or returns the reason
/// why not.
pub(crate) fn admit(handle: &Handle) -> Result<()> {
    let (locks, note) = (&handle.members.locks, &handle.control().sole);
    let path = || handle.media.path().to_path_buf();
    let is_kept_alone = is_kept_alone(locks);
    match &handle.company {
        Company::Passive => Ok(()),
        Company::Beside(nonce) if is_kept_alone && note.nonce() == *nonce => Ok(()),
        _ if is_kept_alone => Err(note.error(path())),
        Company::Among => Ok(()),
        Company::Beside(nonce) => Err(PoolError::Parameter {
            what: "the nonce of the sole writer",
            value: nonce.to_string(),
            reason: "there is no sole writer any more",
        }),
        Company::Sole(text) => {
            if let Some(pid) = other_writer(handle) {
                return Err(PoolError::HasWriters { path: path(), pid });
            }
            // A reader has locked it.
            if !locks.try_lock(Byte::Sole, LockKind::Exclusive).unwrap_or(false) {
                return Err(PoolError::Busy { path: path() });
            }
            let nonce = new_uuid()?.as_u64_pair().1;
            note.set(text, nonce);
            let _ = handle.sole_nonce.set(nonce);
            Ok(())
        }
    }
}

/// A process that may change files.
fn other_writer(handle: &Handle) -> Option<u32> {
    let (control, locks) = (handle.control(), &handle.members.locks);
    let may_change = |index: usize| {
        control.pids[index].load(Relaxed) != 0
            && handle.segment.process(index).is_passive.load(Relaxed) == 0
            && locks.is_alive(index)
    };
    let found = (0..handle.segment.used_processes()).find(|&index| may_change(index));
    found.map(|index| locks.pid_of(control, index))
}

/// The error for a writer that cannot have the pool for itself: if a sole writer is the reason, what
/// that says.
pub(crate) fn instead_of(
    error: PoolError,
    media: &dyn Media,
    locks: &Membership,
    superblock: Option<Superblock>,
    options: &PoolOptions,
) -> PoolError {
    let is_of_writer = matches!(error, PoolError::Busy { .. }) && !options.read_only;
    if !is_of_writer || !is_kept_alone(locks) {
        return error;
    }
    let path = media.path().to_path_buf();
    let segment = superblock.and_then(|Superblock { segment: id, uuid, layout, .. }| {
        let identity = segment_place::identity_in(id);
        let places = Places::new(options.segment_directory.as_deref(), media.path());
        let memory = places.open(id, Part::Segment, identity, uuid, media, false).ok()?;
        Segment::adopt(memory, uuid, &layout).ok()
    });
    match segment {
        Some(segment) => segment.control().sole.error(path),
        None => PoolError::SoleWriter { path, pid: 0, note: String::new() },
    }
}

impl Handle {
    /// [`Handle::check_writable`] before files and objects are changed.
    pub fn check_may_change(&self) -> Result<()> {
        self.check_writable()?;
        self.check_not_passive()
    }

    /// The part of it that concerns passive handles.
    #[inline]
    pub fn check_not_passive(&self) -> Result<()> {
        if self.company == Company::Passive {
            return Err(PoolError::ReadOnly {
                path: self.media.path().to_path_buf(),
                reason: "it was opened passively, to be kept open",
            });
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_cut_between_characters_and_shows_no_control_characters() {
        let long = "ä".repeat(200);
        assert_eq!(cut(&long), "ä".repeat(128).as_bytes());
        assert_eq!(cut(&format!("x{long}")), format!("x{}", "ä".repeat(127)).as_bytes());
        let note: SoleNote = SoleNote {
            pid: AtomicU64::new(0),
            nonce: AtomicU64::new(0),
            len_bytes: AtomicU64::new(0),
            text: [(); NOTE_BYTES / 8].map(|()| AtomicU64::new(0)),
        };
        note.set("mounted at /m\u{1b}[2J", 7);
        let text = |note: &SoleNote| note.error("/pool".into()).to_string();
        assert!(text(&note).contains("mounted at /m\u{fffd}[2J"), "{}", text(&note));
        // Another process may store anything.
        note.len_bytes.store(u64::MAX, Relaxed);
        note.text[0].store(u64::MAX, Relaxed);
        assert!(text(&note).contains('\u{fffd}'));
    }
}
