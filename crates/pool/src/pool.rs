//! A pool, opened.

use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_sys::lock::LockKind;
use aquifer_sys::robust::RobustGuard;
use aquifer_vm::Bytes;
use uuid::Uuid;

use crate::alloc::{self, Space, Wanted};
use crate::appends::at_place;
use crate::background::Worker;
use crate::bitmap;
use crate::broker::{self, AccessKey, Granted};
use crate::commit::{Commit, CommitContent};
use crate::core::{Core, file_mutex};
use crate::create::{CreateOptions, lock_to_format};
use crate::error::{PoolError, Result};
use crate::format::PAGE_BYTES;
use crate::format::file::FileState;
use crate::format::inode::Inode;
use crate::format::layout::Layout;
use crate::format::run::Run;
use crate::freed;
use crate::heartbeat;
use crate::image::View as MetadataView;
use crate::log::FailureKind;
use crate::media::{self, ByteRange, Media, PersistenceDomain, WriteWindows};
use crate::membership::Byte;
use crate::mutant::{self, Mutant};
use crate::point;
use crate::recovery::{self, Opened};
use crate::replay::Committed;
use crate::reservation::Reservation;
use crate::segment::SlotSet;
use crate::transaction::Transaction;
use crate::turn::Turn;

/// How to open a pool.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// Opens for reading only.
    pub read_only: bool,
    /// Keeps all other processes out, and needs no shared memory.
    pub exclusive: bool,
    /// Takes the media for this domain, whatever it is: for tests.
    pub domain: Option<PersistenceDomain>,
    /// What guards the media against stray stores of this process, if it opens them for writing.
    pub write_windows: WriteWindows,
    /// Where the pool's [broker](crate::broker) is asked for access; beside the pool if it is not said. See
    /// [`Pool::open_granted`].
    pub broker_socket: Option<PathBuf>,
    /// How long to wait for a process that holds a lock, or has begun a commit, and does not go on (it was stopped, or
    /// hangs). Then [`PoolError::Stalled`] says which one it is.
    pub stall_timeout: Duration,
    /// Permissions of the shared memory. A process that opens the pool for writing needs to read and write it, one that opens it for reading
    /// while a writer is there needs to read it.
    pub segment_mode: u32,
    /// The directory that the first process puts the shared memory into; `/dev/shm` if none is said. Processes that join look there, in
    /// `/dev/shm` and in the pool's own directory, so those of containers that share the pool's directory and not `/dev/shm` find each
    /// other by themselves once the first one has named that directory.
    ///
    /// The directory should lie in memory, or on a disk: one that reserves the room that it gives (ext4, XFS; not NFS). There
    /// the system writes shared memory back as it does every file, which costs some writes a minute and keeps nothing: after a
    /// restart of the machine what is left is removed.
    ///
    /// After all processes were killed, the next one should name the directory as well, or it should be one of the two that are looked in
    /// anyway: if a process does not find the shared memory, it cannot know that no bytes were lost, and changes that were not durable are lost.
    pub segment_directory: Option<PathBuf>,
    /// How much of the pages that are free is zeroed in a second, in the background; nothing at 0. Whoever needs zeros
    /// and finds none zeroes pages himself.
    pub zero_bytes_per_second: u64,
    /// How much free space is to be zero: beyond that nothing is zeroed in the background. What was never used
    /// counts.
    pub zeroed_bytes: u64,
    /// Takes this for the life that the media are in: for tests of power cuts.
    #[doc(hidden)]
    pub boot: Option<u64>,
    /// Makes a deliberate mistake, in builds for the tests that look for it.
    #[doc(hidden)]
    pub mutant: Option<Mutant>,
    /// Runs checkpoints, and zeroes, in the background. Without, checkpoints run when the log is full.
    #[doc(hidden)]
    pub background: bool,
    /// Opens a pool for writing in which links are miscounted: to count them anew.
    #[doc(hidden)]
    pub repairs: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            read_only: false,
            exclusive: false,
            domain: None,
            write_windows: WriteWindows::None,
            broker_socket: None,
            stall_timeout: Duration::from_secs(10),
            segment_mode: 0o600,
            segment_directory: None,
            zero_bytes_per_second: 256 << 20,
            zeroed_bytes: 1 << 30,
            boot: None,
            mutant: None,
            background: true,
            repairs: false,
        }
    }
}

impl OpenOptions {
    /// The same for the media.
    pub(crate) fn media(&self) -> media::OpenOptions {
        let options =
            media::OpenOptions::new().writable(!self.read_only).write_windows(self.write_windows);
        self.domain.into_iter().fold(options, media::OpenOptions::domain)
    }
}

/// Where the log is used beyond this, a checkpoint begins in the background.
const CHECKPOINT_AT_PERCENT: u64 = 50;

/// A pool, opened. Cheap to clone; closed when the last clone is dropped. Shared between threads freely, and the file
/// between processes.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    core: Arc<Core>,
    overlay: Committed,
    recovered_records: u64,
    checkpointer: Option<Worker>,
    zeroer: Option<Worker>,
    heartbeat: Option<Worker>,
}

/// What a pool is and how full it is.
#[derive(Debug, Clone)]
pub struct PoolInfo {
    /// The file.
    pub path: PathBuf,
    /// Names the pool.
    pub uuid: Uuid,
    /// When it was made, in nanoseconds since 1970.
    pub created_ns: u64,
    /// What makes its bytes durable.
    pub domain: PersistenceDomain,
    /// Where its parts lie.
    pub layout: Layout,
    /// The generation of the log.
    pub generation: u64,
    /// The first record that recovery would replay.
    pub tail_lsn: u64,
    /// Up to where records are copied to their place.
    pub applied_lsn: u64,
    /// Up to where the log is durable.
    pub durable_lsn: u64,
    /// Persistent objects.
    pub objects: u64,
    /// Regular files.
    pub files: u64,
    /// Directories, the root among them.
    pub directories: u64,
    /// Symbolic links.
    pub symbolic_links: u64,
    /// Slots that belong to one of these, for what does not fit into its own: names, runs, attributes.
    pub parts: u64,
    /// Slots that are damaged.
    pub damaged_inodes: u64,
    /// Slots with nothing in them.
    pub free_slots: u64,
    /// Pages that are free.
    pub free_pages: u64,
    /// Of these, those that are known to be zero.
    pub zeroed_pages: u64,
    /// Pages that were freed and are free after the next checkpoint, if nobody pins them.
    pub freed_pages: u64,
    /// Pages that were freed and are free when nobody pins them any more.
    pub held_pages: u64,
    /// Pins that are set, in all processes that are alive together; 0 to who opened the pool for reading. Of readers, which pin by
    /// locks, all pins of one layout in a handle count as one, and so do locks side by side.
    pub pins: u64,
    /// Pages of the longest free range.
    pub largest_free_pages: u64,
    /// Records that were replayed when this handle opened the pool.
    pub recovered_records: u64,
    /// Processes that have it open for writing.
    pub processes: Vec<u32>,
}

/// How much is free in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Pages that are free, those among them that are being zeroed.
    pub free_pages: u64,
    /// Pages of the longest free range.
    pub largest_free_pages: u64,
    /// Slots with nothing in them.
    pub free_slots: u64,
}

/// A file, or two, locked for writing. Unlocked when dropped, or when the process dies.
///
/// # Pages that change hands
/// What is stored to a page may reach the media before the record that gave the page to its file. That is no harm where a new page is
/// lost with the record. But a page that was *exchanged* is another file's again, or another part's of the same one, when a
/// power cut takes the record. So whoever exchanges pages says so ([`FileLock::exchange`]), and nobody stores to pages that a file
/// has before the last exchange is durable ([`FileLock::settle`]): of any number of exchanges only the last one before a store waits.
///
/// # Forgotten locks
/// One that is never dropped (`mem::forget`) keeps the file locked until its thread ends. The thread's list of held mutexes lies in the shared memory then,
/// which therefore stays mapped, with all else that belongs to the handle's open file, when the pool is closed.
pub struct FileLock<'a> {
    core: &'a Core,
    mutexes: [usize; 2],
    first: RobustGuard<'a>,
    second: Option<RobustGuard<'a>>,
    /// Never given up if this is never dropped: the mutexes stay mapped.
    _keeps_mapped: Arc<Core>,
}

impl FileLock<'_> {
    /// Says to those who wait that its holder goes on with something long: their [`OpenOptions::stall_timeout`] counts from here.
    pub fn note_progress(&self) {
        self.first.note_progress();
        self.second.iter().for_each(RobustGuard::note_progress);
    }

    /// Notes whether room behind the end of a file was asked for, which nobody gives back for being more than the file needs. For all processes,
    /// until the file is gone or none has the pool open.
    pub fn note_room(&self, inode: u64, was_asked_for: bool) {
        let segment = &self.core.segment;
        if inode < segment.slots() {
            let change = if was_asked_for { bitmap::set_shared } else { bitmap::clear_shared };
            change(segment.slot_set(SlotSet::WithRoom), inode);
        }
    }

    /// Whether room behind the end of a file was asked for.
    pub fn has_room(&self, inode: u64) -> bool {
        let segment = &self.core.segment;
        inode < segment.slots() && bitmap::is_set(segment.slot_set(SlotSet::WithRoom), inode)
    }
}

impl FileLock<'_> {
    /// Makes a change that gives pages of these files to each other, or puts them elsewhere in the same one.
    pub fn exchange<T>(&self, change: impl FnOnce() -> T) -> T {
        // Who comes after a death in between does not know whether it was made.
        self.note_exchanged(u64::MAX);
        let changed = change();
        self.note_exchanged(self.core.control().appends.metadata_lsn.load(Relaxed));
        changed
    }

    fn note_exchanged(&self, lsn: u64) {
        // Relaxed: the mutexes order it.
        for mutex in self.mutexes {
            self.core.control().exchanged_lsn[mutex].store(lsn, Relaxed);
        }
    }

    /// Makes sure that pages which these files have stay theirs: to be called before bytes are stored to them. Costs nothing unless pages
    /// were exchanged and nothing was synced since.
    ///
    /// # Errors
    /// [`PoolError::Failed`], [`PoolError::Media`], [`PoolError::Stalled`].
    #[inline]
    pub fn settle(&self) -> Result<()> {
        let control = self.core.control();
        let durable_lsn = control.appends.durable_lsn.load(Relaxed);
        let exchanged = self.mutexes.map(|mutex| control.exchanged_lsn[mutex].load(Relaxed));
        match exchanged[0].max(exchanged[1]) <= durable_lsn {
            true => Ok(()),
            false => self.make_exchange_durable(exchanged[0].max(exchanged[1])),
        }
    }

    #[cold]
    fn make_exchange_durable(&self, exchanged_lsn: u64) -> Result<()> {
        let core = self.core;
        if core.media.domain() != PersistenceDomain::Volatile
            && !mutant::is(core.mutant, Mutant::StoreUnsettled)
        {
            let lsn = exchanged_lsn.min(core.close_log()?);
            core.wait_durable(lsn)?;
            self.note_exchanged(lsn);
        }
        Ok(())
    }
}

/// Whether a lock lets others in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LockMode {
    /// Other readers.
    Shared,
    /// Nobody.
    Exclusive,
}

/// Who has an inode locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// The process, as its own namespace numbers it.
    pub pid: u32,
    /// Whether it lets others in.
    pub mode: LockMode,
    /// Whether it is writing a commit of the inode.
    pub is_committing: bool,
}

/// What a process notes of a lock in its slot: the number, shifted, and these.
const NOTE_BITS: u32 = 2;
const NOTE_EXCLUSIVE: u64 = 1;
const NOTE_COMMITTING: u64 = 2;

/// An inode, locked. Unlocked when dropped, or when the process dies.
pub struct InodeLock {
    core: Arc<Core>,
    number: u64,
    mode: LockMode,
    is_committing: AtomicBool,
}

impl std::fmt::Debug for InodeLock {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("InodeLock")
            .field("number", &self.number)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pool").field("core", &self.shared.core).finish_non_exhaustive()
    }
}

impl Pool {
    /// Makes a pool in a new file of `len_bytes`, all of it allocated, and opens it.
    ///
    /// # Errors
    /// [`PoolError::NotOpened`] if the file exists or there is no room, [`PoolError::Media`], [`PoolError::Parameter`].
    pub fn create(
        path: impl AsRef<Path>,
        len_bytes: u64,
        options: &CreateOptions,
        open: &OpenOptions,
    ) -> Result<Pool> {
        let file = media::CreateOptions::new().write_windows(open.write_windows);
        let file = open.domain.into_iter().fold(file, media::CreateOptions::domain);
        Self::create_with(path, len_bytes, options, &file, open, &mut |_, _| {})
    }

    /// As [`Pool::create`], with a say in how the file is made, or in a device. `progress` is told now and then how many
    /// bytes of how many are allocated and zeroed.
    ///
    /// A new file is at its path when the pool in it is whole, and not before: if the process is killed meanwhile, there
    /// is nothing. (Where the file system has no files without names, a file `.aquifer-….new` is left beside it.)
    ///
    /// # Errors
    /// As for [`Pool::create`]; [`PoolError::NotOpened`] also if somebody else uses what is to be overwritten.
    pub fn create_with(
        path: impl AsRef<Path>,
        len_bytes: u64,
        options: &CreateOptions,
        file: &media::CreateOptions,
        open: &OpenOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Pool> {
        // Before there is a file.
        options.layout(len_bytes)?;
        let mut prepared = file.prepare(path.as_ref(), len_bytes, progress)?;
        Self::make(prepared.media.clone(), options, open, || Ok(prepared.name()?))
    }

    /// Makes a pool on media that nobody has open, and opens it. What the media held is lost.
    ///
    /// # Errors
    /// As for [`Pool::create`]; [`PoolError::Busy`] if somebody has them open or makes a pool of them, [`PoolError::MediaInUse`] if that is
    /// through their own open file.
    pub fn create_on(
        media: Arc<dyn Media>,
        options: &CreateOptions,
        open: &OpenOptions,
    ) -> Result<Pool> {
        Self::make(media, options, open, || Ok(()))
    }

    fn make(
        media: Arc<dyn Media>,
        options: &CreateOptions,
        open: &OpenOptions,
        name: impl FnOnce() -> Result<()>,
    ) -> Result<Pool> {
        options.layout(media.len_bytes())?;
        let alone = lock_to_format(&*media, open)?;
        options.format_alone(&media)?;
        point::pass("create-formatted");
        name()?;
        point::pass("create-named");
        match open.read_only {
            true => drop(alone),
            // Nobody comes in between.
            false => alone.hand_over(),
        }
        Self::open_on(media, open)
    }

    /// Opens the pool in a file or device. Who opens it first recovers it.
    ///
    /// # Errors
    /// Anything that is wrong with it: [`PoolError::NotAPool`], [`PoolError::Damaged`], [`PoolError::Truncated`],
    /// [`PoolError::FutureVersion`], [`PoolError::ReadOnly`], [`PoolError::Busy`], [`PoolError::BusyElsewhere`].
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Pool> {
        Self::open_on(options.media().open(path.as_ref())?, options)
    }

    /// Opens the pool on media, which serve one open pool at a time: its locks are those of their open file. Domain and write
    /// windows are those of the media.
    ///
    /// # Errors
    /// As for [`Pool::open`]; [`PoolError::MediaInUse`] if a pool is open on these media, or on others of the same open file.
    pub fn open_on(media: Arc<dyn Media>, options: &OpenOptions) -> Result<Pool> {
        Self::start(recovery::open(media, options, None)?, options)
    }

    /// Leaves everything as the death of the process would, but for the locks, which stay those of the media: these can be opened again.
    /// In builds for the tests that record what happens to one medium. This is the only clone.
    #[cfg(feature = "mutants")]
    #[doc(hidden)]
    pub fn die(self) {
        assert_eq!(Arc::strong_count(&self.shared), 1, "another clone goes on");
        self.core().membership.give_up_claim();
        std::mem::forget(self);
    }

    /// Opens a pool for writing that this process may not open so by itself: its broker hands out what is needed to who has the
    /// key. Closing it is as for any other; the broker may be gone by then.
    ///
    /// The broker must belong to the pool's owner, or to root: nobody else is told the key.
    ///
    /// # Errors
    /// [`PoolError::Access`]; those of [`Pool::open`].
    pub fn open_granted(
        path: impl AsRef<Path>,
        key: &AccessKey,
        options: &OpenOptions,
    ) -> Result<Pool> {
        let metadata = std::fs::metadata(path.as_ref());
        let metadata = metadata.map_err(|source| media::OpenError::of(path.as_ref(), source))?;
        Self::ask_for_access(path.as_ref(), &metadata, None, key, options)
    }

    /// The same pool once more, for writing: for a process that has opened it for reading, and may open it no other way. This handle
    /// goes on reading.
    ///
    /// # Errors
    /// As for [`Pool::open_granted`].
    pub fn grant_access(&self, key: &AccessKey, options: &OpenOptions) -> Result<Pool> {
        let media = self.media();
        let metadata = (media.file().try_clone_to_owned().map(File::from))
            .and_then(|file| file.metadata())
            .map_err(|source| media::OpenError::of(media.path(), source))?;
        Self::ask_for_access(media.path(), &metadata, Some(self.uuid()), key, options)
    }

    fn ask_for_access(
        path: &Path,
        metadata: &Metadata,
        uuid: Option<Uuid>,
        key: &AccessKey,
        options: &OpenOptions,
    ) -> Result<Pool> {
        let options = OpenOptions { read_only: false, exclusive: false, ..options.clone() };
        let Granted { file, shared } = broker::ask(path, metadata, uuid, key, &options)?;
        let media = options.media().open_file(file.into(), path)?;
        Self::start(recovery::open(media, &options, Some(shared))?, &options)
    }

    fn start(opened: Opened, options: &OpenOptions) -> Result<Pool> {
        let has_workers = opened.core.is_writable && options.background;
        let checkpointer = has_workers.then(|| Worker::checkpointer(&opened.core)).flatten();
        let zeroer = (has_workers && options.zero_bytes_per_second > 0)
            .then(|| Worker::zeroer(&opened.core, options))
            .flatten();
        let heartbeat = has_workers.then(|| Worker::heartbeat(&opened.core)).flatten();
        Ok(Pool {
            shared: Arc::new(Shared {
                core: opened.core,
                overlay: opened.overlay,
                recovered_records: opened.recovered_records,
                checkpointer,
                zeroer,
                heartbeat,
            }),
        })
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.shared.core
    }

    /// The media.
    pub fn media(&self) -> &Arc<dyn Media> {
        &self.core().media
    }

    /// Where the parts lie.
    pub fn layout(&self) -> Layout {
        self.core().layout
    }

    /// Names the pool.
    pub fn uuid(&self) -> Uuid {
        self.core().uuid
    }

    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.core().is_writable
    }

    /// What the pool is and how full it is, now.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn info(&self) -> Result<PoolInfo> {
        let core = self.core();
        let control = core.control();
        let census = core.census()?;
        let Room { free_pages, largest_free_pages, .. } = self.room()?;
        let zeroed = Space::of(core);
        let (freed, held) = freed::waiting(control);
        let count = |runs: &mut dyn Iterator<Item = Run>| runs.map(|run| run.pages).sum::<u64>();
        let pins = match core.is_writable {
            true => {
                let _locked = core.lock()?;
                core.pins.count(&core.membership)
            }
            false => 0,
        };
        Ok(PoolInfo {
            path: core.media.path().to_path_buf(),
            uuid: core.uuid,
            created_ns: core.created_ns,
            domain: core.media.domain(),
            layout: core.layout,
            generation: control.generation.load(Relaxed),
            tail_lsn: control.tail_lsn.load(Relaxed),
            applied_lsn: at_place(&control.applied_lsn),
            durable_lsn: control.appends.durable_lsn.load(Relaxed),
            objects: census.objects,
            files: census.files,
            directories: census.directories,
            symbolic_links: census.links,
            parts: census.parts,
            damaged_inodes: census.damaged,
            free_slots: census.free,
            free_pages,
            largest_free_pages,
            zeroed_pages: count(&mut zeroed.all(Wanted::Zeroed)),
            freed_pages: count(&mut { freed }),
            held_pages: count(&mut { held }),
            pins,
            recovered_records: self.shared.recovered_records,
            processes: (0..crate::segment::PROCESSES)
                .filter(|&index| control.processes[index].pid.load(Relaxed) != 0)
                .filter(|&index| core.membership.is_alive(index))
                .map(|index| core.membership.pid_of(control, index))
                .collect(),
        })
    }

    /// How much is free, now: [`Pool::info`] knows more, and looks at all of the metadata.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn room(&self) -> Result<Room> {
        let core = self.core();
        let free_pages = match core.is_writable {
            // As of one moment: what is being zeroed is taken and given back.
            true => alloc::free_count(core.lock()?.control()),
            false => alloc::free_count(core.control()),
        };
        let occupied = core.segment.slot_set(SlotSet::Occupied).iter();
        let occupied: u32 = occupied.map(|word| word.load(Relaxed).count_ones()).sum();
        Ok(Room {
            free_pages,
            largest_free_pages: core.largest_free_pages(),
            free_slots: core.segment.slots() - u64::from(occupied),
        })
    }

    /// The inode with this number; a free one if there is none.
    ///
    /// # Errors
    /// [`PoolError::Damaged`].
    pub fn inode(&self, number: u64) -> Result<Inode> {
        self.core().inode(number)
    }

    /// The inode of the object of a name; `None` if there is none, or it is damaged. It takes as many looks as the number of objects has
    /// bits.
    ///
    /// # Errors
    /// [`PoolError::Stalled`], [`PoolError::Forked`].
    pub fn object_named(&self, name: &[u8]) -> Result<Option<Inode>> {
        self.core().object_named(name)
    }

    /// The inodes of all objects. Damaged ones are left out: [`Pool::info`] counts them.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn inodes(&self) -> Result<Vec<Inode>> {
        self.core().inodes()
    }

    /// Takes `pages` contiguous pages, the first a multiple of `align_pages`, to be written to. They hold whatever they
    /// held.
    ///
    /// # Errors
    /// [`PoolError::Full`]; those of [`Pool::transact`].
    pub fn reserve(&self, pages: u64, align_pages: u64) -> Result<Reservation<'_>> {
        self.take_pages(|core| core.reserve_pages(pages, align_pages, false))
    }

    /// Takes pages as [`Pool::reserve`] does, and makes sure that they are zero. That is for free as long as there are pages
    /// that are known to be ([`PoolInfo::zeroed_pages`]).
    ///
    /// # Errors
    /// [`PoolError::Full`], [`PoolError::Media`]; those of [`Pool::transact`].
    pub fn reserve_zeroed(&self, pages: u64, align_pages: u64) -> Result<Reservation<'_>> {
        let reservation = self.take_pages(|core| core.reserve_pages(pages, align_pages, true))?;
        self.zero_rest(&reservation)?;
        Ok(reservation)
    }

    /// Takes the `pages` pages from `start_page` on, zeroed as by [`Pool::reserve_zeroed`]; `None` if not all of
    /// them are free.
    ///
    /// # Errors
    /// [`PoolError::Media`]; those of [`Pool::transact`].
    pub fn reserve_zeroed_at(
        &self,
        start_page: u64,
        pages: u64,
    ) -> Result<Option<Reservation<'_>>> {
        let core = self.core();
        core.check_writable()?;
        let Some(reservation) = core.reserve_exactly(Run { start_page, pages })? else {
            return Ok(None);
        };
        core.use_fresh_pages(reservation.whole().end_page())?;
        self.zero_rest(&reservation)?;
        Ok(Some(reservation))
    }

    /// Takes contiguous pages, at most `pages` of them and at least one: from `near_page` on if that is free, so that a file grows
    /// in place; else as many as there are in one piece, from a multiple of 2 MiB on if these are as much. They are zero if they
    /// must be, and then those are taken first that are so already; otherwise they hold whatever they held. They can be written to before anything names them.
    ///
    /// # Errors
    /// As for [`Pool::reserve_zeroed`]; [`PoolError::Full`] says that not one page is free.
    pub fn reserve_some(
        &self,
        pages: u64,
        near_page: Option<u64>,
        must_be_zero: bool,
    ) -> Result<Reservation<'_>> {
        let reservation =
            self.take_pages(|core| core.reserve_some(pages, near_page, must_be_zero))?;
        if must_be_zero {
            self.zero_rest(&reservation)?;
        }
        Ok(reservation)
    }

    /// Takes pages that are zero already, in one run and at most `pages` of them; `None` if there is no run that is long enough
    /// for so many. Nothing is written.
    ///
    /// # Errors
    /// Those of [`Pool::transact`].
    pub fn reserve_ready(&self, pages: u64) -> Result<Option<Reservation<'_>>> {
        let core = self.core();
        core.check_writable()?;
        let Some(reservation) = core.reserve_ready(pages)? else {
            core.zero_soon();
            return Ok(None);
        };
        core.use_fresh_pages(reservation.whole().end_page())?;
        Ok(Some(reservation))
    }

    /// Waits for the turn to wait for the reservations of others: for a call that needs so many at once that it did not get them. It gives up
    /// what it has reserved before it calls this.
    ///
    /// # Errors
    /// [`PoolError::ReadOnly`], [`PoolError::Failed`].
    pub fn take_turn(&self) -> Result<Turn<'_>> {
        self.core().take_turn()
    }

    fn take_pages<'a>(
        &'a self,
        reserve: impl Fn(&'a Core) -> Result<Reservation<'a>>,
    ) -> Result<Reservation<'a>> {
        let core = self.core();
        core.check_writable()?;
        let reservation = match reserve(core) {
            // Freed pages may only be waiting for the tail, and free ones may just be zeroed.
            Err(PoolError::Full { .. }) => {
                core.checkpoint()?;
                core.without_zeroing(|| reserve(core))
            }
            outcome => outcome,
        }?;
        core.use_fresh_pages(reservation.whole().end_page())?;
        Ok(reservation)
    }

    /// Zeroes what is not known to be zero.
    fn zero_rest(&self, reservation: &Reservation<'_>) -> Result<()> {
        let core = self.core();
        if !reservation.unzeroed.is_empty() {
            // What was to be there already.
            core.zero_soon();
        }
        reservation.unzeroed.iter().try_for_each(|run| core.zero(run.bytes()))
    }

    /// Zeroes free pages that are not known to be zero, at most `pages`, and returns how many. So do threads in the background, and
    /// other processes: if one is at it, this returns early.
    ///
    /// # Errors
    /// [`PoolError::Media`], [`PoolError::Stalled`].
    pub fn zero_free_pages(&self, pages: u64) -> Result<u64> {
        let mut zeroed = 0;
        while zeroed < pages {
            match self.core().zero_some(pages - zeroed)? {
                0 => break,
                more => zeroed += more,
            }
        }
        Ok(zeroed)
    }

    /// Changes metadata atomically; durable on return. Inodes that `change` puts name the pages of `reservations`.
    /// `change` may be run several times.
    ///
    /// # Errors
    /// Those of `change`, and then nothing has happened; [`PoolError::Failed`], and then the outcome is old or new.
    ///
    /// # Safety
    /// A transaction can give the pages of any inode to another, and make an immutable file changeable. The layers above the pool promise more than the
    /// pool checks: that the bytes of a leased file and of an attached object change only as these layers say. The caller changes only
    /// what its own layer manages, and by the rules of that layer.
    pub unsafe fn transact<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T>,
    ) -> Result<T> {
        self.core().transact(reservations, change)
    }

    /// Changes metadata atomically, as [`Pool::transact`] does, and returns when all processes see it; the death of any of
    /// them, or of all, does not undo it. A power cut may, until [`Pool::sync`]. Then it undoes what was changed later as
    /// well: what is there after it is as of some moment.
    ///
    /// What the reservations hold, and what the change exposes, was written before. While a page is taken that was never used before, it
    /// may wait for the media.
    ///
    /// # Errors
    /// Those of `change`, and then nothing has happened; [`PoolError::Stalled`], the same; [`PoolError::Media`] if the log
    /// cannot be written: then the outcome is old or new, and the pool is read-only.
    ///
    /// # Safety
    /// As for [`Pool::transact`].
    pub unsafe fn change<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T>,
    ) -> Result<T> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.try_change(reservations, change) }
    }

    /// [`Pool::change`] with errors of the caller's own.
    ///
    /// # Errors
    /// As for [`Pool::change`].
    ///
    /// # Safety
    /// As for [`Pool::transact`].
    pub unsafe fn try_change<'a, T, E: From<PoolError>>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        let value = self.core().change(reservations, change)?;
        if self.core().log_use_percent() >= CHECKPOINT_AT_PERCENT {
            self.checkpoint_soon();
        }
        Ok(value)
    }

    /// Copies bytes of the data out, without a system call where the media are mapped. What others change meanwhile may come
    /// out torn.
    ///
    /// # Errors
    /// [`PoolError::Media`].
    pub fn load(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        self.core().load(offset_bytes, bytes)
    }

    /// Copies bytes to the data, without a system call where the media are memory: visible to all at once, durable after [`Pool::make_durable`].
    ///
    /// # Errors
    /// [`PoolError::Media`].
    ///
    /// # Safety
    /// As for [`Media::write_at`]: the caller ensures that no reference to the bytes forbids the change, such as a lease of an immutable
    /// file or a typed value of an attached object. A layer may store to the pages of inodes that it manages, by its own rules, and
    /// to pages that it has reserved.
    pub unsafe fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.core().store(offset_bytes, bytes) }
    }

    /// Shows bytes of the data to a closure: in place where the media are mapped, else a copy, in memory that the call allocates. Others may change them meanwhile. If a
    /// byte cannot be had that it looks at, its result is dropped.
    ///
    /// # Errors
    /// [`PoolError::Media`]; [`PoolError::Forked`].
    pub fn look_at<T>(&self, range: ByteRange, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        self.core().look_at(range, look)
    }

    /// Has the CPU fetch the beginning of a range of the data, which will be looked at soon.
    #[inline]
    pub fn prefetch(&self, range: ByteRange) {
        if let Some(mapping) = self.core().media.mapping() {
            mapping.prefetch(range.offset_bytes, range.len_bytes as usize);
        }
    }

    /// Why bytes in these ranges could not be looked at in another way than [`Pool::look_at`].
    pub fn unreadable(&self, ranges: impl IntoIterator<Item = ByteRange>) -> PoolError {
        self.core().unreadable(ranges)
    }

    /// An error in a fork of the process that opened the pool.
    ///
    /// # Errors
    /// [`PoolError::Forked`].
    pub fn check_process(&self) -> Result<()> {
        self.core().check_process()
    }

    /// Bytes of the data in place, for who has them pinned; `None` where the media are not mapped. Where a byte cannot be had any
    /// more, looking at it raises `SIGBUS`, as with mmap.
    #[inline]
    pub fn bytes(&self, range: ByteRange) -> Option<Bytes<'_>> {
        self.core().bytes(range)
    }

    /// Where bytes of the data can be stored to; `None` where they can only be written. With write windows by protection keys, a thread
    /// can store there while it has one ([`Media::write_window`](crate::media::Media::write_window)), and can load there no more than that.
    pub fn place_to_store(&self, range: ByteRange) -> Option<*mut u8> {
        self.core().place_to_store(range)
    }

    /// Makes everything durable that was changed before, by any process.
    ///
    /// # Errors
    /// [`PoolError::Failed`], [`PoolError::Media`], [`PoolError::Stalled`].
    pub fn sync(&self) -> Result<()> {
        let core = self.core();
        core.check_writable()?;
        let head_lsn = core.close_log()?;
        core.wait_durable(head_lsn)
    }

    /// Makes the data durable that was written before, by any process: not the metadata ([`Pool::sync`]).
    ///
    /// # Errors
    /// [`PoolError::Media`]; the pool is read-only from then on.
    pub fn sync_data(&self) -> Result<()> {
        self.core().make_durable(&[self.layout().data()])
    }

    /// Locks a file for writing, against all other writers; waits.
    ///
    /// # Errors
    /// [`PoolError::Stalled`] if somebody has it and does nothing for longer than [`OpenOptions::stall_timeout`];
    /// [`PoolError::ReadOnly`], [`PoolError::Failed`].
    pub fn lock_file(&self, inode: u64) -> Result<FileLock<'_>> {
        self.core().check_writable()?;
        let core = self.core();
        Ok(FileLock {
            core,
            mutexes: [file_mutex(inode); 2],
            first: core.lock_file(inode)?,
            second: None,
            _keeps_mapped: core.clone(),
        })
    }

    /// [`Pool::lock_file`] of two files.
    ///
    /// # Errors
    /// As for [`Pool::lock_file`].
    pub fn lock_two_files(&self, one: u64, other: u64) -> Result<FileLock<'_>> {
        self.core().check_writable()?;
        // In the order of the mutexes, as everybody does.
        let (first, second) = match file_mutex(one) <= file_mutex(other) {
            true => (one, other),
            false => (other, one),
        };
        let is_same = file_mutex(one) == file_mutex(other);
        let core = self.core();
        Ok(FileLock {
            core,
            mutexes: [one, other].map(file_mutex),
            first: core.lock_file(first)?,
            // Those that wait for the first one wait for the holder of the second.
            second: (!is_same)
                .then(|| core.while_media_work(heartbeat::Held::Files, || core.lock_file(second)))
                .transpose()?,
            _keeps_mapped: core.clone(),
        })
    }

    /// What a reader of a file asks each time, without a lock; `None` if it is being changed right now, or is no file's, or this process
    /// is a fork.
    #[inline]
    pub fn file_state(&self, number: u64) -> Option<FileState> {
        self.core().process.is_current().then(|| self.core().file_state(number))?
    }

    /// Whether a file has this incarnation and layout version, after everything that the caller has loaded before. If that is what the
    /// caller has read before that, the pages were the file's all the time.
    ///
    /// # Errors
    /// [`PoolError::Stalled`], [`PoolError::Forked`].
    #[inline]
    pub fn has_layout(&self, number: u64, incarnation: u64, layout_version: u64) -> Result<bool> {
        self.core().has_layout(number, incarnation, layout_version)
    }

    /// Raised by each change of the metadata, by any process, and odd during it. If it is even and the same before and after, nothing was
    /// changed in between.
    #[inline]
    pub fn metadata_version(&self) -> u64 {
        self.core().metadata_version()
    }

    /// Raised by each change of names, by any process. Where a path led when this was the same, it leads now, and what is looked at
    /// after it was asked is at least as new.
    #[inline]
    pub fn names_version(&self) -> u64 {
        self.core().names_version()
    }

    /// Inodes of files that have no name: somebody has them open, or had them when it died.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn orphans(&self) -> Result<Vec<u64>> {
        self.core().consistent(|image| image.orphans().collect())
    }

    /// Looks at the metadata as of one moment; `look` may be run several times.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn look<T>(&self, look: impl FnMut(&MetadataView<'_>) -> T) -> Result<T> {
        self.core().consistent(look)
    }

    /// The most bytes of pages that one commit may carry.
    pub fn max_commit_bytes(&self) -> u64 {
        self.core().max_commit_bytes()
    }

    /// Captures a commit: `fill` copies the whole pages, in order, into the memory it is given. All content
    /// becomes durable together when [`Commit::finish`] returns. The pool stays open until then.
    ///
    /// A commit has its place in the log from now on, and everything behind it, of all processes, becomes durable after it:
    /// until it is finished or dropped, other commits, transactions and checkpoints wait. If that takes longer than their
    /// [`OpenOptions::stall_timeout`], they fail with [`PoolError::Stalled`], which names this process. When the
    /// process dies, they go on at once.
    ///
    /// # Errors
    /// [`PoolError::TooLargeForLog`]; [`PoolError::Failed`] and [`PoolError::Media`] from a checkpoint that makes room.
    ///
    /// # Safety
    /// The commit replaces the bytes of its ranges, in this process and others. The caller holds the write lock of each inode
    /// ([`Pool::lock_inode`]) until the commit is finished, or ensures otherwise that no reference covers the ranges: see [`Media::write_at`].
    pub unsafe fn capture(
        &self,
        content: &CommitContent<'_>,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Commit> {
        let mut commit = self.core().capture(content, fill)?;
        commit.pool = Some(self.clone());
        if self.core().log_use_percent() >= CHECKPOINT_AT_PERCENT {
            self.checkpoint_soon();
        }
        Ok(commit)
    }

    /// Makes ranges durable that were written through [`Pool::media`].
    ///
    /// # Errors
    /// [`PoolError::Media`]; the pool is read-only from then on.
    pub fn make_durable(&self, ranges: &[ByteRange]) -> Result<()> {
        self.core().make_durable(ranges)
    }

    /// Up to where the log is durable.
    pub fn durable_lsn(&self) -> u64 {
        self.core().control().appends.durable_lsn.load(Relaxed)
    }

    /// Up to where the log may be written over: everything before it is durable at its place.
    pub fn tail_lsn(&self) -> u64 {
        self.core().control().tail_lsn.load(Relaxed)
    }

    /// Up to where commits are copied to their place.
    pub fn applied_lsn(&self) -> u64 {
        at_place(&self.core().control().applied_lsn)
    }

    /// Copies everything committed before `lsn`, or as much of it as is durable, to its place.
    ///
    /// # Errors
    /// [`PoolError::Media`]; the pool is read-only from then on.
    pub fn apply_through(&self, lsn: u64) -> Result<()> {
        self.core().check_writable()?;
        self.core().apply_through(lsn.min(self.durable_lsn()))
    }

    /// Makes the media, at its place, what the log says it is by now: pages of `range` that a reader must see instead
    /// of those on media, because they cannot be copied there from here, with their offsets.
    ///
    /// Nobody commits to `range` meanwhile: the caller holds the lock of its inode. What a process that died was
    /// committing to it is decided here: from now on it is there or it is not, and a reader that cannot decide keeps
    /// seeing what was there before.
    ///
    /// # Errors
    /// [`PoolError::Media`], [`PoolError::Damaged`], [`PoolError::Stalled`].
    pub fn bring_up_to_date(&self, range: ByteRange) -> Result<Vec<(u64, Vec<u8>)>> {
        let core = self.core();
        if core.is_writable && core.check_not_failed().is_ok() {
            let head_lsn = core.close_log()?;
            core.wait_durable(head_lsn)?;
            core.apply_through(head_lsn)?;
            return Ok(Vec::new());
        }
        core.committed_for_reader(range, self.overlay(), |seen| {
            (seen.within(range))
                .map(|(offset, content)| {
                    let mut page = vec![0; PAGE_BYTES as usize];
                    content.read(&*core.media, offset, &mut page)?;
                    Ok((offset, page))
                })
                .collect()
        })
    }

    /// Ranges of the media for which the log has newer content, by now.
    ///
    /// # Errors
    /// [`PoolError::Media`], [`PoolError::Damaged`].
    pub fn unapplied(&self) -> Result<Vec<ByteRange>> {
        let core = self.core();
        let nothing = ByteRange { offset_bytes: 0, len_bytes: 0 };
        core.committed_for_reader(nothing, self.overlay(), |seen| Ok(seen.committed.ranges()))
    }

    /// What a reader that shares nothing with the writers found in the log when it opened the pool.
    fn overlay(&self) -> Option<&Committed> {
        let is_snapshot = !self.core().is_writable && self.core().segment_id.is_nil();
        is_snapshot.then_some(&self.shared.overlay)
    }

    /// Brings the media up to date with the log: log space and freed pages can be used again.
    ///
    /// # Errors
    /// [`PoolError::Media`]; the pool is read-only from then on.
    pub fn checkpoint(&self) -> Result<()> {
        self.core().checkpoint()
    }

    /// Has the checkpoint made in the background, as far as this handle does such work.
    pub fn checkpoint_soon(&self) {
        if let Some(checkpointer) = &self.shared.checkpointer {
            checkpointer.ring();
        }
    }

    /// Locks an inode, for as long as the result lives; does not wait.
    ///
    /// # Errors
    /// [`PoolError::Locked`] if the lock is held in a way that stands against it; [`PoolError::AlreadyLocked`] if this
    /// handle has a lock on it.
    pub fn lock_inode(&self, number: u64, mode: LockMode) -> Result<InodeLock> {
        self.core().lock_inode(number, mode)
    }

    /// Who has an inode locked, as far as it is known: readers that opened the pool for reading are not, nor is a process
    /// that holds very many. [`Pool::is_locked_elsewhere`] knows of all.
    pub fn holders(&self, number: u64) -> Vec<Holder> {
        self.core().holders(number)
    }

    /// Whether another handle or process has the inode locked.
    pub fn is_locked_elsewhere(&self, number: u64, mode: LockMode) -> bool {
        self.core().membership.is_locked_by_other(Byte::Inode(number), mode.kind())
    }
}

impl LockMode {
    pub(crate) fn kind(self) -> LockKind {
        match self {
            LockMode::Shared => LockKind::Shared,
            LockMode::Exclusive => LockKind::Exclusive,
        }
    }

    pub(crate) fn of(kind: LockKind) -> LockMode {
        match kind {
            LockKind::Shared => LockMode::Shared,
            LockKind::Exclusive => LockMode::Exclusive,
        }
    }
}

impl Core {
    fn lock_inode(&self, number: u64, mode: LockMode) -> Result<InodeLock> {
        if !self.process.is_current() {
            return Err(PoolError::Forked);
        }
        // Locks of one open file do not stand against each other, so this handle's own are remembered.
        let mut held = self.held.lock().unwrap_or_else(|broken| broken.into_inner());
        if held.contains(&number) {
            return Err(PoolError::AlreadyLocked { number });
        }
        let is_free =
            self.membership.try_lock(Byte::Inode(number), mode.kind()).map_err(|source| {
                PoolError::Open {
                    path: self.media.path().to_path_buf(),
                    reason: format!("inode {number} cannot be locked"),
                    source: Some(source),
                }
            })?;
        if !is_free {
            let holder = self.holders(number).first().map(|holder| holder.pid);
            return Err(PoolError::Locked { number, holder });
        }
        held.insert(number);
        let lock =
            InodeLock { core: self.share(), number, mode, is_committing: AtomicBool::new(false) };
        self.note_lock(0, lock.note(false));
        Ok(lock)
    }

    /// Replaces a note of this process's slot. A reader without a slot leaves none.
    fn note_lock(&self, from: u64, to: u64) {
        if self.is_writable {
            let notes = &self.control().processes[self.membership.index()].locked;
            let _ = notes.iter().find(|n| n.compare_exchange(from, to, Relaxed, Relaxed).is_ok());
        }
    }

    fn holders(&self, number: u64) -> Vec<Holder> {
        let control = self.control();
        let mut holders = Vec::new();
        for (index, process) in control.processes.iter().enumerate() {
            for note in process.locked.iter().map(|note| note.load(Relaxed)) {
                if note >> NOTE_BITS == number && note != 0 && self.membership.is_alive(index) {
                    holders.push(Holder {
                        pid: self.membership.pid_of(control, index),
                        mode: match note & NOTE_EXCLUSIVE != 0 {
                            true => LockMode::Exclusive,
                            false => LockMode::Shared,
                        },
                        is_committing: note & NOTE_COMMITTING != 0,
                    });
                }
            }
        }
        holders
    }
}

impl InodeLock {
    /// The inode.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether it lets others in.
    pub fn mode(&self) -> LockMode {
        self.mode
    }

    /// Says to all who ask for [`Pool::holders`] whether a commit of the inode is being written. Calls do not overlap.
    pub fn set_committing(&self, is_committing: bool) {
        let before = self.is_committing.swap(is_committing, Relaxed);
        if before != is_committing && self.core.process.is_current() {
            self.core.note_lock(self.note(before), self.note(is_committing));
        }
    }

    fn note(&self, is_committing: bool) -> u64 {
        let exclusive = if self.mode == LockMode::Exclusive { NOTE_EXCLUSIVE } else { 0 };
        let committing = if is_committing { NOTE_COMMITTING } else { 0 };
        self.number << NOTE_BITS | exclusive | committing
    }
}

impl Drop for InodeLock {
    fn drop(&mut self) {
        // In a fork the lock is the parent's.
        if !self.core.process.is_current() {
            return;
        }
        let mut held = self.core.held.lock().unwrap_or_else(|broken| broken.into_inner());
        self.core.note_lock(self.note(self.is_committing.load(Relaxed)), 0);
        self.core.membership.unlock(Byte::Inode(self.number));
        held.remove(&self.number);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let core = &self.core;
        let workers = [self.zeroer.take(), self.checkpointer.take()];
        let heartbeat = self.heartbeat.take();
        if !core.process.is_current() {
            // The threads are the parent's. Detaching them here would detach one of the child's own, if it has the
            // same stack.
            std::mem::forget((workers, heartbeat));
            return;
        }
        workers.into_iter().flatten().for_each(Worker::stop);
        core.close();
        // Closing waits for the media as well.
        heartbeat.into_iter().for_each(Worker::stop);
    }
}

impl Core {
    /// Leaves the pool; the last one that writes brings the media up to date, and removes the segment if no reader uses it. What fails
    /// here is made up for by the next one that opens it, unless the machine is started anew before.
    ///
    /// Readers can hold locks that keep a writer from knowing that it is the last: then the segment stays, and the media are brought up to
    /// date all the same, which needs no lock of the file.
    fn close(&self) {
        let timeout = self.stall_timeout;
        let recovery = || self.membership.lock(Byte::Recovery, LockKind::Exclusive, timeout);
        if self.is_writable
            && let Err(error) = self.media.check_kept()
        {
            // A process that has opened the pool later than another program was told of it cannot know.
            self.fail(FailureKind::Data, &error.source);
            self.note_loss();
        }
        if self.is_writable {
            let knows_others = recovery().unwrap_or(false);
            let is_last = knows_others
                && self.membership.try_lock(Byte::Openers, LockKind::Exclusive).unwrap_or(false);
            if is_last {
                point::pass("close-last");
                let closed = self.checkpoint().and_then(|()| {
                    point::pass("close-checkpoint");
                    self.write_closed_superblock()
                });
                point::pass("close-superblock");
                // To the next process that opens the pool the superblock says that there is no segment, or that bytes are lost, or else the
                // segment that it names says whether they are.
                if closed.is_ok() || (self.check_not_failed().is_err() && self.note_loss()) {
                    self.places.remove(self.segment_id);
                }
                point::pass("close-removed");
            } else if !knows_others || !self.membership.has_writers() {
                // Readers stay, and write nothing when they close: what is not durable now would be lost when the machine is restarted.
                // Without the lock, writers that are there may be closing as well, and each may count on the other.
                let _ = self.checkpoint();
            }
        }
        self.pins.leave();
        self.membership.leave();
    }
}
