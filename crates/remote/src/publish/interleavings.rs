//! Two publishers that collect, in many interleavings of their requests, at a store in memory.
//!
//! Each publisher is a future that yields before each request. A schedule says which of them makes its next request;
//! one that stops in the middle is a publisher that was killed, and one that goes on after the other has ended is one that was
//! paused. All schedules with two changes of turn are run, many with three, and random ones. Afterwards each snapshot that is
//! listed must have all its objects, with the content that was published.
//!
//! The same schedules find each [`Mutant`], one mistake in the protocol each.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use uuid::Uuid;

use super::PublishError;
use super::depot::{Depot, Kind, log_name};
use super::layout::{MOST_POSITION, SMALLEST_CHUNK_BYTES, decode_chunk};
use super::log::Mutant;
use super::send::Content;

/// Is pending once, and done the next time.
async fn turn() {
    let mut was_pending = false;
    std::future::poll_fn(|context| {
        // Futures in a `buffered` stream are polled only then.
        context.waker().wake_by_ref();
        if std::mem::replace(&mut was_pending, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// The paths of objects that were created, in order, also after others of the same path were deleted.
type Created = Mutex<Vec<String>>;

/// What a server does that is asked to create an object that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conditions {
    /// Refuses.
    Heeds,
    /// Puts it in the place of the other.
    Overwrites,
    /// Says it did, as one that puts two objects at once and keeps one.
    Pretends,
    /// Refuses, and does so when it has created the object: the answer to an earlier attempt was lost.
    Repeats,
}

/// A store that gives up its turn before each request.
struct Stepped {
    store: Arc<InMemory>,
    created: Arc<Created>,
    conditions: Conditions,
    /// How many listings were begun.
    listings: Arc<AtomicUsize>,
}

impl fmt::Debug for Stepped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stepped")
    }
}

impl fmt::Display for Stepped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stepped")
    }
}

type Result<T> = object_store::Result<T>;

#[async_trait]
impl ObjectStore for Stepped {
    async fn put_opts(
        &self,
        at: &Path,
        bytes: PutPayload,
        mut with: PutOptions,
    ) -> Result<PutResult> {
        turn().await;
        let creates = with.mode == PutMode::Create;
        match self.conditions {
            Conditions::Heeds | Conditions::Repeats => {}
            Conditions::Overwrites => with.mode = PutMode::Overwrite,
            Conditions::Pretends => {
                if creates && self.store.head(at).await.is_ok() {
                    return Ok(PutResult {
                        e_tag: None,
                        version: None,
                        extensions: Default::default(),
                    });
                }
            }
        }
        let put = self.store.put_opts(at, bytes, with).await;
        if creates && put.is_ok() {
            self.created.lock().unwrap().push(at.to_string());
            if self.conditions == Conditions::Repeats {
                let (path, source) = (at.to_string(), "it was created just now".into());
                return Err(object_store::Error::AlreadyExists { path, source });
            }
        }
        put
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        unreachable!("chunks are put whole")
    }

    async fn get_opts(&self, at: &Path, with: GetOptions) -> Result<GetResult> {
        turn().await;
        self.store.get_opts(at, with).await
    }

    async fn get_ranges(&self, _: &Path, _: &[Range<u64>]) -> Result<Vec<Bytes>> {
        unreachable!("objects are got whole")
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let store = self.store.clone();
        // One after the other: a publisher may be stopped between two of them.
        let turns = paths.and_then(async |path| {
            turn().await;
            Ok(path)
        });
        store.delete_stream(turns.boxed())
    }

    fn list(&self, below: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (store, below) = (self.store.clone(), below.cloned());
        self.listings.fetch_add(1, Ordering::Relaxed);
        let listing = async move {
            turn().await;
            store.list(below.as_ref())
        };
        futures_util::stream::once(listing).flatten().boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        unreachable!("folders are listed whole")
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        unreachable!("nothing is copied")
    }
}

const UUID: Uuid = Uuid::from_u128(7);

/// A pool of three chunks: two that begin with a page full of a byte each, and one that is zero.
fn content(bytes: [u8; 2]) -> Arc<Content> {
    let rest = 2 * SMALLEST_CHUNK_BYTES as usize - 4096;
    let all = [vec![bytes[0]; 4096], vec![0; rest], vec![bytes[1]; 4096]].concat();
    Arc::new(Content::of_bytes(UUID, all, SMALLEST_CHUNK_BYTES))
}

/// Publishes one content after the other, and keeps only the newest. `created` are the names of all entries that were
/// ever created, by all publishers: no publisher takes a position for its own that was used before.
async fn publish_and_collect(
    depot: &Depot,
    created: &Created,
    contents: &[[u8; 2]],
    mutant: Option<Mutant>,
) -> std::result::Result<(), PublishError> {
    for &bytes in contents {
        let published = depot.publish(&content(bytes), 0, mutant, &mut |_| {}).await?;
        let position = log_name(published.snapshot);
        let is_it = |name: &&String| name.ends_with(&position);
        let times = created.lock().unwrap().iter().filter(is_it).count();
        if times > 1 {
            return Err(PublishError::Missing { object: position });
        }
        depot.collect(1, 0, 0, u64::from(bytes[0]), mutant).await?;
    }
    Ok(())
}

/// Runs a future that is alone.
fn run<T>(work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(done) = work.as_mut().poll(&mut context) {
            return done;
        }
    }
}

/// Compares all live snapshots with what was published. `published` are the bytes of each that may be there.
async fn check(depot: &Depot, possible: &BTreeSet<[u8; 2]>) -> std::result::Result<(), String> {
    let view = depot.view().await.map_err(|error| error.to_string())?;
    if view.live.is_empty() {
        return Err("no snapshot is left".to_owned());
    }
    for &position in &view.live {
        let bytes = read(depot, position).await.map_err(|error| error.to_string())?;
        if !possible.contains(&bytes) {
            return Err(format!("snapshot {position} has {bytes:?}"));
        }
    }
    Ok(())
}

/// The bytes of a snapshot.
async fn read(depot: &Depot, position: u64) -> std::result::Result<[u8; 2], PublishError> {
    let (_, snapshot) = depot
        .snapshot(position)
        .await?
        .ok_or(PublishError::Missing { object: format!("snapshot {position}") })?;
    let mut found = Vec::new();
    for (index, chunk) in depot.table(&snapshot, 0).await?.into_iter().enumerate() {
        if index == 1 {
            assert!(chunk.is_none());
            continue;
        }
        let object = depot.fetch(Kind::Chunk, &chunk).await?;
        let pieces = decode_chunk(&object, SMALLEST_CHUNK_BYTES.into()).unwrap();
        let [(0, piece)] = *pieces else { panic!("one piece") };
        assert!(piece.iter().all(|&byte| byte == piece[0]));
        found.push(piece[0]);
    }
    Ok([found[0], found[1]])
}

/// For how many requests each publisher has its turn, alternately; the last one has it to its end. `None` in place of
/// the other's rest: it is killed.
#[derive(Debug, Clone)]
struct Schedule {
    turns: Vec<usize>,
    kills: bool,
}

/// Runs two publishers. Returns how many requests each made.
fn scenario(
    schedule: &Schedule,
    mutant: Option<Mutant>,
) -> (std::result::Result<(), String>, [usize; 2]) {
    let memory = Arc::new(InMemory::new());
    let plain = Depot::of(memory.clone());
    // A chunk of snapshot 1 is no longer needed in 2, and is published again below.
    for bytes in [[1, 9], [2, 9]] {
        run(plain.publish(&content(bytes), 0, None, &mut |_| {})).unwrap();
    }
    let created = Arc::new(Created::default());
    let stepped = Depot::of(Arc::new(Stepped {
        store: memory,
        created: created.clone(),
        conditions: Conditions::Heeds,
        listings: Arc::default(),
    }));
    type Work<'a> = Pin<Box<dyn Future<Output = std::result::Result<(), PublishError>> + 'a>>;
    let publisher = |contents| {
        Some(Box::pin(publish_and_collect(&stepped, &created, contents, mutant)) as Work<'_>)
    };
    // The second one publishes twice, so that positions are used again that the first one had found free; and what the first
    // one has sent.
    let mut works: [Option<Work<'_>>; 2] = [publisher(&[[1, 8]]), publisher(&[[3, 1], [3, 8]])];
    let mut context = Context::from_waker(Waker::noop());
    let (mut steps, mut outcome) = ([0; 2], Ok(()));
    let mut advance = |index: usize, works: &mut [Option<Work<'_>>; 2]| -> bool {
        let Some(work) = &mut works[index] else { return false };
        steps[index] += 1;
        if let Poll::Ready(done) = work.as_mut().poll(&mut context) {
            if let Err(error) = done {
                outcome = Err(format!("publisher {index}: {error}"));
            }
            works[index] = None;
        }
        true
    };
    let mut index = 0;
    for &turns in &schedule.turns {
        for _ in 0..turns {
            if !advance(index, &mut works) {
                break;
            }
        }
        index = 1 - index;
    }
    while advance(index, &mut works) {}
    if !schedule.kills {
        while advance(1 - index, &mut works) {}
    }
    let possible = BTreeSet::from([[1, 9], [2, 9], [1, 8], [3, 1], [3, 8]]);
    let checked = run(check(&plain, &possible));
    // A publisher that comes later finds nothing missing either.
    let again = || {
        run(publish_and_collect(&plain, &created, &[[1, 1]], None))
            .map_err(|error| error.to_string())?;
        run(check(&plain, &BTreeSet::from([[1, 1]])))
    };
    (outcome.and(checked).and_then(|()| again()), steps)
}

/// All schedules with two changes of turn, many with three, and random ones.
fn schedules() -> Vec<Schedule> {
    let most = scenario(&Schedule { turns: vec![], kills: false }, None).1[0];
    assert!((20..60).contains(&most), "{most} requests");
    let mut all = Vec::new();
    for first in 0..=most {
        for second in 1..=2 * most {
            all.push(vec![first, second]);
        }
        // The second one begins.
        for second in (1..=most).step_by(2) {
            all.push(vec![0, second, first]);
        }
    }
    let mut random = aquifer_testkit::rng::Rng::new(7);
    for _ in 0..200 {
        let turns = (0..20).map(|_| 1 + random.below(6) as usize).collect();
        all.push(turns);
    }
    let both =
        |turns: Vec<usize>| [false, true].map(|kills| Schedule { turns: turns.clone(), kills });
    all.into_iter().flat_map(both).collect()
}

#[test]
fn no_interleaving_of_two_publishers_loses_an_object() {
    for schedule in schedules() {
        let (outcome, _) = scenario(&schedule, None);
        if let Err(error) = outcome {
            panic!("{schedule:?}: {error}");
        }
    }
}

#[test]
fn a_store_that_ignores_conditions_is_found() {
    use Conditions::{Heeds, Overwrites, Pretends, Repeats};
    for conditions in [Heeds, Overwrites, Pretends, Repeats] {
        let (store, created, listings) = Default::default();
        let store = Stepped { store, created, conditions, listings };
        let memory = store.store.clone();
        match run(Depot::of(Arc::new(store)).check_conditions()) {
            Ok(()) => assert!(matches!(conditions, Heeds | Repeats)),
            Err(PublishError::Unconditional { .. }) => {
                assert!(matches!(conditions, Overwrites | Pretends));
            }
            Err(error) => panic!("{error}"),
        }
        assert!(run(memory.list(None).next()).is_none(), "no probe is left");
    }
}

#[test]
fn an_entry_that_another_one_has_replaced_does_not_count() {
    let (store, created, listings) = Default::default();
    let conditions = Conditions::Pretends;
    let store = Depot::of(Arc::new(Stepped { store, created, conditions, listings }));
    run(store.publish(&content([1, 2]), 0, None, &mut |_| {})).unwrap();
    let (mut entry, _) = run(store.snapshot(1)).unwrap().unwrap();
    assert!(run(store.append(&entry)).unwrap(), "its own");
    entry.nonce += 1;
    assert!(!run(store.append(&entry)).unwrap());
}

#[test]
fn a_small_change_of_a_large_pool_takes_no_long_listing() {
    let (store, created, listings): (_, _, Arc<AtomicUsize>) = Default::default();
    let (conditions, counted) = (Conditions::Heeds, listings.clone());
    let store = Depot::of(Arc::new(Stepped { store, created, conditions, listings }));
    let chunk_bytes = SMALLEST_CHUNK_BYTES as usize;
    let mut bytes = vec![0; 2100 * chunk_bytes];
    for (number, chunk) in bytes.chunks_mut(chunk_bytes).enumerate() {
        chunk[..8].copy_from_slice(&(number + 1).to_le_bytes());
    }
    let mut publish = |changed: usize| {
        for chunk in bytes.chunks_mut(chunk_bytes).take(changed) {
            chunk[8] += 1;
        }
        let content = Arc::new(Content::of_bytes(UUID, bytes.clone(), SMALLEST_CHUNK_BYTES));
        let before = counted.load(Ordering::Relaxed);
        run(store.publish(&content, 0, None, &mut |_| {})).unwrap();
        counted.load(Ordering::Relaxed) - before
    };
    // The log is listed twice. Both folders take a request for each thousand of 2,101 objects.
    for (changed, listings) in [(0, 4), (1, 2), (5, 4)] {
        assert_eq!(publish(changed), listings, "{changed}");
    }
}

#[test]
fn a_log_with_more_snapshots_than_there_can_be_is_damaged() {
    let memory = Arc::new(InMemory::new());
    let depot = Depot::of(memory.clone());
    run(depot.publish(&content([1, 2]), 0, None, &mut |_| {})).unwrap();
    let (mut entry, _) = run(depot.snapshot(1)).unwrap().unwrap();
    for position in [MOST_POSITION, 1 << 40, 2] {
        entry.position = position;
        let bytes = Bytes::from(entry.encode());
        run(depot.put(&log_name(position), bytes)).unwrap();
        let viewed = run(depot.view());
        match position {
            2 => assert_eq!(viewed.unwrap().live, [1, 2]),
            _ => assert!(matches!(viewed, Err(PublishError::Damaged { .. }))),
        }
        let path = Path::from("pool").join("log").join(format!("{position:020}"));
        run(memory.delete(&path)).unwrap();
    }
}

#[test]
fn the_same_interleavings_find_mistakes() {
    let schedules = schedules();
    for mutant in [
        Mutant::DeletesUnsaid,
        Mutant::DeletesUnchecked,
        Mutant::TrustsBefore,
        Mutant::CommitsUnchecked,
        Mutant::ReusesNames,
        Mutant::TrustsListed,
    ] {
        let finds = |schedule: &Schedule| scenario(schedule, Some(mutant)).0.is_err();
        assert!(schedules.iter().any(finds), "{mutant:?} goes unnoticed");
    }
}
