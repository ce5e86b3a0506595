//! Fixed-length rows of a file, asked for in batches.

use std::collections::BTreeMap;
use std::fs::File;

use anyhow::Result;
use aquifer::Rows;

use super::mmap::{Form, MmapFile};
use crate::job::Source;
use crate::raw::PAGE_BYTES;

/// A file of rows, opened in a contender's way.
pub trait RowReader {
    /// Calls `look` with the number and the bytes of each of these rows, in any order.
    fn batch(&mut self, rows: &[u64], look: impl FnMut(u64, &[u8])) -> Result<()>;

    /// Additional figures for the report.
    fn details(&self) -> Result<BTreeMap<String, f64>> {
        Ok(BTreeMap::new())
    }
}

/// A file mapping. Where it gives advice, as an expert does: the batch in the order of the file, the
/// pages of neighbouring rows in one range, all ranges in one call.
pub struct MmapRows {
    file: MmapFile,
    row_bytes: usize,
    ranges: Vec<(u64, u64)>,
    sorted: Vec<u64>,
    advises: bool,
}

impl MmapRows {
    /// Maps the file with the advice of `form`.
    pub fn open(form: Form, source: &Source, row_bytes: usize) -> Result<Self> {
        let file = MmapFile::open(form, source)?;
        let advises = form == Form::WillNeed;
        Ok(Self { file, row_bytes, ranges: Vec::new(), sorted: Vec::new(), advises })
    }

    fn row(&self, row: u64) -> &[u8] {
        let map = self.file.map();
        let start = usize::try_from(row).expect("an index") * self.row_bytes;
        assert!(start + self.row_bytes <= map.len_bytes());
        // SAFETY: the bench writes its data file before the contenders open it, and not afterwards.
        unsafe { map.bytes(start, self.row_bytes) }
    }
}

impl RowReader for MmapRows {
    fn batch(&mut self, rows: &[u64], mut look: impl FnMut(u64, &[u8])) -> Result<()> {
        if !self.advises {
            rows.iter().for_each(|&row| look(row, self.row(row)));
            return Ok(());
        }
        self.sorted.clear();
        self.sorted.extend_from_slice(rows);
        self.sorted.sort_unstable();
        self.ranges.clear();
        let row_bytes = self.row_bytes as u64;
        self.ranges.extend(self.sorted.iter().map(|row| (row * row_bytes, row_bytes)));
        super::Contiguous::prefetch(&self.file, &self.ranges)?;
        self.sorted.iter().for_each(|&row| look(row, self.row(row)));
        Ok(())
    }
}

/// Aquifer's rows.
pub struct CachedRows {
    rows: Rows,
}

impl CachedRows {
    /// Opens the file.
    pub fn open(source: &Source, row_bytes: usize) -> Result<Self> {
        let options = Rows::options(row_bytes).budget_bytes(source.cache_bytes);
        let rows = options.open(&source.path)?;
        anyhow::ensure!(
            rows.len() == File::open(&source.path)?.metadata()?.len() / row_bytes as u64,
            "a file of {} pages of {PAGE_BYTES} bytes has {} rows",
            source.pages,
            rows.len()
        );
        Ok(Self { rows })
    }
}

impl RowReader for CachedRows {
    fn batch(&mut self, rows: &[u64], mut look: impl FnMut(u64, &[u8])) -> Result<()> {
        Ok(self.rows.get_many(rows, |position, bytes| look(rows[position], bytes))?)
    }

    fn details(&self) -> Result<BTreeMap<String, f64>> {
        let stats = self.rows.stats();
        let counts = [
            ("hits", stats.hits),
            ("misses", stats.misses),
            ("reads", stats.reads),
            ("read_bytes", stats.read_bytes),
            ("evictions", stats.evictions),
            ("resident_rows", stats.resident_rows),
            ("capacity_rows", stats.capacity_rows),
        ];
        Ok(counts.map(|(name, count)| (name.to_owned(), count as f64)).into())
    }
}
