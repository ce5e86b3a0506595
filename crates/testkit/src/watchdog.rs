//! Ends tests that hang, and no tests that are slow.
//!
//! A limit in seconds fails on a machine under load. A watchdog instead looks at the threads of the process group (the
//! test, its children, and the program that runs the tests) once a second. A thread that runs, waits for a processor or
//! completes I/O is progress. Threads that poll are seen running by chance, so a busy look makes up for several idle
//! ones, and does not start anew. A group that is busy forever is given up after 30 minutes.

use std::collections::HashMap;
use std::fs;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
/// Idle looks after which a test hangs.
const IDLE_LOOKS: u32 = 90;
/// Idle looks that a busy one makes up for: background threads that wake up now and then are busy at fewer looks.
const WORTH_OF_A_BUSY_LOOK: u32 = 4;
/// Looks after which a test is given up though it is busy.
const LONGEST_LOOKS: u32 = 1800;
/// A line that [`guard`] prints contains this.
pub(crate) const HANGS: &str = "the watchdog ended it:";

/// Counts looks.
#[derive(Default)]
struct Patience {
    looks: u32,
    idle: u32,
}

impl Patience {
    /// Counts a look; returns whether patience has ended.
    fn ends(&mut self, is_busy: bool) -> bool {
        self.looks += 1;
        self.idle =
            if is_busy { self.idle.saturating_sub(WORTH_OF_A_BUSY_LOOK) } else { self.idle + 1 };
        self.idle >= IDLE_LOOKS || self.looks >= LONGEST_LOOKS
    }
}

/// Looks at a process group for as long as something waits.
pub struct Watchdog {
    group: String,
    patience: Patience,
    next_look: Instant,
    /// The context switches of threads that waited for I/O at the last look.
    waiting: HashMap<String, String>,
}

impl Watchdog {
    /// Watches the process group of the caller. The thread that calls [`hangs`](Watchdog::hangs) does not count.
    #[allow(clippy::new_without_default, reason = "it reads /proc")]
    pub fn new() -> Watchdog {
        let own = fs::read_to_string("/proc/self/stat").expect("/proc is mounted");
        Watchdog::of(stat_fields(&own)[GROUP].to_owned())
    }

    fn of(group: String) -> Watchdog {
        let next_look = Instant::now() + BETWEEN_LOOKS;
        Watchdog { group, patience: Patience::default(), next_look, waiting: HashMap::new() }
    }

    /// Returns whether nothing makes progress any more. Looks at most once a second; may be called more often.
    pub fn hangs(&mut self) -> bool {
        if Instant::now() < self.next_look {
            return false;
        }
        self.next_look = Instant::now() + BETWEEN_LOOKS;
        let is_busy = self.is_busy();
        self.patience.ends(is_busy)
    }

    fn is_busy(&mut self) -> bool {
        let looking = fs::read_link("/proc/thread-self").expect("/proc is mounted");
        let before = std::mem::take(&mut self.waiting);
        let mut is_busy = false;
        for process in numbers("/proc") {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            if stat_fields(&stat).get(GROUP) != Some(&self.group.as_str()) {
                continue;
            }
            for thread in numbers(&format!("/proc/{process}/task")) {
                let path = format!("/proc/{process}/task/{thread}");
                // Threads and processes end meanwhile.
                let stat = fs::read_to_string(format!("{path}/stat")).unwrap_or_default();
                let state = stat_fields(&stat).first().copied();
                let is_looking = looking.ends_with(format!("task/{thread}"));
                is_busy |= state == Some("R") && !is_looking;
                if state == Some("D") {
                    let status = fs::read_to_string(format!("{path}/status")).unwrap_or_default();
                    let switches = status.lines().filter(|line| line.contains("ctxt_switches"));
                    let switches = switches.collect();
                    is_busy |= before.get(&thread).is_none_or(|earlier| *earlier != switches);
                    self.waiting.insert(thread, switches);
                }
            }
        }
        is_busy
    }
}

/// Where the process group is among the [`stat_fields`].
const GROUP: usize = 2;

/// The fields of a `stat` file behind the name, which may contain spaces: state, parent, group, …
fn stat_fields(stat: &str) -> Vec<&str> {
    stat.rsplit_once(") ").map(|(_, fields)| fields.split(' ').collect()).unwrap_or_default()
}

/// The entries of a directory whose names are numbers.
fn numbers(directory: &str) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Aborts this process when it hangs, and says so: the first process of a PID namespace ignores SIGABRT, and dies by
/// SIGSEGV instead.
pub fn guard(what: &str) {
    let what = what.to_owned();
    std::thread::spawn(move || {
        let mut watchdog = Watchdog::new();
        while !watchdog.hangs() {
            std::thread::sleep(BETWEEN_LOOKS);
        }
        end(&what);
    });
}

/// Ends this process as a watchdog does.
pub fn end(what: &str) -> ! {
    eprintln!("\n{HANGS} {what} hangs");
    std::process::abort();
}

/// Waits until `condition` holds. Panics when nothing makes progress any more.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let mut watchdog = Watchdog::new();
    while !condition() {
        assert!(!watchdog.hangs(), "waited in vain: {what}");
        if watchdog.patience.looks == 0 {
            std::thread::yield_now();
        } else {
            // A thread that always runs is progress to other watchdogs.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Waits for a message. Panics when the senders are gone, or nothing makes progress any more.
#[track_caller]
pub fn receive<T>(what: &str, messages: &Receiver<T>) -> T {
    let mut watchdog = Watchdog::new();
    loop {
        match messages.recv_timeout(BETWEEN_LOOKS) {
            Ok(message) => return message,
            Err(RecvTimeoutError::Timeout) => assert!(!watchdog.hangs(), "it hangs: {what}"),
            Err(RecvTimeoutError::Disconnected) => panic!("it ended without an answer: {what}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::Reaped;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    #[test]
    fn patience_ends_where_nothing_happens() {
        let mut patience = Patience::default();
        assert!((1..IDLE_LOOKS).all(|_| !patience.ends(false)));
        assert!(patience.ends(false));
    }

    /// A thread that polls is busy at one look in twenty; one that waits for a processor among ten, at most looks.
    #[test]
    fn one_busy_look_is_not_progress_and_many_are() {
        let mut polls = Patience::default();
        assert!((1..2 * IDLE_LOOKS).any(|look| polls.ends(look % 20 == 0)));
        let mut works = Patience::default();
        assert!((1..LONGEST_LOOKS).all(|look| !works.ends(look % 3 != 0)));
        assert!(works.ends(true), "not for ever");
    }

    /// A program in a process group of its own.
    fn group_of(script: &str) -> (Reaped, Watchdog) {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).stdin(Stdio::piped()).process_group(0);
        let child = Reaped(shell.spawn().unwrap());
        let watchdog = Watchdog::of(child.0.id().to_string());
        (child, watchdog)
    }

    #[test]
    fn a_program_that_computes_is_busy_and_one_that_waits_is_not() {
        let (_computes, mut watchdog) = group_of("while :; do :; done");
        wait_until("the loop runs", || watchdog.is_busy());
        assert!((0..20).all(|_| watchdog.is_busy()));
        let (_waits, mut watchdog) = group_of("read line");
        wait_until("the shell reads", || !watchdog.is_busy());
        assert!((0..20).all(|_| !watchdog.is_busy()));
    }
}
