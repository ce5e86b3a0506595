//! The report, as JSON and as a table.

use std::time::UNIX_EPOCH;

use anyhow::Result;
use aquifer::pool::LeftMemory;
use aquifer_sys::features;
use aquifer_sys::machine::Machine;
use aquifer_sys::units::Bytes;
use serde::Serialize;

use crate::output;

/// The complete report of `aquifer doctor`.
#[derive(Serialize)]
pub struct Report {
    /// The machine, and the storage of the directory.
    pub machine: Machine,
    /// The directory.
    pub directory: String,
    /// The kernel's features.
    pub features: Vec<Feature>,
    /// The system's limits.
    pub limits: Limits,
    /// The forms of the engine's mechanisms.
    pub mechanisms: Vec<Mechanism>,
    /// The measured costs.
    pub costs: Vec<Cost>,
    /// Shared memory of pools that no process uses.
    pub left_memory: Vec<Left>,
}

/// Shared memory of a pool whose last process was killed, or only read it.
#[derive(Serialize)]
pub struct Left {
    files: Vec<String>,
    allocated_bytes: u64,
    since_ns: Option<u64>,
}

impl From<LeftMemory> for Left {
    fn from(left: LeftMemory) -> Left {
        let since = left.since.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        Left {
            files: left.files.iter().map(|path| path.display().to_string()).collect(),
            allocated_bytes: left.allocated_bytes,
            since_ns: since.and_then(|since| u64::try_from(since.as_nanos()).ok()),
        }
    }
}

impl Left {
    fn line(&self) -> [String; 3] {
        let since = self.since_ns.map(output::moment).unwrap_or_default();
        [Bytes(self.allocated_bytes).to_string(), since, self.files.join(" ")]
    }
}

/// A feature that is available or not.
#[derive(Serialize)]
pub struct Feature {
    name: &'static str,
    available: bool,
    purpose: &'static str,
    detail: String,
}

impl Feature {
    /// The result of trying a feature.
    pub fn new(
        name: &'static str,
        available: bool,
        purpose: &'static str,
        detail: impl Into<String>,
    ) -> Feature {
        Feature { name, available, purpose, detail: detail.into() }
    }
}

impl From<features::Probe> for Feature {
    fn from(probe: features::Probe) -> Feature {
        Feature::new(probe.name, probe.available, probe.purpose, probe.detail)
    }
}

/// Limits of the system; `null` is unlimited.
#[derive(Serialize)]
pub struct Limits {
    max_mappings: Option<u64>,
    locked_bytes: Option<u64>,
    address_space_bytes: Option<u64>,
    open_files: Option<u64>,
    memory_bytes: u64,
}

impl From<features::Limits> for Limits {
    fn from(found: features::Limits) -> Limits {
        Limits {
            max_mappings: found.max_mappings,
            locked_bytes: found.locked_bytes,
            address_space_bytes: found.address_space_bytes,
            open_files: found.open_files,
            memory_bytes: found.memory_bytes,
        }
    }
}

impl Limits {
    fn lines(&self) -> Vec<[String; 3]> {
        let bytes = |bound: Option<u64>| {
            bound.map_or_else(|| "unlimited".to_owned(), |bytes| Bytes(bytes).to_string())
        };
        let count =
            |bound: Option<u64>| bound.map_or_else(|| "unlimited".to_owned(), output::count);
        let lines = [
            ("memory", Bytes(self.memory_bytes).to_string(), "the largest budget of a cache"),
            (
                "address space",
                bytes(self.address_space_bytes),
                "must be unlimited for mappings of any size",
            ),
            ("mappings per process", count(self.max_mappings), "vm.max_map_count"),
            ("locked memory", bytes(self.locked_bytes), "old kernels charge io_uring to it"),
            ("open files", count(self.open_files), "one or two for each file device"),
        ];
        lines.map(|(name, value, what)| [name.to_owned(), value, what.to_owned()]).into()
    }
}

/// A mechanism and the form it takes.
#[derive(Serialize)]
pub struct Mechanism {
    name: &'static str,
    form: String,
}

impl Mechanism {
    /// One line.
    pub fn new(name: &'static str, form: String) -> Mechanism {
        Mechanism { name, form }
    }
}

/// One figure, or the reason why there is none.
#[derive(Serialize)]
pub struct Cost {
    name: &'static str,
    ns: Option<f64>,
    error: Option<String>,
}

impl Cost {
    /// A figure in nanoseconds.
    pub fn new(name: &'static str, found: Result<f64>) -> Cost {
        match found {
            Ok(ns) => Cost { name, ns: Some(ns), error: None },
            Err(error) => Cost { name, ns: None, error: Some(format!("{error:#}")) },
        }
    }
}

impl Report {
    /// The table.
    pub fn to_text(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "{}, {} cores, {}, {}\n{} ({} on {})\n",
            machine.cpu,
            machine.cores,
            Bytes(machine.memory_bytes),
            machine.kernel,
            self.directory,
            machine.file_system,
            machine.device,
        );
        let mut section = |title: &str, lines: String| {
            text.push_str(&format!("\n{title}\n{lines}"));
        };
        let features: Vec<_> = self.features.iter().map(Feature::line).collect();
        section("Kernel features", output::columns(&features));
        section("Limits", output::columns(&self.limits.lines()));
        let forms: Vec<_> =
            self.mechanisms.iter().map(|line| [line.name.to_owned(), line.form.clone()]).collect();
        section("Form of each mechanism", output::columns(&forms));
        if !self.costs.is_empty() {
            let costs: Vec<_> = self.costs.iter().map(Cost::line).collect();
            section("Costs (pages of 4 KiB)", output::columns(&costs));
        }
        if !self.left_memory.is_empty() {
            let left: Vec<_> = self.left_memory.iter().map(Left::line).collect();
            let title = "Shared memory that no process uses (opening its pool for writing removes it; if the pool is gone, remove the files)";
            section(title, output::columns(&left));
        }
        text
    }
}

impl Feature {
    fn line(&self) -> [String; 3] {
        let answer = if self.available { "yes" } else { "no " };
        let text = match (self.available, self.detail.as_str()) {
            (true, "") => self.purpose.to_owned(),
            (true, detail) => format!("{} [{detail}]", self.purpose),
            (false, reason) => format!("{reason}: {}", self.purpose),
        };
        [answer.to_owned(), self.name.to_owned(), text]
    }
}

impl Cost {
    fn line(&self) -> [String; 2] {
        let figure = match (self.ns, &self.error) {
            (Some(ns), _) => format!("{:>9}", output::time(ns)),
            (None, reason) => format!("not measured: {}", reason.as_deref().unwrap_or("unknown")),
        };
        [self.name.to_owned(), figure]
    }
}
