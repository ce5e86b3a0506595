//! Inodes that this process has open: one [`OpenInode`] for all handles of an inode.
//!
//! Lock order: the metadata mutex of the pool, then a lock of the map. Nothing is waited for with
//! the second held.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use arc_swap::{ArcSwap, Guard};

use aquifer_format::file_table::FileTable;
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::format::run::Run;
use aquifer_pool::{OwnedPin, PoolError};

use crate::error::Result;
use crate::node_id::Node;

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
    /// The last state whose metadata were made durable through a handle of this process.
    synced: Mutex<Option<SyncedState>>,
    /// The version of the metadata at which it was last found to have no capabilities; 1 at first.
    no_capabilities: AtomicU64,
    /// The table that was read last, of the current layout version or an earlier one. Unset until
    /// first use: many files are only created or opened, and closed again.
    table: OnceLock<ArcSwap<FileTable>>,
}

/// What tells whether the metadata that are needed to read a file have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SyncedState {
    pub layout_version: u64,
    pub size_bytes: u64,
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
            synced: Mutex::new(None),
            no_capabilities: AtomicU64::new(1),
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

    /// Whether the metadata that are needed to read the file in this state are durable.
    ///
    /// A file that has its pages and its length again, after others in between, has the same ones: a
    /// layout version names the pages, and bytes that a shorter length cut off are zeros.
    pub fn is_synced(&self, state: SyncedState) -> bool {
        *self.synced.lock().unwrap_or_else(PoisonError::into_inner) == Some(state)
    }

    /// Notes that they are. The state was read before they were made durable.
    pub fn note_synced(&self, state: SyncedState) {
        *self.synced.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
    }

    /// Whether [`OpenInode::note_no_capabilities`] was called with this version.
    pub fn has_no_capabilities(&self, metadata_version: u64) -> bool {
        self.no_capabilities.load(Relaxed) == metadata_version
    }

    /// Notes that the file had no capabilities when the metadata had this version, which is even.
    pub fn note_no_capabilities(&self, metadata_version: u64) {
        self.no_capabilities.store(metadata_version, Relaxed);
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
    ///
    /// It is pinned without a lock of the map: setting a pin may wait for the metadata mutex, and a
    /// thread that holds that mutex may open inodes (`Nodes::hold` while a name is removed).
    pub fn open(
        &self,
        inode: ToOpen,
        pin: impl FnOnce() -> std::result::Result<OwnedPin, PoolError>,
    ) -> Result<Arc<OpenInode>> {
        let node = Node { number: inode.number, generation: inode.generation };
        if let Some(open) = self.find(node) {
            return Ok(open);
        }
        let new = Arc::new(OpenInode::new(inode, pin()?));
        let mut by_number = self.lock(inode.number);
        // If another thread was first, this one's pin goes when the lock has gone.
        if let Some(open) = by_number.get(&inode.number).and_then(Weak::upgrade)
            && open.generation == inode.generation
        {
            return Ok(open);
        }
        by_number.insert(new.number, Arc::downgrade(&new));
        if by_number.len() >= FEW && by_number.len().is_power_of_two() {
            by_number.retain(|_, open| open.strong_count() > 0);
        }
        Ok(new)
    }

    /// An inode that a handle of this process has open.
    pub fn find(&self, node: Node) -> Option<Arc<OpenInode>> {
        let open = self.lock(node.number).get(&node.number).and_then(Weak::upgrade)?;
        (open.generation == node.generation).then_some(open)
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
