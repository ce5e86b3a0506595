//! Creating, renaming and destroying objects.

use std::time::{SystemTime, UNIX_EPOCH};

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::{INLINE_RUNS, Inode, InodeKind, MAX_NAME_BYTES};
use aquifer_pool::format::run::MAX_RUN_PAGES;
use aquifer_pool::{PoolError, Transaction};
use aquifer_vm::fixed::{self, WINDOW};

use crate::access::Access;
use crate::error::{ObjectError, Result, text};
use crate::keys::{self, Keys};
use crate::objects::{ObjectInfo, Objects};
use crate::options::ObjectOptions;
use crate::shared::{content, overlapping};

/// How to create an object.
///
/// ```
/// # use aquifer_object::{CreateObject, Objects};
/// # use aquifer_pool::Pool;
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("pool");
/// # let pool = Pool::create(&path, 16 << 20)?;
/// # let objects = Objects::new(pool);
/// let made = CreateObject::new().heap(true).write_key("secret").create(&objects, "words", 1 << 20)?;
/// assert!(made.is_heap && made.needs_write_key && !made.needs_read_key);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct CreateObject<'a> {
    keys: Keys<'a>,
    relocatable: bool,
    heap: bool,
    address: Option<u64>,
    content: &'a [u8],
}

impl<'a> CreateObject<'a> {
    /// The defaults, which are those of [`Objects::create`]: plain bytes that need no key, at an
    /// address that never changes.
    pub fn new() -> CreateObject<'a> {
        CreateObject::default()
    }

    /// The key required to attach it for reading. Without a write key, writing requires it too.
    #[must_use]
    pub fn read_key(mut self, key: &'a (impl AsRef<[u8]> + ?Sized)) -> CreateObject<'a> {
        self.keys.read = Some(key.as_ref());
        self
    }

    /// The key required to attach it for writing, and to destroy, rename, resize or move it. It
    /// permits reading too.
    #[must_use]
    pub fn write_key(mut self, key: &'a (impl AsRef<[u8]> + ?Sized)) -> CreateObject<'a> {
        self.keys.write = Some(key.as_ref());
        self
    }

    /// Whether it may be moved to another address later. If so, no plain pointer into it, in the
    /// object or elsewhere, may outlive an attachment.
    #[must_use]
    pub fn relocatable(self, relocatable: bool) -> CreateObject<'a> {
        CreateObject { relocatable, ..self }
    }

    /// Whether it holds a heap ([`Attachment::heap`](crate::Attachment::heap)) instead of plain
    /// bytes.
    #[must_use]
    pub fn heap(self, heap: bool) -> CreateObject<'a> {
        CreateObject { heap, ..self }
    }

    /// The address it is attached at: a multiple of the page size inside [`WINDOW`]. By default a
    /// free random multiple of 2 MiB.
    #[must_use]
    pub fn address(self, address: u64) -> CreateObject<'a> {
        CreateObject { address: Some(address), ..self }
    }

    /// The first bytes of its content; those behind are zero. By default all are. The object is
    /// never seen without them, after a crash neither. Not for an object that holds a heap.
    ///
    /// ```
    /// # use aquifer_object::{CreateObject, Objects};
    /// # use aquifer_pool::Pool;
    /// # let directory = tempfile::tempdir()?;
    /// # let objects = Objects::new(Pool::create(directory.path().join("pool"), 16 << 20)?);
    /// CreateObject::new().content(b"header").create(&objects, "table", 1 << 20)?;
    /// assert_eq!(objects.attach("table")?.as_slice()?[..8], *b"header\0\0");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn content(self, content: &'a (impl AsRef<[u8]> + ?Sized)) -> CreateObject<'a> {
        CreateObject { content: content.as_ref(), ..self }
    }
}

/// Pages in 2 MiB. Objects of at least this size are aligned to it in the pool.
const HUGE_PAGES: u64 = (2 << 20) / PAGE_BYTES;

/// The alignment, in pages, of content of this size.
pub(crate) fn alignment_pages(pages: u64) -> u64 {
    if pages >= HUGE_PAGES { HUGE_PAGES } else { 1 }
}

/// Nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

fn parameter(what: &'static str, value: impl ToString, reason: &'static str) -> ObjectError {
    ObjectError::Parameter { what, value: value.to_string(), reason }
}

/// The number of pages for content of this size.
pub(crate) fn pages_for(size_bytes: u64) -> Result<u64> {
    let pages = size_bytes.div_ceil(PAGE_BYTES);
    if pages == 0 {
        return Err(parameter("the size", "0 bytes", "an object has at least one page"));
    }
    if pages > MAX_RUN_PAGES * INLINE_RUNS as u64 {
        let reason = "an object has less than 512 GiB; use several";
        return Err(parameter("the size", format!("{size_bytes} bytes"), reason));
    }
    Ok(pages)
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains(&0) {
        let reason = "it has between 1 and 255 bytes, and no NUL";
        return Err(parameter("the name", text(name), reason));
    }
    Ok(())
}

/// Checks that a requested address can be mapped.
pub(crate) fn check_address(address: u64, len_bytes: u64) -> Result<()> {
    let fits = address.is_multiple_of(PAGE_BYTES)
        && address >= WINDOW.start
        && address.checked_add(len_bytes).is_some_and(|end| end <= WINDOW.end);
    if fits {
        Ok(())
    } else {
        Err(parameter(
            "the address",
            format!("{address:#x}"),
            "it is a multiple of 4096 between 0x200000000000 and 0x500000000000, with the whole object inside",
        ))
    }
}

/// A random address with `len_bytes` free bytes, for the object `name`.
pub(crate) fn random_address(
    inodes: impl Iterator<Item = Inode>,
    name: &[u8],
    len_bytes: u64,
) -> Result<u64> {
    let taken: Vec<(u64, u64)> =
        inodes.map(|inode| (inode.address, content(&inode).len_bytes)).collect();
    fixed::random_base(len_bytes, &taken)
        .map_err(|source| ObjectError::Memory { name: text(name), source })
}

impl Objects {
    /// Creates an object of `size_bytes`, rounded up to whole pages and zeroed. Durable on return.
    ///
    /// # Errors
    /// [`ObjectError::Exists`], [`ObjectError::Parameter`]; [`ObjectError::Pool`], also if the pool
    /// is full.
    pub fn create(&self, name: impl AsRef<[u8]>, size_bytes: u64) -> Result<ObjectInfo> {
        CreateObject::new().create(self, name, size_bytes)
    }

    /// Destroys an object that no process has attached. If it has keys, the write key is required
    /// ([`ObjectOptions::key`]). Durable on return.
    ///
    /// # Errors
    /// As for [`Objects::attach_mut`]; nothing is destroyed then.
    pub fn destroy(&self, name: impl AsRef<[u8]>) -> Result<()> {
        ObjectOptions::new().destroy(self, name)
    }

    /// Renames an object that no process has attached. If it has keys, the write key is required
    /// ([`ObjectOptions::key`]). Durable on return.
    ///
    /// # Errors
    /// As for [`Objects::attach_mut`]; [`ObjectError::Exists`] if an object already has the new
    /// name.
    pub fn rename(&self, name: impl AsRef<[u8]>, new_name: impl AsRef<[u8]>) -> Result<()> {
        ObjectOptions::new().rename(self, name, new_name)
    }
}

impl CreateObject<'_> {
    /// [`Objects::create`] with these options.
    ///
    /// # Errors
    /// As for [`Objects::create`]; [`ObjectError::AddressOfAnother`].
    pub fn create(
        &self,
        objects: &Objects,
        name: impl AsRef<[u8]>,
        size_bytes: u64,
    ) -> Result<ObjectInfo> {
        let (name, shared) = (name.as_ref(), &objects.shared);
        check_name(name)?;
        let pages = pages_for(size_bytes)?;
        let len_bytes = pages * PAGE_BYTES;
        if let Some(address) = self.address {
            check_address(address, len_bytes)?;
        }
        if self.content.len() as u64 > len_bytes || (self.heap && !self.content.is_empty()) {
            let reason = "it fits into the object, and an object that holds a heap has none";
            let value = format!("{} bytes", self.content.len());
            return Err(parameter("the content of the new object", value, reason));
        }
        let exists = || ObjectError::Exists { name: text(name) };
        match shared.find(name) {
            Ok(_) => return Err(exists()),
            Err(ObjectError::NotFound { .. }) => {}
            Err(other) => return Err(other),
        }
        let keys = keys::hashes(self.keys)?;
        let reservation = shared.pool.reserve_zeroed(pages, alignment_pages(pages))?;
        let runs = reservation.runs().to_vec();
        if !self.content.is_empty() {
            let media = shared.pool.media();
            let start = reservation.whole().bytes().offset_bytes;
            // SAFETY: the pages are reserved: no inode refers to them yet. The transaction that
            // refers to them makes their bytes durable first.
            unsafe { media.write_at(start, self.content) }.map_err(PoolError::from)?;
        }
        shared.change(vec![reservation], |transaction| {
            if transaction.object_named(name).is_some() {
                return Err(exists());
            }
            let address = match self.address {
                None => random_address(transaction.inodes(), name, len_bytes)?,
                Some(address) => {
                    if let Some(other) = overlapping(transaction.inodes(), address, len_bytes, 0) {
                        let by = text(&other.name);
                        return Err(ObjectError::AddressOfAnother { address, len_bytes, by });
                    }
                    address
                }
            };
            let now_ns = now_ns();
            let inode = Inode {
                kind: InodeKind::Object,
                size_bytes: len_bytes,
                address,
                is_relocatable: self.relocatable,
                is_heap: self.heap,
                created_ns: now_ns,
                changed_ns: now_ns,
                runs: runs.clone(),
                keys,
                name: name.to_vec(),
                ..transaction.free_inode()?
            };
            transaction.put(inode);
            Ok(())
        })?;
        objects.info(name)
    }
}

impl ObjectOptions<'_> {
    /// [`Objects::destroy`] with these options.
    ///
    /// # Errors
    /// As for [`Objects::destroy`].
    pub fn destroy(&self, objects: &Objects, name: impl AsRef<[u8]>) -> Result<()> {
        let (inode, lock) = objects.shared.claim(name.as_ref(), Access::Write, self.key)?;
        let pool = &objects.shared.pool;
        let change = |transaction: &mut Transaction<'_>| {
            transaction.put(Inode::free(inode.number, inode.generation));
            Ok::<(), PoolError>(())
        };
        // SAFETY: the object's write lock is held, so it is attached nowhere.
        unsafe { pool.change(Vec::new(), change)? };
        // From here on the inode number may belong to another object, which may be attached.
        drop(lock);
        Ok(pool.sync()?)
    }

    /// [`Objects::rename`] with these options.
    ///
    /// # Errors
    /// As for [`Objects::rename`].
    pub fn rename(
        &self,
        objects: &Objects,
        name: impl AsRef<[u8]>,
        new_name: impl AsRef<[u8]>,
    ) -> Result<()> {
        let new_name = new_name.as_ref();
        check_name(new_name)?;
        let (inode, _lock) = objects.shared.claim(name.as_ref(), Access::Write, self.key)?;
        if inode.name == new_name {
            return Ok(());
        }
        objects.shared.change(Vec::new(), |transaction| {
            if transaction.object_named(new_name).is_some() {
                return Err(ObjectError::Exists { name: text(new_name) });
            }
            transaction.put(Inode {
                name: new_name.to_vec(),
                changed_ns: now_ns(),
                ..inode.clone()
            });
            Ok(())
        })
    }
}
