//! Three ways to read ranges of a file as memory. Read this first.

use std::fs::File;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use anyhow::Result;
use aquifer::{Bytes, Cache, Mapping};
use memmap2::{Advice, Mmap};

/// Calls `look` with each of the ranges and its place in the list, in any order.
pub trait Reader {
    /// Visits each range once.
    fn visit(&self, ranges: &[Range<u64>], look: &mut dyn FnMut(usize, Bytes<'_>)) -> Result<()>;
}

/// Opens the file with the reader of that name, which may use about this much memory.
pub fn open(reader: &str, path: &Path, budget_bytes: u64) -> Result<Box<dyn Reader>> {
    if reader == "aquifer" {
        // A cache has a budget; any number of files and devices are mapped through it.
        let cache = Cache::builder().budget_bytes(budget_bytes).build()?;
        return Ok(Box::new(Aquifer { mapping: cache.open(path)? }));
    }
    // SAFETY: nothing writes to the file or truncates it while the demonstration runs.
    let map = unsafe { Mmap::map(&File::open(path)?)? };
    if reader == "by_hand" {
        map.advise(Advice::Random)?;
        return Ok(Box::new(ByHand { map }));
    }
    Ok(Box::new(Plain { map }))
}

/// The same, whatever is in memory and whatever the order: Aquifer reads what is missing at the queue depth of the disk, and calls
/// `look` as it arrives. An unreadable page is an error here, not a signal.
struct Aquifer {
    mapping: Mapping,
}

impl Reader for Aquifer {
    fn visit(&self, ranges: &[Range<u64>], look: &mut dyn FnMut(usize, Bytes<'_>)) -> Result<()> {
        Ok(self.mapping.visit_many(ranges.iter().cloned(), |visited| {
            look(visited.index, visited.bytes);
            ControlFlow::Continue(())
        })?)
    }
}

/// Plain mmap: each load of a missing page waits for the disk.
struct Plain {
    map: Mmap,
}

impl Reader for Plain {
    fn visit(&self, ranges: &[Range<u64>], look: &mut dyn FnMut(usize, Bytes<'_>)) -> Result<()> {
        for (place, range) in ranges.iter().enumerate() {
            look(place, self.map[range.start as usize..range.end as usize].into());
        }
        Ok(())
    }
}

/// mmap as an expert uses it: without read-ahead, in the order of the file, and a group at a time is asked for before it is read.
struct ByHand {
    map: Mmap,
}

/// Ranges in a group: enough for the queue of a disk, few enough to be still there when they are read.
const GROUP: usize = 256;

impl Reader for ByHand {
    fn visit(&self, ranges: &[Range<u64>], look: &mut dyn FnMut(usize, Bytes<'_>)) -> Result<()> {
        let mut order: Vec<usize> = (0..ranges.len()).collect();
        order.sort_unstable_by_key(|&place| ranges[place].start);
        let ask = |group: &[usize]| {
            for &place in group {
                let Range { start, end } = ranges[place].clone();
                self.map.advise_range(Advice::WillNeed, start as usize, (end - start) as usize)?;
            }
            anyhow::Ok(())
        };
        let groups: Vec<_> = order.chunks(GROUP).collect();
        groups.first().map_or(Ok(()), |first| ask(first))?;
        for (number, group) in groups.iter().enumerate() {
            // The next group is on its way while this one is read.
            groups.get(number + 1).map_or(Ok(()), |next| ask(next))?;
            for &place in *group {
                let range = &ranges[place];
                look(place, self.map[range.start as usize..range.end as usize].into());
            }
        }
        Ok(())
    }
}
