use super::*;
use crate::policy::PolicyKind;

fn key(page: u64) -> PageKey {
    PageKey { store: StoreId(3), page: PageId(page) }
}

fn pool(frames: usize) -> FramePool {
    let pool = FramePool::new(PolicyKind::Clock.build(), 4096).unwrap();
    pool.set_limit(frames);
    pool
}

/// Takes every available frame, the reserve last.
fn take_all(pool: &FramePool) -> Vec<FrameId> {
    let usual = std::iter::from_fn(|| pool.take(key(9)));
    usual.chain(std::iter::from_fn(|| pool.take_reserved(key(9), 0))).collect()
}

#[test]
fn every_frame_is_handed_out_once() {
    let pool = pool(1000);
    let mut frames: Vec<u32> = take_all(&pool).iter().map(|frame| frame.0).collect();
    frames.sort_unstable();
    assert_eq!(frames, (0..1000).collect::<Vec<_>>());
    assert_eq!(pool.free(), 0);
    assert_eq!(pool.owner(FrameId(frames[7])).unwrap().store, StoreId(3));
}

#[test]
fn a_shrink_waits_for_frames_in_use_and_a_growth_takes_them_back() {
    let pool = pool(200);
    let held = take_all(&pool);
    for (page, &frame) in held.iter().enumerate() {
        pool.inserted(frame, key(page as u64));
    }
    pool.set_limit(150);
    let mut shrink = Shrink::default();
    pool.look_above_limit(&mut shrink);
    let above = shrink.in_use().to_vec();
    assert_eq!(above.len(), 50);
    for &frame in &above[..20] {
        assert!(pool.claim(frame) && !pool.claim(frame));
    }
    pool.give(&above[..20]);
    assert!(pool.take(key(500)).is_none(), "frames above the limit are not handed out");
    pool.set_limit(200);
    assert_eq!(take_all(&pool).len(), 20);
}

/// So a lower store finds a frame after the stores above it have taken theirs.
#[test]
fn the_reserve_is_shared_out_by_height_and_filled_first() {
    let pool = pool(32 * RESERVE_FRAMES);
    let usual: Vec<FrameId> = std::iter::from_fn(|| pool.take(key(9))).collect();
    assert_eq!(usual.len(), 31 * RESERVE_FRAMES);
    assert_eq!(pool.free(), 0);
    let taken: Vec<usize> = [6, 5, 4, 3, 2, 1, 0]
        .map(|height| std::iter::from_fn(|| pool.take_reserved(key(9), height)).count())
        .into();
    assert_eq!(taken, [0, 0, 1, 1, 2, 4, 8]);
    pool.give(&usual[..RESERVE_FRAMES]);
    assert!(pool.take(key(9)).is_none(), "the reserve comes first");
    pool.give(&usual[RESERVE_FRAMES..][..3]);
    assert_eq!(std::iter::from_fn(|| pool.take(key(9))).count(), 3);
    // A smaller pool has a smaller reserve; the other free frames below the limit go to the
    // free lists.
    pool.set_limit(64);
    pool.look_above_limit(&mut Shrink::default());
    let below = |frame: &&FrameId| (frame.0 as usize) < 64;
    let free = usual[..RESERVE_FRAMES].iter().filter(below).count();
    assert_eq!(pool.free(), free.saturating_sub(2));
}

/// The reserve is filled from frames that were never granted, from frames that are given back,
/// and, when a shrink retires those of the reserve, from free frames below the limit.
#[test]
fn the_reserve_is_full_whenever_frames_are_free() {
    let pool = pool(64);
    let in_reserve = || pool.reserve.0.lock().len();
    assert_eq!((in_reserve(), pool.free()), (2, 62));
    pool.set_limit(4096);
    assert_eq!((in_reserve(), pool.free()), (16, 4080));
    assert_eq!(pool.granted().count(), 16, "the others are not wanted yet");
    let held = take_all(&pool);
    assert_eq!((held.len(), pool.free()), (4096, 0));
    pool.set_limit(2048);
    let (above, below) = held.iter().partition::<Vec<_>, _>(|frame| frame.0 >= 2048);
    pool.set_limit(4096);
    pool.give(&above);
    assert_eq!((in_reserve(), pool.free()), (16, 2032));
    // All free frames, and the reserve, lie above this limit.
    pool.set_limit(1024);
    let mut shrink = Shrink::default();
    pool.look_above_limit(&mut shrink);
    assert_eq!((in_reserve(), pool.free(), shrink.in_use().len()), (0, 0, 1024));
    pool.give(&below);
    assert_eq!((in_reserve(), pool.free()), (16, 1008));
    pool.look_above_limit(&mut shrink);
    assert!(pool.finish_shrink(&mut shrink, |limit| assert_eq!(limit, 1024)));
    // The reserve is taken while frames below the limit are free: the next shrink fills it.
    let taken: Vec<FrameId> = std::iter::from_fn(|| pool.take_reserved(key(9), 0)).collect();
    assert_eq!(taken.len(), 16);
    pool.set_limit(1000);
    pool.look_above_limit(&mut shrink);
    let free = 1000 - 16 - taken.iter().filter(|frame| frame.0 < 1000).count();
    assert_eq!((in_reserve(), pool.free()), (16, free));
    pool.give(&taken);
    let all = take_all(&pool);
    assert_eq!((all.len(), pool.free()), (1000, 0));
}

#[test]
fn what_a_change_of_the_limit_costs_depends_on_what_is_in_use() {
    const MANY: usize = 1 << 20;
    let pool = FramePool::new(PolicyKind::Clock.build(), MANY).unwrap();
    let looked_at = pool.looked_at_so_far();
    pool.set_limit(MANY);
    assert_eq!(pool.looked_at_so_far() - looked_at, RESERVE_FRAMES);
    const FREE: usize = MANY - RESERVE_FRAMES;
    assert_eq!(pool.free(), FREE);
    let held: Vec<FrameId> = (0..200).map(|page| pool.take(key(page)).unwrap()).collect();
    assert_eq!(pool.free(), FREE - 200);
    let before = pool.looked_at_so_far();
    for round in 0..10 {
        pool.set_limit(0);
        let mut shrink = Shrink::default();
        pool.look_above_limit(&mut shrink);
        assert_eq!(shrink.in_use().len(), 200);
        assert!(!pool.finish_shrink(&mut shrink, |_| panic!("frames are in use")));
        pool.set_limit(MANY - round);
        assert_eq!(pool.free(), FREE - round - 200);
    }
    let looked_at = pool.looked_at_so_far() - before;
    assert!(looked_at <= 10 * 4 * 256, "{looked_at} frames were looked at");
    pool.give(&held);
    let mut all: Vec<u32> = take_all(&pool).iter().map(|frame| frame.0).collect();
    all.sort_unstable();
    assert!(all.into_iter().eq(0..(MANY - 9) as u32));
}

#[test]
fn a_shrink_that_is_held_up_looks_at_what_holds_it_up() {
    let pool = pool(4096);
    let held = take_all(&pool);
    assert_eq!(held.len(), 4096);
    pool.set_limit(100);
    let pinned = *held.iter().find(|frame| frame.0 == 3000).unwrap();
    let mut shrink = Shrink::default();
    pool.look_above_limit(&mut shrink);
    assert_eq!(shrink.in_use().len(), 3996);
    let rest: Vec<FrameId> = held.into_iter().filter(|&frame| frame != pinned).collect();
    pool.give(&rest);
    pool.look_above_limit(&mut shrink);
    let before = pool.looked_at_so_far();
    for _ in 0..100 {
        pool.look_above_limit(&mut shrink);
        assert_eq!(shrink.in_use(), [pinned]);
    }
    assert_eq!(pool.looked_at_so_far() - before, 100, "one frame a look");
    pool.give(&[pinned]);
    pool.look_above_limit(&mut shrink);
    assert!(shrink.in_use().is_empty());
    let mut released = None;
    assert!(pool.finish_shrink(&mut shrink, |limit| released = Some(limit)));
    assert_eq!((released, pool.free()), (Some(100), 100 - 100 / RESERVED_ONE_IN));
    // A growth followed by a shrink to the same limit starts over.
    pool.set_limit(200);
    assert_eq!(take_all(&pool).len(), 200);
    pool.set_limit(100);
    pool.look_above_limit(&mut shrink);
    assert_eq!(shrink.in_use().len(), 100);
}

/// A policy that names frames it does not hold before those it holds.
#[derive(Default)]
struct Liar {
    lies: Vec<FrameId>,
    held: Vec<FrameId>,
}

impl Policy for Liar {
    fn name(&self) -> &'static str {
        "liar"
    }
    fn hit_mode(&self) -> HitMode {
        HitMode::Ignore
    }
    fn resize(&mut self, _frames: usize, _max_frames: usize) {}
    fn inserted(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
        self.held.push(frame);
    }
    fn removed(&mut self, frame: FrameId) {
        self.held.retain(|&held| held != frame);
    }
    fn victims(
        &mut self,
        _want: usize,
        _hits: &HitTable,
        page_of: &dyn Fn(FrameId) -> PageKey,
        victims: &mut Vec<FrameId>,
    ) {
        for &lie in &self.lies {
            page_of(lie);
            victims.push(lie);
        }
        for frame in self.held.drain(..) {
            victims.extend([frame, frame]);
        }
    }
    fn returned(&mut self, frame: FrameId, page: PageKey, hits: &HitTable) {
        self.inserted(frame, page, hits);
    }
}

#[test]
fn frames_that_a_policy_does_not_hold_are_no_victims() {
    let [loading, free, claimed, retired] = [9, 5, 3, 99].map(FrameId);
    let lies = vec![loading, free, claimed, retired, FrameId(4096), FrameId(u32::MAX)];
    let pool = FramePool::new(Box::new(Liar { lies, held: vec![] }), 4096).unwrap();
    pool.set_limit(10);
    let taken: Vec<FrameId> = (0..10).map(|page| pool.take(key(page)).unwrap()).collect();
    for &frame in taken.iter().filter(|&&frame| frame != loading) {
        pool.inserted(frame, key(frame.0.into()));
    }
    for frame in [free, claimed] {
        assert!(pool.claim(frame));
    }
    pool.give(&[free]);
    let mut victims = [FrameId(0); BATCH];
    assert_eq!(pool.victims(&mut victims), 7, "the policy holds so many");
    let victims = &mut victims[..7];
    victims.sort_unstable();
    assert_eq!(victims, [0, 1, 2, 4, 6, 7, 8].map(FrameId));
    assert!(victims.iter().all(|&victim| !pool.claim(victim)), "all have left the policy");
    pool.returned(&victims[..2]);
    assert!(pool.claim(victims[0]) && !pool.claim(victims[0]));
    // Each victim can be taken exactly once afterwards.
    pool.give(victims);
    let mut out: Vec<FrameId> = std::iter::from_fn(|| pool.take(key(1))).collect();
    out.sort_unstable();
    assert_eq!(out, [0, 1, 2, 4, 5, 6, 7, 8].map(FrameId));
}

#[test]
fn frames_survive_concurrent_use_and_resizing() {
    let pool = pool(512);
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let pool = &pool;
            scope.spawn(move || {
                let mut held = vec![];
                for step in 0..20_000u64 {
                    match pool.take(key(thread << 32 | step)) {
                        Some(frame) => held.push(frame),
                        None => pool.give(&std::mem::take(&mut held)),
                    }
                    if step % 97 == 0 {
                        pool.give(&std::mem::take(&mut held));
                    }
                }
                pool.give(&held);
            });
        }
        let mut shrink = Shrink::default();
        for round in 0..200 {
            pool.set_limit(if round % 2 == 0 { 100 } else { 512 });
            if round % 3 == 0 {
                pool.look_above_limit(&mut shrink);
                pool.finish_shrink(&mut shrink, |limit| assert_eq!(limit, pool.limit()));
            }
        }
    });
    let mut shrink = Shrink::default();
    pool.look_above_limit(&mut shrink);
    assert!(shrink.in_use().is_empty());
    assert_eq!(pool.free(), 512 - RESERVE_FRAMES);
    let mut all: Vec<u32> = take_all(&pool).iter().map(|frame| frame.0).collect();
    all.sort_unstable();
    assert_eq!(all, (0..512).collect::<Vec<_>>());
}
