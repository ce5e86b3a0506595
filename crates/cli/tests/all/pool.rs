//! `aquifer pool` from a user's perspective.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::process::{Child, Command, Output, Stdio};

use aquifer::{Objects, Pool, PoolOptions};

use crate::support::{
    Place, aquifer, bytes, failed, fails, json, run, run_without_privileges, says, text, worked,
    works,
};
use serde_json::Value;

/// No background work, so that the media contain only what commits wrote.
fn quiet() -> PoolOptions {
    Pool::options().background(false)
}

#[test]
fn a_pool_is_made_and_described() {
    let place = Place::new();
    let path = place.text("data.pool");
    let made = works(&["pool", "create", &path, "--size", "4M", "--log", "1M", "--inodes", "100"]);
    says(&made, &["4 MiB", &path, "format version 1", "log", "1 MiB", "domain"]);
    assert_eq!(fs::metadata(&path).unwrap().len(), 4 << 20);

    let info = json(&["pool", "info", &path, "--json"]);
    assert_eq!(info["path"], path.as_str());
    assert_eq!(info["format_version"], 1);
    assert_eq!(info["size_bytes"], 4 << 20);
    assert_eq!(info["log"]["len_bytes"], 1 << 20);
    assert!(info["max_inodes"].as_u64().unwrap() >= 100);
    for nothing in ["objects", "files", "symlinks", "parts", "damaged_inodes", "recovered_records"]
    {
        assert_eq!(info[nothing], 0, "{nothing}");
    }
    for one in ["directories", "inodes"] {
        assert_eq!(info[one], 1, "{one}");
    }
    assert_eq!(info["log_used_bytes"], 0);
    assert_eq!(info["free_slots"], info["max_inodes"].as_u64().unwrap() - 1);
    let [data_bytes, saved_bytes] = ["data", "saved"].map(|part| info[part]["len_bytes"].as_u64());
    assert_eq!(info["free_bytes"], data_bytes.unwrap() - saved_bytes.unwrap());
    assert_eq!(info["largest_free_bytes"], info["free_bytes"]);
    assert_eq!(info["features"], 1);
    assert_eq!(info["processes"], serde_json::json!([]));
    assert!(info["generation"].is_u64() && info["created_ns"].is_u64(), "{info}");
    assert_eq!(info["uuid"].as_str().unwrap().len(), 36);
    assert!(["dax", "page-cache", "volatile"].contains(&info["domain"].as_str().unwrap()));

    let table = works(&["pool", "info", &path]);
    says(&table, &["4 MiB", "version 1", "UTC", "objects", "generation", "no process"]);
    says(&table, &[info["uuid"].as_str().unwrap(), info["domain"].as_str().unwrap()]);
}

/// Programs get the result as JSON without another command.
#[test]
fn what_was_made_and_grown_is_json_too() {
    let place = Place::new();
    let path = place.text("data.pool");
    let mut made = json(&["pool", "create", &path, "--size", "4M", "--json"]);
    let mut info = json(&["pool", "info", &path, "--json"]);
    for report in [&mut made, &mut info] {
        // Opening the pool increments it.
        report["generation"] = Value::Null;
    }
    assert_eq!(made, info);
    let grown = json(&["pool", "grow", &path, "--size", "6M", "--json"]);
    assert_eq!(grown["path"], path.as_str());
    assert_eq!(
        (&grown["previous_size_bytes"], &grown["size_bytes"]),
        (&(4 << 20).into(), &(6 << 20).into())
    );
}

#[test]
fn info_follows_what_is_done_with_the_pool() {
    let place = Place::new();
    let path = place.pool();
    let before = json(&["pool", "info", &path, "--json"]);
    let objects = Objects::new(quiet().open(&path).unwrap());
    objects.create("one", 1 << 20).unwrap();
    let info = json(&["pool", "info", &path, "--json"]);
    assert_eq!(info["processes"], serde_json::json!([std::process::id()]));
    assert_eq!((&info["objects"], &info["inodes"]), (&1.into(), &2.into()));
    assert!(info["log_used_bytes"].as_u64().unwrap() > 0, "{info}");
    let free = |info: &serde_json::Value| info["free_bytes"].as_u64().unwrap();
    assert_eq!(free(&before) - free(&info), 1 << 20);
    says(&works(&["pool", "info", &path]), &[&std::process::id().to_string()]);
}

/// A copy of the file of an open pool equals the state after a crash.
#[test]
fn info_of_a_crashed_pool_changes_nothing() {
    let place = Place::new();
    let path = place.pool();
    let objects = Objects::new(quiet().open(&path).unwrap());
    objects.create("one", 4096).unwrap();
    let crashed = place.text("crashed.pool");
    fs::copy(&path, &crashed).unwrap();
    drop(objects);

    let before = bytes(&crashed);
    let info = json(&["pool", "info", &crashed, "--json"]);
    assert!(info["recovered_records"].as_u64().unwrap() > 0, "{info}");
    assert_eq!(info["objects"], 1);
    says(&works(&["pool", "info", &crashed]), &["to be replayed"]);
    assert!(bytes(&crashed) == before, "info has changed the pool");
}

#[test]
fn what_is_no_pool_is_refused_with_a_reason() {
    let place = Place::new();
    let [missing, foreign, empty] = ["missing", "foreign", "empty"].map(|name| place.text(name));
    fs::write(&foreign, "no pool".repeat(10_000)).unwrap();
    fs::write(&empty, "").unwrap();
    let short = place.pool();
    fs::OpenOptions::new().write(true).open(&short).unwrap().set_len(1 << 20).unwrap();
    let directory = place.text("");
    for (path, reason) in [
        (&missing, "does not exist"),
        (&foreign, "is not a pool"),
        (&empty, "is empty"),
        (&short, "cut short"),
        (&directory, "is a directory"),
        (&"/dev/null".to_owned(), "is a character device"),
    ] {
        says(&fails(&["pool", "info", path], 1), &[reason, path]);
        says(&fails(&["pool", "info", path, "--json"], 1), &[reason]);
    }
}

#[test]
fn a_pool_that_cannot_be_made_leaves_nothing() {
    let place = Place::new();
    let path = place.text("data.pool");
    for (arguments, reason) in [
        (&["--size", "64K"][..], "at least 256 KiB"),
        (&["--size", "9999T"], "at most 4 PiB"),
        (&["--size", "1M", "--log", "2M"], "no room for data"),
        (&["--size", "1M", "--log", "1K"], "under 64 KiB"),
        (&["--size", "1M", "--inodes", "1000000"], "no room for data"),
    ] {
        let arguments = [&["pool", "create", &path], arguments].concat();
        says(&fails(&arguments, 1), &[reason]);
    }
    for (arguments, reason) in [
        (&["pool", "create", &path, "--size", "huge"][..], "is not a size"),
        (&["pool", "create", &path, "--size", "-1"], "`-1` is not a size"),
        (&["pool", "create", &path, "--size", "1M", "--log", "-1"], "`-1` is not a size"),
        (&["pool", "create", &path], "--size"),
        (&["pool", "create", &path, "--size", "1M", "--domain", "disk"], "page-cache"),
    ] {
        says(&fails(arguments, 2), &[reason]);
    }
    assert_eq!(place.entries(), 0);
    let nowhere = place.text("no/such/directory");
    says(&fails(&["pool", "create", &nowhere, "--size", "1M"], 1), &["directory", &nowhere]);
    let directory = place.text("");
    says(&fails(&["pool", "create", &directory, "--size", "1M", "--force"], 1), &["directory"]);
    let null = ["pool", "create", "/dev/null", "--size", "1M", "--force"];
    says(&fails(&null, 1), &["character device"]);
}

/// `--force` destroys existing content only if the pool can be created.
#[test]
fn what_has_no_room_for_a_pool_keeps_its_content() {
    let place = Place::new();
    let path = place.text("precious");
    fs::write(&path, "content").unwrap();
    let huge = ["pool", "create", &path, "--size", "4000T", "--force"];
    says(&fails(&huge, 1), &["No space left on device", "4000 TiB", &path, "make it smaller"]);
    assert_eq!(bytes(&path), b"content");
    fs::write(&path, "").unwrap();
    fails(&huge, 1);
    assert_eq!(place.entries(), 1);

    let pool = place.pool();
    let refused = fails(&["pool", "grow", &pool, "--size", "4000T"], 1);
    says(&refused, &[&pool, "cannot grow by 4000 TiB", "grow it by less"]);
    assert_eq!(fs::metadata(&pool).unwrap().len(), 4 << 20);
    works(&["pool", "check", &pool, "--full"]);
}

#[test]
fn where_no_pool_can_be_made_another_path_is_asked_for() {
    let place = Place::public();
    let link = place.text("link");
    symlink(place.path("nowhere"), &link).unwrap();
    for force in [&[][..], &["--force"]] {
        let create = [&["pool", "create", &link, "--size", "1M"], force].concat();
        says(&fails(&create, 1), &["missing file", &link, "another path"]);
    }
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o555)).unwrap();
    let path = place.text("data.pool");
    let Some(output) = run_without_privileges(&["pool", "create", &path, "--size", "1M"]) else {
        return;
    };
    says(&failed(output, 1, &path), &["Permission denied", &path, "another path"]);
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
}

/// Starts the command, and terminates it once its file has its final length, which it gets before
/// it is zeroed.
fn interrupted(arguments: &[&str], len_bytes: u64) -> Output {
    let mut command = aquifer();
    command.args(arguments);
    // Not SIGINT, which is ignored if a shell started the tests in the background.
    interrupt(command, "-TERM", len_bytes)
}

/// Whether a process has a file of this length open, named or unnamed.
fn has_file_of(process: u32, len_bytes: u64) -> bool {
    let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    files
        .filter_map(|entry| fs::metadata(entry.path()).ok())
        .any(|metadata| metadata.is_file() && metadata.len() == len_bytes)
}

/// Sends a signal to a command once its file has this length.
fn interrupt(command: Command, signal: &str, len_bytes: u64) -> Output {
    interrupt_after(command, signal, len_bytes, || ())
}

/// The same, after an additional action.
fn interrupt_after(
    mut command: Command,
    signal: &str,
    len_bytes: u64,
    meanwhile: impl FnOnce(),
) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child: Child = command.spawn().unwrap();
    while !has_file_of(child.id(), len_bytes) {
        assert!(child.try_wait().unwrap().is_none(), "{command:?} ended at once");
        std::thread::yield_now();
    }
    meanwhile();
    let process = child.id().to_string();
    assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
    child.wait_with_output().unwrap()
}

#[test]
fn an_interrupted_command_restores_what_was_there() {
    const LONG_BYTES: u64 = 1 << 30;
    let place = Place::new();
    let path = place.text("data.pool");
    let create = ["pool", "create", &path, "--size", "1G"];
    let output = interrupted(&create, LONG_BYTES);
    says(&failed(output, 1, &create), &["interrupted", &path, "was not created"]);
    assert_eq!(place.entries(), 0);

    fs::write(&path, "").unwrap();
    let output = interrupted(&create, LONG_BYTES);
    says(&failed(output, 1, &create), &["interrupted", "is unchanged"]);
    assert_eq!(bytes(&path), b"");
    fs::write(&path, "given up").unwrap();
    let force = [&create[..], &["--force"]].concat();
    let output = interrupted(&force, LONG_BYTES);
    says(&failed(output, 1, &force), &["interrupted", "empty now", "lost"]);
    assert_eq!(bytes(&path), b"");
    fs::remove_file(&path).unwrap();

    place.pool();
    works(&["object", "create", &path, "graph", "--size", "1M"]);
    let grow = ["pool", "grow", &path, "--size", "1G"];
    let output = interrupted(&grow, LONG_BYTES);
    says(&failed(output, 1, &grow), &["interrupted", &path, "is unchanged"]);
    assert_eq!(fs::metadata(&path).unwrap().len(), 4 << 20);
    works(&["pool", "check", &path, "--full"]);
    assert_eq!(json(&["pool", "info", &path, "--json"])["objects"], 1);
    works(&["pool", "grow", &path, "--size", "8M"]);
}

#[test]
fn an_interrupted_command_removes_nothing_that_another_process_made() {
    let place = Place::new();
    let path = place.text("data.pool");
    let mut create = aquifer();
    create.args(["pool", "create", &path, "--size", "1G"]);
    let output = interrupt_after(create, "-TERM", 1 << 30, || fs::write(&path, "theirs").unwrap());
    says(&failed(output, 1, &path), &["interrupted", "was not created"]);
    assert_eq!(bytes(&path), b"theirs");
}

/// A killed process cannot clean up; for a new file it need not.
#[test]
fn a_killed_creation_leaves_no_pool() {
    let place = Place::new();
    let path = place.text("data.pool");
    let create = |options: &[&str]| {
        let mut create = aquifer();
        create.args(["pool", "create", &path, "--size", "1G"]).args(options);
        assert_eq!(interrupt(create, "-KILL", 1 << 30).status.code(), None);
    };
    create(&[]);
    says(&fails(&["pool", "info", &path], 1), &["does not exist", "aquifer pool create"]);
    // The previous content is lost; the file is not mistaken for a pool, and the error tells what
    // to do.
    fs::write(&path, "given up").unwrap();
    create(&["--force"]);
    says(&fails(&["pool", "info", &path], 1), &["is not a pool", "aquifer pool create"]);
    let create = ["pool", "create", &path, "--size", "4M"];
    says(&fails(&create, 1), &["--force"]);
    works(&[&create[..], &["--force"]].concat());
    works(&["pool", "check", &path, "--full"]);
}

/// Like under `nohup`.
#[test]
fn signals_that_are_ignored_stay_ignored() {
    let place = Place::new();
    let path = place.text("data.pool");
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' INT; exec \"$0\" pool create \"$1\" --size 256M"]);
    shell.arg(env!("CARGO_BIN_EXE_aquifer")).arg(&path);
    worked(interrupt(shell, "-INT", 256 << 20), "a pool");
    works(&["pool", "check", &path]);
}

#[test]
fn only_force_overwrites_and_nothing_that_is_in_use() {
    let place = Place::new();
    let path = place.text("precious");
    fs::write(&path, "precious").unwrap();
    says(&fails(&["pool", "create", &path, "--size", "1M"], 1), &["File exists", "--force"]);
    assert_eq!(bytes(&path), b"precious");
    // Nothing is lost if the pool cannot be created.
    fails(&["pool", "create", &path, "--size", "1K", "--force"], 1);
    assert_eq!(bytes(&path), b"precious");
    works(&["pool", "create", &path, "--size", "1M", "--force"]);

    let objects = Objects::new(quiet().open(&path).unwrap());
    objects.create("one", 4096).unwrap();
    let over = ["pool", "create", &path, "--size", "1M", "--force"];
    says(&fails(&over, 1), &["locked by another process"]);
    assert!(objects.attach("one").is_ok());
    drop(objects);
    works(&over);
    assert_eq!(json(&["pool", "info", &path, "--json"])["objects"], 0);
}

#[test]
fn a_domain_can_be_forced() {
    let place = Place::new();
    for domain in ["dax", "page-cache", "volatile"] {
        let path = place.text("data.pool");
        let size = ["--size", "1M", "--force"];
        let made = [&["pool", "create", &path, "--domain", domain], &size[..]].concat();
        says(&works(&made), &[&format!("domain  {domain} (")]);
        works(&["pool", "info", &path]);
    }
}

#[test]
fn a_pool_that_is_open_exclusively_is_left_alone() {
    let place = Place::new();
    let path = place.pool();
    let alone = quiet().exclusive(true);
    let pool = alone.open(&path).unwrap();
    says(&fails(&["pool", "info", &path], 1), &[&path, "open elsewhere"]);
    drop(pool);
    works(&["pool", "info", &path]);
}

#[test]
fn a_file_that_may_only_be_read_is_shown() {
    let place = Place::public();
    let path = place.pool();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
    let Some(output) = run_without_privileges(&["pool", "info", &path]) else { return };
    says(&worked(output, &path), &["4 MiB"]);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    let output = run_without_privileges(&["pool", "info", &path]).unwrap();
    says(&failed(output, 1, &path), &["no permission to read", &path]);
}

/// Overwrites bytes of a file, like a bad disk.
fn damage(path: &str, offset: u64) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(b"damage", offset).unwrap();
}

/// The output of a check that finds damage.
fn damaged(arguments: &[&str]) -> (String, String) {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    (text(&output.stdout).to_owned(), text(&output.stderr).to_owned())
}

#[test]
fn a_sound_pool_is_found_sound() {
    let place = Place::new();
    let path = place.pool();
    let before = bytes(&path);
    says(&works(&["pool", "check", &path]), &["nothing is wrong", "4 MiB", "version 1"]);
    let report = json(&["pool", "check", &path, "--full", "--json"]);
    assert_eq!((&report["is_sound"], &report["is_in_use"]), (&true.into(), &false.into()));
    assert_eq!(report["worst"], serde_json::Value::Null);
    assert_eq!(report["findings"], serde_json::json!([]));
    assert_eq!(report["pool"]["free_bytes"], report["pool"]["never_used_bytes"]);
    assert!(bytes(&path) == before, "a check has changed the pool");

    let objects = Objects::new(quiet().open(&path).unwrap());
    objects.create("one", 4096).unwrap();
    let report = json(&["pool", "check", &path, "--json"]);
    assert_eq!((&report["is_sound"], &report["is_in_use"]), (&true.into(), &true.into()));
    says(&works(&["pool", "check", &path]), &["is open for writing"]);
    says(&fails(&["pool", "check", &path, "--repair"], 1), &[&path, "open elsewhere"]);
}

#[test]
fn damage_is_explained_and_is_status_1() {
    let place = Place::new();
    let path = place.pool();
    works(&["object", "create", &path, "graph", "--size", "4K"]);
    let slot = 8192 + 512;
    damage(&path, slot + 100);
    let before = bytes(&path);

    let (said, error) = damaged(&["pool", "check", &path]);
    says(&said, &["damage: Inode 1 is damaged", "8704", "Restore the pool from a copy"]);
    says(&error, &["error: ", &path, "damaged", "one finding"]);
    let (report, _) = damaged(&["pool", "check", &path, "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["is_sound"], &report["worst"]), (&false.into(), &"damage".into()));
    let finding = &report["findings"][0];
    assert_eq!((&finding["severity"], &finding["kind"]), (&"damage".into(), &"inode".into()));
    assert_eq!((&finding["inode"], &finding["place"]["offset_bytes"]), (&1.into(), &slot.into()));
    for part in ["what", "meaning", "advice"] {
        assert!(finding[part].as_str().unwrap().len() > 10, "{finding}");
    }

    // A repair would have to guess, so it is refused, and nothing is written.
    let (said, _) = damaged(&["pool", "check", &path, "--repair"]);
    says(&said, &["not repaired: Inode 1 is damaged", "guess"]);
    let (report, _) = damaged(&["pool", "check", &path, "--repair", "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["done"], serde_json::json!([]));
    assert_eq!(report["refused"][0]["finding"]["kind"], "inode");
    assert_eq!(report["after"]["is_sound"], false);
    assert!(bytes(&path) == before, "a refused repair has changed the pool");

    // Other commands report that something is missing.
    says(&works(&["pool", "info", &path]), &["one slot damaged", "aquifer pool check"]);
    assert_eq!(json(&["object", "list", &path, "--json"])["damaged_inodes"], 1);
    let list = run(&["object", "list", &path]);
    says(text(&list.stderr), &["warning: one slot damaged", "aquifer pool check"]);
    assert_eq!(list.status.code(), Some(0));
}

#[test]
fn free_space_is_looked_at_if_that_is_asked_for() {
    let place = Place::new();
    let path = place.pool();
    damage(&path, (3 << 20) + 5);
    works(&["pool", "check", &path]);
    let (said, _) = damaged(&["pool", "check", &path, "--full"]);
    says(&said, &["never used", "3145733"]);
}

#[test]
fn what_loses_nothing_is_repaired() {
    let place = Place::new();
    let path = place.pool();
    damage(&path, 100);
    let report = json(&["pool", "check", &path, "--json"]);
    assert_eq!((&report["is_sound"], &report["worst"]), (&true.into(), &"repairable".into()));
    says(
        &works(&["pool", "check", &path]),
        &["repairable: ", "first superblock", "nothing is lost"],
    );
    let repaired = json(&["pool", "check", &path, "--repair", "--json"]);
    assert_eq!(repaired["before"]["findings"][0]["kind"], "superblock");
    assert_eq!(repaired["done"].as_array().unwrap().len(), 1, "{repaired}");
    assert_eq!(repaired["refused"], serde_json::json!([]));
    assert_eq!(repaired["after"]["findings"], serde_json::json!([]));
    says(&works(&["pool", "check", &path]), &["nothing is wrong"]);

    damage(&path, 4096 + 100);
    says(&works(&["pool", "check", &path, "--repair"]), &["done: ", "nothing is wrong"]);
    says(&works(&["pool", "check", &path, "--repair"]), &["nothing to repair"]);
}

#[test]
fn what_cannot_be_checked_is_status_1() {
    let place = Place::new();
    let [missing, foreign] = ["missing", "foreign"].map(|name| place.text(name));
    fs::write(&foreign, "no pool".repeat(10_000)).unwrap();
    let directory = place.text("");
    for (path, reason) in [(&missing, "does not exist"), (&directory, "is a directory")] {
        says(&fails(&["pool", "check", path], 1), &[reason, path]);
        says(&fails(&["pool", "check", path, "--repair", "--json"], 1), &[reason]);
        says(&fails(&["pool", "grow", path, "--size", "1G"], 1), &[reason, path]);
    }
    for repair in [&[][..], &["--repair"]] {
        let (said, error) = damaged(&[&["pool", "check", &foreign], repair].concat());
        says(&said, &["There is no pool in this file"]);
        says(&error, &["is not a pool"]);
    }
    says(&fails(&["pool", "grow", &foreign, "--size", "1G"], 1), &["is not a pool"]);
    let pool = place.pool();
    fs::OpenOptions::new().write(true).open(&pool).unwrap().set_len(1 << 20).unwrap();
    let (report, _) = damaged(&["pool", "check", &pool, "--json"]);
    says(&report, &["\"truncated\""]);
}

#[test]
fn a_pool_grows() {
    let place = Place::new();
    let path = place.pool();
    works(&["object", "create", &path, "graph", "--size", "1M"]);
    fails(&["object", "create", &path, "large", "--size", "6M"], 1);
    let grow = |size| ["pool", "grow", &path, "--size", size];
    says(&works(&grow("10M")), &["from 4 MiB to 10 MiB", "6 MiB more"]);
    assert_eq!(fs::metadata(&path).unwrap().len(), 10 << 20);
    assert_eq!(json(&["pool", "info", &path, "--json"])["size_bytes"], 10 << 20);
    works(&["object", "create", &path, "large", "--size", "6M"]);
    works(&["pool", "check", &path, "--full"]);
    assert_eq!(json(&["pool", "info", &path, "--json"])["objects"], 2);

    says(&works(&grow("10M")), &["already has 10 MiB"]);
    says(&fails(&grow("4M"), 1), &["do not shrink"]);
    says(&fails(&grow("9999T"), 1), &["no pool can be that long"]);
    fails(&grow("ten"), 2);
    let objects = Objects::new(quiet().open(&path).unwrap());
    says(&fails(&grow("20M"), 1), &[&path, "open elsewhere"]);
    drop(objects);
    works(&grow("20M"));
}

#[test]
fn a_file_that_may_only_be_read_is_checked_and_not_changed() {
    let place = Place::public();
    let path = place.pool();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
    let Some(output) = run_without_privileges(&["pool", "check", &path]) else { return };
    says(&worked(output, &path), &["nothing is wrong"]);
    for arguments in [&["check", &path, "--repair"][..], &["grow", &path, "--size", "8M"]] {
        let output = run_without_privileges(&[&["pool"], arguments].concat()).unwrap();
        says(&failed(output, 1, arguments), &["no permission to write", &path]);
    }
}
