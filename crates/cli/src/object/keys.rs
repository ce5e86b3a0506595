//! The sources of keys: an option, a file, the environment; the first one present is used.
//!
//! Command lines are visible to every user of the machine and are stored in shell histories, so
//! each key can be given in other ways too.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, anyhow, ensure};
use aquifer::{ObjectError, ObjectOptions};

/// The help text of each command that takes `--key`.
pub const ONE_KEY_HELP: &str = "\
Keys: other users can see command lines, and shells record them. Instead of --key, use --key-file (the content of the \
file without the line break at its end; /dev/stdin also works) or the environment variable AQUIFER_KEY, which counts if \
neither option is given.";

/// The help text of `create`.
pub const NEW_KEYS_HELP: &str = "\
Keys: other users can see command lines, and shells record them. Instead of --read-key and --write-key, use \
--read-key-file and --write-key-file (the content of the file without the line break at its end; /dev/stdin also works) \
or the environment variables AQUIFER_READ_KEY and AQUIFER_WRITE_KEY, which count if no option for that key is given. \
Without any of these, the object has no such key. The write key also permits reading. If there is only a read key, \
writers need it as well. Keys protect against mistakes only: a user who may write to the pool file can do everything.";

/// A longer file is not a key but a mistake in the file name.
const MAX_KEY_BYTES: u64 = 64 << 10;

/// The key of an existing object.
#[derive(clap::Args)]
pub struct KeyArgs {
    /// Key of the object; visible to other users
    #[arg(long, value_name = "KEY")]
    key: Option<OsString>,

    /// File with the key of the object
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    key_file: Option<PathBuf>,
}

/// The keys of a new object.
#[derive(clap::Args)]
pub struct NewKeysArgs {
    /// Key for attaching it for reading; visible to other users
    #[arg(long, value_name = "KEY")]
    read_key: Option<OsString>,

    /// File with the read key
    #[arg(long, value_name = "FILE", conflicts_with = "read_key")]
    read_key_file: Option<PathBuf>,

    /// Key for attaching it for writing, resizing and destroying it; visible to other users
    #[arg(long, value_name = "KEY")]
    write_key: Option<OsString>,

    /// File with the write key
    #[arg(long, value_name = "FILE", conflicts_with = "write_key")]
    write_key_file: Option<PathBuf>,
}

impl std::fmt::Debug for KeyArgs {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("KeyArgs")
    }
}

impl std::fmt::Debug for NewKeysArgs {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("NewKeysArgs")
    }
}

impl KeyArgs {
    /// The key, if one was given.
    pub fn key(&self) -> Result<Option<Vec<u8>>> {
        choose(self.key.clone(), self.key_file.as_deref(), "AQUIFER_KEY")
    }
}

impl NewKeysArgs {
    /// The key for reading, if one was given.
    pub fn read_key(&self) -> Result<Option<Vec<u8>>> {
        let key = choose(self.read_key.clone(), self.read_key_file.as_deref(), "AQUIFER_READ_KEY");
        not_empty(key?, "--read-key")
    }

    /// The key for writing, if one was given.
    pub fn write_key(&self) -> Result<Option<Vec<u8>>> {
        let key =
            choose(self.write_key.clone(), self.write_key_file.as_deref(), "AQUIFER_WRITE_KEY");
        not_empty(key?, "--write-key")
    }
}

/// The options that give the key, if there is one.
pub fn with(key: &Option<Vec<u8>>) -> ObjectOptions<'_> {
    let options = ObjectOptions::new();
    key.iter().fold(options, |options, key| options.key(key))
}

/// Adds how to give a key to the error for a missing key.
pub fn explain(error: ObjectError) -> Error {
    match error {
        ObjectError::WrongKey { given: false, .. } => {
            anyhow!("{error}; pass it with --key-file or in AQUIFER_KEY")
        }
        error => error.into(),
    }
}

/// Rejects an empty new key: it comes from an unset variable in a script, and would give no
/// protection.
fn not_empty(key: Option<Vec<u8>>, option: &str) -> Result<Option<Vec<u8>>> {
    let is_empty = key.as_ref().is_some_and(Vec::is_empty);
    ensure!(!is_empty, "{option}: the key is empty; pass a key, or omit the option");
    Ok(key)
}

fn choose(
    option: Option<OsString>,
    file: Option<&Path>,
    variable: &str,
) -> Result<Option<Vec<u8>>> {
    if let Some(path) = file {
        return read(path).map(Some);
    }
    // A variable set to the empty string counts as unset.
    let set = || std::env::var_os(variable).filter(|value| !value.is_empty());
    Ok(option.or_else(set).map(OsStringExt::into_vec))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let mut key = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_KEY_BYTES + 1).read_to_end(&mut key))
        .with_context(|| format!("cannot read a key from {}", path.display()))?;
    let fits = key.len() as u64 <= MAX_KEY_BYTES;
    ensure!(fits, "{}: longer than 64 KiB, so not a key", path.display());
    if key.last() == Some(&b'\n') {
        key.pop();
    }
    ensure!(!key.is_empty(), "{}: the key is empty", path.display());
    Ok(key)
}
