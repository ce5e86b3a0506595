//! Credentials of a function: asked for when they are needed, kept, and secret.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use aquifer_device::Device;
use aquifer_remote::{Credentials, RemoteDevice, RemoteError, RemoteOptions};

use crate::support::{Answer, Server, pattern, quick, remote};

const S3: &str = "s3://bucket/dir/object.bin";
const LEN: usize = 10_000;
/// What a provider does.
const WORKS: usize = 0;
const FAILS: usize = 1;
const PANICS: usize = 2;

fn at(server: &Server) -> RemoteOptions {
    quick().endpoint(server.endpoint()).allow_http(true)
}

/// A value of the `authorization` header of each request.
fn authorizations(server: &Server) -> Vec<String> {
    let value = |head: &str| {
        let line = head.lines().find_map(|line| line.strip_prefix("authorization: "));
        line.expect("signed").to_owned()
    };
    server.asked().iter().map(|asked| value(&asked.head)).collect()
}

/// A key with a number that grows with each call, and the number of calls.
fn numbered(
    life: Option<Duration>,
) -> (Arc<AtomicUsize>, impl Fn() -> Result<Credentials, Box<dyn std::error::Error + Send + Sync>>)
{
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let supply = move || {
        let number = counted.fetch_add(1, Ordering::SeqCst);
        let credentials = Credentials::session_key(format!("KEY{number}"), "hunter2", "token");
        Ok(match life {
            Some(life) => credentials.expires(SystemTime::now() + life),
            None => credentials,
        })
    };
    (calls, supply)
}

fn read(device: &RemoteDevice) {
    let mut buffer = [0; 1000];
    device.read_at(5000, &mut buffer).unwrap();
    assert_eq!(buffer[..], pattern(LEN, 1)[5000..6000]);
}

#[test]
fn credentials_are_asked_for_once_while_they_live() {
    let server = Server::new(pattern(LEN, 1));
    for life in [None, Some(Duration::from_secs(3600))] {
        server.plan(|_| Answer::Proper);
        let (calls, supply) = numbered(life);
        let device = at(&server).credentials(supply).open(S3).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| read(&device));
            }
        });
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        for authorization in authorizations(&server) {
            assert!(authorization.contains("Credential=KEY0/"), "{authorization}");
        }
        let asked = server.asked();
        assert!(asked.iter().all(|asked| asked.head.contains("x-amz-security-token: token")));
    }
}

#[test]
fn expired_credentials_are_replaced() {
    let server = Server::new(pattern(LEN, 1));
    let (calls, supply) = numbered(Some(Duration::ZERO));
    let device = at(&server).credentials(supply).open(S3).unwrap();
    read(&device);
    read(&device);
    assert_eq!(calls.load(Ordering::SeqCst), 3);
    for (number, authorization) in authorizations(&server).iter().enumerate() {
        assert!(authorization.contains(&format!("Credential=KEY{number}/")), "{authorization}");
    }
}

#[test]
fn bearer_tokens_are_for_the_other_stores() {
    let server = Server::new(pattern(LEN, 1));
    let token = || Ok(Credentials::bearer("a-token"));
    let account = at(&server).config("azure_storage_account_name", "account");
    for (url, options) in
        [("gs://bucket/dir/object.bin", at(&server)), ("az://bucket/dir/object.bin", account)]
    {
        server.plan(|_| Answer::Proper);
        read(&options.clone().credentials(token).open(url).unwrap());
        for authorization in authorizations(&server) {
            assert_eq!(authorization, "Bearer a-token");
        }
        let key = options.credentials(|| Ok(Credentials::key("KEY", "hunter2"))).open(url);
        assert!(matches!(key, Err(RemoteError::NoCredentials { .. })), "{key:?}");
    }
    let bearer = at(&server).credentials(token).open(S3);
    assert!(matches!(bearer, Err(RemoteError::NoCredentials { .. })), "{bearer:?}");
}

#[test]
fn a_provider_that_fails_is_a_typed_error_without_its_words() {
    let server = Server::new(pattern(LEN, 1));
    let way = Arc::new(AtomicUsize::new(WORKS));
    let told = way.clone();
    let supply = move || match told.load(Ordering::SeqCst) {
        WORKS => Ok(Credentials::key("KEY", "hunter2").expires(SystemTime::now())),
        FAILS => Err("hunter2".into()),
        _ => std::panic::panic_any("hunter2"),
    };
    let options = at(&server).credentials(supply);
    assert!(format!("{options:?}").contains("has_credentials: true"));
    let device = options.clone().open(S3).unwrap();
    read(&device);
    for (kind, reason) in [(FAILS, "failed"), (PANICS, "panicked")] {
        way.store(kind, Ordering::SeqCst);
        server.plan(|_| Answer::Proper);
        let error = device.read_at(5000, &mut [0; 1000]).unwrap_err();
        let text = format!("{error} {error:?} {device:?} {options:?}");
        assert!(!text.contains("hunter2") && text.contains(reason), "{text}");
        assert!(matches!(remote(&error), RemoteError::NoCredentials { .. }), "{error}");
        // No request without credentials.
        assert!(server.asked().is_empty());
        let error = options.clone().open(S3).unwrap_err();
        assert!(matches!(error, RemoteError::NoCredentials { .. }), "{error}");
    }
    way.store(WORKS, Ordering::SeqCst);
    read(&device);
    let shown = format!("{:?}", Credentials::key("KEY", "hunter2"));
    assert!(!shown.contains("hunter2") && !shown.contains("KEY"), "{shown}");
}

#[test]
fn stores_without_credentials_take_none() {
    let server = Server::new(pattern(LEN, 1));
    let with = |options: RemoteOptions| options.credentials(|| Ok(Credentials::bearer("hunter2")));
    for (options, url) in [
        (quick(), server.url()),
        (quick(), "file:///no/file".into()),
        (at(&server).anonymous(true), S3.into()),
    ] {
        let error = with(options).open(&url).unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(matches!(error, RemoteError::InvalidOption { .. }), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
}
