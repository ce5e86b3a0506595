//! Permissions, owners, times, attributes.

use std::fs::{self, File, FileTimes, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use aquifer_fuse::Cache;
use rustix::fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr};

use crate::mounted::observed::Log;
use crate::mounted::place::Place;

/// A user other than the owner, in a group of its own.
const OTHER: u32 = 12345;

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Runs a command of the shell in a directory as another user, and returns its status.
fn as_other(at: &Path, command: &str) -> Option<i32> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(at).uid(OTHER).gid(OTHER);
    shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    shell.status().ok().and_then(|status| status.code())
}

pub fn modes(at: &Path, log: &mut Log) {
    fs::write(at.join("f"), "text").expect("a new file");
    for mode in [0o600, 0o4755, 0o2755, 0o1777, 0o6777, 0, 0o644] {
        log.result("chmod", set_mode(&at.join("f"), mode));
        log.stat(&at.join("f"));
    }
    fs::create_dir(at.join("d")).expect("a new directory");
    set_mode(&at.join("d"), 0o2775).expect("its owner");
    chown(at.join("d"), None, Some(OTHER)).expect("root");
    fs::write(at.join("d/f"), "").expect("a new file");
    fs::create_dir(at.join("d/e")).expect("a new directory");
    log.stat(&at.join("d/f"));
    log.stat(&at.join("d/e"));
    // Permissions are checked.
    set_mode(at, 0o755).expect("its owner");
    set_mode(&at.join("f"), 0o600).expect("its owner");
    log.note("read of others", as_other(at, "cat f"));
    set_mode(&at.join("f"), 0o604).expect("its owner");
    log.note("read of others", as_other(at, "cat f"));
    log.note("write of others", as_other(at, "echo >> f"));
    log.note("create of others", as_other(at, "touch new"));
    set_mode(at, 0o1777).expect("its owner");
    log.note("create of others", as_other(at, "umask 027; touch new; mkdir newd"));
    log.stat(&at.join("new"));
    log.stat(&at.join("newd"));
    log.note("unlink of others", as_other(at, "rm -f f"));
    log.note("unlink of one's own", as_other(at, "rm new"));
    set_mode(at, 0o700).expect("its owner");
    log.note("walk of others", as_other(at.parent().expect("below the root"), "cat modes/d/f"));
    set_mode(at, 0o755).expect("its owner");
}

pub fn owners(at: &Path, log: &mut Log) {
    fs::write(at.join("f"), "text").expect("a new file");
    set_mode(&at.join("f"), 0o6755).expect("its owner");
    log.result("chown", chown(at.join("f"), Some(OTHER), Some(OTHER)));
    log.stat(&at.join("f"));
    log.result("chown of the group", chown(at.join("f"), None, Some(7)));
    log.stat(&at.join("f"));
    set_mode(at, 0o755).expect("its owner");
    log.note("chown of others", as_other(at, "chown 0 f"));
    log.note("chmod of the owner", as_other(at, "chmod 611 f"));
    log.stat(&at.join("f"));
    std::os::unix::fs::symlink("f", at.join("s")).expect("a new link");
    log.result("lchown", std::os::unix::fs::lchown(at.join("s"), Some(3), Some(4)));
    log.stat(&at.join("s"));
}

/// Copies one file onto the start of another inside the file system, as another user.
fn copied_as_other(at: &Path) -> io::Result<usize> {
    let from = File::open(at.join("g"))?;
    let to = File::options().write(true).open(at.join("f"))?;
    let copy = || {
        // Of this thread alone, which ends here.
        let other = rustix::process::Uid::from_raw(OTHER);
        rustix::thread::set_thread_res_uid(other, other, other)?;
        Ok(rustix::fs::copy_file_range(&from, None, &to, None, 1)?)
    };
    std::thread::scope(|scope| scope.spawn(copy).join().expect("no panic"))
}

pub fn set_id_bits(at: &Path, log: &mut Log) {
    set_mode(at, 0o777).expect("its owner");
    for (mode, command) in [
        (0o6777, "printf x >> f"),
        (0o6767, "printf x >> f"),
        (0o6777, "truncate -s 1 f"),
        (0o6777, ": > f"),
        (0o6777, "fallocate -l 8192 f"),
        (0o6777, "chgrp 12345 f"),
    ] {
        fs::write(at.join("f"), "text").expect("root");
        chown(at.join("f"), Some(OTHER), Some(0)).expect("root");
        set_mode(&at.join("f"), mode).expect("root");
        log.note(command, as_other(at, command));
        log.stat(&at.join("f"));
    }
    fs::write(at.join("g"), "more").expect("root");
    for mode in [0o4777, 0o6777, 0o6767] {
        set_mode(&at.join("f"), mode).expect("root");
        log.result("copy_file_range", copied_as_other(at));
        log.stat(&at.join("f"));
    }
    // Root keeps them.
    set_mode(&at.join("g"), 0o6777).expect("root");
    fs::write(at.join("g"), "TEXT").expect("root");
    log.stat(&at.join("g"));
}

type Change = fn(&Path);

/// The kernel runs a program by what it has cached of its mode.
pub fn a_program_that_others_change_runs_as_its_owner_no_more() {
    for cache in [Cache::WriteBack, Cache::WriteThrough] {
        let Some(place) = Place::mount(64 << 20, cache) else { return };
        let at = place.in_pool("set-id");
        set_mode(&at, 0o777).expect("its owner");
        fs::write(at.join("g"), "\x7f").expect("a new file");
        let changes: [(&str, Change); 4] = [
            ("write", |at| assert_eq!(as_other(at, "printf x >> f"), Some(0))),
            ("truncate", |at| assert_eq!(as_other(at, "truncate -s +1 f"), Some(0))),
            ("fallocate", |at| assert_eq!(as_other(at, "fallocate -l 1048576 f"), Some(0))),
            ("copy", |at| assert_eq!(copied_as_other(at).ok(), Some(1))),
        ];
        for (name, change) in changes {
            let _ = fs::remove_file(at.join("f"));
            fs::copy("/usr/bin/id", at.join("f")).expect("there is room");
            set_mode(&at.join("f"), 0o4777).expect("root");
            let user = || as_other(&at, "test $(./f -u) = 0");
            assert_eq!(user(), Some(0), "{name}");
            change(&at);
            assert_eq!(user(), Some(1), "{name}");
        }
        place.unmount();
    }
}

pub fn times(at: &Path, log: &mut Log) {
    let path = at.join("f");
    fs::write(&path, "text").expect("a new file");
    let file = File::options().write(true).open(&path).expect("it is there");
    for (seconds, nanoseconds) in [(0, 1), (1_700_000_000, 999_999_999), (4_000_000_000, 5)] {
        let time = UNIX_EPOCH + Duration::new(seconds, nanoseconds);
        let times =
            FileTimes::new().set_modified(time).set_accessed(time - Duration::from_nanos(1));
        log.result("set", file.set_times(times));
        let stat = fs::metadata(&path).expect("it is there");
        log.note("mtime", (stat.mtime(), stat.mtime_nsec()));
        log.note("atime", (stat.atime(), stat.atime_nsec()));
        let changed = Duration::new(stat.ctime() as u64, stat.ctime_nsec() as u32);
        log.note("ctime is now", changed > Duration::from_secs(1_700_000_001));
    }
    // A write moves the time, also one that the kernel keeps for later.
    use std::io::Write;
    (&file).write_all(b"more").expect("it is open for that");
    let written = fs::metadata(&path).expect("it is there");
    log.note("after a write", written.mtime() < 4_000_000_000);
    drop(file);
    let closed = fs::metadata(&path).expect("it is there");
    log.note("the same when closed", written.modified().ok() == closed.modified().ok());
    let before = fs::metadata(at).expect("it is there").modified().expect("it has one");
    fs::rename(&path, at.join("g")).expect("it is there");
    let after = fs::metadata(at).expect("it is there").modified().expect("it has one");
    log.note("of the directory", after >= before);
    log.note("created", fs::metadata(at.join("g")).and_then(|stat| stat.created()).is_ok());
}

fn value(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let mut value = [0; 4096];
    let len = getxattr(path, name, &mut value)?;
    Ok(value[..len].to_vec())
}

pub fn attributes(at: &Path, log: &mut Log) {
    let path = at.join("f");
    fs::write(&path, "text").expect("a new file");
    let set = |name: &str, value: &[u8], flags| -> io::Result<()> {
        Ok(setxattr(&path, name, value, flags)?)
    };
    // tmpfs has user attributes since Linux 6.6.
    if set("user.probe", b"", XattrFlags::empty()).is_err() {
        return;
    }
    log.result("get nothing", value(&path, "user.colour"));
    log.result("replace nothing", set("user.colour", b"red", XattrFlags::REPLACE));
    log.result("create", set("user.colour", b"red", XattrFlags::CREATE));
    log.result("create again", set("user.colour", b"red", XattrFlags::CREATE));
    log.result("set", set("user.colour", b"green", XattrFlags::empty()));
    log.result("get", value(&path, "user.colour"));
    log.result("empty", set("user.empty", b"", XattrFlags::empty()));
    log.result("get empty", value(&path, "user.empty"));
    log.result("trusted", set("trusted.key", &[7; 500], XattrFlags::empty()));
    log.result("get trusted", value(&path, "trusted.key"));
    log.result(
        "no room",
        Ok(getxattr(&path, "user.colour", &mut [0_u8; 2]).map_err(|errno| errno.raw_os_error())),
    );
    log.result("length", getxattr(&path, "user.colour", &mut [0_u8; 0]).map_err(Into::into));
    log.result("namespace", set("nonsense.key", b"x", XattrFlags::empty()));
    log.result("long name", set(&format!("user.{}", "n".repeat(251)), b"", XattrFlags::empty()));
    let mut names = vec![0_u8; 4096];
    let len = listxattr(&path, &mut names).unwrap_or(0);
    let mut names: Vec<_> =
        names[..len].split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
    names.sort();
    log.note("list", names);
    log.result("remove", removexattr(&path, "user.colour").map_err(Into::into));
    log.result("remove again", removexattr(&path, "user.colour").map_err(Into::into));
    log.result("get removed", value(&path, "user.colour"));
}

/// An access control list as the system stores it: user, user 12345, group, mask, others.
fn list(user: u16, other_user: u16, group: u16, mask: u16, others: u16) -> Vec<u8> {
    let none = u32::MAX;
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in [
        (1_u16, user, none),
        (2, other_user, OTHER),
        (4, group, none),
        (16, mask, none),
        (32, others, none),
    ] {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

pub fn lists(at: &Path, log: &mut Log) {
    const ACCESS: &str = "system.posix_acl_access";
    const DEFAULT: &str = "system.posix_acl_default";
    let path = at.join("f");
    fs::write(&path, "text").expect("a new file");
    set_mode(at, 0o755).expect("its owner");
    set_mode(&path, 0o600).expect("its owner");
    log.note("read without a list", as_other(at, "cat f"));
    let set = |path: &Path, name: &str, value: &[u8]| -> io::Result<()> {
        Ok(setxattr(path, name, value, XattrFlags::empty())?)
    };
    log.result("set", set(&path, ACCESS, &list(6, 4, 0, 4, 0)));
    log.stat(&path);
    log.result("get", value(&path, ACCESS));
    log.note("read with a list", as_other(at, "cat f"));
    log.note("write with a list", as_other(at, "echo >> f"));
    log.result("chmod", set_mode(&path, 0o600));
    log.result("get", value(&path, ACCESS));
    log.note("read behind the mask", as_other(at, "cat f"));
    log.result("no list", set(&path, ACCESS, b"nonsense"));
    log.result("a default of a file", set(&path, DEFAULT, &list(6, 4, 0, 4, 0)));
    // Inheritance takes the place of the umask.
    fs::create_dir(at.join("d")).expect("a new directory");
    log.result("default", set(&at.join("d"), DEFAULT, &list(7, 7, 5, 7, 0)));
    fs::write(at.join("d/f"), "").expect("a new file");
    fs::create_dir(at.join("d/e")).expect("a new directory");
    log.stat(&at.join("d/f"));
    log.stat(&at.join("d/e"));
    log.result("inherited", value(&at.join("d/f"), ACCESS));
    log.result("inherited", value(&at.join("d/e"), DEFAULT));
    log.result("remove", removexattr(&path, ACCESS).map_err(Into::into));
    log.result("get removed", value(&path, ACCESS));
}
