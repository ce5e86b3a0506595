//! Several processes and one pool: killed at random moments, and what the others and later ones
//! see.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::sync::Arc;

use crate::common::{Scene, contents, create, find, page, place};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_pool::media::ByteRange;
use aquifer_pool::{CommitContent, CommitPages, LockMode, Pool, PoolError};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child::{self, Reaped};
use aquifer_testkit::rng::Rng;

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("writer", writer), ("holder", holder), ("churner", churner), ("sharer", sharer)];

fn environment(name: &str) -> String {
    std::env::var(name).expect("set by the parent")
}

fn said(text: &str) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{text}").unwrap();
    output.flush().unwrap();
}

fn pool_of_parent() -> Pool {
    Pool::open(environment("POOL")).unwrap()
}

/// Commits 1, 2, 3, … to both pages of its object, and prints each number when it is acknowledged.
fn writer() {
    let pool = pool_of_parent();
    let name = environment("OBJECT").into_bytes();
    let inode = find(&pool, &name).unwrap().expect("made by the parent");
    let _lock = pool.lock_inode(inode.number, LockMode::Exclusive).unwrap();
    let pages = [0, 1].map(|page| CommitPages { inode: inode.number, target: place(&inode, page) });
    for number in environment("FROM").parse::<u64>().unwrap().. {
        pool.capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |payload| {
            payload.chunks_exact_mut(4096).for_each(|chunk| chunk.copy_from_slice(&page(number)));
        })
        .unwrap()
        .finish()
        .unwrap();
        said(&format!("acknowledged {number}"));
    }
}

/// Increments both pages of the object in a commit, and releases the lock each time.
fn sharer() {
    let pool = pool_of_parent();
    let inode = find(&pool, b"object-0").unwrap().expect("made by the parent");
    let pages = [0, 1].map(|page| CommitPages { inode: inode.number, target: place(&inode, page) });
    loop {
        let Ok(lock) = pool.lock_inode(inode.number, LockMode::Exclusive) else { continue };
        let number = stamp_of_object(&pool) + 1;
        pool.capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |payload| {
            payload.chunks_exact_mut(4096).for_each(|chunk| chunk.copy_from_slice(&page(number)));
        })
        .unwrap()
        .finish()
        .unwrap();
        drop(lock);
        said(&format!("acknowledged {number}"));
    }
}

/// The stamp of both pages of the object, which this handle has locked.
fn stamp_of_object(pool: &Pool) -> u64 {
    let inode = find(pool, b"object-0").unwrap().unwrap();
    let (first, last) = (place(&inode, 0), place(&inode, 1));
    let whole = ByteRange { len_bytes: 2 * first.len_bytes, ..first };
    let patches = pool.bring_up_to_date(whole).unwrap();
    let stamps = [first, last].map(|range| {
        let mut bytes = vec![0; 4096];
        match patches.iter().find(|(offset, _)| *offset == range.offset_bytes) {
            Some((_, patch)) => bytes.copy_from_slice(patch),
            None => pool.media().read_at(range.offset_bytes, &mut bytes).unwrap(),
        }
        let stamp = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(bytes == page(stamp), "a page holds two commits' bytes");
        stamp
    });
    assert_eq!(stamps[0], stamps[1], "the object is torn");
    stamps[0]
}

/// Creates and destroys its own objects, and prints what it has after each change.
fn churner() {
    let pool = pool_of_parent();
    let own = environment("OBJECT");
    let mut rng = Rng::new(environment("FROM").parse().unwrap());
    for inode in pool.inodes().unwrap() {
        if inode.name.starts_with(own.as_bytes()) {
            crate::common::destroy(&pool, &inode.name).unwrap();
        }
    }
    said("acknowledged 0");
    for number in 1u64.. {
        let name = format!("{own}-{}", rng.below(4)).into_bytes();
        match find(&pool, &name).unwrap() {
            Some(_) => crate::common::destroy(&pool, &name).unwrap(),
            None => create(&pool, &name, 1 + rng.below(3)).unwrap(),
        }
        said(&format!("acknowledged {number}"));
    }
}

/// Holds an object's lock until it is killed.
fn holder() {
    let pool = pool_of_parent();
    let inode = find(&pool, environment("OBJECT").as_bytes()).unwrap().unwrap();
    let _lock = pool.lock_inode(inode.number, LockMode::Exclusive).unwrap();
    said("holding");
    loop {
        std::thread::park();
    }
}

fn spawn(role: &str, pool: &Path, object: &str, from: u64) -> Reaped {
    let mut command = child::command(role);
    command.env("POOL", pool).env("OBJECT", object).env("FROM", from.to_string());
    Reaped(command.spawn().unwrap())
}

/// Waits until a child has printed a line with this start.
fn hear(child: &mut Reaped, start: &str) -> String {
    let mut output = BufReader::with_capacity(1, child.0.stdout.as_mut().unwrap());
    let mut line = String::new();
    while !line.starts_with(start) {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "the child ended early");
    }
    line
}

fn last_acknowledged(said: &[u8]) -> Option<u64> {
    let text = String::from_utf8_lossy(said);
    // The death may have cut off the last line.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(|line| line.strip_prefix("acknowledged ")?.parse().ok()).next_back()
}

fn scene() -> Scene {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    let options = Pool::options().inodes(31).log_bytes(128 << 10);
    let pool = options.create(&scene.path, 1 << 20).unwrap();
    for index in 0..3 {
        create(&pool, format!("object-{index}").as_bytes(), 2).unwrap();
    }
    scene
}

/// Writers and a churner are killed repeatedly; sometimes one process survives, so that the pool
/// stays open, and sometimes all die, so that it is recovered.
#[test]
fn killed_processes_leave_the_last_acknowledged_state_or_the_next() {
    let scene = scene();
    // Without zeroing: pages that are being zeroed are not free.
    let options = Pool::options().zero_bytes_per_second(0);
    let mut rng = Rng::new(seed(11));
    let mut known: BTreeMap<String, u64> = BTreeMap::new();
    let mut kills = 0;
    for round in 0..steps(25) {
        let staying = rng.chance(0.5).then(|| options.open(&scene.path).unwrap());
        let mut children: Vec<(String, Reaped)> = (0..2)
            .map(|index| format!("object-{index}"))
            .map(|object| {
                let from = known.get(&object).copied().unwrap_or(0) + 1;
                let child = spawn("writer", &scene.path, &object, from);
                (object, child)
            })
            .collect();
        children.push(("churn".to_owned(), spawn("churner", &scene.path, "churn", rng.next_u64())));
        // All of them work before the first is killed, at a random moment.
        children.iter_mut().for_each(|(_, child)| drop(hear(child, "acknowledged")));
        for _ in 0..rng.below(2000) {
            std::thread::yield_now();
        }
        let mut acknowledged = BTreeMap::new();
        for (object, child) in children {
            let said = child.kill();
            kills += 1;
            if object != "churn" {
                let heard =
                    last_acknowledged(&said).or(known.get(&object).map(|n| n + 1)).unwrap_or(1);
                acknowledged.insert(object, heard);
            }
        }
        let pool = match staying {
            Some(pool) => pool,
            None => options.open(&scene.path).unwrap(),
        };
        let found = contents(&pool).unwrap_or_else(|error| panic!("round {round}: {error}"));
        for (object, heard) in acknowledged {
            let stamps = &found[object.as_bytes()];
            assert!(stamps[0] == stamps[1], "round {round}: {object} is torn: {stamps:?}");
            let allowed = heard..=heard + 1;
            assert!(
                allowed.contains(&stamps[0]),
                "round {round}: {object} {stamps:?}, {allowed:?}"
            );
            known.insert(object, stamps[0]);
        }
        // Each page belongs to one object at most, and none is lost.
        let layout = pool.layout();
        let named: u64 = pool.inodes().unwrap().iter().map(|inode| inode.content_pages()).sum();
        pool.checkpoint().unwrap();
        let info = pool.info().unwrap();
        let data_pages = layout.page_count - layout.data_start_page - info.saved.pages;
        assert_eq!(info.free_pages + named, data_pages, "round {round}");
    }
    println!("{kills} processes killed");
}

/// Readers follow writers that die and are replaced: they see whole states, and never an older one
/// than before. In between, readers alone keep the pool open.
#[test]
fn a_reader_follows_writers_that_die() {
    let scene = scene();
    let mut rng = Rng::new(seed(12));
    let mut first = Some(spawn("churner", &scene.path, "churn", 1));
    hear(first.as_mut().unwrap(), "acknowledged");
    let reading = Pool::options().read_only(true);
    let reader = reading.open(&scene.path).unwrap();
    let number = find(&reader, b"object-0").unwrap().unwrap().number;
    let (mut seen, mut looks) = (0, 0);
    for round in 0..steps(12) as u64 {
        let mut children = vec![
            spawn("sharer", &scene.path, "", 0),
            spawn("sharer", &scene.path, "", 0),
            spawn("churner", &scene.path, "other", round),
        ];
        children.iter_mut().for_each(|child| drop(hear(child, "acknowledged")));
        drop(first.take());
        for _ in 0..rng.below(300) {
            let Ok(_lock) = reader.lock_inode(number, LockMode::Shared) else { continue };
            let stamp = stamp_of_object(&reader);
            assert!(stamp >= seen, "round {round}: {stamp} after {seen}");
            seen = stamp;
            looks += 1;
        }
        drop(children.pop());
        let last = children.into_iter().filter_map(|child| last_acknowledged(&child.kill())).max();
        let Ok(_lock) = reader.lock_inode(number, LockMode::Shared) else {
            panic!("round {round}: all who had it locked are dead");
        };
        let stamp = stamp_of_object(&reader);
        let acknowledged = last.unwrap_or(0).max(seen);
        assert!(stamp >= acknowledged, "round {round}: {stamp}, acknowledged were {acknowledged}");
        seen = stamp;
    }
    println!("{looks} looks, up to {seen}");
}

#[test]
fn a_dead_owner_does_not_block() {
    let scene = scene();
    let pool = Pool::open(&scene.path).unwrap();
    let number = find(&pool, b"object-0").unwrap().unwrap().number;
    let mut child = spawn("holder", &scene.path, "object-0", 0);
    hear(&mut child, "holding");
    let pid = child.0.id();
    match pool.lock_inode(number, LockMode::Shared) {
        Err(PoolError::Locked { holder, .. }) => assert_eq!(holder, Some(pid)),
        other => panic!("{other:?}"),
    }
    child.kill();
    pool.lock_inode(number, LockMode::Exclusive).unwrap();
}

#[test]
fn an_exclusive_opener_keeps_others_out_and_the_other_way_round() {
    let scene = scene();
    let hasty = Pool::options().stall_timeout(std::time::Duration::from_millis(50));
    let exclusive = hasty.clone().exclusive(true);
    let pool = exclusive.open(&scene.path).unwrap();
    assert!(matches!(exclusive.open(&scene.path), Err(PoolError::Busy { .. })));
    assert!(matches!(hasty.open(&scene.path), Err(PoolError::Busy { .. })));
    drop(pool);
    let _shared = Pool::open(&scene.path).unwrap();
    assert!(matches!(exclusive.open(&scene.path), Err(PoolError::Busy { .. })));
}

/// Shared memory that cannot be reached (another container's) gives a specific error, and the pool
/// is left alone.
#[test]
fn a_pool_whose_shared_memory_is_elsewhere_is_refused() {
    let scene = scene();
    let pool = Pool::open(&scene.path).unwrap();
    let before = std::fs::read(&scene.path).unwrap();
    let segment = uuid_of_segment(&before);
    let name = format!("aquifer-{segment}");
    aquifer_sys_unlink(&name);
    assert!(matches!(Pool::open(&scene.path), Err(PoolError::BusyElsewhere { .. })));
    // A process that has it open keeps working.
    create(&pool, b"more", 1).unwrap();
}

/// A process may die while it creates shared memory. Even incomplete, the memory names its pool,
/// and the next process removes it; that of another pool is left.
#[test]
fn shared_memory_that_was_never_complete_is_removed() {
    let scene = scene();
    let pool = Pool::open(&scene.path).unwrap();
    let own = uuid_of_segment(&std::fs::read(&scene.path).unwrap());
    drop(pool);
    let place = |first: &str| {
        Path::new("/dev/shm").join(format!("aquifer-{first}{:016x}", seed(1) ^ 0x5eed))
    };
    let half_made = place(&own[..16]);
    let flipped: String =
        own[..16].chars().map(|digit| if digit == '0' { '1' } else { '0' }).collect();
    let of_another = place(&flipped);
    for path in [&half_made, &of_another] {
        std::fs::write(path, b"").unwrap();
    }
    let opened = Pool::open(&scene.path).map(drop);
    let are_left = (half_made.exists(), of_another.exists());
    std::fs::remove_file(&of_another).unwrap();
    let _ = std::fs::remove_file(&half_made);
    opened.unwrap();
    assert_eq!(are_left, (false, true));
}

fn uuid_of_segment(pool: &[u8]) -> String {
    pool[96..112].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn aquifer_sys_unlink(name: &str) {
    std::fs::remove_file(Path::new("/dev/shm").join(name)).unwrap();
}

/// A reader of a pool with writers sees what is committed, although it cannot write it to its place
/// on media.
#[test]
fn a_reader_sees_commits_that_are_not_at_their_place_yet() {
    let scene = scene();
    let options = Pool::options().background(false);
    let pool = options.open(&scene.path).unwrap();
    let inode = find(&pool, b"object-0").unwrap().unwrap();
    let pages = [CommitPages { inode: inode.number, target: place(&inode, 1) }];
    pool.capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |payload| {
        payload.copy_from_slice(&page(77))
    })
    .unwrap()
    .finish()
    .unwrap();
    let reading = Pool::options().read_only(true);
    let reader = reading.open(&scene.path).unwrap();
    assert_eq!(contents(&reader).unwrap()[b"object-0".as_slice()], [0, 77]);
    assert!(matches!(reader.checkpoint(), Err(PoolError::ReadOnly { .. })));
    drop(reader);

    // All writers die; the log is not replayed. A lone reader sees the same, and changes nothing.
    let copy = scene.path.with_extension("copy");
    std::fs::copy(&scene.path, &copy).unwrap();
    let before = std::fs::read(&copy).unwrap();
    let alone = reading.open(&copy).unwrap();
    assert_eq!(contents(&alone).unwrap()[b"object-0".as_slice()], [0, 77]);
    drop(alone);
    assert!(std::fs::read(&copy).unwrap() == before, "a reader wrote");
    drop(pool);
}

/// A forked child cannot use the pool, and does not keep its parent's locks.
#[test]
fn a_fork_shares_nothing() {
    let scene = scene();
    let pool = Arc::new(Pool::open(&scene.path).unwrap());
    let inode = find(&pool, b"object-0").unwrap().unwrap();
    let data = pool.layout().data().offset_bytes;
    let lock = pool.lock_inode(inode.number, LockMode::Exclusive).unwrap();
    let (mut reading, writing) = std::io::pipe().unwrap();
    // SAFETY: the child only calls what is tested, and ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(pool.checkpoint(), Err(PoolError::Forked))
            && matches!(pool.store_unguarded(data, &[1]), Err(PoolError::Forked));
        drop(lock);
        drop(pool);
        drop(reading);
        let mut writing = writing;
        let _ = writing.write_all(if refused { b"yes" } else { b"no " });
        loop {
            // SAFETY: only blocks until a signal ends the child.
            unsafe { libc::pause() };
        }
    }
    drop(writing);
    let mut answer = [0; 3];
    std::io::Read::read_exact(&mut reading, &mut answer).unwrap();
    // The parent's lock is still held ...
    let other = Pool::open(&scene.path).unwrap();
    let still_held = other.lock_inode(inode.number, LockMode::Shared).is_err();
    // ... and released with the parent's handle, though the child lives.
    drop(lock);
    let free_again = other.lock_inode(inode.number, LockMode::Exclusive).is_ok();
    drop(pool);
    drop(other);
    let exclusive = Pool::options().exclusive(true);
    let alone = exclusive.open(&scene.path).map(drop);
    // SAFETY: our child, not waited for yet.
    unsafe { libc::kill(child, libc::SIGKILL) };
    let mut status = 0;
    // SAFETY: our child; `status` outlives the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(&answer, b"yes");
    assert!(still_held, "the child gave up its parent's lock");
    assert!(free_again);
    alone.unwrap();
}
