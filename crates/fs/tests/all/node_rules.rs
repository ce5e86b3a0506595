//! Rules of inodes without paths: positions in directories, removed inodes, callers.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::scratch::Scratch;
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_fs::node::{Caller, Cookie, NewNode, Node, NodeEntry, Nodes, SetAttributes};
use aquifer_fs::{FallocateMode, File, Files, FsError, RenameMode, SetMode};
use aquifer_pool::format::directory::{DirectoryEntry, LAST_HASH, Node as Slot, NodeContent};
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{ChangeSlots, Pool, ReadSlots};
use aquifer_testkit::campaign::steps;
use aquifer_testkit::rng::Rng;
use proptest::prelude::*;

fn pool() -> (Scratch, Nodes) {
    let scratch = Scratch::with_pool(4 << 20, &Pool::options().inodes(2047));
    let nodes = scratch.open().nodes();
    (scratch, nodes)
}

fn keep_none(_: Node) -> Result<bool, FsError> {
    Ok(false)
}

/// Up to `room` entries from a position on, as a server reads them, and the position behind them.
fn some(nodes: &Nodes, directory: Node, at: Cookie, room: usize) -> (Vec<NodeEntry>, Cookie) {
    let (mut found, mut behind) = (Vec::new(), at);
    nodes
        .read_dir(directory, at, |cookie, entries| {
            if found.len() + entries.len() > room {
                return ControlFlow::Break(());
            }
            assert!(cookie > behind && cookie.0 <= i64::MAX as u64);
            found.extend(entries.iter().cloned());
            behind = cookie;
            ControlFlow::Continue(())
        })
        .unwrap();
    (found, behind)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]

    /// Names that are there all the time are seen once, whatever is added and removed between calls,
    /// and also if the pool is opened again in between.
    #[test]
    fn positions_stay_valid(
        stays in prop::collection::btree_set(0..4000u32, 0..300),
        calls in prop::collection::vec(
            (1..200usize, prop::collection::vec((0..4000u32, any::<bool>()), 0..60), any::<u8>()),
            1..40,
        ),
    ) {
        let (scratch, mut nodes) = pool();
        let caller = nodes.files().caller();
        let name = |number: u32| format!("{number}").repeat(1 + number as usize % 7).into_bytes();
        let directory = nodes.make(nodes.root().unwrap(), b"d", &NewNode::directory(0o777), &caller);
        let directory = directory.unwrap().node();
        let make = |nodes: &Nodes, number| {
            nodes.make(directory, &name(number), &NewNode::file(0o666), &caller)
        };
        for &number in &stays {
            make(&nodes, number).unwrap();
        }
        let (mut seen, mut at) = (Vec::new(), Cookie::START);
        for (room, changes, reopens) in calls.iter().chain([&(usize::MAX, Vec::new(), 0)]) {
            let (entries, behind) = some(&nodes, directory, at, *room);
            seen.extend(entries.into_iter().map(|entry| entry.name));
            at = behind;
            for &(number, adds) in changes.iter().filter(|(number, _)| !stays.contains(number)) {
                // Either is fine: the name may be there already, or not.
                if adds {
                    drop(make(&nodes, number));
                } else {
                    drop(nodes.unlink(directory, &name(number), keep_none));
                }
            }
            if *reopens < 8 {
                drop(nodes);
                nodes = scratch.open().nodes();
            }
        }
        let mut once = seen.clone();
        once.sort();
        once.dedup();
        let twice = seen.len() - once.len();
        prop_assert!(seen.starts_with(&[b".".to_vec(), b"..".to_vec()]));
        for number in stays {
            let times = seen.iter().filter(|seen| **seen == name(number)).count();
            prop_assert_eq!(times, 1, "{} was seen {} times", number, times);
        }
        // A name that was removed and added again has its hash, so not even that is seen twice.
        prop_assert_eq!(twice, 0);
    }
}

/// The same beside a process that changes the directory all the time: leaves are split and merged
/// while they are read.
#[test]
fn positions_stay_valid_beside_changes() {
    let (scratch, nodes) = pool();
    let other = Files::open(&scratch.path).unwrap();
    let caller = nodes.files().caller();
    let directory = nodes.make(nodes.root().unwrap(), b"d", &NewNode::directory(0o777), &caller);
    let directory = directory.unwrap().node();
    let stays: Vec<_> = (0..200).map(|number| format!("stays-{number}").into_bytes()).collect();
    for name in &stays {
        nodes.make(directory, name, &NewNode::file(0o666), &caller).unwrap();
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let changes = other.nodes();
            let mut rng = Rng::new(3);
            while !is_over.load(Relaxed) {
                let [one, two] = [(); 2].map(|()| {
                    let number = rng.below(700);
                    format!("{number}").repeat(1 + number as usize % 40).into_bytes()
                });
                // All of these may fail: the name is there, or is not.
                drop(changes.make(directory, &one, &NewNode::file(0o666), &caller));
                let (one, two) = ((directory, &one[..]), (directory, &two[..]));
                drop(changes.rename(one, two, RenameMode::Replace, &caller, keep_none));
                drop(changes.unlink(directory, one.1, keep_none));
                if rng.chance(0.2) {
                    drop(changes.unlink(directory, two.1, keep_none));
                }
            }
        });
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut rng = Rng::new(4);
            for _ in 0..steps(60) {
                let (mut seen, mut at) = (BTreeSet::new(), Cookie::START);
                loop {
                    let room = 1 + rng.below(100) as usize;
                    let (entries, behind) = some(&nodes, directory, at, room);
                    if entries.is_empty() {
                        break;
                    }
                    for entry in entries {
                        assert!(seen.insert(entry.name.clone()), "{:?} twice", entry.name);
                    }
                    at = behind;
                }
                assert!(stays.iter().all(|name| seen.contains(name)), "one was not seen");
                let mut count = 0;
                let each = |_: Cookie, entries: &[NodeEntry]| {
                    assert!(entries.iter().all(|entry| {
                        let metadata = entry.metadata.as_ref().expect("with its metadata");
                        metadata.ino() == entry.number && metadata.nlink() > 0
                    }));
                    count += entries.iter().filter(|entry| stays.contains(&entry.name)).count();
                    ControlFlow::Continue(())
                };
                nodes.read_dir_plus(directory, Cookie::START, each).unwrap();
                assert_eq!(count, stays.len());
            }
        }));
        is_over.store(true, Relaxed);
        outcome.unwrap();
    });
    drop((nodes, other));
    scratch.assert_clean();
}

/// A directory whose leaf says that three names have the same hash, which no test can find names
/// for.
fn colliding() -> (Scratch, Nodes, Node) {
    let (scratch, nodes) = pool();
    let files = nodes.files();
    files.create_dir("/d").unwrap();
    files.create_file("/f").unwrap();
    let directory = files.metadata("/d").unwrap().node();
    let inode = files.metadata("/f").unwrap().ino();
    let hashes = [(7, "a"), (9, "b"), (9, "c"), (9, "d"), (LAST_HASH, "e")];
    let entries: Vec<_> = hashes
        .map(|(hash, name)| DirectoryEntry {
            hash,
            name: name.as_bytes().to_vec(),
            inode,
            kind: FileKind::File,
        })
        .into();
    files
        .pool()
        .change_unguarded(Vec::new(), |slots| {
            let part = slots.take_slot()?;
            let owner = directory.number;
            let leaf = Slot { number: part, owner, content: NodeContent::Leaf(entries.clone()) };
            ChangeSlots::put(slots, part, leaf.encode().unwrap());
            let inode = FileInode::decode_unsealed(&slots.slot(owner)?, owner).unwrap();
            ChangeSlots::put(
                slots,
                owner,
                FileInode { part, entries: 5, ..inode }.encode().unwrap(),
            );
            Ok(())
        })
        .unwrap();
    (scratch, nodes, directory)
}

#[test]
fn names_with_one_hash_are_never_split() {
    let (_scratch, nodes, directory) = colliding();
    for room in 3..9 {
        let (mut names, mut at) = (Vec::new(), Cookie::START);
        loop {
            let (entries, behind) = some(&nodes, directory, at, room);
            if entries.is_empty() {
                break;
            }
            names.extend(entries.into_iter().map(|entry| String::from_utf8(entry.name).unwrap()));
            at = behind;
        }
        assert_eq!(names, [".", "..", "a", "b", "c", "d", "e"], "{room}");
        // The greatest hash has the greatest position.
        assert_eq!(at, Cookie(i64::MAX as u64));
    }
}

#[test]
fn what_was_removed_is_stale_whatever_has_its_number() {
    let (_scratch, nodes) = pool();
    let (files, caller) = (nodes.files(), nodes.files().caller());
    let root = nodes.root().unwrap();
    for kind in [NewNode::directory(0o777), NewNode::file(0o666), NewNode::symlink(b"t")] {
        for successor in [NewNode::directory(0o777), NewNode::file(0o666), NewNode::symlink(b"u")] {
            let old = nodes.make(root, b"old", &kind, &caller).unwrap();
            if old.is_dir() {
                nodes.remove_dir(root, b"old", |_| Ok(false)).unwrap();
            } else {
                nodes.unlink(root, b"old", keep_none).unwrap();
            }
            let old = old.node();
            all_stale(&nodes, old);
            // Slots are used again soon.
            let new = (0..4096).find_map(|_| {
                let made = nodes.make(root, b"new", &successor, &caller).unwrap();
                if made.ino() == old.number {
                    return Some(made);
                }
                files.remove_file("/new").or_else(|_| files.remove_dir("/new")).unwrap();
                None
            });
            let new = new.expect("the number is used again");
            assert_ne!(new.node(), old);
            all_stale(&nodes, old);
            assert_eq!(nodes.metadata(new.node()).unwrap(), new);
            files.remove_file("/new").or_else(|_| files.remove_dir("/new")).unwrap();
        }
    }
    all_stale(&nodes, Node { number: 0, generation: 0 });
    all_stale(&nodes, Node { number: u64::MAX, generation: 1 });
    assert!(matches!(nodes.numbered(u64::MAX), Err(FsError::Stale { .. })));
}

/// Every operation on a node that is gone, and on names in it, says so and changes nothing.
fn all_stale(nodes: &Nodes, node: Node) {
    let (files, caller, root) = (nodes.files(), nodes.files().caller(), nodes.root().unwrap());
    let mut how = files.options();
    how.read(true).write(true);
    let names = (root, &b"x"[..]);
    let replace = RenameMode::Replace;
    let continues = |_: Cookie, _: &[NodeEntry]| ControlFlow::Continue(());
    let before = files.pool().metadata_version();
    let outcomes = [
        ("lookup", nodes.lookup(node, b"x").map(drop)),
        ("lookup", nodes.lookup(node, b".").map(drop)),
        ("lookup", nodes.lookup(node, b"..").map(drop)),
        ("metadata", nodes.metadata(node).map(drop)),
        ("set", nodes.set(node, &SetAttributes::new().mode(0o600), &caller).map(drop)),
        ("set", nodes.set(node, &SetAttributes::new().len(1), &caller).map(drop)),
        ("open", nodes.open(node, &how).map(drop)),
        ("open", nodes.open_any(node).map(drop)),
        ("hold", nodes.hold(node).map(drop)),
        ("read_link", nodes.read_link(node).map(drop)),
        ("make", nodes.make(node, b"x", &NewNode::file(0o666), &caller).map(drop)),
        ("create", nodes.create(node, b"x", how.clone().create(true), &caller).map(drop)),
        ("create_unnamed", nodes.create_unnamed(node, &how, &caller, |_| Ok(())).map(drop)),
        ("link", nodes.link(node, root, b"x").map(drop)),
        ("unlink", nodes.unlink(node, b"x", keep_none).map(drop)),
        ("remove_dir", nodes.remove_dir(node, b"x", |_| Ok(false)).map(drop)),
        (
            "rename",
            nodes.rename((node, b"x"), names, replace, &files.caller(), keep_none).map(drop),
        ),
        (
            "rename",
            nodes
                .rename((root, b"old"), (node, b"x"), replace, &files.caller(), keep_none)
                .map(drop),
        ),
        ("attribute", nodes.attribute(node, b"user.a").map(drop)),
        ("attributes", nodes.attributes(node).map(drop)),
        ("set_attribute", nodes.set_attribute(node, b"user.a", b"", SetMode::Any, &caller)),
        ("remove_attribute", nodes.remove_attribute(node, b"user.a", &caller)),
        ("read_dir", nodes.read_dir(node, Cookie::START, continues)),
        ("read_dir", nodes.read_dir_plus(node, Cookie(5), continues)),
        ("set_immutable", nodes.set_immutable(node, true)),
    ];
    for (what, outcome) in outcomes {
        let error = outcome.expect_err(what);
        assert!(matches!(error, FsError::Stale { .. }), "{what}: {error}");
        assert_eq!(error.errno(), libc::ESTALE);
    }
    assert_eq!(files.pool().metadata_version(), before, "nothing was changed");
}

/// The last name of a file goes by removal, by being replaced, or not at all.
#[test]
fn a_server_keeps_what_loses_its_last_name() {
    for replaces in [false, true] {
        let (scratch, nodes) = pool();
        let (files, root) = (nodes.files(), nodes.root().unwrap());
        let other = Files::open(&scratch.path).unwrap();
        files.write("/f", "text").unwrap();
        files.hard_link("/f", "/g").unwrap();
        files.create_file("/new").unwrap();
        let node = files.metadata("/f").unwrap().node();
        let mut held = Vec::new();
        let mut remove = |name: &[u8]| {
            let mut keep = |lost| {
                assert_eq!(lost, node);
                held.push(nodes.hold(lost)?);
                Ok(true)
            };
            if replaces {
                files.create_file("/new").unwrap();
                let mode = RenameMode::Replace;
                nodes
                    .rename((root, b"new"), (root, name), mode, &files.caller(), &mut keep)
                    .unwrap()
                    .unwrap()
            } else {
                nodes.unlink(root, name, &mut keep).unwrap()
            }
        };
        assert_eq!((remove(b"g").node, remove(b"f").links), (node, 0));
        assert!(!held.is_empty());
        // Neither this process nor another one frees it.
        assert!(!nodes.reap(node).unwrap());
        other.reap_orphans();
        let mut text = [0; 4];
        nodes.open_any(node).unwrap().read_exact_at(&mut text, 0).unwrap();
        assert_eq!(&text, b"text");
        // Another process can open it, unless it could not tell the others in time.
        drop(other.nodes().hold(node).unwrap());
        let reader = Files::new(Pool::options().read_only(true).open(&scratch.path).unwrap());
        assert!(matches!(reader.nodes().hold(node), Err(FsError::Stale { .. })));
        drop(reader);
        nodes.link(node, root, b"again").unwrap();
        assert_eq!(other.read("/again").unwrap(), b"text");
        nodes.unlink(root, b"again", |_| Ok(true)).unwrap();
        drop(held);
        assert!(matches!(nodes.metadata(node), Err(FsError::Stale { .. })));
        drop((nodes, other));
        scratch.assert_clean();
    }
}

#[test]
fn what_was_kept_and_is_not_open_is_reaped_when_asked() {
    let (scratch, nodes) = pool();
    let root = nodes.root().unwrap();
    nodes.files().write("/f", "text").unwrap();
    let node = nodes.unlink(root, b"f", |_| Ok(true)).unwrap().node;
    assert_eq!(nodes.metadata(node).unwrap().nlink(), 0);
    assert!(nodes.reap(node).unwrap());
    assert!(matches!(nodes.metadata(node), Err(FsError::Stale { .. })));
    // Again, when the number belongs to another one.
    let caller = nodes.files().caller();
    let made = (0..4096).map(|at| {
        let name = format!("{at}");
        nodes.make(root, name.as_bytes(), &NewNode::file(0o666), &caller).unwrap().node()
    });
    let new = made.take_while(|new| new.number != node.number).count();
    nodes.reap(node).unwrap();
    let name = format!("{new}").into_bytes();
    let heir = nodes.lookup(root, &name).unwrap();
    assert_eq!((heir.ino(), heir.nlink()), (node.number, 1));
    nodes.unlink(root, &name, |_| Ok(true)).unwrap();
    nodes.reap(node).unwrap();
    assert_eq!(nodes.metadata(heir.node()).unwrap().nlink(), 0, "another one was reaped");
    assert!(nodes.reap(heir.node()).unwrap());
    drop(nodes);
    scratch.assert_clean();
}

/// The handle of a removed directory still knows its number, which may belong by now to a file
/// without a name.
#[test]
fn a_file_is_not_taken_for_what_had_its_number() {
    let (scratch, nodes) = pool();
    let (root, caller) = (nodes.root().unwrap(), nodes.files().caller());
    let old = nodes.make(root, b"d", &NewNode::directory(0o777), &caller).unwrap().node();
    let held = nodes.hold(old).unwrap();
    nodes.remove_dir(root, b"d", |_| Ok(false)).unwrap();
    let other = Files::open(&scratch.path).unwrap();
    let mut how = other.options();
    how.write(true);
    let mut made = Vec::new();
    while made.last().is_none_or(|file: &File| file.node().number != old.number) {
        made.push(how.create_unnamed().expect("the number is used again"));
    }
    let now = nodes.numbered(old.number).unwrap();
    assert_ne!(now, old);
    assert_eq!(nodes.hold(now).unwrap().metadata().unwrap().node(), now);
    assert!(matches!(held.metadata(), Err(FsError::NotFound { .. })));
    let reader = Files::new(Pool::options().read_only(true).open(&scratch.path).unwrap());
    assert!(matches!(reader.nodes().hold(now), Err(FsError::Stale { .. })));
}

#[test]
fn a_server_that_takes_over_finds_what_was_kept() {
    let (scratch, nodes) = pool();
    nodes.files().write("/f", "text").unwrap();
    let node = nodes.unlink(nodes.root().unwrap(), b"f", |_| Ok(true)).unwrap().node;
    let pool = Pool::open(&scratch.path).unwrap();
    let files = Files::without_reaping(pool);
    assert_eq!(files.nodes().numbered(node.number).unwrap(), node);
    let held = files.nodes().hold(node).unwrap();
    assert!(!files.reap_orphans() && !nodes.files().reap_orphans());
    assert_eq!(held.metadata().unwrap().len(), 4);
    drop(held);
    assert!(matches!(files.nodes().metadata(node), Err(FsError::Stale { .. })));
}

#[test]
fn new_files_look_as_their_caller_and_directory_say() {
    let (_scratch, nodes) = pool();
    let (files, root) = (nodes.files(), nodes.root().unwrap());
    let caller = Caller::new(7, 8).groups([9]).umask(0o027);
    assert!(caller.is_in(8) && caller.is_in(9) && !caller.is_in(7));
    let plain = nodes.make(root, b"plain", &NewNode::directory(0o777), &caller).unwrap();
    assert_eq!((plain.uid(), plain.gid(), plain.mode() & 0o7777), (7, 8, 0o750));
    let what = SetAttributes::new().mode(0o2775).owner(None, Some(77));
    let set = nodes.make(root, b"set", &NewNode::directory(0o777), &caller).unwrap();
    // It is not in that group.
    let owner = caller.clone().may_set_id(true);
    let set = nodes.set(set.node(), &what, &owner).unwrap().node();
    let of = |metadata: &aquifer_fs::Metadata| {
        (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777)
    };
    for (directory, gid, bit) in [(plain.node(), 8, 0), (set, 77, 0o2000)] {
        let make = |name: &[u8], new| nodes.make(directory, name, &new, &caller).unwrap();
        assert_eq!(of(&make(b"d", NewNode::directory(0o777))), (7, gid, 0o750 | bit));
        assert_eq!(of(&make(b"f", NewNode::file(0o666))), (7, gid, 0o640));
        assert_eq!(of(&make(b"l", NewNode::symlink(b"t"))), (7, gid, 0o777));
        let mut how = files.options();
        how.write(true).create_new(true).mode(0o666);
        let created = nodes.create(directory, b"c", &how, &caller).unwrap();
        assert_eq!(of(&created.metadata().unwrap()), (7, gid, 0o640));
        let mut how = files.options();
        how.write(true).mode(0o666);
        let unnamed = nodes.create_unnamed(directory, &how, &caller, |_| Ok(())).unwrap();
        assert_eq!(of(&unnamed.metadata().unwrap()), (7, gid, 0o640));
    }
}

#[test]
fn attributes_are_set_together() {
    let (_scratch, nodes) = pool();
    let (files, caller) = (nodes.files(), nodes.files().caller().may_set_id(true));
    files.write("/f", "some text").unwrap();
    let node = files.metadata("/f").unwrap().node();
    let long_ago = std::time::SystemTime::UNIX_EPOCH;
    let what = SetAttributes::new().mode(0o6711).owner(Some(1), Some(2)).len(4).changed(long_ago);
    let times = aquifer_fs::FileTimes::new().set_accessed(long_ago).set_modified(long_ago);
    let set = nodes.set(node, &what.times(times), &caller).unwrap();
    assert_eq!((set.uid(), set.gid(), set.len(), set.mode() & 0o7777), (1, 2, 4, 0o6711));
    assert_eq!((set.atime(), set.mtime(), set.ctime()), (0, 0, 0));
    let now = SetAttributes::new().accessed_now().modified_now().clear_set_id();
    let set = nodes.set(node, &now, &caller).unwrap();
    assert_eq!(set.mode() & 0o7777, 0o711);
    assert_eq!((set.atime(), set.atime_nsec()), (set.ctime(), set.ctime_nsec()));
    assert_eq!((set.mtime(), set.mtime_nsec()), (set.ctime(), set.ctime_nsec()));
    assert!(set.ctime() > 0);
    // Where group members must not run the file, the other bit is not one to run it as the group.
    nodes.set(node, &SetAttributes::new().mode(0o6701), &caller).unwrap();
    let set = nodes.set(node, &SetAttributes::new().clear_set_id(), &caller).unwrap();
    assert_eq!(set.mode() & 0o7777, 0o2701);
    nodes.set_immutable(node, true).unwrap();
    let refused = nodes.set(node, &SetAttributes::new().mode(0), &caller).unwrap_err();
    assert!(matches!(refused, FsError::Immutable { .. }), "{refused}");
    let file = nodes.open_any(node).unwrap();
    assert_eq!(file.write_at(b"x", 0).unwrap_err().errno(), libc::EPERM);
    nodes.set_immutable(node, false).unwrap();
    file.write_at(b"x", 0).unwrap();
}

/// Also where it was looked for in vain before.
#[test]
fn a_file_loses_its_capabilities_with_its_content_or_owner() {
    const CAPABILITIES: &str = "security.capability";
    let (_scratch, nodes) = pool();
    let files = nodes.files();
    files.write("/f", [1; 8192]).unwrap();
    files.write("/other", [2; 8192]).unwrap();
    let open = |path| files.options().read(true).write(true).open(path).unwrap();
    let (file, other) = (open("/f"), open("/other"));
    let node = file.node();
    let set = |what: SetAttributes| nodes.set(node, &what, &Caller::new(0, 0)).map(drop);
    let allocate = |mode| file.allocate(mode, 10, 5000);
    file.set_attribute("user.colour", "green", SetMode::Any).unwrap();
    let loses: [(&str, &dyn Fn() -> aquifer_fs::Result<()>); 15] = [
        ("overwrite", &|| file.write_all_at(&[3; 100], 50)),
        ("append", &|| file.write_all_at(&[3; 100], file.metadata()?.len())),
        ("write far behind the end", &|| file.write_all_at(&[3; 100], 1 << 20)),
        ("write atomically", &|| file.write_atomic(&[3; 100], 50)),
        ("exchange", &|| file.exchange_range(0, &other, 0, 4096)),
        ("be exchanged", &|| other.exchange_range(0, &file, 0, 4096)),
        ("punch", &|| allocate(FallocateMode::PunchHole)),
        ("zero", &|| allocate(FallocateMode::ZeroRange)),
        ("allocate", &|| allocate(FallocateMode::KeepSize)),
        ("extend", &|| file.set_len(3 << 20)),
        ("set the same length", &|| file.set_len(3 << 20)),
        ("shrink", &|| file.set_len(8192)),
        ("set a length", &|| set(SetAttributes::new().len(9000))),
        ("write through a path", &|| files.write("/f", [1; 8192])),
        ("change the owner", &|| set(SetAttributes::new().owner(Some(7), None))),
    ];
    for (what, change) in loses {
        file.write_all_at(&[4; 10], 0).unwrap();
        file.set_attribute(CAPABILITIES, "any", SetMode::Any).unwrap();
        change().unwrap();
        assert_eq!(file.attributes().unwrap(), [b"user.colour"], "{what}");
    }
    file.set_attribute(CAPABILITIES, "any", SetMode::Any).unwrap();
    set(SetAttributes::new().mode(0o755).modified_now()).unwrap();
    file.set_attribute("user.colour", "red", SetMode::Any).unwrap();
    file.view_mut(..).unwrap().write(0, b"text").unwrap();
    file.read_exact_at(&mut [0; 10], 0).unwrap();
    file.defragment().unwrap();
    file.sync_all().unwrap();
    assert_eq!(file.attribute(CAPABILITIES).unwrap(), b"any");
}

/// A reader sees the length and the other attributes change together, and a crash keeps all or none.
#[test]
fn a_length_is_set_with_the_other_attributes() {
    let (_scratch, nodes) = pool();
    let (files, caller) = (nodes.files(), Caller::new(1, 1));
    files.write("/f", [7; 10_000]).unwrap();
    let node = files.metadata("/f").unwrap().node();
    let version = || files.pool().metadata_version();
    let changes = |what: SetAttributes| {
        let before = version();
        let set = nodes.set(node, &what, &caller).unwrap();
        (version() - before, set)
    };
    let one = changes(SetAttributes::new().mode(0o600)).0;
    for (len, mode) in [(20_000, 0o640), (20_000, 0o750), (100, 0o600), (0, 0o644)] {
        let what = SetAttributes::new().len(len).mode(mode).owner(Some(3), None).modified_now();
        let (changes, set) = changes(what);
        assert_eq!((set.len(), set.mode() & 0o7777, set.uid()), (len, mode, 3));
        assert_eq!(changes, one, "length {len}");
    }
    // The caller counts, not this process, which may keep these bits; and a mode that is set.
    for (mode, after) in [(None, 0o755), (Some(0o4711), 0o4711)] {
        changes(SetAttributes::new().mode(0o6755));
        let what = SetAttributes::new().len(5000);
        let (changes, set) = changes(mode.map_or(what, |mode| what.mode(mode)));
        assert_eq!((set.mode() & 0o7777, changes), (after, one));
    }
}

#[test]
fn names_are_names() {
    let (_scratch, nodes) = pool();
    let (caller, root) = (nodes.files().caller(), nodes.root().unwrap());
    let long = [b'n'; 256];
    let names: [(&[u8], i32); 5] = [
        (b"", libc::ENOENT),
        (b"a/b", libc::EINVAL),
        (b"a\0", libc::EINVAL),
        (&long, libc::ENAMETOOLONG),
        (b".", libc::EEXIST),
    ];
    for (name, errno) in names {
        let made = nodes.make(root, name, &NewNode::file(0o666), &caller);
        assert_eq!(made.unwrap_err().errno(), errno, "{name:?}");
        if name != b"." {
            assert_eq!(nodes.lookup(root, name).unwrap_err().errno(), errno, "{name:?}");
        }
    }
    let busy = nodes.rename((root, b"."), (root, b"x"), RenameMode::Replace, &caller, keep_none);
    assert_eq!(busy.unwrap_err().errno(), libc::EBUSY);
    let all: BTreeSet<_> =
        some(&nodes, root, Cookie::START, 10).0.into_iter().map(|e| e.name).collect();
    assert_eq!(all, BTreeSet::from([b".".to_vec(), b"..".to_vec()]));
}
