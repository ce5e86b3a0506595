//! A store's interface to the engine: what the evictor and the workers call.

use std::ops::Range;
use std::sync::atomic::Ordering;

use aquifer_sys::uffd::FaultMessage;

use crate::engine::duties::Height;
use crate::engine::{Answer, AttachedStore, Cleaning, Evicted, Keeps};
use crate::ids::{FrameId, PageId};
use crate::page_word::State;
use crate::store::{PageMemory, Store};

impl<M: PageMemory> AttachedStore for Store<M> {
    fn evict(&self, victims: &[(FrameId, PageId)], write_back: Cleaning) -> Evicted {
        self.evict_victims(victims, write_back)
    }

    fn height(&self) -> &Height {
        &self.height
    }

    fn keeps(&self, page: PageId, frame: FrameId) -> Keeps {
        let seen = self.seen(page.0);
        match seen.state() {
            // An evictor is about to give the frame back.
            State::Evicting => Keeps::Nothing,
            // The owner word names a page that a thread is loading or about to load.
            _ if !seen.is_resident() => Keeps::Loading,
            _ if seen.frame() != frame => Keeps::Nothing,
            State::Exclusive => Keeps::Pin,
            _ if seen.pins() > 0 => Keeps::Pin,
            State::Dirty => Keeps::Dirt,
            State::Cleaning => Keeps::Writing,
            _ => Keeps::Nothing,
        }
    }

    fn vacate(&self, pages: &[PageId]) {
        let (Some(first), Some(last)) = (pages.first(), pages.last()) else {
            return;
        };
        // The pages are sorted. Write back everything in between as well, because that makes few
        // large transfers; the next flush reports a failure.
        let _ = self.write_back(first.0..last.0 + 1);
        self.discard_clean(pages.iter().map(|page| page.0));
    }

    fn prefetch(&self, runs: &[Range<u64>]) {
        let pages = self.geometry.pages();
        let inside: Vec<_> = runs.iter().map(|run| run.start..run.end.min(pages)).collect();
        // A hint: the access that needs the page meets the error again, and reports it.
        self.load_hinted(&inside);
    }

    fn dirty_pages(&self) -> u64 {
        Store::dirty_pages(self)
    }

    fn device_counters(&self) -> (String, Vec<(&'static str, u64)>) {
        (self.device().name().to_owned(), self.device().counters())
    }

    fn leave(&self) {
        // Relaxed: it only stops hints; detaching waits for actual users of the store.
        self.leaving.store(true, Ordering::Relaxed);
    }

    fn addresses(&self) -> Range<usize> {
        self.memory.addresses()
    }

    fn answer(&self, fault: &FaultMessage, may_wait: bool) -> Answer {
        M::answer(self, fault, may_wait)
    }

    fn try_again(&self, address: usize) -> bool {
        M::try_again(self, address)
    }
}
