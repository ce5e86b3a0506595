//! An open file: reading and writing it without system calls.
//!
//! # Reading
//! Takes no lock. A reader takes the size and the layout version from the inode and the pages from
//! the table of that version, copies the bytes, and checks the layout version again. If it has
//! changed, the pages may have been freed during the copy, and the reader retries. While bytes are
//! overwritten in place, a reader may see the old value in one aligned eight-byte word and the new
//! value in the next.
//!
//! # Writing
//! A file has one writer at a time ([`Pool::lock_file`](aquifer_pool::Pool::lock_file)), across all
//! processes. Bytes inside both the file's pages and its size are copied in place. Everything else
//! goes to new pages: they are reserved, filled, and linked to the file in one transaction together
//! with the new size. So readers see all of it or nothing, and a process that dies in between
//! leaves nothing behind. If that takes more pieces of the pool than can be reserved at a time, it
//! is done front to back, in several transactions.
//!
//! # Beyond the end of the file
//! Bytes of a file's pages beyond its size are undefined: they may be left over from an earlier
//! owner of the page. So a writer that raises the size first writes all bytes that come to lie
//! inside ([`write`]), and declares them in the transaction
//! ([`Transaction::expose`](aquifer_pool::Transaction::expose)): if the size survives a power cut,
//! so do these bytes.

mod atomic;
mod attributes;
mod copy;
mod flags;
mod lock;
mod read;
mod runs;
mod space;
mod std_io;
mod write;
mod written;

use std::fmt;
use std::fs::Permissions;
use std::ops::{Bound, Range, RangeBounds};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use arc_swap::Guard;

use aquifer_format::file_table::{FileBytes, FileTable};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{AdvisoryLocks, PoolError, ReadSlots};

pub(crate) use flags::OpenFlags;
pub use lock::HeldRange;
#[cfg(all(test, loom))]
pub(crate) use read::copy_of_one_layout;
pub use runs::{Defragmented, FileRun};
pub use space::FallocateMode;
pub(crate) use write::Write;
pub use write::{At, WriteHow};
pub use written::Written;

use crate::error::{FsError, Result};
use crate::files::Files;
use crate::metadata::{FileTimes, Metadata, SetAttributes};
use crate::node_id::Node;
use crate::open_inodes::{OpenInode, SyncedState};
use crate::walk;

/// An open file, or a directory open for its metadata. Can be shared between threads.
///
/// A clone is the same open file and shares its position. The file exists as long as a handle is
/// open, whatever happens to its names.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use std::io::{Read, Seek, Write};
///
/// let mut file = files.create_new_file("/f")?;
/// file.write_all(b"some text")?;
/// file.seek_relative(-4)?;
/// let mut text = String::new();
/// file.read_to_string(&mut text)?;
/// assert_eq!(text, "text");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct File {
    opened: Arc<Opened>,
}

struct Opened {
    files: Files,
    /// `Some` until it is closed.
    inode: Option<Arc<OpenInode>>,
    flags: OpenFlags,
    /// For calls that continue where the last one ended.
    position: AtomicU64,
    /// Created at the first lock or lock query.
    locks: OnceLock<AdvisoryLocks>,
}

impl fmt::Debug for File {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("File").field("inode", &self.inode().number).finish_non_exhaustive()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Before the inode is closed, while its number still belongs to the file.
        drop(self.locks.take());
        let Some(inode) = self.inode.take() else { return };
        self.files.shared.close(inode, self.flags.writes());
    }
}

impl File {
    pub(crate) fn new(files: Files, inode: Arc<OpenInode>, flags: OpenFlags) -> File {
        let (inode, position) = (Some(inode), AtomicU64::new(0));
        let locks = OnceLock::new();
        File { opened: Arc::new(Opened { files, inode, flags, position, locks }) }
    }

    pub(crate) fn files(&self) -> &Files {
        &self.opened.files
    }

    pub(crate) fn inode(&self) -> &OpenInode {
        self.opened.inode.as_ref().expect("there until it is dropped")
    }

    pub(crate) fn flags(&self) -> OpenFlags {
        self.opened.flags
    }

    pub(crate) fn position(&self) -> &AtomicU64 {
        &self.opened.position
    }

    pub(crate) fn check_reads(&self) -> Result<()> {
        match (self.opened.flags.read, self.inode().kind) {
            (true, FileKind::File) => Ok(()),
            (true, FileKind::Directory) => Err(FsError::IsADirectory { path: self.as_path() }),
            (true, _) => Err(FsError::Special { path: self.as_path() }),
            (false, _) => Err(FsError::NotOpenFor { what: "reading" }),
        }
    }

    pub(crate) fn check_writes(&self) -> Result<()> {
        match (self.opened.flags.writes(), self.inode().kind) {
            (true, FileKind::File) => Ok(()),
            (true, _) => Err(FsError::NotAFile { path: self.as_path() }),
            (false, _) => Err(FsError::NotOpenFor { what: "writing" }),
        }
    }

    pub(crate) fn as_path(&self) -> std::path::PathBuf {
        self.node().to_path()
    }

    /// Returns its inode number and generation: see [`Nodes`](crate::node::Nodes).
    pub fn node(&self) -> Node {
        self.inode().node()
    }

    /// Whether the file may have room to grow into, which is given back when this process closes its last
    /// handle for writing: until then [`Metadata::blocks`] counts it.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 16 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// assert!(!file.has_room_ahead());
    /// for part in 0..100 {
    ///     file.write_all_at(&[1; 4096], part * 4096)?;
    /// }
    /// assert!(file.has_room_ahead() && file.metadata()?.blocks() > 800);
    /// drop(file);
    /// assert_eq!(files.metadata("/f")?.blocks(), 800);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn has_room_ahead(&self) -> bool {
        self.inode().was_given_ahead()
    }

    /// Returns another handle of the same open file, with the same position: a clone. As
    /// [`std::fs::File::try_clone`].
    ///
    /// # Errors
    /// None.
    pub fn try_clone(&self) -> Result<File> {
        Ok(self.clone())
    }

    /// Returns the current metadata of the file. As [`std::fs::File::metadata`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.write_all_at(&[1; 100], 0)?;
    /// assert_eq!(file.metadata()?.len(), 100);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`].
    pub fn metadata(&self) -> Result<Metadata> {
        self.files().shared.load_inode(self.inode()).map(Metadata::of)
    }

    /// Sets the permissions. As [`std::fs::File::set_permissions`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::fs::Permissions;
    /// use std::os::unix::fs::PermissionsExt;
    ///
    /// let file = files.create_file("/f")?;
    /// file.set_permissions(Permissions::from_mode(0o600))?;
    /// assert_eq!(file.metadata()?.mode() & 0o777, 0o600);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Immutable`], [`FsError::Pool`].
    pub fn set_permissions(&self, permissions: Permissions) -> Result<()> {
        self.set(SetAttributes::new().mode(permissions.mode()))
    }

    /// Sets times. As [`std::fs::File::set_times`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::time::SystemTime;
    ///
    /// use aquifer_fs::FileTimes;
    ///
    /// let file = files.create_file("/f")?;
    /// file.set_times(FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH))?;
    /// assert_eq!(file.metadata()?.accessed()?, SystemTime::UNIX_EPOCH);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::set_permissions`].
    pub fn set_times(&self, times: FileTimes) -> Result<()> {
        self.set(SetAttributes::new().times(times))
    }

    /// Sets the time of the last modification. As [`std::fs::File::set_modified`].
    ///
    /// # Errors
    /// As for [`File::set_permissions`].
    pub fn set_modified(&self, time: SystemTime) -> Result<()> {
        self.set_times(FileTimes::new().set_modified(time))
    }

    fn set(&self, what: SetAttributes) -> Result<()> {
        let (own, shared) = (self.inode(), &self.files().shared);
        shared.change(|names| {
            let inode = own.read(names.slots)?;
            names.set(inode, &what, &shared.caller, || self.as_path()).map(drop)
        })
    }

    /// Makes the content of the file durable, and all earlier changes in the pool. As
    /// [`std::fs::File::sync_all`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.write_all_at(b"text", 0)?;
    /// file.sync_all()?; // now content and name survive a power cut
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`]; the data may be durable or not, and the pool is read-only after that.
    pub fn sync_all(&self) -> Result<()> {
        self.sync_range(.., Synced::All)
    }

    /// Makes a range of the content durable: with [`Synced::All`] all earlier changes in the pool as
    /// well, as [`File::sync_all`] does; with [`Synced::Data`] only what is needed to read the range,
    /// as `fdatasync` does.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::Synced;
    ///
    /// let file = files.create_file("/f")?;
    /// file.write_all_at(&[1; 100_000], 0)?;
    /// file.sync_all()?;
    /// file.write_all_at(&[2; 100], 50_000)?;
    /// file.sync_range(50_000..50_100, Synced::Data)?; // writes one page
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::sync_all`].
    pub fn sync_range(&self, range: impl RangeBounds<u64>, what: Synced) -> Result<()> {
        let (own, pool) = (self.inode(), &self.files().shared.pool);
        if own.kind != FileKind::File {
            return Ok(pool.sync()?);
        }
        let (inode, table) = self.files().shared.table(own)?;
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => u64::MAX,
        };
        // Also behind the end of the file: a view may have stored there.
        let end = end.min(table.pages() * PAGE_BYTES);
        let range = FileBytes { offset_bytes: start, len_bytes: end.saturating_sub(start) };
        let ranges: Vec<_> = table.pieces(range).filter_map(|piece| piece.pool).collect();
        let state =
            SyncedState { layout_version: inode.layout_version, size_bytes: inode.size_bytes };
        if what == Synced::Data && own.is_synced(state) {
            return Ok(pool.make_durable(&ranges)?);
        }
        pool.sync_with(&ranges)?;
        own.note_synced(state);
        Ok(())
    }

    /// A hint that [`File::sync_range`] of this range will come soon: the media begin with it, and
    /// nothing waits. What goes wrong is an error of the sync.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.write_all_at(&[1; 4096], 0)?;
    /// file.begin_sync(0..4096); // the disk writes while the program prepares what comes next
    /// file.sync_all()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn begin_sync(&self, range: Range<u64>) {
        let Ok((_, table)) = self.files().shared.table(self.inode()) else { return };
        let len_bytes = range.end.saturating_sub(range.start);
        let pieces = table.pieces(FileBytes { offset_bytes: range.start, len_bytes });
        for range in pieces.filter_map(|piece| piece.pool) {
            self.files().shared.pool.begin_write_back(range);
        }
    }

    /// As [`File::sync_all`]: the pool has one log, so no metadata can be left out.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.write_all_at(b"text", 0)?;
    /// file.sync_data()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::sync_all`].
    pub fn sync_data(&self) -> Result<()> {
        self.sync_all()
    }
}

/// What a [sync](File::sync_range) of a file makes durable besides its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Synced {
    /// What is needed to read the content: nothing, if neither the length of the file nor its pages have
    /// changed since they were made durable through this process's handles of it.
    Data,
    /// All earlier changes in the pool, of any process.
    All,
}

impl OpenInode {
    pub fn node(&self) -> Node {
        Node { number: self.number, generation: self.generation }
    }

    /// Reads the current inode. A file exists as long as it is open. A directory does not: once
    /// removed, it has nothing left to read.
    pub fn read(&self, slots: &impl ReadSlots<Error = PoolError>) -> Result<FileInode> {
        match walk::inode(slots, self.number) {
            Ok(inode) if inode.generation == self.generation => Ok(inode),
            _ if self.kind == FileKind::Directory => {
                Err(FsError::NotFound { path: format!("(inode {})", self.number).into() })
            }
            Ok(_) => Err(FsError::Damaged {
                structure: format!("inode {}", self.number),
                reason: "it was removed while it was open".to_owned(),
            }),
            Err(error) => Err(error),
        }
    }
}

impl crate::files::Shared {
    /// Closes a handle. Cleanup that fails here is done the next time the pool is opened.
    pub fn close(&self, open: Arc<OpenInode>, was_written: bool) {
        if !self.pool.is_writable() {
            return;
        }
        let number = open.number;
        if was_written && open.kind == FileKind::File {
            let _ = self.close_written(&open);
        }
        if !self.opened.close(open) {
            return;
        }
        // The number of a removed directory may now belong to another inode, which this handle's pin
        // kept from being freed.
        let _ = self.reap_if_orphan(number);
    }

    /// Reads the current inode of an open file.
    pub fn load_inode(&self, open: &OpenInode) -> Result<FileInode> {
        self.look(|slots| open.read(slots))
    }

    /// Reads the inode and the table of an open file, as of one moment.
    pub fn table(&self, open: &OpenInode) -> Result<(FileInode, Arc<FileTable>)> {
        let known = open.table();
        let (inode, table) = self.look(|slots| {
            let inode = open.read(slots)?;
            let table = match &known {
                Some(known) if known.is_current(&inode) => None,
                _ => Some(FileTable::load(&inode, slots)?),
            };
            Ok((inode, table))
        })?;
        let table = match table {
            Some(table) => {
                let table = Arc::new(table);
                open.set_table(table.clone());
                table
            }
            None => Guard::into_inner(known.expect("it is the current one")),
        };
        Ok((inode, table))
    }
}
