//! A mapping shows what others have written, a moment later.

use std::fs::{self, File};
use std::os::fd::AsFd;

use aquifer_sys::memory::{self, Protection};
use rustix::process::Signal;

use crate::kept::place::{kill, send};
use crate::shared::{both, end};

const LEN: usize = 64 << 10;

struct Mapped(*mut u8);

impl Mapped {
    fn new(file: &File) -> Mapped {
        let start = memory::map_file(LEN, Protection::ReadWrite, file.as_fd(), 0);
        Mapped(start.expect("a mapping"))
    }

    fn get(&self, at: usize) -> u8 {
        assert!(at < LEN);
        // SAFETY: inside the mapping. Volatile: the kernel changes it.
        unsafe { self.0.add(at).read_volatile() }
    }

    fn set(&self, at: usize, byte: u8) {
        assert!(at < LEN);
        // SAFETY: inside the mapping.
        unsafe { self.0.add(at).write_volatile(byte) };
    }

    fn sync(&self) {
        // SAFETY: mapped, and starts at a page.
        unsafe { memory::sync(self.0, LEN) }.expect("it is mapped");
    }

    fn until(&self, at: usize, byte: u8) {
        while self.get(at) != byte {
            std::thread::yield_now();
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped above, and not used any more.
        unsafe { memory::unmap(self.0, LEN) }.expect("it is mapped");
    }
}

pub fn a_mapping_shows_what_others_write() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("f");
    fs::write(&at, vec![1; LEN]).expect("a new file");
    let here = files.options().read(true).write(true).open("/f").expect("it is there");
    let there = File::options().read(true).write(true).open(&at).expect("it is there");
    let mapped = Mapped::new(&there);
    assert_eq!((mapped.get(0), mapped.get(LEN - 1)), (1, 1));
    for round in 2..20_u8 {
        // In place, which changes nothing but bytes and times.
        here.write_all_at(&[round], u64::from(round)).expect("there is room");
        mapped.until(round.into(), round);
        here.write_all_at(&[round; 5000], 8000).expect("there is room");
        // Pages that the kernel has dropped before come earlier.
        mapped.until(8000, round);
        mapped.until(12_999, round);
        assert_eq!((mapped.get(0), mapped.get(13_000)), (1, 1));
        // What is stored to another page is not lost when pages are dropped.
        mapped.set(40_000, round);
        here.write_all_at(&[round], 50_000).expect("there is room");
        mapped.until(50_000, round);
        assert_eq!(mapped.get(40_000), round);
        mapped.sync();
        let mut byte = [0];
        here.read_exact_at(&mut byte, 40_000).expect("it is as long");
        assert_eq!(byte, [round]);
        // The next server goes on with it.
        if round % 6 == 0 {
            assert!(place.kill_server());
        }
    }
    // A new mapping shows it at once.
    here.write_all_at(&[77], 3).expect("there is room");
    assert_eq!(Mapped::new(&there).get(3), 77);
    drop(mapped);
    drop((there, here, files));
    end(place);
}

pub fn a_mapping_is_refreshed_by_another_process_if_one_dies() {
    let Some((place, files)) = both() else { return };
    let at = place.root().join("f");
    fs::write(&at, vec![1; LEN]).expect("a new file");
    let here = files.options().read(true).write(true).open("/f").expect("it is there");
    let there = File::options().read(true).write(true).open(&at).expect("it is there");
    let mapped = Mapped::new(&there);
    assert_eq!(mapped.get(0), 1);
    for round in 2..8 {
        here.write_all_at(&[round], 0).expect("there is room");
        mapped.until(0, round);
        let notifier = loop {
            if let Some(notifier) = place.notifier() {
                break notifier;
            }
        };
        // What it is told before its death is known is told to the next one.
        send(notifier, Signal::STOP);
        here.write_all_at(&[round], 1).expect("there is room");
        if round % 2 == 0 {
            send(notifier, Signal::CONT);
            mapped.until(1, round);
        } else {
            assert!(kill(notifier));
        }
        mapped.until(1, round);
    }
    assert!(place.log().contains("mappings may show"), "{}", place.log());
    drop(mapped);
    drop((there, here, files));
    end(place);
}
