//! Metadata: `GETATTR`, `STATX`, `SETATTR`, `STATFS`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_fs::node::{Node, SetAttributes};
use aquifer_fs::{FileTimes, Metadata};
use zerocopy::FromZeros;

use super::{PoolFs, Result};
use crate::wire::{
    Attributes, AttributesOut, Request, SetAttributesIn, Space, Statx, StatxOut, StatxTime, set,
};

const BLOCK_BYTES: u64 = 4096;
/// How long the kernel keeps attributes that will change without its doing, in seconds.
const SHORT_S: u64 = 1;
/// The longest name, in bytes.
const NAME_BYTES: u32 = 255;

/// A device number, as the kernel writes it into 32 bits.
pub(super) fn encode_device(device: u64) -> u32 {
    let (major, minor) = (libc::major(device), libc::minor(device));
    minor & 0xff | major << 8 | (minor & !0xff) << 12
}

/// The reverse of [`encode_device`].
pub(super) fn decode_device(device: u32) -> u64 {
    libc::makedev((device & 0xf_ff00) >> 8, device & 0xff | (device >> 12) & 0xf_ff00)
}

/// A regular file has at least one block of 512 bytes. Programs take a file without blocks for one hole
/// (`tar -S` does not even look), and pages that wait in the kernel's cache have none in the pool.
fn blocks(found: &Metadata) -> u64 {
    found.blocks().max(u64::from(found.is_file()))
}

pub(super) fn of(found: &Metadata) -> Attributes {
    Attributes {
        ino: found.ino(),
        size: found.len(),
        blocks: blocks(found),
        atime: found.atime() as u64,
        mtime: found.mtime() as u64,
        ctime: found.ctime() as u64,
        atime_nsec: found.atime_nsec() as u32,
        mtime_nsec: found.mtime_nsec() as u32,
        ctime_nsec: found.ctime_nsec() as u32,
        mode: found.mode(),
        nlink: found.nlink() as u32,
        uid: found.uid(),
        gid: found.gid(),
        rdev: encode_device(found.rdev()),
        blksize: BLOCK_BYTES as u32,
        flags: 0,
    }
}

fn statx_of(found: &Metadata) -> Statx {
    let time = |seconds, nanoseconds: i64| StatxTime {
        seconds,
        nanoseconds: nanoseconds as u32,
        reserved: 0,
    };
    let since_1970 = |time: SystemTime| match time.duration_since(UNIX_EPOCH) {
        Ok(since) => since.as_nanos() as i64,
        Err(before) => -(before.duration().as_nanos() as i64),
    };
    let created_ns = found.created().map_or(0, since_1970);
    let immutable = libc::STATX_ATTR_IMMUTABLE as u64;
    Statx {
        mask: libc::STATX_BASIC_STATS | libc::STATX_BTIME,
        blksize: BLOCK_BYTES as u32,
        attributes: if found.is_immutable() { immutable } else { 0 },
        attributes_mask: immutable,
        nlink: found.nlink() as u32,
        uid: found.uid(),
        gid: found.gid(),
        mode: found.mode() as u16,
        ino: found.ino(),
        size: found.len(),
        blocks: blocks(found),
        atime: time(found.atime(), found.atime_nsec()),
        btime: time(created_ns.div_euclid(1_000_000_000), created_ns.rem_euclid(1_000_000_000)),
        ctime: time(found.ctime(), found.ctime_nsec()),
        mtime: time(found.mtime(), found.mtime_nsec()),
        rdev_major: libc::major(found.rdev()),
        rdev_minor: libc::minor(found.rdev()),
        ..Statx::new_zeroed()
    }
}

/// A time as the kernel sends it: seconds since 1970, which may be negative.
fn time(seconds: u64, nanoseconds: u32) -> SystemTime {
    let (seconds, nanoseconds) =
        (seconds as i64, Duration::from_nanos(u64::from(nanoseconds.min(999_999_999))));
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let at =
        if seconds < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    at.and_then(|at| at.checked_add(nanoseconds)).unwrap_or(UNIX_EPOCH)
}

/// What a `SETATTR` sets.
fn wanted(from: &SetAttributesIn) -> SetAttributes {
    let has = |flag| from.valid & flag != 0;
    let (mut wanted, mut times) = (SetAttributes::new(), FileTimes::new());
    if has(set::MODE) {
        wanted = wanted.mode(from.mode);
    }
    if has(set::UID | set::GID) {
        wanted = wanted.owner(has(set::UID).then_some(from.uid), has(set::GID).then_some(from.gid));
    }
    if has(set::SIZE) {
        wanted = wanted.len(from.size);
    }
    if has(set::ATIME) {
        times = times.set_accessed(time(from.atime, from.atime_nsec));
    }
    if has(set::MTIME) {
        times = times.set_modified(time(from.mtime, from.mtime_nsec));
    }
    if has(set::ATIME | set::MTIME) {
        wanted = wanted.times(times);
    }
    if has(set::ATIME_NOW) {
        wanted = wanted.accessed_now();
    }
    if has(set::MTIME_NOW) {
        wanted = wanted.modified_now();
    }
    if has(set::CTIME) {
        wanted = wanted.changed(time(from.ctime, from.ctime_nsec));
    }
    if has(set::KILL_SUIDGID) {
        wanted = wanted.clear_set_id();
    }
    wanted
}

impl PoolFs {
    /// How long the kernel may keep the attributes of an inode, in seconds.
    pub(super) fn attributes_valid_s(&self, number: u64) -> u64 {
        let valid_s = self.options.valid_s();
        if self.handles.has_room_ahead(number) { valid_s.min(SHORT_S) } else { valid_s }
    }

    /// What `look` returns, and how long the kernel may keep it. Meanwhile the file may be closed, or
    /// be given room ahead: either way it may have more blocks than it will have.
    fn for_a_while<T>(&self, number: u64, look: impl FnOnce() -> Result<T>) -> Result<(u64, T)> {
        let before = self.attributes_valid_s(number);
        let found = look()?;
        Ok((before.min(self.attributes_valid_s(number)), found))
    }

    fn attributes_out(
        &self,
        number: u64,
        look: impl FnOnce() -> Result<Metadata>,
    ) -> Result<AttributesOut> {
        let (valid, found) = self.for_a_while(number, look)?;
        Ok(AttributesOut { valid, valid_nsec: 0, padding: 0, attributes: of(&found) })
    }

    pub(super) fn attributes(&self, node: u64) -> Result<AttributesOut> {
        self.attributes_of(self.node(node)?)
    }

    pub(super) fn attributes_of(&self, node: Node) -> Result<AttributesOut> {
        self.attributes_out(node.number, || Ok(self.nodes.metadata(node)?))
    }

    pub(super) fn statx(&self, node: u64) -> Result<StatxOut> {
        let node = self.node(node)?;
        let (valid, found) = self.for_a_while(node.number, || Ok(self.nodes.metadata(node)?))?;
        let statx = statx_of(&found);
        Ok(StatxOut { valid, valid_nsec: 0, flags: 0, spare: [0; 2], statx })
    }

    pub(super) fn set(
        &self,
        request: &Request<'_>,
        set: &SetAttributesIn,
    ) -> Result<AttributesOut> {
        let node = self.node(request.node)?;
        if let Some(found) = self.times_of_removed(node, set)? {
            return Ok(found);
        }
        let by = self.changing(request);
        self.attributes_out(node.number, || Ok(self.nodes.set(node, &wanted(set), &by)?))
    }

    /// The answer to a change of times that nothing can see, and that is not done: of a file without
    /// names, which gets none again. The kernel, which has the times itself, sends one at each removal,
    /// and waits for it.
    fn times_of_removed(&self, node: Node, set: &SetAttributesIn) -> Result<Option<AttributesOut>> {
        const TIMES: u32 = set::MTIME | set::CTIME | set::FH;
        let is_seen = !self.kernel_has_times() || !self.table.is_removed(node.number);
        if is_seen || set.valid & !TIMES != 0 {
            return Ok(None);
        }
        let found = self.attributes_out(node.number, || Ok(self.nodes.metadata(node)?))?;
        Ok((found.attributes.nlink == 0).then_some(found))
    }

    pub(super) fn space(&self) -> Result<Space> {
        let space = self.files.space()?;
        let free = space.free_bytes / BLOCK_BYTES;
        Ok(Space {
            blocks: space.total_bytes / BLOCK_BYTES,
            bfree: free,
            bavail: free,
            files: space.total_slots,
            ffree: space.free_slots,
            bsize: BLOCK_BYTES as u32,
            namelen: NAME_BYTES,
            frsize: BLOCK_BYTES as u32,
            ..Space::new_zeroed()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_the_kernels_encoding() {
        for (major, minor) in [(0, 0), (1, 3), (8, 255), (4095, 0xf_ffff), (259, 1 << 10)] {
            let device = libc::makedev(major, minor);
            assert_eq!(decode_device(encode_device(device)), device, "{major}:{minor}");
        }
        // As `new_encode_dev` has it.
        assert_eq!(encode_device(libc::makedev(0x12, 0x34567)), 0x3450_1267);
    }

    #[test]
    fn times_before_1970_and_beyond_all_bounds_are_times() {
        let second_before = UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(time(-1_i64 as u64, 5), second_before + Duration::from_nanos(5));
        assert_eq!(time(1, u32::MAX), UNIX_EPOCH + Duration::from_nanos(1_999_999_999));
        let _ = (time(i64::MAX as u64, 0), time(i64::MIN as u64, u32::MAX));
    }
}
