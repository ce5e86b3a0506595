//! Options of each command that uses snapshots in an object store.

use std::time::Duration;

use anyhow::Result;
use aquifer::remote::RemoteOptions;
use aquifer::remote::publish::SnapshotStore;

/// How the store is reached.
#[derive(Debug, clap::Args)]
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

    /// Most seconds for one request with its retries [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
}

/// The help text after the examples.
pub const HELP: &str = "\
URL is the prefix of all objects: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY, with the snapshots of \
one pool. Credentials come from the environment (AWS_…, GOOGLE_…, AZURE_…), from a web identity, or from the instance.";

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.001..=86_400.0).contains(seconds));
    let seconds = seconds.ok_or("must be a number of seconds from 0.001 to 86400")?;
    Ok(Duration::from_secs_f64(seconds))
}

impl StoreArgs {
    /// Opens the store at a URL.
    pub fn open(&self, url: &str) -> Result<SnapshotStore> {
        let mut options =
            RemoteOptions::default().allow_http(self.allow_http).anonymous(self.anonymous);
        if let Some(endpoint) = &self.endpoint {
            options = options.endpoint(endpoint);
        }
        if let Some(region) = &self.region {
            options = options.region(region);
        }
        if let Some(timeout) = self.timeout {
            options = options.timeout(timeout);
        }
        Ok(SnapshotStore::open_with(url, &options)?)
    }
}
