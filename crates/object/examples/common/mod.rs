//! Structures that the examples keep in objects. Each is a file to copy.

#![allow(dead_code, reason = "each example uses its part")]

pub mod lru_cache;
pub mod plain_list;
pub mod sorted_list;
pub mod word_index;

use std::path::Path;

use aquifer_object::{Access, Attachment, CreateObject, ObjectError, Objects};
use aquifer_pool::{CreateOptions, OpenOptions, Pool};

/// Attaches an object with a heap for writing; makes it, and the pool, if they are not there.
pub fn attach_heap(pool: &Path, name: &str) -> Result<Attachment, Box<dyn std::error::Error>> {
    let options = OpenOptions::default();
    let objects = match pool.exists() {
        true => Objects::open(pool, &options)?,
        false => Objects::new(Pool::create(pool, 64 << 20, &CreateOptions::default(), &options)?),
    };
    let how = CreateObject { heap: true, ..CreateObject::default() };
    match objects.create(name, 8 << 20, &how) {
        Ok(_) | Err(ObjectError::Exists { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(objects.attach(name, Access::Write, None)?)
}
