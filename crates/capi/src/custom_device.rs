//! Devices whose bytes the program provides, as a table of functions.
//!
//! A page of a mapping is read where a thread faults, in a handler of SIGBUS. So what `read` may do is
//! what a handler may do, and it is the program that says whether it keeps to that: without its word
//! the device is for pages and rows only, which are read in calls. Writes and syncs always come from
//! calls and from threads of the library.

use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::sync::Arc;

use aquifer::{Device, DeviceError, IoOperation};
use aquifer_vm::ProcessMark;

use crate::call::{Failure, call};
use crate::device::aq_device;
use crate::memory::{Place, utf8};
use crate::sized::sized;

/// Reads `size` bytes at `offset` into `buffer`; returns how many, less only at the end of the device, or
/// a negative number of errno(3).
pub type aq_device_read_fn = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        buffer: *mut c_void,
        size: usize,
        offset: u64,
    ) -> i64,
>;

/// Writes all `size` bytes of `buffer` to `offset`, which lie within the device; returns 0 or a negative
/// number of errno(3).
pub type aq_device_write_fn = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        buffer: *const c_void,
        size: usize,
        offset: u64,
    ) -> c_int,
>;

/// Makes every write that has returned durable; returns 0 or a negative number of errno(3), which is final
/// for these writes: a later call must not report success for them.
pub type aq_device_sync_fn = Option<unsafe extern "C" fn(context: *mut c_void) -> c_int>;

/// Returns the length of the device in bytes, as it is now, or a negative number of errno(3).
pub type aq_device_len_fn = Option<unsafe extern "C" fn(context: *mut c_void) -> i64>;

/// Called once, when nothing uses the device any more, in any thread; not in a forked child.
pub type aq_device_release_fn = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// The functions of a device of the program. Initialise it with `AQ_DEVICE_FUNCTIONS_INIT`; `read` and
/// `len` must be set. All of them are called in any thread, several at a time. They must not use handles
/// of this library or memory of its mappings, throw C++ exceptions, longjmp out, call pthread_exit, or
/// fork, and must not wait for a thread that does any of the first two.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_device_functions {
    /// `sizeof(aq_device_functions)`.
    pub size: usize,
    /// The first argument of each function.
    pub context: *mut c_void,
    /// Reads.
    pub read: aq_device_read_fn,
    /// Writes; null for a device that is only read.
    pub write: aq_device_write_fn,
    /// Makes writes durable; null if `write` does so itself.
    pub sync: aq_device_sync_fn,
    /// The length.
    pub len: aq_device_len_fn,
    /// Frees `context`; may be null.
    pub release: aq_device_release_fn,
    /// Offsets and lengths of transfers, and their memory, are multiples of it, except at the end of the
    /// device. A power of two of at most 4096; default 1.
    pub alignment: usize,
    /// Other than 0: `read` does only what a handler of a signal may (signal-safety(7): pread(2), but not
    /// malloc(3) or printf(3)), takes no lock that a thread may hold while it uses memory of a mapping, and
    /// needs less than 64 KiB of stack. Otherwise the device can be used by pages and rows, and not be mapped.
    pub signal_safe: u64,
    /// A name for messages; default "custom". Copied.
    pub name: *const c_char,
}
sized!(aq_device_functions {
    context: *mut c_void,
    read: aq_device_read_fn,
    write: aq_device_write_fn,
    sync: aq_device_sync_fn,
    len: aq_device_len_fn,
    release: aq_device_release_fn,
    alignment: usize,
    signal_safe: u64,
    name: *const c_char,
});

type Read = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, u64) -> i64;
type Write = unsafe extern "C" fn(*mut c_void, *const c_void, usize, u64) -> c_int;
type Sync = unsafe extern "C" fn(*mut c_void) -> c_int;
type Len = unsafe extern "C" fn(*mut c_void) -> i64;

struct Custom {
    context: *mut c_void,
    read: Read,
    write: Option<Write>,
    sync: Option<Sync>,
    len: Len,
    release: aq_device_release_fn,
    alignment_bytes: usize,
    name: String,
    made_in: ProcessMark,
}

// SAFETY: documented: the functions are called in any thread with this context.
unsafe impl Send for Custom {}
// SAFETY: as above, several at a time.
unsafe impl std::marker::Sync for Custom {}

/// The error of a call of the program's functions.
fn failed(operation: IoOperation, offset_bytes: u64, len_bytes: usize, result: i64) -> DeviceError {
    // What is no number of errno is the program's defect; it must not turn into success.
    let number =
        i32::try_from(result.unsigned_abs()).ok().filter(|number| (1..4096).contains(number));
    let source = io::Error::from_raw_os_error(number.unwrap_or(libc::EIO));
    DeviceError::Io { operation, offset_bytes, len_bytes, source }
}

impl Device for Custom {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> std::result::Result<u64, DeviceError> {
        // SAFETY: the program's own function.
        let len = unsafe { (self.len)(self.context) };
        u64::try_from(len).map_err(|_| failed(IoOperation::Inspect, 0, 0, len))
    }

    fn alignment_bytes(&self) -> usize {
        self.alignment_bytes
    }

    fn is_writable(&self) -> bool {
        self.write.is_some()
    }

    /// Does nothing itself that a handler of a signal may not do.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::result::Result<usize, DeviceError> {
        // SAFETY: the program's own function; the buffer is writable.
        let got =
            unsafe { (self.read)(self.context, buffer.as_mut_ptr().cast(), buffer.len(), offset) };
        match usize::try_from(got) {
            Ok(got) if got <= buffer.len() => Ok(got),
            _ => Err(failed(IoOperation::Read, offset, buffer.len(), got.min(0))),
        }
    }

    fn write_at(&self, offset: u64, buffer: &[u8]) -> std::result::Result<(), DeviceError> {
        let write = self.write.ok_or(DeviceError::ReadOnly)?;
        // SAFETY: the program's own function; the buffer is readable.
        match unsafe { write(self.context, buffer.as_ptr().cast(), buffer.len(), offset) } {
            0 => Ok(()),
            error => Err(failed(IoOperation::Write, offset, buffer.len(), error.min(0).into())),
        }
    }

    fn sync(&self) -> std::result::Result<(), DeviceError> {
        let Some(sync) = self.sync else { return Ok(()) };
        // SAFETY: the program's own function.
        match unsafe { sync(self.context) } {
            0 => Ok(()),
            error => Err(failed(IoOperation::Sync, 0, 0, error.min(0).into())),
        }
    }

    fn access_path(&self) -> String {
        "functions of the program".into()
    }
}

impl Drop for Custom {
    fn drop(&mut self) {
        if let Some(release) = self.release.filter(|_| self.made_in.is_current()) {
            // SAFETY: the program's own function; nothing else is called with this context any more.
            unsafe { release(self.context) };
        }
    }
}

/// Makes a device of functions of the program; `*device` is null if it fails, and then `release` is not
/// called. What uses the device reads and writes one transfer at a time in each thread. Two devices made
/// by two calls are two devices: a cache would keep two copies of bytes that both have.
///
/// Threads: any. Errors: -EINVAL, -E2BIG. Frees: the caller, by `aq_device_free`; `context` is the
/// program's until `release` is called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_device_custom(
    functions: *const aq_device_functions,
    device: *mut *mut aq_device,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(device, "device") }?;
        if functions.is_null() {
            return Err(Failure::invalid("`functions` is null"));
        }
        // SAFETY: documented.
        let given = unsafe { crate::sized::options(functions) }?;
        let read = given.read.ok_or_else(|| Failure::invalid("`read` is null"))?;
        let len = given.len.ok_or_else(|| Failure::invalid("`len` is null"))?;
        let alignment_bytes = given.alignment.max(1);
        if !alignment_bytes.is_power_of_two() || alignment_bytes > 4096 {
            return Err(Failure::invalid("`alignment` is no power of two of at most 4096"));
        }
        // SAFETY: documented.
        let name = unsafe { utf8(given.name, "name") }?.unwrap_or("custom").to_owned();
        let custom = Custom {
            context: given.context,
            read,
            write: given.write,
            sync: given.sync,
            len,
            release: given.release,
            alignment_bytes,
            name,
            made_in: ProcessMark::new(),
        };
        let can_be_mapped = given.signal_safe != 0;
        place.give(aq_device { device: Arc::new(custom), can_be_mapped });
        Ok(())
    })
}
