//! A small HTTP server on the loopback interface that serves ranges of one object, and misbehaves as told.

#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_remote::{RemoteDevice, RemoteError, RemoteOptions};
use aquifer_testkit::rng::Rng;

/// What happens to one request.
#[derive(Debug, Clone)]
pub enum Answer {
    /// The range, with the object's ETag and 206; 412 if `If-Match` differs and the server honours it.
    Proper,
    /// A status without a body of the object, with `Retry-After: 0`.
    Status(u16),
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
    /// The connection is reset before an answer.
    Reset,
    /// No answer until the client gives up.
    Silence,
    /// As `Proper`, after other requests have had time to come.
    Late,
    /// As `Proper`, with this ETag or none.
    Etag(Option<&'static str>),
}

/// One version of the object.
#[derive(Debug, Clone)]
pub struct Object {
    pub bytes: Arc<Vec<u8>>,
    pub etag: Option<String>,
    pub modified: &'static str,
}

/// Dates of versions.
pub const OLD: &str = "Wed, 21 Oct 2015 07:28:00 GMT";
pub const NEW: &str = "Wed, 21 Oct 2015 07:28:01 GMT";

pub struct Asked {
    pub head: String,
    pub range: Option<Range<usize>>,
}

type Plan = Box<dyn Fn(usize) -> Answer + Send + Sync>;

struct State {
    object: Mutex<Object>,
    /// The answer to the request of a number, from 0 on.
    plan: Mutex<Plan>,
    honours_if_match: AtomicBool,
    asked: Mutex<Vec<Asked>>,
    at_once: AtomicUsize,
    most_at_once: AtomicUsize,
    is_ending: AtomicBool,
    connections: Mutex<Vec<(TcpStream, JoinHandle<()>)>>,
}

pub struct Server {
    state: Arc<State>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn new(bytes: Vec<u8>) -> Server {
        // Proxies of the environment do not reach this server.
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: the standard library's readers take a lock; C code reads the environment in requests only, which
            // begin after this.
            unsafe { std::env::set_var("NO_PROXY", "127.0.0.1") };
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            object: Mutex::new(Object {
                bytes: Arc::new(bytes),
                etag: Some("\"v1\"".into()),
                modified: OLD,
            }),
            plan: Mutex::new(Box::new(|_| Answer::Proper)),
            honours_if_match: AtomicBool::new(true),
            asked: Mutex::default(),
            at_once: AtomicUsize::new(0),
            most_at_once: AtomicUsize::new(0),
            is_ending: AtomicBool::new(false),
            connections: Mutex::default(),
        });
        let accepting = state.clone();
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if accepting.is_ending.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (state, copy) = (accepting.clone(), stream.try_clone().unwrap());
                let serving = std::thread::spawn(move || {
                    let _ = serve(&state, stream);
                });
                accepting.connections.lock().unwrap().push((copy, serving));
            }
        });
        Server { state, address, thread: Some(thread) }
    }

    pub fn url(&self) -> String {
        format!("http://{}/dir/object.bin?X-Signature=hunter2", self.address)
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
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

    pub fn plan(&self, plan: impl Fn(usize) -> Answer + Send + Sync + 'static) {
        let mut current = self.state.plan.lock().unwrap();
        self.state.asked.lock().unwrap().clear();
        *current = Box::new(plan);
    }

    pub fn ignore_if_match(&self) {
        self.state.honours_if_match.store(false, Ordering::SeqCst);
    }

    pub fn replace(&self, bytes: Vec<u8>, etag: Option<&str>) {
        let mut object = self.state.object.lock().unwrap();
        object.bytes = Arc::new(bytes);
        object.etag = etag.map(str::to_owned);
    }

    pub fn date(&self, modified: &'static str) {
        self.state.object.lock().unwrap().modified = modified;
    }

    /// The requests since the last plan.
    pub fn asked(&self) -> std::sync::MutexGuard<'_, Vec<Asked>> {
        self.state.asked.lock().unwrap()
    }

    pub fn most_at_once(&self) -> usize {
        self.state.most_at_once.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.is_ending.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.take().unwrap().join();
        for (stream, thread) in self.state.connections.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
            let _ = thread.join();
        }
    }
}

/// Few retries, and a timeout that no working request reaches.
pub fn quick() -> RemoteOptions {
    RemoteDevice::options().retries(2).timeout(Duration::from_secs(60))
}

fn serve(state: &State, stream: TcpStream) -> std::io::Result<()> {
    // Head and body are written apart: without it each answer would wait for an acknowledgement.
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
        let now = state.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        state.most_at_once.fetch_max(now, Ordering::SeqCst);
        if !answer(state, &head, &stream)? {
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return Ok(());
        }
    }
}

fn header<'a>(head: &'a str, wanted: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case(wanted).then_some(value.trim())
    })
}

/// Answers one request; false if the connection ends with it.
fn answer(state: &State, head: &str, mut stream: &TcpStream) -> std::io::Result<bool> {
    let object = state.object.lock().unwrap().clone();
    let len = object.bytes.len();
    let range = header(head, "range").map(|text| {
        let (first, last) = text.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        first.parse::<usize>().unwrap()..last.parse::<usize>().unwrap() + 1
    });
    let action = {
        let plan = state.plan.lock().unwrap();
        let mut asked = state.asked.lock().unwrap();
        asked.push(Asked { head: head.to_owned(), range: range.clone() });
        plan(asked.len() - 1)
    };
    if let Answer::Late = action {
        std::thread::sleep(Duration::from_millis(20));
    }
    // Before the client can know that the request is done.
    state.at_once.fetch_sub(1, Ordering::SeqCst);
    let mut etag = object.etag.clone();
    let mut simple = |status: u16, extra: &str| {
        let body = "<Error><Message>hunter2</Message></Error>";
        let len = body.len();
        let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {len}\r\n{extra}\r\n{body}");
        stream.write_all(head.as_bytes()).map(|()| true)
    };
    match &action {
        Answer::Status(status) => return simple(*status, "Retry-After: 0\r\n"),
        Answer::Reset => {
            rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?;
            return Ok(false);
        }
        Answer::Silence => {
            let _ = stream.read(&mut [0; 1]);
            return Ok(false);
        }
        Answer::Etag(other) => etag = other.map(str::to_owned),
        _ => {}
    }
    if state.honours_if_match.load(Ordering::SeqCst)
        && let Some(wanted) = header(head, "if-match")
        && Some(wanted) != etag.as_deref()
    {
        return simple(412, "");
    }
    let etag = etag.map_or_else(String::new, |etag| format!("ETag: {etag}\r\n"));
    let whole = matches!(action, Answer::Whole) || range.is_none();
    let asked = range.unwrap_or(0..len);
    if !whole && asked.start >= len {
        return simple(416, &format!("Content-Range: bytes */{len}\r\n"));
    }
    let asked = if whole { 0..len } else { asked.start..asked.end.min(len) };
    let mut sent = asked.clone();
    if let Answer::OtherRange = action {
        sent = if asked.start > 0 { 0..asked.len() } else { 1..asked.len() + 1 };
    }
    let mut body = object.bytes[sent.clone()].to_vec();
    match action {
        Answer::Short(by) => body.truncate(body.len().saturating_sub(by)),
        Answer::Long(by) => body.resize(body.len() + by, 0),
        _ => {}
    }
    let total = if let Answer::OtherTotal(total) = action { total } else { len as u64 };
    let content_range = match action {
        Answer::NoRange => String::new(),
        _ if whole => String::new(),
        _ => format!("Content-Range: bytes {}-{}/{total}\r\n", sent.start, sent.end - 1),
    };
    let status = if whole { 200 } else { 206 };
    let head = format!(
        "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nLast-Modified: {}\r\n{etag}{content_range}\r\n",
        body.len(),
        object.modified
    );
    stream.write_all(head.as_bytes())?;
    if let Answer::Cut = action {
        stream.write_all(&body[..body.len() / 2])?;
        return Ok(false);
    }
    stream.write_all(&body)?;
    Ok(true)
}

/// Bytes that differ from place to place.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..len.div_ceil(8)).flat_map(|_| rng.next_u64().to_le_bytes()).take(len).collect()
}

/// The remote device's error in another one.
pub fn remote<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a RemoteError {
    RemoteError::find(error).unwrap_or_else(|| panic!("no remote error: {error:?}"))
}
