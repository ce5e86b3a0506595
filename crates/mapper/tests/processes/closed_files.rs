//! A program that gives the number of a view's descriptor to a file of its own.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use aquifer_mapper::{Mapper, Stores, ViewOptions};
use aquifer_sys::clock;
use aquifer_testkit::child;

/// A view whose stores are private until they are flushed.
const PRIVATE: ViewOptions = ViewOptions::write().stores(Stores::Private);

pub const ROLES: &[aquifer_testkit::child::Role] = &[("replaces", replaces)];

fn replaces() {
    // SAFETY: zeros are a value of the structure, and the calls only read and write it.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, vec![1; 8192]).unwrap();
    let mapper = Mapper::builder().build().unwrap();
    let view = mapper.map(&path, PRIVATE, ..).unwrap();
    view.set(0, 7u8).unwrap();

    let own = tempfile::tempfile().unwrap();
    own.write_all_at(&[3; 8192], 0).unwrap();
    let numbers = fs::read_dir("/proc/self/fd").unwrap();
    let numbers = numbers.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let is_its = |number: &String| {
        fs::read_link(format!("/proc/self/fd/{number}")).is_ok_and(|target| target == path)
    };
    let numbers: Vec<RawFd> =
        numbers.filter(is_its).map(|number| number.parse().unwrap()).collect();
    assert!(!numbers.is_empty());
    let put = |&number: &RawFd| {
        // SAFETY: replaces what the view uses, on purpose.
        assert_eq!(unsafe { libc::dup2(own.as_raw_fd(), number) }, number);
        // SAFETY: just made; the view gives it up.
        File::from(unsafe { OwnedFd::from_raw_fd(number) })
    };
    let files: Vec<File> = numbers.iter().map(put).collect();
    let before = clock::coarse_ns();
    while clock::coarse_ns() == before {
        std::thread::yield_now();
    }
    let error = view.flush().expect_err("its file is closed");
    assert!(error.to_string().contains("os error 9"), "{error}");
    drop((view, mapper));
    let mut bytes = [0; 8192];
    files[0].read_exact_at(&mut bytes, 0).expect("it is not closed");
    assert_eq!(bytes, [3; 8192], "what the program wrote");
}

#[test]
fn a_view_is_not_flushed_to_a_file_that_has_its_number() {
    child::succeeds("replaces");
}
