//! Reads the neighbours of many vertices, with a software pipeline for prefetching.
//!
//! The vertices come in groups, and three groups are in flight:
//!
//! ```text
//! group k + 2: its offsets are prefetched
//! group k + 1: its offsets are read, its neighbours are prefetched
//! group k:     its neighbours are read and visited
//! ```
//! so that a contender that can prefetch always has whole groups of reads to work on while the
//! thread visits. The same code runs for contenders that cannot; for them `prefetch` does nothing.
//! Long rows (hubs) are prefetched piece by piece, one piece ahead, so that they do not flush the
//! cache.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::Result;

use super::csr::Graph;
use crate::contender::{Contiguous, Visitor};
use crate::raw::load_word;

/// Vertices in a group: enough for a batch of reads at queue depth.
pub const GROUP: usize = 64;
/// Fewest vertices of a group that is sorted by hand.
pub const LEAST_SORTED_GROUP: usize = 1024;
/// Vertices whose rows are visited together, in bounded memory.
pub const VISITED_GROUP: usize = 16 << 10;
/// Entries of a row prefetched at a time (256 KiB).
const PIECE_ENTRIES: u64 = 64 << 10;

/// The work was aborted at the deadline.
#[derive(Debug, thiserror::Error)]
#[error("it was not finished in time")]
pub struct Overtime;

/// A row of neighbours: its first entry and the end.
type Row = (u64, u64);

/// The rows of a graph in some contender's memory.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// The graph. Its header was checked against the length of the memory.
    pub graph: &'a Graph,
    /// The memory that holds it.
    pub memory: &'a dyn Contiguous,
}

impl Rows<'_> {
    /// Visits all neighbours of all vertices of the groups, and returns how many there were. Fails
    /// with [`Overtime`] after the deadline.
    pub fn stream<'v>(
        &self,
        mut groups: impl Iterator<Item = &'v [u32]>,
        deadline: Instant,
        mut visit: impl FnMut(u32),
    ) -> Result<u64> {
        let mut visited_entries = 0;
        let mut offsets_asked = VecDeque::<&[u32]>::new();
        let mut rows_asked = VecDeque::<Vec<Row>>::new();
        loop {
            if Instant::now() > deadline {
                return Err(Overtime.into());
            }
            let group = groups.next();
            if let Some(vertices) = group {
                self.prefetch_offsets(vertices)?;
                offsets_asked.push_back(vertices);
            } else if offsets_asked.is_empty() && rows_asked.is_empty() {
                return Ok(visited_entries);
            }
            let draining = group.is_none();
            if (draining || offsets_asked.len() > 1)
                && let Some(vertices) = offsets_asked.pop_front()
            {
                rows_asked.push_back(self.find(vertices)?);
            }
            if (draining || rows_asked.len() > 1)
                && let Some(rows) = rows_asked.pop_front()
            {
                for row in rows {
                    self.visit(row, &mut visit)?;
                    visited_entries += row.1 - row.0;
                }
            }
        }
    }

    fn prefetch_offsets(&self, vertices: &[u32]) -> Result<()> {
        let mut ranges: Vec<_> =
            vertices.iter().map(|&vertex| (self.graph.offsets_at(vertex), 16)).collect();
        ranges.sort_unstable();
        self.memory.prefetch(&ranges)
    }

    /// Reads the positions of the rows of a group and prefetches their starts.
    fn find(&self, vertices: &[u32]) -> Result<Vec<Row>> {
        let base = self.memory.base();
        let row_of = |&vertex: &u32| {
            let at = self.graph.offsets_at(vertex) as usize;
            // SAFETY: vertices come from the graph, whose header was checked against the length of
            // the memory; offsets are 8-byte aligned in it.
            let first = unsafe { load_word(base, at) };
            // SAFETY: as above; there is one offset more than there are vertices.
            let end = unsafe { load_word(base, at + 8) };
            assert!(first <= end && end <= self.graph.entries, "a damaged graph");
            (first, end)
        };
        let rows: Vec<Row> = vertices.iter().map(row_of).collect();
        let mut ranges: Vec<_> = rows
            .iter()
            .filter(|(first, end)| first < end)
            .map(|&(first, end)| self.piece(first, end))
            .collect();
        ranges.sort_unstable();
        self.memory.prefetch(&ranges)?;
        Ok(rows)
    }

    /// Byte range of the first piece of a row.
    fn piece(&self, first: u64, end: u64) -> (u64, u64) {
        (self.graph.entries_at(first), (end - first).min(PIECE_ENTRIES) * 4)
    }

    fn visit(&self, (first, end): Row, visit: &mut impl FnMut(u32)) -> Result<()> {
        let mut from = first;
        while from < end {
            let to = end.min(from + PIECE_ENTRIES);
            if to < end {
                self.memory.prefetch(&[self.piece(to, end)])?;
            }
            let start = self.memory.base().wrapping_add(self.graph.entries_at(from) as usize);
            for index in 0..(to - from) as usize {
                let entry = start.cast::<u32>().wrapping_add(index);
                // SAFETY: entries below `graph.entries`, which was checked against the length of
                // the memory; volatile, because the bytes belong to a file.
                visit(unsafe { entry.read_volatile() });
            }
            from = to;
        }
        Ok(())
    }
}

/// As [`Rows::stream`], with a contender that chooses the order. The offsets of a group are visited
/// together with the rows of the one before, so that the device has work at all times.
pub fn visit<'v>(
    graph: &Graph,
    visitor: &dyn Visitor,
    mut groups: impl Iterator<Item = &'v [u32]>,
    deadline: Instant,
    mut visit: impl FnMut(u32),
) -> Result<u64> {
    let mut visited_entries = 0;
    let mut rows = Vec::new();
    let mut until_check = 0;
    loop {
        let vertices = groups.next().unwrap_or_default();
        let mut ranges: Vec<_> =
            vertices.iter().map(|&vertex| (graph.offsets_at(vertex), 16)).collect();
        ranges.append(&mut rows);
        if ranges.is_empty() {
            return Ok(visited_entries);
        }
        visitor.visit(&ranges, &mut |index, bytes| {
            if until_check == 0 {
                until_check = 1024;
                if Instant::now() > deadline {
                    return Err(Overtime.into());
                }
            }
            until_check -= 1;
            if index < vertices.len() {
                let (first, end) = (bytes.get::<u64>(0), bytes.get::<u64>(8));
                assert!(first <= end && end <= graph.entries, "a damaged graph");
                if first < end {
                    rows.push((graph.entries_at(first), (end - first) * 4));
                    visited_entries += end - first;
                }
                return Ok(());
            }
            for index in 0..bytes.len() / 4 {
                visit(bytes.get::<u32>(index * 4));
            }
            Ok(())
        })?;
    }
}
