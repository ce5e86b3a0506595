//! The broker of a pool: grants write access to processes that may only read it.
//!
//! The kernel protects a pool from other users by the mode of its file and of its shared memory. A
//! reader has read-only descriptors, and nothing it does, by mistake or on purpose, reaches the
//! media. The broker runs as a user with write permission, listens at a Unix socket, and sends
//! three descriptors (`SCM_RIGHTS`) to a process that knows the *key*:
//!
//! | descriptor | how it is made |
//! |---|---|
//! | the pool file | opened anew for each client: locks belong to the open file, and each client needs its own |
//! | the segment | the broker's: nothing relies on whose its lock is, which only keeps the file from being removed |
//! | the pins | the broker's |
//!
//! With these the client is a writer like any other, and does not need the broker any more: it
//! commits, locks and recovers together with the other writers, even after the broker has ended or
//! was killed. Access that was granted cannot be revoked.
//!
//! # Keys
//! The broker keeps a salt and `SHA-256(salt ‖ label ‖ key)`, in memory only, and compares them in
//! constant time. A client sends its key only to a broker that runs as the pool's owner or as root
//! (`SO_PEERCRED`).
//!
//! # One broker per pool
//! A broker keeps a byte of the pool file locked (`membership`), so a pool has at most one broker,
//! and a socket that a dead broker left at the path can be removed.
//!
//! ```no_run
//! use std::os::fd::AsFd;
//! use aquifer_pool::{AccessKey, Broker, Pool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The owner's process.
//! let key = AccessKey::create_file("data.pool.key")?;
//! let options = Pool::options().segment_mode(0o644);
//! let broker = Broker::bind(&options.open("data.pool")?, &key, &options)?;
//! let (stop, _until_dropped) = std::io::pipe()?;
//! broker.serve(stop.as_fd(), &|asked| eprintln!("{asked}"))?;
//! # Ok(())
//! # }
//!
//! // Another user's process.
//! # fn other() -> Result<(), Box<dyn std::error::Error>> {
//! let reader = Pool::options().read_only(true).open("data.pool")?;
//! let key = AccessKey::from_file("data.pool.key")?;
//! let writer = reader.grant_access(&key, &Pool::options())?;
//! assert!(writer.is_writable());
//! # Ok(())
//! # }
//! ```

mod client;
mod key;
mod message;
mod outcome;
mod server;
mod socket;

pub(crate) use self::client::{Granted, ask};
pub use self::key::AccessKey;
pub use self::outcome::{Asked, Outcome};
pub use self::server::Broker;
pub(crate) use self::server::files_to_pass;
pub use self::socket::socket_beside;
pub use crate::access_error::AccessError;
