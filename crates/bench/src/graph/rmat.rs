//! R-MAT: random graphs with a few hubs and many leaves, like social networks and the web.
//!
//! Chakrabarti, Zhan and Faloutsos, SIAM Data Mining 2004, with the parameters of Graph500 (a =
//! .57, b = c = .19). An edge descends `scale` times into one quadrant of the adjacency matrix.
//! Vertex numbers are scrambled afterwards: otherwise hubs are adjacent at the low end, which
//! exaggerates locality. Edge `i` depends only on the seed and `i`, so the edges can be drawn
//! twice, and by several threads.

use crate::raw::PAGE_BYTES;
use crate::rng::mix;

/// Quadrant probabilities in 1/65536.
const A: u64 = 37_356;
const B: u64 = 12_452;
const C: u64 = 12_452;

/// The size of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Vertices, as a power of two.
    pub scale: u32,
    /// Edges drawn; each is stored in both directions.
    pub edges: u64,
}

impl Shape {
    /// A graph whose file has about `size_bytes`: 16 to 32 edges per vertex.
    pub fn for_size(size_bytes: u64) -> Self {
        // A vertex takes an 8-byte offset, an edge two 4-byte entries.
        let vertices = (size_bytes / (8 + 16 * 8)).max(64);
        let scale = vertices.ilog2().min(31);
        let offsets_bytes = 8 << scale;
        let edges = size_bytes.saturating_sub(offsets_bytes + 2 * PAGE_BYTES as u64) / 8;
        Self { scale, edges: edges.max(64) }
    }

    /// Number of vertices.
    pub fn vertices(&self) -> u64 {
        1 << self.scale
    }
}

/// The edges of one graph.
#[derive(Debug, Clone, Copy)]
pub struct Rmat {
    /// Its size.
    pub shape: Shape,
    /// Selects a graph of that size.
    pub seed: u64,
}

impl Rmat {
    /// Edge number `index`: two vertices, which may be the same.
    pub fn edge(&self, index: u64) -> (u32, u32) {
        let (mut from, mut to) = (0_u64, 0_u64);
        let mut random = mix(self.seed ^ mix(index));
        for level in 0..self.shape.scale {
            if level % 4 == 0 && level > 0 {
                random = mix(random);
            }
            let draw = (random >> (16 * (level % 4))) & 0xffff;
            let (down, right) = match draw {
                draw if draw < A => (0, 0),
                draw if draw < A + B => (0, 1),
                draw if draw < A + B + C => (1, 0),
                _ => (1, 1),
            };
            from = from << 1 | down;
            to = to << 1 | right;
        }
        (self.scramble(from), self.scramble(to))
    }

    /// A permutation of the vertices: multiplying by an odd number and folding the high half onto
    /// the low one are both bijections on `scale` bits.
    fn scramble(&self, vertex: u64) -> u32 {
        let mask = self.shape.vertices() - 1;
        let half = self.shape.scale.div_ceil(2);
        let mut value = vertex;
        for step in 0..3 {
            let odd = mix(self.seed.wrapping_add(step)) | 1;
            value = value.wrapping_mul(odd).wrapping_add(odd >> 7) & mask;
            value ^= value >> half;
        }
        u32::try_from(value).expect("at most 31 bits")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_edges() {
        let rmat = Rmat { shape: Shape { scale: 16, edges: 1000 }, seed: 1 };
        let edges: Vec<_> = (0..1000).map(|index| rmat.edge(index)).collect();
        let again: Vec<_> = (0..1000).rev().map(|index| rmat.edge(index)).collect();
        assert!(edges.iter().eq(again.iter().rev()));
        let other = Rmat { seed: 2, ..rmat };
        assert!((0..1000).any(|index| other.edge(index) != rmat.edge(index)));
    }

    #[test]
    fn scrambling_is_a_permutation() {
        for scale in [1, 2, 7, 10] {
            let rmat = Rmat { shape: Shape { scale, edges: 0 }, seed: 3 };
            let mut seen = vec![false; 1 << scale];
            for vertex in 0..1 << scale {
                seen[rmat.scramble(vertex) as usize] = true;
            }
            assert!(seen.iter().all(|&seen| seen), "scale {scale}");
        }
    }

    #[test]
    fn degrees_are_skewed() {
        let rmat = Rmat { shape: Shape { scale: 12, edges: 16 << 12 }, seed: 4 };
        let mut degrees = vec![0_u64; 1 << 12];
        for index in 0..rmat.shape.edges {
            degrees[rmat.edge(index).0 as usize] += 1;
        }
        degrees.sort_unstable_by(|a, b| b.cmp(a));
        let hubs: u64 = degrees[..41].iter().sum();
        assert!(hubs > rmat.shape.edges / 10, "one vertex in a hundred has {hubs} edges");
        assert_eq!(*degrees.last().unwrap(), 0);
    }

    #[test]
    fn a_shape_fills_the_size() {
        for size_bytes in [1 << 20, 100 << 20, 1 << 30_u64] {
            let shape = Shape::for_size(size_bytes);
            let bytes = 8 * shape.vertices() + 8 * shape.edges;
            assert!(bytes <= size_bytes && bytes > size_bytes * 9 / 10, "{size_bytes}: {bytes}");
        }
    }
}
