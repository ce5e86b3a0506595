//! Random lookups: the neighbours of random vertices, as a graph service would look them up.

use std::time::Instant;

use anyhow::{Result, anyhow};

use super::csr::Graph;
use super::rows::{GROUP, Rows};
use crate::contender::Contiguous;
use crate::rng::{Rng, mix};

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
    let parts = std::thread::scope(|scope| {
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
        let joined = workers.into_iter().map(|worker| worker.join());
        joined
            .map(|result| result.unwrap_or_else(|_| Err(anyhow!("a lookup thread panicked"))))
            .collect::<Result<Vec<(u64, u64)>>>()
    })?;
    Ok(parts.into_iter().fold((0, 0), |all, part| (all.0 + part.0, all.1.wrapping_add(part.1))))
}
