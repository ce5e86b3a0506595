//! Batches on io_uring.
//!
//! # One ring per thread
//! A ring is created by a thread's first batch and kept in thread-local storage, because the
//! cheapest modes of io_uring (single issuer, deferred task work) bind a ring to the thread that
//! created it. At most [`LARGEST_KEPT`] rings are kept in the process; beyond that a thread creates
//! a ring for one batch and drops it, so that a program with a thousand threads does not use a
//! thousand descriptors.
//!
//! # Forks
//! A forked child does not have its parent's rings: their memory is not inherited, so a child cannot
//! change the parent's queues, and a ring that is dropped in a child only closes its descriptor. The
//! memory's addresses may belong to another mapping there.
//!
//! A batch may run code of an application, and that may fork: in the child [`run`] then returns with
//! its transfers not completed.
//!
//! # Loop
//! ```text
//!  ┌─▶ fill: batch.next() ──▶ slot ──▶ submission entry     while slots are free
//!  │   enter: submit all, wait for an eighth of what is in flight
//!  └── reap: each completion ──▶ Transfer::absorb ──▶ batch.complete, slot free
//!                                         └── short or interrupted: its next leg goes in again
//! ```
//! Waiting for an eighth instead of one completion reaps several per system call while seven
//! eighths of the queue stay busy. A batch may work for long on a completion: then further requests
//! are submitted before the next completion is reported, so that the queue does not run empty. For the
//! same reason a queue that is filled from empty is submitted at 4, 8, 16, 32 requests: the device
//! works on the first ones while the batch prepares the others.
//!
//! # Invariants
//! * A slot is occupied from the push of its first leg until its transfer has ended; it has exactly
//!   one leg in the ring. There are as many slots as `depth`, never more than entries.
//! * [`Flight`] is not dropped while the kernel holds a leg: its destructor waits. If even that
//!   fails the process aborts, since the kernel would keep writing into memory that is about to be
//!   freed.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use io_uring::{Builder, IoUring, opcode, squeue, types};
use once_cell::race::OnceBox;

use super::super::state::FileState;
use super::super::transfer::{Begun, Leg, Transfer, finish_blocking};
use super::TransferResult;
use crate::{Batch, IoOperation, fork};

/// Maximum number of rings kept by threads for their next batch.
const LARGEST_KEPT: u64 = 64;
/// Entries of the usual ring; deeper batches create a larger one.
const USUAL_ENTRIES: usize = 64;

/// Legs that are submitted at once, at least, while the queue is filled.
const FIRST_LEGS: usize = 4;

/// Work of a batch on its completions after which further requests are submitted.
const LONG_WORK: Duration = Duration::from_micros(50);

/// How many rings the process keeps, in the lower half; in the upper half, the process
/// ([`fork::generation`]): a child keeps none of its parent's.
static KEPT: AtomicU64 = AtomicU64::new(0);
const KEPT_PROCESS: u64 = !0 << 32;

thread_local! {
    static RING: Cell<Option<KeptRing>> = const { Cell::new(None) };
}

/// No ring is available; the batch has not been touched.
pub(super) struct NoRing;

struct Ring {
    ring: ManuallyDrop<IoUring>,
    entries: usize,
    generation: u64,
}

impl Ring {
    /// Whether the calling process created it.
    fn is_own(&self) -> bool {
        self.generation == fork::generation()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.is_own() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.ring) };
        } else {
            // SAFETY: the child's copy of the descriptor, which only the ring used.
            unsafe { libc::close(self.ring.as_raw_fd()) };
        }
    }
}

/// A ring kept by a thread, counted in [`KEPT`] until it is used or dropped.
struct KeptRing {
    ring: Ring,
    _place: Place,
}

/// A claim on one of the [`LARGEST_KEPT`] places.
struct Place {
    /// The process whose place it is, as in [`KEPT`].
    process: u64,
}

impl Place {
    fn claim() -> Option<Self> {
        let process = fork::generation() << 32;
        // Relaxed: only a bound on resources; it publishes nothing.
        let claimed = KEPT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |seen| {
            let kept = if seen & KEPT_PROCESS == process { seen - process } else { 0 };
            (kept < LARGEST_KEPT).then_some(process + kept + 1)
        });
        claimed.is_ok().then_some(Place { process })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // In a child, its parent's place counts no more. Relaxed: as above.
        let _ = KEPT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |seen| {
            (seen & KEPT_PROCESS == self.process).then(|| seen - 1)
        });
    }
}

/// Returns why the kernel refuses rings to this process, determined once; `None` if it grants them.
pub(super) fn refusal() -> Option<&'static str> {
    static REFUSAL: OnceBox<Option<&'static str>> = OnceBox::new();
    *REFUSAL.get_or_init(|| {
        Box::new(match make(USUAL_ENTRIES) {
            Ok(ring) => {
                keep(ring);
                None
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOSYS) => Some("this kernel has no io_uring"),
                Some(libc::EPERM | libc::EACCES) => Some("io_uring is not permitted"),
                // Out of descriptors or memory: may be temporary, so it is not a permanent refusal.
                Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN) => None,
                _ => Some("io_uring does not work here"),
            },
        })
    })
}

/// Creates a ring in the cheapest mode that this kernel supports.
fn make(entries: usize) -> std::io::Result<Ring> {
    let generation = fork::generation();
    let builders: [fn() -> Builder; 3] = [
        // 6.1: completions are processed by this thread when it enters the kernel, all at once.
        || IoUring::builder().dontfork().setup_single_issuer().setup_defer_taskrun().clone(),
        // 5.19: at least the thread is not interrupted for each completion.
        || IoUring::builder().dontfork().setup_coop_taskrun().clone(),
        || IoUring::builder().dontfork().clone(),
    ];
    let mut refused = std::io::Error::from_raw_os_error(libc::EINVAL);
    for builder in builders {
        match builder().build(entries as u32) {
            Ok(ring) => {
                return Ok(Ring { ring: ManuallyDrop::new(ring), entries, generation });
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(error),
        }
    }
    Err(refused)
}

/// Returns this thread's ring, or a new one.
fn take(depth: usize) -> Option<Ring> {
    let kept = RING.try_with(Cell::take).ok().flatten();
    if let Some(KeptRing { ring, .. }) = kept
        && ring.is_own()
        && ring.entries >= depth
    {
        return Some(ring);
    }
    if refusal().is_some() {
        return None;
    }
    make(depth.max(USUAL_ENTRIES).next_power_of_two()).ok()
}

/// Keeps a ring for this thread's next batch, unless [`LARGEST_KEPT`] are kept.
fn keep(ring: Ring) {
    if let Some(_place) = Place::claim() {
        // Fails when the thread is ending: the ring is dropped with it.
        let _ = RING.try_with(|slot| slot.set(Some(KeptRing { ring, _place })));
    }
}

/// Runs a batch; fails if no ring is available. Returns at once in a child that the batch forked.
pub(super) fn run(file: &FileState, batch: &mut dyn Batch, depth: usize) -> Result<(), NoRing> {
    let Some(mut ring) = take(depth) else {
        return Err(NoRing);
    };
    let mut flight = Flight::new(&mut ring, depth);
    let mut reaped = Vec::with_capacity(depth);
    let mut ended = Vec::with_capacity(depth);
    loop {
        flight.fill(file, batch);
        if flight.in_flight == 0 || !flight.ring.is_own() {
            break;
        }
        if flight.enter(flight.in_flight / 8).is_err() {
            // The ring worked before but fails now (a sandbox was entered). Legs that the kernel
            // has not taken can still be done with blocking calls.
            flight.finish_unsubmitted(file, batch);
            drop(flight);
            return Err(NoRing);
        }
        flight.reap(&mut reaped);
        let advanced =
            reaped.drain(..).filter_map(|(slot, result)| flight.advance(file, slot, result));
        ended.extend(advanced);
        let mut submitted = Instant::now();
        let mut reported = ended.drain(..).peekable();
        while let Some((slot, tag, result)) = reported.next() {
            // Not earlier: to the batch, a transfer is in flight until it is reported.
            flight.free.push(slot);
            batch.complete(tag, result);
            if !flight.ring.is_own() {
                return Ok(());
            }
            if reported.peek().is_some() && submitted.elapsed() > LONG_WORK {
                flight.fill(file, batch);
                if !flight.ring.is_own() {
                    return Ok(());
                }
                flight.submit();
                submitted = Instant::now();
            }
        }
    }
    drop(flight);
    if ring.is_own() {
        keep(ring);
    }
    Ok(())
}

struct Slot {
    transfer: Transfer,
    leg: Leg,
    tag: u64,
}

/// The transfers of one batch that are in the ring.
struct Flight<'ring> {
    ring: &'ring mut Ring,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// Occupied slots.
    in_flight: usize,
    /// Legs pushed whose completion has not been reaped yet. Differs from `in_flight` while
    /// completions are being reported to the batch, which may panic halfway.
    pending_legs: usize,
    /// Of those, the ones pushed since the last submission.
    pushed_legs: usize,
}

impl<'ring> Flight<'ring> {
    fn new(ring: &'ring mut Ring, depth: usize) -> Self {
        Flight {
            ring,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            in_flight: 0,
            pending_legs: 0,
            pushed_legs: 0,
        }
    }

    /// Takes requests while slots are free, and until the batch has forked.
    fn fill(&mut self, file: &FileState, batch: &mut dyn Batch) {
        while let Some(&slot) = self.free.last() {
            let Some(request) = batch.next() else { return };
            if !self.ring.is_own() {
                return;
            }
            match Transfer::begin(file, &request) {
                Begun::Ended(result) => batch.complete(request.tag, result),
                Begun::Going(transfer) => {
                    self.free.pop();
                    let leg = transfer.leg(file);
                    self.slots[slot] = Some(Slot { transfer, leg, tag: request.tag });
                    self.in_flight += 1;
                    self.push(file, slot, leg);
                    let submitted_legs = self.pending_legs - self.pushed_legs;
                    if self.pushed_legs >= submitted_legs.max(FIRST_LEGS) {
                        self.submit();
                    }
                }
            }
        }
    }

    fn push(&mut self, file: &FileState, slot: usize, leg: Leg) {
        let descriptor = types::Fd(file.descriptor(leg.is_direct).as_raw_fd());
        let len_bytes = leg.len_bytes as u32;
        let entry: squeue::Entry = match leg.operation {
            IoOperation::Write => opcode::Write::new(descriptor, leg.memory, len_bytes)
                .offset(leg.offset_bytes)
                .build(),
            _ => opcode::Read::new(descriptor, leg.memory, len_bytes)
                .offset(leg.offset_bytes)
                .build(),
        };
        // SAFETY: the leg's memory is valid until its transfer ends (contract of `Batch`), the
        // file's descriptors live as long as `file`, and `Flight` waits for the leg before either
        // is dropped.
        let pushed = unsafe { self.ring.ring.submission().push(&entry.user_data(slot as u64)) };
        pushed.expect("a ring has at least as many entries as a flight has slots");
        self.pending_legs += 1;
        self.pushed_legs += 1;
    }

    /// Submits pushed legs without waiting. What the kernel does not take now, the next enter submits.
    fn submit(&mut self) {
        self.pushed_legs = 0;
        let _ = self.ring.ring.submit();
    }

    /// Submits all pushed legs and waits for at least `wanted.max(1)` completions.
    fn enter(&mut self, wanted: usize) -> std::io::Result<()> {
        self.pushed_legs = 0;
        match self.ring.ring.submit_and_wait(wanted.max(1)) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // Interrupted, or the kernel needs completions reaped or memory first: the caller
                // reaps and enters again.
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Collects completions, so that the batch can be called without borrowing the queue.
    fn reap(&mut self, reaped: &mut Vec<(usize, Result<usize, i32>)>) {
        let before = reaped.len();
        reaped.extend(self.ring.ring.completion().map(|entry| {
            let result = entry.result();
            (entry.user_data() as usize, usize::try_from(result).map_err(|_| -result))
        }));
        self.pending_legs -= reaped.len() - before;
    }

    /// Processes one completion: if the transfer has ended, returns its result, and its slot, which
    /// the caller frees; otherwise pushes the next leg.
    fn advance(
        &mut self,
        file: &FileState,
        slot: usize,
        result: Result<usize, i32>,
    ) -> Option<(usize, u64, TransferResult)> {
        let occupant = self.slots[slot].as_mut().expect("completions name occupied slots");
        if let Some(result) = occupant.transfer.absorb(file, occupant.leg, result) {
            let tag = occupant.tag;
            self.slots[slot] = None;
            self.in_flight -= 1;
            return Some((slot, tag, result));
        }
        let leg = occupant.transfer.leg(file);
        occupant.leg = leg;
        self.push(file, slot, leg);
        None
    }

    /// Returns the number of legs that the kernel has not taken.
    fn unsubmitted(&mut self) -> usize {
        self.ring.ring.submission().len()
    }

    /// After a failed enter: performs the legs that the kernel has not taken with blocking calls.
    fn finish_unsubmitted(&mut self, file: &FileState, batch: &mut dyn Batch) {
        if self.unsubmitted() < self.pending_legs {
            abandon("io_uring_enter fails with transfers in flight");
        }
        self.pending_legs = 0;
        for slot in 0..self.slots.len() {
            if let Some(occupant) = self.slots[slot].take() {
                self.in_flight -= 1;
                let result = finish_blocking(file, occupant.transfer);
                batch.complete(occupant.tag, result);
            }
        }
    }
}

impl Drop for Flight<'_> {
    /// Waits for everything in flight. There is something only if the batch panicked, or in a child,
    /// whose parent waits.
    fn drop(&mut self) {
        if !self.ring.is_own() {
            return;
        }
        let mut reaped = Vec::new();
        while self.pending_legs > 0 {
            if self.enter(1).is_err() {
                abandon("cannot wait for transfers in flight");
            }
            self.reap(&mut reaped);
            reaped.clear();
        }
    }
}

/// Aborts: the kernel holds pointers to memory that cannot be kept valid, so nothing else is sound.
fn abandon(why: &str) -> ! {
    eprintln!(
        "aquifer-device: {why}; aborting, since the memory being transferred cannot be freed"
    );
    std::process::abort();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_ring_and_ends_with_it() {
        if refusal().is_some() {
            eprintln!("skipped: io_uring is refused here");
            return;
        }
        std::thread::spawn(|| {
            let ring = take(8).expect("io_uring is granted");
            let descriptor = ring.ring.as_raw_fd();
            keep(ring);
            let again = take(8).expect("io_uring is granted");
            assert_eq!(descriptor, again.ring.as_raw_fd());
            keep(again);
            let deeper = take(200).expect("io_uring is granted");
            assert!(deeper.entries >= 200);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_ring_of_another_process_is_not_used() {
        if refusal().is_some() {
            eprintln!("skipped: io_uring is refused here");
            return;
        }
        std::thread::spawn(|| {
            let mut ring = take(8).expect("io_uring is granted");
            ring.generation -= 1;
            keep(ring);
            assert_eq!(take(8).expect("io_uring is granted").generation, fork::generation());
        })
        .join()
        .unwrap();
    }

    /// Runs `work` in a forked child; returns whether it was true there.
    fn is_true_in_a_child(work: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child changes a count, forks and waits, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // A panic must not leave this function: the thread would end, and with it the child, with success.
            let work = std::panic::AssertUnwindSafe(work);
            let is_true = std::panic::catch_unwind(work).unwrap_or(false);
            let status = i32::from(!is_true);
            // SAFETY: ends the child without running any of the parent's code.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status == 0
    }

    /// In a child, since other tests keep rings here.
    #[test]
    fn a_child_keeps_as_many_rings_as_its_parent() {
        let is_so = is_true_in_a_child(|| {
            let places: [_; LARGEST_KEPT as usize] = std::array::from_fn(|_| Place::claim());
            let is_full = Place::claim().is_none();
            let is_so_again = is_true_in_a_child(|| {
                let own = [Place::claim(), Place::claim()];
                drop(places);
                let is_claimed = own.iter().all(Option::is_some);
                let [first, _second] = own;
                drop(first);
                is_claimed && KEPT.load(Ordering::Relaxed) & !KEPT_PROCESS == 1
            });
            is_full && is_so_again
        });
        assert!(is_so, "its parent's rings count in the child");
    }
}
