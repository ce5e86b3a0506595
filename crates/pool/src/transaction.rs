//! Mini-transactions: one change of the metadata, atomic and durable.
//!
//! The change is computed under the metadata mutex, published in the log, applied to the image, and only
//! then the mutex is given back; making it durable comes after that. So others see either nothing or all of it, and
//! a process that dies anywhere leaves at most one record to apply.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Acquire;

use crate::alloc::{self, Reservation};
use crate::core::{Core, Locked};
use crate::error::{PoolError, Result};
use crate::format::inode::{
    HEAD_SLOT, INLINE_RUNS, Inode, InodeKind, PoolHead, SLOT_BYTES, SlotBytes,
};
use crate::format::record::{Header, Record, RecordBuilder};
use crate::image::{self, load_slot};
use crate::log::FailureKind;
use crate::media::ByteRange;
use crate::mutant::{self, Mutant};
use crate::point;
use crate::segment::FREED;

/// A change of the metadata under way. Nothing of it is visible before the closure that makes it has returned `Ok`.
pub struct Transaction<'a> {
    locked: Locked<'a>,
    changed: BTreeMap<u64, Inode>,
    /// Pages before this one are not fresh from now on; 0 if that stays as it is.
    used_to_page: u64,
}

impl Transaction<'_> {
    fn core(&self) -> &Core {
        self.locked.core()
    }

    /// The inode in a slot, as this transaction sees it.
    ///
    /// # Errors
    /// [`PoolError::Damaged`].
    pub fn inode(&self, number: u64) -> Result<Inode> {
        if number == HEAD_SLOT || number >= self.core().segment.slots() {
            return Ok(Inode::free(number, 0));
        }
        match self.changed.get(&number) {
            Some(inode) => Ok(inode.clone()),
            None => {
                let bytes = load_slot(&self.core().segment, number);
                self.core().decode_inode(&bytes, number)
            }
        }
    }

    /// All inodes in use, as this transaction sees them. Damaged ones are left out.
    pub fn inodes(&self) -> impl Iterator<Item = Inode> + '_ {
        (HEAD_SLOT + 1..self.core().segment.slots())
            .filter_map(|slot| self.inode(slot).ok())
            .filter(|inode| inode.kind != InodeKind::Free)
    }

    /// A free inode with its next incarnation.
    ///
    /// # Errors
    /// [`PoolError::NoFreeInode`].
    pub fn free_inode(&self) -> Result<Inode> {
        let slots = self.core().segment.slots();
        (HEAD_SLOT + 1..slots)
            .filter_map(|slot| self.inode(slot).ok())
            .find(|inode| inode.kind == InodeKind::Free)
            .map(|inode| Inode::free(inode.number, inode.incarnation + 1))
            .ok_or(PoolError::NoFreeInode { slots: slots - 1 })
    }

    /// Puts an inode in its slot. Runs that it names no more are freed.
    pub fn put(&mut self, inode: Inode) {
        self.changed.insert(inode.number, inode);
    }
}

/// What a transaction writes.
struct Prepared {
    builder: RecordBuilder,
    bytes: Vec<u8>,
    body_checksum: u64,
}

impl Core {
    fn prepare(
        &self,
        transaction: &Transaction<'_>,
        reservations: &[Reservation<'_>],
    ) -> Result<Prepared> {
        let mut slots: Vec<(u64, SlotBytes)> = Vec::new();
        for inode in transaction.changed.values() {
            if inode.number == HEAD_SLOT || inode.number >= self.segment.slots() {
                return Err(PoolError::Parameter {
                    what: "the number of an inode",
                    value: inode.number.to_string(),
                    reason: "the pool has no such slot",
                });
            }
            let bytes = inode
                .encode()
                .map_err(|error| self.damaged(format!("new inode {}", inode.number), error))?;
            // What recovery would refuse is refused before it is written.
            Inode::decode(&bytes, inode.number)
                .map_err(|error| self.damaged(format!("new inode {}", inode.number), error))?;
            slots.push((inode.number, bytes));
        }
        let mut builder = RecordBuilder::new();
        let reserved_to = reservations.iter().map(|reserved| reserved.whole().end_page()).max();
        let head = PoolHead::decode(&load_slot(&self.segment, HEAD_SLOT))
            .map_err(|error| self.damaged("the pool's head", error))?;
        let last_slot = transaction.changed.keys().next_back();
        let raised = PoolHead {
            fresh_from_page: head
                .fresh_from_page
                .max(transaction.used_to_page)
                .max(reserved_to.unwrap_or(0)),
            used_slots: head.used_slots.max(last_slot.map_or(0, |slot| slot + 1)),
        };
        if raised != head {
            slots.push((HEAD_SLOT, raised.encode()));
        }
        slots.iter().for_each(|(slot, _)| builder.slot(*slot));
        for run in reservations.iter().flat_map(|reserved| reserved.runs()) {
            builder.new_run(run.bytes());
        }
        let mut bytes = vec![0; builder.len_bytes() as usize];
        let images = builder.small_part(&mut bytes).chunks_exact_mut(SLOT_BYTES);
        slots.iter().zip(images).for_each(|((_, slot), image)| image.copy_from_slice(slot));
        let body_checksum = builder.finish_body(&mut bytes);
        Ok(Prepared { builder, bytes, body_checksum })
    }

    /// Makes pages durable that a record will be the first to name (rule 3): before it is written.
    fn flush_reserved(&self, reservations: &[Reservation<'_>]) -> Result<()> {
        let ranges: Vec<ByteRange> =
            reservations.iter().map(|reserved| reserved.whole().bytes()).collect();
        if ranges.is_empty() || mutant::is(self.mutant, Mutant::CommitBeforeData) {
            return Ok(());
        }
        self.media.write_back(&ranges).and_then(|()| self.media.flush()).map_err(|error| {
            self.fail(FailureKind::Data, &error.source);
            error.into()
        })
    }

    /// Notes that pages before `end_page` are about to be written to. They are not taken for zeros from then on, also if
    /// whoever writes to them dies before an inode names them. Durable on return.
    pub fn use_fresh_pages(&self, end_page: u64) -> Result<()> {
        if end_page <= self.head()?.fresh_from_page {
            // Another transaction may have noted it that is visible and not durable yet. Without its record a crash
            // would make these pages fresh again, with what was written to them.
            return self.wait_durable(self.control().metadata_lsn.load(Acquire));
        }
        self.transact(Vec::new(), |transaction| {
            transaction.used_to_page = end_page;
            Ok(())
        })
    }

    /// Runs `change` as one transaction, whose inodes name the pages of `reservations`; when this returns, it is
    /// durable. `change` may be run several times.
    ///
    /// # Errors
    /// Those of `change`, and then nothing has happened; of the log: then the outcome is old or new.
    pub fn transact<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        mut change: impl FnMut(&mut Transaction<'a>) -> Result<T>,
    ) -> Result<T> {
        self.check_writable()?;
        self.flush_reserved(&reservations)?;
        loop {
            let mut transaction =
                Transaction { locked: self.lock()?, changed: BTreeMap::new(), used_to_page: 0 };
            // With the lock: a record that may be in the log and was not applied fails the pool under it, and nothing
            // is appended that could contradict it.
            self.check_not_failed()?;
            let value = change(&mut transaction)?;
            if transaction.changed.is_empty() && transaction.used_to_page == 0 {
                return Ok(value);
            }
            let Prepared { builder, mut bytes, body_checksum } =
                self.prepare(&transaction, &reservations)?;
            let freed = 2 * transaction.changed.len() * INLINE_RUNS;
            if freed > FREED {
                return Err(PoolError::Parameter {
                    what: "the number of inodes in a transaction",
                    value: transaction.changed.len().to_string(),
                    reason: "the list of freed pages could never hold theirs; use several transactions",
                });
            }
            let space = alloc::has_room_for_freed(&transaction.locked, freed)
                .then(|| self.reserve(&transaction.locked, builder.len_bytes(), true))
                .flatten();
            let Some((mut append, filler)) = space else {
                drop(transaction);
                self.make_room(builder.len_bytes())?;
                continue;
            };
            point::pass("transact-reserved");
            let identity = self.identity();
            let (lsn, end_lsn) = (append.lsn, append.end_lsn);
            builder.seal(&mut bytes, body_checksum, lsn, append.acknowledged_lsn, identity);
            let record = Header::decode(&bytes, lsn, self.layout.log().len_bytes, identity)
                .and_then(|header| Record::decode(header, bytes))
                .map_err(|error| self.damaged("a record just made", error))?;
            self.publish_append(&append, record.bytes())?;
            point::pass("transact-published");
            image::apply(&transaction.locked, &record);
            point::pass("transact-applied");
            for reserved in reservations {
                reserved.keep(&transaction.locked);
            }
            drop(transaction);
            point::pass("transact-unlocked");
            if let Some(mut filler) = filler {
                self.write_filler(&mut filler)?;
            }
            self.write_append(&mut append, record.bytes())?;
            self.wait_durable(end_lsn)?;
            return Ok(value);
        }
    }
}
