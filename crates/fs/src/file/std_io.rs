//! An open file as `std::io` expects it: with a position.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::atomic::Ordering::Relaxed;

use super::File;

// Relaxed: the position guards no other data; threads that share it must order their calls
// themselves.

impl Read for &File {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let position = self.opened.position.load(Relaxed);
        let got = self.read_at(bytes, position)?;
        self.opened.position.store(position + got as u64, Relaxed);
        Ok(got)
    }
}

impl Write for &File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let position = self.opened.position.load(Relaxed);
        let written = self.write_somewhere(bytes, position)?;
        self.opened.position.store(written.end, Relaxed);
        Ok((written.end - written.start) as usize)
    }

    /// Does nothing, because nothing is buffered: see [`File::sync_all`] for durability.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for &File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, distance) = match to {
            SeekFrom::Start(position) => (position, 0),
            SeekFrom::Current(distance) => (self.opened.position.load(Relaxed), distance),
            SeekFrom::End(distance) => (self.metadata()?.len(), distance),
        };
        let position = base
            .checked_add_signed(distance)
            .filter(|position| i64::try_from(*position).is_ok())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        self.opened.position.store(position, Relaxed);
        Ok(position)
    }
}

impl Read for File {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        (&*self).read(bytes)
    }
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        (&*self).seek(to)
    }
}
