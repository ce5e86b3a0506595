//! The commands on files of a pool from a user's perspective.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, UNIX_EPOCH};

use crate::support::{
    Place, aquifer, fails, json, run, run_without_privileges, says, text, worked, works,
};
use aquifer::{Files, Pool};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use serde_json::Value;

/// What a copy must preserve of an item.
#[derive(Debug, PartialEq, Eq)]
struct Kept {
    mode: u32,
    modified: (i64, i64),
    target: Option<PathBuf>,
    content: Option<Vec<u8>>,
    attribute: Option<Vec<u8>>,
    /// Names of the same file.
    same: Vec<PathBuf>,
}

fn attribute(path: &Path) -> Option<Vec<u8>> {
    let mut value = [0; 100];
    let len = getxattr(path, "user.colour", &mut value[..]).ok()?;
    Some(value[..len].to_vec())
}

/// Everything in a tree, by path relative to its root.
fn kept(root: &Path) -> BTreeMap<PathBuf, Kept> {
    let mut found = BTreeMap::new();
    let mut names: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
    let mut ahead = vec![PathBuf::new()];
    while let Some(below) = ahead.pop() {
        let path = root.join(&below);
        let metadata = fs::symlink_metadata(&path).unwrap();
        if metadata.is_dir() {
            let entries = fs::read_dir(&path).unwrap();
            ahead.extend(entries.map(|entry| below.join(entry.unwrap().file_name())));
        }
        names.entry(metadata.ino()).or_default().push(below.clone());
        let kept = Kept {
            mode: metadata.mode(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            target: metadata.is_symlink().then(|| fs::read_link(&path).unwrap()),
            content: metadata.is_file().then(|| fs::read(&path).unwrap()),
            attribute: (!metadata.is_symlink()).then(|| attribute(&path)).flatten(),
            same: Vec::new(),
        };
        found.insert(below, (metadata.ino(), kept));
    }
    names.values_mut().for_each(|names| names.sort());
    let with_names = |(path, (inode, kept))| {
        let same = names[&inode].clone();
        (path, Kept { same, ..kept })
    };
    found.into_iter().map(with_names).collect()
}

/// A pool with room for small files.
fn pool(place: &Place) -> String {
    let path = place.text("data.pool");
    works(&["pool", "create", &path, "--size", "16M", "--log", "1M"]);
    path
}

/// The names in a directory of a pool, in order.
fn names(pool_path: &str) -> Vec<String> {
    let listed = json(&["ls", "-a", "--json", pool_path]);
    let entries = listed["entries"].as_array().unwrap();
    entries.iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect()
}

fn at(pool: &str, path: &str) -> String {
    format!("{pool}:{path}")
}

const FAR: u64 = 3 << 20;

/// A tree with one item of each kind.
fn tree(root: &Path) {
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    fs::write(root.join("a/text"), "some text\n").unwrap();
    fs::write(root.join("a/nothing"), "").unwrap();
    fs::write(root.join("a/large"), (0..300_000u32).map(|i| (i * 7) as u8).collect::<Vec<_>>())
        .unwrap();
    fs::hard_link(root.join("a/text"), root.join("a/b/same text")).unwrap();
    symlink("../text", root.join("a/b/link")).unwrap();
    symlink("/no/such/file", root.join("dangling")).unwrap();
    let sparse = File::create(root.join("sparse")).unwrap();
    sparse.write_all_at(b"front", 0).unwrap();
    sparse.write_all_at(b"far", FAR).unwrap();
    sparse.set_len(2 * FAR).unwrap();
    for odd in [&b"new\nline"[..], b"no UTF-8 \xff\xfe", b"-rf", b" ", b"colon:", b".hidden", b"*"]
    {
        fs::write(root.join(OsStr::from_bytes(odd)), odd).unwrap();
    }
    fs::write(root.join("n".repeat(255)), "long name").unwrap();
    // If the file system does not support attributes, there is nothing to compare.
    let _ = setxattr(root.join("a/text"), "user.colour", b"green", XattrFlags::empty());
    let _ = setxattr(root.join("a"), "user.colour", b"red", XattrFlags::empty());
    fs::set_permissions(root.join("a/text"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::set_permissions(root.join("a/large"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o1770)).unwrap();
    for (path, seconds) in [("a/text", 1_000_000_000), ("a/b", 86_400), ("a", 1_500_000_000)] {
        let time = UNIX_EPOCH + Duration::new(seconds, 123_456_789);
        File::open(root.join(path)).unwrap().set_modified(time).unwrap();
    }
    fs::set_permissions(root.join("a/b"), fs::Permissions::from_mode(0o555)).unwrap();
}

/// Makes the directory removable for users other than root.
fn unlock(root: &Path) {
    fs::set_permissions(root.join("a/b"), fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_tree_goes_in_and_comes_out_the_same() {
    let place = Place::new();
    let pool = pool(&place);
    let root = place.path("tree");
    tree(&root);
    let put = json(&["put", "-r", "--json", root.to_str().unwrap(), &at(&pool, "/")]);
    let before = kept(&root);
    assert_eq!((&put["directories"], &put["symlinks"]), (&4.into(), &2.into()), "{put}");
    assert_eq!((&put["hard_links"], &put["failed"]), (&1.into(), &0.into()), "{put}");
    assert_eq!(put["files"], before.len() - 4 - 2 - 1);
    assert!(put["copied_bytes"].as_u64().unwrap() < FAR, "holes were copied: {put}");

    let sparse = json(&["stat", "--json", &at(&pool, "/tree/sparse")]);
    assert_eq!(sparse["entries"][0]["size_bytes"], 2 * FAR);
    assert_eq!(sparse["entries"][0]["allocated_bytes"], 2 * 4096);
    let out = place.path("out");
    works(&["get", "-r", &at(&pool, "/tree"), out.to_str().unwrap()]);
    assert_eq!(kept(&out), before);
    let blocks = fs::metadata(out.join("sparse")).unwrap().blocks();
    assert!(blocks * 512 < FAR, "the copy has no holes: {blocks} blocks");

    // Inside the pool, and into an existing directory.
    works(&["cp", "-r", &at(&pool, "/tree"), &at(&pool, "/copy")]);
    works(&["mkdir", &at(&pool, "/deep"), &at(&pool, "/deep/er")]);
    works(&["mv", &at(&pool, "/copy"), &at(&pool, "/deep/er")]);
    let again = place.path("again");
    fs::create_dir(&again).unwrap();
    works(&["get", "-r", &at(&pool, "/deep/er/copy/."), again.to_str().unwrap()]);
    assert_eq!(kept(&again), before);
    says(&works(&["pool", "check", &pool]), &["nothing is wrong"]);

    works(&["rm", "-r", &at(&pool, "/tree"), &at(&pool, "/deep")]);
    assert_eq!(names(&at(&pool, "/")), [""; 0]);
    let info = json(&["pool", "info", &pool, "--json"]);
    assert_eq!((&info["files"], &info["directories"]), (&0.into(), &1.into()));
    assert_eq!(info["free_bytes"], usable_bytes(&info));
    [root, out, again].iter().for_each(|root| unlock(root));
}

/// Kind, mode, device, owner, times, all attributes and the other names of everything in a tree.
fn exact(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut inodes = BTreeMap::<u64, BTreeSet<PathBuf>>::new();
    let mut ahead = vec![PathBuf::new()];
    while let Some(below) = ahead.pop() {
        let path = root.join(&below);
        let of = fs::symlink_metadata(&path).unwrap();
        if of.is_dir() {
            let entries = fs::read_dir(&path).unwrap();
            ahead.extend(entries.map(|entry| below.join(entry.unwrap().file_name())));
        }
        let mut list = [0; 4096];
        let len = rustix::fs::llistxattr(&path, &mut list[..]).unwrap_or(0);
        let mut attributes = BTreeMap::new();
        for name in list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let mut value = [0; 4096];
            let len = rustix::fs::lgetxattr(&path, name, &mut value[..]).unwrap();
            attributes.insert(String::from_utf8_lossy(name).into_owned(), value[..len].to_vec());
        }
        let (mode, rdev, uid, gid) = (of.mode(), of.rdev(), of.uid(), of.gid());
        // Not the access times: comparing changes them.
        let times = (of.mtime(), of.mtime_nsec());
        let text = format!("{mode:o} {rdev:x} {uid}:{gid} {times:?} {attributes:?}");
        inodes.entry(of.ino()).or_default().insert(below.clone());
        found.insert(below, text);
    }
    for names in inodes.values() {
        names.iter().for_each(|name| *found.get_mut(name).unwrap() += &format!(" {names:?}"));
    }
    found
}

/// A list for a user, as `setfacl` makes it.
fn list_of_user(user: u32, permissions: u16) -> Vec<u8> {
    let entries = [(1u16, 6u16, u32::MAX), (2, permissions, user), (4, 4, u32::MAX)];
    let rest = [(16, 6, u32::MAX), (32, 0, u32::MAX)];
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries.into_iter().chain(rest) {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}

#[test]
fn special_files_and_access_lists_come_out_the_same() {
    use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, lsetxattr, mknodat};
    let place = Place::new();
    let (pool, root) = (pool(&place), place.path("tree"));
    let is_root = rustix::process::geteuid().is_root();
    fs::create_dir_all(root.join("d/inside")).unwrap();
    fs::write(root.join("d/file"), "text").unwrap();
    symlink("d/file", root.join("link")).unwrap();
    let mode = Mode::from_raw_mode(0o640);
    mknodat(CWD, root.join("fifo"), FileType::Fifo, mode, 0).unwrap();
    mknodat(CWD, root.join("d/socket"), FileType::Socket, mode, 0).unwrap();
    let mut count = 2;
    let set = |path: &str, name: &str, value: &[u8]| {
        // If the file system does not support it, there is nothing to compare.
        let _ = lsetxattr(root.join(path), name, value, XattrFlags::empty());
    };
    set("d/file", "user.colour", b"green");
    set("d/file", "system.posix_acl_access", &list_of_user(1000, 6));
    set("d", "system.posix_acl_default", &list_of_user(1001, 4));
    set("fifo", "system.posix_acl_access", &list_of_user(7, 2));
    if is_root {
        let rdev = rustix::fs::makedev(250, 70_000);
        for (name, kind) in [("char", FileType::CharacterDevice), ("block", FileType::BlockDevice)]
        {
            mknodat(CWD, root.join(name), kind, mode, rdev).unwrap();
            count += 1;
        }
        mknodat(CWD, root.join("whiteout"), FileType::CharacterDevice, Mode::empty(), 0).unwrap();
        count += 1;
        set("link", "trusted.of", b"the link");
        set("char", "trusted.of", b"the device");
        std::os::unix::fs::lchown(root.join("fifo"), Some(5), Some(6)).unwrap();
        std::os::unix::fs::lchown(root.join("d/file"), Some(5), Some(6)).unwrap();
        fs::set_permissions(root.join("d/file"), fs::Permissions::from_mode(0o6751)).unwrap();
        fs::set_permissions(root.join("d"), fs::Permissions::from_mode(0o2775)).unwrap();
    }
    for (seconds, path) in (1000..).zip(["d/inside", "d/file", "fifo", "link", "d/socket", "d", ""])
    {
        let time = Timespec { tv_sec: seconds, tv_nsec: 5 };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, root.join(path), &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
    for (name, other) in [("fifo", "d/fifo"), ("d/socket", "socket"), ("link", "d/inside/link")] {
        fs::hard_link(root.join(name), root.join(other)).unwrap();
    }
    let before = exact(&root);
    let put = json(&["put", "-r", "--json", root.to_str().unwrap(), &at(&pool, "/")]);
    assert_eq!((&put["special_files"], &put["failed"]), (&count.into(), &0.into()), "{put}");
    assert_eq!((&put["symlinks"], &put["hard_links"]), (&1.into(), &3.into()), "{put}");
    assert_eq!(put["lost_attributes"], 0, "{put}");
    // Again, over what is there, and once more inside the pool.
    works(&["put", "-r", root.to_str().unwrap(), &at(&pool, "/")]);
    works(&["cp", "-r", &at(&pool, "/tree"), &at(&pool, "/copy")]);
    for name in ["tree", "copy"] {
        let out = place.path(&format!("out-{name}"));
        works(&["get", "-r", &at(&pool, &format!("/{name}")), out.to_str().unwrap()]);
        assert_eq!(exact(&out), before, "{name}");
    }
    let long = works(&["ls", "-l", &at(&pool, "/tree")]);
    says(&long, &["prw-", "fifo"]);
    if is_root {
        says(&long, &["crw-r----- ", "250, 70000", "brw-r-----"]);
        let stat = works(&["stat", &at(&pool, "/tree/block")]);
        says(&stat, &["block-device", "major 250, minor 70000"]);
    }
    let all = json(&["ls", "-R", "--json", &at(&pool, "/tree")]);
    let kinds = all["entries"].as_array().unwrap().iter().map(|entry| &entry["kind"]);
    assert_eq!(kinds.filter(|&kind| kind == "socket").count(), 2);
    says(&works(&["pool", "check", &pool]), &["nothing is wrong", "special files"]);
}

#[test]
fn copies_replace_files_and_merge_directories() {
    let place = Place::new();
    let pool = pool(&place);
    let (one, two) = (place.path("one"), place.path("two"));
    for (root, text) in [(&one, "first"), (&two, "second, and longer")] {
        fs::create_dir(root).unwrap();
        fs::write(root.join("both"), text).unwrap();
        fs::write(root.join(text), text).unwrap();
    }
    let target = at(&pool, "/t");
    for root in [&one, &two] {
        works(&["put", "-r", "-T", root.to_str().unwrap(), &target]);
    }
    assert_eq!(names(&target), ["both", "first", "second, and longer"]);
    assert_eq!(works(&["cat", &at(&pool, "/t/both")]), "second, and longer");
    let first = one.join("both");
    let arguments = ["put", "-n", first.to_str().unwrap(), &target];
    says(&fails(&arguments, 1), &["t/both", "File exists"]);
    assert_eq!(works(&["cat", &at(&pool, "/t/both")]), "second, and longer");

    // A directory and another kind of item are not merged, in either direction.
    works(&["mkdir", &at(&pool, "/t/both.d")]);
    let file = one.join("both");
    let arguments = ["put", "-T", file.to_str().unwrap(), &at(&pool, "/t/both.d")];
    says(&fails(&arguments, 1), &["both.d", "Is a directory"]);
    let arguments = ["put", "-r", "-T", one.to_str().unwrap(), &at(&pool, "/t/both")];
    says(&fails(&arguments, 1), &["t/both", "Not a directory"]);

    // The pool inside the tree is left out.
    let whole = place.path("");
    let put = aquifer().args(["put", "-r"]).arg(&whole).arg(at(&pool, "/all")).output().unwrap();
    says(text(&put.stderr), &["data.pool", "left out"]);
    worked(put, "put of everything");
    assert!(!names(&at(&pool, "/all")).contains(&"data.pool".to_owned()));
}

#[test]
fn odd_names_are_names() {
    let place = Place::new();
    let pool = pool(&place);
    let odd: Vec<OsString> = [&b"-n"[..], b"a\nb", b"\xff", b"x:", b"$HOME", b"--"]
        .map(|name| OsString::from_vec(name.to_vec()))
        .to_vec();
    for name in &odd {
        let mut path = OsString::from(at(&pool, "/"));
        path.push(name);
        works(&["mkdir".into(), path.clone()]);
        path.push("/inside");
        works(&["ln".into(), "-s".into(), "--".into(), name.clone(), path.clone()]);
        let stat = json(&["stat".into(), "--json".into(), path]);
        assert_eq!(stat["entries"][0]["kind"], "symlink");
    }
    let listed = run(&["ls", &at(&pool, "/")]);
    let mut expected: Vec<_> = odd.iter().map(|name| name.as_bytes().to_vec()).collect();
    expected.sort();
    assert_eq!(listed.stdout, [expected.join(&b"\n"[..]), b"\n".to_vec()].concat());
    let listed = json(&["ls", "--json", &at(&pool, "/")]);
    let is_utf8 = listed["entries"].as_array().unwrap().iter().map(|e| &e["name_is_utf8"]);
    assert_eq!(is_utf8.filter(|&is| is == false).count(), 1);

    for name in &odd {
        let mut path = OsString::from(at(&pool, "/"));
        path.push(name);
        works(&["rm".into(), "-r".into(), path]);
    }
    assert_eq!(works(&["ls", &at(&pool, "/")]), "");

    let too_long = at(&pool, &format!("/{}", "n".repeat(256)));
    says(&fails(&["mkdir", &too_long], 1), &["too long", "255"]);
}

#[test]
fn what_cannot_be_is_said_with_advice() {
    let place = Place::new();
    let pool = pool(&place);
    let text_file = place.text("text");
    fs::write(&text_file, "text").unwrap();
    works(&["put", &text_file, &at(&pool, "/f")]);
    works(&["mkdir", "-p", &at(&pool, "/d/e")]);
    let [root, f, d, nothing] = ["/", "/f", "/d", "/nothing"].map(|path| at(&pool, path));
    let missing = at(&place.text("missing.pool"), "/f");
    let foreign = at(&text_file, "/f");
    for (arguments, status, parts) in [
        (&["ls", &missing][..], 1, &["missing.pool", "does not exist"][..]),
        (&["ls", &foreign], 1, &["is not a pool"]),
        (&["cat", &pool], 2, &["POOL:/PATH"]),
        (&["ls", "missing.pool"], 2, &["POOL:/PATH"]),
        (&["ls", &text_file], 1, &["is not a pool"]),
        (&["cat", "f"], 2, &["`f`", "POOL:/PATH"]),
        (&["ls", &nothing], 1, &["/nothing", "No such file or directory", "aquifer ls"]),
        (&["cat", &d], 1, &["/d", "Is a directory"]),
        (&["cat", &at(&pool, "/f/g")], 1, &["/f/g", "Not a directory"]),
        (&["mkdir", &d], 1, &["File exists"]),
        (&["mkdir", &at(&pool, "/no/way")], 1, &["/no/way", "No such file or directory"]),
        (&["mkdir", "-m", "9", &nothing], 2, &["octal"]),
        (&["rm", &d], 1, &["-r"]),
        (&["rm", "-d", &d], 1, &["not empty", "rm -r"]),
        (&["rm", "-r", &root], 1, &["root"]),
        (&["rm", "-rf", &at(&pool, "/d/..")], 1, &["root"]),
        (&["rm", &nothing], 1, &["No such file or directory"]),
        (&["mv", &d, &at(&pool, "/d/e/f")], 1, &["into itself"]),
        (&["mv", "-n", "-T", &f, &d], 1, &["File exists"]),
        (&["mv", "-T", &f, &d], 1, &["/d", "Is a directory"]),
        (&["mv", &f, &missing], 1, &["different pools"]),
        (&["mv", &f, &d, &nothing], 1, &["Not a directory"]),
        (&["cp", &d, &nothing], 1, &["-r"]),
        (&["cp", "-r", &d, &at(&pool, "/d/e")], 1, &["into itself"]),
        (&["cp", "-r", &root, &d], 1, &["into itself"]),
        (&["cp", &f, &at(&pool, "/d/../f")], 1, &["same file"]),
        (&["cp", &nothing, &root], 1, &["No such file or directory"]),
        (&["cp", &f, &at(&pool, "/new/")], 1, &["No such file or directory"]),
        (&["put", "/no/such/file", &root], 1, &["/no/such/file", "No such file or directory"]),
        (&["put", "/dev/null", &root], 1, &["/dev/null", "a device", "-r"]),
        (&["put", &text_file, &at(&pool, "/no/way")], 1, &[":/no:", "create it first"]),
        (&["get", &f, "/no/such/directory/f"], 1, &["/no/such/directory"]),
        (&["get", &f, &missing.replace('/', ""), &root], 2, &["POOL:/PATH"]),
        (&["ln", &d, &nothing], 1, &["a directory has one name"]),
        (&["ln", &f, &f], 1, &["File exists"]),
        (&["ln", "-s", &f, &nothing], 1, &["same pool", "/f"]),
        (&["ln", "-s", "", &nothing], 1, &["No such file or directory"]),
        (&["stat", &nothing], 1, &["No such file or directory"]),
        (&["stat", &f, "--watch", "1"], 2, &["--watch"]),
        (&["stat", "4711", "--dereference"], 2, &["--dereference"]),
        (&["stat", "one", "two"], 2, &["two"]),
    ] {
        says(&fails(arguments, status), parts);
    }
    // None of these commands has changed anything.
    assert_eq!(names(&root), ["d", "f"]);
    assert_eq!(works(&["cat", &f]), "text");
    works(&["rm", "-f", &nothing]);

    // With several paths, the valid ones are processed.
    let output = run(&["cat", &f, &nothing, &f]);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(1), &b"texttext"[..]));
    let _socket = UnixListener::bind(place.path("socket")).unwrap();
    let output = run(&["put", &place.text("socket"), &text_file, &at(&pool, "/d")]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(names(&d), ["e", "text"]);
}

#[test]
fn what_is_no_file_and_the_pool_itself_are_not_replaced() {
    let place = Place::new();
    let pool = pool(&place);
    let [socket, link, text_file] = ["socket", "link", "text"].map(|name| place.text(name));
    fs::write(&text_file, "text").unwrap();
    let _socket = UnixListener::bind(&socket).unwrap();
    symlink(&socket, &link).unwrap();
    works(&["put", &text_file, &at(&pool, "/f")]);
    for special in [&socket, &link] {
        says(&fails(&["get", &at(&pool, "/f"), special], 1), &["a socket", "aquifer cat"]);
    }
    says(&fails(&["get", &at(&pool, "/f"), &pool], 1), &["the pool itself"]);
    assert_eq!(works(&["cat", &at(&pool, "/f")]), "text");
    // Two spellings of the pool's path name one pool.
    let other = pool.replace("/", "//");
    assert_eq!(works(&["cat", &at(&other, "/f"), &at(&pool, "/f")]), "texttext");
    works(&["get", &at(&other, "/f"), &at(&pool, "/f"), &place.text("")]);
    says(&fails(&["ln", &at(&pool, "/"), &at(&pool, "/root")], 1), &["/: Operation not permitted"]);
}

#[test]
fn a_full_pool_keeps_what_is_whole() {
    let place = Place::new();
    let pool = place.pool();
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    for name in ["a", "b", "z"] {
        fs::write(tree.join(name), name.repeat(5000)).unwrap();
    }
    fs::write(tree.join("m"), vec![1; 8 << 20]).unwrap();
    let arguments = ["put", "-r", tree.to_str().unwrap(), &at(&pool, "/")];
    says(&fails(&arguments, 1), &["the pool is full", "/tree/", "2 files were copied completely"]);
    assert_eq!(names(&at(&pool, "/tree")), ["a", "b"]);
    assert_eq!(works(&["cat", &at(&pool, "/tree/b")]), "b".repeat(5000));
    says(&works(&["pool", "check", &pool]), &["nothing is wrong"]);
    works(&["rm", "-r", &at(&pool, "/tree")]);
    let info = json(&["pool", "info", &pool, "--json"]);
    assert_eq!(info["free_bytes"], usable_bytes(&info));
    fs::write(tree.join("m"), "m").unwrap();
    works(&arguments);
    assert_eq!(names(&at(&pool, "/tree")), ["a", "b", "m", "z"]);
}

/// What files can have of a pool, from its `info`.
fn usable_bytes(info: &Value) -> u64 {
    let [data, saved] = ["data", "saved"].map(|part| info[part]["len_bytes"].as_u64());
    data.unwrap() - saved.unwrap()
}

/// An interruption at any time leaves no partial file and nothing else.
#[test]
fn put_that_is_ended_leaves_whole_files() {
    // Not SIGINT, which is ignored if a shell started the tests in the background.
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        // The command may end before the signal arrives.
        assert!((0..10).any(|_| put_is_ended(signal)), "it is never ended in time");
    }
}

/// Returns whether the signal arrived before the command ended.
fn put_is_ended(signal: libc::c_int) -> bool {
    let place = Place::new();
    let pool = place.text("data.pool");
    works(&["pool", "create", &pool, "--size", "320M", "--log", "1M"]);
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("a"), "whole").unwrap();
    fs::write(tree.join("large"), vec![7; 256 << 20]).unwrap();
    let files = Files::open(&pool).unwrap();
    let mut put = aquifer()
        .args(["put", "-r", tree.to_str().unwrap(), &at(&pool, "/")])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let free_bytes = files.space().unwrap().free_bytes;
    while files.space().unwrap().free_bytes > free_bytes - (1 << 20) {
        if let Some(status) = put.try_wait().unwrap() {
            assert_eq!(status.code(), Some(0));
            return false;
        }
    }
    // Not by a program, which takes as long to start as the rest takes to be copied.
    // SAFETY: the child has not been waited for, so the number still belongs to it.
    assert_eq!(unsafe { libc::kill(put.id() as i32, signal) }, 0);
    let output = put.wait_with_output().unwrap();
    drop(files);
    let left = names(&at(&pool, "/tree"));
    if left == ["a", "large"] {
        return false;
    }
    if signal == libc::SIGTERM {
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        says(text(&output.stderr), &["interrupted", "one file was copied completely"]);
    }
    assert_eq!(left, ["a"]);
    assert_eq!(works(&["cat", &at(&pool, "/tree/a")]), "whole");
    // The next process that opens the pool for writing frees the space.
    works(&["rm", "-f", &at(&pool, "/nothing")]);
    let info = json(&["pool", "info", &pool, "--json"]);
    assert_eq!(info["free_bytes"], usable_bytes(&info) - 4096);
    true
}

#[test]
fn listings_show_what_was_asked_for() {
    let place = Place::new();
    let pool = pool(&place);
    for (name, bytes) in [("small", 10), ("large", 5000), (".hidden", 0)] {
        fs::write(place.path(name), vec![b'x'; bytes]).unwrap();
        works(&["put", &place.text(name), &at(&pool, "/")]);
    }
    works(&["mkdir", "-p", "-m", "750", &at(&pool, "/d/e")]);
    works(&["ln", &at(&pool, "/small"), &at(&pool, "/d/e/other")]);
    works(&["ln", "-s", "d/e", &at(&pool, "/way")]);
    let root = at(&pool, "/");
    assert_eq!(works(&["ls", &root]), "d\nlarge\nsmall\nway\n");
    assert_eq!(works(&["ls", "-r", &root]), "way\nsmall\nlarge\nd\n");
    assert_eq!(works(&["ls", "-S", &root]).lines().next(), Some("large"));
    assert_eq!(works(&["ls", "-a", &root]).lines().next(), Some(".hidden"));
    assert_eq!(works(&["ls", &at(&pool, "/way")]), "other\n");
    let long = works(&["ls", "-lh", &root]);
    says(&long, &["4.9 KiB", " UTC large", "way -> d/e", "-rw", "drwx", "lrwxrwxrwx"]);
    let all = works(&["ls", "-R", &root]);
    says(&all, &[&format!("{pool}:/:\n"), &format!("\n{pool}:/d/e:\nother\n")]);
    assert_eq!(works(&["ls", "-R", &pool]), works(&["ls", "-R", &root]));
    let shown = works(&["ls", "-d", &root, &at(&pool, "/small")]);
    assert_eq!(shown, "/\n/small\n");

    let paths = |listed: &Value| -> Vec<String> {
        let entries = listed["entries"].as_array().unwrap();
        entries.iter().map(|entry| entry["path"].as_str().unwrap().to_owned()).collect()
    };
    let listed = json(&["ls", "-R", "--json", &root]);
    assert_eq!(paths(&listed), ["/d", "/large", "/small", "/way", "/d/e", "/d/e/other"]);
    let e = json(&["stat", "--json", &at(&pool, "/d/e"), &at(&pool, "/way")]);
    assert_eq!((&e["entries"][0]["mode"], &e["entries"][0]["names"]), (&0o750.into(), &1.into()));
    assert_eq!(
        (&e["entries"][1]["target"], &e["entries"][1]["mode"]),
        (&"d/e".into(), &0o777.into())
    );
    let followed = json(&["stat", "-L", "--json", &at(&pool, "/way")]);
    assert_eq!(followed["entries"][0]["inode"], e["entries"][0]["inode"]);
    says(&works(&["stat", &at(&pool, "/small")]), &["10 bytes", "links        2", "-rw"]);

    // Locks are shown to read-only commands too.
    let files = Files::open(&pool).unwrap();
    let locked = files.open_file("/small").unwrap();
    assert!(!works(&["stat", &at(&pool, "/small")]).contains("locked"));
    locked.lock_shared().unwrap();
    locked.lock_range(10..20, aquifer::fs::LockMode::Exclusive).unwrap();
    let shown = works(&["stat", &at(&pool, "/small")]);
    says(&shown, &["locked       shared; bytes 10 to 19 exclusive"]);
    let shown = json(&["stat", "--json", &at(&pool, "/small")]);
    assert_eq!(shown["entries"][0]["locked"], "shared");
    assert_eq!(shown["entries"][0]["locked_range"]["end"], 20);
    drop((locked, files));
}

#[test]
fn names_move_link_and_are_exchanged() {
    let place = Place::new();
    let pool = pool(&place);
    let [a, b, d] = ["/a", "/b", "/d"].map(|path| at(&pool, path));
    for (name, there) in [("one", &a), ("two", &b)] {
        fs::write(place.path(name), name).unwrap();
        works(&["put", &place.text(name), there]);
    }
    works(&["mv", "--exchange", &a, &b]);
    assert_eq!(works(&["cat", &a, &b]), "twoone");
    works(&["mkdir", &d]);
    works(&["mv", &a, &b, &d]);
    assert_eq!(names(&d), ["a", "b"]);
    says(&works(&["mv", "-v", &at(&pool, "/d/a"), &at(&pool, "/d/b")]), &["->", "/d/b"]);
    assert_eq!(works(&["cat", &at(&pool, "/d/b")]), "two");
    works(&["ln", &at(&pool, "/d/b"), &at(&pool, "/first")]);
    works(&["ln", "-s", "d/b", &at(&pool, "/second")]);
    works(&["ln", "-f", &at(&pool, "/second"), &at(&pool, "/first")]);
    assert_eq!(json(&["stat", "--json", &at(&pool, "/first")])["entries"][0]["target"], "d/b");
    works(&["ln", "-sf", "elsewhere", &at(&pool, "/first")]);
    assert_eq!(names(&at(&pool, "/")), ["d", "first", "second"]);
    assert_eq!(works(&["cat", &at(&pool, "/second")]), "two");
    works(&["ln", "-f", &at(&pool, "/d/b"), &at(&pool, "/d/b")]);
    assert_eq!(names(&d), ["b"]);
}

#[test]
fn looking_needs_no_right_to_write() {
    let place = Place::public();
    let pool = pool(&place);
    fs::write(place.path("f"), "text").unwrap();
    works(&["put", &place.text("f"), &at(&pool, "/")]);
    fs::set_permissions(&pool, fs::Permissions::from_mode(0o444)).unwrap();
    let f = at(&pool, "/f");
    for arguments in [["cat", &f], ["stat", &f], ["ls", &f]] {
        let Some(output) = run_without_privileges(&arguments) else { return };
        assert!(!worked(output, &arguments).is_empty());
    }
    let Some(output) = run_without_privileges(&["rm", &f]) else { return };
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(works(&["cat", &f]), "text");
}

/// Read-only commands find the shared memory of the pool's writers in the directory given.
#[test]
fn readers_are_told_where_the_shared_memory_of_a_pool_is() {
    let place = Place::new();
    let pool = pool(&place);
    let directory = place.text("shared");
    fs::create_dir(&directory).unwrap();
    let options = Pool::options().segment_directory(&directory);
    let files = Files::new(options.open(&pool).unwrap());
    files.create_file("/f").unwrap().write_all_at(b"text", 0).unwrap();
    works(&["object", "create", &pool, "o", "--size", "4K", "--shared-memory", &directory]);
    let other = place.text("other.pool");
    works(&["pool", "create", &other, "--size", "4M"]);
    let (root, f, local) = (at(&pool, "/"), at(&pool, "/f"), place.text("local"));
    let commands: &[&[&str]] = &[
        &["ls", &root],
        &["cat", &f],
        &["stat", &f],
        &["get", &f, &local],
        &["cp", &f, &at(&other, "/f")],
        &["pool", "info", &pool],
        &["object", "list", &pool],
        &["object", "info", &pool, "o"],
        &["object", "dump", &pool, "o"],
    ];
    for command in commands {
        let refused = run(command);
        assert_ne!(refused.status.code(), Some(0), "{command:?} without the directory");
        works(&[*command, &["--shared-memory", &directory]].concat());
    }
    let refused = fails(&["stat", "--shared-memory", &directory], 2);
    says(&refused, &["--shared-memory is for files of a pool"]);
}

#[test]
fn options_may_stand_between_sources_and_destination() {
    let place = Place::new();
    let pool = place.pool();
    let [one, two] = ["one", "two"].map(|name| {
        let path = place.path(name);
        fs::write(&path, name).unwrap();
        path.to_str().unwrap().to_owned()
    });
    let (root, back) = (at(&pool, "/"), place.text("back"));
    fs::create_dir(&back).unwrap();
    works(&["put", &one, "--no-clobber", &two, "--verbose", &root]);
    works(&["get", &at(&pool, "/one"), "--no-clobber", &at(&pool, "/two"), &back, "--verbose"]);
    assert_eq!(fs::read_to_string(format!("{back}/two")).unwrap(), "two");
    works(&["cp", &at(&pool, "/one"), "-n", &at(&pool, "/three")]);
    works(&["mv", &at(&pool, "/three"), "-n", &at(&pool, "/four")]);
    assert_eq!(works(&["cat", &at(&pool, "/four")]), "one");
    works(&["put", "-T", "--", &one, &at(&pool, "/five")]);
    // As the parser says it.
    for (command, source, destination) in [
        ("put", "<SOURCE>", "<POOL:/DEST|URL>"),
        ("get", "<POOL:/SOURCE|URL>", "<DEST>"),
        ("cp", "<POOL:/SOURCE>", "<POOL:/DEST>"),
        ("mv", "<POOL:/SOURCE>", "<POOL:/DEST>"),
    ] {
        let usage = format!("Usage: aquifer {command} [OPTIONS] {source}... {destination}");
        let alone = fails(&[command, &root, "--verbose"], 2);
        says(&alone, &["not provided", &format!("  {destination}\n"), &usage, "--help"]);
        says(&fails(&[command], 2), &["not provided", &usage]);
        says(&works(&[command, "--help"]), &[&usage, "Arguments:", source, destination]);
        if command != "put" {
            let wrong = fails(&[command, "-n", "nothing", &root], 2);
            says(&wrong, &["'nothing' for", source, "POOL:/PATH", &usage]);
        }
        if command != "get" {
            let wrong = fails(&[command, &root, "-n", "nothing"], 2);
            says(&wrong, &["'nothing' for", destination, "POOL:/PATH", &usage]);
        }
    }
}
