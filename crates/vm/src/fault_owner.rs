//! The owner of addresses whose faults the [router](crate::router) serves.

use aquifer_sys::signal::FaultContext;

/// Whether a fault was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// The access can be repeated.
    Yes,
    /// The owner cannot make the access succeed: the previous handler decides.
    No,
}

/// Serves the faults of a range of addresses.
///
/// `serve` runs inside a signal handler: it must not allocate, log, or take a lock that is held
/// while mapped memory is accessed. It must refuse in a fork of the process that made the mapping
/// (see [`ProcessMark`](crate::ProcessMark)), whose userfaultfd still addresses the parent;
/// mappings that the child makes itself are served.
///
/// It runs in the thread that faults, which keeps the mapping alive. A thread that serves the faults of others has to
/// hold a reference to the mapping.
pub trait FaultOwner: Sync {
    /// Makes the access possible, or refuses.
    fn serve(&self, fault: &FaultContext) -> Served;
}
