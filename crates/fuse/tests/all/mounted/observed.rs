//! What programs can observe of a file system, as text to compare.

use std::fmt::Debug;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// What a script saw, in order.
#[derive(Default)]
pub struct Log {
    lines: Vec<String>,
}

impl Log {
    /// Notes a value.
    pub fn note(&mut self, what: &str, value: impl Debug) {
        self.lines.push(format!("{what}: {value:?}"));
    }

    /// Notes a result: the value, or the error's number.
    pub fn result<T: Debug>(&mut self, what: &str, result: io::Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.note(what, &value);
                Some(value)
            }
            Err(error) => {
                self.note(what, (error.raw_os_error(), error.kind()));
                None
            }
        }
    }

    /// Notes what `lstat` says of a path, apart from times and the number.
    pub fn stat(&mut self, path: &Path) {
        let seen = fs::symlink_metadata(path).map(|stat| described(&stat));
        self.result(&format!("stat {}", name(path)), seen);
    }
}

fn name(path: &Path) -> String {
    path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned())
}

/// Runs a script in a directory.
pub fn by(script: fn(&Path, &mut Log), directory: &Path) -> Vec<String> {
    let mut log = Log::default();
    script(directory, &mut log);
    log.lines.extend(tree(directory));
    log.lines
}

fn described(stat: &fs::Metadata) -> (u32, u32, u32, u64, u64) {
    // Each file system has its own idea of the length and the links of a directory.
    let (len, links) = if stat.is_dir() { (0, 0) } else { (stat.len(), stat.nlink()) };
    (stat.mode(), stat.uid(), stat.gid(), len, links)
}

/// All that is below a directory.
pub fn tree(directory: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut left = vec![directory.to_path_buf()];
    while let Some(directory) = left.pop() {
        let entries = fs::read_dir(&directory).expect("a directory");
        let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
        names.sort();
        for path in names {
            let stat = fs::symlink_metadata(&path).expect("it was listed");
            let kind = stat.file_type();
            let more = if kind.is_symlink() {
                format!("{:?}", fs::read_link(&path).expect("a link"))
            } else if kind.is_file() {
                let content = fs::read(&path).expect("its owner, or root");
                format!("{} bytes, {:x}", content.len(), sum(&content))
            } else if kind.is_char_device() || kind.is_block_device() {
                format!("{:x}", stat.rdev())
            } else {
                String::new()
            };
            lines.push(format!("{} {:?} {more}", name(&path), described(&stat)));
            if kind.is_dir() {
                left.push(path);
            }
        }
    }
    lines
}

/// FNV-1a: to tell contents apart.
pub fn sum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
