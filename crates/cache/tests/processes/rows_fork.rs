//! A fork in the closure of a batch of rows. A single test: a child has only the thread that forked.

use std::sync::Arc;

use crate::common::*;
use aquifer_cache::{CacheError, Rows};
use aquifer_device::FileDevice;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("fork among rows", fork_among_rows)];

const ROW_BYTES: u64 = 500;
const ROWS: u64 = 4 * MIB / ROW_BYTES;

#[test]
fn a_child_that_returns_from_the_closure_gets_an_error_and_does_not_disturb_its_parent() {
    aquifer_testkit::child::succeeds("fork among rows");
}

fn fork_among_rows() {
    let file = TestFile::new(4 * MIB);
    let path = file.directory.path().join("data");
    let parent = std::process::id();
    // At a hit between reads, at a read, and at a hit without reads.
    for (io_uring, known, at) in
        [true, false].into_iter().flat_map(|ring| [(ring, 2, 3), (ring, 0, 9), (ring, 1, 5)])
    {
        let device = FileDevice::options().io_uring(io_uring).open(&path).unwrap();
        let rows =
            Rows::options(ROW_BYTES as usize).budget_bytes(2 * MIB).open_device(Arc::new(device));
        let rows = rows.unwrap();
        let list: Vec<u64> = (0..ROWS).step_by(37).collect();
        if known > 0 {
            let step = known;
            let hits: Vec<u64> = list.iter().copied().step_by(step).collect();
            rows.get_many(&hits, |_, _| {}).unwrap();
        }
        let mut visits = 0;
        let got = rows.get_many(&list, |position, bytes| {
            if std::process::id() != parent {
                // SAFETY: ends the child.
                unsafe { libc::_exit(3) };
            }
            assert_eq!(bytes[7], byte_at(list[position] * ROW_BYTES + 7));
            if visits == at {
                fork_and_wait(&format!("{io_uring} {known} {at}"));
            }
            visits += 1;
        });
        if std::process::id() != parent {
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!matches!(got, Err(CacheError::Forked)))) };
        }
        got.unwrap();
        assert_eq!(visits, list.len());
    }
}
