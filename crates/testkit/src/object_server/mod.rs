//! An HTTP server on the loopback interface that serves objects as S3 does and to plain HTTP clients, and misbehaves as
//! told; or, by [`Server::before`], a proxy that makes another server misbehave.
//!
//! An object's path is its bucket and key. Clients get and put objects, in parts as well, list, copy and delete them, with
//! ranges, strong ETags and conditions. Signatures are not checked, and buckets need not be created.
//!
//! A plan tells what happens to each request, by its number or by what it asks for. On the way, requests wait for a
//! latency, and the bytes of all bodies of one direction share a bandwidth. Requests and bytes are counted for each path
//! and method.
//!
//! All ends with the [`Server`], its connections as well. It is one thread, and another for its time.
//!
//! ```
//! use aquifer_testkit::object_server::{Answer, Server};
//!
//! let server = Server::new(b"some bytes".to_vec());
//! let url = server.url(); // of http; the same object is s3://bucket/dir/object.bin at `server.endpoint()`
//! server.plan(|number| if number == 0 { Answer::Reset } else { Answer::Proper });
//! # assert!(url.starts_with("http://127.0.0.1:"));
//! ```

mod link;
mod objects;

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::oneshot;

use link::{Bandwidth, Timer};
use objects::{Content, Object, Objects};

pub use objects::{generate, pattern};

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Body = UnsyncBoxBody<Bytes, BoxError>;

/// What bodies are passed on in.
const PIECE_BYTES: usize = 64 << 10;
const ENDLESS_BYTES: u64 = 1 << 50;
/// Connections that wait to be accepted; the system has a limit of its own.
const BACKLOG: i32 = 4096;
/// Requests to the server itself.
const CONTROL: &str = "/-/";

/// The object of [`Server::new`].
pub const PATH: &str = "bucket/dir/object.bin";

/// What happens to one request.
#[derive(Debug, Clone)]
pub enum Answer {
    /// What a server should do.
    Proper,
    /// A status without a body of the object, with `Retry-After: 0`.
    Status(u16),
    /// A status with this `Retry-After`.
    RetryAfter(u16, String),
    /// A status, and a body that is longer than any memory, as Content-Length says.
    Endless(u16),
    /// 302 to this URL.
    Redirect(String),
    /// 200 and the whole object.
    Whole,
    /// Another range of the right length, named so in Content-Range.
    OtherRange,
    /// 206 without Content-Range.
    NoRange,
    /// Content-Range names another total length.
    OtherTotal(u64),
    /// Content-Length and body are shorter than the range by so many bytes.
    Short(usize),
    /// Content-Length and body are longer than the range by so many bytes.
    Long(usize),
    /// The body breaks off half-way.
    Cut,
    /// The connection is reset before an answer, and nothing is done.
    Reset,
    /// The connection is reset instead of an answer, when all is done.
    Lost,
    /// No answer until the client gives up.
    Silence,
    /// As `Proper`, later.
    Late(Duration),
    /// As `Proper`, and the body comes with so many bytes per second.
    Slow(u64),
    /// As `Proper`, with this ETag or none.
    Etag(Option<&'static str>),
}

impl Answer {
    /// Parses what the option `--fault` takes: `NAME` or `NAME:VALUE`.
    ///
    /// # Errors
    /// An unknown name or a value that is not a number.
    pub fn parse(text: &str) -> Result<Answer, String> {
        let (name, value) = text.split_once(':').unwrap_or((text, ""));
        let number = || value.parse::<u64>().map_err(|error| format!("{text}: {error}"));
        let status = |value: &str| value.parse::<u16>().map_err(|error| format!("{text}: {error}"));
        Ok(match name {
            "status" => Answer::Status(status(value)?),
            "retry-after" => {
                let (code, after) = value.split_once(':').unwrap_or(("503", value));
                Answer::RetryAfter(status(code)?, after.to_owned())
            }
            "endless" => Answer::Endless(status(value)?),
            "redirect" => Answer::Redirect(value.to_owned()),
            "whole" => Answer::Whole,
            "other-range" => Answer::OtherRange,
            "no-range" => Answer::NoRange,
            "other-total" => Answer::OtherTotal(number()?),
            "short" => Answer::Short(number()? as usize),
            "long" => Answer::Long(number()? as usize),
            "cut" => Answer::Cut,
            "reset" => Answer::Reset,
            "lost" => Answer::Lost,
            "silence" => Answer::Silence,
            "late-ms" => Answer::Late(Duration::from_millis(number()?)),
            "slow" => Answer::Slow(number()?),
            "etag" if value.is_empty() => Answer::Etag(None),
            "etag" => Answer::Etag(Some(value.to_owned().leak())),
            _ => return Err(format!("{text}: unknown fault")),
        })
    }
}

/// What a client asked for.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Bucket and key.
    pub path: String,
    /// GET, PUT.
    pub method: String,
    /// The request's line, and headers with names in lower case.
    pub head: String,
    /// Of one range with both ends.
    pub range: Option<Range<usize>>,
}

impl Asked {
    fn of(request: &hyper::http::request::Parts) -> Asked {
        let mut head = format!("{} {} HTTP/1.1\r\n", request.method, request.uri);
        for (name, value) in &request.headers {
            head.push_str(&format!("{name}: {}\r\n", String::from_utf8_lossy(value.as_bytes())));
        }
        let range = request.headers.get(header::RANGE).and_then(|range| {
            let (first, last) = range.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
            Some(first.parse().ok()?..last.parse::<usize>().ok()?.checked_add(1)?)
        });
        let path = objects::path_of(request);
        Asked { path, method: request.method.to_string(), head, range }
    }
}

/// Requests and the bytes of their bodies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests, failed ones too.
    pub requests: u64,
    /// Bytes of answers.
    pub sent_bytes: u64,
    /// Bytes of requests.
    pub received_bytes: u64,
}

impl Counts {
    fn add(&mut self, other: &Counts) {
        self.requests += other.requests;
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
    }

    fn json(&self) -> String {
        let Counts { requests, sent_bytes, received_bytes } = self;
        format!(
            "{{\"requests\":{requests},\"sent_bytes\":{sent_bytes},\"received_bytes\":{received_bytes}}}"
        )
    }
}

type Plan = Box<dyn Fn(usize, &Asked) -> Answer + Send + Sync>;
/// By path and method.
type AllCounts = BTreeMap<(String, String), Counts>;

struct State {
    objects: Objects,
    /// The address that requests are passed on to.
    upstream: Option<(String, Client<HttpConnector, Body>)>,
    /// The answer to the request of a number, from 0 on.
    plan: Mutex<Plan>,
    next_number: AtomicUsize,
    honours_if_match: AtomicBool,
    records: AtomicBool,
    asked: Mutex<Vec<Asked>>,
    counts: Mutex<AllCounts>,
    at_once: AtomicUsize,
    most_at_once: AtomicUsize,
    latency: Mutex<Duration>,
    sending: Bandwidth,
    receiving: Bandwidth,
    timer: Timer,
}

/// See the module documentation.
pub struct Server {
    state: Arc<State>,
    address: SocketAddr,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// A server with one object, at [`PATH`].
    pub fn new(bytes: Vec<u8>) -> Server {
        let server = Server::empty();
        server.put(PATH, bytes);
        server
    }

    /// A server without objects.
    pub fn empty() -> Server {
        Server::start(None)
    }

    /// A proxy for the server at `address`, a host and a port. It changes no request unless told to, so the server can
    /// check signatures: but not those of requests that [`Answer::Whole`], [`Answer::Etag`] and
    /// [`Server::ignore_if_match`] change.
    pub fn before(address: impl Into<String>) -> Server {
        Server::start(Some(address.into()))
    }

    fn start(upstream: Option<String>) -> Server {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        // By default it drops the connections of a client that opens hundreds at once, which tries again after a second.
        rustix::net::listen(&listener, BACKLOG).expect("a socket");
        let address = listener.local_addr().expect("a bound socket");
        let client = |address| (address, Client::builder(TokioExecutor::new()).build_http());
        let state = Arc::new(State {
            objects: Objects::default(),
            upstream: upstream.map(client),
            plan: Mutex::new(Box::new(|_, _| Answer::Proper)),
            next_number: AtomicUsize::new(0),
            honours_if_match: AtomicBool::new(true),
            records: AtomicBool::new(true),
            asked: Mutex::default(),
            counts: Mutex::default(),
            at_once: AtomicUsize::new(0),
            most_at_once: AtomicUsize::new(0),
            latency: Mutex::default(),
            sending: Bandwidth::default(),
            receiving: Bandwidth::default(),
            timer: Timer::start(),
        });
        let (end, ended) = oneshot::channel();
        let accepting = state.clone();
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                tokio::select! {
                    () = accept(&accepting, listener) => {}
                    _ = ended => {}
                }
            });
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("object-server".into()).spawn(run);
        Server { state, address, end: Some(end), thread: Some(thread.expect("a thread")) }
    }

    /// Host and port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Of the interface of S3.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Of the object at [`PATH`], with a signature that no message may repeat.
    pub fn url(&self) -> String {
        format!("http://{}/{PATH}?X-Signature=hunter2", self.address)
    }

    /// Makes or replaces an object, with an ETag of its bytes.
    pub fn put(&self, path: &str, bytes: impl Into<Bytes>) {
        self.state.objects.put(path, Object::new(Content::Parts(vec![bytes.into()])));
    }

    /// Makes an object of the bytes of [`generate`], which take no memory.
    pub fn put_generated(&self, path: &str, len_bytes: u64, seed: u64) {
        self.state.objects.put(path, Object::new(Content::Generated { len_bytes, seed }));
    }

    /// Makes an object of each file in a directory and those in it: `bucket/key` of the file with this path there. Files
    /// are not written.
    ///
    /// # Errors
    /// Of reading the directories and opening the files.
    pub fn put_directory(&self, directory: &Path) -> std::io::Result<()> {
        self.put_files(directory, "")
    }

    fn put_files(&self, directory: &Path, prefix: &str) -> std::io::Result<()> {
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let data = std::fs::metadata(entry.path())?;
            if data.is_dir() {
                self.put_files(&entry.path(), &format!("{path}/"))?;
            } else if data.is_file() {
                let file = Arc::new(File::open(entry.path())?);
                self.state.objects.put(&path, Object::new(Content::File(file, data.len())));
            }
        }
        Ok(())
    }

    /// The ETag of an object.
    pub fn etag(&self, path: &str) -> Option<String> {
        self.state.objects.get(path)?.etag
    }

    /// The bytes of an object that was put.
    pub fn get(&self, path: &str) -> Option<Vec<u8>> {
        match self.state.objects.get(path)?.content {
            Content::Parts(parts) => Some(parts.concat()),
            _ => None,
        }
    }

    /// Removes an object.
    pub fn remove(&self, path: &str) {
        self.state.objects.remove(path);
    }

    /// All objects, in order.
    pub fn paths(&self) -> Vec<String> {
        self.state.objects.paths()
    }

    /// Replaces the bytes and the ETag of the object at [`PATH`].
    pub fn replace(&self, bytes: Vec<u8>, etag: Option<&str>) {
        self.state.objects.change(PATH, |object| {
            object.content = Content::Parts(vec![bytes.into()]);
            object.etag = etag.map(str::to_owned);
        });
    }

    /// Sets the date of the object at [`PATH`], in the form of the header.
    pub fn date(&self, modified: &str) {
        self.state.objects.change(PATH, |object| object.modified = modified.to_owned());
    }

    /// Plans the answers to the requests of a number, from 0 on, and forgets those that came before.
    pub fn plan(&self, plan: impl Fn(usize) -> Answer + Send + Sync + 'static) {
        self.plan_each(move |number, _| plan(number));
    }

    /// As [`Server::plan`], by what is asked for as well.
    pub fn plan_each(&self, plan: impl Fn(usize, &Asked) -> Answer + Send + Sync + 'static) {
        self.state.set_plan(Box::new(plan));
    }

    /// Plans an answer for each request whose number leaves no rest, counted from 1 on. Of several faults the first one
    /// counts.
    pub fn plan_faults(&self, faults: Vec<Fault>) {
        self.state.set_plan(plan_of(faults));
    }

    /// Answers reads as if they had no `If-Match`.
    pub fn ignore_if_match(&self) {
        self.state.honours_if_match.store(false, Ordering::SeqCst);
    }

    /// The requests since the last plan.
    pub fn asked(&self) -> MutexGuard<'_, Vec<Asked>> {
        self.state.asked.lock().unwrap()
    }

    /// Whether requests are kept for [`Server::asked`]: by default they are.
    pub fn record(&self, record: bool) {
        self.state.records.store(record, Ordering::SeqCst);
    }

    /// Most requests at once.
    pub fn most_at_once(&self) -> usize {
        self.state.most_at_once.load(Ordering::SeqCst)
    }

    /// What was transferred with a method, of the paths that begin with a text; all methods if it is empty.
    pub fn counts(&self, path_prefix: &str, method: &str) -> Counts {
        let mut sum = Counts::default();
        for ((path, of), counts) in self.state.counts.lock().unwrap().iter() {
            if path.starts_with(path_prefix) && (method.is_empty() || method == of) {
                sum.add(counts);
            }
        }
        sum
    }

    /// All counters, in JSON, as at the path `/-/counters`.
    pub fn counters_json(&self) -> String {
        self.state.counters_json()
    }

    /// Starts counting anew.
    pub fn reset_counts(&self) {
        self.state.counts.lock().unwrap().clear();
    }

    /// How long each request waits before it is begun.
    pub fn latency(&self, latency: Duration) {
        *self.state.latency.lock().unwrap() = latency;
    }

    /// The bandwidth of all bodies together, in each direction; 0 is no limit, as by default.
    pub fn bytes_per_second(&self, bytes: u64) {
        self.state.sending.limit(bytes);
        self.state.receiving.limit(bytes);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().expect("once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the server panicked");
    }
}

/// An answer for each so many requests.
#[derive(Debug, Clone)]
pub struct Fault {
    /// What happens.
    pub answer: Answer,
    /// To which requests: 1 is all.
    pub every: usize,
}

impl Fault {
    /// Parses `NAME[:VALUE]/EVERY`; see [`Answer::parse`].
    ///
    /// # Errors
    /// Another form.
    pub fn parse(text: &str) -> Result<Fault, String> {
        let (answer, every) = text.rsplit_once('/').unwrap_or((text, "1"));
        let every = every.parse().ok().filter(|every| *every > 0);
        let every = every.ok_or_else(|| format!("{text}: give NAME[:VALUE]/EVERY"))?;
        Ok(Fault { answer: Answer::parse(answer)?, every })
    }
}

fn plan_of(faults: Vec<Fault>) -> Plan {
    Box::new(move |number, _| {
        let fault = faults.iter().find(|fault| (number + 1).is_multiple_of(fault.every));
        fault.map_or(Answer::Proper, |fault| fault.answer.clone())
    })
}

impl State {
    fn set_plan(&self, plan: Plan) {
        let mut current = self.plan.lock().unwrap();
        self.asked.lock().unwrap().clear();
        self.next_number.store(0, Ordering::SeqCst);
        *current = plan;
    }

    fn planned(&self, asked: Asked) -> Answer {
        let plan = self.plan.lock().unwrap();
        let number = self.next_number.fetch_add(1, Ordering::SeqCst);
        let answer = plan(number, &asked);
        if self.records.load(Ordering::SeqCst) {
            self.asked.lock().unwrap().push(asked);
        }
        answer
    }

    fn count(&self, key: &(String, String), counts: Counts) {
        let mut all = self.counts.lock().unwrap();
        match all.get_mut(key) {
            Some(sum) => sum.add(&counts),
            None => drop(all.insert(key.clone(), counts)),
        }
    }

    fn counters_json(&self) -> String {
        let all = self.counts.lock().unwrap();
        let mut sum = Counts::default();
        let mut paths: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for ((path, method), counts) in all.iter() {
            sum.add(counts);
            let entry = format!("{}:{}", json_string(method), counts.json());
            paths.entry(path).or_default().push(entry);
        }
        let paths: Vec<String> = paths
            .into_iter()
            .map(|(path, methods)| format!("{}:{{{}}}", json_string(path), methods.join(",")))
            .collect();
        format!("{{\"all\":{},\"paths\":{{{}}}}}", sum.json(), paths.join(","))
    }
}

/// Not by serde_json, whose comparisons with numbers make those in the tests of other crates ambiguous.
fn json_string(text: &str) -> String {
    let escaped = |char: char| match char {
        '"' | '\\' => format!("\\{char}"),
        '\0'..'\x20' => format!("\\u{:04x}", char as u32),
        _ => char.to_string(),
    };
    format!("\"{}\"", text.chars().map(escaped).collect::<String>())
}

async fn accept(state: &Arc<State>, listener: TcpListener) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("a runtime");
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = stream.set_nodelay(true);
        // A copy, for what only a socket has.
        let Ok(socket) = rustix::io::dup(&stream).map(Arc::new) else { continue };
        let state = state.clone();
        let service = service_fn(move |request| serve(state.clone(), socket.clone(), request));
        let connection = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(async {
            // Ends with an error for each connection that breaks off, as planned or not.
            let _ = connection.await;
        });
    }
}

/// A request while it lives, also if it is given up.
struct AtOnce<'a>(&'a State);

impl<'a> AtOnce<'a> {
    fn new(state: &'a State) -> AtOnce<'a> {
        let now = state.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        state.most_at_once.fetch_max(now, Ordering::SeqCst);
        AtOnce(state)
    }
}

impl Drop for AtOnce<'_> {
    fn drop(&mut self) {
        self.0.at_once.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Answers a request; an error ends the connection without an answer.
async fn serve(
    state: Arc<State>,
    socket: Arc<OwnedFd>,
    request: Request<Incoming>,
) -> Result<Response<Body>, BoxError> {
    if let Some(command) = request.uri().path().strip_prefix(CONTROL) {
        let command = command.to_owned();
        let body = request.into_body().collect().await?.to_bytes();
        return Ok(control(&state, &command, &String::from_utf8_lossy(&body)));
    }
    // Until just before the client can know that the request is done.
    let _at_once = AtOnce::new(&state);
    let (mut request, body) = request.into_parts();
    let asked = Asked::of(&request);
    let key = (asked.path.clone(), asked.method.clone());
    state.count(&key, Counts { requests: 1, ..Counts::default() });
    let action = state.planned(asked);
    let latency = *state.latency.lock().unwrap();
    state.timer.sleep(latency).await;

    let reset = || {
        // Closing it sends a reset.
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
        Err("a connection that is reset")?
    };
    let is_read = matches!(request.method, Method::GET | Method::HEAD);
    if let Some(answer) = refused(&action) {
        // All of the body first: a client that is still sending it when the connection closes may miss the answer.
        let body = body.map_err(Into::into).boxed_unsync();
        Passing::new(&state, &key, false).pass(body).collect().await?;
        return Ok(answer);
    }
    if let Answer::Endless(status) = action {
        return Ok(endless(status, Passing::new(&state, &key, true)));
    }
    match &action {
        Answer::Reset => return reset(),
        Answer::Silence => return std::future::pending().await,
        Answer::Late(time) => state.timer.sleep(*time).await,
        Answer::Whole => drop(request.headers.remove(header::RANGE)),
        Answer::Etag(etag) if is_read => {
            let wanted = request.headers.remove(header::IF_MATCH);
            let differs = wanted.is_some_and(|wanted| wanted.to_str().ok() != *etag);
            if differs && state.honours_if_match.load(Ordering::SeqCst) {
                return Ok(objects::failure(StatusCode::PRECONDITION_FAILED, "PreconditionFailed"));
            }
        }
        _ => {}
    }
    if is_read && !state.honours_if_match.load(Ordering::SeqCst) {
        request.headers.remove(header::IF_MATCH);
    }
    let is_head = request.method == Method::HEAD;
    let passing = Passing::new(&state, &key, false);
    let body = passing.pass(body.map_err(Into::into).boxed_unsync());
    let answer = match &state.upstream {
        Some((address, client)) => pass_on(client, address, request, body).await?,
        None => {
            let body = decoded(&request.headers, body.collect().await?.to_bytes())?;
            state.objects.answer(&request, body)
        }
    };
    if let Answer::Lost = action {
        return reset();
    }
    Ok(spoiled(answer, &action, Passing::new(&state, &key, true), is_head))
}

fn control(state: &State, command: &str, body: &str) -> Response<Body> {
    match command {
        "counters" => Response::new(bytes_body(state.counters_json().into())),
        "reset" => {
            state.counts.lock().unwrap().clear();
            Response::new(bytes_body(Bytes::new()))
        }
        "faults" => match body.split_whitespace().map(Fault::parse).collect() {
            Ok(faults) => {
                state.set_plan(plan_of(faults));
                Response::new(bytes_body(Bytes::new()))
            }
            Err(error) => {
                let mut answer = Response::new(bytes_body(error.into()));
                *answer.status_mut() = StatusCode::BAD_REQUEST;
                answer
            }
        },
        _ => objects::failure(StatusCode::NOT_FOUND, "NoSuchCommand"),
    }
}

async fn pass_on(
    client: &Client<HttpConnector, Body>,
    address: &str,
    mut request: hyper::http::request::Parts,
    body: Body,
) -> Result<Response<Body>, BoxError> {
    let path = request.uri.path_and_query().map_or("/", |path| path.as_str());
    request.uri = format!("http://{address}{path}").parse::<Uri>()?;
    for name in [header::CONNECTION, header::TRANSFER_ENCODING, header::EXPECT] {
        request.headers.remove(name);
    }
    let (mut head, body) = client.request(Request::from_parts(request, body)).await?.into_parts();
    head.headers.remove(header::CONNECTION);
    head.headers.remove(header::TRANSFER_ENCODING);
    Ok(Response::from_parts(head, body.map_err(Into::into).boxed_unsync()))
}

/// The content of a body that is sent in signed chunks: each its length in hexadecimal, perhaps a signature, a line's end,
/// its bytes, and a line's end.
fn decoded(headers: &HeaderMap, body: Bytes) -> Result<Bytes, BoxError> {
    let is = |name: &str, text: &str| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .is_some_and(|value| value.contains(text))
    };
    if !is("x-amz-content-sha256", "STREAMING-") && !is("content-encoding", "aws-chunked") {
        return Ok(body);
    }
    let mut content = BytesMut::new();
    let mut rest = &body[..];
    loop {
        let end = rest.windows(2).position(|two| two == b"\r\n").ok_or("a chunk without a line")?;
        let line = std::str::from_utf8(&rest[..end])?;
        let len_bytes = usize::from_str_radix(line.split(';').next().unwrap_or_default(), 16)?;
        if len_bytes == 0 {
            return Ok(content.freeze());
        }
        content.extend_from_slice(rest.get(end + 2..end + 2 + len_bytes).ok_or("a cut chunk")?);
        rest = rest.get(end + 4 + len_bytes..).ok_or("a cut chunk")?;
    }
}

fn bytes_body(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// The answer of a plan that does nothing of what was asked for.
fn refused(action: &Answer) -> Option<Response<Body>> {
    match action {
        Answer::Status(status) => Some(refusal(*status, "0")),
        Answer::RetryAfter(status, after) => Some(refusal(*status, after)),
        Answer::Redirect(url) => {
            let mut answer = refusal(302, "0");
            let url = HeaderValue::from_str(url).expect("a URL");
            answer.headers_mut().insert(header::LOCATION, url);
            Some(answer)
        }
        _ => None,
    }
}

fn refusal(status: u16, retry_after: &str) -> Response<Body> {
    let status = StatusCode::from_u16(status).expect("a status");
    let mut answer = objects::failure(status, "AsPlanned");
    let retry_after = HeaderValue::from_str(retry_after).expect("a header");
    answer.headers_mut().insert(header::RETRY_AFTER, retry_after);
    answer
}

fn endless(status: u16, passing: Passing) -> Response<Body> {
    let piece = Bytes::from_static(&[b' '; PIECE_BYTES]);
    let pieces = stream::repeat_with(move || Ok(Frame::data(piece.clone())));
    let mut answer = Response::new(passing.pass(StreamBody::new(pieces).boxed_unsync()));
    *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
    answer.headers_mut().insert(header::CONTENT_LENGTH, ENDLESS_BYTES.into());
    answer
}

/// Does to an answer what is planned.
fn spoiled(
    answer: Response<Body>,
    action: &Answer,
    mut passing: Passing,
    is_head: bool,
) -> Response<Body> {
    let (mut head, body) = answer.into_parts();
    let headers = &mut head.headers;
    let content_range = headers.get(header::CONTENT_RANGE).and_then(parse_content_range);
    let mut name_range = |first: u64, last: u64, total: u64| {
        let text = format!("bytes {first}-{last}/{total}");
        headers.insert(header::CONTENT_RANGE, text.parse().expect("a header"));
    };
    match (action, content_range) {
        (Answer::OtherRange, Some((first, last, total))) if first > 0 => {
            name_range(0, last - first, total);
        }
        (Answer::OtherRange, Some((first, last, total))) => name_range(first + 1, last + 1, total),
        (Answer::OtherTotal(total), Some((first, last, _))) => name_range(first, last, *total),
        _ => {}
    }
    match action {
        Answer::NoRange => drop(headers.remove(header::CONTENT_RANGE)),
        Answer::Etag(None) => drop(headers.remove(header::ETAG)),
        Answer::Etag(Some(etag)) => {
            headers.insert(header::ETAG, HeaderValue::from_static(etag));
        }
        Answer::Slow(bytes_per_second) => passing.slow.limit(*bytes_per_second),
        _ => {}
    }
    if is_head {
        return Response::from_parts(head, body);
    }
    let len =
        headers.get(header::CONTENT_LENGTH).and_then(|len| len.to_str().ok()?.parse::<u64>().ok());
    if let Some(len) = len {
        let new_len = match action {
            Answer::Short(by) => len.saturating_sub(*by as u64),
            Answer::Long(by) => len + *by as u64,
            _ => len,
        };
        headers.insert(header::CONTENT_LENGTH, new_len.into());
        passing.left = new_len.min(len);
        passing.zeros = new_len.saturating_sub(len);
        if let Answer::Cut = action {
            passing.left = len / 2;
            passing.breaks_off = true;
        }
    }
    Response::from_parts(head, passing.pass(body))
}

/// First and last byte, and the total length.
fn parse_content_range(value: &HeaderValue) -> Option<(u64, u64, u64)> {
    let (range, total) = value.to_str().ok()?.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some((first.parse().ok()?, last.parse().ok()?, total.parse().ok()?))
}

/// How a body passes the line.
struct Passing {
    state: Arc<State>,
    key: (String, String),
    is_sent: bool,
    slow: Bandwidth,
    /// Bytes until its end, or until it breaks off.
    left: u64,
    breaks_off: bool,
    /// Bytes that are added.
    zeros: u64,
    /// Received, and not yet passed on.
    pending: Bytes,
}

impl Passing {
    fn new(state: &Arc<State>, key: &(String, String), is_sent: bool) -> Passing {
        Passing {
            state: state.clone(),
            key: key.clone(),
            is_sent,
            slow: Bandwidth::default(),
            left: u64::MAX,
            breaks_off: false,
            zeros: 0,
            pending: Bytes::new(),
        }
    }

    fn pass(self, body: Body) -> Body {
        let frames = stream::unfold((self, Box::pin(body)), |(mut passing, mut body)| async {
            let frame = passing.next(body.as_mut()).await?;
            Some((frame.map(Frame::data), (passing, body)))
        });
        StreamBody::new(frames).boxed_unsync()
    }

    async fn next(&mut self, mut body: Pin<&mut Body>) -> Option<Result<Bytes, BoxError>> {
        while self.pending.is_empty() && self.left > 0 {
            match body.frame().await {
                None => self.left = 0,
                Some(Err(error)) => return Some(Err(error)),
                // Trailers are left out.
                Some(Ok(frame)) => self.pending = frame.into_data().unwrap_or_default(),
            }
        }
        let piece = if self.left > 0 {
            let len = self.pending.len().min(PIECE_BYTES).min(self.left as usize);
            self.left -= len as u64;
            self.pending.split_to(len)
        } else if self.breaks_off {
            return Some(Err("a body that breaks off".into()));
        } else {
            let len = self.zeros.min(PIECE_BYTES as u64);
            self.zeros -= len;
            vec![0; len as usize].into()
        };
        if piece.is_empty() {
            return None;
        }
        let (state, bytes) = (&self.state, piece.len() as u64);
        let line = if self.is_sent { &state.sending } else { &state.receiving };
        self.slow.pass(piece.len(), &state.timer).await;
        line.pass(piece.len(), &state.timer).await;
        let (sent_bytes, received_bytes) = if self.is_sent { (bytes, 0) } else { (0, bytes) };
        state.count(&self.key, Counts { requests: 0, sent_bytes, received_bytes });
        Some(Ok(piece))
    }
}
