//! Random damage of a pool with files: nothing crashes, hangs or panics, no file shows another
//! file's bytes, and the check, `open` and the repair agree.
//!
//! Accidents flip bits, and zero, tear, copy and swap sectors and pages of metadata and log. An
//! adversary changes fields of slots and fixes the checksums, also inside the log. Content is left
//! alone: no checksum covers it.

use crate::support::damaged::{exercise, read_if_possible, with_unreadable_page};
use crate::support::pool::{FileMedia, alone, forge, reading, scratch};
use crate::support::{ACCIDENTS, accident, closed_image, crashed_image};
use aquifer_check::{CheckOptions, FindingKind, check};
use aquifer_fs::Files;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use aquifer_testkit::campaign::{fuzz, seed, steps};
use aquifer_testkit::rng::Rng;

const PAGE: usize = PAGE_BYTES as usize;

/// The damaged parts: metadata and log.
fn parts(image: &[u8]) -> [std::ops::Range<usize>; 2] {
    let layout = forge::superblock(image).layout;
    [layout.metadata(), layout.log()]
        .map(|part| part.offset_bytes as usize..part.end_bytes() as usize)
}

fn spoil(rng: &mut Rng, image: &mut [u8]) -> String {
    // Metadata more often: only a part of the log is used.
    let part = parts(image)[usize::from(rng.chance(0.3))].clone();
    let unit = if rng.chance(0.7) { SLOT_BYTES } else { PAGE };
    let kind = rng.below(ACCIDENTS);
    accident(rng, image, kind, &part, &part, unit)
}

/// Offset and width of the numbers in slots of files, nodes, run lists and chains.
const FIELDS: [(usize, usize); 24] = [
    (4, 2),
    (6, 2),
    (16, 8),
    (24, 8),
    (32, 8),
    (40, 8),
    (48, 8),
    (80, 4),
    (92, 4),
    (96, 8),
    (104, 8),
    (112, 8),
    (120, 8),
    (128, 8),
    (136, 2),
    (184, 8),
    (192, 8),
    (24, 4),
    (32, 4),
    (36, 1),
    (37, 1),
    (44, 4),
    (56, 4),
    (68, 4),
];

fn forge_slot(rng: &mut Rng, slot: &mut [u8]) -> String {
    let (at, width) = FIELDS[rng.below(FIELDS.len() as u64) as usize];
    let mut wide = [0; 8];
    wide[..width].copy_from_slice(&slot[at..at + width]);
    let before = u64::from_le_bytes(wide);
    let after = match rng.below(8) {
        0 => 0,
        1 => u64::MAX,
        2 => before.wrapping_add(1),
        3 => before.wrapping_sub(1),
        4 => before ^ 1 << rng.below(64),
        5 => 1 << rng.below(64),
        // Another slot.
        _ => rng.below(60),
    };
    slot[at..at + width].copy_from_slice(&after.to_le_bytes()[..width]);
    forge::seal_slot(slot);
    format!("{width} bytes at {at} of a slot: {before:#x} became {after:#x}")
}

fn forge(rng: &mut Rng, image: &mut [u8]) -> String {
    let layout = forge::superblock(image).layout;
    match rng.below(6) {
        0 => {
            let (from, to) = (1 + rng.below(50), 1 + rng.below(50));
            let mut copy = forge::slot(image, &layout, from).to_vec();
            copy[8..16].copy_from_slice(&to.to_le_bytes());
            forge::seal_slot(&mut copy);
            forge::slot(image, &layout, to).copy_from_slice(&copy);
            format!("slot {to} is slot {from} with its number")
        }
        1 => {
            let records = forge::records(image);
            let Some(record) = records.get(rng.below(records.len().max(1) as u64) as usize) else {
                return String::new();
            };
            let bytes = &mut image[record.offset..record.offset + record.len];
            let start = u64::from_le_bytes(bytes[88..96].try_into().unwrap()) as usize;
            let Some(slot) =
                start.checked_add(SLOT_BYTES).and_then(|end| bytes.get_mut(start..end))
            else {
                return String::new();
            };
            let change = forge_slot(rng, slot);
            forge::seal_record(bytes);
            format!("in the record at {}: {change}", record.lsn)
        }
        _ => {
            let number = 1 + rng.below(50);
            format!("slot {number}: {}", forge_slot(rng, forge::slot(image, &layout, number)))
        }
    }
}

fn campaign(
    usual_seed: u64,
    cases: usize,
    damage: impl Fn(&mut Rng, &mut Vec<u8>) -> Vec<String>,
    forges: bool,
) {
    let seed = seed(usual_seed);
    let images = [crashed_image(), closed_image()];
    let (mut sound, mut opened) = (0, 0);
    for case in 0..steps(cases) as u64 {
        let mut rng = Rng::new(seed ^ case << 20);
        let mut image = images[usize::from(rng.chance(0.5))].clone();
        let story = damage(&mut rng, &mut image);
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| exercise(&image, forges)));
        let Ok((report, has_opened)) = outcome else {
            panic!("case {case} of seed {seed}: {story:#?}");
        };
        sound += u64::from(report.is_sound());
        opened += u64::from(has_opened);
    }
    println!("{} cases: {sound} sound, {opened} opened", steps(cases));
    assert!(opened > 0, "damage so great that nothing is tested");
}

#[test]
fn no_accident_crashes_anything_or_mixes_files_up() {
    campaign(
        1,
        250,
        |rng, image| (0..1 + rng.below(3)).map(|_| spoil(rng, image)).collect(),
        false,
    );
}

#[test]
fn no_adversary_crashes_anything() {
    campaign(2, 250, |rng, image| (0..1 + rng.below(2)).map(|_| forge(rng, image)).collect(), true);
}

/// Each sector of the metadata is lost once, alone: that is detected, or the sector was unused.
#[test]
fn each_lost_slot_is_noticed_and_no_file_shows_anothers_bytes() {
    let image = closed_image();
    let metadata = parts(&image)[0].clone();
    for at in metadata.step_by(SLOT_BYTES) {
        let mut damaged = image.clone();
        damaged[at..at + SLOT_BYTES].fill(0);
        if damaged == image {
            continue;
        }
        let report = check(FileMedia::of(&damaged), &CheckOptions::default()).unwrap();
        assert!(!report.is_sound(), "the sector at {at} is not missed");
        read_if_possible(FileMedia::of(&damaged));
    }
}

/// A copy of the node that names a directory, which nothing leads to: it makes no difference where
/// that directory, or another one with its slot, is later.
#[test]
fn names_in_a_lost_node_do_not_count() {
    let mut image = closed_image();
    let layout = forge::superblock(&image).layout;
    let files = Files::new(reading().open_on(FileMedia::of(&image)).unwrap());
    let inode = |path| files.metadata(path).unwrap().ino();
    let (above, moved) = (inode("/a"), inode("/a/c"));
    drop(files);
    let mut slots =
        (1..100).map(|number| (number, forge::slot(&mut image, &layout, number).to_vec()));
    let is_node = |slot: &[u8]| slot.starts_with(b"AQDN") && slot[16..24] == above.to_le_bytes();
    let (_, mut copy) = slots.find(|(_, slot)| is_node(slot)).unwrap();
    let is_free = |slot: &[u8]| slot.starts_with(b"AQIN") && slot[4..6] == [0, 0];
    let (free, _) = slots.find(|(_, slot)| is_free(slot)).unwrap();
    drop(slots);
    copy[8..16].copy_from_slice(&u64::to_le_bytes(free));
    forge::seal_slot(&mut copy);
    forge::slot(&mut image, &layout, free).copy_from_slice(&copy);

    let media = FileMedia::of(&image);
    let files = Files::new(alone().open_on(media.clone()).unwrap());
    files.rename("/a/c", "/c").unwrap();
    drop(files);
    let files = Files::new(alone().open_on(media.clone()).expect("it is in another directory"));
    files.remove_dir("/c").unwrap();
    let is_again = |name: &str| {
        files.create_file(name).unwrap();
        files.metadata(name).unwrap().ino() == moved
    };
    assert!((0..100).any(|index| is_again(&format!("/{index}"))), "no file gets the slot");
    drop(files);
    let report = check(media.clone(), &CheckOptions::default()).unwrap();
    assert_eq!(report.findings.len(), 1, "{report}");
    alone().open_on(media).expect("the slot is a file's");
}

#[test]
fn each_page_that_cannot_be_read_is_a_typed_error() {
    let directory = scratch();
    let path = directory.path().join("pool");
    let image = crashed_image();
    std::fs::write(&path, &image).unwrap();
    let layout = forge::superblock(&image).layout;
    for page in 0..layout.data_start_page {
        let report = check(with_unreadable_page(&path, page), &CheckOptions::default()).unwrap();
        assert!(
            report.findings.iter().any(|finding| finding.kind == FindingKind::Unreadable)
                || page >= layout.log_start_page
        );
        read_if_possible(with_unreadable_page(&path, page));
    }
}

#[test]
fn any_changes_of_a_pool_with_files() {
    fuzz(150, 32, crate::support::damaged::image);
}
