//! `aquifer mknod`: creates named pipes, sockets and devices in a pool.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Result, anyhow, bail};
use aquifer::Files;
use aquifer::fs::SpecialFile;

use super::failure::At;
use super::{PATHS_HELP, Place, place};
use crate::access::Access;

/// Arguments of `aquifer mknod`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{HELP}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// File to create
    #[arg(value_parser = place::parser(), value_name = "POOL:/PATH")]
    place: Place,

    /// p: a named pipe, s: a socket, b: a block device, c or u: a character device
    #[arg(value_name = "TYPE", value_parser = ["p", "s", "b", "c", "u"], hide_possible_values = true)]
    kind: String,

    /// Major number of a device: decimal, with 0x hexadecimal, with 0 octal
    #[arg(value_name = "MAJOR", value_parser = number, requires = "minor")]
    major: Option<u32>,

    /// Minor number of a device
    #[arg(value_name = "MINOR", value_parser = number)]
    minor: Option<u32>,

    /// Permissions, in octal [default: 666 without the bits of the umask]
    #[arg(short, long, value_name = "MODE", value_parser = super::mode)]
    mode: Option<u32>,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer mknod data.pool:/dev/null c 1 3
  aquifer mknod -m 660 data.pool:/dev/sda b 8 0
  aquifer mknod data.pool:/run/queue p";

/// The help text after the examples of both commands that create such files.
pub const HELP: &str = "\
A pool keeps such files as parts of trees; to be opened, they are copied out of it, with `aquifer get -r`. They are durable when \
the command ends.";

fn number(text: &str) -> Result<u32, String> {
    let (digits, radix) = match text.strip_prefix('0') {
        Some(rest) if rest.starts_with(['x', 'X']) => (&rest[1..], 16),
        Some(rest) if !rest.is_empty() => (rest, 8),
        _ => (text, 10),
    };
    u32::from_str_radix(digits, radix)
        .map_err(|_| "a device number is an integer up to 4294967295".to_owned())
}

/// Creates the file, durably.
pub fn run(args: &Args) -> Result<()> {
    let number = args.major.zip(args.minor).map(|(major, minor)| libc::makedev(major, minor));
    let needed = || anyhow!("a device needs its major and minor number, for example `c 1 3`");
    let special = match (args.kind.as_str(), number) {
        ("p", None) => SpecialFile::Fifo,
        ("s", None) => SpecialFile::Socket,
        ("p" | "s", Some(_)) => bail!("only devices have numbers"),
        ("b", number) => SpecialFile::BlockDevice(number.ok_or_else(needed)?),
        (_, number) => SpecialFile::CharDevice(number.ok_or_else(needed)?),
    };
    let places = std::slice::from_ref(&args.place);
    super::change_each(&args.access, places, |files, place| make(files, place, special, args.mode))
}

/// Creates a special file, with permissions that the umask does not change if they are given.
pub fn make(files: &Files, place: &Place, special: SpecialFile, mode: Option<u32>) -> Result<()> {
    files.create_special(place.path(), special, mode.unwrap_or(0o666)).at(place)?;
    match mode {
        Some(mode) => files.set_permissions(place.path(), Permissions::from_mode(mode)).at(place),
        None => Ok(()),
    }
}
