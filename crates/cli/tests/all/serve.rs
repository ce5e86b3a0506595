//! `aquifer pool serve` from a user's perspective.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::support::{Place, aquifer, fails, says, works};
use aquifer::pool::AccessKey;
use aquifer::{Files, Pool};

/// A running command. Killed if a test fails.
struct Server {
    child: Child,
    output: BufReader<ChildStdout>,
    /// Its first line of output.
    first: String,
}

impl Server {
    fn start(arguments: &[&str]) -> Server {
        let mut command = aquifer();
        command.args(["pool", "serve"]).args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut server = Server { child, output, first: String::new() };
        server.first = server.line();
        server
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        if self.output.read_line(&mut line).unwrap() == 0 {
            let mut errors = String::new();
            self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
            panic!("it ended: {errors}");
        }
        line
    }

    /// Sends it a signal; returns its remaining output and exit status.
    fn end(mut self, signal: &str) -> (String, Option<i32>) {
        let process = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        (rest, self.child.wait().unwrap().code())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_pool_is_served_until_the_command_is_told_to_end() {
    let place = Place::new();
    let pool = place.pool();
    let [socket, key_file] = [".socket", ".key"].map(|end| format!("{pool}{end}"));
    let mut server = Server::start(&[&pool]);
    says(&server.first, &[&pool, &socket, &key_file, "created"]);
    assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    assert_eq!(fs::metadata(&key_file).unwrap().permissions().mode() & 0o777, 0o600);

    let key = AccessKey::from_file(&key_file).unwrap();
    let reader = Pool::options().read_only(true).open(&pool).unwrap();
    let granted = Files::new(reader.grant_access(&key, &Pool::options()).unwrap());
    let own = format!("process {}, user", std::process::id());
    says(&server.line(), &["UTC", &own, "granted"]);
    let wrong = AccessKey::generate().unwrap();
    assert!(reader.grant_access(&wrong, &Pool::options()).is_err());
    says(&server.line(), &[&own, "wrong key"]);
    assert!(fails(&["pool", "serve", &pool], 1).contains("has a broker already"));

    // It exits successfully, and processes that have access keep it.
    let (rest, status) = server.end("-TERM");
    says(&rest, &["ended"]);
    assert_eq!(status, Some(0));
    assert!(!fs::exists(&socket).unwrap());
    granted.create_dir("/made").unwrap();
    drop((granted, reader));
    says(&works(&["ls", &format!("{pool}:/")]), &["made"]);
    works(&["pool", "check", &pool]);

    // The key file is reused.
    let before = fs::read(&key_file).unwrap();
    let server = Server::start(&[&pool]);
    says(&server.first, &["the key is in"]);
    assert_eq!(fs::read(&key_file).unwrap(), before);
    // Not SIGHUP, which is ignored if the tests are started to outlive their terminal.
    assert_eq!(server.end("-TERM").1, Some(0));
}

/// A process that may only read the pool file changes its content, with the key.
#[test]
fn commands_ask_for_access_with_a_key() {
    let place = Place::new();
    let pool = place.pool();
    let [root, made, moved] = ["/", "/made", "/moved"].map(|path| format!("{pool}:{path}"));
    let [socket, key_file, notes] = ["here", "there", "notes"].map(|name| place.text(name));
    fs::write(&notes, "some text").unwrap();
    let mut server = Server::start(&["--socket", &socket, "--key-file", &key_file, &pool]);
    let access = ["--access-key-file", &key_file, "--broker-socket", &socket];
    let with_key = |command: &[&str]| works(&[command, &access].concat());
    let own = ["granted"];
    with_key(&["mkdir", &made]);
    says(&server.line(), &own);
    with_key(&["put", &notes, &made]);
    with_key(&["mv", &made, &moved]);
    with_key(&["cp", "-r", &moved, &made]);
    with_key(&["ln", "-s", "moved", &format!("{pool}:/link")]);
    with_key(&["rm", "-r", &made]);
    with_key(&["object", "create", &pool, "thing", "--size", "4K"]);
    with_key(&["object", "resize", &pool, "thing", "--size", "8K"]);
    with_key(&["object", "destroy", &pool, "thing", "--yes"]);
    for _ in 0..8 {
        says(&server.line(), &own);
    }
    says(&works(&["ls", "-R", &root]), &["link", "moved", "notes"]);

    // Without the broker the key gives no access, and a socket without a key is an error.
    server.end("-TERM");
    says(&fails(&["mkdir", &made, access[0], access[1]], 1), &["broker"]);
    says(&fails(&["mkdir", &made, access[2], access[3]], 2), &["--access-key-file"]);
    fs::set_permissions(&notes, PermissionsExt::from_mode(0o644)).unwrap();
    says(&fails(&["mkdir", &made, access[0], &notes], 1), &["chmod 600"]);
}

#[test]
fn socket_and_key_lie_where_they_are_wanted() {
    let place = Place::new();
    let pool = place.pool();
    let [socket, key_file] = ["here", "there"].map(|name| place.text(name));
    fs::write(&key_file, "sixteen bytes or more\n").unwrap();
    fs::set_permissions(&key_file, PermissionsExt::from_mode(0o644)).unwrap();
    let serve = ["pool", "serve", &pool, "--socket", &socket, "--key-file", &key_file];
    says(&fails(&serve, 1), &["chmod 600", &key_file]);
    fs::set_permissions(&key_file, PermissionsExt::from_mode(0o600)).unwrap();
    let server = Server::start(&serve[2..]);
    let key = AccessKey::new(*b"sixteen bytes or more").unwrap();
    let options = Pool::options().broker_socket(place.path("here"));
    assert!(options.open_granted(&pool, &key).unwrap().is_writable());
    assert!(Pool::options().open_granted(&pool, &key).is_err());
    drop(server);
    fs::write(&key_file, "too short\n").unwrap();
    says(&fails(&serve, 1), &["9 bytes", &key_file]);
}

/// The shared memory and the socket are accessible to processes that may read the file.
#[test]
fn a_reader_of_the_file_may_ask_the_broker() {
    let place = Place::new();
    for (mode, expected) in [(0o600, 0o600), (0o644, 0o666), (0o604, 0o606)] {
        let path = place.text(&format!("{mode:o}.pool"));
        works(&["pool", "create", &path, "--size", "4M"]);
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let server = Server::start(&[&path]);
        let socket = fs::metadata(format!("{path}.socket")).unwrap();
        assert_eq!(socket.permissions().mode() & 0o777, expected, "{mode:o}");
        assert_eq!(server.end("-TERM").1, Some(0));
    }
}
