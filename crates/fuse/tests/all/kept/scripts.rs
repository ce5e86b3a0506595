//! What programs do while servers die.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use aquifer_fs::Files;
use aquifer_fuse::{Cache, MountError, Mounting, UnmountError, Unmounted, unmount};
use aquifer_pool::Pool;
use rustix::process::Signal;

use crate::kept::place::{FAILS_IF, How, Place, WAITS, WAITS_IF, kill, send};
use aquifer_testkit::watchdog::Watchdog;

/// How long a mix goes on, in seconds, and how often a server is killed meanwhile.
const MIX_S: &str = "AQUIFER_MOUNT_MIX_S";
const KILL_EVERY: Duration = Duration::from_millis(50);

pub fn a_server_that_is_killed_is_replaced() {
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let Some(place) = Place::mount(&How { cache, ..How::default() }) else { return };
        let at = |name: &str| place.root().join(name);
        fs::write(at("f"), "text").expect("a new file");
        let mut removed = OpenOptions::new().read(true).write(true).open(at("f")).expect("it is");
        let mut unnamed = OpenOptions::new();
        unnamed.write(true).read(true).custom_flags(libc::O_TMPFILE);
        let mut unnamed = unnamed.open(place.root()).expect("a file without a name");
        unnamed.write_all(b"unnamed").expect("there is room");
        fs::create_dir(at("d")).expect("a new directory");
        let removed_directory = File::open(at("d")).expect("it is there");
        fs::remove_dir(at("d")).expect("it is empty");
        fs::remove_file(at("f")).expect("it is there");
        removed.write_all(b"more than before").expect("it is open");
        removed.sync_all().expect("it is open");
        for round in 0..3 {
            assert!(place.kill_server());
            removed.rewind().expect("it is open");
            // What the kernel has cached it does not ask for.
            rustix::fs::fadvise(&removed, 0, None, rustix::fs::Advice::DontNeed).expect("a file");
            let mut text = String::new();
            removed.read_to_string(&mut text).expect("it is kept");
            assert_eq!(text, "more than before");
            unnamed.write_all(b", more").expect("it is kept");
            unnamed.sync_all().expect("it is kept");
            let directory = rustix::fs::fstat(&removed_directory).expect("it is kept");
            assert_eq!(directory.st_mode & libc::S_IFMT, libc::S_IFDIR);
            fs::create_dir(at(&round.to_string())).expect("it works");
        }
        let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&unnamed));
        let (cwd, follow) = (rustix::fs::CWD, rustix::fs::AtFlags::SYMLINK_FOLLOW);
        rustix::fs::linkat(cwd, name, cwd, at("named"), follow).expect("it has no name yet");
        drop((removed, unnamed, removed_directory));
        assert_eq!(place.deaths(), 3);
        let files = Files::open(place.unmount()).expect("the pool opens");
        let named = files.read_to_string("/named").expect("it is there");
        assert_eq!(named, "unnamed, more, more, more");
        let mut names = names_of(&files, "/");
        names.sort_unstable();
        assert_eq!(names, ["0", "1", "2", "named"]);
        assert!(!files.reap_orphans());
    }
}

fn names_of(files: &Files, directory: &str) -> Vec<String> {
    let entries = files.read_dir(directory).expect("it is there");
    entries.map(|entry| entry.expect("sound").file_name().to_string_lossy().into_owned()).collect()
}

/// What a client's directory must hold.
type Model = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// A program that changes its own directory, and compares what it gets with a model.
struct Client {
    directory: PathBuf,
    model: Model,
    random: u64,
}

impl Client {
    fn new(directory: PathBuf, seed: u64) -> Client {
        fs::create_dir(&directory).expect("a new directory");
        Client { directory, model: Model::new(), random: seed }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn name(&mut self) -> PathBuf {
        let number = self.random(12);
        self.directory.join(number.to_string())
    }

    /// One operation, whose result the model knows.
    fn step(&mut self) {
        let (path, other) = (self.name(), self.name());
        let is_there = self.model.contains_key(&path);
        let is_file = matches!(self.model.get(&path), Some(Some(_)));
        let check = |what: &str, result: io::Result<()>, should_work: bool| {
            assert_eq!(result.is_ok(), should_work, "{what} {}: {result:?}", path.display());
        };
        match self.random(8) {
            0 => {
                check("mkdir", fs::create_dir(&path), !is_there);
                self.model.entry(path).or_insert(None);
            }
            1 => {
                let created = OpenOptions::new().write(true).create_new(true).open(&path);
                check("create", created.map(drop), !is_there);
                self.model.entry(path).or_insert(Some(Vec::new()));
            }
            2 => {
                check("unlink", fs::remove_file(&path), is_file);
                if is_file {
                    self.model.remove(&path);
                }
            }
            3 => {
                check("rmdir", fs::remove_dir(&path), is_there && !is_file);
                if !is_file {
                    self.model.remove(&path);
                }
            }
            4 if is_file && path != other => {
                let is_free = !self.model.contains_key(&other);
                let onto_file = matches!(self.model.get(&other), Some(Some(_)));
                check("rename", fs::rename(&path, &other), is_free || onto_file);
                if is_free || onto_file {
                    let content = self.model.remove(&path).expect("it is there");
                    self.model.insert(other, content);
                }
            }
            5 if is_file && path != other => {
                let link = fs::hard_link(&path, &other);
                check("link", link, !self.model.contains_key(&other));
                // Names of one file are not followed by the model.
                if fs::remove_file(&path).is_ok()
                    && let Some(content) = self.model.remove(&path)
                {
                    self.model.entry(other).or_insert(content);
                }
            }
            _ if is_file => self.append(&path),
            _ => check("stat", fs::symlink_metadata(&path).map(drop), is_there),
        }
    }

    fn append(&mut self, path: &Path) {
        let bytes = vec![self.random(256) as u8; 1 + self.random(5000) as usize];
        let mut file = OpenOptions::new().append(true).open(path).expect("it is there");
        file.write_all(&bytes).expect("there is room");
        if self.random(4) == 0 {
            file.sync_all().expect("there is room");
        }
        let content = self.model.get_mut(path).and_then(Option::as_mut).expect("a file");
        content.extend(bytes);
        if self.random(8) == 0 {
            let len = self.random(content_len(&self.model, path) + 1);
            file.set_len(len).expect("it is open for writing");
            self.model
                .get_mut(path)
                .and_then(Option::as_mut)
                .expect("a file")
                .truncate(len as usize);
        }
    }

    fn compare(&self, read: impl Fn(&Path) -> Option<Vec<u8>>, names: Vec<String>) {
        let mut expected: Vec<_> = self.model.keys().map(|path| last(path)).collect();
        let mut names = names;
        expected.sort_unstable();
        names.sort_unstable();
        assert_eq!(names, expected);
        for (path, content) in &self.model {
            if let Some(content) = content {
                assert!(read(path).as_ref() == Some(content), "{}", path.display());
            }
        }
    }
}

fn content_len(model: &Model, path: &Path) -> u64 {
    model.get(path).and_then(Option::as_ref).map_or(0, |content| content.len() as u64)
}

fn last(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

pub fn programs_do_not_notice_that_servers_are_killed() {
    let seconds = std::env::var(MIX_S).ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(5);
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let Some(place) = Place::mount(&How { cache, ..How::default() }) else { return };
        let has_ended = AtomicBool::new(false);
        let clients: Vec<Client> = std::thread::scope(|scope| {
            let clients: Vec<_> = (1..=4)
                .map(|number: u64| {
                    let directory = place.root().join(format!("client {number}"));
                    let mut client = Client::new(directory, number * 0x9e37_79b9);
                    let has_ended = &has_ended;
                    scope.spawn(move || {
                        while !has_ended.load(Relaxed) {
                            client.step();
                        }
                        client
                    })
                })
                .collect();
            let end = Instant::now() + Duration::from_secs(seconds);
            while Instant::now() < end && !clients.iter().any(|client| client.is_finished()) {
                std::thread::sleep(KILL_EVERY);
                place.kill_server();
            }
            has_ended.store(true, Relaxed);
            clients.into_iter().map(|client| client.join().expect("no error")).collect()
        });
        assert!(place.deaths() > 10, "{} deaths", place.deaths());
        for client in &clients {
            let entries = fs::read_dir(&client.directory).expect("it is there");
            let names = entries.map(|entry| last(&entry.expect("sound").path())).collect();
            client.compare(|path| fs::read(path).ok(), names);
        }
        println!("{} servers died", place.deaths());
        // Unmounting waits for the next server, too: it writes back what the kernel has cached.
        place.kill_server();
        let files = Files::open(place.unmount()).expect("the pool opens");
        for client in &clients {
            let directory = format!("/{}", last(&client.directory));
            let read = |path: &Path| files.read(format!("{directory}/{}", last(path))).ok();
            client.compare(read, names_of(&files, &directory));
        }
    }
}

/// Whether there is something, which is asked for as often as the request gets an error.
fn is_there(path: &Path) -> bool {
    let ask = |_| match fs::symlink_metadata(path) {
        Ok(_) => Some(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(false),
        Err(_) => None,
    };
    (0..100).find_map(ask).expect("a server lives for a moment")
}

pub fn without_resend_the_mount_goes_on() {
    let how = How { environment: vec![("AQUIFER_NO_RESEND", "1")], ..How::default() };
    let Some(place) = Place::mount(&how) else { return };
    let count = AtomicU64::new(0);
    let failures = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let start = Instant::now();
            let mut failures = Vec::new();
            for number in 0.. {
                let has_seen = place.deaths() > 10 && !failures.is_empty();
                let limit = if has_seen { 3 } else { 60 };
                if start.elapsed() > Duration::from_secs(limit) {
                    break;
                }
                let path = place.root().join((number / 2 % 100).to_string());
                let was_there = is_there(&path);
                let done = if was_there { fs::remove_dir(&path) } else { fs::create_dir(&path) };
                count.store(number, Relaxed);
                // What has failed has not happened, and what has not failed has.
                let again = is_there(&path);
                assert_eq!(again, was_there ^ done.is_ok(), "{done:?}");
                failures.extend(done.err().map(|error| error.raw_os_error()));
            }
            failures
        });
        // Each time there is something to do for it first.
        let mut made = 0;
        while !writer.is_finished() {
            std::thread::sleep(KILL_EVERY);
            if std::mem::replace(&mut made, count.load(Relaxed)) != made {
                place.kill_server();
            }
        }
        writer.join().expect("it ends")
    });
    assert!(failures.iter().all(|error| *error == Some(libc::EIO)), "{failures:?}");
    if cfg!(debug_assertions) {
        assert!(place.deaths() > 10 && !failures.is_empty(), "{} deaths", place.deaths());
    }
    println!("{} deaths, {} errors", place.deaths(), failures.len());
    place.unmount();
}

/// Servers die right behind each change.
const DIES_BEHIND: (&str, &str) = ("AQUIFER_DIE_AT", "packed-published");
/// Before it.
const DIES_BEFORE: (&str, &str) = ("AQUIFER_DIE_AT", "packed-written");

pub fn what_was_published_is_not_done_again() {
    let how = How { environment: vec![DIES_BEHIND], ..How::default() };
    let Some(place) = Place::mount(&how) else { return };
    let at = |name: &str| place.root().join(name);
    fs::create_dir(at("d")).expect("a new directory");
    std::os::unix::fs::symlink("target", at("s")).expect("a new link");
    let file = OpenOptions::new().write(true).create_new(true).open(at("f")).expect("a new file");
    fs::hard_link(at("f"), at("g")).expect("a second name");
    fs::rename(at("g"), at("h")).expect("it is there");
    rustix::fs::renameat_with(
        rustix::fs::CWD,
        at("d"),
        rustix::fs::CWD,
        at("s"),
        rustix::fs::RenameFlags::EXCHANGE,
    )
    .expect("both are there");
    let create = rustix::fs::XattrFlags::CREATE;
    rustix::fs::setxattr(at("f"), "user.a", b"value", create).expect("it has none");
    rustix::fs::removexattr(at("f"), "user.a").expect("it has it");
    fs::remove_file(at("f")).expect("it is there");
    fs::remove_dir(at("s")).expect("that is the directory now");
    assert_eq!(fs::read_link(at("d")).expect("that is the link now"), Path::new("target"));
    drop(file);
    assert!(place.deaths() >= 10, "{}", place.log());
    let mut names = names_of(&Files::open(place.unmount()).expect("the pool opens"), "/");
    names.sort_unstable();
    assert_eq!(names, ["d", "h"]);
}

pub fn a_request_that_ends_servers_gets_an_error() {
    let how = How { environment: vec![DIES_BEFORE], ..How::default() };
    let Some(place) = Place::mount(&how) else { return };
    for round in 1..=2 {
        let error = fs::create_dir(place.root().join("d")).expect_err("no server survives it");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert_eq!(place.deaths(), 2 * round, "{}", place.log());
        // Others work.
        assert_eq!(fs::read_dir(place.root()).expect("it is mounted").count(), 0);
    }
    place.unmount();
}

pub fn servers_that_answer_nothing_end_the_mount() {
    let how = How { patience: Duration::ZERO, ..How::default() };
    let Some(mut place) = Place::mount(&how) else { return };
    fs::write(place.root().join("f"), "text").expect("a new file");
    fs::write(place.at(FAILS_IF), "").expect("a new file");
    assert!(place.kill_server());
    assert!(!place.ended());
    assert!(place.log().contains("the mount has ended"), "{}", place.log());
    assert!(place.deaths() >= 4 && !place.is_mounted());
}

pub fn a_reason_that_passes_does_not_end_the_mount() {
    let Some(place) = Place::mount(&How::default()) else { return };
    let mut file = File::create(place.root().join("f")).expect("a new file");
    fs::write(place.at(FAILS_IF), "").expect("a new file");
    assert!(place.kill_server());
    while place.deaths() < 6 {
        std::thread::yield_now();
    }
    fs::remove_file(place.at(FAILS_IF)).expect("it is there");
    file.write_all(b"text").expect("it is open");
    file.sync_all().expect("it is open");
    drop(file);
    // What it has survived counts no more.
    for round in 0..6 {
        while !place.kill_server() {}
        fs::create_dir(place.root().join(round.to_string())).expect("it goes on");
    }
    place.unmount();
}

pub fn servers_need_no_paths() {
    let Some(place) = Place::mount(&How::default()) else { return };
    let file = File::create(place.root().join("f")).expect("a new file");
    fs::rename(place.at("pool"), place.at("elsewhere")).expect("it is there");
    fs::write(place.at("pool"), "another file").expect("a new file");
    // Nor the path of the shared memory: something else is there, for the servers of this namespace.
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", "/dev/shm", "tmpfs", flags, None).expect("as root");
    for round in 0..3 {
        assert!(place.kill_server());
        file.write_all_at(b"text", round * 4).expect("it is open");
        file.sync_all().expect("it is open");
    }
    drop(file);
    assert_eq!(place.deaths(), 3);
    rustix::mount::unmount("/dev/shm", rustix::mount::UnmountFlags::empty()).expect("as root");
    fs::rename(place.at("elsewhere"), place.at("pool")).expect("it is there");
    let files = Files::open(place.unmount()).expect("the pool opens");
    assert_eq!(files.read_to_string("/f").expect("it is there"), "texttexttext");
}

pub fn without_keeper_and_server_the_mount_ends_with_the_next_one() {
    let Some(mut place) = Place::mount(&How::default()) else { return };
    fs::write(place.at(WAITS_IF), "").expect("a new file");
    assert!(place.kill_server());
    while !place.at(WAITS_IF).with_extension(WAITS).exists() {
        std::thread::yield_now();
    }
    let next = place.server().expect("it waits");
    assert!(kill(place.keeper()));
    assert!(!place.ended());
    fs::remove_file(place.at(WAITS_IF)).expect("it is there");
    wait_for_end(next, &place);
    assert!(!place.is_mounted(), "{}", place.log());
}

pub fn what_fusermount_has_mounted_is_gone_after_an_error() {
    let Some(place) = Place::mount(&How::default()) else { return };
    let other = place.at("other");
    fs::create_dir(&other).expect("a new directory");
    let program = crate::kept::place::program(&How::default(), &place.at(""));
    let mounting = |pool: &str| Mounting::new(place.at(pool), &other).program(program.clone());
    // The pool is mounted already.
    let refused = mounting("pool").by_fusermount().start();
    if let Err(MountError::Fusermount(error)) = refused {
        return println!("skipped: {error}");
    }
    assert!(matches!(refused, Err(MountError::Refused(_))), "{refused:?}");
    let refused = mounting("pool").by_fusermount().run(|| panic!("it is mounted"));
    assert!(matches!(refused, Err(MountError::Pool(_))), "{refused:?}");
    let refused = mounting("absent").by_fusermount().start();
    assert!(matches!(refused, Err(MountError::Mount { .. })), "{refused:?}");
    assert_eq!(place.mounts(), 1);
    // What would hide its own pool is not even tried.
    let hidden = Mounting::new(place.at("pool"), place.at("")).by_fusermount().start();
    assert!(matches!(hidden, Err(MountError::Hidden { .. })), "{hidden:?}");
    for directory in ["/", "/proc", "/dev"] {
        let hidden = Mounting::new(place.at("pool"), directory).start();
        assert!(matches!(hidden, Err(MountError::Hidden { .. })), "{hidden:?}");
    }
    drop(aquifer_pool::Pool::create(place.at("second"), 16 << 20).expect("a new pool"));
    let keeper = mounting("second").by_fusermount().start().expect("nothing uses it");
    fs::write(other.join("f"), "text").expect("it is mounted");
    aquifer_fuse::unmount(&other, false, Duration::from_secs(60)).expect("nothing uses it");
    assert!(keeper.wait().expect("a child").success());
    place.unmount();
}

fn wait_for_end(process: u32, place: &Place) {
    let is_gone = || !Path::new(&format!("/proc/{process}")).exists();
    let mut watchdog = Watchdog::new();
    while !is_gone() {
        assert!(!watchdog.hangs(), "{}", place.log());
        std::thread::yield_now();
    }
}

pub fn unmounting_waits_for_a_pool_whose_path_is_gone() {
    const NOT: Duration = Duration::ZERO;
    const PATIENCE: Duration = Duration::from_secs(60);
    for cache in [Cache::WriteBack, Cache::Shared] {
        let Some(mut place) = Place::mount(&How { cache, ..How::default() }) else { return };
        fs::write(place.root().join("f"), "text").expect("a new file");
        let other = place.at("other");
        fs::create_dir(&other).expect("a new directory");
        rustix::mount::mount_bind(place.root(), &other).expect("as root");
        fs::rename(place.at("pool"), place.at("renamed")).expect("its owner");
        let elsewhere = unmount(&other, false, NOT).expect("nothing uses it");
        assert_eq!(elsewhere, Unmounted::Elsewhere);
        // It cannot close the pool yet.
        send(place.keeper(), Signal::STOP);
        let unmounted = unmount(&place.root(), false, NOT);
        send(place.keeper(), Signal::CONT);
        assert!(matches!(unmounted, Err(UnmountError::StillOpen { .. })), "{unmounted:?}");
        assert!(place.ended());

        let Some(mut place) = Place::mount(&How { cache, ..How::default() }) else { return };
        fs::write(place.root().join("f"), "text").expect("a new file");
        fs::rename(place.at("pool"), place.at("renamed")).expect("its owner");
        // More than a socket's queue has room for.
        let used = File::open(place.root().join("f")).expect("it is there");
        for _ in 0..100 {
            let refused = unmount(&place.root(), false, PATIENCE);
            assert!(matches!(refused, Err(UnmountError::Busy { .. })), "{refused:?}");
        }
        drop(used);
        let unmounted = unmount(&place.root(), false, PATIENCE).expect("nothing uses it");
        assert_eq!(unmounted, Unmounted::Closed);
        let pool = Pool::options().sole("alone").open(place.at("renamed")).expect("it is closed");
        assert_eq!(Files::new(pool).read("/f").expect("it is there"), b"text");
        assert!(place.ended());
    }
}

pub fn without_a_keeper_the_mount_ends() {
    let Some(mut place) = Place::mount(&How::default()) else { return };
    fs::write(place.root().join("f"), "text").expect("a new file");
    File::open(place.root().join("f")).and_then(|file| file.sync_all()).expect("it is there");
    let server = place.server().expect("it waits for requests");
    assert!(kill(place.keeper()));
    assert!(!place.ended());
    wait_for_end(server, &place);
    assert!(!place.is_mounted());
    let files = Files::open(place.at("pool")).expect("the pool opens");
    assert_eq!(files.read_to_string("/f").expect("it was synced"), "text");
}

pub fn a_pool_that_is_mounted_is_not_mounted_again() {
    let Some(place) = Place::mount(&How::default()) else { return };
    let other = place.at("other");
    fs::create_dir(&other).expect("a new directory");
    let program = crate::kept::place::program(&How::default(), &other);
    let refused = Mounting::new(place.at("pool"), &other).program(program).start();
    let Err(MountError::Refused(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("mounted at") && why.contains("aquifer umount"), "{why}");
    assert_eq!(place.mounts(), 1);
    // Another pool, whose server does not start, at the same directory.
    drop(aquifer_pool::Pool::create(place.at("second"), 16 << 20).expect("a new pool"));
    let program = crate::kept::place::program(&How::default(), &other);
    let program =
        aquifer_fuse::Program { server: vec!["--exact".into(), "none".into()], ..program };
    let refused = Mounting::new(place.at("second"), place.root()).program(program).start();
    assert!(matches!(refused, Err(MountError::Refused(_))), "{refused:?}");
    fs::write(place.root().join("f"), "text").expect("the first one is still mounted");
    place.unmount();
}

pub fn the_mount_ends_with_its_lifeline() {
    let Some(mut place) = Place::mount(&How::default()) else { return };
    fs::write(place.root().join("f"), "text").expect("a new file");
    place.cut();
    assert!(place.ended(), "{}", place.log());
    assert!(!place.is_mounted());
    let files = Files::open(place.at("pool")).expect("the pool opens");
    assert_eq!(files.read_to_string("/f").expect("it was written back"), "text");
}

pub fn many_files_without_names_survive_a_server() {
    const FILES: u32 = 1500;
    let Some(place) = Place::mount(&How::default()) else { return };
    let open = |number: u32| {
        let path = place.root().join("f");
        let how = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = how.expect("a new file");
        file.write_all_at(&number.to_ne_bytes(), 0).expect("there is room");
        fs::remove_file(&path).expect("it is there");
        file
    };
    let limit = rustix::process::Rlimit { current: Some(4096), maximum: Some(4096) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
    let files: Vec<File> = (0..FILES).map(open).collect();
    rustix::fs::sync();
    assert!(place.kill_server());
    let _ = fs::write("/proc/sys/vm/drop_caches", "1");
    for (number, file) in (0..FILES).zip(&files) {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, 0).expect("it is kept");
        assert_eq!(u32::from_ne_bytes(bytes), number);
    }
    assert!(place.kill_server());
    drop(files);
    let files = Files::open(place.unmount()).expect("the pool opens");
    assert!(!files.reap_orphans());
    assert_eq!(names_of(&files, "/"), [""; 0]);
}
