//! What programs do: each script runs in an empty directory, and notes what it sees.

pub mod bytes;
pub mod ends;
pub mod full;
pub mod metadata;
mod names;

use std::path::Path;

use crate::mounted::observed::Log;

type Script = fn(&Path, &mut Log);

/// Those that see the same on every file system.
pub const ALL: &[(&str, Script)] = &[
    ("names", names::names),
    ("renames", names::renames),
    ("long names", names::long_names),
    ("many names", names::many_names),
    ("links", names::links),
    ("special files", names::special_files),
    ("removed files", names::removed_files),
    ("removed directories", names::removed_directories),
    ("unnamed files", names::unnamed_files),
    ("modes", metadata::modes),
    ("owners", metadata::owners),
    ("set-id bits", metadata::set_id_bits),
    ("times", metadata::times),
    ("attributes", metadata::attributes),
    ("lists", metadata::lists),
    ("reads and writes", bytes::reads_and_writes),
    ("holes", bytes::holes),
    ("copies by seeking", bytes::copies_by_seeking),
    ("space", bytes::space),
    ("lengths", bytes::lengths),
    ("appends", bytes::appends),
    ("mappings", bytes::mappings),
    ("syncs", bytes::syncs),
    ("copies", bytes::copies),
];
