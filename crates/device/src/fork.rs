//! Detects that the process is a forked child.
//!
//! A child inherits copies of descriptors and memory, but not its parent's threads, and an
//! inherited io_uring is still the parent's. Per-process state is therefore stamped with a
//! *generation*; code that finds an older stamp creates the state anew.
//!
//! The mark is a page that the kernel zeroes in a child (`MADV_WIPEONFORK`). A process ID would do
//! almost as well, but a daemon's grandchild may get the ID of the process that started it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Address of the marked page; 0 before the first call, [`REFUSED`] where the kernel refused one. Not
/// behind a lock: a thread may have held it at a fork.
static MARK: AtomicUsize = AtomicUsize::new(0);
static GENERATION: AtomicU64 = AtomicU64::new(1);

/// No page has this address.
const REFUSED: usize = 1;

/// The mark's values: 0 in a new child, `RAISING` while one thread increments the generation,
/// `MARKED`.
const RAISING: u64 = 1;
const MARKED: u64 = 2;

/// Returns a number that is constant within a process and differs from its parent's.
pub(crate) fn generation() -> u64 {
    let address = address_of_mark();
    if address == REFUSED {
        return u64::from(std::process::id());
    }
    // SAFETY: `map_mark` mapped the page for the life of the process; it is only used as this
    // atomic.
    let mark = unsafe { &*(address as *const AtomicU64) };
    // Acquire: pairs with the release store below, so that a thread that reads MARKED also sees the
    // new generation.
    while mark.load(Ordering::Acquire) != MARKED {
        if mark.compare_exchange(0, RAISING, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            GENERATION.fetch_add(1, Ordering::Relaxed);
            mark.store(MARKED, Ordering::Release);
        } else {
            std::hint::spin_loop();
        }
    }
    // Relaxed: ordered by the load of the mark above.
    GENERATION.load(Ordering::Relaxed)
}

fn address_of_mark() -> usize {
    // Acquire pairs with the release below: the page was written.
    let known = MARK.load(Ordering::Acquire);
    if known != 0 {
        return known;
    }
    let made = map_mark();
    match MARK.compare_exchange(0, made, Ordering::Release, Ordering::Acquire) {
        Ok(_) => made,
        Err(known) => {
            if made != REFUSED {
                // SAFETY: mapped by `map_mark`, and not published.
                unsafe { libc::munmap(made as *mut libc::c_void, 4096) };
            }
            known
        }
    }
}

fn map_mark() -> usize {
    // SAFETY: a new private anonymous mapping at an address of the kernel's choice.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return REFUSED;
    }
    // SAFETY: the page just mapped, which no other code uses yet.
    if unsafe { libc::madvise(page, 4096, libc::MADV_WIPEONFORK) } != 0 {
        // SAFETY: as above; it is not used afterwards.
        unsafe { libc::munmap(page, 4096) };
        return REFUSED;
    }
    // SAFETY: mapped, writable, aligned, and not yet shared with another thread.
    unsafe { page.cast::<u64>().write(MARKED) };
    page as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_another_generation() {
        let here = generation();
        assert_eq!(here, generation());
        // SAFETY: the child only compares two numbers and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let differs = generation() != here && generation() == generation();
            // SAFETY: ends the child without running any of the parent's code.
            unsafe { libc::_exit(i32::from(!differs)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child saw its parent's generation");
        assert_eq!(generation(), here);
    }
}
