//! `aquifer pool publish`, `restore` and `snapshots` from a user's perspective.

use std::fs;
use std::process::{Child, Command, Stdio};

use aquifer_testkit::object_server::{Answer, Server};

use crate::support::{Place, aquifer, fails, json, says, worked, works};

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
    let missing = fails(&["pool", "snapshots", &url], 1);
    says(&missing, &[&url, "there is no such directory"]);
    fs::create_dir(place.path("store")).unwrap();
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
fn a_pool_is_read_again_on_request() {
    let place = Place::new();
    let (pool, url) = (place.pool(), url(&place));
    works(&["pool", "publish", &pool, &url]);
    let unread = json(&["pool", "publish", &pool, &url, "--json"]);
    assert_eq!((&unread["read_bytes"], &unread["sent_chunks"]), (&0.into(), &0.into()), "{unread}");
    let reread = json(&["pool", "publish", &pool, &url, "--reread", "--json"]);
    assert!(reread["read_bytes"].as_u64() > Some(0), "{reread}");
}

#[test]
fn what_is_damaged_in_the_log_is_told_beside_what_is_not() {
    let place = Place::new();
    let (pool, url, copy) = (place.pool(), url(&place), place.text("copy.pool"));
    for _ in 0..2 {
        works(&["pool", "publish", &pool, &url]);
    }
    fs::write(place.path("store/log/00000000000000000002"), "x").unwrap();
    for arguments in [&["pool", "snapshots", &url][..], &["pool", "snapshots", &url, "--json"]] {
        let output = aquifer().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let (listed, said) =
            (crate::support::text(&output.stdout), crate::support::text(&output.stderr));
        says(said, &["store/log/00000000000000000002 is damaged", "--snapshot"]);
        assert!(listed.contains("1 ") || listed.contains("\"snapshot\": 1"), "{listed}");
    }
    let newest = fails(&["pool", "restore", &url, &copy], 1);
    says(&newest, &["store/log/00000000000000000002 is damaged", "--snapshot", "another prefix"]);
    works(&["pool", "restore", &url, &copy, "--snapshot", "1"]);
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
    says(&fails(&["pool", "restore", &url, &copy], 1), &["no such directory"]);
    fs::create_dir(place.path("store")).unwrap();
    says(&fails(&["pool", "restore", &url, &copy], 1), &["no snapshots"]);
    says(&fails(&["pool", "publish", &pool, &url, "--chunk-size", "1000"], 1), &["power of two"]);
    fails(&["pool", "publish", &pool, &url, "--keep", "0"], 2);
    says(&fails(&["pool", "publish", &copy, &url], 1), &[&copy, "does not exist"]);
    let help = works(&["pool", "publish", "--help"]);
    says(&help, &["Examples:", "--freeze", "--keep", "s3://bucket"]);
}

const URL: &str = "s3://bucket/some/prefix";

/// A command with a store of S3's interface.
fn at(server: &Server, arguments: &[&str]) -> Command {
    let mut command = aquifer();
    command.args(arguments).args(["--endpoint", &server.endpoint(), "--allow-http"]);
    command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
    command.env("AWS_REGION", "eu-west-1");
    command
}

fn works_at(server: &Server, arguments: &[&str]) -> String {
    worked(at(server, arguments).output().unwrap(), arguments)
}

/// Starts a command, lets it make some requests, and kills it while it waits for the answer to the next one.
fn kill_at(server: &Server, requests: usize, arguments: &[&str]) {
    /// Ends with the test.
    struct Running(Child);
    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    server.plan(move |number| if number < requests { Answer::Proper } else { Answer::Silence });
    let mut command = at(server, arguments);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = Running(command.spawn().unwrap());
    aquifer_testkit::watchdog::wait_until(&format!("{requests} requests of {arguments:?}"), || {
        server.asked().len() > requests || running.0.try_wait().unwrap().is_some()
    });
    drop(running);
    server.plan(|_| Answer::Proper);
}

#[test]
fn publishing_to_s3_is_all_or_nothing() {
    let server = Server::empty();
    let place = Place::new();
    let (pool, copy) = (place.pool(), place.text("copy.pool"));
    let notes = place.text("notes");
    let write = |text: &str| {
        fs::write(&notes, text.repeat(50_000)).unwrap();
        works(&["put", &notes, &format!("{pool}:/")]);
    };
    let restored = || {
        works_at(&server, &["pool", "restore", URL, &copy, "--force"]);
        works(&["cat", &format!("{copy}:/notes")])[..5].to_owned()
    };
    write("first");
    works_at(&server, &["pool", "publish", &pool, URL]);
    let requests = server.asked().len();
    assert_eq!(restored(), "first");
    // Killed at each of its requests; the one that goes through is the last.
    write("other");
    let mut was_other = false;
    for request in 0..requests + 4 {
        kill_at(&server, request, &["pool", "publish", &pool, URL]);
        let found = restored();
        assert!(found == "other" || !was_other, "after {request} requests");
        was_other = found == "other";
    }
    assert!(was_other, "after {} requests", requests + 4);
    // A restore that is killed leaves nothing, and does not touch what is there.
    let entries = place.entries();
    let before = crate::support::bytes(&copy);
    for request in 0..6 {
        kill_at(&server, request, &["pool", "restore", URL, &place.text("new.pool")]);
        kill_at(&server, request, &["pool", "restore", URL, &copy, "--force"]);
    }
    assert_eq!(crate::support::bytes(&copy), before);
    let new = place.path("new.pool").exists();
    assert_eq!(place.entries(), entries + usize::from(new));
    works_at(&server, &["pool", "publish", &pool, URL, "--keep", "1", "--grace", "0s"]);
    assert_eq!(restored(), "other");
}

#[test]
fn a_publisher_that_may_not_delete_says_what_it_did() {
    let server = Server::empty();
    let place = Place::new();
    let pool = place.pool();
    server.plan_each(|_, asked| {
        let deletes = asked.method == "DELETE" || asked.head.contains("?delete");
        if deletes { Answer::Status(403) } else { Answer::Proper }
    });
    // Also not the object by which it finds out what the server does.
    works_at(&server, &["pool", "publish", &pool, URL]);
    let keep = ["pool", "publish", &pool, URL, "--keep", "1", "--grace", "0s"];
    let output = at(&server, &keep).output().unwrap();
    says(crate::support::text(&output.stdout), &["as snapshot 2 of"]);
    assert_eq!(output.status.code(), Some(1));
    let said = crate::support::text(&output.stderr);
    says(said, &["published as snapshot 2, but older ones were not removed", "permission denied"]);
    server.plan(|_| Answer::Proper);
    let collected = works_at(&server, &keep);
    says(&collected, &["removed"]);
}

#[test]
fn a_refused_listing_says_why() {
    let server = Server::empty();
    for (status, reason) in [(403, "permission denied"), (404, "no such bucket")] {
        server.plan(move |_| Answer::Status(status));
        let output = at(&server, &["pool", "snapshots", URL]).output().unwrap();
        let said = crate::support::failed(output, 1, "snapshots");
        says(&said, &["cannot list", "s3://bucket/some/prefix", reason, &status.to_string()]);
    }
}

#[test]
fn a_foreign_log_is_refused() {
    let server = Server::empty();
    server.put("bucket/some/prefix/log/00000000000000000001", "x");
    let place = Place::new();
    let pool = place.pool();
    let output = at(&server, &["pool", "publish", &pool, URL]).output().unwrap();
    let said = crate::support::failed(output, 1, "publish");
    says(&said, &["s3://bucket/some/prefix/log/00000000000000000001", "damaged"]);
}
