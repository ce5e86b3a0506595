//! Power cuts under a mount: media record what the server does to them, and each state that a power
//! cut may have left is opened.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use aquifer_check::{CheckOptions, Severity, check};
use aquifer_crashkit::{CrashMedia, CrashState, Fault, Plan, Trigger, explore};
use aquifer_fs::Files;
use aquifer_fuse::{Cache, Mount, MountError, MountOptions};
use aquifer_pool::PoolOptions;
use aquifer_pool::media::{MediaOperation, PersistenceDomain};
use aquifer_testkit::campaign::{seed, steps};

use crate::mounted::place::alone;

const POOL_BYTES: u64 = 4 << 20;
/// How many steps the programs do.
const STEPS: u64 = 12;
const BOOT: u64 = 1;

fn options(boot: u64) -> PoolOptions {
    alone().background(false).boot(boot).inodes(127).log_bytes(64 << 10)
}

/// A new pool on such media, mounted at a directory; `None`, reported, where that is not possible.
pub fn mount(at: &Path, cache: Cache) -> Option<(Arc<CrashMedia>, Mount)> {
    let disk = PersistenceDomain::PageCache;
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, disk).expect("memory"));
    drop(options(BOOT).create_on(fresh.clone()).expect("a new pool"));
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), disk).expect("memory"));
    let files = Files::new(options(BOOT).open_on(media.clone()).expect("the pool opens"));
    match Mount::in_process(files, at, &MountOptions::new().cache(cache)) {
        Ok(mount) => Some((media, mount)),
        Err(error @ (MountError::Device(_) | MountError::Mount { .. })) => {
            println!("skipped: a pool cannot be mounted: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// What a step makes of the file that is replaced.
fn version(step: u64) -> Vec<u8> {
    vec![step as u8; 1000 + 3000 * step as usize]
}

fn line(step: u64) -> String {
    format!("{step:>20} {}\n", "x".repeat(700))
}

/// Replaces a file and appends to another, as programs do that want to survive.
fn step(root: &Path, step: u64) -> std::io::Result<()> {
    let temporary = root.join("temporary");
    let mut file = File::create(&temporary)?;
    file.write_all(&version(step))?;
    file.sync_all()?;
    fs::rename(&temporary, root.join("replaced"))?;
    let mut log = File::options().append(true).create(true).open(root.join("log"))?;
    log.write_all(line(step).as_bytes())?;
    // A sync makes all names durable.
    log.sync_all()
}

/// What `state` must hold.
fn judge(state: &CrashState<'_>, directory: &Path) -> Result<(), Box<dyn Error>> {
    let last = state.marks().last_acknowledged().unwrap_or(0);
    let files = Files::new(options(BOOT + 1).open_on(Arc::new(state.media()?))?);
    let lines: String = (1..=last).map(line).collect();
    let log = if last == 0 { Vec::new() } else { files.read("/log")? };
    if !log.starts_with(lines.as_bytes()) {
        return Err(format!("{} bytes of the log, {last} lines were synced", log.len()).into());
    }
    let replaced = files.read("/replaced").ok();
    let is_known = |step: u64| replaced.as_ref() == Some(&version(step));
    if !(is_known(last) || is_known(last + 1) || last == 0 && replaced.is_none()) {
        return Err(format!("neither version {last} nor the next one").into());
    }
    drop(files);
    let path = directory.join("state");
    fs::write(&path, state.image())?;
    drop(Files::open(&path)?);
    let report = check(&path, &CheckOptions::default())?;
    match report.worst() {
        Some(worst) if worst > Severity::Note => Err(report.to_string().into()),
        _ => Ok(()),
    }
}

pub fn what_was_synced_is_there_after_a_power_cut() {
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().join("mounted");
        fs::create_dir(&root).expect("a directory of its own");
        let Some((media, mount)) = mount(&root, cache) else { return };
        for number in 1..=STEPS {
            media.begin(number);
            step(&root, number).expect("there is room");
            media.acknowledge(number);
        }
        let recording = media.recording();
        mount.unmount().expect("nothing uses it");
        let plan = Plan { depth: 0, budget: steps(200) as u64, seed: seed(1) };
        let explored = explore(&recording, plan, |state| {
            judge(state, directory.path())?;
            Ok(None)
        });
        let explored = explored.unwrap_or_else(|failure| panic!("{cache:?}: {failure}"));
        println!("{} crash states", explored.states());
    }
}

pub fn failed_media_are_an_error_of_fsync() {
    for cache in [Cache::WriteBack, Cache::WriteThrough, Cache::Shared] {
        let directory = tempfile::tempdir().expect("a directory");
        let Some((media, mount)) = mount(directory.path(), cache) else { return };
        step(directory.path(), 1).expect("there is room");
        let path = directory.path().join("f");
        let mut file = File::create(&path).expect("a new file");
        file.write_all(b"text").expect("the media are not asked");
        media.fail(Fault::io_error(Trigger::on(MediaOperation::Flush)));
        for _ in 0..2 {
            let failed = file.sync_all().expect_err("its flush has failed");
            assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{cache:?}");
        }
        let flags = libc::O_DSYNC;
        let durable = File::options().write(true).custom_flags(flags).open(&path);
        let failed = durable.and_then(|file| file.write_all_at(b"text", 0));
        assert_eq!(failed.expect_err("as well").raw_os_error(), Some(libc::EIO), "{cache:?}");
        // What is in memory can still be read.
        assert_eq!(fs::read(&path).expect("it is there"), b"text");
        drop(file);
        mount.unmount().expect("nothing uses it");
    }
}
