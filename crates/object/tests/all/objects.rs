//! The calls that create, find and attach objects, in one process.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{PAGE, Place, attach_for, load, load_all, store};
use aquifer_object::{Access, CreateObject, ObjectError, ObjectOptions, ObjectState, Objects};
use aquifer_pool::{Pool, PoolError};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use aquifer_vm::fixed::{self, FixedRange, WINDOW};

fn small(place: &Place) -> Objects {
    place.create(16 << 20, 1 << 20)
}

#[test]
fn what_was_stored_before_psync_is_there_afterwards() {
    let place = Place::new();
    let objects = small(&place);
    let made = objects.create("an object", 10 * PAGE as u64 - 7).unwrap();
    assert_eq!(made.size_bytes, 10 * PAGE as u64);
    let mut attached = objects.attach_mut("an object").unwrap();
    assert_eq!(attached.address(), made.address);
    assert!(attached.as_slice().unwrap().iter().all(|&byte| byte == 0));
    attached.as_mut_slice().unwrap()[3 * PAGE] = 1;
    attached.psync().unwrap();
    attached.as_mut_slice().unwrap()[3 * PAGE + 1] = 2;
    attached.as_mut_slice().unwrap()[9 * PAGE] = 3;
    attached.psync().unwrap();
    attached.as_mut_slice().unwrap()[0] = 4;
    attached.detach().unwrap();
    for round in 0..2 {
        let objects = if round == 0 { objects.clone() } else { place.open() };
        for access in [Access::Read, Access::Write] {
            let options = ObjectOptions::new();
            let attached = attach_for(access, options, &objects, "an object").unwrap();
            assert_eq!(attached.address(), made.address);
            let bytes = attached.as_slice().unwrap();
            assert_eq!(bytes[3 * PAGE..][..3], [1, 2, 0]);
            assert_eq!((bytes[9 * PAGE], bytes[0]), (3, 0), "the last store had no psync");
            assert_eq!(bytes.iter().filter(|&&byte| byte != 0).count(), 3);
        }
    }
}

#[test]
fn a_file_in_memory_is_as_good() {
    let Some(place) = Place::in_memory() else {
        eprintln!("skipped: there is no /dev/shm to write to");
        return;
    };
    let objects = small(&place);
    objects.create("an object", 3 * PAGE as u64).unwrap();
    for round in 1..5 {
        let mut attached = objects.attach_mut("an object").unwrap();
        assert_eq!(load(&attached, 2), round - 1);
        store(&mut attached, 2, round);
        attached.psync().unwrap();
    }
    drop(objects);
    let objects = place.open();
    assert_eq!(load(&objects.attach("an object").unwrap(), 2), 4);
}

#[test]
fn impossible_objects_are_refused() {
    let place = Place::new();
    let objects = small(&place);
    let before = objects.pool().info().unwrap();
    let parameter = |name: &str, size: u64, options: CreateObject<'_>| {
        let error = options.create(&objects, name, size).unwrap_err();
        assert!(matches!(error, ObjectError::Parameter { .. }), "{error}");
    };
    let plain = CreateObject::new();
    parameter("", 1, plain);
    parameter("a\0b", 1, plain);
    parameter(&"n".repeat(256), 1, plain);
    parameter("empty", 0, plain);
    parameter("vast", u64::MAX, plain);
    let at = |address| CreateObject::new().address(address);
    parameter("low", 1, at(WINDOW.start - PAGE as u64));
    parameter("high", 2 * PAGE as u64, at(WINDOW.end - PAGE as u64));
    parameter("crooked", 1, at(WINDOW.start + 1));
    parameter("wraps", 1, at(u64::MAX - (PAGE as u64 - 1)));
    let too_large = objects.create("too large", 1 << 30).unwrap_err();
    assert!(matches!(too_large, ObjectError::Pool(PoolError::Full { .. })), "{too_large}");
    let after = objects.pool().info().unwrap();
    assert_eq!((before.free_pages, before.objects), (after.free_pages, after.objects));
    assert!(objects.list().unwrap().is_empty());

    let longest = "n".repeat(255);
    let made = objects.create(&longest, 2 * PAGE as u64).unwrap();
    let exists = objects.create(&longest, 1).unwrap_err();
    assert!(matches!(exists, ObjectError::Exists { .. }), "{exists}");
    for address in [made.address, made.address + PAGE as u64] {
        let taken = at(address).create(&objects, "there", 1).unwrap_err();
        assert!(matches!(&taken, ObjectError::AddressOfAnother { by, .. } if *by == *longest));
    }
    let behind = at(made.address + 2 * PAGE as u64).create(&objects, "behind", 1).unwrap();
    assert_eq!(behind.address, made.address + 2 * PAGE as u64);
}

#[test]
fn an_object_is_created_with_its_content() {
    let place = Place::new();
    let objects = small(&place);
    let content: Vec<u8> = (0..PAGE + 3).map(|at| at as u8 | 1).collect();
    for round in 0..2 {
        CreateObject::new().content(&content).create(&objects, "object", 3 * PAGE as u64).unwrap();
        let mut object = objects.attach_mut("object").unwrap();
        let bytes = object.as_mut_slice().unwrap();
        assert!(bytes[..content.len()] == content && bytes[content.len()..] == [0; 2 * PAGE - 3]);
        bytes.fill(7);
        object.psync().unwrap();
        object.detach().unwrap();
        if round == 0 {
            objects.destroy("object").unwrap();
        }
    }
    let create = |options: CreateObject<'_>, size_bytes| {
        options.create(&objects, "another", size_bytes).map(drop).unwrap_err()
    };
    for refused in [
        create(CreateObject::new().content(&content), PAGE as u64),
        create(CreateObject::new().content("a").heap(true), 1 << 20),
    ] {
        assert!(matches!(refused, ObjectError::Parameter { .. }), "{refused}");
    }
}

#[test]
fn the_last_slot_and_the_last_page_can_be_used() {
    let place = Place::new();
    let options = Pool::options().log_bytes(64 << 10).inodes(7);
    let pool = options.create(place.path(), 1 << 20).unwrap();
    let objects = Objects::new(pool);
    // The root directory uses one slot.
    for number in 0..6 {
        objects.create(format!("object {number}"), 1).unwrap();
    }
    let error = objects.create("one more", 1).unwrap_err();
    assert!(matches!(error, ObjectError::Pool(PoolError::NoFreeInode { .. })), "{error}");
    objects.destroy("object 3").unwrap();
    let free = objects.pool().info().unwrap().largest_free_pages;
    objects.create("all that is left", free * PAGE as u64).unwrap();
    let mut attached = objects.attach_mut("all that is left").unwrap();
    store(&mut attached, free as usize - 1, 7);
    attached.psync().unwrap();
}

#[test]
fn a_destroyed_object_is_gone_and_its_pages_show_nothing() {
    let place = Place::new();
    let objects = small(&place);
    // Nearly all free pages, so that the next object gets the same ones.
    let all = (objects.pool().info().unwrap().largest_free_pages - 512) * PAGE as u64;
    for round in 0..4 {
        let made = objects.create("secret", all).unwrap();
        let mut attached = objects.attach_mut("secret").unwrap();
        assert!(load_all(&attached).iter().all(|&number| number == 0), "round {round}");
        assert_eq!(attached.address(), made.address);
        for page in 0..all as usize / PAGE {
            store(&mut attached, page, round + 1);
            if page % 64 == 63 {
                attached.psync().unwrap();
            }
        }
        let refused = objects.destroy("secret").unwrap_err();
        assert!(matches!(refused, ObjectError::AttachedHere { .. }), "{refused}");
        attached.detach().unwrap();
        objects.destroy("secret").unwrap();
        let gone = objects.attach("secret").unwrap_err();
        assert!(matches!(gone, ObjectError::NotFound { .. }), "{gone}");
        let gone = objects.destroy("secret").unwrap_err();
        assert!(matches!(gone, ObjectError::NotFound { .. }), "{gone}");
    }
}

#[test]
fn keys_are_asked_for() {
    let place = Place::new();
    let objects = small(&place);
    let both = CreateObject::new().read_key("reader").write_key("writer");
    let made = both.create(&objects, "locked", 1).unwrap();
    assert!(made.needs_read_key && made.needs_write_key);
    let none = ObjectOptions::new();
    let [wrong, reader, writer] = ["wrong", "reader", "writer"].map(|key| none.key(key));
    let attach = |access, options| attach_for(access, options, &objects, "locked").map(drop);
    for access in [Access::Read, Access::Write] {
        for options in [none, wrong] {
            let error = attach(access, options).unwrap_err();
            assert!(matches!(error, ObjectError::WrongKey { .. }), "{error}");
        }
        attach(access, writer).unwrap();
    }
    attach(Access::Read, reader).unwrap();
    let is_read_key = |error| matches!(error, ObjectError::ReadKeyForWriting { .. });
    assert!(is_read_key(attach(Access::Write, reader).unwrap_err()));
    assert!(is_read_key(reader.destroy(&objects, "locked").unwrap_err()));
    assert!(is_read_key(reader.resize(&objects, "locked", 1 << 16).unwrap_err()));
    assert!(is_read_key(reader.rename(&objects, "locked", "open").unwrap_err()));
    assert!(is_read_key(reader.relocate(&objects, "locked", None).unwrap_err()));
    writer.destroy(&objects, "locked").unwrap();
}

#[test]
fn one_writer_or_many_readers() {
    let place = Place::new();
    let one = small(&place);
    let other = place.open();
    let own = Some(std::process::id());
    one.create("shared", 1).unwrap();
    let writer = one.attach_mut("shared").unwrap();
    let options = ObjectOptions::new();
    for access in [Access::Read, Access::Write] {
        let here = attach_for(access, options, &one, "shared").unwrap_err();
        assert!(matches!(here, ObjectError::AttachedHere { .. }), "{here}");
        let there = attach_for(access, options, &other, "shared").unwrap_err();
        assert!(matches!(there, ObjectError::Attached { holder, .. } if holder == own), "{there}");
    }
    assert!(matches!(other.destroy("shared"), Err(ObjectError::Attached { .. })));
    assert!(matches!(other.resize("shared", 1 << 20), Err(ObjectError::Attached { .. })));
    writer.detach().unwrap();
    let reader = other.attach("shared").unwrap();
    let error = one.attach_mut("shared").unwrap_err();
    assert!(matches!(error, ObjectError::Attached { holder, .. } if holder == own), "{error}");
    // A second reader gets the lock, but in this process the first one occupies the addresses.
    let error = one.attach("shared").unwrap_err();
    assert!(
        matches!(&error, ObjectError::AddressTaken { by, .. } if by.contains("pool")),
        "{error}"
    );
    drop(reader);
    one.attach_mut("shared").unwrap().detach().unwrap();
}

#[test]
fn what_lies_at_an_objects_address_is_named_and_not_replaced() {
    let place = Place::new();
    let objects = small(&place);
    let made = objects.create("mine", 4 * PAGE as u64).unwrap();
    let other = FixedRange::map_anonymous(made.address + PAGE as u64, PAGE as u64).unwrap();
    // SAFETY: inside the mapping.
    unsafe { other.address().write_volatile(7) };
    let error = objects.attach_mut("mine").unwrap_err();
    let ObjectError::AddressTaken { address, len_bytes, by, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!((*address, *len_bytes), (made.address, 4 * PAGE as u64));
    assert!(by.contains("anonymous"), "{by}");
    // SAFETY: as above.
    assert_eq!(unsafe { other.address().read_volatile() }, 7);
    // The lock was released.
    drop(other);
    objects.attach_mut("mine").unwrap();
}

#[test]
fn reading_is_all_that_an_attachment_for_reading_can() {
    let place = Place::new();
    let objects = small(&place);
    objects.create("read", 1).unwrap();
    let mut attached = objects.attach("read").unwrap();
    let error = attached.as_mut_slice().unwrap_err();
    assert!(matches!(error, ObjectError::AttachedForReading { .. }), "{error}");
    let lsn = objects.pool().durable_lsn();
    attached.psync().unwrap();
    attached.psync_begin().unwrap().wait().unwrap();
    objects.psync_many(&mut [&mut attached]).unwrap();
    assert_eq!(objects.pool().durable_lsn(), lsn, "psync is ignored");
    assert_eq!(attached.statistics().psyncs, 0);
    attached.detach().unwrap();
}

#[test]
fn a_reader_that_cannot_write_sees_what_is_only_in_the_log() {
    let place = Place::new();
    let objects = small(&place);
    objects.create("fresh", 3 * PAGE as u64).unwrap();
    let readers = place.open_for_reading();
    for value in 1..4 {
        let mut attached = objects.attach_mut("fresh").unwrap();
        store(&mut attached, 1, value);
        attached.psync().unwrap();
        let refused = readers.attach("fresh").unwrap_err();
        assert!(matches!(refused, ObjectError::Attached { .. }), "{refused}");
        attached.detach().unwrap();
        let state = objects.state_of("fresh").unwrap();
        assert_eq!(state, ObjectState::Copying, "committed, and not applied");
        let reader = readers.attach("fresh").unwrap();
        assert_eq!((load(&reader, 0), load(&reader, 1), load(&reader, 2)), (0, value, 0));
        let writing = readers.attach_mut("other").unwrap_err();
        assert!(matches!(writing, ObjectError::Pool(PoolError::ReadOnly { .. })), "{writing}");
        assert!(matches!(
            objects.attach_mut("fresh"),
            Err(ObjectError::Attached { holder: None, .. })
        ));
    }
    for refused in [
        readers.create("no", 1).map(drop),
        readers.destroy("fresh"),
        readers.rename("fresh", "stale"),
    ] {
        assert!(matches!(refused, Err(ObjectError::Pool(PoolError::ReadOnly { .. }))));
    }
}

#[test]
fn objects_are_listed_described_and_renamed() {
    let place = Place::new();
    let objects = small(&place);
    let movable = CreateObject::new().write_key("k").relocatable(true);
    movable.create(&objects, "b", 5000).unwrap();
    CreateObject::new().heap(true).create(&objects, "a", 3 << 20).unwrap();
    let with_key = ObjectOptions::new().key("k");
    let list = objects.list().unwrap();
    let names: Vec<_> = list.iter().map(|info| info.name.to_str().unwrap()).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(list[1], objects.info("b").unwrap());
    assert_eq!((list[0].size_bytes, list[1].size_bytes), (3 << 20, 8192));
    assert!(list[0].is_heap && !list[1].is_heap);
    assert!(list[1].is_relocatable && !list[0].is_relocatable);
    assert!(!list[1].needs_read_key && list[1].needs_write_key);
    let huge = 2 << 20;
    assert!(list.iter().all(|info| info.address % huge == 0), "addresses of whole huge pages");
    assert_eq!(list[0].media_offset_bytes % huge, 0, "large contents begin at huge pages");
    assert!(matches!(objects.info("c"), Err(ObjectError::NotFound { .. })));

    let taken = with_key.rename(&objects, "b", "a").unwrap_err();
    assert!(matches!(taken, ObjectError::Exists { .. }), "{taken}");
    with_key.rename(&objects, "b", "c").unwrap();
    with_key.rename(&objects, "c", "c").unwrap();
    assert!(matches!(objects.info("b"), Err(ObjectError::NotFound { .. })));
    let renamed = objects.info("c").unwrap();
    assert_eq!((renamed.number, renamed.address), (list[1].number, list[1].address));
    drop(objects);
    assert_eq!(place.open().info("c").unwrap().address, renamed.address);
}

/// Two handles create and remove names; each of them, and a read-only handle, finds exactly what
/// the list shows.
#[test]
fn names_lead_where_the_list_says_in_every_handle() {
    let place = Place::in_memory().unwrap_or_else(Place::new);
    let mut writers = [small(&place), place.open()];
    let reader = place.open_for_reading();
    let mut rng = Rng::new(seed(31));
    let name = |number: u64| format!("{}/{number}", "directory".repeat(number as usize % 3));
    for round in 0..steps(60) {
        let (objects, one, other) = (&writers[round % 2], name(rng.below(24)), name(rng.below(24)));
        let (has_one, has_other) = (objects.info(&one).is_ok(), objects.info(&other).is_ok());
        match has_one {
            false => drop(objects.create(&one, 1).unwrap()),
            true if rng.chance(0.5) => objects.destroy(&one).unwrap(),
            true => {
                let renamed = objects.rename(&one, &other);
                assert_eq!(renamed.is_err(), has_other && one != other, "{one} to {other}");
            }
        }
        if round % 20 == 19 {
            writers[round % 2] = place.open();
        }
        for objects in writers.iter().chain([&reader]) {
            let list = objects.list().unwrap();
            for name in (0..24).map(name) {
                let listed = list.iter().find(|info| info.name.as_bytes() == name.as_bytes());
                let found = objects.info(&name).ok();
                assert_eq!(found.map(|info| info.number), listed.map(|info| info.number), "{name}");
            }
        }
    }
}

/// Two names that differ only in bytes shown as a replacement character: each is found under its
/// listed name, and errors distinguish them.
#[test]
fn names_are_bytes() {
    let place = Place::new();
    let objects = small(&place);
    let names = [&b"caf\xe8"[..], b"caf\xe9", "caf\u{fffd}".as_bytes(), b"a\nb"];
    names.iter().for_each(|name| drop(objects.create(name, 1).unwrap()));
    let list = objects.list().unwrap();
    assert_eq!(list.len(), names.len());
    let mut messages = std::collections::BTreeSet::new();
    for info in &list {
        let attached = objects.attach_mut(&info.name).unwrap();
        assert_eq!((attached.name(), attached.address()), (info.name.clone(), info.address));
        let error = objects.destroy(&info.name).unwrap_err().to_string();
        assert!(error.contains(&info.name.to_string()), "{error}");
        messages.insert(error);
    }
    assert_eq!(messages.len(), names.len(), "{messages:?}");
    let error = objects.create(b"a\0b\xff", 1).unwrap_err().to_string();
    assert!(error.contains(r"$'a\x00b\xff'"), "{error}");
}

#[test]
fn objects_by_address() {
    let place = Place::new();
    let objects = small(&place);
    objects.create("raw", 3 * PAGE as u64).unwrap();
    let options = ObjectOptions::new();
    let start = options.attach_raw_mut(&objects, "raw").unwrap().as_ptr();
    // SAFETY: inside the object, which no other code uses.
    let inside = unsafe { start.add(2 * PAGE + 5) };
    // SAFETY: as above.
    unsafe { inside.write(9) };
    // SAFETY: no thread stores to it during the call.
    unsafe { objects.psync_at(inside) }.unwrap();
    let is_misuse = |error| matches!(error, ObjectError::NotAttached { .. });
    for wrong in [start.wrapping_sub(1), start.wrapping_add(3 * PAGE), std::ptr::null_mut()] {
        // SAFETY: no thread stores to it during the call.
        assert!(is_misuse(unsafe { objects.psync_at(wrong) }.unwrap_err()));
        assert!(is_misuse(objects.detach(wrong).unwrap_err()));
    }
    objects.detach(inside).unwrap();
    assert!(is_misuse(objects.detach(start).unwrap_err()), "detached already");
    let attached = objects.attach("raw").unwrap();
    assert_eq!(attached.as_slice().unwrap()[2 * PAGE + 5], 9);
    assert!(is_misuse(objects.detach(attached.start().as_ptr()).unwrap_err()), "held by value");
    assert_eq!(attached.as_slice().unwrap()[2 * PAGE + 5], 9);
    drop(attached);

    // Dropping the objects detaches what is still attached.
    let start = options.attach_raw_mut(&objects, "raw").unwrap();
    drop(objects);
    let again = options.attach_raw_mut(&place.open(), "raw");
    assert_eq!(again.unwrap(), start);
}

/// Two objects whose inode numbers are constantly reused: a name finds its own object or fails.
#[test]
fn a_name_leads_to_its_own_object_while_numbers_are_used_again() {
    let place = Place::in_memory().unwrap_or_else(Place::new);
    let (one, other) = (small(&place), place.open());
    let names = ["a", "b"];
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let make = |index: usize| {
                one.create(names[index], (index + 1) as u64 * PAGE as u64).unwrap();
                if let Ok(mut attached) = one.attach_mut(names[index]) {
                    store(&mut attached, 0, index as u64 + 1);
                    attached.psync().unwrap();
                }
            };
            for round in 0..steps(50) {
                for name in names {
                    while one.destroy(name).is_err_and(|error| is_busy(&error)) {
                        std::thread::yield_now();
                    }
                }
                make(round % 2);
                make((round + 1) % 2);
            }
            is_over.store(true, Ordering::SeqCst);
        });
        let mut found = 0;
        while !is_over.load(Ordering::SeqCst) {
            for (index, name) in names.iter().enumerate() {
                match other.attach(name) {
                    Ok(attached) => {
                        let tag = load(&attached, 0);
                        assert!(tag == 0 || tag == index as u64 + 1, "{name} has {tag}");
                        assert_eq!(attached.len_bytes(), (index + 1) as u64 * PAGE as u64);
                        found += 1;
                    }
                    Err(
                        ObjectError::NotFound { .. }
                        | ObjectError::Destroyed { .. }
                        | ObjectError::Attached { .. },
                    ) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            std::thread::yield_now();
        }
        println!("found {found} times");
    });
}

fn is_busy(error: &ObjectError) -> bool {
    matches!(error, ObjectError::Attached { .. } | ObjectError::AttachedHere { .. })
}

#[test]
fn fixed_addresses_avoid_those_of_all_objects() {
    let place = Place::new();
    let objects = small(&place);
    let first = objects.create("first", 3 << 20).unwrap();
    for number in 0..50 {
        let made = objects.create(format!("object {number}"), 1).unwrap();
        let is_apart = made.address + made.size_bytes <= first.address
            || first.address + first.size_bytes <= made.address;
        assert!(is_apart && WINDOW.contains(&made.address));
    }
    assert!(fixed::random_base(1 << 20, &[(WINDOW.start, WINDOW.end - WINDOW.start)]).is_err());
}
