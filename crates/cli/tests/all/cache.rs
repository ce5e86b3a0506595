//! `aquifer cache` from a user's perspective.

use std::os::unix::fs::PermissionsExt;

use crate::support::{Place, fails, json, says, works};
use aquifer_testkit::object_server::{Answer, Server, pattern};

#[test]
fn objects_are_downloaded_shown_verified_and_dropped() {
    let place = Place::new();
    let server = Server::new(pattern(1_000_000, 1));
    let (dir, url) = (place.text("tier"), "s3://bucket/dir/object.bin");
    let with = |args: &[&str]| [args, &["--dir", &dir]].concat().join("\n");
    let run = |args: &[&str]| works(&with(args).split('\n').collect::<Vec<_>>());
    says(
        &fails(&["cache", "info", "--dir", &dir], 1),
        &["there is no cache", "aquifer cache warm"],
    );
    let endpoint = server.endpoint();
    let store = ["--endpoint", &endpoint, "--allow-http", "--anonymous"];
    let warm = |more: &[&str]| {
        let args = [&["cache", "warm", url], &store[..], more, &["--dir", &dir]].concat();
        works(&args)
    };
    says(
        &warm(&["--offset", "100K", "--length", "200K"]),
        &["object.bin", "200 KiB", "0 bytes was"],
    );
    says(&warm(&[]), &["200 KiB was there"]);
    says(&warm(&[]), &["downloaded 0 bytes with one request"]);
    says(&run(&["cache", "info"]), &["one object", "976", url, &dir]);
    let info = json(&["cache", "info", "--json", "--dir", &dir]);
    assert_eq!(info["objects"][0]["present_bytes"], 1_000_000);
    assert!(info["used_bytes"].as_u64() >= Some(1_000_000), "{info}");
    says(&run(&["cache", "verify"]), &["976.6 KiB are right, 0 bytes were damaged"]);
    says(
        &fails(&["cache", "drop", "s3://bucket/dir", "--dir", &dir], 1),
        &["nothing of s3://bucket/dir is"],
    );
    says(&run(&["cache", "drop", "s3://bucket/dir/"]), &["dropped one object"]);
    says(&run(&["cache", "info"]), &["0 objects"]);
    let report = [&["cache", "warm", url, "--json"], &store[..], &["--dir", &dir]].concat();
    let warmed = json(&report)["objects"][0].clone();
    assert_eq!(
        (&warmed["downloaded_bytes"], &warmed["unstored_bytes"]),
        (&1_000_000.into(), &0.into())
    );
    says(&run(&["cache", "info", "--set-budget", "0"]), &["0 bytes of 0 bytes in use, 0 objects"]);
    assert_eq!(json(&["cache", "drop", "--all", "--json", "--dir", &dir])["objects"], 0);
    says(&warm(&[]), &["976.6 KiB could not be stored", "budget"]);
    let unstored = json(&report)["objects"][0]["unstored_bytes"].as_u64();
    assert_eq!(unstored, Some(1_000_000));
}

#[test]
fn what_cannot_be_cached_is_explained() {
    let place = Place::new();
    let server = Server::new(pattern(1000, 2));
    let (dir, url) = (place.text("tier"), server.url());
    let warm = |url: &str, code| fails(&["cache", "warm", url, "--dir", &dir], code);
    says(&warm("nonsense", 1), &["not a URL"]);
    says(&warm("s3://bucket", 1), &["names no object"]);
    server.plan(|_| Answer::Status(404));
    let said = warm(&url, 1);
    says(&said, &["there is no such object"]);
    assert!(!said.contains("hunter2"), "{said}");
    server.plan(|_| Answer::Etag(None));
    says(&warm(&url, 1), &["no strong ETag", "unversioned"]);
    says(&warm(&format!("file://{}", place.text("x")), 1), &["in place"]);
    let option = ["cache", "warm", &url, "--dir", &dir, "--unversioned"];
    says(&fails(&option, 2), &["--unversioned"]);
    server.plan(|_| Answer::Proper);
    let mode =
        |mode| std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o755);
    says(&warm(&url, 1), &[&dir, "other users may access it", "0700"]);
    mode(0o700);
    fails(&["cache", "drop"], 2);
    fails(&["cache", "warm"], 2);
    says(&works(&["cache", "warm", "--help"]), &["Examples:", "AQUIFER_TIER", "--endpoint"]);
}

#[test]
fn one_of_several_that_fails_hides_no_other() {
    let place = Place::new();
    let server = Server::new(pattern(1000, 2));
    let (dir, endpoint) = (place.text("tier"), server.endpoint());
    let url = "s3://bucket/dir/object.bin";
    let store = ["--endpoint", &endpoint, "--allow-http", "--anonymous", "--dir", &dir];
    let both = [&["cache", "warm", "--json", url, "s3://bucket/none"], &store[..]].concat();
    let output = crate::support::aquifer().args(&both).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    says(crate::support::text(&output.stdout), &[url, "1000"]);
    says(crate::support::text(&output.stderr), &["s3://bucket/none"]);
    // By any form of its URL.
    let drop = ["cache", "drop", "S3://bucket/dir/%6Fbject.bin", "s3://bucket/none", "--dir", &dir];
    let output = crate::support::aquifer().args(drop).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    says(crate::support::text(&output.stdout), &["dropped one object"]);
    says(crate::support::text(&output.stderr), &["nothing of s3://bucket/none is"]);
}
