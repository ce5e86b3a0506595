//! Repairs that lose nothing.

use aquifer_format::file::FileInode;
use aquifer_format::owners::Inconsistency;
use aquifer_format::slots::{ChangeSlots, ReadSlots};
use aquifer_format::superblock::{COPIES, Superblock};
use aquifer_format::{FormatError, PAGE_BYTES};
use aquifer_fs::internals::adopt;
use aquifer_pool::internals::{self, Presence};
use aquifer_pool::media::Media;
use aquifer_pool::{Pool, PoolError, PoolOptions, Result, Transaction};

use super::links::{Mend, explain};
use super::report::{CheckReport, Finding, FindingKind, Severity};
use super::{CheckOptions, Source, check_while, superblocks};

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

/// Repairs a pool without loss: see [the crate's documentation](crate). Files and directories without
/// a name get one in `/lost+found`: `#` and the number of their inode.
///
/// # Errors
/// [`PoolError::Busy`] and [`PoolError::BusyElsewhere`] if other processes have the pool open,
/// [`PoolError::MediaInUse`] if this one has it open on the given media, [`PoolError::NotOpened`] and
/// [`PoolError::Media`] if it cannot be read or written.
pub fn repair(pool: impl Into<Source>, options: &CheckOptions) -> Result<RepairReport> {
    let media = pool.into().media(true)?;
    if !media.is_writable() {
        return Err(PoolError::ReadOnly {
            path: media.path().to_path_buf(),
            reason: "the file or its file system is read-only",
        });
    }
    let alone = internals::to_repair(options.boot);
    let alone = options.segment_directory.iter().fold(alone, PoolOptions::segment_directory);
    let mut done = Vec::new();
    let before = {
        let _locks = internals::lock_for_one(&*media, &alone)?;
        let before = check_while(&*media, options, Presence::alone());
        repair_superblock(&*media, &before, &mut done)?;
        before
    };
    let is_saved_state = |finding: &&Finding| finding.kind == FindingKind::SavedState;
    let is_damage = |finding: &Finding| finding.severity == Severity::Damage;
    let is_sound =
        !before.findings.iter().filter(|finding| !is_saved_state(finding)).any(is_damage);
    if is_sound && before.findings.iter().any(|finding| is_saved_state(&finding)) {
        let _locks = internals::lock_for_one(&*media, &alone)?;
        internals::discard_saved(&*media)?;
        done.push("The saved state was discarded; closing the pool saves a new one.".to_owned());
    }
    if is_sound && before.findings.iter().any(|f| f.severity != Severity::Note) {
        // Opening recovers the pool, and closing removes all leftovers.
        let pool = alone.open_on(media.clone())?;
        let records = pool.info()?.recovered_records;
        let mended = mend_links(&pool)?;
        drop(pool);
        let is_plain = |kind| matches!(kind, FindingKind::Superblock | FindingKind::SavedState);
        if before.findings.iter().any(|finding| !is_plain(finding.kind)) {
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
            let reason = reason_to_refuse(finding, is_sound)?;
            Some(RefusedRepair { finding: finding.clone(), reason: reason.to_owned() })
        })
        .collect();
    let _locks = internals::lock_for_one(&*media, &alone)?;
    let after = check_while(&*media, options, Presence::alone());
    Ok(RepairReport { before, done, refused, after })
}

fn reason_to_refuse(finding: &Finding, is_sound: bool) -> Option<&'static str> {
    match (finding.severity, finding.kind) {
        (_, FindingKind::Superblock) if finding.severity == Severity::Repairable => None,
        (_, FindingKind::SavedState) if is_sound => None,
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

/// Recounts links, frees unreferenced parts, and names lost files. Returns what was done, in words.
fn mend_links(pool: &Pool) -> Result<Vec<String>> {
    let (mut miscounts, mut parts, mut lost) = (Vec::new(), Vec::new(), Vec::new());
    for inconsistency in internals::owners(pool).inconsistencies() {
        let Inconsistency::Link(inconsistency) = inconsistency else { continue };
        let slot = inconsistency.slot();
        // No text is wanted, and so no slot.
        match explain(inconsistency, &|_| None).mend {
            Mend::Refuse => {}
            Mend::Recount(correct) => miscounts.push((slot, correct)),
            Mend::Free => parts.push(slot),
            Mend::Name => lost.push(slot),
        }
    }
    let mut done = Vec::new();
    for some in miscounts.chunks(AT_ONCE) {
        // SAFETY: only counts and parents change, no run, and a repair has the pool open
        // exclusively.
        unsafe {
            pool.change(Vec::new(), |slots| {
                some.iter().try_for_each(|(number, correct)| recount(slots, *number, correct))
            })?;
        }
    }
    if !miscounts.is_empty() {
        done.push(format!("Links, names and parents were counted anew ({}).", miscounts.len()));
    }
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
    let adopted = adopt(pool, &lost)?;
    if adopted.named > 0 {
        let named = adopted.named;
        done.push(format!("What had lost its names has one in /lost+found now ({named})."));
    }
    if adopted.freed > 0 {
        done.push(format!("Inodes without name and content were freed ({}).", adopted.freed));
    }
    Ok(done)
}

/// Corrects a number in an inode.
fn recount(
    slots: &mut Transaction<'_>,
    number: u64,
    correct: &dyn Fn(&mut FileInode),
) -> Result<()> {
    // It was decoded before; leave it if it cannot be.
    let Ok(mut inode) = FileInode::decode(&slots.slot(number)?, number) else { return Ok(()) };
    correct(&mut inode);
    if let Ok(bytes) = inode.encode() {
        ChangeSlots::put(slots, number, bytes);
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
