//! Packed records that are damaged, or forged with correct checksums.

use crate::support::sample::page;
use crate::support::*;
use aquifer_check::{CheckOptions, check};
use aquifer_crashkit::unguarded::UnguardedPool;
use aquifer_pool::format::inode::Inode;
use aquifer_pool::format::record::{HEADER_BYTES, Header, skip_page};
use aquifer_pool::format::{FormatError, PAGE_BYTES};
use aquifer_pool::{Pool, PoolError, PoolOptions, Transaction};

const POOL_BYTES: usize = 512 << 10;
const BOOT: u64 = 7;

fn in_boot(boot: u64) -> PoolOptions {
    alone().boot(boot)
}

/// Writes an object of whole pages, filled with the number of its version; visible at once.
fn write(pool: &Pool, name: &str, version: u64) {
    let reservation = pool.reserve(2, 1).unwrap();
    let (runs, bytes) = (reservation.runs().to_vec(), reservation.whole().bytes());
    pool.store_unguarded(bytes.offset_bytes, &page(name, version).repeat(2)).unwrap();
    let before = pool.inodes().unwrap().into_iter().find(|inode| inode.name == name.as_bytes());
    pool.change_unguarded(vec![reservation], |transaction| {
        let inode = match &before {
            Some(before) => before.clone(),
            None => transaction.free_inode()?,
        };
        transaction.put(Inode {
            kind: aquifer_pool::format::inode::InodeKind::Object,
            layout_version: version,
            size_bytes: bytes.len_bytes,
            runs: runs.clone(),
            name: name.as_bytes().to_vec(),
            ..inode
        });
        Ok(())
    })
    .unwrap();
}

/// A record of the log, or one that only fills space.
#[derive(Debug, Clone, Copy)]
struct Found {
    header: Header,
    offset: usize,
}

fn found(image: &[u8]) -> Vec<Found> {
    let superblock = forge::superblock(image);
    let log = superblock.layout.log();
    let mut lsn = superblock.tail_lsn;
    let mut all = Vec::new();
    loop {
        let offset = (log.offset_bytes + lsn % log.len_bytes) as usize;
        let identity = forge::identity(&superblock);
        let header = Header::decode(&image[offset..], lsn, log.len_bytes, identity);
        let Ok(header) = header else { return all };
        all.push(Found { header, offset });
        lsn = header.end_lsn();
    }
}

/// A pool in which versions 1 to 5 of an object were written, the first two of them synced; and the
/// records of its log.
fn sample() -> (Vec<u8>, Vec<Found>) {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(in_boot(BOOT)).create_on(media.clone()).unwrap();
    drop(pool.reserve(30, 1).unwrap());
    pool.checkpoint().unwrap();
    for version in 1..=5 {
        write(&pool, "alpha", version);
        if version == 2 {
            pool.sync().unwrap();
        }
    }
    let image = media.image();
    pool.die();
    let found = found(&image);
    let kinds: Vec<_> = found.iter().map(|found| found.header.is_close).collect();
    assert_eq!(kinds, [false, false, true, false, false, false]);
    (image, found)
}

/// The version of the object that is found when the image is opened in this boot. Checks that it is
/// whole and that the pool keeps working.
fn version_in(image: &[u8], boot: u64) -> Result<u64, PoolError> {
    let media = FileMedia::of(image);
    let version = |pool: &Pool| {
        let alpha = pool.inodes().unwrap().into_iter().next();
        alpha.map_or(0, |alpha| {
            let mut bytes = vec![0; alpha.size_bytes as usize];
            pool.load(alpha.runs[0].bytes().offset_bytes, &mut bytes).unwrap();
            assert!(bytes == page("alpha", alpha.layout_version).repeat(2), "{alpha:?}");
            alpha.layout_version
        })
    };
    let pool = in_boot(boot).open_on(media.clone())?;
    let found = version(&pool);
    write(&pool, "alpha", 50);
    pool.die();
    let pool = in_boot(boot).open_on(media)?;
    assert_eq!(version(&pool), 50);
    Ok(found)
}

#[test]
fn what_is_not_marked_counts_until_the_machine_is_restarted() {
    let (image, _) = sample();
    assert_eq!(version_in(&image, BOOT).unwrap(), 5);
    assert_eq!(version_in(&image, BOOT + 1).unwrap(), 2);
    for (boot, is_said) in [(BOOT, false), (BOOT + 1, true)] {
        let options = CheckOptions { boot: Some(boot), ..CheckOptions::default() };
        let report = check(FileMedia::of(&image), &options).unwrap();
        assert!(report.is_sound(), "{report}");
        assert_eq!(report.to_string().contains("were never made durable"), is_said, "{report}");
    }
}

/// Each bit of a packed record, also of one that lies in two pages.
#[test]
fn a_damaged_packed_record_ends_the_log() {
    let (image, found) = sample();
    let crosses = |found: &&Found| {
        let start = found.header.lsn % PAGE_BYTES;
        start + found.header.len_bytes > PAGE_BYTES
    };
    let media = FileMedia::of(&image);
    let pool = in_boot(BOOT).open_on(media.clone()).unwrap();
    // After a record that takes most of a page, one of the next few crosses the page boundary.
    let exposed = pool.layout().data();
    let fill = |transaction: &mut Transaction<'_>| {
        (0..80).for_each(|_| transaction.expose(exposed));
        Ok(())
    };
    pool.change_unguarded(vec![], fill).unwrap();
    (6..14).for_each(|version| write(&pool, "alpha", version));
    let longer = media.image();
    pool.die();
    let all = self::found(&longer);
    let index = all.iter().position(|found| crosses(&found)).expect("one crosses");
    for (image, all, index) in [(&image, &found, 4), (&longer, &all, index)] {
        let record = all[index];
        let before = version_in(image, BOOT).unwrap() - (all.len() - index) as u64;
        for bit in (0..record.header.len_bytes as usize * 8).step_by(89) {
            let mut damaged = image.clone();
            damaged[record.offset + bit / 8] ^= 1 << (bit % 8);
            assert_eq!(version_in(&damaged, BOOT).unwrap(), before, "bit {bit}");
        }
    }
}

/// The loss of acknowledged records is noticed, wherever the log ends now: later records prove it.
#[test]
fn a_damaged_packed_record_that_was_acknowledged_is_noticed() {
    let (image, found) = sample();
    for record in &found[..2] {
        let mut damaged = image.clone();
        damaged[record.offset + 100] ^= 1;
        for boot in [BOOT, BOOT + 1] {
            let error = version_in(&damaged, boot).expect_err("it lost what was acknowledged");
            // After a restart only marked records count.
            let expected = if boot == BOOT { record } else { &found[0] };
            let is_it = matches!(error, PoolError::DamagedLog { end_lsn, .. } if end_lsn == expected.header.lsn);
            assert!(is_it, "{error:?}");
        }
    }
}

/// A mark is valid for one closing record only.
#[test]
fn only_a_close_can_be_marked() {
    let (image, found) = sample();
    let close = found[2];
    let mark = close.offset + HEADER_BYTES..close.offset + HEADER_BYTES + 8;
    assert_eq!(image[mark.clone()], close.header.close_mark());
    let mut unmarked = image.clone();
    unmarked[mark.clone()].fill(0);
    assert!(matches!(version_in(&unmarked, BOOT + 1), Err(PoolError::DamagedLog { .. })));

    // At the end of the log: the mark of another closing record, or a mark in a record that only
    // fills space, does not count.
    let end = found.last().unwrap();
    let end = Found { offset: end.offset + end.header.len_bytes as usize, ..*end };
    let superblock = forge::superblock(&image);
    let end_lsn = end.header.end_lsn();
    let len_bytes = PAGE_BYTES - end_lsn % PAGE_BYTES;
    let skip = skip_page(end_lsn, len_bytes, 0, forge::identity(&superblock));
    let log_bytes = superblock.layout.log().len_bytes;
    let close_of = |kind: u8| {
        let mut record = skip[..128].to_vec();
        record[4] = kind;
        forge::seal_record(&mut record);
        let header =
            Header::decode(&record, end_lsn, log_bytes, forge::identity(&superblock)).unwrap();
        (record, header.close_mark())
    };
    let forged = |kind: u8, mark: [u8; 8]| {
        let mut forged = image.clone();
        forged[end.offset..end.offset + 128].copy_from_slice(&close_of(kind).0);
        forged[end.offset + 64..end.offset + 72].copy_from_slice(&mark);
        version_in(&forged, BOOT + 1).unwrap()
    };
    assert_eq!(forged(3, close_of(3).1), 5, "it is a right one");
    assert_eq!(forged(3, close.header.close_mark()), 2, "of another close");
    assert_eq!(forged(2, close_of(2).1), 2, "not a close");
}

/// A closing record has room for its mark.
#[test]
fn a_close_without_room_for_its_mark_is_none() {
    let (image, found) = sample();
    let mut short = image.clone();
    let last = found.last().unwrap();
    let bytes = &mut short[last.offset..last.offset + 64];
    bytes[4] = 3;
    bytes[24..32].copy_from_slice(&64u64.to_le_bytes());
    bytes[32..36].fill(0);
    forge::seal_record(bytes);
    assert_eq!(version_in(&short, BOOT).unwrap(), 4);
    assert_eq!(version_in(&short, BOOT + 1).unwrap(), 2);
}

/// Words of a slot count only if the log has the whole slot: applied to the slot on media they
/// might create one that never existed.
#[test]
fn a_patch_of_what_the_log_does_not_have_makes_no_slot_whole() {
    let media = FileMedia::of(&vec![0; POOL_BYTES]);
    let pool = small(in_boot(BOOT)).create_on(media.clone()).unwrap();
    write(&pool, "alpha", 1);
    let number = pool.inodes().unwrap()[0].number;
    pool.checkpoint().unwrap();
    write(&pool, "alpha", 2);
    write(&pool, "alpha", 3);
    let image = media.image();
    pool.die();
    assert_eq!(version_in(&image, BOOT).unwrap(), 3);
    let mut found = found(&image);
    let entry = |record: &Found| &image[record.offset + HEADER_BYTES..][..16];
    found.retain(|found| entry(found)[8..] == number.to_le_bytes());
    let kind_of = |record: &Found| entry(record)[0];
    let (whole, patch) = (1, 7);
    assert_eq!([kind_of(&found[0]), kind_of(&found[1])], [whole, patch], "behind a checkpoint");
    let mut forged = image.clone();
    let record = found[0];
    forged[record.offset + HEADER_BYTES] = patch;
    forge::seal_record(&mut forged[record.offset..][..record.header.len_bytes as usize]);
    let error = version_in(&forged, BOOT).expect_err("a patch of what is not there");
    assert!(matches!(error, PoolError::Damaged { .. }), "{error:?}");
    let reading = in_boot(BOOT).read_only(true);
    let pool = reading.open_on(FileMedia::of(&forged)).unwrap();
    let error = pool.inode(number).unwrap_err();
    assert!(matches!(error, PoolError::Damaged { .. }), "{error:?}");
    let options = CheckOptions { boot: Some(BOOT), ..CheckOptions::default() };
    let report = check(FileMedia::of(&forged), &options).unwrap().to_string();
    assert!(report.contains("whose others the log does not have"), "{report}");
}

/// A record exposes only bytes of the data area, unless it was forged.
#[test]
fn exposed_bytes_outside_of_the_data_are_refused() {
    let (image, found) = sample();
    let record = found.last().unwrap();
    let entries = record.offset + HEADER_BYTES;
    let exposed = (0..record.header.entry_count as usize)
        .map(|index| entries + index * 40)
        .find(|entry| image[*entry] == 6)
        .expect("it exposes its pages");
    let layout = forge::superblock(&image).layout;
    for offset_bytes in [0, layout.log().offset_bytes, layout.len_bytes(), u64::MAX - 8192] {
        let mut forged = image.clone();
        forged[exposed + 8..exposed + 16].copy_from_slice(&offset_bytes.to_le_bytes());
        let bytes = &mut forged[record.offset..][..record.header.len_bytes as usize];
        forge::seal_record(bytes);
        for options in [in_boot(BOOT), in_boot(BOOT).read_only(true)] {
            let media = FileMedia::of(&forged);
            let error = options.open_on(media.clone()).expect_err("a forged record");
            let is_it = matches!(
                error,
                PoolError::Damaged { error: FormatError::Field { field: "target", .. }, .. }
            );
            assert!(is_it, "{error:?}");
            assert!(media.image() == forged, "nothing was written");
        }
        // The record does not count, so it does no harm.
        assert_eq!(version_in(&forged, BOOT + 1).unwrap(), 2);
    }
    // A program cannot write such a record by mistake.
    let pool = in_boot(BOOT).open_on(FileMedia::of(&image)).unwrap();
    for range in [layout.log(), layout.metadata()] {
        let outcome = pool.change_unguarded(vec![], |transaction| {
            transaction.expose(range);
            Ok(())
        });
        assert!(matches!(outcome, Err(PoolError::Parameter { .. })), "{outcome:?}");
        let outcome = pool.transact_unguarded(vec![], |transaction| {
            transaction.expose(range);
            Ok(())
        });
        assert!(matches!(outcome, Err(PoolError::Parameter { .. })), "{outcome:?}");
    }
}
