//! Mounts whose server is killed: programs notice nothing.
//!
//! Each test runs in a process of its own, in a private mount namespace, and is skipped, with a line
//! that says why, where there is no `/dev/fuse` or no right to mount. When that process ends, in any
//! way, the mount ends, and the processes that serve it.

mod beginning;
pub mod place;
mod scripts;
mod unmounting;

use aquifer_testkit::child;

pub const ROLES: &[child::Role] = &[
    ("rest", scripts::a_server_that_is_killed_is_replaced),
    ("load", scripts::programs_do_not_notice_that_servers_are_killed),
    ("without-resend", scripts::without_resend_the_mount_goes_on),
    ("published", scripts::what_was_published_is_not_done_again),
    ("poison", scripts::a_request_that_ends_servers_gets_an_error),
    ("futile", scripts::servers_that_answer_nothing_end_the_mount),
    ("pause", scripts::a_reason_that_passes_does_not_end_the_mount),
    ("hidden", scripts::servers_need_no_paths),
    ("keeper", scripts::without_a_keeper_the_mount_ends),
    ("both", scripts::without_keeper_and_server_the_mount_ends_with_the_next_one),
    ("helped", scripts::what_fusermount_has_mounted_is_gone_after_an_error),
    ("busy", scripts::a_pool_that_is_mounted_is_not_mounted_again),
    ("abandoned", scripts::the_mount_ends_with_its_lifeline),
    ("renamed", scripts::unmounting_waits_for_a_pool_whose_path_is_gone),
    ("exchanged", beginning::a_mount_is_shown_at_the_directory_that_was_named),
    ("flooded", unmounting::connections_of_other_users_end_no_wait),
    ("unnamed", scripts::many_files_without_names_survive_a_server),
];

aquifer_testkit::roles! {
    child::succeeds_with_mounts:
    a_server_that_is_killed_is_replaced: "rest",
    programs_do_not_notice_that_servers_are_killed: "load",
    without_resend_the_mount_goes_on: "without-resend",
    what_was_published_is_not_done_again: "published",
    a_request_that_ends_servers_gets_an_error: "poison",
    servers_that_answer_nothing_end_the_mount: "futile",
    a_reason_that_passes_does_not_end_the_mount: "pause",
    servers_need_no_paths: "hidden",
    without_a_keeper_the_mount_ends: "keeper",
    without_keeper_and_server_the_mount_ends_with_the_next_one: "both",
    what_fusermount_has_mounted_is_gone_after_an_error: "helped",
    a_pool_that_is_mounted_is_not_mounted_again: "busy",
    the_mount_ends_with_its_lifeline: "abandoned",
    unmounting_waits_for_a_pool_whose_path_is_gone: "renamed",
    a_mount_is_shown_at_the_directory_that_was_named: "exchanged",
    connections_of_other_users_end_no_wait: "flooded",
    many_files_without_names_survive_a_server: "unnamed",
}
