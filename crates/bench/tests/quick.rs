//! Every bench in its quick form: that it runs, that its answers are right, and that it prints the
//! promised rows and ratios. Figures are not checked.

use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_aquifer-bench"))
        .arg("bench")
        .args(arguments)
        .output()
        .expect("the program was built for this test")
}

/// Runs a bench with `--quick --json` in this crate's directory (which is on a disk) and parses its
/// report.
fn report(arguments: &[&str]) -> Value {
    let common = ["--quick", "--json"];
    let place = ["--dir", env!("CARGO_TARGET_TMPDIR")];
    let arguments = [arguments, &common, &place].concat();
    let output = bench(&arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn systems_of(report: &Value, metric: &str) -> Vec<String> {
    let rows = report["rows"].as_array().unwrap();
    let mut names = Vec::new();
    for row in rows.iter().filter(|row| row["metric"] == metric) {
        assert!(row["median"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["rounds"], row["values"].as_array().unwrap().len(), "{row}");
        names.push(row["system"].as_str().unwrap().to_owned());
    }
    names
}

fn assert_contains(names: &[String], expected: &[&str], report: &Value) {
    for name in expected {
        // A contender that cannot run here is in the notes instead.
        let left_out = format!("of {name} is left out");
        let mut notes = report["notes"].as_array().unwrap().iter();
        let noted = notes.any(|note| note.as_str().is_some_and(|note| note.contains(&left_out)));
        assert!(noted || names.iter().any(|found| found == name), "{name} is not in {names:?}");
    }
}

#[test]
fn hit() {
    let report = report(&["hit", "--rounds", "2"]);
    assert_eq!(report["bench"], "hit");
    assert!(report["machine"]["cores"].as_u64().unwrap() > 0);
    let names = systems_of(&report, "load");
    assert_contains(&names, &["anonymous", "mmap", "mmap_random", "user_cache"], &report);
    assert_contains(&names, &["mapping", "mapping_kernel", "mapping_user", "pages"], &report);
    for ratio in ["mapping_vs_file_mmap", "mapping_vs_anonymous", "pages_vs_user_cache"] {
        assert!(report["ratios"][ratio].as_f64().is_some_and(|value| value > 0.0), "{ratio}");
    }
}

#[test]
fn out_of_core() {
    let report = report(&["out-of-core", "--threads", "1,2", "--size", "64M"]);
    for metric in ["read_1t", "read_2t"] {
        let names = systems_of(&report, metric);
        assert_contains(&names, &["mmap", "mmap_random", "pread_direct", "user_cache"], &report);
        assert_contains(&names, &["mapping", "mapping_kernel", "mapping_user"], &report);
        assert_contains(&names, &["mapping_touch", "pages"], &report);
    }
    let names = systems_of(&report, "write_2t");
    assert_contains(&names, &["mmap", "mmap_random", "pread_direct"], &report);
    assert_contains(&names, &["mapping", "mapping_touch", "pages"], &report);
    let names = systems_of(&report, "read_batch64");
    assert_contains(&names, &["mmap_willneed", "mapping_batched", "pages_batched"], &report);
    assert_contains(&names, &["mapping_visited", "pages_visited"], &report);
    if report["config"]["memory_limit"] == "none" {
        assert_eq!(report["ratios"], serde_json::json!({}), "ratios without a memory limit");
        return eprintln!("skipped: ratios, memory cannot be limited here");
    }
    for ratio in [
        "mapping_vs_mmap_read_1t",
        "mapping_touch_vs_mmap_read_2t",
        "p999_mapping_vs_mmap_read_2t",
        "pages_vs_mmap_read_2t",
        "mapping_vs_mmap_write_1t",
        "mapping_batched_vs_serial_mmap_read",
        "mapping_batched_vs_willneed",
        "pages_batched_vs_willneed",
        "mapping_visited_vs_willneed",
        "pages_visited_vs_willneed",
    ] {
        assert!(report["ratios"][ratio].as_f64().is_some_and(|value| value > 0.0), "{ratio}");
    }
}

#[test]
fn fault() {
    let report = report(&["fault"]);
    let metrics: Vec<_> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["metric"].as_str().unwrap().to_owned())
        .collect();
    for part in ["trap", "lookup", "io", "install"] {
        assert!(metrics.iter().any(|metric| metric == part), "{part} is not in {metrics:?}");
    }
}

#[test]
fn bfs() {
    let report = report(&["bfs", "--size", "64M"]);
    let names = systems_of(&report, "search");
    let all = ["mmap", "mmap_random", "mmap_willneed", "mmap_sorted_willneed", "mapping"];
    assert_contains(&names, &all, &report);
    assert_contains(&names, &["mmap_sorted_willneed_16k"], &report);
    assert_contains(&names, &["mapping_visited", "mapping_user_visited"], &report);
    for row in report["rows"].as_array().unwrap() {
        assert!(row["details"]["reached"].as_f64().unwrap() > 1.0, "{row}");
    }
}

#[test]
fn rows() {
    let report = report(&["rows", "--size", "64M"]);
    for metric in ["3k_uniform", "256b_zipf"] {
        let names = systems_of(&report, metric);
        assert_contains(&names, &["mmap_random", "mmap_willneed", "rows"], &report);
    }
    if report["config"]["memory_limit"] == "none" {
        return eprintln!("skipped: ratios, memory cannot be limited here");
    }
    assert_ratios(&report, &["rows_vs_mmap_random_3k_uniform", "rows_vs_mmap_random_256b_zipf"]);
}

#[test]
fn cyclic() {
    let report = report(&["cyclic"]);
    for metric in ["cycle", "once", "random", "zipf"] {
        let names = systems_of(&report, metric);
        assert_contains(&names, &["mmap", "mapping", "mapping_kernel", "mapping_user"], &report);
    }
    if report["config"]["memory_limit"] == "none" {
        return eprintln!("skipped: ratios, memory cannot be limited here");
    }
    let ratios = ["time_vs_mmap", "once_vs_mmap", "random_vs_mmap", "zipf_vs_mmap"];
    assert_ratios(&report, &ratios);
    assert_ratios(&report, &["bytes_read_kernel_vs_ours"]);
}

fn assert_ratios(report: &Value, names: &[&str]) {
    for name in names {
        let value = report["ratios"][name].as_f64();
        assert!(value.is_some_and(|value| value > 0.0), "{name} is not in {}", report["ratios"]);
    }
}

#[test]
fn psync() {
    let report = report(&["psync", "--threads", "1,2"]);
    for metric in ["commit_1p", "commit_10p", "commit_100p"] {
        let names = systems_of(&report, metric);
        assert_contains(&names, &["object", "lmdb", "sqlite", "redb"], &report);
        assert_contains(&names, &["libpmemobj", "msync"], &report);
    }
    for metric in ["commit_1p_busy", "commit_together_1t", "commit_together_2t"] {
        assert_contains(&systems_of(&report, metric), &["object", "msync"], &report);
    }
    for pages in ["1p", "10p", "100p"] {
        let names = ["lmdb", "sqlite", "redb", "msync", "log_alone"];
        let names = names.map(|name| format!("psync_vs_{name}_{pages}"));
        assert_ratios(&report, &names.each_ref().map(String::as_str));
    }
    assert_ratios(&report, &["psync_1p_quiet_vs_busy_pool", "group_commit_2t_vs_1t"]);
    let notes = report["notes"].to_string();
    assert!(notes.contains("msync is not atomic"), "{notes}");
    let has_libpmemobj = !notes.contains("commit_1p of libpmemobj is left out");
    if has_libpmemobj {
        assert_ratios(&report, &["psync_vs_libpmemobj_1p", "psync_vs_libpmemobj_10p"]);
    } else {
        assert!(notes.contains("libpmemobj1"), "the package is not named: {notes}");
        eprintln!("skipped: libpmemobj is not installed");
    }
    if notes.contains("the Dax domain is left out") {
        return eprintln!("skipped: the Dax domain, there is no tmpfs with room");
    }
    for metric in ["dax_1p", "dax_10k_stores"] {
        let names = systems_of(&report, metric);
        assert_contains(&names, &["object", "libpmemobj", "libpmemobj_records"], &report);
    }
    if has_libpmemobj {
        assert_ratios(&report, &["psync_dax_vs_libpmemobj_10k_stores"]);
    }
}

#[test]
fn compute() {
    let report = report(&["compute", "--threads", "2"]);
    for kernel in ["lu", "convolution", "multiplication"] {
        assert_contains(&systems_of(&report, kernel), &["memory"], &report);
        let durable = systems_of(&report, &format!("{kernel}_100hz"));
        assert_contains(&durable, &["object", "msync"], &report);
    }
    for row in report["rows"].as_array().unwrap() {
        if row["system"] != "memory" {
            assert!(row["details"]["syncs"].as_f64().unwrap() >= 1.0, "{row}");
            assert!(row["details"]["pages_a_sync"].as_f64().is_some(), "{row}");
        }
    }
    assert_ratios(&report, &["overhead_geomean_100hz", "overhead_vs_memory_geomean_100hz"]);
}

#[test]
fn recover() {
    let report = report(&["recover"]);
    for metric in ["attach_log_256k", "attach_log_512k", "attach_size_1m", "attach_size_2m"] {
        let names = systems_of(&report, metric);
        assert_contains(&names, &["object", "lmdb", "sqlite", "redb", "libpmemobj"], &report);
    }
}

/// The names of a metric, or ratio, on each of the report's file systems.
fn everywhere(report: &Value, name: &str) -> Vec<String> {
    let file_systems = report["config"]["file_systems"].as_array().unwrap();
    let suffixes = file_systems.iter().map(|file_system| file_system.as_str().unwrap());
    suffixes.map(|suffix| format!("{name}_{suffix}")).collect()
}

#[test]
fn mapping_cache() {
    let report = report(&["mapping-cache", "--files", "5", "--sizes", "32K,1M"]);
    assert_eq!(report["config"]["files"], serde_json::json!([5, 5]));
    for size in ["32k", "1m"] {
        for metric in everywhere(&report, &format!("sum_{size}")) {
            let names = systems_of(&report, &metric);
            assert_contains(&names, &["mmap", "mmap_populate", "read", "mapper"], &report);
        }
        for name in ["mmap", "read"].map(|name| format!("mapping_cache_vs_{name}_{size}")) {
            assert_ratios(&report, &[&name]);
            let each = everywhere(&report, &name);
            assert_ratios(&report, &each.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }
    for row in report["rows"].as_array().unwrap().iter().filter(|row| row["system"] == "mapper") {
        // All 5 files are mapped once, during the warm-up.
        assert_eq!(row["details"]["cache_misses"], 5.0, "{row}");
    }
}

#[test]
fn map_ahead() {
    let report = report(&["map-ahead", "--size", "8M"]);
    for metric in ["stream", "stream_2readers"] {
        for metric in everywhere(&report, metric) {
            let names = systems_of(&report, &metric);
            assert_contains(&names, &["mmap", "mmap_populate", "mapper"], &report);
        }
    }
    for metric in everywhere(&report, "random") {
        let names = systems_of(&report, &metric);
        assert_contains(&names, &["mmap", "mmap_random", "mapper"], &report);
    }
    assert_ratios(&report, &["random_vs_default"]);
    let Some(disk) = on_disk(&report) else { return };
    for metric in ["stream_cold_1stream", "stream_cold_4streams"] {
        let names = systems_of(&report, &format!("{metric}_{disk}"));
        assert_contains(&names, &["mmap", "mmap_populate", "mmap_sequential"], &report);
        assert_contains(&names, &["mmap_willneed", "mapper"], &report);
    }
    for name in ["default", "populate", "default_2readers", "default_cold"] {
        assert_ratios(&report, &[&format!("map_ahead_vs_{name}")]);
    }
    assert_ratios(&report, &["prefetch_vs_serial_faults", "prefetch_vs_willneed"]);
    let names = systems_of(&report, &format!("prefetch_{disk}"));
    let serial = ["mmap", "mmap_random", "mmap_willneed", "mmap_willneed_ahead"];
    assert_contains(&names, &serial, &report);
}

/// The file system of the disk. In containers all file systems may be in memory.
fn on_disk(report: &Value) -> Option<String> {
    let name = report["machine"]["file_system"].as_str().unwrap();
    if name == "tmpfs" {
        eprintln!("skipped: there is no disk here");
        return None;
    }
    Some(name.to_owned())
}

#[test]
fn unmap() {
    let report = report(&["unmap", "--threads", "1,2", "--maps", "300"]);
    for threads in ["1t", "2t"] {
        for metric in everywhere(&report, &format!("map_{threads}")) {
            let names = systems_of(&report, &metric);
            assert_contains(&names, &["mmap", "mmap_populate", "read"], &report);
            assert_contains(&names, &["mapper_sync", "mapper_async"], &report);
        }
        for name in ["async_unmap_vs_sync", "async_unmap_vs_own_sync", "async_unmap_vs_read"] {
            assert_ratios(&report, &[&format!("{name}_{threads}")]);
        }
    }
}

#[test]
fn flush() {
    let report = report(&["flush", "--rounds", "2", "--dirty", "0.1,10"]);
    for metric in ["flush_01", "flush_10", "store_and_flush_01", "store_and_flush_10"] {
        assert_contains(&systems_of(&report, metric), &["msync", "mapper"], &report);
    }
    assert_ratios(&report, &["flush_exact_vs_msync_01", "flush_exact_vs_msync_10"]);
    assert_ratios(&report, &["flush_exact_vs_msync_10_with_stores"]);
    for row in report["rows"].as_array().unwrap() {
        if row["metric"] == "flush_10" && !report["notes"].to_string().contains("no device") {
            let written_bytes = row["details"]["device_written_bytes"].as_f64().unwrap();
            assert!(written_bytes >= 0.1 * 16e6, "{row}");
        }
    }
}

#[test]
fn search() {
    let tree = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let needle = ["--needle", "fn definitions("];
    let arguments = ["search", "--tree", tree, "--files", "300", "--threads", "2"];
    let report = report(&[&arguments[..], &needle].concat());
    assert_eq!(report["config"]["needle"], needle[1]);
    for row in report["rows"].as_array().unwrap() {
        assert!(row["details"]["found"].as_f64().is_none_or(|found| found > 0.0), "{row}");
    }
    let (files, copies) = (&report["config"]["files"], &report["config"]["files_that_are_copies"]);
    assert_eq!(files, 300, "{report}");
    assert!(copies.as_u64().unwrap() > 0, "this crate does not have 300 files: {report}");
    for metric in ["search_first", "search_repeated"] {
        let names = systems_of(&report, metric);
        assert_contains(&names, &["read_loop", "read", "mmap", "mmap_populate"], &report);
        assert_contains(&names, &["mapper", "mapper_read_once", "view"], &report);
    }
    assert_ratios(&report, &["search_vs_best_other", "search_vs_best_other_repeated"]);
    assert_ratios(&report, &["pool_views_vs_read_loop", "pool_views_vs_read_loop_repeated"]);
    let none = bench(&["search", "--quick", "--tree", "/proc/self/fdinfo"]);
    let message = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(!none.status.success() && message.contains("--tree"), "{message}");
}

/// Whether the report includes files in memory, which many ratios need.
fn in_memory(report: &Value) -> bool {
    let file_systems = report["config"]["file_systems"].as_array().unwrap();
    let has_tmpfs = file_systems.iter().any(|file_system| file_system == "tmpfs");
    if !has_tmpfs {
        eprintln!("skipped: ratios over a tmpfs, there is none");
    }
    has_tmpfs
}

#[test]
fn read_once() {
    let report = report(&["read-once", "--sizes", "4K,32K", "--sets", "1M", "--passes", "2"]);
    assert_eq!(report["config"]["files"], serde_json::json!([16, 16]));
    for size in ["4k", "32k"] {
        for metric in ["sum", "first"] {
            for threads in ["1t", "2t"] {
                for metric in everywhere(&report, &format!("{metric}_{size}_1m_{threads}")) {
                    let names = systems_of(&report, &metric);
                    assert_contains(&names, &["read", "mmap", "mmap_populate"], &report);
                    assert_contains(&names, &["pool"], &report);
                }
            }
        }
        assert_ratios(&report, &[&format!("pool_read_vs_read_{size}_1m")]);
    }
    let none = bench(&["read-once", "--quick", "--sets", "4K", "--sizes", "8K"]);
    let message = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(!none.status.success() && message.contains("--sets"), "{message}");
}

#[test]
fn view() {
    let report = report(&["view", "--sizes", "256K"]);
    for metric in everywhere(&report, "aged_256k") {
        let names = systems_of(&report, &metric);
        assert_contains(&names, &["read", "mmap", "mmap_populate", "pool"], &report);
    }
    for metric in everywhere(&report, "open_4k") {
        assert_contains(&systems_of(&report, &metric), &["mmap"], &report);
    }
}

#[test]
fn repetitive() {
    let report = report(&["repetitive"]);
    for action in ["read", "write"] {
        for record in ["1k", "4k"] {
            for order in ["sequential", "random"] {
                for metric in everywhere(&report, &format!("{action}_{record}_{order}")) {
                    let names = systems_of(&report, &metric);
                    let all = ["syscalls", "mmap", "mmap_populate", "pool"];
                    assert_contains(&names, &all, &report);
                }
            }
        }
    }
    if in_memory(&report) {
        assert_ratios(&report, &["read_4k_vs_tmpfs", "write_4k_vs_tmpfs"]);
    }
}

#[test]
fn append() {
    let report = report(&["append", "--pieces", "4K,1M"]);
    for piece in ["4k", "1m"] {
        for kind in ["prezeroed", "sustained"] {
            for metric in everywhere(&report, &format!("{kind}_{piece}")) {
                let names = systems_of(&report, &metric);
                let all = ["syscalls", "mmap", "mmap_populate", "pool"];
                assert_contains(&names, &all, &report);
            }
            assert_ratios(&report, &[&format!("view_append_{kind}_vs_mmap_append_{piece}")]);
        }
    }
}

#[test]
fn shared() {
    let report = report(&["shared", "--processes", "1,3"]);
    for action in ["read", "write"] {
        for files in ["1p_same", "1p_own", "3p_same", "3p_own"] {
            for metric in everywhere(&report, &format!("{action}_4k_{files}")) {
                let names = systems_of(&report, &metric);
                let all = ["syscalls", "mmap", "mmap_populate", "pool"];
                assert_contains(&names, &all, &report);
            }
        }
    }
    if in_memory(&report) {
        assert_ratios(&report, &["read_4k_vs_tmpfs_3p", "write_4k_vs_tmpfs_3p"]);
    }
    match report["ratios"]["second_process_faults_16m"].as_f64() {
        Some(faults) => assert!(faults.fract() == 0.0, "{faults}"),
        None => {
            let notes = report["notes"].to_string();
            assert!(notes.contains("second_process_faults_16m is left out"), "{notes}");
            eprintln!("skipped: huge pages, {notes}");
        }
    }
}

#[test]
fn metadata() {
    let report = report(&["metadata", "--processes", "1,2"]);
    for metric in ["node_lookup_stat", "node_list_stat"] {
        for metric in everywhere(&report, metric) {
            assert_contains(&systems_of(&report, &metric), &["syscalls", "pool"], &report);
        }
    }
    for processes in ["1p", "2p"] {
        for metric in everywhere(&report, &format!("create_stat_unlink_{processes}")) {
            assert_contains(&systems_of(&report, &metric), &["syscalls", "pool"], &report);
        }
        if in_memory(&report) {
            assert_ratios(&report, &[&format!("create_stat_unlink_vs_tmpfs_{processes}")]);
        }
    }
}

#[test]
fn pswap() {
    let report = report(&["pswap"]);
    for metric in everywhere(&report, "replace") {
        let names = systems_of(&report, &metric);
        let all = ["syscalls", "mmap", "mmap_populate", "pool_copy", "pool"];
        assert_contains(&names, &all, &report);
    }
    assert_ratios(&report, &["pswap_vs_copy"]);
    for row in report["rows"].as_array().unwrap().iter().filter(|row| row["system"] == "pool") {
        if let Some(written_bytes) = row["details"]["data_written_bytes"].as_f64() {
            assert_eq!(written_bytes, 0.0, "pages were exchanged and copied: {row}");
        }
    }
}

#[test]
fn open() {
    let report = report(&["open"]);
    for metric in ["open_joined", "open_joined_rw", "open_alone_clean_2k", "open_alone_clean_2k_rw"]
    {
        assert_contains(&systems_of(&report, metric), &["pool", "sqlite"], &report);
    }
    let names = systems_of(&report, "open_alone_clean_2k_cold");
    assert_contains(&names, &["pool", "sqlite"], &report);
    for metric in ["command_cat_alone", "command_cat_joined", "command_mkdir_alone"] {
        let names = systems_of(&report, metric);
        assert_contains(&names, &["coreutils", "sqlite", "pool"], &report);
    }
    assert_ratios(&report, &["open_joined_ms", "open_alone_clean_ms", "open_alone_clean_rw_ms"]);
}

#[cfg(feature = "remote")]
#[test]
fn remote() {
    let quick = ["remote", "--latency-ms", "1"];
    let ours = ["aquifer", "aquifer_rows", "object_store", "object_store_ranges"];
    let found = report(&[&quick[..], &["--only", &ours.join(","), "--only", "line"]].concat());
    let alone = ["random_cold", "random_warm", "epoch", "second_epoch", "columns"];
    for metric in alone.iter().chain(&["random_cold_4p", "epoch_4p"]) {
        assert_contains(&systems_of(&found, metric), &ours, &found);
    }
    for row in found["rows"].as_array().unwrap() {
        let brought = row["details"]["downloaded_bytes"].as_f64();
        let own = row["system"] == "aquifer" && row["metric"] == "epoch";
        // The whole object, and the byte that opening asks for.
        assert!(!own || brought == Some((24 << 20) as f64 + 1.0), "{row}");
    }
    // Programs that may be missing.
    let others = ["s3fs", "s3fs_blockcache", "s3fs_filecache", "rclone"];
    let wanted = ["--metrics", "random_cold,epoch_4p", "--only", &others.join(",")];
    let missing = report(&[&quick[..], &wanted].concat());
    for metric in ["random_cold", "epoch_4p"] {
        assert_contains(&systems_of(&missing, metric), &others, &missing);
    }
    if missing["notes"].to_string().contains("left out") {
        eprintln!("skipped: {}", missing["notes"]);
    }
    let none = bench(&["remote", "--quick", "--metrics", "epoch,speed"]);
    let message = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(!none.status.success() && message.contains("`speed` is no metric"), "{message}");
    if found["notes"].to_string().contains("NOT limited") {
        return eprintln!("skipped: ratios, memory cannot be limited here");
    }
    let best = ["random_batches", "random_batches_4p", "random_batches_warm_tier", "second_epoch"];
    for name in best.iter().chain(&["epoch", "epoch_4p", "columns"]) {
        assert_ratios(&found, &[&format!("{name}_vs_best_other")]);
    }
    assert_ratios(&found, &["sequential_vs_line_rate", "bytes_downloaded_4p_vs_1p"]);
}

#[test]
fn mount() {
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let report = report(&["mount", "--tree", sources]);
    let file_system = report["machine"]["file_system"].as_str().unwrap();
    let operations = [
        "stat",
        "stat_of_300",
        "open_read_close",
        "open_read_close_of_300",
        "pread_4k",
        "pread_1m",
        "pwrite_4k",
        "pwrite_1m",
        "create_unlink",
        "readdir_10000",
        "fsync_4k",
        "fdatasync_4k",
    ];
    let programs = ["git_status", "rg", "cp_r", "untar", "sqlite_wal", "sqlite_rollback"];
    let notes = report["notes"].to_string();
    let is_left_out = |name: &str| notes.contains(&format!("{name} is left out"));
    for metric in operations.iter().chain(&programs) {
        let names = systems_of(&report, metric);
        for name in
            ["disk", "tmpfs", "pass_through", "mount", "mount_write_through", "mount_shared"]
        {
            if !is_left_out(name) {
                assert_contains(&names, &[name], &report);
            }
        }
    }
    for name in ["pass_through", "mount", "mount_write_through", "mount_shared"] {
        if is_left_out(name) {
            return eprintln!("skipped: nothing can be mounted here, {notes}");
        }
    }
    for metric in operations {
        for end in ["", "_write_through", "_shared"] {
            assert_ratios(&report, &[&format!("{metric}_vs_{file_system}{end}")]);
        }
    }
    assert_ratios(&report, &["create_unlink_vs_passthrough_fuse"]);
    let none = bench(&["mount", "--quick", "--metrics", "stat,speed"]);
    let message = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(!none.status.success() && message.contains("`speed` is no metric"), "{message}");
}

#[test]
fn demo() {
    let report = report(&["demo"]);
    for task in ["walk", "passes"] {
        // On a slow disk it is in the notes.
        assert_contains(&systems_of(&report, task), &["mapping_visited"], &report);
    }
}

#[test]
fn further_rounds_are_added_until_the_floors_are_decided() {
    let report = report(&["hit", "--rounds", "3", "--until-sure", "--limit-minutes", "0"]);
    let judged = report["floors"]["pages_vs_user_cache"].as_object().unwrap();
    assert_eq!(judged["floor"], 3.0);
    assert!(["met", "missed", "unsure"].contains(&judged["verdict"].as_str().unwrap()));
    let interval = report["intervals"]["pages_vs_user_cache"].as_array().unwrap();
    let [low, high] = [&interval[0], &interval[1]].map(|value| value.as_f64().unwrap());
    let ratio = report["ratios"]["pages_vs_user_cache"].as_f64().unwrap();
    assert!(low <= ratio && ratio <= high, "{low} {ratio} {high}");
}

#[test]
fn all_resumes_compares_and_makes_a_scoreboard() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let out = directory.path().join("out");
    let out = out.to_str().unwrap();
    let all = |only: &str| {
        let output = bench(&["all", "--quick", "--only", only, "--out", out]);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert!(all("hit").0);
    let (done, message) = all("hit,unmap");
    assert!(done && message.contains("hit: is in"), "{message}");
    let (done, message) = all("nonsense");
    assert!(!done && message.contains("out-of-core-zram"), "{message}");
    let output = bench(&["all", "--compare", out, out]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("too few rounds"), "{text}");
    let output = bench(&["scoreboard", out]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("## unmap") && text.contains("| `pages_vs_user_cache` |"), "{text}");
    assert!(!bench(&["scoreboard", "/no/such/directory"]).status.success());
}

/// The page is made by this command, so it is what the reports say.
#[test]
fn the_scoreboard_is_that_of_the_reports() {
    let documents = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
    let output = bench(&["scoreboard", &format!("{documents}/results")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = std::fs::read(format!("{documents}/scoreboard.md")).unwrap();
    let is_equal = output.stdout == page;
    assert!(is_equal, "write it again: aquifer bench scoreboard docs/results > docs/scoreboard.md");
}

#[test]
fn wrong_sizes_are_refused_with_a_reason() {
    for (arguments, reason) in [
        (["out-of-core", "--budget", "1M", "--size", "64M"], "too small"),
        (["out-of-core", "--budget", "64M", "--size", "64M"], "at least twice"),
        (["hit", "--dir", "/no/such/directory", "--size", "1M"], "/no/such/directory"),
        (["hit", "--size", "huge", "--rounds", "1"], "is not a size"),
        (["psync", "--size", "64K", "--pages", "100"], "a larger --size"),
        (["map-ahead", "--quick", "--json", "--size", "4K"], "choose a --size"),
        (["mapping-cache", "--quick", "--json", "--sizes", "1001"], "multiple of 8"),
        (["mapping-cache", "--quick", "--json", "--sizes", "1T"], "another of --sizes"),
        (["mapping-cache", "--quick", "--json", "--mapping-cache", "0"], "another --mapping-cache"),
        (["unmap", "--quick", "--json", "--file-size", "1T"], "--file-size"),
        (["flush", "--quick", "--json", "--size", "1"], "another --size"),
        (["flush", "--quick", "--json", "--dirty", "200"], "not a percentage"),
        (["search", "--quick", "--json", "--needle", ""], "a value is required"),
    ] {
        let output = bench(&arguments);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success());
        assert!(message.contains(reason), "{arguments:?}: {message}");
    }
}

/// Naming a contender that a bench does not have lists the bench's contenders, and fails before
/// anything is created.
#[test]
fn contenders_that_do_not_take_part_are_refused() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().to_str().unwrap();
    for (name, has) in [
        ("hit", "anonymous, mapping"),
        ("fault", "mapping_user, mmap_random, pages"),
        ("out-of-core", "pages_batched"),
        ("bfs", "mapping, mapping_user_visited, mapping_visited, mmap"),
        ("psync", "libpmemobj_records"),
        ("compute", "memory, msync, object"),
        ("recover", "object"),
        ("mapping-cache", "mapper, mapper_read_once, mmap, mmap_populate, read"),
        ("map-ahead", "mmap_willneed_ahead"),
        ("unmap", "mapper_sync"),
        ("flush", "mapper, msync"),
        ("search", "mapper_read_once"),
        ("mount", "disk, mount, mount_shared, mount_write_through, pass_through, tmpfs"),
    ] {
        let output = bench(&[name, "--quick", "--dir", path, "--only", "nobody"]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{name}");
        let says_all = message.contains("`nobody` is no contender") && message.contains(has);
        assert!(says_all, "{name}: {message}");
    }
    assert_eq!(directory.path().read_dir().unwrap().count(), 0);
}

#[test]
fn help_lists_the_contenders() {
    let help = bench(&["psync", "--help"]);
    let text = String::from_utf8_lossy(&help.stdout).into_owned();
    for wanted in ["--pages", "--rounds", "libpmemobj1", "log_alone", "LMDB, with its default"] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}

#[test]
fn nothing_is_left_behind() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().to_str().unwrap();
    for name in ["hit", "psync", "compute", "recover", "flush", "open"] {
        let output = bench(&[name, "--quick", "--dir", path]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(directory.path().read_dir().unwrap().count(), 0, "{name}");
    }
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
        return eprintln!("skipped: benches that use memory, /dev/shm cannot be written");
    };
    let memory_path = memory.path().to_str().unwrap();
    for name in ["mapping-cache", "map-ahead", "unmap"] {
        let output = bench(&[name, "--quick", "--dir", path, "--tmpfs-dir", memory_path]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(directory.path().read_dir().unwrap().count(), 0, "{name}");
        assert_eq!(memory.path().read_dir().unwrap().count(), 0, "{name}");
    }
}

/// Interrupted while files are being copied, which takes longest: the files created so far are
/// removed.
#[test]
fn an_interrupted_bench_leaves_nothing_behind() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().to_str().unwrap();
    let tree = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let mut child = Command::new(env!("CARGO_BIN_EXE_aquifer-bench"))
        .args(["bench", "search", "--tree", tree, "--files", "200000", "--dir", path])
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .expect("the program was built for this test");
    while directory.path().read_dir().unwrap().count() == 0 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it was interrupted");
        std::thread::yield_now();
    }
    // Not SIGINT, which is ignored if a shell started the tests in the background.
    let group = format!("-{}", child.id());
    assert!(Command::new("kill").args(["-TERM", "--", &group]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && message.contains("interrupted"), "{message}");
    assert_eq!(directory.path().read_dir().unwrap().count(), 0);
}
