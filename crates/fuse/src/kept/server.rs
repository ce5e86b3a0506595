//! The process that answers requests until it ends.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, ExitCode};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use aquifer_fs::Files;
use aquifer_pool::LentPins;
use aquifer_sys::cpu;
use aquifer_sys::fuse::{FuseDevice, announce_server};
use aquifer_sys::local_socket::Connection;
use aquifer_sys::signal::Ending;
use aquifer_sys::{thread, waits};

use super::keeper::pool_options;
use super::message::{self, Message, Plan};
use super::{Program, code, say};
use crate::answer::Channel;
use crate::device::Device;
use crate::error::MountError;
use crate::init::Agreed;
use crate::mounts;
use crate::pool_fs::{
    DropsPages, KeepsLocks, Lasting, Lent, LockOwner, OpenOwner, Orphans, PoolFs,
};
use crate::state::{Memory, Notes, Word};
use crate::team::Team;
use crate::wire::init::HAS_RESEND;

/// Set in the environment, in tests: as on a kernel that cannot hand out requests again.
const NO_RESEND: &str = "AQUIFER_NO_RESEND";

/// The body of the command that is a server, or unmounts: it is told so by its standard input. Returns
/// the status to exit with.
pub fn server_main() -> ExitCode {
    // Signals of the terminal are for the keeper.
    let _ending = Ending::wait_for();
    let begun =
        Connection::from_stdin().and_then(|keeper| Ok((Message::receive(&keeper)?, keeper)));
    match begun {
        Ok((Some(Message::Serve(plan, devices)), keeper)) => {
            announce_server();
            cpu::prefer_session_of_parent();
            let keeper = Arc::new(keeper);
            let last = match serve(&plan, devices as usize, &keeper) {
                Ok(is_unmounted) => Message::Ended { is_unmounted },
                Err(error) => Message::Failed(error.to_string()),
            };
            if keeper.is_closed() {
                end_without_keeper(&plan, None);
            }
            let is_well = matches!(last, Message::Ended { .. });
            code(last.send(&keeper, &[]).is_ok() && is_well)
        }
        Ok((Some(Message::Unmount { plan, lazily }), _)) => {
            let removed = mounts::remove_wherever(&plan.directory, plan.connection, lazily);
            if let Err(error) = &removed {
                say(&error.to_string());
            }
            code(removed.is_ok())
        }
        Ok((Some(Message::Notify), server)) => code(notify(&server).is_ok()),
        _ => {
            say("this command is started by the keeper of a mount");
            ExitCode::FAILURE
        }
    }
}

/// Answers requests until the file system is unmounted, or the connection ends otherwise: returns which.
fn serve(plan: &Plan, devices: usize, keeper: &Arc<Connection>) -> Result<bool, MountError> {
    let mut descriptors =
        message::receive_files(keeper, devices + 4).map_err(MountError::Start)?.into_iter();
    let mut next = || descriptors.next().ok_or(io::ErrorKind::UnexpectedEof.into());
    let memory = next().and_then(Memory::adopt).map_err(MountError::Start)?;
    let mut next = || next().map_err(MountError::Start);
    let pool = [next()?, next()?, next()?];
    let kept_locks = receive_locks(keeper).map_err(MountError::Start)?;
    let device = |descriptor| Device::new(FuseDevice::from(File::from(descriptor)));
    let devices: Vec<Device> = descriptors.map(device).collect();
    // Does not keep the pool open.
    let served = Arc::new(OnceLock::new());
    watch(keeper, plan, &served).map_err(MountError::Start)?;

    let options = message::options_of_word(plan.options);
    let is_shared = options.is_shared();
    let mut open = pool_options(plan);
    if !is_shared {
        open = open.beside(memory.get(Word::Nonce));
    }
    let pool = open.open_passed(pool, &plan.pool);
    let pool = pool.map_err(|error| MountError::Pool(error.into()))?;
    let borrowed = pool.borrow_pins(&memory.lent());
    let pins = borrowed.map_err(|error| MountError::Pool(error.into()))?;
    let agreed =
        Agreed { minor: memory.get(Word::Minor) as u32, flags: memory.get(Word::Features) };
    let lasting = Lasting {
        table: memory.nodes(pool.layout().slots()),
        orphans: Orphans::Lent(Lent::new(pins, asking(keeper, &memory))),
        notes: Some(Notes::new(memory.clone())),
        keeps_locks: Box::new(ByKeeper(keeper.clone())),
        kept_locks,
    };
    let files = Files::without_reaping(pool);
    let handler = Arc::new(PoolFs::lasting(files, agreed, options, lasting)?);
    handler.take_over()?;
    let _ = served.set(Arc::downgrade(&handler));

    let watching = if is_shared {
        let device = devices[0].duplicate().map_err(MountError::Start)?;
        let (served, notifier) = (handler.clone(), Notifier::new(plan.program.clone(), device));
        let work = move || served.watch(notifier);
        Some(thread::start(c"aquifer-notify", work).map_err(MountError::Start)?)
    } else {
        None
    };
    let is_old_kernel = cfg!(debug_assertions) && std::env::var_os(NO_RESEND).is_some();
    let can_resend = agreed.has(HAS_RESEND) && !is_old_kernel;
    if memory.get(Word::Servers) > 1 {
        if can_resend && devices[0].resend() {
            handler.comes_again();
        } else {
            let channels: Vec<&dyn Channel> = devices.iter().map(|device| device as _).collect();
            handler.answer_left(&channels);
        }
    }
    // What is handed out again comes before anything new.
    let team = Team::start_sharing(devices, false, handler.clone()).map_err(MountError::Start)?;
    Message::Ready.send(keeper, &[]).map_err(MountError::Start)?;
    handler.free_unnamed(false);
    let is_unmounted = team.wait();
    if let Some(watching) = watching {
        handler.end_watch();
        watching.join();
    }
    let is_unmounted = is_unmounted.map_err(MountError::Start)?;
    if is_unmounted {
        handler.free_unnamed(true);
    }
    Ok(is_unmounted)
}

/// Those of the servers before.
fn receive_locks(keeper: &Connection) -> io::Result<Vec<(OpenOwner, OwnedFd)>> {
    let nonsense = || io::Error::from(io::ErrorKind::InvalidData);
    let Some(Message::Locks(count)) = Message::receive(keeper)? else { return Err(nonsense()) };
    (0..count)
        .map(|_| match Message::receive_with(keeper)? {
            Some((Message::KeepLocks(owner), Some(file))) => Ok((owner, file)),
            _ => Err(nonsense()),
        })
        .collect()
}

/// Ends this process with its keeper: other writers may come then, and no server would take over.
fn watch(
    keeper: &Arc<Connection>,
    plan: &Plan,
    served: &Arc<OnceLock<Weak<PoolFs>>>,
) -> io::Result<()> {
    let (keeper, plan, served) = (keeper.clone(), plan.clone(), served.clone());
    thread::start(c"aquifer-keeper", move || {
        // An error says that it cannot be watched.
        let _ = keeper.wait_for_end();
        end_without_keeper(&plan, served.get());
        std::process::exit(1);
    })?;
    Ok(())
}

/// The mount ends with its keeper.
fn end_without_keeper(plan: &Plan, served: Option<&Weak<PoolFs>>) {
    say("the keeper has died, and the mount ends");
    if let Some(served) = served.and_then(Weak::upgrade) {
        served.sync_all();
    }
    let _ = mounts::remove(&plan.directory, plan.connection, true);
}

/// The pauses between two processes that tell the kernel which pages to drop, where they end at once.
const NOTIFIER_PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Has a process of its own tell the kernel which pages to drop: see `pool_fs::mappings`. It never waits
/// for that process, which may be stopped.
struct Notifier {
    program: Program,
    device: Device,
    process: Option<(Child, Connection)>,
    started: Instant,
    /// Those that have closed their connection, or were killed, and have not ended yet.
    ended: Vec<Child>,
    /// When the next one may be started.
    due: Instant,
    pause: Duration,
    is_reported: bool,
}

impl Notifier {
    fn new(program: Program, device: Device) -> Notifier {
        Notifier {
            program,
            device,
            process: None,
            started: Instant::now(),
            ended: Vec::new(),
            due: Instant::now(),
            pause: NOTIFIER_PAUSES.0,
            is_reported: false,
        }
    }

    fn start(&self) -> io::Result<(Child, Connection)> {
        let (connection, other) = Connection::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command.args(&self.program.server).stdin(other);
        command.envs(self.program.environment.iter().map(|(name, value)| (name, value)));
        let child = command.spawn()?;
        Message::Notify.send(&connection, &[self.device.as_fd()])?;
        Ok((child, connection))
    }

    /// The process, a new one if there is none and it is time.
    fn connection(&mut self) -> Option<&Connection> {
        if self.process.is_none() && Instant::now() >= self.due {
            self.started = Instant::now();
            match self.start() {
                Ok(process) => self.process = Some(process),
                Err(error) => self.failed(&error.to_string()),
            }
        }
        self.process.as_ref().map(|(_, connection)| connection)
    }

    fn failed(&mut self, why: &str) {
        self.due = Instant::now() + self.pause;
        self.pause = (4 * self.pause).min(NOTIFIER_PAUSES.1);
        if !std::mem::replace(&mut self.is_reported, true) {
            say(&format!(
                "mappings may show what was there before, until a process can be started that tells the kernel: {why}"
            ));
        }
    }

    fn reap(&mut self) {
        self.ended.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }
}

impl DropsPages for Notifier {
    fn has_lost(&mut self) -> bool {
        self.reap();
        if !self.process.as_ref().is_some_and(|(_, connection)| connection.is_closed()) {
            return false;
        }
        if let Some((child, _)) = self.process.take() {
            self.ended.push(child);
        }
        if self.started.elapsed() >= NOTIFIER_PAUSES.1 {
            (self.pause, self.is_reported) = (NOTIFIER_PAUSES.0, false);
        }
        self.failed("it has ended");
        true
    }

    fn drop_pages(&mut self, number: u64) -> bool {
        let message = Message::DropPages(number).to_bytes();
        self.connection().is_some_and(|to| matches!(to.try_send(&message, &[]), Ok(true)))
    }
}

/// The body of the process that tells the kernel which pages to drop, until the server has ended.
fn notify(server: &Connection) -> io::Result<()> {
    let device = message::receive_files(server, 1)?.pop().ok_or(io::ErrorKind::UnexpectedEof)?;
    let device = Device::new(FuseDevice::from(File::from(device)));
    while let Some(Message::DropPages(number)) = Message::receive(server)? {
        device.drop_pages(number);
    }
    Ok(())
}

/// The keeper has a descriptor of all locks.
struct ByKeeper(Arc<Connection>);

impl KeepsLocks for ByKeeper {
    fn keep(&self, owner: OpenOwner, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let message = Message::KeepLocks(owner).to_bytes();
        if self.0.try_send(&message, file.as_slice())? {
            return Ok(());
        }
        // It is busy, or stopped.
        waits::about_to_wait();
        self.0.send(&message, file.as_slice())
    }

    fn give_up(&self, owner: LockOwner) {
        // It is dead, or hears of it.
        let _ = Message::DropLocks(owner).send(&self.0, &[]);
    }
}

/// Asks the keeper for more pins.
fn asking(
    keeper: &Arc<Connection>,
    memory: &Memory,
) -> impl Fn() -> Option<LentPins> + Send + Sync + 'static {
    let (keeper, memory) = (Mutex::new(keeper.clone()), memory.clone());
    move || {
        let keeper = keeper.lock().unwrap_or_else(PoisonError::into_inner);
        Message::Pins.send(&keeper, &[]).ok()?;
        waits::about_to_wait();
        match Message::receive(&keeper) {
            Ok(Some(Message::Pins)) => Some(memory.lent()),
            _ => None,
        }
    }
}
