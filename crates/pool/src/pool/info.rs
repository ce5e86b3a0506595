//! The parameters and the usage of a pool.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use uuid::Uuid;

use super::Pool;
use crate::error::Result;
use crate::format::layout::Layout;
use crate::format::run::Run;
use crate::media::PersistenceDomain;
use crate::metadata::alloc::{PageMaps, Wanted};
use crate::metadata::freed;
use crate::metadata::space::Room;
use crate::shared::appends::at_place;
use crate::shared::handle::Handle;

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
    /// The features that the pool uses: [`Pool::features`].
    pub features: u64,
    /// The pages of its saved state, which are not free; empty without that feature.
    pub saved: Run,
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
    /// Named pipes, sockets and devices.
    pub special_files: u64,
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

impl Pool {
    /// The current parameters and usage of the pool.
    ///
    /// # Errors
    /// [`PoolError::Stalled`](crate::PoolError::Stalled).
    pub fn info(&self) -> Result<PoolInfo> {
        let core = self.core();
        let Handle { members, media, layout, .. } = &*core.handle;
        let control = core.handle.control();
        let census = core.image.census()?;
        let Room { free_pages, largest_free_pages, .. } = self.room()?;
        let maps = PageMaps::of(&core.handle);
        let (freed, held) = freed::waiting(control);
        let count = |runs: &mut dyn Iterator<Item = Run>| runs.map(|run| run.pages).sum::<u64>();
        let pins = if members.is_writable {
            let _locked = core.log.lock()?;
            core.pins.places.count(&members.locks)
        } else {
            0
        };
        Ok(PoolInfo {
            path: media.path().to_path_buf(),
            uuid: core.handle.uuid,
            created_ns: core.handle.created_ns,
            domain: media.domain(),
            layout: *layout,
            features: core.handle.features,
            saved: core.handle.saved,
            generation: control.generation.load(Relaxed),
            tail_lsn: control.tail_lsn.load(Relaxed),
            applied_lsn: at_place(&control.applied_lsn),
            durable_lsn: control.appends.durable_lsn.load(Relaxed),
            objects: census.objects,
            files: census.files,
            directories: census.directories,
            symbolic_links: census.links,
            special_files: census.special_files,
            parts: census.parts,
            damaged_inodes: census.damaged,
            free_slots: census.free,
            free_pages,
            largest_free_pages,
            zeroed_pages: count(&mut maps.all(Wanted::Zeroed)),
            freed_pages: count(&mut { freed }),
            held_pages: count(&mut { held }),
            pins,
            recovered_records: self.shared.recovered_records,
            processes: (0..core.handle.segment.used_processes())
                .filter(|&index| members.locks.pid_of(control, index) != 0)
                .filter(|&index| members.locks.is_alive(index))
                .map(|index| members.locks.pid_of(control, index))
                .collect(),
        })
    }

    /// The current free space. [`Pool::info`] returns more, but reads all of the metadata.
    ///
    /// # Errors
    /// [`PoolError::Stalled`](crate::PoolError::Stalled).
    pub fn room(&self) -> Result<Room> {
        self.core().space.room()
    }
}
