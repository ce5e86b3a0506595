//! Credentials that a function of the caller supplies: of a profile, a single sign-on, a vault.
//!
//! The function runs in a blocking thread of the device's runtime, never in a fault handler, while requests wait for it
//! within their timeout. Its credentials are kept until shortly before they expire. What it says of a failure is dropped:
//! it may contain secrets.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use object_store::azure::AzureCredential;
use object_store::gcp::GcpCredential;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

/// How long before they expire credentials are replaced, if they live twice as long.
const MARGIN: Duration = Duration::from_secs(60);

/// What [`RemoteOptions::credentials`](crate::RemoteOptions::credentials) supplies. `Debug` shows no secrets.
#[derive(Clone)]
pub struct Credentials {
    secret: Secret,
    expires: Option<SystemTime>,
}

#[derive(Clone)]
enum Secret {
    Key { id: String, secret: String, session_token: Option<String> },
    Bearer(String),
}

impl Credentials {
    /// An access key, for `s3://`.
    pub fn key(id: impl Into<String>, secret: impl Into<String>) -> Credentials {
        let secret = Secret::Key { id: id.into(), secret: secret.into(), session_token: None };
        Credentials { secret, expires: None }
    }

    /// A temporary access key with its session token, for `s3://`.
    pub fn session_key(
        id: impl Into<String>,
        secret: impl Into<String>,
        session_token: impl Into<String>,
    ) -> Credentials {
        let session_token = Some(session_token.into());
        let secret = Secret::Key { id: id.into(), secret: secret.into(), session_token };
        Credentials { secret, expires: None }
    }

    /// A bearer token, for `gs://` and `az://`.
    pub fn bearer(token: impl Into<String>) -> Credentials {
        Credentials { secret: Secret::Bearer(token.into()), expires: None }
    }

    /// When they expire; without it they are kept as long as the device.
    pub fn expires(mut self, at: SystemTime) -> Credentials {
        self.expires = Some(at);
        self
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("expires", &self.expires).finish_non_exhaustive()
    }
}

type Supplied = Result<Credentials, Box<dyn std::error::Error + Send + Sync>>;

/// The caller's function.
#[derive(Clone)]
pub(crate) struct Provider(Arc<dyn Fn() -> Supplied + Send + Sync>);

impl Provider {
    pub fn new(supply: impl Fn() -> Supplied + Send + Sync + 'static) -> Provider {
        Provider(Arc::new(supply))
    }
}

/// Why there are no credentials.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NoCredentials(pub &'static str);

/// The provider as `object_store` asks for it, with what it last supplied. Of one process: a forked child makes another.
pub(crate) struct Kept<C> {
    provider: Provider,
    convert: fn(Secret) -> Option<C>,
    state: Mutex<State<C>>,
}

struct State<C> {
    last: Option<Last<C>>,
    /// A call of the function, which goes on when the request that began it is given up.
    call: Option<Call>,
}

struct Call {
    began: SystemTime,
    supplied: JoinHandle<Supplied>,
}

struct Last<C> {
    credential: Arc<C>,
    /// When the next ones are asked for, and until when these ones can be used; never and forever without an end.
    times: Option<(SystemTime, SystemTime)>,
}

impl<C> Last<C> {
    /// Whether one of its times has come.
    fn is_over(&self, time: fn((SystemTime, SystemTime)) -> SystemTime) -> bool {
        self.times.is_some_and(|times| time(times) <= SystemTime::now())
    }
}

impl<C> Kept<C> {
    fn new(provider: &Provider, convert: fn(Secret) -> Option<C>) -> Arc<Kept<C>> {
        let state = Mutex::new(State { last: None, call: None });
        Arc::new(Kept { provider: provider.clone(), convert, state })
    }

    fn call(&self) -> Call {
        let provider = self.provider.clone();
        let supplied = tokio::task::spawn_blocking(move || (provider.0)());
        Call { began: SystemTime::now(), supplied }
    }

    /// Waits for the call under way, or for a new one.
    async fn supply(&self, under_way: &mut Option<Call>) -> Result<Last<C>, NoCredentials> {
        let call = under_way.get_or_insert_with(|| self.call());
        // If this wait is given up, the call stays for the next request.
        let supplied = (&mut call.supplied).await;
        let began = call.began;
        *under_way = None;
        let credentials = match supplied {
            Ok(Ok(credentials)) => credentials,
            Ok(Err(_)) => return Err(NoCredentials("the provider of credentials failed")),
            Err(_) => return Err(NoCredentials("the provider of credentials panicked")),
        };
        let credential = (self.convert)(credentials.secret).ok_or(NoCredentials(
            "the provider's credentials are of another kind; s3:// takes a key, gs:// and az:// a bearer token",
        ))?;
        let times = credentials.expires.map(|end| {
            let life = end.duration_since(began).unwrap_or_default();
            (end - MARGIN.min(life / 2), end)
        });
        Ok(Last { credential: Arc::new(credential), times })
    }
}

impl Kept<AwsCredential> {
    pub fn aws(provider: &Provider) -> Arc<Kept<AwsCredential>> {
        Kept::new(provider, |secret| match secret {
            Secret::Key { id, secret, session_token } => {
                Some(AwsCredential { key_id: id, secret_key: secret, token: session_token })
            }
            Secret::Bearer(_) => None,
        })
    }
}

impl Kept<GcpCredential> {
    pub fn gcp(provider: &Provider) -> Arc<Kept<GcpCredential>> {
        Kept::new(provider, |secret| match secret {
            Secret::Bearer(bearer) => Some(GcpCredential { bearer }),
            Secret::Key { .. } => None,
        })
    }
}

impl Kept<AzureCredential> {
    pub fn azure(provider: &Provider) -> Arc<Kept<AzureCredential>> {
        Kept::new(provider, |secret| match secret {
            Secret::Bearer(token) => Some(AzureCredential::BearerToken(token)),
            Secret::Key { .. } => None,
        })
    }
}

impl<C> fmt::Debug for Kept<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").finish_non_exhaustive()
    }
}

#[async_trait::async_trait]
impl<C: Send + Sync> CredentialProvider for Kept<C> {
    type Credential = C;

    async fn get_credential(&self) -> object_store::Result<Arc<C>> {
        // One call at a time: the other requests wait for it.
        let mut state = self.state.lock().await;
        let State { last, call } = &mut *state;
        if last.as_ref().is_none_or(|last| last.is_over(|(renewal, _)| renewal)) {
            let was_under_way = call.is_some();
            let mut supplied = self.supply(call).await;
            // What an abandoned call supplied may be too old by now.
            if was_under_way && supplied.as_ref().is_ok_and(|last| last.is_over(|(_, end)| end)) {
                supplied = self.supply(call).await;
            }
            match supplied {
                Ok(supplied) => *last = Some(supplied),
                // The old ones are good for a while.
                Err(_) if last.as_ref().is_some_and(|last| !last.is_over(|(_, end)| end)) => {}
                Err(error) => {
                    let source = Box::new(error);
                    return Err(object_store::Error::Generic { store: "credentials", source });
                }
            }
        }
        Ok(last.as_ref().expect("kept or supplied").credential.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn what_is_kept_is_good_until_its_end() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let now = SystemTime::now();
        let (soon, past) = (now + Duration::from_secs(3600), now - Duration::from_secs(1));
        let fails = Provider::new(|| Err("hunter2".into()));
        for (times, is_good) in [
            (None, true),
            (Some((soon, soon)), true),
            (Some((past, soon)), true),
            (Some((past, past)), false),
        ] {
            let kept = Kept::gcp(&fails);
            let credential = Arc::new(GcpCredential { bearer: "old".into() });
            kept.state.try_lock().unwrap().last = Some(Last { credential, times });
            let got = runtime.block_on(kept.get_credential());
            assert_eq!(got.is_ok_and(|got| got.bearer == "old"), is_good, "{times:?}");
        }
        // Of a long life and of a short one.
        for (life, renewal) in [(3600, 3540), (60, 30)] {
            let end = SystemTime::now() + Duration::from_secs(life);
            let supply = move || Ok(Credentials::bearer("new").expires(end));
            let supplied = runtime.block_on(Kept::gcp(&Provider::new(supply)).supply(&mut None));
            let (at, until) = supplied.unwrap().times.unwrap();
            assert_eq!(until, end);
            let left = at.duration_since(end - Duration::from_secs(life)).unwrap().as_secs();
            assert!((renewal..=renewal + 30).contains(&left), "{left}");
        }
    }

    /// A provider that takes longer than a request may.
    #[test]
    fn a_call_is_kept_for_the_next_request() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (supply, supplied) = std::sync::mpsc::channel();
        let supplied = std::sync::Mutex::new(supplied);
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let kept = Kept::gcp(&Provider::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            supplied.lock().unwrap().recv()?;
            Ok(Credentials::bearer("slow"))
        }));
        runtime.block_on(async {
            for _ in 0..3 {
                let limit = Duration::from_millis(20);
                assert!(tokio::time::timeout(limit, kept.get_credential()).await.is_err());
            }
            supply.send(()).unwrap();
            assert_eq!(kept.get_credential().await.unwrap().bearer, "slow");
        });
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }
}
