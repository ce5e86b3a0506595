//! Access that a broker grants: to which processes, and what happens when the broker has ended.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use crate::common::{Scene, contents, create};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_pool::broker::{Outcome, socket_beside};
use aquifer_pool::{
    AccessError, AccessKey, Broker, CommitContent, CommitPages, Pool, PoolError, PoolOptions,
    Result,
};
use aquifer_sys::local_socket::{Connection, Listener};
use aquifer_testkit::child::{self, Reaped};

/// A user that owns nothing.
const NOBODY: u32 = 65534;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("broker", serve_until_killed),
    ("granted writer", write_as_granted),
    ("another user", act_as_another_user),
    ("listener of another user", listen_as_another_user),
];

fn key() -> AccessKey {
    AccessKey::new(*b"the key of this test").unwrap()
}

fn wrong_key() -> AccessKey {
    AccessKey::new(*b"the key of no test..").unwrap()
}

/// Options that admit readers of any user.
fn shared() -> PoolOptions {
    Pool::options().segment_mode(0o644)
}

fn reading() -> PoolOptions {
    Pool::options().read_only(true)
}

/// A pool that every user may read.
fn scene() -> Scene {
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let scene = Scene::new(directory);
    let pool = crate::common::small(Pool::options()).create(&scene.path, 2 << 20).unwrap();
    create(&pool, b"first", 2).unwrap();
    std::fs::set_permissions(&scene.path, PermissionsExt::from_mode(0o644)).unwrap();
    scene
}

/// Serves while `work` runs; returns the sorted outcomes of the requests.
fn while_served<T>(
    pool: &Pool,
    options: &PoolOptions,
    work: impl FnOnce() -> T,
) -> (T, Vec<Outcome>) {
    let broker = Broker::bind(pool, &key(), options).unwrap();
    let (stop, running) = std::io::pipe().unwrap();
    let (told, outcomes) = mpsc::channel();
    let result = std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            broker.serve(stop.as_fd(), &|asked| told.send(asked.outcome.clone()).unwrap())
        });
        // Dropped even if the work panics, which ends the broker.
        let running = running;
        let result = work();
        drop(running);
        serving.join().unwrap().unwrap();
        result
    });
    drop(broker);
    drop(told);
    let mut outcomes: Vec<_> = outcomes.into_iter().collect();
    outcomes.sort_by_key(|outcome| format!("{outcome:?}"));
    (result, outcomes)
}

fn access_error(opened: Result<Pool>) -> AccessError {
    match opened {
        Err(PoolError::Access(error)) => error,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("access was given"),
    }
}

fn said(text: &str) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{text}").unwrap();
    output.flush().unwrap();
}

/// Waits until a child has printed a line with this start.
fn hear(child: &mut Reaped, start: &str) -> String {
    let mut output = BufReader::with_capacity(1, child.0.stdout.as_mut().unwrap());
    let mut line = String::new();
    while !line.starts_with(start) {
        line.clear();
        if output.read_line(&mut line).unwrap() == 0 {
            let reason = std::io::read_to_string(child.0.stderr.take().unwrap()).unwrap();
            panic!("the child ended early: {reason}");
        }
    }
    line
}

fn path_of_parent() -> PathBuf {
    std::env::var_os("POOL").expect("set by the parent").into()
}

fn spawn(role: &str, pool: &Path) -> Reaped {
    Reaped(child::command(role).env("POOL", pool).spawn().unwrap())
}

#[test]
fn a_caller_with_the_key_may_write() {
    let scene = scene();
    let pool = shared().open(&scene.path).unwrap();
    let reader = reading().open(&scene.path).unwrap();
    let ((), outcomes) = while_served(&pool, &Pool::options(), || {
        let mode = std::fs::metadata(socket_beside(&scene.path)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o666, "who may read the shared memory may ask");
        let granted = reader.grant_access(&key(), &Pool::options()).unwrap();
        assert!(granted.is_writable() && !reader.is_writable());
        create(&granted, b"second", 1).unwrap();
        // Visible to all handles, and each has its own locks.
        for handle in [&pool, &reader, &granted] {
            assert_eq!(contents(handle).unwrap().len(), 2);
        }
        let another = Pool::options().open_granted(&scene.path, &key()).unwrap();
        create(&another, b"third", 1).unwrap();
        let number = crate::common::find(&pool, b"first").unwrap().unwrap().number;
        let lock = granted.lock_inode(number, aquifer_pool::LockMode::Exclusive).unwrap();
        for handle in [&pool, &another] {
            let refused = handle.lock_inode(number, aquifer_pool::LockMode::Exclusive);
            assert!(matches!(refused, Err(PoolError::Locked { .. })), "{refused:?}");
        }
        drop(lock);
        drop(granted);
        pool.lock_inode(number, aquifer_pool::LockMode::Exclusive).unwrap();
        create(&another, b"fourth", 1).unwrap();
    });
    assert_eq!(outcomes, [Outcome::Granted, Outcome::Granted]);
    assert!(!socket_beside(&scene.path).exists(), "the socket is removed");
    drop((pool, reader));
    let again = Pool::open(&scene.path).unwrap();
    assert_eq!(contents(&again).unwrap().len(), 4);
}

#[test]
fn a_caller_without_the_key_is_refused() {
    let scene = scene();
    let pool = shared().open(&scene.path).unwrap();
    let reader = reading().open(&scene.path).unwrap();
    let grant = |key: &AccessKey, options: &PoolOptions| reader.grant_access(key, options);
    let plain = Pool::options();

    let nobody = access_error(grant(&key(), &plain));
    assert!(matches!(nobody, AccessError::NoBroker { .. }), "{nobody}");
    assert!(nobody.to_string().contains("aquifer pool serve"), "{nobody}");

    let ((), outcomes) = while_served(&pool, &plain, || {
        for wrong in [
            wrong_key(),
            AccessKey::new(*b"the key of this tes").unwrap(),
            AccessKey::new(*b"the key of this test.").unwrap(),
        ] {
            let error = access_error(grant(&wrong, &plain));
            assert!(matches!(error, AccessError::WrongKey { .. }), "{error}");
            let error = access_error(plain.open_granted(&scene.path, &wrong));
            assert!(matches!(error, AccessError::WrongKey { .. }), "{error}");
        }
    });
    assert_eq!(outcomes, vec![Outcome::WrongKey; 6]);
}

#[test]
fn a_broker_gives_access_to_its_own_pool_only() {
    let (scene, other) = (scene(), scene());
    let pool = shared().open(&scene.path).unwrap();
    // A copy has the same uuid, but is another pool.
    let copy = other.path.with_extension("copy");
    std::fs::copy(&scene.path, &copy).unwrap();
    let ((), outcomes) = while_served(&pool, &Pool::options(), || {
        let here = socket_beside(&scene.path);
        let options = Pool::options().broker_socket(here);
        let reader = reading().open(&other.path).unwrap();
        let copy_reader = reading().open(&copy);
        // It does not open: the segment that it names belongs to the other file.
        drop(copy_reader);
        for refused in [
            reader.grant_access(&key(), &options),
            options.open_granted(&other.path, &key()),
            options.open_granted(&copy, &key()),
        ] {
            let error = access_error(refused);
            assert!(matches!(error, AccessError::OtherPool { .. }), "{error}");
        }
        let elsewhere = options.open_granted(&scene.path, &key()).unwrap();
        assert_eq!(contents(&elsewhere).unwrap().len(), 1);
    });
    use Outcome::{Granted, OtherPool};
    // The refusals of requests without a uuid happen in the client.
    assert_eq!(outcomes, [Granted, Granted, Granted, OtherPool]);
}

#[test]
fn a_pool_has_one_broker_and_a_dead_ones_socket_is_taken_over() {
    let scene = scene();
    let pool = shared().open(&scene.path).unwrap();
    let plain = Pool::options();
    let bind = |pool: &Pool, options: &PoolOptions| match Broker::bind(pool, &key(), options) {
        Err(PoolError::Access(error)) => Err(error),
        other => Ok(other.unwrap()),
    };
    let broker = bind(&pool, &plain).unwrap();
    let elsewhere = plain.clone().broker_socket(scene.path.with_extension("elsewhere"));
    for options in [&plain, &elsewhere] {
        let error = bind(&pool, options).unwrap_err();
        assert!(matches!(error, AccessError::BrokerRuns { .. }), "{error}");
    }
    drop(broker);

    let mut child = spawn("broker", &scene.path);
    hear(&mut child, "serving");
    let error = bind(&pool, &elsewhere).unwrap_err();
    assert!(matches!(error, AccessError::BrokerRuns { .. }), "{error}");
    child.kill();
    let socket = socket_beside(&scene.path);
    assert!(socket.exists(), "the dead one's");
    let error = access_error(plain.open_granted(&scene.path, &key()));
    assert!(matches!(error, AccessError::NoBroker { .. }), "{error}");
    let (granted, _) =
        while_served(&pool, &plain, || plain.open_granted(&scene.path, &key()).map(drop));
    granted.unwrap();

    // A file that is no socket, and a live listener, are left alone.
    std::fs::write(&socket, b"a file").unwrap();
    let error = bind(&pool, &plain).unwrap_err();
    assert!(matches!(error, AccessError::SocketTaken { .. }), "{error}");
    assert_eq!(std::fs::read(&socket).unwrap(), b"a file");
    std::fs::remove_file(&socket).unwrap();
    let listener = Listener::bind(&socket).unwrap();
    let error = bind(&pool, &plain).unwrap_err();
    assert!(matches!(error, AccessError::SocketTaken { .. }), "{error}");
    drop(listener);
    drop(bind(&pool, &plain).unwrap());

    let reader = reading().open(&scene.path).unwrap();
    assert!(matches!(Broker::bind(&reader, &key(), &plain), Err(PoolError::ReadOnly { .. })));
    drop((reader, pool));
    let alone = crate::common::alone(None).open(&scene.path).unwrap();
    assert!(matches!(Broker::bind(&alone, &key(), &plain), Err(PoolError::Parameter { .. })));
}

/// A client that connects and sends nothing, or garbage, does not delay other clients.
#[test]
fn malformed_and_silent_clients_block_no_other() {
    let scene = scene();
    let pool = shared().open(&scene.path).unwrap();
    let patience = Duration::from_secs(10);
    let ((), outcomes) = while_served(&pool, &Pool::options(), || {
        let socket = socket_beside(&scene.path);
        let silent: Vec<_> =
            (0..3).map(|_| Connection::connect(&socket, patience).unwrap()).collect();
        for nonsense in [&b"x"[..], &[0; 2000], b"AQASKS02 and so on, and so on"] {
            let connection = Connection::connect(&socket, patience).unwrap();
            connection.send(nonsense, &[]).unwrap();
            let (len_bytes, files) = connection.receive(&mut [0; 4096]).unwrap();
            assert!(len_bytes > 0 && files.is_empty());
        }
        Pool::options().open_granted(&scene.path, &key()).unwrap();
        drop(silent);
    });
    assert_eq!(outcomes[..2], [Outcome::Granted, Outcome::NoRequest]);
    assert_eq!(outcomes.len(), 7);
}

/// The listener is not a broker.
#[test]
fn answers_that_are_none_are_errors() {
    let scene = scene();
    let socket = socket_beside(&scene.path);
    let listener = Listener::bind(&socket).unwrap();
    let (never, _open) = std::io::pipe().unwrap();
    let options = Pool::options().stall_timeout(Duration::from_millis(100));
    let mut granted_without_files = b"AQSAYS01".to_vec();
    granted_without_files.resize(48, 0);
    for answer in [&b""[..], b"nonsense", &[7; 1000], &granted_without_files] {
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let connection = listener.accept(never.as_fd()).unwrap().unwrap();
                let _ = connection.receive(&mut [0; 2000]);
                if !answer.is_empty() {
                    connection.send(answer, &[]).unwrap();
                }
            });
            access_error(options.open_granted(&scene.path, &key()))
        });
        assert!(matches!(error, AccessError::NoAnswer { .. }), "{error}");
    }
    // No process accepts: the connection is established, and nothing arrives.
    let error = access_error(options.open_granted(&scene.path, &key()));
    assert!(error.to_string().contains("says nothing"), "{error}");
}

/// What a broker sent may be useless when it arrives: then the client opens nothing.
#[test]
fn descriptors_of_a_pool_that_was_closed_are_refused() {
    let scene = scene();
    let socket = socket_beside(&scene.path);
    let listener = Listener::bind(&socket).unwrap();
    let (never, _open) = std::io::pipe().unwrap();
    for (is_closed, is_opened_again) in [(false, false), (true, false), (true, true)] {
        let pool = shared().open(&scene.path).unwrap();
        let id = std::fs::read(&scene.path).unwrap()[96..112].to_vec();
        let name: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let names = [format!("/dev/shm/aquifer-{name}"), format!("/dev/shm/aquifer-{name}-pins")];
        let open = |path: &dyn AsRef<Path>| {
            std::fs::File::options().read(true).write(true).open(path).unwrap()
        };
        let files = [open(&scene.path), open(&names[0]), open(&names[1])];
        let mut answer = b"AQSAYS01".to_vec();
        answer.extend([0; 8]);
        answer.extend(pool.uuid().as_bytes());
        answer.extend(&id);
        let mut pool = (!is_closed).then_some(pool);
        if is_opened_again {
            pool = Some(shared().open(&scene.path).unwrap());
        }
        let opened = std::thread::scope(|scope| {
            scope.spawn(|| {
                let connection = listener.accept(never.as_fd()).unwrap().unwrap();
                connection.receive(&mut [0; 2000]).unwrap();
                connection.send(&answer, &files.each_ref().map(AsFd::as_fd)).unwrap();
            });
            Pool::options().open_granted(&scene.path, &key())
        });
        if !is_closed {
            assert!(opened.unwrap().is_writable());
            continue;
        }
        let error = access_error(opened);
        assert!(matches!(error, AccessError::Ended { .. }), "{error}");
        drop(pool);
    }
    std::fs::remove_file(&socket).unwrap();
}

/// Descriptors of other files are refused before they are mapped, whatever these are.
#[test]
fn descriptors_of_other_files_are_refused_before_they_are_mapped() {
    let scene = scene();
    let socket = socket_beside(&scene.path);
    let listener = Listener::bind(&socket).unwrap();
    let (never, _open) = std::io::pipe().unwrap();
    let pool = shared().open(&scene.path).unwrap();
    let id = std::fs::read(&scene.path).unwrap()[96..112].to_vec();
    let name: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let genuine = format!("/dev/shm/aquifer-{name}");
    let open = |path: &dyn AsRef<Path>| -> std::os::fd::OwnedFd {
        std::fs::File::options().read(true).write(true).open(path).unwrap().into()
    };
    let mut answer = b"AQSAYS01".to_vec();
    answer.extend([0; 8]);
    answer.extend(pool.uuid().as_bytes());
    answer.extend(&id);
    // Neither an empty file nor a pipe can be mapped: trying to would give another error.
    let empty = || tempfile::tempfile().unwrap().into();
    let pipe = || std::io::pipe().unwrap().0.into();
    for others in [[empty(), empty()], [pipe(), pipe()], [open(&genuine), empty()]] {
        let [segment, pins] = others;
        let files = [open(&scene.path), segment, pins];
        let opened = std::thread::scope(|scope| {
            scope.spawn(|| {
                let connection = listener.accept(never.as_fd()).unwrap().unwrap();
                connection.receive(&mut [0; 2000]).unwrap();
                connection.send(&answer, &files.each_ref().map(AsFd::as_fd)).unwrap();
            });
            Pool::options().open_granted(&scene.path, &key()).map(drop)
        });
        assert!(matches!(opened, Err(PoolError::BusyElsewhere { .. })), "{opened:?}");
    }
    std::fs::remove_file(&socket).unwrap();
}

fn serve_until_killed() {
    let path = path_of_parent();
    let broker = Broker::bind(&shared().open(&path).unwrap(), &key(), &Pool::options());
    let broker = broker.unwrap();
    said("serving");
    let (stop, _running) = std::io::pipe().unwrap();
    broker.serve(stop.as_fd(), &|_| {}).unwrap();
}

/// Commits to its own object with granted access, and prints each commit.
fn write_as_granted() {
    let pool = Pool::options().open_granted(path_of_parent(), &key()).unwrap();
    let name = format!("of {}", std::process::id()).into_bytes();
    create(&pool, &name, 1).unwrap();
    let inode = crate::common::find(&pool, &name).unwrap().unwrap();
    let pages = [CommitPages { inode: inode.number, target: crate::common::place(&inode, 0) }];
    for number in 1u64.. {
        let content = CommitContent { pages: &pages, ..Default::default() };
        let commit = pool.capture_unguarded(&content, |bytes| {
            bytes.copy_from_slice(&crate::common::page(number))
        });
        commit.unwrap().finish().unwrap();
        said(&format!("committed {number}"));
    }
}

/// The broker is killed while clients work: these continue, and the pool does when they have ended,
/// too.
#[test]
fn clients_go_on_when_the_broker_is_killed() {
    let scene = scene();
    let mut broker = spawn("broker", &scene.path);
    hear(&mut broker, "serving");
    let mut clients = [(); 2].map(|()| spawn("granted writer", &scene.path));
    clients.iter_mut().for_each(|client| drop(hear(client, "committed")));
    let own = Pool::options().open_granted(&scene.path, &key()).unwrap();
    broker.kill();
    for client in &mut clients {
        for _ in 0..20 {
            hear(client, "committed");
        }
    }
    create(&own, b"of mine", 1).unwrap();
    own.checkpoint().unwrap();
    // A process that may open the pool itself joins as before, and a new broker serves it.
    let mut broker = spawn("broker", &scene.path);
    hear(&mut broker, "serving");
    let another = Pool::options().open_granted(&scene.path, &key()).unwrap();
    create(&another, b"of another", 1).unwrap();
    drop((own, another));
    for client in clients {
        client.kill();
    }
    broker.kill();
    let pool = Pool::open(&scene.path).unwrap();
    let found = contents(&pool).unwrap();
    for name in [&b"first"[..], b"of mine", b"of another"] {
        assert!(found.contains_key(name));
    }
    drop(pool);
    let report =
        aquifer_check::check(&scene.path, &aquifer_check::CheckOptions::default()).unwrap();
    assert!(report.is_sound(), "{report:?}");
}

fn is_root() -> bool {
    aquifer_sys::credentials::effective().uid == 0
}

/// Becomes another user, like a program that this user started.
fn become_nobody() {
    // SAFETY: changes only this process, in which no other thread depends on its credentials.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setgid(NOBODY), 0);
        assert_eq!(libc::setuid(NOBODY), 0);
        // Otherwise its entries in /proc belong to root.
        libc::prctl(libc::PR_SET_DUMPABLE, 1);
    }
}

/// Reads, tries to write in every way that needs no key, and writes with the key.
fn act_as_another_user() {
    become_nobody();
    let path = path_of_parent();
    let plain = Pool::options();
    let refused = plain.open(&path).unwrap_err();
    assert!(refused.to_string().contains("permission"), "{refused}");
    let reader = reading().open(&path).unwrap();
    assert_eq!(contents(&reader).unwrap().len(), 1);
    let again = aquifer_sys::io::reopen(reader.media().file(), libc::O_RDWR);
    assert_eq!(again.unwrap_err().raw_os_error(), Some(libc::EACCES));
    let error = access_error(reader.grant_access(&wrong_key(), &plain));
    assert!(matches!(error, AccessError::WrongKey { .. }), "{error}");

    let writer = reader.grant_access(&key(), &plain).unwrap();
    create(&writer, b"of nobody", 1).unwrap();
    writer.sync().unwrap();
    // Without a way to reopen the file, threads sync one after another.
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let writer = &writer;
            scope.spawn(move || {
                for number in 0..2 {
                    create(writer, format!("{thread}-{number}").as_bytes(), 1).unwrap();
                }
            });
        }
    });
    said("written");
}

#[test]
fn another_user_reads_and_writes_with_the_key_only() {
    if !is_root() {
        return eprintln!("skipped: acting as another user needs root");
    }
    let scene = scene();
    let pool = shared().open(&scene.path).unwrap();
    let (played, outcomes) = while_served(&pool, &Pool::options(), || {
        child::command("another user").env("POOL", &scene.path).output().unwrap()
    });
    let text = String::from_utf8_lossy(&played.stdout);
    assert!(played.status.success() && text.contains("written"), "{played:?}");
    assert_eq!(outcomes, [Outcome::Granted, Outcome::WrongKey]);
    assert!(contents(&pool).unwrap().contains_key(b"of nobody".as_slice()));
}

/// Waits for a key at a socket path that the parent has left free.
fn listen_as_another_user() {
    become_nobody();
    let path = socket_beside(&path_of_parent());
    let listener = Listener::bind(&path).unwrap();
    said("listening");
    let (never, _open) = std::io::pipe().unwrap();
    let connection = listener.accept(never.as_fd()).unwrap().unwrap();
    let (len_bytes, _) = connection.receive(&mut [0; 2000]).unwrap();
    said(&format!("heard {len_bytes} bytes"));
}

/// Another user that listens at the broker's path does not learn the key.
#[test]
fn the_key_is_told_to_the_owner_only() {
    if !is_root() {
        return eprintln!("skipped: acting as another user needs root");
    }
    let scene = scene();
    let directory = scene.path.parent().unwrap();
    std::fs::set_permissions(directory, PermissionsExt::from_mode(0o777)).unwrap();
    let mut child = spawn("listener of another user", &scene.path);
    hear(&mut child, "listening");
    let error = access_error(Pool::options().open_granted(&scene.path, &key()));
    let AccessError::NotTheOwner { uid, owner, .. } = error else { panic!("{error}") };
    assert_eq!((uid, owner), (NOBODY, 0));
    hear(&mut child, "heard 0 bytes");
}

#[test]
fn options_of_the_caller_hold_for_what_is_granted() {
    let directory = tempfile::tempdir_in("/dev/shm");
    let Ok(directory) = directory else { return eprintln!("skipped: /dev/shm is not writable") };
    let scene = Scene::new(directory);
    let pool = Pool::create(&scene.path, 2 << 20).unwrap();
    let (granted, _) = while_served(&pool, &Pool::options(), || {
        use aquifer_pool::media::WriteWindows;
        let options = reading().write_windows(WriteWindows::Best).read_only(true);
        let granted = options.open_granted(&scene.path, &key()).unwrap();
        (granted.is_writable(), granted.media().write_windows() != WriteWindows::None)
    });
    assert_eq!(granted, (true, true));
}
