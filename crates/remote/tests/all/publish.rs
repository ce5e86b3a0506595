//! Publishing and restoring pools in a local directory, and at a server.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use crate::support::{Answer, Server};
use aquifer_pool::{Pool, PoolError};
use aquifer_remote::publish::{
    Progress, PublishError, PublishOptions, RestoreOptions, SnapshotStore,
};

const POOL_BYTES: u64 = 16 << 20;

struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        Place { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn store(&self) -> SnapshotStore {
        SnapshotStore::open(&format!("file://{}", self.path("store").display())).unwrap()
    }

    /// A pool with an object for each of these bytes, of 1 MiB.
    fn pool(&self, name: &str, fill: &[u8]) -> PathBuf {
        let path = self.path(name);
        drop(Pool::create(&path, POOL_BYTES).unwrap());
        for &byte in fill {
            add(&path, byte);
        }
        path
    }

    /// All files of the store below a folder.
    fn objects(&self, folder: &str) -> Vec<PathBuf> {
        let (mut found, mut left) = (Vec::new(), vec![self.path("store").join(folder)]);
        while let Some(directory) = left.pop() {
            let Ok(entries) = fs::read_dir(directory) else { continue };
            for entry in entries {
                let path = entry.unwrap().path();
                if path.is_dir() { left.push(path) } else { found.push(path) }
            }
        }
        found.sort();
        found
    }
}

const OBJECT_PAGES: u64 = 256;

/// Adds an object whose bytes are all the same.
fn add(path: &Path, byte: u8) {
    use aquifer_pool::format::inode::{Inode, InodeKind};
    let pool = Pool::open(path).unwrap();
    let reservation = pool.reserve(OBJECT_PAGES, 1).unwrap();
    let runs = reservation.runs().to_vec();
    let start = runs[0].bytes().offset_bytes;
    // SAFETY: reserved, and named by nothing yet.
    unsafe {
        let bytes = vec![byte; (OBJECT_PAGES * 4096) as usize];
        pool.media().write_at(start, &bytes).unwrap();
    }
    // SAFETY: the pool has no other users.
    unsafe {
        pool.transact(vec![reservation], |transaction| {
            let inode = Inode {
                kind: InodeKind::Object,
                size_bytes: OBJECT_PAGES * 4096,
                runs: runs.clone(),
                name: vec![b'a' + byte],
                ..transaction.free_inode()?
            };
            transaction.put(inode);
            Ok(())
        })
        .unwrap();
    }
    pool.sync().unwrap();
}

/// The first byte of each object, by name; all of an object's bytes are compared.
fn content(path: &Path) -> Vec<(Vec<u8>, u8)> {
    let pool = Pool::options().read_only(true).open(path).unwrap();
    let mut all: Vec<_> = pool.inodes().unwrap();
    all.sort_by(|one, other| one.name.cmp(&other.name));
    let of = |inode: aquifer_pool::format::inode::Inode| {
        let range = inode.runs[0].bytes();
        let mut bytes = vec![0; range.len_bytes as usize];
        pool.media().read_at(range.offset_bytes, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == bytes[0]));
        (inode.name, bytes[0])
    };
    all.into_iter().map(of).collect()
}

fn options() -> PublishOptions {
    PublishOptions::default()
}

#[test]
fn a_restored_pool_is_the_one_that_was_published() {
    let place = Place::new();
    let (pool, copy) = (place.pool("a.pool", &[1, 2]), place.path("b.pool"));
    let store = place.store();
    let mut told = Vec::new();
    let published =
        store.publish_with_progress(&pool, &options(), &mut |at| told.push(at)).unwrap();
    assert_eq!((published.snapshot, published.pool_bytes), (1, POOL_BYTES));
    assert!(published.used_bytes >= 2 << 20 && published.used_bytes < 4 << 20, "{published:?}");
    assert!(matches!(told.last(), Some(Progress::Bytes { done, all }) if done == all));
    let restored = store.restore(&copy, &RestoreOptions::default()).unwrap();
    assert_eq!(restored.written_bytes, published.used_bytes);
    assert_eq!(restored.snapshot, 1);
    assert_eq!(content(&copy), content(&pool));
    assert_eq!(content(&copy), [(vec![b'b'], 1), (vec![b'c'], 2)]);
    let stored = fs::metadata(&copy).unwrap();
    assert_eq!(stored.len(), POOL_BYTES);
    assert!(stored.blocks() * 512 < 5 << 20, "free space is holes: {}", stored.blocks());
    assert_eq!(stored.mode() & 0o777, 0o600);
    // It can be written to.
    add(&copy, 3);
    assert_eq!(content(&copy).len(), 3);
    // A second snapshot of the same content sends nothing but its manifest.
    let again = store.publish(&pool, &options()).unwrap();
    assert_eq!((again.snapshot, again.sent_chunks, again.sent_bytes), (2, 0, 0), "{again:?}");
    let listed = store.snapshots().unwrap();
    assert_eq!(listed.iter().map(|found| found.snapshot).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(listed[0].used_bytes, published.used_bytes);
}

#[test]
fn a_pool_that_was_not_opened_since_is_not_read() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1]);
    let store = place.store();
    let first = store.publish(&pool, &options()).unwrap();
    assert!(first.read_bytes >= first.used_bytes);
    let second = store.publish(&pool, &options()).unwrap();
    assert_eq!((second.read_bytes, second.sent_bytes), (0, 0));
    assert_eq!(second.used_bytes, first.used_bytes);
    let third = store.publish(&pool, &options().reread(true)).unwrap();
    assert_eq!((third.read_bytes, third.sent_bytes), (first.read_bytes, first.sent_bytes));
    // Opening it for writing may have changed it.
    drop(Pool::open(&pool).unwrap());
    let fourth = store.publish(&pool, &options()).unwrap();
    assert!(fourth.read_bytes > 0);
    store.restore(place.path("b.pool"), &RestoreOptions::default().snapshot(2)).unwrap();
}

#[test]
fn only_new_chunks_are_sent() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1, 2, 3, 4]);
    let store = place.store();
    let first = store.publish(&pool, &options()).unwrap();
    add(&pool, 5);
    let second = store.publish(&pool, &options()).unwrap();
    assert!(second.sent_chunks > 0 && second.sent_chunks <= 4, "{second:?}");
    assert!(second.sent_bytes < first.sent_bytes, "{first:?} {second:?}");
    for (snapshot, objects) in [(first.snapshot, 4), (second.snapshot, 5)] {
        let copy = place.path(&format!("{snapshot}.pool"));
        store.restore(&copy, &RestoreOptions::default().snapshot(snapshot)).unwrap();
        assert_eq!(content(&copy).len(), objects);
    }
}

/// A publisher that fails in the middle, at a server that counts.
#[test]
fn what_a_failed_publisher_has_sent_is_not_sent_again() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1, 2, 3, 4, 5, 6]);
    let server = Server::new(vec![0; 10]);
    // One request at a time: of several in flight, a failure would give up those that are still on their way.
    let one = || server.s3().retries(0).in_flight(1);
    let open = || SnapshotStore::open_with("s3://bucket/prefix", &one()).unwrap();
    let chunks = || {
        let paths = server.paths().into_iter();
        paths.filter(|path| path.starts_with("bucket/prefix/chunks/")).collect::<Vec<_>>()
    };
    let mut left = 0;
    for proper in [3, 2] {
        let puts = AtomicUsize::new(0);
        server.plan_each(move |_, asked| {
            let is_chunk = asked.method == "PUT" && asked.head.contains("/chunks/");
            match is_chunk && puts.fetch_add(1, Ordering::SeqCst) >= proper {
                true => Answer::Status(500),
                false => Answer::Proper,
            }
        });
        let failed = open().publish(&pool, &options());
        assert!(matches!(failed, Err(PublishError::Store { .. })), "{failed:?}");
        left += proper;
        assert_eq!(chunks().len(), left, "nothing is sent twice");
    }
    // One of them is cut.
    let cut = chunks().pop().unwrap();
    let whole = server.get(&cut).unwrap();
    server.put(&cut, whole[..whole.len() - 1].to_vec());
    server.plan(|_| Answer::Proper);
    let published = open().publish(&pool, &options()).unwrap();
    let all = chunks().len();
    assert_eq!(published.sent_chunks as usize, all - left + 1, "{all} in all, {published:?}");
    assert_eq!(server.get(&cut).unwrap(), whole);
    let copy = place.path("b.pool");
    open().restore(&copy, &RestoreOptions::default()).unwrap();
    assert_eq!(content(&copy).len(), 6);
    // Of what is there nothing is trusted on request.
    let reread = open().publish(&pool, &options().reread(true)).unwrap();
    assert_eq!(reread.sent_chunks as usize, all);
}

/// As in a directory in which a publisher was killed before its entry of the log.
#[test]
fn what_a_killed_publisher_has_put_into_a_directory_is_kept() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1, 2]);
    let store = place.store();
    let first = store.publish(&pool, &options()).unwrap();
    assert!(first.sent_chunks > 0);
    fs::remove_dir_all(place.path("store/log")).unwrap();
    let second = store.publish(&pool, &options()).unwrap();
    assert_eq!((second.snapshot, second.sent_chunks, second.sent_bytes), (1, 0, 0));
    store.restore(place.path("b.pool"), &RestoreOptions::default()).unwrap();
}

/// What creates an object of the log is not repeated by the library, because it has a condition.
#[test]
fn a_lost_answer_of_the_log_is_looked_up() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1]);
    let server = Server::new(vec![0; 10]);
    let store = SnapshotStore::open_with("s3://bucket/prefix", &server.s3()).unwrap();
    // Each entry's, of snapshots and of a collection.
    server.plan_each(|_, asked| match asked.method == "PUT" && asked.head.contains("/log/") {
        true => Answer::Lost,
        false => Answer::Proper,
    });
    for snapshot in [1, 2] {
        assert_eq!(store.publish(&pool, &options()).unwrap().snapshot, snapshot);
    }
    let collected = store.publish(&pool, &options().keep(1).grace(Duration::ZERO)).unwrap();
    assert_eq!((collected.snapshot, collected.removed_snapshots), (3, 2));
    // Nothing was done.
    server.plan_each(|_, asked| match asked.method == "PUT" && asked.head.contains("/log/") {
        true => Answer::Reset,
        false => Answer::Proper,
    });
    let failed = store.publish(&pool, &options());
    assert!(matches!(failed, Err(PublishError::Store { .. })), "{failed:?}");
    assert_eq!(store.snapshots().unwrap().len(), 1);
}

#[test]
fn an_http_server_is_restored_from() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1, 2]);
    let server = Server::new(vec![0; 10]);
    let store = SnapshotStore::open_with("s3://bucket/some prefix", &server.s3()).unwrap();
    store.publish(&pool, &options()).unwrap();
    add(&pool, 3);
    store.publish(&pool, &options()).unwrap();
    for url in ["some%20prefix", "some prefix/"] {
        let url = format!("{}/bucket/{url}", server.endpoint());
        let plain = SnapshotStore::open_with(&url, &crate::support::quick()).unwrap();
        for (snapshot, objects) in [(1, 2), (2, 3)] {
            let copy = place.path("b.pool");
            let of = RestoreOptions::default().snapshot(snapshot).overwrite(true);
            assert_eq!(plain.restore(&copy, &of).unwrap().snapshot, snapshot);
            assert_eq!(content(&copy).len(), objects);
        }
        let path = place.path("c.pool");
        let none = plain.restore(&path, &RestoreOptions::default().snapshot(3));
        assert!(matches!(none, Err(PublishError::NoSnapshot { wanted: Some(3), .. })), "{none:?}");
        for unlisted in [
            plain.restore(&path, &RestoreOptions::default()).map(drop),
            plain.snapshots().map(drop),
        ] {
            let said = unlisted.unwrap_err().to_string();
            assert!(said.contains("lists no objects") && said.contains("--snapshot"), "{said}");
        }
        let refused = plain.publish(&pool, &options());
        assert!(matches!(refused, Err(PublishError::Unsuitable { .. })), "{refused:?}");
    }
}

#[test]
fn what_no_kept_snapshot_needs_is_deleted() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1]);
    let store = place.store();
    for byte in 2..6 {
        store.publish(&pool, &options()).unwrap();
        add(&pool, byte);
    }
    let before = place.objects("chunks").len();
    let keep = options().keep(2);
    // Younger than the grace period.
    let spared = store.publish(&pool, &keep).unwrap();
    assert_eq!((spared.removed_snapshots, spared.deleted_objects), (3, 0));
    assert!(place.objects("chunks").len() >= before);
    add(&pool, 6);
    let collected = store.publish(&pool, &keep.grace(Duration::ZERO)).unwrap();
    assert!(collected.deleted_objects > 0);
    assert!(place.objects("chunks").len() < before);
    let listed: Vec<_> = store.snapshots().unwrap().iter().map(|of| of.snapshot).collect();
    assert_eq!(listed, [spared.snapshot, collected.snapshot]);
    assert_eq!(place.objects("log").len(), 3, "two snapshots and the last collection");
    for (snapshot, objects) in listed.iter().zip([5, 6]) {
        let copy = place.path(&format!("{snapshot}.pool"));
        store.restore(&copy, &RestoreOptions::default().snapshot(*snapshot)).unwrap();
        assert_eq!(content(&copy).len(), objects);
    }
    let removed = store.restore(place.path("c"), &RestoreOptions::default().snapshot(1));
    assert!(matches!(removed, Err(PublishError::NoSnapshot { wanted: Some(1), .. })));
}

#[test]
fn damage_is_found_and_named() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1, 2]);
    let store = place.store();
    store.publish(&pool, &options()).unwrap();
    for folder in ["log", "tables", "chunks"] {
        for object in place.objects(folder) {
            let whole = fs::read(&object).unwrap();
            let mut changed = whole.clone();
            *changed.last_mut().unwrap() ^= 1;
            let longer = [&whole[..], &[0]].concat();
            for bytes in [&changed[..], &whole[..whole.len() - 1], &whole[..0], &longer] {
                fs::write(&object, bytes).unwrap();
                let copy = place.path("b.pool");
                let error = store.restore(&copy, &RestoreOptions::default()).unwrap_err();
                assert!(matches!(error, PublishError::Damaged { .. }), "{error}");
                let name = object.file_name().unwrap().to_str().unwrap();
                assert!(error.to_string().contains(name), "{error}");
                assert!(!copy.exists());
            }
            fs::remove_file(&object).unwrap();
            let error = store.restore(place.path("b.pool"), &RestoreOptions::default());
            match (folder, error.unwrap_err()) {
                ("log", PublishError::NoSnapshot { wanted: None, .. }) => {}
                (_, PublishError::Missing { object: named }) => {
                    assert!(named.ends_with(object.file_name().unwrap().to_str().unwrap()));
                }
                (_, error) => panic!("{error}"),
            }
            fs::write(&object, whole).unwrap();
        }
    }
    assert_eq!(fs::read_dir(place.directory.path()).unwrap().count(), 2, "no files are left");
    store.restore(place.path("b.pool"), &RestoreOptions::default()).unwrap();
}

#[test]
fn what_is_damaged_is_sent_again() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1, 2]);
    let store = place.store();
    store.publish(&pool, &options()).unwrap();
    // Shorter, and of the same length.
    let spoils: [fn(&mut Vec<u8>); 2] =
        [|bytes| bytes.truncate(1), |bytes| *bytes.last_mut().unwrap() ^= 1];
    for spoil in spoils {
        for table in place.objects("tables") {
            let mut bytes = fs::read(&table).unwrap();
            spoil(&mut bytes);
            fs::write(table, bytes).unwrap();
        }
        let sent = store.publish(&pool, &options()).unwrap();
        assert!(sent.sent_chunks > 0);
        let force = RestoreOptions::default().overwrite(true);
        store.restore(place.path("b.pool"), &force).unwrap();
    }
}

#[test]
fn a_chunk_that_is_gone_is_sent_again_on_request_and_nothing_is_removed_before() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1]);
    let store = place.store();
    let first = store.publish(&pool, &options()).unwrap().snapshot;
    add(&pool, 2);
    let before = place.objects("chunks");
    store.publish(&pool, &options()).unwrap();
    // One that the first snapshot lacks: that is whole, and must stay.
    let chunks = place.objects("chunks");
    let gone = chunks.iter().find(|chunk| !before.contains(chunk)).unwrap();
    let whole = fs::read(gone).unwrap();
    let keep = || options().keep(1).grace(Duration::ZERO);
    let restore = |snapshot: Option<u64>| {
        let options = RestoreOptions::default().overwrite(true);
        let options = snapshot.into_iter().fold(options, RestoreOptions::snapshot);
        store.restore(place.path("b.pool"), &options)
    };
    for short in [None, Some(&whole[..whole.len() - 1])] {
        match short {
            None => fs::remove_file(gone).unwrap(),
            Some(short) => fs::write(gone, short).unwrap(),
        }
        let error = store.publish(&pool, &keep()).unwrap_err();
        let PublishError::NotCollected { published, source } = &error else { panic!("{error}") };
        assert!(published.snapshot > first && published.removed_snapshots == 0, "{published:?}");
        let is_of_bytes =
            matches!(**source, PublishError::Missing { .. } | PublishError::Damaged { .. });
        assert!(is_of_bytes, "{error}");
        let name = gone.file_name().unwrap().to_str().unwrap();
        assert!(error.to_string().contains(name), "{error}");
        assert!(error.to_string().contains("--reread"), "{error}");
        restore(Some(first)).unwrap();
        restore(None).unwrap_err();
    }
    store.publish(&pool, &keep().reread(true)).unwrap();
    restore(None).unwrap();
    assert_eq!(content(&place.path("b.pool")).len(), 2);
    assert_eq!(store.snapshots().unwrap().len(), 1);
}

#[test]
fn a_damaged_entry_of_the_log_leaves_the_others() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1]);
    let store = place.store();
    for _ in 0..3 {
        store.publish(&pool, &options()).unwrap();
    }
    for damaged in [2, 3] {
        let entry = place.path(&format!("store/log/{damaged:020}"));
        let whole = fs::read(&entry).unwrap();
        fs::write(&entry, "x").unwrap();
        for snapshot in 1..=3 {
            let of = RestoreOptions::default().snapshot(snapshot).overwrite(true);
            let restored = store.restore(place.path("b.pool"), &of);
            match restored {
                Ok(restored) => assert_eq!(restored.snapshot, snapshot),
                Err(PublishError::Damaged { .. }) => assert_eq!(snapshot, damaged),
                Err(error) => panic!("{error}"),
            }
        }
        let mut failures = Vec::new();
        let listed = store.snapshots_despite(&mut |failure| failures.push(failure)).unwrap();
        let listed: Vec<_> = listed.iter().map(|of| of.snapshot).collect();
        let rest: Vec<_> = (1..=3).filter(|&snapshot| snapshot != damaged).collect();
        assert_eq!(listed, rest);
        assert!(matches!(&failures[..], [PublishError::Damaged { .. }]), "{failures:?}");
        assert!(store.snapshots().is_err());
        fs::write(&entry, whole).unwrap();
    }
    assert_eq!(store.snapshots().unwrap().len(), 3);
}

#[test]
fn a_pool_that_is_opened_meanwhile_is_not_replaced() {
    let place = Place::new();
    let path = place.pool("a.pool", &[1]);
    let store = place.store();
    store.publish(&path, &options()).unwrap();
    let (copy, other) = (place.path("b.pool"), place.pool("c.pool", &[2]));
    let force = RestoreOptions::default().overwrite(true);
    store.restore(&copy, &force).unwrap();
    // A process that opens the old pool while the new one is received finds it busy.
    let mut opened = Vec::new();
    let mut told = |at| match at {
        Progress::Bytes { done, all } if done == all => opened.push(Pool::open(&copy)),
        _ => {}
    };
    store.restore_with_progress(&copy, &force, &mut told).unwrap();
    assert!(matches!(&opened[..], [Err(PoolError::Busy { .. })]), "{opened:?}");
    // Another pool comes to the path meanwhile, and is open.
    let mut open = None;
    let mut told = |at| match at {
        Progress::Bytes { done, all } if done == all => {
            fs::rename(&other, &copy).unwrap();
            open = Some(Pool::open(&copy).unwrap());
        }
        _ => {}
    };
    let refused = store.restore_with_progress(&copy, &force, &mut told);
    assert!(matches!(refused, Err(PublishError::Pool(PoolError::Busy { .. }))), "{refused:?}");
    drop(open);
    assert_eq!(content(&copy), [(vec![b'c'], 2)]);
    // A damaged one is replaced, as is anything else.
    fs::write(&copy, vec![7; 1 << 20]).unwrap();
    store.restore(&copy, &force).unwrap();
    assert_eq!(content(&copy), [(vec![b'b'], 1)]);
}

#[test]
fn writers_and_the_publisher_keep_each_other_out() {
    let place = Place::new();
    let path = place.pool("a.pool", &[1]);
    let store = place.store();
    let writer = Pool::open(&path).unwrap();
    let refused = store.publish(&path, &options());
    let Err(PublishError::InUse { processes, .. }) = &refused else { panic!("{refused:?}") };
    assert_eq!(*processes, [std::process::id()]);
    // Waits until the writer has gone, and then keeps writers out.
    let (mut writer, mut was_busy) = (Some(writer), false);
    let mut told = |at| match at {
        Progress::Waiting(processes) => {
            assert!(writer.take().is_none() || processes == [std::process::id()]);
        }
        Progress::Bytes { .. } if !was_busy => {
            was_busy = matches!(Pool::open(&path), Err(PoolError::Busy { .. }));
            assert!(was_busy);
            Pool::options().read_only(true).open(&path).unwrap();
        }
        _ => {}
    };
    store.publish_with_progress(&path, &options().freeze(true), &mut told).unwrap();
    assert!(was_busy);
    Pool::open(&path).unwrap();
}

#[test]
fn a_pool_whose_processes_were_killed_is_recovered_first() {
    let place = Place::new();
    let path = place.pool("a.pool", &[1]);
    // As a process leaves it that is killed.
    let pool = Pool::open(&path).unwrap();
    let crashed = place.path("crashed.pool");
    fs::copy(&path, &crashed).unwrap();
    drop(pool);
    let store = place.store();
    store.publish(&crashed, &options()).unwrap();
    let copy = place.path("b.pool");
    store.restore(&copy, &RestoreOptions::default()).unwrap();
    let restored = Pool::options().read_only(true).open(&copy).unwrap();
    assert_eq!(restored.info().unwrap().recovered_records, 0);
}

#[test]
fn a_file_is_replaced_only_on_request_and_not_in_use() {
    let place = Place::new();
    let path = place.pool("a.pool", &[1]);
    let store = place.store();
    store.publish(&path, &options()).unwrap();
    let copy = place.path("b.pool");
    fs::write(&copy, "something else").unwrap();
    let plain = RestoreOptions::default();
    let refused = store.restore(&copy, &plain);
    assert!(matches!(refused, Err(PublishError::Exists { .. })));
    assert_eq!(fs::read(&copy).unwrap(), b"something else");
    let force = plain.overwrite(true);
    store.restore(&copy, &force).unwrap();
    assert_eq!(content(&copy).len(), 1);
    let open = Pool::open(&copy).unwrap();
    let refused = store.restore(&copy, &force);
    assert!(matches!(refused, Err(PublishError::Pool(PoolError::Busy { .. }))), "{refused:?}");
    drop(open);
    let refused = store.restore(place.directory.path(), &force);
    assert!(matches!(refused, Err(PublishError::File { .. })));
    assert_eq!(fs::read_dir(place.directory.path()).unwrap().count(), 3, "no files are left");
}

/// Of publishers that were killed. One that is at work needs its own.
#[test]
fn a_collection_removes_old_probes() {
    let place = Place::new();
    let pool = place.pool("a.pool", &[1]);
    let store = place.store();
    store.publish(&pool, &options()).unwrap();
    assert_eq!(place.objects("probes"), [] as [PathBuf; 0]);
    let folder = place.path("store/probes");
    fs::create_dir_all(&folder).unwrap();
    let two_days_ago = SystemTime::now() - Duration::from_secs(2 * 24 * 3600);
    for (name, is_old) in [("00ff00ff00ff00ff", true), ("1111111111111111", false), ("other", true)]
    {
        let file = fs::File::create(folder.join(name)).unwrap();
        if is_old {
            file.set_modified(two_days_ago).unwrap();
        }
    }
    store.publish(&pool, &options().keep(1).grace(Duration::ZERO)).unwrap();
    assert_eq!(
        place.objects("probes"),
        ["1111111111111111", "other"].map(|name| folder.join(name))
    );
}

#[test]
fn a_prefix_has_the_snapshots_of_one_pool() {
    let place = Place::new();
    let (one, other) = (place.pool("a.pool", &[1]), place.pool("b.pool", &[1]));
    let store = place.store();
    store.publish(&one, &options()).unwrap();
    let refused = store.publish(&other, &options());
    assert!(matches!(refused, Err(PublishError::OtherPool { .. })), "{refused:?}");
    assert_eq!(store.snapshots().unwrap().len(), 1);
}

#[test]
fn an_empty_prefix_has_no_snapshots() {
    let place = Place::new();
    let store = place.store();
    let missing = [
        store.snapshots().map(drop),
        store.restore(place.path("a"), &RestoreOptions::default()).map(drop),
    ];
    for missing in missing {
        let said = missing.unwrap_err().to_string();
        assert!(said.contains("no such directory") && said.contains("/store"), "{said}");
    }
    fs::create_dir(place.path("store")).unwrap();
    assert!(store.snapshots().unwrap().is_empty());
    let refused = store.restore(place.path("a"), &RestoreOptions::default());
    assert!(matches!(refused, Err(PublishError::NoSnapshot { wanted: None, .. })));
    let small = options().chunk_bytes(1000);
    let refused = store.publish(place.path("a"), &small);
    assert!(matches!(refused, Err(PublishError::Parameter { .. })));
    let missing = store.publish(place.path("a"), &options());
    assert!(matches!(missing, Err(PublishError::Pool(PoolError::NotOpened(_)))), "{missing:?}");
}
