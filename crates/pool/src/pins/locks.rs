//! Pins of readers: shared locks of the pool file.
//!
//! A process that opened the pool for reading does not store to memory that other processes use.
//! Its pins are open-file-description locks, which a read-only descriptor allows, on bytes far
//! beyond the end of the file:
//!
//! ```text
//!  READER_USES                READER_GROUPS       READER_LAYOUTS                             2⁶²
//!  ├────────────┬── ┄ ────────┼───────────────────┼──────────────────────────────────────────┤
//!  │ kind × 2³² │             │ inode ÷ 64        │ inode × 2³² + layout version             │
//!  │ + inode    │             │                   │                                          │
//!  │ in use     │             │ pages of 64       │ pages of an inode below 2²⁸, as of       │
//!  │            │             │ inodes            │ one layout version: the value of the pin │
//! ```
//!
//! The kernel drops the locks when the handle's descriptors close, however the process ends. A
//! handle has one lock for all its pins with the same byte and counts the pins, because its own
//! locks never conflict with each other.
//!
//! # Visibility
//! As with words ([`word`](super::word)): the reader sets its lock, executes a fence and loads the
//! layout version; the thread that frees pages stores the version, executes a fence and tests the
//! locks. The kernel keeps the locks of a file in a list that it guards with a lock, which already
//! orders the two; the fences make the code independent of how the kernel does it.
//!
//! # Number of locks
//! The kernel walks all locks of a file whenever one is set or tested: 10,000 locks make that a
//! hundred times slower, for all processes. So a handle has at most [`MOST_LAYOUTS`] locks of
//! layouts at a time. Further pins are locks of groups of 64 inodes, in all their versions; the
//! kernel merges adjacent ones. They keep more pages than necessary.
//!
//! # Scanning
//! If no reader has a pin, as in nearly every scan, one system call finds that out. Otherwise each
//! call returns one lock, and the ranges before and after it are queried next. After [`MOST_FOUND`]
//! locks or [`PATIENCE`], the rest counts as locked: a reader that locks a million bytes only
//! delays the reuse of pages.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use aquifer_sys::lock::{LockKind, LockRange};

use super::word::{InodeUse, LEAST_USE, PinValue, fence_after_lock};
use crate::error::{PoolError, Result};
use crate::shared::membership::{
    Membership, READER_GROUPS, READER_LAYOUTS, READER_LAYOUTS_END, READER_USES,
};

/// The most layout locks that a handle has at a time.
const MOST_LAYOUTS: usize = 128;
/// The most locks that a scan tells apart.
const MOST_FOUND: usize = 1024;
/// The longest time for which a scan queries locks.
const PATIENCE: Duration = Duration::from_millis(100);
/// Inodes from this one on have no layout bytes.
const LAYOUT_INODES: u64 = (READER_LAYOUTS_END - READER_LAYOUTS) >> 32;
const GROUP_INODES: u64 = 64;

const _: () = assert!(READER_USES + (3 << 32) <= READER_GROUPS);
const _: () = assert!(READER_GROUPS + (1 << 32) / GROUP_INODES <= READER_LAYOUTS);

fn use_byte(inode: u64, low: u32) -> u64 {
    READER_USES + (u64::from(u32::MAX - low) << 32) + inode
}

fn group_byte(inode: u64) -> u64 {
    READER_GROUPS + inode / GROUP_INODES
}

fn layout_byte(value: PinValue) -> Option<u64> {
    (value.inode() < LAYOUT_INODES).then(|| READER_LAYOUTS + value.to_bits())
}

/// The locks of one handle.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    /// The number of pins that each locked byte stands for.
    pins: HashMap<u64, u64>,
    /// The number of these bytes that are layout bytes.
    layouts: usize,
}

impl Held {
    fn byte_of(&self, value: PinValue) -> u64 {
        if value.low() >= LEAST_USE {
            return use_byte(value.inode(), value.low());
        }
        layout_byte(value)
            .filter(|byte| self.layouts < MOST_LAYOUTS || self.pins.contains_key(byte))
            .unwrap_or_else(|| group_byte(value.inode()))
    }
}

impl Locks {
    /// Sets a pin and returns its byte.
    pub fn set(&self, members: &Membership, value: PinValue) -> Result<u64> {
        let inode = value.inode();
        let mut held = self.held.lock().unwrap_or_else(|broken| broken.into_inner());
        let byte = held.byte_of(value);
        match held.pins.entry(byte) {
            Entry::Occupied(mut pins) => *pins.get_mut() += 1,
            Entry::Vacant(none) => {
                // Locked while `held` is locked, so before another thread can count on this byte.
                match members.try_lock_range(LockRange::byte(byte), LockKind::Shared) {
                    Ok(true) => drop(none.insert(1)),
                    // Only a process with write access can hold a conflicting lock.
                    Ok(false) => {
                        let source = io::Error::from_raw_os_error(libc::EAGAIN);
                        return Err(PoolError::CannotLock { inode, source });
                    }
                    Err(source) => return Err(PoolError::CannotLock { inode, source }),
                }
                held.layouts += usize::from(byte >= READER_LAYOUTS);
            }
        }
        drop(held);
        fence_after_lock();
        Ok(byte)
    }

    /// Removes a pin.
    pub fn clear(&self, members: &Membership, byte: u64) {
        let mut held = self.held.lock().unwrap_or_else(|broken| broken.into_inner());
        let Entry::Occupied(mut pins) = held.pins.entry(byte) else { return };
        *pins.get_mut() -= 1;
        if *pins.get() == 0 {
            pins.remove();
            held.layouts -= usize::from(byte >= READER_LAYOUTS);
            members.unlock_range(LockRange::byte(byte));
        }
    }
}

/// Whether a reader uses an inode in this way. The caller has executed the fence.
pub(super) fn is_used(members: &Membership, inode: u64, usage: InodeUse) -> bool {
    let byte = use_byte(inode, usage.low());
    // An error counts as in use.
    !matches!(members.locked_by_other_in(&(byte..byte + 1)), Ok(None))
}

/// Returns the ranges that readers have locked to pin pages, without overlaps. The caller has
/// executed the fence.
pub(super) fn look(members: &Membership) -> Vec<Range<u64>> {
    locked_in(members, READER_GROUPS..READER_LAYOUTS_END)
}

/// Returns the ranges that readers have locked to mark inodes as in use.
pub(super) fn look_at_uses(members: &Membership) -> Vec<Range<u64>> {
    locked_in(members, READER_USES..READER_GROUPS)
}

fn locked_in(members: &Membership, within: Range<u64>) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut started = None;
    let mut unknown = vec![within];
    while let Some(range) = unknown.pop() {
        let is_late = started.is_some_and(|started: Instant| started.elapsed() > PATIENCE);
        let locked = match members.locked_by_other_in(&range) {
            _ if is_late || found.len() >= MOST_FOUND => range.clone(),
            Ok(None) => continue,
            Ok(Some(locked)) => locked.start.max(range.start)..locked.end.min(range.end),
            Err(_) => range.clone(),
        };
        started.get_or_insert_with(Instant::now);
        let rest = [range.start..locked.start, locked.end..range.end];
        unknown.extend(rest.into_iter().filter(|rest| !rest.is_empty()));
        found.push(locked);
    }
    found
}

/// Whether a locked range keeps pages that a change of `freed.inode()` freed. The `newer` layout
/// versions after the freed one do not keep them.
pub(super) fn covers(locked: &Range<u64>, freed: PinValue, newer: u32) -> bool {
    if locked.contains(&group_byte(freed.inode())) {
        return true;
    }
    let Some(first) = layout_byte(PinValue::of_freed(freed.inode(), 0)) else { return false };
    let (start, end) = (locked.start.max(first), locked.end.min(first + (1 << 32)));
    if start >= end {
        return false;
    }
    // The versions of the range, counted from the freed one.
    let after = u64::from(((start - first) as u32).wrapping_sub(freed.low()));
    let are_newer = after > 0 && after + (end - start) - 1 <= u64::from(newer);
    !are_newer
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::path::Path;

    use super::super::set::PinSet;
    use super::*;

    fn members(path: &Path, writes: bool) -> Membership {
        let file = File::options().read(true).write(writes).open(path).unwrap();
        Membership::new(file.as_fd()).unwrap()
    }

    fn version(inode: u64, layout_version: u64) -> PinValue {
        PinValue::of_version(inode, layout_version).unwrap()
    }

    fn seen(writer: &Membership) -> PinSet {
        PinSet::new(Vec::new(), look(writer))
    }

    #[test]
    fn a_locked_layout_keeps_what_a_word_would_keep() {
        for (pinned, freed_at, current) in
            (0..7).flat_map(|p| (0..7).flat_map(move |f| (f..9).map(move |c| (p, f, c))))
        {
            let wrap = (1_u64 << 32) - 5;
            for base in [0, 100, wrap] {
                let value = version(9, base + pinned);
                let freed = PinValue::of_freed(9, base + freed_at);
                let byte = layout_byte(value).unwrap();
                let words = PinSet::new(vec![value], vec![]);
                let locks = PinSet::new(Vec::new(), std::iter::once(byte..byte + 1).collect());
                for now in [Some(base + current), None] {
                    let what = format!("{pinned} {freed_at} {current} from {base}");
                    assert_eq!(locks.covers(freed, now), words.covers(freed, now), "{what}");
                }
            }
        }
    }

    #[test]
    fn a_reader_locks_each_layout_once_and_a_writer_sees_it_until_the_last_pin_is_gone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (reader, writer) = (members(file.path(), false), members(file.path(), true));
        let locks = Locks::default();
        assert!(look(&writer).is_empty());
        let places = [(); 3].map(|()| locks.set(&reader, version(7, 5)).unwrap());
        let other = locks.set(&reader, version(8, 1)).unwrap();
        let open = PinValue::of_use(7, InodeUse::Open).unwrap();
        let open = locks.set(&reader, open).unwrap();
        assert!(look(&reader).is_empty(), "its own locks stand against others only");
        for place in places {
            assert!(seen(&writer).covers(PinValue::of_freed(7, 5), Some(6)));
            assert!(!seen(&writer).covers(PinValue::of_freed(7, 4), Some(6)), "freed before");
            assert!(seen(&writer).covers(PinValue::of_freed(8, 1), Some(6)));
            locks.clear(&reader, place);
        }
        assert!(!seen(&writer).covers(PinValue::of_freed(7, 5), Some(6)));
        assert!(is_used(&writer, 7, InodeUse::Open));
        assert!(!is_used(&writer, 7, InodeUse::Leased) && !is_used(&writer, 8, InodeUse::Open));
        for place in [other, open] {
            locks.clear(&reader, place);
        }
        assert!(look(&writer).is_empty() && look_at_uses(&writer).is_empty());
    }

    #[test]
    fn a_reader_with_very_many_views_has_few_locks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (reader, writer) = (members(file.path(), false), members(file.path(), true));
        let locks = Locks::default();
        let inodes = 1..20_000;
        let places: Vec<u64> =
            inodes.clone().map(|inode| locks.set(&reader, version(inode, 3)).unwrap()).collect();
        assert!(look(&writer).len() <= MOST_LAYOUTS + 2, "{}", look(&writer).len());
        let found = seen(&writer);
        for inode in inodes {
            assert!(found.covers(PinValue::of_freed(inode, 3), Some(4)), "{inode}");
        }
        assert!(!found.covers(PinValue::of_freed(30_000, 3), Some(4)));
        places.into_iter().for_each(|place| locks.clear(&reader, place));
        assert!(look(&writer).is_empty());
        // Inodes that have no layout bytes.
        let far = locks.set(&reader, version(u64::from(u32::MAX), 3)).unwrap();
        assert!(seen(&writer).covers(PinValue::of_freed(u64::from(u32::MAX), 3), Some(4)));
        locks.clear(&reader, far);
        assert!(look(&writer).is_empty());
    }

    /// Locks beyond what a scan tells apart count as locked.
    #[test]
    fn more_locks_than_a_look_tells_apart_keep_everything() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (reader, writer) = (members(file.path(), false), members(file.path(), true));
        for index in 0..2 * MOST_FOUND as u64 {
            let byte = LockRange::byte(READER_LAYOUTS + 3 * index);
            assert!(reader.try_lock_range(byte, LockKind::Shared).unwrap());
        }
        let found = look(&writer);
        assert!(found.len() <= 4 * MOST_FOUND, "{}", found.len());
        for index in 0..2 * MOST_FOUND as u64 {
            let byte = READER_LAYOUTS + 3 * index;
            assert!(found.iter().any(|range| range.contains(&byte)), "{index}");
        }
        drop(reader);
        assert!(look(&writer).is_empty());
    }
}
