//! `rclone mount` with its VFS cache: one mount for the node, read by system calls.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::mount::{UnmountFlags, unmount};

use super::object_store::read_all;
use super::{BUCKET, Helper, KEY, PATIENCE, Remote, Service, Site, lines_of, wait_for_end};
use crate::job::{RemoteKind, Unavailable};
use crate::raw::{advise_file, end_with_parent, terminate};

/// Each read in its VFS takes memory of the node.
const MOST_THREADS: usize = 64;

fn place(site: Site<'_>) -> PathBuf {
    site.directory.join("mounted")
}

/// The process that serves the mount; unmounts when dropped.
struct MountProcess {
    process: Child,
    at: PathBuf,
}

impl Helper for MountProcess {
    fn was_killed(&mut self) -> bool {
        let since = Instant::now();
        // Its mount fails a moment before it has ended.
        while since.elapsed() < Duration::from_secs(1) {
            if let Ok(Some(status)) = self.process.try_wait() {
                return status.signal() == Some(libc::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for MountProcess {
    fn drop(&mut self) {
        // It unmounts itself at this signal.
        let _ = terminate(self.process.id());
        wait_for_end(&mut self.process);
        // One that was killed has left a mount that nothing answers. If it is gone, this fails.
        let _ = unmount(&self.at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
}

/// Mounts the bucket.
pub fn mount(site: Site<'_>) -> Result<Service> {
    let at = place(site);
    std::fs::create_dir(&at)?;
    // A chunk is what a request asks for at least. Reads of a whole object go through several streams; those of columns are
    // many at once.
    let (chunk, streams) = match site.work.kind {
        RemoteKind::Random { .. } => ("64Ki", "0"),
        RemoteKind::Columns => ("512Ki", "0"),
        RemoteKind::Pass { .. } => ("8Mi", "4"),
    };
    // Half of the node's memory: the mount serves all of its processes.
    let memory_bytes = 2 * site.cache_bytes * u64::from(site.work.team.processes);
    // A pipe would fill up.
    let errors = site.directory.join("rclone-errors");
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
        .stderr(File::create(&errors)?);
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
    let mut service = MountProcess { process, at: at.clone() };
    let since = Instant::now();
    while !at.join(KEY).exists() {
        if service.process.try_wait()?.is_some() {
            let text = std::fs::read(&errors).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            return Err(Unavailable(format!("rclone cannot mount: {}", text.trim())).into());
        }
        if since.elapsed() > PATIENCE {
            bail!("rclone has not mounted after {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(Some(Box::new(service)))
}

/// Ranges that the threads of a process take from each other.
struct Batch {
    ranges: Vec<Range<u64>>,
    next: AtomicUsize,
}

/// A process's use of the mount: the file, opened once, and threads that wait for batches.
pub struct Mounted {
    file: Arc<File>,
    threads: Vec<(Sender<Arc<Batch>>, JoinHandle<()>)>,
    sums: Receiver<Result<u64>>,
}

impl Mounted {
    /// Opens the object.
    pub fn open(site: Site<'_>) -> Result<Self> {
        let file = File::open(place(site).join(KEY)).context("the mounted object")?;
        let file = Arc::new(file);
        // A pass advises otherwise.
        advise_file(&file, 0, 0, libc::POSIX_FADV_RANDOM)?;
        let (summed, sums) = channel();
        let start = |_| {
            let (batches, wanted) = channel::<Arc<Batch>>();
            let (file, summed) = (file.clone(), summed.clone());
            let work = move || {
                for batch in wanted {
                    let _ = summed.send(sum_of(&file, &batch));
                }
            };
            (batches, std::thread::spawn(work))
        };
        let threads = (0..site.work.in_flight.min(MOST_THREADS)).map(start).collect();
        Ok(Self { file, threads, sums })
    }
}

fn sum_of(file: &File, batch: &Batch) -> Result<u64> {
    let (mut sum, mut buffer) = (0_u64, vec![]);
    // Relaxed: only the number itself has to be unique.
    while let Some(range) = batch.ranges.get(batch.next.fetch_add(1, Ordering::Relaxed)) {
        buffer.resize((range.end - range.start) as usize, 0);
        file.read_exact_at(&mut buffer, range.start)?;
        sum = sum.wrapping_add(lines_of(&buffer));
    }
    Ok(sum)
}

impl Remote for Mounted {
    fn ranges(&mut self, ranges: &[Range<u64>]) -> Result<u64> {
        let mut ranges = ranges.to_vec();
        ranges.sort_unstable_by_key(|range| range.start);
        let batch = Arc::new(Batch { ranges, next: AtomicUsize::new(0) });
        for (batches, _) in &self.threads {
            batches.send(batch.clone()).context("a thread that reads has ended")?;
        }
        let mut sums = (0..self.threads.len()).map(|_| self.sums.recv()?);
        sums.try_fold(0_u64, |sum, one| Ok(sum.wrapping_add(one?)))
    }

    fn pass(&mut self) -> Result<u64> {
        read_all(&self.file)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        for (batches, thread) in self.threads.drain(..) {
            drop(batches);
            let _ = thread.join();
        }
    }
}
