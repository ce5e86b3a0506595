//! The user and group of this process.

use std::fs::File;
use std::io::Read;

/// A user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// Returns the owner that new files of this process get.
pub fn effective() -> Credentials {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    Credentials { uid: uid.as_raw(), gid: gid.as_raw() }
}

/// Returns the supplementary groups of this process.
pub fn groups() -> Vec<u32> {
    let groups = rustix::process::getgroups().unwrap_or_default();
    groups.into_iter().map(|group| group.as_raw()).collect()
}

/// Whether this thread may set the set-group-ID bit of files of any group: `CAP_FSETID`.
pub fn may_set_id() -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::FSETID))
}

/// Returns the umask. It is read without changing it, which other threads would notice; where that
/// is not possible, the result is 0o022.
pub fn umask() -> u32 {
    const USUAL: u32 = 0o022;
    // The second line: one read returns it. More would make the kernel compute the rest again.
    let mut status = [0; 4096];
    let len = File::open("/proc/self/status").and_then(|mut file| file.read(&mut status));
    let lines = status[..len.unwrap_or(0)].split(|&byte| byte == b'\n');
    let digits = lines.filter_map(|line| line.strip_prefix(b"Umask:")).next();
    let digits = digits.and_then(|digits| str::from_utf8(digits).ok());
    digits.and_then(|digits| u32::from_str_radix(digits.trim(), 8).ok()).unwrap_or(USUAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_umask_is_that_of_the_process() {
        // Other tests of this process may create files meanwhile, so it is set in a child.
        for mask in [0o000_u32, 0o027, 0o777] {
            // SAFETY: the child opens and reads a file, and leaves by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: no preconditions.
                unsafe { libc::umask(mask) };
                let is_it = umask() == mask;
                // SAFETY: ends the child without running the parent's exit handlers.
                unsafe { libc::_exit(i32::from(!is_it)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child made above; `status` outlives the call.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "umask {mask:o}");
        }
    }
}
