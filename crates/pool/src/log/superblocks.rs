//! Reading and writing the two copies of the superblock.

use crate::error::{PoolError, Result};
use crate::format::superblock::{COPIES, Superblock};
use crate::format::{FormatError, PAGE_BYTES};
use crate::media::{Media, MediaError};
use crate::mutant::{self, Mutant};
use crate::point;

/// The superblock that counts.
#[derive(Debug)]
pub(crate) struct Superblocks {
    pub valid: Superblock,
    /// Which copy that is.
    pub copy: u64,
    /// The error of the other copy, if a later program version wrote it. Writing the superblocks
    /// would overwrite it.
    later: Option<(u64, FormatError)>,
}

impl Superblocks {
    /// Returns an error if a later program has written one of them: it may have been interrupted
    /// while converting the pool.
    pub fn check_writable(&self, media: &dyn Media) -> Result<()> {
        let path = media.path().to_path_buf();
        match &self.later {
            None => Ok(()),
            Some((_, FormatError::Version { found })) => {
                Err(PoolError::FutureVersion { path, found: *found })
            }
            Some((_, FormatError::Features { bits })) => {
                Err(PoolError::LaterFeatures { path, bits: *bits })
            }
            Some((copy, error)) => Err(PoolError::Damaged {
                path,
                structure: format!("superblock {copy}"),
                error: error.clone(),
            }),
        }
    }
}

/// The page of each copy, or the error of reading it.
type Pages = Vec<std::result::Result<Vec<u8>, MediaError>>;

fn superblock_pages(media: &dyn Media) -> Pages {
    let read = |copy| {
        let mut page = vec![0; PAGE_BYTES as usize];
        media.read_at(copy * PAGE_BYTES, &mut page).map(|()| page)
    };
    (0..COPIES).map(read).collect()
}

/// How often to reread superblocks that change between two reads and are never whole.
const MOST_LOOKS: usize = 10_000;

/// Reads both superblocks and chooses the valid one.
///
/// Processes that have the pool open may write them at the same time, one copy after the other. So
/// what is read may mix two checkpoints, in both copies. At any moment one of the two is whole: a
/// damaged copy is the same when it is read again, and one that was being written is not.
pub(crate) fn read_superblocks(media: &dyn Media) -> Result<Superblocks> {
    if media.len_bytes() < COPIES * PAGE_BYTES {
        return Err(PoolError::NotAPool { path: media.path().to_path_buf() });
    }
    let mut pages = superblock_pages(media);
    for _ in 1..MOST_LOOKS {
        let Err(_) = choose_superblock(media, &pages) else { break };
        let again = superblock_pages(media);
        let are_same = pages.iter().zip(&again).all(|copies| match copies {
            (Ok(one), Ok(other)) => one == other,
            (one, other) => one.is_err() && other.is_err(),
        });
        pages = again;
        if are_same {
            break;
        }
    }
    choose_superblock(media, &pages)
}

fn choose_superblock(media: &dyn Media, pages: &Pages) -> Result<Superblocks> {
    let path = || media.path().to_path_buf();
    let mut errors = Vec::new();
    let mut unreadable = None;
    let mut valid: Option<(u64, Superblock)> = None;
    for (copy, page) in (0..COPIES).zip(pages) {
        let page = match page {
            Ok(page) => page,
            Err(error) => {
                errors.push((copy, FormatError::Unreadable));
                unreadable = Some(error);
                continue;
            }
        };
        match Superblock::decode(page, copy) {
            Ok(found) => match &valid {
                // One of them belongs to another pool, and it is unknown which.
                Some((_, best)) if !found.is_of_same_pool(best) => {
                    return Err(PoolError::Damaged {
                        path: path(),
                        structure: format!("superblock {copy}"),
                        error: FormatError::Contradiction { other: "the other copy" },
                    });
                }
                Some((_, best)) if found.sequence <= best.sequence => {}
                _ => valid = Some((copy, found)),
            },
            Err(error) => errors.push((copy, error)),
        }
    }
    let Some((copy, valid)) = valid else {
        if let Some(error) = unreadable {
            let source = match error.source.raw_os_error() {
                Some(errno) => std::io::Error::from_raw_os_error(errno),
                None => std::io::Error::new(error.source.kind(), error.source.to_string()),
            };
            return Err(MediaError { path: path(), source, ..*error }.into());
        }
        if let Some(found) = errors.iter().find_map(|(_, error)| match error {
            FormatError::Version { found } => Some(*found),
            _ => None,
        }) {
            return Err(PoolError::FutureVersion { path: path(), found });
        }
        if let Some(bits) = errors.iter().find_map(|(_, error)| match error {
            FormatError::Features { bits } => Some(*bits),
            _ => None,
        }) {
            return Err(PoolError::LaterFeatures { path: path(), bits });
        }
        if errors.iter().all(|(_, error)| *error == FormatError::Magic) {
            return Err(PoolError::NotAPool { path: path() });
        }
        let (copy, error) = errors.into_iter().next_back().expect("both copies failed");
        return Err(PoolError::Damaged {
            path: path(),
            structure: format!("superblock {copy} (and the other one)"),
            error,
        });
    };
    if media.len_bytes() < valid.layout.len_bytes() {
        return Err(PoolError::Truncated {
            path: path(),
            found_bytes: media.len_bytes(),
            expected_bytes: valid.layout.len_bytes(),
        });
    }
    let is_later = |error: &FormatError| {
        matches!(error, FormatError::Version { .. } | FormatError::Features { .. })
    };
    let later = errors.into_iter().find(|(_, error)| is_later(error));
    Ok(Superblocks { valid, copy, later })
}

/// Writes both copies, each durable before the next. `spared` is the copy that is valid now and is
/// written last: the other one may be damaged, and while one copy is being written the pool depends
/// on the other.
pub(crate) fn write_superblocks(
    media: &dyn Media,
    superblock: &Superblock,
    spared: u64,
    mutant: Option<Mutant>,
) -> std::result::Result<(), MediaError> {
    for copy in [COPIES - 1 - spared, spared] {
        let page = superblock.encode(copy);
        if mutant::is(mutant, Mutant::BothSuperblocksAtOnce) {
            // SAFETY: no reference to a superblock is ever made.
            unsafe { media.write_at(copy * PAGE_BYTES, &page)? }
        } else {
            // SAFETY: as above.
            unsafe { media.write_durable(copy * PAGE_BYTES, &page)? }
        }
        if copy != spared {
            point::pass("superblock-first");
        }
    }
    Ok(())
}
