//! Publishing: sends the chunks that are new, their tables, and the entry of the log.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use aquifer_pool::PoolError;
use aquifer_pool::media::MediaError;
use bytes::Bytes;
use tokio::sync::OnceCell;

use super::depot::{Depot, Kind, PROBES, log_name, name_of};
use super::frozen::Frozen;
use super::layout::{
    Body, Entry, Hash, PAGE_BYTES, Reference, Snapshot, State, TABLE_CHUNKS, encode_chunk,
    encode_table, hash,
};
use super::log::{Mutant, View};
use super::paced::Paced;
use super::{MOST_MEMORY_BYTES, Progress, PublishError, Published, nonce};
use crate::runtime::aside;

/// How often to start over because another publisher was faster.
const MOST_ATTEMPTS: usize = 50;
/// Objects of one answer to a request for a listing.
const LISTED_AT_ONCE: usize = 1000;

/// Reads a range of the pool; what is not in use stays as it is.
type Read = dyn Fn(u64, &mut [u8]) -> Result<(), MediaError> + Send + Sync;

/// What is published.
pub(super) struct Content {
    pub state: State,
    pub chunk_bytes: u32,
    /// Whether all of it is read and sent, whatever snapshots have.
    pub is_reread: bool,
    /// Bytes in use of a range, from its offset and length.
    used_bytes: Box<dyn Fn(u64, u64) -> u64 + Send + Sync>,
    read: Box<Read>,
}

impl Content {
    pub fn of(frozen: Frozen, chunk_bytes: u32, is_reread: bool) -> Content {
        let frozen = Arc::new(frozen);
        let counted = frozen.clone();
        Content {
            state: frozen.state.clone(),
            chunk_bytes,
            is_reread,
            used_bytes: Box::new(move |offset, len| counted.used_bytes(offset, len)),
            read: Box::new(move |offset, to| frozen.read(offset, to)),
        }
    }

    #[cfg(test)]
    pub fn of_bytes(uuid: uuid::Uuid, bytes: Vec<u8>, chunk_bytes: u32) -> Content {
        let len_bytes = bytes.len() as u64;
        // As in a pool: others for other bytes.
        let generation = u64::from_le_bytes(*hash(&bytes).first_chunk().expect("of 32 bytes"));
        let state = State { uuid, len_bytes, sequence: 1, generation, tail_lsn: 0 };
        Content {
            state,
            chunk_bytes,
            is_reread: false,
            used_bytes: Box::new(|_, len| len),
            read: Box::new(move |offset, to| {
                to.copy_from_slice(&bytes[offset as usize..][..to.len()]);
                Ok(())
            }),
        }
    }

    fn chunks(&self) -> u64 {
        self.state.len_bytes.div_ceil(u64::from(self.chunk_bytes))
    }

    /// Offset and length of a chunk.
    fn place(&self, chunk: u64) -> (u64, u64) {
        let offset_bytes = chunk * u64::from(self.chunk_bytes);
        let len_bytes = (self.state.len_bytes - offset_bytes).min(self.chunk_bytes.into());
        (offset_bytes, len_bytes)
    }

    fn used_bytes_of(&self, chunk: u64) -> u64 {
        let (offset_bytes, len_bytes) = self.place(chunk);
        (self.used_bytes)(offset_bytes, len_bytes)
    }

    /// Reads a chunk and makes its object; `None` if it is all zero.
    fn encode(&self, chunk: u64) -> Result<Option<Encoded>, PublishError> {
        let (offset_bytes, len_bytes) = self.place(chunk);
        let mut bytes = vec![0; len_bytes as usize];
        (self.read)(offset_bytes, &mut bytes).map_err(PoolError::from)?;
        let Some((object, pages)) = encode_chunk(&bytes) else { return Ok(None) };
        Ok(Some(Encoded { hash: hash(&object), pages, object: object.into() }))
    }
}

/// A chunk's object.
struct Encoded {
    hash: Hash,
    pages: u32,
    object: Bytes,
}

/// Objects that are known to be in the store, by kind and hash: their epochs.
type Known = HashMap<(Kind, Hash), u64>;

/// What the newest snapshot tells of the store.
#[derive(Default)]
struct Newest {
    known: Known,
    /// If it is whole, and of chunks of the same size.
    snapshot: Option<Snapshot>,
    is_damaged: bool,
}

/// What is in the store that the newest snapshot does not need: sent by a publisher that failed, or for an older snapshot.
#[derive(Default)]
struct Strays {
    /// Epoch and length of each, of the newest epoch.
    listed: OnceCell<HashMap<(Kind, Hash), (u64, u64)>>,
    /// How many objects were sent before they were listed.
    sent_unlisted: Cell<usize>,
    /// Whether any was taken for granted.
    used: Cell<bool>,
}

/// One attempt to publish, as of one view of the log.
struct Attempt<'a> {
    depot: &'a Depot,
    content: &'a Arc<Content>,
    epoch: u64,
    cutoff: u64,
    known: Known,
    /// Requests that a listing of all objects takes, about.
    listing_requests: usize,
    /// None if what is there cannot be trusted.
    strays: Option<&'a Strays>,
}

/// What was sent, in all attempts.
#[derive(Default)]
struct Sent {
    uploaded: Known,
    read_bytes: u64,
    bytes: u64,
    chunks: u64,
}

impl Depot {
    /// Finds out whether the store heeds conditions: creates an object twice.
    pub async fn check_conditions(&self) -> Result<(), PublishError> {
        let name = format!("{PROBES}/{:016x}", nonce()?);
        // If it is there already, an earlier attempt of the request has created it: the name is random.
        self.create(&name, Bytes::from_static(b"probe")).await?;
        let was_created_again = self.create(&name, Bytes::from_static(b"probe")).await?;
        // Publishing takes no permission to delete: what stays, also of a publisher that was killed, is collected.
        let _ = self.delete(vec![name]).await;
        if was_created_again {
            return Err(PublishError::Unconditional { url: self.shown.clone() });
        }
        Ok(())
    }

    /// Publishes content as a new snapshot.
    pub async fn publish(
        &self,
        content: &Arc<Content>,
        created_ns: u64,
        mutant: Option<Mutant>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Published, PublishError> {
        let (mut sent, strays) = (Sent::default(), Strays::default());
        let mut before: Option<Known> = None;
        let mut first_epoch = None;
        for _ in 0..MOST_ATTEMPTS {
            let view = self.view().await?;
            self.check_pool(&view, content)?;
            let Newest { mut known, snapshot: newest, is_damaged } =
                self.newest(&view, content).await?;
            // Others may have been condemned.
            let is_safe = |epoch: u64| epoch >= view.cutoff || mutant == Some(Mutant::TrustsBefore);
            let safe = sent.uploaded.iter().filter(|(_, epoch)| is_safe(**epoch));
            known.extend(safe.map(|(of, epoch)| (*of, *epoch)));
            if mutant == Some(Mutant::TrustsBefore) {
                known = before.get_or_insert(known).clone();
            }
            let epoch = match mutant {
                Some(Mutant::ReusesNames) => *first_epoch.get_or_insert(view.head),
                _ => view.head,
            };
            let cutoff = if mutant == Some(Mutant::TrustsListed) { 0 } else { view.cutoff };
            let listing_requests = known.len() / LISTED_AT_ONCE;
            // Lengths show little of the damage that there may be.
            let strays = (!content.is_reread && !is_damaged).then_some(&strays);
            let mut attempt =
                Attempt { depot: self, content, epoch, cutoff, known, listing_requests, strays };
            let is_same = |newest: &Snapshot| newest.state == content.state;
            let snapshot = match newest.filter(is_same) {
                Some(newest) => newest,
                None => attempt.send(&mut sent, progress).await?,
            };
            if strays.is_some_and(|strays| strays.used.get()) {
                self.sync_others().await?;
            }
            let nonce = nonce()?;
            let entry = Entry {
                position: view.head + 1,
                uuid: content.state.uuid,
                last_collection: view.last_collection,
                created_ns,
                nonce,
                body: Body::Snapshot(snapshot),
            };
            let is_there = self.append(&entry).await?
                && (mutant == Some(Mutant::CommitsUnchecked)
                    || self.view().await?.is_live(entry.position));
            if is_there {
                let Body::Snapshot(snapshot) = entry.body else { unreachable!("made above") };
                return Ok(Published {
                    snapshot: entry.position,
                    uuid: entry.uuid,
                    pool_bytes: snapshot.state.len_bytes,
                    used_bytes: snapshot.pages * PAGE_BYTES,
                    read_bytes: sent.read_bytes,
                    sent_bytes: sent.bytes,
                    sent_chunks: sent.chunks,
                    removed_snapshots: 0,
                    deleted_objects: 0,
                });
            }
        }
        Err(PublishError::Contended { url: self.shown.clone(), attempts: MOST_ATTEMPTS })
    }

    fn check_pool(&self, view: &View, content: &Content) -> Result<(), PublishError> {
        match view.uuid() {
            Some(found) if found != content.state.uuid => Err(PublishError::OtherPool {
                url: self.shown.clone(),
                found: found.to_string(),
                pool: content.state.uuid.to_string(),
            }),
            _ if view.head >= super::layout::MOST_POSITION => {
                let wrong = super::layout::Wrong::Damaged("its position is the highest there is");
                Err(self.wrong(&log_name(view.head), wrong))
            }
            _ => Ok(()),
        }
    }

    /// The objects of the newest snapshot, and itself if all of its tables can be read. What cannot be read is sent again.
    /// Whether its chunks are still whole is not known without reading them: none is trusted if the pool is to be reread.
    async fn newest(&self, view: &View, content: &Content) -> Result<Newest, PublishError> {
        let mut found = Newest::default();
        if content.is_reread {
            return Ok(found);
        }
        let Some(&newest) = view.live.last() else { return Ok(found) };
        let is_of_bytes = |error: &PublishError| {
            matches!(error, PublishError::Damaged { .. } | PublishError::Missing { .. })
        };
        let snapshot = match self.snapshot(newest).await {
            Ok(Some((_, snapshot))) if snapshot.chunk_bytes == content.chunk_bytes => snapshot,
            Ok(_) => return Ok(found),
            Err(error) if is_of_bytes(&error) => return Ok(Newest { is_damaged: true, ..found }),
            Err(error) => return Err(error),
        };
        for (index, table) in snapshot.tables.iter().enumerate() {
            if table.is_none() {
                continue;
            }
            match self.table(&snapshot, index).await {
                Ok(chunks) => {
                    found.known.insert((Kind::Table, table.hash), table.epoch);
                    let chunks = chunks.iter().filter(|chunk| !chunk.is_none());
                    found
                        .known
                        .extend(chunks.map(|chunk| ((Kind::Chunk, chunk.hash), chunk.epoch)));
                }
                Err(error) if is_of_bytes(&error) => found.is_damaged = true,
                Err(error) => return Err(error),
            }
        }
        found.snapshot = (!found.is_damaged).then_some(snapshot);
        Ok(found)
    }
}

impl Attempt<'_> {
    /// Sends what the store lacks, and returns the snapshot.
    async fn send(
        &mut self,
        sent: &mut Sent,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Snapshot, PublishError> {
        let content = self.content;
        let all: u64 = (content.used_bytes)(0, content.state.len_bytes);
        let mut done = 0;
        progress(Progress::Bytes { done, all });
        let mut snapshot = Snapshot {
            state: content.state.clone(),
            chunk_bytes: content.chunk_bytes,
            stored_bytes: 0,
            pages: 0,
            tables: Vec::new(),
        };
        let in_memory = MOST_MEMORY_BYTES / (2 * u64::from(content.chunk_bytes));
        let at_once = (in_memory as usize).clamp(1, self.depot.in_flight);
        let mut paced = Paced::new(at_once, self.depot.timeout);
        for table in 0..content.chunks().div_ceil(u64::from(TABLE_CHUNKS)) {
            let first = table * u64::from(TABLE_CHUNKS);
            let chunks = first..content.chunks().min(first + u64::from(TABLE_CHUNKS));
            let mut references = Vec::with_capacity((chunks.end - chunks.start) as usize);
            {
                let this = &*self;
                let sent = &mut *sent;
                let is_done = |(reference, was_sent, used_bytes): (Reference, bool, u64)| {
                    if was_sent {
                        sent.bytes += u64::from(reference.len_bytes);
                        sent.chunks += 1;
                    }
                    sent.read_bytes += used_bytes;
                    done += used_bytes;
                    progress(Progress::Bytes { done, all });
                    references.push((reference, was_sent));
                };
                paced.each(chunks, |chunk| this.send_chunk(chunk), is_done).await?;
            }
            // Equal chunks later on are not sent again.
            for (reference, _) in references.iter().filter(|(_, was_sent)| *was_sent) {
                self.known.insert((Kind::Chunk, reference.hash), reference.epoch);
                sent.uploaded.insert((Kind::Chunk, reference.hash), reference.epoch);
            }
            let references: Vec<_> = references.into_iter().map(|(of, _)| of).collect();
            let (table, was_sent) = self.send_table(&references).await?;
            if was_sent {
                sent.bytes += u64::from(table.len_bytes);
                self.known.insert((Kind::Table, table.hash), table.epoch);
                sent.uploaded.insert((Kind::Table, table.hash), table.epoch);
            }
            let chunk_bytes = references.iter().map(|of| u64::from(of.len_bytes)).sum::<u64>();
            snapshot.stored_bytes += u64::from(table.len_bytes) + chunk_bytes;
            snapshot.pages += u64::from(table.pages);
            snapshot.tables.push(table);
        }
        Ok(snapshot)
    }

    /// Returns a reference to the chunk, whether it was sent, and how many of its bytes are in use.
    async fn send_chunk(&self, chunk: u64) -> Result<(Reference, bool, u64), PublishError> {
        let used_bytes = self.content.used_bytes_of(chunk);
        if used_bytes == 0 {
            return Ok((Reference::NONE, false, 0));
        }
        let content = self.content.clone();
        let Some(encoded) = aside(move || content.encode(chunk)).await? else {
            return Ok((Reference::NONE, false, used_bytes));
        };
        let Encoded { hash, pages, object } = encoded;
        let (reference, was_sent) = self.ensure(Kind::Chunk, hash, object, pages).await?;
        Ok((reference, was_sent, used_bytes))
    }

    async fn send_table(&self, chunks: &[Reference]) -> Result<(Reference, bool), PublishError> {
        if chunks.iter().all(Reference::is_none) {
            return Ok((Reference::NONE, false));
        }
        let object = encode_table(chunks);
        let pages = chunks.iter().map(|chunk| chunk.pages).sum();
        self.ensure(Kind::Table, hash(&object), object.into(), pages).await
    }

    /// Sends an object unless it is known to be there.
    async fn ensure(
        &self,
        kind: Kind,
        hash: Hash,
        object: Bytes,
        pages: u32,
    ) -> Result<(Reference, bool), PublishError> {
        let len_bytes = u32::try_from(object.len()).expect("at most a chunk and its runs");
        let mut there = self.known.get(&(kind, hash)).copied();
        if there.is_none() {
            there = self.stray(kind, hash, len_bytes).await?;
        }
        let reference = Reference { hash, epoch: there.unwrap_or(self.epoch), len_bytes, pages };
        if there.is_none() {
            self.depot.put(&name_of(kind, &hash, self.epoch), object).await?;
            if let Some(strays) = self.strays {
                strays.sent_unlisted.update(|sent| sent + 1);
            }
        }
        Ok((reference, there.is_none()))
    }

    /// The epoch of an object that is there without the newest snapshot, if a collection cannot have condemned it. All
    /// objects are listed for that, once, and not before the requests for it are as few as those for objects that were
    /// sent: so a small change of a large pool takes no long listing.
    async fn stray(
        &self,
        kind: Kind,
        hash: Hash,
        len_bytes: u32,
    ) -> Result<Option<u64>, PublishError> {
        let Some(Strays { listed, sent_unlisted, used }) = self.strays else { return Ok(None) };
        if listed.get().is_none() && sent_unlisted.get() < self.listing_requests {
            return Ok(None);
        }
        let listed = listed.get_or_try_init(|| self.list_strays()).await?;
        // Others may have been condemned since they were listed.
        let is_good =
            |&&(epoch, len): &&(u64, u64)| epoch >= self.cutoff && len == u64::from(len_bytes);
        let found = listed.get(&(kind, hash)).filter(is_good).map(|(epoch, _)| *epoch);
        used.set(used.get() || found.is_some());
        Ok(found)
    }

    async fn list_strays(&self) -> Result<HashMap<(Kind, Hash), (u64, u64)>, PublishError> {
        let mut found = HashMap::new();
        for kind in Kind::ALL {
            let each = |hash, epoch, len_bytes| {
                // No publisher before this one has uploaded anything in a later epoch.
                let is_known = self.known.contains_key(&(kind, hash));
                if !is_known && (self.cutoff..=self.epoch).contains(&epoch) {
                    let newest = found.entry((kind, hash)).or_insert((epoch, len_bytes));
                    *newest = (epoch, len_bytes).max(*newest);
                }
            };
            self.depot.objects(kind, each).await?;
        }
        Ok(found)
    }
}
