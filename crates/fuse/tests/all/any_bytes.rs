//! Requests of any bytes are parsed or refused: those that the fuzzer has kept, and random ones.

use std::path::Path;

use aquifer_testkit::rng::Rng;

#[test]
fn what_the_fuzzer_kept_is_parsed_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/wire_request");
    let mut count = 0;
    for entry in std::fs::read_dir(corpus).expect("the corpus") {
        crate::support::request(&std::fs::read(entry.expect("an entry").path()).expect("an input"));
        count += 1;
    }
    assert!(count > 20, "{count}");
}

#[test]
fn random_bytes_are_parsed_or_refused() {
    let mut rng = Rng::new(7);
    for _ in 0..20_000 {
        let mut bytes: Vec<u8> = (0..rng.below(300)).map(|_| rng.next_u64() as u8).collect();
        if bytes.len() >= 40 {
            // An operation that exists, and few extensions.
            bytes[4..8].copy_from_slice(&(rng.below(60) as u32).to_ne_bytes());
            bytes[36..38].copy_from_slice(&(rng.below(3) as u16).to_ne_bytes());
        }
        crate::support::request(&bytes);
    }
}
