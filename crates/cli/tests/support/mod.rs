//! Shared code of the command's tests.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::ffi::OsStr;
use std::fmt::Debug;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// The command, in a writable directory and without keys in the environment.
pub fn aquifer() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
    command.current_dir(env!("CARGO_TARGET_TMPDIR"));
    for variable in [
        "AQUIFER_KEY",
        "AQUIFER_READ_KEY",
        "AQUIFER_WRITE_KEY",
        "AQUIFER_TIER",
        "AQUIFER_CREDENTIAL_PROCESS",
    ] {
        command.env_remove(variable);
    }
    command
}

pub fn run<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    aquifer().args(arguments).output().unwrap()
}

pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The output of a command that must succeed.
pub fn works<S: AsRef<OsStr> + Debug>(arguments: &[S]) -> String {
    worked(run(arguments), arguments)
}

pub fn worked(output: Output, what: &(impl Debug + ?Sized)) -> String {
    let [out, errors] = [&output.stdout, &output.stderr].map(|bytes| text(bytes));
    assert_eq!(output.status.code(), Some(0), "{what:?}: {out}{errors}");
    out.to_owned()
}

/// The JSON output of a command that must succeed.
pub fn json<S: AsRef<OsStr> + Debug>(arguments: &[S]) -> Value {
    serde_json::from_str(&works(arguments)).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
}

/// The standard error output of a command that must fail with this status.
pub fn fails<S: AsRef<OsStr> + Debug>(arguments: &[S], status: i32) -> String {
    failed(run(arguments), status, arguments)
}

pub fn failed(output: Output, status: i32, what: &(impl Debug + ?Sized)) -> String {
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{what:?}: {errors}");
    assert_eq!(text(&output.stdout), "", "{what:?}");
    assert!(errors.contains("error: "), "{what:?}: {errors}");
    assert!(!errors.contains("panicked"), "{what:?}: {errors}");
    errors.to_owned()
}

/// Fails if `said` lacks one of `parts`.
#[track_caller]
pub fn says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is missing in {said}");
    }
}

/// A temporary directory for pools.
pub struct Place {
    directory: TempDir,
}

impl Place {
    pub fn new() -> Place {
        Place { directory: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    /// One that every user can access.
    pub fn public() -> Place {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        Place { directory }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The path as text, for a command line.
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// A pool of 4 MiB.
    pub fn pool(&self) -> String {
        let path = self.text("data.pool");
        works(&["pool", "create", &path, "--size", "4M"]);
        path
    }

    pub fn entries(&self) -> usize {
        fs::read_dir(self.directory.path()).unwrap().count()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Opening the pool removes the shared memory that killed processes have left.
        drop(aquifer::Pool::open(self.path("data.pool")));
    }
}

/// Runs the command as an unprivileged user; `None`, with a printed reason, if that is impossible
/// here.
pub fn run_without_privileges(arguments: &[&str]) -> Option<Output> {
    const NOBODY: u32 = 65534;
    let is_root = fs::metadata("/proc/self").is_ok_and(|own| {
        use std::os::unix::fs::MetadataExt;
        own.uid() == 0
    });
    let mut command = aquifer();
    command.args(arguments).current_dir("/");
    if is_root {
        command.uid(NOBODY).gid(NOBODY);
    }
    match command.output() {
        Ok(output) => Some(output),
        Err(error) => {
            eprintln!("skipped: the command as another user: {error}");
            None
        }
    }
}

/// The bytes of a file, to check that it is unchanged.
pub fn bytes(path: impl AsRef<Path>) -> Vec<u8> {
    fs::read(path).unwrap()
}
