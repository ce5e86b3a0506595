//! Pages: a device as guarded pages, for databases and other programs with a page cache of their own.

use std::ffi::{c_int, c_void};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer::{PageId, PageMut, PageRef, Pages, RawPage};

use crate::cache::aq_cache;
use crate::call::{Failure, Result, always, call};
use crate::device::aq_device;
use crate::memory::{Place, free, handle, list, list_mut, places, usable};
use crate::ready::{add, aq_ready};

/// A device accessed by page guards.
pub struct aq_pages {
    pages: Pages,
    guards: Guards,
}

/// The number of guards that are held: a guard has only a pointer to its pages. It is counted in
/// parts, so that threads with other pages do not share a cache line.
#[derive(Default)]
struct Guards([GuardsPart; 16]);

#[derive(Default)]
#[repr(align(128))]
struct GuardsPart(AtomicUsize);

impl Guards {
    fn part(&self, page: u64) -> &AtomicUsize {
        &self.0[page as usize % self.0.len()].0
    }

    fn take(&self, page: u64) {
        // Relaxed: what orders it with a free is what orders the free with all calls.
        self.part(page).fetch_add(1, Relaxed);
    }

    fn release(&self, page: u64) {
        // Release: pairs with `any`; the thread does not touch the pages afterwards.
        self.part(page).fetch_sub(1, Release);
    }

    fn any(&self) -> bool {
        self.0.iter().any(|part| part.0.load(Acquire) != 0)
    }
}

/// A shared guard on a page: its bytes do not change and stay in memory until `aq_page_release`. Two
/// copies of the struct are one guard.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_page {
    /// The page's bytes; null after the release.
    pub data: *const c_void,
    /// The page.
    pub page: u64,
    /// Where it belongs to.
    pub pages: *mut aq_pages,
}

/// An exclusive guard on a page, which is dirty afterwards. Two copies of the struct are one guard.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_page_mut {
    /// The page's bytes; null after the release.
    pub data: *mut c_void,
    /// The page.
    pub page: u64,
    /// Where it belongs to.
    pub pages: *mut aq_pages,
}

/// Called for a page: its bytes are valid during the call, and do not change. A value other than 0
/// ends the visit. It must not throw, longjmp out,
/// call pthread_exit, or fork.
pub type aq_page_fn = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        page: u64,
        data: *const c_void,
        size: usize,
    ) -> c_int,
>;

/// Opens the pages of a device; `*pages` is null if it fails. All `aq_pages` of one device in one
/// cache share their pages.
///
/// Threads: any. Errors: -EINVAL, -EBUSY if the device is used by a mapping or another cache and one
/// side writes, -ENOMEM. Frees: the caller, by `aq_pages_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_new(
    cache: *mut aq_cache,
    device: *mut aq_device,
    pages: *mut *mut aq_pages,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(pages, "pages") }?;
        // SAFETY: documented.
        let (cache, device) = unsafe { (handle(cache, "cache")?, handle(device, "device")?) };
        let pages = cache.cache.pages(device.device.clone())?;
        place.give(aq_pages { pages, guards: Guards::default() });
        Ok(())
    })
}

/// Frees pages; null is fine. Dirty pages are written back, without being made durable and without
/// errors: call `aq_pages_flush` first where that matters.
///
/// Threads: none may be in a call with this handle. Errors: -EBUSY if guards are held: nothing is freed,
/// and the call can be made again when they are released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_free(pages: *mut aq_pages) -> c_int {
    call(|| {
        if pages.is_null() {
            return Ok(());
        }
        // SAFETY: documented.
        let owner = match unsafe { handle(pages, "pages") } {
            // In a forked child it stays: a guard of the parent may still be released there.
            Err(failure) if failure.errno == libc::ECHILD => return Ok(()),
            owner => owner?,
        };
        if owner.guards.any() {
            let text = "guards of these pages are held: release them first";
            return Err(Failure::new(libc::EBUSY, aquifer::ErrorKind::Busy, text));
        }
        // SAFETY: documented.
        unsafe { free(pages) };
        Ok(())
    })
}

/// The number of pages of the device; the rest of the last one reads as zeros. 0 if `pages` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_count(pages: *mut aq_pages) -> u64 {
    // SAFETY: documented.
    unsafe { usable(pages) }.map_or(0, |pages| pages.pages.page_count())
}

/// The length of the device in bytes, when its pages were opened. 0 if `pages` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_len(pages: *mut aq_pages) -> u64 {
    // SAFETY: documented.
    unsafe { usable(pages) }.map_or(0, |pages| pages.pages.len_bytes())
}

/// The size of a page in bytes. 0 if `pages` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_page_bytes(pages: *mut aq_pages) -> usize {
    // SAFETY: documented.
    unsafe { usable(pages) }.map_or(0, |pages| pages.pages.page_bytes())
}

/// Takes a shared guard on a page, which is loaded if necessary. If it fails, `data` of the guard is
/// null, and it may be released.
///
/// Threads: any; any number of shared guards may be held, and by other threads released. Errors:
/// -EINVAL beyond the end, -EIO and others of the device, -ENOMEM if all pages of the budget are
/// guarded. Frees: the caller, by `aq_page_release`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_get(
    pages: *mut aq_pages,
    page: u64,
    guard: *mut aq_page,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::new(guard, "guard") }?;
        let place = place.put_first(aq_page { data: std::ptr::null(), page, pages });
        // SAFETY: documented.
        let owner = unsafe { handle(pages, "pages") }?;
        place.put(shared(pages, owner, owner.pages.get(PageId(page))?));
        Ok(())
    })
}

fn shared(pages: *mut aq_pages, owner: &aq_pages, guard: PageRef<'_>) -> aq_page {
    let raw = guard.into_raw();
    owner.guards.take(raw.page.0);
    aq_page { data: raw.bytes.cast_const().cast(), page: raw.page.0, pages }
}

/// Takes an exclusive guard on a page, which is loaded if necessary and dirty afterwards. It waits for
/// other guards on the page: a thread that holds one itself deadlocks. If it fails, `data` of the guard
/// is null, and it may be released.
///
/// Threads: any. Errors: as `aq_pages_get`; -EROFS. Durable: after `aq_pages_flush`. Frees: the
/// caller, by `aq_page_mut_release`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_get_mut(
    pages: *mut aq_pages,
    page: u64,
    guard: *mut aq_page_mut,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::new(guard, "guard") }?;
        let place = place.put_first(aq_page_mut { data: std::ptr::null_mut(), page, pages });
        // SAFETY: documented.
        let owner = unsafe { handle(pages, "pages") }?;
        let raw = owner.pages.get_mut(PageId(page))?.into_raw();
        owner.guards.take(raw.page.0);
        place.put(aq_page_mut { data: raw.bytes.cast(), page: raw.page.0, pages });
        Ok(())
    })
}

/// Takes shared guards on `count` pages, loaded at the device's queue depth, in the order of `list`.
/// If it fails, none is held: `data` of each is null, and they may be released.
///
/// Threads: any. Errors: as `aq_pages_get`. Frees: the caller, each by `aq_page_release`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_get_many(
    pages: *mut aq_pages,
    list: *const u64,
    count: usize,
    guards: *mut aq_page,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let targets = unsafe { places(guards, count, "guards") }?;
        for target in &mut *targets {
            target.write(aq_page { data: std::ptr::null(), page: 0, pages });
        }
        // SAFETY: documented.
        let (owner, ids) = unsafe { (handle(pages, "pages")?, ids(list, count)?) };
        for (target, guard) in targets.iter_mut().zip(owner.pages.get_many(&ids)?) {
            target.write(shared(pages, owner, guard));
        }
        Ok(())
    })
}

/// # Safety
/// As for [`list`].
unsafe fn ids(pages: *const u64, count: usize) -> Result<Vec<PageId>> {
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { list(pages, count, "list") }?.iter().copied().map(PageId).collect())
}

/// Releases a shared guard; one that was released already or not taken, and null, are fine.
///
/// Threads: any, also another than the one that took it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_page_release(guard: *mut aq_page) {
    always((), || {
        // SAFETY: documented.
        let Some(guard) = (unsafe { guard.as_mut() }) else { return };
        // SAFETY: documented: pages are not freed while they have guards.
        let Some(owner) = (unsafe { usable(guard.pages) }) else { return };
        let bytes = std::mem::replace(&mut guard.data, std::ptr::null());
        if !bytes.is_null() {
            let raw = RawPage { page: PageId(guard.page), bytes: bytes.cast_mut().cast() };
            // SAFETY: from `shared`, and the guard says that it was not released.
            drop(unsafe { PageRef::from_raw(&owner.pages, raw) });
            owner.guards.release(guard.page);
        }
    });
}

/// Releases an exclusive guard; one that was released already or not taken, and null, are fine.
///
/// Threads: any, also another than the one that took it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_page_mut_release(guard: *mut aq_page_mut) {
    always((), || {
        // SAFETY: documented.
        let Some(guard) = (unsafe { guard.as_mut() }) else { return };
        // SAFETY: documented: pages are not freed while they have guards.
        let Some(owner) = (unsafe { usable(guard.pages) }) else { return };
        let bytes = std::mem::replace(&mut guard.data, std::ptr::null_mut());
        if !bytes.is_null() {
            let raw = RawPage { page: PageId(guard.page), bytes: bytes.cast() };
            // SAFETY: from `aq_pages_get_mut`, and the guard says that it was not released.
            drop(unsafe { PageMut::from_raw(&owner.pages, raw) });
            owner.guards.release(guard.page);
        }
    });
}

/// Copies `size` bytes from `offset`, which may span pages, without guards: the cheapest way to a few
/// bytes. Each page's bytes are those of one moment.
///
/// Threads: any. Errors: as `aq_pages_get`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_read(
    pages: *mut aq_pages,
    buffer: *mut c_void,
    size: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (owner, target) =
            unsafe { (handle(pages, "pages")?, list_mut(buffer.cast::<u8>(), size, "buffer")?) };
        Ok(owner.pages.read_exact_at(target, offset)?)
    })
}

/// Loads `count` pages at the device's queue depth, and waits for them.
///
/// Threads: any. Errors: as `aq_pages_get`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_load(
    pages: *mut aq_pages,
    list: *const u64,
    count: usize,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (owner, ids) = unsafe { (handle(pages, "pages")?, ids(list, count)?) };
        Ok(owner.pages.load(&ids)?)
    })
}

/// As `aq_pages_load`, without waiting: `ready` gets `token` when the pages are in memory. The list is
/// copied.
///
/// Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_load_async(
    pages: *mut aq_pages,
    list: *const u64,
    count: usize,
    ready: *mut aq_ready,
    token: u64,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (owner, ids) = unsafe { (handle(pages, "pages")?, ids(list, count)?) };
        // SAFETY: documented.
        unsafe { add(ready, token, || Ok(Box::new(owner.pages.load_async(&ids)))) }
    })
}

/// Calls `visit` once for each of `count` pages, in the order that costs least: sorted, with many reads
/// in flight, and without evicting others for them. A page that is listed twice is visited once.
/// Returns 0, the value other than 0 with which `visit` ended it, or an error.
///
/// Threads: any; `visit` runs in the calling one, and may take shared guards. Errors: as
/// `aq_pages_get`; pages may have been visited or not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_visit(
    pages: *mut aq_pages,
    list: *const u64,
    count: usize,
    visit: aq_page_fn,
    context: *mut c_void,
) -> c_int {
    crate::call::visit(|ended| {
        // SAFETY: documented.
        let (owner, ids) = unsafe { (handle(pages, "pages")?, ids(list, count)?) };
        let visit = visit.ok_or_else(|| Failure::invalid("`visit` is null"))?;
        owner.pages.visit_many(ids, |page, bytes| {
            // SAFETY: the program's own function.
            *ended = unsafe { visit(context, page.0, bytes.as_ptr().cast(), bytes.len()) };
            if *ended == 0 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        Ok(())
    })
}

/// Names the page that `aq_pages_visit_in_order` visits next: puts it into `*page` and returns 1; or 0 if
/// there is none now. It must not throw, longjmp out, call pthread_exit, or fork.
pub type aq_next_page_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, page: *mut u64) -> c_int>;

/// Calls `visit` for pages in the order in which `next` names them: see `aq_mapping_visit_in_order`.
/// Returns as `aq_pages_visit`.
///
/// Threads: any; `next` and `visit` run in the calling one, and may take shared guards. Errors: as
/// `aq_pages_visit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_visit_in_order(
    pages: *mut aq_pages,
    next: aq_next_page_fn,
    visit: aq_page_fn,
    context: *mut c_void,
) -> c_int {
    crate::call::visit(|ended| {
        // SAFETY: documented.
        let owner = unsafe { handle(pages, "pages") }?;
        let next = next.ok_or_else(|| Failure::invalid("`next` is null"))?;
        let visit = visit.ok_or_else(|| Failure::invalid("`visit` is null"))?;
        let ids = std::iter::from_fn(|| {
            let mut page = u64::MAX;
            // SAFETY: the program's own function.
            let is_there = unsafe { next(context, &raw mut page) } != 0;
            is_there.then_some(PageId(page))
        });
        owner.pages.visit_in_order(ids, |page, bytes| {
            // SAFETY: the program's own function.
            *ended = unsafe { visit(context, page.0, bytes.as_ptr().cast(), bytes.len()) };
            if *ended == 0 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        Ok(())
    })
}

/// Starts to load `count` pages from `first` on in the background: a hint.
///
/// Threads: any. Errors: -EINVAL beyond the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_prefetch(pages: *mut aq_pages, first: u64, count: u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let owner = unsafe { handle(pages, "pages") }?;
        Ok(owner.pages.prefetch(PageId(first), count)?)
    })
}

/// Whether a page is in memory now: 1 or 0 into `*resident`.
///
/// Threads: any. Errors: -EINVAL beyond the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_is_resident(
    pages: *mut aq_pages,
    page: u64,
    resident: *mut c_int,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (owner, place) =
            unsafe { (handle(pages, "pages")?, Place::new(resident, "resident")?) };
        place.put(owner.pages.is_resident(PageId(page))?.into());
        Ok(())
    })
}

/// Writes the dirty ones of `count` pages from `first` on back and makes them durable;
/// `count` = UINT64_MAX is all from there. It waits for writing guards on them: a thread that holds
/// one itself deadlocks.
///
/// Threads: any. Durable: every change before the call, when it returns 0. Errors: -EINVAL beyond the
/// end; -EIO and others of the device: what was not written stays dirty, and the next flush tries again, unless the kind of
/// the failure is `AQ_KIND_NOT_DURABLE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pages_flush(pages: *mut aq_pages, first: u64, count: u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let owner = unsafe { handle(pages, "pages") }?;
        if first > owner.pages.page_count() {
            return Err(Failure::invalid("`first` is beyond the end"));
        }
        Ok(owner.pages.flush(PageId(first)..PageId(first.saturating_add(count)))?)
    })
}
