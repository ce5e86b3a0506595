//! Changes that take the owner, in a shared mount whose kernel knows an earlier owner.

use aquifer_fs::node::{Caller, SetAttributes};
use aquifer_fs::{ACCESS_ACL, Acl, AclEntry, AclTag, Files, Metadata};
use zerocopy::{FromZeros, IntoBytes};

use super::shared_tests::{Scene, foreign};
use crate::wire::{ROOT, SetAttributesIn, set};

mod opcode {
    pub const SETATTR: u32 = 4;
    pub const SETXATTR: u32 = 21;
    pub const REMOVEXATTR: u32 = 24;
    pub const CREATE: u32 = 35;
}

const USER: (u32, u32) = (1000, 100);
const ROOT_USER: (u32, u32) = (0, 0);

/// A change by another mount: by root.
fn change(others: &Files, what: SetAttributes) -> Metadata {
    let node = others.metadata("/f").unwrap().node();
    others.nodes().set(node, &what, &Caller::new(0, 0)).unwrap()
}

fn set_of(valid: u32, fill: impl FnOnce(&mut SetAttributesIn)) -> (u32, Vec<u8>) {
    let mut set = SetAttributesIn { valid, ..SetAttributesIn::new_zeroed() };
    fill(&mut set);
    (opcode::SETATTR, set.as_bytes().to_vec())
}

fn set_xattr(name: &str, value: &[u8]) -> (u32, Vec<u8>) {
    let head = [value.len() as u32, 0, 0, 0];
    (opcode::SETXATTR, [head.as_bytes(), name.as_bytes(), b"\0", value].concat())
}

fn list() -> Vec<u8> {
    let entry = |tag, permissions| AclEntry { tag, permissions };
    let entries = vec![
        entry(AclTag::Owner, 6),
        entry(AclTag::User(USER.0), 6),
        entry(AclTag::OwningGroup, 4),
        entry(AclTag::Mask, 6),
        entry(AclTag::Other, 4),
    ];
    Acl::new(entries).unwrap().encode()
}

/// Changes that only the owner may make.
fn changes_of_owners() -> Vec<(u32, Vec<u8>)> {
    vec![
        set_of(set::MODE, |set| set.mode = 0o666),
        set_of(set::UID, |set| set.uid = USER.0),
        set_of(set::GID, |set| set.gid = USER.1),
        set_of(set::ATIME | set::MTIME, |set| set.mtime = 1),
        set_of(set::ATIME | set::ATIME_NOW | set::MTIME, |set| set.mtime = 1),
        set_of(set::MTIME | set::MTIME_NOW, |_| {}),
        set_xattr(ACCESS_ACL, &list()),
        (opcode::REMOVEXATTR, format!("{ACCESS_ACL}\0").into_bytes()),
    ]
}

/// Changes that also users may make that may write to the file.
fn changes_of_writers() -> Vec<(u32, Vec<u8>)> {
    let now = set::ATIME | set::ATIME_NOW | set::MTIME | set::MTIME_NOW;
    vec![
        set_xattr("user.colour", b"green"),
        (opcode::REMOVEXATTR, b"user.colour\0".to_vec()),
        set_of(now, |_| {}),
    ]
}

#[test]
fn an_earlier_owner_changes_no_attributes() {
    let scene = Scene::new();
    let others = foreign(&scene);
    let errno =
        |of, (opcode, body): &(u32, Vec<u8>)| scene.errno_for(of, *opcode, scene.node, body);
    let given = SetAttributes::new().owner(Some(USER.0), Some(USER.1)).mode(0o644);
    let taken = SetAttributes::new().owner(Some(0), Some(0)).mode(0o644);
    for request in &changes_of_owners() {
        change(&others, given);
        assert_eq!(errno(USER, request), 0, "{request:?}");
        let before = change(&others, taken);
        assert_eq!(errno(USER, request), libc::EPERM, "{request:?}");
        assert_eq!(others.metadata("/f").unwrap(), before, "{request:?}");
        assert_eq!(errno(ROOT_USER, request), 0, "{request:?}");
    }
    let _ = others.remove_attribute("/f", ACCESS_ACL);
    for request in &changes_of_writers() {
        change(&others, given);
        assert_eq!(errno(USER, request), 0, "{request:?}");
        let _ = others.set_attribute("/f", "user.colour", "red", Default::default());
        let before = change(&others, taken);
        assert_eq!(errno(USER, request), libc::EACCES, "{request:?}");
        assert_eq!(others.metadata("/f").unwrap(), before, "{request:?}");
        // The caller may be in the group.
        change(&others, taken.mode(0o664));
        assert_eq!(errno(USER, request), 0, "{request:?}");
    }
    // The kernel has checked the right to write when the file was opened, and a capability.
    change(&others, taken);
    assert_eq!(errno(USER, &set_of(set::SIZE, |set| set.size = 5)), 0);
    assert_eq!(errno(USER, &set_xattr("trusted.x", b"1")), 0);
    assert_eq!(errno(USER, &set_xattr("security.x", b"1")), 0);
}

#[test]
fn attributes_of_a_directory_with_the_sticky_bit_are_its_owners() {
    let scene = Scene::new();
    let others = foreign(&scene);
    let set_mode = |mode| {
        let root = others.nodes().root().unwrap();
        let what = SetAttributes::new().mode(mode);
        others.nodes().set(root, &what, &Caller::new(0, 0)).unwrap();
    };
    let (opcode, body) = set_xattr("user.colour", b"green");
    for (mode, expected) in [(0o1777, libc::EPERM), (0o777, 0)] {
        set_mode(mode);
        assert_eq!(scene.errno_for(USER, opcode, ROOT, &body), expected, "{mode:o}");
    }
}

#[test]
fn an_owner_sets_the_set_group_id_bit_for_its_present_group_only() {
    let scene = Scene::new();
    let others = foreign(&scene);
    let present = SetAttributes::new().owner(Some(USER.0), Some(7)).mode(0o755);
    let (opcode, body) = set_of(set::MODE, |set| set.mode = 0o2755);
    for (of, expected) in [(USER, 0o755), ((USER.0, 7), 0o2755), (ROOT_USER, 0o2755)] {
        change(&others, present);
        assert_eq!(scene.errno_for(of, opcode, scene.node, &body), 0);
        assert_eq!(others.metadata("/f").unwrap().mode() & 0o7777, expected, "{of:?}");
    }
    // A list of the owner's does not keep the bit either.
    change(&others, present);
    change(&others, SetAttributes::new().mode(0o2755));
    let (opcode, list) = set_xattr(ACCESS_ACL, &list());
    assert_eq!(scene.errno_for(USER, opcode, scene.node, &list), 0);
    assert_eq!(others.metadata("/f").unwrap().mode() & libc::S_ISGID, 0);
    // A directory runs as nothing.
    let root = others.nodes().root().unwrap();
    let owned = SetAttributes::new().owner(Some(USER.0), Some(7));
    others.nodes().set(root, &owned, &Caller::new(0, 0)).unwrap();
    assert_eq!(scene.errno_for(USER, opcode::SETATTR, ROOT, &body), 0);
    assert_eq!(others.metadata("/").unwrap().mode() & 0o7777, 0o2755);
}

#[test]
fn a_file_that_another_mount_has_created_is_opened_by_its_own_mode() {
    let scene = Scene::new();
    let others = foreign(&scene);
    others.write("/new", "secret").unwrap();
    let create = |flags: i32, name: &str| {
        let head = [flags as u32, 0o644, 0o22, 0];
        let body = [head.as_bytes(), name.as_bytes(), b"\0"].concat();
        scene.errno_for(USER, opcode::CREATE, ROOT, &body)
    };
    let flags = libc::O_CREAT | libc::O_RDWR;
    // The kernel then looks the name up, and checks the permissions.
    assert_eq!(create(flags, "new"), libc::ESTALE);
    assert_eq!(create(flags | libc::O_EXCL, "new"), libc::EEXIST);
    assert_eq!(create(flags, "newer"), 0);
}
