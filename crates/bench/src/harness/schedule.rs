//! The parent's side: starts children round by round, checks their answers, makes rows of them.

use std::io::{IsTerminal, Write};
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::child::CHILD_VARIABLE;
use crate::job::{Job, Measured, Outcome, Unavailable};
use crate::report::{Round, Row};
use aquifer_sys::interrupt;
use aquifer_sys::limit::Limiter;

/// One line of the result: a contender and a metric, with the job that measures it.
#[derive(Debug, Clone)]
pub struct Cell {
    /// Name of the metric.
    pub metric: String,
    /// Unit of the figures, and its length in nanoseconds.
    pub unit: (&'static str, f64),
    /// The job of round 0.
    pub job: Job,
    /// Memory limit of the child; `None` for unlimited.
    pub limit_bytes: Option<u64>,
}

impl Cell {
    /// A cell without a memory limit. `unit`: see [`Cell::unit`].
    pub fn new(metric: impl Into<String>, unit: (&'static str, f64), job: Job) -> Self {
        Self { metric: metric.into(), unit, job, limit_bytes: None }
    }
}

/// Runs cells in interleaved rounds.
pub struct Schedule<'a> {
    /// Creates the limited groups; `None` if that is not permitted, and then no child is limited.
    pub limiter: Option<&'a Limiter>,
    /// The numbers of the rounds.
    pub rounds: Range<u32>,
    /// Called before each child, for example to drop caches.
    pub before: Before<'a>,
    /// Checks the answer of a child; the error describes what is wrong.
    pub check: Check<'a>,
}

/// Called before each child.
pub type Before<'a> = Box<dyn Fn() -> Result<()> + 'a>;
/// Checks the answer to a job.
pub type Check<'a> = Box<dyn Fn(&Job, &Measured) -> Result<()> + 'a>;

impl Schedule<'_> {
    /// Measures everything. Contenders that cannot run here become notes.
    pub fn run(&self, mut cells: Vec<Cell>, notes: &mut Vec<String>) -> Result<Vec<Row>> {
        let mut measured: Vec<Vec<Measured>> = vec![Vec::new(); cells.len()];
        let mut absent = vec![false; cells.len()];
        let bar = progress_bar(cells.len() as u64 * self.rounds.len() as u64, "{pos}/{len} {msg}");
        for round in self.rounds.clone() {
            for step in 0..cells.len() {
                // Rotate: each round starts with a different contender.
                let index = (step + round as usize) % cells.len();
                bar.inc(1);
                if absent[index] {
                    continue;
                }
                let cell = &mut cells[index];
                let system = cell.job.contender.clone();
                bar.set_message(format!("{} {system}", cell.metric));
                cell.job.round = round;
                interrupt::check()?;
                (self.before)()?;
                let outcome = self
                    .run_child(&cell.job, cell.limit_bytes)
                    .with_context(|| format!("{} of {system}", cell.metric))?;
                match outcome {
                    Outcome::Measured(found) => {
                        (self.check)(&cell.job, &found)
                            .with_context(|| format!("{} of {system} is wrong", cell.metric))?;
                        measured[index].push(found);
                    }
                    Outcome::Unavailable(reason) => {
                        // Drop its rounds so far: an incomplete row must not be compared with
                        // complete ones.
                        absent[index] = true;
                        measured[index].clear();
                        let note = format!("{} of {system} is left out: {reason}", cell.metric);
                        if !notes.contains(&note) {
                            notes.push(note);
                        }
                    }
                    Outcome::Failed(reason) => {
                        bail!("{} of {system} failed: {reason}", cell.metric)
                    }
                }
            }
        }
        bar.finish_and_clear();
        let rows = cells.iter().zip(&measured).filter(|(_, rounds)| !rounds.is_empty());
        Ok(rows.map(|(cell, rounds)| row(cell, rounds)).collect())
    }

    fn run_child(&self, job: &Job, limit_bytes: Option<u64>) -> Result<Outcome> {
        // Created before the child and, being declared first, removed after the child has been
        // waited for.
        let limit = match (self.limiter, limit_bytes) {
            (Some(limiter), Some(limit_bytes)) => Some(limiter.create(limit_bytes)?),
            _ => None,
        };
        let output = run_process(job, |child_id| {
            let Some(limit) = &limit else { return Ok(()) };
            Ok(limit.add(child_id)?)
        })?;
        interrupt::check()?;
        if limit.is_some() && output.status.signal() == Some(libc::SIGKILL) {
            let reason = "its process was killed for lack of memory under the limit";
            return Ok(Outcome::Unavailable(reason.to_owned()));
        }
        answer(&output)
    }
}

/// Starts this program again to run `job` and waits for it. `admit` is called with the child's
/// process number before the child has read its job.
fn run_process(job: &Job, admit: impl FnOnce(u32) -> Result<()>) -> Result<Output> {
    let mut child = this_program(job)
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start this program again")?;
    let told = admit(child.id()).and_then(|()| {
        let mut line = serde_json::to_vec(job)?;
        line.push(b'\n');
        let mut input = child.stdin.take().expect("a piped standard input");
        Ok(input.write_all(&line)?)
    });
    if told.is_err() {
        let _ = child.kill();
    }
    let output = child.wait_with_output()?;
    told?;
    Ok(output)
}

/// A command that starts this program again, for `job`.
pub(super) fn this_program(job: &Job) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command
        .args(std::env::args_os().skip(1))
        .env(CHILD_VARIABLE, "1")
        .envs(job.work.environment())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command
}

fn answer(output: &Output) -> Result<Outcome> {
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("the process ended with {}: {}", output.status, reason.trim());
    }
    serde_json::from_slice(&output.stdout).context("the answer is unreadable")
}

/// Runs a job that kills its process. For children that measure what such a process leaves behind.
pub fn run_to_its_death(job: &Job) -> Result<()> {
    let output = run_process(job, |_| Ok(()))?;
    if output.status.signal() == Some(libc::SIGKILL) {
        return Ok(());
    }
    match answer(&output)? {
        Outcome::Measured(_) => bail!("the process that was to crash ended in peace"),
        Outcome::Unavailable(reason) => Err(Unavailable(reason).into()),
        Outcome::Failed(reason) => bail!("before the crash: {reason}"),
    }
}

fn row(cell: &Cell, rounds: &[Measured]) -> Row {
    let (unit, unit_ns) = cell.unit;
    let values = rounds.iter().map(|round| round.mean_ns / unit_ns).collect();
    let each = rounds.iter().map(|round| Round {
        tails: [round.p99_ns, round.p999_ns].map(|tail| tail.map(|ns| ns / unit_ns)),
        details: round.details.clone(),
    });
    Row::of(&*cell.job.contender, &*cell.metric, unit, values, each.collect())
}

/// A bar on standard error, hidden if that is not a terminal. `tail` is the end of its
/// template.
pub fn progress_bar(length: u64, tail: &str) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template(&format!("{{elapsed_precise}} {{bar:30}} {tail}"))
        .expect("a valid template");
    let bar = ProgressBar::with_draw_target(Some(length), target).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
