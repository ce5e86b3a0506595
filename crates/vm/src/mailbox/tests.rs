//! Readers and a thread, on the real clock.

use aquifer_testkit::rng::Rng;

use super::*;

const LONG: Duration = Duration::from_secs(60);

const SLOTS: usize = 256;

fn is_late(mailbox: &Mailbox<u64>, limit: Duration) -> bool {
    mailbox.read(0..10, limit, || (), |_| ()).is_err()
}

fn states(mailbox: &Mailbox<u64>) -> Vec<u32> {
    let states = mailbox.slots.iter().map(|slot| slot.state.load(Ordering::Acquire));
    states.filter(|&state| state != FREE).collect()
}

/// Waits until a slot is in this state.
fn wait_for(mailbox: &Mailbox<u64>, state: u32) {
    let start = Instant::now();
    while !states(mailbox).contains(&state) {
        assert!(start.elapsed() < LONG, "waited in vain");
        std::thread::yield_now();
    }
}

#[test]
fn reads_that_no_thread_takes_give_their_slots_back() {
    let mailbox = Mailbox::<u64>::new(SLOTS);
    for _ in 0..3 {
        // One more than there are slots.
        for _ in 0..=SLOTS {
            assert!(is_late(&mailbox, Duration::ZERO));
        }
        assert_eq!(states(&mailbox), [USED; SLOTS]);
        mailbox.look(|_, _| panic!("given up"));
        assert!(states(&mailbox).is_empty());
    }
}

#[test]
fn a_read_given_up_while_it_runs_is_freed_by_its_answer() {
    let mailbox = Mailbox::<u64>::new(SLOTS);
    let mut limit = Duration::from_millis(1);
    // Until the slot is taken within the limit.
    let number = loop {
        let mut taken = None;
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| is_late(&mailbox, limit));
            while states(&mailbox).is_empty() && !reader.is_finished() {
                std::thread::yield_now();
            }
            while taken.is_none() && !reader.is_finished() {
                mailbox.look(|number, _| taken = Some(number));
            }
            assert!(reader.join().unwrap());
        });
        if let Some(number) = taken {
            break number;
        }
        mailbox.look(|_, _| panic!("given up"));
        limit *= 2;
    };
    mailbox.look(|_, _| panic!("it runs"));
    assert_eq!(states(&mailbox), [ABANDONED]);
    mailbox.answer(number, 7);
    assert!(states(&mailbox).is_empty());
}

#[test]
fn an_answer_is_freed_after_its_reader_has_used_it() {
    let mailbox = Mailbox::<u64>::new(SLOTS);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| mailbox.read(5..8, LONG, || (), |answer| *answer).ok());
        wait_for(&mailbox, POSTED);
        let mut taken = None;
        mailbox.look(|number, range| taken = Some((number, range)));
        let (number, range) = taken.unwrap();
        assert_eq!(range, 5..8);
        mailbox.answer(number, 7);
        assert_eq!(reader.join().unwrap(), Some(7));
        assert_eq!(states(&mailbox), [USED]);
        mailbox.look(|_, _| panic!("it was answered"));
        assert!(states(&mailbox).is_empty());
    });
}

/// Readers of any patience against a thread that answers in any order: each gets its own range, or is late.
#[test]
fn readers_get_the_answers_to_their_own_reads() {
    let mailbox = Mailbox::<u64>::new(SLOTS);
    std::thread::scope(|scope| {
        let read = |reader| {
            let mailbox = &mailbox;
            scope.spawn(move || {
                let mut rng = Rng::new(reader);
                for _ in 0..2000 {
                    let start = rng.below(1 << 40);
                    let limit = match rng.below(3) {
                        0 => Duration::ZERO,
                        1 => Duration::from_micros(rng.below(100)),
                        _ => LONG,
                    };
                    let check = |answer: &u64| assert_eq!(*answer, start);
                    let read = mailbox.read(start..start + 8, limit, || (), check);
                    assert!(read.is_ok() || limit < LONG);
                }
            })
        };
        let readers: Vec<_> = (0..4).map(read).collect();
        let mut rng = Rng::new(4);
        let mut taken: Vec<(usize, Range<u64>)> = vec![];
        while readers.iter().any(|reader| !reader.is_finished()) || !taken.is_empty() {
            mailbox.look(|number, range| taken.push((number, range)));
            if !taken.is_empty() && rng.chance(0.5) {
                let (number, range) = taken.swap_remove(rng.below(taken.len() as u64) as usize);
                mailbox.answer(number, range.start);
            }
        }
    });
    mailbox.look(|_, _| panic!("no reader is left"));
    assert!(states(&mailbox).is_empty());
}
