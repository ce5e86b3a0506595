//! Leases: bytes of immutable files as slices.
//!
//! An immutable file can only be made mutable again if it has no lease. The two sides are ordered
//! as in Dekker's algorithm: the lessee pins the inode, *then* checks that the file is immutable
//! and not clearing; the clearing process first commits
//! [`FileInode::is_clearing_immutable`](aquifer_pool::format::file::FileInode::is_clearing_immutable), in a separate
//! transaction, *then* checks for leases. So at least one of them sees the other.

use std::ops::{Bound, Deref, RangeBounds};
use std::path::Path;

use aquifer_pool::{InodeUse, OwnedPin};

use super::{Layout, View};
use crate::error::{FsError, Result};
use crate::files::Files;
use crate::walk::{bytes_of, owned};

/// Bytes of an immutable file, as a slice.
///
/// While it lives, [`Files::set_immutable`] does not make the file mutable again, in any process,
/// and no safe function of Aquifer changes the bytes. Two things can: the unsafe operations of the
/// pool, whose callers promise not to, and a program that writes to the pool's file directly, as
/// with any file mapping. Dereferencing it in a forked child panics.
///
/// ```compile_fail,E0133
/// # fn store(lease: aquifer_fs::Lease<'_>, pool: &aquifer_pool::Pool) {
/// let offset_bytes = 1 << 20; // where the leased bytes lie
/// pool.store(offset_bytes, b"other").unwrap(); // an error: this needs `unsafe`
/// # drop(lease);
/// # }
/// ```
/// ```compile_fail,E0133
/// # fn write(lease: aquifer_fs::Lease<'_>, pool: &aquifer_pool::Pool) {
/// pool.media().write_at(1 << 20, b"other").unwrap(); // so does this
/// # drop(lease);
/// # }
/// ```
/// ```compile_fail,E0133
/// # fn change(lease: aquifer_fs::Lease<'_>, pool: &aquifer_pool::Pool) {
/// pool.change(Vec::new(), |_| Ok(())).unwrap(); // and changing metadata
/// # drop(lease);
/// # }
/// ```
/// ```compile_fail,E0133
/// # fn commit(lease: aquifer_fs::Lease<'_>, pool: &aquifer_pool::Pool) {
/// pool.capture(&Default::default(), |bytes| bytes.fill(1)).unwrap(); // and committing pages
/// # drop(lease);
/// # }
/// ```
#[must_use = "the bytes are kept only as long as this lives"]
#[derive(Debug)]
pub struct Lease<'f> {
    view: View<'f>,
    _leased: OwnedPin,
}

impl Files {
    /// Leases bytes of an immutable file ([`Files::set_immutable`]) as a slice.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FsError;
    ///
    /// files.create_file("/f")?.write_all_at(b"some text", 0)?;
    /// assert!(matches!(files.lease("/f", ..), Err(FsError::NotImmutable { .. })));
    /// files.set_immutable("/f", true)?;
    /// let lease = files.lease("/f", ..)?;
    /// assert_eq!(&lease[5..], b"text");
    /// assert!(matches!(files.set_immutable("/f", false), Err(FsError::InUse { .. })));
    /// drop(lease);
    /// files.set_immutable("/f", false)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotImmutable`]; those of [`Files::view`]; [`FsError::TooFragmented`] if the range
    /// lies in more than [`MAX_VIEW_PIECES`](crate::MAX_VIEW_PIECES) pieces, or in more than one
    /// where the media cannot be mapped in pieces; [`FsError::NotMapped`] where the media of the
    /// pool are not mapped.
    pub fn lease(&self, path: impl AsRef<Path>, range: impl RangeBounds<u64>) -> Result<Lease<'_>> {
        let path = path.as_ref();
        lease(|| self.view(path, bounds(&range)), || owned(bytes_of(path)))
    }
}

impl crate::File {
    /// Leases bytes of the file, which must be immutable, as a slice: see [`Files::lease`].
    ///
    /// # Errors
    /// As for [`Files::lease`].
    pub fn lease(&self, range: impl RangeBounds<u64>) -> Result<Lease<'_>> {
        lease(|| self.view(bounds(&range)), || self.as_path())
    }
}

/// Copies a range.
fn bounds(range: &impl RangeBounds<u64>) -> (Bound<u64>, Bound<u64>) {
    (range.start_bound().cloned(), range.end_bound().cloned())
}

fn lease<'f>(
    view: impl Fn() -> Result<View<'f>>,
    path: impl FnOnce() -> std::path::PathBuf,
) -> Result<Lease<'f>> {
    loop {
        let view = view()?;
        let leased = view.pool().pin_inode(view.of.inode, InodeUse::Leased)?;
        // After the pin: see the module's documentation.
        let found = view.files().shared.look(|slots| crate::walk::inode(slots, view.of.inode));
        let Some(found) =
            found.ok().filter(|found| found.is_immutable && !found.is_clearing_immutable)
        else {
            return Err(FsError::NotImmutable { path: path() });
        };
        if Layout::of(&found) != view.of {
            // It was changed after the view was made, and before it was made immutable.
            continue;
        }
        return match view.bytes() {
            Some(_) => Ok(Lease { view, _leased: leased }),
            None => Err(view.why_no_bytes()),
        };
    }
}

impl<'f> Lease<'f> {
    /// Returns the lease as a view.
    pub fn view(&self) -> &View<'f> {
        &self.view
    }

    /// Converts into a lease that owns what it borrowed.
    pub fn into_owned(self) -> Lease<'static> {
        Lease { view: self.view.into_owned(), _leased: self._leased }
    }
}

impl Deref for Lease<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: no thread of any process writes to an immutable file, and the `Leased` pin keeps
        // it immutable. It was found immutable, with the layout of this view, after it was pinned.
        unsafe { self.view.as_slice() }.expect("it is there but in a forked child")
    }
}

impl AsRef<[u8]> for Lease<'_> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}
