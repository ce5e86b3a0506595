//! Requests that wait for the media, and others meanwhile.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc;
use std::time::Duration;

use aquifer_crashkit::Trigger;
use aquifer_fuse::Cache;
use aquifer_pool::media::MediaOperation;

use crate::mounted::power::mount;

/// More than the most threads that have a turn.
const PROGRAMS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// One step of a program: each needs room in the log.
type Step = fn(&Path) -> io::Result<()>;

fn write(at: &Path) -> io::Result<()> {
    let file = File::options().write(true).create(true).truncate(false).open(at)?;
    let end = file.metadata()?.len();
    // Longer each time, until it begins anew.
    let from = if end > 100 << 10 { 0 } else { end };
    file.write_all_at(&[1; 5000], from)
}

fn truncate(at: &Path) -> io::Result<()> {
    let file = File::options().write(true).create(true).truncate(false).open(at)?;
    file.set_len(100_000)?;
    file.set_len(0)
}

/// The removed file is freed by a `FORGET`.
fn remove(at: &Path) -> io::Result<()> {
    fs::write(at, [1; 5000])?;
    let open = File::open(at)?;
    fs::remove_file(at)?;
    drop(open);
    Ok(())
}

fn rename(at: &Path) -> io::Result<()> {
    fs::create_dir(at)?;
    let other = at.with_extension("other");
    fs::rename(at, &other)?;
    fs::remove_dir(other)
}

pub fn requests_are_answered_while_others_wait_for_the_media() {
    for step in [write as Step, truncate, remove, rename] {
        let directory = tempfile::tempdir().expect("a directory");
        // Each `stat` is a request.
        let Some((media, mount)) = mount(directory.path(), Cache::Shared) else { return };
        let asked = directory.path().join("asked");
        fs::write(&asked, "text").expect("a new file");
        let (ends, gate) = (AtomicBool::new(false), media.hold(Trigger::on(MediaOperation::Flush)));
        let gate = &gate;
        std::thread::scope(|scope| {
            for number in 0..PROGRAMS {
                let (at, ends) = (directory.path().join(number.to_string()), &ends);
                scope.spawn(move || {
                    while !ends.load(SeqCst) {
                        step(&at).expect("there is room");
                    }
                });
            }
            // The log is full.
            gate.wait_until_reached();
            let (tell, hear) = mpsc::channel();
            scope.spawn(move || {
                // All that is answered between is of the other programs, until all of them wait.
                for _ in 0..1000 {
                    tell.send(fs::metadata(&asked).map(|found| found.len())).expect("it is heard");
                }
            });
            let answers: Result<Vec<_>, _> =
                (0..1000).map(|_| hear.recv_timeout(PATIENCE)).collect();
            ends.store(true, SeqCst);
            gate.open();
            for answer in answers.expect("they are answered") {
                assert_eq!(answer.expect("it is there"), 4);
            }
        });
        mount.unmount().expect("nothing uses it");
    }
}
