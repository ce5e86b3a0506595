//! Marks: what the code under test had promised before the crash.
//!
//! An image alone cannot be judged: a missing transaction is correct before it was acknowledged and
//! a bug after. So the recording contains marks between its operations, and every crash state
//! carries the sum of the marks before it. A recovery's recording continues from there: what was
//! acknowledged before the first crash stays acknowledged in the second.
//!
//! | mark | set when | a state after it |
//! |---|---|---|
//! | [`Mark::Begun`] | before the first operation of transaction *id* | may contain *id* or not: old or new |
//! | [`Mark::Acknowledged`] | its caller was told that it is durable | contains *id* |
//! | [`Mark::Withdrawn`] | a recovery showed its caller a state without *id* | never contains *id* |
//! | [`Mark::Note`] | anything | the checker decides |
//!
//! Only `Begun` permits more than before; the others demand more. The enumeration relies on it: a
//! state that passed before a `Begun` is not checked again after it, but is checked again after any
//! other mark.

use std::collections::BTreeSet;
use std::fmt;

/// A statement by the code under test between two operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mark {
    /// From here on the effects of this transaction may be present.
    Begun(u64),
    /// From here on they must be present.
    Acknowledged(u64),
    /// From here on they must be absent: a recovery has decided so, and its caller has seen the
    /// result.
    Withdrawn(u64),
    /// The checker defines the meaning.
    Note(u64),
}

impl Mark {
    /// Returns the mark as a number, for hashing.
    pub(super) fn to_bytes(self) -> [u8; 9] {
        let (kind, id) = match self {
            Mark::Begun(id) => (0, id),
            Mark::Acknowledged(id) => (1, id),
            Mark::Withdrawn(id) => (2, id),
            Mark::Note(id) => (3, id),
        };
        let mut bytes = [kind; 9];
        bytes[1..].copy_from_slice(&id.to_le_bytes());
        bytes
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mark::Begun(id) => write!(formatter, "begun({id})"),
            Mark::Acknowledged(id) => write!(formatter, "acknowledged({id})"),
            Mark::Withdrawn(id) => write!(formatter, "withdrawn({id})"),
            Mark::Note(id) => write!(formatter, "note({id})"),
        }
    }
}

/// The sum of the marks before a crash.
///
/// ```
/// use aquifer_crashkit::{Mark, Marks};
///
/// let mut marks = Marks::default();
/// for mark in [Mark::Begun(1), Mark::Acknowledged(1), Mark::Begun(2)] {
///     marks.add(mark);
/// }
/// assert_eq!(marks.last_acknowledged(), Some(1));
/// assert!(marks.is_in_flight(2));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marks {
    acknowledged: BTreeSet<u64>,
    in_flight: BTreeSet<u64>,
    withdrawn: BTreeSet<u64>,
    notes: Vec<u64>,
}

impl Marks {
    /// Adds a mark; returns whether it changed anything.
    pub fn add(&mut self, mark: Mark) -> bool {
        match mark {
            Mark::Begun(id) => self.in_flight.insert(id),
            Mark::Acknowledged(id) => {
                self.in_flight.remove(&id);
                self.acknowledged.insert(id)
            }
            Mark::Withdrawn(id) => {
                self.in_flight.remove(&id);
                self.withdrawn.insert(id)
            }
            Mark::Note(id) => {
                self.notes.push(id);
                true
            }
        }
    }

    /// Returns the transactions that must be present.
    pub fn acknowledged(&self) -> &BTreeSet<u64> {
        &self.acknowledged
    }

    /// Returns the largest ID among them.
    pub fn last_acknowledged(&self) -> Option<u64> {
        self.acknowledged.last().copied()
    }

    /// Returns whether this transaction must be present.
    pub fn is_acknowledged(&self, id: u64) -> bool {
        self.acknowledged.contains(&id)
    }

    /// Returns the transactions that may be present or not: begun, with no later mark.
    pub fn in_flight(&self) -> &BTreeSet<u64> {
        &self.in_flight
    }

    /// Returns whether this transaction may be present or not.
    pub fn is_in_flight(&self, id: u64) -> bool {
        self.in_flight.contains(&id)
    }

    /// Returns the transactions that a recovery found missing: they must not reappear.
    pub fn withdrawn(&self) -> &BTreeSet<u64> {
        &self.withdrawn
    }

    /// Returns the notes, in order.
    pub fn notes(&self) -> &[u64] {
        &self.notes
    }
}
