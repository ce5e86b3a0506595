//! Byte-addressable devices.

use std::fs::File;
use std::os::fd::FromRawFd;

use crate::support::{ListBatch, check_against_model, seed};
use aquifer_device::{DaxDevice, Device, DeviceError, MemoryDevice, Persistence};

/// A memfd of this length.
fn memfd(len_bytes: u64, flags: libc::c_uint) -> std::io::Result<File> {
    // SAFETY: a NUL-terminated name that outlives the call.
    let descriptor = unsafe { libc::memfd_create(c"test".as_ptr(), flags | libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: just made, so nothing else owns the descriptor.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(len_bytes)?;
    Ok(file)
}

fn dax_over(file: &File) -> DaxDevice {
    let file = file.try_clone().unwrap();
    DaxDevice::options().writable(true).map(file, "memfd".into()).unwrap()
}

#[test]
fn memory_behaves_as_a_byte_array() {
    for len_bytes in [1, 4096, (200 << 10) + 77] {
        check_against_model(&MemoryDevice::new(len_bytes).unwrap(), seed(len_bytes as u64), 200);
    }
}

#[test]
fn memory_starts_with_its_bytes_and_offers_them() {
    let device = MemoryDevice::from_bytes(&[1, 2, 3]).unwrap();
    assert_eq!(device.to_vec(), [1, 2, 3]);
    let (start, len_bytes) = device.dax().unwrap();
    // SAFETY: within the device, which no other code uses.
    assert_eq!((unsafe { start.add(2).read() }, len_bytes), (3, 3));
    device.sync().unwrap();
}

#[test]
fn empty_memory_is_a_device_of_length_zero() {
    let device = MemoryDevice::new(0).unwrap();
    assert_eq!(device.len_bytes().unwrap(), 0);
    assert_eq!(device.read_at(0, &mut [0; 4]).unwrap(), 0);
    assert!(matches!(device.write_at(0, &[0]), Err(DeviceError::OutOfBounds { .. })));
}

#[test]
fn memory_that_cannot_be_had_is_an_error() {
    let error = MemoryDevice::new(1 << 62).unwrap_err();
    assert!(matches!(error, DeviceError::Open { .. }), "{error}");
}

#[test]
fn ranges_outside_are_refused() {
    let device = MemoryDevice::new(100).unwrap();
    assert_eq!(device.read_at(90, &mut [0; 20]).unwrap(), 10);
    assert!(matches!(device.read_at(101, &mut [0]), Err(DeviceError::OutOfBounds { .. })));
    assert!(matches!(device.write_at(90, &[0; 20]), Err(DeviceError::OutOfBounds { .. })));
    assert!(matches!(device.write_at(u64::MAX, &[0; 2]), Err(DeviceError::OutOfBounds { .. })));
}

#[test]
fn a_file_in_memory_behaves_as_a_byte_array() {
    let file = memfd((200 << 10) + 77, 0).unwrap();
    let device = dax_over(&file);
    assert_eq!(device.persistence(), Persistence::Volatile);
    assert_eq!(device.access_path(), "memory (tmpfs, volatile)");
    check_against_model(&device, seed(5), 200);
    let mut batch = ListBatch::reads(20, 4096);
    device.run(&mut batch, 8);
    assert!(batch.planned.iter().all(|planned| matches!(planned.result, Some(Ok(4096)))));
}

#[test]
fn writes_reach_the_file() {
    use std::os::unix::fs::FileExt;
    let file = memfd(8192, 0).unwrap();
    let device = dax_over(&file);
    device.write_at(4000, &[9; 200]).unwrap();
    device.sync().unwrap();
    let mut bytes = [0; 202];
    file.read_exact_at(&mut bytes, 3999).unwrap();
    assert_eq!((bytes[0], bytes[201]), (0, 0));
    assert!(bytes[1..201].iter().all(|byte| *byte == 9));
}

#[test]
fn a_file_cut_short_gives_errors_and_one_that_grows_is_not_followed() {
    let file = memfd(64 << 10, 0).unwrap();
    let device = dax_over(&file);
    file.set_len((16 << 10) + 50).unwrap();
    assert_eq!(device.len_bytes().unwrap(), (16 << 10) + 50);
    assert_eq!(device.read_at(16 << 10, &mut [0; 4096]).unwrap(), 50);
    assert!(matches!(device.read_at(32 << 10, &mut [0; 1]), Err(DeviceError::OutOfBounds { .. })));
    assert!(matches!(device.write_at(16 << 10, &[0; 51]), Err(DeviceError::OutOfBounds { .. })));
    file.set_len(1 << 20).unwrap();
    assert_eq!(device.len_bytes().unwrap(), 64 << 10);
    assert_eq!(device.mapped_bytes(), 64 << 10);
}

#[test]
fn page_cache_is_not_taken_for_dax() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for len_bytes in [0, 8192] {
        file.as_file().set_len(len_bytes).unwrap();
        match DaxDevice::options().writable(true).open(file.path()) {
            Err(DeviceError::Unsuitable { reason, .. }) if len_bytes > 0 => {
                assert!(reason.contains("FileDevice"), "{reason}");
                use std::os::unix::fs::MetadataExt;
                let blocks = file.as_file().metadata().unwrap().blocks();
                assert_eq!(blocks, 0, "a refused file must not have been allocated");
            }
            Err(DeviceError::Unsuitable { .. }) => {}
            Err(error) => panic!("{error}"),
            Ok(device) => eprintln!("skipped: temporary files are {}", device.access_path()),
        }
    }
}

#[test]
fn what_is_no_memory_is_refused_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    for path in [directory.path(), "/dev/null".as_ref()] {
        let error = DaxDevice::open(path).unwrap_err();
        assert!(matches!(error, DeviceError::Unsuitable { .. }), "{error}");
    }
    let missing = DaxDevice::open(directory.path().join("missing")).unwrap_err();
    assert!(matches!(missing, DeviceError::Open { .. }), "{missing}");
    let volatile = DaxDevice::options().persistent(true).map(memfd(4096, 0).unwrap(), "m".into());
    assert!(matches!(volatile, Err(DeviceError::Unsuitable { .. })));
}

#[test]
fn a_device_opened_for_reading_refuses_writes() {
    let device = DaxDevice::options().map(memfd(4096, 0).unwrap(), "memfd".into()).unwrap();
    assert!(!device.is_writable());
    assert!(matches!(device.write_at(0, &[1]), Err(DeviceError::ReadOnly)));
    let mut byte = [1];
    assert_eq!(device.read_at(4095, &mut byte).unwrap(), 1);
    assert_eq!(byte, [0]);
}

#[test]
fn huge_pages_work_and_their_lack_is_an_error() {
    let Ok(file) = memfd(2 << 20, libc::MFD_HUGETLB) else {
        eprintln!("skipped: no hugetlb memfd here");
        return;
    };
    for is_writable in [false, true] {
        let opened = DaxDevice::options()
            .writable(is_writable)
            .map(file.try_clone().unwrap(), "hugetlb memfd".into());
        match opened {
            Ok(device) => {
                assert_eq!(device.access_path(), "memory (hugetlbfs, volatile)");
                assert_eq!(device.read_at(1 << 20, &mut [1; 4096]).unwrap(), 4096);
            }
            // No huge page is free: reported at open, not by a signal at the first access.
            Err(error) => assert!(matches!(error, DeviceError::Open { .. }), "{error}"),
        }
    }
}
