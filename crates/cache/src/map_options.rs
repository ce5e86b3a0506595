//! The options of a mapping, and advice about its accesses.

/// The mechanism that serves a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// The cheapest backend on this machine that supports the mapping.
    ///
    /// The user backend for writable mappings and for devices other than regular files. For a
    /// read-only mapping of a regular file, the kernel backend, unless misses measured clearly
    /// cheaper with the user backend ([`calibrate`](crate::calibrate)), the cache was built with an
    /// eviction policy or a page size, which only the user backend supports
    /// ([`CacheBuilder::policy`](crate::CacheBuilder::policy)), or the cache already has a
    /// user-backed mapping of the device.
    #[default]
    Auto,
    /// A kernel file mapping whose residency is kept below the budget. Read-only, regular files.
    /// Its pages have the system's size and are dropped in address order, whatever the cache's
    /// policy and page size are.
    Kernel,
    /// Faults served by the cache: writable mappings, any device, exact budget, the cache's
    /// eviction policy.
    User,
}

impl Backend {
    /// The backend's name.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Kernel => "kernel",
            Backend::User => "user",
        }
    }
}

/// The options of a mapping.
#[derive(Debug, Clone, Default)]
pub struct MapOptions {
    pub(crate) backend: Backend,
    pub(crate) zeros_for_missing: bool,
}

impl MapOptions {
    /// The backend is chosen by the cache.
    pub fn new() -> MapOptions {
        MapOptions::default()
    }

    /// Forces a backend.
    pub fn backend(mut self, backend: Backend) -> MapOptions {
        self.backend = backend;
        self
    }

    /// Answers bare loads of bytes that the file does not have any more, or that cannot be read, with zeros instead of SIGBUS;
    /// off by default. [`Mapping::take_missed_fault`](crate::Mapping::take_missed_fault) returns the error that was avoided,
    /// and ends the zeros. For run-times that cannot survive the signal, such as interpreters. Until then a user-backed mapping
    /// answers loads of other absent pages with zeros as well, without a wait for the device.
    ///
    /// For mappings to read. A user-backed one shares its memory with the others of the device in the same cache: bare loads of those
    /// find zeros as well, and as long as any of them lives, the device cannot be mapped for writing in that cache. Where one of them
    /// was made for writing, the option does nothing.
    pub fn zeros_for_missing(mut self, on: bool) -> MapOptions {
        self.zeros_for_missing = on;
        self
    }
}

/// Advice about accesses to a range, with the meaning that mmap users expect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Detect the pattern. Applies to the whole mapping.
    Normal,
    /// The mapping is read in order: read far ahead, from the first miss on. Applies to the whole
    /// mapping.
    Sequential,
    /// The mapping is read at random: never read ahead. Applies to the whole mapping.
    Random,
    /// The range is needed soon: start loading it in the background, as [`Mapping::prefetch`](crate::Mapping::prefetch).
    WillNeed,
    /// The range is not needed: give its memory back now, except pinned pages. Unlike
    /// `MADV_DONTNEED` on private memory this loses nothing: dirty pages are written back first,
    /// and a later access loads the page again.
    DontNeed,
    /// The range is not needed soon: its pages are the next victims.
    Cold,
}
