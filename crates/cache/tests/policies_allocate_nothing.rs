//! Policies run inside a signal handler that may have interrupted `malloc`: outside `resize` they
//! must not allocate. A counting allocator checks this, so it is a program of its own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use aquifer_cache::policy::{HitTable, PolicyKind};
use aquifer_cache::{FrameId, PageId, PageKey, StoreId};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is forwarded to `System`; counting uses a thread-local that needs no
// allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the contract of `GlobalAlloc::alloc`, which is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: `memory` came from `alloc`, so from `System`, with the same layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn nothing_but_resize_allocates() {
    const FRAMES: usize = 1000;
    for &kind in PolicyKind::all() {
        let mut policy = kind.build();
        let before_resize = ALLOCATIONS.get();
        policy.resize(FRAMES, FRAMES);
        assert!(ALLOCATIONS.get() > before_resize, "{kind}: allocations are not counted");

        let hits = HitTable::new(policy.hit_mode(), FRAMES);
        let mut victims = Vec::with_capacity(64);
        let mut pages = vec![0u64; FRAMES];
        let key = |page: u64| PageKey { store: StoreId(0), page: PageId(page) };

        let before = ALLOCATIONS.get();
        let mut next_page = 0;
        let mut free = 0..FRAMES as u32;
        for round in 0..1000u32 {
            for frame in free.by_ref().map(FrameId).chain(victims.drain(..)) {
                // Every third page was evicted recently, so the ghost queue is hit.
                let page = if next_page % 3 == 0 { next_page / 2 } else { next_page };
                next_page += 1;
                pages[frame.0 as usize] = page;
                hits.reset(frame);
                policy.inserted(frame, key(page), &hits);
            }
            for step in 0..100 {
                hits.hit(FrameId((round * 7 + step * step) % FRAMES as u32));
            }
            for step in 0..10 {
                policy.demoted(FrameId((round * 31 + step * 97) % FRAMES as u32), &hits);
            }
            let page_of = |frame: FrameId| key(pages[frame.0 as usize]);
            policy.victims(64, &hits, &page_of, &mut victims);
            let pinned = victims.pop().expect("there are frames to name");
            policy.returned(pinned, page_of(pinned), &hits);
            let truncated = FrameId(round % FRAMES as u32);
            if !victims.contains(&truncated) {
                policy.removed(truncated);
                policy.returned(truncated, page_of(truncated), &hits);
            }
        }
        assert_eq!(ALLOCATIONS.get() - before, 0, "{kind}");
    }
}
