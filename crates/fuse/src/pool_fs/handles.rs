//! Open files, kept for the next request about the same inode.
//!
//! The kernel sends no `OPEN` and no `RELEASE`, so a file is opened by its first `READ` or `WRITE`, and
//! closed when the kernel forgets it, when it was not used for a second, or when too many others
//! are open. Closing gives back the room ahead of a file that grew, so that `du` and `df` agree; the
//! kernel is not told that the file has fewer blocks then, so until then it keeps attributes of such a
//! file only for a second.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aquifer_fs::File;
use aquifer_fs::node::Node;

use super::Result;

const SHARDS: usize = 16;
/// The most open files of a shard. Whatever removes a file looks at all of them, as they are pinned:
/// with 4,096 an unlink through the mount takes 58 µs, with 512 it takes 43.
const MOST_OPEN: usize = 32;
/// How much is written early after a sync.
const EARLY_BYTES: u64 = 1 << 20;

/// Open files by inode number. See the [module](self).
pub(super) struct Handles {
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Default)]
struct Shard {
    open: HashMap<u64, Handle>,
    /// How often a file was used.
    uses: u64,
    /// `uses` when idle files were closed last.
    uses_before: u64,
}

struct Handle {
    file: File,
    /// `Shard::uses` at its last use.
    used: u64,
    /// How many more bytes the media begin to write as soon as they are there. See
    /// [`Handles::begins_early`].
    early_bytes: u64,
}

impl Shard {
    fn put(&mut self, file: File) -> Vec<File> {
        self.uses += 1;
        let handle = Handle { file, used: self.uses, early_bytes: 0 };
        let before = self.open.insert(handle.file.node().number, handle);
        let mut closed: Vec<_> = before.into_iter().map(|handle| handle.file).collect();
        if self.open.len() > MOST_OPEN {
            // Half of them, so that it is rare.
            let mut used: Vec<_> = self.open.values().map(|handle| handle.used).collect();
            let (_, &mut middle, _) = used.select_nth_unstable(MOST_OPEN / 2);
            closed.extend(self.close_before(middle));
        }
        closed
    }

    fn close_before(&mut self, used: u64) -> impl Iterator<Item = File> + '_ {
        self.open.extract_if(move |_, handle| handle.used <= used).map(|(_, handle)| handle.file)
    }
}

impl Handles {
    pub fn new() -> Handles {
        Handles { shards: Default::default() }
    }

    fn shard(&self, number: u64) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[(number % SHARDS as u64) as usize];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An open file; `open` opens it.
    pub fn get(&self, node: Node, open: impl FnOnce() -> Result<File>) -> Result<File> {
        {
            let mut shard = self.shard(node.number);
            shard.uses += 1;
            let uses = shard.uses;
            if let Some(handle) = shard.open.get_mut(&node.number)
                && handle.file.node() == node
            {
                handle.used = uses;
                return Ok(handle.file.clone());
            }
        }
        let file = open()?;
        self.put(file.clone());
        Ok(file)
    }

    /// Notes that a file was synced.
    pub fn note_synced(&self, number: u64) {
        if let Some(handle) = self.shard(number).open.get_mut(&number) {
            handle.early_bytes = EARLY_BYTES;
        }
    }

    /// Whether the media should begin to write what was just written to a file. A file that was synced
    /// a little before is likely to be synced again: then the disk writes while the answer and the
    /// next request are on their way.
    pub fn begins_early(&self, number: u64, len_bytes: u64) -> bool {
        let mut shard = self.shard(number);
        let Some(handle) = shard.open.get_mut(&number) else { return false };
        let left = handle.early_bytes.checked_sub(len_bytes);
        handle.early_bytes = left.unwrap_or(0);
        left.is_some()
    }

    /// Whether the file is open and has room ahead, so that closing it may change its blocks.
    pub fn has_room_ahead(&self, number: u64) -> bool {
        let shard = self.shard(number);
        shard.open.get(&number).is_some_and(|handle| handle.file.has_room_ahead())
    }

    /// Keeps a file that was opened for reading and writing.
    pub fn put(&self, file: File) {
        // Closing changes the pool: without the lock.
        let closed = self.shard(file.node().number).put(file);
        drop(closed);
    }

    /// Takes out what is open of an inode.
    pub fn take(&self, number: u64) -> Option<File> {
        self.shard(number).open.remove(&number).map(|handle| handle.file)
    }

    /// Closes all files.
    pub fn close_all(&self) {
        // Twice unused.
        self.close_idle();
        self.close_idle();
    }

    /// Closes files that were not used since the last call.
    pub fn close_idle(&self) {
        for shard in &self.shards {
            let closed: Vec<_> = {
                let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
                let before = shard.uses_before;
                shard.uses_before = shard.uses;
                shard.close_before(before).collect()
            };
            drop(closed);
        }
    }
}
