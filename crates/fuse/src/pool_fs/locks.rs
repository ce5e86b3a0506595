//! Locks of programs in a shared mount: `SETLK`, `SETLKW`, `GETLK`, `FLUSH`, `RELEASE`, `INTERRUPT`.
//!
//! Each owner of locks has its [`AdvisoryLocks`], an open file description of the pool whose locks
//! exclude those of all others: of other owners, of other mounts, and of programs that use the
//! library. POSIX locks and locks of descriptions are ranges, `flock` is the whole file.
//!
//! | a lock ends | because |
//! |---|---|
//! | when it is unlocked | `SETLK` says so |
//! | POSIX: when its process closes any descriptor of the file | `FLUSH` names the owner |
//! | others: when the description is closed | `RELEASE` names the open file, and so does each `SETLK` |
//!
//! # Owners
//! The kernel names an owner by an address: that of a description, or for POSIX locks that of the
//! descriptors of a process. `RELEASE` is sent after `close` has returned, when the next description may
//! have the address already. So the owner of a lock on a whole file is the open file ([`OwnerName`]),
//! whose number no other one gets. Of ranges it is the address, which POSIX locks of several open files
//! have in common; each such owner knows the open files through which it has locked, and ends with the
//! last of them. Those of the description before, at the same address, may stay until then, if its
//! `RELEASE` is that late.
//!
//! Another process keeps a descriptor of each description from before its first lock is answered, so
//! locks outlive this server, however it ends.
//!
//! # Waiting
//! The kernel's own wait for such a lock cannot be ended by another thread. So a thread tries all
//! that are waited for again: at once when something was unlocked here, and after a pause that grows
//! to [`LONGEST_PAUSE`], as others unlock too. Deadlocks are not detected.
//!
//! # Locks
//! `waiting`, then `holders`. Both are held for calls that do not wait. An owner's locks change under
//! `holders` only, so that the end of an owner and a lock that is just being granted come one after the
//! other, here and in the process that keeps it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use aquifer_pool::{AdvisoryLocks, LockArea, LockMode, Pool, PoolError};
use aquifer_sys::thread;
use rustix::process::{Resource, getrlimit};

use super::{Errno, PoolFs, Result};
use crate::answer::{Answer, Delivered};
use crate::state::{MOST_WAITING, WaitNote, Waits};
use crate::wire::{LockIn, LockOut, Unique, lock};

/// The most owners with locks; each takes a descriptor here and in the process that keeps it.
const MOST_HOLDERS: usize = 4096;
/// Descriptors that both processes need for something else.
const OTHER_DESCRIPTORS: usize = 128;
/// The most open files of an owner that are remembered, the last ones.
const MOST_OPEN: usize = 8;
/// How long a lock that others have is not tried again, at first and at the most.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);
/// How many interrupts are remembered whose request is not known yet.
const INTERRUPTED: usize = 64;

/// An owner of locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LockOwner {
    /// The number of the inode.
    pub node: u64,
    pub name: OwnerName,
}

/// What tells an owner from all others of an inode. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum OwnerName {
    /// Of a lock on the whole file: the number of the open file.
    OpenFile(u64),
    /// Of ranges: the kernel's name.
    Address(u64),
}

/// An owner, and the open files through which it has locked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenOwner {
    pub owner: LockOwner,
    pub open: Vec<u64>,
}

/// What keeps the descriptions of locks for the next server.
pub(crate) trait KeepsLocks: Send + Sync {
    /// Keeps another descriptor of it; without one, what it has is through these open files now.
    fn keep(&self, owner: OpenOwner, file: Option<BorrowedFd<'_>>) -> io::Result<()>;
    /// Closes it again.
    fn give_up(&self, owner: LockOwner);
}

/// Where there is no next server.
pub(super) struct KeepsNone;

impl KeepsLocks for KeepsNone {
    fn keep(&self, _: OpenOwner, _: Option<BorrowedFd<'_>>) -> io::Result<()> {
        Ok(())
    }

    fn give_up(&self, _: LockOwner) {}
}

/// All locks of a mount. See the [module](self).
pub(super) struct Locks {
    pool: Pool,
    keeps: Box<dyn KeepsLocks>,
    /// Of a server that another one may follow.
    waits: Option<Waits>,
    most_holders: usize,
    holders: Mutex<Holders>,
    waiting: Mutex<Waiting>,
    /// Something was unlocked.
    unlocked: Condvar,
}

#[derive(Default)]
struct Holders {
    count: usize,
    /// By inode number and owner.
    of: HashMap<u64, HashMap<OwnerName, Holder>>,
}

struct Holder {
    /// The open files through which it has locked.
    open: Vec<u64>,
    locks: AdvisoryLocks,
}

#[derive(Default)]
struct Waiting {
    requests: Vec<Wait>,
    has_thread: bool,
    /// Requests that are not to begin to wait.
    interrupted: VecDeque<u64>,
}

struct Wait {
    unique: Unique,
    answer: Option<Answer<'static>>,
    owner: LockOwner,
    /// The open file.
    fh: u64,
    area: LockArea,
    mode: LockMode,
    /// Goes behind the answer.
    note: Option<WaitNote>,
}

impl Holders {
    /// Those of an inode.
    fn owners(&self, node: u64) -> Vec<LockOwner> {
        let names = self.of.get(&node).into_iter().flat_map(|owners| owners.keys());
        names.map(|name| LockOwner { node, name: *name }).collect()
    }

    fn remove(&mut self, owner: LockOwner) -> Option<Holder> {
        let owners = self.of.get_mut(&owner.node)?;
        let removed = owners.remove(&owner.name)?;
        if owners.is_empty() {
            self.of.remove(&owner.node);
        }
        self.count -= 1;
        Some(removed)
    }

    fn insert(&mut self, owner: LockOwner, holder: Holder) {
        let owners = self.of.entry(owner.node).or_default();
        if owners.insert(owner.name, holder).is_none() {
            self.count += 1;
        }
    }

    fn get(&self, owner: LockOwner) -> Option<&Holder> {
        self.of.get(&owner.node)?.get(&owner.name)
    }

    fn get_mut(&mut self, owner: LockOwner) -> Option<&mut Holder> {
        self.of.get_mut(&owner.node)?.get_mut(&owner.name)
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No panic leaves it half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Locks {
    /// Those of a pool; `kept` are those that the last server has left.
    pub fn new(
        pool: &Pool,
        keeps: Box<dyn KeepsLocks>,
        kept: Vec<(OpenOwner, OwnedFd)>,
        waits: Option<Waits>,
    ) -> aquifer_pool::Result<Arc<Locks>> {
        let mut holders = Holders::default();
        for (OpenOwner { owner, open }, file) in kept {
            let locks = pool.adopt_advisory_locks(owner.node, file)?;
            holders.insert(owner, Holder { open, locks });
        }
        // The process that keeps them has started this one, with the same limit.
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let most_holders = limit.saturating_sub(OTHER_DESCRIPTORS).min(MOST_HOLDERS);
        Ok(Arc::new(Locks {
            most_holders,
            pool: pool.clone(),
            keeps,
            waits,
            holders: Mutex::new(holders),
            waiting: Mutex::default(),
            unlocked: Condvar::new(),
        }))
    }

    /// The locks of an owner, a new one if it has none, that locks through an open file.
    fn holder<'h>(
        &self,
        holders: &'h mut Holders,
        owner: LockOwner,
        fh: u64,
    ) -> Result<&'h AdvisoryLocks> {
        let no_lock = |_| Errno(libc::ENOLCK);
        if let Some(holder) = holders.get_mut(owner) {
            if !holder.open.contains(&fh) {
                if holder.open.len() == MOST_OPEN {
                    holder.open.remove(0);
                }
                holder.open.push(fh);
                let open = holder.open.clone();
                self.keeps.keep(OpenOwner { owner, open }, None).map_err(no_lock)?;
            }
        } else {
            if holders.count >= self.most_holders {
                return Err(Errno(libc::ENOLCK));
            }
            let locks = self.pool.advisory_locks(owner.node).map_err(|_| Errno(libc::ENOLCK))?;
            let open = vec![fh];
            // Before it has a lock.
            let keeping =
                self.keeps.keep(OpenOwner { owner, open: open.clone() }, Some(locks.as_fd()));
            keeping.map_err(no_lock)?;
            holders.insert(owner, Holder { open, locks: locks.shared() });
        }
        Ok(&holders.get(owner).ok_or(Errno(libc::ENOLCK))?.locks)
    }

    /// What a request is about: a range, or the whole file.
    fn area(&self, lock: &LockIn) -> Result<LockArea> {
        if is_flock(lock) {
            return Ok(LockArea::File);
        }
        let limit_bytes = self.pool.lockable_bytes();
        if lock.start >= limit_bytes || lock.start > lock.end {
            return Err(Errno(libc::EOVERFLOW));
        }
        // Nothing behind the limit can be locked, so a lock up to there is one without end.
        let end = if lock.end >= limit_bytes - 1 { u64::MAX } else { lock.end + 1 };
        Ok(LockArea::Bytes(lock.start..end))
    }

    fn set(self: &Arc<Self>, answer: Answer<'_>, asked: Asked<'_>) {
        match self.try_set(&asked) {
            Ok(None) => {
                let _ = answer.empty();
            }
            Ok(Some((area, mode))) => {
                // From now on another thread answers it.
                let Some(answer) = answer.detach() else { return };
                let Asked { unique, owner, lock: LockIn { fh, .. }, .. } = asked;
                let answer = Some(answer);
                self.wait(Wait { unique, answer, owner, fh: *fh, area, mode, note: None });
            }
            Err(Errno(errno)) => {
                let _ = answer.error(errno);
            }
        }
    }

    /// Returns what is to be waited for.
    fn try_set(&self, asked: &Asked<'_>) -> Result<Option<(LockArea, LockMode)>> {
        let Some(mode) = mode_of(asked.lock)? else {
            if asked.lock.start >= self.pool.lockable_bytes() && !is_flock(asked.lock) {
                // Nothing is locked there.
                return Ok(None);
            }
            let area = self.area(asked.lock)?;
            if let Some(holder) = held(&self.holders).get(asked.owner) {
                holder.locks.unlock(&area).map_err(failed)?;
                self.unlocked.notify_all();
            }
            return Ok(None);
        };
        let area = self.area(asked.lock)?;
        let mut holders = held(&self.holders);
        let locks = self.holder(&mut holders, asked.owner, asked.lock.fh)?;
        let has_it = locks.try_lock(&area, mode).map_err(failed)?;
        if !has_it && area == LockArea::File {
            // `flock` gives up the lock in the other mode, whether it gets the new one or not.
            locks.unlock(&area).map_err(failed)?;
        }
        drop(holders);
        if has_it == (mode == LockMode::Shared) {
            // It may have been exclusive; or it was given up.
            self.unlocked.notify_all();
        }
        match (has_it, asked.waits) {
            (true, _) => Ok(None),
            (false, true) => Ok(Some((area, mode))),
            (false, false) => Err(Errno(libc::EAGAIN)),
        }
    }

    fn conflict(&self, owner: LockOwner, lock: &LockIn) -> Result<LockOut> {
        let area = self.area(lock)?;
        let mut found = None;
        if let Some(mode) = mode_of(lock)? {
            let holders = held(&self.holders);
            found = match holders.get(owner) {
                Some(holder) => holder.locks.conflict(&area, mode),
                None => {
                    self.pool.advisory_locks(owner.node).and_then(|it| it.conflict(&area, mode))
                }
            }
            .map_err(failed)?;
        }
        let Some(found) = found else {
            return Ok(LockOut {
                start: lock.start,
                end: lock.end,
                kind: libc::F_UNLCK as u32,
                pid: 0,
            });
        };
        let (start, end) = match found.area {
            LockArea::Bytes(range) if range.end == u64::MAX => (range.start, lock::END),
            LockArea::Bytes(range) => (range.start, range.end - 1),
            LockArea::File => (0, lock::END),
        };
        let is_shared = found.mode == LockMode::Shared;
        let kind = if is_shared { libc::F_RDLCK } else { libc::F_WRLCK };
        // The system does not say whose it is.
        Ok(LockOut { start, end, kind: kind as u32, pid: 0 })
    }

    /// Waits for a lock, unless that was interrupted before.
    fn wait(self: &Arc<Self>, mut wait: Wait) {
        let mut waiting = held(&self.waiting);
        let key = wait.unique.key();
        if waiting.interrupted.contains(&key) {
            return wait.end(libc::EINTR);
        }
        if waiting.requests.len() >= MOST_WAITING {
            return wait.end(libc::ENOLCK);
        }
        wait.note = self.waits.as_ref().and_then(|waits| waits.add(key));
        waiting.requests.push(wait);
        if !waiting.has_thread {
            let locks = Arc::downgrade(self);
            waiting.has_thread = thread::start(c"aquifer-locks", move || try_again(&locks)).is_ok();
            if !waiting.has_thread {
                waiting.requests.drain(..).for_each(|mut wait| wait.end(libc::ENOLCK));
            }
        }
    }

    /// Ends a wait. A request that is not known may be about to wait, or is another one.
    fn interrupt(&self, of: Unique) {
        let mut waiting = held(&self.waiting);
        let is_it = |wait: &Wait| wait.unique.key() == of.key();
        if let Some(at) = waiting.requests.iter().position(is_it) {
            return waiting.requests.remove(at).end(libc::EINTR);
        }
        waiting.interrupted.push_back(of.key());
        if waiting.interrupted.len() > INTERRUPTED {
            waiting.interrupted.pop_front();
        }
    }

    /// Tries all that are waited for. Returns whether any are left.
    fn try_all(&self, waiting: &mut Waiting) -> bool {
        waiting.requests.retain_mut(|wait| !self.try_one(wait));
        waiting.has_thread = !waiting.requests.is_empty();
        waiting.has_thread
    }

    /// Returns whether the wait has ended.
    fn try_one(&self, wait: &mut Wait) -> bool {
        let mut holders = held(&self.holders);
        // A new one if its process has closed a descriptor meanwhile: what waits goes on, and gets the
        // lock.
        let tried = self.holder(&mut holders, wait.owner, wait.fh).and_then(|locks| {
            let has_it = locks.try_lock(&wait.area, wait.mode).map_err(failed)?;
            Ok(has_it.then_some(locks))
        });
        match tried {
            Ok(None) => return false,
            Ok(Some(locks)) => {
                let answer = wait.answer.take();
                let delivered = answer.map_or(Delivered::Ended, Answer::empty);
                if delivered != Delivered::Yes {
                    let _ = locks.unlock(&wait.area);
                }
            }
            Err(Errno(errno)) => wait.end(errno),
        }
        true
    }

    /// Ends an owner with all of its locks.
    fn drop_holder(&self, holders: &mut Holders, owner: LockOwner) {
        if let Some(Holder { locks, .. }) = holders.remove(owner) {
            let _ = locks.unlock(&LockArea::File);
            let _ = locks.unlock(&LockArea::Bytes(0..u64::MAX));
            self.keeps.give_up(owner);
            self.unlocked.notify_all();
        }
    }

    /// The POSIX locks of a process that has closed a descriptor.
    pub fn flushed(&self, node: u64, address: u64) {
        let owner = LockOwner { node, name: OwnerName::Address(address) };
        self.drop_holder(&mut held(&self.holders), owner);
    }

    /// The locks of an open file that was closed.
    pub fn released(&self, node: u64, fh: u64) {
        let mut holders = held(&self.holders);
        for owner in holders.owners(node) {
            let Some(holder) = holders.get_mut(owner).filter(|it| it.open.contains(&fh)) else {
                continue;
            };
            holder.open.retain(|open| *open != fh);
            if holder.open.is_empty() {
                self.drop_holder(&mut holders, owner);
            } else {
                let open = holder.open.clone();
                let _ = self.keeps.keep(OpenOwner { owner, open }, None);
            }
        }
    }

    /// Of an inode that nothing uses.
    pub fn forgotten(&self, node: u64) {
        let mut holders = held(&self.holders);
        holders.owners(node).into_iter().for_each(|owner| self.drop_holder(&mut holders, owner));
    }
}

/// A request for a lock.
struct Asked<'r> {
    unique: Unique,
    owner: LockOwner,
    lock: &'r LockIn,
    waits: bool,
}

impl Wait {
    fn end(&mut self, errno: i32) {
        if let Some(answer) = self.answer.take() {
            let _ = answer.error(errno);
        }
    }
}

fn is_flock(lock: &LockIn) -> bool {
    lock.lock_flags & lock::FLOCK != 0
}

fn owner_of(node: u64, lock: &LockIn) -> LockOwner {
    let name = match is_flock(lock) {
        true => OwnerName::OpenFile(lock.fh),
        false => OwnerName::Address(lock.owner),
    };
    LockOwner { node, name }
}

/// The error of a lock that cannot be tried, unlocked, or looked for.
fn failed(error: PoolError) -> Errno {
    match error {
        PoolError::CannotLock { source, .. } => Errno(source.raw_os_error().unwrap_or(libc::EIO)),
        _ => Errno(libc::EIO),
    }
}

/// `None` to unlock.
fn mode_of(lock: &LockIn) -> Result<Option<LockMode>> {
    match lock.kind as i32 {
        libc::F_RDLCK => Ok(Some(LockMode::Shared)),
        libc::F_WRLCK => Ok(Some(LockMode::Exclusive)),
        libc::F_UNLCK => Ok(None),
        _ => Err(Errno(libc::EINVAL)),
    }
}

/// Tries what is waited for until nothing is, or the mount has ended.
fn try_again(locks: &Weak<Locks>) {
    let mut pause = FIRST_PAUSE;
    while let Some(locks) = locks.upgrade() {
        let mut waiting = held(&locks.waiting);
        if !locks.try_all(&mut waiting) {
            return;
        }
        let waited = locks.unlocked.wait_timeout(waiting, pause);
        let (waiting, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(waiting);
        pause = if waited.timed_out() { (2 * pause).min(LONGEST_PAUSE) } else { FIRST_PAUSE };
    }
}

impl PoolFs {
    fn locks(&self) -> Result<&Arc<Locks>> {
        self.locks.as_ref().ok_or(Errno(libc::ENOSYS))
    }

    pub(super) fn set_lock(
        &self,
        answer: Answer<'_>,
        unique: Unique,
        node: u64,
        lock: &LockIn,
        waits: bool,
    ) {
        match self.locks() {
            Ok(locks) => {
                let owner = owner_of(node, lock);
                locks.set(answer, Asked { unique, owner, lock, waits });
            }
            Err(Errno(errno)) => {
                let _ = answer.error(errno);
            }
        }
    }

    pub(super) fn get_lock(&self, node: u64, lock: &LockIn) -> Result<LockOut> {
        self.locks()?.conflict(owner_of(node, lock), lock)
    }

    /// A process has closed a descriptor of the file.
    pub(super) fn flush(&self, node: u64, owner: u64) -> Result<()> {
        self.locks()?.flushed(node, owner);
        Ok(())
    }

    pub(super) fn interrupt(&self, answer: Answer<'_>, of: Unique) {
        match &self.locks {
            Some(locks) => {
                answer.none();
                locks.interrupt(of);
            }
            // No more of them, please.
            None => {
                let _ = answer.error(libc::ENOSYS);
            }
        }
    }
}
