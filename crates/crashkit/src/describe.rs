//! Readable descriptions of crash states: where the crash happened, and which of the writes before
//! it arrived.
//!
//! "crash in op 17 write_durable(8192, 4096): arrived: op 15; absent: op 12; torn: op 17
//! write_durable(8192, 4096): sectors 0,3 of 8 present". Writes that were already durable are not
//! listed. A write has arrived in a unit if the unit has its version or a newer one.

use crate::choice::{Base, Open};
use crate::recording::Recording;

/// Describes the contents of a state.
pub(super) fn state(
    recording: &Recording,
    prefix: usize,
    open: &Open,
    base: Base,
    exceptions: &[(usize, usize)],
    len_bytes: Option<usize>,
) -> String {
    let place = match prefix.checked_sub(1) {
        None => "before the first operation".to_owned(),
        Some(last) => recording.describe_event(&recording.events[last]),
    };
    let mut numbers: Vec<usize> =
        open.units.iter().map(|unit| Open::base_number(unit, base)).collect();
    for &(index, number) in exceptions {
        numbers[index] = number;
    }
    let mut units_of_write: Vec<Vec<(u64, bool)>> = vec![vec![]; open.writes.len()];
    for (unit, &number) in open.units.iter().zip(&numbers) {
        for version in 1..=unit.count {
            let write = open.write_of(unit, version);
            units_of_write[write].push((unit.unit, number >= version));
        }
    }
    let (mut arrived, mut absent, mut torn) = (vec![], vec![], vec![]);
    for (&op, units) in open.writes.iter().zip(&units_of_write) {
        match units.iter().filter(|&&(_, present)| present).count() {
            0 => absent.push(op as u64),
            count if count == units.len() => arrived.push(op as u64),
            _ => torn.push(torn_write(recording, op, units)),
        }
    }
    let mut parts = vec![];
    for (name, ops) in [("arrived", arrived), ("absent", absent)] {
        if !ops.is_empty() {
            parts.push(format!("{name}: op {}", numbers_in_words(&ops)));
        }
    }
    parts.extend(torn.into_iter().map(|torn| format!("torn: {torn}")));
    parts.extend(len_bytes.map(|len| format!("{len} bytes long")));
    if parts.is_empty() {
        format!("crash {place}")
    } else {
        format!("crash {place}: {}", parts.join("; "))
    }
}

/// Returns "op 17 write_durable(8192, 4096): sectors 0,3-5 of 8 present", counted from the write's
/// first unit. Units that the write left unchanged count as present: whether they arrived makes no
/// difference.
fn torn_write(recording: &Recording, op: usize, units: &[(u64, bool)]) -> String {
    let operation = &recording.operations[op];
    let unit_bytes = recording.unit_bytes as u64;
    let range = operation.ranges[0];
    let first = range.offset_bytes / unit_bytes;
    let count = range.end_bytes().div_ceil(unit_bytes) - first;
    let absent: Vec<u64> = units.iter().filter(|unit| !unit.1).map(|unit| unit.0 - first).collect();
    let present: Vec<u64> = (0..count).filter(|unit| !absent.contains(unit)).collect();
    format!(
        "op {op} {operation}: {} {} of {count} present",
        recording.unit_name(),
        numbers_in_words(&present)
    )
}

/// Formats ascending numbers: "0,3-5".
fn numbers_in_words(numbers: &[u64]) -> String {
    let mut words: Vec<String> = vec![];
    let mut rest = numbers;
    while let Some(&first) = rest.first() {
        let run = rest.iter().zip(first..).take_while(|&(&number, expected)| number == expected);
        let len = run.count();
        words.push(match len {
            1 => first.to_string(),
            _ => format!("{first}-{}", first + len as u64 - 1),
        });
        rest = &rest[len..];
    }
    words.join(",")
}

#[cfg(test)]
mod tests {
    use super::numbers_in_words;

    #[test]
    fn runs_are_shortened() {
        assert_eq!(numbers_in_words(&[]), "");
        assert_eq!(numbers_in_words(&[4]), "4");
        assert_eq!(numbers_in_words(&[0, 2, 3, 4, 9]), "0,2-4,9");
    }
}
