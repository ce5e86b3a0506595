//! The same memory limit for every contender: a control group around each contender's process.
//!
//! Out-of-core work is comparable only if page cache, private caches, page tables and bookkeeping
//! all count against one limit. Both versions of control groups do that; which one is used depends
//! on which of them has the memory controller on this machine:
//!
//! * version 1: a group below this process's group;
//! * version 2: a group that contains processes cannot have limited children, so the nearest
//!   writable ancestor that delegates the memory controller.
//!
//! Existing groups are not changed. The new group is removed when its owner is dropped, which is
//! why the bench turns signals into errors ([`crate::interrupt`]).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The reason why no process can be limited here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// The memory controller is not mounted, or not delegated to this process's group.
    #[error("no control group with a memory controller is reachable from this process")]
    NoController,
    /// There is one, but this user may not create groups in it.
    #[error(
        "no permission to create a memory control group in {path}; run as root, or under \
         `systemd-run --user --scope -p Delegate=yes`"
    )]
    NotPermitted {
        /// The last directory that was tried.
        path: PathBuf,
    },
    /// A group was created but could not be used.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The control file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The two generations of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    fn limit_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.limit_in_bytes",
            Self::V2 => "memory.max",
        }
    }
}

/// A parent group in which limited groups can be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limiter {
    version: Version,
    parent: PathBuf,
}

impl Limiter {
    /// Finds such a group and checks that it works by creating and removing a child.
    pub fn find() -> Result<Self, LimitError> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut error = LimitError::NoController;
        for candidate in candidates(&mounts, &groups) {
            match candidate.create(64 << 20) {
                Ok(_removed_at_once) => return Ok(candidate),
                // Keep the error that the user can do something about.
                Err(_) if matches!(error, LimitError::NotPermitted { .. }) => {}
                Err(next) => error = next,
            }
        }
        Err(error)
    }

    /// Returns the kind of group, for reports.
    pub fn describe(&self) -> &'static str {
        match self.version {
            Version::V1 => "memory control group (version 1)",
            Version::V2 => "memory control group (version 2)",
        }
    }

    /// Creates a group limited to `limit_bytes`, without swap.
    pub fn create(&self, limit_bytes: u64) -> Result<MemoryLimit, LimitError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only the number itself has to be unique.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("aquifer-bench-{}-{number}", std::process::id());
        let directory = self.parent.join(name);
        fs::create_dir(&directory)
            .map_err(|_| LimitError::NotPermitted { path: self.parent.clone() })?;
        let limit = MemoryLimit { directory };
        limit.write(self.version.limit_file(), limit_bytes)?;
        // Kernels without swap accounting lack these files; then there is nothing to disable.
        let _ = match self.version {
            Version::V1 => limit.write("memory.swappiness", 0),
            Version::V2 => limit.write("memory.swap.max", 0),
        };
        Ok(limit)
    }
}

/// A memory-limited control group, removed when dropped.
///
/// All processes in it must have been reaped before.
#[derive(Debug)]
pub struct MemoryLimit {
    directory: PathBuf,
}

impl MemoryLimit {
    /// Moves a process, and its future children, into the group.
    pub fn add(&self, process: u32) -> Result<(), LimitError> {
        self.write("cgroup.procs", u64::from(process))
    }

    fn write(&self, file: &str, value: u64) -> Result<(), LimitError> {
        let path = self.directory.join(file);
        fs::write(&path, value.to_string()).map_err(|source| LimitError::Write { path, source })
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // A process that has been reaped may still be in the group for a moment.
        for _ in 0..10_000 {
            match fs::remove_dir(&self.directory) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => std::thread::yield_now(),
                _ => return,
            }
        }
        eprintln!("warning: the control group {} could not be removed", self.directory.display());
    }
}

/// Returns the groups in which children might be created, best first.
fn candidates(mountinfo: &str, own_groups: &str) -> Vec<Limiter> {
    let mut found = Vec::new();
    for mount in mountinfo.lines().filter_map(Mount::parse) {
        let version = match mount.file_system {
            "cgroup" if mount.options.split(',').any(|option| option == "memory") => Version::V1,
            "cgroup2" => Version::V2,
            _ => continue,
        };
        let own = own_groups.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let matches = match version {
                Version::V1 => controllers.split(',').any(|controller| controller == "memory"),
                Version::V2 => controllers.is_empty(),
            };
            matches.then_some(path)
        });
        let Some(own) = own else { continue };
        let own = mount.directory_of(own);
        match version {
            Version::V1 => found.push(Limiter { version, parent: own }),
            Version::V2 => found.extend(
                own.ancestors()
                    .take_while(|directory| directory.starts_with(mount.point))
                    .map(|directory| Limiter { version, parent: directory.to_owned() }),
            ),
        }
    }
    // The controller belongs to one of the hierarchies; where both are mounted, version 1 has it or
    // its directory would not list it.
    found.sort_by_key(|limiter| limiter.version == Version::V2);
    found
}

/// The relevant fields of a line of `/proc/self/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
pub struct Mount<'a> {
    /// The part of the file system that is mounted.
    pub root: &'a str,
    /// The mount point.
    pub point: &'a str,
    /// Type of the file system.
    pub file_system: &'a str,
    /// The device, or its substitute.
    pub source: &'a str,
    /// Options of the file system, separated by commas.
    pub options: &'a str,
}

impl<'a> Mount<'a> {
    /// Parses one line; `None` if it does not have the documented form.
    pub fn parse(line: &'a str) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut rest = file_system.split(' ');
        let (file_system, source) = (rest.next()?, rest.next()?);
        Some(Self { root, point, file_system, source, options: rest.next().unwrap_or("") })
    }

    /// Returns the directory of a control group. In a container the mount shows only a part of the
    /// hierarchy.
    fn directory_of(&self, group: &str) -> PathBuf {
        let below = match self.root {
            "/" => group,
            root => group.strip_prefix(root).unwrap_or("/"),
        };
        Path::new(self.point).join(below.trim_start_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1_MOUNTS: &str = "\
        30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
        31 30 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
        32 30 0:28 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
        33 30 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

    #[test]
    fn version_one_makes_a_group_below_its_own() {
        let found = candidates(V1_MOUNTS, "4:memory:/jobs/7\n1:cpu:/\n0::/\n");
        let first =
            Limiter { version: Version::V1, parent: PathBuf::from("/sys/fs/cgroup/memory/jobs/7") };
        assert_eq!(found[0], first);
        assert_eq!(found[1].version, Version::V2);
    }

    #[test]
    fn version_two_climbs_to_the_mount() {
        let mounts = "29 23 0:25 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = candidates(mounts, "0::/user.slice/app.slice/run-1.scope\n");
        let parents: Vec<_> =
            found.iter().map(|limiter| limiter.parent.to_str().unwrap()).collect();
        assert_eq!(
            parents,
            [
                "/sys/fs/cgroup/user.slice/app.slice/run-1.scope",
                "/sys/fs/cgroup/user.slice/app.slice",
                "/sys/fs/cgroup/user.slice",
                "/sys/fs/cgroup"
            ]
        );
    }

    #[test]
    fn a_container_sees_its_part_of_the_hierarchy_as_the_whole() {
        let mounts = "40 30 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let found = candidates(mounts, "4:memory:/docker/abc/inner\n");
        assert_eq!(found[0].parent, Path::new("/sys/fs/cgroup/memory/inner"));
        let outside = candidates(mounts, "4:memory:/elsewhere\n");
        assert_eq!(outside[0].parent, Path::new("/sys/fs/cgroup/memory/"));
    }

    #[test]
    fn no_controller_no_candidate() {
        assert_eq!(candidates("", ""), []);
        assert_eq!(candidates("garbage\n1 2 3\n", "garbage\n"), []);
        assert_eq!(candidates(V1_MOUNTS, "1:cpu:/\n"), []);
    }

    #[test]
    fn a_limited_process_is_in_the_group_and_the_group_goes_away() {
        let limiter = match Limiter::find() {
            Ok(limiter) => limiter,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let limit = limiter.create(32 << 20).unwrap();
        let directory = limit.directory.clone();
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("cat runs everywhere");
        limit.add(child.id()).unwrap();
        let members = fs::read_to_string(directory.join("cgroup.procs")).unwrap();
        assert_eq!(members.trim(), child.id().to_string());
        let text = fs::read_to_string(directory.join(limiter.version.limit_file())).unwrap();
        assert_eq!(text.trim(), (32 << 20).to_string());
        drop(child.stdin.take());
        child.wait().unwrap();
        drop(limit);
        assert!(!directory.exists());
    }
}
