//! Whatever the slots of a file hold: reading, checking and giving back terminate without a panic,
//! and detect all inconsistencies.

use crate::common::SlotMap;
use aquifer_format::file_table::{self, FilePage, FilePages, FileTable};
use aquifer_fs::FsError;
use aquifer_fs::attributes::{self, SetMode};
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::format::run::Run;
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use proptest::prelude::*;

const NEXT_OFFSET: usize = 24;
const OWNER_OFFSET: usize = 16;
const COUNT_OFFSET: usize = 4;
const NUMBER: u64 = 7;

/// A file with ten lists and attributes in ten slots, and the slots of a second file.
fn sample() -> (FileInode, SlotMap) {
    let mut slots = SlotMap::default();
    let mut make = |number| {
        let mut inode = FileInode::new(FileKind::File, number, 1);
        let mut table = FileTable::empty(&inode);
        let runs: Vec<Run> = (0..600)
            .map(|index| Run { start_page: 1000 + 5 * index, pages: 1 + index % 3 })
            .collect();
        let pages = runs.iter().map(|run| run.pages).sum();
        table.splice(FilePages { first: FilePage(3), pages }, &runs).unwrap();
        table.store(&mut inode, &mut slots).unwrap();
        for index in 0..10 {
            let name = format!("user.{index}").into_bytes();
            attributes::set(&mut inode, &mut slots, &name, &[index; 450], SetMode::Any).unwrap();
        }
        inode
    };
    let inode = make(NUMBER);
    make(NUMBER + 1);
    slots.is_strict = false;
    (inode, slots)
}

fn is_damage<T>(result: Result<T, impl Into<FsError>>) -> bool {
    match result.map_err(Into::into) {
        Ok(_) => false,
        Err(FsError::Damaged { .. }) => true,
        Err(error) => panic!("not the error for damage: {error}"),
    }
}

/// Reads everything; returns whether the table and the attributes are damaged.
fn read_all(inode: &FileInode, slots: &SlotMap) -> (bool, bool) {
    let mut steps = 0;
    let checked = file_table::check(inode, slots, |_| steps += 1, |_| ());
    assert!(steps <= 3 * slots.used().len(), "{steps} steps");
    let loaded = FileTable::load(inode, slots);
    assert_eq!(checked.is_ok(), loaded.is_ok(), "what is checked is what is loaded");
    if let Ok(table) = &loaded {
        let everything = FilePages { first: FilePage(0), pages: table.pages() };
        let pages: u64 = table.extents(everything).map(|extent| extent.run.pages).sum();
        assert_eq!(pages, table.pages());
        assert!(table.find(FilePage(u64::MAX)).is_none());
    }
    let mut inode_left = inode.clone();
    let mut slots_left = slots.clone();
    while inode_left.part != 0 || !inode_left.runs.is_empty() {
        if is_damage(file_table::give_back(&mut inode_left, &mut slots_left, 100, usize::MAX)) {
            assert!(loaded.is_err(), "a whole table can be given back");
            break;
        }
    }
    let mut steps = 0;
    let attributes = attributes::check(inode, slots, |_| steps += 1);
    assert!(steps <= 300, "{steps} steps");
    assert_eq!(attributes.is_ok(), attributes::list(inode, slots).is_ok());
    let _ = attributes::get(inode, slots, b"user.3");
    (is_damage(loaded), is_damage(attributes))
}

#[test]
fn a_whole_file_is_not_damaged() {
    let (inode, slots) = sample();
    assert_eq!(read_all(&inode, &slots), (false, false));
}

#[test]
fn chains_that_lead_anywhere_else_are_found_out() {
    let (inode, slots) = sample();
    let (mut lists, mut chain) = (Vec::new(), Vec::new());
    file_table::check(&inode, &slots, |slot| lists.push(slot), |_| ()).unwrap();
    attributes::check(&inode, &slots, |slot| chain.push(slot)).unwrap();
    assert!(lists.len() >= 10 && chain.len() >= 9, "{} and {}", lists.len(), chain.len());
    // Link each slot to each other one, itself, another file's slots, a free one, and none.
    let targets: Vec<u64> = slots.used().into_iter().chain([0, 1, 5000, u64::MAX]).collect();
    let next_of = |own: &[u64], slot| {
        let index = own.iter().position(|own| *own == slot);
        index.map(|index| own.get(index + 1).copied().unwrap_or(0))
    };
    for &from in lists.iter().chain(&chain) {
        for &to in &targets {
            let mut damaged = slots.clone();
            damaged.damage(from, NEXT_OFFSET, &to.to_le_bytes(), true);
            let expected =
                [&lists, &chain].map(|own| next_of(own, from).is_some_and(|next| next != to));
            assert_eq!(read_all(&inode, &damaged), expected.into(), "from {from} to {to}");
        }
    }
    let other = FileInode { part: lists[1], ..inode.clone() };
    assert_eq!(read_all(&other, &slots), (true, false), "a list left out: its pages are missing");
    let other = FileInode { number: NUMBER + 1, ..inode.clone() };
    assert_eq!(read_all(&other, &slots), (true, true), "the slots of another file");
}

#[test]
fn a_list_as_it_was_before_its_last_change_is_found_out() {
    let (mut inode, mut slots) = sample();
    let mut before = slots.clone();
    let mut table = FileTable::load(&inode, &slots).unwrap();
    let last = FilePage(table.pages());
    table.splice(FilePages { first: last, pages: 1 }, &[Run { start_page: 9, pages: 1 }]).unwrap();
    table.store(&mut inode, &mut slots).unwrap();
    assert_eq!(read_all(&inode, &slots), (false, false));
    assert_eq!(read_all(&inode, &before), (true, false));
    before.damage(inode.attributes, 100, &[1], false);
    assert_eq!(read_all(&inode, &before), (true, true));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_bytes_end_in_an_error_or_a_table(
        damages in prop::collection::vec(
            (
                any::<prop::sample::Index>(),
                prop_oneof![
                    Just(COUNT_OFFSET), Just(OWNER_OFFSET), Just(NEXT_OFFSET), 0..SLOT_BYTES - 16,
                ],
                prop_oneof![0..40u64, any::<u64>()],
                1..=8usize,
                prop::bool::weighted(0.9),
            ),
            1..6,
        ),
        part in prop::option::weighted(0.1, 0..50u64),
        pages in prop::option::weighted(0.1, any::<u64>()),
    ) {
        let (mut inode, mut slots) = sample();
        let used: Vec<u64> = slots.used().into_iter().collect();
        for (index, offset, value, len, is_sealed) in damages {
            let slot = used[index.index(used.len())];
            slots.damage(slot, offset, &value.to_le_bytes()[..len], is_sealed);
        }
        inode.part = part.unwrap_or(inode.part);
        inode.attributes = part.unwrap_or(inode.attributes);
        inode.pages = pages.unwrap_or(inode.pages);
        read_all(&inode, &slots);
    }

    #[test]
    fn any_inode_ends_in_an_error_or_a_table(
        runs in prop::collection::vec((0..3u64, 1..1u64 << 40), 0..40),
        pages in any::<u64>(),
    ) {
        let mut inode = FileInode::new(FileKind::File, NUMBER, 1);
        inode.runs = runs.into_iter().map(|(start_page, pages)| Run { start_page, pages }).collect();
        inode.pages = pages;
        read_all(&inode, &SlotMap::default());
    }
}
