//! `aquifer pool check`: reports what is wrong with a pool, what it means, and what to do.
//!
//! The library produces the findings and their texts; this module formats them, and turns damage
//! into the exit status.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use aquifer::check::{
    self, CheckOptions, CheckReport, CheckedPool, Finding, FindingKind, RefusedRepair,
    RepairReport, Severity,
};
use aquifer::pool::format::PAGE_BYTES;
use aquifer::pool::media;
use aquifer_sys::units::Bytes;
use serde::Serialize;

use super::{Part, format_note};
use crate::access::ReadAccess;
use crate::output;
use crate::progress::Watched;

/// Arguments of `aquifer pool check`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer pool check data.pool               verify the metadata, the log and the tree of files
  aquifer pool check data.pool --full        verify free space as well
  aquifer pool check data.pool --repair      repair what can be repaired without loss

Without --repair nothing is changed, and other programs may have the pool open. A finding is a note (nothing is wrong), \
repairable (nothing is lost), or damage. Exit status: 0 without damage, 1 with damage.")]
pub struct Args {
    /// Path of the pool
    path: PathBuf,

    /// Repair what can be repaired without loss; no process may have the pool open
    ///
    /// Files without a name get one in /lost+found.
    #[arg(long)]
    repair: bool,

    /// Also verify that free space is zero; takes as long as reading all of it
    #[arg(long)]
    full: bool,

    #[command(flatten)]
    access: ReadAccess,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Checks or repairs, and prints the findings.
pub fn run(args: &Args) -> Result<()> {
    let options = CheckOptions {
        fresh_pages: args.full,
        segment_directory: args.access.segment_directory(),
        ..CheckOptions::default()
    };
    let media = media::open(&args.path, args.repair, None)?;
    let left = if args.repair {
        let media = Arc::new(Watched::new(media, "checking and repairing"));
        let repaired = check::repair(media, &options)?;
        if args.json {
            output::print_json(&Repaired::from(&repaired), true)?
        } else {
            output::print(&repaired_text(&repaired))?
        }
        repaired.after
    } else {
        let media = Arc::new(Watched::new(media, "checking"));
        let report = check::check(media, &options)?;
        if args.json {
            output::print_json(&Checked::from(&report), true)?
        } else {
            output::print(&checked_text(&report))?
        }
        report
    };
    match damage(&left) {
        None => Ok(()),
        Some(damage) => bail!("{}", damage),
    }
}

/// A one-line summary of the damage; `None` if there is none.
fn damage(report: &CheckReport) -> Option<String> {
    if report.is_sound() {
        return None;
    }
    let path = report.path.display();
    if report.findings.iter().any(|finding| finding.kind == FindingKind::NotAPool) {
        return Some(format!("{path} is not a pool"));
    }
    let found = report.findings.iter().filter(|finding| finding.severity == Severity::Damage);
    let found = output::several(found.count() as u64, "finding");
    Some(format!("{path} is damaged, in {found}"))
}

/// A report, as JSON.
#[derive(Serialize)]
struct Checked<'a> {
    path: String,
    size_bytes: u64,
    domain: String,
    is_in_use: bool,
    is_sound: bool,
    worst: Option<&'static str>,
    pool: Option<PoolReport<'a>>,
    findings: Vec<FindingReport<'a>>,
    unlisted_findings: u64,
}

#[derive(Serialize)]
struct PoolReport<'a> {
    uuid: String,
    format_version: u32,
    created_ns: u64,
    size_bytes: u64,
    generation: u64,
    tail_lsn: u64,
    end_lsn: u64,
    log_end_reason: &'a str,
    log_records: u64,
    inodes: u64,
    files: u64,
    directories: u64,
    symbolic_links: u64,
    special_files: u64,
    /// Slots that hold parts of files besides their inodes.
    parts: u64,
    used_bytes: u64,
    free_bytes: u64,
    never_used_bytes: u64,
}

#[derive(Serialize)]
struct FindingReport<'a> {
    severity: &'static str,
    kind: &'static str,
    place: Option<Part>,
    inode: Option<u64>,
    what: &'a str,
    meaning: &'a str,
    advice: &'a str,
}

/// A repair, as JSON.
#[derive(Serialize)]
struct Repaired<'a> {
    before: Checked<'a>,
    done: &'a [String],
    refused: Vec<RefusedReport<'a>>,
    after: Checked<'a>,
}

#[derive(Serialize)]
struct RefusedReport<'a> {
    finding: FindingReport<'a>,
    reason: &'a str,
}

impl<'a> From<&'a CheckReport> for Checked<'a> {
    fn from(report: &'a CheckReport) -> Checked<'a> {
        Checked {
            path: report.path.display().to_string(),
            size_bytes: report.len_bytes,
            domain: report.domain.to_string(),
            is_in_use: report.is_in_use,
            is_sound: report.is_sound(),
            worst: report.worst().map(Severity::name),
            pool: report.pool.as_ref().map(|pool| PoolReport {
                uuid: pool.uuid.to_string(),
                format_version: pool.format_version,
                created_ns: pool.created_ns,
                size_bytes: pool.layout.len_bytes(),
                generation: pool.generation,
                tail_lsn: pool.tail_lsn,
                end_lsn: pool.end_lsn,
                log_end_reason: &pool.end_reason,
                log_records: pool.records,
                inodes: pool.inodes,
                files: pool.files,
                directories: pool.directories,
                symbolic_links: pool.symbolic_links,
                special_files: pool.special_files,
                parts: pool.parts,
                used_bytes: pool.used_pages * PAGE_BYTES,
                free_bytes: pool.free_pages * PAGE_BYTES,
                never_used_bytes: pool.fresh_pages * PAGE_BYTES,
            }),
            findings: report.findings.iter().map(FindingReport::from).collect(),
            unlisted_findings: report.unlisted,
        }
    }
}

impl<'a> From<&'a Finding> for FindingReport<'a> {
    fn from(finding: &'a Finding) -> FindingReport<'a> {
        FindingReport {
            severity: finding.severity.name(),
            kind: finding.kind.name(),
            place: finding.place.map(Part::from),
            inode: finding.inode,
            what: &finding.what,
            meaning: &finding.meaning,
            advice: &finding.advice,
        }
    }
}

impl<'a> From<&'a RepairReport> for Repaired<'a> {
    fn from(repaired: &'a RepairReport) -> Repaired<'a> {
        let refused = |refused: &'a RefusedRepair| RefusedReport {
            finding: (&refused.finding).into(),
            reason: &refused.reason,
        };
        Repaired {
            before: (&repaired.before).into(),
            done: &repaired.done,
            refused: repaired.refused.iter().map(refused).collect(),
            after: (&repaired.after).into(),
        }
    }
}

/// Everything except the verdict on a damaged pool, which is the command's error.
fn checked_text(report: &CheckReport) -> String {
    let path = report.path.display();
    let mut text = String::new();
    if report.is_in_use {
        let _ = writeln!(
            text,
            "{path} is open for writing: its parts were read at different moments\n"
        );
    }
    for finding in &report.findings {
        let _ = writeln!(text, "{}", finding_text(finding));
    }
    if report.unlisted > 0 {
        let _ = writeln!(text, "… and {}\n", output::several(report.unlisted, "finding"));
    }
    if let Some(pool) = &report.pool {
        let lines = [
            ("pool", format!("{}, {}", Bytes(pool.layout.len_bytes()), format_note())),
            ("objects", output::count(pool.inodes)),
            ("files", files_text(pool)),
            ("used", Bytes(pool.used_pages * PAGE_BYTES).to_string()),
            ("free", Bytes(pool.free_pages * PAGE_BYTES).to_string()),
            ("log", format!("{} to be replayed", output::several(pool.records, "record"))),
        ];
        text.push_str(&output::columns(&lines.map(|(name, value)| [name.to_owned(), value])));
    }
    let verdict = match report.worst() {
        None | Some(Severity::Note) => "nothing is wrong",
        Some(Severity::Repairable) if report.can_be_written() => {
            "nothing is lost, and the pool can be used"
        }
        Some(Severity::Repairable) => {
            "nothing is lost, and the pool can be written once it is repaired"
        }
        _ => return text,
    };
    let _ = writeln!(text, "{path}: {verdict}");
    text
}

fn files_text(pool: &CheckedPool) -> String {
    let special = match pool.special_files {
        0 => String::new(),
        files => format!(", {}", output::several(files, "special file")),
    };
    format!(
        "{}, in {}; {}{special}",
        output::count(pool.files),
        match pool.directories {
            1 => "1 directory".to_owned(),
            directories => format!("{} directories", output::count(directories)),
        },
        output::several(pool.symbolic_links, "symbolic link"),
    )
}

fn finding_text(finding: &Finding) -> String {
    format!(
        "{}: {}.\n    {}.\n    {}.\n",
        finding.severity, finding.what, finding.meaning, finding.advice
    )
}

fn repaired_text(repaired: &RepairReport) -> String {
    let mut text = String::new();
    for done in &repaired.done {
        let _ = writeln!(text, "done: {done}\n");
    }
    for refused in &repaired.refused {
        let _ = writeln!(
            text,
            "not repaired: {}.\n    Left unchanged because {}.\n",
            refused.finding.what, refused.reason
        );
    }
    if repaired.done.is_empty() && repaired.refused.is_empty() {
        text.push_str("nothing to repair\n\n");
    }
    text.push_str(&checked_text(&repaired.after));
    text
}
