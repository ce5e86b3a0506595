//! A recording: the initial media, and everything that was done to them, in one total order.
//!
//! # Operations and events
//! An *operation* is one call on the media. An *event* is a point in time: an operation begins or
//! ends, or a mark is set. Operations of several threads overlap, events do not: their order is the
//! order in which the media's lock was taken, and in which bytes became visible to readers. A crash
//! happens between two events.
//!
//! | operation | first event | last event |
//! |---|---|---|
//! | `write_at` | `Write`: its bytes are visible | the same |
//! | `write_durable` | `Write` | `Persisted`: they are durable |
//! | `write_back` | `HandOver`: determines the versions | `HandedOver`: the next flush covers them |
//! | `flush` | `FlushBegin`: determines the hand-overs | `Flushed`: those are durable |
//! | `grow` | `GrowBegin` | `Grown` |
//!
//! A failed operation ends with `Failed`; a `Write` before it contains the bytes that it left
//! behind. The module `settle` defines what the events mean.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use aquifer_pool::media::{ByteRange, MediaOperation, PersistenceDomain};

use crate::mark::Mark;

/// An event of a recording; `op` is an index into its operations.
#[derive(Debug, Clone)]
pub(super) enum Event {
    /// These bytes became visible.
    Write { op: usize, offset_bytes: u64, bytes: Arc<[u8]> },
    /// The bytes of this operation's `Write` are durable.
    Persisted { op: usize },
    /// A `write_back` began.
    HandOver { op: usize },
    /// A `write_back` returned.
    HandedOver { op: usize },
    /// A `flush` began.
    FlushBegin { op: usize },
    /// A `flush` returned.
    Flushed { op: usize },
    /// A `grow` began.
    GrowBegin { op: usize },
    /// A `grow` returned.
    Grown { op: usize },
    /// The operation returned an error.
    Failed { op: usize },
    /// After a failed `write_back` or `flush` the page cache dropped these bytes: readers see the
    /// durable ones.
    Forgotten { op: usize, ranges: Arc<[ByteRange]> },
    /// The code under test set a mark.
    Mark(Mark),
}

impl Event {
    /// Returns the operation that the event belongs to.
    pub(super) fn op(&self) -> Option<usize> {
        match *self {
            Event::Write { op, .. }
            | Event::Persisted { op }
            | Event::HandOver { op }
            | Event::HandedOver { op }
            | Event::FlushBegin { op }
            | Event::Flushed { op }
            | Event::GrowBegin { op }
            | Event::Grown { op }
            | Event::Failed { op }
            | Event::Forgotten { op, .. } => Some(op),
            Event::Mark(_) => None,
        }
    }
}

/// One call that changed the media or their durability.
#[derive(Debug, Clone)]
pub struct Operation {
    pub(super) kind: MediaOperation,
    pub(super) ranges: Arc<[ByteRange]>,
    pub(super) error: Option<i32>,
}

impl Operation {
    /// Returns the kind of call.
    pub fn kind(&self) -> MediaOperation {
        self.kind
    }

    /// Returns what it applied to: the range written or those handed over, the bytes added by
    /// `grow`, nothing for `flush`.
    pub fn ranges(&self) -> &[ByteRange] {
        &self.ranges
    }

    /// Returns the errno of a scripted failure.
    pub fn error(&self) -> Option<i32> {
        self.error
    }

    /// Returns whether it wrote bytes.
    pub fn is_write(&self) -> bool {
        matches!(self.kind, MediaOperation::Write | MediaOperation::WriteDurable)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len_bytes: u64 = self.ranges.iter().map(|range| range.len_bytes).sum();
        match (self.kind, &*self.ranges) {
            (MediaOperation::Write, [range]) => {
                write!(formatter, "write_at({}, {})", range.offset_bytes, range.len_bytes)?;
            }
            (MediaOperation::WriteDurable, [range]) => {
                write!(formatter, "write_durable({}, {})", range.offset_bytes, range.len_bytes)?;
            }
            (MediaOperation::WriteBack, [range]) => {
                write!(formatter, "write_back({}, {})", range.offset_bytes, range.len_bytes)?;
            }
            (MediaOperation::WriteBack, ranges) => {
                write!(formatter, "write_back({} ranges, {len_bytes} bytes)", ranges.len())?;
            }
            (MediaOperation::Resize, [range]) => write!(formatter, "grow({})", range.end_bytes())?,
            (kind, _) => write!(formatter, "{kind}()")?,
        }
        match self.error {
            Some(error) => write!(formatter, " which fails with errno {error}"),
            None => Ok(()),
        }
    }
}

/// Everything that happened to a medium from its creation until the recording was taken.
///
/// Its `Display` form lists the events with their numbers: a crash state's prefix counts them.
#[derive(Debug, Clone)]
pub struct Recording {
    pub(super) domain: PersistenceDomain,
    pub(super) unit_bytes: usize,
    pub(super) initial: Arc<[u8]>,
    pub(super) operations: Vec<Operation>,
    pub(super) events: Vec<Event>,
}

impl Recording {
    /// Returns what makes bytes durable on the media.
    pub fn domain(&self) -> PersistenceDomain {
        self.domain
    }

    /// Returns the size of the unit that a crash does not tear.
    pub fn unit_bytes(&self) -> usize {
        self.unit_bytes
    }

    /// Returns the media before the first operation. All of it is durable.
    pub fn initial(&self) -> &[u8] {
        &self.initial
    }

    /// Returns the operations, in the order in which they began.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Returns the number of events, which is also the largest prefix that a crash state can have.
    pub fn event_count(&self) -> usize {
        self.events.len()
    }

    /// Returns the numbers of the operations of this kind.
    pub fn operations_of(&self, kind: MediaOperation) -> impl Iterator<Item = usize> + '_ {
        (0..self.operations.len()).filter(move |&op| self.operations[op].kind == kind)
    }

    /// Returns the word for units.
    pub(super) fn unit_name(&self) -> &'static str {
        if self.unit_bytes == 8 { "words" } else { "sectors" }
    }

    /// Returns the maximum length that the media ever had.
    pub(super) fn max_len_bytes(&self) -> usize {
        let resized = self.operations.iter().filter(|op| op.kind == MediaOperation::Resize);
        let longest = resized.flat_map(|op| op.ranges.iter()).map(|range| range.end_bytes());
        longest.max().map_or(0, |len| len as usize).max(self.initial.len())
    }

    /// Returns these events, one per line, each with the prefix that it completes.
    pub(super) fn listing(&self, events: Range<usize>) -> String {
        let line = |index: usize| {
            format!("{:7} {}\n", index + 1, self.describe_event(&self.events[index]))
        };
        events.map(line).collect()
    }

    /// Returns a readable description of an event.
    pub(super) fn describe_event(&self, event: &Event) -> String {
        let name = |op: usize| format!("op {op} {}", self.operations[op]);
        match event {
            Event::Write { op, .. }
                if self.operations[*op].kind == MediaOperation::Write
                    && self.domain != PersistenceDomain::Volatile =>
            {
                format!("after {}", name(*op))
            }
            Event::Write { op, .. }
            | Event::HandOver { op }
            | Event::FlushBegin { op }
            | Event::GrowBegin { op } => format!("in {}", name(*op)),
            Event::Persisted { op }
            | Event::HandedOver { op }
            | Event::Flushed { op }
            | Event::Grown { op }
            | Event::Failed { op } => format!("after {}", name(*op)),
            Event::Forgotten { op, .. } => format!("after the cache was dropped by {}", name(*op)),
            Event::Mark(mark) => format!("after {mark}"),
        }
    }
}

impl fmt::Display for Recording {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len_bytes = self.initial.len();
        writeln!(formatter, "{} media of {len_bytes} bytes", self.domain)?;
        formatter.write_str(&self.listing(0..self.events.len()))
    }
}
