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

use std::sync::atomic::Ordering::Relaxed;

use aquifer_sys::lock::LockKind;

use crate::error::{PoolError, Result};
use crate::format::superblock::Superblock;
use crate::media::Media;
use crate::options::{Company, PoolOptions};
use crate::random::new_uuid;
use crate::shared::handle::Handle;
use crate::shared::membership::{Byte, Membership};
use crate::shared::segment::Segment;
use crate::shared::segment_place::{self, Part, Places};

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
