//! A server that passes each request on to a directory of another file system: the least that a FUSE
//! mount costs, since it has the device loop and the features of Aquifer's, and no file system of its
//! own.
//!
//! An inode has the number that it has in the other file system, and is found there by an open
//! directory and a name. A file is opened by its first `READ` or `WRITE`, as the kernel sends no
//! `OPEN`, and stays open until too many others are. What loses its name stays open for the rest of
//! its life.
//!
//! It serves one user and changes no owners on its own; access lists are not inherited.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result as Outcome};
use aquifer_fuse::wire::{
    AllocateIn, Attributes, AttributesOut, CopyIn, CopyOut, Entry, Listing, Operation, ROOT,
    ReadIn, Request, SetAttributesIn, Space, WriteIn, WriteOut, XattrOut, set,
};
use aquifer_fuse::{Answer, Delivered, Handler, Worker};
use rustix::fs::{
    self as files, AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RawDir, RawMode,
    RenameFlags, SeekFrom, Stat, Timespec, Timestamps, Uid,
};
use rustix::io::Errno;
use zerocopy::FromZeros;

type Result<T> = std::result::Result<T, Errno>;

/// How long the kernel keeps names and attributes: without end, as Aquifer's mount has it.
const VALID_S: u64 = 1 << 32;
/// The most files that are open because of their last use.
const MOST_OPEN: usize = 4096;
/// As in Aquifer's mount: a request that takes so long lets another thread read the device.
const LONG_BYTES: usize = 128 << 10;

/// The handler of the requests.
pub struct PassThrough(Mutex<Table>);

struct Table {
    nodes: HashMap<u64, Node>,
    /// Inodes that are found by a name.
    names: HashMap<Name, u64>,
    /// Those that were opened, the first first.
    opened: VecDeque<u64>,
}

/// The number of a directory, and a name in it.
type Name = (u64, Arc<[u8]>);

struct Node {
    at: At,
    lookups: u64,
    file: Option<Arc<File>>,
}

/// Where an inode is.
#[derive(Clone)]
enum At {
    /// Open: a directory, or what has lost its name.
    Open(Arc<OwnedFd>),
    /// In this open directory.
    Named(Arc<OwnedFd>, Name),
}

impl At {
    fn stat(&self) -> Result<Stat> {
        match self {
            Self::Open(file) => files::fstat(file),
            Self::Named(directory, (_, name)) => {
                files::statat(directory, &**name, AtFlags::SYMLINK_NOFOLLOW)
            }
        }
    }

    fn open(&self) -> Result<File> {
        match self {
            Self::Open(file) => Ok(File::from(file.try_clone().map_err(|_| Errno::MFILE)?)),
            Self::Named(directory, (_, name)) => {
                let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let open = |mode| files::openat(directory, &**name, flags | mode, Mode::empty());
                open(OFlags::RDWR).or_else(|_| open(OFlags::RDONLY)).map(File::from)
            }
        }
    }
}

impl PassThrough {
    /// Of this directory.
    pub fn new(directory: &Path) -> Outcome<Self> {
        // What files and directories are created with comes with the request.
        rustix::process::umask(Mode::empty());
        let root = files::open(directory, DIRECTORY, Mode::empty())
            .with_context(|| directory.display().to_string())?;
        let root = Node { at: At::Open(Arc::new(root)), lookups: 1, file: None };
        let nodes = HashMap::from([(ROOT, root)]);
        Ok(Self(Mutex::new(Table { nodes, names: HashMap::new(), opened: VecDeque::new() })))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, number: u64) -> Result<At> {
        Ok(self.table().nodes.get(&number).ok_or(Errno::STALE)?.at.clone())
    }

    fn directory(&self, number: u64) -> Result<Arc<OwnedFd>> {
        match self.at(number)? {
            At::Open(directory) => Ok(directory),
            At::Named(..) => Err(Errno::NOTDIR),
        }
    }

    fn file(&self, number: u64) -> Result<Arc<File>> {
        let at = {
            let table = self.table();
            let node = table.nodes.get(&number).ok_or(Errno::STALE)?;
            if let Some(file) = &node.file {
                return Ok(file.clone());
            }
            node.at.clone()
        };
        let file = Arc::new(at.open()?);
        self.table().keep(number, file.clone());
        Ok(file)
    }

    fn entry(&self, directory: u64, name: &[u8], file: Option<File>) -> Result<Entry> {
        let parent = self.directory(directory)?;
        let found = match &file {
            Some(file) => files::fstat(file)?,
            None => files::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?,
        };
        let number = found.st_ino;
        let mut table = self.table();
        if let Some(node) = table.nodes.get_mut(&number) {
            node.lookups += 1;
        } else {
            let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
            let at = if is_directory {
                let opened = files::openat(&parent, name, DIRECTORY, Mode::empty())?;
                At::Open(Arc::new(opened))
            } else {
                let key = (directory, Arc::from(name));
                table.names.insert(Name::clone(&key), number);
                At::Named(parent, key)
            };
            table.nodes.insert(number, Node { at, lookups: 1, file: None });
        }
        if let Some(file) = file {
            table.keep(number, Arc::new(file));
        }
        Ok(entry_of(&found))
    }

    /// Answers with an entry that the kernel then has.
    fn give(&self, answer: Answer<'_>, found: Result<Entry>, with: &[u8]) {
        match found {
            Ok(entry) if with.is_empty() => {
                if answer.value(&entry) == Delivered::ClientGone {
                    self.table().forget(entry.nodeid, 1);
                }
            }
            Ok(entry) => {
                let opened = aquifer_fuse::wire::OpenOut::new_zeroed();
                if answer.values(&entry, &opened) == Delivered::ClientGone {
                    self.table().forget(entry.nodeid, 1);
                }
            }
            Err(error) => {
                let _ = answer.error(error.raw_os_error());
            }
        }
    }

    fn set(&self, number: u64, wanted: &SetAttributesIn) -> Result<AttributesOut> {
        let at = self.at(number)?;
        let has = |flag| wanted.valid & flag != 0;
        if has(set::SIZE) {
            files::ftruncate(&self.file(number)?, wanted.size)?;
        }
        if has(set::MODE) {
            let mode = Mode::from_raw_mode(wanted.mode);
            match &at {
                At::Open(file) => files::fchmod(file, mode)?,
                At::Named(directory, (_, name)) => {
                    files::chmodat(directory, &**name, mode, AtFlags::empty())?;
                }
            }
        }
        if has(set::UID | set::GID) {
            let owner = has(set::UID).then(|| Uid::from_raw(wanted.uid));
            let group = has(set::GID).then(|| Gid::from_raw(wanted.gid));
            match &at {
                At::Open(file) => files::fchown(file, owner, group)?,
                At::Named(directory, (_, name)) => {
                    let flags = AtFlags::SYMLINK_NOFOLLOW;
                    files::chownat(directory, &**name, owner, group, flags)?;
                }
            }
        }
        if has(set::ATIME | set::ATIME_NOW | set::MTIME | set::MTIME_NOW) {
            let time = |set, now, seconds: u64, nanoseconds: u32| Timespec {
                tv_sec: seconds as i64,
                tv_nsec: match () {
                    () if has(now) => files::UTIME_NOW,
                    () if has(set) => i64::from(nanoseconds),
                    () => files::UTIME_OMIT,
                },
            };
            let times = Timestamps {
                last_access: time(set::ATIME, set::ATIME_NOW, wanted.atime, wanted.atime_nsec),
                last_modification: time(
                    set::MTIME,
                    set::MTIME_NOW,
                    wanted.mtime,
                    wanted.mtime_nsec,
                ),
            };
            match &at {
                At::Open(file) => files::futimens(file, &times)?,
                At::Named(directory, (_, name)) => {
                    files::utimensat(directory, &**name, &times, AtFlags::SYMLINK_NOFOLLOW)?;
                }
            }
        }
        self.attributes(number)
    }

    fn attributes(&self, number: u64) -> Result<AttributesOut> {
        let attributes = attributes_of(&self.at(number)?.stat()?);
        let attributes = Attributes { ino: number, ..attributes };
        Ok(AttributesOut { valid: VALID_S, valid_nsec: 0, padding: 0, attributes })
    }

    fn remove(&self, directory: u64, name: &[u8], flags: AtFlags) -> Result<()> {
        let parent = self.directory(directory)?;
        self.table().unname(directory, name)?;
        files::unlinkat(parent, name, flags)
    }

    fn rename(
        &self,
        (from, name): (u64, &[u8]),
        (to, new): (u64, &[u8]),
        flags: u32,
    ) -> Result<()> {
        let (source, target) = (self.directory(from)?, self.directory(to)?);
        let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let (old_key, new_key): (Name, Name) = ((from, name.into()), (to, new.into()));
        let mut table = self.table();
        if !flags.intersects(RenameFlags::EXCHANGE | RenameFlags::NOREPLACE) {
            table.unname(to, new)?;
        }
        files::renameat_with(&source, name, &target, new, flags)?;
        let (first, second) = (table.names.remove(&old_key), table.names.remove(&new_key));
        table.name(first, &target, new_key);
        table.name(second, &source, old_key);
        Ok(())
    }

    fn list(&self, listing: &mut Listing<'_>, number: u64, offset: u64) -> Result<()> {
        let directory = self.directory(number)?;
        let own = files::openat(directory, c".", DIRECTORY, Mode::empty())?;
        files::seek(&own, SeekFrom::Start(offset))?;
        let mut buffer = [MaybeUninit::uninit(); 32 << 10];
        let mut entries = RawDir::new(&own, &mut buffer);
        while let Some(found) = entries.next() {
            let found = found?;
            let name = found.file_name().to_bytes();
            if listing.len_bytes_of(name.len()) > listing.left_bytes() {
                break;
            }
            let plus = if listing.is_plus() && name != b"." && name != b".." {
                self.entry(number, name, None)?
            } else {
                Entry::new_zeroed()
            };
            // The constants `DT_…` are the kinds of modes without their permissions.
            let kind = (found.file_type().as_raw_mode() >> 12) as u8;
            listing.push(found.ino(), found.next_entry_cookie(), kind, name, &plus);
        }
        Ok(())
    }

    fn read_directory(
        &self,
        answer: Answer<'_>,
        out: &mut [u8],
        number: u64,
        (offset, room): (u64, u32),
        is_plus: bool,
    ) {
        let room = out.len().min(room as usize);
        let mut listing = Listing::new(&mut out[..room], is_plus);
        let listed = self.list(&mut listing, number, offset);
        let delivered = match listed {
            Ok(()) => answer.bytes(listing.bytes()),
            Err(error) => answer.error(error.raw_os_error()),
        };
        if listed.is_err() || delivered == Delivered::ClientGone {
            listing.nodes().for_each(|number| self.table().forget(number, 1));
        }
    }

    fn read<'o>(
        &self,
        number: u64,
        read: &ReadIn,
        out: &'o mut [u8],
        worker: &Worker<'_>,
    ) -> Result<&'o [u8]> {
        let file = self.file(number)?;
        let len = out.len().min(read.size as usize);
        let out = &mut out[..len];
        let got = if len < LONG_BYTES {
            file.read_at(out, read.offset)
        } else {
            worker.blocking(|| file.read_at(out, read.offset))
        };
        Ok(&out[..got.map_err(errno)?])
    }

    fn write(&self, number: u64, write: &WriteIn, data: &[u8]) -> Result<WriteOut> {
        self.file(number)?.write_all_at(data, write.offset).map_err(errno)?;
        Ok(WriteOut { size: data.len() as u32, padding: 0 })
    }

    fn sync(&self, number: u64, data_only: bool, worker: &Worker<'_>) -> Result<()> {
        let file = self.file(number)?;
        worker
            .blocking(|| if data_only { file.sync_data() } else { file.sync_all() })
            .map_err(errno)
    }

    fn copy(&self, from: u64, copy: &CopyIn, worker: &Worker<'_>) -> Result<CopyOut> {
        let (from, to) = (self.file(from)?, self.file(copy.to)?);
        let (mut source, mut target) = (copy.offset_in, copy.offset_out);
        let copied = worker.blocking(|| {
            let len = usize::try_from(copy.len).unwrap_or(usize::MAX);
            files::copy_file_range(&from, Some(&mut source), &to, Some(&mut target), len)
        })?;
        Ok(CopyOut { bytes: copied as u64 })
    }

    fn allocate(&self, number: u64, range: &AllocateIn) -> Result<()> {
        let mode = FallocateFlags::from_bits(range.mode).ok_or(Errno::OPNOTSUPP)?;
        files::fallocate(&self.file(number)?, mode, range.offset, range.len)
    }

    fn attribute(&self, answer: Answer<'_>, number: u64, name: &[u8], room: u32, out: &mut [u8]) {
        let room = out.len().min(room as usize);
        let value = match self.at(number) {
            Ok(At::Open(file)) => files::fgetxattr(&file, name, &mut out[..room]),
            Ok(At::Named(..)) => {
                // A file that is about to be written, or about to be listed: open in either case.
                self.file(number).and_then(|file| files::fgetxattr(&file, name, &mut out[..room]))
            }
            Err(error) => Err(error),
        };
        let _ = match value {
            Ok(len) if room == 0 => answer.value(&XattrOut { size: len as u32, padding: 0 }),
            Ok(len) => answer.bytes(&out[..len]),
            Err(error) => answer.error(error.raw_os_error()),
        };
    }

    fn space(&self) -> Result<Space> {
        let space = files::fstatvfs(self.directory(ROOT)?)?;
        Ok(Space {
            blocks: space.f_blocks,
            bfree: space.f_bfree,
            bavail: space.f_bavail,
            files: space.f_files,
            ffree: space.f_ffree,
            bsize: space.f_bsize as u32,
            namelen: space.f_namemax as u32,
            frsize: space.f_frsize as u32,
            ..Space::new_zeroed()
        })
    }
}

impl Table {
    fn keep(&mut self, number: u64, file: Arc<File>) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        if node.file.replace(file).is_none() {
            self.opened.push_back(number);
        }
        while self.opened.len() > MOST_OPEN {
            let oldest = self.opened.pop_front().and_then(|oldest| self.nodes.get_mut(&oldest));
            if let Some(Node { at: At::Named(..), file, .. }) = oldest {
                *file = None;
            }
        }
    }

    /// Before a name goes: what has it is found without it from then on.
    fn unname(&mut self, directory: u64, name: &[u8]) -> Result<()> {
        let Some(number) = self.names.remove(&(directory, name.into())) else { return Ok(()) };
        let Some(node) = self.nodes.get_mut(&number) else { return Ok(()) };
        let file = match node.file.take() {
            Some(file) => file,
            None => Arc::new(match node.at.open() {
                // A link, or what else cannot be opened, is not used without a name.
                Err(_) => return Ok(()),
                Ok(file) => file,
            }),
        };
        let open = file.try_clone().map_err(errno)?;
        node.at = At::Open(Arc::new(open.into()));
        node.file = Some(file);
        Ok(())
    }

    fn name(&mut self, number: Option<u64>, directory: &Arc<OwnedFd>, key: Name) {
        let Some(number) = number else { return };
        if let Some(node) = self.nodes.get_mut(&number) {
            node.at = At::Named(directory.clone(), key.clone());
            self.names.insert(key, number);
        }
    }

    fn forget(&mut self, number: u64, count: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        node.lookups = node.lookups.saturating_sub(count);
        if node.lookups > 0 || number == ROOT {
            return;
        }
        if let Some(Node { at: At::Named(_, key), .. }) = self.nodes.remove(&number)
            && self.names.get(&key) == Some(&number)
        {
            self.names.remove(&key);
        }
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

fn attributes_of(found: &Stat) -> Attributes {
    Attributes {
        ino: found.st_ino,
        size: found.st_size as u64,
        blocks: found.st_blocks as u64,
        atime: found.st_atime as u64,
        mtime: found.st_mtime as u64,
        ctime: found.st_ctime as u64,
        atime_nsec: found.st_atime_nsec as u32,
        mtime_nsec: found.st_mtime_nsec as u32,
        ctime_nsec: found.st_ctime_nsec as u32,
        mode: found.st_mode,
        nlink: found.st_nlink as u32,
        uid: found.st_uid,
        gid: found.st_gid,
        rdev: found.st_rdev as u32,
        blksize: 4096,
        flags: 0,
    }
}

fn entry_of(found: &Stat) -> Entry {
    Entry {
        nodeid: found.st_ino,
        generation: 0,
        entry_valid: VALID_S,
        attributes_valid: VALID_S,
        entry_valid_nsec: 0,
        attributes_valid_nsec: 0,
        attributes: attributes_of(found),
    }
}

fn reply(answer: Answer<'_>, result: Result<impl aquifer_fuse::wire::Bytes>) {
    let _ = match result {
        Ok(value) => answer.value(&value),
        Err(error) => answer.error(error.raw_os_error()),
    };
}

fn give_bytes(answer: Answer<'_>, result: Result<impl AsRef<[u8]>>) {
    let _ = match result {
        Ok(bytes) => answer.bytes(bytes.as_ref()),
        Err(error) => answer.error(error.raw_os_error()),
    };
}

fn done(answer: Answer<'_>, result: Result<()>) {
    let _ = match result {
        Ok(()) => answer.empty(),
        Err(error) => answer.error(error.raw_os_error()),
    };
}

impl Handler for PassThrough {
    fn handle(
        &self,
        request: &Request<'_>,
        out: &mut [u8],
        answer: Answer<'_>,
        worker: &Worker<'_>,
    ) {
        use Operation as Op;
        let node = request.node;
        let permissions = |mode: u32, umask: u32| Mode::from_raw_mode(mode & 0o7777 & !umask);
        let made = |name: &[u8], made: &dyn Fn(&OwnedFd) -> Result<()>| {
            made(&*self.directory(node)?)?;
            self.entry(node, name, None)
        };
        match request.operation {
            Op::Lookup { name } => match self.entry(node, name, None) {
                Err(Errno::NOENT) => reply(answer, Ok(Entry::none(VALID_S))),
                found => self.give(answer, found, &[]),
            },
            Op::Forget { count } => {
                answer.none();
                self.table().forget(node, count);
            }
            Op::BatchForget(ref forgets) => {
                answer.none();
                let mut table = self.table();
                forgets.clone().for_each(|forget| table.forget(forget.node, forget.count));
            }
            Op::GetAttributes => reply(answer, self.attributes(node)),
            Op::SetAttributes(ref set) => reply(answer, self.set(node, set)),
            Op::StatFs => reply(answer, self.space()),

            Op::Symlink { name, target } => {
                let link = made(name, &|directory| files::symlinkat(target, directory, name));
                self.give(answer, link, &[]);
            }
            Op::MakeNode { name, mode, umask, .. } => {
                let kind = FileType::from_raw_mode(mode as RawMode);
                let mode = permissions(mode, umask);
                let file = made(name, &|directory| files::mknodat(directory, name, kind, mode, 0));
                self.give(answer, file, &[]);
            }
            Op::MakeDirectory { name, mode, umask } => {
                let mode = permissions(mode, umask);
                let made = made(name, &|directory| files::mkdirat(directory, name, mode));
                self.give(answer, made, &[]);
            }
            Op::Link { node: linked, name } => {
                let link = made(name, &|directory| match self.at(linked)? {
                    At::Named(from, (_, old)) => {
                        files::linkat(from, &*old, directory, name, AtFlags::empty())
                    }
                    At::Open(file) => {
                        files::linkat(file, c"", directory, name, AtFlags::EMPTY_PATH)
                    }
                });
                self.give(answer, link, &[]);
            }
            Op::Create { name, flags, mode, umask } => {
                let own = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
                let flags = own | OFlags::from_bits_truncate(flags & libc::O_EXCL as u32);
                let created = self.directory(node).and_then(|directory| {
                    let mode = permissions(mode, umask);
                    let file = files::openat(directory, name, flags, mode)?;
                    self.entry(node, name, Some(file.into()))
                });
                self.give(answer, created, b"open");
            }
            Op::Unlink { name } => done(answer, self.remove(node, name, AtFlags::empty())),
            Op::RemoveDirectory { name } => {
                done(answer, self.remove(node, name, AtFlags::REMOVEDIR));
            }
            Op::Rename { name, to, new_name, flags } => {
                done(answer, self.rename((node, name), (to, new_name), flags));
            }
            Op::ReadLink => give_bytes(
                answer,
                match self.at(node) {
                    Ok(At::Named(directory, (_, name))) => {
                        files::readlinkat(directory, &*name, Vec::new()).map(|it| it.into_bytes())
                    }
                    Ok(At::Open(_)) => Err(Errno::INVAL),
                    Err(error) => Err(error),
                },
            ),
            Op::ReadDirectory { offset, room, is_plus } => {
                self.read_directory(answer, out, node, (offset, room), is_plus);
            }

            Op::Release(_) | Op::ReleaseDirectory | Op::Destroy => done(answer, Ok(())),
            Op::Read(ref read) => give_bytes(answer, self.read(node, read, out, worker)),
            Op::Write(ref write, data) => reply(answer, self.write(node, write, data)),
            Op::Sync { data_only } => done(answer, self.sync(node, data_only, worker)),
            Op::SyncDirectory => {
                let directory = self.directory(node);
                done(answer, directory.and_then(|it| worker.blocking(|| files::fsync(it))));
            }
            Op::Allocate(ref range) => {
                done(answer, worker.blocking(|| self.allocate(node, range)));
            }
            Op::CopyRange { ref range, is_64: true } => {
                reply(answer, self.copy(node, range, worker));
            }
            Op::GetXattr { name, room } => self.attribute(answer, node, name, room, out),
            Op::SetXattr { .. } | Op::ListXattr { .. } | Op::RemoveXattr { .. } => {
                done(answer, Err(Errno::OPNOTSUPP));
            }

            Op::NotifyReply => answer.none(),
            Op::Ioctl => done(answer, Err(Errno::NOTTY)),
            // Among them OPEN, OPENDIR and FLUSH, which the kernel then sends no more.
            _ => done(answer, Err(Errno::NOSYS)),
        }
    }
}

/// Serves the directory `source` at `target` until `ended` returns.
pub fn serve(source: &Path, target: &Path, ended: impl FnOnce() -> Outcome<()>) -> Outcome<()> {
    let options = aquifer_fuse::MountOptions::new().source("pass-through");
    let handler = Arc::new(PassThrough::new(source)?);
    let mount = aquifer_fuse::Mount::serve(target, &options, |_| Ok(handler))?;
    ended()?;
    // What still uses it gets errors: nothing that is measured.
    let _ = mount.unmount();
    Ok(())
}
