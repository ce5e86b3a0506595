//! A tier against the plain bytes: whatever devices, a person and a disk do in turn, reads are right.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use aquifer_device::Device;
use aquifer_remote::{RemoteDevice, Tier};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::support::{Server, pattern, quick};

const LEN: usize = 300_001;
const DEVICES: usize = 3;

#[derive(Debug, Clone)]
enum Step {
    Read { device: usize, start: usize, len: usize },
    Reopen { device: usize },
    SetBudget { bytes: u64 },
    Drop,
    Verify,
    Damage { at: usize, len: usize, byte: u8 },
    Truncate { len: u64 },
    Unlink,
    DamageControl { at: u64, byte: u8 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let device = 0..DEVICES;
    // Header, states and proofs are in the first 64 KiB.
    let file = LEN + 65_536;
    let step = prop_oneof![
        12 => (device.clone(), 0..LEN, 1..150_000_usize)
            .prop_map(|(device, start, len)| Step::Read { device, start, len }),
        2 => device.prop_map(|device| Step::Reopen { device }),
        2 => prop_oneof![Just(0), 30_000..400_000_u64, Just(10 << 20)]
            .prop_map(|bytes| Step::SetBudget { bytes }),
        1 => Just(Step::Drop),
        1 => Just(Step::Verify),
        2 => (prop_oneof![0..file, 0..16_384_usize], 1..70_000_usize, any::<u8>())
            .prop_map(|(at, len, byte)| Step::Damage { at, len, byte }),
        1 => (0..file as u64).prop_map(|len| Step::Truncate { len }),
        1 => Just(Step::Unlink),
        1 => (0..64_u64, any::<u8>()).prop_map(|(at, byte)| Step::DamageControl { at, byte }),
    ];
    vec(step, 1..40)
}

struct World {
    tier: Tier,
    url: String,
    bytes: Vec<u8>,
    devices: Vec<RemoteDevice>,
}

impl World {
    fn open(&self) -> RemoteDevice {
        quick().tier(&self.tier).open(&self.url).unwrap()
    }

    fn file(&self) -> Option<PathBuf> {
        let mut files =
            std::fs::read_dir(self.tier.path()).unwrap().map(|file| file.unwrap().path());
        files.find(|path| path.extension().is_some())
    }

    fn change_file(&self, change: impl FnOnce(&std::fs::File)) {
        if let Some(path) = self.file() {
            change(&std::fs::File::options().write(true).open(path).unwrap());
        }
    }

    fn check(&self, device: usize, start: usize, len: usize) {
        let mut buffer = vec![0; len];
        let end = (start + len).min(LEN);
        assert_eq!(self.devices[device].read_at(start as u64, &mut buffer).unwrap(), end - start);
        assert!(buffer[..end - start] == self.bytes[start..end], "{start}..{end}");
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Read { device, start, len } => self.check(device, start, len),
            Step::Reopen { device } => self.devices[device] = self.open(),
            Step::SetBudget { bytes } => self.tier.set_budget_bytes(bytes).unwrap(),
            Step::Drop => drop(self.tier.drop_objects(|_| true).unwrap()),
            Step::Verify => drop(self.tier.verify(|_, _| {}).unwrap()),
            Step::Damage { at, len, byte } => {
                self.change_file(|file| file.write_all_at(&vec![byte; len], at as u64).unwrap());
            }
            Step::Truncate { len } => self.change_file(|file| file.set_len(len).unwrap()),
            Step::Unlink => {
                if let Some(path) = self.file() {
                    // A device may have removed it.
                    let _ = std::fs::remove_file(path);
                }
            }
            Step::DamageControl { at, byte } => {
                let control = self.tier.path().join("control");
                let control = std::fs::File::options().write(true).open(control).unwrap();
                control.write_all_at(&[byte], at).unwrap();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reads_are_right_after_anything(steps in steps()) {
        let directory = tempfile::tempdir().unwrap();
        let bytes = pattern(LEN, 5);
        let server = Server::new(bytes.clone());
        let tier = Tier::open(directory.path().join("tier")).unwrap();
        tier.set_budget_bytes(10 << 20).unwrap();
        let mut world = World { tier, url: server.url(), bytes, devices: vec![] };
        world.devices = (0..DEVICES).map(|_| world.open()).collect();
        for step in steps {
            world.run(step);
        }
        for device in 0..DEVICES {
            world.check(device, 0, LEN);
        }
        // And then it works.
        world.devices.clear();
        world.tier.set_budget_bytes(10 << 20).unwrap();
        world.devices.push(world.open());
        world.check(0, 0, LEN);
        world.devices[0] = world.open();
        let before = server.asked().len();
        world.check(0, 0, LEN);
        prop_assert_eq!(server.asked().len(), before);
        prop_assert_eq!(world.tier.verify(|_, _| {}).unwrap().dropped_bytes, 0);
    }
}
