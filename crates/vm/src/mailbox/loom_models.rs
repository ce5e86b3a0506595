//! Loom models of the slots: one slot, a thread that answers, and readers that may give up.

use loom::sync::Arc;
use loom::thread;

use super::*;

/// What rings, and whether the thread ends when it has looked once more.
struct Rung {
    rings: AtomicU32,
    is_ending: AtomicU32,
}

struct Model {
    mailbox: Mailbox<u64>,
    rung: Rung,
}

impl Model {
    fn ring(&self) {
        // Release: pairs with the acquire of the thread, as writing to an eventfd and reading it do.
        self.rung.rings.fetch_add(1, Ordering::Release);
        wake(&self.rung.rings, 1);
    }

    /// A reader; returns whether it was answered, which it then was with its own range.
    fn read(&self, start: u64, limit: Duration) -> bool {
        let read = self.mailbox.read(start..start + 1, limit, || self.ring(), |answer| *answer);
        assert!(read.as_ref().is_ok_and(|answer| *answer == start) || limit == Duration::ZERO);
        read.is_ok()
    }

    /// The thread.
    fn serve(&self) {
        loop {
            // Acquire: pairs with the release in `ring`.
            let heard = self.rung.rings.load(Ordering::Acquire);
            let is_ending = self.rung.is_ending.load(Ordering::Acquire) == 1;
            let mut taken = None;
            self.mailbox.look(|number, range| taken = Some((number, range)));
            if let Some((number, range)) = taken {
                assert_eq!(range.end, range.start + 1);
                self.mailbox.answer(number, range.start);
            }
            if is_ending {
                return;
            }
            wait(&self.rung.rings, heard, None);
        }
    }
}

/// Explores a thread and two readers of these limits; in the end, the slot is free.
fn explore(limits: [Duration; 2]) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let rung = Rung { rings: AtomicU32::new(0), is_ending: AtomicU32::new(0) };
        let model = Arc::new(Model { mailbox: Mailbox::new(1), rung });
        let other = model.clone();
        let server = thread::spawn(move || other.serve());
        let other = model.clone();
        let reader = thread::spawn(move || other.read(10, limits[0]));
        model.read(20, limits[1]);
        reader.join().unwrap();
        // Release: pairs with the acquire of the thread.
        model.rung.is_ending.store(1, Ordering::Release);
        model.ring();
        server.join().unwrap();
        assert_eq!(model.mailbox.slots[0].state.load(Ordering::Relaxed), FREE);
        model.mailbox.slots[0].answer.with(|answer| {
            // SAFETY: the other threads have ended.
            assert!(unsafe { &*answer }.is_none());
        });
    });
}

#[test]
fn loom_readers_share_a_slot() {
    explore([Duration::MAX, Duration::MAX]);
}

#[test]
fn loom_a_reader_gives_up_and_another_gets_its_slot() {
    explore([Duration::ZERO, Duration::MAX]);
}

#[test]
fn loom_all_readers_give_up() {
    explore([Duration::ZERO, Duration::ZERO]);
}
