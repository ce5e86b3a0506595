//! Any changes of a pool's bytes: run by the fuzzer for hours, and by a test for a moment. The
//! parsers by themselves are tested in `aquifer-format`.

use std::sync::OnceLock;

use aquifer_check::{CheckOptions, check};
use aquifer_pool::Pool;
use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::inode::SLOT_BYTES;
use aquifer_pool::media::Media;

use super::pool::{FileMedia, forge, sample};

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
