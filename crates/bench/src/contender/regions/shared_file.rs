//! Shared file mappings with `msync`: without an engine, and without crash consistency.
//!
//! The file is written once before it is mapped, so that no commit has to allocate blocks. `msync`
//! is called on the whole mapping: the kernel finds the dirty pages itself, writes them and flushes
//! the device once.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::{DirtyPages, Home, Region, Written};
use crate::raw::{Map, cache_state, system_page_bytes};

/// Room after the mapping for unrelated dirty pages.
const OTHER_PAGES_BYTES: usize = 4 << 20;

struct SharedFile {
    map: Map,
    file: File,
    other: Option<DirtyPages>,
}

fn path_of(home: &Home, index: usize) -> PathBuf {
    home.directory.join(format!("region-{index}"))
}

/// Creates the files.
pub fn create(home: &Home, lens_bytes: &[usize]) -> Result<Vec<Box<dyn Region>>> {
    let zeroes = vec![0; 1 << 20];
    for (index, &len_bytes) in lens_bytes.iter().enumerate() {
        let path = path_of(home, index);
        let write = || -> std::io::Result<()> {
            let file = File::create_new(&path)?;
            let all_bytes = len_bytes + OTHER_PAGES_BYTES;
            for at in (0..all_bytes).step_by(zeroes.len()) {
                let chunk = &zeroes[..zeroes.len().min(all_bytes - at)];
                file.write_all_at(chunk, at as u64)?;
            }
            file.sync_all()
        };
        write().with_context(|| format!("cannot write {}", path.display()))?;
    }
    open(home, lens_bytes)
}

/// Maps the files.
pub fn open(home: &Home, lens_bytes: &[usize]) -> Result<Vec<Box<dyn Region>>> {
    let map = |(index, &len_bytes): (usize, &usize)| -> Result<Box<dyn Region>> {
        let path = path_of(home, index);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        let map = Map::file(&file, len_bytes, true)?;
        Ok(Box::new(SharedFile { map, file, other: None }))
    };
    lens_bytes.iter().enumerate().map(map).collect()
}

impl Region for SharedFile {
    fn base(&self) -> *mut u8 {
        self.map.base()
    }

    fn len_bytes(&self) -> usize {
        self.map.len_bytes()
    }

    fn sync(&mut self) -> Result<()> {
        Ok(self.map.sync()?)
    }

    fn sync_counted(&mut self) -> Result<Written> {
        let state = cache_state(&self.file, 0, self.len_bytes() as u64)?;
        let pages = state.map_or(0, |state| state.dirty_pages);
        self.sync()?;
        Ok(Written { pages, bytes: pages * system_page_bytes() })
    }

    fn keep_dirty(&mut self, pages: usize) -> Result<()> {
        if self.other.as_ref().is_none_or(|other| other.pages() != pages) {
            let offset_bytes = self.len_bytes() as u64;
            self.other = Some(DirtyPages::new(self.file.try_clone()?, offset_bytes, pages)?);
        }
        Ok(self.other.as_ref().expect("made above").refresh()?)
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
