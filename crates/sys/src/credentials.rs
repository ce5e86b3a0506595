//! Who this process acts as.

/// A user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// Whose files those are that this process makes.
pub fn effective() -> Credentials {
    // SAFETY: these calls take nothing and cannot fail.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    Credentials { uid, gid }
}
