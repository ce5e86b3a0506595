//! For whom something is created or changed.

use aquifer_sys::credentials;

/// For whom a call creates or changes something: as the kernel knows the thread that makes a system
/// call.
///
/// A pool enforces no permissions, except for a caller with [`Caller::enforced`]. The identity decides what new files look like: their owner, and
/// which bits of their permissions they get. [`Files`](crate::Files) acts for its own process; a
/// server that acts for others passes theirs to [`Nodes`](crate::node::Nodes).
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::node::{Caller, NewNode};
///
/// let caller = Caller::new(1000, 100).umask(0o027);
/// let nodes = files.nodes();
/// let made = nodes.make(nodes.root()?, b"f", &NewNode::file(0o666), &caller)?;
/// assert_eq!((made.uid(), made.gid(), made.mode() & 0o777), (1000, 100, 0o640));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) umask: u32,
    pub(crate) may_set_id: bool,
    pub(crate) is_enforced: bool,
}

impl Caller {
    /// A caller with this user and group, no other groups, and no umask. User 0 may set
    /// set-group-ID bits; see [`Caller::may_set_id`].
    pub fn new(uid: u32, gid: u32) -> Caller {
        Caller { uid, gid, groups: Vec::new(), umask: 0, may_set_id: uid == 0, is_enforced: false }
    }

    /// Sets the supplementary groups.
    #[must_use]
    pub fn groups(self, groups: impl Into<Vec<u32>>) -> Caller {
        Caller { groups: groups.into(), ..self }
    }

    /// Sets the permissions that new files do not get.
    #[must_use]
    pub fn umask(self, umask: u32) -> Caller {
        Caller { umask: umask & 0o777, ..self }
    }

    /// Sets whether it may keep and set the set-group-ID bit of files of groups that it is not in:
    /// `CAP_FSETID`.
    #[must_use]
    pub fn may_set_id(self, may_set_id: bool) -> Caller {
        Caller { may_set_id, ..self }
    }

    /// Refuses changes that the present owner and mode of a file do not permit this caller: for a
    /// server whose clients have checked permissions by attributes that others may have changed since.
    /// The check and the change are one transaction. User 0 may change all files; other users get no
    /// rights from capabilities.
    ///
    /// | change | permitted for |
    /// |---|---|
    /// | mode, owner, group, access control lists, times other than now | the owner |
    /// | both times to now; attributes in `user.`, except of a directory with the sticky bit | the owner, and users that may write to the file. A user counts as a member of each group |
    /// | attributes in `trusted.` and `security.`, length | all callers: neither depends on the owner |
    ///
    /// [`Caller::may_set_id`] then counts for directories and for user 0 only: other users can set and
    /// keep the set-group-ID bit of a file of their own groups, which are those that this caller names.
    #[must_use]
    pub fn enforced(self) -> Caller {
        Caller { is_enforced: true, ..self }
    }

    /// Whether it belongs to a group.
    pub fn is_in(&self, group: u32) -> bool {
        self.gid == group || self.groups.contains(&group)
    }

    /// This process. `makes_files`: whether it will create or change any; else only its user is asked for.
    pub(crate) fn of_process(makes_files: bool) -> Caller {
        let owner = credentials::effective();
        let caller = Caller::new(owner.uid, owner.gid);
        if !makes_files {
            return caller;
        }
        caller
            .umask(credentials::umask())
            .groups(credentials::groups())
            .may_set_id(credentials::may_set_id())
    }
}
