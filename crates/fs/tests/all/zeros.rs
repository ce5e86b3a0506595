//! Allocation of zeros: from pages that are already zero, as long as there are any, without
//! writing.

use std::sync::Arc;

use aquifer_crashkit::CrashMedia;
use aquifer_fs::{FallocateMode, File, Files};
use aquifer_pool::Pool;
use aquifer_pool::media::PersistenceDomain;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A pool on media that count writes. Only [`Pool::zero_free_pages`] zeroes pages.
struct Scene {
    media: Arc<CrashMedia>,
    files: Files,
}

impl Scene {
    fn new() -> Scene {
        let media = Arc::new(CrashMedia::new(24 * MIB, PersistenceDomain::PageCache).unwrap());
        let options = Pool::options().log_bytes(MIB).exclusive(true).background(false);
        let files = Files::new(options.create_on(media.clone()).unwrap());
        Scene { media, files }
    }

    fn create(&self, path: &str) -> File {
        self.files.options().read(true).write(true).create_new(true).open(path).unwrap()
    }

    /// Takes all space, fills it with nonzero bytes, and frees it.
    fn use_all_space(&self) {
        let file = self.create("/all");
        let free = self.files.space().unwrap().free_bytes;
        file.write_all_at(&vec![7; free as usize], 0).unwrap();
        drop(file);
        self.files.remove_file("/all").unwrap();
        self.files.pool().checkpoint().unwrap();
        assert_eq!(self.files.pool().info().unwrap().zeroed_pages, 0);
    }

    fn zero_pages(&self, pages: u64) {
        let mut zeroed = 0;
        while zeroed < pages {
            zeroed += self.files.pool().zero_free_pages(pages - zeroed).unwrap();
        }
    }

    /// Counts the bytes of data written during `work`.
    fn written(&self, work: impl FnOnce()) -> u64 {
        let before = self.media.recording().operations().len();
        work();
        let data = self.files.pool().layout().data();
        let recording = self.media.recording();
        let writes =
            recording.operations()[before..].iter().filter(|operation| operation.is_write());
        let ranges = writes.flat_map(|operation| operation.ranges());
        ranges.map(|range| data.intersection(*range).len_bytes).sum()
    }
}

fn is_zero(file: &File, offset_bytes: u64, len_bytes: u64) -> bool {
    let mut bytes = vec![1; len_bytes as usize];
    let got = file.read_at(&mut bytes, offset_bytes).unwrap();
    bytes[..got].iter().all(|byte| *byte == 0)
}

#[test]
fn space_is_allocated_without_writing_while_there_are_zeros() {
    let scene = Scene::new();
    // Space that was never used is zero.
    let file = scene.create("/fresh");
    assert_eq!(scene.written(|| file.allocate(FallocateMode::Extend, 0, 3 * MIB).unwrap()), 0);
    drop(file);
    let scene = Scene::new();
    scene.use_all_space();
    scene.zero_pages(1024);
    let file = scene.create("/ready");
    assert_eq!(scene.written(|| file.allocate(FallocateMode::Extend, 0, 2 * MIB).unwrap()), 0);
    assert_eq!(
        scene.written(|| file.allocate(FallocateMode::KeepSize, 2 * MIB, 2 * MIB).unwrap()),
        0
    );
    assert!(is_zero(&file, 0, 4 * MIB));
    // None is left.
    let late = scene.create("/late");
    assert_eq!(scene.written(|| late.allocate(FallocateMode::Extend, 0, MIB).unwrap()), MIB);
    assert!(is_zero(&late, 0, MIB));
    late.write_all_at(&[1; 10], MIB - 10).unwrap();
    crate::scratch::soundness::assert_sound(scene.files.pool());
}

#[test]
fn a_caller_that_needs_no_zeros_leaves_them_to_others() {
    let scene = Scene::new();
    scene.use_all_space();
    scene.zero_pages(1000);
    let file = scene.create("/f");
    for index in 0..100 {
        file.write_all_at(&[1; 3 * PAGE as usize], index * 3 * PAGE).unwrap();
    }
    file.write_atomic(&vec![2; 40 * PAGE as usize], 0).unwrap();
    assert_eq!(scene.files.pool().info().unwrap().zeroed_pages, 1000);
    assert_eq!(file.runs().unwrap().len(), 2, "it grew where it ended");
}

#[test]
fn long_ranges_are_zeroed_by_other_pages() {
    let scene = Scene::new();
    scene.use_all_space();
    let file = scene.create("/f");
    file.write_all_at(&vec![1; 6 * MIB as usize], 0).unwrap();
    scene.zero_pages(2048);
    let (from, len) = (PAGE + 100, 4 * MIB);
    let clear = || file.allocate(FallocateMode::ZeroRange, from, len).unwrap();
    assert_eq!(scene.written(clear), (PAGE - 100) + 100, "only what shares its page");
    assert!(is_zero(&file, from, len));
    let mut edges = [0; 2];
    file.read_at(&mut edges[..1], from - 1).unwrap();
    file.read_at(&mut edges[1..], from + len).unwrap();
    assert_eq!(edges, [1, 1]);
    // Short ranges keep their pages, so that the file does not fragment.
    let runs = file.runs().unwrap().len();
    let clear = || file.allocate(FallocateMode::ZeroRange, 5 * MIB, MIB / 2).unwrap();
    assert_eq!(scene.written(clear), MIB / 2);
    assert_eq!(file.runs().unwrap().len(), runs);
    // Pages under a writable view are not replaced either.
    let view = file.view_mut(0..PAGE).unwrap();
    let clear = || file.allocate(FallocateMode::ZeroRange, 0, 2 * MIB).unwrap();
    assert_eq!(scene.written(clear), 2 * MIB);
    drop(view);
    // Room that a file was given to grow into.
    scene.zero_pages(512);
    file.allocate(FallocateMode::KeepSize, 6 * MIB, 2 * MIB).unwrap();
    scene.zero_pages(512);
    assert_eq!(scene.written(|| file.set_len(8 * MIB).unwrap()), 0);
    assert!(is_zero(&file, 6 * MIB, 2 * MIB));
    crate::scratch::soundness::assert_sound(scene.files.pool());
}

/// A file in as many pieces as an inode names, on a pool that has zeros and no free inode. The last piece is
/// long, and lies behind the end of the file unless it `is_inside`. Returns the length up to its end.
fn file_without_free_inodes(is_inside: bool) -> (Scene, File, u64) {
    const SINGLE: u64 = 39;
    const LONG: u64 = 8 * MIB;
    let media = Arc::new(CrashMedia::new(24 * MIB, PersistenceDomain::PageCache).unwrap());
    let options = Pool::options().inodes(100).log_bytes(MIB).exclusive(true).background(false);
    let scene = Scene { files: Files::new(options.create_on(media.clone()).unwrap()), media };
    scene.use_all_space();
    let [file, other] = ["/f", "/other"].map(|path| scene.create(path));
    for page in 0..SINGLE {
        for file in [&file, &other] {
            file.allocate(FallocateMode::Extend, page * PAGE, PAGE).unwrap();
        }
    }
    let mode = if is_inside { FallocateMode::Extend } else { FallocateMode::KeepSize };
    file.allocate(mode, SINGLE * PAGE, LONG).unwrap();
    file.write_all_at(&vec![1; file.metadata().unwrap().len() as usize], 0).unwrap();
    assert_eq!(file.runs().unwrap().len() as u64, SINGLE + u64::from(is_inside));
    scene.zero_pages(1400);
    let mut made = 0;
    while scene.files.create_file(format!("/{made}")).is_ok() {
        made += 1;
    }
    (scene, file, SINGLE * PAGE + LONG)
}

/// Other pages take more pieces. A range of a file is zeroed without them, or nothing is.
#[test]
fn a_range_for_which_no_inode_is_left_is_zeroed_or_stays_as_it_is() {
    let (scene, file, len) = file_without_free_inodes(true);
    file.allocate(FallocateMode::ZeroRange, 0, len).unwrap();
    assert!(is_zero(&file, 0, len));
    crate::scratch::soundness::assert_sound(scene.files.pool());
    let (scene, file, len) = file_without_free_inodes(false);
    let before = scene.files.read("/f").unwrap();
    let done = file.allocate(FallocateMode::ZeroRange, 0, len);
    if done.is_err() {
        assert!(scene.files.read("/f").unwrap() == before);
    } else {
        assert!(is_zero(&file, 0, len));
    }
    crate::scratch::soundness::assert_sound(scene.files.pool());
}
