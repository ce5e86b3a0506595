//! The write-back thread; what a view writes back is tested with flushes.

use std::time::Instant;

use super::*;
use crate::flush::Flushed;
use crate::private::PrivateOptions;
use crate::private::test_support::{open, place};

const PAGE: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(60);

fn eventually(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

fn view(directory: &tempfile::TempDir, name: &str, pages: u64) -> Arc<PrivateFile> {
    let path = directory.path().join(name);
    std::fs::write(&path, vec![0; (pages * PAGE) as usize]).unwrap();
    let range = 0..pages * PAGE;
    let options = PrivateOptions::default();
    Arc::new(PrivateFile::new(place(range.end), &open(&path), &path, range, options).unwrap())
}

#[test]
fn what_is_stored_is_in_the_files_after_a_while() {
    let directory = tempfile::tempdir().unwrap();
    let views = ["one", "two"].map(|name| view(&directory, name, 200));
    let write_back = WriteBack::new(64 << 20);
    for view in &views {
        write_back.add(view).unwrap();
    }
    for round in 1..3 {
        for view in &views {
            (0..200).step_by(round).for_each(|page| view.set(page * PAGE, round).unwrap());
        }
        for view in &views {
            assert!(eventually(|| view.dirty_bytes().unwrap() == 0));
            assert_eq!(view.flush().unwrap(), Flushed::default(), "nothing is left to write");
        }
        for name in ["one", "two"] {
            let there = std::fs::read(directory.path().join(name)).unwrap();
            assert!((0..200).step_by(round).all(|page| there[page * PAGE as usize] == round as u8));
        }
    }
    // A view is dropped when its owner drops it, even while the thread uses it.
    let [one, two] = views;
    let weak = Arc::downgrade(&one);
    drop(one);
    assert!(eventually(|| weak.strong_count() == 0));
    drop(write_back);
    two.set(0, 9u8).unwrap();
    assert_eq!(two.flush().unwrap().pages, 1);
}

#[test]
fn without_a_pace_nothing_is_written_and_no_thread_started() {
    let directory = tempfile::tempdir().unwrap();
    let view = view(&directory, "data", 10);
    let write_back = WriteBack::new(0);
    write_back.add(&view).unwrap();
    assert!(!write_back.worker.has_started());
}

#[test]
fn the_budget_is_shared_and_what_one_leaves_is_for_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let views = ["one", "two", "three"].map(|name| view(&directory, name, 100));
    // The first has nothing dirty, the second little, the third much.
    (0..5).for_each(|page| views[1].set(page * PAGE, 1u8).unwrap());
    (0..100).for_each(|page| views[2].set(page * PAGE, 1u8).unwrap());
    assert_eq!(write_some(&views, 60 * PAGE), 60 * PAGE);
    let left = views.each_ref().map(|view| view.dirty_bytes().unwrap() / PAGE);
    assert_eq!(left, [0, 0, 45]);
    assert_eq!(write_some(&views, 60 * PAGE), 45 * PAGE);
    assert_eq!(write_some(&views, 60 * PAGE), 0);
}

#[test]
fn a_child_neither_adds_views_nor_waits_for_the_thread() {
    let directory = tempfile::tempdir().unwrap();
    let view = view(&directory, "data", 10);
    let write_back = WriteBack::new(1 << 20);
    write_back.add(&view).unwrap();
    // Simulates the thread, which may hold this lock at the fork.
    let shared = write_back.shared.clone();
    let held = shared.views();
    // SAFETY: the child makes a few calls and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no preconditions; the alarm ends a child that hangs.
        unsafe { libc::alarm(20) };
        let refused = matches!(write_back.add(&view), Err(MapError::Forked));
        drop(write_back);
        drop(view);
        // SAFETY: ends the child without running the parent's destructors or exit handlers.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    drop(held);
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "14 is the alarm: the child hung");
    view.set(0, 1u8).unwrap();
    assert!(eventually(|| view.dirty_bytes().unwrap() == 0), "the parent's goes on");
}
