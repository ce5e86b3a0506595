//! Whether, and how, pools can be mounted here.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use aquifer::fuse::fusermount;
use aquifer_sys::fuse::FuseDevice;
use aquifer_sys::{features, namespace};

use super::report::Feature;
use crate::mount::{why_no_device, why_no_namespace};

/// From which version on the kernel sends requests again that a server had read when it died.
const SENDS_AGAIN: (u32, u32) = (6, 9);

/// What mounting takes, each with the reason why it is missing.
pub fn features() -> Vec<Feature> {
    let device = FuseDevice::open().map(drop).map_err(|error| why_no_device(&error));
    let namespaces = namespace::probe_user_namespaces().map_err(|error| why_no_namespace(&error));
    let helper = fusermount::program().ok_or("not installed (package fuse3)".to_owned());
    let helper = helper.and_then(|path| match std::fs::metadata(&path) {
        Ok(found) if found.permissions().mode() & 0o4000 != 0 && found.uid() == 0 => Ok(()),
        _ => Err(format!("{} has no set-user-ID bit", path.display())),
    });
    let version = features::kernel_version().unwrap_or_default();
    let again = match version >= SENDS_AGAIN {
        true => Ok(()),
        false => Err(format!("Linux {}.{}", version.0, version.1)),
    };
    let feature = |name, purpose, found: Result<(), String>| {
        Feature::new(name, found.is_ok(), purpose, found.err().unwrap_or_default())
    };
    vec![
        feature("FUSE", "mounts pools: aquifer mount (as root), aquifer run", device),
        feature(
            "FUSE, user namespaces",
            "aquifer run without privileges; otherwise as root, or by fusermount3",
            namespaces,
        ),
        feature("FUSE, fusermount3", "aquifer mount without privileges", helper),
        feature(
            "FUSE, requests sent again",
            "programs notice nothing when the server of a mount is replaced (Linux 6.9); otherwise what was under way fails",
            again,
        ),
    ]
}
