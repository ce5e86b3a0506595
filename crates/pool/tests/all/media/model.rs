//! Transfers of every form against plain memory.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_crashkit::unguarded::UnguardedMedia;
use aquifer_pool::media::{ByteRange, MediaError, PersistenceDomain, WriteWindows};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

use super::forms::{self, Form};

const LEN_BYTES: u64 = 300_000;

fn some_range(rng: &mut Rng, len_bytes: u64) -> ByteRange {
    let offset_bytes = rng.below(len_bytes);
    let longest = if rng.chance(0.5) { 200 } else { 50_000 };
    let len_bytes = rng.below((len_bytes - offset_bytes).min(longest) + 1);
    ByteRange { offset_bytes, len_bytes }
}

fn bounds(range: ByteRange) -> std::ops::Range<usize> {
    range.offset_bytes as usize..range.end_bytes() as usize
}

#[test]
fn what_is_written_is_read() {
    let seed = seed(0x5eed);
    for form in forms::all(LEN_BYTES) {
        let mut rng = Rng::new(seed);
        let media = &form.media;
        let len_bytes = media.len_bytes();
        let mut model = vec![0; len_bytes as usize];
        let other = form.again(false);
        for step in 0..steps(150) {
            let range = some_range(&mut rng, len_bytes);
            let bytes: Vec<u8> = (0..range.len_bytes).map(|_| rng.next_u64() as u8).collect();
            let place = &mut model[bounds(range)];
            match rng.below(4) {
                0 => {
                    media.write_unguarded(range.offset_bytes, &bytes).unwrap();
                    place.copy_from_slice(&bytes);
                }
                1 => {
                    media.write_durable_unguarded(range.offset_bytes, &bytes).unwrap();
                    place.copy_from_slice(&bytes);
                }
                2 => {
                    let ranges: Vec<ByteRange> = (0..rng.below(20))
                        .map(|_| some_range(&mut rng, len_bytes))
                        .chain([range])
                        .collect();
                    media.write_back(&ranges).unwrap();
                    media.flush().unwrap();
                }
                _ => {
                    // Also through another descriptor, immediately.
                    for reader in [media, &other] {
                        let mut read = vec![1; place.len()];
                        reader.read_at(range.offset_bytes, &mut read).unwrap();
                        assert!(read == place, "{}, step {step}: {range:?}", form.name);
                    }
                }
            }
        }
        let mut read = vec![1; model.len()];
        other.read_at(0, &mut read).unwrap();
        assert!(read == model, "{}", form.name);
        // And through system calls.
        read.fill(1);
        aquifer_sys::io::read_exact_at(form.file().as_fd(), &mut read, 0).unwrap();
        assert!(read == model, "{}", form.name);
    }
}

/// The error has the range, and is about the end of the file.
fn assert_outside(form: &Form, result: Result<(), MediaError>, range: ByteRange) {
    let error = result.expect_err(&form.name);
    assert_eq!(error.source.kind(), std::io::ErrorKind::UnexpectedEof, "{}: {error}", form.name);
    assert_eq!(error.offset_bytes, range.offset_bytes, "{}: {error}", form.name);
    assert_eq!(error.len_bytes, range.len_bytes, "{}: {error}", form.name);
}

#[test]
fn what_lies_outside_is_an_error_and_changes_nothing() {
    for form in forms::all(LEN_BYTES) {
        let media = &form.media;
        let len_bytes = media.len_bytes();
        for (offset_bytes, len) in
            [(len_bytes - 1, 2), (len_bytes, 1), (len_bytes + 5000, 10), (u64::MAX - 1, 100)]
        {
            let range = ByteRange { offset_bytes, len_bytes: len };
            let bytes = vec![9; len as usize];
            assert_outside(&form, media.read_at(offset_bytes, &mut bytes.clone()), range);
            assert_outside(&form, media.write_unguarded(offset_bytes, &bytes), range);
            assert_outside(&form, media.write_durable_unguarded(offset_bytes, &bytes), range);
            if range.end_bytes() < u64::MAX {
                assert_outside(&form, media.write_back(&[range]), range);
            } else {
                assert!(media.write_back(&[range]).is_err());
            }
        }
        assert_eq!(media.len_bytes(), len_bytes, "{}", form.name);
        media.read_at(len_bytes, &mut []).unwrap();
        media.write_unguarded(len_bytes, &[]).unwrap();
        media.write_durable_unguarded(0, &[]).unwrap();
        media.write_back(&[]).unwrap();
        media.write_back(&[ByteRange { offset_bytes: 7, len_bytes: 0 }]).unwrap();
        media.flush().unwrap();
    }
}

#[test]
fn a_file_cut_short_gives_errors_and_one_made_longer_is_followed() {
    for form in forms::all(LEN_BYTES) {
        let media = &form.media;
        let long_bytes = media.len_bytes();
        let file = form.file();
        if form.unit_bytes == 1 {
            let short_bytes = 10_000;
            file.set_len(short_bytes).unwrap();
            assert_eq!(media.len_bytes(), short_bytes, "{}", form.name);
            let range = ByteRange { offset_bytes: long_bytes - 100, len_bytes: 10 };
            assert_outside(&form, media.read_at(range.offset_bytes, &mut [0; 10]), range);
            assert_outside(&form, media.write_unguarded(range.offset_bytes, &[0; 10]), range);
            assert_outside(
                &form,
                media.write_durable_unguarded(range.offset_bytes, &[0; 10]),
                range,
            );
            assert_outside(&form, media.write_back(&[range]), range);
            assert_eq!(file.metadata().unwrap().len(), short_bytes, "nothing put it back");
            media.write_unguarded(short_bytes - 1, &[5]).unwrap();
        }
        // Also beyond its address reservation.
        for times in [2, 3, 9] {
            let len_bytes = long_bytes * times;
            if file.set_len(len_bytes).is_err() || form.unit_bytes > 1 {
                // There are too few huge pages, and a store would fail for that reason.
                continue;
            }
            assert_eq!(media.len_bytes(), len_bytes);
            media.write_durable_unguarded(len_bytes - 1, &[times as u8]).unwrap();
            let mut bytes = [1; 2];
            media.read_at(len_bytes - 2, &mut bytes).unwrap();
            assert_eq!(bytes, [0, times as u8], "{}", form.name);
        }
    }
}

#[test]
fn media_opened_for_reading_are_not_changed() {
    for form in forms::all(LEN_BYTES) {
        let media = form.again(false);
        assert!(!media.is_writable() && form.media.is_writable());
        let range = ByteRange { offset_bytes: 0, len_bytes: 5 };
        for refused in [
            media.write_unguarded(0, b"other"),
            media.write_durable_unguarded(0, b"other"),
            media.write_back(&[range]),
            media.flush(),
            media.grow(1 << 30),
        ] {
            let error = refused.expect_err(&form.name);
            assert_eq!(error.source.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{error}");
        }
        let mut bytes = [1; 5];
        media.read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 5], "{}", form.name);
    }
}

#[test]
fn what_grows_is_zero_allocated_and_reported() {
    use std::os::unix::fs::MetadataExt;
    for form in forms::all(LEN_BYTES) {
        if form.unit_bytes > 1 {
            continue;
        }
        let media = &form.media;
        media.write_unguarded(LEN_BYTES - 3, b"end").unwrap();
        let long_bytes = LEN_BYTES + 9_000_000;
        let mut told = vec![];
        media.grow_with_progress(long_bytes, &mut |done, all| told.push((done, all))).unwrap();
        assert!(told.is_sorted(), "{}: {told:?}", form.name);
        assert_eq!(told.last(), Some(&(9_000_000, 9_000_000)), "{}", form.name);
        assert_eq!(media.len_bytes(), long_bytes);
        let mut bytes = vec![1; 9_000_003];
        media.read_at(LEN_BYTES - 3, &mut bytes).unwrap();
        assert!(bytes.starts_with(b"end\0"), "{}", form.name);
        assert!(bytes[3..].iter().all(|byte| *byte == 0), "{}", form.name);
        let blocks = form.file().metadata().unwrap().blocks();
        assert!(blocks * 512 >= 9_000_000, "{}: {blocks}", form.name);
        // To the same length, or shorter: nothing to do.
        media.grow(long_bytes).unwrap();
        media.grow(1).unwrap();
        assert_eq!(media.len_bytes(), long_bytes);
    }
}

#[test]
fn it_is_used_while_it_grows() {
    for form in forms::all(LEN_BYTES) {
        if form.unit_bytes > 1 {
            continue;
        }
        let (form, media) = (&form, &form.media);
        let done = AtomicBool::new(false);
        let usable_bytes = AtomicU64::new(LEN_BYTES);
        std::thread::scope(|scope| {
            for thread in 0..2u64 {
                let (done, usable_bytes) = (&done, &usable_bytes);
                scope.spawn(move || {
                    let mut round = 0u8;
                    while !done.load(Ordering::Relaxed) {
                        round = round.wrapping_add(1);
                        // Also in the newest part, once it exists.
                        let newest = usable_bytes.load(Ordering::Relaxed) - 2000;
                        for offset_bytes in [0, newest].map(|start| start + thread * 1000) {
                            media.write_unguarded(offset_bytes, &[round; 900]).unwrap();
                            let mut bytes = [0; 900];
                            media.read_at(offset_bytes, &mut bytes).unwrap();
                            let first = bytes.iter().position(|byte| *byte != round);
                            let name = &form.name;
                            assert_eq!(first, None, "{name} at {offset_bytes}, round {round}");
                        }
                    }
                });
            }
            for step in 1..=20 {
                let len_bytes = LEN_BYTES + step * 100_000;
                media.grow(len_bytes).unwrap();
                usable_bytes.store(len_bytes, Ordering::Relaxed);
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(media.len_bytes(), LEN_BYTES + 2_000_000);
    }
}

/// Two patterns alternate in a page; a reader of single words never sees a mixture.
#[test]
fn words_of_mapped_media_are_not_torn() {
    for form in forms::all(LEN_BYTES) {
        let media = &form.media;
        // The kernel may copy in any order.
        let by_calls = media.write_windows() == WriteWindows::Calls;
        if by_calls || media.domain() == PersistenceDomain::PageCache {
            continue;
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..steps(10_000) {
                    let bytes = [if round % 2 == 0 { 0 } else { 0xff }; 505];
                    let by_call = round % 3 == 0;
                    // Also short ones: some instructions copy these byte by byte. All end with a
                    // word.
                    let len = [17, 25, 41, 505][round / 2 % 4];
                    if by_call {
                        media.write_unguarded(4096 + 7, &bytes[..len]).unwrap()
                    } else {
                        media.write_durable_unguarded(4096 + 7, &bytes[..len]).unwrap()
                    }
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                // Whole words inside of what is written.
                for word in (8..500).step_by(8) {
                    let mut bytes = [0; 8];
                    media.read_at(4096 + word, &mut bytes).unwrap();
                    let word = u64::from_ne_bytes(bytes);
                    assert!(word == 0 || word == u64::MAX, "{}: {word:016x}", form.name);
                }
            }
        });
    }
}

#[test]
fn errors_name_what_failed() {
    for form in forms::all(LEN_BYTES) {
        let error = form.media.read_at(u64::MAX / 2, &mut [0; 3]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cannot read 3 bytes at offset"), "{text}");
        assert!(text.contains(&*form.path.to_string_lossy()), "{text}");
        assert_eq!(form.media.path(), form.path);
    }
}
