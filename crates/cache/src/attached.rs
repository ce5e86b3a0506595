//! A store as the engine sees it: what the evictor and the workers may ask of it.

use std::sync::atomic::Ordering;

use crate::duties::Height;
use crate::engine::{AttachedStore, Cleaning, Evicted, Keeps};
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
            // Its owner is a page that a thread is loading, or is about to.
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
        // The pages are sorted. Cleaning what lies between as well makes few large transfers of them; a
        // failure is met again by the next flush.
        let _ = self.write_back(first.0..last.0 + 1);
        self.discard_clean(pages.iter().map(|page| page.0));
    }

    fn prefetch(&self, first: u64, pages: u64) {
        let end = first.saturating_add(pages).min(self.geometry.pages());
        // A hint: an error is met again, and reported, by whoever needs the page.
        let _ = self.load_many(std::slice::from_ref(&(first..end)), false);
    }

    fn forget(&self, page: PageId, slot: FrameId) {
        let word = self.word(page.0);
        if word.begin_forget(slot).is_ok() {
            word.finish_evict(None);
        }
    }

    fn dirty_pages(&self) -> u64 {
        Store::dirty_pages(self)
    }

    fn leave(&self) {
        // Relaxed: only a hint stops for it; what is done to the store is waited for.
        self.leaving.store(true, Ordering::Relaxed);
    }
}
