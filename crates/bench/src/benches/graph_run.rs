//! Shared code of `bfs` and the demo: a graph file, and jobs on it under a limit.

use std::cell::RefCell;

use anyhow::{Result, ensure};

use super::setting::{Defaults, Setting};
use crate::contender::{Source, System};
use crate::graph::{Graph, GraphFile, Rmat, Shape, state_bytes};
use crate::harness::{Cell, Job, LaneAnswer, Schedule, Work, progress_bar};
use crate::options::Options;
use crate::raw::{PAGE_BYTES, drop_cache};
use crate::report::Row;

/// A generated graph in its setting. The file is dropped, and so removed, before the place it is
/// in.
#[derive(Debug)]
pub struct GraphRun {
    file: GraphFile,
    /// The setting.
    pub setting: Setting,
}

impl GraphRun {
    /// Generates the graph.
    pub fn prepare(options: &Options, defaults: Defaults) -> Result<Self> {
        let setting = Setting::prepare(options, defaults)?;
        let rmat = Rmat { shape: Shape::for_size(setting.size_bytes), seed: setting.stage.seed };
        let bar = progress_bar(1000, "generating the graph");
        let file = GraphFile::create(setting.stage.place.path(), &rmat, |share| {
            bar.set_position((share * 1000.0) as u64);
        });
        bar.finish_and_clear();
        Ok(Self { file: file?, setting })
    }

    /// The graph.
    pub fn graph(&self) -> Graph {
        self.file.graph()
    }

    /// The number of threads: the largest one requested.
    pub fn threads(&self) -> u32 {
        self.setting.threads.last().copied().unwrap_or(1)
    }

    /// A measurement in milliseconds or microseconds. The memory is the budget plus what a search
    /// needs beside the graph.
    pub fn cell(
        &self,
        metric: &str,
        unit: (&'static str, f64),
        system: System,
        work: Work,
        deadline_ms: u64,
    ) -> Cell {
        let setting = &self.setting;
        let graph = self.graph();
        let limit_bytes = Some(setting.budget_bytes + state_bytes(&graph));
        let job = Job {
            system,
            source: Source {
                path: self.file.path(),
                pages: graph.file_bytes() / PAGE_BYTES as u64,
                writable: false,
                cache_bytes: setting.cache_bytes(),
                base_pages: false,
            },
            work,
            seed: setting.stage.seed,
            round: 0,
            accesses: 20_000,
            deadline_ms,
            warm_accesses: 0,
            warm_deadline_ms: 0,
            limit_bytes: setting.limiter.as_ref().and(limit_bytes),
        };
        Cell { metric: metric.to_owned(), unit, job, limit_bytes }
    }

    /// Measures; every contender must give the same answer to the same work.
    pub fn measure(&mut self, cells: Vec<Cell>) -> Result<Vec<Row>> {
        let answers = RefCell::new(Vec::<(Work, Vec<LaneAnswer>)>::new());
        let mut notes = std::mem::take(&mut self.setting.stage.notes);
        let schedule = Schedule {
            limiter: self.setting.limiter.as_ref(),
            rounds: self.setting.stage.rounds,
            before: Box::new(|| Ok(drop_cache(self.file.file())?)),
            check: Box::new(|job, measured| {
                let mut answers = answers.borrow_mut();
                match answers.iter().find(|(work, _)| *work == job.work) {
                    None => answers.push((job.work.clone(), measured.lanes.clone())),
                    Some((_, first)) => {
                        let same = *first == measured.lanes;
                        ensure!(same, "it found something else than the contender before it");
                    }
                }
                Ok(())
            }),
        };
        let rows = schedule.run(cells, &mut notes)?;
        drop(schedule);
        self.setting.stage.notes = notes;
        Ok(rows)
    }
}
