//! A copy of the file in anonymous memory: the cost of a hit in unmanaged memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Result, bail};

use super::mmap::no_huge_pages;
use super::{Lane, PageFile};
use crate::job::Source;
use crate::raw::{Map, PAGE_BYTES, huge_mapped_bytes};

/// Private memory with the content of the data file.
#[derive(Debug)]
pub struct Anonymous {
    map: Map,
}

impl Anonymous {
    /// Allocates and copies.
    pub fn open(source: &Source) -> Result<Self> {
        let file = File::open(&source.path)?;
        let len_bytes = usize::try_from(source.pages)? * PAGE_BYTES;
        let map = Map::anonymous(len_bytes)?;
        if source.base_pages {
            no_huge_pages(&map)?;
        }
        // SAFETY: a fresh private mapping of that length, zero-filled and not yet shared.
        let memory = unsafe { std::slice::from_raw_parts_mut(map.base(), len_bytes) };
        for (chunk, index) in memory.chunks_mut(4 << 20).zip(0_u64..) {
            file.read_exact_at(chunk, index * (4 << 20))?;
        }
        Ok(Self { map })
    }
}

impl PageFile for Anonymous {
    type Lane<'a> = AnonymousLane<'a>;

    fn lane(&self) -> Result<AnonymousLane<'_>> {
        Ok(AnonymousLane { memory: self })
    }

    fn details(&self) -> Result<BTreeMap<String, f64>> {
        let huge_bytes = huge_mapped_bytes(self.map.base(), self.map.len_bytes() as u64)? as f64;
        Ok(BTreeMap::from([("huge_mapped_bytes".to_owned(), huge_bytes)]))
    }
}

/// A thread's access to the copy.
#[derive(Debug)]
pub struct AnonymousLane<'a> {
    memory: &'a Anonymous,
}

impl Lane for AnonymousLane<'_> {
    #[inline(always)]
    fn page<R>(&mut self, page: u64, mut look: impl FnMut(*const u8) -> R) -> Result<R> {
        Ok(look(self.memory.map.base().wrapping_add(page as usize * PAGE_BYTES)))
    }

    fn store(&mut self, _page: u64, _offset_bytes: usize, _value: u8) -> Result<()> {
        bail!("anonymous memory has no file that a store could reach")
    }
}
