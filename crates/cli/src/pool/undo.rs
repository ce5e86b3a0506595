//! What is put back when `create` or `grow` is stopped by Ctrl-C, a termination or a hangup.
//!
//! Both write zeros for minutes where the pool is large. Until they are done, what they have written counts for
//! nothing and takes up the disk all the same, so it goes away again: a new file has no name yet and is gone with the
//! process, one that was there is as long as it was. A kill leaves the latter as it is then;
//! `aquifer pool create --force` or `aquifer pool grow` goes over it.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Error, anyhow};
use aquifer_host::interrupt;

use crate::{output, progress};

/// What was at a path before.
enum Former {
    Nothing,
    File {
        len_bytes: u64,
    },
    /// A device, or what nobody may look at.
    Other,
}

/// Turns the signals into a wish, from now on and until it is dropped.
pub struct Undo {
    path: PathBuf,
    former: Former,
    /// Whether what the file held is lost once the work has begun.
    overwrites: bool,
    _signals: interrupt::Guard,
}

impl Undo {
    /// Notes what is at the path. `overwrites` if the work does not keep it.
    pub fn new(path: &Path, overwrites: bool) -> Undo {
        let former = match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => Former::File { len_bytes: metadata.len() },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Former::Nothing,
            _ => Former::Other,
        };
        Undo { path: path.to_owned(), former, overwrites, _signals: interrupt::Guard::install() }
    }

    /// Between two pieces of work: ends the process if that is wished, since who does the work cannot be told to stop.
    pub fn ends_if_interrupted(&self, bar: &progress::Bytes) {
        if interrupt::check().is_ok() {
            return;
        }
        bar.clear();
        output::print_error(&self.undo());
        std::process::exit(1);
    }

    /// Puts back what can be, and says what was.
    fn undo(&self) -> Error {
        let path = self.path.display();
        let (undone, became) = match self.former {
            Former::Nothing => (Ok(()), "was not made"),
            Former::File { len_bytes } if self.overwrites && len_bytes > 0 => {
                (self.set_len(0), "is empty now: what it held is lost")
            }
            Former::File { len_bytes } => (self.set_len(len_bytes), "is as it was"),
            Former::Other if self.overwrites => (Ok(()), "holds no pool: what it held is lost"),
            Former::Other => (Ok(()), "is as it was"),
        };
        match undone {
            Ok(()) => anyhow!("interrupted; {path} {became}"),
            Err(error) => Error::new(error).context(format!(
                "interrupted, and {path} could not be put back; look at its length"
            )),
        }
    }

    fn set_len(&self, len_bytes: u64) -> std::io::Result<()> {
        File::options().write(true).open(&self.path)?.set_len(len_bytes)
    }
}
