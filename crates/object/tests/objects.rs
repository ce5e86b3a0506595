//! The calls, one process.

mod support;

use aquifer_object::{Access, CreateObject};
use support::{PAGE, Place};

#[test]
fn what_was_stored_before_psync_is_there_afterwards() {
    let place = Place::new();
    let objects = place.create(16 << 20, 1 << 20);
    let made = objects.create("an object", 10 * PAGE as u64 - 7, &CreateObject::default()).unwrap();
    assert_eq!(made.size_bytes, 10 * PAGE as u64);
    let mut attached = objects.attach("an object", Access::Write, None).unwrap();
    assert_eq!(attached.address(), made.address);
    assert!(attached.as_slice().unwrap().iter().all(|&byte| byte == 0));
    attached.as_mut_slice().unwrap()[3 * PAGE] = 1;
    attached.psync().unwrap();
    attached.as_mut_slice().unwrap()[3 * PAGE + 1] = 2;
    attached.as_mut_slice().unwrap()[9 * PAGE] = 3;
    attached.psync().unwrap();
    attached.as_mut_slice().unwrap()[0] = 4;
    attached.detach().unwrap();
    for round in 0..2 {
        let objects = if round == 0 { objects.clone() } else { place.open() };
        for access in [Access::Read, Access::Write] {
            let attached = objects.attach("an object", access, None).unwrap();
            assert_eq!(attached.address(), made.address);
            let bytes = attached.as_slice().unwrap();
            assert_eq!(bytes[3 * PAGE..][..3], [1, 2, 0]);
            assert_eq!((bytes[9 * PAGE], bytes[0]), (3, 0), "the last store had no psync");
            assert_eq!(bytes.iter().filter(|&&byte| byte != 0).count(), 3);
        }
    }
}
