//! Any changes of a pool's bytes: run by the fuzzer for hours, and by a test for a moment. The
//! parsers by themselves are tested in `aquifer-format`.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use aquifer_check::{CheckOptions, check};
use aquifer_fs::{FileKind, Files};
use aquifer_pool::Pool;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::slot_bytes::SLOT_BYTES;
use aquifer_pool::media::Media;

use super::closed_with_saved_state;
use super::pool::{FileMedia, alone, forge, reading, sample};

const PAGE: usize = PAGE_BYTES as usize;

/// Tests a pool in which some bytes were changed, some of them with a recomputed checksum: four
/// bytes of `data` each, a place, a value, and what to seal.
pub fn image(data: &[u8]) {
    static SAMPLE: OnceLock<Vec<u8>> = OnceLock::new();
    let mut image = SAMPLE.get_or_init(|| sample::crashed_image(320 << 10)).clone();
    let layout = forge::superblock(&image).layout;
    let records = forge::records(&image);
    let end = layout.data_start_page as usize * PAGE;
    for change in data.chunks_exact(4).take(64) {
        let at = (usize::from(change[0])
            | usize::from(change[1]) << 8
            | usize::from(change[3] >> 6) << 16)
            % end;
        image[at] = change[2];
        if change[3] & 1 == 0 {
            continue;
        }
        if at < 2 * PAGE {
            forge::seal_superblock(&mut image, at / PAGE);
        } else if (at as u64) < layout.log().offset_bytes {
            let number = (at as u64 - layout.metadata().offset_bytes) / SLOT_BYTES as u64;
            forge::seal_slot(forge::slot(&mut image, &layout, number));
        } else if let Some(record) =
            records.iter().find(|record| (record.offset..record.offset + record.len).contains(&at))
        {
            forge::seal_record(&mut image[record.offset..record.offset + record.len]);
        }
    }
    let media = FileMedia::of(&image);
    let report = check(media.clone(), &CheckOptions::default()).unwrap();
    let _ = report.to_string();
    assert!(media.image() == image, "the check wrote something");
    let options = Pool::options().exclusive(true).background(false);
    for options in [options.clone().read_only(true), options] {
        match options.open_on(media.clone()) {
            Ok(pool) => drop(sample::read_all(&pool)),
            Err(_) => assert!(media.image() == image, "an opening that failed wrote something"),
        }
    }
    assert!(media.len_bytes() == image.len() as u64);
}

/// The most that is changed of one image.
const MOST_CHANGES: usize = 64;

/// Tests a pool that was closed cleanly, and is opened with its saved state: the first byte of `data`
/// says which checksums are recomputed and how the pool is opened; four bytes each are a change, a
/// place, a value, and what to seal.
pub fn saved(data: &[u8]) {
    static SAMPLE: OnceLock<Vec<u8>> = OnceLock::new();
    let Some((&how, changes)) = data.split_first() else { return };
    let mut image = SAMPLE.get_or_init(closed_with_saved_state).clone();
    let superblock = forge::superblock(&image);
    let layout = superblock.layout;
    let metadata = layout.metadata();
    for change in changes.chunks_exact(4).take(MOST_CHANGES) {
        let place = usize::from(change[0]) | usize::from(change[1]) << 8;
        let is_sealed = change[3] & 1 != 0;
        match change[3] >> 6 {
            0 => {
                let at = place % (2 * PAGE);
                image[at] = change[2];
                if is_sealed {
                    forge::seal_superblock(&mut image, at / PAGE);
                }
            }
            1 => {
                let at = place % metadata.len_bytes as usize;
                image[metadata.offset_bytes as usize + at] = change[2];
                if is_sealed {
                    let number = (at / SLOT_BYTES) as u64;
                    forge::seal_slot(forge::slot(&mut image, &layout, number));
                }
            }
            _ => {
                let saved = superblock.saved.bytes();
                let at = place % saved.len_bytes as usize;
                image[saved.offset_bytes as usize + at] ^= change[2];
            }
        }
    }
    if forge::is_readable(&image) && forge::superblock(&image).saved == superblock.saved {
        if how & 1 != 0 && forge::superblock(&image).layout == layout {
            forge::redigest(&mut image);
        }
        if how & 2 != 0 && forge::superblock(&image).layout == layout {
            forge::reseal(&mut image);
        }
    }
    let media = FileMedia::of(&image);
    if how & 4 != 0 {
        let report = check(media.clone(), &CheckOptions::default()).unwrap();
        let _ = report.to_string();
        assert!(media.image() == image, "the check wrote something");
    }
    let options = [reading(), alone(), alone().check(true)][usize::from(how >> 4) % 3].clone();
    let Ok(pool) = options.open_on(media.clone()) else {
        assert!(media.image() == image, "an opening that failed wrote something");
        return;
    };
    let is_writable = pool.is_writable();
    use_everything(pool);
    assert!(is_writable || media.image() == image, "a reader wrote something");
    // What was saved, if anything was, is opened again.
    drop(reading().open_on(media).map(use_everything));
}

/// Uses whatever can be used.
fn use_everything(pool: Pool) {
    let _ = (pool.info(), pool.orphans(), pool.room());
    for inode in pool.inodes().into_iter().flatten() {
        let _ = pool.object_named(&inode.name);
        let _ = sample::read(&pool, &inode);
    }
    let files = Files::new(pool);
    let mut directories = vec![PathBuf::from("/")];
    // Directories can form a cycle.
    for _ in 0..20 {
        let Some(entries) = directories.pop().and_then(|path| files.read_dir(path).ok()) else {
            break;
        };
        for entry in entries.flatten().take(100) {
            let path = entry.path();
            let _ = (entry.metadata(), files.attributes(&path), files.read_link(&path));
            if let Ok(file) = files.open_file(&path) {
                let _ = file.read_at(&mut [0; 5000], 0);
            }
            if entry.file_type().is_ok_and(|found| found.kind() == FileKind::Directory) {
                directories.push(path);
            }
        }
    }
    if !files.pool().is_writable() {
        return;
    }
    let _ = files.set_permissions("/plain", Permissions::from_mode(0o600));
    let _ = files.remove_file("/second");
    let _ = files.rename("/a/c", "/many/c");
    let _ = files.create_dir("/fresh");
    if let Ok(file) = files.create_file("/fresh/file") {
        let _ = file.write_all_at(&[1; 20_000], 0);
    }
    if sample::create(files.pool(), "fresh", 3, 0).is_ok() {
        let _ = sample::destroy(files.pool(), "fresh");
    }
    let _ = files.pool().checkpoint();
}
