//! Reading directories by node, from a position that stays valid.

use std::ops::ControlFlow;

use aquifer_format::directory::{Referent, Tree};
use aquifer_pool::format::directory::DirectoryEntry;
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{MetadataView, PoolError};

use super::{Node, Nodes};
use crate::error::{FsError, Result};
use crate::metadata::{FileType, Metadata};
use crate::walk;

/// A position in a directory: before the first entry by default.
///
/// It is the hash of the name that it comes after. So it stays valid whatever happens to the
/// directory, also after a restart, and never exceeds the greatest `off_t`. 0 is the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Cookie(pub u64);

impl Cookie {
    /// Before `.`.
    pub const START: Cookie = Cookie(0);
    /// Behind `.`, and before `..`.
    const AFTER_SELF: Cookie = Cookie(1);
    /// Behind `..`. The hashes of names start at 2, and a name's cookie is its hash and 1.
    const AFTER_PARENT: Cookie = Cookie(2);
}

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeEntry {
    /// The name; `.` and `..` as well.
    pub name: Vec<u8>,
    /// The number of the inode that it refers to.
    pub number: u64,
    /// The type of that inode.
    pub file_type: FileType,
    /// Its metadata, from [`Nodes::read_dir_plus`]: as of the moment at which the name was read;
    /// `None` if the inode is damaged.
    pub metadata: Option<Metadata>,
}

/// How many names are read as of one moment.
const BATCH: usize = 128;
/// The same with metadata: a reader starts anew if anything changes meanwhile.
const BATCH_PLUS: usize = 32;

/// Called with the entries between two positions.
type Each<'e> = &'e mut dyn FnMut(Cookie, &[NodeEntry]) -> ControlFlow<()>;

impl Nodes {
    /// Reads a directory from a position on: calls `each` with entries and with the position behind
    /// them, until it breaks or the directory ends. `.` and `..` come first, the others in no
    /// particular order.
    ///
    /// The slice has one entry, except where names have the same hash: these have one position
    /// together. A caller that has no room for all entries of a slice uses none of them, breaks, and
    /// continues later from the position before. Then every name that exists all the time is seen
    /// exactly once, whatever happens to others meanwhile.
    ///
    /// `each` runs without locks and may call anything.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::ops::ControlFlow;
    ///
    /// use aquifer_fs::node::Cookie;
    ///
    /// files.create_file("/f")?;
    /// let (nodes, mut names, mut at) = (files.nodes(), Vec::new(), Cookie::START);
    /// for room in [2, 2] {
    ///     let mut buffer = Vec::new();
    ///     nodes.read_dir(nodes.root()?, at, |behind, entries| {
    ///         if buffer.len() + entries.len() > room {
    ///             return ControlFlow::Break(());
    ///         }
    ///         buffer.extend(entries.iter().map(|entry| entry.name.clone()));
    ///         at = behind;
    ///         ControlFlow::Continue(())
    ///     })?;
    ///     names.extend(buffer);
    /// }
    /// assert_eq!(names, [&b"."[..], b"..", b"f"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotADirectory`];
    /// [`FsError::Stale`] if the directory was removed, also in between.
    pub fn read_dir(
        &self,
        directory: Node,
        after: Cookie,
        mut each: impl FnMut(Cookie, &[NodeEntry]) -> ControlFlow<()>,
    ) -> Result<()> {
        self.read(directory, after, false, &mut each)
    }

    /// As [`Nodes::read_dir`], with the metadata of all entries, except those whose inodes are
    /// damaged.
    ///
    /// # Errors
    /// As for [`Nodes::read_dir`].
    pub fn read_dir_plus(
        &self,
        directory: Node,
        after: Cookie,
        mut each: impl FnMut(Cookie, &[NodeEntry]) -> ControlFlow<()>,
    ) -> Result<()> {
        self.read(directory, after, true, &mut each)
    }

    fn read(&self, node: Node, after: Cookie, is_plus: bool, each: Each<'_>) -> Result<()> {
        let mut after = after;
        loop {
            let (entries, next) = self.files.shared.look(|slots| {
                let directory = walk::live_directory(slots, node)?;
                if after < Cookie::AFTER_PARENT {
                    return self_and_parent(slots, &directory, after, is_plus);
                }
                let (owner, seed, root) = (directory.number, directory.seed, directory.part);
                let at_least = if is_plus { BATCH_PLUS } else { BATCH };
                let batch = Tree { owner, seed, root }.read_from(slots, after.0, at_least)?;
                let cookie = |entry: DirectoryEntry| (Cookie(entry.hash + 1), entry);
                let entries = batch.entries.into_iter().map(cookie);
                let entries = entries.map(|(cookie, DirectoryEntry { name, inode, kind, .. })| {
                    Ok((cookie, read_entry(slots, name, Referent { inode, kind }, is_plus)?))
                });
                Ok((entries.collect::<Result<Vec<_>>>()?, batch.next_hash.map(Cookie)))
            })?;
            let (cookies, entries): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
            let mut from = 0;
            for same in cookies.chunk_by(|one, other| one == other) {
                let to = from + same.len();
                if each(same[0], &entries[from..to]).is_break() {
                    return Ok(());
                }
                from = to;
            }
            match next {
                Some(next) => after = next,
                None => return Ok(()),
            }
        }
    }
}

type Found = (Vec<(Cookie, NodeEntry)>, Option<Cookie>);

/// The entries that every directory has.
fn self_and_parent(
    slots: &MetadataView<'_>,
    directory: &FileInode,
    after: Cookie,
    is_plus: bool,
) -> Result<Found> {
    let all = [
        (&b"."[..], directory.number, Cookie::AFTER_SELF),
        (b"..", directory.parent, Cookie::AFTER_PARENT),
    ];
    let wanted = all.into_iter().filter(|(_, _, cookie)| *cookie > after);
    let entries = wanted.map(|(name, inode, cookie)| {
        let found = Referent { inode, kind: FileKind::Directory };
        Ok((cookie, read_entry(slots, name.to_vec(), found, is_plus)?))
    });
    Ok((entries.collect::<Result<Vec<_>>>()?, Some(Cookie::AFTER_PARENT)))
}

fn read_entry(
    slots: &MetadataView<'_>,
    name: Vec<u8>,
    found: Referent,
    is_plus: bool,
) -> Result<NodeEntry> {
    let metadata = match is_plus.then(|| walk::referred(slots, found).map(Metadata::of)) {
        // One damaged inode does not hide the other names.
        Some(Err(FsError::Damaged { .. } | FsError::Pool(PoolError::Damaged { .. }))) => None,
        read => read.transpose()?,
    };
    let file_type = FileType::of(found.kind);
    Ok(NodeEntry { name, number: found.inode, file_type, metadata })
}
