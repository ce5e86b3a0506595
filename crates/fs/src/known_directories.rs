//! Lookups that start at the directory of a path, if that is known.
//!
//! A search views many files of a directory one after the other, each by its whole path. The
//! directory that the first of these paths leads to is cached under the path without its last
//! component ([`KnownPaths`](crate::known_paths::KnownPaths)), and is the answer as long as no name
//! of the pool has changed: the others then take one lookup, however long the path is. (Opening a
//! file caches only its own path, and reading its metadata none: programs that do so often change
//! names as well.)
//!
//! Both the comparison of the version and the lookup are made on one state of the metadata, so the
//! result is that of [`walk`] on the same state. Whatever is not plainly there (a link to follow, an
//! error) is left to `walk`.

use std::borrow::Cow;

use aquifer_format::directory::Referent;
use aquifer_pool::MetadataView;
use aquifer_pool::format::file::FileKind;
use aquifer_pool::format::inode::MAX_NAME_BYTES;
use aquifer_pool::format::run::Run;

use crate::error::Result;
use crate::files::Shared;
use crate::known_paths::{Known, PathHash};
use crate::node_id::Node;
use crate::walk::{self, Last, MAX_PATH_BYTES, walk};

/// The directory of a path that was walked: inode and generation.
pub(crate) type Found = Option<(PathHash, u64, u64)>;

/// Splits a path into the path of a directory and a name in it; `None` if the directory's path has
/// no slash, since walking is then as fast, or if the path ends otherwise than with a name.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = path.iter().rposition(|&byte| byte == b'/').filter(|&at| at > 0)?;
    let (directory, name) = (&path[..at], &path[at + 1..]);
    let is_name = directory.contains(&b'/')
        && !matches!(name, b"" | b"." | b"..")
        && name.len() <= MAX_NAME_BYTES
        && path.len() <= MAX_PATH_BYTES;
    is_name.then_some((directory, name))
}

impl Shared {
    /// What a path refers to, in the metadata as `slots` shows them, if a link as its last component
    /// is followed; and its directory, for [`Shared::learn_directory`], if that was not known.
    pub fn referent(&self, slots: &MetadataView<'_>, path: &[u8]) -> Result<(Referent, Found)> {
        let parts = split(path);
        let hash = parts.and_then(|(directory, _)| self.known_paths.hash(directory));
        if let Some((_, name)) = parts
            && let Some(known) = hash.and_then(|hash| self.known_paths.find(hash))
            // While a change is being applied, `slots` may show it before the version tells of it.
            && self.pool.metadata_version().is_multiple_of(2)
            && known.names_version == self.pool.names_version()
            && let Ok(place) = walk::entry(slots, Node { number: known.inode, generation: known.generation }, name)
            && let Some(found) = place.found
            && found.kind != FileKind::Symlink
        {
            return Ok((found, None));
        }
        let place = walk(slots, path, Last::Follow)?;
        let found = place.referent(path)?;
        // After a link, the name is not the path's, and its directory may be another one.
        let directory = match (hash, &place.name) {
            (Some(hash), Cow::Borrowed(_)) => {
                let directory = walk::inode(slots, place.directory)?;
                Some((hash, directory.number, directory.generation))
            }
            _ => None,
        };
        Ok((found, directory))
    }

    /// Caches a directory found by [`Shared::referent`], after the look at the metadata has
    /// succeeded. `names_version` was read before that look.
    pub fn learn_directory(&self, directory: Found, names_version: u64) {
        let Some((hash, inode, generation)) = directory else { return };
        let known = Known {
            inode,
            generation,
            layout_version: 0,
            size_bytes: 0,
            // No content: a view is not made from this entry.
            run: Run::default(),
            names_version,
            metadata_version: u64::MAX,
        };
        self.known_paths.learn(hash, known);
    }
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn only_names_below_a_directory_are_split_off() {
        let of = |path: &'static str| {
            split(path.as_bytes()).map(|(directory, name)| {
                [directory, name].map(|part| std::str::from_utf8(part).unwrap())
            })
        };
        assert_eq!(of("a/b/c"), Some(["a/b", "c"]));
        assert_eq!(of("/a//c"), Some(["/a/", "c"]));
        for whole in ["", "a", "/a", "/", "a/", "a/b", "a/b/c/", "a/b/.", "a/b/.."] {
            assert_eq!(of(whole), None, "{whole}");
        }
        assert_eq!(split(&[b"a/b/".as_slice(), &[b'n'; 256]].concat()), None);
        assert_eq!(split(&[&[b'/'; 4094][..], b"/n"].concat()), None);
    }
}
