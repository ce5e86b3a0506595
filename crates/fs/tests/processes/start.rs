//! What opening a pool costs a process that reads one file and ends.

use std::path::PathBuf;

use aquifer_fs::Files;
use aquifer_pool::Pool;
use aquifer_testkit::child;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("joins", joins)];

fn pool() -> PathBuf {
    PathBuf::from(std::env::var("POOL").expect("the pool"))
}

/// Page faults of this process, and its mappings.
fn counted() -> (i64, usize) {
    // SAFETY: zeros are a value of the structure, and the call fills it in.
    let faults = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
        usage.ru_minflt
    };
    (faults, std::fs::read_to_string("/proc/self/maps").unwrap().lines().count())
}

fn joins() {
    counted();
    let before = counted();
    let files = Files::new(Pool::options().read_only(true).open(pool()).unwrap());
    assert_eq!(files.read("/f").unwrap(), b"text");
    let after = counted();
    let (faults, mappings) = (after.0 - before.0, after.1 as i64 - before.1 as i64);
    // Among them are the pages of the program itself.
    assert!(faults < 300, "{faults} page faults");
    assert!(mappings < 20, "{mappings} mappings");
}

/// A process that joins others takes no memory and no addresses ahead.
#[test]
fn joining_a_pool_takes_nothing_ahead() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool");
    let files = Files::new(Pool::create(&path, 8 << 20).unwrap());
    files.write("/f", "text").unwrap();
    let ended = child::command("joins").env("POOL", &path).status().unwrap();
    assert!(ended.success(), "{ended}");
}
