//! Runs tests that end, fork or change their process in a child: the test binary again, with one
//! test named `child` that does nothing unless an environment variable names its role.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::watchdog;

/// The environment variable that names the role of a child.
const ROLE: &str = "AQUIFER_TEST_ROLE";
/// The last line of a child that completed its role.
const DONE: &str = "the role was played to its end";

/// The name of a role, and the function that a child of that role runs.
pub type Role = (&'static str, fn());

/// In a child: plays the role with one of these names. Otherwise does nothing.
pub fn play(roles: &[Role]) {
    for (index, (name, _)) in roles.iter().enumerate() {
        assert!(roles[..index].iter().all(|(other, _)| other != name), "two roles {name:?}");
    }
    let Ok(wanted) = std::env::var(ROLE) else {
        return;
    };
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    // No core dumps of children that die on purpose.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
    // A child that hangs is aborted, so that the parent can report it.
    watchdog::guard(&wanted);
    let (_, role) = roles.iter().find(|(name, _)| *name == wanted).expect("a role of this program");
    // On a new line after the test harness's output for this test.
    println!();
    role();
    println!("{DONE}");
    std::process::exit(0);
}

/// Returns the command that plays a role.
pub fn command(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test binary"));
    command
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// The result of a role: its exit status and output.
#[derive(Debug)]
pub struct Played {
    /// Its exit status.
    pub status: ExitStatus,
    /// What it wrote to standard output and standard error.
    pub output: String,
}

/// Plays a role in a child and waits until it exits.
pub fn run(role: &str) -> Played {
    play_out(command(role))
}

fn play_out(mut command: Command) -> Played {
    let output = command.output().expect("starting the test binary again");
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    Played { status: output.status, output: said.join("\n") }
}

/// Plays a role that must complete.
pub fn succeeds(role: &str) {
    must_succeed(role, run(role));
}

/// As [`succeeds`], in a private mount namespace where the system allows it: its mounts disappear
/// with the child and are invisible to other processes. An unprivileged user is root in it.
pub fn succeeds_with_mounts(role: &str) {
    must_succeed(role, play_out(with_mounts(command(role))));
}

/// Wraps the command in a mount namespace, if one can be created.
fn with_mounts(command: Command) -> Command {
    let ways: [&[&str]; 2] = [&["--mount"], &["--mount", "--user", "--map-root-user"]];
    let works = |way: &&&[&str]| {
        let tried = Command::new("unshare").args(**way).arg("true").stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    };
    let Some(way) = ways.iter().find(works) else { return command };
    let mut inside = Command::new("unshare");
    inside.args(*way).arg(command.get_program()).args(command.get_args());
    inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    inside.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    inside
}

fn must_succeed(role: &str, played: Played) {
    if let Some(reason) = played.output.lines().find(|line| line.starts_with("skipped: ")) {
        eprintln!("{reason}");
        return;
    }
    assert!(played.status.success() && played.output.contains(DONE), "{role}: {played:#?}");
}

/// Plays a role that must be killed by a signal, after it printed `before`.
pub fn dies(role: &str, signal: i32, before: &str) {
    let played = run(role);
    assert!(played.output.contains(before), "{role}: {played:#?}");
    assert!(!played.output.contains(DONE), "{role}: {played:#?}");
    // Its abort may be the signal that is expected.
    assert!(!played.output.contains(watchdog::HANGS), "{role}: {played:#?}");
    assert_eq!(played.status.signal(), Some(signal), "{role}: {played:#?}");
}

/// In a process that a role has forked: it ends with the thread that forked it, so the watchdog of the role is its own.
pub fn dies_with_its_parent() {
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill).expect("a signal");
}

/// Kills a child that a failing test leaves behind.
pub struct Reaped(pub Child);

impl Reaped {
    /// Kills it now and returns what it printed until then.
    pub fn kill(mut self) -> Vec<u8> {
        self.0.kill().expect("the child is ours");
        let mut rest = vec![];
        let stdout = self.0.stdout.as_mut().expect("piped");
        stdout.read_to_end(&mut rest).expect("reading what it said");
        self.0.wait().expect("the child is ours");
        rest
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes a test of each role, which plays it by a function: such as [`succeeds_with_mounts`].
#[macro_export]
macro_rules! roles {
    ($play:path: $($test:ident: $role:literal,)*) => {$(
        #[test]
        fn $test() {
            $play($role);
        }
    )*};
}
