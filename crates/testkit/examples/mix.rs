//! A mix of processes that change a file system, as `fsstress` does: `mix [--kill] DIRECTORY [OPERATIONS]
//! [SEED]`.
//!
//! Four processes work in a directory of their own each. What every operation returns there is
//! determined by the seed, so a process prints a checksum of it: the same on every file system that
//! keeps to POSIX. Four more work in one directory against each other; of them only errors that no
//! program has to expect end the mix. With `--kill` these four are killed at any moment, and replaced,
//! until the others have ended.

use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::{CWD, FallocateFlags, RenameFlags, XattrFlags};
use rustix::process::Signal;

/// How many processes have a directory of their own, and how many share one.
const PROCESSES: u64 = 4;
/// The directory that they share.
const COMMON: &str = "common";
const KILL_EVERY: Duration = Duration::from_millis(20);
/// How many names there are in a directory.
const NAMES: u64 = 12;
/// Files are at most this long, in bytes.
const FILE_BYTES: u64 = 200_000;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let kills = arguments.first().is_some_and(|first| first == "--kill");
    arguments.drain(..usize::from(kills));
    let number = |at: usize, default| arguments.get(at).map_or(Ok(default), |it| it.parse());
    let directory = arguments.first().ok_or("usage: mix [--kill] DIRECTORY [OPERATIONS] [SEED]")?;
    let (operations, seed) = (number(1, 5_000)?, number(2, 1)?);
    if let Some(shared) = arguments.get(3) {
        let own = PathBuf::from(directory);
        return Process { directory: own, random: seed, is_alone: shared == "alone" }
            .run(operations);
    }
    let start = |name: &str, kind: &str, seed: u64| {
        let own = Path::new(directory).join(name);
        fs::create_dir_all(&own)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(own).arg(operations.to_string()).arg(seed.to_string()).arg(kind);
        command.stdout(Stdio::piped()).spawn()
    };
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for index in 0..PROCESSES {
        alone.push(start(&format!("own {index}"), "alone", seed + index)?);
        together.push(start(COMMON, "together", seed + PROCESSES + index)?);
    }
    if kills {
        let mut killed = 0;
        while !have_ended(&mut alone)? {
            std::thread::sleep(KILL_EVERY);
            for process in &mut together {
                process.kill()?;
                let status = process.wait()?;
                let is_killed = status.signal() == Some(Signal::KILL.as_raw());
                if !is_killed && !status.success() {
                    return Err(status.to_string().into());
                }
                killed += u64::from(is_killed);
                *process = start(COMMON, "together", seed + 2 * PROCESSES + killed)?;
            }
        }
        for process in &mut together {
            process.kill()?;
            process.wait()?;
        }
        eprintln!("{killed} processes were killed");
        together.clear();
    }
    for process in alone.into_iter().chain(together) {
        let output = process.wait_with_output()?;
        io::stdout().write_all(&output.stdout)?;
        if !output.status.success() {
            return Err(output.status.to_string().into());
        }
    }
    Ok(())
}

fn have_ended(processes: &mut [Child]) -> io::Result<bool> {
    for process in processes {
        if process.try_wait()?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

struct Process {
    directory: PathBuf,
    random: u64,
    is_alone: bool,
}

impl Process {
    fn run(mut self, operations: u64) -> Result<(), Failure> {
        self.random = self.random.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut seen = DefaultHasher::new();
        let mut failed = 0;
        for operation in 0..operations {
            match self.step() {
                Ok(result) => result.hash(&mut seen),
                Err(error) => {
                    let errno = rustix::io::Errno::from_io_error(&error).ok_or(error)?;
                    if !is_expected(errno) {
                        return Err(format!("operation {operation}: {errno}").into());
                    }
                    failed += 1;
                    errno.raw_os_error().hash(&mut seen);
                }
            }
        }
        if self.is_alone {
            self.hash_tree(&self.directory.clone(), &mut seen)?;
            println!("{} operations, {failed} refused, {:016x}", operations, seen.finish());
        }
        Ok(())
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    /// A name in the directory, or in one that may be below it.
    fn path(&mut self) -> PathBuf {
        let mut path = self.directory.clone();
        if self.below(3) == 0 {
            path.push(self.below(NAMES).to_string());
        }
        path.push(self.below(NAMES).to_string());
        path
    }

    fn range(&mut self) -> (u64, u64) {
        (self.below(FILE_BYTES), 1 + self.below(20_000))
    }

    /// One operation. Returns what must be the same everywhere.
    fn step(&mut self) -> io::Result<u64> {
        let (path, other, (at, len)) = (self.path(), self.path(), self.range());
        let write = || OpenOptions::new().read(true).write(true).open(&path);
        let create = || OpenOptions::new().append(true).create(true).open(&path);
        let bytes = vec![at as u8; len as usize];
        match self.below(26) {
            0 => fs::create_dir(&path)?,
            1 => fs::remove_dir(&path)?,
            2..=3 => fs::remove_file(&path)?,
            4..=5 => fs::rename(&path, &other)?,
            6 => rustix::fs::renameat_with(CWD, &path, CWD, &other, RenameFlags::EXCHANGE)?,
            7 => rustix::fs::renameat_with(CWD, &path, CWD, &other, RenameFlags::NOREPLACE)?,
            8 => fs::hard_link(&path, &other)?,
            9 => symlink(format!("{}", at % NAMES), &path)?,
            10..=11 => drop(OpenOptions::new().write(true).create_new(true).open(&path)?),
            12..=13 => {
                // The length is looked at first: what others append meanwhile may go beyond it.
                let mut file = create()?;
                if file.metadata()?.len() < FILE_BYTES {
                    file.write_all(&bytes)?;
                }
            }
            14..=15 => write()?.write_all_at(&bytes, at)?,
            16 => write()?.set_len(at)?,
            17 => rustix::fs::fallocate(write()?, FallocateFlags::empty(), at, len)?,
            18 => {
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(write()?, how, at, len)?;
            }
            19 => {
                let (from, to) = (File::open(&path)?, OpenOptions::new().write(true).open(&other)?);
                let (mut from_at, mut to_at) = (at / 2, at);
                let copied = rustix::fs::copy_file_range(
                    &from,
                    Some(&mut from_at),
                    &to,
                    Some(&mut to_at),
                    len as usize,
                )?;
                return Ok(copied as u64);
            }
            20 => {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600 + at as u32 % 0o100))?
            }
            21 => rustix::fs::setxattr(
                &path,
                "user.mix",
                &bytes[..len as usize % 200],
                XattrFlags::empty(),
            )?,
            22 => write()?.sync_all()?,
            23 => {
                let mut file = write()?;
                fs::remove_file(&path)?;
                file.seek(SeekFrom::End(0))?;
                file.write_all(&bytes)?;
                return if self.is_alone { Ok(file.metadata()?.len()) } else { Ok(0) };
            }
            24 => return hash_of(&path),
            _ => {
                let mut names = fs::read_dir(&path)?
                    .map(|entry| Ok(entry?.file_name()))
                    .collect::<io::Result<Vec<_>>>()?;
                names.sort_unstable();
                return Ok(hashed(&names));
            }
        }
        Ok(0)
    }

    fn hash_tree(&self, directory: &Path, seen: &mut DefaultHasher) -> io::Result<()> {
        let entries = fs::read_dir(directory)?.map(|entry| Ok(entry?.path()));
        let mut paths = entries.collect::<io::Result<Vec<_>>>()?;
        paths.sort_unstable();
        for path in paths {
            path.file_name().hash(seen);
            let metadata = fs::symlink_metadata(&path)?;
            metadata.mode().hash(seen);
            if metadata.is_dir() {
                self.hash_tree(&path, seen)?;
            } else if metadata.is_symlink() {
                fs::read_link(&path)?.hash(seen);
            } else {
                (metadata.nlink(), metadata.len(), hash_of(&path)?).hash(seen);
            }
        }
        Ok(())
    }
}

fn hashed(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn hash_of(path: &Path) -> io::Result<u64> {
    let mut content = Vec::new();
    File::open(path)?.read_to_end(&mut content)?;
    Ok(hashed(&content))
}

/// What an operation may say of names that are there or not, and of their kinds.
fn is_expected(errno: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    let expected = [
        Errno::NOENT,
        Errno::EXIST,
        Errno::NOTDIR,
        Errno::ISDIR,
        Errno::NOTEMPTY,
        Errno::INVAL,
        Errno::LOOP,
        Errno::PERM,
    ];
    expected.contains(&errno)
}
