//! Mini-transactions: atomic and durable changes of the metadata.
//!
//! The change is computed under the metadata mutex, published in the log and applied to the image,
//! and only then is the mutex released; making it durable follows. So other processes see either
//! nothing or all of it, and a process that dies anywhere leaves at most one record to apply.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::error::{PoolError, Result};
use crate::format::FormatError;
use crate::format::inode::{HEAD_SLOT, Inode, InodeKind, PoolHead};
use crate::format::layout::SLOTS_PER_PAGE;
use crate::format::record::{Header, Record, RecordBuilder};
use crate::format::run_list::LIST_RUNS;
use crate::format::slot::Slot;
use crate::format::slot_bytes::{self, SLOT_BYTES, SlotBytes};
use crate::format::slot_change::SlotWords;
use crate::log::append::Append;
use crate::log::locks::Locked;
use crate::log::packed::PackedPlace;
use crate::media::ByteRange;
use crate::metadata::alloc;
use crate::metadata::apply;
use crate::metadata::core::Core;
use crate::metadata::freed;
use crate::metadata::image_slots;
use crate::metadata::object_names;
use crate::metadata::reservation::{self, Reservation};
use crate::mutant::{self, Mutant};
use crate::pins::InodeUse;
use crate::point;
use crate::shared::image_words;
use crate::shared::segment::{Segment, SlotSet};
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

/// What a change does to the first fresh page that the head records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FreshChange {
    Kept,
    /// Pages before this one are no longer fresh.
    RaisedTo(u64),
    /// Pages from this one on are fresh.
    LoweredTo(u64),
}

impl FreshChange {
    fn of(self, fresh_from_page: u64) -> u64 {
        match self {
            FreshChange::Kept => fresh_from_page,
            FreshChange::RaisedTo(page) => fresh_from_page.max(page),
            FreshChange::LoweredTo(page) => fresh_from_page.min(page),
        }
    }
}

/// A change of the metadata in progress. None of it is visible before the closure that makes it has
/// returned `Ok`.
pub struct Transaction<'a> {
    core: &'a Core,
    locked: Locked<'a>,
    work: Box<Work>,
    /// The first inode that could not be encoded.
    refused: Option<(u64, FormatError)>,
    fresh: FreshChange,
    /// Pages of metadata that were asked for, and must be read first.
    missing: RefCell<BTreeSet<u64>>,
    /// Pages of metadata that could not be read before an earlier run. Asking for one fails, unless it
    /// turns out not to be needed.
    unreadable: Vec<u64>,
    /// Pages of metadata that cannot be read, whose free slots are not taken.
    avoided: Vec<u64>,
    /// Whether the index of the names of objects was asked for, and must be built first.
    needs_names: Cell<bool>,
    /// That was tried.
    has_built_names: bool,
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
            None => match self.segment().slot_in_memory(number) {
                Ok(Some(words)) => image_words::copy_out(words, into),
                Ok(None) => *into = [0; SLOT_BYTES],
                Err(page) => return Err(self.must_read(page)),
            },
        }
        Ok(())
    }

    fn word(&self, number: u64, index: usize) -> Result<[u8; 8]> {
        Ok(match self.changed(number) {
            Some(bytes) => slot_bytes::word(bytes, index),
            None => match self.segment().slot_in_memory(number) {
                Ok(Some(words)) => image_words::word(words, index),
                Ok(None) => [0; 8],
                Err(page) => return Err(self.must_read(page)),
            },
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
        let slots = self.segment().slots();
        let hint = self.locked.control().free_slot_hint.load(Relaxed);
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
                Some(number) if self.avoided.contains(&(number / SLOTS_PER_PAGE)) => {
                    from = (number / SLOTS_PER_PAGE + 1) * SLOTS_PER_PAGE;
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
        // record lost in a power cut (`recovery`).
        Ok(self.generation(number)?.max(self.locked.control().appends.head_lsn()).wrapping_add(1))
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
        // Relaxed: it comes before the fence in `PinPlaces::look`. See the table in `pins`.
        claimed_inode.store(number, Relaxed);
        let is_unused = !self.is_used(number, InodeUse::Open);
        if !is_unused {
            claimed_inode.store(0, Relaxed);
        }
        is_unused
    }
}

impl Transaction<'_> {
    fn segment(&self) -> &Segment {
        &self.core.handle.segment
    }

    /// Notes a page of metadata that must be read first. Whatever the closure makes of the error, the
    /// transaction is then run again: no thread waits for the media while it holds the lock.
    #[cold]
    fn must_read(&self, page: u64) -> PoolError {
        self.missing.borrow_mut().insert(page);
        PoolError::Stalled { pid: 0, what: "a page of metadata" }
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
        if number == HEAD_SLOT || number >= self.segment().slots() {
            return Ok(Inode::free(number, 0));
        }
        self.core.image.decode_inode(&self.slot(number)?, number)
    }

    /// All objects, as this transaction sees them. Damaged ones are left out.
    pub fn inodes(&self) -> impl Iterator<Item = Inode> + '_ {
        let changed = self.work.changed.iter().map(|(slot, _)| *slot);
        let slots: BTreeSet<u64> =
            self.segment().slots_in(SlotSet::Objects).chain(changed).collect();
        (slots.into_iter())
            .filter_map(|slot| self.inode(slot).ok())
            .filter(|inode| inode.kind != InodeKind::Free)
    }

    /// The object with a name, as this transaction sees it; `None` if there is none, or it is
    /// damaged.
    pub fn object_named(&self, name: &[u8]) -> Option<Inode> {
        let key = object_names::Key::new(name)?;
        if !self.has_built_names && !object_names::are_whole(self.segment().control()) {
            // The transaction is run again.
            self.needs_names.set(true);
            return None;
        }
        let has_name =
            |(_, bytes): &&(u64, SlotBytes)| key.is_of(|index| slot_bytes::word(bytes, index));
        let changed = self.work.changed.iter().find(has_name).map(|(slot, _)| *slot);
        let unchanged = || {
            let load = |slot| {
                self.segment().slot_in_memory(slot).inspect_err(|page| {
                    if !self.unreadable.contains(page) {
                        self.must_read(*page);
                    }
                })
            };
            // After an error the transaction is run again, or fails.
            let found = object_names::find(self.segment(), &key, load);
            let slot = found.inspect_err(|page| drop(self.must_read(*page))).ok().flatten()?;
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
        self.core.pins.is_used(&self.locked, inode, usage)
    }

    /// Notes that pages before this one are no longer fresh after the change.
    pub(crate) fn use_pages_before(&mut self, page: u64) {
        self.fresh = FreshChange::RaisedTo(page);
    }

    /// Notes that pages from this one on are fresh after the change: they are zero on media, and no
    /// process writes to them before the head is raised again.
    pub(crate) fn lower_fresh(&mut self, page: u64) {
        self.fresh = FreshChange::LoweredTo(page);
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
pub(crate) enum Durability {
    /// Before it returns: its record has an append of its own.
    Now,
    /// On demand: its record is [packed](crate::log::packed).
    Later,
}

/// The place of a transaction's record in the log.
enum Place {
    /// With the append that fills the ring up to it, if one is needed.
    Append(Append, Option<Append>),
    Packed(PackedPlace),
}

/// A transaction needs the log, the image, the pins and the reservations, and a checkpoint if there
/// is no room.
impl Core {
    /// Runs `change` as one transaction, whose inodes name the pages of `reservations`. It is
    /// visible to all processes on return, and durable if that was asked for. `change` may run
    /// several times.
    ///
    /// # Errors
    /// Those of `change`, with nothing changed; those of the log, and then the outcome is old or
    /// new.
    pub fn transact<'a, T, E: From<PoolError>>(
        &'a self,
        durability: Durability,
        reservations: Vec<Reservation<'a>>,
        mut change: impl FnMut(&mut Transaction<'a>) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        self.handle.check_writable()?;
        if durability == Durability::Now {
            self.flush_reserved(&reservations)?;
        }
        let mut flushed: Vec<ByteRange> = Vec::new();
        let mut has_made_room = false;
        let (mut avoided, mut unreadable) = (Vec::new(), Vec::new());
        let mut has_built_names = false;
        loop {
            let mut transaction = self.begin()?;
            transaction.avoided.clone_from(&avoided);
            transaction.unreadable.clone_from(&unreadable);
            transaction.has_built_names = has_built_names;
            let outcome = change(&mut transaction);
            // Whatever it made of what is missing.
            if transaction.needs_names.get() {
                drop(transaction);
                // Where it fails, all names are compared.
                let _ = object_names::build(&self.log, |log| log.lock().map(Some));
                has_built_names = true;
                continue;
            }
            let missing = transaction.missing.take();
            if !missing.is_empty() {
                // All at once: a change that looks at all objects is run again only once.
                let missing = missing.into_iter().map(|page| (page, transaction.takes_from(page)));
                let missing: Vec<(u64, bool)> = missing.collect();
                drop(transaction);
                for (page, is_taken) in missing {
                    let read = self.handle.segment.read_slot(page * SLOTS_PER_PAGE).map(drop);
                    match read_or_avoid(page, read, is_taken, &mut avoided) {
                        // It may have been asked for because of another one that was missing.
                        Err(PoolError::Damaged { .. } | PoolError::Media(_))
                            if !unreadable.contains(&page) =>
                        {
                            unreadable.push(page);
                        }
                        done => done?,
                    }
                }
                continue;
            }
            let value = outcome?;
            if transaction.is_empty() {
                return Ok(value);
            }
            let most_freed = most_freed(&transaction);
            transaction.complete()?;
            // These need time, and are done without the lock.
            let unprepared = transaction.unprepared();
            if !unprepared.is_empty() {
                drop(transaction);
                for (page, is_taken) in unprepared {
                    let prepared = self.handle.segment.prepare(page);
                    read_or_avoid(page, prepared, is_taken, &mut avoided)?;
                }
                continue;
            }
            let exposed = self.exposed_without(&transaction, durability, &flushed);
            if !exposed.is_empty() {
                self.check_exposed(&exposed)?;
                drop(transaction);
                self.log.make_durable(&exposed)?;
                flushed.extend(exposed);
                continue;
            }
            let (body_checksum, freeing) =
                self.prepare(&mut transaction, &reservations, durability)?;
            let len_bytes = transaction.work.record.len() as u64;
            self.check_size(len_bytes)?;
            let place = if has_room_for_freed(&transaction, &freeing, most_freed, has_made_room)? {
                transaction.place(durability, len_bytes)?
            } else {
                None
            };
            match place {
                None => {
                    drop(transaction);
                    self.make_room(len_bytes)?;
                    has_made_room = true;
                }
                Some(Place::Append(append, filler)) => {
                    let append = (append, filler);
                    self.publish(reservations, transaction, append, body_checksum)?;
                    return Ok(value);
                }
                Some(Place::Packed(place)) => {
                    let change = (body_checksum, freeing);
                    self.publish_packed(reservations, transaction, &place, change)?;
                    return Ok(value);
                }
            }
        }
    }

    /// Publishes the record of a transaction in its own append, applies it, and makes it durable
    /// once the lock is released.
    fn publish(
        &self,
        // Before the transaction: dropped after it, since that needs the lock.
        reservations: Vec<Reservation<'_>>,
        mut transaction: Transaction<'_>,
        (mut append, filler): (Append, Option<Append>),
        body_checksum: u64,
    ) -> Result<()> {
        point::pass("transact-reserved");
        let identity = self.handle.identity();
        let (lsn, end_lsn) = (append.lsn, append.end_lsn);
        let mut bytes = std::mem::take(&mut transaction.work.record);
        let builder = &transaction.work.builder;
        builder.seal(&mut bytes, body_checksum, lsn, append.acknowledged_lsn, identity);
        let record = Header::decode(&bytes, lsn, self.handle.layout.log().len_bytes, identity)
            .and_then(|header| Record::decode(header, bytes))
            .map_err(|error| self.handle.damaged("a record just made", error))?;
        self.log.publish_append(&append, record.bytes())?;
        point::pass("transact-published");
        apply::apply(&transaction.locked, &record);
        point::pass("transact-applied");
        transaction.end(reservations);
        point::pass("transact-unlocked");
        if let Some(mut filler) = filler {
            self.log.write_filler(&mut filler)?;
        }
        self.log.write_append(&mut append, record.bytes())?;
        self.log.wait_durable(end_lsn)
    }

    /// Adds the record of a transaction to the packed ones, and applies it.
    fn publish_packed(
        &self,
        // As in `publish`.
        reservations: Vec<Reservation<'_>>,
        mut transaction: Transaction<'_>,
        place: &PackedPlace,
        (body_checksum, freeing): (u64, freed::Change),
    ) -> Result<()> {
        let locked = &transaction.locked;
        let Work { builder, record, exposed, .. } = &mut *transaction.work;
        let (lsn, acknowledged_lsn) = (place.lsn, place.acknowledged_lsn);
        builder.seal(record, body_checksum, lsn, acknowledged_lsn, self.handle.identity());
        let exposes = !reservations.is_empty() || !exposed.is_empty();
        locked.publish_packed(place, record, exposes)?;
        let end_lsn = lsn + record.len() as u64;
        let frees = freeing.frees();
        freed::note_change(locked, freeing, end_lsn);
        apply::apply_noted(locked, builder.slots(record), end_lsn);
        let due_tail = if frees { freed::due_tail(locked) } else { None };
        transaction.end(reservations);
        if let Some(tail_lsn) = due_tail {
            // In time for the thread that needs the pages.
            self.move_tail_soon(tail_lsn);
        }
        Ok(())
    }

    fn begin(&self) -> Result<Transaction<'_>> {
        let locked = self.log.lock()?;
        let work = SPARE.try_with(Cell::take).ok().flatten().unwrap_or_default();
        let transaction = Transaction {
            core: self,
            locked,
            work,
            refused: None,
            fresh: FreshChange::Kept,
            missing: RefCell::default(),
            avoided: Vec::new(),
            unreadable: Vec::new(),
            needs_names: Cell::new(false),
            has_built_names: false,
        };
        // With the lock: if a record that may be in the log was not applied, the pool is failed
        // under the lock, so no contradicting record is appended.
        self.handle.control().check_not_failed()?;
        Ok(transaction)
    }

    /// Builds the record of a transaction, except for its header. Returns the checksum of
    /// everything behind that, and what the change frees.
    fn prepare(
        &self,
        transaction: &mut Transaction<'_>,
        reservations: &[Reservation<'_>],
        durability: Durability,
    ) -> Result<(u64, freed::Change)> {
        let Work { changed, exposed, builder, record, .. } = &mut *transaction.work;
        self.check_exposed(exposed)?;
        builder.clear(durability == Durability::Later);
        for (slot, after) in changed.iter() {
            // Before the record is published: see there.
            self.handle.segment.materialise(*slot / SLOTS_PER_PAGE);
            let before = self.handle.segment.present_slot(*slot).expect("it is now");
            // The first change of a slot behind the tail must be whole.
            let words = if image_slots::is_logged(&self.handle.segment, *slot) {
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
        let freeing = freed::Change::of(&self.handle.segment, builder.slots(record));
        Ok((body_checksum, freeing))
    }

    /// Rejects ranges that recovery would reject.
    fn check_exposed(&self, exposed: &[ByteRange]) -> Result<()> {
        let data = self.handle.layout.data();
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
        if ranges.is_empty() || mutant::is(self.handle.mutant, Mutant::CommitBeforeData) {
            return Ok(());
        }
        self.log.make_durable(&ranges)
    }

    /// What a transaction exposes that must become durable before its record is written. A packed
    /// record names it instead: it becomes durable with the record.
    fn exposed_without(
        &self,
        transaction: &Transaction<'_>,
        durability: Durability,
        flushed: &[ByteRange],
    ) -> Vec<ByteRange> {
        if durability == Durability::Later
            || mutant::is(self.handle.mutant, Mutant::CommitBeforeData)
        {
            return Vec::new();
        }
        let exposed = transaction.work.exposed.iter().copied();
        exposed.filter(|range| !flushed.contains(range)).collect()
    }

    /// Checks that the log can hold the transaction at all.
    fn check_size(&self, len_bytes: u64) -> Result<()> {
        let log_bytes = self.handle.layout.log().len_bytes;
        if len_bytes > log_bytes / 4 {
            return Err(PoolError::TooLargeForLog { len_bytes, log_bytes });
        }
        Ok(())
    }
}

/// After a page of metadata was read: if that failed, and slots of it were taken, the transaction
/// takes others when it runs again, unless it has done so already.
fn read_or_avoid(
    page: u64,
    read: Result<()>,
    is_taken: bool,
    avoided: &mut Vec<u64>,
) -> Result<()> {
    match read {
        Err(PoolError::Damaged { .. } | PoolError::Media(_))
            if is_taken && !avoided.contains(&page) =>
        {
            avoided.push(page);
            Ok(())
        }
        read => read,
    }
}

/// Whether there is room to note what a transaction frees and exchanges. Returns an error if
/// pins are the reason that there is none, after a checkpoint (`has_made_room`) did not help.
fn has_room_for_freed(
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

impl Transaction<'_> {
    /// Takes a place in the log for the record; `None` if there is no room now.
    fn place(&self, durability: Durability, len_bytes: u64) -> Result<Option<Place>> {
        Ok(match durability {
            Durability::Now => (self.locked.reserve(len_bytes, true)?)
                .map(|(append, filler)| Place::Append(append, filler)),
            Durability::Later => self.locked.place_packed(len_bytes)?.map(Place::Packed),
        })
    }

    /// Ends a transaction that is in the image, and releases the lock.
    fn end(self, reservations: Vec<Reservation<'_>>) {
        // The next transaction looks for a slot behind the last one taken.
        if let Some(last) = self.work.taken.last() {
            self.locked.control().free_slot_hint.store(last + 1, Relaxed);
        }
        let after = self.work.changed.iter().map(|(number, bytes)| (*number, bytes));
        reservation::end(&self.locked, reservations, after);
    }

    /// Adds the slots that change with those that were put: the head, and slots that must not look
    /// as if they had never been used.
    fn complete(&mut self) -> Result<()> {
        let handle = &self.core.handle;
        if let Some((number, error)) = &self.refused {
            return Err(handle.damaged(format!("new inode {number}"), error.clone()));
        }
        let fresh = self.fresh;
        let changed = &mut self.work.changed;
        for (number, bytes) in changed.iter() {
            if *number == HEAD_SLOT || *number >= handle.segment.slots() {
                return Err(PoolError::Parameter {
                    what: "the number of an inode",
                    value: number.to_string(),
                    reason: "the pool has no such slot",
                });
            }
            debug_assert!(Slot::decode(bytes, *number).is_ok(), "slot {number} would be refused");
        }
        let head = PoolHead::read(|index| {
            u64::from_le_bytes(image_slots::load_word(&handle.segment, HEAD_SLOT, index))
        });
        let last_slot = changed.iter().map(|(slot, _)| *slot).max();
        let raised = PoolHead {
            fresh_from_page: fresh.of(head.fresh_from_page),
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
        Ok(())
    }

    /// Pages that it changes, and that must be read or need memory first, and whether it has taken
    /// slots of them.
    fn unprepared(&self) -> Vec<(u64, bool)> {
        let pages = self.work.changed.iter().map(|(slot, _)| slot / SLOTS_PER_PAGE);
        let unprepared = pages.filter(|page| !self.segment().is_prepared(*page));
        unprepared.map(|page| (page, self.takes_from(page))).collect()
    }

    /// Whether it has taken free slots of a page.
    fn takes_from(&self, page: u64) -> bool {
        self.work.taken.iter().any(|slot| slot / SLOTS_PER_PAGE == page)
    }

    fn is_empty(&self) -> bool {
        self.work.changed.is_empty()
            && self.refused.is_none()
            && self.work.exposed.is_empty()
            && self.fresh == FreshChange::Kept
    }
}

/// The most runs that a transaction can free: each run named after it can split one named before.
fn most_freed(transaction: &Transaction<'_>) -> usize {
    2 * transaction.work.changed.len() * LIST_RUNS
}
