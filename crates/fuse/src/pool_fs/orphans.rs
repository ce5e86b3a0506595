//! Inodes without names that the kernel has not forgotten.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aquifer_fs::node::{Node, Nodes};
use aquifer_fs::{File, FsError};
use aquifer_pool::{BorrowedPins, LentPins};

use crate::point;
use crate::state::NodeTable;

/// So many pins are free before a removal begins, in which none can be asked for.
const ENOUGH_FREE: usize = 64;

/// What keeps such inodes.
pub(crate) enum Orphans {
    /// Handles of this process, by inode number. The pool frees an inode when its handle is dropped,
    /// unless it got a name since.
    Own(Mutex<HashMap<u64, File>>),
    /// Pins that outlive this process; the table of nodes says where they are.
    Lent(Lent),
}

/// Pins that another process has lent.
pub(crate) struct Lent {
    pins: BorrowedPins,
    /// Held while a pin and its place in the table change: the kernel may look up an inode, and remove
    /// its last name, while another thread still learns that it was forgotten before.
    changing: Mutex<()>,
    /// Asks for more blocks.
    more: Box<dyn Fn() -> Option<LentPins> + Send + Sync>,
}

/// What keeps one inode.
pub(super) enum Held {
    Own(File),
    Lent(u64),
}

impl Held {
    fn number(&self) -> u64 {
        match self {
            Held::Own(file) => file.node().number,
            Held::Lent(number) => *number,
        }
    }
}

impl Lent {
    /// These; `more` asks their owner for other blocks.
    pub fn new(
        pins: BorrowedPins,
        more: impl Fn() -> Option<LentPins> + Send + Sync + 'static,
    ) -> Lent {
        Lent { pins, changing: Mutex::default(), more: Box::new(more) }
    }

    fn has_enough(&self) {
        if self.pins.free() < ENOUGH_FREE
            && let Some(lent) = (self.more)()
        {
            // Without them, the removal fails if it needs one.
            let _ = self.pins.add(&lent);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Inside a transaction, which has not claimed this inode: it keeps or claims one, never both. So the
    /// pin waits for no claim of the same thread, and no thread that has this lock for the metadata mutex.
    fn hold(&self, table: &NodeTable, node: Node) -> aquifer_fs::Result<Held> {
        let _changing = self.lock();
        // An attempt of the same transaction before, or an unnamed file that got a name since.
        if table.pin(node.number).is_none() {
            let place = self.pins.set(node.number)?;
            point("pinned");
            table.set_pin(node.number, place);
        }
        Ok(Held::Lent(node.number))
    }

    /// Without freeing it.
    fn unpin(&self, table: &NodeTable, number: u64) {
        if let Some(place) = table.take_pin(number) {
            point("pin-taken");
            self.pins.clear(place, number);
        }
    }

    /// Unless it `is_used`, as told while no pin changes.
    fn release(
        &self,
        table: &NodeTable,
        nodes: &Nodes,
        number: u64,
        is_used: impl FnOnce() -> bool,
    ) {
        // Most have none.
        if table.pin(number).is_none() {
            return;
        }
        {
            let _changing = self.lock();
            if is_used() {
                return;
            }
            self.unpin(table, number);
        }
        if let Some((_, node)) = table.numbered(number) {
            // Of a pool that fails, the next program that opens it frees the inode.
            let _ = nodes.reap(node);
        }
    }

    /// After the death of a server: keeps what the kernel may know and what `is_needed` names, and
    /// notes where its pins are. A death before a pin was noted, before its inode lost its last name, or
    /// before it was cleared, leaves nothing else.
    fn take_over(&self, table: &NodeTable, nodes: &Nodes, is_needed: impl Fn(u64) -> bool) {
        let pins: Vec<_> = self.pins.iter().collect();
        for (place, number) in pins {
            let is_known = table.lookups(number) > 0 || is_needed(number);
            let is_noted = table.pin(number).is_none_or(|noted| noted == place);
            if must_be_kept(table, nodes, number) && is_known && is_noted {
                table.set_pin(number, place);
            } else {
                if table.pin(number) == Some(place) {
                    table.take_pin(number);
                }
                // What has no names, all of those are freed behind this.
                self.pins.clear(place, number);
            }
        }
    }
}

/// Whether an inode that the kernel knows needs its pin: it has no names or is open, or cannot be read, so
/// that a program may have it open.
fn must_be_kept(table: &NodeTable, nodes: &Nodes, number: u64) -> bool {
    let node = nodes.numbered(number).ok().or_else(|| Some(table.numbered(number)?.1));
    match node.map(|node| nodes.metadata(node)) {
        Some(Ok(metadata)) => metadata.nlink() == 0 || table.is_kept(number),
        Some(Err(FsError::Stale { .. })) | None => false,
        Some(Err(_)) => true,
    }
}

impl Orphans {
    pub fn own() -> Orphans {
        Orphans::Own(Mutex::default())
    }

    /// Before a removal.
    pub(super) fn prepare(&self) {
        if let Orphans::Lent(lent) = self {
            lent.has_enough();
        }
    }

    /// Keeps an inode that loses its last name, at first for the duration of a call.
    pub(super) fn hold(
        &self,
        table: &NodeTable,
        nodes: &Nodes,
        node: Node,
    ) -> aquifer_fs::Result<Held> {
        table.keep_removed(node.number);
        match self {
            Orphans::Own(_) => Ok(Held::Own(nodes.hold(node)?)),
            Orphans::Lent(lent) => lent.hold(table, node),
        }
    }

    /// Keeps it until it is released.
    pub(super) fn keep(&self, held: Held) -> u64 {
        let number = held.number();
        if let (Orphans::Own(map), Held::Own(file)) = (self, held) {
            let before = lock(map).insert(number, file);
            // Without the lock: it may free the inode that had the number before.
            drop(before);
        }
        number
    }

    /// What was held has kept its name.
    pub(super) fn give_up(&self, table: &NodeTable, nodes: &Nodes, held: Held) {
        match held {
            // Another request may have opened it meanwhile: then it stays until it is forgotten.
            Held::Lent(number) => self.release(table, nodes, number),
            Held::Own(file) => drop(file),
        }
    }

    /// Keeps an inode that is opened until it was closed as often, also if another process removes it.
    pub(super) fn open(
        &self,
        table: &NodeTable,
        nodes: &Nodes,
        node: Node,
    ) -> aquifer_fs::Result<()> {
        // Before the pin: a thread that notes the last close meanwhile leaves it.
        table.opened(node.number);
        match self {
            Orphans::Own(map) => {
                let is_kept = lock(map).get(&node.number).is_some_and(|file| file.node() == node);
                if !is_kept {
                    self.keep(Held::Own(nodes.hold(node)?));
                }
            }
            Orphans::Lent(lent) => {
                let has_pin = || {
                    let _changing = lent.lock();
                    table.pin(node.number).is_some()
                };
                // An inode that has a pin is not freed, so it is this one.
                if !has_pin() {
                    lent.has_enough();
                    // By this process, until the pin is set: that it is still there is known then.
                    let _held = nodes.hold(node)?;
                    lent.hold(table, node)?;
                }
            }
        }
        Ok(())
    }

    /// Keeps a new file that has no name, from before any process can see it.
    pub(super) fn born(&self, table: &NodeTable, node: Node) -> aquifer_fs::Result<()> {
        // A number beyond the table is refused when the kernel is to be given the inode.
        let _ = table.adopt(node);
        table.keep(node.number);
        match self {
            Orphans::Own(_) => Ok(()),
            Orphans::Lent(lent) => lent.hold(table, node).map(drop),
        }
    }

    /// No longer keeps it, without freeing it: for a call inside a transaction.
    pub(super) fn unpin(&self, table: &NodeTable, number: u64) {
        if let Orphans::Lent(lent) = self {
            let _changing = lent.lock();
            lent.unpin(table, number);
        }
    }

    /// The rest of it, once it is open.
    pub(super) fn keep_open(&self, file: &File) {
        if matches!(self, Orphans::Own(_)) {
            self.keep(Held::Own(file.clone()));
        }
    }

    /// No longer keeps the inode with this number, which the kernel has forgotten, unless it was given
    /// to it again.
    pub(super) fn release(&self, table: &NodeTable, nodes: &Nodes, number: u64) {
        self.release_unless(table, nodes, number, || table.lookups(number) > 0);
    }

    /// As well, once it was closed for the last time.
    pub(super) fn close(&self, table: &NodeTable, nodes: &Nodes, number: u64) {
        if table.closed(number) {
            self.release_unless(table, nodes, number, || table.is_kept(number));
        }
    }

    fn release_unless(
        &self,
        table: &NodeTable,
        nodes: &Nodes,
        number: u64,
        is_used: impl FnOnce() -> bool,
    ) {
        match self {
            Orphans::Own(map) => {
                let held = {
                    let mut map = lock(map);
                    if is_used() {
                        return;
                    }
                    map.remove(&number)
                };
                // Without the lock.
                drop(held);
            }
            Orphans::Lent(lent) => lent.release(table, nodes, number, is_used),
        }
    }

    /// See [`Lent::take_over`].
    pub(super) fn take_over(
        &self,
        table: &NodeTable,
        nodes: &Nodes,
        is_needed: impl Fn(u64) -> bool,
    ) {
        if let Orphans::Lent(lent) = self {
            lent.take_over(table, nodes, is_needed);
        }
    }

    /// The inodes that pins keep.
    pub(super) fn pinned(&self) -> Vec<u64> {
        match self {
            Orphans::Own(_) => Vec::new(),
            Orphans::Lent(lent) => lent.pins.iter().map(|(_, number)| number).collect(),
        }
    }

    /// Keeps nothing any more: the kernel has unmounted the file system.
    pub(super) fn release_all(&self, table: &NodeTable) {
        if let Orphans::Lent(lent) = self {
            let pins: Vec<_> = lent.pins.iter().collect();
            for (place, number) in pins {
                table.take_pin(number);
                lent.pins.clear(place, number);
            }
        }
    }
}

fn lock(map: &Mutex<HashMap<u64, File>>) -> MutexGuard<'_, HashMap<u64, File>> {
    map.lock().unwrap_or_else(PoisonError::into_inner)
}
