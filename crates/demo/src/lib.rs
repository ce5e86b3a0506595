//! `aquifer demo`: a file larger than memory, used as memory by three programs that do the same work under the same limit.
//!
//! * [`readers`]: the three ways to read, and all that is specific to Aquifer. Read it first.
//! * [`work`]: what is done with the file.
//! * This file: runs each program in a process of its own with limited memory, and prints a table.
//!
//! A program that calls [`main`] does so again in the processes that it starts, with the same arguments.

pub mod readers;
pub mod work;

use std::fmt::Write as _;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aquifer_sys::interrupt;
use aquifer_sys::limit::Limiter;
use aquifer_sys::units::Bytes;
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};

/// Arguments of `aquifer demo`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer demo                                    a file in this directory
  aquifer demo --dir /mnt/nvme --size 1G          a larger file on another disk
  aquifer demo --json                             the times as one JSON object")]
pub struct DemoArgs {
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,

    /// Directory for the file; it is removed afterwards
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,

    /// Length of the file
    #[arg(long, value_name = "BYTES", default_value = "128M")]
    pub size: Bytes,

    /// Memory for the walk [default: a quarter of the size]
    #[arg(long, value_name = "BYTES")]
    pub budget: Option<Bytes>,
}

/// The readers, as options and in the table.
pub const READERS: [(&str, &str); 3] =
    [("mmap", "mmap"), ("by_hand", "mmap, sorted and prefetched by hand"), ("aquifer", "Aquifer")];
/// The tasks, as options and in the table.
pub const TASKS: [(&str, &str); 2] = [("walk", "walk the graph"), ("passes", "read all 10 times")];

/// A process that takes longer is stopped.
const PATIENCE: Duration = Duration::from_secs(4);
/// In the environment of a child: its task, its reader, the file, its memory in bytes.
const CHILD_VARIABLE: &str = "AQUIFER_DEMO_CHILD";
/// The memory of a process that is not for the file: its program, stacks and page tables.
const PROGRAM_BYTES: u64 = 4 << 20;

/// The time of one reader and one task.
#[derive(Debug, Clone, Serialize)]
pub struct Time {
    /// One of [`READERS`].
    pub reader: &'static str,
    /// One of [`TASKS`].
    pub task: &'static str,
    /// Memory for the file and what keeps it in memory, in bytes.
    pub budget_bytes: u64,
    /// The time in seconds; `None` if the process was stopped after four seconds.
    pub seconds: Option<f64>,
}

/// Runs the demonstration and prints it to standard output.
pub fn main(args: &DemoArgs) -> Result<()> {
    if run_if_child()? {
        return Ok(());
    }
    let times = measure(args)?;
    let text = if args.json {
        serde_json::to_string_pretty(
            &serde_json::json!({ "size_bytes": args.size.0, "times": times }),
        )? + "\n"
    } else {
        table(args, &times)
    };
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}

/// Runs each reader and each task once. A program that calls it calls [`run_if_child`] first.
pub fn measure(args: &DemoArgs) -> Result<Vec<Time>> {
    let _signals = interrupt::Guard::install();
    let limiter = Limiter::find();
    if let Err(error) = &limiter {
        eprintln!(
            "note: {error}. Memory is not limited, so mmap is not shown: it would hold the whole file"
        );
    }
    let quarter = args.budget.map_or(args.size.0 / 4, |budget| budget.0);
    ensure!(
        quarter >= 16 << 20,
        "less than 16 MiB of memory is too little for a program: choose a larger --size or --budget"
    );
    let file = tempfile::Builder::new()
        .prefix(".aquifer-demo-")
        .suffix(".aquifer-data")
        .tempfile_in(&args.dir);
    let file = file.with_context(|| format!("cannot make a file in {}", args.dir.display()))?;
    let graph = work::Graph::create(file.as_file(), args.size.0)?;
    let mut times = Vec::new();
    let mut answers = [None; TASKS.len()];
    for (reader, _) in
        READERS.into_iter().filter(|(reader, _)| limiter.is_ok() || *reader == "aquifer")
    {
        for (index, (task, _)) in TASKS.into_iter().enumerate() {
            interrupt::check()?;
            fadvise(&file, 0, None, Advice::DontNeed)?;
            let (budget_bytes, state_bytes) = if task == "walk" {
                (quarter, graph.state_bytes())
            } else {
                (args.size.0 * 100 / 128, 0)
            };
            let limit_bytes = budget_bytes + state_bytes;
            let child = Child {
                task: task.into(),
                reader: reader.into(),
                path: file.path().into(),
                budget_bytes,
            };
            let answer = run_child(&child, limiter.as_ref().ok(), limit_bytes)?;
            if let Some(answer) = answer {
                let first = *answers[index].get_or_insert(answer.checksum);
                ensure!(
                    first == answer.checksum,
                    "{reader} found something else in {task} than the others"
                );
            }
            times.push(Time {
                reader,
                task,
                budget_bytes,
                seconds: answer.map(|answer| answer.seconds),
            });
        }
    }
    Ok(times)
}

#[derive(Serialize, Deserialize)]
struct Child {
    task: String,
    reader: String,
    path: PathBuf,
    budget_bytes: u64,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Answer {
    seconds: f64,
    checksum: u64,
}

/// Starts this program again. It begins when it has been moved into the group with the limit.
fn run_child(child: &Child, limiter: Option<&Limiter>, limit_bytes: u64) -> Result<Option<Answer>> {
    let group = limiter.map(|limiter| limiter.create(limit_bytes)).transpose()?;
    let mut process = Command::new("/proc/self/exe")
        .args(std::env::args_os().skip(1))
        .env(CHILD_VARIABLE, serde_json::to_string(child)?)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start this program again")?;
    let moved = group.as_ref().map_or(Ok(()), |group| group.add(process.id()));
    if let (Ok(()), Some(mut input)) = (&moved, process.stdin.take()) {
        writeln!(input)?;
    }
    // An end of input without a line ends the child.
    let output = process.wait_with_output()?;
    moved?;
    interrupt::check()?;
    ensure!(
        output.status.success(),
        "{} of {} ended with {}",
        child.task,
        child.reader,
        output.status
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Does the work of a child, and returns true, if this process is one.
pub fn run_if_child() -> Result<bool> {
    let Ok(child) = std::env::var(CHILD_VARIABLE) else { return Ok(false) };
    let child: Child = serde_json::from_str(&child)?;
    if std::io::stdin().lock().read_line(&mut String::new())? == 0 {
        return Ok(true);
    }
    std::thread::spawn(|| {
        std::thread::sleep(PATIENCE);
        println!("null");
        std::process::exit(0);
    });
    let answer = work(&child)?;
    println!("{}", serde_json::to_string(&answer)?);
    Ok(true)
}

fn work(child: &Child) -> Result<Answer> {
    let file_bytes = Path::new(&child.path).metadata()?.len();
    // Page tables and the index of the page cache take 1/240 of the data, which mmap pays from its limit as well.
    let budget_bytes = child.budget_bytes - PROGRAM_BYTES - file_bytes / 240;
    let reader = readers::open(&child.reader, &child.path, budget_bytes)?;
    let start = Instant::now();
    let checksum = match &*child.task {
        "walk" => work::Graph::of(file_bytes).walk(&*reader)?,
        _ => work::passes(&*reader, file_bytes, 10)?,
    };
    Ok(Answer { seconds: start.elapsed().as_secs_f64(), checksum })
}

const EXPLANATION: &str = "
Walk: which rows are read next is known only when the last ones have been read. mmap waits for one page at a time. Aquifer's
visit_many takes all that is known to be needed, reads neighbours together and many at once, and hands over each as it arrives.
Passes: what is needed next is what the system has just dropped. Aquifer keeps what fits.
The programs: crates/demo/src/readers.rs
";

fn table(args: &DemoArgs, times: &[Time]) -> String {
    let mut text = format!(
        "A file of {} holds a graph. Programs use it as memory, with less memory than it needs.\n\n",
        args.size
    );
    let of = |reader: &str, task: &str| {
        times.iter().find(|time| time.reader == reader && time.task == task)
    };
    let cell = |reader: &str, task: &str| match of(reader, task).map(|time| time.seconds) {
        Some(Some(seconds)) => format!("{seconds:.2} s"),
        Some(None) => format!("> {} s", PATIENCE.as_secs()),
        None => "-".to_owned(),
    };
    let memory = |task| {
        of("aquifer", task)
            .map_or_else(String::new, |time| format!("in {}", Bytes(time.budget_bytes)))
    };
    let mut line = |name: &str, cells: [String; 2]| {
        let _ = writeln!(text, "{name:<38}{:>16}{:>20}", cells[0], cells[1]);
    };
    line("", TASKS.map(|(_, title)| title.to_owned()));
    line("", TASKS.map(|(task, _)| memory(task)));
    for (reader, title) in READERS {
        line(title, TASKS.map(|(task, _)| cell(reader, task)));
    }
    text + EXPLANATION
}
