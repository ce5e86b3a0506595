//! Write windows of media: what a stray store in a writing process can change.
//!
//! | mode | the linear mapping | how the pool writes | a stray store into the linear mapping |
//! |---|---|---|---|
//! | [`None`](WriteWindows::None) | can be stored to | by stores | is a write |
//! | [`Keys`](WriteWindows::Keys) | read-only | by stores to a second mapping, guarded by a [protection key](aquifer_vm::window) | SIGSEGV; so is one into the second mapping outside of a window |
//! | [`Calls`](WriteWindows::Calls) | read-only | by system calls | SIGSEGV |
//!
//! The linear mapping has no key, because threads that are older than the key, and signal handlers,
//! could not read it then. Media in the page cache are written by calls in both modes. While a call
//! writes, another thread may read its bytes torn at any byte; stores are torn only at words of
//! eight bytes.

use std::fmt;

/// What guards the media in a process that may write. See the module's documentation;
/// `docs/security.md` lists what each mode stops and does not stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum WriteWindows {
    /// Nothing: the fastest.
    #[default]
    None,
    /// Protection keys; refused where the CPU has none.
    Keys,
    /// System calls; refused on hugetlbfs and on DAX devices, which have no such call.
    Calls,
    /// The first of `Keys`, `Calls` and `None` that is available.
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
