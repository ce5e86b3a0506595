//! Length and replay of randomised tests.
//!
//! `AQUIFER_SEED` replays a failed run, `AQUIFER_STEPS` scales the length of all runs, in percent.

use std::str::FromStr;

fn number<T: FromStr>(variable: &str) -> Option<T> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// Returns the seed of a test: `AQUIFER_SEED`, or the one given. Prints it, so that a failure can
/// be replayed.
pub fn seed(usual: u64) -> u64 {
    let seed = number("AQUIFER_SEED").unwrap_or(usual);
    println!("replay with AQUIFER_SEED={seed}");
    seed
}

/// Returns the number of steps of a test: `usual`, scaled by `AQUIFER_STEPS` in percent.
pub fn steps(usual: usize) -> usize {
    (usual * number("AQUIFER_STEPS").unwrap_or(100usize)).div_ceil(100)
}
