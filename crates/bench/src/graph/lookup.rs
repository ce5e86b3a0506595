//! Random lookups: the neighbours of random vertices, as a graph service would look them up.

use std::time::Instant;

use anyhow::Result;

use super::csr::Graph;
use super::rows::{GROUP, Rows};
use crate::contender::Contiguous;
use crate::rng::{Rng, mix};
use crate::threads::join_all;

/// Looks up `count` vertices with each of `threads` threads. Returns the number of neighbours and a
/// sum over them, equal for all contenders with the same graph, seed and numbers.
pub fn random_lookups(
    graph: &Graph,
    memory: &dyn Contiguous,
    threads: u32,
    count: u64,
    seed: u64,
    deadline: Instant,
) -> Result<(u64, u64)> {
    let rows = Rows { graph, memory };
    let shares = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|number| {
                scope.spawn(move || {
                    let mut rng = Rng::for_lane(seed, 0, number);
                    let vertices: Vec<u32> =
                        (0..count).map(|_| rng.below(graph.vertices) as u32).collect();
                    let mut sum = 0_u64;
                    let entries = rows.stream(vertices.chunks(GROUP), deadline, |neighbour| {
                        sum = sum.wrapping_add(mix(u64::from(neighbour)));
                    })?;
                    Ok((entries, sum))
                })
            })
            .collect();
        join_all(workers)
    })?;
    Ok(shares.into_iter().fold((0, 0), |all, share| (all.0 + share.0, all.1.wrapping_add(share.1))))
}
