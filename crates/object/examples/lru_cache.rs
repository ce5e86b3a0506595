//! A cache that is still warm after a restart.
//!
//! ```sh
//! cargo run --example lru_cache -- cache.pool 1 2 3 1 4      # misses first, hits in the next run
//! ```

mod common;

use std::path::Path;

use aquifer_object::collections::PString;
use common::lru_cache::LruCache;

const ROOT: u64 = 0x6c72_7500;
const CAPACITY: u32 = 100;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let pool = arguments.next().ok_or("usage: lru_cache POOL [NUMBER…]")?;
    let mut attached = common::attach_heap(Path::new(&pool), "cache")?;
    attached.heap()?.enter(|scope| -> Result<(), Box<dyn std::error::Error>> {
        let heap = scope.heap();
        let cache = scope.root_or_insert_with(ROOT, |heap| Ok(LruCache::new_in(CAPACITY, heap)))?;
        for argument in arguments {
            let number: u64 = argument.parse()?;
            match cache.get(number) {
                Some(text) => println!("{number}: hit, {text}"),
                None => {
                    // What would take long elsewhere.
                    let square = (u128::from(number) * u128::from(number)).to_string();
                    println!("{number}: miss, computed {square}");
                    cache.insert(number, PString::from_str_in(&square, heap)?)?;
                }
            }
        }
        Ok(())
    })?;
    attached.psync()?;
    attached.detach()?;
    Ok(())
}
