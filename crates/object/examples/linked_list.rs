//! The list of the paper: numbers inserted in order, linked by plain pointers, crash-consistent by one call.
//!
//! ```sh
//! cargo run --example linked_list -- list.pool 30 10 20
//! cargo run --example linked_list -- list.pool 15        # and the first three are still there
//! ```

mod common;

use std::path::Path;

use common::plain_list::PlainList;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let pool = arguments.next().ok_or("usage: linked_list POOL [NUMBER…]")?;
    let mut head = common::attach_heap(Path::new(&pool), "list")?;
    {
        let heap = head.heap()?;
        // SAFETY: the only list of this heap, whose root is nothing else.
        let mut list = unsafe { PlainList::open(&heap) }?;
        for number in arguments {
            list.insert(number.parse()?)?;
        }
        println!("{:?}", list.iter().collect::<Vec<_>>());
    }
    head.psync()?; //      everything inserted is durable now, or nothing of it
    head.detach()?;
    Ok(())
}
