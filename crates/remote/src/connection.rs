//! What passes between `object_store` and its HTTP client: counted, and noted for the request that
//! it belongs to, because the library's errors do not tell the status. A server that is too busy is given the time that it
//! asks for, which the library's retries do not do.
//!
//! Redirects are followed within a server only, because signed headers, tokens and queries are meant for the one that the
//! caller named; to others, such as a CDN, only a request that has none of them. The library's own client follows redirects
//! anywhere, and cannot be told otherwise: so the client is made here, of the library's options.
//!
//! The library collects each body but an object's in memory, whatever its length, and allocates the length that the server
//! announces. So such bodies are [`bounded`] here.

mod bounded;

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::ops::Range;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{HeaderValue, IF_NONE_MATCH};
use reqwest::redirect::{Action, Attempt, Policy};
use reqwest::tls::Certificate;
use reqwest::{Client, Method, NoProxy, Proxy, Url};

pub(crate) use bounded::TooLong;
use bounded::bounded;

const USER_AGENT: &str = concat!("aquifer/", env!("CARGO_PKG_VERSION"));
const MOST_REDIRECTS: usize = 10;
/// How long a connection is kept that no request uses.
const IDLE_LIMIT: Duration = Duration::from_secs(10);

/// What was seen of one request and its retries.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// Attempts.
    pub attempts: u32,
    /// The last answer's, or none if the last attempt brought no answer.
    pub status: Option<u16>,
    pub etag: Option<String>,
    /// Seconds, as in [`Version`](crate::fetch::Version).
    pub modified: Option<i64>,
    /// The range and the total length that the last answer names.
    pub content_range: Option<(Range<u64>, u64)>,
    /// Of the last answer's body.
    pub content_length: Option<u64>,
    pub failure: Option<HttpErrorKind>,
    /// From the last attempt to its headers.
    pub latency: Duration,
}

/// Travels with a request for an object's bytes, as an extension; with others as a value of the task that makes them, since
/// the library passes no extensions on.
pub(crate) type Notes = Arc<Mutex<Seen>>;

tokio::task_local! {
    /// The notes of requests that carry none.
    pub(crate) static NOTES: Notes;
}

/// Connects with reqwest, and counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Connector {
    /// HTTP requests, also retries, those that redirects led to, and those for credentials.
    pub requests: Arc<AtomicU64>,
    /// Whether a multipart upload is completed only if there is no object of its name. The library can ask S3 for that,
    /// but not through its interface.
    pub completes_new_only: bool,
    /// As in the options: what bounds a wait for a busy server.
    pub retries: usize,
    pub timeout: Duration,
    /// Nothing that is sent is a secret, so requests may be redirected to other servers.
    pub has_no_secrets: bool,
}

#[derive(Debug)]
struct Counted {
    client: HttpClient,
    connector: Connector,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let failed = |source| object_store::Error::Generic { store: "HTTP client", source };
        let client = client(options, self.requests.clone(), self.has_no_secrets).map_err(failed)?;
        Ok(HttpClient::new(Counted { client: HttpClient::new(client), connector: self.clone() }))
    }
}

#[async_trait::async_trait]
impl HttpService for Counted {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        // Relaxed: a counter.
        self.connector.requests.fetch_add(1, Ordering::Relaxed);
        let notes = request.extensions().get::<Notes>().cloned();
        let notes = notes.or_else(|| NOTES.try_with(Clone::clone).ok());
        if self.connector.completes_new_only && completes_upload(&request) {
            // Like the library's own condition, it needs no signature.
            let any = const { HeaderValue::from_static("*") };
            request.headers_mut().insert(IF_NONE_MATCH, any);
        }
        let start = Instant::now();
        let is_object = request.extensions().get::<Notes>().is_some();
        let result = self.client.execute(request).await.map(|answer| bounded(answer, is_object));
        let mut is_last = false;
        if let Some(notes) = notes {
            let mut seen = notes.lock().unwrap_or_else(PoisonError::into_inner);
            let attempts = seen.attempts + 1;
            is_last = attempts as usize > self.connector.retries;
            *seen = Seen { attempts, latency: start.elapsed(), ..Seen::default() };
            match &result {
                Err(error) => seen.failure = Some(error.kind()),
                Ok(answer) => {
                    let header = |name| answer.headers().get(name)?.to_str().ok();
                    seen.status = Some(answer.status().as_u16());
                    seen.etag = header("etag").map(str::to_owned);
                    seen.modified = header("last-modified").and_then(seconds);
                    seen.content_range = header("content-range").and_then(content_range);
                    seen.content_length = header("content-length").and_then(|len| len.parse().ok());
                }
            }
        }
        let wait = result.as_ref().ok().filter(|_| !is_last).and_then(wait_before_retry);
        if let Some(wait) = wait {
            // The request's own timeout may end it earlier.
            tokio::time::sleep(wait.min(self.connector.timeout)).await;
        }
        result
    }
}

type Refused = Box<dyn std::error::Error + Send + Sync>;

/// The client that the library would make of its options, but for redirects, which count as `requests`, and `Referer`.
fn client(
    options: &ClientOptions,
    requests: Arc<AtomicU64>,
    roams: bool,
) -> Result<Client, Refused> {
    use ClientConfigKey as Key;
    let text = |key| options.get_config_value(&key);
    let flag =
        |key| Ok::<_, Refused>(text(key).as_deref().map(is_set).transpose()?.unwrap_or(false));
    let time = |key| text(key).map(|text| humantime::parse_duration(&text)).transpose();
    let mut client = Client::builder()
        .redirect(Policy::custom(move |redirect| follow(redirect, &requests, roams)))
        .referer(false)
        .user_agent(text(Key::UserAgent).unwrap_or_else(|| USER_AGENT.to_owned()))
        .https_only(!flag(Key::AllowHttp)?)
        .tls_danger_accept_invalid_certs(flag(Key::AllowInvalidCertificates)?)
        .http2_keep_alive_while_idle(flag(Key::Http2KeepAliveWhileIdle)?)
        .http2_max_frame_size(number(text(Key::Http2MaxFrameSize))?)
        // An answer's length is that of the object.
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate();
    if let Some(url) = text(Key::ProxyUrl) {
        if let Some(certificate) = text(Key::ProxyCaCertificate) {
            client = client.tls_certs_merge([Certificate::from_pem(certificate.as_bytes())?]);
        }
        let not_for = text(Key::ProxyExcludes).and_then(|hosts| NoProxy::from_string(&hosts));
        client = client.proxy(Proxy::all(url)?.no_proxy(not_for));
    }
    if flag(Key::NoSystemCertificates)? {
        client = client.tls_certs_only([]);
    }
    if let Some(time) = time(Key::Timeout)? {
        client = client.timeout(time);
    }
    if let Some(time) = time(Key::ConnectTimeout)? {
        client = client.connect_timeout(time);
    }
    if let Some(time) = time(Key::ReadTimeout)? {
        client = client.read_timeout(time);
    }
    // By default the client ends a connection of which the server has read nothing for 30 seconds, whatever the timeout.
    client = client.tcp_user_timeout(None);
    // Each device has connections of its own: as many as requests were in flight.
    client = client.pool_idle_timeout(time(Key::PoolIdleTimeout)?.unwrap_or(IDLE_LIMIT));
    if let Some(most) = number(text(Key::PoolMaxIdlePerHost))? {
        client = client.pool_max_idle_per_host(most);
    }
    if let Some(time) = time(Key::Http2KeepAliveInterval)? {
        client = client.http2_keep_alive_interval(time);
    }
    if let Some(time) = time(Key::Http2KeepAliveTimeout)? {
        client = client.http2_keep_alive_timeout(time);
    }
    if flag(Key::Http1Only)? {
        client = client.http1_only();
    }
    if flag(Key::Http2Only)? {
        client = client.http2_prior_knowledge();
    }
    if flag(Key::RandomizeAddresses)? {
        client = client.dns_resolver(Arc::new(Shuffled));
    }
    Ok(client.build()?)
}

/// As the library reads it.
fn is_set(text: &str) -> Result<bool, Refused> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" | "y" => Ok(true),
        "0" | "false" | "off" | "no" | "n" => Ok(false),
        _ => Err("neither true nor false".into()),
    }
}

fn number<T: FromStr>(text: Option<String>) -> Result<Option<T>, T::Err> {
    text.map(|text| text.parse()).transpose()
}

/// Follows a redirect, or takes it as the answer.
fn follow(redirect: Attempt<'_>, requests: &AtomicU64, roams: bool) -> Action {
    if !is_followed(redirect.previous(), redirect.url(), roams) {
        return redirect.stop();
    }
    // Relaxed: a counter.
    requests.fetch_add(1, Ordering::Relaxed);
    redirect.follow()
}

/// Whether a redirect is followed: to the same scheme, host and port, and to others if it `roams`, but never from TLS to
/// plain text.
fn is_followed(previous: &[Url], next: &Url, roams: bool) -> bool {
    let is_same = previous.last().is_some_and(|last| last.origin() == next.origin());
    let is_safe = match next.scheme() {
        "https" => true,
        "http" => previous.iter().all(|url| url.scheme() == "http"),
        _ => false,
    };
    previous.len() <= MOST_REDIRECTS && (is_same || roams && is_safe)
}

/// The addresses of a name in any order, so that connections spread over a store's servers.
struct Shuffled;

impl Resolve for Shuffled {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let mut addresses: Vec<SocketAddr> = found.collect();
            let random = RandomState::new();
            addresses.sort_by_cached_key(|address| random.hash_one(address));
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

/// Whether a request completes a multipart upload of S3.
fn completes_upload(request: &HttpRequest) -> bool {
    let query = request.uri().query().unwrap_or_default();
    request.method() == Method::POST && query.split('&').any(|pair| pair.starts_with("uploadId="))
}

/// How long a server that is too busy asks to wait: a number of seconds or a date.
fn wait_before_retry(answer: &HttpResponse) -> Option<Duration> {
    if !matches!(answer.status().as_u16(), 429 | 503) {
        return None;
    }
    let text = answer.headers().get("retry-after")?.to_str().ok()?.trim();
    match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        // Of a date that has passed nothing is left.
        Err(_) => httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::now()).ok(),
    }
}

/// Parses a date.
fn seconds(text: &str) -> Option<i64> {
    let since = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}

/// Parses `bytes 0-9/100`, and `bytes */100` as an empty range.
fn content_range(text: &str) -> Option<(Range<u64>, u64)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let total = total.parse().ok()?;
    if range == "*" {
        return Some((0..0, total));
    }
    let (first, last) = range.split_once('-')?;
    Some((first.parse().ok()?..last.parse::<u64>().ok()?.checked_add(1)?, total))
}

/// TLS with `ring`, unless the program has chosen a provider: one of them has to be the process's.
pub(crate) fn install_crypto() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Fails if another thread was first.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_never_leave_tls_and_end() {
        let urls = |texts: &[&str]| -> Vec<Url> {
            texts.iter().map(|text| text.parse().unwrap()).collect()
        };
        for (previous, next, within, roaming) in [
            (&["https://a/x"][..], "https://a/y?z", true, true),
            (&["http://a/x"], "http://a:80/y", true, true),
            (&["https://a/x"], "https://b/x", false, true),
            (&["http://a/x"], "http://b:81/x", false, true),
            (&["http://a/x"], "https://a/x", false, true),
            (&["https://a/x"], "http://a/x", false, false),
            (&["https://a/x"], "http://b/x", false, false),
            (&["http://a/x", "https://b/x"], "http://a/x", false, false),
            (&["http://a/x"], "ftp://b/x", false, false),
            (&["http://a/x"], "file:///x", false, false),
            (&["http://a"; 10], "http://a", true, true),
            (&["http://a"; 11], "http://a", false, false),
        ] {
            let (previous, url) = (urls(previous), next.parse().unwrap());
            let followed = [false, true].map(|roams| is_followed(&previous, &url, roams));
            assert_eq!(followed, [within, roaming], "{previous:?} {next}");
        }
    }

    #[test]
    fn content_ranges_are_parsed() {
        assert_eq!(content_range("bytes 0-9/100"), Some((0..10, 100)));
        assert_eq!(content_range("bytes */7"), Some((0..0, 7)));
        for bad in [
            "",
            "bytes 0-9",
            "bytes 0-9/*",
            "bytes 9/10",
            "bytes 0-18446744073709551615/1",
            "0-9/10",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}
