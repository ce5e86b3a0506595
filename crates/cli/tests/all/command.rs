//! The `aquifer` command from a user's perspective.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use aquifer::{Cache, MemoryDevice, PageId, publish};
use serde_json::Value;

use crate::support::{Place, aquifer, failed, fails, run, says, text, works};

/// Whether `aquifer-bench` was built beside the command, as `./test` does; prints a note if not.
fn has_benches() -> bool {
    let is_built =
        Path::new(env!("CARGO_BIN_EXE_aquifer")).with_file_name("aquifer-bench").exists();
    if !is_built {
        println!("skipped in part: aquifer-bench is not built");
    }
    is_built
}

#[test]
fn every_command_has_help_with_an_example() {
    let all = works(&["--help"]);
    for command in ["demo", "doctor", "stat", "pool", "object", "bench", "completions", "version"] {
        assert!(all.contains(command), "{command} is not in the help");
        if command == "bench" && !has_benches() {
            continue;
        }
        let help = works(&[command, "--help"]);
        assert!(help.contains("Example"), "{command} shows no example");
        assert!(help.contains(&format!("aquifer {command}")), "{help}");
    }
    for command in ["ls", "cat", "put", "get", "cp", "mv", "rm", "mkdir", "ln"] {
        assert!(all.contains(&format!("\n  {command} ")), "{command} is not in the help");
        let help = works(&[command, "--help"]);
        let examples = help.matches(&format!("\n  aquifer {command} ")).count();
        assert!(examples >= 2, "{command} shows {examples} examples: {help}");
    }
    let pool = &["create", "info", "check", "grow"][..];
    let object = &["create", "list", "info", "resize", "destroy", "dump"][..];
    for (group, commands) in [("pool", pool), ("object", object)] {
        let all = works(&[group, "--help"]);
        for command in commands {
            assert!(all.contains(command), "{group} {command} is not in the help");
            let help = works(&[group, command, "--help"]);
            let examples = help.matches(&format!("\n  aquifer {group} {command} ")).count();
            assert!(examples >= 2, "{group} {command} shows {examples} examples: {help}");
        }
        assert_eq!(run(&[group]).status.code(), Some(2));
    }
    assert!(works(&["--version"]).starts_with("aquifer "));
    let version: Value = serde_json::from_str(&works(&["version", "--json"])).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn a_wrong_command_line_is_status_2() {
    assert!(fails(&["frobnicate"], 2).contains("--help"));
    fails(&["doctor", "--nonsense"], 2);
    fails(&["stat", "--watch", "never"], 2);
    fails(&["stat", "--count", "3"], 2);
    fails(&["demo", "--size", "12 parsecs"], 2);
    if has_benches() {
        fails(&["bench", "hit", "--rounds", "0"], 2);
    }
    assert_eq!(run::<&str>(&[]).status.code(), Some(2));
}

#[test]
fn what_does_not_work_is_status_1_and_says_what_to_do() {
    assert!(fails(&["doctor", "--dir", "/no/such/directory"], 1).contains("--dir"));
    assert!(fails(&["doctor", "--dir", "/proc"], 1).contains("--dir"));
    assert!(fails(&["demo", "--dir", "/no/such/directory"], 1).contains("/no/such/directory"));
    assert!(fails(&["demo", "--size", "1M"], 1).contains("--budget"));
    assert!(fails(&["stat", "no-such-cache"], 1).contains("aquifer stat"));
    assert!(fails(&["stat", "4294967295"], 1).contains("4294967295"));
}

#[test]
fn shells_accept_their_completions() {
    for shell in ["bash", "zsh", "fish"] {
        let script = works(&["completions", shell]);
        assert!(
            ["doctor", "no-costs", "mkdir", "parents"].iter().all(|word| script.contains(word)),
            "{shell}: {script}"
        );
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("aquifer");
        fs::write(&path, &script).unwrap();
        match Command::new(shell).arg("-n").arg(&path).output() {
            Ok(read) => assert!(read.status.success(), "{shell}: {}", text(&read.stderr)),
            Err(error) => eprintln!("skipped: reading it with {shell}: {error}"),
        }
    }
    assert!(fails(&["completions", "cmd.exe"], 2).contains("fish"));
    fails(&["completions"], 2);
}

#[test]
fn doctor_reports_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().to_str().unwrap();
    let report: Value = serde_json::from_str(&works(&["doctor", "--json", "--dir", path])).unwrap();
    for part in ["features", "mechanisms", "costs"] {
        let lines = report[part].as_array().unwrap();
        assert!(lines.len() > 5, "{part}: {lines:?}");
        assert!(lines.iter().all(|line| line["name"].is_string()), "{part}");
    }
    for cost in report["costs"].as_array().unwrap() {
        let measured = cost["ns"].as_f64().is_some_and(|ns| ns > 0.0);
        assert!(measured != cost["error"].is_string(), "{cost}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    let form = |name: &str| {
        let mechanisms = report["mechanisms"].as_array().unwrap();
        let found = mechanisms.iter().find(|line| line["name"] == name);
        found.unwrap_or_else(|| panic!("no {name}")).as_object().unwrap()["form"].to_string()
    };
    // Each form is the one that the engine chose here.
    let one_of = |name: &str, forms: &[&str]| {
        let found = form(name);
        assert!(forms.iter().any(|form| found.contains(form)), "{name}: {found}");
    };
    one_of("views of files that were closed", &["parked: ", "unmapped: "]);
    one_of("views of files that are unmapped", &["drained: ", "vacated: "]);
    one_of("durability of pools there", &["page-cache: ", "dax: ", "volatile: "]);
    one_of("page tables of pools", &["hugetlbfs"]);
    // Eviction and unmapping gain from the same kernel change, which the README names.
    let readme = include_str!("../../../../README.md");
    assert!(readme.contains("best from 6.16 on"));
    let drains = form("views of files that are unmapped").contains("drained");
    let vectored = form("eviction of clean pages");
    assert!(!vectored.contains("vectored") || vectored.contains("needs Linux 6.16") != drains);

    let table = works(&["doctor", "--no-costs", "--dir", path]);
    assert!(table.contains("userfaultfd") && table.contains("backend"), "{table}");
    assert!(!table.contains("Costs (pages"));
}

#[test]
fn stat_shows_a_living_cache() {
    let cache = Cache::builder().budget_bytes(8 << 20).publish("command-test").build().unwrap();
    let pages = cache.pages(MemoryDevice::from_bytes(&[1; 4096]).unwrap()).unwrap();
    pages.get(PageId(0)).unwrap();
    let process = std::process::id().to_string();
    let seen: Value = serde_json::from_str(&works(&["stat", "command-test", "--json"])).unwrap();
    let [found] = &seen["caches"].as_array().unwrap()[..] else { panic!("{seen}") };
    assert_eq!(found["pid"].to_string(), process);
    assert_eq!(found["budget_bytes"], 8 << 20);
    assert!(found["rates"]["misses"].is_number());

    let table = works(&["stat", &process]);
    assert!(table.contains("command-test") && table.contains("of 8 MiB"), "{table}");
    let lines = works(&["stat", &process, "--json", "--watch", "0.1", "--count", "3"]);
    assert_eq!(lines.lines().count(), 3);
    for line in lines.lines() {
        let seen: Value = serde_json::from_str(line).unwrap();
        assert_eq!(seen["caches"][0]["name"], "command-test");
    }
    drop(pages);
    drop(cache);
    fails(&["stat", "command-test"], 1);
}

#[test]
fn stat_clears_away_what_the_dead_left() {
    let runtime = tempfile::tempdir().unwrap();
    let directory = runtime.path().join("aquifer");
    fs::DirBuilder::new().mode(0o700).create(&directory).unwrap();
    let dead = directory.join("1-ghost.json");
    let other = directory.join("notes.txt");
    // Process 1 has another start time.
    fs::write(&dead, sample("ghost", 1, u64::MAX)).unwrap();
    fs::write(&other, "").unwrap();
    let stat = |arguments: &[&str]| {
        aquifer().arg("stat").args(arguments).env("XDG_RUNTIME_DIR", runtime.path()).output()
    };
    let output = stat(&["ghost"]).unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(!dead.exists());
    assert!(other.exists());

    let own = std::process::id();
    let start_ticks = publish::start_ticks(own).unwrap();
    let alive = directory.join(format!("{own}-alive.json"));
    fs::write(&alive, sample("alive", own, start_ticks)).unwrap();
    let output = stat(&["alive"]).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(alive.exists());
}

/// A sample as a cache would publish it.
fn sample(name: &str, pid: u32, start_ticks: u64) -> String {
    let quantiles = "{\"count\":0,\"p50\":0,\"p99\":0,\"p999\":0}";
    format!(
        "{{\"format\":{},\"pid\":{pid},\"start_ticks\":{start_ticks},\"pid_namespace\":{},\
         \"unix_ms\":0,\"uptime_ms\":1,\"name\":\"{name}\",\"command\":\"c\",\"policy\":\"p\",\
         \"page_bytes\":4096,\"budget_bytes\":1,\"resident_bytes\":0,\"dirty_bytes\":0,\
         \"kernel_resident_bytes\":0,\"counters\":{{}},\"fault_service_ns\":{quantiles},\
         \"write_back_bytes\":{quantiles}}}",
        publish::FORMAT,
        publish::process_namespace(),
    )
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = aquifer()
        .args(["stat", "--json", "--watch", "0.1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with('{'), "{line}");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let place = Place::new();
    let pool = place.pool();
    works(&["object", "create", &pool, "graph", "--size", "4K"]);
    for arguments in [
        &["version"][..],
        &["pool", "info", &pool, "--json"],
        &["object", "dump", &pool, "graph"],
        &["object", "dump", &pool, "graph", "--raw"],
    ] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = aquifer().args(arguments).stdout(full).output().unwrap();
        let said = failed(output, 1, arguments);
        says(&said, &["cannot write to standard output", "No space left"]);
    }
}

#[test]
fn what_is_no_statistics_is_passed_over() {
    let runtime = tempfile::tempdir().unwrap();
    let directory = runtime.path().join("aquifer");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
    // A directory writable by other users, containing another user's file.
    fs::write(directory.join("1-x.json"), "not json").unwrap();
    let output = aquifer().arg("stat").env("XDG_RUNTIME_DIR", runtime.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn without_the_bench_program_it_is_said_how_to_build_it() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let alone = directory.path().join("aquifer");
    fs::copy(env!("CARGO_BIN_EXE_aquifer"), &alone).unwrap();
    let output = Command::new(&alone).args(["bench", "--help"]).env("PATH", "").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    says(text(&output.stderr), &["aquifer-bench", "cargo build --release"]);
}

#[test]
fn bench_starts_its_contenders_through_this_command() {
    if !has_benches() {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().to_str().unwrap();
    let report = works(&["bench", "hit", "--quick", "--json", "--dir", path]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["bench"], "hit");
    assert!(!report["rows"].as_array().unwrap().is_empty());
    assert_eq!(fs::read_dir(Path::new(path)).unwrap().count(), 0);
}

#[test]
fn an_interrupted_demo_removes_its_file() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let entries = || fs::read_dir(directory.path()).unwrap().count();
    let mut child = aquifer()
        .args(["demo", "--size", "64M", "--budget", "32M", "--dir"])
        .arg(directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    while entries() == 0 {
        assert!(child.try_wait().unwrap().is_none(), "the demo ended without a file");
        std::thread::yield_now();
    }
    // Like a terminal: to the whole group, including the contenders. Not SIGINT, which is ignored
    // if a shell started the tests in the background.
    let group = format!("-{}", child.id());
    assert!(Command::new("kill").args(["-TERM", "--", &group]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("interrupted"), "{}", text(&output.stderr));
    assert_eq!(entries(), 0);
}

#[cfg(not(feature = "remote"))]
#[test]
fn a_build_without_object_stores_says_so() {
    for arguments in
        [&["cat", "s3://b/k"][..], &["get", "s3://b/k", "."], &["put", "s3://b/k", "x.pool:/"]]
    {
        says(&fails(arguments, 2), &["object stores", "cargo install"]);
    }
    for arguments in [&["--help"][..], &["pool", "--help"]] {
        let help = works(arguments);
        says(&help, &["no object stores", "cargo install"]);
        assert!(!help.contains("\n  cache") && !help.contains("\n  publish"), "{help}");
    }
}
