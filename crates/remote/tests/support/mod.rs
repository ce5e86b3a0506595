//! A server on the loopback interface, and devices of its object.

#![allow(dead_code, unused_imports, reason = "each test file uses its part")]

use std::ops::Deref;
use std::sync::Once;
use std::time::Duration;

use aquifer_remote::{RemoteDevice, RemoteError, RemoteOptions};

pub use aquifer_testkit::object_server::{Answer, PATH, pattern};

/// The date of a version.
pub const NEW: &str = "Wed, 21 Oct 2015 07:28:01 GMT";

/// The server of the testkit, with one object.
pub struct Server(aquifer_testkit::object_server::Server);

impl Server {
    pub fn new(bytes: Vec<u8>) -> Server {
        // Proxies of the environment do not reach this server.
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: the standard library's readers take a lock; C code reads the environment in requests only, which
            // begin after this.
            unsafe { std::env::set_var("NO_PROXY", "127.0.0.1") };
        });
        let server = aquifer_testkit::object_server::Server::new(bytes.clone());
        server.replace(bytes, Some("\"v1\""));
        Server(server)
    }

    /// Options that make `s3://…` end here.
    pub fn s3(&self) -> RemoteOptions {
        quick()
            .endpoint(self.endpoint())
            .allow_http(true)
            .region("nowhere-1")
            .config("aws_access_key_id", "AKID")
            .config("aws_secret_access_key", "hunter2")
    }

    pub fn open(&self) -> RemoteDevice {
        quick().open(&self.url()).unwrap()
    }
}

impl Deref for Server {
    type Target = aquifer_testkit::object_server::Server;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// Few retries, and a timeout that no working request reaches.
pub fn quick() -> RemoteOptions {
    RemoteDevice::options().retries(2).timeout(Duration::from_secs(60))
}

/// The remote device's error in another one.
pub fn remote<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a RemoteError {
    RemoteError::find(error).unwrap_or_else(|| panic!("no remote error: {error:?}"))
}
