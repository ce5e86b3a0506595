//! What a cache may write to a device, and how several mappings of one device interact.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use aquifer_cache::{
    Advice, Backend, Cache, CacheError, MapOptions, MappedArena, MappingMut, PageId,
};
use aquifer_device::{Device, DeviceError, Direct, FileDevice, MemoryDevice};

use crate::support::{Hooked, load, memory, store, wait_until};

const PAGE: usize = 4096;
const BUDGET: u64 = 8 << 20;

fn cache() -> Cache {
    Cache::builder().budget_bytes(BUDGET).build().unwrap()
}

/// As a program that stores to every page it has read: pages that it reads next come in writable.
fn store_to_what_is_read(mapping: &MappingMut, pages: usize) {
    for page in 0..pages {
        let byte = load(mapping, page * PAGE);
        store(mapping, page * PAGE, byte.wrapping_add(1));
    }
}

/// A flush writes the pages that were stored to, and no page that was only read: another writer may
/// have changed that one on the device.
#[test]
fn pages_that_were_only_read_are_never_written() {
    const STORED: usize = 1024;
    const READ: usize = 256;
    let (device, _) = memory((STORED + READ) * PAGE, 1);
    let mapping = cache().map_mut(device.clone()).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    store_to_what_is_read(&mapping, STORED);
    for page in STORED..STORED + READ {
        load(&mapping, page * PAGE);
    }
    let theirs = vec![0xA5; READ * PAGE];
    device.write_at((STORED * PAGE) as u64, &theirs).unwrap();
    mapping.flush_all().unwrap();
    let overwritten = device.to_vec()[STORED * PAGE..]
        .chunks(PAGE)
        .filter(|page| page != &&theirs[..PAGE])
        .count();
    assert_eq!(overwritten, 0, "pages written back that were only read");
}

/// A flush writes a snapshot of a page that is pinned for writing; from then on the device has something else than what was loaded.
#[test]
fn a_store_of_what_was_loaded_is_written_after_a_snapshot_was() {
    const PAGES: usize = 1024;
    let (device, _) = memory(2 * PAGES * PAGE, 1);
    let mapping = cache().map_mut(device.clone()).unwrap();
    mapping.advise(0..mapping.len(), Advice::Random).unwrap();
    store_to_what_is_read(&mapping, PAGES);
    for page in PAGES..PAGES + 100 {
        let before = load(&mapping, page * PAGE);
        let at = (page * PAGE) as u64;
        let pin = mapping.pin_mut(at..at + PAGE as u64).unwrap();
        store(&mapping, page * PAGE, !before);
        mapping.flush_all().unwrap();
        assert_eq!(device.to_vec()[page * PAGE], !before);
        store(&mapping, page * PAGE, before);
        drop(pin);
        mapping.flush_all().unwrap();
        assert_eq!(device.to_vec()[page * PAGE], before, "page {page}");
    }
}

/// Where most pages that are read are stored to, they come in writable: a store without a fault is written all the same, one by
/// one or with its neighbours, and nothing else is.
#[test]
fn of_pages_that_are_mostly_stored_to_those_that_were_are_written() {
    const PAGES: usize = 1024;
    for kept_every in [9, 16, 64] {
        let (device, mut bytes) = memory(2 * PAGES * PAGE, 1);
        let cache = cache();
        let mapping = cache.map_mut(device.clone()).unwrap();
        mapping.advise(0..mapping.len(), Advice::Random).unwrap();
        let change = |page: usize, bytes: &mut [u8]| {
            let byte = load(&mapping, page * PAGE + 9).wrapping_add(1);
            store(&mapping, page * PAGE + 9, byte);
            bytes[page * PAGE + 9] = byte;
        };
        (0..PAGES).for_each(|page| change(page, &mut bytes));
        mapping.flush_all().unwrap();
        let before = cache.stats();
        let stored = |page: &usize| !page.is_multiple_of(kept_every);
        for page in PAGES..2 * PAGES {
            if stored(&page) {
                change(page, &mut bytes)
            } else {
                _ = load(&mapping, page * PAGE + 9)
            }
        }
        let faults = cache.stats().write_faults - before.write_faults;
        assert!(faults < PAGES as u64 / 2, "{faults} faults of stores: nothing was guessed");
        mapping.flush_all().unwrap();
        assert!(device.to_vec() == bytes);
        let written = cache.stats().written_pages - before.written_pages;
        assert_eq!(written, (PAGES..2 * PAGES).filter(stored).count() as u64);
        // The pages are clean and protected again. These stores restore the content that was loaded
        // first: it must be written all the same.
        for page in PAGES..2 * PAGES {
            let at = page * PAGE + 9;
            bytes[at] = bytes[at].wrapping_sub(1);
            store(&mapping, at, bytes[at]);
        }
        mapping.flush_all().unwrap();
        assert!(device.to_vec() == bytes);
        wait_until("nothing dirty", || cache.stats().dirty_pages == 0);
    }
}

// ---- one store for one device -------------------------------------------------------------------

const FILE_PAGES: usize = 64;

/// A file of zeros.
fn file() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), vec![0; FILE_PAGES * PAGE]).unwrap();
    file
}

fn open(path: &Path) -> Arc<FileDevice> {
    Arc::new(FileDevice::options().writable(true).open(path).unwrap())
}

fn open_to_read(path: &Path) -> Arc<FileDevice> {
    Arc::new(FileDevice::open(path).unwrap())
}

fn by_user_backend() -> MapOptions {
    MapOptions::new().backend(Backend::User)
}

fn is_refused<T>(result: Result<T, CacheError>) -> bool {
    match result {
        Err(CacheError::AlreadyAttached { .. }) => true,
        Err(other) => panic!("{other}"),
        Ok(_) => false,
    }
}

/// Each mapping has the page in memory when the other one flushes its store to it.
#[test]
fn two_writable_mappings_of_one_file_keep_each_others_flushed_bytes() {
    let file = file();
    let second_name = file.path().with_extension("link");
    std::fs::hard_link(file.path(), &second_name).unwrap();
    let cache = cache();
    let one = cache.map_mut(open(file.path())).unwrap();
    let buffered = FileDevice::options().writable(true).direct(Direct::Never);
    let other = cache.map_mut(buffered.open(&second_name).unwrap()).unwrap();
    std::fs::remove_file(&second_name).unwrap();
    load(&one, 0);
    load(&other, 0);
    store(&one, 1, 1);
    one.flush_all().unwrap();
    store(&other, 2, 2);
    other.flush_all().unwrap();
    assert_eq!(std::fs::read(file.path()).unwrap()[..4], [0, 1, 2, 0]);
    assert_eq!([load(&one, 2), load(&other, 1)], [2, 1], "each sees the other's stores");
    assert_eq!(cache.stats().resident_pages, 1, "the page is in memory once");
}

/// In either order of mapping; the reader's device is opened read-only.
#[test]
fn a_mapping_for_reading_sees_what_a_writable_one_of_the_same_file_stores() {
    for reader_first in [true, false] {
        let file = file();
        let cache = cache();
        let map_reader = || cache.map_with(open_to_read(file.path()), by_user_backend()).unwrap();
        let map_writer = || cache.map_mut(open(file.path())).unwrap();
        let (reader, writer);
        if reader_first {
            reader = map_reader();
            // Resident before there is a writer: the first store to it must still be seen.
            assert_eq!(load(&reader, 0), 0);
            writer = map_writer();
        } else {
            writer = map_writer();
            // Backend chosen by the cache: a kernel-backed mapping would see nothing before a
            // flush.
            reader = cache.map(open_to_read(file.path())).unwrap();
        }
        store(&writer, 0, 7);
        writer.set(5 * PAGE as u64, 8u8).unwrap();
        assert_eq!([load(&reader, 0), reader.get(5 * PAGE as u64).unwrap()], [7, 8]);
        writer.flush_all().unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!([bytes[0], bytes[5 * PAGE]], [7, 8]);
        // Dropping the writer writes back its unflushed stores, although the reader remains.
        store(&writer, 1, 9);
        drop(writer);
        assert_eq!(load(&reader, 1), 9);
        assert_eq!(std::fs::read(file.path()).unwrap()[1], 9);
    }
}

/// A mapping created while the previous one is being written back must read that one's stores.
#[test]
fn a_mapping_made_while_another_is_dropped_reads_what_that_one_stored() {
    let writing = Arc::new(AtomicBool::new(false));
    let mut device = Hooked::new(memory(FILE_PAGES * PAGE, 2).0);
    let begun = writing.clone();
    device.on_write = Box::new(move |_, _| {
        begun.store(true, Ordering::SeqCst);
        (0..1000).for_each(|_| std::thread::yield_now());
        Ok(())
    });
    let device = Arc::new(device);
    let cache = cache();
    for round in 1..=crate::support::steps(5) as u8 {
        let mapping = cache.map_mut(device.clone()).unwrap();
        for page in (0..FILE_PAGES).step_by(2) {
            store(&mapping, page * PAGE, round);
        }
        writing.store(false, Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(move || drop(mapping));
            wait_until("a write", || writing.load(Ordering::SeqCst));
            let again = cache.map_mut(device.clone()).unwrap();
            for page in (0..FILE_PAGES).step_by(2) {
                assert_eq!(load(&again, page * PAGE), round, "page {page}");
            }
        });
    }
}

#[test]
fn two_pages_of_one_device_are_one() {
    let (device, _) = memory(FILE_PAGES * PAGE, 3);
    let cache = cache();
    let one = cache.pages(device.clone()).unwrap();
    let other = cache.pages(device.clone()).unwrap();
    one.get(PageId(0)).unwrap();
    other.get_mut(PageId(0)).unwrap()[0] = 1;
    one.get_mut(PageId(0)).unwrap()[1] = 2;
    assert_eq!(one.get(PageId(0)).unwrap()[..2], [1, 2]);
    one.flush_all().unwrap();
    drop(one);
    assert_eq!(device.to_vec()[..2], [1, 2]);
    assert_eq!(other.get(PageId(0)).unwrap()[..2], [1, 2]);
}

#[test]
fn what_cannot_be_shared_is_refused_until_the_other_is_gone() {
    let file = file();
    let [one, other] = [cache(), cache()];
    let write = || open(file.path());
    let read = || open_to_read(file.path());

    // Two caches.
    let mapping = one.map_mut(write()).unwrap();
    assert!(is_refused(other.map_mut(write())));
    assert!(is_refused(other.map(read())));
    assert!(is_refused(other.pages(read())));
    // Two interfaces, two backends.
    assert!(is_refused(one.pages(read())));
    assert!(is_refused(one.map_with(read(), MapOptions::new().backend(Backend::Kernel))));
    drop(mapping);

    let pages = one.pages(write()).unwrap();
    assert!(is_refused(one.map(read())));
    assert!(is_refused(other.pages(write())));
    drop(pages);

    let kernel = one.map_with(read(), MapOptions::new().backend(Backend::Kernel)).unwrap();
    assert!(is_refused(one.map_mut(write())));
    // Read-only uses are all compatible.
    let user = one.map_with(read(), by_user_backend()).unwrap();
    let far = other.map_with(read(), by_user_backend()).unwrap();
    let pages = other.pages(read()).unwrap();
    assert_eq!(
        load(&user, 0) + load(&far, 0) + load(&kernel, 0) + pages.get(PageId(0)).unwrap()[0],
        0
    );
    drop((kernel, pages));
    assert!(is_refused(one.map_mut(write())), "the other cache reads it");
    drop(far);
    let mapping = one.map_mut(write()).unwrap();
    store(&mapping, 0, 5);
    assert_eq!(load(&user, 0), 5);
    // A longer file has pages that the store does not have.
    file.as_file().set_len((FILE_PAGES * PAGE + 1) as u64).unwrap();
    assert!(is_refused(one.map_mut(write())));
    drop((mapping, user));
    assert_eq!(one.map_mut(write()).unwrap().len() as usize, FILE_PAGES * PAGE + 1);
}

/// A vector of an arena lends slices, so nothing else may change its bytes.
#[test]
fn an_arena_has_its_device_alone() {
    let device = Arc::new(MemoryDevice::new(FILE_PAGES * PAGE).unwrap());
    let cache = cache();
    let mapping = cache.map_mut(device.clone()).unwrap();
    let second = cache.map_mut(device.clone()).unwrap();
    // SAFETY: the call is refused.
    assert!(is_refused(unsafe { MappedArena::new(mapping) }));
    // SAFETY: nothing else changes the device's bytes, which are memory.
    let arena = unsafe { MappedArena::new(second) }.unwrap();
    assert!(is_refused(cache.map_mut(device.clone())));
    assert!(is_refused(cache.map(device.clone())));
    drop(arena);
    cache.map(device).unwrap();
}

/// A path is all that a program needs to map a file.
#[test]
fn a_file_is_mapped_by_its_path() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [1; 3 * PAGE]).unwrap();
    let cache = cache();
    assert_eq!(cache.open(file.path()).unwrap().get::<u8>(0).unwrap(), 1);
    let mapping = cache.open_mut(file.path()).unwrap();
    mapping.set(PAGE as u64, 9u8).unwrap();
    mapping.flush_all().unwrap();
    assert_eq!(std::fs::read(file.path()).unwrap()[PAGE], 9);
    let missing = file.path().with_extension("missing");
    for path in [&missing, Path::new("/"), Path::new("/dev/tty")] {
        for opened in [cache.open(path).map(drop), cache.open_mut(path).map(drop)] {
            let error = opened.unwrap_err();
            assert!(matches!(error, CacheError::Open { .. }), "{error:?}");
        }
    }
    let error = cache.open(&missing).map(drop).unwrap_err().to_string();
    assert!(error.contains(missing.to_str().unwrap()) && error.contains("No such file"), "{error}");
}

/// Memory with buffers of its own.
struct Buffered {
    device: Arc<MemoryDevice>,
    most_bytes: AtomicUsize,
    least_bytes: usize,
}

fn buffered(device: &Arc<MemoryDevice>, least_bytes: usize) -> Arc<Buffered> {
    let most_bytes = AtomicUsize::new(1 << 30);
    Arc::new(Buffered { device: device.clone(), most_bytes, least_bytes })
}

impl Device for Buffered {
    fn name(&self) -> &str {
        "buffered"
    }

    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.device.len_bytes()
    }

    fn is_writable(&self) -> bool {
        false
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.device.read_at(offset_bytes, buffer)
    }

    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    fn sync(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn claim_buffers(&self, most_bytes: usize) -> usize {
        let before = self.most_bytes.fetch_min(most_bytes, Ordering::SeqCst);
        before.min(most_bytes).max(self.least_bytes)
    }

    fn access_path(&self) -> String {
        "memory".to_owned()
    }
}

#[test]
fn buffers_of_devices_are_a_part_of_the_budget() {
    const BUDGET: u64 = 64 << 20;
    const PAGES: usize = (BUDGET as usize / PAGE) * 2;
    let cache = Cache::builder().budget_bytes(BUDGET).build().unwrap();
    let resident = |cache: &Cache, device: Arc<dyn Device>| {
        let pages = cache.pages(device).unwrap();
        for page in 0..PAGES as u64 {
            drop(pages.get(PageId(page)).unwrap());
        }
        // Evictors keep some frames free.
        cache.stats().resident_pages as usize * PAGE
    };
    let (plain, _) = memory(PAGES * PAGE, 1);
    let before = resident(&cache, plain.clone());
    assert!(before > 60 << 20, "{before}");
    let device = buffered(&plain, 0);
    let with_buffers = resident(&cache, device.clone());
    assert_eq!(device.most_bytes.load(Ordering::SeqCst), 16 << 20);
    assert!(with_buffers <= 48 << 20, "{with_buffers}");
    assert!(with_buffers > 44 << 20, "{with_buffers}");
    let after = resident(&cache, plain);
    assert!(after > 60 << 20, "{after}");
}

/// Devices that would each take all that they may leave half of the budget to pages, also of a budget that is lowered later.
#[test]
fn buffers_of_all_devices_together_are_at_most_half_of_the_budget() {
    const BUDGET: u64 = 64 << 20;
    const PAGES: usize = (BUDGET as usize / PAGE) * 2;
    let cache = Cache::builder().budget_bytes(BUDGET).build().unwrap();
    let (plain, _) = memory(PAGES * PAGE, 1);
    let devices = [(); 6].map(|()| buffered(&plain, 0));
    let attached = devices.clone().map(|device| cache.pages(device).unwrap());
    let claimed =
        || devices.iter().map(|device| device.most_bytes.load(Ordering::SeqCst)).sum::<usize>();
    assert!(claimed() <= 32 << 20, "{}", claimed());
    for page in 0..PAGES as u64 {
        drop(attached[5].get(PageId(page)).unwrap());
    }
    let resident = cache.stats().resident_pages as usize * PAGE;
    assert!((30 << 20..=64 << 20).contains(&(resident + claimed())), "{resident}");
    assert!(resident > 28 << 20, "{resident}");

    cache.resize(16 << 20).unwrap();
    assert!(claimed() <= 8 << 20, "{}", claimed());
    wait_until("the budget is kept", || {
        cache.stats().resident_pages as usize * PAGE <= (16 << 20) - claimed()
    });
}

/// A device that takes more than it is asked to keep to does not take what pages need.
#[test]
fn pages_keep_the_smallest_budget_beside_any_buffers() {
    let cache = cache();
    let (plain, _) = memory(1024 * PAGE, 1);
    let pages = cache.pages(buffered(&plain, 64 << 20)).unwrap();
    for page in 0..1024 {
        drop(pages.get(PageId(page)).unwrap());
    }
    let resident = cache.stats().resident_pages as usize;
    assert!(resident > 1000, "{resident}");
}

/// A device that reads itself through the cache, to tell how large its buffers are.
struct ReadsItself {
    memory: Arc<MemoryDevice>,
    cache: Cache,
    own: OnceLock<Weak<ReadsItself>>,
    first_byte: OnceLock<u8>,
}

impl Device for ReadsItself {
    fn name(&self) -> &str {
        "reads itself"
    }

    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.memory.len_bytes()
    }

    fn is_writable(&self) -> bool {
        false
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.memory.read_at(offset_bytes, buffer)
    }

    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    fn sync(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn claim_buffers(&self, _: usize) -> usize {
        self.first_byte.get_or_init(|| {
            let own = self.own.get().and_then(Weak::upgrade).unwrap();
            let pages = self.cache.pages(own).unwrap();
            pages.get(PageId(0)).unwrap()[0]
        });
        0
    }

    fn access_path(&self) -> String {
        "memory".to_owned()
    }
}

#[test]
fn a_device_is_attached_when_it_is_asked_for_its_buffers() {
    let (memory, bytes) = memory(PAGE, 1);
    let (own, first_byte) = (OnceLock::new(), OnceLock::new());
    let device = Arc::new(ReadsItself { memory, cache: cache(), own, first_byte });
    device.own.set(Arc::downgrade(&device)).unwrap();
    let attaching = {
        let device = device.clone();
        std::thread::spawn(move || drop(device.cache.pages(device.clone()).unwrap()))
    };
    wait_until("the device is attached", || attaching.is_finished());
    attaching.join().unwrap();
    assert_eq!(device.first_byte.get(), Some(&bytes[0]));
}
