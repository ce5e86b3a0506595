//! References between slots: from inodes to their parts, and from names to inodes.
//!
//! ```text
//!   inode ──► run list ──► run list            each part has one reference, from its inode or its chain
//!     │
//!     └─────► node ──► leaf ──► inode          each name refers to an inode of its kind
//! ```
//!
//! Even if each slot is valid, a file can be wrong: its list may be another file's, its last name
//! may be missing while another one still refers to it, its directory may be in a cycle. A writer
//! would make that worse. If it removed a file with fewer links than names, the slot would be used
//! for another file, and the remaining name would refer to that. So the references between slots
//! are compared whenever the pool is opened, since each slot is read then anyway.
//!
//! # Method
//! One pass reads all slots, in any order, and keeps a few numbers of each: its kind, what refers
//! to it, and what was counted for it. Then these are compared. Upward references (from a part to
//! the slot that refers to it, from a directory to its parent) are followed step by step, and each
//! visited slot is marked, so it is visited once. So the check terminates on any bytes, does not
//! recurse, and needs an eighth of the memory of the metadata.
//!
//! # Kinds of inconsistencies
//! * A *contradiction* (a part with two references, a name that refers to nothing) is damage: which
//!   of the two is right can only be guessed.
//! * A *miscount* (links, entries, the parent) can be computed from the rest, and a repair corrects
//!   it. The pool cannot be opened for writing before that.
//! * A *loss*, a slot without references, takes space and is harmless.
//!
//! Whether the names of a directory are sorted, and whether attributes can be read, is not checked
//! here: that matters only to the readers of that directory or file, and they check it.

use std::collections::BTreeSet;

use crate::FormatError;
use crate::directory::NodeContent;
use crate::file::{FileKind, ROOT_INODE};
use crate::inode::HEAD_SLOT;
use crate::run::Run;
use crate::slot::Slot;
use crate::slot_bytes::{SLOT_BYTES, SlotBytes};

/// An inconsistency between slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkInconsistency {
    /// A slot refers to one that is not the expected kind of part.
    NoPart {
        /// The slot that refers.
        from: u64,
        /// The slot that it refers to.
        to: u64,
    },
    /// A slot refers to a part of another owner.
    ForeignPart {
        /// The slot that refers.
        from: u64,
        /// The slot that it refers to.
        to: u64,
        /// The inode that the part names as its owner.
        owner: u64,
    },
    /// A part has more than one reference.
    SharedPart {
        /// The part.
        slot: u64,
    },
    /// A part has no reference.
    LostPart {
        /// The part.
        slot: u64,
        /// The inode that the part names as its owner.
        owner: u64,
    },
    /// A name in this leaf refers to a slot without an inode that could have a name.
    NoInode {
        /// The leaf.
        leaf: u64,
        /// The inode.
        inode: u64,
    },
    /// A name in this leaf states another kind than that of its inode.
    Kind {
        /// The leaf.
        leaf: u64,
        /// The inode.
        inode: u64,
    },
    /// Several names refer to a directory, or one refers to the root.
    SeveralNames {
        /// The directory.
        directory: u64,
    },
    /// A directory is inside itself.
    Circle {
        /// The directory.
        directory: u64,
    },
    /// There is no root directory.
    NoRoot,
    /// The runs of a file have another total length than its inode states.
    Pages {
        /// The inode.
        inode: u64,
        /// What is stated.
        stated: u64,
        /// What was counted.
        found: u64,
    },
    /// The link count of an inode differs from the links that were counted.
    Links {
        /// The inode.
        inode: u64,
        /// What is stated.
        stated: u32,
        /// What was counted.
        found: u32,
    },
    /// The entry count of a directory differs from the number of its names.
    Entries {
        /// The directory.
        directory: u64,
        /// What is stated.
        stated: u64,
        /// What was counted.
        found: u64,
    },
    /// A directory is in another one than its inode states.
    Parent {
        /// The directory.
        directory: u64,
        /// The directory that its inode states.
        stated: u64,
        /// The directory with its name.
        found: u64,
    },
    /// No name refers to an inode that should have one.
    LostInode {
        /// The inode.
        inode: u64,
    },
}

/// The severity of an inconsistency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// It is unknown which side is right.
    Contradiction,
    /// A number is wrong, and the right one is known.
    Miscount,
    /// A slot cannot be reached, which is harmless.
    Loss,
}

impl LinkInconsistency {
    /// The slot to inspect, the severity, and the error in that slot.
    fn facts(&self) -> (u64, Extent, FormatError) {
        use Extent::{Contradiction, Loss, Miscount};
        let field = |field, value| FormatError::Field { field, value };
        let other = |other| FormatError::Contradiction { other };
        match *self {
            LinkInconsistency::NoPart { from, to } => (from, Contradiction, field("part", to)),
            LinkInconsistency::ForeignPart { from, owner, .. } => {
                (from, Contradiction, field("owner of a part", owner))
            }
            LinkInconsistency::SharedPart { slot } => {
                (slot, Contradiction, other("the slots that lead to it"))
            }
            LinkInconsistency::LostPart { slot, owner } => (slot, Loss, field("owner", owner)),
            LinkInconsistency::NoInode { leaf, inode } => {
                (leaf, Contradiction, field("inode", inode))
            }
            LinkInconsistency::Kind { leaf, .. } => {
                (leaf, Contradiction, other("the inode that a name in it leads to"))
            }
            LinkInconsistency::SeveralNames { directory } => {
                (directory, Contradiction, other("the names that lead to it"))
            }
            LinkInconsistency::Circle { directory } => {
                (directory, Contradiction, other("the directories that it is in"))
            }
            LinkInconsistency::NoRoot => {
                (ROOT_INODE, Contradiction, other("the names that begin there"))
            }
            LinkInconsistency::Pages { inode, stated, .. } => {
                (inode, Contradiction, field("pages", stated))
            }
            LinkInconsistency::Links { inode, stated, .. } => {
                (inode, Miscount, field("links", stated.into()))
            }
            LinkInconsistency::Entries { directory, stated, .. } => {
                (directory, Miscount, field("entries", stated))
            }
            LinkInconsistency::Parent { directory, stated, .. } => {
                (directory, Miscount, field("parent", stated))
            }
            LinkInconsistency::LostInode { inode } => {
                (inode, Loss, other("the names that lead to it"))
            }
        }
    }

    /// The slot to inspect.
    pub fn slot(&self) -> u64 {
        self.facts().0
    }

    /// Its severity.
    pub fn extent(&self) -> Extent {
        self.facts().1
    }

    /// The error in that slot.
    pub fn error(&self) -> FormatError {
        self.facts().2
    }
}

/// The number of slots of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkCounts {
    /// Files.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Symbolic links.
    pub symbolic_links: u64,
    /// Named pipes, sockets and devices.
    pub special_files: u64,
    /// Parts of all of these.
    pub parts: u64,
    /// Inodes without links, except directories.
    pub orphans: u64,
}

/// The kind of content of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Sort {
    /// Nothing that may be referred to.
    #[default]
    Other,
    /// It cannot be read; that inconsistency is reported elsewhere.
    Damaged,
    Inode(FileKind),
    Part(Part),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Node,
    Runs,
    Bytes,
}

/// Whether the upward references from a slot end where they should.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Way {
    #[default]
    Unknown,
    /// It is on the path being followed.
    Passed,
    Good,
    /// The path ends at a slot without references, or in a cycle.
    Lost,
    /// The path ends at another inconsistency.
    Broken,
}

/// The numbers that are kept of a slot.
#[derive(Debug, Clone, Copy, Default)]
struct Fact {
    sort: Sort,
    way: Way,
    /// The kind of part that the last slot that refers to it expects.
    led_as: Option<Part>,
    /// The kinds that names state for it, a bit each.
    named_as: u8,
    /// The number of slots that refer to it as a part, and the last of them.
    leads: u32,
    from: u32,
    /// The number of names that refer to it, and the leaf of the last of them.
    names: u32,
    leaf: u32,
    /// The link count of an inode.
    links: u32,
    /// The number of directories among the names in a directory.
    directories: u32,
    /// The owner of a part; the parent that a directory states.
    owner: u32,
    /// The pages that the inode of a file states, or the names that a directory states.
    stated: u64,
    /// The same, counted. For a run list: its own pages.
    found: u64,
}

fn bit(kind: FileKind) -> u8 {
    match kind {
        FileKind::File => 1,
        FileKind::Directory => 2,
        FileKind::Symlink => 4,
        FileKind::Fifo => 8,
        FileKind::Socket => 16,
        FileKind::CharDevice => 32,
        FileKind::BlockDevice => 64,
    }
}

fn mapped_pages(runs: &[Run]) -> u64 {
    runs.iter().filter(|run| !run.is_hole()).map(|run| run.pages).sum()
}

/// The number of a slot, or 0, which stands for none.
fn slot_of(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

/// All slots and the references between them.
#[derive(Debug, Default)]
pub struct Links {
    facts: Vec<Fact>,
    /// Slots from here on were never used.
    limit: u64,
    inconsistencies: Vec<LinkInconsistency>,
}

const _: () = assert!(size_of::<Fact>() <= SLOT_BYTES / 8);

impl Links {
    /// No slots yet; those from `limit` on were never used.
    pub fn new(limit: u64) -> Links {
        Links { limit, ..Links::default() }
    }

    /// The numbers of a slot; `None` if there is no such slot.
    fn fact(&mut self, number: u64) -> Option<&mut Fact> {
        if number == HEAD_SLOT || number >= self.limit || number > u32::MAX.into() {
            return None;
        }
        let index = number as usize;
        if self.facts.len() <= index {
            self.facts.resize(index + 1, Fact::default());
        }
        Some(&mut self.facts[index])
    }

    /// Notes that a slot cannot be read.
    pub fn add_damaged(&mut self, number: u64) {
        if let Some(fact) = self.fact(number) {
            fact.sort = Sort::Damaged;
        }
    }

    /// Notes the content of a slot.
    pub fn add(&mut self, number: u64, slot: &Slot) {
        match slot {
            Slot::Free(_) | Slot::Object(_) => {}
            Slot::File(inode) => {
                if let Some(fact) = self.fact(number) {
                    fact.sort = Sort::Inode(inode.kind);
                    fact.links = inode.links;
                    fact.owner = slot_of(inode.parent);
                    fact.stated = match inode.kind {
                        FileKind::Directory => inode.entries,
                        _ => inode.pages,
                    };
                    fact.found += mapped_pages(&inode.runs);
                }
                let part = match inode.kind {
                    FileKind::File => Part::Runs,
                    FileKind::Directory => Part::Node,
                    // A special file has no part.
                    _ => Part::Bytes,
                };
                self.lead(number, inode.part, part);
                self.lead(number, inode.attributes, Part::Bytes);
            }
            Slot::Runs(list) => {
                self.add_part(number, Part::Runs, list.owner, mapped_pages(&list.runs));
                self.lead(number, list.next, Part::Runs);
            }
            Slot::Bytes(chain) => {
                self.add_part(number, Part::Bytes, chain.owner, 0);
                self.lead(number, chain.next, Part::Bytes);
            }
            Slot::Node(node) => {
                self.add_part(number, Part::Node, node.owner, 0);
                match &node.content {
                    NodeContent::Interior { children, .. } => {
                        children.iter().for_each(|child| self.lead(number, child.slot, Part::Node));
                    }
                    NodeContent::Leaf(entries) => {
                        for entry in entries {
                            self.add_name(number, node.owner, entry.inode, entry.kind);
                        }
                    }
                }
            }
        }
    }

    fn add_part(&mut self, number: u64, part: Part, owner: u64, pages: u64) {
        if let Some(fact) = self.fact(number) {
            (fact.sort, fact.owner) = (Sort::Part(part), slot_of(owner));
            fact.found = pages;
        }
    }

    fn lead(&mut self, from: u64, to: u64, part: Part) {
        if to == 0 {
            return;
        }
        let Some(fact) = self.fact(to) else {
            return self.inconsistencies.push(LinkInconsistency::NoPart { from, to });
        };
        fact.leads = fact.leads.saturating_add(1);
        (fact.from, fact.led_as) = (slot_of(from), Some(part));
    }

    fn add_name(&mut self, leaf: u64, directory: u64, inode: u64, kind: FileKind) {
        if let Some(directory) = self.fact(directory) {
            directory.found += 1;
            directory.directories += u32::from(kind == FileKind::Directory);
        }
        if !self.add_name_of(leaf, inode, kind) {
            self.inconsistencies.push(LinkInconsistency::NoInode { leaf, inode });
        }
    }

    /// Notes a name of an inode; false if there is no such slot.
    fn add_name_of(&mut self, leaf: u64, inode: u64, kind: FileKind) -> bool {
        let Some(fact) = self.fact(inode) else { return false };
        fact.names = fact.names.saturating_add(1);
        fact.named_as |= bit(kind);
        fact.leaf = slot_of(leaf);
        true
    }

    /// Takes back the names in lost leaves. What is kept of the last name of an inode may be of such a
    /// leaf, so the other names of these inodes are counted again.
    fn take_lost_names(&mut self, mut read: impl FnMut(u64) -> Option<SlotBytes>) {
        let mut entries_of = |number: u64| {
            let Ok(Slot::Node(node)) = Slot::decode(&read(number)?, number) else { return None };
            let NodeContent::Leaf(entries) = node.content else { return None };
            Some((node.owner, entries))
        };
        let nodes = |facts: &[Fact], is_lost: bool| -> Vec<u64> {
            let is_wanted = |fact: &Fact| {
                fact.sort == Sort::Part(Part::Node) && (fact.way == Way::Lost) == is_lost
            };
            (facts.iter().zip(0..)).filter(|(fact, _)| is_wanted(fact)).map(|(_, at)| at).collect()
        };
        let mut again = BTreeSet::new();
        for number in nodes(&self.facts, true) {
            let Some((owner, entries)) = entries_of(number) else { continue };
            for entry in entries {
                if let Some(directory) = self.fact(owner) {
                    let is_directory = entry.kind == FileKind::Directory;
                    directory.found = directory.found.saturating_sub(1);
                    directory.directories =
                        directory.directories.saturating_sub(is_directory.into());
                }
                if let Some(fact) = self.fact(entry.inode) {
                    (fact.names, fact.named_as) = (0, 0);
                    again.insert(entry.inode);
                }
            }
        }
        if again.is_empty() {
            return;
        }
        for number in nodes(&self.facts, false) {
            let Some((_, entries)) = entries_of(number) else { continue };
            for entry in entries.into_iter().filter(|entry| again.contains(&entry.inode)) {
                self.add_name_of(number, entry.inode, entry.kind);
            }
        }
    }

    /// Compares everything. If leaves are lost, calls `read` again for all leaves.
    pub fn finish(
        mut self,
        read: impl FnMut(u64) -> Option<SlotBytes>,
    ) -> (Vec<LinkInconsistency>, LinkCounts) {
        let all = 0..self.facts.len();
        self.compare_parts();
        for index in all.clone() {
            let Fact { sort, way, owner, found, .. } = self.facts[index];
            if sort == Sort::Part(Part::Runs)
                && way != Way::Lost
                && let Some(owner) = self.fact(owner.into())
            {
                owner.found = owner.found.saturating_add(found);
            }
        }
        self.take_lost_names(read);
        let mut counts = LinkCounts::default();
        for index in all {
            self.count(self.facts[index], &mut counts);
            self.compare_names(index);
        }
        self.find_circles();
        let root = self.facts.get(ROOT_INODE as usize).map_or(Sort::Other, |fact| fact.sort);
        if !matches!(root, Sort::Damaged | Sort::Inode(FileKind::Directory)) {
            self.inconsistencies.push(LinkInconsistency::NoRoot);
        }
        (self.inconsistencies, counts)
    }

    fn count(&self, fact: Fact, counts: &mut LinkCounts) {
        match fact.sort {
            Sort::Inode(FileKind::File) => counts.files += 1,
            Sort::Inode(FileKind::Directory) => counts.directories += 1,
            Sort::Inode(FileKind::Symlink) => counts.symbolic_links += 1,
            Sort::Inode(_) => counts.special_files += 1,
            Sort::Part(_) => counts.parts += 1,
            Sort::Other | Sort::Damaged => {}
        }
        let is_orphan = matches!(fact.sort, Sort::Inode(kind) if kind != FileKind::Directory)
            && (fact.links, fact.names) == (0, 0);
        counts.orphans += u64::from(is_orphan);
    }

    /// The owner of a part; for an inode, the inode itself.
    fn owner_of(&self, number: u32) -> u32 {
        let fact = self.facts[number as usize];
        if let Sort::Part(_) = fact.sort { fact.owner } else { number }
    }

    /// Checks that each part has one reference, from its own inode.
    fn compare_parts(&mut self) {
        for index in 0..self.facts.len() {
            let fact = self.facts[index];
            let (slot, from) = (index as u64, u64::from(fact.from));
            let is_led_to = fact.leads > 0;
            let Sort::Part(part) = fact.sort else {
                if is_led_to && fact.sort != Sort::Damaged {
                    self.inconsistencies.push(LinkInconsistency::NoPart { from, to: slot });
                }
                continue;
            };
            let inconsistency = match fact.leads {
                0 => None,
                1 if fact.led_as != Some(part) => {
                    Some(LinkInconsistency::NoPart { from, to: slot })
                }
                1 if self.owner_of(fact.from) != fact.owner => {
                    Some(LinkInconsistency::ForeignPart {
                        from,
                        to: slot,
                        owner: fact.owner.into(),
                    })
                }
                1 => continue,
                _ => Some(LinkInconsistency::SharedPart { slot }),
            };
            self.facts[index].way = if inconsistency.is_some() { Way::Broken } else { Way::Lost };
            self.inconsistencies.extend(inconsistency);
        }
        self.follow(|fact| matches!(fact.sort, Sort::Part(_)).then_some(fact.from));
        for index in 0..self.facts.len() {
            let fact = self.facts[index];
            if let (Sort::Part(_), Way::Lost) = (fact.sort, fact.way) {
                let (slot, owner) = (index as u64, fact.owner.into());
                self.inconsistencies.push(LinkInconsistency::LostPart { slot, owner });
            }
        }
    }

    /// Follows the upward references from each slot, until `up` returns none or the result is
    /// known.
    fn follow(&mut self, up: impl Fn(&Fact) -> Option<u32>) {
        let mut passed: Vec<usize> = Vec::new();
        for index in 0..self.facts.len() {
            let mut here = index;
            let way = loop {
                // A stored owner can be any number.
                let Some(fact) = self.facts.get_mut(here) else { break Way::Broken };
                match fact.way {
                    Way::Unknown => {}
                    // It was visited on this same path.
                    Way::Passed => break Way::Lost,
                    known => break known,
                }
                let Some(above) = up(fact) else { break Way::Good };
                fact.way = Way::Passed;
                passed.push(here);
                here = above as usize;
            };
            for index in passed.drain(..) {
                self.facts[index].way = way;
            }
        }
    }

    /// Checks that the names and the stated counts of an inode agree, and the kinds.
    fn compare_names(&mut self, index: usize) {
        let fact = self.facts[index];
        let (inode, leaf) = (index as u64, u64::from(fact.leaf));
        let Sort::Inode(kind) = fact.sort else {
            if fact.names > 0 && fact.sort != Sort::Damaged {
                self.inconsistencies.push(LinkInconsistency::NoInode { leaf, inode });
            }
            return;
        };
        if fact.names > 0 && fact.named_as != bit(kind) {
            self.inconsistencies.push(LinkInconsistency::Kind { leaf, inode });
        }
        if kind != FileKind::Directory {
            let (stated, found) = (fact.stated, fact.found);
            if stated != found {
                self.inconsistencies.push(LinkInconsistency::Pages { inode, stated, found });
            }
            match (fact.links, fact.names) {
                (stated, found) if stated == found => {}
                (_, 0) => self.inconsistencies.push(LinkInconsistency::LostInode { inode }),
                (stated, found) => {
                    self.inconsistencies.push(LinkInconsistency::Links { inode, stated, found })
                }
            }
            return;
        }
        let directory = inode;
        let links = fact.directories.saturating_add(2);
        if fact.links != links {
            self.inconsistencies.push(LinkInconsistency::Links {
                inode,
                stated: fact.links,
                found: links,
            });
        }
        if fact.stated != fact.found {
            let (stated, found) = (fact.stated, fact.found);
            self.inconsistencies.push(LinkInconsistency::Entries { directory, stated, found });
        }
        let above = match (directory == ROOT_INODE, fact.names) {
            (true, 0) => ROOT_INODE as u32,
            (false, 0) => return self.inconsistencies.push(LinkInconsistency::LostInode { inode }),
            (false, 1) => self.owner_of(fact.leaf),
            _ => return self.inconsistencies.push(LinkInconsistency::SeveralNames { directory }),
        };
        if fact.owner != above {
            let (stated, found) = (fact.owner.into(), above.into());
            self.inconsistencies.push(LinkInconsistency::Parent { directory, stated, found });
        }
    }

    /// Finds directories whose chain of parents leads back to them.
    fn find_circles(&mut self) {
        let owners: Vec<u32> =
            (0..self.facts.len()).map(|index| self.owner_of(index as u32)).collect();
        self.facts.iter_mut().for_each(|fact| fact.way = Way::Unknown);
        self.follow(|fact| match fact.sort {
            // The path ends at the root, at a lost directory, and at one with several names.
            Sort::Inode(FileKind::Directory) if fact.names == 1 => {
                owners.get(fact.leaf as usize).copied()
            }
            _ => None,
        });
        for index in 0..self.facts.len() {
            if self.facts[index].way == Way::Lost {
                self.inconsistencies.push(LinkInconsistency::Circle { directory: index as u64 });
            }
        }
    }
}
