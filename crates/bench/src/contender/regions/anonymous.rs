//! Memory that is never made durable: the cost of the computation alone.

use anyhow::Result;

use super::{Home, Region, Written};
use crate::raw::Map;

struct Anonymous {
    map: Map,
}

/// Allocates regions.
pub fn create(_: &Home, lens_bytes: &[usize]) -> Result<Vec<Box<dyn Region>>> {
    let allocate = |&len_bytes: &usize| -> Result<Box<dyn Region>> {
        Ok(Box::new(Anonymous { map: Map::anonymous(len_bytes)? }))
    };
    lens_bytes.iter().map(allocate).collect()
}

impl Region for Anonymous {
    fn base(&self) -> *mut u8 {
        self.map.base()
    }

    fn len_bytes(&self) -> usize {
        self.map.len_bytes()
    }

    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    fn sync_counted(&mut self) -> Result<Written> {
        Ok(Written::default())
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
