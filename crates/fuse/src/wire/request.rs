//! Requests: [`parse`].

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::layout::{
    AllocateIn, BatchForgetIn, CopyIn, CreateIn, ExtensionHeader, FlushIn, ForgetIn, ForgetOne,
    GetXattrIn, InHeader, InitIn, InterruptIn, LinkIn, LockIn, MakeDirectoryIn, MakeNodeIn, OpenIn,
    ReadIn, ReleaseIn, Rename2In, RenameIn, SetAttributesIn, SetXattrIn, StatxIn, SyncIn, WriteIn,
};

/// Of `unique`: the request was handed out before, to a server that has not answered it.
const RESENT: u64 = 1 << 63;
/// Of the flags of `FSYNC`.
const DATA_ONLY: u32 = 1;
/// The kind of the extension that lists groups.
const GROUPS: u32 = 32;

/// What the kernel calls a request. Its answer carries the same value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Unique(pub u64);

impl Unique {
    /// What the request was called when it was sent for the first time.
    pub fn key(self) -> u64 {
        self.0 & !RESENT
    }

    /// Whether it was handed out before, to a server that has not answered it.
    pub fn is_resent(self) -> bool {
        self.0 & RESENT != 0
    }
}

/// A request, with the names and the data in the buffer that it was read into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request<'b> {
    /// What it is called.
    pub unique: Unique,
    /// The inode that it is about; for most operations with a name, the directory.
    pub node: u64,
    /// The user for whom it is.
    pub uid: u32,
    /// The group for which it is.
    pub gid: u32,
    /// The process for which it is; 0 if it is not known.
    pub pid: u32,
    /// The group of the directory, if the process is in it as well: of requests that create
    /// something.
    pub also_in_group: Option<u32>,
    /// What is to be done.
    pub operation: Operation<'b>,
}

/// What a request asks for. Names and targets are without their final NUL.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub enum Operation<'b> {
    Lookup {
        name: &'b [u8],
    },
    /// Has no answer.
    Forget {
        count: u64,
    },
    /// Has no answer.
    BatchForget(Forgets<'b>),
    GetAttributes,
    Statx {
        mask: u32,
    },
    SetAttributes(SetAttributesIn),
    ReadLink,
    Symlink {
        name: &'b [u8],
        target: &'b [u8],
    },
    MakeNode {
        name: &'b [u8],
        mode: u32,
        rdev: u32,
        umask: u32,
    },
    MakeDirectory {
        name: &'b [u8],
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: &'b [u8],
    },
    RemoveDirectory {
        name: &'b [u8],
    },
    /// `RENAME` as well, without flags.
    Rename {
        name: &'b [u8],
        to: u64,
        new_name: &'b [u8],
        flags: u32,
    },
    /// The request's node is the directory.
    Link {
        node: u64,
        name: &'b [u8],
    },
    Open {
        flags: u32,
    },
    Read(ReadIn),
    Write(WriteIn, &'b [u8]),
    StatFs,
    Release(ReleaseIn),
    Sync {
        data_only: bool,
    },
    SetXattr {
        name: &'b [u8],
        value: &'b [u8],
        flags: u32,
        more_flags: u32,
    },
    GetXattr {
        name: &'b [u8],
        room: u32,
    },
    ListXattr {
        room: u32,
    },
    RemoveXattr {
        name: &'b [u8],
    },
    Flush {
        lock_owner: u64,
    },
    Init(InitIn),
    OpenDirectory,
    ReadDirectory {
        offset: u64,
        room: u32,
        is_plus: bool,
    },
    ReleaseDirectory,
    SyncDirectory,
    GetLock(LockIn),
    SetLock {
        lock: LockIn,
        waits: bool,
    },
    Access,
    Create {
        name: &'b [u8],
        flags: u32,
        mode: u32,
        umask: u32,
    },
    /// Has no answer, unless the request that it is about is not known.
    Interrupt {
        of: Unique,
    },
    Destroy,
    Ioctl,
    Poll,
    /// Has no answer.
    NotifyReply,
    Allocate(AllocateIn),
    /// `COPY_FILE_RANGE_64` where the answer has 64 bits.
    CopyRange {
        range: CopyIn,
        is_64: bool,
    },
    SyncFs,
    TemporaryFile {
        flags: u32,
        mode: u32,
        umask: u32,
    },
    /// Any other: answered with `ENOSYS`.
    Unknown {
        opcode: u32,
    },
}

/// What is wrong with the bytes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Defect {
    /// They are shorter than a header.
    NoHeader,
    /// The header says another length.
    Length,
    /// The extensions are longer than what they are in, or end in the middle.
    Extensions,
    /// They end before what the operation consists of.
    Short,
    /// A name has no end.
    NoName,
}

/// Bytes that are no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed request of FUSE, operation {opcode}: {defect:?}")]
pub struct Malformed {
    /// What it is called, if it has a header.
    pub unique: Option<Unique>,
    /// The operation; 0 if it has no header.
    pub opcode: u32,
    /// What is wrong.
    pub defect: Defect,
}

/// Takes a request apart. Bytes behind what this version of the protocol has are ignored.
///
/// ```
/// use aquifer_fuse::wire::{Operation, parse};
///
/// let mut bytes = [0; 45];
/// bytes[0] = 45; //  the length
/// bytes[4] = 1; //   the operation: LOOKUP
/// bytes[8] = 6; //   what it is called
/// bytes[16] = 1; //  the directory
/// bytes[40..44].copy_from_slice(b"name");
/// let request = parse(&bytes)?;
/// assert_eq!((request.unique.key(), request.node), (6, 1));
/// assert_eq!(request.operation, Operation::Lookup { name: b"name" });
/// assert!(parse(&bytes[..44]).is_err());
/// # Ok::<(), aquifer_fuse::wire::Malformed>(())
/// ```
///
/// # Errors
/// What is no request.
pub fn parse(bytes: &[u8]) -> Result<Request<'_>, Malformed> {
    let no_header = Malformed { unique: None, opcode: 0, defect: Defect::NoHeader };
    let (header, rest) = InHeader::read_from_prefix(bytes).map_err(|_| no_header)?;
    let unique = Unique(header.unique);
    let malformed = |defect| Malformed { unique: Some(unique), opcode: header.opcode, defect };
    if header.len as usize != bytes.len() {
        return Err(malformed(Defect::Length));
    }
    let extensions_len = usize::from(header.extensions_len) * 8;
    let body = rest.len().checked_sub(extensions_len);
    let (body, extensions) = rest.split_at(body.ok_or(malformed(Defect::Extensions))?);
    let also_in_group = group(extensions).map_err(malformed)?;
    let operation = operation(header.opcode, Parts { left: body }).map_err(malformed)?;
    let InHeader { nodeid: node, uid, gid, pid, .. } = header;
    Ok(Request { unique, node, uid, gid, pid, also_in_group, operation })
}

fn operation(opcode: u32, mut parts: Parts<'_>) -> Result<Operation<'_>, Defect> {
    Ok(match opcode {
        1 => Operation::Lookup { name: parts.name()? },
        2 => Operation::Forget { count: parts.take::<ForgetIn>()?.count },
        3 => Operation::GetAttributes,
        4 => Operation::SetAttributes(parts.take()?),
        5 => Operation::ReadLink,
        6 => Operation::Symlink { name: parts.name()?, target: parts.name()? },
        8 => {
            let MakeNodeIn { mode, rdev, umask, .. } = parts.take()?;
            Operation::MakeNode { name: parts.name()?, mode, rdev, umask }
        }
        9 => {
            let MakeDirectoryIn { mode, umask } = parts.take()?;
            Operation::MakeDirectory { name: parts.name()?, mode, umask }
        }
        10 => Operation::Unlink { name: parts.name()? },
        11 => Operation::RemoveDirectory { name: parts.name()? },
        12 => {
            let RenameIn { to } = parts.take()?;
            Operation::Rename { name: parts.name()?, to, new_name: parts.name()?, flags: 0 }
        }
        13 => {
            let LinkIn { nodeid: node } = parts.take()?;
            Operation::Link { node, name: parts.name()? }
        }
        14 => Operation::Open { flags: parts.take::<OpenIn>()?.flags },
        15 => Operation::Read(parts.take()?),
        16 => {
            let write: WriteIn = parts.take()?;
            Operation::Write(write, parts.bytes(write.size)?)
        }
        17 => Operation::StatFs,
        18 => Operation::Release(parts.take()?),
        20 => Operation::Sync { data_only: parts.take::<SyncIn>()?.flags & DATA_ONLY != 0 },
        21 => {
            let SetXattrIn { size, flags, more_flags, .. } = parts.take()?;
            Operation::SetXattr {
                name: parts.name()?,
                value: parts.bytes(size)?,
                flags,
                more_flags,
            }
        }
        22 => {
            let GetXattrIn { size: room, .. } = parts.take()?;
            Operation::GetXattr { name: parts.name()?, room }
        }
        23 => Operation::ListXattr { room: parts.take::<GetXattrIn>()?.size },
        24 => Operation::RemoveXattr { name: parts.name()? },
        25 => Operation::Flush { lock_owner: parts.take::<FlushIn>()?.lock_owner },
        26 => Operation::Init(parts.init()?),
        27 => Operation::OpenDirectory,
        28 | 44 => {
            let ReadIn { offset, size: room, .. } = parts.take()?;
            Operation::ReadDirectory { offset, room, is_plus: opcode == 44 }
        }
        29 => Operation::ReleaseDirectory,
        30 => Operation::SyncDirectory,
        31 => Operation::GetLock(parts.take()?),
        32 | 33 => Operation::SetLock { lock: parts.take()?, waits: opcode == 33 },
        34 => Operation::Access,
        35 => {
            let CreateIn { flags, mode, umask, .. } = parts.take()?;
            Operation::Create { name: parts.name()?, flags, mode, umask }
        }
        36 => Operation::Interrupt { of: Unique(parts.take::<InterruptIn>()?.unique) },
        38 => Operation::Destroy,
        39 => Operation::Ioctl,
        40 => Operation::Poll,
        41 => Operation::NotifyReply,
        42 => {
            let BatchForgetIn { count, .. } = parts.take()?;
            let len = u64::from(count) * size_of::<ForgetOne>() as u64;
            let len = u32::try_from(len).map_err(|_| Defect::Short)?;
            Operation::BatchForget(Forgets { left: parts.bytes(len)? })
        }
        43 => Operation::Allocate(parts.take()?),
        45 => {
            let Rename2In { to, flags, .. } = parts.take()?;
            Operation::Rename { name: parts.name()?, to, new_name: parts.name()?, flags }
        }
        47 | 53 => Operation::CopyRange { range: parts.take()?, is_64: opcode == 53 },
        50 => Operation::SyncFs,
        51 => {
            let CreateIn { flags, mode, umask, .. } = parts.take()?;
            Operation::TemporaryFile { flags, mode, umask }
        }
        52 => Operation::Statx { mask: parts.take::<StatxIn>()?.mask },
        opcode => Operation::Unknown { opcode },
    })
}

/// The group that the extensions name.
fn group(mut extensions: &[u8]) -> Result<Option<u32>, Defect> {
    let mut group = None;
    while !extensions.is_empty() {
        let (header, _) =
            ExtensionHeader::read_from_prefix(extensions).map_err(|_| Defect::Extensions)?;
        let len = header.len as usize;
        let own = extensions.get(size_of::<ExtensionHeader>()..len).ok_or(Defect::Extensions)?;
        if header.kind == GROUPS
            && let Ok(([count, first], _)) = <[u32; 2]>::read_from_prefix(own)
            && count > 0
        {
            group = Some(first);
        }
        extensions = extensions.get(len.next_multiple_of(8)..).ok_or(Defect::Extensions)?;
    }
    Ok(group)
}

/// What is left of a request.
struct Parts<'b> {
    left: &'b [u8],
}

impl<'b> Parts<'b> {
    fn take<T: FromBytes>(&mut self) -> Result<T, Defect> {
        let (taken, left) = T::read_from_prefix(self.left).map_err(|_| Defect::Short)?;
        self.left = left;
        Ok(taken)
    }

    /// Up to the next NUL, and behind it.
    fn name(&mut self) -> Result<&'b [u8], Defect> {
        let len = self.left.iter().position(|&byte| byte == 0).ok_or(Defect::NoName)?;
        let (name, left) = self.left.split_at(len);
        self.left = &left[1..];
        Ok(name)
    }

    fn bytes(&mut self, len: u32) -> Result<&'b [u8], Defect> {
        let (bytes, left) = self.left.split_at_checked(len as usize).ok_or(Defect::Short)?;
        self.left = left;
        Ok(bytes)
    }

    /// An `INIT`, which was shorter in earlier versions.
    fn init(&mut self) -> Result<InitIn, Defect> {
        const SHORTEST: usize = 16;
        let mut init = InitIn::new_zeroed();
        let len = self.left.len().min(size_of::<InitIn>());
        if len < SHORTEST {
            return Err(Defect::Short);
        }
        init.as_mut_bytes()[..len].copy_from_slice(&self.left[..len]);
        Ok(init)
    }
}

/// An inode that the kernel forgets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forget {
    /// Which.
    pub node: u64,
    /// How many answers with an entry of it are thereby taken back.
    pub count: u64,
}

/// The inodes that the kernel forgets with one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forgets<'b> {
    /// A multiple of the length of one.
    left: &'b [u8],
}

impl Iterator for Forgets<'_> {
    type Item = Forget;

    fn next(&mut self) -> Option<Forget> {
        let (one, left) = ForgetOne::read_from_prefix(self.left).ok()?;
        self.left = left;
        Some(Forget { node: one.nodeid, count: one.count })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A request with this body and these extensions.
    fn request(opcode: u32, body: &[u8], extensions: &[u8]) -> Vec<u8> {
        let header = InHeader {
            len: (size_of::<InHeader>() + body.len() + extensions.len()) as u32,
            opcode,
            unique: 2 | RESENT,
            nodeid: 3,
            uid: 4,
            gid: 5,
            pid: 6,
            extensions_len: (extensions.len() / 8) as u16,
            padding: 0,
        };
        [header.as_bytes(), body, extensions].concat()
    }

    #[test]
    fn names_and_data_are_found_behind_the_fixed_part() {
        let rename = [7_u64.as_bytes(), b"old\0new\0"].concat();
        let bytes = request(12, &rename, &[]);
        let parsed = parse(&bytes).unwrap();
        let expected = Operation::Rename { name: b"old", to: 7, new_name: b"new", flags: 0 };
        assert_eq!(parsed.operation, expected);
        assert_eq!((parsed.unique.key(), parsed.unique.is_resent()), (2, true));
        assert_eq!((parsed.node, parsed.uid, parsed.gid, parsed.pid), (3, 4, 5, 6));

        let set = [[4_u32, 1, 1, 0].as_bytes(), b"user.x\0data"].concat();
        let bytes = request(21, &set, &[]);
        let expected =
            Operation::SetXattr { name: b"user.x", value: b"data", flags: 1, more_flags: 1 };
        assert_eq!(parse(&bytes).unwrap().operation, expected);

        let forgets = [2_u64.as_bytes(), [8_u64, 1, 9, 2].as_bytes()].concat();
        let bytes = request(42, &forgets, &[]);
        let Operation::BatchForget(forgets) = parse(&bytes).unwrap().operation else { panic!() };
        let expected = [Forget { node: 8, count: 1 }, Forget { node: 9, count: 2 }];
        assert_eq!(forgets.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_group_is_found_in_the_extensions() {
        let mkdir = [[0o755_u32, 0o22].as_bytes(), b"d\0"].concat();
        let extension = [16_u32, GROUPS, 1, 77];
        let bytes = request(9, &mkdir, extension.as_bytes());
        let parsed = parse(&bytes).unwrap();
        let expected = Operation::MakeDirectory { name: b"d", mode: 0o755, umask: 0o22 };
        assert_eq!((parsed.operation, parsed.also_in_group), (expected, Some(77)));
        // Of a length that leads nowhere.
        for len in [0, 7, 17, u32::MAX] {
            let bytes = request(9, &mkdir, [len, GROUPS, 1, 77].as_bytes());
            assert_eq!(parse(&bytes).unwrap_err().defect, Defect::Extensions);
        }
    }

    #[test]
    fn an_init_of_an_earlier_version_is_shorter() {
        let bytes = request(26, [7_u32, 34, 1, 2].as_bytes(), &[]);
        let Operation::Init(init) = parse(&bytes).unwrap().operation else { panic!() };
        assert_eq!((init.minor, init.flags, init.flags2), (34, 2, 0));
    }

    #[test]
    fn what_is_cut_off_is_malformed() {
        let write = WriteIn { size: 3, ..WriteIn::new_zeroed() };
        let whole = request(16, &[write.as_bytes(), b"abc"].concat(), &[]);
        let Operation::Write(_, data) = parse(&whole).unwrap().operation else { panic!() };
        assert_eq!(data, b"abc");
        for len in 0..whole.len() {
            let cut = &whole[..len];
            let defect = parse(cut).unwrap_err().defect;
            assert_eq!(defect, if len < 40 { Defect::NoHeader } else { Defect::Length });
            let mut cut = cut.to_vec();
            if len >= 40 {
                cut[..4].copy_from_slice(&(len as u32).to_ne_bytes());
                assert_eq!(parse(&cut).unwrap_err().defect, Defect::Short);
            }
        }
        let no_end = request(1, b"name", &[]);
        assert_eq!(parse(&no_end).unwrap_err().defect, Defect::NoName);
    }

    proptest! {
        /// Of any operation, any bytes, in any place of the buffer.
        #[test]
        fn any_bytes_are_parsed(
            opcode in 0_u32..60,
            body in prop::collection::vec(any::<u8>(), 0..200),
            extensions in 0_usize..4,
            shift in 0_usize..8,
        ) {
            let extensions = body.len().min(extensions * 8) / 8 * 8;
            let (body, extensions) = body.split_at(body.len() - extensions);
            let mut bytes = vec![0; shift];
            bytes.extend(request(opcode, body, extensions));
            let parsed = parse(&bytes[shift..]);
            if let Ok(Request { operation: Operation::BatchForget(forgets), .. }) = parsed {
                prop_assert!(forgets.count() * size_of::<ForgetOne>() <= body.len());
            }
        }
    }
}
