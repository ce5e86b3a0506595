//! Parallel top-down breadth-first search.
//!
//! A level's vertices (the frontier) are distributed in groups; each thread reads the rows of its
//! groups as described in [`super::rows`]. The answer depends only on levels, which do not depend
//! on the order of visits, so it is deterministic.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::Result;

use super::csr::Graph;
use super::rows::{self, GROUP, LEAST_SORTED_GROUP, Rows, VISITED_GROUP};
use crate::contender::{Contiguous, Visitor};
use crate::rng::mix;
use crate::threads::join_all;

/// Level of a vertex that has not been reached.
const UNREACHED: u32 = u32::MAX;

/// The result of a search: equal for all contenders on the same graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Vertices reached, the source included.
    pub reached: u64,
    /// Number of neighbours read.
    pub visited_entries: u64,
    /// Distance of the farthest vertex.
    pub depth: u32,
    /// Sum over all reached vertices of a hash of vertex and level.
    pub checksum: u64,
}

/// The memory of a search besides the graph: levels, and two frontiers of maximum size.
pub fn state_bytes(graph: &Graph) -> u64 {
    graph.vertices * (4 + 4 + 4)
}

/// How the rows of a frontier are read.
#[derive(Clone, Copy)]
pub enum Reader<'a> {
    /// In the order in which vertices were found, or sorted by hand; prefetched in groups.
    Streamed(&'a dyn Contiguous),
    /// In an order that the contender chooses.
    Visited(&'a dyn Visitor),
}

impl Reader<'_> {
    /// Whether frontiers are sorted. They are also for visits: sorted groups are spread over less of
    /// the file.
    fn is_sorted(self) -> bool {
        match self {
            Reader::Streamed(memory) => memory.sorted_group().is_some(),
            Reader::Visited(_) => true,
        }
    }

    /// Vertices in a group of a frontier. Sorted groups are so small that no thread is left with a
    /// large one.
    fn group(self, frontier: usize, threads: usize) -> usize {
        let (least, most) = match self {
            Reader::Streamed(memory) => match memory.sorted_group() {
                Some(group) => (group.min(LEAST_SORTED_GROUP), group),
                None => return GROUP,
            },
            Reader::Visited(_) => (GROUP, VISITED_GROUP),
        };
        (frontier / (8 * threads)).clamp(least, most)
    }
}

/// Searches from the graph's source with `threads` threads. Fails with [`Overtime`] after the
/// deadline.
pub fn breadth_first_search(
    graph: &Graph,
    reader: Reader<'_>,
    threads: usize,
    deadline: Instant,
) -> Result<Answer> {
    let levels: Vec<AtomicU32> = (0..graph.vertices).map(|_| AtomicU32::new(UNREACHED)).collect();
    // Relaxed here and below: each level is an independent value, and the end of each scope orders
    // the levels.
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
        let group = reader.group(frontier.len(), threads);
        let next_group = AtomicUsize::new(0);
        let found_by = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|_| {
                    let groups = std::iter::from_fn(|| {
                        // Relaxed: the counter only distributes the groups among threads.
                        let start =
                            next_group.fetch_add(1, Ordering::Relaxed).saturating_mul(group);
                        frontier.get(start..frontier.len().min(start.saturating_add(group)))
                    });
                    let levels = &levels;
                    scope.spawn(move || {
                        let mut found = Vec::new();
                        let visit = |neighbour: u32| {
                            if reach(&levels[neighbour as usize], level + 1) {
                                found.push(neighbour);
                            }
                        };
                        let entries = match reader {
                            Reader::Streamed(memory) => {
                                Rows { graph, memory }.stream(groups, deadline, visit)?
                            }
                            Reader::Visited(visitor) => {
                                rows::visit(graph, visitor, groups, deadline, visit)?
                            }
                        };
                        Ok((found, entries))
                    })
                })
                .collect();
            join_all(workers)
        })?;
        frontier.clear();
        for (found, visited_entries) in found_by {
            frontier.extend(found);
            answer.visited_entries += visited_entries;
        }
        if frontier.is_empty() {
            break;
        }
        if reader.is_sorted() {
            frontier.sort_unstable();
        }
    }
    Ok(answer)
}

/// Sets the level of a vertex unless it has one; returns whether it was set.
fn reach(level: &AtomicU32, next_level: u32) -> bool {
    // Most neighbours have been reached already: load before the more expensive compare-exchange.
    level.load(Ordering::Relaxed) == UNREACHED
        && level
            .compare_exchange(UNREACHED, next_level, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::path::Path;
    use std::sync::Mutex;
    use std::time::Duration;

    use super::super::csr::GraphFile;
    use super::super::rmat::{Rmat, Shape};
    use super::super::rows::Overtime;
    use super::*;
    use crate::raw::Map;

    /// A textbook search over plain vectors.
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
            let reader = Reader::Streamed(&mapped);
            let search = |threads, time| {
                breadth_first_search(&graph, reader, threads, Instant::now() + time)
            };
            let an_hour = Duration::from_secs(3600);
            for threads in [1, 3] {
                let found = search(threads, an_hour).unwrap();
                assert_eq!(found, expected, "{threads} threads, scale {scale}");
            }
            // Every visited row was prefetched.
            let asked = std::mem::take(&mut *mapped.prefetched.lock().unwrap());
            let entry_bytes: u64 = asked
                .iter()
                .filter(|(at, _)| *at >= graph.entries_at(0))
                .map(|(_, len_bytes)| len_bytes)
                .sum();
            assert_eq!(entry_bytes, 2 * 4 * expected.visited_entries);
            let late = breadth_first_search(&graph, reader, 2, Instant::now());
            assert!(late.unwrap_err().is::<Overtime>());
        }
    }
}
