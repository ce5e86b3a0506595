//! Identifies the lifetime of a file's page cache, that is, of writes that are not durable.
//!
//! A write that is not durable is in the page cache, and survives every process. It is lost with
//! the cache: at a reboot, and also earlier, when a file system is unmounted after its device has
//! failed, was removed or was shut down. So the boot ID alone does not tell whether the write still
//! exists. These values do:
//!
//! | file is on | the cache is the same while these are unchanged |
//! |---|---|
//! | a file system on a disk | the boot, the device, and the *instance* of the file system, created by a mount and ended by the last unmount; with it the sequence number of the disk, where the kernel reports it |
//! | a file system in memory | the boot and the device: memory and file end together |
//! | a block device | the boot, the device, and the sequence number of the disk, which increases with each attachment |
//! | a device that is memory | the boot and the device |
//!
//! ext4, XFS and F2FS have a sysfs directory for each instance; its inode number is never reused,
//! and is the same for all processes. For other file systems the unique mount ID (`statx`, Linux
//! 6.8) stands for the instance. That is safe, since a mount never changes its file system, but
//! each mount namespace has separate mounts: a process in another container than the writer gets
//! another number.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use rustix::ioctl::{Getter, Opcode, ioctl, opcode};

use crate::{boot, file_system};

/// `BLKGETDISKSEQ`.
const DISK_SEQUENCE: Opcode = opcode::read::<u64>(0x12, 128);
const SYSFS: u64 = 0x6265_6572;

/// Returns numbers that stay the same while non-durable writes to the file exist, in every process.
/// `None` if they are unknown.
///
/// On a disk the numbers never repeat after the writes are lost. In memory the file is lost as
/// well; a later file system in memory may have the same numbers, but has other files.
pub fn of(file: BorrowedFd<'_>) -> Option<[u64; 5]> {
    let boot = Some(boot::id()).filter(|boot| *boot != 0)?;
    let status = status(file).ok()?;
    let device = libc::makedev(status.stx_dev_major, status.stx_dev_minor);
    let special = libc::makedev(status.stx_rdev_major, status.stx_rdev_minor);
    Some(match u32::from(status.stx_mode) & libc::S_IFMT {
        libc::S_IFBLK => [boot, 1, special, 0, disk_sequence_of(file)?],
        libc::S_IFCHR => [boot, 2, special, 0, 0],
        _ => {
            let magic = file_system::magic(file).ok()?;
            if file_system::in_memory(magic).is_some() {
                return Some([boot, 3, device, 0, 0]);
            }
            let sequence = disk_sequence(device).unwrap_or(0);
            match (instance(magic, device), mount(&status)) {
                (Some(instance), _) => [boot, 4, device, instance, sequence],
                (None, Some(mount)) => [boot, 5, device, mount, sequence],
                (None, None) => return None,
            }
        }
    })
}

fn status(file: BorrowedFd<'_>) -> io::Result<libc::statx> {
    // No times: see `residency::ask`.
    let mask = libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_MNT_ID_UNIQUE;
    // SAFETY: all-zero is a valid `statx`.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let (fd, flags) = (file.as_raw_fd(), libc::AT_EMPTY_PATH);
    // SAFETY: the empty path with AT_EMPTY_PATH names the descriptor; `status` outlives the call.
    let result = unsafe { libc::statx(fd, c"".as_ptr(), flags, mask, &raw mut status) };
    crate::check(result.into())?;
    Ok(status)
}

/// Returns the mount ID that no other mount has had since boot.
fn mount(status: &libc::statx) -> Option<u64> {
    (status.stx_mask & libc::STATX_MNT_ID_UNIQUE != 0).then_some(status.stx_mnt_id)
}

/// Returns a number unique among all instances of this kind of file system mounted since boot.
fn instance(magic: u64, device: u64) -> Option<u64> {
    let kind = file_system::with_instances_in_sysfs(magic)?;
    let (major, minor) = (libc::major(device), libc::minor(device));
    let disk = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let directory = File::open(format!("/sys/fs/{kind}/{}", disk.file_name()?.to_str()?)).ok()?;
    // Other file systems reuse inode numbers.
    let is_sysfs = file_system::magic(directory.as_fd()).ok()? == SYSFS;
    is_sysfs.then(|| directory.metadata().map(|found| found.ino()).ok())?
}

/// Returns the disk's sequence number: how many disks were attached up to this one.
fn disk_sequence_of(device: BorrowedFd<'_>) -> Option<u64> {
    // SAFETY: the request writes one `u64`.
    let get = unsafe { Getter::<DISK_SEQUENCE, u64>::new() };
    // SAFETY: as above.
    unsafe { ioctl(device, get) }.ok().filter(|sequence| *sequence != 0)
}

/// Returns the sequence number of the disk under a file system; for a partition, that of the whole
/// disk.
fn disk_sequence(device: u64) -> Option<u64> {
    let place = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
    let text = ["diskseq", "../diskseq"]
        .iter()
        .find_map(|name| std::fs::read_to_string(format!("{place}/{name}")).ok())?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_file_system_have_one_life() {
        let directory = tempfile::tempdir().unwrap();
        let [one, other] =
            ["one", "other"].map(|name| File::create(directory.path().join(name)).unwrap());
        let Some(life) = of(one.as_fd()) else {
            return eprintln!("skipped: nothing is known of the file system of temporary files");
        };
        assert_eq!(of(other.as_fd()), Some(life));
        let in_memory = File::from(memory_file());
        assert_ne!(of(in_memory.as_fd()), Some(life));
    }

    fn memory_file() -> std::os::fd::OwnedFd {
        use std::os::fd::FromRawFd;
        // SAFETY: a NUL-terminated name.
        let fd = unsafe { libc::memfd_create(c"life".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: just made, so nothing else owns the descriptor.
        unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) }
    }
}
