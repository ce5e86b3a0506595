//! A custom device: two devices that hold the same bytes.
//!
//! Every write goes to both. A read is served by one and repeated on the other if it fails; bytes
//! that only the second could read are written back to the first. The program makes a pair of
//! files, breaks one of them with a [`Faulty`] decorator, and shows that callers are not affected.
//!
//! ```text
//! cargo run -p aquifer-device --example custom_device
//! ```
//!
//! What to consider when writing a device:
//! * the contract in the crate's documentation: no short transfers, no writes past the end, no
//!   allocation and no lock in `read_at`;
//! * a failed write is reported, even if one copy was written: the caller keeps its data and
//!   retries;
//! * `run` is optional. The default performs a batch one transfer at a time, which is right here,
//!   because a read that fails has to be repeated on the other device. `dax` and `page_cache_file`
//!   stay `None`: stores through a mapping of one copy would not reach the other.

use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_device::{
    AlignedBuffer, Device, DeviceError, Fault, FaultRule, FaultTarget, Faulty, FileDevice,
};

/// Two devices with the same content.
struct Mirror<A, B> {
    first: A,
    second: B,
    repaired: AtomicU64,
}

impl<A: Device, B: Device> Mirror<A, B> {
    fn new(first: A, second: B) -> Self {
        Mirror { first, second, repaired: AtomicU64::new(0) }
    }
}

impl<A: Device, B: Device> Device for Mirror<A, B> {
    fn name(&self) -> &str {
        self.first.name()
    }

    fn len_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.first.len_bytes()?.min(self.second.len_bytes()?))
    }

    fn alignment_bytes(&self) -> usize {
        self.first.alignment_bytes().max(self.second.alignment_bytes())
    }

    fn is_writable(&self) -> bool {
        self.first.is_writable() && self.second.is_writable()
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        match self.first.read_at(offset_bytes, buffer) {
            Ok(got_bytes) => Ok(got_bytes),
            Err(_) => {
                let got_bytes = self.second.read_at(offset_bytes, buffer)?;
                // A disk remaps an unreadable sector when it is written. If it does not, the next
                // read gets here again.
                if self.first.is_writable()
                    && self.first.write_at(offset_bytes, &buffer[..got_bytes]).is_ok()
                {
                    self.repaired.fetch_add(1, Ordering::Relaxed);
                }
                Ok(got_bytes)
            }
        }
    }

    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        // Both are attempted, so that a failure of one does not leave old bytes in the other.
        let first = self.first.write_at(offset_bytes, buffer);
        let second = self.second.write_at(offset_bytes, buffer);
        first.and(second)
    }

    fn sync(&self) -> Result<(), DeviceError> {
        let first = self.first.sync();
        let second = self.second.sync();
        first.and(second)
    }

    fn access_path(&self) -> String {
        format!("mirror of [{}] and [{}]", self.first.access_path(), self.second.access_path())
    }
}

/// Writes through a mirror, breaks one side, and reads everything back; returns the number of
/// repairs.
fn demonstrate() -> Result<u64, Box<dyn std::error::Error>> {
    const LEN_BYTES: u64 = 1 << 20;
    const PAGE_BYTES: usize = 4096;

    let directory = tempfile::tempdir()?;
    let open = |name: &str| -> Result<FileDevice, Box<dyn std::error::Error>> {
        let path = directory.path().join(name);
        std::fs::File::create(&path)?.set_len(LEN_BYTES)?;
        Ok(FileDevice::options().writable(true).open(path)?)
    };
    let first = Faulty::new(open("first")?);
    let control = first.control();
    let mirror = Mirror::new(first, open("second")?);
    println!("{} bytes, {}", mirror.len_bytes()?, mirror.access_path());

    let mut page = AlignedBuffer::new(PAGE_BYTES, mirror.alignment_bytes());
    for offset_bytes in (0..LEN_BYTES).step_by(PAGE_BYTES) {
        page.fill((offset_bytes / PAGE_BYTES as u64) as u8);
        mirror.write_at(offset_bytes, &page)?;
    }
    mirror.sync()?;

    // From here on the first side cannot read a range in its middle.
    const EIO: i32 = 5;
    let broken = LEN_BYTES / 4..LEN_BYTES / 2;
    control.inject(FaultRule::new(FaultTarget::Reads, Fault::Errno(EIO)).range(broken));

    for offset_bytes in (0..LEN_BYTES).step_by(PAGE_BYTES) {
        let got_bytes = mirror.read_at(offset_bytes, &mut page)?;
        let expected = (offset_bytes / PAGE_BYTES as u64) as u8;
        if got_bytes != PAGE_BYTES || page.iter().any(|byte| *byte != expected) {
            return Err(format!("wrong bytes at {offset_bytes}").into());
        }
    }
    Ok(mirror.repaired.load(Ordering::Relaxed))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let repaired = demonstrate()?;
    println!("everything was read; {repaired} pages came from the second side");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_side_is_not_noticed() {
        assert_eq!(demonstrate().unwrap(), 64);
    }

    #[test]
    fn a_page_broken_on_both_sides_is() {
        let memory = || aquifer_device::MemoryDevice::new(8192).unwrap();
        let (first, second) = (Faulty::new(memory()), Faulty::new(memory()));
        for side in [&first, &second] {
            side.control().inject(FaultRule::new(FaultTarget::Reads, Fault::Errno(5)));
        }
        assert!(Mirror::new(first, second).read_at(0, &mut [0; 4096]).is_err());
    }
}
