//! What a cache may write to a device, and how several mappings of one device go together.

mod support;

use aquifer_cache::{Advice, Cache};
use aquifer_device::Device;

use support::{load, memory, store};

const PAGE: usize = 4096;
const BUDGET: u64 = 8 << 20;

fn cache() -> Cache {
    Cache::builder().budget_bytes(BUDGET).build().unwrap()
}

/// A flush writes the pages that were stored to, and no page that was only read: another writer may have
/// changed that one on the device meanwhile.
#[test]
fn pages_that_were_only_read_are_never_written() {
    const STORED: usize = 1024;
    const READ: usize = 256;
    let (device, _) = memory((STORED + READ) * PAGE, 1);
    let mapping = cache().map_mut(device.clone()).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    // A program that stores to whatever it has read.
    for page in 0..STORED {
        let byte = load(&mapping, page * PAGE);
        store(&mapping, page * PAGE, byte.wrapping_add(1));
    }
    for page in STORED..STORED + READ {
        load(&mapping, page * PAGE);
    }
    let theirs = vec![0xA5; READ * PAGE];
    device.write_at((STORED * PAGE) as u64, &theirs).unwrap();
    mapping.flush_all().unwrap();
    let overwritten = device.to_vec()[STORED * PAGE..]
        .chunks(PAGE)
        .filter(|page| page != &&theirs[..PAGE])
        .count();
    assert_eq!(overwritten, 0, "pages written back that were only read");
}
