//! What calls of the C library cost beside the same calls in Rust.
//!
//! ```text
//! cargo run --release -p aquifer-capi --example cost
//! ```
//!
//! All data is in memory. Each figure is the least of many rounds, those in C and in Rust taking turns. The functions
//! are those of the library, called by their address; a shared library adds what the dynamic linker's table costs.

use std::ffi::{CString, c_int, c_void};
use std::hint::black_box;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::time::Instant;

use aquifer::{Cache, Files, MemoryDevice, PageId, Pool};
use aquifer_capi::{cache::*, device::*, file::*, mapping::*, pages::*, pool::*};

const LEN_BYTES: u64 = 1 << 20;

/// One call in C and in Rust, in nanoseconds.
pub struct Cost {
    /// What is called.
    pub name: &'static str,
    /// The call in C.
    pub c_ns: f64,
    /// The call in Rust.
    pub rust_ns: f64,
}

fn ok(result: c_int) {
    assert_eq!(result, 0);
}

fn least_ns<'a>(
    rounds: u32,
    calls: u32,
    one: &'a mut dyn FnMut(u64),
    other: &'a mut dyn FnMut(u64),
) -> [f64; 2] {
    let mut least = [f64::MAX; 2];
    for _ in 0..rounds {
        for (least, call) in least.iter_mut().zip([&mut *one, &mut *other]) {
            let start = Instant::now();
            for number in 0..u64::from(calls) {
                call(number);
            }
            *least = least.min(start.elapsed().as_nanos() as f64 / f64::from(calls));
        }
    }
    least
}

/// Measures in a directory.
pub fn measure(directory: &Path, rounds: u32, calls: u32) -> Result<Vec<Cost>, aquifer::Error> {
    let mut costs = vec![];
    let mut add = |name, one: &mut dyn FnMut(u64), other: &mut dyn FnMut(u64)| {
        let [c_ns, rust_ns] = least_ns(rounds, calls, one, other);
        costs.push(Cost { name, c_ns, rust_ns });
    };
    let mut row = [0_u8; 64];
    let target = row.as_mut_ptr();
    let offset = |number: u64| number * 4096 % LEN_BYTES;

    let cache = Cache::builder().budget_bytes(16 << 20).build()?;
    let mapping = cache.map_mut(MemoryDevice::new(LEN_BYTES as usize)?)?;
    let pages = cache.pages(MemoryDevice::new(LEN_BYTES as usize)?)?;
    let (mut c_cache, mut c_device, mut other) = (null_mut(), null_mut(), null_mut());
    let (mut c_mapping, mut c_pages) = (null_mut(), null_mut());
    let writable = aq_map_options { size: size_of::<aq_map_options>(), writable: 1, backend: 0 };
    // SAFETY: places on this stack.
    unsafe {
        ok(aq_cache_new(null(), &raw mut c_cache));
        ok(aq_device_memory(LEN_BYTES as usize, &raw mut c_device));
        ok(aq_device_memory(LEN_BYTES as usize, &raw mut other));
        ok(aq_map(c_cache, c_device, &raw const writable, &raw mut c_mapping));
        ok(aq_pages_new(c_cache, other, &raw mut c_pages));
    }

    let call = black_box(aq_mapping_len as unsafe extern "C" fn(_) -> _);
    add(
        "the length of a mapping",
        &mut |_| {
            // SAFETY: a handle made above, as below.
            black_box(unsafe { call(c_mapping) });
        },
        &mut |_| {
            black_box(black_box(&mapping).len());
        },
    );
    let call = black_box(aq_mapping_read as unsafe extern "C" fn(_, _, _, _) -> _);
    add(
        "64 bytes of a mapping",
        &mut |number| {
            let target = target.cast::<c_void>();
            // SAFETY: as above; the target has 64 bytes.
            ok(unsafe { call(c_mapping, target, 64_usize, offset(number)) });
        },
        &mut |number| {
            // SAFETY: the row, which nothing else uses during the call.
            let row = unsafe { std::slice::from_raw_parts_mut(target, 64) };
            mapping.read_exact_at(row, offset(number)).unwrap();
        },
    );
    let (get, release) = (
        black_box(aq_pages_get as unsafe extern "C" fn(_, _, _) -> _),
        black_box(aq_page_release as unsafe extern "C" fn(_)),
    );
    let mut guard = aq_page { data: null(), page: 0, pages: null_mut() };
    add(
        "a guard on a page, and its release",
        &mut |number| {
            // SAFETY: as above, and a place on this stack.
            ok(unsafe { get(c_pages, number % 256, &raw mut guard) });
            // SAFETY: the guard taken above.
            unsafe { release(&raw mut guard) };
        },
        &mut |number| drop(black_box(pages.get(PageId(number % 256)).unwrap())),
    );
    let call = black_box(aq_pages_read as unsafe extern "C" fn(_, _, _, _) -> _);
    add(
        "64 bytes of pages, without a guard",
        &mut |number| {
            let target = target.cast::<c_void>();
            // SAFETY: as above.
            ok(unsafe { call(c_pages, target, 64_usize, offset(number)) });
        },
        &mut |number| {
            // SAFETY: as above.
            let row = unsafe { std::slice::from_raw_parts_mut(target, 64) };
            pages.read_exact_at(row, offset(number)).unwrap();
        },
    );
    // SAFETY: made above, and not used any more.
    unsafe {
        ok(aq_pages_free(c_pages));
        aq_mapping_free(c_mapping);
        aq_device_free(c_device);
        aq_device_free(other);
        aq_cache_free(c_cache);
    }

    let path = directory.join("cost.pool");
    let files = Files::new(Pool::create(&path, 32 << 20)?);
    files.write("/data", vec![1; LEN_BYTES as usize])?;
    let file = files.open_file("/data")?;
    let (mut c_pool, mut c_file, mut done) = (null_mut(), null_mut(), 0_usize);
    let path = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    // SAFETY: strings, and places on this stack.
    unsafe {
        ok(aq_pool_open(path.as_ptr(), null(), &raw mut c_pool));
        ok(aq_file_open(c_pool, c"/data".as_ptr(), AQ_OPEN_READ, 0, &raw mut c_file));
    }
    let call = black_box(aq_file_read as unsafe extern "C" fn(_, _, _, _, _) -> _);
    add(
        "64 bytes of a file of a pool",
        &mut |number| {
            let target = target.cast::<c_void>();
            // SAFETY: as above.
            ok(unsafe { call(c_file, target, 64_usize, offset(number), &raw mut done) });
        },
        &mut |number| {
            // SAFETY: as above.
            let row = unsafe { std::slice::from_raw_parts_mut(target, 64) };
            black_box(file.read_at(row, offset(number)).unwrap());
        },
    );
    // SAFETY: made above, and not used any more.
    unsafe {
        aq_file_free(c_file);
        aq_pool_free(c_pool);
    }
    Ok(costs)
}

#[allow(dead_code, reason = "a test runs `measure` as well")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = tempfile::tempdir()?;
    println!("{:36} {:>8} {:>8}", "", "C", "Rust");
    for cost in measure(directory.path(), 200, 10_000)? {
        println!("{:36} {:>5.1} ns {:>5.1} ns", cost.name, cost.c_ns, cost.rust_ns);
    }
    Ok(())
}
