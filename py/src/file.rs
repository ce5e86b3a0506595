//! Open files of a pool. `aquifer.FileIO` (`_files.py`) makes a raw file of Python's module `io` of it.

use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::sync::{Arc, PoisonError, RwLock};

use aquifer::File as PoolFile;
use aquifer::FsError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffer::Memory;
use crate::error::{Failure, Result};
use crate::pool::Process;

/// An open file, with its position.
#[pyclass(module = "aquifer._native", frozen)]
pub(crate) struct File {
    process: Process,
    file: RwLock<Option<Arc<PoolFile>>>,
}

impl File {
    pub fn new(file: PoolFile) -> File {
        File { process: Process::new(), file: RwLock::new(Some(Arc::new(file))) }
    }

    fn file(&self) -> Result<Arc<PoolFile>> {
        self.process.check()?;
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
        let closed = || PyValueError::new_err("I/O operation on closed file");
        Ok(file.clone().ok_or_else(closed)?)
    }
}

/// Unwraps the error that `std::io` hides: it has the path, and its number.
fn io_error(error: std::io::Error) -> Failure {
    match error.downcast::<FsError>() {
        Ok(error) => error.into(),
        Err(error) => error.into(),
    }
}

/// An offset or a length, as lseek(2) and pread(2) take it.
fn not_negative(number: i64) -> Result<u64> {
    u64::try_from(number).map_err(|_| std::io::Error::from_raw_os_error(libc::EINVAL).into())
}

/// Reads until the bytes are full or the file ends.
fn fill(file: &PoolFile, mut bytes: &mut [u8], mut at: Option<u64>) -> Result<usize> {
    let len = bytes.len();
    while !bytes.is_empty() {
        let count = match at.as_mut() {
            Some(at) => {
                let count = file.read_at(bytes, *at)?;
                *at += count as u64;
                count
            }
            None => (&mut &*file).read(bytes).map_err(io_error)?,
        };
        if count == 0 {
            break;
        }
        bytes = &mut bytes[count..];
    }
    Ok(len - bytes.len())
}

/// Reads up to `len` bytes into a new object.
fn read_bytes(py: Python<'_>, file: &PoolFile, len: u64, at: Option<u64>) -> Result<Py<PyBytes>> {
    let len = usize::try_from(len).map_err(|_| PyValueError::new_err("longer than memory"))?;
    let mut count = 0;
    let bytes = PyBytes::new_with(py, len, |bytes| {
        count = py.detach(|| fill(file, bytes, at))?;
        Ok(())
    })?;
    if count < len {
        // Another process has made it shorter.
        return Ok(PyBytes::new(py, &bytes.as_bytes()[..count]).unbind());
    }
    Ok(bytes.unbind())
}

#[pymethods]
impl File {
    fn close(&self, py: Python<'_>) {
        if self.process.check().is_ok() {
            let file = self.file.write().unwrap_or_else(PoisonError::into_inner).take();
            // May free the pages of a removed file.
            py.detach(|| drop(file));
        }
    }

    /// Reads at the position into a buffer, and returns the number of bytes; 0 at the end.
    fn readinto(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> Result<usize> {
        let (file, mut memory) = (self.file()?, Memory::of_writable(buffer)?);
        let bytes = memory.bytes_mut();
        py.detach(|| (&mut &*file).read(bytes).map_err(io_error))
    }

    /// Reads from the position to the end.
    fn readall(&self, py: Python<'_>) -> Result<Py<PyBytes>> {
        let file = self.file()?;
        let (at, len) = py.detach(|| {
            let at = (&mut &*file).stream_position().map_err(io_error)?;
            Ok::<_, Failure>((at, file.metadata()?.len()))
        })?;
        read_bytes(py, &file, len.saturating_sub(at), None)
    }

    /// Reads up to `size` bytes at an offset; the position stays.
    fn pread(&self, py: Python<'_>, size: i64, offset: i64) -> Result<Py<PyBytes>> {
        let (file, size, offset) = (self.file()?, not_negative(size)?, not_negative(offset)?);
        let len = py.detach(|| Ok::<_, Failure>(file.metadata()?.len()))?;
        read_bytes(py, &file, size.min(len.saturating_sub(offset)), Some(offset))
    }

    /// As `readinto`, at an offset; the position stays.
    fn preadinto(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>, offset: i64) -> Result<usize> {
        let (file, mut memory) = (self.file()?, Memory::of_writable(buffer)?);
        let bytes = memory.bytes_mut();
        let offset = not_negative(offset)?;
        py.detach(|| fill(&file, bytes, Some(offset)))
    }

    /// Writes all bytes at the position, or at the end of a file that was opened to append.
    fn write(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> Result<usize> {
        let (file, memory) = (self.file()?, Memory::of(buffer)?);
        let bytes = memory.bytes();
        py.detach(|| (&mut &*file).write_all(bytes).map_err(io_error))?;
        Ok(bytes.len())
    }

    /// Writes all bytes at an offset; the position stays.
    fn pwrite(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>, offset: i64) -> Result<usize> {
        let (file, memory) = (self.file()?, Memory::of(buffer)?);
        let bytes = memory.bytes();
        let offset = not_negative(offset)?;
        py.detach(|| Ok::<_, Failure>(file.write_all_at(bytes, offset)?))?;
        Ok(bytes.len())
    }

    /// Replaces bytes atomically: a crash, or another process, finds all of them or none.
    fn write_atomic(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>, offset: i64) -> Result {
        let (file, memory) = (self.file()?, Memory::of(buffer)?);
        let bytes = memory.bytes();
        let offset = not_negative(offset)?;
        py.detach(|| Ok(file.write_atomic(bytes, offset)?))
    }

    fn seek(&self, offset: i64, whence: i32) -> Result<u64> {
        let to = match whence {
            libc::SEEK_SET => SeekFrom::Start(not_negative(offset)?),
            libc::SEEK_CUR => SeekFrom::Current(offset),
            libc::SEEK_END => SeekFrom::End(offset),
            _ => return Err(std::io::Error::from_raw_os_error(libc::EINVAL).into()),
        };
        (&mut &*self.file()?).seek(to).map_err(io_error)
    }

    fn truncate(&self, py: Python<'_>, size: i64) -> Result {
        let (file, size) = (self.file()?, not_negative(size)?);
        py.detach(|| Ok(file.set_len(size)?))
    }

    fn size(&self) -> Result<u64> {
        Ok(self.file()?.metadata()?.len())
    }

    /// Makes content and metadata durable; with `only_data`, not the times.
    fn sync(&self, py: Python<'_>, only_data: bool) -> Result {
        let file = self.file()?;
        py.detach(|| Ok(if only_data { file.sync_data() } else { file.sync_all() }?))
    }

    /// Locks the whole file. Without `wait`, returns whether it did. A signal whose handler raises nothing does not end the
    /// wait.
    fn lock(&self, py: Python<'_>, shared: bool, wait: bool) -> Result<bool> {
        use std::fs::TryLockError;
        let file = self.file()?;
        if wait {
            loop {
                match py.detach(|| if shared { file.lock_shared() } else { file.lock() }) {
                    Err(FsError::Interrupted) => py.check_signals()?,
                    locked => return Ok(locked.map(|()| true)?),
                }
            }
        }
        match py.detach(|| if shared { file.try_lock_shared() } else { file.try_lock() }) {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(io_error(error)),
        }
    }

    fn unlock(&self, py: Python<'_>) -> Result {
        let file = self.file()?;
        py.detach(|| Ok(file.unlock()?))
    }
}
