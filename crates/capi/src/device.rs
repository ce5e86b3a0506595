//! Devices: where the bytes of mappings and pages live.

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use aquifer::{Device, Direct, FileDevice, MemoryDevice};

use crate::call::{Failure, call};
use crate::memory::{Place, free, handle, path};

/// A device: a file, a block device or memory.
pub struct aq_device {
    pub(crate) device: Arc<dyn Device>,
}

/// `aq_device_open`: for reading and writing.
pub const AQ_DEVICE_WRITE: c_int = 1;
/// `aq_device_open`: through the kernel's page cache, not by direct I/O.
pub const AQ_DEVICE_BUFFERED: c_int = 2;
/// `aq_device_open`: by direct I/O, or fail. Otherwise direct I/O is used where it works.
pub const AQ_DEVICE_DIRECT: c_int = 4;
/// `aq_device_open`: by plain system calls, not by io_uring.
pub const AQ_DEVICE_NO_IO_URING: c_int = 8;

/// Opens a file or block device; `*device` is null if it fails. `flags` is 0 or a combination of
/// `AQ_DEVICE_…`.
///
/// Threads: any. Errors: those of open(2), -EINVAL, -EOPNOTSUPP for what is no file or block device.
/// Frees: the caller, by `aq_device_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_device_open(
    file: *const c_char,
    flags: c_int,
    device: *mut *mut aq_device,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(device, "device") }?;
        // SAFETY: documented.
        let file = unsafe { path(file, "file") }?;
        let known = AQ_DEVICE_WRITE | AQ_DEVICE_BUFFERED | AQ_DEVICE_DIRECT | AQ_DEVICE_NO_IO_URING;
        let direct = match flags & (AQ_DEVICE_BUFFERED | AQ_DEVICE_DIRECT) {
            0 => Direct::Auto,
            AQ_DEVICE_BUFFERED => Direct::Never,
            AQ_DEVICE_DIRECT => Direct::Require,
            _ => return Err(Failure::invalid("both AQ_DEVICE_BUFFERED and AQ_DEVICE_DIRECT")),
        };
        if flags & !known != 0 {
            return Err(Failure::invalid("unknown flags of a device"));
        }
        let device = FileDevice::options()
            .writable(flags & AQ_DEVICE_WRITE != 0)
            .direct(direct)
            .io_uring(flags & AQ_DEVICE_NO_IO_URING == 0)
            .open(file)?;
        place.give(aq_device { device: Arc::new(device) });
        Ok(())
    })
}

/// Makes a device of memory, all zeros, for tests; `*device` is null if it fails.
///
/// Threads: any. Errors: -EINVAL, -ENOMEM. Frees: the caller, by `aq_device_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_device_memory(len_bytes: usize, device: *mut *mut aq_device) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(device, "device") }?;
        place.give(aq_device { device: Arc::new(MemoryDevice::new(len_bytes)?) });
        Ok(())
    })
}

/// Puts the length of a device in bytes, as it is now, into `*len_bytes`.
///
/// Threads: any. Errors: -EINVAL, -EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_device_len(device: *mut aq_device, len_bytes: *mut u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (device, place) =
            unsafe { (handle(device, "device")?, Place::new(len_bytes, "len_bytes")?) };
        place.put(device.device.len_bytes()?);
        Ok(())
    })
}

/// Frees a device; null is fine. What was made with it keeps it open.
///
/// Threads: none may be in a call with this handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_device_free(device: *mut aq_device) {
    // SAFETY: documented.
    unsafe { free(device) }
}
