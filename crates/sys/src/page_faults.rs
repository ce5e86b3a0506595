//! The page faults of a thread, recorded by the kernel as they happen (`perf_event_open`).
//!
//! A [`FaultLog`] records the address of every fault that the kernel *accounts* to a thread and that
//! the thread took in user mode. Accounted faults are those that [`faults_of_process`] counts
//! (`getrusage`), and the kernel does both in one place, `mm_account_fault`: minor faults raise one
//! count and the event `PAGE_FAULTS_MIN`, major ones the other count and `PAGE_FAULTS_MAJ`. The more
//! usual event `PAGE_FAULTS` is raised elsewhere, also for faults that fail or are repeated, and
//! would not do: its surplus could hide a fault that is missing.
//!
//! So the faults that were recorded are never more than those that were accounted, and fewer when
//! one was not recorded: a fault in a system call (these events exclude the kernel, which is what
//! makes them available without privileges at `kernel.perf_event_paranoid` 2), a fault for a pinned
//! page, one of a thread without a log, or one for which the log had no room.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::check;
use crate::memory::{self, Protection, SMALL_PAGE_BYTES};
use crate::thread::this_thread;

/// `struct perf_event_attr`, as in its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_watermark: u32,
    bp_type: u32,
    config1: u64,
}

const _: () = assert!(size_of::<Attributes>() == 64);

const PERF_TYPE_SOFTWARE: u32 = 1;
const PERF_COUNT_SW_PAGE_FAULTS_MIN: u64 = 5;
const PERF_COUNT_SW_PAGE_FAULTS_MAJ: u64 = 6;
const PERF_SAMPLE_ADDR: u64 = 1 << 3;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HV: u64 = 1 << 6;
const WATERMARK: u64 = 1 << 14;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;
/// `_IO('$', 5)`.
const PERF_EVENT_IOC_SET_OUTPUT: u32 = 0x2405;
const PERF_RECORD_SAMPLE: u32 = 9;
/// Fields of `struct perf_event_mmap_page`.
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;

/// Room for 2,048 faults of 16 bytes. Without privileges, `kernel.perf_event_mlock_kb` (516) bounds
/// the logs of all processes of a user, beyond the memory that it may lock.
const RING_BYTES: usize = 8 * SMALL_PAGE_BYTES;
const LOG_BYTES: usize = SMALL_PAGE_BYTES + RING_BYTES;

/// Records the faults of one thread of this process. See the module's documentation.
///
/// It must not be dropped in a forked child, where its memory is not mapped.
#[derive(Debug)]
pub struct FaultLog {
    thread: libc::pid_t,
    minor: OwnedFd,
    major: OwnedFd,
    /// The kernel's page, and the ring behind it.
    memory: *mut u8,
    tail: u64,
}

// SAFETY: the memory belongs to the log, and is read by the thread that has it borrowed mutably.
unsafe impl Send for FaultLog {}

fn open(config: u64, thread: libc::pid_t) -> io::Result<OwnedFd> {
    let attributes = Attributes {
        kind: PERF_TYPE_SOFTWARE,
        size: size_of::<Attributes>() as u32,
        config,
        sample_period: 1,
        sample_type: PERF_SAMPLE_ADDR,
        flags: EXCLUDE_KERNEL | EXCLUDE_HV | WATERMARK,
        // No thread sleeps on the log, so none has to be woken.
        wakeup_watermark: u32::MAX,
        ..Attributes::default()
    };
    let (any_cpu, no_group) = (-1, -1);
    // SAFETY: the structure has the kernel's layout and the size that it states.
    let fd = check(unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            thread,
            any_cpu,
            no_group,
            PERF_FLAG_FD_CLOEXEC,
        )
    })?;
    // SAFETY: the descriptor was just made here.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

impl FaultLog {
    /// Records the faults of a thread of this process from now on.
    ///
    /// # Errors
    /// `EACCES` or `EPERM` where the system forbids it (`kernel.perf_event_paranoid` above 2, a
    /// system call filter), `ENOSYS` where the kernel lacks it, `ESRCH` if the thread has ended or
    /// belongs to another process.
    pub fn open(thread: libc::pid_t) -> io::Result<FaultLog> {
        let log = FaultLog::of_number(thread)?;
        // The thread may have ended before the call, and its number passed to another process's.
        // The events are of the thread that has the number, as long as that thread has not ended.
        let this = std::process::id();
        // SAFETY: signal 0 is not sent; it checks that the thread belongs to this process.
        check(unsafe { libc::syscall(libc::SYS_tgkill, this, thread, 0) })?;
        if log.has_ended() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(log)
    }

    /// A log of a thread of any process of this user.
    fn of_number(thread: libc::pid_t) -> io::Result<FaultLog> {
        let minor = open(PERF_COUNT_SW_PAGE_FAULTS_MIN, thread)?;
        let memory = memory::map_file(LOG_BYTES, Protection::ReadWrite, minor.as_fd(), 0)?;
        let major = open(PERF_COUNT_SW_PAGE_FAULTS_MAJ, thread).and_then(|major| {
            let request = libc::Ioctl::from(PERF_EVENT_IOC_SET_OUTPUT);
            // SAFETY: integers only.
            check(unsafe { libc::ioctl(major.as_raw_fd(), request, minor.as_raw_fd()) }.into())?;
            Ok(major)
        });
        match major {
            Ok(major) => Ok(FaultLog { thread, minor, major, memory, tail: 0 }),
            Err(error) => {
                // SAFETY: mapped above, and no other code has its address.
                unsafe { memory::unmap(memory, LOG_BYTES) }?;
                Err(error)
            }
        }
    }

    /// Its descriptors, which keep the kernel recording while any process has them.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.minor.as_fd(), self.major.as_fd()]
    }

    /// The thread, by the kernel's number.
    pub fn thread(&self) -> libc::pid_t {
        self.thread
    }

    /// Whether the thread has ended.
    pub fn has_ended(&self) -> bool {
        // Either event is enough: the kernel ends all events of a thread before it frees the number.
        self.descriptors().iter().any(|event| {
            let mut poll = libc::pollfd { fd: event.as_raw_fd(), events: 0, revents: 0 };
            // SAFETY: one structure on this stack.
            let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
            ready > 0 && poll.revents & (libc::POLLHUP | libc::POLLERR) != 0
        })
    }

    /// Whether the thread may be between the account of a fault and its record. The kernel does not
    /// sleep there, so this is `false` for the calling thread, and for one that is seen asleep or has
    /// ended: then all faults that the kernel accounted to it before the call are recorded, and
    /// visible to the next [`FaultLog::take`]. `true` if that cannot be determined.
    pub fn may_be_recording(&self) -> bool {
        if self.thread == this_thread() {
            return false;
        }
        let state = std::fs::read(format!("/proc/self/task/{}/stat", self.thread))
            .ok()
            .and_then(|stat| state_in(&stat));
        // The log's head is loaded after this.
        fence(Ordering::SeqCst);
        !matches!(state, Some(b'S' | b'D' | b'Z' | b'X')) && !self.has_ended()
    }

    fn position(&self, field: usize) -> &AtomicU64 {
        let place = self.memory.wrapping_add(field).cast();
        // SAFETY: a word of the kernel's page, mapped as long as the log lives, and changed by the
        // kernel only as a whole.
        unsafe { AtomicU64::from_ptr(place) }
    }

    fn word(&self, position: u64) -> u64 {
        let offset = SMALL_PAGE_BYTES + position as usize % RING_BYTES;
        // SAFETY: inside the ring, whose length is a multiple of a word; records are whole words.
        unsafe { self.memory.add(offset).cast::<u64>().read_volatile() }
    }

    /// Takes the faults recorded since the last call out of the log, calls `each` with the address
    /// of each, and returns their number.
    pub fn take(&mut self, mut each: impl FnMut(usize)) -> u64 {
        // Acquire: the records before the head are complete (the kernel's ring buffer protocol).
        let head = self.position(DATA_HEAD).load(Ordering::Acquire);
        let mut faults = 0;
        while self.tail < head {
            // `struct perf_event_header`: type u32, misc u16, size u16.
            let header = self.word(self.tail);
            let len_bytes = header >> 48;
            if header as u32 == PERF_RECORD_SAMPLE && len_bytes == 16 {
                each(self.word(self.tail + 8) as usize);
                faults += 1;
            }
            if len_bytes < 8 {
                // Not a record. What is skipped is missing in the count.
                self.tail = head;
                break;
            }
            self.tail += len_bytes;
        }
        // Release: the records were read before the kernel writes over them.
        self.position(DATA_TAIL).store(self.tail, Ordering::Release);
        faults
    }
}

impl Drop for FaultLog {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, and no other code has its address.
        let _ = unsafe { memory::unmap(self.memory, LOG_BYTES) };
    }
}

/// The number of page faults, minor and major, that the kernel has accounted to the threads of this
/// process, ended ones included. It never decreases.
///
/// # Errors
/// Those of a system call filter that refuses `getrusage`.
pub fn faults_of_process() -> io::Result<u64> {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: fills in the structure on this stack.
    check(unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) }.into())?;
    // SAFETY: filled in above, because the call succeeded.
    let usage = unsafe { usage.assume_init() };
    Ok(usage.ru_minflt as u64 + usage.ru_majflt as u64)
}

/// The state of a thread in its `stat` file.
fn state_in(stat: &[u8]) -> Option<u8> {
    // The name before the state is in parentheses, and may contain any byte.
    let end_of_name = stat.iter().rposition(|&byte| byte == b')')?;
    stat.get(end_of_name + 2).copied()
}

/// The threads of this process, by the kernel's numbers.
///
/// # Errors
/// Those of reading `/proc`; also if it numbers threads as another PID namespace does.
pub fn threads() -> io::Result<Vec<libc::pid_t>> {
    let this = format!("{}/task/{}", std::process::id(), this_thread());
    if std::fs::read_link("/proc/thread-self")?.as_os_str() != this.as_str() {
        return Err(io::Error::other("/proc belongs to another PID namespace"));
    }
    let entries = std::fs::read_dir("/proc/self/task")?;
    let number = |entry: io::Result<std::fs::DirEntry>| {
        entry.ok()?.file_name().to_str()?.parse::<libc::pid_t>().ok()
    };
    Ok(entries.filter_map(number).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_user_mode_are_recorded_and_those_of_system_calls_are_only_counted() {
        let this = this_thread();
        let mut log = match FaultLog::open(this) {
            Ok(log) => log,
            Err(error) => return println!("skipped: {error}"),
        };
        assert!(threads().unwrap().contains(&this));
        let pages = 3000;
        let base = memory::map_anonymous(pages * SMALL_PAGE_BYTES).unwrap();
        // SAFETY: our own mapping.
        let _ =
            unsafe { memory::advise(base, pages * SMALL_PAGE_BYTES, memory::Advice::NoHugePage) };
        let addresses = base.addr()..base.addr() + pages * SMALL_PAGE_BYTES;
        let touch = |page: usize| {
            // SAFETY: inside the mapping.
            unsafe { base.add(page * SMALL_PAGE_BYTES + 5).write_volatile(1) };
        };
        let taken = |log: &mut FaultLog| {
            let mut found = Vec::new();
            log.take(|address| {
                if addresses.contains(&address) {
                    found.push((address - addresses.start) / SMALL_PAGE_BYTES);
                }
            });
            found
        };
        taken(&mut log);
        (10..500).for_each(touch);
        assert_eq!(taken(&mut log), (10..500).collect::<Vec<_>>());
        (10..500).for_each(touch);
        assert_eq!(taken(&mut log), []);
        let before = faults_of_process().unwrap();
        let mut zero = std::fs::File::open("/dev/zero").unwrap();
        // SAFETY: a page of the mapping, to which no other reference exists.
        let place =
            unsafe { std::slice::from_raw_parts_mut(base.add(700 * SMALL_PAGE_BYTES), 4096) };
        std::io::Read::read_exact(&mut zero, place).unwrap();
        assert_eq!(taken(&mut log), []);
        assert!(faults_of_process().unwrap() > before);
        // More than there is room for.
        (800..pages).for_each(touch);
        let found = taken(&mut log).len();
        assert!(found > 1000 && found <= RING_BYTES / 16, "{found}");
        touch(600);
        assert_eq!(taken(&mut log), [600]);
        assert!(!log.has_ended());
        // SAFETY: mapped above, and not used after this.
        unsafe { memory::unmap(base, pages * SMALL_PAGE_BYTES).unwrap() };
    }

    #[test]
    fn a_log_outlives_its_thread() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (go_on, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            sender.send(this_thread()).unwrap();
            told.recv().unwrap();
        });
        let log = FaultLog::open(receiver.recv().unwrap());
        if let Ok(log) = &log {
            // It will sleep.
            while log.may_be_recording() {
                std::thread::yield_now();
            }
            assert!(!log.has_ended());
        }
        go_on.send(()).unwrap();
        thread.join().unwrap();
        match log {
            Err(error) => println!("skipped: {error}"),
            Ok(mut log) => {
                // The kernel ends the thread's events after it has woken those that join it.
                while !log.has_ended() {
                    std::thread::yield_now();
                }
                assert!(!log.may_be_recording());
                log.take(|_| ());
            }
        }
    }

    #[test]
    fn a_thread_that_runs_may_be_recording() {
        let ends = std::sync::atomic::AtomicBool::new(false);
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                sender.send(this_thread()).unwrap();
                while !ends.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let log = FaultLog::open(receiver.recv().unwrap());
            // It may still be sleeping in the call of `send`.
            while log.as_ref().is_ok_and(|log| !log.may_be_recording()) {
                std::thread::yield_now();
            }
            ends.store(true, Ordering::Relaxed);
            match log.and_then(|_| FaultLog::open(this_thread())) {
                Ok(own) => assert!(!own.may_be_recording()),
                Err(error) => println!("skipped: {error}"),
            }
        });
    }

    #[test]
    fn threads_of_other_processes_get_no_log() {
        if let Err(error) = FaultLog::open(this_thread()) {
            return println!("skipped: {error}");
        }
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let number = other.id() as libc::pid_t;
        let refused = FaultLog::open(number).unwrap_err();
        other.kill().unwrap();
        other.wait().unwrap();
        let refused = refused.raw_os_error().unwrap();
        assert!([libc::ESRCH, libc::EACCES, libc::EPERM].contains(&refused), "{refused}");
    }

    #[test]
    fn the_state_of_a_thread_follows_its_name() {
        assert_eq!(state_in(b"12 (a) R (b)) S 1 12"), Some(b'S'));
        assert_eq!(state_in(b"12 (a)"), None);
        assert_eq!(state_in(b""), None);
    }
}
