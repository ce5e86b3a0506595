//! Numbers of lifted descriptors, in processes with various limits of open files.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Barrier;

use crate::support::{Role, command};
use aquifer_sys::high_fd::{HeldFile, lift};

pub const ROLES: &[Role] = &[
    ("behind", |_| behind()),
    ("equal", |_| equal()),
    ("refused", |_| refused()),
    ("changed", |_| changed()),
];

fn succeeds(role: &str) {
    let ended = command(role).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

const SOFT: u64 = 1024;

fn limit() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills in the structure.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit
}

fn set_limit(rlim_cur: u64, rlim_max: u64) {
    let limit = libc::rlimit { rlim_cur, rlim_max };
    // SAFETY: reads the structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// Lowers the soft limit, which is always permitted; false if no number lies behind it.
fn lower() -> bool {
    let hard = limit().rlim_max;
    set_limit(SOFT.min(hard), hard);
    if hard <= SOFT {
        eprintln!("skipped: at most {hard} files");
    }
    hard > SOFT
}

fn lifted() -> OwnedFd {
    lift(File::open("/proc/self/exe").unwrap().into())
}

/// The numbers of descriptors that are closed one after the other.
fn numbers(count: usize) -> Vec<RawFd> {
    (0..count).map(|_| lifted().as_raw_fd()).collect()
}

fn is_free_of_repeats(numbers: &[RawFd]) -> bool {
    numbers.iter().collect::<std::collections::HashSet<_>>().len() == numbers.len()
}

fn behind() {
    if !lower() {
        return;
    }
    let held = HeldFile::new(File::open("/proc/self/exe").unwrap().into()).unwrap();
    let number = held.as_fd().as_raw_fd();
    assert!(number as u64 >= SOFT, "{number}");
    // SAFETY: a number that is out of reach.
    assert!(unsafe { libc::dup2(0, number) } < 0, "the program can take it");
    // SAFETY: changes no memory.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    assert_eq!(limit().rlim_cur, SOFT);
    let numbers = numbers((limit().rlim_max - SOFT).min(1000) as usize);
    assert!(is_free_of_repeats(&numbers));
}

/// A number that became free is not the next one, even if none lies behind the limit.
fn equal() {
    let limit = SOFT.min(limit().rlim_max);
    set_limit(limit, limit);
    let numbers = numbers(40);
    assert!(numbers.iter().all(|&number| number as u64 >= limit - 64), "{numbers:?}");
    assert!(is_free_of_repeats(&numbers), "{numbers:?}");
}

/// A sandbox in which limits can be read and not changed.
fn refused() {
    if !lower() || !forbid_limits() {
        return eprintln!("skipped");
    }
    let numbers = numbers(40);
    assert!(numbers.iter().all(|number| (960..1024).contains(number)), "{numbers:?}");
}

fn forbid_limits() -> bool {
    let statement = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |offset| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0);
    let is = |k, jt, jf| statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, jt, jf);
    let end = |k| statement(libc::BPF_RET | libc::BPF_K, k, 0, 0);
    let filter = [
        // The number of the call; the third argument, a pointer to the new limit, in two words.
        load(0),
        is(libc::SYS_prlimit64 as u32, 0, 4),
        load(16 + 2 * 8),
        is(0, 0, 3),
        load(16 + 2 * 8 + 4),
        is(0, 0, 1),
        end(libc::SECCOMP_RET_ALLOW),
        end(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: no memory is involved.
    let is_ready = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0;
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: `program` and `filter` outlive the call, which copies them.
    is_ready && unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program, 0, 0) } == 0
}

/// Another thread of the program sets the limit while descriptors are lifted: what it sets stays.
fn changed() {
    if !lower() {
        return;
    }
    const ROUNDS: u64 = 3000;
    let (hard, barrier) = (limit().rlim_max, Barrier::new(2));
    let undone = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                barrier.wait();
                drop(lifted());
                barrier.wait();
            }
        });
        let set = |round: u64| {
            let soft = SOFT - 1 - round % 500;
            barrier.wait();
            (0..round % 50).for_each(|_| std::hint::spin_loop());
            set_limit(soft, hard);
            barrier.wait();
            limit().rlim_cur != soft
        };
        (0..ROUNDS).filter(|&round| set(round)).count()
    });
    assert_eq!(undone, 0);
}

#[test]
fn held_descriptors_are_out_of_reach() {
    succeeds("behind");
}

#[test]
fn without_numbers_out_of_reach_they_are_taken_in_turn() {
    succeeds("equal");
}

#[test]
fn where_limits_cannot_be_raised_numbers_are_high() {
    succeeds("refused");
}

#[test]
fn a_limit_that_the_program_sets_meanwhile_stays() {
    succeeds("changed");
}
