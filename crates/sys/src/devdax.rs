//! DAX devices (`/dev/dax0.0`): character devices that are persistent memory.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// Whether this is the metadata of a DAX device's node.
pub fn is_devdax(metadata: &Metadata) -> bool {
    metadata.file_type().is_char_device()
        && std::fs::canonicalize(format!("{}/subsystem", sysfs_of(metadata)))
            .is_ok_and(|subsystem| subsystem.file_name().is_some_and(|name| name == "dax"))
}

/// Length of a DAX device as sysfs states it; 0 if it does not.
pub fn len_bytes(metadata: &Metadata) -> u64 {
    number(metadata, "size")
}

/// What mappings of a DAX device are aligned to; 0 if sysfs does not say.
pub fn alignment_bytes(metadata: &Metadata) -> u64 {
    number(metadata, "align")
}

fn number(metadata: &Metadata, attribute: &str) -> u64 {
    std::fs::read_to_string(format!("{}/{attribute}", sysfs_of(metadata)))
        .ok()
        .and_then(|number| number.trim().parse().ok())
        .unwrap_or(0)
}

/// Where sysfs describes a character device.
fn sysfs_of(metadata: &Metadata) -> String {
    let device = metadata.rdev();
    format!("/sys/dev/char/{}:{}", libc::major(device), libc::minor(device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_no_dax_devices() {
        for path in ["/dev/null", "/proc/self/exe", "/"] {
            let metadata = std::fs::metadata(path).unwrap();
            assert!(!is_devdax(&metadata), "{path}");
            assert_eq!((len_bytes(&metadata), alignment_bytes(&metadata)), (0, 0), "{path}");
        }
    }
}
