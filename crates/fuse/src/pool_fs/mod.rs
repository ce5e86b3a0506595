//! Requests to a pool.
//!
//! ```text
//!  request ──► node ID → Node (state::nodes) ──► Nodes, or a cached File (handles) ──► answer
//! ```
//!
//! The kernel caches without end what it is told, and checks permissions (`default_permissions`). In a
//! shared mount it asks for owner and mode before it checks an access, but takes the owner that it saw
//! last to decide about a change of attributes: see [`PoolFs::changing`].
//! Here a request finds its inode, becomes one call of [`Nodes`] or of a [`File`](aquifer_fs::File),
//! and the result becomes an answer.
//!
//! # Files that were removed while they are in use
//! The kernel sends no `OPEN`, so only its count of lookups tells which inodes it may still have
//! open. A file that loses its last name while the count is above 0 is kept, pinned by an entry of
//! [`Orphans`], until `FORGET` brings the count to 0.
//!
//! What keeps it is a handle of this process or, where another server may follow, a pin that another
//! process has lent. The table of nodes then says where, before the name is gone; a server that takes
//! over compares both (`Orphans::take_over`).
//!
//! In a [shared](crate::Cache::Shared) mount others remove files as well, so `OPEN` already keeps an
//! inode, until it was released as often. (The kernel may forget it much later: it does not notice that
//! the name is gone.) Deaths of servers make that count too high, never too low. A file that was only looked up may be gone at the next request, which gets `ESTALE`;
//! the kernel then looks it up again.
//!
//! # Requests that must not be done twice
//! Where another server may follow, each request has a note in memory that outlives this one, from
//! before it is done until its answer is written: see `once`.
//!
//! # Locks
//! A shard of [`Handles`], and the map of [`Orphans`], are held for a lookup or a change of the map
//! only, never during a call of `aquifer_fs`. The lock of lent pins is also taken inside a transaction,
//! which holds the metadata mutex; what holds it may wait until another transaction has given back the
//! inode that it pins, and takes no lock of this crate.

mod attributes;
mod data;
mod directories;
mod handles;
mod lock_owners;
mod lock_ranges;
mod lock_waits;
mod locks;
mod lookup;
mod mappings;
mod names;
mod once;
#[cfg(test)]
mod once_tests;
mod orphans;
#[cfg(test)]
mod owner_tests;
#[cfg(test)]
mod shared_tests;
#[cfg(test)]
mod tests;
mod xattrs;

use std::io;
use std::sync::Arc;

use aquifer_fs::node::{Caller, Node, Nodes};
use aquifer_fs::{Files, FsError};

use self::handles::Handles;
use self::lock_owners::KeepsNone;
pub(crate) use self::lock_owners::{
    KeepsLocks, LockOwner, MOST_HOLDERS, MOST_OPEN, OpenOwner, OwnerName,
};
use self::locks::Locks;
pub(crate) use self::mappings::DropsPages;
use self::mappings::Mappings;
pub(crate) use self::once::Lasting;
pub(crate) use self::orphans::{Lent, Orphans};
use crate::answer::Answer;
use crate::error::MountError;
use crate::init::Agreed;
use crate::options::MountOptions;
use crate::state::{NodeTable, Notes};
use crate::team::{Handler, Worker};
use crate::wire::{Bytes, CopyOut, Operation, Request, WriteOut, init};

/// The error number of a request that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Errno(i32);

impl From<FsError> for Errno {
    fn from(error: FsError) -> Errno {
        Errno(error.errno())
    }
}

type Result<T> = std::result::Result<T, Errno>;

/// The files of a pool, for the kernel.
pub(crate) struct PoolFs {
    files: Files,
    nodes: Nodes,
    table: NodeTable,
    handles: Handles,
    orphans: Orphans,
    /// Of a server that another one may follow.
    notes: Option<Notes>,
    /// Of a shared mount; else the kernel has them.
    locks: Option<Arc<Locks>>,
    mappings: Mappings,
    agreed: Agreed,
    options: MountOptions,
}

impl PoolFs {
    /// Of these files, which nothing else may change while the kernel caches them. The kernel's side
    /// ends with this process.
    pub fn new(
        files: Files,
        agreed: Agreed,
        options: MountOptions,
    ) -> std::result::Result<PoolFs, MountError> {
        let slots = files.pool().layout().slots();
        let table = NodeTable::new(slots).map_err(MountError::Start)?;
        let lasting = Lasting {
            table,
            orphans: Orphans::own(),
            notes: None,
            keeps_locks: Box::new(KeepsNone),
            kept_locks: Vec::new(),
        };
        PoolFs::lasting(files, agreed, options, lasting)
    }

    /// As well, and what is known of the kernel's side outlives this process.
    pub fn lasting(
        files: Files,
        agreed: Agreed,
        options: MountOptions,
        lasting: Lasting,
    ) -> std::result::Result<PoolFs, MountError> {
        let (nodes, handles) = (files.nodes(), Handles::new());
        let Lasting { table, orphans, notes, keeps_locks, kept_locks } = lasting;
        let locks = if options.is_shared() {
            let waits = notes.as_ref().map(Notes::waits);
            let locks = Locks::new(files.pool(), keeps_locks, kept_locks, waits);
            Some(locks.map_err(aquifer_fs::FsError::from)?)
        } else {
            None
        };
        // The kernel knows it from the beginning, and never forgets it.
        if table.remember(nodes.root()?).is_err() {
            return Err(MountError::Start(io::ErrorKind::InvalidData.into()));
        }
        let mappings = Mappings::default();
        Ok(PoolFs {
            files,
            nodes,
            table,
            handles,
            orphans,
            notes,
            locks,
            mappings,
            agreed,
            options,
        })
    }

    /// The inode that the kernel means.
    fn node(&self, id: u64) -> Result<Node> {
        self.table.node(id).ok_or(Errno(libc::ESTALE))
    }

    /// For whom attributes are changed. Which bits the caller may set and keep, the kernel has decided;
    /// in a shared mount by attributes that others may have changed since, so there the caller is
    /// compared with the present owner.
    fn changing(&self, request: &Request<'_>) -> Caller {
        let by = caller(request).may_set_id(true);
        if self.options.is_shared() { by.enforced() } else { by }
    }

    /// What is done so that the kernel sends no `OPEN`, `OPENDIR`, `FLUSH` and `CREATE` any more.
    fn without_opening(&self, feature: u64) -> Result<()> {
        if self.agreed.has(feature) { Err(Errno(libc::ENOSYS)) } else { Ok(()) }
    }
}

/// For whom a request is: this decides what new files look like.
fn caller(request: &Request<'_>) -> Caller {
    let caller = Caller::new(request.uid, request.gid);
    match request.also_in_group {
        Some(group) => caller.groups([group]),
        None => caller,
    }
}

/// Answers with a structure or an error.
fn reply(answer: Answer<'_>, result: Result<impl Bytes>) {
    let _ = match result {
        Ok(value) => answer.value(&value),
        Err(Errno(errno)) => answer.error(errno),
    };
}

/// Answers that it is done, or with an error.
fn done(answer: Answer<'_>, result: Result<()>) {
    let _ = match result {
        Ok(()) => answer.empty(),
        Err(Errno(errno)) => answer.error(errno),
    };
}

/// Answers with bytes or an error.
fn give(answer: Answer<'_>, result: Result<impl AsRef<[u8]>>) {
    let _ = match result {
        Ok(bytes) => answer.bytes(bytes.as_ref()),
        Err(Errno(errno)) => answer.error(errno),
    };
}

impl Handler for PoolFs {
    fn handle(
        &self,
        request: &Request<'_>,
        out: &mut [u8],
        answer: Answer<'_>,
        worker: &Worker<'_>,
    ) {
        self.once(request, answer, worker, |answer| self.perform(request, out, answer, worker));
    }

    fn tidy(&self) {
        self.handles.close_idle();
    }
}

impl PoolFs {
    fn perform(
        &self,
        request: &Request<'_>,
        out: &mut [u8],
        answer: Answer<'_>,
        worker: &Worker<'_>,
    ) {
        use Operation as Op;
        if let Err(Errno(errno)) = self.clear_set_id(request, &answer) {
            let _ = answer.error(errno);
            return;
        }
        let node = request.node;
        match request.operation {
            Op::Lookup { name } => self.lookup(answer, node, name),
            Op::Forget { count } => {
                answer.none();
                self.forget(node, count);
            }
            Op::BatchForget(ref forgets) => {
                answer.none();
                worker.blocking(|| self.forget_all(forgets));
            }
            Op::GetAttributes => reply(answer, self.attributes(node)),
            Op::Statx { .. } => reply(answer, self.statx(node)),
            Op::SetAttributes(ref set) => reply(answer, self.set(request, set)),
            Op::StatFs => reply(answer, self.space()),

            Op::Symlink { name, target } => {
                self.remember(answer, self.symlink(request, name, target));
            }
            Op::MakeNode { name, mode, rdev, umask } => {
                self.remember(answer, self.make_node(request, name, mode, rdev, umask));
            }
            Op::MakeDirectory { name, mode, umask } => {
                let made = self.make_directory(request, name, mode, umask);
                self.remember_in(answer, Some(node), made);
            }
            Op::Link { node: linked, name } => self.remember(answer, self.link(linked, node, name)),
            Op::Create { name, flags, mode, umask } => {
                let created = self.create(request, name, flags, mode, umask);
                self.remember_open(answer, request.unique, created);
            }
            Op::TemporaryFile { mode, umask, .. } => {
                self.remember_open(
                    answer,
                    request.unique,
                    self.temporary_file(request, mode, umask),
                );
            }
            Op::Unlink { name } => done(answer, self.unlink(node, name)),
            Op::RemoveDirectory { name } => done(answer, self.remove_directory(node, name)),
            Op::Rename { name, to, new_name, flags } => {
                done(answer, self.rename(request, name, (to, new_name), flags));
            }
            Op::ReadLink => give(answer, self.read_link(node)),
            Op::ReadDirectory { offset, room, is_plus } => {
                self.read_directory(answer, out, node, (offset, room), is_plus);
            }

            Op::Open { .. } => reply(answer, self.open(request)),
            Op::OpenDirectory => {
                let open = self.without_opening(init::NO_OPENDIR_SUPPORT);
                reply(answer, open.map(|()| self.opened_directory()));
            }
            Op::Flush { lock_owner } => done(answer, self.flush(node, lock_owner)),
            Op::GetLock(ref lock) => reply(answer, self.get_lock(node, lock)),
            Op::SetLock { ref lock, waits } => {
                self.set_lock(answer, request.unique, node, lock, waits);
            }
            Op::Interrupt { of } => self.interrupt(answer, of),
            Op::Release(ref release) => {
                let number = self.table.number(node);
                if let (Some(locks), Some(number)) = (&self.locks, number) {
                    locks.released(number, release.fh);
                }
                done(answer, Ok(()));
                // One that is handed out again may have been counted by a dead server. Rather it stays
                // until it is forgotten.
                if let Some(number) = number
                    && self.options.is_shared()
                    && !request.unique.is_resent()
                {
                    self.orphans.close(&self.table, &self.nodes, number);
                    self.mappings.ended(number, || self.table.is_kept(number));
                }
            }
            Op::ReleaseDirectory | Op::Destroy => done(answer, Ok(())),
            Op::Read(ref read) => give(answer, self.read(node, read, out, worker)),
            Op::Write(ref write, data) => {
                let written = self.write(request, write, data, worker);
                self.begin_sync(node, write);
                reply(answer, written);
            }
            Op::Sync { data_only } => done(answer, self.sync(node, data_only, worker)),
            Op::SyncDirectory => done(answer, self.sync_directory(worker)),
            Op::Allocate(ref range) => done(answer, self.allocate(request, range, worker)),
            Op::CopyRange { ref range, is_64: true } => {
                let copied = self.copy(node, range, worker);
                reply(answer, copied.map(|bytes| CopyOut { bytes }));
            }
            Op::CopyRange { ref range, is_64: false } => {
                let copied = self.copy(node, range, worker);
                reply(answer, copied.map(|bytes| WriteOut { size: bytes as u32, padding: 0 }));
            }

            Op::GetXattr { name, room } => self.get_xattr(answer, node, name, room),
            Op::ListXattr { room } => self.list_xattrs(answer, request, room),
            Op::SetXattr { name, value, flags, more_flags } => {
                done(answer, self.set_xattr(request, (name, value), flags, more_flags));
            }
            Op::RemoveXattr { name } => done(answer, self.remove_xattr(request, name)),

            Op::NotifyReply => answer.none(),
            Op::Ioctl => done(answer, Err(Errno(libc::ENOTTY))),
            // The kernel then does them itself, or without: checks of access.
            _ => done(answer, Err(Errno(libc::ENOSYS))),
        }
    }
}
