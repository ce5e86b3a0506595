//! Prints objects of object stores.

use std::io::Read as _;

use anyhow::{Result, bail};
use aquifer::remote::RemoteStore;

use super::{Args, write_all};
use crate::remote::{ObjectReader, TierWay};

/// Prints an object. `store` is that of the previous one, whose connections serve the others of its bucket.
pub fn print(
    args: &Args,
    store: &mut Option<(RemoteStore, Option<TierWay>)>,
    url: &str,
    buffer: &mut [u8],
) -> Result<()> {
    if !matches!(store, Some((open, _)) if open.key_of(url)?.is_some()) {
        *store = Some((args.remote.options(url)?.store(url)?, args.remote.tier(url)?));
    }
    let (store, tier) = store.as_ref().expect("opened above");
    let (key, is_prefix) = store.key_of(url)?.expect("its own URL");
    if is_prefix {
        bail!("{}: names no object; `aquifer get -r` copies what is below it", store.url_of(&key));
    }
    let mut reader = ObjectReader::open(store, &key, tier.as_ref())?;
    args.range.check(reader.len_bytes(), &store.url_of(&key))?;
    reader.set_range(args.range.start..args.range.end);
    write_all(buffer, |buffer| Ok(reader.read(buffer)?))
}
