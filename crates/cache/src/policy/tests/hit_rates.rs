//! Hit rates against plain models of the published algorithms.
//!
//! With one victim at a time FIFO, CLOCK, SIEVE and S3-FIFO must make exactly the same choices as
//! their models, so the rates are *equal*; sampled LRU must come close to true LRU.
//!
//! With batches of `b` a cache of `n` frames has between `n - b` and `n` of them filled. So its
//! rate must lie between the model's rates for `n - b` and for `n` frames, give or take
//! [`BATCH_SLACK`]: the order of evictions and insertions differs within a batch, which can help as
//! well as hurt.

use aquifer_testkit::model::{self, Model, hit_rate};
use aquifer_testkit::trace;

use super::Simulator;
use crate::policy::{Policy, PolicyKind, S3Fifo};

const FRAMES: usize = 1024;
const BATCH: usize = 64;
const PAGES: u64 = 8192;
const ACCESSES: usize = 50_000;

/// What a batch may cost or gain beyond the frames that it leaves empty.
const BATCH_SLACK: f64 = 0.004;

/// The largest difference between sampled LRU and true LRU.
const LRU_SLACK: f64 = 0.002;

const LONG_LOOP: &str = "a loop a fifth longer than the cache";

type Trace = Box<dyn Iterator<Item = u64>>;

fn traces() -> Vec<(&'static str, Trace)> {
    let scans = trace::zipf_with_scans(PAGES, 0.9, 4_000, 2_000, 3);
    let traces: [(&str, Trace); 7] = [
        ("zipf 0.8", Box::new(trace::zipf(PAGES, 0.8, 1))),
        ("zipf 1.0", Box::new(trace::zipf(PAGES, 1.0, 2))),
        ("zipf 0.9 with scans", Box::new(scans)),
        ("uniform", Box::new(trace::uniform(PAGES, 4))),
        ("a scan", Box::new(trace::scan())),
        ("a loop that fits", Box::new(trace::loop_(FRAMES as u64))),
        (LONG_LOOP, Box::new(trace::loop_(FRAMES as u64 * 6 / 5))),
    ];
    let cut =
        |(name, trace): (&'static str, Trace)| (name, Box::new(trace.take(ACCESSES)) as Trace);
    traces.map(cut).into()
}

/// The hit rate of each trace, in order, in a fresh cache or model.
fn rates<M: Model>(fresh: impl Fn() -> M) -> Vec<(&'static str, f64)> {
    traces().into_iter().map(|(name, trace)| (name, hit_rate(&mut fresh(), trace))).collect()
}

fn rates_of(kind: PolicyKind, batch: usize) -> Vec<(&'static str, f64)> {
    rates(|| Simulator::new(kind.build(), FRAMES, batch))
}

fn assert_within(ours: &[(&str, f64)], model: &[(&str, f64)], slack: f64) {
    for ((name, rate), (_, expected)) in ours.iter().zip(model) {
        assert!((rate - expected).abs() <= slack, "{name}: {rate}, the model {expected}");
    }
}

fn assert_batches_cost_little<M: Model>(kind: PolicyKind, fresh: impl Fn(usize) -> M) {
    let (least, most) = (rates(|| fresh(FRAMES - BATCH)), rates(|| fresh(FRAMES)));
    for (((name, rate), (_, least)), (_, most)) in
        rates_of(kind, BATCH).into_iter().zip(least).zip(most)
    {
        match kind {
            // Randomness keeps some pages of a loop, whatever the batch.
            PolicyKind::Lru if name == LONG_LOOP => assert!(rate > least, "{name}: {rate}"),
            // The small queue is just longer than a batch, so few pages stay in it for a whole
            // round, and a loop needs all the pages it can keep.
            PolicyKind::S3Fifo if name == LONG_LOOP => assert!(rate > 0.5, "{name}: {rate}"),
            _ => assert!(
                (least - BATCH_SLACK..=most + BATCH_SLACK).contains(&rate),
                "{name}: {rate} is not in {least}..{most}"
            ),
        }
    }
}

#[test]
fn clock_is_clock() {
    let model = rates(|| model::Clock::new(FRAMES));
    assert_within(&rates_of(PolicyKind::Clock, 1), &model, 0.0);
    assert_batches_cost_little(PolicyKind::Clock, model::Clock::new);
}

#[test]
fn loop_clock_is_clock_but_for_loops() {
    for batch in [1, 16, BATCH] {
        let (ours, clock) =
            (rates_of(PolicyKind::LoopClock, batch), rates_of(PolicyKind::Clock, batch));
        for ((name, rate), (_, expected)) in ours.into_iter().zip(clock) {
            if name == LONG_LOOP {
                // At most 5/6, of which the window and the batch cost a sixteenth each, and finding
                // it two passes of forty.
                assert!(rate > 0.66, "{name}, batches of {batch}: {rate}");
            } else {
                assert!(rate >= expected - BATCH_SLACK, "{name}: {rate}, clock {expected}");
            }
        }
    }
}

#[test]
fn loop_clock_lets_go_of_a_loop_that_ended() {
    let length = FRAMES as u64 * 6 / 5;
    for batch in [1, BATCH] {
        let mut cache = Simulator::new(PolicyKind::LoopClock.build(), FRAMES, batch);
        let looped = hit_rate(&mut cache, trace::loop_(length).take(ACCESSES));
        assert!(looped > 0.66, "{looped}");
        // The same cache, other pages: a loop that fits, then one that does not, then skewed ones.
        let fits = trace::loop_(FRAMES as u64 * 9 / 10).map(|page| page + length);
        let rate = hit_rate(&mut cache, fits.take(20 * FRAMES));
        assert!(rate > 0.85, "a loop that fits after one that does not: {rate}");
        let again = trace::loop_(length).map(|page| page + 4 * length);
        let rate = hit_rate(&mut cache, again.take(ACCESSES));
        assert!(rate > 0.6, "another loop: {rate}");
        let zipf = || trace::zipf(PAGES, 1.0, 2).map(|page| page + 9 * length).take(ACCESSES);
        let clock = hit_rate(&mut Simulator::new(PolicyKind::Clock.build(), FRAMES, batch), zipf());
        let rate = hit_rate(&mut cache, zipf());
        assert!(rate > clock - 0.01, "popular pages after a loop: {rate}, clock {clock}");
    }
}

#[test]
fn sieve_is_sieve() {
    let model = rates(|| model::Sieve::new(FRAMES));
    assert_within(&rates_of(PolicyKind::Sieve, 1), &model, 0.0);
    assert_batches_cost_little(PolicyKind::Sieve, model::Sieve::new);
}

#[test]
fn s3_fifo_is_s3_fifo() {
    let to_the_letter = rates(|| model::S3Fifo::new(FRAMES));
    let single = rates(|| model::S3Fifo::with_single_evictions(FRAMES));
    let exact = rates(|| {
        let mut policy = S3Fifo::new();
        policy.resize(FRAMES, FRAMES);
        policy.make_ghost_exact();
        Simulator::with_sized_policy(Box::new(policy), FRAMES, 1)
    });
    assert_within(&exact, &single, 0.0);
    // The cost of two deviations: one victim per miss, and a ghost table that may forget early.
    assert_within(&exact, &to_the_letter, 0.001);
    assert_within(&rates_of(PolicyKind::S3Fifo, 1), &to_the_letter, 0.001);
    assert_batches_cost_little(PolicyKind::S3Fifo, model::S3Fifo::new);
}

#[test]
fn sampled_lru_is_close_to_lru() {
    let model = rates(|| model::Lru::new(FRAMES));
    let ours = rates_of(PolicyKind::Lru, 1);
    for ((name, rate), (_, lru)) in ours.into_iter().zip(model) {
        let most = if name == LONG_LOOP { 1.0 } else { lru + LRU_SLACK };
        assert!((lru - LRU_SLACK..=most).contains(&rate), "{name}: {rate}, true LRU {lru}");
    }
    assert_batches_cost_little(PolicyKind::Lru, model::Lru::new);

    // Also if the pool is as large as the cache, or the sample a smaller part of it.
    for frames in [16, 64, 4096] {
        let trace = || trace::zipf(8 * frames as u64, 0.8, 5).take(40 * frames);
        let lru = hit_rate(&mut model::Lru::new(frames), trace());
        let rate = hit_rate(&mut Simulator::new(PolicyKind::Lru.build(), frames, 1), trace());
        assert!((rate - lru).abs() <= LRU_SLACK, "{frames} frames: {rate}, true LRU {lru}");
    }
}

/// Checks the claim of the table in the policies' documentation, though not as an equality.
#[test]
fn the_policies_for_skewed_popularity_are_better_at_it() {
    let rate = |kind: PolicyKind| {
        let scans = trace::zipf_with_scans(PAGES, 0.9, 4_000, 2_000, 3).take(ACCESSES);
        hit_rate(&mut Simulator::new(kind.build(), FRAMES, 16), scans)
    };
    let (clock, lru) = (rate(PolicyKind::Clock), rate(PolicyKind::Lru));
    let (s3_fifo, sieve) = (rate(PolicyKind::S3Fifo), rate(PolicyKind::Sieve));
    let best_simple = lru.max(clock);
    assert!(best_simple + 0.05 < s3_fifo.min(sieve), "{best_simple}, {s3_fifo}, {sieve}");
}
