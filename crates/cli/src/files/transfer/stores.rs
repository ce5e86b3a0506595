//! Copies from and to object stores.

use std::path::PathBuf;

use anyhow::{Result, bail};
use aquifer::remote::RemoteStore;
use aquifer_sys::interrupt;

use super::super::copying;
use super::super::spot::Spot;
use super::super::tree::{Local, Stored, Tree};
use super::{From, Ways};

/// Sources and destination, with paths of the machine in place of `file://` URLs.
pub fn without_paths(
    ways: &Ways<'_>,
    sources: &[Spot],
    destination: &Spot,
) -> Result<(Vec<Spot>, Spot)> {
    let sources = sources.iter().map(|spot| local(ways, spot.clone()));
    Ok((sources.collect::<Result<_>>()?, local(ways, destination.clone())?))
}

/// A `file://` URL is a path of the machine.
fn local(ways: &Ways<'_>, spot: Spot) -> Result<Spot> {
    let Spot::Url(url) = &spot else { return Ok(spot) };
    let is_file =
        url.split_once("://").is_some_and(|(scheme, _)| scheme.eq_ignore_ascii_case("file"));
    if !is_file {
        return Ok(spot);
    }
    let key = ways.remote.options(url)?.store(url)?.key().to_owned();
    let slash = if url.ends_with('/') && !key.is_empty() { "/" } else { "" };
    Ok(Spot::Local(format!("/{key}{slash}").into()))
}

/// Opens the store of these objects.
pub fn open(ways: &Ways<'_>, urls: &[&str]) -> Result<From> {
    let [first, ..] = urls else { bail!("no file is given") };
    let store = store(ways, first)?;
    let paths = urls.iter().map(|url| path_in(&store, url)).collect::<Result<_>>()?;
    let stored = Stored::new(store, false)?.with_tier(ways.remote.tier(first)?);
    Ok(From::Store(Box::new(stored), paths))
}

fn store(ways: &Ways<'_>, url: &str) -> Result<RemoteStore> {
    let options = ways.remote.options(url)?.cancelled_by(|| interrupt::check().is_err());
    Ok(options.store(url)?)
}

/// Copies objects.
pub fn from_store(ways: &Ways<'_>, from: (&Stored, &[PathBuf]), to: &Spot) -> Result<()> {
    match to {
        Spot::Pool(place) => ways.to_pool(from, place, None),
        Spot::Local(path) => {
            copying::copy(ways.copy, from, (&Local, path), None, |_, _| Ok(()))?.end()
        }
        Spot::Url(url) => to_store(ways, from, url),
    }
}

/// Copies to objects.
pub fn to_store<S: Tree>(ways: &Ways<'_>, from: (&S, &[PathBuf]), url: &str) -> Result<()> {
    let store = store(ways, url)?;
    let path = path_in(&store, url)?;
    let to = Stored::new(store, ways.copy.replaces())?;
    copying::copy(ways.copy, from, (&to, &path), None, |_, _| Ok(()))?.end()
}

/// The path of a URL in the tree of its store.
fn path_in(store: &RemoteStore, url: &str) -> Result<PathBuf> {
    // Of an HTTP server each URL is a store of its own.
    let Some((key, is_prefix)) = store.key_of(url)? else {
        let first = store.url_of(store.key());
        bail!("{first} and the other URLs are of different stores; copy from one at a time");
    };
    if !store.lists() {
        return Ok(store.name().unwrap_or_default().into());
    }
    let slash = if is_prefix && !key.is_empty() { "/" } else { "" };
    Ok(format!("{key}{slash}").into())
}
