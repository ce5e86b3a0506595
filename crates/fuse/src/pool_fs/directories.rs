//! `READDIR` and `READDIRPLUS`.

use std::ops::ControlFlow;

use aquifer_fs::FileType;
use aquifer_fs::node::{Cookie, NodeEntry};
use zerocopy::FromZeros;

use super::{Errno, PoolFs, Result};
use crate::answer::{Answer, Delivered};
use crate::wire::{Entry, Listing, OpenOut, open};

fn kind_of(file_type: FileType) -> u8 {
    match () {
        () if file_type.is_dir() => libc::DT_DIR,
        () if file_type.is_symlink() => libc::DT_LNK,
        () if file_type.is_fifo() => libc::DT_FIFO,
        () if file_type.is_socket() => libc::DT_SOCK,
        () if file_type.is_char_device() => libc::DT_CHR,
        () if file_type.is_block_device() => libc::DT_BLK,
        () => libc::DT_REG,
    }
}

impl PoolFs {
    /// What a client gets that opens a directory: alone, the kernel keeps the names.
    pub(super) fn opened_directory(&self) -> OpenOut {
        let keeps = open::KEEP_CACHE | open::CACHE_DIR;
        let open_flags = if self.options.is_shared() { 0 } else { keeps };
        OpenOut { fh: 0, open_flags, backing_id: 0 }
    }

    pub(super) fn read_directory(
        &self,
        answer: Answer<'_>,
        out: &mut [u8],
        directory: u64,
        (offset, room): (u64, u32),
        is_plus: bool,
    ) {
        let room = out.len().min(room as usize);
        let mut listing = Listing::new(&mut out[..room], is_plus);
        let listed = self.list(&mut listing, directory, Cookie(offset));
        let delivered = match listed {
            Ok(()) => answer.bytes(listing.bytes()),
            Err(Errno(errno)) => answer.error(errno),
        };
        if listed.is_err() || delivered == Delivered::ClientGone {
            listing.nodes().for_each(|id| self.forget(id, 1));
        }
    }

    /// As many entries as fit.
    fn list(&self, listing: &mut Listing<'_>, directory: u64, after: Cookie) -> Result<()> {
        let directory = self.node(directory)?;
        let (is_plus, mut failed) = (listing.is_plus(), None);
        let each = |behind: Cookie, entries: &[NodeEntry]| {
            let len = |entry: &NodeEntry| listing.len_bytes_of(entry.name.len());
            if entries.iter().map(len).sum::<usize>() > listing.left_bytes() {
                // Entries with one position come together or not at all. Nothing would be the end.
                failed = listing.is_empty().then_some(Errno(libc::EINVAL));
                return ControlFlow::Break(());
            }
            for entry in entries {
                let Ok(plus) = self.plus(entry, is_plus) else {
                    failed = Some(Errno(libc::EUCLEAN));
                    return ControlFlow::Break(());
                };
                let kind = kind_of(entry.file_type);
                listing.push(entry.number, behind.0, kind, &entry.name, &plus);
            }
            ControlFlow::Continue(())
        };
        if is_plus {
            self.nodes.read_dir_plus(directory, after, each)?;
        } else {
            self.nodes.read_dir(directory, after, each)?;
        }
        failed.map_or(Ok(()), Err)
    }

    /// The inode that comes with an entry: none for `.` and `..`, which the kernel does not count.
    fn plus(&self, entry: &NodeEntry, is_plus: bool) -> Result<Entry> {
        match &entry.metadata {
            Some(found) if is_plus && entry.name != b"." && entry.name != b".." => {
                self.entry(None, found)
            }
            _ => Ok(Entry::new_zeroed()),
        }
    }
}
