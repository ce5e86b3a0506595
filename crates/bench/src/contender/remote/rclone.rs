//! `rclone mount` with its VFS cache: one mount for the node, read by system calls.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::object_store::read_all;
use super::{BUCKET, KEY, Remote, Service, Site, lines_of};
use crate::job::{RemoteKind, Unavailable};
use crate::raw::{advise_file, end_with_parent, terminate};

/// Until the mount is there, or gone.
const PATIENCE: Duration = Duration::from_secs(30);

fn place(site: Site<'_>) -> PathBuf {
    site.directory.join("mounted")
}

/// The process that serves the mount; unmounts when dropped.
struct MountProcess {
    process: Child,
}

impl Drop for MountProcess {
    fn drop(&mut self) {
        // It unmounts itself at this signal.
        let _ = terminate(self.process.id());
        let since = Instant::now();
        while since.elapsed() < PATIENCE {
            if !matches!(self.process.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Mounts the bucket.
pub fn mount(site: Site<'_>) -> Result<Service> {
    let at = place(site);
    std::fs::create_dir(&at)?;
    // A chunk is what a request asks for at least. Reads of a whole object go through several streams.
    let (chunk, streams) = match site.work.kind {
        RemoteKind::Random { .. } => ("64Ki", "0"),
        _ => ("8Mi", "4"),
    };
    let memory_bytes = 2 * site.cache_bytes;
    let mut command = Command::new(&site.work.rclone);
    command
        .args(["mount", &format!(":s3:{BUCKET}")])
        .arg(&at)
        .args(["--config", "/dev/null", "--s3-provider", "Other", "--s3-region", "us-east-1"])
        .args(["--s3-endpoint", &site.work.endpoint, "--read-only", "--no-modtime"])
        .args(["--vfs-cache-mode", "full", "--vfs-cache-max-size", "off"])
        .args(["--vfs-cache-max-age", "24h", "--vfs-fast-fingerprint", "--no-checksum"])
        .args(["--vfs-read-chunk-size", chunk, "--vfs-read-chunk-streams", streams])
        .args(["--buffer-size", "0", "--dir-cache-time", "24h", "--attr-timeout", "24h"])
        .args(["--poll-interval", "0", "--log-level", "ERROR"])
        .arg("--cache-dir")
        .arg(site.directory.join("vfs"))
        // Its collector keeps within the group's limit.
        .env("GOMEMLIMIT", memory_bytes.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    end_with_parent(&mut command);
    let process = match command.spawn() {
        Ok(process) => process,
        Err(error) => {
            let name = site.work.rclone.display();
            let reason =
                format!("there is no rclone ({name}: {error}); .ci/remote-contenders installs it");
            return Err(Unavailable(reason).into());
        }
    };
    let mut service = MountProcess { process };
    let since = Instant::now();
    while !at.join(KEY).exists() {
        if service.process.try_wait()?.is_some() {
            let mut text = String::new();
            if let Some(mut errors) = service.process.stderr.take() {
                let _ = std::io::Read::read_to_string(&mut errors, &mut text);
            }
            return Err(Unavailable(format!("rclone cannot mount: {}", text.trim())).into());
        }
        if since.elapsed() > PATIENCE {
            bail!("rclone has not mounted after {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(Some(Box::new(service)))
}

/// A process's use of the mount.
pub struct Mounted {
    path: PathBuf,
    threads: usize,
}

impl Mounted {
    /// Opens the object.
    pub fn open(site: Site<'_>) -> Result<Self> {
        Ok(Self { path: place(site).join(KEY), threads: site.work.in_flight })
    }
}

impl Remote for Mounted {
    fn ranges(&mut self, ranges: &[Range<u64>]) -> Result<u64> {
        let file = File::open(&self.path).context("the mounted object")?;
        advise_file(&file, 0, 0, libc::POSIX_FADV_RANDOM)?;
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable_by_key(|range| range.start);
        let next = AtomicUsize::new(0);
        let read = || -> Result<u64> {
            let (mut sum, mut buffer) = (0_u64, vec![]);
            // Relaxed: only the number itself has to be unique.
            while let Some(range) = sorted.get(next.fetch_add(1, Ordering::Relaxed)) {
                buffer.resize((range.end - range.start) as usize, 0);
                file.read_exact_at(&mut buffer, range.start)?;
                sum = sum.wrapping_add(lines_of(&buffer));
            }
            Ok(sum)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(read)).collect();
            let mut sums = threads.into_iter().map(|thread| thread.join().expect("no panic"));
            sums.try_fold(0_u64, |sum, one| Ok(sum.wrapping_add(one?)))
        })
    }

    fn pass(&mut self) -> Result<u64> {
        read_all(File::open(&self.path).context("the mounted object")?)
    }
}
