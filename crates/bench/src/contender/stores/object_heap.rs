//! The heap of a persistent object, which records its stores: the array is a persistent vector in it.

use anyhow::{Context, Result};
use aquifer_object::collections::PVec;
use aquifer_object::{Attachment, CreateObject, ObjectOptions, Objects};

use super::{CellStore, See};
use crate::cells::{CellArray, RECORD_CELLS, Transaction};
use crate::contender::regions::{Home, objects};

/// The object, and the program's id of its root.
const NAME: &str = "heap";
const CELLS: u64 = 1;
/// For the heap's own pages.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// An attached object.
pub struct HeapStore {
    attachment: Attachment,
    array: CellArray,
    /// Closed after the attachment.
    objects: Objects,
}

impl HeapStore {
    /// Creates the object with the initial content.
    pub fn create(home: &Home, array: &CellArray) -> Result<Self> {
        let size_bytes = array.len_bytes() as u64 + OVERHEAD_BYTES;
        let objects = objects::create_pool(home, size_bytes)?;
        CreateObject::new().heap(true).create(&objects, NAME, size_bytes)?;
        let mut store = Self::attach(objects, array)?;
        store.attachment.heap()?.enter(|scope| -> Result<()> {
            let heap = scope.heap();
            let mut cells = PVec::with_capacity_in(array.len_bytes() / 8, heap)?;
            for record in 0..array.records() {
                cells.extend_from_slice(&array.initial(record))?;
                cells.resize(array.first_cell(record + 1), 0)?;
            }
            Ok(scope.insert_root(CELLS, cells)?)
        })?;
        store.attachment.psync()?;
        Ok(store)
    }

    /// Attaches that object.
    pub fn open(home: &Home, array: &CellArray) -> Result<Self> {
        Self::attach(objects::open_pool(home)?, array)
    }

    fn attach(objects: Objects, array: &CellArray) -> Result<Self> {
        let attachment = ObjectOptions::new().record_stores(true).attach_mut(&objects, NAME)?;
        Ok(Self { attachment, array: *array, objects })
    }
}

impl CellStore for HeapStore {
    fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        let array = self.array;
        self.attachment.heap()?.enter(|scope| -> Result<()> {
            let cells = scope.root_mut::<PVec<'_, u64>>(CELLS)?;
            for store in &transaction.stores {
                cells[array.first_cell(store.record) + store.cell as usize] = store.value;
            }
            Ok(())
        })?;
        Ok(self.attachment.psync()?)
    }

    fn scan(&mut self, see: &mut See<'_>) -> Result<()> {
        let array = self.array;
        self.attachment.heap()?.enter(|scope| {
            let cells = scope.root::<PVec<'_, u64>>(CELLS)?;
            for record in 0..array.records() {
                let cells = cells[array.first_cell(record)..].first_chunk::<RECORD_CELLS>();
                see(record, cells.context("the vector is too short")?)?;
            }
            Ok(())
        })
    }

    fn settle(&mut self) -> Result<()> {
        Ok(self.objects.pool().checkpoint()?)
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(self.attachment.detach()?)
    }
}
