//! Deliberate mistakes, to show that the tests detect them.
//!
//! Only built with the feature `mutants`, which only tests enable. Each one omits what a rule of
//! the log requires; the crash tests run once with each and must fail.

/// A deliberate mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mutant {
    /// Pages are reused as soon as the record that frees them is durable, though the log may still
    /// hold content for them: replay then writes over their new owner.
    NoRevoke,
    /// Pages are reused at once, before the record that frees them is durable.
    EarlyReuse,
    /// A record is written before the pages it newly names were flushed, and
    /// [`Pool::make_durable`](crate::Pool::make_durable) does nothing.
    CommitBeforeData,
    /// Recovery believes that a pool whose superblock names no segment was closed properly, and
    /// does not replay.
    TrustStoredState,
    /// The generation is not raised when the pool is opened, and the log continues where it ended.
    SameGeneration,
    /// An append is acknowledged although an earlier one is not durable.
    AcknowledgeOutOfOrder,
    /// A record's checksum is not verified.
    NoChecksum,
    /// A checkpoint moves the tail before what it applied was flushed.
    TailBeforeFlush,
    /// A commit is acknowledged when it is visible, and not when it is durable.
    NoFlush,
    /// Commits that a dead process made behind one that is a hole count, though they contain only
    /// the changes since that one.
    KeepDependents,
    /// What packed records expose is not made durable with them if a record behind them frees it.
    FreedTooEarly,
    /// Packed records count after a power cut though what they expose was not flushed.
    CountExposed,
    /// The erasure of what a dead process has written behind the end of packed records, and not
    /// published, is not durable.
    EraseUnsaid,
    /// Bytes that were written and not flushed are trusted although the kernel has reported that it
    /// lost some.
    TrustLostBytes,
    /// Pages are written to although the durable head still records them as fresh.
    FreshUnsaid,
    /// The last process that closes the pool records as fresh what lies behind the last page that
    /// has an owner, though pages there may have been written to.
    FreshAgain,
    /// A checkpoint does not make the next change of a slot a whole one.
    PatchFirst,
    /// Bytes are stored to pages of a file while a power cut would give these pages to another
    /// file, or would undo the truncation that has cut them off.
    StoreUnsettled,
    /// Written bytes are trusted as long as the machine runs.
    LifeOfMachine,
    /// The log is made durable only if it is known that nothing of it was lost.
    SecureOnlySameLife,
    /// The second superblock is written before the first is durable.
    BothSuperblocksAtOnce,
    /// The superblock names a saved state that was not flushed.
    SavedUnflushed,
    /// The saved state counts pages as used that wait for nothing but the tail.
    SavedWhileFreed,
    /// The saved state of the last close still counts while the pool is open, though its generation
    /// and its tail are others and the log has records.
    KeepSavedMark,
    /// The saved state of another moment counts.
    AnyGeneration,
    /// Blocks of the saved state are not verified.
    TornBlocks,
    /// Pages of the base are not verified.
    UncheckedPages,
    /// A page of the base counts as present before it was copied into the image.
    PresentTooEarly,
    /// What a page of the base names stays in the base's map of used pages when the page changes.
    BaseUsedKept,
    /// A record at the tail does not make a saved state doubtful.
    NoTailProbe,
}

/// Whether this mistake is being made: always false, unless built for the tests that make it.
#[inline]
pub(crate) fn is(selected: Option<Mutant>, mutant: Mutant) -> bool {
    cfg!(feature = "mutants") && selected == Some(mutant)
}
