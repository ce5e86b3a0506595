//! Progress of long operations, on standard error; disabled if that is not a terminal.

mod watched;

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub use watched::Watched;

const TICK: Duration = Duration::from_millis(200);

/// A progress bar that counts bytes. Removed on drop.
pub struct Bytes(ProgressBar);

impl Bytes {
    /// A bar whose total is set later. It fits into 80 columns: a wrapped bar leaves lines behind.
    pub fn new(what: &'static str) -> Bytes {
        Self::with_template("{elapsed_precise} {bar:20} {bytes}/{total_bytes} {msg}", what)
    }

    /// A byte counter for an unknown total.
    pub fn without_end(what: &'static str) -> Bytes {
        let bar = Self::with_template("{elapsed_precise} {spinner} {bytes} {msg}", what);
        bar.0.enable_steady_tick(TICK);
        bar
    }

    fn with_template(template: &str, what: &'static str) -> Bytes {
        let target = if std::io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let style = ProgressStyle::with_template(template).expect("a valid template");
        // `set_message` would draw it, and a bar with a total of zero is full.
        let bar = ProgressBar::with_draw_target(Some(0), target).with_style(style);
        Bytes(bar.with_message(what))
    }

    /// Sets the bytes done and the total.
    pub fn at(&self, done_bytes: u64, all_bytes: u64) {
        let is_first = self.0.length() == Some(0);
        self.0.set_length(all_bytes);
        self.0.set_position(done_bytes);
        if is_first {
            self.0.enable_steady_tick(TICK);
        }
    }

    /// Adds bytes done, and sets the total.
    pub fn add_towards(&self, bytes: u64, all_bytes: u64) {
        self.at(self.0.position() + bytes, all_bytes);
    }

    /// Names what is done now.
    #[cfg(feature = "remote")]
    pub fn name(&self, what: &'static str) {
        self.0.set_message(what);
    }

    /// Runs `say` with the bar hidden.
    pub fn aside<T>(&self, say: impl FnOnce() -> T) -> T {
        self.0.suspend(say)
    }

    /// Removes the bar from the terminal.
    pub fn clear(&self) {
        self.0.finish_and_clear();
    }

    /// Adds bytes done.
    pub fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.clear();
    }
}
