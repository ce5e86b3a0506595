//! The content of files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use aquifer_fuse::Cache;
use aquifer_sys::memory::{self, Protection};
use aquifer_testkit::child;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use crate::mounted::observed::{Log, sum};
use crate::mounted::place::Place;

const PAGE: u64 = 4096;

fn open(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .expect("a file")
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|index| ((index * 31 + seed) ^ (index >> 8)) as u8).collect()
}

pub fn reads_and_writes(at: &Path, log: &mut Log) {
    let file = open(&at.join("f"));
    for (offset, len) in [(0, 1), (1, PAGE - 1), (PAGE - 1, 2), (10_000, 3 << 20), (5, 5)] {
        let written = file.write_at(&pattern(len as usize, offset as usize), offset);
        log.result("write", written);
    }
    for (offset, len) in [(0, 100), (PAGE - 3, 10_000), (3 << 20, 1 << 20), (100 << 20, 5)] {
        let mut bytes = vec![0; len];
        let got = log.result("read", file.read_at(&mut bytes, offset)).unwrap_or(0);
        log.note("bytes", sum(&bytes[..got]));
    }
    log.result("read of what is open to write", {
        let only = OpenOptions::new().write(true).open(at.join("f")).expect("it is there");
        only.read_at(&mut [0; 1], 0)
    });
    log.result("whole", fs::read(at.join("f")).map(|bytes| sum(&bytes)));
    log.result(
        "truncated when opened",
        File::create(at.join("f")).and_then(|file| file.metadata()).map(|stat| stat.len()),
    );
}

pub fn holes(at: &Path, log: &mut Log) {
    let file = open(&at.join("f"));
    log.result("hole", file.set_len(1 << 30));
    for page in [3_u64, 4, 1000] {
        log.result("write", file.write_at(&pattern(PAGE as usize, 1), page * PAGE));
    }
    log.result("sync", file.sync_all());
    log.note("blocks", file.metadata().map(|stat| stat.blocks()).ok());
    for whence in [SeekFrom::Data(1 << 30), SeekFrom::Hole(1 << 30), SeekFrom::End(-1)] {
        log.result("seek", seek(&file, whence).map_err(Into::into));
    }
    let mut bytes = vec![1; 3 * PAGE as usize];
    log.result("read", file.read_at(&mut bytes, 2 * PAGE));
    log.note("bytes", sum(&bytes));
    log.result("shorter", file.set_len(2000 * PAGE));
}

/// What a program copies that asks where a file has data, while nothing was written back yet.
pub fn copies_by_seeking(at: &Path, log: &mut Log) {
    let file = open(&at.join("f"));
    let len = 1 << 20;
    log.result("hole", file.set_len(len as u64));
    log.result("write", file.write_at(&pattern(5000, 8), 3 * PAGE + 100));
    log.note("copy", copied(&at.join("f")));
    mapped(&file, len, |start| {
        // SAFETY: inside the mapping.
        unsafe { start.add(50 * PAGE as usize).write_bytes(3, 100) };
        log.note("copy", copied(&at.join("f")));
    });
    log.result("append", file.write_at(&pattern(100, 9), len as u64 + 10 * PAGE));
    // What a program archives that takes a file without blocks for a hole.
    let other = open(&at.join("g"));
    log.result("write", other.write_at(&pattern(100, 10), 0));
    log.note("has blocks", fs::metadata(at.join("g")).map(|stat| stat.blocks() > 0).ok());
    log.note("copy", copied(&at.join("f")));
}

fn copied(path: &Path) -> u64 {
    let file = File::open(path).expect("it is there");
    let mut copy = vec![0; file.metadata().expect("it is open").len() as usize];
    let mut end = 0;
    while let Ok(start) = seek(&file, SeekFrom::Data(end)) {
        end = seek(&file, SeekFrom::Hole(start)).expect("a hole is behind data");
        let piece = &mut copy[start as usize..end as usize];
        file.read_exact_at(piece, start).expect("it has these bytes");
    }
    sum(&copy)
}

pub fn space(at: &Path, log: &mut Log) {
    let file = open(&at.join("f"));
    log.result("write", file.write_at(&pattern(64 << 10, 2), 0));
    let mut with = |what: &str, flags, offset, len| {
        log.result(what, fallocate(&file, flags, offset, len).map_err(Into::into));
        log.note("length", file.metadata().map(|stat| stat.len()).ok());
        log.note("content", fs::read(at.join("f")).map(|bytes| sum(&bytes)).ok());
    };
    with("longer", FallocateFlags::empty(), 0, 128 << 10);
    with("behind the end", FallocateFlags::KEEP_SIZE, 0, 256 << 10);
    with("punch", FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, PAGE, 2 * PAGE);
    with("punch unaligned", FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 20_000, 10_001);
    with("punch without keeping", FallocateFlags::PUNCH_HOLE, 0, PAGE);
    with("nothing", FallocateFlags::empty(), 0, 0);
}

pub fn lengths(at: &Path, log: &mut Log) {
    let file = open(&at.join("f"));
    log.result("write", file.write_at(&pattern(10_000, 3), 0));
    for len in [5_000, 20_000, 4_097, 4_096, 1, 0, 12_345] {
        log.result("set", file.set_len(len));
        log.result("content", fs::read(at.join("f")).map(|bytes| (bytes.len(), sum(&bytes))));
    }
    log.result("write behind the end", file.write_at(b"end", 30_000));
    log.result("content", fs::read(at.join("f")).map(|bytes| (bytes.len(), sum(&bytes))));
    log.result(
        "too long",
        file.set_len(u64::MAX / 2 + 1).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL)),
    );
    log.result("a directory", fs::create_dir(at.join("d")));
    log.result(
        "has none",
        rustix::fs::open(at.join("d"), rustix::fs::OFlags::WRONLY, rustix::fs::Mode::empty())
            .map(drop)
            .map_err(Into::into),
    );
}

pub fn appends(at: &Path, log: &mut Log) {
    let append =
        || OpenOptions::new().append(true).create(true).open(at.join("f")).expect("a file");
    let (mut one, mut two) = (append(), append());
    for turn in 0..100 {
        writeln!(one, "one {turn}").expect("there is room");
        writeln!(two, "two {turn}").expect("there is room");
    }
    log.result("at an offset all the same", one.write_at(b"the end\n", 0));
    log.result("content", fs::read_to_string(at.join("f")));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let mut file = append();
            scope.spawn(move || {
                for turn in 0..500 {
                    // One write(2) a line.
                    file.write_all(format!("{thread} {turn}\n").as_bytes()).expect("there is room");
                }
            });
        }
    });
    let text = fs::read_to_string(at.join("f")).expect("text");
    log.note("lines", text.lines().count());
    // In any order: compared by their number.
    one.set_len(0).expect("it is open to write");
}

const PROCESSES: usize = 8;
const LINES: usize = 10_000;

pub fn append_lines() {
    let (path, name) = (std::env::var("FILE").expect("told"), std::process::id());
    let mut file = OpenOptions::new().append(true).open(path).expect("it is there");
    for line in 0..LINES {
        file.write_all(format!("{name} {line}\n").as_bytes()).expect("there is room");
    }
}

pub fn appends_of_many_processes_are_all_there() {
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let Some(place) = Place::mount(64 << 20, cache) else { return };
        let path = place.root().join("lines");
        File::create(&path).expect("a new file");
        let start = |_| {
            child::Reaped(
                child::command("append-to-mounted").env("FILE", &path).spawn().expect("it starts"),
            )
        };
        let children: Vec<_> = (0..PROCESSES).map(start).collect();
        for mut child in children {
            assert!(child.0.wait().expect("it is ours").success());
        }
        let text = fs::read_to_string(&path).expect("text");
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        lines.dedup();
        assert_eq!(lines.len(), PROCESSES * LINES);
        let unmounted = place.unmount();
        unmounted.assert_sound();
        let files = aquifer_fs::Files::open(unmounted.pool()).expect("the pool opens");
        assert_eq!(files.read_to_string("/lines").expect("it was written back"), text);
    }
}

/// Maps a file and lets `act` access its bytes.
fn mapped<T>(file: &File, len: usize, act: impl FnOnce(*mut u8) -> T) -> T {
    let start = memory::map_file(len, Protection::ReadWrite, file.as_fd(), 0).expect("a mapping");
    let result = act(start);
    // SAFETY: mapped above, and not used any more.
    unsafe { memory::unmap(start, len) }.expect("it is mapped");
    result
}

pub fn mappings(at: &Path, log: &mut Log) {
    let file = open(&at.join("f"));
    let len = 64 << 10;
    log.result("write", file.write_at(&pattern(len, 4), 0));
    mapped(&file, len, |start| {
        // SAFETY: inside the mapping, which nothing else changes meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts(start, len) };
        log.note("bytes", sum(bytes));
        // SAFETY: inside the mapping.
        unsafe { start.add(5000).write_bytes(7, 9000) };
    });
    log.result("read", fs::read(at.join("f")).map(|bytes| sum(&bytes)));
    mapped(&file, len, |start| {
        file.write_at(b"through the file", 100).expect("it is open to write");
        let mut seen = [0; 16];
        // SAFETY: inside the mapping.
        unsafe { start.add(100).copy_to(seen.as_mut_ptr(), seen.len()) };
        log.note("seen", String::from_utf8_lossy(&seen).into_owned());
        // SAFETY: inside the mapping.
        unsafe { start.write(9) };
        // SAFETY: mapped, and starts at a page.
        log.result("msync", unsafe { memory::sync(start, len) });
    });
    log.result("read", fs::read(at.join("f")).map(|bytes| sum(&bytes)));
    // A removed file stays mapped.
    let removed = open(&at.join("g"));
    removed.set_len(PAGE).expect("it is open to write");
    mapped(&removed, PAGE as usize, |start| {
        fs::remove_file(at.join("g")).expect("it is there");
        // SAFETY: inside the mapping.
        unsafe { start.write(5) };
        let mut byte = [0];
        log.result("read", removed.read_at(&mut byte, 0));
        log.note("byte", byte);
    });
}

pub fn syncs(at: &Path, log: &mut Log) {
    let file = open(&at.join("f"));
    log.result("write", file.write_at(&pattern(100_000, 5), 0));
    log.result("fdatasync", file.sync_data());
    log.result("write", file.write_at(&pattern(100, 6), 100_000));
    log.result("fsync", file.sync_all());
    log.result("of the directory", File::open(at).and_then(|at| at.sync_all()));
    rustix::fs::sync();
    log.note("blocks", file.metadata().map(|stat| stat.blocks() >= 200).ok());
}

pub fn copies(at: &Path, log: &mut Log) {
    fs::write(at.join("f"), pattern(3_000_000, 7)).expect("a new file");
    // By `copy_file_range`, where there is one.
    log.result("copy", fs::copy(at.join("f"), at.join("g")));
    let (from, to) = (open(&at.join("f")), open(&at.join("h")));
    let (mut from_offset, mut to_offset) = (1_000_003, 17);
    let copied = rustix::fs::copy_file_range(
        &from,
        Some(&mut from_offset),
        &to,
        Some(&mut to_offset),
        500_000,
    );
    log.result("a range", copied.map_err(Into::into));
    log.note("offsets", (from_offset, to_offset));
}
