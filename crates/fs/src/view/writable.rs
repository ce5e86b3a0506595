//! Writable views.
//!
//! Stores go to the pages of the file at once, unordered and without logging: they are visible to
//! all processes, survive the process, and are durable after [`ViewMut::persist`], which only the
//! caller calls (DaxVM's *nosync*).
//!
//! While a writable view exists, in any process, operations that would replace the file's pages, so
//! that stores get lost or go elsewhere, fail with [`FsError::InUse`]: [`File::exchange_range`],
//! [`File::write_atomic`], [`File::write_atomic_ranges`], [`File::defragment`], and collapsing or
//! inserting a range ([`File::allocate`]). A file can be truncated under a view; then stores go to
//! pages that no file owns any more, and `persist` returns an error.

use std::ops::{Deref, Range, RangeBounds};

use aquifer_format::file_table::FileBytes;
use aquifer_pool::media::{ByteRange, WriteWindows};
use aquifer_pool::{FileLock, InodeUse, OwnedPin};

use super::{Held, Layout, Place, View, in_file, resolve, within};
use crate::error::{FsError, Result};
use crate::file::{File, Write, WriteHow};

/// A writable range of a file. Derefs to a [`View`].
///
/// Can be shared between threads; their stores to the same bytes are not ordered.
#[must_use = "the bytes are kept only as long as this lives"]
#[derive(Debug)]
pub struct ViewMut {
    file: File,
    view: View<'static>,
    _writable: OwnedPin,
}

impl File {
    /// Makes a writable view of a range of the file. Holes in the range get pages of zeros.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_new_file("/f")?;
    /// file.set_len(8192)?;
    /// let view = file.view_mut(4096..)?;
    /// view.write(0, b"text")?; // visible to all processes
    /// view.persist(0..4)?; // survives a power cut
    /// assert_eq!(files.view("/f", 4096..4100)?.read(|bytes| bytes.to_vec())?, b"text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::view`](crate::File::view) and [`File::allocate`]; [`FsError::Immutable`]. On
    /// error, some of the holes may have pages.
    pub fn view_mut(&self, range: impl RangeBounds<u64>) -> Result<ViewMut> {
        self.check_reads()?;
        self.check_writes()?;
        let (shared, open) = (&self.files().shared, self.inode());
        let lock = &shared.pool.lock_file(open.number)?;
        let (inode, table) = shared.table(open)?;
        let range = resolve(&range, inode.size_bytes)?;
        let mut write = Write { shared, lock, open, inode, table, how: WriteHow::default() };
        if write.table.pieces(range).any(|piece| piece.pool.is_none()) {
            write.allocate(range, None)?;
        }
        self.view_of_locked(lock, range)
    }

    /// Extends the file by `len_bytes` zeros, and returns them as a writable view, so that new
    /// content needs no other copy.
    ///
    /// More than 64 KiB of zeros are written only if there is no free space left that is known to
    /// be zero; shorter ranges are always written, with room for later calls.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_new_file("/f")?;
    /// file.append_view(10)?.write(0, b"some text\n")?;
    /// file.append_view(10)?.write(0, b"some more\n")?;
    /// assert_eq!(files.view("/f", ..)?.read(|bytes| bytes.to_vec())?, b"some text\nsome more\n");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::view_mut`].
    pub fn append_view(&self, len_bytes: u64) -> Result<ViewMut> {
        self.check_reads()?;
        self.check_writes()?;
        let (shared, open) = (&self.files().shared, self.inode());
        let lock = &shared.pool.lock_file(open.number)?;
        let (inode, table) = shared.table(open)?;
        let range = FileBytes { offset_bytes: inode.size_bytes, len_bytes };
        if len_bytes == 0 {
            return self.view_of_locked(lock, range);
        }
        // While the view exists, no pages are exchanged, so its stores need not settle again.
        lock.settle()?;
        let write = Write { shared, lock, open, inode, table, how: WriteHow::default() };
        // Everything that can fail comes before the change. A pin of the old layout version also
        // keeps the pages of the next one.
        let (writable, pin, place) = write.append_zeros(len_bytes, |table| {
            let writable = shared.pool.pin_inode(open.number, InodeUse::Writable)?;
            let pin = shared.pool.pin_owned(open.number, write.inode.layout_version)?;
            Ok((writable, pin, shared.place(table, range, true)?))
        })?;
        let of = Layout::of(&shared.load_inode(open)?);
        let held = Held::Owned(self.files().clone(), pin);
        let view = View { held, place, offset_bytes: range.offset_bytes, of };
        Ok(ViewMut { file: self.clone(), view, _writable: writable })
    }

    /// Makes a view of a range that has pages. The caller holds the file's lock: no other caller
    /// changes the layout, and later attempts to replace the pages see the pin.
    fn view_of_locked(&self, lock: &FileLock<'_>, range: FileBytes) -> Result<ViewMut> {
        // While the view exists, no pages are exchanged, so its stores need not settle again.
        lock.settle()?;
        let (files, open) = (self.files(), self.inode());
        let writable = files.shared.pool.pin_inode(open.number, InodeUse::Writable)?;
        let (inode, table) = files.shared.table(open)?;
        if inode.is_immutable {
            return Err(FsError::Immutable { path: self.as_path() });
        }
        let view = files.view_of(Layout::of(&inode), &table, range, true)?;
        let view = view.ok_or(FsError::LayoutChanged)?.into_owned();
        Ok(ViewMut { file: self.clone(), view, _writable: writable })
    }
}

impl Deref for ViewMut {
    type Target = View<'static>;

    fn deref(&self) -> &View<'static> {
        &self.view
    }
}

impl ViewMut {
    /// Copies bytes in, from `offset_bytes` of the view. Readers see aligned words of eight bytes
    /// whole.
    ///
    /// # Errors
    /// [`FsError::OutsideView`]; [`FsError::Pool`] if the media cannot be written.
    pub fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let range = offset_bytes..offset_bytes.saturating_add(bytes.len() as u64);
        self.view.check(&range)?;
        match &self.view.place {
            Place::Empty => Ok(()),
            Place::Linear(all) => {
                let at_bytes = within(*all, &range).offset_bytes;
                // SAFETY: the pinned writable view keeps the file from being made immutable, so it
                // has no lease.
                unsafe { self.view.pool().store(at_bytes, bytes)? };
                Ok(())
            }
            Place::Stitched { stitched, skipped_bytes, .. } => {
                let start = skipped_bytes + offset_bytes as usize;
                let mut rest = bytes;
                for (offset_bytes, len_bytes) in stitched.file_offsets(start..start + bytes.len()) {
                    let (part, behind) = rest.split_at(len_bytes as usize);
                    // SAFETY: as for `Place::Linear`: the file has no lease.
                    unsafe { self.view.pool().store(offset_bytes, part)? };
                    rest = behind;
                }
                Ok(())
            }
            Place::Scattered { table, range: all } => {
                let mut rest = bytes;
                for piece in table.pieces(in_file(*all, &range)) {
                    let (part, behind) = rest.split_at(piece.file.len_bytes as usize);
                    // A writable view has no holes.
                    let place = piece.pool.ok_or(FsError::LayoutChanged)?;
                    // SAFETY: as for `Place::Linear`: the file has no lease.
                    unsafe { self.view.pool().store(place.offset_bytes, part)? };
                    rest = behind;
                }
                Ok(())
            }
        }
    }

    /// Returns a pointer to the first byte. Stores beyond the end of the view may hit any file.
    ///
    /// `None` in a forked child, and if stores through a pointer cannot reach the pool: its media
    /// are not mapped, the view has more than [`MAX_VIEW_PIECES`](crate::MAX_VIEW_PIECES) pieces,
    /// or the pool has write windows
    /// ([`PoolOptions::write_windows`](aquifer_pool::PoolOptions::write_windows)) that use system
    /// calls, or protection keys and the view has several pieces. With protection keys, a thread
    /// can load and store through the pointer only while it has a
    /// [`window`](aquifer_pool::media::Media::write_window) open.
    pub fn as_mut_ptr(&self) -> Option<*mut u8> {
        // `None` in a forked child, and where the bytes are not mapped.
        let bytes = self.view.bytes()?;
        match &self.view.place {
            Place::Linear(range) => self.view.pool().place_to_store(*range),
            Place::Stitched { .. }
                if self.view.pool().media().write_windows() != WriteWindows::None =>
            {
                None
            }
            Place::Empty | Place::Stitched { .. } => Some(bytes.as_ptr().cast_mut()),
            Place::Scattered { .. } => None,
        }
    }

    /// Makes a range of the view durable, with the metadata needed to find it again: the size of
    /// the file, and its names.
    ///
    /// # Errors
    /// [`FsError::LayoutChanged`] if these bytes no longer belong to the file, because it was
    /// truncated or got a hole there; then nothing was made durable. [`FsError::OutsideView`],
    /// [`FsError::Pool`].
    pub fn persist(&self, range: Range<u64>) -> Result<()> {
        self.view.check(&range)?;
        let (open, shared) = (self.file.inode(), &self.file.files().shared);
        let len_bytes = range.end - range.start;
        let in_file = FileBytes { offset_bytes: self.view.offset_bytes() + range.start, len_bytes };
        let (inode, table) = shared.table(open)?;
        let places: Vec<ByteRange> = table.pieces(in_file).filter_map(|piece| piece.pool).collect();
        // With the same layout the pages are in place; with another one, compare them.
        if Layout::of(&inode) != self.view.of && !self.is_at(&places, &range) {
            return Err(FsError::LayoutChanged);
        }
        if len_bytes > 0 && in_file.end_bytes() > inode.size_bytes {
            return Err(FsError::LayoutChanged);
        }
        shared.pool.note_stored(open.number)?;
        shared.note_modified(open, inode.modified_ns)?;
        Ok(shared.pool.sync_with(&places)?)
    }

    /// Makes the whole view durable, as [`ViewMut::persist`].
    ///
    /// # Errors
    /// As for [`ViewMut::persist`].
    pub fn flush(&self) -> Result<()> {
        self.persist(0..self.view.len())
    }

    /// Whether a range of the view lies at these places of the pool.
    fn is_at(&self, places: &[ByteRange], range: &Range<u64>) -> bool {
        match &self.view.place {
            Place::Empty => true,
            Place::Linear(all) => places == [within(*all, range)],
            Place::Stitched { stitched, skipped_bytes, .. } => {
                let start = skipped_bytes + range.start as usize;
                let end = skipped_bytes + range.end as usize;
                stitched
                    .file_offsets(start..end)
                    .eq(places.iter().map(|place| (place.offset_bytes, place.len_bytes)))
            }
            Place::Scattered { table, range: all } => {
                let pieces = table.pieces(in_file(*all, range));
                pieces.filter_map(|piece| piece.pool).eq(places.iter().copied())
            }
        }
    }
}
