//! Enlarging, shrinking and moving objects.

use crate::support::{PAGE, Place, load_all, on_media, reopen, store};
use aquifer_crashkit::{Fault, Trigger};
use aquifer_object::{CreateObject, ObjectError, Objects};
use aquifer_pool::PoolError;
use aquifer_pool::media::MediaOperation;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use aquifer_vm::fixed::WINDOW;

fn size(pages: usize) -> u64 {
    (pages * PAGE) as u64
}

fn movable() -> CreateObject<'static> {
    CreateObject::new().relocatable(true)
}

fn fill(objects: &Objects, name: &str, from: usize, value: u64) {
    let mut object = objects.attach_mut(name).unwrap();
    for page in from..object.len_bytes() as usize / PAGE {
        store(&mut object, page, value + page as u64);
    }
    object.psync().unwrap();
}

fn content(objects: &Objects, name: &str) -> Vec<u64> {
    load_all(&objects.attach(name).unwrap())
}

#[test]
fn content_stays_and_what_is_new_is_zero() {
    let (media, objects) = on_media(16 << 20, 256 << 10);
    let made = objects.create("object", size(10)).unwrap();
    fill(&objects, "object", 0, 100);
    let expected = |pages: usize, filled: usize| -> Vec<u64> {
        (0..pages).map(|page| if page < filled { 100 + page as u64 } else { 0 }).collect()
    };
    // In place; copied because another object follows; smaller; and larger again over old content.
    let grown = objects.resize("object", size(20) - 5).unwrap();
    assert!(!grown.is_copied && !grown.has_moved() && grown.size_bytes == size(20));
    assert!(content(&objects, "object") == expected(20, 10));
    objects.create("behind", size(1)).unwrap();
    let grown = objects.resize("object", size(30)).unwrap();
    assert!(grown.is_copied && !grown.has_moved());
    assert!(content(&objects, "object") == expected(30, 10));
    fill(&objects, "object", 10, 100);
    let shrunk = objects.resize("object", size(5)).unwrap();
    assert!(!shrunk.is_copied && !shrunk.has_moved() && shrunk.address == made.address);
    assert!(content(&objects, "object") == expected(5, 5));
    let grown = objects.resize("object", size(30)).unwrap();
    assert!(!grown.has_moved());
    assert!(content(&objects, "object") == expected(30, 5), "what was cut off does not come back");
    assert_eq!(objects.resize("object", size(30)).unwrap().size_bytes, size(30));
    assert!(content(&reopen(&media), "object") == expected(30, 5));
}

/// Content that is only in the log moves along; commits to pages that were cut off do not.
#[test]
fn commits_that_are_not_at_their_place_move_along() {
    for end in [size(3), size(20)] {
        let (media, objects) = on_media(16 << 20, 256 << 10);
        objects.create("object", size(10)).unwrap();
        objects.create("behind", size(1)).unwrap();
        fill(&objects, "object", 0, 7);
        objects.resize("object", end).unwrap();
        let expected: Vec<u64> =
            (0..end / PAGE as u64).map(|page| if page < 10 { 7 + page } else { 0 }).collect();
        // The log holds the commit and the change; nothing was checkpointed.
        let crashed = reopen(&media);
        assert!(content(&crashed, "object") == expected);
        assert!(content(&objects, "object") == expected);
    }
}

#[test]
fn an_object_whose_addresses_end_moves_only_if_it_may() {
    let (_, objects) = on_media(16 << 20, 256 << 10);
    let first = objects.create("stays", size(4)).unwrap();
    let at = |address| movable().address(address);
    at(first.address + size(4)).create(&objects, "moves", size(4)).unwrap();
    at(first.address + size(8)).create(&objects, "last", size(1)).unwrap();
    fill(&objects, "moves", 0, 5);
    let before = objects.pool().info().unwrap().free_pages;
    let refused = objects.resize("stays", size(5)).unwrap_err();
    assert!(
        matches!(&refused, ObjectError::MustMove { by: Some(by), .. } if *by == "moves"),
        "{refused}"
    );
    assert_eq!(objects.pool().info().unwrap().free_pages, before);
    let refused = objects.relocate("stays", None).unwrap_err();
    assert!(matches!(refused, ObjectError::NotRelocatable { .. }), "{refused}");
    let moved = objects.resize("moves", size(5)).unwrap();
    assert!(moved.has_moved());
    assert_eq!(moved.previous_address, first.address + size(4));
    assert_eq!(objects.info("moves").unwrap().address, moved.address);
    assert_eq!(content(&objects, "moves"), [5, 6, 7, 8, 0]);
    // Now there is room.
    assert!(!objects.resize("stays", size(8)).unwrap().has_moved());
    let refused = objects.resize("stays", size(9)).unwrap_err();
    assert!(
        matches!(&refused, ObjectError::MustMove { by: Some(by), .. } if *by == "last"),
        "{refused}"
    );
    // Nor beyond the range of object addresses.
    let end = CreateObject::new().address(WINDOW.end - size(1));
    end.create(&objects, "end", size(1)).unwrap();
    let refused = objects.resize("end", size(2)).unwrap_err();
    assert!(matches!(refused, ObjectError::MustMove { by: None, .. }), "{refused}");
}

#[test]
fn an_object_is_moved_where_it_is_wanted() {
    let (_, objects) = on_media(16 << 20, 256 << 10);
    let first = movable().create(&objects, "first", size(4)).unwrap();
    let second = movable().create(&objects, "second", size(4)).unwrap();
    fill(&objects, "first", 0, 5);
    let wanted = second.address + size(4);
    let refused = objects.relocate("first", Some(wanted - size(1))).unwrap_err();
    assert!(matches!(refused, ObjectError::AddressOfAnother { .. }), "{refused}");
    let refused = objects.relocate("first", Some(4096)).unwrap_err();
    assert!(matches!(refused, ObjectError::Parameter { .. }), "{refused}");
    let moved = objects.relocate("first", Some(wanted)).unwrap();
    assert!(moved.address == wanted && moved.previous_address == first.address);
    let attached = objects.attach("first").unwrap();
    assert_eq!((attached.address(), load_all(&attached)), (wanted, vec![5, 6, 7, 8]));
    drop(attached);
    // By one page, overlapping itself.
    objects.relocate("first", Some(wanted + size(1))).unwrap();
    assert!(objects.relocate("first", None).unwrap().has_moved());
    assert_eq!(content(&objects, "first"), [5, 6, 7, 8]);
}

#[test]
fn what_does_not_fit_changes_nothing() {
    let (_, objects) = on_media(4 << 20, 64 << 10);
    objects.create("object", size(100)).unwrap();
    fill(&objects, "object", 0, 3);
    objects.create("behind", size(1)).unwrap();
    let before = (objects.info("object").unwrap(), content(&objects, "object"));
    objects.pool().checkpoint().unwrap();
    let free = objects.pool().info().unwrap().free_pages;
    let refused = objects.resize("object", 4 << 20).unwrap_err();
    assert!(matches!(refused, ObjectError::Pool(PoolError::Full { .. })), "{refused}");
    let refused = objects.resize("object", 0).unwrap_err();
    assert!(matches!(refused, ObjectError::Parameter { .. }), "{refused}");
    let after = (objects.info("object").unwrap(), content(&objects, "object"));
    assert!(before.1 == after.1 && before.0.address == after.0.address);
    assert_eq!(objects.pool().info().unwrap().free_pages, free);
}

/// A copy whose transaction never happened: its pages stayed free, but are no longer zero.
#[test]
fn what_was_copied_for_nothing_is_not_shown_to_others() {
    let (media, objects) = on_media(8 << 20, 256 << 10);
    objects.create("secret", size(10)).unwrap();
    objects.create("behind", size(1)).unwrap();
    fill(&objects, "secret", 0, 5);
    media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteBack)));
    objects.resize("secret", size(20)).unwrap_err();
    drop(objects);
    let objects = reopen(&media);
    assert_eq!(content(&objects, "secret"), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]);
    objects.create("next", size(100)).unwrap();
    let attached = objects.attach("next").unwrap();
    assert!(attached.as_slice().unwrap().iter().all(|&byte| byte == 0));
}

/// Random sizes of several objects against plain vectors.
#[test]
fn random_sizes_keep_what_they_should() {
    let seed = seed(31);
    let mut rng = Rng::new(seed);
    let place = Place::new();
    let mut objects = place.create(8 << 20, 128 << 10);
    let names = ["a", "b", "c"];
    let mut models = vec![vec![0u64; 5]; 3];
    for name in names {
        movable().create(&objects, name, size(5)).unwrap();
    }
    for step in 1..=steps(150) as u64 {
        let index = rng.below(3) as usize;
        let (name, model) = (names[index], &mut models[index]);
        match rng.below(10) {
            0..4 => {
                let pages = 1 + rng.below(200) as usize;
                match objects.resize(name, size(pages)) {
                    Ok(_) => model.resize(pages, 0),
                    Err(ObjectError::Pool(PoolError::Full { .. })) => {}
                    Err(error) => panic!("seed {seed}, step {step}: {error}"),
                }
            }
            4..8 => {
                let mut object = objects.attach_mut(name).unwrap();
                for _ in 0..rng.below(60) {
                    let page = rng.below(model.len() as u64) as usize;
                    store(&mut object, page, step);
                    model[page] = step;
                }
                object.psync().unwrap();
            }
            8 => objects.pool().checkpoint().unwrap(),
            _ => {
                drop(objects);
                objects = place.open();
            }
        }
        for (name, model) in names.iter().zip(&models) {
            assert!(content(&objects, name) == *model, "seed {seed}, step {step}, {name}");
        }
    }
}
