//! Handing an open file to another process.
//!
//! A file without names exists as long as a process has it open. So it must not be closed here
//! before it is open there, and the other process cannot find it by a name. The two speak through a
//! connected socket:
//!
//! ```text
//!  File::give                                                  Files::take
//!    offer: pool, session, node, flags ─────────▶ pins the inode, compares its generation
//!                               ◀───────── taken                           by a writer: the file is its own
//!                               ◀───────── pinned                          by a reader
//!    kept ──────────────────────────────────────▶                          now it is its own
//! ```
//!
//! # Why a taker may rely on its pin
//! A process that reaps an inode without names looks for pins and then frees it, with the metadata
//! mutex held. It looks at the pins of writers one after another, and then asks for the locks that
//! are the pins of readers. So it could pass the taker's place before the taker's pin is there, and
//! the giver's when it is gone.
//!
//! A writer sets its pin with the metadata mutex held (`Shared::pin_unnamed`): a process that looks
//! does so before, and then the taker finds the inode gone, or afterwards, and then it finds the pin.
//! Nothing that the giver does matters any more.
//!
//! A reader cannot take that mutex. Its pin is a lock, which is asked for after all others. `kept`
//! says that the giver's pin was there when the reader's was: a process that asks for locks later
//! finds the reader's, and one that asked before had seen the giver's already if that is a writer;
//! of two locks it asks with one call. A reader that does not get `kept` has nothing.
//!
//! If either process dies, its pin goes, and the other one's decides. Whatever fails, no process gets
//! another file: the generation is compared, and as long as there is a pin the number is not used
//! again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{InodeUse, OwnedPin};
use aquifer_sys::local_socket::{receive_exact, send_all};

use crate::error::{FsError, Result};
use crate::file::{File, OpenFlags};
use crate::files::Files;
use crate::node_id::Node;
use crate::walk;

const OFFER: u64 = u64::from_le_bytes(*b"AQGIVE01");
const TAKEN: u64 = u64::from_le_bytes(*b"AQTAKEN1");
const PINNED: u64 = u64::from_le_bytes(*b"AQPINNED");
const REFUSED: u64 = u64::from_le_bytes(*b"AQREFUSE");
const KEPT: u64 = u64::from_le_bytes(*b"AQKEPT01");

const READ: u64 = 1;
const WRITE: u64 = 2;
const APPEND: u64 = 4;

/// One end of the socket, and until when it waits.
struct Line<'s> {
    socket: BorrowedFd<'s>,
    until: Instant,
}

impl<'s> Line<'s> {
    fn new(socket: &'s impl AsFd, limit: Duration) -> Line<'s> {
        // A limit that ends after the clock does is none.
        let until = Instant::now().checked_add(limit);
        let until = until.unwrap_or_else(|| Instant::now() + Duration::from_secs(1 << 31));
        Line { socket: socket.as_fd(), until }
    }

    fn send<const N: usize>(&self, words: [u64; N]) -> Result<()> {
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        send_all(self.socket, &bytes, self.until).map_err(failed)
    }

    fn receive<const N: usize>(&self) -> Result<[u64; N]> {
        let mut words = [[0; 8]; N];
        receive_exact(self.socket, words.as_flattened_mut(), self.until).map_err(failed)?;
        Ok(words.map(u64::from_le_bytes))
    }
}

fn failed(source: io::Error) -> FsError {
    // One kind for a peer that has ended, whichever side finds out.
    let source = match source.kind() {
        io::ErrorKind::BrokenPipe => io::ErrorKind::UnexpectedEof.into(),
        _ => source,
    };
    FsError::HandOver { source }
}

fn nonsense() -> FsError {
    failed(io::Error::from_raw_os_error(libc::EPROTO))
}

/// What a giver says about the file.
struct Offer {
    pool: u128,
    session: u128,
    node: Node,
    flags: OpenFlags,
    position: u64,
}

impl Offer {
    fn encode(&self) -> [u64; 9] {
        let Node { number, generation } = self.node;
        let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
        let flags = bit(self.flags.read, READ)
            | bit(self.flags.write, WRITE)
            | bit(self.flags.append, APPEND);
        let [[low, high], [session_low, session_high]] =
            [self.pool, self.session].map(|id| [id as u64, (id >> 64) as u64]);
        [OFFER, low, high, session_low, session_high, number, generation, flags, self.position]
    }

    fn decode(words: [u64; 9]) -> Option<Offer> {
        let [magic, low, high, session_low, session_high, number, generation, flags, position] =
            words;
        let id = |low: u64, high: u64| u128::from(low) | u128::from(high) << 64;
        let is_offer = magic == OFFER && flags & !(READ | WRITE | APPEND) == 0;
        is_offer.then(|| Offer {
            pool: id(low, high),
            session: id(session_low, session_high),
            node: Node { number, generation },
            flags: OpenFlags {
                read: flags & READ != 0,
                write: flags & WRITE != 0,
                append: flags & APPEND != 0,
                ..OpenFlags::default()
            },
            position,
        })
    }
}

impl File {
    /// Hands the open file to a process that calls [`Files::take`] at the other end of a connected
    /// local socket, and that has opened the same pool: also a file without names, which exists only
    /// while it is open. When this returns, the file is open there, and can be closed here. (A
    /// process that opened the pool read-only may still give up in [`Files::take`] if its limit ends
    /// in that moment.)
    ///
    /// The other process gets a handle for the same kinds of access, at the same position. They are
    /// two handles from then on: the position is not shared, and advisory locks stay with this one.
    /// For a child of `fork`, make the socket before, and let the child open the pool anew: it cannot
    /// use the parent's handles.
    ///
    /// After an error the socket cannot be used for another file. The taker does what it is asked: it
    /// takes files from processes that it trusts.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::os::unix::net::UnixStream;
    /// use std::time::Duration;
    ///
    /// use aquifer_fs::Files;
    ///
    /// let (here, there) = UnixStream::pair()?;
    /// let limit = Duration::from_secs(10);
    /// let other = Files::open(&path)?; // usually in another process
    /// let taker = std::thread::spawn(move || other.take(&there, limit));
    ///
    /// let file = files.options().read(true).write(true).create_unnamed()?;
    /// file.write_all_at(b"text", 0)?;
    /// file.give(&here, limit)?;
    /// drop(file);
    ///
    /// let mut text = [0; 4];
    /// taker.join().unwrap()?.read_exact_at(&mut text, 0)?;
    /// assert_eq!(&text, b"text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::HandOver`] with the error of the socket: `TimedOut` after the limit,
    /// `ConnectionRefused` if the other process could not take it, `UnexpectedEof` if it ended. Then
    /// it may have the file or not. [`FsError::Pool`].
    pub fn give(&self, to: &impl AsFd, limit: Duration) -> Result<()> {
        let shared = &self.files().shared;
        // A forked child has no pin to keep the file with.
        shared.pool.check_process()?;
        let offer = Offer {
            pool: shared.pool.uuid().as_u128(),
            session: shared.pool.session().as_u128(),
            node: self.node(),
            flags: self.flags(),
            // Relaxed: it guards no other data.
            position: self.position().load(Relaxed),
        };
        let line = Line::new(to, limit);
        line.send(offer.encode())?;
        match line.receive()? {
            [TAKEN] => Ok(()),
            [PINNED] => {
                // Without its locks this handle's pin keeps nothing.
                shared.pool.check_kept()?;
                line.send([KEPT])
            }
            [REFUSED] => Err(failed(io::Error::from_raw_os_error(libc::ECONNREFUSED))),
            _ => Err(nonsense()),
        }
    }
}

impl Files {
    /// Takes the open file that another process hands over: see [`File::give`].
    ///
    /// # Errors
    /// [`FsError::HandOver`] with the error of the socket, `UnexpectedEof` if the other process ended;
    /// [`FsError::OtherPool`]; [`FsError::Stale`] if the file is gone; [`FsError::Pool`].
    pub fn take(&self, from: &impl AsFd, limit: Duration) -> Result<File> {
        let line = Line::new(from, limit);
        let Some(offer) = Offer::decode(line.receive()?) else { return Err(nonsense()) };
        let (pin, inode) = match self.take_offered(&offer) {
            Ok(taken) => taken,
            Err(error) => {
                // The giver need not wait for its limit. If it does not hear this, it has ended.
                let _ = line.send([REFUSED]);
                return Err(error);
            }
        };
        if self.shared.pool.is_writable() {
            // It is this process's own, whether the giver hears of it or not.
            let _ = line.send([TAKEN]);
        } else {
            line.send([PINNED])?;
            if line.receive()? != [KEPT] {
                return Err(nonsense());
            }
        }
        let opened = self.shared.opened.open((&inode).into(), || Ok(pin))?;
        let file = File::new(self.clone(), opened, offer.flags);
        file.position().store(offer.position, Relaxed);
        Ok(file)
    }

    fn take_offered(&self, offer: &Offer) -> Result<(OwnedPin, FileInode)> {
        let (shared, node) = (&self.shared, offer.node);
        let pool = &shared.pool;
        if (offer.pool, offer.session) != (pool.uuid().as_u128(), pool.session().as_u128()) {
            return Err(FsError::OtherPool);
        }
        let (inode, pin) = if pool.is_writable() {
            shared.pin_unnamed(node)?
        } else {
            let pin = pool.pin_inode(node.number, InodeUse::Open)?;
            // After the pin.
            (shared.look(|slots| walk::live(slots, node))?, pin)
        };
        // As with files that are opened by name.
        let OpenFlags { read, .. } = offer.flags;
        let fits = match inode.kind {
            FileKind::File => true,
            FileKind::Directory => !offer.flags.writes(),
            _ => !offer.flags.writes() && !read,
        };
        if fits { Ok((pin, inode)) } else { Err(nonsense()) }
    }
}
