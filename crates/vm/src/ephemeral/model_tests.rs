//! A pool compared with a plain reference, over a kernel that fails now and then.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use aquifer_testkit::campaign;
use aquifer_testkit::rng::Rng;

use super::VmaBudget;
use super::pool::{NoSlot, Pool, PoolStats, Slot};
use super::unmapping::{Left, Span, Unmapper};

const SLOTS_A_RING: usize = 128;
const RINGS: usize = 3;
const SLOTS: usize = RINGS * SLOTS_A_RING;

/// The contents of the address of each slot, which is the slot's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Reservation,
    Drained,
    Mapping,
    Nothing,
    Stranger,
}

#[derive(Debug)]
struct Fake {
    at: Vec<At>,
    random: Rng,
    /// The percentage of calls that fail.
    failures: u64,
    is_abandoned: bool,
}

#[derive(Clone)]
struct FakeKernel(Rc<RefCell<Fake>>);

impl FakeKernel {
    fn with<T>(&self, work: impl FnOnce(&mut Fake) -> T) -> T {
        work(&mut self.0.borrow_mut())
    }
}

impl Fake {
    fn fails(&mut self) -> bool {
        self.random.below(100) < self.failures
    }

    fn set(&mut self, span: Span, at: At) {
        for one in &mut self.at[span.address..span.address + span.len_bytes] {
            assert!(matches!(one, At::Mapping | At::Drained), "{one:?} was taken away");
            *one = at;
        }
    }
}

impl Unmapper for FakeKernel {
    type Place = ();

    unsafe fn drain(&self, spans: &[Span], left: &mut Vec<Left>) {
        for &span in spans {
            if self.with(Fake::fails) {
                // SAFETY: forwarded to the caller.
                left.push(unsafe { self.vacate(span) });
            } else {
                self.with(|fake| fake.set(span, At::Drained));
                left.push(Left::Drained);
            }
        }
    }

    unsafe fn vacate(&self, span: Span) -> Left {
        self.with(|fake| match (fake.fails(), fake.fails()) {
            (false, _) => {
                fake.set(span, At::Reservation);
                Left::Reserved
            }
            (true, true) => Left::Stuck,
            (true, false) => {
                let stranger = fake.fails();
                fake.set(span, if stranger { At::Stranger } else { At::Nothing });
                Left::Hole
            }
        })
    }

    fn close_hole(&self, span: Span) -> bool {
        self.with(|fake| {
            assert_eq!(span.len_bytes, 1);
            let is_free = fake.at[span.address] == At::Nothing && !fake.fails();
            if is_free {
                fake.at[span.address] = At::Reservation;
            }
            is_free
        })
    }

    fn abandon(&self, _place: &()) {
        self.with(|fake| fake.is_abandoned = true);
    }

    fn is_current(&self) -> bool {
        true
    }
}

struct Tried {
    pool: Pool<FakeKernel>,
    kernel: FakeKernel,
    vmas: Arc<VmaBudget>,
    taken: BTreeMap<usize, Slot>,
}

impl Tried {
    fn new(failures: u64, seed: u64, vmas: usize) -> Tried {
        let fake = Fake {
            at: vec![At::Reservation; SLOTS],
            random: Rng::new(seed),
            failures,
            is_abandoned: false,
        };
        let kernel = FakeKernel(Rc::new(RefCell::new(fake)));
        let vmas = Arc::new(VmaBudget::new(vmas));
        let pool = Pool::new(1, SLOTS_A_RING, 20, vmas.clone(), kernel.clone());
        (0..RINGS).for_each(|ring| pool.add_ring((), ring * SLOTS_A_RING));
        Tried { pool, kernel, vmas, taken: BTreeMap::new() }
    }

    fn take(&mut self) -> Result<(), NoSlot> {
        let (slot, address, ()) = self.pool.take(|()| ())?;
        let before = self.kernel.with(|fake| std::mem::replace(&mut fake.at[address], At::Mapping));
        assert!(matches!(before, At::Reservation | At::Drained), "{before:?} was given out");
        assert!(self.taken.insert(address, slot).is_none(), "given out twice");
        Ok(())
    }

    fn any(&mut self, number: u64) -> Option<Slot> {
        let count = self.taken.len() as u64;
        let address = *self.taken.keys().nth((number % count.max(1)) as usize)?;
        self.taken.remove(&address)
    }

    fn step(&mut self, random: &mut Rng) {
        let number = random.next_u64();
        match random.below(200) {
            0..100 => drop(self.take()),
            100..190 => {
                if let Some(slot) = self.any(number)
                    && self.pool.retire(slot)
                {
                    self.pool.drain_unless_draining();
                }
            }
            190..196 => {
                if let Some(slot) = self.any(number) {
                    self.pool.release(slot);
                }
            }
            196..198 => self.pool.drain(),
            _ => self.pool.release_idle(),
        }
        self.check();
    }

    /// Checks that mappings in use exist, and that all VMAs are accounted for.
    fn check(&self) {
        self.kernel.with(|fake| {
            assert!(self.taken.keys().all(|&address| fake.at[address] == At::Mapping));
            let is_mapping = |at: At| matches!(at, At::Mapping | At::Drained);
            let is_mapped: Vec<bool> = fake.at.iter().map(|&at| is_mapping(at)).collect();
            let mappings = is_mapped.iter().filter(|&&mapped| mapped).count();
            let gaps = is_mapped.chunk_by(|a, b| a == b).filter(|run| !run[0]).count();
            // The last gap belongs to the region.
            assert!(mappings + gaps <= self.vmas.used() + 1, "{mappings} + {gaps} mappings");
        });
        assert_eq!(self.pool.stats().taken, self.taken.len());
        assert!(self.vmas.used() <= self.vmas.limit());
    }

    /// Checks that after failures nothing is lost except slots with foreign mappings, once the
    /// system works again.
    fn recover(mut self) {
        self.kernel.with(|fake| fake.failures = 0);
        while let Some(slot) = self.any(0) {
            self.pool.retire(slot);
        }
        self.pool.release_idle();
        assert_eq!(self.pool.stats(), PoolStats::default());
        assert_eq!(self.vmas.used(), 0);
        let strangers =
            self.kernel.with(|fake| fake.at.iter().filter(|&&at| at == At::Stranger).count());
        while self.take().is_ok() {}
        let most = (SLOTS - strangers).min(self.vmas.limit());
        assert!(self.taken.len() >= most / 2, "{} of {most}", self.taken.len());
        if self.vmas.limit() >= SLOTS {
            assert_eq!(self.taken.len(), SLOTS - strangers);
        }
        let Tried { pool, kernel, taken, .. } = self;
        taken.into_values().for_each(|slot| pool.release(slot));
        drop(pool);
        assert_eq!(kernel.with(|fake| fake.is_abandoned), strangers > 0);
    }
}

#[test]
fn slots_are_given_out_once_and_none_is_lost() {
    let mut random = Rng::new(campaign::seed(11));
    for (failures, vmas) in [(0, 1000), (0, 60), (2, 1000), (20, 1000), (20, 60)] {
        let mut tried = Tried::new(failures, random.next_u64(), vmas);
        for _ in 0..campaign::steps(4000) {
            tried.step(&mut random);
        }
        tried.recover();
    }
}
