//! A block device with failing write-back.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FallocateFlags;

const LEN_BYTES: u64 = 32 << 20;

/// A test's changes to the system, undone in reverse order when dropped.
#[derive(Debug, Default)]
pub struct Undo(Vec<Vec<String>>);

impl Undo {
    /// Runs a command that `undo` reverts, and returns its output; `None` if it fails.
    pub fn run(&mut self, command: &[&str], undo: &[&str]) -> Option<String> {
        let output = Command::new(command[0]).args(&command[1..]).output().ok()?;
        if !output.status.success() {
            return None;
        }
        if !undo.is_empty() {
            self.0.push(undo.iter().map(|word| (*word).to_owned()).collect());
        }
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        while let Some(command) = self.0.pop() {
            let _ = Command::new(&command[0]).args(&command[1..]).status();
        }
    }
}

/// A block device over a sparse file on a tmpfs that fills up: data written to the device's page
/// cache is lost in write-back.
#[derive(Debug)]
pub struct FailingDevice {
    node: PathBuf,
    ballast: PathBuf,
    // In this order: the device is detached and the file system unmounted before the directory is
    // removed.
    _undo: Undo,
    _directory: tempfile::TempDir,
}

impl FailingDevice {
    /// Creates a device of 32 MiB; `None` where that is not possible: it needs the right to mount.
    pub fn new() -> Option<FailingDevice> {
        let directory = tempfile::tempdir().ok()?;
        let mut undo = Undo::default();
        let place = directory.path().to_str().unwrap().to_owned();
        undo.run(
            &["mount", "-t", "tmpfs", "-o", "size=8M", "none", &place],
            &["umount", "-l", &place],
        )?;
        let backing = format!("{place}/backing");
        File::create(&backing).ok()?.set_len(LEN_BYTES).ok()?;
        let node = undo.run(&["losetup", "-f", "--show", &backing], &[])?;
        undo.0.push(vec!["losetup".into(), "-d".into(), node.clone()]);
        let ballast = Path::new(&place).join("ballast");
        Some(FailingDevice { node: node.into(), ballast, _undo: undo, _directory: directory })
    }

    /// The device node.
    pub fn path(&self) -> &Path {
        &self.node
    }

    /// From now on, write-back of blocks that were never written before fails.
    pub fn fill(&self) {
        let full = std::fs::write(&self.ballast, vec![1; 16 << 20]);
        assert!(full.is_err(), "it is larger than the file system");
    }

    /// Discards what was written from `offset_bytes` on, as if it had never been written.
    pub fn forget(&self, offset_bytes: u64) -> io::Result<()> {
        let backing = File::options().write(true).open(self.ballast.with_file_name("backing"))?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&backing, flags, offset_bytes, LEN_BYTES - offset_bytes)?)
    }

    /// Makes the device work again.
    pub fn empty(&self) {
        // Truncated first: removal alone keeps its space while a child forked by another test has
        // it open.
        let cut = File::options().write(true).open(&self.ballast).and_then(|file| file.set_len(0));
        let removed = cut.and_then(|()| std::fs::remove_file(&self.ballast));
        assert!(removed.is_ok(), "{removed:?}");
    }
}
