//! Names and what they refer to.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, linkat, mknodat, renameat_with,
};

use crate::mounted::observed::Log;

pub fn names(at: &Path, log: &mut Log) {
    log.result("mkdir", fs::create_dir(at.join("d")));
    log.result("mkdir again", fs::create_dir(at.join("d")));
    log.result("create", File::create_new(at.join("d/f")).map(drop));
    log.result("create again", File::create_new(at.join("d/f")).map(drop));
    log.result("create below a file", File::create(at.join("d/f/g")).map(drop));
    log.result("create below nothing", File::create(at.join("nothing/g")).map(drop));
    log.result("rmdir with names", fs::remove_dir(at.join("d")));
    log.result("rmdir of a file", fs::remove_dir(at.join("d/f")));
    log.result("unlink of a directory", fs::remove_file(at.join("d")));
    log.result("unlink of nothing", fs::remove_file(at.join("nothing")));
    log.result("open of nothing", File::open(at.join("nothing")).map(drop));
    log.result("then it is there", File::create(at.join("nothing")).map(drop));
    log.result("and opens", File::open(at.join("nothing")).map(drop));
    log.result("unlink", fs::remove_file(at.join("nothing")));
    log.result("and does not open", File::open(at.join("nothing")).map(drop));
    log.result(
        "open of a directory to write",
        fs::OpenOptions::new().write(true).open(at.join("d")).map(drop),
    );
    log.result("dots", fs::metadata(at.join("d/../d/./f")).map(|stat| stat.len()));
    for byte in 1..=255_u8 {
        if byte != b'/' && byte != b'.' {
            use std::os::unix::ffi::OsStrExt;
            let name = std::ffi::OsStr::from_bytes(std::slice::from_ref(&byte)).to_owned();
            fs::write(at.join("d").join(&name), [byte]).expect("any byte is a name");
            assert_eq!(fs::read(at.join("d").join(&name)).expect("just made"), [byte]);
        }
    }
}

pub fn renames(at: &Path, log: &mut Log) {
    for name in ["a", "b", "c"] {
        fs::write(at.join(name), name).expect("a new file");
    }
    fs::create_dir_all(at.join("d/e")).expect("a new directory");
    fs::create_dir(at.join("empty")).expect("a new directory");
    log.result("over a file", fs::rename(at.join("a"), at.join("b")));
    log.result("what is there", fs::read(at.join("b")));
    log.result("what was there", fs::read(at.join("a")));
    log.result("to itself", fs::rename(at.join("b"), at.join("b")));
    log.result("into itself", fs::rename(at.join("d"), at.join("d/e/f")));
    log.result("file over directory", fs::rename(at.join("b"), at.join("d")));
    log.result("directory over file", fs::rename(at.join("d"), at.join("b")));
    log.result("over a directory with names", fs::rename(at.join("empty"), at.join("d")));
    log.result("over an empty one", fs::rename(at.join("d"), at.join("empty")));
    log.result("nothing", fs::rename(at.join("nothing"), at.join("x")));
    log.result("into another", fs::rename(at.join("b"), at.join("empty/e/b")));
    let mut with = |what: &str, from: &str, to: &str, flags| {
        let renamed = renameat_with(CWD, at.join(from), CWD, at.join(to), flags);
        log.result(what, renamed.map_err(Into::into));
    };
    with("not over", "c", "empty/e/b", RenameFlags::NOREPLACE);
    with("to a new name", "c", "c2", RenameFlags::NOREPLACE);
    with("exchange", "c2", "empty", RenameFlags::EXCHANGE);
    with("exchange with nothing", "c2", "nothing", RenameFlags::EXCHANGE);
    with("whiteout", "empty", "w", RenameFlags::WHITEOUT);
    log.stat(&at.join("empty"));
}

pub fn long_names(at: &Path, log: &mut Log) {
    for len in [254, 255, 256, 300] {
        let name = "n".repeat(len);
        log.result(&format!("create {len}"), File::create(at.join(&name)).map(drop));
        log.result(&format!("stat {len}"), fs::metadata(at.join(&name)).map(drop));
        log.result(&format!("mkdir {len}"), fs::create_dir(at.join(format!("{}d", &name[1..]))));
    }
}

pub fn many_names(at: &Path, log: &mut Log) {
    const MANY: usize = 3000;
    let path = |index: usize| at.join(format!("a name to be listed with others {index}"));
    (0..MANY).for_each(|index| drop(File::create(path(index)).expect("a new file")));
    // While names come and go, those that stay are listed once.
    let mut seen = BTreeSet::new();
    for (turn, entry) in fs::read_dir(at).expect("a directory").enumerate() {
        let name = entry.expect("an entry").file_name();
        assert!(seen.insert(name.clone()), "{name:?} twice");
        if turn % 10 == 0 {
            fs::write(at.join(format!("comes {turn}")), "").expect("a new file");
            fs::remove_file(at.join(format!("comes {turn}"))).expect("it was made");
        }
    }
    let stay = |name: &&std::ffi::OsString| name.to_string_lossy().starts_with("a name");
    log.note("listed", seen.iter().filter(stay).count());
    (0..MANY).step_by(2).for_each(|index| fs::remove_file(path(index)).expect("it is there"));
    log.note("left", fs::read_dir(at).expect("a directory").count());
}

pub fn links(at: &Path, log: &mut Log) {
    fs::write(at.join("f"), "text").expect("a new file");
    fs::create_dir(at.join("d")).expect("a new directory");
    log.result("link", fs::hard_link(at.join("f"), at.join("d/g")));
    log.result("link over", fs::hard_link(at.join("f"), at.join("d/g")));
    log.result("link of a directory", fs::hard_link(at.join("d"), at.join("e")));
    let number = |name: &str| fs::metadata(at.join(name)).map(|stat| stat.ino()).unwrap_or(0);
    log.note("the same", number("f") == number("d/g"));
    log.stat(&at.join("f"));
    log.result("symlink", symlink("d/g", at.join("s")));
    log.result("symlink again", symlink("other", at.join("s")));
    log.result("its target", fs::read_link(at.join("s")));
    log.result("through it", fs::read_to_string(at.join("s")));
    log.result("dangling", symlink("nothing", at.join("dangling")));
    log.result("through nothing", fs::read(at.join("dangling")));
    log.result("write through it", fs::write(at.join("dangling"), "made"));
    log.result("loop", symlink("loop", at.join("loop")));
    log.result("through the loop", fs::read(at.join("loop")));
    log.result("a long target", symlink("x/".repeat(2000), at.join("long")));
    log.result("a longer target", symlink("x".repeat(4096), at.join("longer")));
    log.result("a link of a link", fs::hard_link(at.join("s"), at.join("s2")));
    log.stat(&at.join("s"));
    log.result("unlink", fs::remove_file(at.join("f")));
    log.stat(&at.join("d/g"));
}

pub fn special_files(at: &Path, log: &mut Log) {
    let mode = Mode::from_raw_mode(0o640);
    for (name, kind, device) in [
        ("fifo", FileType::Fifo, 0),
        ("socket", FileType::Socket, 0),
        ("char", FileType::CharacterDevice, libc::makedev(1, 3)),
        ("block", FileType::BlockDevice, libc::makedev(259, 0x1234)),
        ("file", FileType::RegularFile, 0),
    ] {
        let made = mknodat(CWD, at.join(name), kind, mode, device);
        log.result(name, made.map_err(Into::into));
        log.stat(&at.join(name));
    }
    // The file system is mounted without devices.
    log.result("open a device", File::open(at.join("char")).map(drop));
    let (from, to) = (at.join("fifo"), at.join("fifo"));
    let reader = std::thread::spawn(move || fs::read(from));
    log.result("write to a fifo", fs::write(to, "through"));
    log.result("read from a fifo", reader.join().expect("no panic"));
}

pub fn removed_files(at: &Path, log: &mut Log) {
    fs::write(at.join("f"), "text").expect("a new file");
    let mut file = fs::OpenOptions::new().read(true).write(true).open(at.join("f")).expect("it is");
    log.result("unlink", fs::remove_file(at.join("f")));
    log.note("links", file.metadata().map(|stat| (stat.nlink(), stat.len())).ok());
    log.result("write", file.write_all(b"TEXT, and more"));
    log.result("rewind", file.rewind());
    let mut text = String::new();
    log.result("read", file.read_to_string(&mut text));
    log.note("text", text);
    log.result("shorten", file.set_len(3));
    log.result("sync", file.sync_all());
    let again = fs::read(format!("/proc/self/fd/{}", file.as_raw_fd()));
    log.result("read again", again);
    // Another file has the name meanwhile.
    fs::write(at.join("f"), "another").expect("a new file");
    log.result("still there", file.metadata().map(|stat| (stat.nlink(), stat.len())));
    drop(file);
    log.result("the other", fs::read_to_string(at.join("f")));
    // Replaced by a rename.
    let replaced = File::open(at.join("f")).expect("it is there");
    fs::write(at.join("g"), "new").expect("a new file");
    fs::rename(at.join("g"), at.join("f")).expect("both are files");
    let mut old = String::new();
    log.result("read what was replaced", (&replaced).read_to_string(&mut old));
    log.note("links", replaced.metadata().map(|stat| stat.nlink()).ok());
    // A link brings no removed file back.
    let dead = format!("/proc/self/fd/{}", replaced.as_raw_fd());
    let linked = linkat(CWD, dead.as_str(), CWD, at.join("back"), AtFlags::SYMLINK_FOLLOW);
    log.result("link", linked.map_err(Into::into));
}

pub fn removed_directories(at: &Path, log: &mut Log) {
    fs::create_dir(at.join("d")).expect("a new directory");
    let directory = File::open(at.join("d")).expect("it is there");
    log.result("rmdir", fs::remove_dir(at.join("d")));
    log.result("stat", directory.metadata().map(|stat| stat.mode()));
    let own = format!("/proc/self/fd/{}", directory.as_raw_fd());
    log.result("create", File::create(format!("{own}/f")).map(drop));
    log.result("mkdir", fs::create_dir(format!("{own}/e")));
    log.result("list", fs::read_dir(own).map(|names| names.count()));
    // Another one has the name, and perhaps would have had the number.
    fs::create_dir(at.join("d")).expect("a new directory");
    fs::write(at.join("d/f"), "text").expect("a new file");
    log.result("stat", directory.metadata().map(|stat| stat.is_dir()));
    log.note(
        "another",
        fs::metadata(at.join("d")).map(|stat| stat.ino()).ok()
            != directory.metadata().map(|stat| stat.ino()).ok(),
    );
}

pub fn unnamed_files(at: &Path, log: &mut Log) {
    let open = |mode: i32| {
        fs::OpenOptions::new().read(true).write(true).mode(0o640).custom_flags(mode).open(at)
    };
    let mut file = match open(libc::O_TMPFILE) {
        Ok(file) => file,
        Err(error) => {
            log.result::<()>("open", Err(error));
            return;
        }
    };
    log.result("write", file.write_all(b"text"));
    log.note("links", file.metadata().map(|stat| (stat.nlink(), stat.len(), stat.mode())).ok());
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    let linked = linkat(CWD, own.as_str(), CWD, at.join("named"), AtFlags::SYMLINK_FOLLOW);
    log.result("link", linked.map_err(Into::into));
    log.result("read", fs::read_to_string(at.join("named")));
    drop(file);
    log.stat(&at.join("named"));
    let Ok(mut gone) = open(libc::O_TMPFILE) else { return };
    log.result("write", gone.write_all(b"not to stay"));
    drop(gone);
    let Ok(exclusive) = open(libc::O_TMPFILE | libc::O_EXCL) else { return };
    let own = format!("/proc/self/fd/{}", exclusive.as_raw_fd());
    let linked = linkat(CWD, own.as_str(), CWD, at.join("never"), AtFlags::SYMLINK_FOLLOW);
    log.result("link of an exclusive one", linked.map_err(Into::into));
    let below = rustix::fs::open(at.join("named"), OFlags::TMPFILE | OFlags::WRONLY, Mode::empty());
    log.result("below a file", below.map(drop).map_err(Into::into));
    fs::DirBuilder::new().mode(0o700).create(at.join("d")).expect("a new directory");
}
