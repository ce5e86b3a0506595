//! Opens a store, or runs a command that does, several times, each time in a new process.
//!
//! ```text
//! child     starts … ready        starts … ready, go                     done      (again, until the time is up)   end
//! holder          opens, keeps it open                                                                             closes
//! opener                                   [open, root]  counts names, closes
//! command                                  [started … ended]
//! ```
//! A measurement is the mean of the faster half: processes of the machine that run at the same time
//! only ever add to a figure. What takes long is done less often, and at least [`LEAST`] times.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::contender::open::{Opening, TEXT};
use crate::harness::{Member, wait_to_go};
use crate::job::{Job, LaneAnswer, Measured, OpenPart, OpenWork, Unavailable, Work};
use crate::raw::{Usage, drop_cache};

/// Milliseconds of CPU, as a detail.
const CPU_MS: &str = "cpu_ms";
/// How often it was done, as a detail.
const TIMES: &str = "times";
/// The least number of times, if so many are wanted.
const LEAST: u64 = 6;
/// Page faults, as a detail.
const FAULTS: &str = "page_faults";

/// Runs the job: the parent of the processes, or one of them.
pub fn run(job: &Job, work: OpenWork, contender: Opening) -> Result<Measured> {
    std::env::set_current_dir(&job.source.path)
        .with_context(|| format!("cannot work in {}", job.source.path.display()))?;
    match work.part {
        Some(OpenPart::Holder) => hold(contender),
        Some(OpenPart::Opener) => open(work.writes, contender),
        None => all(job, work, contender),
    }
}

fn all(job: &Job, work: OpenWork, contender: Opening) -> Result<Measured> {
    let part = |part| {
        let work = Work::Open(OpenWork { part: Some(part), ..work });
        let mut member = Member::start(&Job { work, ..job.clone() })?;
        member.wait_ready()?;
        Ok::<_, anyhow::Error>(member)
    };
    // Files of the kernel are not opened beforehand.
    let is_held = work.is_joined && contender.open.is_some();
    let holder = is_held.then(|| part(OpenPart::Holder)).transpose()?;
    let deadline = Instant::now() + Duration::from_millis(job.deadline_ms);
    let (mut found, mut made) = (Vec::<Measured>::new(), Vec::new());
    let goes_on = |times: u64| times < job.accesses && (times < LEAST || Instant::now() < deadline);
    while goes_on(found.len() as u64) {
        let opener = (!work.by_command).then(|| part(OpenPart::Opener)).transpose()?;
        if work.is_cold {
            drop_cache(&File::open(contender.file)?)?;
        }
        found.push(match opener {
            Some(mut opener) => {
                opener.go()?;
                opener.finish()?
            }
            None if work.writes => {
                let name = format!("made-{}-{}", job.round, made.len());
                let measured = time_command((contender.make)(&name)?, "")?;
                made.push(name);
                measured
            }
            None => time_command((contender.print)()?, TEXT)?,
        });
    }
    if let Some(mut holder) = holder {
        holder.go()?;
        holder.finish()?;
    }
    (contender.unmake)(&made)?;
    faster_half(found)
}

/// The process that has the store open all the time.
fn hold(contender: Opening) -> Result<Measured> {
    let Some(open) = contender.open else { bail!("it is not opened") };
    let opened = open(true)?;
    wait_to_go()?;
    let names = opened.names()?;
    Ok(Measured { lanes: vec![LaneAnswer { accesses: 1, checksum: names }], ..Measured::default() })
}

/// The process that opens it.
fn open(writes: bool, contender: Opening) -> Result<Measured> {
    let Some(open) = contender.open else {
        return Err(Unavailable("it has no library".to_owned()).into());
    };
    wait_to_go()?;
    let before = Usage::of_this_process()?;
    let start = Instant::now();
    let opened = open(writes)?;
    let elapsed = start.elapsed();
    let used = Usage::of_this_process()?.since(before);
    Ok(measured(elapsed, used, opened.names()?))
}

/// Runs a command that must print `expected`.
fn time_command(mut command: Command, expected: &str) -> Result<Measured> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let before = Usage::of_ended_children()?;
    let start = Instant::now();
    let mut process = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let mut printed = String::new();
    process.stdout.take().expect("a pipe").read_to_string(&mut printed)?;
    let status = process.wait()?;
    let elapsed = start.elapsed();
    let used = Usage::of_ended_children()?.since(before);
    if !status.success() {
        let mut said = String::new();
        process.stderr.take().expect("a pipe").read_to_string(&mut said)?;
        let failed = format!("{command:?} ended with {status}: {}", said.trim());
        // An earlier version may not know the form of this one's pools.
        return Err(match is_older(Path::new(command.get_program())) {
            true => Unavailable(format!("{failed} It is older than this program.")).into(),
            false => anyhow::Error::msg(failed),
        });
    }
    ensure!(printed == expected, "{command:?} printed {printed:?}");
    Ok(measured(elapsed, used, printed.len() as u64))
}

/// Whether a program was built before this one.
fn is_older(program: &Path) -> bool {
    let built = |path: &Path| path.metadata().and_then(|found| found.modified()).ok();
    let this = std::env::current_exe().ok().and_then(|this| built(&this));
    built(program).is_some_and(|built| this.is_some_and(|this| built < this))
}

fn measured(elapsed: Duration, used: Usage, checksum: u64) -> Measured {
    let details = [(CPU_MS, used.cpu.as_secs_f64() * 1e3), (FAULTS, used.faults as f64)];
    Measured {
        mean_ns: elapsed.as_nanos() as f64,
        lanes: vec![LaneAnswer { accesses: 1, checksum }],
        details: details.map(|(name, value)| (name.to_owned(), value)).into(),
        ..Measured::default()
    }
}

/// The means of the faster half of these, each figure by itself.
fn faster_half(found: Vec<Measured>) -> Result<Measured> {
    let first = found.first().context("nothing was measured")?.clone();
    ensure!(found.iter().all(|one| one.lanes == first.lanes), "two processes found something else");
    let mean = |figure: &dyn Fn(&Measured) -> f64| {
        let mut all: Vec<f64> = found.iter().map(figure).collect();
        all.sort_by(f64::total_cmp);
        let half = &all[..all.len().div_ceil(2)];
        half.iter().sum::<f64>() / half.len() as f64
    };
    let details = first.details.keys().map(|name| (name.clone(), mean(&|one| one.details[name])));
    let details = details.chain([(TIMES.to_owned(), found.len() as f64)]).collect();
    Ok(Measured { mean_ns: mean(&|one| one.mean_ns), details, ..first })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faster_half_counts() {
        let one = |ms: u64, faults| {
            let used = Usage { cpu: Duration::from_millis(ms), faults };
            measured(Duration::from_millis(ms), used, 7)
        };
        let half = faster_half(vec![one(9, 1), one(1, 5), one(3, 3)]).unwrap();
        assert_eq!((half.mean_ns, half.details[FAULTS], half.lanes[0].checksum), (2e6, 2.0, 7));
        assert_eq!(half.details[TIMES], 3.0);
        assert!(faster_half(Vec::new()).is_err());
    }
}
