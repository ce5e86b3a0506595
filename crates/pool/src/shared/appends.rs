//! The pending appends to the log, and the end of its durable prefix: the part of the log's state
//! that lies in shared memory.
//!
//! ```text
//!              durable                                             head
//!   ring  ──────┬──────────────┬──────────────┬─────────────────────┬────
//!               │ first:       │              │ next - 1:           │
//!               │ WRITTEN      │ DURABLE      │ PACKED, grows       │
//!   ──────────────────────────────────────────────────────────────────
//!               entries first % PENDING .. next % PENDING
//! ```
//!
//! The module [`log`](crate::log::locks) describes what they are for. Reserving room, adding and removing
//! entries, and advancing the durable prefix happen *with the metadata mutex* (the methods say so);
//! bytes are written to the log without it, each append to its own room. This is all that is
//! lock-free:
//!
//! | stored by | | loaded by | which relies on |
//! |---|---|---|---|
//! | [`advance`](Appends::advance), after all before it are complete | `durable_lsn` | waiters and readers of the log | the bytes before it are all there |
//! | [`push`](Appends::push), in a reused entry | `lsn` | [`lsns`](Appends::lsns) | the entry's previous append is decided, and visible as such |
//! | [`extend_packed`](Appends::extend_packed), before the image changes | `end_lsn` | [`being_applied`](Appends::being_applied), while the image's version is odd | the record is there |
//! | [`give_up`](Appends::give_up), after a failure was noted | `state` | the process that completes it | the failure is visible |
//! | [`note_at_place`], after the bytes were copied | `applied_lsn` | [`at_place`]: readers, and commits that read their base | committed bytes before it lie at their place |
//!
//! # A hole
//! If the owner of an append died or gave up, a process that waits behind the append adopts it,
//! with the mutex ([`Appends::adopt`]). If its record is incomplete, the appends that depend on it
//! are voided *before* its room is filled ([`Appends::close_hole`]): until then the hole keeps the
//! durable prefix from reaching them.
//!
//! # The close and the mark of packed records
//! These need no ordering between threads: the close is written with the mutex, the mark by the one
//! process that has adopted the closed append, and both are read only by the single process that
//! recovers the pool. The crash tests cover what a power cut leaves of them.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::sync::AtomicU64;

/// How many appends can be in flight.
pub(crate) const PENDING: usize = if cfg!(loom) { 2 } else { 512 };

/// An append that is not yet part of the durable prefix.
#[repr(C)]
pub(crate) struct Pending {
    pub lsn: AtomicU64,
    pub end_lsn: AtomicU64,
    /// One of the constants of [`append`].
    pub state: AtomicU64,
    /// Index of the process slot.
    pub owner: AtomicU64,
    /// 1 if the record changes metadata.
    pub is_metadata: AtomicU64,
    /// 1 for packed records, even while a process is making them durable.
    pub is_packed: AtomicU64,
    /// 1 if one of the packed records exposes bytes.
    pub exposes: AtomicU64,
    /// The position of the record that closes packed ones.
    pub close_lsn: AtomicU64,
    /// The previous commit of the same process, if it was pending as well; else
    /// [`append::NOTHING`].
    pub depends_lsn: AtomicU64,
    /// Raised after each part that was made durable, by the process that does so: the append may be
    /// gigabytes, and waiters check for progress.
    pub progress: AtomicU64,
}

/// States of a pending append.
pub(crate) mod append {
    /// Its bytes are not in the log yet.
    pub const RESERVED: u64 = 1;
    /// Its bytes are in the log, visible to all processes, not durable.
    pub const WRITTEN: u64 = 2;
    /// Its bytes are durable.
    pub const DURABLE: u64 = 3;
    /// Its owner gave up: another process completes it.
    pub const ABANDONED: u64 = 4;
    /// Packed records, complete and visible to all processes, not durable. While it is the last
    /// append, more records may be added. Any process that needs them durable makes them so.
    pub const PACKED: u64 = 5;

    /// No position in the log.
    pub const NOTHING: u64 = u64::MAX;
}

/// The parameters of a new append.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewAppend {
    pub lsn: u64,
    pub end_lsn: u64,
    pub state: u64,
    pub owner: u64,
    pub is_metadata: bool,
    pub depends_lsn: u64,
}

/// Notes that everything committed before `lsn` was copied to its place; with the maintenance
/// mutex.
pub(crate) fn note_at_place(applied_lsn: &AtomicU64, lsn: u64) {
    // Release: pairs with the Acquire in `at_place`.
    applied_lsn.store(lsn, Release);
}

/// The position before which everything committed lies at its place, visible to the calling thread.
pub(crate) fn at_place(applied_lsn: &AtomicU64) -> u64 {
    // Acquire: pairs with the Release in `note_at_place`.
    applied_lsn.load(Acquire)
}

/// See the module's documentation. Lies in shared memory.
#[repr(C)]
pub(crate) struct Appends {
    /// Everything before it is durable in the log.
    pub durable_lsn: AtomicU64,
    /// Metadata records before it are in the image.
    pub metadata_lsn: AtomicU64,
    /// Pending appends are `pending[first % PENDING] .. pending[next % PENDING]`, in log order.
    first: AtomicU64,
    next: AtomicU64,
    pending: [Pending; PENDING],
}

impl Appends {
    /// Of an empty log.
    #[cfg(all(test, loom))]
    pub fn new() -> Appends {
        let zero = || AtomicU64::new(0);
        let pending = || Pending {
            lsn: zero(),
            end_lsn: zero(),
            state: zero(),
            owner: zero(),
            is_metadata: zero(),
            is_packed: zero(),
            exposes: zero(),
            close_lsn: zero(),
            depends_lsn: zero(),
            progress: zero(),
        };
        Appends {
            durable_lsn: zero(),
            metadata_lsn: zero(),
            first: zero(),
            next: zero(),
            pending: std::array::from_fn(|_| pending()),
        }
    }

    pub fn entry(&self, index: u64) -> &Pending {
        &self.pending[index as usize % PENDING]
    }

    /// The indexes of all entries; with the metadata mutex.
    pub fn indexes(&self) -> std::ops::Range<u64> {
        self.first.load(Relaxed)..self.next.load(Relaxed)
    }

    /// Whether there are none; without the mutex, at some moment during the call.
    pub fn are_none(&self) -> bool {
        self.first.load(Acquire) == self.next.load(Acquire)
    }

    /// The first entry, which holds back the durable prefix; if there are none, the last one that
    /// was there.
    pub fn first(&self) -> &Pending {
        self.entry(self.first.load(Acquire))
    }

    /// The position of the next record; with the metadata mutex.
    pub fn head_lsn(&self) -> u64 {
        match self.indexes().next_back() {
            Some(last) => self.entry(last).end_lsn.load(Relaxed),
            None => self.durable_lsn.load(Relaxed),
        }
    }

    /// Whether there are entries for `count` more appends.
    pub fn has_entries(&self, count: u64) -> bool {
        let indexes = self.indexes();
        indexes.end - indexes.start + count <= PENDING as u64
    }

    /// Adds an append, and returns its index; with the metadata mutex.
    pub fn push(&self, new: NewAppend) -> u64 {
        let index = self.next.load(Relaxed);
        let pending = self.entry(index);
        // Release: pairs with the Acquire in `lsns`. A thread that loads the new position also sees
        // that the entry's previous append was decided.
        pending.lsn.store(new.lsn, Release);
        pending.end_lsn.store(new.end_lsn, Relaxed);
        pending.state.store(new.state, Relaxed);
        pending.is_packed.store((new.state == append::PACKED).into(), Relaxed);
        pending.exposes.store(0, Relaxed);
        pending.owner.store(new.owner, Relaxed);
        pending.is_metadata.store(new.is_metadata.into(), Relaxed);
        pending.depends_lsn.store(new.depends_lsn, Relaxed);
        // Release: this store makes the entry count, so it comes after the entry's fields, also for
        // the process that repairs the state if this one dies here.
        self.next.store(index + 1, Release);
        index
    }

    /// Removes the last append, which must be empty; with the metadata mutex.
    pub fn take_back(&self, last: u64) {
        self.next.store(last, Release);
    }

    /// Notes that the bytes of an append are in the log, visible to all processes.
    pub fn note_written(&self, index: u64) {
        // Release: the bytes are visible before the state.
        self.entry(index).state.store(append::WRITTEN, Release);
    }

    /// Notes that the bytes of an append are durable; with the metadata mutex.
    pub fn note_durable(&self, index: u64) {
        self.entry(index).state.store(append::DURABLE, Relaxed);
    }

    /// Leaves an append to a process that waits behind it. Needs no mutex: the entry belongs to its
    /// owner until it is durable.
    pub fn give_up(&self, index: u64) {
        // Release: pairs with the Acquire in `is_given_up`. The failure noted before is visible to
        // a process that finds the append abandoned.
        self.entry(index).state.store(append::ABANDONED, Release);
    }

    /// Whether the owner has abandoned an append.
    pub fn is_given_up(&self, index: u64) -> bool {
        // Acquire: pairs with the Release in `give_up`.
        self.entry(index).state.load(Acquire) == append::ABANDONED
    }

    /// Advances the durable prefix over the durable appends; with the metadata mutex. Removes each
    /// after calling `pass`. Returns whether there were any. With `believes_all`, every append
    /// counts as durable.
    pub fn advance(&self, believes_all: bool, pass: impl Fn()) -> bool {
        let mut has_moved = false;
        loop {
            let first = self.first.load(Relaxed);
            if first == self.next.load(Relaxed) {
                return has_moved;
            }
            let pending = self.entry(first);
            let end_lsn = pending.end_lsn.load(Relaxed);
            let is_applied = pending.is_metadata.load(Relaxed) == 0
                || self.metadata_lsn.load(Relaxed) >= end_lsn;
            let is_durable = pending.state.load(Relaxed) == append::DURABLE || believes_all;
            if !is_durable || !is_applied {
                return has_moved;
            }
            // Release: pairs with the Acquire in `durable_lsn`. Stored before the entry is removed:
            // if this process dies in between, the repair only removes the entry again.
            self.durable_lsn.store(end_lsn, Release);
            pass();
            self.first.store(first + 1, Release);
            has_moved = true;
        }
    }

    /// The end of the durable log: everything before it is visible to the calling thread.
    pub fn durable_lsn(&self) -> u64 {
        // Acquire: pairs with the Release in `advance`.
        self.durable_lsn.load(Acquire)
    }

    /// Moves the end of packed records behind a record that is in the log, which makes the record
    /// count. With the metadata mutex.
    pub fn extend_packed(&self, index: u64, end_lsn: u64) {
        // Release: the record is visible before the end. Pairs with the Acquire of the image's odd
        // version, which is stored later (`ImageVersion::unchanged_during`).
        self.entry(index).end_lsn.store(end_lsn, Release);
    }

    /// The append that accepts packed records, with its end; with the metadata mutex.
    pub fn open_packed(&self) -> Option<(u64, u64)> {
        let last = self.indexes().next_back()?;
        let pending = self.entry(last);
        (pending.state.load(Relaxed) == append::PACKED)
            .then(|| (last, pending.end_lsn.load(Relaxed)))
    }

    /// Notes that metadata records before `end_lsn` are in the image; with the metadata mutex.
    pub fn note_applied(&self, end_lsn: u64) {
        if self.metadata_lsn.load(Relaxed) < end_lsn {
            // Release: the image is visible before the position. Pairs with the Acquire in
            // `being_applied`.
            self.metadata_lsn.store(end_lsn, Release);
        }
    }

    /// The position of the record that is in the log and not completely in the image, if there is
    /// one. Valid as long as the image has the odd version that the caller has loaded.
    pub fn being_applied(&self) -> Option<u64> {
        // Acquire: pairs with the Release in `note_applied`. What is before this position is in the
        // image.
        let applied_lsn = self.metadata_lsn.load(Acquire);
        let pending = self.first.load(Acquire)..self.next.load(Acquire);
        let unapplied = pending.take(PENDING).map(|index| self.entry(index)).filter(|pending| {
            pending.is_metadata.load(Relaxed) != 0 && pending.end_lsn.load(Relaxed) > applied_lsn
        });
        // Only the holder of the metadata mutex adds such records, one at a time.
        let pending = unapplied.last()?;
        // Packed records before this position are applied.
        Some(pending.lsn.load(Relaxed).max(match pending.is_packed.load(Relaxed) {
            0 => 0,
            _ => applied_lsn,
        }))
    }

    /// The start positions of the appends that are not known to be durable. Every append that was
    /// pending at the call is among them, or lies before the durable position if that is loaded
    /// afterwards.
    pub fn lsns(&self) -> Vec<u64> {
        let pending = self.first.load(Acquire)..self.next.load(Acquire);
        pending.take(PENDING).map(|index| self.entry(index).lsn.load(Acquire)).collect()
    }

    /// Makes this process the owner of an abandoned append; with the metadata mutex. If this
    /// process dies as well, the next one adopts it.
    pub fn adopt(&self, index: u64, owner: u64) {
        self.entry(index).owner.store(owner, Relaxed);
        self.entry(index).state.store(append::RESERVED, Relaxed);
    }

    /// The appends whose chain of `depends_lsn` starts at this one; with the metadata mutex.
    pub fn dependents_of(&self, hole: u64) -> Vec<(u64, u64)> {
        let room = |index: u64| {
            let pending = self.entry(index);
            (pending.lsn.load(Relaxed), pending.end_lsn.load(Relaxed))
        };
        let mut void = vec![room(hole)];
        for index in hole + 1..self.next.load(Relaxed) {
            let depends_lsn = self.entry(index).depends_lsn.load(Relaxed);
            if void.iter().any(|(lsn, _)| *lsn == depends_lsn) {
                void.push(room(index));
            }
        }
        void.split_off(1)
    }

    /// Calls `fill` for the room of the dependents and then of the missing append: see the module's
    /// documentation.
    pub fn close_hole<E>(
        dependents: &[(u64, u64)],
        hole: (u64, u64),
        mut fill: impl FnMut(u64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        dependents.iter().chain([&hole]).try_for_each(|&(lsn, end_lsn)| fill(lsn, end_lsn))
    }
}
