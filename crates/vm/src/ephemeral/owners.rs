//! The owner of the faults at each address of a region: two levels, like a page table.
//!
//! ```text
//!  blocks of 2 MiB        granules of 32 KiB
//!  ┌──────────────┐       ┌───────┐
//!  │ owner, table ├──────▶│ owner │ × 64
//!  │ owner, table │       └───────┘
//!  └──────────────┘
//! ```
//! A mapping that covers a whole block is entered in the block, so that one of 1 GiB takes 512
//! stores. Tables are allocated when a block is first divided, and stay. A look-up takes two or
//! three loads: it runs in the fault handler.
//!
//! An entry is two words, a pointer and its vtable. Both are set before the mapping is used and
//! cleared when it is retired, so a fault in a mapping in use finds both. A stray access that races
//! with a change finds nothing, or the former owner complete: the pointer is stored last, cleared
//! first, and checked again after reading the vtable.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering, fence};

use aquifer_sys::memory::REGION_BYTES as BLOCK_BYTES;
use aquifer_sys::signal::FaultContext;

use super::GRANULE_BYTES;
use crate::{FaultOwner, Served};

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

fn granules() -> Box<[Entry; GRANULES_A_BLOCK]> {
    Box::new(std::array::from_fn(|_| Entry::default()))
}

/// The owners of a range of addresses.
pub(super) struct Owners {
    base: usize,
    blocks: Box<[Block]>,
}

impl Owners {
    /// Creates a table without owners for `len_bytes` from `base`.
    pub fn new(base: usize, len_bytes: usize) -> Owners {
        let blocks = len_bytes.div_ceil(BLOCK_BYTES);
        Owners { base, blocks: (0..blocks).map(|_| Block::default()).collect() }
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
            let block = &self.blocks[at / BLOCK_BYTES];
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
        let block = self.blocks.get(at / BLOCK_BYTES)?;
        let granule = block
            .granules
            .get()
            .and_then(|granules| granules[at % BLOCK_BYTES / GRANULE_BYTES].get());
        granule.or_else(|| block.whole.get())
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
        assert!(!is_served(&owners, len), "behind the end");
    }
}
