//! Support for tests with several processes: the test binary runs again, with one test named
//! `child` that does nothing unless [`ROLE`] is set, and exchanges lines with its parent.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

/// Names the role of a child; its arguments follow after spaces.
const ROLE: &str = "AQUIFER_TEST_ROLE";
/// The prefix that distinguishes a role's lines from those of the test harness.
const MARK: &str = "says: ";

/// A name, and the function that a child of that name runs with its arguments.
pub type Role = (&'static str, fn(&[String]));

/// In a child: plays its role. Otherwise does nothing.
pub fn play(roles: &[Role]) {
    let Ok(wanted) = std::env::var(ROLE) else {
        return;
    };
    // A child that hangs is aborted, so that the parent can report it.
    aquifer_testkit::watchdog::guard(&wanted);
    let mut words = wanted.split(' ').map(str::to_owned);
    let name = words.next().unwrap_or_default();
    let arguments: Vec<String> = words.collect();
    let (_, role) = roles.iter().find(|(known, _)| *known == name).expect("a role of this file");
    role(&arguments);
    std::process::exit(0);
}

/// In a child: sends the parent a line.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The harness may have begun a line.
    let _ = writeln!(out, "\n{MARK}{line}");
    let _ = out.flush();
}

/// In a child: waits for a line from the parent. `None` if the parent has ended.
pub fn hear() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line).unwrap_or(0);
    (read > 0).then(|| line.trim_end().to_owned())
}

/// The command that plays a role.
pub fn command(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test binary"));
    command
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command
}

/// A child that is killed when dropped.
pub struct Actor {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Actor {
    pub fn start(role: &str) -> Actor {
        Actor::of(command(role).spawn().expect("starting the test binary again"))
    }

    pub fn of(mut child: Child) -> Actor {
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Actor { child, input, output }
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("the child listens");
        self.input.flush().expect("the child listens");
    }

    /// Returns the next line that the child sends; empty if it ended without one.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap_or(0) > 0 {
            if let Some(said) = line.strip_prefix(MARK) {
                return said.trim_end().to_owned();
            }
            line.clear();
        }
        String::new()
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }

    pub fn kill(mut self) -> ExitStatus {
        self.child.kill().expect("the child is ours");
        self.child.wait().expect("the child is ours")
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
