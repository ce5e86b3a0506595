//! Loom models of the bell.

use loom::sync::{Arc, Mutex};
use loom::thread;

use super::{Bell, Ticket};

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Work is found after a ring: the protocol of every thread that waits for work.
#[test]
fn loom_work_is_found_after_a_ring() {
    explore(|| {
        let shared = Arc::new((Bell::new(), Mutex::new(0)));
        let threads = [(); 2].map(|()| {
            let shared = shared.clone();
            thread::spawn(move || {
                loop {
                    let ticket = shared.0.ticket();
                    let mut work = shared.1.lock().unwrap();
                    if *work > 0 {
                        *work -= 1;
                        return;
                    }
                    drop(work);
                    shared.0.sleep(ticket, None);
                }
            })
        });
        for _ in 0..2 {
            *shared.1.lock().unwrap() += 1;
            shared.0.ring();
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// A stop ends a wait, and what was announced before it is seen.
#[test]
fn loom_a_stop_ends_a_wait() {
    explore(|| {
        let shared = Arc::new((Bell::new(), Mutex::new(0)));
        let other = shared.clone();
        let waiting = thread::spawn(move || {
            let mut heard = Ticket::default();
            while other.0.wait(&mut heard, None) {}
            assert_eq!(*other.1.lock().unwrap(), 1);
        });
        *shared.1.lock().unwrap() = 1;
        shared.0.ring();
        shared.0.stop();
        waiting.join().unwrap();
    });
}
