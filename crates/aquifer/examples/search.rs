//! A text search over a source tree: finds the lines that contain a string.
//!
//! ```sh
//! cargo run --release --example search -- 'struct stat' /usr/include
//! cargo run --release --example search -- --with mapper --repeat 5 --count main /usr/include
//! ```
//!
//! Skips hidden files and directories, and binary files: those with a zero byte near their start.
//! Symbolic links are not followed. Threads share a list of directories to search. Each file is
//! read in one of three ways, to compare them and to copy from:
//!
//! * `read`: into a buffer that each thread keeps. The fastest for a single pass over small files.
//! * `mmap`: a mapping for each file. Unsafe: a process that truncates a file during the search
//!   crashes this program.
//! * `mapper`: a view ([`Mapper`]). Truncation of a file gives an error here; a file that is
//!   searched again is still mapped, which `--repeat` shows.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use aquifer::{FileAccess, MapError, Mapper};
use memchr::{memchr, memchr_iter, memmem};

const USAGE: &str =
    "search [--with read|mmap|mapper] [--threads N] [--repeat N] [--count] TEXT [PATH]…";
/// This many bytes of a file decide whether it is text.
const LOOKED_AT: usize = 8 << 10;
const BUFFER_BYTES: usize = 64 << 10;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    match run() {
        Ok(found) if found => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(error) => {
            eprintln!("search: {error}");
            ExitCode::from(2)
        }
    }
}

#[derive(Clone, Copy)]
enum With {
    Read,
    Mmap,
    Mapper,
}

struct Options {
    with: With,
    threads: usize,
    repeat: usize,
    only_count: bool,
    text: Vec<u8>,
    paths: Vec<PathBuf>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Options, Failure> {
        let mut options = Options {
            with: With::Mapper,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            repeat: 1,
            only_count: false,
            text: Vec::new(),
            paths: Vec::new(),
        };
        let mut text = None;
        let mut options_end = false;
        while let Some(argument) = arguments.next() {
            let is_option = !options_end && argument.as_bytes().starts_with(b"-");
            match argument.to_str().filter(|_| is_option) {
                Some("--") => options_end = true,
                Some("--count") => options.only_count = true,
                Some("--with") => {
                    options.with = match value("--with", &mut arguments)?.as_str() {
                        "read" => With::Read,
                        "mmap" => With::Mmap,
                        "mapper" => With::Mapper,
                        other => Err(format!("--with {other}: name read, mmap or mapper"))?,
                    }
                }
                Some("--threads") => options.threads = positive("--threads", &mut arguments)?,
                Some("--repeat") => options.repeat = positive("--repeat", &mut arguments)?,
                _ if is_option => Err(format!("{}: no such option\n{USAGE}", argument.display()))?,
                _ if text.is_none() => text = Some(argument.as_bytes().to_vec()),
                _ => options.paths.push(argument.into()),
            }
        }
        options.text = text.filter(|text| !text.is_empty()).ok_or(USAGE)?;
        if memchr(b'\n', &options.text).is_some() {
            Err("the text is looked for in lines: it cannot have a line break")?;
        }
        if options.paths.is_empty() {
            options.paths.push(".".into());
        }
        Ok(options)
    }
}

fn value(name: &str, rest: &mut impl Iterator<Item = OsString>) -> Result<String, Failure> {
    let value = rest.next().and_then(|value| value.into_string().ok());
    value.ok_or_else(|| format!("{name} needs a value behind it\n{USAGE}").into())
}

fn positive(name: &str, rest: &mut impl Iterator<Item = OsString>) -> Result<usize, Failure> {
    let value = value(name, rest)?;
    let number = usize::from_str(&value).ok().filter(|&number| number > 0);
    number.ok_or_else(|| format!("{name} {value}: give a number from 1 on").into())
}

fn run() -> Result<bool, Failure> {
    let options = Options::parse(std::env::args_os().skip(1))?;
    let mapper = Mapper::builder().build()?;
    let mut found = false;
    for round in 1..=options.repeat {
        let search = Search {
            options: &options,
            mapper: &mapper,
            finder: memmem::Finder::new(&options.text),
            // Only the last round prints what it finds.
            is_quiet: options.only_count || round < options.repeat,
            work: Work::new(options.paths.iter().cloned()),
            totals: Totals::default(),
        };
        let started = Instant::now();
        search.run();
        let totals = &search.totals;
        let elapsed = started.elapsed();
        found = totals.lines.load(Ordering::Relaxed) > 0;
        if options.repeat > 1 || options.only_count {
            let of = |total: &AtomicU64| total.load(Ordering::Relaxed);
            let summary = format!(
                "{} lines in {} files; {} files and {} bytes searched, {} binary, {} failed",
                of(&totals.lines),
                of(&totals.matching),
                of(&totals.files),
                of(&totals.bytes),
                of(&totals.binary),
                of(&totals.failed),
            );
            if round == options.repeat {
                print(summary.as_bytes())?;
                print(b"\n")?;
            }
            eprintln!("round {round}: {:.1} ms", elapsed.as_secs_f64() * 1e3);
        }
        let has_failed = totals.failed.load(Ordering::Relaxed) > 0;
        if round == options.repeat && has_failed && !found {
            Err("nothing found, and not all could be searched")?;
        }
    }
    Ok(found)
}

#[derive(Default)]
struct Totals {
    files: AtomicU64,
    bytes: AtomicU64,
    binary: AtomicU64,
    matching: AtomicU64,
    lines: AtomicU64,
    failed: AtomicU64,
}

/// The work list: directories, and the files named by the caller.
struct Work {
    queue: Mutex<Queue>,
    changed: Condvar,
}

struct Queue {
    waiting: VecDeque<PathBuf>,
    /// Threads that are searching a directory, and may add more.
    busy: usize,
}

impl Work {
    fn new(paths: impl Iterator<Item = PathBuf>) -> Work {
        let queue = Queue { waiting: paths.collect(), busy: 0 };
        Work { queue: Mutex::new(queue), changed: Condvar::new() }
    }

    fn add(&self, path: PathBuf) {
        self.queue.lock().expect("no thread panics here").waiting.push_back(path);
        self.changed.notify_one();
    }

    /// Returns the next entry, or `None` when all is done.
    fn take(&self) -> Option<PathBuf> {
        let mut queue = self.queue.lock().expect("no thread panics here");
        loop {
            // The newest first: depth-first order keeps the list short.
            if let Some(path) = queue.waiting.pop_back() {
                queue.busy += 1;
                return Some(path);
            }
            if queue.busy == 0 {
                return None;
            }
            queue = self.changed.wait(queue).expect("no thread panics here");
        }
    }

    fn done(&self) {
        let mut queue = self.queue.lock().expect("no thread panics here");
        queue.busy -= 1;
        if queue.busy == 0 && queue.waiting.is_empty() {
            self.changed.notify_all();
        }
    }
}

struct Search<'a> {
    options: &'a Options,
    mapper: &'a Mapper,
    finder: memmem::Finder<'a>,
    is_quiet: bool,
    work: Work,
    totals: Totals,
}

impl Search<'_> {
    fn run(&self) {
        std::thread::scope(|scope| {
            for _ in 0..self.options.threads {
                scope.spawn(|| {
                    let mut buffer = Vec::new();
                    while let Some(path) = self.work.take() {
                        if let Err(error) = self.path(&path, &mut buffer) {
                            self.failed(&path, &error);
                        }
                        self.work.done();
                    }
                });
            }
        });
    }

    fn failed(&self, path: &Path, error: &io::Error) {
        self.totals.failed.fetch_add(1, Ordering::Relaxed);
        eprintln!("search: {}: {error}", path.display());
    }

    /// Searches a directory, or a file that the caller named.
    fn path(&self, path: &Path, buffer: &mut Vec<u8>) -> io::Result<()> {
        if !fs::metadata(path)?.is_dir() {
            self.file(path, buffer);
            return Ok(());
        }
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if entry.file_name().as_bytes().starts_with(b".") {
                continue;
            }
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.work.add(entry.path());
            } else if kind.is_file() {
                self.file(&entry.path(), buffer);
            }
        }
        Ok(())
    }

    fn file(&self, path: &Path, buffer: &mut Vec<u8>) {
        let found = match self.options.with {
            With::Read => read(path, buffer).map(|bytes| self.look(path, bytes)),
            With::Mmap => mmap(path, |bytes| self.look(path, bytes)),
            With::Mapper => self.view(path),
        };
        match found {
            Ok(found) => self.count(found),
            Err(error) => self.failed(path, &error),
        }
    }

    /// The method that this example demonstrates. The output is printed only after the read has
    /// succeeded: a fault makes it an error.
    fn view(&self, path: &Path) -> io::Result<Found> {
        let view = self.mapper.map(path, FileAccess::Read, ..).map_err(plain)?;
        let look = |bytes: aquifer::Bytes<'_>| {
            // SAFETY: if another process edits a source file concurrently, the search sees old or
            // new bytes, as with any search. The bytes are only compared and copied.
            self.look(path, unsafe { bytes.as_slice() })
        };
        view.read(look).map_err(plain)
    }

    fn look(&self, path: &Path, bytes: &[u8]) -> Found {
        let mut found = Found { bytes: bytes.len() as u64, ..Found::default() };
        if memchr(0, &bytes[..bytes.len().min(LOOKED_AT)]).is_some() {
            found.is_binary = true;
            return found;
        }
        let (mut line, mut counted_to, mut at) = (1, 0, 0);
        while let Some(hit) = self.finder.find(&bytes[at..]) {
            let hit = at + hit;
            let start = memchr::memrchr(b'\n', &bytes[..hit]).map_or(0, |end| end + 1);
            let end = memchr(b'\n', &bytes[hit..]).map_or(bytes.len(), |len| hit + len);
            found.lines += 1;
            if !self.is_quiet {
                line += memchr_iter(b'\n', &bytes[counted_to..start]).count();
                counted_to = start;
                found.output.extend_from_slice(path.as_os_str().as_bytes());
                found.output.extend_from_slice(format!(":{line}:").as_bytes());
                found.output.extend_from_slice(&bytes[start..end]);
                found.output.push(b'\n');
            }
            // Each line once.
            at = (end + 1).min(bytes.len());
        }
        found
    }

    fn count(&self, found: Found) {
        let add = |total: &AtomicU64, number: u64| total.fetch_add(number, Ordering::Relaxed);
        add(&self.totals.files, 1);
        add(&self.totals.bytes, found.bytes);
        add(&self.totals.binary, u64::from(found.is_binary));
        add(&self.totals.matching, u64::from(found.lines > 0));
        add(&self.totals.lines, found.lines);
        // One call for all lines of a file: they stay together.
        if !found.output.is_empty() && print(&found.output).is_err() {
            // Standard output was closed: its reader has seen enough.
            std::process::exit(0);
        }
    }
}

#[derive(Default)]
struct Found {
    bytes: u64,
    is_binary: bool,
    lines: u64,
    output: Vec<u8>,
}

fn print(bytes: &[u8]) -> io::Result<()> {
    io::stdout().lock().write_all(bytes)
}

/// Returns the system's error, without the path, which is printed anyway.
fn plain(error: MapError) -> io::Error {
    match error {
        MapError::Open { source, .. } | MapError::Map { source, .. } => source,
        other => io::Error::other(other),
    }
}

/// Reads a whole file into a reused buffer.
fn read<'a>(path: &Path, buffer: &'a mut Vec<u8>) -> io::Result<&'a [u8]> {
    let mut file = File::open(path)?;
    let mut len = 0;
    loop {
        if buffer.len() < len + BUFFER_BYTES {
            buffer.resize((buffer.len() * 2).max(2 * BUFFER_BYTES), 0);
        }
        match file.read(&mut buffer[len..]) {
            Ok(0) => return Ok(&buffer[..len]),
            Ok(got) => len += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Maps a file for one search.
fn mmap<T>(path: &Path, look: impl FnOnce(&[u8]) -> T) -> io::Result<T> {
    let file = File::open(path)?;
    let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    if len == 0 {
        return Ok(look(&[]));
    }
    let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: mapped above. Nothing ensures that no process changes or truncates the file: that is
    // the reason for `Mapper`.
    let bytes = unsafe { std::slice::from_raw_parts(start.cast(), len) };
    let result = look(bytes);
    // SAFETY: mapped above, and not used after this.
    unsafe { libc::munmap(start, len) };
    Ok(result)
}
