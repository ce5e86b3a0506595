//! Mappings in a shared mount: their pages are the only ones that the kernel keeps, and it does not
//! notice what others write.
//!
//! A page of a mapping is fetched by a `READ` without an owner of locks. From then on, until the file is
//! closed, a thread compares what tells the file's changes by others; if one has changed, the kernel is
//! told to drop the file's pages. What is stored to mappings changes none of it, except where it fills a
//! hole.
//!
//! # The end of a file
//! Behind the end, the last page is filled with zeros. If others append before the program's stores to
//! that page come back, and the kernel has heard of the new length, it sends all of the page. So what was
//! filled in is remembered, and zeros at the end of it are not written: the program has not stored them.
//! The next server does not know of it.
//!
//! *No thread that answers requests may tell it so:* it waits for pages that are just being read. Nor
//! may any other thread of the server. If the server were killed meanwhile, that thread would wait for
//! a request of the server before, the server would not end, and the next one would never answer the
//! request. So the thread asks another process, which outlives the server if it has to. That process may
//! die, or not be started: what it was told may be lost then, so it is told of all files again
//! ([`DropsPages`]).

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_fs::node::Node;

use super::PoolFs;
use crate::wire::{ReadIn, read};

/// How long the thread does not look, at first and while nothing changes.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(32);
/// How long it does not look when it has found a change: dropping pages costs programs more.
const PAUSE_AFTER_CHANGE: Duration = Duration::from_millis(8);
/// How many times as long as it looked it does not look at least: programs may map very many files.
const REST: u32 = 8;
/// Of how many reads at the end of a file it is known what was filled in.
const MOST_FILLED: usize = 16;

/// What has the kernel drop pages.
pub(crate) trait DropsPages {
    /// Whether what it was told since the last call may be lost.
    fn has_lost(&mut self) -> bool;
    /// Has it drop those of the inode with this node ID. Returns false if that is not possible now.
    fn drop_pages(&mut self, id: u64) -> bool;
}

/// The files whose pages the kernel may have.
#[derive(Default)]
pub(super) struct Mappings {
    state: Mutex<State>,
    /// There is one, or it is to end.
    begun: Condvar,
}

#[derive(Default)]
struct State {
    /// By inode number.
    of: HashMap<u64, Watched>,
    ended: bool,
}

struct Watched {
    node: Node,
    /// The node ID that the kernel has read its pages by.
    id: u64,
    /// `None` if the kernel may have pages from before.
    seen: Option<Version>,
    /// What the kernel has filled with zeros behind the end of the file, in bytes of the file.
    filled: Vec<Range<u64>>,
}

/// What changes when others change the bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    layout: u64,
    foreign_writes: u64,
    len: u64,
}

/// What can be said of a file at a moment.
enum Now {
    Version(Version),
    /// It is being changed.
    Changing,
    Gone,
}

impl Watched {
    fn new(node: Node, id: u64, seen: Option<Version>) -> Watched {
        Watched { node, id, seen, filled: Vec::new() }
    }

    /// Notes that `read` was asked for, and so many bytes were there.
    fn note_read(&mut self, read: Range<u64>, got: u64) {
        let before = std::mem::take(&mut self.filled).into_iter();
        self.filled = before.flat_map(|filled| without(filled, &read)).collect();
        if got < read.end - read.start {
            self.filled.push(read.start + got..read.end);
        }
        if self.filled.len() > MOST_FILLED {
            self.filled.remove(0);
        }
    }

    /// The parts of a written page, or of several, that were read or stored.
    fn stored(&self, offset: u64, data: &[u8]) -> Vec<Range<u64>> {
        let end = offset + data.len() as u64;
        let whole = offset..end;
        let mut parts = vec![whole];
        for filled in &self.filled {
            let (from, to) = (filled.start.max(offset), filled.end.min(end));
            if from < to {
                let bytes = &data[(from - offset) as usize..(to - offset) as usize];
                let stored = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                let zeros = from + stored as u64..to;
                parts = parts.into_iter().flat_map(|part| without(part, &zeros)).collect();
            }
        }
        parts
    }
}

/// What is left of a range without another one.
fn without(range: Range<u64>, other: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let before = range.start..range.end.min(other.start);
    let behind = range.start.max(other.end)..range.end;
    let is_apart = other.end <= range.start || range.end <= other.start;
    let parts = if is_apart || other.is_empty() { [range, 0..0] } else { [before, behind] };
    parts.into_iter().filter(|part| !part.is_empty())
}

impl Mappings {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic leaves it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel drops the pages of a file that is mapped or opened again. Unless it `is_used` again, as
    /// told while no file begins to be watched.
    pub fn ended(&self, number: u64, is_used: impl FnOnce() -> bool) {
        let mut mappings = self.lock();
        if !is_used() {
            mappings.of.remove(&number);
        }
    }
}

impl PoolFs {
    /// Costs a few loads, unless the file is being changed, or gone.
    fn version_of(&self, node: Node) -> Now {
        let pool = self.files.pool();
        let Some(state) = pool.file_state(node.number) else {
            let is_there = self.nodes.metadata(node).is_ok();
            return if is_there { Now::Changing } else { Now::Gone };
        };
        if state.generation != node.generation {
            return Now::Gone;
        }
        let foreign_writes = pool.foreign_writes(node.number);
        let (layout, len) = (state.layout_version, state.size_bytes);
        Now::Version(Version { layout, foreign_writes, len })
    }

    /// Before a read that may be for a mapping. Returns whether it is.
    pub(super) fn note_mapping(&self, node: Node, read: &ReadIn) -> bool {
        if !self.options.is_shared() || read.read_flags & read::LOCKOWNER != 0 {
            return false;
        }
        let is_known = |it: &Watched| it.node == node;
        if !self.mappings.lock().of.get(&node.number).is_some_and(is_known) {
            self.table.mapped(node.number);
            let seen = match self.version_of(node) {
                Now::Version(version) => Some(version),
                Now::Changing | Now::Gone => None,
            };
            self.watch_since(node, seen);
        }
        true
    }

    /// Watches a file since a version. If another thread does so already, the kernel may have pages from
    /// before this one.
    fn watch_since(&self, node: Node, seen: Option<Version>) {
        // Of another generation the kernel has nothing any more.
        let Some(id) = self.table.id(node) else { return };
        let mut mappings = self.mappings.lock();
        if mappings.of.get(&node.number).is_none_or(|watched| watched.node != node) {
            mappings.of.insert(node.number, Watched::new(node, id, seen));
            self.mappings.begun.notify_one();
        }
    }

    /// As a thread that was about to watch a file, and comes late.
    #[cfg(test)]
    pub(super) fn watch_late(&self, node: Node) {
        let Now::Version(seen) = self.version_of(node) else { panic!("it is not being changed") };
        self.watch_since(node, Some(seen));
    }

    /// After such a read, which has found so many bytes.
    pub(super) fn note_mapped(&self, node: Node, read: &ReadIn, got: usize) {
        if let Some(watched) = self.mappings.lock().of.get_mut(&node.number) {
            let end = read.offset.saturating_add(read.size.into());
            watched.note_read(read.offset..end, got as u64);
        }
    }

    /// The parts of pages that come back which are to be written: see the [module](self).
    pub(super) fn stored_parts(&self, node: Node, offset: u64, data: &[u8]) -> Vec<Range<u64>> {
        let whole = offset..offset + data.len() as u64;
        let all = self.mappings.lock();
        all.of.get(&node.number).map_or_else(|| vec![whole], |it| it.stored(offset, data))
    }

    /// What the last server has watched.
    pub(super) fn watch_again(&self, open: impl Iterator<Item = u64>) {
        let mapped = open.filter(|number| self.table.is_mapped(*number));
        let nodes = mapped.filter_map(|number| self.table.numbered(number));
        let watched = nodes.map(|(id, node)| (node.number, Watched::new(node, id, None)));
        self.mappings.lock().of.extend(watched);
    }

    /// The node IDs of files that others have changed since the last call.
    pub(super) fn changed_mappings(&self) -> Vec<u64> {
        let watched: Vec<_> = self.mappings.lock().of.values().map(|it| (it.id, it.node)).collect();
        let changed = |(_, node): &(u64, Node)| {
            let now = self.version_of(*node);
            let mut all = self.mappings.lock();
            let Some(watched) = all.of.get_mut(&node.number) else { return false };
            let (has_changed, seen) = match now {
                Now::Version(now) => (watched.seen != Some(now), Some(now)),
                // The next time. It stays as it was.
                Now::Changing => (false, watched.seen),
                Now::Gone => {
                    all.of.remove(&node.number);
                    return true;
                }
            };
            watched.seen = seen;
            has_changed
        };
        watched.into_iter().filter(changed).map(|(id, _)| id).collect()
    }

    /// Has pages dropped of files that others have changed, or that are watched since a moment that is
    /// not known. Returns whether there were any.
    pub(super) fn drop_changed(&self, drops: &mut impl DropsPages) -> bool {
        if drops.has_lost() {
            self.mappings.lock().of.values_mut().for_each(|watched| watched.seen = None);
        }
        let changed = self.changed_mappings();
        for id in &changed {
            if !drops.drop_pages(*id)
                && let Some(number) = self.table.number(*id)
                && let Some(watched) = self.mappings.lock().of.get_mut(&number)
            {
                // The next time.
                watched.seen = None;
            }
        }
        !changed.is_empty()
    }

    /// The body of the thread: has pages dropped of files that others have changed, until it is
    /// [ended](PoolFs::end_watch).
    pub(crate) fn watch(&self, mut drops: impl DropsPages) {
        let mut pause = FIRST_PAUSE;
        loop {
            let start = Instant::now();
            let has_changed = self.drop_changed(&mut drops);
            let rest = REST * start.elapsed();
            let mut watched = self.mappings.lock();
            if watched.ended {
                return;
            }
            let begun = &self.mappings.begun;
            if has_changed {
                pause = FIRST_PAUSE;
                let is_going_on = |state: &mut State| !state.ended;
                let limit = PAUSE_AFTER_CHANGE.max(rest);
                let waited = begun.wait_timeout_while(watched, limit, is_going_on);
                drop(waited.unwrap_or_else(PoisonError::into_inner));
            } else if watched.of.is_empty() {
                pause = FIRST_PAUSE;
                watched = begun.wait(watched).unwrap_or_else(PoisonError::into_inner);
                drop(watched);
            } else {
                let waited = begun.wait_timeout(watched, pause.max(rest));
                drop(waited.unwrap_or_else(PoisonError::into_inner));
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
        }
    }

    /// Ends [`PoolFs::watch`].
    pub(crate) fn end_watch(&self) {
        self.mappings.lock().ended = true;
        self.mappings.begun.notify_one();
    }
}
