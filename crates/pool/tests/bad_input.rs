//! Bad input and faults: each gives a typed error that says what to do, and leaves the pool as it was.

mod support;

use aquifer_pool::Pool;
use support::sample;
use support::*;

const POOL_BYTES: usize = 512 << 10;

#[test]
fn the_sample_is_what_it_says() {
    let image = sample::crashed_image(POOL_BYTES);
    let pool = Pool::open_on(FileMedia::of(&image), &reading()).unwrap();
    sample::assert_complete(&pool);
    let pool = Pool::open_on(FileMedia::of(&image), &alone()).unwrap();
    sample::assert_complete(&pool);
    assert!(pool.info().unwrap().recovered_records > 4);
}
