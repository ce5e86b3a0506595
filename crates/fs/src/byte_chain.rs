//! Byte strings of an inode in a chain of slots: extended attributes, the target of a long symbolic
//! link.
//!
//! Chains are short ([`MAX_CHAIN_BYTES`]), so they are read and replaced whole. Slots that stay the
//! same are not written again: an append changes the last slot only. A chain belongs to an inode,
//! its owner, and is named by its first slot; 0 names the empty chain, which has no slots.

use aquifer_pool::format::byte_chain::{ByteChain, CHAIN_BYTES, MAX_CHAIN_BYTES};
use aquifer_pool::{ChangeSlots, ReadSlots};

use crate::error::{FsError, Result};

fn damaged(owner: u64, reason: impl ToString) -> FsError {
    FsError::Damaged {
        structure: format!("a chain of bytes of inode {owner}"),
        reason: reason.to_string(),
    }
}

/// The slots of a chain; ends at the first error. A chain with a cycle soon exceeds the length
/// limit.
struct Chain<'a, S> {
    slots: &'a S,
    owner: u64,
    next: u64,
    len_bytes: usize,
}

impl<S: ReadSlots> Chain<'_, S> {
    fn read(&mut self, number: u64) -> Result<ByteChain> {
        let chain = ByteChain::decode(&self.slots.slot(number)?, number)
            .map_err(|error| damaged(self.owner, format!("slot {number}: {error}")))?;
        if chain.owner != self.owner {
            let reason = format!("slot {number} belongs to inode {}", chain.owner);
            return Err(damaged(self.owner, reason));
        }
        self.len_bytes += chain.bytes.len();
        if self.len_bytes <= MAX_CHAIN_BYTES {
            Ok(chain)
        } else {
            Err(damaged(self.owner, format!("it has more than {MAX_CHAIN_BYTES} bytes")))
        }
    }
}

impl<S: ReadSlots> Iterator for Chain<'_, S> {
    type Item = Result<ByteChain>;

    fn next(&mut self) -> Option<Result<ByteChain>> {
        let number = std::mem::take(&mut self.next);
        if number == 0 {
            return None;
        }
        let chain = self.read(number);
        if let Ok(chain) = &chain {
            self.next = chain.next;
        }
        Some(chain)
    }
}

fn chain<S: ReadSlots>(slots: &S, owner: u64, first: u64) -> Chain<'_, S> {
    Chain { slots, owner, next: first, len_bytes: 0 }
}

/// Reads all bytes of the chain that starts in slot `first`.
///
/// # Errors
/// [`FsError::Damaged`]; those of `slots`.
pub fn read(slots: &impl ReadSlots, owner: u64, first: u64) -> Result<Vec<u8>> {
    check(slots, owner, first, |_| ())
}

/// Replaces all bytes of a chain. Returns its first slot, which may change.
///
/// # Errors
/// [`FsError::Damaged`] if the chain is damaged; those of `slots`: after these the transaction must
/// not be committed.
///
/// # Panics
/// If there are more than [`MAX_CHAIN_BYTES`] bytes.
pub fn replace(slots: &mut impl ChangeSlots, owner: u64, first: u64, bytes: &[u8]) -> Result<u64> {
    assert!(bytes.len() <= MAX_CHAIN_BYTES, "{} bytes are too many for a chain", bytes.len());
    let stored: Vec<ByteChain> = chain(slots, owner, first).collect::<Result<_>>()?;
    let mut next = 0;
    // Back to front, because each slot links to the next one.
    for (index, part) in bytes.chunks(CHAIN_BYTES).enumerate().rev() {
        let before = stored.get(index);
        let number = match before {
            Some(before) => before.number,
            None => slots.take_slot()?,
        };
        let after = ByteChain { number, owner, next, bytes: part.to_vec() };
        if before != Some(&after) {
            let encoded = after.encode().map_err(|error| damaged(owner, error))?;
            slots.put(number, encoded);
        }
        next = number;
    }
    for chain in stored.iter().skip(bytes.len().div_ceil(CHAIN_BYTES)) {
        slots.give_back(chain.number)?;
    }
    Ok(next)
}

/// Gives back at most `most_slots` slots of a chain, from its first on. Returns the first that is
/// left.
///
/// # Errors
/// As [`replace`].
pub fn give_back(
    slots: &mut impl ChangeSlots,
    owner: u64,
    first: u64,
    most_slots: usize,
) -> Result<u64> {
    let mut next = first;
    for _ in 0..most_slots {
        if next == 0 {
            break;
        }
        // A cycle leads back to a slot that is free by then.
        let part = chain(&*slots, owner, 0).read(next)?;
        slots.give_back(part.number)?;
        next = part.next;
    }
    Ok(next)
}

/// Reads a chain, whatever it holds: calls `on_slot` for each slot of it, then returns its bytes or
/// the first error. If the chain has a cycle, slots are reported several times.
///
/// # Errors
/// [`FsError::Damaged`]: the first inconsistency. Nothing after it was read.
pub fn check(
    slots: &impl ReadSlots,
    owner: u64,
    first: u64,
    mut on_slot: impl FnMut(u64),
) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for chain in chain(slots, owner, first) {
        let chain = chain?;
        on_slot(chain.number);
        bytes.extend_from_slice(&chain.bytes);
    }
    Ok(bytes)
}
