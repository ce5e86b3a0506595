//! s3fs and the caches of fsspec, in an interpreter that is fed over a pipe, so that its start is not timed.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{BUCKET, KEY, Remote, Site, wait_for_end};
use crate::job::{RemoteKind, Unavailable};
use crate::raw::end_with_parent;

const PROGRAM: &str = include_str!("worker.py");
const INSTALL: &str =
    "install it with .ci/remote-contenders, or choose an interpreter with --python";

/// Until the interpreter has done one piece of work: a pass over a long object takes minutes.
const LONGEST_WORK: Duration = Duration::from_secs(1800);

/// The interpreter.
pub struct Worker {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// What it said on its standard error. A file, since a pipe would fill up.
    errors: PathBuf,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Sum(u64),
    Missing(String),
}

impl Worker {
    /// Starts it for the contender of that name.
    pub fn open(site: Site<'_>, contender: &str) -> Result<Self> {
        let mut command = Command::new(&site.work.python);
        command.args(["-c", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let errors = site.own("errors");
        command.stderr(File::create(&errors)?);
        end_with_parent(&mut command);
        let spawned = command.spawn();
        let mut process = spawned.map_err(|error| {
            let name = site.work.python.display();
            Unavailable(format!("there is no Python ({name}: {error}); {INSTALL}"))
        })?;
        let input = process.stdin.take().expect("a piped standard input");
        let output = BufReader::new(process.stdout.take().expect("a piped standard output"));
        let mut worker = Self { process, input: Some(input), output, errors };
        let is_cold = matches!(site.work.kind, RemoteKind::Random { is_warm: false, .. });
        let told = json!({
            "contender": contender,
            "endpoint": site.work.endpoint,
            "path": format!("{BUCKET}/{KEY}"),
            "bytes": site.len_bytes(),
            "directory": site.own("fsspec"),
            "shared_directory": site.directory.join("fsspec"),
            "in_flight": site.work.in_flight,
            "kind": if is_cold { "random_cold" } else { "other" },
        });
        worker.ask(&told)?;
        Ok(worker)
    }

    fn ask(&mut self, wanted: &Value) -> Result<u64> {
        let mut input = self.input.as_ref().expect("open until it is dropped");
        let told = writeln!(input, "{wanted}");
        let limit = Timespec { tv_sec: LONGEST_WORK.as_secs() as i64, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(self.output.get_ref(), PollFlags::IN)], Some(&limit))?;
        if ready == 0 {
            let _ = self.process.kill();
        }
        ensure!(ready > 0, "the interpreter has not answered for {} s", LONGEST_WORK.as_secs());
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        // It closes its end after an error.
        if line.is_empty() || told.is_err() && !line.contains("missing") {
            wait_for_end(&mut self.process);
            let text = std::fs::read(&self.errors).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            if self.process.wait()?.signal() == Some(libc::SIGKILL) {
                let reason = "its interpreter was killed for lack of memory under the limit";
                return Err(Unavailable(reason.to_owned()).into());
            }
            bail!("the interpreter ended: {}", text.trim());
        }
        match serde_json::from_str(&line).context("the interpreter's answer")? {
            Answer::Sum(sum) => Ok(sum),
            Answer::Missing(what) => {
                let reason = format!("Python lacks a package ({what}); {INSTALL}");
                Err(Unavailable(reason).into())
            }
        }
    }
}

impl Remote for Worker {
    fn ranges(&mut self, ranges: &[Range<u64>]) -> Result<u64> {
        let starts: Vec<u64> = ranges.iter().map(|range| range.start).collect();
        let ends: Vec<u64> = ranges.iter().map(|range| range.end).collect();
        self.ask(&json!([starts, ends]))
    }

    fn pass(&mut self) -> Result<u64> {
        self.ask(&Value::Null)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It ends with its input.
        drop(self.input.take());
        wait_for_end(&mut self.process);
    }
}
