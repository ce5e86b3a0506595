//! Pages between two owners: pins keep them, in any process; zeroed pages are zero; no owner ever
//! sees bytes of another.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::support::*;
use aquifer_check::{CheckOptions, check as check_pool};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_crashkit::{CrashMedia, CrashState, Plan, Recording, Verdict, explore};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::format::run::Run;
use aquifer_pool::format::slot::Slot;
use aquifer_pool::media::{ByteRange, Media, MediaOperation, PersistenceDomain};
use aquifer_pool::{
    ChangeSlots, InodeUse, Mutant, Pool, PoolError, PoolOptions, ReadSlots, Transaction,
    end_thread_at,
};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child::{self, Reaped};
use aquifer_testkit::rng::Rng;

type Outcome<T> = aquifer_pool::Result<T>;

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("pinner", pinner), ("opener beside pins", opener), ("zeroer", zeroer)];

fn environment(name: &str) -> String {
    std::env::var(name).expect("set by the parent")
}

fn pool_of_parent() -> Pool {
    let options = shared().read_only(environment("READS") == "yes");
    options.open(environment("POOL")).unwrap()
}

fn say_and_stay(text: &str) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{text}").unwrap();
    output.flush().unwrap();
    loop {
        std::thread::park();
    }
}

/// Pins the pages of all files until it is killed; often enough to need more than one block.
fn pinner() {
    let pool = pool_of_parent();
    let files = files(&pool);
    let pins: Vec<_> = (0..700)
        .flat_map(|_| &files)
        .map(|file| {
            (pool.pin_current(file.number, file.generation, file.layout_version).unwrap()).unwrap()
        })
        .collect();
    say_and_stay(&format!("pinned {}", pins.len()));
}

/// Opens the first file.
fn opener() {
    let pool = pool_of_parent();
    let _open = pool.pin_inode(files(&pool)[0].number, InodeUse::Open).unwrap();
    say_and_stay("opened");
}

/// Zeroes free pages.
fn zeroer() {
    let pool = pool_of_parent();
    pool.zero_free_pages(1 << 20).unwrap();
    say_and_stay("zeroed");
}

fn spawn(role: &str, pool: &Path, reads: bool, said: &str) -> Reaped {
    let mut command = child::command(role);
    command.env("POOL", pool).env("READS", if reads { "yes" } else { "no" });
    let mut child = Reaped(command.spawn().unwrap());
    wait_for(&mut BufReader::new(child.0.stdout.as_mut().unwrap()), said);
    child
}

fn wait_for(output: &mut impl BufRead, said: &str) {
    let mut line = String::new();
    while !line.starts_with(said) {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "the child ended early");
    }
}

fn signal(child: &Reaped, number: i32) {
    // SAFETY: the process is our child and was not waited for, so its pid is not reused.
    assert_eq!(unsafe { libc::kill(child.0.id() as i32, number) }, 0);
}

fn wait_until_stopped(child: &Reaped) {
    let mut status = 0;
    // SAFETY: our child; `status` outlives the call.
    unsafe { libc::waitpid(child.0.id() as i32, &raw mut status, libc::WUNTRACED) };
    assert!(libc::WIFSTOPPED(status));
}

/// All files with pages.
fn files(pool: &Pool) -> Vec<FileInode> {
    let slots = pool.layout().slots();
    let files = pool.look(|image| {
        let file = |number| match Slot::decode(&image.slot(number).ok()?, number) {
            Ok(Slot::File(file)) if file.kind == FileKind::File => Some(*file),
            _ => None,
        };
        (1..slots).filter_map(file).collect()
    });
    files.unwrap()
}

fn file(pool: &Pool, number: u64) -> Option<FileInode> {
    files(pool).into_iter().find(|file| file.number == number)
}

fn put(transaction: &mut Transaction<'_>, file: &FileInode) {
    // Opening requires a correct count.
    let pages = file.runs.iter().map(|run| run.pages).sum();
    let counted = FileInode { pages, ..file.clone() };
    ChangeSlots::put(transaction, file.number, counted.encode().expect("few runs"));
}

/// Creates a file of this many pages, all filled with `stamp`, or zero for 0.
fn create(pool: &Pool, pages: u64, stamp: u64) -> Outcome<FileInode> {
    let reservation = pool.reserve_some(pages, None, stamp == 0)?;
    let runs = reservation.runs().to_vec();
    if stamp != 0 {
        let whole = reservation.whole();
        pool.store_unguarded(whole.bytes().offset_bytes, &filled(stamp, whole.pages))?;
    }
    pool.change_unguarded(vec![reservation], |transaction| {
        let number = transaction.take_slot()?;
        let generation = transaction.new_generation(number)?;
        let file = FileInode {
            runs: runs.clone(),
            // Without a name, as an open file can be. The seed records which stamp its pages may
            // hold besides zeros.
            seed: stamp,
            ..FileInode::new(FileKind::File, number, generation)
        };
        put(transaction, &file);
        Ok(file)
    })
}

/// Replaces the runs of a file.
fn set_runs(pool: &Pool, number: u64, runs: &[Run]) -> Outcome<()> {
    let before = file(pool, number).expect("it is there");
    pool.change_unguarded(vec![], |transaction| {
        let layout_version = before.layout_version + 1;
        put(transaction, &FileInode { runs: runs.to_vec(), layout_version, ..before.clone() });
        Ok(())
    })
}

fn remove(pool: &Pool, number: u64) -> Outcome<()> {
    pool.change_unguarded(vec![], |transaction| transaction.give_back(number))
}

/// Exchanges the runs of two files.
fn exchange(pool: &Pool, one: u64, other: u64) -> Outcome<()> {
    let [one, other] = [one, other].map(|number| file(pool, number).expect("it is there"));
    pool.change_unguarded(vec![], |transaction| {
        for (file, runs) in [(&one, &other.runs), (&other, &one.runs)] {
            let layout_version = file.layout_version + 1;
            put(transaction, &FileInode { runs: runs.clone(), layout_version, ..file.clone() });
        }
        Ok(())
    })
}

fn filled(stamp: u64, pages: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat((pages * PAGE_BYTES / 8) as usize)
}

fn words(pool: &Pool, run: Run) -> Vec<u64> {
    let mut bytes = vec![0; (run.pages * PAGE_BYTES) as usize];
    pool.load(run.bytes().offset_bytes, &mut bytes).unwrap();
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn is_zero(pool: &Pool, run: Run) -> bool {
    words(pool, run).iter().all(|word| *word == 0)
}

fn free_pages(pool: &Pool) -> u64 {
    pool.info().unwrap().free_pages
}

/// Takes all free pages, and returns whether any of them is in `run`.
fn can_be_had(pool: &Pool, run: Run) -> bool {
    let mut held = Vec::new();
    while let Ok(reservation) = pool.reserve_some(u64::MAX, None, false) {
        held.push(reservation);
    }
    held.iter().any(|reservation| reservation.whole().overlaps(run))
}

const POOL_BYTES: usize = 1 << 20;

fn pool_alone() -> Pool {
    small(alone()).create_on(FileMedia::of(&vec![0; POOL_BYTES])).unwrap()
}

fn pin<'a>(pool: &'a Pool, file: &FileInode) -> Option<aquifer_pool::Pin<'a>> {
    pool.pin_current(file.number, file.generation, file.layout_version).unwrap()
}

#[test]
fn pages_of_a_pinned_file_are_not_reused_while_others_are() {
    let pool = pool_alone();
    let free = free_pages(&pool);
    let [one, other] = [7, 8].map(|stamp| create(&pool, 10, stamp).unwrap());
    let pin = pin(&pool, &one).unwrap();
    set_runs(&pool, one.number, &[]).unwrap();
    remove(&pool, other.number).unwrap();
    assert_eq!(free_pages(&pool), free - 20, "the tail has not passed them");
    assert_eq!(pool.info().unwrap().freed_pages, 20);
    pool.checkpoint().unwrap();
    let info = pool.info().unwrap();
    assert_eq!((info.free_pages, info.freed_pages, info.held_pages), (free - 10, 0, 10));
    assert_eq!(info.pins, 1);
    assert!(can_be_had(&pool, other.runs[0]) && !can_be_had(&pool, one.runs[0]));
    assert!(words(&pool, one.runs[0]).iter().all(|word| *word == 7));
    // The pin also keeps pages of later versions that the file frees, but not pages of another
    // file.
    for round in 0..20 {
        let third = create(&pool, 50, 9).unwrap();
        remove(&pool, third.number).unwrap();
        pool.checkpoint().unwrap();
        assert_eq!(free_pages(&pool), free - 10, "{round}");
    }
    drop(pin);
    pool.checkpoint().unwrap();
    assert_eq!((free_pages(&pool), pool.info().unwrap().held_pages), (free, 0));
}

#[test]
fn a_pin_of_a_later_version_keeps_nothing_that_was_freed_before() {
    let pool = pool_alone();
    let free = free_pages(&pool);
    let made = create(&pool, 10, 7).unwrap();
    let shorter = [Run { pages: 4, ..made.runs[0] }];
    set_runs(&pool, made.number, &shorter).unwrap();
    assert!(pin(&pool, &made).is_none(), "the version is an old one");
    let now = file(&pool, made.number).unwrap();
    let pin = pin(&pool, &now).unwrap();
    pool.checkpoint().unwrap();
    assert_eq!(free_pages(&pool), free - 4);
    remove(&pool, made.number).unwrap();
    pool.checkpoint().unwrap();
    assert_eq!(free_pages(&pool), free - 4, "the inode is gone, the view is not");
    drop(pin);
    pool.checkpoint().unwrap();
    assert_eq!(free_pages(&pool), free);
}

/// The pages that a view sees move to another file, which frees them.
#[test]
fn a_pin_keeps_pages_that_another_file_frees() {
    let pool = pool_alone();
    let free = free_pages(&pool);
    let [one, other] = [7, 8].map(|stamp| create(&pool, 10, stamp).unwrap());
    let pin = pin(&pool, &one).unwrap();
    exchange(&pool, one.number, other.number).unwrap();
    pool.checkpoint().unwrap();
    remove(&pool, other.number).unwrap();
    pool.checkpoint().unwrap();
    assert_eq!(free_pages(&pool), free - 20);
    assert!(!can_be_had(&pool, one.runs[0]));
    // The pin does not cover the file's present pages, but nothing distinguishes them.
    remove(&pool, one.number).unwrap();
    drop(pin);
    pool.checkpoint().unwrap();
    assert_eq!(free_pages(&pool), free);
}

#[test]
fn what_was_exchanged_is_durable_before_it_is_stored_to() {
    let media = Arc::new(CrashMedia::new(512 << 10, PersistenceDomain::PageCache).unwrap());
    let pool = small(alone()).create_on(media).unwrap();
    let [one, other] = [7, 8].map(|stamp| create(&pool, 10, stamp).unwrap().number);
    let settle = |number| pool.lock_file(number).unwrap().settle().unwrap();
    let before = pool.durable_lsn();
    settle(one);
    assert_eq!(pool.durable_lsn(), before, "nothing was exchanged");
    let exchange_them = || {
        let lock = pool.lock_two_files(one, other).unwrap();
        lock.exchange(|| exchange(&pool, one, other)).unwrap();
    };
    exchange_them();
    exchange_them();
    assert_eq!(pool.durable_lsn(), before, "it is not stored to");
    settle(other + 1);
    assert_eq!(pool.durable_lsn(), before, "another file has nothing to do with it");
    settle(other);
    let durable = pool.durable_lsn();
    assert!(durable > before);
    create(&pool, 1, 9).unwrap();
    [one, other].into_iter().for_each(settle);
    assert_eq!(pool.durable_lsn(), durable, "later commits do not matter");
    // A thread that dies in the middle may have made it or not.
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let lock = pool.lock_two_files(one, other).unwrap();
        lock.exchange(|| {
            exchange(&pool, one, other).unwrap();
            std::panic::resume_unwind(Box::new(()));
        })
    }));
    assert!(died.is_err());
    settle(one);
    assert!(pool.durable_lsn() > durable);
}

/// Neither many frees under a pin nor many exchanges make the pool hang.
#[test]
fn pins_that_keep_too_much_are_an_error() {
    let directory = scratch();
    let path = directory.path().join("pool");
    // A sparse file: pages that are not written take no memory.
    std::fs::File::create(&path).unwrap().set_len(450 << 20).unwrap();
    let pool = alone().inodes(15).log_bytes(1 << 20).create_on(FileMedia::open(&path)).unwrap();
    let made = [7, 8].map(|stamp| create(&pool, 1, stamp).unwrap());
    let pins = made.each_ref().map(|file| pin(&pool, file).unwrap());
    // They alternate, so that no two freed pages form one run.
    let mut outcome = Ok(());
    while outcome.is_ok() {
        let reserved = pool.reserve(80, 1).unwrap();
        let first = reserved.whole().start_page;
        let turns = [0, 1].map(|turn| {
            let pages = (first + turn..first + 80).step_by(2);
            pages.map(|start_page| Run { start_page, pages: 1 }).collect::<Vec<_>>()
        });
        let before = made.each_ref().map(|made| file(&pool, made.number).unwrap());
        outcome = pool.change_unguarded(vec![reserved], |transaction| {
            for (file, runs) in before.iter().zip(&turns) {
                let layout_version = file.layout_version + 1;
                put(transaction, &FileInode { runs: runs.clone(), layout_version, ..file.clone() });
            }
            Ok(())
        });
    }
    let error = outcome.unwrap_err();
    assert!(
        matches!(error, PoolError::TooMuchPinned { held_runs } if held_runs >= 1 << 15),
        "{error}"
    );
    // Other changes continue, and all of it is free when the pins are dropped.
    pool.sync().unwrap();
    drop(pins);
    pool.checkpoint().unwrap();
    made.iter().for_each(|file| set_runs(&pool, file.number, &[]).unwrap());
    pool.checkpoint().unwrap();
    let info = pool.info().unwrap();
    assert_eq!((info.held_pages, info.freed_pages), (0, 0));
    let data_pages = info.layout.page_count - info.layout.data_start_page;
    assert_eq!(info.free_pages, data_pages - info.saved.pages);
}

#[test]
fn more_pins_than_there_is_room_for_are_an_error() {
    let pool = pool_alone();
    let mut pins = Vec::new();
    let error = loop {
        match pool.pin(3, pins.len() as u64) {
            Ok(pin) => pins.push(pin),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, PoolError::TooManyPins { limit } if limit == pins.len()), "{error}");
    assert_eq!(pool.info().unwrap().pins, pins.len() as u64);
    // The place of any of them can be reused.
    drop(pins.swap_remove(pins.len() / 3));
    pins.push(pool.pin(3, 0).unwrap());
    assert!(pool.pin(3, 0).is_err());
    pins.clear();
    assert_eq!(pool.info().unwrap().pins, 0);
    for inode in [0, 1 << 32] {
        assert!(matches!(pool.pin(inode, 1), Err(PoolError::Parameter { .. })));
    }
}

fn shared_pool(directory: &Path) -> Pool {
    let path = directory.join("pool");
    let size = POOL_BYTES as u64;
    let domain = PersistenceDomain::Volatile;
    small(shared().domain(domain)).create(&path, size).unwrap()
}

#[test]
fn a_killed_pinners_pins_vanish_and_a_stopped_ones_stay() {
    for reads in [false, true] {
        let directory = scratch();
        let pool = shared_pool(directory.path());
        let free = free_pages(&pool);
        let made = create(&pool, 10, 7).unwrap();
        let path = directory.path().join("pool");
        let pinner = spawn("pinner", &path, reads, "pinned 700");
        let second = spawn("pinner", &path, !reads, "pinned 700");
        // A reader has one lock for all its pins of one layout.
        assert_eq!(pool.info().unwrap().pins, 701);
        remove(&pool, made.number).unwrap();
        pool.checkpoint().unwrap();
        assert_eq!(free_pages(&pool), free - 10, "reads: {reads}");
        second.kill();
        pool.checkpoint().unwrap();
        assert_eq!(pool.info().unwrap().pins, if reads { 1 } else { 700 });
        assert_eq!(free_pages(&pool), free - 10, "reads: {reads}");
        signal(&pinner, libc::SIGSTOP);
        wait_until_stopped(&pinner);
        pool.checkpoint().unwrap();
        assert_eq!(free_pages(&pool), free - 10, "reads: {reads}");
        assert!(words(&pool, made.runs[0]).iter().all(|word| *word == 7));
        pinner.kill();
        pool.checkpoint().unwrap();
        assert_eq!((free_pages(&pool), pool.info().unwrap().pins), (free, 0), "reads: {reads}");
        // The blocks of dead processes are reused.
        let pins: Vec<_> = (0..1024).map(|_| pool.pin(5, 1).unwrap()).collect();
        assert_eq!(pool.info().unwrap().pins, pins.len() as u64);
    }
}

#[test]
fn a_file_is_open_as_long_as_a_process_that_opened_it_lives() {
    let directory = scratch();
    let pool = shared_pool(directory.path());
    let made = create(&pool, 1, 7).unwrap();
    assert!(!pool.is_used(made.number, InodeUse::Open).unwrap());
    let opener = spawn("opener beside pins", &directory.path().join("pool"), true, "opened");
    assert!(
        pool.is_used(made.number, InodeUse::Open).unwrap()
            && !pool.is_used(made.number + 1, InodeUse::Open).unwrap()
    );
    let own = pool.pin_inode(made.number, InodeUse::Open).unwrap();
    opener.kill();
    assert!(pool.is_used(made.number, InodeUse::Open).unwrap());
    drop(own);
    let _view = pin(&pool, &made).unwrap();
    assert!(
        !pool
            .change_unguarded(vec![], |transaction| Ok(
                transaction.is_used(made.number, InodeUse::Open)
            ))
            .unwrap()
    );
}

/// Handles of one process behave like processes, and an owned pin keeps its pool open.
#[test]
fn a_handle_that_is_closed_has_no_pins() {
    let directory = scratch();
    let pool = shared_pool(directory.path());
    let free = free_pages(&pool);
    let made = create(&pool, 10, 7).unwrap();
    let reading = shared().read_only(true);
    let reader = reading.open(directory.path().join("pool")).unwrap();
    let pin = reader.pin_owned(made.number, made.layout_version).unwrap();
    drop(reader);
    remove(&pool, made.number).unwrap();
    pool.checkpoint().unwrap();
    assert_eq!(free_pages(&pool), free - 10);
    drop(pin);
    pool.checkpoint().unwrap();
    assert_eq!(free_pages(&pool), free);
    let names = |start: &str| {
        let entries = std::fs::read_dir("/dev/shm").unwrap().flatten();
        entries.filter(|e| e.file_name().to_string_lossy().starts_with(start)).count()
    };
    let superblock = std::fs::read(directory.path().join("pool")).unwrap();
    let hex = superblock[96..112].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(names(&format!("aquifer-{hex}")), 2);
    drop(pool);
    assert_eq!(names(&format!("aquifer-{hex}")), 0, "the pins are removed with the segment");
}

/// A forked child has no pins, and removes none of its parent's.
#[test]
fn pins_are_inert_in_a_fork() {
    let directory = scratch();
    let pool = shared_pool(directory.path());
    let made = create(&pool, 10, 7).unwrap();
    let pin = pin(&pool, &made);
    // SAFETY: the child only calls what is tested, and ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(pool.pin(made.number, 1), Err(PoolError::Forked));
        drop(pin);
        // SAFETY: `_exit` ends the child without running destructors.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: our child; `status` outlives the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert_eq!(pool.info().unwrap().pins, 1);
    drop(pin);
    assert_eq!(pool.info().unwrap().pins, 0);
}

/// In a forked child other memory may lie where the parent has the mapping, so nothing is read.
#[test]
fn data_is_not_read_in_a_fork() {
    let directory = scratch();
    let pool = shared_pool(directory.path());
    let data = pool.layout().data();
    // SAFETY: the child only calls what is tested, and ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut bytes = [0; 8];
        let loaded = pool.load(data.offset_bytes, &mut bytes);
        let seen = pool.look_at(ByteRange { len_bytes: 8, ..data }, |bytes| bytes.len());
        let refused = matches!(loaded, Err(PoolError::Forked));
        let refused = refused && matches!(seen, Err(PoolError::Forked));
        // SAFETY: `_exit` ends the child without running destructors.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: our child; `status` outlives the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}

/// Readers read pages while other threads free them and fill them with something else.
#[test]
fn readers_never_see_the_next_owners_bytes() {
    let directory = scratch();
    let pool = shared_pool(directory.path());
    let numbers: Vec<u64> = (1..4).map(|stamp| create(&pool, 4, stamp).unwrap().number).collect();
    let has_ended = AtomicBool::new(false);
    let rounds = 30 * steps(20) as u64;
    let (looks, late) = std::thread::scope(|scope| {
        let readers = [0, 1].map(|_| {
            scope.spawn(|| {
                let (mut looks, mut late) = (0u64, 0u64);
                let handle = reading().open(directory.path().join("pool")).unwrap();
                while !has_ended.load(Relaxed) {
                    for file in files(&handle) {
                        let Some(_pin) = pin(&handle, &file) else {
                            late += 1;
                            continue;
                        };
                        let found = file.runs.iter().flat_map(|run| words(&handle, *run));
                        let foreign = { found }.find(|word| *word != file.seed);
                        assert_eq!(foreign, None, "in inode {}: {}", file.number, file.seed);
                        looks += 1;
                    }
                }
                (looks, late)
            })
        });
        for round in 0..rounds {
            // A new file in place of an old one: its pages, when they are free, have another stamp.
            let number = numbers[(round % 3) as usize];
            let stamp = 100 + round;
            let reservation = loop {
                match pool.reserve_some(4, None, false) {
                    // A reader with a pin is not running: its pin keeps what is freed after it.
                    Err(PoolError::Full { .. }) => {
                        std::thread::yield_now();
                        pool.checkpoint().unwrap();
                    }
                    reserved => break reserved.unwrap(),
                }
            };
            let whole = reservation.whole();
            pool.store_unguarded(whole.bytes().offset_bytes, &filled(stamp, whole.pages)).unwrap();
            let before = file(&pool, number).unwrap();
            pool.change_unguarded(vec![reservation], |transaction| {
                let layout_version = before.layout_version + 1;
                let runs = vec![whole];
                put(
                    transaction,
                    &FileInode { runs, layout_version, seed: stamp, ..before.clone() },
                );
                Ok(())
            })
            .unwrap();
            if round % 5 == 0 {
                pool.checkpoint().unwrap();
            }
        }
        has_ended.store(true, Relaxed);
        readers
            .map(|reader| reader.join().unwrap())
            .into_iter()
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    });
    println!("{looks} looks, {late} too late");
    assert!(looks > 0);
    pool.checkpoint().unwrap();
    assert_eq!(pool.info().unwrap().held_pages, 0);
}

#[test]
fn zeroed_pages_are_zero_and_cost_nothing_when_they_are_taken() {
    let pool = pool_alone();
    let data = free_pages(&pool);
    let made = create(&pool, data, 7).unwrap();
    assert_eq!((made.runs[0].pages, pool.zero_free_pages(u64::MAX).unwrap()), (data, 0));
    remove(&pool, made.number).unwrap();
    pool.checkpoint().unwrap();
    assert_eq!((free_pages(&pool), pool.info().unwrap().zeroed_pages), (data, 0));
    // Some, in pieces, then some more.
    assert_eq!(pool.zero_free_pages(40).unwrap(), 40);
    assert_eq!(pool.info().unwrap().zeroed_pages, 40);
    let zeroed = Run { start_page: made.runs[0].start_page, pages: 40 };
    assert!(is_zero(&pool, zeroed));
    assert!(!is_zero(&pool, Run { start_page: zeroed.end_page(), pages: 1 }));
    // A reservation that needs no zeros leaves zeroed pages to others that do.
    let others = pool.reserve_some(10, None, false).unwrap();
    assert!(!others.whole().overlaps(zeroed));
    let taken = pool.reserve_some(30, None, true).unwrap();
    assert_eq!((taken.whole().start_page, taken.whole().pages), (zeroed.start_page, 30));
    assert_eq!(pool.info().unwrap().zeroed_pages, 10);
    // If there are not enough, the rest is zeroed now.
    let more = pool.reserve_zeroed(50, 1).unwrap();
    assert!(is_zero(&pool, more.whole()));
    // Pages that were taken may have been written to.
    pool.store_unguarded(taken.whole().bytes().offset_bytes, &filled(9, 30)).unwrap();
    let whole = taken.whole();
    drop((taken, more, others));
    let all: Vec<_> = std::iter::from_fn(|| pool.reserve_some(64, None, true).ok()).collect();
    assert!(all.iter().any(|reservation| reservation.whole().overlaps(whole)));
    assert!(all.iter().all(|reservation| is_zero(&pool, reservation.whole())));
}

#[test]
fn a_thread_zeroes_what_was_freed() {
    let options = alone().background(true).zero_bytes_per_second(1 << 40);
    let pool = small(options).create_on(FileMedia::of(&vec![0; POOL_BYTES])).unwrap();
    let free = free_pages(&pool);
    let made = create(&pool, free, 7).unwrap();
    remove(&pool, made.number).unwrap();
    pool.checkpoint().unwrap();
    while pool.info().unwrap().zeroed_pages < free {
        std::thread::yield_now();
    }
    assert!(is_zero(&pool, made.runs[0]));
    // Zeroing takes no free page away.
    remove(&pool, create(&pool, free, 7).unwrap().number).unwrap();
    assert_eq!(pool.reserve(free, 1).unwrap().whole().pages, free);
}

#[test]
fn files_grow_in_place_and_long_runs_are_aligned() {
    let media = FileMedia::of(&vec![0; 16 << 20]);
    let pool = small(alone()).create_on(media).unwrap();
    let first = pool.reserve_some(3, None, false).unwrap();
    let other = pool.reserve_some(3, None, false).unwrap();
    assert!(!first.whole().overlaps(other.whole()));
    let end_page = other.whole().end_page();
    let behind = pool.reserve_some(2, Some(end_page), true).unwrap();
    assert_eq!(behind.whole(), Run { start_page: end_page, pages: 2 });
    let elsewhere = pool.reserve_some(2, Some(end_page), true).unwrap();
    assert_ne!(elsewhere.whole().start_page, end_page);
    let long = pool.reserve_some(1024, None, false).unwrap();
    assert_eq!((long.whole().start_page % 512, long.whole().pages), (0, 1024));
    // There are no pages beyond the end and before the data.
    for near_page in [0, 1, pool.layout().page_count, u64::MAX] {
        let found = pool.reserve_some(1, Some(near_page), false).unwrap();
        assert!(found.whole().start_page >= pool.layout().data_start_page);
    }
    assert!(matches!(pool.reserve_some(0, None, false), Err(PoolError::Parameter { .. })));
    let largest = pool.info().unwrap().largest_free_pages;
    let rest = pool.reserve_some(u64::MAX, None, false).unwrap();
    assert!(rest.whole().pages + 1024 > largest, "{:?} of {largest}", rest.whole());
}

/// Random changes of files, with and without power cuts between them: packed, so they become
/// durable in any order. The first fresh page is raised as in every pool of this size, at once to
/// its end, or several times.
fn record(seed: u64, domain: PersistenceDomain, mutant: Option<Mutant>) -> Outcome<Recording> {
    let options = alone().mutant(mutant).boot(1);
    let options = if seed.is_multiple_of(2) { options } else { options.fresh_step_pages(4) };
    let fresh = Arc::new(CrashMedia::new(512 << 10, domain).unwrap());
    drop(small(alone()).create_on(fresh.clone()).unwrap());
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), domain).unwrap());
    let mut rng = Rng::new(seed);
    let mut pool = options.open_on(media.clone()).unwrap();
    let mut next_stamp = 1 << 32;
    for _ in 0..60 {
        let files = files(&pool);
        let some =
            (!files.is_empty()).then(|| files[rng.below(files.len() as u64) as usize].clone());
        next_stamp += 1;
        match (rng.below(12), some) {
            (0..=3, _) if files.len() < 6 => {
                let stamp = if rng.chance(0.2) { 0 } else { next_stamp };
                let made = create(&pool, 1 + rng.below(12), stamp);
                assert!(made.is_ok() || matches!(made, Err(PoolError::Full { .. })), "{made:?}");
                if let Ok(made) = made
                    && stamp != 0
                    && rng.chance(0.5)
                {
                    // Stored to after it has a name, and perhaps never made durable.
                    let last = Run { start_page: made.runs[0].end_page() - 1, pages: 1 };
                    pool.store_unguarded(last.bytes().offset_bytes, &filled(stamp, 1)).unwrap();
                }
            }
            (4, Some(file)) => remove(&pool, file.number).unwrap(),
            (5, Some(file)) if !file.runs.is_empty() => {
                let pages = rng.below(file.runs[0].pages);
                let runs = [Run { pages, ..file.runs[0] }];
                set_runs(&pool, file.number, &runs[..usize::from(pages > 0)]).unwrap();
            }
            (6, _) => pool.sync().unwrap(),
            (7, _) => pool.checkpoint().unwrap(),
            (8, _) => drop(pool.zero_free_pages(20).unwrap()),
            (9, _) => {
                // Taken, written to, and given up.
                if let Ok(reservation) = pool.reserve_some(8, None, rng.chance(0.5)) {
                    let whole = reservation.whole();
                    pool.store_unguarded(
                        whole.bytes().offset_bytes,
                        &filled(next_stamp, whole.pages),
                    )
                    .unwrap();
                }
            }
            // Closed, which records what is still fresh; or killed.
            (10, _) => {
                drop(pool);
                pool = options.open_on(media.clone())?;
            }
            (11, _) if rng.chance(0.5) => {
                pool.die();
                pool = options.open_on(media.clone())?;
            }
            _ => {}
        }
    }
    let recording = media.recording();
    drop(pool);
    Ok(recording)
}

/// No file shows bytes of another one, and zeroed reservations are zero.
fn check(state: &CrashState<'_>, mutant: Option<Mutant>) -> Verdict {
    let media = Arc::new(state.media()?);
    // The machine was restarted.
    let options = alone().mutant(mutant).boot(2);
    let pool = options.open_on(media)?;
    let mut owners: BTreeMap<u64, u64> = BTreeMap::new();
    for file in files(&pool) {
        for run in &file.runs {
            if let Some(word) =
                words(&pool, *run).into_iter().find(|word| *word != 0 && *word != file.seed)
            {
                return Err(format!("inode {} ({:x}) has {word:x}", file.number, file.seed).into());
            }
            for page in run.start_page..run.end_page() {
                if let Some(other) = owners.insert(page, file.number) {
                    return Err(format!("page {page} is {}'s and {other}'s", file.number).into());
                }
            }
        }
    }
    let mut held = Vec::new();
    while let Ok(reservation) = pool.reserve_some(32, None, true) {
        if !is_zero(&pool, reservation.whole()) {
            return Err(format!("{:?} is to be zero", reservation.whole()).into());
        }
        held.push(reservation);
    }
    Ok(None)
}

fn explored(seed: u64, domain: PersistenceDomain, mutant: Option<Mutant>) -> Result<u64, String> {
    let recording = record(seed, domain, mutant).map_err(|error| error.to_string())?;
    let plan = Plan { depth: 0, budget: 600, seed };
    match explore(&recording, plan, |state| check(state, mutant)) {
        Ok(explored) => Ok(explored.states()),
        Err(failure) => Err(failure.to_string()),
    }
}

#[test]
fn no_crash_shows_bytes_of_another_file() {
    let first = seed(21);
    for domain in [PersistenceDomain::PageCache, PersistenceDomain::Dax] {
        let mut states = 0;
        for seed in first..first + steps(8) as u64 {
            match explored(seed, domain, None) {
                Ok(more) => states += more,
                Err(failure) => panic!("seed {seed}: {failure}"),
            }
        }
        println!("{states} crash states on {domain}");
    }
}

#[test]
fn deliberate_mistakes_show_bytes_of_another_file() {
    let mut missed = Vec::new();
    for mutant in
        [Mutant::EarlyReuse, Mutant::CommitBeforeData, Mutant::FreshUnsaid, Mutant::FreshAgain]
    {
        let domain = PersistenceDomain::PageCache;
        let caught = (0..20).find_map(|seed| explored(seed, domain, Some(mutant)).err());
        match caught {
            Some(reason) => println!("{mutant:?}: {}", reason.lines().next().unwrap_or("")),
            None => missed.push(mutant),
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}

/// A file is made on pages of an earlier one and removed again; the records of the two changes become
/// durable together, or, if a process died in between, one after the other.
fn removed_again(are_apart: bool, mutant: Option<Mutant>) -> (Recording, Run) {
    const PAGES: u64 = 8;
    let options = alone().mutant(mutant).boot(1);
    let fresh = Arc::new(CrashMedia::new(512 << 10, PersistenceDomain::PageCache).unwrap());
    let pool = small(alone()).create_on(fresh.clone()).unwrap();
    let first = create(&pool, PAGES, 1).unwrap();
    pool.sync().unwrap();
    remove(&pool, first.number).unwrap();
    drop(pool);
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), fresh.domain()).unwrap());
    let pool = options.open_on(media.clone()).unwrap();
    let second = create(&pool, PAGES, 2).unwrap();
    assert_eq!(second.runs, first.runs);
    if are_apart {
        assert!(end_thread_at("packed-closed", || pool.sync()).is_none());
    }
    remove(&pool, second.number).unwrap();
    pool.sync().unwrap();
    let recording = media.recording();
    drop(pool);
    (recording, second.runs[0])
}

/// Bytes that lose their name before it becomes durable need not be durable.
#[test]
fn bytes_of_removed_files_are_not_written_back() {
    let is_written_back = |are_apart| {
        let (recording, run) = removed_again(are_apart, None);
        let mut handed_over = (recording.operations().iter())
            .filter(|operation| operation.kind() == MediaOperation::WriteBack)
            .flat_map(|operation| operation.ranges());
        handed_over.any(|range| range.intersection(run.bytes()).len_bytes > 0)
    };
    assert!(!is_written_back(false));
    assert!(is_written_back(true), "the file has a name until the second record is durable");
}

#[test]
fn no_crash_shows_earlier_bytes_in_a_file_that_was_about_to_be_removed() {
    let explored = |are_apart, mutant| {
        let (recording, _) = removed_again(are_apart, mutant);
        let plan = Plan { depth: 0, budget: 600, seed: 1 };
        explore(&recording, plan, |state| check(state, mutant)).map(|explored| explored.states())
    };
    for are_apart in [false, true] {
        explored(are_apart, None).unwrap_or_else(|failure| panic!("{failure}"));
    }
    let caught = explored(true, Some(Mutant::FreedTooEarly));
    println!("{}", caught.expect_err("the file has earlier bytes").reason);
}

/// Closing a pool keeps which pages were never written to; the death of all processes costs that
/// for a step at most.
#[test]
fn fresh_pages_stay_fresh_when_the_pool_is_closed() {
    let all = POOL_BYTES as u64 / PAGE_BYTES;
    stay_fresh(alone(), all);
    stay_fresh(alone().fresh_step_pages(all / 32), all / 32);
}

fn stay_fresh(options: PoolOptions, step: u64) {
    const PAGES: u64 = 24;
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let mut pool = small(options.clone()).create_on(media.clone()).unwrap();
    let first = pool.info().unwrap().zeroed_pages;
    for pages in [1, PAGES] {
        let before = pool.info().unwrap().zeroed_pages;
        let made = create(&pool, pages, 7).unwrap();
        assert_eq!(made.runs.len(), 1);
        assert_eq!(pool.info().unwrap().zeroed_pages, before - pages);
        drop(pool);
        pool = options.open_on(media.clone()).unwrap();
        assert_eq!(pool.info().unwrap().zeroed_pages, before - pages);
    }
    // What was taken and given up may have been written to.
    let given_up = pool.reserve_some(5, None, false).unwrap();
    pool.store_unguarded(given_up.whole().bytes().offset_bytes, &filled(9, 5)).unwrap();
    drop(given_up);
    drop(pool);
    pool = options.open_on(media.clone()).unwrap();
    assert_eq!(pool.info().unwrap().zeroed_pages, first - 1 - PAGES - 5);
    // More than that, so that the head is raised again.
    create(&pool, 6, 7).unwrap();
    let before = pool.info().unwrap().zeroed_pages;
    pool.die();
    pool = options.open_on(media).unwrap();
    let zeroed_pages = pool.info().unwrap().zeroed_pages;
    assert!(
        (before.saturating_sub(step)..=before).contains(&zeroed_pages),
        "{zeroed_pages} of {before}"
    );
    let zeros = pool.reserve_some(zeroed_pages.max(1), None, true).unwrap();
    assert!(is_zero(&pool, zeros.whole()));
}

/// The last writer closes while a reader, in this process or another one, has the pool open. What it
/// changed is durable, the reader sees the same as before, and so does the next writer.
#[test]
fn a_writer_closes_under_a_reader() {
    for is_elsewhere in [false, true] {
        // On a disk, if temporary files are.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let options = shared().domain(PersistenceDomain::PageCache).fresh_step_pages(20);
        let pool = small(options.clone()).create(&path, POOL_BYTES as u64).unwrap();
        let made = create(&pool, 30, 7).unwrap();
        let reader = options.clone().read_only(true).open(&path).unwrap();
        let child = is_elsewhere.then(|| spawn("opener beside pins", &path, true, "opened"));
        let reader = (!is_elsewhere).then_some(reader);
        let more = create(&pool, 5, 8).unwrap();
        let before = pool.info().unwrap();
        let seen = |pool: &Pool| -> Vec<_> {
            files(pool).into_iter().map(|file| (file.seed, file.runs)).collect()
        };
        let expected = seen(&pool);
        drop(pool);

        // After a power cut, for an opener of what is on the disk.
        let copy = path.with_extension("copy");
        std::fs::copy(&path, &copy).unwrap();
        let after = alone().domain(PersistenceDomain::PageCache).boot(1).open(&copy).unwrap();
        assert_eq!(seen(&after), expected);
        assert_zeroed_pages_are_zero(&after, &[&made, &more]);
        drop(after);

        if let Some(reader) = &reader {
            assert_eq!(seen(reader), expected);
            assert!(words(reader, more.runs[0]).iter().all(|word| *word == 8));
        }
        let pool = options.open(&path).unwrap();
        let info = pool.info().unwrap();
        assert_eq!(info.recovered_records, 0);
        assert_eq!((info.zeroed_pages, info.free_pages), (before.zeroed_pages, before.free_pages));
        let last = create(&pool, 40, 9).unwrap();
        if let Some(reader) = &reader {
            assert!(words(reader, last.runs[0]).iter().all(|word| *word == 9));
        }
        let all = [&made, &more, &last];
        assert_zeroed_pages_are_zero(&pool, &all);
        drop(pool);
        drop((reader, child));
        // Now a writer is the first one.
        drop(options.open(&path).unwrap());
        let options_of_check = CheckOptions { fresh_pages: true, ..CheckOptions::default() };
        let report = check_pool(&path, &options_of_check).unwrap();
        assert!(report.is_sound(), "{report}");
        assert_zeroed_pages_are_zero(&options.open(&path).unwrap(), &all);
    }
}

/// Checks all pages that count as zero, and those of the files.
fn assert_zeroed_pages_are_zero(pool: &Pool, files: &[&FileInode]) {
    let mut held = Vec::new();
    let mut left_pages = pool.info().unwrap().zeroed_pages;
    let mut pages = left_pages;
    while pages > 0 {
        match pool.reserve_ready(pages).unwrap() {
            Some(ready) => {
                assert!(is_zero(pool, ready.whole()));
                left_pages -= ready.whole().pages;
                pages = left_pages.min(pages);
                held.push(ready);
            }
            None => pages /= 2,
        }
    }
    assert_eq!(left_pages, 0);
    for file in files {
        assert!(words(pool, file.runs[0]).iter().all(|word| *word == file.seed));
    }
}

/// Pages that were reserved for a change, but not named by it, are free again.
#[test]
fn what_is_reserved_and_not_named_is_given_back() {
    let pool = pool_alone();
    let made = create(&pool, 4, 7).unwrap();
    let free = free_pages(&pool);
    let named = |whole: Run| {
        let start_page = whole.start_page;
        [Run { start_page: start_page + 2, pages: 3 }, Run { start_page: start_page + 7, pages: 1 }]
    };
    let name = |transaction: &mut Transaction<'_>, runs: &[Run]| {
        let mut inode = made.clone();
        inode.runs.extend(runs);
        inode.layout_version += 1;
        put(transaction, &inode);
        Ok(())
    };
    for is_durable in [false, true] {
        let reservations =
            vec![pool.reserve_some(10, None, false).unwrap(), pool.reserve(5, 1).unwrap()];
        let runs = named(reservations[0].whole());
        assert_eq!(free_pages(&pool), free - 15);
        if is_durable {
            pool.transact_unguarded(reservations, |transaction| name(transaction, &runs)).unwrap()
        } else {
            pool.change_unguarded(reservations, |transaction| name(transaction, &runs)).unwrap()
        }
        assert_eq!(free_pages(&pool), free - 4, "durable: {is_durable}");
        assert!(!can_be_had(&pool, runs[0]) && !can_be_had(&pool, runs[1]));
        let between = Run { start_page: runs[0].end_page(), pages: 2 };
        assert!(can_be_had(&pool, between));
        set_runs(&pool, made.number, &made.runs).unwrap();
        pool.checkpoint().unwrap();
        assert_eq!(free_pages(&pool), free);
    }
}

/// Pages that are being zeroed have no owner.
#[test]
fn pages_count_as_free_while_they_are_zeroed() {
    let directory = scratch();
    let pool = shared_pool(directory.path());
    let free = free_pages(&pool);
    let made = create(&pool, 40, 7).unwrap();
    remove(&pool, made.number).unwrap();
    pool.checkpoint().unwrap();
    let mut command = child::command("zeroer");
    command.env("POOL", directory.path().join("pool")).env("READS", "no");
    command.env("AQUIFER_HOLD_AT", "zero-written").stdin(std::process::Stdio::piped());
    let mut child = Reaped(command.spawn().unwrap());
    let mut output = BufReader::new(child.0.stdout.take().unwrap());
    wait_for(&mut output, "held");
    let room = pool.room().unwrap();
    assert_eq!((room.free_pages, pool.info().unwrap().free_pages), (free, free));
    assert!(!can_be_had(&pool, made.runs[0]), "they are just being written to");
    // It continues, and is not held any more.
    drop(child.0.stdin.take());
    wait_for(&mut output, "zeroed");
    assert_eq!(pool.room().unwrap().free_pages, free);
    assert!(can_be_had(&pool, made.runs[0]));
    // If one dies during zeroing, its pages are not lost.
    let mut command = child::command("zeroer");
    command.env("POOL", directory.path().join("pool")).env("READS", "no");
    command.env("AQUIFER_DIE_AT", "zero-written");
    let other = create(&pool, 40, 7).unwrap();
    remove(&pool, other.number).unwrap();
    pool.checkpoint().unwrap();
    assert!(!Reaped(command.spawn().unwrap()).0.wait().unwrap().success());
    assert_eq!(pool.room().unwrap().free_pages, free);
    pool.checkpoint().unwrap();
    let room = pool.room().unwrap();
    let info = pool.info().unwrap();
    assert_eq!((room.free_pages, room.free_slots), (free, info.free_slots));
}
