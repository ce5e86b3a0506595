//! Open file descriptions to sync through: each sync has one to itself while it runs.
//!
//! # Why
//! If a page could not be written back, the kernel reports it once to each open file description,
//! at its next sync, whichever pages that sync covers. If two threads synced through one
//! description at the same time, the thread whose page was lost could see success, because the
//! other thread had received the report. With a description that no other sync uses, a sync that
//! succeeds proves that nothing was lost since the description was used last, and so nothing of
//! this sync.
//!
//! Conversely, a failure is reported again through every other description.
//! [`Descriptor::is_repeat`] returns whether that may be the case; then the sync can be retried.
//!
//! After a failure was reported through a description of *any* program, it is not reported through
//! descriptions that are opened later. So a sync through one of these proves nothing about bytes
//! that were written before: the *witness* does, which was opened at the start and syncs nothing.
//! It is checked after each sync ([`Descriptors::ask_witness`]), one thread at a time, because it
//! receives the report once.
//!
//! What remains is a failure that was reported to another program before this process opened the
//! file. Processes that had it open then learn of it at their next sync or when they close it,
//! unless they are killed first.
//!
//! # Invariants
//! * A descriptor is in the list or lent to one sync.
//! * There is at least one, so that a process that runs out of descriptors waits instead of
//!   failing.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use aquifer_sys::high_fd::HeldFile;
use aquifer_sys::io::{SyncableRange, write_back_error};

/// The most idle descriptors that are kept.
const IDLE_MAX: usize = 16;

/// The descriptions of one file.
#[derive(Debug)]
pub(super) struct Descriptors {
    idle: Mutex<Vec<Descriptor>>,
    returned: Condvar,
    /// Threads that wait for one; changed with `idle` locked.
    waiting: AtomicUsize,
    /// Failures of write-back that were reported through some description.
    failures: AtomicU64,
    /// `None` if one description must do everything.
    witness: Option<Mutex<HeldFile>>,
}

/// One description, lent to one sync.
#[derive(Debug)]
pub(super) struct Descriptor {
    file: HeldFile,
    /// The file's first page, used to flush the device.
    first_page: OnceLock<SyncableRange>,
    /// The number of failures when this description was opened or last reported one.
    failures_known: u64,
}

impl Descriptors {
    /// Opens descriptions of a file that is open for writing.
    pub(super) fn new(file: &HeldFile) -> io::Result<Descriptors> {
        // Opened before all others: what is reported to any of them is reported to the witness as
        // well.
        let witness = file.reopen(libc::O_RDWR).ok().map(Mutex::new);
        // Without /proc the existing description must do: it is lent to one sync at a time.
        let first = file.reopen(libc::O_RDWR).or_else(|_| file.try_clone())?;
        Ok(Descriptors {
            idle: Mutex::new(vec![Descriptor::new(first, 0)]),
            returned: Condvar::new(),
            waiting: AtomicUsize::new(0),
            failures: AtomicU64::new(0),
            witness,
        })
    }

    /// Fails if a page was lost since the start or since the last call, whichever program it was
    /// reported to: then `note` is called with the error before another thread can ask.
    pub(super) fn ask_witness(&self, note: impl FnOnce(io::Error) -> io::Error) -> io::Result<()> {
        let Some(witness) = &self.witness else { return Ok(()) };
        let witness = witness.lock().unwrap_or_else(PoisonError::into_inner);
        write_back_error(witness.as_fd()).map_err(|error| {
            // Before another thread can take its failure for a repetition of this one.
            let error = note(witness.explain(error));
            // Relaxed: a count, compared for equality only.
            self.failures.fetch_add(1, Ordering::Relaxed);
            error
        })
    }

    /// Runs `work` with a description that no other thread uses in that time.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Descriptor) -> T) -> T {
        let mut descriptor = self.take();
        let result = work(&mut descriptor);
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(descriptor);
        }
        // Relaxed, here and below: changed with the lock held. The notification is a system call even
        // if no thread waits.
        let is_awaited = self.waiting.load(Ordering::Relaxed) > 0;
        drop(idle);
        if is_awaited {
            self.returned.notify_one();
        }
        result
    }

    fn take(&self) -> Descriptor {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(descriptor) = idle.pop() {
                // If possible, the last one is duplicated before it is lent.
                if idle.is_empty()
                    && let Ok(another) = descriptor.file.reopen(libc::O_RDWR)
                {
                    // Relaxed: a count, compared for equality only.
                    idle.push(Descriptor::new(another, self.failures.load(Ordering::Relaxed)));
                }
                return descriptor;
            }
            self.waiting.fetch_add(1, Ordering::Relaxed);
            idle = self.returned.wait(idle).unwrap_or_else(PoisonError::into_inner);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Records that a description has reported a failure that was not reported before.
    pub(super) fn note_failure(&self, descriptor: &mut Descriptor) {
        // Relaxed: a count, compared for equality only.
        descriptor.failures_known = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
    }
}

impl Descriptor {
    fn new(file: HeldFile, failures_known: u64) -> Descriptor {
        Descriptor { file, first_page: OnceLock::new(), failures_known }
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// [`HeldFile::explain`].
    pub(super) fn explain(&self, error: io::Error) -> io::Error {
        self.file.explain(error)
    }

    /// Whether the failure that this description has just reported may be one that another
    /// description has reported. Afterwards all failures so far count as known.
    pub(super) fn is_repeat(&mut self, of: &Descriptors) -> bool {
        // Relaxed: a count, compared for equality only.
        let failures = of.failures.load(Ordering::Relaxed);
        std::mem::replace(&mut self.failures_known, failures) != failures
    }

    /// The file's first page; an error if it cannot be mapped.
    pub(super) fn first_page(&self) -> io::Result<&SyncableRange> {
        if let Some(page) = self.first_page.get() {
            return Ok(page);
        }
        let page = SyncableRange::new(self.file(), 0, 1)?;
        Ok(self.first_page.get_or_init(|| page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn descriptors() -> Descriptors {
        Descriptors::new(&HeldFile::new(tempfile::tempfile().unwrap().into()).unwrap()).unwrap()
    }

    #[test]
    fn syncs_at_one_time_have_descriptions_of_their_own() {
        let descriptors = descriptors();
        descriptors.with(|one| {
            descriptors.with(|other| {
                assert_ne!(one.file().as_raw_fd(), other.file().as_raw_fd());
                for each in [one, other] {
                    each.first_page().unwrap().sync().unwrap();
                }
            });
        });
        let kept = descriptors.idle.lock().unwrap().len();
        assert!((2..=3).contains(&kept), "{kept}");
    }

    #[test]
    fn without_another_one_syncs_wait_for_each_other() {
        let descriptors = descriptors();
        let only = descriptors.take();
        descriptors.idle.lock().unwrap().clear();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| descriptors.with(|one| one.file().as_raw_fd()));
            let expected = only.file().as_raw_fd();
            descriptors.idle.lock().unwrap().push(only);
            descriptors.returned.notify_one();
            assert_eq!(waiting.join().unwrap(), expected);
        });
    }

    #[test]
    fn a_failure_is_a_repeat_for_descriptions_that_have_not_heard_of_it() {
        let descriptors = descriptors();
        descriptors.with(|one| {
            descriptors.with(|other| {
                assert!(!one.is_repeat(&descriptors));
                descriptors.note_failure(one);
                assert!(!one.is_repeat(&descriptors), "it is the one that was told first");
                assert!(other.is_repeat(&descriptors));
                assert!(!other.is_repeat(&descriptors), "told once");
            });
        });
    }
}
