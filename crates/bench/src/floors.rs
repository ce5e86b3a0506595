//! The ratios that Aquifer aims for. A floor is *met* only if the whole 95 % interval of the ratio is on
//! its side, and *missed* only if none of it is.

use serde::{Deserialize, Serialize};

/// The bound of a ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Floor {
    /// At least this.
    Least(f64),
    /// At most this: smaller is better.
    Most(f64),
}
use Floor::{Least, Most};

/// The side of its floor that a ratio is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// All of the interval is.
    Met,
    /// None of the interval is.
    Missed,
    /// A part of it, or there are too few rounds for an interval.
    Unsure,
}

impl Verdict {
    /// The word for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "missed",
            Self::Unsure => "unsure",
        }
    }
}

impl Floor {
    /// The bound itself.
    pub const fn value(self) -> f64 {
        match self {
            Least(value) | Most(value) => value,
        }
    }

    /// Judges a ratio by its interval.
    pub fn judge(self, interval: Option<[f64; 2]>) -> Verdict {
        let Some([low, high]) = interval else { return Verdict::Unsure };
        let reaches = |value: f64| match self {
            Least(floor) => value >= floor,
            Most(bound) => value <= bound,
        };
        match (reaches(low), reaches(high)) {
            (true, true) => Verdict::Met,
            (false, false) => Verdict::Missed,
            _ => Verdict::Unsure,
        }
    }
}

/// The floor of a ratio of a bench, if it has one.
pub fn of(bench: &str, ratio: &str) -> Option<Floor> {
    let is_it = |(at, name, _): &&(&str, &str, Floor)| *at == bench && *name == ratio;
    FLOORS.iter().find(is_it).map(|&(_, _, floor)| floor)
}

/// Returns `true` for the figures of which less is better: times, counts, overheads.
pub fn smaller_is_better(ratio: &str) -> bool {
    ratio.ends_with("_ms")
        || [
            "overhead_",
            "second_process_faults",
            "open_view_",
            "psync_1p_quiet_vs_busy_pool",
            "bytes_downloaded_",
        ]
        .iter()
        .any(|name| ratio.starts_with(name))
}

/// Bench, ratio, floor.
const FLOORS: &[(&str, &str, Floor)] = &[
    ("hit", "mapping_vs_file_mmap", Least(0.97)),
    ("hit", "mapping_vs_anonymous", Least(0.97)),
    ("hit", "pages_vs_user_cache", Least(3.0)),
    ("out-of-core", "mapping_vs_mmap_read_1t", Least(0.97)),
    ("out-of-core", "mapping_vs_mmap_read_2t", Least(1.0)),
    ("out-of-core", "mapping_batched_vs_serial_mmap_read", Least(2.5)),
    ("out-of-core", "mapping_batched_vs_willneed", Least(1.0)),
    ("out-of-core", "pages_batched_vs_willneed", Least(1.0)),
    ("out-of-core", "mapping_vs_mmap_write_1t", Least(1.0)),
    ("out-of-core", "pages_vs_user_cache_read_1t", Least(1.05)),
    ("out-of-core", "p999_mapping_vs_mmap_read_1t", Least(0.9)),
    ("out-of-core", "p999_mapping_vs_mmap_read_2t", Least(1.0)),
    ("out-of-core-zram", "mapping_vs_mmap_read_1t", Least(1.1)),
    ("out-of-core-zram", "mapping_vs_mmap_read_2t", Least(1.0)),
    ("out-of-core-zram", "mapping_touch_vs_mmap_read_1t", Least(1.0)),
    ("out-of-core-zram", "mapping_touch_vs_mmap_read_2t", Least(1.1)),
    ("out-of-core-zram", "pages_batched_vs_willneed", Least(1.5)),
    ("out-of-core-zram", "pages_vs_mmap_read_1t", Least(1.8)),
    ("out-of-core-zram", "pages_vs_mmap_read_2t", Least(1.8)),
    ("out-of-core-zram", "mapping_vs_mmap_write_1t", Least(1.5)),
    ("out-of-core-zram", "p999_mapping_vs_mmap_read_2t", Least(1.2)),
    ("bfs", "mapping_vs_mmap", Least(1.0)),
    ("bfs", "mapping_vs_plain_mmap", Least(1.5)),
    ("bfs", "visit_vs_sorted_willneed", Least(1.3)),
    ("rows", "rows_vs_willneed_3k_uniform", Least(1.2)),
    ("rows", "rows_vs_willneed_256b_zipf", Least(1.4)),
    ("cyclic", "bytes_read_kernel_vs_ours", Least(2.5)),
    ("cyclic", "time_vs_mmap", Least(1.3)),
    ("cyclic", "random_vs_mmap", Least(0.97)),
    ("cyclic", "zipf_vs_mmap", Least(0.97)),
    ("cyclic", "once_vs_mmap", Least(0.97)),
    ("psync", "psync_vs_lmdb_1p", Least(1.6)),
    ("psync", "psync_vs_lmdb_10p", Least(3.0)),
    ("psync", "psync_vs_lmdb_100p", Least(4.0)),
    ("psync", "psync_vs_sqlite_1p", Least(1.1)),
    ("psync", "psync_vs_sqlite_10p", Least(1.7)),
    ("psync", "psync_vs_sqlite_100p", Least(3.0)),
    ("psync", "psync_ranges_vs_sqlite_1p", Least(1.1)),
    ("psync", "psync_vs_redb_1p", Least(1.5)),
    ("psync", "psync_vs_libpmemobj_1p", Least(1.5)),
    ("psync", "psync_vs_libpmemobj_10p", Least(1.5)),
    ("psync", "psync_vs_log_alone_1p", Least(0.7)),
    ("psync", "psync_ranges_vs_log_alone_1p", Least(0.8)),
    ("psync", "psync_1p_quiet_vs_busy_pool", Most(4.0)),
    ("psync", "group_commit_2t_vs_1t", Least(1.1)),
    ("psync", "group_commit_4t_vs_1t", Least(1.5)),
    ("psync", "psync_dax_vs_libpmemobj_10k_stores", Least(3.0)),
    ("compute", "overhead_geomean_4hz", Most(1.25)),
    ("mapping-cache", "mapping_cache_vs_mmap_32k", Least(2.5)),
    ("mapping-cache", "mapping_cache_vs_mmap_1m", Least(2.0)),
    ("mapping-cache", "mapping_cache_vs_read_32k", Least(1.0)),
    ("mapping-cache", "mapping_cache_vs_read_1m", Least(1.5)),
    ("map-ahead", "map_ahead_vs_populate_tmpfs", Least(1.2)),
    ("map-ahead", "map_ahead_vs_default_tmpfs", Least(1.05)),
    ("map-ahead", "map_ahead_vs_default_ext4", Least(0.98)),
    ("map-ahead", "map_ahead_vs_default_2readers", Least(0.98)),
    ("map-ahead", "map_ahead_vs_default_cold", Least(1.0)),
    ("map-ahead", "random_vs_default", Least(0.98)),
    ("map-ahead", "prefetch_vs_serial_faults", Least(2.5)),
    ("map-ahead", "prefetch_vs_willneed", Least(0.95)),
    ("unmap", "async_unmap_vs_sync_1t", Least(1.15)),
    ("unmap", "async_unmap_vs_sync_2t", Least(2.5)),
    ("flush", "flush_exact_vs_msync_01", Least(2.0)),
    ("flush", "flush_exact_vs_msync_10", Least(1.0)),
    ("search", "search_vs_best_other", Least(0.97)),
    ("search", "pool_views_vs_read_loop", Least(1.3)),
    ("view", "view_vs_read_4k", Least(8.0)),
    ("view", "view_vs_read_32k", Least(2.5)),
    ("view", "view_vs_read_256k", Least(2.5)),
    ("view", "view_vs_mmap_4k", Least(12.0)),
    ("view", "view_vs_mmap_32k", Least(2.5)),
    ("view", "view_vs_mmap_256k", Least(2.0)),
    ("read-once", "first_pass_vs_best_other_32k", Least(1.5)),
    ("read-once", "view_vs_read_32k", Least(1.6)),
    ("read-once", "view_vs_read_256k", Least(1.2)),
    ("read-once", "pool_read_vs_read_4k", Least(1.1)),
    ("shared", "read_4k_vs_tmpfs_1p", Least(2.0)),
    ("shared", "read_4k_vs_tmpfs_4p", Least(2.0)),
    ("shared", "write_4k_vs_tmpfs_1p", Least(2.0)),
    ("shared", "write_4k_vs_tmpfs_4p", Least(2.0)),
    ("shared", "write_4k_vs_disk_1p", Least(1.0)),
    ("shared", "write_4k_vs_disk_2p", Least(1.0)),
    ("shared", "write_4k_vs_disk_4p", Least(1.0)),
    ("shared", "second_process_faults_2g", Most(16.0)),
    ("repetitive", "write_1k_vs_disk", Least(1.3)),
    ("append", "pool_append_vs_write_append_4k", Least(0.8)),
    ("append", "pool_append_vs_write_append_64k", Least(0.8)),
    ("append", "pool_append_vs_write_append_1m", Least(0.7)),
    ("append", "view_append_vs_mmap_append_4k", Least(1.0)),
    ("pswap", "pswap_vs_copy", Least(100.0)),
    ("metadata", "create_stat_unlink_vs_tmpfs_1p", Least(2.0)),
    ("metadata", "create_stat_unlink_vs_tmpfs_4p", Least(1.0)),
    ("metadata", "create_stat_unlink_vs_disk_4p", Least(3.0)),
    ("open", "open_joined_ms", Most(0.5)),
    ("open", "open_alone_clean_ms", Most(10.0)),
    ("open", "open_alone_clean_rw_ms", Most(10.0)),
    ("open", "command_cat_alone_ms", Most(8.0)),
    ("open", "command_cat_joined_ms", Most(4.0)),
    ("mount", "stat_vs_ext4", Least(0.8)),
    ("mount", "pread_4k_vs_ext4", Least(0.8)),
    ("mount", "pwrite_4k_vs_ext4", Least(0.8)),
    ("mount", "open_read_close_vs_ext4", Least(0.6)),
    ("mount", "git_status_vs_ext4", Least(0.8)),
    ("mount", "create_unlink_vs_passthrough_fuse", Least(1.2)),
    ("mount", "fsync_4k_vs_ext4", Least(1.0)),
    ("mount", "rg_vs_ext4", Least(0.8)),
    ("mount", "cp_r_vs_ext4", Least(0.8)),
    ("remote", "random_batches_vs_best_other", Least(1.2)),
    ("remote", "second_epoch_vs_best_other", Least(1.0)),
    ("remote", "random_batches_warm_tier_vs_best_other", Least(1.5)),
    ("remote", "bytes_downloaded_4p_vs_1p", Most(1.05)),
    ("remote", "sequential_vs_line_rate", Least(0.85)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_is_met_only_if_the_interval_is_above_it() {
        let judge = |low, high| Least(1.0).judge(Some([low, high]));
        assert_eq!(judge(1.01, 1.2), Verdict::Met);
        assert_eq!(judge(0.9, 1.2), Verdict::Unsure);
        assert_eq!(judge(0.8, 0.99), Verdict::Missed);
        assert_eq!(Least(1.0).judge(None), Verdict::Unsure);
        assert_eq!(Most(1.0).judge(Some([0.8, 0.9])), Verdict::Met);
        assert_eq!(Most(1.0).judge(Some([1.1, 1.2])), Verdict::Missed);
    }

    #[test]
    fn bounds_from_above_are_of_figures_of_which_less_is_better() {
        for (bench, name, floor) in FLOORS {
            let from_above = matches!(floor, Most(_));
            assert_eq!(smaller_is_better(name), from_above, "{bench}: {name}");
            let same = FLOORS.iter().filter(|other| (other.0, other.1) == (*bench, *name));
            assert_eq!(same.count(), 1, "{bench}: {name} is listed twice");
        }
    }
}
