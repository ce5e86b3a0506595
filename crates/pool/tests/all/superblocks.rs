//! Superblocks that change while they are read, superblocks with the highest possible numbers, and
//! logs that change while they are read.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use crate::common::{contents, create};
use crate::support::{FileMedia, alone, reading, small};
use aquifer_check::{CheckOptions, check};
use aquifer_crashkit::unguarded::UnguardedMedia;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::superblock::{COPIES, Superblock};
use aquifer_pool::media::{ByteRange, Media, MediaError, PersistenceDomain};
use aquifer_pool::{Pool, PoolError};

/// Media that change while they are read.
#[derive(Default)]
struct Unsteady {
    media: Option<Arc<FileMedia>>,
    /// The number of reads for which the superblocks are torn, each time differently.
    torn_reads: AtomicU64,
    /// Bytes whose write the system has lost, and which it drops from memory before their `n`-th
    /// read.
    lost: Option<ByteRange>,
    reads_before_loss: AtomicU64,
    /// The image before metadata is written.
    before_metadata: OnceLock<Vec<u8>>,
}

impl Unsteady {
    fn inner(&self) -> &FileMedia {
        self.media.as_ref().unwrap()
    }
}

impl Media for Unsteady {
    fn path(&self) -> &Path {
        self.inner().path()
    }

    fn len_bytes(&self) -> u64 {
        self.inner().len_bytes()
    }

    fn domain(&self) -> PersistenceDomain {
        self.inner().domain()
    }

    fn is_writable(&self) -> bool {
        self.inner().is_writable()
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        let range = ByteRange { offset_bytes, len_bytes: bytes.len() as u64 };
        if let Some(lost) = self.lost.filter(|lost| range.intersection(*lost).len_bytes > 0)
            && self.reads_before_loss.fetch_sub(1, Relaxed) == 1
        {
            self.inner().write_unguarded(lost.offset_bytes, &vec![0; lost.len_bytes as usize])?;
        }
        self.inner().read_at(offset_bytes, bytes)?;
        let is_superblock = offset_bytes < COPIES * PAGE_BYTES;
        let left = self.torn_reads.load(Relaxed);
        if is_superblock && left > 0 {
            self.torn_reads.store(left - 1, Relaxed);
            // The sequence number of a copy whose checksum is that of another.
            bytes[32..40].copy_from_slice(&(1000 + left).to_le_bytes());
        }
        Ok(())
    }

    unsafe fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        if offset_bytes == COPIES * PAGE_BYTES {
            self.before_metadata.get_or_init(|| self.inner().image());
        }
        self.inner().write_unguarded(offset_bytes, bytes)
    }

    unsafe fn write_durable(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.inner().write_durable_unguarded(offset_bytes, bytes)
    }

    fn write_back(&self, ranges: &[ByteRange]) -> Result<(), MediaError> {
        self.inner().write_back(ranges)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.inner().flush()
    }

    fn grow(&self, len_bytes: u64) -> Result<(), MediaError> {
        self.inner().grow(len_bytes)
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.inner().file()
    }

    fn maps_privately(&self) -> bool {
        true
    }
}

fn image() -> Vec<u8> {
    let media = FileMedia::of(&vec![0; 1 << 20]);
    let pool = small(alone()).create_on(media.clone()).unwrap();
    create(&pool, b"object", 2).unwrap();
    drop(pool);
    media.image()
}

#[test]
fn superblocks_that_are_being_written_are_read_again() {
    let image = image();
    for torn_reads in [1, 2, 3, 40] {
        let media = FileMedia::of(&image);
        let media = Arc::new(Unsteady {
            media: Some(media),
            torn_reads: torn_reads.into(),
            ..Unsteady::default()
        });
        let pool = reading().open_on(media).unwrap();
        assert!(contents(&pool).unwrap().contains_key(b"object".as_slice()));
    }
}

#[test]
fn damaged_superblocks_are_not_taken_for_ones_that_are_being_written() {
    let mut image = image();
    for copy in 0..COPIES {
        image[(copy * PAGE_BYTES) as usize + 40] ^= 1;
    }
    let opened = alone().open_on(FileMedia::of(&image));
    assert!(matches!(opened, Err(PoolError::Damaged { .. })), "{opened:?}");
}

fn with(image: &[u8], change: impl Fn(&mut Superblock)) -> Vec<u8> {
    let mut image = image.to_vec();
    for (copy, page) in (0..COPIES).zip(image.chunks_exact_mut(PAGE_BYTES as usize)) {
        let mut superblock = Superblock::decode(page, copy).unwrap();
        change(&mut superblock);
        page.copy_from_slice(&superblock.encode(copy));
    }
    image
}

/// A pool with the highest possible numbers can be opened, written to, and opened again.
#[test]
fn no_number_of_a_superblock_keeps_a_pool_closed_for_ever() {
    const MOST: u64 = u64::MAX / 2;
    let image = image();
    let forged: [(&str, Vec<u8>); 6] = [
        ("generation", with(&image, |superblock| superblock.generation = MOST)),
        ("nearly", with(&image, |superblock| superblock.generation = MOST - 1)),
        ("sequence", with(&image, |superblock| superblock.sequence = MOST)),
        ("next to last sequence", with(&image, |superblock| superblock.sequence = MOST - 2)),
        ("tail", with(&image, |superblock| superblock.tail_lsn = MOST - (PAGE_BYTES - 1))),
        (
            "all",
            with(&image, |superblock| {
                superblock.generation = MOST;
                superblock.sequence = MOST;
                superblock.tail_lsn = MOST - (5 * PAGE_BYTES - 1);
            }),
        ),
    ];
    for (what, image) in forged {
        let media = FileMedia::of(&image);
        let mut expected = vec![b"object".to_vec()];
        for round in 0..4 {
            let pool = alone()
                .open_on(media.clone())
                .unwrap_or_else(|error| panic!("{what}, round {round}: {error}"));
            let name = format!("object-{round}").into_bytes();
            create(&pool, &name, 1).unwrap();
            expected.push(name);
            if round % 2 == 0 {
                pool.checkpoint().unwrap();
            }
            assert_eq!(contents(&pool).unwrap().into_keys().collect::<Vec<_>>(), expected);
            match round {
                // Its processes are killed.
                1 => pool.die(),
                _ => drop(pool),
            }
            let report = check(FileMedia::of(&media.image()), &CheckOptions::default()).unwrap();
            assert!(report.is_sound(), "{what}: {report}");
        }
        let pool = Pool::options().open_on(FileMedia::of(&media.image())).unwrap();
        assert_eq!(contents(&pool).unwrap().into_keys().collect::<Vec<_>>(), expected, "{what}");
    }
}

/// A part of the log whose write the system has lost is dropped from memory at any moment of
/// recovery. Records that count are on media before metadata is written in place; or the pool is
/// not opened, and the next opening recovers what is there.
#[test]
fn a_log_that_changes_during_recovery_does_not_count_and_is_not_applied() {
    let media = FileMedia::of(&image());
    let pool = alone().open_on(media.clone()).unwrap();
    let log = pool.layout().log();
    let before = media.image();
    create(&pool, b"later", 2).unwrap();
    pool.sync().unwrap();
    let written = media.image();
    pool.die();
    let is_changed = |at: &u64| {
        let page = *at as usize..(at + PAGE_BYTES) as usize;
        before[page.clone()] != written[page]
    };
    let pages = (log.offset_bytes..log.end_bytes()).step_by(PAGE_BYTES as usize);
    let changed = pages.filter(is_changed).last().expect("the log was written to");
    let lost = Some(ByteRange { offset_bytes: changed, len_bytes: PAGE_BYTES });
    let mut refused = 0;
    for reads_before_loss in 1..20 {
        let media = Arc::new(Unsteady {
            media: Some(FileMedia::of(&written)),
            lost,
            reads_before_loss: reads_before_loss.into(),
            ..Unsteady::default()
        });
        let names = |media: Arc<dyn Media>| -> Result<Vec<_>, PoolError> {
            let pool = alone().open_on(media)?;
            Ok(contents(&pool).unwrap().into_keys().collect())
        };
        match names(media.clone()) {
            Ok(found) => {
                if let Some(at_power_cut) = media.before_metadata.get() {
                    let after = names(FileMedia::of(at_power_cut)).unwrap();
                    assert_eq!(after, found, "lost before read {reads_before_loss}");
                }
            }
            Err(error) => {
                assert!(matches!(error, PoolError::Damaged { .. }), "{error}");
                refused += 1;
                names(media).unwrap();
            }
        }
    }
    println!("refused {refused} times");
}
