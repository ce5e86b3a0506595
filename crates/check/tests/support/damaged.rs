//! Exercises a damaged pool of files: run by the fuzzer for hours, by tests briefly.

use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, OnceLock};

use aquifer_check::{CheckOptions, CheckReport, FindingKind, Severity};
use aquifer_fs::Files;
use aquifer_pool::PoolError;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use aquifer_pool::media::Media;

use super::pool::{FileMedia, alone, forge, reading};
use super::{crashed_image, read_everything};

const PAGE: usize = PAGE_BYTES as usize;

/// Checks, reads, writes and repairs a pool with arbitrary content. Panics if a file shows another
/// file's bytes, if a check, a reader or a failed open writes something, if the check and `open`
/// disagree, or if a repair leaves something that it can fix.
///
/// `has_forged_run`: the image has a run that points at arbitrary pages, so reads of stale bytes in
/// free pages are allowed.
pub fn exercise(image: &[u8], has_forged_run: bool) -> (CheckReport, bool) {
    let read = |files: &Files| {
        let seen = read_everything(files, 256);
        let foreign = seen.foreign.filter(|_| !has_forged_run);
        assert_eq!(foreign, None, "a file shows another one's bytes");
        seen
    };
    let media = FileMedia::of(image);
    let report = aquifer_check::check(media.clone(), &CheckOptions::default()).unwrap();
    let _ = format!("{report}\n{report:?}");
    assert!(media.image() == image, "the check wrote something");
    if let Ok(pool) = reading().open_on(media.clone()) {
        read(&Files::new(pool));
    }
    assert!(media.image() == image, "a reader wrote something");

    let opened = alone().open_on(media.clone());
    let has_opened = opened.is_ok();
    match opened {
        Ok(pool) => {
            let files = Files::new(pool);
            read(&files);
            change_everything(&files);
            read(&files);
            drop(files);
            // Writing has made nothing worse.
            let after = aquifer_check::check(media.clone(), &CheckOptions::default()).unwrap();
            assert!(!report.is_sound() || after.is_sound(), "sound before, and now:\n{after}");
            if let Err(error) = alone().open_on(media) {
                panic!(
                    "it was open just now: {error}; the check said before\n{report}\nand now\n{after}"
                );
            }
        }
        Err(error) => {
            println!("not opened: {error}");
            assert!(media.image() == image, "an opening that failed wrote something");
        }
    }
    assert_agreement(&report, has_opened);
    repair(image, &report);
    (report, has_opened)
}

fn repair(image: &[u8], report: &CheckReport) {
    if report.pool.is_none() {
        return;
    }
    let media = FileMedia::of(image);
    match aquifer_check::repair(media, &CheckOptions::default()) {
        Ok(repaired) if report.is_sound() => {
            let left = repaired.after.worst();
            assert!(left <= Some(Severity::Note), "left after a repair:\n{}", repaired.after);
        }
        Ok(_) => {}
        Err(error) => panic!("a repair of\n{report}\nfailed: {error}"),
    }
}

/// Changes something at each reachable path; ignores errors.
fn change_everything(files: &Files) {
    for path in ["/plain", "/pieces", "/new", "/a/b/deep", "/second", "/empty", "/many"] {
        let _ = files.set_permissions(path, std::fs::Permissions::from_mode(0o600));
        let _ = files.set_attribute(path, "user.more", [1; 100], aquifer_fs::SetMode::Any);
        if let Ok(file) = files.options().write(true).open(path) {
            let _ = file.write_all_at(&[0; 100], 5000);
            let _ = file.set_len(9000);
        }
    }
    let _ = files.rename("/a", "/a/b/c");
    let _ = files.rename("/a/c", "/many/c");
    let _ = files.hard_link("/new", "/a/b/new");
    let _ = files.remove_file("/second");
    let _ = files.remove_file("/short");
    let _ = files.remove_file("/long");
    for (path, _) in super::SPECIAL_FILES {
        let _ = files.set_permissions(path, std::fs::Permissions::from_mode(0o600));
        let _ = files.set_attribute(path, "trusted.more", [1; 100], aquifer_fs::SetMode::Any);
        let _ = files.hard_link(path, "/many/special");
        let _ = files.remove_file(path);
    }
    let _ = files.remove_dir_all("/many");
    let _ = files.create_dir("/fresh");
    if let Ok(file) = files.create_file("/fresh/file") {
        let _ = file.set_len(20_000);
        let mut bytes = [1; 20_000];
        if file.read_at(&mut bytes, 0).is_ok() {
            assert!(bytes.iter().all(|&byte| byte == 0), "a new file is not zero");
        }
    }
}

/// A sound pool can be opened, and one that cannot be opened is not sound.
fn assert_agreement(report: &CheckReport, has_opened: bool) {
    let bad = || report.findings.iter().filter(|finding| finding.severity == Severity::Damage);
    // Recovery applies the words to what happens to be at the slot's place.
    if bad().any(|finding| finding.what.contains("whose others the log does not have")) {
        return;
    }
    let mut bad = bad();
    let is_harmless = bad.all(|finding| match finding.kind {
        FindingKind::Attributes | FindingKind::Target | FindingKind::SameName => true,
        // Names out of order do not prevent opening, nor do holes.
        FindingKind::Directory => finding.what.contains("not in order"),
        FindingKind::FilePages => finding.what.contains("more pages than"),
        FindingKind::Address | FindingKind::SharedAddresses | FindingKind::UsedFreshPage => true,
        FindingKind::Record => !finding.what.contains("takes content"),
        _ => false,
    });
    assert_eq!(
        is_harmless && report.can_be_written() && report.unlisted == 0,
        has_opened,
        "opened: {has_opened}, but the check said:\n{report}"
    );
}

/// Builds a pool with some bytes changed, some of them with a valid checksum, and exercises it:
/// four bytes of `data` give a place, a value, and what to seal.
pub fn image(data: &[u8]) {
    static SAMPLE: OnceLock<Vec<u8>> = OnceLock::new();
    let mut image = SAMPLE.get_or_init(crashed_image).clone();
    let layout = forge::superblock(&image).layout;
    let metadata = layout.metadata();
    let records = forge::records(&image);
    for change in data.chunks_exact(4).take(64) {
        let place = usize::from(change[0]) | usize::from(change[1]) << 8;
        let in_log = change[3] & 2 != 0 && !records.is_empty();
        let at = if in_log {
            let record = records[place % records.len()];
            record.offset + (place / records.len()) % record.len
        } else {
            metadata.offset_bytes as usize + place % metadata.len_bytes as usize
        };
        image[at] = change[2];
        if change[3] & 1 == 0 {
            continue;
        }
        if in_log {
            let record = records[place % records.len()];
            forge::seal_record(&mut image[record.offset..record.offset + record.len]);
        } else {
            let number = (at as u64 - metadata.offset_bytes) / SLOT_BYTES as u64;
            forge::seal_slot(forge::slot(&mut image, &layout, number));
        }
    }
    exercise(&image, true);
}

/// Media with one unreadable page.
pub fn with_unreadable_page(path: &std::path::Path, page: u64) -> Arc<dyn Media> {
    let hole =
        aquifer_pool::media::ByteRange { offset_bytes: page * PAGE as u64, len_bytes: PAGE as u64 };
    FileMedia::open_with_unreadable(path, hole)
}

/// Opens for reading if possible; asserts that all errors are typed.
pub fn read_if_possible(media: Arc<dyn Media>) {
    match reading().background(false).open_on(media) {
        Ok(pool) => {
            let seen = read_everything(&Files::new(pool), 256);
            assert_eq!(seen.foreign, None, "a file shows another one's bytes");
        }
        Err(PoolError::Media(_) | PoolError::Damaged { .. } | PoolError::DamagedLog { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}
