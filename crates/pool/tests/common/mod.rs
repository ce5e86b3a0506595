//! A small store of named objects in a pool, a plain model of it, and random changes of both.
#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use aquifer_crashkit::unguarded::{UnguardedMedia, UnguardedPool};
use aquifer_pool::format::inode::{Inode, InodeKind};
use aquifer_pool::format::superblock::KNOWN_FEATURES;
use aquifer_pool::format::{PAGE_BYTES, checksum};
use aquifer_pool::media::{ByteRange, Media};
use aquifer_pool::{
    CommitContent, CommitCopied, CommitPages, LockMode, Mutant, Pool, PoolError, PoolOptions,
    Result,
};
use aquifer_testkit::rng::Rng;

/// The stamps that fill an object's pages; a page with stamp 0 was never written.
pub type Content = Vec<u64>;
/// All objects by name.
pub type Model = BTreeMap<Vec<u8>, Content>;

/// A directory with a pool in it. Dropping it removes both, and the shared memory that killed
/// processes have left.
pub struct Scene {
    _directory: tempfile::TempDir,
    pub path: PathBuf,
}

impl Scene {
    /// The pool is created later.
    pub fn new(directory: tempfile::TempDir) -> Scene {
        Scene { path: directory.path().join("pool"), _directory: directory }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // Opening the pool removes the shared memory that killed processes have left.
        drop(Pool::open(&self.path));
    }
}

/// A small pool: 16 slots, a log of 64 KiB, and a saved state, which larger pools have.
pub fn small(options: PoolOptions) -> PoolOptions {
    options.inodes(15).log_bytes(64 << 10).features(KNOWN_FEATURES)
}

/// Opens for this process alone, without background work, so that the order of operations is
/// deterministic.
pub fn alone(mutant: Option<Mutant>) -> PoolOptions {
    Pool::options().exclusive(true).background(false).mutant(mutant)
}

/// A page filled with a stamp.
pub fn page(stamp: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat(PAGE_BYTES as usize / 8)
}

fn stamp_of(page: &[u8]) -> std::result::Result<u64, String> {
    let words = page.as_chunks::<8>().0;
    if words.iter().all(|word| *word == words[0]) {
        Ok(u64::from_le_bytes(words[0]))
    } else {
        Err("a page holds two commits' bytes".to_owned())
    }
}

/// A change of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Create {
        name: Vec<u8>,
        pages: u64,
    },
    Destroy {
        name: Vec<u8>,
    },
    /// Written to new pages, and then named: visible at once, durable after a sync. If an object
    /// has that name, its pages become free.
    Write {
        name: Vec<u8>,
        pages: u64,
        stamp: u64,
    },
    /// Visible at once.
    Remove {
        name: Vec<u8>,
    },
    /// Visible at once; names no new pages.
    Rename {
        name: Vec<u8>,
        to: Vec<u8>,
    },
    Sync,
    /// Pages of several objects at once, with their new stamps.
    Commit {
        pages: Vec<(Vec<u8>, u64, u64)>,
        is_large: bool,
    },
    Checkpoint,
    Reopen,
}

impl Change {
    /// A random change that `model` allows. `id` becomes the stamp of what it writes.
    pub fn random(rng: &mut Rng, model: &Model, id: u64) -> Change {
        let names: Vec<&Vec<u8>> = model.keys().collect();
        let kind = rng.below(100);
        if names.is_empty() || (kind < 15 && names.len() < 6) {
            let name = format!("object-{id}").into_bytes();
            return Change::Create { name, pages: 1 + rng.below(4) };
        }
        let name = names[rng.below(names.len() as u64) as usize].clone();
        let new_name = || format!("object-{id}").into_bytes();
        match kind {
            15..22 => Change::Destroy { name },
            22..26 => Change::Checkpoint,
            26..30 => Change::Reopen,
            30..36 => Change::Sync,
            36..44 if names.len() < 6 => {
                Change::Write { name: new_name(), pages: 1 + rng.below(4), stamp: id }
            }
            36..54 => Change::Write { name, pages: 1 + rng.below(4), stamp: id },
            54..60 => Change::Remove { name },
            60..66 => Change::Rename { name, to: new_name() },
            _ => {
                let mut pages = Vec::new();
                let objects = 1 + usize::from(kind > 85).min(names.len() - 1);
                for name in names.iter().cycle().skip(rng.below(7) as usize).take(objects) {
                    let len = model[*name].len() as u64;
                    let first = rng.below(len);
                    let count = 1 + rng.below((len - first).min(3));
                    pages.extend((first..first + count).map(|page| ((*name).clone(), page, id)));
                }
                Change::Commit { pages, is_large: kind > 93 }
            }
        }
    }

    pub fn apply(&self, model: &mut Model) {
        match self {
            Change::Create { name, pages } => {
                model.insert(name.clone(), vec![0; *pages as usize]);
            }
            Change::Destroy { name } | Change::Remove { name } => {
                model.remove(name);
            }
            Change::Write { name, pages, stamp } => {
                model.insert(name.clone(), vec![*stamp; *pages as usize]);
            }
            Change::Rename { name, to } => {
                let content = model.remove(name).expect("chosen from it");
                model.insert(to.clone(), content);
            }
            Change::Commit { pages, .. } => {
                for (name, page, stamp) in pages {
                    model.get_mut(name).expect("chosen from it")[*page as usize] = *stamp;
                }
            }
            Change::Checkpoint | Change::Reopen | Change::Sync => {}
        }
    }

    /// Whether it and all earlier changes are durable when it has returned.
    pub fn is_durable(&self) -> bool {
        !matches!(self, Change::Write { .. } | Change::Remove { .. } | Change::Rename { .. })
    }

    /// Applies it to the pool.
    pub fn run(&self, pool: &Pool) -> Result<()> {
        match self {
            Change::Create { name, pages } => create(pool, name, *pages),
            Change::Destroy { name } => destroy(pool, name),
            Change::Write { name, pages, stamp } => write(pool, name, *pages, *stamp),
            Change::Remove { name } => remove(pool, name),
            Change::Rename { name, to } => rename(pool, name, to),
            Change::Sync => pool.sync(),
            Change::Commit { pages, is_large } => commit(pool, pages, *is_large),
            Change::Checkpoint => pool.checkpoint(),
            Change::Reopen => Ok(()),
        }
    }
}

pub fn find(pool: &Pool, name: &[u8]) -> Result<Option<Inode>> {
    pool.object_named(name)
}

pub fn create(pool: &Pool, name: &[u8], pages: u64) -> Result<()> {
    let reservation = pool.reserve_zeroed(pages, 1)?;
    let runs = reservation.runs().to_vec();
    pool.transact_unguarded(vec![reservation], |transaction| {
        // As the layer above does; the first lookup builds the index of names.
        assert!(transaction.object_named(name).is_none());
        let inode = Inode {
            kind: InodeKind::Object,
            size_bytes: pages * PAGE_BYTES,
            runs: runs.clone(),
            name: name.to_vec(),
            ..transaction.free_inode()?
        };
        transaction.put(inode);
        Ok(())
    })
}

pub fn destroy(pool: &Pool, name: &[u8]) -> Result<()> {
    let inode = find(pool, name)?.expect("it is in the model");
    let _lock = loop {
        match pool.lock_inode(inode.number, LockMode::Exclusive) {
            // The lock of an object that had this number before is held until its removal is
            // durable.
            Err(PoolError::Locked { .. } | PoolError::AlreadyLocked { .. }) => {
                std::thread::yield_now();
            }
            locked => break locked?,
        }
    };
    pool.transact_unguarded(vec![], |transaction| {
        let inode = transaction.inode(inode.number)?;
        transaction.put(Inode::free(inode.number, inode.generation));
        Ok(())
    })
}

/// Fills new pages, and names them.
pub fn write(pool: &Pool, name: &[u8], pages: u64, stamp: u64) -> Result<()> {
    let reservation = pool.reserve(pages, 1)?;
    let runs = reservation.runs().to_vec();
    pool.store_unguarded(
        reservation.whole().bytes().offset_bytes,
        &page(stamp).repeat(pages as usize),
    )?;
    let before = find(pool, name)?;
    pool.change_unguarded(vec![reservation], |transaction| {
        let inode = match &before {
            Some(before) => transaction.inode(before.number)?,
            None => transaction.free_inode()?,
        };
        transaction.put(Inode {
            kind: InodeKind::Object,
            layout_version: inode.layout_version + 1,
            size_bytes: pages * PAGE_BYTES,
            runs: runs.clone(),
            name: name.to_vec(),
            ..inode
        });
        Ok(())
    })
}

/// Removes an object; durable after a sync.
pub fn remove(pool: &Pool, name: &[u8]) -> Result<()> {
    let number = find(pool, name)?.expect("it is in the model").number;
    pool.change_unguarded(vec![], |transaction| {
        let inode = transaction.inode(number)?;
        transaction.put(Inode::free(number, inode.generation));
        Ok(())
    })
}

/// Renames an object; durable after a sync.
pub fn rename(pool: &Pool, name: &[u8], to: &[u8]) -> Result<()> {
    let number = find(pool, name)?.expect("it is in the model").number;
    pool.change_unguarded(vec![], |transaction| {
        let inode = transaction.inode(number)?;
        transaction.put(Inode { name: to.to_vec(), ..inode });
        Ok(())
    })
}

/// The media range of one page of an object.
pub fn place(inode: &Inode, page: u64) -> ByteRange {
    let offset_bytes = (inode.runs[0].start_page + page) * PAGE_BYTES;
    ByteRange { offset_bytes, len_bytes: PAGE_BYTES }
}

fn commit(pool: &Pool, pages: &[(Vec<u8>, u64, u64)], is_large: bool) -> Result<()> {
    let mut targets = Vec::new();
    for (name, page, stamp) in pages {
        let inode = find(pool, name)?.expect("it is in the model");
        targets.push((inode.number, place(&inode, *page), *stamp));
    }
    if is_large { commit_beside_log(pool, &targets) } else { commit_through_log(pool, &targets) }
}

fn commit_through_log(pool: &Pool, targets: &[(u64, ByteRange, u64)]) -> Result<()> {
    let pages: Vec<CommitPages> =
        targets.iter().map(|&(inode, target, _)| CommitPages { inode, target }).collect();
    pool.capture_unguarded(&CommitContent { pages: &pages, ..Default::default() }, |payload| {
        for (chunk, (_, _, stamp)) in payload.chunks_exact_mut(PAGE_BYTES as usize).zip(targets) {
            chunk.copy_from_slice(&page(*stamp));
        }
    })?
    .finish()
}

/// Commits as for commits too large for the log: the pages are first written to a separate run.
fn commit_beside_log(pool: &Pool, targets: &[(u64, ByteRange, u64)]) -> Result<()> {
    let number = targets[0].0;
    let reservation = pool.reserve(targets.len() as u64, 1)?;
    let shadow = reservation.whole();
    pool.transact_unguarded(vec![reservation], |transaction| {
        let inode = Inode { shadow, ..transaction.inode(number)? };
        transaction.put(inode);
        Ok(())
    })?;
    let mut copied = Vec::new();
    for (index, (inode, target, stamp)) in targets.iter().enumerate() {
        let source_offset_bytes = shadow.bytes().offset_bytes + index as u64 * PAGE_BYTES;
        let bytes = page(*stamp);
        pool.media().write_unguarded(source_offset_bytes, &bytes)?;
        copied.push(CommitCopied {
            inode: *inode,
            target: *target,
            source_offset_bytes,
            checksum: checksum(&[&bytes]),
        });
    }
    pool.make_durable(&[shadow.bytes()])?;
    pool.capture_unguarded(&CommitContent { copied: &copied, ..Default::default() }, |_| {})?
        .finish()?;
    pool.checkpoint()?;
    pool.transact_unguarded(vec![], |transaction| {
        let inode =
            Inode { shadow: aquifer_pool::format::run::Run::EMPTY, ..transaction.inode(number)? };
        transaction.put(inode);
        Ok(())
    })
}

/// All objects as they are in place on media.
pub fn contents(pool: &Pool) -> std::result::Result<Model, String> {
    let mut model = Model::new();
    for inode in pool.inodes().map_err(|error| error.to_string())? {
        let runs: u64 = inode.content_pages();
        let whole = ByteRange {
            offset_bytes: inode.runs[0].start_page * PAGE_BYTES,
            len_bytes: runs * PAGE_BYTES,
        };
        let patches = pool.bring_up_to_date(whole).map_err(|error| error.to_string())?;
        let mut bytes = vec![0; whole.len_bytes as usize];
        pool.media().read_at(whole.offset_bytes, &mut bytes).map_err(|error| error.to_string())?;
        for (offset, page) in patches {
            let start = (offset - whole.offset_bytes) as usize;
            bytes[start..start + page.len()].copy_from_slice(&page);
        }
        let content: std::result::Result<Content, String> =
            bytes.chunks_exact(PAGE_BYTES as usize).map(stamp_of).collect();
        let found = pool.object_named(&inode.name).map_err(|error| error.to_string())?;
        if found.as_ref() != Some(&inode) {
            return Err(format!("{} leads to {found:?}", inode.name.escape_ascii()));
        }
        model.insert(inode.name, content?);
    }
    Ok(model)
}

/// Opens a pool over any kind of media.
pub fn open(
    media: &Arc<impl Media>,
    options: &PoolOptions,
) -> std::result::Result<Pool, PoolError> {
    options.open_on(media.clone())
}
