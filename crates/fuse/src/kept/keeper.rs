//! The process that holds what must survive a server, and starts the next one.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::rc::Rc;
use std::time::{Duration, Instant};

use aquifer_pool::{Pool, PoolError, PoolOptions};
use aquifer_sys::high_fd;
use aquifer_sys::local_socket::{Connection, Listener};
use aquifer_sys::mount;
use aquifer_sys::resident::Resident;
use aquifer_sys::signal::{self, Ending};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::failures::Failures;
use super::message::{self, Message, Plan};
use super::outgoing::Outgoing;
use super::{Prepared, code, say};
use crate::device::Device;
use crate::error::MountError;
use crate::in_process::{DIRTY_PERCENT, READ_AHEAD_KIB};
use crate::init;
use crate::mounts::{self, MountedPool};
use crate::pool_fs::{LockOwner, MOST_HOLDERS, MOST_OPEN, OpenOwner};
use crate::state::{Memory, Notes, Word};
use crate::team::{IN_BYTES, MOST_WORKERS};

/// Blocks of 512 pins that are lent at first, and whenever there are too few.
const BLOCKS: (usize, usize) = (2, 4);
/// A server that has lived so long was of use, also if there was nothing to answer.
const LONG_LIFE: Duration = Duration::from_secs(1);
/// How many processes that wait for the end are taken out of the queue.
const MOST_UNMOUNTING: usize = 64;
/// In what time a server has to be ready that is the program at the path. What else may be there could
/// do anything; programs wait meanwhile.
const PROOF: Duration = Duration::from_secs(5);
/// How much rather than this process others are killed where memory runs out: its end is the one that
/// loses data.
const OOM_SCORE: i32 = -900;
/// The most messages that a server has not read: all that it gets at first, and then answers to what it
/// asks for.
const MOST_OUTGOING: usize = MOST_HOLDERS + 1024;

/// The body of the command that is a keeper: it is told what to do by its standard input. Returns the
/// status to exit with.
pub fn keeper_main() -> ExitCode {
    let begun =
        Connection::from_stdin().and_then(|starter| Ok((Prepared::receive(&starter)?, starter)));
    let (prepared, starter) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            say(&format!("this command is started by `aquifer mount`: {error}"));
            return ExitCode::FAILURE;
        }
    };
    // It outlives the session of its starter, and holds no directory.
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    let mut is_ready = false;
    let kept = keep(prepared, || {
        // Of a starter that was killed meanwhile nothing is left.
        Message::Ready.send(&starter, &[]).inspect(|()| is_ready = true)
    });
    if let Err(error) = &kept {
        let _ = Message::Failed(error.to_string()).send(&starter, &[]);
        if is_ready {
            say(&error.to_string());
        }
    }
    code(kept.is_ok())
}

/// Options that keeper and servers open the pool with.
pub(super) fn pool_options(plan: &Plan) -> PoolOptions {
    let mut options = Pool::options();
    if let Some(directory) = &plan.segment_directory {
        options = options.segment_directory(directory);
    }
    if let Some(mode) = plan.segment_mode {
        options = options.segment_mode(mode);
    }
    options
}

/// Serves the mount by processes until it ends. After an error nothing is mounted.
pub(super) fn keep(
    prepared: Prepared,
    ready: impl FnOnce() -> io::Result<()>,
) -> Result<(), MountError> {
    let (directory, connection) = (prepared.plan.directory.clone(), prepared.plan.connection);
    let kept = Keeper::new(prepared).and_then(|keeper| keeper.keep(ready));
    if kept.is_err() {
        // Nothing has the device any more, so no call waits for the mount.
        let _ = mounts::remove_wherever(&directory, connection, true);
    }
    kept
}

/// Why the pool is not opened. What may be unmounted for it is named.
fn not_opened(error: PoolError, plan: &Plan) -> MountError {
    if let PoolError::HasWriters { .. } = error {
        let all = mounts::mounts().unwrap_or_default();
        let other = |it: &&MountedPool| it.source == plan.pool && it.connection != plan.connection;
        if let Some(other) = all.iter().find(other) {
            let at = other.directory.display();
            return MountError::Refused(format!(
                "{error}; it is mounted at {at}: `aquifer umount {at}`, or share this mount as well (--shared)"
            ));
        }
    }
    MountError::Pool(error.into())
}

struct Keeper {
    plan: Plan,
    pool: Pool,
    memory: Memory,
    devices: Vec<Device>,
    /// Descriptors of locks, which outlive their server, with the open files of each.
    locks: HashMap<LockOwner, (Vec<u64>, Rc<OwnedFd>)>,
    /// Until the directory shows it.
    mounted: Option<(mount::Mounted, mount::MountPoint)>,
    ending: Ending,
    lifeline: Option<OwnedFd>,
    /// What the processes that are started have, where this one has its own.
    oom_score: Option<String>,
    server: Option<Process>,
    /// When the next server starts, if there is none.
    due: Instant,
    /// Whether that is the program at the path, which may be another version by now.
    is_replaced: bool,
    /// Until when such a server has to be ready.
    unproven: Option<Instant>,
    failures: Failures,
    /// How many requests all servers but the last one have answered.
    answered: u64,
    /// They unmount.
    helpers: Vec<Process>,
    /// The last ones, closed behind the pool: then the wait of `unmount` ends.
    announced: Option<Listener>,
    unmounting: Vec<Connection>,
    accepts: bool,
}

struct Process {
    child: Child,
    connection: Connection,
    outgoing: Outgoing,
}

impl Process {
    /// Waits for the end of it, which has begun.
    fn wait(mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }

    fn kill(mut self) -> io::Result<ExitStatus> {
        // If it has ended already, this does nothing.
        let _ = self.child.kill();
        self.child.wait()
    }
}

enum Event {
    Server(Option<Box<(Message, Option<OwnedFd>)>>),
    /// The next server is to start.
    Due,
    Signal(i32),
    /// The lifeline has ended.
    Abandoned,
    HelperEnded(usize),
}

/// What a server has said.
#[derive(Default)]
struct Said {
    ready: Option<Instant>,
    ended: Option<bool>,
    why: Option<String>,
}

impl Keeper {
    fn new(prepared: Prepared) -> Result<Keeper, MountError> {
        let Prepared { plan, device, mounted, lifeline } = prepared;
        // Its end would lose data; and so does that of servers, which inherit this.
        signal::ignore_length_limit();
        // Before there are threads.
        let ending = Ending::wait_for().map_err(MountError::Start)?;
        let at = plan.directory.display();
        let options = message::options_of_word(plan.options);
        let mut open = pool_options(&plan).background(false);
        if !options.is_shared() {
            open = open.sole(format!("mounted at {at}; unmount it with: aquifer umount {at}"));
        }
        let pool = open.open(&plan.pool).map_err(|error| not_opened(error, &plan))?;
        let memory = Memory::new(pool.layout().slots()).map_err(MountError::Start)?;

        let device = Device::new(device);
        let mut buffer = Resident::new(IN_BYTES).map_err(MountError::Start)?;
        let agreed =
            init::negotiate(&device, &mut buffer, &options).map_err(MountError::Protocol)?;
        memory.set(Word::Minor, agreed.minor.into());
        memory.set(Word::Features, agreed.flags);
        memory.set(Word::Nonce, pool.sole_nonce().unwrap_or(0));
        // Not 0, and different in each mount, as the pool remembers some.
        let id = RandomState::new().hash_one(plan.directory.as_path());
        memory.set(Word::NextId, id | 1 << 63);
        mount::set_write_back((0, plan.connection), READ_AHEAD_KIB, DIRTY_PERCENT);
        let mut devices = vec![device];
        // As many descriptions as there can be workers, where the device can be opened.
        while devices.len() < MOST_WORKERS
            && let Ok(device) = devices[0].another_description()
        {
            devices.push(device);
        }
        let announced = mounts::announce(plan.connection);
        let keeper = Keeper {
            failures: Failures::new(Duration::from_millis(plan.patience_ms)),
            plan,
            pool,
            memory,
            devices,
            locks: HashMap::new(),
            mounted,
            ending,
            lifeline,
            oom_score: survive_want_of_memory(),
            server: None,
            due: Instant::now(),
            is_replaced: false,
            unproven: None,
            answered: 0,
            helpers: Vec::new(),
            announced,
            unmounting: Vec::new(),
            accepts: true,
        };
        keeper.lend(BLOCKS.0).map_err(|error| MountError::Pool(error.into()))?;
        Ok(keeper)
    }

    fn lend(&self, count: usize) -> aquifer_pool::Result<()> {
        if self.memory.has_room_for(count) {
            self.memory.add_lent(&self.pool.lend_pins(count)?);
        }
        Ok(())
    }

    fn keep(mut self, ready: impl FnOnce() -> io::Result<()>) -> Result<(), MountError> {
        let begun = self.begin().and_then(|()| ready().map_err(MountError::Start));
        let served = begun.and_then(|()| self.serve());
        if let Some(server) = self.server.take() {
            let _ = server.kill();
        }
        // Ends the connection, if it has not ended: no call waits for it any more.
        self.devices.clear();
        for helper in std::mem::take(&mut self.helpers) {
            let _ = helper.wait();
        }
        // The last one that has the pool open closes it.
        served
    }

    /// Until a directory shows the pool.
    fn begin(&mut self) -> Result<(), MountError> {
        self.start_server().map_err(MountError::Start)?;
        self.wait_until_ready()?;
        // The last step, so that an error before leaves nothing. The descriptors, which go here, are uses
        // of the mount and of the file system below it.
        let path = self.plan.directory.clone();
        let attached = self.mounted.take().map_or(Ok(()), |(mounted, at)| mounted.attach(&at));
        attached.map_err(|source| MountError::Mount { path, source })
    }

    fn spawn(&self, path: &Path) -> io::Result<Process> {
        let program = &self.plan.program;
        let (connection, other) = Connection::pair()?;
        let mut command = Command::new(path);
        command.args(&program.server).stdin(other);
        command.envs(program.environment.iter().map(|(name, value)| (name, value)));
        high_fd::keep_from(&mut command);
        let child = command.spawn()?;
        if let Some(score) = &self.oom_score {
            let _ = std::fs::write(format!("/proc/{}/oom_score_adj", child.id()), score);
        }
        Ok(Process { child, connection, outgoing: Outgoing::default() })
    }

    /// Starts this program, whatever is at its path now.
    fn spawn_own(&self) -> io::Result<Process> {
        self.spawn(Path::new("/proc/self/exe"))
    }

    fn start_server(&mut self) -> io::Result<()> {
        let pool = self.pool.files_to_pass().map_err(io::Error::other)?;
        let is_replaced = std::mem::take(&mut self.is_replaced);
        let server = if is_replaced { self.spawn(&self.plan.program.path).ok() } else { None };
        self.unproven = server.as_ref().map(|_| Instant::now() + PROOF);
        let mut server = server.map_or_else(|| self.spawn_own(), Ok)?;
        self.memory.set(Word::Servers, self.memory.get(Word::Servers) + 1);
        match self.tell_all(&mut server, pool.iter().map(|file| file.as_fd())) {
            Ok(()) => self.server = Some(server),
            // It may wait for the rest.
            Err(error) => {
                let _ = server.kill();
                return Err(error);
            }
        }
        Ok(())
    }

    /// What a server is told at first.
    fn tell_all<'f>(
        &'f self,
        server: &mut Process,
        pool: impl Iterator<Item = BorrowedFd<'f>>,
    ) -> io::Result<()> {
        let devices = self.devices.iter().map(|device| device.as_fd());
        let files = [self.memory.file()].into_iter().chain(pool).chain(devices);
        let files: Vec<Rc<OwnedFd>> =
            files.map(|file| file.try_clone_to_owned().map(Rc::new)).collect::<io::Result<_>>()?;
        let Process { connection, outgoing, .. } = server;
        outgoing.add(&Message::Serve(self.plan.clone(), self.devices.len() as u64), None);
        outgoing.add_files(&files);
        outgoing.add(&Message::Locks(self.locks.len() as u64), None);
        for (owner, (open, file)) in &self.locks {
            let owner = OpenOwner { owner: *owner, open: open.clone() };
            outgoing.add(&Message::KeepLocks(owner), Some(file.clone()));
        }
        outgoing.send(connection)
    }

    /// Starts a process that unmounts. Not this one, which could not start the server that such a call
    /// may wait for.
    fn start_unmounting(&mut self, lazily: bool) {
        let started = self.spawn_own().and_then(|helper| {
            Message::Unmount { plan: self.plan.clone(), lazily }.send(&helper.connection, &[])?;
            Ok(helper)
        });
        match started {
            Ok(helper) => self.helpers.push(helper),
            Err(error) => say(&format!("cannot unmount: {error}")),
        }
    }

    fn next(&mut self) -> io::Result<Event> {
        loop {
            self.tell_server();
            let until = if self.server.is_some() { self.unproven } else { Some(self.due) };
            let pause = until.map(|until| until.saturating_duration_since(Instant::now()));
            if pause.is_some_and(|pause| pause.is_zero()) {
                let Some(server) = &mut self.server else { return Ok(Event::Due) };
                say(&format!("{} does not serve", self.plan.program.path.display()));
                self.unproven = None;
                // Its end is heard of, and this program takes over.
                let _ = server.child.kill();
                continue;
            }
            let server = self.server.iter().map(|it| {
                let has_more = it.outgoing.len() > 0;
                let room = if has_more { PollFlags::OUT } else { PollFlags::empty() };
                PollFd::new(&it.connection, PollFlags::IN | room)
            });
            let ending = [PollFd::new(&self.ending, PollFlags::IN)];
            let helpers = self.helpers.iter().map(|it| PollFd::new(&it.connection, PollFlags::IN));
            let lifeline = self.lifeline.iter().map(|end| PollFd::new(end, PollFlags::empty()));
            let announced = self.announced.iter().filter(|_| self.accepts);
            let announced = announced.map(|it| PollFd::new(it, PollFlags::IN));
            // The server last: it could have more to say at any time.
            let all = ending.into_iter().chain(lifeline).chain(announced);
            let all = all.chain(helpers).chain(server);
            let mut files: Vec<_> = all.collect();
            let limit = pause.and_then(|pause| Timespec::try_from(pause).ok());
            rustix::io::retry_on_intr(|| poll(&mut files, limit.as_ref()))?;
            // Room to send more is used at the beginning.
            let has_come = files.iter().map(|file| !(file.revents() - PollFlags::OUT).is_empty());
            let has_come: Vec<bool> = has_come.collect();
            let mut has_come = has_come.into_iter();
            let mut next_has_come = || has_come.next() == Some(true);
            if next_has_come()
                && let Some(signal) = self.ending.take()
            {
                return Ok(Event::Signal(signal));
            }
            if self.lifeline.is_some() && next_has_come() {
                return Ok(Event::Abandoned);
            }
            if self.accepts && self.announced.is_some() && next_has_come() {
                self.accept_unmounting();
                continue;
            }
            if let Some(at) = (0..self.helpers.len()).find(|_| next_has_come()) {
                return Ok(Event::HelperEnded(at));
            }
            if let Some(server) = &self.server
                && next_has_come()
            {
                // Nonsense is the end of it, too.
                let message = Message::receive_with(&server.connection).ok().flatten();
                return Ok(Event::Server(message.map(Box::new)));
            }
        }
    }

    /// Takes a process out of the queue of the socket, which could be full otherwise: it waits for the end
    /// of its connection, or has given up. A process of a user that may not unmount gets no place here.
    fn accept_unmounting(&mut self) {
        let accepted = self.announced.as_ref().map(Listener::accept_now);
        match accepted {
            Some(Ok(Some(connection))) => {
                let user = connection.peer().map(|peer| peer.uid);
                if !user.is_ok_and(mounts::may_wait) {
                    return;
                }
                self.unmounting.retain(|other| !other.is_closed());
                self.unmounting.push(connection);
                // Others wait in the queue, which ends at the same time.
                self.accepts = self.unmounting.len() < MOST_UNMOUNTING;
            }
            // It would come again at once, as where no more descriptors can be made.
            Some(Err(_)) => self.accepts = false,
            _ => {}
        }
    }

    /// Sends what the server has not read yet, as far as there is room.
    fn tell_server(&mut self) {
        let Some(Process { child, connection, outgoing }) = &mut self.server else { return };
        if outgoing.len() > MOST_OUTGOING || outgoing.send(connection).is_err() {
            // It would wait for the rest, or goes on asking. Its end is heard of.
            *outgoing = Outgoing::default();
            let _ = child.kill();
        }
    }

    /// Waits for the first server, without which there is no mount.
    fn wait_until_ready(&mut self) -> Result<(), MountError> {
        let mut said = Said::default();
        while said.ready.is_none() {
            match self.next().map_err(MountError::Start)? {
                Event::Server(Some(message)) => self.hear(*message, &mut said),
                Event::Server(None) | Event::Due => {
                    let status = self.server_gone().map_err(MountError::Start)?;
                    let why = said.why.unwrap_or_else(|| status.to_string());
                    return Err(MountError::Refused(why));
                }
                Event::Signal(_) | Event::Abandoned => {
                    return Err(MountError::Start(io::ErrorKind::Interrupted.into()));
                }
                Event::HelperEnded(at) => drop(self.helpers.remove(at).wait()),
            }
        }
        Ok(())
    }

    fn hear(&mut self, (message, file): (Message, Option<OwnedFd>), said: &mut Said) {
        match message {
            Message::Ready => {
                said.ready = Some(Instant::now());
                self.unproven = None;
            }
            Message::Pins => {
                // If there are no more, the server finds those that it has.
                let _ = self.lend(BLOCKS.1);
                if let Some(server) = &mut self.server {
                    server.outgoing.add(&Message::Pins, None);
                }
            }
            Message::Ended { is_unmounted } => said.ended = Some(is_unmounted),
            Message::Failed(text) => said.why = Some(text),
            Message::KeepLocks(OpenOwner { owner, mut open }) => {
                open.truncate(MOST_OPEN);
                // No more than a server may have: with a defect, it must not take all descriptors.
                let has_room = self.locks.len() < MOST_HOLDERS || self.locks.contains_key(&owner);
                match (file, self.locks.get_mut(&owner)) {
                    (Some(file), _) if has_room => {
                        self.locks.insert(owner, (open, Rc::new(file)));
                    }
                    (None, Some(kept)) => kept.0 = open,
                    _ => {}
                }
            }
            Message::DropLocks(owner) => drop(self.locks.remove(&owner)),
            _ => {}
        }
    }

    fn server_gone(&mut self) -> io::Result<ExitStatus> {
        // It may live, and have said nonsense.
        self.server.take().ok_or(io::ErrorKind::NotConnected)?.kill()
    }

    /// Until the mount ends.
    fn serve(&mut self) -> Result<(), MountError> {
        let (mut said, mut was_told) = (Said::default(), false);
        said.ready = Some(Instant::now());
        loop {
            match self.next().map_err(MountError::Start)? {
                Event::Server(Some(message)) => self.hear(*message, &mut said),
                Event::Server(None) => {
                    let status = self.server_gone().map_err(MountError::Start)?;
                    let Said { ready, ended, why } = std::mem::take(&mut said);
                    match ended {
                        Some(true) => return Ok(()),
                        Some(false) => {
                            return Err(MountError::Ended("the connection was ended".to_owned()));
                        }
                        None => {}
                    }
                    self.memory.note_death(status.signal() != Some(libc::SIGKILL));
                    let answered = Notes::answered(&self.memory);
                    if std::mem::replace(&mut self.answered, answered) != answered
                        || ready.is_some_and(|ready| ready.elapsed() >= LONG_LIFE)
                    {
                        self.failures.forget();
                    }
                    self.replace_server(why.unwrap_or_else(|| status.to_string()))?;
                }
                Event::Due => {
                    if let Err(error) = self.start_server() {
                        self.replace_server(format!("none could be started: {error}"))?;
                    }
                }
                Event::Signal(libc::SIGHUP) => {
                    self.is_replaced = true;
                    if let Some(server) = &mut self.server {
                        let _ = server.child.kill();
                    }
                }
                Event::Signal(_) => {
                    self.start_unmounting(was_told);
                    was_told = true;
                }
                Event::Abandoned => {
                    self.lifeline = None;
                    self.start_unmounting(true);
                }
                Event::HelperEnded(at) => self.unmounting_ended(at),
            }
        }
    }

    /// Another server takes over, now or soon.
    fn replace_server(&mut self, why: String) -> Result<(), MountError> {
        let now = Instant::now();
        let Some(pause) = self.failures.add(now) else { return Err(MountError::Ended(why)) };
        say(&format!("the server has ended ({why}), another one takes over"));
        self.due = now + pause;
        Ok(())
    }

    fn unmounting_ended(&mut self, at: usize) {
        if let Ok(status) = self.helpers.remove(at).wait()
            && !status.success()
        {
            let again = "end what uses it, or ask once more to unmount it nevertheless";
            say(&format!("{} stays mounted: {again}", self.plan.directory.display()));
        }
    }
}

/// Makes this process one of the last that are killed where memory runs out, if it may. Returns what
/// it was before.
fn survive_want_of_memory() -> Option<String> {
    const OWN: &str = "/proc/self/oom_score_adj";
    let before = std::fs::read_to_string(OWN).ok()?;
    before.trim().parse::<i32>().ok().filter(|score| *score > OOM_SCORE)?;
    std::fs::write(OWN, OOM_SCORE.to_string()).ok()?;
    Some(before)
}
