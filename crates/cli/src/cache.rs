//! `aquifer cache`: the tier, the directory on a local disk in which remote devices keep what they download.

use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use aquifer::device::Device;
use aquifer::remote::{RemoteError, RemoteOptions, Tier, TierObject};
use aquifer_sys::units::Bytes;
use serde::Serialize;

use crate::remote::StoreArgs;
use crate::{output, progress, remote};

/// Arguments of `aquifer cache`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

const WHERE: &str = "\
The directory is that of --dir, or else $AQUIFER_TIER, $XDG_CACHE_HOME/aquifer/tier or ~/.cache/aquifer/tier. It is of mode 0700, and only \
a copy: removing it loses downloads.";

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show what the cache holds and takes, or set its budget
    #[command(after_help = format!("\
Examples:
  aquifer cache info
  aquifer cache info --json
  aquifer cache info --set-budget 200G      let all processes together keep so much

{WHERE}"))]
    Info(InfoArgs),
    /// Download objects into the cache
    #[command(after_help = format!("\
Examples:
  aquifer cache warm s3://bucket/rows.bin
  aquifer cache warm s3://bucket/rows.bin --offset 1G --length 100M
  aquifer cache warm https://example.com/data.npy --dir /mnt/nvme/tier

What is there already is not downloaded again, nor is what another process is downloading. After Ctrl-C what has been written stays.

{WHERE}

{}", remote::HELP))]
    Warm(WarmArgs),
    /// Read all that the cache holds, and drop what a crash or the disk has damaged
    #[command(after_help = format!("\
Examples:
  aquifer cache verify
  aquifer cache verify --json

Readers check what they read in any case; this makes room and finds a failing disk. It is no failure if something is dropped.

{WHERE}"))]
    Verify(VerifyArgs),
    /// Drop objects from the cache
    #[command(after_help = format!("\
Examples:
  aquifer cache drop s3://bucket/rows.bin   all its versions
  aquifer cache drop s3://bucket/old/       all objects below
  aquifer cache drop --all

Programs that have them open go on, and download again what they need. What is being downloaded stays.

{WHERE}"))]
    Drop(DropArgs),
}

#[derive(Debug, clap::Args)]
struct TierArgs {
    /// Directory of the cache
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct InfoArgs {
    /// First set how many bytes of the disk the cache may take; what exceeds it is dropped
    #[arg(long, value_name = "BYTES")]
    set_budget: Option<Bytes>,

    #[command(flatten)]
    tier: TierArgs,
}

#[derive(Debug, clap::Args)]
struct WarmArgs {
    /// Objects
    #[arg(value_name = "URL", required = true)]
    urls: Vec<String>,

    /// First byte
    #[arg(long, value_name = "BYTES", default_value = "0")]
    offset: Bytes,

    /// Number of bytes [default: to the end]
    #[arg(long, value_name = "BYTES")]
    length: Option<Bytes>,

    #[command(flatten)]
    remote: StoreArgs,

    #[command(flatten)]
    tier: TierArgs,
}

#[derive(Debug, clap::Args)]
struct VerifyArgs {
    #[command(flatten)]
    tier: TierArgs,
}

#[derive(Debug, clap::Args)]
struct DropArgs {
    /// Objects, or what is below a URL that ends with a slash
    #[arg(value_name = "URL", required_unless_present = "all")]
    urls: Vec<String>,

    /// Drop everything
    #[arg(long, conflicts_with = "urls")]
    all: bool,

    #[command(flatten)]
    tier: TierArgs,
}

/// Runs `aquifer cache`.
pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Info(args) => info(args),
        Command::Warm(args) => warm(args),
        Command::Verify(args) => verify(&args.tier),
        Command::Drop(args) => drop_objects(args),
    }
}

impl TierArgs {
    fn open(&self) -> Result<Tier> {
        let path = self.dir.clone().or_else(Tier::default_path);
        let path = path.context("no directory: give --dir, or set AQUIFER_TIER or HOME")?;
        Ok(Tier::open(path)?)
    }

    /// Of commands that have nothing to do without one.
    fn open_existing(&self) -> Result<Tier> {
        let path = self.dir.clone().or_else(Tier::default_path);
        if let Some(path) = path.filter(|path| !path.exists()) {
            bail!("{}: there is no cache; `aquifer cache warm` makes one", path.display());
        }
        self.open()
    }
}

#[derive(Serialize)]
struct Info {
    path: String,
    budget_bytes: u64,
    used_bytes: u64,
    objects: Vec<Object>,
}

#[derive(Serialize)]
struct Object {
    url: String,
    etag: String,
    size_bytes: u64,
    present_bytes: u64,
    used_bytes: u64,
}

fn info(args: &InfoArgs) -> Result<()> {
    let tier = match args.set_budget {
        Some(_) => args.tier.open()?,
        None => args.tier.open_existing()?,
    };
    if let Some(budget) = args.set_budget {
        tier.set_budget_bytes(budget.0)?;
    }
    let info = tier.info()?;
    let path = tier.path().display().to_string();
    if args.tier.json {
        let object = |object: TierObject| Object {
            url: object.url,
            etag: object.etag,
            size_bytes: object.len_bytes,
            present_bytes: object.present_bytes,
            used_bytes: object.used_bytes,
        };
        let objects = info.objects.into_iter().map(object).collect();
        let (budget_bytes, used_bytes) = (info.budget_bytes, info.used_bytes);
        return output::print_json(&Info { path, budget_bytes, used_bytes, objects }, true);
    }
    let mut text = format!(
        "{path}: {} of {} in use, {}\n",
        Bytes(info.used_bytes),
        Bytes(info.budget_bytes),
        output::several(info.objects.len() as u64, "object")
    );
    let line = |object: &TierObject| {
        let present = Bytes(object.present_bytes).to_string();
        [present, format!("of {}", Bytes(object.len_bytes)), object.url.clone()]
    };
    let lines: Vec<_> = info.objects.iter().map(line).collect();
    text.push_str(&output::columns(&lines));
    output::print(&text)
}

#[derive(Serialize)]
struct WarmedObject {
    url: String,
    present_bytes: u64,
    downloaded_bytes: u64,
    unstored_bytes: u64,
    requests: u64,
}

fn warm(args: &WarmArgs) -> Result<()> {
    let tier = args.tier.open()?;
    let start = args.offset.0;
    let end = args.length.map_or(u64::MAX, |length| start.saturating_add(length.0));
    let mut report = vec![];
    let mut outcome = Ok(());
    for url in &args.urls {
        match warm_object(args, &tier, url, start..end) {
            Ok(warmed) if args.tier.json => report.push(warmed),
            Ok(warmed) => {
                let unstored = match warmed.unstored_bytes {
                    0 => String::new(),
                    bytes => format!(
                        "; {} could not be stored: the budget is too small, or the disk too slow",
                        Bytes(bytes)
                    ),
                };
                output::print(&format!(
                    "{}: downloaded {} with {}; {} was there{unstored}\n",
                    warmed.url,
                    Bytes(warmed.downloaded_bytes),
                    output::several(warmed.requests, "request"),
                    Bytes(warmed.present_bytes),
                ))?;
            }
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    if args.tier.json && (outcome.is_ok() || !report.is_empty()) {
        #[derive(Serialize)]
        struct Report {
            objects: Vec<WarmedObject>,
        }
        output::print_json(&Report { objects: report }, true)?;
    }
    outcome
}

fn warm_object(args: &WarmArgs, tier: &Tier, url: &str, range: Range<u64>) -> Result<WarmedObject> {
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    if scheme.eq_ignore_ascii_case("file") {
        bail!("{url}: files of this machine are not kept in the cache; they are read in place");
    }
    let device = args.remote.options(url)?.tier(tier).open(url).map_err(|error| match error {
        RemoteError::Unversioned { url } => anyhow!(
            "{url}: the server sends no strong ETag; the cache keeps no objects without one, also not those opened \
             with `unversioned`"
        ),
        error => error.into(),
    })?;
    let bar = progress::Bytes::new("downloading");
    let warmed = device.warm(range, |done, all| bar.at(done, all))?;
    drop(bar);
    Ok(WarmedObject {
        url: device.name().to_owned(),
        present_bytes: warmed.present_bytes,
        downloaded_bytes: warmed.downloaded_bytes,
        unstored_bytes: warmed.unstored_bytes,
        requests: device.stats().requests,
    })
}

fn verify(args: &TierArgs) -> Result<()> {
    let tier = args.open_existing()?;
    let bar = progress::Bytes::new("verifying");
    let result = tier.verify(|done, all| bar.at(done, all))?;
    drop(bar);
    if args.json {
        #[derive(Serialize)]
        struct Report {
            right_bytes: u64,
            dropped_bytes: u64,
        }
        let (right_bytes, dropped_bytes) = (result.right_bytes, result.dropped_bytes);
        return output::print_json(&Report { right_bytes, dropped_bytes }, true);
    }
    let (right, dropped) = (Bytes(result.right_bytes), Bytes(result.dropped_bytes));
    output::print(&format!("{right} are right, {dropped} were damaged and are dropped\n"))
}

fn drop_objects(args: &DropArgs) -> Result<()> {
    let tier = args.tier.open_existing()?;
    let wanted: Vec<String> = args.urls.iter().map(|url| normalised(url)).collect::<Result<_>>()?;
    let mut found = vec![false; wanted.len()];
    let mut objects = 0u64;
    let freed_bytes = tier.drop_objects(|object| {
        let mut is_meant = args.all;
        for (wanted, found) in wanted.iter().zip(&mut found) {
            let is_it = is_of(object, wanted);
            *found |= is_it;
            is_meant |= is_it;
        }
        objects += u64::from(is_meant);
        is_meant
    })?;
    if objects > 0 || args.all {
        print_dropped(args, objects, freed_bytes)?;
    }
    let missing: Vec<&str> =
        wanted.iter().zip(found).filter(|(_, found)| !found).map(|(url, _)| &**url).collect();
    if !missing.is_empty() {
        let missing = missing.join(", ");
        bail!("nothing of {missing} is in the cache; `aquifer cache info` lists what is");
    }
    Ok(())
}

fn print_dropped(args: &DropArgs, objects: u64, freed_bytes: u64) -> Result<()> {
    if args.tier.json {
        #[derive(Serialize)]
        struct Report {
            objects: u64,
            freed_bytes: u64,
        }
        return output::print_json(&Report { objects, freed_bytes }, true);
    }
    let objects = output::several(objects, "object");
    output::print(&format!("dropped {objects}, {} are free\n", Bytes(freed_bytes)))
}

/// A URL in the form of those in the cache, without its query.
fn normalised(url: &str) -> Result<String> {
    let store = RemoteOptions::default().store(url)?;
    let mut shown = store.url_of(store.key());
    shown.truncate(shown.find('?').unwrap_or(shown.len()));
    if url.ends_with('/') && !shown.ends_with('/') {
        shown.push('/');
    }
    Ok(shown)
}

/// Whether a normalised URL names an object of the cache, or what it is below.
fn is_of(object: &TierObject, wanted: &str) -> bool {
    // After the URL may follow a query's hash, and the server.
    let known = object.url.split(['?', ' ']).next().unwrap_or_default();
    known == wanted || (wanted.ends_with('/') && known.starts_with(wanted))
}
