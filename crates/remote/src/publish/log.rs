//! The log of a prefix: which snapshots there are, and which objects may be deleted.
//!
//! [`super`] has the argument for why it is correct; this has the steps.

use std::collections::HashMap;

use bytes::Bytes;

use super::PublishError;
use super::depot::{Depot, Kind, Listed, PROBES, log_name, name_of};
use super::layout::{
    Body, Collection, Entry, Hash, MOST_ENTRY_BYTES, Reference, Snapshot, Wrong, decode_table,
};

/// How often to read the log again that others change meanwhile.
const MOST_LOOKS: usize = 20;
/// Most snapshots behind the last collection. A forged entry may claim any number.
const MOST_UNCOLLECTED: u64 = 1 << 20;

/// Objects that snapshots need, and the lengths of those that were not found yet.
type Needed = HashMap<(Kind, Hash, u64), Option<u32>>;

/// The log as of one moment.
#[derive(Debug, Clone)]
pub(super) struct View {
    /// The newest entry; 0: the log is empty.
    pub head: u64,
    /// The newest entry, unless the log is empty.
    newest: Option<Entry>,
    /// The last collection; 0: none.
    pub last_collection: u64,
    /// Objects of an earlier epoch may have been deleted, unless a live snapshot needs them.
    pub cutoff: u64,
    /// Positions of the snapshots that there are, ascending.
    pub live: Vec<u64>,
}

impl View {
    const EMPTY: View =
        View { head: 0, newest: None, last_collection: 0, cutoff: 0, live: Vec::new() };

    /// The pool whose snapshots these are.
    pub fn uuid(&self) -> Option<uuid::Uuid> {
        self.newest.as_ref().map(|entry| entry.uuid)
    }

    pub fn is_live(&self, position: u64) -> bool {
        self.live.binary_search(&position).is_ok()
    }
}

/// The least age of a probe that is deleted. A publisher between its two requests needs its own, or would take the store for
/// one that ignores conditions.
const PROBE_AGE_S: i64 = 24 * 3600;

impl Depot {
    /// Reads the entry at a position; `None` if there is none.
    pub async fn entry(&self, position: u64) -> Result<Option<Entry>, PublishError> {
        let name = log_name(position);
        let Some(bytes) = self.get(&name, MOST_ENTRY_BYTES).await? else { return Ok(None) };
        let decoded = Entry::decode(&bytes, position);
        decoded.map(Some).map_err(|wrong| self.wrong(&name, wrong))
    }

    /// Reads the log.
    pub async fn view(&self) -> Result<View, PublishError> {
        for _ in 0..MOST_LOOKS {
            let Some(&(head, _)) = self.positions().await?.last() else {
                return Ok(View::EMPTY);
            };
            // An entry that is gone was removed by a later collection.
            let Some(newest) = self.entry(head).await? else { continue };
            let collection = match &newest.body {
                Body::Collection(collection) => Some((head, collection.clone())),
                Body::Snapshot(_) if newest.last_collection == 0 => None,
                Body::Snapshot(_) => match self.entry(newest.last_collection).await? {
                    None => continue,
                    Some(Entry { body: Body::Collection(collection), position, .. }) => {
                        Some((position, collection))
                    }
                    Some(Entry { position, .. }) => {
                        let wrong = Wrong::Damaged("it is not a collection");
                        return Err(self.wrong(&log_name(position), wrong));
                    }
                },
            };
            let (last_collection, Collection { cutoff, kept }) =
                collection.unwrap_or((0, Collection { cutoff: 0, kept: Vec::new() }));
            if head - last_collection > MOST_UNCOLLECTED {
                let wrong = Wrong::Damaged("there are not so many snapshots");
                return Err(self.wrong(&log_name(head), wrong));
            }
            // Each position behind the last collection has a snapshot, whatever a listing that took its time shows.
            let live = kept.into_iter().chain(last_collection + 1..=head).collect();
            return Ok(View { head, newest: Some(newest), last_collection, cutoff, live });
        }
        Err(PublishError::Contended { url: self.shown.clone(), attempts: MOST_LOOKS })
    }

    /// Reads a snapshot that the log had; `None` if it was removed meanwhile.
    pub async fn snapshot(&self, position: u64) -> Result<Option<(Entry, Snapshot)>, PublishError> {
        let Some(entry) = self.entry(position).await? else { return Ok(None) };
        match entry.body.clone() {
            Body::Snapshot(snapshot) => Ok(Some((entry, snapshot))),
            Body::Collection(_) => {
                let wrong = Wrong::Damaged("it is not a snapshot");
                Err(self.wrong(&log_name(position), wrong))
            }
        }
    }

    /// Reads a table of a snapshot.
    pub async fn table(
        &self,
        snapshot: &Snapshot,
        table: usize,
    ) -> Result<Vec<Reference>, PublishError> {
        let (of, count) = (&snapshot.tables[table], snapshot.chunks_of_table(table));
        if of.is_none() {
            return Ok(vec![Reference::NONE; count]);
        }
        let bytes = self.fetch(Kind::Table, of).await?;
        decode_table(&bytes, count, snapshot.chunk_bytes)
            .map_err(|wrong| self.wrong(&name_of(Kind::Table, &of.hash, of.epoch), wrong))
    }

    /// Appends an entry behind the head of a view. Returns false if the log has changed meanwhile. After an error it is there
    /// or not.
    pub async fn append(&self, entry: &Entry) -> Result<bool, PublishError> {
        let bytes = Bytes::from(entry.encode());
        let name = log_name(entry.position);
        let created = self.create(&name, bytes).await;
        // If that was refused or failed, the answer to the first attempt of the request may have been lost. And a store whose
        // conditional puts are not quite atomic may have taken both of two.
        let found = match (self.entry(entry.position).await, &created) {
            // The first failure says more.
            (Err(_), Err(_)) => None,
            (found, _) => found?,
        };
        if found.as_ref() == Some(entry) {
            return Ok(true);
        }
        created.map(|_| false)
    }
}

/// What a collection did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Collected {
    pub snapshots: u64,
    pub objects: u64,
}

/// A deliberate mistake, which the tests must detect.
#[cfg_attr(not(test), allow(dead_code, reason = "made by tests only"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mutant {
    /// Deletes before the log says so.
    DeletesUnsaid,
    /// Deletes although a later collection may have removed this one's entry, and its position was used again.
    DeletesUnchecked,
    /// Takes what it has uploaded or found to be there still, although a collection came in between.
    TrustsBefore,
    /// Does not look again whether its entry is in the log that counts.
    CommitsUnchecked,
    /// Uploads under the name that was condemned before.
    ReusesNames,
    /// Takes what a listing has, also if it may have been condemned.
    TrustsListed,
}

impl Depot {
    /// Removes all snapshots but the newest `keep`, and deletes what no other needs, except for what was uploaded by
    /// a publisher that began at most `grace_s` seconds ago. Returns `None` if another publisher was faster.
    pub async fn collect(
        &self,
        keep: usize,
        grace_s: i64,
        created_ns: u64,
        nonce: u64,
        mutant: Option<Mutant>,
    ) -> Result<Option<Collected>, PublishError> {
        let view = self.view().await?;
        let Some(uuid) = view.uuid() else { return Ok(Some(Collected::default())) };
        let positions = self.positions().await?;
        let kept = view.live[view.live.len().saturating_sub(keep)..].to_vec();
        // What a listed snapshot needs is read before anything is removed.
        let mut needed = Needed::new();
        for &position in &kept {
            let Some((_, snapshot)) = self.snapshot(position).await? else { return Ok(None) };
            match self.needed_by(&snapshot, &mut needed).await {
                // The snapshot may have been removed meanwhile.
                Err(PublishError::Missing { .. }) if self.view().await?.head != view.head => {
                    return Ok(None);
                }
                read => read?,
            }
        }
        // The store's clock, as of its newest entry: only differences of it count.
        let now = positions.iter().map(|(_, modified)| *modified).max().unwrap_or(0);
        let is_old = |&&(position, modified): &&(u64, i64)| {
            position <= view.head && modified <= now.saturating_sub(grace_s)
        };
        let old = positions.iter().filter(is_old).map(|(position, _)| *position).max();
        let cutoff = view.cutoff.max(old.unwrap_or(0));
        let entry = Entry {
            position: view.head + 1,
            uuid,
            last_collection: view.last_collection,
            created_ns,
            nonce,
            body: Body::Collection(Collection { cutoff, kept: kept.clone() }),
        };
        // An older snapshot may be the last that is whole, so it stays if one that is kept lacks anything.
        let garbage = match self.garbage(cutoff, needed).await {
            Err(PublishError::Missing { .. }) if self.view().await?.head != view.head => {
                return Ok(None);
            }
            listed => listed?,
        };
        if mutant == Some(Mutant::DeletesUnsaid) {
            self.delete(garbage.clone()).await?;
        }
        if !self.append(&entry).await? {
            return Ok(None);
        }
        // Otherwise this position was used before, and a later collection has removed its entry.
        if mutant != Some(Mutant::DeletesUnchecked)
            && self.view().await?.last_collection != entry.position
        {
            return Ok(None);
        }
        let objects = self.delete(garbage).await?;
        let is_removed =
            |position: &u64| *position < entry.position && kept.binary_search(position).is_err();
        let removed: Vec<u64> = positions.iter().map(|(position, _)| *position).collect();
        let removed: Vec<u64> = removed.into_iter().filter(is_removed).collect();
        self.delete(removed.into_iter().map(log_name).collect()).await?;
        self.delete_probes(now.saturating_sub(grace_s.max(PROBE_AGE_S))).await?;
        let snapshots = (view.live.len() - kept.len()) as u64;
        Ok(Some(Collected { snapshots, objects }))
    }

    /// Deletes the probes of publishers that were killed, or that may not delete.
    async fn delete_probes(&self, until: i64) -> Result<(), PublishError> {
        let mut old = Vec::new();
        self.list(PROBES, |Listed { name, modified, .. }| {
            let is_probe = name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
            if is_probe && modified <= until {
                old.push(format!("{PROBES}/{name}"));
            }
        })
        .await?;
        self.delete(old).await.map(drop)
    }

    async fn needed_by(
        &self,
        snapshot: &Snapshot,
        needed: &mut Needed,
    ) -> Result<(), PublishError> {
        for (index, table) in snapshot.tables.iter().enumerate() {
            // A table that is there in another snapshot has the same chunks.
            let of = (Kind::Table, table.hash, table.epoch);
            if table.is_none() || needed.insert(of, Some(table.len_bytes)).is_some() {
                continue;
            }
            let chunks = self.table(snapshot, index).await?;
            let chunks = chunks.iter().filter(|chunk| !chunk.is_none());
            let of = |of: &Reference| ((Kind::Chunk, of.hash, of.epoch), Some(of.len_bytes));
            needed.extend(chunks.map(of));
        }
        Ok(())
    }

    /// The objects of an epoch before `cutoff` that are not needed. Fails if one that is needed is not there, or not as
    /// long as it has to be.
    async fn garbage(&self, cutoff: u64, mut needed: Needed) -> Result<Vec<String>, PublishError> {
        let (mut garbage, mut cut) = (Vec::new(), None);
        for kind in Kind::ALL {
            let each = |hash: Hash, epoch, found_bytes| {
                // A listing may have an object twice.
                match needed.get_mut(&(kind, hash, epoch)).map(Option::take) {
                    Some(Some(len_bytes)) if found_bytes != u64::from(len_bytes) => {
                        cut = Some(name_of(kind, &hash, epoch));
                    }
                    None if epoch < cutoff => garbage.push(name_of(kind, &hash, epoch)),
                    _ => {}
                }
            };
            self.objects(kind, each).await?;
        }
        if let Some(((kind, hash, epoch), _)) = needed.iter().find(|(_, len)| len.is_some()) {
            return Err(PublishError::Missing { object: self.url(&name_of(*kind, hash, *epoch)) });
        }
        match cut {
            Some(name) => Err(self.wrong(&name, Wrong::Damaged("it has another length"))),
            None => Ok(garbage),
        }
    }
}
