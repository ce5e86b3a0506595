//! Whether a transaction was published before its process died, at every point of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;

use crate::common::{Scene, find};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_pool::format::inode::{Inode, InodeKind};
use aquifer_pool::{
    Pool, PoolError, PoolOptions, Published, TransactionNote, Unpublished, end_thread_at,
};
use aquifer_testkit::child;

/// The points between the moment at which a change is ready and the end of its transaction.
const POINTS: [&str; 9] = [
    "packed-written",
    "note-begun",
    "note-counted",
    "packed-published",
    "note-ended",
    "apply-odd",
    "apply-half",
    "apply-stored",
    "apply-counted",
];

pub const ROLES: &[aquifer_testkit::child::Role] = &[("noter", noter)];

fn options() -> PoolOptions {
    Pool::options().background(false)
}

fn scene() -> (Scene, [Pool; 2]) {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let scene = Scene::new(directory);
    let created = options().inodes(400).log_bytes(1 << 20).create(&scene.path, 4 << 20).unwrap();
    // No transaction raises the first fresh page.
    drop(created.reserve(20, 1).unwrap());
    let other = options().open(&scene.path).unwrap();
    (scene, [created, other])
}

fn new_note() -> TransactionNote {
    TransactionNote::new(Box::leak(Box::new([const { AtomicU64::new(0) }; 8])))
}

/// Creates an object; its number is the result.
fn create(pool: &Pool, name: &str) -> u64 {
    let reservation = pool.reserve(1, 1).unwrap();
    let runs = reservation.runs().to_vec();
    let made = pool.change_unguarded(vec![reservation], |transaction| {
        let inode = Inode {
            kind: InodeKind::Object,
            size_bytes: 4096,
            runs: runs.clone(),
            name: name.as_bytes().to_vec(),
            ..transaction.free_inode()?
        };
        let number = inode.number;
        pool.note_result([number, 2, 3]);
        transaction.put(inode);
        Ok(number)
    });
    made.unwrap()
}

fn number_of(pool: &Pool, name: &str) -> Option<u64> {
    find(pool, name.as_bytes()).unwrap().map(|inode| inode.number)
}

/// What a note must say of a request of one transaction.
fn outcome(pool: &Pool, name: &str) -> Published {
    number_of(pool, name).map_or_else(Published::default, |number| Published {
        transactions: 1,
        result: [number, 2, 3],
    })
}

#[test]
fn the_verdict_is_right_wherever_the_process_dies() {
    let (_scene, [pool, other]) = scene();
    let mut id = 0;
    let mut seen = [0; 2];
    for point in POINTS {
        for between in 0..5 {
            id += 1;
            let note = new_note();
            note.begin(id);
            let name = format!("{point} {between}");
            assert_eq!(end_thread_at(point, || pool.noting(note, || create(&pool, &name))), None);
            // Others repair, and publish at the same place, and die there as well.
            match between {
                0 => {}
                1 => drop(create(&pool, &format!("{name} of the same process"))),
                2 => drop(create(&other, &format!("{name} of another process"))),
                3 | 4 => {
                    let (second, late) = (new_note(), format!("{name}, late"));
                    id += 1;
                    second.begin(id);
                    let late_point = if between == 3 { "note-counted" } else { "packed-published" };
                    let late_one = || other.noting(second, || create(&other, &late));
                    assert_eq!(end_thread_at(late_point, late_one), None);
                    let found = second.published(&pool.unpublished().unwrap());
                    assert_eq!(found.transactions, u64::from(between == 4), "{name}");
                    assert_eq!(found, outcome(&pool, &late), "{name}");
                }
                _ => unreachable!(),
            }
            for asks in [&other, &pool] {
                let found = note.published(&asks.unpublished().unwrap());
                assert_eq!(found, outcome(&pool, &name), "{name}");
                seen[found.transactions as usize] += 1;
            }
        }
    }
    assert_eq!(seen, [2 * 5 * 3, 2 * 5 * 6]);
}

#[test]
fn the_verdict_is_of_the_last_transaction_of_several() {
    let (_scene, [pool, other]) = scene();
    for (id, point) in (1..).zip(POINTS) {
        let note = new_note();
        note.begin(id);
        let names = [1, 2].map(|number| format!("{point} {number}"));
        let first = pool.noting(note, || create(&pool, &names[0]));
        let second = || pool.noting(note, || create(&pool, &names[1]));
        assert_eq!(end_thread_at(point, second), None);
        create(&other, &format!("{point} of another"));
        let found = note.published(&other.unpublished().unwrap());
        let expected = match number_of(&pool, &names[1]) {
            Some(second) => Published { transactions: 2, result: [second, 2, 3] },
            None => Published { transactions: 1, result: [first, 2, 3] },
        };
        assert_eq!(found, expected, "{point}");
        // A new request begins at nothing.
        note.end();
        assert_eq!((note.id(), note.published(&[])), (None, Published::default()));
        note.begin(1000 + id);
        assert_eq!(note.published(&other.unpublished().unwrap()), Published::default());
    }
}

/// A request of three transactions, whose process and the next one die.
#[test]
fn a_request_is_continued_wherever_two_processes_die() {
    let (_scene, [pool, other]) = scene();
    let mut id = 0;
    let mut next_id = || {
        id += 1;
        id
    };
    for first in POINTS {
        for second in POINTS {
            let note = new_note();
            note.begin(next_id());
            let names = [1, 2, 3].map(|number| format!("{first} {second} {number}"));
            let there =
                || names.iter().map_while(|name| number_of(&other, name)).collect::<Vec<_>>();
            pool.noting(note, || create(&pool, &names[0]));
            for point in [first, second] {
                let missing = &names[there().len()..];
                let Some(name) = missing.first() else { break };
                let died = end_thread_at(point, || pool.noting(note, || create(&pool, name)));
                assert_eq!(died, None);
                create(&other, &format!("{first} {second} {name} of another"));
                let unpublished = other.unpublished().unwrap();
                // A process that dies in `resume` is followed by one that does it again.
                let before = note.published(&unpublished);
                let found = note.resume(next_id(), &unpublished);
                assert_eq!((found, note.published(&unpublished)), (before, before));
                let there = there();
                let result = [*there.last().unwrap(), 2, 3];
                let expected = Published { transactions: there.len() as u64, result };
                assert_eq!(found, expected, "{first}, {second}");
            }
            let missing = &names[there().len()..];
            pool.noting(note, || missing.iter().for_each(|name| _ = create(&pool, name)));
            let found = note.published(&other.unpublished().unwrap());
            assert_eq!((found.transactions, there().len()), (3, 3), "{first}, {second}");
        }
    }
}

/// The list is that of the segment: without a process that has the pool open, it ends.
#[test]
fn the_list_lasts_as_long_as_a_process_has_the_pool_open() {
    for has_keeper in [false, true] {
        let (scene, [pool, other]) = scene();
        let keeper = options().passive(true).open(&scene.path).unwrap();
        let keeper = has_keeper.then_some(keeper);
        let mut command = child::command("noter");
        command.env("POOL", &scene.path).env("AQUIFER_DIE_AT", "note-counted*2");
        assert!(!command.output().unwrap().status.success());
        // The last process but for the keeper repairs, and closes.
        create(&other, "third");
        drop((pool, other));
        let next = options().open(&scene.path).unwrap();
        let expected = [Unpublished { id: 5, transaction: 2 }];
        assert_eq!(next.unpublished().unwrap(), expected[..usize::from(has_keeper)]);
        drop((keeper, next));
    }
}

#[test]
fn a_repair_may_be_repeated() {
    let (_scene, [pool, other]) = scene();
    let note = new_note();
    note.begin(7);
    assert_eq!(end_thread_at("note-counted", || pool.noting(note, || create(&pool, "a"))), None);
    assert!(end_thread_at("note-listed", || other.unpublished()).is_none());
    assert!(end_thread_at("note-listed", || create(&other, "b")).is_none());
    create(&pool, "c");
    let unpublished = other.unpublished().unwrap();
    assert!(!unpublished.is_empty() && unpublished.iter().all(|one| one.id == 7));
    assert_eq!(note.published(&unpublished), Published::default());
    assert_eq!((number_of(&pool, "a"), number_of(&pool, "b")), (None, None));
}

#[test]
fn the_last_ones_are_remembered() {
    let (_scene, [pool, other]) = scene();
    let note = new_note();
    for id in 1..=70 {
        note.begin(id);
        assert_eq!(
            end_thread_at("note-counted", || pool.noting(note, || create(&pool, "a"))),
            None
        );
        let unpublished = other.unpublished().unwrap();
        assert_eq!(note.published(&unpublished), Published::default(), "{id}");
    }
    let mut ids: Vec<u64> = pool.unpublished().unwrap().iter().map(|one| one.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, (7..=70).collect::<Vec<_>>());
}

#[test]
fn only_what_is_meant_is_counted() {
    let (_scene, [pool, other]) = scene();
    let note = new_note();
    note.begin(1);
    let count = |note: TransactionNote| note.published(&[]).transactions;
    pool.noting(note, || {
        create(&other, "of another handle");
        pool.without_note(|| create(&pool, "besides"));
        std::thread::scope(|scope| {
            scope.spawn(|| create(&pool, "of another thread"));
        });
        assert_eq!(count(note), 0);
        let inner = new_note();
        inner.begin(2);
        pool.noting(inner, || create(&pool, "inner"));
        assert_eq!((count(note), count(inner)), (0, 1));
        create(&pool, "counted");
        assert_eq!(count(note), 1);
        let failed: Result<(), PoolError> = pool.change_unguarded(Vec::new(), |transaction| {
            transaction.free_inode()?;
            Err(PoolError::Forked)
        });
        assert!(failed.is_err());
        // Changes nothing.
        pool.change_unguarded(Vec::new(), |_| Ok(())).unwrap();
        assert_eq!(count(note), 1);
    });
    let panicked = catch_unwind(AssertUnwindSafe(|| pool.noting(note, || panic!("on purpose"))));
    assert!(panicked.is_err());
    create(&pool, "outside");
    assert_eq!(count(note), 1);
    // Without a request.
    note.end();
    pool.noting(note, || create(&pool, "ended"));
    note.begin(3);
    assert_eq!(count(note), 0);
    let reader = options().read_only(true).open(pool.media().path()).unwrap();
    assert!(matches!(reader.unpublished(), Err(PoolError::ReadOnly { .. })));
}

/// Makes one change, and dies there.
fn noter() {
    let pool = options().open(std::env::var_os("POOL").expect("set by the parent")).unwrap();
    let note = new_note();
    note.begin(5);
    pool.noting(note, || {
        create(&pool, "first");
        create(&pool, "second");
    });
}

#[test]
fn a_killed_process_leaves_the_same() {
    // Joining passes points of the others, too.
    for point in &POINTS[..5] {
        let (scene, [pool, other]) = scene();
        let mut command = child::command("noter");
        command.env("POOL", &scene.path).env("AQUIFER_DIE_AT", format!("{point}*2"));
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{point}: {output:?}");
        create(&other, "third");
        let is_there = number_of(&pool, "second").is_some();
        assert_eq!(is_there, !matches!(*point, "packed-written" | "note-begun" | "note-counted"));
        let listed = pool.unpublished().unwrap();
        let expected = Unpublished { id: 5, transaction: 2 };
        let has_traces = matches!(*point, "note-begun" | "note-counted");
        assert_eq!(listed, if has_traces { vec![expected] } else { vec![] }, "{point}");
    }
}
