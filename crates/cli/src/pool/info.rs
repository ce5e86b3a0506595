//! `aquifer pool info`: what a pool is, how full it is, and which processes have it open.

use std::path::PathBuf;

use anyhow::Result;
use aquifer::pool::format::{FORMAT_VERSION, PAGE_BYTES};
use aquifer::{PersistenceDomain, Pool, PoolInfo};
use aquifer_sys::units::Bytes;
use serde::Serialize;

use super::{Part, as_text, explain_domain, format_note};
use crate::access::ReadAccess;
use crate::output;

/// Arguments of `aquifer pool info`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer pool info data.pool                               as text
  aquifer pool info data.pool --json | jq .free_bytes       one figure, for scripts

Opens the pool read-only and changes nothing. Other programs may have it open.")]
pub struct Args {
    /// Path of the pool
    path: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    access: ReadAccess,
}

/// The JSON output.
#[derive(Serialize)]
pub(super) struct Report {
    path: String,
    uuid: String,
    format_version: u32,
    /// Bits of what it has that not all pools have.
    features: u64,
    created_ns: u64,
    #[serde(serialize_with = "as_text")]
    domain: PersistenceDomain,
    size_bytes: u64,
    metadata: Part,
    log: Part,
    data: Part,
    /// The part of the data for what a clean close saves.
    saved: Option<Part>,
    log_used_bytes: u64,
    generation: u64,
    tail_lsn: u64,
    applied_lsn: u64,
    durable_lsn: u64,
    /// Objects, files, directories and symbolic links.
    inodes: u64,
    /// Slots for inodes and for their overflow parts.
    max_inodes: u64,
    free_slots: u64,
    damaged_inodes: u64,
    objects: u64,
    files: u64,
    /// Including the root.
    directories: u64,
    symlinks: u64,
    special_files: u64,
    /// Slots of names, runs and attributes that do not fit into an inode.
    parts: u64,
    free_bytes: u64,
    largest_free_bytes: u64,
    /// Free bytes known to be zero.
    zeroed_bytes: u64,
    /// Freed bytes that become free at the next checkpoint.
    freed_bytes: u64,
    /// Freed bytes that become free when no view pins them any more.
    held_bytes: u64,
    /// Log records that this open found and read.
    recovered_records: u64,
    /// Processes that have it open for writing.
    processes: Vec<u32>,
}

/// Prints the report.
pub fn run(args: &Args) -> Result<()> {
    let report = Report::of(&args.access.open(&args.path)?)?;
    if args.json { output::print_json(&report, true) } else { output::print(&report.to_text()) }
}

impl Report {
    /// The report on an open pool.
    pub(super) fn of(pool: &Pool) -> Result<Report> {
        let info: PoolInfo = pool.info()?;
        let layout = info.layout;
        Ok(Report {
            path: info.path.display().to_string(),
            uuid: info.uuid.to_string(),
            format_version: FORMAT_VERSION,
            features: info.features,
            created_ns: info.created_ns,
            domain: info.domain,
            size_bytes: layout.len_bytes(),
            metadata: layout.metadata().into(),
            log: layout.log().into(),
            data: layout.data().into(),
            saved: (!info.saved.is_empty()).then(|| info.saved.bytes().into()),
            log_used_bytes: info.durable_lsn.saturating_sub(info.tail_lsn),
            generation: info.generation,
            tail_lsn: info.tail_lsn,
            applied_lsn: info.applied_lsn,
            durable_lsn: info.durable_lsn,
            inodes: info.objects
                + info.files
                + info.directories
                + info.symbolic_links
                + info.special_files,
            max_inodes: layout.slots() - 1,
            free_slots: info.free_slots,
            damaged_inodes: info.damaged_inodes,
            objects: info.objects,
            files: info.files,
            directories: info.directories,
            symlinks: info.symbolic_links,
            special_files: info.special_files,
            parts: info.parts,
            free_bytes: info.free_pages * PAGE_BYTES,
            largest_free_bytes: info.largest_free_pages * PAGE_BYTES,
            zeroed_bytes: info.zeroed_pages * PAGE_BYTES,
            freed_bytes: info.freed_pages * PAGE_BYTES,
            held_bytes: info.held_pages * PAGE_BYTES,
            recovered_records: info.recovered_records,
            processes: info.processes,
        })
    }

    /// The report once this process has closed the pool.
    pub(super) fn when_closed(self) -> Report {
        Report { processes: Vec::new(), ..self }
    }

    fn to_text(&self) -> String {
        let used = self.log_used_bytes;
        let of_log = used * 100 / self.log.len_bytes.max(1);
        let files = format!(
            "{}, {} in {}",
            output::several(self.files, "file"),
            output::several(self.symlinks, "symbolic link"),
            match self.directories {
                1 => "one directory, the root".to_owned(),
                directories => format!("{} directories", output::count(directories)),
            },
        );
        let mut slots = format!(
            "{} of {} in use, in {}",
            output::count(self.max_inodes - self.free_slots),
            output::count(self.max_inodes),
            self.metadata.to_text(),
        );
        if self.damaged_inodes > 0 {
            let damaged = output::several(self.damaged_inodes, "slot");
            slots.push_str(&format!("; {damaged} damaged; see `aquifer pool check`"));
        }
        let mut log = format!("{} ({of_log} %) in use of {}", Bytes(used), self.log.to_text());
        if self.recovered_records > 0 {
            let records = output::several(self.recovered_records, "record");
            log.push_str(&format!(
                "; {records} to be replayed when the pool is opened for writing"
            ));
        }
        let mut data = format!(
            "{} free of {}, {} of it contiguous, {} zeroed",
            Bytes(self.free_bytes),
            self.data.to_text(),
            Bytes(self.largest_free_bytes),
            Bytes(self.zeroed_bytes),
        );
        if self.freed_bytes > 0 {
            data.push_str(&format!("; {} free after a checkpoint", Bytes(self.freed_bytes)));
        }
        if self.held_bytes > 0 {
            data.push_str(&format!("; {} kept by views", Bytes(self.held_bytes)));
        }
        let processes = match &self.processes[..] {
            [] => "no process".to_owned(),
            pids => pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
        };
        let lines = [
            ("domain", explain_domain(self.domain)),
            ("created", output::moment(self.created_ns)),
            ("uuid", self.uuid.clone()),
            ("objects", output::count(self.objects)),
            ("files", files),
            ("slots", slots),
            ("log", log),
            ("generation", self.generation.to_string()),
            ("data", data),
            ("open for writing in", processes),
        ];
        format!(
            "{}: a pool of {}, {}\n{}",
            self.path,
            Bytes(self.size_bytes),
            format_note(),
            output::columns(&lines.map(|(name, value)| [name.to_owned(), value])),
        )
    }
}
