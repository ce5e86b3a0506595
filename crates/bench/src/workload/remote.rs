//! An object of a server, read by the processes of a node: what is timed, and what it brought over the line.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::contender::remote::{Remote, Site, Way, member_seed};
use crate::harness::{Member, wait_to_go};
use crate::job::{Job, LaneAnswer, Measured, RemoteKind, RemoteWork, Unavailable, Work};
use crate::raw::drop_cache;
use crate::rng::Rng;

/// Of the row groups of [`RemoteKind::Columns`].
const GROUP_BYTES: u64 = 8 << 20;
/// Columns in a group, and those that are read.
const COLUMNS: (u64, [u64; 2]) = (16, [3, 9]);
/// The end of the file, which says where the columns are.
const FOOTER_BYTES: u64 = 64 << 10;

/// Runs the job: by itself, or by several processes at once.
pub fn run(job: &Job, work: &RemoteWork, way: Way) -> Result<Measured> {
    let site = Site {
        work,
        directory: &job.source.path,
        member: work.team.member.unwrap_or(0),
        cache_bytes: job.source.cache_bytes,
    };
    if work.team.member.is_some() {
        let mut reader = (way.open)(site)?;
        wait_to_go()?;
        return read(job, work.kind, site.member, &mut *reader);
    }
    let mut service = (way.serve)(site)?;
    run_served(job, work, way, site).map_err(|error| {
        let was_killed = service.as_mut().is_some_and(|service| service.was_killed());
        if !was_killed {
            return error;
        }
        let reason = "its helper was killed, as for lack of memory under the limit";
        Unavailable(format!("{reason}: {error:#}")).into()
    })
}

fn run_served(job: &Job, work: &RemoteWork, way: Way, site: Site<'_>) -> Result<Measured> {
    if let RemoteKind::Random { is_warm: true, .. } = work.kind {
        let mut reader = (way.open)(site)?;
        reader.pass()?;
        drop(reader);
        drop_tree(&job.source.path)?;
    }
    let before = server_counts(&work.endpoint)?;
    let mut measured = if work.team.processes == 1 {
        let mut reader = (way.open)(site)?;
        read(job, work.kind, 0, &mut *reader)?
    } else {
        together(job, work)?
    };
    let after = server_counts(&work.endpoint)?;
    for (name, count) in after {
        measured.details.insert(name.clone(), count - before.get(&name).unwrap_or(&0.0));
    }
    Ok(measured)
}

fn together(job: &Job, work: &RemoteWork) -> Result<Measured> {
    let members = (0..work.team.processes).map(|member| {
        let mut work = work.clone();
        work.team.member = Some(member);
        Job { work: Work::Remote(work), ..job.clone() }
    });
    let found = Member::run_together(&members.collect::<Vec<_>>())?;
    Ok(Measured {
        // Of the last one: they work at once.
        mean_ns: found.iter().map(|one| one.mean_ns).fold(0.0, f64::max),
        lanes: found.iter().flat_map(|one| one.lanes.clone()).collect(),
        ..Measured::default()
    })
}

/// What is timed.
fn read(job: &Job, kind: RemoteKind, member: u32, reader: &mut dyn Remote) -> Result<Measured> {
    let start = Instant::now();
    let (mean_ns, answer) = match kind {
        RemoteKind::Random { batch_rows, .. } => {
            let mut rows = drawn_rows(job, member);
            let (mut batches, mut checksum) = (0_u64, 0_u64);
            let mut elapsed = Duration::ZERO;
            let deadline = Duration::from_millis(job.deadline_ms);
            while batches < job.accesses && elapsed < deadline {
                let batch: Vec<Range<u64>> = rows.by_ref().take(batch_rows).collect();
                let start = Instant::now();
                checksum = checksum.wrapping_add(reader.ranges(&batch)?);
                elapsed += start.elapsed();
                batches += 1;
            }
            let mean_ns = elapsed.as_nanos() as f64 / batches as f64;
            (mean_ns, LaneAnswer { accesses: batches, checksum })
        }
        RemoteKind::Pass { is_again } => {
            let checksum = reader.pass()?;
            let mut ns = start.elapsed().as_nanos() as f64;
            if is_again {
                // The first one also takes memory for the page cache that a guest's host may have to find.
                let mut passes = [0.0; 3];
                for pass in &mut passes {
                    let start = Instant::now();
                    ensure!(reader.pass()? == checksum, "two passes have read different bytes");
                    *pass = start.elapsed().as_nanos() as f64;
                }
                passes.sort_by(f64::total_cmp);
                ns = passes[1];
            }
            (ns, LaneAnswer { accesses: 1, checksum })
        }
        RemoteKind::Columns => {
            let Work::Remote(work) = &job.work else { unreachable!("as above") };
            let (footer, columns) = column_ranges(work.object_bytes);
            // Only the footer tells where the columns are.
            let checksum = reader.ranges(&[footer])?;
            let checksum = checksum.wrapping_add(reader.ranges(&columns)?);
            (start.elapsed().as_nanos() as f64, LaneAnswer { accesses: 1, checksum })
        }
    };
    Ok(Measured { mean_ns, lanes: vec![answer], details: reader.details()?, ..Measured::default() })
}

/// The rows of a process, in order.
pub fn drawn_rows(job: &Job, member: u32) -> impl Iterator<Item = Range<u64>> + use<> {
    let Work::Remote(work) = &job.work else { unreachable!("a job of this bench") };
    let RemoteKind::Random { row_bytes, .. } = work.kind else { unreachable!("rows") };
    let rows = work.object_bytes / row_bytes;
    let mut rng = Rng::new(member_seed(job.seed, job.round, member));
    std::iter::repeat_with(move || {
        let start = rng.below(rows) * row_bytes;
        start..start + row_bytes
    })
}

/// The footer, and the columns that are read of each group.
pub fn column_ranges(object_bytes: u64) -> (Range<u64>, Vec<Range<u64>>) {
    let column_bytes = GROUP_BYTES / COLUMNS.0;
    let footer = object_bytes - FOOTER_BYTES..object_bytes;
    let groups = (0..object_bytes / GROUP_BYTES).map(|group| group * GROUP_BYTES);
    let columns = groups.flat_map(|group| {
        COLUMNS.1.map(|column| group + column * column_bytes..group + (column + 1) * column_bytes)
    });
    (footer, columns.collect())
}

/// Drops all files below a directory from the page cache.
fn drop_tree(directory: &Path) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            drop_tree(&path)?;
        } else if path.is_file() {
            let file = std::fs::File::open(&path)?;
            drop_cache(&file).with_context(|| format!("dropping {}", path.display()))?;
        }
    }
    Ok(())
}

/// Requests and bytes that the server has answered with.
fn server_counts(endpoint: &str) -> Result<BTreeMap<String, f64>> {
    let host = endpoint.strip_prefix("http://").context("an endpoint of HTTP")?;
    let mut stream = TcpStream::connect(host)?;
    write!(stream, "GET /-/counters HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("the server's counters")?;
    let counts: Value = serde_json::from_str(body).context("the server's counters")?;
    let names = [("requests", "line_requests"), ("sent_bytes", "downloaded_bytes")];
    let count =
        |(from, to): (&str, &str)| (to.to_owned(), counts["all"][from].as_f64().unwrap_or(0.0));
    Ok(names.map(count).into())
}
