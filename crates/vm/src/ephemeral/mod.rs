//! The ephemeral heap: addresses for mappings that come and go.
//!
//! A program that maps a small file, looks at it and unmaps it pays for the page tables it leaves behind: `munmap` takes
//! the address space's lock against every fault and mapping call of the process, and interrupts every CPU that may
//! have cached a translation. With two threads that costs more than mapping and reading together. Here nothing is
//! unmapped when a view is dropped. Its mapping becomes a *zombie*; when enough pages of them came together, one call
//! takes them all out of the page tables with one TLB flush. Their addresses are given out again only then.
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
//!    ▲                                                                  │ 512 pages together, by who retires the last
//!    │                                                                  ▼
//!    ├──────────────── drained: DONTNEED for all of them ◀──────────────┤
//!    │                                                                  │ the delay is over, unmap_now, no VMAs left
//!    └──────────────── empty: the reservation again ◀───────────────────┘ (also what was drained)
//! ```
//!
//! # Slots
//! Small mappings all take a slot of 32 or 64 KiB, whole: what is mapped over a drained slot then covers exactly the VMA
//! that is there, and the kernel splits and merges nothing. (Sizes packed one behind the other lose a third of the gain,
//! and could leave the tail of a former file mapped.) Slots are given out round and round, so neighbours become zombies
//! together. A slot in use, for instance parked in the mapping cache, is passed over; zombies in no order are drained
//! by one call of many ranges. The sets of bits: [`slots`]; who claims what: [`pool`].
//!
//! # Draining is no unmapping
//! A drained mapping has no page-table entries, but is still there: a pointer kept by mistake faults its pages in again,
//! and the file stays in use, so the space of a removed one is not free and its file system cannot be unmounted. So the
//! timer, `unmap_now`, and whoever needs VMAs put the reservation in its place. A zombie is let go after the delay
//! at the latest, and an idle heap holds no file. [`unmapping`] has the system calls, and what older kernels get instead.
//!
//! # What is promised
//! 1. Addresses are given out when nothing is in their page tables that a view put there, and no view of them is left.
//! 2. When `unmap_now` returns, no mapping is left that was retired before it was called.
//! 3. VMAs, counted as the most there can be, stay under a budget of half of what the process may have. One more is an
//!    error that says so, after everything that can be let go was.
//! 4. A fault in an extent goes to its owner, until it is retired: [`owners`].
//! 5. A child of a fork has none of the mappings (the arena closes itself there), and nothing here does anything in it.
//!
//! What the user of an extent must not do: `mprotect`, `mremap`, `munmap`, or `madvise` of a kind that splits it. The
//! extent must stay what one `mmap` made, or budget and runs are wrong. Pages that are replaced after a fault are an
//! exception, for few and for short.
//!
//! # Threads
//! Each CPU has its pools, so two threads seldom want one lock, and but for reserving a region none is held across a system
//! call that a taker would wait for. Locks held by other threads at a fork are not looked at in the child.
//!
//! # Sources
//! DaxVM (Alverti et al., MICRO 2022), ephemeral mappings and asynchronous unmapping, sections III and IV: a heap of
//! 1 GiB regions with a live count, linear allocation, no operations but unmapping, zombies released in batches.
//! Theirs is in the kernel, flushes after 33 pages, and gains another 20 % with 512. Measured from user space with two threads and
//! mappings of 32 KiB, 33 pages gave 2.4 times `mmap` and `munmap`, 128 gave 3.1, and 512 gave 3.3, after which nothing was
//! gained; replacing runs by the reservation instead of draining them, 1.5 to 2.1.

mod extent;
mod own;
mod owners;
mod pool;
mod region;
mod runs;
mod slots;
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
use self::timer::{Bell, Swept, Timer};
use self::unmapping::Kernel;
use crate::arena::SLOT_BYTES;
use crate::{ProcessMark, VmError};

/// Every extent is a multiple of this, and begins at one: so a granule has one owner.
const GRANULE_BYTES: usize = 32 << 10;
/// Sizes of slots.
const SLOT_CLASSES: [usize; 2] = [GRANULE_BYTES, 64 << 10];
/// 4096 pages. Four times as many did as well in measurements, and sixteen times as many did worse.
const RING_BYTES: usize = 16 << 20;
const REGION_BYTES: usize = 1 << 30;
const MOST_POOLS: usize = 64;

/// When addresses that were retired are unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmap {
    /// At once. A load through a pointer kept by mistake raises SIGSEGV from then on. Costs half as much again as `mmap` and
    /// `munmap`: the addresses stay reserved, so each mapping cuts the reservation and unmapping it joins it again (32 KiB
    /// of a file in memory, touched: 7.2 µs, `mmap` and `munmap` 4.7, [`Unmap::Async`] 3.3).
    Sync,
    /// When so many pages came together, or after the delay at the latest: one TLB flush for many. Until then the
    /// files stay in use, and a pointer kept by mistake still sees them.
    Async {
        /// Pages, of 4096 bytes.
        threshold_pages: u64,
        /// At the latest.
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
    /// Mappings that nobody uses, not yet unmapped.
    pub zombies: u64,
    /// Their addresses.
    pub zombie_bytes: u64,
    /// Mappings that are out of the page tables and still hold their files, until something else is mapped over them or
    /// the delay is over.
    pub drained: u64,
    /// System calls that unmapped, of one mapping or of many.
    pub unmap_calls: u64,
    /// Regions of addresses, of 1 GiB.
    pub regions: u64,
    /// VMAs accounted for.
    pub vmas: u64,
}

/// See the module documentation.
pub struct Heap {
    shared: Arc<Shared>,
    timer: Timer,
}

struct Shared {
    unmap: Unmap,
    vmas: Arc<VmaBudget>,
    /// By CPU, then by class.
    pools: Box<[[Arc<Pool<Kernel>>; SLOT_CLASSES.len()]]>,
    runs: Arc<Runs<Kernel>>,
    owns: Arc<Owns>,
    /// Where rings are cut from: a region and how much of it is used.
    rings: Mutex<Option<(Arc<Region>, usize)>>,
    regions: AtomicUsize,
    bell: Bell,
    /// What is let go of together with retired mappings.
    besides: OnceLock<Box<dyn Fn() + Send + Sync>>,
    mark: ProcessMark,
}

impl Heap {
    /// A heap that has no addresses yet.
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
        Arc::new(Heap { shared: Arc::new(shared), timer: Timer::new() })
    }

    /// Room for a mapping of so many bytes. Who takes it maps all of it with `MAP_FIXED`: what was mapped there before is
    /// out of reach, but may still be there.
    pub fn take(&self, len_bytes: usize) -> Result<Extent, NoAddresses> {
        match SLOT_CLASSES.iter().position(|&slot_bytes| len_bytes <= slot_bytes) {
            Some(class) => self.shared.take(|shared| shared.take_slot(class)),
            None => self.take_for_pieces(len_bytes, 1),
        }
    }

    /// As [`Heap::take`], for so many mappings one behind the other. What is not mapped stays reserved.
    pub fn take_for_pieces(&self, len_bytes: usize, pieces: usize) -> Result<Extent, NoAddresses> {
        self.shared.take(|shared| shared.take_run(len_bytes, pieces))
    }

    /// The mapping in `extent` is not used any more: it is unmapped at once, or when enough came together or time is up.
    pub fn retire(&self, extent: Extent) {
        let Unmap::Async { delay, .. } = self.shared.unmap else {
            drop(extent);
            return;
        };
        let Some(home) = extent.give_up() else { return };
        match home {
            Home::Slot(pool, slot) => {
                if pool.retire(slot) {
                    pool.drain_if_nobody_does();
                }
            }
            Home::Run(runs, run) => {
                if runs.retire(run) {
                    runs.sweep_if_nobody_does();
                }
            }
            // Larger than any threshold.
            own @ Home::Own(_) => return own.release(),
        }
        if self.timer.start(delay, &self.shared) {
            self.shared.bell.arm();
        } else {
            self.shared.release_idle();
        }
    }

    /// Calls `besides`, if nothing else was to be called yet, whenever everything retired has been let go of.
    pub fn let_go_besides(&self, besides: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.besides.set(Box::new(besides));
    }

    /// How many VMAs there may be: what is split in the heap's addresses counts, too.
    pub fn vmas(&self) -> &Arc<VmaBudget> {
        &self.shared.vmas
    }

    /// Unmaps everything retired, before it returns: its files are not held any more.
    pub fn unmap_now(&self) {
        if self.shared.mark.is_current() {
            self.shared.release_idle();
        }
    }

    /// What it has.
    pub fn stats(&self) -> HeapStats {
        if self.shared.mark.is_current() { self.shared.stats() } else { HeapStats::default() }
    }
}

/// Why there is no room for a mapping.
#[derive(Debug, thiserror::Error)]
pub enum NoAddresses {
    /// There are as many mappings as there may be.
    #[error("{used} mappings are in use of {limit} that may be")]
    Vmas {
        /// Mappings in use.
        used: usize,
        /// How many may be.
        limit: usize,
    },
    /// There are no addresses.
    #[error(transparent)]
    Memory(VmError),
    /// The heap is another process's.
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

    /// A slot of the CPU this runs on.
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

    /// Without addresses or VMAs for more: what other CPUs have free, what waits to be unmapped, and what keeps VMAs.
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

    /// As large as regions are, or as there still is room for.
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
        // SAFETY: the region of the addresses is kept by the runs, which `home` keeps.
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
    // SAFETY: the region of the addresses is kept by the pool, which `home` keeps.
    Ok(unsafe { Extent::new(address, pool.slot_bytes(), owners, home) })
}
