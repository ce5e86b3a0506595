//! `aquifer object dump`: prints the bytes of an object.
//!
//! The object is attached for reading, so the output is one committed state, and the command fails
//! while a writer has it attached. Its memory is read through `/proc/self/mem` rather than by
//! loads: a media failure is then an error instead of a SIGBUS.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use aquifer::Attachment;
use aquifer_sys::units::Bytes;

use super::keys::{self, KeyArgs, ONE_KEY_HELP};
use super::open_to_read;
use crate::access::ReadAccess;
use crate::output::{self, CANNOT_WRITE};
use crate::progress;

/// Arguments of `aquifer object dump`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{ONE_KEY_HELP}"))]
pub struct Args {
    /// Path of the pool
    pool: PathBuf,

    /// Name of the object
    name: OsString,

    #[command(flatten)]
    key: KeyArgs,

    /// Only the bytes from A up to, but excluding, B; both are optional
    #[arg(long, value_name = "A..B", allow_hyphen_values = true)]
    range: Option<Part>,

    /// Write the bytes unformatted
    #[arg(long)]
    raw: bool,

    #[command(flatten)]
    access: ReadAccess,
}

const EXAMPLES: &str = "\
Examples:
  aquifer object dump data.pool graph --range ..256
  aquifer object dump data.pool graph --range 1M..0x180000
  aquifer object dump data.pool graph --raw > graph.bytes

The format is that of `xxd -a`: of several lines of zeros only the first is shown, and `*` for the others. Fails while \
a program has the object attached for writing.";

/// The requested range of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    start: u64,
    end: Option<u64>,
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Part, String> {
        let wrong =
            || format!("`{text}` is not a range; write for example 4096..8192, ..64K or 0x100..");
        let offset = |text: &str| match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).map_err(|_| wrong()),
            None => text.parse().map(|bytes: Bytes| bytes.0).map_err(|_| wrong()),
        };
        let (start, end) = text.split_once("..").ok_or_else(wrong)?;
        let start = if start.is_empty() { 0 } else { offset(start)? };
        let end = if end.is_empty() { None } else { Some(offset(end)?) };
        match end {
            Some(end) if end < start => Err(format!("`{text}` ends before it begins")),
            _ => Ok(Part { start, end }),
        }
    }
}

impl Part {
    /// The whole object.
    const WHOLE: Part = Part { start: 0, end: None };

    fn of(self, len_bytes: u64) -> Result<Range<u64>> {
        let end = self.end.unwrap_or(len_bytes);
        ensure!(
            self.start <= end && end <= len_bytes,
            "--range {}..{end} is outside the object, which has {len_bytes} bytes ({})",
            self.start,
            Bytes(len_bytes),
        );
        Ok(self.start..end)
    }
}

/// Bytes read at a time: a multiple of a line.
const CHUNK_BYTES: u64 = 1 << 20;

/// Prints the bytes.
pub fn run(args: &Args) -> Result<()> {
    let key = args.key.key()?;
    let output = std::io::stdout();
    ensure!(
        !(args.raw && output.is_terminal()),
        "--raw does not write to a terminal; redirect the output to a file with `> FILE`"
    );
    let objects = open_to_read(&args.pool, &args.access)?;
    let attachment =
        keys::with(&key).attach(&objects, args.name.as_bytes()).map_err(keys::explain)?;
    let range = args.range.unwrap_or(Part::WHOLE).of(attachment.len_bytes())?;
    let memory = Memory::of(&attachment)?;
    // On a terminal the lines themselves show the progress.
    let bar = (!output.is_terminal()).then(|| progress::Bytes::new("dumping"));
    let mut output = BufWriter::new(output.lock());
    let mut lines = HexLines::default();
    for start in range.clone().step_by(CHUNK_BYTES as usize) {
        let bytes = memory.read(start..range.end.min(start + CHUNK_BYTES))?;
        if args.raw {
            output.write_all(&bytes).context(CANNOT_WRITE)?;
        } else {
            lines.add(start, &bytes, &mut output)?;
        }
        if let Some(bar) = &bar {
            bar.at(start + bytes.len() as u64 - range.start, range.end - range.start);
        }
    }
    lines.finish(&mut output)?;
    output.flush().context(CANNOT_WRITE)
}

/// The memory of an attached object.
struct Memory<'a> {
    attachment: &'a Attachment,
    process: File,
}

impl Memory<'_> {
    fn of(attachment: &Attachment) -> Result<Memory<'_>> {
        let process = File::open("/proc/self/mem").context("cannot open /proc/self/mem")?;
        Ok(Memory { attachment, process })
    }

    fn read(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let address = self.attachment.address() + range.start;
        self.process.read_exact_at(&mut bytes, address).with_context(|| {
            format!(
                "cannot read bytes {} to {} of {}: the media failed, or were cut short meanwhile",
                range.start,
                range.end,
                output::escaped(self.attachment.name().as_bytes()),
            )
        })?;
        Ok(bytes)
    }
}

/// Bytes per line.
const LINE_BYTES: usize = 16;

/// Writes bytes like `xxd -a`. Lines of zeros are held back until the length of their run is known.
#[derive(Default)]
struct HexLines {
    /// Offsets of the first and the last held-back line of zeros.
    zeros: Option<(u64, u64)>,
    /// Length of the last one: the range may end inside a line.
    last_len: usize,
}

impl HexLines {
    /// Adds the bytes at an offset, in whole lines except at the end of the range.
    fn add(&mut self, offset: u64, bytes: &[u8], output: &mut impl Write) -> Result<()> {
        for (index, line) in bytes.chunks(LINE_BYTES).enumerate() {
            let at = offset + (index * LINE_BYTES) as u64;
            if line.iter().all(|&byte| byte == 0) {
                let first = self.zeros.map_or(at, |(first, _)| first);
                (self.zeros, self.last_len) = (Some((first, at)), line.len());
            } else {
                self.end_zeros(false, output)?;
                write_line(at, line, output)?;
            }
        }
        Ok(())
    }

    fn finish(&mut self, output: &mut impl Write) -> Result<()> {
        self.end_zeros(true, output)
    }

    fn end_zeros(&mut self, is_end: bool, output: &mut impl Write) -> Result<()> {
        let Some((first, last)) = self.zeros.take() else { return Ok(()) };
        let zeros = [0; LINE_BYTES];
        let count = (last - first) / LINE_BYTES as u64 + 1;
        // If they end the dump, the last one is printed, so that its length is visible.
        let shown = if is_end { 3 } else { 2 };
        if count <= shown {
            for at in (first..last).step_by(LINE_BYTES) {
                write_line(at, &zeros, output)?;
            }
            return write_line(last, &zeros[..self.last_len], output);
        }
        write_line(first, &zeros, output)?;
        output.write_all(b"*\n").context(CANNOT_WRITE)?;
        if is_end {
            write_line(last, &zeros[..self.last_len], output)?;
        }
        Ok(())
    }
}

/// `00000010: 6865 6c6c 6f20 776f 726c 640a            hello world.`
fn write_line(offset: u64, bytes: &[u8], output: &mut impl Write) -> Result<()> {
    let mut line = format!("{offset:08x}: ");
    for index in 0..LINE_BYTES {
        match bytes.get(index) {
            Some(byte) => line.push_str(&format!("{byte:02x}")),
            None => line.push_str("  "),
        }
        if index % 2 == 1 {
            line.push(' ');
        }
    }
    line.push(' ');
    for &byte in bytes {
        let is_visible = byte.is_ascii_graphic() || byte == b' ';
        line.push(if is_visible { byte.into() } else { '.' });
    }
    line.push('\n');
    output.write_all(line.as_bytes()).context(CANNOT_WRITE)
}

#[cfg(test)]
mod tests {
    use aquifer::{Objects, Pool};

    use super::*;

    #[test]
    fn parts_parse() {
        let part = |start, end| Ok(Part { start, end });
        assert_eq!("..".parse(), part(0, None));
        assert_eq!("4K..0x2000".parse(), part(4096, Some(8192)));
        assert_eq!("5..5".parse(), part(5, Some(5)));
        for wrong in ["", "5", "5..4", "x..", "..-1", "1..2..3", "0x..5"] {
            assert!(wrong.parse::<Part>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_without_media_is_an_error_and_not_a_signal() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let open = Pool::options();
        let pool = open.create(&path, 1 << 20).unwrap();
        let objects = Objects::new(pool);
        objects.create("graph", 64 << 10).unwrap();
        let attachment = objects.attach("graph").unwrap();
        let memory = Memory::of(&attachment).unwrap();
        assert_eq!(memory.read(0..4096).unwrap(), vec![0; 4096]);
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        let error = memory.read(4096..8192).unwrap_err().to_string();
        assert!(error.contains("bytes 4096 to 8192 of graph"), "{error}");
    }
}
