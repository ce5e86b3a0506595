//! DAX devices (`/dev/dax0.0`): character devices that are persistent memory.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// Returns whether this is the metadata of a DAX device node.
pub fn is_devdax(metadata: &Metadata) -> bool {
    metadata.file_type().is_char_device()
        && std::fs::canonicalize(format!("{}/subsystem", sysfs_of(metadata)))
            .is_ok_and(|subsystem| subsystem.file_name().is_some_and(|name| name == "dax"))
}

/// Returns the length of a DAX device from sysfs; 0 if unknown.
pub fn len_bytes(metadata: &Metadata) -> u64 {
    number(metadata, "size")
}

/// Returns the required alignment of mappings of a DAX device; 0 if sysfs does not report it.
pub fn alignment_bytes(metadata: &Metadata) -> u64 {
    number(metadata, "align")
}

fn number(metadata: &Metadata, attribute: &str) -> u64 {
    std::fs::read_to_string(format!("{}/{attribute}", sysfs_of(metadata)))
        .ok()
        .and_then(|number| number.trim().parse().ok())
        .unwrap_or(0)
}

/// Returns the sysfs directory of a character device.
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
