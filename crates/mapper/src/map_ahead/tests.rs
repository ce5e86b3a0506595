use super::markers::FIRST_BYTES;
use super::*;
use crate::populate::tests::Mapping;

const PAGE: usize = aquifer_sys::memory::SMALL_PAGE_BYTES;

fn limits(in_flight_bytes: u64) -> MapAheadLimits {
    MapAheadLimits { workers: 2, in_flight_bytes }
}

fn as_span(mapping: &Arc<Mapping>) -> Arc<dyn Span> {
    mapping.clone()
}

/// Helpers run only when the processors have nothing else to do, which may take long.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = std::time::Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(300), "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A sparse file in memory: large, and cheap to populate.
fn sparse(len_bytes: usize) -> Arc<Mapping> {
    let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap();
    file.set_len(len_bytes as u64).unwrap();
    Mapping::of_file(file, len_bytes)
}

#[test]
fn a_range_is_mapped_without_its_reader_and_nothing_else_is() {
    for form in [Form::Advice, Form::Touch] {
        let ahead = MapAhead::with_tuning(
            limits(64 << 20),
            Tuning { form: Some(form), ..Tuning::default() },
        );
        assert_eq!(ahead.shared.lock().helpers, 0, "starts no thread before it is asked");
        let mapping = Mapping::of_pages(4096);
        let ticket = ahead.request(&as_span(&mapping), 1024 * PAGE..3072 * PAGE).unwrap();
        wait_until("the range is through", || ticket.is_done());
        assert_eq!(mapping.mapped_pages(1024 * PAGE..3072 * PAGE), 2048, "{form:?}");
        assert_eq!(mapping.mapped_pages(0..1000 * PAGE), 0, "{form:?}");
        assert_eq!(mapping.mapped_pages(3100 * PAGE..4096 * PAGE), 0, "{form:?}");
        let stats = ahead.stats();
        assert_eq!((stats.requests, stats.populated_bytes), (1, 2048 * PAGE as u64));
    }
}

#[test]
fn a_helper_waits_for_its_reader_at_the_markers() {
    let ahead = MapAhead::new(limits(16 << 20));
    let mapping = sparse(128 << 20);
    let ticket = ahead.request(&as_span(&mapping), 0..128 << 20).unwrap();
    let mut reader = 0;
    while reader < 128 << 20 {
        let enough = (reader + (12 << 20)).min(128 << 20);
        wait_until("the helper is far enough ahead", || {
            mapping.mapped_pages(enough - PAGE..enough) == 1
        });
        // The helper makes no more progress: it waits for the reader, or is done.
        wait_until("the helper rests", || {
            let state = ahead.shared.lock();
            state.running.is_empty() && state.idle == state.helpers
        });
        let far = reader + (24 << 20);
        if far < 128 << 20 {
            assert_eq!(mapping.mapped_pages(far..128 << 20), 0, "reader at {reader}");
        }
        reader += 4 << 20;
        // Does what the reader's loads would do.
        let read = Form::Touch.populate(&*mapping, reader - (4 << 20)..reader + PAGE);
        read.unwrap();
    }
    wait_until("it comes to the end", || ticket.is_done());
}

#[test]
fn a_reader_that_never_comes_does_not_hold_up_others() {
    let ahead = MapAhead::new(MapAheadLimits { workers: 1, in_flight_bytes: 16 << 20 });
    let abandoned = sparse(64 << 20);
    let waiting = ahead.request(&as_span(&abandoned), 0..64 << 20).unwrap();
    wait_until("it waits", || abandoned.mapped_pages((10 << 20)..(12 << 20)) == 512);
    let mapping = sparse(4 << 20);
    let ticket = ahead.request(&as_span(&mapping), 0..4 << 20).unwrap();
    wait_until("the other one is through", || ticket.is_done());
    assert!(!waiting.is_done());
    drop(waiting);
    ahead.settle();
    assert_eq!(Arc::strong_count(&abandoned), 1, "nothing else holds the mapping");
}

/// The mapping is dropped as soon as its request has ended, whatever the helper is doing.
#[test]
fn nothing_is_populated_after_it_was_unmapped() {
    let ahead = MapAhead::new(limits(1 << 30));
    for round in 0..200 {
        let mapping = sparse(32 << 20);
        let ticket = ahead.request(&as_span(&mapping), 0..32 << 20).unwrap();
        for _ in 0..round % 7 {
            std::thread::yield_now();
        }
        drop(ticket);
        ahead.settle();
        assert_eq!(Arc::strong_count(&mapping), 1);
        let populated = mapping.mapped_pages(0..32 << 20);
        std::thread::yield_now();
        assert_eq!(mapping.mapped_pages(0..32 << 20), populated);
    }
}

#[test]
fn a_dropped_ticket_lets_go_of_the_mapping() {
    let ahead = MapAhead::new(limits(1 << 30));
    let mapping = sparse(64 << 20);
    drop(ahead.request(&as_span(&mapping), 0..64 << 20));
    wait_until("it is let go", || Arc::strong_count(&mapping) == 1);
    wait_until("nothing is left to do", || ahead.stats().in_progress == 0);
}

#[test]
fn a_file_that_is_cut_short_ends_the_request_and_nothing_else() {
    for form in [Form::Advice, Form::Touch] {
        let ahead = MapAhead::with_tuning(
            limits(64 << 20),
            Tuning { form: Some(form), ..Tuning::default() },
        );
        let mapping = Mapping::of_pages(2048);
        mapping.file.set_len(1 << 20).unwrap();
        let ticket = ahead.request(&as_span(&mapping), 0..2048 * PAGE).unwrap();
        wait_until("the request ends", || ticket.is_done());
        assert_eq!(mapping.mapped_pages(0..1 << 20), 256, "{form:?}: up to the end");
    }
}

#[test]
fn helpers_end_with_the_last_request_pending_and_keep_out_of_the_way() {
    let ahead = MapAhead::new(limits(4 << 20));
    let mapping = sparse(64 << 20);
    let ticket = ahead.request(&as_span(&mapping), 0..64 << 20).unwrap();
    drop(ahead);
    assert!(ticket.is_done());
    drop(ticket);
    assert_eq!(Arc::strong_count(&mapping), 1);
    let idles = std::thread::spawn(|| {
        cpu::run_when_idle();
        cpu::runs_when_idle()
    });
    assert!(idles.join().unwrap());
}

/// A mapping may own the mapper whose helper drops the last reference to it.
#[test]
fn a_helper_may_drop_its_own_mapper() {
    struct Owner {
        mapping: Arc<Mapping>,
        _ahead: Arc<Mutex<Option<MapAhead>>>,
    }
    // SAFETY: the owner holds the mapping.
    unsafe impl Span for Owner {
        fn address(&self) -> *const u8 {
            self.mapping.address()
        }
        fn len_bytes(&self) -> usize {
            self.mapping.len_bytes()
        }
    }
    for _ in 0..50 {
        let ahead = Arc::new(Mutex::new(Some(MapAhead::new(limits(1 << 30)))));
        let mapping = sparse(16 << 20);
        let owner: Arc<dyn Span> =
            Arc::new(Owner { mapping: mapping.clone(), _ahead: ahead.clone() });
        let ticket = ahead.lock().unwrap().as_ref().unwrap().request(&owner, 0..16 << 20);
        drop((owner, ahead, ticket));
        wait_until("all is gone", || Arc::strong_count(&mapping) == 1);
    }
}

#[test]
fn without_workers_or_bytes_nothing_is_asked_for() {
    let mapping = sparse(1 << 20);
    let none = MapAhead::new(MapAheadLimits { workers: 0, in_flight_bytes: 1 << 20 });
    assert!(none.request(&as_span(&mapping), 0..1 << 20).is_none());
    let ahead = MapAhead::new(MapAheadLimits::default());
    assert!(ahead.request(&as_span(&mapping), 4096..4096).is_none());
    assert!(ahead.request(&as_span(&mapping), 1 << 21..1 << 22).is_none());
    assert_eq!(ahead.stats(), MapAheadStats::default());
}

/// Watches without a time limit, and never yields to other threads.
fn stubborn() -> Tuning {
    Tuning { watched_for: Duration::MAX, step_aside: false, ..Tuning::default() }
}

fn read(mapping: &Mapping, range: Range<usize>) {
    Form::Touch.populate(mapping, range).unwrap();
}

#[test]
fn a_watched_range_is_mapped_ahead_as_far_as_its_reader_deserves() {
    let ahead = MapAhead::with_tuning(limits(256 << 20), stubborn());
    let mapping = sparse(64 << 20);
    let mib = |mib: usize| mib << 20;
    let ticket = ahead.watch(&as_span(&mapping), 0..mib(64)).unwrap();
    let mut from = 0;
    for passed in [1, 4, 16] {
        // Everything up to the marker, and the marker.
        read(&mapping, mib(from)..mib(passed) + PAGE);
        from = passed;
        let end = 4 * passed;
        wait_until("three times what was read is mapped ahead", || {
            mapping.mapped_pages(mib(end) - PAGE..mib(end)) == 1
        });
        wait_until("the helper rests", || {
            let state = ahead.shared.lock();
            state.running.is_empty() && state.idle == state.helpers
        });
        assert_eq!(mapping.mapped_pages(mib(end)..mib(64)), 0, "{passed} MiB read");
        assert_eq!(mapping.mapped_pages(mib(2 * passed)..mib(2 * passed) + 1), 0, "a marker");
    }
    wait_until("it comes to the end", || ticket.is_done());
    let stats = ahead.stats();
    assert_eq!((stats.requests, stats.detected), (0, 1));
}

#[test]
fn what_is_not_read_in_order_is_left_alone() {
    let first = FIRST_BYTES;
    let whole = 0..64 << 20;
    // A gap; pages all over; nearly everything; nothing.
    let gap: &[Range<usize>] = &[0..first - 2 * PAGE, first - PAGE..first];
    let spread: Vec<_> = (0..64).map(|mib| mib << 20..(mib << 20) + first / 2).collect();
    let most = &[0..30 << 20, 30 << 20..60 << 20];
    for accesses in [gap, &spread, most, &[]] {
        let tuning = Tuning { watched_for: Duration::ZERO, ..stubborn() };
        let ahead = MapAhead::with_tuning(limits(256 << 20), tuning);
        let mapping = sparse(whole.end);
        accesses.iter().for_each(|range| read(&mapping, range.clone()));
        let ticket = ahead.watch(&as_span(&mapping), whole.clone()).unwrap();
        wait_until("it is watched no longer", || ticket.is_done());
        assert_eq!(ahead.stats(), MapAheadStats::default());
        drop(ticket);
        assert_eq!(Arc::strong_count(&mapping), 1);
    }
    let short = sparse(1 << 20);
    assert!(MapAhead::new(limits(1 << 30)).watch(&as_span(&short), 0..1 << 20).is_none());
}

/// A child has no helpers, and a helper of the parent may have held the lock at the fork.
#[test]
fn a_forked_child_does_nothing_and_hangs_nowhere() {
    let ahead = MapAhead::new(limits(1 << 30));
    let mapping = sparse(32 << 20);
    let ticket = ahead.request(&as_span(&mapping), 0..32 << 20).unwrap();
    let shared = Arc::clone(&ahead.shared);
    let held = shared.lock();
    // SAFETY: the child allocates nothing and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no preconditions; the alarm ends a child that hangs.
        unsafe { libc::alarm(20) };
        let refuses = ticket.is_done() && ahead.stats() == MapAheadStats::default();
        drop(ticket);
        drop(ahead);
        // SAFETY: ends the child without running the parent's destructors or exit handlers.
        unsafe { libc::_exit(i32::from(!refuses)) };
    }
    drop(held);
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "14 is the alarm: the child hung");
}
