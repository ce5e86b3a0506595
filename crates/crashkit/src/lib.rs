//! Media that enumerate what a crash may leave behind: run code on [`CrashMedia`], take its
//! [`Recording`], and check every state that a power failure at any moment could have left.
//!
//! # The fault model
//! *Power fails once, between two events of the recording or in the middle of an operation; the
//! media stop, and their content afterwards is a mixture.* The media consist of units: sectors of
//! 512 bytes behind a page cache, words of 8 bytes on persistent memory. A unit is never torn.
//! Every write creates a new version of each unit that it touches; a version is the whole unit as
//! readers saw it then. After a crash each unit holds, independently of all others, some version
//! from its durable one on. Nothing else happens in a crash, and that covers the real behaviour:
//! the page cache and the processor's cache write back any lines at any time, in any order, any
//! part of a write before any other; a disk's own cache persists any part until it is flushed.
//!
//! The operations determine what is durable, and each is modelled with its weakest guarantee:
//!
//! | operation | while it runs | after it |
//! |---|---|---|
//! | `write_at` | any subset of its units, in any mixture with what was written before | the same: nothing is guaranteed |
//! | `write_durable` | the same | *its* units, in this version or a later one; nothing about any other, not even earlier ones in the same page, cache line or handed-over range: with FUA a disk persists only this write |
//! | `write_back` | nothing new | nothing yet: the versions that existed when it *began* are handed over |
//! | `flush` | nothing new | what was handed over by calls that had *returned* before it began is durable; without a hand-over it does nothing |
//! | `grow` | the old length, the new one, or one between | the new length, zeros |
//!
//! Two choices are deliberately stricter than the hardware. A handed-over range is taken exactly,
//! in units: `clwb` writes the whole line of 64 bytes and `sync_file_range` whole pages, but the
//! contract is about ranges, and code must not rely on their neighbours. And the fence in a
//! `write_durable` on persistent memory has no effect on lines flushed before it, although on x86
//! it would. The crash states are a superset of the real ones.
//!
//! On `Volatile` media a crash is the death of a process: completed writes stay; of an interrupted
//! write any subset stays.
//!
//! Errors: a failed write has left none, some, or all of its bytes, which are open like those of
//! any other write. A failed `write_back` or `flush` is final: no later one, even if successful,
//! makes durable what it covered, until that is rewritten. Readers may see the old bytes again
//! ([`Fault::forgetting`]).
//!
//! # Limits of the model
//! * Units that are torn inside. The contract of [`aquifer_pool::media`] excludes them;
//!   [`CrashMedia::with_unit_bytes`] tears sectors at 8 bytes for code that wants to be stricter.
//! * Media that lie or decay: misdirected or lost writes, flipped bits. [`Mutation`] has lying
//!   media, to test tests.
//! * Stores through a shared mapping of the media's file, which are not recorded. Private mappings
//!   are fine: they read what was written through [`CrashMedia`].
//!
//! # Soundness of the enumeration
//! States are a function of the recording, a seed and a budget. Every prefix is covered; for each,
//! all states are enumerated if they are few, otherwise a selection (see `choice`). A state seen
//! before is skipped only if it was judged as strictly then, which the [`Marks`] determine.
//!
//! ```
//! use aquifer_crashkit::unguarded::UnguardedMedia;
//! use aquifer_pool::media::{ByteRange, Media, PersistenceDomain};
//! use aquifer_crashkit::CrashMedia;
//!
//! let media = CrashMedia::new(1024, PersistenceDomain::PageCache)?;
//! media.write_unguarded(0, &[1; 512]).unwrap();
//! media.write_unguarded(512, &[2; 512]).unwrap();
//!
//! // Neither sector is durable: four states.
//! let recording = media.recording();
//! let states: Vec<_> = recording.crash_states(1, 100).collect();
//! let first_bytes: Vec<_> = states.iter().map(|state| (state.image[0], state.image[512])).collect();
//! assert_eq!(first_bytes, [(0, 0), (1, 0), (0, 2), (1, 2)]);
//! assert_eq!(states[2].description, "crash after op 1 write_at(512, 512): arrived: op 1; absent: op 0");
//! # Ok::<(), std::io::Error>(())
//! ```

#![deny(unsafe_code)]

pub mod campaign;
mod choice;
mod describe;
mod explore;
mod fault;
mod mark;
mod media;
mod mutation;
mod recording;
mod settle;
mod states;
#[allow(unsafe_code)] // It exists to say once why the unsafe operations are sound in tests.
pub mod unguarded;

pub use explore::{CrashFailure, Explored, Plan, Verdict, explore};
pub use fault::{Fault, Gate, Left, Trigger};
pub use mark::{Mark, Marks};
pub use media::CrashMedia;
pub use mutation::Mutation;
pub use recording::{Operation, Recording};
pub use states::{CrashState, CrashStates, Enumerated, OwnedCrashState};
