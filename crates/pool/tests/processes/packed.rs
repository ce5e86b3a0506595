//! Changes that are visible at once, from many threads and processes, concurrently with
//! transactions, commits and checkpoints; and failures to make them durable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{
    Change, Model, Scene, alone, contents, create, find, open, page, place, small, write,
};
use aquifer_check::{CheckOptions, check};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_crashkit::{CrashMedia, Fault, Plan, Trigger, explore};
use aquifer_pool::media::{ByteRange, MediaOperation, PersistenceDomain};
use aquifer_pool::{CommitContent, CommitPages, Mutant, Pool, PoolError, PoolOptions};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child::{self, Reaped};
use aquifer_testkit::failing_device::FailingDevice;
use aquifer_testkit::rng::Rng;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("worker", worker)];

fn environment(name: &str) -> u64 {
    std::env::var(name).expect("set by the parent").parse().expect("a number")
}

fn shared(domain: PersistenceDomain) -> PoolOptions {
    Pool::options().domain(domain)
}

fn domain_of(code: u64) -> PersistenceDomain {
    [PersistenceDomain::PageCache, PersistenceDomain::Volatile][code as usize]
}

fn worker() {
    let path = std::env::var("POOL").expect("set by the parent");
    let pool = shared(domain_of(environment("DOMAIN"))).open(path).unwrap();
    work(&pool, environment("WORKER"), environment("CHANGES"));
}

/// Changes objects that only it uses, and checks all of them repeatedly.
fn work(pool: &Pool, worker: u64, changes: u64) {
    let mut rng = Rng::new(seed(6) + worker);
    let mut model = Model::new();
    for number in 1..=changes {
        let change = Change::random(&mut rng, &model, worker * 1_000_000 + number);
        change.run(pool).unwrap_or_else(|error| panic!("worker {worker}, {change:?}: {error}"));
        change.apply(&mut model);
        if number % 10 == 0 || number == changes {
            look(pool, &model, worker);
        }
    }
}

/// Checks that all objects of a worker are as it left them, and that it has no others.
fn look(pool: &Pool, model: &Model, worker: u64) {
    let names = pool.inodes().unwrap().into_iter().map(|inode| inode.name);
    let start = format!("object-{worker}");
    let found = names.filter(|name| name.starts_with(start.as_bytes()) && name.len() == 14).count();
    assert_eq!(found, model.len(), "worker {worker}");
    for (name, stamps) in model {
        let inode = find(pool, name).unwrap().expect("it is in the model");
        for (number, stamp) in (0..).zip(stamps) {
            let place = place(&inode, number);
            assert!(pool.bring_up_to_date(place).unwrap().is_empty());
            let mut bytes = vec![0; place.len_bytes as usize];
            pool.load(place.offset_bytes, &mut bytes).unwrap();
            assert!(bytes == page(*stamp), "worker {worker}, page {number} of {inode:?}");
        }
    }
}

/// The log is so short that threads of this process and other processes overwrite it continuously.
#[test]
fn many_change_at_once() {
    for code in [0, 1] {
        let scene = Scene::new(tempfile::tempdir().unwrap());
        let options = small(shared(domain_of(code))).inodes(63);
        let pool = options.create(&scene.path, 4 << 20).unwrap();
        let changes = steps(150) as u64;
        let children: Vec<Reaped> = (1..3)
            .map(|worker: u64| {
                let mut command = child::command("worker");
                command.env("POOL", &scene.path).env("DOMAIN", code.to_string());
                command.env("WORKER", worker.to_string()).env("CHANGES", changes.to_string());
                Reaped(command.spawn().unwrap())
            })
            .collect();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (3..6)
                .map(|worker| {
                    scope.spawn({
                        let pool = &pool;
                        move || work(pool, worker, changes)
                    })
                })
                .collect();
            let reader = shared(domain_of(code)).read_only(true);
            let reader = reader.open(&scene.path).unwrap();
            let is_done = &is_done;
            scope.spawn(move || {
                while !is_done.load(Ordering::Relaxed) {
                    assert_eq!(reader.info().unwrap().damaged_inodes, 0);
                    let inodes = reader.inodes().unwrap();
                    let mut runs: Vec<_> =
                        inodes.iter().flat_map(|inode| inode.all_runs()).collect();
                    runs.sort_unstable();
                    assert!(runs.windows(2).all(|pair| !pair[0].overlaps(pair[1])), "{runs:?}");
                }
            });
            let outcomes: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            is_done.store(true, Ordering::Relaxed);
            assert!(outcomes.iter().all(Result::is_ok));
        });
        for mut child in children {
            let status = child.0.wait().unwrap();
            let mut said = String::new();
            std::io::Read::read_to_string(child.0.stderr.as_mut().unwrap(), &mut said).unwrap();
            assert!(status.success(), "{said}");
        }
        let rounds = pool.durable_lsn() / pool.layout().log().len_bytes;
        assert!(rounds > changes / 10, "the log was filled only {rounds} times");
        let before = contents(&pool).unwrap();
        drop(pool);
        let options = CheckOptions { fresh_pages: true, ..CheckOptions::default() };
        let report = check(&scene.path, &options).unwrap();
        assert!(report.is_sound(), "{report}");
        let pool = shared(domain_of(code)).open(&scene.path).unwrap();
        assert_eq!(contents(&pool).unwrap(), before);
    }
}

/// Appends that wait for a stalled one fill their table. Then the error of a change names the
/// process that stalls, and all continue when it does.
#[test]
fn a_full_append_table_names_the_stalled_process() {
    let media = Arc::new(CrashMedia::new(16 << 20, PersistenceDomain::PageCache).unwrap());
    let options = small(alone(None)).log_bytes(8 << 20).stall_timeout(Duration::from_millis(50));
    let pool = options.create_on(media.clone()).unwrap();
    create(&pool, b"object", 1).unwrap();
    create(&pool, b"name-0", 1).unwrap();
    let inode = find(&pool, b"object").unwrap().unwrap();
    let pages = [CommitPages { inode: inode.number, target: place(&inode, 0) }];
    let content = CommitContent { pages: &pages, ..Default::default() };
    let capture =
        |stamp| pool.capture_unguarded(&content, |bytes| bytes.copy_from_slice(&page(stamp)));
    let name = |number: u64| format!("name-{number}").into_bytes();
    let mut commits = vec![capture(1).unwrap()];
    let mut renamed = 0;
    let refused = loop {
        match crate::common::rename(&pool, &name(renamed), &name(renamed + 1)) {
            Ok(()) => renamed += 1,
            Err(error) => break error,
        }
        match capture(renamed + 1) {
            Ok(commit) => commits.push(commit),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, PoolError::Stalled { pid, .. } if pid == std::process::id()));
    assert!(renamed > 200, "{refused} after {renamed}");
    let last = commits.len() as u64;
    commits.into_iter().for_each(|commit| commit.finish().unwrap());
    crate::common::rename(&pool, &name(renamed), b"last").unwrap();
    pool.sync().unwrap();
    let expected = Model::from([(b"object".to_vec(), vec![last]), (b"last".to_vec(), vec![0])]);
    assert_eq!(contents(&pool).unwrap(), expected);
}

/// Exposed bytes may be gigabytes. A process that waits for the flush of another one does not time
/// out while that one makes progress, also behind a checkpoint that waits.
#[test]
fn a_process_flushing_gigabytes_is_not_taken_for_stopped() {
    const PARTS: u64 = 12;
    let media = Arc::new(CrashMedia::new(24 << 20, PersistenceDomain::PageCache).unwrap());
    let patience = Duration::from_secs(1);
    let options = alone(None).stall_timeout(patience);
    let pool = small(options).create_on(media.clone()).unwrap();
    let data = pool.layout().data();
    // Exposing the same bytes repeatedly is equivalent to exposing more of them.
    let range = ByteRange { len_bytes: 16 << 20, ..data };
    pool.change_unguarded(Vec::new(), |change| {
        (0..PARTS).for_each(|_| change.expose(range));
        Ok(())
    })
    .unwrap();
    let write_back = Trigger::on(MediaOperation::WriteBack).within(data);
    let gates: Vec<_> = (0..PARTS).map(|n| media.hold(write_back.clone().nth(n + 1))).collect();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| pool.sync());
        gates[0].wait_until_reached();
        let waiting = [
            scope.spawn(|| pool.sync()),
            scope.spawn(|| pool.checkpoint()),
            scope.spawn(|| pool.checkpoint()),
        ];
        for gate in &gates {
            gate.wait_until_reached();
            // All parts together take longer than the timeout.
            std::thread::sleep(patience / 4);
            gate.open();
        }
        first.join().unwrap().unwrap();
        waiting.into_iter().for_each(|waiting| waiting.join().unwrap().unwrap());
    });
}

/// One flush, or one write of the log, takes longer than the timeout.
#[test]
fn a_process_waiting_for_a_slow_device_is_not_taken_for_stopped() {
    let patience = Duration::from_secs(1);
    for operation in [MediaOperation::Flush, MediaOperation::WriteDurable] {
        let media = Arc::new(CrashMedia::new(1 << 20, PersistenceDomain::PageCache).unwrap());
        let options = alone(None).stall_timeout(patience).background(true);
        let pool = small(options).create_on(media.clone()).unwrap();
        // The flush of the checkpoint, its superblock writes, and the writes of the log before it.
        for (index, work) in [Pool::sync, Pool::checkpoint].into_iter().enumerate() {
            write(&pool, format!("object-{index}").as_bytes(), 2, 3).unwrap();
            let gate = media.hold(Trigger::on(operation));
            std::thread::scope(|scope| {
                let first = scope.spawn(|| work(&pool));
                gate.wait_until_reached();
                let waiting = [scope.spawn(|| pool.sync()), scope.spawn(|| pool.checkpoint())];
                // Must exceed the timeout.
                std::thread::sleep(patience * 5 / 2);
                gate.open();
                first.join().unwrap().unwrap();
                waiting.into_iter().for_each(|waiting| waiting.join().unwrap().unwrap());
            });
        }
    }
}

/// The same for writers of a file whose lock is held by a thread that waits for its media, or for
/// another thread that does.
#[test]
fn a_writer_that_waits_for_a_slow_device_keeps_its_file_without_being_taken_for_stopped() {
    let patience = Duration::from_secs(1);
    for is_other_flushing in [false, true] {
        let media = Arc::new(CrashMedia::new(1 << 20, PersistenceDomain::PageCache).unwrap());
        let options = alone(None).stall_timeout(patience).background(true);
        let pool = small(options).create_on(media.clone()).unwrap();
        let lock = pool.lock_file(5).unwrap();
        lock.exchange(|| write(&pool, b"object", 2, 3)).unwrap();
        drop(lock);
        let is_held = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let gate = media.hold(Trigger::on(MediaOperation::Flush));
            let flushing = is_other_flushing.then(|| {
                let flushing = scope.spawn(|| pool.sync());
                gate.wait_until_reached();
                flushing
            });
            let holder = scope.spawn(|| {
                let lock = pool.lock_file(5).unwrap();
                is_held.store(true, Ordering::Release);
                lock.settle()
            });
            while !is_held.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            gate.wait_until_reached();
            let writer = scope.spawn(|| pool.lock_file(5).map(drop));
            // Must exceed the writer's timeout.
            std::thread::sleep(patience * 5 / 2);
            gate.open();
            writer.join().unwrap().unwrap();
            holder.join().unwrap().unwrap();
            flushing.into_iter().for_each(|flushing| flushing.join().unwrap().unwrap());
        });
    }
}

/// The kernel reports a lost page to a program that does not use the pool, and to the processes
/// that had the device open then. A process that opens the pool later learns it from these.
#[test]
fn what_another_program_was_told_is_lost_ends_a_pool_for_all() {
    let Some(device) = FailingDevice::new() else {
        return eprintln!("skipped: no block device can be made here");
    };
    let options = Pool::options().background(false);
    let pool = small(options.clone()).create(device.path(), 4 << 20).unwrap();
    device.forget(pool.layout().data().offset_bytes).unwrap();
    let program = std::fs::File::options().write(true).open(device.path()).unwrap();
    device.fill();
    write(&pool, b"object", 2, 7).unwrap();
    program.sync_all().expect_err("it could not be written");
    device.empty();
    let later = options.open(device.path()).unwrap();
    drop(pool);
    assert!(matches!(later.sync(), Err(PoolError::Failed { .. })));
    drop(later);
    let pool = options.open(device.path()).unwrap();
    assert_eq!(contents(&pool).unwrap(), Model::new());
}

fn in_first_life() -> PoolOptions {
    alone(None).boot(1).exclusive(false)
}

/// What is found in a pool whose write-back failed and that was closed when the failure could not
/// be written to a superblock: only the shared memory records it. What was removed before it could
/// be made durable must not come back as the content of what was lost. It is searched for
/// [`in_first_life`].
fn found_after_failure(options: &PoolOptions, between: impl Fn(&Arc<CrashMedia>)) -> Model {
    let fresh = Arc::new(CrashMedia::new(512 << 10, PersistenceDomain::PageCache).unwrap());
    let pool = small(options.clone()).create_on(fresh.clone()).unwrap();
    write(&pool, b"earlier", 8, 3).unwrap();
    crate::common::remove(&pool, b"earlier").unwrap();
    pool.checkpoint().unwrap();
    drop(pool);
    let media = CrashMedia::from_image(&fresh.image(), PersistenceDomain::PageCache).unwrap();
    let media = Arc::new(media);
    let pool = open(&media, options).unwrap();
    write(&pool, b"object", 2, 7).unwrap();
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteBack)).forgetting());
    let superblocks = ByteRange { offset_bytes: 0, len_bytes: 8192 };
    let write = Trigger::on(MediaOperation::WriteDurable).within(superblocks);
    media.fail(Fault::io_error(write.lasting()));
    assert!(pool.sync().is_err());
    drop(pool);
    media.clear_faults();
    between(&media);
    contents(&open(&media, &in_first_life()).unwrap()).unwrap()
}

#[test]
fn that_a_pool_has_failed_outlives_openings_that_fail_as_well() {
    let options = in_first_life();
    assert_eq!(found_after_failure(&options, |_| ()), Model::new());
    let found = found_after_failure(&options, |media| {
        let absent = options.clone().segment_directory("/nonexistent");
        open(media, &absent).expect_err("there is no such directory");
    });
    assert_eq!(found, Model::new());
    for operation in [MediaOperation::WriteDurable, MediaOperation::WriteBack] {
        let found = found_after_failure(&options, |media| {
            media.fail(Fault::io_error(Trigger::on(operation).lasting()));
            let _ = open(media, &options);
            media.clear_faults();
        });
        assert_eq!(found, Model::new(), "{operation}");
    }
}

/// The next process does not look in the directory of the shared memory: it is not known whether
/// the pool has failed.
#[test]
fn a_pool_whose_shared_memory_is_not_found_counts_as_failed() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = in_first_life().segment_directory(directory.path());
    assert_eq!(found_after_failure(&options, |_| ()), Model::new());
}

/// What cannot be written back is not acknowledged, then or later. It may be lost, and the earlier
/// content of its pages is not shown: not if the system drops it from memory, the machine keeps
/// running and no superblock could record the failure, and not after a power cut either.
#[test]
fn a_sync_whose_write_back_failed_shows_nothing_of_earlier_owners() {
    for operation in [MediaOperation::WriteBack, MediaOperation::Flush] {
        for (forgets, can_note, mutant) in [
            (false, true, None),
            (true, true, None),
            (true, false, None),
            (true, true, Some(Mutant::TrustLostBytes)),
        ] {
            let case = format!("{operation}, {forgets}, {can_note}, {mutant:?}");
            let fresh = Arc::new(CrashMedia::new(512 << 10, PersistenceDomain::PageCache).unwrap());
            let options = alone(None).boot(1).exclusive(can_note).mutant(mutant);
            let pool = small(options.clone()).create_on(fresh.clone()).unwrap();
            write(&pool, b"earlier", 8, 3).unwrap();
            crate::common::remove(&pool, b"earlier").unwrap();
            pool.checkpoint().unwrap();
            drop(pool);
            let image = fresh.image();
            let media =
                Arc::new(CrashMedia::from_image(&image, PersistenceDomain::PageCache).unwrap());
            let pool = open(&media, &options).unwrap();
            write(&pool, b"object", 2, 7).unwrap();
            let fault = Fault::io_error(Trigger::on(operation));
            media.fail(if forgets { fault.forgetting() } else { fault });
            if !can_note {
                let superblocks = ByteRange { offset_bytes: 0, len_bytes: 8192 };
                let write = Trigger::on(MediaOperation::WriteDurable).within(superblocks);
                media.fail(Fault::io_error(write.lasting()));
            }
            assert!(pool.sync().is_err(), "{case}");
            let refused = write(&pool, b"other", 1, 8);
            assert!(matches!(refused, Err(PoolError::Failed { .. })), "{case}: {refused:?}");
            assert!(matches!(pool.sync(), Err(PoolError::Failed { .. })), "{case}");
            if forgets && can_note {
                pool.die();
            } else {
                drop(pool);
            }
            media.clear_faults();
            let pool = open(&media, &options).unwrap();
            if mutant.is_some() {
                assert_eq!(contents(&pool).unwrap()[b"object".as_slice()], [3, 3], "{case}");
                continue;
            }
            assert_eq!(contents(&pool).unwrap(), Model::new(), "{case}");
            media.withdraw(1);
            write(&pool, b"next", 2, 8).unwrap();
            pool.sync().unwrap();
            media.acknowledge(2);
            let recording = media.recording();
            drop(pool);
            let explored = explore(&recording, Plan { depth: 0, budget: 300, seed: 1 }, |state| {
                let options = alone(None).boot(2);
                let found = contents(&open(&Arc::new(state.media()?), &options)?)?;
                let is_right = match state.marks() {
                    marks if marks.is_acknowledged(2) => {
                        found == Model::from([(b"next".to_vec(), vec![8, 8])])
                    }
                    marks if marks.withdrawn().contains(&1) => {
                        !found.contains_key(b"object".as_slice())
                    }
                    _ => found.is_empty() || found.values().all(|stamps| *stamps == [7, 7]),
                };
                if is_right { Ok(None) } else { Err(format!("{found:?}").into()) }
            });
            explored.unwrap_or_else(|failure| panic!("{case}: {failure}"));
        }
    }
}
