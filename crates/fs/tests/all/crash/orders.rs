//! Each change of page ownership, followed by each way to store bytes, without a sync.
//!
//! A store to a page of the page cache may reach the disk before the record that gave the page to
//! its file. If that record is lost, the page belongs to its previous owner again (another file, or
//! another part of this one), with the bytes of the new one.

use aquifer_crashkit::{CrashFailure, Explored, Plan, explore};
use aquifer_fs::{FallocateMode, File, Files, FsError};
use aquifer_pool::Mutant;
use aquifer_pool::media::PersistenceDomain;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

use super::history::{BOOT, History, check, fresh_media, open};

const PAGE: u64 = 4096;

/// The files of each run: two of three pages each, the last of which is partial.
struct Scene {
    files: Files,
    one: File,
    other: File,
}

type Step = fn(&Scene, u8) -> Result<(), FsError>;

/// A name, and calls to make in order.
type Operation = (&'static str, &'static [Step]);

/// Operations that give pages to a file, or take them away.
const CHANGES: &[Operation] = &[
    ("pswap of first pages", &[|scene, _| scene.one.exchange_range(0, &scene.other, 0, PAGE)]),
    ("pswap of all pages", &[|scene, _| scene.one.exchange_range(0, &scene.other, 0, 3 * PAGE)]),
    (
        "pswap of last and first page",
        &[|scene, _| scene.one.exchange_range(2 * PAGE, &scene.other, 0, PAGE)],
    ),
    ("pswap inside of a file", &[|scene, _| scene.one.exchange_range(0, &scene.one, PAGE, PAGE)]),
    (
        "pswap with a hole",
        &[
            |scene, _| scene.one.set_len(6 * PAGE),
            |scene, _| scene.one.exchange_range(4 * PAGE, &scene.other, PAGE, PAGE),
        ],
    ),
    ("collapse", &[|scene, _| scene.one.allocate(FallocateMode::CollapseRange, 0, PAGE)]),
    (
        "write and collapse",
        &[
            |scene, byte| scene.one.write_all_at(&[byte; 5], 2 * PAGE + 10),
            |scene, _| scene.one.allocate(FallocateMode::CollapseRange, 0, PAGE),
        ],
    ),
    (
        "punch and collapse",
        &[
            |scene, _| scene.one.allocate(FallocateMode::PunchHole, 0, 2 * PAGE),
            |scene, _| scene.one.allocate(FallocateMode::CollapseRange, 0, PAGE),
        ],
    ),
    ("insert", &[|scene, _| scene.one.allocate(FallocateMode::InsertRange, 0, PAGE)]),
    (
        "write and insert",
        &[
            |scene, byte| scene.one.write_all_at(&[byte; 5], 2 * PAGE + 10),
            |scene, _| scene.one.allocate(FallocateMode::InsertRange, 0, PAGE),
        ],
    ),
    (
        "insert and collapse behind it",
        &[
            |scene, _| scene.one.allocate(FallocateMode::InsertRange, 0, PAGE),
            |scene, _| scene.one.allocate(FallocateMode::CollapseRange, PAGE, PAGE),
        ],
    ),
    ("append a view", &[|scene, _| scene.one.append_view(5000).map(drop)]),
    (
        "fill a hole and defragment",
        &[
            |scene, _| scene.one.allocate(FallocateMode::PunchHole, PAGE, PAGE),
            |scene, byte| scene.one.write_all_at(&[byte; 5], PAGE + 10),
            |scene, _| scene.one.defragment().map(drop),
        ],
    ),
    ("append", &[|scene, byte| scene.one.write_all_at(&[byte; 5000], 10_000)]),
    ("cut", &[|scene, _| scene.one.set_len(100)]),
    ("cut and extend", &[|scene, _| scene.one.set_len(100), |scene, _| scene.one.set_len(12_000)]),
    ("punch", &[|scene, _| scene.one.allocate(FallocateMode::PunchHole, 0, 2 * PAGE)]),
    ("room behind the end", &[|scene, _| scene.one.allocate(FallocateMode::KeepSize, 0, 6 * PAGE)]),
    ("zeros", &[|scene, _| scene.one.allocate(FallocateMode::ZeroRange, 100, 2 * PAGE)]),
    ("write atomically", &[|scene, byte| scene.one.write_atomic(&[byte; 6000], 50)]),
    (
        "write ranges",
        &[|scene, byte| {
            let bytes = [byte; 10];
            scene.one.write_atomic_ranges(&[(5, &bytes), (9000, &bytes), (5 * PAGE, &bytes)])
        }],
    ),
    ("rename over the other", &[|scene, _| scene.files.rename("/one", "/other")]),
    ("remove the other", &[|scene, _| scene.files.remove_file("/other")]),
    (
        "a new file of its name",
        &[
            |scene, _| scene.files.remove_file("/one"),
            |scene, _| scene.files.create_file("/one").map(drop),
            |scene, byte| scene.files.create_file("/one")?.write_all_at(&[byte; 5000], 0),
        ],
    ),
    (
        "free and zero what is free",
        &[|scene, _| {
            scene.files.remove_file("/other")?;
            scene.files.pool().checkpoint()?;
            scene.files.pool().zero_free_pages(100)?;
            Ok(())
        }],
    ),
];

fn change(wanted: &str) -> &'static Operation {
    CHANGES.iter().find(|(name, _)| *name == wanted).expect("it is in the list")
}

/// Operations that store bytes to pages that a file has.
const STORES: &[Operation] = &[
    ("write the first page", &[|scene, byte| scene.one.write_all_at(&[byte; PAGE as usize], 0)]),
    (
        "write the other's first page",
        &[|scene, byte| scene.other.write_all_at(&[byte; PAGE as usize], 0)],
    ),
    (
        "write the second page",
        &[|scene, byte| scene.one.write_all_at(&[byte; PAGE as usize], PAGE)],
    ),
    ("store to a view", &[|scene, byte| scene.one.view_mut(100..PAGE)?.write(0, &[byte; 3000])]),
    (
        "write across pages",
        &[|scene, byte| scene.one.write_all_at(&[byte; 2 * PAGE as usize], 2000)],
    ),
    ("zeros in the other", &[|scene, _| scene.other.allocate(FallocateMode::ZeroRange, 10, 5000)]),
    ("punch edges", &[|scene, _| scene.one.allocate(FallocateMode::PunchHole, 10, 3000)]),
    ("extend", &[|scene, _| scene.one.set_len(5 * PAGE)]),
    ("write behind the end", &[|scene, byte| scene.one.write_all_at(&[byte; 100], 4 * PAGE)]),
    ("append to the other", &[|scene, byte| scene.other.write_all_at(&[byte; 3000], 10_000)]),
    ("pswap again", &[|scene, _| scene.one.exchange_range(PAGE, &scene.other, 2 * PAGE, PAGE)]),
];

/// Each page has its own byte, so that one that is elsewhere is noticed.
fn fill(files: &Files) {
    for (path, bytes) in [("/one", [1, 2, 3]), ("/other", [4, 5, 6])] {
        let content: Vec<u8> = bytes.iter().flat_map(|byte| [*byte; PAGE as usize]).collect();
        files.create_file(path).unwrap().write_all_at(&content[..10_000], 0).unwrap();
    }
}

/// More pieces in one file than a record names: every second page is a hole.
fn fill_with_pieces(files: &Files) {
    files.create_file("/other").unwrap();
    let one = files.create_file("/one").unwrap();
    one.set_len(66 * 2 * PAGE).unwrap();
    for index in 0..66 {
        one.write_all_at(&[100 + index; PAGE as usize], u64::from(index) * 2 * PAGE).unwrap();
    }
}

/// Runs all of these, and checks the crash states.
fn run(
    operations: &[&Operation],
    domain: PersistenceDomain,
    plan: Plan,
    mutant: Option<Mutant>,
) -> Result<Explored, Box<CrashFailure>> {
    run_on(fill, operations, domain, plan, mutant)
}

fn run_on(
    fill: fn(&Files),
    operations: &[&Operation],
    domain: PersistenceDomain,
    plan: Plan,
    mutant: Option<Mutant>,
) -> Result<Explored, Box<CrashFailure>> {
    let media = fresh_media(domain, fill);
    let files = open(&media, BOOT, mutant).unwrap();
    let [one, other] =
        ["/one", "/other"].map(|path| files.options().read(true).write(true).open(path).unwrap());
    let scene = Scene { files, one, other };
    let mut history = History::begin(&media, &scene.files);
    let handles = [scene.one.clone(), scene.other.clone()];
    for (name, operate) in
        operations.iter().flat_map(|(name, steps)| steps.iter().map(move |step| (name, step)))
    {
        let id = history.last() + 1;
        media.begin(id);
        let outcome = operate(&scene, 10 + id as u8).map(|()| None);
        history.note(&media, domain, (&scene.files, &handles), ((*name).to_owned(), outcome));
    }
    let recording = media.recording();
    explore(&recording, plan, |state| check(state, &history, domain, mutant))
}

fn survives(domain: PersistenceDomain) {
    let first = seed(0);
    let mut states = 0;
    let mut explore = |operations: &[&Operation], budget, seed| {
        let plan = Plan { depth: 0, budget, seed };
        match run(operations, domain, plan, None) {
            Ok(explored) => states += explored.states(),
            Err(failure) => {
                let names: Vec<_> = operations.iter().map(|(name, _)| name).collect();
                panic!("seed {seed}, {names:?}: {failure}");
            }
        }
    };
    for change in CHANGES {
        for store in STORES {
            explore(&[change, store], steps(8) as u64, first);
        }
    }
    // What a truncation has cut off is overwritten by the exchange.
    explore(&[change("cut"), change("pswap of first pages")], 60, first);
    for seed in first..first + steps(15) as u64 {
        let mut rng = Rng::new(seed);
        let mut one_of = |list: &'static [Operation]| &list[rng.below(list.len() as u64) as usize];
        let operations =
            [one_of(CHANGES), one_of(STORES), one_of(CHANGES), one_of(STORES), one_of(STORES)];
        explore(&operations, 60, seed);
    }
    println!("{states} crash states on {domain}");
}

#[test]
fn stores_to_pages_that_changed_hands_on_a_disk() {
    survives(PersistenceDomain::PageCache);
}

#[test]
fn stores_to_pages_that_changed_hands_in_persistent_memory() {
    survives(PersistenceDomain::Dax);
}

/// If stores do not wait for an exchange to be durable, misplaced bytes are found.
#[test]
fn a_store_that_does_not_wait_is_noticed() {
    let (exchange, write) = (&CHANGES[0], &STORES[1]);
    let mutant = Some(Mutant::StoreUnsettled);
    let cases = [
        ([exchange, write], 24),
        ([change("cut"), exchange], 60),
        ([change("collapse"), &STORES[0]], 60),
        ([change("insert"), &STORES[2]], 60),
    ];
    for (operations, budget) in cases {
        let plan = Plan { depth: 0, budget, seed: 0 };
        for domain in [PersistenceDomain::PageCache, PersistenceDomain::Dax] {
            let Err(failure) = run(&operations, domain, plan, mutant) else {
                panic!("{} on {domain}: nothing was noticed", operations[0].0);
            };
            assert!(failure.reason.contains("and since 0 it had"), "{failure}");
            run(&operations, domain, plan, None).unwrap();
        }
    }
}

/// If bytes that move are not durable before the record that moves them, older ones are found at
/// their new place. The record names few pieces; the bytes of many are written back before it.
#[test]
fn bytes_that_move_unwritten_are_noticed() {
    let plan = Plan { depth: 0, budget: 60, seed: 0 };
    for fill in [fill, fill_with_pieces] {
        for name in ["write and collapse", "write and insert"] {
            for domain in [PersistenceDomain::PageCache, PersistenceDomain::Dax] {
                // The store makes the record durable.
                let operations = [change(name), &STORES[2]];
                let run = |mutant| run_on(fill, &operations, domain, plan, mutant);
                let Err(failure) = run(Some(Mutant::CommitBeforeData)) else {
                    panic!("{name} on {domain}: nothing was noticed");
                };
                assert!(failure.reason.contains("and since 0 it had"), "{failure}");
                run(None).unwrap();
            }
        }
    }
}
