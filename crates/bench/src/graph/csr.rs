//! The graph file: compressed sparse rows.
//!
//! ```text
//! 0                4096                                  4096 · k
//! ┌──────────────┬─────────────────────────────────────┬──────────────────────────────────────┐
//! │ header       │ offsets: u64 × (vertices + 1)  (pad) │ neighbours: u32 × entries      (pad) │
//! └──────────────┴─────────────────────────────────────┴──────────────────────────────────────┘
//! header: magic, vertices, entries, source, start of the neighbours (bytes), all u64
//! ```
//! The neighbours of vertex `v` are entries `offsets[v] .. offsets[v + 1]`, sorted. Native byte
//! order: the file is created and removed by one run. It is built in memory (8 bytes per edge), so
//! generating is the only step of the bench that needs as much memory as the file's length.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};

use super::rmat::Rmat;
use crate::data::scratch_file;
use crate::raw::{PAGE_BYTES, drop_cache, load_word};
use aquifer_sys::interrupt;
use aquifer_sys::machine::cores;

const MAGIC: u64 = u64::from_ne_bytes(*b"aquifgr1");
const HEADER_WORDS: usize = 5;
/// Start of the offsets.
const OFFSETS_AT: u64 = PAGE_BYTES as u64;
const REQUEST_BYTES: usize = 4 << 20;

/// The content of the header: everything needed to find a vertex's neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Graph {
    /// Number of vertices.
    pub vertices: u64,
    /// Number of stored neighbours: two for each edge that is not a loop.
    pub entries: u64,
    /// The vertex with the most neighbours, where searches begin.
    pub source: u32,
    neighbours_at: u64,
}

impl Graph {
    fn new(vertices: u64, entries: u64, source: u32) -> Self {
        let offsets_end = OFFSETS_AT + (vertices + 1) * 8;
        let neighbours_at = offsets_end.next_multiple_of(PAGE_BYTES as u64);
        Self { vertices, entries, source, neighbours_at }
    }

    fn header(&self) -> [u64; HEADER_WORDS] {
        [MAGIC, self.vertices, self.entries, u64::from(self.source), self.neighbours_at]
    }

    /// Reads and checks a header.
    ///
    /// # Safety
    /// `base` must be 8-byte aligned, with `len_bytes` readable bytes there, at least a page.
    pub unsafe fn open(base: *const u8, len_bytes: u64) -> Result<Self> {
        let mut words = [0; HEADER_WORDS];
        for (index, word) in words.iter_mut().enumerate() {
            // SAFETY: inside the first page, by the caller's promise.
            *word = unsafe { load_word(base, index * 8) };
        }
        let [magic, vertices, entries, source, neighbours_at] = words;
        ensure!(magic == MAGIC, "not a graph file");
        ensure!(
            vertices <= 1 << 32 && entries <= 1 << 48 && source < vertices,
            "a damaged graph file"
        );
        let graph = Self::new(vertices, entries, u32::try_from(source)?);
        ensure!(graph.neighbours_at == neighbours_at, "a damaged graph file");
        ensure!(graph.file_bytes() <= len_bytes, "a graph file that is cut off");
        Ok(graph)
    }

    /// Length of the file.
    pub fn file_bytes(&self) -> u64 {
        (self.neighbours_at + self.entries * 4).next_multiple_of(PAGE_BYTES as u64)
    }

    /// The position of a vertex's offsets: 16 bytes.
    pub fn offsets_at(&self, vertex: u32) -> u64 {
        debug_assert!(u64::from(vertex) < self.vertices);
        OFFSETS_AT + u64::from(vertex) * 8
    }

    /// The position of the entries from `first` on.
    pub fn entries_at(&self, first: u64) -> u64 {
        self.neighbours_at + first * 4
    }
}

/// A generated graph file, removed when dropped.
#[derive(Debug)]
pub struct GraphFile {
    path: tempfile::TempPath,
    file: File,
    graph: Graph,
}

impl GraphFile {
    /// Generates the graph and writes it to a file in `directory`; it is not in the page cache
    /// afterwards. `progress` is called with the share of the work done, from 0 to 1.
    pub fn create(directory: &Path, rmat: &Rmat, progress: impl Fn(f64)) -> Result<Self> {
        let (graph, offsets, neighbours) = build(rmat, &progress)?;
        let (file, path) = scratch_file(directory)?;
        file.set_len(graph.file_bytes())?;
        let write = || -> io::Result<()> {
            write_words(&file, 0, &graph.header(), |word| word.to_ne_bytes())?;
            write_words(&file, OFFSETS_AT, &offsets, |word| word.to_ne_bytes())?;
            write_words(&file, graph.entries_at(0), &neighbours, |word| word.to_ne_bytes())
        };
        write().with_context(|| format!("cannot write the graph file {}", path.display()))?;
        drop_cache(&file)?;
        progress(1.0);
        Ok(Self { path, file, graph })
    }

    /// The path of the file.
    pub fn path(&self) -> PathBuf {
        self.path.to_path_buf()
    }

    /// The open file, for page-cache queries.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The graph in the file.
    pub fn graph(&self) -> Graph {
        self.graph
    }
}

/// Writes an array in large requests.
fn write_words<T: Copy, const N: usize>(
    file: &File,
    offset_bytes: u64,
    words: &[T],
    bytes_of: impl Fn(T) -> [u8; N],
) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(REQUEST_BYTES);
    let mut at = offset_bytes;
    for chunk in words.chunks(REQUEST_BYTES / N) {
        buffer.clear();
        chunk.iter().for_each(|&word| buffer.extend_from_slice(&bytes_of(word)));
        file.write_all_at(&buffer, at)?;
        at += buffer.len() as u64;
    }
    Ok(())
}

/// Draws all edges twice: to count, and to place. Loops are skipped, parallel edges are kept.
fn build(rmat: &Rmat, progress: &impl Fn(f64)) -> Result<(Graph, Vec<u64>, Vec<u32>)> {
    let vertices = rmat.shape.vertices();
    let degrees: Vec<AtomicU32> = (0..vertices).map(|_| AtomicU32::new(0)).collect();
    // Relaxed throughout: independent counters and slots; the end of each scope orders the passes.
    for_each_edge(
        rmat,
        |share| progress(0.3 * share),
        |from, to| {
            degrees[from as usize].fetch_add(1, Ordering::Relaxed);
            degrees[to as usize].fetch_add(1, Ordering::Relaxed);
        },
    )?;
    let mut offsets = Vec::with_capacity(degrees.len() + 1);
    let mut entries = 0;
    let mut source = (0, 0);
    for (vertex, degree) in (0_u32..).zip(&degrees) {
        let degree = degree.load(Ordering::Relaxed);
        source = source.max((degree, vertex));
        offsets.push(entries);
        entries += u64::from(degree);
    }
    offsets.push(entries);

    let cursors: Vec<AtomicU64> = offsets.iter().map(|&offset| AtomicU64::new(offset)).collect();
    let slots: Vec<AtomicU32> = (0..entries).map(|_| AtomicU32::new(0)).collect();
    for_each_edge(
        rmat,
        |share| progress(0.3 + 0.4 * share),
        |from, to| {
            for (vertex, neighbour) in [(from, to), (to, from)] {
                let slot = cursors[vertex as usize].fetch_add(1, Ordering::Relaxed);
                slots[slot as usize].store(neighbour, Ordering::Relaxed);
            }
        },
    )?;
    drop(cursors);
    let mut neighbours: Vec<u32> = slots.into_iter().map(AtomicU32::into_inner).collect();
    // Sorting also makes the file independent of thread timing.
    sort_rows(&offsets, &mut neighbours);
    progress(0.8);
    Ok((Graph::new(vertices, entries, source.1), offsets, neighbours))
}

fn for_each_edge(
    rmat: &Rmat,
    progress: impl Fn(f64),
    each: impl Fn(u32, u32) + Sync,
) -> Result<()> {
    const STEPS: u64 = 16;
    let threads = cores() as u64;
    let edges = rmat.shape.edges;
    for step in 0..STEPS {
        interrupt::check()?;
        let (from, to) = (edges * step / STEPS, edges * (step + 1) / STEPS);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let each = &each;
                scope.spawn(move || {
                    let start = |share| from + (to - from) * share / threads;
                    for index in start(thread)..start(thread + 1) {
                        let (a, b) = rmat.edge(index);
                        if a != b {
                            each(a, b);
                        }
                    }
                });
            }
        });
        progress((step + 1) as f64 / STEPS as f64);
    }
    Ok(())
}

/// Sorts each vertex's neighbours, distributing the rows over the cores by their entries.
fn sort_rows(offsets: &[u64], mut neighbours: &mut [u32]) {
    let vertices = offsets.len() - 1;
    let share = (neighbours.len() / cores()).max(1) as u64;
    std::thread::scope(|scope| {
        let mut from = 0;
        while from < vertices {
            let goal = offsets[from] + share;
            let to = offsets.partition_point(|&offset| offset < goal).clamp(from + 1, vertices);
            let count = (offsets[to] - offsets[from]) as usize;
            let (mut chunk, rest) = std::mem::take(&mut neighbours).split_at_mut(count);
            neighbours = rest;
            let rows = &offsets[from..=to];
            scope.spawn(move || {
                for row in rows.windows(2) {
                    let (mine, rest) = chunk.split_at_mut((row[1] - row[0]) as usize);
                    mine.sort_unstable();
                    chunk = rest;
                }
            });
            from = to;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::rmat::Shape;
    use super::*;

    #[test]
    fn rows_hold_both_directions_of_every_edge() {
        let rmat = Rmat { shape: Shape { scale: 8, edges: 3000 }, seed: 5 };
        let (graph, offsets, neighbours) = build(&rmat, &|_| {}).unwrap();
        let mut expected = vec![Vec::new(); 256];
        for index in 0..3000 {
            let (a, b) = rmat.edge(index);
            if a != b {
                expected[a as usize].push(b);
                expected[b as usize].push(a);
            }
        }
        for (vertex, mut row) in expected.into_iter().enumerate() {
            row.sort_unstable();
            let range = offsets[vertex] as usize..offsets[vertex + 1] as usize;
            assert_eq!(neighbours[range], row[..], "vertex {vertex}");
        }
        let degree = |vertex: usize| offsets[vertex + 1] - offsets[vertex];
        assert_eq!(degree(graph.source as usize), (0..256).map(degree).max().unwrap());
        assert_eq!(graph.entries as usize, neighbours.len());
    }

    #[test]
    fn damaged_headers_are_refused() {
        let graph = Graph::new(64, 1000, 3);
        let mut page = vec![0_u64; PAGE_BYTES / 8];
        page[..HEADER_WORDS].copy_from_slice(&graph.header());
        let open = |page: &[u64], len_bytes| {
            // SAFETY: an aligned page.
            unsafe { Graph::open(page.as_ptr().cast(), len_bytes) }
        };
        assert_eq!(open(&page, graph.file_bytes()).unwrap(), graph);
        assert!(open(&page, graph.file_bytes() - 1).is_err());
        for (word, value) in [(0, 1), (1, u64::MAX), (2, u64::MAX), (3, 64), (4, 0)] {
            let mut damaged = page.clone();
            damaged[word] = value;
            assert!(open(&damaged, graph.file_bytes()).is_err(), "word {word}");
        }
    }
}
