//! A writer is killed at random moments; everything that a flush acknowledged must be in the file.
//!
//! The child's writes are a function of the seed: write number n puts n into a slot that n
//! determines. After a flush that covers the writes up to n has returned, it prints n. So after its
//! death each slot must hold the number of a write to that slot, not older than the last one
//! acknowledged.
//!
//! Killing a process leaves the kernel's page cache intact. So this tests that flush has written
//! everything in order, and that earlier writes (evictions, write-back) do no harm; not that the
//! device kept the data.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use aquifer_cache::policy::PolicyKind;
use aquifer_cache::{Cache, MappingMut, PageId, Pages};
use aquifer_device::FileDevice;
use aquifer_testkit::rng::Rng;

use crate::support::child::{self, Reaped};
use crate::support::{seed, steps};

const LEN: usize = 16 << 20;
/// The distance between slots, chosen so that slots share pages and regions.
const SLOT_BYTES: usize = 1000;
const SLOTS: u64 = (LEN / SLOT_BYTES) as u64;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("writer", writer)];

/// The slot of write number `n`: often one of a few slots, otherwise any.
fn slot_of(seed: u64, n: u64) -> u64 {
    let mut rng = Rng::new(seed ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    if rng.chance(0.3) { rng.below(50) * (SLOTS / 50) } else { rng.below(SLOTS) }
}

fn environment(name: &str) -> String {
    std::env::var(name).expect("set by the parent")
}

enum Target {
    Pointer(MappingMut),
    Calls(MappingMut),
    Pages(Pages),
}

impl Target {
    fn set(&self, slot: u64, value: u64) {
        let at = slot as usize * SLOT_BYTES;
        match self {
            Target::Pointer(mapping) => {
                let target = mapping.as_mut_ptr().wrapping_add(at);
                // SAFETY: a slot lies inside the mapping; slots are aligned to 8 bytes.
                unsafe { target.cast::<u64>().write_volatile(value) };
            }
            Target::Calls(mapping) => mapping.set(at as u64, value).unwrap(),
            Target::Pages(pages) => {
                let size = pages.page_bytes();
                let within = at % size;
                let mut page = pages.get_mut(PageId((at / size) as u64)).unwrap();
                // A slot is aligned, so it lies within its page.
                page[within..within + 8].copy_from_slice(&value.to_ne_bytes());
            }
        }
    }

    fn flush(&self) {
        match self {
            Target::Pointer(mapping) | Target::Calls(mapping) => mapping.flush_all().unwrap(),
            Target::Pages(pages) => pages.flush_all().unwrap(),
        }
    }
}

fn writer() {
    let seed: u64 = environment("WRITER_SEED").parse().unwrap();
    let round: usize = environment("WRITER_ROUND").parse().unwrap();
    let mut first: u64 = environment("WRITER_FIRST").parse().unwrap();
    let policies = PolicyKind::all();
    let cache = Cache::builder()
        .budget_bytes(6 << 20)
        .policy(policies[round % policies.len()])
        .build()
        .unwrap();
    let options = FileDevice::options().writable(true).io_uring(round.is_multiple_of(2));
    let device = Arc::new(options.open(environment("WRITER_FILE")).unwrap());
    let target = match round % 3 {
        0 => Target::Pointer(cache.map_mut(device).unwrap()),
        1 => Target::Calls(cache.map_mut(device).unwrap()),
        _ => Target::Pages(cache.pages(device).unwrap()),
    };
    let mut rng = Rng::new(seed + round as u64);
    let mut acknowledge = std::io::stdout().lock();
    writeln!(acknowledge, "\nready").unwrap();
    loop {
        let end = first + 1 + rng.below(200);
        for n in first..end {
            target.set(slot_of(seed, n), n);
        }
        target.flush();
        writeln!(acknowledge, "flushed {}", end - 1).unwrap();
        acknowledge.flush().unwrap();
        first = end;
    }
}

/// Runs the writer until it has acknowledged a few flushes, kills it, and returns the number of the
/// last acknowledged write.
fn killed_writer(path: &Path, seed: u64, round: usize, first: u64, flushes: u64) -> u64 {
    let mut command = child::command("writer");
    command
        .env("WRITER_SEED", seed.to_string())
        .env("WRITER_ROUND", round.to_string())
        .env("WRITER_FIRST", first.to_string())
        .env("WRITER_FILE", path);
    let mut writer = Reaped(command.spawn().expect("starting the test binary again"));
    let mut said = vec![];
    let flushed = |said: &[u8]| said.windows(8).filter(|word| word == b"flushed ").count() as u64;
    while flushed(&said) < flushes {
        let mut part = [0; 4096];
        let got = writer.0.stdout.as_mut().expect("piped").read(&mut part).unwrap();
        assert!(got > 0, "the writer ended by itself: {}", String::from_utf8_lossy(&said));
        said.extend_from_slice(&part[..got]);
    }
    said.extend(writer.kill());
    // An incomplete last line may be truncated: ignore it.
    let said = String::from_utf8(said).unwrap();
    let whole = said.rsplit_once('\n').expect("a line").0;
    let last = whole.lines().filter_map(|line| line.strip_prefix("flushed ")).next_back();
    last.expect("a flush").parse().unwrap()
}

#[test]
fn what_was_flushed_survives_the_writer() {
    let seed = seed(1);
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LEN as u64).unwrap();
    let mut rng = Rng::new(seed);
    let mut first = 1;
    // The oldest number that each slot may hold.
    let mut oldest = vec![0u64; SLOTS as usize];
    for round in 0..steps(12) {
        let acknowledged = killed_writer(file.path(), seed, round, first, 1 + rng.below(30));
        for n in first..=acknowledged {
            oldest[slot_of(seed, n) as usize] = n;
        }
        let content = std::fs::read(file.path()).unwrap();
        let mut newest = acknowledged;
        for (slot, &oldest) in oldest.iter().enumerate() {
            let at = slot * SLOT_BYTES;
            let found = u64::from_ne_bytes(content[at..at + 8].try_into().unwrap());
            assert!(
                found >= oldest && (found == 0 || slot_of(seed, found) == slot as u64),
                "round {round}: slot {slot} holds {found}, {oldest} was flushed"
            );
            newest = newest.max(found);
        }
        // Numbers that were written but not acknowledged are used up too.
        first = newest + 1;
    }
}
