//! Parallel top-down breadth-first search with a software pipeline for what it reads next.
//!
//! A level's vertices (the frontier) are handed out in groups. Each thread keeps three groups in flight:
//!
//! ```text
//! group k + 2: its offsets are prefetched
//! group k + 1: its offsets are read, its neighbours are prefetched
//! group k:     its neighbours are read and visited
//! ```
//! so that a contender that can prefetch always has whole groups of reads to work on while the thread visits.
//! The same code runs for contenders that cannot; for them `prefetch` does nothing. Long rows (hubs) are
//! prefetched piece by piece, one ahead of the piece being visited, so that they do not flush the cache.
//!
//! The search is the same whatever happens first: levels do not depend on the order of visits, so the answer
//! is made of levels only.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Result, anyhow};

use super::csr::Graph;
use crate::contender::Contiguous;
use crate::raw::load_word;
use crate::rng::mix;

/// Vertices in a group: what a batch of reads at queue depth wants.
const GROUP: usize = 64;
/// Entries of a row that are prefetched at once (256 KiB).
const PIECE_ENTRIES: u64 = 64 << 10;
/// Level of a vertex that has not been reached.
const UNREACHED: u32 = u32::MAX;

/// What a search found: equal for everyone who searched the same graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Vertices reached, the source included.
    pub reached: u64,
    /// Neighbours looked at.
    pub visited_entries: u64,
    /// Distance of the farthest vertex.
    pub depth: u32,
    /// Sum over all reached vertices of a hash of vertex and level.
    pub checksum: u64,
}

/// Memory a search needs beside the graph: levels, and two frontiers at their largest.
pub fn state_bytes(graph: &Graph) -> u64 {
    graph.vertices * (4 + 4 + 4)
}

/// The search was given up.
#[derive(Debug, thiserror::Error)]
#[error("the search was not finished in time")]
pub struct Overtime;

/// Searches from the graph's source with `threads` threads. [`Overtime`] after the deadline.
pub fn breadth_first_search(
    graph: &Graph,
    memory: &dyn Contiguous,
    threads: usize,
    deadline: Instant,
) -> Result<Answer> {
    let levels: Vec<AtomicU32> = (0..graph.vertices).map(|_| AtomicU32::new(UNREACHED)).collect();
    // Relaxed here and below: a level is a value of its own, and the end of each scope orders the levels.
    levels[graph.source as usize].store(0, Ordering::Relaxed);
    let mut frontier = vec![graph.source];
    let mut answer = Answer { reached: 0, visited_entries: 0, depth: 0, checksum: 0 };
    for level in 0.. {
        answer.reached += frontier.len() as u64;
        answer.depth = level;
        for &vertex in &frontier {
            let found = mix(u64::from(vertex) << 32 | u64::from(level));
            answer.checksum = answer.checksum.wrapping_add(found);
        }
        let next_group = AtomicUsize::new(0);
        let parts = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|_| {
                    let mut worker = Worker {
                        graph,
                        memory,
                        levels: &levels,
                        next_level: level + 1,
                        found: Vec::new(),
                        visited_entries: 0,
                        deadline,
                    };
                    let (frontier, next_group) = (&frontier, &next_group);
                    scope.spawn(move || worker.run(frontier, next_group).map(|()| worker))
                })
                .collect();
            let joined = workers.into_iter().map(|worker| worker.join());
            joined
                .map(|result| result.unwrap_or_else(|_| Err(anyhow!("a search thread panicked"))))
                .map(|result| result.map(|worker| (worker.found, worker.visited_entries)))
                .collect::<Result<Vec<_>>>()
        })?;
        frontier.clear();
        for (found, visited_entries) in parts {
            frontier.extend(found);
            answer.visited_entries += visited_entries;
        }
        if frontier.is_empty() {
            break;
        }
    }
    Ok(answer)
}

/// A row of neighbours: its first entry and the one behind its last.
type Row = (u64, u64);

struct Worker<'a> {
    graph: &'a Graph,
    memory: &'a dyn Contiguous,
    levels: &'a [AtomicU32],
    next_level: u32,
    found: Vec<u32>,
    visited_entries: u64,
    deadline: Instant,
}

impl Worker<'_> {
    fn run(&mut self, frontier: &[u32], next_group: &AtomicUsize) -> Result<()> {
        let mut offsets_asked = VecDeque::<&[u32]>::new();
        let mut rows_asked = VecDeque::<Vec<Row>>::new();
        loop {
            if Instant::now() > self.deadline {
                return Err(Overtime.into());
            }
            // Relaxed: only who gets which group is decided here.
            let start = next_group.fetch_add(1, Ordering::Relaxed).saturating_mul(GROUP);
            let draining = start >= frontier.len();
            if !draining {
                let vertices = &frontier[start..frontier.len().min(start + GROUP)];
                self.prefetch_offsets(vertices)?;
                offsets_asked.push_back(vertices);
            } else if offsets_asked.is_empty() && rows_asked.is_empty() {
                return Ok(());
            }
            if (draining || offsets_asked.len() > 1)
                && let Some(vertices) = offsets_asked.pop_front()
            {
                rows_asked.push_back(self.rows_of(vertices)?);
            }
            if (draining || rows_asked.len() > 1)
                && let Some(rows) = rows_asked.pop_front()
            {
                rows.into_iter().try_for_each(|row| self.visit(row))?;
            }
        }
    }

    fn prefetch_offsets(&self, vertices: &[u32]) -> Result<()> {
        let mut ranges: Vec<_> =
            vertices.iter().map(|&vertex| (self.graph.offsets_at(vertex), 16)).collect();
        ranges.sort_unstable();
        self.memory.prefetch(&ranges)
    }

    /// Reads where the rows of a group are and prefetches their beginnings.
    fn rows_of(&self, vertices: &[u32]) -> Result<Vec<Row>> {
        let base = self.memory.base();
        let rows: Vec<Row> = vertices
            .iter()
            .map(|&vertex| {
                let at = self.graph.offsets_at(vertex) as usize;
                // SAFETY: vertices come from the graph, whose header was checked against the length of
                // the memory; offsets are 8-byte aligned in it.
                let first = unsafe { load_word(base, at) };
                // SAFETY: as above; there is one offset more than there are vertices.
                let end = unsafe { load_word(base, at + 8) };
                assert!(first <= end && end <= self.graph.entries, "a damaged graph");
                (first, end)
            })
            .collect();
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

    fn visit(&mut self, (first, end): Row) -> Result<()> {
        let mut from = first;
        while from < end {
            let to = end.min(from + PIECE_ENTRIES);
            if to < end {
                self.memory.prefetch(&[self.piece(to, end)])?;
            }
            self.visit_entries(from, to);
            from = to;
        }
        self.visited_entries += end - first;
        Ok(())
    }

    fn visit_entries(&mut self, from: u64, to: u64) {
        let start = self.memory.base().wrapping_add(self.graph.entries_at(from) as usize);
        for index in 0..(to - from) as usize {
            let entry = start.cast::<u32>().wrapping_add(index);
            // SAFETY: entries below `graph.entries`, which was checked against the length of the memory;
            // volatile, because the bytes belong to a file.
            let neighbour = unsafe { entry.read_volatile() };
            let level = &self.levels[neighbour as usize];
            // Most neighbours have been reached already: look before the more expensive exchange.
            if level.load(Ordering::Relaxed) == UNREACHED
                && level
                    .compare_exchange(
                        UNREACHED,
                        self.next_level,
                        Ordering::Relaxed,
                        Ordering::Relaxed,
                    )
                    .is_ok()
            {
                self.found.push(neighbour);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;
    use std::time::Duration;

    use super::super::csr::GraphFile;
    use super::super::rmat::{Rmat, Shape};
    use super::*;
    use crate::raw::Map;

    /// The search as a textbook has it, over plain vectors.
    fn reference(rmat: &Rmat, source: u32) -> Answer {
        let mut neighbours = vec![Vec::new(); rmat.shape.vertices() as usize];
        for index in 0..rmat.shape.edges {
            let (a, b) = rmat.edge(index);
            if a != b {
                neighbours[a as usize].push(b);
                neighbours[b as usize].push(a);
            }
        }
        let mut levels = vec![None; neighbours.len()];
        levels[source as usize] = Some(0_u32);
        let mut queue = VecDeque::from([source]);
        let mut answer = Answer { reached: 0, visited_entries: 0, depth: 0, checksum: 0 };
        while let Some(vertex) = queue.pop_front() {
            let level = levels[vertex as usize].unwrap();
            answer.reached += 1;
            answer.depth = level;
            let hash = mix(u64::from(vertex) << 32 | u64::from(level));
            answer.checksum = answer.checksum.wrapping_add(hash);
            for &neighbour in &neighbours[vertex as usize] {
                answer.visited_entries += 1;
                if levels[neighbour as usize].is_none() {
                    levels[neighbour as usize] = Some(level + 1);
                    queue.push_back(neighbour);
                }
            }
        }
        answer
    }

    struct Mapped {
        map: Map,
        prefetched: Mutex<Vec<(u64, u64)>>,
    }

    impl Contiguous for Mapped {
        fn base(&self) -> *const u8 {
            self.map.base()
        }
        fn prefetch(&self, ranges: &[(u64, u64)]) -> Result<()> {
            assert!(ranges.is_sorted());
            self.prefetched.lock().unwrap().extend(ranges);
            Ok(())
        }
    }

    #[test]
    fn a_mapped_graph_is_searched_like_a_vector() {
        // The second has rows of more than one piece.
        for (scale, edges) in [(10, 8 << 10), (3, 200_000)] {
            let rmat = Rmat { shape: Shape { scale, edges }, seed: 6 };
            let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
            let file = GraphFile::create(directory, &rmat, |_| {}).unwrap();
            let len_bytes = file.graph().file_bytes();
            let map = Map::file(file.file(), len_bytes as usize, false).unwrap();
            let mapped = Mapped { map, prefetched: Mutex::default() };
            // SAFETY: the whole file is mapped.
            let graph = unsafe { Graph::open(mapped.base(), len_bytes) }.unwrap();
            assert_eq!(graph, file.graph());
            let expected = reference(&rmat, graph.source);
            let search = |threads, time| {
                breadth_first_search(&graph, &mapped, threads, Instant::now() + time)
            };
            let an_hour = Duration::from_secs(3600);
            for threads in [1, 3] {
                let found = search(threads, an_hour).unwrap();
                assert_eq!(found, expected, "{threads} threads, scale {scale}");
            }
            // Every row that was visited was asked for in advance.
            let asked = std::mem::take(&mut *mapped.prefetched.lock().unwrap());
            let entry_bytes: u64 = asked
                .iter()
                .filter(|(at, _)| *at >= graph.entries_at(0))
                .map(|(_, len_bytes)| len_bytes)
                .sum();
            assert_eq!(entry_bytes, 2 * 4 * expected.visited_entries);
            let late = breadth_first_search(&graph, &mapped, 2, Instant::now());
            assert!(late.unwrap_err().is::<Overtime>());
        }
    }
}
