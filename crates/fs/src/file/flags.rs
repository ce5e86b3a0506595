//! How a file was opened.

use crate::error::{FsError, Result};
use crate::walk::{Last, owned};

/// What [`FileOptions`](crate::FileOptions) ask for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenFlags {
    pub read: bool,
    pub write: bool,
    pub append: bool,
    pub truncate: bool,
    pub create: bool,
    pub create_new: bool,
    /// Flags of `open`, besides those above.
    pub custom: i32,
    /// The permissions of a new file, before the umask.
    pub mode: u32,
}

impl Default for OpenFlags {
    fn default() -> OpenFlags {
        OpenFlags {
            read: false,
            write: false,
            append: false,
            truncate: false,
            create: false,
            create_new: false,
            custom: 0,
            mode: 0o666,
        }
    }
}

impl OpenFlags {
    pub fn check(&self, path: &[u8]) -> Result<()> {
        let reason = match self {
            _ if !self.read && !self.writes() => "neither read nor write access is set",
            _ if (self.makes() || self.truncate) && !self.writes() => {
                "creating and truncating need write access"
            }
            _ if self.append && self.truncate && !self.create_new => {
                "append and truncate exclude each other"
            }
            _ if self.custom & !(libc::O_NOFOLLOW | libc::O_CLOEXEC) != 0 => {
                "O_NOFOLLOW is the only custom flag that files of a pool have"
            }
            _ => return Ok(()),
        };
        Err(FsError::Options { path: owned(path), reason })
    }

    pub fn writes(&self) -> bool {
        self.write || self.append
    }

    pub fn makes(&self) -> bool {
        self.create || self.create_new
    }

    pub fn last(&self) -> Last {
        let keeps_link = self.custom & libc::O_NOFOLLOW != 0;
        if keeps_link || self.create_new { Last::Keep } else { Last::Follow }
    }
}
