//! The ephemeral heap: addresses for short-lived mappings.
//!
//! A program that maps a small file, reads it and unmaps it pays for the page tables it leaves
//! behind: `munmap` takes the address space's lock against every fault and mapping call of the
//! process, and interrupts every CPU that may have cached a translation. With two threads that
//! costs more than mapping and reading together. Here nothing is unmapped when a view is dropped.
//! Its mapping becomes a *zombie*; when the zombies reach a number of pages, one call removes them
//! all from the page tables with one TLB flush. Only then are their addresses reused.
//!
//! ```text
//!          a CPU's pools                                                   shared
//!  slots of 32 KiB, slots of 64 KiB                 runs, page after page          larger than 1 GiB
//!  ┌──────────────────────────────┐               ┌──────────────────────┐        ┌───────────────┐
//!  │ ring of 16 MiB               │               │ region of 1 GiB      │        │ a reservation │
//!  │ [T][T][R][R][R][D][D][E][E]… │  more rings   │ [T  ][R ][ ][T ] →   │        │ for each      │
//!  └──────────────────────────────┘               └──────────────────────┘        └───────────────┘
//!    T taken   R retired: a zombie   D drained   E empty
//!
//!  take ──▶ caller: mmap(MAP_FIXED) over all of it, use ──▶ retire ──▶ zombie
//!    ▲                                                                  │ at 512 pages, by the thread that retires the last
//!    │                                                                  ▼
//!    ├──────────────── drained: DONTNEED for all of them ◀──────────────┤
//!    │                                                                  │ after the delay, by unmap_now, without VMAs left
//!    └──────────────── empty: the reservation again ◀───────────────────┘ (drained slots too)
//! ```
//!
//! # Slots
//! Each small mapping takes a whole slot of 32 or 64 KiB: a new mapping over a drained slot then
//! covers exactly the existing VMA, and the kernel splits and merges nothing. (Packing sizes
//! consecutively loses a third of the gain, and could leave the tail of an earlier file mapped.)
//! Slots are given out in address order, wrapping around, so neighbours become zombies together. A
//! slot in use, for instance parked in the mapping cache, is skipped; scattered zombies are drained
//! by one vectored call. See `slots` for the bit sets, and `pool` for claiming.
//!
//! # Draining is not unmapping
//! A drained mapping has no page-table entries, but still exists: a stale pointer faults its pages
//! in again, and the file stays in use, so the space of a removed file is not freed and its file
//! system cannot be unmounted. So the timer, `unmap_now`, and threads that run out of VMAs replace
//! it by the reservation. A zombie is unmapped after the delay at most, and an idle heap keeps no
//! file open. `unmapping` makes the system calls, and describes the fallbacks on older kernels.
//!
//! # Guarantees
//! 1. Addresses are given out only when no page-table entry of an earlier view is left there, and
//!    no such view exists.
//! 2. When `unmap_now` returns, no mapping is left that was retired before the call.
//! 3. VMAs, counted by their upper bound, stay within a budget of half of what the process may
//!    have. A request beyond it returns an error, after everything idle was unmapped.
//! 4. A fault in an extent goes to its owner, until it is retired: `owners`.
//! 5. A forked child has none of the mappings (the arena reserves itself anew there), and the heap
//!    is inert in it.
//!
//! The user of an extent must not call `mprotect`, `mremap`, `munmap`, or `madvise` of a kind that
//! splits it. The extent must stay what one `mmap` made, or budget and runs are wrong. Pages
//! replaced after a fault are an exception: they are few and temporary.
//!
//! # Threads
//! Each CPU has its own pools, so two threads seldom contend for a lock. Except for reserving a
//! region, no lock that `take` needs is held across a system call. Locks held by other threads at a
//! fork are never taken in the child.
//!
//! # Sources
//! DaxVM (Alverti et al., MICRO 2022), ephemeral mappings and asynchronous unmapping, sections III
//! and IV: a heap of 1 GiB regions with a live count, linear allocation, no operations but
//! unmapping, zombies released in batches. DaxVM is in the kernel, flushes after 33 pages, and
//! gains another 20 % with 512. Measured from user space with two threads and mappings of 32 KiB,
//! 33 pages were 2.4 times as fast as `mmap` and `munmap`, 128 were 3.1, and 512 were 3.3 times;
//! more gained nothing. Replacing runs by the reservation instead of draining them was 1.5 to 2.1
//! times as fast.

mod extent;
mod own;
mod owners;
mod pool;
mod region;
mod runs;
mod slots;
pub mod stitched;
mod timer;
mod unmapping;
mod vma_budget;

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod model_tests;
#[cfg(all(test, not(loom)))]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aquifer_sys::cpu;
use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::SMALL_PAGE_BYTES;

pub use extent::Extent;
pub use vma_budget::VmaBudget;

use self::extent::Home;
use self::own::Owns;
use self::owners::Owners;
use self::pool::{NoSlot, Pool};
use self::region::{Region, RegionError};
use self::runs::{NoRun, Runs};
use self::timer::{Bell, Swept};
use self::unmapping::Kernel;
use crate::arena::SLOT_BYTES;
use crate::worker::Worker;
use crate::{ProcessMark, VmError};

/// Unit of extents: each starts at a multiple and has a multiple as its size, so that a granule has
/// one owner.
const GRANULE_BYTES: usize = 32 << 10;
/// Sizes of slots.
const SLOT_CLASSES: [usize; 2] = [GRANULE_BYTES, 64 << 10];
/// 4096 pages. Four times as many measured as fast, sixteen times as many slower.
const RING_BYTES: usize = 16 << 20;
const REGION_BYTES: usize = 1 << 30;
const MOST_POOLS: usize = 64;

/// When retired addresses are unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmap {
    /// At once. A load through a stale pointer then raises SIGSEGV. Costs half as much again as
    /// `mmap` and `munmap`: the addresses stay reserved, so each mapping splits the reservation and
    /// unmapping it merges it again (32 KiB of a file in memory, touched: 7.2 µs, `mmap` and
    /// `munmap` 4.7, [`Unmap::Async`] 3.3).
    Sync,
    /// When the threshold is reached, or after the delay at most: one TLB flush for many mappings.
    /// Until then the files stay in use, and a stale pointer still reads them.
    Async {
        /// Threshold in pages of 4096 bytes.
        threshold_pages: u64,
        /// Longest delay.
        delay: Duration,
    },
}

impl Default for Unmap {
    fn default() -> Self {
        Unmap::Async { threshold_pages: 512, delay: Duration::from_millis(100) }
    }
}

/// Addresses and mappings of a heap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapStats {
    /// Mappings in use or parked.
    pub live: u64,
    /// Their addresses.
    pub live_bytes: u64,
    /// Retired mappings that are not yet unmapped or drained.
    pub zombies: u64,
    /// Their addresses.
    pub zombie_bytes: u64,
    /// Mappings without page-table entries that still keep their files open, until another mapping
    /// replaces them or the delay is over.
    pub drained: u64,
    /// System calls that unmapped one or many mappings.
    pub unmap_calls: u64,
    /// Regions of addresses, of 1 GiB.
    pub regions: u64,
    /// VMAs accounted for.
    pub vmas: u64,
}

/// See the module documentation.
pub struct Heap {
    shared: Arc<Shared>,
    timer: Worker,
}

struct Shared {
    unmap: Unmap,
    vmas: Arc<VmaBudget>,
    /// By CPU, then by size class.
    pools: Box<[[Arc<Pool<Kernel>>; SLOT_CLASSES.len()]]>,
    runs: Arc<Runs<Kernel>>,
    owns: Arc<Owns>,
    /// The region that rings are cut from, and how much of it is used.
    rings: Mutex<Option<(Arc<Region>, usize)>>,
    regions: AtomicUsize,
    bell: Bell,
    /// Called after retired mappings were unmapped.
    besides: OnceLock<Box<dyn Fn() + Send + Sync>>,
    mark: ProcessMark,
}

impl Heap {
    /// Creates a heap without addresses.
    pub fn new(unmap: Unmap, vmas: Arc<VmaBudget>) -> Arc<Heap> {
        Heap::with(unmap, vmas, cpu::count(), Kernel::new)
    }

    fn with(
        unmap: Unmap,
        vmas: Arc<VmaBudget>,
        cpus: usize,
        kernel: impl Fn() -> Kernel,
    ) -> Arc<Heap> {
        let threshold_pages = match unmap {
            Unmap::Sync => usize::MAX,
            Unmap::Async { threshold_pages, .. } => {
                usize::try_from(threshold_pages).unwrap_or(usize::MAX)
            }
        };
        let pool = |slot_bytes: usize| {
            let threshold = (threshold_pages / (slot_bytes / SMALL_PAGE_BYTES)).max(1);
            let slots = RING_BYTES / slot_bytes;
            Arc::new(Pool::new(slot_bytes, slots, threshold, vmas.clone(), kernel()))
        };
        let pools = (0..cpus.clamp(1, MOST_POOLS)).map(|_| SLOT_CLASSES.map(pool)).collect();
        let runs = Arc::new(Runs::new(threshold_pages, vmas.clone(), kernel()));
        let owns = Arc::new(Owns::new(vmas.clone(), kernel()));
        let shared = Shared {
            unmap,
            vmas,
            pools,
            runs,
            owns,
            rings: Mutex::new(None),
            regions: AtomicUsize::new(0),
            bell: Bell::new(),
            besides: OnceLock::new(),
            mark: ProcessMark::new(),
        };
        Arc::new(Heap { shared: Arc::new(shared), timer: Worker::new() })
    }

    /// Takes addresses for a mapping of `len_bytes`. The caller must map the whole extent with
    /// `MAP_FIXED`: an earlier, unused mapping may still exist there.
    pub fn take(&self, len_bytes: usize) -> Result<Extent, NoAddresses> {
        match SLOT_CLASSES.iter().position(|&slot_bytes| len_bytes <= slot_bytes) {
            Some(class) => self.shared.take(|shared| shared.take_slot(class)),
            None => self.take_for_pieces(len_bytes, 1),
        }
    }

    /// As [`Heap::take`], for `pieces` consecutive mappings. Parts that are not mapped stay
    /// reserved.
    pub fn take_for_pieces(&self, len_bytes: usize, pieces: usize) -> Result<Extent, NoAddresses> {
        self.shared.take(|shared| shared.take_run(len_bytes, pieces))
    }

    /// Retires the unused mapping in `extent`: it is unmapped at once, at the threshold, or after
    /// the delay.
    pub fn retire(&self, extent: Extent) {
        let Unmap::Async { delay, .. } = self.shared.unmap else {
            drop(extent);
            return;
        };
        let Some(home) = extent.give_up() else { return };
        match home {
            Home::Slot(pool, slot) => {
                if pool.retire(slot) {
                    pool.drain_unless_draining();
                }
            }
            Home::Run(runs, run) => {
                if runs.retire(run) {
                    runs.sweep_unless_sweeping();
                }
            }
            // Larger than any threshold: unmap at once.
            own @ Home::Own(_) => return own.release(),
        }
        if timer::start(&self.timer, delay, &self.shared) {
            self.shared.bell.arm();
        } else {
            self.shared.release_idle();
        }
    }

    /// Sets a function to call whenever all retired mappings have been unmapped. Only the first
    /// call has an effect.
    pub fn let_go_besides(&self, besides: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.besides.set(Box::new(besides));
    }

    /// The VMA budget. VMAs split off in the heap's addresses count too.
    pub fn vmas(&self) -> &Arc<VmaBudget> {
        &self.shared.vmas
    }

    /// Unmaps everything retired before it returns, which closes the files.
    pub fn unmap_now(&self) {
        if self.shared.mark.is_current() {
            self.shared.release_idle();
        }
    }

    /// Returns the counters; all zero in a forked child.
    pub fn stats(&self) -> HeapStats {
        if self.shared.mark.is_current() { self.shared.stats() } else { HeapStats::default() }
    }
}

/// Why no addresses could be taken.
#[derive(Debug, thiserror::Error)]
pub enum NoAddresses {
    /// The VMA budget is used up.
    #[error("{used} mappings are in use of {limit} that may be")]
    Vmas {
        /// Mappings in use.
        used: usize,
        /// The budget.
        limit: usize,
    },
    /// No addresses are free.
    #[error(transparent)]
    Memory(VmError),
    /// The heap belongs to the parent of this forked process.
    #[error("this process is a fork of the one that made the heap")]
    Forked,
}

impl Drop for Heap {
    fn drop(&mut self) {
        if self.shared.mark.is_current() {
            self.shared.bell.stop();
        }
        self.timer.join();
        self.unmap_now();
    }
}

impl Swept for Shared {
    fn bell(&self) -> &Bell {
        &self.bell
    }

    fn sweep(&self) {
        self.release_idle();
    }
}

impl Shared {
    fn release_idle(&self) {
        self.pools.iter().flatten().for_each(|pool| pool.release_idle());
        self.runs.sweep();
        if let Some(besides) = self.besides.get() {
            besides();
        }
    }

    fn take(
        &self,
        take: impl FnOnce(&Shared) -> Result<Extent, RegionError>,
    ) -> Result<Extent, NoAddresses> {
        if !self.mark.is_current() {
            return Err(NoAddresses::Forked);
        }
        take(self).map_err(|error| match error {
            RegionError::Addresses(error) => NoAddresses::Memory(error),
            RegionError::Vmas => {
                NoAddresses::Vmas { used: self.vmas.used(), limit: self.vmas.limit() }
            }
        })
    }

    /// Takes a slot from the pool of the current CPU.
    fn take_slot(&self, class: usize) -> Result<Extent, RegionError> {
        let own = &self.pools[cpu::current() % self.pools.len()][class];
        loop {
            let error = match slot_of(own) {
                Ok(extent) => return Ok(extent),
                Err(NoSlot::Vmas) => RegionError::Vmas,
                Err(NoSlot::Taken) => match self.add_ring(own) {
                    Ok(()) => continue,
                    Err(error) => error,
                },
            };
            return self.take_slot_elsewhere(class).ok_or(error);
        }
    }

    /// Falls back when addresses or VMAs have run out: takes a free slot of any CPU; if there is
    /// none, drains all pools, and then unmaps everything idle.
    fn take_slot_elsewhere(&self, class: usize) -> Option<Extent> {
        let pools = || self.pools.iter().map(|classes| &classes[class]);
        let any = || pools().find_map(|pool| slot_of(pool).ok());
        any()
            .or_else(|| {
                pools().for_each(|pool| pool.drain());
                any()
            })
            .or_else(|| {
                self.release_idle();
                any()
            })
    }

    fn add_ring(&self, pool: &Pool<Kernel>) -> Result<(), RegionError> {
        let mut rings = self.rings.lock();
        let has_room =
            |(region, used): &&mut (Arc<Region>, usize)| *used + RING_BYTES <= region.len_bytes();
        if rings.as_mut().filter(has_room).is_none() {
            *rings = Some((self.add_region()?, 0));
        }
        let (region, used) = rings.as_mut().expect("there is one with room");
        pool.add_ring(region.clone(), region.base() + *used);
        *used += RING_BYTES;
        Ok(())
    }

    /// Adds a region of the usual size or, without room for that, of the smallest.
    fn add_region(&self) -> Result<Arc<Region>, RegionError> {
        let region = match Region::new(REGION_BYTES, &self.vmas) {
            Err(RegionError::Addresses(_)) => Region::new(SLOT_BYTES, &self.vmas),
            region => region,
        }?;
        // Relaxed: statistics.
        self.regions.fetch_add(1, Ordering::Relaxed);
        Ok(region)
    }

    fn take_run(&self, len_bytes: usize, pieces: usize) -> Result<Extent, RegionError> {
        let Some(len) = len_bytes.checked_next_multiple_of(GRANULE_BYTES) else {
            let len_bytes = len_bytes as u64;
            return Err(VmError::ArenaFull { len_bytes, arena_bytes: len_bytes }.into());
        };
        if len > REGION_BYTES {
            return self.take_own(len, pieces);
        }
        for attempt in 0.. {
            match self.run_of(len, pieces) {
                Ok(extent) => return Ok(extent),
                Err(NoRun::Room) => {
                    let region = self.add_region()?;
                    if region.len_bytes() < len {
                        return self.take_own(len, pieces);
                    }
                    self.runs.add_region(region.clone(), region.base(), region.len_bytes());
                }
                Err(NoRun::Vmas) if attempt == 0 => self.release_idle(),
                Err(NoRun::Vmas) => break,
            }
        }
        Err(RegionError::Vmas)
    }

    fn run_of(&self, len: usize, pieces: usize) -> Result<Extent, NoRun> {
        let (run, address, owners) = self.runs.take(len, pieces, owners_of)?;
        let home = Home::Run(self.runs.clone(), run);
        // SAFETY: the runs keep the region of the addresses, and `home` keeps the runs.
        Ok(unsafe { Extent::new(address, len, owners, home) })
    }

    fn take_own(&self, len: usize, pieces: usize) -> Result<Extent, RegionError> {
        let own = self.owns.take(len, pieces)?;
        let (address, owners) = (own.region().base(), owners_of(own.region()));
        let home = Home::Own(own);
        // SAFETY: `home` keeps the region.
        Ok(unsafe { Extent::new(address, len, owners, home) })
    }

    fn stats(&self) -> HeapStats {
        let mut stats = HeapStats {
            regions: self.regions.load(Ordering::Relaxed) as u64,
            vmas: self.vmas.used() as u64,
            ..HeapStats::default()
        };
        for pool in self.pools.iter().flatten() {
            let (found, bytes) = (pool.stats(), pool.slot_bytes() as u64);
            stats.live += found.taken as u64;
            stats.live_bytes += found.taken as u64 * bytes;
            stats.zombies += found.retired as u64;
            stats.zombie_bytes += found.retired as u64 * bytes;
            stats.drained += found.drained as u64;
            stats.unmap_calls += pool.unmapper().calls();
        }
        let runs = self.runs.stats();
        stats.live += runs.taken as u64;
        stats.live_bytes += runs.taken_bytes as u64;
        stats.zombies += runs.retired as u64;
        stats.zombie_bytes += runs.retired_bytes as u64;
        let (own, own_bytes) = self.owns.live();
        stats.live += own;
        stats.live_bytes += own_bytes;
        stats.unmap_calls += self.runs.unmapper().calls() + self.owns.kernel().calls();
        stats
    }
}

fn owners_of(region: &Arc<Region>) -> *const Owners {
    region.owners()
}

fn slot_of(pool: &Arc<Pool<Kernel>>) -> Result<Extent, NoSlot> {
    let (slot, address, owners) = pool.take(owners_of)?;
    let home = Home::Slot(pool.clone(), slot);
    // SAFETY: the pool keeps the region of the addresses, and `home` keeps the pool.
    Ok(unsafe { Extent::new(address, pool.slot_bytes(), owners, home) })
}
