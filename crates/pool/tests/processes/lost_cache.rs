//! The page cache is lost while the machine keeps running: a file system is shut down, its device
//! removed or attached again. Shared memory survives that, and the boot id is the same.
//!
//! Needs root, loop devices and ext4; everything is in a private mount namespace.

use std::path::PathBuf;

use crate::common::contents;
use crate::disk::Disk;
use aquifer_pool::media::ByteRange;
use aquifer_pool::{Mutant, Pool, PoolOptions};
use aquifer_testkit::child::{self, Reaped};

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("shut down", shut_down),
    ("attached anew", attached_anew),
    ("only killed", only_killed),
    ("boot only", boot_only),
    ("writer on a disk", write_until_killed),
];

fn options(mutant: Option<Mutant>) -> PoolOptions {
    Pool::options().background(false).mutant(mutant)
}

/// Fills the pool with an object, durably, destroys it, and writes another in its place, of which
/// only the log becomes durable.
fn write_until_killed() {
    let path = PathBuf::from(std::env::var_os("POOL").unwrap());
    let mutant = std::env::var_os("MISTAKEN").map(|_| Mutant::LifeOfMachine);
    let pool = options(mutant).open(path).unwrap();
    let pages = pool.info().unwrap().largest_free_pages;
    crate::common::create(&pool, b"kept", 1).unwrap();
    crate::common::write(&pool, b"removed", pages - 1, 0xdead).unwrap();
    pool.sync().unwrap();
    pool.checkpoint().unwrap();
    crate::common::destroy(&pool, b"removed").unwrap();
    pool.checkpoint().unwrap();
    crate::common::write(&pool, b"new", pages / 2, 5).unwrap();
    let log = pool.layout().log();
    let media = pool.media();
    media.write_back(&[ByteRange { len_bytes: log.len_bytes, ..log }]).unwrap();
    media.flush().unwrap();
    println!("written");
    std::io::Write::flush(&mut std::io::stdout()).unwrap();
    loop {
        std::thread::park();
    }
}

/// A pool on a disk whose writer was killed.
fn written(mutant: Option<Mutant>) -> Option<Disk> {
    let disk = Disk::new(&[])?;
    let path = disk.pool();
    drop(crate::common::small(options(None)).create(&path, 16 << 20).unwrap());
    let mut command = child::command("writer on a disk");
    command.env("POOL", &path).envs(mutant.map(|_| ("MISTAKEN", "1")));
    let mut writer = Reaped(command.spawn().unwrap());
    {
        use std::io::{BufRead, BufReader};
        let output = BufReader::with_capacity(1, writer.0.stdout.as_mut().unwrap());
        let has_written = output.lines().any(|line| line.unwrap() == "written");
        let said = |writer: &mut Reaped| std::io::read_to_string(writer.0.stderr.take().unwrap());
        assert!(has_written, "{:?}", said(&mut writer));
    }
    writer.kill();
    Some(disk)
}

/// What the next process finds: the stamps of the object whose bytes were not durable, if it is
/// present.
fn found(disk: &Disk, mutant: Option<Mutant>) -> Option<Vec<u64>> {
    let pool = options(mutant).open(disk.pool()).unwrap();
    let mut found = contents(&pool).unwrap();
    assert!(found.contains_key(b"kept".as_slice()) && !found.contains_key(b"removed".as_slice()));
    found.remove(b"new".as_slice())
}

fn shut_down() {
    let Some(disk) = written(None) else { return };
    disk.shut_down();
    assert!(disk.mount());
    assert_eq!(found(&disk, None), None, "its bytes are lost");
    drop(disk);
}

fn boot_only() {
    let mutant = Some(Mutant::LifeOfMachine);
    let Some(disk) = written(mutant) else { return };
    disk.shut_down();
    assert!(disk.mount());
    let found = found(&disk, mutant).expect("the mistake is made");
    assert!(found.contains(&0xdead), "the bytes of a removed object would have been seen");
}

fn attached_anew() {
    let Some(mut disk) = written(None) else { return };
    disk.shut_down();
    disk.attach_anew();
    assert!(disk.mount());
    assert_eq!(found(&disk, None), None, "its bytes are lost");
}

fn only_killed() {
    let Some(disk) = written(None) else { return };
    let new = found(&disk, None).expect("nothing is lost");
    assert!(new.iter().all(|stamp| *stamp == 5));
}

#[test]
fn what_a_file_system_that_was_shut_down_has_lost_does_not_count() {
    child::succeeds_with_mounts("shut down");
}

#[test]
fn what_a_device_that_was_attached_anew_has_lost_does_not_count() {
    child::succeeds_with_mounts("attached anew");
}

#[test]
fn what_killed_processes_have_written_counts_while_the_file_system_is_there() {
    child::succeeds_with_mounts("only killed");
}

#[test]
fn a_life_that_is_the_machines_shows_removed_bytes() {
    child::succeeds_with_mounts("boot only");
}
