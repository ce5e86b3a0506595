//! The robust mutex between threads and processes, including holders that are killed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{Actor, Role, hear, say};
use aquifer_sys::robust::{LockError, RobustMutex};
use aquifer_sys::shared_memory::SharedMemory;

pub const ROLES: &[Role] = &[("holder", holder), ("adder", adder)];

const LONG: Option<Duration> = Some(Duration::from_secs(30));
const SHORT: Option<Duration> = Some(Duration::from_millis(30));

/// A mutex and two numbers that it keeps equal, in shared memory.
struct Guarded {
    memory: SharedMemory,
    name: Option<String>,
}

impl Guarded {
    fn unnamed() -> Guarded {
        let memory = SharedMemory::anonymous(4096).unwrap();
        Guarded { memory, name: None }.init()
    }

    fn named() -> Guarded {
        let unique = aquifer_sys::random::next_u64().unwrap();
        let name = format!("aquifer-test-robust-{unique:016x}");
        let memory = SharedMemory::create(&name, 4096, 0o600).unwrap();
        Guarded { memory, name: Some(name) }.init()
    }

    fn init(self) -> Guarded {
        // SAFETY: fresh memory, aligned to a page.
        unsafe { RobustMutex::init(self.memory.start().cast()) }.unwrap();
        self
    }

    fn open(name: &str) -> Guarded {
        Guarded { memory: SharedMemory::open(name, true).unwrap(), name: None }
    }

    fn mutex(&self) -> &RobustMutex {
        // SAFETY: initialised when the memory was made, which this object keeps mapped.
        unsafe { RobustMutex::at(self.memory.start().cast()) }
    }

    fn number(&self, index: usize) -> &AtomicU64 {
        assert!(index < 2);
        // SAFETY: aligned, inside the memory, and only reached as an atomic.
        unsafe { AtomicU64::from_ptr(self.memory.start().add(64 + 8 * index).cast()) }
    }

    fn numbers(&self) -> [u64; 2] {
        [0, 1].map(|index| self.number(index).load(Ordering::Relaxed))
    }

    /// Adds one to both, with loads and stores that lose updates unless the mutex excludes other
    /// threads.
    fn add(&self) {
        for index in [0, 1] {
            let before = self.number(index).load(Ordering::Relaxed);
            std::hint::spin_loop();
            self.number(index).store(before + 1, Ordering::Relaxed);
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = SharedMemory::unlink(name);
        }
    }
}

/// Takes the lock, changes the first number and keeps the lock.
fn holder(arguments: &[String]) {
    let guarded = Guarded::open(&arguments[0]);
    let guard = guarded.mutex().lock(LONG).unwrap();
    guarded.number(0).store(99, Ordering::Relaxed);
    say(&format!("holding as {}", std::process::id()));
    if hear().as_deref() == Some("release") {
        guarded.number(1).store(99, Ordering::Relaxed);
        drop(guard);
        say("released");
        hear();
    }
}

/// Adds until killed; repairs what killed processes have left.
fn adder(arguments: &[String]) {
    let guarded = Guarded::open(&arguments[0]);
    say("ready");
    loop {
        let mut guard = guarded.mutex().lock(LONG).unwrap();
        repair(&guarded, &mut guard);
        guarded.add();
        drop(guard);
    }
}

fn repair(guarded: &Guarded, guard: &mut aquifer_sys::robust::RobustGuard<'_>) {
    let [first, second] = guarded.numbers();
    if guard.previous_owner_died() {
        assert!(first == second || first == second + 1, "{first} {second}");
        guarded.number(1).store(first, Ordering::Relaxed);
        guard.repaired();
    } else {
        assert_eq!(first, second, "no process died, so the numbers are equal");
    }
}

#[test]
fn it_excludes_threads() {
    let guarded = Guarded::unnamed();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5_000 {
                    let guard = guarded.mutex().lock(LONG).unwrap();
                    assert!(!guard.previous_owner_died());
                    guarded.add();
                }
            });
        }
    });
    assert_eq!(guarded.numbers(), [20_000; 2]);
}

#[test]
fn a_held_lock_times_out_and_names_its_holder() {
    let guarded = Guarded::unnamed();
    let guard = guarded.mutex().lock(None).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(guarded.mutex().try_lock().unwrap().is_none());
            match guarded.mutex().lock(SHORT).map(drop) {
                Err(LockError::Timeout { holder_pid, waited }) => {
                    assert_eq!(holder_pid, std::process::id());
                    assert!(Some(waited) >= SHORT);
                }
                other => panic!("{other:?}"),
            }
        });
    });
    // Also for this thread: it would deadlock with itself.
    assert!(matches!(guarded.mutex().lock(SHORT).map(drop), Err(LockError::Timeout { .. })));
    drop(guard);
    assert!(guarded.mutex().try_lock().unwrap().is_some());
}

/// The timeout is for a holder that makes no progress.
#[test]
fn a_holder_that_goes_on_is_waited_for() {
    let guarded = Guarded::unnamed();
    let limit = Duration::from_secs(1);
    let guard = guarded.mutex().lock(None).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| guarded.mutex().lock(Some(limit)).map(drop));
        // The total time exceeds the limit.
        for _ in 0..8 {
            std::thread::sleep(limit / 5);
            guard.note_progress();
        }
        drop(guard);
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_killed_holder_is_noticed_and_the_next_one_repairs() {
    let guarded = Guarded::named();
    let name = guarded.name.clone().unwrap();
    let mut other = Actor::start(&format!("holder {name}"));
    assert!(other.hear().starts_with("holding"));
    assert!(matches!(guarded.mutex().lock(SHORT).map(drop), Err(LockError::Timeout { .. })));
    let (says, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        // A thread that sleeps on the lock while its holder is killed, which wakes no waiter.
        let waiting = scope.spawn(|| {
            // SAFETY: no preconditions.
            says.send(unsafe { libc::gettid() }).unwrap();
            let mut guard = guarded.mutex().lock(Some(Duration::from_secs(3600))).unwrap();
            says.send(0).unwrap();
            assert!(guard.previous_owner_died());
            assert_eq!(guarded.numbers(), [99, 0]);
            guarded.number(1).store(99, Ordering::Relaxed);
            guard.repaired();
            assert!(!guard.previous_owner_died());
        });
        let thread = told.recv().unwrap();
        let stat = format!("/proc/self/task/{thread}/stat");
        while !std::fs::read_to_string(&stat).unwrap().contains(") S ") {
            std::thread::yield_now();
        }
        other.kill();
        if told.recv_timeout(Duration::from_secs(60)).is_err() {
            eprintln!("it hangs");
            std::process::abort();
        }
        waiting.join().unwrap();
    });
    let guard = guarded.mutex().lock(LONG).unwrap();
    assert!(!guard.previous_owner_died(), "it was repaired");
}

#[test]
fn releasing_a_lock_wakes_a_waiter_in_another_process() {
    let guarded = Guarded::named();
    let name = guarded.name.clone().unwrap();
    let mut other = Actor::start(&format!("holder {name}"));
    assert!(other.hear().starts_with("holding"));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let guard = guarded.mutex().lock(LONG).unwrap();
            assert!(!guard.previous_owner_died());
            assert_eq!(guarded.numbers(), [99, 99]);
        });
        assert_eq!(other.ask("release"), "released");
        waiting.join().unwrap();
    });
}

#[test]
fn a_lock_released_unrepaired_is_lost_for_all() {
    let guarded = Guarded::named();
    let name = guarded.name.clone().unwrap();
    let mut other = Actor::start(&format!("holder {name}"));
    assert!(other.hear().starts_with("holding"));
    other.kill();
    let guard = guarded.mutex().lock(LONG).unwrap();
    assert!(guard.previous_owner_died());
    drop(guard);
    for _ in 0..2 {
        let lost = guarded.mutex().lock(LONG).map(drop).unwrap_err();
        assert!(matches!(lost, LockError::NotRecoverable), "{lost}");
    }
    assert!(matches!(guarded.mutex().try_lock(), Err(LockError::NotRecoverable)));
}

#[test]
fn a_thread_that_ends_with_the_lock_is_a_dead_owner() {
    let guarded = Guarded::unnamed();
    std::thread::scope(|scope| {
        scope.spawn(|| std::mem::forget(guarded.mutex().lock(LONG).unwrap()));
    });
    let mut guard = guarded.mutex().lock(LONG).unwrap();
    assert!(guard.previous_owner_died());
    guard.repaired();
}

#[test]
fn a_guard_in_a_forked_child_releases_nothing() {
    let guarded = Guarded::unnamed();
    // The state after a death, in which dropping the guard unrepaired would make the mutex
    // unusable.
    std::thread::scope(|scope| {
        scope.spawn(|| std::mem::forget(guarded.mutex().lock(LONG).unwrap()));
    });
    let mut guard = guarded.mutex().lock(LONG).unwrap();
    assert!(guard.previous_owner_died());
    // SAFETY: the child only unlocks, which allocates nothing, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(guard);
        // SAFETY: ends the child without running any of the parent's code.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(guarded.mutex().try_lock().unwrap().is_none(), "still held"));
    });
    guard.repaired();
    drop(guard);
    assert!(guarded.mutex().try_lock().unwrap().is_some());
}

/// Processes are killed at any point: with the lock, waiting for it, and without it.
#[test]
fn a_kill_at_any_moment_loses_and_blocks_nothing() {
    let guarded = Guarded::named();
    let name = guarded.name.clone().unwrap();
    let role = format!("adder {name}");
    let mut adders: Vec<Actor> = (0..3).map(|_| Actor::start(&role)).collect();
    let mut reached = 0;
    for round in 0..40 {
        let index = round % adders.len();
        assert_eq!(adders[index].hear(), "ready");
        // Some work is done between two kills.
        let mut deaths = 0;
        while guarded.numbers()[0] < reached + 50 {
            let mut guard = guarded.mutex().lock(LONG).unwrap();
            deaths += u32::from(guard.previous_owner_died());
            repair(&guarded, &mut guard);
            guarded.add();
        }
        reached = guarded.numbers()[0];
        std::mem::replace(&mut adders[index], Actor::start(&role)).kill();
        if deaths > 0 {
            eprintln!("round {round}: repaired after a death");
        }
    }
    drop(adders);
    let mut guard = guarded.mutex().lock(LONG).unwrap();
    repair(&guarded, &mut guard);
}
