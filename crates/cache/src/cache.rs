//! [`Cache`]: a DRAM budget through which devices are mapped.

use std::path::Path;
use std::sync::Arc;

use aquifer_device::{Device, FileDevice};
use aquifer_sys::memory::SMALL_PAGE_BYTES;

use crate::engine::Engine;
use crate::engine::options::{Options, PolicySource};
use crate::error::{CacheError, Result};
use crate::map_options::MapOptions;
use crate::mapping::{Mapping, MappingMut};
use crate::pages::Pages;
use crate::policy::{Policy, PolicyKind};
use crate::publish::Publisher;
use crate::running::Running;
use crate::stats::Stats;
use crate::user::serving::Serving;

/// Builds a [`Cache`]. Every setting has a default; the budget's is a quarter of memory.
#[derive(Clone)]
pub struct CacheBuilder {
    budget_bytes: Option<u64>,
    page_bytes: usize,
    /// `None` unless the application chose one.
    policy: Option<PolicySource>,
    io_threads: usize,
    serving_thread: bool,
    without_vectored_discard: bool,
    publish: Option<String>,
    without_userfaultfd: bool,
}

impl Default for CacheBuilder {
    fn default() -> Self {
        CacheBuilder {
            budget_bytes: None,
            page_bytes: 4096,
            policy: None,
            io_threads: 2,
            serving_thread: false,
            without_vectored_discard: false,
            publish: None,
            without_userfaultfd: false,
        }
    }
}

impl CacheBuilder {
    /// DRAM that the cache may use for pages.
    ///
    /// A few pages of it, at most 16 for each interface in use, are a reserve: a write-back may
    /// need one if the data of a device is a mapping of the same cache. Bookkeeping is not
    /// included: about 0.6 % of the budget with 4 KiB pages, up to 10 MiB of transfer buffers, and
    /// about 1 MiB for each visit under way ([`Mapping::visit_many`]), or what the device asks for
    /// ([`Device::bytes_in_flight`](aquifer_device::Device::bytes_in_flight)).
    pub fn budget_bytes(mut self, bytes: u64) -> Self {
        self.budget_bytes = Some(bytes);
        self
    }

    /// Size of a page: a power of two from 4 KiB (the default) to 64 KiB.
    ///
    /// Larger pages mean fewer faults and more I/O. With pages larger than 4 KiB the user backend
    /// serves all mappings, except those that request [`Backend::Kernel`](crate::Backend::Kernel),
    /// whose pages have the system's size.
    pub fn page_bytes(mut self, bytes: usize) -> Self {
        self.page_bytes = bytes;
        self
    }

    /// Chooses a built-in eviction policy.
    ///
    /// The user backend then serves all mappings, except those that request
    /// [`Backend::Kernel`](crate::Backend::Kernel), which has no policy. By default the cache's own
    /// pages are evicted by CLOCK.
    pub fn policy(mut self, kind: PolicyKind) -> Self {
        self.policy = Some(PolicySource::BuiltIn(kind));
        self
    }

    /// The application's own eviction policy, otherwise as [`CacheBuilder::policy`]. `make` is
    /// called for each pool of the cache.
    pub fn custom_policy(
        mut self,
        make: impl Fn() -> Box<dyn Policy> + Send + Sync + 'static,
    ) -> Self {
        self.policy = Some(PolicySource::Custom(Arc::new(make)));
        self
    }

    /// Number of threads that run prefetches and asynchronous calls; at least 1, by default 2.
    pub fn io_threads(mut self, threads: usize) -> Self {
        self.io_threads = threads.max(1);
        self
    }

    /// Serves the faults of user-backed mappings in threads of the cache instead of the faulting
    /// thread: for memory of custom and remote devices that is handed to system calls.
    ///
    /// System calls may then touch pages that are not resident, and threads may block SIGBUS. But
    /// it needs the privilege to serve the kernel's faults (`CAP_SYS_PTRACE`, or
    /// `vm.unprivileged_userfaultfd=1`), and a miss costs three more context switches.
    ///
    /// Up to 64 faults wait for devices at a time, besides those that wait for a frame; stores to pages that are resident wait
    /// for neither. A device must not use memory of the same cache, itself or by way of another cache: the first is refused with
    /// [`CacheError::UnderItself`].
    pub fn serving_thread(mut self, on: bool) -> Self {
        self.serving_thread = on;
        self
    }

    /// Behaves as on a kernel without vectored `MADV_DONTNEED` (before 6.13): for tests.
    pub fn without_vectored_discard(mut self) -> Self {
        self.without_vectored_discard = true;
        self
    }

    /// Makes this cache visible to `aquifer stat`.
    ///
    /// Its statistics are written once a second to a private directory of the user
    /// ([`publish`](crate::publish)), under `name`: letters, digits, `-`, `_` and `.`.
    pub fn publish(mut self, name: impl Into<String>) -> Self {
        self.publish = Some(name.into());
        self
    }

    /// Behaves as on a system that refuses userfaultfd: for tests.
    pub fn without_userfaultfd(mut self) -> Self {
        self.without_userfaultfd = true;
        self
    }

    /// Builds the cache and starts its threads.
    ///
    /// # Errors
    /// [`CacheError::Publish`] if the name is invalid or its file cannot be written. [`CacheError::Budget`]
    /// and [`CacheError::PageSize`] for invalid values; [`CacheError::Kernel`] if the system refuses threads
    /// or address space.
    pub fn build(self) -> Result<Cache> {
        let memory = aquifer_sys::cpu::memory_bytes();
        let options = Options {
            budget_bytes: self.budget_bytes.unwrap_or(memory / 4),
            max_budget_bytes: memory,
            page_bytes: self.page_bytes,
            needs_user_backend: self.policy.is_some() || self.page_bytes != SMALL_PAGE_BYTES,
            policy: self.policy.unwrap_or(PolicySource::BuiltIn(PolicyKind::LoopClock)),
            io_threads: self.io_threads,
            serving_thread: self.serving_thread,
            without_vectored_discard: self.without_vectored_discard,
            without_userfaultfd: self.without_userfaultfd,
        };
        options.check()?;
        let engine = Arc::new(Engine::new(options)?);
        let mut running = Running::new(engine);
        let io_threads = running.engine.options.io_threads;
        running.spawn(c"aquifer-evict", Engine::run_evictor)?;
        for _ in 0..io_threads {
            running.spawn(c"aquifer-io", Engine::run_worker)?;
        }
        if running.engine.options.serving_thread {
            Serving::start(&running)?;
        }
        if let Some(name) = &self.publish {
            let publisher = Arc::new(Publisher::new(name)?);
            publisher.write(&running.engine)?;
            running.publisher = Some(publisher.clone());
            running.spawn(c"aquifer-stat", move |engine| publisher.run(engine))?;
        }
        Ok(Cache { running: Arc::new(running) })
    }
}

/// A DRAM cache of a size that the application chooses, through which devices are mapped.
///
/// Cheap to clone; all clones are one cache. It lives as long as any clone, mapping or `Pages` of
/// it. Every method may be called from any thread. After a fork the child's copy is inert: calls
/// fail with [`CacheError::Forked`], destructors do nothing.
///
/// # Panics in the application's devices and policies
/// If a device panics in a read during a call, the page stays absent and the panic propagates to
/// the caller. A panic aborts the process inside the fault handler, in a thread of the cache (a
/// prefetch, an eviction, an asynchronous call), or in a device's write. After a panic in a policy
/// nothing is guaranteed.
#[derive(Clone)]
pub struct Cache {
    pub(crate) running: Arc<Running>,
}

impl Cache {
    /// Starts building a cache.
    pub fn builder() -> CacheBuilder {
        CacheBuilder::default()
    }

    /// Maps a file read-only. Shorthand for [`Cache::map`] with a [`FileDevice`].
    ///
    /// # Errors
    /// [`CacheError::Open`] if the file cannot be opened, or is no regular file or block device; those of
    /// [`Cache::map_with`].
    ///
    /// ```
    /// # let file = tempfile::NamedTempFile::new()?;
    /// # std::fs::write(file.path(), [7; 10_000])?;
    /// let cache = aquifer_cache::Cache::builder().budget_bytes(8 << 20).build()?;
    /// let mapping = cache.open(file.path())?;
    /// assert_eq!(mapping.get::<u8>(9_999)?, 7);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Mapping> {
        let file = FileDevice::open(path).map_err(|source| CacheError::Open { source })?;
        self.map(file)
    }

    /// Maps a file for reading and writing. Shorthand for [`Cache::map_mut`] with a [`FileDevice`].
    ///
    /// # Errors
    /// As for [`Cache::open`].
    pub fn open_mut(&self, path: impl AsRef<Path>) -> Result<MappingMut> {
        let file = FileDevice::options().writable(true).open(path);
        self.map_mut(file.map_err(|source| CacheError::Open { source })?)
    }

    /// Maps a whole device read-only. See [`Cache::map_with`].
    pub fn map(&self, device: impl Device) -> Result<Mapping> {
        self.map_with(device, MapOptions::new())
    }

    /// Maps a whole device for reading and writing. See [`Cache::map_with`].
    pub fn map_mut(&self, device: impl Device) -> Result<MappingMut> {
        self.map_mut_with(device, MapOptions::new())
    }

    /// Maps a device read-only.
    ///
    /// Takes the device, or an `Arc` of it where the program goes on using it.
    ///
    /// User-backed mappings of one device ([`Device::identity`]) share their pages: stores through
    /// one are visible through all. They have the same addresses, so a pointer of a read-only
    /// mapping is not protected against stores while there is a writable one, and
    /// [`Advice`](crate::Advice) about the pattern applies to all. Transfers use the device that
    /// was mapped first or, if that one is read-only, the one first mapped for writing.
    ///
    /// A cache is not kept coherent with other processes, or with other ways to write the file. A
    /// resident page does not change, and if two processes store to one page the last write-back
    /// wins. Let only one of them write.
    ///
    /// # Errors
    /// [`CacheError::AlreadyAttached`] if the process already uses the device, one of the two uses may
    /// write, and they cannot share pages. [`CacheError::Empty`], [`CacheError::ReadOnly`],
    /// [`CacheError::Alignment`] and [`CacheError::BackendUnsupported`] if the device or the options do not
    /// fit; [`CacheError::Vm`] and [`CacheError::Kernel`] if the system refuses.
    pub fn map_with(&self, device: impl Device, options: MapOptions) -> Result<Mapping> {
        self.check_process()?;
        Mapping::new(self.running.clone(), Arc::new(device), options, false)
    }

    /// Maps a device for reading and writing. See [`Cache::map_with`].
    ///
    /// # Errors
    /// As [`Cache::map_with`].
    pub fn map_mut_with(&self, device: impl Device, options: MapOptions) -> Result<MappingMut> {
        self.check_process()?;
        MappingMut::new(self.running.clone(), Arc::new(device), options)
    }

    /// Opens a device for access through page guards. The device may be read-only; all `Pages` of
    /// one device in this cache share their pages.
    ///
    /// # Errors
    /// As [`Cache::map_with`].
    pub fn pages(&self, device: impl Device) -> Result<Pages> {
        self.check_process()?;
        Pages::new(self.running.clone(), Arc::new(device))
    }

    /// Sets a new budget, while readers and writers run.
    ///
    /// Growing takes effect at once. After shrinking, resident memory follows within about a
    /// second, as fast as pinned and dirty pages allow. Devices with buffers of their own lower them
    /// ([`Device::claim_buffers`](aquifer_device::Device::claim_buffers)).
    ///
    /// # Errors
    /// [`CacheError::Budget`] for a budget below the minimum or above memory; [`CacheError::Kernel`] if the
    /// system refuses to commit more memory (`vm.overcommit_memory=2`, `RLIMIT_DATA`). On error
    /// nothing changes.
    pub fn resize(&self, budget_bytes: u64) -> Result<()> {
        self.check_process()?;
        self.running.engine.options.check_budget(budget_bytes)?;
        self.running.engine.set_budget(budget_bytes)
    }

    /// Whether a shrink has not yet given back all its memory.
    pub fn is_shrinking(&self) -> bool {
        self.running.engine.is_shrinking()
    }

    /// The cache's statistics. All zero in a child of a fork.
    pub fn stats(&self) -> Stats {
        self.running.engine.stats()
    }

    fn check_process(&self) -> Result<()> {
        if self.running.engine.mark.is_current() { Ok(()) } else { Err(CacheError::Forked) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, PageId};
    use aquifer_device::{FileDevice, MemoryDevice};

    const MIB: u64 = 1 << 20;

    /// Attaches a small device, touches it and returns what holds it.
    type Attach = fn(&Cache, &Arc<dyn Device>) -> Box<dyn std::any::Any>;

    const KINDS: [(&str, Attach); 3] = [
        ("user", |cache, _| {
            let mapping = cache.map_mut(MemoryDevice::new(MIB as usize).unwrap()).unwrap();
            mapping.touch_mut(5000).unwrap();
            Box::new(mapping)
        }),
        ("pages", |cache, _| {
            let pages = cache.pages(MemoryDevice::new(MIB as usize).unwrap()).unwrap();
            pages.get_mut(PageId(1)).unwrap()[0] = 1;
            Box::new(pages)
        }),
        ("kernel", |cache, file| {
            let options = MapOptions::new().backend(Backend::Kernel);
            let mapping = cache.map_with(file.clone(), options).unwrap();
            mapping.touch(5000).unwrap();
            Box::new(mapping)
        }),
    ];

    #[test]
    fn what_a_small_mapping_costs_does_not_depend_on_the_budget() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MIB).unwrap();
        let file: Arc<dyn Device> = Arc::new(FileDevice::open(file.path()).unwrap());
        for policy in [PolicyKind::Clock, PolicyKind::S3Fifo] {
            for (open, attach_open) in KINDS {
                for (small, attach_small) in KINDS {
                    let cache =
                        Cache::builder().budget_bytes(1024 * MIB).policy(policy).build().unwrap();
                    let engine = &cache.running.engine;
                    let looked_at =
                        || engine.mapped.looked_at_so_far() + engine.arena.looked_at_so_far();
                    let held = attach_open(&cache, &file);
                    for _ in 0..3 {
                        let before = looked_at();
                        drop(attach_small(&cache, &file));
                        while cache.is_shrinking() {
                            std::thread::yield_now();
                        }
                        let cost = looked_at() - before;
                        assert!(cost < 3000, "{small} beside {open}: {cost} frames and pages");
                    }
                    drop(held);
                }
            }
        }
    }
}
