//! Published bytes stay readable, and foreign bytes harmless.

use aquifer_testkit::rng::Rng;
use uuid::Uuid;

use super::*;

const CHUNK_BYTES: u32 = SMALLEST_CHUNK_BYTES;

fn reference(number: u8) -> Reference {
    Reference { hash: [number; 32], epoch: 3, len_bytes: 4000 + u32::from(number), pages: 1 }
}

fn snapshot() -> Entry {
    let state = State {
        uuid: Uuid::from_u128(0x0123_4567_89ab_cdef_0011_2233_4455_6677),
        len_bytes: 300 << 20,
        sequence: 12,
        generation: 34,
        tail_lsn: 4096,
    };
    Entry {
        position: 5,
        uuid: state.uuid,
        last_collection: 4,
        created_ns: 1_700_000_000_000_000_000,
        nonce: 77,
        body: Body::Snapshot(Snapshot {
            state,
            chunk_bytes: CHUNK_BYTES,
            stored_bytes: 12_345,
            pages: 2,
            tables: vec![reference(1), Reference::NONE],
        }),
    }
}

fn collection() -> Entry {
    let body = Body::Collection(Collection { cutoff: 3, kept: vec![2, 3] });
    Entry { position: 4, last_collection: 0, body, ..snapshot() }
}

fn chunk() -> Vec<u8> {
    let mut bytes = vec![0; CHUNK_BYTES as usize];
    bytes[4096..8192].fill(1);
    bytes[8192..12288].fill(2);
    bytes[40960] = 3;
    bytes
}

#[test]
fn entries_tables_and_chunks_are_decoded_as_they_were_encoded() {
    for entry in [snapshot(), collection()] {
        assert_eq!(Entry::decode(&entry.encode(), entry.position), Ok(entry.clone()));
        let elsewhere = Entry::decode(&entry.encode(), entry.position + 1);
        assert_eq!(elsewhere, Err(Damaged("it is the entry of another position")));
    }
    let chunks = vec![reference(9), Reference::NONE, reference(8)];
    assert_eq!(decode_table(&encode_table(&chunks), 3, CHUNK_BYTES), Ok(chunks.clone()));
    assert!(decode_table(&encode_table(&chunks), 4, CHUNK_BYTES).is_err());
    let (object, pages) = encode_chunk(&chunk()).unwrap();
    assert_eq!((pages, object.len()), (3, 16 + 2 * 8 + 3 * 4096));
    let pieces = decode_chunk(&object, CHUNK_BYTES.into()).unwrap();
    let places: Vec<_> = pieces.iter().map(|(at, piece)| (*at, piece.len())).collect();
    assert_eq!(places, [(4096, 8192), (40960, 4096)]);
    let mut back = vec![0; CHUNK_BYTES as usize];
    for (at, piece) in pieces {
        back[at as usize..][..piece.len()].copy_from_slice(piece);
    }
    assert_eq!(back, chunk());
    assert!(encode_chunk(&[0; 8192]).is_none());
    assert!(decode_chunk(&object, 40960).is_err(), "beyond the end of a shorter chunk");
}

/// The format is frozen: what this version has published stays readable.
#[test]
fn the_golden_objects_are_read() {
    const SNAPSHOT: &[u8] = include_bytes!("golden/snapshot");
    const COLLECTION: &[u8] = include_bytes!("golden/collection");
    const TABLE: &[u8] = include_bytes!("golden/table");
    const CHUNK: &[u8] = include_bytes!("golden/chunk");
    assert_eq!(Entry::decode(SNAPSHOT, 5), Ok(snapshot()));
    assert_eq!(Entry::decode(COLLECTION, 4), Ok(collection()));
    assert_eq!(decode_table(TABLE, 2, CHUNK_BYTES), Ok(vec![reference(9), Reference::NONE]));
    let pieces = decode_chunk(CHUNK, CHUNK_BYTES.into()).unwrap();
    assert_eq!(pieces.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [4096, 40960]);
    // And it is still what is written.
    assert_eq!(snapshot().encode(), SNAPSHOT);
    assert_eq!(collection().encode(), COLLECTION);
    assert_eq!(encode_chunk(&chunk()).unwrap().0, CHUNK);
}

/// Writes the golden objects anew: for a new version of the format, beside those of the old one.
#[test]
#[ignore = "writes into the source directory"]
fn write_golden_objects() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src/publish/golden");
    std::fs::create_dir_all(directory).unwrap();
    let write = |name: &str, bytes: Vec<u8>| {
        std::fs::write(format!("{directory}/{name}"), bytes).unwrap();
    };
    write("snapshot", snapshot().encode());
    write("collection", collection().encode());
    write("table", encode_table(&[reference(9), Reference::NONE]));
    write("chunk", encode_chunk(&chunk()).unwrap().0);
}

/// Decodes bytes as everything. Returns whether anything was accepted.
fn decode_as_all(bytes: &[u8]) -> bool {
    let entry = [4, 5].map(|position| Entry::decode(bytes, position).is_ok());
    let table = decode_table(bytes, 2, CHUNK_BYTES).is_ok();
    let chunk = decode_chunk(bytes, CHUNK_BYTES.into()).map(|pieces| {
        assert!(pieces.iter().all(|(at, piece)| at + piece.len() as u64 <= CHUNK_BYTES.into()));
    });
    entry.contains(&true) || table || chunk.is_ok()
}

#[test]
fn foreign_bytes_are_errors_and_do_not_panic() {
    let mut random = Rng::new(11);
    let table = encode_table(&[reference(9), Reference::NONE]);
    let chunk = encode_chunk(&chunk()).unwrap().0;
    let whole = [snapshot().encode(), collection().encode(), table, chunk];
    for original in &whole {
        assert!(decode_as_all(original));
        for len in 0..original.len().min(700) {
            assert!(!decode_as_all(&original[..len]), "cut to {len}");
        }
        for _ in 0..2000 {
            let mut bytes = original.clone();
            for _ in 0..=random.below(3) {
                let at = random.below(bytes.len().min(600) as u64) as usize;
                bytes[at] = random.next_u64() as u8;
            }
            decode_as_all(&bytes);
            // With a checksum that matches, whatever an entry says has to be checked.
            if let Some((covered, sum)) = bytes.split_last_chunk_mut::<32>() {
                *sum = hash(covered);
                decode_as_all(&bytes);
            }
        }
    }
}

#[test]
fn counts_that_lie_are_refused_before_anything_is_allocated() {
    let forged = |change: fn(&mut RawEntry)| {
        let bytes = snapshot().encode();
        let (mut raw, rest) = RawEntry::read_from_prefix(&bytes[..bytes.len() - 32]).unwrap();
        change(&mut raw);
        let mut bytes = [raw.as_bytes(), rest].concat();
        let sum = hash(&bytes);
        bytes.extend_from_slice(&sum);
        Entry::decode(&bytes, 5)
    };
    assert!(forged(|_| {}).is_ok());
    for change in [
        (|raw| raw.count = u64::MAX.into()) as fn(&mut RawEntry),
        |raw| raw.pool_bytes = u64::MAX.into(),
        |raw| raw.pool_bytes = 0.into(),
        |raw| raw.pool_bytes = (1 << 50).into(),
        |raw| raw.pages = ((300 << 20) / 4096 + 1).into(),
        |raw| raw.pages = u64::MAX.into(),
        |raw| raw.chunk_bytes = 0.into(),
        |raw| raw.chunk_bytes = 4096.into(),
        |raw| raw.last_collection = 5.into(),
        |raw| raw.kind = 9.into(),
        |raw| raw.hash = 2.into(),
        |raw| raw.compression = 1.into(),
        |raw| raw.table_chunks = 1.into(),
        |raw| raw.incompatible_features = 1.into(),
        |raw| raw.version = 2.into(),
    ] {
        forged(change).unwrap_err();
    }
    // Reserved bytes are ignored.
    forged(|raw| raw.reserved[0] = 1).unwrap();
    let mut chunk = encode_chunk(&chunk()).unwrap().0;
    chunk[12..16].fill(255);
    decode_chunk(&chunk, CHUNK_BYTES.into()).unwrap_err();
}
