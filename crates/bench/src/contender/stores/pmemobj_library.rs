//! libpmemobj, loaded at run time: the few calls a transaction needs.
//!
//! Loaded rather than linked, so that the bench builds and runs without the library installed. The
//! prototypes are those of `libpmemobj/base.h`, `pool_base.h` and `tx_base.h` of version 1.12; they
//! have belonged to the library's stable interface since version 1.0.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use anyhow::{Result, bail};
use libloading::Library;

use crate::job::Unavailable;

const NAME: &str = "libpmemobj.so.1";
const LAYOUT: &CStr = c"aquifer-bench";
/// Terminates the list of locks that `pmemobj_tx_begin` takes.
const TX_PARAM_NONE: c_int = 0;

/// `PMEMoid`: identifies an object in a pool.
#[repr(C)]
#[derive(Clone, Copy)]
struct ObjectId {
    pool_id: u64,
    offset_bytes: u64,
}

type PoolPointer = *mut c_void;

/// The library's functions. It stays loaded until the process ends.
#[derive(Clone, Copy)]
struct Functions {
    create: unsafe extern "C" fn(*const c_char, *const c_char, usize, libc::mode_t) -> PoolPointer,
    open: unsafe extern "C" fn(*const c_char, *const c_char) -> PoolPointer,
    close: unsafe extern "C" fn(PoolPointer),
    root: unsafe extern "C" fn(PoolPointer, usize) -> ObjectId,
    direct: unsafe extern "C" fn(ObjectId) -> *mut c_void,
    persist: unsafe extern "C" fn(PoolPointer, *const c_void, usize),
    tx_begin: unsafe extern "C" fn(PoolPointer, *mut c_void, ...) -> c_int,
    tx_add_range_direct: unsafe extern "C" fn(*const c_void, usize) -> c_int,
    tx_commit: unsafe extern "C" fn(),
    tx_abort: unsafe extern "C" fn(c_int),
    tx_end: unsafe extern "C" fn() -> c_int,
    error_message: unsafe extern "C" fn() -> *const c_char,
}

impl Functions {
    fn load(name: &str) -> Result<Self> {
        // SAFETY: the library's constructors set up its own state; it is a well-known library that
        // the user has installed under its versioned name.
        let library = unsafe { Library::new(name) }.map_err(|error| {
            Unavailable(format!(
                "{name} cannot be loaded ({error}); on Debian install the package libpmemobj1"
            ))
        })?;
        // The functions below are used until the process ends.
        let library: &'static Library = Box::leak(Box::new(library));
        macro_rules! find {
            ($symbol:literal) => {{
                // SAFETY: the type is that of the field it is assigned to, which matches the
                // prototype in the library's header.
                *unsafe { library.get($symbol) }?
            }};
        }
        Ok(Self {
            create: find!(b"pmemobj_create\0"),
            open: find!(b"pmemobj_open\0"),
            close: find!(b"pmemobj_close\0"),
            root: find!(b"pmemobj_root\0"),
            direct: find!(b"pmemobj_direct\0"),
            persist: find!(b"pmemobj_persist\0"),
            tx_begin: find!(b"pmemobj_tx_begin\0"),
            tx_add_range_direct: find!(b"pmemobj_tx_add_range_direct\0"),
            tx_commit: find!(b"pmemobj_tx_commit\0"),
            tx_abort: find!(b"pmemobj_tx_abort\0"),
            tx_end: find!(b"pmemobj_tx_end\0"),
            error_message: find!(b"pmemobj_errormsg\0"),
        })
    }

    fn last_error(&self) -> String {
        // SAFETY: takes no arguments; returns a terminated string that stays valid for this thread
        // until its next call.
        let message = unsafe { (self.error_message)() };
        if message.is_null() {
            return io::Error::last_os_error().to_string();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
    }
}

/// An open pool and its root object.
pub struct Pool {
    functions: Functions,
    pool: NonNull<c_void>,
    root: NonNull<u8>,
    root_bytes: usize,
}

// SAFETY: a pool is usable from any thread; transactions belong to threads, and `transaction` ends
// the one it begins.
unsafe impl Send for Pool {}

impl Pool {
    /// Makes a pool of `pool_bytes` with a zeroed root object of `root_bytes`.
    pub fn create(path: &Path, pool_bytes: usize, root_bytes: usize) -> Result<Self> {
        let functions = Functions::load(NAME)?;
        let text = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: both strings are terminated and outlive the call.
        let pool = unsafe { (functions.create)(text.as_ptr(), LAYOUT.as_ptr(), pool_bytes, 0o600) };
        Self::with_root(functions, pool, path, root_bytes)
    }

    /// Opens the pool, recovering it if its last user crashed.
    pub fn open(path: &Path, root_bytes: usize) -> Result<Self> {
        let functions = Functions::load(NAME)?;
        let text = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: both strings are terminated and outlive the call.
        let pool = unsafe { (functions.open)(text.as_ptr(), LAYOUT.as_ptr()) };
        Self::with_root(functions, pool, path, root_bytes)
    }

    fn with_root(
        functions: Functions,
        pool: PoolPointer,
        path: &Path,
        root_bytes: usize,
    ) -> Result<Self> {
        let Some(pool) = NonNull::new(pool) else {
            bail!("libpmemobj refuses {}: {}", path.display(), functions.last_error());
        };
        // SAFETY: an open pool; a missing or too small object is allocated.
        let id = unsafe { (functions.root)(pool.as_ptr(), root_bytes) };
        // SAFETY: an identifier from this open pool, or the null one, which gives a null pointer.
        let root = unsafe { (functions.direct)(id) };
        let Some(root) = NonNull::new(root.cast::<u8>()) else {
            let reason = functions.last_error();
            // SAFETY: the pool is open, and nothing else refers to it.
            unsafe { (functions.close)(pool.as_ptr()) };
            bail!("libpmemobj cannot allocate {root_bytes} bytes: {reason}");
        };
        Ok(Self { functions, pool, root, root_bytes })
    }

    /// First byte of the root object: aligned to a cache line, with the requested length.
    pub fn root(&self) -> *mut u8 {
        self.root.as_ptr()
    }

    /// Makes the whole root object durable.
    pub fn persist_root(&mut self) {
        // SAFETY: the range is the root object of this open pool.
        unsafe {
            (self.functions.persist)(
                self.pool.as_ptr(),
                self.root.as_ptr().cast_const().cast(),
                self.root_bytes,
            );
        }
    }

    /// Runs `work` in a transaction: its stores to logged ranges become durable atomically.
    pub fn transaction(&mut self, work: impl FnOnce(&Log<'_>) -> Result<()>) -> Result<()> {
        let functions = &self.functions;
        // SAFETY: an open pool; without a jump buffer errors are returned; no locks are taken.
        let begun = unsafe {
            (functions.tx_begin)(self.pool.as_ptr(), std::ptr::null_mut(), TX_PARAM_NONE)
        };
        let mut result = if begun == 0 {
            work(&Log { functions })
        } else {
            Err(anyhow::anyhow!("libpmemobj begins no transaction: {}", functions.last_error()))
        };
        // A failed call has aborted the transaction already.
        if begun == 0 {
            if result.is_ok() {
                // SAFETY: inside the transaction begun above.
                unsafe { (functions.tx_commit)() };
            } else if !result.as_ref().is_err_and(|error| error.is::<Aborted>()) {
                // SAFETY: as above.
                unsafe { (functions.tx_abort)(libc::ECANCELED) };
            }
        }
        // SAFETY: each begin, failed or not, is followed by an end.
        let ended = unsafe { (functions.tx_end)() };
        if result.is_ok() && ended != 0 {
            result = Err(io::Error::from_raw_os_error(ended).into());
        }
        result
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: open, outside of any transaction, and nothing refers to it any more.
        unsafe { (self.functions.close)(self.pool.as_ptr()) };
    }
}

/// libpmemobj has aborted the transaction.
#[derive(Debug, thiserror::Error)]
#[error("libpmemobj cannot log a range: {0}")]
struct Aborted(String);

/// The undo log of a transaction.
pub struct Log<'a> {
    functions: &'a Functions,
}

impl Log<'_> {
    /// Logs the range, so that it can be stored to.
    #[inline]
    pub fn add(&self, start: *const u8, len_bytes: usize) -> Result<()> {
        // SAFETY: inside a transaction, as this value exists only there; a range outside the pool
        // is an error.
        if unsafe { (self.functions.tx_add_range_direct)(start.cast(), len_bytes) } == 0 {
            return Ok(());
        }
        Err(Aborted(self.functions.last_error()).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_a_reason_that_names_the_package() {
        let Err(error) = Functions::load("libpmemobj-that-nobody-has.so.1") else {
            panic!("there is no such library");
        };
        let reason = error.downcast::<Unavailable>().unwrap().to_string();
        assert!(reason.contains("libpmemobj1"), "{reason}");
    }

    #[test]
    fn a_failed_transaction_is_rolled_back() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = directory.path().join("pool");
        let mut pool = match Pool::create(&path, 16 << 20, 4096) {
            Ok(pool) => pool,
            Err(error) if error.is::<Unavailable>() => return eprintln!("skipped: {error}"),
            Err(error) => panic!("{error}"),
        };
        let word = pool.root().cast::<u64>();
        let store = |value: u64| {
            move |log: &Log<'_>| {
                log.add(word.cast(), 8)?;
                // SAFETY: the first word of the root object, which only this test uses.
                unsafe { word.write(value) };
                Ok(())
            }
        };
        pool.transaction(store(7)).unwrap();
        let failed = pool.transaction(|log| {
            store(8)(log)?;
            bail!("no")
        });
        assert_eq!(failed.unwrap_err().to_string(), "no");
        // SAFETY: as above.
        assert_eq!(unsafe { word.read() }, 7);
        let outside = pool.transaction(|log| log.add(std::ptr::from_ref(&path).cast(), 8));
        assert!(outside.unwrap_err().is::<Aborted>());
        pool.transaction(store(9)).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { word.read() }, 9);
    }
}
