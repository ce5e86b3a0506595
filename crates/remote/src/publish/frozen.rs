//! A pool that no process writes to, and that none opens for writing as long as this lives.
//!
//! The pool is opened for reading while no process has it open for writing. Such a reader has no shared memory, and
//! its lock makes writers wait a second and then fail with [`PoolError::Busy`]. That the reader is one of this kind is
//! verified from outside: readers that joined writers, and writers, hold another lock.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use aquifer_pool::format::inode::{HEAD_SLOT, PoolHead};
use aquifer_pool::format::layout::{METADATA_START_PAGE, SLOTS_PER_PAGE};
use aquifer_pool::format::run::Run;
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use aquifer_pool::format::superblock::{COPIES, Superblock};
use aquifer_pool::internals::{Presence, owners};
use aquifer_pool::media::{self, Media, MediaError};
use aquifer_pool::{Pool, PoolError, PoolOptions};

use super::PublishError;
use super::layout::{PAGE_BYTES, State};

/// How long to wait for a process that is just opening or closing the pool.
const SHORT_LOOKS: usize = 30;
/// How often to recover a pool that other processes leave unclean meanwhile.
const MOST_RECOVERIES: usize = 5;
const LOOK: Duration = Duration::from_millis(100);

/// A pool at rest.
pub(super) struct Frozen {
    /// Keeps writers out.
    _pool: Pool,
    pub media: Arc<dyn Media>,
    pub state: State,
    /// The pages that are published, ascending: superblocks, metadata and data that something names. Neither the log,
    /// which is empty, nor free pages.
    pub used: Vec<Run>,
}

impl Frozen {
    /// Keeps writers out. While processes have the pool open for writing, `waits` is asked, ten times a second, whether
    /// to wait for them; its argument are those that are known.
    pub fn new(
        path: &Path,
        options: &PoolOptions,
        waits: &mut dyn FnMut(&[u32]) -> bool,
    ) -> Result<Frozen, PublishError> {
        Self::recovered_by(&mut || recover(path, options), path, options, waits)
    }

    fn recovered_by(
        recover: &mut dyn FnMut() -> Result<(), PublishError>,
        path: &Path,
        options: &PoolOptions,
        waits: &mut dyn FnMut(&[u32]) -> bool,
    ) -> Result<Frozen, PublishError> {
        let reading = options.clone().read_only(true);
        let (mut looks, mut recoveries) = (0, 0);
        loop {
            let writers = match reading.open(path) {
                Ok(pool) => {
                    let outside = media::open(path, false, None).map_err(PoolError::from)?;
                    if Presence::of(&*outside).is_in_use() {
                        pool.info()?.processes
                    } else if let Ok(frozen) = Self::of(pool)? {
                        return Ok(frozen);
                    } else if recoveries == MOST_RECOVERIES {
                        let (path, times) = (path.to_owned(), recoveries);
                        return Err(PublishError::RecoveredInVain { path, times });
                    } else {
                        recoveries += 1;
                        recover()?;
                        Vec::new()
                    }
                }
                Err(PoolError::Busy { .. } | PoolError::BusyElsewhere { .. }) => Vec::new(),
                Err(error) => return Err(error.into()),
            };
            looks += 1;
            // Without a process that is known, it may be one that just closes the pool.
            let is_short = writers.is_empty() && looks < SHORT_LOOKS;
            if !is_short && !waits(&writers) {
                return Err(PublishError::InUse { path: path.to_owned(), processes: writers });
            }
            thread::sleep(LOOK);
        }
    }

    fn of(pool: Pool) -> Result<Result<Frozen, Unclean>, PublishError> {
        let info = pool.info()?;
        let media = pool.media().clone();
        let superblock = superblock_of(&*media)?;
        if info.recovered_records > 0 || !superblock.segment.is_nil() {
            return Ok(Err(Unclean));
        }
        let damaged = |structure| PublishError::DamagedPool { path: info.path.clone(), structure };
        let owners = owners(&pool);
        let inconsistencies = owners.inconsistencies().iter();
        if let Some(worst) = { inconsistencies }.find(|found| found.forbids_writing()) {
            return Err(damaged(worst.structure()));
        }
        if info.damaged_inodes > 0 {
            return Err(damaged(format!("{} slots", info.damaged_inodes)));
        }
        let mut slot = [0; SLOT_BYTES];
        media
            .read_at(info.layout.slot_offset_bytes(HEAD_SLOT), &mut slot)
            .map_err(PoolError::from)?;
        let head = PoolHead::decode(&slot).map_err(|_| damaged("the pool's head".to_owned()))?;
        let slots = head.used_slots.min(info.layout.slots());
        let metadata = METADATA_START_PAGE + slots.div_ceil(SLOTS_PER_PAGE);
        let mut used = vec![Run { start_page: 0, pages: metadata }];
        used.extend(owners.used_runs());
        let state = State {
            uuid: info.uuid,
            len_bytes: info.layout.len_bytes(),
            sequence: superblock.sequence,
            generation: superblock.generation,
            tail_lsn: superblock.tail_lsn,
        };
        Ok(Ok(Frozen { _pool: pool, media, state, used }))
    }

    /// Reads the pages in use of a range of the pool; the others are left as they are in `to`: zero.
    pub fn read(&self, offset_bytes: u64, to: &mut [u8]) -> Result<(), MediaError> {
        let end_bytes = offset_bytes + to.len() as u64;
        let first = self.used.partition_point(|run| run.bytes().end_bytes() <= offset_bytes);
        for run in &self.used[first..] {
            let bytes = run.bytes();
            if bytes.offset_bytes >= end_bytes {
                break;
            }
            let start = bytes.offset_bytes.max(offset_bytes);
            let end = bytes.end_bytes().min(end_bytes);
            let part = &mut to[(start - offset_bytes) as usize..(end - offset_bytes) as usize];
            self.media.read_at(start, part)?;
        }
        Ok(())
    }

    /// How many bytes of a range are in use.
    pub fn used_bytes(&self, offset_bytes: u64, len_bytes: u64) -> u64 {
        let end_bytes = offset_bytes + len_bytes;
        let first = self.used.partition_point(|run| run.bytes().end_bytes() <= offset_bytes);
        let inside = |run: &Run| {
            let (start, end) = (run.start_page * PAGE_BYTES, run.end_page() * PAGE_BYTES);
            end.min(end_bytes).saturating_sub(start.max(offset_bytes))
        };
        let runs = self.used[first..].iter();
        runs.take_while(|run| run.start_page * PAGE_BYTES < end_bytes).map(inside).sum()
    }
}

/// The pool's log is not empty, or names shared memory of processes that are gone.
struct Unclean;

/// Opens the pool for writing and closes it, which leaves an empty log.
fn recover(path: &Path, options: &PoolOptions) -> Result<(), PublishError> {
    match options.clone().read_only(false).background(false).open(path) {
        Ok(pool) => {
            drop(pool);
            Ok(())
        }
        // The next look tells.
        Err(PoolError::Busy { .. } | PoolError::BusyElsewhere { .. }) => Ok(()),
        Err(source) => Err(PublishError::Unrecovered { path: PathBuf::from(path), source }),
    }
}

/// The superblock that counts, of a pool that was opened.
fn superblock_of(media: &dyn Media) -> Result<Superblock, PublishError> {
    let mut page = vec![0; PAGE_BYTES as usize];
    let mut newest: Option<Superblock> = None;
    for copy in 0..COPIES {
        media.read_at(copy * PAGE_BYTES, &mut page).map_err(PoolError::from)?;
        if let Ok(found) = Superblock::decode(&page, copy)
            && newest.as_ref().is_none_or(|newest| found.sequence > newest.sequence)
        {
            newest = Some(found);
        }
    }
    newest.ok_or_else(|| PublishError::DamagedPool {
        path: media.path().to_owned(),
        structure: "both superblocks".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_stays_unclean_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let (path, killed) = (directory.path().join("a.pool"), directory.path().join("b.pool"));
        let pool = Pool::create(&path, 4 << 20).unwrap();
        // As a process leaves it that is killed.
        std::fs::copy(&path, &killed).unwrap();
        drop(pool);
        let mut times = 0;
        let mut in_vain = || {
            times += 1;
            Ok(())
        };
        let waits = &mut |_: &[u32]| true;
        let given_up = Frozen::recovered_by(&mut in_vain, &killed, &Pool::options(), waits);
        let is_meant =
            matches!(given_up, Err(PublishError::RecoveredInVain { times: MOST_RECOVERIES, .. }));
        assert!(is_meant && times == MOST_RECOVERIES, "{times}");
        Frozen::new(&killed, &Pool::options(), waits).map(drop).unwrap();
    }
}
