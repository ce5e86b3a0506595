//! Mounts a pool, which is created if it is not there, until the process is asked to end:
//! `in_process POOL DIRECTORY [--write-through | --shared] [--no-xattrs] [--allow-other]`.
//!
//! It shows how to embed a mount. The process that serves it must not be killed: programs that use
//! the mount would get errors, and what the kernel has not written back would be lost.

use std::path::Path;

use aquifer_fs::Files;
use aquifer_fuse::{Cache, Mount, MountOptions};
use aquifer_pool::Pool;
use aquifer_sys::signal::Ending;

/// The length of a pool that is created.
const POOL_BYTES: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(pool), Some(directory)) = (arguments.next(), arguments.next()) else {
        return Err("usage: in_process POOL DIRECTORY [--write-through] [--no-xattrs]".into());
    };
    let mut options = MountOptions::new().source(pool.clone());
    for argument in arguments {
        options = match argument.as_str() {
            "--write-through" => options.cache(Cache::WriteThrough),
            "--shared" => options.cache(Cache::Shared),
            "--no-xattrs" => options.xattrs(false),
            "--allow-other" => options.allow_other(true),
            other => return Err(format!("unknown option {other}").into()),
        };
    }
    // Before the pool starts threads, which would take the signals.
    let ending = Ending::wait_for()?;
    let note = format!("mounted at {directory} by an example; end it with Ctrl-C");
    let alone = Pool::options().sole(note);
    let pool = match Path::new(&pool).exists() {
        true => alone.open(&pool)?,
        false => alone.create(&pool, POOL_BYTES)?,
    };
    let mount = Mount::in_process(Files::new(pool), Path::new(&directory), &options)?;
    println!("mounted, connection {}", mount.connection());
    let mut ends = [rustix::event::PollFd::new(&ending, rustix::event::PollFlags::IN)];
    while rustix::event::poll(&mut ends, None)? == 0 {}
    let counts = mount.counts();
    println!(
        "{} malformed, {} panics; requests by operation:",
        counts.malformed(),
        counts.panics()
    );
    for operation in (0..64).filter(|&operation| counts.of(operation) > 0) {
        println!("{operation:4} {}", counts.of(operation));
    }
    Ok(mount.unmount()?)
}
