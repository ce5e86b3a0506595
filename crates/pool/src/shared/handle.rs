//! The handle of an open pool: what all [parts](crate::metadata::core) of it use, and what does not change
//! while it is open.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use uuid::Uuid;

use crate::error::{PoolError, Result};
use crate::format::FormatError;
use crate::format::layout::Layout;
use crate::format::record::LogIdentity;
use crate::format::run::Run;
use crate::format::superblock::{Superblock, UNKNOWN_BOOT, next_sequence};
use crate::media::Media;
use crate::mutant::{self, Mutant};
use crate::options::Company;
use crate::shared::failure::FailureKind;
use crate::shared::heartbeat::Heartbeat;
use crate::shared::members::Members;
use crate::shared::segment::{Control, FILE_MUTEXES, Segment};

/// What all parts of an open pool use.
pub(crate) struct Handle {
    /// Before the media, whose descriptor it refers to: dropped first.
    pub members: Members,
    pub media: Arc<dyn Media>,
    pub layout: Layout,
    pub uuid: Uuid,
    pub created_ns: u64,
    /// The features that the pool uses.
    pub features: u64,
    /// The pages of its saved state.
    pub saved: Run,
    /// The life in which this generation of the log began: see [`life`](crate::shared::life).
    pub life: u64,
    /// The id that names the segment in the superblock; nil for a private one.
    pub segment_id: Uuid,
    pub segment: Segment,
    pub mutant: Option<Mutant>,
    /// What this handle is to other writers.
    pub company: Company,
    /// The nonce by which others join this handle, if it is the sole writer.
    pub sole_nonce: OnceLock<u64>,
    /// By how many pages the first fresh page is raised at a time.
    pub fresh_step_pages: u64,
    /// How many of [`Control::writes`] are this handle's.
    pub own_writes: Box<[AtomicU64; FILE_MUTEXES]>,
    /// Sends heartbeats while this process waits for its media.
    pub heartbeat: Heartbeat,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Handle").field("uuid", &self.uuid).finish_non_exhaustive()
    }
}

impl Handle {
    #[inline]
    pub fn control(&self) -> &Control {
        self.segment.control()
    }

    /// Returns an error if nothing may be changed: in a fork, opened for reading, or after a
    /// failure.
    pub fn check_writable(&self) -> Result<()> {
        self.members.check_process()?;
        if !self.members.is_writable {
            return Err(PoolError::ReadOnly {
                path: self.media.path().to_path_buf(),
                reason: "it was opened for reading",
            });
        }
        self.control().check_not_failed()
    }

    /// The error for a structure of this pool that cannot be decoded.
    pub fn damaged(&self, structure: impl Into<String>, error: FormatError) -> PoolError {
        PoolError::Damaged {
            path: self.media.path().to_path_buf(),
            structure: structure.into(),
            error,
        }
    }

    /// The identity that new records of this pool carry.
    pub fn identity(&self) -> LogIdentity {
        LogIdentity {
            pool: self.uuid.as_u64_pair().0,
            generation: self.control().generation.load(Relaxed),
        }
    }

    /// The place of a position of the log on media.
    pub fn log_position(&self, lsn: u64) -> u64 {
        let log = self.layout.log();
        log.offset_bytes + lsn % log.len_bytes
    }

    /// The next superblock, with its tail at `tail_lsn`.
    pub fn superblock(&self, tail_lsn: u64) -> Superblock {
        let control = self.control();
        Superblock {
            uuid: self.uuid,
            sequence: next_sequence(control.sequence.load(Relaxed)),
            layout: self.layout,
            generation: control.generation.load(Relaxed),
            tail_lsn,
            segment: self.segment_id,
            created_ns: self.created_ns,
            features: self.features,
            saved: self.saved,
            saved_sum: 0,
            boot: match control.check_not_failed() {
                Err(_) if !mutant::is(self.mutant, Mutant::TrustLostBytes) => UNKNOWN_BOOT,
                _ => self.life,
            },
        }
    }

    /// [`Control::fail`] because the media could not be read or written, unless the program has
    /// closed a descriptor of this handle, which is what `EBADF` says (see [`media`](crate::media)):
    /// then nothing that was written before is lost. That is as if the process had died here, and no
    /// failure of the media: this handle ends.
    pub fn fail_at_media(&self, kind: FailureKind, error: &io::Error) {
        if error.raw_os_error() == Some(libc::EBADF) {
            self.members.end();
        } else {
            self.control().fail(kind, error);
        }
    }

    /// [`Handle::check_writable`] before files and objects are changed.
    pub fn check_may_change(&self) -> Result<()> {
        self.check_writable()?;
        self.check_not_passive()
    }

    /// The part of it that concerns passive handles.
    #[inline]
    pub fn check_not_passive(&self) -> Result<()> {
        if self.company == Company::Passive {
            return Err(PoolError::ReadOnly {
                path: self.media.path().to_path_buf(),
                reason: "it was opened passively, to be kept open",
            });
        }
        Ok(())
    }
}
