//! Errors of objects.

use aquifer_pool::PoolError;
use aquifer_vm::VmError;

use crate::access::Access;
use crate::name::ObjectName;

/// An error of an operation on objects. Unless stated otherwise, the object is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// The pool failed, or does not support the operation.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// No object has this name.
    #[error("there is no object {name}; `aquifer object list` shows those there are")]
    NotFound {
        /// The name.
        name: ObjectName,
    },
    /// The object was destroyed, or repeatedly replaced by another one of this name, while it was
    /// being attached.
    #[error("the object {name} was destroyed while it was being looked for; create it anew")]
    Destroyed {
        /// The name.
        name: ObjectName,
    },
    /// An object with this name already exists.
    #[error("there is an object {name} already; choose another name, or destroy that one")]
    Exists {
        /// The name.
        name: ObjectName,
    },
    /// The key is wrong, or a required key is missing.
    #[error("{} to the object {name} asks for its key, and {}", access.noun(), given_text(*.given))]
    WrongKey {
        /// The name.
        name: ObjectName,
        /// The requested access.
        access: Access,
        /// Whether a key was given.
        given: bool,
    },
    /// The read key was given where the write key is required.
    #[error(
        "the key given opens the object {name} for reading only; use its key for writing, or attach it for reading"
    )]
    ReadKeyForWriting {
        /// The name.
        name: ObjectName,
    },
    /// A conflicting attachment exists elsewhere.
    #[error(
        "the object {name} is attached {} and cannot be used for {} here; it can when that process has \
         detached it, or has ended",
        holder_text(*.holder),
        access.noun()
    )]
    Attached {
        /// The name.
        name: ObjectName,
        /// The process that has it attached, if known, as numbered in its own PID namespace.
        holder: Option<u32>,
        /// The requested access.
        access: Access,
    },
    /// The object is already attached through this handle of the pool.
    #[error(
        "the object {name} is attached in this process already; use that attachment, or detach it first"
    )]
    AttachedHere {
        /// The name.
        name: ObjectName,
    },
    /// No object is attached at the address.
    #[error(
        "no object is attached at {address:#x} by its address: nothing was detached or committed; an `Attachment` \
         is detached by dropping it"
    )]
    NotAttached {
        /// The address.
        address: u64,
    },
    /// The object's addresses are in use in this process.
    #[error(
        "the object {name} belongs to the {len_bytes} bytes at {address:#x}, where {by} lies in this process; \
         unmap that, attach from another process, or, if the object may move, relocate it"
    )]
    AddressTaken {
        /// The object.
        name: ObjectName,
        /// The address it must be attached at.
        address: u64,
        /// Its length.
        len_bytes: u64,
        /// The mapping that occupies the address.
        by: String,
    },
    /// The requested addresses belong to another object.
    #[error(
        "{len_bytes} bytes at {address:#x} overlap the object {by}; choose another address, or none"
    )]
    AddressOfAnother {
        /// First byte.
        address: u64,
        /// Length.
        len_bytes: u64,
        /// The other object.
        by: ObjectName,
    },
    /// An object that is not relocatable has no room to grow.
    #[error(
        "the object {name} cannot grow to {size_bytes} bytes at its address, because {} lies behind it, and it \
         was not created as relocatable: pointers into it would break; copy its content into a new object",
        behind_text(by.as_ref())
    )]
    MustMove {
        /// The object.
        name: ObjectName,
        /// The requested size.
        size_bytes: u64,
        /// The object in the way; `None` if the range of object addresses ends there.
        by: Option<ObjectName>,
    },
    /// An object that is not relocatable cannot be moved.
    #[error(
        "the object {name} was not created as relocatable: pointers into it would break; copy its content into a new \
         object"
    )]
    NotRelocatable {
        /// The object.
        name: ObjectName,
    },
    /// A range does not lie in the object, or ends before it starts.
    #[error(
        "the bytes {start}..{end} are not a range of the object {name}, which has {len_bytes} bytes: nothing was \
         committed; ranges count bytes from the object's start"
    )]
    OutsideObject {
        /// The object.
        name: ObjectName,
        /// The range's first byte, from the object's start.
        start: u64,
        /// The byte behind its last one.
        end: u64,
        /// The object's length in bytes.
        len_bytes: u64,
    },
    /// An object that holds a heap cannot be made smaller.
    #[error(
        "the object {name} holds a heap, whose allocations may lie anywhere: it cannot be made smaller; copy its \
         content into a new object"
    )]
    HeapCannotShrink {
        /// The object.
        name: ObjectName,
    },
    /// The object holds a heap: its bytes cannot be stored to directly, nor committed in part.
    #[error(
        "the object {name} holds a heap; store to it through `Attachment::heap`, and commit all of it with `psync`"
    )]
    HoldsHeap {
        /// The object.
        name: ObjectName,
    },
    /// The object holds plain bytes, not a heap.
    #[error(
        "the object {name} holds plain bytes, no heap; create objects for heaps with `CreateObject::heap`"
    )]
    NoHeap {
        /// The object.
        name: ObjectName,
    },
    /// The heap in an object cannot be used.
    #[error("the object {name}: {source}")]
    Heap {
        /// The object.
        name: ObjectName,
        /// The cause.
        #[source]
        source: crate::heap::HeapError,
    },
    /// A large commit needs space in the pool, and none is free.
    #[error(
        "psync of {len_bytes} bytes does not fit into the log, and the pool has no room to put them aside ({source}); \
         nothing is forgotten: destroy something or grow the pool, and call psync again"
    )]
    NoRoomForShadow {
        /// Bytes to be committed.
        len_bytes: u64,
        /// The pool's error.
        #[source]
        source: PoolError,
    },
    /// Pages of a failed psync were never made durable.
    #[error(
        "an earlier psync of {name} failed, and its pages are not durable; call psync again before detaching"
    )]
    Unsynced {
        /// The object.
        name: ObjectName,
    },
    /// Attachments of several pools cannot be committed together.
    #[error("psync_many is atomic within one pool; these objects are in several: psync each")]
    SeveralPools,
    /// The attachment is for reading.
    #[error("the object {name} is attached for reading; attach it for writing")]
    AttachedForReading {
        /// The object.
        name: ObjectName,
    },
    /// A parameter is invalid.
    #[error("{what} cannot be {value}: {reason}")]
    Parameter {
        /// Which one.
        what: &'static str,
        /// Its value.
        value: String,
        /// Why it is invalid, and what is valid.
        reason: &'static str,
    },
    /// The object's addresses cannot be mapped, or stores to them cannot be tracked.
    #[error("the object {name}: {source}")]
    Memory {
        /// The object.
        name: ObjectName,
        /// The cause.
        #[source]
        source: VmError,
    },
    /// The kernel returned no random numbers.
    #[error("no random numbers for keys or addresses: {0}")]
    Random(#[source] std::io::Error),
    /// The calling process is a fork of the one that attached the object.
    #[error(
        "this process is a fork of the one that attached the object; open the pool and attach it here"
    )]
    Forked,
}

fn given_text(given: bool) -> &'static str {
    if given { "the one given is another" } else { "none was given" }
}

fn holder_text(holder: Option<u32>) -> String {
    match holder {
        Some(pid) => format!("by process {pid}"),
        None => "elsewhere".to_owned(),
    }
}

fn behind_text(by: Option<&ObjectName>) -> String {
    by.map_or_else(|| "the end of the addresses for objects".to_owned(), ToString::to_string)
}

/// Converts a name for a message.
pub(crate) fn text(name: &[u8]) -> ObjectName {
    ObjectName::from(name)
}

/// The result of an operation on objects.
pub type Result<T> = std::result::Result<T, ObjectError>;
