//! Threads that need a frame: which of them wait, which fail, and that none waits for itself.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use aquifer_cache::policy::{HitMode, HitTable, Policy, PolicyKind};
use aquifer_cache::{Advice, Cache, CacheError, FrameId, Mapping, PageId, PageKey};
use aquifer_device::{Device, DeviceError, IoOperation, MemoryDevice};

use crate::support::{Hooked, OverMapping, block_on, load, memory, store, wait_until};
use aquifer_testkit::watchdog::Watchdog;

const PAGE: usize = 4096;
const BUDGET: usize = 6 << 20;

/// Runs `work` in a separate thread and ends the process if it hangs.
fn must_end(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    let mut watchdog = Watchdog::new();
    while ended.recv_timeout(Duration::from_secs(1)) == Err(mpsc::RecvTimeoutError::Timeout) {
        if watchdog.hangs() {
            // The thread may be in a handler of signals: nothing can unwind it.
            aquifer_testkit::watchdog::end("a test of frames");
        }
    }
    worker.join().unwrap();
}

fn cache() -> Cache {
    Cache::builder().budget_bytes(BUDGET as u64).build().unwrap()
}

/// Writing back a page of the upper mapping needs frames of the same cache that the page is to
/// free.
#[test]
fn a_device_over_a_mapping_of_the_same_cache_is_written_back() {
    for (levels, bare) in [(1, false), (1, true), (2, false), (2, true)] {
        must_end(move || {
            const LEN: usize = 2 * BUDGET;
            let cache = cache();
            let (bottom, mut bytes) = memory(LEN, 1);
            let mut device: Arc<dyn Device> = bottom.clone();
            for _ in 0..levels {
                let below = cache.map_mut(device).unwrap();
                // Frames that a batch needs for its own store must not raise that store's height.
                for part in 0..12 {
                    let start = (part % 4 * LEN / 4) as u64;
                    let quarter = start..start + LEN as u64 / 4;
                    below.touch_many(std::slice::from_ref(&quarter)).unwrap();
                }
                device = Arc::new(OverMapping { below, bare });
            }
            let top = cache.map_mut(device).unwrap();
            for (page, page_bytes) in bytes.chunks_mut(PAGE).enumerate() {
                page_bytes[7] = page as u8;
                if bare {
                    store(&top, page * PAGE + 7, page as u8);
                } else {
                    top.set((page * PAGE + 7) as u64, page as u8).unwrap();
                }
            }
            top.flush_all().unwrap();
            assert!(bottom.to_vec() == bytes, "{levels} levels, bare {bare}");
            drop(top);
            wait_until("nothing in use", || cache.stats().resident_pages == 0);
        });
    }
}

/// While another thread stores to a third mapping, and the budget changes.
#[test]
fn a_device_over_a_mapping_survives_shrinks_and_flushes() {
    must_end(|| {
        const LEN: usize = 2 * BUDGET;
        let cache = cache();
        let (bottom, _) = memory(LEN, 2);
        let below = cache.map_mut(bottom.clone()).unwrap();
        let top = cache.map_mut(OverMapping { below, bare: false }).unwrap();
        let (other_device, _) = memory(LEN, 3);
        let other = cache.map_mut(other_device.clone()).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for page in (0..LEN / PAGE).cycle() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    store(&other, page * PAGE, 1);
                }
            });
            for round in 1..=crate::support::steps(4) as u8 {
                for page in 0..LEN / PAGE {
                    top.set((page * PAGE) as u64, round).unwrap();
                }
                cache.resize((BUDGET + usize::from(round % 2) * BUDGET) as u64).unwrap();
                top.flush_all().unwrap();
                assert!(bottom.to_vec().chunks(PAGE).all(|page| page[0] == round), "round {round}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
}

/// A device that drops a mapping while it writes.
struct Dropping {
    data: Arc<dyn Device>,
    dropped: Mutex<Option<Mapping>>,
}

impl Device for Dropping {
    fn name(&self) -> &str {
        "dropping"
    }
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.data.len_bytes()
    }
    fn is_writable(&self) -> bool {
        true
    }
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.data.read_at(offset_bytes, buffer)
    }
    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        let dropped = self.dropped.lock().unwrap().take();
        drop(dropped);
        self.data.write_at(offset_bytes, buffer)
    }
    fn sync(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn access_path(&self) -> String {
        "memory".into()
    }
}

/// The evicting thread holds victims of both mappings. The write of one drops the other, whose
/// teardown needs its frames.
#[test]
fn a_mapping_that_is_dropped_while_another_ones_device_writes_waits_for_none_of_its_frames() {
    must_end(|| {
        let cache = cache();
        let (data, _) = memory(2 * BUDGET, 1);
        let (other_data, _) = memory(2 * BUDGET, 2);
        let other = cache.map(other_data).unwrap();
        let device = Arc::new(Dropping { data, dropped: Mutex::new(None) });
        let mapping = cache.map_mut(device.clone()).unwrap();
        for page in 0..BUDGET / PAGE / 4 {
            other.get::<u8>((page * PAGE) as u64).unwrap();
            mapping.set((page * PAGE) as u64, 1u8).unwrap();
        }
        *device.dropped.lock().unwrap() = Some(other);
        for page in 0..2 * BUDGET / PAGE {
            mapping.set((page * PAGE) as u64, 2u8).unwrap();
        }
        assert!(device.dropped.lock().unwrap().is_none(), "it was written to");
    });
}

/// CLOCK that counts how often it is asked for victims.
struct Counted {
    clock: Box<dyn Policy>,
    asked: Arc<AtomicUsize>,
}

impl Policy for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }
    fn hit_mode(&self) -> HitMode {
        self.clock.hit_mode()
    }
    fn resize(&mut self, frames: usize, max_frames: usize) {
        self.clock.resize(frames, max_frames);
    }
    fn inserted(&mut self, frame: FrameId, page: PageKey, hits: &HitTable) {
        self.clock.inserted(frame, page, hits);
    }
    fn removed(&mut self, frame: FrameId) {
        self.clock.removed(frame);
    }
    fn victims(
        &mut self,
        want: usize,
        hits: &HitTable,
        page_of: &dyn Fn(FrameId) -> PageKey,
        victims: &mut Vec<FrameId>,
    ) {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.clock.victims(want, hits, page_of, victims);
    }
    fn returned(&mut self, frame: FrameId, page: PageKey, hits: &HitTable) {
        self.clock.returned(frame, page, hits);
    }
}

/// A cache, and the number of times its policy was asked for victims.
fn counted(page_bytes: usize, budget: usize) -> (Cache, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let shared = asked.clone();
    let make = move || -> Box<dyn Policy> {
        Box::new(Counted { clock: PolicyKind::Clock.build(), asked: shared.clone() })
    };
    let builder = Cache::builder().budget_bytes(budget as u64).page_bytes(page_bytes);
    (builder.custom_policy(make).build().unwrap(), asked)
}

/// Waits until the evictor has made several passes over all frames.
fn several_passes(asked: &AtomicUsize, frames: usize) {
    let before = asked.load(Ordering::SeqCst);
    wait_until("passes of the evictor", || asked.load(Ordering::SeqCst) > before + 4 * frames);
}

/// Frames held by loaders become free: a thread that finds none must wait.
#[test]
fn frames_in_the_hands_of_loaders_are_waited_for() {
    must_end(|| {
        const PAGE: usize = 64 << 10;
        const FRAMES: usize = 256;
        let (cache, asked) = counted(PAGE, FRAMES * PAGE);
        let held = Arc::new(AtomicBool::new(true));
        let pages = 2 * FRAMES;
        let mut device = Hooked::new(Arc::new(MemoryDevice::new(pages * PAGE).unwrap()));
        let holds = held.clone();
        device.on_read = Box::new(move |_, _| {
            wait_until("the test", || !holds.load(Ordering::SeqCst));
            Ok(())
        });
        let mapping = cache.map(device).unwrap();
        mapping.advise(0..mapping.len(), Advice::Random).unwrap();
        std::thread::scope(|scope| {
            let mapping = &mapping;
            let loaders: Vec<_> = (0..pages)
                .map(|page| scope.spawn(move || mapping.touch((page * PAGE) as u64)))
                .collect();
            wait_until("a thread without a frame", || cache.stats().stalls > 0);
            several_passes(&asked, FRAMES);
            held.store(false, Ordering::SeqCst);
            for loader in loaders {
                loader.join().unwrap().unwrap();
            }
        });
    });
}

/// A mapping that is being dropped gives its frames back when its pages are written.
#[test]
fn frames_in_the_hands_of_a_teardown_are_waited_for() {
    must_end(|| {
        let (cache, asked) = counted(PAGE, BUDGET);
        let [held, writing] = [true, false].map(|value| Arc::new(AtomicBool::new(value)));
        let mut device = Hooked::new(memory(BUDGET, 4).0);
        let (holds, begun) = (held.clone(), writing.clone());
        device.on_write = Box::new(move |_, _| {
            begun.store(true, Ordering::SeqCst);
            wait_until("the test", || !holds.load(Ordering::SeqCst));
            Ok(())
        });
        let dropped = cache.map_mut(device).unwrap();
        let (device, bytes) = memory(BUDGET, 5);
        let mapping = cache.map(device).unwrap();
        // As many as there are without evicting any.
        for page in 0..BUDGET / PAGE - 64 {
            dropped.touch_mut((page * PAGE) as u64).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(move || drop(dropped));
            wait_until("a write", || writing.load(Ordering::SeqCst));
            let stalls = cache.stats().stalls;
            let reader = scope.spawn(|| {
                mapping.pin(0..(BUDGET / 2) as u64).map(|pinned| pinned.bytes().to_vec())
            });
            wait_until("a thread without a frame", || cache.stats().stalls > stalls);
            // A teardown alone is no reason to keep a thread waiting: it may hold frames for long.
            several_passes(&asked, BUDGET / PAGE);
            held.store(false, Ordering::SeqCst);
            assert!(reader.join().unwrap().unwrap() == bytes[..BUDGET / 2]);
        });
    });
}

/// Frames that a thread holds of one pool must not hide a frame that will return to the other pool.
#[test]
fn frames_of_another_pool_in_hand_do_not_hide_one_that_comes() {
    must_end(|| {
        let (cache, asked) = counted(PAGE, BUDGET);
        let below = cache.map_mut(memory(BUDGET, 8).0).unwrap();
        let pages = cache.pages(OverMapping { below, bare: false }).unwrap();
        let [held, reading] = [true, false].map(|value| Arc::new(AtomicBool::new(value)));
        let mut device = Hooked::new(memory(BUDGET, 9).0);
        let (holds, begun) = (held.clone(), reading.clone());
        device.on_read = Box::new(move |_, _| {
            begun.store(true, Ordering::SeqCst);
            wait_until("the test", || !holds.load(Ordering::SeqCst));
            Ok(())
        });
        let slow = cache.map(device).unwrap();
        let pinned = cache.map(memory(2 * BUDGET, 10).0).unwrap();
        pinned.advise(0..pinned.len(), Advice::Random).unwrap();
        slow.advise(0..slow.len(), Advice::Random).unwrap();
        let mut pins = vec![];
        while let Ok(pin) = pinned.pin((pins.len() * PAGE) as u64..((pins.len() + 1) * PAGE) as u64)
        {
            pins.push(pin);
        }
        // Leave one frame, which becomes free when the slow device has read its page.
        pins.pop();
        std::thread::scope(|scope| {
            scope.spawn(|| slow.touch(0).unwrap());
            wait_until("a read", || reading.load(Ordering::SeqCst));
            let stalls = cache.stats().stalls;
            let nested = scope.spawn(|| pages.read_exact_at(&mut [0], 0));
            wait_until("a thread without a frame", || cache.stats().stalls > stalls);
            several_passes(&asked, BUDGET / PAGE);
            held.store(false, Ordering::SeqCst);
            nested.join().unwrap().unwrap();
        });
    });
}

/// A mapping over `Pages`, and `Pages` over a mapping: each of two threads has the last frame of one pool and needs one of the other.
#[test]
fn threads_that_wait_for_each_others_pools_are_refused() {
    must_end(|| {
        let cache = cache();
        let meet = Arc::new(Barrier::new(2));
        let (below, lower) = (cache.map(memory(BUDGET, 11).0).unwrap(), memory(BUDGET, 12).0);
        let lower = cache.pages(lower).unwrap();
        let failed = |error| OverMapping::failed(IoOperation::Read, error);
        let mut over_pages = Hooked::new(memory(BUDGET, 15).0);
        let meets = meet.clone();
        over_pages.on_read = Box::new(move |offset, buffer| {
            meets.wait();
            lower.read_exact_at(buffer, offset).map_err(failed)
        });
        let mut over_mapping = Hooked::new(memory(BUDGET, 16).0);
        over_mapping.on_read = Box::new(move |offset, buffer| {
            meet.wait();
            below.read_exact_at(buffer, offset).map_err(failed)
        });
        let mapping = cache.map(over_pages).unwrap();
        let pages = cache.pages(over_mapping).unwrap();
        mapping.advise(0..mapping.len(), Advice::Random).unwrap();
        let filling = cache.map(memory(2 * BUDGET, 13).0).unwrap();
        let filling_pages = cache.pages(memory(2 * BUDGET, 14).0).unwrap();
        let page = |page: usize| (page * PAGE) as u64..((page + 1) * PAGE) as u64;
        let (mut pins, mut guards) = (vec![], vec![]);
        while let Ok(pin) = filling.pin(page(pins.len())) {
            pins.push(pin);
        }
        while let Ok(guard) = filling_pages.get(PageId(guards.len() as u64)) {
            guards.push(guard);
        }
        drop((pins.pop(), guards.pop()));
        let (first, second) = std::thread::scope(|scope| {
            let first = scope.spawn(|| mapping.touch(0));
            let second = scope.spawn(|| pages.read_exact_at(&mut [0], 0));
            (first.join().unwrap(), second.join().unwrap())
        });
        // One of them at least; its frame may serve the other.
        assert!(first.is_err() || second.is_err());
    });
}

/// A thread that loads a page, and needs a second one for that, does not keep others from the truth when nothing
/// else can come back.
#[test]
fn a_nested_load_is_refused_where_everything_is_pinned() {
    must_end(|| {
        let cache = cache();
        let (bottom, _) = memory(BUDGET, 6);
        let below = cache.map_mut(bottom).unwrap();
        let top = cache.map(OverMapping { below, bare: false }).unwrap();
        top.advise(0..top.len(), Advice::Random).unwrap();
        let pages = cache.map(memory(2 * BUDGET, 7).0).unwrap();
        let mut pins = vec![];
        let refused = loop {
            match pages.pin((pins.len() * PAGE) as u64..((pins.len() + 1) * PAGE) as u64) {
                Ok(pin) => pins.push(pin),
                Err(refused) => break refused,
            }
        };
        assert!(
            matches!(refused, CacheError::Exhausted { pinned, .. } if pinned == pins.len() as u64)
        );
        // Leave one frame, which the upper page takes; there is none for the lower one.
        pins.pop();
        assert!(matches!(
            top.touch(0),
            Err(CacheError::Load { .. } | CacheError::Exhausted { .. })
        ));
        pins.truncate(pins.len() - 2);
        top.touch(0).unwrap();
    });
}

/// If an asynchronous call still uses the store when its mapping is dropped, the next mapping
/// waits.
#[test]
fn what_asynchronous_calls_hold_is_waited_for() {
    let (device, _) = memory(4 * BUDGET, 4);
    let cache = cache();
    for _ in 0..crate::support::steps(20) {
        let mapping = cache.map_mut(device.clone()).unwrap();
        let work = mapping.touch_many_async(std::slice::from_ref(&(0..2 * BUDGET as u64)));
        drop(mapping);
        let again = cache.map_mut(device.clone()).unwrap();
        block_on(work).unwrap();
        load(&again, 0);
    }
    wait_until("nothing in use", || cache.stats().resident_pages == 0);
}
