//! The log: its extent, why it ends there, and whether each record is consistent.

use std::collections::BTreeMap;

use aquifer_format::inode::{HEAD_SLOT, PoolHead};
use aquifer_format::layout::Layout;
use aquifer_format::owners::Owners;
use aquifer_format::record::{Entry, Header, LogIdentity, RECORD_UNIT_BYTES, Record};
use aquifer_format::slot::Slot;
use aquifer_format::slot_bytes::{SLOT_BYTES, SlotBytes};
use aquifer_format::superblock::Superblock;
use aquifer_format::{ByteRange, Checksum, FormatError, PAGE_BYTES};
use aquifer_pool::PoolError;
use aquifer_pool::internals::{self, LogReader, UNMARKED, most_copied_bytes};

use super::report::{FindingKind, Severity};
use super::{Checker, RESTORE, text};

/// The log as recovery would read it.
pub(super) struct LogView {
    /// The position behind the last whole record.
    pub end_lsn: u64,
    /// Why no record follows there, in words.
    pub end_reason: String,
    /// Whether a record follows that does not count, because the bytes it exposes may not be
    /// durable.
    pub is_unmarked: bool,
    /// The number of records.
    pub records: u64,
    /// The last image of each slot that a record changes, and the position of that record.
    pub slots: BTreeMap<u64, (u64, SlotBytes)>,
}

impl LogView {
    /// Applies a record's changes of slots. Returns the inconsistencies found.
    fn change_slots(&mut self, record: &Record, layout: &Layout) -> Vec<String> {
        let mut inconsistencies = Vec::new();
        for change in record.slots() {
            let slot = change.slot;
            if slot >= layout.slots() {
                inconsistencies.push(format!("changes slot {slot}, which the pool does not have"));
                continue;
            }
            if !change.words.is_whole && !self.slots.contains_key(&slot) {
                inconsistencies.push(format!(
                    "changes words of slot {slot}, whose others the log does not have"
                ));
                continue;
            }
            let (at_lsn, bytes) = self.slots.entry(slot).or_insert((0, [0; SLOT_BYTES]));
            *at_lsn = record.header.lsn;
            change.apply(bytes);
            let decoded = match slot {
                HEAD_SLOT => {
                    PoolHead::decode(bytes).and_then(|head| head.validate(layout)).map(drop)
                }
                _ => Slot::decode(bytes, slot).map(drop),
            };
            if let Err(error) = decoded {
                inconsistencies.push(format!("changes slot {slot} to something damaged: {error}"));
            }
        }
        inconsistencies
    }
}

/// The place on media of a position in the log.
fn place_of(layout: &Layout, lsn: u64, len_bytes: u64) -> ByteRange {
    let log = layout.log();
    ByteRange { offset_bytes: log.offset_bytes + lsn % log.len_bytes, len_bytes }
}

impl Checker<'_> {
    fn log_reader(&self, superblock: &Superblock) -> LogReader<'_> {
        LogReader {
            media: self.media,
            layout: superblock.layout,
            identity: LogIdentity {
                pool: superblock.uuid.as_u64_pair().0,
                generation: superblock.generation,
            },
            mutant: None,
        }
    }

    /// Reads the log from its tail to its end.
    pub(super) fn check_log(&mut self, superblock: &Superblock) -> LogView {
        let layout = superblock.layout;
        let tail_lsn = superblock.tail_lsn;
        let mut view = LogView {
            end_lsn: tail_lsn,
            end_reason: String::new(),
            is_unmarked: false,
            records: 0,
            slots: BTreeMap::new(),
        };
        let mut inconsistencies: Vec<(u64, String)> = Vec::new();
        let reader = self.log_reader(superblock);
        let life = internals::life_of(self.media, self.options.boot);
        // While processes have the pool open, they determine which records count.
        let boot = if self.presence.is_in_use() {
            superblock.boot
        } else {
            let directory = self.options.segment_directory.as_deref();
            internals::boot_of_left(directory, superblock, self.media)
        };
        let counts_unmarked = Superblock { boot, ..superblock.clone() }.counts_unmarked_in(life);
        let counted = reader.scan_counting(tail_lsn, counts_unmarked, |record| {
            view.records += u64::from(!record.header.is_skip);
            view.end_lsn = record.header.end_lsn();
            let lsn = record.header.lsn;
            let found = inconsistencies_of(record, &layout).into_iter();
            let found = found.chain(view.change_slots(record, &layout));
            inconsistencies.extend(found.map(|inconsistency| (lsn, inconsistency)));
            Ok(())
        });
        match counted {
            Ok(counted) => {
                view.is_unmarked =
                    matches!(counted.end.reason, FormatError::Field { field: UNMARKED, .. });
                view.end_reason = match counted.end.reason {
                    FormatError::Magic | FormatError::Identity { .. } => {
                        "no record of this log follows".to_owned()
                    }
                    FormatError::Field { field: UNMARKED, .. } => {
                        "what follows was never made durable".to_owned()
                    }
                    reason => format!("what follows is no whole record: {reason}"),
                };
                self.check_log_end(superblock, &view);
            }
            Err(error) => {
                view.end_reason = error.to_string();
                if let PoolError::Media(error) = error {
                    self.explain_unreadable_log(&layout, view.end_lsn, &error.to_string());
                }
            }
        }
        for (lsn, inconsistency) in inconsistencies {
            self.explain_record(&layout, lsn, &inconsistency);
        }
        if view.records > 0 && !self.presence.is_in_use() {
            let place = place_of(&layout, tail_lsn, 0);
            self.find(
                Severity::Repairable,
                FindingKind::Unreplayed,
                place,
                text(
                    format!("{} records of the log are not at their place yet", view.records),
                    "The pool was not closed by those who had it open; all they were told is \
                     durable is in the log",
                    "Open the pool for writing, or run `aquifer pool check --repair`: both bring it up to date",
                ),
            );
        }
        view
    }

    /// Determines why the log ends: normally, with a record that a crash cut off, or with
    /// acknowledged records missing.
    fn check_log_end(&mut self, superblock: &Superblock, view: &LogView) {
        let layout = superblock.layout;
        let lost_to =
            self.log_reader(superblock).acknowledged_behind(superblock.tail_lsn, view.end_lsn);
        let place = place_of(&layout, view.end_lsn, RECORD_UNIT_BYTES);
        match lost_to {
            Ok(Some(acknowledged_lsn)) => {
                let lost_bytes = acknowledged_lsn - view.end_lsn;
                self.find(
                    Severity::Damage,
                    FindingKind::LogLoss,
                    place,
                    text(
                        format!(
                            "The log ends at position {} (byte {} of the file), but a later \
                             record proves that it was durable up to {acknowledged_lsn}",
                            view.end_lsn, place.offset_bytes
                        ),
                        format!(
                            "{lost_bytes} bytes of commits that were acknowledged are damaged \
                         or gone; objects may be older than their last psync"
                        ),
                        RESTORE,
                    ),
                );
                return;
            }
            Ok(None) => {}
            Err(error) => {
                self.explain_unreadable_log(&layout, view.end_lsn, &error.to_string());
                return;
            }
        }
        let log = layout.log();
        if self.presence.is_in_use() || view.end_lsn >= superblock.tail_lsn + log.len_bytes {
            return;
        }
        let Some(page) = self.read(place, "The end of the log") else { return };
        let identity = self.log_reader(superblock).identity;
        let header = Header::decode(&page, view.end_lsn, log.len_bytes, identity);
        if view.is_unmarked {
            let found = format!(
                "Changes from position {} of the log on were never made durable",
                view.end_lsn
            );
            let reason = "A power cut came before a process had asked for it, and may have taken bytes that they name, \
                          or the shared memory of the processes that made them is not there, and only that says whether such bytes were lost"
                .to_owned();
            let advice = "Nothing need be done: they do not count, and are written over when the pool is used";
            self.find(Severity::Note, FindingKind::TornRecord, place, text(found, reason, advice));
        } else if !matches!(header, Err(FormatError::Magic | FormatError::Identity { .. })) {
            self.find(
                Severity::Note,
                FindingKind::TornRecord,
                place,
                text(
                    format!("The record at position {} of the log is not whole", view.end_lsn),
                    "A crash cut it off while it was written; it was never acknowledged as durable"
                        .to_owned(),
                    "Nothing need be done: it is written over when the pool is used",
                ),
            );
        }
    }

    fn explain_unreadable_log(&mut self, layout: &Layout, lsn: u64, error: &str) {
        let place = place_of(layout, lsn, PAGE_BYTES);
        if place.end_bytes() > self.media.len_bytes() {
            return; // The file was cut short, which is reported already.
        }
        self.find(
            Severity::Damage,
            FindingKind::Unreadable,
            place,
            text(
                format!("The log cannot be read from position {lsn} on ({error})"),
                "Commits that were acknowledged may be lost; the pool cannot be opened",
                "Copy what can be read to another disk, and restore the rest from a copy"
                    .to_owned(),
            ),
        );
    }

    fn explain_record(&mut self, layout: &Layout, lsn: u64, inconsistency: &str) {
        self.find(
            Severity::Damage,
            FindingKind::Record,
            place_of(layout, lsn, PAGE_BYTES),
            text(
                format!("The record at position {lsn} of the log {inconsistency}"),
                "Its checksum is right, so no accident of the disk did this, but a faulty or \
                 malicious program",
                RESTORE,
            ),
        );
    }

    /// Checks the content in the log, once the owners of all pages are known.
    pub(super) fn check_logged_content(
        &mut self,
        superblock: &Superblock,
        view: &LogView,
        owners: &Owners,
    ) {
        let layout = superblock.layout;
        let data = layout.data();
        let mut inconsistencies = Vec::new();
        let mut copies = Vec::new();
        let mut copied_bytes = 0u64;
        let reader = self.log_reader(superblock);
        // Read before without an error, or reported.
        let _ = reader.scan(superblock.tail_lsn, view.end_lsn, |record| {
            let lsn = record.header.lsn;
            let mut inodes: Vec<u64> = record.content_inodes().collect();
            inodes.sort_unstable();
            inodes.dedup();
            for entry in &record.entries {
                let (inode, target, source) = match *entry {
                    Entry::Pages { inode, target, .. } | Entry::Patches { inode, target, .. } => {
                        (inode, target, None)
                    }
                    Entry::Copied { inode, target, source_offset_bytes, checksum } => {
                        let source = ByteRange { offset_bytes: source_offset_bytes, ..target };
                        (inode, target, Some((source, checksum)))
                    }
                    Entry::Slot { .. } | Entry::NewRun { .. } | Entry::Exposed { .. } => continue,
                };
                let owned = owners.owned(inode, target);
                // A later record may have taken the pages from the inode.
                let is_explained = view.slots.get(&inode).is_some_and(|(later, _)| *later > lsn);
                let is_believed = owners.is_believed(inode);
                if owned.len_bytes < target.len_bytes && !is_explained && is_believed {
                    inconsistencies.push((
                        lsn,
                        format!(
                            "has content for inode {inode} at byte {}, which is not the \
                         inode's; it is left out",
                            target.offset_bytes
                        ),
                    ));
                }
                let Some((source, sum)) = source.filter(|_| owned.len_bytes > 0) else { continue };
                let is_outside = source.offset_bytes < data.offset_bytes
                    || source.end_bytes() > data.end_bytes();
                if is_outside || !owners.may_hold_content_for(&inodes, source) {
                    inconsistencies.push((
                        lsn,
                        format!(
                            "takes content for inode {inode} from byte {}, where \
                     there can be none for it",
                            source.offset_bytes
                        ),
                    ));
                    continue;
                }
                let was_too_much = copied_bytes > most_copied_bytes(&data);
                copied_bytes = copied_bytes.saturating_add(source.len_bytes);
                if copied_bytes <= most_copied_bytes(&data) {
                    copies.push((lsn, inode, source, sum));
                } else if !was_too_much {
                    let inconsistency = "takes more content from beside the log than there can be";
                    inconsistencies.push((lsn, inconsistency.to_owned()));
                }
            }
            Ok(())
        });
        for (lsn, inconsistency) in inconsistencies {
            self.explain_record(&layout, lsn, &inconsistency);
        }
        for (lsn, inode, source, sum) in copies {
            self.check_copied(lsn, inode, source, sum);
        }
    }

    fn check_copied(&mut self, lsn: u64, inode: u64, source: ByteRange, stored: u64) {
        const PIECE_BYTES: u64 = 1 << 20;
        let mut sum = Checksum::new();
        for done in (0..source.len_bytes).step_by(PIECE_BYTES as usize) {
            let piece = ByteRange {
                offset_bytes: source.offset_bytes + done,
                len_bytes: PIECE_BYTES.min(source.len_bytes - done),
            };
            let Some(bytes) = self.read(piece, "Content of a large commit") else { return };
            sum.update(&bytes);
        }
        if sum.finish() != stored {
            self.find_of_inode(
                Severity::Damage,
                FindingKind::CopiedContent,
                inode,
                source,
                text(
                    format!(
                        "Pages that the record at position {lsn} of the log committed for \
                     inode {inode} have changed where they lie, at byte {}",
                        source.offset_bytes
                    ),
                    "That commit was acknowledged, and its content is damaged",
                    RESTORE,
                ),
            );
        }
    }
}

/// The inconsistencies of a record, without regard to other records.
fn inconsistencies_of(record: &Record, layout: &Layout) -> Vec<String> {
    let data = layout.data();
    let mut inconsistencies = Vec::new();
    let is_outside = |range: ByteRange| {
        range.offset_bytes < data.offset_bytes || range.end_bytes() > data.end_bytes()
    };
    for entry in &record.entries {
        match *entry {
            // Checked by `change_slots`.
            Entry::Slot { .. } => {}
            Entry::Pages { inode, target, .. }
            | Entry::Patches { inode, target, .. }
            | Entry::Copied { inode, target, .. } => {
                if inode == HEAD_SLOT || inode >= layout.slots() {
                    inconsistencies.push(format!("has content for inode {inode}, which cannot be"));
                }
                if is_outside(target) {
                    let byte = target.offset_bytes;
                    inconsistencies
                        .push(format!("has content for byte {byte}, where no object can be"));
                }
            }
            Entry::NewRun { range } if is_outside(range) => {
                let byte = range.offset_bytes;
                inconsistencies.push(format!("takes pages at byte {byte}, where no object can be"));
            }
            Entry::Exposed { range } if is_outside(range) => {
                let byte = range.offset_bytes;
                inconsistencies
                    .push(format!("takes content from byte {byte}, where no object can be"));
            }
            Entry::NewRun { .. } | Entry::Exposed { .. } => {}
        }
    }
    inconsistencies
}
