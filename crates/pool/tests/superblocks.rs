//! Superblocks that are being written while they are read, and ones whose numbers are as high as they may be.

mod common;
mod support;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_pool::check::{CheckOptions, check_on};
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::superblock::{COPIES, Superblock};
use aquifer_pool::media::{ByteRange, Media, MediaError, PersistenceDomain};
use aquifer_pool::{OpenOptions, Pool, PoolError};
use aquifer_testkit::unguarded::UnguardedMedia;
use common::{contents, create};
use support::{FileMedia, alone, reading, small};

/// Media whose superblocks are being written, at first, whenever they are read: each time another part is new.
struct BeingWritten {
    media: Arc<FileMedia>,
    torn_reads: AtomicU64,
}

impl Media for BeingWritten {
    fn path(&self) -> &Path {
        self.media.path()
    }

    fn len_bytes(&self) -> u64 {
        self.media.len_bytes()
    }

    fn domain(&self) -> PersistenceDomain {
        self.media.domain()
    }

    fn is_writable(&self) -> bool {
        self.media.is_writable()
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError> {
        self.media.read_at(offset_bytes, bytes)?;
        let is_superblock = offset_bytes < COPIES * PAGE_BYTES;
        let left = self.torn_reads.load(Relaxed);
        if is_superblock && left > 0 {
            self.torn_reads.store(left - 1, Relaxed);
            // The sequence number, of a copy whose checksum is another's.
            bytes[32..40].copy_from_slice(&(1000 + left).to_le_bytes());
        }
        Ok(())
    }

    unsafe fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.media.write_unguarded(offset_bytes, bytes)
    }

    unsafe fn write_durable(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.media.write_durable_unguarded(offset_bytes, bytes)
    }

    fn write_back(&self, ranges: &[ByteRange]) -> Result<(), MediaError> {
        self.media.write_back(ranges)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.media.flush()
    }

    fn grow(&self, len_bytes: u64) -> Result<(), MediaError> {
        self.media.grow(len_bytes)
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.media.file()
    }

    fn maps_privately(&self) -> bool {
        true
    }
}

fn image() -> Vec<u8> {
    let media = FileMedia::of(&vec![0; 1 << 20]);
    let pool = Pool::create_on(media.clone(), &small(), &alone()).unwrap();
    create(&pool, b"object", 2).unwrap();
    drop(pool);
    media.image()
}

#[test]
fn superblocks_that_are_being_written_are_read_again() {
    let image = image();
    for torn_reads in [1, 2, 3, 40] {
        let media = FileMedia::of(&image);
        let media = Arc::new(BeingWritten { media, torn_reads: torn_reads.into() });
        let pool = Pool::open_on(media, &reading()).unwrap();
        assert!(contents(&pool).unwrap().contains_key(b"object".as_slice()));
    }
}

#[test]
fn damaged_superblocks_are_not_taken_for_ones_that_are_being_written() {
    let mut image = image();
    for copy in 0..COPIES {
        image[(copy * PAGE_BYTES) as usize + 40] ^= 1;
    }
    let opened = Pool::open_on(FileMedia::of(&image), &alone());
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

/// What is as high as it may be can be opened, written to, and opened again.
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
            let pool = Pool::open_on(media.clone(), &alone())
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
            let report = check_on(&*FileMedia::of(&media.image()), &CheckOptions::default());
            assert!(report.is_sound(), "{what}: {report}");
        }
        let pool = Pool::open_on(FileMedia::of(&media.image()), &OpenOptions::default()).unwrap();
        assert_eq!(contents(&pool).unwrap().into_keys().collect::<Vec<_>>(), expected, "{what}");
    }
}
