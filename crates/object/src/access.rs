//! What an attachment may do.

/// What an attachment may do with its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Loads; other attachments for reading may exist.
    Read,
    /// Loads and stores; no other attachment exists.
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
