//! A pool that is mounted beside a tmpfs.

use std::fs;
use std::path::{Path, PathBuf};

use aquifer_check::{CheckOptions, Severity, check};
use aquifer_fs::Files;
use aquifer_fuse::{Cache, Mount, MountOptions};
use aquifer_pool::{Pool, PoolOptions};
use rustix::mount::MountFlags;

/// A directory with a pool, where it is mounted, and a tmpfs.
pub struct Place {
    mount: Option<Mount>,
    unmounted: Option<Unmounted>,
}

/// The same without the mount.
pub struct Unmounted {
    directory: tempfile::TempDir,
}

impl Unmounted {
    pub fn pool(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    fn mounted_at(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    /// Asserts that a check of the closed pool finds nothing.
    pub fn assert_sound(&self) {
        let report = check(&self.pool(), &CheckOptions::default()).expect("the pool can be read");
        assert_eq!(report.worst().filter(|worst| *worst > Severity::Note), None, "{report}");
    }

    pub fn mount(self, cache: Cache) -> Place {
        let files = Files::new(alone().open(self.pool()).expect("the pool opens"));
        let options = MountOptions::new().cache(cache).allow_other(true);
        let mount = Mount::in_process(files, &self.mounted_at(), &options);
        Place { mount: Some(mount.expect("it was mounted before")), unmounted: Some(self) }
    }
}

impl Place {
    /// Mounts a new pool. `None`, reported to the parent, where that is not possible.
    pub fn mount(pool_bytes: u64, cache: Cache) -> Option<Place> {
        let directory = tempfile::tempdir().expect("a directory");
        // Other users walk through it.
        let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(directory.path(), all).expect("its owner");
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("mounted")).expect("a directory of its own");
        fs::create_dir(at("tmpfs")).expect("a directory of its own");
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        if let Err(error) = rustix::mount::mount("tmpfs", at("tmpfs"), "tmpfs", flags, None) {
            println!("skipped: a tmpfs cannot be mounted: {error}");
            return None;
        }
        let pool = alone().create(at("pool"), pool_bytes).expect("a new pool");
        let options = MountOptions::new().cache(cache).allow_other(true).suid(true);
        match Mount::in_process(Files::new(pool), &at("mounted"), &options) {
            Ok(mount) => {
                // Of the namespace of this test: connections can be ended by their numbers.
                let at = Path::new("/sys/fs/fuse/connections");
                let none = MountFlags::empty();
                let _ = rustix::mount::mount("fusectl", at, "fusectl", none, None);
                let unmounted = Unmounted { directory };
                Some(Place { mount: Some(mount), unmounted: Some(unmounted) })
            }
            Err(error) => {
                println!("skipped: a pool cannot be mounted: {error}");
                None
            }
        }
    }

    pub fn mounted(&self) -> &Mount {
        self.mount.as_ref().expect("until it is unmounted")
    }

    fn unmounted(&self) -> &Unmounted {
        self.unmounted.as_ref().expect("until it is unmounted")
    }

    pub fn pool(&self) -> PathBuf {
        self.unmounted().pool()
    }

    pub fn root(&self) -> PathBuf {
        self.unmounted().mounted_at()
    }

    /// A directory in the mounted pool; a new one the first time.
    pub fn in_pool(&self, name: &str) -> PathBuf {
        there(&self.root().join(name))
    }

    pub fn on_tmpfs(&self, name: &str) -> PathBuf {
        there(&self.unmounted().directory.path().join("tmpfs").join(name))
    }

    /// Ends the mount in another way than by unmounting it.
    pub fn take_apart(mut self, end: impl FnOnce(Mount)) -> Unmounted {
        end(self.mount.take().expect("until it is unmounted"));
        self.unmounted.take().expect("until it is unmounted")
    }

    pub fn unmount(mut self) -> Unmounted {
        let mount = self.mount.take().expect("until it is unmounted");
        assert_eq!((mount.counts().malformed(), mount.counts().panics()), (0, 0));
        mount.unmount().expect("nothing uses it");
        self.unmounted.take().expect("until it is unmounted")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Something failed, and may still wait for the mount.
        if let Some(mount) = self.mount.take() {
            let _ = aquifer_sys::mount::abort(mount.connection());
        }
    }
}

/// As a pool that is mounted has to be opened.
pub fn alone() -> PoolOptions {
    Pool::options().sole("mounted by a test")
}

fn there(directory: &Path) -> PathBuf {
    if !directory.exists() {
        fs::create_dir(directory).expect("a new directory");
    }
    directory.to_path_buf()
}
