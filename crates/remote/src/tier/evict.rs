//! Eviction: CLOCK over the blocks of all objects, under the lock of the control file.
//!
//! The hand goes through the objects by key, and through the blocks of each. A block that was used since the hand
//! passed loses its mark, one that was not is dropped, unless a part of it is leased. A file that has nothing left and no
//! opener is removed.

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

/// Repairs what a crash left: for an opener that is alone. Files that cannot be used are left as they are.
pub(super) fn repair(directory: &Directory) -> Result<(), TierError> {
    for key in directory.keys()? {
        if let Ok(Some(object)) = ObjectFile::existing(directory, key) {
            // Without its states, a block stays until its file is removed.
            let _ = object.repair_states();
        }
    }
    Ok(())
}

/// Takes `bytes` of the budget, evicting where it is used up; whether they could be had.
pub(super) fn reserve(
    directory: &Directory,
    control: &ControlFile,
    bytes: u64,
) -> Result<bool, TierError> {
    control.change(|state| {
        if bytes > state.budget_bytes {
            return Ok(false);
        }
        let budget_bytes = state.budget_bytes;
        if state.used_bytes.saturating_add(bytes) > budget_bytes {
            let room = bytes.max(step(budget_bytes));
            shrink(directory, state, |_| budget_bytes.saturating_sub(room))?;
        }
        let fits = state.used_bytes.saturating_add(bytes) <= budget_bytes;
        if fits {
            state.used_bytes += bytes;
        }
        Ok(fits)
    })?
}

/// Notes bytes that writing has taken beyond what was reserved: headers, states, proofs.
pub(super) fn note(control: &ControlFile, bytes: u64) -> Result<(), TierError> {
    control.change(|state| state.used_bytes = state.used_bytes.saturating_add(bytes))
}

/// Makes room on a disk that is full before the budget is used up.
pub(super) fn give_way(
    directory: &Directory,
    control: &ControlFile,
    bytes: u64,
) -> Result<(), TierError> {
    control.change(|state| {
        let room = |used_bytes| bytes.max(step(used_bytes));
        shrink(directory, state, |used_bytes| used_bytes.saturating_sub(room(used_bytes)))
    })?
}

fn step(bytes: u64) -> u64 {
    (bytes / STEP_DIVISOR).min(LARGEST_STEP_BYTES)
}

/// Counts what is used, and evicts until that is at most what `goal` makes of it, or nothing more can be dropped.
pub(super) fn shrink(
    directory: &Directory,
    state: &mut Control,
    goal: impl FnOnce(u64) -> u64,
) -> Result<(), TierError> {
    state.used_bytes = directory.used_bytes()?;
    let goal = goal(state.used_bytes);
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
            Err(TierError::Damaged { .. }) => {
                let freed_bytes = ObjectFile::remove_damaged(directory, key)?;
                state.used_bytes = state.used_bytes.saturating_sub(freed_bytes);
                continue;
            }
            // What cannot be used cannot be evicted, and is no reason to keep the rest.
            Ok(None) | Err(_) => continue,
        };
        let swept = sweep(&object, first_block, state, goal);
        first_block = 0;
        let swept = match swept {
            Ok(swept) => swept,
            Err(error) => {
                // It goes as a whole, if it is not in use: holes may be impossible there.
                let freed_bytes = object.remove_unused()?;
                if freed_bytes == 0 {
                    return Err(TierError::system(directory.path(), "cannot evict", error));
                }
                state.used_bytes = state.used_bytes.saturating_sub(freed_bytes);
                continue;
            }
        };
        state.hand_key = key.0;
        state.hand_block = swept.stopped_at.unwrap_or(u64::MAX);
        if swept.is_empty {
            let freed_bytes = object.remove_unused()?;
            state.used_bytes = state.used_bytes.saturating_sub(freed_bytes);
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
        let blocks = object.states(at, &mut states)?;
        if blocks.is_empty() {
            return Ok(Swept { stopped_at: None, is_empty });
        }
        at = blocks.end;
        for (block, block_state) in blocks.zip(&states) {
            match *block_state {
                HOT => {
                    object.cool(block)?;
                    is_empty = false;
                }
                COLD => match object.evict(block)? {
                    Some(freed_bytes) => {
                        state.used_bytes = state.used_bytes.saturating_sub(freed_bytes);
                    }
                    None => is_empty = false,
                },
                // Empty, or no state at all: a crash may leave anything.
                _ => {}
            }
            if state.used_bytes <= goal {
                return Ok(Swept { stopped_at: Some(block + 1), is_empty: false });
            }
        }
    }
}
