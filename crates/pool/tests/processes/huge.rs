//! Pools on huge pages: processes share the page tables of the linear mapping, so that a second one
//! hardly faults.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::PathBuf;

use aquifer_pool::media::{self, WriteWindows};
use aquifer_pool::{Pool, PoolOptions};
use aquifer_testkit::child;
use aquifer_vm::WindowKey;

/// The range of one shared table of page tables.
const POOL_BYTES: u64 = 1 << 30;
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Without sharing there are 512.
const MOST_FAULTS: u64 = 16;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("read all, as a writer", || read_all(&Pool::options())),
    ("read all, as a guarded writer", || read_all(&guarded())),
    ("read all, as a reader", || read_all(&reading())),
];

fn reading() -> PoolOptions {
    Pool::options().read_only(true)
}

fn guarded() -> PoolOptions {
    Pool::options().write_windows(WriteWindows::Keys)
}

/// Huge pages that are available while this lives.
struct Pages {
    taken: u64,
    /// Locked, so that other runs wait: the number cannot be changed by two at the same time.
    _alone: File,
}

const COUNT: &str = "/proc/sys/vm/nr_hugepages";

fn number_in(path: &str, line: &str) -> u64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|found| found.strip_prefix(line)).unwrap_or("0");
    line.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

impl Pages {
    /// Uses free huge pages, or allocates as many as are missing, if the system has them and
    /// permits it.
    fn take(pages: u64) -> Result<Pages, String> {
        if number_in("/proc/meminfo", "Hugepagesize:") << 10 != HUGE_PAGE_BYTES {
            return Err("huge pages are not of 2 MiB here".to_owned());
        }
        let alone = File::open(COUNT).and_then(|file| file.lock().map(|()| file));
        let _alone = alone.map_err(|error| format!("{COUNT}: {error}"))?;
        let is_enough = || {
            let found = |line| number_in("/proc/meminfo", line);
            found("HugePages_Free:").saturating_sub(found("HugePages_Rsvd:")) >= pages
        };
        if is_enough() {
            return Ok(Pages { taken: 0, _alone });
        }
        let before = number_in(COUNT, "");
        let asked = std::fs::write(COUNT, (before + pages).to_string());
        asked.map_err(|error| format!("no huge pages are free, and {COUNT}: {error}"))?;
        // Dropping it gives them back if they are not enough.
        let taken = Pages { taken: number_in(COUNT, "").saturating_sub(before), _alone };
        if is_enough() {
            Ok(taken)
        } else {
            Err(format!("the system found {} of {pages} huge pages", taken.taken))
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Another process may have changed the number: subtract only what was added.
        if self.taken > 0 {
            let now = number_in(COUNT, "");
            std::fs::write(COUNT, now.saturating_sub(self.taken).to_string()).unwrap();
        }
    }
}

/// Reads a word of each small page of the pool.
fn touch_all(pool: &Pool) {
    for offset_bytes in (0..POOL_BYTES).step_by(4096) {
        pool.load(offset_bytes, &mut [0; 8]).unwrap();
    }
}

fn minor_faults() -> i64 {
    // SAFETY: all-zero is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a structure that outlives the call.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) }, 0);
    usage.ru_minflt
}

fn read_all(options: &PoolOptions) {
    let path = std::env::var_os("POOL").expect("set by the parent");
    let pool = options.clone().background(false).open(path).unwrap();
    let before = minor_faults();
    touch_all(&pool);
    println!("{} faults", minor_faults() - before);
}

fn faults_of(role: &str, pool: &PathBuf) -> u64 {
    let played = child::command(role).env("POOL", pool).output().unwrap();
    let said = String::from_utf8_lossy(&played.stdout);
    let found = said.lines().find_map(|line| line.strip_suffix(" faults")?.parse().ok());
    found.unwrap_or_else(|| panic!("{role}: {played:?}"))
}

/// A second process with the same access uses the page tables of the first. Readers do not share
/// them with writers: the kernel distinguishes mappings by how the file was opened, even if they
/// are read-only.
#[test]
fn a_second_process_hardly_faults() {
    let _pages = match Pages::take(POOL_BYTES / HUGE_PAGE_BYTES) {
        Ok(pages) => pages,
        Err(reason) => return eprintln!("skipped: {reason}"),
    };
    // SAFETY: a NUL-terminated name.
    let file = unsafe {
        libc::memfd_create(
            c"pool".as_ptr(),
            libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
        )
    };
    assert!(file >= 0);
    // SAFETY: a new descriptor, which nothing else owns.
    let file = unsafe { File::from_raw_fd(file) };
    file.set_len(POOL_BYTES).unwrap();
    let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
    let options = Pool::options();
    let made = media::OpenOptions::new().writable(true).open_file(file.try_clone().unwrap(), &path);
    drop(options.create_on(made.unwrap()).unwrap());

    let mut roles =
        vec![("read all, as a writer", Pool::options()), ("read all, as a reader", reading())];
    match WindowKey::of_process() {
        Ok(_) => roles.push(("read all, as a guarded writer", guarded())),
        Err(error) => eprintln!("skipped: no protection keys here ({error})"),
    }
    for (role, options) in roles {
        let first = options.background(false).open(&path).unwrap();
        touch_all(&first);
        let faults = faults_of(role, &path);
        println!("{role}: {faults} faults of the second process");
        assert!(faults <= MOST_FAULTS, "{role}: {faults} faults");
    }
}
