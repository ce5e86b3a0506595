//! Runs the bodies of the fuzz targets (`fuzz/`) on random bytes, so that they keep working.

mod support;

use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use support::parsers;

/// Random bytes, most of them small or zero: such inputs get further.
fn bytes(rng: &mut Rng, most: u64) -> Vec<u8> {
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

fn run(usual: usize, most: u64, body: impl Fn(&[u8])) {
    let mut rng = Rng::new(seed(5));
    body(&[]);
    for _ in 0..steps(usual) {
        let input = bytes(&mut rng, most);
        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&input)))
        {
            println!("the input was {input:?}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn any_bytes_as_a_superblock() {
    run(5000, 600, parsers::superblock);
}

#[test]
fn any_bytes_as_a_slot() {
    run(5000, 520, parsers::slot);
}

#[test]
fn any_bytes_as_a_record() {
    run(5000, 9000, parsers::record);
}

#[test]
fn any_changes_of_a_pool() {
    run(400, 64, parsers::image);
}
