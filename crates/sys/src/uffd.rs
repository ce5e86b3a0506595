//! userfaultfd: serves the page faults of a range in user space.
//!
//! In *SIGBUS mode* the kernel does not queue a fault but raises SIGBUS in the faulting thread,
//! which serves the fault itself; that needs no privilege and no hand-over. In *thread mode*
//! another thread reads the faults (in a privileged process also those of system calls) from the
//! descriptor.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as raw;
use linux_raw_sys::ioctl;

/// How faults are delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// SIGBUS in the faulting thread. Faults taken by the kernel (system calls) fail with EFAULT.
    Sigbus,
    /// A message on the descriptor.
    Message {
        /// Also deliver faults taken inside system calls (privileged).
        kernel_faults: bool,
    },
}

/// A userfaultfd.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    features: u64,
}

/// The outcome of installing a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Installed {
    /// The page was installed.
    Yes,
    /// Another thread had already installed the page.
    AlreadyThere,
}

/// A fault message of thread mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultMessage {
    /// The faulting address, rounded down to its page.
    pub address: usize,
    /// Whether the access was a store.
    pub write: bool,
    /// Whether it was a store to a write-protected page.
    pub write_protected: bool,
    /// The thread that faults, by the kernel's number ([`this_thread`](crate::thread::this_thread)).
    pub thread: i32,
}

/// Bits of the operations that a range supports, `_UFFDIO_*` in `linux/userfaultfd.h`.
const OPERATION_COPY: u64 = 1 << 3;
const OPERATION_WRITE_PROTECT: u64 = 1 << 6;
const WRITE_PROTECT_ON: u64 = 1;
const WRITE_PROTECT_DONT_WAKE: u64 = 1 << 1;
/// `UFFDIO_POISON_MODE_DONTWAKE`.
const POISON_DONT_WAKE: u64 = 1;

/// `struct uffdio_poison`.
#[repr(C)]
struct Poison {
    range: raw::uffdio_range,
    mode: u64,
    updated: i64,
}

const _: () = assert!(size_of::<Poison>() == 32);
/// `_IOWR(UFFDIO, 0x08, struct uffdio_poison)`.
const UFFDIO_POISON: u32 = (3 << 30) | (32 << 16) | (0xAA << 8) | 0x08;

impl Uffd {
    /// Opens a userfaultfd. `EPERM` means the system forbids even the unprivileged form.
    pub fn open(delivery: Delivery) -> io::Result<Uffd> {
        let mut flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        if delivery != (Delivery::Message { kernel_faults: true }) {
            flags |= raw::UFFD_USER_MODE_ONLY as i32;
        }
        let wanted = match delivery {
            Delivery::Sigbus => u64::from(raw::UFFD_FEATURE_SIGBUS),
            Delivery::Message { .. } => u64::from(raw::UFFD_FEATURE_THREAD_ID),
        } | u64::from(raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP);
        Uffd::open_with(flags, wanted)
    }

    /// Opens a userfaultfd that delivers no faults: a store to a protected page lifts the
    /// protection (WP_ASYNC). Fails with `EINVAL` before Linux 6.7.
    pub fn open_tracking() -> io::Result<Uffd> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | raw::UFFD_USER_MODE_ONLY as i32;
        Uffd::open_with(flags, u64::from(raw::UFFD_FEATURE_WP_ASYNC))
    }

    fn open_with(flags: i32, wanted: u64) -> io::Result<Uffd> {
        // SAFETY: one integer argument.
        let fd = crate::check(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })?;
        // SAFETY: just made, so nothing else owns the descriptor.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let mut api =
            raw::uffdio_api { api: u64::from(raw::UFFD_API), features: wanted, ioctls: 0 };
        let mut uffd = Uffd { fd, features: 0 };
        uffd.ioctl(ioctl::UFFDIO_API, &mut api)?;
        uffd.features = api.features;
        Ok(uffd)
    }

    /// Returns the kernel's feature bits (`UFFD_FEATURE_*`).
    pub fn features(&self) -> u64 {
        self.features
    }

    fn ioctl<T>(&self, request: u32, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is passed the structure the kernel's header pairs with it.
        let result = unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::Ioctl::from(request),
                std::ptr::from_mut(argument),
            )
        };
        crate::check(result.into()).map(drop)
    }

    /// Registers a range: for faults on missing pages, and on stores to write-protected ones.
    pub fn register(
        &self,
        address: *mut u8,
        len_bytes: usize,
        write_protect: bool,
    ) -> io::Result<()> {
        let mut mode = u64::from(raw::UFFDIO_REGISTER_MODE_MISSING);
        let mut needed = OPERATION_COPY;
        if write_protect {
            mode |= u64::from(raw::UFFDIO_REGISTER_MODE_WP);
            needed |= OPERATION_WRITE_PROTECT;
        }
        let mut argument = raw::uffdio_register {
            range: raw::uffdio_range { start: address as u64, len: len_bytes as u64 },
            mode,
            ioctls: 0,
        };
        self.ioctl(ioctl::UFFDIO_REGISTER, &mut argument)?;
        if argument.ioctls & needed != needed {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        Ok(())
    }

    /// Makes the pages of a range write-protectable, and nothing else. A range may be registered
    /// again.
    pub fn register_tracking(&self, address: *mut u8, len_bytes: usize) -> io::Result<()> {
        let mut argument = raw::uffdio_register {
            range: raw::uffdio_range { start: address as u64, len: len_bytes as u64 },
            mode: u64::from(raw::UFFDIO_REGISTER_MODE_WP),
            ioctls: 0,
        };
        self.ioctl(ioctl::UFFDIO_REGISTER, &mut argument)
    }

    /// Unregisters a range.
    pub fn unregister(&self, address: *mut u8, len_bytes: usize) -> io::Result<()> {
        let mut range = raw::uffdio_range { start: address as u64, len: len_bytes as u64 };
        self.ioctl(ioctl::UFFDIO_UNREGISTER, &mut range)
    }

    /// Installs a copy of `source` at `target`, atomically per small page, and retries when the
    /// kernel interrupts the copy. With `protect` the pages are installed write-protected.
    ///
    /// Wakes no thread that is blocked on them (thread mode): the server of its fault calls
    /// [`Uffd::wake`], last.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`; `target` is in a range registered with this descriptor
    /// whose pages the caller is responsible for loading, so that no other code relies on them
    /// being absent.
    pub unsafe fn copy(
        &self,
        target: *mut u8,
        source: *const u8,
        len_bytes: usize,
        protect: bool,
    ) -> io::Result<Installed> {
        let mode = u64::from(raw::UFFDIO_COPY_MODE_DONTWAKE)
            | if protect { u64::from(raw::UFFDIO_COPY_MODE_WP) } else { 0 };
        let mut done = 0usize;
        let mut outcome = Installed::Yes;
        while done < len_bytes {
            let mut argument = raw::uffdio_copy {
                dst: target as u64 + done as u64,
                src: source as u64 + done as u64,
                len: (len_bytes - done) as u64,
                mode,
                copy: 0,
            };
            match self.ioctl(ioctl::UFFDIO_COPY, &mut argument) {
                Ok(()) => return Ok(outcome),
                // A partial copy fails with EAGAIN and reports the bytes done; zero bytes means the
                // address space was changing (fork, mremap). Both are retried.
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => done += usize::try_from(argument.copy).unwrap_or(0),
                    Some(libc::EEXIST) => {
                        let step = usize::try_from(argument.copy).unwrap_or(0);
                        done += if step == 0 { crate::memory::SMALL_PAGE_BYTES } else { step };
                        outcome = Installed::AlreadyThere;
                    }
                    _ => return Err(error),
                },
            }
        }
        Ok(outcome)
    }

    /// Installs pages of zeros, which take no memory: all are one page of the kernel's. Pages that are there stay.
    /// Wakes no thread, as [`Uffd::copy`].
    ///
    /// # Safety
    /// As [`Uffd::copy`], for the target.
    pub unsafe fn zeros(&self, target: *mut u8, len_bytes: usize) -> io::Result<()> {
        let mut done = 0usize;
        while done < len_bytes {
            let start = target as u64 + done as u64;
            let mut argument = raw::uffdio_zeropage {
                range: raw::uffdio_range { start, len: (len_bytes - done) as u64 },
                mode: u64::from(raw::UFFDIO_ZEROPAGE_MODE_DONTWAKE),
                zeropage: 0,
            };
            // Partly done, interrupted, or met by a page that is there, as in `copy`.
            let Err(error) = self.ioctl(ioctl::UFFDIO_ZEROPAGE, &mut argument) else {
                return Ok(());
            };
            let step = usize::try_from(argument.zeropage).unwrap_or(0);
            match error.raw_os_error() {
                Some(libc::EAGAIN) => done += step,
                Some(libc::EEXIST) => {
                    done += if step == 0 { crate::memory::SMALL_PAGE_BYTES } else { step };
                }
                _ => return Err(error),
            }
        }
        Ok(())
    }

    /// Write-protects a range, or lifts the protection. Wakes no thread, as [`Uffd::copy`].
    pub fn write_protect(
        &self,
        address: *mut u8,
        len_bytes: usize,
        protect: bool,
    ) -> io::Result<()> {
        loop {
            let mut argument = raw::uffdio_writeprotect {
                range: raw::uffdio_range { start: address as u64, len: len_bytes as u64 },
                // The kernel refuses both bits at once: protecting wakes no thread anyway.
                mode: if protect { WRITE_PROTECT_ON } else { WRITE_PROTECT_DONT_WAKE },
            };
            match self.ioctl(ioctl::UFFDIO_WRITEPROTECT, &mut argument) {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                other => return other,
            }
        }
    }

    /// Wakes threads (thread mode) blocked on a fault in the range, which then try again. They may unmap the range at once.
    pub fn wake(&self, address: *mut u8, len_bytes: usize) -> io::Result<()> {
        let mut range = raw::uffdio_range { start: address as u64, len: len_bytes as u64 };
        self.ioctl(ioctl::UFFDIO_WAKE, &mut range)
    }

    /// Makes accesses to missing pages of a range raise SIGBUS (Linux 6.6), until they are
    /// discarded. Wakes no thread, as [`Uffd::copy`].
    pub fn poison(&self, address: *mut u8, len_bytes: usize) -> io::Result<()> {
        let mut argument = Poison {
            range: raw::uffdio_range { start: address as u64, len: len_bytes as u64 },
            mode: POISON_DONT_WAKE,
            updated: 0,
        };
        self.ioctl(UFFDIO_POISON, &mut argument)
    }

    /// Returns whether [`Uffd::poison`] is supported.
    pub fn can_poison(&self) -> bool {
        self.features & u64::from(raw::UFFD_FEATURE_POISON) != 0
    }

    /// Waits up to `timeout_ms` for the next fault message; `None` on timeout.
    pub fn next_fault(&self, timeout_ms: i32) -> io::Result<Option<FaultMessage>> {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd on this stack.
        let ready = unsafe { libc::poll(&raw mut poll, 1, timeout_ms) };
        if ready <= 0 {
            return Ok(None);
        }
        let mut message = std::mem::MaybeUninit::<raw::uffd_msg>::zeroed();
        // SAFETY: the buffer has exactly the message's size.
        let got = unsafe {
            libc::read(self.fd.as_raw_fd(), message.as_mut_ptr().cast(), size_of::<raw::uffd_msg>())
        };
        if got < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(None),
                _ => Err(error),
            };
        }
        // SAFETY: zeroed before, and every bit pattern is valid.
        let message = unsafe { message.assume_init() };
        if u32::from(message.event) != 0x12 {
            return Ok(None);
        }
        // SAFETY: the event is UFFD_EVENT_PAGEFAULT (0x12), which uses this arm of the union.
        let fault = unsafe { message.arg.pagefault };
        let flags = fault.flags;
        // SAFETY: in thread mode the thread's number was asked for; every bit pattern is valid.
        let thread = unsafe { fault.feat.ptid };
        Ok(Some(FaultMessage {
            address: fault.address as usize,
            write: flags & u64::from(raw::UFFD_PAGEFAULT_FLAG_WRITE) != 0,
            write_protected: flags & u64::from(raw::UFFD_PAGEFAULT_FLAG_WP) != 0,
            thread: thread as i32,
        }))
    }
}
