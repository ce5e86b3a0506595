//! Moving and exchanging names.

use aquifer_format::directory::Referent;
use aquifer_pool::format::file::{FileKind, ROOT_INODE};
use aquifer_pool::{ChangeSlots, PoolError};

use super::{Gone, Keep};
use crate::caller::Caller;
use crate::error::{FsError, Result};
use crate::transaction::{Names, New};
use crate::walk::{Place, owned};

/// How [`Files::rename_with`](crate::Files::rename_with) moves a name.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::{FsError, RenameMode};
///
/// files.create_dir("/one")?;
/// files.create_file("/two")?;
/// let refused = files.rename_with("/one", "/two", RenameMode::NoReplace);
/// assert!(matches!(refused, Err(FsError::Exists { .. })));
/// files.rename_with("/one", "/two", RenameMode::Exchange)?;
/// assert!(files.metadata("/two")?.is_dir());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RenameMode {
    /// An existing file with the new name is replaced, if it can be.
    #[default]
    Replace,
    /// The new name must not exist.
    NoReplace,
    /// Both names must exist, and are exchanged.
    Exchange,
    /// As [`RenameMode::Replace`], and the old name is given to a *whiteout* in the same step: a
    /// character device 0, 0 without permissions. In file systems that are laid over others it
    /// stands for a removed name.
    Whiteout,
    /// As [`RenameMode::Whiteout`], but the new name must not exist.
    WhiteoutNoReplace,
}

impl RenameMode {
    fn leaves_whiteout(self) -> bool {
        matches!(self, RenameMode::Whiteout | RenameMode::WhiteoutNoReplace)
    }
}

impl<S: ChangeSlots<Error = PoolError>> Names<'_, S> {
    /// Moves a name, in one of the modes of `renameat2`.
    pub fn rename_as(
        &mut self,
        mode: RenameMode,
        from: (&Place<'_>, &[u8]),
        to: (&Place<'_>, &[u8]),
        by: &Caller,
        keep: Keep<'_>,
    ) -> Result<Gone> {
        let left = mode.leaves_whiteout().then(|| New::of(FileKind::CharDevice, 0, &[], by));
        match mode {
            RenameMode::Replace | RenameMode::Whiteout => self.rename(from, to, true, left, keep),
            RenameMode::NoReplace | RenameMode::WhiteoutNoReplace => {
                self.rename(from, to, false, left, keep)
            }
            RenameMode::Exchange => self.exchange(from, to).map(|()| Gone::default()),
        }
    }

    /// Moves a name. An existing file with the new name is replaced; `left` gets the old name.
    fn rename(
        &mut self,
        (source, from): (&Place<'_>, &[u8]),
        (target, to): (&Place<'_>, &[u8]),
        may_replace: bool,
        left: Option<New<'_>>,
        keep: Keep<'_>,
    ) -> Result<Gone> {
        let moved = moved((source, from), (target, to), may_replace)?;
        target.check_name(to)?;
        if target.found.is_some() && !may_replace {
            return Err(FsError::Exists { path: owned(to) });
        }
        source.check_slash(moved, from)?;
        target.check_slash(moved, to)?;
        self.check_not_inside(target.directory, moved, to)?;
        let mut gone = Gone::default();
        if let Some(replaced) = target.found {
            if self.is_inside(source.directory, replaced)? {
                return Err(FsError::NotEmpty { path: owned(to) });
            }
            if replaced.inode == moved.inode {
                // Two names of one file: POSIX requires that nothing happens.
                return Ok(gone);
            }
            gone = self.replace(target, replaced, moved.kind, to, keep)?;
        }
        self.check_movable(moved, from)?;
        let mut directory = self.directory_of(source, from)?;
        self.take_name(&mut directory, &source.name, from)?;
        self.put(&directory)?;
        // Read it only now: it may be the same directory.
        let mut directory = self.directory_of(target, to)?;
        self.add_name(&mut directory, &target.name, moved, to)?;
        self.put(&directory)?;
        self.note_moved(moved, target.directory)?;
        if let Some(left) = left {
            let vacant = Place { found: None, wants_directory: false, ..source.clone() };
            self.make(&vacant, from, left)?;
        }
        Ok(gone)
    }

    /// Exchanges the inodes that two names refer to.
    fn exchange(
        &mut self,
        (first, one): (&Place<'_>, &[u8]),
        (second, other): (&Place<'_>, &[u8]),
    ) -> Result<()> {
        let first_found = moved((first, one), (second, other), true)?;
        let second_found = second.named(other)?;
        second.check_slash(second_found, other)?;
        first.check_slash(first_found, one)?;
        self.check_not_inside(second.directory, first_found, other)?;
        self.check_not_inside(first.directory, second_found, one)?;
        if first_found.inode == second_found.inode {
            return Ok(());
        }
        self.check_movable(first_found, one)?;
        self.check_movable(second_found, other)?;
        for (place, path, now) in [(first, one, second_found), (second, other, first_found)] {
            let mut directory = self.directory_of(place, path)?;
            self.take_name(&mut directory, &place.name, path)?;
            self.add_name(&mut directory, &place.name, now, path)?;
            self.put(&directory)?;
        }
        self.note_moved(first_found, second.directory)?;
        self.note_moved(second_found, first.directory)
    }

    fn check_movable(&self, moved: Referent, path: &[u8]) -> Result<()> {
        if self.inode(moved.inode)?.is_immutable {
            Err(FsError::Immutable { path: owned(path) })
        } else {
            Ok(())
        }
    }

    /// Fails if a directory would be moved into itself.
    fn check_not_inside(&self, directory: u64, moved: Referent, path: &[u8]) -> Result<()> {
        if self.is_inside(directory, moved)? {
            Err(FsError::IntoItself { path: owned(path) })
        } else {
            Ok(())
        }
    }

    /// Whether a directory is `of`, or lies anywhere below it.
    fn is_inside(&self, directory: u64, of: Referent) -> Result<bool> {
        if of.kind != FileKind::Directory {
            return Ok(false);
        }
        // Brent's cycle detection: remember a slot, and replace it after twice as many steps each
        // time. A cycle returns to the remembered slot.
        let (mut here, mut passed, mut steps_left, mut steps) = (directory, 0, 1_u64, 1_u64);
        while here != of.inode {
            if here == ROOT_INODE {
                return Ok(false);
            }
            if here == passed || here == 0 {
                return Err(FsError::Damaged {
                    structure: format!("inode {directory}"),
                    reason: "the directories above it do not lead to the root".to_owned(),
                });
            }
            steps_left -= 1;
            if steps_left == 0 {
                (passed, steps) = (here, steps * 2);
                steps_left = steps;
            }
            here = self.inode(here)?.parent;
        }
        Ok(true)
    }

    fn note_moved(&mut self, moved: Referent, directory: u64) -> Result<()> {
        let mut inode = self.inode(moved.inode)?;
        inode.changed_ns = self.now_ns;
        if moved.kind == FileKind::Directory {
            inode.parent = directory;
        }
        self.put(&inode)
    }
}

/// What the first of the two places of a rename or exchange refers to, checked in the order of
/// Linux.
fn moved(
    (source, from): (&Place<'_>, &[u8]),
    (target, to): (&Place<'_>, &[u8]),
    may_replace: bool,
) -> Result<Referent> {
    if source.name.is_empty() {
        return Err(FsError::NotByName { path: owned(from) });
    }
    if target.name.is_empty() {
        return Err(if may_replace {
            FsError::NotByName { path: owned(to) }
        } else {
            FsError::Exists { path: owned(to) }
        });
    }
    source.named(from)
}
