//! Crashes, enumerated: a tier of which something was lost serves right bytes, and then works.
//!
//! A journal has all changes of the files of a small tier: downloads by two openers, eviction, downloads after it, two
//! versions of an object. From it come
//! * what a **killed process** leaves: the changes up to any point;
//! * what a **power cut** leaves, since nothing is synchronised: each sector of 512 bytes has any content that it ever
//!   had, or a hole's, a file any length that it ever had, and names are missing;
//! * what a **disk that misdirects** leaves: groups of sub-blocks have changed places, within a file or between the
//!   versions of an object, together with their proofs.
//!
//! With deliberate mistakes ([`Mutant`]) these fail, so they can fail; the mistakes that do no harm are asserted as well.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use aquifer_sys::lock::{LockKind, LockRange, lock};
use aquifer_testkit::rng::Rng;

use super::hooks::{Change, Hooks, Mutant};
use super::layout::{Geometry, Key, PROOF_BYTES, SUB_BLOCK_BYTES};
use super::object::ObjectFile;
use super::{Obtained, OpenTier, Terms, Tier};
use crate::body::Body;
use crate::buffers::Buffers;

const SECTOR: usize = 512;
/// Sub-blocks whose proofs share a sector.
const GROUP: u64 = SECTOR as u64 / PROOF_BYTES;
const PATIENCE: Duration = Duration::from_secs(60);

pub fn terms() -> Terms {
    Terms { patience: PATIENCE, room_patience: PATIENCE, gap_bytes: 0, tally: None }
}

/// A version of an object.
pub struct Object {
    pub url: &'static str,
    pub etag: &'static str,
    pub bytes: Vec<u8>,
}

impl Object {
    pub fn new(url: &'static str, etag: &'static str, len: usize, seed: u64) -> Object {
        let mut rng = Rng::new(seed);
        let mut bytes: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
        // As a hole reads.
        bytes[len / 3..len / 2].fill(0);
        Object { url, etag, bytes }
    }

    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub fn name(&self) -> String {
        Key::of(self.url, self.etag, self.len()).file_name()
    }

    pub fn open(&self, tier: &Tier) -> Result<OpenTier, String> {
        let opened = OpenTier::open(tier, self.url, self.etag, self.len());
        opened.map_err(|error| format!("not opened: {error}"))
    }

    /// Brings a range and compares it; returns the bytes downloaded for it.
    pub fn obtain(&self, open: &OpenTier, range: Range<usize>) -> Result<usize, String> {
        let downloaded = AtomicUsize::new(0);
        let fetch = async |range: Range<u64>| {
            let bytes = &self.bytes[range.start as usize..range.end as usize];
            downloaded.fetch_add(bytes.len(), Ordering::Relaxed);
            Ok::<_, Infallible>(Body::of(bytes.to_vec()))
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let wanted = range.start as u64..range.end as u64;
        let (terms, buffers) = (terms(), Buffers::new(64 << 20));
        let Ok(Obtained { body, .. }) =
            runtime.block_on(open.obtain(wanted, &terms, &buffers, fetch));
        let mut got = vec![];
        body.parts(0, range.len()).for_each(|(_, part)| got.extend_from_slice(part));
        if got != self.bytes[range.clone()] {
            return Err(format!("wrong bytes of {} {} in {range:?}", self.url, self.etag));
        }
        Ok(downloaded.into_inner())
    }

    /// Reads all of it as a handler does, in parts, and compares those that are there.
    fn read(&self, open: &OpenTier) -> Result<(), String> {
        let mut buffer = [0; 9000];
        for (number, part) in self.bytes.chunks(buffer.len()).enumerate() {
            let at = number * buffer.len();
            if open.read(at as u64, &mut buffer[..part.len()]) && buffer[..part.len()] != *part {
                return Err(format!("wrong bytes of {} {} read at {at}", self.url, self.etag));
            }
        }
        Ok(())
    }
}

fn objects() -> [Object; 3] {
    [
        Object::new("s3://bucket/one", "\"1\"", 300_001, 1),
        Object::new("s3://bucket/one", "\"2\"", 300_001, 2),
        Object::new("s3://bucket/two", "\"1\"", 5000, 3),
    ]
}

/// The changes of a tier's files, in order.
fn record(objects: &[Object], mutants: &[Mutant]) -> Result<Vec<(String, Change)>, String> {
    let directory = tempfile::tempdir().unwrap();
    Hooks::with(mutants, true, |hooks| {
        let tier = Tier::open(directory.path().join("tier")).unwrap();
        let [one, new, two] = objects else { panic!("three objects") };
        // Each opener ends with its work, so that the order is always the same, except for one in between.
        let obtain = |object: &Object, range| object.obtain(&object.open(&tier)?, range);
        tier.set_budget_bytes(10 << 20).unwrap();
        obtain(one, 5000..200_000)?;
        let other = one.open(&tier).unwrap();
        obtain(one, 190_000..300_001)?;
        obtain(two, 0..5000)?;
        obtain(new, 0..70_000)?;
        tier.set_budget_bytes(200 << 10).unwrap();
        obtain(one, 0..150_000)?;
        obtain(new, 100_000..300_001)?;
        obtain(two, 100..200)?;
        drop(other);
        tier.set_budget_bytes(350 << 10).unwrap();
        obtain(new, 0..300_001)?;
        obtain(one, 0..300_001)?;
        tier.drop_objects(|object| object.etag == new.etag).unwrap();
        obtain(new, 50_000..250_000)?;
        Ok(hooks.journal())
    })
}

type Files = BTreeMap<String, Vec<u8>>;

fn apply(files: &mut Files, name: &str, change: &Change) {
    let mut file = files.remove(name).unwrap_or_default();
    match change {
        Change::New(bytes) => file = bytes.clone(),
        Change::Write { at, bytes } => {
            let (at, len) = (*at as usize, file.len());
            file.resize(len.max(at + bytes.len()), 0);
            file[at..at + bytes.len()].copy_from_slice(bytes);
        }
        Change::Hole { at, len } => {
            let end = ((at + len) as usize).min(file.len());
            file[*at as usize..end].fill(0);
        }
        Change::Extend { len } => file.resize(*len as usize, 0),
        Change::Remove => return,
    }
    files.insert(name.to_owned(), file);
}

/// What each sector of a file has ever been, the last at the end, and each of its lengths.
#[derive(Default)]
struct Past {
    sectors: Vec<Vec<[u8; SECTOR]>>,
    lens: Vec<usize>,
}

fn pasts(journal: &[(String, Change)]) -> BTreeMap<String, Past> {
    let (mut files, mut pasts) = (Files::new(), BTreeMap::<String, Past>::new());
    for (name, change) in journal {
        apply(&mut files, name, change);
        let past = pasts.entry(name.clone()).or_default();
        let file = files.get(name).map_or(&[][..], Vec::as_slice);
        if !past.lens.contains(&file.len()) {
            past.lens.push(file.len());
        }
        let hole = [0; SECTOR];
        let count = past.sectors.len().max(file.len().div_ceil(SECTOR));
        past.sectors.resize_with(count, || vec![hole]);
        for (versions, now) in past.sectors.iter_mut().zip(file.chunks(SECTOR)) {
            let mut sector = hole;
            sector[..now.len()].copy_from_slice(now);
            if versions.last() != Some(&sector) {
                versions.retain(|version| *version != sector);
                versions.push(sector);
            }
        }
    }
    pasts
}

/// Files of which each sector is one that it ever was.
fn mixed(pasts: &BTreeMap<String, Past>, rng: &mut Rng) -> Files {
    let mut files = Files::new();
    for (name, past) in pasts {
        if rng.chance(0.1) {
            continue;
        }
        // Pages are mostly lost as a whole; and what is lost everywhere shows little.
        let sectors_at_once = if rng.chance(0.5) { 8 } else { 1 };
        let is_last = [0.0, 0.5, 0.9, 0.99][rng.below(4) as usize];
        let mut file = vec![];
        for group in past.sectors.chunks(sectors_at_once) {
            let (last, any) = (rng.chance(is_last), rng.next_u64() as usize);
            for versions in group {
                let count = versions.len();
                file.extend_from_slice(&versions[if last { count - 1 } else { any % count }]);
            }
        }
        let longest = past.lens.iter().max().copied().unwrap_or(0);
        let any = past.lens[rng.below(past.lens.len() as u64) as usize];
        file.resize(if rng.chance(0.7) { longest } else { any }, 0);
        files.insert(name.clone(), file);
    }
    files
}

/// Exchanges groups of sub-blocks with their proofs.
fn exchange(files: &mut Files, one: (&Object, u64), other: (&Object, u64)) {
    let mut exchange = |one: (&Object, Range<u64>), other: (&Object, Range<u64>)| {
        let place = |place: &Range<u64>| place.start as usize..place.end as usize;
        let get = |(object, range): &(&Object, Range<u64>)| {
            files.get(&object.name())?.get(place(range)).map(<[u8]>::to_vec)
        };
        if let (Some(first), Some(second)) = (get(&one), get(&other)) {
            for ((object, range), bytes) in [(one, second), (other, first)] {
                files.get_mut(&object.name()).unwrap()[place(&range)].copy_from_slice(&bytes);
            }
        }
    };
    let parts = |(object, group): (&Object, u64)| {
        let geometry = Geometry { len_bytes: object.len() };
        let (proofs, data) = (geometry.proof_at(group * GROUP), geometry.data_at());
        let bytes = GROUP * SUB_BLOCK_BYTES;
        [proofs..proofs + SECTOR as u64, data + group * bytes..data + (group + 1) * bytes]
    };
    for (place, other_place) in parts(one).into_iter().zip(parts(other)) {
        exchange((one.0, place), (other.0, other_place));
    }
}

fn make(files: &Files, path: &Path) {
    DirBuilder::new().mode(0o700).create(path).unwrap();
    for (name, bytes) in files {
        let mut file = OpenOptions::new();
        let mut file = file.write(true).create_new(true).mode(0o600).open(path.join(name)).unwrap();
        // Holes stay holes.
        file.set_len(bytes.len() as u64).unwrap();
        for (number, page) in
            bytes.chunks(4096).enumerate().filter(|(_, page)| page.iter().any(|&byte| byte != 0))
        {
            std::os::unix::fs::FileExt::write_all_at(&file, page, number as u64 * 4096).unwrap();
        }
        file.flush().unwrap();
    }
}

/// Opens a tier on the files: what it serves must be right, and then it must keep what it is given.
fn check(objects: &[Object], files: &Files, mutants: &[Mutant]) -> Result<(), String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tier");
    make(files, &path);
    Hooks::with(mutants, false, |_| {
        let said = |error: super::TierError| error.to_string();
        let tier = Tier::open(&path).map_err(said)?;
        tier.info().map_err(said)?;
        for object in objects {
            let open = object.open(&tier)?;
            object.read(&open)?;
            object.obtain(&open, 0..object.bytes.len())?;
        }
        tier.set_budget_bytes(10 << 20).map_err(said)?;
        for object in objects {
            object.obtain(&object.open(&tier)?, 0..object.bytes.len())?;
            let open = object.open(&tier)?;
            object.read(&open)?;
            let again = object.obtain(&open, 0..object.bytes.len())?;
            if again > 0 || open.problem().is_some() {
                return Err(format!("{again} bytes not kept: {:?}", open.problem()));
            }
        }
        let verified = tier.verify(|_, _| {}).map_err(said)?;
        let all = objects.iter().map(Object::len).sum::<u64>();
        if (verified.dropped_bytes, verified.right_bytes) != (0, all) {
            return Err(format!("{verified:?} of {all}"));
        }
        tier.drop_objects(|_| true).map_err(said)?;
        let left = tier.info().map_err(said)?;
        if left.used_bytes > 0 {
            return Err(format!("not dropped: {left:?}"));
        }
        Ok(())
    })
}

/// With some blocks' states lost, a file could not shrink while it is open, so a kill loses none.
fn check_evictable(objects: &[Object], files: &Files) -> Result<(), String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tier");
    make(files, &path);
    // Another opener, so that this one does not repair.
    let mut control = OpenOptions::new();
    let control = control.read(true).write(true).create(true).truncate(false).mode(0o600);
    let control = control.open(path.join("control")).unwrap();
    lock(control.as_fd(), LockRange::byte(1), LockKind::Shared).unwrap();
    let tier = Tier::open(&path).unwrap();
    let _open: Vec<_> = objects.iter().map(|object| object.open(&tier).unwrap()).collect();
    tier.set_budget_bytes(0).unwrap();
    for object in objects {
        let key = Key::of(object.url, object.etag, object.len());
        let file = ObjectFile::existing(&tier.directory, key).unwrap().unwrap();
        if file.has_data() {
            return Err(format!("not evicted: {} {}", object.url, object.etag));
        }
    }
    Ok(())
}

fn kills(mutants: &[Mutant]) -> Result<(), String> {
    let objects = objects();
    let journal = record(&objects, mutants)?;
    let mut files = Files::new();
    for (number, (name, change)) in journal.iter().enumerate() {
        apply(&mut files, name, change);
        let at = |problem| format!("killed after change {number} of {}: {problem}", journal.len());
        check(&objects, &files, mutants).map_err(at)?;
        if !mutants.contains(&Mutant::KeepProofs) {
            check_evictable(&objects, &files).map_err(at)?;
        }
    }
    Ok(())
}

fn power_cuts(mutants: &[Mutant], seeds: Range<u64>) -> Result<(), String> {
    let objects = objects();
    let pasts = pasts(&record(&objects, mutants)?);
    for seed in seeds {
        let files = mixed(&pasts, &mut Rng::new(seed));
        check(&objects, &files, mutants).map_err(|problem| format!("seed {seed}: {problem}"))?;
    }
    Ok(())
}

fn misdirections(mutants: &[Mutant], seeds: Range<u64>) -> Result<(), String> {
    let objects = objects();
    let journal = record(&objects, mutants)?;
    let mut last = Files::new();
    for (name, change) in &journal {
        apply(&mut last, name, change);
    }
    let pasts = pasts(&journal);
    for seed in seeds {
        let mut rng = Rng::new(seed);
        let mut files = if seed % 2 == 0 { last.clone() } else { mixed(&pasts, &mut rng) };
        for _ in 0..4 {
            let mut any = || {
                (
                    &objects[rng.below(2) as usize],
                    rng.below(objects[0].len() / (GROUP * SUB_BLOCK_BYTES)),
                )
            };
            let (one, other) = (any(), any());
            exchange(&mut files, one, other);
        }
        check(&objects, &files, mutants).map_err(|problem| format!("seed {seed}: {problem}"))?;
    }
    Ok(())
}

#[test]
fn killed_processes_leave_a_tier_that_works() {
    kills(&[]).unwrap();
}

#[test]
fn power_cuts_leave_a_tier_that_works() {
    power_cuts(&[], 0..400).unwrap();
}

#[test]
fn misdirected_writes_are_misses() {
    misdirections(&[], 0..150).unwrap();
}

#[test]
fn mistakes_are_found() {
    use Mutant::{KeepProofs, ProofsFirst, Unchecked, WithoutKey, WithoutPlace};
    for mutants in [&[Unchecked, ProofsFirst], &[Unchecked, KeepProofs]] {
        assert!(kills(mutants).is_err(), "{mutants:?}");
    }
    assert!(power_cuts(&[Unchecked], 0..150).is_err());
    for mutant in [Unchecked, WithoutPlace, WithoutKey] {
        assert!(misdirections(&[mutant], 0..60).is_err(), "{mutant:?}");
    }
}

/// By the order of the changes alone, a killed process leaves no wrong bytes; the proofs are for the rest. And where
/// proofs are checked, no order matters.
#[test]
fn mistakes_that_do_no_harm() {
    use Mutant::{KeepProofs, ProofsFirst, Unchecked};
    kills(&[Unchecked]).unwrap();
    power_cuts(&[ProofsFirst], 0..100).unwrap();
    power_cuts(&[KeepProofs], 0..100).unwrap();
}
