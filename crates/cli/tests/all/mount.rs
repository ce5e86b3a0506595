//! `aquifer mount`, `umount`, `run` and `mount.fuse.aquifer` from a user's perspective.
//!
//! Each test that mounts runs in a process of its own, the first one of a new PID namespace, with a
//! mount namespace of its own. When it ends, however it ends, the kernel kills all that it has
//! started, and with the servers their connections end: nothing can be left behind. `child::play`
//! ends it after 90 seconds. Without `/dev/fuse`, or without the right to mount, the tests are
//! skipped, with a line that says so.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::support::{Place, aquifer, failed, fails, json, says, text, worked, works};
use aquifer_testkit::child;

/// A pool, and a directory to mount it at.
struct Pool {
    place: Place,
    pool: String,
    at: PathBuf,
}

impl Pool {
    fn new() -> Pool {
        let place = Place::public();
        let pool = place.text("data.pool");
        works(&["pool", "create", &pool, "--size", "8M"]);
        let at = place.path("mounted here");
        fs::create_dir(&at).unwrap();
        Pool { place, pool, at }
    }

    fn at(&self) -> &str {
        self.at.to_str().unwrap()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    fn mount(&self, options: &[&str]) {
        assert_eq!(works(&[&["mount"], options, &[&self.pool, self.at()]].concat()), "");
    }

    fn umount(&self) {
        assert_eq!(works(&["umount", self.at()]), "");
        assert!(!self.is_mounted());
    }

    fn is_mounted(&self) -> bool {
        works(&["mount"]).contains(self.at())
    }

    /// The library sees the files.
    fn holds(&self, name: &str, content: &str) {
        assert_eq!(works(&["cat", &format!("{}:/{name}", self.pool)]), content);
    }

    fn sound(&self) {
        works(&["pool", "check", &self.pool]);
    }
}

fn a_mounted_pool_is_a_file_system_until_it_is_unmounted() {
    let pool = Pool::new();
    pool.mount(&[]);
    says(&works(&["mount"]), &[&pool.pool, pool.at()]);
    says(
        &works(&["mount", "--json"]),
        &["\"mounts\"", &pool.pool, pool.at(), "\"read_only\": false"],
    );
    fs::write(pool.file("f"), "text").unwrap();
    fs::create_dir(pool.file("d")).unwrap();

    // Other writers learn what to do, readers are let in.
    let refused = fails(&["mkdir", &format!("{}:/x", pool.pool)], 1);
    says(&refused, &["only process", &pool.pool, "aquifer umount", pool.at()]);
    says(&fails(&["mount", &pool.pool, pool.at()], 1), &["only process", "aquifer umount"]);
    says(&works(&["ls", &format!("{}:/", pool.pool)]), &["d", "f"]);

    // In use, it stays.
    let held = fs::File::open(pool.file("f")).unwrap();
    says(&fails(&["umount", pool.at()], 1), &["in use", "fuser", "--lazy"]);
    assert_eq!(fs::read(pool.file("f")).unwrap(), b"text");
    drop(held);
    pool.umount();
    // And all of it is in the pool, to which others can write at once.
    pool.holds("f", "text");
    works(&["mkdir", &format!("{}:/x", pool.pool)]);
    says(&fails(&["umount", pool.at()], 1), &["no pool is mounted at", pool.at()]);
    pool.sound();
}

/// The kernel takes sources of 255 bytes.
fn a_pool_with_a_long_path_is_mounted() {
    let pool = Pool::new();
    let deep = pool.place.path(&"d".repeat(250));
    fs::create_dir(&deep).unwrap();
    let path = deep.join("data.pool");
    fs::rename(&pool.pool, &path).unwrap();
    works(&["mount", path.to_str().unwrap(), pool.at()]);
    fs::write(pool.file("f"), "text").unwrap();
    pool.umount();
    assert_eq!(works(&["cat", &format!("{}:/f", path.display())]), "text");
}

fn a_shared_mount_leaves_the_pool_to_others() {
    let pool = Pool::new();
    let second = pool.place.path("second");
    fs::create_dir(&second).unwrap();
    pool.mount(&["--shared"]);
    works(&["mount", "--shared", &pool.pool, second.to_str().unwrap()]);
    works(&["mkdir", &format!("{}:/d", pool.pool)]);
    fs::write(pool.file("d/f"), "text").unwrap();
    assert_eq!(fs::read(second.join("d/f")).unwrap(), b"text");
    pool.holds("d/f", "text");
    works(&["mv", &format!("{}:/d/f", pool.pool), &format!("{}:/g", pool.pool)]);
    assert!(!pool.file("d/f").exists() && second.join("g").exists());
    // It is shared by all or by none.
    let third = pool.place.path("third");
    fs::create_dir(&third).unwrap();
    let refused = fails(&["mount", &pool.pool, third.to_str().unwrap()], 1);
    says(&refused, &["open for writing", "aquifer umount", "--shared"]);
    fails(&["mount", "--shared", "--cache", "write-back", &pool.pool, pool.at()], 2);
    works(&["umount", second.to_str().unwrap()]);
    pool.holds("g", "text");
    pool.umount();
    pool.holds("g", "text");
}

/// What a server is replaced by may be anything. It may also be gone.
fn a_program_that_does_not_serve_is_given_up() {
    let pool = Pool::new();
    let (path, link) = (pool.place.path("program"), pool.place.path("link"));
    fs::copy(aquifer().get_program(), &path).unwrap();
    symlink(&pool.at, &link).unwrap();
    let mut command = Command::new(&path);
    worked(command.args(["mount", &pool.pool]).arg(&link).output().unwrap(), "mount");
    fs::remove_file(&path).unwrap();
    fs::write(&path, "#!/bin/sh\nexec sleep 1000\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let [keeper] = &processes("mount-keeper")[..] else { panic!("one keeper") };
    assert!(Command::new("kill").args(["-HUP", keeper]).status().unwrap().success());
    while processes("sleep").is_empty() {}
    fs::write(pool.file("f"), "text").unwrap();
    assert!(processes("sleep").is_empty());
    // By the same path as it was mounted.
    works(&["umount", link.to_str().unwrap()]);
    pool.holds("f", "text");
}

/// The end of a pipe that the caller has would keep its reader waiting.
fn a_mount_keeps_no_descriptors_of_its_caller() {
    let pool = Pool::new();
    let mut caller = Command::new("sh");
    let program = aquifer().get_program().to_owned();
    caller.args(["-c", "exec 9>&1; \"$@\"", "sh"]).arg(program);
    caller.args(["mount", &pool.pool, pool.at()]);
    assert_eq!(worked(caller.output().unwrap(), "with a descriptor"), "");
    pool.umount();
}

fn a_lazily_unmounted_pool_serves_those_that_use_it() {
    let pool = Pool::new();
    pool.mount(&["--cache", "write-through"]);
    fs::write(pool.file("f"), "text").unwrap();
    let mut held = fs::File::open(pool.file("f")).unwrap();
    works(&["umount", "--lazy", pool.at()]);
    assert!(!pool.is_mounted() && !pool.file("f").exists());
    let mut content = String::new();
    held.read_to_string(&mut content).unwrap();
    assert_eq!(content, "text");
    says(&fails(&["mkdir", &format!("{}:/x", pool.pool)], 1), &["only process"]);
    drop(held);
    pool.sound();
}

fn options_are_what_they_say() {
    let pool = Pool::new();
    let flags = |pool: &Pool| {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let is_ours = |line: &&str| line.contains("fuse.aquifer") && line.contains(&pool.pool);
        table.lines().find(is_ours).expect("it is mounted").to_owned()
    };
    pool.mount(&["--read-only", "--no-exec"]);
    assert_eq!(fs::write(pool.file("f"), "").unwrap_err().raw_os_error(), Some(30), "EROFS");
    says(&flags(&pool), &["ro,", "nosuid", "nodev", "noexec"]);
    says(&works(&["mount"]), &["read-only"]);
    pool.umount();

    pool.mount(&["--suid", "--dev", "--allow-other", "--no-xattrs"]);
    let line = flags(&pool);
    assert!(
        !line.contains("nosuid") && !line.contains("nodev") && !line.contains("noexec"),
        "{line}"
    );
    says(&line, &["allow_other"]);
    pool.umount();
    pool.sound();
}

/// A command whose first line of output says that it is ready.
fn foreground(pool: &Pool) -> (Child, String) {
    let mut command = aquifer();
    command.args(["mount", "--foreground", &pool.pool, pool.at()]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    (child, first)
}

fn signal(child: &Child, name: &str) {
    let process = child.id().to_string();
    assert!(Command::new("kill").args([name, &process]).status().unwrap().success());
}

fn in_the_foreground_it_ends_with_a_signal_or_when_it_is_unmounted() {
    let pool = Pool::new();
    let (child, said) = foreground(&pool);
    says(&said, &["mounted", &pool.pool, pool.at()]);
    fs::write(pool.file("f"), "text").unwrap();
    signal(&child, "-TERM");
    worked(child.wait_with_output().unwrap(), "SIGTERM");
    assert!(!pool.is_mounted());
    pool.holds("f", "text");

    // As long as it is used, the first signal is refused. Nothing reads what it says after that.
    let (mut child, _) = foreground(&pool);
    let mut held = fs::File::create(pool.file("g")).unwrap();
    signal(&child, "-TERM");
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    says(&line, &["in use"]);
    assert!(pool.is_mounted());

    // Another server takes over, and programs go on.
    let before = processes("mount-server");
    signal(&child, "-HUP");
    held.write_all(b"text").unwrap();
    held.sync_all().unwrap();
    while processes("mount-server").iter().any(|process| before.contains(process)) {}
    assert_eq!(fs::read(pool.file("g")).unwrap(), b"text");

    // The second time, it is refused no more.
    signal(&child, "-TERM");
    while pool.is_mounted() {}
    held.write_all(b"more").unwrap();
    drop(held);
    worked(child.wait_with_output().unwrap(), "a second signal");
    pool.holds("g", "textmore");
    pool.sound();
}

fn what_cannot_be_mounted_is_an_error_that_says_why() {
    let pool = Pool::new();
    let absent = pool.place.text("absent");
    says(&fails(&["mount", &absent, pool.at()], 1), &["absent", "No such file"]);
    says(&fails(&["mount", &pool.pool, &absent], 1), &["absent", "No such file"]);
    fs::write(&absent, vec![1; 1 << 20]).unwrap();
    says(&fails(&["mount", &pool.pool, &absent], 1), &["absent", "Not a directory"]);
    fails(&["mount", &absent, pool.at()], 1);
    fails(&["mount", "--foreground", &absent, pool.at()], 1);
    fails(&["mount", &pool.pool], 2);
    fails(&["run", "--pool", "data.pool", "--", "true"], 2);
    // Its server could not be started again.
    let above = pool.at.parent().unwrap().to_str().unwrap();
    says(&fails(&["mount", &pool.pool, above], 1), &[&pool.pool, "below", "elsewhere"]);
    assert!(!pool.is_mounted());
    pool.sound();
}

/// Runs a command with the pool, as the user that may or may not do so.
fn run_in(pool: &Pool, script: &str, user: Option<u32>) -> Output {
    let mut command = aquifer();
    let place = format!("{}:{}", pool.pool, pool.at());
    command.args(["run", "--pool", &place, "--", "sh", "-c", script, "sh", pool.at()]);
    if let Some(user) = user {
        command.uid(user).gid(user).current_dir("/");
    }
    command.output().unwrap()
}

fn a_command_sees_the_pool_that_nothing_else_sees() {
    let pool = Pool::new();
    let ran = run_in(&pool, "echo text > \"$1/f\"; cat \"$1/f\"; echo said >&2; exit 7", None);
    assert_eq!(
        (ran.status.code(), text(&ran.stdout), text(&ran.stderr)),
        (Some(7), "text\n", "said\n")
    );
    assert!(!pool.is_mounted());
    assert_eq!(fs::read_dir(&pool.at).unwrap().count(), 0);
    pool.holds("f", "text\n");
    assert_eq!(run_in(&pool, "kill -KILL $$", None).status.code(), Some(128 + 9));

    let place = format!("{}:{}", pool.pool, pool.at());
    let mut there = aquifer();
    there.args(["run", "--pool", &place, "--", "cat", "f"]).current_dir(&pool.at);
    assert_eq!(worked(there.output().unwrap(), "in the directory"), "text\n");
    for (program, status) in [("/no/such/program", 127), (&*pool.pool, 126)] {
        let ran = aquifer().args(["run", "--pool", &place, "--", program]).output().unwrap();
        says(&failed(ran, status, program), &["cannot run", program]);
    }
    // It may unmount it.
    let own = aquifer().get_program().to_str().unwrap().to_owned();
    let ran = run_in(&pool, &format!("{own} umount \"$1\"; exit 5"), None);
    assert_eq!((ran.status.code(), text(&ran.stderr)), (Some(5), ""));
    // Of user 0 without the right to mount, it may not mount in its namespace either.
    let without = ["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"];
    let mut contained = Command::new("setpriv");
    contained.args(without).arg(aquifer().get_program());
    contained.args(["run", "--pool", &place, "--", "grep", "CapEff", "/proc/self/status"]);
    match contained.output() {
        Ok(ran) if ran.status.success() => {
            let rights = u64::from_str_radix(text(&ran.stdout)[7..].trim(), 16).unwrap();
            assert_eq!(rights & 1 << 21, 0, "{rights:x}");
        }
        refused => eprintln!("a process of user 0 without rights is not tested: {refused:?}"),
    }
    // It takes signals as any program does.
    let blocked = ["grep", "SigBlk", "/proc/self/status"];
    let mut usual = Command::new(blocked[0]);
    let usual = worked(usual.args(&blocked[1..]).output().unwrap(), "usual");
    let arguments = [&["run", "--pool", &place, "--"], &blocked[..]].concat();
    assert_eq!(works(&arguments), usual);
    let mut asked = aquifer();
    asked.args(["run", "--pool", &place, "--", "sh", "-c", "echo ready; exec sleep 1000"]);
    let mut asked = asked.stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(asked.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    signal(&asked, "-TERM");
    assert_eq!(asked.wait().unwrap().code(), Some(128 + 15));
    // What the command leaves behind has it until it ends.
    let left = "cd \"$1\"; sleep 1000 > /dev/null 2>&1 & echo $!";
    let ran = run_in(&pool, left, None);
    says(text(&ran.stderr), &["left behind", pool.at()]);
    assert_eq!(ran.status.code(), Some(0));
    assert!(!pool.is_mounted());
    let change = ["mkdir", &format!("{}:/later", pool.pool)];
    says(&fails(&change, 1), &["only process"]);
    let left = text(&ran.stdout).trim();
    assert!(Command::new("kill").args(["-KILL", left]).status().unwrap().success());
    while crate::support::run(&change).status.code() != Some(0) {}
    pool.sound();
}

/// The processes with this argument. There are no others in this PID namespace than those of a test.
fn processes(argument: &str) -> Vec<String> {
    let all = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    let is_one = |process: &String| {
        let line = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        line.split(|&byte| byte == 0).any(|it| it == argument.as_bytes())
    };
    all.filter_map(|name| name.into_string().ok()).filter(is_one).collect()
}

fn kill(process: &str) {
    assert!(Command::new("kill").args(["-KILL", process]).status().unwrap().success());
}

fn a_mount_outlives_its_server_and_ends_with_its_keeper() {
    let pool = Pool::new();
    let log = pool.place.text("log");
    pool.mount(&["--log", &log]);
    let mut held = fs::File::create(pool.file("f")).unwrap();
    for _ in 0..5 {
        let [server] = &processes("mount-server")[..] else { panic!("one server") };
        held.write_all(b"text").unwrap();
        kill(server);
        held.sync_all().unwrap();
        fs::create_dir(pool.file(server)).unwrap();
    }
    drop(held);
    assert_eq!(fs::read(pool.file("f")).unwrap(), b"text".repeat(5));
    assert_eq!(fs::read_to_string(&log).unwrap().matches("the server has ended").count(), 5);
    pool.umount();
    assert!(processes("mount-keeper").is_empty() && processes("mount-server").is_empty());
    pool.holds("f", &"text".repeat(5));
    pool.sound();

    // Without a keeper there is no server, and what is left of the mount can be removed.
    pool.mount(&[]);
    let all = [processes("mount-keeper"), processes("mount-server")].concat();
    all.iter().for_each(|process| kill(process));
    while fs::read(pool.file("f")).is_ok() {}
    if pool.is_mounted() {
        pool.umount();
    }
    pool.holds("f", &"text".repeat(5));
    pool.sound();

    // A command that is killed leaves no mount.
    let mut command = aquifer();
    let place = format!("{}:{}", pool.pool, pool.at());
    command.args(["run", "--pool", &place, "--", "sh", "-c", "echo started; exec sleep 1000"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert_eq!(first, "started\n");
    child.kill().unwrap();
    child.wait().unwrap();
    let change = ["mkdir", &format!("{}:/later", pool.pool)];
    while crate::support::run(&change).status.code() != Some(0) {}
    pool.sound();
}

const NOBODY: u32 = 65534;

fn without_privileges_namespaces_do_or_the_error_says_what_is_missing() {
    let pool = Pool::new();
    let own = |path: &Path| std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    own(&pool.at);
    own(pool.at.parent().unwrap());
    fs::remove_file(&pool.pool).unwrap();
    let as_nobody = |arguments: &[&str]| {
        aquifer().args(arguments).uid(NOBODY).gid(NOBODY).current_dir("/").output().unwrap()
    };
    worked(as_nobody(&["pool", "create", &pool.pool, "--size", "8M"]), "create");
    // A device of this namespace's own, with the mode that it takes.
    let device = |mode: u32| {
        let path = pool.place.text(&format!("fuse-{mode:o}"));
        let none = Command::new("mknod").args([&path, "c", "10", "229"]).output().unwrap();
        assert!(none.status.success(), "{none:?}");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let bound = Command::new("mount").args(["--bind", &path, "/dev/fuse"]).output().unwrap();
        assert!(bound.status.success(), "{bound:?}");
    };
    device(0o600);
    let refused = failed(run_in(&pool, "true", Some(NOBODY)), 1, "run");
    says(&refused, &["/dev/fuse", "mode 600", "user 0"]);
    let helper = std::env::split_paths(&std::env::var_os("PATH").unwrap())
        .any(|directory| directory.join("fusermount3").exists());
    if !helper {
        says(&refused, &["fusermount3 is not installed", "fuse3"]);
    }
    let mount = ["mount", &pool.pool, pool.at()];
    says(&failed(as_nobody(&mount), 1, "mount"), &["/dev/fuse", "mode 600"]);

    device(0o666);
    let ran = run_in(
        &pool,
        "id -u; echo text > \"$1/f\"; stat -c %u \"$1/f\"; grep Cap[EPA] /proc/self/status",
        Some(NOBODY),
    );
    if text(&ran.stderr).contains("user namespaces") {
        return println!("skipped: {}", text(&ran.stderr));
    }
    let said = worked(ran, "run");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..2], ["65534", "65534"]);
    for rights in &lines[2..] {
        assert!(rights.ends_with("\t0000000000000000"), "{rights}");
    }
    pool.holds("f", "text\n");

    if helper {
        worked(as_nobody(&mount), "mount");
        let line = fs::read_to_string("/proc/self/mountinfo").unwrap();
        says(&line, &["fuse.aquifer", "nosuid", "nodev", "user_id=65534"]);
        for server in processes("mount-server") {
            kill(&server);
        }
        let mut copied = Command::new("cp");
        copied.args([&pool.file("f"), &pool.file("g")]);
        assert!(copied.uid(NOBODY).gid(NOBODY).status().unwrap().success());
        worked(as_nobody(&["umount", pool.at()]), "umount");
        pool.holds("g", "text\n");
    } else {
        println!("fusermount3 is not installed (package fuse3): mounting with it is not tested");
    }
    pool.sound();
}

fn mount_finds_it_as_a_helper() {
    let pool = Pool::new();
    let helper = pool.place.path("mount.fuse.aquifer");
    symlink(aquifer().get_program(), &helper).unwrap();
    let run = |arguments: &[&str]| Command::new(&helper).args(arguments).output().unwrap();
    worked(run(&[&pool.pool, pool.at(), "-v", "-o", "rw,nofail,x-test,noxattr"]), "helper");
    fs::write(pool.file("f"), "text").unwrap();
    pool.umount();
    worked(run(&["-f", &pool.pool, pool.at()]), "nothing is done");
    assert!(!pool.is_mounted());
    worked(run(&[&pool.pool, pool.at(), "-o", "ro"]), "helper");
    assert!(fs::write(pool.file("f"), "").is_err());
    pool.umount();
    let refused = run(&[&pool.pool, pool.at(), "-o", "uid=7"]);
    says(&failed(refused, 1, "an unknown option"), &["uid=7", "allow_other"]);
    pool.sound();
}

#[cfg(feature = "man")]
#[test]
fn there_is_a_manual_page_for_each_command() {
    let place = Place::new();
    works(&["man", &place.text("man")]);
    let page = |name: &str| fs::read_to_string(place.path("man").join(name)).unwrap();
    says(&page("aquifer.1"), &[".TH", "aquifer\\-mount(1)", "EXAMPLES"]);
    for name in ["mount", "umount", "run", "pool-create", "ls", "doctor"] {
        says(&page(&format!("aquifer-{name}.1")), &[".TH", "SYNOPSIS", "EXAMPLES"]);
    }
    assert!(!place.path("man").join("aquifer-man.1").exists(), "it is hidden");
}

#[test]
fn the_doctor_says_how_pools_can_be_mounted() {
    let features = json(&["doctor", "--json", "--no-costs"]);
    let features = features["features"].as_array().unwrap();
    for name in ["FUSE", "FUSE, user namespaces", "FUSE, fusermount3", "FUSE, requests sent again"]
    {
        let row = features.iter().find(|row| row["name"] == name);
        assert!(row.is_some_and(|row| row["purpose"].is_string()), "{name}");
    }
}

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("mounted", a_mounted_pool_is_a_file_system_until_it_is_unmounted),
    ("shared", a_shared_mount_leaves_the_pool_to_others),
    ("long", a_pool_with_a_long_path_is_mounted),
    ("replaced", a_program_that_does_not_serve_is_given_up),
    ("descriptors", a_mount_keeps_no_descriptors_of_its_caller),
    ("lazy", a_lazily_unmounted_pool_serves_those_that_use_it),
    ("options", options_are_what_they_say),
    ("foreground", in_the_foreground_it_ends_with_a_signal_or_when_it_is_unmounted),
    ("refused", what_cannot_be_mounted_is_an_error_that_says_why),
    ("deaths", a_mount_outlives_its_server_and_ends_with_its_keeper),
    ("run", a_command_sees_the_pool_that_nothing_else_sees),
    ("unprivileged", without_privileges_namespaces_do_or_the_error_says_what_is_missing),
    ("helper", mount_finds_it_as_a_helper),
];

/// Plays a role as described above.
fn plays(role: &str) {
    let mut lacks = None;
    if let Err(error) = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        lacks = Some(format!("/dev/fuse: {error}"));
    }
    let isolated = |command: &mut Command| {
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    };
    let mut tried = Command::new("unshare");
    isolated(&mut tried);
    if !tried.arg("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
        lacks = Some("no namespaces of mounts and processes".to_owned());
    }
    if let Some(lacks) = lacks {
        return eprintln!("skipped: {role}: {lacks}");
    }
    let inner = child::command(role);
    let mut command = Command::new("unshare");
    isolated(&mut command);
    command.arg(inner.get_program()).args(inner.get_args());
    command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let played = command.stdin(Stdio::null()).output().unwrap();
    let said = format!("{}{}", text(&played.stdout), text(&played.stderr));
    if let Some(reason) = said.lines().find(|line| line.starts_with("skipped: ")) {
        return eprintln!("{reason}");
    }
    assert!(played.status.success(), "{role}: {}: {said}", played.status);
}

aquifer_testkit::roles! {
    plays:
    mounted: "mounted",
    mounted_shared: "shared",
    mounted_with_a_long_path: "long",
    servers_are_replaced_by_anything: "replaced",
    descriptors_of_the_caller: "descriptors",
    lazily_unmounted: "lazy",
    mounted_with_options: "options",
    in_the_foreground: "foreground",
    not_mounted: "refused",
    servers_die: "deaths",
    run_with_a_pool: "run",
    unprivileged: "unprivileged",
    helper_of_mount: "helper",
}
