//! Commits: pages of objects that become durable together.
//!
//! A commit is first *captured* (its pages are copied into a buffer and get their place in the log)
//! and then *finished* (written, made durable, acknowledged in order). In between the pages may
//! change again, so the caller can continue while the media are busy.

use std::any::Any;
use std::sync::Arc;

use crate::error::{PoolError, Result};
use crate::format::PAGE_BYTES;
use crate::format::patch::Patches;
use crate::format::record::RecordBuilder;
use crate::log::append::Append;
use crate::log::buffers::CommitBuffer;
use crate::log::locks::Log;
use crate::media::ByteRange;
use crate::point;

/// Pages of one inode that are committed.
#[derive(Debug, Clone, Copy)]
pub struct CommitPages {
    /// The inode.
    pub inode: u64,
    /// Their place on media.
    pub target: ByteRange,
}

/// Changed bytes of pages of one inode: relative to its last commit, or to the pages at their place
/// if all its commits are applied.
#[derive(Debug, Clone, Copy)]
pub struct CommitPatches<'a> {
    /// The inode.
    pub inode: u64,
    /// The place on media of the pages that the patches refer to.
    pub target: ByteRange,
    /// The bytes.
    pub patches: &'a Patches,
}

/// Pages of one inode that were written to another place on media, and flushed, before the commit.
#[derive(Debug, Clone, Copy)]
pub struct CommitCopied {
    /// The inode.
    pub inode: u64,
    /// Their place on media.
    pub target: ByteRange,
    /// The current offset on media.
    pub source_offset_bytes: u64,
    /// The checksum of their bytes ([`crate::format::checksum`]).
    pub checksum: u64,
}

impl CommitCopied {
    fn source(&self) -> ByteRange {
        ByteRange { offset_bytes: self.source_offset_bytes, ..self.target }
    }
}

/// The content of a commit. No page may occur twice.
#[derive(Debug, Clone, Copy, Default)]
pub struct CommitContent<'a> {
    /// Whole pages.
    pub pages: &'a [CommitPages],
    /// Bytes of pages.
    pub patches: &'a [CommitPatches<'a>],
    /// Pages that were written elsewhere on media.
    pub copied: &'a [CommitCopied],
}

impl CommitContent<'_> {
    /// All ranges that must be data of the pool, with their inodes.
    fn ranges(&self) -> impl Iterator<Item = (u64, ByteRange)> {
        let pages = self.pages.iter().map(|pages| (pages.inode, pages.target));
        let patched = self.patches.iter().map(|part| (part.inode, part.target));
        let targets = self.copied.iter().map(|from| (from.inode, from.target));
        let sources = self.copied.iter().map(|from| (from.inode, from.source()));
        pages.chain(patched).chain(targets).chain(sources)
    }
}

fn bad_range(inode: u64, range: ByteRange) -> PoolError {
    PoolError::Parameter {
        what: "a range of a commit",
        value: format!("{range:?} of inode {inode}"),
        reason: "whole pages of data of an inode can be committed, and patches inside of them",
    }
}

/// A captured commit. Dropping it without [`Commit::finish`] still writes it, because later commits
/// may contain only the changes since this one; errors are then not reported.
pub struct Commit {
    log: Arc<Log>,
    append: Append,
    filler: Option<Append>,
    buffer: Option<CommitBuffer>,
    /// Keeps the pool open: the next opener would use the place in the log for another record.
    pub(crate) keeps_open: Option<Arc<dyn Any + Send + Sync>>,
}

impl Log {
    /// Rejects a range that recovery would reject: the log would end there for all processes.
    fn check_commit_range(&self, inode: u64, range: ByteRange) -> Result<()> {
        let data = self.handle.layout.data();
        let is_whole = range.offset_bytes.is_multiple_of(PAGE_BYTES)
            && range.len_bytes.is_multiple_of(PAGE_BYTES)
            && range.len_bytes > 0;
        if is_whole && data.intersection(range) == range && inode < self.handle.layout.slots() {
            return Ok(());
        }
        Err(bad_range(inode, range))
    }

    /// The most bytes of pages that a commit should carry in the log: a quarter of it.
    pub fn max_commit_bytes(&self) -> u64 {
        self.handle.layout.log().len_bytes / 4
    }
}

impl Log {
    /// Captures a commit: `fill` copies the pages, in order, into the memory it is given. If the
    /// log is full, `make_room` frees so many bytes of it.
    pub fn capture(
        self: &Arc<Log>,
        content: &CommitContent<'_>,
        fill: impl FnOnce(&mut [u8]),
        make_room: impl Fn(u64) -> Result<()>,
    ) -> Result<Commit> {
        self.handle.check_may_change()?;
        for (inode, range) in content.ranges() {
            self.check_commit_range(inode, range)?;
        }
        let mut builder = RecordBuilder::new();
        content.pages.iter().for_each(|pages| builder.pages(pages.inode, pages.target));
        for part in content.patches {
            if part.patches.page_count() * PAGE_BYTES > part.target.len_bytes {
                return Err(bad_range(part.inode, part.target));
            }
            builder.patches(part.inode, part.target, part.patches.len_bytes());
        }
        for from in content.copied {
            builder.copied(from.inode, from.target, from.source_offset_bytes, from.checksum);
        }
        let len_bytes = builder.len_bytes();
        let log_bytes = self.handle.layout.log().len_bytes;
        if len_bytes > log_bytes / 2 {
            return Err(PoolError::TooLargeForLog { len_bytes, log_bytes });
        }
        let mut buffer = self.buffers.take(len_bytes as usize);
        fill(builder.page_part(buffer.bytes_mut()));
        let mut rest = builder.small_part(buffer.bytes_mut());
        for part in content.patches {
            rest.split_off_mut(..part.patches.as_bytes().len())
                .expect("as long as was announced")
                .copy_from_slice(part.patches.as_bytes());
        }
        let body_checksum = builder.finish_body(buffer.bytes_mut());
        let (append, filler) = loop {
            let locked = self.lock()?;
            locked.control().check_not_failed()?;
            if let Some(space) = locked.reserve(len_bytes, false)? {
                break space;
            }
            drop(locked);
            make_room(len_bytes)?;
        };
        point::pass("capture-reserved");
        let identity = self.handle.identity();
        let acknowledged_lsn = append.acknowledged_lsn;
        builder.seal(buffer.bytes_mut(), body_checksum, append.lsn, acknowledged_lsn, identity);
        Ok(Commit { log: self.clone(), append, filler, buffer: Some(buffer), keeps_open: None })
    }
}

impl Commit {
    /// The position in the log behind the commit, which is durable when the log is durable up to
    /// there.
    pub fn end_lsn(&self) -> u64 {
        self.append.end_lsn
    }

    /// Makes the commit durable, and returns when everything before it is durable as well.
    ///
    /// # Errors
    /// After an error the commit is there in full or not at all, and nothing behind it will be
    /// acknowledged.
    pub fn finish(mut self) -> Result<()> {
        self.write()?;
        self.log.wait_durable(self.append.end_lsn)
    }

    fn write(&mut self) -> Result<()> {
        let buffer = self.buffer.take().expect("written once");
        let mut filled = Ok(());
        if let Some(mut filler) = self.filler.take() {
            filled = self.log.write_filler(&mut filler);
            point::pass("finish-filler");
        }
        if filled.is_err() {
            // Unless the pool has failed, another waiter completes the filler, and later captures
            // of this process count; they may contain only the changes since this record.
            self.log.control().check_not_failed()?;
        }
        let written = self.log.write_append(&mut self.append, buffer.bytes());
        self.log.buffers.keep(buffer);
        filled.and(written)
    }
}

impl Drop for Commit {
    fn drop(&mut self) {
        // In a forked child it belongs to the parent.
        if self.buffer.is_some() && self.log.handle.members.process.is_current() {
            // If this fails, the pool is read-only, and nothing behind the commit counts.
            let _ = self.write();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::pool::Pool;

    /// A commit that could not take the lock after it had written its filler continues, and so do
    /// later commits.
    #[test]
    fn a_commit_with_a_deferred_filler_leaves_no_hole() {
        const PAGES: u64 = 2;
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let stall_timeout = Duration::from_millis(50);
        let options = Pool::options()
            .log_bytes(64 << 10)
            .exclusive(true)
            .background(false)
            .stall_timeout(stall_timeout);
        let pool = options.create(directory.path().join("pool"), 4 << 20).unwrap();
        let data = pool.layout().data().offset_bytes;
        let target = |index: u64| ByteRange {
            offset_bytes: data + index * PAGES * PAGE_BYTES,
            len_bytes: PAGES * PAGE_BYTES,
        };
        let capture = |index, value: u8| {
            let pages = [CommitPages { inode: 1, target: target(index) }];
            let content = CommitContent { pages: &pages, ..CommitContent::default() };
            // SAFETY: no object of the pool is attached.
            unsafe { pool.capture(&content, |bytes| bytes.fill(value)) }.unwrap()
        };
        // Records of three pages do not fill the ring.
        let first = loop {
            pool.checkpoint().unwrap();
            let commit = capture(0, 1);
            if commit.filler.is_some() {
                break commit;
            }
            commit.finish().unwrap();
        };
        let second = capture(1, 2);
        let log = first.log.clone();
        let locked = log.lock().unwrap();
        let stalled = std::thread::scope(|scope| scope.spawn(|| first.finish()).join().unwrap());
        assert!(matches!(stalled, Err(PoolError::Stalled { .. })), "{stalled:?}");
        drop(locked);
        let third = capture(2, 3);
        let end_lsn = third.end_lsn();
        second.finish().unwrap();
        third.finish().unwrap();
        pool.apply_through(end_lsn).unwrap();
        for index in 0..3 {
            let mut bytes = [0; PAGE_BYTES as usize];
            pool.media().read_at(target(index).offset_bytes, &mut bytes).unwrap();
            assert!(bytes == [index as u8 + 1; PAGE_BYTES as usize], "commit {index}");
        }
    }
}
