//! A graph file, and searches of it under a limit.

use anyhow::Result;
use serde_json::json;

use super::ratio::Ratio;
use super::setting::{Defaults, Setting, own_cache_bytes, page_cache_bytes};
use super::stage::Answers;
use crate::contender::Contender;
use crate::graph::{Graph, GraphFile, Rmat, Shape, state_bytes};
use crate::harness::{Cell, progress_bar};
use crate::job::{Job, Work};
use crate::options::{CacheOptions, Common};
use crate::raw::{PAGE_BYTES, drop_cache};
use crate::report::{Report, Row};

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
    pub fn prepare(common: &Common, options: &CacheOptions, defaults: Defaults) -> Result<Self> {
        let setting = Setting::prepare(common, options, defaults)?;
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

    /// A search. The memory is the budget plus what a search needs beside the graph.
    pub fn search_cell(
        &self,
        metric: &str,
        unit: (&'static str, f64),
        contender: &Contender,
        deadline_ms: u64,
    ) -> Cell {
        let budget_bytes = self.setting.budget_bytes;
        let limit_bytes = budget_bytes + state_bytes(&self.graph());
        let work = Work::Bfs { threads: self.threads() };
        let setting = &self.setting;
        let limit_bytes = Some(limit_bytes);
        let mut job = Job::new(contender.name, self.file.path(), setting.stage.seed, work);
        let data_bytes = self.graph().file_bytes();
        job.source.pages = data_bytes / PAGE_BYTES as u64;
        job.source.cache_bytes = own_cache_bytes(budget_bytes);
        job.source.page_cache_bytes = page_cache_bytes(budget_bytes, data_bytes);
        job.deadline_ms = deadline_ms;
        job.limit_bytes = setting.limiter.as_ref().and(limit_bytes);
        Cell { limit_bytes, ..Cell::new(metric, unit, job) }
    }

    /// Measures; every contender must give the same answer to the same work.
    pub fn measure(&self, cells: Vec<Cell>) -> Result<Vec<Row>> {
        let answers = Answers::new();
        let limiter = self.setting.limiter.as_ref();
        let before = || Ok(drop_cache(self.file.file())?);
        self.setting.stage.measure(limiter, before, cells, |job, measured| {
            answers.check(job.work.clone(), measured)
        })
    }

    /// The report on `rows`, with the size of the graph.
    pub fn report(&self, rows: Vec<Row>, definitions: Vec<Ratio>) -> Report {
        let mut report = self.setting.report(rows, definitions);
        report.config.insert("vertices".into(), json!(self.graph().vertices));
        report.config.insert("entries".into(), json!(self.graph().entries));
        report.config.insert("threads".into(), json!([self.threads()]));
        report
    }
}
