//! Views: bytes of a file as memory, without copying.
//!
//! ```text
//! a path ──▶ inode ──▶ runs ──▶ pin ──▶ [ one run: a pointer into the pool's mapping  ]   Place::Linear
//!   known_paths                         [ several: mapped contiguously (vm::stitched) ]   Place::Stitched
//!                                       [ very many: copied on each read              ]   Place::Scattered
//! ```
//! Making a view of one run takes a lookup, a store and a comparison, whatever the length: no
//! system call, no lock, no page tables. Until the view is dropped, its pin keeps the pages of its
//! layout from being reused, in all processes, even if the file is truncated, replaced or removed.
//! Bytes written to these pages in place show in the view; pages that replace them do not. That
//! holds for all three forms: a copy is taken from these pages at the time of each read.
//!
//! | | made by | bytes as | writers at the same time |
//! |---|---|---|---|
//! | [`View`] | [`Files::view`], [`File::view`](crate::File::view) | closure, copies, pointer | any process |
//! | [`Lease`] | [`Files::lease`], [`File::lease`](crate::File::lease) | a slice | none: the file is immutable |
//! | [`ViewMut`] | [`File::view_mut`](crate::File::view_mut) | the same, and stores | any process |

mod lease;
mod writable;

use std::fmt;
use std::ops::{Range, RangeBounds};
use std::path::Path;

use aquifer_format::file_table::{FileBytes, FileTable};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, FileKind, FileState};
use aquifer_pool::media::{ByteRange, WriteWindows};
use aquifer_pool::{OwnedPin, Pin, Pool};
use aquifer_vm::bytes::{Bytes, bounds_of};
use aquifer_vm::stitched::{StitchPiece, Stitched};
use zerocopy::FromBytes;

pub use lease::Lease;
pub use writable::ViewMut;

use crate::error::{FsError, Result};
use crate::files::{Files, Shared};
use crate::known_paths::{Known, PathHash, Versions};
use crate::walk::{self, bytes_of, owned};

/// The most pieces in which a view of a fragmented file is mapped: each is a mapping, and takes
/// about a microsecond. A view of more pieces is not mapped: each read copies its bytes, and it has
/// neither pointer nor slice.
pub const MAX_VIEW_PIECES: usize = 1024;

/// Bytes of a file, pinned where they lie in the pool.
///
/// Any process may change the bytes at any time, so they are read in a closure or copied out. For a
/// slice, use a [`Lease`], or [`View::as_slice`] if the bytes are known not to change. Can be
/// shared between threads. Unusable in a forked child.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// files.create_file("/f")?.write_all_at(b"some text", 0)?;
/// let view = files.view("/f", 5..)?;
/// files.remove_file("/f")?; // the view keeps its bytes
/// assert_eq!(view.read(|bytes| bytes.to_vec())?, b"text");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the bytes are kept only as long as this lives"]
pub struct View<'f> {
    held: Held<'f>,
    place: Place,
    /// The offset in the file.
    offset_bytes: u64,
    of: Layout,
}

/// Identifies the pages of one layout of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub inode: u64,
    pub generation: u64,
    pub layout_version: u64,
}

impl Layout {
    fn of(inode: &FileInode) -> Layout {
        Layout {
            inode: inode.number,
            generation: inode.generation,
            layout_version: inode.layout_version,
        }
    }
}

/// The pin, and a reference that keeps the pool open.
enum Held<'f> {
    Borrowed(&'f Files, Pin<'f>),
    Owned(Files, OwnedPin),
}

/// Where the bytes are.
enum Place {
    Empty,
    /// In the pool's mapping.
    Linear(ByteRange),
    /// After the first `skipped_bytes` of these mapped pieces.
    Stitched {
        stitched: Stitched,
        skipped_bytes: usize,
        len_bytes: usize,
    },
    /// In more pieces than can be mapped: this range of a file with this table.
    Scattered {
        table: Box<FileTable>,
        range: FileBytes,
    },
}

impl Files {
    /// Makes a view of a range of the file at a path.
    ///
    /// If the file lies in one piece, the cost does not depend on its size; each further piece
    /// takes about a microsecond, up to [`MAX_VIEW_PIECES`]. With more pieces than that, or with
    /// several if the media cannot be mapped in pieces, each read copies the bytes.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_all_at(&7_u64.to_ne_bytes(), 0)?;
    /// assert_eq!(files.view("/f", ..)?.get::<u64>(0)?, 7);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::OutsideFile`] if the range extends beyond the end of the file;
    /// [`FsError::Stitch`]; [`PoolError::TooManyPins`](aquifer_pool::PoolError::TooManyPins), which
    /// all processes that can write reach together with half a million views; those of
    /// [`Files::open_file`].
    pub fn view(&self, path: impl AsRef<Path>, range: impl RangeBounds<u64>) -> Result<View<'_>> {
        let path = bytes_of(path.as_ref());
        let shared = &*self.shared;
        let hash = shared.known_paths.hash(path);
        if let Some(hash) = hash
            && let Some(known) = shared.known_paths.find(hash)
            && let Some(view) = self.view_of_known(hash, known, &range)?
        {
            return Ok(view);
        }
        loop {
            let versions = Versions::of(&shared.pool);
            let (inode, table, directory) = shared.look(|slots| {
                let (found, directory) = shared.referent(slots, path)?;
                let inode = walk::referred(slots, found)?;
                match inode.kind {
                    FileKind::File => {}
                    kind if kind.is_special() => {
                        return Err(FsError::Special { path: owned(path) });
                    }
                    _ => return Err(FsError::IsADirectory { path: owned(path) }),
                }
                let table = FileTable::load(&inode, slots)?;
                Ok((inode, table, directory))
            })?;
            shared.learn_directory(directory, versions.names);
            if let Some(hash) = hash {
                let run = table.as_one_run().unwrap_or_default();
                let known = Known::found(&inode, run, &versions, &shared.pool);
                shared.known_paths.learn(hash, known);
            }
            let range = resolve(&range, inode.size_bytes)?;
            if let Some(view) = self.view_of(Layout::of(&inode), &table, range, false)? {
                return Ok(view);
            }
        }
    }

    /// Makes a view from a cached lookup; `None` if the file has changed since, or is not one run.
    #[inline]
    fn view_of_known(
        &self,
        hash: PathHash,
        known: Known,
        range: &impl RangeBounds<u64>,
    ) -> Result<Option<View<'_>>> {
        let pool = &self.shared.pool;
        if known.run.is_empty() {
            return Ok(None);
        }
        // Overlaps with the cache misses on the inode and the pin. Usually a view starts at the
        // start of the file.
        pool.prefetch(known.run.bytes());
        let Known { inode, generation, layout_version, metadata_version, .. } = known;
        let of = Layout { inode, generation, layout_version };
        if pool.metadata_version() == metadata_version {
            let Some((offset_bytes, place)) = place_of_known(&known, range)? else {
                return Ok(None);
            };
            let pin = pool.pin_unchanged(inode, layout_version, metadata_version)?;
            let Some(pin) = pin else { return Ok(None) };
            return Ok(Some(View { held: Held::Borrowed(self, pin), place, offset_bytes, of }));
        }
        // The metadata changed, but perhaps neither names nor this file.
        let Some(known) = known.renewed(pool) else { return Ok(None) };
        self.shared.known_paths.learn(hash, known);
        let Some((offset_bytes, place)) = place_of_known(&known, range)? else {
            return Ok(None);
        };
        self.pinned(of, offset_bytes, || Ok(place))
    }

    /// Makes a view of this layout of a file; `None` if the file has another layout by then.
    pub(crate) fn view_of(
        &self,
        of: Layout,
        table: &FileTable,
        range: FileBytes,
        is_writable: bool,
    ) -> Result<Option<View<'_>>> {
        self.pinned(of, range.offset_bytes, || self.shared.place(table, range, is_writable))
    }

    #[inline]
    fn pinned(
        &self,
        of: Layout,
        offset_bytes: u64,
        place: impl FnOnce() -> Result<Place>,
    ) -> Result<Option<View<'_>>> {
        let pool = &self.shared.pool;
        let pin = pool.pin_current(of.inode, of.generation, of.layout_version)?;
        let Some(pin) = pin else { return Ok(None) };
        Ok(Some(View { held: Held::Borrowed(self, pin), place: place()?, offset_bytes, of }))
    }
}

/// Locates a range of a cached file in the file and in the pool; `None` if it is empty, or not
/// entirely in the run.
#[inline]
fn place_of_known(known: &Known, range: &impl RangeBounds<u64>) -> Result<Option<(u64, Place)>> {
    let range = resolve(range, known.size_bytes)?;
    if range.end_bytes() > known.run.pages * PAGE_BYTES || range.len_bytes == 0 {
        return Ok(None);
    }
    let offset_bytes = known.run.bytes().offset_bytes + range.offset_bytes;
    let bytes = ByteRange { offset_bytes, len_bytes: range.len_bytes };
    Ok(Some((range.offset_bytes, Place::Linear(bytes))))
}

/// Resolves a range of a file of this length.
fn resolve(range: &impl RangeBounds<u64>, size_bytes: u64) -> Result<FileBytes> {
    let Range { start, end } = bounds_of(range, size_bytes);
    if start <= end && end <= size_bytes {
        Ok(FileBytes { offset_bytes: start, len_bytes: end - start })
    } else {
        Err(FsError::OutsideFile { range: start..end, len_bytes: size_bytes })
    }
}

impl crate::File {
    /// Makes a view of a range of the file.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_all_at(b"some text", 0)?;
    /// let file = files.open_file("/f")?;
    /// let sum = file.view(..4)?.read(|bytes| (0..4).map(|at| bytes.get::<u8>(at) as u32).sum::<u32>())?;
    /// assert_eq!(sum, b"some".iter().map(|&byte| u32::from(byte)).sum());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::view`]; [`FsError::NotOpenFor`].
    pub fn view(&self, range: impl RangeBounds<u64>) -> Result<View<'_>> {
        self.check_reads()?;
        let (files, open) = (self.files(), self.inode());
        loop {
            let (size_bytes, layout_version, table) = files.shared.state(open)?;
            let of = Layout { inode: open.number, generation: open.generation, layout_version };
            let range = resolve(&range, size_bytes)?;
            if let Some(view) = files.view_of(of, &table, range, false)? {
                return Ok(view);
            }
        }
    }
}

/// The most pieces in which a view is mapped if it has several; 0 if the media cannot do that.
fn most_pieces(pool: &Pool) -> usize {
    if pool.media().maps_privately() { MAX_VIEW_PIECES } else { 0 }
}

impl Shared {
    /// Locates a range, and maps it if it has several pieces.
    fn place(&self, table: &FileTable, range: FileBytes, is_writable: bool) -> Result<Place> {
        if range.len_bytes == 0 {
            return Ok(Place::Empty);
        }
        if let Some(bytes) = table.contiguous(range) {
            return Ok(Place::Linear(bytes));
        }
        let media = self.pool.media();
        let scattered = || Ok(Place::Scattered { table: Box::new(table.clone()), range });
        let most_pieces = most_pieces(&self.pool);
        let mut pieces = Vec::new();
        for extent in table.extents(range.pages()) {
            if pieces.len() == most_pieces {
                return scattered();
            }
            let bytes = extent.run.pages.checked_mul(PAGE_BYTES);
            let len_bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
            let Some(len_bytes) = len_bytes else { return scattered() };
            pieces.push(if extent.run.is_hole() {
                StitchPiece::Zeros { len_bytes }
            } else {
                StitchPiece::File { offset_bytes: extent.run.bytes().offset_bytes, len_bytes }
            });
        }
        let Ok(len_bytes) = usize::try_from(range.len_bytes) else { return scattered() };
        // A separate mapping has no protection key.
        let is_writable = is_writable && media.write_windows() == WriteWindows::None;
        let stitched = self.stitcher().stitch(media.file(), pieces, is_writable)?;
        Ok(Place::Stitched {
            stitched,
            skipped_bytes: (range.offset_bytes % PAGE_BYTES) as usize,
            len_bytes,
        })
    }
}

impl View<'_> {
    #[inline]
    fn files(&self) -> &Files {
        match &self.held {
            Held::Borrowed(files, _) => files,
            Held::Owned(files, _) => files,
        }
    }

    fn pool(&self) -> &Pool {
        &self.files().shared.pool
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        match &self.place {
            Place::Empty => 0,
            Place::Linear(bytes) => bytes.len_bytes,
            Place::Stitched { len_bytes, .. } => *len_bytes as u64,
            Place::Scattered { range, .. } => range.len_bytes,
        }
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the offset in the file.
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// Whether the file still has the layout that the view was made from. If not, some of these
    /// bytes may no longer belong to the file. False in a forked child, and if the metadata cannot
    /// be read.
    pub fn is_current(&self) -> bool {
        let number = self.of.inode;
        let layout = match self.pool().file_state(number) {
            Some(FileState { generation, layout_version, .. }) => {
                Layout { inode: number, generation, layout_version }
            }
            // The inode is no longer a file's, or the metadata are being changed, perhaps
            // elsewhere.
            None => match self.files().shared.look(|slots| walk::inode(slots, number)) {
                Ok(inode) => Layout::of(&inode),
                Err(_) => return false,
            },
        };
        layout == self.of
    }

    /// Converts into a view that owns what it borrowed.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_all_at(b"text", 0)?;
    /// let view = files.view("/f", ..)?.into_owned();
    /// let sum = std::thread::spawn(move || view.read(|bytes| bytes.get::<u8>(0)));
    /// assert_eq!(sum.join().unwrap()?, b't');
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_owned(self) -> View<'static> {
        let View { held, place, offset_bytes, of } = self;
        let held = match held {
            Held::Borrowed(files, pin) => {
                Held::Owned(files.clone(), pin.into_owned(&files.shared.pool))
            }
            Held::Owned(files, pin) => Held::Owned(files, pin),
        };
        View { held, place, offset_bytes, of }
    }

    /// Calls a closure with all bytes of the view.
    ///
    /// If the view is not in memory in one piece, the closure gets a newly allocated copy of the
    /// whole view: see [`View::read_range`].
    ///
    /// # Errors
    /// [`FsError::Pool`] if the closure read a byte that is not available (the pool's file was
    /// truncated, its device failed); its result is dropped.
    pub fn read<T>(&self, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        self.read_range(0..self.len(), look)
    }

    /// Calls a closure with a range of the view, relative to its start.
    ///
    /// The closure gets the range in one piece. If the view is not in memory in one piece
    /// ([`View::bytes`]), for example with more than [`MAX_VIEW_PIECES`] pieces, that is a copy:
    /// this call allocates and frees memory of the range's length. Read a large view of that kind
    /// in several ranges, or with [`View::read_exact_at`] and your own buffer.
    ///
    /// # Errors
    /// As for [`View::read`]; [`FsError::OutsideView`]; [`FsError::Stitch`] if there is no memory
    /// for a copy.
    pub fn read_range<T>(&self, range: Range<u64>, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        self.check(&range)?;
        let len_bytes = range.end - range.start;
        match &self.place {
            Place::Empty => Ok(look(Bytes::from(&[][..]))),
            Place::Linear(all) => Ok(self.pool().look_at(within(*all, &range), look)?),
            Place::Stitched { stitched, skipped_bytes, .. } => {
                let (at, file) = (skipped_bytes + range.start as usize, self.pool().media().file());
                let looked = stitched.guarded(file, at, len_bytes as usize, look);
                looked.map_err(|_| self.unreadable(stitched, at..at + len_bytes as usize))
            }
            Place::Scattered { .. } => {
                let mut bytes = zeros(len_bytes)?;
                self.read_exact_at(&mut bytes, range.start)?;
                Ok(look(Bytes::from(&bytes[..])))
            }
        }
    }

    /// Copies bytes out, from `offset_bytes` of the view. Bytes that are changed during the copy
    /// may come out torn.
    ///
    /// # Errors
    /// As for [`View::read_range`].
    pub fn read_exact_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        let range = offset_bytes..offset_bytes.saturating_add(bytes.len() as u64);
        self.check(&range)?;
        match &self.place {
            Place::Empty => Ok(()),
            Place::Linear(all) => Ok(self.pool().load(within(*all, &range).offset_bytes, bytes)?),
            Place::Stitched { stitched, skipped_bytes, .. } => {
                let at = skipped_bytes + offset_bytes as usize;
                let read = stitched.read(at, bytes);
                read.map_err(|_| self.unreadable(stitched, at..at + bytes.len()))
            }
            Place::Scattered { table, range: all } => {
                self.files().shared.copy_out(table, in_file(*all, &range), bytes)
            }
        }
    }

    /// Returns the value at `offset_bytes` of the view, in native byte order, at any alignment.
    ///
    /// # Errors
    /// As for [`View::read_range`].
    pub fn get<T: FromBytes>(&self, offset_bytes: u64) -> Result<T> {
        let range = offset_bytes..offset_bytes.saturating_add(size_of::<T>() as u64);
        self.read_range(range, |bytes| bytes.get(0))
    }

    /// Returns the bytes in place, if they are in memory in one piece.
    ///
    /// `None` if the view has more than [`MAX_VIEW_PIECES`] pieces (or several, if the media cannot
    /// be mapped in pieces), if the pool's media are not mapped (no media of Aquifer's are like
    /// that), and in a forked child.
    ///
    /// Valid as long as the view lives. Reading a byte that is no longer available, because the
    /// pool's file was truncated or its device failed, raises `SIGBUS`, as with mmap.
    #[inline]
    pub fn bytes(&self) -> Option<Bytes<'_>> {
        // In a child something else may be mapped at these addresses.
        self.pool().check_process().ok()?;
        match &self.place {
            Place::Empty => Some(Bytes::from(&[][..])),
            Place::Linear(bytes) => self.pool().bytes(*bytes),
            Place::Stitched { stitched, skipped_bytes, len_bytes } => {
                stitched.bytes(*skipped_bytes, *len_bytes).ok()
            }
            Place::Scattered { .. } => None,
        }
    }

    /// The error if there are no bytes in place.
    fn why_no_bytes(&self) -> FsError {
        match &self.place {
            Place::Scattered { table, range } => FsError::TooFragmented {
                pieces: table.extents(range.pages()).count(),
                limit: most_pieces(self.pool()).max(1),
            },
            Place::Empty | Place::Linear(_) | Place::Stitched { .. } => FsError::NotMapped,
        }
    }

    /// Returns the bytes as a slice. A [`Lease`] is a slice without preconditions.
    ///
    /// # Safety
    /// While the slice is in use, no thread of any process may change these bytes of the file,
    /// neither by writing to the file, nor through a [`ViewMut`].
    #[inline]
    pub unsafe fn as_slice(&self) -> Option<&[u8]> {
        // SAFETY: the view's pin keeps the pages as long as the view lives; the caller guarantees
        // that they do not change.
        self.bytes().map(|bytes| unsafe { bytes.as_slice() })
    }

    /// Checks that the range exists, and that the process is not a fork, where something else is
    /// mapped at these addresses.
    fn check(&self, range: &Range<u64>) -> Result<()> {
        self.pool().check_process()?;
        if range.start <= range.end && range.end <= self.len() {
            Ok(())
        } else {
            Err(FsError::OutsideView { range: range.clone(), len_bytes: self.len() })
        }
    }

    /// The error for bytes of a stitched view that could not be read.
    fn unreadable(&self, stitched: &Stitched, bytes: Range<usize>) -> FsError {
        let place = |(offset_bytes, len_bytes)| ByteRange { offset_bytes, len_bytes };
        self.pool().unreadable(stitched.file_offsets(bytes).map(place)).into()
    }
}

/// Converts a range of a view to bytes of the pool.
fn within(all: ByteRange, range: &Range<u64>) -> ByteRange {
    ByteRange { offset_bytes: all.offset_bytes + range.start, len_bytes: range.end - range.start }
}

/// Converts a range of a view to bytes of its file.
fn in_file(all: FileBytes, range: &Range<u64>) -> FileBytes {
    let len_bytes = range.end - range.start;
    FileBytes { offset_bytes: all.offset_bytes + range.start, len_bytes }
}

/// Allocates zeroed memory for a copy.
fn zeros(len_bytes: u64) -> Result<Vec<u8>> {
    let none = |_| FsError::no_memory(len_bytes);
    let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(none)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

impl fmt::Debug for View<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("View")
            .field("inode", &self.of.inode)
            .field("offset_bytes", &self.offset_bytes)
            .field("len_bytes", &self.len())
            .finish_non_exhaustive()
    }
}
