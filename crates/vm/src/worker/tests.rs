use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::*;
use crate::VmError;

#[test]
fn a_thread_starts_once_and_ends_with_its_owner() {
    let (bell, worker) = (Arc::new(Bell::new()), Worker::new());
    let (rung, has_rung) = mpsc::channel();
    for number in 0..3 {
        let (bell, rung) = (bell.clone(), rung.clone());
        let body = move || {
            let mut heard = Ticket::default();
            while bell.wait(&mut heard, None) {
                rung.send(number).unwrap();
            }
        };
        worker.start_once(c"aquifer-test", body).unwrap();
    }
    drop(rung);
    bell.ring();
    assert_eq!(has_rung.recv(), Ok(0));
    bell.stop();
    drop(worker);
    assert!(has_rung.recv().is_err(), "all threads have ended");
}

#[test]
fn a_ring_before_the_wait_is_heard_and_a_pause_ends_only_in_time_or_by_a_stop() {
    let bell = Bell::new();
    let mut heard = Ticket::default();
    bell.ring();
    bell.ring();
    assert!(bell.wait(&mut heard, None));
    assert!(bell.wait(&mut heard, Some(Duration::ZERO)), "the time is over");
    bell.ring();
    assert!(bell.pause(Duration::from_millis(1)));
    assert!(bell.wait(&mut heard, None), "the pause did not take the ring");
    bell.ring();
    bell.stop();
    assert!(!bell.wait(&mut heard, None));
    assert!(!bell.pause(Duration::MAX));
}

#[test]
fn jobs_run_in_order_and_all_of_them() {
    let (sent, received) = mpsc::channel();
    let jobs = JobThread::new(c"aquifer-test", |job: Box<dyn FnOnce() + Send>| job());
    for number in 0..100 {
        let sent = sent.clone();
        jobs.run(Box::new(move || sent.send(number).unwrap()));
    }
    drop((jobs, sent));
    assert_eq!(received.iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
}

#[derive(Default)]
struct CountWakes(AtomicU32);

impl Wake for CountWakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_completion_wakes_its_last_waker_or_the_thread_that_waits() {
    let [early, late] = [(); 2].map(|()| Arc::new(CountWakes::default()));
    let poll = |completion: &mut Completion<i32>, wakes: &Arc<CountWakes>| {
        let waker = Waker::from(wakes.clone());
        std::pin::pin!(completion).poll(&mut Context::from_waker(&waker))
    };
    let (done, mut coming) = completion();
    assert!(poll(&mut coming, &early).is_pending());
    assert!(poll(&mut coming, &late).is_pending());
    assert!(!coming.is_done());
    done.complete(7);
    assert!(coming.is_done());
    let woken = [&early, &late].map(|wakes| wakes.0.load(Ordering::SeqCst));
    assert_eq!(woken, [0, 1]);
    assert!(matches!(poll(&mut coming, &late), Poll::Ready(Ok(7))));

    let (done, mut coming) = completion();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || coming.wait().unwrap());
        done.complete(8);
        assert_eq!(waiting.join().unwrap(), 8);
    });
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker of the application");
    }
}

/// The thread belongs to all futures, and the waker to one.
#[test]
fn a_waker_that_panics_does_not_keep_later_futures_from_completing() {
    let jobs = JobThread::new(c"aquifer-test", |done: Completer<()>| done.complete(()));
    let ((first, mut woken), (second, later)) = (completion(), completion());
    let waker = Waker::from(Arc::new(Panics));
    let polled = std::pin::pin!(&mut woken).poll(&mut Context::from_waker(&waker));
    assert!(polled.is_pending());
    jobs.run(first);
    jobs.run(second);
    drop(jobs); // ends the thread when it has run both
    assert!(woken.is_done() && later.is_done());
}

/// Where the threads do not exist, nothing waits for them and nothing runs in their place.
#[test]
fn a_forked_child_neither_waits_nor_runs_jobs() {
    let bell = Arc::new(Bell::new());
    let own = bell.clone();
    let (worker, started) = (Worker::new(), Worker::new());
    let body = move || {
        let mut heard = Ticket::default();
        while own.wait(&mut heard, None) {}
    };
    started.start_once(c"aquifer-test", body).unwrap();
    let (_done, mut coming) = completion::<()>();
    let jobs = JobThread::new(c"aquifer-test", |()| panic!("a job of the parent"));
    // SAFETY: the child uses only these objects, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        jobs.run(());
        drop(jobs);
        bell.ring();
        let is_inert = worker.start(c"aquifer-test", || ()).is_err()
            && matches!(coming.wait(), Err(VmError::Forked))
            && !coming.is_done();
        worker.join();
        drop(started);
        // SAFETY: ends the child without running the parent's code.
        unsafe { libc::_exit(i32::from(!is_inert)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    bell.stop();
}
