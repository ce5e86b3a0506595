//! The check explains each inconsistency of the files; the repair fixes what it can without losing data; and
//! reading damaged metadata is an error, and never returns another file's content.

use crate::support::pool::{FileMedia, alone, forge, reading};
use crate::support::*;
use aquifer_check::{CheckOptions, CheckReport, Finding, FindingKind, Severity, check, repair};
use aquifer_fs::{Files, FsError, SetMode};
use aquifer_pool::format::directory::{DirectoryEntry, Node, NodeContent};
use aquifer_pool::format::file::{FileInode, FileKind, ROOT_INODE};
use aquifer_pool::format::run::Run;
use aquifer_pool::format::slot::Slot;
use aquifer_pool::{InodeUse, PoolError};

fn report_of(image: &[u8]) -> CheckReport {
    let media = FileMedia::of(image);
    let report =
        check(media.clone(), &CheckOptions { fresh_pages: true, ..CheckOptions::default() })
            .unwrap();
    assert!(media.image() == image, "the check changed something");
    for Finding { what, meaning, advice, .. } in &report.findings {
        for text in [what, meaning, advice] {
            let is_begun = text.starts_with(|first: char| {
                first.is_uppercase() || first == '`' || first.is_ascii_digit()
            });
            assert!(is_begun && !text.ends_with('.'), "{text}");
        }
    }
    report
}

/// The one finding of this kind.
fn only(report: &CheckReport, kind: FindingKind) -> &Finding {
    let found: Vec<&Finding> = report.findings.iter().filter(|f| f.kind == kind).collect();
    assert_eq!(found.len(), 1, "{kind:?} in {report}");
    found[0]
}

fn open(image: &[u8]) -> Result<Files, PoolError> {
    alone().open_on(FileMedia::of(image)).map(Files::new)
}

fn open_to_read(image: &[u8]) -> Files {
    Files::new(reading().open_on(FileMedia::of(image)).unwrap())
}

fn slots(image: &[u8]) -> u64 {
    forge::superblock(image).layout.slots()
}

/// Asserts that no file shows another file's bytes; returns how many things were damaged.
fn read_all(image: &[u8]) -> usize {
    let seen = read_everything(&open_to_read(image), slots(image));
    assert_eq!(seen.foreign, None, "a file shows another one's bytes");
    seen.damaged
}

/// Changes the entries of a leaf, of this directory or any, that has a name for this inode; returns
/// its slot.
fn change_leaf(
    image: &mut [u8],
    directory: Option<u64>,
    inode: u64,
    change: impl FnOnce(&mut Vec<DirectoryEntry>, usize),
) -> u64 {
    for number in 1..slots(image) {
        let layout = forge::superblock(image).layout;
        let bytes = forge::slot(image, &layout, number).to_vec();
        let Ok(mut node) = Node::decode(&bytes.try_into().unwrap(), number) else { continue };
        if directory.is_some_and(|directory| directory != node.owner) {
            continue;
        }
        let NodeContent::Leaf(entries) = &mut node.content else { continue };
        let Some(index) = entries.iter().position(|entry| entry.inode == inode) else { continue };
        change(entries, index);
        put(image, number, &Slot::Node(Box::new(node)));
        return number;
    }
    panic!("nothing leads to {inode}");
}

/// Takes a slot that was used and is free.
fn take_free(image: &mut [u8]) -> u64 {
    (1..slots(image))
        .find(|&number| is_free(image, number))
        .expect("a slot that was used and is free")
}

fn is_free(image: &mut [u8], number: u64) -> bool {
    let layout = forge::superblock(image).layout;
    let bytes = forge::slot(image, &layout, number).to_vec();
    bytes.iter().any(|&byte| byte != 0)
        && matches!(Slot::decode(&bytes.try_into().unwrap(), number), Ok(Slot::Free(_)))
}

#[test]
fn nothing_is_wrong_with_files_that_were_closed() {
    let image = closed_image();
    let report = report_of(&image);
    assert_eq!(report.findings, []);
    let pool = report.pool.unwrap();
    assert_eq!((pool.files, pool.directories, pool.symbolic_links, pool.inodes), (5, 5, 2, 0));
    assert!(pool.parts > 5, "{}", pool.parts);
    let free = open(&image).unwrap().pool().info().unwrap().free_pages;
    assert_eq!(pool.free_pages, free);
    assert_eq!(read_all(&image), 0);
    let crashed = report_of(&crashed_image());
    only(&crashed, FindingKind::Unreplayed);
    assert_eq!(crashed.findings.len(), 1, "{crashed}");
    assert_eq!(crashed.pool.unwrap().files, 5);
}

/// A change of an image, the finding that the check must report, and words in its text.
struct Case {
    what: &'static str,
    change: fn(&mut Vec<u8>),
    kind: FindingKind,
    says: &'static str,
}

/// Inconsistencies that no repair can fix without guessing.
const DAMAGE: &[Case] = &[
    Case {
        what: "a run list that is another file's",
        change: |image| {
            let (pieces, new) = (number(image, "/pieces"), number(image, "/new"));
            let part = inode(image, pieces).part;
            change(image, new, |inode| inode.part = part);
        },
        kind: FindingKind::Part,
        says: "Several slots lead to",
    },
    Case {
        what: "a run list that was taken from another file",
        change: |image| {
            let (pieces, new) = (number(image, "/pieces"), number(image, "/new"));
            let part = inode(image, pieces).part;
            change(image, new, |inode| inode.part = part);
            change(image, pieces, |inode| inode.part = 0);
        },
        kind: FindingKind::Part,
        says: "belongs to inode",
    },
    Case {
        what: "a node that is another directory's",
        change: |image| {
            let (many, a) = (number(image, "/many"), number(image, "/a"));
            let part = inode(image, many).part;
            change(image, many, |inode| inode.part = 0);
            change(image, a, |inode| inode.part = part);
        },
        kind: FindingKind::Part,
        says: "belongs to inode",
    },
    Case {
        what: "a part where nothing is",
        change: |image| {
            let (free, pieces) = (take_free(image), number(image, "/pieces"));
            change(image, pieces, |inode| inode.part = free);
        },
        kind: FindingKind::Part,
        says: "no such part",
    },
    Case {
        what: "a part that is no slot",
        change: |image| {
            let pieces = number(image, "/pieces");
            change(image, pieces, |inode| inode.part = 1 << 40);
        },
        kind: FindingKind::Part,
        says: "no such part",
    },
    Case {
        what: "attributes where runs belong",
        change: |image| {
            let plain = number(image, "/plain");
            change(image, plain, |inode| inode.part = inode.attributes);
        },
        kind: FindingKind::Part,
        says: "Several",
    },
    Case {
        what: "fewer runs than pages",
        change: |image| {
            let plain = number(image, "/plain");
            change(image, plain, |inode| inode.pages += 1);
        },
        kind: FindingKind::FilePages,
        says: "4 pages",
    },
    Case {
        what: "a name of something that is gone",
        change: |image| {
            let free = take_free(image);
            let new = number(image, "/new");
            change_leaf(image, None, new, |entries, index| entries[index].inode = free);
        },
        kind: FindingKind::Name,
        says: "\"new\" in directory 1",
    },
    Case {
        what: "a name of a part",
        change: |image| {
            let new = number(image, "/new");
            let part = inode(image, ROOT_INODE).part;
            change_leaf(image, None, new, |entries, index| entries[index].inode = part);
        },
        kind: FindingKind::Name,
        says: "no file",
    },
    Case {
        what: "a name of the wrong kind",
        change: |image| {
            let new = number(image, "/new");
            change_leaf(image, None, new, |entries, index| entries[index].kind = FileKind::Symlink);
        },
        kind: FindingKind::Name,
        says: "something else",
    },
    Case {
        what: "a directory with two names",
        change: |image| {
            let (a, many) = (number(image, "/a"), number(image, "/many"));
            change_leaf(image, None, many, |entries, index| entries[index].inode = a);
        },
        kind: FindingKind::Directory,
        says: "More names",
    },
    Case {
        what: "a name of the root",
        change: |image| {
            let c = number(image, "/a/c");
            change_leaf(image, None, c, |entries, index| entries[index].inode = ROOT_INODE);
        },
        kind: FindingKind::Directory,
        says: "More names lead to directory 1",
    },
    Case {
        what: "a root that is a file",
        change: |image| {
            let root = FileInode { links: 1, ..FileInode::new(FileKind::File, ROOT_INODE, 1) };
            put(image, ROOT_INODE, &Slot::File(Box::new(root)));
        },
        kind: FindingKind::Directory,
        says: "no root",
    },
    Case {
        what: "names hashed with another seed",
        change: |image| {
            let c = number(image, "/a");
            change(image, c, |inode| inode.seed ^= 1);
        },
        kind: FindingKind::Directory,
        says: "cannot be found",
    },
    Case {
        what: "attributes that are none",
        change: |image| {
            let a = number(image, "/a");
            let first = inode(image, a).attributes;
            let Slot::Bytes(mut chain) = slot(image, first) else { panic!("no attributes") };
            chain.bytes[0] = 0;
            put(image, first, &Slot::Bytes(chain));
        },
        kind: FindingKind::Attributes,
        says: "number 0",
    },
    Case {
        what: "a target that is cut short",
        change: |image| {
            let long = number(image, "/long");
            change(image, long, |inode| inode.size_bytes += 1);
        },
        kind: FindingKind::Target,
        says: "in place of",
    },
    Case {
        what: "holes without end",
        change: |image| {
            let plain = number(image, "/plain");
            change(image, plain, |inode| {
                let hole = Run { start_page: 0, pages: aquifer_pool::format::run::MAX_PAGES - 1 };
                inode.runs.extend([hole, hole]);
            });
        },
        kind: FindingKind::FilePages,
        says: "more pages than",
    },
    Case {
        what: "pages of another file",
        change: |image| {
            let (plain, new) = (number(image, "/plain"), number(image, "/new"));
            let runs = inode(image, plain).runs;
            change(image, new, |inode| (inode.pages, inode.runs) = (3, runs));
        },
        kind: FindingKind::SharedPages,
        says: "both name",
    },
    Case {
        what: "pages of the log",
        change: |image| {
            let start_page = forge::superblock(image).layout.log_start_page;
            let pieces = number(image, "/pieces");
            let part = inode(image, pieces).part;
            let Slot::Runs(mut list) = slot(image, part) else { panic!("no runs") };
            let run = list.runs.iter_mut().find(|run| !run.is_hole()).unwrap();
            run.start_page = start_page;
            put(image, part, &Slot::Runs(list));
        },
        kind: FindingKind::MisplacedRun,
        says: "no content",
    },
];

#[test]
fn damage_of_files_is_explained_one_by_one_and_refused_to_writers() {
    let image = closed_image();
    for case in DAMAGE {
        let mut changed = image.clone();
        (case.change)(&mut changed);
        let report = report_of(&changed);
        let of_kind = report.findings.iter().filter(|finding| finding.kind == case.kind);
        let says: Vec<_> = of_kind.map(|finding| &finding.what).collect();
        assert!(says.iter().any(|what| what.contains(case.says)), "{}: {report}", case.what);
        assert_eq!(report.worst(), Some(Severity::Damage), "{}", case.what);
        let is_of_reader = matches!(case.kind, FindingKind::Attributes | FindingKind::Target)
            || (case.says == "cannot be found" || case.says == "more pages than");
        match open(&changed) {
            Ok(_) => assert!(is_of_reader, "{} is opened", case.what),
            Err(PoolError::Damaged { .. }) => assert!(!is_of_reader, "{} is refused", case.what),
            Err(error) => panic!("{}: {error}", case.what),
        }
        read_all(&changed);
        let media = FileMedia::of(&changed);
        let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
        assert!(media.image() == changed, "{}: a repair guessed", case.what);
        assert!(repaired.done.is_empty() && !repaired.refused.is_empty(), "{}", case.what);
    }
}

/// Two directories in each other, without a name from outside.
#[test]
fn directories_in_a_circle_are_found_and_left() {
    let mut image = closed_image();
    let (a, b) = (number(&image, "/a"), number(&image, "/a/b"));
    let deep = number(&image, "/a/b/deep");
    // The file's entry in b now refers to a, and a's entry in the root to the file.
    let swap = |from: u64, to: u64, kind| {
        move |entries: &mut Vec<DirectoryEntry>, index: usize| {
            assert_eq!(entries[index].inode, from);
            (entries[index].inode, entries[index].kind) = (to, kind);
        }
    };
    let root_leaf = change_leaf(&mut image, None, a, swap(a, u32::MAX.into(), FileKind::File));
    change_leaf(&mut image, Some(b), deep, |entries, index| {
        let entry = &mut entries[index];
        (entry.inode, entry.kind) = (a, FileKind::Directory);
    });
    let Slot::Node(mut node) = slot(&image, root_leaf) else { panic!("a leaf") };
    let NodeContent::Leaf(entries) = &mut node.content else { panic!("a leaf") };
    entries.iter_mut().filter(|e| e.inode == u64::from(u32::MAX)).for_each(|e| e.inode = deep);
    put(&mut image, root_leaf, &Slot::Node(node));
    change(&mut image, a, |inode| inode.parent = b);
    change(&mut image, b, |inode| inode.links += 1);
    change(&mut image, ROOT_INODE, |inode| inode.links -= 1);
    let report = report_of(&image);
    let circle: Vec<_> = (report.findings.iter())
        .filter(|finding| finding.kind == FindingKind::Directory)
        .filter_map(|finding| finding.inode)
        .collect();
    assert!(circle.contains(&a) && circle.contains(&b), "{report}");
    assert!(open(&image).is_err());
    read_all(&image);
}

/// Inconsistencies that a repair fixes.
const REPAIRABLE: &[Case] = &[
    Case {
        what: "too many links",
        change: |image| {
            let plain = number(image, "/plain");
            change(image, plain, |inode| inode.links += 1);
        },
        kind: FindingKind::Links,
        says: "42 links lead to it, and there are 41",
    },
    Case {
        what: "too few links",
        change: |image| {
            let deep = number(image, "/second");
            change(image, deep, |inode| inode.links = 1);
        },
        kind: FindingKind::Links,
        says: "1 links lead to it, and there are 2",
    },
    Case {
        what: "no links, and names",
        change: |image| {
            let deep = number(image, "/second");
            change(image, deep, |inode| inode.links = 0);
        },
        kind: FindingKind::Links,
        says: "0 links",
    },
    Case {
        what: "links of a directory",
        change: |image| change(image, ROOT_INODE, |inode| inode.links = 2),
        kind: FindingKind::Links,
        says: "2 links lead to it, and there are 4",
    },
    Case {
        what: "names of a directory",
        change: |image| {
            let many = number(image, "/many");
            change(image, many, |inode| inode.entries = 0);
        },
        kind: FindingKind::Links,
        says: "0 names, and there are 40",
    },
    Case {
        what: "a wrong parent",
        change: |image| {
            let c = number(image, "/a/c");
            change(image, c, |inode| inode.parent = ROOT_INODE);
        },
        kind: FindingKind::Links,
        says: "is in directory 1, and it is in",
    },
    Case {
        what: "a part that nothing leads to",
        change: |image| {
            let a = number(image, "/a");
            change(image, a, |inode| inode.attributes = 0);
        },
        kind: FindingKind::LostPart,
        says: "a part of inode",
    },
    Case {
        what: "parts in a circle",
        change: |image| {
            let plain = number(image, "/plain");
            let first = inode(image, plain).attributes;
            let Slot::Bytes(chain) = slot(image, first) else { panic!("no attributes") };
            let Slot::Bytes(mut second) = slot(image, chain.next) else { panic!("one slot") };
            second.next = first;
            second.bytes.resize(aquifer_pool::format::byte_chain::CHAIN_BYTES, 0);
            put(image, second.number, &Slot::Bytes(second));
            change(image, plain, |inode| inode.attributes = 0);
        },
        kind: FindingKind::LostPart,
        says: "a part of inode",
    },
    Case {
        what: "a file that lost its name",
        change: |image| lose(image, "/new"),
        kind: FindingKind::LostFile,
        says: "a file of 16384 bytes",
    },
    Case {
        what: "a file without content that lost its name",
        change: |image| lose(image, "/empty"),
        kind: FindingKind::LostFile,
        says: "a file of 0 bytes",
    },
    Case {
        what: "a symbolic link that lost its name",
        change: |image| lose(image, "/short"),
        kind: FindingKind::LostFile,
        says: "a symbolic link of 8 bytes",
    },
    Case {
        what: "a directory that lost its name",
        change: |image| lose(image, "/a"),
        kind: FindingKind::LostFile,
        says: "directory",
    },
    Case {
        what: "an empty directory that lost its name",
        change: |image| lose(image, "/a/c"),
        kind: FindingKind::LostFile,
        says: "with 0 names",
    },
];

/// Removes the name, and corrects the counts.
fn lose(image: &mut [u8], path: &str) {
    let number = number(image, path);
    let mut directory = 0;
    change_leaf(image, None, number, |entries, index| {
        entries.remove(index);
        assert!(!entries.is_empty(), "a leaf has names");
    });
    let above = std::path::Path::new(path).parent().unwrap().to_str().unwrap();
    directory += crate::support::number(image, above);
    let is_directory = inode(image, number).kind == FileKind::Directory;
    change(image, directory, |inode| {
        inode.entries -= 1;
        inode.links -= u32::from(is_directory);
    });
}

#[test]
fn what_loses_nothing_is_repaired() {
    let image = closed_image();
    let whole = read_everything(&open_to_read(&image), slots(&image)).read;
    for case in REPAIRABLE {
        let mut changed = image.clone();
        (case.change)(&mut changed);
        let report = report_of(&changed);
        assert_eq!(report.worst(), Some(Severity::Repairable), "{}: {report}", case.what);
        let of_kind = report.findings.iter().filter(|finding| finding.kind == case.kind);
        let says: Vec<_> = of_kind.map(|finding| &finding.what).collect();
        assert!(says.iter().any(|what| what.contains(case.says)), "{}: {report}", case.what);
        // A writer would free an inode that has a name if the link count is wrong.
        let is_refused = case.kind == FindingKind::Links;
        assert_eq!(open(&changed).is_err(), is_refused, "{}", case.what);
        assert_eq!(report.can_be_written(), !is_refused);
        assert_eq!(read_all(&changed), 0, "{}", case.what);
        let media = FileMedia::of(&changed);
        let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
        assert_eq!(repaired.after.findings, [], "{}", case.what);
        assert!(
            repaired.done.len() > 1 && repaired.refused.is_empty(),
            "{}: {repaired:?}",
            case.what
        );
        let repaired = media.image();
        assert_eq!(read_all(&repaired), 0, "{}", case.what);
        open(&repaired).unwrap();
        let left = read_everything(&open_to_read(&repaired), slots(&repaired)).read;
        let is_found_again = case.kind == FindingKind::LostFile && !case.says.contains(" 0 ");
        let lost_and_found = if is_found_again { 2 } else { 0 };
        let freed = if case.says.contains(" 0 bytes") { 3 } else { 0 };
        let freed = if case.says == "with 0 names" { 2 } else { freed };
        assert_eq!(left, whole + lost_and_found - freed, "{}", case.what);
    }
}

#[test]
fn a_tree_that_lost_its_name_is_found_again_as_it_was() {
    let mut image = closed_image();
    let a = number(&image, "/a");
    lose(&mut image, "/a");
    let media = FileMedia::of(&image);
    let repaired = repair(media.clone(), &CheckOptions::default()).unwrap();
    assert!(repaired.done.iter().any(|done| done.contains("/lost+found")), "{:?}", repaired.done);
    let files = open(&media.image()).unwrap();
    let deep = files.metadata(format!("/lost+found/#{a}/b/deep")).unwrap();
    assert_eq!(deep.ino(), files.metadata("/second").unwrap().ino());
    assert_eq!(
        files.metadata(format!("/lost+found/#{a}/..")).unwrap().ino(),
        files.metadata("/lost+found").unwrap().ino()
    );
    assert_eq!(files.attribute(format!("/lost+found/#{a}"), "user.two").unwrap(), b"two");
}

#[test]
fn files_without_names_are_noted_and_freed_by_the_next_opening() {
    let mut image = closed_image();
    lose(&mut image, "/new");
    let root = number(&image, "/");
    assert_eq!(root, ROOT_INODE);
    for number in 1..slots(&image) {
        let is_lost = report_of(&image).findings.iter().any(|f| f.inode == Some(number));
        if is_lost {
            change(&mut image, number, |inode| inode.links = 0);
            break;
        }
    }
    let report = report_of(&image);
    assert_eq!(only(&report, FindingKind::Orphans).severity, Severity::Note);
    assert_eq!(report.findings.len(), 1, "{report}");
    let media = FileMedia::of(&image);
    drop(Files::new(alone().open_on(media.clone()).unwrap()));
    let report = report_of(&media.image());
    assert_eq!(report.findings, []);
    assert_eq!(report.pool.unwrap().files, 4);
}

/// A removal in several transactions that stops after the first: the rest of the attributes starts
/// within one.
#[test]
fn what_a_removal_has_left_undone_is_no_damage() {
    let media = FileMedia::of(&vec![0; 4 << 20]);
    let files = Files::new(alone().inodes(1023).create_on(media.clone()).unwrap());
    files.create_dir("/d").unwrap();
    for name in ["user.one", "user.two"] {
        files.set_attribute("/d", name, vec![0xff; 60 << 10], SetMode::Any).unwrap();
    }
    let number = files.metadata("/d").unwrap().ino();
    // As long as the inode is in use, the removal does not continue.
    let pin = files.pool().pin_inode(number, InodeUse::Open).unwrap();
    files.remove_dir("/d").unwrap();
    let died = FileMedia::of(&media.image());
    drop((pin, files));
    // Opening only the pool, without `Files`, removes nothing.
    drop(alone().open_on(died.clone()).unwrap());
    let report = report_of(&died.image());
    assert_eq!(only(&report, FindingKind::Orphans).severity, Severity::Note);
    assert_eq!(report.findings.len(), 1, "{report}");
    assert_ne!(report.pool.unwrap().parts, 0);
    // A chain that cannot be followed to its end is damage, as with any inode.
    let mut damaged = died.image();
    let first = inode(&damaged, number).attributes;
    let layout = forge::superblock(&damaged).layout;
    forge::slot(&mut damaged, &layout, first)[40] ^= 1;
    assert!(report_of(&damaged).findings.iter().any(|f| f.severity == Severity::Damage));
    drop(Files::new(alone().open_on(died.clone()).unwrap()));
    let report = report_of(&died.image());
    assert_eq!(report.findings, []);
    assert_eq!(report.pool.unwrap().parts, 0);
}

#[test]
fn each_kind_of_damage_is_a_typed_error_for_readers() {
    let image = closed_image();
    let read = |image: &[u8], path: &str| {
        use std::io::Read;
        let mut bytes = Vec::new();
        let files = open_to_read(image);
        let mut file = files.open_file(path)?;
        file.read_to_end(&mut bytes)
            .map_err(|error| *error.into_inner().unwrap().downcast::<FsError>().unwrap())?;
        Ok::<_, FsError>(bytes)
    };
    let is_damaged =
        |result: Result<Vec<u8>, FsError>| matches!(result, Err(FsError::Damaged { .. }));
    for (index, paths) in [
        (0, &["/new"][..]),
        (1, &["/new", "/pieces"]),
        (2, &["/a/b/deep"]),
        (3, &["/pieces"]),
        (6, &["/plain"]),
        (7, &["/new"]),
        (8, &["/new"]),
        (9, &["/new"]),
        (17, &["/new", "/plain"]),
        (18, &["/pieces"]),
    ] {
        let mut changed = image.clone();
        (DAMAGE[index].change)(&mut changed);
        for path in paths {
            let result = read(&changed, path);
            assert!(is_damaged(result), "{}: {path}", DAMAGE[index].what);
        }
        // Other files are not affected.
        if !paths.contains(&"/a/b/deep") {
            assert!(read(&changed, "/a/b/deep").is_ok(), "{}", DAMAGE[index].what);
        }
    }
}
