//! Scripted failures: which operation fails, with what error, and what it leaves behind.
//!
//! A [`Trigger`] selects operations by kind, place and count. A [`Fault`] makes those fail; a
//! [`Gate`] blocks one in its middle until the test opens it, so that operations of several threads
//! overlap in a chosen way and no test depends on timing.
//!
//! A failed write may have left nothing, its first bytes, or all of them. These bytes are visible,
//! as they are in a page cache, and open: a crash state may contain them. [`Fault::reaching_media`]
//! makes them durable although the call failed. After a failed `write_back` or `flush`, no
//! repetition of the call makes durable what it covered, until that is rewritten;
//! [`Fault::forgetting`] also makes readers see the old bytes, as the kernel may show them once it
//! has dropped pages that it could not write.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use aquifer_pool::media::{ByteRange, MediaOperation};
use rustix::io::Errno;

/// Selects operations.
#[derive(Debug, Clone)]
pub struct Trigger {
    operation: MediaOperation,
    range: Option<ByteRange>,
    skip: u64,
    times: u64,
}

impl Trigger {
    /// Selects the next operation of this kind, once.
    pub fn on(operation: MediaOperation) -> Trigger {
        Trigger { operation, range: None, skip: 0, times: 1 }
    }

    /// Selects not the next matching operation but the `n`-th, counted from 1.
    pub fn nth(mut self, n: u64) -> Trigger {
        self.skip = n.saturating_sub(1);
        self
    }

    /// Selects only operations that touch this range. A flush touches none.
    pub fn within(mut self, range: ByteRange) -> Trigger {
        self.range = Some(range);
        self
    }

    /// Selects that operation and all matching ones after it.
    pub fn lasting(mut self) -> Trigger {
        self.times = u64::MAX;
        self
    }

    /// Returns whether it selects this operation, and counts it.
    fn picks(&mut self, operation: MediaOperation, ranges: &[ByteRange]) -> bool {
        let touches = |range: &ByteRange| {
            self.range.is_none_or(|wanted| {
                range.offset_bytes < wanted.end_bytes() && wanted.offset_bytes < range.end_bytes()
            })
        };
        let fits = self.range.is_none() || ranges.iter().any(touches);
        if operation != self.operation || !fits {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        let picked = self.times > 0;
        self.times -= u64::from(picked && self.times != u64::MAX);
        picked
    }
}

/// How much of a failed write remains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// This many of its first bytes.
    First(usize),
    /// All of it.
    All,
}

/// Makes operations fail.
///
/// ```
/// use aquifer_crashkit::unguarded::UnguardedMedia;
/// use aquifer_pool::media::{Media, MediaOperation, PersistenceDomain};
/// use aquifer_crashkit::{CrashMedia, Fault, Left, Trigger};
///
/// let media = CrashMedia::new(4096, PersistenceDomain::PageCache)?;
/// let second = Trigger::on(MediaOperation::WriteDurable).nth(2);
/// media.fail(Fault::io_error(second).leaving(Left::First(512)));
/// media.write_durable_unguarded(0, &[1; 1024]).unwrap();
/// assert!(media.write_durable_unguarded(0, &[2; 1024]).is_err());
/// assert_eq!(media.image()[511..513], [2, 1]);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Fault {
    trigger: Trigger,
    pub(super) errno: i32,
    pub(super) left: Left,
    pub(super) reaches_media: bool,
    pub(super) forgets: bool,
}

impl Fault {
    /// Creates a fault with this errno; a failed write leaves nothing.
    pub fn new(trigger: Trigger, errno: i32) -> Fault {
        Fault { trigger, errno, left: Left::Nothing, reaches_media: false, forgets: false }
    }

    /// Creates a fault with EIO.
    pub fn io_error(trigger: Trigger) -> Fault {
        Fault::new(trigger, Errno::IO.raw_os_error())
    }

    /// Creates a fault with ENOSPC.
    pub fn no_space(trigger: Trigger) -> Fault {
        Fault::new(trigger, Errno::NOSPC.raw_os_error())
    }

    /// Sets what a failed write leaves.
    pub fn leaving(mut self, left: Left) -> Fault {
        self.left = left;
        self
    }

    /// Makes what a failed write leaves durable.
    pub fn reaching_media(mut self) -> Fault {
        self.reaches_media = true;
        self
    }

    /// After a failed `write_back` or `flush`, makes readers see the durable bytes instead of those
    /// it covered.
    pub fn forgetting(mut self) -> Fault {
        self.forgets = true;
        self
    }

    /// Returns how many bytes a failed write of `len` leaves.
    pub(super) fn left_of(&self, len: usize) -> usize {
        match self.left {
            Left::Nothing => 0,
            Left::First(bytes) => bytes.min(len),
            Left::All => len,
        }
    }
}

/// The scripted failures and gates of a medium.
#[derive(Debug, Default)]
pub(super) struct Script {
    faults: Vec<Fault>,
    holds: Vec<(Trigger, Arc<Door>)>,
}

impl Script {
    pub fn fail(&mut self, fault: Fault) {
        self.faults.push(fault);
    }

    pub fn hold(&mut self, trigger: Trigger) -> Gate {
        let door = Arc::new(Door::default());
        self.holds.push((trigger, Arc::clone(&door)));
        Gate { door }
    }

    pub fn clear(&mut self) {
        self.faults.clear();
    }

    /// Returns the fault of this operation, if any. Every fault counts every operation that it
    /// matches.
    pub fn fault(&mut self, operation: MediaOperation, ranges: &[ByteRange]) -> Option<Fault> {
        let mut picked = None;
        for fault in &mut self.faults {
            if fault.trigger.picks(operation, ranges) && picked.is_none() {
                picked = Some(fault.clone());
            }
        }
        picked
    }

    /// Returns the door that this operation has to pass in its middle.
    pub fn door(&mut self, operation: MediaOperation, ranges: &[ByteRange]) -> Option<Arc<Door>> {
        let mut picked = None;
        for (trigger, door) in &mut self.holds {
            if trigger.picks(operation, ranges) && picked.is_none() {
                picked = Some(Arc::clone(door));
            }
        }
        picked
    }
}

/// The place where an operation waits for its gate.
#[derive(Debug, Default)]
pub(super) struct Door {
    state: Mutex<DoorState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct DoorState {
    reached: bool,
    open: bool,
}

impl Door {
    fn lock(&self) -> MutexGuard<'_, DoorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, condition: impl Fn(&DoorState) -> bool) {
        let state = self.lock();
        let waited = self.changed.wait_while(state, |state| !condition(state));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn change(&self, change: impl FnOnce(&mut DoorState)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until the gate is open.
    pub fn pass(&self) {
        self.change(|state| state.reached = true);
        self.wait_until(|state| state.open);
    }
}

/// Holds an operation in its middle: begun, not completed. Opens when dropped.
#[derive(Debug)]
pub struct Gate {
    door: Arc<Door>,
}

impl Gate {
    /// Waits until the operation has reached it.
    pub fn wait_until_reached(&self) {
        self.door.wait_until(|state| state.reached);
    }

    /// Lets the operation continue.
    pub fn open(&self) {
        self.door.change(|state| state.open = true);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}
