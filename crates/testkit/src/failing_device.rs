//! A block device whose write-back fails.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FallocateFlags;

const LEN_BYTES: u64 = 32 << 20;

/// What a test makes on the system, taken back in the reverse order when this is dropped.
#[derive(Debug, Default)]
pub struct Undo(Vec<Vec<String>>);

impl Undo {
    /// Runs a command, which `undo` takes back, and returns what it prints; `None` if it fails.
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

/// A block device over a sparse file on a file system in memory that gets full: what is written to the page
/// cache of the device is lost on the way.
#[derive(Debug)]
pub struct FailingDevice {
    node: PathBuf,
    ballast: PathBuf,
    // In this order: the device is detached and the file system unmounted before the directory goes.
    _undo: Undo,
    _directory: tempfile::TempDir,
}

impl FailingDevice {
    /// Of 32 MiB; `None` where there can be none: that takes the right to mount.
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

    /// What was never written before fails from now on.
    pub fn fill(&self) {
        let full = std::fs::write(&self.ballast, vec![1; 16 << 20]);
        assert!(full.is_err(), "it is larger than the file system");
    }

    /// Forgets what was written from `offset_bytes` on: as if it never had been.
    pub fn forget(&self, offset_bytes: u64) -> io::Result<()> {
        let backing = File::options().write(true).open(self.ballast.with_file_name("backing"))?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&backing, flags, offset_bytes, LEN_BYTES - offset_bytes)?)
    }

    /// It works again.
    pub fn empty(&self) {
        // Removed alone it keeps its room as long as a child that another test has forked meanwhile has it open.
        let cut = File::options().write(true).open(&self.ballast).and_then(|file| file.set_len(0));
        let removed = cut.and_then(|()| std::fs::remove_file(&self.ballast));
        assert!(removed.is_ok(), "{removed:?}");
    }
}
