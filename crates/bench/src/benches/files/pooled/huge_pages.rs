//! A hugetlbfs for a measurement, with pages for it. Both are released on drop.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::place::MountGuard;

const COUNT: &str = "/proc/sys/vm/nr_hugepages";
/// The default huge page size on the supported machines.
const PAGE_BYTES: u64 = 2 << 20;

/// A mounted hugetlbfs. Fields are dropped, and so undone, in this order.
#[derive(Debug)]
pub struct HugePages {
    _mount: MountGuard,
    directory: TempDir,
    _pages: Taken,
}

impl HugePages {
    /// Reserves pages for a file of that length, and mounts a hugetlbfs.
    pub fn take(file_bytes: u64) -> Result<Self> {
        // SAFETY: takes nothing, returns an integer, cannot fail.
        ensure!(unsafe { libc::geteuid() } == 0, "huge pages are taken by root");
        let pages = Taken::take(file_bytes.div_ceil(PAGE_BYTES) + 1)?;
        let directory = tempfile::Builder::new().prefix("aquifer-bench-huge-").tempdir()?;
        let mount = MountGuard::mount(Path::new("none"), directory.path(), c"hugetlbfs")?;
        Ok(Self { _mount: mount, directory, _pages: pages })
    }

    /// The directory for its files.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Pages added to the kernel's pool of huge pages.
#[derive(Debug)]
struct Taken {
    pages: u64,
}

impl Taken {
    fn take(pages: u64) -> Result<Self> {
        let meminfo = fs::read_to_string("/proc/meminfo")?;
        let is_usual = meminfo.lines().any(|line| {
            line.starts_with("Hugepagesize:") && line.split_whitespace().nth(1) == Some("2048")
        });
        ensure!(is_usual, "huge pages are not of 2 MiB here");
        let before = count()?;
        set_count(before + pages)?;
        // The drop releases the pages if they are too few.
        let taken = Self { pages: count()?.saturating_sub(before) };
        if taken.pages < pages {
            bail!("the kernel found {} of {pages} huge pages", taken.pages);
        }
        Ok(taken)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // Another process may have changed the number in between: remove only what was added.
        let given_back = count().and_then(|now| set_count(now.saturating_sub(self.pages)));
        if let Err(error) = given_back {
            eprintln!("warning: {} huge pages are not given back: {error:#}", self.pages);
        }
    }
}

fn count() -> Result<u64> {
    let text = fs::read_to_string(COUNT).with_context(|| format!("cannot read {COUNT}"))?;
    text.trim().parse().with_context(|| format!("{COUNT} says {text:?}"))
}

fn set_count(count: u64) -> Result<()> {
    fs::write(COUNT, count.to_string()).with_context(|| format!("cannot write {COUNT}"))
}
