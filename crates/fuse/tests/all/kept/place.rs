//! A pool that is mounted by processes of its own, whose server can be killed.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_check::{CheckOptions, Severity, check};
use aquifer_fuse::{Cache, Keeper, MountOptions, Mounting, Program, mounts, unmount};
use aquifer_pool::Pool;
use rustix::mount::MountFlags;
use rustix::process::{Gid, Pid, Signal, Uid, kill_process};

/// In the environment, and in the directory of a test: a file with which servers fail.
pub const FAILS_IF: &str = "AQUIFER_TEST_FAILS_IF";
/// As well: with which they wait.
pub const WAITS_IF: &str = "AQUIFER_TEST_WAITS_IF";
/// The extension of the file that says that one waits.
pub const WAITS: &str = "waits";

/// Another user than root.
pub const USER: u32 = 1000;

/// A mounted pool.
pub struct Place {
    directory: Option<tempfile::TempDir>,
    keeper: Option<Keeper>,
    pid: u32,
    connection: u32,
    /// When it is closed, also by the death of this process, the mount ends.
    lifeline: Option<std::io::PipeWriter>,
}

/// How a mount begins.
pub struct How {
    pub cache: Cache,
    pub environment: Vec<(&'static str, &'static str)>,
    pub patience: Duration,
}

impl Default for How {
    fn default() -> How {
        let patience = Duration::from_secs(60);
        How { cache: Cache::WriteBack, environment: Vec::new(), patience }
    }
}

/// The program of a mount: this one again, which then runs one of its tests. Files in the directory tell
/// servers what to do.
pub fn program(how: &How, directory: &Path) -> Program {
    let arguments = |test: &str| ["--exact", test, "--nocapture"].map(Into::into).to_vec();
    let environment = how.environment.iter().map(|(name, value)| (name.into(), value.into()));
    let files = [FAILS_IF, WAITS_IF].map(|name| (name.into(), directory.join(name).into()));
    Program {
        path: std::env::current_exe().expect("the test binary"),
        keeper: arguments("keeper"),
        server: arguments("server"),
        environment: environment.chain(files).collect(),
    }
}

impl Place {
    /// Mounts a new pool. `None`, reported to the parent, where that is not possible.
    pub fn mount(how: &How) -> Option<Place> {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("mounted")).expect("a directory of its own");
        drop(Pool::create(at("pool"), 64 << 20).expect("a new pool"));
        let (end, lifeline) = std::io::pipe().expect("a pipe");
        let log = File::create(at("log")).expect("a new file");
        let mounting = Mounting::new(at("pool"), at("mounted"))
            .options(MountOptions::new().cache(how.cache).allow_other(true))
            .program(program(how, directory.path()))
            .patience(how.patience)
            .until_closed(OwnedFd::from(end))
            .log(log);
        // Of the namespace of this test: connections can be ended by their numbers.
        let none = MountFlags::empty();
        let _ = rustix::mount::mount("fusectl", "/sys/fs/fuse/connections", "fusectl", none, None);
        let keeper = match mounting.start() {
            Ok(keeper) => keeper,
            Err(
                error @ (aquifer_fuse::MountError::Device(_)
                | aquifer_fuse::MountError::Mount { .. }),
            ) => {
                println!("skipped: a pool cannot be mounted: {error}");
                return None;
            }
            Err(error) => {
                let log = fs::read_to_string(at("log")).unwrap_or_default();
                panic!("{error}\n{log}");
            }
        };
        let mounted = mounts().expect("the table");
        let mounted = mounted.iter().find(|it| it.directory == at("mounted")).expect("it is there");
        let (pid, connection) = (keeper.pid(), mounted.connection);
        let (directory, keeper) = (Some(directory), Some(keeper));
        let lifeline = Some(lifeline);
        Some(Place { directory, keeper, pid, connection, lifeline })
    }

    pub fn root(&self) -> PathBuf {
        self.at("mounted")
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.as_ref().expect("until the end").path().join(name)
    }

    /// The number of the connection.
    #[allow(dead_code, reason = "for mounts that end")]
    pub fn connection(&self) -> u32 {
        self.connection
    }

    pub fn keeper(&self) -> u32 {
        self.pid
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.at("log")).unwrap_or_default()
    }

    /// How many servers have died.
    pub fn deaths(&self) -> usize {
        self.log().matches("another one takes over").count()
    }

    /// The server, if there is one at this moment.
    pub fn server(&self) -> Option<u32> {
        children_of(self.pid).first().copied()
    }

    /// How many processes the keeper has at this moment: a server, and those that unmount.
    #[allow(dead_code, reason = "for shared mounts")]
    pub fn processes(&self) -> usize {
        children_of(self.pid).len()
    }

    /// The process that tells the kernel which pages to drop, if there is one at this moment.
    #[allow(dead_code, reason = "for shared mounts")]
    pub fn notifier(&self) -> Option<u32> {
        children_of(self.server()?).first().copied()
    }

    /// Kills the server. Returns false if there was none at this moment.
    pub fn kill_server(&self) -> bool {
        self.server().is_some_and(kill)
    }

    /// Unmounts it, and checks the pool, which is closed then.
    pub fn unmount(mut self) -> PathBuf {
        unmount(&self.root(), false, Duration::from_secs(60)).expect("nothing uses it");
        let status = self.keeper.take().expect("until it is unmounted").wait().expect("a child");
        assert!(status.success(), "{status}: {}", self.log());
        let report = check(&self.at("pool"), &CheckOptions::default()).expect("it can be read");
        assert_eq!(report.worst().filter(|worst| *worst > Severity::Note), None, "{report}");
        self.directory.take().expect("until the end").keep().join("pool")
    }

    /// How many pools are mounted here. Others may be mounted on the machine.
    pub fn mounts(&self) -> usize {
        let all = mounts().expect("the table");
        all.iter().filter(|it| it.directory.starts_with(self.at(""))).count()
    }

    /// Whether the mount is there.
    pub fn is_mounted(&self) -> bool {
        self.mounts() > 0
    }

    /// Closes the lifeline.
    pub fn cut(&mut self) {
        self.lifeline = None;
    }

    /// Waits for the end of the keeper. Returns whether it has ended well.
    pub fn ended(&mut self) -> bool {
        self.keeper.take().expect("until it is unmounted").wait().expect("a child").success()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            // Something failed, and may still wait for the mount. The server goes with its keeper.
            eprintln!("{}", self.log());
            kill(keeper.pid());
            let _ = aquifer_sys::mount::abort(self.connection);
            let _ = aquifer_sys::mount::remove(&self.root(), true);
            let _ = keeper.wait();
        }
    }
}

/// A server: it fails, or waits, as long as a test wants that.
pub fn server() -> std::process::ExitCode {
    let wanted =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.exists());
    if wanted(FAILS_IF).is_some() {
        return std::process::ExitCode::FAILURE;
    }
    if let Some(path) = wanted(WAITS_IF) {
        // Until it was told what to do.
        let stdin = std::io::stdin();
        let mut told = [rustix::event::PollFd::new(&stdin, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut told, None).expect("a socket");
        fs::write(path.with_extension(WAITS), "").expect("a new file");
        while path.exists() {
            std::thread::yield_now();
        }
    }
    aquifer_fuse::server_main()
}

/// The body of a test that is a process of a mount, in a child of a test.
pub fn in_child(main: fn() -> std::process::ExitCode) {
    // Only descendants of a child of this test have its role.
    if std::env::var_os("AQUIFER_TEST_ROLE").is_none() {
        return;
    }
    aquifer_testkit::watchdog::guard("a process of a mount");
    let is_well = main() == std::process::ExitCode::SUCCESS;
    std::process::exit(i32::from(!is_well));
}

/// Runs this in a thread with the rights of the user only.
pub fn as_user<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let run = || {
            let (user, group) = (Uid::from_raw(USER), Gid::from_raw(USER));
            rustix::thread::set_thread_groups(&[]).expect("root");
            rustix::thread::set_thread_res_gid(group, group, group).expect("root");
            // Gives up all capabilities, of this thread alone.
            rustix::thread::set_thread_res_uid(user, user, user).expect("root");
            run()
        };
        scope.spawn(run).join().expect("no panic")
    })
}

/// Kills a process that this test has started.
pub fn kill(pid: u32) -> bool {
    let pid = Pid::from_raw(pid as i32).expect("a process");
    kill_process(pid, Signal::KILL).is_ok()
}

fn children_of(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").expect("it is mounted");
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| parent_of(*pid) == Some(parent)).collect()
}

/// Stops a process that this test has started, or lets it go on.
pub fn send(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).expect("a process");
    kill_process(pid, signal).expect("it is there");
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let is_alive = fields.next()? != "Z";
    fields.next()?.parse().ok().filter(|_| is_alive)
}
