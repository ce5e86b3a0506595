//! `aquifer pool keep` from a user's perspective.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::{Place, aquifer, failed, fails, says, works};

/// A running command. Killed if a test fails.
struct Keeper(Child);

impl Keeper {
    fn start(pool: &str, notify: Option<&Path>) -> Keeper {
        let mut command = aquifer();
        command.args(["pool", "keep", pool]).stdout(Stdio::piped());
        match notify {
            Some(socket) => command.env("NOTIFY_SOCKET", socket),
            None => command.env_remove("NOTIFY_SOCKET"),
        };
        let mut child = command.spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let keeper = Keeper(child);
        says(&first, &["keeping", pool, "open"]);
        keeper
    }

    /// Waits until it ends by itself, and returns its exit status.
    fn ended(mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }

    /// Sends it a signal and returns its exit status.
    fn end(self, signal: &str) -> Option<i32> {
        let process = self.0.id().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
        self.ended()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The superblocks of a pool, which the first process that opens it and the last one that closes it
/// write.
fn superblocks(pool: &str) -> Vec<u8> {
    std::fs::read(pool).unwrap()[..8192].to_vec()
}

#[test]
fn commands_join_a_pool_that_is_kept_open() {
    let place = Place::new();
    let pool = place.pool();
    let at = |path: &str| format!("{pool}:{path}");
    std::fs::write(place.text("local"), "text").unwrap();
    works(&["put", &place.text("local"), &at("/f")]);
    let closed = superblocks(&pool);

    let socket = place.text("notify");
    let manager = UnixDatagram::bind(&socket).unwrap();
    let keeper = Keeper::start(&pool, Some(Path::new(&socket)));
    let mut said = [0; 64];
    let len = manager.recv(&mut said).unwrap();
    assert_eq!(&said[..len], b"READY=1\n");
    let kept = superblocks(&pool);
    assert_ne!(kept, closed);

    // They change and read it, and neither opens nor closes it.
    works(&["mkdir", &at("/d")]);
    assert_eq!(works(&["cat", &at("/f")]), "text");
    says(&works(&["pool", "info", &pool]), &["open for writing in"]);
    assert_eq!(superblocks(&pool), kept);

    assert_eq!(keeper.end("-TERM"), Some(0));
    assert_ne!(superblocks(&pool), kept);
    says(&works(&["ls", &at("/")]), &["d", "f"]);
    works(&["pool", "check", &pool]);
}

#[test]
fn nothing_is_lost_if_it_is_killed() {
    let place = Place::new();
    let pool = place.pool();
    let keeper = Keeper::start(&pool, None);
    works(&["mkdir", &format!("{pool}:/made")]);
    assert_eq!(keeper.end("-KILL"), None);
    let left = works(&["doctor", "--no-costs", "--dir", &place.text("")]);
    says(&left, &["Shared memory that no process uses", "/dev/shm/aquifer-"]);
    says(&works(&["ls", &format!("{pool}:/")]), &["made"]);
    works(&["mkdir", &format!("{pool}:/later")]);
    works(&["pool", "check", &pool]);
    // Another one can keep it. (SIGINT would be ignored where these tests run in the background of a
    // shell.)
    assert_eq!(Keeper::start(&pool, None).end("-TERM"), Some(0));
}

/// A pool that has failed is read-only as long as any process has it open.
#[test]
fn it_ends_when_the_pool_has_failed() {
    let place = Place::new();
    let pool = place.pool();
    let at = |path: &str| format!("{pool}:{path}");
    let keeper = Keeper::start(&pool, None);
    works(&["mkdir", &at("/before")]);
    // A write to the log that the system refuses, as on a full disk.
    let limited = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$@\"", "sh"])
        .arg(aquifer().get_program())
        .args(["mkdir", &at("/failed")])
        .output()
        .unwrap();
    let error = failed(limited, 1, "mkdir");
    assert_eq!(keeper.ended(), Some(1), "{error}");
    works(&["mkdir", &at("/later")]);
    says(&works(&["ls", &at("/")]), &["before", "later"]);
    works(&["pool", "check", &pool]);
}

/// Nor where no service manager listens.
#[test]
fn a_service_manager_keeps_it_from_nothing() {
    let place = Place::new();
    let pool = place.pool();
    let socket = place.text("notify");
    let _manager = UnixDatagram::bind(&socket).unwrap();
    let other = UnixDatagram::unbound().unwrap();
    other.set_nonblocking(true).unwrap();
    while other.send_to(b"unread", &socket).is_ok() {}
    for socket in [&socket, &place.text("absent"), ""] {
        let keeper = Keeper::start(&pool, Some(Path::new(socket)));
        assert_eq!(keeper.end("-TERM"), Some(0), "{socket}");
    }
}

#[test]
fn what_is_no_pool_is_not_kept() {
    let place = Place::new();
    std::fs::write(place.text("no-pool"), vec![1; 1 << 20]).unwrap();
    fails(&["pool", "keep", &place.text("no-pool")], 1);
    fails(&["pool", "keep", &place.text("absent")], 1);
}
