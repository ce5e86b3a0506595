//! What the running kernel offers, found by trying.

use std::io;

use crate::memory::{self, Advice, Range, SMALL_PAGE_BYTES};
use crate::uffd::{Delivery, Uffd};

/// One thing that was tried.
#[derive(Debug, Clone)]
pub struct Probe {
    /// The kernel's name for it.
    pub name: &'static str,
    /// Whether it works for this process.
    pub available: bool,
    /// Version or reason.
    pub detail: String,
}

fn probe(name: &'static str, result: io::Result<String>) -> Probe {
    match result {
        Ok(detail) => Probe { name, available: true, detail },
        Err(error) => Probe { name, available: false, detail: error.to_string() },
    }
}

/// Whether `process_madvise` takes `MADV_DONTNEED` on the calling process (from Linux 6.13).
pub fn vectored_dontneed() -> io::Result<()> {
    let base = memory::map_anonymous(SMALL_PAGE_BYTES)?;
    let range = [Range { address: base, len_bytes: SMALL_PAGE_BYTES }];
    // SAFETY: the page was mapped for this.
    let result = unsafe { memory::advise_many(&range, Advice::DontNeed) };
    // SAFETY: nobody else knows the page.
    unsafe { memory::unmap(base, SMALL_PAGE_BYTES) }?;
    result.map(drop)
}

/// Whether userfaultfd in SIGBUS mode works for this process.
pub fn userfaultfd_sigbus() -> io::Result<u64> {
    Uffd::open(Delivery::Sigbus).map(|uffd| uffd.features())
}

fn userfaultfd_all_features() -> io::Result<String> {
    let uffd = Uffd::open(Delivery::Message { kernel_faults: false })?;
    Ok(format!("feature bits {:#x}", uffd.features()))
}

fn io_uring() -> io::Result<String> {
    let mut params = [0u8; 120];
    // SAFETY: io_uring_setup fills in at most a struct io_uring_params of 120 bytes.
    let fd =
        crate::check(unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params.as_mut_ptr()) })?;
    // SAFETY: the descriptor is ours.
    unsafe { libc::close(fd as i32) };
    Ok(String::new())
}

fn cachestat() -> io::Result<String> {
    use std::os::fd::AsFd;
    let file = std::fs::File::open("/proc/self/exe")?;
    memory::cachestat(file.as_fd(), 0, 0).map(|_| String::new())
}

/// Tries everything the engine can make use of.
pub fn probe_all() -> Vec<Probe> {
    vec![
        probe(
            "userfaultfd, SIGBUS mode, unprivileged",
            userfaultfd_sigbus().map(|bits| format!("feature bits {bits:#x}")),
        ),
        probe("userfaultfd, messages", userfaultfd_all_features()),
        probe(
            "userfaultfd, kernel faults (privileged)",
            Uffd::open(Delivery::Message { kernel_faults: true }).map(|_| String::new()),
        ),
        probe(
            "process_madvise(MADV_DONTNEED) on itself",
            vectored_dontneed().map(|()| String::new()),
        ),
        probe("io_uring", io_uring()),
        probe("cachestat", cachestat()),
    ]
}
