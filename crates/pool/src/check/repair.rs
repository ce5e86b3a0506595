//! Repairs that lose nothing.

use std::path::Path;
use std::sync::Arc;

use super::files::FileCheck;
use super::report::{CheckReport, Finding, FindingKind, Severity};
use super::run_time::Presence;
use super::{CheckOptions, check_while, superblocks};
use crate::error::{PoolError, Result};
use crate::format::file::FileInode;
use crate::format::superblock::{COPIES, Superblock};
use crate::format::{FormatError, PAGE_BYTES};
use crate::image_slots;
use crate::links::{Extent, LinkInconsistency};
use crate::media::{self, Media};
use crate::open_options::OpenOptions;
use crate::owners::Inconsistency;
use crate::pool::Pool;
use crate::recovery;
use crate::slots::{ChangeSlots, ReadSlots};
use crate::transaction::Transaction;

/// What a repair did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairReport {
    /// The report of the check before the repair.
    pub before: CheckReport,
    /// What was done, in words.
    pub done: Vec<String>,
    /// What was not done, and why.
    pub refused: Vec<RefusedRepair>,
    /// The report of the check after the repair.
    pub after: CheckReport,
}

/// A finding that was not repaired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedRepair {
    /// What was found.
    pub finding: Finding,
    /// Why it was not repaired.
    pub reason: String,
}

/// Repairs the pool in a file or device without loss: see the module's documentation.
///
/// # Errors
/// [`PoolError::Busy`] and [`PoolError::BusyElsewhere`] if other processes have the pool open,
/// [`PoolError::NotOpened`] and [`PoolError::Media`] if it cannot be read or written.
pub fn repair(path: impl AsRef<Path>, options: &CheckOptions) -> Result<RepairReport> {
    repair_on(media::open(path.as_ref(), true, None)?, options)
}

/// Repairs the pool on media that no open pool uses.
///
/// # Errors
/// As for [`repair`]; [`PoolError::MediaInUse`] if a pool is open on them.
pub fn repair_on(media: Arc<dyn Media>, options: &CheckOptions) -> Result<RepairReport> {
    repair_known(media, options, None)
}

/// [`repair_on`], with `files` checking the content of files and naming lost ones.
///
/// # Errors
/// As for [`repair`].
pub fn repair_with(
    media: Arc<dyn Media>,
    options: &CheckOptions,
    files: &dyn FileCheck,
) -> Result<RepairReport> {
    repair_known(media, options, Some(files))
}

fn repair_known(
    media: Arc<dyn Media>,
    options: &CheckOptions,
    files: Option<&dyn FileCheck>,
) -> Result<RepairReport> {
    if !media.is_writable() {
        return Err(PoolError::ReadOnly {
            path: media.path().to_path_buf(),
            reason: "the file or its file system is read-only",
        });
    }
    let alone = OpenOptions {
        exclusive: true,
        background: false,
        repairs: true,
        boot: options.boot,
        segment_directory: options.segment_directory.clone(),
        ..OpenOptions::default()
    };
    let mut done = Vec::new();
    let before = {
        let _locks = recovery::lock_for_one(&*media, &alone)?;
        let before = check_while(&*media, options, files, Presence::alone());
        repair_superblock(&*media, &before, &mut done)?;
        before
    };
    let is_recoverable =
        before.is_sound() && before.findings.iter().any(|f| f.severity == Severity::Repairable);
    if is_recoverable {
        // Opening recovers the pool, and closing removes all leftovers.
        let pool = Pool::open_on(media.clone(), &alone)?;
        let records = pool.info()?.recovered_records;
        let mended = mend_links(&pool, files)?;
        drop(pool);
        if before.findings.iter().any(|finding| finding.kind != FindingKind::Superblock) {
            done.push(format!(
                "The pool was opened and closed; {records} records of its log are \
             at their place now."
            ));
        }
        let removed =
            before.findings.iter().filter(|f| f.kind == FindingKind::SharedMemory).count();
        if removed > 0 {
            done.push(format!("Unused shared memory was removed ({removed} segments)."));
        }
        done.extend(mended);
    }
    let refused = (before.findings.iter())
        .filter(|finding| finding.severity != Severity::Note)
        .filter_map(|finding| {
            let reason = match finding.kind {
                FindingKind::LostFile if before.is_sound() && files.is_none() => {
                    "it needs a name, which this repair cannot give it"
                }
                _ => reason_to_refuse(finding, before.is_sound())?,
            };
            Some(RefusedRepair { finding: finding.clone(), reason: reason.to_owned() })
        })
        .collect();
    let _locks = recovery::lock_for_one(&*media, &alone)?;
    let after = check_while(&*media, options, files, Presence::alone());
    Ok(RepairReport { before, done, refused, after })
}

fn reason_to_refuse(finding: &Finding, is_sound: bool) -> Option<&'static str> {
    match (finding.severity, finding.kind) {
        (_, FindingKind::Superblock) if finding.severity == Severity::Repairable => None,
        (Severity::Repairable, _) if is_sound => None,
        (Severity::Repairable, _) => {
            Some("the pool is damaged elsewhere, and recovery would write to it")
        }
        (_, FindingKind::Truncated | FindingKind::Unreadable) => {
            Some("what is gone cannot be made up")
        }
        (_, FindingKind::LogLoss | FindingKind::TornRecord) => Some(
            "going on from where the log ends would make the loss of acknowledged commits final",
        ),
        (_, FindingKind::FutureVersion) => Some("this program does not know that format"),
        (_, FindingKind::NotAPool) => Some("there is nothing to repair"),
        _ => Some(
            "what belongs there could only be guessed, and a wrong guess shows one object's bytes in another",
        ),
    }
}

/// Changes in one transaction.
const AT_ONCE: usize = 32;

/// Recounts links, frees unreferenced parts, and lets `files` name lost files. Returns what was
/// done, in words.
fn mend_links(pool: &Pool, files: Option<&dyn FileCheck>) -> Result<Vec<String>> {
    let owners = image_slots::owners(&pool.core().handle);
    let inconsistencies: Vec<LinkInconsistency> = (owners.inconsistencies().iter())
        .filter_map(|inconsistency| match inconsistency {
            Inconsistency::Link(inconsistency) => Some(*inconsistency),
            _ => None,
        })
        .collect();
    let mut done = Vec::new();
    let miscounts: Vec<_> =
        inconsistencies.iter().filter(|f| f.extent() == Extent::Miscount).collect();
    for some in miscounts.chunks(AT_ONCE) {
        // SAFETY: only counts and parents change, no run, and a repair has the pool open
        // exclusively.
        unsafe {
            pool.change(Vec::new(), |slots| {
                some.iter().try_for_each(|inconsistency| recount(slots, inconsistency))
            })?;
        }
    }
    if !miscounts.is_empty() {
        done.push(format!("Links, names and parents were counted anew ({}).", miscounts.len()));
    }
    let part = |inconsistency: &LinkInconsistency| match *inconsistency {
        LinkInconsistency::LostPart { slot, .. } => Some(slot),
        _ => None,
    };
    let parts: Vec<u64> = inconsistencies.iter().filter_map(part).collect();
    for some in parts.chunks(AT_ONCE) {
        // SAFETY: no inode refers to the parts that are given back, and a repair has the pool open
        // exclusively.
        unsafe {
            pool.change(Vec::new(), |slots| {
                some.iter().try_for_each(|&slot| slots.give_back(slot))
            })?;
        }
    }
    if !parts.is_empty() {
        done.push(format!("Parts that nothing led to were freed ({}).", parts.len()));
    }
    let inode = |inconsistency: &LinkInconsistency| match *inconsistency {
        LinkInconsistency::LostInode { inode } => Some(inode),
        _ => None,
    };
    let lost: Vec<u64> = inconsistencies.iter().filter_map(inode).collect();
    if let Some(files) = files.filter(|_| !lost.is_empty()) {
        done.extend(files.adopt(pool, &lost)?);
    }
    Ok(done)
}

/// Replaces the stated number by the counted one.
fn recount(slots: &mut Transaction<'_>, inconsistency: &LinkInconsistency) -> Result<()> {
    let mut inode =
        match FileInode::decode(&slots.slot(inconsistency.slot())?, inconsistency.slot()) {
            Ok(inode) => inode,
            // It was decoded before; leave it if it cannot be.
            Err(_) => return Ok(()),
        };
    match *inconsistency {
        LinkInconsistency::Links { found, .. } => inode.links = found,
        LinkInconsistency::Entries { found, .. } => inode.entries = found,
        LinkInconsistency::Parent { found, .. } => inode.parent = found,
        _ => return Ok(()),
    }
    if let Ok(bytes) = inode.encode() {
        ChangeSlots::put(slots, inode.number, bytes);
    }
    Ok(())
}

/// Rewrites a damaged copy from the other one.
fn repair_superblock(
    media: &dyn Media,
    before: &CheckReport,
    done: &mut Vec<String>,
) -> Result<()> {
    let is_asked_for = before
        .findings
        .iter()
        .any(|f| f.kind == FindingKind::Superblock && f.severity == Severity::Repairable);
    if !is_asked_for {
        return Ok(());
    }
    let read = |copy: u64| {
        let place = superblocks::place_of(copy);
        let mut page = vec![0; PAGE_BYTES as usize];
        match media.read_at(place.offset_bytes, &mut page) {
            Ok(()) => Superblock::decode(&page, copy),
            Err(_) => Err(FormatError::Unreadable),
        }
    };
    for copy in 0..COPIES {
        let other = COPIES - 1 - copy;
        let is_unknown = |error: &FormatError| {
            matches!(error, FormatError::Version { .. } | FormatError::Features { .. })
        };
        if let (Err(error), Ok(valid)) = (read(copy), read(other))
            && !is_unknown(&error)
        {
            let page = valid.encode(copy);
            // SAFETY: no reference to the bytes of a superblock is ever made.
            unsafe { media.write_durable(superblocks::place_of(copy).offset_bytes, &page)? };
            done.push(format!("Superblock {copy} was written anew from the other copy."));
        }
    }
    Ok(())
}
