//! Whole objects: read in order, listed, and written in one piece or in parts; and what happens to them when the server, the
//! line or the caller fails.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use aquifer_remote::publish::SnapshotStore;
use aquifer_remote::{RemoteError, RemoteStore};

use crate::support::{Answer, PATH, Server, pattern, quick};

const KEY: &str = "dir/object.bin";
const MIB: usize = 1 << 20;
/// More than one part.
const LONG: usize = 20 * MIB + 12_345;

fn store(server: &Server) -> RemoteStore {
    server.s3().store("s3://bucket/dir/object.bin").unwrap()
}

fn write(store: &RemoteStore, key: &str, bytes: &[u8], replaces: bool) -> Result<(), RemoteError> {
    let mut upload = store.upload(key, bytes.len() as u64, replaces)?;
    // Pieces that fit neither parts nor each other.
    for piece in bytes.chunks(777_777) {
        upload.write(piece)?;
    }
    let written = upload.finish()?;
    assert_eq!(written.len_bytes, bytes.len() as u64);
    assert!(written.etag.is_some());
    Ok(())
}

/// Requests of a method whose head has a text.
fn asked(server: &Server, method: &str, part: &str) -> usize {
    let is_meant = |asked: &&_| {
        let asked: &aquifer_testkit::object_server::Asked = asked;
        asked.method == method && asked.head.contains(part)
    };
    server.asked().iter().filter(is_meant).count()
}

#[track_caller]
fn has_no_secret(error: &RemoteError) {
    let text = format!("{error} {error:?}");
    assert!(!text.contains("hunter2"), "{text}");
}

#[test]
fn an_object_is_read_in_order_by_many_requests() {
    let bytes = pattern(LONG, 1);
    let server = Server::new(bytes.clone());
    server.plan(|number| Answer::Late(Duration::from_millis(50 * (7 - number as u64 % 7))));
    let store = store(&server);
    let mut reader = store.read(store.key()).unwrap();
    assert_eq!(reader.len_bytes(), LONG as u64);
    assert_eq!(reader.etag(), Some("\"v1\""));
    let mut got = vec![];
    reader.read_to_end(&mut got).unwrap();
    assert!(got == bytes);
    assert_eq!(reader.position(), LONG as u64);
    assert!(server.most_at_once() >= 4, "{}", server.most_at_once());
    // Each byte once, and the first one to find the version.
    assert_eq!(server.counts(PATH, "GET").sent_bytes, LONG as u64 + 1);
    assert!(server.asked()[1..].iter().all(|asked| asked.head.contains("if-match: \"v1\"")));
    assert_eq!(store.stats().delivered_bytes, LONG as u64);

    for (range, expected) in [
        (100..200, &bytes[100..200]),
        (LONG as u64 - 5..u64::MAX, &bytes[LONG - 5..]),
        (7..7, &[]),
        (u64::MAX..u64::MAX, &[]),
        (3 * MIB as u64 - 1..9 * MIB as u64 + 1, &bytes[3 * MIB - 1..9 * MIB + 1]),
    ] {
        reader.set_range(range.clone());
        let mut got = vec![];
        reader.read_to_end(&mut got).unwrap();
        assert!(got == expected, "{range:?}");
    }
    // With its first bytes.
    for first_bytes in [0, 1, 4000, u64::MAX] {
        let mut reader = store.start_reading(KEY, first_bytes).unwrap().wait().unwrap();
        assert_eq!(reader.position(), 0);
        let mut got = vec![];
        reader.read_to_end(&mut got).unwrap();
        assert!(got == bytes, "{first_bytes}");
    }
}

#[test]
fn a_reader_stays_within_its_memory() {
    let server = Server::new(pattern(8, 1));
    server.put_generated("bucket/large", 256 << 20, 7);
    let store = store(&server);
    let mut reader = store.read("large").unwrap();
    // The window grows with each answer; then the reader pauses, and what is ahead of it arrives.
    let mut buffer = vec![0; MIB];
    for _ in 0..100 {
        reader.fill(&mut buffer).unwrap();
    }
    // What has been sent stands still.
    let (mut before, mut quiet) = (0, 0);
    while quiet < 20 {
        let sent = server.counts("bucket/large", "GET").sent_bytes;
        quiet = if sent == before { quiet + 1 } else { 0 };
        before = sent;
        std::thread::sleep(Duration::from_millis(10));
    }
    let ahead = before - reader.position();
    assert!(ahead <= 65 << 20, "{ahead} bytes ahead");
}

#[test]
fn a_changed_object_ends_the_reading() {
    for honours in [true, false] {
        let server = Server::new(vec![1; LONG]);
        if !honours {
            server.ignore_if_match();
        }
        let mut reader = store(&server).read(KEY).unwrap();
        let mut first = vec![0; 100];
        reader.fill(&mut first).unwrap();
        server.replace(vec![2; LONG], Some("\"v2\""));
        let mut got = vec![];
        let error = reader.read_to_end(&mut got).unwrap_err();
        let error = error.downcast::<RemoteError>().unwrap();
        assert!(matches!(error, RemoteError::Changed { .. }), "{error}");
        assert!(got.iter().all(|byte| *byte == 1));
        // Also a second time.
        assert!(matches!(reader.fill(&mut first), Err(RemoteError::Changed { .. })));
    }
}

#[test]
fn what_is_written_can_be_read() {
    let server = Server::new(vec![0; 10]);
    let store = store(&server);
    // Nothing, little, exactly one part, and several.
    for len in [0, 5, 8 * MIB, 8 * MIB + 1, 24 * MIB, LONG] {
        let bytes = pattern(len, len as u64);
        server.plan(|_| Answer::Proper);
        write(&store, "a/b c+%25/new", &bytes, true).unwrap();
        assert!(server.get("bucket/a/b c+%25/new").unwrap() == bytes, "{len}");
        let is_one = len <= 8 * MIB;
        assert_eq!(
            asked(&server, "PUT", "partNumber="),
            if is_one { 0 } else { len.div_ceil(8 * MIB) }
        );
        assert_eq!(asked(&server, "HEAD", ""), 1);
        let found = store.find("a/b c+%25/new").unwrap().unwrap();
        assert_eq!(found.len_bytes, len as u64);
    }
    assert!(server.most_at_once() <= 8 + 1);
    assert_eq!(store.find("no/such").unwrap(), None);
    assert_eq!(store.url_of("a/b c+%25/new"), "s3://bucket/a/b%20c+%2525/new");
    assert_eq!(
        store.key_of("s3://bucket/a/b%20c+%2525/").unwrap(),
        Some(("a/b c+%25".to_owned(), true))
    );
    assert_eq!(store.key_of("s3://other/a").unwrap(), None);
}

#[test]
fn parts_that_fail_are_sent_again() {
    let server = Server::new(vec![0; 10]);
    let store = store(&server);
    let bytes = pattern(LONG, 3);
    for lost in [Answer::Status(503), Answer::Reset, Answer::Lost] {
        server.plan_each({
            let (lost, once) = (lost.clone(), AtomicBool::new(false));
            move |_, asked| {
                let is_part = asked.head.contains("partNumber=2");
                if is_part && !once.swap(true, Ordering::SeqCst) {
                    lost.clone()
                } else {
                    Answer::Proper
                }
            }
        });
        write(&store, "new", &bytes, true).unwrap();
        assert!(server.get("bucket/new").unwrap() == bytes, "{lost:?}");
        assert_eq!(asked(&server, "PUT", "partNumber=2"), 2);
        server.remove("bucket/new");
    }
}

/// The last request is carried out, and its answer lost or late.
#[test]
fn an_object_whose_last_answer_is_lost_is_written() {
    let server = Server::new(vec![0; 10]);
    let last = |asked: &aquifer_testkit::object_server::Asked| match asked.method.as_str() {
        "PUT" => !asked.head.contains("partNumber="),
        "POST" => asked.head.contains("uploadId="),
        _ => false,
    };
    // An answer that is lost is asked for again, or not.
    for (retries, len, replaces) in
        [(2, 5, false), (0, 5, false), (2, LONG, false), (0, LONG, false), (2, LONG, true)]
    {
        let store = server.s3().retries(retries).store("s3://bucket/").unwrap();
        let bytes = pattern(len, len as u64);
        let once = AtomicBool::new(false);
        server.plan_each(move |_, asked| match last(asked) && !once.swap(true, Ordering::SeqCst) {
            true => Answer::Lost,
            false => Answer::Proper,
        });
        write(&store, "new", &bytes, replaces).unwrap();
        assert!(server.get("bucket/new").unwrap() == bytes);
        // The same bytes of another upload are no proof, also if the first answer is lost. It appears after the look-ups.
        if !replaces {
            let was_last = AtomicBool::new(false);
            server.plan_each(move |_, asked| match asked.method.as_str() {
                "HEAD" if !was_last.load(Ordering::SeqCst) => Answer::Status(404),
                _ if last(asked) && !was_last.swap(true, Ordering::SeqCst) => Answer::Lost,
                _ => Answer::Proper,
            });
            let error = write(&store, "new", &bytes, false).unwrap_err();
            let is_meant =
                matches!(error, RemoteError::Exists { .. } | RemoteError::Unavailable { .. });
            assert!(is_meant, "{error:?}");
        }
        server.remove("bucket/new");
    }
    let store = server.s3().timeout(Duration::from_secs(8)).store("s3://bucket/").unwrap();
    server.plan_each(move |_, asked| match asked.method == "POST" && last(asked) {
        true => Answer::Late(Duration::from_secs(9)),
        false => Answer::Proper,
    });
    write(&store, "new", &pattern(9 * MIB, 1), true).unwrap();
}

#[test]
fn a_failed_or_dropped_upload_leaves_nothing() {
    let server = Server::new(vec![0; 10]);
    let store = server.s3().retries(0).store("s3://bucket/").unwrap();
    let bytes = pattern(LONG, 3);
    // A part, and the request that completes them.
    for (failing, status) in
        [("partNumber=2", 500), ("partNumber=3", 403), ("POST /bucket/new?uploadId=", 500)]
    {
        server.plan_each(move |_, asked| match asked.head.contains(failing) {
            true => Answer::Status(status),
            false => Answer::Proper,
        });
        let error = write(&store, "new", &bytes, true).unwrap_err();
        has_no_secret(&error);
        let is_denied = matches!(error, RemoteError::Denied { status: 403, .. });
        let is_unavailable = matches!(error, RemoteError::Unavailable { status: Some(500), .. });
        assert!(if status == 403 { is_denied } else { is_unavailable }, "{error:?}");
        assert_eq!(asked(&server, "DELETE", "uploadId="), 1, "{failing}");
        assert_eq!(server.get("bucket/new"), None);
    }
    server.plan(|_| Answer::Proper);
    let mut upload = store.upload("new", LONG as u64, true).unwrap();
    upload.write(&bytes).unwrap();
    assert_eq!(asked(&server, "POST", "uploads"), 1);
    drop(upload);
    assert_eq!(asked(&server, "DELETE", "uploadId="), 1);
    // Of what fits into one request nothing has been sent.
    server.plan(|_| Answer::Proper);
    let mut upload = store.upload("short", 5, true).unwrap();
    upload.write(b"hello").unwrap();
    drop(upload);
    // A part of the other one may arrive only now.
    assert_eq!(asked(&server, "PUT", "/bucket/short"), 0);
    assert_eq!(server.paths(), [PATH]);
}

#[test]
fn an_object_that_is_not_to_be_replaced_stays() {
    let server = Server::new(b"old".to_vec());
    let store = store(&server);
    for len in [5, LONG] {
        let error = write(&store, KEY, &pattern(len, 1), false).unwrap_err();
        assert!(matches!(error, RemoteError::Exists { .. }), "{error:?}");
        // Another name is free.
        write(&store, "free", &pattern(len, 1), false).unwrap();
        server.remove("bucket/free");
    }
    // It appears after the look-ups: the condition of the last request finds it.
    server.plan_each(|_, asked| match asked.method.as_str() {
        "HEAD" => Answer::Status(404),
        _ => Answer::Proper,
    });
    let error = write(&store, KEY, &pattern(LONG, 1), false).unwrap_err();
    assert!(matches!(error, RemoteError::Exists { .. }), "{error:?}");
    assert_eq!(asked(&server, "DELETE", "uploadId="), 1);
    assert_eq!(server.get(PATH).unwrap(), b"old");
    // Nothing of a long one is sent if the name is taken beforehand.
    server.plan(|_| Answer::Proper);
    write(&store, KEY, &pattern(LONG, 1), false).unwrap_err();
    assert_eq!(asked(&server, "POST", ""), 0);
}

/// After the object has been written, and before it is looked at.
#[test]
fn what_the_server_has_is_compared() {
    let server = Server::new(vec![]);
    let store = store(&server);
    let (said, asked) = mpsc::channel();
    let (go, gone) = mpsc::channel();
    let (said, gone) = (std::sync::Mutex::new(said), std::sync::Mutex::new(gone));
    server.plan_each(move |_, asked| {
        if asked.method == "HEAD" {
            let _ = said.lock().unwrap().send(());
            let _ = gone.lock().unwrap().recv();
        }
        Answer::Proper
    });
    let failure = |instead: &[u8]| {
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| write(&store, "new", b"hello", true).unwrap_err());
            asked.recv().unwrap();
            server.put("bucket/new", instead.to_vec());
            go.send(()).unwrap();
            writing.join().unwrap()
        })
    };
    assert!(matches!(failure(b"hell"), RemoteError::BadAnswer { .. }));
    assert!(matches!(failure(b"HELLO"), RemoteError::Changed { .. }));
    drop(go);
    write(&store, "new", b"hello", true).unwrap();
    // Some may write and not read.
    server.plan_each(|_, asked| match asked.method.as_str() {
        "HEAD" => Answer::Status(403),
        _ => Answer::Proper,
    });
    write(&store, "new", b"hello", true).unwrap();
}

#[test]
fn an_endless_answer_to_a_listing_or_a_write_is_an_error() {
    let server = Server::new(pattern(1000, 1));
    let store = store(&server);
    server.plan(|_| Answer::Endless(200));
    let error = store.list("dir").unwrap_err();
    assert!(matches!(error, RemoteError::BadAnswer { .. }), "{error}");
    assert!(error.to_string().contains("longer than any answer"), "{error}");
    server.plan(|number| if number == 0 { Answer::Endless(403) } else { Answer::Proper });
    let error = write(&store, "new", &pattern(1000, 2), true).unwrap_err();
    assert!(matches!(error, RemoteError::Denied { .. }), "{error}");
    // The one that begins an upload in parts.
    server.plan(|_| Answer::Endless(200));
    let error = write(&store, "new", &pattern(LONG, 2), true).unwrap_err();
    assert!(matches!(error, RemoteError::BadAnswer { .. }), "{error}");
    let sent_bytes = server.counts("", "").sent_bytes;
    assert!(sent_bytes < 256 << 20, "{sent_bytes}");
}

/// The server ignores which page it is asked for.
#[test]
fn a_listing_that_begins_again_is_an_error() {
    const PAGE: &str = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>\
        <Contents><Key>dir/a</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>\
        <Contents><Key>dir/b</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>\
        </ListBucketResult>";
    // Of its proxy settings and credentials.
    let server = Server::new(vec![]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    // It ends with the test.
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = BufReader::new(connection.unwrap());
            let mut line = String::new();
            while connection.read_line(&mut line).is_ok_and(|len| len > 2) {
                line.clear();
            }
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close", PAGE.len());
            let _ = write!(connection.get_mut(), "{head}\r\n\r\n{PAGE}");
        }
    });
    let options = server.s3().endpoint(&endpoint);
    let error = options.clone().store("s3://bucket").unwrap().list("dir").unwrap_err();
    assert!(matches!(error, RemoteError::BadAnswer { .. }), "{error}");
    assert!(error.to_string().contains("begins again"), "{error}");
    let store = SnapshotStore::open_with("s3://bucket/dir", &options).unwrap();
    let error = store.snapshots().unwrap_err();
    assert!(error.to_string().contains("begins again"), "{error}");
}

#[test]
fn listings_have_pages_and_end_at_their_prefix() {
    let server = Server::new(vec![1]);
    let store = store(&server);
    for number in 0..1200 {
        server.put(&format!("bucket/many/{number:04}"), vec![0; number % 7]);
    }
    for other in ["many", "many-more/x", "many/", "many/x y/%/ü", "manyfold"] {
        server.put(&format!("bucket/{other}"), vec![1]);
    }
    let found = store.list("many").unwrap();
    let keys: Vec<&str> = found.iter().map(|object| &*object.key).collect();
    let mut expected: Vec<String> = (0..1200).map(|number| format!("many/{number:04}")).collect();
    expected.push("many/x y/%/ü".to_owned());
    assert_eq!(keys, expected);
    assert_eq!(found[8].len_bytes, 1);
    assert!(asked(&server, "GET", "list-type=2") >= 2);
    assert_eq!(store.list("").unwrap().len(), 1200 + 1 + 5);
    assert_eq!(store.list("nothing/here").unwrap(), []);
    let hidden = quick().store(&server.url()).unwrap().list("").unwrap_err();
    assert!(matches!(hidden, RemoteError::InvalidUrl { .. }));
    has_no_secret(&hidden);
    server.put("bucket/odd//x", vec![]);
    assert!(matches!(store.list("odd"), Err(RemoteError::BadAnswer { .. })));
    assert!(matches!(store.read("odd//x"), Err(RemoteError::InvalidUrl { .. })));
}

#[test]
fn refusals_are_typed_and_without_secrets() {
    let server = Server::new(vec![1; 100]);
    let store = server.s3().retries(0).store("s3://bucket/dir/").unwrap();
    let failures = || {
        let errors = [
            write(&store, "new", b"x", true).unwrap_err(),
            store.list("dir").unwrap_err(),
            store.read(KEY).unwrap_err(),
        ];
        errors.iter().for_each(has_no_secret);
        errors.map(|error| {
            assert!(error.to_string().starts_with("s3://bucket/"), "{error}");
            assert!(!error.to_string().contains("bytes 0 to 0"), "{error}");
            format!("{error:?}").split(' ').next().unwrap().to_owned()
        })
    };
    for (answer, expected) in [
        (Answer::Status(404), ["NoBucket", "NoBucket", "NotFound"]),
        (Answer::Status(403), ["Denied"; 3]),
        (Answer::Status(500), ["Unavailable"; 3]),
        (Answer::Reset, ["Unavailable"; 3]),
    ] {
        server.plan(move |_| answer.clone());
        assert_eq!(failures(), expected);
    }
    let nowhere = |timeout| {
        let options = server.s3().retries(0).timeout(timeout).endpoint("http://127.0.0.1:1");
        options.store("s3://bucket/").unwrap()
    };
    let error = write(&nowhere(Duration::from_secs(60)), "x", b"x", true).unwrap_err();
    assert!(matches!(error, RemoteError::Unavailable { status: None, .. }), "{error:?}");
    assert!(error.to_string().contains("no connection"), "{error}");
    server.plan(|_| Answer::Silence);
    let slow = server.s3().timeout(Duration::from_millis(200)).store("s3://bucket/").unwrap();
    assert!(matches!(write(&slow, "x", b"x", true), Err(RemoteError::TimedOut { .. })));
    assert!(matches!(slow.list(""), Err(RemoteError::TimedOut { .. })));
    let web = quick().store(&server.url()).unwrap();
    let error = web.upload("", 0, true).unwrap_err();
    assert!(matches!(error, RemoteError::InvalidUrl { .. }));
    has_no_secret(&error);
    assert!(!format!("{web:?} {store:?}").contains("hunter2"));
}

#[test]
fn a_caller_that_cancels_does_not_wait() {
    let server = Server::new(vec![1; LONG]);
    let cancel = Arc::new(AtomicBool::new(false));
    let asks = cancel.clone();
    let options = server.s3().cancelled_by(move || asks.load(Ordering::SeqCst));
    let store = options.timeout(Duration::from_secs(3600)).store("s3://bucket/").unwrap();
    let mut upload = store.upload("new", LONG as u64, true).unwrap();
    upload.write(&pattern(10 * MIB, 1)).unwrap();
    server.plan_each(|_, asked| match asked.method.as_str() {
        "DELETE" => Answer::Proper,
        _ => Answer::Silence,
    });
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| upload.write(&pattern(100 * MIB, 1)).unwrap_err());
        let reading = scope.spawn(|| store.read(KEY).unwrap_err());
        let listing = scope.spawn(|| store.list("").unwrap_err());
        while server.asked().len() < 3 {
            std::thread::yield_now();
        }
        // The system gives up none of these connections before the timeout, though the server reads nothing.
        let limits = user_timeouts(&server);
        cancel.store(true, Ordering::SeqCst);
        assert!(limits.len() >= 3 && limits.iter().all(|limit| *limit == 0), "{limits:?}");
        for error in [writing, reading, listing].map(|thread| thread.join().unwrap()) {
            assert!(matches!(error, RemoteError::Cancelled { .. }), "{error:?}");
        }
    });
    // The parts are removed nevertheless.
    drop(upload);
    assert_eq!(asked(&server, "DELETE", "uploadId="), 1);
    assert_eq!(server.get("bucket/new"), None);
}

/// How long, in milliseconds, the system lets data of each connection to the server wait; 0 is its usual time.
fn user_timeouts(server: &Server) -> Vec<u32> {
    let port: u16 = server.endpoint().rsplit(':').next().unwrap().parse().unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_to_server = |file: &BorrowedFd<'_>| {
        let peer = rustix::net::getpeername(file).ok().flatten();
        peer.and_then(|peer| SocketAddr::try_from(peer).ok())
            .is_some_and(|peer| peer.port() == port)
    };
    numbers
        // SAFETY: not -1. If it is closed meanwhile, the calls fail, or are about another file and change nothing.
        .map(|number: i32| unsafe { BorrowedFd::borrow_raw(number) })
        .filter(is_to_server)
        .filter_map(|file| rustix::net::sockopt::tcp_user_timeout(file).ok())
        .collect()
}

/// Whether the object is there is worth the time of a request, and not of a completion.
#[test]
fn a_caller_that_cancels_a_completion_waits_for_a_timeout() {
    let server = Server::new(vec![0; 10]);
    let (cancel, said) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (asks, says) = (cancel.clone(), said.clone());
    let options = server.s3().cancelled_by(move || asks.load(Ordering::SeqCst));
    let store = options.timeout(Duration::from_secs(10)).store("s3://bucket/").unwrap();
    let mut upload = store.upload("new", 9 * MIB as u64, true).unwrap();
    upload.write(&pattern(9 * MIB, 1)).unwrap();
    server.plan_each(move |_, asked| match asked.method.as_str() {
        "POST" => {
            says.store(true, Ordering::SeqCst);
            Answer::Silence
        }
        _ => Answer::Proper,
    });
    std::thread::scope(|scope| {
        let finishing = scope.spawn(|| upload.finish().unwrap_err());
        while !said.load(Ordering::SeqCst) && !finishing.is_finished() {
            std::thread::yield_now();
        }
        cancel.store(true, Ordering::SeqCst);
        let error = finishing.join().unwrap();
        assert!(matches!(error, RemoteError::Cancelled { .. }), "{error:?}");
    });
}

/// By a question that is asked while they wait.
#[test]
fn opening_and_warming_a_device_can_be_cancelled() {
    let directory = tempfile::tempdir().unwrap();
    let tier = aquifer_remote::Tier::open(directory.path().join("tier")).unwrap();
    let server = Server::new(pattern(3 * MIB, 1));
    let cancel = Arc::new(AtomicBool::new(false));
    let asks = cancel.clone();
    let options = server.s3().tier(&tier).timeout(Duration::from_secs(3600));
    let options = options.cancelled_by(move || asks.load(Ordering::SeqCst));
    let device = options.clone().open(&format!("s3://{PATH}")).unwrap();
    let cancels = cancel.clone();
    server.plan(move |_| {
        cancels.store(true, Ordering::SeqCst);
        Answer::Silence
    });
    let error = device.warm(0..u64::MAX, |_, _| {}).unwrap_err();
    assert!(matches!(*error, RemoteError::Cancelled { .. }), "{error:?}");
    cancel.store(false, Ordering::SeqCst);
    let error = options.open(&format!("s3://{PATH}")).unwrap_err();
    assert!(matches!(error, RemoteError::Cancelled { .. }), "{error:?}");
}

#[test]
fn files_are_objects_too() {
    let directory = tempfile::tempdir().unwrap();
    let url = |name: &str| format!("file://{}/{name}", directory.path().display());
    let store = quick().store(&url("")).unwrap();
    let key = |name: &str| format!("{}/{name}", store.key());
    for len in [0, 5, LONG] {
        let bytes = pattern(len, 1);
        write(&store, &key("a/b"), &bytes, true).unwrap();
        assert!(std::fs::read(directory.path().join("a/b")).unwrap() == bytes);
        let mut got = vec![];
        store.read(&key("a/b")).unwrap().read_to_end(&mut got).unwrap();
        assert!(got == bytes);
        let error = write(&store, &key("a/b"), &bytes, false).unwrap_err();
        assert!(matches!(error, RemoteError::Exists { .. }), "{error:?}");
    }
    let found = store.list(store.key()).unwrap();
    assert_eq!(found.iter().map(|object| &*object.key).collect::<Vec<_>>(), [key("a/b")]);
    assert_eq!(store.list(&key("nothing")).unwrap(), []);
    // An upload that is given up.
    let mut upload = store.upload(&key("c"), LONG as u64, true).unwrap();
    upload.write(&pattern(LONG, 1)).unwrap();
    drop(upload);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}
