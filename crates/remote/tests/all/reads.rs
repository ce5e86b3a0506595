//! What is read is what the server has, by the device and by a cache's interfaces; versions are not mixed, requests are
//! few.

use std::ops::{ControlFlow, Range};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_cache::{Cache, PageId};
use aquifer_device::{Batch, Device, DeviceError, IoOperation, Request};
use aquifer_remote::{RemoteDevice, RemoteError, Tier};
use aquifer_testkit::rng::Rng;

use crate::support::{Answer, Server, pattern, quick, remote};

const PAGE: usize = 4096;

fn cache() -> Cache {
    Cache::builder().budget_bytes(8 << 20).build().unwrap()
}

/// Random ranges through each interface.
fn check_all(device: RemoteDevice, bytes: &[u8], seed: u64) {
    let device = Arc::new(device);
    let len = bytes.len();
    assert_eq!(device.len_bytes().unwrap(), len as u64);
    let mut rng = Rng::new(seed);
    let mut range = |longest: u64| {
        let start = rng.below(len as u64);
        start..(start + 1 + rng.below(longest)).min(len as u64)
    };
    let part = |range: &Range<u64>| &bytes[range.start as usize..range.end as usize];
    for _ in 0..20 {
        let range = range(300_000);
        let mut buffer = vec![0; part(&range).len()];
        assert_eq!(device.read_at(range.start, &mut buffer).unwrap(), buffer.len());
        assert!(buffer == part(&range), "{range:?}");
    }
    let ranges: Vec<_> = (0..200).map(|_| range(20_000)).collect();

    let cache = cache();
    let pages = cache.pages(device.clone()).unwrap();
    pages.prefetch(PageId(3), 20).unwrap();
    // Each page once, as a visit does.
    let numbers: std::collections::BTreeSet<_> =
        ranges.iter().map(|range| PageId(range.start / PAGE as u64)).collect();
    let page_bytes = |page: PageId| {
        let start = page.0 as usize * PAGE;
        &bytes[start..(start + PAGE).min(len)]
    };
    let mut visits = 0;
    let visit = |page, got: &[u8]| {
        assert!(got[..page_bytes(page).len()] == *page_bytes(page), "{page:?}");
        visits += 1;
        ControlFlow::Continue(())
    };
    pages.visit_many(numbers.iter().copied(), visit).unwrap();
    assert_eq!(visits, numbers.len());
    for &page in numbers.iter().take(20) {
        assert!(pages.get(page).unwrap()[..page_bytes(page).len()] == *page_bytes(page));
    }
    drop(pages);

    let mapping = cache.map(device.clone()).unwrap();
    let mut visits = 0;
    let visit = |one: aquifer_cache::Visited<'_>| {
        let start = one.offset_bytes as usize;
        let got = one.bytes.to_vec();
        assert!(got == bytes[start..start + got.len()], "at {start}");
        visits += got.len();
        ControlFlow::Continue(())
    };
    mapping.visit_many(ranges.iter().cloned(), visit).unwrap();
    assert_eq!(visits, ranges.iter().map(|range| part(range).len()).sum::<usize>());
    drop(mapping);

    // Bare loads: each miss is a signal.
    let mapping = cache.map(device).unwrap();
    for at in (0..len).step_by(1000) {
        // SAFETY: inside the mapping, which lives.
        assert_eq!(unsafe { mapping.as_ptr().add(at).read_volatile() }, bytes[at]);
    }
}

#[test]
fn http() {
    let bytes = pattern(1_234_567, 1);
    let server = Server::new(bytes.clone());
    check_all(server.open(), &bytes, 2);
    // Signed: the query is part of each request.
    let asked = server.asked();
    assert!(
        asked
            .iter()
            .all(|one| one.head.starts_with("GET /bucket/dir/object.bin?X-Signature=hunter2 "))
    );
    assert!(asked[1..].iter().all(|one| one.head.contains("if-match: \"v1\"")));
}

#[test]
fn s3() {
    let bytes = pattern(1_234_567, 3);
    let server = Server::new(bytes.clone());
    check_all(server.s3().open("s3://bucket/dir/object.bin").unwrap(), &bytes, 4);
    let asked = server.asked();
    assert!(asked.iter().all(|one| {
        one.head.starts_with("GET /bucket/dir/object.bin ")
            && one.head.contains("authorization: AWS4-HMAC-SHA256 Credential=AKID/")
            && one.head.contains("/nowhere-1/s3/")
            && !one.head.contains("hunter2")
    }));
}

#[test]
fn stores_without_signatures() {
    let bytes = pattern(300_000, 14);
    let account = quick().config("azure_storage_account_name", "account");
    for (url, options, unsigned, path) in [
        ("s3://bucket/dir/a%20key", quick(), "aws_skip_signature", "/bucket/dir/a%20key"),
        ("gs://bucket/dir/a%20key", quick(), "google_skip_signature", "/bucket/dir%2Fa%20key"),
        ("az://bucket/dir/a%20key", account, "azure_skip_signature", "/bucket/dir/a%20key"),
    ] {
        let server = Server::new(bytes.clone());
        server.put("bucket/dir/a key", bytes.clone());
        let options = options.endpoint(server.endpoint()).allow_http(true);
        check_all(options.clone().anonymous(true).open(url).unwrap(), &bytes, 15);
        options.config(unsigned, "true").open(url).unwrap();
        for one in server.asked().iter() {
            assert!(one.head.starts_with(&format!("GET {path} ")), "{}", one.head);
            assert!(!one.head.contains("authorization"), "{}", one.head);
        }
    }
}

#[test]
fn files() {
    let bytes = pattern(1_234_567, 5);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("some file");
    std::fs::write(&path, &bytes).unwrap();
    let url = format!("file://{}", path.display()).replace(' ', "%20");
    check_all(RemoteDevice::open(&url).unwrap(), &bytes, 6);
    let device = RemoteDevice::open(&url).unwrap();
    std::fs::write(&path, &bytes[1..]).unwrap();
    let error = device.read_at(0, &mut [0; 10]).unwrap_err();
    assert!(matches!(remote(&error), RemoteError::Changed { .. }), "{error}");
    std::fs::remove_file(&path).unwrap();
    let error = device.read_at(0, &mut [0; 10]).unwrap_err();
    assert!(matches!(remote(&error), RemoteError::NotFound { .. }), "{error}");
    assert!(matches!(RemoteDevice::open(&url), Err(RemoteError::NotFound { .. })));
}

/// A file that is written in place while it is read.
#[test]
fn files_that_change_while_they_are_read() {
    const LEN: usize = 8 << 20;
    let file = tempfile::NamedTempFile::new().unwrap();
    let url = format!("file://{}", file.path().display());
    let began = Instant::now();
    // Until the write falls into the read.
    loop {
        std::fs::write(file.path(), vec![1; LEN]).unwrap();
        // The write takes place in another tick of the clock.
        file.as_file().set_modified(std::time::UNIX_EPOCH).unwrap();
        let device = RemoteDevice::open(&url).unwrap();
        let mut buffer = vec![0; LEN];
        let result = std::thread::scope(|scope| {
            let reader = scope.spawn(|| device.read_at(0, &mut buffer));
            while device.stats().received_bytes == 0 && !reader.is_finished() {
                std::thread::yield_now();
            }
            file.as_file().write_all_at(&vec![2; LEN], 0).unwrap();
            reader.join().unwrap()
        });
        match result {
            Ok(_) => assert!(buffer.iter().all(|&byte| byte == 1)),
            Err(error) => {
                assert!(matches!(remote(&error), RemoteError::Changed { .. }), "{error}");
                return;
            }
        }
        assert!(began.elapsed() < Duration::from_secs(60), "tried in vain");
    }
}

#[test]
fn the_ends_of_objects() {
    let server = Server::new(pattern(10_000, 7));
    let device = server.open();
    let mut buffer = [9; 100];
    assert_eq!(device.read_at(9950, &mut buffer).unwrap(), 50);
    assert_eq!(buffer[..50], pattern(10_000, 7)[9950..]);
    assert_eq!(device.read_at(10_000, &mut buffer).unwrap(), 0);
    assert_eq!(device.read_at(5, &mut []).unwrap(), 0);
    let beyond = device.read_at(10_001, &mut buffer);
    assert!(matches!(beyond, Err(DeviceError::OutOfBounds { device_bytes: 10_000, .. })));
    assert!(matches!(device.write_at(0, &buffer), Err(DeviceError::ReadOnly)));

    let empty = Server::new(vec![]);
    for answer in [Answer::Proper, Answer::Whole] {
        empty.plan(move |_| answer.clone());
        let device = empty.open();
        assert_eq!((device.len_bytes().unwrap(), device.read_at(0, &mut buffer).unwrap()), (0, 0));
    }
}

/// Transfers given in advance.
struct List {
    requests: Vec<Request>,
    results: Vec<Option<Result<usize, DeviceError>>>,
}

// SAFETY: the requests' memory is the caller's, which accesses it when the batch has ended.
unsafe impl Batch for List {
    fn next(&mut self) -> Option<Request> {
        self.requests.pop()
    }

    fn complete(&mut self, tag: u64, result: Result<usize, DeviceError>) {
        assert!(self.results[tag as usize].replace(result).is_none(), "completed twice");
    }
}

/// Runs a batch of reads; returns the bytes and the results.
fn run(
    device: &RemoteDevice,
    reads: &[(u64, usize)],
) -> (Vec<Vec<u8>>, Vec<Result<usize, DeviceError>>) {
    let mut buffers: Vec<_> = reads.iter().map(|&(_, len)| vec![0; len]).collect();
    let request =
        |(tag, (&(offset_bytes, len_bytes), buffer)): (usize, (_, &mut Vec<u8>))| Request {
            operation: IoOperation::Read,
            offset_bytes,
            memory: buffer.as_mut_ptr(),
            len_bytes,
            tag: tag as u64,
        };
    let requests = reads.iter().zip(&mut buffers).enumerate().map(request).collect();
    let mut list = List { requests, results: reads.iter().map(|_| None).collect() };
    device.run(&mut list, 64);
    (buffers, list.results.into_iter().map(|result| result.expect("completed")).collect())
}

#[test]
fn near_transfers_share_requests() {
    let bytes = pattern(4 << 20, 8);
    let server = Server::new(bytes.clone());
    let device = server.open();
    let near: Vec<_> = (0..60).map(|number| (number * 8192, PAGE)).collect();
    let far: Vec<_> = (0..4).map(|number| ((1 << 20) + number * 700_000, PAGE)).collect();
    let reads = [near, far].concat();
    server.plan(|_| Answer::Proper);
    let (buffers, results) = run(&device, &reads);
    for ((&(start, len), buffer), result) in reads.iter().zip(&buffers).zip(results) {
        assert_eq!(result.unwrap(), len);
        assert!(buffer[..] == bytes[start as usize..start as usize + len]);
    }
    // 16 × 19.5 KiB each before anything was measured.
    assert_eq!(server.asked().len(), 2 + 4);
    let stats = device.stats();
    assert_eq!((stats.ranges, stats.delivered_bytes), (6, 64 * PAGE as u64));
    assert_eq!(stats.received_bytes, (64 + 58) * PAGE as u64);
}

#[test]
fn a_batch_completes_each_transfer_with_its_own_result() {
    let bytes = pattern(3 << 20, 9);
    let server = Server::new(bytes.clone());
    let device = quick().largest_request_bytes(1 << 20).open(&server.url()).unwrap();
    let end = bytes.len() as u64;
    server.plan(|_| Answer::Proper);
    let (buffers, results) =
        run(&device, &[(end - 100, PAGE), (end, 10), (end + 1, 10), (0, 0), (5, (2 << 20) + 7)]);
    assert!(matches!(results[0], Ok(100)) && buffers[0][..100] == bytes[bytes.len() - 100..]);
    assert!(matches!((&results[1], &results[3]), (Ok(0), Ok(0))));
    assert!(matches!(results[2], Err(DeviceError::OutOfBounds { .. })));
    assert!(buffers[4][..] == bytes[5..][..(2 << 20) + 7]);
    let longest = server.asked().iter().filter_map(|one| Some(one.range.as_ref()?.len())).max();
    assert_eq!(longest, Some(1 << 20));

    // Half of the requests fail; the others' transfers do not.
    server.plan(|number| if number % 2 == 0 { Answer::Status(403) } else { Answer::Proper });
    let reads: Vec<_> = (0..6).map(|number| (number * 500_000, 1000)).collect();
    let (buffers, results) = run(&device, &reads);
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 3);
    for ((&(start, len), buffer), result) in reads.iter().zip(&buffers).zip(&results) {
        match result {
            Ok(got) => assert!(*got == len && buffer[..] == bytes[start as usize..][..len]),
            Err(error) => {
                let error = remote(error);
                assert!(matches!(error, RemoteError::Denied { status: 403, .. }), "{error}");
                assert!(buffer.iter().all(|&byte| byte == 0));
            }
        }
    }
}

/// A batch that makes other reads of the device when its first transfer has ended.
struct Reading<'a> {
    list: List,
    device: &'a RemoteDevice,
    reads: Range<usize>,
    /// A long transfer's memory, and what it is to hold.
    long: (*const u8, &'a [u8]),
    /// Of it, the bytes that had come when the other reads began.
    copied_bytes: usize,
}

// SAFETY: the list's are.
unsafe impl Batch for Reading<'_> {
    fn next(&mut self) -> Option<Request> {
        self.list.next()
    }

    fn complete(&mut self, tag: u64, result: Result<usize, DeviceError>) {
        self.list.complete(tag, result);
        for number in std::mem::take(&mut self.reads) {
            if number == 1 {
                // SAFETY: the memory is as long as what it is to hold, and only this thread accesses it.
                let got = unsafe { std::slice::from_raw_parts(self.long.0, self.long.1.len()) };
                let pages = got.chunks(PAGE).zip(self.long.1.chunks(PAGE));
                self.copied_bytes = pages.filter(|(got, all)| got == all).count() * PAGE;
            }
            self.device.read_at((number * 2 * PAGE) as u64, &mut [0; 10]).unwrap();
        }
    }
}

/// Of one batch, which copies none meanwhile: of a long transfer, and of short ones with gaps between them.
#[test]
fn answers_of_a_batch_are_bounded() {
    const MIB: usize = 1 << 20;
    const READS: usize = 200;
    let bytes = pattern(10 * MIB, 31);
    let server = Server::new(bytes.clone());
    let device = quick().buffer_bytes(MIB).open(&server.url()).unwrap();
    let near = (0..300).map(|number| (4 * MIB + number * 4 * PAGE, 100));
    for rest in [vec![(4 * MIB, 3 * MIB)], near.rev().collect()] {
        server.plan(|_| Answer::Proper);
        // The last one is taken first.
        let reads = [rest, vec![(3 * MIB, 10)]].concat();
        let mut buffers: Vec<_> = reads.iter().map(|&(_, len)| vec![0; len]).collect();
        let requests = reads.iter().zip(&mut buffers).enumerate().map(|(tag, (read, buffer))| {
            let (memory, tag) = (buffer.as_mut_ptr(), tag as u64);
            let (offset_bytes, len_bytes) = (read.0 as u64, read.1);
            Request { operation: IoOperation::Read, offset_bytes, memory, len_bytes, tag }
        });
        let requests: Vec<_> = requests.collect();
        let long = (requests[0].memory.cast_const(), &bytes[reads[0].0..][..reads[0].1]);
        let list = List { requests, results: reads.iter().map(|_| None).collect() };
        // The server sees them after what the batch has asked for.
        let reading = 1..READS + 1;
        let mut batch = Reading { list, device: &device, reads: reading, long, copied_bytes: 0 };
        device.run(&mut batch, 400);
        let Reading { list, copied_bytes, .. } = batch;
        for ((&(start, len), buffer), result) in reads.iter().zip(&buffers).zip(list.results) {
            assert_eq!(result.unwrap().unwrap(), len);
            assert!(buffer[..] == bytes[start..start + len]);
        }
        let asked = server.asked();
        let ranges = asked.iter().map(|one| one.range.clone().unwrap());
        let last = ranges.clone().position(|range| range.start == READS * 2 * PAGE).unwrap();
        let before = ranges.take(last).filter(|range| range.start > 3 * MIB);
        let before = before.map(|range| range.len()).sum::<usize>();
        assert!(before - copied_bytes <= MIB / 4, "{before} bytes, {copied_bytes} copied");
    }
}

/// Those that are not whole sub-blocks of a tier as well.
#[test]
fn requests_are_never_longer_than_the_largest() {
    const LARGEST: usize = 16 << 10;
    let bytes = pattern(1 << 20, 32);
    let server = Server::new(bytes.clone());
    // So that longer ones would be worth it.
    server.latency(Duration::from_millis(5));
    let directory = tempfile::tempdir().unwrap();
    let tier = Tier::open(directory.path().join("tier")).unwrap();
    // A tier that keeps nothing brings whole sub-blocks as well.
    for (tier, budget_bytes) in [(None, 0), (Some(&tier), 100 << 20), (Some(&tier), 0)] {
        let open = || {
            if let Some(tier) = tier {
                tier.set_budget_bytes(budget_bytes).unwrap();
                tier.drop_objects(|_| true).unwrap();
            }
            let options = quick().largest_request_bytes(LARGEST);
            let options = tier.into_iter().fold(options, |options, tier| options.tier(tier));
            options.open(&server.url()).unwrap()
        };
        let device = open();
        let mut buffer = vec![0; 300_001];
        device.read_at(4000, &mut buffer).unwrap();
        assert!(buffer == bytes[4000..304_001]);
        // In order, with more and more read ahead.
        for at in (400_100..600_000).step_by(PAGE) {
            device.read_at(at, &mut buffer[..PAGE]).unwrap();
        }
        drop(device);
        let device = open();
        let short = (0..100).map(|number| (500_001 + number * 3001, 50));
        let reads: Vec<_> = short.chain([(4000, 300_001)]).collect();
        let (buffers, _) = run(&device, &reads);
        for ((start, len), buffer) in reads.into_iter().zip(buffers) {
            assert!(buffer == bytes[start as usize..][..len]);
        }
        if tier.is_some() {
            open().warm(4000..1_000_000, |_, _| {}).unwrap();
        }
    }
    let asked = server.asked();
    let longest = asked.iter().map(|one| one.range.as_ref().unwrap().len()).max();
    assert_eq!(longest, Some(LARGEST));
}

#[test]
fn requests_in_flight_are_bounded() {
    let server = Server::new(pattern(1 << 20, 10));
    server.plan(|_| Answer::Late(Duration::from_millis(20)));
    let device = quick().in_flight(3).open(&server.url()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let device = &device;
            scope.spawn(move || {
                for step in 0..4 {
                    device.read_at((thread * 4 + step) * 20_000, &mut [0; 1000]).unwrap();
                }
            });
        }
        scope.spawn(|| {
            let reads: Vec<_> = (0..16).map(|number| (number * 60_000, 100)).collect();
            run(&device, &reads).1.into_iter().for_each(|result| assert!(result.is_ok()));
        });
    });
    assert!((1..=3).contains(&server.most_at_once()));
}

/// More readers than the mailbox has slots.
#[test]
fn many_readers_at_once() {
    let bytes = pattern(1 << 20, 11);
    let server = Server::new(bytes.clone());
    let device = quick().in_flight(8).open(&server.url()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..300 {
            let (device, bytes) = (&device, &bytes);
            scope.spawn(move || {
                for step in 0..2 {
                    let mut buffer = [0; 500];
                    let start = thread * 3000 + step * 700;
                    device.read_at(start as u64, &mut buffer).unwrap();
                    assert!(buffer[..] == bytes[start..start + 500]);
                }
            });
        }
    });
}

/// A server that ignores the condition, and whose object changes under many readers.
#[test]
fn bytes_of_two_versions_are_never_mixed() {
    const LEN: usize = 300_000;
    for honours in [true, false] {
        let server = Server::new(vec![1; LEN]);
        if !honours {
            server.ignore_if_match();
        }
        server.plan(|number| if number % 5 == 4 { Answer::Cut } else { Answer::Proper });
        let device = Arc::new(quick().retries(5).open(&server.url()).unwrap());
        let pages = cache().pages(device.clone()).unwrap();
        let (has_changed, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (device, pages) = (&device, &pages);
                let (server, has_changed, is_over) = (&server, &has_changed, &is_over);
                scope.spawn(move || {
                    let mut rng = Rng::new(thread);
                    let mut step = 0;
                    while !is_over.load(Ordering::SeqCst) {
                        let mut buffer = vec![0; 1 + rng.below(100_000) as usize];
                        let start = rng.below((LEN - buffer.len()) as u64);
                        match device.read_at(start, &mut buffer) {
                            Ok(_) => assert!(buffer.iter().all(|&byte| byte == 1)),
                            Err(error) => {
                                is_change_or_break(&error);
                                if matches!(remote(&error), RemoteError::Changed { .. }) {
                                    has_changed.store(true, Ordering::SeqCst);
                                }
                            }
                        }
                        match pages.get(PageId(start / PAGE as u64)) {
                            Ok(page) => assert!(page.iter().all(|&byte| byte <= 1)),
                            Err(error) => is_change_or_break(&error),
                        }
                        step += 1;
                        if thread == 0 && step == 20 {
                            server.replace(vec![2; LEN], Some("\"v2\""));
                        }
                        if step >= 40 && has_changed.load(Ordering::SeqCst) {
                            is_over.store(true, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
    }
}

fn is_change_or_break(error: &(dyn std::error::Error + 'static)) {
    let error = remote(error);
    let is_fine = matches!(error, RemoteError::Changed { .. } | RemoteError::Unavailable { .. });
    assert!(is_fine, "{error}");
}

/// A cache's errors have the device's as their cause, also in calls that load by a mapping.
#[test]
fn errors_pass_through_a_cache() {
    let server = Server::new(pattern(100_000, 12));
    let device = Arc::new(server.open());
    let cache = cache();
    let (pages, mapping) = (cache.pages(device.clone()).unwrap(), cache.map(device).unwrap());
    server.replace(pattern(100_000, 13), Some("\"v2\""));
    for error in [
        pages.get(PageId(2)).err().unwrap(),
        mapping.get::<u8>(50_000).err().unwrap(),
        pages.visit_many([PageId(3)], |_, _| ControlFlow::Continue(())).err().unwrap(),
    ] {
        assert!(matches!(remote(&error), RemoteError::Changed { .. }), "{error}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
}

#[test]
fn reads_in_order_take_few_requests() {
    let bytes = pattern(4 << 20, 21);
    let server = Server::new(bytes.clone());
    let device = server.open();
    server.plan(|_| Answer::Proper);
    let mut buffer = vec![0; PAGE];
    for at in (0..bytes.len()).step_by(PAGE) {
        device.read_at(at as u64, &mut buffer).unwrap();
        assert!(buffer == bytes[at..at + PAGE]);
    }
    let asked = server.asked().len();
    assert!(asked < 100, "{asked} requests for 1024 pages");
    let received = device.stats().received_bytes;
    assert_eq!(received, bytes.len() as u64, "each byte once");
    // Threads that wait for the same bytes do not ask for them twice.
    server.plan(|_| Answer::Late(Duration::from_millis(20)));
    let device = server.open();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut buffer = vec![0; PAGE];
                for at in (0..1 << 18).step_by(PAGE) {
                    device.read_at(at as u64, &mut buffer).unwrap();
                    assert!(buffer == bytes[at..at + PAGE]);
                }
            });
        }
    });
    let received = device.stats().received_bytes;
    assert!(received < 1 << 20, "{received} for a quarter of a MiB");
}

/// What was brought beyond the reads, as far as reads of it need no request.
#[test]
fn what_is_read_ahead_stays_within_its_memory() {
    const MIB: usize = 1 << 20;
    let server = Server::new(pattern(2 * MIB, 23));
    // So that long requests are worth it.
    server.latency(Duration::from_millis(5));
    let device = quick().buffer_bytes(MIB).open(&server.url()).unwrap();
    let mut buffer = vec![0; PAGE];
    for at in (0..2 * MIB).step_by(PAGE) {
        device.read_at(at as u64, &mut buffer).unwrap();
    }
    server.latency(Duration::ZERO);
    let pages = 2 * MIB / PAGE;
    server.plan(|_| Answer::Proper);
    // Not in order, so that nothing more is kept.
    for at in (0..2 * MIB).step_by(PAGE).rev() {
        device.read_at(at as u64, &mut buffer).unwrap();
    }
    let kept_bytes = (pages - server.asked().len()) * PAGE;
    assert!((1..=MIB / 4).contains(&kept_bytes), "{kept_bytes} bytes");
}

/// The wait for a place is no lateness, and a place that others wait for is not taken.
#[test]
fn requests_that_wait_are_not_hedged() {
    let server = Server::new(pattern(1 << 20, 1));
    let device = quick().hedge(true).in_flight(1).open(&server.url()).unwrap();
    server.plan(|_| Answer::Late(Duration::from_millis(200)));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let device = &device;
            scope.spawn(move || device.read_at(thread * 50_000, &mut [0; 1000]).unwrap());
        }
    });
    let stats = device.stats();
    assert_eq!((stats.hedged_ranges, stats.ranges, server.asked().len()), (0, 4, 4));
}

#[test]
fn a_late_answer_is_hedged() {
    let bytes = pattern(100_000, 22);
    let server = Server::new(bytes.clone());
    let device = quick().hedge(true).open(&server.url()).unwrap();
    // The first request never gets an answer, the second does.
    server.plan(|number| if number == 0 { Answer::Silence } else { Answer::Proper });
    let mut buffer = vec![0; 5000];
    device.read_at(70, &mut buffer).unwrap();
    assert!(buffer == bytes[70..5070]);
    let stats = device.stats();
    assert_eq!((stats.hedged_ranges, stats.ranges, stats.failed_ranges), (1, 1, 0));
    // If the first fails meanwhile, the second counts.
    server.plan(
        |number| if number == 1 { Answer::Late(Duration::from_millis(20)) } else { Answer::Proper },
    );
    device.read_at(90_000, &mut buffer[..10]).unwrap();
    assert!(buffer[..10] == bytes[90_000..90_010]);
}

#[test]
fn a_visit_keeps_a_long_line_full() {
    const PART: usize = 64 << 10;
    let bytes = pattern(64 * PART, 9);
    let server = Server::new(bytes.clone());
    let device = quick().largest_request_bytes(PART).open(&server.url()).unwrap();
    server.plan(|_| Answer::Late(Duration::from_millis(500)));
    // Of its budget the device gets a part.
    let cache = Cache::builder().budget_bytes(128 << 20).build().unwrap();
    let mapping = cache.map(device).unwrap();
    let mut visited = 0;
    let visit = |one: aquifer_cache::Visited<'_>| {
        visited += one.bytes.len();
        ControlFlow::Continue(())
    };
    let all = std::iter::once(0..bytes.len() as u64);
    mapping.visit_many(all, visit).unwrap();
    assert_eq!(visited, bytes.len());
    // 1 MiB, enough for a local disk, would be 16.
    let most = server.most_at_once();
    assert!(most > 24, "{most} requests at once");
}
