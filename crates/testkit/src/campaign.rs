//! Length and replay of randomised tests.
//!
//! `AQUIFER_SEED` replays a failed run, `AQUIFER_STEPS` scales the length of all runs, in percent.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::str::FromStr;

use crate::rng::Rng;

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

/// Runs the body of a fuzz target on random bytes, at most `most` of them, so that it keeps working
/// without a fuzzer. Prints the bytes that it panics at.
pub fn fuzz(usual: usize, most: u64, body: impl Fn(&[u8])) {
    let mut rng = Rng::new(seed(5));
    body(&[]);
    for _ in 0..steps(usual) {
        let input = random_bytes(&mut rng, most);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(&input))) {
            println!("the input was {input:?}");
            resume_unwind(panic);
        }
    }
}

/// Random bytes, most of them small or zero: such inputs get further.
fn random_bytes(rng: &mut Rng, most: u64) -> Vec<u8> {
    let density = rng.unit_f64();
    (0..rng.below(most + 1))
        .map(|_| {
            if rng.chance(density) {
                rng.next_u64() as u8
            } else {
                (rng.below(5) as u8).saturating_sub(2)
            }
        })
        .collect()
}
