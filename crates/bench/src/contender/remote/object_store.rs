//! The crate `object_store`, as an expert uses it: concurrent ranged requests, sorted; and for what is read again, a local
//! copy of the object that the first pass writes. Threads beside the one that requests sum and write what a pass reads.

use std::fs::File;
use std::io::{Read, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::runtime::Runtime;

use super::{BUCKET, KEY, Remote, Site, lines_of, parts};
use crate::raw::advise_file;

const PART_BYTES: u64 = 4 << 20;
/// Parts of a pass at once: they fill any line, and fit into memory.
const PARTS_AT_ONCE: usize = 8;

/// See the module documentation.
pub struct Plain {
    runtime: Runtime,
    store: Arc<AmazonS3>,
    len_bytes: u64,
    in_flight: usize,
    /// By `get_ranges`, which merges near ranges, rather than a request for each.
    coalesces: bool,
    /// Where the local copy is, if one is kept.
    copy: Option<PathBuf>,
}

impl Plain {
    /// Opens the object.
    pub fn open(site: Site<'_>, coalesces: bool, in_flight: usize, copies: bool) -> Result<Self> {
        // Fails if it is installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = AmazonS3Builder::new()
            .with_endpoint(&site.work.endpoint)
            .with_allow_http(true)
            .with_skip_signature(true)
            .with_region("us-east-1")
            .with_bucket_name(BUCKET)
            .build()?;
        Ok(Self {
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
            store: Arc::new(store),
            len_bytes: site.len_bytes(),
            in_flight,
            coalesces,
            copy: copies.then(|| site.own("copy")),
        })
    }

    /// The local copy, once there is a complete one.
    fn local(&self) -> Option<File> {
        let file = File::open(self.copy.as_ref()?).ok()?;
        (file.metadata().ok()?.len() == self.len_bytes).then_some(file)
    }
}

impl Remote for Plain {
    fn ranges(&mut self, ranges: &[Range<u64>]) -> Result<u64> {
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable_by_key(|range| range.start);
        if let Some(file) = self.local() {
            return read_ranges(&file, &sorted);
        }
        let key = Key::from(KEY);
        let store = &self.store;
        let found = if self.coalesces {
            self.runtime.block_on(store.get_ranges(&key, &sorted))?
        } else {
            let get = |range| store.get_range(&key, range);
            let requests = stream::iter(sorted).map(get).buffer_unordered(self.in_flight);
            self.runtime.block_on(requests.try_collect())?
        };
        Ok(found.iter().fold(0, |sum, bytes: &_| sum.wrapping_add(lines_of(bytes))))
    }

    fn pass(&mut self) -> Result<u64> {
        if let Some(file) = self.local() {
            return read_all(&file);
        }
        let file = self.copy.as_ref().map(File::create).transpose()?.map(Arc::new);
        let key = Key::from(KEY);
        let mut sum = 0_u64;
        let get = |range: Range<u64>| {
            let (store, key, file) = (&self.store, &key, file.clone());
            async move {
                let bytes = store.get_range(key, range.clone()).await?;
                let keep = move || -> Result<u64> {
                    if let Some(file) = file {
                        file.write_all_at(&bytes, range.start)?;
                    }
                    Ok(lines_of(&bytes))
                };
                tokio::task::spawn_blocking(keep).await?
            }
        };
        let requests = stream::iter(parts(self.len_bytes, PART_BYTES)).map(get);
        let mut requests = requests.buffer_unordered(PARTS_AT_ONCE);
        self.runtime.block_on(async {
            while let Some(part) = requests.next().await {
                sum = sum.wrapping_add(part?);
            }
            anyhow::Ok(())
        })?;
        Ok(sum)
    }
}

/// Reads sorted ranges of a local file, after asking the kernel for all of them.
pub fn read_ranges(file: &File, sorted: &[Range<u64>]) -> Result<u64> {
    for range in sorted {
        let (start, len_bytes) = (range.start as i64, (range.end - range.start) as i64);
        advise_file(file, start, len_bytes, libc::POSIX_FADV_WILLNEED)?;
    }
    let (mut sum, mut buffer) = (0_u64, vec![]);
    for range in sorted {
        buffer.resize((range.end - range.start) as usize, 0);
        file.read_exact_at(&mut buffer, range.start)?;
        sum = sum.wrapping_add(lines_of(&buffer));
    }
    Ok(sum)
}

/// Reads a local file from its start to its end.
pub fn read_all(mut file: &File) -> Result<u64> {
    file.rewind()?;
    advise_file(file, 0, 0, libc::POSIX_FADV_SEQUENTIAL)?;
    let mut buffer = vec![0; 1 << 20];
    let mut sum = 0_u64;
    loop {
        let mut filled = 0;
        while filled < buffer.len() {
            let got = file.read(&mut buffer[filled..]).context("the local copy")?;
            if got == 0 {
                ensure!(filled % 64 == 0, "the local copy ends within a line");
                return Ok(sum.wrapping_add(lines_of(&buffer[..filled])));
            }
            filled += got;
        }
        sum = sum.wrapping_add(lines_of(&buffer));
    }
}
