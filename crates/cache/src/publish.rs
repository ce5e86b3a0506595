//! Statistics that other processes can read: the data of `aquifer stat`.
//!
//! A cache built with [`CacheBuilder::publish`](crate::CacheBuilder::publish) has a thread that
//! writes its [`Stats`] once a second:
//!
//! ```text
//! $XDG_RUNTIME_DIR/aquifer/   or   /tmp/aquifer-UID/         mode 0700, owned by the user
//!     4711-orders.json                                       process identifier and name
//! ```
//!
//! * A file is created and replaced by rename, so a reader never sees a partial one.
//! * It is removed when the cache is dropped. A killed process leaves its file behind. So the file
//!   contains the start time of the process, which distinguishes it from a live process with the
//!   same identifier, and the process namespace that the identifier belongs to.
//! * What devices count themselves ([`Device::counters`](aquifer_device::Device::counters)) is listed by device; those of
//!   equal names, and all beyond a certain length of the file, share an entry. Readers of this format skip keys that they
//!   do not know.
//! * The thread is dedicated: a directory on a slow disk must not delay the evictor. A failed write
//!   is skipped; the next one follows a second later.
//! * A directory that another user owns, or that other users can access, is refused: in `/tmp` any
//!   user can create one of that name.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_vm::worker::Bell;
use aquifer_vm::{PerProcess, ProcessMark};

use crate::engine::Engine;
use crate::error::{CacheError, Result};
use crate::stats::{HistogramSnapshot, Stats};

/// Value of `format` in the files this version writes.
pub const FORMAT: u32 = 1;

const INTERVAL: Duration = Duration::from_secs(1);
const LONGEST_NAME: usize = 64;
/// Most bytes of the list of devices: a reader takes no file beyond 64 KiB.
const DEVICES_BYTES: usize = 32 << 10;
/// The entry of devices beyond that.
const OTHER_DEVICES: &str = "others";

/// Names and values.
type DeviceCounters = Vec<(&'static str, u64)>;

/// The directories in which caches of this user may be published. A publisher uses the first one
/// that is usable.
pub fn directories() -> Vec<PathBuf> {
    let mut found = vec![];
    if let Some(runtime) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
        && runtime.is_absolute()
    {
        found.push(runtime.join("aquifer"));
    }
    found.push(PathBuf::from(format!("/tmp/aquifer-{}", user_id())));
    found
}

/// The start time of a process, in clock ticks since boot; `None` if there is no such process.
pub fn start_ticks(process: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is the command in parentheses, and may itself contain parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The namespace of process identifiers: equal for processes that see each other's identifiers.
pub fn process_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino())
}

/// The effective user identifier.
fn user_id() -> u32 {
    fs::metadata("/proc/self").map_or(0, |metadata| metadata.uid())
}

/// Names in use in this process: a second cache with the same name gets a number. File names have the
/// process's number, so a child may use its parent's.
static NAMES: PerProcess<Mutex<Vec<String>>> = PerProcess::new();

fn names() -> std::sync::MutexGuard<'static, Vec<String>> {
    NAMES.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks a name: it becomes part of a file name and is printed on other users' terminals.
fn check_name(name: &str) -> io::Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(plain) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a name is 1 to 64 letters, digits, '-', '_' and '.'",
        ));
    }
    Ok(())
}

/// Publishes one cache.
pub(crate) struct Publisher {
    name: String,
    path: PathBuf,
    temporary: PathBuf,
    started: Instant,
    start_ticks: u64,
    bell: Bell,
    mark: ProcessMark,
}

impl Publisher {
    /// Reserves the name and chooses the directory.
    pub fn new(name: &str) -> Result<Publisher> {
        let failed = |source| CacheError::Publish { name: name.to_owned(), source };
        check_name(name).map_err(failed)?;
        let directories = directories();
        let directory = prepare_first(&directories).map_err(failed)?;
        let process = std::process::id();
        let name = take_name(name);
        Ok(Publisher {
            path: directory.join(format!("{process}-{name}.json")),
            temporary: directory.join(format!(".{process}-{name}.new")),
            started: Instant::now(),
            start_ticks: start_ticks(process).unwrap_or(0),
            bell: Bell::new(),
            mark: ProcessMark::new(),
            name,
        })
    }

    /// Writes the cache's statistics.
    ///
    /// # Errors
    /// [`CacheError::Publish`].
    pub fn write(&self, engine: &Engine) -> Result<()> {
        let text = self.to_json(&engine.stats(), engine.device_counters());
        let write = || {
            fs::write(&self.temporary, &text)?;
            fs::rename(&self.temporary, &self.path)
        };
        write().map_err(|source| CacheError::Publish { name: self.name.clone(), source })
    }

    /// The loop of the publishing thread: writes until [`Publisher::stop`].
    pub fn run(&self, engine: &Engine) {
        while self.bell.pause(INTERVAL) {
            // Ignore a failure, such as a full disk: see the module documentation.
            let _ = self.write(engine);
        }
    }

    /// Ends the publishing thread.
    pub fn stop(&self) {
        self.bell.stop();
    }

    fn to_json(&self, stats: &Stats, devices: Vec<(String, DeviceCounters)>) -> String {
        let page_bytes = stats.page_bytes;
        let command = fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut text = String::with_capacity(2048);
        let numbers = [
            ("format", u128::from(FORMAT)),
            ("pid", u128::from(std::process::id())),
            ("start_ticks", u128::from(self.start_ticks)),
            ("pid_namespace", u128::from(process_namespace())),
            ("unix_ms", now.as_millis()),
            ("uptime_ms", self.started.elapsed().as_millis()),
            ("page_bytes", u128::from(page_bytes)),
            ("budget_bytes", u128::from(stats.budget_bytes)),
            ("resident_bytes", u128::from(stats.resident_pages * page_bytes)),
            ("dirty_bytes", u128::from(stats.dirty_pages * page_bytes)),
            ("kernel_resident_bytes", u128::from(stats.kernel_resident_pages * page_bytes)),
        ];
        text.push('{');
        for (key, value) in numbers {
            let _ = write!(text, "\"{key}\":{value},");
        }
        for (key, value) in
            [("name", &*self.name), ("command", command.trim_end()), ("policy", stats.policy)]
        {
            let _ = write!(text, "\"{key}\":");
            push_string(&mut text, value);
            text.push(',');
        }
        text.push_str("\"counters\":{");
        for (index, (name, value)) in stats.counters().into_iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let _ = write!(text, "{comma}\"{name}\":{value}");
        }
        text.push('}');
        push_histogram(&mut text, "fault_service_ns", &stats.fault_service_ns);
        push_histogram(&mut text, "write_back_bytes", &stats.write_back_bytes);
        push_devices(&mut text, devices);
        text.push_str("}\n");
        text
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // A fork has a copy of this, but the files belong to the parent's cache.
        if self.mark.is_current() {
            let _ = fs::remove_file(&self.path);
            let _ = fs::remove_file(&self.temporary);
            names().retain(|name| *name != self.name);
        }
    }
}

/// Reserves the name, or the first of `name.2`, `name.3`, … that is unused.
fn take_name(name: &str) -> String {
    let mut names = names();
    let mut taken = name.to_owned();
    for number in 2.. {
        if !names.contains(&taken) {
            break;
        }
        taken = format!("{name}.{number}");
    }
    names.push(taken.clone());
    taken
}

/// The first usable directory; if none is, the first one's error.
fn prepare_first(directories: &[PathBuf]) -> io::Result<&Path> {
    let mut first_error = None;
    for directory in directories {
        match prepare(directory) {
            Ok(()) => return Ok(directory),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    Err(first_error.unwrap_or_else(|| io::Error::other("no directory to publish in")))
}

/// Creates a private directory, or checks that an existing one is private.
fn prepare(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other?,
    }
    let found = fs::symlink_metadata(directory)?;
    if !found.is_dir() || found.uid() != user_id() || found.mode() & 0o077 != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} exists and is not a private directory of yours", directory.display()),
        ));
    }
    Ok(())
}

fn push_histogram(text: &mut String, name: &str, values: &HistogramSnapshot) {
    let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|quantile| values.quantile(quantile));
    let count = values.count();
    let _ = write!(
        text,
        ",\"{name}\":{{\"count\":{count},\"p50\":{p50},\"p99\":{p99},\"p999\":{p999}}}"
    );
}

/// Appends the counters of devices, if there are any.
fn push_devices(text: &mut String, devices: Vec<(String, DeviceCounters)>) {
    let mut merged = BTreeMap::<String, BTreeMap<&str, u64>>::new();
    for (name, counters) in devices {
        let sums = merged.entry(name).or_default();
        for (name, value) in counters {
            let sum = sums.entry(name).or_default();
            // Of values that rise and fall the last one counts.
            *sum = if name.ends_with("_now") { value } else { sum.saturating_add(value) };
        }
    }
    if merged.is_empty() {
        return;
    }
    let mut others = BTreeMap::<&str, u64>::new();
    let mut list = String::new();
    for (name, counters) in merged {
        let mut entry = String::new();
        push_device(&mut entry, &name, &counters);
        if list.len() + entry.len() <= DEVICES_BYTES {
            list.push_str(&entry);
            continue;
        }
        for (name, value) in counters.into_iter().filter(|(name, _)| !name.ends_with("_now")) {
            let sum = others.entry(name).or_default();
            *sum = sum.saturating_add(value);
        }
    }
    if !others.is_empty() {
        push_device(&mut list, OTHER_DEVICES, &others);
    }
    let _ = write!(text, ",\"devices\":[{}]", list.trim_end_matches(','));
}

fn push_device(list: &mut String, name: &str, counters: &BTreeMap<&str, u64>) {
    list.push_str("{\"name\":");
    push_string(list, name);
    let counters: Vec<_> =
        counters.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    let _ = write!(list, ",\"counters\":{{{}}}}},", counters.join(","));
}

/// Appends a JSON string.
fn push_string(text: &mut String, value: &str) {
    text.push('"');
    for c in value.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(text, "\\u{:04x}", u32::from(c));
            }
            c => text.push(c),
        }
    }
    text.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn names_are_checked() {
        let long = "x".repeat(65);
        for wrong in ["", "a/b", "a b", "\u{1b}[2J", "ü", long.as_str()] {
            assert!(check_name(wrong).is_err(), "{wrong:?}");
        }
        for right in ["a", "orders-2.main_x", &long[1..]] {
            assert!(check_name(right).is_ok(), "{right:?}");
        }
    }

    #[test]
    fn a_name_twice_gets_a_number() {
        let name = "publish-unit-test";
        assert_eq!(take_name(name), name);
        assert_eq!(take_name(name), format!("{name}.2"));
        names().retain(|taken| !taken.starts_with(name));
        assert_eq!(take_name(name), name);
        names().retain(|taken| !taken.starts_with(name));
    }

    #[test]
    fn strings_are_escaped() {
        let mut text = String::new();
        push_string(&mut text, "a\"b\\c\nd");
        assert_eq!(text, "\"a\\\"b\\\\c\\u000ad\"");
    }

    #[test]
    fn devices_of_one_name_and_too_many_share_an_entry() {
        let mut text = String::new();
        push_devices(&mut text, vec![]);
        assert_eq!(text, "");
        let device = |name: &str, requests| {
            (name.to_owned(), vec![("requests", requests), ("latency_ns_now", requests)])
        };
        push_devices(&mut text, vec![device("b\"", 1), device("a", 2), device("a", 3)]);
        let expected = ",\"devices\":[{\"name\":\"a\",\"counters\":{\"latency_ns_now\":3,\"requests\":5}},\
            {\"name\":\"b\\\"\",\"counters\":{\"latency_ns_now\":1,\"requests\":1}}]";
        assert_eq!(text, expected);
        text.clear();
        let many = (0..2000).map(|number| device(&format!("s3://bucket/{number:04}"), u64::MAX));
        push_devices(&mut text, many.chain([device(&"\u{1b}".repeat(20_000), 1)]).collect());
        assert!(text.len() <= DEVICES_BYTES + 200, "{}", text.len());
        let others = format!("{{\"name\":\"others\",\"counters\":{{\"requests\":{}}}}}]", u64::MAX);
        assert!(text.ends_with(&others), "{text}");
    }

    #[test]
    fn only_private_directories_are_taken() {
        let outer = tempfile::tempdir().unwrap();
        let [fresh, open, file] = ["fresh", "open", "file"].map(|name| outer.path().join(name));
        prepare(&fresh).unwrap();
        assert_eq!(fs::metadata(&fresh).unwrap().mode() & 0o777, 0o700);
        prepare(&fresh).unwrap();
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(&file, "").unwrap();
        let link = outer.path().join("link");
        std::os::unix::fs::symlink(&fresh, &link).unwrap();
        for refused in [&open, &file, &link] {
            assert!(prepare(refused).is_err(), "{}", refused.display());
        }
        let missing = outer.path().join("no/such");
        assert_eq!(prepare_first(&[missing, open, fresh.clone()]).unwrap(), fresh);
    }

    #[test]
    fn a_process_has_one_start() {
        let own = start_ticks(std::process::id()).unwrap();
        assert!(own > 0);
        assert!(start_ticks(1).is_none_or(|init| init <= own));
        assert_eq!(start_ticks(u32::MAX), None);
    }
}
