//! The user and group of this process.

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

/// Returns the umask. It is read without changing it, which other threads would notice; where that
/// is not possible, the result is 0o022.
pub fn umask() -> u32 {
    const USUAL: u32 = 0o022;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|digits| u32::from_str_radix(digits.trim(), 8).ok()).unwrap_or(USUAL)
}
