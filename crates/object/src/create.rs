//! Creating, renaming and destroying objects.

use std::time::{SystemTime, UNIX_EPOCH};

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::{INLINE_RUNS, Inode, InodeKind, MAX_NAME_BYTES};
use aquifer_pool::format::run::MAX_RUN_PAGES;
use aquifer_pool::{PoolError, Transaction};
use aquifer_vm::fixed::{self, WINDOW};

use crate::access::Access;
use crate::attach::content;
use crate::error::{ObjectError, Result, text};
use crate::keys::{self, Keys};
use crate::objects::{ObjectInfo, Objects, overlapping};

/// How to create an object.
#[derive(Debug, Clone, Copy, Default)]
pub struct CreateObject<'a> {
    /// The keys required to attach it.
    pub keys: Keys<'a>,
    /// Whether it may be moved to another address later. If so, no plain pointer into it, in the
    /// object or elsewhere, may outlive an attachment.
    pub relocatable: bool,
    /// Whether it holds a heap ([`Attachment::heap`](crate::Attachment::heap)) instead of plain
    /// bytes.
    pub heap: bool,
    /// The address it is attached at: a multiple of the page size inside [`WINDOW`]. By default a
    /// free random multiple of 2 MiB.
    pub address: Option<u64>,
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
    /// [`ObjectError::Exists`], [`ObjectError::Parameter`], [`ObjectError::AddressOfAnother`];
    /// [`ObjectError::Pool`], also if the pool is full.
    pub fn create(
        &self,
        name: impl AsRef<[u8]>,
        size_bytes: u64,
        options: &CreateObject<'_>,
    ) -> Result<ObjectInfo> {
        let (name, shared) = (name.as_ref(), &self.shared);
        check_name(name)?;
        let pages = pages_for(size_bytes)?;
        let len_bytes = pages * PAGE_BYTES;
        if let Some(address) = options.address {
            check_address(address, len_bytes)?;
        }
        let exists = || ObjectError::Exists { name: text(name) };
        match shared.find(name) {
            Ok(_) => return Err(exists()),
            Err(ObjectError::NotFound { .. }) => {}
            Err(other) => return Err(other),
        }
        let keys = keys::hashes(options.keys)?;
        let reservation = shared.pool.reserve_zeroed(pages, alignment_pages(pages))?;
        let runs = reservation.runs().to_vec();
        shared.change(vec![reservation], |transaction| {
            if transaction.object_named(name).is_some() {
                return Err(exists());
            }
            let address = match options.address {
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
                is_relocatable: options.relocatable,
                is_heap: options.heap,
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
        self.info(name)
    }

    /// Destroys an object. Requires the write key, and that no process has it attached. Durable on
    /// return.
    ///
    /// # Errors
    /// As for [`Objects::attach`]; nothing is destroyed then.
    pub fn destroy(&self, name: impl AsRef<[u8]>, key: Option<&[u8]>) -> Result<()> {
        let (inode, lock) = self.shared.claim(name.as_ref(), Access::Write, key)?;
        let pool = &self.shared.pool;
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

    /// Renames an object. Requires the write key, and that no process has it attached. Durable on
    /// return.
    ///
    /// # Errors
    /// As for [`Objects::attach`]; [`ObjectError::Exists`] if an object already has the new name.
    pub fn rename(
        &self,
        name: impl AsRef<[u8]>,
        new_name: impl AsRef<[u8]>,
        key: Option<&[u8]>,
    ) -> Result<()> {
        let new_name = new_name.as_ref();
        check_name(new_name)?;
        let (inode, _lock) = self.shared.claim(name.as_ref(), Access::Write, key)?;
        if inode.name == new_name {
            return Ok(());
        }
        self.shared.change(Vec::new(), |transaction| {
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
