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
//! What is waited for another thread tries again: see [`super::lock_waits`].
//!
//! # Limits
//! Each owner takes a descriptor here and one in the process that keeps it, so there are at most
//! [`MOST_HOLDERS`], fewer where fewer files can be open. One that has no locks and waits for none makes
//! room for another. Each range that is locked is one more that every lock in the pool has to be compared
//! with, so there are at most [`MOST_RANGES`]. Beyond, the error is `ENOLCK`.
//!
//! # Locks
//! `holders`, then the queue of those that wait. Both are held for calls that do not wait. An owner's
//! locks change under `holders` only, so that the end of an owner and a lock that is just being granted
//! come one after the other, here and in the process that keeps it.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use aquifer_pool::{AdvisoryLocks, LockArea, LockMode, Pool, PoolError};
use aquifer_sys::thread;
use rustix::process::{Resource, getrlimit};

use super::lock_owners::{KeepsLocks, LockOwner, MOST_HOLDERS, MOST_OPEN, OpenOwner, OwnerName};
use super::lock_ranges::Ranges;
use super::lock_waits::{Next, Pauses, Queue, Wait, Wanted};
use super::{Errno, PoolFs, Result};
use crate::answer::{Answer, Delivered};
use crate::state::Waits;
use crate::wire::{LockIn, LockOut, Unique, lock};

/// The most ranges that all of them have locked.
const MOST_RANGES: usize = 1 << 16;
/// Descriptors that both processes need for something else.
const OTHER_DESCRIPTORS: usize = 128;

/// All locks of a mount. See the [module](self).
pub(super) struct Locks {
    pool: Pool,
    keeps: Box<dyn KeepsLocks>,
    /// Of a server that another one may follow.
    waits: Option<Waits>,
    pub(super) most_holders: usize,
    pub(super) most_ranges: usize,
    holders: Mutex<Holders>,
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Holders {
    count: usize,
    /// How many ranges they have locked.
    ranges: usize,
    /// By inode number and owner.
    of: HashMap<u64, HashMap<OwnerName, Holder>>,
}

struct Holder {
    /// The open files through which it has locked.
    open: Vec<u64>,
    /// What it has locked; the whole file is one range.
    ranges: Ranges,
    locks: AdvisoryLocks,
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
        self.ranges -= removed.ranges.count();
        Some(removed)
    }

    fn insert(&mut self, owner: LockOwner, holder: Holder) {
        // Of the same owner there is none, unless what was kept names one twice.
        drop(self.remove(owner));
        self.count += 1;
        self.ranges += holder.ranges.count();
        self.of.entry(owner.node).or_default().insert(owner.name, holder);
    }

    /// Those that have no locks.
    fn idle(&self) -> Vec<LockOwner> {
        let all = self.of.iter().flat_map(|(node, owners)| {
            owners.iter().map(|(name, holder)| (LockOwner { node: *node, name: *name }, holder))
        });
        all.filter(|(_, holder)| holder.ranges.count() == 0).map(|(owner, _)| owner).collect()
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

impl Drop for Locks {
    fn drop(&mut self) {
        self.queue.end();
    }
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
            holders.insert(owner, Holder { open, ranges: Ranges::of_unknown(), locks });
        }
        // The process that keeps them has started this one, with the same limit.
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Ok(Arc::new(Locks {
            pool: pool.clone(),
            keeps,
            waits,
            most_holders: limit.saturating_sub(OTHER_DESCRIPTORS).min(MOST_HOLDERS),
            most_ranges: MOST_RANGES,
            holders: Mutex::new(holders),
            queue: Arc::default(),
        }))
    }

    /// An owner that locks through an open file: a new one if there is none.
    fn holder<'h>(
        &self,
        holders: &'h mut Holders,
        owner: LockOwner,
        fh: u64,
    ) -> Result<&'h mut Holder> {
        let no_lock = |_| Errno(libc::ENOLCK);
        if let Some(holder) = holders.get_mut(owner) {
            if !holder.open.contains(&fh) {
                if holder.open.len() >= MOST_OPEN {
                    holder.open.remove(0);
                }
                holder.open.push(fh);
                let open = holder.open.clone();
                self.keeps.keep(OpenOwner { owner, open }, None).map_err(no_lock)?;
            }
        } else {
            if holders.count >= self.most_holders {
                let idle = holders.idle().into_iter().filter(|owner| !self.queue.has(*owner));
                idle.for_each(|owner| self.drop_holder(holders, owner));
            }
            if holders.count >= self.most_holders {
                return Err(Errno(libc::ENOLCK));
            }
            let locks = self.pool.advisory_locks(owner.node).map_err(|_| Errno(libc::ENOLCK))?;
            let open = vec![fh];
            // Before it has a lock.
            let keeping =
                self.keeps.keep(OpenOwner { owner, open: open.clone() }, Some(locks.as_fd()));
            keeping.map_err(no_lock)?;
            let ranges = Ranges::default();
            holders.insert(owner, Holder { open, ranges, locks: locks.shared() });
        }
        holders.get_mut(owner).ok_or(Errno(libc::ENOLCK))
    }

    /// Changes what an owner has locked, unless `change` finds that others have it. Returns whether it
    /// was changed.
    fn change(
        &self,
        holders: &mut Holders,
        owner: LockOwner,
        (area, mode): (&LockArea, Option<LockMode>),
        change: impl FnOnce(&AdvisoryLocks) -> aquifer_pool::Result<bool>,
    ) -> Result<bool> {
        let count = holders.ranges;
        let Some(holder) = holders.get_mut(owner) else { return Ok(false) };
        let changed = holder.ranges.change(range_of(area), mode);
        if changed.growth() > 0 && count + changed.growth() > self.most_ranges {
            return Err(Errno(libc::ENOLCK));
        }
        let is_done = change(&holder.locks).map_err(failed)?;
        if is_done {
            let before = holder.ranges.count();
            holder.ranges.apply(&changed);
            holders.ranges = count - before + holder.ranges.count();
            if changed.frees {
                self.queue.wake(owner.node);
            }
        }
        Ok(is_done)
    }

    /// Ends what an owner has locked of an area.
    fn unlock(&self, holders: &mut Holders, owner: LockOwner, area: &LockArea) -> Result<()> {
        self.change(holders, owner, (area, None), |locks| locks.unlock(area).map(|()| true))?;
        Ok(())
    }

    /// Tries to lock. Returns whether it is locked now.
    fn try_lock(&self, holders: &mut Holders, wanted: &Wanted) -> Result<bool> {
        let Wanted { owner, fh, ref area, mode } = *wanted;
        self.holder(holders, owner, fh)?;
        self.change(holders, owner, (area, Some(mode)), |locks| locks.try_lock(area, mode))
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
        let tried_at = self.queue.wakes();
        match self.try_set(&asked) {
            Ok(None) => {
                let _ = answer.empty();
            }
            Ok(Some(wanted)) => {
                // From now on another thread answers it.
                let Some(answer) = answer.detach() else { return };
                self.wait(Wait::new(asked.unique, answer, wanted, tried_at));
            }
            Err(Errno(errno)) => {
                let _ = answer.error(errno);
            }
        }
    }

    /// Returns what is to be waited for.
    fn try_set(&self, asked: &Asked<'_>) -> Result<Option<Wanted>> {
        let owner = asked.owner;
        let Some(mode) = mode_of(asked.lock)? else {
            if asked.lock.start >= self.pool.lockable_bytes() && !is_flock(asked.lock) {
                // Nothing is locked there.
                return Ok(None);
            }
            let area = self.area(asked.lock)?;
            self.unlock(&mut held(&self.holders), owner, &area)?;
            return Ok(None);
        };
        let wanted = Wanted { owner, fh: asked.lock.fh, area: self.area(asked.lock)?, mode };
        let mut holders = held(&self.holders);
        let has_it = self.try_lock(&mut holders, &wanted)?;
        if !has_it && wanted.area == LockArea::File {
            // `flock` gives up the lock in the other mode, whether it gets the new one or not.
            self.unlock(&mut holders, owner, &wanted.area)?;
        }
        match (has_it, asked.waits) {
            (true, _) => Ok(None),
            (false, true) => Ok(Some(wanted)),
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
    fn wait(self: &Arc<Self>, wait: Wait) {
        if self.queue.add(wait, self.waits.as_ref()) {
            let (queue, locks) = (self.queue.clone(), Arc::downgrade(self));
            if thread::start(c"aquifer-locks", move || try_again(&queue, &locks)).is_err() {
                self.queue.without_thread();
            }
        }
    }

    /// Ends a wait.
    fn interrupt(&self, of: Unique) {
        self.queue.interrupt(of);
    }

    /// Tries all that is waited for of an inode.
    fn try_inode(&self, node: u64) {
        let (mut left, mut ended, mut refused) = (Vec::new(), Vec::new(), HashSet::new());
        for mut wait in self.queue.take(node) {
            if self.try_one(&mut wait, &mut refused) {
                ended.push(wait.wanted.owner);
            } else {
                left.push(wait);
            }
        }
        self.queue.put_back(node, left, &ended);
    }

    /// Returns whether the wait has ended. `refused` is what was tried before, and not got.
    fn try_one(
        &self,
        wait: &mut Wait,
        refused: &mut HashSet<(Range<u64>, bool, LockMode)>,
    ) -> bool {
        let Wanted { owner, ref area, mode, .. } = wait.wanted;
        let key = |mode| (range_of(area), *area == LockArea::File, mode);
        let mut holders = held(&self.holders);
        // Of what it has itself, another one may have been refused.
        let has_none = holders.get(owner).is_none_or(|holder| holder.ranges.count() == 0);
        if has_none && [LockMode::Shared, mode].iter().any(|mode| refused.contains(&key(*mode))) {
            return false;
        }
        // A new owner if its process has closed a descriptor meanwhile: what waits goes on, and gets the
        // lock.
        match self.try_lock(&mut holders, &wait.wanted) {
            Ok(false) => {
                refused.insert(key(mode));
                return false;
            }
            Ok(true) => {
                let answer = wait.answer.take();
                let delivered = answer.map_or(Delivered::Ended, Answer::empty);
                if delivered != Delivered::Yes {
                    let _ = self.unlock(&mut holders, owner, area);
                }
            }
            Err(Errno(errno)) => wait.end(errno),
        }
        true
    }

    /// Ends an owner with all of its locks.
    fn drop_holder(&self, holders: &mut Holders, owner: LockOwner) {
        if let Some(Holder { locks, ranges, .. }) = holders.remove(owner) {
            if ranges.count() > 0 {
                let _ = locks.unlock(&LockArea::File);
                let _ = locks.unlock(&LockArea::Bytes(0..u64::MAX));
                self.queue.wake(owner.node);
            }
            self.keeps.give_up(owner);
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

    /// Of an inode that nothing uses, unless the kernel `is_known` to have it again, as told while no
    /// process locks anything: all that is locked before was locked by those that have closed it.
    pub fn forgotten(&self, node: u64, is_known: impl FnOnce() -> bool) {
        let mut holders = held(&self.holders);
        if is_known() {
            return;
        }
        // What has its number next is not what they wait for.
        self.queue.end_all(node, libc::ESTALE);
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

/// An area as a range of its owner: one that locks whole files locks nothing else.
fn range_of(area: &LockArea) -> Range<u64> {
    match area {
        LockArea::File => 0..u64::MAX,
        LockArea::Bytes(range) => range.clone(),
    }
}

/// The error of a lock that cannot be tried, unlocked, or looked for.
fn failed(error: PoolError) -> Errno {
    match error {
        PoolError::CannotLock { source, .. } => match source.raw_os_error() {
            // Of the processes of the mount.
            Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM) => Errno(libc::ENOLCK),
            errno => Errno(errno.unwrap_or(libc::EIO)),
        },
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
fn try_again(queue: &Queue, locks: &Weak<Locks>) {
    let mut pauses = Pauses::new();
    while let Some(next) = queue.next(&mut pauses) {
        // Not while it waits: the pool is closed with the mount.
        let Some(locks) = locks.upgrade() else { return };
        let (Next::Some(nodes) | Next::All(nodes)) = &next;
        nodes.iter().for_each(|node| locks.try_inode(*node));
        pauses.tried(&next);
    }
}

impl PoolFs {
    fn locks(&self) -> Result<&Arc<Locks>> {
        self.locks.as_ref().ok_or(Errno(libc::ENOSYS))
    }

    /// Locks are kept by inode number: what is locked is open, so its number is not given again.
    fn number(&self, id: u64) -> Result<u64> {
        self.table.number(id).ok_or(Errno(libc::ESTALE))
    }

    pub(super) fn set_lock(
        &self,
        answer: Answer<'_>,
        unique: Unique,
        node: u64,
        lock: &LockIn,
        waits: bool,
    ) {
        match self.locks().and_then(|locks| Ok((locks, self.number(node)?))) {
            Ok((locks, number)) => {
                let owner = owner_of(number, lock);
                locks.set(answer, Asked { unique, owner, lock, waits });
            }
            Err(Errno(errno)) => {
                let _ = answer.error(errno);
            }
        }
    }

    pub(super) fn get_lock(&self, node: u64, lock: &LockIn) -> Result<LockOut> {
        self.locks()?.conflict(owner_of(self.number(node)?, lock), lock)
    }

    /// A process has closed a descriptor of the file.
    pub(super) fn flush(&self, node: u64, owner: u64) -> Result<()> {
        self.locks()?.flushed(self.number(node)?, owner);
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
