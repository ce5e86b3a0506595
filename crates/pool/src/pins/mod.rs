//! Pins: a reader of pages pins them, so that they are not reused while it reads.
//!
//! Setting a pin involves no other process and no wait: a thread that frees pages checks the pins
//! before it reuses the pages ([`freed`](crate::metadata::freed)). The kind of pin depends on what the handle
//! may do:
//!
//! | the pool is open | a pin is | cost of setting it |
//! |---|---|---|
//! | for writing | a word of shared memory that writers share ([`blocks`], in [`memory`]) | a store, to a word that only this handle stores to |
//! | for reading | a shared lock on a byte of the pool file ([`locks`]) | a system call, unless another pin of the handle has the same lock |
//! | for reading, without writers | a word of the process's private memory: no writer can open the pool in that time | a store |
//!
//! So readers store to nothing that a writer relies on. [`word`] describes the content of a pin and
//! why the order of loads and stores suffices. The pins of a process that dies in any way end with
//! it, and a stopped process keeps its pins.
//!
//! # Open
//! A pin of the inode itself states how a process uses it ([`InodeUse`]), and says nothing about
//! its pages. An *open* pin keeps a file that has no name any more: its inode is given back by the
//! process that removes the last open pin, or when the pool is recovered. A thread that opens a
//! file pins it *and then* checks whether it still has a name; a thread that removes the last name
//! *first* makes that visible *and then* checks for open pins. So at least one of them sees the
//! other.
//!
//! The file whose name is removed is nearly always closed, and then the transaction that removes
//! the name gives the inode back as well. In that case it first makes a *claim* visible: the
//! inode's number in a word of the segment.
//!
//! | opening thread | | thread that removes the last name, with the metadata mutex |
//! |---|---|---|
//! | stores the pin | | stores the claim |
//! | **fence** | | **fence** |
//! | loads the claim: none | | loads the pins: none, or it leaves the inode for later |
//! | checks whether it has a name | | publishes the change; then removes the claim |
//!
//! As with pins of pages, the two cannot both find none. A thread that finds the claim waits until
//! it is removed, at most as long as the mutex is held, and then checks for the name. If the holder
//! of the mutex dies, the process that repairs removes the claim.
//!
//! A process can lend words to another one, whose death they then outlive ([`Pool::lend_pins`](crate::Pool::lend_pins)).
//!
//! In a forked child pins are inert: they remain the parent's.
//!
//! Uses the log, for its mutex, and what is below it.

mod blocks;
mod locks;
mod memory;
mod places;
mod set;
mod word;

pub use self::blocks::LentPins;
pub(crate) use self::blocks::{BlockList, Blocks};
pub(crate) use self::memory::BLOCK_PINS;
pub use self::places::Pin;
pub(crate) use self::places::{PinPlaces, Pins};
pub(crate) use self::set::PinSet;
pub use self::word::InodeUse;
pub(crate) use self::word::{PinValue, PinWord};
