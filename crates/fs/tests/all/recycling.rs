//! Reused slots: number and generation identify an inode for the lifetime of the pool. An old
//! handle never refers to another inode, whatever the slot was used for in between.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use crate::scratch::{Scratch, names, read_all};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_fs::{Files, FsError, Metadata, SetMode};
use aquifer_pool::format::inode::{INLINE_RUNS, Inode, InodeKind};
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{Pool, ReadSlots};
use aquifer_testkit::rng::Rng;

const SLOTS: u64 = 39;

/// A file that gets attributes.
const KEEPER: &str = "/keeper";

fn few_slots() -> (Scratch, Files) {
    let options = Pool::options().inodes(SLOTS);
    let scratch = Scratch::with_pool(1 << 20, &options);
    let files = scratch.open();
    files.create_file(KEEPER).unwrap();
    (scratch, files)
}

fn magic_of(files: &Files, slot: u64) -> [u8; 4] {
    let word = files.pool().look(|slots| slots.word(slot, 0)).unwrap().unwrap();
    *word.first_chunk().unwrap()
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.ino(), metadata.generation())
}

/// Makes attributes use a free slot, and give it back.
fn use_as_a_part(files: &Files, slot: u64) {
    for _ in 0..2 * SLOTS {
        files.set_attribute(KEEPER, "user.a", [1; 400], SetMode::Create).unwrap();
        let was_used = magic_of(files, slot) == *b"AQBC";
        files.remove_attribute(KEEPER, "user.a").unwrap();
        if was_used {
            return;
        }
    }
    panic!("slot {slot} was never taken");
}

/// Creates a file or a directory at `path` in this slot, which is free.
fn make_in(files: &Files, slot: u64, path: &str, make: impl Fn(&Files, &str)) {
    for _ in 0..2 * SLOTS {
        make(files, path);
        let metadata = files.metadata(path).unwrap();
        if metadata.ino() == slot {
            return;
        }
        if metadata.is_dir() {
            files.remove_dir(path).unwrap()
        } else {
            files.remove_file(path).unwrap()
        }
    }
    panic!("slot {slot} was never taken");
}

fn viewed(files: &Files, path: &str) -> Vec<u8> {
    files.view(path, ..).unwrap().read(|bytes| bytes.to_vec()).unwrap()
}

fn make_directory(files: &Files, path: &str) {
    files.create_dir(path).unwrap();
}

fn make_file(files: &Files, path: &str) {
    files.create_file(path).unwrap().write_all_at(b"new", 0).unwrap();
}

/// Removes a directory; its slot is used for attributes before it becomes another inode's.
fn removed_directory(files: &Files) -> u64 {
    let slot = files.metadata("/old").unwrap().ino();
    files.remove_dir("/old").unwrap();
    use_as_a_part(files, slot);
    slot
}

#[test]
fn a_listing_of_a_removed_directory_lists_no_other_one() {
    let (_scratch, files) = few_slots();
    files.create_dir("/old").unwrap();
    let listing = files.read_dir("/old").unwrap();
    let slot = removed_directory(&files);
    make_in(&files, slot, "/new", make_directory);
    files.create_file("/new/file").unwrap();
    let listed: Vec<_> = listing.map(|entry| entry.unwrap().file_name()).collect();
    assert!(listed.is_empty(), "{listed:?}");
}

#[test]
fn a_handle_of_a_removed_directory_changes_no_other_file() {
    let (_scratch, files) = few_slots();
    files.create_dir("/old").unwrap();
    let stale = files.open_file("/old").unwrap();
    let slot = removed_directory(&files);
    make_in(&files, slot, "/new", make_file);
    files.set_permissions("/new", Permissions::from_mode(0o640)).unwrap();
    let before = files.metadata("/new").unwrap();
    let errors = [
        stale.set_permissions(Permissions::from_mode(0o777)).unwrap_err(),
        stale.fchown(Some(77), Some(77)).unwrap_err(),
        stale.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap_err(),
        stale.set_attribute("user.a", "b", SetMode::Any).unwrap_err(),
        stale.metadata().unwrap_err(),
        stale.attributes().unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, FsError::NotFound { .. }), "{error}");
    }
    let after = files.metadata("/new").unwrap();
    assert_eq!((after.mode() & 0o7777, after.uid()), (0o640, before.uid()));
    assert_eq!((after.mtime_nsec(), after.changed()), (before.mtime_nsec(), before.changed()));
    assert!(files.attributes("/new").unwrap().is_empty());
}

#[test]
fn a_new_file_is_read_and_viewed_beside_a_stale_handle_of_its_number() {
    let (_scratch, files) = few_slots();
    files.create_dir("/old").unwrap();
    let stale = files.open_file("/old").unwrap();
    let slot = removed_directory(&files);
    make_in(&files, slot, "/new", make_file);
    let new = files.options().read(true).write(true).open("/new").unwrap();
    let mut bytes = [0; 3];
    assert_eq!(new.read_at(&mut bytes, 0).unwrap(), 3);
    assert_eq!(&bytes, b"new");
    new.write_all_at(b"NEW", 0).unwrap();
    assert_eq!(read_all(&files, "/new").unwrap(), b"NEW");
    assert_eq!(viewed(&files, "/new"), b"NEW");
    drop(new);
    files.set_immutable("/new", true).unwrap();
    assert_eq!(&files.lease("/new", ..).unwrap()[..], b"NEW");
    files.set_immutable("/new", false).unwrap();
    // After its last name is removed, the slot is free when the stale handle is closed.
    files.remove_file("/new").unwrap();
    drop(stale);
    assert_eq!(magic_of(&files, slot), *b"AQIN");
}

/// Exercises a process's caches of paths and views.
#[test]
fn a_path_that_was_viewed_before_shows_the_file_that_has_it_now() {
    let (_scratch, files) = few_slots();
    make_file(&files, "/file");
    let slot = files.metadata("/file").unwrap().ino();
    for round in 0..3_u8 {
        assert_eq!(viewed(&files, "/file").len(), 3 + usize::from(round));
        files.remove_file("/file").unwrap();
        use_as_a_part(&files, slot);
        make_in(&files, slot, "/file", |files, path| {
            files
                .create_file(path)
                .unwrap()
                .write_all_at(&vec![round; 4 + usize::from(round)], 0)
                .unwrap();
        });
    }
}

/// Listing a directory and removing its content use number and generation.
#[test]
fn removing_a_tree_leaves_what_took_the_place_of_a_part_of_it() {
    let (_scratch, files) = few_slots();
    files.create_dir_all("/tree/old").unwrap();
    let slot = files.metadata("/tree/old").unwrap().ino();
    // As the removal sees it while it is in `old`.
    let inside = files.read_dir("/tree/old").unwrap();
    files.remove_dir("/tree/old").unwrap();
    use_as_a_part(&files, slot);
    make_in(&files, slot, "/kept", make_directory);
    files.create_file("/kept/file").unwrap();
    assert_eq!(inside.count(), 0);
    files.remove_dir_all("/tree").unwrap();
    assert_eq!(names(&files, "/kept").unwrap(), ["file"]);
}

/// Slots are reused for files, directories, links, objects, nodes and attributes; the pool is
/// closed and opened again, also after power cuts that undo the last changes.
#[test]
fn number_and_generation_never_come_again() {
    let (scratch, files) = few_slots();
    drop(files);
    let mut rng = Rng::new(aquifer_testkit::campaign::steps(1) as u64);
    // The owner of each pair: each inode gets a unique number in its permissions and times.
    let mut seen: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    let mut serial = 0;
    for round in 0..30_u64 {
        let options =
            Pool::options().boot(round + 1).background(false).domain(PersistenceDomain::PageCache);
        let files = Files::new(options.open(&scratch.path).unwrap());
        let durable = std::fs::read(&scratch.path).unwrap();
        for _ in 0..60 {
            let path = format!("/{}", rng.below(6));
            let there = files.symlink_metadata(&path).ok();
            if let Some(there) = there {
                if there.is_dir() {
                    files.remove_dir(&path).unwrap()
                } else {
                    files.remove_file(&path).unwrap()
                }
                continue;
            }
            match rng.below(5) {
                0 => files.create_dir(&path).unwrap(),
                1 => files.symlink("t".repeat(900), &path).unwrap(),
                2 => {
                    make_file(&files, &path);
                    files.set_attribute(&path, "user.a", [1; 900], SetMode::Any).unwrap();
                }
                3 => {
                    let identity = make_object(files.pool());
                    serial += 1;
                    assert_eq!(seen.insert(identity, serial), None, "{identity:?}");
                    make_file(&files, &path);
                }
                _ => make_file(&files, &path),
            }
            let identity = identity(&files.symlink_metadata(&path).unwrap());
            serial += 1;
            assert_eq!(seen.insert(identity, serial), None, "{identity:?} in round {round}");
        }
        match round % 3 {
            0 => drop(files),
            1 => {
                files.sync().unwrap();
                drop(files);
            }
            // A power cut undoes the whole round.
            _ => {
                drop(files);
                std::fs::write(&scratch.path, durable).unwrap();
            }
        }
    }
}

/// Creates and destroys an object; returns its number and generation.
fn make_object(pool: &Pool) -> (u64, u64) {
    let reservation = pool.reserve_zeroed(1, 1).unwrap();
    let runs = reservation.runs().to_vec();
    assert!(runs.len() <= INLINE_RUNS);
    let made = pool.transact_unguarded(vec![reservation], |transaction| {
        let inode = transaction.free_inode()?;
        let identity = (inode.number, inode.generation);
        transaction.put(Inode {
            kind: InodeKind::Object,
            size_bytes: 4096,
            address: 0x2000_0000_0000,
            runs: runs.clone(),
            name: b"object".to_vec(),
            ..inode
        });
        Ok(identity)
    });
    let identity = made.unwrap();
    pool.transact_unguarded(Vec::new(), |transaction| {
        transaction.put(Inode::free(identity.0, identity.1));
        Ok(())
    })
    .unwrap();
    identity
}
