//! Inodes that this process has open: one [`OpenInode`] for all handles of an inode.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use arc_swap::{ArcSwap, Guard};

use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::format::run::Run;
use aquifer_pool::{OwnedPin, PoolError};

use crate::error::Result;
use crate::file_table::FileTable;

/// An inode that is open in this process.
#[derive(Debug)]
pub(crate) struct OpenInode {
    pub number: u64,
    pub generation: u64,
    pub kind: FileKind,
    /// The layout version and the run of a file that was opened by a cached lookup: it can be read
    /// without a table while it has this layout.
    pub known_run: Option<(u64, Run)>,
    /// Tells all processes that the inode is open.
    _pin: OwnedPin,
    /// Whether the file was given room to grow into.
    has_room_ahead: AtomicBool,
    /// The table that was read last, of the current layout version or an earlier one. Unset until
    /// first use: many files are only created or opened, and closed again.
    table: OnceLock<ArcSwap<FileTable>>,
}

/// An inode to be opened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToOpen {
    pub number: u64,
    pub generation: u64,
    pub kind: FileKind,
    /// See [`OpenInode::known_run`].
    pub known_run: Option<(u64, Run)>,
}

impl From<&FileInode> for ToOpen {
    fn from(inode: &FileInode) -> ToOpen {
        let &FileInode { number, generation, kind, .. } = inode;
        ToOpen { number, generation, kind, known_run: None }
    }
}

impl OpenInode {
    fn new(inode: ToOpen, pin: OwnedPin) -> OpenInode {
        let ToOpen { number, generation, kind, known_run } = inode;
        OpenInode {
            number,
            generation,
            kind,
            known_run,
            _pin: pin,
            has_room_ahead: AtomicBool::new(false),
            table: OnceLock::new(),
        }
    }

    /// Notes that the file was given room to grow into, to be freed on close.
    pub fn note_ahead(&self) {
        // Relaxed, here and below: it guards no other data.
        self.has_room_ahead.store(true, Relaxed);
    }

    /// Whether [`OpenInode::note_ahead`] was called; the room may still be there.
    pub fn was_given_ahead(&self) -> bool {
        self.has_room_ahead.load(Relaxed)
    }

    /// Returns the table that was read last, if any.
    pub fn table(&self) -> Option<Guard<Arc<FileTable>>> {
        self.table.get().map(|table| table.load())
    }

    /// Publishes a table to all readers in this process.
    pub fn set_table(&self, table: Arc<FileTable>) {
        match self.table.get() {
            Some(shown) => shown.store(table),
            // If two threads set the first table, either one stays.
            None => drop(self.table.set(ArcSwap::new(table))),
        }
    }
}

/// A smaller map is not searched for closed inodes.
const FEW: usize = 64;

/// Hashes slot numbers. The pool chooses them, so no caller can make them collide.
#[derive(Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 divided by the golden ratio: Fibonacci hashing.
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type ByNumber = HashMap<u64, Weak<OpenInode>, BuildHasherDefault<NumberHasher>>;

/// Parts of the map of open inodes, so that threads that open different files rarely wait.
const PARTS: usize = 64;

/// The open inodes whose numbers have the same remainder. Aligned so that no two share a cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part(Mutex<ByNumber>);

/// All inodes that this process has open.
#[derive(Debug)]
pub(crate) struct OpenInodes {
    parts: Box<[Part]>,
}

impl Default for OpenInodes {
    fn default() -> OpenInodes {
        OpenInodes { parts: (0..PARTS).map(|_| Part::default()).collect() }
    }
}

impl OpenInodes {
    fn lock(&self, number: u64) -> MutexGuard<'_, ByNumber> {
        let part = &self.parts[(number % PARTS as u64) as usize];
        part.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the open inode of this number and generation; pins it if it is new.
    pub fn open(
        &self,
        inode: ToOpen,
        pin: impl FnOnce() -> std::result::Result<OwnedPin, PoolError>,
    ) -> Result<Arc<OpenInode>> {
        let mut by_number = self.lock(inode.number);
        if let Some(open) = by_number.get(&inode.number).and_then(Weak::upgrade)
            && open.generation == inode.generation
        {
            return Ok(open);
        }
        let open = Arc::new(OpenInode::new(inode, pin()?));
        by_number.insert(open.number, Arc::downgrade(&open));
        if by_number.len() >= FEW && by_number.len().is_power_of_two() {
            by_number.retain(|_, open| open.strong_count() > 0);
        }
        Ok(open)
    }

    /// Drops a handle's reference to an inode. Returns whether it was the last one, so that the
    /// inode is no longer pinned as open.
    pub fn close(&self, open: Arc<OpenInode>) -> bool {
        let mut by_number = self.lock(open.number);
        // Under the lock no thread can take a reference from the map, and other holders can only
        // clone theirs.
        let is_last = Arc::strong_count(&open) == 1;
        if is_last
            && by_number.get(&open.number).is_some_and(|other| other.as_ptr() == Arc::as_ptr(&open))
        {
            by_number.remove(&open.number);
        }
        // Still under the lock: of two concurrent calls, one must see itself as the last.
        drop(open);
        is_last
    }
}
