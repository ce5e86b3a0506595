//! Persistent objects: named memory at a fixed address, made durable by psync; and heaps in them.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::future::Future;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer::object::heap::Quiet;
use aquifer::{
    Access, Attachment, CreateObject, HeapError, ObjectError, ObjectHeap, ObjectInfo,
    ObjectOptions, ObjectState, Objects,
};
use aquifer_vm::PerProcess;

use crate::call::{Failure, Result, call};
use crate::memory::{Place, handle, list, put_optional, take, text, usable};
use crate::pool::aq_pool;
use crate::range::{aq_range, ranges};
use crate::ready::{add, aq_ready};
use crate::sized::{SizedPlace, sized};

/// An attached object.
pub struct aq_object {
    attached: Arc<Attached>,
}

struct Attached {
    /// In `attachment`, where it stays as long as that lives; `None` if the object holds no heap.
    heap: Option<NonNull<ObjectHeap>>,
    attachment: Attachment,
    objects: Objects,
}

// SAFETY: the heap is borrowed from the attachment; both may be used from any thread.
unsafe impl Send for Attached {}
// SAFETY: as above; only shared references are made.
unsafe impl Sync for Attached {}

impl Attached {
    fn new(objects: &Objects, mut attachment: Attachment, is_heap: bool) -> Result<Arc<Attached>> {
        if !is_heap {
            let objects = objects.clone();
            return Ok(Arc::new(Attached { heap: None, attachment, objects }));
        }
        // The attachment has its heap before it moves to where both stay.
        attachment.heap()?;
        let mut attached = Arc::new(Attached { heap: None, attachment, objects: objects.clone() });
        let only = Arc::get_mut(&mut attached).expect("there is one reference");
        let heap = NonNull::from(&*only.attachment.heap()?);
        only.heap = Some(heap);
        Ok(attached)
    }

    fn heap(&self) -> Result<&ObjectHeap> {
        let heap = self
            .heap
            .ok_or_else(|| Failure::from(ObjectError::NoHeap { name: self.attachment.name() }))?;
        // SAFETY: it lies in the attachment, which no one borrows mutably after `new`.
        Ok(unsafe { heap.as_ref() })
    }

    /// Stops allocations while a psync captures what was stored.
    fn quiesce(&self) -> Result<Option<Quiet<'_>>> {
        Ok(match self.heap {
            Some(_) if self.attachment.access() == Access::Write => Some(self.heap()?.quiesce()?),
            _ => None,
        })
    }

    fn psync(&self) -> Result {
        let _quiet = self.quiesce()?;
        // SAFETY: documented: no thread stores to the object meanwhile.
        Ok(unsafe { self.attachment.psync_shared() }?)
    }
}

/// The options of `aq_object_create`. Initialise it with `AQ_OBJECT_OPTIONS_INIT`; 0 and NULL are the
/// defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_object_options {
    /// `sizeof(aq_object_options)`.
    pub size: usize,
    /// Other than 0: it holds a heap (`aq_heap_alloc`) instead of plain bytes.
    pub heap: c_int,
    /// Other than 0: it may be moved to another address later.
    pub relocatable: c_int,
    /// Where it is attached; default a free random address.
    pub address: u64,
    /// Required to attach it for reading. Copied.
    pub read_key: *const c_char,
    /// Required to attach it for writing, to destroy, rename, resize and move it. Copied.
    pub write_key: *const c_char,
    /// The first `content_size` bytes of its content; those behind are zero. Not with `heap`. Copied.
    pub content: *const c_void,
    /// The number of these bytes; default 0.
    pub content_size: usize,
}
sized!(aq_object_options {
    heap: c_int,
    relocatable: c_int,
    address: u64,
    read_key: *const c_char,
    write_key: *const c_char,
    content: *const c_void,
    content_size: usize,
});

/// What is known of an object. Initialise it with `AQ_OBJECT_INFO_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_object_info {
    /// `sizeof(aq_object_info)`.
    pub size: usize,
    /// Its length in bytes, a multiple of 4096.
    pub size_bytes: u64,
    /// Where it is attached, in every process.
    pub address: u64,
    /// When it was created, in nanoseconds since 1970.
    pub created_ns: u64,
    /// When its metadata was changed last.
    pub changed_ns: u64,
    /// 'D' detached, 'R' attached for reading, 'W' for writing, 'P' a commit is being written, 'C' a
    /// commit is durable and not yet applied.
    pub state: u32,
    /// A combination of `AQ_OBJECT_…`.
    pub flags: u32,
}
sized!(aq_object_info {
    size_bytes: u64,
    address: u64,
    created_ns: u64,
    changed_ns: u64,
    state: u32,
    flags: u32,
});

/// `aq_object_info::flags`: it holds a heap.
pub const AQ_OBJECT_HEAP: u32 = 1;
/// `aq_object_info::flags`: it may be moved.
pub const AQ_OBJECT_RELOCATABLE: u32 = 2;
/// `aq_object_info::flags`: reading needs a key.
pub const AQ_OBJECT_NEEDS_READ_KEY: u32 = 4;
/// `aq_object_info::flags`: writing needs a key.
pub const AQ_OBJECT_NEEDS_WRITE_KEY: u32 = 8;

impl From<&ObjectInfo> for aq_object_info {
    fn from(info: &ObjectInfo) -> aq_object_info {
        let flags = [
            (info.is_heap, AQ_OBJECT_HEAP),
            (info.is_relocatable, AQ_OBJECT_RELOCATABLE),
            (info.needs_read_key, AQ_OBJECT_NEEDS_READ_KEY),
            (info.needs_write_key, AQ_OBJECT_NEEDS_WRITE_KEY),
        ];
        aq_object_info {
            size: 0,
            size_bytes: info.size_bytes,
            address: info.address,
            created_ns: info.created_ns,
            changed_ns: info.changed_ns,
            state: u32::from(ObjectState::letter(info.state)),
            flags: flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum(),
        }
    }
}

/// # Safety
/// As for [`text`].
unsafe fn key<'a>(pointer: *const c_char, name: &str) -> Result<Option<&'a [u8]>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: guaranteed by the caller.
    Ok(Some(unsafe { text(pointer, name) }?.to_bytes()))
}

/// # Safety
/// As for [`text`].
unsafe fn with_key<'a>(pointer: *const c_char) -> Result<ObjectOptions<'a>> {
    // SAFETY: guaranteed by the caller.
    let key = unsafe { key(pointer, "key") }?;
    Ok(key.map_or(ObjectOptions::new(), |key| ObjectOptions::new().key(key)))
}

/// Creates an object of `size_bytes`, rounded up to pages, zeroed but for the content that `options` names:
/// the object is never seen without it, after a crash neither. `options` and `info` may be null; `info`
/// gets what `aq_object_get_info` says.
///
/// Threads: any. Errors: -EEXIST, -EINVAL, -ENOSPC, -EROFS. Durable: on return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_create(
    pool: *mut aq_pool,
    name: *const c_char,
    size_bytes: u64,
    options: *const aq_object_options,
    info: *mut aq_object_info,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name) = unsafe { (handle(pool, "pool")?, text(name, "name")?) };
        // SAFETY: documented.
        let given = unsafe { crate::sized::options(options) }?;
        let place = if info.is_null() {
            None
        } else {
            // SAFETY: documented.
            Some(unsafe { SizedPlace::new(info, "info") }?)
        };
        // SAFETY: documented.
        let (read_key, write_key) =
            unsafe { (key(given.read_key, "read_key")?, key(given.write_key, "write_key")?) };
        // SAFETY: documented.
        let content = unsafe { list(given.content.cast::<u8>(), given.content_size, "content") }?;
        let mut options = CreateObject::new()
            .heap(given.heap != 0)
            .relocatable(given.relocatable != 0)
            .content(content);
        if given.address != 0 {
            options = options.address(given.address);
        }
        if let Some(key) = read_key {
            options = options.read_key(key);
        }
        if let Some(key) = write_key {
            options = options.write_key(key);
        }
        let made = options.create(&pool.objects, name.to_bytes(), size_bytes)?;
        if let Some(place) = place {
            place.put(&(&made).into());
        }
        Ok(())
    })
}

/// Destroys an object that no process has attached. `key` may be null.
///
/// Threads: any. Errors: -ENOENT, -EACCES for a wrong key, -EBUSY, -EROFS. Durable: on return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_destroy(
    pool: *mut aq_pool,
    name: *const c_char,
    key: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name, options) =
            unsafe { (handle(pool, "pool")?, text(name, "name")?, with_key(key)?) };
        Ok(options.destroy(&pool.objects, name.to_bytes())?)
    })
}

/// Renames an object that no process has attached. `key` may be null.
///
/// Threads: any. Errors: as `aq_object_destroy`; -EEXIST. Durable: on return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_rename(
    pool: *mut aq_pool,
    name: *const c_char,
    new_name: *const c_char,
    key: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name, options) =
            unsafe { (handle(pool, "pool")?, text(name, "name")?, with_key(key)?) };
        // SAFETY: documented.
        let new_name = unsafe { text(new_name, "new_name") }?;
        Ok(options.rename(&pool.objects, name.to_bytes(), new_name.to_bytes())?)
    })
}

/// Makes an object that no process has attached larger or smaller. `key` may be null; `address`, which
/// may be null, gets its address, which changes only if it is relocatable.
///
/// Threads: any. Errors: as `aq_object_destroy`; -EINVAL if it must move and cannot, or holds a heap and
/// would shrink; -ENOSPC. Durable: on return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_resize(
    pool: *mut aq_pool,
    name: *const c_char,
    size_bytes: u64,
    key: *const c_char,
    address: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name, options) =
            unsafe { (handle(pool, "pool")?, text(name, "name")?, with_key(key)?) };
        let resized = options.resize(&pool.objects, name.to_bytes(), size_bytes)?;
        // SAFETY: documented.
        unsafe { put_optional(address, resized.address) };
        Ok(())
    })
}

/// Moves a relocatable object that no process has attached to `*address`, or to a free random address if
/// that is 0; `*address` gets where it is then. `key` may be null.
///
/// Threads: any. Errors: as `aq_object_destroy`; -EINVAL if it is not relocatable, or the address is none
/// for objects; -EEXIST if another object lies there. Durable: on return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_relocate(
    pool: *mut aq_pool,
    name: *const c_char,
    key: *const c_char,
    address: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name, options) =
            unsafe { (handle(pool, "pool")?, text(name, "name")?, with_key(key)?) };
        // SAFETY: documented.
        let place = unsafe { Place::new(address, "address") }?;
        // SAFETY: documented: it is initialised.
        let wanted = Some(unsafe { address.read() }).filter(|&address| address != 0);
        place.put(options.relocate(&pool.objects, name.to_bytes(), wanted)?.address);
        Ok(())
    })
}

/// Fills `info` with what is known of an object.
///
/// Threads: any. Errors: -ENOENT, -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_get_info(
    pool: *mut aq_pool,
    name: *const c_char,
    info: *mut aq_object_info,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (pool, name, place) =
            unsafe { (handle(pool, "pool")?, text(name, "name")?, SizedPlace::new(info, "info")?) };
        place.put(&(&pool.objects.info(name.to_bytes())?).into());
        Ok(())
    })
}

/// Called for an object: its name, which may contain any bytes and is not ended by a zero, and what is
/// known of it; both are valid during the call. A value other than 0 ends the list. It must not throw,
/// longjmp out, call pthread_exit, or fork.
pub type aq_object_fn = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        name: *const c_char,
        name_size: usize,
        info: *const aq_object_info,
    ) -> c_int,
>;

/// Calls `visit` for each object of a pool, by name. Returns 0, the value other than 0 with which
/// `visit` ended it, or an error.
///
/// Threads: any; `visit` runs in the calling one. Errors: -EINVAL, -EIO, -EUCLEAN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_list(
    pool: *mut aq_pool,
    visit: aq_object_fn,
    context: *mut c_void,
) -> c_int {
    crate::call::visit(|ended| {
        // SAFETY: documented.
        let pool = unsafe { handle(pool, "pool") }?;
        let visit = visit.ok_or_else(|| Failure::invalid("`visit` is null"))?;
        for object in pool.objects.list()? {
            let mut info = aq_object_info::from(&object);
            info.size = size_of::<aq_object_info>();
            let name = object.name.as_bytes();
            // SAFETY: the program's own function.
            *ended = unsafe { visit(context, name.as_ptr().cast(), name.len(), &info) };
            if *ended != 0 {
                break;
            }
        }
        Ok(())
    })
}

/// Attaches an object, and creates its heap at the first time for writing if it holds one; `*object` is
/// null if it fails. `writable`, if it is not 0, excludes all other attachments; otherwise there may
/// be others for reading. `key` may be null.
///
/// Threads: any. Errors: -ENOENT, -EACCES for a wrong key, -EBUSY if it is attached otherwise or its
/// addresses are taken, -EROFS, -EUCLEAN for a damaged heap, -EOPNOTSUPP under ThreadSanitizer,
/// which owns the addresses. Frees: the caller, by `aq_object_detach`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_attach(
    pool: *mut aq_pool,
    name: *const c_char,
    writable: c_int,
    key: *const c_char,
    object: *mut *mut aq_object,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(object, "object") }?;
        // SAFETY: documented.
        let attached = unsafe { attach(pool, name, writable != 0, with_key(key)?) }?;
        place.give(aq_object { attached });
        Ok(())
    })
}

/// The options of `aq_object_attach_with`. Initialise it with `AQ_ATTACH_OPTIONS_INIT`; 0 and NULL are the
/// defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_attach_options {
    /// `sizeof(aq_attach_options)`.
    pub size: usize,
    /// 1 for writing, 0 for reading.
    pub writable: u64,
    /// The object's key, if it has one. Copied.
    pub key: *const c_char,
    /// Memory for copies of pages that are kept from one psync to the next, in bytes; stores between two
    /// psyncs are not bounded by it. Default: a quarter of the machine's.
    pub shadow_budget_bytes: u64,
}
sized!(aq_attach_options { writable: u64, key: *const c_char, shadow_budget_bytes: u64 });

/// As `aq_object_attach`, with more options.
///
/// Threads: any. Errors: as `aq_object_attach`; -E2BIG for an option of a later version. Frees: the
/// caller, by `aq_object_detach`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_attach_with(
    pool: *mut aq_pool,
    name: *const c_char,
    options: *const aq_attach_options,
    object: *mut *mut aq_object,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(object, "object") }?;
        // SAFETY: documented.
        let given = unsafe { crate::sized::options(options) }?;
        // SAFETY: documented.
        let mut options = unsafe { with_key(given.key) }?;
        if given.shadow_budget_bytes != 0 {
            options = options.shadow_budget_bytes(given.shadow_budget_bytes);
        }
        // SAFETY: documented.
        let attached = unsafe { attach(pool, name, given.writable != 0, options) }?;
        place.give(aq_object { attached });
        Ok(())
    })
}

/// # Safety
/// As for [`handle`] and [`text`].
unsafe fn attach(
    pool: *mut aq_pool,
    name: *const c_char,
    writable: bool,
    options: ObjectOptions<'_>,
) -> Result<Arc<Attached>> {
    // SAFETY: guaranteed by the caller.
    let (pool, name) = unsafe { (handle(pool, "pool")?, text(name, "name")?) };
    let (objects, name) = (&pool.objects, name.to_bytes());
    let attachment = if writable {
        options.attach_mut(objects, name)?
    } else {
        options.attach(objects, name)?
    };
    // Nothing that is attached changes its kind.
    let is_heap = objects.info(name)?.is_heap;
    Attached::new(objects, attachment, is_heap)
}

/// Detaches an object and frees the handle, also if it fails; null is fine. Stores since the last psync
/// are lost. Waits for commits under way.
///
/// Threads: none may be in a call with this handle, or use the memory. Errors: -EIO if a psync failed
/// and no later one has committed its pages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_detach(object: *mut aq_object) -> c_int {
    call(|| {
        if object.is_null() {
            return Ok(());
        }
        // SAFETY: documented.
        let object = unsafe { take(object, "object") }?;
        detach(object.attached)
    })
}

fn detach(attached: Arc<Attached>) -> Result {
    // With a psync in another thread, the last one detaches: exactly one of them gets it here.
    Arc::into_inner(attached).map_or(Ok(()), |attached| Ok(attached.attachment.detach()?))
}

/// The first byte of an object; null if `object` is null. It is at the same address in every process
/// and after every restart, so pointers in it stay valid.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_data(object: *mut aq_object) -> *const c_void {
    // SAFETY: documented.
    unsafe { usable(object) }
        .map_or(std::ptr::null(), |object| object.attached.attachment.start().as_ptr().cast())
}

/// The first byte of an object, to load and store; null if it is attached for reading, or `object` is
/// null. Otherwise as `aq_object_data`.
///
/// Threads: any. Durable: stores before a call of `aq_object_psync` that returns 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_data_mut(object: *mut aq_object) -> *mut c_void {
    // SAFETY: documented.
    unsafe { usable(object) }
        .map(|object| &object.attached.attachment)
        .filter(|attachment| attachment.access() == Access::Write)
        .map_or(std::ptr::null_mut(), |attachment| attachment.start().as_ptr().cast())
}

/// The length of an object in bytes. 0 if `object` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_len(object: *mut aq_object) -> u64 {
    // SAFETY: documented.
    unsafe { usable(object) }.map_or(0, |object| object.attached.attachment.len_bytes())
}

/// Makes everything stored to an object so far durable, all or nothing: after a crash it has the content
/// of this psync or, if the call had not returned, possibly that of the previous one. Does nothing for
/// one attached for reading.
///
/// Threads: any, but none may store to the object during the call; allocations and frees of other
/// threads in its heap wait. Durable: every store before the call, when it returns 0. Errors: -ENOSPC
/// if the commit is too large for the log and the pool is full; -EIO if the media failed: the pool is
/// read-only from then on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_psync(object: *mut aq_object) -> c_int {
    call(|| {
        // SAFETY: documented.
        unsafe { handle(object, "object") }?.attached.psync()
    })
}

/// Undoes every store to an object since its last psync, with which psyncs count that are under way: it
/// has the content that a crash would leave. Does nothing for one without a heap that is attached for
/// reading. If it fails, each page has the content of before or after, and another call undoes the rest.
///
/// Threads: any, but none may use the memory of the object during the call. Errors: -EINVAL if it holds a
/// heap, which is detached and attached instead; -EIO, also if an earlier psync failed by the media; -ENOMEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_rollback(object: *mut aq_object) -> c_int {
    call(|| {
        // SAFETY: documented.
        let attached = unsafe { &handle(object, "object")?.attached };
        // SAFETY: documented: no thread uses the object meanwhile.
        unsafe { attached.attachment.rollback_shared() }.map_err(|error| match error {
            ObjectError::HoldsHeap { .. } => Failure::invalid(
                "the object holds a heap: detach it without a psync, and attach it again",
            ),
            error => error.into(),
        })
    })
}

/// As `aq_object_psync`, without waiting for the media: the call captures what was stored, and `ready`
/// gets `token` when it is durable. The object may be stored to again when the call has returned.
///
/// Threads: any, but none may store to the object during the call. Errors: those known at the capture;
/// others with the completion. Durable: every store before the call, when the result of the completion
/// is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_psync_async(
    object: *mut aq_object,
    ready: *mut aq_ready,
    token: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let attached = &unsafe { handle(object, "object") }?.attached;
        let start = || -> Result<Box<dyn Future<Output = _> + Send>> {
            let _quiet = attached.quiesce()?;
            // SAFETY: documented: no thread stores to the object during the call.
            Ok(Box::new(unsafe { attached.attachment.psync_begin_shared() }?))
        };
        // SAFETY: documented.
        unsafe { add::<ObjectError>(ready, token, start) }
    })
}

/// Makes the bytes of `count` ranges durable, all or nothing, and no others: for programs that know
/// where they have stored. Costs one write, whatever the length of the object.
///
/// Threads: any, but none may store to these bytes during the call. Durable: these bytes, when it
/// returns 0. Errors: -EINVAL outside of the object or for one that holds a heap; -ENOSPC if it is too
/// much for the log; as `aq_object_psync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_psync_ranges(
    object: *mut aq_object,
    list: *const aq_range,
    count: usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (object, ranges) = unsafe { (handle(object, "object")?, ranges(list, count)?) };
        // SAFETY: documented: no thread stores there meanwhile.
        Ok(unsafe { object.attached.attachment.psync_ranges_shared(&ranges) }?)
    })
}

/// `aq_object_psync` of `count` objects of one pool handle: all of them or none, with one write. One
/// that is listed twice counts once.
///
/// Threads: any, but none may store to these objects during the call. Durable: every store to them
/// before the call, when it returns 0. Errors: as `aq_object_psync`; -EINVAL for several pools.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_objects_psync(objects: *const *mut aq_object, count: usize) -> c_int {
    call(|| {
        // SAFETY: documented.
        let Some(several) = unsafe { Several::new(objects, count) }? else { return Ok(()) };
        let _quiet = several.quiesce()?;
        // SAFETY: documented: no thread stores to the objects meanwhile.
        Ok(unsafe { several.objects().psync_many_shared(&several.attachments()) }?)
    })
}

/// As `aq_objects_psync`, without waiting for the media: the call captures what was stored, and `ready`
/// gets `token` when all of it is durable. The objects may be stored to again when the call has returned.
///
/// Threads: any, but none may store to these objects during the call. Errors: those known at the capture,
/// -EINVAL also for no objects; others with the completion. Durable: every store to them before the call,
/// when the result of the completion is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_objects_psync_async(
    objects: *const *mut aq_object,
    count: usize,
    ready: *mut aq_ready,
    token: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let several = unsafe { Several::new(objects, count) }?;
        let several = several.ok_or_else(|| Failure::invalid("`objects` is empty"))?;
        let start = || -> Result<Box<dyn Future<Output = _> + Send>> {
            let _quiet = several.quiesce()?;
            let attachments = several.attachments();
            // SAFETY: documented: no thread stores to the objects during the call.
            Ok(Box::new(unsafe { several.objects().psync_many_begin_shared(&attachments) }?))
        };
        // SAFETY: documented.
        unsafe { add::<ObjectError>(ready, token, start) }
    })
}

/// Objects of one psync, by address, each once: heaps are stopped in this order, or two threads could
/// wait for each other.
struct Several<'a>(Vec<&'a Attached>);

impl<'a> Several<'a> {
    /// `None` if there are none.
    ///
    /// # Safety
    /// As for [`list`], and for [`handle`] of each.
    unsafe fn new(objects: *const *mut aq_object, count: usize) -> Result<Option<Several<'a>>> {
        // SAFETY: guaranteed by the caller.
        let handles = unsafe { list(objects, count, "objects") }?;
        let mut attached = Vec::with_capacity(count);
        for &one in handles {
            // SAFETY: guaranteed by the caller.
            attached.push(&*unsafe { handle(one, "objects") }?.attached);
        }
        attached.sort_unstable_by_key(|one: &&Attached| one.attachment.address());
        attached.dedup_by_key(|one| one.attachment.address());
        Ok((!attached.is_empty()).then_some(Several(attached)))
    }

    fn quiesce(&self) -> Result<Vec<Option<Quiet<'_>>>> {
        self.0.iter().map(|one| one.quiesce()).collect()
    }

    fn objects(&self) -> &Objects {
        &self.0[0].objects
    }

    fn attachments(&self) -> Vec<&Attachment> {
        self.0.iter().map(|one| &one.attachment).collect()
    }
}

/// The psyncs of an attachment so far. Initialise it with `AQ_OBJECT_STATS_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_object_stats {
    /// `sizeof(aq_object_stats)`.
    pub size: usize,
    /// Commits with changes of this object.
    pub psyncs: u64,
    /// Pages stored to before these commits.
    pub pages: u64,
    /// Bytes written for them: changed parts and whole pages in the log, and pages put aside.
    pub bytes: u64,
}
sized!(aq_object_stats { psyncs: u64, pages: u64, bytes: u64 });

/// Fills `stats`.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_get_stats(
    object: *mut aq_object,
    stats: *mut aq_object_stats,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (object, place) =
            unsafe { (handle(object, "object")?, SizedPlace::new(stats, "stats")?) };
        let stats = object.attached.attachment.statistics();
        place.put(&aq_object_stats {
            size: 0,
            psyncs: stats.psyncs,
            pages: stats.pages,
            bytes: stats.bytes,
        });
        Ok(())
    })
}

/// Puts the length of the private copies of pages that an attachment for writing has into
/// `*shadow_bytes`: what was stored to since the last psync, and what is kept from before. Scans the
/// whole mapping.
///
/// Threads: any. Errors: -EINVAL, -ENOMEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_object_shadow_bytes(
    object: *mut aq_object,
    shadow_bytes: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (object, place) =
            unsafe { (handle(object, "object")?, Place::new(shadow_bytes, "shadow_bytes")?) };
        place.put(object.attached.attachment.shadow_bytes()?);
        Ok(())
    })
}

/// Allocates `size` bytes aligned to `alignment`, a power of two or 0 for 16, in the heap of an object.
///
/// Threads: any, also for the other functions of heaps. Errors: -EINVAL for an object without a heap,
/// -ENOSPC, -EROFS, -EUCLEAN. Durable: with the next psync, as all of the object. Frees: the program,
/// by `aq_heap_free`, also in a later run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_heap_alloc(
    object: *mut aq_object,
    size: usize,
    alignment: usize,
    memory: *mut *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (object, place) = unsafe { (handle(object, "object")?, Place::new(memory, "memory")?) };
        let memory = object.attached.heap()?.alloc(layout(size, alignment)?)?;
        place.put(memory.as_ptr().cast());
        Ok(())
    })
}

/// As `aq_heap_alloc`, zeroed.
///
/// Threads: any. Errors, Durable, Frees: as `aq_heap_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_heap_alloc_zeroed(
    object: *mut aq_object,
    size: usize,
    alignment: usize,
    memory: *mut *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (object, place) = unsafe { (handle(object, "object")?, Place::new(memory, "memory")?) };
        let memory = object.attached.heap()?.alloc_zeroed(layout(size, alignment)?)?;
        place.put(memory.as_ptr().cast());
        Ok(())
    })
}

/// Resizes an allocation, in place where that is possible; otherwise it moves with its content.
/// `*memory` is the allocation, and gets its new place; null there allocates.
///
/// Threads: any; none may use the allocation meanwhile. Errors: as `aq_heap_alloc`; -EINVAL for what is
/// no allocation. The allocation is unchanged then. Frees: the caller, by `aq_heap_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_heap_realloc(
    object: *mut aq_object,
    size: usize,
    alignment: usize,
    memory: *mut *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (object, place) = unsafe { (handle(object, "object")?, Place::new(memory, "memory")?) };
        let (heap, layout) = (object.attached.heap()?, layout(size, alignment)?);
        // SAFETY: documented.
        let moved = match NonNull::new(unsafe { *memory }.cast::<u8>()) {
            // SAFETY: documented.
            Some(allocation) => unsafe { heap.realloc(allocation, layout) }?,
            None => heap.alloc(layout)?,
        };
        place.put(moved.as_ptr().cast());
        Ok(())
    })
}

/// Frees an allocation; null is fine.
///
/// Threads: any. Errors: -EINVAL for what is no allocation of this heap, -EROFS, -EUCLEAN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_heap_free(object: *mut aq_object, memory: *mut c_void) -> c_int {
    call(|| {
        // SAFETY: documented.
        let object = unsafe { handle(object, "object") }?;
        let heap = object.attached.heap()?;
        match NonNull::new(memory.cast::<u8>()) {
            // SAFETY: documented: it is not used any more.
            Some(memory) => Ok(unsafe { heap.dealloc(memory) }?),
            None => Ok(()),
        }
    })
}

/// Puts the number of bytes of an allocation that may be used into `*size`.
///
/// Threads: any. Errors: -EINVAL for what is no allocation of this heap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_heap_usable_size(
    object: *mut aq_object,
    memory: *mut c_void,
    size: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (object, place) = unsafe { (handle(object, "object")?, Place::new(size, "size")?) };
        let memory = NonNull::new(memory.cast::<u8>())
            .ok_or_else(|| Failure::invalid("`memory` is null"))?;
        place.put(object.attached.heap()?.usable_size(memory)?);
        Ok(())
    })
}

/// Makes an allocation the root of the heap: where the program finds its data after a restart.
/// `type_id` says what is there: `aq_heap_root` must be called with the same. Null clears the root.
///
/// Threads: any. Errors: -EINVAL for what is no allocation of this heap, -EROFS. Durable: with the next
/// psync.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_heap_set_root(
    object: *mut aq_object,
    type_id: u64,
    root: *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let heap = unsafe { handle(object, "object") }?.attached.heap()?;
        match NonNull::new(root.cast::<u8>()) {
            Some(root) => Ok(heap.set_root(root, type_id)?),
            None => Ok(heap.clear_root()?),
        }
    })
}

/// Puts the root of the heap into `*root`; null if there is none.
///
/// Threads: any. Errors: -EINVAL if it was set with another `type_id`, -EUCLEAN. Frees: nothing; the root is
/// an allocation of the heap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_heap_root(
    object: *mut aq_object,
    type_id: u64,
    root: *mut *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (object, place) = unsafe { (handle(object, "object")?, Place::new(root, "root")?) };
        match object.attached.heap()?.root::<u8>(type_id) {
            Ok(root) => place.put(root.as_ptr().cast()),
            Err(HeapError::NoRoot) => place.put(std::ptr::null_mut()),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    })
}

/// What a heap holds. Initialise it with `AQ_HEAP_STATS_INIT`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_heap_stats {
    /// `sizeof(aq_heap_stats)`.
    pub size: usize,
    /// Allocations.
    pub allocations: u64,
    /// Their bytes.
    pub allocated_bytes: u64,
    /// Bytes that are free.
    pub free_bytes: u64,
    /// The longest run of free pages, in bytes.
    pub largest_run_bytes: u64,
}
sized!(aq_heap_stats {
    allocations: u64,
    allocated_bytes: u64,
    free_bytes: u64,
    largest_run_bytes: u64,
});

/// Checks that a heap is consistent, and fills `stats`, which may be null. Reads the header of every
/// slab.
///
/// Threads: any. Errors: -EUCLEAN with the offset of what is damaged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_heap_check(object: *mut aq_object, stats: *mut aq_heap_stats) -> c_int {
    call(|| {
        // SAFETY: documented.
        let heap = unsafe { handle(object, "object") }?.attached.heap()?;
        let found = heap.check()?;
        if !stats.is_null() {
            // SAFETY: documented.
            unsafe { SizedPlace::new(stats, "stats") }?.put(&aq_heap_stats {
                size: 0,
                allocations: found.allocations,
                allocated_bytes: found.allocated_bytes,
                free_bytes: found.free_block_bytes + found.free_page_bytes,
                largest_run_bytes: found.largest_run_bytes,
            });
        }
        Ok(())
    })
}

fn layout(size: usize, alignment: usize) -> Result<Layout> {
    let alignment = if alignment == 0 { 16 } else { alignment };
    Layout::from_size_align(size, alignment)
        .map_err(|_| Failure::invalid("the alignment is no power of two, or the size is too large"))
}

/// The objects attached by address, by their first byte. A forked child has its own: a thread of the
/// parent may have held the lock.
static BY_ADDRESS: PerProcess<Mutex<BTreeMap<u64, Arc<Attached>>>> = PerProcess::new();

fn by_address() -> MutexGuard<'static, BTreeMap<u64, Arc<Attached>>> {
    BY_ADDRESS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first byte of the object that contains an address.
fn start_of(attached: &BTreeMap<u64, Arc<Attached>>, address: *const c_void) -> Result<u64> {
    let address = address as u64;
    let before = attached.range(..=address).next_back();
    before
        .filter(|(start, one)| address - **start < one.attachment.len_bytes())
        .map(|(start, _)| *start)
        .ok_or_else(|| ObjectError::NotAttached { address }.into())
}

/// As `aq_object_attach`, for programs that know the object by any address in it: `*address` gets its
/// first byte, or null if it fails.
///
/// Threads: any. Errors: as `aq_object_attach`. Frees: the caller, by `aq_detach_at`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_attach_at(
    pool: *mut aq_pool,
    name: *const c_char,
    writable: c_int,
    key: *const c_char,
    address: *mut *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(address, "address") }?;
        // SAFETY: documented.
        let attached = unsafe { attach(pool, name, writable != 0, with_key(key)?) }?;
        let start = attached.attachment.start();
        by_address().insert(attached.attachment.address(), attached);
        place.put(start.as_ptr().cast());
        Ok(())
    })
}

/// `aq_object_psync` of the object at an address.
///
/// Threads: as `aq_object_psync`. Errors: as there; -ENOENT if none was attached there by
/// `aq_attach_at`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_psync_at(address: *const c_void) -> c_int {
    call(|| {
        let attached = {
            let all = by_address();
            all[&start_of(&all, address)?].clone()
        };
        let result = attached.psync();
        // If another thread has detached it meanwhile, this was the last reference.
        let detached = detach(attached);
        result.and(detached)
    })
}

/// Detaches the object at an address. While another thread is in `aq_psync_at` of it, that call detaches
/// it when it ends, and returns the error; this one returns 0 at once.
///
/// Threads: none may use the memory any more. Errors: as `aq_object_detach`; -ENOENT if none was
/// attached there by `aq_attach_at`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_detach_at(address: *const c_void) -> c_int {
    call(|| {
        let attached = {
            let mut all = by_address();
            let start = start_of(&all, address)?;
            all.remove(&start).expect("it was found there")
        };
        detach(attached)
    })
}

// `Attached` says that it is shared; what it holds has to be.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<Objects>();
    is_shared::<Attachment>();
    is_shared::<ObjectHeap>();
};
