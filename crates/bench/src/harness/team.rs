//! Several processes that work concurrently, started by a child.
//!
//! ```text
//! child      starts each ─ job ─▶            ◀─ "ready" ─ each   ─ "go" ─▶ each            ◀─ outcome ─ each
//! member                        opens, warms up                            measures
//! ```
//! A member that fails sends its outcome immediately, instead of "ready".

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout};

use anyhow::{Context, Result, bail};

use super::schedule::this_program;
use crate::job::{Job, Measured, Outcome, Unavailable};

const READY: &str = "ready";

/// One of several processes. Killed on drop if it is still running.
#[derive(Debug)]
pub struct Member {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Member {
    /// Starts a member on its job.
    pub fn start(job: &Job) -> Result<Self> {
        let mut process = this_program(job).spawn().context("cannot start this program again")?;
        let input = process.stdin.take().expect("a piped standard input");
        let output = BufReader::new(process.stdout.take().expect("a piped standard output"));
        let mut member = Self { process, input, output };
        member.tell(&serde_json::to_string(job)?)?;
        Ok(member)
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        Ok(self.input.write_all(format!("{line}\n").as_bytes())?)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Waits until it is prepared.
    pub fn wait_ready(&mut self) -> Result<()> {
        match self.line()? {
            line if line == READY => Ok(()),
            line => match outcome(&line)? {
                Ok(_) => bail!("a process ended before it was told to go"),
                Err(error) => Err(error),
            },
        }
    }

    /// Sends the start signal.
    pub fn go(&mut self) -> Result<()> {
        self.tell("go")
    }

    /// Waits for its measurement.
    pub fn finish(mut self) -> Result<Measured> {
        let line = self.line()?;
        outcome(&line)?
    }

    /// Runs all of these jobs concurrently.
    pub fn run_together(jobs: &[Job]) -> Result<Vec<Measured>> {
        let mut members = jobs.iter().map(Self::start).collect::<Result<Vec<_>>>()?;
        members.iter_mut().try_for_each(Self::wait_ready)?;
        members.iter_mut().try_for_each(Self::go)?;
        members.into_iter().map(Self::finish).collect()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Both calls do nothing if it has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn outcome(line: &str) -> Result<Result<Measured>> {
    let outcome = serde_json::from_str(line)
        .with_context(|| format!("a process answered {line:?} and not with an outcome"))?;
    Ok(match outcome {
        Outcome::Measured(measured) => Ok(measured),
        Outcome::Unavailable(reason) => Err(Unavailable(reason).into()),
        Outcome::Failed(reason) => Err(anyhow::Error::msg(reason)),
    })
}

/// The member's side: reports that it is ready and waits for the start signal.
pub fn wait_to_go() -> Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{READY}")?;
    output.flush()?;
    let mut line = String::new();
    let read_bytes = io::stdin().lock().read_line(&mut line)?;
    anyhow::ensure!(read_bytes > 0, "the process that started this one is gone");
    Ok(())
}
