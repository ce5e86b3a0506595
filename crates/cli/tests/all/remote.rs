//! Object stores from a user's perspective: `cat`, `put`, `get` and `stat`, against the testkit's server.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::{Place, aquifer, bytes, failed, says, text, worked};
use aquifer::remote::RemoteDevice;
use aquifer::{Cache, PageId};
use aquifer_testkit::object_server::{Answer, PATH, Server, pattern};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const MIB: usize = 1 << 20;
const LONG: usize = 20 * MIB + 12_345;

/// The command with what reaches the server: by options, and credentials from the environment.
fn remote(server: &Server, arguments: &[&str]) -> Command {
    let mut command = bare(arguments);
    command.args(["--endpoint", &server.endpoint(), "--allow-http", "--region", "nowhere-1"]);
    command
}

/// The command with credentials only.
fn bare(arguments: &[&str]) -> Command {
    let mut command = aquifer();
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy();
        if ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(&variable);
        }
    }
    command.env("NO_PROXY", "127.0.0.1");
    command.env("AWS_ACCESS_KEY_ID", "AKID").env("AWS_SECRET_ACCESS_KEY", "hunter2");
    command.args(arguments);
    command
}

fn works(server: &Server, arguments: &[&str]) -> String {
    worked(remote(server, arguments).output().unwrap(), arguments)
}

fn fails(server: &Server, arguments: &[&str], parts: &[&str]) {
    let said = failed(remote(server, arguments).output().unwrap(), 1, arguments);
    says(&said, parts);
    assert!(!said.contains("hunter2"), "{said}");
}

fn cat(server: &Server, arguments: &[&str]) -> Vec<u8> {
    let output = remote(server, &[&["cat"], arguments].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    output.stdout
}

fn cat_bare(arguments: &[&str]) -> Vec<u8> {
    let output = bare(&[&["cat"], arguments].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    output.stdout
}

/// Requests of a method whose head has a text.
fn asked(server: &Server, method: &str, part: &str) -> usize {
    let asked = server.asked();
    asked.iter().filter(|asked| asked.method == method && asked.head.contains(part)).count()
}

#[track_caller]
fn wait_until(is_so: impl Fn() -> bool) {
    aquifer_testkit::watchdog::wait_until("a command", is_so);
}

/// Ended with the test.
struct Running(Child);

impl Running {
    fn new(mut command: Command) -> Running {
        Running(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// The exit status and what was said.
    fn end(&mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.0.wait().unwrap().code(), said)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn cat_prints_objects_and_ranges() {
    let all = pattern(LONG, 1);
    let server = Server::new(all.clone());
    server.put("bucket/two words/%x", b"second".to_vec());
    let url = "s3://bucket/dir/object.bin";
    assert!(cat(&server, &[url]) == all);
    assert_eq!(cat(&server, &["s3://bucket/two%20words/%25x"]), b"second");
    let both = cat(&server, &[url, "s3://bucket/two words/%25x", url]);
    assert!(both == [&all[..], b"second", &all].concat());
    for (range, expected) in [
        ("..", &all[..]),
        ("10..20", &all[10..20]),
        ("1M..", &all[MIB..]),
        ("..4K", &all[..4096]),
        ("20M..1G", &all[20 * MIB..]),
        ("5..5", &[]),
    ] {
        assert!(cat(&server, &["--range", range, url]) == expected, "{range}");
    }
    // Other ways to say where it is.
    let output = bare(&["cat", &server.url()]).output().unwrap();
    assert!(output.stdout == all);
    let mut by_environment = bare(&["cat", url]);
    by_environment.env("AWS_ENDPOINT_URL", server.endpoint()).env("AWS_ALLOW_HTTP", "true");
    by_environment.env("AWS_REGION", "nowhere-1");
    assert!(by_environment.output().unwrap().stdout == all);
    server.plan(|_| Answer::Proper);
    cat(&server, &["--anonymous", url]);
    assert_eq!(asked(&server, "GET", "authorization"), 0);
    let place = Place::new();
    fs::write(place.path("file"), "text").unwrap();
    let output = bare(&["cat", &format!("file://{}", place.text("file"))]).output().unwrap();
    assert_eq!(output.stdout, b"text");
}

#[test]
fn what_is_read_with_a_tier_is_downloaded_once() {
    let all = pattern(LONG, 1);
    let (server, place) = (Server::new(all.clone()), Place::new());
    server.put("bucket/tree/short", b"short".to_vec());
    server.put("bucket/tree/empty", vec![]);
    server.put("bucket/tree/two words/%x", pattern(3 * MIB, 2));
    let (tier, url) = (place.text("tier"), "s3://bucket/dir/object.bin");
    let sent = || {
        let sent = server.counts("bucket/", "GET").sent_bytes;
        server.reset_counts();
        sent
    };
    // A part, and then what is missing; each opening asks for a byte.
    assert!(cat(&server, &["--tier", &tier, "--range", "1M..5M", url]) == all[MIB..5 * MIB]);
    assert!((4 * MIB as u64..5 * MIB as u64).contains(&sent()));
    assert!(cat(&server, &[url, "--tier", &tier]) == all);
    assert!(sent() <= (LONG - 4 * MIB) as u64 + 2);
    let mut by_environment = remote(&server, &["cat", url, url, "--range", "3..20M"]);
    let output = by_environment.env("AQUIFER_TIER", &tier).output().unwrap();
    assert!(output.stdout == [&all[3..20 * MIB], &all[3..20 * MIB]].concat());
    assert_eq!(sent(), 2);
    // To files, and a tree.
    let copy = place.text("copy");
    works(&server, &["get", url, "--tier", &tier, &copy]);
    assert!(fs::read(&copy).unwrap() == all);
    assert!(sent() <= 2);
    // Beside a listing.
    for (tree, most) in [("one", 4 * MIB as u64), ("two", 4096)] {
        let to = place.text(tree);
        works(&server, &["get", "-rT", "s3://bucket/tree", &to, "--tier", &tier]);
        assert!(fs::read(place.path(tree).join("two words/%x")).unwrap() == pattern(3 * MIB, 2));
        assert_eq!(fs::read(place.path(tree).join("short")).unwrap(), b"short");
        assert_eq!(fs::read(place.path(tree).join("empty")).unwrap(), b"");
        let modified = fs::metadata(place.path(tree).join("short")).unwrap().mtime();
        assert!(modified > 0);
        assert!(sent() <= most, "{tree}");
    }
    // Of an HTTP server too. Weak ETags and files are not kept.
    let http = [&server.url()[..], "--tier", &tier];
    assert!(cat_bare(&http) == all);
    server.reset_counts();
    assert!(cat_bare(&http) == all);
    assert_eq!(sent(), 1);
    server.plan(|_| Answer::Etag(Some("W/\"1\"")));
    assert!(cat(&server, &["--unversioned", "--tier", &tier, url]) == all);
    server.plan(|_| Answer::Proper);
    assert!(cat_bare(&[&format!("file://{copy}"), "--tier", &tier]) == all);
    // A tier that takes nothing costs nothing twice; one that cannot be used is an error.
    let small = place.text("small");
    worked(
        bare(&["cache", "info", "--set-budget", "0", "--dir", &small]).output().unwrap(),
        "small",
    );
    server.reset_counts();
    assert!(cat(&server, &["--tier", &small, url]) == all);
    assert!(sent() <= LONG as u64 + (17 << 20));
    fails(&server, &["cat", url, "--tier", &copy], &[&copy]);
    fails(
        &server,
        &["cat", "s3://bucket/none", "--tier", &tier],
        &["s3://bucket/none", "no such object"],
    );
    fails(
        &server,
        &["get", "s3://bucket/none", "--tier", &tier, "x"],
        &["s3://bucket/none", "No such"],
    );
}

#[test]
fn credentials_come_from_a_program() {
    let (server, place) = (Server::new(pattern(100, 1)), Place::new());
    let url = "s3://bucket/dir/object.bin";
    // A script, and how often it ran. It is an argument of the shell, so that no file is run that was just written.
    let write = |text: &str| fs::write(place.path("a script"), text).unwrap();
    let command = format!("sh '{}' --profile \"a team\"", place.text("a script"));
    let printed = |rest: &str| {
        format!(
            "echo x >> '{}'\n[ \"$2\" = 'a team' ] || exit 9\n\
             printf '{{\"Version\": 1, \"AccessKeyId\": \"PROFILE\", \"SecretAccessKey\": \"hunter2\"{rest}}}'",
            place.text("ran")
        )
    };
    write(&printed(
        r#", "SessionToken": "of-the-session", "Expiration": "2100-01-01T00:00:00+00:00""#,
    ));
    // Once for two stores, of which one is a device.
    let tier = place.text("tier");
    server.plan(|_| Answer::Proper);
    cat(&server, &[url, "--tier", &tier, "--credential-process", &command]);
    assert_eq!(fs::read_to_string(place.path("ran")).unwrap(), "x\n");
    for asked in server.asked().iter() {
        assert!(asked.head.contains("Credential=PROFILE/"), "{}", asked.head);
        assert!(asked.head.contains("x-amz-security-token: of-the-session"), "{}", asked.head);
    }
    // Again when they expire; by the environment, and not for other URLs.
    write(&printed(r#", "Expiration": "2001-01-01T00:00:00Z""#));
    let mut by_environment = remote(&server, &["cat", url]);
    let output = by_environment.env("AQUIFER_CREDENTIAL_PROCESS", &command).output().unwrap();
    assert!(output.stdout == pattern(100, 1));
    assert!(fs::read_to_string(place.path("ran")).unwrap().lines().count() >= 3);
    fs::remove_file(place.path("ran")).unwrap();
    cat_bare(&[&server.url(), "--credential-process", &command]);
    assert!(!place.path("ran").exists());
    // Failures: the first line, and nothing of what it printed.
    let refused = |command: &str, parts: &[&str]| {
        fails(&server, &["cat", url, "--credential-process", command], parts);
    };
    write(
        "echo hunter2; echo >&2; echo 'The SSO session has expired' >&2; echo hunter2 >&2; exit 3",
    );
    refused(
        &command,
        &["sh supplied no credentials", "exit status: 3", ": The SSO session has expired"],
    );
    write("echo '{\"AccessKeyId\": [\"hunter2\"]}'");
    refused(&command, &["what sh printed are no credentials", "export-credentials"]);
    refused("no-such-program-here hunter2", &["cannot run no-such-program-here", "No such file"]);
    refused("sh 'hunter2", &["--credential-process", "quotation mark"]);
    refused("", &["--credential-process", "no words"]);
    let both = ["cat", url, "--anonymous", "--credential-process", "x"];
    says(&failed(bare(&both).output().unwrap(), 2, &both), &["--anonymous"]);
}

#[test]
fn cat_says_what_is_wrong() {
    let server = Server::new(pattern(LONG, 1));
    let url = "s3://bucket/dir/object.bin";
    let refused = |answer: Answer, arguments: &[&str], parts: &[&str]| {
        server.plan(move |_| answer.clone());
        fails(&server, &[&["cat"], arguments].concat(), parts);
    };
    refused(Answer::Proper, &["s3://bucket/none"], &["s3://bucket/none", "no such object"]);
    refused(Answer::Proper, &["s3://bucket/dir/"], &["s3://bucket/dir", "no object", "get -r"]);
    refused(Answer::Proper, &["s3://bucket"], &["no object"]);
    refused(Answer::Proper, &["s3:///key"], &["no bucket"]);
    refused(Answer::Proper, &["s4://bucket/key"], &["s4://bucket/key", "unknown scheme", "s3, gs"]);
    refused(Answer::Proper, &["--range", "30M..", url], &["has 20983865 bytes"]);
    refused(Answer::Status(403), &[url], &["permission denied", "403", "credentials"]);
    refused(Answer::Etag(None), &[url], &["no strong ETag", "unversioned"]);
    refused(Answer::Silence, &[url, "--timeout", "0.2"], &["no complete answer within 200ms"]);
    let nowhere =
        ["cat", url, "--endpoint", "http://127.0.0.1:1", "--allow-http", "--timeout", "2"];
    let said = failed(bare(&nowhere).output().unwrap(), 1, &nowhere);
    says(&said, &["s3://bucket/dir/object.bin"]);
    let said =
        failed(bare(&["cat", "https://user:hunter2@host/x"]).output().unwrap(), 1, "password");
    assert!(!said.contains("hunter2"), "{said}");
    for wrong in [["--range", "9..5"], ["--timeout", "0"], ["--endpoint", ""]] {
        let output = remote(&server, &[&["cat", url], &wrong[..]].concat()).output().unwrap();
        assert!([Some(1), Some(2)].contains(&output.status.code()), "{wrong:?}");
    }
    // What works is printed all the same.
    server.plan(|_| Answer::Proper);
    server.put("bucket/b", b"text".to_vec());
    let output = remote(&server, &["cat", "s3://bucket/none", "s3://bucket/b"]).output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(1), &b"text"[..]));
    // An object that is replaced halfway: bytes of the first version, and an error.
    server.plan(|number| if number < 3 { Answer::Proper } else { Answer::Etag(Some("\"other\"")) });
    server.ignore_if_match();
    let output = remote(&server, &["cat", url]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    says(text(&output.stderr), &["changed"]);
    assert!(pattern(LONG, 1).starts_with(&output.stdout));
    // With weak ETags as well, if that is allowed.
    server.plan(|_| Answer::Etag(Some("W/\"1\"")));
    assert!(cat(&server, &["--unversioned", url]) == pattern(LONG, 1));
}

#[test]
fn cat_ends_quietly_with_its_reader() {
    let server = Server::new(vec![]);
    server.put_generated("bucket/large", 1 << 30, 1);
    let mut running = Running::new(remote(&server, &["cat", "s3://bucket/large"]));
    let mut first = [0; 1000];
    running.0.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(running.end(), (Some(0), String::new()));
}

#[test]
fn files_go_to_a_bucket_and_come_back() {
    let (server, place) = (Server::new(vec![]), Place::new());
    let pool = place.text("data.pool");
    aquifer_pool(&pool);
    let long = pattern(LONG, 2);
    fs::write(place.path("long"), &long).unwrap();
    fs::write(place.path("short"), "text").unwrap();
    let holes = fs::File::create(place.path("holes")).unwrap();
    holes.set_len(3 * MIB as u64).unwrap();
    drop(holes);
    let [long_path, short, holes] = ["long", "short", "holes"].map(|name| place.text(name));

    let report = works(&server, &["put", "--json", &long_path, &short, &holes, "s3://bucket/up/"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["files"], &report["failed"]), (&3.into(), &0.into()));
    assert!(server.get("bucket/up/long").unwrap() == long);
    assert_eq!(server.get("bucket/up/short").unwrap(), b"text");
    assert!(server.get("bucket/up/holes").unwrap() == vec![0; 3 * MIB]);
    works(&server, &["put", &short, "s3://bucket/as/a%20name"]);
    assert_eq!(server.get("bucket/as/a name").unwrap(), b"text");

    // Into a pool, to the machine, and from the pool back.
    works(&server, &["put", "s3://bucket/up/long", "s3://bucket/up/short", &format!("{pool}:/")]);
    works(&server, &["get", "s3://bucket/up/short", &format!("{pool}:/other")]);
    works(&server, &["put", &format!("{pool}:/long"), "s3://bucket/from-pool"]);
    works(&server, &["get", &format!("{pool}:/other"), "s3://bucket/from/pool"]);
    works(&server, &["get", "s3://bucket/from-pool", &place.text("back")]);
    works(&server, &["put", "s3://bucket/from/pool", "s3://bucket/copied/"]);
    assert!(bytes(place.path("back")) == long);
    assert_eq!(server.get("bucket/copied/pool").unwrap(), b"text");
    let web = format!("{}/bucket/up/short?X-Signature=hunter2", server.endpoint());
    let into = place.text("");
    worked(bare(&["get", &web, &into]).output().unwrap(), "http");
    let metadata = fs::metadata(place.path("short")).unwrap();
    assert_eq!(metadata.mode() & 0o777, fs::metadata(&long_path).unwrap().mode() & 0o777);
    assert_eq!(bytes(place.path("short")), b"text");
    // A file URL is a path.
    let url = format!("file://{}", place.text("by-url"));
    works(&server, &["get", "s3://bucket/up/short", &url]);
    worked(bare(&["put", &url, &format!("{pool}:/by-url")]).output().unwrap(), "file URL");
    let output = bare(&["cat", &format!("{pool}:/by-url")]).output().unwrap();
    assert_eq!(output.stdout, b"text");
    assert!(server.paths().iter().all(|path| !path.contains(".aquifer-")));
    assert!(names(&place.path("")).iter().all(|name| !name.starts_with(".aquifer-")));
}

fn aquifer_pool(path: &str) {
    crate::support::works(&["pool", "create", path, "--size", "128M"]);
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn trees_keep_their_shape() {
    let (server, place) = (Server::new(vec![]), Place::new());
    let tree = place.path("tree");
    fs::create_dir_all(tree.join("a/b")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    for number in 0..100 {
        fs::write(tree.join(format!("a/{number:03}")), vec![number; number.into()]).unwrap();
    }
    fs::write(tree.join("a/b/deep"), "deep").unwrap();
    fs::write(tree.join("a-b"), "beside").unwrap();
    fs::hard_link(tree.join("a-b"), tree.join("twice")).unwrap();
    let path = tree.to_str().unwrap();
    works(&server, &["put", "-r", path, "s3://bucket/x/"]);
    works(&server, &["put", "-r", path, "s3://bucket/y"]);
    for prefix in ["x/tree", "y"] {
        assert_eq!(server.get(&format!("bucket/{prefix}/a/b/deep")).unwrap(), b"deep");
        assert_eq!(server.get(&format!("bucket/{prefix}/twice")).unwrap(), b"beside");
        assert_eq!(server.get(&format!("bucket/{prefix}/a/007")).unwrap(), [7; 7]);
    }
    assert_eq!(server.paths().len(), 1 + 2 * 103);
    // Markers of directories, as some programs leave them.
    server.put("bucket/y/", vec![]);
    server.put("bucket/y/a/", vec![]);

    server.plan(|_| Answer::Proper);
    server.latency(Duration::from_millis(50));
    let report = works(&server, &["get", "-r", "--json", "s3://bucket/y", &place.text("back")]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["files"], &report["directories"]), (&103.into(), &3.into()));
    // One listing for all, and objects are opened while others are copied.
    assert_eq!(asked(&server, "GET", "list-type=2"), 1);
    assert!(server.most_at_once() > 8, "{}", server.most_at_once());
    server.latency(Duration::ZERO);
    let back = place.path("back");
    assert_eq!(names(&back.join("a")).len(), 101);
    assert_eq!(bytes(back.join("a/b/deep")), b"deep");
    assert_eq!(bytes(back.join("a/099")), [99; 99]);
    works(&server, &["get", "-rT", "s3://bucket/x/tree/a", &place.text("only")]);
    assert_eq!(names(&place.path("only")).len(), 101);
    works(&server, &["get", "-r", "s3://bucket/x/", &place.text("")]);
    assert_eq!(names(&place.path("x")), ["tree"]);
    works(&server, &["get", "-r", "s3://bucket", &place.text("whole")]);
    assert_eq!(names(&place.path("whole")), ["dir", "x", "y"]);

    // Through a pool and back.
    let pool = place.text("data.pool");
    aquifer_pool(&pool);
    works(&server, &["put", "-r", "s3://bucket/y", &format!("{pool}:/")]);
    works(&server, &["put", "-r", &format!("{pool}:/y/a"), "s3://bucket/z"]);
    assert_eq!(server.get("bucket/z/b/deep").unwrap(), b"deep");

    fails(&server, &["get", "s3://bucket/y", &place.text("no")], &["Is a directory", "-r"]);
    fails(&server, &["put", path, "s3://bucket/no"], &["Is a directory", "-r"]);
    fails(&server, &["get", "-r", "s3://bucket/none", &place.text("no")], &["No such file"]);
}

/// What a tree and a bucket cannot share is said, and the rest is copied.
#[test]
fn what_does_not_fit_is_an_error_of_its_own() {
    let (server, place) = (Server::new(vec![]), Place::new());
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("file"), "text").unwrap();
    symlink("file", tree.join("link")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        tree.join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let path = tree.to_str().unwrap();
    let parts = ["s3://bucket/t/link", "symbolic link", "s3://bucket/t/pipe", "a pipe"];
    fails(&server, &["put", "-r", path, "s3://bucket/t"], &parts);
    assert_eq!(server.get("bucket/t/file").unwrap(), b"text");

    // A name of a file and of a directory.
    server.put("bucket/both/a", b"file".to_vec());
    server.put("bucket/both/a/b", b"below".to_vec());
    server.put("bucket/both/c", b"text".to_vec());
    let parts = ["both/a", "Not a directory"];
    fails(&server, &["get", "-r", "s3://bucket/both", &place.text("both")], &parts);
    assert_eq!(bytes(place.path("both/c")), b"text");
    assert_eq!(bytes(place.path("both/a")), b"file");
    // Names that would lead elsewhere.
    server.put("bucket/evil/../../escaped", b"text".to_vec());
    fails(&server, &["get", "-r", "s3://bucket/evil", &place.text("evil")], &["relative segment"]);
    assert!(!place.path("escaped").exists());

    let file = tree.join("file").to_str().unwrap().to_owned();
    for (arguments, parts) in [
        (&["put", &file, "s3://bucket/a//b"][..], &["empty or a relative segment"][..]),
        (&["put", &file, path, "s3://bucket/name"], &["ends with a slash"]),
        (&["put", &file, "https://host/name"], &["read-only"]),
        (&["put", &file, "s3://bucket/x", "s3://bucket/y/"], &["several kinds"]),
        (&["get", "s3://a/x", "s3://b/x", path], &["different stores"]),
        (&["get", "-r", "https://host/", path], &["HTTP server lists nothing"]),
        (&["put", "ftp://host/x", "s3://bucket/y"], &["unknown scheme"]),
        (&["get", "s3://bucket/none", path], &["No such file"]),
        (&["put", "no/such", "s3://bucket/y"], &["No such file"]),
    ] {
        fails(&server, arguments, parts);
    }
    server.plan(|_| Answer::Status(404));
    fails(&server, &["put", &file, "s3://nobucket/x"], &["s3://nobucket/x", "no such bucket"]);
    server.plan(|_| Answer::Status(403));
    fails(&server, &["put", &file, "s3://bucket/x"], &["permission denied"]);
    fails(&server, &["get", "s3://bucket/x", path], &["permission denied"]);
}

#[test]
fn existing_files_and_objects_are_replaced_unless_told_not_to_be() {
    let (server, place) = (Server::new(b"old".to_vec()), Place::new());
    for len in [4, LONG] {
        server.put(PATH, b"old".to_vec());
        fs::write(place.path("new"), pattern(len, 1)).unwrap();
        let new = place.text("new");
        let parts = ["s3://bucket/dir/object.bin", "stays as it is"];
        fails(&server, &["put", "-n", &new, "s3://bucket/dir/object.bin"], &parts);
        assert_eq!(server.get(PATH).unwrap(), b"old");
        works(&server, &["put", "-n", &new, &format!("s3://bucket/free/{len}")]);
        works(&server, &["put", &new, "s3://bucket/dir/object.bin"]);
        assert!(server.get(PATH).unwrap() == pattern(len, 1));
    }
    let there = place.text("there");
    fs::write(&there, "old").unwrap();
    fails(&server, &["get", "-n", "s3://bucket/free/4", &there], &["File exists"]);
    assert_eq!(bytes(&there), b"old");
    works(&server, &["get", "s3://bucket/free/4", &there]);
    assert_eq!(bytes(&there), pattern(4, 1));
}

#[test]
fn an_interrupted_upload_is_removed() {
    let (server, place) = (Server::new(vec![]), Place::new());
    fs::write(place.path("long"), pattern(LONG, 1)).unwrap();
    // Parts hang until the client gives up.
    server.plan_each(|_, asked| match asked.head.contains("partNumber=2") {
        true => Answer::Silence,
        false => Answer::Proper,
    });
    let arguments = ["put", "--timeout", "3600", &place.text("long"), "s3://bucket/up"];
    let mut running = Running::new(remote(&server, &arguments));
    wait_until(|| asked(&server, "PUT", "partNumber=2") > 0);
    running.signal(Signal::INT);
    let (status, said) = running.end();
    assert_eq!(status, Some(1), "{said}");
    says(&said, &["interrupted; 0 files were copied completely"]);
    assert_eq!(asked(&server, "DELETE", "uploadId="), 1);
    assert_eq!(server.get("bucket/up"), None);
}

/// Whatever is killed leaves old files and objects, or new ones, and at most a file with a name of its own.
#[test]
fn a_kill_leaves_nothing_half_done() {
    let (server, place) = (Server::new(pattern(LONG, 1)), Place::new());
    let (long, target) = (place.text("long"), place.text("target"));
    fs::write(&long, pattern(LONG, 2)).unwrap();
    fs::write(&target, "old").unwrap();
    server.plan_each(|_, asked| {
        let is_late = asked.head.contains("partNumber=2") || asked.head.contains("range: bytes=10");
        if is_late { Answer::Silence } else { Answer::Proper }
    });
    let mut running = Running::new(remote(&server, &["put", &long, "s3://bucket/dir/object.bin"]));
    wait_until(|| asked(&server, "PUT", "partNumber=2") > 0);
    running.signal(Signal::KILL);
    running.end();
    assert!(server.get(PATH).unwrap() == pattern(LONG, 1));
    let mut running =
        Running::new(remote(&server, &["get", "s3://bucket/dir/object.bin", &target]));
    wait_until(|| asked(&server, "GET", "range: bytes=10") > 0);
    running.signal(Signal::KILL);
    running.end();
    assert_eq!(bytes(&target), b"old");
    let left =
        names(&place.path("")).into_iter().filter(|name| *name != "long" && *name != "target");
    assert!(
        left.clone().all(|name| name.starts_with(".aquifer-")),
        "{:?}",
        left.collect::<Vec<_>>()
    );
}

/// A download that fails leaves the old file and nothing else; one into a pool as well.
#[test]
fn a_failed_download_leaves_nothing() {
    let (server, place) = (Server::new(pattern(LONG, 1)), Place::new());
    let (target, pool) = (place.text("target"), place.text("data.pool"));
    fs::write(&target, "old").unwrap();
    aquifer_pool(&pool);
    let entries = place.entries();
    server.ignore_if_match();
    let pooled = format!("{pool}:/target");
    for answer in [Answer::Status(403), Answer::Etag(Some("\"other\"")), Answer::Long(1)] {
        for (command, to) in [("get", &target), ("put", &pooled)] {
            let answer = answer.clone();
            server.plan(move |number| if number < 4 { Answer::Proper } else { answer.clone() });
            fails(&server, &[command, "s3://bucket/dir/object.bin", to], &["object.bin"]);
        }
    }
    assert_eq!(bytes(&target), b"old");
    assert_eq!(place.entries(), entries);
    assert_eq!(crate::support::works(&["ls", "-a", &format!("{pool}:/")]), "");
    // A directory that cannot be written to.
    let closed = place.path("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).unwrap();
    server.plan(|_| Answer::Proper);
    if rustix::process::geteuid().is_root() {
        println!("skipped in part: root may write to any directory");
    } else {
        fails(
            &server,
            &["get", "s3://bucket/dir/object.bin", closed.to_str().unwrap()],
            &["denied"],
        );
    }
}

#[test]
fn stat_shows_what_remote_devices_request() {
    let server = Server::new(pattern(LONG, 1));
    let device = RemoteDevice::open(&server.url()).unwrap();
    let name = "remote-command-test";
    let cache = Cache::builder().budget_bytes(8 << 20).publish(name).build().unwrap();
    let pages = cache.pages(device).unwrap();
    pages.get(PageId(0)).unwrap();
    let stat = |arguments: &[&str]| crate::support::works(&[&["stat", name], arguments].concat());
    let device = || -> Value {
        let seen: Value = serde_json::from_str(&stat(&["--json"])).unwrap();
        seen["caches"][0]["devices"][0].clone()
    };
    wait_until(|| device()["counters"]["delivered_bytes"].as_u64() >= Some(4096));
    let device = device();
    let url = format!("{}/{PATH}?…", server.endpoint());
    assert_eq!(device["name"], url);
    assert!(device["counters"]["requests"].as_u64() >= Some(2), "{device}");
    says(&stat(&[]), &[&url, " requests, ", " received, ", "/s, cost about 0.00000"]);
    let metrics = stat(&["--openmetrics"]);
    let label = format!("device=\"{url}\"}} ");
    for metric in ["requests_total", "received_bytes_total", "cost_total", "latency_seconds"] {
        let is_it = |line: &str| {
            line.starts_with(&format!("aquifer_device_{metric}{{")) && line.contains(&label)
        };
        assert!(metrics.lines().any(is_it), "{metric}: {metrics}");
    }
    assert!(!metrics.contains("hunter2"));
}

#[test]
fn each_url_of_an_http_server_is_its_own() {
    let (one, other) = (Server::new(b"one".to_vec()), Server::new(b"other".to_vec()));
    let place = Place::new();
    let directory = place.path("d");
    fs::create_dir(&directory).unwrap();
    let (pool, directory_text) = (place.text("x.pool"), directory.to_str().unwrap());
    aquifer_pool(&pool);
    let pooled = format!("{pool}:/");
    for (command, destination) in [("get", directory_text), ("put", &pooled)] {
        let arguments = [command, &one.url(), &other.url(), destination];
        let said = failed(bare(&arguments).output().unwrap(), 1, command);
        says(&said, &[&format!("http://{}/", one.address()), "one at a time"]);
        assert!(!said.contains("hunter2"), "{said}");
    }
    assert!(names(&directory).is_empty());
    assert_eq!(crate::support::works(&["ls", &format!("{pool}:/")]), "");
    crate::support::works(&["get", &other.url(), directory_text]);
    let copied = names(&directory);
    assert_eq!(fs::read(directory.join(&copied[0])).unwrap(), b"other");
}

/// Consoles of S3 make a folder by an empty object whose key ends with a slash.
#[test]
fn folders_of_consoles_are_left_out() {
    let (server, place) = (Server::empty(), Place::new());
    for (key, content) in
        [("p/", ""), ("p/empty/", ""), ("p/full/", ""), ("p/full/x", "some"), ("p/zero", "")]
    {
        server.put(&format!("bucket/{key}"), content);
    }
    let target = place.path("target");
    works(&server, &["get", "-rT", "s3://bucket/p", target.to_str().unwrap()]);
    assert_eq!(names(&target), ["full", "zero"]);
    assert_eq!(fs::read(target.join("full/x")).unwrap(), b"some");
}
