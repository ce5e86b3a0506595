//! The tier: what it saves, whom it serves, and that it never returns wrong bytes.

use std::fs::Permissions;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_cache::Cache;
use aquifer_device::Device;
use aquifer_remote::{RemoteDevice, RemoteError, Tier, TierError};
use aquifer_testkit::rng::Rng;

use crate::support::{Answer, Server, pattern, quick};

const LEN: usize = 1_000_001;

struct Node {
    directory: tempfile::TempDir,
}

impl Node {
    fn new() -> Node {
        Node { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("tier")
    }

    fn tier(&self) -> Tier {
        Tier::open(self.path()).unwrap()
    }

    fn open(&self, server: &Server) -> RemoteDevice {
        quick().tier(&self.tier()).open(&server.url()).unwrap()
    }

    /// The files of objects.
    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path()).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.extension().is_some_and(|suffix| suffix == "object")).collect()
    }
}

fn read(device: &RemoteDevice, at: usize, len: usize) -> Vec<u8> {
    let mut buffer = vec![0; len];
    assert_eq!(device.read_at(at as u64, &mut buffer).unwrap(), len);
    buffer
}

/// Bytes of the object that the server was asked for.
fn asked_bytes(server: &Server) -> usize {
    server.asked().iter().filter_map(|asked| asked.range.clone()).map(|range| range.len()).sum()
}

#[test]
fn what_was_downloaded_is_there_for_others_and_for_later() {
    let bytes = pattern(LEN, 1);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    let first = node.open(&server);
    assert!(read(&first, 5000, 300_000) == bytes[5000..305_000]);
    drop(first);
    server.plan(|_| Answer::Proper);
    let second = node.open(&server);
    assert_eq!(asked_bytes(&server), 1);
    assert!(read(&second, 5000, 300_000) == bytes[5000..305_000]);
    assert!(read(&second, 4096, 1) == bytes[4096..4097]);
    assert_eq!(asked_bytes(&server), 1, "of the opening");
    assert_eq!(second.stats().tier_bytes, 300_001);
    // What is missing is brought, the rest is not brought again.
    assert!(read(&second, 0, LEN) == bytes);
    let sub_blocks = 305_000usize.div_ceil(4096) - 5000 / 4096;
    assert_eq!(asked_bytes(&server), 1 + LEN - sub_blocks * 4096);
    let info = node.tier().info().unwrap();
    assert_eq!(info.objects.len(), 1);
    assert_eq!(info.objects[0].len_bytes, LEN as u64);
    assert!(info.objects[0].url.ends_with("/dir/object.bin"), "{}", info.objects[0].url);
    assert!(info.used_bytes <= info.budget_bytes);
}

#[test]
fn batches_are_served_from_the_tier() {
    let bytes = pattern(LEN, 2);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    let visit = |device: RemoteDevice| {
        let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
        let pages = cache.pages(device).unwrap();
        let ids = (0..LEN.div_ceil(4096) as u64).rev().map(aquifer_cache::PageId);
        let mut seen = 0;
        pages
            .visit_many(ids, |page, got| {
                let at = page.0 as usize * 4096;
                let len = (LEN - at).min(4096);
                assert!(got[..len] == bytes[at..at + len], "{page:?}");
                seen += 1;
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
        assert_eq!(seen, LEN.div_ceil(4096));
    };
    visit(node.open(&server));
    assert_eq!(asked_bytes(&server), 1 + LEN);
    server.plan(|_| Answer::Proper);
    visit(node.open(&server));
    assert_eq!(asked_bytes(&server), 1);
}

#[test]
fn mappings_are_served_from_the_tier() {
    let bytes = pattern(LEN, 3);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    for round in 0..2 {
        server.plan(|_| Answer::Proper);
        let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
        let mapping = cache.map(node.open(&server)).unwrap();
        let mut rng = Rng::new(round);
        for _ in 0..300 {
            let at = rng.below(LEN as u64);
            assert_eq!(mapping.get::<u8>(at).unwrap(), bytes[at as usize]);
        }
        drop(mapping);
        if round == 0 {
            drop(read(&node.open(&server), 0, LEN));
        } else {
            assert_eq!(asked_bytes(&server), 1);
        }
    }
}

#[test]
fn several_devices_download_each_byte_once() {
    const GRAIN: u64 = 8192;
    let bytes = pattern(LEN, 4);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    // So that the downloads overlap.
    server.plan(|_| Answer::Late(Duration::from_millis(20)));
    // With bytes that cost more than requests no gap between missing parts is worth reading along.
    let open = || quick().prices(0.4, 1.0).tier(&node.tier()).open(&server.url()).unwrap();
    let devices: Vec<_> = (0..4).map(|_| open()).collect();
    std::thread::scope(|scope| {
        for (seed, device) in devices.iter().enumerate() {
            let bytes = &bytes;
            scope.spawn(move || {
                let mut rng = Rng::new(seed as u64);
                for _ in 0..60 {
                    // Longer gaps than are read along in any case.
                    let at = rng.below(LEN as u64 / GRAIN) * GRAIN;
                    let len = ((1 + rng.below(12)) * GRAIN).min(LEN as u64 - at) as usize;
                    let at = at as usize;
                    assert!(read(device, at, len) == bytes[at..at + len]);
                }
                assert!(read(device, 0, LEN) == *bytes);
            });
        }
    });
    assert_eq!(asked_bytes(&server), 4 + LEN);
}

#[test]
fn damaged_bytes_are_downloaded_again() {
    let bytes = pattern(LEN, 5);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    drop(read(&node.open(&server), 0, LEN));
    let [path] = &node.files()[..] else { panic!("one object") };
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let end = file.metadata().unwrap().len();
    let data_at = end - LEN as u64;
    // A byte, a lost block, and the end.
    for (at, len) in [(5000, 1), (65_536, 65_536), (LEN as u64 - 1, 1)] {
        file.write_all_at(&vec![!bytes[at as usize]; len], data_at + at).unwrap();
    }
    server.plan(|_| Answer::Proper);
    let device = node.open(&server);
    assert!(read(&device, 0, LEN) == bytes);
    let last = LEN % 4096;
    assert_eq!(asked_bytes(&server), 1 + 4096 + 65_536 + last);
    drop(device);
    server.plan(|_| Answer::Proper);
    assert!(read(&node.open(&server), 0, LEN) == bytes);
    assert_eq!(asked_bytes(&server), 1, "what was damaged is right again");
}

#[test]
fn verification_drops_what_is_damaged() {
    let bytes = pattern(LEN, 6);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    drop(read(&node.open(&server), 0, LEN));
    let [path] = &node.files()[..] else { panic!("one object") };
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let data_at = file.metadata().unwrap().len() - LEN as u64;
    file.write_all_at(&[!bytes[70_000]], data_at + 70_000).unwrap();
    let mut told = (0, 0);
    let result = node.tier().verify(|done, all| told = (done, all)).unwrap();
    assert_eq!(told, (LEN as u64, LEN as u64));
    assert_eq!(result.dropped_bytes, 65_536);
    assert_eq!(result.right_bytes, LEN as u64 - 4096);
    let result = node.tier().verify(|_, _| {}).unwrap();
    assert_eq!((result.dropped_bytes, result.right_bytes), (0, LEN as u64 - 65_536));
    assert!(read(&node.open(&server), 0, LEN) == bytes);
}

#[test]
fn a_truncated_file_is_a_miss() {
    let bytes = pattern(LEN, 7);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    let device = node.open(&server);
    drop(read(&device, 0, LEN));
    let [path] = &node.files()[..] else { panic!("one object") };
    let file = std::fs::File::options().write(true).open(path).unwrap();
    for len in [500_000, 4100, 4096, 10, 0] {
        file.set_len(len).unwrap();
        assert!(read(&device, 0, LEN) == bytes, "{len}");
    }
    drop(device);
    // The header is gone: the file is made anew.
    file.set_len(0).unwrap();
    assert!(read(&node.open(&server), 0, LEN) == bytes);
    assert!(read(&node.open(&server), 0, LEN) == bytes);
}

#[test]
fn versions_are_apart() {
    let (old, new) = (pattern(LEN, 8), pattern(LEN, 9));
    let (server, node) = (Server::new(old.clone()), Node::new());
    let device = node.open(&server);
    assert!(read(&device, 0, LEN) == old);
    server.replace(new.clone(), Some("\"v2\""));
    let other = node.open(&server);
    assert!(read(&other, 0, LEN) == new);
    assert!(read(&device, 0, LEN) == old, "it is pinned, and there");
    assert_eq!(node.tier().info().unwrap().objects.len(), 2);
}

#[test]
fn objects_without_a_strong_etag_are_not_tiered() {
    let bytes = pattern(LEN, 10);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    for etag in [None, Some("W/\"v1\"")] {
        server.replace(bytes.clone(), etag);
        let device = quick().unversioned(true).tier(&node.tier()).open(&server.url()).unwrap();
        assert!(read(&device, 0, LEN) == bytes);
    }
    assert!(node.files().is_empty());
}

#[test]
fn the_budget_is_kept() {
    const BUDGET: u64 = 600_000;
    let bytes = pattern(LEN, 11);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    node.tier().set_budget_bytes(BUDGET).unwrap();
    let used = || {
        use std::os::unix::fs::MetadataExt;
        node.files().iter().map(|path| path.metadata().unwrap().blocks() * 512).sum::<u64>()
    };
    let devices = [node.open(&server), node.open(&server)];
    let mut rng = Rng::new(12);
    for turn in 0..400 {
        let at = rng.below(LEN as u64) as usize;
        let len = (rng.below(200_000) as usize + 1).min(LEN - at);
        assert!(read(&devices[turn % 2], at, len) == bytes[at..at + len]);
        // Beside the data there are the header, states and proofs.
        assert!(used() <= BUDGET + 32_768, "{} of {BUDGET}", used());
    }
    assert!(devices.iter().all(|device| device.stats().tier_problem.is_none()));
    assert!(devices.iter().any(|device| device.stats().tier_bytes > 0));
    drop(devices);
    node.tier().set_budget_bytes(0).unwrap();
    assert_eq!((used(), node.files().len()), (0, 0));
}

#[test]
fn blocks_in_use_outlive_others() {
    let bytes = pattern(LEN, 13);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    let open = || node.open(&server);
    // Both are there; the first half is used again after the marks of all were taken.
    drop(read(&open(), 0, 1 << 19));
    drop(read(&open(), 1 << 19, 300_000));
    let budget = node.tier().info().unwrap().used_bytes;
    node.tier().set_budget_bytes(budget).unwrap();
    server.plan(|_| Answer::Proper);
    for at in ((1 << 19) + 300_000..LEN).step_by(65_536) {
        assert!(read(&open(), 0, 1 << 19) == bytes[..1 << 19]);
        let len = 65_536.min(LEN - at);
        drop(read(&open(), at, len));
    }
    let requested_again = server
        .asked()
        .iter()
        .filter_map(|asked| asked.range.clone())
        .filter(|range| range.start < 1 << 19 && range.len() > 1)
        .map(|range| range.len())
        .sum::<usize>();
    assert!(requested_again <= 1 << 18, "{requested_again}");
}

#[test]
fn dropped_objects_are_gone_and_come_back() {
    let bytes = pattern(LEN, 14);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    let device = node.open(&server);
    drop(read(&device, 0, LEN));
    assert_eq!(node.tier().drop_objects(|_| false).unwrap(), 0);
    // The write behind the read may be under way: then its blocks are leased.
    while node.tier().info().unwrap().objects.iter().any(|object| object.present_bytes > 0) {
        node.tier().drop_objects(|object| object.url.contains("object.bin")).unwrap();
    }
    assert!(read(&device, 0, LEN) == bytes);
    drop(device);
    assert!(node.tier().drop_objects(|_| true).unwrap() >= LEN as u64);
    assert!(node.files().is_empty());
}

#[test]
fn what_other_users_could_change_is_refused() {
    let bytes = pattern(LEN, 15);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    drop(read(&node.open(&server), 0, LEN));
    let refused = |path: &Path, problem: &str| {
        let refused = Tier::open(path);
        let Err(TierError::NotPrivate { reason, .. }) = refused else { panic!("{refused:?}") };
        assert!(reason.contains(problem), "{reason}");
    };
    // The directory.
    std::fs::set_permissions(node.path(), Permissions::from_mode(0o750)).unwrap();
    refused(&node.path(), "other users may access it");
    std::fs::set_permissions(node.path(), Permissions::from_mode(0o700)).unwrap();
    // An object: the device says so, and does without.
    let [path] = &node.files()[..] else { panic!("one object") };
    let bypassed = |problem: &str| {
        server.plan(|_| Answer::Proper);
        let device = node.open(&server);
        let said = device.stats().tier_problem.unwrap();
        assert!(said.contains(problem), "{said}");
        assert!(read(&device, 0, LEN) == bytes);
        assert_eq!(asked_bytes(&server), 1 + LEN);
    };
    std::fs::set_permissions(path, Permissions::from_mode(0o622)).unwrap();
    bypassed("other users may access it");
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    // A link to a file of the caller's own.
    let elsewhere = node.directory.path().join("elsewhere");
    std::fs::rename(path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, path).unwrap();
    bypassed("it is a link");
    std::fs::remove_file(path).unwrap();
    // A FIFO, which would block.
    let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: a C string.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    bypassed("not a regular file");
    std::fs::remove_file(path).unwrap();
    std::fs::rename(&elsewhere, path).unwrap();
    if !rustix::process::geteuid().is_root() {
        println!("skipped: files of another user; run as root");
        return;
    }
    std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
    bypassed("belongs to another user");
    std::os::unix::fs::chown(node.path(), Some(65_534), None).unwrap();
    refused(&node.path(), "belongs to another user");
}

#[test]
fn a_changed_object_is_an_error_also_with_a_tier() {
    let (server, node) = (Server::new(pattern(LEN, 16)), Node::new());
    let device = node.open(&server);
    drop(read(&device, 0, 100));
    server.replace(pattern(LEN, 17), Some("\"v2\""));
    assert!(device.read_at(500_000, &mut [0; 100]).is_err());
    assert!(device.read_at(0, &mut [0; 100]).is_ok(), "of the version that was opened");
}

#[test]
fn a_lease_that_does_not_end_delays_but_does_not_stop() {
    let bytes = pattern(LEN, 18);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    let device = quick().timeout(Duration::from_secs(2)).tier(&node.tier());
    let device = device.open(&server.url()).unwrap();
    let [path] = &node.files()[..] else { panic!("one object") };
    // Another process's leases, of all sub-blocks.
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let range = aquifer_sys::lock::LockRange { offset_bytes: 1 << 60, len_bytes: 0 };
    let kind = aquifer_sys::lock::LockKind::Exclusive;
    assert!(aquifer_sys::lock::try_lock(std::os::fd::AsFd::as_fd(&file), range, kind).unwrap());
    assert!(read(&device, 0, 100_000) == bytes[..100_000]);
    drop(file);
    assert!(read(&device, 0, 100_000) == bytes[..100_000]);
}

/// What the tier does not keep is kept in memory, as without one.
#[test]
fn what_is_read_ahead_is_kept_where_there_is_room() {
    let bytes = pattern(LEN, 19);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    node.tier().set_budget_bytes(0).unwrap();
    let device = node.open(&server);
    for at in (0..LEN).step_by(4096) {
        let len = 4096.min(LEN - at);
        assert!(read(&device, at, len) == bytes[at..at + len]);
    }
    assert!(asked_bytes(&server) < 2 * LEN, "{}", asked_bytes(&server));
}

#[test]
fn warming_counts_what_it_does_itself() {
    let bytes = pattern(LEN, 20);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    let device = node.open(&server);
    let half = 122 * 4096;
    let mut others = 0;
    let warmed = device.warm(0..half as u64, |_, _| {
        drop(read(&device, half + others, 4096));
        others += 4096;
    });
    let warmed = warmed.unwrap();
    let counts = (warmed.present_bytes, warmed.downloaded_bytes, warmed.unstored_bytes);
    assert_eq!(counts, (0, half as u64, 0));
    let warmed = device.warm(0..half as u64, |_, _| {}).unwrap();
    let counts = (warmed.present_bytes, warmed.downloaded_bytes, warmed.unstored_bytes);
    assert_eq!(counts, (half as u64, 0, 0));
    // Nothing can be stored.
    node.tier().drop_objects(|_| true).unwrap();
    node.tier().set_budget_bytes(0).unwrap();
    let warmed = device.warm(0..half as u64, |_, _| {}).unwrap();
    let counts = (warmed.present_bytes, warmed.downloaded_bytes, warmed.unstored_bytes);
    assert_eq!(counts, (0, half as u64, half as u64));
}

/// On a slow line, where all of it at once would take longer than the timeout.
#[test]
fn warming_has_the_timeout_for_each_piece() {
    let bytes = pattern(2 * LEN, 21);
    let (server, node) = (Server::new(bytes.clone()), Node::new());
    let device = quick().timeout(Duration::from_secs(4)).buffer_bytes(256 << 10);
    let device = device.tier(&node.tier()).open(&server.url()).unwrap();
    // In the memory of requests four of them have a place at a time.
    server.plan(|_| Answer::Late(Duration::from_millis(350)));
    let warmed = device.warm(0..u64::MAX, |_, _| {}).unwrap();
    assert_eq!((warmed.present_bytes, warmed.unstored_bytes), (0, 0));
    assert_eq!(warmed.downloaded_bytes, 2 * LEN as u64);
    server.plan(|_| Answer::Proper);
    assert!(read(&device, 0, 2 * LEN) == bytes);
    assert_eq!(asked_bytes(&server), 0);
}

/// Each of many requests at once would have its part of a slow line only: more are made as answers come.
#[test]
fn warming_begins_with_few_requests() {
    let (server, node) = (Server::new(pattern(LEN, 22)), Node::new());
    let options = quick().timeout(Duration::from_secs(2)).largest_request_bytes(4 << 10);
    let options = options.tier(&node.tier());
    // On a busy machine opening may take as long as the timeout.
    let device = loop {
        match options.clone().open(&server.url()) {
            Err(RemoteError::TimedOut { .. }) => {}
            opened => break opened.unwrap(),
        }
    };
    server.plan(|_| Answer::Silence);
    let error = device.warm(0..u64::MAX, |_, _| {}).unwrap_err();
    assert!(matches!(*error, RemoteError::TimedOut { .. }), "{error}");
    let asked = server.asked().len();
    assert!(asked <= 4, "{asked} requests");
}
