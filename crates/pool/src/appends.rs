//! Appends to the log that are under way, and how far the log is durable: what of it lies in shared memory.
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
//! The module [`log`](crate::log) says what they are for. Room is reserved, entries are added and removed, and the durable prefix is moved on
//! *with the metadata mutex* (the methods that say so here); bytes are written to the log without it, each append to its own room. So what
//! is lock-free is little, and this is all of it:
//!
//! | stored by | | loaded by | which relies on |
//! |---|---|---|---|
//! | [`advance`](Appends::advance), after all before it are complete | `durable_lsn` | who waits, who reads the log | the bytes before it are all there |
//! | [`push`](Appends::push), in an entry that is used again | `lsn` | [`lsns`](Appends::lsns) | what the entry was before is decided, and seen so |
//! | [`extend_packed`](Appends::extend_packed), before the image changes | `end_lsn` | [`being_applied`](Appends::being_applied), while the image's version is odd | the record is there |
//! | [`give_up`](Appends::give_up), after a failure was noted | `state` | who completes it | the failure is seen |
//! | [`note_at_place`], after the bytes were copied | `applied_lsn` | [`at_place`]: who reads them there, as readers and the bases of commits do | what was committed before it lies at its place |
//!
//! # A hole
//! An append whose owner died or gave up is adopted by one of those who wait behind it, with the mutex ([`Appends::adopt`]). If its record is not
//! whole, those that depend on it are made void *before* its room is filled ([`Appends::close_hole`]): until then it keeps the durable
//! prefix from reaching them.
//!
//! # The close and the mark of packed records
//! are no matter of threads: the close is written with the mutex, the mark by the one process that has adopted the closed append, and
//! both are read when a pool is recovered, by one process alone. What a power cut leaves of them is tried by the crash tests.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::sync::AtomicU64;

/// Appends that can be in flight.
pub(crate) const PENDING: usize = if cfg!(loom) { 2 } else { 512 };

/// An append that was begun and is not yet part of the durable prefix.
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
    /// 1 for packed records: also when somebody is making them durable.
    pub is_packed: AtomicU64,
    /// 1 if one of the packed records exposes something.
    pub exposes: AtomicU64,
    /// Where the record lies that closes packed ones.
    pub close_lsn: AtomicU64,
    /// The commit before it by the same process, if that was pending as well; else [`append::NOTHING`].
    pub depends_lsn: AtomicU64,
    /// Raised by who makes it durable, with each part that is: it may be gigabytes, and others wait for it.
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
    /// Its owner gave up: somebody else completes it.
    pub const ABANDONED: u64 = 4;
    /// Packed records, whole and visible to all processes, not durable. While it is the last append, more may follow. Whoever
    /// wants them durable makes them so.
    pub const PACKED: u64 = 5;

    /// No position in the log.
    pub const NOTHING: u64 = u64::MAX;
}

/// What an append is begun with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewAppend {
    pub lsn: u64,
    pub end_lsn: u64,
    pub state: u64,
    pub owner: u64,
    pub is_metadata: bool,
    pub depends_lsn: u64,
}

/// Says that all that was committed before `lsn` was copied to its place; with the maintenance mutex.
pub(crate) fn note_at_place(applied_lsn: &AtomicU64, lsn: u64) {
    // Release: pairs with the Acquire in `at_place`.
    applied_lsn.store(lsn, Release);
}

/// Before which position all that was committed lies at its place, for the thread that asks.
pub(crate) fn at_place(applied_lsn: &AtomicU64) -> u64 {
    // Acquire: pairs with the Release in `note_at_place`.
    applied_lsn.load(Acquire)
}

/// See the module's documentation. Lies in memory that processes share.
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
    /// Of a log in which there is nothing.
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

    /// The numbers of all; with the metadata mutex.
    pub fn indexes(&self) -> std::ops::Range<u64> {
        self.first.load(Relaxed)..self.next.load(Relaxed)
    }

    /// Whether there are none; without the mutex as of some moment.
    pub fn are_none(&self) -> bool {
        self.first.load(Acquire) == self.next.load(Acquire)
    }

    /// The first one, which keeps the durable prefix from moving on; if there are none, the one that was last there.
    pub fn first(&self) -> &Pending {
        self.entry(self.first.load(Acquire))
    }

    /// Where the next record will lie; with the metadata mutex.
    pub fn head_lsn(&self) -> u64 {
        match self.indexes().next_back() {
            Some(last) => self.entry(last).end_lsn.load(Relaxed),
            None => self.durable_lsn.load(Relaxed),
        }
    }

    /// Whether `count` more appends can be begun.
    pub fn has_entries(&self, count: u64) -> bool {
        let indexes = self.indexes();
        indexes.end - indexes.start + count <= PENDING as u64
    }

    /// Begins an append, and returns its number; with the metadata mutex.
    pub fn push(&self, new: NewAppend) -> u64 {
        let index = self.next.load(Relaxed);
        let pending = self.entry(index);
        // Release: who finds what is pending now knows that what was before it in this entry is decided. Pairs with the Acquire in `lsns`.
        pending.lsn.store(new.lsn, Release);
        pending.end_lsn.store(new.end_lsn, Relaxed);
        pending.state.store(new.state, Relaxed);
        pending.is_packed.store((new.state == append::PACKED).into(), Relaxed);
        pending.exposes.store(0, Relaxed);
        pending.owner.store(new.owner, Relaxed);
        pending.is_metadata.store(new.is_metadata.into(), Relaxed);
        pending.depends_lsn.store(new.depends_lsn, Relaxed);
        // Release: from this store on the entry counts, so it comes after its fields, also for whoever repairs
        // after this process died here.
        self.next.store(index + 1, Release);
        index
    }

    /// Takes the last append back, in which there is nothing; with the metadata mutex.
    pub fn take_back(&self, last: u64) {
        self.next.store(last, Release);
    }

    /// Notes that the bytes of an append are in the log, visible to all.
    pub fn note_written(&self, index: u64) {
        // Release: the state is seen after the bytes.
        self.entry(index).state.store(append::WRITTEN, Release);
    }

    /// Notes that the bytes of an append are durable; with the metadata mutex.
    pub fn note_durable(&self, index: u64) {
        self.entry(index).state.store(append::DURABLE, Relaxed);
    }

    /// Leaves an append to whoever waits behind it. Without the mutex: the entry is its owner's until it is durable.
    pub fn give_up(&self, index: u64) {
        // Release: who finds it abandoned finds the failure that came before it.
        self.entry(index).state.store(append::ABANDONED, Release);
    }

    /// Whether its owner has left an append to others.
    pub fn is_given_up(&self, index: u64) -> bool {
        // Acquire: pairs with the Release in `give_up`.
        self.entry(index).state.load(Acquire) == append::ABANDONED
    }

    /// Moves the durable prefix over the appends that are durable; with the metadata mutex. Each is removed after `pass`. Says whether
    /// there were any. `believes_all` takes all for durable.
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
            // Release: pairs with the Acquire in `durable_lsn`. Before the entry is removed: who repairs after
            // a death in between only removes it again.
            self.durable_lsn.store(end_lsn, Release);
            pass();
            self.first.store(first + 1, Release);
            has_moved = true;
        }
    }

    /// Up to where the log is durable: all that is before it is there for who knows this.
    pub fn durable_lsn(&self) -> u64 {
        // Acquire: pairs with the Release in `advance`.
        self.durable_lsn.load(Acquire)
    }

    /// Moves the end of packed records behind one that is in the log: from now on it counts. With the metadata mutex.
    pub fn extend_packed(&self, index: u64, end_lsn: u64) {
        // Release: who sees the end sees the record.
        self.entry(index).end_lsn.store(end_lsn, Release);
    }

    /// The append that packed records are being added to, with its end; with the metadata mutex.
    pub fn open_packed(&self) -> Option<(u64, u64)> {
        let last = self.indexes().next_back()?;
        let pending = self.entry(last);
        (pending.state.load(Relaxed) == append::PACKED)
            .then(|| (last, pending.end_lsn.load(Relaxed)))
    }

    /// Notes that metadata records are in the image up to here; with the metadata mutex.
    pub fn note_applied(&self, end_lsn: u64) {
        if self.metadata_lsn.load(Relaxed) < end_lsn {
            // Release: who sees it sees the image. Pairs with the Acquire in `being_applied`.
            self.metadata_lsn.store(end_lsn, Release);
        }
    }

    /// Where the record lies that is in the log and not wholly in the image, if there is one. As long as the image has the odd version that
    /// the caller has loaded.
    pub fn being_applied(&self) -> Option<u64> {
        // Acquire: what is before it is in the image.
        let applied_lsn = self.metadata_lsn.load(Acquire);
        let pending = self.first.load(Acquire)..self.next.load(Acquire);
        let unapplied = pending.take(PENDING).map(|index| self.entry(index)).filter(|pending| {
            pending.is_metadata.load(Relaxed) != 0 && pending.end_lsn.load(Relaxed) > applied_lsn
        });
        // Only the holder of the metadata mutex makes such records, one after the other.
        let pending = unapplied.last()?;
        // Of packed records, those before it are applied.
        Some(pending.lsn.load(Relaxed).max(match pending.is_packed.load(Relaxed) {
            0 => 0,
            _ => applied_lsn,
        }))
    }

    /// Where appends begin that are not known to be durable. Whatever was pending when this was called is among them, or before the
    /// durable position when that is loaded afterwards.
    pub fn lsns(&self) -> Vec<u64> {
        let pending = self.first.load(Acquire)..self.next.load(Acquire);
        pending.take(PENDING).map(|index| self.entry(index).lsn.load(Acquire)).collect()
    }

    /// Makes an append this process's, which others left; with the metadata mutex. If this one dies as well, the next one takes it.
    pub fn adopt(&self, index: u64, owner: u64) {
        self.entry(index).owner.store(owner, Relaxed);
        self.entry(index).state.store(append::RESERVED, Relaxed);
    }

    /// The appends that say what changed since this one, or since one of them; with the metadata mutex.
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

    /// Fills the room of an append that is not there with `fill`, after that of those that depend on it: see the module's documentation.
    pub fn close_hole<E>(
        dependents: &[(u64, u64)],
        hole: (u64, u64),
        mut fill: impl FnMut(u64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        dependents.iter().chain([&hole]).try_for_each(|&(lsn, end_lsn)| fill(lsn, end_lsn))
    }
}
