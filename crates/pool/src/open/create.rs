//! Creating a pool.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use uuid::Uuid;

use crate::error::{PoolError, Result};
use crate::format::PAGE_BYTES;
use crate::format::file::{FileInode, FileKind, ROOT_INODE};
use crate::format::inode::{HEAD_SLOT, PoolHead};
use crate::format::layout::{Layout, MIN_LOG_PAGES, MIN_POOL_BYTES};
use crate::format::run::{MAX_PAGES, Run};
use crate::format::saved::SavedLayout;
use crate::format::superblock::{COPIES, SAVED, Superblock};
use crate::log::superblocks::write_superblocks;
use crate::media::lock_file::LockFile;
use crate::media::{ByteRange, Media};
use crate::open::recovery::{self, OnlyOne};
use crate::options::PoolOptions;
use crate::random::new_uuid;

/// Nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// The root directory of a new pool: it belongs to the creator, and other users may read it.
fn root_directory() -> Result<FileInode> {
    let now_ns = now_ns() as i64;
    let owner = aquifer_sys::credentials::effective();
    Ok(FileInode {
        created_ns: now_ns,
        changed_ns: now_ns,
        modified_ns: now_ns,
        accessed_ns: now_ns,
        mode: 0o755,
        uid: owner.uid,
        gid: owner.gid,
        links: 2,
        parent: ROOT_INODE,
        seed: new_uuid()?.as_u64_pair().0,
        ..FileInode::new(FileKind::Directory, ROOT_INODE, 1)
    })
}

/// Keeps all openers out of media that may not contain a pool yet; `locks` keep them out already.
pub(crate) fn lock_to_format(
    media: &dyn Media,
    options: &PoolOptions,
    locks: Option<LockFile>,
) -> Result<OnlyOne> {
    if !media.is_writable() {
        return Err(PoolError::ReadOnly {
            path: media.path().to_path_buf(),
            reason: "the file or its file system is read-only",
        });
    }
    let alone = options.clone().read_only(false).exclusive(true);
    recovery::lock_for_one(media, &alone, locks)
}

/// Whether a pool is long enough for pages of a saved state.
pub(crate) fn has_room_for_saved(layout: &Layout) -> bool {
    const MIN_SAVED_BYTES: u64 = 4 << 20;
    /// The saved state may take this part of the data.
    const MOST_PART: u64 = 16;
    let data_pages = layout.page_count - layout.data_start_page;
    layout.len_bytes() >= MIN_SAVED_BYTES
        && SavedLayout::new(layout).pages() <= data_pages / MOST_PART
}

impl PoolOptions {
    /// The positions of the parts of a new pool of `len_bytes`.
    ///
    /// # Errors
    /// [`PoolError::Parameter`] if the options do not fit the length.
    pub fn layout(&self, len_bytes: u64) -> Result<Layout> {
        if len_bytes < MIN_POOL_BYTES {
            return Err(PoolError::Parameter {
                what: "the size",
                value: format!("{len_bytes} bytes"),
                reason: "a pool has at least 256 KiB",
            });
        }
        if len_bytes / PAGE_BYTES > MAX_PAGES {
            return Err(PoolError::Parameter {
                what: "the size",
                value: format!("{len_bytes} bytes"),
                reason: "a pool has at most 4 PiB",
            });
        }
        let inodes = self.inodes.unwrap_or((len_bytes >> 14).clamp(32, 131_071));
        let log_bytes = self.log_bytes.unwrap_or((len_bytes / 4).clamp(64 << 10, 128 << 20));
        // The head has a slot too.
        Layout::new(len_bytes, inodes.saturating_add(1), log_bytes).map_err(|_| {
            PoolError::Parameter {
                what: "the layout",
                value: format!("{inodes} inodes and a log of {log_bytes} bytes"),
                reason: "they leave no room for data, or the log is under 64 KiB; make the pool larger",
            }
        })
    }

    /// The features of a new pool, and the pages of its saved state: the first ones of the data.
    fn form(&self, layout: &Layout) -> (u64, Run) {
        let features = self.features.unwrap_or(if has_room_for_saved(layout) { SAVED } else { 0 });
        let pages = SavedLayout::new(layout).pages();
        match features & SAVED {
            0 => (features, Run::EMPTY),
            _ => (features, Run { start_page: layout.data_start_page, pages }),
        }
    }

    /// Formats media that are not open elsewhere. Their previous content is lost.
    ///
    /// # Errors
    /// Before anything is changed, [`PoolError::Parameter`] if the options do not fit the media,
    /// and [`PoolError::Busy`] if another opener has them open or formats them;
    /// [`PoolError::Media`].
    pub fn format(&self, media: &Arc<dyn Media>) -> Result<()> {
        self.layout(media.len_bytes())?;
        let _alone = lock_to_format(&**media, self, None)?;
        self.format_alone(media)
    }

    /// Formats media that the caller has locked.
    pub(crate) fn format_alone(&self, media: &Arc<dyn Media>) -> Result<()> {
        const { assert!(MIN_LOG_PAGES * PAGE_BYTES <= 64 << 10) };
        let layout = self.layout(media.len_bytes())?;
        let zeros = vec![0; 1 << 20];
        let (features, saved) = self.form(&layout);
        let head = PoolHead {
            fresh_from_page: if self.media_is_used {
                layout.page_count
            } else {
                layout.data_start_page.max(saved.end_page())
            },
            used_slots: ROOT_INODE + 1,
        };
        // Erase the superblocks first, so that a crash from here on leaves no pool instead of a
        // wrong one.
        let superblocks = ByteRange { offset_bytes: 0, len_bytes: COPIES * PAGE_BYTES };
        // SAFETY: the pool is being created: nothing refers to its bytes yet. The same holds for
        // all writes below.
        unsafe { media.write_at(0, &zeros[..superblocks.len_bytes as usize])? };
        media.write_back(&[superblocks])?;
        media.flush()?;
        let metadata = layout.metadata();
        if self.media_is_used {
            for offset in (0..metadata.len_bytes).step_by(zeros.len()) {
                let len = (metadata.len_bytes - offset).min(zeros.len() as u64) as usize;
                // SAFETY: as above.
                unsafe { media.write_at(metadata.offset_bytes + offset, &zeros[..len])? };
            }
        }
        // SAFETY: as above.
        unsafe { media.write_at(layout.slot_offset_bytes(HEAD_SLOT), &head.encode())? };
        let root = root_directory()?.encode().expect("a directory without names fits");
        // SAFETY: as above.
        unsafe { media.write_at(layout.slot_offset_bytes(ROOT_INODE), &root)? };
        media.write_back(&[metadata])?;
        media.flush()?;
        let superblock = Superblock {
            uuid: new_uuid()?,
            sequence: 1,
            layout,
            generation: 1,
            tail_lsn: 0,
            segment: Uuid::nil(),
            created_ns: now_ns(),
            boot: 0,
            features,
            saved,
            saved_sum: 0,
        };
        write_superblocks(&**media, &superblock, 0, None)?;
        Ok(())
    }
}
