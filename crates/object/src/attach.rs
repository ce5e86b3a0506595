//! Attaching: from a name and a key to memory at the object's address.
//!
//! ```text
//!   look the name up ─▶ check the key ─▶ lock the inode ─▶ still the same object? ─▶ decide and apply what is
//!          ▲                                                        │ no             in the log ─▶ map ─▶ track
//!          └────────────────────────────────────────────────────────┘
//! ```
//!
//! The lock is an open-file-description lock on the object's byte: one writer or many readers,
//! across processes and PID namespaces, released when its process ends. [`Attached::detach`], or
//! the drop, undoes an attachment in reverse order. In a forked child all of it is inert: the
//! memory is not mapped, and the lock is the parent's.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::{Inode, InodeKind};
use aquifer_pool::{InodeLock, LockMode, OwnedPin, PoolError};
use aquifer_vm::{DirtyTracker, FixedRange, ProcessMark};

use crate::access::Access;
use crate::base::{Bases, Changes};
use crate::error::{ObjectError, Result, text};
use crate::keys;
use crate::memory::Object;
use crate::options::ObjectOptions;
use crate::shadow::Shadow;
use crate::shared::{Shared, content};
use crate::writing::Writing;

/// An object attached to this process.
pub(crate) struct Attached {
    pub object: Object,
    pub access: Access,
    pub is_relocatable: bool,
    pub is_heap: bool,
    /// Whether its heap is to record stores: off once a pointer to the memory was given out.
    pub records_stores: AtomicBool,
    pub process: ProcessMark,
    pub psyncs: AtomicU64,
    pub psync_pages: AtomicU64,
    pub psync_bytes: AtomicU64,
    /// `None` once it is detached.
    held: Mutex<Option<Held>>,
}

/// The resources that detaching releases, in this order.
pub(crate) struct Held {
    pub writing: Option<Writing>,
    pub memory: FixedRange,
    pub lock: Arc<InodeLock>,
    /// Of a handle that only reads.
    pub pin: Option<OwnedPin>,
}

/// How many lookups are tried while the object keeps being replaced by another one of the same
/// name.
const ATTEMPTS: usize = 16;

impl Shared {
    /// Finds an object, checks the key, and locks it. The returned inode is valid while the lock is
    /// held.
    pub fn claim(
        &self,
        name: &[u8],
        access: Access,
        key: Option<&[u8]>,
    ) -> Result<(Inode, InodeLock)> {
        let mode = match access {
            Access::Read => LockMode::Shared,
            Access::Write => LockMode::Exclusive,
        };
        if access == Access::Write && !self.pool.is_writable() {
            return Err(ObjectError::Pool(PoolError::ReadOnly {
                path: self.pool.media().path().to_path_buf(),
                reason: "it was opened for reading",
            }));
        }
        for attempt in 0..ATTEMPTS {
            let found = match self.find(name) {
                Err(ObjectError::NotFound { name }) if attempt > 0 => {
                    return Err(ObjectError::Destroyed { name });
                }
                other => other?,
            };
            keys::check(name, &found.keys, access, key)?;
            let lock = self.lock(&found, mode)?;
            if let Some(inode) = self.unchanged(&found)? {
                keys::check(name, &inode.keys, access, key)?;
                return Ok((inode, lock));
            }
        }
        Err(ObjectError::Destroyed { name: text(name) })
    }

    /// The current inode of the locked object, if it is still the same object: before locking, it
    /// may have been changed, or destroyed and its number reused.
    fn unchanged(&self, found: &Inode) -> Result<Option<Inode>> {
        let inode = self.pool.inode(found.number)?;
        let is_same = inode.kind == InodeKind::Object
            && inode.generation == found.generation
            && inode.name == found.name;
        Ok(is_same.then_some(inode))
    }

    /// Pins the pages of an object that is locked for reading, and returns its inode as of then.
    ///
    /// The lock keeps its pages while all its holders live: one that died may have published a change
    /// that frees them, and a handle that only reads cannot have it applied first, as a writer does
    /// when it locks ([`aquifer_pool::Pool::lock_inode`]). Another process applies it at any time.
    fn pin(&self, mut inode: Inode) -> Result<(Inode, OwnedPin)> {
        // As often as such a change is applied.
        loop {
            let pin = self.pool.pin_owned(inode.number, inode.layout_version)?;
            let Some(now) = self.unchanged(&inode)? else {
                return Err(ObjectError::Destroyed { name: text(&inode.name) });
            };
            if now.layout_version == inode.layout_version {
                return Ok((now, pin));
            }
            inode = now;
        }
    }

    fn lock(&self, inode: &Inode, mode: LockMode) -> Result<InodeLock> {
        let name = || text(&inode.name);
        self.pool.lock_inode(inode.number, mode).map_err(|error| match error {
            PoolError::Locked { holder, .. } => ObjectError::Attached {
                name: name(),
                holder,
                access: match mode {
                    LockMode::Shared => Access::Read,
                    LockMode::Exclusive => Access::Write,
                },
            },
            PoolError::AlreadyLocked { .. } => ObjectError::AttachedHere { name: name() },
            PoolError::Forked => ObjectError::Forked,
            other => other.into(),
        })
    }
}

impl Attached {
    /// Attaches an object.
    pub fn attach(
        shared: &Arc<Shared>,
        name: &[u8],
        access: Access,
        options: &ObjectOptions<'_>,
    ) -> Result<Attached> {
        let (inode, lock) = shared.claim(name, access, options.key)?;
        let (inode, pin) = if shared.pool.is_writable() {
            (inode, None)
        } else {
            let (inode, pin) = shared.pin(inode)?;
            (inode, Some(pin))
        };
        let object = Object {
            shared: shared.clone(),
            name: name.to_vec(),
            number: inode.number,
            address: inode.address,
            media: content(&inode),
            flights: Arc::default(),
        };
        let patches = shared.pool.bring_up_to_date(object.media)?;
        let memory = object.map(access, &patches)?;
        let writing = match access {
            Access::Read => None,
            Access::Write => {
                // SAFETY: the mapping is private and of this kind; `Held` keeps it alive with the
                // tracker, and no other code drops its pages or registers it.
                let tracker = unsafe {
                    DirtyTracker::new(
                        memory.address(),
                        memory.len_bytes(),
                        options.tracker,
                        object.kind(),
                    )
                };
                let failed = |source| ObjectError::Memory { name: text(name), source };
                let mut tracker = tracker.map_err(failed)?;
                if !shared.pool.media().maps_privately() {
                    // Filling the copy stored to all of it, which is not a change.
                    tracker.reset_baseline().map_err(failed)?;
                }
                let budget_bytes = options
                    .shadow_budget_bytes
                    .unwrap_or_else(|| aquifer_sys::cpu::memory_bytes() / 4);
                Some(Writing {
                    tracker,
                    captured: Vec::new(),
                    changes: Changes::default(),
                    bases: Bases::new(inode.content_pages(), shared.pool.media().domain()),
                    is_behind: false,
                    is_captured: false,
                    last_lsn: 0,
                    named_pages: 0,
                    shadow: Shadow::found(inode.shadow),
                    budget_pages: budget_bytes / PAGE_BYTES,
                })
            }
        };
        aquifer_sys::event!(
            debug,
            object = %text(name),
            access = ?access,
            len_bytes = memory.len_bytes(),
            "object attached"
        );
        Ok(Attached {
            object,
            access,
            is_relocatable: inode.is_relocatable,
            is_heap: inode.is_heap,
            records_stores: AtomicBool::new(options.records_stores && access == Access::Write),
            process: ProcessMark::new(),
            psyncs: AtomicU64::new(0),
            psync_pages: AtomicU64::new(0),
            psync_bytes: AtomicU64::new(0),
            held: Mutex::new(Some(Held { writing, memory, lock: Arc::new(lock), pin })),
        })
    }

    /// The held resources; `None` once it is detached.
    pub fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails in a forked child.
    pub fn check_process(&self) -> Result<()> {
        if self.process.is_current() { Ok(()) } else { Err(ObjectError::Forked) }
    }

    /// Releases everything. Stores since the last psync are lost. Does nothing when called again.
    pub fn detach(&self) -> Result<()> {
        self.check_process()?;
        self.object.flights.wait_landed(u64::MAX);
        let Some(Held { writing, memory, lock, pin }) = self.held().take() else { return Ok(()) };
        let Some(writing) = writing else {
            // Unmap first: the next holder of the lock must find the addresses free.
            drop(memory);
            drop(pin);
            drop(lock);
            return Ok(());
        };
        let Writing { tracker, mut shadow, is_behind, .. } = writing;
        drop(tracker);
        drop(memory);
        let freed = shadow.free(&self.object.shared.pool, self.object.number);
        drop(lock);
        if is_behind || self.object.flights.has_returned() {
            Err(ObjectError::Unsynced { name: self.object.name_text() })
        } else {
            freed
        }
    }
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Attached")
            .field("name", &self.object.name_text())
            .finish_non_exhaustive()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // Callers that need the error call `detach`. In a forked child this does nothing.
        let _ = self.detach();
    }
}

#[cfg(test)]
mod tests {
    use aquifer_crashkit::CrashMedia;
    use aquifer_pool::Pool;
    use aquifer_pool::media::PersistenceDomain;

    use crate::Objects;

    /// A race between looking up a name and locking the inode found.
    #[test]
    fn a_number_that_was_used_again_is_not_the_same_object() {
        let media = CrashMedia::new(1 << 20, PersistenceDomain::PageCache).unwrap();
        let open = Pool::options().exclusive(true);
        let pool = open.create_on(std::sync::Arc::new(media));
        let objects = Objects::new(pool.unwrap());
        let create = |name| objects.create(name, 1).map(drop).unwrap();
        let find = |name: &str| objects.shared.find(name.as_bytes()).unwrap();
        create("a");
        let first = find("a");
        assert!(objects.shared.unchanged(&first).unwrap().is_some());
        objects.resize("a", 9000).unwrap();
        let larger = objects.shared.unchanged(&first).unwrap().expect("the same object");
        assert_eq!(larger.size_bytes, 12288, "as it is now");
        objects.rename("a", "b").unwrap();
        assert!(objects.shared.unchanged(&first).unwrap().is_none(), "another name");
        objects.destroy("b").unwrap();
        assert!(objects.shared.unchanged(&first).unwrap().is_none(), "no object");
        create("a");
        assert_eq!(find("a").number, first.number);
        assert!(objects.shared.unchanged(&first).unwrap().is_none(), "another object");
    }
}
