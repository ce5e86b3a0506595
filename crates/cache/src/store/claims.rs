//! The uses of each device in this process: a device that is written has only one copy of its
//! bytes.
//!
//! Two stores of one device would each overwrite whole pages that the other wrote, and keep stale
//! copies of them. So:
//!
//! | wanted | existing use | result |
//! |---|---|---|
//! | mapping of the user backend, or `Pages` | the same interface of the same cache, same length | both use one [`Store`] |
//! | any use, read-only | any other use, read-only | each has its own store |
//! | any other use | any other use, one of them writable | [`CacheError::AlreadyAttached`] |
//!
//! A store that was once writable counts as writable until its last user drops it.
//!
//! # Invariants
//! * An entry stays until the store's pages are written back: a new store of the device would read
//!   bytes that the old one is about to overwrite. A thread that wants the same store waits for
//!   that.
//! * The table belongs to one process: a child of a fork starts with an empty one.
//!
//! Lock order: the table's lock is held while the table and one store's protection change, never
//! during calls of a device.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use aquifer_device::{Device, DeviceIdentity};
use aquifer_vm::{PerProcess, ProcessMark};

use crate::engine::Kind;
use crate::error::{CacheError, Result};
use crate::store::{PageMemory, Store};

/// One use of a device.
struct Entry {
    number: u64,
    /// The cache, as its engine's address: entries do not outlive it.
    cache: usize,
    kind: Kind,
    len_bytes: u64,
    writable: bool,
    /// One user requires exclusive use of the device: nothing else may change the bytes.
    alone: bool,
    stage: Stage,
}

enum Stage {
    /// Being created.
    Opening,
    /// In use; if it cannot be upgraded, being torn down. An [`Attached`].
    Open(Weak<dyn Any + Send + Sync>),
    /// In use, with nothing to share.
    Unshared,
}

#[derive(Default)]
struct Entries {
    next: u64,
    by_device: HashMap<DeviceIdentity, Vec<Entry>>,
}

#[derive(Default)]
struct Table {
    entries: Mutex<Entries>,
    changed: Condvar,
}

static TABLE: PerProcess<Table> = PerProcess::new();

impl Table {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A use of a device that is requested.
#[derive(Clone)]
pub(crate) struct Wanted {
    /// The cache, as its engine's address.
    pub cache: usize,
    pub device: Arc<dyn Device>,
    pub identity: DeviceIdentity,
    pub kind: Kind,
    pub len_bytes: u64,
    pub writable: bool,
}

impl Wanted {
    fn may_share(&self, entry: &Entry) -> bool {
        entry.cache == self.cache && entry.kind == self.kind && entry.len_bytes == self.len_bytes
    }

    fn refused(&self, entry: &Entry) -> CacheError {
        let how = match () {
            () if entry.alone => "by an arena of vectors, which needs it alone",
            () if entry.cache != self.cache => "through another cache of this process",
            () if entry.kind == Kind::Kernel => "by a mapping of the kernel backend",
            () if entry.kind == Kind::Arena && self.kind != Kind::Arena => "by `Pages`",
            () if entry.kind == Kind::Mapped && self.kind != Kind::Mapped => "by a mapping",
            () => "with another length",
        };
        CacheError::AlreadyAttached { device: self.device.name().to_owned(), how }
    }

    /// Fails if the use conflicts with an entry of the device other than `own`.
    fn check(&self, entries: &[Entry], own: Option<u64>) -> Result<()> {
        let others = || entries.iter().filter(|entry| Some(entry.number) != own);
        match others().find(|entry| entry.writable || entry.alone || self.writable) {
            Some(entry) => Err(self.refused(entry)),
            None => Ok(()),
        }
    }
}

/// An entry of the table, removed when this is dropped.
pub(crate) struct Claim {
    mark: ProcessMark,
    identity: DeviceIdentity,
    number: u64,
}

impl Claim {
    /// Enters a use that shares nothing.
    ///
    /// # Errors
    /// [`CacheError::AlreadyAttached`].
    pub fn unshared(wanted: &Wanted) -> Result<Claim> {
        let mut entries = TABLE.get().lock();
        let of_device = entries.by_device.get(&wanted.identity).map_or(&[][..], Vec::as_slice);
        wanted.check(of_device, None)?;
        Ok(entries.enter(wanted, Stage::Unshared))
    }

    fn with_entry<T>(&self, work: impl FnOnce(&mut Entry) -> T) -> T {
        let mut entries = TABLE.get().lock();
        let of_device = entries.by_device.get_mut(&self.identity).expect("it has this entry");
        let own = of_device.iter_mut().find(|entry| entry.number == self.number);
        work(own.expect("an entry ends with its claim"))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.mark.is_current() {
            return; // the entry is in the parent's table
        }
        let table = TABLE.get();
        let mut entries = table.lock();
        if let Some(of_device) = entries.by_device.get_mut(&self.identity) {
            of_device.retain(|entry| entry.number != self.number);
            if of_device.is_empty() {
                entries.by_device.remove(&self.identity);
            }
        }
        table.changed.notify_all();
    }
}

impl Entries {
    fn enter(&mut self, wanted: &Wanted, stage: Stage) -> Claim {
        self.next += 1;
        let number = self.next;
        self.by_device.entry(wanted.identity).or_default().push(Entry {
            number,
            cache: wanted.cache,
            kind: wanted.kind,
            len_bytes: wanted.len_bytes,
            writable: wanted.writable,
            alone: false,
            stage,
        });
        Claim { mark: ProcessMark::new(), identity: wanted.identity, number }
    }
}

/// A store with its entry: torn down when its last user drops it.
pub(crate) struct Attached<M: PageMemory> {
    // Dropped before the store. The store keeps the device alive, whose identity may be an address
    // that another device gets next.
    claim: Claim,
    pub store: Arc<Store<M>>,
}

impl<M: PageMemory> Attached<M> {
    /// The store of a device that this cache already has, if it can be shared.
    ///
    /// # Errors
    /// [`CacheError::AlreadyAttached`]; [`CacheError::Kernel`] if a store cannot be made writable.
    pub fn existing(wanted: &Wanted) -> Result<Option<Arc<Attached<M>>>> {
        let table = TABLE.get();
        let mut entries = table.lock();
        loop {
            let Some(of_device) = entries.by_device.get_mut(&wanted.identity) else {
                return Ok(None);
            };
            let Some(place) = of_device.iter().position(|entry| wanted.may_share(entry)) else {
                return Ok(None);
            };
            let attached = match &of_device[place].stage {
                Stage::Open(attached) => attached.upgrade(),
                Stage::Opening => None,
                Stage::Unshared => unreachable!("what can be shared is"),
            };
            let Some(attached) = attached else {
                // Being created, or written back.
                entries = table.changed.wait(entries).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let attached: Arc<Attached<M>> =
                attached.downcast().expect("a kind of use has one kind of memory");
            let outcome = attached.admit(wanted, of_device, place);
            // Release the lock first: if this is now the last reference, the store is torn down
            // here.
            drop(entries);
            return outcome.map(|()| Some(attached));
        }
    }

    /// Admits one more user to the store.
    fn admit(&self, wanted: &Wanted, entries: &mut [Entry], place: usize) -> Result<()> {
        if entries[place].alone {
            return Err(wanted.refused(&entries[place]));
        }
        if wanted.writable && !entries[place].writable {
            wanted.check(entries, Some(entries[place].number))?;
            self.store.make_writable(wanted.device.clone())?;
            entries[place].writable = true;
        }
        Ok(())
    }

    /// The store of a device: an existing one, or a new one that `make` creates.
    ///
    /// # Errors
    /// As [`Attached::existing`], and those of `make`.
    pub fn attach(
        wanted: &Wanted,
        make: impl FnOnce() -> Result<Arc<Store<M>>>,
    ) -> Result<Arc<Attached<M>>> {
        let claim = loop {
            if let Some(attached) = Self::existing(wanted)? {
                return Ok(attached);
            }
            let mut entries = TABLE.get().lock();
            let of_device = entries.by_device.get(&wanted.identity).map_or(&[][..], Vec::as_slice);
            // Another thread may have entered a use in between.
            if !of_device.iter().any(|entry| wanted.may_share(entry)) {
                wanted.check(of_device, None)?;
                break entries.enter(wanted, Stage::Opening);
            }
        };
        let attached = Arc::new(Attached { store: make()?, claim });
        let shared: Weak<dyn Any + Send + Sync> = Arc::downgrade(&attached) as _;
        attached.claim.with_entry(|entry| entry.stage = Stage::Open(shared));
        TABLE.get().changed.notify_all();
        // A call of the device: while the entry was being opened, other users of the device would wait for it.
        attached.store.engine.join_buffers(attached.store.first_device());
        Ok(attached)
    }

    /// Excludes other users permanently, if there are none now.
    ///
    /// # Errors
    /// [`CacheError::AlreadyAttached`].
    pub fn keep_alone(self: &Arc<Self>) -> Result<()> {
        self.claim.with_entry(|entry| {
            // Another user can only attach under the table's lock, which is held.
            if entry.alone || Arc::strong_count(self) > 1 {
                return Err(CacheError::AlreadyAttached {
                    device: self.store.device().name().to_owned(),
                    how: "by another mapping of this cache",
                });
            }
            entry.alone = true;
            Ok(())
        })
    }
}

impl<M: PageMemory> Drop for Attached<M> {
    fn drop(&mut self) {
        let engine = self.store.engine.clone();
        if !engine.mark.is_current() {
            return;
        }
        engine.detach(self.store.id);
        self.store.teardown();
        engine.release_id(self.store.id);
        engine.leave_buffers(&**self.store.first_device());
        engine.leave_budget(M::KIND);
    }
}
