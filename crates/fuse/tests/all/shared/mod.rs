//! Pools that are mounted and changed by other processes at the same time.
//!
//! Each test runs in a process of its own, in a private mount namespace, and is skipped, with a line
//! that says why, where there is no `/dev/fuse` or no right to mount. That process uses the pool by
//! the library; others serve the mounts, which end with it.

mod coherence;
mod locks;
mod mappings;
mod owners;

use std::path::Path;

use aquifer_fs::Files;
use aquifer_fuse::{Cache, Keeper, MountError, MountOptions, Mounting};
use aquifer_testkit::child;

use crate::kept::place::{self, How, Place};

pub const ROLES: &[child::Role] = &[
    ("files", coherence::each_side_sees_at_once_what_the_other_did),
    ("names", coherence::names_change_on_both_sides),
    ("again", coherence::a_number_that_is_used_again_is_another_inode),
    ("moved", coherence::a_directory_that_others_have_moved_is_renamed),
    ("open", coherence::an_open_file_stays_when_others_remove_it),
    ("appends", coherence::appends_of_both_sides_are_all_there),
    ("append", coherence::append_lines),
    ("two", coherence::two_mounts_of_one_pool),
    ("alone", coherence::a_mount_that_is_alone_is_not_shared),
    ("owners", owners::an_earlier_owner_changes_nothing_through_another_mount),
    ("privileges", owners::a_write_by_root_takes_capabilities),
    ("mapped", mappings::a_mapping_shows_what_others_write),
    ("notifier", mappings::a_mapping_is_refreshed_by_another_process_if_one_dies),
    ("locks", locks::locks_exclude_both_sides),
    ("mounts", locks::locks_of_two_mounts_exclude_each_other),
    ("kinds", locks::locks_are_those_of_processes_or_descriptions),
    ("inherit", locks::inherit_locks),
    ("hold", locks::lock_and_exec),
    ("held", locks::keep_lock),
    ("signals", locks::a_signal_ends_a_wait_unless_it_begins_anew),
    ("unread", locks::a_server_that_does_not_read_holds_up_no_keeper),
    ("waits", locks::a_lock_is_waited_for_until_it_is_free_or_the_wait_is_ended),
    ("wait", locks::wait_for_lock),
    ("outlive", locks::locks_outlive_their_server),
    ("limit", locks::more_owners_than_descriptors_get_an_error),
    ("counts", locks::one_at_a_time_has_a_lock),
    ("deadlock", locks::a_deadlock_is_not_noticed),
    ("lock-other", locks::lock_second_then_first),
    ("count", locks::count_with_lock),
];

/// A new pool, mounted shared, and open in this process too.
fn both() -> Option<(Place, Files)> {
    let place = Place::mount(&How { cache: Cache::Shared, ..How::default() })?;
    let files = Files::open(place.at("pool")).expect("others may write");
    Some((place, files))
}

/// Mounts the pool of a place at another directory as well.
fn mount_again(place: &Place, at: &Path, how: &How) -> Result<Keeper, MountError> {
    let options = MountOptions::new().cache(how.cache).allow_other(true);
    Mounting::new(place.at("pool"), at).options(options).program(place::program(how, at)).start()
}

/// Unmounts it, and leaves nothing.
fn end(place: Place) {
    let pool = place.unmount();
    std::fs::remove_dir_all(pool.parent().expect("its directory")).expect("its owner");
}

aquifer_testkit::roles! {
    child::succeeds_with_mounts:
    each_side_sees_at_once_what_the_other_did: "files",
    names_change_on_both_sides: "names",
    a_number_that_is_used_again_is_another_inode: "again",
    a_directory_that_others_have_moved_is_renamed: "moved",
    an_open_file_stays_when_others_remove_it: "open",
    appends_of_both_sides_are_all_there: "appends",
    two_mounts_of_one_pool: "two",
    a_mount_that_is_alone_is_not_shared: "alone",
    an_earlier_owner_changes_nothing_through_another_mount: "owners",
    a_write_by_root_takes_capabilities: "privileges",
    a_mapping_shows_what_others_write: "mapped",
    a_mapping_is_refreshed_by_another_process_if_one_dies: "notifier",
    locks_exclude_both_sides: "locks",
    locks_of_two_mounts_exclude_each_other: "mounts",
    locks_are_those_of_processes_or_descriptions: "kinds",
    a_signal_ends_a_wait_unless_it_begins_anew: "signals",
    a_server_that_does_not_read_holds_up_no_keeper: "unread",
    a_lock_is_waited_for_until_it_is_free_or_the_wait_is_ended: "waits",
    locks_outlive_their_server: "outlive",
    more_owners_than_descriptors_get_an_error: "limit",
    a_deadlock_is_not_noticed: "deadlock",
    one_at_a_time_has_a_lock: "counts",
}
