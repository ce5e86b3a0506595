//! POSIX access control lists, with the rules of Linux (`fs/posix_acl.c`).
//!
//! ```text
//!  the attribute:  version = 2 (4) │ tag 2, permissions 2, id 4 │ tag 2, permissions 2, id 4 │ …    little-endian
//! ```
//!
//! A list has one entry each for the owner, the owning group and all others: the nine bits of the
//! mode. With entries for further users or groups it also has a *mask*, the most that these and the
//! owning group are granted; then the mode's group bits are the mask's.
//!
//! # Rules
//! | when | the access list | the mode |
//! |---|---|---|
//! | it is set ([`Acl::to_mode`]) | stored, unless it says no more than a mode does | gets its bits from it, and loses the set-group-ID bit where the caller could not set it |
//! | the mode is set ([`Acl::set_mode`]) | gets owner, others, and mask or owning group from it | as asked |
//! | something is created where the directory has a default list ([`Acl::inherit`]) | the default list, without what the mode asked for lacks | the same bits; *the umask does not count* |
//!
//! A new directory also gets the default list as its own. Symbolic links have no lists. An earlier
//! version stored any bytes under these names: what is no list counts as none.

use crate::error::{FsError, Result};

/// The attribute with the list that says which access is granted.
pub const ACCESS_ACL: &str = "system.posix_acl_access";
/// The attribute of a directory with the list that its new entries get.
pub const DEFAULT_ACL: &str = "system.posix_acl_default";

const VERSION: u32 = 2;
const HEADER_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
/// The id in entries that have none.
const NO_ID: u32 = u32::MAX;

/// Which processes an entry of an [`Acl`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AclTag {
    /// The user that the file belongs to.
    Owner,
    /// Another user.
    User(u32),
    /// The group that the file belongs to.
    OwningGroup,
    /// Another group.
    Group(u32),
    /// The most that other users, the owning group and other groups are granted.
    Mask,
    /// All others.
    Other,
}

/// An entry of an [`Acl`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AclEntry {
    /// Which processes it is about.
    pub tag: AclTag,
    /// What is granted: 4 for reading, 2 for writing, 1 for executing, added up.
    pub permissions: u16,
}

/// A POSIX access control list: the value of the attribute [`ACCESS_ACL`] or [`DEFAULT_ACL`].
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::{ACCESS_ACL, Acl, AclEntry, AclTag, SetMode};
///
/// files.create_file("/f")?;
/// let entry = |tag, permissions| AclEntry { tag, permissions };
/// let acl = Acl::new(vec![
///     entry(AclTag::Owner, 6),
///     entry(AclTag::User(1000), 6), // may also write
///     entry(AclTag::OwningGroup, 4),
///     entry(AclTag::Mask, 6),
///     entry(AclTag::Other, 0),
/// ])?;
/// files.set_attribute("/f", ACCESS_ACL, acl.encode(), SetMode::Any)?;
/// assert_eq!(Acl::decode(&files.attribute("/f", ACCESS_ACL)?)?, Some(acl));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acl {
    entries: Vec<AclEntry>,
}

fn invalid(reason: &'static str) -> FsError {
    FsError::Acl { reason }
}

fn check_id(tag: AclTag) -> Result<()> {
    match tag {
        AclTag::User(NO_ID) | AclTag::Group(NO_ID) => Err(invalid("no user or group has this id")),
        _ => Ok(()),
    }
}

impl AclTag {
    fn code(self) -> (u16, u32) {
        match self {
            AclTag::Owner => (0x01, NO_ID),
            AclTag::User(id) => (0x02, id),
            AclTag::OwningGroup => (0x04, NO_ID),
            AclTag::Group(id) => (0x08, id),
            AclTag::Mask => (0x10, NO_ID),
            AclTag::Other => (0x20, NO_ID),
        }
    }

    fn from_code(code: u16, id: u32) -> Option<AclTag> {
        match code {
            0x01 => Some(AclTag::Owner),
            0x02 => Some(AclTag::User(id)),
            0x04 => Some(AclTag::OwningGroup),
            0x08 => Some(AclTag::Group(id)),
            0x10 => Some(AclTag::Mask),
            0x20 => Some(AclTag::Other),
            _ => None,
        }
    }
}

impl Acl {
    /// Makes a list of entries, which must be complete and in order: the owner, users, the owning
    /// group, groups, the mask, others.
    ///
    /// # Errors
    /// [`FsError::Acl`]: what is missing or out of order.
    pub fn new(entries: Vec<AclEntry>) -> Result<Acl> {
        let acl = Acl { entries };
        acl.validate()?;
        Ok(acl)
    }

    /// The entries, in order.
    pub fn entries(&self) -> &[AclEntry] {
        &self.entries
    }

    /// Decodes the value of an attribute; `None` if it has no entries, which stands for no list.
    ///
    /// # Errors
    /// [`FsError::Acl`], [`FsError::AclVersion`].
    pub fn decode(value: &[u8]) -> Result<Option<Acl>> {
        let acl = Acl::parse(value)?;
        acl.iter().try_for_each(Acl::validate)?;
        Ok(acl)
    }

    /// [`Acl::decode`] without checking that the entries are complete and in order.
    pub(crate) fn parse(value: &[u8]) -> Result<Option<Acl>> {
        if value.is_empty() {
            return Ok(None);
        }
        let cut = || invalid("the value is cut short");
        let (version, entries) = value.split_first_chunk::<HEADER_BYTES>().ok_or_else(cut)?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(FsError::AclVersion { version });
        }
        let (entries, rest) = entries.as_chunks::<ENTRY_BYTES>();
        if !rest.is_empty() {
            return Err(cut());
        }
        let entry = |bytes: &[u8; ENTRY_BYTES]| {
            let [tag_low, tag_high, low, high, id @ ..] = *bytes;
            let tag = u16::from_le_bytes([tag_low, tag_high]);
            let tag = AclTag::from_code(tag, u32::from_le_bytes(id));
            let tag = tag.ok_or_else(|| invalid("an entry has an unknown tag"))?;
            check_id(tag)?;
            Ok(AclEntry { tag, permissions: u16::from_le_bytes([low, high]) })
        };
        let entries: Vec<AclEntry> = entries.iter().map(entry).collect::<Result<_>>()?;
        Ok((!entries.is_empty()).then_some(Acl { entries }))
    }

    /// Encodes it as the value of an attribute.
    pub fn encode(&self) -> Vec<u8> {
        let mut value = Vec::with_capacity(HEADER_BYTES + self.entries.len() * ENTRY_BYTES);
        value.extend_from_slice(&VERSION.to_le_bytes());
        for entry in &self.entries {
            let (tag, id) = entry.tag.code();
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&entry.permissions.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }

    /// Checks that the entries are complete and in order. Users and groups may be in any order, and
    /// even be named twice, as on Linux.
    pub(crate) fn validate(&self) -> Result<()> {
        #[derive(PartialEq)]
        enum Seen {
            Nothing,
            Owner,
            OwningGroup,
            Mask,
            All,
        }
        let (mut seen, mut needs_mask) = (Seen::Nothing, false);
        for AclEntry { tag, permissions } in &self.entries {
            if permissions & !7 != 0 {
                return Err(invalid("an entry has unknown permissions"));
            }
            let in_order = match tag {
                AclTag::Owner => seen == Seen::Nothing,
                AclTag::User(_) | AclTag::OwningGroup => seen == Seen::Owner,
                AclTag::Group(_) | AclTag::Mask => seen == Seen::OwningGroup,
                AclTag::Other => seen == Seen::Mask || (seen == Seen::OwningGroup && !needs_mask),
            };
            if !in_order {
                let reason = "its entries must be one for the owner, any for users, one for the \
                              owning group, any for groups, a mask if there are any users or \
                              groups, and one for others";
                return Err(invalid(reason));
            }
            match tag {
                AclTag::Owner => seen = Seen::Owner,
                AclTag::OwningGroup => seen = Seen::OwningGroup,
                AclTag::Mask => seen = Seen::Mask,
                AclTag::Other => seen = Seen::All,
                AclTag::User(_) | AclTag::Group(_) => needs_mask = true,
            }
            check_id(*tag)?;
        }
        if seen == Seen::All { Ok(()) } else { Err(invalid("an entry is missing")) }
    }

    fn find(&mut self, tag: AclTag) -> Option<&mut u16> {
        let found = self.entries.iter_mut().find(|entry| entry.tag == tag);
        found.map(|entry| &mut entry.permissions)
    }

    fn permissions(&self, tag: AclTag) -> Option<u32> {
        let found = self.entries.iter().find(|entry| entry.tag == tag);
        found.map(|entry| u32::from(entry.permissions))
    }

    /// The entry that stands for the mode's group bits.
    fn group_class(&self) -> AclTag {
        match self.permissions(AclTag::Mask) {
            Some(_) => AclTag::Mask,
            None => AclTag::OwningGroup,
        }
    }

    /// The nine permission bits of the mode of a file with this access list.
    pub fn to_mode(&self) -> u32 {
        [AclTag::Owner, self.group_class(), AclTag::Other]
            .into_iter()
            .fold(0, |mode, tag| mode << 3 | self.permissions(tag).unwrap_or(0))
    }

    /// Whether it says no more than a mode does.
    pub fn is_trivial(&self) -> bool {
        let is_of_mode = |tag| matches!(tag, AclTag::Owner | AclTag::OwningGroup | AclTag::Other);
        self.entries.iter().all(|entry| is_of_mode(entry.tag))
    }

    /// Changes it as setting the file's mode does.
    pub fn set_mode(&mut self, mode: u32) {
        for (tag, shift) in [(AclTag::Owner, 6), (self.group_class(), 3), (AclTag::Other, 0)] {
            if let Some(permissions) = self.find(tag) {
                *permissions = (mode >> shift & 7) as u16;
            }
        }
    }

    /// The access list of what is created with `mode` in a directory with this default list,
    /// unless it is trivial; and its mode. The caller does not apply the umask.
    pub fn inherit(&self, mode: u32) -> (Option<Acl>, u32) {
        let mut access = self.clone();
        access.set_mode(mode & self.to_mode());
        let mode = mode & !0o777 | access.to_mode();
        ((!access.is_trivial()).then_some(access), mode)
    }
}
