//! The file table against a plain list of pages, and how much an edit writes.

use std::collections::BTreeSet;

use crate::common::Errors;
use aquifer_format::file::{FILE_RUNS, FileInode, FileKind};
use aquifer_format::file_table::{self, Extent, FileBytes, FilePage, FilePages, FileTable};
use aquifer_format::run::{MAX_PAGES, MAX_RUN_PAGES, Run};
use aquifer_format::run_list::LIST_RUNS;
use aquifer_format::{PAGE_BYTES, StructureError};
use proptest::prelude::*;

/// An error of a table or of its slots.
#[derive(Debug, PartialEq, thiserror::Error)]
enum SlotError {
    #[error("no slot is free")]
    Full,
    #[error(transparent)]
    Structure(#[from] StructureError),
}

#[derive(Debug, Clone, Copy, Default)]
struct OfTable;

impl Errors for OfTable {
    type Error = SlotError;

    fn full(_: u64) -> SlotError {
        SlotError::Full
    }
}

type SlotMap = crate::common::SlotMap<OfTable>;

fn pages(first: u64, pages: u64) -> FilePages {
    FilePages { first: FilePage(first), pages }
}

fn run(start_page: u64, pages: u64) -> Run {
    Run { start_page, pages }
}

/// A file: its stored form, and the table that an open file would keep.
#[derive(Debug, Clone)]
struct File {
    inode: FileInode,
    table: FileTable,
}

impl File {
    fn new(number: u64) -> File {
        let inode = FileInode::new(FileKind::File, number, 1);
        File { table: FileTable::empty(&inode), inode }
    }

    /// Makes and stores one edit; returns what was removed.
    fn edit(&mut self, slots: &mut SlotMap, range: FilePages, replacement: &[Run]) -> Vec<Run> {
        slots.count_anew();
        let removed = self.table.splice(range, replacement).unwrap();
        self.table.store(&mut self.inode, slots).unwrap();
        removed
    }

    /// A file with this many runs of `pages_each` pages, no two of which can be joined.
    fn fragmented(number: u64, slots: &mut SlotMap, runs: u64, pages_each: u64) -> File {
        let mut file = File::new(number);
        let lie = |index: u64| run(1_000_000 + index * 2 * pages_each, pages_each);
        let all: Vec<Run> = (0..runs).map(lie).collect();
        file.edit(slots, pages(0, runs * pages_each), &all);
        file
    }

    fn slots(&self, slots: &SlotMap) -> BTreeSet<u64> {
        let mut own = BTreeSet::new();
        let on_slot = |slot| assert!(own.insert(slot), "slot {slot} is there twice");
        file_table::check(&self.inode, slots, on_slot, |_| ()).unwrap();
        own
    }
}

/// Each page of a file: a page of the pool, or a hole.
type Model = Vec<Option<u64>>;

fn expand(runs: impl IntoIterator<Item = Run>) -> Model {
    let page_of = |run: Run, index| (!run.is_hole()).then_some(run.start_page + index);
    (runs.into_iter())
        .flat_map(|run| (0..run.pages).map(move |index| page_of(run, index)))
        .collect()
}

/// The fewest runs that can represent these pages.
fn fewest_runs(model: &Model) -> usize {
    let is_joined = |pair: &[Option<u64>]| match (pair[0], pair[1]) {
        (None, None) => true,
        (Some(page), Some(next)) => page + 1 == next,
        _ => false,
    };
    model.windows(2).filter(|pair| !is_joined(pair)).count() + usize::from(!model.is_empty())
}

fn splice_model(model: &mut Model, range: FilePages, replacement: &Model) -> Model {
    let (first, end) = (range.first.0 as usize, range.end().0.min(1 << 32) as usize);
    let removed = model.iter().take(end).skip(first).copied().collect();
    let len = model.len().max(first + replacement.len());
    model.resize(len, None);
    for (index, page) in model.iter_mut().enumerate().take(end).skip(first) {
        *page = replacement.get(index - first).copied().flatten();
    }
    trim(model);
    removed
}

fn trim(model: &mut Model) {
    while model.last() == Some(&None) {
        model.pop();
    }
}

fn compare(table: &FileTable, model: &Model) {
    assert_eq!(table.pages(), model.len() as u64);
    assert_eq!(table.mapped_pages(), model.iter().flatten().count() as u64);
    assert_eq!(table.run_count(), fewest_runs(model), "as few runs as possible");
    assert_eq!(&expand(table.runs()), model);
    for (page, expected) in (0..).zip(model) {
        let found = table.find(FilePage(page)).expect("a page of the table");
        assert_eq!((found.first, expand([found.run])[0]), (FilePage(page), *expected));
    }
    assert_eq!(table.find(FilePage(table.pages())), None);
    let is_one = fewest_runs(model) == 1;
    assert_eq!(table.as_one_run().is_some(), is_one);
}

/// Asserts that the extents of a range are in order, without a gap, of maximum length, and match
/// the model.
fn compare_range(table: &FileTable, model: &Model, range: FilePages) {
    let extents: Vec<Extent> = table.extents(range).collect();
    let mut next = range.first;
    for extent in &extents {
        assert_eq!(extent.first, next);
        next = extent.pages().end();
    }
    assert_eq!(next, range.end());
    let expected: Model = (range.first.0..range.end().0)
        .map(|page| *model.get(page as usize).unwrap_or(&None))
        .collect();
    assert_eq!(expand(extents.iter().map(|extent| extent.run)), expected);
    assert_eq!(extents.len(), fewest_runs(&expected), "{extents:?}");
}

#[derive(Debug, Clone)]
enum Edit {
    Put { at: u64, lens: Vec<(u64, bool)> },
    Append { lens: Vec<(u64, bool)> },
    Scatter { at: u64, count: u64 },
    Touch { at: u64 },
    Punch { at: u64, pages: u64 },
    Truncate { at: u64 },
    Exchange { at: u64, other_at: u64, pages: u64 },
    Collapse { at: u64, pages: u64 },
    Insert { at: u64, pages: u64 },
    Load,
}

fn lens() -> impl Strategy<Value = Vec<(u64, bool)>> {
    // Long or short; directly after the last run or elsewhere.
    prop::collection::vec((1..20u64, any::<bool>()), 1..8)
}

fn edits() -> impl Strategy<Value = Vec<(bool, bool, Edit)>> {
    let edit = prop_oneof![
        2 => (0..1500u64, lens()).prop_map(|(at, lens)| Edit::Put { at, lens }),
        3 => lens().prop_map(|lens| Edit::Append { lens }),
        3 => (0..1200u64, 1..250u64).prop_map(|(at, count)| Edit::Scatter { at, count }),
        4 => (0..1200u64).prop_map(|at| Edit::Touch { at }),
        2 => (0..1500u64, 1..400u64).prop_map(|(at, pages)| Edit::Punch { at, pages }),
        1 => (0..2000u64).prop_map(|at| Edit::Truncate { at }),
        2 => (0..1500u64, 0..1500u64, 1..300u64)
            .prop_map(|(at, other_at, pages)| Edit::Exchange { at, other_at, pages }),
        2 => (0..1500u64, 1..300u64).prop_map(|(at, pages)| Edit::Collapse { at, pages }),
        2 => (0..1500u64, 1..100u64).prop_map(|(at, pages)| Edit::Insert { at, pages }),
        1 => Just(Edit::Load),
    ];
    // Of the first or the second file; stored at once or together with later edits.
    prop::collection::vec((any::<bool>(), prop::bool::weighted(0.8), edit), 1..40)
}

/// Two files and their expected content.
struct Files {
    slots: SlotMap,
    files: [(File, Model); 2],
    next_page: u64,
    /// Number of edits not yet stored, per file.
    unsaved: [usize; 2],
}

impl Files {
    fn allocate(&mut self, lens: &[(u64, bool)]) -> Vec<Run> {
        let allocate = |&(len, is_adjacent): &(u64, bool)| {
            self.next_page += u64::from(!is_adjacent);
            let allocated = run(self.next_page, len);
            self.next_page += len;
            allocated
        };
        lens.iter().map(allocate).collect()
    }

    fn splice(&mut self, file: usize, at: u64, len: u64, replacement: &[Run]) -> Vec<Run> {
        let (File { table, .. }, model) = &mut self.files[file];
        let before: Vec<Run> = table.runs().collect();
        let old = table.clone();
        self.unsaved[file] += 1;
        let removed = table.splice(pages(at, len), replacement).unwrap();
        assert!(old.runs().eq(before), "a clone stays as it was");
        let expected = splice_model(model, pages(at, len), &expand(replacement.to_vec()));
        assert_eq!(expand(removed.clone()), expected);
        removed
    }

    fn apply(&mut self, file: usize, edit: &Edit) {
        let len: fn(&[Run]) -> u64 = |runs| runs.iter().map(|run| run.pages).sum();
        match edit {
            Edit::Put { at, lens } => {
                let runs = self.allocate(lens);
                self.splice(file, *at, len(&runs), &runs);
            }
            Edit::Append { lens } => {
                let runs = self.allocate(lens);
                let end = self.files[file].0.table.pages();
                self.splice(file, end, len(&runs), &runs);
            }
            Edit::Scatter { at, count } => {
                let runs = self.allocate(&vec![(1, false); *count as usize]);
                self.splice(file, *at, *count, &runs);
            }
            Edit::Touch { at } => {
                let runs = self.allocate(&[(1, false)]);
                self.splice(file, *at, 1, &runs);
            }
            Edit::Punch { at, pages } => drop(self.splice(file, *at, *pages, &[])),
            Edit::Truncate { at } => drop(self.splice(file, *at, u64::MAX, &[])),
            Edit::Exchange { at, other_at, pages } => {
                let there = &self.files[1 - file].0.table;
                let taken: Vec<Run> = there
                    .extents(FilePages { first: FilePage(*other_at), pages: *pages })
                    .map(|extent| extent.run)
                    .collect();
                let removed = self.splice(file, *at, *pages, &taken);
                self.splice(1 - file, *other_at, *pages, &removed);
                self.store(1 - file);
            }
            Edit::Collapse { at, pages } => {
                self.unsaved[file] += 1;
                let (File { table, .. }, model) = &mut self.files[file];
                let [first, end] = [*at, at + pages].map(|page| model.len().min(page as usize));
                let removed: Model = model.drain(first..end).collect();
                trim(model);
                let range = FilePages { first: FilePage(*at), pages: *pages };
                assert_eq!(expand(table.collapse(range)), removed);
            }
            Edit::Insert { at, pages } => {
                self.unsaved[file] += 1;
                let (File { table, .. }, model) = &mut self.files[file];
                if (*at as usize) < model.len() {
                    let at = *at as usize;
                    model.splice(at..at, (0..*pages).map(|_| None));
                }
                table.insert(FilePages { first: FilePage(*at), pages: *pages }).unwrap();
            }
            Edit::Load => {
                self.store(file);
                let File { inode, table } = &mut self.files[file].0;
                *table = FileTable::load(inode, &self.slots).unwrap();
            }
        }
    }

    fn store(&mut self, file: usize) {
        let File { inode, table } = &mut self.files[file].0;
        self.slots.count_anew();
        // Edits that undo each other may put a list that is unchanged.
        self.slots.is_strict = std::mem::take(&mut self.unsaved[file]) <= 1;
        table.store(inode, &mut self.slots).unwrap();
        assert!(table.is_current(inode));
    }

    /// Asserts that the stored table matches the cached one, and has no slot too many.
    fn check_stored(&self, file: usize) {
        let (File { inode, table }, model) = &self.files[file];
        let inode = FileInode::decode(&inode.encode().unwrap(), inode.number).unwrap();
        let loaded = FileTable::load(&inode, &self.slots).unwrap();
        assert!(loaded.is_current(&inode));
        assert!(loaded.runs().eq(table.runs()));
        assert_eq!(loaded.slot_count(), table.slot_count());
        compare(&loaded, model);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn it_is_as_a_plain_list_of_pages(edits in edits(), range in (0..1500u64, 0..600u64)) {
        let files = [7, 8].map(|number| (File::new(number), Model::new()));
        let slots = SlotMap::default();
        let mut files = Files { slots, files, next_page: 1000, unsaved: [0; 2] };
        for (is_second, is_stored, edit) in edits {
            let file = usize::from(is_second);
            if matches!(edit, Edit::Touch { .. }) {
                files.store(file);
            }
            files.apply(file, &edit);
            let (File { table, .. }, model) = &files.files[file];
            compare(table, model);
            compare_range(table, model, pages(range.0, range.1));
            if !is_stored {
                continue;
            }
            files.store(0);
            files.store(1);
            if matches!(edit, Edit::Touch { .. }) {
                files.apply(file, &edit);
                files.store(file);
                prop_assert!(files.slots.puts <= 2, "{} slots for one page", files.slots.puts);
            }
            files.check_stored(0);
            files.check_stored(1);
            let [first, second] = [0, 1].map(|file| files.files[file].0.slots(&files.slots));
            prop_assert!(first.is_disjoint(&second));
            prop_assert_eq!(&first | &second, files.slots.used(), "no slot is left over");
        }
    }
}

#[test]
fn an_append_writes_the_inode_or_the_last_list() {
    let (mut slots, mut file) = (SlotMap::default(), File::new(7));
    let mut lists_begun = 0;
    for index in 0..10_000u64 {
        file.edit(&mut slots, pages(index, 1), &[run(5000 + 2 * index, 1)]);
        let runs = index + 1;
        let expected = match runs.checked_sub(FILE_RUNS as u64 + 1) {
            // In the inode.
            None => 0,
            // The inode links to the first slot.
            Some(0) => 1,
            // The previous slot links to a new one.
            Some(in_lists) if in_lists % LIST_RUNS as u64 == 0 => 2,
            Some(_) => 1,
        };
        lists_begun += u64::from(expected == 2);
        assert_eq!((slots.puts, slots.given_back), (expected, 0), "{runs} runs");
    }
    assert_eq!(file.table.run_count(), 10_000);
    assert_eq!(lists_begun + 1, file.table.slot_count() as u64);
    assert_eq!(file.table.slot_count(), (10_000 - FILE_RUNS).div_ceil(LIST_RUNS), "all are full");
    // Pages that continue the last run extend it.
    let last = file.table.find(FilePage(9_999)).unwrap().run;
    file.edit(&mut slots, pages(10_000, 50), &[run(last.end_page(), 50)]);
    assert_eq!((file.table.run_count(), slots.puts), (10_000, 1));
}

#[test]
fn an_edit_in_the_middle_writes_one_or_two_lists() {
    let mut slots = SlotMap::default();
    let mut file = File::fragmented(7, &mut slots, 4000, 8);
    let lists = file.table.slot_count();
    // Everywhere, including the borders of lists: each edit cuts a run in three, until all lists
    // have been split.
    for index in 0..2000u64 {
        file.edit(&mut slots, pages(index * 16 + 3, 1), &[run(100 + 2 * index, 1)]);
        assert!(slots.puts <= 2, "{} slots", slots.puts);
    }
    assert_eq!(file.table.run_count(), 4000 + 2 * 2000);
    assert!(file.table.slot_count() <= 3 * lists, "{} lists", file.table.slot_count());
    // And back: as many runs as before, in about as many lists.
    let before: Vec<u64> = (0..2000).map(|index| index * 16 + 3).collect();
    for page in before {
        let left = file.table.find(FilePage(page - 1)).unwrap().run;
        file.edit(&mut slots, pages(page, 1), &[run(left.end_page(), 1)]);
        assert!(slots.puts <= 2 && slots.given_back <= 2);
    }
    assert_eq!(file.table.run_count(), 4000);
    assert!(file.table.slot_count() <= 2 * lists, "{} lists", file.table.slot_count());
}

#[test]
fn an_edit_at_the_border_of_full_lists_writes_no_more_than_it_must() {
    let mut slots = SlotMap::default();
    let file = File::fragmented(7, &mut slots, (FILE_RUNS + 3 * LIST_RUNS) as u64, 8);
    for list in 0..3 {
        let border = (FILE_RUNS + list * LIST_RUNS) as u64 * 8;
        // Pages of both lists change both, and both are full.
        let edits = [(border - 1, 1, 2), (border, 1, 2), (border - 8, 16, 2), (border - 1, 2, 3)];
        for (first, len, most) in edits {
            let (mut file, mut slots) = (file.clone(), slots.clone());
            file.edit(&mut slots, pages(first, len), &[run(100, len)]);
            assert!(slots.puts <= most, "{} slots for {len} pages at {first}", slots.puts);
            assert_eq!(file.slots(&slots), slots.used());
        }
    }
}

#[test]
fn what_is_unchanged_is_not_stored() {
    let mut slots = SlotMap::default();
    let mut file = File::fragmented(7, &mut slots, 300, 2);
    let inode = file.inode.clone();
    // Holes beyond the end, and nothing at all.
    assert!(file.edit(&mut slots, pages(5000, 100), &[]).is_empty());
    assert!(file.edit(&mut slots, pages(5000, 100), &[run(0, 100)]).is_empty());
    assert!(file.edit(&mut slots, pages(10, 0), &[]).is_empty());
    assert_eq!((slots.puts, &file.inode), (0, &inode));
    file.edit(&mut slots, pages(1, 1), &[]);
    assert_eq!(file.inode.layout_version, inode.layout_version + 1);
}

#[test]
fn pages_move_without_touching_the_lists_behind() {
    let mut slots = SlotMap::default();
    let mut file = File::fragmented(7, &mut slots, 4000, 8);
    let (inode, lists) = (file.inode.clone(), file.table.slot_count());
    slots.count_anew();
    file.table.insert(pages(1000, 5)).unwrap();
    file.table.store(&mut file.inode, &mut slots).unwrap();
    assert!(slots.puts <= 2, "{} slots of {lists}", slots.puts);
    assert_eq!(file.inode.layout_version, inode.layout_version + 1);
    assert_eq!(file.table.find(FilePage(1004)).unwrap().run, run(0, 1));
    slots.count_anew();
    assert_eq!(file.table.collapse(pages(1000, 5)), [run(0, 5)]);
    file.table.store(&mut file.inode, &mut slots).unwrap();
    assert!(slots.puts <= 2, "{} slots of {lists}", slots.puts);
    assert_eq!((file.inode.pages, file.table.run_count()), (inode.pages, 4000));
    // Behind the end there is nothing to move.
    let inode = file.inode.clone();
    assert!(file.table.collapse(pages(32_000, 5)).is_empty());
    file.table.insert(pages(32_000, 5)).unwrap();
    file.table.store(&mut file.inode, &mut slots).unwrap();
    assert_eq!(file.inode, inode);
    let error = file.table.insert(pages(0, MAX_PAGES - 31_999)).unwrap_err();
    assert!(matches!(error, StructureError::FileTooLarge), "{error}");
    file.table.insert(pages(0, MAX_PAGES - 32_000)).unwrap();
    assert_eq!(file.table.pages(), MAX_PAGES);
}

#[test]
fn truncation_gives_all_slots_behind_back() {
    let mut slots = SlotMap::default();
    let mut file = File::fragmented(7, &mut slots, 1000, 2);
    let removed = file.edit(&mut slots, FilePages::all_from(FilePage(501)), &[]);
    assert_eq!(removed.iter().map(|run| run.pages).sum::<u64>(), 2000 - 501);
    assert_eq!((slots.puts, slots.used().len()), (1, file.table.slot_count()));
    // All runs fit in the inode again.
    file.edit(&mut slots, FilePages::all_from(FilePage(60)), &[]);
    assert_eq!((slots.puts, slots.used().len(), file.inode.part), (0, 0, 0));
    file.edit(&mut slots, FilePages::all_from(FilePage(0)), &[]);
    assert_eq!((file.inode.runs.len(), file.inode.pages), (0, 0));
}

#[test]
fn a_fragmented_file_is_shortened_and_removed_in_steps() {
    let mut slots = SlotMap::default();
    let mut file = File::fragmented(7, &mut slots, 3000, 2);
    file.edit(&mut slots, pages(100, 2), &[]);
    let mut removed = expand(file.edit(
        &mut slots,
        FilePages::all_from(file.table.start_of_last_runs(1000)),
        &[],
    ));
    assert_eq!((file.table.run_count(), removed.len()), (2000, 2000));
    assert_eq!(file.table.start_of_last_runs(2000), FilePage(0));
    assert_eq!(file.table.start_of_last_runs(usize::MAX), FilePage(0));
    let mut steps = 0;
    while file.inode.part != 0 || !file.inode.runs.is_empty() {
        let step = file_table::give_back(&mut file.inode, &mut slots, 200, usize::MAX).unwrap();
        assert!(step.len() <= 200);
        removed.extend(expand(step));
        file.slots(&slots);
        steps += 1;
    }
    assert!((2000 / 200..=2 * 2000 / 200).contains(&steps), "{steps} steps");
    assert_eq!((slots.used().len(), file.inode.pages), (0, 0));
    let pages: BTreeSet<u64> = removed.iter().map(|page| page.expect("no hole")).collect();
    assert_eq!((pages.len(), removed.len()), (6000 - 2, 6000 - 2));
}

#[test]
fn runs_are_as_long_as_they_can_be_and_no_longer() {
    let (mut slots, mut file) = (SlotMap::default(), File::new(7));
    let whole = run(1000, 2 * MAX_RUN_PAGES + 5);
    file.edit(&mut slots, pages(0, whole.pages), &[whole]);
    assert_eq!(file.inode.runs.len(), 3);
    assert_eq!(file.table.as_one_run(), Some(whole));
    let across = FileBytes { offset_bytes: (MAX_RUN_PAGES - 1) * PAGE_BYTES + 7, len_bytes: 9000 };
    let found = file.table.contiguous(across).unwrap();
    assert_eq!(found.offset_bytes, 1000 * PAGE_BYTES + across.offset_bytes);
    // Page by page, the result is the same.
    file.edit(&mut slots, pages(0, MAX_RUN_PAGES + 1), &[]);
    file.edit(&mut slots, pages(0, MAX_RUN_PAGES - 1), &[run(1000, MAX_RUN_PAGES - 1)]);
    let start_page = 1000 + MAX_RUN_PAGES - 1;
    file.edit(&mut slots, pages(MAX_RUN_PAGES - 1, 2), &[run(start_page, 2)]);
    assert_eq!(file.inode.runs.len(), 3);
    assert_eq!(file.table.as_one_run(), Some(whole));
    assert_eq!(file.inode.pages, whole.pages);
}

#[test]
fn a_sparse_file_of_the_largest_size_takes_two_runs() {
    let (mut slots, mut file) = (SlotMap::default(), File::new(7));
    file.edit(&mut slots, pages(MAX_PAGES - 1, 1), &[run(77, 1)]);
    assert_eq!(file.inode.runs, [run(0, MAX_PAGES - 1), run(77, 1)]);
    let inode = FileInode::decode(&file.inode.encode().unwrap(), 7).unwrap();
    assert_eq!(FileTable::load(&inode, &slots).unwrap().pages(), MAX_PAGES);
    for first in [MAX_PAGES, u64::MAX - 1] {
        let error = file.table.splice(pages(first, 1), &[run(78, 1)]).unwrap_err();
        assert!(matches!(error, StructureError::FileTooLarge), "{error}");
    }
    assert_eq!(file.table.find(FilePage(u64::MAX)), None);
    let everything = FileBytes { offset_bytes: 5, len_bytes: u64::MAX };
    let found: Vec<_> = file.table.pieces(everything).collect();
    assert_eq!(found.len(), 3, "a hole, the page, a hole");
    assert_eq!(found[2].file.end_bytes(), u64::MAX);
}

#[test]
fn bytes_are_cut_at_both_ends() {
    let (mut slots, mut file) = (SlotMap::default(), File::new(7));
    file.edit(&mut slots, pages(1, 3), &[run(50, 1), run(60, 2)]);
    let range = FileBytes { offset_bytes: 4000, len_bytes: 3 * PAGE_BYTES };
    let found: Vec<_> = file.table.pieces(range).collect();
    let summary: Vec<_> = (found.iter())
        .map(|piece| {
            (piece.file.offset_bytes, piece.file.len_bytes, piece.pool.map(|at| at.offset_bytes))
        })
        .collect();
    assert_eq!(
        summary,
        [(4000, 96, None), (4096, 4096, Some(50 * 4096)), (8192, 4000 + 4096, Some(60 * 4096)),]
    );
    assert_eq!(found[2].pool.unwrap().len_bytes, 8096);
    assert!(file.table.contiguous(range).is_none(), "a hole and two runs");
    let inside = FileBytes { offset_bytes: 8200, len_bytes: 8000 };
    assert_eq!(file.table.contiguous(inside).unwrap().offset_bytes, 60 * 4096 + 8);
    let behind = FileBytes { offset_bytes: 4 * PAGE_BYTES - 1, len_bytes: 2 };
    assert!(file.table.contiguous(behind).is_none(), "a hole behind the end");
    let none = FileBytes { offset_bytes: 5000, len_bytes: 0 };
    assert!(file.table.contiguous(none).is_none() && file.table.pieces(none).next().is_none());
}

#[test]
fn without_a_free_slot_nothing_is_lost() {
    let mut slots = SlotMap::default();
    let file = File::fragmented(7, &mut slots, FILE_RUNS as u64 + LIST_RUNS as u64, 1);
    slots.limit = 1;
    let mut longer = file.clone();
    longer.table.splice(pages(1000, 1), &[run(5, 1)]).unwrap();
    let error = longer.table.store(&mut longer.inode, &mut slots).unwrap_err();
    assert_eq!(error, SlotError::Full);
    assert_eq!(longer.inode, file.inode);
    // The stored table is still valid.
    let mut shorter = file.clone();
    shorter.edit(&mut slots, FilePages::all_from(FilePage(50)), &[]);
    assert_eq!(slots.used().len(), 1);
    let mut empty = file;
    empty.inode = shorter.inode;
    let stale = std::panic::catch_unwind(move || {
        empty.table.splice(pages(0, 1), &[]).unwrap();
        empty.table.store(&mut empty.inode, &mut SlotMap::default())
    });
    assert!(stale.is_err(), "a table of an older state is refused");
}

/// `cargo test --release -p aquifer-format --test all file_table -- --ignored --nocapture`
#[test]
#[ignore = "prints figures"]
fn measure() {
    use std::hint::black_box;
    use std::time::Instant;

    for runs in [1, FILE_RUNS as u64, 10_000] {
        let mut slots = SlotMap::default();
        let mut file = File::fragmented(7, &mut slots, runs, 4);
        let len_pages = file.table.pages();
        let find = |table: &FileTable, count: u64, step: u32| {
            let (started, mut sum, mut at) = (Instant::now(), 0, 0u32);
            for _ in 0..count {
                // A division would cost as much as the lookup being measured.
                at = at.wrapping_add(step);
                let page = (u64::from(at) * len_pages) >> 32;
                sum += table.find(FilePage(black_box(page))).unwrap().run.start_page;
            }
            black_box(sum);
            started.elapsed().as_nanos() as f64 / count as f64
        };
        let best = |measure: &mut dyn FnMut() -> f64| {
            (0..7).map(|_| measure()).fold(f64::INFINITY, f64::min)
        };
        let random_ns = best(&mut || find(&file.table, 2_000_000, 2_654_435_769));
        let sequential_ns = best(&mut || find(&file.table, 2_000_000, 1000));
        let range = FileBytes { offset_bytes: 4096 * (len_pages / 2), len_bytes: 4096 };
        let contiguous_ns = best(&mut || {
            let started = Instant::now();
            for _ in 0..2_000_000 {
                black_box(file.table.contiguous(black_box(range)));
            }
            started.elapsed().as_nanos() as f64 / 2e6
        });
        let load_us = best(&mut || {
            let started = Instant::now();
            black_box(FileTable::load(&file.inode, &slots).unwrap());
            started.elapsed().as_nanos() as f64 / 1e3
        });
        let clone_us = best(&mut || {
            let started = Instant::now();
            black_box(file.table.clone());
            started.elapsed().as_nanos() as f64 / 1e3
        });
        slots.is_strict = false;
        let (mut append_ns, mut edit_ns, mut puts) = (0, 0, 0);
        for index in 0..1000 {
            let new = [run(500 + 2 * index, 1)];
            let started = Instant::now();
            let mut clone = file.table.clone();
            clone.splice(pages(clone.pages(), 1), &new).unwrap();
            append_ns += started.elapsed().as_nanos();
            file.table = clone;
            slots.count_anew();
            file.table.store(&mut file.inode, &mut slots).unwrap();
            puts += slots.puts;
            let started = Instant::now();
            let mut clone = file.table.clone();
            clone.splice(pages(index * len_pages / 1000, 1), &new).unwrap();
            edit_ns += started.elapsed().as_nanos();
        }
        println!(
            "{runs:>6} runs: find {random_ns:.1} ns at random, {sequential_ns:.1} in order, contiguous {contiguous_ns:.1} \
             ns; load {load_us:.1} us, clone {clone_us:.2} us, clone and append {append_ns} ns, clone and edit {edit_ns} \
             ns, {} slots put per append",
            puts as f64 / 1000.0,
            append_ns = append_ns / 1000,
            edit_ns = edit_ns / 1000,
        );
    }
}
