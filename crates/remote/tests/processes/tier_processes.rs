//! A tier among processes: that are killed, in containers of their own, of another user, on a disk that is full.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use aquifer_device::Device;
use aquifer_remote::{RemoteDevice, RemoteOptions, Tier, TierError};
use aquifer_sys::lock::{LockKind, LockRange, try_lock};
use aquifer_testkit::child::{self, Reaped};
use aquifer_testkit::rng::Rng;

use crate::support::{Answer, Server, pattern};
use aquifer_testkit::watchdog::wait_until;

const LEN: usize = 2_000_001;
const SEED: u64 = 77;
/// The arguments of roles.
const URL: &str = "AQUIFER_TEST_URL";
const TIER: &str = "AQUIFER_TEST_TIER";
const NUMBER: &str = "AQUIFER_TEST_NUMBER";
/// What one process may have downloaded and not written when it is killed.
const BUFFER_BYTES: usize = 256 << 10;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("endless", || work(usize::MAX)),
    ("reader", || work(0)),
    ("first", || read(&device(), 0, 1000)),
    ("stranger", stranger),
    ("limited", limited),
    ("full", full),
];

fn argument(name: &str) -> String {
    std::env::var(name).expect("of the role")
}

/// No request fails by its time: the roles end before.
fn options() -> RemoteOptions {
    let options = RemoteDevice::options().buffer_bytes(BUFFER_BYTES);
    options.timeout(Duration::from_secs(300))
}

fn device_of(path: &Path, url: &str) -> RemoteDevice {
    options().tier(&Tier::open(path).unwrap()).open(url).unwrap()
}

fn device() -> RemoteDevice {
    device_of(argument(TIER).as_ref(), &argument(URL))
}

/// Compares a range; ends the process if it is wrong.
fn read(device: &RemoteDevice, at: usize, len: usize) {
    static BYTES: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    let bytes = BYTES.get_or_init(|| pattern(LEN, SEED));
    let mut buffer = vec![0; len];
    assert_eq!(device.read_at(at as u64, &mut buffer).unwrap(), len);
    assert!(buffer == bytes[at..at + len], "wrong bytes in {len} at {at}");
}

/// Random reads, then all of the object in a random order.
fn work(reads: usize) {
    let device = device();
    let mut rng = Rng::new(argument(NUMBER).parse().unwrap());
    for _ in 0..reads {
        let at = rng.below(LEN as u64) as usize;
        read(&device, at, (rng.below(100_000) as usize + 1).min(LEN - at));
    }
    const PIECE: usize = 50_000;
    let mut places: Vec<usize> = (0..LEN).step_by(PIECE).collect();
    while !places.is_empty() {
        let at = places.swap_remove(rng.below(places.len() as u64) as usize);
        read(&device, at, PIECE.min(LEN - at));
    }
    assert!(device.stats().tier_problem.is_none());
}

fn role(name: &str, number: u64, url: &str, tier: &Path) -> Command {
    let mut command = child::command(name);
    command.env(URL, url).env(TIER, tier).env(NUMBER, number.to_string());
    command.env("NO_PROXY", "127.0.0.1");
    command
}

/// Waits until a child ends, which must have completed its role.
fn completes(mut child: Reaped) {
    let mut said = String::new();
    for pipe in
        [&mut child.0.stdout.take().unwrap() as &mut dyn Read, &mut child.0.stderr.take().unwrap()]
    {
        pipe.read_to_string(&mut said).unwrap();
    }
    assert!(child.0.wait().unwrap().success(), "{said}");
}

fn used_bytes(tier: &Path) -> u64 {
    let files = std::fs::read_dir(tier).unwrap().map(|file| file.unwrap().path());
    let objects = files.filter(|path| path.extension().is_some_and(|suffix| suffix == "object"));
    objects.filter_map(|path| Some(path.metadata().ok()?.blocks() * 512)).sum()
}

struct Node {
    server: Server,
    directory: tempfile::TempDir,
}

impl Node {
    fn new() -> Node {
        let node = Node {
            server: Server::new(pattern(LEN, SEED)),
            directory: tempfile::tempdir().unwrap(),
        };
        Tier::open(node.tier()).unwrap().set_budget_bytes(10 << 20).unwrap();
        node
    }

    fn tier(&self) -> PathBuf {
        self.directory.path().join("tier")
    }

    fn start(&self, name: &str, number: u64) -> Reaped {
        Reaped(role(name, number, &self.server.url(), &self.tier()).spawn().unwrap())
    }

    fn requests(&self) -> usize {
        self.server.asked().len()
    }

    fn asked_bytes(&self) -> usize {
        self.server.asked().iter().filter_map(|asked| Some(asked.range.as_ref()?.len())).sum()
    }
}

#[test]
fn killed_readers_leave_right_bytes_no_leases_and_the_budget() {
    const BUDGET: u64 = 500_000;
    let node = Node::new();
    Tier::open(node.tier()).unwrap().set_budget_bytes(BUDGET).unwrap();
    let mut rng = Rng::new(1);
    let mut readers: Vec<Reaped> = (0..3).map(|number| node.start("endless", number)).collect();
    for round in 0..25 {
        let moment = node.requests() + 1 + rng.below(12) as usize;
        let victim = rng.below(3) as usize;
        wait_until("requests", || {
            for reader in &mut readers {
                if let Some(status) = reader.0.try_wait().unwrap() {
                    let mut said = String::new();
                    reader.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
                    panic!("a reader ended: {status}: {said}");
                }
            }
            node.requests() >= moment
        });
        let dead = std::mem::replace(&mut readers[victim], node.start("endless", 100 + round));
        let mut dead = dead;
        dead.0.kill().unwrap();
        assert_eq!(dead.0.wait().unwrap().signal(), Some(libc::SIGKILL));
        assert!(used_bytes(&node.tier()) <= BUDGET + (64 << 10), "round {round}");
    }
    drop(readers);
    let [file] = &std::fs::read_dir(node.tier())
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some())
        .collect::<Vec<_>>()[..]
    else {
        panic!("one object")
    };
    let file = std::fs::File::options().read(true).write(true).open(file).unwrap();
    assert!(try_lock(file.as_fd(), LockRange::WHOLE, LockKind::Exclusive).unwrap(), "leases");
    drop(file);
    // What the dead have left can be evicted, by an opener that repairs and by one that does not.
    let device = device_of(&node.tier(), &node.server.url());
    read(&device, 0, LEN / 3);
    let tier = Tier::open(node.tier()).unwrap();
    // What is being written is leased.
    wait_until("room", || {
        tier.set_budget_bytes(BUDGET / 2).unwrap();
        used_bytes(&node.tier()) <= BUDGET / 2
    });
    drop(device);
    tier.set_budget_bytes(0).unwrap();
    assert_eq!(used_bytes(&node.tier()), 0);
}

#[test]
fn killed_readers_cost_only_what_they_had_not_written() {
    const KILLS: usize = 3;
    let node = Node::new();
    let mut readers: Vec<Reaped> = (0..3).map(|number| node.start("reader", number)).collect();
    let mut opened = 3;
    for kill in 0..KILLS {
        let moment = node.requests() + 4;
        wait_until("requests, or all that there is", || {
            node.requests() >= moment || node.asked_bytes() >= LEN
        });
        drop(readers.swap_remove(kill % readers.len()));
        readers.push(node.start("reader", 100 + kill as u64));
        opened += 1;
    }
    readers.into_iter().for_each(completes);
    let asked = node.asked_bytes() - opened.min(node.asked_bytes());
    assert!(asked >= LEN - opened, "{asked}");
    assert!(asked <= LEN + KILLS * BUFFER_BYTES, "{asked}");
    let last = node.requests();
    completes(node.start("reader", 9));
    assert_eq!(node.requests(), last + 1, "all is there");
}

/// Ways to a container: mounts, processes, and, for an ordinary user, users of its own.
fn containers() -> Vec<&'static [&'static str]> {
    let ways: [&[&str]; 2] = [
        &["--mount", "--pid", "--fork", "--kill-child"],
        &["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"],
    ];
    let works = |way: &&[&str]| {
        let tried = Command::new("unshare")
            .args(*way)
            .args(["mount", "--bind", "/tmp", "/tmp"])
            .stderr(Stdio::null())
            .status();
        let works = tried.is_ok_and(|status| status.success());
        if !works {
            println!("skipped: containers by unshare {way:?}, which the system does not allow");
        }
        works
    };
    ways.into_iter().filter(works).collect()
}

/// A role in a container, which has the tier at a path of its own.
fn in_container(node: &Node, way: &[&str], name: &str, number: u64) -> Reaped {
    let place = node.directory.path().join(format!("mount-{number}"));
    std::fs::create_dir_all(&place).unwrap();
    let play = role(name, number, &node.server.url(), &place);
    let mut command = Command::new("unshare");
    command.args(way).args(["sh", "-c", "mount --bind \"$0\" \"$1\" && shift && exec \"$@\""]);
    command.arg(node.tier()).arg(&place).arg(play.get_program()).args(play.get_args());
    command.envs(play.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Reaped(command.spawn().unwrap())
}

#[test]
fn containers_share_a_tier() {
    for way in containers() {
        let node = Node::new();
        let both = [1, 2].map(|number| in_container(&node, way, "reader", number));
        both.into_iter().for_each(completes);
        assert_eq!(node.asked_bytes(), LEN + 2, "{way:?}");
    }
}

#[test]
fn the_death_of_a_container_ends_its_leases() {
    for way in containers() {
        let node = Node::new();
        // The download of the first, after its opening.
        node.server.plan(|number| if number == 1 { Answer::Silence } else { Answer::Proper });
        let mut first = in_container(&node, way, "first", 1);
        wait_until("a download", || node.requests() == 2);
        let second = in_container(&node, way, "first", 2);
        wait_until("another opening", || node.requests() == 3);
        // `unshare` takes its child along, and that, the first of its namespace, all others there.
        first.0.kill().unwrap();
        first.0.wait().unwrap();
        // The lease would outlast the role.
        completes(second);
        assert_eq!(node.requests(), 4, "{way:?}");
    }
}

const NOBODY: u32 = 65_534;

/// As another user: tries to plant files, and to take over names.
fn stranger() {
    let tier = PathBuf::from(argument(TIER));
    // SAFETY: the role has one thread that matters.
    assert_eq!(unsafe { libc::setresgid(NOBODY, NOBODY, NOBODY) }, 0);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) }, 0);
    let denied = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    };
    let name = tier.join(format!("{}.object", "0".repeat(32)));
    denied(std::fs::write(&name, "planted"));
    denied(std::fs::write(tier.join("control"), "planted"));
    denied(std::fs::read_dir(&tier).map(drop));
    assert!(matches!(Tier::open(&tier), Err(TierError::System { .. })));
    // Its directory has the sticky bit.
    let renamed = std::fs::rename(&tier, tier.with_file_name("taken"));
    assert!(renamed.is_err(), "the directory has changed its name");
    // A tier of its own, where the owner of the first one might want another.
    let planted = tier.with_file_name("planted");
    Tier::open(&planted).unwrap();
    std::fs::set_permissions(&planted, std::fs::Permissions::from_mode(0o777)).unwrap();
    std::os::unix::fs::symlink(&planted, tier.with_file_name("link")).unwrap();
}

#[test]
fn another_user_can_plant_nothing() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: another user; run as root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mode = std::fs::Permissions::from_mode;
    // As /tmp.
    std::fs::set_permissions(directory.path(), mode(0o1777)).unwrap();
    let tier = directory.path().join("tier");
    Tier::open(&tier).unwrap();
    completes(Reaped(role("stranger", 0, "", &tier).spawn().unwrap()));
    let refused = |name: &str| {
        let opened = Tier::open(directory.path().join(name));
        assert!(matches!(opened, Err(TierError::NotPrivate { .. })), "{opened:?}");
    };
    refused("planted");
    assert!(Tier::open(directory.path().join("link")).is_err());
    std::fs::set_permissions(directory.path().join("planted"), mode(0o700)).unwrap();
    refused("planted");
    std::fs::set_permissions(&tier, mode(0o755)).unwrap();
    refused("tier");
}

fn told(device: &RemoteDevice) -> String {
    wait_until("a problem", || device.stats().tier_problem.is_some());
    device.stats().tier_problem.unwrap()
}

/// With a limit of file lengths, beyond which a write ends a process that does not ignore the signal.
fn limited() {
    let (before, tier) = (device(), Tier::open(argument(TIER)).unwrap());
    read(&before, 0, 100_000);
    wait_until("a write", || tier.info().unwrap().objects[0].present_bytes > 90_000);
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, none).unwrap();
    read(&before, 0, 400_000);
    let said = told(&before);
    assert!(said.contains("too large"), "{said}");
    read(&before, 0, LEN);
    assert_eq!(told(&before), said, "said once");
    read(&before, 0, 90_000);
    assert!(before.stats().tier_bytes >= 90_000, "what is there is still read");
    drop(before);
    let after = options().tier(&tier).open(&argument(URL)).unwrap();
    assert!(told(&after).contains("too large"), "{}", told(&after));
    read(&after, 0, LEN);
}

#[test]
fn a_limit_of_file_lengths_is_a_problem_and_no_more() {
    completes(Node::new().start("limited", 0));
}

fn mount(arguments: &[&str]) -> bool {
    let mounted = Command::new("mount").args(arguments).stderr(Stdio::null()).status();
    mounted.is_ok_and(|status| status.success())
}

fn full() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("disk");
    std::fs::create_dir(&place).unwrap();
    let text = place.to_str().unwrap();
    // Of its own, also if it was started outside of one.
    // SAFETY: the calling thread's mounts.
    let is_apart = unsafe { libc::unshare(libc::CLONE_NEWNS) } == 0;
    if !is_apart
        || !mount(&["--make-rprivate", "/"])
        || !mount(&["-t", "tmpfs", "-o", "size=1m", "none", text])
    {
        println!("skipped: a full disk, the system allows no mounts");
        return;
    }
    let server = Server::new(pattern(LEN, SEED));
    let url = server.url();
    let path = place.join("tier");
    let tier = Tier::open(&path).unwrap();
    tier.set_budget_bytes(1 << 30).unwrap();
    let open = || options().tier(&tier).open(&url).unwrap();
    // Twice the disk: the tier makes room for itself.
    let device = open();
    for at in (0..LEN).step_by(65_536) {
        read(&device, at, 65_536.min(LEN - at));
    }
    drop(device);
    let device = open();
    assert!(used_bytes(&path) > 1 << 19, "{}", used_bytes(&path));
    read(&device, 1_000_000, 50_000);
    assert_eq!(device.stats().tier_problem, None);
    drop(device);
    let device = open();
    read(&device, 1_000_000, 50_000);
    assert!(device.stats().tier_bytes >= 50_000, "the last of it is there");
    assert_eq!(device.stats().tier_problem, None);
    drop(device);

    // Others have filled it, and the tier has nothing to give.
    let device = open();
    tier.drop_objects(|_| true).unwrap();
    let mut filling = std::fs::File::create(place.join("filling")).unwrap();
    while std::io::Write::write_all(&mut filling, &[1; 4096]).is_ok() {}
    read(&device, 0, 100_000);
    let said = told(&device);
    assert!(said.contains("No space left"), "{said}");
    read(&device, 0, LEN);
    assert_eq!(told(&device), said, "said once");
    drop((filling, device));
    std::fs::remove_file(place.join("filling")).unwrap();
    let device = open();
    read(&device, 0, 100_000);
    assert_eq!(device.stats().tier_problem, None);
    drop(device);

    // And may not be written at all: for that, no file may be open.
    drop(tier);
    assert!(mount(&["-o", "remount,ro", text]));
    let error = Tier::open(&path).unwrap_err();
    assert!(error.to_string().contains("Read-only"), "{error}");
    assert!(mount(&["-o", "remount,rw", text]));
    let device = device_of(&path, &url);
    read(&device, 0, 90_000);
    assert!(device.stats().tier_bytes >= 90_000);
    drop(device);
    assert!(Command::new("umount").arg(&place).status().unwrap().success());
}

#[test]
fn a_full_disk_is_shared_and_a_broken_one_is_bypassed() {
    child::succeeds_with_mounts("full");
}
