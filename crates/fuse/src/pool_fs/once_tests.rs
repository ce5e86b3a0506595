//! Requests whose server dies at any point of them: the next server gets them again, and they have
//! happened once.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_fs::Files;
use aquifer_pool::{LockArea, LockMode, Pool, PoolOptions, end_thread_at};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::*;
use crate::answer::Delivered;
use crate::options::Cache;
use crate::state::{Memory, Word};
use crate::wire::{
    self, AttributesOut, Entry, InHeader, LockIn, OutHeader, ROOT, ReleaseIn, SetAttributesIn,
    WriteIn, lock, parse, set,
};

const RESENT: u64 = 1 << 63;
/// The points between the moment at which a change is ready and the end of its transaction; with whether
/// it has happened then.
const POINTS: [(&str, bool); 7] = [
    ("pinned", false),
    ("packed-written", false),
    ("note-begun", false),
    ("note-counted", false),
    ("packed-published", true),
    ("apply-half", true),
    ("apply-counted", true),
];
/// The points of a take-over.
const SETTLING: [&str; 4] = ["note-listed", "settle-result", "settle-deaths", "settle-listed"];
/// The points behind an answer.
const ANSWERED: [&str; 3] = ["answered", "end-settled", "end-note"];

struct Scene {
    directory: tempfile::TempDir,
    /// The sole writer, which has lent pins.
    keeper: Pool,
    memory: Memory,
    cache: Cache,
}

fn options() -> PoolOptions {
    Pool::options().background(false)
}

impl Scene {
    fn new(cache: Cache) -> Scene {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = directory.path().join("pool");
        let files = Files::new(options().inodes(200).create(&path, 8 << 20).unwrap());
        for name in ["a", "b", "x"] {
            files.create_file(name).unwrap();
        }
        files.create_dir("d").unwrap();
        files.set_attribute("x", "user.old", b"1", Default::default()).unwrap();
        drop(files);
        // Removed with the directory: the servers never close the pool.
        let keeper = options().sole("a test").segment_directory(directory.path());
        let keeper = keeper.open(&path).unwrap();
        let memory = Memory::new(keeper.layout().slots()).unwrap();
        memory.add_lent(&keeper.lend_pins(1).unwrap());
        memory.set(Word::NextId, 1);
        Scene { directory, keeper, memory, cache }
    }

    /// A server that has taken over. It is never dropped, as one that dies.
    fn server(&self) -> &'static PoolFs {
        let fs = self.beginning();
        fs.take_over().unwrap();
        fs
    }

    fn beginning(&self) -> &'static PoolFs {
        self.beginning_with(Vec::new())
    }

    fn beginning_with(&self, kept_locks: Vec<(OpenOwner, OwnedFd)>) -> &'static PoolFs {
        let nonce = self.keeper.sole_nonce().unwrap();
        let pool = options().beside(nonce).open(self.directory.path().join("pool")).unwrap();
        let pins = pool.borrow_pins(&self.memory.lent()).unwrap();
        let lasting = Lasting {
            table: self.memory.nodes(self.keeper.layout().slots()),
            orphans: Orphans::Lent(Lent::new(pins, || None)),
            notes: Some(Notes::new(self.memory.clone())),
            keeps_locks: Box::new(KeepsNone),
            kept_locks,
        };
        let less = if self.cache == Cache::Shared { init::NO_OPEN_SUPPORT } else { 0 };
        let agreed = Agreed { minor: wire::NEWEST_MINOR, flags: !less };
        let files = Files::without_reaping(pool);
        let options = MountOptions::new().cache(self.cache);
        let fs = PoolFs::lasting(files, agreed, options, lasting).unwrap();
        Box::leak(Box::new(fs))
    }
}

#[derive(Default)]
struct Client(Mutex<Vec<Vec<u8>>>);

impl crate::answer::Channel for Client {
    fn send(&self, parts: &[IoSlice<'_>]) -> Delivered {
        self.0.lock().unwrap().push(parts.iter().flat_map(|part| part.iter().copied()).collect());
        Delivered::Yes
    }
}

/// A request: its number, the inode it is about, its bytes.
#[derive(Clone)]
struct Sent {
    opcode: u32,
    node: u64,
    body: Vec<u8>,
}

/// A client whose answer outlives the server.
struct Alive<'a>(&'a Mutex<Vec<u8>>);

impl crate::answer::Channel for Alive<'_> {
    fn send(&self, parts: &[IoSlice<'_>]) -> Delivered {
        *self.0.lock().unwrap() = parts.iter().flat_map(|part| part.iter().copied()).collect();
        Delivered::Yes
    }
}

/// One that was killed, or whose request another channel has read.
struct Gone;

impl crate::answer::Channel for Gone {
    fn send(&self, _: &[IoSlice<'_>]) -> Delivered {
        Delivered::ClientGone
    }
}

/// Sends a request, and returns the error number and the bytes of the answer.
fn send(fs: &PoolFs, unique: u64, sent: &Sent) -> (i32, Vec<u8>) {
    let client = Client::default();
    send_to(fs, unique, sent, &client);
    let answers = client.0.into_inner().unwrap();
    let [answer] = &answers[..] else { return (0, vec![]) };
    let (header, rest) = OutHeader::read_from_prefix(answer).expect("a header");
    assert_eq!(header.unique, unique);
    (-header.error, rest.to_vec())
}

fn send_to(fs: &PoolFs, unique: u64, sent: &Sent, client: &dyn crate::answer::Channel) {
    let header = InHeader {
        len: (size_of::<InHeader>() + sent.body.len()) as u32,
        opcode: sent.opcode,
        unique,
        nodeid: sent.node,
        ..InHeader::new_zeroed()
    };
    let bytes = [header.as_bytes(), &sent.body].concat();
    let request = parse(&bytes).expect("a request");
    fs.handle(&request, &mut [0; 4096], Answer::new(client, request.unique), &Worker::alone());
}

fn ask(fs: &PoolFs, opcode: u32, node: u64, parts: &[&[u8]]) -> (i32, Vec<u8>) {
    static UNIQUE: AtomicU64 = AtomicU64::new(1000);
    send(fs, UNIQUE.fetch_add(2, Relaxed), &Sent { opcode, node, body: parts.concat() })
}

fn node_of(bytes: &[u8]) -> u64 {
    Entry::read_from_prefix(bytes).expect("an entry").0.nodeid
}

fn look_up(fs: &PoolFs, name: &[u8]) -> u64 {
    node_of(&ask(fs, 1, ROOT, &[name, b"\0"]).1)
}

/// How many names an inode has, or the error number.
fn links(fs: &PoolFs, node: u64) -> Result<u32> {
    let (errno, bytes) = ask(fs, 3, node, &[&[0; 16]]);
    if errno != 0 {
        return Err(Errno(errno));
    }
    Ok(AttributesOut::read_from_prefix(&bytes).expect("attributes").0.attributes.nlink)
}

/// All requests that happen once, of the scene with these inodes.
fn requests(fs: &PoolFs) -> Vec<Sent> {
    let [a, x] = [b"a", b"x"].map(|name| look_up(fs, name));
    let of = |opcode, node, parts: &[&[u8]]| Sent { opcode, node, body: parts.concat() };
    let create = [libc::O_RDWR as u32 | libc::O_EXCL as u32, 0o644, 0, 0];
    let unnamed = node_of(&ask(fs, 51, ROOT, &[create.as_bytes()]).1);
    // A server that dies here leaves what it has open: its process lives.
    fs.handles.close_all();
    let flags = (libc::O_WRONLY | libc::O_APPEND) as u32;
    let append = WriteIn { size: 8, flags, ..WriteIn::new_zeroed() };
    let resized =
        |size| SetAttributesIn { valid: set::SIZE, size, ..SetAttributesIn::new_zeroed() };
    let (longer, as_it_is) = (resized(5000), resized(0));
    let exchange = [[2_u32, 0].as_bytes(), b"a\0d\0"].concat();
    vec![
        of(6, ROOT, &[b"new\0target\0"]),
        of(8, ROOT, &[[libc::S_IFREG | 0o644, 0, 0, 0].as_bytes(), b"new\0"]),
        of(8, ROOT, &[[libc::S_IFIFO | 0o644, 0, 0, 0].as_bytes(), b"new\0"]),
        of(9, ROOT, &[[0o755_u32, 0].as_bytes(), b"new\0"]),
        of(10, ROOT, &[b"a\0"]),
        of(11, ROOT, &[b"d\0"]),
        of(13, ROOT, &[a.as_bytes(), b"new\0"]),
        of(21, x, &[[1_u32, 1, 0, 0].as_bytes(), b"user.new\0v"]),
        of(24, x, &[b"user.old\0"]),
        of(35, ROOT, &[create.as_bytes(), b"new\0"]),
        of(45, ROOT, &[ROOT.as_bytes(), &[0; 8], b"a\0b\0"]),
        of(45, ROOT, &[ROOT.as_bytes(), &[0; 8], b"a\0new\0"]),
        of(45, ROOT, &[ROOT.as_bytes(), &exchange]),
        of(13, ROOT, &[unnamed.as_bytes(), b"new\0"]),
        of(51, ROOT, &[create.as_bytes()]),
        of(16, x, &[append.as_bytes(), b"appended"]),
        of(4, x, &[longer.as_bytes()]),
        of(4, a, &[as_it_is.as_bytes()]),
    ]
}

/// In which mode the kernel sends it: alone, it knows where a file ends, and creates it by `MKNOD`.
fn cache_of(sent: &Sent) -> Cache {
    if matches!(sent.opcode, 16 | 35) { Cache::Shared } else { Cache::WriteBack }
}

/// What can be seen of the pool.
fn seen(fs: &PoolFs) -> Vec<String> {
    let entries = fs.files.read_dir("/").unwrap().map(|entry| entry.unwrap());
    let mut seen: Vec<_> = entries
        .map(|entry| {
            let path = format!("/{}", entry.file_name().to_string_lossy());
            let metadata = fs.files.symlink_metadata(&path).unwrap();
            let attributes = fs.files.attributes(&path).unwrap_or_default();
            let kind = metadata.file_type();
            let (number, links, len) = (metadata.ino(), metadata.nlink(), metadata.len());
            format!("{path} {kind:?} {number} {links} {len} {attributes:?}")
        })
        .collect();
    seen.sort_unstable();
    seen
}

#[test]
fn a_request_happens_once_wherever_its_server_dies() {
    let all = requests(Scene::new(Cache::WriteBack).server());
    for (at, one) in all.into_iter().enumerate() {
        let cache = cache_of(&one);
        let expected = {
            let scene = Scene::new(cache);
            let fs = scene.server();
            let sent = requests(fs)[at].clone();
            let (errno, bytes) = send(fs, 2, &sent);
            assert_eq!(errno, 0, "opcode {}", sent.opcode);
            (bytes.len(), seen(fs))
        };
        // A record of room for the file comes first, and its process must die before others do not
        // wait for it.
        let dies_as_thread = |point: &str| one.opcode != 16 || !point.starts_with("apply");
        for (number, (point, happened)) in POINTS.into_iter().enumerate() {
            if !dies_as_thread(point) {
                continue;
            }
            // What is opened by its creation is pinned then.
            let happened = happened || (one.opcode, point) == (35, "pinned");
            let scene = Scene::new(cache);
            let first = scene.server();
            let sent = requests(first)[at].clone();
            let said = format!("opcode {} at {point}", sent.opcode);
            let known = [&b"a"[..], b"b", b"d"].map(|name| look_up(first, name));
            if end_thread_at(point, || send(first, 2, &sent)).is_some() {
                assert_eq!(point, "pinned", "{said}");
                continue;
            }
            // The next ones die before they have answered, too.
            for settling in [SETTLING[number % SETTLING.len()], "note-listed"] {
                let second = scene.beginning();
                let _ = end_thread_at(settling, || second.take_over());
            }
            let third = scene.server();
            let died = end_thread_at("packed-published", || send(third, 2 | RESENT, &sent));
            assert_eq!(died.is_some(), happened, "{said}");
            let fs = scene.server();
            let (errno, bytes) = match died {
                Some(answer) => answer,
                None => send(fs, 2 | RESENT, &sent),
            };
            assert_eq!(errno, 0, "{said}");
            assert_eq!((bytes.len(), seen(fs)), expected, "{said}");
            // What the kernel knows is there, with or without a name.
            fs.free_unnamed(false);
            for node in known {
                assert!(links(fs, node).is_ok(), "{said}");
            }
            if sent.opcode == 51 {
                let born = node_of(&bytes);
                assert_eq!(links(fs, born), Ok(0), "{said}");
            }
            // Until the file system is unmounted. A thread that died while it created a file has it
            // open for ever: its process lives.
            fs.free_unnamed(true);
            if sent.opcode != 51 {
                assert_eq!(fs.files.pool().orphans().unwrap(), Vec::<u64>::new(), "{said}");
            }
        }
    }
}

#[test]
fn what_was_answered_is_not_done_again() {
    let all = requests(Scene::new(Cache::WriteBack).server());
    for (at, one) in all.into_iter().enumerate() {
        // Where it is done once depends on the cache.
        if one.opcode == 16 {
            continue;
        }
        for (point, again) in ANSWERED.into_iter().flat_map(|point| [(point, false), (point, true)])
        {
            let scene = Scene::new(cache_of(&one));
            let first = scene.server();
            let sent = requests(first)[at].clone();
            let said = format!("opcode {} at {point}", sent.opcode);
            let (fs, unique) = if again {
                assert!(end_thread_at("packed-published", || send(first, 2, &sent)).is_none());
                (scene.server(), 2 | RESENT)
            } else {
                (first, 2)
            };
            let answer = Mutex::new(Vec::new());
            let died = end_thread_at(point, || send_to(fs, unique, &sent, &Alive(&answer)));
            assert!(died.is_none(), "{said}");
            let answer = answer.into_inner().unwrap();
            let (header, rest) = OutHeader::read_from_prefix(&answer).expect("it was answered");
            assert_eq!((header.unique, header.error), (unique, 0), "{said}");
            let before = seen(fs);
            let next = scene.server();
            next.free_unnamed(false);
            assert_eq!(seen(next), before, "{said}");
            // What the kernel was given it has, until it forgets it.
            if matches!(sent.opcode, 6 | 8 | 9 | 35 | 51) {
                let born = node_of(rest);
                assert!(links(next, born).is_ok(), "{said}");
                for point in ["forgotten", "pin-taken"] {
                    let forget = || ask(scene.server(), 2, born, &[1_u64.as_bytes()]);
                    let _ = end_thread_at(point, forget);
                }
            }
            let last = scene.server();
            last.free_unnamed(true);
            assert_eq!(seen(last), before, "{said}");
            if sent.opcode != 51 {
                assert_eq!(scene.keeper.orphans().unwrap(), Vec::<u64>::new(), "{said}");
            }
        }
    }
}

#[test]
fn what_many_forgets_are_about_is_freed_although_their_server_dies() {
    let scene = Scene::new(Cache::WriteBack);
    let fs = scene.server();
    let nodes = [&b"a"[..], b"b", b"x"].map(|name| look_up(fs, name));
    for name in [b"a\0", b"b\0", b"x\0"] {
        assert_eq!(ask(fs, 10, ROOT, &[name]).0, 0);
    }
    assert_eq!(fs.files.pool().orphans().unwrap().len(), 3);
    let forgets = nodes.map(|node| [node, 1]);
    let all = [[3_u32, 0].as_bytes(), forgets.as_flattened().as_bytes()].concat();
    // Not at the end of the first of them.
    let died = end_thread_at("packed-published", || ask(fs, 42, 0, &[&all]));
    assert!(died.is_none());
    let next = scene.server();
    next.free_unnamed(false);
    assert_eq!(next.files.pool().orphans().unwrap(), Vec::<u64>::new());
}

#[test]
fn what_is_not_handed_out_again_is_answered() {
    for (point, expected) in [("note-counted", libc::EIO), ("packed-published", 0)] {
        let scene = Scene::new(Cache::WriteBack);
        let first = scene.server();
        let made =
            Sent { opcode: 9, node: ROOT, body: [[0o755_u32, 0].as_bytes(), b"new\0"].concat() };
        assert!(end_thread_at(point, || send(first, 20_000, &made)).is_none());
        let fs = scene.server();
        let client = Client::default();
        fs.answer_left(&[&client]);
        let answers = client.0.into_inner().unwrap();
        let headers = answers.iter().map(|answer| OutHeader::read_from_prefix(answer).unwrap().0);
        let mut headers = headers.filter(|header| header.unique == 20_000);
        assert_eq!(headers.next().map(|header| -header.error), Some(expected));
        assert_eq!(fs.files.exists("/new").unwrap(), expected == 0);
        let near = answers.iter().filter(|answer| answer.len() == size_of::<OutHeader>()).count();
        assert!(near > 2000, "{near}");
    }
}

/// The kernel would keep the length and the pages of before.
#[test]
fn a_length_that_was_set_is_answered_although_it_is_not_handed_out_again() {
    for (point, expected) in [("note-counted", libc::EIO), ("packed-published", 0)] {
        let scene = Scene::new(Cache::WriteBack);
        let first = scene.server();
        let resized =
            SetAttributesIn { valid: set::SIZE, size: 5000, ..SetAttributesIn::new_zeroed() };
        let node = look_up(first, b"x");
        let sent = Sent { opcode: 4, node, body: resized.as_bytes().to_vec() };
        assert!(end_thread_at(point, || send(first, 20_000, &sent)).is_none());
        let fs = scene.server();
        let client = Client::default();
        fs.answer_left(&[&client]);
        let answers = client.0.into_inner().unwrap();
        let answer = answers.iter().find_map(|answer| {
            let (header, rest) = OutHeader::read_from_prefix(answer).unwrap();
            (header.unique == 20_000).then_some((-header.error, rest))
        });
        let (errno, rest) = answer.expect("it is answered");
        assert_eq!(errno, expected);
        if errno == 0 {
            let (out, _) = AttributesOut::read_from_prefix(rest).expect("attributes");
            assert_eq!(out.attributes.size, 5000);
        }
    }
}

/// Also where the number of the inode is not its node ID.
#[test]
fn a_length_that_was_set_is_answered_by_the_inode_and_not_by_its_number() {
    let scene = Scene::new(Cache::Shared);
    let first = scene.server();
    let number = look_up(first, b"a");
    let others = Files::new(scene.keeper.clone());
    others.remove_file("/a").unwrap();
    others.create_file("/n").unwrap();
    let next = look_up(first, b"n");
    assert!(next != number && first.table.number(next) == Some(number));
    let resized = SetAttributesIn { valid: set::SIZE, size: 5000, ..SetAttributesIn::new_zeroed() };
    let sent = Sent { opcode: 4, node: next, body: resized.as_bytes().to_vec() };
    assert!(end_thread_at("packed-published", || send(first, 20_000, &sent)).is_none());
    let (errno, bytes) = send(scene.server(), 20_000 | RESENT, &sent);
    assert_eq!(errno, 0);
    let (out, _) = AttributesOut::read_from_prefix(&bytes).expect("attributes");
    assert_eq!((out.attributes.size, out.attributes.ino), (5000, number));
}

/// Gets its answer later: never, as its server dies.
struct Waiting;

impl crate::answer::Channel for Waiting {
    fn send(&self, _: &[IoSlice<'_>]) -> Delivered {
        Delivered::Yes
    }

    fn another(&self) -> Option<Box<dyn crate::answer::Channel + Send>> {
        Some(Box::new(Waiting))
    }
}

#[test]
fn a_wait_for_a_lock_that_is_not_handed_out_again_ends_however_old_it_is() {
    let scene = Scene::new(Cache::Shared);
    let first = scene.server();
    let node = look_up(first, b"x");
    let other = scene.keeper.advisory_locks(node).unwrap();
    assert!(other.try_lock(&LockArea::File, LockMode::Exclusive).unwrap());
    let (kind, lock_flags) = (libc::F_WRLCK as u32, lock::FLOCK);
    let lock = LockIn { fh: 1, end: lock::END, kind, lock_flags, ..LockIn::new_zeroed() };
    let waits = |unique| {
        let sent = Sent { opcode: 33, node, body: lock.as_bytes().to_vec() };
        send_to(first, unique, &sent, &Waiting);
    };
    waits(6);
    waits(8);
    let interrupt = Sent { opcode: 36, node: 0, body: 8_u64.as_bytes().to_vec() };
    send_to(first, 10, &interrupt, &Waiting);
    send(first, 100_000, &Sent { opcode: 3, node, body: vec![0; 16] });
    let old = |fs: &PoolFs| {
        let client = Client::default();
        fs.answer_left(&[&client]);
        let answers = client.0.into_inner().unwrap();
        let headers = answers.iter().map(|answer| OutHeader::read_from_prefix(answer).unwrap().0);
        let old = headers.filter(|header| header.unique < 1000);
        old.map(|header| (header.unique, -header.error)).collect::<Vec<_>>()
    };
    assert_eq!(old(scene.server()), [(6, libc::EIO)]);
    assert_eq!(old(scene.server()), []);
}

#[test]
fn locks_that_a_dead_server_was_about_to_end_end() {
    let scene = Scene::new(Cache::Shared);
    let first = scene.server();
    let node = look_up(first, b"x");
    let names = [(OwnerName::OpenFile(7), LockArea::File), (OwnerName::Address(9), ALL)];
    let release = ReleaseIn { fh: 7, ..ReleaseIn::new_zeroed() };
    let requests = [(18, release.as_bytes()), (25, [0_u64, 0, 9].as_bytes())];
    for ((name, area), (opcode, body)) in names.into_iter().zip(requests) {
        let kept = scene.keeper.advisory_locks(node).unwrap().shared();
        assert!(kept.try_lock(&area, LockMode::Exclusive).unwrap());
        let owner = OpenOwner { owner: LockOwner { node, name }, open: vec![7] };
        let len = (size_of::<InHeader>() + body.len()) as u32;
        let header = InHeader { len, opcode, unique: 4, nodeid: node, ..InHeader::new_zeroed() };
        let bytes = [header.as_bytes(), body].concat();
        first.notes.as_ref().unwrap().begin(0, &parse(&bytes).expect("a request"));
        let file = kept.as_fd().try_clone_to_owned().unwrap();
        let other = scene.keeper.advisory_locks(node).unwrap();
        assert!(!other.try_lock(&area, LockMode::Shared).unwrap());
        scene.beginning_with(vec![(owner, file)]).take_over().unwrap();
        assert!(other.try_lock(&area, LockMode::Shared).unwrap(), "{area:?}");
    }
}

const ALL: LockArea = LockArea::Bytes(0..u64::MAX);

#[test]
fn what_is_born_without_a_name_is_there_when_the_right_channel_is_asked() {
    let scene = Scene::new(Cache::WriteBack);
    let first = scene.server();
    let create = [libc::O_RDWR as u32 | libc::O_EXCL as u32, 0o644, 0, 0];
    let made = Sent { opcode: 51, node: ROOT, body: create.as_bytes().to_vec() };
    assert!(end_thread_at("packed-published", || send(first, 20_000, &made)).is_none());
    let fs = scene.server();
    let answer = Mutex::new(Vec::new());
    // Others are asked as well, before and behind it; each has one answer.
    struct Right<'a>(&'a Mutex<Vec<Vec<u8>>>);
    impl crate::answer::Channel for Right<'_> {
        fn send(&self, parts: &[IoSlice<'_>]) -> Delivered {
            let whole: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
            if OutHeader::read_from_prefix(&whole).unwrap().0.unique != 20_000 {
                return Delivered::ClientGone;
            }
            self.0.lock().unwrap().push(whole);
            Delivered::Yes
        }
    }
    fs.answer_left(&[&Gone, &Right(&answer), &Gone]);
    let answers = answer.into_inner().unwrap();
    let (header, rest) = OutHeader::read_from_prefix(&answers[0]).unwrap();
    assert_eq!((answers.len(), header.error), (2, 0), "the answer, and one that it does not take");
    let born = node_of(rest);
    fs.free_unnamed(false);
    assert_eq!(links(fs, born), Ok(0));
    // Not asked for again, so nothing is left when it is forgotten.
    let next = scene.server();
    next.answer_left(&[&Gone]);
    assert_eq!(links(next, born), Ok(0));
    ask(next, 2, born, &[1_u64.as_bytes()]);
    assert_eq!(next.table.lookups(born), 0);
}

#[test]
fn what_a_killed_client_does_not_get_is_given_up() {
    let scene = Scene::new(Cache::WriteBack);
    let first = scene.server();
    let create = [libc::O_RDWR as u32 | libc::O_EXCL as u32, 0o644, 0, 0];
    let made = Sent { opcode: 51, node: ROOT, body: create.as_bytes().to_vec() };
    assert!(end_thread_at("packed-published", || send(first, 2, &made)).is_none());
    let fs = scene.server();
    let born = scene.keeper.orphans().unwrap()[0];
    assert!(fs.table.pin(born).is_some());
    send_to(fs, 2 | RESENT, &made, &Gone);
    assert_eq!((fs.table.lookups(born), fs.table.pin(born)), (0, None));
}

#[test]
fn the_next_server_gives_no_node_id_to_another_inode() {
    let scene = Scene::new(Cache::Shared);
    let first = look_up(scene.server(), b"a");
    let others = Files::new(scene.keeper.clone());
    others.remove_file("/a").unwrap();
    others.create_file("/n").unwrap();
    assert_eq!(others.metadata("/n").unwrap().ino(), first);
    let fs = scene.server();
    let next = look_up(fs, b"n");
    assert!(next != first && fs.node(first).is_err());
    // Neither does one that takes over meanwhile.
    let again = scene.server();
    assert_eq!((look_up(again, b"n"), again.node(first).is_err()), (next, true));
}

/// The kernel moves the one that it knows.
#[test]
fn a_directory_that_was_moved_as_its_server_died_is_the_same_node() {
    for (opcode, flags) in [(12, &[][..]), (45, [2_u32, 0].as_bytes())] {
        let scene = Scene::new(Cache::Shared);
        let first = scene.server();
        let mut directories = vec![look_up(first, b"d")];
        for (parent, name) in [(ROOT, b"e\0"), (directories[0], b"x\0")] {
            let (errno, made) = ask(first, 9, parent, &[[0o755_u32, 0].as_bytes(), name]);
            assert_eq!(errno, 0);
            directories.push(node_of(&made));
        }
        let [d, e, x] = directories[..] else { unreachable!() };
        let look_up_in = |fs, parent, name: &[u8]| node_of(&ask(fs, 1, parent, &[name]).1);
        assert_eq!((look_up_in(first, ROOT, b"e\0"), look_up_in(first, d, b"x\0")), (e, x));
        let body = [d.as_bytes(), flags, b"e\0x\0"].concat();
        let moved = Sent { opcode, node: ROOT, body };
        assert!(end_thread_at("packed-published", || send(first, 20_000, &moved)).is_none());
        let fs = scene.server();
        assert_eq!(send(fs, 20_000 | RESENT, &moved).0, 0);
        assert_eq!(look_up_in(fs, d, b"x\0"), e);
        if opcode == 45 {
            assert_eq!(look_up_in(fs, ROOT, b"e\0"), x);
        }
    }
}
