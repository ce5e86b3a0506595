//! The first request: which version and which features both sides use.
//!
//! | | write-back | write-through | shared |
//! |---|---|---|---|
//! | the kernel caches names, attributes and pages without end; sends no `OPEN`, `OPENDIR`, `FLUSH`; creates files by `MKNOD` | ✓ | ✓ | |
//! | the kernel also keeps what was written, and writes it later | ✓ | | |
//! | locks are asked for | | | ✓ |
//! | only mappings have pages, which go when a `GETATTR` shows another time or length | | | ✓ |
//!
//! Never used: `ATOMIC_O_TRUNC` (truncation is a `SETATTR` in all modes), export by NFS, security
//! contexts, passthrough (it keeps offsets, and the runs of a pool do not).

use std::io;

use zerocopy::FromZeros;

use crate::answer::{Answer, Delivered};
use crate::device::{Device, Received};
use crate::options::{Cache, MountOptions};
use crate::wire::{self, InitIn, InitOut, Operation, init};

/// The most data of one `READ` or `WRITE`.
pub const MAX_DATA_BYTES: usize = 1 << 20;
/// How many requests of the page cache may be under way, and from how many on it is asked to wait.
const BACKGROUND: (u16, u16) = (64, 48);

/// What both sides use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// The minor version.
    pub minor: u32,
    /// The features: of [`init`].
    pub flags: u64,
}

impl Agreed {
    /// Whether a feature is used.
    pub fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }
}

/// Waits for the first request and answers it.
///
/// # Errors
/// `EPROTO` for a kernel whose protocol is older than that of Linux 5.15; what the device says.
pub fn negotiate(device: &Device, buffer: &mut [u8], options: &MountOptions) -> io::Result<Agreed> {
    loop {
        let len = match device.receive(buffer)? {
            Received::Request(len) => len,
            Received::Unmounted | Received::Aborted => {
                return Err(io::Error::from_raw_os_error(libc::ENODEV));
            }
        };
        let request = wire::parse(&buffer[..len]).map_err(io::Error::other)?;
        let answer = Answer::new(device, request.unique);
        let Operation::Init(offered) = request.operation else {
            let _ = answer.error(libc::EIO);
            continue;
        };
        if offered.major < wire::MAJOR
            || offered.major == wire::MAJOR && offered.minor < wire::LEAST_MINOR
        {
            let _ = answer.error(libc::EPROTO);
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        let (agreed, out) = agree(&offered, options);
        match answer.value(&out) {
            Delivered::Yes if offered.major > wire::MAJOR => {} // It asks again, in our version.
            Delivered::Yes => return Ok(agreed),
            _ => return Err(io::Error::from_raw_os_error(libc::ENODEV)),
        }
    }
}

/// Features that are of use where the kernel may cache everything.
const ALONE: u64 = init::DO_READDIRPLUS
    | init::READDIRPLUS_AUTO
    | init::ASYNC_DIO
    | init::NO_OPEN_SUPPORT
    | init::NO_OPENDIR_SUPPORT
    | init::EXPLICIT_INVAL_DATA;

/// The features that a mount with these options uses where the kernel has them.
fn wanted(options: &MountOptions) -> u64 {
    use init::*;
    let mut wanted = ASYNC_READ
        | BIG_WRITES
        | PARALLEL_DIROPS
        | MAX_PAGES
        | INIT_EXT
        | DONT_MASK
        | HANDLE_KILLPRIV_V2
        | SETXATTR_EXT
        | CACHE_SYMLINKS
        | ABORT_ERROR
        | HAS_RESEND
        | NO_EXPORT_SUPPORT
        | CREATE_SUPP_GROUP;
    if options.has_acls() {
        wanted |= POSIX_ACL;
    }
    wanted |= match options.cache {
        Cache::WriteBack => ALONE | WRITEBACK_CACHE,
        Cache::WriteThrough => ALONE,
        // Attributes that come with names would be asked for again. With ASYNC_DIO, the kernel cuts
        // reads off at the length that it remembers.
        Cache::Shared => DIRECT_IO_ALLOW_MMAP | AUTO_INVAL_DATA | POSIX_LOCKS | FLOCK_LOCKS,
    };
    wanted
}

fn agree(offered: &InitIn, options: &MountOptions) -> (Agreed, InitOut) {
    let offers = u64::from(offered.flags);
    // The second word counts only where the first one says so.
    let more = if offers & init::INIT_EXT != 0 { u64::from(offered.flags2) << 32 } else { 0 };
    let flags = wanted(options) & (offers | more);
    let minor = offered.minor.min(wire::NEWEST_MINOR);
    let out = InitOut {
        major: wire::MAJOR,
        minor,
        max_readahead: MAX_DATA_BYTES as u32,
        flags: flags as u32,
        flags2: (flags >> 32) as u32,
        max_background: BACKGROUND.0,
        congestion_threshold: BACKGROUND.1,
        max_write: MAX_DATA_BYTES as u32,
        max_pages: (MAX_DATA_BYTES / 4096) as u16,
        // Times have nanoseconds.
        time_gran: 1,
        ..InitOut::new_zeroed()
    };
    (Agreed { minor, flags }, out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_kernel_offers_is_used() {
        let all = InitIn { flags: u32::MAX, flags2: u32::MAX, minor: 99, ..InitIn::new_zeroed() };
        let (agreed, out) = agree(&all, &MountOptions::new());
        assert!(agreed.has(init::WRITEBACK_CACHE) && agreed.has(init::HAS_RESEND));
        assert_eq!((out.minor, agreed.flags), (wire::NEWEST_MINOR, wanted(&MountOptions::new())));

        let old = InitIn { flags: !(init::INIT_EXT as u32), minor: 35, ..all };
        let (agreed, out) = agree(&old, &MountOptions::new());
        assert!(!agreed.has(init::HAS_RESEND) && agreed.has(init::NO_OPEN_SUPPORT));
        assert_eq!((out.minor, out.flags2), (35, 0));
    }

    #[test]
    fn write_through_and_mounts_without_attributes_use_less() {
        let through = MountOptions::new().cache(Cache::WriteThrough);
        assert_eq!(wanted(&MountOptions::new()) ^ wanted(&through), init::WRITEBACK_CACHE);
        let shared = wanted(&MountOptions::new().cache(Cache::Shared));
        assert_eq!(shared & (init::WRITEBACK_CACHE | ALONE), 0);
        let plain = MountOptions::new().xattrs(false);
        assert_eq!(wanted(&MountOptions::new()) ^ wanted(&plain), init::POSIX_ACL);
    }
}
