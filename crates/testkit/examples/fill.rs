//! Processes that fill a file system and go on in it: `fill DIRECTORY OPERATIONS SEED write|sync`.
//!
//! Four processes change files in a directory of their own each, and sync each change. The last
//! argument says which call finds that there is no room for bytes: `write`, or the `sync` behind it,
//! as where a kernel writes back later. Another call that says so ends the program, as do other
//! errors. A change without room leaves the bytes that were synced before, so each process knows
//! what its directory must hold at any time, and compares.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_testkit::rng::Rng;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

const PROCESSES: u64 = 4;
/// How many files a process has at most, and how long they get at most by one write, in bytes.
const NAMES: u64 = 24;
const WRITE_BYTES: u64 = 1 << 20;
/// For what is replaced at once.
const TEMPORARY: &str = "temporary";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, operations, seed, place, is_one @ ..] = &arguments[..] else {
        return Err("usage: fill DIRECTORY OPERATIONS SEED write|sync".into());
    };
    let (operations, seed): (u64, u64) = (operations.parse()?, seed.parse()?);
    if !is_one.is_empty() {
        let (random, model) = (Rng::new(seed), BTreeMap::new());
        let shows_late = place == "sync";
        let directory = PathBuf::from(directory);
        return Process { directory, random, model, shows_late, refused: 0 }.run(operations);
    }
    let start = |index| {
        let own = Path::new(directory).join(index_name(index));
        fs::create_dir_all(&own)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(own).arg(operations.to_string()).arg((seed + index).to_string());
        command.args([place, "one"]).spawn()
    };
    let processes = (0..PROCESSES).map(start).collect::<io::Result<Vec<_>>>()?;
    for mut process in processes {
        let status = process.wait()?;
        if !status.success() {
            return Err(status.to_string().into());
        }
    }
    println!("{PROCESSES} processes found no room, and what they had synced");
    Ok(())
}

fn index_name(index: u64) -> String {
    format!("process {index}")
}

struct Process {
    directory: PathBuf,
    random: Rng,
    /// What was synced.
    model: BTreeMap<String, Vec<u8>>,
    /// Whether a sync finds that there is no room, not a write.
    shows_late: bool,
    /// How many changes found no room.
    refused: u64,
}

/// Whether there was room.
#[must_use]
fn had_room(result: &io::Result<()>) -> bool {
    !matches!(result, Err(error) if Errno::from_io_error(error) == Some(Errno::NOSPC))
}

impl Process {
    fn run(mut self, operations: u64) -> Result<(), Box<dyn Error>> {
        for operation in 0..operations {
            self.step().map_err(|error| format!("operation {operation}: {error}"))?;
        }
        self.compare_all()?;
        eprintln!("{} of {operations} changes found no room", self.refused);
        match self.refused {
            0 => Err("all found room".into()),
            _ => Ok(()),
        }
    }

    fn bytes(&mut self) -> Vec<u8> {
        let len = 1 + self.random.below(WRITE_BYTES);
        let first = self.random.next_u64() as u8;
        (0..len).map(|at| first.wrapping_add((at / 1021) as u8)).collect()
    }

    /// Writes and syncs. Returns whether there was room.
    fn store(&mut self, file: &mut File, bytes: &[u8]) -> Result<bool, Box<dyn Error>> {
        let written = file.write_all(bytes);
        let has_room = had_room(&written);
        if has_room {
            written?;
        } else if self.shows_late {
            return Err("a write that goes to the page cache found no room".into());
        }
        let synced = file.sync_all();
        let is_synced = had_room(&synced);
        if is_synced {
            synced?;
        } else if !self.shows_late {
            return Err("a sync found no room for what was written".into());
        }
        let fits = has_room && is_synced;
        self.refused += u64::from(!fits);
        Ok(fits)
    }

    fn step(&mut self) -> Result<(), Box<dyn Error>> {
        let name = self.random.below(NAMES).to_string();
        let path = self.directory.join(&name);
        let is_there = self.model.contains_key(&name);
        match self.random.below(16) {
            0..=5 => self.replace(&name, &path)?,
            6..=8 if is_there => self.append(&name, &path)?,
            9..=10 if is_there => self.overwrite(&name, &path)?,
            11 if is_there => {
                // What has no room leaves the length, and may leave some of the room.
                let file = OpenOptions::new().write(true).open(&path)?;
                let (at, len) = (self.random.below(WRITE_BYTES), self.random.below(WRITE_BYTES));
                let done = rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, at, len + 1);
                self.refused += u64::from(done == Err(Errno::NOSPC));
                done.or_else(|error| if error == Errno::NOSPC { Ok(()) } else { Err(error) })?;
                self.compare(&name, &path)?;
            }
            12 => {
                let other = self.directory.join(TEMPORARY);
                let made = fs::create_dir(&other);
                if had_room(&made) {
                    made?;
                    fs::remove_dir(&other)?;
                }
                let made = symlink("x".repeat(3000), &other);
                if had_room(&made) {
                    made?;
                    fs::remove_file(&other)?;
                }
            }
            13 if is_there => {
                // Removing needs no room.
                fs::remove_file(&path)?;
                self.model.remove(&name);
            }
            _ if is_there => self.compare(&name, &path)?,
            _ => {}
        }
        Ok(())
    }

    fn replace(&mut self, name: &str, path: &Path) -> Result<(), Box<dyn Error>> {
        let (temporary, bytes) = (self.directory.join(TEMPORARY), self.bytes());
        let mut file = match File::create(&temporary) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOSPC) => return Ok(()),
            file => file?,
        };
        if self.store(&mut file, &bytes)? {
            drop(file);
            fs::rename(&temporary, path)?;
            self.model.insert(name.to_owned(), bytes);
        } else {
            drop(file);
            fs::remove_file(&temporary)?;
        }
        // With what was synced of the names, nothing else can be there after a crash.
        File::open(&self.directory)?.sync_all()?;
        Ok(())
    }

    fn append(&mut self, name: &str, path: &Path) -> Result<(), Box<dyn Error>> {
        let bytes = self.bytes();
        let mut file = OpenOptions::new().append(true).open(path)?;
        if self.store(&mut file, &bytes)? {
            self.model.get_mut(name).expect("it is there").extend_from_slice(&bytes);
        } else {
            // Getting shorter needs no room.
            file.set_len(self.model[name].len() as u64)?;
            file.sync_all()?;
        }
        self.compare(name, path)
    }

    /// Bytes that have their room are overwritten also where there is no other.
    fn overwrite(&mut self, name: &str, path: &Path) -> Result<(), Box<dyn Error>> {
        let mut bytes = self.bytes();
        let content = self.model.get_mut(name).expect("it is there");
        let at = self.random.below(content.len() as u64) as usize;
        bytes.truncate(content.len() - at);
        let file = OpenOptions::new().write(true).open(path)?;
        file.write_all_at(&bytes, at as u64)?;
        file.sync_all()?;
        content[at..at + bytes.len()].copy_from_slice(&bytes);
        self.compare(name, path)
    }

    fn compare(&self, name: &str, path: &Path) -> Result<(), Box<dyn Error>> {
        let mut content = Vec::new();
        File::open(path)?.read_to_end(&mut content)?;
        if content != self.model[name] {
            let (found, expected) = (content.len(), self.model[name].len());
            let first = content.iter().zip(&self.model[name]).position(|(a, b)| a != b);
            let of = path.display();
            return Err(format!("{of}: {found} bytes, {expected} synced; at {first:?}").into());
        }
        Ok(())
    }

    fn compare_all(&self) -> Result<(), Box<dyn Error>> {
        let mut names = fs::read_dir(&self.directory)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<Vec<_>>>()?;
        names.sort_unstable();
        if !names.iter().eq(self.model.keys()) {
            let expected: Vec<_> = self.model.keys().collect();
            return Err(format!("{names:?} instead of {expected:?}").into());
        }
        names.iter().try_for_each(|name| self.compare(name, &self.directory.join(name)))
    }
}
