//! Turns Ctrl-C into an error, so that everything the bench changed on the system is restored.
//!
//! A bench creates cgroups, data files and perhaps a device. Their owners undo that when they are
//! dropped, which a signal's default action would skip. The handler only sets a flag; long loops
//! check it.

use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// The user asked to stop.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; all changes were undone")]
pub struct Interrupted;

extern "C" fn note(_signal: libc::c_int) {
    // Relaxed: an independent flag that publishes nothing else.
    REQUESTED.store(true, Ordering::Relaxed);
}

/// Restores the former handling of SIGINT, SIGTERM and SIGHUP when dropped.
#[derive(Debug)]
pub struct Guard {
    former: Vec<(libc::c_int, libc::sigaction)>,
}

impl Guard {
    /// From now on the three signals only set the flag that [`check`] reads, unless they were
    /// ignored.
    pub fn install() -> Self {
        let mut former = Vec::new();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // SAFETY: all-zero is a valid `sigaction`: default handler, empty mask, no flags.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = note as *const () as usize;
            // SAFETY: as above.
            let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: both structures are valid; the handler only stores to an atomic.
            if unsafe { libc::sigaction(signal, &raw const action, &raw mut old) } != 0 {
                continue;
            }
            if old.sa_sigaction == libc::SIG_IGN {
                // As under `nohup`: the parent process asked to ignore the signal.
                // SAFETY: `old` came from the kernel for this signal.
                unsafe { libc::sigaction(signal, &raw const old, std::ptr::null_mut()) };
            } else {
                former.push((signal, old));
            }
        }
        Self { former }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        for (signal, action) in &self.former {
            // SAFETY: `action` came from the kernel for this signal.
            unsafe { libc::sigaction(*signal, action, std::ptr::null_mut()) };
        }
    }
}

/// Returns an error once the user has asked to stop.
pub fn check() -> Result<(), Interrupted> {
    if REQUESTED.load(Ordering::Relaxed) { Err(Interrupted) } else { Ok(()) }
}
