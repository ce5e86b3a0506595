//! The work of the demonstration: a graph in a file, walked; and passes over all of the file.

use std::fs::File;
use std::io::{BufWriter, Write};

use anyhow::{Result, ensure};
use aquifer_sys::interrupt;

use crate::readers::Reader;

/// The neighbours of a vertex.
const NEIGHBOURS: u64 = 16;
/// A vertex is the numbers of its neighbours, of four bytes each.
const VERTEX_BYTES: u64 = 4 * NEIGHBOURS;
/// Walkers, and how far each of them goes.
const WALKERS: u64 = 8192;
const STEPS: u64 = 24;

/// A graph in which each vertex has 16 neighbours by chance.
#[derive(Debug, Clone, Copy)]
pub struct Graph {
    vertices: u64,
}

impl Graph {
    /// The graph in a file of this length.
    pub fn of(file_bytes: u64) -> Self {
        Self { vertices: file_bytes / VERTEX_BYTES }
    }

    /// Writes a graph of this length.
    pub fn create(file: &File, file_bytes: u64) -> Result<Self> {
        let graph = Self::of(file_bytes);
        ensure!(
            (1..1 << 32).contains(&graph.vertices),
            "a graph has 64 bytes to 256 GiB: choose another --size"
        );
        let mut output = BufWriter::with_capacity(1 << 20, file);
        for edge in 0..graph.vertices * NEIGHBOURS {
            if edge % (1 << 20) == 0 {
                interrupt::check()?;
            }
            output.write_all(&((mix(edge) % graph.vertices) as u32).to_ne_bytes())?;
        }
        output.flush()?;
        file.sync_all()?;
        Ok(graph)
    }

    /// The memory of a walk beside the graph: where the walkers are, and the list of ranges and its order.
    pub fn state_bytes(self) -> u64 {
        WALKERS * 64
    }

    /// Each walker goes to a neighbour, by chance, again and again. Returns a sum that depends on all their ways.
    pub fn walk(self, reader: &dyn Reader) -> Result<u64> {
        let mut at: Vec<u64> = (0..WALKERS).map(|walker| mix(walker) % self.vertices).collect();
        for step in 0..STEPS {
            let ranges: Vec<_> = at
                .iter()
                .map(|vertex| vertex * VERTEX_BYTES..(vertex + 1) * VERTEX_BYTES)
                .collect();
            reader.visit(&ranges, &mut |walker, row| {
                let chosen = mix(walker as u64 ^ step << 32) % NEIGHBOURS;
                at[walker] = row.get::<u32>(4 * chosen as usize).into();
            })?;
        }
        Ok(at.into_iter().fold(0, |sum, vertex| mix(sum ^ vertex)))
    }
}

/// Reads all of the file, again and again; the sum of its words.
pub fn passes(reader: &dyn Reader, file_bytes: u64, passes: u32) -> Result<u64> {
    let pieces: Vec<_> =
        (0..file_bytes).step_by(1 << 16).map(|at| at..file_bytes.min(at + (1 << 16))).collect();
    let mut sum = 0_u64;
    for _ in 0..passes {
        reader.visit(&pieces, &mut |_, bytes| {
            bytes.for_each_block(|block| {
                let words = block
                    .chunks_exact(8)
                    .map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")));
                sum = sum.wrapping_add(words.fold(0, u64::wrapping_add));
            });
        })?;
    }
    Ok(sum)
}

/// Scatters a number over 64 bits (SplitMix64).
fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
