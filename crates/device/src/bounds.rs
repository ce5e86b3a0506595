//! Range checks, the same for every device.

use crate::DeviceError;

/// Returns how many of `len_bytes` at `offset_bytes` a read of a device of `device_bytes` can
/// return.
pub(crate) fn readable_bytes(
    offset_bytes: u64,
    len_bytes: usize,
    device_bytes: u64,
) -> Result<usize, DeviceError> {
    if offset_bytes > device_bytes {
        return Err(DeviceError::OutOfBounds { offset_bytes, len_bytes, device_bytes });
    }
    let left_bytes = usize::try_from(device_bytes - offset_bytes).unwrap_or(usize::MAX);
    Ok(len_bytes.min(left_bytes))
}

/// Refuses a write that would exceed the device: writes never extend it.
pub(crate) fn check_write(
    offset_bytes: u64,
    len_bytes: usize,
    device_bytes: u64,
) -> Result<(), DeviceError> {
    match offset_bytes.checked_add(len_bytes as u64) {
        Some(end_bytes) if end_bytes <= device_bytes => Ok(()),
        _ => Err(DeviceError::OutOfBounds { offset_bytes, len_bytes, device_bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_cut_at_the_end_and_refused_beyond_it() {
        assert_eq!(readable_bytes(0, 10, 10).unwrap(), 10);
        assert_eq!(readable_bytes(8, 10, 10).unwrap(), 2);
        assert_eq!(readable_bytes(10, 10, 10).unwrap(), 0);
        assert!(matches!(readable_bytes(11, 0, 10), Err(DeviceError::OutOfBounds { .. })));
        assert!(matches!(readable_bytes(u64::MAX, 10, 10), Err(DeviceError::OutOfBounds { .. })));
    }

    #[test]
    fn writes_never_cross_the_end() {
        assert!(check_write(0, 10, 10).is_ok());
        assert!(matches!(check_write(1, 10, 10), Err(DeviceError::OutOfBounds { .. })));
        assert!(matches!(check_write(u64::MAX, 10, 10), Err(DeviceError::OutOfBounds { .. })));
    }
}
