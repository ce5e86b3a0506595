//! Mini-transactions: atomic and durable changes of the metadata.
//!
//! The change is computed under the metadata mutex, published in the log and applied to the image,
//! and only then is the mutex released; making it durable follows. So other processes see either
//! nothing or all of it, and a process that dies anywhere leaves at most one record to apply.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::alloc;
use crate::core::{Core, Locked};
use crate::error::{PoolError, Result};
use crate::format::FormatError;
use crate::format::inode::{HEAD_SLOT, Inode, InodeKind, PoolHead, SLOT_BYTES, SlotBytes};
use crate::format::record::{Header, Record, RecordBuilder};
use crate::format::run_list::LIST_RUNS;
use crate::format::slot::{self, Slot};
use crate::format::slot_change::SlotWords;
use crate::freed;
use crate::image;
use crate::media::ByteRange;
use crate::mutant::{self, Mutant};
use crate::object_names;
use crate::pins::InodeUse;
use crate::point;
use crate::reservation::{self, Reservation};
use crate::segment::SlotSet;
use crate::slots::{ChangeSlots, ReadSlots};

/// The buffers of a transaction, reused by the next one of the thread.
#[derive(Default)]
struct Work {
    /// Unordered; few.
    changed: Vec<(u64, SlotBytes)>,
    /// Slots that were found free, ascending except for one restart from the first slot.
    taken: Vec<u64>,
    exposed: Vec<ByteRange>,
    builder: RecordBuilder,
    record: Vec<u8>,
}

/// Limits up to which the memory for changed slots, and for the bytes of a record, is kept.
const KEPT_SLOTS: usize = 64;
const KEPT_BYTES: usize = 64 << 10;

thread_local! {
    static SPARE: Cell<Option<Box<Work>>> = const { Cell::new(None) };
}

/// A change of the metadata in progress. None of it is visible before the closure that makes it has
/// returned `Ok`.
pub struct Transaction<'a> {
    locked: Locked<'a>,
    work: Box<Work>,
    /// The first inode that could not be encoded.
    refused: Option<(u64, FormatError)>,
    /// Pages before this one are no longer fresh after the change; 0 leaves the head as it is.
    used_to_page: u64,
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        let control = self.locked.control();
        if control.claimed_inode.load(Relaxed) != 0 {
            // Release: pairs with `wait_while_claimed`. A thread that finds the claim released sees
            // the outcome for the inode.
            control.claimed_inode.store(0, Release);
        }
        let mut work = std::mem::take(&mut self.work);
        if work.changed.capacity() <= KEPT_SLOTS && work.record.capacity() <= KEPT_BYTES {
            work.changed.clear();
            work.taken.clear();
            work.exposed.clear();
            // Fails in a thread that is ending.
            let _ = SPARE.try_with(|spare| spare.set(Some(work)));
        }
    }
}

impl ReadSlots for Transaction<'_> {
    type Error = PoolError;

    fn slot(&self, number: u64) -> Result<SlotBytes> {
        let mut bytes = [0; SLOT_BYTES];
        self.load(number, &mut bytes)?;
        Ok(bytes)
    }

    fn load(&self, number: u64, into: &mut SlotBytes) -> Result<()> {
        match self.changed(number) {
            Some(bytes) => *into = *bytes,
            None if number < self.core().segment.slots() => {
                image::load_slot_into(&self.core().segment, number, into);
            }
            None => *into = [0; SLOT_BYTES],
        }
        Ok(())
    }

    fn word(&self, number: u64, index: usize) -> Result<[u8; 8]> {
        Ok(match self.changed(number) {
            Some(bytes) => slot::word(bytes, index),
            None if number < self.core().segment.slots() => {
                image::load_word(&self.core().segment, number, index)
            }
            None => [0; 8],
        })
    }
}

impl ChangeSlots for Transaction<'_> {
    fn put(&mut self, number: u64, bytes: SlotBytes) {
        *self.place_of(number) = bytes;
    }

    #[inline]
    fn put_with<E>(
        &mut self,
        number: u64,
        make: impl FnOnce(&mut SlotBytes) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        make(self.place_of(number))
    }

    fn take_slot(&mut self) -> Result<u64> {
        let slots = self.core().segment.slots();
        let hint = self.core().control().free_slot_hint.load(Relaxed);
        let mut from = self.work.taken.last().map_or(hint, |last| last + 1).max(HEAD_SLOT + 1);
        let mut has_begun_anew = false;
        loop {
            match alloc::free_slot(&self.locked, from.min(slots)) {
                // Slots that this transaction has put or taken are no longer free.
                Some(number)
                    if self.work.taken.contains(&number) || self.changed(number).is_some() =>
                {
                    from = number + 1;
                }
                Some(number) => {
                    self.work.taken.push(number);
                    return Ok(number);
                }
                None if !has_begun_anew => (from, has_begun_anew) = (HEAD_SLOT + 1, true),
                None => return Err(PoolError::NoFreeInode { slots: slots - 1 }),
            }
        }
    }

    fn new_generation(&self, number: u64) -> Result<u64> {
        // A part stores no generation, so the slot's own value is not enough. But the record of
        // this transaction will lie at the head or behind it, and so advances the head: a later
        // inode in the slot gets a higher number. Positions are never reused, not even that of a
        // record lost in a power cut (`recovery`). Numbers that earlier programs counted are lower:
        // each took a record.
        Ok(self.generation(number)?.max(self.core().head_lsn()).wrapping_add(1))
    }

    fn give_back(&mut self, number: u64) -> Result<()> {
        let generation = self.generation(number)?;
        Inode::make_free(self.place_of(number), number, generation);
        Ok(())
    }

    fn claim_unused(&mut self, number: u64) -> bool {
        let claimed_inode = &self.locked.control().claimed_inode;
        if claimed_inode.load(Relaxed) != 0 {
            return false;
        }
        // Relaxed: it comes before the fence in `Pins::look`. See the table in `pins`.
        claimed_inode.store(number, Relaxed);
        let is_unused = !self.is_used(number, InodeUse::Open);
        if !is_unused {
            claimed_inode.store(0, Relaxed);
        }
        is_unused
    }
}

impl Transaction<'_> {
    fn core(&self) -> &Core {
        self.locked.core()
    }

    /// The buffer for the bytes of a slot that is being put.
    fn place_of(&mut self, number: u64) -> &mut SlotBytes {
        let changed = &mut self.work.changed;
        let index = changed.iter().position(|(changed, _)| *changed == number);
        let index = index.unwrap_or_else(|| {
            changed.push((number, [0; SLOT_BYTES]));
            changed.len() - 1
        });
        &mut changed[index].1
    }

    /// The bytes of a slot that this transaction has put.
    fn changed(&self, number: u64) -> Option<&SlotBytes> {
        let is_this = |(changed, _): &&(u64, SlotBytes)| *changed == number;
        self.work.changed.iter().find(is_this).map(|(_, bytes)| bytes)
    }

    /// The inode in a slot, as this transaction sees it; a free one for what is not an object.
    ///
    /// # Errors
    /// [`PoolError::Damaged`].
    pub fn inode(&self, number: u64) -> Result<Inode> {
        if number == HEAD_SLOT || number >= self.core().segment.slots() {
            return Ok(Inode::free(number, 0));
        }
        self.core().decode_inode(&self.slot(number)?, number)
    }

    /// All objects, as this transaction sees them. Damaged ones are left out.
    pub fn inodes(&self) -> impl Iterator<Item = Inode> + '_ {
        let changed = self.work.changed.iter().map(|(slot, _)| *slot);
        let slots: BTreeSet<u64> =
            self.core().segment.slots_in(SlotSet::Objects).chain(changed).collect();
        (slots.into_iter())
            .filter_map(|slot| self.inode(slot).ok())
            .filter(|inode| inode.kind != InodeKind::Free)
    }

    /// The object with a name, as this transaction sees it; `None` if there is none, or it is
    /// damaged.
    pub fn object_named(&self, name: &[u8]) -> Option<Inode> {
        let key = object_names::Key::new(name)?;
        let has_name = |(_, bytes): &&(u64, SlotBytes)| key.is_of(|index| slot::word(bytes, index));
        let changed = self.work.changed.iter().find(has_name).map(|(slot, _)| *slot);
        let unchanged = || {
            let slot = object_names::find(&self.core().segment, &key)?;
            self.changed(slot).is_none().then_some(slot)
        };
        self.inode(changed.or_else(unchanged)?).ok()
    }

    /// Takes a free slot. Returns a free inode with a generation that no other inode in the slot
    /// ever had.
    ///
    /// # Errors
    /// [`PoolError::NoFreeInode`].
    pub fn free_inode(&mut self) -> Result<Inode> {
        let number = self.take_slot()?;
        Ok(Inode::free(number, self.new_generation(number)?))
    }

    /// Puts an inode in its slot. Runs that it no longer names are freed.
    pub fn put(&mut self, inode: Inode) {
        // Reject what recovery would reject, before it is written.
        let encoded = inode.encode().and_then(|bytes| {
            Inode::decode(&bytes, inode.number)?;
            Ok(bytes)
        });
        match encoded {
            Ok(bytes) => ChangeSlots::put(self, inode.number, bytes),
            Err(error) => self.refused = self.refused.take().or(Some((inode.number, error))),
        }
    }

    /// Whether any process has such a pin of an inode: [`Pool::pin_inode`](crate::Pool::pin_inode).
    /// An inode that had no link before this transaction began, and is not open, can be freed. For
    /// one that had a link, see [`ChangeSlots::claim_unused`].
    pub fn is_used(&self, inode: u64, usage: InodeUse) -> bool {
        self.core().is_used(&self.locked, inode, usage)
    }

    /// Notes that pages before this one are no longer fresh after the change.
    pub(crate) fn use_pages_before(&mut self, page: u64) {
        self.used_to_page = page;
    }

    /// Notes that this change makes these bytes of the data reachable by a name for the first time:
    /// they become durable before the change does. They must have been written before the change
    /// began.
    pub fn expose(&mut self, range: ByteRange) {
        self.work.exposed.push(range);
    }
}

/// When a transaction becomes durable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Durability {
    /// Before it returns.
    Now,
    /// On demand.
    Later,
}

impl Core {
    /// Builds the record of a transaction, except for its header. Returns the checksum of
    /// everything behind that, and what the change frees.
    fn prepare(
        &self,
        transaction: &mut Transaction<'_>,
        reservations: &[Reservation<'_>],
        durability: Durability,
    ) -> Result<(u64, freed::Change)> {
        let refused = |number, error| self.damaged(format!("new inode {number}"), error);
        if let Some((number, error)) = &transaction.refused {
            return Err(refused(*number, error.clone()));
        }
        let used_to_page = transaction.used_to_page;
        let Work { changed, exposed, builder, record, .. } = &mut *transaction.work;
        self.check_exposed(exposed)?;
        for (number, bytes) in changed.iter() {
            if *number == HEAD_SLOT || *number >= self.segment.slots() {
                return Err(PoolError::Parameter {
                    what: "the number of an inode",
                    value: number.to_string(),
                    reason: "the pool has no such slot",
                });
            }
            debug_assert!(Slot::decode(bytes, *number).is_ok(), "slot {number} would be refused");
        }
        let head = PoolHead::read(|index| {
            u64::from_le_bytes(image::load_word(&self.segment, HEAD_SLOT, index))
        });
        let last_slot = changed.iter().map(|(slot, _)| *slot).max();
        let raised = PoolHead {
            fresh_from_page: head.fresh_from_page.max(used_to_page),
            used_slots: head.used_slots.max(last_slot.map_or(0, |slot| slot + 1)),
        };
        // No slot below the last used one may look as if it had never been used.
        for number in head.used_slots..raised.used_slots {
            if !changed.iter().any(|(changed, _)| *changed == number) {
                let mut bytes = [0; SLOT_BYTES];
                Inode::make_free(&mut bytes, number, 0);
                changed.push((number, bytes));
            }
        }
        if raised != head {
            changed.push((HEAD_SLOT, raised.encode()));
        }
        builder.clear(durability == Durability::Later);
        for (slot, after) in changed.iter() {
            let before = self.segment.slot(*slot).expect("it was allocated");
            // The first change of a slot behind the tail must be whole.
            let words = if image::is_logged(&self.segment, *slot) {
                SlotWords::shortest(|at| before[at].load(Relaxed).to_ne_bytes(), after)
            } else {
                SlotWords::whole(after)
            };
            builder.slot(*slot, words);
        }
        let reserved = reservations.iter().flat_map(|reserved| reserved.runs());
        match durability {
            Durability::Now => reserved.for_each(|run| builder.new_run(run.bytes())),
            Durability::Later => reserved.for_each(|run| builder.exposed(run.bytes())),
        }
        if durability == Durability::Later {
            exposed.iter().for_each(|range| builder.exposed(*range));
        }
        record.clear();
        record.resize(builder.len_bytes() as usize, 0);
        builder.copy_slots(changed.iter().map(|(_, after)| after), record);
        let body_checksum = builder.finish_body(record);
        let freeing = freed::Change::of(self, builder.slots(record));
        Ok((body_checksum, freeing))
    }

    /// Rejects ranges that recovery would reject.
    fn check_exposed(&self, exposed: &[ByteRange]) -> Result<()> {
        let data = self.layout.data();
        match exposed.iter().find(|range| data.intersection(**range) != **range) {
            None => Ok(()),
            Some(range) => Err(PoolError::Parameter {
                what: "what is exposed",
                value: format!("{range:?}"),
                reason: "names lead to data only",
            }),
        }
    }

    /// Makes the pages durable that a record will be the first to name, before it is written (rule
    /// 3).
    fn flush_reserved(&self, reservations: &[Reservation<'_>]) -> Result<()> {
        let ranges: Vec<ByteRange> =
            reservations.iter().map(|reserved| reserved.whole().bytes()).collect();
        if ranges.is_empty() || mutant::is(self.mutant, Mutant::CommitBeforeData) {
            return Ok(());
        }
        self.make_durable(&ranges)
    }

    /// Checks that the log can hold the transaction at all.
    fn check_size(&self, len_bytes: u64) -> Result<()> {
        let log_bytes = self.layout.log().len_bytes;
        if len_bytes > log_bytes / 4 {
            return Err(PoolError::TooLargeForLog { len_bytes, log_bytes });
        }
        Ok(())
    }

    /// Whether there is room to note what a transaction frees and exchanges. Returns an error if
    /// pins are the reason that there is none, after a checkpoint (`has_made_room`) did not help.
    fn has_room_for_freed(
        &self,
        transaction: &Transaction<'_>,
        freeing: &freed::Change,
        most_freed: usize,
        has_made_room: bool,
    ) -> Result<bool> {
        let has_room = freed::has_room(&transaction.locked, freeing, most_freed)?;
        if !has_room && has_made_room {
            freed::check_not_pinned(&transaction.locked)?;
        }
        Ok(has_room)
    }

    fn begin(&self) -> Result<Transaction<'_>> {
        let locked = self.lock()?;
        let work = SPARE.try_with(Cell::take).ok().flatten().unwrap_or_default();
        let transaction = Transaction { locked, work, refused: None, used_to_page: 0 };
        // With the lock: if a record that may be in the log was not applied, the pool is failed
        // under the lock, so no contradicting record is appended.
        self.check_not_failed()?;
        Ok(transaction)
    }

    /// Runs `change` as one transaction, whose inodes name the pages of `reservations`; durable on
    /// return. `change` may run several times.
    ///
    /// # Errors
    /// Those of `change`, with nothing changed; those of the log, and then the outcome is old or
    /// new.
    pub fn transact<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        mut change: impl FnMut(&mut Transaction<'a>) -> Result<T>,
    ) -> Result<T> {
        self.check_writable()?;
        self.flush_reserved(&reservations)?;
        let mut flushed: Vec<ByteRange> = Vec::new();
        let mut has_made_room = false;
        loop {
            let mut transaction = self.begin()?;
            let value = change(&mut transaction)?;
            if transaction.is_empty() {
                return Ok(value);
            }
            if let Some(slot) = transaction.without_memory() {
                drop(transaction);
                self.segment.allocate_slot(slot)?;
                continue;
            }
            let exposed: Vec<ByteRange> = (transaction.work.exposed.iter().copied())
                .filter(|range| !flushed.contains(range))
                .collect();
            if !exposed.is_empty() && !mutant::is(self.mutant, Mutant::CommitBeforeData) {
                self.check_exposed(&exposed)?;
                // Without the lock.
                drop(transaction);
                self.make_durable(&exposed)?;
                flushed.extend(exposed);
                continue;
            }
            let most_freed = most_freed(&transaction);
            let (body_checksum, freeing) =
                self.prepare(&mut transaction, &reservations, Durability::Now)?;
            let len_bytes = transaction.work.record.len() as u64;
            self.check_size(len_bytes)?;
            let space =
                if self.has_room_for_freed(&transaction, &freeing, most_freed, has_made_room)? {
                    self.reserve(&transaction.locked, len_bytes, true)?
                } else {
                    None
                };
            let Some((mut append, filler)) = space else {
                drop(transaction);
                self.make_room(len_bytes)?;
                has_made_room = true;
                continue;
            };
            point::pass("transact-reserved");
            let identity = self.identity();
            let (lsn, end_lsn) = (append.lsn, append.end_lsn);
            let mut bytes = std::mem::take(&mut transaction.work.record);
            let builder = &transaction.work.builder;
            builder.seal(&mut bytes, body_checksum, lsn, append.acknowledged_lsn, identity);
            let record = Header::decode(&bytes, lsn, self.layout.log().len_bytes, identity)
                .and_then(|header| Record::decode(header, bytes))
                .map_err(|error| self.damaged("a record just made", error))?;
            self.publish_append(&append, record.bytes())?;
            point::pass("transact-published");
            image::apply(&transaction.locked, &record);
            point::pass("transact-applied");
            transaction.note_taken();
            let after = transaction.work.changed.iter().map(|(number, bytes)| (*number, bytes));
            reservation::end(&transaction.locked, reservations, after);
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

    /// As [`Core::transact`], but returns when the change is visible; it becomes durable on demand.
    pub fn change<'a, T, E: From<PoolError>>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        mut change: impl FnMut(&mut Transaction<'a>) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        self.check_writable()?;
        let mut has_made_room = false;
        loop {
            let mut transaction = self.begin()?;
            let value = change(&mut transaction)?;
            if transaction.is_empty() {
                return Ok(value);
            }
            if let Some(slot) = transaction.without_memory() {
                // Without the lock.
                drop(transaction);
                self.segment.allocate_slot(slot)?;
                continue;
            }
            let most_freed = most_freed(&transaction);
            let (body_checksum, freeing) =
                self.prepare(&mut transaction, &reservations, Durability::Later)?;
            let len_bytes = transaction.work.record.len() as u64;
            self.check_size(len_bytes)?;
            let place =
                if self.has_room_for_freed(&transaction, &freeing, most_freed, has_made_room)? {
                    self.place_packed(&transaction.locked, len_bytes)?
                } else {
                    None
                };
            let Some(place) = place else {
                drop(transaction);
                self.make_room(len_bytes)?;
                has_made_room = true;
                continue;
            };
            let Work { builder, record, exposed, .. } = &mut *transaction.work;
            let (lsn, acknowledged_lsn) = (place.lsn, place.acknowledged_lsn);
            builder.seal(record, body_checksum, lsn, acknowledged_lsn, self.identity());
            let exposes = !reservations.is_empty() || !exposed.is_empty();
            self.publish_packed(&place, record, exposes)?;
            let end_lsn = lsn + len_bytes;
            freed::note_change(&transaction.locked, freeing, end_lsn);
            image::apply_noted(&transaction.locked, builder.slots(record), end_lsn);
            let after = transaction.work.changed.iter().map(|(number, bytes)| (*number, bytes));
            transaction.note_taken();
            reservation::end(&transaction.locked, reservations, after);
            return Ok(value);
        }
    }
}

impl Transaction<'_> {
    /// Makes the next transaction look for a slot behind the last one taken.
    fn note_taken(&self) {
        if let Some(last) = self.work.taken.last() {
            self.core().control().free_slot_hint.store(last + 1, Relaxed);
        }
    }

    /// The highest slot that it changes, if the image has no memory for it yet.
    fn without_memory(&self) -> Option<u64> {
        let segment = &self.core().segment;
        let last = self.work.changed.iter().map(|(slot, _)| *slot).max()?;
        (segment.allocated_slots()..segment.slots()).contains(&last).then_some(last)
    }

    fn is_empty(&self) -> bool {
        self.work.changed.is_empty()
            && self.refused.is_none()
            && self.work.exposed.is_empty()
            && self.used_to_page == 0
    }
}

/// The most runs that a transaction can free: each run named after it can split one named before.
fn most_freed(transaction: &Transaction<'_>) -> usize {
    2 * transaction.work.changed.len() * LIST_RUNS
}
