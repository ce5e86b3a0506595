//! Describes an object, as text and as JSON.

use anyhow::Result;
use aquifer::pool::format::inode::Inode;
use aquifer::pool::{Holder, LockMode};
use aquifer::{ObjectInfo, ObjectState, Objects};
use aquifer_sys::units::Bytes;
use serde::Serialize;

use crate::output;

/// An object, as JSON.
#[derive(Debug, Serialize)]
pub struct Object {
    /// Its name; escaped if it is not UTF-8.
    pub name: String,
    /// Whether the name is UTF-8 and therefore unescaped.
    pub name_is_utf8: bool,
    /// Length in bytes.
    pub size_bytes: u64,
    /// The address it is attached at.
    pub address: u64,
    /// Whether it may move to another address.
    pub is_relocatable: bool,
    /// Whether it holds a heap.
    pub is_heap: bool,
    /// The state's letter: D, R, W, P or C.
    pub state: char,
    /// The state's name.
    pub state_name: &'static str,
    /// The processes known to have it attached.
    pub holders: Vec<HolderReport>,
    /// Whether reading requires a key.
    pub needs_read_key: bool,
    /// Whether writing requires a key.
    pub needs_write_key: bool,
    /// When it was created, in nanoseconds since 1970.
    pub created_ns: u64,
    /// When its metadata was last changed.
    pub changed_ns: u64,
    /// The location of its content in the pool.
    pub runs: Vec<RunReport>,
    /// Bytes of the pool reserved for its large commits.
    pub shadow_bytes: u64,
    #[serde(skip)]
    shown_name: String,
}

/// A process that has an object attached.
#[derive(Debug, Serialize)]
pub struct HolderReport {
    pid: u32,
    access: &'static str,
    is_committing: bool,
}

/// A contiguous part of the pool file.
#[derive(Debug, Serialize)]
pub struct RunReport {
    offset_bytes: u64,
    len_bytes: u64,
}

impl From<&Holder> for HolderReport {
    fn from(holder: &Holder) -> HolderReport {
        HolderReport {
            pid: holder.pid,
            access: match holder.mode {
                LockMode::Shared => "read",
                LockMode::Exclusive => "write",
            },
            is_committing: holder.is_committing,
        }
    }
}

/// All objects of a pool, by name.
pub fn all(objects: &Objects) -> Result<Vec<Object>> {
    let infos = objects.list()?;
    let inodes = objects.pool().inodes()?;
    Ok(infos.iter().map(|info| Object::of(info, &inodes)).collect())
}

/// One object.
pub fn one(objects: &Objects, name: &[u8]) -> Result<Object> {
    let info = objects.info(name)?;
    let inode = objects.pool().inode(info.number)?;
    Ok(Object::of(&info, &[inode]))
}

impl Object {
    fn of(info: &ObjectInfo, inodes: &[Inode]) -> Object {
        // The number may belong to another object now.
        let inode = inodes
            .iter()
            .find(|inode| inode.number == info.number && inode.created_ns == info.created_ns);
        let name = info.name.as_bytes();
        let runs = inode.map_or(&[][..], |inode| &inode.runs);
        let utf8 = info.name.to_str();
        Object {
            name: utf8.map_or_else(|| output::escaped(name), str::to_owned),
            name_is_utf8: utf8.is_some(),
            size_bytes: info.size_bytes,
            address: info.address,
            is_relocatable: info.is_relocatable,
            is_heap: inode.is_some_and(|inode| inode.is_heap),
            state: info.state.letter(),
            state_name: state_name(info.state),
            holders: info.holders.iter().map(HolderReport::from).collect(),
            needs_read_key: info.needs_read_key,
            needs_write_key: info.needs_write_key,
            created_ns: info.created_ns,
            changed_ns: info.changed_ns,
            runs: runs
                .iter()
                .map(|run| run.bytes())
                .map(|range| RunReport {
                    offset_bytes: range.offset_bytes,
                    len_bytes: range.len_bytes,
                })
                .collect(),
            shadow_bytes: info.shadow_bytes,
            shown_name: output::escaped(name),
        }
    }

    /// Its name, for a terminal.
    pub fn shown_name(&self) -> &str {
        &self.shown_name
    }

    /// The process numbers of the known holders; may be empty.
    pub fn shown_holders(&self) -> String {
        let pids: Vec<_> = self.holders.iter().map(|holder| holder.pid.to_string()).collect();
        pids.join(", ")
    }

    /// The accesses that require a key.
    pub fn shown_keys(&self) -> &'static str {
        match (self.needs_read_key, self.needs_write_key) {
            (false, false) => "none",
            (false, true) => "write",
            (true, false) => "read",
            (true, true) => "read, write",
        }
    }

    /// The complete description, one line per property.
    pub fn to_text(&self, pool: &str) -> String {
        let end = self.address.saturating_add(self.size_bytes);
        let stays = if self.is_relocatable { "may move" } else { "fixed" };
        let heap = if self.is_heap { ", for a heap" } else { "" };
        let runs = self
            .runs
            .iter()
            .map(|run| format!("{} at {:#x} of the pool", Bytes(run.len_bytes), run.offset_bytes));
        let mut state = format!("{}: {}", self.state, self.state_name);
        if !self.holders.is_empty() {
            state.push_str(&format!("; attached by {}", self.shown_holders()));
        } else if matches!(self.state, 'R' | 'W') {
            state.push_str(", by unknown processes");
        }
        let mut lines = vec![
            ("size", format!("{}{heap}", Bytes(self.size_bytes))),
            ("address", format!("{:#x} to {end:#x}, {stays}", self.address)),
            ("runs", runs.collect::<Vec<_>>().join(", ")),
            ("state", state),
            ("keys", self.shown_keys().to_owned()),
            ("created", output::moment(self.created_ns)),
            ("changed", output::moment(self.changed_ns)),
        ];
        if self.shadow_bytes > 0 {
            lines.push(("shadow", format!("{} reserved for commits", Bytes(self.shadow_bytes))));
        }
        let lines: Vec<_> =
            lines.into_iter().map(|(name, value)| [name.to_owned(), value]).collect();
        format!("{} in {pool}\n{}", self.shown_name, output::columns(&lines))
    }
}

fn state_name(state: ObjectState) -> &'static str {
    match state {
        ObjectState::Detached => "detached",
        ObjectState::Reading => "attached for reading",
        ObjectState::Writing => "attached for writing",
        ObjectState::Persisting => "a commit is being written",
        ObjectState::Copying => "a commit is durable in the log, but not yet at its place",
    }
}
