//! Extended attributes, and access control lists, which are some of them.

use aquifer_fs::SetMode;

use super::{Errno, PoolFs, Result};
use crate::answer::Answer;
use crate::wire::{Request, XattrOut, xattr};

/// Attributes that only privileged programs see.
const TRUSTED: &[u8] = b"trusted.";

/// Answers with the bytes, or with how many there are.
fn give(answer: Answer<'_>, result: Result<Vec<u8>>, room: u32) {
    let room = room as usize;
    let _ = match result {
        Ok(bytes) if room == 0 => answer.value(&XattrOut { size: bytes.len() as u32, padding: 0 }),
        Ok(bytes) if bytes.len() > room => answer.error(libc::ERANGE),
        Ok(bytes) => answer.bytes(&bytes),
        Err(Errno(errno)) => answer.error(errno),
    };
}

impl PoolFs {
    /// Once told that there are none, the kernel does not ask again.
    fn check_xattrs(&self) -> Result<()> {
        if self.options.xattrs { Ok(()) } else { Err(Errno(libc::ENOSYS)) }
    }

    pub(super) fn get_xattr(&self, answer: Answer<'_>, node: u64, name: &[u8], room: u32) {
        let value = self.check_xattrs().and_then(|()| self.node(node));
        let value = value.and_then(|node| Ok(self.nodes.attribute(node, name)?));
        give(answer, value, room);
    }

    pub(super) fn list_xattrs(&self, answer: Answer<'_>, request: &Request<'_>, room: u32) {
        let names = self.check_xattrs().and_then(|()| self.node(request.node));
        let names = names.and_then(|node| Ok(self.nodes.attributes(node)?));
        let is_seen = |name: &&Vec<u8>| request.uid == 0 || !name.starts_with(TRUSTED);
        let listed = names.map(|names| {
            names
                .iter()
                .filter(is_seen)
                .flat_map(|name| [name, &b"\0"[..]])
                .flatten()
                .copied()
                .collect()
        });
        give(answer, listed, room);
    }

    pub(super) fn set_xattr(
        &self,
        request: &Request<'_>,
        (name, value): (&[u8], &[u8]),
        flags: u32,
        more_flags: u32,
    ) -> Result<()> {
        self.check_xattrs()?;
        let mode = match flags {
            0 => SetMode::Any,
            xattr::CREATE => SetMode::Create,
            xattr::REPLACE => SetMode::Replace,
            _ => return Err(Errno(libc::EINVAL)),
        };
        // The kernel has decided whether setting the list clears the set-group-ID bit.
        let by = self.changing(request).may_set_id(more_flags & xattr::ACL_KILL_SGID == 0);
        Ok(self.nodes.set_attribute(self.node(request.node)?, name, value, mode, &by)?)
    }

    pub(super) fn remove_xattr(&self, request: &Request<'_>, name: &[u8]) -> Result<()> {
        self.check_xattrs()?;
        let by = self.changing(request);
        Ok(self.nodes.remove_attribute(self.node(request.node)?, name, &by)?)
    }
}
