//! Options of commands that take URLs of objects.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::Result;
use aquifer::remote::{RemoteOptions, Tier};
use aquifer_sys::interrupt;

use super::credentials::{Program, ProgramError};
use super::object::TierWay;

const PROGRAM_VARIABLE: &str = "AQUIFER_CREDENTIAL_PROCESS";

/// Options of each command that takes URLs of objects.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct RemoteArgs {
    #[command(flatten)]
    store: StoreArgs,

    /// Accept a server that sends no strong ETags: a change of an object while it is read may go unnoticed
    #[arg(long, help_heading = "Object stores")]
    unversioned: bool,

    /// Keep what is downloaded in this directory, and read from there what it has: the cache of `aquifer cache`
    /// [default: $AQUIFER_TIER, if it is set]
    #[arg(long, value_name = "DIR", help_heading = "Object stores")]
    tier: Option<PathBuf>,
}

/// How a store is reached.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Object stores")]
pub struct StoreArgs {
    /// Server of s3://, gs:// and az:// URLs, instead of the provider's own
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,

    /// Region of s3:// URLs
    #[arg(long, value_name = "NAME")]
    region: Option<String>,

    /// Allow an endpoint with http://, without encryption
    #[arg(long)]
    allow_http: bool,

    /// Send requests unsigned, for public objects
    #[arg(long)]
    anonymous: bool,

    /// Command that prints the credentials of s3:// URLs as a JSON object, as `credential_process` in AWS's configuration;
    /// run without a shell [default: $AQUIFER_CREDENTIAL_PROCESS, if it is set]
    #[arg(long, value_name = "COMMAND", conflicts_with = "anonymous")]
    credential_process: Option<String>,

    #[arg(skip)]
    program: OnceLock<Program>,

    /// Most seconds for one request with its retries [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.001..=86_400.0).contains(seconds));
    let seconds = seconds.ok_or("must be a number of seconds from 0.001 to 86400")?;
    Ok(Duration::from_secs_f64(seconds))
}

impl RemoteArgs {
    /// As [`StoreArgs::options`].
    pub fn options(&self, url: &str) -> Result<RemoteOptions, ProgramError> {
        Ok(self.store.options(url)?.unversioned(self.unversioned))
    }

    /// How to open objects of the store of a URL with the tier, if one is asked for.
    pub fn tier(&self, url: &str) -> Result<Option<TierWay>> {
        let named = || std::env::var_os("AQUIFER_TIER").filter(|path| !path.is_empty());
        let Some(path) = self.tier.clone().or_else(|| named().map(PathBuf::from)) else {
            return Ok(None);
        };
        let scheme = url.split("://").next().unwrap_or_default().to_ascii_lowercase();
        // They are read in place.
        if scheme == "file" {
            return Ok(None);
        }
        let options = self.options(url)?.tier(&Tier::open(path)?);
        let options = options.cancelled_by(|| interrupt::check().is_err());
        let http = scheme.starts_with("http").then(|| url.to_owned());
        Ok(Some(TierWay { options, http }))
    }
}

impl StoreArgs {
    /// The options to open an object or a store with. A command may take URLs of several kinds: each gets those that it
    /// knows. A program that supplies credentials is run here for the first time, because a store does not tell why it has none.
    pub fn options(&self, url: &str) -> Result<RemoteOptions, ProgramError> {
        let scheme = url.split("://").next().unwrap_or_default().to_ascii_lowercase();
        let is_cloud = ["s3", "gs", "az"].contains(&&*scheme);
        let mut options = RemoteOptions::default()
            .allow_http(self.allow_http)
            .anonymous(self.anonymous && is_cloud);
        if let Some(endpoint) = self.endpoint.as_ref().filter(|_| is_cloud) {
            options = options.endpoint(endpoint);
        }
        if let Some(region) = self.region.as_ref().filter(|_| scheme == "s3") {
            options = options.region(region);
        }
        if let Some(timeout) = self.timeout {
            options = options.timeout(timeout);
        }
        if let Some(program) = self.program()?.filter(|_| scheme == "s3" && !self.anonymous) {
            program.credentials()?;
            let program = program.clone();
            options = options.credentials(move || Ok(program.renewed()?));
        }
        Ok(options)
    }

    /// The program that supplies credentials, if there is one.
    fn program(&self) -> Result<Option<&Program>, ProgramError> {
        if self.program.get().is_none() {
            let named = std::env::var_os(PROGRAM_VARIABLE).filter(|command| !command.is_empty());
            let command = match (self.credential_process.clone(), named) {
                (Some(command), _) => command,
                (None, Some(named)) => named.into_string().map_err(|_| ProgramError::Words)?,
                (None, None) => return Ok(None),
            };
            let program = Program::parse(&command)?;
            self.program.get_or_init(|| program);
        }
        Ok(self.program.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_bounded() {
        assert_eq!(seconds("2.5"), Ok(Duration::from_millis(2500)));
        for wrong in ["0", "-1", "x", "NaN", "inf", "1e9", ""] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
