//! Long runs of random operations.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_crashkit::{CrashFailure, CrashMedia, Explored, Plan, Recording, campaign, explore};
use aquifer_fs::{
    ACCESS_ACL, Acl, AclEntry, AclTag, DEFAULT_ACL, FallocateMode, File, FileOptions, Files,
    FsError, RenameMode, SetMode, SpecialFile,
};
use aquifer_pool::Mutant;
use aquifer_pool::media::PersistenceDomain;
use aquifer_testkit::rng::Rng;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use super::history::{BOOT, Durable, History, check, check_killed, fresh_media, identity, open};
use crate::scratch;

/// A running program.
struct Program {
    media: Arc<CrashMedia>,
    mutant: Option<Mutant>,
    files: Option<Files>,
    handles: Vec<File>,
    rng: Rng,
}

impl Program {
    fn files(&self) -> &Files {
        self.files.as_ref().unwrap()
    }

    fn path(&mut self) -> String {
        let directory = ["", "/d", "/d/e"][self.rng.below(3) as usize];
        format!("{directory}/{}", ["a", "b", "c", "d", "e"][self.rng.below(5) as usize])
    }

    /// A place in a file, and a length.
    fn range(&mut self) -> (u64, u64) {
        let offset = match self.rng.below(3) {
            0 => self.rng.below(20_000),
            1 => self.rng.below(5) * 4096,
            _ => 0,
        };
        let len = match self.rng.below(3) {
            0 => 1 + self.rng.below(300),
            1 => 4096 * (1 + self.rng.below(3)),
            _ => 1 + self.rng.below(12_000),
        };
        (offset, len)
    }

    /// A handle of some existing file, new or kept.
    fn file(&mut self) -> Result<File, FsError> {
        if !self.handles.is_empty() && self.rng.chance(0.3) {
            let index = self.rng.below(self.handles.len() as u64) as usize;
            return Ok(self.handles[index].clone());
        }
        let mut options = self.files().options();
        options.read(true).write(true);
        let mut opened = self.open(&options);
        for _ in 0..10 {
            if opened.is_err() {
                opened = self.open(&options);
            }
        }
        opened
    }

    fn open(&mut self, options: &FileOptions) -> Result<File, FsError> {
        let path = self.path();
        let file = options.open(path)?;
        if self.rng.chance(0.2) {
            self.handles.truncate(2);
            self.handles.insert(0, file.clone());
        }
        Ok(file)
    }

    /// Runs one random operation; writes consist of this byte. Returns its description, and what it
    /// has made durable.
    fn operate(&mut self, byte: u8) -> (String, Result<Option<Durable>, FsError>) {
        let what = self.rng.below(135);
        let (path, other) = (self.path(), self.path());
        let (offset, len) = self.range();
        let bytes = vec![byte; len as usize];
        let files = self.files().clone();
        let (text, outcome) = match what {
            0..12 => {
                let mut options = files.options();
                options.read(true).write(true).create(true).truncate(self.rng.chance(0.3));
                ("make or truncate".to_owned(), self.open(&options).map(drop))
            }
            12..15 => match self.file() {
                Ok(file) => {
                    let text = format!("write_atomic {} at {offset}, {len}", describe(&file));
                    (text, file.write_atomic(&bytes, offset))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            15..17 => match self.file() {
                Ok(file) => {
                    let other = self.range().0;
                    let text =
                        format!("ranges of {} at {offset} and {other}, {len}", describe(&file));
                    (text, file.write_atomic_ranges(&[(offset, &bytes), (other, &bytes)]))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            120..126 => match self.file() {
                Ok(file) => {
                    let pages = (self.rng.below(4) * 4096, 4096 * (1 + self.rng.below(2)));
                    let (mode, what) = match self.rng.chance(0.5) {
                        true => (FallocateMode::CollapseRange, "collapse"),
                        false => (FallocateMode::InsertRange, "insert"),
                    };
                    let text = format!("{what} {pages:?} of {}", describe(&file));
                    (text, file.allocate(mode, pages.0, pages.1))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            17..22 => match self.file().and_then(|one| Ok((one, self.file()?))) {
                Ok((one, other)) => {
                    let [from, to] = [self.rng.below(3), self.rng.below(3)].map(|page| page * 4096);
                    let (first, second) = (describe(&one), describe(&other));
                    let text = format!("pswap {first} at {from} and {second} at {to}");
                    (text, one.exchange_range(from, &other, to, 4096 * (1 + self.rng.below(2))))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            22..35 => match self.file() {
                Ok(file) => {
                    let text = format!("write {} at {offset}, {len}", describe(&file));
                    (text, file.write_all_at(&bytes, offset))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            35..43 => match self.file() {
                Ok(file) => {
                    let text = format!("set_len {} {offset}", describe(&file));
                    (text, file.set_len(offset))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            43..51 => match self.file() {
                Ok(file) => {
                    let mode = [
                        FallocateMode::Extend,
                        FallocateMode::KeepSize,
                        FallocateMode::PunchHole,
                        FallocateMode::ZeroRange,
                    ][self.rng.below(4) as usize];
                    let text = format!("{mode:?} {} at {offset}, {len}", describe(&file));
                    (text, file.allocate(mode, offset, len))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            51..55 => match self.file() {
                Ok(file) => {
                    file.sync_all().unwrap();
                    let text = format!("sync {}", describe(&file));
                    return (text, Ok(Some(Durable::Content(identity(&file)))));
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            55..60 => {
                files.sync().unwrap();
                return ("sync".to_owned(), Ok(Some(Durable::All)));
            }
            60..68 => (format!("remove {path}"), files.remove_file(&path)),
            68..76 => {
                let mode = match self.rng.below(5) {
                    4 => RenameMode::Whiteout,
                    0 => RenameMode::Exchange,
                    1 => RenameMode::NoReplace,
                    _ => RenameMode::Replace,
                };
                (format!("{mode:?} {path} {other}"), files.rename_with(&path, &other, mode))
            }
            76..80 => (format!("link {path} {other}"), files.hard_link(&path, &other)),
            80..84 => {
                let directory = ["/d", "/d/e"][self.rng.below(2) as usize];
                (format!("create {directory}"), files.create_dir(directory))
            }
            84..86 => (format!("remove directory {path}"), files.remove_dir(&path)),
            86..89 => {
                let target = "t".repeat([5, 900][self.rng.below(2) as usize]);
                (format!("symlink {path}"), files.symlink(target, &path))
            }
            126..129 => {
                let special = match self.rng.below(3) {
                    0 => SpecialFile::Fifo,
                    1 => SpecialFile::Socket,
                    _ => SpecialFile::CharDevice(byte.into()),
                };
                (format!("make {special:?} {path}"), files.create_special(&path, special, 0o644))
            }
            // The list and the mode change together, and what is created inherits both.
            131..135 => {
                let (at, list) = match self.rng.below(3) {
                    0 => (path.clone(), ACCESS_ACL),
                    _ => (["/", "/d", "/d/e"][self.rng.below(3) as usize].to_owned(), DEFAULT_ACL),
                };
                let entry = |tag, permissions| AclEntry { tag, permissions };
                let acl = Acl::new(vec![
                    entry(AclTag::Owner, 6),
                    entry(AclTag::User(byte.into()), 4),
                    entry(AclTag::OwningGroup, 4),
                    entry(AclTag::Mask, u16::from(byte) % 8),
                    entry(AclTag::Other, 0),
                ]);
                let value = acl.unwrap().encode();
                (format!("{list} of {at}"), files.set_attribute(at, list, value, SetMode::Any))
            }
            89..93 => {
                let value = vec![byte; self.rng.below(700) as usize];
                let outcome = files.set_attribute(&path, "user.a", value, SetMode::Any);
                (format!("attribute of {path}"), outcome)
            }
            93..95 => (
                format!("mode of {path}"),
                files.set_permissions(&path, Permissions::from_mode(0o600 + u32::from(byte))),
            ),
            95..98 => {
                files.pool().checkpoint().unwrap();
                ("checkpoint".to_owned(), Ok(()))
            }
            98..104 => {
                let outcome = self
                    .open(files.options().read(true).append(true))
                    .and_then(|file| file.write_all_at(&bytes, 0));
                (format!("append {len} to some file"), outcome)
            }
            104..107 => {
                files.pool().zero_free_pages(1 + self.rng.below(60)).unwrap();
                ("zero free pages".to_owned(), Ok(()))
            }
            107..109 => {
                let is_immutable = self.rng.chance(0.3);
                let text = format!("immutable {path}: {is_immutable}");
                (text, files.set_immutable(&path, is_immutable))
            }
            112..118 => match self.file() {
                Ok(file) => {
                    let text = format!("view of {}", describe(&file));
                    let size = file.metadata().unwrap().len();
                    let (from, to) = (offset.min(size), (offset + len).min(size));
                    // Within one page, where nothing is stitched: stores to stitched mappings are
                    // not recorded.
                    let to = to.min(from.next_multiple_of(4096));
                    let stored = (file.view_mut(from..to))
                        .and_then(|view| view.write(0, &bytes[..(to - from) as usize]));
                    (text, stored)
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            118..120 => match self.file() {
                Ok(file) => {
                    let text = format!("append a view of {len} to {}", describe(&file));
                    (text, file.append_view(len).map(drop))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            110..112 => match self.file() {
                Ok(file) => {
                    (format!("defragment {}", describe(&file)), file.defragment().map(drop))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            109..110 => match self.file() {
                Ok(file) => {
                    let free = files.space().unwrap().free_bytes;
                    let text = format!("{free} free bytes to {}", describe(&file));
                    (text, file.allocate(FallocateMode::Extend, 0, free.max(1)))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            _ => {
                drop(files);
                self.handles.clear();
                self.files = None;
                self.files = Some(open(&self.media, BOOT, self.mutant).unwrap());
                ("reopen".to_owned(), Ok(()))
            }
        };
        (text, outcome.map(|()| None))
    }
}

fn describe(file: &File) -> String {
    let metadata = file.metadata().unwrap();
    format!("{}.{} of {} bytes", metadata.ino(), metadata.generation(), metadata.len())
}

/// Asserts that every page is free or has a file.
fn assert_no_page_is_lost(files: &Files) {
    files.pool().checkpoint().unwrap();
    let mut allocated = BTreeMap::new();
    for path in scratch::tree(files).unwrap().keys() {
        let metadata = files.symlink_metadata(path).unwrap();
        allocated.insert(metadata.ino(), metadata.allocated_bytes());
    }
    let space = files.space().unwrap();
    assert_eq!(space.total_bytes - space.free_bytes, allocated.values().sum::<u64>());
}

/// Runs random operations on fresh media, and records them.
fn record(
    seed: u64,
    operations: u64,
    domain: PersistenceDomain,
    mutant: Option<Mutant>,
) -> (Recording, History) {
    assert!(operations < 255, "each operation has a byte of its own");
    let media = fresh_media(domain, |_| ());
    // Both kinds of disks: see `Media::durable_writes_flush`.
    let media = Arc::new(CrashMedia::clone(&media).with_writes_that_flush(seed % 2 == 1));
    let files = Some(open(&media, BOOT, mutant).unwrap());
    let (handles, rng) = (Vec::new(), Rng::new(seed));
    let mut program = Program { media: media.clone(), mutant, files, handles, rng };
    let mut history = History::begin(&media, program.files());
    for id in 1..=operations {
        media.begin(id);
        let done = program.operate(id as u8);
        history.note(&media, domain, (program.files(), &program.handles), done);
        if mutant.is_none() && domain != PersistenceDomain::Volatile && id % 16 == 0 {
            check_killed(&media, domain, &history);
        }
    }
    // The crash kills the program, so its shutdown is not part of the recording.
    let recording = media.recording();
    program.handles.clear();
    assert_no_page_is_lost(program.files());
    drop(program);
    (recording, history)
}

fn run(
    seed: u64,
    operations: u64,
    domain: PersistenceDomain,
    budget: u64,
    mutant: Option<Mutant>,
) -> Result<Explored, Box<CrashFailure>> {
    let (recording, history) = record(seed, operations, domain, mutant);
    let plan = Plan { depth: 1, budget, seed };
    explore(&recording, plan, |state| check(state, &history, domain, mutant))
}

fn survives(domain: PersistenceDomain) {
    campaign::survives(domain, 5, |seed| run(seed, 80, domain, 400, None));
}

#[test]
fn every_crash_state_on_a_disk_recovers() {
    survives(PersistenceDomain::PageCache);
}

#[test]
fn every_crash_state_on_persistent_memory_recovers() {
    survives(PersistenceDomain::Dax);
}

#[test]
fn every_killed_process_in_memory_files_recovers() {
    survives(PersistenceDomain::Volatile);
}

/// Deliberate bugs of the pool, observed through files.
#[test]
fn mutants_are_caught() {
    let mutants =
        [Mutant::CommitBeforeData, Mutant::CountExposed, Mutant::EarlyReuse, Mutant::FreshUnsaid];
    let domain = PersistenceDomain::PageCache;
    campaign::catches(&mutants, |seed, mutant| run(seed, 80, domain, 1500, Some(mutant)));
}
