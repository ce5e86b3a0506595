//! Child processes that play a role of the test binary and communicate with their parent by lines.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};

use aquifer_testkit::child::{self, Reaped};

/// A variable that the parent set for its child.
pub fn told(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is set by the parent"))
}

/// In a child: prints a line for the parent.
pub fn say(line: impl std::fmt::Display) {
    let mut output = std::io::stdout().lock();
    // The harness may have started a line.
    let _ = writeln!(output, "\nsays: {line}");
    let _ = output.flush();
}

/// In a child: waits for the parent's next line, or its end.
pub fn hear() -> String {
    let mut line = String::new();
    let _ = std::io::stdin().lock().read_line(&mut line);
    line.trim_end().to_owned()
}

/// A running child process. Killed on drop.
pub struct Actor {
    child: Reaped,
    output: BufReader<ChildStdout>,
}

pub fn command(role: &str, pool: &Path, told: &[(&str, &str)]) -> Command {
    let mut command = child::command(role);
    command.env("POOL", pool).envs(told.iter().copied());
    command.stdin(Stdio::piped()).stderr(Stdio::inherit());
    command
}

impl Actor {
    pub fn start(role: &str, pool: &Path, told: &[(&str, &str)]) -> Actor {
        Actor::of(command(role, pool, told)).expect("starting the test binary again")
    }

    /// Starts it in a new PID namespace; the error tells why that is impossible.
    pub fn start_in_namespace(
        role: &str,
        pool: &Path,
        told: &[(&str, &str)],
    ) -> std::io::Result<Actor> {
        let mut command = command(role, pool, told);
        // SAFETY: the function makes async-signal-safe calls only.
        unsafe { command.pre_exec(enter_pid_namespace) };
        Actor::of(command)
    }

    fn of(mut command: Command) -> std::io::Result<Actor> {
        let mut child = Reaped(command.spawn()?);
        let output = BufReader::new(child.0.stdout.take().expect("piped"));
        Ok(Actor { child, output })
    }

    pub fn is_running(&mut self) -> bool {
        self.child.0.try_wait().expect("the child is ours").is_none()
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// The next line it says; `None` when it has ended.
    pub fn hears(&mut self) -> Option<String> {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap_or(0) > 0 {
            if let Some(said) = line.strip_prefix("says: ")
                && line.ends_with('\n')
            {
                return Some(said.trim_end().to_owned());
            }
            line.clear();
        }
        None
    }

    /// Waits for a plain output line.
    pub fn until_line(&mut self, wanted: &str) {
        let mut line = String::new();
        while line.trim_end() != wanted {
            line.clear();
            let got = self.output.read_line(&mut line).unwrap_or(0);
            assert!(got > 0, "it ended without the line {wanted:?}");
        }
    }

    /// Waits until it says this.
    pub fn until(&mut self, wanted: &str) {
        loop {
            let said = self.hears().unwrap_or_else(|| panic!("it ended without saying {wanted:?}"));
            if said == wanted {
                return;
            }
        }
    }

    pub fn tell(&mut self, line: &str) {
        let input = self.child.0.stdin.as_mut().expect("piped");
        writeln!(input, "{line}").expect("the child listens");
    }

    /// Kills it with SIGKILL, and returns everything it said.
    pub fn kill(mut self) -> Vec<String> {
        self.child.0.kill().expect("the child is ours");
        std::iter::from_fn(|| self.hears()).collect()
    }

    /// Waits for it to exit successfully.
    pub fn finish(mut self) {
        drop(self.child.0.stdin.take());
        while self.hears().is_some() {}
        assert!(self.child.0.wait().expect("the child is ours").success());
    }
}

/// Between fork and exec: creates a PID namespace and continues as its first process. The forked
/// process stays behind to be killed, which kills the first process too.
fn enter_pid_namespace() -> std::io::Result<()> {
    // SAFETY: integers only. An unprivileged process creates a user namespace along with it.
    let alone = unsafe { libc::unshare(libc::CLONE_NEWPID) };
    // SAFETY: as above.
    if alone != 0 && unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the only thread of a forked process; only async-signal-safe calls follow on both
    // sides.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()),
        0 => {
            // SAFETY: integers only.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            Ok(())
        }
        first => {
            // SAFETY: closes only this process's copies of the descriptors, so that no reader waits
            // for them.
            unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0) };
            let mut status = 0;
            // SAFETY: waits for the child made above; `status` outlives the call.
            unsafe { libc::waitpid(first, &raw mut status, 0) };
            // SAFETY: exits without running any of the parent's code.
            unsafe { libc::_exit(0) }
        }
    }
}
