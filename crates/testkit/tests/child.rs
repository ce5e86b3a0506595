//! Children that play roles, and how they end.

use aquifer_testkit::{child, watchdog};

#[test]
fn child() {
    child::play(&[
        ("succeeds", || {}),
        ("panics", || panic!("on purpose")),
        ("hangs", || {
            println!("before");
            watchdog::end("a role")
        }),
        ("aborts", || {
            println!("before");
            std::process::abort()
        }),
    ]);
}

/// Returns what a parent says of its child, if it complains.
fn complaint(parent: impl FnOnce() + std::panic::UnwindSafe) -> Option<String> {
    std::panic::catch_unwind(parent).err().map(|said| *said.downcast().expect("a formatted text"))
}

#[test]
fn a_role_that_does_not_complete_is_noticed() {
    assert_eq!(complaint(|| child::succeeds("succeeds")), None);
    assert!(complaint(|| child::succeeds("panics")).unwrap().contains("on purpose"));
    assert!(complaint(|| child::succeeds("unknown")).unwrap().contains("a role of this program"));
}

/// An abort by the watchdog is not the death that a test expects, whatever signal it shows as.
#[test]
fn a_role_that_hangs_does_not_die_as_expected() {
    const ABORT: i32 = rustix::process::Signal::ABORT.as_raw();
    assert_eq!(complaint(|| child::dies("aborts", ABORT, "before")), None);
    assert!(complaint(|| child::dies("hangs", ABORT, "before")).unwrap().contains("a role hangs"));
}

#[test]
fn two_roles_of_one_name_are_refused() {
    let said = complaint(|| child::play(&[("one", || {}), ("one", || {})]));
    assert!(said.unwrap().contains("two roles"));
}
