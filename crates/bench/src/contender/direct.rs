//! Direct I/O without any cache: the device's performance for a program that reads one page at a
//! time.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::Result;

use super::{Lane, PageFile};
use crate::data::read_page;
use crate::job::{Source, Unavailable};
use crate::raw::{AlignedBuffer, PAGE_BYTES, open_direct};

/// The data file, opened with `O_DIRECT`.
#[derive(Debug)]
pub struct DirectFile {
    file: File,
}

impl DirectFile {
    /// Opens the file.
    pub fn open(source: &Source) -> Result<Self> {
        Ok(Self { file: open(&source.path, source.writable)? })
    }
}

/// Opens with `O_DIRECT`; fails with [`Unavailable`] if the file system does not support that.
pub fn open(path: &Path, writable: bool) -> Result<File> {
    match open_direct(path, writable) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            Err(Unavailable("the file system refuses O_DIRECT".to_owned()).into())
        }
        other => Ok(other?),
    }
}

impl PageFile for DirectFile {
    type Lane<'a> = DirectLane<'a>;

    fn lane(&self) -> Result<DirectLane<'_>> {
        Ok(DirectLane { file: &self.file, buffer: AlignedBuffer::new(PAGE_BYTES) })
    }

    fn flush(&self) -> Result<()> {
        Ok(self.file.sync_data()?)
    }
}

/// A thread's access: one buffer, refilled for each read.
#[derive(Debug)]
pub struct DirectLane<'a> {
    file: &'a File,
    buffer: AlignedBuffer,
}

impl Lane for DirectLane<'_> {
    fn page<R>(&mut self, page: u64, mut look: impl FnMut(*const u8) -> R) -> Result<R> {
        read_page(self.file, page, &mut self.buffer)?;
        Ok(look(self.buffer.bytes().as_ptr()))
    }

    fn store(&mut self, page: u64, offset_bytes: usize, value: u8) -> Result<()> {
        read_page(self.file, page, &mut self.buffer)?;
        self.buffer.bytes_mut()[offset_bytes] = value;
        Ok(self.file.write_all_at(self.buffer.bytes(), page * PAGE_BYTES as u64)?)
    }
}
