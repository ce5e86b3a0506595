//! Requests of a shared mount without a kernel: locks, and writes that are to be durable.

use std::io::IoSlice;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex};

use aquifer_crashkit::{CrashMedia, Fault, Trigger};
use aquifer_fs::Files;
use aquifer_pool::media::{MediaOperation, PersistenceDomain};
use aquifer_pool::{AdvisoryLocks, LockArea, LockMode, Pool, PoolOptions};
use rustix::fd::AsFd;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::*;
use crate::answer::{Channel, Delivered};
use crate::options::Cache;
use crate::wire::{
    self, Entry, InHeader, LockIn, OutHeader, ROOT, ReadIn, ReleaseIn, SetAttributesIn, WriteIn,
    lock, parse, set, write,
};

mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const RELEASE: u32 = 18;
    pub const FLUSH: u32 = 25;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const INTERRUPT: u32 = 36;
}

/// What the kernel calls an owner of locks.
const OWNER: u64 = 0xabcd;

/// Keeps answers; also those that are given later.
#[derive(Clone, Default)]
struct Client(Arc<(Mutex<Vec<Vec<u8>>>, Condvar)>);

impl Channel for Client {
    fn send(&self, parts: &[IoSlice<'_>]) -> Delivered {
        let answer = parts.iter().flat_map(|part| part.iter().copied()).collect();
        self.0.0.lock().unwrap().push(answer);
        self.0.1.notify_all();
        Delivered::Yes
    }

    fn another(&self) -> Option<Box<dyn Channel + Send>> {
        Some(Box::new(self.clone()))
    }
}

impl Client {
    /// The answer to a request, when it is there: its error number and what follows.
    fn answer(&self, unique: u64) -> (i32, Vec<u8>) {
        let mut answers = self.0.0.lock().unwrap();
        loop {
            let of = |answer: &Vec<u8>| OutHeader::read_from_prefix(answer).unwrap().0;
            if let Some(answer) = answers.iter().find(|answer| of(answer).unique == unique) {
                return (-of(answer).error, answer[size_of::<OutHeader>()..].to_vec());
            }
            answers = self.0.1.wait(answers).unwrap();
        }
    }

    fn has_answered(&self, unique: u64) -> bool {
        let answers = self.0.0.lock().unwrap();
        let of = |answer: &Vec<u8>| OutHeader::read_from_prefix(answer).unwrap().0.unique;
        answers.iter().any(|answer| of(answer) == unique)
    }
}

pub(super) struct Scene {
    directory: tempfile::TempDir,
    fs: PoolFs,
    pool: Pool,
    client: Client,
    unique: AtomicU64,
    /// The inode of a file.
    pub(super) node: u64,
}

fn shared(files: Files, kept_locks: Vec<(OpenOwner, std::os::fd::OwnedFd)>) -> PoolFs {
    let slots = files.pool().layout().slots();
    let lasting = Lasting {
        table: NodeTable::new(slots).unwrap(),
        orphans: Orphans::own(),
        notes: None,
        keeps_locks: Box::new(KeepsNone),
        kept_locks,
    };
    let alone = init::WRITEBACK_CACHE | init::NO_OPEN_SUPPORT | init::NO_OPENDIR_SUPPORT;
    let agreed = Agreed { minor: wire::NEWEST_MINOR, flags: !alone };
    PoolFs::lasting(files, agreed, MountOptions::new().cache(Cache::Shared), lasting).unwrap()
}

impl Scene {
    pub(super) fn new() -> Scene {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = directory.path().join("pool");
        drop(Pool::create(&path, 16 << 20).unwrap());
        let options = Pool::options().background(false).segment_directory(directory.path());
        Scene::of(directory, options.open(&path).unwrap())
    }

    fn of(directory: tempfile::TempDir, pool: Pool) -> Scene {
        let files = Files::new(pool.clone());
        drop(files.create_file("/f").unwrap());
        let (fs, unique) = (shared(files, Vec::new()), AtomicU64::new(0));
        let client = Client::default();
        let scene = Scene { directory, fs, pool, client, unique, node: 0 };
        let (errno, bytes) = scene.ask(opcode::LOOKUP, ROOT, b"f\0");
        assert_eq!(errno, 0);
        let node = Entry::read_from_prefix(&bytes).unwrap().0.nodeid;
        Scene { node, ..scene }
    }

    /// Sends a request. Returns its name.
    fn send(&self, opcode: u32, nodeid: u64, body: &[u8]) -> u64 {
        self.send_for((0, 0), opcode, nodeid, body)
    }

    /// Sends a request of a process of this user and group.
    fn send_for(&self, (uid, gid): (u32, u32), opcode: u32, nodeid: u64, body: &[u8]) -> u64 {
        let unique = self.unique.fetch_add(2, Relaxed) + 2;
        let len = (size_of::<InHeader>() + body.len()) as u32;
        let header = InHeader { len, opcode, unique, nodeid, uid, gid, ..InHeader::new_zeroed() };
        let bytes = [header.as_bytes(), body].concat();
        let request = parse(&bytes).expect("a request");
        let answer = Answer::new(&self.client, request.unique);
        self.fs.handle(&request, &mut [0; 4096], answer, &Worker::alone());
        unique
    }

    /// Sends a request and waits for its answer.
    fn ask(&self, opcode: u32, nodeid: u64, body: &[u8]) -> (i32, Vec<u8>) {
        self.client.answer(self.send(opcode, nodeid, body))
    }

    /// Sends a request of a process of this user and group. Returns the error number of its answer.
    pub(super) fn errno_for(&self, of: (u32, u32), opcode: u32, nodeid: u64, body: &[u8]) -> i32 {
        self.client.answer(self.send_for(of, opcode, nodeid, body)).0
    }

    fn set_lock(&self, fh: u64, kind: i32, lock_flags: u32, waits: bool) -> u64 {
        let end = lock::END;
        let kind = kind as u32;
        let lock = LockIn { fh, owner: OWNER, end, kind, lock_flags, ..LockIn::new_zeroed() };
        let opcode = if waits { opcode::SETLKW } else { opcode::SETLK };
        self.send(opcode, self.node, lock.as_bytes())
    }

    /// The error of a range that is locked, or unlocked, by an owner.
    fn set_range(&self, owner: u64, bytes: std::ops::Range<u64>, kind: i32) -> i32 {
        let (start, end, kind) = (bytes.start, bytes.end - 1, kind as u32);
        let lock = LockIn { fh: 1, owner, start, end, kind, ..LockIn::new_zeroed() };
        self.ask(opcode::SETLK, self.node, lock.as_bytes()).0
    }

    fn limit(&mut self, holders: usize, ranges: usize) {
        let locks = Arc::get_mut(self.fs.locks.as_mut().unwrap()).unwrap();
        (locks.most_holders, locks.most_ranges) = (holders, ranges);
    }

    fn try_flock(&self, fh: u64) -> i32 {
        self.client.answer(self.set_lock(fh, libc::F_RDLCK, lock::FLOCK, false)).0
    }

    fn locks(&self, fh: u64, lock_flags: u32) {
        let unique = self.set_lock(fh, libc::F_WRLCK, lock_flags, false);
        assert_eq!(self.client.answer(unique).0, 0);
    }

    fn release(&self, fh: u64) {
        let release = ReleaseIn { fh, ..ReleaseIn::new_zeroed() };
        assert_eq!(self.ask(opcode::RELEASE, self.node, release.as_bytes()).0, 0);
    }

    fn flush(&self) {
        assert_eq!(self.ask(opcode::FLUSH, self.node, [0, 0, OWNER].as_bytes()).0, 0);
    }

    /// Locks that are not those of the mount.
    fn other(&self) -> AdvisoryLocks {
        self.pool.advisory_locks(self.node).unwrap()
    }

    /// Whether the mount has the whole file locked, or any range of it.
    fn is_locked(&self, area: &LockArea) -> bool {
        self.other().conflict(area, LockMode::Shared).unwrap().is_some()
    }
}

const ALL: LockArea = LockArea::Bytes(0..u64::MAX);

#[test]
fn a_late_release_does_not_end_the_locks_of_the_next_description() {
    // Its address is that of the one before.
    for (flags, area) in [(lock::FLOCK, LockArea::File), (0, ALL)] {
        let scene = Scene::new();
        scene.locks(1, flags);
        if flags == lock::FLOCK {
            scene.release(1);
            assert!(!scene.is_locked(&area));
            scene.locks(1, flags);
            // It is another owner, although the kernel calls it the same.
            let unique = scene.set_lock(2, libc::F_WRLCK, flags, false);
            assert_eq!(scene.client.answer(unique).0, libc::EAGAIN);
            let waits = scene.set_lock(2, libc::F_WRLCK, flags, true);
            scene.release(1);
            assert_eq!(scene.client.answer(waits).0, 0);
        } else {
            scene.locks(2, flags);
            scene.release(1);
        }
        assert!(scene.is_locked(&area), "{area:?}");
        scene.release(3);
        assert!(scene.is_locked(&area), "{area:?}");
        scene.release(2);
        assert!(!scene.is_locked(&area), "{area:?}");
    }
}

#[test]
fn a_process_that_closes_a_descriptor_loses_its_ranges_and_no_others() {
    let scene = Scene::new();
    (1..20).for_each(|fh| scene.locks(fh, 0));
    scene.locks(1, lock::FLOCK);
    scene.flush();
    assert!(!scene.is_locked(&ALL) && scene.is_locked(&LockArea::File));
    scene.release(1);
    assert!(!scene.is_locked(&LockArea::File));
}

#[test]
fn a_wait_goes_on_when_its_process_closes_another_descriptor() {
    let scene = Scene::new();
    let other = scene.other();
    assert!(other.try_lock(&ALL, LockMode::Exclusive).unwrap());
    let waits = scene.set_lock(1, libc::F_WRLCK, 0, true);
    scene.flush();
    other.unlock(&ALL).unwrap();
    assert_eq!(scene.client.answer(waits).0, 0);
    assert!(scene.is_locked(&ALL));
    // And a signal ends it.
    scene.set_lock(1, libc::F_UNLCK, 0, false);
    assert!(other.try_lock(&ALL, LockMode::Exclusive).unwrap());
    let waits = scene.set_lock(1, libc::F_WRLCK, 0, true);
    assert!(!scene.client.has_answered(waits));
    scene.send(opcode::INTERRUPT, 0, waits.as_bytes());
    assert_eq!(scene.client.answer(waits).0, libc::EINTR);
}

/// Another thread was told that the kernel had forgotten it, and the kernel has been given it again since.
#[test]
fn what_the_kernel_knows_again_keeps_its_locks_and_is_watched() {
    let scene = Scene::new();
    scene.locks(1, lock::FLOCK);
    let read = ReadIn { size: 4096, ..ReadIn::new_zeroed() };
    assert_eq!(scene.ask(opcode::READ, scene.node, read.as_bytes()).0, 0);
    scene.fs.is_forgotten(scene.node);
    assert!(scene.is_locked(&LockArea::File));
    foreign(&scene).write("/f", [1; 5000]).unwrap();
    assert_eq!(scene.fs.changed_mappings(), [scene.node]);
    scene.send(opcode::FORGET, scene.node, 1_u64.as_bytes());
    assert!(!scene.is_locked(&LockArea::File) && scene.fs.changed_mappings().is_empty());
}

#[test]
fn locks_outlive_a_server_that_ends_in_order() {
    let scene = Scene::new();
    // The keeper's, which is never used here.
    let kept = scene.other();
    assert!(kept.try_lock(&LockArea::File, LockMode::Exclusive).unwrap());
    let name = OwnerName::OpenFile(7);
    let owner = OpenOwner { owner: LockOwner { node: scene.node, name }, open: vec![7] };
    let file = kept.as_fd().try_clone_to_owned().unwrap();
    drop(shared(Files::new(scene.pool.clone()), vec![(owner, file)]));
    assert!(scene.is_locked(&LockArea::File));
}

#[test]
fn owners_are_limited_and_those_without_locks_make_room() {
    let mut scene = Scene::new();
    scene.limit(3, 100);
    assert_eq!(
        [1, 2, 3, 4, 5].map(|fh| scene.try_flock(fh)),
        [0, 0, 0, libc::ENOLCK, libc::ENOLCK]
    );
    // Those that have ended.
    scene.release(2);
    assert_eq!([4, 5].map(|fh| scene.try_flock(fh)), [0, libc::ENOLCK]);
    // Those that are open, and have nothing locked.
    let unlocked = scene.set_lock(1, libc::F_UNLCK, lock::FLOCK, false);
    assert_eq!(scene.client.answer(unlocked).0, 0);
    assert_eq!([5, 1].map(|fh| scene.try_flock(fh)), [0, libc::ENOLCK]);
    // One that waits stays one.
    scene.release(3);
    let waits = scene.set_lock(6, libc::F_WRLCK, lock::FLOCK, true);
    assert_eq!(scene.try_flock(7), libc::ENOLCK);
    [4, 5].into_iter().for_each(|fh| scene.release(fh));
    assert_eq!(scene.client.answer(waits).0, 0);
}

#[test]
fn ranges_are_limited() {
    let mut scene = Scene::new();
    scene.limit(10, 4);
    let (lock, unlock) = (libc::F_WRLCK, libc::F_UNLCK);
    let apart = |at: u64| 10 * at..10 * at + 3;
    let locked = [1, 2, 3, 4, 5].map(|at| scene.set_range(at % 2, apart(at), lock));
    assert_eq!(locked, [0, 0, 0, 0, libc::ENOLCK]);
    // As many as before, or fewer; but not more by unlocking.
    assert_eq!(scene.set_range(0, 20..25, lock), 0);
    assert_eq!(scene.set_range(0, 22..23, unlock), libc::ENOLCK);
    assert_eq!(scene.set_range(0, 22..25, unlock), 0);
    assert_eq!(scene.set_range(0, apart(4), unlock), 0);
    assert_eq!([5, 6].map(|at| scene.set_range(1, apart(at), lock)), [0, libc::ENOLCK]);
    // All of an owner's.
    assert_eq!(scene.ask(opcode::FLUSH, scene.node, [0_u64, 0, 1].as_bytes()).0, 0);
    let locked = [1, 3, 5, 6].map(|at| scene.set_range(2, apart(at), lock));
    assert_eq!(locked, [0, 0, 0, libc::ENOLCK]);
}

#[test]
fn waits_are_limited_and_leave_when_they_are_interrupted() {
    let scene = Scene::new();
    let other = scene.other();
    assert!(other.try_lock(&ALL, LockMode::Exclusive).unwrap());
    let wait = || scene.set_lock(1, libc::F_WRLCK, 0, true);
    let waits: Vec<u64> = (0..crate::state::MOST_WAITING).map(|_| wait()).collect();
    assert_eq!(scene.client.answer(wait()).0, libc::ENOLCK);
    for unique in &waits[10..] {
        scene.send(opcode::INTERRUPT, 0, unique.as_bytes());
    }
    assert_eq!(scene.client.answer(*waits.last().unwrap()).0, libc::EINTR);
    let more = wait();
    other.unlock(&ALL).unwrap();
    // All are of one owner.
    for unique in waits[..10].iter().chain([&more]) {
        assert_eq!(scene.client.answer(*unique).0, 0);
    }
}

#[test]
fn a_wait_ends_with_its_file() {
    let scene = Scene::new();
    let other = scene.other();
    assert!(other.try_lock(&ALL, LockMode::Exclusive).unwrap());
    let waits = scene.set_lock(1, libc::F_WRLCK, 0, true);
    scene.send(opcode::FORGET, scene.node, 1_u64.as_bytes());
    assert_eq!(scene.client.answer(waits).0, libc::ESTALE);
}

#[test]
fn unlocking_what_cannot_be_locked_is_no_error() {
    let scene = Scene::new();
    let start = scene.pool.lockable_bytes();
    for (kind, expected) in [(libc::F_UNLCK, 0), (libc::F_WRLCK, libc::EOVERFLOW)] {
        let kind = kind as u32;
        let lock = LockIn { fh: 1, start, end: lock::END, kind, ..LockIn::new_zeroed() };
        assert_eq!(scene.ask(opcode::SETLK, scene.node, lock.as_bytes()).0, expected);
    }
}

#[test]
fn a_write_that_is_to_be_durable_is() {
    for flags in [libc::O_DSYNC, libc::O_SYNC, libc::O_SYNC | libc::O_APPEND, 0] {
        let (disk, len_bytes) = (PersistenceDomain::PageCache, 4 << 20);
        let options = |options: PoolOptions| options.background(false).inodes(127);
        let fresh = Arc::new(CrashMedia::new(len_bytes, disk).unwrap());
        drop(options(Pool::options()).create_on(fresh.clone()).unwrap());
        let media = Arc::new(CrashMedia::from_image(&fresh.image(), disk).unwrap());
        let pool = options(Pool::options()).open_on(media.clone()).unwrap();
        let scene = Scene::of(tempfile::tempdir().unwrap(), pool);
        let write = WriteIn { size: 4, flags: flags as u32, ..WriteIn::new_zeroed() };
        let body = [write.as_bytes(), b"text"].concat();
        assert_eq!(scene.ask(opcode::WRITE, scene.node, &body).0, 0);
        media.fail(Fault::io_error(Trigger::on(MediaOperation::Flush)));
        let (errno, _) = scene.ask(opcode::WRITE, scene.node, &body);
        assert_eq!(errno, if flags == 0 { 0 } else { libc::EIO }, "{flags:#x}");
    }
}

/// What another process has open.
pub(super) fn foreign(scene: &Scene) -> Files {
    let directory = scene.directory.path();
    let options = Pool::options().background(false).segment_directory(directory);
    Files::new(options.open(directory.join("pool")).unwrap())
}

impl Scene {
    /// Fetches pages for a mapping.
    fn fault(&self, offset: u64, size: u32) -> Vec<u8> {
        let read = ReadIn { offset, size, ..ReadIn::new_zeroed() };
        let (errno, bytes) = self.ask(opcode::READ, self.node, read.as_bytes());
        assert_eq!(errno, 0);
        bytes
    }

    /// Sends pages back.
    fn write_back(&self, offset: u64, data: &[u8]) {
        let (size, write_flags) = (data.len() as u32, write::CACHE);
        let write = WriteIn { offset, size, write_flags, ..WriteIn::new_zeroed() };
        let body = [write.as_bytes(), data].concat();
        assert_eq!(self.ask(opcode::WRITE, self.node, &body).0, 0);
    }
}

#[test]
fn what_is_stored_to_a_mapping_is_no_change_by_others() {
    let scene = Scene::new();
    let others = foreign(&scene);
    others.write("/f", [1; 20_000]).unwrap();
    scene.fault(0, 8192);
    assert!(scene.fs.changed_mappings().is_empty());
    for round in 0..10 {
        scene.write_back(4096, &[round; 4096]);
        assert!(scene.fs.changed_mappings().is_empty(), "{round}");
    }
    let file = others.options().write(true).open("/f").unwrap();
    file.write_all_at(b"x", 12_000).unwrap();
    assert_eq!(scene.fs.changed_mappings(), [scene.node]);
    assert!(scene.fs.changed_mappings().is_empty());
    file.set_len(19_000).unwrap();
    assert_eq!(scene.fs.changed_mappings(), [scene.node]);
    // Two threads fetch the first pages, one before and one behind a change.
    file.write_all_at(b"y", 12_000).unwrap();
    scene.fs.watch_late(scene.fs.node(scene.node).unwrap());
    assert_eq!(scene.fs.changed_mappings(), [scene.node]);
}

/// Cannot drop pages now and then, and dies once.
struct Unreliable<'d>(&'d mut Vec<u64>, bool, bool);

impl DropsPages for Unreliable<'_> {
    fn has_lost(&mut self) -> bool {
        std::mem::take(&mut self.2)
    }

    fn drop_pages(&mut self, number: u64) -> bool {
        self.0.push(number);
        self.1
    }
}

#[test]
fn pages_are_dropped_again_where_that_may_not_have_happened() {
    let scene = Scene::new();
    let others = foreign(&scene);
    others.write("/f", [1; 20_000]).unwrap();
    scene.fault(0, 8192);
    let file = others.options().write(true).open("/f").unwrap();
    file.write_all_at(b"x", 12_000).unwrap();
    let told = |works, has_lost| {
        let mut told = Vec::new();
        scene.fs.drop_changed(&mut Unreliable(&mut told, works, has_lost));
        told.len()
    };
    assert_eq!([told(false, false), told(false, false), told(true, false)], [1, 1, 1]);
    assert_eq!([told(true, false), told(true, true), told(true, false)], [0, 1, 0]);
}

#[test]
fn a_page_that_comes_back_leaves_what_others_have_appended() {
    let scene = Scene::new();
    let others = foreign(&scene);
    others.write("/f", b"0123456789").unwrap();
    assert_eq!(scene.fault(0, 16 << 10), b"0123456789");
    let appended = [b'a'; 90];
    let file = others.options().append(true).open("/f").unwrap();
    file.write_all_at(&appended, 0).unwrap();
    // The kernel has heard of the length, and has zeros there.
    let mut page = [0; 100];
    page[..10].copy_from_slice(b"X123456789");
    scene.write_back(0, &page);
    let expected = [&b"X123456789"[..], &appended].concat();
    assert_eq!(others.read("/f").unwrap(), expected);
    // What was stored behind the end that it knew is written, up to there.
    page[20] = b'Y';
    scene.write_back(0, &page);
    let stored = [&page[..21], &appended[11..]].concat();
    assert_eq!(others.read("/f").unwrap(), stored);
    // Zeros that are stored to a page that was fetched again are, too.
    assert_eq!(scene.fault(0, 4096), stored);
    scene.write_back(0, &page);
    assert_eq!(others.read("/f").unwrap(), page);
    // And nothing behind an end that others have moved.
    file.set_len(50).unwrap();
    scene.write_back(0, &page);
    assert_eq!(others.read("/f").unwrap(), page[..50]);
}

impl Scene {
    fn look_up(&self, name: &[u8]) -> Entry {
        let (errno, bytes) = self.ask(opcode::LOOKUP, ROOT, &[name, b"\0"].concat());
        assert_eq!(errno, 0);
        Entry::read_from_prefix(&bytes).unwrap().0
    }

    fn change_mode(&self, id: u64, mode: u32) -> i32 {
        let set = SetAttributesIn { valid: set::MODE, mode, ..SetAttributesIn::new_zeroed() };
        self.ask(opcode::SETATTR, id, set.as_bytes()).0
    }
}

#[test]
fn an_inode_whose_number_is_used_again_is_gone_and_the_next_one_is_another() {
    let scene = Scene::new();
    let others = foreign(&scene);
    others.remove_file("/f").unwrap();
    others.create_file("/g").unwrap();
    others.set_permissions("/g", std::fs::Permissions::from_mode(0o600)).unwrap();
    let next = scene.look_up(b"g");
    assert_eq!(next.attributes.ino, scene.node, "the pool uses the number again");
    // The node ID of the first one changes nothing of the second.
    assert_eq!(scene.change_mode(scene.node, 0o666), libc::ESTALE);
    assert_eq!(others.metadata("/g").unwrap().mode() & 0o777, 0o600);
    let attributes = [0_u64; 2];
    assert_eq!(scene.ask(opcode::GETATTR, scene.node, attributes.as_bytes()).0, libc::ESTALE);
    scene.send(opcode::FORGET, scene.node, 1_u64.as_bytes());
    assert_eq!(scene.change_mode(next.nodeid, 0o640), 0);
    assert_eq!(others.metadata("/g").unwrap().mode() & 0o777, 0o640);
    // Pages are dropped of the node that has them.
    others.write("/g", [1; 5000]).unwrap();
    let read = ReadIn { size: 4096, ..ReadIn::new_zeroed() };
    assert_eq!(scene.ask(opcode::READ, next.nodeid, read.as_bytes()).0, 0);
    let file = others.options().write(true).open("/g").unwrap();
    file.write_all_at(b"x", 0).unwrap();
    assert_eq!(scene.fs.changed_mappings(), [next.nodeid]);
    // Until the kernel has forgotten that one as well, too.
    drop(file);
    scene.fs.tidy();
    scene.fs.tidy();
    others.remove_file("/g").unwrap();
    others.create_file("/h").unwrap();
    let third = scene.look_up(b"h");
    assert_eq!(third.attributes.ino, scene.node);
    assert!(![scene.node, next.nodeid].contains(&third.nodeid));
    assert_eq!(scene.change_mode(next.nodeid, 0o666), libc::ESTALE);
}
