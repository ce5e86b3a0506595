//! The owner of the faults at each address of a region: three levels, like a page table.
//!
//! ```text
//!  parts of 1 GiB         blocks of 2 MiB        granules of 32 KiB
//!  ┌──────────────┐       ┌──────────────┐       ┌───────┐
//!  │ owner, table ├──────▶│ owner, table ├──────▶│ owner │ × 64
//!  │ owner, table │       │      …       │       └───────┘
//!  └──────────────┘       └──────────────┘ × 512
//! ```
//! A mapping that covers a whole part or block is entered there, so that one of 1 GiB takes one
//! store, and one of 1 TiB a table of 32 KiB. Tables are allocated when a part or block is first
//! divided, and stay. A look-up takes two to four loads: it runs in the fault handler.
//!
//! An entry is two words, a pointer and its vtable. Both are set before the mapping is used and
//! cleared when it is retired, so a fault in a mapping in use finds both. A stray access that races
//! with a change finds nothing, or the former owner complete: the pointer is stored last, cleared
//! first, and checked again after reading the vtable.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering, fence};

use aquifer_sys::memory::REGION_BYTES as BLOCK_BYTES;
use aquifer_sys::signal::FaultContext;

use super::{GRANULE_BYTES, REGION_BYTES as PART_BYTES};
use crate::{FaultOwner, Served};

const BLOCKS_A_PART: usize = PART_BYTES / BLOCK_BYTES;
const GRANULES_A_BLOCK: usize = BLOCK_BYTES / GRANULE_BYTES;

/// The words of `*const dyn FaultOwner`.
type Words = [*mut (); 2];

const _: () = assert!(size_of::<*const dyn FaultOwner>() == size_of::<Words>());

fn words_of(owner: *const dyn FaultOwner) -> Words {
    // SAFETY: a pointer to a trait object is two pointers; `get` reassembles exactly these words.
    unsafe { std::mem::transmute::<*const dyn FaultOwner, Words>(owner) }
}

#[derive(Default)]
struct Entry {
    words: [AtomicPtr<()>; 2],
}

impl Entry {
    fn set(&self, words: Words) {
        self.words[1].store(words[1], Ordering::Relaxed);
        // Release pairs with the acquire in `get`: a reader of the first word sees the second.
        self.words[0].store(words[0], Ordering::Release);
    }

    fn clear(&self) {
        self.words[0].store(std::ptr::null_mut(), Ordering::Relaxed);
        // Pairs with the acquire fence in `get`: a reader of a second word stored after this sees
        // that the first was cleared.
        fence(Ordering::Release);
    }

    fn get(&self) -> Option<*const dyn FaultOwner> {
        // Acquire pairs with the release in `set`.
        let first = self.words[0].load(Ordering::Acquire);
        if first.is_null() {
            return None;
        }
        let second = self.words[1].load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if self.words[0].load(Ordering::Relaxed) != first {
            return None;
        }
        // SAFETY: `set` stored both words together: had the second changed in between, the first
        // would have been cleared.
        Some(unsafe { std::mem::transmute::<Words, *const dyn FaultOwner>([first, second]) })
    }
}

#[derive(Default)]
struct Block {
    whole: Entry,
    granules: OnceLock<Box<[Entry; GRANULES_A_BLOCK]>>,
}

#[derive(Default)]
struct Part {
    whole: Entry,
    blocks: OnceLock<Box<[Block]>>,
}

fn blocks() -> Box<[Block]> {
    (0..BLOCKS_A_PART).map(|_| Block::default()).collect()
}

fn granules() -> Box<[Entry; GRANULES_A_BLOCK]> {
    Box::new(std::array::from_fn(|_| Entry::default()))
}

/// The owners of a range of addresses.
pub(super) struct Owners {
    base: usize,
    parts: Box<[Part]>,
}

impl Owners {
    /// Creates a table without owners for `len_bytes` from `base`.
    pub fn new(base: usize, len_bytes: usize) -> Owners {
        let parts = len_bytes.div_ceil(PART_BYTES);
        Owners { base, parts: (0..parts).map(|_| Part::default()).collect() }
    }

    /// Sets the owner that serves the faults of whole granules.
    ///
    /// # Safety
    /// `owner` stays valid until it is cleared.
    pub unsafe fn set(&self, address: usize, len_bytes: usize, owner: *const dyn FaultOwner) {
        let words = words_of(owner);
        self.for_each(address, len_bytes, |entry| entry.set(words));
    }

    /// Clears the owner.
    pub fn clear(&self, address: usize, len_bytes: usize) {
        self.for_each(address, len_bytes, Entry::clear);
    }

    fn for_each(&self, address: usize, len_bytes: usize, mut visit: impl FnMut(&Entry)) {
        let (mut at, end) = (address - self.base, address - self.base + len_bytes);
        while at < end {
            let part = &self.parts[at / PART_BYTES];
            if at % PART_BYTES == 0 && end - at >= PART_BYTES {
                visit(&part.whole);
                at += PART_BYTES;
                continue;
            }
            let block = &part.blocks.get_or_init(blocks)[at % PART_BYTES / BLOCK_BYTES];
            if at % BLOCK_BYTES == 0 && end - at >= BLOCK_BYTES {
                visit(&block.whole);
                at += BLOCK_BYTES;
                continue;
            }
            let table = block.granules.get_or_init(granules);
            visit(&table[at % BLOCK_BYTES / GRANULE_BYTES]);
            at += GRANULE_BYTES;
        }
    }

    fn owner_of(&self, address: usize) -> Option<*const dyn FaultOwner> {
        let at = address.checked_sub(self.base)?;
        let part = self.parts.get(at / PART_BYTES)?;
        let block = part.blocks.get().map(|blocks| &blocks[at % PART_BYTES / BLOCK_BYTES]);
        let granules = block.and_then(|block| block.granules.get());
        granules
            .and_then(|granules| granules[at % BLOCK_BYTES / GRANULE_BYTES].get())
            .or_else(|| block?.whole.get())
            .or_else(|| part.whole.get())
    }
}

impl FaultOwner for Owners {
    fn serve(&self, fault: &FaultContext) -> Served {
        match self.owner_of(fault.address) {
            // SAFETY: valid until it is cleared (contract of `set`), and the faulting thread is
            // using the mapping.
            Some(owner) => unsafe { &*owner }.serve(fault),
            None => Served::No,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    struct Named;

    impl FaultOwner for Named {
        fn serve(&self, _fault: &FaultContext) -> Served {
            Served::Yes
        }
    }

    const BASE: usize = 1 << 40;

    fn is_served(owners: &Owners, at: usize) -> bool {
        let fault = FaultContext {
            signal: libc::SIGBUS,
            address: BASE + at,
            write: None,
            fallible: false,
            hardware_error: false,
        };
        owners.serve(&fault) == Served::Yes
    }

    /// Compares the granules that the table serves with a reference.
    #[test]
    fn an_owner_has_its_granules_and_no_others() {
        let len = 4 * BLOCK_BYTES;
        let owners = Owners::new(BASE, len);
        let named = Named;
        let mut random = aquifer_testkit::rng::Rng::new(aquifer_testkit::campaign::seed(7));
        let granules = len / GRANULE_BYTES;
        let mut expected = vec![false; granules];
        for _ in 0..200 {
            let first = random.below(granules as u64) as usize;
            let count = 1 + random.below((granules - first) as u64) as usize;
            let range = first..first + count;
            let (at, bytes) = (BASE + first * GRANULE_BYTES, count * GRANULE_BYTES);
            if expected[range.clone()].iter().all(|&served| !served) {
                // SAFETY: it outlives the table.
                unsafe { owners.set(at, bytes, &raw const named) };
                for granule in 0..granules {
                    let inside = range.contains(&granule);
                    assert_eq!(is_served(&owners, granule * GRANULE_BYTES + 77), inside);
                }
                owners.clear(at, bytes);
            }
            expected.fill(false);
        }
        assert!(!is_served(&owners, 0));
        assert!(!is_served(&owners, PART_BYTES), "behind the end");
    }

    #[test]
    fn a_large_mapping_is_entered_in_few_places() {
        let owners = Owners::new(BASE, 5 * PART_BYTES);
        let named = Named;
        // From a granule before a part to one behind another.
        let (from, to) = (PART_BYTES - GRANULE_BYTES, 4 * PART_BYTES + GRANULE_BYTES);
        // SAFETY: it outlives the table.
        unsafe { owners.set(BASE + from, to - from, &raw const named) };
        let inside = [from, PART_BYTES, 3 * PART_BYTES + BLOCK_BYTES + 9, to - 1];
        assert_eq!(inside.map(|at| is_served(&owners, at)), [true; 4]);
        assert_eq!([0, from - 1, to, 5 * PART_BYTES].map(|at| is_served(&owners, at)), [false; 4]);
        let divided = owners.parts.iter().map(|part| part.blocks.get().is_some());
        assert_eq!(divided.collect::<Vec<_>>(), [true, false, false, false, true]);
        owners.clear(BASE + from, to - from);
        assert_eq!(inside.map(|at| is_served(&owners, at)), [false; 4]);
    }
}
