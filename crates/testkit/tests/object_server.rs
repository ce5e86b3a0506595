//! The server, as a client library sees it; and the program.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aquifer_testkit::child::Reaped;
use aquifer_testkit::object_server::{Answer, Fault, Server, generate, pattern};
use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutPayload,
    RetryConfig,
};

fn store(server: &Server) -> AmazonS3 {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig { max_retries: 3, ..RetryConfig::default() };
    AmazonS3Builder::new()
        .with_endpoint(server.endpoint())
        .with_allow_http(true)
        .with_bucket_name("bucket")
        .with_access_key_id("AKID")
        .with_secret_access_key("hunter2")
        .with_retry(retry)
        // Of the environment's proxies.
        .with_config("proxy_excludes".parse().unwrap(), "127.0.0.1")
        .build()
        .unwrap()
}

fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

async fn names(store: &AmazonS3, prefix: &str) -> Vec<String> {
    let prefix = Path::from(prefix);
    let all: Vec<_> = store.list(Some(&prefix)).try_collect().await.unwrap();
    all.into_iter().map(|meta| meta.location.to_string()).collect()
}

/// Everything that `object_store` does with S3.
async fn check_store(store: &AmazonS3) {
    let path = Path::from("dir/a & b");
    let bytes = pattern(100_000, 1);
    let put = store.put(&path, bytes.clone().into()).await.unwrap();
    let meta = store.head(&path).await.unwrap();
    assert_eq!((meta.size, &meta.e_tag), (100_000, &put.e_tag));
    assert!(store.get(&path).await.unwrap().bytes().await.unwrap()[..] == bytes);
    assert!(store.get_range(&path, 5..50_000).await.unwrap()[..] == bytes[5..50_000]);
    let again = store.put_opts(&path, PutPayload::from_static(b"x"), PutMode::Create.into()).await;
    assert!(
        matches!(again, Err(Error::AlreadyExists { .. } | Error::Precondition { .. })),
        "{again:?}"
    );
    let other = GetOptions { if_match: Some("\"other\"".into()), ..GetOptions::default() };
    let other = store.get_opts(&path, other).await;
    assert!(matches!(other, Err(Error::Precondition { .. })));
    let update = PutMode::Update(put.into());
    let updated = store.put_opts(&path, PutPayload::from_static(b"y"), update.clone().into()).await;
    updated.unwrap();
    let late = store.put_opts(&path, PutPayload::from_static(b"z"), update.into()).await;
    assert!(matches!(late, Err(Error::Precondition { .. })), "{late:?}");
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), "y");

    let large = Path::from("dir/large");
    let mut upload = store.put_multipart(&large).await.unwrap();
    for part in 0..3 {
        upload.put_part(pattern(5 << 20, part).into()).await.unwrap();
    }
    upload.complete().await.unwrap();
    let got = store.get(&large).await.unwrap().bytes().await.unwrap();
    assert!(got[..] == [0, 1, 2].map(|part| pattern(5 << 20, part)).concat());
    let mut upload = store.put_multipart(&Path::from("dir/given up")).await.unwrap();
    upload.put_part(PutPayload::from_static(b"x")).await.unwrap();
    upload.abort().await.unwrap();

    store.copy(&large, &Path::from("dir/sub/copy")).await.unwrap();
    assert_eq!(store.head(&Path::from("dir/sub/copy")).await.unwrap().size, 15 << 20);
    assert_eq!(names(store, "dir").await, ["dir/a & b", "dir/large", "dir/sub/copy"]);
    let listed = store.list_with_delimiter(Some(&Path::from("dir"))).await.unwrap();
    assert_eq!(
        (listed.objects.len(), &listed.common_prefixes[..]),
        (2, &[Path::from("dir/sub")][..])
    );
    store.delete(&large).await.unwrap();
    let gone = store.get(&large).await;
    assert!(matches!(gone, Err(Error::NotFound { .. })));
    store.delete(&path).await.unwrap();
    store.delete(&Path::from("dir/sub/copy")).await.unwrap();
    assert!(names(store, "dir").await.is_empty());
}

#[test]
fn a_client_library_reads_writes_and_lists() {
    let server = Server::empty();
    wait(check_store(&store(&server)));
    assert!(server.paths().is_empty());
    let (got, large) =
        (server.counts("bucket/dir/large", "GET"), server.counts("bucket/dir/large", ""));
    // And an error's text.
    assert!((15 << 20..(15 << 20) + 1000).contains(&got.sent_bytes), "{got:?}");
    assert!(large.received_bytes >= 15 << 20, "{large:?}");
    assert!(
        server.counters_json().contains("\"bucket/dir/large\":{\"GET\":{"),
        "{}",
        server.counters_json()
    );
    server.reset_counts();
    assert_eq!(server.counts("", "").requests, 0);
}

#[test]
fn a_proxy_changes_nothing_unless_told() {
    let server = Server::empty();
    let proxy = Server::before(server.address().to_string());
    wait(async {
        let store = store(&proxy);
        check_store(&store).await;
        server.put("bucket/key", pattern(100_000, 3));
        let key = Path::from("key");
        // A body that breaks off is continued.
        for first in [Answer::Status(503), Answer::Reset, Answer::Lost, Answer::Cut] {
            proxy.plan(move |number| if number == 0 { first.clone() } else { Answer::Proper });
            let got = store.get(&key).await.unwrap().bytes().await;
            assert!(got.unwrap()[..] == pattern(100_000, 3));
            assert_eq!(proxy.asked().len(), 2);
        }
        proxy.plan(|_| Answer::Etag(Some("\"other\"")));
        let meta = store.head(&key).await.unwrap();
        assert_eq!(meta.e_tag.as_deref(), Some("\"other\""));
        proxy.plan_each(|_, asked| match asked.method.as_str() {
            "PUT" => Answer::Status(403),
            _ => Answer::Proper,
        });
        let put = store.put(&key, PutPayload::from_static(b"x")).await;
        assert!(matches!(put, Err(Error::PermissionDenied { .. })));
        assert!(store.head(&key).await.is_ok());
    });
    assert!(server.get("bucket/key").unwrap() == pattern(100_000, 3));
    assert_eq!(proxy.counts("bucket/key", "PUT").requests, 1);
}

#[test]
fn long_listings_are_continued() {
    let server = Server::empty();
    for number in 0..2500 {
        server.put(&format!("bucket/many/{number:04}/x"), "x");
        server.put(&format!("bucket/many/{number:04}/y"), "y");
    }
    wait(async {
        let store = store(&server);
        let names = names(&store, "many").await;
        assert_eq!(names.len(), 5000);
        assert!(names.is_sorted() && names[4999] == "many/2499/y");
        let listed = store.list_with_delimiter(Some(&Path::from("many"))).await.unwrap();
        assert_eq!((listed.objects.len(), listed.common_prefixes.len()), (0, 2500));
    });
    assert_eq!(server.counts("bucket", "GET").requests, 5 + 3);
}

#[test]
fn requests_wait_and_bytes_take_their_time() {
    let server = Server::empty();
    server.put_generated("bucket/key", 1 << 20, 7);
    server.latency(Duration::from_millis(50));
    server.bytes_per_second(10 << 20);
    wait(async {
        let store = store(&server);
        let began = Instant::now();
        let got = store.get(&Path::from("key")).await.unwrap().bytes().await.unwrap();
        let took = began.elapsed();
        let mut expected = vec![0; 1 << 20];
        generate(7, 0, &mut expected);
        assert!(got[..] == expected);
        // Less a burst.
        assert!(took >= Duration::from_millis(149), "{took:?}");
    });
}

#[test]
fn faults_are_parsed() {
    let fault = Fault::parse("retry-after:429:7/20").unwrap();
    assert!(
        matches!((&fault.answer, fault.every), (Answer::RetryAfter(429, after), 20) if after == "7")
    );
    let fault = Fault::parse("cut").unwrap();
    assert!(matches!((fault.answer, fault.every), (Answer::Cut, 1)));
    for bad in ["cut/0", "cut/x", "unknown/2", "short:x", ""] {
        assert!(Fault::parse(bad).is_err(), "{bad}");
    }
}

/// A request on a connection of its own; the answer with its head.
fn ask(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let (line, body) = request.split_once('|').unwrap_or((request, ""));
    let len = body.len();
    write!(
        stream,
        "{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn the_program_ends_with_its_input() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("bucket")).unwrap();
    std::fs::write(directory.path().join("bucket/file"), "content of a file").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_object-server"));
    command.args([
        "--object",
        "bucket/key=1000",
        "--fault",
        "status:404/2",
        "--seconds",
        "300",
        "--dir",
    ]);
    let child = command.arg(directory.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = Reaped(child.unwrap());
    let mut output = BufReader::new(child.0.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("http://").unwrap();
    assert!(ask(address, "GET /bucket/file").ends_with("content of a file"));
    assert!(ask(address, "GET /bucket/file").starts_with("HTTP/1.1 404"));
    assert!(ask(address, "POST /-/faults|no such fault").starts_with("HTTP/1.1 400"));
    assert!(ask(address, "POST /-/faults|status:418").starts_with("HTTP/1.1 200"));
    assert!(ask(address, "GET /bucket/key").starts_with("HTTP/1.1 418"));
    assert!(ask(address, "GET /-/counters").contains("\"bucket/file\":{\"GET\":{"));
    drop(child.0.stdin.take());
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"requests\":3"), "{rest}");
    assert!(child.0.wait().unwrap().success());
}
