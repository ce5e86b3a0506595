//! `put` and `get`: from anywhere to anywhere, as long as one of both sides is a pool or an object store.

#[cfg(feature = "remote")]
mod stores;

use std::path::PathBuf;

use anyhow::{Result, bail};

use super::copying::{self, CopyArgs};
use super::spot::Spot;
#[cfg(feature = "remote")]
use super::tree::Stored;
use super::tree::{Local, Pooled, Tree};
use super::{Place, Pools, of_one_pool};
use crate::access::Access;
#[cfg(feature = "remote")]
use crate::remote::RemoteArgs;

/// How the two sides are reached.
pub struct Ways<'a> {
    pub copy: &'a CopyArgs,
    pub access: Access,
    #[cfg(feature = "remote")]
    pub remote: &'a RemoteArgs,
}

/// The sources of a command, all from one tree.
enum From {
    Local(Vec<PathBuf>),
    Pool(Pooled, Place, Vec<PathBuf>),
    #[cfg(feature = "remote")]
    Store(Box<Stored>, Vec<PathBuf>),
}

const SEVERAL_KINDS: &str =
    "sources are of several kinds; copy from one pool, one bucket or the machine at a time";

/// Copies, and makes the copy durable.
pub fn run(ways: &Ways<'_>, sources: &[Spot], destination: &Spot) -> Result<()> {
    #[cfg(feature = "remote")]
    let (sources, destination) = &stores::without_paths(ways, sources, destination)?;
    match (ways.open(sources)?, destination) {
        (From::Local(sources), Spot::Pool(place)) => {
            ways.to_pool((&Local, &sources), place, copying::identity(place))
        }
        (From::Pool(pool, first, sources), Spot::Local(path)) => {
            let spared = copying::identity(&first);
            copying::copy(ways.copy, (&pool, &sources), (&Local, path), spared, |_, _| Ok(()))?
                .end()
        }
        (From::Pool(..), Spot::Pool(_)) => bail!("both are in pools; use `aquifer cp`"),
        (From::Local(_), Spot::Local(_)) => {
            bail!("neither is in a pool or an object store; use `cp`")
        }
        #[cfg(feature = "remote")]
        (From::Store(from, sources), to) => stores::from_store(ways, (&from, &sources), to),
        #[cfg(feature = "remote")]
        (From::Local(sources), Spot::Url(url)) => stores::to_store(ways, (&Local, &sources), url),
        #[cfg(feature = "remote")]
        (From::Pool(pool, _, sources), Spot::Url(url)) => {
            stores::to_store(ways, (&pool, &sources), url)
        }
    }
}

impl Ways<'_> {
    fn open(&self, sources: &[Spot]) -> Result<From> {
        let (mut places, mut paths) = (vec![], vec![]);
        #[cfg(feature = "remote")]
        if let Some(urls) = sources.iter().map(Spot::url).collect::<Option<Vec<_>>>() {
            return stores::open(self, &urls);
        }
        for source in sources {
            match source.clone() {
                Spot::Pool(place) => places.push(place),
                Spot::Local(path) => paths.push(path),
                #[cfg(feature = "remote")]
                Spot::Url(_) => bail!(SEVERAL_KINDS),
            }
        }
        if places.is_empty() {
            return Ok(From::Local(paths));
        }
        if !paths.is_empty() {
            bail!(SEVERAL_KINDS);
        }
        let (first, paths) = of_one_pool(&places)?;
        let pool = Pools::to_read(&self.access.to_read()).files(first)?;
        Ok(From::Pool(Pooled::new(pool, first), first.clone(), paths))
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
}
