//! The system calls of the benches about ordinary files.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use super::check;

/// Opens a directory as a starting point for [`open_at`].
pub fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: a terminated string that outlives the call.
    let fd = check(unsafe { libc::open(path.as_ptr(), flags) })?;
    // SAFETY: the call succeeded, so this is a fresh descriptor with no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a file in that directory for reading.
pub fn open_at(directory: &OwnedFd, name: &CStr) -> io::Result<File> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: a terminated string that outlives the call.
    let fd = check(unsafe { libc::openat(directory.as_raw_fd(), name.as_ptr(), flags) })?;
    // SAFETY: the call succeeded, so this is a fresh descriptor with no other owner.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// The length of a file in that directory, by `fstatat`.
pub fn len_at(directory: &OwnedFd, name: &CStr) -> io::Result<u64> {
    // SAFETY: all-zero is a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    let (directory, flags) = (directory.as_raw_fd(), libc::AT_SYMLINK_NOFOLLOW);
    // SAFETY: a terminated string and a structure of the right type, which outlive the call.
    check(unsafe { libc::fstatat(directory, name.as_ptr(), &raw mut stat, flags) })?;
    Ok(stat.st_size as u64)
}

/// Raises this process's limit of open files to its maximum: benches keep many open.
pub fn raise_file_limit() -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a structure of the right type that outlives the call.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    Ok(())
}

/// Restricts this thread, and the threads it will start, to `count` of its allowed processors.
pub fn keep_to_processors(count: usize) -> io::Result<()> {
    // SAFETY: all-zero is a valid `cpu_set_t`: no processor.
    let mut allowed: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: a structure of that size that outlives the call.
    check(unsafe { libc::sched_getaffinity(0, size_of_val(&allowed), &raw mut allowed) })?;
    // SAFETY: as above.
    let mut chosen: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let all = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: the processor is below the size of the set.
    let usable = all.filter(|&processor| unsafe { libc::CPU_ISSET(processor, &allowed) });
    for processor in usable.take(count) {
        // SAFETY: the processor is below the size of the set.
        unsafe { libc::CPU_SET(processor, &mut chosen) };
    }
    // SAFETY: a structure of that size that outlives the call.
    check(unsafe { libc::sched_setaffinity(0, size_of_val(&chosen), &raw const chosen) })?;
    Ok(())
}

/// What processes used so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Time on a processor, in user space and in the kernel.
    pub cpu: Duration,
    /// Page faults, with and without I/O.
    pub faults: u64,
}

impl Usage {
    /// What this process used.
    pub fn of_this_process() -> io::Result<Self> {
        Self::of(libc::RUSAGE_SELF)
    }

    /// What the children used that this process has waited for.
    pub fn of_ended_children() -> io::Result<Self> {
        Self::of(libc::RUSAGE_CHILDREN)
    }

    fn of(processes: libc::c_int) -> io::Result<Self> {
        // SAFETY: all-zero is a valid `rusage`.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: a structure of the right type that outlives the call.
        check(unsafe { libc::getrusage(processes, &raw mut usage) })?;
        let duration = |time: libc::timeval| {
            Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
        };
        Ok(Self {
            cpu: duration(usage.ru_utime) + duration(usage.ru_stime),
            faults: (usage.ru_minflt + usage.ru_majflt) as u64,
        })
    }

    /// What was used since `before`.
    pub fn since(self, before: Self) -> Self {
        Self { cpu: self.cpu.saturating_sub(before.cpu), faults: self.faults - before.faults }
    }
}

/// Bytes written so far to the device that holds `file`, by all processes; `None` if the files have
/// no block device, as in memory or on a network.
pub fn device_written_bytes(file: &File) -> io::Result<Option<u64>> {
    /// The unit of these counters, independent of the device's sector size.
    const SECTOR_BYTES: u64 = 512;
    let device = file.metadata()?.dev();
    let path = format!("/sys/dev/block/{}:{}/stat", libc::major(device), libc::minor(device));
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    // Documentation/block/stat.rst: the seventh number is sectors written.
    Ok(text
        .split_whitespace()
        .nth(6)
        .and_then(|sectors| sectors.parse::<u64>().ok())
        .map(|sectors| sectors * SECTOR_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_file_is_found_in_its_directory() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::fs::write(directory.path().join("name"), "content").unwrap();
        let opened = open_directory(directory.path()).unwrap();
        let mut text = String::new();
        open_at(&opened, c"name").unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        let missing = open_at(&opened, c"other").unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_thread_keeps_to_one_processor() {
        std::thread::spawn(|| {
            keep_to_processors(1).unwrap();
            assert_eq!(std::thread::available_parallelism().unwrap().get(), 1);
        })
        .join()
        .unwrap();
    }
}
