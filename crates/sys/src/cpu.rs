//! The current CPU, the number of CPUs, and contention for them.

/// Returns the number of CPUs this process may run on.
pub fn count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the CPU the calling thread runs on: a hint, stale as soon as it is read.
#[inline]
pub fn current() -> usize {
    // SAFETY: no arguments; served by the vDSO, async-signal-safe.
    let cpu = unsafe { libc::sched_getcpu() };
    usize::try_from(cpu).unwrap_or(0)
}

/// Returns the bytes of physical memory, or of the memory cgroup's limit if that is lower.
pub fn memory_bytes() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    let physical = u64::try_from(pages).unwrap_or(0) * 4096;
    let limit = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok())
        .min();
    limit.map_or(physical, |limit| limit.min(physical))
}

/// Returns the number of voluntary context switches of the calling thread. Async-signal-safe.
pub fn voluntary_switches() -> u64 {
    u64::try_from(thread_usage().ru_nvcsw).unwrap_or(0)
}

/// Returns the number of involuntary context switches of the calling thread.
pub fn involuntary_switches() -> u64 {
    u64::try_from(thread_usage().ru_nivcsw).unwrap_or(0)
}

fn thread_usage() -> libc::rusage {
    // SAFETY: an all-zero rusage is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives on this stack.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage
}

/// Makes the calling thread run only when its CPU is otherwise idle (`SCHED_IDLE`); if that is
/// refused, with the lowest priority. Undoing this needs privilege.
pub fn run_when_idle() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure lives on this stack; 0 is the calling thread.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    if result != 0 {
        // SAFETY: integers only; for `setpriority`, 0 is the calling thread.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
    }
}

/// Makes the calling thread run soon when it is woken, also where other threads want the CPU: it asks for
/// short turns, and for no more of the time than others. Linux before 6.12 knows no such wish.
pub fn run_promptly() {
    /// The kernel's least.
    const TURN_NS: u64 = 100_000;
    const LEN_BYTES: u32 = size_of::<libc::sched_attr>() as u32;
    // SAFETY: integers only.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let found = &raw mut attributes;
    // SAFETY: the structure of that length lives on this stack; 0 is the calling thread.
    let known = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, found, LEN_BYTES, 0) };
    if known == 0 && attributes.sched_policy == libc::SCHED_OTHER as u32 {
        attributes.sched_runtime = TURN_NS;
        // SAFETY: as above.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    }
}

/// Gives the calling process's session a larger share of CPUs that sessions compete for, where that is
/// permitted, and where the kernel divides the time by sessions. Only if its parent leads that session:
/// not that of a shell.
pub fn prefer_session_of_parent() {
    // SAFETY: both calls only return numbers. 0 stands for a process that this process's namespace does
    // not show.
    let (session, parent) = unsafe { (libc::getsid(0), libc::getppid()) };
    if session > 0 && session == parent {
        let _ = std::fs::write("/proc/self/autogroup", "-10");
    }
}

/// Returns whether the calling thread runs only when its CPU is otherwise idle.
pub fn runs_when_idle() -> bool {
    // SAFETY: 0 is the calling thread.
    let policy = unsafe { libc::sched_getscheduler(0) };
    // SAFETY: as above.
    policy == libc::SCHED_IDLE || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) } == 19
}

/// Reads how many threads of the machine are runnable.
#[derive(Debug)]
pub struct Contention(std::fs::File);

impl Contention {
    /// Opens the source once: a reading then costs a microsecond or two.
    pub fn open() -> std::io::Result<Contention> {
        std::fs::File::open("/proc/loadavg").map(Contention)
    }

    /// Returns whether more threads are runnable, including the caller, than there are CPUs.
    /// `false` if unknown.
    pub fn is_any_waiting(&self) -> bool {
        use std::os::unix::fs::FileExt;
        let mut text = [0; 128];
        let len = self.0.read_at(&mut text, 0).unwrap_or(0);
        // "0.20 0.18 0.12 1/80 11206": the fourth field is runnable/total threads.
        let runnable = std::str::from_utf8(&text[..len])
            .ok()
            .and_then(|text| text.split(' ').nth(3)?.split('/').next()?.parse::<i64>().ok());
        // SAFETY: sysconf has no preconditions.
        let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        runnable.is_some_and(|runnable| runnable > cpus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn more_threads_than_cpus_are_noticed() {
        let contention = Contention::open().unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // SAFETY: sysconf has no preconditions.
            for _ in 0..unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) } {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            while !contention.is_any_waiting() {
                std::thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
