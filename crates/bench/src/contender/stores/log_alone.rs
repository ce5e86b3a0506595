//! The lower bound of a durable commit: its pages appended to a preallocated log, and one device
//! flush.
//!
//! Not a contender but a reference. There is no index, no checkpoint and no recovery: the cells are
//! kept in memory and written to their file when the store is closed, and the log is overwritten
//! from its start once full.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};

use super::{CellStore, DeviceStore, See, memory};
use crate::cells::{CellArray, PAGE_RECORDS, Transaction};
use crate::raw::{Map, PAGE_BYTES};

const LOG_BYTES: u64 = 64 << 20;

/// Cells in memory, and a log.
pub struct LogAlone {
    map: Map,
    array: CellArray,
    cells: File,
    log: File,
    end_bytes: u64,
    record: Vec<u8>,
}

impl DeviceStore for LogAlone {
    fn create(directory: &Path, array: &CellArray) -> Result<Self> {
        let new = |name: &str, len_bytes: u64| -> Result<File> {
            let path = directory.join(name);
            let file = File::create_new(&path)?;
            let zeroes = vec![0; 1 << 20];
            let write = |at| file.write_all_at(&zeroes, at);
            (0..len_bytes)
                .step_by(zeroes.len())
                .try_for_each(write)
                .with_context(|| format!("cannot write {}", path.display()))?;
            file.sync_all()?;
            Ok(OpenOptions::new().read(true).write(true).open(&path)?)
        };
        let map = Map::anonymous(array.len_bytes())?;
        // SAFETY: the mapping is as long as the array, writable, and not yet shared.
        unsafe { memory::fill(map.base(), array) };
        let cells = new("cells", array.len_bytes() as u64)?;
        let log = new("log", LOG_BYTES)?;
        let store = Self { map, array: *array, cells, log, end_bytes: 0, record: Vec::new() };
        store.write_cells()?;
        Ok(store)
    }

    fn open(directory: &Path, array: &CellArray) -> Result<Self> {
        let open =
            |name: &str| OpenOptions::new().read(true).write(true).open(directory.join(name));
        let (cells, log) = (open("cells")?, open("log")?);
        let map = Map::anonymous(array.len_bytes())?;
        // SAFETY: a fresh private mapping of that length, not yet shared.
        let bytes = unsafe { std::slice::from_raw_parts_mut(map.base(), array.len_bytes()) };
        cells.read_exact_at(bytes, 0)?;
        Ok(Self { map, array: *array, cells, log, end_bytes: 0, record: Vec::new() })
    }
}

impl LogAlone {
    fn bytes(&self) -> &[u8] {
        // SAFETY: this store's private mapping, modified only through `&mut self`.
        unsafe { std::slice::from_raw_parts(self.map.base(), self.map.len_bytes()) }
    }

    fn write_cells(&self) -> Result<()> {
        self.cells.write_all_at(self.bytes(), 0)?;
        Ok(self.cells.sync_all()?)
    }
}

impl CellStore for LogAlone {
    fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        let mut record = std::mem::take(&mut self.record);
        // A header of one sector.
        record.resize(512, 0);
        for (number, stores) in transaction.records() {
            for store in stores {
                // SAFETY: transactions name cells of this array, which the mapping holds.
                unsafe { memory::put(self.map.base(), store) };
            }
            let page = number as usize / PAGE_RECORDS * PAGE_BYTES;
            record.extend_from_slice(&self.bytes()[page..page + PAGE_BYTES]);
        }
        if self.end_bytes + record.len() as u64 > LOG_BYTES {
            self.end_bytes = 0;
        }
        self.log.write_all_at(&record, self.end_bytes)?;
        self.log.sync_data()?;
        self.end_bytes += record.len() as u64;
        record.clear();
        self.record = record;
        Ok(())
    }

    fn scan(&mut self, see: &mut See<'_>) -> Result<()> {
        // SAFETY: the mapping is as long as the array and readable.
        unsafe { memory::scan(self.map.base(), &self.array, see) }
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.write_cells()
    }
}
