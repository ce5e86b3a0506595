//! Keys that control access to an object.
//!
//! | keys set | reading needs | writing, destroying, resizing needs |
//! |---|---|---|
//! | none | nothing | nothing |
//! | write | nothing | the write key |
//! | read | the read key | the read key |
//! | both | either key | the write key |
//!
//! The pool stores a salt and, for each key, `SHA-256(salt ‖ label ‖ key)`. The label differs
//! between the two keys, so that equal keys have different hashes. Keys gate only the calls of this
//! library: a process that can open the pool file for writing can read and change everything in it.
//! Keys protect from mistakes there, not from malice.

use aquifer_pool::format::inode::KeyHashes;
use sha2::{Digest, Sha256};

use crate::access::Access;
use crate::error::{ObjectError, Result, text};

/// The keys of a new object. `None` requires no key.
#[derive(Clone, Copy, Default)]
pub(crate) struct Keys<'a> {
    /// For attaching for reading.
    pub read: Option<&'a [u8]>,
    /// For attaching for writing, and for destroying, renaming, resizing or moving it.
    pub write: Option<&'a [u8]>,
}

impl std::fmt::Debug for Keys<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Keys")
            .field("read", &self.read.is_some())
            .field("write", &self.write.is_some())
            .finish()
    }
}

const READ_LABEL: &[u8] = b"aquifer object read key";
const WRITE_LABEL: &[u8] = b"aquifer object write key";

fn hash(salt: &[u8; 16], label: &[u8], key: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(salt).chain_update(label).chain_update(key).finalize().into()
}

/// Whether both are equal, in constant time.
fn equal(one: &[u8; 32], other: &[u8; 32]) -> bool {
    let difference = one.iter().zip(other).fold(0, |seen, (a, b)| seen | (a ^ b));
    std::hint::black_box(difference) == 0
}

/// The hashes of the keys, with a new salt.
pub(crate) fn hashes(keys: Keys<'_>) -> Result<KeyHashes> {
    let mut salt = [0; 16];
    aquifer_sys::random::fill(&mut salt).map_err(ObjectError::Random)?;
    Ok(KeyHashes {
        salt,
        read: keys.read.map(|key| hash(&salt, READ_LABEL, key)),
        write: keys.write.map(|key| hash(&salt, WRITE_LABEL, key)),
    })
}

/// Checks that `key` permits `access` to an object.
pub(crate) fn check(
    name: &[u8],
    keys: &KeyHashes,
    access: Access,
    key: Option<&[u8]>,
) -> Result<()> {
    let fits = |label, wanted: &Option<[u8; 32]>| match (key, wanted) {
        (Some(key), Some(wanted)) => equal(&hash(&keys.salt, label, key), wanted),
        _ => false,
    };
    let (is_read_key, is_write_key) =
        (fits(READ_LABEL, &keys.read), fits(WRITE_LABEL, &keys.write));
    let may = match (access, keys.read.is_some(), keys.write.is_some()) {
        (Access::Read, false, _) | (Access::Write, false, false) => true,
        (Access::Read, true, _) => is_read_key || is_write_key,
        (Access::Write, true, false) => is_read_key,
        (Access::Write, _, true) => is_write_key,
    };
    match may {
        true => Ok(()),
        false if is_read_key => Err(ObjectError::ReadKeyForWriting { name: text(name) }),
        false => Err(ObjectError::WrongKey { name: text(name), access, given: key.is_some() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(keys: Keys<'_>, access: Access, key: Option<&str>) -> &'static str {
        let keys = hashes(keys).unwrap();
        match check(b"object", &keys, access, key.map(str::as_bytes)) {
            Ok(()) => "opens",
            Err(ObjectError::WrongKey { given: true, .. }) => "wrong",
            Err(ObjectError::WrongKey { given: false, .. }) => "missing",
            Err(ObjectError::ReadKeyForWriting { .. }) => "read only",
            Err(other) => panic!("{other}"),
        }
    }

    /// The table above, and the combinations it leaves out.
    #[test]
    fn keys_open_what_the_table_says() {
        let (read, write) = (Some(&b"r"[..]), Some(&b"w"[..]));
        let both = Keys { read, write };
        let reads = Keys { read, write: None };
        let writes = Keys { read: None, write };
        for (keys, key, reading, writing) in [
            (Keys::default(), None, "opens", "opens"),
            (Keys::default(), Some("any"), "opens", "opens"),
            (writes, None, "opens", "missing"),
            (writes, Some("w"), "opens", "opens"),
            (writes, Some("r"), "opens", "wrong"),
            (reads, None, "missing", "missing"),
            (reads, Some("r"), "opens", "opens"),
            (reads, Some("w"), "wrong", "wrong"),
            (both, None, "missing", "missing"),
            (both, Some("r"), "opens", "read only"),
            (both, Some("w"), "opens", "opens"),
            (both, Some(""), "wrong", "wrong"),
        ] {
            assert_eq!(outcome(keys, Access::Read, key), reading, "{keys:?} {key:?}");
            assert_eq!(outcome(keys, Access::Write, key), writing, "{keys:?} {key:?}");
        }
    }

    #[test]
    fn equal_keys_have_different_hashes() {
        let same = Keys { read: Some(b"same"), write: Some(b"same") };
        let (one, other) = (hashes(same).unwrap(), hashes(same).unwrap());
        assert_ne!(one.read, one.write);
        assert_ne!(one.read, other.read);
    }

    #[test]
    fn an_empty_key_is_a_key() {
        let empty = Keys { read: None, write: Some(b"") };
        assert_eq!(outcome(empty, Access::Write, None), "missing");
        assert_eq!(outcome(empty, Access::Write, Some("")), "opens");
    }
}
