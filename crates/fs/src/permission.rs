//! The permissions that a change needs of a caller that is [enforced](Caller::enforced).
//!
//! The rules are those of Linux (`setattr_prepare`, `xattr_permission`), by the owner, mode and access
//! control list that the inode has in the transaction that changes it. The groups of a caller are not
//! known, so a permission of any group counts.

use std::path::PathBuf;

use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{ChangeSlots, PoolError};

use crate::acl::{ACCESS_ACL, Acl, AclTag};
use crate::caller::Caller;
use crate::error::{FsError, Result};
use crate::transaction::Names;

/// A permission that a change needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permission {
    /// The caller is the owner.
    Owner,
    /// The caller may write to the file.
    Write,
}

/// The permission that a change of an extended attribute needs; none where capabilities decide.
fn of_attribute(inode: &FileInode, name: &[u8]) -> Option<Permission> {
    let is_sticky = inode.kind == FileKind::Directory && inode.mode & libc::S_ISVTX != 0;
    if name.starts_with(b"trusted.") || name.starts_with(b"security.") {
        None
    } else if name.starts_with(b"user.") && !is_sticky {
        Some(Permission::Write)
    } else {
        Some(Permission::Owner)
    }
}

/// Returns `true` if a user other than the owner may write to a file, taken for a member of each group.
fn others_may_write(mode: u32, list: Option<&Acl>, uid: u32) -> bool {
    const WRITE: u16 = 2;
    let Some(list) = list else { return mode & (libc::S_IWGRP | libc::S_IWOTH) != 0 };
    let entries = list.entries();
    let granted = |of: &dyn Fn(AclTag) -> bool| {
        let found = entries.iter().find(|entry| of(entry.tag) && entry.permissions & WRITE != 0);
        found.is_some()
    };
    let is_masked = entries.iter().any(|entry| entry.tag == AclTag::Mask)
        && !granted(&|tag| tag == AclTag::Mask);
    let is_named = entries.iter().any(|entry| entry.tag == AclTag::User(uid));
    if is_named {
        return !is_masked && granted(&|tag| tag == AclTag::User(uid));
    }
    let of_group = |tag| matches!(tag, AclTag::OwningGroup | AclTag::Group(_));
    !is_masked && granted(&of_group) || granted(&|tag| tag == AclTag::Other)
}

impl<S: ChangeSlots<Error = PoolError>> Names<'_, S> {
    /// Refuses a caller that is enforced and does not have this permission.
    pub fn check(
        &self,
        inode: &FileInode,
        needed: Permission,
        by: &Caller,
        path: impl FnOnce() -> PathBuf,
    ) -> Result<()> {
        if !by.is_enforced || by.uid == 0 {
            return Ok(());
        }
        let is_owner = by.uid == inode.uid;
        match needed {
            Permission::Owner if is_owner => Ok(()),
            Permission::Owner => Err(FsError::NotOwner { path: path() }),
            // The owner may set the times in any case; attributes take the owner's own permission,
            // which the owner could give itself.
            Permission::Write if is_owner => Ok(()),
            Permission::Write => {
                let list = self.acl(inode, ACCESS_ACL)?;
                if others_may_write(inode.mode, list.as_ref(), by.uid) {
                    Ok(())
                } else {
                    Err(FsError::NotWritable { path: path() })
                }
            }
        }
    }

    /// [`Names::check`] for a change of an extended attribute.
    pub fn check_attribute(
        &self,
        inode: &FileInode,
        name: &[u8],
        by: &Caller,
        path: impl FnOnce() -> PathBuf,
    ) -> Result<()> {
        of_attribute(inode, name).map_or(Ok(()), |needed| self.check(inode, needed, by, path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acl::AclEntry;

    #[test]
    fn lists_permit_writing_within_their_mask() {
        let list = |user, group, mask, other| {
            let entry = |tag, permissions| AclEntry { tag, permissions };
            Acl::new(vec![
                entry(AclTag::Owner, 7),
                entry(AclTag::User(5), user),
                entry(AclTag::OwningGroup, 4),
                entry(AclTag::Group(6), group),
                entry(AclTag::Mask, mask),
                entry(AclTag::Other, other),
            ])
            .unwrap()
        };
        for (acl, named, another) in [
            (list(6, 4, 6, 4), true, false),
            (list(6, 6, 4, 4), false, false),
            (list(4, 6, 6, 4), false, true),
            (list(4, 4, 6, 6), false, true),
        ] {
            assert_eq!(others_may_write(0, Some(&acl), 5), named, "{acl:?}");
            assert_eq!(others_may_write(0, Some(&acl), 9), another, "{acl:?}");
        }
        for (mode, expected) in [(0o644, false), (0o664, true), (0o646, true), (0o4755, false)] {
            assert_eq!(others_may_write(mode, None, 9), expected, "{mode:o}");
        }
    }
}
