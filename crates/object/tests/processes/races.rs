//! Several processes create, modify and destroy the same few objects, and are killed while doing
//! so. Every call returns an object with the content of one psync, or an error that reflects
//! another process's action.

use crate::actor::{Actor, say, told};
use crate::support::{PAGE, Place, load_all, store};
use aquifer_check::CheckOptions;
use aquifer_object::{CreateObject, ObjectError, Objects};
use aquifer_pool::PoolError;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

const NAMES: [&str; 3] = ["a", "b", "c"];
const MOST_PAGES: u64 = 9;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("meddler", meddler)];

/// Every psync stores one number to all pages; pages added since then are zero.
fn check(name: &str, numbers: &[u64]) {
    let stored = numbers.iter().take_while(|number| **number != 0).count();
    let (stored, fresh) = numbers.split_at(stored);
    assert!(stored.iter().all(|number| *number == stored[0]), "{name}: {numbers:?}");
    assert!(fresh.iter().all(|number| *number == 0), "{name}: {numbers:?}");
}

fn meddle(objects: &Objects, rng: &mut Rng) -> Result<(), ObjectError> {
    let mut some_name = || NAMES[rng.below(3) as usize];
    let (name, other) = (some_name(), some_name());
    let size = (1 + rng.below(MOST_PAGES)) * PAGE as u64;
    let options = CreateObject::new().relocatable(rng.chance(0.5));
    match rng.below(12) {
        0..=2 => options.create(objects, name, size).map(drop),
        3 => objects.destroy(name),
        4 => objects.rename(name, other),
        5..=6 => objects.resize(name, size).map(drop),
        7 => objects.relocate(name, None).map(drop),
        8 => {
            let info = objects.info(name)?;
            assert!(info.name == name && info.size_bytes <= MOST_PAGES * PAGE as u64, "{info:?}");
            Ok(())
        }
        9 => {
            let attached = objects.attach(name)?;
            check(name, &load_all(&attached));
            attached.detach()
        }
        _ => {
            let mut attached = objects.attach_mut(name)?;
            check(name, &load_all(&attached));
            let number = rng.next_u64() | 1;
            for page in 0..attached.len_bytes() as usize / PAGE {
                store(&mut attached, page, number);
            }
            if rng.chance(0.7) {
                attached.psync()?
            } else {
                drop(attached.psync_begin()?)
            }
            attached.detach()
        }
    }
}

fn meddler() {
    let objects = Objects::open(told("POOL")).unwrap();
    let mut rng = Rng::new(told("SEED").parse().unwrap());
    say("meddling");
    for _ in 0..told("TURNS").parse().unwrap() {
        match meddle(&objects, &mut rng) {
            Ok(())
            | Err(
                ObjectError::NotFound { .. }
                | ObjectError::Destroyed { .. }
                | ObjectError::Exists { .. }
                | ObjectError::Attached { .. }
                | ObjectError::NotRelocatable { .. }
                // The process that holds the pool's lock is not scheduled.
                | ObjectError::Pool(PoolError::Stalled { .. }),
            ) => {}
            Err(other) => panic!("{other}"),
        }
    }
    say("done");
}

#[test]
fn processes_that_meddle_with_the_same_objects() {
    let place = Place::new();
    drop(place.create(4 << 20, 64 << 10));
    let mut rng = Rng::new(seed(31));
    for round in 0..steps(5) {
        let turns = steps(100).to_string();
        let mut meddlers: Vec<Actor> = (0..3)
            .map(|_| {
                let told = [("SEED", &*rng.next_u64().to_string()), ("TURNS", &*turns)];
                Actor::start("meddler", &place.path(), &told)
            })
            .collect();
        meddlers.iter_mut().for_each(|meddler| meddler.until("meddling"));
        let killed = meddlers.pop().expect("three");
        for _ in 0..rng.below(2000) {
            std::thread::yield_now();
        }
        killed.kill();
        for mut meddler in meddlers {
            meddler.until("done");
            meddler.finish();
        }
        let objects = place.open();
        for info in objects.list().unwrap() {
            assert!(info.holders.is_empty(), "round {round}: {info:?}");
            let attached = objects.attach_mut(&info.name).unwrap();
            check(&info.name.to_string(), &load_all(&attached));
        }
    }
    let report = aquifer_check::check(&place.path(), &CheckOptions::default()).unwrap();
    assert!(report.findings.is_empty(), "{report:?}");
}
