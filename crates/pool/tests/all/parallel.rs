//! Commits of several threads and handles: appended in parallel, acknowledged in order, and their
//! failures.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{alone, contents, create, find, open, page, place, small};
use aquifer_crashkit::unguarded::{UnguardedMedia, UnguardedPool};
use aquifer_crashkit::{CrashFailure, CrashMedia, Explored, Fault, Plan, Trigger, explore};
use aquifer_pool::format::inode::Inode;
use aquifer_pool::media::{ByteRange, MediaOperation, PersistenceDomain};
use aquifer_pool::{CommitContent, CommitPages, Mutant, Pool, PoolError, Transaction};

const POOL_BYTES: u64 = 512 << 10;

/// Commits `stamp` to the first page of an object.
fn commit(pool: &Pool, name: &[u8], stamp: u64) -> Result<(), PoolError> {
    let inode = find(pool, name)?.expect("made before");
    let pages = [CommitPages { inode: inode.number, target: place(&inode, 0) }];
    pool.capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |payload| {
        payload.copy_from_slice(&page(stamp))
    })?
    .finish()
}

fn name(thread: u64) -> Vec<u8> {
    format!("object-{thread}").into_bytes()
}

/// A pool with one object for each thread.
fn prepared(threads: u64, domain: PersistenceDomain) -> Arc<CrashMedia> {
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, domain).unwrap());
    let pool = small(alone(None)).create_on(fresh.clone()).unwrap();
    (0..threads).for_each(|thread| create(&pool, &name(thread), 1).unwrap());
    drop(pool);
    Arc::new(CrashMedia::from_image(&fresh.image(), domain).unwrap())
}

/// Each thread commits 1, 2, 3, … to its own object; after a crash each object has the last
/// acknowledged commit or the one in flight. Marks: thread × 1000 + number.
fn run(threads: u64, commits: u64, mutant: Option<Mutant>) -> Result<Explored, Box<CrashFailure>> {
    let media = prepared(threads, PersistenceDomain::PageCache);
    let pool = open(&media, &alone(mutant)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (pool, media) = (&pool, &media);
            scope.spawn(move || {
                for number in 1..=commits {
                    let mark = thread * 1000 + number;
                    media.begin(mark);
                    commit(pool, &name(thread), number).unwrap();
                    media.acknowledge(mark);
                }
            });
        }
    });
    let recording = media.recording();
    drop(pool);
    explore(&recording, Plan { depth: 0, budget: 3000, seed: 1 }, |state| {
        let media = Arc::new(state.media()?);
        let pool = open(&media, &alone(mutant))?;
        let found = contents(&pool)?;
        for thread in 0..threads {
            let numbers = |marks: &std::collections::BTreeSet<u64>| {
                marks.iter().filter(|mark| **mark / 1000 == thread).map(|mark| mark % 1000).max()
            };
            let acknowledged = numbers(state.marks().acknowledged()).unwrap_or(0);
            let in_flight = numbers(state.marks().in_flight());
            let stamp = found[&name(thread)][0];
            if stamp != acknowledged && Some(stamp) != in_flight {
                let allowed = format!("{acknowledged} or {in_flight:?}");
                return Err(format!("object {thread} has {stamp}, allowed {allowed}").into());
            }
        }
        Ok(None)
    })
}

#[test]
fn parallel_commits_survive_every_crash() {
    for threads in [2, 4] {
        run(threads, 12, None).unwrap_or_else(|failure| panic!("{threads} threads: {failure}"));
    }
}

#[test]
fn an_acknowledgement_out_of_order_is_caught() {
    // It shows in a crash state, or in the pool itself when it looks for a record that was
    // acknowledged.
    let is_caught = || {
        std::panic::catch_unwind(|| run(4, 12, Some(Mutant::AcknowledgeOutOfOrder)).is_err())
            .unwrap_or(true)
    };
    assert!((0..20).any(|_| is_caught()), "nothing showed it");
}

#[test]
fn a_log_write_that_fails_once_is_repeated() {
    let media = prepared(1, PersistenceDomain::PageCache);
    let pool = open(&media, &alone(None)).unwrap();
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable)));
    commit(&pool, &name(0), 7).unwrap();
    assert_eq!(contents(&pool).unwrap()[&name(0)], [7]);
}

/// Rule 5: the second failure makes the pool read-only for all handles, the commit is old or new,
/// and what was acknowledged before is present.
#[test]
fn a_log_write_that_fails_twice_makes_the_pool_read_only() {
    let media = prepared(2, PersistenceDomain::PageCache);
    let pool = open(&media, &alone(None)).unwrap();
    commit(&pool, &name(0), 7).unwrap();
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable).lasting()));
    assert!(matches!(commit(&pool, &name(0), 8), Err(PoolError::Failed { .. })));
    media.clear_faults();
    assert!(matches!(commit(&pool, &name(1), 9), Err(PoolError::Failed { .. })));
    assert!(matches!(create(&pool, b"more", 1), Err(PoolError::Failed { .. })));
    assert!(matches!(pool.checkpoint(), Err(PoolError::Failed { .. })));
    drop(pool);
    let pool = open(&media, &alone(None)).unwrap();
    let found = contents(&pool).unwrap();
    assert!([7, 8].contains(&found[&name(0)][0]), "{found:?}");
    assert_eq!(found[&name(1)], [0]);
    commit(&pool, &name(0), 10).unwrap();
}

/// No commit after one that cannot become durable is acknowledged.
#[test]
fn nothing_is_acknowledged_behind_a_failed_write() {
    let media = prepared(2, PersistenceDomain::PageCache);
    let pool = open(&media, &alone(None)).unwrap();
    // The first append is held in its write; the second completes after it.
    let gate = media.hold(Trigger::on(MediaOperation::WriteDurable));
    let acknowledged = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| commit(&pool, &name(0), 1));
        gate.wait_until_reached();
        let second = scope.spawn(|| {
            let outcome = commit(&pool, &name(1), 2);
            acknowledged.fetch_add(u64::from(outcome.is_ok()), Ordering::SeqCst);
            outcome
        });
        // Its record is written once the media have it.
        while media.recording().operations_of(MediaOperation::WriteDurable).count() < 2 {
            std::thread::yield_now();
        }
        media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable).lasting()));
        assert_eq!(acknowledged.load(Ordering::SeqCst), 0);
        gate.open();
        // The held write succeeds or fails, and the second commit gets the corresponding result.
        let outcomes = (first.join().unwrap(), second.join().unwrap());
        if outcomes.0.is_err() {
            assert!(outcomes.1.is_err(), "acknowledged behind a failed one");
        }
    });
}

/// The error of a log write may have been the loss of a page that another thread wrote: the system
/// reports it once, at the next sync. Repeating the log write does not restore that page.
#[test]
fn a_loss_reported_to_a_log_write_fails_every_process() {
    let media = prepared(1, PersistenceDomain::PageCache);
    let pool = open(&media, &alone(None)).unwrap();
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteDurable)));
    media.fail(Fault::io_error(Trigger::on(MediaOperation::Flush).lasting()));
    commit(&pool, &name(0), 7).unwrap();
    assert!(matches!(commit(&pool, &name(0), 8), Err(PoolError::Failed { .. })));
    assert_eq!(contents(&pool).unwrap()[&name(0)], [7]);
}

/// Pages that a record marks as used, and that is not durable yet, are fresh again after a crash,
/// and then count as zero: no thread may write to them before.
#[test]
fn pages_are_not_written_to_before_it_is_durable_that_they_are_used() {
    let media = prepared(1, PersistenceDomain::PageCache);
    let options = alone(None).stall_timeout(Duration::from_millis(100));
    let pool = open(&media, &options).unwrap();
    let record = pool.layout().log();
    std::thread::scope(|scope| {
        let gate = media.hold(Trigger::on(MediaOperation::WriteDurable).within(record));
        let raising = scope.spawn(|| pool.reserve(8, 1).map(drop));
        gate.wait_until_reached();
        // The next page is among those that are marked as used beyond these.
        let refused = pool.reserve(1, 1).map(|reservation| {
            pool.media()
                .write_unguarded(reservation.whole().bytes().offset_bytes, &page(9))
                .unwrap();
        });
        gate.open();
        assert!(matches!(refused, Err(PoolError::Stalled { .. })), "{refused:?}");
        // The other call may time out as well, depending on how long it was held.
        let _ = raising.join().unwrap();
    });
    drop(pool.reserve(1, 1).unwrap());
}

/// A thread that keeps writing to a file does not make waiters for its lock time out; one that does
/// nothing does.
#[test]
fn a_writer_that_makes_progress_is_waited_for() {
    let media = prepared(1, PersistenceDomain::Volatile);
    let patience = Duration::from_secs(1);
    let pool = open(&media, &alone(None).stall_timeout(patience)).unwrap();
    std::thread::scope(|scope| {
        let held = pool.lock_two_files(1, 2).unwrap();
        let refused = scope.spawn(|| pool.lock_file(2).map(drop)).join().unwrap();
        assert!(matches!(refused, Err(PoolError::Stalled { .. })), "{refused:?}");
        let waiting = [1, 2].map(|inode| {
            let pool = &pool;
            scope.spawn(move || pool.lock_file(inode).map(drop))
        });
        // All of it together takes longer than the timeout.
        for _ in 0..8 {
            std::thread::sleep(patience / 5);
            held.note_progress();
        }
        drop(held);
        waiting.into_iter().for_each(|waiting| waiting.join().unwrap().unwrap());
    });
}

/// What recovery would not read is refused, instead of being written where everything after it
/// would be lost.
#[test]
fn commits_and_inodes_that_recovery_would_refuse_are_refused_before() {
    let media = prepared(1, PersistenceDomain::PageCache);
    let pool = open(&media, &alone(None)).unwrap();
    let inode = find(&pool, &name(0)).unwrap().unwrap();
    let good = place(&inode, 0);
    let layout = pool.layout();
    for (number, target) in [
        (inode.number, ByteRange { offset_bytes: good.offset_bytes + 8, ..good }),
        (inode.number, ByteRange { offset_bytes: layout.log().offset_bytes, ..good }),
        (inode.number, ByteRange { offset_bytes: layout.len_bytes(), ..good }),
        (inode.number, ByteRange { len_bytes: 0, ..good }),
        (layout.slots(), good),
    ] {
        let pages = [CommitPages { inode: number, target }];
        let refused = pool
            .capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |_| {})
            .map(drop);
        assert!(matches!(refused, Err(PoolError::Parameter { .. })), "{target:?}: {refused:?}");
    }
    for broken in [
        Inode { name: Vec::new(), ..inode.clone() },
        Inode { size_bytes: 1 << 40, ..inode.clone() },
        Inode { runs: Vec::new(), ..inode.clone() },
    ] {
        let put = |transaction: &mut Transaction<'_>| {
            transaction.put(broken.clone());
            Ok(())
        };
        assert!(pool.transact_unguarded(vec![], put).is_err(), "{broken:?}");
    }
    commit(&pool, &name(0), 3).unwrap();
    pool.checkpoint().unwrap();
    drop(pool);
    let pool = open(&media, &alone(None)).unwrap();
    assert_eq!(contents(&pool).unwrap()[&name(0)], [3]);
}

#[test]
fn failed_write_back_is_never_success_later() {
    for operation in [MediaOperation::WriteBack, MediaOperation::Flush] {
        let media = prepared(1, PersistenceDomain::PageCache);
        let pool = open(&media, &alone(None)).unwrap();
        commit(&pool, &name(0), 5).unwrap();
        media.fail(Fault::io_error(Trigger::on(operation)).forgetting());
        assert!(pool.checkpoint().is_err(), "{operation}");
        assert!(matches!(pool.checkpoint(), Err(PoolError::Failed { .. })), "{operation}");
        let recording = media.recording();
        drop(pool);
        // The log has whatever the failed write-back lost.
        let last = recording.crash_states(1, 500).last().unwrap();
        let media = Arc::new(CrashMedia::from_image(&last.image, recording.domain()).unwrap());
        let pool = open(&media, &alone(None)).unwrap();
        assert_eq!(contents(&pool).unwrap()[&name(0)], [5], "{operation}");
    }
}

/// Threads create, change and destroy; a reader without locks never sees a partial change.
#[test]
fn readers_see_whole_metadata_while_it_changes() {
    let media = Arc::new(CrashMedia::new(2 << 20, PersistenceDomain::Volatile).unwrap());
    let options = small(alone(None)).inodes(63).log_bytes(256 << 10);
    let pool = options.create_on(media.clone()).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3)
            .map(|thread| {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..60 {
                        let name = format!("{thread}-{}", round % 5).into_bytes();
                        match find(pool, &name).unwrap() {
                            Some(_) => crate::common::destroy(pool, &name).unwrap(),
                            None => create(pool, &name, 1 + round % 3).unwrap(),
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                assert_eq!(pool.info().unwrap().damaged_inodes, 0);
                let mut runs: Vec<_> =
                    pool.inodes().unwrap().iter().flat_map(|i| i.runs.clone()).collect();
                runs.sort_unstable();
                assert!(runs.windows(2).all(|pair| !pair[0].overlaps(pair[1])), "{runs:?}");
            }
        });
        let outcomes: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        is_done.store(true, Ordering::Relaxed);
        assert!(outcomes.iter().all(Result::is_ok));
    });
    let before = contents(&pool).unwrap();
    drop(pool);
    let pool = open(&media, &alone(None)).unwrap();
    assert_eq!(contents(&pool).unwrap(), before);
    // Nothing leaked: pages that no object names are free.
    let named: u64 = pool.inodes().unwrap().iter().map(|inode| inode.content_pages()).sum();
    let layout = pool.layout();
    let info = pool.info().unwrap();
    let data_pages = layout.page_count - layout.data_start_page - info.saved.pages;
    assert_eq!(info.free_pages + named, data_pages);
}
