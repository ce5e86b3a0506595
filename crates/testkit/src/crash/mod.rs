//! Media that enumerate what a crash may leave behind: run code on [`CrashMedia`], take its [`Recording`],
//! and look at every state that a power cut at any moment could have left.
//!
//! # The fault model
//! *Power fails once, between two events of the recording or in the middle of an operation; the media stop, and what is
//! found afterwards is a mixture.* The media consist of units: sectors of 512 bytes behind a page cache, words of
//! 8 bytes on persistent memory. A unit is never torn. Every write makes a new version of each unit that it
//! touches, and a version is the whole unit as readers saw it then. After a crash each unit holds, independently of
//! all others, some version from its durable one on. That is all a crash does, and it covers what really happens: the
//! page cache and the processor's cache write back whatever they like, whenever they like, in any
//! order, any part of a write before any other; a disk's own cache keeps what it likes until it is flushed.
//!
//! What is durable is decided by the operations, and each is taken at its least:
//!
//! | operation | while it runs | after it |
//! |---|---|---|
//! | `write_at` | any subset of its units, in any mixture with what was written before | the same: nothing is promised |
//! | `write_durable` | the same | *its* units, in this version or a later one; nothing about any other, not even earlier ones in the same page, cache line or handed-over range: with FUA a disk persists only this write |
//! | `write_back` | nothing new | nothing yet: the versions that were there when it *began* are handed over |
//! | `flush` | nothing new | what was handed over by calls that had *returned* before it began is durable; without a hand-over it does nothing |
//! | `grow` | the old length, the new one, or one between | the new length, zeros |
//!
//! Two choices are stricter than the hardware, on purpose. A range handed over is taken exactly, in units: `clwb`
//! writes the whole line of 64 bytes and `sync_file_range` whole pages, but the contract speaks of ranges, and code
//! that lives on their neighbours would live on luck. And the fence in a `write_durable` on persistent memory
//! does nothing for lines flushed before it, although on x86 it would. The crash states are a superset of the real ones.
//!
//! In `Volatile` media a crash is the death of a process: completed writes stay, of the one that is interrupted any
//! subset.
//!
//! Errors: a failed write has left nothing, part, or all of its bytes, and those are open like any other
//! write's. A failed `write_back` or `flush` is final: what it covered is not made durable by any later one, however
//! successful, until it is written anew. Readers may see the old bytes again ([`Fault::forgetting`]).
//!
//! # What the model leaves out
//! * Units torn inside. The contract of [`aquifer_pool::media`] excludes it; [`CrashMedia::with_unit_bytes`] tears
//!   sectors at 8 bytes for code that wants to be stricter.
//! * Media that lie or rot: misdirected or lost writes, flipped bits. [`Mutation`] has the lying ones, to test tests.
//! * Stores through a shared mapping of the media's file, which nobody sees. Private mappings are
//!   fine: they read what was written through [`CrashMedia`].
//!
//! # Soundness of the enumeration
//! States are a function of the recording, a seed and a budget. Every prefix has its turn; at each the states are all
//! of them where they are few, and else a selection (see `choice`). A state seen before is skipped only if it was
//! judged as strictly then: the [`Marks`] see to that.
//!
//! ```
//! use aquifer_testkit::unguarded::UnguardedMedia;
//! use aquifer_pool::media::{ByteRange, Media, PersistenceDomain};
//! use aquifer_testkit::crash::CrashMedia;
//!
//! let media = CrashMedia::new(1024, PersistenceDomain::PageCache)?;
//! media.write_unguarded(0, &[1; 512]).unwrap();
//! media.write_unguarded(512, &[2; 512]).unwrap();
//!
//! // Both sectors are on their way: four states, in any order but one.
//! let recording = media.recording();
//! let states: Vec<_> = recording.crash_states(1, 100).collect();
//! let first_bytes: Vec<_> = states.iter().map(|state| (state.image[0], state.image[512])).collect();
//! assert_eq!(first_bytes, [(0, 0), (1, 0), (0, 2), (1, 2)]);
//! assert_eq!(states[2].description, "crash after op 1 write_at(512, 512): arrived: op 1; absent: op 0");
//! # Ok::<(), std::io::Error>(())
//! ```

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

pub use explore::{CrashFailure, Explored, Plan, Verdict, explore};
pub use fault::{Fault, Gate, Left, Trigger};
pub use mark::{Mark, Marks};
pub use media::CrashMedia;
pub use mutation::Mutation;
pub use recording::{Operation, Recording};
pub use states::{CrashState, CrashStates, Enumerated, OwnedCrashState};
