//! How a pool is mounted.

use std::ffi::OsStr;

use aquifer_sys::mount::FuseMount;

/// What the kernel caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Cache {
    /// Names, attributes and pages, also those that were written: they reach the pool later, at the
    /// latest with `fsync` and when the file system is unmounted. A full pool is then an error of
    /// `close` or `fsync`. For a mount that alone changes the pool.
    #[default]
    WriteBack,
    /// Names, attributes and pages that were read or written, but each `write` reaches the pool
    /// before it returns. For a mount that alone changes the pool.
    WriteThrough,
    /// Nothing but pages of mappings: every call asks the pool. Other mounts and programs that use the
    /// library may change the pool at the same time, and each sees at once what the others did; a
    /// mapping does so after a while.
    Shared,
}

/// How a pool is mounted; at first as [`MountOptions::new`] says.
///
/// ```
/// use aquifer_fuse::{Cache, MountOptions};
///
/// let options = MountOptions::new().cache(Cache::WriteThrough).read_only(true);
/// ```
#[derive(Debug, Clone)]
pub struct MountOptions {
    pub(crate) cache: Cache,
    pub(crate) read_only: bool,
    pub(crate) allow_other: bool,
    pub(crate) xattrs: bool,
    pub(crate) suid: bool,
    pub(crate) dev: bool,
    pub(crate) exec: bool,
    pub(crate) source: String,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        MountOptions::new()
    }
}

impl MountOptions {
    /// Write-back, for the user that mounts it alone, with extended attributes.
    pub fn new() -> MountOptions {
        MountOptions {
            cache: Cache::default(),
            read_only: false,
            allow_other: false,
            xattrs: true,
            suid: false,
            dev: false,
            exec: true,
            source: "aquifer".to_owned(),
        }
    }

    /// Sets what the kernel caches.
    #[must_use]
    pub fn cache(self, cache: Cache) -> MountOptions {
        MountOptions { cache, ..self }
    }

    /// Sets whether nothing can be changed.
    #[must_use]
    pub fn read_only(self, read_only: bool) -> MountOptions {
        MountOptions { read_only, ..self }
    }

    /// Sets whether other users may use the mount. The kernel checks permissions in any case.
    #[must_use]
    pub fn allow_other(self, allow_other: bool) -> MountOptions {
        MountOptions { allow_other, ..self }
    }

    /// Sets whether there are extended attributes, and access control lists with them. Without them,
    /// the first write to each file takes one request less: the one for its capabilities.
    #[must_use]
    pub fn xattrs(self, xattrs: bool) -> MountOptions {
        MountOptions { xattrs, ..self }
    }

    /// Sets whether set-user-ID and set-group-ID bits of programs count; off at first. With it, a
    /// process that can write to the pool can become any user.
    #[must_use]
    pub fn suid(self, suid: bool) -> MountOptions {
        MountOptions { suid, ..self }
    }

    /// Sets whether device files can be opened; off at first. With it, a process that can write to
    /// the pool can reach any device.
    #[must_use]
    pub fn dev(self, dev: bool) -> MountOptions {
        MountOptions { dev, ..self }
    }

    /// Sets whether programs can be run; on at first.
    #[must_use]
    pub fn exec(self, exec: bool) -> MountOptions {
        MountOptions { exec, ..self }
    }

    /// Sets what `mount` shows as the source: usually the path of the pool.
    #[must_use]
    pub fn source(self, source: impl Into<String>) -> MountOptions {
        MountOptions { source: source.into(), ..self }
    }

    /// Whether others may change the pool as well.
    pub(crate) fn is_shared(&self) -> bool {
        self.cache == Cache::Shared
    }

    /// How long the kernel keeps names and attributes, in seconds: not at all, or without end.
    pub(crate) fn valid_s(&self) -> u64 {
        if self.is_shared() { 0 } else { 1 << 32 }
    }

    /// What the kernel is told, with this source.
    pub(crate) fn fuse_mount(&self, source: &OsStr) -> FuseMount {
        // The kernel takes no longer one. Unmounting needs none.
        let source = if source.len() < 256 { source } else { "aquifer".as_ref() };
        FuseMount {
            source: source.to_owned(),
            subtype: "aquifer".to_owned(),
            allow_other: self.allow_other,
            read_only: self.read_only,
            suid: self.suid,
            dev: self.dev,
            noexec: !self.exec,
        }
    }

    pub(crate) fn has_acls(&self) -> bool {
        self.xattrs
    }
}
