//! `psync`: makes everything stored to an object so far durable, atomically.
//!
//! ```text
//!  stores …   capture                                  stores …
//!  ───────▶ ┌─────────────────────────────────────┐ ───────────────────────────────────────────▶
//!           │ take the set of pages stored to     │
//!           │ compare them with their bases       │
//!           │ copy what differs into a record     │ ── write the record, durably ── acknowledge ──▶ later: apply
//!           │ take its place in the log           │        (one device sync)         in order
//!           └─────────────────────────────────────┘
//!                  W                              P                               C              W
//! ```
//!
//! The program must not store to the object during *capture*, which takes as long as comparing and
//! copying the pages. For each page, a record holds the changed bytes, or the whole page if most of
//! it changed ([`base`](crate::base)). A commit larger than a quarter of the log is put aside first
//! ([`shadow`]), as part of capture.
//!
//! On any failure, the next capture takes the same pages again.
//!
//! # Named ranges
//! A psync that names ranges commits exactly their bytes: it does not look for stores, compares
//! nothing, and leaves the set of pages stored to as it is. So the next psync of everything finds
//! these pages too, and commits what else was stored there. That is right because
//! * a patch holds new values, not differences: replaying it is correct whatever the page held;
//! * the bases are patched with what was logged, as by any commit, so the bytes that were not named
//!   differ from the base as before;
//! * pages are committed whole only if all their bytes are named, and are put aside one run at a
//!   time, never joined over a gap.
//!
//! The heap can record all ranges that were stored to; then naming them is a psync of everything
//! ([`psync_recorded`]).
//!
//! Lock order: attachments by inode number, their flights, the pool's locks.

use std::ops::Range;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_pool::{Commit, CommitContent, CommitCopied, CommitPages, CommitPatches, PoolError};
use aquifer_vm::dirty::{PageRun, Stores};

use crate::access::Access;
use crate::attach::{Attached, Held};
use crate::base::Changes;
use crate::completion::PendingPsync;
use crate::error::{ObjectError, Result};
use crate::flight::{Captured, Earlier, Flight};
use crate::memory::Object;
use crate::ranges::NamedRanges;
use crate::shadow;
use crate::shared::Shared;
use crate::writing::{Writing, pages_of};

/// How often a blocking psync retries to commit the pages of failed earlier commits.
const ATTEMPTS: usize = 3;

/// What a capture takes.
#[derive(Clone, Copy)]
pub(crate) enum What<'a> {
    /// Everything stored so far.
    All(Stores),
    /// Exactly these bytes of its one object.
    Named(&'a NamedRanges),
}

/// An attachment for writing, locked for a capture.
struct Part<'a> {
    attached: &'a Attached,
    held: MutexGuard<'a, Option<Held>>,
}

impl Part<'_> {
    fn held(&mut self) -> &mut Held {
        self.held.as_mut().expect("looked at when it was locked")
    }

    fn written(&self) -> &Writing {
        let held = self.held.as_ref().expect("looked at when it was locked");
        held.writing.as_ref().expect("attached for writing")
    }

    fn writing(&mut self) -> &mut Writing {
        self.held().writing.as_mut().expect("attached for writing")
    }
}

/// Captures stores to these objects as one commit. Attachments for reading are ignored.
pub(crate) fn capture(attached: &[&Attached], what: What<'_>) -> Result<Captured> {
    let mut attached: Vec<&Attached> = attached.to_vec();
    if let Some(first) = attached.first()
        && !attached.iter().all(|other| std::ptr::eq(&*first.object.shared, &*other.object.shared))
    {
        return Err(ObjectError::SeveralPools);
    }
    attached.iter().try_for_each(|one| one.check_process())?;
    attached.retain(|one| one.access == Access::Write);
    attached.sort_unstable_by_key(|one| one.object.number);
    attached.dedup_by_key(|one| one.object.number);
    let mut parts = Vec::with_capacity(attached.len());
    for attached in attached {
        let held = attached.held();
        if held.is_none() {
            return Err(ObjectError::NotAttached { address: attached.object.address });
        }
        parts.push(Part { attached, held });
    }
    let begun = begin(&mut parts, what);
    match (begun, what) {
        (Ok(commit), What::All(_)) => {
            // No other capture of these objects has begun in between: their locks are held.
            let objects = parts.iter().map(|part| &part.attached.object);
            let earlier = objects.map(|object| object.flights.earlier(&object.name)).collect();
            let flight = commit.map(|commit| launch(commit, &mut parts));
            // All that was not durable is in this commit, or unchanged.
            parts.iter_mut().for_each(|part| part.writing().is_behind = false);
            Ok(Captured { flight, earlier })
        }
        // The log's order is enough: the named bytes are all in this commit.
        (Ok(commit), What::Named(_)) => {
            let flight = commit.map(|commit| launch(commit, &mut parts));
            Ok(Captured { flight, earlier: Vec::new() })
        }
        (Err(error), What::All(_)) => {
            parts.iter_mut().for_each(|part| part.writing().give_back());
            Err(error)
        }
        (Err(error), What::Named(_)) => {
            // The tracker still has these pages.
            parts.iter_mut().for_each(|part| part.writing().captured.clear());
            Err(error)
        }
    }
}

fn begin(parts: &mut [Part<'_>], what: What<'_>) -> Result<Option<Commit>> {
    for part in parts.iter_mut() {
        let object = &part.attached.object;
        match what {
            What::All(stores) => part.writing().collect(object, stores)?,
            What::Named(ranges) => part.writing().take_named(object, ranges),
        }
    }
    if let What::All(_) = what {
        for part in parts.iter_mut() {
            let object = &part.attached.object;
            part.writing().compare(object);
        }
    }
    let Some(pool) = parts.first().map(|part| &part.attached.object.shared.pool) else {
        return Ok(None);
    };
    if parts.iter_mut().all(|part| part.writing().changes.is_empty()) {
        for part in parts.iter_mut() {
            // The pages may have been stored to, but their content is unchanged.
            part.writing().captured.clear();
        }
        return Ok(None);
    }
    let sizes: Vec<u64> = parts.iter_mut().map(|part| part.writing().changes.len_bytes()).collect();
    let mut is_aside = shadow::too_large(&sizes, pool.max_commit_bytes());
    if let What::Named(_) = what {
        // Parts of pages are not put aside: the other bytes of the pages were not named.
        for (part, is_aside) in parts.iter_mut().zip(&mut is_aside) {
            *is_aside &= !part.writing().changes.whole.is_empty();
        }
    }
    let most_entries =
        shadow::most_entries(pool, is_aside.iter().filter(|is_aside| **is_aside).count());
    let mut copied: Vec<CommitCopied> = Vec::new();
    let mut aside: Vec<Option<Vec<PageRun>>> = Vec::with_capacity(parts.len());
    for (part, is_aside) in parts.iter_mut().zip(&is_aside) {
        let object = &part.attached.object;
        let Writing { captured, changes, shadow, .. } = part.writing();
        if !*is_aside {
            aside.push(None);
            continue;
        }
        match what {
            What::All(_) => changes.make_whole(captured),
            // Joining runs would commit the bytes in the gaps, which were not named.
            What::Named(_) if changes.whole.len() > most_entries => {
                let log_bytes = pool.layout().log().len_bytes;
                let len_bytes = changes.len_bytes();
                return Err(PoolError::TooLargeForLog { len_bytes, log_bytes }.into());
            }
            What::Named(_) => {}
        }
        aside.push(Some(shadow.put_aside(object, &changes.whole, most_entries, &mut copied)?));
    }
    let changed: Vec<(&Object, &Changes)> =
        parts.iter().map(|part| (&part.attached.object, &part.written().changes)).collect();
    // Whole pages that were put aside are not in the log.
    let logged: Vec<(&Object, &Changes)> = (changed.iter().zip(&is_aside))
        .filter(|(_, is_aside)| !**is_aside)
        .map(|(changed, _)| *changed)
        .collect();
    let pages: Vec<CommitPages> = (logged.iter())
        .flat_map(|(object, changes)| {
            changes
                .whole
                .iter()
                .map(|run| CommitPages { inode: object.number, target: object.on_media(*run) })
        })
        .collect();
    let patches: Vec<CommitPatches<'_>> = (changed.iter())
        .filter(|(_, changes)| !changes.patches.is_empty())
        .map(|(object, changes)| CommitPatches {
            inode: object.number,
            target: object.media,
            patches: &changes.patches,
        })
        .collect();
    let mut twins = Vec::new();
    let fill = |mut target: &mut [u8]| {
        for (object, changes) in &logged {
            let here = target.split_off_mut(..changes.whole_bytes() as usize);
            let here = here.expect("as long as all whole pages together");
            twins.push(changes.copy_whole(object, here));
        }
    };
    let content = CommitContent { pages: &pages, patches: &patches, copied: &copied };
    // SAFETY: the write locks of all objects in the commit are held. An attached object is a
    // private mapping, so its memory already has the content that the commit brings to the media.
    let commit = unsafe { pool.capture(&content, fill)? };
    // Before anything that could panic: a dropped commit is still written and takes effect.
    parts.iter_mut().for_each(|part| part.writing().was_captured(commit.end_lsn()));
    #[cfg(test)]
    assert!(!tests::PANICS.get(), "as was asked for");
    if !copied.is_empty() {
        // The next large commit needs the shadow runs again and should not have to wait for them.
        pool.checkpoint_soon();
    }
    let mut twins = twins.into_iter();
    for ((part, aside), size_bytes) in parts.iter_mut().zip(aside).zip(sizes) {
        let attached = part.attached;
        let writing = part.writing();
        let is_aside = aside.is_some();
        let twins = if is_aside { None } else { twins.next() };
        writing.committed(aside.as_deref(), &twins.unwrap_or_default());
        if is_aside {
            writing.shadow.named_by(commit.end_lsn());
        }
        let bytes = if is_aside { writing.changes.len_bytes() } else { size_bytes };
        // Relaxed: statistics.
        attached.psync_bytes.fetch_add(bytes, Relaxed);
    }
    Ok(Some(commit))
}

/// Hands the captured pages over to a flight.
fn launch(commit: Commit, parts: &mut [Part<'_>]) -> Flight {
    let mut flight = Flight::new(commit);
    for part in parts {
        let attached = part.attached;
        let Held { lock, writing, .. } = part.held();
        let writing = writing.as_mut().expect("attached for writing");
        let captured = std::mem::take(&mut writing.captured);
        if captured.is_empty() {
            continue;
        }
        // Relaxed: statistics.
        attached.psyncs.fetch_add(1, Relaxed);
        attached.psync_pages.fetch_add(pages_of(&captured), Relaxed);
        flight.add(&attached.object.flights, lock, captured);
    }
    flight
}

/// Makes everything stored to these objects durable, atomically.
pub(crate) fn psync(attached: &[&Attached], stores: Stores) -> Result<()> {
    let mut outcome = Ok(());
    for _ in 0..ATTEMPTS {
        let Captured { flight, earlier } = capture(attached, What::All(stores))?;
        if let Some(flight) = flight {
            flight.finish()?;
        }
        // "Everything" includes commits begun before. If one of them failed, the next attempt
        // commits its pages.
        outcome = earlier.iter().try_for_each(Earlier::wait);
        if outcome.is_ok() {
            break;
        }
    }
    for attached in attached {
        if let Some(writing) = attached.held().as_mut().and_then(|held| held.writing.as_mut()) {
            writing.trim(&attached.object, stores);
        }
    }
    outcome
}

/// Makes the bytes of these ranges durable, atomically, and nothing else.
pub(crate) fn psync_ranges(attached: &Attached, ranges: &[Range<u64>]) -> Result<()> {
    let ranges = NamedRanges::new(&attached.object, ranges)?;
    if ranges.is_empty() {
        return attached.check_process();
    }
    match capture(&[attached], What::Named(&ranges))?.flight {
        Some(flight) => flight.finish(),
        None => Ok(()),
    }
}

/// Makes everything stored to the object durable, atomically: these ranges cover all stores since the
/// last psync. The caller excludes stores during the call.
///
/// Named ranges do not bring along what else a psync of everything does. It is called instead if
/// pages of failed commits are to be committed, and if private copies may exceed the budget.
pub(crate) fn psync_recorded(attached: &Attached, ranges: &[Range<u64>]) -> Result<()> {
    attached.check_process()?;
    let object = &attached.object;
    let everything = || psync(&[attached], Stores::Excluded);
    let is_enough = {
        let held = attached.held();
        let writing = held.as_ref().and_then(|held| held.writing.as_ref());
        writing.is_some_and(|writing| !writing.is_everything_due(object))
    };
    if !is_enough {
        return everything();
    }
    // "Everything" includes commits begun before.
    let earlier = object.flights.earlier(&object.name);
    let named = NamedRanges::new(object, ranges)?;
    if !named.is_empty() {
        match capture(&[attached], What::Named(&named)) {
            Ok(Captured { flight, .. }) => flight.map_or(Ok(()), Flight::finish)?,
            // The ranges may be too many for a record.
            Err(_) => return everything(),
        }
    }
    earlier.wait().or_else(|_| everything())
}

/// Captures now and makes the commit durable in the background. The caller excludes stores during
/// the call.
pub(crate) fn psync_begin(shared: &Shared, attached: &[&Attached]) -> Result<PendingPsync> {
    shared.committer.begin(|| capture(attached, What::All(Stores::Excluded)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    thread_local! {
        /// Whether a capture of this thread panics after taking its place in the log.
        pub(crate) static PANICS: Cell<bool> = const { Cell::new(false) };
    }
}
