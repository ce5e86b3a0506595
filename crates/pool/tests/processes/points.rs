//! Kills processes at each named moment (`src/point.rs`), while other processes have the pool open
//! and while none has.
//!
//! The child performs changes that are a function of a seed, and prints when each is acknowledged.
//! Afterwards the pool has the state of the last acknowledged change or of the next one; no page is
//! lost or has two owners; processes that have the pool open and processes that open it later keep
//! working, also in the slot of the dead process.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use crate::common::{
    Change, Model, Scene, contents, create, destroy, find, page, place, small, write,
};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{
    CommitContent, CommitPages, Mutant, POINTS, Pool, PoolError, PoolOptions, end_thread_at,
};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child::{self, Reaped};
use aquifer_testkit::rng::Rng;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("changer", changer),
    ("committer", committer),
    ("writer at points", writer),
    ("leaver", leaver),
    ("pipeliner", pipeliner),
    ("impatient", impatient),
    ("idler", idler),
];

const CHANGES: u64 = 40;

fn environment(name: &str) -> String {
    std::env::var(name).expect("set by the parent")
}

fn said(text: &str) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{text}").unwrap();
    output.flush().unwrap();
}

fn options() -> PoolOptions {
    // A wait this long never ends.
    Pool::options()
        .stall_timeout(Duration::from_secs(4))
        .background(false)
        .domain(PersistenceDomain::PageCache)
}

/// The changes, and the state after each.
fn history(seed: u64) -> (Vec<Change>, Vec<Model>) {
    let mut rng = Rng::new(seed);
    let mut states = vec![Model::new()];
    let mut changes = Vec::new();
    for id in 1..=CHANGES {
        let mut model = states.last().unwrap().clone();
        let change = Change::random(&mut rng, &model, id);
        change.apply(&mut model);
        states.push(model);
        changes.push(change);
    }
    (changes, states)
}

/// Performs all changes of a seed.
fn changer() {
    let path = environment("POOL");
    let mut pool = options().open(&path).unwrap();
    let (changes, _) = history(environment("SEED").parse().unwrap());
    drop(pool.reserve(1, 1).unwrap());
    let mut pins = Vec::new();
    for (id, change) in (1..).zip(&changes) {
        if *change == Change::Reopen {
            pins.clear();
            drop(pool);
            pool = options().open(&path).unwrap();
        }
        change.run(&pool).unwrap_or_else(|error| panic!("{change:?}: {error}"));
        // Freed pages sometimes wait for pins; and free pages are zeroed.
        pool.checkpoint().unwrap();
        pool.zero_free_pages(2).unwrap();
        match id % 8 {
            1 => {
                let seen = pool.inodes().unwrap().into_iter();
                pins.extend(seen.map(|inode| pool.pin_owned(inode.number, 0).unwrap()));
            }
            5 => pins.clear(),
            _ => {}
        }
        said(&format!("acknowledged {id}"));
    }
}

/// Commits once.
fn committer() {
    let pool = options().open(environment("POOL")).unwrap();
    commit(&pool, environment("SEED").parse().unwrap());
}

/// Makes one change: a new object, filled with a number.
fn writer() {
    let pool = options().open(environment("POOL")).unwrap();
    write(&pool, b"late", 2, environment("SEED").parse().unwrap()).unwrap();
}

/// Reserves its place in the log for a commit, and dies.
fn leaver() {
    let pool = options().open(environment("POOL")).unwrap();
    let inode = find(&pool, b"other").unwrap().unwrap();
    let pages = [CommitPages { inode: inode.number, target: place(&inode, 0) }];
    let _commit = pool
        .capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |payload| {
            payload.copy_from_slice(&page(99))
        })
        .unwrap();
    std::process::abort();
}

/// Reserves consecutive places in the log for commits, and dies when all but the first are durable.
fn pipeliner() {
    let pool = options().open(environment("POOL")).unwrap();
    let inode = find(&pool, b"other").unwrap().unwrap();
    let capture = |number: u64| {
        let pages = [CommitPages { inode: inode.number, target: place(&inode, number) }];
        let content = CommitContent { pages: &pages, ..Default::default() };
        pool.capture_unguarded(&content, |payload| payload.copy_from_slice(&page(100 + number)))
            .unwrap()
    };
    let mut commits: Vec<_> = (0..4).map(capture).collect();
    let _first = commits.remove(0);
    // They wait for the first, which is never finished.
    std::thread::scope(|scope| {
        for commit in commits {
            scope.spawn(|| commit.finish());
        }
    });
}

/// Tries a checkpoint with a short timeout.
fn impatient() {
    let options = options().stall_timeout(Duration::from_millis(50));
    let pool = options.open(environment("POOL")).unwrap();
    let refused = matches!(pool.checkpoint(), Err(PoolError::Stalled { .. }));
    said(if refused { "refused" } else { "done" });
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Opens the pool, makes a checkpoint, and closes it.
fn idler() {
    options().open(environment("POOL")).unwrap().checkpoint().unwrap();
}

fn commit(pool: &Pool, stamp: u64) {
    let inode = find(pool, b"own").unwrap().expect("made before");
    let pages = [CommitPages { inode: inode.number, target: place(&inode, 0) }];
    pool.capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |payload| {
        payload.copy_from_slice(&page(stamp))
    })
    .unwrap()
    .finish()
    .unwrap();
}

fn scene() -> Scene {
    // The pool is in memory: a disk would only make the test slow.
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let scene = Scene::new(directory);
    small(options()).create(&scene.path, 512 << 10).unwrap();
    scene
}

/// Plays a role that may die at a point. Returns its output, and whether it died.
fn play(role: &str, path: &Path, seed: u64, die_at: Option<&str>) -> (String, bool) {
    let mut command = child::command(role);
    command.env("POOL", path).env("SEED", seed.to_string());
    if let Some(point) = die_at {
        command.env("AQUIFER_DIE_AT", point);
    }
    let output = command.output().unwrap();
    let text = [&output.stdout, &output.stderr].map(|s| String::from_utf8_lossy(s).into_owned());
    let has_died = std::os::unix::process::ExitStatusExt::signal(&output.status).is_some();
    assert!(
        output.status.success() || has_died,
        "{role}, to die at {die_at:?}: {}\n{}",
        text[0],
        text[1]
    );
    (text[0].clone(), has_died)
}

fn last_acknowledged(said: &str) -> u64 {
    said.lines()
        .filter_map(|line| line.strip_prefix("acknowledged ")?.parse().ok())
        .next_back()
        .unwrap_or(0)
}

/// Checks that no page is lost or has two owners.
fn check_pages(pool: &Pool, when: &str) {
    pool.checkpoint().unwrap_or_else(|error| panic!("{when}: {error}"));
    // Needing the space gives back what dead processes had reserved.
    drop(pool.reserve(1 << 20, 1));
    let layout = pool.layout();
    let mut runs: Vec<_> = pool
        .inodes()
        .unwrap()
        .iter()
        .flat_map(|inode| inode.all_runs().collect::<Vec<_>>())
        .collect();
    runs.sort_unstable();
    assert!(runs.windows(2).all(|pair| !pair[0].overlaps(pair[1])), "{when}: {runs:?}");
    let named: u64 = runs.iter().map(|run| run.pages).sum();
    let info = pool.info().unwrap();
    let data_pages = layout.page_count - layout.data_start_page - info.saved.pages;
    assert_eq!(info.free_pages + named, data_pages, "{when}");
}

fn check(path: &Path, pool: Pool, states: &[Model], said: &str, when: &str) {
    let known = last_acknowledged(said);
    // The next user of the pool completes or drops what the dead process was doing.
    pool.checkpoint().unwrap_or_else(|error| panic!("{when}: {error}"));
    let found = contents(&pool).unwrap_or_else(|error| panic!("{when}: {error}"));
    let allowed = [Some(known), Some(known + 1).filter(|id| *id <= CHANGES)];
    let is_allowed = |id: u64| states[id as usize] == found;
    assert!(
        allowed.into_iter().flatten().any(is_allowed),
        "{when}: {known} acknowledged, found {found:?}, then {:?}",
        states[known as usize]
    );
    check_pages(&pool, when);
    // Present and later processes keep working.
    create(&pool, b"own", 1).unwrap_or_else(|error| panic!("{when}: {error}"));
    commit(&pool, 5);
    play("committer", path, 6, None);
    let mut expected = found;
    expected.insert(b"own".to_vec(), vec![6]);
    assert_eq!(contents(&pool).unwrap(), expected, "{when}");
    check_pages(&pool, when);
    drop(pool);
    let pool = options().open(path).unwrap_or_else(|error| panic!("{when}: {error}"));
    assert_eq!(contents(&pool).unwrap(), expected, "{when}, reopened");
    check_pages(&pool, when);
    for inode in pool.inodes().unwrap() {
        destroy(&pool, &inode.name).unwrap();
    }
    check_pages(&pool, when);
}

/// Whether the changer reaches a point. There are separate tests here for completing what another
/// process began and for recovering what dead processes have left, and in `create.rs` for creating
/// pools.
fn is_on_the_way(point: &str) -> bool {
    !point.starts_with("help-")
        && !point.starts_with("note-")
        && !point.starts_with("create-")
        && !matches!(point, "open-secured" | "apply-moved" | "file-stored")
}

#[test]
fn a_process_may_die_at_every_point() {
    let mut rng = Rng::new(seed(3));
    let mut visited = std::collections::BTreeSet::new();
    for point in POINTS.iter().filter(|point| is_on_the_way(point)) {
        for round in 0..steps(8).max(2) {
            let others_stay = round % 2 == 0;
            let seed = rng.next_u64();
            let nth = if round < 2 { 1 } else { 1 + rng.below(2 * round as u64) };
            let scene = scene();
            let staying = others_stay.then(|| options().open(&scene.path).unwrap());
            let die_at = format!("{point}*{nth}");
            let (_, states) = history(seed);
            let (said, has_died) = play("changer", &scene.path, seed, Some(&die_at));
            if has_died {
                visited.insert(*point);
            }
            let when = format!("{die_at}, others stay: {others_stay}, seed {seed}");
            let pool = match staying {
                Some(pool) => pool,
                None => {
                    options().open(&scene.path).unwrap_or_else(|error| panic!("{when}: {error}"))
                }
            };
            check(&scene.path, pool, &states, &said, &when);
        }
    }
    let missed: Vec<_> =
        POINTS.iter().filter(|p| is_on_the_way(p) && !visited.contains(*p)).collect();
    assert!(missed.is_empty(), "no thread passed {missed:?}");
}

/// All processes have died, some in the middle of a packed record, and the process that recovers
/// the pool dies as well.
#[test]
fn recovery_survives_a_crash_during_recovery() {
    let mut rng = Rng::new(seed(4));
    for last in ["packed-written", "packed-published", "packed-closed", "packed-flushed"] {
        for point in POINTS.iter().filter(|point| point.starts_with("open-")) {
            let scene = scene();
            let seed = rng.next_u64();
            let (_, states) = history(seed);
            let die_at = format!("{last}*{}", 1 + rng.below(3));
            let (said, _) = play("changer", &scene.path, seed, Some(&die_at));
            let (_, has_died) = play("idler", &scene.path, 0, Some(point));
            let when = format!("{die_at}, then {point}, seed {seed}");
            let is_elsewhere = matches!(*point, "open-secured" | "open-resumed");
            assert!(has_died || is_elsewhere, "{when}");
            let pool =
                options().open(&scene.path).unwrap_or_else(|error| panic!("{when}: {error}"));
            check(&scene.path, pool, &states, &said, &when);
        }
    }
}

/// A change that its process did not publish has not happened. Its pages are free, and other
/// processes write to them: no recovery may find the record later and show them.
#[test]
fn a_change_that_was_not_published_never_counts() {
    let scene = scene();
    let pool = options().open(&scene.path).unwrap();
    create(&pool, b"own", 1).unwrap();
    drop(pool.reserve(20, 1).unwrap());
    pool.sync().unwrap();
    assert!(play("writer at points", &scene.path, 77, Some("packed-written")).1);
    assert_eq!(contents(&pool).unwrap().len(), 1);
    // No process writes to the log.
    let used_again = pool.reserve(2, 1).unwrap();
    pool.store_unguarded(used_again.whole().bytes().offset_bytes, &page(99).repeat(2)).unwrap();
    let copy = options().open(copy_of(&scene.path)).unwrap();
    assert_eq!(contents(&copy).unwrap(), Model::from([(b"own".to_vec(), vec![0])]));
}

/// A published change has happened, whether or not its process applied it.
#[test]
fn a_change_that_was_published_counts() {
    for others_stay in [false, true] {
        let scene = scene();
        let pool = options().open(&scene.path).unwrap();
        create(&pool, b"own", 1).unwrap();
        let staying = others_stay.then_some(pool);
        assert!(play("writer at points", &scene.path, 77, Some("packed-published")).1);
        let pool = staying.unwrap_or_else(|| options().open(&scene.path).unwrap());
        // The next process that takes the lock applies it.
        pool.sync().unwrap();
        let expected = Model::from([(b"own".to_vec(), vec![0]), (b"late".to_vec(), vec![77; 2])]);
        assert_eq!(contents(&pool).unwrap(), expected);
    }
}

/// The shared memory of the dead processes proves that no bytes were lost, until the superblocks
/// name the shared memory of the process that opens the pool next.
#[test]
fn a_change_that_was_published_counts_after_openings_that_died() {
    for point in ["open-made", "open-segment", "open-replayed", "open-written", "open-recovered"] {
        let scene = scene();
        assert!(play("writer at points", &scene.path, 77, Some("packed-published")).1);
        assert!(play("idler", &scene.path, 0, Some(point)).1, "{point}");
        let pool = options().open(&scene.path).unwrap();
        assert_eq!(contents(&pool).unwrap()[b"late".as_slice()], [77, 77], "{point}");
    }
}

/// A process that is stopped in the middle of a change stalls writers, whose error names that
/// process; readers continue, and see all or nothing of the change.
#[test]
fn a_stopped_change_stalls_writers_and_no_readers() {
    for (point, is_there) in [
        ("packed-written", false),
        ("packed-published", false),
        ("apply-half", true),
        ("apply-names", true),
        ("apply-stored", true),
    ] {
        let scene = scene();
        let hasty = options().stall_timeout(Duration::from_millis(50));
        let pool = hasty.open(&scene.path).unwrap();
        create(&pool, b"own", 1).unwrap();
        drop(pool.reserve(20, 1).unwrap());
        let reading = hasty.read_only(true);
        let reader = reading.open(&scene.path).unwrap();
        let stopped = Held::at(point, "writer at points", &scene.path);
        let pid = stopped.child.0.id();
        let is_stalled =
            |outcome| matches!(outcome, Err(PoolError::Stalled { pid: found, .. }) if found == pid);
        assert!(is_stalled(crate::common::rename(&pool, b"own", b"renamed")), "{point}");
        assert!(is_stalled(pool.sync()), "{point}");
        for _ in 0..3 {
            let found = reader.inodes().unwrap();
            let names: Vec<_> = found.iter().map(|inode| &inode.name[..]).collect();
            let expected: &[&[u8]] = if is_there { &[b"own", b"late"] } else { &[b"own"] };
            assert_eq!(reader.object_named(b"late").unwrap().is_some(), is_there, "{point}");
            assert_eq!(names, expected, "{point}");
        }
        stopped.let_go();
        crate::common::rename(&pool, b"own", b"renamed").unwrap();
        pool.sync().unwrap();
        assert_eq!(reader.inodes().unwrap().len(), 2, "{point}");
    }
}

/// One process dies in the middle of an append, and another one while completing it.
#[test]
fn a_hole_is_filled_by_a_live_process() {
    for point in POINTS.iter().filter(|point| point.starts_with("help-")) {
        let scene = scene();
        let pool = options().open(&scene.path).unwrap();
        create(&pool, b"own", 1).unwrap();
        create(&pool, b"other", 1).unwrap();
        assert!(play("leaver", &scene.path, 0, None).1);
        assert!(play("committer", &scene.path, 7, Some(point)).1, "{point}");
        commit(&pool, 8);
        let found = contents(&pool).unwrap();
        assert_eq!((&found[b"own".as_slice()], &found[b"other".as_slice()]), (&vec![8], &vec![0]));
        check_pages(&pool, point);
    }
}

/// Commits of a process are relative to its previous commit. If one is a hole, its later ones do
/// not count either.
#[test]
fn commits_behind_a_hole_of_their_process_do_not_count() {
    let helpers = POINTS.iter().filter(|point| point.starts_with("help-"));
    for helper in std::iter::once(None).chain(helpers.map(Some)) {
        for mutant in [None, Some(Mutant::KeepDependents)] {
            if mutant.is_some() && helper.is_some() {
                continue;
            }
            let scene = scene();
            let pool = options().mutant(mutant).open(&scene.path).unwrap();
            create(&pool, b"own", 1).unwrap();
            create(&pool, b"other", 4).unwrap();
            // The third of the three commits that are finished dies when its record is durable.
            assert!(play("pipeliner", &scene.path, 0, Some("complete-durable*3")).1);
            if let Some(helper) = helper {
                assert!(play("committer", &scene.path, 7, Some(helper)).1, "{helper}");
            }
            commit(&pool, 8);
            let found = contents(&pool).unwrap();
            assert_eq!(found[b"own".as_slice()], [8]);
            let kept: &[u64] = if mutant.is_some() { &[0, 101, 102, 103] } else { &[0; 4] };
            assert_eq!(found[b"other".as_slice()], kept, "{helper:?}");
            check_pages(&pool, "pipelined");
            drop(pool);
            let again = options().open(&scene.path).unwrap();
            assert_eq!(contents(&again).unwrap(), found, "{helper:?}, reopened");
        }
    }
}

/// The slot of a process that died in the middle of an append has a new owner, which does not know
/// of the append.
#[test]
fn a_hole_does_not_belong_to_the_next_process_in_the_slot() {
    let scene = scene();
    let pool = options().open(&scene.path).unwrap();
    create(&pool, b"own", 1).unwrap();
    create(&pool, b"other", 1).unwrap();
    assert!(play("leaver", &scene.path, 0, None).1);
    let next = options().open(&scene.path).unwrap();
    commit(&pool, 3);
    commit(&next, 4);
    assert_eq!(contents(&pool).unwrap()[b"own".as_slice()], [4]);
}

/// A commit that is begun and not finished stalls all later ones. The errors name its process, also
/// for callers that wait for a checkpoint that waits.
#[test]
fn a_waiter_learns_which_process_is_stopped() {
    let scene = scene();
    let hasty = options().stall_timeout(Duration::from_millis(50));
    let pool = hasty.open(&scene.path).unwrap();
    create(&pool, b"own", 1).unwrap();
    create(&pool, b"other", 1).unwrap();
    let named = |outcome: Result<(), PoolError>| match outcome {
        Err(error @ PoolError::Stalled { pid, .. }) => (pid, error.to_string()),
        other => panic!("{other:?}"),
    };
    let stopped = Held::at("capture-reserved", "committer", &scene.path);
    let pid = stopped.child.0.id();
    let text = format!("process {pid} holds a commit of the pool and does not go on");
    let (found, said) = named(pool.checkpoint());
    assert!(found == pid && said.starts_with(&text), "{said}");
    // The holder of the maintenance lock is not the one to blame.
    let waiting = Held::at("checkpoint-taken", "impatient", &scene.path);
    let (found, said) = named(pool.checkpoint());
    assert!(found == pid, "{said}, and not {}", waiting.child.0.id());
    drop((waiting, stopped));
    pool.checkpoint().unwrap();

    // A commit of the same process.
    let inode = find(&pool, b"own").unwrap().unwrap();
    let pages = [CommitPages { inode: inode.number, target: place(&inode, 0) }];
    let begun = pool
        .capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |payload| {
            payload.copy_from_slice(&page(3))
        })
        .unwrap();
    let (found, said) = named(pool.checkpoint());
    assert!(found == std::process::id() && said.contains("finish or drop"), "{said}");
    begun.finish().unwrap();
    // The holder of the lock is to blame if it has nothing to wait for.
    let waiting = Held::at("checkpoint-taken", "impatient", &scene.path);
    assert_eq!(named(pool.checkpoint()).0, waiting.child.0.id());
}

/// A child that is held at a point. It continues with each line it is sent.
struct Held {
    child: Reaped,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Held {
    fn at(point: &str, role: &str, path: &Path) -> Held {
        let mut command = child::command(role);
        command
            .env("POOL", path)
            .env("SEED", "5")
            .env("AQUIFER_HOLD_AT", point)
            .stdin(Stdio::piped());
        let mut child = Reaped(command.spawn().unwrap());
        let input = child.0.stdin.take().unwrap();
        let output = BufReader::new(child.0.stdout.take().unwrap());
        let mut held = Held { child, input, output };
        held.hear("held");
        held
    }

    fn go_on(&mut self) {
        self.input.write_all(b"\n").unwrap();
    }

    /// Releases the child for the rest of its run, and waits for its end.
    fn let_go(mut self) {
        drop(self.input);
        assert!(self.child.0.wait().unwrap().success());
    }

    fn hear(&mut self, expected: &str) {
        let mut line = String::new();
        while line.trim_end() != expected {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "it ended before {expected}");
        }
    }
}

/// A copy of the file as after a power cut, if everything written were durable.
fn copy_of(path: &Path) -> PathBuf {
    let copy = path.with_extension("copy");
    std::fs::copy(path, &copy).unwrap();
    copy
}

/// A checkpoint collects the changed pages, and then can neither continue nor take the metadata
/// lock: the next one must still write these pages.
#[test]
fn a_checkpoint_that_is_given_up_forgets_no_page() {
    let scene = scene();
    let pool = options().open(&scene.path).unwrap();
    create(&pool, b"own", 1).unwrap();
    let inode = find(&pool, b"own").unwrap().unwrap();
    let pages = [CommitPages { inode: inode.number, target: place(&inode, 0) }];
    let begun = pool
        .capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |payload| {
            payload.copy_from_slice(&page(3))
        })
        .unwrap();
    let mut held = Held::at("checkpoint-taken", "impatient", &scene.path);
    pool.transact_unguarded(vec![], |_| {
        // It waits for the commit, and then for the metadata lock.
        held.go_on();
        held.hear("refused");
        Ok(())
    })
    .unwrap();
    begun.finish().unwrap();
    pool.checkpoint().unwrap();
    let copy = options().open(copy_of(&scene.path)).unwrap();
    assert_eq!(contents(&copy).unwrap(), Model::from([(b"own".to_vec(), vec![3])]));
    drop(held.child);
}

/// The same if the process that collected them has died, and its successor cannot take the metadata
/// lock at first.
#[test]
fn a_successor_of_a_dead_checkpoint_may_be_late() {
    let scene = scene();
    let pool = options().open(&scene.path).unwrap();
    create(&pool, b"own", 1).unwrap();
    assert!(play("idler", &scene.path, 0, Some("checkpoint-taken")).1);
    let mut held = Held::at("checkpoint-begun", "impatient", &scene.path);
    pool.transact_unguarded(vec![], |_| {
        held.go_on();
        held.hear("refused");
        Ok(())
    })
    .unwrap();
    drop(held.child);
    pool.checkpoint().unwrap();
    let copy = options().open(copy_of(&scene.path)).unwrap();
    assert_eq!(contents(&copy).unwrap(), Model::from([(b"own".to_vec(), vec![0])]));
}

/// A reader cannot repair what a dead or stopped process has half done. It sees the metadata whole
/// all the same, and does not wait.
#[test]
fn a_reader_does_not_wait_for_a_change_that_stays_half_done() {
    for point in ["apply-odd", "apply-half", "apply-names", "apply-stored", "apply-counted"] {
        let scene = scene();
        let pool = options().open(&scene.path).unwrap();
        create(&pool, b"own", 1).unwrap();
        create(&pool, b"other", 1).unwrap();
        // A long timeout would hide a reader that waits.
        let reading = options().read_only(true);
        let reader = reading.open(&scene.path).unwrap();
        drop(pool);
        let names = || {
            let mut names: Vec<_> =
                reader.inodes().unwrap().into_iter().map(|inode| inode.name).collect();
            names.sort();
            names
        };
        let before = names();
        let (said, has_died) = play("changer", &scene.path, 5, Some(point));
        assert!(has_died && last_acknowledged(&said) == 0, "{point}: {said}");
        let after = names();
        assert!(reader.info().unwrap().damaged_inodes == 0, "{point}");
        let next = options().open(&scene.path).unwrap();
        assert_eq!(names(), after, "{point}: and stays so");
        drop(next);
        assert!(before.iter().all(|name| after.contains(name)), "{point}: {after:?}");
        let is_found = |name: &Vec<u8>| reader.object_named(name).unwrap().is_some();
        assert!(after.iter().all(is_found), "{point}");
    }
}

/// Whether a call inserts objects into the index of their names.
fn indexes(call: impl FnOnce() + Send) -> bool {
    end_thread_at("names-step", call).is_none()
}

/// A lookup does not wait for a change, so its index may stay incomplete.
#[test]
fn an_index_that_was_lost_or_left_is_built_when_asked_for() {
    let scene = scene();
    let pool = options().open(&scene.path).unwrap();
    create(&pool, b"own", 1).unwrap();
    drop(pool);
    let pool = options().open(&scene.path).unwrap();
    let joined = options().open(&scene.path).unwrap();
    pool.transact_unguarded(vec![], |_| {
        assert!(!indexes(|| assert!(joined.object_named(b"own").unwrap().is_some())));
        Ok(())
    })
    .unwrap();
    let reader = options().read_only(true).open(&scene.path).unwrap();
    assert!(!indexes(|| reader.index_names().unwrap()), "it cannot");
    assert!(indexes(|| pool.index_names().unwrap()), "it was not whole");
    assert!(!indexes(|| pool.transact_unguarded(vec![], |_| Ok(())).unwrap()), "only repairs");
    pool.index_names().unwrap();
    assert!(!indexes(|| pool.index_names().unwrap()), "it is whole");
    assert!(reader.object_named(b"own").unwrap().is_some());
}
