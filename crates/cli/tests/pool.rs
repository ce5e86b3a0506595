//! `aquifer pool` as its users meet it.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use aquifer::{Access, CreateObject, Objects, OpenOptions, Pool};

use support::{Place, bytes, failed, fails, json, run_without_privileges, says, worked, works};

/// Everything in one process, and nothing on media that a commit did not put there.
fn quiet() -> OpenOptions {
    OpenOptions { background: false, ..OpenOptions::default() }
}

#[test]
fn a_pool_is_made_and_described() {
    let place = Place::new();
    let path = place.text("data.pool");
    let made = works(&["pool", "create", &path, "--size", "4M", "--log", "1M", "--inodes", "100"]);
    says(&made, &["4 MiB", &path, "experimental format (version 0)", "log", "1 MiB", "domain"]);
    assert_eq!(fs::metadata(&path).unwrap().len(), 4 << 20);

    let info = json(&["pool", "info", &path, "--json"]);
    assert_eq!(info["path"], path.as_str());
    assert_eq!(info["format_version"], 0);
    assert_eq!(info["is_experimental"], true);
    assert_eq!(info["size_bytes"], 4 << 20);
    assert_eq!(info["log"]["len_bytes"], 1 << 20);
    assert!(info["max_inodes"].as_u64().unwrap() >= 100);
    for nothing in ["objects", "inodes", "damaged_inodes", "log_used_bytes", "recovered_records"] {
        assert_eq!(info[nothing], 0, "{nothing}");
    }
    assert_eq!(info["free_bytes"], info["data"]["len_bytes"]);
    assert_eq!(info["largest_free_bytes"], info["data"]["len_bytes"]);
    assert_eq!(info["processes"], serde_json::json!([]));
    assert!(info["generation"].is_u64() && info["created_ns"].is_u64(), "{info}");
    assert_eq!(info["uuid"].as_str().unwrap().len(), 36);
    assert!(["dax", "page-cache", "volatile"].contains(&info["domain"].as_str().unwrap()));

    let table = works(&["pool", "info", &path]);
    says(&table, &["4 MiB", "version 0", "UTC", "objects", "generation", "no process"]);
    says(&table, &[info["uuid"].as_str().unwrap(), info["domain"].as_str().unwrap()]);
}

#[test]
fn info_follows_what_is_done_with_the_pool() {
    let place = Place::new();
    let path = place.pool();
    let before = json(&["pool", "info", &path, "--json"]);
    let objects = Objects::open(&path, &quiet()).unwrap();
    objects.create("one", 1 << 20, &CreateObject::default()).unwrap();
    let info = json(&["pool", "info", &path, "--json"]);
    assert_eq!(info["processes"], serde_json::json!([std::process::id()]));
    assert_eq!((&info["objects"], &info["inodes"]), (&1.into(), &1.into()));
    assert!(info["log_used_bytes"].as_u64().unwrap() > 0, "{info}");
    let free = |info: &serde_json::Value| info["free_bytes"].as_u64().unwrap();
    assert_eq!(free(&before) - free(&info), 1 << 20);
    says(&works(&["pool", "info", &path]), &[&std::process::id().to_string()]);
}

/// A copy of the file of an open pool is what a crash leaves.
#[test]
fn info_of_a_crashed_pool_changes_nothing() {
    let place = Place::new();
    let path = place.pool();
    let objects = Objects::open(&path, &quiet()).unwrap();
    objects.create("one", 4096, &CreateObject::default()).unwrap();
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
        (&["pool", "create", &path, "--size", "-1"], "unexpected argument"),
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

#[test]
fn only_force_overwrites_and_nothing_that_is_in_use() {
    let place = Place::new();
    let path = place.text("precious");
    fs::write(&path, "precious").unwrap();
    says(&fails(&["pool", "create", &path, "--size", "1M"], 1), &["exists already", "--force"]);
    assert_eq!(bytes(&path), b"precious");
    // Nothing is lost for a pool that cannot be.
    fails(&["pool", "create", &path, "--size", "1K", "--force"], 1);
    assert_eq!(bytes(&path), b"precious");
    works(&["pool", "create", &path, "--size", "1M", "--force"]);

    let objects = Objects::open(&path, &quiet()).unwrap();
    objects.create("one", 4096, &CreateObject::default()).unwrap();
    let over = ["pool", "create", &path, "--size", "1M", "--force"];
    says(&fails(&over, 1), &["locked by another process"]);
    assert!(objects.attach("one", Access::Read, None).is_ok());
    drop(objects);
    works(&over);
    assert_eq!(json(&["pool", "info", &path, "--json"])["objects"], 0);
}

#[test]
fn a_domain_can_be_forced() {
    let place = Place::new();
    for domain in ["dax", "page-cache", "volatile"] {
        let path = place.text(domain);
        let made = works(&["pool", "create", &path, "--size", "1M", "--domain", domain]);
        says(&made, &[domain]);
        works(&["pool", "info", &path]);
    }
}

#[test]
fn a_pool_that_is_open_exclusively_is_left_alone() {
    let place = Place::new();
    let path = place.pool();
    let alone = OpenOptions { exclusive: true, ..quiet() };
    let pool = Pool::open(&path, &alone).unwrap();
    says(&fails(&["pool", "info", &path], 1), &["exclusively"]);
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
