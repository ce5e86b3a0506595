//! Threads whose results are collected.

use std::thread::ScopedJoinHandle;

use anyhow::{Result, anyhow};

/// Waits for these threads and collects their results; a panic is an error.
pub fn join_all<T>(threads: Vec<ScopedJoinHandle<'_, Result<T>>>) -> Result<Vec<T>> {
    let join = |thread: ScopedJoinHandle<'_, Result<T>>| {
        thread.join().unwrap_or_else(|_| Err(anyhow!("a thread of the bench panicked")))
    };
    threads.into_iter().map(join).collect()
}
