//! How a device is mapped, and what the application says about its accesses.

/// Which mechanism serves a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// What is cheapest on this machine and keeps the promise of the mapping.
    ///
    /// The kernel backend for read-only mappings of regular files, unless misses measured clearly cheaper
    /// with the user backend ([`calibrate`](crate::calibrate)), the cache was built with an eviction policy or a
    /// page size that only the user backend keeps to ([`CacheBuilder::policy`](crate::CacheBuilder::policy)), or
    /// it has a user-backed mapping of the device already; the user backend for everything else.
    #[default]
    Auto,
    /// A kernel file mapping whose residency is kept under the budget. Read-only, regular files. Its pages are
    /// the system's, and leave in the order of their addresses, whatever the cache's policy and page size are.
    Kernel,
    /// Faults served by the cache: writable mappings, any device, exact budget, own policy.
    User,
}

impl Backend {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Kernel => "kernel",
            Backend::User => "user",
        }
    }
}

/// How a device is mapped.
#[derive(Debug, Clone, Default)]
pub struct MapOptions {
    pub(crate) writable: bool,
    pub(crate) backend: Backend,
}

impl MapOptions {
    /// Read-only, backend chosen by the cache.
    pub fn new() -> MapOptions {
        MapOptions::default()
    }

    /// Whether stores are allowed.
    pub fn writable(mut self, writable: bool) -> MapOptions {
        self.writable = writable;
        self
    }

    /// Forces a backend.
    pub fn backend(mut self, backend: Backend) -> MapOptions {
        self.backend = backend;
        self
    }
}

/// What the application says about its accesses to a range, with the meaning mmap users expect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Find the pattern out. Holds for the whole mapping.
    Normal,
    /// The mapping is read in order: read far ahead, from the first miss on. Holds for the whole mapping.
    Sequential,
    /// The mapping is read at random: never read ahead. Holds for the whole mapping.
    Random,
    /// The range is wanted soon: start loading it in the background.
    WillNeed,
    /// The range is not wanted: give its memory back now, but for pinned pages. Unlike `MADV_DONTNEED` on
    /// private memory nothing is lost: dirty pages are written back first, and a later access loads the
    /// page again.
    DontNeed,
    /// The range is not wanted soon: its pages are the next victims.
    Cold,
}
