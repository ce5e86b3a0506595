//! How an object is opened.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use crate::buffers::{SMALLEST_BUFFER_BYTES, SMALLEST_REQUEST_BYTES};
use crate::credentials::{Credentials, Provider};
use crate::tier::Tier;

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(1);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(86_400);
const DEFAULT_RETRIES: usize = 10;
const DEFAULT_IN_FLIGHT: usize = 256;
const LARGEST_REQUEST_BYTES: usize = 8 << 20;
const DEFAULT_BUFFER_BYTES: usize = 64 << 20;
/// The list price of S3 for reads from its standard class; traffic inside a region is free.
const DEFAULT_PRICE_PER_MILLION: f64 = 0.4;

/// Whether the caller wants to stop.
pub(crate) type Cancel = Arc<dyn Fn() -> bool + Send + Sync>;

/// How to open an object or a store; from [`RemoteDevice::options`](crate::RemoteDevice::options).
///
/// Credentials come from the environment (`AWS_…`, `GOOGLE_…`, `AZURE_…`), from a web identity, or from the instance,
/// in the way of the crate `object_store`, or from a function of the caller. The crate's variable names are also the keys of [`RemoteOptions::config`].
///
/// ```no_run
/// use std::time::Duration;
///
/// let device = aquifer_remote::RemoteDevice::options()
///     .endpoint("http://127.0.0.1:9000")
///     .allow_http(true)
///     .region("eu-central-1")
///     .timeout(Duration::from_secs(5))
///     .open("s3://bucket/rows.bin")?;
/// # Ok::<(), aquifer_remote::RemoteError>(())
/// ```
#[derive(Clone)]
pub struct RemoteOptions {
    pub(crate) endpoint: Option<String>,
    pub(crate) region: Option<String>,
    pub(crate) allow_http: bool,
    pub(crate) anonymous: bool,
    pub(crate) unversioned: bool,
    pub(crate) config: Vec<(String, String)>,
    pub(crate) timeout: Duration,
    pub(crate) retries: usize,
    pub(crate) in_flight: usize,
    pub(crate) largest_request_bytes: usize,
    pub(crate) price_per_million: f64,
    pub(crate) price_per_gib: f64,
    pub(crate) tier: Option<Tier>,
    pub(crate) buffer_bytes: usize,
    pub(crate) hedge: bool,
    pub(crate) cancel: Option<Cancel>,
    pub(crate) provider: Option<Provider>,
}

fn default_in_flight() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (descriptors / 4).clamp(1, DEFAULT_IN_FLIGHT as u64) as usize
}

impl Default for RemoteOptions {
    fn default() -> Self {
        RemoteOptions {
            endpoint: None,
            region: None,
            allow_http: false,
            anonymous: false,
            unversioned: false,
            config: vec![],
            timeout: DEFAULT_TIMEOUT,
            retries: DEFAULT_RETRIES,
            in_flight: default_in_flight(),
            largest_request_bytes: LARGEST_REQUEST_BYTES,
            price_per_million: DEFAULT_PRICE_PER_MILLION,
            price_per_gib: 0.0,
            tier: None,
            buffer_bytes: DEFAULT_BUFFER_BYTES,
            hedge: false,
            cancel: None,
            provider: None,
        }
    }
}

impl RemoteOptions {
    /// The server of an `s3://`, `gs://` or `az://` URL, instead of the provider's own.
    pub fn endpoint(mut self, url: impl Into<String>) -> Self {
        self.endpoint = Some(url.into());
        self
    }

    /// The region of an `s3://` URL; by default that of the environment, or `us-east-1`.
    pub fn region(mut self, region: impl Into<String>) -> Self {
        self.region = Some(region.into());
        self
    }

    /// Allows an endpoint with `http://`. An `http://` URL itself needs no permission.
    pub fn allow_http(mut self, allow: bool) -> Self {
        self.allow_http = allow;
        self
    }

    /// Sends requests to `s3://`, `gs://` and `az://` unsigned, for public objects.
    pub fn anonymous(mut self, anonymous: bool) -> Self {
        self.anonymous = anonymous;
        self
    }

    /// Takes the credentials of an `s3://`, `gs://` or `az://` URL from a function, instead of from the environment: those of a
    /// profile, a single sign-on, a vault. It is called before the first request, and again shortly before what it supplied
    /// expires; while that is still good, a failure is no error.
    ///
    /// It runs in a thread of the device's runtime, never in a fault handler, in a forked child as well; requests wait for it
    /// within their timeout. It must not read this device. What it says of a failure appears in no message.
    ///
    /// ```no_run
    /// use std::time::{Duration, SystemTime};
    /// use aquifer_remote::{Credentials, RemoteDevice};
    ///
    /// # fn sign_on() -> Result<(String, String, String), std::io::Error> { unimplemented!() }
    /// let device = RemoteDevice::options()
    ///     .credentials(|| {
    ///         let (id, secret, token) = sign_on()?;
    ///         let end = SystemTime::now() + Duration::from_secs(3600);
    ///         Ok(Credentials::session_key(id, secret, token).expires(end))
    ///     })
    ///     .open("s3://bucket/rows.bin")?;
    /// # Ok::<(), aquifer_remote::RemoteError>(())
    /// ```
    pub fn credentials<F>(mut self, provider: F) -> Self
    where
        F: Fn() -> Result<Credentials, Box<dyn Error + Send + Sync>> + Send + Sync + 'static,
    {
        self.provider = Some(Provider::new(provider));
        self
    }

    /// Accepts a server that sends a weak ETag or none: the caller promises that the object does not change
    /// while it is open. A change that shows in the length, the date or the ETag is an error nevertheless.
    pub fn unversioned(mut self, unversioned: bool) -> Self {
        self.unversioned = unversioned;
        self
    }

    /// Sets a configuration key of the crate `object_store` for the URL's kind of store, such as
    /// `aws_access_key_id`. Values appear in no message.
    pub fn config(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.config.push((key.into(), value.into()));
        self
    }

    /// How long a request may take with its retries and the wait for a place among those in flight: from 1 ms to a day, 30 s by default. A read of more than
    /// [`RemoteOptions::largest_request_bytes`] takes several requests.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.clamp(SHORTEST_TIMEOUT, LONGEST_TIMEOUT);
        self
    }

    /// How often a request is retried within the timeout, after a failure that may pass: a server's error, a lost
    /// connection; 10 by default.
    pub fn retries(mut self, retries: usize) -> Self {
        self.retries = retries;
        self
    }

    /// Most requests in flight: from 1 to 1024. By default 256, but at most a quarter of the descriptors that the process may
    /// have open: each takes a connection, which is kept for the next one for 10 s.
    pub fn in_flight(mut self, requests: usize) -> Self {
        self.in_flight = requests.clamp(1, 1024);
        self
    }

    /// Most bytes that one request asks for: from 4 KiB to 8 MiB, which is the default; and not more than an eighth of
    /// [`RemoteOptions::buffer_bytes`].
    pub fn largest_request_bytes(mut self, bytes: usize) -> Self {
        self.largest_request_bytes = bytes.clamp(SMALLEST_REQUEST_BYTES, LARGEST_REQUEST_BYTES);
        self
    }

    /// Keeps what is downloaded in a directory on a local disk, for all processes of the node and for later, and reads what
    /// is there instead of downloading it. Not for objects without a strong ETag, and not for `file://` URLs, which are
    /// local already: those are read without a tier.
    ///
    /// A file in the tier that cannot be used is no error: the device says so in
    /// [`RemoteStats::tier_problem`](crate::RemoteStats::tier_problem) and downloads.
    pub fn tier(mut self, tier: &Tier) -> Self {
        self.tier = Some(tier.clone());
        self
    }

    /// Memory for answers, 64 MiB by default. A cache takes it off its budget while the device is attached, and lowers it so
    /// that the buffers of all its devices fit into half of that budget. Half of it is for requests under way and for what waits to be written to the tier, a
    /// quarter for bytes read ahead, and a quarter for answers that a batch has not copied yet; further batches at the same
    /// time take as much again. What flies at once is bounded by it: bandwidth times latency should fit into half.
    pub fn buffer_bytes(mut self, bytes: usize) -> Self {
        self.buffer_bytes = bytes.clamp(SMALLEST_BUFFER_BYTES, 1 << 40);
        self
    }

    /// Sends a second request where an answer takes four times as long as usual, and uses the answer that comes first; off by
    /// default. Only if a place among those in flight and memory for the answer are free. For stores of which a few answers are
    /// slow; it costs those requests.
    pub fn hedge(mut self, hedge: bool) -> Self {
        self.hedge = hedge;
        self
    }

    /// The prices that [`RemoteStats::cost`](crate::RemoteStats::cost) is estimated with: of a million requests, and of
    /// a GiB received. By default 0.4 and 0: US dollars within a region of S3.
    pub fn prices(mut self, per_million_requests: f64, per_gib: f64) -> Self {
        self.price_per_million = per_million_requests;
        self.price_per_gib = per_gib;
        self
    }

    /// A question that is asked while a call of a [`RemoteStore`](crate::RemoteStore), the opening of a
    /// [`RemoteDevice`](crate::RemoteDevice) or [`RemoteDevice::warm`](crate::RemoteDevice::warm) waits. If the answer is
    /// true, the call fails with [`RemoteError::Cancelled`](crate::RemoteError::Cancelled). Reads of a device do not ask:
    /// they may be those of a fault.
    pub fn cancelled_by(mut self, is_cancelled: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.cancel = Some(Arc::new(is_cancelled));
        self
    }
}

impl fmt::Debug for RemoteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<&str> = self.config.iter().map(|(key, _)| key.as_str()).collect();
        // The endpoint is a URL of the caller's, which may have a password in it.
        f.debug_struct("RemoteOptions")
            .field("has_endpoint", &self.endpoint.is_some())
            .field("region", &self.region)
            .field("anonymous", &self.anonymous)
            .field("has_credentials", &self.provider.is_some())
            .field("unversioned", &self.unversioned)
            .field("config", &keys)
            .field("timeout", &self.timeout)
            .field("retries", &self.retries)
            .field("in_flight", &self.in_flight)
            .field("largest_request_bytes", &self.largest_request_bytes)
            .field("tier", &self.tier)
            .field("buffer_bytes", &self.buffer_bytes)
            .field("hedge", &self.hedge)
            .finish_non_exhaustive()
    }
}
