//! Demoted and returned frames, and bounds on how long policies may take.

use std::collections::HashSet;

use aquifer_testkit::model::Model;

use super::{Simulator, key};
use crate::ids::FrameId;
use crate::policy::{HitMode, HitTable, PolicyKind, pass_limit};

/// A full cache of `frames` pages, numbered from 0.
fn full(kind: PolicyKind, frames: usize) -> Simulator {
    let mut cache = Simulator::new(kind.build(), frames, 1);
    for page in 0..frames as u64 {
        cache.access(page);
    }
    cache
}

#[test]
fn demoted_frames_leave_first() {
    for &kind in PolicyKind::all() {
        let mut cache = full(kind, 200);
        // A hand, if there is one, is in the middle of the order.
        for page in 200..300 {
            cache.access(page);
        }
        let demoted: HashSet<FrameId> = [120, 199, 250].map(|page| cache.frame_of[&page]).into();
        for &frame in &demoted {
            cache.hits.hit(frame); // advice outweighs a hit before it
            cache.policy.demoted(frame, &cache.hits);
            cache.policy.demoted(frame, &cache.hits);
        }
        let victims: HashSet<FrameId> = cache.take_victims(3).iter().copied().collect();
        assert_eq!(victims, demoted, "{kind}");
    }
}

#[test]
fn a_hit_takes_a_demotion_back() {
    for &kind in PolicyKind::all() {
        let mut cache = full(kind, 200);
        if cache.policy.hit_mode() == HitMode::Ignore {
            continue;
        }
        let frame = cache.frame_of[&150];
        cache.policy.demoted(frame, &cache.hits);
        cache.hits.hit(frame);
        assert!(!cache.take_victims(20).contains(&frame), "{kind}");
    }
}

#[test]
fn tries_among_pinned_frames_reach_the_one_that_is_not() {
    const FRAMES: usize = 100;
    for &kind in PolicyKind::all() {
        for unpinned in [0, 50, 99] {
            let mut cache = full(kind, FRAMES);
            let unpinned = cache.frame_of[&unpinned];
            let found = (0..20 * FRAMES).position(|_| {
                let victim = cache.take_victims(1)[0];
                if victim != unpinned {
                    let page = cache.page_of[victim.0 as usize];
                    cache.policy.returned(victim, page, &cache.hits);
                }
                victim == unpinned
            });
            let tries = found.unwrap_or_else(|| panic!("{kind} never names {unpinned:?}")) + 1;
            // Only sampling can name a frame twice before it has named all others.
            let most = if kind == PolicyKind::Lru { 10 * FRAMES } else { FRAMES };
            assert!(tries <= most, "{kind} names {unpinned:?} after {tries} tries");
        }
    }
}

#[test]
fn one_call_looks_at_a_bounded_number_of_frames() {
    const FRAMES: usize = 20_000;
    for &kind in PolicyKind::all() {
        let mut cache = full(kind, FRAMES);
        let HitMode::Count { max } = cache.policy.hit_mode() else {
            continue;
        };
        for frame in (0..FRAMES as u32).map(FrameId) {
            (0..max).for_each(|_| cache.hits.hit(frame));
        }
        let spared = |hits: &HitTable| {
            (0..FRAMES as u32).filter(|&frame| hits.get(FrameId(frame)) < max).count()
        };
        assert_eq!(cache.take_victims(1).len(), 1, "{kind}");
        assert!(spared(&cache.hits) <= pass_limit(1), "{kind}: {}", spared(&cache.hits));
        let named = cache.take_victims(64).len();
        assert!((1..=64).contains(&named), "{kind}: {named}");
        assert!(spared(&cache.hits) <= pass_limit(1) + pass_limit(64), "{kind}");
    }
}

#[test]
fn nothing_is_named_where_nothing_is_wanted_or_held() {
    for &kind in PolicyKind::all() {
        let mut cache = full(kind, 10);
        assert!(cache.take_victims(0).is_empty(), "{kind}");
        assert_eq!(cache.take_victims(64).len(), 10, "{kind}");
        assert!(cache.take_victims(1).is_empty(), "{kind}");
    }
}

#[test]
fn a_smaller_budget_shrinks_the_share_of_new_pages() {
    let mut cache = full(PolicyKind::S3Fifo, 1000);
    // Pages 0..900 become popular and move to main when they are judged.
    for page in 0..900 {
        (0..3).for_each(|_| assert!(cache.access(page)));
    }
    (1000..1010).for_each(|page| assert!(!cache.access(page)));
    cache.policy.resize(500, 1000);
    let victims: HashSet<FrameId> = cache.take_victims(400).iter().copied().collect();
    let popular = (0..900)
        .filter(|page| cache.frame_of.get(page).is_some_and(|frame| victims.contains(frame)));
    assert!(popular.count() >= 390, "main has 900 frames and may have 450");
}

#[test]
fn a_page_in_another_frame_inherits_no_hits() {
    let mut cache = full(PolicyKind::Clock, 2);
    let frames = [0, 1].map(|page| cache.frame_of[&page]);
    cache.hits.hit(frames[0]);
    for (frame, page) in frames.into_iter().zip(7..) {
        cache.policy.removed(frame);
        cache.hits.reset(frame);
        cache.policy.inserted(frame, key(page), &cache.hits);
    }
    assert_eq!(cache.take_victims(1), [frames[0]]);
}

/// A page of S3-FIFO's small queue that was named a victim and returned was not evicted: it must
/// not count as a page that was loaded again.
#[test]
fn a_returned_page_is_no_ghost() {
    let mut cache = full(PolicyKind::S3Fifo, 20);
    let frame = cache.take_victims(1)[0];
    let page = cache.page_of[frame.0 as usize];
    cache.policy.returned(frame, page, &cache.hits);
    cache.policy.removed(frame);
    cache.hits.reset(frame);
    cache.policy.inserted(frame, page, &cache.hits);
    // Replace all others. If the page is in small, as it should be, it is now the oldest there.
    cache.take_victims(19);
    for other in (0..20).map(FrameId).filter(|&other| other != frame) {
        cache.hits.reset(other);
        cache.policy.inserted(other, key(100 + u64::from(other.0)), &cache.hits);
    }
    assert_eq!(cache.take_victims(1), [frame], "small is judged in order of arrival");
}
