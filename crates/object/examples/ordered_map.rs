//! An ordered map that survives restarts.
//!
//! ```sh
//! cargo run --example ordered_map -- map.pool berlin=3700000 bonn=340000 bremen=570000
//! cargo run --example ordered_map -- map.pool bo      # keys from this prefix on
//! ```

mod common;

use std::ops::Bound::{Included, Unbounded};
use std::process::ExitCode;

use aquifer_object::collections::{PBTreeMap, PString};

const ROOT: u64 = 0x6d61_7000;

fn main() -> ExitCode {
    common::run("ordered_map POOL [KEY=NUMBER | KEY]…", |pool, arguments| {
        let mut attached = common::attach_heap(pool, "map")?;
        attached.heap()?.enter(|scope| -> common::Result<()> {
            let heap = scope.heap();
            let map = scope.root_or_insert_with(ROOT, |heap| {
                Ok(PBTreeMap::<PString<'_>, u64>::new_in(heap))
            })?;
            for argument in arguments {
                match argument.split_once('=') {
                    Some((key, number)) => {
                        map.insert(PString::from_str_in(key, heap)?, common::number(number)?)?;
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
    })
}
