//! The cost of a miss with each backend of a mapping, measured once per file system and process.
//!
//! Measured on the file that is about to be mapped, with random pages that are not in the page
//! cache, alternating between a fault of a kernel file mapping and a fault served in user space
//! (signal, read, copy). The lower quartiles decide: other work on the machine makes single misses
//! slower, never faster, and disturbs medians of so few. The cost of evicting pages is left out on
//! both sides: background threads do it.
//!
//! It takes at most [`TIME_LIMIT`]. It is skipped, and the kernel backend chosen, for files too
//! small to matter, files that are already cached, and threads that block SIGBUS.

use std::collections::HashSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use aquifer_device::{AlignedBuffer, Device};
use aquifer_sys::memory::{self, Advice, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{self, Backing};
use aquifer_sys::signal::{self, FaultContext};
use aquifer_sys::uffd::{Delivery, Uffd};
use aquifer_sys::{fallible, futex};
use aquifer_vm::{Arena, FaultOwner, PerProcess, Reservation, Served};

use crate::map_options::Backend;

/// Time limit of a calibration, plus at most the one access in progress.
pub const TIME_LIMIT: Duration = Duration::from_millis(20);
const SMALLEST_FILE_BYTES: u64 = 4 << 20;
const MOST_SAMPLES: usize = 32;
const FEWEST_SAMPLES: usize = 5;
/// Pages checked to find one that is not cached.
const ATTEMPTS: usize = 64;

/// The cost of a miss on one file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Calibration {
    /// The file system, as the `st_dev` of `stat`.
    pub device_id: u64,
    /// Time of a miss of a kernel-backed mapping (the lower quartile), in nanoseconds.
    pub kernel_fault_ns: u64,
    /// Time of a miss of a user-backed mapping (the lower quartile), in nanoseconds.
    pub user_fault_ns: u64,
    /// Number of misses measured with each backend.
    pub samples: usize,
}

impl Calibration {
    /// The backend for read-only mappings of files there: the user backend if it saves a tenth. On
    /// a device so slow that few misses fit into the time limit both backends cost the same.
    pub fn backend(&self) -> Backend {
        let saves_a_tenth =
            self.user_fault_ns.saturating_mul(10) < self.kernel_fault_ns.saturating_mul(9);
        if saves_a_tenth && self.samples >= FEWEST_SAMPLES {
            Backend::User
        } else {
            Backend::Kernel
        }
    }
}

/// A child measures anew: a thread of the parent may have held the lock at the fork.
static DONE: PerProcess<Mutex<Vec<Calibration>>> = PerProcess::new();

/// The calibrations of this process so far.
pub fn calibrations() -> Vec<Calibration> {
    DONE.get().lock().expect("no thread panics while holding it").clone()
}

/// The calibration of a device's file system, measured on the device if none exists yet.
///
/// `None` if it cannot be measured; see the module's documentation. Drops what it reads from the
/// page cache.
pub fn calibrate(device: impl Device) -> Option<Calibration> {
    let device: Arc<dyn Device> = Arc::new(device);
    let file = device.page_cache_file()?;
    let device_id = residency::file_identity(file).ok()?.device;
    if let Some(known) = calibrations().into_iter().find(|c| c.device_id == device_id) {
        return Some(known);
    }
    let measured = measure(&device, file, device_id)?;
    let mut done = DONE.get().lock().expect("no thread panics while holding it");
    // Two threads may have measured at once: the first result stays.
    if let Some(known) = done.iter().find(|c| c.device_id == device_id) {
        return Some(*known);
    }
    done.push(measured);
    Some(measured)
}

fn measure(device: &Arc<dyn Device>, file: BorrowedFd<'_>, device_id: u64) -> Option<Calibration> {
    let len_bytes = residency::file_len_bytes(file).ok()?;
    let suits = len_bytes >= SMALLEST_FILE_BYTES
        && device.alignment_bytes() <= SMALL_PAGE_BYTES
        && residency::backing(file).ok()? == Backing::Storage
        && fallible::SUPPORTED
        && !signal::is_blocked(libc::SIGBUS);
    if !suits {
        return None;
    }
    let deadline = Instant::now() + TIME_LIMIT;
    let pages = len_bytes / SMALL_PAGE_BYTES as u64;
    // Declared before its users: dropped after the reservation that names it as its owner.
    let server = Server::open(device.clone()).ok()?;
    let scratch = server.reserve()?;
    let mut mapped = MappedFile::map(file, pages)?;
    let (mut kernel_ns, mut user_ns) = (vec![], vec![]);
    for slot in 0..MOST_SAMPLES {
        let Some(page) = mapped.uncached_page() else { break };
        let started = Instant::now();
        mapped.touch(page)?;
        kernel_ns.push(started.elapsed().as_nanos() as u64);

        let Some(page) = mapped.uncached_page() else { break };
        server.next_offset.store(page * SMALL_PAGE_BYTES as u64, Ordering::Relaxed);
        let target = scratch.address().wrapping_add(slot * SMALL_PAGE_BYTES);
        let started = Instant::now();
        // SAFETY: inside the scratch range.
        if !unsafe { fallible::try_touch(target) } {
            return None;
        }
        user_ns.push(started.elapsed().as_nanos() as u64);
        if Instant::now() >= deadline {
            break;
        }
    }
    let samples = user_ns.len();
    if samples == 0 {
        return None;
    }
    Some(Calibration {
        device_id,
        kernel_fault_ns: lower_quartile(&mut kernel_ns),
        user_fault_ns: lower_quartile(&mut user_ns),
        samples,
    })
}

fn lower_quartile(values: &mut [u64]) -> u64 {
    values.sort_unstable();
    values[values.len() / 4]
}

/// The file as the kernel backend maps it.
struct MappedFile<'a> {
    reservation: Reservation,
    file: BorrowedFd<'a>,
    pages: u64,
    random: u64,
    touched: HashSet<u64>,
}

impl<'a> MappedFile<'a> {
    fn map(file: BorrowedFd<'a>, pages: u64) -> Option<MappedFile<'a>> {
        let len = pages as usize * SMALL_PAGE_BYTES;
        let reservation = Arena::global().ok()?.allocate(len).ok()?;
        reservation.map_file(len, Protection::Read, file).ok()?;
        // SAFETY: our own mapping.
        unsafe { memory::advise(reservation.address(), len, Advice::Random) }.ok()?;
        let random = SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos() as u64);
        Some(MappedFile { reservation, file, pages, random, touched: HashSet::new() })
    }

    fn address(&self, page: u64) -> *mut u8 {
        self.reservation.address().wrapping_add(page as usize * SMALL_PAGE_BYTES)
    }

    fn random_page(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % self.pages
    }

    fn uncached_page(&mut self) -> Option<u64> {
        (0..ATTEMPTS).find_map(|_| {
            let page = self.random_page();
            let mut resident = [1];
            memory::residency(self.address(page), SMALL_PAGE_BYTES, &mut resident).ok()?;
            (resident[0] & 1 == 0 && self.touched.insert(page)).then_some(page)
        })
    }

    fn touch(&self, page: u64) -> Option<()> {
        let address = self.address(page);
        // This range has no fault owner: the handler makes a load beyond a truncation fail.
        // SAFETY: inside the mapping.
        unsafe { fallible::try_touch(address) }.then_some(())
    }
}

impl Drop for MappedFile<'_> {
    fn drop(&mut self) {
        let len = self.pages as usize * SMALL_PAGE_BYTES;
        // SAFETY: our own mapping, which is about to be unmapped.
        let _ = unsafe { memory::advise(self.address(0), len, Advice::DontNeed) };
        for &page in &self.touched {
            let offset = page * SMALL_PAGE_BYTES as u64;
            let _ = memory::drop_cached(self.file, offset, SMALL_PAGE_BYTES as u64);
        }
    }
}

/// Serves the faults of the scratch range as the user backend does.
struct Server {
    device: Arc<dyn Device>,
    uffd: Uffd,
    buffer: futex::Mutex<AlignedBuffer>,
    /// The offset that the next fault reads from.
    next_offset: AtomicU64,
    /// Start of the scratch range.
    base: AtomicUsize,
}

const SCRATCH_BYTES: usize = MOST_SAMPLES * SMALL_PAGE_BYTES;

impl Server {
    fn open(device: Arc<dyn Device>) -> io::Result<Server> {
        let alignment = device.alignment_bytes().max(SMALL_PAGE_BYTES);
        Ok(Server {
            device,
            uffd: Uffd::open(Delivery::Sigbus)?,
            buffer: futex::Mutex::new(AlignedBuffer::new(SMALL_PAGE_BYTES, alignment)),
            next_offset: AtomicU64::new(0),
            base: AtomicUsize::new(0),
        })
    }

    /// The scratch range. Must be dropped before the server.
    fn reserve(&self) -> Option<Reservation> {
        let mut reservation = Arena::global().ok()?.allocate(SCRATCH_BYTES).ok()?;
        reservation.map_anonymous(SCRATCH_BYTES, Protection::Read).ok()?;
        let base = reservation.address();
        // SAFETY: our own range. Fails harmlessly where the kernel has no huge pages.
        let _ = unsafe { memory::advise(base, SCRATCH_BYTES, Advice::NoHugePage) };
        self.uffd.register(base, SCRATCH_BYTES, false).ok()?;
        self.base.store(base as usize, Ordering::Relaxed);
        let owner: *const Server = self;
        // SAFETY: `measure` drops the reservation before the server.
        unsafe { reservation.set_owner(owner) }.ok()?;
        Some(reservation)
    }
}

impl FaultOwner for Server {
    fn serve(&self, fault: &FaultContext) -> Served {
        let target = fault.address & !(SMALL_PAGE_BYTES - 1);
        let base = self.base.load(Ordering::Relaxed);
        if fault.signal != libc::SIGBUS || !(base..base + SCRATCH_BYTES).contains(&target) {
            return Served::No;
        }
        let mut buffer = self.buffer.lock();
        let offset_bytes = self.next_offset.load(Ordering::Relaxed);
        if self.device.read_at(offset_bytes, &mut buffer).is_err() {
            return Served::No;
        }
        let source = buffer.as_ptr();
        // SAFETY: the page is missing, in the registered range, and only the faulting thread uses
        // it.
        match unsafe { self.uffd.copy(target as *mut u8, source, SMALL_PAGE_BYTES, false) } {
            Ok(_) => Served::Yes,
            Err(_) => Served::No,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tie_goes_to_the_kernel() {
        let decided = |kernel_fault_ns, user_fault_ns| Calibration {
            device_id: 0,
            kernel_fault_ns,
            user_fault_ns,
            samples: 9,
        };
        let decide = |kernel, user| decided(kernel, user).backend();
        assert_eq!(decide(1000, 1000), Backend::Kernel);
        assert_eq!(decide(1000, 950), Backend::Kernel);
        assert_eq!(decide(1000, 850), Backend::User);
        assert_eq!(decide(1000, 2000), Backend::Kernel);
        let few = Calibration { samples: 3, ..decided(1000, 500) };
        assert_eq!(few.backend(), Backend::Kernel);
    }
}
