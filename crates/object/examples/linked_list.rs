//! The list of the paper: numbers inserted in order, linked by plain pointers, made
//! crash-consistent by one call.
//!
//! ```sh
//! cargo run --example linked_list -- list.pool 30 10 20
//! cargo run --example linked_list -- list.pool 15        # the first three are still there
//! ```

mod common;

use std::process::ExitCode;

use common::plain_list::PlainList;

fn main() -> ExitCode {
    common::run("linked_list POOL [NUMBER…]", |pool, arguments| {
        let mut head = common::attach_heap(pool, "list")?;
        {
            let heap = head.heap()?;
            // SAFETY: the only list of this heap, whose root is only ever a list.
            let mut list = unsafe { PlainList::open(&heap) }?;
            for argument in arguments {
                list.insert(common::number(argument)?)?;
            }
            println!("{:?}", list.iter().collect::<Vec<_>>());
        }
        head.psync()?; // all inserted numbers become durable atomically
        head.detach()?;
        Ok(())
    })
}
