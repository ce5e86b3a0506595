//! Extended attributes of files, directories and symbolic links: small named values, as with
//! `setxattr`.
//!
//! ```text
//!  length of the name 1 │ length of the value 4 │ name │ value │ length of the name 1 │ …      in one chain of bytes
//! ```
//!
//! They stay in order of creation: adding one changes only the end of the chain, and changing one
//! leaves those before it as they are. Lookups scan from the front, because there are few.
//!
//! # Limits, those of Linux
//! A name has 1 to 255 bytes and starts with a namespace: `user.`, `trusted.`, `security.` or
//! `system.`; the caller decides which processes may use which. A value has at most 64 KiB; all
//! attributes of an inode, with 5 bytes of overhead each, at most 128 KiB.

use aquifer_format::byte_chain;
use aquifer_pool::format::byte_chain::MAX_CHAIN_BYTES;
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{ChangeSlots, PoolError, ReadSlots};

use crate::attribute_limits::NAMESPACES;
pub use crate::attribute_limits::{MAX_ATTRIBUTE_NAME_BYTES, MAX_VALUE_BYTES};
use crate::error::{FsError, Result};

/// Whether an attribute must exist before it is set.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::SetMode;
///
/// files.create_file("/f")?;
/// let missing = files.set_attribute("/f", "user.colour", "red", SetMode::Replace);
/// assert_eq!(missing.unwrap_err().errno(), libc::ENODATA);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SetMode {
    /// It may or may not exist.
    #[default]
    Any,
    /// It must not exist: `XATTR_CREATE`.
    Create,
    /// It must exist: `XATTR_REPLACE`.
    Replace,
}

/// An attribute, as slices of the encoded bytes.
struct Attribute<'a> {
    name: &'a [u8],
    value: &'a [u8],
}

fn is_name(name: &[u8]) -> bool {
    (1..=MAX_ATTRIBUTE_NAME_BYTES).contains(&name.len()) && !name.contains(&0)
}

/// Checks the length of a name, apart from its namespace: Linux does so before it resolves the
/// path.
pub(crate) fn check_length(name: &[u8]) -> Result<()> {
    if is_name(name) { Ok(()) } else { Err(FsError::AttributeName { name: name.to_vec() }) }
}

/// Checks the length of a value.
pub(crate) fn check_value(value: &[u8]) -> Result<()> {
    if value.len() <= MAX_VALUE_BYTES {
        Ok(())
    } else {
        Err(FsError::AttributeTooLarge { len_bytes: value.len() })
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    check_length(name)?;
    let goes_on = |space: &&[u8]| name.len() > space.len() && name.starts_with(space);
    if NAMESPACES.iter().any(goes_on) {
        Ok(())
    } else {
        Err(FsError::AttributeNamespace { name: name.to_vec() })
    }
}

/// Checks that an inode of this kind may have the attribute, as on Linux.
fn check_kind(inode: &FileInode, name: &[u8]) -> Result<()> {
    let has_user = matches!(inode.kind, FileKind::File | FileKind::Directory);
    if has_user || !name.starts_with(b"user.") {
        Ok(())
    } else {
        Err(FsError::UserAttribute { name: name.to_vec() })
    }
}

/// Splits off the first attribute; `None` if the bytes do not start with one.
fn split_first(bytes: &[u8]) -> Option<(Attribute<'_>, &[u8])> {
    let (&name_len, rest) = bytes.split_first()?;
    let (value_len, rest) = rest.split_first_chunk::<4>()?;
    let (name, rest) = rest.split_at_checked(name_len.into())?;
    let value_len = usize::try_from(u32::from_le_bytes(*value_len)).ok()?;
    let (value, rest) = rest.split_at_checked(value_len)?;
    (is_name(name) && value_len <= MAX_VALUE_BYTES).then_some((Attribute { name, value }, rest))
}

fn parse(inode: u64, mut bytes: &[u8]) -> Result<Vec<Attribute<'_>>> {
    let damaged = |reason: String| FsError::Damaged {
        structure: format!("the attributes of inode {inode}"),
        reason,
    };
    let mut attributes = Vec::new();
    while !bytes.is_empty() {
        let at = attributes.len();
        let (attribute, rest) = split_first(bytes)
            .ok_or_else(|| damaged(format!("number {at} is not one, or is cut short")))?;
        attributes.push(attribute);
        bytes = rest;
    }
    let mut names: Vec<&[u8]> = attributes.iter().map(|attribute| attribute.name).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(damaged(format!("two have the name {}", pair[0].escape_ascii()))),
        None => Ok(attributes),
    }
}

fn encode(attributes: &[Attribute<'_>]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for Attribute { name, value } in attributes {
        bytes.push(name.len() as u8);
        bytes.extend_from_slice(&(value.len() as u32).to_le_bytes());
        bytes.extend_from_slice(name);
        bytes.extend_from_slice(value);
    }
    if bytes.len() <= MAX_CHAIN_BYTES {
        Ok(bytes)
    } else {
        Err(FsError::AttributesFull { len_bytes: bytes.len() })
    }
}

/// Returns the value of an attribute.
///
/// # Errors
/// [`FsError::NoAttribute`]; [`FsError::AttributeName`], [`FsError::AttributeNamespace`];
/// [`FsError::Damaged`]; those of `slots`.
pub fn get(
    inode: &FileInode,
    slots: &impl ReadSlots<Error = PoolError>,
    name: &[u8],
) -> Result<Vec<u8>> {
    check_name(name)?;
    let bytes = byte_chain::read(slots, inode.number, inode.attributes)?;
    let attributes = parse(inode.number, &bytes)?;
    (attributes.iter().find(|attribute| attribute.name == name))
        .map(|attribute| attribute.value.to_vec())
        .ok_or_else(|| FsError::NoAttribute { name: name.to_vec() })
}

/// Returns the names of all attributes, in order of creation.
///
/// # Errors
/// [`FsError::Damaged`]; those of `slots`.
pub fn list(inode: &FileInode, slots: &impl ReadSlots<Error = PoolError>) -> Result<Vec<Vec<u8>>> {
    let bytes = byte_chain::read(slots, inode.number, inode.attributes)?;
    let attributes = parse(inode.number, &bytes)?;
    Ok(attributes.iter().map(|attribute| attribute.name.to_vec()).collect())
}

/// Sets the value of an attribute. Changes the inode, which the caller puts.
///
/// # Errors
/// [`FsError::AttributeName`], [`FsError::AttributeNamespace`], [`FsError::UserAttribute`];
/// [`FsError::AttributeExists`] or [`FsError::NoAttribute`], depending on `mode`;
/// [`FsError::AttributeTooLarge`],
/// [`FsError::AttributesFull`]; [`FsError::Damaged`]; those of `slots`: after these the transaction
/// must not be committed.
pub fn set(
    inode: &mut FileInode,
    slots: &mut impl ChangeSlots<Error = PoolError>,
    name: &[u8],
    value: &[u8],
    mode: SetMode,
) -> Result<()> {
    check_name(name)?;
    check_value(value)?;
    check_kind(inode, name)?;
    let bytes = byte_chain::read(slots, inode.number, inode.attributes)?;
    let mut attributes = parse(inode.number, &bytes)?;
    let found = attributes.iter_mut().find(|attribute| attribute.name == name);
    match (found, mode) {
        (Some(_), SetMode::Create) => {
            return Err(FsError::AttributeExists { name: name.to_vec() });
        }
        (None, SetMode::Replace) => return Err(FsError::NoAttribute { name: name.to_vec() }),
        (Some(attribute), _) => attribute.value = value,
        (None, _) => attributes.push(Attribute { name, value }),
    }
    let after = encode(&attributes)?;
    inode.attributes = byte_chain::replace(slots, inode.number, inode.attributes, &after)?;
    Ok(())
}

/// Removes an attribute. Changes the inode, which the caller puts.
///
/// # Errors
/// As [`get`]; after those of `slots` the transaction must not be committed.
pub fn remove(
    inode: &mut FileInode,
    slots: &mut impl ChangeSlots<Error = PoolError>,
    name: &[u8],
) -> Result<()> {
    check_name(name)?;
    check_kind(inode, name)?;
    let bytes = byte_chain::read(slots, inode.number, inode.attributes)?;
    let mut attributes = parse(inode.number, &bytes)?;
    let index = attributes.iter().position(|attribute| attribute.name == name);
    attributes.remove(index.ok_or_else(|| FsError::NoAttribute { name: name.to_vec() })?);
    let after = encode(&attributes)?;
    inode.attributes = byte_chain::replace(slots, inode.number, inode.attributes, &after)?;
    Ok(())
}

/// Gives back at most `most_slots` slots of the attributes of an inode that is being freed. Any
/// bytes that are left are no valid attributes. Changes the inode, which the caller puts.
///
/// # Errors
/// Those of [`byte_chain::give_back`].
pub fn give_back(
    inode: &mut FileInode,
    slots: &mut impl ChangeSlots<Error = PoolError>,
    most_slots: usize,
) -> Result<()> {
    inode.attributes = byte_chain::give_back(slots, inode.number, inode.attributes, most_slots)?;
    Ok(())
}

/// Reads the attributes, whatever is stored: calls `on_slot` for each slot of them, then returns
/// the first error. If their chain has a cycle, slots are reported several times.
///
/// # Errors
/// [`FsError::Damaged`]: the first inconsistency.
pub fn check(
    inode: &FileInode,
    slots: &impl ReadSlots<Error = PoolError>,
    on_slot: impl FnMut(u64),
) -> Result<()> {
    let bytes = byte_chain::check(slots, inode.number, inode.attributes, on_slot)?;
    parse(inode.number, &bytes).map(drop)
}
