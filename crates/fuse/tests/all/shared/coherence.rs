//! What one side has done, the other sees at its next call.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aquifer_fs::FsError;
use aquifer_fuse::{Cache, MountError};
use aquifer_testkit::child;
use rustix::fs::{CWD, FileType, Mode, OFlags, RenameFlags, fstat, mknodat, open, renameat_with};

use crate::kept::place::{How, Place};
use crate::shared::{both, end, mount_again};

/// Where the children of this test append.
const APPEND_TO: &str = "AQUIFER_APPEND_TO";
const LINES: usize = 500;

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).expect("a directory");
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
}

fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

pub fn each_side_sees_at_once_what_the_other_did() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("f");
    fs::write(&at, "from the mount").expect("a new file");
    assert_eq!(files.read_to_string("/f").expect("it is there"), "from the mount");
    let there = File::options().read(true).write(true).open(&at).expect("it is there");
    let here = files.options().read(true).write(true).open("/f").expect("it is there");
    let len = || there.metadata().expect("it is open").len();
    let mut buffer = [0; 100];
    let mut read_there = |at| {
        let got = there.read_at(&mut buffer, at).expect("it is open");
        String::from_utf8_lossy(&buffer[..got]).into_owned()
    };
    for round in 0..20_u64 {
        // In place, longer, shorter; read by an open descriptor, by its path, and looked at.
        here.write_all_at(format!("{round:04}").as_bytes(), 5).expect("there is room");
        assert_eq!(read_there(0), format!("from {round:04}mount"));
        here.set_len(40 + round).expect("there is room");
        assert_eq!(len(), 40 + round);
        assert_eq!(fs::read(&at).expect("it is there").len() as u64, 40 + round);
        here.write_all_at(b"end", 40 + round).expect("there is room");
        assert_eq!(read_there(40 + round), "end");
        here.set_len(14).expect("shorter");
        assert_eq!((read_there(14), len()), (String::new(), 14));
        there.write_all_at(b"mount", 9).expect("there is room");
        there.write_all_at(format!("{round:06}").as_bytes(), 70).expect("there is room");
        assert_eq!(here.metadata().expect("it is open").len(), 76);
        let mut bytes = [0; 6];
        here.read_exact_at(&mut bytes, 70).expect("it is as long");
        assert_eq!(bytes, format!("{round:06}").as_bytes());
        there.set_len(14).expect("shorter");
        assert_eq!(here.metadata().expect("it is open").len(), 14);
    }
    files.set_permissions("/f", fs::Permissions::from_mode(0o600)).expect("its owner");
    assert_eq!(fs::metadata(&at).expect("it is there").mode() & 0o777, 0o600);
    fs::set_permissions(&at, fs::Permissions::from_mode(0o640)).expect("its owner");
    assert_eq!(files.metadata("/f").expect("it is there").mode() & 0o777, 0o640);
    files.set_attribute("/f", "user.a", b"1", Default::default()).expect("there is room");
    let mut value = [0; 8];
    let got = rustix::fs::getxattr(&at, "user.a", &mut value).expect("it was set");
    assert_eq!(&value[..got], b"1");
    drop((there, here, files));
    end(place);
}

pub fn names_change_on_both_sides() {
    let Some((place, files)) = both() else { return };
    let at = |name: &str| place.root().join(name);
    for round in 0..20 {
        // Looked for on the other side before it is there: that there is none is not remembered.
        assert_eq!(errno(fs::metadata(at("new"))), Some(libc::ENOENT));
        files.create_dir("/new").expect("it is not there");
        assert!(fs::metadata(at("new")).expect("it is there").is_dir());
        assert_eq!(names(&place.root()), BTreeSet::from(["new".to_owned()]));
        let one = format!("new/{round}");
        fs::write(at(&one), one.as_bytes()).expect("a new file");
        files.rename(format!("/{one}"), "/new/other").expect("it is there");
        assert_eq!(errno(File::open(at(&one))), Some(libc::ENOENT));
        assert_eq!(fs::read_to_string(at("new/other")).expect("it is there"), one);
        // Replaced: the same name is another file.
        files.write("/new/next", b"next").expect("a new file");
        files.rename("/new/next", "/new/other").expect("it is there");
        assert_eq!(fs::read_to_string(at("new/other")).expect("it is there"), "next");
        fs::hard_link(at("new/other"), at("new/linked")).expect("a new name");
        assert_eq!(files.metadata("/new/linked").expect("it is there").nlink(), 2);
        files.remove_file("/new/other").expect("it is there");
        assert_eq!(fs::metadata(at("new/linked")).expect("it is there").nlink(), 1);
        files.remove_file("/new/linked").expect("it is there");
        assert_eq!(names(&at("new")), BTreeSet::new());
        assert_eq!(errno(fs::remove_file(at("new/linked"))), Some(libc::ENOENT));
        fs::remove_dir(at("new")).expect("it is empty");
        assert!(matches!(files.metadata("/new"), Err(FsError::NotFound { .. })));
    }
    drop(files);
    end(place);
}

pub fn a_number_that_is_used_again_is_another_inode() {
    let Some((place, files)) = both() else { return };
    let at = |name: &str| place.root().join(name);
    for is_directory in [false, true] {
        for _ in 0..100 {
            // Never open, so that nothing keeps it.
            let mode = Mode::from_raw_mode(0o700);
            if is_directory {
                fs::create_dir(at("old")).expect("a new directory");
            } else {
                mknodat(CWD, at("old"), FileType::RegularFile, mode, 0).expect("a new file");
            }
            let old = open(at("old"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
            let old = old.expect("it is there");
            let number = fstat(&old).expect("it is there").st_ino;
            if is_directory {
                files.remove_dir("/old").expect("it is empty");
            } else {
                files.remove_file("/old").expect("it is there");
            }
            // Numbers that the kernel has just forgotten may come first.
            let mut others = Vec::new();
            loop {
                files.write("/new", b"secret").expect("the number is free");
                if files.metadata("/new").expect("it is there").ino() == number {
                    break;
                }
                others.push(format!("/{}", others.len()));
                files.rename("/new", &others[others.len() - 1]).expect("it is there");
            }
            files.set_permissions("/new", fs::Permissions::from_mode(0o600)).expect("its owner");
            // While the kernel hears of the next one, and later.
            let held = format!("/proc/self/fd/{}", old.as_raw_fd());
            let change = || fs::set_permissions(&held, fs::Permissions::from_mode(0o666));
            std::thread::scope(|threads| {
                threads.spawn(|| fs::metadata(at("new")).expect("it is there"));
                (0..20).for_each(|_| drop(change()));
            });
            assert_eq!(errno(change()), Some(libc::ESTALE));
            assert_eq!(fs::metadata(at("new")).expect("it is there").ino(), number);
            assert_eq!(fs::read(at("new")).expect("it is there"), b"secret");
            assert_eq!(files.metadata("/new").expect("it is there").mode() & 0o777, 0o600);
            fs::remove_file(at("new")).expect("it is there");
            others.iter().for_each(|other| files.remove_file(other).expect("it is there"));
        }
    }
    drop(files);
    end(place);
}

pub fn a_directory_that_others_have_moved_is_renamed() {
    let Some((place, files)) = both() else { return };
    let at = |name: &str| place.root().join(name);
    for name in ["a", "b", "c", "a/d", "a/d/sub"] {
        fs::create_dir(at(name)).expect("a new directory");
    }
    let number = fs::metadata(at("a/d/sub")).expect("it is there").ino();
    // In use where it was.
    let held = open(at("a/d/sub"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("there");
    let others = |from: &str, to: &str| files.rename(from, to).expect("it is there");
    for round in 0..20 {
        fs::metadata(at("a/d/sub")).expect("it is there");
        // Nothing looks it up before.
        others("/a/d", "/b/d");
        fs::rename(at("b/d"), at("c/d")).unwrap_or_else(|error| panic!("{round}: {error}"));
        assert_eq!(errno(fs::metadata(at("a/d"))), Some(libc::ENOENT));
        // What is in it, and back to where it was.
        others("/c/d", "/b/e");
        fs::rename(at("b/e/sub"), at("c/sub")).unwrap_or_else(|error| panic!("{round}: {error}"));
        others("/c/sub", "/b/sub");
        fs::rename(at("b/sub"), at("b/e/sub")).unwrap_or_else(|error| panic!("{round}: {error}"));
        others("/b/e", "/c/e");
        fs::rename(at("c/e"), at("a/d")).unwrap_or_else(|error| panic!("{round}: {error}"));
        // And what is moved here, there, by exchange.
        fs::create_dir(at("b/x")).expect("a new directory");
        others("/a/d", "/c/d");
        let exchanged = renameat_with(CWD, at("b/x"), CWD, at("c/d"), RenameFlags::EXCHANGE);
        exchanged.unwrap_or_else(|error| panic!("{round}: {error}"));
        assert_eq!(fs::metadata(at("b/x/sub")).expect("it is there").ino(), number);
        fs::remove_dir(at("c/d")).expect("it is empty");
        fs::rename(at("b/x"), at("a/d")).expect("it is there");
        // It is the same one wherever the kernel knows it.
        fs::write(at("a/d/sub/f"), round.to_string()).expect("a new file");
        let through = |name: &str| format!("/proc/self/fd/{}/{name}", held.as_raw_fd());
        assert_eq!(fs::read_to_string(through("f")).expect("it is there"), round.to_string());
        assert_eq!(errno(fs::rename(at("a/d"), through("d"))), Some(libc::EINVAL));
    }
    // A directory that is moved here stays the one that it is: what uses it finds its way up.
    let up =
        |name: &str| fs::metadata(format!("/proc/self/fd/{name}/..")).expect("it is there").ino();
    let d = open(at("a/d"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("it is there");
    fs::rename(at("a/d"), at("c/d")).expect("it is there");
    fs::metadata(at("c/d")).expect("it is there");
    assert_eq!(up(&d.as_raw_fd().to_string()), fs::metadata(at("c")).expect("there").ino());
    drop((d, held, files));
    end(place);
}

pub fn an_open_file_stays_when_others_remove_it() {
    let Some((place, files)) = both() else { return };
    fs::write(place.root().join("f"), "text").expect("a new file");
    let mut open = OpenOptions::new();
    let open = open.read(true).write(true).open(place.root().join("f")).expect("it is there");
    files.remove_file("/f").expect("it is there");
    let orphans = || files.pool().orphans().expect("it is open").len();
    assert_eq!(orphans(), 1);
    // Its number is not given to another file.
    for name in 0..20 {
        files.write(format!("/{name}"), b"other").expect("a new file");
    }
    assert!(place.kill_server());
    open.write_all_at(b"TE", 0).expect("it is open");
    let mut text = String::new();
    (&open).read_to_string(&mut text).expect("it is open");
    assert_eq!((text.as_str(), open.metadata().expect("it is open").nlink()), ("TExt", 0));
    assert_eq!(orphans(), 1);
    drop(open);
    // The kernel says a moment later that it is closed.
    while orphans() > 0 {
        std::thread::yield_now();
    }
    drop(files);
    end(place);
}

/// In a process of its own.
pub fn append_lines() {
    let path = std::env::var_os(APPEND_TO).expect("set by the parent");
    let mut file = OpenOptions::new().append(true).open(path).expect("it is there");
    for line in 0..LINES {
        let line = format!("mount {} {line}\n", std::process::id());
        // With one call, so that it stays together.
        assert_eq!(file.write(line.as_bytes()).expect("there is room"), line.len());
    }
}

pub fn appends_of_both_sides_are_all_there() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("log");
    fs::write(&at, "").expect("a new file");
    let children: Vec<_> = (0..2)
        .map(|_| child::command("append").env(APPEND_TO, &at).spawn().expect("this program"))
        .collect();
    let mut here = files.options().append(true).open("/log").expect("it is there");
    for line in 0..LINES {
        let written = here.write(format!("library {line}\n").as_bytes());
        assert!(written.expect("there is room") > 8);
        if line % 100 == 50 {
            place.kill_server();
        }
    }
    for child in children {
        let output = child.wait_with_output().expect("a child");
        assert!(output.status.success(), "{output:?}");
    }
    let text = fs::read_to_string(&at).expect("it is there");
    assert_eq!(files.read_to_string("/log").expect("it is there"), text);
    let lines: BTreeSet<_> = text.lines().collect();
    assert_eq!((lines.len(), text.lines().count()), (3 * LINES, 3 * LINES));
    drop((here, files));
    end(place);
}

pub fn two_mounts_of_one_pool() {
    let Some((place, files)) = both() else { return };
    let second = place.at("second");
    fs::create_dir(&second).expect("a directory of its own");
    let how = How { cache: Cache::Shared, ..How::default() };
    let keeper = mount_again(&place, &second, &how).expect("others may mount it");
    let sides: [PathBuf; 2] = [place.root(), second.clone()];
    for round in 0..20_usize {
        let (one, other) = (&sides[round % 2], &sides[(round + 1) % 2]);
        let text = format!("round {round}");
        fs::write(one.join("f"), &text).expect("a new file");
        assert_eq!(fs::read_to_string(other.join("f")).expect("it is there"), text);
        fs::rename(other.join("f"), other.join("g")).expect("it is there");
        assert_eq!(names(one), BTreeSet::from(["g".to_owned()]));
        let open = File::open(one.join("g")).expect("it is there");
        fs::remove_file(other.join("g")).expect("it is there");
        let mut buffer = [0; 20];
        assert_eq!(open.read_at(&mut buffer, 0).expect("it is open"), text.len());
        assert_eq!(files.read_dir("/").expect("the root").count(), 0);
    }
    aquifer_fuse::unmount(&second, false, std::time::Duration::from_secs(60)).expect("unused");
    assert!(keeper.wait().expect("a child").success());
    drop(files);
    end(place);
}

pub fn a_mount_that_is_alone_is_not_shared() {
    let Some(place) = Place::mount(&How::default()) else { return };
    let second = place.at("second");
    fs::create_dir(&second).expect("a directory of its own");
    let how = How { cache: Cache::Shared, ..How::default() };
    let refused = mount_again(&place, &second, &how).expect_err("the other one is alone");
    let MountError::Refused(why) = &refused else { panic!("{refused}") };
    assert!(why.contains("aquifer umount"), "{why}");
    place.unmount();
    let Some((place, files)) = both() else { return };
    let refused = mount_again(&place, &second, &How::default()).expect_err("there are others");
    assert!(matches!(refused, MountError::Refused(_)), "{refused}");
    drop(files);
    end(place);
}
