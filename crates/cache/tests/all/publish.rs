//! A published cache is visible to other processes while it lives.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_cache::{Cache, CacheError, PageId, publish};
use aquifer_device::MemoryDevice;

fn files_of(name: &str) -> Vec<PathBuf> {
    let prefix = format!("{}-{name}", std::process::id());
    let entries = publish::directories().into_iter().filter_map(|path| fs::read_dir(path).ok());
    let mut found: Vec<_> = entries
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(&prefix))
        .collect();
    found.sort();
    found
}

/// The number after `"key":`.
fn number(path: &Path, key: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap();
    let (_, rest) = text.split_once(&format!("\"{key}\":")).unwrap();
    rest.split([',', '}']).next().unwrap().parse().unwrap()
}

#[test]
fn a_cache_is_seen_while_it_lives() {
    let builder = Cache::builder().budget_bytes(8 << 20);
    let cache = builder.clone().publish("orders").build().unwrap();
    let [path] = &files_of("orders")[..] else { panic!("{:?}", files_of("orders")) };
    assert_eq!(number(path, "pid"), u64::from(std::process::id()));
    assert_eq!(number(path, "budget_bytes"), 8 << 20);
    assert_eq!(publish::start_ticks(std::process::id()), Some(number(path, "start_ticks")));
    assert_eq!(number(path, "misses"), 0);

    let device = Arc::new(MemoryDevice::from_bytes(&[1; 64 << 10]).unwrap());
    let pages = cache.pages(device).unwrap();
    (0..16).for_each(|page| assert_eq!(pages.get(PageId(page)).unwrap()[0], 1));
    // Published at the next interval.
    while number(path, "resident_bytes") != 64 << 10 {
        std::thread::yield_now();
    }
    assert_eq!(number(path, "misses") + number(path, "prefetched"), 16);

    let twin = builder.clone().publish("orders").build().unwrap();
    assert_eq!(files_of("orders").len(), 2);
    drop(cache);
    assert_eq!(files_of("orders").len(), 2, "the pages still need it");
    drop(pages);
    drop(twin);
    assert_eq!(files_of("orders"), [] as [PathBuf; 0]);

    assert!(builder.clone().build().is_ok(), "without a name nothing is published");
    let refused = builder.publish("../escape").build();
    assert!(matches!(refused, Err(CacheError::Publish { .. })));
}
