//! System calls and special instructions, typed.
//!
//! The only crate that makes system calls by number or executes instructions the compiler does not
//! know. Wrappers are thin: they check layouts at compile time, convert the kernel's error in one
//! place, and add no policy. Everything a fault handler needs allocates nothing.
//!
//! Sockets, futexes, random bytes, clocks and calls on files are [`rustix`]'s, which makes system
//! calls without libc: they leave `errno` alone and are async-signal-safe. Written here is what
//! rustix lacks (userfaultfd, `PAGEMAP_SCAN`, leases, locks of open file descriptions, signals), and
//! what has to go through libc: memory mappings, which sanitizers track there, and `statx`, which
//! libc emulates where a sandbox refuses it.

#[cfg(not(all(
    target_os = "linux",
    target_pointer_width = "64",
    target_endian = "little",
    any(target_arch = "x86_64", target_arch = "aarch64"),
)))]
compile_error!(
    "Aquifer runs on Linux on x86-64 and on little-endian aarch64, 64-bit: its fault handler reads the registers that \
     these save, and its files are mapped as they are"
);

pub mod accounting;
pub mod boot;
pub mod cache_life;
pub mod clock;
pub mod copy;
pub mod cost;
pub mod cpu;
pub mod credentials;
pub mod devdax;
mod event;
pub mod fallible;
pub mod features;
pub mod file_name;
pub mod file_system;
pub mod fuse;
pub mod futex;
pub mod high_fd;
pub mod interrupt;
pub mod io;
pub mod lease;
pub mod limit;
pub mod local_socket;
pub mod lock;
pub mod machine;
pub mod memory;
pub mod mount;
pub mod namespace;
pub mod open_file;
pub mod page_faults;
pub mod pagemap;
pub mod patience;
pub mod pkey;
pub mod random;
pub mod range_sync;
pub mod residency;
pub mod resident;
pub mod robust;
pub mod sanitizer;
pub mod shared_memory;
pub mod shared_words;
pub mod signal;
pub mod thread;
pub mod uffd;
pub mod units;
pub mod waits;

#[cfg(feature = "tracing")]
#[doc(hidden)]
pub use tracing;

/// Converts the `-1 and errno` convention of a system call.
#[inline]
pub(crate) fn check(result: libc::c_long) -> std::io::Result<usize> {
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result as usize) }
}

/// Returns the calling thread's errno; a signal handler saves and restores it.
#[inline]
pub fn errno() -> i32 {
    // SAFETY: returns the calling thread's errno location, always valid.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's errno.
#[inline]
pub fn set_errno(value: i32) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = value }
}
