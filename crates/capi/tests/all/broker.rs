//! A pool that its broker passes on to a program in C.

use std::ffi::CString;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::ptr::{null, null_mut};

use aquifer::Pool;
use aquifer::pool::{AccessKey, Broker};
use aquifer_capi::path::aq_path_mkdir;
use aquifer_capi::pool::{aq_pool, aq_pool_free, aq_pool_open_granted};

#[test]
fn a_pool_is_opened_by_its_broker() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data.pool");
    let pool = Pool::create(&path, 16 << 20).unwrap();
    let key = b"a key of more than sixteen bytes";
    let broker = Broker::bind(&pool, &AccessKey::new(key).unwrap(), &Pool::options()).unwrap();
    let (stop, until_dropped) = std::io::pipe().unwrap();
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    let open = |key: &[u8]| -> (i32, *mut aq_pool) {
        let mut granted = null_mut();
        let (key, size) = (key.as_ptr().cast(), key.len());
        // SAFETY: a string, bytes, and a place on this stack.
        let result =
            unsafe { aq_pool_open_granted(path.as_ptr(), key, size, null(), &raw mut granted) };
        (result, granted)
    };
    std::thread::scope(|scope| {
        let _until_dropped = until_dropped;
        scope.spawn(|| broker.serve(stop.as_fd(), &|_| ()).unwrap());
        assert_eq!(open(b"another key of sixteen bytes"), (-libc::EACCES, null_mut()));
        let (result, granted) = open(key);
        assert_eq!(result, 0);
        // SAFETY: the handle made above, and a string.
        assert_eq!(unsafe { aq_path_mkdir(granted, c"/new".as_ptr(), 0, 0) }, 0);
        // SAFETY: made above, and not used any more.
        unsafe { aq_pool_free(granted) };
    });
    assert!(aquifer::Files::new(pool).is_dir("/new"));
}
