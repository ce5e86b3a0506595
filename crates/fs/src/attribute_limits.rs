//! Which names and values extended attributes can have.

/// The longest name of an attribute, with its namespace.
pub const MAX_ATTRIBUTE_NAME_BYTES: usize = 255;
/// The longest value of an attribute.
pub const MAX_VALUE_BYTES: usize = 64 << 10;

pub(crate) const NAMESPACES: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system."];

/// Whether a name is just a namespace.
pub(crate) fn is_namespace(name: &[u8]) -> bool {
    NAMESPACES.contains(&name)
}
