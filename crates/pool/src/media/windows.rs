//! Write windows of media: what a stray store in a writing process can reach.
//!
//! | mode | the linear mapping | how the pool writes | a stray store into the linear mapping |
//! |---|---|---|---|
//! | [`None`](WriteWindows::None) | can be stored to | by stores | is a write |
//! | [`Keys`](WriteWindows::Keys) | read-only | by stores to a second mapping, guarded by a [protection key](aquifer_vm::window) | SIGSEGV; as one to the second mapping outside of a window |
//! | [`Calls`](WriteWindows::Calls) | read-only | by system calls | SIGSEGV |
//!
//! The linear mapping has no key, because threads that are older than the key, and signal handlers, could not read it then.
//! Media in the page cache are written by calls in every mode. What a call writes, others may see torn at any byte while it is
//! written; stores, at words of eight bytes.

use std::fmt;

/// What guards the media in a process that may write. See the module's documentation; what each mode stops, and does not, is in
/// `docs/security.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum WriteWindows {
    /// Nothing: the fastest.
    #[default]
    None,
    /// Protection keys; refused where the CPU has none.
    Keys,
    /// System calls; refused on hugetlbfs and on DAX devices, which have no such call.
    Calls,
    /// The first of `Keys`, `Calls` and `None` that can be had.
    Best,
}

impl WriteWindows {
    /// Whether the linear mapping is read-only.
    pub(super) fn is_guard(self) -> bool {
        self != WriteWindows::None
    }
}

impl fmt::Display for WriteWindows {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            WriteWindows::None => "none",
            WriteWindows::Keys => "protection keys",
            WriteWindows::Calls => "system calls",
            WriteWindows::Best => "the best there are",
        })
    }
}
