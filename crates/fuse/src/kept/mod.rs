//! Mounts that outlive their server.
//!
//! ```text
//!  starter ──► KEEPER  (one thread)                 holds all that must survive:
//!                │      · /dev/fuse: the mount and its clones, so no request is lost
//!                │      · the pool, as its sole writer, and the pins of files without names
//!                │      · the memory of the mount (`state`)
//!                ▼ socket
//!              SERVER  (any number of threads)      answers requests; may die at any instruction
//! ```
//!
//! When the server dies, its programs wait. The keeper starts another one, which repairs the pool, finds
//! out what became of the requests that were under way (`pool_fs::once`), and lets the kernel hand them
//! out again. Linux before 6.9 cannot do that: there they fail with `EIO` unless they have happened, and
//! the mount goes on.
//!
//! The server is a process of its own because only the end of a process ends all that it does, and it
//! has the pool open itself because what it leaves is repaired as after any death. One server runs at a
//! time: the next one is started when the last is gone. The keeper never uses the mount, and unmounts it
//! by a helper process: it must be able to start the server that such a call would wait for.
//!
//! No process needs the path of the pool, or that of this program, once the mount is there: the keeper
//! has the pool's files and hands them on, and it starts itself again. What happens to these names, and
//! what is mounted over them, does not matter.
//!
//! | event | then |
//! |---|---|
//! | the server dies | another one takes over |
//! | servers end or cannot be started, and have done nothing | the pauses between them get longer, up to a second |
//! | as well, for longer than the [patience](Mounting::patience) | the mount ends, with an error for what uses it |
//! | a request ends two servers, or 100 were killed while it was under way | it gets `EIO` |
//! | the keeper dies | the server ends, and the mount with it; what the kernel had not written back is lost |
//! | both are killed at once | what is mounted gives errors, until it is unmounted |
//! | SIGTERM, SIGINT to the keeper | the file system is unmounted; the second time, also while it is used |
//! | SIGHUP to the keeper | another server takes over: of a new version of the program, if its path has one |

mod failures;
mod keeper;
mod message;
mod outgoing;
mod server;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use aquifer_sys::fuse::FuseDevice;
use aquifer_sys::high_fd;
use aquifer_sys::local_socket::Connection;
use aquifer_sys::mount::{self, MountPoint, Mounted};

use self::message::{Message, Plan};
use crate::error::MountError;
use crate::options::MountOptions;
use crate::{fusermount, mounts};

pub use self::keeper::keeper_main;
pub use self::server::server_main;

/// How the processes of a mount are started: at first the calling program, with the argument
/// `mount-keeper` or `mount-server`. It then calls [`keeper_main`] or [`server_main`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Its path.
    pub path: PathBuf,
    /// The arguments of a keeper.
    pub keeper: Vec<OsString>,
    /// The arguments of a server.
    pub server: Vec<OsString>,
    /// The environment of a server, besides the inherited one.
    pub environment: Vec<(OsString, OsString)>,
}

impl Default for Program {
    fn default() -> Program {
        Program {
            path: std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into()),
            keeper: vec!["mount-keeper".into()],
            server: vec!["mount-server".into()],
            environment: Vec::new(),
        }
    }
}

/// What to mount, where and how, by processes that outlive the calling one. See the `kept` module for
/// what they do.
///
/// ```no_run
/// use aquifer_fuse::{MountOptions, Mounting};
///
/// let mounting = Mounting::new("data.pool", "/mnt").options(MountOptions::new().allow_other(true));
/// let keeper = mounting.start()?;
/// println!("served by process {}", keeper.pid());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Mounting {
    pool: PathBuf,
    directory: PathBuf,
    options: MountOptions,
    by_fusermount: bool,
    program: Program,
    segment_directory: Option<PathBuf>,
    segment_mode: Option<u32>,
    patience: Duration,
    log: Option<File>,
    until_closed: Option<OwnedFd>,
}

/// A keeper that was started: from [`Mounting::start`]. It goes on when this is dropped.
#[derive(Debug)]
pub struct Keeper {
    child: Child,
}

impl Keeper {
    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the file system is unmounted and the pool closed. Successful if it was unmounted:
    /// servers may have died, but none was missing. What the kernel could not write back to a full pool
    /// was an error of `close` or `fsync`, if the program has asked, and is none of this.
    ///
    /// # Errors
    /// Those of `waitpid`.
    pub fn wait(mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }
}

impl Mounting {
    /// A pool at a directory, as [`MountOptions::new`] says. The source that the kernel shows is the
    /// path of the pool.
    pub fn new(pool: impl Into<PathBuf>, directory: impl Into<PathBuf>) -> Mounting {
        Mounting {
            pool: pool.into(),
            directory: directory.into(),
            options: MountOptions::new(),
            by_fusermount: false,
            program: Program::default(),
            segment_directory: None,
            segment_mode: None,
            patience: PATIENCE,
            log: None,
            until_closed: None,
        }
    }

    /// Sets how.
    #[must_use]
    pub fn options(self, options: MountOptions) -> Mounting {
        Mounting { options, ..self }
    }

    /// Lets [`fusermount3`](crate::fusermount) mount it, for a user without the right to mount.
    #[must_use]
    pub fn by_fusermount(self) -> Mounting {
        Mounting { by_fusermount: true, ..self }
    }

    /// Sets the program of the keeper and the servers.
    #[must_use]
    pub fn program(self, program: Program) -> Mounting {
        Mounting { program, ..self }
    }

    /// As [`PoolOptions::segment_directory`](aquifer_pool::PoolOptions::segment_directory).
    #[must_use]
    pub fn segment_directory(self, directory: impl Into<PathBuf>) -> Mounting {
        Mounting { segment_directory: Some(directory.into()), ..self }
    }

    /// As [`PoolOptions::segment_mode`](aquifer_pool::PoolOptions::segment_mode).
    #[must_use]
    pub fn segment_mode(self, mode: u32) -> Mounting {
        Mounting { segment_mode: Some(mode), ..self }
    }

    /// Sets how long servers may end one after the other, having done nothing, before the mount ends, and
    /// with it what the kernel has not written back: at first a minute. The reason may be one that
    /// passes, as when memory is short.
    #[must_use]
    pub fn patience(self, patience: Duration) -> Mounting {
        Mounting { patience, ..self }
    }

    /// Where the processes of [`Mounting::start`] write what happens: deaths of servers, and why an end
    /// was not possible. Nowhere, unless this is set.
    #[must_use]
    pub fn log(self, log: File) -> Mounting {
        Mounting { log: Some(log), ..self }
    }

    /// Unmounts, also while it is used, when the other end of this pipe or socket is closed: the mount
    /// then ends with the process that has it.
    #[must_use]
    pub fn until_closed(self, other_end: OwnedFd) -> Mounting {
        Mounting { until_closed: Some(other_end), ..self }
    }

    /// What only the calling process can do: in its namespaces, with its rights.
    fn prepare(self) -> Result<(Prepared, Option<File>), MountError> {
        let Mounting { pool, directory, options, .. } = self;
        let refused = |path: &Path| {
            let path = path.to_path_buf();
            move |source| MountError::Mount { path, source }
        };
        // The keeper and the servers have other working directories.
        let pool = pool.canonicalize().map_err(refused(&pool))?;
        // Root's mount is shown at this directory, whatever the path leads to by then. `fusermount3` follows
        // the path again, with the rights of its user; it would mount over a file.
        let at = MountPoint::open(&directory).map_err(refused(&directory))?;
        let directory = at.path().map_err(refused(&directory))?;
        not_hidden(&directory, &pool, self.segment_directory.as_deref(), &self.program.path)?;
        let (device, mounted, number) = if self.by_fusermount {
            let device = fusermount::mount(&pool, &directory, &options)?;
            // Does not ask the server, which is not there yet.
            let number = mount::device_number(&directory)
                .inspect_err(|_| drop(fusermount::unmount(&directory, true)));
            (device, None, number)
        } else {
            let device = FuseDevice::open().map_err(MountError::Device)?;
            let mounted = options.fuse_mount(pool.as_os_str()).create(&device);
            let mounted = mounted.map_err(refused(&directory))?;
            let number = mounted.device_number();
            (device, Some((mounted, at)), number)
        };
        let (_, connection) = number.map_err(refused(&directory))?;
        let plan = Plan {
            pool,
            directory,
            connection,
            options: message::options_to_word(&options),
            patience_ms: u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX),
            program: self.program,
            segment_directory: self.segment_directory,
            segment_mode: self.segment_mode,
            is_detached: mounted.is_some(),
            has_lifeline: self.until_closed.is_some(),
        };
        Ok((Prepared { plan, device, mounted, lifeline: self.until_closed }, self.log))
    }

    /// Mounts it, by a process of its own, in a session of its own. When this returns, the directory
    /// shows the pool; the calling process may end then.
    ///
    /// # Errors
    /// [`MountError`]; nothing is mounted then.
    pub fn start(self) -> Result<Keeper, MountError> {
        let (prepared, log) = self.prepare()?;
        let (directory, connection) = (prepared.plan.directory.clone(), prepared.plan.connection);
        let started = Mounting::start_keeper(prepared, log);
        if started.is_err() {
            // Of `fusermount3`, or of a keeper that was killed. Nothing has the device any more.
            let _ = mounts::remove(&directory, connection, true);
        }
        started
    }

    fn start_keeper(prepared: Prepared, log: Option<File>) -> Result<Keeper, MountError> {
        let (own, keepers) = Connection::pair().map_err(MountError::Start)?;
        let program = &prepared.plan.program;
        let mut command = Command::new(&program.path);
        command.args(&program.keeper).stdin(keepers);
        match log {
            Some(log) => {
                command.stdout(log.try_clone().map_err(MountError::Start)?).stderr(log);
            }
            None => {
                command.stdout(Stdio::null()).stderr(Stdio::null());
            }
        }
        high_fd::keep_from(&mut command);
        let child = command.spawn().map_err(MountError::Start)?;
        // It has the other end, which must not stay open here.
        drop(command);
        let mut keeper = Keeper { child };
        let sent = Message::Keep(prepared.plan.clone()).send(&own, &prepared.files());
        // The connection must end with the keeper.
        drop(prepared);
        let answer = sent.and_then(|()| Message::receive(&own));
        if matches!(answer, Ok(Some(Message::Ready))) {
            return Ok(keeper);
        }
        let _ = keeper.child.kill();
        let status = keeper.child.wait();
        Err(match (answer, status) {
            (Ok(Some(Message::Failed(why))), _) => MountError::Refused(why),
            (Err(error), _) | (_, Err(error)) => MountError::Start(error),
            (_, Ok(status)) => MountError::Refused(format!("the keeper has ended: {status}")),
        })
    }

    /// Mounts it, and keeps it mounted until it is unmounted and the pool closed. The calling process
    /// is the keeper; `ready` is called when the directory shows the pool. SIGTERM and SIGINT unmount it.
    /// For a process that has one thread, and does not use the mount.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn run(self, ready: impl FnOnce()) -> Result<(), MountError> {
        let (prepared, _) = self.prepare()?;
        keeper::keep(prepared, || {
            ready();
            Ok(())
        })
    }
}

/// How long servers may do nothing, unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(60);

/// Refuses a mount that would hide what its own processes need, or its users to unmount it.
fn not_hidden(
    directory: &Path,
    pool: &Path,
    segment_directory: Option<&Path>,
    program: &Path,
) -> Result<(), MountError> {
    // A program is started with its libraries: those of this process, usually.
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    let mapped = maps.split(|&byte| byte == b'\n').filter_map(|line| {
        let is_code = line.split(|&byte| byte == b' ').nth(1).is_some_and(|it| it.contains(&b'x'));
        let path = line.iter().position(|&byte| byte == b'/').filter(|_| is_code);
        path.map(|at| Path::new(OsStr::from_bytes(&line[at..])))
    });
    let system = ["/proc/self", "/dev/shm"].map(Path::new);
    let mut needed =
        [pool, program].into_iter().chain(segment_directory).chain(system).chain(mapped);
    match needed.find(|path| path.starts_with(directory)) {
        Some(path) => {
            Err(MountError::Hidden { path: path.to_path_buf(), directory: directory.to_path_buf() })
        }
        None => Ok(()),
    }
}

/// All that a keeper begins with.
struct Prepared {
    plan: Plan,
    device: FuseDevice,
    /// Unless `fusermount3` has mounted it.
    mounted: Option<(Mounted, MountPoint)>,
    lifeline: Option<OwnedFd>,
}

impl Prepared {
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        let mounted = self.mounted.iter().flat_map(|(mounted, at)| [mounted.as_fd(), at.as_fd()]);
        let lifeline = self.lifeline.iter().map(|lifeline| lifeline.as_fd());
        [self.device.as_fd()].into_iter().chain(mounted).chain(lifeline).collect()
    }

    fn receive(from: &Connection) -> io::Result<Prepared> {
        let Some(Message::Keep(plan)) = Message::receive(from)? else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let count = 1 + 2 * usize::from(plan.is_detached) + usize::from(plan.has_lifeline);
        let mut files = message::receive_files(from, count)?.into_iter();
        let device = files.next().ok_or(io::ErrorKind::UnexpectedEof)?;
        let device = FuseDevice::from(File::from(device));
        let mounted = if plan.is_detached {
            files.next().map(Mounted::from).zip(files.next().map(MountPoint::from))
        } else {
            None
        };
        Ok(Prepared { plan, device, mounted, lifeline: files.next() })
    }
}

/// Writes a line to standard error. Where nothing reads it any more, the mount goes on.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "aquifer: {text}");
}

fn code(is_well: bool) -> ExitCode {
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
