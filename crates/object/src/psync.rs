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
//! Lock order: attachments by inode number, their flights, the pool's locks.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::{Commit, CommitContent, CommitCopied, CommitPages, CommitPatches};
use aquifer_vm::dirty::PageRun;

use crate::access::Access;
use crate::attach::{Attached, Held};
use crate::base::Changes;
use crate::completion::PendingPsync;
use crate::error::{ObjectError, Result};
use crate::flight::{Captured, Earlier, Flight};
use crate::memory::Object;
use crate::shadow;
use crate::shared::Shared;
use crate::writing::{Stores, Writing};

/// How often a blocking psync retries to commit the pages of failed earlier commits.
const ATTEMPTS: usize = 3;

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

/// Captures the stores to these objects as one commit. Attachments for reading are ignored.
pub(crate) fn capture(attached: &[&Attached], stores: Stores) -> Result<Captured> {
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
    match begin(&mut parts, stores) {
        Ok(commit) => {
            // No other capture of these objects has begun in between: their locks are held.
            let objects = parts.iter().map(|part| &part.attached.object);
            let earlier = objects.map(|object| object.flights.earlier(&object.name)).collect();
            Ok(Captured { flight: commit.map(|commit| launch(commit, &mut parts)), earlier })
        }
        Err(error) => {
            parts.iter_mut().for_each(|part| part.writing().give_back());
            Err(error)
        }
    }
}

fn begin(parts: &mut [Part<'_>], stores: Stores) -> Result<Option<Commit>> {
    for part in parts.iter_mut() {
        let object = &part.attached.object;
        part.writing().collect(object, stores)?;
    }
    for part in parts.iter_mut() {
        let object = &part.attached.object;
        part.writing().compare(object);
    }
    let Some(pool) = parts.first().map(|part| &part.attached.object.shared.pool) else {
        return Ok(None);
    };
    if parts.iter_mut().all(|part| part.writing().changes.is_empty()) {
        for part in parts.iter_mut() {
            // The pages may have been stored to, but their content is unchanged.
            part.writing().captured.clear();
            part.writing().is_behind = false;
        }
        return Ok(None);
    }
    let sizes: Vec<u64> = parts.iter_mut().map(|part| part.writing().changes.len_bytes()).collect();
    let is_aside = shadow::too_large(&sizes, pool.max_commit_bytes());
    let most_entries =
        shadow::most_entries(pool, is_aside.iter().filter(|is_aside| **is_aside).count());
    let mut copied: Vec<CommitCopied> = Vec::new();
    let mut aside: Vec<Option<Vec<PageRun>>> = Vec::with_capacity(parts.len());
    for (part, is_aside) in parts.iter_mut().zip(&is_aside) {
        let object = &part.attached.object;
        let Writing { captured, shadow, .. } = part.writing();
        aside.push(if *is_aside {
            Some(shadow.put_aside(object, captured, most_entries, &mut copied)?)
        } else {
            None
        });
    }
    let logged: Vec<(&Object, &Changes)> = (parts.iter().zip(&is_aside))
        .filter(|(_, is_aside)| !**is_aside)
        .map(|(part, _)| (&part.attached.object, &part.written().changes))
        .collect();
    let pages: Vec<CommitPages> = (logged.iter())
        .flat_map(|(object, changes)| {
            changes
                .whole
                .iter()
                .map(|run| CommitPages { inode: object.number, target: object.on_media(*run) })
        })
        .collect();
    let patches: Vec<CommitPatches<'_>> = (logged.iter())
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
        writing.committed(aside.as_deref(), twins.unwrap_or_default());
        if is_aside {
            writing.shadow.named_by(commit.end_lsn());
        }
        let bytes = if is_aside { pages_of(&writing.captured) * PAGE_BYTES } else { size_bytes };
        // Relaxed: statistics.
        attached.psync_bytes.fetch_add(bytes, Relaxed);
    }
    Ok(Some(commit))
}

fn pages_of(runs: &[PageRun]) -> u64 {
    runs.iter().map(|run| run.count).sum()
}

/// Hands the captured pages over to a flight.
fn launch(commit: Commit, parts: &mut [Part<'_>]) -> Flight {
    let mut flight = Flight::new(commit);
    for part in parts {
        let attached = part.attached;
        let Held { lock, writing, .. } = part.held();
        let writing = writing.as_mut().expect("attached for writing");
        let captured = std::mem::take(&mut writing.captured);
        writing.is_behind = false;
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
        let Captured { flight, earlier } = capture(attached, stores)?;
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

/// Captures now and makes the commit durable in the background. The caller excludes stores during
/// the call.
pub(crate) fn psync_begin(shared: &Shared, attached: &[&Attached]) -> Result<PendingPsync> {
    shared.committer.begin(|| capture(attached, Stores::Excluded))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    thread_local! {
        /// Whether a capture of this thread panics after taking its place in the log.
        pub(crate) static PANICS: Cell<bool> = const { Cell::new(false) };
    }
}
