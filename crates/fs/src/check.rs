//! Checking and repairing a pool with its files: the pool's own checks, and those that need the
//! file structures.
//!
//! The pool checks all references itself ([`aquifer_pool::check`]), because it must do that
//! whenever it is opened. This module does the rest: whether the names of a directory lie where
//! lookups find them, whether attributes and targets can be read, and naming inodes that have lost
//! their names.
//!
//! ```no_run
//! let report = aquifer_fs::check::check("/var/lib/data.pool", &Default::default())?;
//! println!("{report}");
//! # Ok::<(), aquifer_pool::PoolError>(())
//! ```

use std::path::Path;
use std::sync::Arc;

use aquifer_pool::check::{self, CheckOptions, CheckReport, FileCheck, RepairReport};
use aquifer_pool::check::{PartsInconsistency, PartsSort};
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::format::run::MAX_PAGES;
use aquifer_pool::media::{self, Media};
use aquifer_pool::{Pool, PoolError, ReadSlots, Result};

use crate::directory::{Found, InconsistencyKind, Tree};
use crate::error::FsError;
use crate::files::now_ns;
use crate::names::{LOST_AND_FOUND, Names, New};
use crate::walk::{self, MAX_PATH_BYTES};
use crate::{attributes, byte_chain, file_table};

/// Checks the pool in a file or device. Writes nothing.
///
/// # Errors
/// [`PoolError::NotOpened`](aquifer_pool::PoolError::NotOpened) if it cannot be read at all. All
/// inconsistencies of the pool are in the report.
pub fn check(path: impl AsRef<Path>, options: &CheckOptions) -> Result<CheckReport> {
    let media = media::open(path.as_ref(), false, None)?;
    Ok(check_on(&*media, options))
}

/// Checks the pool on media that no open pool uses. Writes nothing.
pub fn check_on(media: &dyn Media, options: &CheckOptions) -> CheckReport {
    check::check_with(media, options, &FilesOf)
}

/// Repairs the pool in a file or device if that loses no data. Files and directories without a name
/// get one in `/lost+found`: `#` and the number of their inode.
///
/// # Errors
/// As for [`aquifer_pool::check::repair`].
pub fn repair(path: impl AsRef<Path>, options: &CheckOptions) -> Result<RepairReport> {
    repair_on(media::open(path.as_ref(), true, None)?, options)
}

/// Repairs the pool on media that no open pool uses.
///
/// # Errors
/// As for [`repair`].
pub fn repair_on(media: Arc<dyn Media>, options: &CheckOptions) -> Result<RepairReport> {
    check::repair_with(media, options, &FilesOf)
}

/// The file checks that the pool's check calls.
struct FilesOf;

impl FileCheck for FilesOf {
    fn check_parts(
        &self,
        slots: &dyn ReadSlots<Error = PoolError>,
        inode: &FileInode,
        find: &mut dyn FnMut(PartsInconsistency),
    ) {
        let slots = &slots;
        let number = inode.number;
        let mut add = |slot, sort, reason: String| find(PartsInconsistency { slot, sort, reason });
        match inode.kind {
            FileKind::Directory => {
                let tree = Tree { owner: number, seed: inode.seed, root: inode.part };
                let checked = tree.check(slots, |found| {
                    if let Found::Inconsistency(inconsistency) = found
                        && is_of_order(&inconsistency.kind)
                    {
                        add(inconsistency.slot, PartsSort::Names, inconsistency.to_string());
                    }
                });
                if let Err(error) = checked {
                    add(number, PartsSort::Names, error.to_string());
                }
            }
            FileKind::Symlink => {
                if let Err(reason) = check_target(slots, inode) {
                    add(number, PartsSort::Target, reason);
                }
            }
            _ => {
                let mut pages = 0_u64;
                // The pool finds all other inconsistencies of the table.
                let _ = file_table::check(
                    inode,
                    slots,
                    |_| (),
                    |run| pages = pages.saturating_add(run.pages),
                );
                if pages > MAX_PAGES {
                    add(number, PartsSort::Runs, format!("it has {pages} pages with its holes"));
                }
            }
        }
        // A removal in several transactions gives the first slots back first, so the rest may start
        // within an attribute.
        let attributes = match inode.links {
            0 => byte_chain::check(slots, number, inode.attributes, |_| ())
                .map(drop)
                .map_err(FsError::from),
            _ => attributes::check(inode, slots, |_| ()),
        };
        if let Err(error) = attributes {
            add(number, PartsSort::Attributes, reason_of(error));
        }
    }

    fn adopt(&self, pool: &Pool, lost: &[u64]) -> Result<Vec<String>> {
        let owner = aquifer_sys::credentials::effective();
        let now_ns = now_ns();
        let home = New {
            kind: FileKind::Directory,
            mode: 0o700,
            uid: owner.uid,
            gid: owner.gid,
            target: &[],
            seed: aquifer_sys::random::next_u64().unwrap_or(now_ns as u64),
        };
        let (mut named, mut freed) = (0, 0);
        for &number in lost {
            // SAFETY: the inode gets a name, or is freed because it has no content; no leased file
            // loses its runs.
            let adopted = unsafe {
                pool.try_change(Vec::new(), |slots| Names { slots, now_ns }.adopt(number, home))
            };
            match adopted {
                Ok(Some(_)) => named += 1,
                Ok(None) => freed += 1,
                Err(FsError::Pool(error)) => return Err(error),
                // An error with one inode is left for the next check to report.
                Err(_) => {}
            }
        }
        let mut done = Vec::new();
        if named > 0 {
            let home = LOST_AND_FOUND.escape_ascii();
            done.push(format!("What had lost its names has one in {home} now ({named})."));
        }
        if freed > 0 {
            done.push(format!("Inodes without name and content were freed ({freed})."));
        }
        Ok(done)
    }
}

/// Whether an inconsistency of a tree can be found only by reading its names: the pool finds the others.
fn is_of_order(kind: &InconsistencyKind) -> bool {
    !matches!(
        kind,
        InconsistencyKind::Format(_) | InconsistencyKind::Owner { .. } | InconsistencyKind::Twice
    )
}

fn check_target(
    slots: &impl ReadSlots<Error = PoolError>,
    link: &FileInode,
) -> std::result::Result<(), String> {
    let target = walk::target(slots, link).map_err(reason_of)?;
    if target.len() as u64 != link.size_bytes {
        return Err(format!("it has {} bytes in place of {}", target.len(), link.size_bytes));
    }
    if target.contains(&0) || target.len() > MAX_PATH_BYTES {
        Err("it cannot be a path".to_owned())
    } else {
        Ok(())
    }
}

/// The inconsistency, without the advice: the report has its own.
fn reason_of(error: FsError) -> String {
    match error {
        FsError::Damaged { structure, reason } => format!("{structure}: {reason}"),
        other => other.to_string(),
    }
}
