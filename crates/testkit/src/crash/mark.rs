//! Marks: what the code under test had promised when the crash came.
//!
//! An image alone cannot be judged: that a transaction is missing is right before it was acknowledged and a
//! bug after. So the recording carries marks between its operations, and every crash state comes with
//! what they add up to at its point. A recovery's recording goes on from there: what was acknowledged
//! before the first crash stays so in the second.
//!
//! | mark | set when | a state behind it |
//! |---|---|---|
//! | [`Mark::Begun`] | before the first operation of transaction *id* | may hold *id* or not: old or new |
//! | [`Mark::Acknowledged`] | its caller was told that it is durable | holds *id* |
//! | [`Mark::Withdrawn`] | a recovery showed its caller a state without *id* | does not hold *id*, ever |
//! | [`Mark::Note`] | anything | whatever the checker makes of it |
//!
//! Only `Begun` allows more than before; the others demand more. The enumeration relies on it: a state
//! that passed before a `Begun` is not checked again behind it, one that passed before any other mark is.

use std::collections::BTreeSet;
use std::fmt;

/// Something that the code under test says between two operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mark {
    /// From here on the effects of this transaction may be found.
    Begun(u64),
    /// From here on they must be.
    Acknowledged(u64),
    /// From here on they must not: a recovery has decided, and somebody has seen it.
    Withdrawn(u64),
    /// The checker knows what it means.
    Note(u64),
}

impl Mark {
    /// The mark as a number, for hashing.
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

/// What the marks before a crash add up to.
///
/// ```
/// use aquifer_testkit::crash::{Mark, Marks};
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
    /// Takes one more mark in; whether that says anything new.
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

    /// The transactions that must be found.
    pub fn acknowledged(&self) -> &BTreeSet<u64> {
        &self.acknowledged
    }

    /// The largest id among them.
    pub fn last_acknowledged(&self) -> Option<u64> {
        self.acknowledged.last().copied()
    }

    /// Whether this one must be found.
    pub fn is_acknowledged(&self, id: u64) -> bool {
        self.acknowledged.contains(&id)
    }

    /// The transactions that may be found or not: begun, and nothing said of them since.
    pub fn in_flight(&self) -> &BTreeSet<u64> {
        &self.in_flight
    }

    /// Whether this one may be found or not.
    pub fn is_in_flight(&self, id: u64) -> bool {
        self.in_flight.contains(&id)
    }

    /// The transactions that a recovery has found to be missing: they must not come back.
    pub fn withdrawn(&self) -> &BTreeSet<u64> {
        &self.withdrawn
    }

    /// The notes, in order.
    pub fn notes(&self) -> &[u64] {
        &self.notes
    }
}
