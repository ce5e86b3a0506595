//! Errors of a heap.

use std::fmt;

/// An error of an [`ObjectHeap`](super::ObjectHeap) or of a collection in one.
///
/// If an operation returns an error, it has changed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeapError {
    /// The memory is zero, as in a fresh object.
    #[error("no heap at {address:#x} yet: the memory is zero; format it")]
    NotFormatted {
        /// Start of the memory.
        address: u64,
    },
    /// The memory holds something other than a heap.
    #[error("what lies at {address:#x} is not a heap; if it is to become one, format it")]
    NotAHeap {
        /// Start of the memory.
        address: u64,
    },
    /// The format version is unknown to this program.
    #[error(
        "the heap has format version {found}, this program knows {known}; use the program that wrote it"
    )]
    Version {
        /// The version found.
        found: u32,
        /// The version known.
        known: u32,
    },
    /// The memory is shorter than the heap.
    #[error(
        "the heap has {recorded_bytes} bytes, but only {given_bytes} are there: the object was made \
         smaller behind its back, or attached in part"
    )]
    Length {
        /// The length recorded in the heap.
        recorded_bytes: u64,
        /// The length of the memory.
        given_bytes: u64,
    },
    /// The heap was formatted at another address, and holds pointers.
    #[error(
        "the heap was formatted at {recorded:#x} and now lies at {given:#x}: attach the object at its own \
         address, or format its heap as relocatable"
    )]
    Moved {
        /// The address it was formatted at.
        recorded: u64,
        /// The current address.
        given: u64,
    },
    /// Too few bytes for a heap, or for the requested growth.
    #[error("{given_bytes} bytes are too few: {least_bytes} are the least here")]
    TooSmall {
        /// Bytes given.
        given_bytes: u64,
        /// Bytes needed.
        least_bytes: u64,
    },
    /// The memory does not start at a page boundary.
    #[error("a heap starts at a multiple of 4096 bytes, not at {address:#x}")]
    Misaligned {
        /// Start of the memory.
        address: u64,
    },
    /// This process already has a heap open in this memory.
    #[error(
        "the heap at {address:#x} is already open in this process: use that one, or drop it first"
    )]
    AlreadyOpen {
        /// Start of the memory.
        address: u64,
    },
    /// The heap was opened for reading.
    #[error("the heap is open for reading only; attach the object for writing to change it")]
    ReadOnly,
    /// The heap belongs to the parent process.
    #[error("the heap was opened before a fork: a child has no objects; attach in the child")]
    Forked,
    /// The heap is full.
    #[error(
        "no room for {requested_bytes} bytes: {free_bytes} bytes of whole pages are free, at most \
         {largest_run_bytes} in one piece; free something or resize the object"
    )]
    Full {
        /// Bytes requested.
        requested_bytes: u64,
        /// Bytes in free pages.
        free_bytes: u64,
        /// Bytes in the longest run of free pages.
        largest_run_bytes: u64,
    },
    /// An alignment that would not survive a move.
    #[error("aligned to {align_bytes} bytes: a relocatable heap aligns to {largest_bytes} at most")]
    Alignment {
        /// The requested alignment.
        align_bytes: u64,
        /// The largest supported alignment.
        largest_bytes: u64,
    },
    /// The address is not the start of an allocation.
    #[error("{address:#x} {reason}")]
    NotAllocated {
        /// The address.
        address: u64,
        /// What the address is instead.
        reason: NotAllocated,
    },
    /// The heap's metadata is inconsistent.
    #[error("the heap is damaged at offset {offset_bytes:#x}: {damage}; restore the object")]
    Damaged {
        /// Offset from the start of the heap.
        offset_bytes: u64,
        /// The inconsistency.
        damage: Damage,
    },
    /// The heap has no root.
    #[error("the heap has no root yet")]
    NoRoot,
    /// The heap already has a root.
    #[error("the heap has a root already: {found}")]
    RootExists {
        /// Its type.
        found: RootTag,
    },
    /// The root has another type.
    #[error(
        "the root is {found}, not {expected}: the program's types and the object's do not match"
    )]
    RootType {
        /// The tag of the caller's type.
        expected: RootTag,
        /// The tag of the root.
        found: RootTag,
    },
    /// Owning collections hold plain addresses, which do not survive a move.
    #[error("a relocatable heap has no typed scope: keep `RelPtr`s and offsets in it")]
    Relocatable,
    /// The heap was grown too often in small steps.
    #[error(
        "the heap was grown {zones} times and cannot grow again; copy its content into a new object"
    )]
    TooManyZones {
        /// The number of zones.
        zones: usize,
    },
}

/// Why an address is not the start of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotAllocated {
    /// Outside the heap's memory.
    #[error("does not lie in this heap")]
    Foreign,
    /// In the heap's header or its page maps.
    #[error("is the heap's own")]
    Metadata,
    /// In memory that is free: freed twice, or never allocated.
    #[error("is not allocated (freed twice?)")]
    Free,
    /// In the middle of an allocation.
    #[error("is inside an allocation, not its start")]
    Interior,
}

/// An inconsistency in a heap's metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// The header's checksum does not match.
    #[error("the header's checksum does not match")]
    HeaderChecksum,
    /// A field of the header has an impossible value.
    #[error("the header's {0} cannot be")]
    HeaderField(&'static str),
    /// A reference points out of the heap.
    #[error("it lies outside the heap")]
    Outside,
    /// A byte of the page map has no meaning.
    #[error("{0:#04x} is no state of a page")]
    PageState(u8),
    /// A page that continues something that does not precede it, or a truncated slab.
    #[error("a page does not fit the one before it")]
    PageOrder,
    /// A slab's header does not match the page map, or has stray bits.
    #[error("the header of a slab does not fit the page map")]
    Slab,
    /// A slab is marked full and has room, or vice versa.
    #[error("the mark that says whether a slab is full does not fit it")]
    FullMark,
    /// The root is not in an allocation of its size.
    #[error("the root is not an allocation of its size")]
    Root,
    /// The object's content and the DRAM index differ: other code or another process modified the
    /// object.
    #[error("it was changed by another process or thread")]
    Changed,
}

/// Identifies the type of a root, so that it is not mistaken for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RootTag {
    /// Size of the type.
    pub size_bytes: u64,
    /// Alignment of the type.
    pub align_bytes: u64,
    /// The program's id for its meaning.
    pub type_id: u64,
    /// The layout of every reachable type ([`Shape`](crate::persist::Shape)); 0 if not recorded.
    pub shape: u64,
}

impl fmt::Display for RootTag {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RootTag { size_bytes, align_bytes, type_id, shape } = self;
        write!(
            formatter,
            "type {type_id:#x} of {size_bytes} bytes aligned to {align_bytes}, shape {shape:#018x}"
        )
    }
}
