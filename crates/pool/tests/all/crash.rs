//! Crash states: after any power cut, recovery gives a state that the pool was in, not older than
//! the last one that was acknowledged as durable. After the death of all processes, it gives the
//! last state, or the one in flight.
//!
//! Every page that is written gets the number of its change, which distinguishes bytes of an
//! earlier owner from others.

use std::sync::Arc;

use crate::common::{Change, Model, alone, contents, open, small};
use aquifer_check::Severity;
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_crashkit::{
    CrashFailure, CrashMedia, CrashState, Explored, Mutation, Plan, Recording, Verdict, campaign,
    explore,
};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::Inode;
use aquifer_pool::media::{Media, PersistenceDomain};
use aquifer_pool::{Mutant, Pool, PoolError, PoolOptions, end_thread_at};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

const POOL_BYTES: u64 = 512 << 10;

/// The life in which the changes are made. Recoveries from power cuts happen in later lives.
const FIRST_BOOT: u64 = 1;
/// From this number on: lives seen by processes with a private mount namespace. Nothing was lost.
const SEEMS_ANOTHER: u64 = 1 << 32;

/// The states that a run of random changes goes through; state `id` is acknowledged by mark `id`,
/// together with all before.
struct History {
    states: Vec<Model>,
}

fn in_boot(boot: u64, mutant: Option<Mutant>) -> PoolOptions {
    alone(mutant).boot(boot)
}

/// Runs random changes on fresh media, and records them from the first complete pool on.
fn record(
    seed: u64,
    changes: u64,
    domain: PersistenceDomain,
    mutant: Option<Mutant>,
) -> (Recording, History) {
    record_and_look(seed, changes, domain, mutant, |_, _, _| {})
}

/// The same; `look` is called with the media and the present state after each change.
fn record_and_look(
    seed: u64,
    changes: u64,
    domain: PersistenceDomain,
    mutant: Option<Mutant>,
    look: impl Fn(&CrashMedia, &PoolOptions, &Model),
) -> (Recording, History) {
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, domain).unwrap());
    let pool = small(alone(None)).create_on(fresh.clone()).unwrap();
    // No page is fresh, so that freed pages are soon reused.
    drop(pool.reserve(pool.info().unwrap().largest_free_pages, 1).unwrap());
    drop(pool);
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), domain).unwrap());
    let mut rng = Rng::new(seed);
    let mut options = in_boot(FIRST_BOOT, mutant);
    let mut pool = open(&media, &options).unwrap();
    let mut history = History { states: vec![Model::new()] };
    media.begin(0);
    media.acknowledge(0);
    // The index of the state that is present.
    let mut present = 0;
    for id in 1..=changes {
        if domain != PersistenceDomain::Volatile && rng.chance(0.05) {
            // Killed, and the next process sees another life although nothing is lost. The state it
            // continues with is durable.
            pool.die();
            media.begin(id);
            options = in_boot(SEEMS_ANOTHER + id, mutant);
            pool = open(&media, &options).unwrap();
            let found = contents(&pool).unwrap();
            assert!(history.states.contains(&found), "seed {seed}: {found:?}");
            history.states.push(found);
            media.acknowledge(id);
            present = id;
            look(&media, &options, &history.states[id as usize]);
            continue;
        }
        let before = present;
        let mut model = history.states[before as usize].clone();
        let change = Change::random(&mut rng, &model, id);
        change.apply(&mut model);
        history.states.push(model);
        if rng.chance(0.1) {
            // Killed. Its locks belong to the media, which live on; the next opening makes
            // everything durable.
            pool.die();
            pool = open(&media, &options).unwrap();
            media.acknowledge(before);
        }
        media.begin(id);
        if change == Change::Reopen {
            drop(pool);
            pool = open(&media, &options).unwrap();
        }
        let run = || {
            let outcome = change.run(&pool);
            outcome.unwrap_or_else(|error| panic!("seed {seed}, {change:?}: {error}"))
        };
        present = id;
        if !change.is_durable() && rng.chance(0.2) {
            // Its process dies during the change, and other processes continue. They complete it
            // only if it was published.
            let dies_at = ["packed-written", "packed-published", "apply-half"];
            let dies_at = dies_at[rng.below(dies_at.len() as u64) as usize];
            let died = end_thread_at(dies_at, run).is_none();
            let _ = pool.info().unwrap();
            if died && dies_at == "packed-written" {
                media.withdraw(id);
                present = before;
                continue;
            }
        } else {
            run();
        }
        // In memory only processes can die: what is visible stays.
        if change.is_durable() || domain == PersistenceDomain::Volatile {
            media.acknowledge(id);
        }
        look(&media, &options, &history.states[id as usize]);
    }
    // The pool is lost in the crash: closing it is not part of the recording.
    let recording = media.recording();
    drop(pool);
    (recording, history)
}

/// Recovers a crash state and checks that the marks allow the result.
fn check(state: &CrashState<'_>, history: &History, mutant: Option<Mutant>) -> Verdict {
    let media = Arc::new(state.media()?);
    let boot = match media.domain() {
        PersistenceDomain::Volatile => FIRST_BOOT,
        _ => FIRST_BOOT + 1 + u64::from(state.depth()),
    };
    let pool = open(&media, &in_boot(boot, mutant))?;
    let mut found = contents(&pool)?;
    // Created by a check whose recovery was crashed.
    let _ = found.remove(b"after".as_slice());
    campaign::settle(state, &media, &history.states, &found)?;
    // The pool keeps working: a change after this recovery is present after the next one.
    if crate::common::find(&pool, b"after")?.is_none() {
        crate::common::create(&pool, b"after", 1)?;
    }
    let recording = media.recording();
    drop(pool);
    // What was saved when it was closed says what the slots say.
    let report = aquifer_check::check(media, &aquifer_check::CheckOptions::default())?;
    match report.findings.iter().find(|finding| finding.severity == Severity::Damage) {
        Some(finding) => Err(finding.to_string().into()),
        None => Ok(Some(recording)),
    }
}

fn run(
    seed: u64,
    changes: u64,
    domain: PersistenceDomain,
    budget: u64,
    mutant: Option<Mutant>,
) -> Result<Explored, Box<CrashFailure>> {
    let (recording, history) = record(seed, changes, domain, mutant);
    let plan = Plan { depth: 1, budget, seed };
    explore(&recording, plan, |state| check(state, &history, mutant))
}

/// A pool with an object, and media on which its creation is durable.
fn prepared() -> (Arc<CrashMedia>, Pool) {
    prepared_on(PersistenceDomain::PageCache, None)
}

fn prepared_on(domain: PersistenceDomain, mutant: Option<Mutant>) -> (Arc<CrashMedia>, Pool) {
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, domain).unwrap());
    let pool = small(in_boot(FIRST_BOOT, None)).create_on(fresh.clone()).unwrap();
    crate::common::create(&pool, b"object", 2).unwrap();
    drop(pool);
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), fresh.domain()).unwrap());
    let pool = open(&media, &in_boot(FIRST_BOOT, mutant)).unwrap();
    (media, pool)
}

/// Packed records of such lengths that the last ones end up before the end of the ring in every
/// possible way.
#[test]
fn packed_records_at_the_end_of_the_ring_survive() {
    for last_bytes in (192..768).step_by(64) {
        let (media, pool) = prepared();
        let log = pool.layout().log();
        let number = crate::common::find(&pool, b"object").unwrap().unwrap().number;
        let object = pool.inode(number).unwrap().runs[0].bytes();
        // A record of one word has 192 bytes; exposed ranges make it longer.
        let change = |version: u64, len_bytes: u64| {
            pool.change_unguarded(vec![], |transaction| {
                let exposed = (len_bytes - 168) / 40;
                (0..exposed).for_each(|_| transaction.expose(object));
                let inode = transaction.inode(number)?;
                transaction.put(Inode { layout_version: version, ..inode });
                Ok(())
            })
            .unwrap()
        };
        let mut version = 100;
        while pool.durable_lsn() % log.len_bytes != log.len_bytes - PAGE_BYTES {
            pool.checkpoint().unwrap();
            change(version, 192);
            pool.sync().unwrap();
        }
        let left_bytes = PAGE_BYTES - last_bytes;
        for _ in 0..left_bytes / 192 {
            version += 1;
            change(version, 192);
        }
        version += 1;
        change(version, last_bytes + left_bytes % 192);
        pool.sync().unwrap();
        media.acknowledge(version);
        version += 1;
        media.begin(version);
        change(version, 704);
        pool.sync().unwrap();
        let recording = media.recording();
        drop(pool);
        let plan = Plan { depth: 0, budget: 200, seed: 1 };
        let explored = explore(&recording, plan, |state| {
            let pool = open(&Arc::new(state.media()?), &in_boot(FIRST_BOOT + 1, None))?;
            let found = pool.inode(number)?.layout_version;
            let is_right = match state.marks().last_acknowledged() {
                None => found <= version,
                Some(known) => found == known || found == version,
            };
            if is_right { Ok(None) } else { Err(format!("found version {found}").into()) }
        });
        explored.unwrap_or_else(|failure| panic!("{last_bytes} bytes: {failure}"));
    }
}

/// A process dies when its record is written and not published; the record that another process
/// publishes in its place has the same length, and one more follows. After a power cut there is no
/// trace of the first. `before` records of 192 bytes lie before them in their page.
fn unpublished_records_are_gone(
    domain: PersistenceDomain,
    before: u64,
    mutant: Option<Mutant>,
) -> Result<Explored, Box<CrashFailure>> {
    const UNSEEN: u64 = 1000;
    const CHOSEN: u64 = 2000;
    const BEHIND: u64 = 3000;
    let (media, pool) = prepared_on(domain, mutant);
    let number = |name: &[u8]| crate::common::find(&pool, name).unwrap().unwrap().number;
    crate::common::create(&pool, b"second", 1).unwrap();
    let [first, second] = [number(b"object"), number(b"second")];
    let change = |number, layout_version| {
        pool.change_unguarded(vec![], |transaction| {
            let inode = transaction.inode(number)?;
            transaction.put(Inode { layout_version, ..inode });
            Ok::<(), PoolError>(())
        })
        .unwrap()
    };
    // The first change of a slot after the tail is of the whole slot.
    change(first, 1);
    change(second, 1);
    pool.sync().unwrap();
    (2..2 + before).for_each(|version| change(first, version));
    let version = 1 + before;
    let died = end_thread_at("packed-written", || change(first, UNSEEN));
    assert!(died.is_none());
    media.begin(1);
    change(first, CHOSEN);
    // From here on the dead process's change has not happened.
    media.acknowledge(0);
    change(second, BEHIND);
    pool.sync().unwrap();
    media.acknowledge(1);
    let recording = media.recording();
    drop(pool);
    explore(&recording, Plan { depth: 0, budget: 500, seed: 1 }, |state| {
        let pool = open(&Arc::new(state.media()?), &in_boot(FIRST_BOOT + 1, mutant))?;
        let found = (pool.inode(first)?.layout_version, pool.inode(second)?.layout_version);
        let is_right = match (state.marks().last_acknowledged(), found) {
            (Some(1), found) => found == (CHOSEN, BEHIND),
            (Some(_), (UNSEEN, _)) => false,
            (_, (CHOSEN, BEHIND)) => true,
            (_, (first, second)) => second < BEHIND && (first <= version || first >= UNSEEN),
        };
        if is_right { Ok(None) } else { Err(format!("found {found:?}").into()) }
    })
}

#[test]
fn a_record_that_was_not_published_does_not_come_back() {
    for domain in [PersistenceDomain::PageCache, PersistenceDomain::Dax] {
        // The eighth record ends with a sector: what follows is in another one.
        for before in [1, 7] {
            let explored = unpublished_records_are_gone(domain, before, None);
            explored.unwrap_or_else(|failure| panic!("{domain}, {before}: {failure}"));
        }
    }
}

/// If a power cut undoes a change that named pages for the first time, nothing records that they
/// were written to.
#[test]
fn pages_that_a_lost_change_has_used_are_not_taken_for_fresh() {
    let (media, pool) = prepared();
    let reservation = pool.reserve_zeroed(8, 1).unwrap();
    let (runs, bytes) = (reservation.runs().to_vec(), reservation.whole().bytes());
    pool.change_unguarded(vec![reservation], |transaction| {
        let inode = crate::common::find(&pool, b"object")?.expect("made before");
        transaction.put(Inode { size_bytes: 8 * PAGE_BYTES, runs: runs.clone(), ..inode });
        Ok(())
    })
    .unwrap();
    pool.store_unguarded(bytes.offset_bytes, &crate::common::page(77).repeat(8)).unwrap();
    let recording = media.recording();
    pool.die();
    let explored = explore(&recording, Plan { depth: 0, budget: 500, seed: 1 }, |state| {
        let pool = open(&Arc::new(state.media()?), &in_boot(FIRST_BOOT + 1, None))?;
        crate::common::create(&pool, b"next", 40)?;
        if contents(&pool)?[b"next".as_slice()].iter().all(|stamp| *stamp == 0) {
            Ok(None)
        } else {
            Err("a new object has bytes of an older one".into())
        }
    });
    explored.unwrap_or_else(|failure| panic!("{failure}"));
}

/// Nothing of an acknowledged transaction is lost, also if it exposes bytes.
#[test]
fn a_transaction_that_exposes_bytes_is_durable_with_them() {
    let (media, pool) = prepared();
    let inode = crate::common::find(&pool, b"object").unwrap().unwrap();
    let second = crate::common::place(&inode, 1);
    pool.transact_unguarded(vec![], |transaction| {
        transaction.put(Inode { size_bytes: PAGE_BYTES, ..inode.clone() });
        Ok(())
    })
    .unwrap();
    pool.store_unguarded(second.offset_bytes, &crate::common::page(5)).unwrap();
    media.begin(1);
    pool.transact_unguarded(vec![], |transaction| {
        transaction.expose(second);
        let layout_version = 9;
        transaction.put(Inode { size_bytes: 2 * PAGE_BYTES, layout_version, ..inode.clone() });
        Ok(())
    })
    .unwrap();
    media.acknowledge(1);
    let recording = media.recording();
    drop(pool);
    let explored = explore(&recording, Plan { depth: 0, budget: 500, seed: 1 }, |state| {
        let media = Arc::new(state.media()?);
        let pool = open(&media, &in_boot(FIRST_BOOT + 1, None))?;
        let is_there = pool.inode(inode.number)?.layout_version == 9;
        let mut page = vec![0; PAGE_BYTES as usize];
        pool.load(second.offset_bytes, &mut page)?;
        match (is_there, page == crate::common::page(5)) {
            (false, _) if state.marks().is_acknowledged(1) => Err("it is lost".into()),
            (true, false) => Err("its bytes are lost".into()),
            _ => Ok(None),
        }
    });
    explored.unwrap_or_else(|failure| panic!("{failure}"));
}

fn survives(domain: PersistenceDomain) {
    campaign::survives(domain, 8, |seed| run(seed, 30, domain, 1500, None));
}

#[test]
fn every_crash_state_on_a_disk_recovers() {
    survives(PersistenceDomain::PageCache);
}

#[test]
fn every_crash_state_on_persistent_memory_recovers() {
    survives(PersistenceDomain::Dax);
}

#[test]
fn every_killed_process_in_memory_files_recovers() {
    survives(PersistenceDomain::Volatile);
}

/// The death of all processes undoes nothing that was visible, on any media.
#[test]
fn what_is_visible_survives_every_process() {
    for domain in [PersistenceDomain::PageCache, PersistenceDomain::Dax] {
        for seed in seed(0)..seed(0) + steps(8) as u64 {
            record_and_look(seed, 40, domain, None, |media, options, state| {
                let left = Arc::new(CrashMedia::from_image(&media.image(), domain).unwrap());
                let pool = open(&left, options).unwrap();
                assert_eq!(contents(&pool).unwrap(), *state, "seed {seed}, {domain}");
            });
        }
    }
}

/// Every deliberate mistake that a crash can reveal is noticed.
#[test]
fn every_mutant_is_caught() {
    let mutants = [
        Mutant::NoRevoke,
        Mutant::EarlyReuse,
        Mutant::CommitBeforeData,
        Mutant::CountExposed,
        Mutant::EraseUnsaid,
        Mutant::TrustStoredState,
        Mutant::SameGeneration,
        Mutant::NoChecksum,
        Mutant::TailBeforeFlush,
        Mutant::NoFlush,
        Mutant::PatchFirst,
        Mutant::BothSuperblocksAtOnce,
        Mutant::SavedWhileFreed,
        Mutant::KeepSavedMark,
    ];
    let domain = PersistenceDomain::PageCache;
    campaign::catches(&mutants, |seed, mutant| run(seed, 40, domain, 1500, Some(mutant)));
}

/// A clean close, and a power cut: what was saved is there, or a superblock says that nothing is.
fn close(mutant: Option<Mutant>) -> Result<Explored, Box<CrashFailure>> {
    let (media, pool) = prepared_on(PersistenceDomain::PageCache, mutant);
    crate::common::create(&pool, b"second", 3).unwrap();
    drop(pool);
    media.acknowledge(1);
    explore(&media.recording(), Plan { depth: 0, budget: 500, seed: 1 }, |state| {
        let media = Arc::new(state.media()?);
        let report = aquifer_check::check(media.clone(), &aquifer_check::CheckOptions::default())?;
        if !report.is_sound() || (state.marks().is_acknowledged(1) && !report.findings.is_empty()) {
            return Err(report.to_string().into());
        }
        let pool = open(&media, &in_boot(FIRST_BOOT + 1, mutant))?;
        let is_there = crate::common::find(&pool, b"second")?.is_some();
        if is_there || !state.marks().is_acknowledged(1) {
            Ok(None)
        } else {
            Err("the object is lost".into())
        }
    })
}

#[test]
fn what_a_clean_close_has_saved_survives_a_power_cut() {
    close(None).unwrap_or_else(|failure| panic!("{failure}"));
    close(Some(Mutant::SavedUnflushed)).expect_err("the mutant");
}

/// Names of several objects are changed one after another, and not made durable. The processes are
/// killed, the next one sees another life although nothing is lost, and a power cut happens during
/// its recovery.
fn recover_in_another_life(mutant: Option<Mutant>) -> Result<Explored, Box<CrashFailure>> {
    const OBJECTS: u64 = 5;
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, PersistenceDomain::PageCache).unwrap());
    let pool = small(in_boot(FIRST_BOOT, None)).create_on(fresh.clone()).unwrap();
    let name = |what: &str, id: u64| format!("{what}-{id}").into_bytes();
    (0..OBJECTS).for_each(|id| crate::common::create(&pool, &name("old", id), 1).unwrap());
    drop(pool);
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), fresh.domain()).unwrap());
    let pool = open(&media, &in_boot(FIRST_BOOT, mutant)).unwrap();
    (0..OBJECTS)
        .for_each(|id| crate::common::rename(&pool, &name("old", id), &name("new", id)).unwrap());
    pool.die();
    let pool = open(&media, &in_boot(SEEMS_ANOTHER, mutant)).unwrap();
    assert_eq!(contents(&pool).unwrap().into_keys().next(), Some(name("new", 0)));
    media.acknowledge(1);
    let recording = media.recording();
    drop(pool);
    explore(&recording, Plan { depth: 0, budget: 2000, seed: 1 }, |state| {
        let pool = open(&Arc::new(state.media()?), &in_boot(FIRST_BOOT + 1, mutant))?;
        let found = contents(&pool)?;
        let is_new = |id| found.contains_key(&name("new", id));
        let changed = (0..OBJECTS).filter(|id| is_new(*id)).count() as u64;
        let are_first = (0..changed).all(is_new);
        if are_first && (changed == OBJECTS || !state.marks().is_acknowledged(1)) {
            Ok(None)
        } else {
            Err(format!("found {:?}", found.keys()).into())
        }
    })
}

#[test]
fn what_is_recovered_in_another_life_is_durable() {
    recover_in_another_life(None).unwrap_or_else(|failure| panic!("{failure}"));
    let caught = recover_in_another_life(Some(Mutant::SecureOnlySameLife));
    println!("{}", caught.expect_err("a power cut has shown it").reason);
}

/// Media that lose a flush, reorder two writes, or treat durable writes as plain ones are all
/// noticed: so each of these operations is necessary and tested.
#[test]
fn misbehaving_media_are_caught() {
    let domain = PersistenceDomain::PageCache;
    let (recording, history) = record(5, 30, domain, None);
    let is_caught = |mutation: &Mutation| {
        let plan = Plan { depth: 0, budget: 1500, seed: 1 };
        let recording = recording.mutated(mutation);
        explore(&recording, plan, |state| check(state, &history, None).map(|_| None)).is_err()
    };
    for general in [Mutation::DropFlushes, Mutation::DropWriteBacks, Mutation::DurableIsPlain] {
        assert!(is_caught(&general), "{general}");
    }
    let swaps = Mutation::all(&recording)
        .into_iter()
        .filter(|mutation| matches!(mutation, Mutation::SwapWithNext(_)));
    let caught = swaps.filter(is_caught).take(3).count();
    assert!(caught > 0, "no swapped write was noticed");
    println!("{caught} of the first swaps noticed");
}
