//! Requests without a kernel: a model of the kernel's side sends bytes and counts what it was given.
//!
//! The model knows what the kernel knows: names in directories, how often each inode was given to it,
//! and what it wrote. It forgets late, in batches, and uses inodes that have lost their names as a
//! program does that has them open. After each step the counts agree, and each inode that is known has
//! the bytes that were written; when all is forgotten, nothing is left without a name.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;
use std::sync::Mutex;

use aquifer_check::{CheckOptions, Severity, check};
use aquifer_pool::Pool;
use proptest::prelude::*;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::*;
use crate::answer::{Channel, Delivered};
use crate::wire::{
    self, AttributesOut, Entry, InHeader, OutHeader, ROOT, ReadIn, SetAttributesIn, WriteIn, parse,
    set,
};

/// Names are chosen among these, so that they meet.
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const LINK: u32 = 13;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const FSYNC: u32 = 20;
    pub const BATCH_FORGET: u32 = 42;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const TMPFILE: u32 = 51;
}

/// Keeps the last answer; can be told that the client has gone.
#[derive(Default)]
struct Client {
    answer: Mutex<Option<Vec<u8>>>,
    is_gone: Mutex<bool>,
}

impl Channel for Client {
    fn send(&self, parts: &[IoSlice<'_>]) -> Delivered {
        if *self.is_gone.lock().unwrap() {
            return Delivered::ClientGone;
        }
        let whole = parts.iter().flat_map(|part| part.iter().copied()).collect();
        assert!(self.answer.lock().unwrap().replace(whole).is_none(), "answered twice");
        Delivered::Yes
    }
}

#[derive(Debug, Clone)]
enum Step {
    Lookup {
        at: usize,
        name: usize,
        is_gone: bool,
    },
    Create {
        at: usize,
        name: usize,
        is_gone: bool,
    },
    Unnamed {
        at: usize,
    },
    Mkdir {
        at: usize,
        name: usize,
    },
    Unlink {
        at: usize,
        name: usize,
    },
    Rmdir {
        at: usize,
        name: usize,
    },
    Link {
        of: usize,
        at: usize,
        name: usize,
    },
    Rename {
        at: usize,
        name: usize,
        to: usize,
        new_name: usize,
        flags: u32,
    },
    List {
        at: usize,
    },
    Write {
        of: usize,
        offset: u16,
        len: u16,
        byte: u8,
    },
    Sync {
        of: usize,
    },
    /// What the kernel knows of it; or of all, in one request.
    Forget {
        of: usize,
        all: bool,
    },
    Tidy,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    use Step::*;
    let (index, name) = (0_usize..8, 0..NAMES.len());
    let (at, of) = (index.clone(), index);
    let step = prop_oneof![
        2 => (at.clone(), name.clone(), prop::bool::weighted(0.2))
            .prop_map(|(at, name, is_gone)| Lookup { at, name, is_gone }),
        3 => (at.clone(), name.clone(), prop::bool::weighted(0.1))
            .prop_map(|(at, name, is_gone)| Create { at, name, is_gone }),
        1 => at.clone().prop_map(|at| Unnamed { at }),
        2 => (at.clone(), name.clone()).prop_map(|(at, name)| Mkdir { at, name }),
        3 => (at.clone(), name.clone()).prop_map(|(at, name)| Unlink { at, name }),
        1 => (at.clone(), name.clone()).prop_map(|(at, name)| Rmdir { at, name }),
        1 => (of.clone(), at.clone(), name.clone()).prop_map(|(of, at, name)| Link { of, at, name }),
        2 => (at.clone(), name.clone(), at.clone(), name.clone(), 0_u32..3).prop_map(
            |(at, name, to, new_name, flags)| Rename { at, name, to, new_name, flags }
        ),
        1 => at.clone().prop_map(|at| List { at }),
        3 => (of.clone(), any::<u16>(), 0_u16..9000, any::<u8>())
            .prop_map(|(of, offset, len, byte)| Write { of, offset, len, byte }),
        1 => of.clone().prop_map(|of| Sync { of }),
        2 => (of, prop::bool::weighted(0.2)).prop_map(|(of, all)| Forget { of, all }),
        1 => Just(Tidy),
    ];
    prop::collection::vec(step, 1..60)
}

/// An inode, as the kernel knows it.
#[derive(Debug, Default)]
struct Known {
    lookups: u64,
    is_directory: bool,
    /// Names in it.
    names: BTreeSet<String>,
    content: Vec<u8>,
    /// How many names it has.
    links: u64,
}

struct Kernel {
    fs: PoolFs,
    client: Client,
    out: Vec<u8>,
    unique: u64,
    /// All inodes that exist, known or not.
    inodes: BTreeMap<u64, Known>,
    /// What the names refer to.
    entries: BTreeMap<(u64, String), u64>,
}

impl Kernel {
    fn new(files: Files) -> Kernel {
        let agreed = Agreed { minor: wire::NEWEST_MINOR, flags: u64::MAX };
        let fs = PoolFs::new(files, agreed, MountOptions::new()).unwrap();
        let (client, out) = (Client::default(), vec![0; 1 << 20]);
        let root = Known { lookups: 1, is_directory: true, links: 1, ..Known::default() };
        let inodes = BTreeMap::from([(ROOT, root)]);
        Kernel { fs, client, out, unique: 0, inodes, entries: BTreeMap::new() }
    }

    fn send(&mut self, opcode: u32, nodeid: u64, parts: &[&[u8]]) -> Option<(i32, Vec<u8>)> {
        self.unique += 2;
        let body = parts.concat();
        let header = InHeader {
            len: (size_of::<InHeader>() + body.len()) as u32,
            opcode,
            unique: self.unique,
            nodeid,
            ..InHeader::new_zeroed()
        };
        let bytes = [header.as_bytes(), &body].concat();
        let request = parse(&bytes).expect("a request");
        let answer = Answer::new(&self.client, request.unique);
        self.fs.handle(&request, &mut self.out, answer, &Worker::alone());
        let answer = self.client.answer.lock().unwrap().take()?;
        let (header, rest) = OutHeader::read_from_prefix(&answer).expect("a header");
        assert_eq!((header.len as usize, header.unique), (answer.len(), self.unique));
        Some((-header.error, rest.to_vec()))
    }

    /// Sends a request whose answer is an entry.
    fn entry(&mut self, opcode: u32, at: u64, parts: &[&[u8]]) -> Result<Entry> {
        let (errno, bytes) = self.send(opcode, at, parts).expect("an answer");
        if errno != 0 {
            return Err(Errno(errno));
        }
        let (entry, _) = Entry::read_from_prefix(&bytes).expect("an entry");
        match entry.nodeid {
            0 => Err(Errno(libc::ENOENT)),
            number => {
                self.inodes.entry(number).or_default().lookups += 1;
                Ok(entry)
            }
        }
    }

    fn done(&mut self, opcode: u32, at: u64, parts: &[&[u8]]) -> Result<()> {
        match self.send(opcode, at, parts).expect("an answer").0 {
            0 => Ok(()),
            errno => Err(Errno(errno)),
        }
    }

    fn known(&self, index: usize, is_wanted: impl Fn(&Known) -> bool) -> Option<u64> {
        let known = |(_, known): &(&u64, &Known)| known.lookups > 0 && is_wanted(known);
        let known: Vec<_> = self.inodes.iter().filter(known).collect();
        (!known.is_empty()).then(|| *known[index % known.len()].0)
    }

    fn directory(&self, index: usize) -> u64 {
        self.known(index, |known| known.is_directory && known.links > 0).unwrap_or(ROOT)
    }

    fn there(&self, at: u64, name: &str) -> Option<u64> {
        self.entries.get(&(at, name.to_owned())).copied()
    }

    fn add(&mut self, at: u64, name: &str, number: u64) {
        self.entries.insert((at, name.to_owned()), number);
        self.inodes.get_mut(&at).expect("it exists").names.insert(name.to_owned());
        self.inodes.get_mut(&number).expect("it exists").links += 1;
    }

    fn remove(&mut self, at: u64, name: &str) -> u64 {
        let number = self.entries.remove(&(at, name.to_owned())).expect("it is there");
        self.inodes.get_mut(&at).expect("it exists").names.remove(name);
        self.inodes.get_mut(&number).expect("it exists").links -= 1;
        number
    }

    /// What has neither a name nor is known is no more.
    fn settle(&mut self, number: u64) {
        if self.inodes.get(&number).is_some_and(|it| it.links == 0 && it.lookups == 0) {
            self.inodes.remove(&number);
        }
    }

    /// The inodes that the kernel can forget.
    fn forgettable(&self) -> Vec<u64> {
        let known =
            self.inodes.iter().filter(|(number, known)| **number != ROOT && known.lookups > 0);
        known.map(|(number, _)| *number).collect()
    }

    /// A new inode has the number of none that is known.
    fn add_new(&mut self, entry: &Entry, is_directory: bool) {
        let known = self.inodes.get_mut(&entry.nodeid).expect("it was given");
        assert_eq!((known.lookups, known.links, known.content.len()), (1, 0, 0), "{entry:?}");
        known.is_directory = is_directory;
    }

    /// Before the kernel creates a name, it has looked for it.
    fn is_free(&mut self, at: u64, name: &str) -> bool {
        self.there(at, name).is_none()
    }

    fn forget(&mut self, numbers: &[u64], in_one: bool) {
        let lookups = |kernel: &Kernel, number| kernel.inodes[number].lookups;
        if in_one {
            let mut body = (numbers.len() as u64).to_ne_bytes().to_vec();
            for number in numbers {
                body.extend([*number, lookups(self, number)].as_bytes());
            }
            assert_eq!(self.send(opcode::BATCH_FORGET, 0, &[&body]), None);
        } else {
            for number in numbers {
                let count = lookups(self, number);
                assert_eq!(self.send(opcode::FORGET, *number, &[count.as_bytes()]), None);
            }
        }
        for &number in numbers {
            self.inodes.get_mut(&number).expect("it exists").lookups = 0;
            self.settle(number);
        }
    }

    fn run(&mut self, step: &Step) {
        let zero_terminated = |name: usize| format!("{}\0", NAMES[name]).into_bytes();
        match *step {
            Step::Lookup { at, name, is_gone } => {
                let (at, bytes) = (self.directory(at), zero_terminated(name));
                if is_gone {
                    *self.client.is_gone.lock().unwrap() = true;
                    assert_eq!(self.send(opcode::LOOKUP, at, &[&bytes]), None);
                    *self.client.is_gone.lock().unwrap() = false;
                    return;
                }
                let found = self.entry(opcode::LOOKUP, at, &[&bytes]);
                assert_eq!(found.ok().map(|it| it.nodeid), self.there(at, NAMES[name]));
            }
            Step::Create { at, name, is_gone } => {
                let (at, bytes) = (self.directory(at), zero_terminated(name));
                if !self.is_free(at, NAMES[name]) {
                    return;
                }
                let create = [libc::S_IFREG | 0o644, 0, 0, 0];
                if is_gone {
                    *self.client.is_gone.lock().unwrap() = true;
                    assert_eq!(self.send(opcode::MKNOD, at, &[create.as_bytes(), &bytes]), None);
                    *self.client.is_gone.lock().unwrap() = false;
                    // It is there nevertheless.
                    let found = self.entry(opcode::LOOKUP, at, &[&bytes]).expect("it was made");
                    self.add_new(&found, false);
                    return self.add(at, NAMES[name], found.nodeid);
                }
                let entry = self.entry(opcode::MKNOD, at, &[create.as_bytes(), &bytes]);
                let entry = entry.expect("a new name");
                self.add_new(&entry, false);
                self.add(at, NAMES[name], entry.nodeid);
            }
            Step::Unnamed { at } => {
                let create = [libc::O_RDWR as u32, 0o600, 0, 0];
                let at = self.directory(at);
                let entry = self.entry(opcode::TMPFILE, at, &[create.as_bytes()]).expect("a file");
                self.add_new(&entry, false);
            }
            Step::Mkdir { at, name } => {
                let (at, bytes) = (self.directory(at), zero_terminated(name));
                if !self.is_free(at, NAMES[name]) {
                    return;
                }
                let entry = self.entry(opcode::MKDIR, at, &[[0o755_u32, 0].as_bytes(), &bytes]);
                let entry = entry.expect("a new name");
                self.add_new(&entry, true);
                self.add(at, NAMES[name], entry.nodeid);
            }
            Step::Unlink { at, name } => {
                let at = self.directory(at);
                let expected = match self.there(at, NAMES[name]) {
                    None => Err(Errno(libc::ENOENT)),
                    Some(number) if self.inodes[&number].is_directory => Err(Errno(libc::EISDIR)),
                    Some(_) => Ok(()),
                };
                assert_eq!(self.done(opcode::UNLINK, at, &[&zero_terminated(name)]), expected);
                if expected.is_ok() {
                    let removed = self.remove(at, NAMES[name]);
                    self.settle(removed);
                }
            }
            Step::Rmdir { at, name } => {
                let at = self.directory(at);
                let expected = match self.there(at, NAMES[name]) {
                    None => Err(Errno(libc::ENOENT)),
                    Some(number) if !self.inodes[&number].is_directory => Err(Errno(libc::ENOTDIR)),
                    Some(number) if !self.inodes[&number].names.is_empty() => {
                        Err(Errno(libc::ENOTEMPTY))
                    }
                    Some(_) => Ok(()),
                };
                assert_eq!(self.done(opcode::RMDIR, at, &[&zero_terminated(name)]), expected);
                if expected.is_ok() {
                    let removed = self.remove(at, NAMES[name]);
                    self.settle(removed);
                }
            }
            Step::Link { of, at, name } => {
                let (at, bytes) = (self.directory(at), zero_terminated(name));
                let Some(of) = self.known(of, |known| !known.is_directory) else { return };
                if !self.is_free(at, NAMES[name]) {
                    return;
                }
                let entry = self.entry(opcode::LINK, at, &[of.as_bytes(), &bytes]);
                assert_eq!(entry.expect("a new name").nodeid, of);
                self.add(at, NAMES[name], of);
            }
            Step::Rename { at, name, to, new_name, flags } => {
                let (at, to) = (self.directory(at), self.directory(to));
                let from = self.there(at, NAMES[name]);
                let target = self.there(to, NAMES[new_name]);
                // Rules of directories are those of the pool, and compared elsewhere.
                let is_directory = |number: Option<u64>| {
                    number.is_some_and(|number| self.inodes[&number].is_directory)
                };
                if is_directory(from) || is_directory(target) {
                    return;
                }
                let body = [to.as_bytes(), [flags, 0].as_bytes()].concat();
                let names = [zero_terminated(name), zero_terminated(new_name)].concat();
                let renamed = self.done(opcode::RENAME2, at, &[&body, &names]);
                let expected = match (from, target, flags) {
                    (None, ..) | (_, None, 2) => Err(Errno(libc::ENOENT)),
                    (Some(_), Some(_), 1) => Err(Errno(libc::EEXIST)),
                    _ => Ok(()),
                };
                assert_eq!(renamed, expected);
                if expected.is_err() || from == target {
                    return;
                }
                let from = self.remove(at, NAMES[name]);
                let target = target.map(|_| self.remove(to, NAMES[new_name]));
                self.add(to, NAMES[new_name], from);
                if let Some(target) = target {
                    if flags == 2 {
                        self.add(at, NAMES[name], target);
                    }
                    self.settle(target);
                }
            }
            Step::List { at } => {
                let at = self.directory(at);
                let read = ReadIn { size: 4096, ..ReadIn::new_zeroed() };
                let answer = self.send(opcode::READDIRPLUS, at, &[read.as_bytes()]);
                let (errno, mut bytes) = answer.expect("an answer");
                assert_eq!(errno, 0);
                let len = bytes.len();
                // The names are few: they fit.
                let mut seen = BTreeSet::new();
                let mut from = 0;
                while from < len {
                    let (entry, _) = Entry::read_from_prefix(&bytes[from..]).expect("an entry");
                    let name_len = u32::from_ne_bytes(bytes[from + 144..][..4].try_into().unwrap());
                    let name = bytes[from + 152..][..name_len as usize].to_vec();
                    from += 128 + (24 + name_len as usize).next_multiple_of(8);
                    if entry.nodeid != 0 {
                        self.inodes.get_mut(&entry.nodeid).expect("it exists").lookups += 1;
                        seen.insert(String::from_utf8(name).unwrap());
                    }
                }
                bytes.clear();
                assert_eq!(seen, self.inodes[&at].names);
            }
            Step::Write { of, offset, len, byte } => {
                let Some(of) = self.known(of, |known| !known.is_directory) else { return };
                let (offset, data) = (usize::from(offset), vec![byte; usize::from(len)]);
                let write = WriteIn {
                    offset: offset as u64,
                    size: data.len() as u32,
                    ..WriteIn::new_zeroed()
                };
                self.done(opcode::WRITE, of, &[write.as_bytes(), &data]).expect("room");
                let content = &mut self.inodes.get_mut(&of).expect("it exists").content;
                if !data.is_empty() {
                    content.resize(content.len().max(offset + data.len()), 0);
                    content[offset..offset + data.len()].copy_from_slice(&data);
                }
            }
            Step::Sync { of } => {
                let Some(of) = self.known(of, |known| !known.is_directory) else { return };
                self.done(opcode::FSYNC, of, &[&[0; 16]]).expect("a pool that works");
            }
            Step::Forget { of, all } => {
                let known = self.forgettable();
                if known.is_empty() {
                    return;
                }
                let one = [known[of % known.len()]];
                self.forget(if all { &known } else { &one }, all);
            }
            Step::Tidy => self.fs.tidy(),
        }
    }

    /// Compares what the server knows with what the kernel knows.
    fn compare(&mut self) {
        for (&number, known) in &self.inodes {
            // Those that the kernel does not know may be counted under another one's number.
            assert_eq!(self.fs.table.lookups(number), known.lookups, "inode {number}");
        }
        let known: Vec<u64> = self.inodes.keys().copied().collect();
        for number in known {
            let inode = &self.inodes[&number];
            let (lookups, links, len) = (inode.lookups, inode.links, inode.content.len());
            if lookups == 0 || inode.is_directory {
                continue;
            }
            let (errno, bytes) =
                self.send(opcode::GETATTR, number, &[&[0; 16]]).expect("an answer");
            assert_eq!(errno, 0, "inode {number}");
            let (out, _) = AttributesOut::read_from_prefix(&bytes).expect("attributes");
            let seen = (out.attributes.ino, u64::from(out.attributes.nlink), out.attributes.size);
            assert_eq!(seen, (number, links, len as u64));
            let read = ReadIn { size: 1 << 17, ..ReadIn::new_zeroed() };
            let (errno, bytes) =
                self.send(opcode::READ, number, &[read.as_bytes()]).expect("an answer");
            assert_eq!(errno, 0, "inode {number}");
            assert!(bytes == self.inodes[&number].content, "inode {number}");
        }
    }
}

#[test]
fn times_of_removed_files_change_nothing_unless_they_can_get_a_name() {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let files = Files::new(Pool::create(directory.path().join("pool"), 16 << 20).unwrap());
    let mut kernel = Kernel::new(files);
    let new = [libc::S_IFREG | 0o644, 0, 0, 0];
    let of = |kernel: &mut Kernel, opcode: u32, parts: &[&[u8]]| {
        kernel.entry(opcode, ROOT, parts).expect("a new file").nodeid
    };
    let gone = of(&mut kernel, opcode::MKNOD, &[new.as_bytes(), b"a\0"]);
    let named = of(&mut kernel, opcode::MKNOD, &[new.as_bytes(), b"b\0"]);
    let unnamed = of(&mut kernel, opcode::TMPFILE, &[[2_u32, 0o644, 0, 0].as_bytes()]);
    assert_eq!(kernel.done(opcode::LINK, ROOT, &[named.as_bytes(), b"c\0"]), Ok(()));
    for name in [b"a\0", b"b\0"] {
        assert_eq!(kernel.done(opcode::UNLINK, ROOT, &[name]), Ok(()));
    }
    let mut set = |number: u64, valid: u32| {
        let times = SetAttributesIn { valid, mtime: 5, ctime: 5, ..SetAttributesIn::new_zeroed() };
        assert_eq!(kernel.done(opcode::SETATTR, number, &[times.as_bytes()]), Ok(()));
        let (_, bytes) = kernel.send(opcode::GETATTR, number, &[&[0; 16]]).expect("an answer");
        AttributesOut::read_from_prefix(&bytes).expect("attributes").0.attributes.mtime == 5
    };
    let times = set::MTIME | set::CTIME;
    assert!(!set(gone, times) && !set(gone, times | set::FH));
    assert!(set(gone, times | set::ATIME) && set(named, times) && set(unnamed, times));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_server_knows_what_the_kernel_knows(steps in steps(), keeps_files_open: bool) {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = directory.path().join("pool");
        let files = Files::new(Pool::create(&path, 16 << 20).unwrap());
        let slots = files.space().unwrap().free_slots;
        let mut kernel = Kernel::new(files.clone());
        for step in &steps {
            kernel.run(step);
            kernel.compare();
            if !keeps_files_open {
                // Twice: what was used since the first time is kept once more.
                kernel.fs.tidy();
                kernel.fs.tidy();
            }
        }
        // All is forgotten: what has no name is no more.
        let known = kernel.forgettable();
        kernel.forget(&known, true);
        prop_assert_eq!(files.pool().orphans().unwrap(), Vec::<u64>::new());
        for (at, name) in kernel.entries.clone().into_keys() {
            let path = PathOf(&kernel.entries).path(at, &name);
            prop_assert!(files.exists(path).unwrap());
        }
        // And removing the rest frees everything.
        for name in NAMES {
            if files.is_dir(name) {
                files.remove_dir_all(name).unwrap();
            } else if files.exists(name).unwrap() {
                files.remove_file(name).unwrap();
            }
        }
        prop_assert_eq!(files.space().unwrap().free_slots, slots);
        drop((kernel, files));
        let report = check(&path, &CheckOptions::default()).unwrap();
        prop_assert!(report.worst().is_none_or(|worst| worst <= Severity::Note), "{report}");
    }
}

struct PathOf<'e>(&'e BTreeMap<(u64, String), u64>);

impl PathOf<'_> {
    fn path(&self, at: u64, name: &str) -> String {
        match self.0.iter().find(|(_, number)| **number == at) {
            Some(((above, own), _)) => format!("{}/{name}", self.path(*above, own)),
            None => format!("/{name}"),
        }
    }
}
