//! `LOOKUP` and `FORGET`, and every other answer that gives the kernel an inode.

use aquifer_fs::Metadata;

use super::{Errno, PoolFs, Result, attributes};
use crate::answer::{Answer, Delivered};
use crate::point;
use crate::wire::{Bytes, Entry, Forgets, Unique};

impl PoolFs {
    pub(super) fn lookup(&self, answer: Answer<'_>, directory: u64, name: &[u8]) {
        let found = self.node(directory).and_then(|node| Ok(self.nodes.lookup(node, name)?));
        match found {
            // The kernel keeps this as well.
            Err(Errno(libc::ENOENT)) if !self.options.is_shared() => {
                let _ = answer.value(&Entry::none(self.options.valid_s()));
            }
            found => self.remember_in(answer, Some(directory), found),
        }
    }

    /// The entry of an inode, which is counted as given to the kernel. `directory` is the node ID of the
    /// directory in which it was found, if it may be a directory that others move.
    pub(super) fn entry(&self, directory: Option<u64>, found: &Metadata) -> Result<Entry> {
        let node = found.node();
        let nodeid = match directory.filter(|_| self.options.is_shared() && found.is_dir()) {
            Some(directory) => self.table.remember_in(directory, node),
            None => self.table.remember(node),
        };
        let nodeid = nodeid.map_err(|error| Errno(error.raw_os_error()))?;
        Ok(Entry {
            nodeid,
            generation: node.generation,
            entry_valid: self.options.valid_s(),
            attributes_valid: self.attributes_valid_s(node.number),
            entry_valid_nsec: 0,
            attributes_valid_nsec: 0,
            attributes: attributes::of(found),
        })
    }

    /// Gives the kernel an inode.
    pub(super) fn remember(&self, answer: Answer<'_>, found: Result<Metadata>) {
        self.remember_in(answer, None, found);
    }

    /// As [`PoolFs::remember`], with what [`PoolFs::entry`] wants to know.
    pub(super) fn remember_in(
        &self,
        answer: Answer<'_>,
        directory: Option<u64>,
        found: Result<Metadata>,
    ) {
        self.give_entry(answer, found.and_then(|found| self.entry(directory, &found)), &[0_u8; 0]);
    }

    /// As [`PoolFs::remember`], for a client that opens it with the same request.
    pub(super) fn remember_open(
        &self,
        answer: Answer<'_>,
        unique: Unique,
        found: Result<Metadata>,
    ) {
        // Counted before it is opened: the last `FORGET` of an inode takes its opens, and the kernel may
        // be forgetting what had its number before.
        let opened = found.and_then(|found| {
            let entry = self.entry(None, &found)?;
            let opened = self.opened_file(unique, found.node());
            let opened = opened.inspect_err(|_| self.forget(entry.nodeid, 1))?;
            Ok((entry, opened))
        });
        match opened {
            Ok((entry, opened)) => self.give_entry(answer, Ok(entry), &opened),
            Err(error) => self.remember(answer, Err(error)),
        }
    }

    fn give_entry(&self, answer: Answer<'_>, entry: Result<Entry>, more: &impl Bytes) {
        match entry {
            Ok(entry) => {
                if answer.values(&entry, more) == Delivered::ClientGone {
                    self.forget(entry.nodeid, 1);
                }
            }
            Err(Errno(errno)) => {
                let _ = answer.error(errno);
            }
        }
    }

    /// The kernel has forgotten what it was given so often; or never got it.
    pub(super) fn forget(&self, id: u64, count: u64) {
        if let Some(number) = self.table.forget(id, count) {
            self.is_forgotten(number);
        }
    }

    /// As well for many. All are counted before anything is freed: the kernel does not send them again if
    /// this server dies meanwhile, and what is counted the next one frees.
    pub(super) fn forget_all(&self, forgets: &Forgets<'_>) {
        let unknown = forgets.clone().filter_map(|it| self.table.forget(it.node, it.count));
        let unknown: Vec<u64> = unknown.collect();
        unknown.iter().for_each(|number| self.is_forgotten(*number));
    }

    pub(super) fn is_forgotten(&self, number: u64) {
        point("forgotten");
        // This thread may be late: the kernel may have been given it, or what has its number now, again.
        let is_known = || self.table.lookups(number) > 0;
        self.mappings.ended(number, is_known);
        if let Some(locks) = &self.locks {
            locks.forgotten(number, is_known);
        }
        drop(self.handles.take(number));
        self.orphans.release(&self.table, &self.nodes, number);
    }
}
