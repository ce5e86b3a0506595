//! What a thread does before it waits for something slow.
//!
//! A thread that others depend on, such as one of a few that answer requests, can hand that over just
//! when it has to wait, and only then. The calls that wait say so: those of media
//! ([`about_to_wait`]), and locks that are not free for a while.

use std::cell::RefCell;
use std::rc::Rc;

thread_local! {
    static BEFORE: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Puts back what the thread did before, also if the work panics.
struct Restored(Option<Rc<dyn Fn()>>);

impl Drop for Restored {
    fn drop(&mut self) {
        let before = self.0.take();
        BEFORE.with(|hook| *hook.borrow_mut() = before);
    }
}

/// Runs `work`; whenever this thread is about to wait in it, `before` is called first. It must take no
/// lock that work holds while it waits.
///
/// ```
/// use std::cell::Cell;
/// use std::rc::Rc;
///
/// use aquifer_sys::waits::{about_to_wait, before_waits};
///
/// let waits = Rc::new(Cell::new(0));
/// let counted = waits.clone();
/// before_waits(move || counted.set(counted.get() + 1), about_to_wait);
/// about_to_wait();
/// assert_eq!(waits.get(), 1);
/// ```
pub fn before_waits<T>(before: impl Fn() + 'static, work: impl FnOnce() -> T) -> T {
    let before: Rc<dyn Fn()> = Rc::new(before);
    let _restored = Restored(BEFORE.with(|hook| hook.borrow_mut().replace(before)));
    work()
}

/// The calling thread may have to wait for the media, or for a thread that does.
pub fn about_to_wait() {
    // Not while it is borrowed: what is called may wait.
    let before = BEFORE.try_with(|hook| hook.borrow().clone());
    if let Ok(Some(before)) = before {
        before();
    }
}
