//! Extended attributes and chains of bytes, against a map and a vector.

use std::collections::BTreeMap;

use crate::common::SlotMap;
use aquifer_format::byte_chain;
use aquifer_fs::FsError;
use aquifer_fs::attributes::{self, MAX_VALUE_BYTES, SetMode};
use aquifer_pool::format::byte_chain::{CHAIN_BYTES, MAX_CHAIN_BYTES};
use aquifer_pool::format::file::{FileInode, FileKind};
use proptest::prelude::*;

fn errno<T: std::fmt::Debug>(result: Result<T, FsError>) -> i32 {
    result.unwrap_err().errno()
}

#[derive(Debug, Clone)]
enum Call {
    Set { name: u8, len: usize, fill: u8, mode: SetMode },
    Remove { name: u8 },
    Get { name: u8 },
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let len = prop_oneof![0..40usize, 400..1500usize, Just(MAX_VALUE_BYTES), 60_000..70_000usize];
    let mode = prop_oneof![Just(SetMode::Any), Just(SetMode::Create), Just(SetMode::Replace)];
    let call = prop_oneof![
        4 => (0..12u8, len, any::<u8>(), mode)
            .prop_map(|(name, len, fill, mode)| Call::Set { name, len, fill, mode }),
        2 => (0..12u8).prop_map(|name| Call::Remove { name }),
        1 => (0..12u8).prop_map(|name| Call::Get { name }),
    ];
    prop::collection::vec(call, 1..40)
}

fn name_of(name: u8) -> Vec<u8> {
    match name {
        0 => [b"user.".as_slice(), &[0xff; 250]].concat(),
        1 => b"trusted.x".to_vec(),
        2 => b"security.selinux".to_vec(),
        _ => format!("user.{name}").into_bytes(),
    }
}

/// The error number that `setxattr` would return, or `None`.
fn expected_errno(
    model: &BTreeMap<Vec<u8>, Vec<u8>>,
    name: &[u8],
    len: usize,
    mode: SetMode,
) -> Option<i32> {
    let others = model.iter().filter(|(other, _)| *other != name);
    let total: usize = others.map(|(name, value)| 5 + name.len() + value.len()).sum();
    match (len > MAX_VALUE_BYTES, model.contains_key(name), mode) {
        (true, _, _) => Some(libc::E2BIG),
        (_, true, SetMode::Create) => Some(libc::EEXIST),
        (_, false, SetMode::Replace) => Some(libc::ENODATA),
        _ => (total + 5 + name.len() + len > MAX_CHAIN_BYTES).then_some(libc::ENOSPC),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn they_are_as_a_map(calls in calls()) {
        let mut slots = SlotMap::default();
        let mut inode = FileInode::new(FileKind::File, 7, 1);
        let mut model = BTreeMap::new();
        for call in calls {
            match call {
                Call::Set { name, len, fill, mode } => {
                    let (name, value) = (name_of(name), vec![fill; len]);
                    let expected = expected_errno(&model, &name, len, mode);
                    let result = attributes::set(&mut inode, &mut slots, &name, &value, mode);
                    prop_assert_eq!(result.err().map(|error| error.errno()), expected);
                    if expected.is_none() {
                        model.insert(name, value);
                    }
                }
                Call::Remove { name } => {
                    let name = name_of(name);
                    let expected = model.remove(&name).is_none().then_some(libc::ENODATA);
                    let result = attributes::remove(&mut inode, &mut slots, &name);
                    prop_assert_eq!(result.err().map(|error| error.errno()), expected);
                }
                Call::Get { name } => {
                    let name = name_of(name);
                    match attributes::get(&inode, &slots, &name) {
                        Ok(value) => prop_assert_eq!(Some(&value), model.get(&name)),
                        Err(error) => {
                            prop_assert_eq!(error.errno(), libc::ENODATA);
                            prop_assert!(!model.contains_key(&name));
                        }
                    }
                }
            }
            let mut names = attributes::list(&inode, &slots).unwrap();
            names.sort();
            prop_assert!(names.iter().eq(model.keys()));
            let mut own = Vec::new();
            attributes::check(&inode, &slots, |slot| own.push(slot)).unwrap();
            own.sort();
            prop_assert!(slots.used().into_iter().eq(own), "no slot is left over");
        }
        for (name, value) in &model {
            prop_assert_eq!(&attributes::get(&inode, &slots, name).unwrap(), value);
        }
        attributes::give_back(&mut inode, &mut slots, usize::MAX).unwrap();
        prop_assert_eq!((inode.attributes, slots.used().len()), (0, 0));
    }

    #[test]
    fn a_chain_has_what_was_put_there_last(
        contents in prop::collection::vec((0..3000usize, 0..3000usize, any::<u8>()), 1..12),
    ) {
        let mut slots = SlotMap::default();
        let (mut first, mut before) = (0, Vec::new());
        for (len, same, fill) in contents {
            // The beginning stays.
            let mut bytes: Vec<u8> = before;
            bytes.truncate(same.min(len));
            let same = bytes.len();
            bytes.resize(len, fill);
            let before_slots = slots.used().len();
            slots.count_anew();
            first = byte_chain::replace(&mut slots, 7, first, &bytes).unwrap();
            prop_assert_eq!(&byte_chain::read(&slots, 7, first).unwrap(), &bytes);
            prop_assert_eq!(slots.used().len(), len.div_ceil(CHAIN_BYTES));
            let unchanged = (same / CHAIN_BYTES).saturating_sub(1).min(before_slots);
            prop_assert!(slots.puts <= slots.used().len() - unchanged, "{} puts", slots.puts);
            before = bytes;
        }
    }

    #[test]
    fn any_bytes_are_attributes_or_damage(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let mut slots = SlotMap::default();
        let mut inode = FileInode::new(FileKind::File, 7, 1);
        inode.attributes = byte_chain::replace(&mut slots, 7, 0, &bytes).unwrap();
        match attributes::list(&inode, &slots) {
            Ok(names) => {
                for name in names {
                    let _ = attributes::get(&inode, &slots, &name);
                }
            }
            Err(error) => prop_assert!(matches!(error, FsError::Damaged { .. }), "{}", error),
        }
    }
}

#[test]
fn one_more_attribute_writes_the_end_of_the_chain() {
    let mut slots = SlotMap::default();
    let mut inode = FileInode::new(FileKind::File, 7, 1);
    for index in 0..200u32 {
        slots.count_anew();
        let name = format!("user.{index}").into_bytes();
        attributes::set(&mut inode, &mut slots, &name, &[1; 40], SetMode::Create).unwrap();
        assert!((1..=2).contains(&slots.puts), "{} slots", slots.puts);
    }
    // A value of the same length changes in place, and nothing after it.
    slots.count_anew();
    attributes::set(&mut inode, &mut slots, b"user.17", &[2; 40], SetMode::Replace).unwrap();
    assert!((1..=2).contains(&slots.puts), "{} slots", slots.puts);
    slots.count_anew();
    attributes::set(&mut inode, &mut slots, b"user.17", &[2; 40], SetMode::Any).unwrap();
    assert_eq!(slots.puts, 0, "it has this value already");
}

#[test]
fn names_are_as_linux_has_them() {
    let mut slots = SlotMap::default();
    let mut inode = FileInode::new(FileKind::File, 7, 1);
    let long = [b"user.".as_slice(), &[b'x'; 251]].concat();
    for name in [b"".as_slice(), &long, b"user.a\0b"] {
        assert_eq!(errno(attributes::get(&inode, &slots, name)), libc::ERANGE);
    }
    for (name, number) in [
        (b"user".as_slice(), libc::EOPNOTSUPP),
        (b"users.x", libc::EOPNOTSUPP),
        (b"os2.x", libc::EOPNOTSUPP),
        (b".x", libc::EOPNOTSUPP),
        (b"x", libc::EOPNOTSUPP),
        (b"user.", libc::EINVAL),
        (b"system.", libc::EINVAL),
    ] {
        assert_eq!(errno(attributes::get(&inode, &slots, name)), number);
        let set = attributes::set(&mut inode, &mut slots, name, b"", SetMode::Any);
        assert_eq!(errno(set), number);
        assert_eq!(errno(attributes::remove(&mut inode, &mut slots, name)), number);
    }
    for name in [b"user.x".as_slice(), b"trusted.x", b"security.x", b"system.x", &long[..255]] {
        attributes::set(&mut inode, &mut slots, name, b"", SetMode::Any).unwrap();
        assert_eq!(attributes::get(&inode, &slots, name).unwrap(), b"");
    }
    assert_eq!(attributes::list(&inode, &slots).unwrap().len(), 5);
}

#[test]
fn attributes_that_cannot_have_been_stored_are_damage() {
    let value_len = |len: u32| len.to_le_bytes();
    let whole = [b"\x06".as_slice(), &value_len(2), b"user.xab"].concat();
    let long_value = [1; MAX_VALUE_BYTES + 1];
    let too_long = [b"\x06".as_slice(), &value_len(65_537), b"user.y", &long_value].concat();
    for (bytes, is_right) in [
        (whole.clone(), true),
        ([whole.clone(), whole.clone()].concat(), false),
        (whole[..whole.len() - 1].to_vec(), false),
        ([whole.clone(), vec![6]].concat(), false),
        ([b"\x00".as_slice(), &value_len(0)].concat(), false),
        ([b"\x06".as_slice(), &value_len(0), b"user.\0"].concat(), false),
        ([b"\x06".as_slice(), &value_len(u32::MAX), b"user.x"].concat(), false),
        (too_long, false),
    ] {
        let mut slots = SlotMap::default();
        let mut inode = FileInode::new(FileKind::File, 7, 1);
        inode.attributes = byte_chain::replace(&mut slots, 7, 0, &bytes).unwrap();
        let checked = attributes::check(&inode, &slots, |_| ());
        assert_eq!(checked.is_ok(), is_right, "{:?}", &bytes[..bytes.len().min(40)]);
        // They can be freed with the inode.
        attributes::give_back(&mut inode, &mut slots, usize::MAX).unwrap();
    }
}

#[test]
fn without_a_free_slot_an_attribute_is_refused() {
    let mut slots = SlotMap::default();
    slots.limit = 3;
    let mut inode = FileInode::new(FileKind::File, 7, 1);
    attributes::set(&mut inode, &mut slots, b"user.a", &[1; 1000], SetMode::Any).unwrap();
    let before = inode.clone();
    let set = attributes::set(&mut inode, &mut slots.clone(), b"user.b", &[1; 900], SetMode::Any);
    assert_eq!(errno(set), libc::ENOSPC);
    assert_eq!(inode, before);
    attributes::set(&mut inode, &mut slots, b"user.a", &[1; 10], SetMode::Replace).unwrap();
    assert_eq!(slots.used().len(), 1);
}
