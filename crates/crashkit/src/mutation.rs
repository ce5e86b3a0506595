//! Mutations: what the same run would have left on media that violate their contract.
//!
//! A passing crash test means something only if the test can fail. A mutation changes a
//! *recording*, not the media: the code under test has run undisturbed, and its crash states are
//! then enumerated as if an operation had been lost or delayed. One run serves for every mutation,
//! and the code's behaviour cannot depend on it. The test must reject some state. If it rejects
//! none, the operation was not necessary, or the test is blind.
//!
//! ```
//! use aquifer_crashkit::unguarded::UnguardedMedia;
//! use aquifer_pool::media::{ByteRange, Media, PersistenceDomain};
//! use aquifer_crashkit::{CrashMedia, Mutation};
//!
//! let media = CrashMedia::new(4096, PersistenceDomain::PageCache)?;
//! media.write_unguarded(0, &[1; 512]).unwrap();
//! media.write_back(&[ByteRange { offset_bytes: 0, len_bytes: 512 }]).unwrap();
//! media.flush().unwrap();
//! media.acknowledge(1);
//!
//! let recording = media.recording();
//! let lost = |recording: &aquifer_crashkit::Recording| {
//!     recording.crash_states(1, 100).any(|state| {
//!         state.marks.is_acknowledged(1) && state.image[0] == 0
//!     })
//! };
//! assert!(!lost(&recording));
//! assert!(lost(&recording.mutated(&Mutation::DropFlushes)));
//! # Ok::<(), std::io::Error>(())
//! ```

use std::fmt;

use aquifer_pool::media::MediaOperation;

use crate::recording::{Event, Recording};

/// A violation of the media's contract. Operations are identified by their number in
/// [`Recording::operations`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// `flush` does nothing.
    DropFlushes,
    /// `write_back` does nothing.
    DropWriteBacks,
    /// `write_durable` is a `write_at`.
    DurableIsPlain,
    /// This one `write_durable` is a `write_at`.
    PlainWrite(usize),
    /// This operation does not happen.
    Lose(usize),
    /// This write is swapped with the next one: the next one happens when this one did, and this
    /// one when the next had completed.
    SwapWithNext(usize),
}

impl fmt::Display for Mutation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mutation::DropFlushes => formatter.write_str("every flush lost"),
            Mutation::DropWriteBacks => formatter.write_str("every write_back lost"),
            Mutation::DurableIsPlain => formatter.write_str("every write_durable not durable"),
            Mutation::PlainWrite(op) => write!(formatter, "op {op} not durable"),
            Mutation::Lose(op) => write!(formatter, "op {op} lost"),
            Mutation::SwapWithNext(op) => write!(formatter, "op {op} behind the next write"),
        }
    }
}

impl Mutation {
    /// Returns every mutation that changes this recording: the general ones, and those applicable
    /// to each operation.
    pub fn all(recording: &Recording) -> Vec<Mutation> {
        let has = |kind| recording.operations_of(kind).next().is_some();
        let mut all = vec![];
        if has(MediaOperation::Flush) {
            all.push(Mutation::DropFlushes);
        }
        if has(MediaOperation::WriteBack) {
            all.push(Mutation::DropWriteBacks);
        }
        if has(MediaOperation::WriteDurable) {
            all.push(Mutation::DurableIsPlain);
        }
        for (op, operation) in recording.operations.iter().enumerate() {
            if operation.kind != MediaOperation::Resize {
                all.push(Mutation::Lose(op));
            }
            if operation.kind == MediaOperation::WriteDurable {
                all.push(Mutation::PlainWrite(op));
            }
            if operation.is_write() && recording.next_write(op).is_some() {
                all.push(Mutation::SwapWithNext(op));
            }
        }
        all
    }
}

impl Recording {
    /// Returns what would have been recorded on the misbehaving media. Operation numbers stay the
    /// same.
    pub fn mutated(&self, mutation: &Mutation) -> Recording {
        let is = |op: usize, kind| self.operations.get(op).is_some_and(|found| found.kind == kind);
        let mut mutated = self.clone();
        let events = &mut mutated.events;
        match *mutation {
            Mutation::DropFlushes => retain_ops(events, |op| !is(op, MediaOperation::Flush)),
            Mutation::DropWriteBacks => retain_ops(events, |op| !is(op, MediaOperation::WriteBack)),
            Mutation::DurableIsPlain => events.retain(|event| {
                !matches!(*event, Event::Persisted { op } if is(op, MediaOperation::WriteDurable))
            }),
            Mutation::PlainWrite(plain) => {
                events.retain(|event| !matches!(*event, Event::Persisted { op } if op == plain));
            }
            Mutation::Lose(lost) => retain_ops(events, |op| op != lost),
            Mutation::SwapWithNext(first) => {
                if let Some(second) = self.next_write(first) {
                    swap(events, first, second);
                }
            }
        }
        mutated
    }

    /// Returns the next write after this one, in order of beginning.
    fn next_write(&self, op: usize) -> Option<usize> {
        (op + 1..self.operations.len()).find(|&next| self.operations[next].is_write())
    }
}

fn retain_ops(events: &mut Vec<Event>, keep: impl Fn(usize) -> bool) {
    events.retain(|event| event.op().is_none_or(&keep));
}

/// Moves all events of `second` to the first of `first`, and those of `first` after the last of
/// `second`.
fn swap(events: &mut Vec<Event>, first: usize, second: usize) {
    let mut swapped = Vec::with_capacity(events.len());
    let of = |op: usize| events.iter().filter(move |event| event.op() == Some(op)).cloned();
    let is_of = |op: usize| move |event: &Event| event.op() == Some(op);
    let (Some(start), Some(end)) =
        (events.iter().position(is_of(first)), events.iter().rposition(is_of(second)))
    else {
        return;
    };
    for (index, event) in events.iter().enumerate() {
        if index == start {
            swapped.extend(of(second));
        }
        if event.op() != Some(first) && event.op() != Some(second) {
            swapped.push(event.clone());
        }
        if index == end {
            swapped.extend(of(first));
        }
    }
    *events = swapped;
}
