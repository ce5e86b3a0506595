//! Eviction: CLOCK over the blocks of all objects, under the lock of the control file.
//!
//! The hand goes through the objects by key, and through the blocks of each. A block that was used since the hand
//! passed loses its mark, one that was not is dropped, unless a part of it is leased. A file that has nothing left and no
//! opener is removed.

use std::os::unix::fs::MetadataExt;

use super::TierError;
use super::directory::{ControlFile, Directory};
use super::layout::{COLD, Control, HOT, Key};
use super::object::ObjectFile;

/// Of the budget: made free at a time, so that not every write evicts.
const STEP_DIVISOR: u64 = 64;
const LARGEST_STEP_BYTES: u64 = 64 << 20;
/// One round to cool all blocks, one to drop them, and one because the hand starts anywhere.
const ROUNDS: usize = 3;
const STATES_AT_ONCE: usize = 4096;

/// The bytes that a tier's files take.
pub(super) fn used_bytes(directory: &Directory) -> Result<u64, TierError> {
    let mut used_bytes = 0;
    for key in directory.keys()? {
        let path = directory.path().join(key.file_name());
        match std::fs::symlink_metadata(&path) {
            Ok(status) => used_bytes += status.blocks() * 512,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(TierError::system(&path, "cannot inspect", error)),
        }
    }
    Ok(used_bytes)
}

/// Counts, and repairs what a crash left: for an opener that is alone.
pub(super) fn recount(directory: &Directory) -> Result<u64, TierError> {
    for key in directory.keys()? {
        match ObjectFile::existing(directory, key) {
            Ok(Some(object)) => object
                .repair_states()
                .map_err(|error| TierError::system(directory.path(), "cannot repair", error))?,
            Ok(None) => {}
            Err(TierError::Damaged { .. }) => directory.remove(key)?,
            // Refused at each use as well; it is not this tier's to remove.
            Err(TierError::NotPrivate { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    used_bytes(directory)
}

/// Takes `bytes` of the budget, evicting where it is used up; whether they could be had.
pub(super) fn reserve(
    directory: &Directory,
    control: &ControlFile,
    bytes: u64,
) -> Result<bool, TierError> {
    control.change(|state| {
        if !state.is_valid() {
            return Err(TierError::Damaged {
                path: directory.path().join("control"),
                reason: "it changed in an unknown way",
            });
        }
        if bytes > state.budget_bytes {
            return Ok(false);
        }
        if state.used_bytes.saturating_add(bytes) > state.budget_bytes {
            let step = (state.budget_bytes / STEP_DIVISOR).min(LARGEST_STEP_BYTES);
            make_room(directory, state, bytes.max(step))?;
        }
        let fits = state.used_bytes.saturating_add(bytes) <= state.budget_bytes;
        if fits {
            state.used_bytes += bytes;
        }
        Ok(fits)
    })?
}

/// Evicts until `bytes` fit, or nothing more can be dropped.
pub(super) fn make_room(
    directory: &Directory,
    state: &mut Control,
    bytes: u64,
) -> Result<(), TierError> {
    state.used_bytes = used_bytes(directory)?;
    let goal = state.budget_bytes.saturating_sub(bytes);
    let keys = directory.keys()?;
    if keys.is_empty() {
        return Ok(());
    }
    let hand = Key(state.hand_key);
    let start = keys.partition_point(|key| *key < hand) % keys.len();
    let mut first_block = if keys[start] == hand { state.hand_block } else { 0 };
    for turn in 0..ROUNDS * keys.len() + 1 {
        if state.used_bytes <= goal {
            break;
        }
        let key = keys[(start + turn) % keys.len()];
        let object = match ObjectFile::existing(directory, key) {
            Ok(Some(object)) => object,
            Ok(None) | Err(TierError::NotPrivate { .. }) => continue,
            Err(TierError::Damaged { .. }) => {
                directory.remove(key)?;
                continue;
            }
            Err(error) => return Err(error),
        };
        let swept = sweep(&object, first_block, state, goal)
            .map_err(|error| TierError::system(directory.path(), "cannot evict", error))?;
        first_block = 0;
        state.hand_key = key.0;
        state.hand_block = swept.stopped_at.unwrap_or(u64::MAX);
        if swept.is_empty && object.remove_unused(directory)? {
            state.used_bytes = used_bytes(directory)?;
        }
    }
    Ok(())
}

struct Swept {
    /// The block after the one that reached the goal.
    stopped_at: Option<u64>,
    /// Nothing is left in the whole object, as far as its states tell.
    is_empty: bool,
}

fn sweep(
    object: &ObjectFile,
    first_block: u64,
    state: &mut Control,
    goal: u64,
) -> std::io::Result<Swept> {
    let mut states = [0; STATES_AT_ONCE];
    let mut at = first_block;
    let mut is_empty = first_block == 0;
    loop {
        let count = object.states(at, &mut states)?;
        if count == 0 {
            return Ok(Swept { stopped_at: None, is_empty });
        }
        for (block, block_state) in (at..).zip(&states[..count]) {
            match *block_state {
                HOT => {
                    object.cool(block)?;
                    is_empty = false;
                }
                COLD => {
                    let evicted_bytes = object.evict(block)?;
                    state.used_bytes = state.used_bytes.saturating_sub(evicted_bytes);
                    is_empty &= evicted_bytes > 0;
                }
                // Empty, or no state at all: a crash may leave anything.
                _ => {}
            }
            if state.used_bytes <= goal {
                return Ok(Swept { stopped_at: Some(block + 1), is_empty: false });
            }
        }
        at += count as u64;
    }
}
