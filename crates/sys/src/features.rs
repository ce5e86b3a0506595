//! Probes of the features that the running kernel offers.

use std::fs::{self, File, OpenOptions};
use std::io;

use linux_raw_sys::general as raw;
use once_cell::race::OnceBool;

use crate::memory::{self, Advice, Protection, Range, SMALL_PAGE_BYTES};
use crate::page_faults::FaultLog;
use crate::pagemap::Pagemap;
use crate::pkey;
use crate::thread;
use crate::uffd::{Delivery, Uffd};

/// The result of one probe.
#[derive(Debug, Clone)]
pub struct Probe {
    /// The kernel's name for the feature.
    pub name: &'static str,
    /// Whether it works for this process.
    pub available: bool,
    /// What Aquifer uses it for, and what it does without it.
    pub purpose: &'static str,
    /// Details, or the reason why it is not available.
    pub detail: String,
}

/// Whether the environment forbids a feature: the variable is set and neither empty nor `0`.
pub fn is_forbidden(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty() && value != "0")
}

fn probe(name: &'static str, purpose: &'static str, result: io::Result<String>) -> Probe {
    match result {
        Ok(detail) => Probe { name, available: true, purpose, detail },
        Err(error) => Probe { name, available: false, purpose, detail: error.to_string() },
    }
}

/// Checks that `process_madvise` accepts `MADV_DONTNEED` on the calling process (from Linux 6.13).
pub fn vectored_dontneed() -> io::Result<()> {
    let base = memory::map_anonymous(SMALL_PAGE_BYTES)?;
    let range = [Range { address: base, len_bytes: SMALL_PAGE_BYTES }];
    // SAFETY: the page was mapped for this.
    let result = unsafe { memory::advise_many(&range, Advice::DontNeed) };
    // SAFETY: mapped above, and no other code has its address.
    unsafe { memory::unmap(base, SMALL_PAGE_BYTES) }?;
    result.map(drop)
}

/// Returns the running kernel's major and minor version. By libc, as [`limits`]: rustix takes these
/// calls for ones that cannot fail, and a sandbox may refuse them.
pub fn kernel_version() -> Option<(u32, u32)> {
    // SAFETY: an all-zero utsname is valid.
    let mut name: libc::utsname = unsafe { std::mem::zeroed() };
    // SAFETY: fills in the structure on this stack.
    unsafe { libc::uname(&raw mut name) };
    // SAFETY: the kernel ends it with a zero byte.
    let release = unsafe { std::ffi::CStr::from_ptr(name.release.as_ptr()) };
    version_of(release.to_str().ok()?)
}

fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Returns whether one `MADV_DONTNEED` over many mappings works and flushes the TLB once for all of
/// them. Kernels before Linux 6.16 flush once for each. That can only be measured, so the version
/// decides.
pub fn range_dontneed_flushes_once() -> bool {
    static FOUND: OnceBool = OnceBool::new();
    FOUND.get_or_init(|| {
        kernel_version().is_some_and(|version| version >= (6, 16))
            && dontneed_over_two_mappings().unwrap_or(false)
    })
}

fn dontneed_over_two_mappings() -> io::Result<bool> {
    let base = memory::map_anonymous(2 * SMALL_PAGE_BYTES)?;
    let second = base.wrapping_add(SMALL_PAGE_BYTES);
    let mut bytes = [1u8; 2];
    let dropped = (|| {
        for page in [base, second] {
            // SAFETY: inside the fresh mapping.
            unsafe { page.write_volatile(1) };
        }
        // SAFETY: mapped for this, and only read from now on.
        unsafe { memory::protect(second, SMALL_PAGE_BYTES, Protection::Read) }?;
        // SAFETY: as above.
        unsafe { memory::advise(base, 2 * SMALL_PAGE_BYTES, Advice::DontNeed) }?;
        for (byte, page) in bytes.iter_mut().zip([base, second]) {
            // SAFETY: readable.
            *byte = unsafe { page.read_volatile() };
        }
        Ok(bytes == [0; 2])
    })();
    // SAFETY: mapped above, and no other code has their address.
    unsafe { memory::unmap(base, 2 * SMALL_PAGE_BYTES) }?;
    dropped
}

/// Checks that userfaultfd in SIGBUS mode works for this process, and returns its feature bits.
pub fn userfaultfd_sigbus() -> io::Result<u64> {
    Uffd::open(Delivery::Sigbus).map(|uffd| uffd.features())
}

fn userfaultfd_all_features() -> io::Result<String> {
    let bits = Uffd::open(Delivery::Message { kernel_faults: false })?.features();
    let known = [
        (raw::UFFD_FEATURE_POISON, "POISON"),
        (raw::UFFD_FEATURE_WP_ASYNC, "WP_ASYNC"),
        (raw::UFFD_FEATURE_MOVE, "MOVE"),
    ];
    let named = known.iter().filter(|(bit, _)| bits & u64::from(*bit) != 0).map(|(_, name)| *name);
    let names: Vec<_> = std::iter::once("COPY").chain(named).collect();
    Ok(format!("{} ({bits:#x})", names.join(", ")))
}

fn io_uring() -> io::Result<String> {
    let mut params = [0u8; 120];
    // SAFETY: io_uring_setup fills in at most a struct io_uring_params of 120 bytes.
    let fd =
        crate::check(unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params.as_mut_ptr()) })
            .map_err(|error| {
                let switched_off = read_word("/proc/sys/kernel/io_uring_disabled")
                    .is_ok_and(|value| value.trim() != "0");
                if switched_off {
                    io::Error::new(error.kind(), "switched off by kernel.io_uring_disabled")
                } else {
                    error
                }
            })?;
    // SAFETY: the descriptor was just made here.
    unsafe { libc::close(fd as i32) };
    Ok(String::new())
}

fn cachestat() -> io::Result<String> {
    use std::os::fd::AsFd;
    let file = File::open("/proc/self/exe")?;
    memory::cachestat(file.as_fd(), 0, 0).map(|_| String::new())
}

/// Runs `work` with one page of zeroed memory.
fn with_page<T>(work: impl FnOnce(*mut u8) -> io::Result<T>) -> io::Result<T> {
    let page = memory::map_anonymous(SMALL_PAGE_BYTES)?;
    let result = work(page);
    // SAFETY: mapped above, and no other code has its address.
    unsafe { memory::unmap(page, SMALL_PAGE_BYTES) }?;
    result
}

/// Checks that PAGEMAP_SCAN works (from Linux 6.7).
pub fn pagemap_scan() -> io::Result<()> {
    Pagemap::open()?.can_scan()
}

/// Checks that stores can be tracked without a signal for each: a userfaultfd with WP_ASYNC (Linux
/// 6.7, and no seccomp filter in the way).
pub fn tracked_stores() -> io::Result<()> {
    Uffd::open_tracking().map(drop)
}

fn advice(advice: Advice) -> io::Result<String> {
    with_page(|page| {
        // SAFETY: the page is new, and none of the advice tried here loses contents.
        unsafe { memory::advise(page, SMALL_PAGE_BYTES, advice) }.map(|()| String::new())
    })
}

fn read_word(path: &str) -> io::Result<String> {
    fs::read_to_string(path)
        .map(|text| text.trim().to_owned())
        .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
}

/// Transparent huge pages, which back the frames of `Pages`.
fn huge_pages() -> io::Result<String> {
    let modes = read_word("/sys/kernel/mm/transparent_hugepage/enabled")?;
    let mode = modes.split(['[', ']']).nth(1).unwrap_or("unknown").to_owned();
    if mode == "never" { Err(io::Error::other("set to `never`")) } else { Ok(mode) }
}

fn stay_awake() -> io::Result<String> {
    // Opening it changes nothing: a request is made by writing to it.
    OpenOptions::new().write(true).open("/dev/cpu_dma_latency").map(|_| String::new())
}

/// Probes every feature that the engine can use.
pub fn probe_all() -> Vec<Probe> {
    vec![
        probe(
            "userfaultfd, SIGBUS mode",
            "mappings served by the faulting thread; without it no user backend",
            userfaultfd_sigbus().map(|_| String::new()),
        ),
        probe(
            "userfaultfd, operations",
            "how pages are installed and taken out",
            userfaultfd_all_features(),
        ),
        probe(
            "userfaultfd, faults of system calls",
            "the serving thread (privileged); without it memory is pinned for system calls",
            Uffd::open(Delivery::Message { kernel_faults: true }).map(|_| String::new()),
        ),
        probe(
            "process_madvise(DONTNEED)",
            "evicts many pages with one call (Linux 6.13; one shootdown from 6.16); otherwise by region",
            vectored_dontneed().map(|()| String::new()),
        ),
        probe(
            "io_uring",
            "batches and write-back at queue depth; otherwise a pool of threads",
            io_uring(),
        ),
        probe(
            "cachestat",
            "tells what the page cache holds (Linux 6.5); otherwise mincore",
            cachestat(),
        ),
        probe(
            "PAGEMAP_SCAN",
            "finds the pages of an object that were stored to (Linux 6.7); otherwise entry by entry",
            pagemap_scan().map(|()| String::new()),
        ),
        probe(
            "userfaultfd, WP_ASYNC",
            "tells which of them were stored to again (Linux 6.7); otherwise they are compared",
            tracked_stores().map(|()| String::new()),
        ),
        probe(
            "perf_event_open, page faults",
            "a psync scans the pages that faulted; otherwise the whole object",
            FaultLog::open(thread::this_thread()).map(|_| String::new()),
        ),
        probe(
            "MADV_POPULATE_READ",
            "maps ranges without faults (Linux 5.14)",
            advice(Advice::PopulateRead),
        ),
        probe("MADV_COLD", "marks pages as the next victims", advice(Advice::Cold)),
        probe("transparent huge pages", "frames of Pages; otherwise small pages", huge_pages()),
        probe(
            "protection keys",
            "write windows of pools without system calls; otherwise with",
            pkey::probe().map(|()| String::new()),
        ),
        probe(
            "/dev/cpu_dma_latency",
            "benches keep the processor awake; otherwise waking it is measured too",
            stay_awake(),
        ),
    ]
}

/// Limits set by the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of mappings of a process (`vm.max_map_count`).
    pub max_mappings: Option<u64>,
    /// Current number of mappings of this process.
    pub mappings: Option<u64>,
    /// Bytes that may be locked (`RLIMIT_MEMLOCK`); `None` if unlimited.
    pub locked_bytes: Option<u64>,
    /// Bytes of address space (`RLIMIT_AS`); `None` if unlimited.
    pub address_space_bytes: Option<u64>,
    /// Open files (`RLIMIT_NOFILE`); `None` if unlimited.
    pub open_files: Option<u64>,
    /// Physical memory, or the memory control group's limit.
    pub memory_bytes: u64,
}

/// Reads the current limits.
pub fn limits() -> Limits {
    let bound = |resource| {
        let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
        // SAFETY: fills in the structure on this stack.
        unsafe { libc::getrlimit(resource, &raw mut limit) };
        (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
    };
    Limits {
        max_mappings: read_word("/proc/sys/vm/max_map_count").ok().and_then(|n| n.parse().ok()),
        mappings: fs::read_to_string("/proc/self/maps")
            .ok()
            .map(|maps| maps.lines().count() as u64),
        locked_bytes: bound(libc::RLIMIT_MEMLOCK),
        address_space_bytes: bound(libc::RLIMIT_AS),
        open_files: bound(libc::RLIMIT_NOFILE),
        memory_bytes: crate::cpu::memory_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_probe_says_something() {
        for probe in probe_all() {
            assert!(!probe.name.is_empty() && !probe.purpose.is_empty());
            assert!(probe.available || !probe.detail.is_empty(), "{} gives no reason", probe.name);
        }
    }

    #[test]
    fn the_numbers_of_a_kernel_are_its_first_two() {
        assert_eq!(version_of("6.18.44"), Some((6, 18)));
        assert_eq!(version_of("5.15.0-91-generic"), Some((5, 15)));
        assert_eq!(version_of("7.0-rc1"), Some((7, 0)));
        assert_eq!(version_of("unknown"), None);
        assert!(kernel_version().is_some_and(|version| version >= (4, 0)));
    }

    #[test]
    fn limits_are_plausible() {
        let limits = limits();
        assert!(limits.memory_bytes > 1 << 20);
        assert!(limits.mappings.is_none_or(|count| count > 3));
    }
}
