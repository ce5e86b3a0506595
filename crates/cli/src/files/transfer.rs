//! `put` and `get`: from anywhere to anywhere, as long as one of both sides is a pool or an object store.

use std::path::PathBuf;

use anyhow::{Result, bail};
use aquifer::remote::RemoteStore;
use aquifer_sys::interrupt;

use super::copying::{self, CopyArgs};
use super::spot::Spot;
use super::tree::{Local, Pooled, Stored, Tree};
use super::{Place, Pools, of_one_pool};
use crate::access::Access;
use crate::remote::RemoteArgs;

/// How the two sides are reached.
pub struct Ways<'a> {
    pub copy: &'a CopyArgs,
    pub access: Access,
    pub remote: &'a RemoteArgs,
}

/// The sources of a command, all from one tree.
enum From {
    Local(Vec<PathBuf>),
    Pool(Pooled, Place, Vec<PathBuf>),
    Store(Box<Stored>, Vec<PathBuf>),
}

/// Copies, and makes the copy durable.
pub fn run(ways: &Ways<'_>, sources: &[Spot], destination: &Spot) -> Result<()> {
    let sources = sources.iter().map(|spot| ways.local(spot.clone()));
    let sources: Vec<Spot> = sources.collect::<Result<_>>()?;
    let destination = ways.local(destination.clone())?;
    match (ways.open(&sources)?, &destination) {
        (From::Local(sources), Spot::Pool(place)) => {
            ways.to_pool((&Local, &sources), place, copying::identity(place))
        }
        (From::Store(from, sources), Spot::Pool(place)) => {
            ways.to_pool((&*from, &sources), place, None)
        }
        (From::Pool(pool, first, sources), Spot::Local(path)) => {
            let spared = copying::identity(&first);
            copying::copy(ways.copy, (&pool, &sources), (&Local, path), spared, |_, _| Ok(()))?
                .end()
        }
        (From::Store(from, sources), Spot::Local(path)) => {
            copying::copy(ways.copy, (&*from, &sources), (&Local, path), None, |_, _| Ok(()))?.end()
        }
        (From::Local(sources), Spot::Url(url)) => ways.to_store((&Local, &sources), url),
        (From::Pool(pool, _, sources), Spot::Url(url)) => ways.to_store((&pool, &sources), url),
        (From::Store(from, sources), Spot::Url(url)) => ways.to_store((&*from, &sources), url),
        (From::Pool(..), Spot::Pool(_)) => bail!("both are in pools; use `aquifer cp`"),
        (From::Local(_), Spot::Local(_)) => {
            bail!("neither is in a pool or an object store; use `cp`")
        }
    }
}

impl Ways<'_> {
    /// A `file://` URL is a path of the machine.
    fn local(&self, spot: Spot) -> Result<Spot> {
        let Spot::Url(url) = &spot else { return Ok(spot) };
        let is_file =
            url.split_once("://").is_some_and(|(scheme, _)| scheme.eq_ignore_ascii_case("file"));
        if !is_file {
            return Ok(spot);
        }
        let key = self.remote.options(url)?.store(url)?.key().to_owned();
        let slash = if url.ends_with('/') && !key.is_empty() { "/" } else { "" };
        Ok(Spot::Local(format!("/{key}{slash}").into()))
    }

    fn open(&self, sources: &[Spot]) -> Result<From> {
        let (mut urls, mut places, mut paths) = (vec![], vec![], vec![]);
        for source in sources {
            match source.clone() {
                Spot::Url(url) => urls.push(url),
                Spot::Pool(place) => places.push(place),
                Spot::Local(path) => paths.push(path),
            }
        }
        match (&urls[..], &places[..], &paths[..]) {
            ([], [], _) => Ok(From::Local(paths)),
            ([], _, []) => {
                let (first, paths) = of_one_pool(&places)?;
                let pool = Pools::to_read(&self.access.to_read()).files(first)?;
                Ok(From::Pool(Pooled::new(pool, first), first.clone(), paths))
            }
            ([first, ..], [], []) => {
                let store = self.store(first)?;
                let path = |url: &String| path_in(&store, url);
                let paths = urls.iter().map(path).collect::<Result<_>>()?;
                let tier = self.remote.tier(first)?;
                let stored = Stored::new(store, false)?.with_tier(tier);
                Ok(From::Store(Box::new(stored), paths))
            }
            _ => bail!(
                "sources are of several kinds; copy from one pool, one bucket or the machine at a time"
            ),
        }
    }

    fn store(&self, url: &str) -> Result<RemoteStore> {
        let options = self.remote.options(url)?.cancelled_by(|| interrupt::check().is_err());
        Ok(options.store(url)?)
    }

    fn to_pool<S: Tree>(
        &self,
        from: (&S, &[PathBuf]),
        place: &Place,
        spared: Option<(u64, u64)>,
    ) -> Result<()> {
        let mut pools = Pools::to_write(&self.access);
        let pool = Pooled::new(pools.files(place)?, place);
        let done = copying::copy(self.copy, from, (&pool, place.path()), spared, |_, _| Ok(()));
        // Also sync what was copied before an error or an interruption.
        let synced = pools.sync();
        done.and_then(|done| synced.and_then(|()| done.end()))
    }

    fn to_store<S: Tree>(&self, from: (&S, &[PathBuf]), url: &str) -> Result<()> {
        let store = self.store(url)?;
        let path = path_in(&store, url)?;
        let to = Stored::new(store, self.copy.replaces())?;
        copying::copy(self.copy, from, (&to, &path), None, |_, _| Ok(()))?.end()
    }
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
