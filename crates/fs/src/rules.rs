//! What follows, as on Linux, from creating something and from changing its permissions, owner,
//! attributes or content.
//!
//! | | |
//! |---|---|
//! | creating | the directory's default list decides in place of the umask; in a directory with the set-group-ID bit the group is the directory's, and a directory gets the bit |
//! | the set-group-ID bit | only callers that are in the file's group, or may set it anyway, can set or keep it |
//! | chmod | changes the access list |
//! | chown of anything but a directory | clears the set-user-ID and set-group-ID bits, and removes capabilities |
//! | writing to a file, and changing its length or its space | removes capabilities; clears these bits, unless the caller may set them |
//! | storing to a view | nothing, as storing to a mapping |
//! | setting an access list | changes the mode; a list that says no more than a mode does is not kept |
//!
//! A set-group-ID bit without permission for the group to execute the file means something else
//! (mandatory locks), and is cleared only where the caller could not set it.

use std::path::PathBuf;

use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{ChangeSlots, PoolError, ReadSlots};

use crate::acl::{ACCESS_ACL, Acl, DEFAULT_ACL};
use crate::attributes::{self, SetMode};
use crate::caller::Caller;
use crate::error::{FsError, Result};
use crate::metadata::SetAttributes;
use crate::transaction::{Names, New};

const SET_USER: u32 = libc::S_ISUID;
const SET_GROUP: u32 = libc::S_ISGID;
const CAPABILITIES: &[u8] = b"security.capability";

/// Returns `true` if the caller can set the set-group-ID bit of files of this group. A client's decision about a
/// caller that is [enforced](Caller::enforced) may be about an earlier group of the file. For a directory
/// it counts nevertheless: there the bit gives no rights.
fn may_set_group_id(by: &Caller, kind: FileKind, group: u32) -> bool {
    let is_decided = !by.is_enforced || by.uid == 0 || kind == FileKind::Directory;
    by.may_set_id && is_decided || by.is_in(group)
}

/// The bits that changing the content or the owner of a file clears.
fn bits_to_clear(inode: &FileInode, by: &Caller) -> u32 {
    let runs_as_group = inode.mode & libc::S_IXGRP != 0;
    let group = runs_as_group || !may_set_group_id(by, inode.kind, inode.gid);
    inode.mode & (SET_USER | if group { SET_GROUP } else { 0 })
}

/// Whether a file with this mode may lose bits when the caller changes its content.
pub(crate) fn loses_set_id(mode: u32, by: &Caller) -> bool {
    !by.may_set_id && mode & (SET_USER | SET_GROUP) != 0
}

/// The privileges of a program that its file loses by a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Privileges {
    /// Those that it loses by a write of this process, with this process's rights.
    #[default]
    OfProcess,
    /// None: the client's kernel has taken them before, as for pages of its cache.
    Keep,
    /// Its capabilities: the client may set the set-user-ID and set-group-ID bits.
    LoseCapabilities,
    /// Its capabilities, the set-user-ID bit, and the set-group-ID bit if its group may execute it.
    LoseAll,
}

/// What a file loses when its content changes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lost {
    bits: u32,
    capabilities: bool,
}

/// What a file loses by a write, or nothing.
pub(crate) fn privileges_lost(
    inode: &FileInode,
    slots: &impl ReadSlots<Error = PoolError>,
    by: &Caller,
    which: Privileges,
) -> Result<Option<Lost>> {
    let bits = match which {
        Privileges::Keep => return Ok(None),
        Privileges::LoseCapabilities => 0,
        // The caller may not set the bits; whether it is in the group does not matter then.
        Privileges::LoseAll => {
            let runs_as_group = inode.mode & libc::S_IXGRP != 0;
            inode.mode & (SET_USER | if runs_as_group { SET_GROUP } else { 0 })
        }
        Privileges::OfProcess if loses_set_id(inode.mode, by) => bits_to_clear(inode, by),
        Privileges::OfProcess => 0,
    };
    let lost = Lost { bits, capabilities: has_capabilities(inode, slots)? };
    Ok((lost.bits != 0 || lost.capabilities).then_some(lost))
}

/// Whether a write to a file with this mode may clear bits of it.
pub(crate) fn may_lose_bits(mode: u32, by: &Caller, which: Privileges) -> bool {
    match which {
        Privileges::OfProcess => loses_set_id(mode, by),
        Privileges::LoseAll => mode & (SET_USER | SET_GROUP) != 0,
        Privileges::Keep | Privileges::LoseCapabilities => false,
    }
}

/// Whether a file has capabilities, which it loses when its content changes. Attributes that are
/// damaged are none: nothing can read them.
pub(crate) fn has_capabilities(
    inode: &FileInode,
    slots: &impl ReadSlots<Error = PoolError>,
) -> Result<bool> {
    if inode.attributes == 0 {
        return Ok(false);
    }
    match attributes::get(inode, slots, CAPABILITIES) {
        Err(
            FsError::NoAttribute { .. }
            | FsError::Damaged { .. }
            | FsError::Pool(PoolError::Damaged { .. } | PoolError::Structure(_)),
        ) => Ok(false),
        value => value.map(|_| true),
    }
}

impl<S: ChangeSlots<Error = PoolError>> Names<'_, S> {
    /// Stores a list, or removes it.
    fn put_acl(&mut self, inode: &mut FileInode, name: &str, acl: Option<&Acl>) -> Result<()> {
        match acl {
            Some(acl) => {
                let value = acl.encode();
                attributes::set(inode, self.slots, name.as_bytes(), &value, SetMode::Any)
            }
            None => self.drop_attribute(inode, name.as_bytes()),
        }
    }

    fn drop_attribute(&mut self, inode: &mut FileInode, name: &[u8]) -> Result<()> {
        if inode.attributes == 0 {
            return Ok(());
        }
        match attributes::remove(inode, self.slots, name) {
            Err(FsError::NoAttribute { .. }) => Ok(()),
            removed => removed,
        }
    }

    /// Takes from a file what a write makes it lose.
    pub fn drop_privileges(&mut self, inode: &mut FileInode, lost: Lost) -> Result<()> {
        inode.mode &= !lost.bits;
        if lost.capabilities { self.drop_attribute(inode, CAPABILITIES) } else { Ok(()) }
    }

    /// Sets the owner, the permissions and the attributes that a new inode starts with, by its
    /// caller and by the directory that it is made in. No other function decides them.
    pub(crate) fn inherit(
        &mut self,
        inode: &mut FileInode,
        new: &New<'_>,
        directory: Option<&FileInode>,
    ) -> Result<()> {
        let is_directory = new.kind == FileKind::Directory;
        let is_in_group = directory.filter(|directory| directory.mode & SET_GROUP != 0);
        inode.mode = new.mode & if is_directory { 0o1777 } else { 0o7777 };
        (inode.uid, inode.gid) = (new.by.uid, new.by.gid);
        if let Some(directory) = is_in_group {
            const RUNS_AS_GROUP: u32 = SET_GROUP | libc::S_IXGRP;
            let runs_as_group = inode.mode & RUNS_AS_GROUP == RUNS_AS_GROUP;
            if runs_as_group && !may_set_group_id(new.by, new.kind, directory.gid) {
                inode.mode &= !SET_GROUP;
            }
        }
        let default = match directory {
            Some(directory) if new.kind != FileKind::Symlink => self.acl(directory, DEFAULT_ACL)?,
            _ => None,
        };
        match default {
            _ if new.kind == FileKind::Symlink => {}
            None => inode.mode &= !new.by.umask,
            Some(default) => {
                let (access, mode) = default.inherit(inode.mode);
                inode.mode = mode;
                if let Some(access) = access {
                    self.put_acl(inode, ACCESS_ACL, Some(&access))?;
                }
                if is_directory {
                    self.put_acl(inode, DEFAULT_ACL, Some(&default))?;
                }
            }
        }
        if let Some(directory) = is_in_group {
            inode.gid = directory.gid;
            inode.mode |= if is_directory { SET_GROUP } else { 0 };
        }
        Ok(())
    }

    /// Sets permissions, owner and times. Returns the inode as it is then.
    pub fn set(
        &mut self,
        mut inode: FileInode,
        what: &SetAttributes,
        by: &Caller,
        path: impl FnOnce() -> PathBuf,
    ) -> Result<FileInode> {
        if inode.is_immutable {
            return Err(FsError::Immutable { path: path() });
        }
        if let Some(permission) = what.permission() {
            self.check(&inode, permission, by, path)?;
        }
        let clears = match inode.kind {
            FileKind::Directory => false,
            FileKind::File => what.sets_owner || what.clears_set_id,
            _ => what.sets_owner,
        };
        if clears {
            inode.mode &= !bits_to_clear(&inode, by);
            self.drop_attribute(&mut inode, CAPABILITIES)?;
        }
        what.apply(&mut inode, self.now_ns);
        if what.mode.is_some() {
            if !may_set_group_id(by, inode.kind, inode.gid) {
                inode.mode &= !SET_GROUP;
            }
            if let Some(mut access) = self.acl(&inode, ACCESS_ACL)? {
                access.set_mode(inode.mode);
                self.put_acl(&mut inode, ACCESS_ACL, Some(&access))?;
            }
        }
        self.put(&inode)?;
        Ok(inode)
    }

    /// Sets an extended attribute.
    pub fn set_attribute(
        &mut self,
        inode: FileInode,
        (name, value): (&[u8], &[u8]),
        mode: SetMode,
        by: &Caller,
        path: impl Fn() -> PathBuf,
    ) -> Result<()> {
        self.check_attribute(&inode, name, by, &path)?;
        let Some(acl) = list_name(name) else {
            return self.change_attributes(inode, path, |names, inode| {
                attributes::set(inode, names.slots, name, value, mode)
            });
        };
        let value = Acl::parse(value)?;
        self.set_acl(inode, acl, value, by, path)
    }

    /// Removes an extended attribute.
    pub fn remove_attribute(
        &mut self,
        inode: FileInode,
        name: &[u8],
        by: &Caller,
        path: impl Fn() -> PathBuf,
    ) -> Result<()> {
        self.check_attribute(&inode, name, by, &path)?;
        match list_name(name) {
            Some(acl) => self.set_acl(inode, acl, None, by, path),
            None => self.change_attributes(inode, path, |names, inode| {
                attributes::remove(inode, names.slots, name)
            }),
        }
    }

    /// Sets or removes an access control list. As on Linux, it does not matter whether there was
    /// one before.
    fn set_acl(
        &mut self,
        inode: FileInode,
        name: &str,
        acl: Option<Acl>,
        by: &Caller,
        path: impl FnOnce() -> PathBuf,
    ) -> Result<()> {
        match inode.kind {
            FileKind::Symlink => return Err(FsError::NoAcl { path: path() }),
            FileKind::Directory => {}
            _ if name == ACCESS_ACL => {}
            _ if acl.is_some() => return Err(FsError::NoDefaultAcl { path: path() }),
            _ => return Ok(()),
        }
        acl.iter().try_for_each(Acl::validate)?;
        self.change_attributes(inode, path, |names, inode| {
            if name == DEFAULT_ACL {
                return names.put_acl(inode, name, acl.as_ref());
            }
            if let Some(acl) = &acl {
                inode.mode = inode.mode & !0o777 | acl.to_mode();
            }
            if !may_set_group_id(by, inode.kind, inode.gid) {
                inode.mode &= !SET_GROUP;
            }
            names.put_acl(inode, name, acl.as_ref().filter(|acl| !acl.is_trivial()))
        })
    }

    fn change_attributes(
        &mut self,
        mut inode: FileInode,
        path: impl FnOnce() -> PathBuf,
        change: impl FnOnce(&mut Self, &mut FileInode) -> Result<()>,
    ) -> Result<()> {
        if inode.is_immutable {
            return Err(FsError::Immutable { path: path() });
        }
        change(self, &mut inode)?;
        inode.changed_ns = self.now_ns;
        self.put(&inode)
    }
}

/// The attribute, if it is an access control list.
fn list_name(name: &[u8]) -> Option<&'static str> {
    [ACCESS_ACL, DEFAULT_ACL].into_iter().find(|acl| acl.as_bytes() == name)
}
