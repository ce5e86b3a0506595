//! The built-in policies by name, for builders and command lines.

use std::fmt;
use std::str::FromStr;

use super::{Clock, LoopClock, Lru, Policy, S3Fifo, Sieve};

/// A built-in policy. Displays and parses as its [`Policy::name`].
///
/// ```
/// use aquifer_cache::policy::PolicyKind;
///
/// let kind: PolicyKind = "s3-fifo".parse()?;
/// assert_eq!(kind, PolicyKind::S3Fifo);
/// assert_eq!(kind.build().name(), "s3-fifo");
/// assert!("mru".parse::<PolicyKind>().unwrap_err().to_string().contains("clock, "));
/// # Ok::<(), aquifer_cache::policy::UnknownPolicy>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PolicyKind {
    /// [`Clock`].
    Clock,
    /// [`LoopClock`].
    LoopClock,
    /// [`Lru`].
    Lru,
    /// [`S3Fifo`].
    S3Fifo,
    /// [`Sieve`].
    Sieve,
}

impl PolicyKind {
    /// All built-in policies.
    pub const fn all() -> &'static [PolicyKind] {
        use PolicyKind::*;
        &[Clock, LoopClock, Lru, S3Fifo, Sieve]
    }

    /// The policy's name.
    pub const fn name(self) -> &'static str {
        match self {
            PolicyKind::Clock => "clock",
            PolicyKind::LoopClock => "loop-clock",
            PolicyKind::Lru => "lru",
            PolicyKind::S3Fifo => "s3-fifo",
            PolicyKind::Sieve => "sieve",
        }
    }

    /// A policy of this kind that holds nothing yet.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            PolicyKind::Clock => Box::new(Clock::new()),
            PolicyKind::LoopClock => Box::new(LoopClock::new()),
            PolicyKind::Lru => Box::new(Lru::new()),
            PolicyKind::S3Fifo => Box::new(S3Fifo::new()),
            PolicyKind::Sieve => Box::new(Sieve::new()),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for a name that no built-in policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown eviction policy \"{name}\": use one of {}", all_names())]
pub struct UnknownPolicy {
    /// The given name.
    pub name: String,
}

fn all_names() -> String {
    PolicyKind::all().iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<PolicyKind, UnknownPolicy> {
        let found = PolicyKind::all().iter().find(|kind| kind.name() == name);
        found.copied().ok_or_else(|| UnknownPolicy { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_policies_and_parse_back() {
        for &kind in PolicyKind::all() {
            assert_eq!(kind.build().name(), kind.to_string());
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
    }
}
