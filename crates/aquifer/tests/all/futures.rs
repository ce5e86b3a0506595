//! The library's futures with tokio, with another executor, and without one.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use aquifer::{
    Attachment, Cache, FileAccess, FileView, Mapper, MappingMut, MemoryDevice, Objects, Pool,
};

const LEN: usize = 1 << 20;

/// One of each kind of object that has futures.
struct Scene {
    mapping: MappingMut,
    view: FileView,
    object: Attachment,
    _directory: tempfile::TempDir,
}

impl Scene {
    fn new() -> Scene {
        let directory = tempfile::tempdir().unwrap();
        let path = |name| directory.path().join(name);
        std::fs::write(path("file"), vec![7; LEN]).unwrap();
        let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
        let device = Arc::new(MemoryDevice::from_bytes(&[7; LEN]).unwrap());
        let objects = Objects::new(Pool::create(path("pool"), 16 << 20).unwrap());
        objects.create("object", 4096).unwrap();
        let mapper = Mapper::builder().build().unwrap();
        Scene {
            mapping: cache.map_mut(device).unwrap(),
            view: mapper.map(path("file"), FileAccess::Read, ..).unwrap(),
            object: objects.attach_mut("object").unwrap(),
            _directory: directory,
        }
    }

    /// All futures, all of them pending at the same time.
    fn work(&mut self) -> impl Future<Output = ()> + Send + use<> {
        self.mapping.set(4096, 9u64).unwrap();
        self.object.as_mut_slice().unwrap()[0] += 1;
        let flush = self.mapping.flush_async(0..LEN as u64);
        let ranges: Vec<_> = (0..100).map(|page| page * 8192..page * 8192 + 10).collect();
        let touch = self.mapping.touch_many_async(&ranges);
        let prefetch = self.view.prefetch(&ranges).unwrap();
        let psync = self.object.psync_begin().unwrap();
        async move {
            psync.await.unwrap();
            prefetch.await.unwrap();
            touch.await.unwrap();
            flush.await.unwrap();
        }
    }
}

#[tokio::test]
async fn tokio_drives_them() {
    let mut scene = Scene::new();
    for _ in 0..20 {
        scene.work().await;
    }
    let tasks: Vec<_> = (0..20).map(|_| tokio::spawn(scene.work())).collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(scene.object.as_slice().unwrap()[0], 40);
    let outside = LEN as u64..LEN as u64 + 1;
    scene.mapping.touch_many_async(std::slice::from_ref(&outside)).await.unwrap_err();
}

#[tokio::test]
async fn a_future_that_tokio_drops_cancels_nothing() {
    let mut scene = Scene::new();
    tokio::select! {
        biased;
        () = async {} => {}
        () = scene.work() => unreachable!("the other branch is first, and ready"),
    }
    scene.object.psync_begin().unwrap().await.unwrap();
    assert_eq!(scene.object.as_slice().unwrap()[0], 1);
}

/// Polls until it is ready: the waker has nothing to do.
#[test]
fn an_executor_that_only_polls_drives_them() {
    struct Nothing;
    impl Wake for Nothing {
        fn wake(self: Arc<Self>) {}
    }
    let waker = Waker::from(Arc::new(Nothing));
    let mut work = Box::pin(Scene::new().work());
    while work.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
        std::thread::yield_now();
    }
}

/// Those that may be awaited and then waited for return their result again.
#[test]
fn a_result_that_was_returned_is_there_for_wait() {
    let mut scene = Scene::new();
    let mut context = Context::from_waker(Waker::noop());
    let mut prefetch = scene.view.prefetch(&[0..10, 5000..5010]).unwrap();
    while Pin::new(&mut prefetch).poll(&mut context).is_pending() {
        std::thread::yield_now();
    }
    assert!(Pin::new(&mut prefetch).poll(&mut context).is_ready());
    prefetch.wait().unwrap();
    scene.object.as_mut_slice().unwrap()[0] = 3;
    let mut psync = scene.object.psync_begin().unwrap();
    while Pin::new(&mut psync).poll(&mut context).is_pending() {
        std::thread::yield_now();
    }
    assert!(Pin::new(&mut psync).poll(&mut context).is_ready());
    psync.wait().unwrap();
}

#[test]
fn without_an_executor_a_thread_waits() {
    let mut scene = Scene::new();
    scene.view.prefetch(&[0..10, 5000..5010]).unwrap().wait().unwrap();
    scene.object.as_mut_slice().unwrap()[0] = 3;
    let pending = scene.object.psync_begin().unwrap();
    while !pending.is_done() {
        std::thread::yield_now();
    }
    pending.wait().unwrap();
}
