//! A cache that is still warm after a restart.
//!
//! ```sh
//! cargo run --example lru_cache -- cache.pool 1 2 3 1 4      # misses first, hits in the next run
//! ```

mod common;

use std::process::ExitCode;

use aquifer_object::collections::PString;
use common::lru_cache::LruCache;

const ROOT: u64 = 0x6c72_7500;
const CAPACITY: u32 = 100;

fn main() -> ExitCode {
    common::run("lru_cache POOL [NUMBER…]", |pool, arguments| {
        let mut attached = common::attach_heap(pool, "cache")?;
        attached.heap()?.enter(|scope| -> common::Result<()> {
            let heap = scope.heap();
            let cache =
                scope.root_or_insert_with(ROOT, |heap| Ok(LruCache::new_in(CAPACITY, heap)))?;
            for argument in arguments {
                let number = common::number(argument)?;
                match cache.get(number) {
                    Some(text) => println!("{number}: hit, {text}"),
                    None => {
                        // Stands for an expensive computation.
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
    })
}
