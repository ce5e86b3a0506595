//! Stores that go to the file at once.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use super::*;
use crate::error::FaultCause;
use crate::flush::test_support::{Ballast, Kind, SmallFileSystem, open, place};

fn view(path: &Path, len_bytes: u64) -> SharedFile {
    SharedFile::new(place(len_bytes), &open(path), path, 0..len_bytes).unwrap()
}

#[test]
fn stores_are_seen_at_once_and_durable_after_a_flush() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![1; 100_000]).unwrap();
    let file = open(&path);
    file.sync_all().unwrap();
    let view = view(&path, 100_000);
    view.set(50_000, 0x0102_0304u32).unwrap();
    view.write_at(99_999, &[7]).unwrap();
    let there = std::fs::read(&path).unwrap();
    assert_eq!(there[50_000..50_004], 0x0102_0304u32.to_ne_bytes());
    assert_eq!(there[99_999], 7);
    let dirty_bytes = view.dirty_bytes().unwrap();
    assert_eq!(view.flush_range(10..10).unwrap(), Flushed::default());
    assert_eq!(view.flush().unwrap().bytes_written, dirty_bytes);
    let magic = aquifer_sys::file_system::magic(view.mapping().file()).unwrap();
    if aquifer_sys::file_system::in_memory(magic).is_none() {
        assert_eq!(view.dirty_bytes().unwrap(), 0);
    }
    assert!(matches!(view.write_at(99_999, &[1, 2]), Err(MapError::OutsideView { .. })));
}

#[test]
fn a_view_grows_with_its_file_and_notices_that_it_was_cut() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![1; 5000]).unwrap();
    let view = view(&path, 5000);
    let base = view.as_mut_ptr();
    view.grow(20_000).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 20_000);
    view.write_at(19_999, &[5]).unwrap();
    assert_eq!(view.as_mut_ptr(), base);
    view.flush().unwrap();
    assert!(matches!(view.grow(1 << 40), Err(MapError::GrowBeyond { .. })));
    open(&path).set_len(9000).unwrap();
    let lost = view.write_at(19_999, &[1]).unwrap_err();
    assert!(matches!(lost, MapError::Fault { cause: FaultCause::Truncated, .. }), "{lost}");
    let lost = view.flush().unwrap_err();
    assert!(matches!(lost, MapError::Flush { cause: FlushCause::Truncated, .. }), "{lost}");
    view.flush_range(0..9000).unwrap();
    let mut byte = [0];
    assert!(view.mapping().read_into(15_000, &mut byte).is_err());
}

/// The device has what a flush returned for: also blocks that were allocated for it, and the length.
#[test]
fn stores_to_holes_and_new_blocks_survive_a_power_cut_after_their_flush() {
    let Some(small) = SmallFileSystem::new(Kind::Ext4Journal) else { return };
    let path = small.root().join("data");
    std::fs::write(&path, [1; 4096]).unwrap();
    let file = open(&path);
    file.set_len(1 << 20).unwrap();
    aquifer_sys::io::allocate(file.as_fd(), 512 << 10, 64 << 10).unwrap();
    file.sync_all().unwrap();
    let view = SharedFile::new(place(4 << 20), &file, &path, 0..1 << 20).unwrap();
    // A hole, a block without content, one with it; and behind them what the file did not have.
    let stores = [300_000, 540_000, 10, (1 << 20) - 2];
    for (step, at) in stores.into_iter().chain([(2 << 20) - 100]).enumerate() {
        if step == stores.len() {
            view.grow(2 << 20).unwrap();
        }
        view.write_at(at, &[7, 8]).unwrap();
        view.flush_range(at..at + 2).unwrap();
        let after = small.after_a_power_cut();
        let there = std::fs::read(after.root().join("data")).unwrap();
        assert_eq!(there.get(at as usize..at as usize + 2), Some(&[7, 8][..]), "{at}");
    }
}

#[test]
fn a_store_to_a_hole_says_that_the_disk_is_full() {
    for kind in [Kind::Tmpfs, Kind::Ext4] {
        let Some(small) = SmallFileSystem::new(kind) else { return };
        let path = small.root().join("data");
        std::fs::write(&path, [1; 4096]).unwrap();
        let file = open(&path);
        file.set_len(1 << 20).unwrap();
        file.sync_all().unwrap();
        let view = view(&path, 1 << 20);
        let ballast = Ballast::fill(&small.root());
        let full = view.write_at(500_000, &[1]).unwrap_err();
        let no_space = FaultCause::NoSpace;
        assert!(matches!(full, MapError::Fault { cause, .. } if cause == no_space), "{full}");
        view.write_at(0, &[2]).unwrap();
        view.flush_range(0..4096).unwrap();
        drop(ballast);
        view.write_at(500_000, &[1]).unwrap();
        view.flush().unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 500_000).unwrap();
        assert_eq!(byte, [1], "{kind:?}");
    }
}

#[test]
fn a_child_can_do_nothing_with_its_parents_view() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    std::fs::write(&path, vec![1; 5000]).unwrap();
    let view = view(&path, 5000);
    // SAFETY: the child makes a few calls and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let results = [
            view.flush().map(drop),
            view.write_at(0, &[3]),
            view.grow(9000),
            view.dirty_bytes().map(drop),
        ];
        let refused = results.iter().all(|result| matches!(result, Err(MapError::Forked)));
        // SAFETY: ends the child without running the parent's destructors or exit handlers.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}
