//! Where the socket of a broker is.

use std::path::{Path, PathBuf};

use crate::options::PoolOptions;

/// The default path of the socket of a pool's broker.
pub fn socket_beside(pool: &Path) -> PathBuf {
    let mut path = pool.as_os_str().to_owned();
    path.push(".socket");
    path.into()
}

pub(super) fn socket_of(pool: &Path, options: &PoolOptions) -> PathBuf {
    options.broker_socket.clone().unwrap_or_else(|| socket_beside(pool))
}
