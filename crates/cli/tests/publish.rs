//! `aquifer pool publish`, `restore` and `snapshots` from a user's perspective.

mod support;

use std::fs;

use support::{Place, fails, json, says, works};

fn url(place: &Place) -> String {
    format!("file://{}", place.text("store"))
}

#[test]
fn a_pool_goes_to_a_store_and_comes_back() {
    let place = Place::new();
    let (pool, url, copy) = (place.pool(), url(&place), place.text("copy.pool"));
    let notes = place.path("notes");
    fs::write(&notes, "some text").unwrap();
    works(&["put", notes.to_str().unwrap(), &format!("{pool}:/")]);
    let none = works(&["pool", "snapshots", &url]);
    says(&none, &["no snapshots"]);
    let said = works(&["pool", "publish", &pool, &url]);
    says(&said, &["snapshot 1", &pool, &url, "sent"]);
    works(&["pool", "restore", &url, &copy]);
    assert_eq!(works(&["cat", &format!("{copy}:/notes")]), "some text");
    works(&["pool", "check", &copy, "--full"]);
    // Another snapshot, and only that is kept.
    works(&["rm", &format!("{pool}:/notes")]);
    let report = json(&["pool", "publish", &pool, &url, "--keep", "1", "--json"]);
    assert_eq!(report["snapshot"], 2);
    assert_eq!(report["removed_snapshots"], 1);
    assert_eq!(report["size_bytes"], 4 << 20);
    assert!(report["sent_bytes"].as_u64() > Some(0), "{report}");
    let listed = json(&["pool", "snapshots", &url, "--json"]);
    assert_eq!(listed["snapshots"].as_array().unwrap().len(), 1);
    assert_eq!(listed["snapshots"][0]["snapshot"], 2);
    let text = works(&["pool", "snapshots", &url]);
    says(&text, &["snapshot", "UTC", "4 MiB", listed["snapshots"][0]["uuid"].as_str().unwrap()]);
    let kept = fails(&["pool", "restore", &url, &copy], 1);
    says(&kept, &[&copy, "File exists", "--force"]);
    let gone = fails(&["pool", "restore", &url, &copy, "--force", "--snapshot", "1"], 1);
    says(&gone, &["no snapshot 1", "snapshots"]);
    let report = json(&["pool", "restore", &url, &copy, "--force", "--json"]);
    assert_eq!(report["snapshot"], 2);
    fails(&["cat", &format!("{copy}:/notes")], 1);
}

#[test]
fn wrong_places_are_explained() {
    let place = Place::new();
    let (pool, url, copy) = (place.pool(), url(&place), place.text("copy.pool"));
    for (url, reason) in [
        ("somewhere", "not a URL"),
        ("ftp://host/x", "unknown scheme"),
        ("s3://bucket/x?y=1", "query"),
        ("http://127.0.0.1:1/x", "only read"),
    ] {
        says(&fails(&["pool", "publish", &pool, url], 1), &[reason]);
    }
    says(&fails(&["pool", "restore", &url, &copy], 1), &["no snapshots"]);
    says(&fails(&["pool", "publish", &pool, &url, "--chunk-size", "1000"], 1), &["power of two"]);
    fails(&["pool", "publish", &pool, &url, "--keep", "0"], 2);
    says(&fails(&["pool", "publish", &copy, &url], 1), &[&copy, "does not exist"]);
    let help = works(&["pool", "publish", "--help"]);
    says(&help, &["Examples:", "--freeze", "--keep", "s3://bucket"]);
}
