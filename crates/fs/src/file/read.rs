//! Reading an open file.

use super::File;
use crate::error::Result;
use crate::file_table::FileBytes;
use crate::files::Shared;
use crate::open_inodes::OpenInode;

impl File {
    /// Reads from `offset_bytes` on; how many bytes were read: fewer than asked for only at the end of the file. Holes read as
    /// zeros.
    ///
    /// # Errors
    /// [`FsError::NotOpenFor`](crate::FsError::NotOpenFor), [`FsError::IsADirectory`](crate::FsError::IsADirectory),
    /// [`FsError::Pool`](crate::FsError::Pool) if the media cannot be read.
    pub fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<usize> {
        self.check_reads()?;
        self.files().shared.read_at(self.inode(), bytes, offset_bytes)
    }

    /// [`File::read_at`] into one buffer after the other.
    ///
    /// # Errors
    /// As for [`File::read_at`].
    pub fn read_vectored_at(
        &self,
        buffers: &mut [std::io::IoSliceMut<'_>],
        offset_bytes: u64,
    ) -> Result<usize> {
        let mut done = 0;
        for buffer in buffers.iter_mut() {
            let got = self.read_at(buffer, offset_bytes.saturating_add(done as u64))?;
            done += got;
            if got < buffer.len() {
                break;
            }
        }
        Ok(done)
    }
}

impl Shared {
    pub(crate) fn read_at(
        &self,
        open: &OpenInode,
        bytes: &mut [u8],
        offset_bytes: u64,
    ) -> Result<usize> {
        loop {
            let (inode, table) = self.table(open)?;
            let left = inode.size_bytes.saturating_sub(offset_bytes);
            let len = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let range = FileBytes { offset_bytes, len_bytes: len as u64 };
            for piece in table.pieces(range) {
                let start = (piece.file.offset_bytes - offset_bytes) as usize;
                let target = &mut bytes[start..start + piece.file.len_bytes as usize];
                match piece.pool {
                    Some(place) => self.pool.load(place.offset_bytes, target)?,
                    None => target.fill(0),
                }
            }
            // The pages were the file's all the time if it has the same layout now: a change of that raises the version first.
            if self.layout_version(open)? == inode.layout_version {
                return Ok(len);
            }
        }
    }

    fn layout_version(&self, open: &OpenInode) -> Result<u64> {
        self.load_inode(open).map(|inode| inode.layout_version)
    }
}
