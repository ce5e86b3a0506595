//! The objects of a pool.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::Inode;
use aquifer_pool::{Holder, Pool};
use aquifer_vm::ProcessMark;
use aquifer_vm::dirty::Stores;

use crate::access::Access;
use crate::attach::Attached;
use crate::attachment::Attachment;
use crate::committer::Committer;
use crate::completion::PendingPsync;
use crate::error::{Result, text};
use crate::name::ObjectName;
use crate::options::ObjectOptions;
use crate::psync;
use crate::shared::{Shared, content};
use crate::states::{ObjectState, Unapplied};

/// The objects of an open pool. Cheap to clone; can be shared between threads.
#[derive(Clone)]
pub struct Objects {
    pub(crate) shared: Arc<Shared>,
    /// Attachments made by [`ObjectOptions::attach_raw_mut`] and its like, by address.
    pub(crate) raw: Arc<Mutex<BTreeMap<u64, Arc<Attachment>>>>,
}

impl fmt::Debug for Objects {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Objects").field("pool", &self.shared.pool).finish_non_exhaustive()
    }
}

/// A snapshot of an object's metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectInfo {
    /// Its name.
    pub name: ObjectName,
    /// The number of its inode.
    pub number: u64,
    /// Its length in bytes, a multiple of the page size.
    pub size_bytes: u64,
    /// The address it is attached at.
    pub address: u64,
    /// Whether it may be moved to another address.
    pub is_relocatable: bool,
    /// Whether its content is a heap.
    pub is_heap: bool,
    /// Whether attaching for reading requires a key.
    pub needs_read_key: bool,
    /// Whether attaching for writing requires a key.
    pub needs_write_key: bool,
    /// When it was created, in nanoseconds since 1970.
    pub created_ns: u64,
    /// When its metadata was last changed, in nanoseconds since 1970. Changes of its content do not
    /// count.
    pub changed_ns: u64,
    /// Where its content begins in the pool, in bytes.
    pub media_offset_bytes: u64,
    /// Bytes of the pool reserved for its large commits.
    pub shadow_bytes: u64,
    /// Its state.
    pub state: ObjectState,
    /// The processes that have it attached. Readers that opened the pool read-only are not listed.
    pub holders: Vec<Holder>,
}

impl Objects {
    /// The objects of a pool.
    pub fn new(pool: Pool) -> Objects {
        let shared = Shared { committer: Committer::new(), pool, process: ProcessMark::new() };
        Objects { shared: Arc::new(shared), raw: Arc::default() }
    }

    /// Opens a pool for its objects, for reading and writing; with other options:
    /// `Objects::new(Pool::options().read_only(true).open(path)?)`.
    ///
    /// # Errors
    /// As for [`Pool::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Objects> {
        Ok(Objects::new(Pool::open(path)?))
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// Attaches an object for reading. Other attachments for reading may exist, none for writing.
    /// [`ObjectOptions`] attaches with a key or with other settings.
    ///
    /// # Errors
    /// [`ObjectError::NotFound`](crate::ObjectError::NotFound), [`ObjectError::Destroyed`](crate::ObjectError::Destroyed), [`ObjectError::WrongKey`](crate::ObjectError::WrongKey),
    /// [`ObjectError::Attached`](crate::ObjectError::Attached), [`ObjectError::AttachedHere`](crate::ObjectError::AttachedHere), [`ObjectError::AddressTaken`](crate::ObjectError::AddressTaken);
    /// [`ObjectError::Memory`](crate::ObjectError::Memory), also where a sanitizer owns the addresses; [`ObjectError::Pool`](crate::ObjectError::Pool).
    pub fn attach(&self, name: impl AsRef<[u8]>) -> Result<Attachment> {
        ObjectOptions::new().attach(self, name)
    }

    /// Attaches an object for writing. No other attachment may exist.
    ///
    /// # Errors
    /// As for [`Objects::attach`]; [`ObjectError::ReadKeyForWriting`](crate::ObjectError::ReadKeyForWriting).
    pub fn attach_mut(&self, name: impl AsRef<[u8]>) -> Result<Attachment> {
        ObjectOptions::new().attach_mut(self, name)
    }

    /// [`Attachment::psync`] of several objects, atomic over all of them, with one write and one
    /// sync.
    ///
    /// # Errors
    /// As for [`Attachment::psync`]; [`ObjectError::SeveralPools`](crate::ObjectError::SeveralPools) if they were not all attached
    /// through one handle.
    pub fn psync_many(&self, attachments: &mut [&mut Attachment]) -> Result<()> {
        let attached: Vec<&Attached> = attachments.iter().map(|one| &one.attached).collect();
        psync::psync(&attached, Stores::Excluded)
    }

    /// [`Objects::psync_many`] for programs whose threads share the attachments.
    ///
    /// # Errors
    /// As for [`Objects::psync_many`].
    ///
    /// # Safety
    /// As for [`Attachment::psync_shared`], for each of them.
    pub unsafe fn psync_many_shared(&self, attachments: &[&Attachment]) -> Result<()> {
        let attached: Vec<&Attached> = attachments.iter().map(|one| &one.attached).collect();
        psync::psync(&attached, Stores::Excluded)
    }

    /// [`Attachment::psync_begin`] of several objects, atomic over all of them.
    ///
    /// # Errors
    /// As for [`Objects::psync_many`].
    pub fn psync_many_begin(&self, attachments: &mut [&mut Attachment]) -> Result<PendingPsync> {
        let attached: Vec<&Attached> = attachments.iter().map(|one| &one.attached).collect();
        psync::psync_begin(&self.shared, &attached)
    }

    /// [`Objects::psync_many_begin`] for programs whose threads share the attachments.
    ///
    /// # Errors
    /// As for [`Objects::psync_many`].
    ///
    /// # Safety
    /// As for [`Attachment::psync_begin_shared`], for each of them.
    pub unsafe fn psync_many_begin_shared(
        &self,
        attachments: &[&Attachment],
    ) -> Result<PendingPsync> {
        let attached: Vec<&Attached> = attachments.iter().map(|one| &one.attached).collect();
        psync::psync_begin(&self.shared, &attached)
    }

    /// All objects, by name.
    ///
    /// # Errors
    /// [`ObjectError::Pool`](crate::ObjectError::Pool), [`ObjectError::Forked`](crate::ObjectError::Forked).
    pub fn list(&self) -> Result<Vec<ObjectInfo>> {
        let mut inodes = self.shared.objects()?;
        inodes.sort_by(|one, other| one.name.cmp(&other.name));
        let unapplied = Unapplied::of(&self.shared.pool)?;
        Ok(inodes.into_iter().map(|inode| self.describe(inode, &unapplied)).collect())
    }

    /// One object.
    ///
    /// # Errors
    /// [`ObjectError::NotFound`](crate::ObjectError::NotFound), [`ObjectError::Pool`](crate::ObjectError::Pool), [`ObjectError::Forked`](crate::ObjectError::Forked).
    pub fn info(&self, name: impl AsRef<[u8]>) -> Result<ObjectInfo> {
        let inode = self.shared.find(name.as_ref())?;
        let unapplied = Unapplied::of(&self.shared.pool)?;
        Ok(self.describe(inode, &unapplied))
    }

    /// The current state of an object.
    ///
    /// # Errors
    /// As for [`Objects::info`].
    pub fn state_of(&self, name: impl AsRef<[u8]>) -> Result<ObjectState> {
        self.info(name).map(|info| info.state)
    }

    fn describe(&self, inode: Inode, unapplied: &Unapplied) -> ObjectInfo {
        let pool = &self.shared.pool;
        let holders = pool.holders(inode.number);
        let media = content(&inode);
        ObjectInfo {
            name: text(&inode.name),
            number: inode.number,
            size_bytes: media.len_bytes,
            address: inode.address,
            is_relocatable: inode.is_relocatable,
            is_heap: inode.is_heap,
            needs_read_key: inode.keys.read.is_some(),
            needs_write_key: inode.keys.read.is_some() || inode.keys.write.is_some(),
            created_ns: inode.created_ns,
            changed_ns: inode.changed_ns,
            media_offset_bytes: media.offset_bytes,
            shadow_bytes: inode.shadow.pages * PAGE_BYTES,
            state: ObjectState::of(pool, &inode, &holders, unapplied),
            holders,
        }
    }
}

impl ObjectOptions<'_> {
    /// [`Objects::attach`] with these options.
    ///
    /// # Errors
    /// As for [`Objects::attach`].
    pub fn attach(&self, objects: &Objects, name: impl AsRef<[u8]>) -> Result<Attachment> {
        self.attach_for(objects, name.as_ref(), Access::Read)
    }

    /// [`Objects::attach_mut`] with these options.
    ///
    /// # Errors
    /// As for [`Objects::attach_mut`].
    pub fn attach_mut(&self, objects: &Objects, name: impl AsRef<[u8]>) -> Result<Attachment> {
        self.attach_for(objects, name.as_ref(), Access::Write)
    }

    fn attach_for(&self, objects: &Objects, name: &[u8], access: Access) -> Result<Attachment> {
        let attached = Attached::attach(&objects.shared, name, access, self)?;
        Ok(Attachment { heap: None, attached })
    }
}
