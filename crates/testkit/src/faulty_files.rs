//! A file system that fails: a few files in memory, served over FUSE by a thread of this process.
//!
//! Reproduces the failures of a network file system on command: reads that fail from some byte on,
//! writes that stop at some byte, syncs that fail, files that are different when reopened, and a
//! server that is dead.
//!
//! ```text
//!  the test ── map, load ──▶ kernel ── request ──▶ the serving thread ──▶ Files ◀── change ── the test
//! ```
//! The serving thread touches no file itself and holds the lock of the files only during a request,
//! so a test may fault on a mapping of these files in any thread of the same process. It must not
//! do so while it holds that lock: inside [`FaultyFiles::change`].
//!
//! The kernel caches only pages, and those only until the file is reopened, as FUSE does by
//! default. A request that includes unreadable bytes fails as a whole, as reads over a network do:
//! the kernel then requests single pages.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::OFlags;
use rustix::mount::{UnmountFlags, unmount};

/// Attributes are not cached.
const NEVER: Duration = Duration::ZERO;
const BLOCK_BYTES: u64 = 512;

/// One file, and its faults.
#[derive(Debug, Default)]
pub struct Served {
    /// Its content.
    pub content: Vec<u8>,
    /// Bytes that cannot be read, and the error for reads of them.
    pub unreadable: Option<(Range<u64>, i32)>,
    /// Bytes that cannot be written, and the error for writes to them. A `write` that begins before
    /// them ends at them.
    pub unwritable: Option<(Range<u64>, i32)>,
    /// The error of every sync.
    pub sync_error: Option<i32>,
    /// Whether reads get no answer.
    pub is_silent: bool,
    /// Total bytes of all writes so far.
    pub written_bytes: u64,
    /// Number of changes so far; the file's times are derived from it.
    changes: u64,
}

/// The state that the serving thread and the test share.
#[derive(Debug, Default)]
struct Files {
    served: BTreeMap<INodeNo, (String, Served)>,
    /// Reads that are left unanswered.
    unanswered: Vec<ReplyData>,
}

#[derive(Debug, Default)]
struct Shared {
    files: Mutex<Files>,
    read_came: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A mounted file system. Unmounted when dropped, even if in use.
pub struct FaultyFiles {
    at: PathBuf,
    shared: Arc<Shared>,
    session: Option<BackgroundSession>,
    /// Keeps the file system mounted after its server is gone.
    root: Option<File>,
}

impl FaultyFiles {
    /// Mounts files with these names and contents.
    ///
    /// Those of the system. An unprivileged user needs `fusermount3`, or a user namespace and a
    /// `/dev/fuse` that is accessible to all users.
    pub fn mount(at: &Path, files: &[(&str, &[u8])]) -> io::Result<FaultyFiles> {
        let shared = Arc::new(Shared::default());
        let numbered = files.iter().zip(INodeNo::ROOT.0 + 1..);
        shared.lock().served = numbered
            .map(|((name, content), number)| {
                let served = Served { content: content.to_vec(), ..Served::default() };
                (INodeNo(number), ((*name).to_owned(), served))
            })
            .collect();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("aquifer-faulty-files".to_owned())];
        let session = fuser::spawn_mount(Server { shared: shared.clone() }, at, &config)?;
        Ok(FaultyFiles { at: at.to_owned(), shared, session: Some(session), root: None })
    }

    /// Returns the path of a file.
    pub fn path(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    /// Changes a file without notifying the kernel.
    ///
    /// # Panics
    /// If there is no file of this name.
    pub fn change<T>(&self, name: &str, change: impl FnOnce(&mut Served) -> T) -> T {
        let mut files = self.shared.lock();
        let found = files.served.values_mut().find(|(known, _)| known == name);
        let served = &mut found.expect("one of the files that were mounted").1;
        served.changes += 1;
        change(served)
    }

    /// Returns the content of a file, as the server has it.
    pub fn content(&self, name: &str) -> Vec<u8> {
        self.change(name, |file| file.content.clone())
    }

    /// Waits until a read has been received that gets no answer.
    pub fn wait_for_unanswered_read(&self) {
        let files = self.shared.lock();
        let waited = self.shared.read_came.wait_while(files, |files| files.unanswered.is_empty());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Stops the server, as if it had been killed: pending and future requests fail with `ENOTCONN`
    /// or `ECONNABORTED`, and the mount stays.
    ///
    /// # Errors
    /// Those of the system.
    pub fn hang_up(&mut self) -> io::Result<()> {
        let path_only = OFlags::PATH.bits() as i32;
        self.root = Some(OpenOptions::new().read(true).custom_flags(path_only).open(&self.at)?);
        match unmount(&self.at, UnmountFlags::FORCE) {
            // The flag forces the connection to end; a file system in use is not unmounted.
            Err(rustix::io::Errno::BUSY) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(()) => Err(io::Error::other("unmounted although it was in use")),
        }
    }
}

impl Drop for FaultyFiles {
    fn drop(&mut self) {
        self.root = None;
        // Also ends the connection, so that neither a thread nor the server stays blocked on it.
        let _ = unmount(&self.at, UnmountFlags::FORCE | UnmountFlags::DETACH);
        if let Some(session) = self.session.take() {
            let _ = session.umount_and_join();
        }
    }
}

/// Answers the kernel's requests.
struct Server {
    shared: Arc<Shared>,
}

impl Served {
    fn attributes(&self, number: INodeNo) -> FileAttr {
        let at = UNIX_EPOCH + Duration::from_secs(1 + self.changes);
        attributes(number, FileType::RegularFile, self.content.len() as u64, at)
    }

    fn read(&self, from: u64, len_bytes: u64) -> Result<&[u8], Errno> {
        let len = self.content.len() as u64;
        let wanted = from.min(len)..from.saturating_add(len_bytes).min(len);
        match &self.unreadable {
            Some((bytes, errno)) if overlap(bytes, &wanted) => Err(Errno::from_i32(*errno)),
            _ => Ok(&self.content[wanted.start as usize..wanted.end as usize]),
        }
    }

    /// Writes as much as possible. The kernel's write-back is written completely or not at all,
    /// because the kernel ignores a short result of it.
    fn write(&mut self, from: u64, data: &[u8], is_write_back: bool) -> Result<u32, Errno> {
        let mut wanted = from..from + data.len() as u64;
        if let Some((bytes, errno)) = &self.unwritable
            && overlap(bytes, &wanted)
        {
            if bytes.start <= from || is_write_back {
                return Err(Errno::from_i32(*errno));
            }
            wanted.end = bytes.start;
        }
        if self.content.len() < wanted.end as usize {
            self.content.resize(wanted.end as usize, 0);
        }
        let len = (wanted.end - wanted.start) as usize;
        self.content[wanted.start as usize..wanted.end as usize].copy_from_slice(&data[..len]);
        self.written_bytes += len as u64;
        self.changes += 1;
        Ok(len as u32)
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

fn attributes(ino: INodeNo, kind: FileType, size: u64, at: SystemTime) -> FileAttr {
    FileAttr {
        ino,
        size,
        blocks: size.div_ceil(BLOCK_BYTES),
        atime: at,
        mtime: at,
        ctime: at,
        crtime: at,
        kind,
        perm: if kind == FileType::Directory { 0o755 } else { 0o644 },
        nlink: 1,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Server {
    /// Runs `act` on a file, or fails if there is none.
    fn with<T>(
        &self,
        number: INodeNo,
        act: impl FnOnce(&mut Served) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut files = self.shared.lock();
        let (_, served) = files.served.get_mut(&number).ok_or(Errno::ENOENT)?;
        act(served)
    }

    fn done(outcome: Result<(), Errno>, reply: ReplyEmpty) {
        match outcome {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }
}

impl Filesystem for Server {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let files = self.shared.lock();
        match files.served.iter().find(|(_, (known, _))| OsStr::new(known) == name) {
            Some((&number, (_, served))) => {
                reply.entry(&NEVER, &served.attributes(number), Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        if number == INodeNo::ROOT {
            return reply.attr(&NEVER, &attributes(number, FileType::Directory, 0, UNIX_EPOCH));
        }
        match self.with(number, |served| Ok(served.attributes(number))) {
            Ok(found) => reply.attr(&NEVER, &found),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        number: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changed = self.with(number, |served| {
            if let Some(len_bytes) = size {
                served.content.resize(len_bytes as usize, 0);
                served.changes += 1;
            }
            Ok(served.attributes(number))
        });
        match changed {
            Ok(changed) => reply.attr(&NEVER, &changed),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, _request: &Request, _number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut files = self.shared.lock();
        let Some((_, served)) = files.served.get(&number) else {
            return reply.error(Errno::ENOENT);
        };
        if served.is_silent {
            files.unanswered.push(reply);
            self.shared.read_came.notify_all();
            return;
        }
        match served.read(offset, u64::from(size)) {
            Ok(bytes) => reply.data(bytes),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let is_write_back = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        match self.with(number, |served| served.write(offset, data, is_write_back)) {
            Ok(len_bytes) => reply.written(len_bytes),
            Err(errno) => reply.error(errno),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _number: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        let synced = self.with(number, |served| match served.sync_error {
            Some(errno) => Err(Errno::from_i32(errno)),
            None => Ok(()),
        });
        Self::done(synced, reply);
    }

    fn fallocate(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        _mode: i32,
        reply: ReplyEmpty,
    ) {
        let allocated = self.with(number, |served| {
            let bytes = offset..offset.saturating_add(length);
            if let Some((unwritable, errno)) = &served.unwritable
                && overlap(unwritable, &bytes)
            {
                return Err(Errno::from_i32(*errno));
            }
            let len = served.content.len().max(bytes.end as usize);
            served.content.resize(len, 0);
            served.changes += 1;
            Ok(())
        });
        Self::done(allocated, reply);
    }
}
