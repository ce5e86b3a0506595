//! A fork in the closure of a visit. A single test: a child has only the thread that forked.

use std::ops::ControlFlow::Continue;
use std::sync::Arc;

use crate::common::*;
use aquifer_cache::{Backend, CacheError, MapOptions, Visited};
use aquifer_device::{Device, FileDevice};

pub const ROLES: &[aquifer_testkit::child::Role] = &[("fork in a visit", fork_in_a_visit)];

const LEN: u64 = 20 * MIB;

#[test]
fn a_child_that_returns_from_the_closure_gets_an_error_and_does_not_disturb_its_parent() {
    aquifer_testkit::child::succeeds("fork in a visit");
}

fn fork_in_a_visit() {
    let file = TestFile::new(LEN);
    let path = file.directory.path().join("data");
    let parent = std::process::id();
    for (backend, io_uring, in_order, at) in [Backend::User, Backend::Kernel]
        .into_iter()
        .flat_map(|backend| [(backend, true), (backend, false)])
        .flat_map(|(backend, ring)| [(backend, ring, false), (backend, ring, true)])
        .flat_map(|(backend, ring, in_order)| [0, 9].map(|at| (backend, ring, in_order, at)))
    {
        let device: Arc<dyn Device> =
            Arc::new(FileDevice::options().io_uring(io_uring).open(&path).unwrap());
        let cache = cache_of(8 * MIB);
        let mapping = cache.map_with(device, MapOptions::new().backend(backend)).unwrap();
        if at == 0 {
            mapping.touch(0).unwrap();
        }
        let rows = (0..LEN / 50_000).map(|row| row * 50_000..row * 50_000 + 100);
        let mut visits = 0;
        let look = |one: Visited<'_>| {
            if std::process::id() != parent {
                // SAFETY: ends the child.
                unsafe { libc::_exit(3) };
            }
            assert_eq!(one.bytes.get::<u8>(99), byte_at(one.offset_bytes + 99));
            if visits == at {
                fork_and_wait(&format!("{backend:?} {io_uring} {in_order} {at}"));
            }
            visits += 1;
            Continue(())
        };
        let ended = if in_order {
            mapping.visit_in_order(rows, look)
        } else {
            mapping.visit_many(rows, look)
        };
        if std::process::id() != parent {
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!matches!(ended, Err(CacheError::Forked)))) };
        }
        ended.unwrap();
        assert_eq!(visits, LEN / 50_000);
        assert!(cache.stats().is_consistent());
    }
}
