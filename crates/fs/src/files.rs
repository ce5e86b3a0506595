//! The files of a pool.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{InodeUse, MetadataView, OwnedPin, Pool, PoolError, Transaction};
use aquifer_vm::stitched::Stitcher;

use crate::caller::Caller;
use crate::error::{FsError, Result};
use crate::known_paths::{Known, KnownPaths, Versions};
use crate::names::Gone;
use crate::node_id::Node;
use crate::open_inodes::{OpenInode, OpenInodes, ToOpen};
use crate::transaction::{Names, now_ns};
use crate::walk::{self, Last, walk};

/// The files of an open pool. Cheap to clone; can be shared between threads.
///
/// Paths start at the root of the pool, with or without a leading slash. The methods are those of
/// [`std::fs`] and, for file systems, of [`Path`], with the same names, arguments and meaning;
/// extensions carry the name that Linux uses for them. A function of [`std::os::unix::fs`], or a
/// method of its traits, is a method of the type that it is about. `docs/files.md` lists all, and
/// what a pool does not have.
///
/// Permissions and owners are stored but not enforced: any process that can open the pool can do
/// everything in it.
///
/// # Durability
/// The effect of a call is visible to all processes at once, and survives the death of any or all
/// of them. A power cut can undo it until [`Files::sync`], or
/// [`File::sync_all`](crate::File::sync_all) of the file or directory, has returned. After a power
/// cut, names, lengths, attributes and the effects of
/// [`File::write_atomic`](crate::File::write_atomic) and
/// [`File::exchange_range`](crate::File::exchange_range) are as of one moment: never part of a
/// call, and never a later call without the earlier ones. Each byte that was overwritten in place
/// may be old or new, independently of the others, but never comes from another file or from
/// another place in this one.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// files.create_dir("/notes")?;
/// files.write("/notes/today", "begun")?;
/// assert_eq!(files.read_to_string("/notes/today")?, "begun");
/// files.sync()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Files {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub pool: Pool,
    pub opened: OpenInodes,
    pub known_paths: KnownPaths,
    /// For views of fragmented files; made at the first, because it counts the process's mappings.
    stitcher: OnceLock<Stitcher>,
    /// For whom paths create and change.
    pub caller: Caller,
}

impl fmt::Debug for Files {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Files").field("pool", &self.shared.pool).finish_non_exhaustive()
    }
}

/// How much room a pool has for files, as `statfs` reports it.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// let before = files.space()?;
/// files.create_file("/f")?.write_all_at(&[1; 8192], 0)?;
/// let after = files.space()?;
/// assert_eq!(before.free_bytes - after.free_bytes, 8192);
/// assert_eq!(before.free_slots - after.free_slots, 2); // an inode, and a node for its name
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Space {
    /// Bytes for content, used or free.
    pub total_bytes: u64,
    /// Free bytes, also those that were freed a moment ago: a call that needs them makes a checkpoint.
    /// Not those that open files without names and views keep, and in a pool that was opened
    /// read-only only those that need no checkpoint.
    pub free_bytes: u64,
    /// The longest contiguous range of bytes that are free without a checkpoint.
    pub largest_free_bytes: u64,
    /// Slots for inodes and their metadata, used or free.
    pub total_slots: u64,
    /// Free slots.
    pub free_slots: u64,
}

impl Files {
    /// The files of a pool.
    ///
    /// New files belong to the process's current effective user and group, and get permissions less
    /// its current umask.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::Files;
    /// use aquifer_pool::Pool;
    ///
    /// let path = directory.path().join("new.pool");
    /// let pool = Pool::create(&path, 1 << 20)?;
    /// let files = Files::new(pool);
    /// assert!(files.metadata("/")?.is_dir());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(pool: Pool) -> Files {
        let files = Files::without_reaping(pool);
        if files.shared.pool.is_writable() {
            files.reap_orphans();
        }
        files
    }

    /// As [`Files::new`], but leaves files without names for a later [`Files::reap_orphans`]: for a
    /// server that takes over from another one, and first opens what that had open. Another process
    /// that opens the pool for writing, or that runs out of room, frees them nevertheless; what must
    /// not be lost is handed over ([`File::give`](crate::File::give)).
    pub fn without_reaping(pool: Pool) -> Files {
        let caller = Caller::of_process(pool.is_writable());
        let shared = Shared {
            pool,
            opened: OpenInodes::default(),
            known_paths: KnownPaths::new(),
            stitcher: OnceLock::new(),
            caller,
        };
        Files { shared: Arc::new(shared) }
    }

    /// Frees the files without names that no process has open any more: processes that had them open
    /// have died, or had opened the pool read-only. [`Files::new`] and a full pool do this as well.
    /// Returns whether there was any.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// assert!(!files.reap_orphans());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reap_orphans(&self) -> bool {
        self.shared.reap_orphans()
    }

    /// Opens a pool for reading and writing, and returns its files. With other options:
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::Files;
    /// use aquifer_pool::Pool;
    ///
    /// let reader = Files::new(Pool::options().read_only(true).open(&path)?); // alongside writers
    /// files.create_file("/f")?;
    /// assert!(reader.exists("/f")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Pool::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Files> {
        Ok(Files::new(Pool::open(path)?))
    }

    /// Returns the pool.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.pool().checkpoint()?;
    /// assert_eq!(files.pool().info()?.directories, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// For whom the methods of `Files` and [`File`](crate::File) create and change: this process.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// assert!(files.caller().is_in(files.metadata("/f")?.gid()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn caller(&self) -> Caller {
        self.shared.caller.clone()
    }

    /// Returns how much room there is.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let space = files.space()?;
    /// assert!(space.largest_free_bytes <= space.free_bytes && space.free_bytes <= space.total_bytes);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`].
    pub fn space(&self) -> Result<Space> {
        const PAGE_BYTES: u64 = aquifer_pool::format::PAGE_BYTES;
        let (layout, room) = (self.shared.pool.layout(), self.shared.pool.room()?);
        Ok(Space {
            total_bytes: self.shared.pool.usable_pages() * PAGE_BYTES,
            free_bytes: (room.free_pages + room.freed_pages) * PAGE_BYTES,
            largest_free_bytes: room.largest_free_pages * PAGE_BYTES,
            total_slots: layout.slots(),
            free_slots: room.free_slots,
        })
    }

    /// Makes all earlier changes in the pool durable, by any process.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_dir("/d")?;
    /// files.sync()?; // now it survives a power cut
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`]; the pool is read-only after that.
    pub fn sync(&self) -> Result<()> {
        self.shared.sync_all()
    }
}

impl Shared {
    pub fn stitcher(&self) -> &Stitcher {
        self.stitcher.get_or_init(Stitcher::new)
    }

    /// Reads the metadata as of one moment.
    pub fn look<T>(&self, mut look: impl FnMut(&MetadataView<'_>) -> Result<T>) -> Result<T> {
        self.pool.look(|slots| look(slots))?
    }

    /// The inode that a path refers to.
    pub fn look_up(&self, path: &[u8], last: Last) -> Result<FileInode> {
        self.look(|slots| {
            let found = walk(slots, path, last)?.referent(path)?;
            walk::referred(slots, found)
        })
    }

    /// Changes names in one transaction; if inodes run out, reaps orphans and retries once.
    pub fn change<T>(
        &self,
        mut change: impl FnMut(&mut Names<'_, Transaction<'_>>) -> Result<T>,
    ) -> Result<T> {
        match self.change_once(&mut change) {
            Err(FsError::Pool(PoolError::NoFreeInode { .. })) if self.reap_orphans() => {
                self.change_once(change)
            }
            changed => changed,
        }
    }

    fn change_once<T>(
        &self,
        mut change: impl FnMut(&mut Names<'_, Transaction<'_>>) -> Result<T>,
    ) -> Result<T> {
        let now_ns = now_ns();
        // SAFETY: `Names` changes inodes of files by the rules of this crate: the runs and bytes of
        // an immutable file do not change, and the file becomes mutable only when it has no lease.
        unsafe { self.pool.try_change(Vec::new(), |slots| change(&mut Names { slots, now_ns })) }
    }

    fn open_pinned(&self, inode: ToOpen) -> Result<Arc<OpenInode>> {
        self.opened.open(inode, || self.pool.pin_inode(inode.number, InodeUse::Open))
    }

    /// Opens the file that a path is known to refer to; `None` if it may refer to another one by now.
    pub fn open_known(&self, path: &[u8]) -> Result<Option<Arc<OpenInode>>> {
        let known = self.known_paths.hash(path).and_then(|hash| self.known_paths.find(hash));
        let is_current = |known: &Known| self.pool.names_version() == known.names_version;
        // Without a run it may be a directory.
        let known = known.filter(|known| !known.run.is_empty() && is_current(known));
        let Some(known) = known else { return Ok(None) };
        self.pool.check_process()?;
        let Known { inode: number, generation, layout_version, run, .. } = known;
        // The usual read begins at the start of the file.
        self.pool.prefetch(run.bytes());
        let known_run = Some((layout_version, run));
        let open =
            self.open_pinned(ToOpen { number, generation, kind: FileKind::File, known_run })?;
        // After the pin, as in `open_inode`; and after the pin the path still refers to the file.
        let now = self.generation_and_links(number)?;
        let is_there =
            now.is_some_and(|(now, links)| now == generation && links > 0) && is_current(&known);
        if !is_there {
            self.close(open, false);
            return Ok(None);
        }
        Ok(Some(open))
    }

    /// As [`Shared::look_up`] of a path that is to be opened for reading: caches what it finds.
    pub fn look_up_to_read(&self, path: &[u8]) -> Result<FileInode> {
        let versions = Versions::of(&self.pool);
        let inode = self.look_up(path, Last::Follow)?;
        // A longer table would have to be read for that. A hole has no place.
        if let [run] = inode.runs[..]
            && inode.kind == FileKind::File
            && inode.part == 0
            && !run.is_hole()
            && let Some(hash) = self.known_paths.hash(path)
        {
            self.known_paths.learn(hash, Known::found(&inode, run, &versions, &self.pool));
        }
        Ok(inode)
    }

    /// The generation of an inode, and how many names it has; `None` if there is none.
    pub fn generation_and_links(&self, number: u64) -> Result<Option<(u64, u32)>> {
        let now = match self.pool.file_state(number) {
            Some(now) => Some(now),
            // The image is being changed, or the media cannot be read.
            None => self.look(|slots| walk::state(slots, number))?,
        };
        Ok(now.map(|now| (now.generation, now.links)))
    }

    /// Opens an inode that was just looked up; `None` if it was removed since.
    pub fn open_inode(&self, inode: &FileInode) -> Result<Option<Arc<OpenInode>>> {
        let open = self.open_pinned(inode.into())?;
        // After the pin: a process that removes the last link either sees the pin and leaves the
        // inode, or has removed the link already, which this check finds.
        let now = self.generation_and_links(inode.number)?;
        // `inode.links == 0` at lookup: the link count of a named inode is wrong. No process that
        // would reap it can have the pool open.
        let is_there = now.is_some_and(|(generation, links)| {
            generation == inode.generation && (links > 0 || inode.links == 0)
        });
        if !is_there {
            // The remover may have left the inode to this process because it saw the pin.
            self.close(open, false);
            return Ok(None);
        }
        Ok(Some(open))
    }

    /// Opens an inode that was found in an earlier call, also one without names.
    pub fn open_node(&self, inode: &FileInode) -> Result<Arc<OpenInode>> {
        let named = if inode.links > 0 { self.open_inode(inode)? } else { None };
        named.map_or_else(|| self.open_unnamed(Node::of(inode)), Ok)
    }

    /// Opens an inode that may have no names. A process that reaps such inodes looks for pins with
    /// the metadata mutex held, so the pin is set with it held as well, as when one is created; a
    /// process that cannot take it needs a handle to begin with.
    fn open_unnamed(&self, node: Node) -> Result<Arc<OpenInode>> {
        if let Some(open) = self.opened.find(node) {
            return Ok(open);
        }
        if !self.pool.is_writable() {
            return Err(node.stale());
        }
        let (inode, pin) = self.pin_unnamed(node)?;
        self.opened.open((&inode).into(), || Ok(pin))
    }

    /// Pins an inode that may have no names, with the metadata mutex held: a process that looks for
    /// pins holds it as well, and looks at them one after another, so that it could miss a pin that
    /// is set meanwhile.
    pub fn pin_unnamed(&self, node: Node) -> Result<(FileInode, OwnedPin)> {
        self.change_once(|names| {
            let inode = walk::live(names.slots, node)?;
            Ok((inode, self.pool.pin_inode(node.number, InodeUse::Open)?))
        })
    }

    /// Does the work that remains after a name was removed. The name is gone in any case: a failure
    /// here is made up for the next time room is needed.
    pub fn after(&self, gone: Gone) {
        if let Some(node) = gone.orphan {
            let _ = self.reap(node);
        }
    }

    /// Frees an inode without links, in as many transactions as needed, unless a process has it
    /// open. Returns whether it was freed.
    pub fn reap(&self, node: Node) -> Result<bool> {
        // Not what a request is about; and another process may do it.
        self.pool.without_note(|| self.reap_in_parts(node))
    }

    fn reap_in_parts(&self, node: Node) -> Result<bool> {
        let mut left = node;
        loop {
            let step = self.change_once(|names| {
                if names.slots.is_used(left.number, InodeUse::Open) {
                    Ok(None)
                } else {
                    names.reap(left).map(Some)
                }
            })?;
            match step {
                None => return Ok(false),
                Some(None) => return Ok(true),
                Some(Some(rest)) => left = rest,
            }
        }
    }

    /// Frees the inode that has this number now, if it has no names and no process has it open.
    pub fn reap_if_orphan(&self, number: u64) -> Result<bool> {
        match self.generation_and_links(number)? {
            Some((generation, 0)) => self.reap(Node { number, generation }),
            _ => Ok(false),
        }
    }

    /// Frees the files without links that no process has open any more: a process that had one open
    /// has died, or could not free it because it opened the pool read-only. Returns whether there
    /// was any.
    pub fn reap_orphans(&self) -> bool {
        let orphans = self.pool.orphans().unwrap_or_default();
        // A failure here is retried the next time room is needed.
        let reaped =
            orphans.into_iter().filter(|&number| self.reap_if_orphan(number).unwrap_or(false));
        reaped.count() > 0
    }

    /// Reserves pages; if the pool is full, reaps orphans and retries once.
    pub fn with_room<T>(
        &self,
        reserve: impl Fn() -> std::result::Result<T, PoolError>,
    ) -> std::result::Result<T, PoolError> {
        match reserve() {
            Err(PoolError::Full { .. }) if self.reap_orphans() => reserve(),
            reserved => reserved,
        }
    }

    pub fn sync_all(&self) -> Result<()> {
        self.pool.sync_data()?;
        Ok(self.pool.sync()?)
    }
}
