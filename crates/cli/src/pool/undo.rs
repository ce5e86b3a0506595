//! Undoes `create` or `grow` when interrupted by Ctrl-C, a termination or a hangup.
//!
//! Both write zeros for minutes if the pool is large. Until they are done, the bytes written are
//! useless and occupy the disk, so they are removed: a new file has no name yet and disappears with
//! the process, and an existing file is truncated to its previous length. After a SIGKILL an
//! existing file stays as it is; `aquifer pool create --force` or `aquifer pool grow` overwrites
//! it.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Error, anyhow};
use aquifer_sys::interrupt;

use crate::{output, progress};

/// What the path held before.
enum Former {
    Nothing,
    File {
        len_bytes: u64,
    },
    /// A device, or a path without access.
    Other,
}

/// Turns the signals into a request to stop, checked between pieces of work, until it is dropped.
pub struct Undo {
    path: PathBuf,
    former: Former,
    /// Whether the previous content is lost once the work has begun.
    overwrites: bool,
    _signals: interrupt::Guard,
}

impl Undo {
    /// Notes what the path holds. `overwrites` tells whether the work destroys its content.
    pub fn new(path: &Path, overwrites: bool) -> Undo {
        let former = match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => Former::File { len_bytes: metadata.len() },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Former::Nothing,
            _ => Former::Other,
        };
        Undo { path: path.to_owned(), former, overwrites, _signals: interrupt::Guard::install() }
    }

    /// Called between two pieces of work: exits the process if a signal arrived, since the work
    /// itself cannot be cancelled.
    pub fn ends_if_interrupted(&self, bar: &progress::Bytes) {
        if interrupt::check().is_ok() {
            return;
        }
        bar.clear();
        output::print_error(&self.undo());
        std::process::exit(1);
    }

    /// Undoes what it can. Returns an error that describes the result.
    fn undo(&self) -> Error {
        let path = self.path.display();
        let (undone, became) = match self.former {
            Former::Nothing => (Ok(()), "was not created"),
            Former::File { len_bytes } if self.overwrites && len_bytes > 0 => {
                (self.set_len(0), "is empty now; its content is lost")
            }
            Former::File { len_bytes } => (self.set_len(len_bytes), "is unchanged"),
            Former::Other if self.overwrites => (Ok(()), "holds no pool; its content is lost"),
            Former::Other => (Ok(()), "is unchanged"),
        };
        match undone {
            Ok(()) => anyhow!("interrupted; {path} {became}"),
            Err(error) => Error::new(error).context(format!(
                "interrupted; {path} could not be truncated to its former length; check its length"
            )),
        }
    }

    fn set_len(&self, len_bytes: u64) -> std::io::Result<()> {
        File::options().write(true).open(&self.path)?.set_len(len_bytes)
    }
}
