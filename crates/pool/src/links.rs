//! What leads to what: from inodes to their parts, and from names to inodes.
//!
//! ```text
//!   inode ──► run list ──► run list            each part is led to once, from its own inode or from a part of that
//!     │
//!     └─────► node ──► leaf ──► inode          each name leads to an inode of its kind
//! ```
//!
//! A slot can be whole, and a file be wrong all the same: its list be another file's, its last name be gone while another one still
//! leads to it, its directory be in a circle. A writer would make that worse. If it removed a file with fewer links than
//! names, the slot would be used for another file, and the name that is left would lead there. So what slots say of each
//! other is compared whenever the pool is opened, while each of them is looked at anyway.
//!
//! # How
//! All slots are looked at once, in any order, and of each a few numbers are kept: what it is, what leads to it, and what was counted for it.
//! Then these are compared. Where something leads up (from a part to what leads to it, from a directory to the one it is in),
//! the way is followed step by step, and each slot that was passed is marked: it is passed once. So there is an end on any bytes,
//! nothing calls itself, and the memory is an eighth of that of the metadata.
//!
//! # What is wrong, and how much
//! * What *contradicts* (a part that two lead to, a name that leads to nothing) is damage: which of the two is right can only be guessed.
//! * What is *miscounted* (links, entries, the parent) follows from what is there, and a repair writes it anew. Nobody
//!   may write before that.
//! * What is *lost*, because nothing leads there, takes space and harms nobody.
//!
//! Whether the names of a directory are in order, and attributes can be read, is not looked at here: it is of interest to nobody but
//! the directory's and the file's own readers, who look themselves.

use crate::format::FormatError;
use crate::format::directory::NodeContent;
use crate::format::file::{FileKind, ROOT_INODE};
use crate::format::inode::{HEAD_SLOT, SLOT_BYTES, SlotBytes};
use crate::format::run::Run;
use crate::format::slot::Slot;

/// Slots that do not fit together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkFlaw {
    /// A slot leads to one that is not what it takes it for.
    NoPart { from: u64, to: u64 },
    /// A slot leads to a part of another owner.
    ForeignPart { from: u64, to: u64, owner: u64 },
    /// More than one slot leads to a part, or one does twice.
    SharedPart { slot: u64 },
    /// Nothing leads to a part.
    LostPart { slot: u64, owner: u64 },
    /// A name in this leaf leads to a slot where nothing is that could have a name.
    NoInode { leaf: u64, inode: u64 },
    /// A name in this leaf has another kind than its inode.
    Kind { leaf: u64, inode: u64 },
    /// Several names lead to a directory, or one to the root.
    SeveralNames { directory: u64 },
    /// A directory is inside of itself.
    Circle { directory: u64 },
    /// There is no root directory.
    NoRoot,
    /// The runs of a file are not as long together as its inode says.
    Pages { inode: u64, stated: u64, found: u64 },
    /// An inode has not as many links as lead to it.
    Links { inode: u64, stated: u32, found: u32 },
    /// A directory has not as many names as its inode says.
    Entries { directory: u64, stated: u64, found: u64 },
    /// A directory is in another one than its inode says.
    Parent { directory: u64, stated: u64, found: u64 },
    /// No name leads to an inode that is to have one.
    LostInode { inode: u64 },
}

/// How much is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Something is, and what is right is not known.
    Contradiction,
    /// A number is, and the right one is known.
    Miscount,
    /// Something cannot be reached, and is in nobody's way.
    Loss,
}

impl LinkFlaw {
    pub fn extent(&self) -> Extent {
        match self {
            LinkFlaw::NoPart { .. }
            | LinkFlaw::ForeignPart { .. }
            | LinkFlaw::SharedPart { .. }
            | LinkFlaw::NoInode { .. }
            | LinkFlaw::Kind { .. }
            | LinkFlaw::SeveralNames { .. }
            | LinkFlaw::Circle { .. }
            | LinkFlaw::NoRoot
            | LinkFlaw::Pages { .. } => Extent::Contradiction,
            LinkFlaw::Links { .. } | LinkFlaw::Entries { .. } | LinkFlaw::Parent { .. } => {
                Extent::Miscount
            }
            LinkFlaw::LostPart { .. } | LinkFlaw::LostInode { .. } => Extent::Loss,
        }
    }

    /// The slot that is to be looked at.
    pub fn slot(&self) -> u64 {
        match *self {
            LinkFlaw::NoPart { from, .. } | LinkFlaw::ForeignPart { from, .. } => from,
            LinkFlaw::SharedPart { slot } | LinkFlaw::LostPart { slot, .. } => slot,
            LinkFlaw::NoInode { leaf, .. } | LinkFlaw::Kind { leaf, .. } => leaf,
            LinkFlaw::NoRoot => ROOT_INODE,
            LinkFlaw::SeveralNames { directory }
            | LinkFlaw::Circle { directory }
            | LinkFlaw::Entries { directory, .. }
            | LinkFlaw::Parent { directory, .. } => directory,
            LinkFlaw::Pages { inode, .. }
            | LinkFlaw::Links { inode, .. }
            | LinkFlaw::LostInode { inode } => inode,
        }
    }

    /// What is wrong with that.
    pub fn error(&self) -> FormatError {
        let field = |field, value| FormatError::Field { field, value };
        let contradiction = |other| FormatError::Contradiction { other };
        match *self {
            LinkFlaw::NoPart { to, .. } => field("part", to),
            LinkFlaw::ForeignPart { owner, .. } => field("owner of a part", owner),
            LinkFlaw::SharedPart { .. } => contradiction("the slots that lead to it"),
            LinkFlaw::LostPart { owner, .. } => field("owner", owner),
            LinkFlaw::NoInode { inode, .. } => field("inode", inode),
            LinkFlaw::Kind { .. } => contradiction("the inode that a name in it leads to"),
            LinkFlaw::SeveralNames { .. } | LinkFlaw::LostInode { .. } => {
                contradiction("the names that lead to it")
            }
            LinkFlaw::Circle { .. } => contradiction("the directories that it is in"),
            LinkFlaw::NoRoot => contradiction("the names that begin there"),
            LinkFlaw::Pages { stated, .. } => field("pages", stated),
            LinkFlaw::Links { stated, .. } => field("links", stated.into()),
            LinkFlaw::Entries { stated, .. } => field("entries", stated),
            LinkFlaw::Parent { stated, .. } => field("parent", stated),
        }
    }
}

/// How many there are of each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LinkCounts {
    pub files: u64,
    pub directories: u64,
    pub symbolic_links: u64,
    pub parts: u64,
    /// Of the files and symbolic links, those without links.
    pub orphans: u64,
}

/// What is in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Sort {
    /// Nothing that could be led to.
    #[default]
    Other,
    /// It cannot be read: said elsewhere.
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

/// Whether the way up from a slot ends where it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Way {
    #[default]
    Unknown,
    /// It is being followed.
    Passed,
    Good,
    /// It ends where nothing leads to, or goes in a circle.
    Lost,
    /// It ends where something else is wrong.
    Broken,
}

/// What is kept of a slot.
#[derive(Debug, Clone, Copy, Default)]
struct Fact {
    sort: Sort,
    way: Way,
    /// What the last slot that leads to it takes it for.
    led_as: Option<Part>,
    /// Kinds that names have for it, a bit each.
    named_as: u8,
    /// Slots that lead to it as to a part, and the last of them.
    leads: u32,
    from: u32,
    /// Names that lead to it, and the leaf of the last of them.
    names: u32,
    leaf: u32,
    /// Of an inode.
    links: u32,
    /// Names of directories in a directory.
    directories: u32,
    /// The owner of a part; the directory that a directory says it is in.
    owner: u32,
    /// Of a file: pages that the inode states. Of a directory: names.
    stated: u64,
    /// The same, counted. Of a run list: its own pages.
    found: u64,
}

fn bit(kind: FileKind) -> u8 {
    match kind {
        FileKind::File => 1,
        FileKind::Directory => 2,
        FileKind::Link => 4,
    }
}

fn mapped_pages(runs: &[Run]) -> u64 {
    runs.iter().filter(|run| !run.is_hole()).map(|run| run.pages).sum()
}

/// A number that is a slot's, or 0, which is nothing's.
fn slot_of(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

/// All slots, as far as they lead to each other.
#[derive(Debug, Default)]
pub(crate) struct Links {
    facts: Vec<Fact>,
    /// Slots from here on are not in use.
    limit: u64,
    flaws: Vec<LinkFlaw>,
}

const _: () = assert!(size_of::<Fact>() <= SLOT_BYTES / 8);

impl Links {
    pub fn new(limit: u64) -> Links {
        Links { limit, ..Links::default() }
    }

    /// What is known of a slot; `None` if there is none.
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

    /// Notes what is in a slot.
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
                    FileKind::Link => Part::Bytes,
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
            return self.flaws.push(LinkFlaw::NoPart { from, to });
        };
        fact.leads = fact.leads.saturating_add(1);
        (fact.from, fact.led_as) = (slot_of(from), Some(part));
    }

    fn add_name(&mut self, leaf: u64, directory: u64, inode: u64, kind: FileKind) {
        if let Some(directory) = self.fact(directory) {
            directory.found += 1;
            directory.directories += u32::from(kind == FileKind::Directory);
        }
        match self.fact(inode) {
            Some(fact) => {
                fact.names = fact.names.saturating_add(1);
                fact.named_as |= bit(kind);
                fact.leaf = slot_of(leaf);
            }
            None => self.flaws.push(LinkFlaw::NoInode { leaf, inode }),
        }
    }

    /// Takes the names of a leaf back that no directory has.
    fn take_names(&mut self, slot: &Slot) {
        let Slot::Node(node) = slot else { return };
        let NodeContent::Leaf(entries) = &node.content else { return };
        for entry in entries {
            if let Some(directory) = self.fact(node.owner) {
                let is_directory = entry.kind == FileKind::Directory;
                directory.found = directory.found.saturating_sub(1);
                directory.directories = directory.directories.saturating_sub(is_directory.into());
            }
            if let Some(fact) = self.fact(entry.inode) {
                fact.names = fact.names.saturating_sub(1);
            }
        }
    }

    /// Compares everything. `read` is asked again for leaves that are lost.
    pub fn finish(
        mut self,
        mut read: impl FnMut(u64) -> Option<SlotBytes>,
    ) -> (Vec<LinkFlaw>, LinkCounts) {
        let all = 0..self.facts.len();
        self.compare_parts();
        for index in all.clone() {
            let Fact { sort: Sort::Part(part), way, owner, found, .. } = self.facts[index] else {
                continue;
            };
            match (part, way) {
                (Part::Runs, Way::Lost) | (Part::Bytes, _) => {}
                (Part::Runs, _) => {
                    if let Some(owner) = self.fact(owner.into()) {
                        owner.found = owner.found.saturating_add(found);
                    }
                }
                (Part::Node, Way::Lost) => {
                    let number = index as u64;
                    let slot = read(number).and_then(|bytes| Slot::decode(&bytes, number).ok());
                    slot.iter().for_each(|slot| self.take_names(slot));
                }
                (Part::Node, _) => {}
            }
        }
        let mut counts = LinkCounts::default();
        for index in all {
            self.count(self.facts[index], &mut counts);
            self.compare_names(index);
        }
        self.find_circles();
        let root = self.facts.get(ROOT_INODE as usize).map_or(Sort::Other, |fact| fact.sort);
        if !matches!(root, Sort::Damaged | Sort::Inode(FileKind::Directory)) {
            self.flaws.push(LinkFlaw::NoRoot);
        }
        (self.flaws, counts)
    }

    fn count(&self, fact: Fact, counts: &mut LinkCounts) {
        match fact.sort {
            Sort::Inode(FileKind::File) => counts.files += 1,
            Sort::Inode(FileKind::Directory) => counts.directories += 1,
            Sort::Inode(FileKind::Link) => counts.symbolic_links += 1,
            Sort::Part(_) => counts.parts += 1,
            Sort::Other | Sort::Damaged => {}
        }
        let is_orphan = matches!(fact.sort, Sort::Inode(FileKind::File | FileKind::Link))
            && (fact.links, fact.names) == (0, 0);
        counts.orphans += u64::from(is_orphan);
    }

    /// The inode that a slot belongs to, itself if it is one.
    fn owner_of(&self, number: u32) -> u32 {
        let fact = self.facts[number as usize];
        if let Sort::Part(_) = fact.sort { fact.owner } else { number }
    }

    /// Whether each part is led to once, by its own inode.
    fn compare_parts(&mut self) {
        for index in 0..self.facts.len() {
            let fact = self.facts[index];
            let (slot, from) = (index as u64, u64::from(fact.from));
            let is_led_to = fact.leads > 0;
            let Sort::Part(part) = fact.sort else {
                if is_led_to && fact.sort != Sort::Damaged {
                    self.flaws.push(LinkFlaw::NoPart { from, to: slot });
                }
                continue;
            };
            let flaw = match fact.leads {
                0 => None,
                1 if fact.led_as != Some(part) => Some(LinkFlaw::NoPart { from, to: slot }),
                1 if self.owner_of(fact.from) != fact.owner => {
                    Some(LinkFlaw::ForeignPart { from, to: slot, owner: fact.owner.into() })
                }
                1 => continue,
                _ => Some(LinkFlaw::SharedPart { slot }),
            };
            self.facts[index].way = if flaw.is_some() { Way::Broken } else { Way::Lost };
            self.flaws.extend(flaw);
        }
        self.follow(|fact| matches!(fact.sort, Sort::Part(_)).then_some(fact.from));
        for index in 0..self.facts.len() {
            let fact = self.facts[index];
            if let (Sort::Part(_), Way::Lost) = (fact.sort, fact.way) {
                let (slot, owner) = (index as u64, fact.owner.into());
                self.flaws.push(LinkFlaw::LostPart { slot, owner });
            }
        }
    }

    /// Follows the way up from each slot, to where `up` knows of nothing above, or the way is known.
    fn follow(&mut self, up: impl Fn(&Fact) -> Option<u32>) {
        let mut passed: Vec<usize> = Vec::new();
        for index in 0..self.facts.len() {
            let mut here = index;
            let way = loop {
                // An owner can be any number.
                let Some(fact) = self.facts.get_mut(here) else { break Way::Broken };
                match fact.way {
                    Way::Unknown => {}
                    // It was passed on this very way.
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

    /// Whether as many names lead to an inode as it says, of its kind, and the other way round.
    fn compare_names(&mut self, index: usize) {
        let fact = self.facts[index];
        let (inode, leaf) = (index as u64, u64::from(fact.leaf));
        let Sort::Inode(kind) = fact.sort else {
            if fact.names > 0 && fact.sort != Sort::Damaged {
                self.flaws.push(LinkFlaw::NoInode { leaf, inode });
            }
            return;
        };
        if fact.names > 0 && fact.named_as != bit(kind) {
            self.flaws.push(LinkFlaw::Kind { leaf, inode });
        }
        if kind != FileKind::Directory {
            let (stated, found) = (fact.stated, fact.found);
            if stated != found {
                self.flaws.push(LinkFlaw::Pages { inode, stated, found });
            }
            match (fact.links, fact.names) {
                (stated, found) if stated == found => {}
                (_, 0) => self.flaws.push(LinkFlaw::LostInode { inode }),
                (stated, found) => self.flaws.push(LinkFlaw::Links { inode, stated, found }),
            }
            return;
        }
        let directory = inode;
        let links = fact.directories.saturating_add(2);
        if fact.links != links {
            self.flaws.push(LinkFlaw::Links { inode, stated: fact.links, found: links });
        }
        if fact.stated != fact.found {
            let (stated, found) = (fact.stated, fact.found);
            self.flaws.push(LinkFlaw::Entries { directory, stated, found });
        }
        let above = match (directory == ROOT_INODE, fact.names) {
            (true, 0) => ROOT_INODE as u32,
            (false, 0) => return self.flaws.push(LinkFlaw::LostInode { inode }),
            (false, 1) => self.owner_of(fact.leaf),
            _ => return self.flaws.push(LinkFlaw::SeveralNames { directory }),
        };
        if fact.owner != above {
            let (stated, found) = (fact.owner.into(), above.into());
            self.flaws.push(LinkFlaw::Parent { directory, stated, found });
        }
    }

    /// Directories from which the way up leads back to them.
    fn find_circles(&mut self) {
        let owners: Vec<u32> =
            (0..self.facts.len()).map(|index| self.owner_of(index as u32)).collect();
        self.facts.iter_mut().for_each(|fact| fact.way = Way::Unknown);
        self.follow(|fact| match fact.sort {
            // The root, what is lost and what has several names ends the way.
            Sort::Inode(FileKind::Directory) if fact.names == 1 => {
                owners.get(fact.leaf as usize).copied()
            }
            _ => None,
        });
        for index in 0..self.facts.len() {
            if self.facts[index].way == Way::Lost {
                self.flaws.push(LinkFlaw::Circle { directory: index as u64 });
            }
        }
    }
}
