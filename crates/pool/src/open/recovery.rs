//! Opening a pool: the first opener builds the shared state.
//!
//! The first process replays every committed record behind the durable tail, in order: metadata
//! into the image, pages of objects to their place. Then it writes the image back, flushes, and
//! raises the generation and the tail in both superblocks. Recovery is idempotent and may itself
//! crash anywhere: until a superblock with the new tail is durable, the old one causes the same
//! replay. If only processes have died, the log may have records that are not durable; they are
//! made durable first ([`secure`]).
//!
//! After a clean close there is nothing to replay, and the [saved state](crate::metadata::saved) takes the place
//! of what is otherwise computed from all slots.
//!
//! A first opener that only reads does the same on copies: it writes nothing, and mappings made
//! through it show pages of the log in place of those on media.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aquifer_sys::lock::LockKind;
use aquifer_sys::shared_memory::{SharedMemory, SharedMemoryError};
use uuid::Uuid;

use crate::access_error::AccessError;
use crate::error::{PoolError, Result};
use crate::format::layout::SLOTS_PER_PAGE;
use crate::format::record::RECORD_UNIT_BYTES;
use crate::format::slot_bytes::SLOT_BYTES;
use crate::format::superblock::{ANY_BOOT, Superblock, UNKNOWN_BOOT};
use crate::format::{FormatError, PAGE_BYTES};
use crate::log::reader::{Counted, LogEnd};
use crate::log::replay::Committed;
use crate::log::superblocks::{Superblocks, read_superblocks, write_superblocks};
use crate::media::lock_file::LockFile;
use crate::media::{ByteRange, Media};
use crate::metadata::alloc;
use crate::metadata::apply;
use crate::metadata::core::Core;
use crate::metadata::freed;
use crate::metadata::image_slots;
use crate::metadata::repair;
use crate::metadata::saved;
use crate::mutant::{self, Mutant};
use crate::open::sole;
use crate::options::{Company, PoolOptions};
use crate::owners::Inconsistency;
use crate::pins::PinPlaces;
use crate::point;
use crate::random::new_uuid;
use crate::shared::failure::FailureKind;
use crate::shared::handle::Handle;
use crate::shared::heartbeat::Heartbeat;
use crate::shared::life;
use crate::shared::members::Members;
use crate::shared::membership::{Byte, Membership};
use crate::shared::segment::{FILE_MUTEXES, PROCESSES, Segment};
use crate::shared::segment_place::{self, Owner, Part, Places};

/// How this process has the pool open.
enum Role {
    /// It is the first opener, and shares the pool.
    First,
    /// It has the pool exclusively.
    Alone,
    /// Other processes have the pool open.
    Joined,
    /// It is a reader, and no segment is shared.
    Snapshot,
}

/// How long a writer waits for readers without a segment. Most finish quickly; for the others the
/// open fails soon.
const READERS_PATIENCE: Duration = Duration::from_secs(1);

fn lock_error(media: &dyn Media, source: std::io::Error) -> PoolError {
    PoolError::Open {
        path: media.path().to_path_buf(),
        reason: "it cannot be locked".to_owned(),
        source: Some(source),
    }
}

/// Claims the media's open file description for this opener alone; its locks are taken through
/// `locks`, if the caller has some already.
fn claim(media: &dyn Media, locks: Option<LockFile>) -> Result<Membership> {
    let claimed = Membership::claim(media, locks).map_err(|source| lock_error(media, source))?;
    claimed.ok_or_else(|| PoolError::MediaInUse { path: media.path().to_path_buf() })
}

fn choose_role(media: &dyn Media, members: &Membership, options: &PoolOptions) -> Result<Role> {
    let failed = |source| lock_error(media, source);
    let busy = || PoolError::Busy { path: media.path().to_path_buf() };
    if options.read_only {
        if members.is_locked_by_other(Byte::Openers, LockKind::Exclusive) {
            return if members.try_lock(Byte::Openers, LockKind::Shared).map_err(failed)? {
                Ok(Role::Joined)
            } else {
                Err(busy())
            };
        }
        return if members.try_lock(Byte::Snapshots, LockKind::Shared).map_err(failed)? {
            Ok(Role::Snapshot)
        } else {
            Err(busy())
        };
    }
    if members.try_lock(Byte::Openers, LockKind::Exclusive).map_err(failed)? {
        let patience = READERS_PATIENCE.min(options.stall_timeout);
        if !members.lock(Byte::Snapshots, LockKind::Exclusive, patience).map_err(failed)? {
            members.unlock(Byte::Openers);
            return Err(busy());
        }
        members.unlock(Byte::Snapshots);
        return Ok(if options.exclusive { Role::Alone } else { Role::First });
    }
    if !options.exclusive && members.try_lock(Byte::Openers, LockKind::Shared).map_err(failed)? {
        return Ok(Role::Joined);
    }
    Err(busy())
}

/// Keeps all other openers out, as the exclusive opener of a pool does, until it is dropped.
pub(crate) struct OnlyOne(Option<Membership>);

impl OnlyOne {
    /// Passes the locks to an opener.
    pub fn hand_over(mut self) -> Option<Membership> {
        self.0.take()
    }
}

impl Drop for OnlyOne {
    fn drop(&mut self) {
        if let Some(members) = &self.0 {
            members.leave();
        }
    }
}

/// Locks the media exclusively without opening the pool on it, which may be damaged; through `locks`,
/// if the caller has some already.
pub(crate) fn lock_for_one(
    media: &dyn Media,
    options: &PoolOptions,
    locks: Option<LockFile>,
) -> Result<OnlyOne> {
    let failed = |source| lock_error(media, source);
    let members = claim(media, locks)?;
    let wanted = members.lock(Byte::Recovery, LockKind::Exclusive, options.stall_timeout);
    if !wanted.map_err(failed)? {
        return Err(PoolError::Busy { path: media.path().to_path_buf() });
    }
    let only = OnlyOne(Some(members));
    let members = only.0.as_ref().expect("just made");
    let superblock = || read_superblocks(media).ok().map(|superblocks| superblocks.valid);
    choose_role(media, members, options)
        .map_err(|error| sole::instead_of(error, media, members, superblock(), options))?;
    members.keep_out_only();
    Ok(only)
}

/// An open pool, and for a reader without a segment the log's content that replaces that of the
/// media.
pub(crate) struct Opened {
    pub core: Arc<Core>,
    pub overlay: Committed,
    pub recovered_records: u64,
}

/// Descriptors that another process passes to this one, which may not open them itself.
pub(crate) struct Shared {
    /// `None` if the process that passes them has the pool open still, so that it is the present one.
    pub segment_id: Option<Uuid>,
    pub segment: OwnedFd,
    pub pins: OwnedFd,
}

/// Opens the pool on `media`. With `shared`, only while the process that passed it has the pool
/// open. `members` are those of [`OnlyOne::hand_over`].
pub(crate) fn open(
    media: Arc<dyn Media>,
    options: &PoolOptions,
    shared: Option<Shared>,
    members: Option<Membership>,
) -> Result<Opened> {
    if !options.read_only && !media.is_writable() {
        return Err(PoolError::ReadOnly {
            path: media.path().to_path_buf(),
            reason: "the file or its file system is read-only",
        });
    }
    let members = Arc::new(members.map_or_else(|| claim(&*media, None), Ok)?);
    let opened = open_locked(&media, members.clone(), options, shared);
    if opened.is_err() {
        // They may share the media's open file description, which the caller may keep.
        members.leave();
    }
    opened
}

fn open_locked(
    media: &Arc<dyn Media>,
    members: Arc<Membership>,
    options: &PoolOptions,
    shared: Option<Shared>,
) -> Result<Opened> {
    let failed = |source| lock_error(&**media, source);
    let recovery = if options.read_only { LockKind::Shared } else { LockKind::Exclusive };
    if !members.lock(Byte::Recovery, recovery, options.stall_timeout).map_err(failed)? {
        return Err(PoolError::Busy { path: media.path().to_path_buf() });
    }
    point::pass("open-locked");
    let superblocks = read_superblocks(&**media)?;
    if !options.read_only {
        superblocks.check_writable(&**media)?;
    }
    let superblock = || Some(superblocks.valid.clone());
    let role = choose_role(&**media, &members, options)
        .map_err(|error| sole::instead_of(error, &**media, &members, superblock(), options))?;
    let opened = match role {
        Role::Joined => join(media, members, superblocks.valid, options, shared),
        // The process that shared it has closed the pool: what exists now is only for processes
        // that may open the pool themselves.
        _ if shared.is_some() => Err(AccessError::ended(media.path()).into()),
        Role::First | Role::Alone | Role::Snapshot => {
            build(media, members, superblocks, options, &role)
        }
    }?;
    opened.core.handle.members.locks.unlock(Byte::Recovery);
    Ok(opened)
}

fn new_core(
    media: &Arc<dyn Media>,
    membership: Arc<Membership>,
    superblock: &Superblock,
    shared: SharedParts,
    life: u64,
    options: &PoolOptions,
) -> Arc<Core> {
    let SharedParts { segment, pins, segment_id, places } = shared;
    let members = Members {
        locks: membership,
        process: aquifer_vm::LifeMark::new(),
        is_writable: !options.read_only,
        stall_timeout: options.stall_timeout,
        held: std::sync::Mutex::default(),
    };
    let handle = Handle {
        members,
        media: media.clone(),
        layout: superblock.layout,
        uuid: superblock.uuid,
        created_ns: superblock.created_ns,
        features: superblock.features,
        saved: superblock.saved,
        life,
        segment_id,
        segment,
        mutant: options.mutant,
        company: options.company.clone(),
        sole_nonce: OnceLock::new(),
        fresh_step_pages: options.fresh_step_pages.clamp(1, superblock.layout.page_count),
        own_writes: Box::new([const { AtomicU64::new(0) }; FILE_MUTEXES]),
        heartbeat: Heartbeat::default(),
    };
    Core::new(handle, pins, places)
}

fn take_slot(core: &Core) -> Result<()> {
    sole::admit(&core.handle)?;
    let (segment, locks) = (&core.handle.segment, &core.handle.members.locks);
    let index = locks.lock_slot(segment).map_err(|e| lock_error(&*core.handle.media, e))?;
    let index = index.ok_or(PoolError::TooManyProcesses { limit: PROCESSES })?;
    point::pass("join-locked");
    segment.allocate_process(index).inspect_err(|_| locks.unlock(Byte::Process(index)))?;
    point::pass("join-memory");
    let is_passive = core.handle.company == Company::Passive;
    segment.process(index).is_passive.store(is_passive.into(), Relaxed);
    locks.join(segment, index);
    point::pass("join-slot");
    repair::inherit_slot(&core.log.lock()?)?;
    point::pass("join-inherited");
    Ok(())
}

/// Opens a pool that other processes have open.
fn join(
    media: &Arc<dyn Media>,
    members: Arc<Membership>,
    superblock: Superblock,
    options: &PoolOptions,
    shared: Option<Shared>,
) -> Result<Opened> {
    let elsewhere = |reason| PoolError::BusyElsewhere { path: media.path().to_path_buf(), reason };
    if superblock.segment.is_nil() {
        return Err(elsewhere("the superblock names no shared memory".to_owned()));
    }
    let segment_id = superblock.segment;
    let (uuid, layout) = (superblock.uuid, &superblock.layout);
    let places = Places::new(options.segment_directory.as_deref(), media.path());
    let identity = segment_place::identity_in(segment_id);
    let map = |file| SharedMemory::adopt(file, true).map_err(PoolError::SharedMemory);
    let (memory, pins) = match shared {
        // The pool was closed and opened again in between.
        Some(shared) if shared.segment_id.is_some_and(|id| id != segment_id) => {
            return Err(AccessError::ended(media.path()).into());
        }
        Some(shared) => {
            let file = shared.segment.as_fd();
            segment_place::verify(file, uuid, Part::Segment, identity, &**media)?;
            (map(shared.segment)?, Some(shared.pins))
        }
        None => {
            let part = Part::Segment;
            let writable = !options.read_only;
            (places.open(segment_id, part, identity, uuid, &**media, writable)?, None)
        }
    };
    let segment = Segment::adopt(memory, uuid, layout).map_err(elsewhere)?;
    // Readers store to no pins, and do not need those of the writers.
    let pins = if options.read_only {
        PinPlaces::of_reader()
    } else {
        let identity = segment.control().pins_identity.load(Relaxed);
        let pins = match pins {
            Some(pins) => {
                segment_place::verify(pins.as_fd(), uuid, Part::Pins, identity, &**media)?;
                map(pins)?
            }
            None => places.open(segment_id, Part::Pins, identity, uuid, &**media, true)?,
        };
        PinPlaces::adopt(pins, uuid).map_err(elsewhere)?
    };
    let life = segment.control().life.load(Relaxed);
    let is_same_life = life != life::UNKNOWN
        && life == life::of(&**media, options.boot, options.mutant)
        && segment.is_whole();
    // A live writer holds a lock on this file that needs a descriptor for writing, and uses this
    // segment.
    if !is_same_life && !members.has_writers() {
        return Err(elsewhere(
            "no process that writes to the pool lives, and what they shared may be older than the pool is now; end those \
             that have it open for reading"
                .to_owned(),
        ));
    }
    segment.note_use();
    let shared = SharedParts { segment, pins, segment_id, places };
    let core = new_core(media, members, &superblock, shared, life, options);
    saved::adopt_base(&core.handle, &superblock)?;
    if core.handle.members.is_writable {
        take_slot(&core)?;
    }
    Ok(Opened { core, overlay: Committed::default(), recovered_records: 0 })
}

/// The shared memory of a pool's processes, and its location.
struct SharedParts {
    segment: Segment,
    pins: PinPlaces,
    /// Nil if no other process can reach it.
    segment_id: Uuid,
    places: Places,
}

/// How often to create a new segment because another process took the name that it needed.
const MOST_NAMES: usize = 16;

/// Creates both segments, or none.
fn create_shared(
    places: &Places,
    owner: Owner,
    superblock: &Superblock,
    life: u64,
    mode: u32,
) -> Result<SharedParts> {
    let mut names = 1;
    loop {
        match create_named(places, owner, superblock, life, mode) {
            // The name depends on the file: a new file gets a new name.
            Err(PoolError::SharedMemory(
                SharedMemoryError::Exists { .. }
                | SharedMemoryError::System { action: segment_place::NAME, .. },
            )) if names < MOST_NAMES => names += 1,
            made => return made,
        }
    }
}

fn create_named(
    places: &Places,
    owner: Owner,
    superblock: &Superblock,
    life: u64,
    mode: u32,
) -> Result<SharedParts> {
    let pool = superblock.uuid;
    let new_id = owner.new_id()?;
    let path = places.of_new(new_id);
    let mut segment_id = Uuid::nil();
    let made = (|| {
        let segment = Segment::create(&path, pool, &superblock.layout, mode)?;
        let file = segment.file().expect("others share it");
        segment_id = owner.id(segment_place::identity_of(file, pool, Part::Segment)?);
        let pins = PinPlaces::create(&places.of_made(segment_id, Part::Pins), pool, mode)?;
        let file = pins.file().expect("others share it");
        let pins_identity = segment_place::identity_of(file, pool, Part::Pins)?;
        // Relaxed: other processes find the segment through the superblock, which is written later.
        segment.control().pins_identity.store(pins_identity, Relaxed);
        segment.control().life.store(life, Relaxed);
        point::pass("open-made");
        places.name_made(new_id, segment_id)?;
        Ok((segment, pins))
    })();
    match made {
        Ok((segment, pins)) => {
            Ok(SharedParts { segment, pins, segment_id, places: places.clone() })
        }
        Err(error) => {
            [new_id, segment_id].into_iter().for_each(|id| places.remove(id));
            Err(error)
        }
    }
}

/// Builds the segment from the media and the log; writes the result back unless this process only
/// reads.
fn build(
    media: &Arc<dyn Media>,
    members: Arc<Membership>,
    mut superblocks: Superblocks,
    options: &PoolOptions,
    role: &Role,
) -> Result<Opened> {
    let (uuid, left_id) = (superblocks.valid.uuid, superblocks.valid.segment);
    let owner = Owner::new(uuid, media.file()).map_err(|error| lock_error(&**media, error))?;
    let places = Places::new(options.segment_directory.as_deref(), media.path());
    superblocks.valid.boot = boot_of_left(&places, &superblocks.valid, &**media);
    // Only the segment that the superblock names records whether the pool has failed, until the
    // superblocks name another one.
    let remove_left = |kept| places.remove_left_by(owner, left_id, uuid, kept);
    if matches!(role, Role::First | Role::Alone) {
        remove_left(left_id);
    }
    let life = life::of(&**media, options.boot, options.mutant);
    let shared = match role {
        Role::First => {
            let create = |superblocks: &Superblocks| {
                create_shared(&places, owner, &superblocks.valid, life, options.segment_mode)
            };
            let made = create(&superblocks);
            let is_full =
                matches!(made, Err(PoolError::SharedMemory(SharedMemoryError::NoSpace { .. })));
            // There may be no room for the old and the new segment together.
            if is_full && places.has_any(left_id) {
                superblocks.valid.sequence = superblocks.valid.next_sequence();
                superblocks.valid.segment = Uuid::nil();
                let (valid, copy) = (&superblocks.valid, superblocks.copy);
                write_superblocks(&**media, valid, copy, options.mutant)?;
                remove_left(Uuid::nil());
                create(&superblocks)?
            } else {
                made?
            }
        }
        _ => SharedParts {
            segment: Segment::private(uuid, &superblocks.valid.layout)?,
            pins: PinPlaces::private()?,
            segment_id: Uuid::nil(),
            places: places.clone(),
        },
    };
    let core = new_core(media, members, &superblocks.valid, shared, life, options);
    point::pass("open-segment");
    let superblock = &superblocks.valid;
    begin_log(&core, superblock);
    let resumed = if options.check || options.repairs {
        Ok(false)
    } else {
        saved::resume(&core.handle, superblock)
    };
    let is_resumed = matches!(resumed, Ok(true));
    let replayed = resumed.and_then(|_| match is_resumed {
        true => Ok(Replayed::nothing(&core, superblock)),
        false => replay(&core, superblock, options.repairs),
    });
    // No superblock written from here on may name it.
    if !mutant::is(options.mutant, Mutant::KeepSavedMark) {
        superblocks.valid.saved_sum = 0;
    }
    let built = replayed.and_then(|Replayed { overlay, records, counted }| {
        point::pass("open-replayed");
        if core.handle.members.is_writable {
            take_slot(&core)?;
            point::pass("open-slot");
            let superblocks = secure(&core, superblocks, &counted)?;
            write_recovered(&core, &superblocks, &overlay)?;
            if !left_id.is_nil() {
                remove_left(core.handle.segment_id);
            }
            if !is_resumed {
                // The log was read and zeroed in large pieces, so it is cached in large folios, and
                // ext4 walks over all blocks of a folio to write two of them: 80 instead of 40 µs
                // for a commit of one page.
                core.handle.media.forget_cached(core.handle.layout.log());
            }
            point::pass("open-recovered");
            if !is_resumed {
                repair::rebuild(&core.log.lock()?)?;
            }
            let control = core.handle.control();
            let fresh_from_page = control.fresh_from_page.load(Relaxed);
            control.durable_fresh_from_page.store(fresh_from_page, Relaxed);
            control.used_to_page.store(fresh_from_page, Relaxed);
            point::pass("open-rebuilt");
            if matches!(role, Role::First) {
                // The lock changes from exclusive to shared in one step, so no other opener gets in
                // between.
                let _ = core
                    .handle
                    .members
                    .locks
                    .try_lock(Byte::Openers, LockKind::Shared)
                    .map_err(|error| lock_error(&*core.handle.media, error))?;
                point::pass("open-shared");
            }
        } else if !is_resumed {
            // For queries of the pool's usage.
            repair::rebuild(&core.log.lock()?)?;
        }
        Ok((overlay, records))
    });
    match built {
        Ok((overlay, recovered_records)) => {
            let overlay =
                if core.handle.members.is_writable { Committed::default() } else { overlay };
            Ok(Opened { core, overlay, recovered_records })
        }
        Err(error) => {
            core.places.remove(core.handle.segment_id);
            Err(error)
        }
    }
}

fn load_image(core: &Core) -> Result<()> {
    const PIECE_PAGES: u64 = 16;
    let metadata = core.handle.layout.metadata();
    let mut piece = vec![0; (PIECE_PAGES * PAGE_BYTES) as usize];
    for first_page in (0..core.handle.layout.metadata_pages).step_by(PIECE_PAGES as usize) {
        let pages = PIECE_PAGES.min(core.handle.layout.metadata_pages - first_page);
        let piece = &mut piece[..(pages * PAGE_BYTES) as usize];
        core.handle.media.read_at(metadata.offset_bytes + first_page * PAGE_BYTES, piece)?;
        for (page_index, page) in (first_page..).zip(piece.chunks_exact_mut(PAGE_BYTES as usize)) {
            if page.iter().all(|&byte| byte == 0) {
                continue; // zero already, as the segment is fresh
            }
            let first_slot = page_index * SLOTS_PER_PAGE;
            core.handle.segment.add_page(page_index)?;
            for (number, slot) in (first_slot..).zip(page.as_chunks_mut::<SLOT_BYTES>().0) {
                image_slots::load_from_media(&core.handle.segment, number, slot);
            }
        }
    }
    Ok(())
}

/// The content of the log.
struct Replayed {
    /// The content for objects.
    overlay: Committed,
    records: u64,
    counted: Counted,
}

impl Replayed {
    /// Of a pool that was closed cleanly: everything is at its place.
    fn nothing(core: &Core, superblock: &Superblock) -> Replayed {
        let end = LogEnd { lsn: superblock.tail_lsn, reason: FormatError::Magic };
        continue_log(core, end.lsn);
        core.image.distrust(&[]);
        let counted = Counted { end, unmarked: Vec::new() };
        Replayed { overlay: Committed::default(), records: 0, counted }
    }
}

/// No log begins behind this position, so that none reaches 2^63, where positions end: one
/// generation writes less than the remainder.
const LATEST_START_LSN: u64 = 1 << 62;

/// The life that the superblock names; [`UNKNOWN_BOOT`] if the last processes that had the pool
/// open saw lost bytes and could not record it in the superblocks, or if that is not known.
pub(crate) fn boot_of_left(places: &Places, superblock: &Superblock, media: &dyn Media) -> u64 {
    match superblock.boot {
        // No record that counts depends on bytes that may be lost.
        ANY_BOOT => ANY_BOOT,
        boot if segment_place::left_whole(places, superblock, media) => boot,
        _ => UNKNOWN_BOOT,
    }
}

/// The log is as the superblock says, and nothing of it was read.
fn begin_log(core: &Core, superblock: &Superblock) {
    let control = core.handle.control();
    let tail_lsn = superblock.tail_lsn;
    control.generation.store(superblock.generation, Relaxed);
    control.sequence.store(superblock.sequence, Relaxed);
    for position in [
        &control.tail_lsn,
        &control.applied_lsn,
        &control.appends.durable_lsn,
        &control.appends.metadata_lsn,
    ] {
        position.store(tail_lsn, Relaxed);
    }
}

/// Loads the image and replays the log into it.
fn replay(core: &Core, superblock: &Superblock, repairs: bool) -> Result<Replayed> {
    load_image(core)?;
    let tail_lsn = superblock.tail_lsn;
    let reader = core.handle.log_reader();
    let mut records = 0;
    let locked = core.log.lock()?;
    let counts_unmarked = superblock.counts_unmarked_in(core.handle.life);
    let counted = reader.scan_counting(tail_lsn, counts_unmarked, |record| {
        for change in record.slots() {
            core.handle.segment.add_page(change.slot / SLOTS_PER_PAGE)?;
        }
        apply::apply(&locked, record);
        records += 1;
        Ok(())
    })?;
    let owners = image_slots::owners(&core.handle);
    let forbids = |inconsistency: &&Inconsistency| {
        inconsistency.forbids_writing() && !(repairs && inconsistency.is_miscount())
    };
    if core.handle.members.is_writable
        && let Some(inconsistency) = owners.inconsistencies().iter().find(forbids)
    {
        return Err(core.handle.damaged(inconsistency.structure(), inconsistency.error()));
    }
    core.image.distrust(owners.inconsistencies());
    let mut committed = Committed::default();
    let end_lsn = counted.end.lsn;
    let end =
        reader.scan(tail_lsn, end_lsn, |record| committed.add(&reader, record, Some(&owners)))?;
    check_unchanged(core, end, end_lsn)?;
    // No inode names the freed runs, and the tail passes everything that was replayed.
    freed::forget(&locked);
    alloc::forget_zeroed(&locked);
    drop(locked);
    continue_log(core, end_lsn);
    if let Some(acknowledged_lsn) = reader.acknowledged_behind(tail_lsn, end_lsn)?
        && core.handle.members.is_writable
    {
        return Err(PoolError::DamagedLog {
            path: core.handle.media.path().to_path_buf(),
            end_lsn,
            acknowledged_lsn,
        });
    }
    Ok(Replayed { overlay: committed, records, counted })
}

/// The log goes on behind its end.
fn continue_log(core: &Core, end_lsn: u64) {
    let control = core.handle.control();
    let next_lsn = next_lsn(core, end_lsn);
    if next_lsn < end_lsn {
        // Both positions belong to the log that ends here.
        control.fresh_lsn.store(next_lsn, Relaxed);
        control.content_end_lsn.store(next_lsn, Relaxed);
    }
    for position in
        [&control.applied_lsn, &control.appends.durable_lsn, &control.appends.metadata_lsn]
    {
        position.store(next_lsn, Relaxed);
    }
}

/// The position at which a log continues that ended here: at the next page, since the rest of this
/// one belongs to the generation that ends.
///
/// It is also advanced by the length of the ring. A power cut can lose an unknown number of
/// records, but none lay further behind the tail than the ring is long. So no position is used by
/// two records, and an identifier derived from a position is unique: an inode's generation
/// ([`ChangeSlots::new_generation`](crate::ChangeSlots::new_generation)).
///
/// Only a forged position comes near [`LATEST_START_LSN`]. Behind it the positions start again,
/// since any position can be the first one of a new generation.
fn next_lsn(core: &Core, end_lsn: u64) -> u64 {
    let next_lsn = end_lsn.next_multiple_of(PAGE_BYTES);
    let ring_bytes = core.handle.layout.log().len_bytes;
    if next_lsn > LATEST_START_LSN {
        return if core.handle.members.is_writable { next_lsn % ring_bytes } else { next_lsn };
    }
    // A reader appends nothing, and reports how much of the log is in use.
    if core.handle.members.is_writable && !mutant::is(core.handle.mutant, Mutant::SameGeneration) {
        next_lsn + ring_bytes
    } else {
        next_lsn
    }
}

/// Makes durable what was replayed. That a record is in the log shows only that it was written; it
/// may be in the cache alone, whether or not this life is known to differ from the log's. Metadata
/// may go to its place only when no power cut can remove from the log what was found in it.
///
/// Records that expose bytes and are not covered by a mark would not count in another life, so the
/// superblock records from here on that they do.
fn secure(core: &Core, mut superblocks: Superblocks, counted: &Counted) -> Result<Superblocks> {
    let superblock = &superblocks.valid;
    let (tail_lsn, end_lsn) = (superblock.tail_lsn, counted.end.lsn);
    let is_trusting =
        superblock.boot != 0 && core.handle.life != 0 && superblock.boot != core.handle.life;
    if end_lsn == tail_lsn
        || (is_trusting && mutant::is(core.handle.mutant, Mutant::SecureOnlySameLife))
    {
        return Ok(superblocks);
    }
    let log = core.handle.layout.log();
    // Including the unit behind the last record: there is no record in it, and none may appear.
    let len_bytes = (end_lsn + RECORD_UNIT_BYTES - tail_lsn).min(log.len_bytes);
    let before_end_bytes = len_bytes.min(log.len_bytes - tail_lsn % log.len_bytes);
    let mut ranges = vec![
        ByteRange { offset_bytes: core.handle.log_position(tail_lsn), len_bytes: before_end_bytes },
        ByteRange { len_bytes: len_bytes - before_end_bytes, ..log },
    ];
    ranges.extend(&counted.unmarked);
    ranges.retain(|range| range.len_bytes > 0);
    // Rewrite the ranges: an earlier write-back may have failed, and then the kernel takes pages
    // for clean that are not on media, and may drop them at any time. For the log, write exactly
    // the bytes whose checksum was verified; if they cannot be read again, the log has become
    // shorter.
    let end = core.handle.log_reader().scan(tail_lsn, end_lsn, |record| {
        let offset_bytes = core.handle.log_position(record.header.lsn);
        // SAFETY: the log: no reference to it is ever made.
        unsafe { core.handle.media.write_at(offset_bytes, record.bytes())? };
        Ok(())
    })?;
    check_unchanged(core, end, end_lsn)?;
    let behind = ByteRange {
        offset_bytes: core.handle.log_position(end_lsn),
        len_bytes: RECORD_UNIT_BYTES.min(log.len_bytes - (end_lsn - tail_lsn)),
    };
    for range in counted.unmarked.iter().chain([&behind]) {
        write_again(&*core.handle.media, *range)?;
    }
    core.log.make_durable_in_recovery(&ranges).inspect_err(|_| {
        // Some of it may have been lost before it was read here. The kernel reports that only once.
        let unknown = Superblock {
            sequence: superblocks.valid.next_sequence(),
            boot: UNKNOWN_BOOT,
            ..superblocks.valid.clone()
        };
        let _ =
            write_superblocks(&*core.handle.media, &unknown, superblocks.copy, core.handle.mutant);
    })?;
    point::pass("open-secured");
    if !counted.unmarked.is_empty() {
        superblocks.valid.sequence = superblocks.valid.next_sequence();
        superblocks.valid.boot = ANY_BOOT;
        write_superblocks(
            &*core.handle.media,
            &superblocks.valid,
            superblocks.copy,
            core.handle.mutant,
        )?;
    }
    Ok(superblocks)
}

/// Returns an error if a log that was read before is shorter now: the kernel has lost a write to
/// it, and dropped the cached bytes.
fn check_unchanged(core: &Core, found: LogEnd, end_lsn: u64) -> Result<()> {
    if found.lsn == end_lsn {
        Ok(())
    } else {
        Err(core.handle.damaged(format!("the log at {}", found.lsn), found.reason))
    }
}

fn write_again(media: &dyn Media, range: ByteRange) -> Result<()> {
    const PIECE_BYTES: u64 = 1 << 20;
    let mut bytes = vec![0; PIECE_BYTES.min(range.len_bytes) as usize];
    for done in (0..range.len_bytes).step_by(PIECE_BYTES as usize) {
        let piece = &mut bytes[..PIECE_BYTES.min(range.len_bytes - done) as usize];
        media.read_at(range.offset_bytes + done, piece)?;
        // SAFETY: the pool is being opened exclusively: no process has a lease or an attached
        // object of it.
        unsafe { media.write_at(range.offset_bytes + done, piece)? };
    }
    Ok(())
}

/// Makes what was replayed durable at its place, and then the new generation and tail.
fn write_recovered(core: &Core, superblocks: &Superblocks, committed: &Committed) -> Result<()> {
    let end_lsn = core.handle.control().appends.durable_lsn.load(Relaxed);
    let superblock = &superblocks.valid;
    let mut ranges = Vec::new();
    if !mutant::is(core.handle.mutant, Mutant::TrustStoredState) {
        let check = || core.handle.members.check_kept();
        committed.copy_to_place(&*core.handle.media, check)?;
        ranges = committed.ranges();
    }
    let dirty = core.handle.segment.dirty_image_pages();
    for page in 0..core.handle.layout.metadata_pages {
        if dirty[(page / 64) as usize].load(Relaxed) & (1 << (page % 64)) == 0 {
            continue;
        }
        let mut bytes = image_slots::page_for_media(&core.handle.segment, page);
        image_slots::seal_page(&mut bytes);
        image_slots::begin_log_of(&core.handle.segment, page);
        let offset_bytes = core.handle.layout.metadata().offset_bytes + page * PAGE_BYTES;
        // SAFETY: a page of metadata: no reference to it is ever made.
        unsafe { core.handle.media.write_at(offset_bytes, &bytes)? };
        ranges.push(ByteRange { offset_bytes, len_bytes: PAGE_BYTES });
    }
    dirty.iter().for_each(|word| word.store(0, Relaxed));
    if !ranges.is_empty() && !mutant::is(core.handle.mutant, Mutant::TailBeforeFlush) {
        core.log.make_durable_in_recovery(&ranges)?;
    }
    point::pass("open-written");
    let raised = if mutant::is(core.handle.mutant, Mutant::SameGeneration) {
        superblock.generation
    } else {
        // By a random number: if an older superblock reappears, the records of another generation
        // are not taken for the continuation of its log.
        superblock.next_generation(new_uuid()?.as_u64_pair().0)
    };
    let recovered = Superblock {
        sequence: superblock.next_sequence(),
        generation: raised,
        tail_lsn: end_lsn,
        segment: core.handle.segment_id,
        boot: core.handle.life,
        ..superblock.clone()
    };
    write_superblocks(&*core.handle.media, &recovered, superblocks.copy, core.handle.mutant)
        .inspect_err(|error| core.handle.control().fail(FailureKind::Superblock, &error.source))?;
    let control = core.handle.control();
    control.generation.store(recovered.generation, Relaxed);
    control.sequence.store(recovered.sequence, Relaxed);
    control.tail_lsn.store(end_lsn, Relaxed);
    Ok(())
}
