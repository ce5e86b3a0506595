//! `aquifer object create`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::Result;
use aquifer::{CreateObject, Objects};
use aquifer_sys::units::Bytes;

use super::describe;
use super::keys::{NEW_KEYS_HELP, NewKeysArgs};
use crate::access::Access;
use crate::output;

/// Arguments of `aquifer object create`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{NEW_KEYS_HELP}"))]
pub struct Args {
    /// Path of the pool
    pool: PathBuf,

    /// Name of the object: up to 255 bytes
    name: OsString,

    /// Length of the object, for example 64M (K, M, G and T are powers of 1024), rounded up to whole
    /// pages of 4 KiB
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    size: Bytes,

    #[command(flatten)]
    keys: NewKeysArgs,

    /// Allow it to move to another address when it grows; plain pointers into it then become
    /// invalid
    #[arg(long)]
    relocatable: bool,

    /// Create it for a heap: programs access it only through the heap's data structures
    #[arg(long)]
    heap: bool,

    /// Address at which it is attached, for example 0x300000000000 [default: a random address]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    address: Option<u64>,

    /// Print the result as one JSON object, like `aquifer object info`
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer object create data.pool graph --size 64M
  aquifer object create data.pool graph --size 64M --write-key-file ~/.graph.key
  aquifer object create data.pool words --size 1G --heap
  aquifer object create data.pool rows --size 1M --json | jq .address";

fn address(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("`{text}` is not an address; write for example 0x300000000000"))
}

/// Creates the object and prints its address.
pub fn run(args: &Args) -> Result<()> {
    let (read, write) = (args.keys.read_key()?, args.keys.write_key()?);
    let mut options = CreateObject::new().relocatable(args.relocatable).heap(args.heap);
    if let Some(key) = &read {
        options = options.read_key(key);
    }
    if let Some(key) = &write {
        options = options.write_key(key);
    }
    if let Some(address) = args.address {
        options = options.address(address);
    }
    let name = args.name.as_bytes();
    let objects = Objects::new(args.access.open(&args.pool)?);
    options.create(&objects, name, args.size.0)?;
    let object = describe::one(&objects, name)?;
    if args.json {
        return output::print_json(&object, true);
    }
    let pool = args.pool.display().to_string();
    output::print(&format!("created {}", object.to_text(&pool)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_hexadecimal_or_decimal() {
        assert_eq!(address("0x300000000000"), Ok(0x3000_0000_0000));
        assert_eq!(address("4096"), Ok(4096));
        for wrong in ["", "0x", "-1", "0xg", "12 parsecs"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }
}
