//! Persistent objects: data structures that survive, with one call.

mod access;
mod attach;
mod attached_heap;
mod attachment;
pub mod collections;
mod committer;
mod create;
mod error;
mod flight;
pub mod heap;
mod keys;
mod memory;
mod objects;
pub mod persist;
pub mod pointer;
mod psync;
mod raw;
mod resize;
mod shadow;
mod states;
mod writing;

pub use access::Access;
pub use attach::AttachOptions;
pub use attached_heap::{AttachedHeap, ScopePsync};
pub use attachment::{Attachment, PsyncStatistics};
pub use committer::PendingPsync;
pub use create::CreateObject;
pub use error::{ObjectError, Result};
pub use keys::Keys;
pub use objects::{ObjectInfo, Objects};
pub use resize::Resized;
pub use states::ObjectState;
