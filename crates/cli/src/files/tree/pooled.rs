//! The files of a pool, as a tree to copy from or to.

use std::ffi::OsString;
use std::fs::Permissions;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use aquifer::fs::{FileKind, FileTimes, SetMode, SpecialFile};
use aquifer::{File, Files, FsError};

use super::{Attributes, Content, Item, Kind, New, Tree};
use crate::files::Place;
use crate::files::failure::At;

/// The files of an open pool.
pub struct Pooled {
    files: Files,
    /// A place in the pool, for messages.
    place: Place,
}

impl Pooled {
    /// The files of `place`'s pool.
    pub fn new(files: Files, place: &Place) -> Pooled {
        Pooled { files, place: place.clone() }
    }

    fn at(&self, path: &Path) -> Place {
        self.place.with_path(path)
    }
}

/// An open file of a pool and its place.
pub struct PooledFile {
    file: File,
    place: Place,
}

impl Tree for Pooled {
    type File = PooledFile;
    type New = PooledFile;

    fn show(&self, path: &Path) -> String {
        self.at(path).show()
    }

    fn item(&self, path: &Path, follow: bool) -> Result<Option<Item>> {
        let metadata =
            if follow { self.files.metadata(path) } else { self.files.symlink_metadata(path) };
        let metadata = match metadata {
            Err(FsError::NotFound { .. }) => return Ok(None),
            metadata => metadata.at(&self.at(path))?,
        };
        Ok(Some(Item {
            kind: match metadata.file_type().kind() {
                FileKind::File => Kind::File,
                FileKind::Directory => Kind::Directory,
                FileKind::Symlink => Kind::Link,
                FileKind::Fifo => Kind::Special(SpecialFile::Fifo),
                FileKind::Socket => Kind::Special(SpecialFile::Socket),
                FileKind::CharDevice => Kind::Special(SpecialFile::CharDevice(metadata.rdev())),
                FileKind::BlockDevice => Kind::Special(SpecialFile::BlockDevice(metadata.rdev())),
                _ => Kind::Other,
            },
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            len_bytes: metadata.len(),
            accessed: metadata.accessed().at(&self.at(path))?,
            modified: metadata.modified().at(&self.at(path))?,
            links: metadata.nlink(),
            identity: (0, metadata.ino()),
        }))
    }

    fn names(&self, directory: &Path) -> Result<Vec<OsString>> {
        crate::files::names::sorted_names(&self.files, &self.at(directory))
    }

    fn target(&self, link: &Path) -> Result<PathBuf> {
        self.files.read_link(link).at(&self.at(link))
    }

    fn open(&self, path: &Path, follow: bool) -> Result<PooledFile> {
        let place = self.at(path);
        let flags = if follow { 0 } else { libc::O_NOFOLLOW };
        let file = self.files.options().read(true).custom_flags(flags).open(path).at(&place)?;
        Ok(PooledFile { file, place })
    }

    fn attributes(&self, path: &Path, follow: bool) -> Result<Attributes> {
        let place = self.at(path);
        let metadata =
            if follow { self.files.metadata(path) } else { self.files.symlink_metadata(path) };
        let (nodes, node) = (self.files.nodes(), metadata.at(&place)?.node());
        let names = nodes.attributes(node).at(&place)?;
        let with_value = |name: Vec<u8>| {
            let value = nodes.attribute(node, &name).at(&place)?;
            Ok((name, value))
        };
        names.into_iter().map(with_value).collect()
    }

    fn make_file(&self, name: &Path, _len_bytes: u64) -> Result<PooledFile> {
        let place = self.at(name);
        let file = self.files.options().write(true).mode(0o600).create_unnamed().at(&place)?;
        Ok(PooledFile { file, place })
    }

    fn make_link(&self, target: &Path, name: &Path) -> Result<PooledFile> {
        let place = self.at(name);
        Ok(PooledFile { file: self.files.symlink_unnamed(target).at(&place)?, place })
    }

    fn make_special(&self, special: SpecialFile, name: &Path) -> Result<PooledFile> {
        let place = self.at(name);
        Ok(PooledFile {
            file: self.files.create_special_unnamed(special, 0o600).at(&place)?,
            place,
        })
    }

    fn make_name(&self, original: &Path, name: &Path) -> Result<PooledFile> {
        let original = self.at(original);
        let metadata = self.files.symlink_metadata(original.path()).at(&original)?;
        // Pipes, sockets, devices and symbolic links cannot be opened.
        let file = self.files.nodes().hold(metadata.node()).at(&original)?;
        Ok(PooledFile { file, place: self.at(name) })
    }

    fn make_directory(&self, path: &Path) -> Result<()> {
        self.files.create_dir(path).at(&self.at(path))
    }

    fn finish_directory(&self, path: &Path, item: &Item, attributes: &Attributes) -> Result<u64> {
        let place = self.at(path);
        let file = self.files.open_file(path).at(&place)?;
        PooledFile { file, place }.finish(item, attributes)
    }
}

impl New for PooledFile {
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.file.write_all_at(bytes, offset_bytes).at(&self.place)
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.file.set_len(len_bytes).at(&self.place)
    }

    fn finish(&self, item: &Item, attributes: &Attributes) -> Result<u64> {
        let (file, place) = (&self.file, &self.place);
        file.fchown(Some(item.uid), Some(item.gid)).at(place)?;
        let mut lost = 0;
        for (name, value) in attributes {
            match file.set_attribute(name, value, SetMode::Any) {
                Err(
                    FsError::AttributeNamespace { .. }
                    | FsError::AttributesFull { .. }
                    | FsError::UserAttribute { .. }
                    | FsError::Acl { .. }
                    | FsError::AclVersion { .. }
                    | FsError::NoAcl { .. },
                ) => lost += 1,
                set => set.at(place)?,
            }
        }
        if item.kind != Kind::Link {
            // An access list has set the mode, and the mode changes the list: they agree.
            file.set_permissions(Permissions::from_mode(item.mode)).at(place)?;
        }
        let times = FileTimes::new().set_accessed(item.accessed).set_modified(item.modified);
        file.set_times(times).at(place)?;
        Ok(lost)
    }

    fn place(self, replace: bool) -> Result<()> {
        let path = self.place.path();
        let linked = if replace { self.file.link_over(path) } else { self.file.link(path) };
        linked.at(&self.place)
    }
}

impl Content for PooledFile {
    fn next_data(&self, offset_bytes: u64, _: u64) -> std::io::Result<Option<Range<u64>>> {
        Ok(self.file.next_data(offset_bytes)?)
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> std::io::Result<usize> {
        Ok(self.file.read_at(bytes, offset_bytes)?)
    }

    fn explain(&self, error: std::io::Error) -> anyhow::Error {
        let outcome: std::io::Result<()> = Err(error);
        outcome.at(&self.place).expect_err("an error")
    }
}
