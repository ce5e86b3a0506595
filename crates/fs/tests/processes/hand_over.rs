//! Handing open files over: the taker's pin is there before the giver's may go, whichever process
//! dies when, and no process gets another file.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use crate::scratch::Scratch;
use aquifer_fs::node::{NewNode, Node};
use aquifer_fs::{File, Files, FsError};
use aquifer_pool::{Pool, PoolError};
use aquifer_testkit::child;

/// A wait this long is a failure, on a machine under load as well.
const LIMIT: Duration = Duration::from_secs(600);
const OFFER_BYTES: usize = 72;
/// Where an offer has the inode's number, and the flags.
const NUMBER: usize = 40;
const FLAGS: usize = 56;
const ANSWER_BYTES: usize = 8;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("forks with an offer", forks),
    ("dies_offering", dies_offering),
    ("dies_taking", dies_taking),
];

fn pool() -> (Scratch, Files) {
    let scratch = Scratch::with_pool(4 << 20, &Pool::options().inodes(255));
    let files = scratch.open();
    (scratch, files)
}

fn unnamed(files: &Files) -> File {
    let file = files.options().read(true).write(true).create_unnamed().unwrap();
    file.write_all_at(b"text", 0).unwrap();
    file
}

fn assert_text(file: &File) {
    let mut text = [0; 4];
    file.read_exact_at(&mut text, 0).unwrap();
    assert_eq!(&text, b"text");
}

fn is_gone(files: &Files, node: Node) -> bool {
    files.reap_orphans();
    matches!(files.nodes().metadata(node), Err(FsError::Stale { .. }))
}

fn failed_as(error: &FsError, kind: std::io::ErrorKind) -> bool {
    matches!(error, FsError::HandOver { source } if source.kind() == kind)
}

#[test]
fn a_file_without_names_stays_with_the_taker() {
    for reads_only in [false, true] {
        let (scratch, files) = pool();
        let third = scratch.open();
        let options = Pool::options().read_only(reads_only);
        let other = Files::new(options.open(&scratch.path).unwrap());
        let (here, there) = UnixStream::pair().unwrap();
        // A socket that does not block is as good.
        there.set_nonblocking(true).unwrap();
        let mut file = unnamed(&files);
        let node = file.node();
        file.write_all(b"text").unwrap();
        let taken = thread::scope(|scope| {
            let taker = scope.spawn(|| other.take(&there, LIMIT));
            file.give(&here, LIMIT).unwrap();
            taker.join().unwrap().unwrap()
        });
        assert_eq!(taken.node(), node);
        drop(file);
        assert!(!is_gone(&third, node));
        assert_text(&taken);
        // From the position that it had; then each has its own.
        assert_eq!((&taken).read(&mut [0; 10]).unwrap(), 0);
        assert_eq!(taken.write_all_at(b"TEXT", 0).is_ok(), !reads_only);
        drop(taken);
        assert!(is_gone(&third, node));
        drop((files, other, third));
        scratch.assert_clean();
    }
}

#[test]
fn the_taker_may_do_what_the_giver_may() {
    let (_scratch, files) = pool();
    files.write("/f", "some text").unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    let hand_over = |file: &File| {
        thread::scope(|scope| {
            let taker = scope.spawn(|| files.take(&there, LIMIT));
            file.give(&here, LIMIT).unwrap();
            taker.join().unwrap().unwrap()
        })
    };
    let only_read = hand_over(&files.open_file("/f").unwrap());
    assert_eq!(only_read.write_at(b"x", 0).unwrap_err().errno(), libc::EBADF);
    let mut only_appended = hand_over(&files.options().append(true).open("/f").unwrap());
    assert_eq!(only_appended.read_at(&mut [0], 0).unwrap_err().errno(), libc::EBADF);
    only_appended.write_all(b"!").unwrap();
    assert_eq!(files.read("/f").unwrap(), b"some text!");
    let held = hand_over(&files.nodes().hold(only_read.node()).unwrap());
    assert_eq!(held.read_at(&mut [0], 0).unwrap_err().errno(), libc::EBADF);
}

/// A giver and a taker whose messages go through the test.
struct Between<'scope> {
    to_giver: UnixStream,
    to_taker: UnixStream,
    giver: ScopedJoinHandle<'scope, Result<(), FsError>>,
    taker: ScopedJoinHandle<'scope, Result<File, FsError>>,
}

fn between<'scope, 'env>(
    scope: &'scope thread::Scope<'scope, 'env>,
    file: &'env File,
    by: &'env Files,
) -> Between<'scope> {
    let (to_giver, giving) = UnixStream::pair().unwrap();
    let (to_taker, taking) = UnixStream::pair().unwrap();
    let giver = scope.spawn(move || file.give(&giving, LIMIT));
    let taker = scope.spawn(move || by.take(&taking, LIMIT));
    Between { to_giver, to_taker, giver, taker }
}

fn message<const N: usize>(from: &mut UnixStream) -> [u8; N] {
    let mut message = [0; N];
    from.read_exact(&mut message).unwrap();
    message
}

/// The connection breaks after so many messages, as when either process dies there.
#[test]
fn a_broken_connection_loses_no_file_that_is_open_and_keeps_none_that_is_not() {
    for passed in 0..3 {
        for reads_only in [false, true] {
            let (scratch, files) = pool();
            let third = scratch.open();
            let options = Pool::options().read_only(reads_only);
            let other = Files::new(options.open(&scratch.path).unwrap());
            let file = unnamed(&files);
            let node = file.node();
            let (given, taken) = thread::scope(|scope| {
                let mut between = between(scope, &file, &other);
                if passed > 0 {
                    let offer: [u8; OFFER_BYTES] = message(&mut between.to_giver);
                    between.to_taker.write_all(&offer).unwrap();
                    let answer: [u8; ANSWER_BYTES] = message(&mut between.to_taker);
                    assert_eq!(&answer, if reads_only { b"AQPINNED" } else { b"AQTAKEN1" });
                    if passed > 1 {
                        between.to_giver.write_all(&answer).unwrap();
                        if reads_only {
                            // The giver has done its part.
                            let _: [u8; ANSWER_BYTES] = message(&mut between.to_giver);
                        }
                    }
                }
                drop((between.to_giver, between.to_taker));
                (between.giver.join().unwrap(), between.taker.join().unwrap())
            });
            assert_eq!(given.is_ok(), passed == 2);
            // The giver still has it, in any case.
            assert_text(&file);
            assert!(!is_gone(&third, node));
            drop(file);
            match taken {
                Ok(taken) => {
                    assert!(passed > 0 && !reads_only);
                    assert!(!is_gone(&third, node));
                    assert_text(&taken);
                }
                Err(error) => {
                    assert!(failed_as(&error, std::io::ErrorKind::UnexpectedEof), "{error}");
                    assert!(passed == 0 || reads_only);
                }
            }
            assert!(is_gone(&third, node));
            drop((other, files, third));
            scratch.assert_clean();
        }
    }
}

/// What the giver's message says, for a test that plays the giver.
fn offer_of(file: &File) -> [u8; OFFER_BYTES] {
    let (mut reading, giving) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let giver = scope.spawn(move || file.give(&giving, LIMIT));
        let offer = message(&mut reading);
        drop(reading);
        assert!(giver.join().unwrap().is_err());
        offer
    })
}

fn word(text: &[u8; 8]) -> [u8; 8] {
    *text
}

/// Waits until a thread of this process sleeps in `poll`.
fn wait_until_it_polls(thread: i32) {
    let polls = |syscall: String| {
        let number = syscall.split(' ').next().and_then(|number| number.parse().ok());
        #[cfg(target_arch = "x86_64")]
        let is_poll = number == Some(libc::SYS_poll);
        #[cfg(not(target_arch = "x86_64"))]
        let is_poll = false;
        is_poll || number == Some(libc::SYS_ppoll)
    };
    while !polls(std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall")).unwrap()) {
        thread::yield_now();
    }
}

/// When the taker says that it has the file, nothing can free it any more. There is no room for its
/// answer in the socket, so that it stands still where it wants to say so.
#[test]
fn the_pin_comes_before_the_answer() {
    for reads_only in [false, true] {
        let (scratch, files) = pool();
        let options = Pool::options().read_only(reads_only);
        let other = Files::new(options.open(&scratch.path).unwrap());
        let (nodes, root) = (files.nodes(), files.nodes().root().unwrap());
        files.write("/f", "text").unwrap();
        let file = files.open_file("/f").unwrap();
        let (node, offer) = (file.node(), offer_of(&file));
        drop(file);
        // It has neither names nor pins: only the taker's pin can keep it.
        nodes.unlink(root, b"f", |_| Ok(true)).unwrap();
        let (mut giving, mut taking) = UnixStream::pair().unwrap();
        taking.set_nonblocking(true).unwrap();
        let mut filled_bytes = 0;
        while let Ok(written) = taking.write(&[0; 4096]) {
            filled_bytes += written;
        }
        let (say, hear) = std::sync::mpsc::channel();
        let (taken, was_reaped) = thread::scope(|scope| {
            giving.write_all(&offer).unwrap();
            let taker = scope.spawn(|| {
                // SAFETY: no preconditions.
                say.send(unsafe { libc::gettid() }).unwrap();
                other.take(&taking, LIMIT)
            });
            wait_until_it_polls(hear.recv().unwrap());
            let was_reaped = nodes.reap(node).unwrap();
            giving.read_exact(&mut vec![0; filled_bytes]).unwrap();
            let answer: [u8; ANSWER_BYTES] = message(&mut giving);
            giving.write_all(b"AQKEPT01").unwrap();
            assert_eq!(&answer, if reads_only { b"AQPINNED" } else { b"AQTAKEN1" });
            (taker.join().unwrap(), was_reaped)
        });
        assert!(!was_reaped, "it answers before it has a pin");
        assert_text(&taken.unwrap());
        assert!(is_gone(&files, node));
    }
}

/// An offer of what cannot be written, and an offer from a copy of the pool.
#[test]
fn forged_offers_are_refused() {
    let (scratch, files) = pool();
    let other = scratch.open();
    files.create_dir("/d").unwrap();
    files.symlink("t", "/l").unwrap();
    let offer_with = |path: &str, flags: u64| {
        let number = files.symlink_metadata(path).unwrap().node().number;
        let node = files.nodes().numbered(number).unwrap();
        let mut offer = offer_of(&files.nodes().hold(node).unwrap());
        offer[FLAGS..FLAGS + 8].copy_from_slice(&flags.to_le_bytes());
        offer
    };
    let mut answers = Vec::new();
    for (path, flags) in [("/d", 2), ("/d", 4), ("/l", 1), ("/l", 2), ("/d", 1), ("/l", 0)] {
        let (mut giving, taking) = UnixStream::pair().unwrap();
        giving.write_all(&offer_with(path, flags)).unwrap();
        let taken = other.take(&taking, LIMIT);
        let answer: [u8; ANSWER_BYTES] = message(&mut giving);
        assert_eq!(&answer == b"AQTAKEN1", taken.is_ok());
        answers.push(taken.map(drop).map_err(|error| error.errno()));
    }
    let refused = Err(libc::EPROTO);
    assert_eq!(answers, [refused, refused, refused, refused, Ok(()), Ok(())]);

    files.sync().unwrap();
    let copy = scratch.directory.path().join("copy");
    std::fs::copy(&scratch.path, &copy).unwrap();
    let copied = Files::open(&copy).unwrap();
    let file = files.create_file("/f").unwrap();
    let (mut giving, taking) = UnixStream::pair().unwrap();
    giving.write_all(&offer_of(&file)).unwrap();
    assert!(matches!(copied.take(&taking, LIMIT), Err(FsError::OtherPool)));
}

/// The offer arrives when the file is gone, and its number belongs to another one.
#[test]
fn a_late_taker_gets_no_other_file() {
    let (scratch, files) = pool();
    let other = scratch.open();
    let file = unnamed(&files);
    let (node, offer) = (file.node(), offer_of(&file));
    drop(file);
    let (nodes, caller) = (files.nodes(), files.caller());
    let root = nodes.root().unwrap();
    for round in 0..2 {
        let (mut giving, taking) = UnixStream::pair().unwrap();
        giving.write_all(&offer).unwrap();
        let error = other.take(&taking, LIMIT).unwrap_err();
        assert!(matches!(error, FsError::Stale { .. }), "{round}: {error}");
        assert_eq!(message(&mut giving), word(b"AQREFUSE"));
        if round == 0 {
            let numbers = (0..4096).map(|at: u32| {
                let name = at.to_string();
                nodes.make(root, name.as_bytes(), &NewNode::file(0o666), &caller).unwrap().ino()
            });
            assert!(numbers.into_iter().any(|number| number == node.number));
        }
    }
}

#[test]
fn what_cannot_be_taken_is_refused() {
    let (_scratch, files) = pool();
    let (_elsewhere, others) = pool();
    let file = unnamed(&files);
    let (here, there) = UnixStream::pair().unwrap();
    let (given, taken) = thread::scope(|scope| {
        let taker = scope.spawn(|| others.take(&there, LIMIT));
        (file.give(&here, LIMIT), taker.join().unwrap())
    });
    assert!(matches!(taken, Err(FsError::OtherPool)));
    let given = given.unwrap_err();
    assert!(failed_as(&given, std::io::ErrorKind::ConnectionRefused), "{given}");
    assert_eq!(given.errno(), libc::ECONNREFUSED);
    assert_text(&file);

    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(&[7; OFFER_BYTES]).unwrap();
    assert_eq!(files.take(&there, LIMIT).unwrap_err().errno(), libc::EPROTO);
    here.write_all(&[7; ANSWER_BYTES]).unwrap();
    assert_eq!(file.give(&there, LIMIT).unwrap_err().errno(), libc::EPROTO);

    let (here, _there) = UnixStream::pair().unwrap();
    let late = file.give(&here, Duration::from_millis(1)).unwrap_err();
    assert!(failed_as(&late, std::io::ErrorKind::TimedOut), "{late}");
    let late = files.take(&here, Duration::ZERO).unwrap_err();
    assert!(failed_as(&late, std::io::ErrorKind::TimedOut), "{late}");
}

#[test]
fn a_forked_child_takes_an_open_file() {
    child::succeeds("forks with an offer");
}

fn forks() {
    let (scratch, files) = pool();
    let third = scratch.open();
    let file = unnamed(&files);
    let node = file.node();
    let (here, there) = UnixStream::pair().unwrap();
    // SAFETY: the child allocates, which this process's only other thread does not do at the same
    // time, and ends with `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let refused = file.give(&there, LIMIT).unwrap_err();
            assert!(matches!(refused, FsError::Pool(PoolError::Forked)), "{refused}");
            let files = scratch.open();
            let taken = files.take(&there, LIMIT).unwrap();
            let mut there = &there;
            // Wait until the parent has closed it.
            there.read_exact(&mut [0]).unwrap();
            assert_text(&taken);
            there.write_all(b"!").unwrap();
            there.read_exact(&mut [0]).unwrap();
        }));
        // SAFETY: runs none of the parent's destructors.
        unsafe { libc::_exit(if outcome.is_ok() { 0 } else { 1 }) };
    }
    drop(there);
    file.give(&here, LIMIT).unwrap();
    drop(file);
    assert!(!is_gone(&third, node));
    let mut here = here;
    here.write_all(b".").unwrap();
    here.read_exact(&mut [0]).unwrap();
    assert!(!is_gone(&third, node));
    here.write_all(b".").unwrap();
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the child has failed");
    // It ended without closing the file: its pin ended with it.
    assert!(is_gone(&third, node));
    drop((files, third));
    scratch.assert_clean();
}

/// A child, and the socket to it.
fn child_with_socket(scratch: &Scratch, role: &str) -> (child::Reaped, UnixStream) {
    let path = scratch.directory.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let mut command = child::command(role);
    command.env("AQUIFER_TEST_POOL", &scratch.path).env("AQUIFER_TEST_SOCKET", &path);
    let child = child::Reaped(command.spawn().unwrap());
    (child, listener.accept().unwrap().0)
}

/// Opens the pool and the socket of the parent.
fn of_parent() -> (Files, UnixStream) {
    let socket = UnixStream::connect(std::env::var_os("AQUIFER_TEST_SOCKET").unwrap()).unwrap();
    (Files::open(std::env::var_os("AQUIFER_TEST_POOL").unwrap()).unwrap(), socket)
}

fn dies_offering() {
    let (files, socket) = of_parent();
    drop(unnamed(&files).give(&socket, LIMIT));
    unreachable!("it is killed before");
}

/// The giver is killed when the taker has its pin: a writer has the file then, a reader cannot know.
#[test]
fn a_killed_giver_leaves_nothing_behind() {
    for reads_only in [false, true] {
        let (scratch, files) = pool();
        let options = Pool::options().read_only(reads_only);
        let other = Files::new(options.open(&scratch.path).unwrap());
        let (giver, mut to_giver) = child_with_socket(&scratch, "dies_offering");
        let (mut to_taker, taking) = UnixStream::pair().unwrap();
        let offer: [u8; OFFER_BYTES] = message(&mut to_giver);
        let number = u64::from_le_bytes(*offer[NUMBER..].first_chunk().unwrap());
        let node = files.nodes().numbered(number).unwrap();
        let taken = thread::scope(|scope| {
            let taker = scope.spawn(|| other.take(&taking, LIMIT));
            to_taker.write_all(&offer).unwrap();
            let _: [u8; ANSWER_BYTES] = message(&mut to_taker);
            giver.kill();
            // The taker's pin keeps it.
            assert!(!is_gone(&files, node));
            drop(to_taker);
            taker.join().unwrap()
        });
        match taken {
            Ok(taken) => {
                assert!(!reads_only && !is_gone(&files, node));
                assert_text(&taken);
            }
            Err(error) => {
                assert!(failed_as(&error, std::io::ErrorKind::UnexpectedEof), "{error}");
                assert!(reads_only);
            }
        }
        assert!(is_gone(&files, node));
        drop((other, files));
        scratch.assert_clean();
    }
}

fn dies_taking() {
    let (files, mut socket) = of_parent();
    let taken = files.take(&socket, LIMIT).unwrap();
    assert_text(&taken);
    socket.write_all(b"!").unwrap();
    // Until it is killed.
    let _ = socket.read(&mut [0]);
}

#[test]
fn a_killed_taker_leaves_nothing_behind() {
    for closes_first in [false, true] {
        let (scratch, files) = pool();
        let (taker, mut socket) = child_with_socket(&scratch, "dies_taking");
        let file = unnamed(&files);
        let node = file.node();
        file.give(&socket, LIMIT).unwrap();
        socket.read_exact(&mut [0]).unwrap();
        if closes_first {
            drop(file);
            assert!(!is_gone(&files, node));
            taker.kill();
        } else {
            taker.kill();
            assert!(!is_gone(&files, node));
            assert_text(&file);
            drop(file);
        }
        assert!(is_gone(&files, node));
        drop(files);
        scratch.assert_clean();
    }
}
