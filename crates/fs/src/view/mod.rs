//! Views: bytes of a file as memory, without copying them.
//!
//! ```text
//! a path ──▶ inode ──▶ runs ──▶ pin ──▶ [ one run: a pointer into the pool's mapping            ]   Place::Linear
//!   known_paths                          [ several: mapped one behind the other (vm::stitched) ]   Place::Stitched
//!                                        [ very many: copied with each look                    ]   Place::Scattered
//! ```
//! Making a view of one run takes a lookup, a store and a comparison, whatever the length: no system call, no lock, no page tables. The
//! pin keeps the pages of the layout that the view was made of from being used again, in all processes, until it is dropped: also when
//! the file is cut short, replaced or removed meanwhile. What is written to these pages in place shows in the view; what
//! is put in their place does not. That holds for all three forms: what is copied with each look is what these pages have then.
//!
//! | | made by | bytes as | who else may change them |
//! |---|---|---|---|
//! | [`View`] | [`Files::view`], [`File::view`](crate::File::view) | closure, copies, pointer | everybody |
//! | [`Lease`] | [`Files::lease`], [`File::lease`](crate::File::lease) | a slice | nobody: the file is immutable |
//! | [`ViewMut`] | [`File::view_mut`](crate::File::view_mut) | the same, and stores | everybody |

pub(crate) mod known_paths;
mod lease;
mod writable;

use std::fmt;
use std::io::ErrorKind;
use std::ops::{Range, RangeBounds};
use std::path::Path;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, FileKind, FileState};
use aquifer_pool::media::{ByteRange, WriteWindows};
use aquifer_pool::{OwnedPin, Pin, Pool};
use aquifer_vm::bytes::bounds_of;
use aquifer_vm::stitched::{StitchError, StitchPiece, Stitched};
use aquifer_vm::{Bytes, Pod};

pub use lease::Lease;
pub use writable::ViewMut;

use crate::error::{FsError, Result};
use crate::file_table::{FileBytes, FileTable};
use crate::files::{Files, Shared};
use crate::walk::{self, Last, bytes_of, owned, walk};
use known_paths::{Known, PathHash, Versions};

/// The most pieces that a view of a fragmented file is mapped in: each is a mapping, and takes about a microsecond. A view of more is no
/// memory: its bytes are copied with each look, and there is neither pointer nor slice.
pub const MAX_VIEW_PIECES: usize = 1024;

/// Bytes of a file, kept as they lie in the pool.
///
/// Others may change the bytes at any time, so they are looked at under a closure or copied out; a slice is had of a [`Lease`], or
/// by who knows that nobody writes ([`View::as_slice`]). Can be shared between threads. It has no meaning in a forked child.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
/// # let files = aquifer_fs::Files::new(pool);
/// files.create_file("/f")?.write_at(b"some text", 0)?;
/// let view = files.view("/f", 5..)?;
/// files.remove_file("/f")?; // the view keeps its bytes
/// assert_eq!(view.read(|bytes| bytes.to_vec())?, b"text");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the bytes are kept only as long as this lives"]
pub struct View<'f> {
    held: Held<'f>,
    place: Place,
    /// Where in the file it begins.
    offset_bytes: u64,
    of: Layout,
}

/// Which pages of which file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub inode: u64,
    pub incarnation: u64,
    pub layout_version: u64,
}

impl Layout {
    fn of(inode: &FileInode) -> Layout {
        Layout {
            inode: inode.number,
            incarnation: inode.incarnation,
            layout_version: inode.layout_version,
        }
    }
}

/// The pin, and what keeps the pool open.
enum Held<'f> {
    Borrowed(&'f Files, Pin<'f>),
    Owned(Files, OwnedPin),
}

/// Where the bytes are.
enum Place {
    Empty,
    /// In the pool's own mapping.
    Linear(ByteRange),
    /// Behind the first `skipped_bytes` of these pieces.
    Stitched {
        stitched: Stitched,
        skipped_bytes: usize,
        len_bytes: usize,
    },
    /// In more pieces than are mapped: these bytes of a file that has this table.
    Scattered {
        table: Box<FileTable>,
        range: FileBytes,
    },
}

impl Files {
    /// A view of a range of a file, found by its path. Of a file that lies in one piece it takes as long for a large file as for a small one;
    /// each further piece takes about a microsecond, up to [`MAX_VIEW_PIECES`]. In more than that, or in several where the media cannot be
    /// mapped in pieces, the bytes are copied whenever they are looked at.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_at(&7_u64.to_ne_bytes(), 0)?;
    /// assert_eq!(files.view("/f", ..)?.get::<u64>(0)?, 7);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::OutsideFile`] if the range ends behind the end of the file; [`FsError::Stitch`];
    /// [`PoolError::TooManyPins`](aquifer_pool::PoolError::TooManyPins), which all processes that write reach together with half a million views; those
    /// of [`Files::open_file`].
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
            let (inode, table) = shared.look(|slots| {
                let found = walk(slots, path, Last::Follow)?.referent(path)?;
                let inode = walk::referred(slots, found)?;
                if inode.kind != FileKind::File {
                    return Err(FsError::IsADirectory { path: owned(path) });
                }
                let table = FileTable::load(&inode, slots)?;
                Ok((inode, table))
            })?;
            if let Some(hash) = hash {
                let Layout { inode: number, incarnation, layout_version } = Layout::of(&inode);
                let known = Known {
                    inode: number,
                    incarnation,
                    layout_version,
                    size_bytes: inode.size_bytes,
                    run: table.as_one_run().unwrap_or_default(),
                    names_version: versions.names,
                    metadata_version: versions.metadata_if_unchanged(&shared.pool),
                };
                shared.known_paths.learn(hash, known);
            }
            let range = resolve(&range, inode.size_bytes)?;
            if let Some(view) = self.view_of(Layout::of(&inode), &table, range, false)? {
                return Ok(view);
            }
        }
    }

    /// A view of a file that was looked up before; `None` if it has changed since, or is not one run.
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
        // While the CPU waits for the inode and the pin. Usually a view begins where the file does.
        pool.prefetch(known.run.bytes());
        let Known { inode, incarnation, layout_version, metadata_version, .. } = known;
        let of = Layout { inode, incarnation, layout_version };
        if pool.metadata_version() == metadata_version {
            let Some((offset_bytes, place)) = place_of_known(&known, range)? else {
                return Ok(None);
            };
            let pin = pool.pin_unchanged(inode, layout_version, metadata_version)?;
            let Some(pin) = pin else { return Ok(None) };
            return Ok(Some(View { held: Held::Borrowed(self, pin), place, offset_bytes, of }));
        }
        // Something was changed; perhaps neither names nor this file.
        let Some(known) = known.renewed(pool) else { return Ok(None) };
        self.shared.known_paths.learn(hash, known);
        let Some((offset_bytes, place)) = place_of_known(&known, range)? else {
            return Ok(None);
        };
        self.pinned(of, offset_bytes, || Ok(place))
    }

    /// A view of this layout of a file, if it still has it.
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
        let pin = pool.pin_current(of.inode, of.incarnation, of.layout_version)?;
        let Some(pin) = pin else { return Ok(None) };
        Ok(Some(View { held: Held::Borrowed(self, pin), place: place()?, offset_bytes, of }))
    }
}

/// Where in the file and in the pool a range of a known file lies; `None` if it has no bytes, or not all in the run.
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

/// A range of a file of this length.
fn resolve(range: &impl RangeBounds<u64>, size_bytes: u64) -> Result<FileBytes> {
    let Range { start, end } = bounds_of(range, size_bytes);
    match start <= end && end <= size_bytes {
        true => Ok(FileBytes { offset_bytes: start, len_bytes: end - start }),
        false => Err(FsError::OutsideFile { range: start..end, len_bytes: size_bytes }),
    }
}

impl crate::File {
    /// A view of a range of the file.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_at(b"some text", 0)?;
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
            let of = Layout { inode: open.number, incarnation: open.incarnation, layout_version };
            let range = resolve(&range, size_bytes)?;
            if let Some(view) = files.view_of(of, &table, range, false)? {
                return Ok(view);
            }
        }
    }
}

/// How many pieces a view is mapped in, if it is not one.
fn most_pieces(pool: &Pool) -> usize {
    match pool.media().maps_privately() {
        true => MAX_VIEW_PIECES,
        false => 0,
    }
}

impl Shared {
    /// Where a range lies, to be looked at.
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
            pieces.push(match extent.run.is_hole() {
                true => StitchPiece::Zeros { len_bytes },
                false => {
                    StitchPiece::File { offset_bytes: extent.run.bytes().offset_bytes, len_bytes }
                }
            });
        }
        let Ok(len_bytes) = usize::try_from(range.len_bytes) else { return scattered() };
        // A mapping of its own has no key.
        let is_writable = is_writable && media.write_windows() == WriteWindows::None;
        let stitched = self.stitcher.stitch(media.file(), pieces, is_writable)?;
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

    /// How many bytes there are.
    pub fn len(&self) -> u64 {
        match &self.place {
            Place::Empty => 0,
            Place::Linear(bytes) => bytes.len_bytes,
            Place::Stitched { len_bytes, .. } => *len_bytes as u64,
            Place::Scattered { range, .. } => range.len_bytes,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where in the file it begins.
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// Whether the file still consists of the pages that it did. If not, some of these bytes may be the file's no more. Not so either in a
    /// forked child, nor where the metadata cannot be read.
    pub fn is_current(&self) -> bool {
        let number = self.of.inode;
        let layout = match self.pool().file_state(number) {
            Some(FileState { incarnation, layout_version, .. }) => {
                Layout { inode: number, incarnation, layout_version }
            }
            // It is none any more, or something is being changed, perhaps elsewhere.
            None => match self.files().shared.look(|slots| walk::inode(slots, number)) {
                Ok(inode) => Layout::of(&inode),
                Err(_) => return false,
            },
        };
        layout == self.of
    }

    /// The same view, which does not borrow what it was made by.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_at(b"text", 0)?;
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

    /// Shows all of it to a closure.
    ///
    /// Where the view has no bytes in place, that is a copy of the whole view, which is allocated for it: see [`View::read_range`].
    ///
    /// # Errors
    /// [`FsError::Pool`] if a byte could not be had that the closure looked at (the pool's file was cut short, its device failed); then
    /// its result is dropped.
    pub fn read<T>(&self, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        self.read_range(0..self.len(), look)
    }

    /// Shows a range of it, counted from its first byte, to a closure.
    ///
    /// The closure gets the range in one piece. Where the view has no bytes in place ([`View::bytes`]), as in a view of more than
    /// [`MAX_VIEW_PIECES`] pieces, that is a copy, in memory of the range's length that this call allocates and frees. Look at a large view
    /// of that kind in several ranges, or use [`View::read_into`] with a buffer that you have.
    ///
    /// # Errors
    /// As for [`View::read`]; [`FsError::OutsideView`]; [`FsError::Stitch`] if there is no memory for a copy.
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
                self.read_into(range.start, &mut bytes)?;
                Ok(look(Bytes::from(&bytes[..])))
            }
        }
    }

    /// Copies bytes out, from `offset_bytes` of the view on. What others change meanwhile may come out torn.
    ///
    /// # Errors
    /// As for [`View::read_range`].
    pub fn read_into(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
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

    /// The value at `offset_bytes` of the view, in the machine's byte order; any alignment.
    ///
    /// # Errors
    /// As for [`View::read_range`].
    pub fn get<T: Pod>(&self, offset_bytes: u64) -> Result<T> {
        let range = offset_bytes..offset_bytes.saturating_add(size_of::<T>() as u64);
        self.read_range(range, |bytes| bytes.get(0))
    }

    /// The bytes in place; `None` where they are not memory in one piece: in a view of more than [`MAX_VIEW_PIECES`] pieces (and of several,
    /// where the media cannot be mapped in pieces), where the media of the pool are not mapped, which are none of Aquifer's own, and in a
    /// forked child.
    ///
    /// They can be looked at as long as the view lives. If a byte cannot be had any more, because the pool's file was cut short or its
    /// device failed, that raises `SIGBUS`, as with mmap.
    #[inline]
    pub fn bytes(&self) -> Option<Bytes<'_>> {
        // Something else may be at these addresses in a child.
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

    /// Why there are no bytes in place.
    fn why_no_bytes(&self) -> FsError {
        match &self.place {
            Place::Scattered { table, range } => FsError::TooFragmented {
                pieces: table.extents(range.pages()).count(),
                limit: most_pieces(self.pool()).max(1),
            },
            Place::Empty | Place::Linear(_) | Place::Stitched { .. } => FsError::NotMapped,
        }
    }

    /// The bytes as a slice: for code that wants one. [`Lease`] is a slice without conditions.
    ///
    /// # Safety
    /// Nobody, in any process, changes these bytes of the file as long as the slice is used: neither by writing to the file, nor through
    /// a [`ViewMut`].
    #[inline]
    pub unsafe fn as_slice(&self) -> Option<&[u8]> {
        // SAFETY: the pages are the view's as long as it lives; that they do not change is the caller's promise.
        self.bytes().map(|bytes| unsafe { bytes.as_slice() })
    }

    /// An error if there is no such range, or in a fork: what is at these addresses there is something else.
    fn check(&self, range: &Range<u64>) -> Result<()> {
        self.pool().check_process()?;
        match range.start <= range.end && range.end <= self.len() {
            true => Ok(()),
            false => Err(FsError::OutsideView { range: range.clone(), len_bytes: self.len() }),
        }
    }

    /// Why bytes of the pieces could not be looked at.
    fn unreadable(&self, stitched: &Stitched, bytes: Range<usize>) -> FsError {
        let place = |(offset_bytes, len_bytes)| ByteRange { offset_bytes, len_bytes };
        self.pool().unreadable(stitched.file_offsets(bytes).map(place)).into()
    }
}

/// A range of a view as bytes of the pool.
fn within(all: ByteRange, range: &Range<u64>) -> ByteRange {
    ByteRange { offset_bytes: all.offset_bytes + range.start, len_bytes: range.end - range.start }
}

/// A range of a view as bytes of its file.
fn in_file(all: FileBytes, range: &Range<u64>) -> FileBytes {
    let len_bytes = range.end - range.start;
    FileBytes { offset_bytes: all.offset_bytes + range.start, len_bytes }
}

/// Memory for a copy.
fn zeros(len_bytes: u64) -> Result<Vec<u8>> {
    let none =
        |_| FsError::Stitch(StitchError::Map { len_bytes, source: ErrorKind::OutOfMemory.into() });
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
