//! What the kernel's primitives cost on this machine, measured in a few milliseconds each.
//!
//! These figures decide which form of a mechanism is cheapest: a signal, installing a page,
//! discarding pages, protecting them, a page-cache fault. Everything that changes page tables is
//! measured *with a second thread running*, because the change then requires a TLB shootdown on
//! another processor, which costs several times more; and a cache always has a second thread.
//!
//! Figures are medians of a few passes, in nanoseconds. They are meant for display and for choosing
//! between forms that differ by a factor, not for comparisons of a few percent.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::memory::{self, Advice, Protection, REGION_BYTES, Range, SMALL_PAGE_BYTES};
use crate::uffd::{Delivery, Uffd};

const PASSES: usize = 5;
/// Pages per vectored discard, as the engine uses on the fault path.
const DISCARD_BATCH: usize = 64;

/// Returns the median of the results of `pass`: nanoseconds per measured operation.
fn median_of(mut pass: impl FnMut() -> io::Result<f64>) -> io::Result<f64> {
    let mut found = (0..PASSES).map(|_| pass()).collect::<io::Result<Vec<_>>>()?;
    found.sort_by(f64::total_cmp);
    Ok(found[PASSES / 2])
}

/// Returns nanoseconds per operation for `work`, which does `count` of them.
fn each(count: usize, work: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_nanos() as f64 / count as f64)
}

/// Runs `work` while another thread of the process is on a processor.
fn beside_another_thread<T>(work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    let started = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                started.store(true, Ordering::Relaxed);
                std::hint::spin_loop();
            }
        });
        while !started.load(Ordering::Relaxed) && !busy.is_finished() {
            std::thread::yield_now();
        }
        let result = work();
        done.store(true, Ordering::Relaxed);
        result
    })
}

/// Memory private to this module, unmapped when dropped.
struct Area {
    base: *mut u8,
    len_bytes: usize,
}

impl Area {
    /// Maps zeroed memory, aligned to a region, made of small pages.
    fn anonymous(len_bytes: usize) -> io::Result<Area> {
        let base = memory::map_anonymous(len_bytes + REGION_BYTES)?;
        let area = Area { base, len_bytes: len_bytes + REGION_BYTES };
        // Fails where huge pages are not supported, and then there are none to avoid.
        // SAFETY: the area was just mapped here; the advice keeps contents.
        let _ = unsafe { memory::advise(base, area.len_bytes, Advice::NoHugePage) };
        Ok(area)
    }

    fn aligned(&self) -> *mut u8 {
        self.base.wrapping_add(self.base.align_offset(REGION_BYTES))
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: mapped by this module, and nothing else refers to it.
        let _ = unsafe { memory::unmap(self.base, self.len_bytes) };
    }
}

/// Measures a cheap system call.
pub fn system_call_ns() -> io::Result<f64> {
    const COUNT: usize = 2000;
    median_of(|| {
        each(COUNT, || {
            for _ in 0..COUNT {
                // SAFETY: takes no arguments and cannot fail.
                unsafe { libc::syscall(libc::SYS_getppid) };
            }
            Ok(())
        })
    })
}

static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_signal(_signal: libc::c_int) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

/// Measures a signal that this thread sends itself: delivery, handler and return. The signal is
/// SIGURG, which is ignored by default; its handler is restored afterwards.
pub fn signal_round_trip_ns() -> io::Result<f64> {
    const COUNT: usize = 500;
    // SAFETY: an all-zero sigaction is valid: default handler, empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = count_signal as *const () as usize;
    // SAFETY: as above.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: both structures live on this stack; the handler only adds to an atomic.
    let result = unsafe { libc::sigaction(libc::SIGURG, &raw const action, &raw mut previous) };
    crate::check(result.into())?;
    let before = HANDLED.load(Ordering::Relaxed);
    let found = median_of(|| {
        each(COUNT, || {
            for _ in 0..COUNT {
                // SAFETY: the signal is handled.
                unsafe { libc::raise(libc::SIGURG) };
            }
            Ok(())
        })
    });
    // SAFETY: `previous` came from the kernel for this signal.
    unsafe { libc::sigaction(libc::SIGURG, &raw const previous, std::ptr::null_mut()) };
    if HANDLED.load(Ordering::Relaxed) == before {
        return Err(io::Error::other("SIGURG is blocked in this thread"));
    }
    found
}

/// Measures installing one page with `UFFDIO_COPY`.
pub fn install_page_ns() -> io::Result<f64> {
    let area = Area::anonymous(REGION_BYTES)?;
    let uffd = Uffd::open(Delivery::Sigbus)?;
    let base = area.aligned();
    uffd.register(base, REGION_BYTES, false)?;
    let source = [7u8; SMALL_PAGE_BYTES];
    beside_another_thread(|| {
        median_of(|| {
            let pages = REGION_BYTES / SMALL_PAGE_BYTES;
            let cost = each(pages, || {
                for page in 0..pages {
                    let target = base.wrapping_add(page * SMALL_PAGE_BYTES);
                    // SAFETY: a page of the registered area, which no other code uses.
                    unsafe { uffd.copy(target, source.as_ptr(), SMALL_PAGE_BYTES, false) }?;
                }
                Ok(())
            });
            // SAFETY: the area is private to this function.
            unsafe { memory::advise(base, REGION_BYTES, Advice::DontNeed) }?;
            cost
        })
    })
}

/// Measures discarding one page as part of a vectored call for 64 pages.
pub fn vectored_discard_page_ns() -> io::Result<f64> {
    discard_page_ns(DISCARD_BATCH)
}

/// Measures discarding one page with a separate call.
pub fn single_discard_page_ns() -> io::Result<f64> {
    discard_page_ns(1)
}

/// Measures discards of every second page, so that no two ranges are adjacent.
fn discard_page_ns(batch: usize) -> io::Result<f64> {
    let area = Area::anonymous(REGION_BYTES)?;
    let base = area.aligned();
    let ranges: Vec<Range> = (0..REGION_BYTES / SMALL_PAGE_BYTES)
        .step_by(2)
        .map(|page| Range {
            address: base.wrapping_add(page * SMALL_PAGE_BYTES),
            len_bytes: SMALL_PAGE_BYTES,
        })
        .collect();
    beside_another_thread(|| {
        median_of(|| {
            populate(base, REGION_BYTES)?;
            each(ranges.len(), || {
                for part in ranges.chunks(batch) {
                    if let [only] = part {
                        // SAFETY: a page of the area, which is private to this function.
                        unsafe { memory::advise(only.address, only.len_bytes, Advice::DontNeed) }?;
                    } else {
                        // SAFETY: as above.
                        unsafe { memory::advise_many(part, Advice::DontNeed) }?;
                    }
                }
                Ok(())
            })
        })
    })
}

fn populate(base: *mut u8, len_bytes: usize) -> io::Result<()> {
    for offset in (0..len_bytes).step_by(SMALL_PAGE_BYTES) {
        // SAFETY: the callers pass writable memory that they own.
        unsafe { base.add(offset).write_volatile(1) };
    }
    Ok(())
}

/// Measures write-protecting a 2 MiB region of resident pages, per page.
pub fn region_protect_page_ns() -> io::Result<f64> {
    protect_page_ns(REGION_BYTES)
}

/// Measures write-protecting pages one by one.
pub fn single_protect_page_ns() -> io::Result<f64> {
    protect_page_ns(SMALL_PAGE_BYTES)
}

fn protect_page_ns(step_bytes: usize) -> io::Result<f64> {
    let area = Area::anonymous(REGION_BYTES)?;
    let uffd = Uffd::open(Delivery::Sigbus)?;
    let base = area.aligned();
    populate(base, REGION_BYTES)?;
    uffd.register(base, REGION_BYTES, true)?;
    beside_another_thread(|| {
        median_of(|| {
            let cost = each(REGION_BYTES / SMALL_PAGE_BYTES, || {
                for offset in (0..REGION_BYTES).step_by(step_bytes) {
                    uffd.write_protect(base.wrapping_add(offset), step_bytes, true)?;
                }
                Ok(())
            });
            uffd.write_protect(base, REGION_BYTES, false)?;
            cost
        })
    })
}

/// Measures a fault on a page of `file` that is in the page cache. The file is at least `len_bytes`
/// long, and no process truncates it during the measurement.
///
/// The mapping has `MADV_RANDOM` so that a fault loads one page only; cached neighbours may still
/// be mapped along with it (fault-around), so every sixteenth page is touched.
pub fn page_cache_fault_ns(file: &File, len_bytes: usize) -> io::Result<f64> {
    const STRIDE_BYTES: usize = 16 * SMALL_PAGE_BYTES;
    if file.metadata()?.len() < len_bytes as u64 || len_bytes < STRIDE_BYTES {
        return Err(io::Error::other("the file is too short"));
    }
    let base = memory::map_file(len_bytes, Protection::Read, file.as_fd(), 0)?;
    let area = Area { base, len_bytes };
    // SAFETY: the mapping is private to this function; its contents are the file's.
    unsafe { memory::advise(base, len_bytes, Advice::Random) }?;
    // Load the file into the page cache.
    for offset in (0..len_bytes).step_by(SMALL_PAGE_BYTES) {
        // SAFETY: inside the file, which by contract is not truncated.
        std::hint::black_box(unsafe { base.add(offset).read_volatile() });
    }
    let found = median_of(|| {
        // SAFETY: only the page tables are emptied; the page cache keeps the contents.
        unsafe { memory::advise(base, len_bytes, Advice::DontNeed) }?;
        each(len_bytes.div_ceil(STRIDE_BYTES), || {
            for offset in (0..len_bytes).step_by(STRIDE_BYTES) {
                // SAFETY: as above.
                std::hint::black_box(unsafe { base.add(offset).read_volatile() });
            }
            Ok(())
        })
    });
    drop(area);
    found
}

/// Measures copying one page between warm buffers, with the copy that memory-backed devices use.
pub fn copy_page_ns() -> io::Result<f64> {
    const COUNT: usize = 2000;
    let source = [7u8; SMALL_PAGE_BYTES];
    let mut target = [0u8; SMALL_PAGE_BYTES];
    median_of(|| {
        each(COUNT, || {
            for _ in 0..COUNT {
                let target = std::hint::black_box(target.as_mut_ptr());
                // SAFETY: both buffers are a page long and do not overlap.
                unsafe { crate::copy::copy_to_device(target, source.as_ptr(), SMALL_PAGE_BYTES) };
            }
            Ok(())
        })
    })
}

/// Measures one dependent 8-byte load at a random place of readable memory.
///
/// # Safety
/// `base` is 8-byte aligned and readable for `len_bytes`, which is at least 8; page faults are
/// allowed.
pub unsafe fn random_load_ns(base: *const u8, len_bytes: usize) -> f64 {
    const COUNT: usize = 20_000;
    let words = (len_bytes / 8) as u64;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut passes = [0.0; PASSES];
    for pass in &mut passes {
        let start = Instant::now();
        for _ in 0..COUNT {
            // The next index depends on the loaded value, so that loads do not overlap.
            state = state.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
            let index = ((u128::from(state) * u128::from(words)) >> 64) as usize;
            // SAFETY: the index is below `words`, so the word is readable by the caller's contract.
            let word = unsafe { base.cast::<u64>().add(index).read_volatile() };
            state ^= word & 1;
        }
        *pass = start.elapsed().as_nanos() as f64 / COUNT as f64;
    }
    std::hint::black_box(state);
    passes.sort_by(f64::total_cmp);
    passes[PASSES / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that a figure is positive, or that there is a reason for its absence.
    fn positive(name: &str, found: io::Result<f64>) {
        match found {
            Ok(cost_ns) => assert!(cost_ns > 0.0, "{name}: {cost_ns}"),
            Err(error) => eprintln!("skipped: {name}: {error}"),
        }
    }

    #[test]
    fn everything_can_be_measured() {
        positive("system call", system_call_ns());
        positive("install", install_page_ns());
        positive("vectored discard", vectored_discard_page_ns());
        positive("discard", single_discard_page_ns());
        positive("region protect", region_protect_page_ns());
        positive("protect", single_protect_page_ns());
        positive("copy", copy_page_ns());
        let file = File::open("/proc/self/exe").unwrap();
        positive("page-cache fault", page_cache_fault_ns(&file, 256 << 10));
        assert!(page_cache_fault_ns(&file, 1 << 46).is_err());
    }

    #[test]
    fn the_signal_handler_is_put_back() {
        let before = crate::signal::installed(libc::SIGURG).unwrap().sa_sigaction;
        positive("signal", signal_round_trip_ns());
        assert_eq!(crate::signal::installed(libc::SIGURG).unwrap().sa_sigaction, before);
    }
}
