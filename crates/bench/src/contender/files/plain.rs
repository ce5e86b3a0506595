//! Ordinary files without Aquifer: mapped or read.

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use memchr::memmem::Finder;

use super::{Files, Mapped, Maps, Requests, Stored, WholeFile};
use crate::job::Unavailable;
use crate::raw::{Advice, AlignedBuffer, Map, PAGE_BYTES, WillNeed, open_at};

pub(super) fn open(path: &Path) -> Result<File> {
    File::open(path).with_context(|| format!("cannot open {}", path.display()))
}

pub(super) fn length(file: &File) -> Result<usize> {
    Ok(usize::try_from(file.metadata()?.len())?)
}

fn map(file: &File, len_bytes: usize, populate: bool) -> Result<Map> {
    let map = if populate {
        Map::populated(file, len_bytes, false)
    } else {
        Map::file(file, len_bytes, false)
    };
    Ok(map?)
}

fn slice(map: &Map) -> &[u8] {
    // SAFETY: the whole mapping, readable while `map` lives; the bench's files are neither modified
    // nor truncated while they are read.
    unsafe { std::slice::from_raw_parts(map.base(), map.len_bytes()) }
}

/// Each file is mapped and unmapped again.
#[derive(Debug, Clone, Copy)]
pub struct MappedFiles {
    /// Whether to use `MAP_POPULATE`.
    pub populate: bool,
}

impl Files for MappedFiles {
    type Lane<'a> = Self;

    fn lane(&self) -> Result<Self> {
        Ok(*self)
    }
}

impl WholeFile for MappedFiles {
    fn opened<R>(
        &mut self,
        file: &File,
        len_bytes: usize,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        if len_bytes == 0 {
            // The kernel rejects empty mappings.
            return Ok(look(&[]));
        }
        let map = map(file, len_bytes, self.populate)?;
        Ok(look(slice(&map)))
    }
}

/// Each file is read into the same buffer, which stays warm.
#[derive(Debug, Clone, Copy)]
pub struct ReadFiles;

impl Files for ReadFiles {
    type Lane<'a> = ReadLane;

    fn lane(&self) -> Result<ReadLane> {
        Ok(ReadLane { buffer: AlignedBuffer::new(PAGE_BYTES) })
    }
}

/// A thread's buffer.
#[derive(Debug)]
pub struct ReadLane {
    buffer: AlignedBuffer,
}

impl WholeFile for ReadLane {
    fn opened<R>(
        &mut self,
        file: &File,
        len_bytes: usize,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        if self.buffer.bytes().len() < len_bytes {
            self.buffer = AlignedBuffer::new(len_bytes.next_multiple_of(PAGE_BYTES));
        }
        let bytes = &mut self.buffer.bytes_mut()[..len_bytes];
        file.read_exact_at(bytes, 0)?;
        Ok(look(bytes))
    }
}

/// Reads a file piece by piece, without querying its length: the fastest loop for small files.
#[derive(Debug)]
pub struct ReadLoop {
    buffer: AlignedBuffer,
}

/// Fits in the second-level cache together with the search's own data.
const LOOP_BYTES: usize = 64 << 10;

impl ReadLoop {
    /// A loop with its own buffer.
    pub fn new() -> Self {
        Self { buffer: AlignedBuffer::new(LOOP_BYTES) }
    }

    /// Counts the matches of `finder` in the file of that name in that directory.
    pub fn count(&mut self, directory: &OwnedFd, name: &CStr, finder: &Finder<'_>) -> Result<u64> {
        let mut file = open_at(directory, name)
            .with_context(|| format!("cannot open {}", name.to_string_lossy()))?;
        let overlap_bytes = finder.needle().len() - 1;
        let buffer = self.buffer.bytes_mut();
        let (mut kept, mut found) = (0, 0);
        loop {
            let room_bytes = buffer.len() - kept;
            let read_bytes = file.read(&mut buffer[kept..])?;
            let end = kept + read_bytes;
            found += finder.find_iter(&buffer[..end]).count() as u64;
            // For a regular file, a short read means the end.
            if read_bytes < room_bytes {
                return Ok(found);
            }
            // Keep the start of a match that continues in the next piece. It is too short to
            // contain a match, so none is counted twice.
            kept = overlap_bytes;
            buffer.copy_within(end - kept..end, 0);
        }
    }
}

/// The forms of mmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Without advice.
    Plain,
    /// Populated when it is mapped.
    Populate,
    /// `MADV_RANDOM`.
    Random,
    /// `MADV_SEQUENTIAL`.
    Sequential,
    /// `MADV_WILLNEED` for what will be read.
    WillNeed,
    /// `MADV_RANDOM`, with vectored `MADV_WILLNEED` for the reads after the next ones.
    WillNeedAhead,
}

/// Maps files in one of these forms.
#[derive(Debug, Clone, Copy)]
pub struct PlainMaps(pub Form);

impl Maps for PlainMaps {
    type Map = PlainMap;

    fn requests(&self) -> Requests {
        match self.0 {
            Form::Plain | Form::Random => Requests::Never,
            Form::WillNeed => Requests::AllAtOnce,
            Form::Populate | Form::Sequential | Form::WillNeedAhead => Requests::OneBatchAhead,
        }
    }

    fn map(&self, file: &File, len_bytes: usize) -> Result<PlainMap> {
        let form = self.0;
        let map = map(file, len_bytes, form == Form::Populate)?;
        match form {
            Form::Sequential => map.advise(Advice::Sequential)?,
            Form::Random | Form::WillNeedAhead => map.advise(Advice::Random)?,
            Form::Plain | Form::Populate | Form::WillNeed => {}
        }
        let unavailable =
            |error| Unavailable(format!("vectored WILLNEED is refused here: {error}"));
        let will_need = match form {
            Form::WillNeedAhead => Some(WillNeed::new().map_err(unavailable)?),
            _ => None,
        };
        if let Some(will_need) = &will_need {
            // One real range tells whether this kernel has the vectored call.
            will_need.advise(&[range(&map, 0)]).map_err(unavailable)?;
        }
        Ok(PlainMap { map, form, will_need })
    }
}

fn range(map: &Map, page: u64) -> libc::iovec {
    let base = map.base().wrapping_add(page as usize * PAGE_BYTES);
    libc::iovec { iov_base: base.cast(), iov_len: PAGE_BYTES }
}

/// A mapped file.
#[derive(Debug)]
pub struct PlainMap {
    map: Map,
    form: Form,
    will_need: Option<WillNeed>,
}

impl Mapped for PlainMap {
    type Pending = ();

    fn look<R>(&self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        Ok(look(slice(&self.map)))
    }

    fn announce(&self, range: Range<usize>) -> Result<()> {
        if self.form == Form::WillNeed {
            self.map.will_need(range.start, range.len())?;
        }
        Ok(())
    }

    fn ask_for(&self, pages: &[u64]) -> Result<()> {
        if let Some(will_need) = &self.will_need {
            let ranges: Vec<_> = pages.iter().map(|&page| range(&self.map, page)).collect();
            return Ok(will_need.advise(&ranges)?);
        }
        if self.form == Form::WillNeed {
            // Individually requested pages need no read-around.
            self.map.advise(Advice::Random)?;
            for &page in pages {
                self.map.will_need(page as usize * PAGE_BYTES, PAGE_BYTES)?;
            }
        }
        Ok(())
    }
}

/// A shared mapping, made durable by `msync`.
#[derive(Debug)]
pub struct SharedMap {
    map: Map,
}

impl SharedMap {
    /// Maps the first `len_bytes` of the file.
    pub fn open(path: &Path, len_bytes: usize) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { map: Map::file(&file, len_bytes, true)? })
    }
}

impl Stored for SharedMap {
    fn base(&mut self) -> Result<*mut u8> {
        Ok(self.map.base())
    }

    fn flush(&mut self) -> Result<Option<u64>> {
        self.map.sync()?;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::open_directory;

    #[test]
    fn the_loop_finds_what_lies_across_its_pieces() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let opened = open_directory(directory.path()).unwrap();
        let finder = Finder::new("needle");
        let mut reader = ReadLoop::new();
        for len_bytes in [0, 5, 100, LOOP_BYTES - 1, LOOP_BYTES, LOOP_BYTES + 1, 200_000] {
            for start in [0, LOOP_BYTES - 7, LOOP_BYTES - 6, LOOP_BYTES - 3, LOOP_BYTES, 131_064] {
                let mut content = vec![b'e'; len_bytes];
                if let Some(place) = content.get_mut(start..start + 6) {
                    place.copy_from_slice(b"needle");
                }
                let expected = finder.find_iter(&content).count() as u64;
                std::fs::write(directory.path().join("file"), content).unwrap();
                let found = reader.count(&opened, c"file", &finder).unwrap();
                assert_eq!(found, expected, "{start} of {len_bytes}");
            }
        }
    }
}
