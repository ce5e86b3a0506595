//! Background threads: each is started when there is work for it, and none where the options say
//! so.

use std::path::Path;

use crate::common::{create, rename};
use aquifer_pool::{Pool, PoolOptions};
use aquifer_testkit::child;

pub const ROLES: &[aquifer_testkit::child::Role] =
    &[("at-need", at_need), ("never", never), ("in-a-fork", in_a_fork), ("refused", refused)];

/// The names of the threads of pools in this process.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: &Path| std::fs::read_to_string(task.join("comm")).unwrap_or_default();
    let names = tasks.map(|task| name(&task.unwrap().path()).trim().to_owned());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("aquifer-")).collect();
    names.sort();
    names
}

fn assert_threads(expected: &[&str]) {
    assert_eq!(threads(), expected);
}

/// Waits until the threads that were joined have left `/proc`, which may take longer.
fn wait_until_there_is_none() {
    while !threads().is_empty() {
        std::thread::yield_now();
    }
}

fn pool(options: &PoolOptions) -> (tempfile::TempDir, Pool) {
    let directory = tempfile::tempdir().unwrap();
    let options = options.clone().log_bytes(64 << 10).zero_bytes_per_second(1 << 40);
    let pool = options.create(directory.path().join("pool"), 4 << 20).unwrap();
    (directory, pool)
}

/// Changes metadata often enough to fill half of a small log with durable records several times.
fn fill_the_log(pool: &Pool) {
    create(pool, b"even", 1).unwrap();
    for _ in 0..50 {
        for _ in 0..10 {
            rename(pool, b"even", b"odd").unwrap();
            rename(pool, b"odd", b"even").unwrap();
        }
        pool.sync().unwrap();
    }
}

fn at_need() {
    let (_directory, pool) = pool(&Pool::options());
    let reader = Pool::options().read_only(true).open(pool.media().path()).unwrap();
    assert_threads(&[]);
    fill_the_log(&pool);
    // The pages are zero: none has been used.
    assert_threads(&["aquifer-beat", "aquifer-ckpt"]);
    // A writer that is closed beside a reader leaves its shared memory to the next one.
    drop((reader, pool));
    wait_until_there_is_none();
}

fn never() {
    let (_directory, pool) = pool(&Pool::options().background(false));
    fill_the_log(&pool);
    pool.checkpoint().unwrap();
    assert_threads(&[]);
}

/// A child of a fork starts nothing, also if its parent has not, and ends without its threads.
fn in_a_fork() {
    let (_directory, pool) = pool(&Pool::options());
    for round in 0..2 {
        // SAFETY: the only other threads are the pool's, which hold no lock of the process for long,
        // and one that sleeps.
        let child = unsafe { libc::fork() };
        if child == 0 {
            pool.checkpoint_soon();
            let fails = pool.sync().is_err() && pool.checkpoint().is_err();
            let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
            let while_open = threads();
            drop(pool);
            let is_alone = (while_open, threads()) == (1, 1);
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!fails || !is_alone)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "round {round}");
        if round == 0 {
            fill_the_log(&pool);
        }
    }
    pool.sync().unwrap();
}

/// A thread that could not be started is started by a later wait.
fn refused() {
    let (_directory, pool) = pool(&Pool::options());
    assert_threads(&[]);
    limit_addresses(true);
    create(&pool, b"even", 1).unwrap();
    assert_threads(&[]);
    limit_addresses(false);
    create(&pool, b"odd", 1).unwrap();
    assert_threads(&["aquifer-beat"]);
}

/// Leaves no room for the stack of another thread.
fn limit_addresses(is_limited: bool) {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: zeros are a value of the structure, and the calls only read and write it.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &raw mut limit), 0);
        limit.rlim_cur = if is_limited { pages * 4096 + (1 << 20) } else { limit.rlim_max };
        assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &raw const limit), 0);
    }
}

#[test]
fn threads_start_when_there_is_work_for_them() {
    child::succeeds("at-need");
}

#[test]
fn a_handle_without_background_starts_no_thread() {
    child::succeeds("never");
}

#[test]
fn a_forked_child_starts_no_thread() {
    child::succeeds("in-a-fork");
}

#[test]
fn a_thread_that_was_refused_is_started_later() {
    child::succeeds("refused");
}
