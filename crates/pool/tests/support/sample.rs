//! A pool with something of everything in it: objects of several sizes, one that was destroyed and
//! one that took its pages, commits through the log and beside it, and a log that was not replayed.
//!
//! Every word of an object names the object, so the owner of any bytes can be determined.

use std::sync::Arc;

use aquifer_crashkit::unguarded::{UnguardedMedia, UnguardedPool};
use aquifer_pool::format::inode::{Inode, InodeKind};
use aquifer_pool::format::run::Run;
use aquifer_pool::format::superblock::KNOWN_FEATURES;
use aquifer_pool::format::{PAGE_BYTES, checksum};
use aquifer_pool::media::{ByteRange, Media};
use aquifer_pool::{
    CommitContent, CommitCopied, CommitPages, CommitPatches, Patches, Pool, Result,
};

/// The names of the objects, in order of creation. The second one is destroyed.
pub const NAMES: [&str; 6] = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"];
/// The object that no longer exists.
pub const DESTROYED: &str = "beta";

/// The upper half of each word of an object: it differs from all others in many bits.
fn tag(name: &str) -> u64 {
    checksum(&[name.as_bytes()]) >> 32
}

/// A page of an object, as a commit writes it.
pub fn page(name: &str, commit: u64) -> Vec<u8> {
    (tag(name) << 32 | commit).to_le_bytes().repeat(PAGE_BYTES as usize / 8)
}

/// Another object than `name` that some word of `bytes` names.
pub fn find_foreign(name: &[u8], bytes: &[u8]) -> Option<&'static str> {
    let foreign: Vec<(u64, &str)> = (NAMES.iter())
        .filter(|other| other.as_bytes() != name)
        .map(|other| (tag(other), *other))
        .collect();
    (bytes.as_chunks::<8>().0.iter()).find_map(|word| {
        let half = u64::from_le_bytes(*word) >> 32;
        foreign.iter().find(|(tag, _)| *tag == half).map(|(_, other)| *other)
    })
}

/// All objects that some word of `bytes` names.
pub fn find_all(bytes: &[u8]) -> Vec<&'static str> {
    let tags: Vec<u64> = NAMES.iter().map(|name| tag(name)).collect();
    let mut found = [false; NAMES.len()];
    for word in bytes.as_chunks::<8>().0 {
        let half = u64::from_le_bytes(*word) >> 32;
        if half != 0
            && let Some(index) = tags.iter().position(|tag| *tag == half)
        {
            found[index] = true;
        }
    }
    (NAMES.into_iter().zip(found)).filter(|(_, is_found)| *is_found).map(|(name, _)| name).collect()
}

/// Creates an object of this many pages.
pub fn create(pool: &Pool, name: &str, pages: u64, address: u64) -> Result<Inode> {
    let reservation = pool.reserve_zeroed(pages, 1)?;
    let runs = reservation.runs().to_vec();
    pool.transact_unguarded(vec![reservation], |transaction| {
        let inode = Inode {
            kind: InodeKind::Object,
            size_bytes: pages * PAGE_BYTES,
            address,
            runs: runs.clone(),
            name: name.as_bytes().to_vec(),
            ..transaction.free_inode()?
        };
        transaction.put(inode.clone());
        Ok(inode)
    })
}

pub fn destroy(pool: &Pool, name: &str) -> Result<()> {
    let inode = find(pool, name)?;
    pool.transact_unguarded(vec![], |transaction| {
        transaction.put(Inode::free(inode.number, inode.generation));
        Ok(())
    })
}

pub fn find(pool: &Pool, name: &str) -> Result<Inode> {
    let found = pool.inodes()?.into_iter().find(|inode| inode.name == name.as_bytes());
    Ok(found.expect("it was made"))
}

/// The place of one page of an object.
pub fn place(inode: &Inode, page: u64) -> ByteRange {
    Run { start_page: inode.runs[0].start_page + page, pages: 1 }.bytes()
}

/// Commits one page of each of these objects: the first one as a patch, the others whole.
pub fn commit(pool: &Pool, objects: &[(&str, u64)], id: u64) -> Result<()> {
    let mut pages = Vec::new();
    for (name, page) in &objects[1..] {
        let inode = find(pool, name)?;
        pages.push(CommitPages { inode: inode.number, target: place(&inode, *page) });
    }
    let fill = |payload: &mut [u8]| {
        for (chunk, (name, _)) in payload.chunks_exact_mut(PAGE_BYTES as usize).zip(&objects[1..]) {
            chunk.copy_from_slice(&page(name, id));
        }
    };
    let (name, patched) = objects[0];
    let inode = find(pool, name)?;
    let (all, start) = (read(pool, &inode)?, (patched * PAGE_BYTES) as usize);
    let mut patches = Patches::new();
    let base = &all[start..start + PAGE_BYTES as usize];
    patches.push_difference(patched as u32, base, &page(name, id), usize::MAX);
    let target = Run { start_page: inode.runs[0].start_page, pages: inode.content_pages() }.bytes();
    let patches = [CommitPatches { inode: inode.number, target, patches: &patches }];
    let content = CommitContent { pages: &pages, patches: &patches, copied: &[] };
    pool.capture_unguarded(&content, fill)?.finish()
}

/// Commits the first pages of an object through a separate run.
pub fn commit_beside_log(pool: &Pool, name: &str, pages: u64, id: u64) -> Result<()> {
    let reservation = pool.reserve(pages, 1)?;
    let shadow = reservation.whole();
    let inode = find(pool, name)?;
    pool.transact_unguarded(vec![reservation], |transaction| {
        let inode = Inode { shadow, ..transaction.inode(inode.number)? };
        transaction.put(inode);
        Ok(())
    })?;
    let bytes = page(name, id).repeat(pages as usize);
    pool.media().write_unguarded(shadow.bytes().offset_bytes, &bytes)?;
    pool.make_durable(&[shadow.bytes()])?;
    let copied = CommitCopied {
        inode: inode.number,
        target: Run { start_page: inode.runs[0].start_page, pages }.bytes(),
        source_offset_bytes: shadow.bytes().offset_bytes,
        checksum: checksum(&[&bytes]),
    };
    pool.capture_unguarded(&CommitContent { copied: &[copied], ..Default::default() }, |_| {})?
        .finish()
}

/// An address for the `index`-th object.
pub fn address(index: u64) -> u64 {
    0x2000_0000_0000 + (index << 30)
}

/// Fills a fresh pool; the last changes are in the log only.
pub fn fill(pool: &Pool) -> Result<()> {
    for (index, name) in NAMES.iter().enumerate().take(4) {
        create(pool, name, 2 + index as u64 % 3, address(index as u64))?;
        commit(pool, &[(name, 0)], 1)?;
        commit(pool, &[(name, 1)], 2)?;
    }
    destroy(pool, DESTROYED)?;
    pool.checkpoint()?;
    // Takes the pages and the slot of the destroyed one.
    create(pool, NAMES[4], 3, address(4))?;
    commit(pool, &[(NAMES[4], 0), (NAMES[0], 1)], 3)?;
    pool.checkpoint()?;
    commit(pool, &[(NAMES[2], 0)], 4)?;
    create(pool, NAMES[5], 2, address(5))?;
    commit_beside_log(pool, NAMES[2], 3, 5)?;
    commit(pool, &[(NAMES[5], 1), (NAMES[2], 1), (NAMES[0], 0)], 6)?;
    Ok(())
}

/// The bytes of such a pool after a crash.
pub fn crashed_image(len_bytes: usize) -> Vec<u8> {
    let media = super::FileMedia::of(&vec![0; len_bytes]);
    // So that some pages are never used.
    let options = super::small(super::alone()).fresh_step_pages(4);
    let pool = options.create_on(media.clone()).expect("a pool");
    fill(&pool).expect("room for everything");
    media.image()
}

/// The bytes of such a pool that was closed cleanly, and has a saved state.
pub fn closed_image(len_bytes: usize) -> Vec<u8> {
    let media = super::FileMedia::of(&vec![0; len_bytes]);
    let options = super::small(super::alone()).features(KNOWN_FEATURES).fresh_step_pages(4);
    let pool = options.create_on(media.clone()).expect("a pool");
    fill(&pool).expect("room for everything");
    drop(pool);
    media.image()
}

/// All objects with their content, as a process that attaches them sees it.
pub fn read_all(pool: &Pool) -> Result<Vec<(Inode, Vec<u8>)>> {
    pool.inodes()?.into_iter().map(|inode| Ok((inode.clone(), read(pool, &inode)?))).collect()
}

/// The content of an object, as a process that attaches it sees it.
pub fn read(pool: &Pool, inode: &Inode) -> Result<Vec<u8>> {
    let pages = inode.content_pages();
    let whole = Run { start_page: inode.runs[0].start_page, pages }.bytes();
    let patches = pool.bring_up_to_date(whole)?;
    // Before memory is taken for it: a forged inode may have any length.
    pool.media().read_at(whole.end_bytes() - 1, &mut [0])?;
    let mut bytes = vec![0; whole.len_bytes as usize];
    pool.media().read_at(whole.offset_bytes, &mut bytes)?;
    for (offset, page) in patches {
        let start = (offset - whole.offset_bytes) as usize;
        bytes[start..start + page.len()].copy_from_slice(&page);
    }
    Ok(bytes)
}

/// The content of an object of the sample if nothing was lost: the commit of each page.
pub fn expected(name: &str) -> Vec<u64> {
    match name {
        "alpha" => vec![6, 3],
        "gamma" => vec![5, 6, 5, 0],
        "delta" => vec![1, 2],
        "epsilon" => vec![3, 0, 0],
        "zeta" => vec![0, 6],
        _ => unreachable!("{name} is not there"),
    }
}

/// Fails if the pool is not what [`fill`] made.
pub fn assert_complete(pool: &Pool) {
    let objects = read_all(pool).expect("a readable pool");
    let mut names: Vec<_> = objects.iter().map(|(inode, _)| inode.name.clone()).collect();
    names.sort_unstable();
    assert_eq!(names, [&b"alpha"[..], b"delta", b"epsilon", b"gamma", b"zeta"]);
    for (inode, bytes) in objects {
        let name = String::from_utf8(inode.name).expect("text");
        let commits: Vec<u64> = expected(&name);
        let wanted: Vec<u8> = (commits.iter())
            .flat_map(|&id| if id == 0 { vec![0; PAGE_BYTES as usize] } else { page(&name, id) })
            .collect();
        assert!(bytes == wanted, "content of {name}");
    }
}

/// Media with this image.
pub fn media_of(image: &[u8]) -> Arc<dyn Media> {
    super::FileMedia::of(image)
}
