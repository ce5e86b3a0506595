//! The barrier of a file device: `fdatasync`, shared by concurrent callers, and final when it
//! fails.
//!
//! * *Shared.* A caller needs a sync that *starts* after its call. Callers that arrive while one is
//!   running wait for it to end; then one of them runs the next for all: two syncs serve any number
//!   of callers.
//! * *Final.* After a failed `fdatasync` the kernel may have marked the pages clean, so a second
//!   one would succeed without having written anything. The first errno is kept and returned to
//!   every later caller until the device is reopened. Only one sync runs at a time, because of two
//!   concurrent ones only one would get the error.
//! ```text
//! caller A   ──ask──[ sync 1 ]──done
//! caller B        ──ask── wait ──[ sync 2 ]──done     B asked after sync 1 had started,
//! caller C            ──ask── wait ──────────done     and shares the next one with C
//! ```
//!
//! The lock is held for a few instructions, never across the system call. A child that was forked
//! while a sync ran in the parent treats that sync as not running.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::fork;

#[derive(Debug, Default)]
pub(super) struct SyncGate {
    state: Mutex<GateState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// Number of the last sync that was started, and of the last that ended.
    started: u64,
    finished: u64,
    /// Generation of the process that started the sync `started`.
    generation: u64,
    failed_errno: Option<i32>,
}

impl SyncGate {
    /// Returns when a sync that started after this call has ended; `sync` performs one.
    pub(super) fn run(&self, sync: impl FnOnce() -> Result<(), i32>) -> Result<(), i32> {
        let mut state = self.lock();
        let needed = state.started + 1;
        loop {
            if let Some(errno) = state.failed_errno {
                return Err(errno);
            }
            if state.finished >= needed {
                return Ok(());
            }
            let generation = fork::generation();
            if state.started == state.finished || state.generation != generation {
                state.started += 1;
                state.generation = generation;
                break;
            }
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let number = state.started;
        drop(state);

        let result = sync();

        let mut state = self.lock();
        state.finished = number;
        if let Err(errno) = result {
            state.failed_errno = Some(errno);
        }
        drop(state);
        self.ended.notify_all();
        result
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    #[test]
    fn a_failure_is_final() {
        let gate = SyncGate::default();
        assert_eq!(gate.run(|| Ok(())), Ok(()));
        assert_eq!(gate.run(|| Err(libc::EIO)), Err(libc::EIO));
        assert_eq!(gate.run(|| panic!("must not be asked again")), Err(libc::EIO));
    }

    #[test]
    fn callers_during_a_sync_share_the_next_one() {
        let gate = SyncGate::default();
        let calls = AtomicU32::new(0);
        let (release, released) = mpsc::channel::<()>();
        let (entered, has_entered) = mpsc::channel::<()>();
        let (asked, has_asked) = mpsc::channel::<()>();
        let (gate, calls) = (&gate, &calls);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                gate.run(|| {
                    entered.send(()).unwrap();
                    released.recv().unwrap();
                    calls.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                })
            });
            has_entered.recv().unwrap();
            for _ in 0..4 {
                let asked = asked.clone();
                scope.spawn(move || {
                    asked.send(()).unwrap();
                    gate.run(|| {
                        calls.fetch_add(1, Ordering::Relaxed);
                        Ok(())
                    })
                    .unwrap();
                });
            }
            for _ in 0..4 {
                has_asked.recv().unwrap();
            }
            assert_eq!(calls.load(Ordering::Relaxed), 0, "no caller may pass a running sync");
            release.send(()).unwrap();
        });
        // One for the first caller; at least one and at most four for the callers that arrived
        // while it ran (a thread that called late may have needed its own).
        let calls = calls.load(Ordering::Relaxed);
        assert!((2..=5).contains(&calls), "{calls} syncs");
    }

    #[test]
    fn every_caller_that_shares_a_failed_sync_sees_the_error() {
        let gate = SyncGate::default();
        let (release, released) = mpsc::channel::<()>();
        let (entered, has_entered) = mpsc::channel::<()>();
        let gate = &gate;
        std::thread::scope(|scope| {
            let first = scope.spawn(move || {
                gate.run(|| {
                    entered.send(()).unwrap();
                    released.recv().unwrap();
                    Err(libc::ENOSPC)
                })
            });
            has_entered.recv().unwrap();
            let second = scope.spawn(|| gate.run(|| Ok(())));
            release.send(()).unwrap();
            assert_eq!(first.join().unwrap(), Err(libc::ENOSPC));
            assert_eq!(second.join().unwrap(), Err(libc::ENOSPC));
        });
    }
}
