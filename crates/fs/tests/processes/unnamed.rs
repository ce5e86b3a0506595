//! Files that get their name when they are complete, and what is left of those that never get one.

use crate::actor::{Actor, hear, say, told};
use crate::scratch::soundness::assert_sound;
use crate::scratch::{Scratch, names, read_all};
use aquifer_fs::{FileOptions, Files, FsError, SetMode};
use aquifer_pool::{Pool, PoolError};

pub const ROLES: &[aquifer_testkit::child::Role] = &[("maker", maker)];

fn writing(files: &Files) -> FileOptions {
    let mut options = files.options();
    options.write(true);
    options
}

#[test]
fn a_file_is_seen_when_it_has_a_name_and_all_of_it() {
    let scratch = Scratch::with_pool(8 << 20, &Pool::options());
    let files = scratch.open();
    let free = files.space().unwrap();
    let new = writing(&files).mode(0o500).create_unnamed().unwrap();
    new.write_all_at(b"text", 0).unwrap();
    new.set_attribute("user.colour", "green", SetMode::Any).unwrap();
    new.fchown(Some(7), None).unwrap();
    assert!(names(&files, "/").unwrap().is_empty());
    assert_eq!(new.metadata().unwrap().nlink(), 0);
    // Opening the pool does not free what another process has open.
    let other = scratch.open();
    new.link("/f").unwrap();
    assert_eq!(read_all(&other, "/f").unwrap(), b"text");
    let metadata = other.metadata("/f").unwrap();
    assert_eq!((metadata.nlink(), metadata.mode() & 0o7777, metadata.uid()), (1, 0o500, 7));
    assert_eq!(other.attribute("/f", "user.colour").unwrap(), b"green");
    assert!(matches!(new.link("/f"), Err(FsError::Exists { .. })));
    new.link("/g").unwrap();
    drop(new);
    assert_eq!(files.metadata("/g").unwrap().nlink(), 2);
    // Without a name the file is freed with its last handle.
    let never = writing(&files).create_unnamed().unwrap();
    never.write_all_at(&[1; 100_000], 0).unwrap();
    drop(never);
    files.remove_file("/f").unwrap();
    files.remove_file("/g").unwrap();
    files.pool().checkpoint().unwrap();
    assert_sound(files.pool());
    let after = files.space().unwrap();
    assert_eq!((after.free_bytes, after.free_slots), (free.free_bytes, free.free_slots));
}

#[test]
fn what_has_the_name_is_replaced_as_by_renaming() {
    let scratch = Scratch::with_pool(8 << 20, &Pool::options());
    let files = scratch.open();
    files.create_dir("/d").unwrap();
    files.create_file("/f").unwrap().write_all_at(b"old", 0).unwrap();
    let before = files.open_file("/f").unwrap();
    let new = writing(&files).create_unnamed().unwrap();
    new.write_all_at(b"newer", 0).unwrap();
    new.link_over("/f").unwrap();
    assert_eq!(read_all(&files, "/f").unwrap(), b"newer");
    let mut bytes = [0; 3];
    assert_eq!((before.read_at(&mut bytes, 0).unwrap(), &bytes), (3, b"old"));
    // It has the name already.
    new.link_over("/f").unwrap();
    assert_eq!(new.metadata().unwrap().nlink(), 1);
    for (path, errno) in [
        ("/d", libc::EISDIR),
        ("/", libc::EEXIST),
        ("/d/..", libc::EEXIST),
        ("/no/f", libc::ENOENT),
        ("/new/", libc::ENOENT),
        ("/f/g", libc::ENOTDIR),
    ] {
        assert_eq!(new.link_over(path).unwrap_err().errno(), errno, "{path}");
    }
    files.symlink("d", "/link").unwrap();
    let link = files.symlink_unnamed("f").unwrap();
    assert!(matches!(link.read_at(&mut [0], 0), Err(FsError::NotOpenFor { .. })));
    link.link_over("/link").unwrap();
    assert_eq!(files.read_link("/link").unwrap().to_str(), Some("f"));
    let directory = files.open_file("/d").unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(directory.link("/e").unwrap_err().errno(), libc::EPERM);
    files.set_immutable("/f", false).unwrap();
    drop((new, before, link));
    files.set_immutable("/f", true).unwrap();
    let new = writing(&files).create_unnamed().unwrap();
    assert!(matches!(new.link_over("/f"), Err(FsError::Immutable { .. })));
    let immutable = files.open_file("/f").unwrap();
    assert!(matches!(immutable.link("/g"), Err(FsError::Immutable { .. })));
    assert!(matches!(files.hard_link("/f", "/g"), Err(FsError::Immutable { .. })));
    drop(new);
    assert_sound(files.pool());
    let reading = Pool::options().read_only(true);
    let reader = Files::new(reading.open(&scratch.path).unwrap());
    let refused = writing(&reader).create_unnamed().map(drop);
    assert!(matches!(refused, Err(FsError::Pool(PoolError::ReadOnly { .. }))));
}

fn maker() {
    let files = Files::open(told("POOL")).unwrap();
    let new = writing(&files).create_unnamed().unwrap();
    new.write_all_at(&vec![1; told("BYTES").parse().unwrap()], 0).unwrap();
    let _link = files.symlink_unnamed("x".repeat(1000)).unwrap();
    say("made");
    hear();
}

/// A file that a dying process was creating is never visible, and its space is freed when space is
/// needed, even if no process opens the pool in between.
#[test]
fn what_the_dead_were_making_is_given_back_when_room_is_wanted() {
    let scratch = Scratch::with_pool(8 << 20, &Pool::options().inodes(31));
    let files = scratch.open();
    let free = files.space().unwrap();
    let most = (free.free_bytes * 3 / 4).to_string();
    let mut maker = Actor::start("maker", &scratch.path, &[("BYTES", &most)]);
    maker.until("made");
    let full = files.create_file("/f").unwrap();
    let too_much = vec![2; free.free_bytes as usize / 2];
    assert_eq!(full.write_all_at(&too_much, 0).unwrap_err().errno(), libc::ENOSPC);
    assert!(!files.pool().orphans().unwrap().is_empty());
    maker.kill();
    full.write_all_at(&too_much, 0).unwrap();
    assert!(files.pool().orphans().unwrap().is_empty());
    assert_eq!(names(&files, "/").unwrap(), ["f"]);
    drop(full);
    // The same for inodes.
    let mut maker = Actor::start("maker", &scratch.path, &[("BYTES", "1")]);
    maker.until("made");
    let mut made = 0;
    let error = loop {
        match files.create_file(format!("/{made}")) {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, FsError::Pool(PoolError::NoFreeInode { .. })), "{error}");
    maker.kill();
    files.create_file("/one more").unwrap();
    assert_sound(files.pool());
}
