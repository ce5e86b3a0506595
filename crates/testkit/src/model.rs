//! Plain models of published algorithms: the papers' pseudocode over standard collections, to
//! compare real implementations with. A model of an eviction algorithm holds pages, has no frames,
//! and evicts one page when a miss finds it full.
//!
//! ```
//! use aquifer_testkit::{model::{self, Lru}, trace};
//!
//! // A loop that does not fit defeats LRU.
//! assert_eq!(model::hit_rate(&mut Lru::new(10), trace::loop_(11).take(1000)), 0.0);
//! ```

use std::collections::{BTreeMap, HashMap, VecDeque};

/// An algorithm that decides for each access whether it hits.
pub trait Model {
    /// Accesses `page`, loading it if it is missing; returns whether it was a hit.
    fn access(&mut self, page: u64) -> bool;
}

/// Returns the fraction of a trace's accesses that hit. The trace must end.
pub fn hit_rate(model: &mut dyn Model, trace: impl Iterator<Item = u64>) -> f64 {
    let (mut hits, mut accesses) = (0u64, 0u64);
    for page in trace {
        accesses += 1;
        hits += u64::from(model.access(page));
    }
    hits as f64 / accesses.max(1) as f64
}

/// CLOCK (Corbató 1968): slots in a circle, a reference bit each and a hand. A loaded page's bit is
/// clear.
#[derive(Debug)]
pub struct Clock {
    capacity: usize,
    slots: Vec<(u64, bool)>,
    slot_of: HashMap<u64, usize>,
    hand: usize,
}

impl Clock {
    /// Creates it for `capacity` pages.
    pub fn new(capacity: usize) -> Clock {
        Clock { capacity, slots: Vec::new(), slot_of: HashMap::new(), hand: 0 }
    }
}

impl Model for Clock {
    fn access(&mut self, page: u64) -> bool {
        if let Some(&slot) = self.slot_of.get(&page) {
            self.slots[slot].1 = true;
            return true;
        }
        if self.slots.len() < self.capacity {
            self.slot_of.insert(page, self.slots.len());
            self.slots.push((page, false));
            return false;
        }
        while self.slots[self.hand].1 {
            self.slots[self.hand].1 = false;
            self.hand = (self.hand + 1) % self.capacity;
        }
        self.slot_of.remove(&self.slots[self.hand].0);
        self.slots[self.hand] = (page, false);
        self.slot_of.insert(page, self.hand);
        self.hand = (self.hand + 1) % self.capacity;
        false
    }
}

/// True least recently used: every access is ordered.
#[derive(Debug)]
pub struct Lru {
    capacity: usize,
    accesses: u64,
    last_access: HashMap<u64, u64>,
    by_last_access: BTreeMap<u64, u64>,
}

impl Lru {
    /// Creates it for `capacity` pages.
    pub fn new(capacity: usize) -> Lru {
        Lru { capacity, accesses: 0, last_access: HashMap::new(), by_last_access: BTreeMap::new() }
    }
}

impl Model for Lru {
    fn access(&mut self, page: u64) -> bool {
        self.accesses += 1;
        let before = self.last_access.get(&page).copied();
        if let Some(before) = before {
            self.by_last_access.remove(&before);
        } else if self.last_access.len() == self.capacity {
            let (_, oldest) = self.by_last_access.pop_first().expect("a full cache has pages");
            self.last_access.remove(&oldest);
        }
        self.last_access.insert(page, self.accesses);
        self.by_last_access.insert(self.accesses, page);
        before.is_some()
    }
}

/// SIEVE (NSDI 2024), algorithm 1.
#[derive(Debug)]
pub struct Sieve {
    capacity: usize,
    /// The paper's T: its tail is at index 0, its head at the end.
    queue: Vec<u64>,
    visited: HashMap<u64, bool>,
    /// The paper's p, an index into `queue`.
    hand: Option<usize>,
}

impl Sieve {
    /// Creates it for `capacity` pages.
    pub fn new(capacity: usize) -> Sieve {
        Sieve { capacity, queue: Vec::new(), visited: HashMap::new(), hand: None }
    }

    fn evict(&mut self) {
        let mut at = self.hand.unwrap_or(0);
        while self.visited[&self.queue[at]] {
            self.visited.insert(self.queue[at], false);
            at += 1;
            if at == self.queue.len() {
                at = 0;
            }
        }
        let evicted = self.queue.remove(at);
        self.visited.remove(&evicted);
        // The entry that preceded it, towards the head, now has its index.
        self.hand = (at < self.queue.len()).then_some(at);
    }
}

impl Model for Sieve {
    fn access(&mut self, page: u64) -> bool {
        if let Some(visited) = self.visited.get_mut(&page) {
            *visited = true;
            return true;
        }
        if self.queue.len() == self.capacity {
            self.evict();
        }
        self.queue.push(page);
        self.visited.insert(page, false);
        false
    }
}

/// S3-FIFO (SOSP 2023), algorithm 1, with the details from the text: a page's counter is cleared
/// when it moves to *main*, and a page is in the ghost queue while it is among the last |main| that
/// entered it.
#[derive(Debug)]
pub struct S3Fifo {
    capacity: usize,
    small_target: usize,
    single: bool,
    /// Oldest first.
    small: VecDeque<u64>,
    /// Oldest first.
    main: VecDeque<u64>,
    frequency: HashMap<u64, u8>,
    /// Page to its turn in `ghost_order`.
    ghost: HashMap<u64, u64>,
    ghost_order: VecDeque<(u64, u64)>,
    ghost_turns: u64,
}

impl S3Fifo {
    /// Creates it for `capacity` pages, exactly as in the paper: when a promotion overfills *main*,
    /// a page of *main* is evicted and one of *small* as well.
    pub fn new(capacity: usize) -> S3Fifo {
        S3Fifo {
            capacity,
            small_target: (capacity / 10).max(1),
            single: false,
            small: VecDeque::new(),
            main: VecDeque::new(),
            frequency: HashMap::new(),
            ghost: HashMap::new(),
            ghost_order: VecDeque::new(),
            ghost_turns: 0,
        }
    }

    /// As [`S3Fifo::new`], but one miss evicts one page: evicting a page of *main* is enough.
    pub fn with_single_evictions(capacity: usize) -> S3Fifo {
        S3Fifo { single: true, ..S3Fifo::new(capacity) }
    }

    fn main_target(&self) -> usize {
        self.capacity - self.small_target
    }

    fn evict(&mut self) {
        if self.small.len() >= self.small_target {
            self.evict_small();
        } else {
            self.evict_main();
        }
    }

    fn evict_small(&mut self) {
        let mut evicted = false;
        while !evicted && !self.small.is_empty() {
            let tail = self.small.pop_front().expect("checked");
            if self.frequency[&tail] > 1 {
                self.frequency.insert(tail, 0);
                self.main.push_back(tail);
                if self.main.len() > self.main_target() {
                    self.evict_main();
                    evicted = self.single;
                }
            } else {
                self.insert_ghost(tail);
                self.frequency.remove(&tail);
                evicted = true;
            }
        }
    }

    fn evict_main(&mut self) {
        let mut evicted = false;
        while !evicted && !self.main.is_empty() {
            let tail = self.main.pop_front().expect("checked");
            match self.frequency[&tail] {
                0 => {
                    self.frequency.remove(&tail);
                    evicted = true;
                }
                frequency => {
                    self.frequency.insert(tail, frequency - 1);
                    self.main.push_back(tail);
                }
            }
        }
    }

    fn insert_ghost(&mut self, page: u64) {
        self.ghost_turns += 1;
        self.ghost.insert(page, self.ghost_turns);
        self.ghost_order.push_back((page, self.ghost_turns));
        while self.ghost_order.len() > self.main_target() {
            let (oldest, turn) = self.ghost_order.pop_front().expect("checked");
            if self.ghost.get(&oldest) == Some(&turn) {
                self.ghost.remove(&oldest);
            }
        }
    }
}

impl Model for S3Fifo {
    fn access(&mut self, page: u64) -> bool {
        if let Some(frequency) = self.frequency.get_mut(&page) {
            *frequency = (*frequency + 1).min(3);
            return true;
        }
        while self.small.len() + self.main.len() >= self.capacity {
            self.evict();
        }
        let queue = match self.ghost.remove(&page) {
            Some(_) => &mut self.main,
            None => &mut self.small,
        };
        queue.push_back(page);
        self.frequency.insert(page, 0);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace;

    fn hits(model: &mut dyn Model, pages: &[u64]) -> Vec<bool> {
        pages.iter().map(|&page| model.access(page)).collect()
    }

    /// Small traces worked out by hand. 1 hits, then the cache of two pages has to evict one.
    #[test]
    fn each_model_picks_its_own_victim() {
        let trace = [1, 2, 1, 3, 1, 2];
        assert_eq!(hits(&mut Lru::new(2), &trace), [false, false, true, false, true, false]);
        assert_eq!(hits(&mut Clock::new(2), &trace), [false, false, true, false, true, false]);
        assert_eq!(hits(&mut Sieve::new(2), &trace), [false, false, true, false, true, false]);
    }

    /// SIEVE leaves a survivor in place, CLOCK moves it. With three pages and 1 hit, 4 evicts 2 in
    /// both. SIEVE's order is then 1 3 4, its hand at 3; CLOCK's is 3 1 4. 5 evicts 3 in both. Then
    /// SIEVE's hand is at 4 (its order 1 4 5), CLOCK's next is 1.
    #[test]
    fn a_survivor_keeps_its_place_in_sieve_only() {
        let trace = [1, 2, 3, 1, 4, 5, 6, 1];
        assert_eq!(hits(&mut Sieve::new(3), &trace).last(), Some(&true));
        assert_eq!(hits(&mut Clock::new(3), &trace).last(), Some(&false));
    }

    /// A page that returns while it is in the ghost queue survives a scan; one that was hit once in
    /// *small* does not.
    #[test]
    fn s3_fifo_keeps_returning_pages_from_a_scan() {
        let mut model = S3Fifo::new(20);
        hits(&mut model, &(0..20).collect::<Vec<_>>());
        hits(&mut model, &[20, 21]); // evicts 0 and 1 into the ghost queue
        assert_eq!(hits(&mut model, &[0, 5]), [false, true]); // 0 enters main
        hits(&mut model, &(100..200).collect::<Vec<_>>());
        assert_eq!(hits(&mut model, &[0, 5]), [true, false]);
    }

    #[test]
    fn uniform_accesses_hit_as_often_as_there_are_frames() {
        let models: [Box<dyn Model>; 4] = [
            Box::new(Clock::new(250)),
            Box::new(Lru::new(250)),
            Box::new(Sieve::new(250)),
            Box::new(S3Fifo::new(250)),
        ];
        for mut model in models {
            let warm = trace::uniform(1000, 1).take(5_000);
            hit_rate(&mut *model, warm);
            let rate = hit_rate(&mut *model, trace::uniform(1000, 2).take(50_000));
            assert!((rate - 0.25).abs() < 0.01, "{rate}");
        }
    }
}

/// The map-ahead window (HotStorage'17) for several streams of faults, as a plain statement of the
/// rule.
#[derive(Debug)]
pub struct WindowModel {
    most_streams: usize,
    largest_pages: u64,
    /// Searched in creation order; a stream that is reused keeps its place.
    streams: Vec<Stream>,
    faults: u64,
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    expected: u64,
    window: u64,
    continued_at: u64,
}

impl WindowModel {
    /// Creates it for this many streams, with windows of at most this many pages.
    pub fn new(most_streams: usize, largest_pages: u64) -> WindowModel {
        WindowModel { most_streams, largest_pages, streams: vec![], faults: 0 }
    }

    /// Returns how many pages a fault at `page` of `pages` brings in.
    pub fn window_at(&mut self, page: u64, pages: u64) -> u64 {
        self.faults += 1;
        let number = self.stream_of(page);
        let stream = &mut self.streams[number];
        stream.continued_at = self.faults;
        stream.expected = page + stream.window;
        stream.window.min(pages - page)
    }

    /// Returns the stream that the fault belongs to, with its new window.
    fn stream_of(&mut self, page: u64) -> usize {
        for (number, stream) in self.streams.iter_mut().enumerate() {
            // "Doubled when a sequential page fault occurs".
            if page == stream.expected {
                stream.window = (2 * stream.window).min(self.largest_pages);
                return number;
            }
            // "Reduced by half when a random page fault occurs", if it is near enough to belong to
            // this stream.
            if page > stream.expected && page <= stream.expected + stream.window {
                stream.window = (stream.window / 2).max(1);
                return number;
            }
        }
        let fresh = Stream { expected: 0, window: 1, continued_at: 0 };
        if self.streams.len() < self.most_streams {
            self.streams.push(fresh);
            return self.streams.len() - 1;
        }
        let quietest = (0..self.streams.len())
            .min_by_key(|&number| self.streams[number].continued_at)
            .expect("at least one stream is followed");
        self.streams[quietest] = fresh;
        quietest
    }
}
