//! What is common to all benches: a place for files, a machine kept awake, rounds.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::declaration::{Bench, Contenders, each};
use crate::contender::Contender;
use crate::data::{DataFile, check_space};
use crate::harness::{Cell, Schedule, progress_bar};
use crate::job::{Job, LaneAnswer, Measured};
use crate::options::{Common, Device};
use crate::place::Place;
use crate::raw::PAGE_BYTES;
use crate::report::{Compare, Report, Row};
use aquifer_sys::interrupt;
use aquifer_sys::limit::Limiter;
use aquifer_sys::machine::Awake;
use aquifer_sys::machine::Machine;

/// How often everything is measured by default.
pub const DEFAULT_ROUNDS: u32 = 5;

/// The environment of a bench. Fields are dropped, and so undone, in this order.
#[derive(Debug)]
pub struct Stage {
    bench: &'static str,
    /// How often everything is measured.
    pub rounds: u32,
    first_round: u32,
    /// Seed of data and accesses.
    pub seed: u64,
    /// Whether this is the quick form, which tests run.
    pub quick: bool,
    only: Vec<&'static Contender>,
    notes: RefCell<Vec<String>>,
    /// The place of the files.
    pub place: Place,
    awake: Option<Awake>,
    _signals: interrupt::Guard,
}

impl Stage {
    /// The stage of a bench: see [`Stage::prepare`].
    pub fn of<B: Bench>(common: &Common, room_bytes: u64, scarce: bool) -> Result<Self> {
        Self::prepare(B::NAME, B::CONTENDERS, common, room_bytes, scarce)
    }

    /// Finds or creates a place with room for `room_bytes`, for the bench of that name with these
    /// contenders. `scarce`: see [`Place::directory`].
    pub fn prepare(
        bench: &'static str,
        contenders: Contenders,
        common: &Common,
        room_bytes: u64,
        scarce: bool,
    ) -> Result<Self> {
        let only = chosen(&common.only, contenders)?;
        let signals = interrupt::Guard::install();
        let mut notes = Vec::new();
        let place = match common.device {
            Device::Disk => Place::directory(&common.dir, scarce)?,
            Device::Zram => Place::zram(room_bytes)?,
        };
        check_space(place.path(), room_bytes + room_bytes / 64)?;
        let awake = Awake::request();
        if awake.is_none() {
            let note = "no permission to write /dev/cpu_dma_latency: waiting for the device includes \
                        waking the processor";
            notes.push(note.to_owned());
        }
        if common.quick {
            notes.push("--quick: the figures show that it works and nothing else".to_owned());
        }
        Ok(Self {
            bench,
            rounds: common.rounds.unwrap_or(if common.quick { 1 } else { DEFAULT_ROUNDS }),
            first_round: common.first_round,
            seed: common.seed,
            quick: common.quick,
            only,
            notes: RefCell::new(notes),
            place,
            awake,
            _signals: signals,
        })
    }

    /// Those of these contenders that were asked for.
    pub fn wanted<'a>(
        &'a self,
        contenders: &'a [&'static Contender],
    ) -> impl Iterator<Item = &'static Contender> + 'a {
        let wanted = |one: &&Contender| self.only.is_empty() || self.only.contains(one);
        contenders.iter().copied().filter(wanted)
    }

    /// Tells the reader of the report.
    pub fn note(&self, note: impl Into<String>) {
        self.notes.borrow_mut().push(note.into());
    }

    /// The notes so far.
    pub fn notes(&self) -> Vec<String> {
        self.notes.borrow().clone()
    }

    /// Measures in interleaved rounds. `before` is called before each child, for example to drop
    /// caches, and `check` with its answer. Contenders that cannot run here become notes.
    pub fn measure(
        &self,
        limiter: Option<&Limiter>,
        before: impl Fn() -> Result<()>,
        cells: Vec<Cell>,
        check: impl Fn(&Job, &Measured) -> Result<()>,
    ) -> Result<Vec<Row>> {
        let schedule = Schedule {
            limiter,
            rounds: self.first_round..self.first_round + self.rounds,
            before: Box::new(before),
            check: Box::new(check),
        };
        schedule.run(cells, &mut self.notes.borrow_mut())
    }

    /// The report on `rows`, with the ratios that `compare` finds in them; `config` is this bench's
    /// addition to the common configuration.
    pub fn report(
        &self,
        rows: Vec<Row>,
        compare: impl Fn(&[Row]) -> BTreeMap<String, f64> + 'static,
        config: impl IntoIterator<Item = (&'static str, Value)>,
    ) -> Report {
        let mut all = BTreeMap::<&'static str, Value>::from([
            ("rounds", json!(self.rounds)),
            ("seed", json!(self.seed)),
            ("quick", json!(self.quick)),
            ("cpu_kept_awake", json!(self.awake.is_some())),
        ]);
        all.extend(config);
        let mut report = Report {
            bench: self.bench.into(),
            commit: env!("AQUIFER_BENCH_COMMIT").to_owned(),
            date: today(),
            arguments: std::env::args().skip(1).collect(),
            machine: Machine {
                device: self.place.device().to_owned(),
                ..Machine::describe(self.place.path())
            },
            config: all.into_iter().map(|(name, value)| (name.into(), value)).collect(),
            rows,
            ratios: BTreeMap::new(),
            intervals: BTreeMap::new(),
            floors: BTreeMap::new(),
            notes: self.notes(),
            compare: Compare::by(compare),
        };
        report.judge();
        report
    }
}

/// The day, in UTC.
fn today() -> String {
    let now = humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string();
    now.split('T').next().unwrap_or_default().to_owned()
}

/// Writes a data file, with a bar.
pub fn data_file(directory: &Path, pages: u64, seed: u64) -> Result<DataFile> {
    let bytes = pages * PAGE_BYTES as u64;
    let bar = progress_bar(bytes, "{bytes}/{total_bytes} writing the data file");
    let data = DataFile::create(directory, pages, seed, |written_bytes| bar.inc(written_bytes));
    bar.finish_and_clear();
    data
}

/// The contenders of these names. A name that the bench does not have is rejected before any work.
fn chosen(names: &[String], contenders: Contenders) -> Result<Vec<&'static Contender>> {
    let all = each(contenders);
    let find = |name: &String| {
        let found = all.iter().find(|contender| contender.name == name).copied();
        found.with_context(|| {
            let mut known: Vec<_> = all.iter().map(|contender| contender.name).collect();
            known.sort_unstable();
            format!("`{name}` is no contender of this bench: --only takes {}", known.join(", "))
        })
    };
    names.iter().map(find).collect()
}

/// The first answer to each kind of work; the later ones must be equal.
#[derive(Debug)]
pub struct Answers<K>(RefCell<HashMap<K, Vec<LaneAnswer>>>);

impl<K: Hash + Eq> Answers<K> {
    /// None yet.
    pub fn new() -> Self {
        Self(RefCell::default())
    }

    /// Fails if `measured` has another answer than the contender before it.
    pub fn check(&self, work: K, measured: &Measured) -> Result<()> {
        let mut answers = self.0.borrow_mut();
        let first = answers.entry(work).or_insert_with(|| measured.lanes.clone());
        ensure!(*first == measured.lanes, "it found something else than the contender before it");
        Ok(())
    }
}
