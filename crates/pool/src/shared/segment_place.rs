//! Where segments lie, and how a process verifies that it has the right one.
//!
//! # Proof
//! A user that may read a pool can lock it as its processes do, and can create files of any name
//! and content in `/dev/shm`. So neither name nor content proves that a segment belongs to the
//! pool. The proof rests on two facts: only writers can change the superblock, and only the kernel
//! chooses the inode number and birth time of a file:
//!
//! ```text
//!   id in the superblock      owner, 64 bits │ identity, 64 bits
//!                                 │                │
//!   XXH3(pool uuid, device and inode of the pool)  │
//!   SHA-256(pool uuid, device, inode and birth time of the segment, start of the machine), its first 64 bits
//! ```
//!
//! 1. The first writer creates the segment under a temporary name, because the id is known only
//!    once the file exists.
//! 2. It stores the identity of the pins, computed in the same way, in the segment.
//! 3. It renames the segment to the name that the id gives, and the superblock names it.
//! 4. A process that joins opens the file of that name, computes the identity from the
//!    *descriptor*, and maps the file only if the identity is the one in the id; then the pins, in
//!    the same way. Anything else counts as absent.
//!
//! To forge a segment a user would need a file whose numbers hash to the 64 bits of the id: the
//! kernel chooses the numbers, so each file that the user creates is one attempt in 2^64. A file
//! that existed before, or of an earlier start of the machine, has other numbers.
//!
//! Another user may see the new file, compute its id, and create a file of that name first. Then
//! the process creates another new file, up to a limit of attempts.
//!
//! *Memory or disk.* The start of the machine is part of the identity only where files outlive it.
//! In memory (tmpfs) they do not, so a process without `/proc`, or in a container with a different
//! boot id, can join.
//!
//! *No birth time.* Some file systems have none. An inode number alone can be reused, so there the
//! owner of the file must be root, the process's own user or the pool's owner.
//!
//! *Age.* A genuine segment may still be older than what the media hold, if all its processes died
//! and the page cache was lost ([`life`](crate::shared::life)), or older than what its processes stored to
//! it, if it lies on a disk whose page cache was lost. It is joined if one of its writers lives,
//! shown by a lock that only a writer can hold, or if both caches, of the pool and of the segment,
//! are unchanged.
//!
//! # Failures recorded by dead processes
//! Processes that get an error about lost bytes record it in the superblocks. If these cannot be
//! written, only the segment records it. So the segment that the superblock names is kept until
//! superblocks are written that name another one, or none; and if it cannot be found, verified and
//! read, or has lost its cache, it counts as one that records lost bytes ([`left_whole`]).
//!
//! # Places
//! A segment is created in the directory of
//! [`PoolOptions::segment_directory`](crate::PoolOptions::segment_directory), by default
//! `/dev/shm`. A process searches that directory, `/dev/shm` and the pool's own directory: by the
//! proof above it does not matter where it finds the segment. Files left by dead processes are
//! removed from all three.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use aquifer_sys::shared_memory::{self, SharedMemory, SharedMemoryError};
use aquifer_sys::{boot, credentials, file_system};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::error::{PoolError, Result};
use crate::format::checksum;
use crate::format::superblock::Superblock;
use crate::media::Media;
use crate::random::new_uuid;
use crate::shared::segment::Segment;

const NAME_START: &str = "aquifer-";
const PINS_END: &str = "-pins";
const NEW_END: &str = "-new";
/// The suffixes after the id in the names of a segment's files. The segment itself is removed last.
const ENDS: [&str; 3] = ["", NEW_END, PINS_END];

/// The user id that the kernel reports for users that a user namespace does not map: it may be any
/// user.
const UNKNOWN_USER: u32 = 65534;

/// Identifies the pool that a segment belongs to: the first half of the number in its name. It
/// tells this pool's segments from others even if the creator died while the segment was still
/// empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner(u64);

impl Owner {
    /// The owner for the pool with this uuid in this file: a copy of the file has the same uuid,
    /// and names the same segment.
    pub fn new(pool: Uuid, file: BorrowedFd<'_>) -> io::Result<Owner> {
        let metadata = metadata(file)?;
        let (device, number) = match metadata.rdev() {
            0 => (metadata.dev(), metadata.ino()),
            device => (0, device),
        };
        let parts: [&[u8]; 3] = [pool.as_bytes(), &device.to_le_bytes(), &number.to_le_bytes()];
        Ok(Owner(checksum(&parts)))
    }

    /// The temporary id of a new segment.
    pub fn new_id(self) -> Result<Uuid> {
        Ok(self.id(new_uuid()?.as_u64_pair().1))
    }

    /// The id of the segment with this identity.
    pub fn id(self, identity: u64) -> Uuid {
        Uuid::from_u64_pair(self.0, identity)
    }

    fn has(self, id: Uuid) -> bool {
        id.as_u64_pair().0 == self.0
    }
}

fn metadata(file: BorrowedFd<'_>) -> io::Result<std::fs::Metadata> {
    File::from(file.try_clone_to_owned()?).metadata()
}

/// The purpose of a file of shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Segment,
    Pins,
}

/// What distinguishes a file from all others.
#[derive(Debug, Clone, Copy)]
struct Identity {
    hash: u64,
    has_birth_time: bool,
    uid: u32,
}

/// Why a file is rejected.
enum Doubt {
    /// It is not the expected file.
    Other(String),
    /// Its owner is not trusted.
    Owner(u32),
}

impl Identity {
    fn of(file: BorrowedFd<'_>, pool: Uuid, part: Part) -> io::Result<Identity> {
        // SAFETY: all-zero is a valid `statx`.
        let mut status: libc::statx = unsafe { std::mem::zeroed() };
        let mask = libc::STATX_TYPE | libc::STATX_INO | libc::STATX_UID | libc::STATX_BTIME;
        let (fd, flags) = (file.as_raw_fd(), libc::AT_EMPTY_PATH);
        // SAFETY: the empty path with AT_EMPTY_PATH names the descriptor; `status` outlives the
        // call.
        let asked = unsafe { libc::statx(fd, c"".as_ptr(), flags, mask, &raw mut status) };
        if asked != 0 {
            return Err(io::Error::last_os_error());
        }
        if u32::from(status.stx_mode) & libc::S_IFMT != libc::S_IFREG {
            return Err(io::Error::other("it is no file"));
        }
        let boot = match file_system::in_memory(file_system::magic(file)?) {
            Some(_) => 0,
            None => match boot::id() {
                0 => return Err(io::Error::other(WITHOUT_PROC)),
                boot => boot,
            },
        };
        let has_birth_time = status.stx_mask & libc::STATX_BTIME != 0;
        let born = status.stx_btime;
        let label: &[u8] = match part {
            Part::Segment => b"aquifer segment",
            Part::Pins => b"aquifer pins",
        };
        let numbers = [
            boot,
            libc::makedev(status.stx_dev_major, status.stx_dev_minor),
            status.stx_ino,
            if has_birth_time { born.tv_sec as u64 } else { 0 },
            if has_birth_time { born.tv_nsec.into() } else { u64::MAX },
        ];
        let mut hash = Sha256::new().chain_update(label).chain_update(pool.as_bytes());
        numbers.iter().for_each(|number| hash.update(number.to_le_bytes()));
        let hash = *hash.finalize().first_chunk().expect("32 bytes");
        Ok(Identity { hash: u64::from_le_bytes(hash), has_birth_time, uid: status.stx_uid })
    }

    /// Checks that it is the wanted file, beyond doubt.
    fn check(&self, wanted: u64, pool_file: BorrowedFd<'_>) -> std::result::Result<(), Doubt> {
        if self.hash != wanted {
            return Err(Doubt::Other(
                "what has its name is another file than the pool's processes have made".to_owned(),
            ));
        }
        let pool_owner = metadata(pool_file).map(|metadata| metadata.uid());
        let trusted = [Some(0), Some(credentials::effective().uid), pool_owner.ok()];
        if self.has_birth_time || (self.uid != UNKNOWN_USER && trusted.contains(&Some(self.uid))) {
            Ok(())
        } else {
            Err(Doubt::Owner(self.uid))
        }
    }
}

const WITHOUT_PROC: &str = "it is on a disk, and without /proc/sys/kernel/random/boot_id it cannot be told from one that an earlier start of \
     the machine left; use a directory in memory, or mount /proc";

/// The action in the error for a new segment whose name was taken.
pub(crate) const NAME: &str = "name";

/// The half of an id that is its segment's identity.
pub(crate) fn identity_in(id: Uuid) -> u64 {
    id.as_u64_pair().1
}

/// The identity of a file that this process has just created.
pub(crate) fn identity_of(file: BorrowedFd<'_>, pool: Uuid, part: Part) -> Result<u64> {
    Identity::of(file, pool, part).map(|identity| identity.hash).map_err(|source| {
        PoolError::SharedMemory(SharedMemoryError::System {
            action: "identify",
            name: "of the pool".to_owned(),
            source,
        })
    })
}

/// Returns an error unless a file has this identity.
pub(crate) fn verify(
    file: BorrowedFd<'_>,
    pool: Uuid,
    part: Part,
    wanted: u64,
    media: &dyn Media,
) -> Result<()> {
    let identity = Identity::of(file, pool, part);
    let checked = match identity {
        Ok(identity) => identity.check(wanted, media.file()),
        Err(error) => Err(Doubt::Other(error.to_string())),
    };
    checked.map_err(|doubt| {
        let path = media.path().to_path_buf();
        match doubt {
            Doubt::Other(reason) => PoolError::BusyElsewhere { path, reason },
            Doubt::Owner(uid) => PoolError::UnknownSegment { path, uid },
        }
    })
}

/// The directories in which segments of a pool may lie. New ones are created in the first.
#[derive(Debug, Clone)]
pub(crate) struct Places(Vec<PathBuf>);

impl Places {
    /// The places of the pool at a path.
    pub fn new(chosen: Option<&Path>, pool: &Path) -> Places {
        let of_system = Path::new(shared_memory::DIRECTORY);
        let beside = match pool.parent() {
            Some(directory) if directory.as_os_str().is_empty() => Some(Path::new(".")),
            directory => directory,
        };
        let all = [Some(chosen.unwrap_or(of_system)), Some(of_system), beside];
        let mut directories: Vec<PathBuf> = Vec::new();
        // Absolute: the process may change its working directory before it closes the pool.
        for directory in all.into_iter().flatten().flat_map(std::path::absolute) {
            if !directories.contains(&directory) {
                directories.push(directory);
            }
        }
        Places(directories)
    }

    /// The path of a new segment under its temporary id.
    pub fn of_new(&self, id: Uuid) -> PathBuf {
        self.0[0].join(format!("{}{NEW_END}", name(id)))
    }

    /// The path of a new segment, or of its pins, under its id.
    pub fn of_made(&self, id: Uuid, part: Part) -> PathBuf {
        self.0[0].join(name_of(id, part))
    }

    /// Renames a new segment to the name that its id gives.
    pub fn name_made(&self, new_id: Uuid, id: Uuid) -> Result<()> {
        let path = self.of_made(id, Part::Segment);
        std::fs::rename(self.of_new(new_id), &path).map_err(|source| {
            PoolError::SharedMemory(SharedMemoryError::System {
                action: NAME,
                name: path.display().to_string(),
                source,
            })
        })
    }

    /// Opens the file that has the name of a segment or its pins, if it has this identity and
    /// belongs to this pool.
    pub fn open(
        &self,
        id: Uuid,
        part: Part,
        wanted: u64,
        pool: Uuid,
        media: &dyn Media,
        writable: bool,
    ) -> Result<SharedMemory> {
        let elsewhere = |error: SharedMemoryError| PoolError::BusyElsewhere {
            path: media.path().to_path_buf(),
            reason: error.to_string(),
        };
        let mut first_error = None;
        for directory in &self.0 {
            let path = directory.join(name_of(id, part));
            let opened = match SharedMemory::descriptor_at(&path, writable) {
                Ok(file) => verify(file.as_fd(), pool, part, wanted, media)
                    .and_then(|()| SharedMemory::adopt(file, writable).map_err(elsewhere)),
                Err(SharedMemoryError::Missing { .. }) => continue,
                Err(error) => Err(elsewhere(error)),
            };
            match opened {
                Ok(memory) => return Ok(memory),
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        Err(first_error.unwrap_or_else(|| {
            let places: Vec<_> = self.0.iter().map(|place| place.display().to_string()).collect();
            PoolError::BusyElsewhere {
                path: media.path().to_path_buf(),
                reason: format!("there is no {} in {}", name_of(id, part), places.join(", ")),
            }
        }))
    }

    /// Whether any file of a segment exists.
    pub fn has_any(&self, id: Uuid) -> bool {
        let paths = |directory: &PathBuf| ENDS.map(|end| directory.join(name(id) + end));
        !id.is_nil() && self.0.iter().flat_map(paths).any(|path| path.symlink_metadata().is_ok())
    }

    /// Removes the names of a segment and of its pins, if there are any.
    pub fn remove(&self, id: Uuid) {
        if !id.is_nil() {
            self.0.iter().for_each(|directory| remove_in(directory, id));
        }
    }

    /// Finds segments of this pool in this file. When no process has the pool open, they were left
    /// by processes that died, perhaps before they were complete; those of a copy of the file are
    /// not among them.
    ///
    /// `named` is the segment that the superblock names. The pool's own directory, which may be
    /// large, is searched only for that one, unless segments are created there.
    pub fn left_by(&self, owner: Owner, named: Uuid, pool: Uuid) -> Vec<Left> {
        let of_system = Path::new(shared_memory::DIRECTORY);
        let mut left = Vec::new();
        for (index, directory) in self.0.iter().enumerate() {
            let mut ids = Vec::new();
            if index == 0 || directory == of_system {
                let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
                ids.extend(entries.filter_map(|entry| id_in(entry.file_name().to_str()?)));
                ids.retain(|id| owner.has(*id));
            }
            if !named.is_nil() && (owner.has(named) || is_stale(directory, named, pool)) {
                ids.push(named);
            }
            ids.sort_unstable();
            ids.dedup();
            for id in ids {
                let paths = ENDS.map(|end| directory.join(format!("{}{end}", name(id))));
                let path = paths.into_iter().find(|path| path.symlink_metadata().is_ok());
                left.extend(path.map(|path| Left { directory: directory.clone(), id, path }));
            }
        }
        left
    }

    /// Removes what [`Places::left_by`] finds, except the segment `kept`; for a process that has
    /// the pool for itself.
    pub fn remove_left_by(&self, owner: Owner, named: Uuid, pool: Uuid, kept: Uuid) {
        let left = self.left_by(owner, named, pool);
        let left = left.iter().filter(|left| left.id != kept);
        left.for_each(|left| remove_in(&left.directory, left.id));
    }
}

/// A segment that no process uses.
pub(crate) struct Left {
    directory: PathBuf,
    id: Uuid,
    /// One of its files.
    pub path: PathBuf,
}

fn remove_in(directory: &Path, id: Uuid) {
    for end in ENDS.into_iter().rev() {
        let _ = std::fs::remove_file(directory.join(format!("{}{end}", name(id))));
    }
}

/// Whether the processes that last had the pool open saw no error about lost bytes, if that is
/// known; only for a process that has checked that no process has the pool open. If the superblock
/// names a segment, only that one records it.
pub(crate) fn left_whole(places: &Places, superblock: &Superblock, media: &dyn Media) -> bool {
    let (id, pool) = (superblock.segment, superblock.uuid);
    if id.is_nil() {
        return true;
    }
    let left = places.open(id, Part::Segment, identity_in(id), pool, media, false).ok();
    let left = left.and_then(|left| Segment::adopt(left, pool, &superblock.layout).ok());
    // Relaxed: those processes have ended.
    left.is_some_and(|left| left.is_whole() && left.control().failure.load(Relaxed) == 0)
}

/// Whether a directory on a disk has a segment of an earlier start of the machine, when devices had
/// other numbers. A copy of the pool file names the segment of its original as well. A process with
/// a different boot id would take that one for a segment of another start, but it is in use.
fn is_stale(directory: &Path, id: Uuid, pool: Uuid) -> bool {
    let Ok(file) = SharedMemory::descriptor_at(&directory.join(name(id)), false) else {
        return false;
    };
    let is_on_disk =
        file_system::magic(file.as_fd()).is_ok_and(|magic| file_system::in_memory(magic).is_none());
    let identity = Identity::of(file.as_fd(), pool, Part::Segment);
    is_on_disk
        && identity.is_ok_and(|identity| identity.hash != identity_in(id))
        && !Segment::is_in_use(file)
}

fn name(id: Uuid) -> String {
    format!("{NAME_START}{}", id.simple())
}

fn name_of(id: Uuid, part: Part) -> String {
    match part {
        Part::Segment => name(id),
        Part::Pins => format!("{}{PINS_END}", name(id)),
    }
}

/// The id in the name of a file of a segment.
pub(crate) fn id_in(name: &str) -> Option<Uuid> {
    let id = name.strip_prefix(NAME_START)?;
    let id = id.strip_suffix(PINS_END).or_else(|| id.strip_suffix(NEW_END)).unwrap_or(id);
    Uuid::try_parse(id).ok()
}
