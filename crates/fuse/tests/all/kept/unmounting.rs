//! Waiting for the end of a mount.

use std::fs::{self, File};
use std::time::Duration;

use aquifer_fuse::{Unmounted, unmount};
use aquifer_sys::local_socket::{Connection, names_beginning};

use crate::kept::place::{How, Place, as_user};

/// More connections than a keeper keeps.
const MANY: usize = 200;

pub fn connections_of_other_users_end_no_wait() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let Some(mut place) = Place::mount(&How::default()) else { return };
    fs::write(place.root().join("f"), "text").expect("a new file");
    let used = File::open(place.root().join("f")).expect("it is there");
    let names = names_beginning(format!("aquifer-mount-{}-", place.connection()).as_bytes());
    let names = names.expect("the table");
    let at = place.root();
    let unmounting = std::thread::spawn(move || unmount(&at, true, PATIENCE));
    // The thread connects before it unmounts.
    while place.is_mounted() {
        std::thread::yield_now();
    }
    as_user(|| {
        let connect =
            || names.iter().find_map(|name| Connection::connect_name(name, PATIENCE).ok());
        let strangers: Vec<Connection> = (0..MANY).map(|_| connect().expect("a keeper")).collect();
        for stranger in &strangers {
            while !stranger.is_closed_within(Duration::from_millis(1)) {
                assert!(!unmounting.is_finished(), "the mount is in use");
            }
        }
    });
    assert!(!unmounting.is_finished(), "the mount is in use");
    drop(used);
    let unmounted = unmounting.join().expect("no panic").expect("nothing uses it");
    assert_eq!(unmounted, Unmounted::Closed);
    assert!(place.ended());
}
