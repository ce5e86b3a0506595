//! Keys that a broker requires, and key files.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use aquifer_sys::random;
use sha2::{Digest, Sha256};

use crate::access_error::AccessError;

const LABEL: &[u8] = b"aquifer pool access key";

/// A key for writing to a pool. `Debug` does not show its content.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessKey(Vec<u8>);

impl std::fmt::Debug for AccessKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("AccessKey")
    }
}

impl AccessKey {
    /// The minimum length of a key: shorter keys can be guessed.
    pub const MIN_BYTES: usize = 16;
    /// The maximum length of a key.
    pub const MAX_BYTES: usize = 1024;

    /// A key chosen by the caller.
    ///
    /// # Errors
    /// [`AccessError::BadKey`] if it is too short or too long.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<AccessKey, AccessError> {
        let key = AccessKey(bytes.into());
        key.check(None).map(|()| key)
    }

    fn check(&self, path: Option<&Path>) -> Result<(), AccessError> {
        let (least, most) = (Self::MIN_BYTES, Self::MAX_BYTES);
        match self.0.len() {
            len if (least..=most).contains(&len) => Ok(()),
            len => {
                let problem = format!("it has {len} bytes, and needs {least} to {most}");
                Err(bad(path, problem))
            }
        }
    }

    /// Generates a random key: 64 hexadecimal digits.
    ///
    /// # Errors
    /// [`AccessError::BadKey`] if the system provides no random numbers.
    pub fn generate() -> Result<AccessKey, AccessError> {
        let mut bytes = [0; 32];
        random::fill(&mut bytes).map_err(|error| bad(None, error.to_string()))?;
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        AccessKey::new(digits)
    }

    /// Reads the key in a file: its whole content, without a trailing line break.
    ///
    /// # Errors
    /// [`AccessError::BadKey`] also if the file's mode gives access to its group or to other users.
    pub fn from_file(path: impl AsRef<Path>) -> Result<AccessKey, AccessError> {
        let path = path.as_ref();
        let unreadable = |error: std::io::Error| bad(Some(path), error.to_string());
        let file = File::open(path).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        // The mode of a pipe does not restrict access.
        if metadata.is_file() && metadata.mode() & 0o077 != 0 {
            let mode = metadata.mode() & 0o777;
            let problem = format!("its mode is {mode:o}: others can reach it; `chmod 600` it");
            return Err(bad(Some(path), problem));
        }
        let mut bytes = Vec::new();
        file.take(Self::MAX_BYTES as u64 + 2).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
        }
        let key = AccessKey(bytes);
        key.check(Some(path)).map(|()| key)
    }

    /// Generates a key and creates a file with it, which only its owner can access.
    ///
    /// # Errors
    /// [`AccessError::BadKey`] also if the path exists.
    pub fn create_file(path: impl AsRef<Path>) -> Result<AccessKey, AccessError> {
        let (path, key) = (path.as_ref(), AccessKey::generate()?);
        let mut new = File::options();
        new.write(true).create_new(true).mode(0o600);
        let line = [key.0.as_slice(), b"\n"].concat();
        let mut file = new.open(path).map_err(|error| bad(Some(path), error.to_string()))?;
        file.write_all(&line).and_then(|()| file.sync_all()).map_err(|error| {
            let _ = std::fs::remove_file(path);
            bad(Some(path), error.to_string())
        })?;
        Ok(key)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

fn bad(path: Option<&Path>, problem: String) -> AccessError {
    AccessError::BadKey { path: path.map(Path::to_path_buf), problem }
}

/// What a broker stores of its key.
pub(super) struct KeyHash {
    salt: [u8; 16],
    hash: [u8; 32],
}

impl std::fmt::Debug for KeyHash {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("KeyHash")
    }
}

impl KeyHash {
    pub fn new(key: &AccessKey) -> Result<KeyHash, AccessError> {
        let mut salt = [0; 16];
        random::fill(&mut salt).map_err(|error| bad(None, error.to_string()))?;
        Ok(KeyHash { salt, hash: hash(&salt, key.bytes()) })
    }

    /// Whether this is the key; compares in constant time.
    pub fn fits(&self, key: &[u8]) -> bool {
        let asked = hash(&self.salt, key);
        let difference = self.hash.iter().zip(&asked).fold(0, |seen, (a, b)| seen | (a ^ b));
        std::hint::black_box(difference) == 0
    }
}

fn hash(salt: &[u8; 16], key: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(salt).chain_update(LABEL).chain_update(key).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn a_key_in_a_file_is_its_owners() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        let key = AccessKey::create_file(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert_eq!(key.bytes().len(), 64);
        assert!(AccessKey::from_file(&path).unwrap() == key);
        assert!(AccessKey::create_file(&path).is_err(), "it is not overwritten");
        assert!(AccessKey::from_file(&path).unwrap() == key);
        assert!(AccessKey::generate().unwrap() != key);
        for mode in [0o640, 0o604, 0o620, 0o602] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = AccessKey::from_file(&path).unwrap_err();
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn keys_that_can_be_guessed_or_are_none_are_refused() {
        for len in [0, 15, 1025, 4096] {
            assert!(AccessKey::new(vec![b'x'; len]).is_err(), "{len}");
        }
        for len in [16, 1024] {
            assert!(AccessKey::new(vec![b'x'; len]).is_ok(), "{len}");
        }
        let directory = tempfile::tempdir().unwrap();
        assert!(AccessKey::from_file(directory.path()).is_err());
        assert!(AccessKey::from_file(directory.path().join("none")).is_err());
    }

    #[test]
    fn a_hash_fits_its_key_and_no_other() {
        let key = AccessKey::new(*b"0123456789abcdef").unwrap();
        let (one, other) = (KeyHash::new(&key).unwrap(), KeyHash::new(&key).unwrap());
        assert_ne!(one.hash, other.hash, "salted");
        for hash in [one, other] {
            assert!(hash.fits(b"0123456789abcdef"));
            for wrong in [&b"0123456789abcdeg"[..], b"", b"0123456789abcdef0", b"0123456789abcde"] {
                assert!(!hash.fits(wrong));
            }
        }
        assert!(!format!("{key:?}").contains('0'));
    }
}
