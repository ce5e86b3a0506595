//! Pins that one process lends to another, and that outlive that one.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};

use crate::common::Scene;
use aquifer_pool::{InodeUse, LentPins, Pool, PoolError, PoolOptions};
use aquifer_sys::clock;
use aquifer_testkit::child::{self, Reaped};

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("keeper", keep), ("server", serve), ("loser", lose)];

fn scene() -> Scene {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    drop(crate::common::small(options()).create(&scene.path, 2 << 20).unwrap());
    scene
}

fn options() -> PoolOptions {
    Pool::options().background(false)
}

fn pool_of_parent() -> Pool {
    options().open(std::env::var_os("POOL").expect("set by the parent")).unwrap()
}

fn wait_for_death() -> ! {
    loop {
        std::thread::park();
    }
}

fn keep() {
    let pool = pool_of_parent();
    let lent = pool.lend_pins(1).unwrap();
    println!("lent {} {}", lent.nonce, lent.blocks[0]);
    wait_for_death()
}

fn serve() {
    let pool = pool_of_parent();
    let [nonce, block] = ["NONCE", "BLOCK"].map(|name| std::env::var(name).unwrap());
    let blocks = vec![block.parse().unwrap()];
    let pins = pool.borrow_pins(&LentPins { nonce: nonce.parse().unwrap(), blocks }).unwrap();
    pins.set(3).unwrap();
    let own = pool.pin_inode(5, InodeUse::Open).unwrap();
    println!("set {}", pins.set(4).unwrap().0);
    std::mem::forget(own);
    wait_for_death()
}

/// Loses its locks while it has the pool open.
fn lose() {
    let keeper = options().open(std::env::var_os("POOL").unwrap()).unwrap();
    let pool = options().open(std::env::var_os("POOL").unwrap()).unwrap();
    let lent = keeper.lend_pins(1).unwrap();
    let pins = pool.borrow_pins(&lent).unwrap();
    let place = pins.set(3).unwrap();
    // SAFETY: no code of this process goes on with a descriptor other than the pool, which notices.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    let now = clock::coarse_ns();
    while clock::coarse_ns() == now {
        std::thread::yield_now();
    }
    for error in [
        pool.lend_pins(1).unwrap_err(),
        pool.borrow_pins(&lent).unwrap_err(),
        pins.add(&lent).unwrap_err(),
        pins.set(4).unwrap_err(),
    ] {
        assert!(matches!(error, PoolError::LocksLost), "{error}");
    }
    pins.clear(place, 3);
    assert_eq!(pins.iter().count(), 0);
    println!("lost 1");
}

/// Starts a child, and returns the numbers that it reports.
fn start(role: &str, scene: &Scene, lent: Option<&LentPins>, word: &str) -> (Reaped, Vec<u64>) {
    let mut child = child::command(role);
    if let Some(LentPins { nonce, blocks }) = lent {
        child.env("NONCE", nonce.to_string()).env("BLOCK", blocks[0].to_string());
    }
    let mut child = Reaped(child.env("POOL", &scene.path).spawn().unwrap());
    let mut said = BufReader::with_capacity(1, child.0.stdout.as_mut().unwrap()).lines();
    let numbers = said.find_map(|line| {
        let line = line.unwrap();
        Some(line.strip_prefix(word)?.split_whitespace().map(|one| one.parse().unwrap()).collect())
    });
    drop(said);
    (child, numbers.expect("numbers"))
}

fn start_keeper(scene: &Scene) -> (Reaped, LentPins) {
    let (keeper, numbers) = start("keeper", scene, None, "lent");
    (keeper, LentPins { nonce: numbers[0], blocks: vec![numbers[1] as u32] })
}

fn is_refused<T>(outcome: Result<T, PoolError>) -> bool {
    matches!(outcome, Err(PoolError::Parameter { .. }))
}

fn open_inodes(pool: &Pool) -> Vec<u64> {
    (1..10).filter(|&inode| pool.is_used(inode, InodeUse::Open).unwrap()).collect()
}

#[test]
fn lent_pins_outlive_the_server_that_sets_them() {
    let scene = scene();
    let keeper = options().passive(true).open(&scene.path).unwrap();
    let other = options().open(&scene.path).unwrap();
    let lent = keeper.lend_pins(2).unwrap();
    let (server, place) = start("server", &scene, Some(&lent), "set");
    assert_eq!(open_inodes(&other), [3, 4, 5]);
    server.kill();
    for pool in [&keeper, &other] {
        assert_eq!(open_inodes(pool), [3, 4], "what it had pinned itself is gone");
    }

    let next = options().open(&scene.path).unwrap();
    let first = LentPins { blocks: lent.blocks[..1].to_vec(), ..lent };
    let pins = next.borrow_pins(&first).unwrap();
    let found: Vec<_> = pins.iter().collect();
    assert_eq!(found.iter().map(|(_, inode)| *inode).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(u64::from(found[1].0.0), place[0]);
    assert_eq!(pins.free(), 512 - 2);
    // Of another inode, of another place: not removed.
    pins.clear(found[0].0, 4);
    pins.clear(aquifer_pool::PinPlace(u32::MAX), 4);
    pins.clear(found[1].0, 4);
    pins.clear(found[1].0, 4);
    assert_eq!((open_inodes(&keeper), pins.free()), (vec![3], 512 - 1));
    // More blocks of the same handle.
    pins.add(&lent).unwrap();
    assert_eq!(pins.free(), 1024 - 1);
    drop(pins);
    // A handle may go before its blocks are given back.
    drop(next);
    assert_eq!(open_inodes(&other), [3]);
    drop(keeper);
    assert_eq!(open_inodes(&other), [0; 0]);
}

#[test]
fn lent_pins_end_with_the_keeper() {
    let scene = scene();
    let other = options().open(&scene.path).unwrap();
    let (keeper, lent) = start_keeper(&scene);
    let server = options().open(&scene.path).unwrap();
    let pins = server.borrow_pins(&lent).unwrap();
    let place = pins.set(6).unwrap();
    assert_eq!(open_inodes(&other), [6]);
    keeper.kill();
    // Before any handle has claimed its block.
    assert!(is_refused(pins.set(7)));
    assert_eq!(open_inodes(&other), [0; 0]);
    assert!(is_refused(server.borrow_pins(&lent)) && is_refused(pins.add(&lent)));
    // Its block is another handle's now, whose pin of the same word stays.
    let theirs = other.lend_pins(3).unwrap();
    assert!(theirs.blocks.contains(&lent.blocks[0]));
    assert!(is_refused(server.borrow_pins(&lent)));
    let blocks = lent.blocks.clone();
    let again = server.borrow_pins(&LentPins { blocks, ..theirs }).unwrap();
    assert_eq!(again.set(7).unwrap(), place);
    assert!(is_refused(pins.set(6)) && is_refused(pins.add(&lent)));
    assert!(is_refused(pins.add(&theirs)));
    pins.clear(place, 6);
    pins.clear(place, 7);
    assert_eq!(open_inodes(&server), [7]);
}

#[test]
fn a_handle_that_has_lost_its_locks_lends_and_borrows_nothing() {
    let scene = scene();
    let other = options().open(&scene.path).unwrap();
    let _lost = start("loser", &scene, None, "lost");
    assert_eq!(open_inodes(&other), [0; 0]);
}

#[test]
fn only_lent_blocks_are_borrowed() {
    let scene = scene();
    let one = options().open(&scene.path).unwrap();
    let two = options().open(&scene.path).unwrap();
    let unlent = one.pin_inode(7, InodeUse::Open).unwrap();
    let [lent, others] = [&one, &two].map(|pool| pool.lend_pins(1).unwrap());
    let third = options().open(&scene.path).unwrap();
    let lent_as = |nonce, blocks: &[u32]| LentPins { nonce, blocks: blocks.to_vec() };
    let (own, other) = (lent.blocks[0], others.blocks[0]);
    assert!(third.borrow_pins(&lent_as(lent.nonce, &[own, own])).unwrap().free() == 512);
    for blocks in [&[own, other][..], &[other + 1], &[16384], &[u32::MAX]] {
        assert!(is_refused(third.borrow_pins(&lent_as(lent.nonce, blocks))), "{blocks:?}");
    }
    // Blocks of a living handle that it has not lent, or not with this nonce.
    for (block, nonce) in (0..8).flat_map(|block| [0, lent.nonce].map(|nonce| (block, nonce))) {
        let pins = third.borrow_pins(&lent_as(nonce, &[block]));
        assert_eq!(pins.is_ok(), (nonce, block) == (lent.nonce, own), "{block}: {pins:?}");
    }
    assert_eq!(open_inodes(&third), [7]);
    drop(unlent);
    // Its own: a server would not be told from its keeper.
    assert!(is_refused(one.borrow_pins(&lent)));
    let none = third.borrow_pins(&lent_as(0, &[])).unwrap();
    assert!(matches!(none.set(3), Err(PoolError::TooManyPins { .. })));
    let reader = options().read_only(true).open(&scene.path).unwrap();
    assert!(matches!(reader.lend_pins(1), Err(PoolError::ReadOnly { .. })));
    assert!(matches!(reader.borrow_pins(&lent), Err(PoolError::ReadOnly { .. })));
    // Blocks that are lent are not used by the handle that lends them.
    let pins: Vec<_> =
        (1..1000).map(|inode| one.pin_inode(inode, InodeUse::Open).unwrap()).collect();
    assert_eq!(third.borrow_pins(&lent).unwrap().iter().count(), 0);
    drop(pins);
}

#[test]
fn threads_set_and_remove_borrowed_pins() {
    let scene = scene();
    let keeper = options().passive(true).open(&scene.path).unwrap();
    let lent = keeper.lend_pins(2).unwrap();
    let server = options().open(&scene.path).unwrap();
    let pins = server.borrow_pins(&lent).unwrap();
    let set: BTreeSet<u32> = std::thread::scope(|scope| {
        let set = |from: u64| {
            let pins = &pins;
            move || -> Vec<u32> {
                let places = (from..from + 250).map(|inode| (pins.set(inode).unwrap(), inode));
                let places: Vec<_> = places.collect();
                for (place, inode) in &places[..50] {
                    pins.clear(*place, *inode);
                }
                places[50..].iter().map(|(place, _)| place.0).collect()
            }
        };
        let all = [1000, 2000, 3000, 4000].map(|from| scope.spawn(set(from)));
        all.into_iter().flat_map(|one| one.join().unwrap()).collect()
    });
    assert_eq!((set.len(), pins.free(), pins.iter().count()), (800, 224, 800));
    assert_eq!((0..224).filter(|_| pins.set(9).is_ok()).count(), 224);
    assert!(matches!(pins.set(9), Err(PoolError::TooManyPins { .. })));
}
