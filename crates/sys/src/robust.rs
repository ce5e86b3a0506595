//! A mutex in shared memory that outlives its holder.
//!
//! [`RobustMutex`] is placed in memory that several processes map. When the thread that holds it
//! dies, in whatever way, the next thread gets the lock and learns of the death
//! ([`RobustGuard::previous_owner_died`]). It repairs what the mutex guards and then calls
//! [`RobustGuard::repaired`].
//!
//! ```text
//!            lock                      repaired
//!  free ───────────▶ held ──────▶ …    ◀──────── held, owner died
//!   ▲                 │ unlock, drop                 ▲      │ dropped without `repaired`
//!   └─────────────────┘                              │      ▼
//!                     │ holder dies      lock        │   not recoverable: every `lock` fails
//!                     └─────────────▶ owner dead ────┘
//! ```
//!
//! # Implementation
//! Taking, releasing and detecting a death use the C library's robust, process-shared mutex: the
//! kernel walks a dying thread's list of held mutexes. *Waiting* does not. While a thread waits in
//! `pthread_mutex_lock`, its list marks the mutex as about to be taken, and if the thread dies
//! then, the kernel compares the thread ID in the mutex with that of the dying thread. Thread IDs
//! of different PID namespaces collide (every container has a 1), so a killed waiter would mark as
//! dead an owner that lives in another container, and two threads would be in the critical section.
//! Here threads only ever *try* the mutex, which leaves a window of a few instructions instead of
//! the whole wait, and they sleep on a separate futex word.
//!
//! # Waiting
//! ```text
//! waiter:  waiting ← 1;  try;  sleep while waiting = 1, at most PATIENCE;  again
//! holder:  release;  if waiting was 1: waiting ← 0, wake one
//! ```
//! A waiter that got the lock after sleeping sets the word again, as other waiters may be asleep.
//! No waiter is notified of an owner's death, and a wake-up is lost when the woken or the waking
//! thread is killed. So no sleep is longer than [`PATIENCE`], after which the waiter tries the
//! mutex again.
//!
//! A holder with a long operation reports progress from time to time
//! ([`RobustGuard::note_progress`]). A waiter's timeout counts from the last report, or from when
//! the mutex last changed hands: it is for holders that hang.
//!
//! # Layout
//! 64 bytes, one cache line. The C library's part differs between C libraries: [`LAYOUT`]
//! identifies it, and processes compare it before they share the memory.

use std::cell::UnsafeCell;
use std::io;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering, fence};
use std::time::Duration;

use crate::patience::WaitedFor;
use crate::{futex, waits};

/// The longest sleep before the mutex is tried again.
pub const PATIENCE: Duration = Duration::from_millis(10);
/// The first sleep. Usually the mutex is free after it; if not, the thread that has it may wait for media.
const SHORT: Duration = Duration::from_millis(1);
/// Tries of a held mutex before going to sleep.
const SPINS: u32 = 100;

/// Identifies the layout of a [`RobustMutex`]. Processes can share one only if this number is the
/// same in all of them.
pub const LAYOUT: u32 = {
    let library = if cfg!(target_env = "gnu") {
        1
    } else if cfg!(target_env = "musl") {
        2
    } else {
        3
    };
    (library << 24) | ((size_of::<usize>() as u32) << 16) | MUTEX_BYTES as u32
};

const MUTEX_BYTES: usize = size_of::<libc::pthread_mutex_t>();
const WAITING: u32 = 1;
/// The same number in every C library of Linux; the `libc` crate lacks it.
const PTHREAD_MUTEX_ROBUST: libc::c_int = 1;

/// A robust mutex for threads of several processes. See the module's documentation.
///
/// It contains no value: the data it guards is next to it in shared memory.
#[repr(C, align(64))]
pub struct RobustMutex {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    /// 1 if a thread may be sleeping on it.
    waiting: AtomicU32,
    /// Process that took the mutex last and has not released it; 0 if it has. For messages only.
    holder: AtomicU32,
    /// 1 when a guard was dropped unrepaired. The C library has this state, too, but glibc's
    /// `pthread_mutex_trylock` keeps a mutex locked that it reports as not recoverable.
    lost: AtomicU16,
    /// A number that the holder chose, for [`RobustMutex::note_progress_of`].
    owner: AtomicU16,
    /// Incremented when the mutex is taken, and when its holder reports progress.
    progress: AtomicU32,
}

const _: () = assert!(size_of::<RobustMutex>() == 64 && align_of::<RobustMutex>() == 64);

// SAFETY: the C library's mutex is made for concurrent use, and the words are atomic.
unsafe impl Send for RobustMutex {}
// SAFETY: as above.
unsafe impl Sync for RobustMutex {}

/// Why the lock was not acquired.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another thread held it for the whole time.
    #[error(
        "the lock was held by process {holder_pid} (as numbered where it runs) for {waited:?}; is it stopped?"
    )]
    Timeout {
        /// The process, as numbered in its own PID namespace; 0 if unknown.
        holder_pid: u32,
        /// How long this thread waited since the holder's last progress.
        waited: Duration,
    },
    /// A holder died, and the next one released the lock without calling [`RobustGuard::repaired`].
    #[error(
        "an earlier holder of the lock died and what it guards was not repaired; \
         it must be set up anew"
    )]
    NotRecoverable,
    /// The system call failed.
    #[error("cannot lock: {0}")]
    System(#[source] io::Error),
}

/// Converts the convention of the `pthread` functions, which return the error.
fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}

/// This process's ID, cached: a system call for each lock operation would be too expensive.
fn own_pid() -> u32 {
    static PID: AtomicU32 = AtomicU32::new(0);
    static WATCHES: AtomicBool = AtomicBool::new(false);

    extern "C" fn forget() {
        PID.store(0, Ordering::Relaxed);
    }

    // Relaxed: the number changes only in a fork, whose child has one thread.
    match PID.load(Ordering::Relaxed) {
        0 => {
            // Before the number is kept. Relaxed: a second handler, of a second thread or of a child
            // that was forked in between, does no harm.
            if !WATCHES.load(Ordering::Relaxed) {
                // Without it (no memory) a forked child would take itself for its parent, and the C
                // library keeps it from releasing an inherited mutex.
                // SAFETY: the handler only stores to an atomic.
                let _ = unsafe { libc::pthread_atfork(None, None, Some(forget)) };
                WATCHES.store(true, Ordering::Relaxed);
            }
            let pid = std::process::id();
            PID.store(pid, Ordering::Relaxed);
            pid
        }
        pid => pid,
    }
}

impl RobustMutex {
    /// Initialises an unlocked mutex in place.
    ///
    /// # Safety
    /// `place` is aligned to 64 bytes, valid for 64, shared between all users of the mutex, and not
    /// used yet by any thread. A mutex that is in use must not be initialised again.
    pub unsafe fn init(place: *mut RobustMutex) -> io::Result<()> {
        // SAFETY: all-zero is valid for the attributes, which the next call fills in.
        let mut attributes: libc::pthread_mutexattr_t = unsafe { std::mem::zeroed() };
        // SAFETY: a structure on this stack.
        check(unsafe { libc::pthread_mutexattr_init(&raw mut attributes) })?;
        let made = (|| {
            // SAFETY: initialised above.
            check(unsafe {
                libc::pthread_mutexattr_setpshared(
                    &raw mut attributes,
                    libc::PTHREAD_PROCESS_SHARED,
                )
            })?;
            // SAFETY: as above.
            check(unsafe {
                libc::pthread_mutexattr_setrobust(&raw mut attributes, PTHREAD_MUTEX_ROBUST)
            })?;
            // SAFETY: inside `place`, which is valid by the caller's contract.
            let mutex = unsafe { &raw mut (*place).mutex };
            // SAFETY: as above; not in use yet.
            check(unsafe { libc::pthread_mutex_init(mutex.cast(), &raw const attributes) })
        })();
        // SAFETY: initialised above, and not used afterwards.
        unsafe { libc::pthread_mutexattr_destroy(&raw mut attributes) };
        made?;
        // SAFETY: inside `place`, which is valid by the caller's contract.
        unsafe { (&raw mut (*place).waiting).write(AtomicU32::new(0)) };
        // SAFETY: as above.
        unsafe { (&raw mut (*place).holder).write(AtomicU32::new(0)) };
        // SAFETY: as above.
        unsafe { (&raw mut (*place).lost).write(AtomicU16::new(0)) };
        // SAFETY: as above.
        unsafe { (&raw mut (*place).owner).write(AtomicU16::new(0)) };
        // SAFETY: as above.
        unsafe { (&raw mut (*place).progress).write(AtomicU32::new(0)) };
        Ok(())
    }

    /// The mutex at an address.
    ///
    /// # Safety
    /// [`RobustMutex::init`] was called there, by a process with the same [`LAYOUT`], and the
    /// memory stays mapped for `'a`. A guard that is never dropped (`mem::forget`) leaves the mutex
    /// in its thread's list of held ones: then the memory stays mapped until that thread has ended.
    pub unsafe fn at<'a>(place: *const RobustMutex) -> &'a RobustMutex {
        // SAFETY: forwarded to the caller; everything inside is atomic or behind an `UnsafeCell`.
        unsafe { &*place }
    }

    /// Takes the lock if it is free or its holder is dead. Returns `None` if it is held.
    pub fn try_lock(&self) -> Result<Option<RobustGuard<'_>>, LockError> {
        // SAFETY: initialised, as every `RobustMutex` is.
        let result = unsafe { libc::pthread_mutex_trylock(self.mutex.get()) };
        let previous_owner_died = match result {
            0 => false,
            libc::EOWNERDEAD => true,
            libc::EBUSY => return Ok(None),
            // The C library ran out of a resource; there is nothing to wait for.
            other => return Err(LockError::System(io::Error::from_raw_os_error(other))),
        };
        // Relaxed: for messages, and read back by the holder itself.
        self.holder.store(own_pid(), Ordering::Relaxed);
        self.note_progress();
        let guard = RobustGuard { mutex: self, previous_owner_died, not_send: PhantomData };
        // Relaxed: written under the mutex.
        if self.lost.load(Ordering::Relaxed) != 0 {
            return Err(LockError::NotRecoverable);
        }
        Ok(Some(guard))
    }

    /// Tells the waiters that the mutex changed hands, or that its holder makes progress. The
    /// caller holds the mutex, or speaks for the holder.
    fn note_progress(&self) {
        // Relaxed: a hint; concurrent increments may count once.
        self.progress
            .store(self.progress.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Reports progress for a holder that cannot do it now. Called by another thread of its process
    /// that knows the holder is not stuck.
    pub fn note_progress_of_holder(&self) {
        // If the holder reports at the same time, both count once.
        self.note_progress();
    }

    /// Reports progress if the current holder chose this number: see [`RobustGuard::set_owner`].
    pub fn note_progress_of(&self, owner: u16) {
        // Relaxed: a hint. If the mutex changes hands concurrently, that is progress as well.
        if self.holder.load(Ordering::Relaxed) != 0 && self.owner.load(Ordering::Relaxed) == owner {
            self.note_progress();
        }
    }

    /// Takes the lock, waiting up to `timeout` since the holder's last progress, or without a
    /// limit.
    ///
    /// A thread that already holds the lock deadlocks with itself: it gets [`LockError::Timeout`]
    /// if there is a timeout.
    pub fn lock(&self, timeout: Option<Duration>) -> Result<RobustGuard<'_>, LockError> {
        match self.try_lock()? {
            Some(guard) => Ok(guard),
            None => self.lock_contended(timeout),
        }
    }

    #[cold]
    fn lock_contended(&self, timeout: Option<Duration>) -> Result<RobustGuard<'_>, LockError> {
        for _ in 0..SPINS {
            // Relaxed: only a hint; the mutex itself orders.
            if self.holder.load(Ordering::Relaxed) == 0
                && let Some(guard) = self.try_lock()?
            {
                return Ok(guard);
            }
            std::hint::spin_loop();
        }
        // Relaxed, here and below: a hint.
        let mut wait = WaitedFor::new(self.progress.load(Ordering::Relaxed));
        let mut limit = SHORT;
        loop {
            self.waiting.store(WAITING, Ordering::Relaxed);
            // Pairs with the fence in `unlock`: either this thread finds the mutex released, or the
            // releasing thread finds the word set.
            fence(Ordering::SeqCst);
            if let Some(guard) = self.try_lock()? {
                // The word stays set: other threads may be asleep.
                return Ok(guard);
            }
            let waited = wait.look(self.progress.load(Ordering::Relaxed));
            let left = match timeout {
                Some(timeout) if waited >= timeout => {
                    let holder_pid = self.holder.load(Ordering::Relaxed);
                    return Err(LockError::Timeout { holder_pid, waited });
                }
                Some(timeout) => timeout - waited,
                None => PATIENCE,
            };
            if limit != SHORT {
                waits::about_to_wait();
            }
            futex::wait_shared(&self.waiting, WAITING, Some(left.min(limit)));
            limit = PATIENCE;
        }
    }

    /// Releases the mutex that this thread holds.
    fn unlock(&self) {
        // Relaxed: for messages and as a hint only.
        self.holder.store(0, Ordering::Relaxed);
        // SAFETY: initialised, as every `RobustMutex` is.
        let result = unsafe { libc::pthread_mutex_unlock(self.mutex.get()) };
        if result != 0 {
            // Not the owner. A guard rules that out, except in a child whose fork went unnoticed.
            return;
        }
        // Pairs with the fence in `lock_contended`.
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::Relaxed) == WAITING
            && self.waiting.swap(0, Ordering::Relaxed) == WAITING
        {
            futex::wake_shared(&self.waiting, 1);
        }
    }
}

/// The lock, held by this thread.
#[must_use]
pub struct RobustGuard<'a> {
    mutex: &'a RobustMutex,
    previous_owner_died: bool,
    /// The owner is a thread: the guard does not move to another.
    not_send: PhantomData<*const ()>,
}

impl RobustGuard<'_> {
    /// Returns whether the previous holder died with the lock: what the mutex guards may be half
    /// changed.
    pub fn previous_owner_died(&self) -> bool {
        self.previous_owner_died
    }

    /// Reports progress of a long operation, so that waiters do not time out.
    pub fn note_progress(&self) {
        self.mutex.note_progress();
    }

    /// Sets the holder's number, by which other threads of its process recognise the mutexes to
    /// report progress for. Either every holder of a mutex sets one, or none does.
    pub fn set_owner(&self, owner: u16) {
        // Relaxed: a hint for `note_progress_of`.
        self.mutex.owner.store(owner, Ordering::Relaxed);
    }

    /// Declares that what the mutex guards is consistent again. Without it, dropping a guard after
    /// an owner's death makes the mutex unusable for every process.
    pub fn repaired(&mut self) {
        if self.previous_owner_died {
            // SAFETY: held by this thread, after its owner's death.
            let result = unsafe { libc::pthread_mutex_consistent(self.mutex.mutex.get()) };
            debug_assert_eq!(result, 0, "held by this thread, after its owner's death");
            self.previous_owner_died = false;
        }
    }
}

impl Drop for RobustGuard<'_> {
    fn drop(&mut self) {
        // Relaxed: while the mutex is held, only its holder writes it.
        if self.mutex.holder.load(Ordering::Relaxed) != own_pid() {
            // A forked child inherited the guard. It does not hold the mutex.
            return;
        }
        if self.previous_owner_died {
            // Relaxed: read under the mutex. Stored first, so that a thread that dies here leaves
            // it lost, too.
            self.mutex.lost.store(1, Ordering::Relaxed);
            self.repaired();
        }
        self.mutex.unlock();
    }
}
