//! Random damage: whatever happens to a pool, nothing crashes, hangs or panics, and no object shows
//! bytes of another.
//!
//! Accidents flip bits, and zero, tear, copy and swap sectors and pages of superblocks, metadata,
//! log and saved state. An adversary changes fields and recomputes the checksums. Content is left
//! alone, which no checksum covers: writing to an object's pages changes the object.
//!
//! A pool that was closed cleanly is opened without reading all its metadata: damage is found when
//! it is used. Nothing compares all slots then, so an adversary who recomputes the digests as well
//! can make two objects show the same bytes, but not where the pool is opened with
//! [`PoolOptions::check`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::support::pool::*;
use crate::support::{ACCIDENTS, accident, pick};
use aquifer_check::{CheckOptions, CheckReport, FindingKind, Severity, check, repair};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::saved::{Map, SavedHeader};
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use aquifer_pool::media::{ByteRange, Media};
use aquifer_pool::{Pool, PoolError, PoolOptions};
use aquifer_testkit::campaign::{fuzz, seed, steps};
use aquifer_testkit::rng::Rng;

const POOL_BYTES: usize = 384 << 10;
const PAGE: usize = PAGE_BYTES as usize;
const SECTOR: usize = 512;

/// Ends the process if one case never ends, and prints the case.
struct Watchdog {
    case: Arc<AtomicU64>,
}

impl Watchdog {
    fn start(seed: u64) -> Watchdog {
        let case = Arc::new(AtomicU64::new(0));
        let weak = Arc::downgrade(&case);
        std::thread::spawn(move || {
            let mut last = 0;
            let mut seconds = 0;
            while let Some(case) = weak.upgrade() {
                let now = case.load(Relaxed);
                drop(case);
                seconds = if now == last { seconds + 1 } else { 0 };
                last = now;
                if seconds > 120 {
                    eprintln!("case {now} hangs; replay with AQUIFER_SEED={seed}");
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        Watchdog { case }
    }

    fn begin(&self, case: u64) {
        self.case.store(case + 1, Relaxed);
    }
}

/// The changes made to an image.
#[derive(Debug, Default)]
struct Story {
    lines: Vec<String>,
    /// A run was pointed at chosen pages. Free pages have leftover bytes, which the run then shows.
    has_forged_run: bool,
}

impl Story {
    fn push(&mut self, line: String) {
        self.lines.push(line);
    }

    fn forge_slot(&mut self, rng: &mut Rng, slot: &mut [u8]) -> String {
        let (at, width) = SLOT_FIELDS[rng.below(17) as usize];
        self.has_forged_run |= (64..136).contains(&at);
        forge_field(rng, slot, at, width)
    }
}

/// Accidents happen anywhere except in content.
fn spoil(rng: &mut Rng, image: &mut Vec<u8>, story: &mut Story) {
    let superblock = forge::superblock(image);
    let (layout, saved) = (superblock.layout, superblock.saved.bytes());
    // Superblocks, metadata, log, saved state; small parts are as likely as large ones.
    let parts = [
        0..2 * PAGE,
        layout.metadata().offset_bytes as usize..layout.metadata().end_bytes() as usize,
        layout.log().offset_bytes as usize..layout.log().end_bytes() as usize,
        saved.offset_bytes as usize..saved.end_bytes() as usize,
    ];
    let parts = if saved.len_bytes == 0 { &parts[..3] } else { &parts };
    for _ in 0..1 + rng.below(3) {
        let part = parts[rng.below(parts.len() as u64) as usize].clone();
        let unit = if rng.chance(0.5) { SECTOR } else { PAGE };
        let anywhere = 0..image.len();
        story.push(match rng.below(ACCIDENTS + 2) {
            kind @ 0..ACCIDENTS => accident(rng, image, kind, &part, &anywhere, unit),
            ACCIDENTS => {
                let at = pick(rng, &part, unit);
                let byte = rng.next_u64() as u8;
                let len = 1 + rng.below(unit as u64) as usize;
                image[at..at + len].fill(byte);
                format!("{len} bytes at {at} are {byte:#x}")
            }
            _ => {
                if !rng.chance(0.2) {
                    continue;
                }
                let len = rng.below(image.len() as u64 + 1) as usize;
                image.truncate(len);
                story.push(format!("cut to {len} bytes"));
                return;
            }
        });
    }
}

/// A number that an adversary would try.
fn tempting(rng: &mut Rng, current: u64) -> u64 {
    match rng.below(9) {
        0 => 0,
        1 => u64::MAX,
        2 => current.wrapping_add(1),
        3 => current.wrapping_sub(1),
        4 => current ^ 1 << rng.below(64),
        5 => current.wrapping_mul(2),
        6 => 1 << rng.below(64),
        7 => rng.below(200),
        _ => rng.below(64) * PAGE_BYTES,
    }
}

/// Changes one field of `width` bytes at `at`.
fn forge_field(rng: &mut Rng, bytes: &mut [u8], at: usize, width: usize) -> String {
    let mut wide = [0; 8];
    wide[..width].copy_from_slice(&bytes[at..at + width]);
    let current = u64::from_le_bytes(wide);
    let forged = tempting(rng, current);
    bytes[at..at + width].copy_from_slice(&forged.to_le_bytes()[..width]);
    format!("{width} bytes at {at}: {current:#x} became {forged:#x}")
}

/// The fields of a superblock, of a slot, of a record's header and of its entries: offset and
/// width.
const SUPERBLOCK_FIELDS: [(usize, usize); 15] = [
    (8, 4),
    (12, 4),
    (16, 8),
    (32, 8),
    (40, 8),
    (48, 8),
    (56, 8),
    (64, 8),
    (72, 8),
    (80, 8),
    (88, 8),
    (96, 8),
    (112, 8),
    (120, 8),
    (128, 8),
];
const SLOT_FIELDS: [(usize, usize); 17] = [
    (4, 2),
    (6, 2),
    (8, 8),
    (16, 8),
    (24, 8),
    (32, 8),
    (40, 8),
    (48, 8),
    (64, 8),
    (72, 8),
    (80, 8),
    (120, 8),
    (128, 8),
    (136, 8),
    (216, 8),
    (248, 1),
    (249, 8),
];
const HEADER_FIELDS: [(usize, usize); 7] =
    [(4, 4), (8, 8), (16, 8), (24, 8), (32, 4), (40, 8), (48, 8)];
const ENTRY_FIELDS: [(usize, usize); 6] = [(0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8)];

/// An adversary changes fields and recomputes the checksums.
fn forge(rng: &mut Rng, image: &mut [u8], story: &mut Story) {
    let layout = forge::superblock(image).layout;
    let records = forge::records(image);
    for _ in 0..1 + rng.below(2) {
        match rng.below(10) {
            0 | 1 => {
                let (at, width) = SUPERBLOCK_FIELDS[rng.below(15) as usize];
                let copies: &[usize] = [&[0][..], &[1], &[0, 1]][rng.below(3) as usize];
                // The same change in both copies.
                let mut forged = image[..PAGE].to_vec();
                let change = forge_field(rng, &mut forged, at, width);
                for &copy in copies {
                    let start = copy * PAGE + at;
                    image[start..start + width].copy_from_slice(&forged[at..at + width]);
                    forge::seal_superblock(image, copy);
                }
                story.push(format!("superblocks {copies:?}: {change}"));
            }
            2..=4 => {
                let number = rng.below(8);
                let slot = forge::slot(image, &layout, number);
                let change = story.forge_slot(rng, slot);
                story.push(format!("slot {number}: {change}"));
                forge::seal_slot(slot);
            }
            5 => {
                let (from, to) = (1 + rng.below(6), 1 + rng.below(12));
                let mut copy = forge::slot(image, &layout, from).to_vec();
                copy[8..16].copy_from_slice(&to.to_le_bytes());
                forge::seal_slot(&mut copy);
                forge::slot(image, &layout, to).copy_from_slice(&copy);
                story.push(format!("slot {to} is slot {from} with its number"));
            }
            _ if records.is_empty() => {}
            6 | 7 => {
                let record = records[rng.below(records.len() as u64) as usize];
                let bytes = &mut image[record.offset..record.offset + record.len];
                let (at, width) = HEADER_FIELDS[rng.below(7) as usize];
                story.push(format!(
                    "record at {}: {}",
                    record.lsn,
                    forge_field(rng, bytes, at, width)
                ));
                forge::seal_record(bytes);
            }
            8 => {
                let record = records[rng.below(records.len() as u64) as usize];
                let bytes = &mut image[record.offset..record.offset + record.len];
                let entries = u32::from_le_bytes(bytes[32..36].try_into().unwrap());
                let entry = rng.below(u64::from(entries.clamp(1, 90))) as usize;
                let (at, width) = ENTRY_FIELDS[rng.below(6) as usize];
                let change = forge_field(rng, bytes, 64 + entry * 40 + at, width);
                story.push(format!("entry {entry} of the record at {}: {change}", record.lsn));
                forge::seal_record(bytes);
            }
            _ => {
                // A slot inside of a record, with both checksums recomputed.
                let record = records[rng.below(records.len() as u64) as usize];
                let bytes = &mut image[record.offset..record.offset + record.len];
                if u32::from_le_bytes(bytes[64..68].try_into().unwrap()) != 1 {
                    continue;
                }
                let start = u64::from_le_bytes(bytes[88..96].try_into().unwrap()) as usize;
                let Some(slot) = bytes.get_mut(start..start + SLOT_BYTES) else { continue };
                let change = story.forge_slot(rng, slot);
                story.push(format!("slot in the record at {}: {change}", record.lsn));
                forge::seal_slot(slot);
                forge::seal_record(bytes);
            }
        }
    }
}

/// Reads everything. Each object may only show its own bytes, zeros, or an error.
fn read_everything(pool: &Pool, has_forged_run: bool) -> Result<(), PoolError> {
    let _ = pool.info()?;
    for number in 0..pool.layout().slots() + 2 {
        let _ = pool.inode(number);
    }
    let mut failed = None;
    let inodes = pool.inodes()?;
    let mut runs: Vec<_> = inodes.iter().flat_map(|inode| inode.all_runs()).collect();
    runs.sort_unstable();
    assert!(runs.windows(2).all(|pair| !pair[0].overlaps(pair[1])), "pages of two objects");
    for inode in &inodes {
        match sample::read(pool, inode) {
            Ok(bytes) => {
                let name = String::from_utf8_lossy(&inode.name).into_owned();
                let foreign = find_foreign(&inode.name, &bytes).filter(|_| !has_forged_run);
                if let Some(foreign) = foreign {
                    panic!("object {name} shows bytes of {foreign}");
                }
            }
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Finds another object's bytes among those of this one.
fn find_foreign(name: &[u8], bytes: &[u8]) -> Option<&'static str> {
    let mut found = sample::find_all(bytes).into_iter();
    if sample::NAMES.iter().any(|known| known.as_bytes() == name) {
        found.find(|found| found.as_bytes() != name)
    } else {
        // A renamed object must still show the bytes of one object only.
        found.nth(1)
    }
}

fn patient() -> PoolOptions {
    alone().stall_timeout(Duration::from_secs(5))
}

/// Runs every operation on a damaged pool.
fn exercise(rng: &mut Rng, image: &[u8], has_forged_run: bool) -> (CheckReport, bool) {
    let read_everything = |pool: &Pool| read_everything(pool, has_forged_run);
    let media = FileMedia::of(image);
    let options = CheckOptions { fresh_pages: rng.chance(0.1), ..CheckOptions::default() };
    let report = check(media.clone(), &options).unwrap();
    let _ = format!("{report}\n{report:?}");
    assert!(media.image() == image, "the check wrote something");

    if let Ok(pool) = reading().open_on(media.clone()) {
        let _ = read_everything(&pool);
    }
    assert!(media.image() == image, "a reader wrote something");

    let options = if rng.chance(0.05) { shared() } else { patient() };
    let opened = options.open_on(media.clone());
    let has_opened = opened.is_ok();
    match opened {
        Ok(pool) => {
            read_everything(&pool).expect("a pool that can be written can be read");
            // It keeps working: a new object can be created, which affects nothing else.
            match sample::create(&pool, "fresh", 2, 0) {
                Ok(inode) => {
                    let bytes = sample::read(&pool, &inode).expect("just made");
                    assert!(bytes.iter().all(|&byte| byte == 0), "a new object is not zero");
                }
                Err(PoolError::Full { .. } | PoolError::NoFreeInode { .. }) => {}
                Err(error) => panic!("making an object: {error}"),
            }
            drop(pool);
            let pool = patient().open_on(media).expect("it was open just now");
            read_everything(&pool).expect("it was readable just now");
        }
        Err(_) => assert!(media.image() == image, "an opening that failed wrote something"),
    }
    (report, has_opened)
}

/// The check and the opening agree: a sound pool can be opened, and one that cannot be opened is
/// not sound.
fn assert_agreement(report: &CheckReport, has_opened: bool) {
    // Recovery applies the words to what happens to be at the slot's place.
    if report.findings.iter().any(|finding| finding.what.contains("whose others the log does not"))
    {
        return;
    }
    assert_eq!(
        (report.is_sound() || is_harmless(report)) && report.can_be_written(),
        has_opened,
        "opened: {has_opened}, but the check said:\n{report}"
    );
}

/// Whether all damage still allows opening: it concerns single objects, or recovery leaves it out.
fn is_harmless(report: &CheckReport) -> bool {
    let mut bad = report.findings.iter().filter(|finding| finding.severity == Severity::Damage);
    bad.all(|finding| match finding.kind {
        FindingKind::Address
        | FindingKind::SharedAddresses
        | FindingKind::SameName
        | FindingKind::UsedFreshPage => true,
        FindingKind::Record => !finding.what.contains("takes content"),
        _ => false,
    })
}

fn campaign(usual_seed: u64, cases: usize, damage: impl Fn(&mut Rng, &mut Vec<u8>, &mut Story)) {
    let seed = seed(usual_seed);
    let watchdog = Watchdog::start(seed);
    let images = [sample::crashed_image(POOL_BYTES), {
        let media = FileMedia::of(&sample::crashed_image(POOL_BYTES));
        drop(alone().open_on(media.clone()).unwrap());
        media.image()
    }];
    let (mut sound, mut opened) = (0, 0);
    for case in 0..steps(cases) as u64 {
        watchdog.begin(case);
        let mut rng = Rng::new(seed ^ case << 20);
        // The image that crashed more often: it has a log.
        let mut image = images[usize::from(rng.chance(0.25))].clone();
        let mut story = Story::default();
        damage(&mut rng, &mut image, &mut story);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let (report, has_opened) = exercise(&mut rng, &image, story.has_forged_run);
            assert_agreement(&report, has_opened);
            (report.is_sound(), has_opened)
        }));
        let Ok((is_sound, has_opened)) = outcome else {
            panic!("case {case} of seed {seed}: {story:#?}");
        };
        sound += u64::from(is_sound);
        opened += u64::from(has_opened);
    }
    println!("{} cases: {sound} sound, {opened} opened", steps(cases));
    assert!(opened > 0, "damage so great that nothing is tested");
}

/// Changes bits of the maps, and the number of free pages to match.
fn forge_maps(rng: &mut Rng, image: &mut [u8], story: &mut Story) {
    let (layout, start) = forge::saved_state(image);
    let maps = start + layout.table_pages as usize * PAGE;
    for _ in 0..1 + rng.below(8) {
        // The first bytes are those that are used.
        let len = if rng.chance(0.8) { 16 } else { PAGE_BYTES };
        let block = rng.below(layout.blocks) as usize;
        let (at, bit) = (maps + block * PAGE + rng.below(len) as usize, rng.below(8));
        image[at] ^= 1 << bit;
        story.push(format!("bit {bit} of byte {} of block {block}", (at - maps) % PAGE));
    }
    let Ok(header) = SavedHeader::decode(&image[start..]) else { return };
    let used = layout.blocks_of(Map::UsedPages);
    let used = maps + used.start as usize * PAGE..maps + used.end as usize * PAGE;
    let used: u64 = image[used].iter().map(|byte| u64::from(byte.count_ones())).sum();
    let free_pages = forge::superblock(image).layout.page_count.saturating_sub(used);
    let header = SavedHeader { free_pages, ..header }.encode();
    image[start..start + header.len()].copy_from_slice(&header);
}

/// Runs every operation on a damaged pool that was closed cleanly.
fn exercise_closed(rng: &mut Rng, image: &[u8], has_forged_digests: bool, has_forged_run: bool) {
    let options = CheckOptions { fresh_pages: rng.chance(0.1), ..CheckOptions::default() };
    let media = FileMedia::of(image);
    let report = check(media.clone(), &options).unwrap();
    let _ = format!("{report}\n{report:?}");
    assert!(media.image() == image, "the check wrote something");
    let note = |error: PoolError| {
        assert!(!matches!(error, PoolError::Stalled { .. }), "it hangs: {error}");
    };
    let all = [false, true].map(|is_checked| [(reading(), is_checked), (patient(), is_checked)]);
    for (options, is_checked) in all.into_iter().flatten() {
        let media = FileMedia::of(image);
        let pool = match options.check(is_checked).open_on(media.clone()) {
            Ok(pool) => pool,
            Err(error) => {
                note(error);
                assert!(media.image() == image, "an opening that failed wrote something");
                continue;
            }
        };
        // Whether each object can only show its own bytes.
        let is_strict = !has_forged_digests || is_checked;
        let read = |pool: &Pool| {
            let read = if is_strict {
                read_everything(pool, has_forged_run)
            } else {
                use_everything(pool)
            };
            read.map_or_else(note, drop);
        };
        read(&pool);
        if !pool.is_writable() {
            drop(pool);
            assert!(media.image() == image, "a reader wrote something");
            continue;
        }
        match sample::create(&pool, "fresh", 2, 0) {
            Ok(inode) if is_strict => {
                let bytes = sample::read(&pool, &inode).expect("just made");
                assert!(bytes.iter().all(|&byte| byte == 0), "a new object is not zero");
            }
            made => drop(made.map_err(note)),
        }
        drop(pool);
        match patient().open_on(media) {
            Ok(pool) => read(&pool),
            Err(error) => note(error),
        }
    }
}

/// Reads everything, whatever it is.
fn use_everything(pool: &Pool) -> Result<(), PoolError> {
    let _ = (pool.info()?, pool.orphans()?, pool.room()?);
    for inode in pool.inodes()? {
        let _ = pool.object_named(&inode.name);
        let _ = sample::read(pool, &inode);
    }
    Ok(())
}

fn campaign_closed(
    usual_seed: u64,
    cases: usize,
    damage: impl Fn(&mut Rng, &mut Vec<u8>, &mut Story) -> bool,
) {
    let seed = seed(usual_seed);
    let watchdog = Watchdog::start(seed);
    let closed = sample::closed_image(POOL_BYTES);
    let mut resumed = 0;
    for case in 0..steps(cases) as u64 {
        watchdog.begin(case);
        let mut rng = Rng::new(seed ^ case << 20);
        let (mut image, mut story) = (closed.clone(), Story::default());
        let has_forged_digests = damage(&mut rng, &mut image, &mut story);
        resumed += u64::from(is_resumed(&image));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            exercise_closed(&mut rng, &image, has_forged_digests, story.has_forged_run);
        }));
        assert!(outcome.is_ok(), "case {case} of seed {seed}: {story:#?}");
    }
    println!("{} cases: {resumed} opened without a recovery", steps(cases));
    assert!(resumed * 4 > steps(cases) as u64, "{resumed}: the saved state is hardly used");
}

/// Whether the saved state is used: then little of the log is read.
fn is_resumed(image: &[u8]) -> bool {
    if !forge::is_readable(image) {
        return false;
    }
    let superblock = forge::superblock(image);
    let log = superblock.layout.log();
    let behind = (superblock.tail_lsn + 2 * PAGE_BYTES) % log.len_bytes;
    let place = ByteRange { offset_bytes: log.offset_bytes + behind, len_bytes: PAGE_BYTES };
    let media = FileMedia::of(image);
    let is_open = reading().open_on(media.clone()).is_ok();
    is_open && media.take_reads_of(place) == 0
}

#[test]
fn no_accident_crashes_a_closed_pool_or_mixes_its_objects_up() {
    campaign_closed(4, 500, |rng, image, story| {
        if rng.chance(0.3) {
            // Where an object lies: it would show the bytes of another one. Its slot is valid by
            // itself, as one of an earlier moment is.
            let layout = forge::superblock(image).layout;
            let (number, bit) = (1 + rng.below(5), rng.below(5));
            let slot = forge::slot(image, &layout, number);
            slot[64] ^= 1 << bit;
            forge::seal_slot(slot);
            story.push(format!("bit {bit} of the first run of slot {number}"));
        } else {
            spoil(rng, image, story);
        }
        false
    });
}

#[test]
fn no_adversary_crashes_a_closed_pool() {
    campaign_closed(5, 500, |rng, image, story| {
        if rng.chance(0.3) {
            forge_maps(rng, image, story);
        } else {
            forge(rng, image, story);
            if forge::is_readable(image) {
                forge::redigest(image);
            }
        }
        if forge::is_readable(image) && rng.chance(0.9) {
            forge::reseal(image);
        }
        true
    });
}

#[test]
fn no_accident_crashes_anything_or_mixes_objects_up() {
    campaign(1, 1500, spoil);
}

#[test]
fn no_adversary_crashes_anything_or_mixes_objects_up() {
    campaign(2, 1500, |rng, image, story| forge(rng, image, story));
}

#[test]
fn accidents_on_top_of_forgery() {
    campaign(3, 500, |rng, image, story| {
        forge(rng, image, story);
        if forge::is_readable(image) {
            spoil(rng, image, story);
        }
    });
}

/// Loses each sector of superblocks, metadata and log once, alone.
#[test]
fn each_lost_sector_is_noticed_or_does_not_matter() {
    let image = sample::crashed_image(POOL_BYTES);
    let end = forge::superblock(&image).layout.data_start_page as usize * PAGE;
    let log = forge::superblock(&image).layout.log();
    let unproven = log.offset_bytes as usize..log.end_bytes() as usize;
    let records = forge::records(&image);
    let proven: Vec<_> = (records[..records.len() - 1].iter())
        .map(|record| record.offset..record.offset + record.len)
        .collect();
    let mut rng = Rng::new(0);
    for at in (0..end).step_by(SECTOR) {
        let mut damaged = image.clone();
        damaged[at..at + SECTOR].fill(0);
        if damaged == image {
            continue;
        }
        let (report, has_opened) = exercise(&mut rng, &damaged, false);
        assert_agreement(&report, has_opened);
        let is_silent = report.findings.iter().all(|f| f.kind == FindingKind::Unreplayed);
        // After the last record nothing proves that a lost one existed.
        let is_proven = !unproven.contains(&at) || proven.iter().any(|record| record.contains(&at));
        if is_silent && is_proven {
            let pool = reading().open_on(FileMedia::of(&damaged));
            sample::assert_complete(&pool.expect("nothing is wrong"));
        }
    }
}

/// Makes each page unreadable once: the rest is reported, and what can be read is read.
#[test]
fn each_page_that_cannot_be_read_is_a_typed_error() {
    let directory = scratch();
    let path = directory.path().join("pool");
    let image = sample::crashed_image(POOL_BYTES);
    std::fs::write(&path, &image).unwrap();
    for page in 0..(POOL_BYTES / PAGE) as u64 {
        let hole = ByteRange { offset_bytes: page * PAGE_BYTES, len_bytes: PAGE_BYTES };
        let report =
            check(FileMedia::open_with_unreadable(&path, hole), &CheckOptions::default()).unwrap();
        assert!(report.pool.is_some());
        if let Ok(pool) = reading().open_on(FileMedia::open_with_unreadable(&path, hole)) {
            let _ = read_everything(&pool, false);
        }
        let copy = directory.path().join("copy");
        std::fs::write(&copy, &image).unwrap();
        let media: Arc<dyn Media> = FileMedia::open_with_unreadable(&copy, hole);
        match repair(media, &CheckOptions::default()) {
            Ok(repaired) => drop(format!("{repaired:?}")),
            Err(error) => assert!(matches!(error, PoolError::Media(_)), "{error}"),
        }
    }
}

#[test]
fn any_changes_of_a_pool() {
    fuzz(400, 64, crate::support::any_changes::image);
}

#[test]
fn any_changes_of_a_closed_pool() {
    fuzz(400, 64, crate::support::any_changes::saved);
}
