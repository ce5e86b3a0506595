//! The part common to all benches: a place for files, a machine kept awake, rounds.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::contender::System;
use crate::data::check_space;
use crate::options::{Common, Device};
use crate::report::{Report, Row};
use aquifer_host::interrupt;
use aquifer_host::machine::{Awake, Machine};
use aquifer_host::place::Place;

/// The environment of a bench. Fields are dropped, and so undone, in this order.
#[derive(Debug)]
pub struct Stage {
    /// How often everything is measured.
    pub rounds: u32,
    /// Seed of data and accesses.
    pub seed: u64,
    /// Whether this is the quick form, which tests run.
    pub quick: bool,
    only: Vec<System>,
    /// Notes for the reader of the report.
    pub notes: Vec<String>,
    /// The place of the files.
    pub place: Place,
    awake: Option<Awake>,
    _signals: interrupt::Guard,
}

impl Stage {
    /// Finds or creates a place with room for `room_bytes`, for a bench with these contenders, in
    /// lists that may overlap. `scarce`: see [`Place::directory`].
    pub fn prepare(
        common: &Common,
        contenders: &[&[System]],
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
            rounds: common.rounds.unwrap_or(if common.quick { 1 } else { 5 }),
            seed: common.seed,
            quick: common.quick,
            only,
            notes,
            place,
            awake,
            _signals: signals,
        })
    }

    /// The selected ones of a bench's contenders.
    pub fn wanted<'a>(&'a self, systems: &'a [System]) -> impl Iterator<Item = System> + 'a {
        let wanted = |system: &System| self.only.is_empty() || self.only.contains(system);
        systems.iter().copied().filter(wanted)
    }

    /// The report on `rows`; `config` is this bench's addition to the common configuration.
    pub fn report(
        &self,
        bench: &'static str,
        rows: Vec<Row>,
        ratios: BTreeMap<String, f64>,
        config: impl IntoIterator<Item = (&'static str, Value)>,
    ) -> Report {
        let mut all = BTreeMap::<&'static str, Value>::from([
            ("rounds", json!(self.rounds)),
            ("seed", json!(self.seed)),
            ("quick", json!(self.quick)),
            ("cpu_kept_awake", json!(self.awake.is_some())),
        ]);
        all.extend(config);
        Report {
            bench,
            machine: Machine::describe(&self.place),
            config: all,
            rows,
            ratios,
            notes: self.notes.clone(),
        }
    }
}

/// The contenders of these names. A name that the bench does not have is rejected before any work.
fn chosen(names: &[String], contenders: &[&[System]]) -> Result<Vec<System>> {
    let all = || contenders.iter().copied().flatten();
    let find = |name: &String| {
        let found = all().find(|system| system.name() == name).copied();
        found.with_context(|| {
            let mut known: Vec<_> = all().map(|system| system.name()).collect();
            known.sort_unstable();
            known.dedup();
            format!("`{name}` is no contender of this bench: --only takes {}", known.join(", "))
        })
    };
    names.iter().map(find).collect()
}
