//! A map that keeps its keys in order, and survives.
//!
//! ```sh
//! cargo run --example ordered_map -- map.pool berlin=3700000 bonn=340000 bremen=570000
//! cargo run --example ordered_map -- map.pool bo      # what begins with it, or comes after
//! ```

mod common;

use std::ops::Bound::{Included, Unbounded};
use std::path::Path;

use aquifer_object::collections::{PBTreeMap, PString};

const ROOT: u64 = 0x6d61_7000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let pool = arguments.next().ok_or("usage: ordered_map POOL [KEY=NUMBER | KEY]…")?;
    let mut attached = common::attach_heap(Path::new(&pool), "map")?;
    attached.heap()?.enter(|scope| -> Result<(), Box<dyn std::error::Error>> {
        let heap = scope.heap();
        let map = scope
            .root_or_insert_with(ROOT, |heap| Ok(PBTreeMap::<PString<'_>, u64>::new_in(heap)))?;
        for argument in arguments {
            match argument.split_once('=') {
                Some((key, number)) => {
                    map.insert(PString::from_str_in(key, heap)?, number.parse()?)?;
                }
                None => {
                    for (key, number) in
                        map.range::<str, _>((Included(argument.as_str()), Unbounded))
                    {
                        println!("{}  {number}", &**key);
                    }
                }
            }
        }
        println!("{} keys", map.len());
        Ok(())
    })?;
    attached.psync()?;
    attached.detach()?;
    Ok(())
}
