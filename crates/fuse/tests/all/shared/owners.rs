//! Owners and privileges of files that two mounts show.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::PathBuf;

use aquifer_fs::Files;
use aquifer_fuse::{Cache, Keeper};
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, XattrFlags};

use crate::kept::place::{How, Place, USER, as_user};
use crate::shared::{both, end, mount_again};

/// A pool that is mounted twice, and the second directory.
fn twice() -> Option<(Place, Files, PathBuf, Keeper)> {
    let (place, files) = both()?;
    let second = place.at("second");
    fs::create_dir(&second).expect("a directory of its own");
    fs::set_permissions(place.at("."), Permissions::from_mode(0o755)).expect("its owner");
    let how = How { cache: Cache::Shared, ..How::default() };
    let keeper = mount_again(&place, &second, &how).expect("others may mount it");
    Some((place, files, second, keeper))
}

fn end_both((place, files, second, keeper): (Place, Files, PathBuf, Keeper)) {
    aquifer_fuse::unmount(&second, false, std::time::Duration::from_secs(60)).expect("unused");
    assert!(keeper.wait().expect("a child").success());
    drop(files);
    end(place);
}

/// An access control list with an entry for the user: see `aquifer_fs::acl`.
fn list() -> Vec<u8> {
    let entries = [(1_u16, 6_u16, u32::MAX), (2, 6, USER), (4, 4, u32::MAX), (16, 6, u32::MAX)];
    let mut value = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries.into_iter().chain([(32, 4, u32::MAX)]) {
        value.extend(tag.to_le_bytes());
        value.extend(permissions.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

fn set_time(file: &File, nanoseconds: i64) -> io::Result<()> {
    let time = Timespec { tv_sec: 1, tv_nsec: nanoseconds as _ };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::futimens(file, &times)?)
}

/// The errors of changes through an open descriptor.
fn change_all(file: &File) -> Vec<(&'static str, Option<i32>)> {
    let set = |name, value: &[u8]| rustix::fs::fsetxattr(file, name, value, XattrFlags::empty());
    let owner = |user, group: Option<u32>| std::os::unix::fs::fchown(file, user, group);
    let results: [(&str, io::Result<()>); 7] = [
        ("time", set_time(file, 5)),
        ("now", set_time(file, UTIME_NOW)),
        ("attribute", set("user.colour", b"green").map_err(Into::into)),
        ("list", set("system.posix_acl_access", &list()).map_err(Into::into)),
        ("group", owner(None, Some(USER))),
        ("mode", file.set_permissions(Permissions::from_mode(0o6777))),
        ("owner", owner(Some(USER), None)),
    ];
    let errno = |result: io::Result<()>| result.err().and_then(|error| error.raw_os_error());
    results.into_iter().map(|(name, result)| (name, errno(result))).collect()
}

pub fn an_earlier_owner_changes_nothing_through_another_mount() {
    let Some(scene) = twice() else { return };
    let (place, _, second, _) = &scene;
    let (at, there) = (place.root().join("f"), second.join("f"));
    fs::write(&at, "text").expect("a new file");
    chown(&at, Some(USER), Some(USER)).expect("root");
    let open = as_user(|| File::open(&at).expect("its owner"));
    let done = as_user(|| change_all(&open));
    assert!(done.iter().all(|(_, errno)| errno.is_none()), "{done:?}");

    chown(&there, Some(0), Some(0)).expect("root");
    fs::set_permissions(&there, Permissions::from_mode(0o600)).expect("root");
    fs::write(&there, "secret").expect("root");
    // The kernel of the first mount takes the user for the owner.
    let refused = as_user(|| change_all(&open));
    let expected =
        |name| if matches!(name, "now" | "attribute") { libc::EACCES } else { libc::EPERM };
    for (name, errno) in refused {
        assert_eq!(errno, Some(expected(name)), "{name}");
    }
    let found = fs::metadata(&there).expect("it is there");
    assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o600, 0, 0));
    let read = as_user(|| fs::read(&at));
    assert_eq!(read.map_err(|error| error.kind()), Err(io::ErrorKind::PermissionDenied));
    // The present owner may, as soon as the kernel has seen it: by a look at the file.
    chown(&there, Some(USER), Some(USER)).expect("root");
    assert_eq!(open.metadata().expect("it is open").uid(), USER);
    let done = as_user(|| change_all(&open));
    assert!(done.iter().all(|(_, errno)| errno.is_none()), "{done:?}");
    drop(open);
    end_both(scene);
}

pub fn a_write_by_root_takes_capabilities() {
    /// `cap_net_raw=ep`, as `setcap` stores it.
    const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const NAME: &str = "security.capability";
    let Some((place, files)) = both() else { return };
    let at = place.root().join("f");
    let has = || rustix::fs::getxattr(&at, NAME, &mut [0_u8; 64]).is_ok();
    type Change = fn(&File) -> io::Result<()>;
    let changes: [(&str, bool, Change); 5] = [
        ("write", true, |file| file.write_all_at(b"x", 0)),
        ("append", true, |file| file.write_all_at(b"x", 10)),
        ("truncate", true, |file| file.set_len(2)),
        ("allocate", true, |file| {
            Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, 8192)?)
        }),
        ("time", false, |file| set_time(file, 7)),
    ];
    for (name, takes, change) in changes {
        fs::write(&at, "text").expect("root");
        fs::set_permissions(&at, Permissions::from_mode(0o4755)).expect("root");
        rustix::fs::setxattr(&at, NAME, &CAPABILITY, XattrFlags::empty()).expect("root");
        let file = File::options().write(true).open(&at).expect("root");
        change(&file).expect(name);
        assert_eq!(has(), !takes, "{name}");
        assert_eq!(fs::metadata(&at).expect("it is there").mode() & 0o7777, 0o4755, "{name}");
    }
    drop(files);
    end(place);
}
