//! The enumerated states against lists written by hand, operation by operation and fault by fault.

use aquifer_crashkit::unguarded::UnguardedMedia;
use aquifer_crashkit::{CrashMedia, Fault, Left, Mark, Plan, Recording, Trigger, explore};
use aquifer_pool::media::{Media, MediaOperation, PersistenceDomain};

use crate::support::{DOMAINS, range};

/// Returns the first byte of each unit: sufficient where a test writes whole units of one value.
fn letters(image: &[u8], unit_bytes: usize) -> String {
    let letter = |unit: &[u8]| {
        assert!(unit.iter().all(|byte| *byte == unit[0]), "a unit mixes two versions");
        if unit[0] == 0 { '.' } else { char::from(unit[0]) }
    };
    image.chunks(unit_bytes).map(letter).collect()
}

/// Returns every state as "prefix image", sorted.
fn all_states(recording: &Recording) -> Vec<String> {
    let unit_bytes = recording.unit_bytes();
    let states = recording.crash_states(1, 1_000_000);
    let mut all: Vec<String> = states
        .map(|state| format!("{} {}", state.prefix, letters(&state.image, unit_bytes)))
        .collect();
    all.sort();
    all
}

fn media_of_units(units: u64, domain: PersistenceDomain) -> (CrashMedia, u64) {
    let unit_bytes = domain.atomic_bytes() as u64;
    (CrashMedia::new(units * unit_bytes, domain).unwrap(), unit_bytes)
}

fn written(media: &CrashMedia, first_unit: u64, letters: &str) {
    let unit = media.domain().atomic_bytes();
    let bytes: Vec<u8> = letters.bytes().flat_map(|letter| vec![letter; unit]).collect();
    media.write_unguarded(first_unit * unit as u64, &bytes).unwrap();
}

/// Three writes: "AB" to units 0 and 1, "C" durably to unit 1, "D" to unit 0 after its hand-over.
#[test]
fn three_writes_have_the_states_of_the_list() {
    for domain in DOMAINS {
        let (media, unit) = media_of_units(3, domain);
        written(&media, 0, "AB"); // prefix 1
        media.write_durable_unguarded(unit, &vec![b'C'; unit as usize]).unwrap(); // 2 to 3
        media.write_back(&[range(0, unit)]).unwrap(); // 4 to 5
        written(&media, 0, "D"); // 6
        media.flush().unwrap(); // 7 to 8
        media.mark(Mark::Note(1)); // 9
        let expected = [
            // Nothing has happened yet.
            "0 ...", // Any part of the first write.
            "1 .B.", "1 A..", "1 AB.",
            // The durable write is in progress: unit 1 has any of its three versions, unit 0
            // either.
            "2 .C.", "2 AC.",
            // It has completed: unit 1 has "C", which was there before with either unit 0. Nothing
            // new. The later write of unit 0, over any state of it.
            "6 DC.",
            // The flush made "A" durable, not "D". New demands: the states that are still possible
            // are repeated.
            "9 AC.", "9 DC.",
        ];
        assert_eq!(all_states(&media.recording()), expected, "{domain}");
    }
}

#[test]
fn a_flush_without_a_hand_over_promises_nothing() {
    for domain in DOMAINS {
        let (media, unit) = media_of_units(2, domain);
        written(&media, 0, "A");
        media.flush().unwrap();
        media.mark(Mark::Note(1));
        // Handed over after the flush: again nothing becomes durable.
        media.write_back(&[range(0, unit)]).unwrap();
        media.mark(Mark::Note(2));
        let expected = ["0 ..", "1 A.", "4 ..", "4 A.", "7 ..", "7 A."];
        assert_eq!(all_states(&media.recording()), expected, "{domain}");
    }
}

#[test]
fn a_durable_write_persists_only_itself() {
    for domain in DOMAINS {
        let (media, unit) = media_of_units(3, domain);
        written(&media, 0, "A");
        media.write_back(&[range(0, unit)]).unwrap();
        media.write_durable_unguarded(2 * unit, &vec![b'Z'; unit as usize]).unwrap();
        media.mark(Mark::Note(1));
        let last: Vec<String> =
            all_states(&media.recording()).into_iter().filter(|s| s.starts_with('6')).collect();
        assert_eq!(last, ["6 ..Z", "6 A.Z"], "{domain}");
    }
}

#[test]
fn a_part_of_a_unit_takes_the_whole_unit_along() {
    for domain in DOMAINS {
        let (media, unit) = media_of_units(1, domain);
        media.write_unguarded(0, &[b'A'; 4]).unwrap();
        media.write_durable_unguarded(4, &[b'B'; 2]).unwrap();
        media.mark(Mark::Note(1));
        let states: Vec<Vec<u8>> =
            media.recording().crash_states(1, 100).map(|s| s.image).collect();
        let image = |bytes: &[u8]| [bytes, &vec![0; unit as usize - bytes.len()][..]].concat();
        // The last one appears twice: before and after the mark.
        let expected = [image(b""), image(b"AAAA"), image(b"AAAABB"), image(b"AAAABB")];
        assert_eq!(states, expected, "{domain}");
    }
}

#[test]
fn in_volatile_media_only_the_interrupted_write_is_open() {
    let media = CrashMedia::new(24, PersistenceDomain::Volatile).unwrap();
    media.write_unguarded(0, &[b'A'; 16]).unwrap();
    media.mark(Mark::Note(1));
    media.write_unguarded(8, &[b'B'; 16]).unwrap();
    let expected = [
        "0 ...", "1 .A.", "1 A..", "1 AA.", // of the first write, any part
        "3 AA.", // after it, all
        "4 AAB", "4 AB.", "4 ABB",
    ];
    assert_eq!(all_states(&media.recording()), expected);
}

#[test]
fn while_it_grows_the_media_have_any_length_on_the_way() {
    let media = CrashMedia::new(4096, PersistenceDomain::PageCache).unwrap();
    media.grow(16384).unwrap();
    media.mark(Mark::Note(1));
    media.write_durable_unguarded(16384 - 512, &[1; 512]).unwrap();
    media.mark(Mark::Note(2));
    let lens = |prefix: usize| -> Vec<usize> {
        let recording = media.recording();
        let states = recording.crash_states(1, 100).filter(|state| state.prefix == prefix);
        states.map(|state| state.image.len()).collect()
    };
    assert_eq!(lens(1), [8192, 16384]); // 4096 was at prefix 0
    assert_eq!(lens(3), [16384]);
    assert_eq!(lens(6), [16384]);
    assert!(media.write_unguarded(16384, &[1]).is_err());
    assert!(media.grow(4096).is_err());
}

#[test]
fn a_failed_growth_may_have_made_it_longer() {
    let media = CrashMedia::new(4096, PersistenceDomain::PageCache).unwrap();
    media.fail(Fault::no_space(Trigger::on(MediaOperation::Resize)));
    let error = media.grow(8192).unwrap_err();
    assert_eq!(error.source.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(media.len_bytes(), 4096);
    media.mark(Mark::Note(1));
    let recording = media.recording();
    let states = recording.crash_states(1, 100).filter(|state| state.prefix == 3);
    assert_eq!(states.map(|state| state.image.len()).collect::<Vec<_>>(), [4096, 8192]);
}

#[test]
fn a_failed_flush_is_never_made_good() {
    for domain in DOMAINS {
        for fails in [MediaOperation::Flush, MediaOperation::WriteBack] {
            let (media, unit) = media_of_units(1, domain);
            media.fail(Fault::io_error(Trigger::on(fails)));
            written(&media, 0, "A");
            let hand_over_and_flush =
                || media.write_back(&[range(0, unit)]).and_then(|()| media.flush());
            hand_over_and_flush().unwrap_err();
            hand_over_and_flush().unwrap();
            media.mark(Mark::Note(1));
            // Once rewritten, it can be made durable.
            written(&media, 0, "A");
            hand_over_and_flush().unwrap();
            media.mark(Mark::Note(2));
            let after = |notes: usize| -> Vec<String> {
                let recording = media.recording();
                let states = recording.crash_states(1, 100);
                let states = states.filter(|state| state.marks.notes().len() == notes);
                states.map(|state| letters(&state.image, unit as usize)).collect()
            };
            assert_eq!(after(1), [".", "A"], "{domain}, {fails}");
            assert_eq!(after(2), ["A"], "{domain}, {fails}");
        }
    }
}

#[test]
fn a_failed_flush_may_show_the_old_bytes_again() {
    let (media, unit) = media_of_units(3, PersistenceDomain::PageCache);
    written(&media, 0, "AB");
    media.write_back(&[range(0, 2 * unit)]).unwrap();
    written(&media, 1, "C"); // after the hand-over: not among what failed
    media.fail(Fault::io_error(Trigger::on(MediaOperation::Flush)).forgetting());
    media.flush().unwrap_err();
    assert_eq!(letters(&media.image(), unit as usize), ".C.");
    media.mark(Mark::Note(1));
    let recording = media.recording();
    let states = recording.crash_states(1, 100).filter(|state| state.marks.notes() == [1]);
    let images: Vec<String> = states.map(|s| letters(&s.image, unit as usize)).collect();
    assert_eq!(images, ["...", ".B.", ".C."]);
}

/// A durable write in progress covers its unit, whatever happens to a hand-over of the same unit.
#[test]
fn what_is_being_written_durably_is_not_dropped_with_a_failed_hand_over() {
    let (media, unit) = media_of_units(2, PersistenceDomain::PageCache);
    let gate = media.hold(Trigger::on(MediaOperation::WriteDurable));
    std::thread::scope(|scope| {
        scope.spawn(|| media.write_durable_unguarded(0, &vec![b'A'; unit as usize]).unwrap());
        gate.wait_until_reached();
        written(&media, 1, "B");
        media.fail(Fault::io_error(Trigger::on(MediaOperation::WriteBack)).forgetting());
        media.write_back(&[range(0, 2 * unit)]).unwrap_err();
        gate.open();
    });
    assert_eq!(letters(&media.image(), unit as usize), "A.");
    media.mark(Mark::Note(1));
    assert_eq!(all_states(&media.recording()).last().unwrap(), "7 A.");
}

#[test]
fn a_failed_write_leaves_what_it_is_told_to() {
    for domain in DOMAINS {
        for (left, reaches_media, visible, after_crash) in [
            (Left::Nothing, false, "..", vec![".."]),
            (Left::First(1), false, "A.", vec!["..", "A."]),
            (Left::All, false, "AA", vec!["..", ".A", "A.", "AA"]),
            (Left::First(1), true, "A.", vec!["A."]),
            (Left::All, true, "AA", vec!["AA"]),
        ] {
            let (media, unit) = media_of_units(2, domain);
            let left = match left {
                Left::First(units) => Left::First(units * unit as usize),
                other => other,
            };
            let trigger = Trigger::on(MediaOperation::WriteDurable);
            let mut fault = Fault::io_error(trigger).leaving(left);
            if reaches_media {
                fault = fault.reaching_media();
            }
            media.fail(fault);
            let bytes = vec![b'A'; 2 * unit as usize];
            // The images that are possible now.
            let images = || -> Vec<String> {
                media.mark(Mark::Note(0));
                let recording = media.recording();
                let end = recording.event_count();
                let states = recording.crash_states(1, 100).filter(|state| state.prefix == end);
                let mut images: Vec<String> =
                    states.map(|state| letters(&state.image, unit as usize)).collect();
                images.sort();
                images
            };
            media.write_durable_unguarded(0, &bytes).unwrap_err();
            assert_eq!(letters(&media.image(), unit as usize), visible, "{domain} {left:?}");
            assert_eq!(images(), after_crash, "{domain} {left:?}");
            media.write_durable_unguarded(0, &bytes).unwrap();
            assert_eq!(images(), ["AA"], "{domain} {left:?}: repeated, it is durable");
        }
    }
}

/// A `write_back` covers what existed when it began, and a `flush` the hand-overs that had returned
/// when it began: with other threads in the middle of both.
#[test]
fn what_comes_in_the_middle_of_a_flush_is_not_covered() {
    let (media, unit) = media_of_units(2, PersistenceDomain::PageCache);
    written(&media, 0, "AB");
    let gate = media.hold(Trigger::on(MediaOperation::WriteBack));
    std::thread::scope(|scope| {
        scope.spawn(|| media.write_back(&[range(0, unit)]).unwrap());
        gate.wait_until_reached();
        written(&media, 0, "C"); // after the hand-over began
        media.flush().unwrap(); // before it returned
        gate.open();
    });
    media.mark(Mark::Note(1));
    let gate = media.hold(Trigger::on(MediaOperation::Flush));
    std::thread::scope(|scope| {
        scope.spawn(|| media.flush().unwrap());
        gate.wait_until_reached();
        media.write_back(&[range(unit, unit)]).unwrap(); // after the flush began
        gate.open();
    });
    media.mark(Mark::Note(2));
    media.flush().unwrap();
    media.mark(Mark::Note(3));
    let after = |note: u64| -> Vec<String> {
        let recording = media.recording();
        let states = recording.crash_states(1, 100);
        let states = states.filter(|state| state.marks.notes().last() == Some(&note));
        states.map(|state| letters(&state.image, unit as usize)).collect()
    };
    assert_eq!(after(1), ["..", "A.", "C.", ".B", "AB", "CB"]);
    assert_eq!(after(2), ["A.", "C.", "AB", "CB"]);
    assert_eq!(after(3), ["AB", "CB"]);
}

/// A state that was correct before a transaction began is correct after it: only other marks cause
/// it to be checked again.
#[test]
fn only_marks_that_demand_something_repeat_a_state() {
    let media = CrashMedia::new(512, PersistenceDomain::PageCache).unwrap();
    media.begin(1);
    media.write_unguarded(0, &[1; 512]).unwrap();
    media.begin(2);
    media.acknowledge(1);
    media.begin(3);
    media.withdraw(2);
    let recording = media.recording();
    let prefixes: Vec<usize> = recording.crash_states(1, 100).map(|state| state.prefix).collect();
    assert_eq!(prefixes, [0, 2, 4, 4, 6, 6]);
    let last = recording.crash_states(1, 100).last().unwrap();
    assert_eq!(last.marks.acknowledged().iter().collect::<Vec<_>>(), [&1]);
    assert_eq!(last.marks.withdrawn().iter().collect::<Vec<_>>(), [&2]);
    assert_eq!(last.marks.in_flight().iter().collect::<Vec<_>>(), [&3]);
}

#[test]
fn ranges_outside_and_read_only_media_are_refused() {
    let media = CrashMedia::new(1000, PersistenceDomain::PageCache).unwrap();
    let outside = [
        media.write_unguarded(999, &[0; 2]),
        media.write_durable_unguarded(u64::MAX, &[0; 2]),
        media.read_at(1000, &mut [0]),
        media.write_back(&[range(0, 1000), range(1, 1000)]),
    ];
    for result in outside {
        let error = result.unwrap_err();
        assert_eq!(error.source.kind(), std::io::ErrorKind::UnexpectedEof, "{error}");
    }
    assert_eq!(media.recording().event_count(), 0);
    // Another handle to the same media.
    let read_only = media.clone().read_only();
    assert!(!read_only.is_writable() && media.is_writable());
    media.write_unguarded(0, &[7]).unwrap();
    let mut byte = [0];
    read_only.read_at(0, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    for result in [read_only.write_unguarded(0, &[1]), read_only.flush(), read_only.grow(2000)] {
        assert_eq!(result.unwrap_err().source.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    }
    assert_eq!(media.image()[..2], [7, 0]);
}

#[test]
fn triggers_count_what_fits_them() {
    let media = CrashMedia::new(4096, PersistenceDomain::PageCache).unwrap();
    let second = || Trigger::on(MediaOperation::Write).nth(2);
    media.fail(Fault::no_space(second().within(range(100, 100))));
    let fails = |offset: u64, len: usize| media.write_unguarded(offset, &vec![1; len]).is_err();
    assert_eq!([fails(0, 100), fails(200, 1), fails(0, 101)], [false; 3]);
    assert!(fails(199, 1), "the second that touches the range");
    assert!(!fails(150, 1), "only once");
    media.fail(Fault::io_error(second().lasting()));
    assert_eq!([fails(0, 1), fails(0, 1), fails(0, 1)], [false, true, true]);
    media.clear_faults();
    assert!(!fails(0, 1));
    media.fail(Fault::io_error(Trigger::on(MediaOperation::Read)));
    let error = media.read_at(0, &mut [0]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot read 1 bytes at offset 0 of crash-media: Input/output error (os error 5)"
    );
}

/// The code under test maps parts of the media privately: the mapping shows what was written.
#[test]
fn the_file_holds_what_was_written() {
    use std::os::unix::fs::FileExt;
    let image: Vec<u8> =
        (0..10_000u32).map(|at| if (4096..8192).contains(&at) { 0 } else { at as u8 }).collect();
    let media = CrashMedia::from_image(&image, PersistenceDomain::Dax).unwrap();
    assert!(media.image() == image);
    media.write_unguarded(5000, b"written").unwrap();
    let file = std::fs::File::from(media.file().try_clone_to_owned().unwrap());
    let mut bytes = [0; 7];
    file.read_exact_at(&mut bytes, 5000).unwrap();
    assert_eq!(&bytes, b"written");
    assert!(media.maps_privately());
}

/// With smaller units a sector is torn.
#[test]
fn stricter_media_tear_sectors() {
    let media = CrashMedia::new(16, PersistenceDomain::PageCache).unwrap().with_unit_bytes(8);
    media.write_unguarded(0, &[b'A'; 16]).unwrap();
    assert_eq!(all_states(&media.recording()), ["0 ..", "1 .A", "1 A.", "1 AA"]);
    // The next crash tears it in the same way.
    let recording = media.recording();
    let mut states = recording.crash_states(1, 1);
    assert_eq!(states.lend().unwrap().media().unwrap().recording().unit_bytes(), 8);
}

#[test]
fn a_description_names_every_unit() {
    let media = CrashMedia::new(1 << 16, PersistenceDomain::PageCache).unwrap();
    media.write_unguarded(0, &[1; 100]).unwrap();
    media.write_unguarded(512, &[2; 512]).unwrap();
    media.write_durable_unguarded(8192, &[3; 4096]).unwrap();
    let recording = media.recording();
    let mut images: Vec<(String, Vec<u8>)> =
        recording.crash_states(1, 100_000).map(|s| (s.description, s.image)).collect();
    let wanted = "crash in op 2 write_durable(8192, 4096): arrived: op 0; absent: op 1; \
                  torn: op 2 write_durable(8192, 4096): sectors 0,3-5 of 8 present";
    let (_, image) = images.iter().find(|(description, _)| description == wanted).unwrap();
    let present: Vec<usize> = (0..128).filter(|sector| image[sector * 512] != 0).collect();
    assert_eq!(present, [0, 16, 19, 20, 21]);
    images.sort();
    images.dedup_by(|one, other| one.0 == other.0);
    assert_eq!(images.len(), 1 << 10, "descriptions tell states apart");
}

#[test]
fn what_was_overwritten_has_arrived() {
    let (media, _) = media_of_units(1, PersistenceDomain::PageCache);
    written(&media, 0, "A");
    written(&media, 0, "B");
    let recording = media.recording();
    let described: Vec<String> = recording.crash_states(1, 100).map(|s| s.description).collect();
    let expected = [
        "crash before the first operation",
        "crash after op 0 write_at(0, 512): arrived: op 0",
        "crash after op 1 write_at(0, 512): arrived: op 0-1",
    ];
    assert_eq!(described, expected);
}

/// The mixture of an overwritten record: its beginning new, its end the old record.
#[test]
fn a_selection_tears_the_newest_write_over_the_one_before() {
    let (media, unit) = media_of_units(40, PersistenceDomain::PageCache);
    written(&media, 0, &"A".repeat(40));
    written(&media, 0, &"B".repeat(40));
    let recording = media.recording();
    let torn = recording.crash_states(1, 400).filter(|state| {
        let letters = letters(&state.image, unit as usize);
        let old = letters.trim_start_matches('B');
        (1..39).contains(&old.len()) && old.trim_start_matches('A').is_empty()
    });
    assert!(torn.count() > 3);
}

/// Two levels in full: the images that recovery is run on, against a list.
///
/// The run writes "A" to unit 0 and acknowledges. Recovery copies unit 0 to unit 1, then marks what
/// it found and writes "R" to unit 2.
#[test]
fn a_recovery_is_crashed_in_every_state() {
    let (media, unit) = media_of_units(3, PersistenceDomain::PageCache);
    media.begin(1);
    media.write_durable_unguarded(0, &vec![b'A'; unit as usize]).unwrap();
    media.acknowledge(1);
    let mut tried = vec![];
    let plan = Plan { depth: 1, budget: 10_000, seed: 1 };
    let explored = explore(&media.recording(), plan, |state| {
        let demand = match () {
            () if state.marks().is_acknowledged(1) => "must",
            () if state.marks().withdrawn().contains(&1) => "must not",
            () => "may",
        };
        let letters = letters(state.image(), unit as usize);
        tried.push(format!("{} {letters} {demand}", state.depth()));
        let media = state.media()?;
        media.write_durable_unguarded(unit, &state.image()[..unit as usize])?;
        match state.image()[0] {
            b'A' => media.acknowledge(1),
            _ => media.withdraw(1),
        }
        media.write_durable_unguarded(2 * unit, &vec![b'R'; unit as usize])?;
        Ok(Some(media.recording()))
    });
    tried.sort();
    let expected = [
        "0 ... may",
        "0 A.. may",
        "0 A.. must",
        // From "...": recovery copies a zero, which changes nothing, withdraws and writes.
        "1 ... must not",
        "1 ..R must not",
        // From "A..", in flight. Its states after the acknowledgement have been seen already.
        "1 AA. may",
        "1 AA. must",
        "1 AAR must",
    ];
    assert_eq!(tried, expected);
    assert_eq!(explored.unwrap().states_by_depth, [3, 5]);
}
