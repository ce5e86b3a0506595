//! An open pool.

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
    /// Treats the media as this domain, whatever they are: for tests.
    pub domain: Option<PersistenceDomain>,
    /// Protects the media against stray stores of this process, if it opens them for writing.
    pub write_windows: WriteWindows,
    /// The socket of the pool's [broker](crate::broker); by default beside the pool. See
    /// [`Pool::open_granted`].
    pub broker_socket: Option<PathBuf>,
    /// How long to wait for a process that holds a lock, or has begun a commit, and makes no
    /// progress (it was stopped, or hangs). Then the call fails with [`PoolError::Stalled`], which
    /// names that process.
    pub stall_timeout: Duration,
    /// Permissions of the shared memory. A process that opens the pool for writing needs to read
    /// and write it, one that opens it for reading while a writer has it open needs to read it.
    pub segment_mode: u32,
    /// The directory in which the first process creates the shared memory; `/dev/shm` by default.
    /// Processes that join search it, `/dev/shm` and the pool's own directory. So containers that
    /// share the pool's directory and not `/dev/shm` find each other without further configuration
    /// if the first process has named the pool's directory.
    ///
    /// The directory should be in memory, or on a disk with a file system that reserves the blocks
    /// it allocates (ext4, XFS; not NFS). There the kernel writes shared memory back as it does
    /// every file, which costs some writes a minute and preserves nothing: after a restart of the
    /// machine the leftover files are removed.
    ///
    /// After all processes were killed, the next one should name the directory as well, unless it
    /// is one of the two that are always searched: a process that does not find the shared memory
    /// cannot know that no bytes were lost, and then changes that were not durable are lost.
    pub segment_directory: Option<PathBuf>,
    /// How many bytes of free pages are zeroed per second in the background; 0 turns this off. An
    /// allocation that needs zeros and finds none zeroes pages itself.
    pub zero_bytes_per_second: u64,
    /// How many bytes of free pages to keep zeroed in the background. Pages that were never used
    /// count.
    pub zeroed_bytes: u64,
    /// Treats this as the life that the media are in: for tests of power cuts.
    #[doc(hidden)]
    pub boot: Option<u64>,
    /// Makes a deliberate mistake, in builds for the tests that must detect it.
    #[doc(hidden)]
    pub mutant: Option<Mutant>,
    /// Runs checkpoints and zeroing in the background. Without it, checkpoints run when the log is
    /// full.
    #[doc(hidden)]
    pub background: bool,
    /// Opens a pool for writing even if its link counts are wrong, to recount them.
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
    /// The corresponding options for the media.
    pub(crate) fn media(&self) -> media::OpenOptions {
        let options =
            media::OpenOptions::new().writable(!self.read_only).write_windows(self.write_windows);
        self.domain.into_iter().fold(options, media::OpenOptions::domain)
    }
}

/// The use of the log at which a checkpoint begins in the background.
const CHECKPOINT_AT_PERCENT: u64 = 50;

/// An open pool. Cheap to clone; closed when the last clone is dropped. Threads may share it
/// freely, and processes may share the file.
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

/// The parameters and the usage of a pool.
#[derive(Debug, Clone)]
pub struct PoolInfo {
    /// The file.
    pub path: PathBuf,
    /// The pool's uuid.
    pub uuid: Uuid,
    /// The creation time, in nanoseconds since 1970.
    pub created_ns: u64,
    /// The persistence domain of its media.
    pub domain: PersistenceDomain,
    /// The positions of its parts.
    pub layout: Layout,
    /// The generation of the log.
    pub generation: u64,
    /// The position of the first record that recovery would replay.
    pub tail_lsn: u64,
    /// Records before this position are copied to their place.
    pub applied_lsn: u64,
    /// The log is durable up to this position.
    pub durable_lsn: u64,
    /// Persistent objects.
    pub objects: u64,
    /// Regular files.
    pub files: u64,
    /// Directories, including the root.
    pub directories: u64,
    /// Symbolic links.
    pub symbolic_links: u64,
    /// Slots that belong to one of these, for what does not fit into its own slot: names, runs,
    /// attributes.
    pub parts: u64,
    /// Slots that are damaged.
    pub damaged_inodes: u64,
    /// Empty slots.
    pub free_slots: u64,
    /// Free pages.
    pub free_pages: u64,
    /// Those of the free pages that are known to be zero.
    pub zeroed_pages: u64,
    /// Freed pages that become free at the next checkpoint, unless they are pinned.
    pub freed_pages: u64,
    /// Freed pages that become free once they are no longer pinned.
    pub held_pages: u64,
    /// Pins of all live processes together; 0 if this handle opened the pool for reading. Readers
    /// pin by locks: all pins of one layout in a handle count as one, and so do adjacent locks.
    pub pins: u64,
    /// Pages of the longest free range.
    pub largest_free_pages: u64,
    /// Records that were replayed when this handle opened the pool.
    pub recovered_records: u64,
    /// Processes that have the pool open for writing.
    pub processes: Vec<u32>,
}

/// The free space of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Free pages, including those that are being zeroed.
    pub free_pages: u64,
    /// Pages of the longest free range.
    pub largest_free_pages: u64,
    /// Empty slots.
    pub free_slots: u64,
}

/// One or two files, locked for writing. Unlocked when dropped, or when the process dies.
///
/// # Pages that change owners
/// Bytes stored to a page may reach the media before the record that gave the page to its file.
/// That is harmless if a power cut loses a new page together with its record. But if the record of
/// an *exchange* is lost, the page belongs to another file again, or to another part of the same
/// one. So a caller that exchanges pages declares it ([`FileLock::exchange`]), and no thread may
/// store to pages of a file before the last exchange is durable ([`FileLock::settle`]): of any
/// number of exchanges only the last one before a store causes a wait.
///
/// # Forgotten locks
/// A lock that is never dropped (`mem::forget`) keeps the file locked until its thread ends. The
/// thread's list of held mutexes then lies in the shared memory, which therefore stays mapped when
/// the pool is closed, with everything else that belongs to the handle's open file description.
pub struct FileLock<'a> {
    core: &'a Core,
    mutexes: [usize; 2],
    first: RobustGuard<'a>,
    second: Option<RobustGuard<'a>>,
    /// Keeps the mutexes mapped even if this is never dropped.
    _keeps_mapped: Arc<Core>,
}

impl FileLock<'_> {
    /// Reports progress of a long operation to the waiters: their [`OpenOptions::stall_timeout`]
    /// restarts.
    pub fn note_progress(&self) {
        self.first.note_progress();
        self.second.iter().for_each(RobustGuard::note_progress);
    }

    /// Notes whether the application has requested room beyond the end of a file; such room is not
    /// released as surplus. Visible to all processes, until the file is deleted or no process has
    /// the pool open.
    pub fn note_room(&self, inode: u64, was_asked_for: bool) {
        let segment = &self.core.segment;
        if inode < segment.slots() {
            let change = if was_asked_for { bitmap::set_shared } else { bitmap::clear_shared };
            change(segment.slot_set(SlotSet::WithRoom), inode);
        }
    }

    /// Whether room beyond the end of a file was requested.
    pub fn has_room(&self, inode: u64) -> bool {
        let segment = &self.core.segment;
        inode < segment.slots() && bitmap::is_set(segment.slot_set(SlotSet::WithRoom), inode)
    }
}

impl FileLock<'_> {
    /// Runs a change that moves pages between these files, or within one of them.
    pub fn exchange<T>(&self, change: impl FnOnce() -> T) -> T {
        // If this process dies in between, the next holder does not know whether the change was
        // made.
        self.note_exchanged(u64::MAX);
        let changed = change();
        self.note_exchanged(self.core.control().appends.metadata_lsn.load(Relaxed));
        changed
    }

    fn note_exchanged(&self, lsn: u64) {
        // Relaxed: the file mutexes order it.
        for mutex in self.mutexes {
            self.core.control().exchanged_lsn[mutex].store(lsn, Relaxed);
        }
    }

    /// Makes the last exchange of pages of these files durable; must be called before bytes are
    /// stored to them. Costs nothing unless pages were exchanged since the last sync.
    ///
    /// # Errors
    /// [`PoolError::Failed`], [`PoolError::Media`], [`PoolError::Stalled`].
    #[inline]
    pub fn settle(&self) -> Result<()> {
        let control = self.core.control();
        let durable_lsn = control.appends.durable_lsn.load(Relaxed);
        let exchanged = self.mutexes.map(|mutex| control.exchanged_lsn[mutex].load(Relaxed));
        if exchanged[0].max(exchanged[1]) <= durable_lsn {
            Ok(())
        } else {
            self.make_exchange_durable(exchanged[0].max(exchanged[1]))
        }
    }

    /// Makes all changes so far durable. Must be called before bytes beyond the end of a file are
    /// overwritten in place by a change that never shows the new bytes in that file: a truncation
    /// that is not durable yet may have cut them off, and after a crash without it they are part of
    /// the file again.
    ///
    /// # Errors
    /// As for [`FileLock::settle`].
    pub fn settle_all(&self) -> Result<()> {
        self.make_exchange_durable(u64::MAX)
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

/// The mode of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LockMode {
    /// Compatible with other shared locks.
    Shared,
    /// Compatible with no other lock.
    Exclusive,
}

/// A process that has an inode locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// The process id, as numbered in its own namespace.
    pub pid: u32,
    /// The mode of its lock.
    pub mode: LockMode,
    /// Whether it is writing a commit of the inode.
    pub is_committing: bool,
}

/// The format of a process's note about a lock in its slot: the number, shifted, and these bits.
const NOTE_BITS: u32 = 2;
const NOTE_EXCLUSIVE: u64 = 1;
const NOTE_COMMITTING: u64 = 2;

/// A locked inode. Unlocked when dropped, or when the process dies.
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
    /// Creates a pool in a new file of `len_bytes`, all of it allocated, and opens it.
    ///
    /// # Errors
    /// [`PoolError::NotOpened`] if the file exists or there is no room, [`PoolError::Media`],
    /// [`PoolError::Parameter`].
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

    /// As [`Pool::create`], with control over how the file is created; also for a device.
    /// `progress` is called from time to time with the number of bytes allocated and zeroed so far,
    /// and the total.
    ///
    /// A new file appears at its path only when the pool in it is complete: if the process is
    /// killed before that, no file is left. (If the file system does not support unnamed files, a
    /// file `.aquifer-….new` is left beside it.)
    ///
    /// # Errors
    /// As for [`Pool::create`]; [`PoolError::NotOpened`] also if the target is in use by another
    /// process.
    pub fn create_with(
        path: impl AsRef<Path>,
        len_bytes: u64,
        options: &CreateOptions,
        file: &media::CreateOptions,
        open: &OpenOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Pool> {
        // Checked before a file is created.
        options.layout(len_bytes)?;
        let mut prepared = file.prepare(path.as_ref(), len_bytes, progress)?;
        Self::make(prepared.media.clone(), options, open, || Ok(prepared.name()?))
    }

    /// Creates a pool on media that are not open elsewhere, and opens it. The previous content of
    /// the media is lost.
    ///
    /// # Errors
    /// As for [`Pool::create`]; [`PoolError::Busy`] if another opener has them open or creates a
    /// pool on them, [`PoolError::MediaInUse`] if it does so through the same open file
    /// description.
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
        if open.read_only {
            drop(alone)
        } else {
            // Keeps the lock, so that no other opener can get in between.
            alone.hand_over()
        }
        Self::open_on(media, open)
    }

    /// Opens the pool in a file or device. The first opener recovers it.
    ///
    /// # Errors
    /// [`PoolError::NotAPool`], [`PoolError::Damaged`], [`PoolError::Truncated`],
    /// [`PoolError::FutureVersion`], [`PoolError::ReadOnly`], [`PoolError::Busy`],
    /// [`PoolError::BusyElsewhere`].
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Pool> {
        Self::open_on(options.media().open(path.as_ref())?, options)
    }

    /// Opens the pool on media, which serve one open pool at a time: its locks belong to their open
    /// file description. Domain and write windows are those of the media.
    ///
    /// # Errors
    /// As for [`Pool::open`]; [`PoolError::MediaInUse`] if a pool is open on these media, or on
    /// others with the same open file description.
    pub fn open_on(media: Arc<dyn Media>, options: &OpenOptions) -> Result<Pool> {
        Self::start(recovery::open(media, options, None)?, options)
    }

    /// Leaves the state that the death of the process would leave, except for the locks, which stay
    /// with the media: these can be opened again. In builds for the tests that record the writes to
    /// one medium. This must be the only clone.
    #[cfg(feature = "mutants")]
    #[doc(hidden)]
    pub fn die(self) {
        assert_eq!(Arc::strong_count(&self.shared), 1, "another clone goes on");
        self.core().membership.give_up_claim();
        std::mem::forget(self);
    }

    /// Opens a pool for writing that this process may not open itself: the pool's broker passes the
    /// required descriptors to a process that has the key. It is closed as any other; the broker
    /// may have ended before that.
    ///
    /// The broker must belong to the pool's owner, or to root: the key is sent to no other.
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

    /// Opens the same pool once more, for writing: for a process that has opened it for reading,
    /// and may not open it for writing itself. This handle keeps reading.
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

    /// The positions of the parts.
    pub fn layout(&self) -> Layout {
        self.core().layout
    }

    /// The pool's uuid.
    pub fn uuid(&self) -> Uuid {
        self.core().uuid
    }

    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.core().is_writable
    }

    /// The current parameters and usage of the pool.
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
        let pins = if core.is_writable {
            let _locked = core.lock()?;
            core.pins.count(&core.membership)
        } else {
            0
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

    /// The current free space. [`Pool::info`] returns more, but reads all of the metadata.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn room(&self) -> Result<Room> {
        let core = self.core();
        let free_pages = if core.is_writable {
            // Under the lock, for a consistent count: pages that are being zeroed are reserved and
            // then freed.
            alloc::free_count(core.lock()?.control())
        } else {
            alloc::free_count(core.control())
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

    /// The inode of the object with a name; `None` if there is none, or it is damaged. A lookup
    /// takes about as many steps as the number of objects has bits.
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

    /// Reserves `pages` contiguous pages, the first a multiple of `align_pages`, to be written to.
    /// Their content is undefined.
    ///
    /// # Errors
    /// [`PoolError::Full`]; those of [`Pool::transact`].
    pub fn reserve(&self, pages: u64, align_pages: u64) -> Result<Reservation<'_>> {
        self.take_pages(|core| core.reserve_pages(pages, align_pages, false))
    }

    /// Reserves pages as [`Pool::reserve`] does, and makes sure that they are zero. That costs
    /// nothing as long as there are pages known to be zero ([`PoolInfo::zeroed_pages`]).
    ///
    /// # Errors
    /// [`PoolError::Full`], [`PoolError::Media`]; those of [`Pool::transact`].
    pub fn reserve_zeroed(&self, pages: u64, align_pages: u64) -> Result<Reservation<'_>> {
        let reservation = self.take_pages(|core| core.reserve_pages(pages, align_pages, true))?;
        self.zero_rest(&reservation)?;
        Ok(reservation)
    }

    /// Reserves the `pages` pages from `start_page` on, zeroed as by [`Pool::reserve_zeroed`];
    /// `None` if not all of them are free.
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

    /// Reserves contiguous pages, at most `pages` of them and at least one: from `near_page` on if
    /// that is free, so that a file grows in place; else the longest piece available, aligned to 2
    /// MiB if that yields as many. With `must_be_zero` they are zero, and pages already known to be
    /// zero are preferred; otherwise their content is undefined. They can be written to before
    /// anything names them.
    ///
    /// # Errors
    /// As for [`Pool::reserve_zeroed`]; [`PoolError::Full`] if not one page is free.
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

    /// Reserves pages already known to be zero, in one run and at most `pages` of them; `None` if
    /// no run is long enough for that many. Writes nothing.
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

    /// Waits for the turn to wait for the reservations of other calls: for a call that could not
    /// get as many at once as it needs. The caller must release its own reservations first.
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
            // Freed pages may only be waiting for the tail, and free ones may be reserved for
            // zeroing.
            Err(PoolError::Full { .. }) => {
                core.checkpoint()?;
                core.without_zeroing(|| reserve(core))
            }
            outcome => outcome,
        }?;
        core.use_fresh_pages(reservation.whole().end_page())?;
        Ok(reservation)
    }

    /// Zeroes the pages not known to be zero.
    fn zero_rest(&self, reservation: &Reservation<'_>) -> Result<()> {
        let core = self.core();
        if !reservation.unzeroed.is_empty() {
            // The background thread should have zeroed these already.
            core.zero_soon();
        }
        reservation.unzeroed.iter().try_for_each(|run| core.zero(run.bytes()))
    }

    /// Zeroes free pages that are not known to be zero, at most `pages`, and returns how many.
    /// Background threads and other processes do the same: if one is zeroing, this returns early.
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

    /// Changes metadata atomically; durable on return. The inodes that `change` puts name the pages
    /// of `reservations`. `change` may run several times.
    ///
    /// # Errors
    /// Those of `change`, with nothing changed; [`PoolError::Failed`], and then the outcome is old
    /// or new.
    ///
    /// # Safety
    /// A transaction can move the pages of any inode to another, and make an immutable file
    /// changeable. The layers above the pool guarantee more than the pool checks: the bytes of a
    /// leased file and of an attached object change only by the rules of these layers. The caller
    /// must change only what its own layer manages, and by the rules of that layer.
    pub unsafe fn transact<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T>,
    ) -> Result<T> {
        self.core().transact(reservations, change)
    }

    /// Changes metadata atomically, as [`Pool::transact`] does, and returns when all processes see
    /// the change; the death of any or all processes does not undo it. A power cut may, until
    /// [`Pool::sync`]. It then undoes all later changes as well, which leaves the state of one
    /// moment.
    ///
    /// What the reservations hold, and what the change exposes, must be written before. A call that
    /// uses pages for the first time may wait for the media.
    ///
    /// # Errors
    /// Those of `change` and [`PoolError::Stalled`], with nothing changed; [`PoolError::Media`] if
    /// the log cannot be written: then the outcome is old or new, and the pool is read-only.
    ///
    /// # Safety
    /// As for [`Pool::transact`].
    pub unsafe fn change<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T>,
    ) -> Result<T> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.try_change(reservations, change) }
    }

    /// [`Pool::change`] with the caller's error type.
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

    /// Copies bytes of the data out, without a system call where the media are mapped. Concurrent
    /// changes may make the copy torn.
    ///
    /// # Errors
    /// [`PoolError::Media`].
    pub fn load(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        self.core().load(offset_bytes, bytes)
    }

    /// Copies bytes to the data, without a system call where the media are memory: visible to all
    /// processes at once, durable after [`Pool::make_durable`].
    ///
    /// # Errors
    /// [`PoolError::Media`].
    ///
    /// # Safety
    /// As for [`Media::write_at`]: the caller must ensure that no reference to the bytes forbids
    /// the change, such as a lease of an immutable file or a typed value of an attached object. A
    /// layer may store to the pages of inodes that it manages, by its own rules, and to pages that
    /// it has reserved.
    pub unsafe fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.core().store(offset_bytes, bytes) }
    }

    /// Passes bytes of the data to a closure: in place where the media are mapped, else as a copy
    /// in memory that the call allocates. They may change during the call. If the closure reads a
    /// byte that cannot be read, its result is dropped.
    ///
    /// # Errors
    /// [`PoolError::Media`]; [`PoolError::Forked`].
    pub fn look_at<T>(&self, range: ByteRange, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        self.core().look_at(range, look)
    }

    /// Prefetches the beginning of a range of the data into the CPU cache.
    #[inline]
    pub fn prefetch(&self, range: ByteRange) {
        if let Some(mapping) = self.core().media.mapping() {
            mapping.prefetch(range.offset_bytes, range.len_bytes as usize);
        }
    }

    /// The error for bytes in these ranges that could not be read by another way than
    /// [`Pool::look_at`].
    pub fn unreadable(&self, ranges: impl IntoIterator<Item = ByteRange>) -> PoolError {
        self.core().unreadable(ranges)
    }

    /// Returns an error in a fork of the process that opened the pool.
    ///
    /// # Errors
    /// [`PoolError::Forked`].
    pub fn check_process(&self) -> Result<()> {
        self.core().check_process()
    }

    /// Bytes of the data in place, which the caller must have pinned; `None` where the media are
    /// not mapped. Reading a byte that can no longer be read raises `SIGBUS`, as with mmap.
    #[inline]
    pub fn bytes(&self, range: ByteRange) -> Option<Bytes<'_>> {
        self.core().bytes(range)
    }

    /// The address at which bytes of the data can be stored to; `None` where they can only be
    /// written. With write windows by protection keys, a thread can store there only while it has
    /// one ([`Media::write_window`](crate::media::Media::write_window)), and a load there needs one
    /// as well.
    pub fn place_to_store(&self, range: ByteRange) -> Option<*mut u8> {
        self.core().place_to_store(range)
    }

    /// Makes all earlier changes durable, of any process.
    ///
    /// # Errors
    /// [`PoolError::Failed`], [`PoolError::Media`], [`PoolError::Stalled`].
    pub fn sync(&self) -> Result<()> {
        let core = self.core();
        core.check_writable()?;
        let head_lsn = core.close_log()?;
        core.wait_durable(head_lsn)
    }

    /// Makes all data written earlier durable, of any process: not the metadata ([`Pool::sync`]).
    ///
    /// # Errors
    /// [`PoolError::Media`]; the pool is read-only from then on.
    pub fn sync_data(&self) -> Result<()> {
        self.core().make_durable(&[self.layout().data()])
    }

    /// Locks a file for writing, against all other writers; blocks.
    ///
    /// # Errors
    /// [`PoolError::Stalled`] if the holder makes no progress for longer than
    /// [`OpenOptions::stall_timeout`];
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
        // In the order of the mutexes, which is the global lock order.
        let (first, second) =
            if file_mutex(one) <= file_mutex(other) { (one, other) } else { (other, one) };
        let is_same = file_mutex(one) == file_mutex(other);
        let core = self.core();
        Ok(FileLock {
            core,
            mutexes: [one, other].map(file_mutex),
            first: core.lock_file(first)?,
            // While this waits for the second mutex, the heartbeat reports progress to the waiters
            // for the first.
            second: (!is_same)
                .then(|| core.while_media_work(heartbeat::Held::Files, || core.lock_file(second)))
                .transpose()?,
            _keeps_mapped: core.clone(),
        })
    }

    /// The state that each read of a file checks, without a lock; `None` if the image is being
    /// changed, the inode is no file's, or this process is a fork.
    #[inline]
    pub fn file_state(&self, number: u64) -> Option<FileState> {
        self.core().process.is_current().then(|| self.core().file_state(number))?
    }

    /// Whether a file has this generation and layout version, after everything that the caller has
    /// loaded before. If the caller had read the same values earlier, the pages belonged to the
    /// file all the time.
    ///
    /// # Errors
    /// [`PoolError::Stalled`], [`PoolError::Forked`].
    #[inline]
    pub fn has_layout(&self, number: u64, generation: u64, layout_version: u64) -> Result<bool> {
        self.core().has_layout(number, generation, layout_version)
    }

    /// A version that each change of the metadata raises, by any process; odd during a change. If
    /// it is even and unchanged, the metadata was not changed in between.
    #[inline]
    pub fn metadata_version(&self) -> u64 {
        self.core().metadata_version()
    }

    /// A version that each change of names raises, by any process. While it is unchanged, paths
    /// resolve as before. Metadata read after this call is at least as new.
    #[inline]
    pub fn names_version(&self) -> u64 {
        self.core().names_version()
    }

    /// Inodes of files without a name: a process has them open, or had them open when it died.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn orphans(&self) -> Result<Vec<u64>> {
        self.core().consistent(|image| image.orphans().collect())
    }

    /// Passes the metadata as of one moment to `look`, which may run several times.
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

    /// Captures a commit: `fill` copies the whole pages, in order, into the memory it is given. All
    /// content becomes durable together when [`Commit::finish`] returns. The pool stays open until
    /// then.
    ///
    /// The commit takes its place in the log now, and everything behind it, of all processes,
    /// becomes durable after it: until it is finished or dropped, other commits, transactions and
    /// checkpoints wait. If that takes longer than their [`OpenOptions::stall_timeout`], they fail
    /// with [`PoolError::Stalled`], which names this process. When the process dies, they continue
    /// at once.
    ///
    /// # Errors
    /// [`PoolError::TooLargeForLog`]; [`PoolError::Failed`] and [`PoolError::Media`] from a
    /// checkpoint that makes room.
    ///
    /// # Safety
    /// The commit replaces the bytes of its ranges, in this process and others. The caller must
    /// hold the write lock of each inode ([`Pool::lock_inode`]) until the commit is finished, or
    /// ensure otherwise that no reference covers the ranges: see [`Media::write_at`].
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

    /// The end of the durable log.
    pub fn durable_lsn(&self) -> u64 {
        self.core().control().appends.durable_lsn.load(Relaxed)
    }

    /// The tail of the log: everything before it is durable at its place, and may be overwritten.
    pub fn tail_lsn(&self) -> u64 {
        self.core().control().tail_lsn.load(Relaxed)
    }

    /// Commits before this position are copied to their place.
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

    /// Brings the media, at their place, up to date with the log. Returns the pages of `range`,
    /// with their offsets, that a reader must see instead of those on media, because this handle
    /// cannot copy them there.
    ///
    /// The caller must hold the lock of the inode, so that there are no commits to `range` during
    /// the call. The call decides a commit that a dead process had begun: from now on it is there
    /// or it is not, and a reader that cannot decide keeps seeing the old content.
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

    /// Ranges of the media for which the log currently has newer content.
    ///
    /// # Errors
    /// [`PoolError::Media`], [`PoolError::Damaged`].
    pub fn unapplied(&self) -> Result<Vec<ByteRange>> {
        let core = self.core();
        let nothing = ByteRange { offset_bytes: 0, len_bytes: 0 };
        core.committed_for_reader(nothing, self.overlay(), |seen| Ok(seen.committed.ranges()))
    }

    /// What a reader without shared memory found in the log when it opened the pool.
    fn overlay(&self) -> Option<&Committed> {
        let is_snapshot = !self.core().is_writable && self.core().segment_id.is_nil();
        is_snapshot.then_some(&self.shared.overlay)
    }

    /// Brings the media up to date with the log, so that log space and freed pages can be reused.
    ///
    /// # Errors
    /// [`PoolError::Media`]; the pool is read-only from then on.
    pub fn checkpoint(&self) -> Result<()> {
        self.core().checkpoint()
    }

    /// Requests a checkpoint in the background, if this handle has a background thread.
    pub fn checkpoint_soon(&self) {
        if let Some(checkpointer) = &self.shared.checkpointer {
            checkpointer.ring();
        }
    }

    /// Locks an inode until the result is dropped; does not block.
    ///
    /// # Errors
    /// [`PoolError::Locked`] if another handle holds a conflicting lock;
    /// [`PoolError::AlreadyLocked`] if this handle has a lock on it.
    pub fn lock_inode(&self, number: u64, mode: LockMode) -> Result<InodeLock> {
        self.core().lock_inode(number, mode)
    }

    /// The known holders of locks on an inode. Readers that opened the pool for reading are not
    /// listed, and locks of a process that holds very many may be missing.
    /// [`Pool::is_locked_elsewhere`] covers all.
    pub fn holders(&self, number: u64) -> Vec<Holder> {
        self.core().holders(number)
    }

    /// Whether a lock of another handle or process conflicts with a lock of the inode in this mode.
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
        // Locks of one open file description do not conflict with each other, so this handle
        // records its own.
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

    /// Replaces a note in this process's slot. A reader has no slot and leaves no note.
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
                        mode: if note & NOTE_EXCLUSIVE != 0 {
                            LockMode::Exclusive
                        } else {
                            LockMode::Shared
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
    /// The number of the inode.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The mode of the lock.
    pub fn mode(&self) -> LockMode {
        self.mode
    }

    /// Sets whether [`Pool::holders`] reports a commit of the inode as being written. Calls must
    /// not overlap.
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
        // In a forked child the lock belongs to the parent.
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
            // The threads belong to the parent. Detaching them here would detach one of the child's
            // threads, if it has the same stack.
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
    /// Leaves the pool. The last writer brings the media up to date, and removes the segment if no
    /// reader uses it. If this fails, the next opener makes up for it, unless the machine is
    /// restarted before.
    ///
    /// Readers can hold locks that hide from a writer that it is the last: then the segment stays,
    /// and the media are brought up to date all the same, which needs no lock of the file.
    fn close(&self) {
        let timeout = self.stall_timeout;
        let recovery = || self.membership.lock(Byte::Recovery, LockKind::Exclusive, timeout);
        if self.is_writable
            && let Err(error) = self.media.check_kept()
        {
            // If the kernel reported the loss to another program earlier, a process that opened the
            // pool later does not get it.
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
                // Then the superblock tells the next opener that there is no segment, or that bytes
                // are lost. Otherwise the segment stays, which records whether they are.
                if closed.is_ok() || (self.check_not_failed().is_err() && self.note_loss()) {
                    self.places.remove(self.segment_id);
                }
                point::pass("close-removed");
            } else if !knows_others || !self.membership.has_writers() {
                // Readers stay, and write nothing when they close: changes that are not durable now
                // would be lost at a restart of the machine. Without the lock, other writers may be
                // closing as well, and each may rely on the other.
                let _ = self.checkpoint();
            }
        }
        self.pins.leave();
        self.membership.leave();
    }
}
