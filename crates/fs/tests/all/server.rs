//! What servers need that must answer each request once and may die at any moment: writes as their
//! clients ask for them, requests with notes, and pins that outlive them.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, UNIX_EPOCH};

use aquifer_fs::node::{Caller, NewNode, Node, SetAttributes};
use aquifer_fs::{
    At, FallocateMode, File, FileTimes, Files, FsError, Privileges, RenameMode, WriteHow,
};
use aquifer_pool::{Pool, PoolOptions, Published, TransactionNote, end_thread_at};

const MODE: u32 = 0o7777;
const KEEPS_TIMES: WriteHow = WriteHow { keeps_times: true, privileges: Privileges::OfProcess };

/// The points between the moment at which a change is ready and the end of its transaction.
const POINTS: [&str; 6] = [
    "packed-written",
    "note-begun",
    "note-counted",
    "packed-published",
    "apply-half",
    "apply-counted",
];

fn options() -> PoolOptions {
    Pool::options().background(false)
}

struct Scene {
    _directory: tempfile::TempDir,
    path: std::path::PathBuf,
}

fn scene() -> (Scene, Files) {
    let directory = aquifer_testkit::scratch::in_memory();
    let scene = Scene { path: directory.path().join("pool"), _directory: directory };
    let pool = options().inodes(500).log_bytes(1 << 20).create(&scene.path, 8 << 20).unwrap();
    // No transaction of a test raises the first fresh page.
    drop(pool.reserve(20, 1).unwrap());
    (scene, Files::new(pool))
}

fn new_note(id: u64) -> TransactionNote {
    let note = TransactionNote::new(Box::leak(Box::new([const { AtomicU64::new(0) }; 8])));
    note.begin(id);
    note
}

fn root(files: &Files) -> Node {
    files.nodes().root().unwrap()
}

fn old_times(set: SetAttributes) -> SetAttributes {
    let at = |ns| UNIX_EPOCH + Duration::from_nanos(ns);
    set.times(FileTimes::new().set_modified(at(1))).changed(at(2))
}

/// A file with these bytes, whose times are long ago.
fn old_file(files: &Files, name: &str, bytes: &[u8]) -> File {
    files.write(name, bytes).unwrap();
    let node = files.metadata(name).unwrap().node();
    let old = old_times(SetAttributes::new());
    files.nodes().set(node, &old, &files.caller()).unwrap();
    files.nodes().open_any(node).unwrap()
}

fn has_old_times(file: &File) -> bool {
    let metadata = file.metadata().unwrap();
    (metadata.mtime_nsec(), metadata.ctime_nsec()) == (1, 2)
}

#[test]
fn a_write_keeps_the_times_if_it_is_told_to() {
    let (_scene, files) = scene();
    let file = old_file(&files, "/f", &[1; 10_000]);
    // In place; over what may be several pieces; into a hole; at the end; behind the end.
    file.write_with(&[2; 100], At::Offset(50), KEEPS_TIMES).all().unwrap();
    let before = files.pool().metadata_version();
    file.write_with(&[3; 5000], At::Offset(100), KEEPS_TIMES).all().unwrap();
    assert_eq!(files.pool().metadata_version(), before, "nothing but bytes has changed");
    assert_eq!(file.write_with(&[4; 7], At::End, KEEPS_TIMES).all().unwrap(), 10_000..10_007);
    file.write_with(&[5; 3], At::Offset(50_000), KEEPS_TIMES).all().unwrap();
    file.write_with(&[6; 3], At::Offset(30_000), KEEPS_TIMES).all().unwrap();
    assert!(has_old_times(&file));
    let mut expected = vec![1; 10_000];
    expected[50..150].fill(2);
    expected[100..5100].fill(3);
    expected.resize(50_003, 0);
    expected[10_000..10_007].fill(4);
    expected[50_000..].fill(5);
    expected[30_000..30_003].fill(6);
    assert!(files.read("/f").unwrap() == expected);
    // Also where it takes a transaction anyway.
    assert_eq!(file.write_with(&[], At::End, KEEPS_TIMES).all().unwrap(), 0..0);
    for at in [At::Offset(0), At::End] {
        let file = old_file(&files, "/g", &[1; 100]);
        file.write_with(&[1], at, WriteHow::default()).all().unwrap();
        assert!(!has_old_times(&file));
    }
    let held = files.nodes().hold(file.node()).unwrap();
    let refused = held.write_with(&[1], At::End, KEEPS_TIMES).all().unwrap_err();
    assert!(matches!(refused, FsError::NotOpenFor { .. }), "{refused}");
}

#[test]
fn a_write_inside_a_file_does_not_make_it_longer() {
    let (_scene, files) = scene();
    let file = files.create_file("/f").unwrap();
    file.write_all_at(b"0123456789", 0).unwrap();
    let how = WriteHow::default();
    let write = |bytes: &[u8], at| file.write_with(bytes, At::Inside(at), how).all();
    assert_eq!(write(b"ab", 3).unwrap(), 3..5);
    assert_eq!(write(&[b'x'; 5000], 8).unwrap(), 8..10);
    assert_eq!(write(b"cd", 10).unwrap(), 10..10);
    assert_eq!(write(b"cd", 5000).unwrap(), 5000..5000);
    assert_eq!(files.read("/f").unwrap(), b"012ab567xx");
    // A hole inside is filled.
    file.set_len(20_000).unwrap();
    assert_eq!(write(&[b'y'; 5000], 16_000).unwrap(), 16_000..20_000);
    assert_eq!(file.metadata().unwrap().len(), 20_000);
}

#[test]
fn appends_by_offset_and_by_end_mix() {
    let (_scene, files) = scene();
    let file = files.create_file("/f").unwrap();
    let threads: Vec<_> = (0..4u8)
        .map(|thread| {
            let file = file.clone();
            std::thread::spawn(move || {
                let write = |_| file.write_with(&[thread; 37], At::End, KEEPS_TIMES).all().unwrap();
                (0..100).map(write).collect::<Vec<_>>()
            })
        })
        .collect();
    let mut all: Vec<_> = Vec::new();
    for (thread, written) in (0..).zip(threads) {
        all.extend(
            written.join().unwrap().into_iter().map(|range| (range.start, range.end, thread)),
        );
    }
    all.sort_unstable();
    let bytes = files.read("/f").unwrap();
    assert_eq!(bytes.len(), 4 * 100 * 37);
    for (index, (start, end, thread)) in all.into_iter().enumerate() {
        assert_eq!((start, end), (index as u64 * 37, index as u64 * 37 + 37));
        assert!(bytes[start as usize..end as usize].iter().all(|&byte| byte == thread));
    }
}

#[test]
fn a_write_takes_privileges_if_it_is_told_to() {
    let (_scene, files) = scene();
    let how = |privileges| WriteHow { keeps_times: true, privileges };
    for (before, after) in [(0o6755, 0o755), (0o4644, 0o644), (0o2644, 0o2644), (0o755, 0o755)] {
        // In place, and with a transaction.
        for at in [At::Offset(5), At::End] {
            let file = old_file(&files, "/f", &[1; 100]);
            let set = old_times(SetAttributes::new().mode(before));
            let by = Caller::new(0, 0);
            files.nodes().set(file.node(), &set, &by).unwrap();
            files.set_attribute("/f", "security.capability", b"x", Default::default()).unwrap();
            files.nodes().set(file.node(), &set, &by).unwrap();
            for (privileges, kept) in [(Privileges::Keep, 1), (Privileges::LoseCapabilities, 0)] {
                file.write_with(b"x", at, how(privileges)).all().unwrap();
                assert_eq!(file.metadata().unwrap().mode() & MODE, before);
                assert_eq!(files.attributes("/f").unwrap().len(), kept);
            }
            files.set_attribute("/f", "security.capability", b"x", Default::default()).unwrap();
            files.nodes().set(file.node(), &set, &by).unwrap();
            file.write_with(b"x", at, how(Privileges::LoseAll)).all().unwrap();
            assert_eq!(file.metadata().unwrap().mode() & MODE, after, "{before:o} {at:?}");
            assert_eq!(files.attributes("/f").unwrap().len(), 0);
            assert!(has_old_times(&file));
        }
    }
}

/// What a note says that the last process to publish cannot have changed.
fn published(files: &Files, note: TransactionNote) -> Published {
    note.published(&files.pool().unpublished().unwrap())
}

#[test]
fn a_noted_request_says_what_it_has_done() {
    let (_scene, files) = scene();
    let (nodes, caller) = (files.nodes(), files.caller());
    let root = root(&files);
    let result = |node: Node| [node.number, node.generation, 0];
    let mut id = 0;
    let mut noted = |request: &mut dyn FnMut() -> [u64; 3]| {
        id += 1;
        let note = new_note(id);
        let result = files.pool().noting(note, request);
        assert_eq!(published(&files, note), Published { transactions: 1, result });
    };
    noted(&mut || {
        result(nodes.make(root, b"d", &NewNode::directory(0o755), &caller).unwrap().node())
    });
    noted(&mut || {
        let mut how = files.options();
        how.write(true).create_new(true);
        result(nodes.create(root, b"f", &how, &caller).unwrap().node())
    });
    let file = nodes.open_any(files.metadata("/f").unwrap().node()).unwrap();
    file.write_at(b"some", 0).unwrap();
    noted(&mut || {
        let written = file.write_with(b" text", At::End, WriteHow::default()).all().unwrap();
        [written.start, written.end, 0]
    });
    noted(&mut || {
        let how = files.options().write(true).clone();
        result(nodes.create_unnamed(root, &how, &caller, |_| Ok(())).unwrap().node())
    });
    drop(file);
    // What follows from a request is not counted: freeing the rest of a file in many pieces.
    let file = files.create_file("/pieces").unwrap();
    (0..600).for_each(|page| file.write_all_at(&[1], page * 8192).unwrap());
    drop(file);
    noted(&mut || {
        nodes.unlink(root, b"pieces", |_| Ok(false)).unwrap();
        [0; 3]
    });
}

/// At each point of an append a server dies, others append, and the next server appends what is
/// missing: each line is there once.
#[test]
fn an_append_happens_once_wherever_the_server_dies() {
    let (scene, files) = scene();
    let other = Files::new(options().open(&scene.path).unwrap());
    files.create_file("/log").unwrap();
    let node = files.metadata("/log").unwrap().node();
    let mut lines = Vec::new();
    for (id, point) in (1..).zip(POINTS) {
        let append = |files: &Files, line: &str| {
            let file = files.nodes().open_any(node).unwrap();
            file.write_with(line.as_bytes(), At::End, WriteHow::default()).all().unwrap()
        };
        let line = format!("{point}\n");
        let note = new_note(id);
        let died = end_thread_at(point, || files.pool().noting(note, || append(&files, &line)));
        assert_eq!(died, None, "{point}");
        append(&other, "of another\n");
        let found = published(&other, note);
        let written = match found.transactions {
            0 => append(&other, &line),
            _ => found.result[0]..found.result[1],
        };
        let text = files.read("/log").unwrap();
        assert_eq!(&text[written.start as usize..written.end as usize], line.as_bytes(), "{point}");
        lines.extend([line, "of another\n".to_owned()]);
    }
    let mut found: Vec<String> =
        files.read_to_string("/log").unwrap().lines().map(|line| format!("{line}\n")).collect();
    found.sort_unstable();
    lines.sort_unstable();
    assert_eq!(found, lines);
}

/// A write inside the file, whose only transaction sets the times.
#[test]
fn a_write_in_place_says_what_it_has_written() {
    let (scene, files) = scene();
    let other = Files::new(options().open(&scene.path).unwrap());
    for (id, point) in (1..).zip(POINTS) {
        let file = old_file(&files, &format!("/{point}"), &[1; 300]);
        // The handle knows the file's pages from here on.
        file.write_with(b"y", At::Offset(0), KEEPS_TIMES).all().unwrap();
        let note = new_note(id);
        let write = || file.write_with(b"x", At::Offset(100), WriteHow::default()).all().map(drop);
        assert!(end_thread_at(point, || files.pool().noting(note, write)).is_none(), "{point}");
        let found = published(&other, note);
        let has_new_times = !has_old_times(&other.nodes().open_any(file.node()).unwrap());
        assert_eq!(found.transactions, u64::from(has_new_times), "{point}");
        if has_new_times {
            assert_eq!(found.result, [100, 101, 0], "{point}");
        }
    }
}

/// A process dies when its change of a file is published and not in the image yet. The next writer
/// changes the file as it is then: it stores to the pages that the file has.
#[test]
fn the_next_writer_sees_the_last_change_of_a_dead_one() {
    let (scene, files) = scene();
    let other = Files::new(options().open(&scene.path).unwrap());
    let [file, neighbour] = ["/f", "/g"].map(|name| files.create_file(name).unwrap());
    for page in 0..8 {
        // One piece each.
        file.write_all_at(&[1; 4096], page * 4096).unwrap();
        neighbour.write_all_at(&[2; 4096], page * 4096).unwrap();
    }
    let theirs = other.nodes().open_any(file.node()).unwrap();
    theirs.write_all_at(&[3; 10], 0).unwrap();
    assert!(end_thread_at("packed-published", || file.defragment().map(drop)).is_none());
    theirs.write_all_at(&[4; 10], 0).unwrap();
    // The next transaction brings the image up to date at the latest.
    files.sync().unwrap();
    for files in [&files, &other] {
        let bytes = files.read("/f").unwrap();
        assert_eq!(&bytes[..11], &[4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1]);
    }
}

#[test]
fn an_unlinked_file_outlives_the_server() {
    let (scene, files) = scene();
    let keeper = options().passive(true).open(&scene.path).unwrap();
    let lent = keeper.lend_pins(1).unwrap();
    files.write("/f", "text").unwrap();
    let node = files.metadata("/f").unwrap().node();
    {
        let server = Files::without_reaping(options().open(&scene.path).unwrap());
        let pins = server.pool().borrow_pins(&lent).unwrap();
        let keep = |kept: Node| {
            pins.set(kept.number)?;
            Ok(true)
        };
        let removed = server.nodes().unlink(root(&server), b"f", keep).unwrap();
        assert_eq!((removed.node, removed.links), (node, 0));
    }
    // Others that look for orphans find it in use.
    assert!(!files.reap_orphans());
    let server = Files::without_reaping(options().open(&scene.path).unwrap());
    assert!(!server.reap_orphans());
    let pins = server.pool().borrow_pins(&lent).unwrap();
    let (place, inode) = pins.iter().next().expect("one pin");
    assert_eq!(server.nodes().numbered(inode).unwrap(), node);
    let file = server.nodes().open_any(node).unwrap();
    assert_eq!(file.write_with(b"!", At::End, WriteHow::default()).all().unwrap(), 4..5);
    drop(file);
    assert!(!server.nodes().reap(node).unwrap());
    pins.clear(place, inode);
    assert!(server.nodes().reap(node).unwrap());
    assert!(matches!(server.nodes().metadata(node), Err(FsError::Stale { .. })));
}

#[test]
fn an_unnamed_file_outlives_the_server_from_its_first_moment() {
    for (id, point) in (1..).zip(POINTS) {
        let (scene, files) = scene();
        let keeper = options().passive(true).open(&scene.path).unwrap();
        let lent = keeper.lend_pins(1).unwrap();
        let pins = files.pool().borrow_pins(&lent).unwrap();
        let note = new_note(id);
        let make = || {
            let born = |node: Node| Ok(pins.set(node.number).map(|_| ())?);
            let how = files.options().write(true).clone();
            files.nodes().create_unnamed(root(&files), &how, &files.caller(), born)
        };
        assert!(end_thread_at(point, || files.pool().noting(note, make).map(drop)).is_none());
        let other = Files::new(options().open(&scene.path).unwrap());
        let Published { transactions, result: [number, generation, _] } = published(&other, note);
        let found: Vec<u64> = pins.iter().map(|(_, inode)| inode).collect();
        assert_eq!(found.len(), 1);
        assert_eq!(other.pool().orphans().unwrap(), &found[..transactions as usize], "{point}");
        if transactions == 1 {
            let node = Node { number, generation };
            assert_eq!(number, found[0]);
            other.nodes().link(node, root(&other), b"named").unwrap();
            assert_eq!(other.metadata("/named").unwrap().node(), node);
        }
    }
}

/// A directory that is removed while it is a client's working directory.
#[test]
fn a_removed_directory_stays_if_it_is_kept() {
    let (scene, files) = scene();
    let keeper = options().passive(true).open(&scene.path).unwrap();
    let lent = keeper.lend_pins(1).unwrap();
    let pins = files.pool().borrow_pins(&lent).unwrap();
    let (nodes, caller, root) = (files.nodes(), files.caller(), root(&files));
    let keep = |kept: Node| Ok(pins.set(kept.number).map(|_| true)?);
    for replaced in [false, true] {
        let made = nodes.make(root, b"d", &NewNode::directory(0o750), &caller).unwrap();
        files.set_attribute("/d", "user.a", b"value", Default::default()).unwrap();
        let node = made.node();
        let removed = if replaced {
            nodes.make(root, b"new", &NewNode::directory(0o700), &caller).unwrap();
            let (from, to) = ((root, &b"new"[..]), (root, &b"d"[..]));
            nodes.rename(from, to, RenameMode::Replace, &caller, keep).unwrap().unwrap()
        } else {
            nodes.remove_dir(root, b"d", keep).unwrap()
        };
        assert_eq!((removed.node, removed.links), (node, 0));
        let is_there = |files: &Files, mode| {
            let nodes = files.nodes();
            let metadata = nodes.metadata(node).unwrap();
            assert!(metadata.is_dir() && metadata.nlink() == 0 && metadata.is_empty());
            assert_eq!((metadata.mode() & MODE, metadata.node()), (mode, node));
            assert_eq!(nodes.attribute(node, b"user.a").unwrap(), b"value");
        };
        is_there(&files, 0o750);
        // It has nothing, and gets nothing.
        let missing = |error: FsError| assert_eq!(error.errno(), libc::ENOENT, "{error}");
        for name in [&b"x"[..], b".", b".."] {
            missing(nodes.lookup(node, name).unwrap_err());
        }
        missing(nodes.read_dir(node, Default::default(), |_, _| unreachable!()).unwrap_err());
        missing(nodes.make(node, b"x", &NewNode::file(0o600), &caller).unwrap_err());
        missing(nodes.unlink(node, b"x", |_| Ok(false)).unwrap_err());
        files.write("/f", "text").unwrap();
        let f = files.metadata("/f").unwrap().node();
        missing(nodes.link(f, node, b"x").unwrap_err());
        let into =
            nodes.rename((root, b"f"), (node, b"x"), RenameMode::Replace, &caller, |_| Ok(false));
        missing(into.unwrap_err());
        assert!(matches!(nodes.open_any(node), Err(FsError::IsADirectory { .. })));
        let set = SetAttributes::new().mode(0o711);
        assert!(nodes.set(node, &set, &caller).unwrap().is_dir());
        is_there(&files, 0o711);
        // Others see the same, and give its number to no other inode.
        files.sync().unwrap();
        let other = Files::new(options().open(&scene.path).unwrap());
        assert!(!other.reap_orphans());
        is_there(&other, 0o711);
        // The check sees a file without names.
        assert_eq!(files.pool().orphans().unwrap(), [node.number]);
        let copy = scene.path.with_extension("copy");
        std::fs::copy(&scene.path, &copy).unwrap();
        let report = aquifer_check::check(copy.as_path(), &Default::default()).unwrap();
        assert!(report.is_sound(), "{report}");
        let (place, _) = pins.iter().next().unwrap();
        assert!(!nodes.reap(node).unwrap());
        pins.clear(place, node.number);
        assert!(nodes.reap(node).unwrap());
        assert!(matches!(nodes.metadata(node), Err(FsError::Stale { .. })));
        if replaced {
            files.remove_dir("/d").unwrap();
        }
        files.remove_file("/f").unwrap();
    }
    // If all processes die, it is freed like a file without names.
    let node = nodes.make(root, b"d", &NewNode::directory(0o750), &caller).unwrap().node();
    nodes.remove_dir(root, b"d", keep).unwrap();
    drop((files.clone(), pins, keeper));
    let number = node.number;
    drop((nodes, files));
    let files = Files::new(options().open(&scene.path).unwrap());
    assert!(matches!(files.nodes().numbered(number), Err(FsError::Stale { .. })));
    assert_eq!(files.pool().orphans().unwrap(), [0; 0]);
}

#[test]
fn stores_of_other_handles_are_noticed() {
    let (scene, files) = scene();
    let other = Files::new(options().open(&scene.path).unwrap());
    files.write("/f", [1; 20_000]).unwrap();
    let node = files.metadata("/f").unwrap().node();
    let [ours, theirs] = [&files, &other].map(|files| files.nodes().open_any(node).unwrap());
    let mut seen = files.pool().foreign_writes(node.number);
    let mut has_changed = || {
        let now = files.pool().foreign_writes(node.number);
        std::mem::replace(&mut seen, now) != now
    };
    assert!(!has_changed());
    ours.write_all_at(&[2; 100], 50).unwrap();
    assert!(!has_changed());
    theirs.write_all_at(&[3; 100], 60).unwrap();
    assert!(has_changed());
    theirs.allocate(FallocateMode::ZeroRange, 0, 10).unwrap();
    assert!(has_changed());
    let view = theirs.view_mut(0..4096).unwrap();
    view.write(100, &[4; 5]).unwrap();
    view.flush().unwrap();
    assert!(has_changed());
    drop(view);
    let read: Vec<u8> = files.read("/f").unwrap();
    assert_eq!((read[0], read[60], read[100]), (0, 3, 4));
    assert!(!has_changed());
    // A file with another lock.
    other.write("/g", [1; 100]).unwrap();
    assert!(!has_changed());
    // A process dies behind a store: the next one that locks the file sees to it.
    assert!(end_thread_at("file-stored", || theirs.write_all_at(&[5; 10], 300).unwrap()).is_none());
    assert_eq!(files.read("/f").unwrap()[300..310], [5; 10]);
    ours.write_all_at(&[6; 1], 0).unwrap();
    assert!(has_changed());
    assert!(!has_changed());
}

#[test]
fn a_range_is_copied_with_its_holes() {
    let (_scene, files) = scene();
    let from = files.options().read(true).write(true).create(true).open("/from").unwrap();
    from.write_all_at(&[1; 5000], 3000).unwrap();
    from.write_all_at(&[2; 1_500_000], 100_000).unwrap();
    from.set_len(2_000_000).unwrap();
    let source = files.read("/from").unwrap();
    for (range, at) in
        [(0..2_000_000, 0), (0..9_999_999, 4096), (2500..150_000, 10), (7000..7001, 3)]
    {
        for before in [0, 50_000] {
            let _ = files.remove_file("/to");
            files.write("/to", vec![9; before]).unwrap();
            let to = files.options().read(true).write(true).open("/to").unwrap();
            let count = (range.end.min(2_000_000) - range.start) as usize;
            let times = |file: &File| {
                let found = file.metadata().unwrap();
                (found.modified().unwrap(), found.ctime(), found.ctime_nsec())
            };
            to.set_times(FileTimes::new().set_modified(UNIX_EPOCH)).unwrap();
            let unchanged = times(&to);
            let how = WriteHow { keeps_times: before > 0, ..WriteHow::default() };
            let copied = from.copy_range_with(range.clone(), &to, at as u64, how).all().unwrap();
            assert_eq!(copied.end - copied.start, count as u64);
            assert_eq!(times(&to) == unchanged, how.keeps_times, "{range:?}");
            let mut expected = vec![9; before];
            expected.resize(before.max(at + count), 0);
            expected[at..at + count].copy_from_slice(&source[range.start as usize..][..count]);
            assert!(files.read("/to").unwrap() == expected, "{range:?} to {at} of {before}");
            let allocated = |file: &File| file.metadata().unwrap().allocated_bytes();
            drop(to);
            let to = files.open_file("/to").unwrap();
            assert!(allocated(&to) <= allocated(&from) + 60_000 + 8192, "{range:?}: holes");
        }
    }
    // In one file, and what cannot be copied.
    assert_eq!(from.copy_range(3000..4000, &from, 0).unwrap(), 1000);
    assert_eq!(files.read("/from").unwrap()[..1000], [1; 1000]);
    assert!(matches!(from.copy_range(0..100, &from, 99), Err(FsError::Options { .. })));
    assert_eq!(from.copy_range(3_000_000..4_000_000, &from, 0).unwrap(), 0);
    let reader = files.open_file("/to").unwrap();
    let appender = files.options().append(true).open("/to").unwrap();
    for to in [&reader, &appender] {
        assert!(matches!(from.copy_range(0..9, to, 0), Err(FsError::NotOpenFor { .. })));
    }
    let (_scene, others) = scene();
    let other = others.create_file("/f").unwrap();
    assert!(matches!(from.copy_range(0..9, &other, 0), Err(FsError::OtherPool)));
}
