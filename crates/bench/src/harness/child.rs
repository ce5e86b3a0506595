//! The child's side: reads a job, runs it, prints the outcome.

use std::io::{self, BufRead, Write};

use anyhow::{Context, Result};

use crate::job::{Job, Measured, Outcome, Unavailable};
use crate::{file_set, raw};

/// Set in the environment of a child. Its arguments are the parent's, so that the child reaches the
/// same call into the bench.
pub const CHILD_VARIABLE: &str = "AQUIFER_BENCH_CHILD";

/// Runs the job with `run` and returns true if this process is a child.
pub fn run_if_child(run: impl FnOnce(&Job) -> Result<Measured>) -> Result<bool> {
    if std::env::var_os(CHILD_VARIABLE).is_none() {
        return Ok(false);
    }
    raw::die_with_parent()?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).context("no job from the parent")?;
    let job: Job = serde_json::from_str(&line).context("the parent's job is unreadable")?;
    let outcome = match run(&job) {
        Ok(mut measured) => {
            // The processes of a team have already reported theirs.
            let cold_bytes = file_set::cold_bytes();
            if cold_bytes > 0 {
                *measured.details.entry(file_set::COLD_BYTES.to_owned()).or_default() +=
                    cold_bytes as f64;
            }
            Outcome::Measured(measured)
        }
        Err(error) => match error.downcast::<Unavailable>() {
            Ok(unavailable) => Outcome::Unavailable(unavailable.0),
            Err(error) => Outcome::Failed(format!("{error:#}")),
        },
    };
    let mut output = io::stdout().lock();
    serde_json::to_writer(&mut output, &outcome)?;
    output.write_all(b"\n")?;
    output.flush()?;
    Ok(true)
}
