//! Output: tables, JSON, human-readable quantities.
//!
//! No function here panics if the reader has closed the pipe: write errors are returned, and
//! [`is_closed_pipe`] recognizes that case.

use std::io::{self, Write};
use std::time::{Duration, UNIX_EPOCH};

pub use crate::failure::{is_closed_pipe, print_error};
use anyhow::{Context, Result};
use serde::Serialize;

/// The context of a write error on standard output.
pub const CANNOT_WRITE: &str = "cannot write to standard output";

/// Writes a text to standard output.
pub fn print(text: &str) -> Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).context(CANNOT_WRITE)
}

/// Writes bytes to standard output as they are.
pub fn print_bytes(bytes: &[u8]) -> Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(bytes).and_then(|()| output.flush()).context(CANNOT_WRITE)
}

/// Writes a value to standard output as JSON: indented if `pretty`, otherwise on one line.
pub fn print_json(value: &impl Serialize, pretty: bool) -> Result<()> {
    let mut text =
        if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) }?;
    text.push('\n');
    print(&text)
}

/// Prints a warning to standard error.
pub fn warn(text: &str) {
    // If standard error is closed, the warning is lost.
    let _ = writeln!(io::stderr(), "warning: {text}");
}

/// The command failed, and all reasons have been printed already.
#[derive(Debug, thiserror::Error)]
#[error("some operations failed")]
pub struct Said;

/// Lines with aligned columns, indented; the last column is not padded.
pub fn columns<const N: usize>(lines: &[[String; N]]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for line in lines {
        let mut row = String::from(" ");
        for (cell, width) in line.iter().zip(widths) {
            row.push_str(&format!(" {cell:width$} "));
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// A time: `87 ns`, `4.31 µs`, `12 ms`.
pub fn time(nanoseconds: f64) -> String {
    let (value, unit) = match nanoseconds {
        ns if ns < 1e3 => (ns, "ns"),
        ns if ns < 1e6 => (ns / 1e3, "µs"),
        ns if ns < 1e9 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

/// A count: `1,234,567`.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A moment in nanoseconds since 1970: `2026-11-21 03:56:45 UTC`.
pub fn moment(nanoseconds: u64) -> String {
    let moment = UNIX_EPOCH + Duration::from_nanos(nanoseconds);
    let text = humantime::format_rfc3339_seconds(moment).to_string();
    text.replace('T', " ").replace('Z', " UTC")
}

/// Makes any bytes readable, distinguishable and harmless to a terminal: bytes that are not UTF-8,
/// control characters and backslashes are escaped.
pub fn escaped(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                _ if character.is_control() => text.extend(character.escape_default()),
                _ => text.push(character),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// `one inode`, `7 inodes`.
pub fn several(number: u64, what: &str) -> String {
    match number {
        1 => format!("one {what}"),
        _ => format!("{} {what}s", count(number)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_read_well() {
        assert_eq!(time(0.5), "0.50 ns");
        assert_eq!(time(4312.0), "4.31 µs");
        assert_eq!(time(87_300.0), "87.3 µs");
        assert_eq!(time(123e6), "123 ms");
        assert_eq!(time(2e9), "2.00 s");
        assert_eq!(count(7), "7");
        assert_eq!(count(1234), "1,234");
        assert_eq!(count(1_234_567), "1,234,567");
    }

    #[test]
    fn moments_are_dates() {
        assert_eq!(moment(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(moment(1_709_210_096_789_000_000), "2024-02-29 12:34:56 UTC");
        assert_eq!(moment(u64::MAX), "2554-07-21 23:34:33 UTC");
    }

    #[test]
    fn names_can_be_told_apart_and_do_nothing_to_a_terminal() {
        for (name, shown) in [
            (&b"plain name"[..], "plain name"),
            ("größe".as_bytes(), "größe"),
            (b"\xff\xfe", "\\xff\\xfe"),
            (b"\\xff", "\\\\xff"),
            (b"a\nb\x1b[2J", "a\\nb\\u{1b}[2J"),
            (b"caf\xc3", "caf\\xc3"),
            (b"", ""),
        ] {
            assert_eq!(escaped(name), shown);
        }
    }

    #[test]
    fn columns_are_aligned() {
        let lines = [["a", "bb"], ["µµµ", "c"]].map(|line| line.map(str::to_owned));
        assert_eq!(columns(&lines), "  a    bb\n  µµµ  c\n");
    }
}
