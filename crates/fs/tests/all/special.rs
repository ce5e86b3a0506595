//! Named pipes, sockets and devices.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use crate::scratch::Scratch;
use crate::scratch::soundness::assert_sound;
use aquifer_check::{CheckOptions, check};
use aquifer_fs::{FileKind, Files, FsError, SetMode, SpecialFile};
use aquifer_pool::Pool;

const ALL: [(&str, SpecialFile); 4] = [
    ("/fifo", SpecialFile::Fifo),
    ("/socket", SpecialFile::Socket),
    ("/char", SpecialFile::CharDevice(libc::makedev(4095, 1_048_575))),
    ("/block", SpecialFile::BlockDevice(libc::makedev(7, 1))),
];

fn scene() -> (Scratch, Files) {
    let scratch = Scratch::with_pool(4 << 20, &Pool::options());
    let files = scratch.open();
    (scratch, files)
}

#[test]
fn they_are_kept_and_cannot_be_opened() {
    let (scratch, files) = scene();
    for (path, special) in ALL {
        files.create_special(path, special, 0o640).unwrap();
        let again = files.create_special(path, special, 0o640).unwrap_err();
        assert!(matches!(again, FsError::Exists { .. }), "{again}");
        let refused = files.create_special(format!("{path}/x"), special, 0).unwrap_err();
        assert_eq!(refused.errno(), libc::ENOTDIR);
        let opened = [
            files.open_file(path).map(drop),
            files.create_file(path).map(drop),
            files.view(path, ..).map(drop),
            files.read(path).map(drop),
            files.options().append(true).open(path).map(drop),
        ];
        for opened in opened {
            assert_eq!(opened.unwrap_err().errno(), libc::ENXIO, "{path}");
        }
        let refused = files.set_attribute(path, "user.a", "b", SetMode::Any).unwrap_err();
        assert_eq!(refused.errno(), libc::EPERM);
        files.set_attribute(path, "trusted.a", "b", SetMode::Any).unwrap();
        files.set_permissions(path, Permissions::from_mode(0o4711)).unwrap();
        files.hard_link(path, format!("{path}.2")).unwrap();
    }
    drop(files);
    scratch.assert_clean();
    let report = check(&scratch.path, &CheckOptions::default()).unwrap();
    assert_eq!(report.pool.unwrap().special_files, 4);
    let files = scratch.open();
    for (path, special) in ALL {
        let metadata = files.symlink_metadata(format!("{path}.2")).unwrap();
        let (kind, rdev) = match special {
            SpecialFile::Fifo => (FileKind::Fifo, 0),
            SpecialFile::Socket => (FileKind::Socket, 0),
            SpecialFile::CharDevice(rdev) => (FileKind::CharDevice, rdev),
            SpecialFile::BlockDevice(rdev) => (FileKind::BlockDevice, rdev),
        };
        assert_eq!((metadata.file_type().kind(), metadata.rdev()), (kind, rdev));
        assert_eq!((metadata.mode() & 0o7777, metadata.nlink(), metadata.len()), (0o4711, 2, 0));
        assert_eq!(files.attribute(path, "trusted.a").unwrap(), b"b");
        files.remove_file(path).unwrap();
        files.remove_file(format!("{path}.2")).unwrap();
    }
    let info = files.pool().info().unwrap();
    assert_eq!((info.special_files, info.parts), (0, 0), "nothing is left");
    assert_sound(files.pool());
}

#[test]
fn one_without_a_name_gets_everything_first() {
    let (_scratch, files) = scene();
    let new = files.create_special_unnamed(SpecialFile::Fifo, 0o600).unwrap();
    new.set_attribute("trusted.a", "b", SetMode::Any).unwrap();
    new.fchown(Some(5), Some(6)).unwrap();
    let mut buffer = [0; 8];
    assert!(new.read_at(&mut buffer, 0).is_err() && new.write_at(b"x", 0).is_err());
    assert_eq!(new.sync_all().ok(), Some(()));
    new.link("/fifo").unwrap();
    drop(new);
    let metadata = files.metadata("/fifo").unwrap();
    assert_eq!((metadata.uid(), metadata.gid(), metadata.nlink()), (5, 6, 1));
    drop(files.create_special_unnamed(SpecialFile::Socket, 0o600).unwrap());
    assert_eq!(files.pool().info().unwrap().special_files, 1, "one without a name is gone");
}
