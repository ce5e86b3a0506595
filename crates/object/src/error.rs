//! What can go wrong with objects.

use aquifer_pool::PoolError;
use aquifer_vm::VmError;

use crate::access::Access;
use crate::name::ObjectName;

/// What can go wrong with objects. None of these changes an object, except where it is said.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// The pool failed, or cannot do it.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// There is no object of this name.
    #[error("there is no object {name}; `aquifer object list` shows those there are")]
    NotFound {
        /// The name.
        name: ObjectName,
    },
    /// The object was destroyed, or replaced by another one of this name again and again, while it was being attached.
    #[error("the object {name} was destroyed while it was being looked for; create it anew")]
    Destroyed {
        /// The name.
        name: ObjectName,
    },
    /// There is an object of this name.
    #[error("there is an object {name} already; choose another name, or destroy that one")]
    Exists {
        /// The name.
        name: ObjectName,
    },
    /// The key does not fit, or there is none where one is asked for.
    #[error("{} to the object {name} asks for its key, and {}", access.noun(), given_text(*.given))]
    WrongKey {
        /// The name.
        name: ObjectName,
        /// What was asked for.
        access: Access,
        /// Whether a key was given.
        given: bool,
    },
    /// The key for reading was used where the one for writing is asked for.
    #[error(
        "the key given opens the object {name} for reading only; use its key for writing, or attach it for reading"
    )]
    ReadKeyForWriting {
        /// The name.
        name: ObjectName,
    },
    /// The object is attached elsewhere, in a way that stands against it.
    #[error(
        "the object {name} is attached {} and cannot be used for {} here; it can when that process has \
         detached it, or has ended",
        holder_text(*.holder),
        access.noun()
    )]
    Attached {
        /// The name.
        name: ObjectName,
        /// The process that has it, if it is known, as its own namespace numbers it.
        holder: Option<u32>,
        /// What was asked for.
        access: Access,
    },
    /// The object is attached through this handle of the pool already.
    #[error(
        "the object {name} is attached in this process already; use that attachment, or detach it first"
    )]
    AttachedHere {
        /// The name.
        name: ObjectName,
    },
    /// Nothing is attached at an address.
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
        /// Where it belongs.
        address: u64,
        /// Its length.
        len_bytes: u64,
        /// What lies there.
        by: String,
    },
    /// The addresses asked for belong to another object.
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
    /// An object that must stay where it is has no room to grow.
    #[error(
        "the object {name} cannot grow to {size_bytes} bytes at its address, because {} lies behind it, and it \
         was not created as relocatable: pointers into it would break; copy its content into a new object",
        behind_text(by.as_ref())
    )]
    MustMove {
        /// The object.
        name: ObjectName,
        /// The size asked for.
        size_bytes: u64,
        /// The object that is in the way; `None` if the addresses for objects end there.
        by: Option<ObjectName>,
    },
    /// An object that must stay where it is was to be moved.
    #[error(
        "the object {name} was not created as relocatable: pointers into it would break; copy its content into a new \
         object"
    )]
    NotRelocatable {
        /// The object.
        name: ObjectName,
    },
    /// An object that holds a heap was to be made smaller.
    #[error(
        "the object {name} holds a heap, whose allocations may lie anywhere: it cannot be made smaller; copy its \
         content into a new object"
    )]
    HeapCannotShrink {
        /// The object.
        name: ObjectName,
    },
    /// The object holds a heap, and its bytes cannot be stored to past it.
    #[error("the object {name} holds a heap; store to it through `Attachment::heap`")]
    HoldsHeap {
        /// The object.
        name: ObjectName,
    },
    /// The object holds plain bytes.
    #[error(
        "the object {name} holds plain bytes, no heap; create objects for heaps with `heap: true`"
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
        /// Why.
        #[source]
        source: crate::heap::HeapError,
    },
    /// A large commit needs space in the pool, and there is none.
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
    /// A parameter makes no sense.
    #[error("{what} cannot be {value}: {reason}")]
    Parameter {
        /// Which one.
        what: &'static str,
        /// Its value.
        value: String,
        /// Why not, and what can be.
        reason: &'static str,
    },
    /// The object's addresses cannot be mapped, or stores to them cannot be found.
    #[error("the object {name}: {source}")]
    Memory {
        /// The object.
        name: ObjectName,
        /// Why.
        #[source]
        source: VmError,
    },
    /// The kernel gave no random numbers.
    #[error("no random numbers for keys or addresses: {0}")]
    Random(#[source] std::io::Error),
    /// The calling process is a fork of the one that attached.
    #[error(
        "this process is a fork of the one that attached the object; open the pool and attach it here"
    )]
    Forked,
}

fn given_text(given: bool) -> &'static str {
    match given {
        true => "the one given is another",
        false => "none was given",
    }
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

/// A name for a message.
pub(crate) fn text(name: &[u8]) -> ObjectName {
    ObjectName::from(name)
}

/// The result of an operation on objects.
pub type Result<T> = std::result::Result<T, ObjectError>;
