//! How long randomised tests run, and how to run one again.
//!
//! `AQUIFER_SEED` replays a run that failed, `AQUIFER_STEPS` makes all of them longer or shorter, in percent.

use std::str::FromStr;

fn number<T: FromStr>(variable: &str) -> Option<T> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// The seed of a test: `AQUIFER_SEED`, or the one given. Printed, so that a failure can be replayed.
pub fn seed(usual: u64) -> u64 {
    let seed = number("AQUIFER_SEED").unwrap_or(usual);
    println!("replay with AQUIFER_SEED={seed}");
    seed
}

/// How many steps a test takes: `usual`, scaled by `AQUIFER_STEPS` in percent.
pub fn steps(usual: usize) -> usize {
    (usual * number("AQUIFER_STEPS").unwrap_or(100usize)).div_ceil(100)
}
