//! Pools that the kernel has mounted: what programs see is what they see on tmpfs.
//!
//! Each test runs in a process of its own, in a private mount namespace, and is skipped, with a line
//! that says why, where there is no `/dev/fuse` or no right to mount. That process serves the mount,
//! so its end ends the connection: nothing can be left waiting, whatever fails.

mod differences;
mod observed;
mod place;
mod power;
mod scripts;
mod waiting;

use aquifer_fuse::{Cache, Mount, MountError, MountOptions};
use aquifer_testkit::child;

use place::Place;

pub const ROLES: &[child::Role] = &[
    ("write-back", || same_as_tmpfs(Cache::WriteBack)),
    ("write-through", || same_as_tmpfs(Cache::WriteThrough)),
    ("shared", || same_as_tmpfs(Cache::Shared)),
    ("differences", differences::there_are_no_file_handles_and_no_flags),
    ("remounted", what_was_written_is_there_when_it_is_mounted_again),
    ("full", scripts::full::a_full_pool_is_an_error_that_ends),
    ("appends-to-mounted", scripts::bytes::appends_of_many_processes_are_all_there),
    ("append-to-mounted", scripts::bytes::append_lines),
    ("unmounted", scripts::ends::an_unmounted_file_system_ends_its_server),
    ("used", scripts::ends::a_mount_that_is_used_is_gone_nevertheless),
    ("forgotten", scripts::ends::files_that_are_forgotten_are_freed),
    ("created", scripts::ends::new_files_are_closed_without_a_request),
    ("set-id", scripts::metadata::a_program_that_others_change_runs_as_its_owner_no_more),
    ("blocks", scripts::ends::room_that_is_given_back_is_not_shown),
    ("times", scripts::ends::times_are_the_same_after_a_remount),
    ("pieces", scripts::full::what_finds_only_some_room_is_not_synced),
    ("held-back", scripts::full::what_finds_only_some_room_shows_what_the_pool_holds),
    ("longest", scripts::full::a_write_behind_the_longest_file_is_an_error),
    ("told", scripts::full::each_open_file_hears_of_a_full_pool_once),
    ("power", power::what_was_synced_is_there_after_a_power_cut),
    ("media", power::failed_media_are_an_error_of_fsync),
    ("waiting", waiting::requests_are_answered_while_others_wait_for_the_media),
];

/// Runs all scripts on tmpfs and on a mounted pool, and compares what they observe.
fn same_as_tmpfs(cache: Cache) {
    let Some(place) = Place::mount(64 << 20, cache) else { return };
    let mut differences = Vec::new();
    for (name, script) in scripts::ALL {
        let expected = observed::by(*script, &place.on_tmpfs(name));
        let seen = observed::by(*script, &place.in_pool(name));
        let differs = seen.iter().zip(&expected).filter(|(seen, expected)| seen != expected);
        differences.extend(differs.map(|lines| format!("{name}: {lines:?}")));
        if seen.len() != expected.len() {
            differences.push(format!("{name}: {} lines, {}", seen.len(), expected.len()));
        }
    }
    assert!(differences.is_empty(), "{differences:#?}");
    place.unmount().assert_sound();
}

fn what_was_written_is_there_when_it_is_mounted_again() {
    let Some(place) = Place::mount(64 << 20, Cache::WriteBack) else { return };
    let before: Vec<_> = scripts::ALL
        .iter()
        .map(|(name, script)| {
            observed::by(*script, &place.in_pool(name));
            observed::tree(&place.in_pool(name))
        })
        .collect();
    let unmounted = place.unmount();
    unmounted.assert_sound();
    let unmounted = unmounted.mount(Cache::Shared).unmount();
    let place = unmounted.mount(Cache::WriteThrough);
    for ((name, _), before) in scripts::ALL.iter().zip(before) {
        assert_eq!(observed::tree(&place.in_pool(name)), before, "{name}");
    }
}

#[test]
fn a_pool_that_others_may_change_is_not_mounted() {
    let directory = tempfile::tempdir().unwrap();
    let pool = aquifer_pool::Pool::create(directory.path().join("pool"), 16 << 20).unwrap();
    let files = aquifer_fs::Files::new(pool);
    let mounted = Mount::in_process(files, directory.path(), &MountOptions::new());
    assert!(matches!(mounted, Err(MountError::NotSole)));
}

aquifer_testkit::roles! {
    child::succeeds_with_mounts:
    programs_see_what_they_see_on_tmpfs_with_write_back: "write-back",
    programs_see_what_they_see_on_tmpfs_with_write_through: "write-through",
    programs_see_what_they_see_on_tmpfs_shared: "shared",
    what_was_written_is_there_after_a_remount: "remounted",
    a_full_pool_is_an_error_that_ends: "full",
    appends_of_many_processes_are_all_there: "appends-to-mounted",
    an_unmounted_file_system_ends_its_server: "unmounted",
    a_mount_that_is_used_is_gone_nevertheless: "used",
    files_that_are_forgotten_are_freed: "forgotten",
    there_are_no_file_handles_and_no_flags: "differences",
    new_files_are_closed_without_a_request: "created",
    a_program_that_others_change_runs_as_its_owner_no_more: "set-id",
    room_that_is_given_back_is_not_shown: "blocks",
    times_are_the_same_after_a_remount: "times",
    what_finds_only_some_room_is_not_synced: "pieces",
    what_finds_only_some_room_shows_what_the_pool_holds: "held-back",
    a_write_behind_the_longest_file_is_an_error: "longest",
    each_open_file_hears_of_a_full_pool_once: "told",
    what_was_synced_is_there_after_a_power_cut: "power",
    failed_media_are_an_error_of_fsync: "media",
    requests_are_answered_while_others_wait_for_the_media: "waiting",
}
