//! Bytes of files: `READ`, `WRITE`, `FSYNC`, `FALLOCATE`, `COPY_FILE_RANGE`.
//!
//! `LSEEK` is refused, which makes the kernel take all of a file for data: the pool knows nothing of the
//! pages that wait in the kernel's cache, and the kernel does not send them before it asks. A program
//! that copies what `SEEK_DATA` finds would leave them out.

use std::ops::Range;

use aquifer_fs::node::{Node, SetAttributes};
use aquifer_fs::{At, FallocateMode, File, Privileges, Synced, WriteHow};

use super::{Errno, PoolFs, Result, caller};
use crate::answer::Answer;
use crate::team::Worker;
use crate::wire::{
    AllocateIn, CopyIn, OpenOut, Operation, ReadIn, Request, Unique, WriteIn, WriteOut, allocate,
    init, open, write,
};

/// A read or a copy this long may wait for the media, and takes long enough that another thread is
/// worth waking.
const LONG_BYTES: usize = 128 << 10;

/// The most that one request copies, so that it can be interrupted.
const MOST_COPIED_BYTES: u64 = 256 << 20;

/// Whether pages of the kernel are written.
fn is_from_cache(write: &WriteIn) -> bool {
    write.write_flags & write::CACHE != 0
}

/// Whether it is written at the end of the file.
fn is_append(write: &WriteIn) -> bool {
    write.flags & libc::O_APPEND as u32 != 0 && !is_from_cache(write)
}

/// The privileges that a write takes: capabilities of any client's, unless the kernel has taken them
/// before and writes pages now, possibly of a file that was given capabilities since.
fn privileges(write: &WriteIn) -> Privileges {
    if write.write_flags & write::KILL_SUIDGID != 0 {
        Privileges::LoseAll
    } else if is_from_cache(write) {
        Privileges::Keep
    } else {
        Privileges::LoseCapabilities
    }
}

impl PoolFs {
    pub(super) fn open(&self, request: &Request<'_>) -> Result<OpenOut> {
        self.without_opening(init::NO_OPEN_SUPPORT)?;
        self.opened_file(request.unique, self.node(request.node)?)
    }

    /// What a client gets that opens a file. Alone, the kernel keeps what it has cached. Shared, it
    /// caches nothing, and the file stays until it is forgotten, whatever others remove.
    pub(super) fn opened_file(&self, unique: Unique, node: Node) -> Result<OpenOut> {
        if !self.options.is_shared() {
            return Ok(OpenOut { fh: 0, open_flags: open::KEEP_CACHE, backing_id: 0 });
        }
        debug_assert!(self.table.knows(node), "the last FORGET would take what is opened");
        self.orphans.open(&self.table, &self.nodes, node).inspect_err(|_| {
            self.table.closed(node.number);
        })?;
        // The same if the request comes again, and never that of another one.
        let fh = unique.key();
        let open_flags = open::DIRECT_IO | open::PARALLEL_DIRECT_WRITES;
        Ok(OpenOut { fh, open_flags, backing_id: 0 })
    }

    pub(super) fn file(&self, node: Node) -> Result<File> {
        self.handles.get(node, || Ok(self.nodes.open_any(node)?))
    }

    pub(super) fn read<'o>(
        &self,
        node: u64,
        read: &ReadIn,
        out: &'o mut [u8],
        worker: &Worker<'_>,
    ) -> Result<&'o [u8]> {
        let node = self.node(node)?;
        let is_mapped = self.note_mapping(node, read);
        let file = self.file(node)?;
        let len = out.len().min(read.size as usize);
        let out = &mut out[..len];
        let got = if len < LONG_BYTES {
            file.read_at(out, read.offset)?
        } else {
            worker.blocking(|| file.read_at(out, read.offset))?
        };
        if is_mapped {
            self.note_mapped(node, read, got);
        }
        Ok(&out[..got])
    }

    pub(super) fn write(
        &self,
        request: &Request<'_>,
        write: &WriteIn,
        data: &[u8],
        worker: &Worker<'_>,
    ) -> Result<WriteOut> {
        let node = self.node(request.node)?;
        let file = self.file(node)?;
        let how = WriteHow { keeps_times: self.kernel_has_times(), privileges: privileges(write) };
        let at = if self.options.is_shared() && is_append(write) {
            At::End
        } else {
            // Also right for a client that appends: the kernel alone changes the length, and holds the
            // inode's lock.
            At::Offset(write.offset)
        };
        let size = data.len() as u32;
        if self.options.is_shared() && is_from_cache(write) {
            for part in self.stored_parts(node, write.offset, data) {
                let bytes = &data[(part.start - write.offset) as usize..];
                let bytes = &bytes[..(part.end - part.start) as usize];
                // Others may have cut the file off, which a page does not undo.
                file.write_with(bytes, At::Inside(part.start), how).all()?;
            }
            return Ok(WriteOut { size, padding: 0 });
        }
        let written = file.write_with(data, at, how);
        // A client writes the rest in another call. The kernel does not, and takes its page as written.
        let written = if is_from_cache(write) { written.all()? } else { written.part()? };
        let size = (written.end - written.start) as u32;
        self.sync_written(&file, write, written, worker)?;
        Ok(WriteOut { size, padding: 0 })
    }

    /// Makes durable what was written by a client that wants it (`O_SYNC`, `O_DSYNC`, `RWF_DSYNC`). With
    /// a cache the kernel asks for it itself.
    pub(super) fn sync_written(
        &self,
        file: &File,
        write: &WriteIn,
        written: Range<u64>,
        worker: &Worker<'_>,
    ) -> Result<()> {
        let has = |flag: i32| write.flags & flag as u32 == flag as u32;
        if self.options.is_shared() && has(libc::O_DSYNC) && !is_from_cache(write) {
            let what = if has(libc::O_SYNC) { Synced::All } else { Synced::Data };
            worker.blocking(|| file.sync_range(written, what))?;
        }
        Ok(())
    }

    /// Whether the times of content are the kernel's: it sets them before it sends a change, and sends
    /// them later if they are others than before. It never asks for the pool's, which must not be
    /// later.
    pub(super) fn kernel_has_times(&self) -> bool {
        self.agreed.has(init::WRITEBACK_CACHE)
    }

    /// Has the media begin to write what was just written, where it is likely to be synced. Before the
    /// answer: the sync cannot end before the media have.
    pub(super) fn begin_sync(&self, node: u64, write: &WriteIn) {
        let len_bytes = u64::from(write.size);
        if let Ok(node) = self.node(node)
            && self.handles.begins_early(node.number, len_bytes)
            && let Ok(file) = self.file(node)
        {
            file.begin_sync(write.offset..write.offset.saturating_add(len_bytes));
        }
    }

    /// Takes the set-user-ID and set-group-ID bits of a file whose content a request changes, before it
    /// does: a program never runs as its owner with other bytes.
    pub(super) fn clear_set_id(&self, request: &Request<'_>, answer: &Answer<'_>) -> Result<()> {
        let id = match request.operation {
            Operation::Write(ref write, _) if write.write_flags & write::KILL_SUIDGID != 0 => {
                request.node
            }
            // With these the kernel does not ask for it, nor say whether the caller may keep them.
            Operation::Allocate(_) if request.uid != 0 => request.node,
            Operation::CopyRange { ref range, .. } if request.uid != 0 => range.to,
            _ => return Ok(()),
        };
        let node = self.node(id)?;
        if self.nodes.metadata(node)?.mode() & (libc::S_ISUID | libc::S_ISGID) != 0 {
            // The kernel has found that this caller may not keep them; but not in which groups it
            // is, besides its own.
            let by = caller(request).may_set_id(false);
            self.nodes.set(node, &SetAttributes::new().clear_set_id(), &by)?;
            // It would run the program by the mode that it has cached.
            answer.attributes_changed(id);
        }
        Ok(())
    }

    pub(super) fn sync(&self, node: u64, data_only: bool, worker: &Worker<'_>) -> Result<()> {
        let node = self.node(node)?;
        let file = self.file(node)?;
        let what = if data_only { Synced::Data } else { Synced::All };
        worker.blocking(|| file.sync_range(.., what))?;
        self.handles.note_synced(node.number);
        Ok(())
    }

    pub(super) fn sync_directory(&self, worker: &Worker<'_>) -> Result<()> {
        // A change of names is durable with the log.
        Ok(worker.blocking(|| self.files.pool().sync()).map_err(aquifer_fs::FsError::from)?)
    }

    /// Copies inside the pool; the kernel asks again for what is left.
    pub(super) fn copy(&self, from: u64, copy: &CopyIn, worker: &Worker<'_>) -> Result<u64> {
        if copy.flags != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let (from, to) = (self.file(self.node(from)?)?, self.file(self.node(copy.to)?)?);
        let end = copy.offset_in.saturating_add(copy.len.min(MOST_COPIED_BYTES));
        // Programs ask for more than there is.
        let range = copy.offset_in..end.min(from.metadata()?.len()).max(copy.offset_in);
        let is_short = range.end - range.start < LONG_BYTES as u64;
        let how = WriteHow { keeps_times: self.kernel_has_times(), ..WriteHow::default() };
        let copied = || from.copy_range_with(range, &to, copy.offset_out, how).part();
        let copied = if is_short { copied()? } else { worker.blocking(copied)? };
        Ok(copied.end - copied.start)
    }

    pub(super) fn allocate(
        &self,
        request: &Request<'_>,
        range: &AllocateIn,
        worker: &Worker<'_>,
    ) -> Result<()> {
        const PUNCH: u32 = allocate::PUNCH_HOLE | allocate::KEEP_SIZE;
        const ZERO_KEEP: u32 = allocate::ZERO_RANGE | allocate::KEEP_SIZE;
        let mode = match range.mode {
            0 => FallocateMode::Extend,
            allocate::KEEP_SIZE => FallocateMode::KeepSize,
            PUNCH => FallocateMode::PunchHole,
            allocate::ZERO_RANGE => FallocateMode::ZeroRange,
            ZERO_KEEP => FallocateMode::ZeroKeepSize,
            _ => return Err(Errno(libc::EOPNOTSUPP)),
        };
        let node = self.node(request.node)?;
        let file = self.file(node)?;
        let how = WriteHow { keeps_times: self.kernel_has_times(), ..WriteHow::default() };
        worker.blocking(|| file.allocate_with(mode, range.offset, range.len, how))?;
        Ok(())
    }
}
