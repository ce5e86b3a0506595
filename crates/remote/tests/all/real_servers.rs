//! Servers that others wrote; `.ci/object-servers` starts them and runs these tests.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aquifer_cache::{Cache, PageId};
use aquifer_device::Device;
use aquifer_remote::{RemoteDevice, RemoteError, RemoteOptions};
use aquifer_testkit::object_server::Server as Proxy;
use aquifer_testkit::rng::Rng;
use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStoreExt};

use crate::support::{Answer, Server, pattern, quick, remote};

const LEN: usize = 3_000_001;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run .ci/object-servers"))
}

/// A server's address, for a proxy in front of it.
fn address(url: &str) -> String {
    url.trim_start_matches("http://").to_owned()
}

/// All of an object by the device, random pages of it by a cache.
fn check(device: RemoteDevice, bytes: &[u8]) {
    let device = Arc::new(device);
    assert_eq!(device.len_bytes().unwrap(), bytes.len() as u64);
    let mut all = vec![0; bytes.len()];
    assert_eq!(device.read_at(0, &mut all).unwrap(), bytes.len());
    assert!(all == bytes);
    let mut rng = Rng::new(1);
    for _ in 0..50 {
        let start = rng.below(bytes.len() as u64) as usize;
        let len = (1 + rng.below(50_000) as usize).min(bytes.len() - start);
        device.read_at(start as u64, &mut all[..len]).unwrap();
        assert!(all[..len] == bytes[start..start + len], "{start} {len}");
    }
    let pages = Cache::builder().budget_bytes(8 << 20).build().unwrap().pages(device).unwrap();
    let wanted: std::collections::BTreeSet<_> =
        (0..100).map(|_| PageId(rng.below(bytes.len() as u64) / 4096)).collect();
    let mut visits = 0;
    let visit = |page: PageId, got: &[u8]| {
        let expected = &bytes[page.0 as usize * 4096..];
        let len = expected.len().min(4096);
        assert!(got[..len] == expected[..len], "{page:?}");
        visits += 1;
        ControlFlow::Continue(())
    };
    pages.visit_many(wanted.iter().copied(), visit).unwrap();
    assert_eq!(visits, wanted.len());
}

/// The same through a proxy that makes the server misbehave.
fn check_through(proxy: &Proxy, open: impl Fn() -> RemoteDevice, bytes: &[u8]) {
    check(open(), bytes);
    proxy.plan(|number| match number % 7 {
        2 => Answer::Status(503),
        4 => Answer::Cut,
        6 => Answer::Reset,
        _ => Answer::Proper,
    });
    check(open(), bytes);
    proxy.plan(|_| Answer::Proper);
    let device = open();
    proxy.plan(|_| Answer::Etag(Some("\"other\"")));
    is_changed(&device);
}

fn is_changed(device: &RemoteDevice) {
    let error = device.read_at(5000, &mut [0; 1000]).unwrap_err();
    assert!(matches!(remote(&error), RemoteError::Changed { .. }), "{error}");
}

fn is_missing(opened: Result<RemoteDevice, RemoteError>) {
    assert!(matches!(opened, Err(RemoteError::NotFound { .. })), "{opened:?}");
}

fn is_denied(opened: Result<RemoteDevice, RemoteError>) {
    assert!(matches!(opened, Err(RemoteError::Denied { .. })), "{opened:?}");
}

fn options(endpoint: &str) -> RemoteOptions {
    quick().retries(10).endpoint(endpoint).allow_http(true).region("us-east-1")
}

#[test]
#[ignore = "needs a server: .ci/object-servers"]
fn an_object_store() {
    // For the variable of proxies.
    drop(Server::new(vec![0]).open());
    let endpoint = variable("AQUIFER_SERVER_URL");
    let store = AmazonS3Builder::from_env()
        .with_endpoint(&endpoint)
        .with_allow_http(true)
        .with_region("us-east-1")
        .with_bucket_name("bucket")
        .build()
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let put = |key: &str, bytes: &[u8]| {
        runtime.block_on(store.put(&Path::from(key), bytes.to_vec().into())).unwrap();
    };
    let bytes = pattern(LEN, 1);
    put("dir/a key", &bytes);
    let open = || options(&endpoint).open("s3://bucket/dir/a%20key");
    check(open().unwrap(), &bytes);
    is_missing(options(&endpoint).open("s3://bucket/dir/none"));
    is_missing(options(&endpoint).open("s3://no-such-bucket/key"));
    if !variable("AQUIFER_SERVER_CHECKS_SIGNATURES").is_empty() {
        let wrong = options(&endpoint).config("aws_secret_access_key", "wrong");
        is_denied(wrong.open("s3://bucket/dir/a%20key"));
        is_denied(options(&endpoint).anonymous(true).open("s3://bucket/dir/a%20key"));
    }

    let parts = runtime.block_on(async {
        let mut upload = store.put_multipart(&Path::from("parts")).await.unwrap();
        for part in 0..3 {
            upload.put_part(pattern(5 << 20, part).into()).await.unwrap();
        }
        upload.complete().await.unwrap();
        [0, 1, 2].map(|part| pattern(5 << 20, part)).concat()
    });
    check(options(&endpoint).open("s3://bucket/parts").unwrap(), &parts);

    // Signatures hold through the proxy.
    let proxy = Proxy::before(address(&endpoint));
    check_through(
        &proxy,
        || options(&proxy.endpoint()).open("s3://bucket/dir/a%20key").unwrap(),
        &bytes,
    );

    let device = open().unwrap();
    put("dir/a key", &pattern(LEN, 2));
    is_changed(&device);
    let device = open().unwrap();
    runtime.block_on(store.delete(&Path::from("dir/a key"))).unwrap();
    let error = device.read_at(0, &mut [0; 10]).unwrap_err();
    assert!(matches!(remote(&error), RemoteError::NotFound { .. }), "{error}");
}

#[test]
#[ignore = "needs a server: .ci/object-servers"]
fn files_of_a_web_server() {
    drop(Server::new(vec![0]).open());
    let url = variable("AQUIFER_SERVER_URL");
    let directory = PathBuf::from(variable("AQUIFER_SERVER_DIRECTORY"));
    let bytes = pattern(LEN, 1);
    std::fs::write(directory.join("a file"), &bytes).unwrap();
    std::fs::write(directory.join("denied/file"), &bytes).unwrap();
    std::fs::write(directory.join("empty"), "").unwrap();
    let open = |url: &str, name: &str| {
        quick().retries(10).open(&format!("{url}/{name}?X-Signature=hunter2"))
    };
    check(open(&url, "a%20file").unwrap(), &bytes);
    assert_eq!(open(&url, "empty").unwrap().len_bytes().unwrap(), 0);
    is_missing(open(&url, "none"));
    is_denied(open(&url, "denied/file"));
    let proxy = Proxy::before(address(&url));
    check_through(&proxy, || open(&proxy.endpoint(), "a%20file").unwrap(), &bytes);

    // Its ETag is of seconds and length.
    let device = open(&url, "a%20file").unwrap();
    let file = std::fs::File::options().write(true).open(directory.join("a file")).unwrap();
    file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1_000_000)).unwrap();
    is_changed(&device);
    let device = open(&url, "a%20file").unwrap();
    file.set_len(LEN as u64 - 1).unwrap();
    is_changed(&device);
}
