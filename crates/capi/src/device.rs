//! Devices: where the bytes of mappings and pages live.

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use aquifer::{DaxDevice, Device, Direct, FileDevice, MemoryDevice};

use crate::call::{Failure, call};
use crate::memory::{Place, free, handle, path};

/// A device: a file, a block device, memory, or functions of the program.
pub struct aq_device {
    pub(crate) device: Arc<dyn Device>,
    /// Whether it can be mapped: then it is read in handlers of SIGBUS.
    pub(crate) can_be_mapped: bool,
}

impl aq_device {
    pub(crate) fn new(device: impl Device) -> aq_device {
        aq_device { device: Arc::new(device), can_be_mapped: true }
    }
}

/// `aq_device_open`: for reading and writing.
pub const AQ_DEVICE_WRITE: c_int = 1;
/// `aq_device_open`: through the kernel's page cache, not by direct I/O.
pub const AQ_DEVICE_BUFFERED: c_int = 2;
/// `aq_device_open`: by direct I/O, or fail. Otherwise direct I/O is used where it works.
pub const AQ_DEVICE_DIRECT: c_int = 4;
/// `aq_device_open`: by plain system calls, not by io_uring.
pub const AQ_DEVICE_NO_IO_URING: c_int = 8;
/// `aq_device_open_dax`: refuse memory that does not survive a loss of power.
pub const AQ_DEVICE_PERSISTENT: c_int = 16;

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
        place.give(aq_device::new(device));
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
        place.give(aq_device::new(MemoryDevice::new(len_bytes)?));
        Ok(())
    })
}

/// Opens a file whose bytes are memory: on tmpfs or hugetlbfs, on a DAX file system, or a /dev/dax device.
/// `*device` is null if it fails. `flags` is 0 or a combination of `AQ_DEVICE_WRITE` and
/// `AQ_DEVICE_PERSISTENT`.
///
/// Threads: any. Errors: those of open(2), -EINVAL, -ENOSPC, -EOPNOTSUPP for what is not in memory. Frees:
/// the caller, by `aq_device_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_device_open_dax(
    file: *const c_char,
    flags: c_int,
    device: *mut *mut aq_device,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(device, "device") }?;
        // SAFETY: documented.
        let file = unsafe { path(file, "file") }?;
        if flags & !(AQ_DEVICE_WRITE | AQ_DEVICE_PERSISTENT) != 0 {
            return Err(Failure::invalid("unknown flags of a device in memory"));
        }
        let device = DaxDevice::options()
            .writable(flags & AQ_DEVICE_WRITE != 0)
            .persistent(flags & AQ_DEVICE_PERSISTENT != 0)
            .open(file)?;
        place.give(aq_device::new(device));
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

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, c_void};
    use std::ptr::{null, null_mut};

    use aquifer::DeviceError;

    use super::*;
    use crate::cache::{aq_cache_free, aq_cache_new};
    use crate::error::aq_last_error;
    use crate::mapping::{aq_map, aq_mapping_free, aq_mapping_read};
    use crate::pages::{aq_page, aq_pages_free, aq_pages_get, aq_pages_new};

    /// A device with a defect: it panics, here or there.
    struct Broken {
        has_length: bool,
    }

    impl Device for Broken {
        fn name(&self) -> &str {
            "broken"
        }

        fn len_bytes(&self) -> Result<u64, DeviceError> {
            assert!(self.has_length, "no length");
            Ok(1 << 20)
        }

        fn is_writable(&self) -> bool {
            false
        }

        fn read_at(&self, offset_bytes: u64, _: &mut [u8]) -> Result<usize, DeviceError> {
            panic!("nothing at {offset_bytes}");
        }

        fn write_at(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
            Err(DeviceError::ReadOnly)
        }

        fn sync(&self) -> Result<(), DeviceError> {
            Ok(())
        }

        fn access_path(&self) -> String {
            "none".into()
        }
    }

    fn broken(has_length: bool) -> *mut aq_device {
        let mut device = null_mut();
        // SAFETY: it lives on this stack.
        let place = unsafe { Place::of_handle(&raw mut device, "device") };
        place.ok().unwrap().give(aq_device::new(Broken { has_length }));
        device
    }

    fn failed_with(result: c_int, text: &str) {
        assert_eq!(result, -libc::ENOTRECOVERABLE);
        // SAFETY: this thread's last text, which no call replaces meanwhile.
        let last = unsafe { CStr::from_ptr(aq_last_error()) }.to_str().unwrap();
        assert_eq!(last, format!("a defect of the library: {text}"));
    }

    #[test]
    fn a_panic_inside_is_an_error_with_its_text() {
        let (mut cache, mut pages, mut mapping) = (null_mut(), null_mut(), null_mut());
        let (mut len, mut byte) = (0_u64, 0_u8);
        let mut guard = aq_page { data: null(), page: 0, pages: null_mut() };
        let (one, other) = (broken(true), broken(false));
        // SAFETY: handles made here, and places on this stack.
        unsafe {
            assert_eq!(aq_cache_new(null(), &raw mut cache), 0);
            failed_with(aq_device_len(other, &raw mut len), "no length");
            assert_eq!(aq_pages_new(cache, one, &raw mut pages), 0);
            // The page stays absent, so the second call comes as far as the first.
            for _ in 0..2 {
                failed_with(aq_pages_get(pages, 3, &raw mut guard), "nothing at 12288");
                assert!(guard.data.is_null());
            }
            assert_eq!(aq_pages_free(pages), 0);
            assert_eq!(aq_map(cache, one, null(), &raw mut mapping), 0);
            let target = (&raw mut byte).cast::<c_void>();
            failed_with(aq_mapping_read(mapping, target, 1, 4096), "nothing at 4096");
            aq_mapping_free(mapping);
            failed_with(aq_pages_new(cache, other, &raw mut pages), "no length");
            assert!(pages.is_null());
            aq_device_free(one);
            aq_device_free(other);
            aq_cache_free(cache);
        }
    }
}
