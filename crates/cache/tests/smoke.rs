use aquifer_cache::*;
use aquifer_device::*;
use std::sync::Arc;

#[test]
fn user_mapping_reads_and_writes_beyond_the_budget() {
    let len = 64usize << 20;
    let bytes: Vec<u8> = (0..len).map(|i| ((i >> 12) as u8).wrapping_mul(31) ^ (i as u8)).collect();
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::from_bytes(&bytes).unwrap());
    let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
    let map = cache.map_mut(device.clone()).unwrap();
    let base = map.as_ptr();
    for step in 0..200_000usize {
        let at = step.wrapping_mul(7919 * 4096 + 13) % len;
        assert_eq!(unsafe { base.add(at).read_volatile() }, bytes[at], "at {at}");
    }
    let sum: u64 = (0..len).map(|i| u64::from(unsafe { base.add(i).read_volatile() })).sum();
    assert_eq!(sum, bytes.iter().map(|&b| u64::from(b)).sum::<u64>());
    let base = map.as_mut_ptr().unwrap();
    for page in 0..len / 4096 {
        let page = page * 7919 % (len / 4096);
        unsafe { base.add(page * 4096 + 5).write_volatile(page as u8) };
    }
    map.flush_all().unwrap();
    println!("{:#?}", {
        let mut s = cache.stats();
        s.fault_service_ns = Default::default();
        s.write_back_bytes = Default::default();
        s
    });
    while !cache.stats().is_consistent() {
        std::thread::yield_now();
    }
    let mut back = vec![0u8; len];
    device.read_at(0, &mut back).unwrap();
    for page in 0..len / 4096 {
        assert_eq!(
            back[page * 4096 + 5],
            page as u8,
            "page {page}: {:?}",
            &back[page * 4096..page * 4096 + 16]
        );
        assert_eq!(back[page * 4096 + 6], bytes[page * 4096 + 6]);
    }
    let pages = cache.pages(device.clone()).unwrap();
    for page in 0..pages.page_count() {
        assert_eq!(pages.get(PageId(page)).unwrap()[5], page as u8);
        assert_eq!(
            pages.read(PageId(page), |b| b.get::<u8>(6)).unwrap(),
            bytes[page as usize * 4096 + 6]
        );
    }
    for page in 0..pages.page_count() {
        pages.get_mut(PageId(page)).unwrap()[9] = 7;
    }
    pages.flush_all().unwrap();
    device.read_at(0, &mut back).unwrap();
    assert!((0..len / 4096).all(|page| back[page * 4096 + 9] == 7));
    drop(map);
    drop(pages);
    println!("{:?}", cache.stats().resident_pages);
}
