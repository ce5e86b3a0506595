//! What an attachment may do.

/// What an attachment may do with its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Loads; others may have it attached for reading, too.
    Read,
    /// Loads and stores; nobody else has it attached.
    Write,
}

impl Access {
    pub(crate) fn noun(self) -> &'static str {
        match self {
            Access::Read => "reading",
            Access::Write => "writing",
        }
    }
}
