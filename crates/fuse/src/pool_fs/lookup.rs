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
            found => self.remember(answer, found),
        }
    }

    /// The entry of an inode, which is counted as given to the kernel.
    pub(super) fn entry(&self, found: &Metadata) -> Result<Entry> {
        let node = found.node();
        let nodeid = self.table.remember(node).map_err(|error| Errno(error.raw_os_error()))?;
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
        self.remember_with(answer, found, &[0_u8; 0]);
    }

    /// As [`PoolFs::remember`], for a client that opens it with the same request.
    pub(super) fn remember_open(
        &self,
        answer: Answer<'_>,
        unique: Unique,
        found: Result<Metadata>,
    ) {
        let opened = found.and_then(|found| Ok((self.opened_file(unique, found.node())?, found)));
        match opened {
            Ok((opened, found)) => self.remember_with(answer, Ok(found), &opened),
            Err(error) => self.remember(answer, Err(error)),
        }
    }

    fn remember_with(&self, answer: Answer<'_>, found: Result<Metadata>, more: &impl Bytes) {
        match found.and_then(|found| self.entry(&found)) {
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

    fn is_forgotten(&self, number: u64) {
        point("forgotten");
        self.mappings.ended(number);
        if let Some(locks) = &self.locks {
            locks.forgotten(number);
        }
        drop(self.handles.take(number));
        self.orphans.release(&self.table, &self.nodes, number);
    }
}
