//! Repeats calls that wait for memory that is being freed.
//!
//! Owns: that no leave is kept meanwhile, and how often it is requested again. Does not own: which calls wait, and for how long (the
//! namespace's `RoomWait`), leave (`gate`), the threads (`cold`).
//!
//! Memory of this node may take half a minute to be freed, and no other node is to wait for that. So a call gives its leave back, gets it
//! again, and is repeated from the start: the name may mean another file by then, or none.

use crate::cold::Workers;
use crate::gate::{self, Call};
use crate::shared::Shared;
use fuser::{ReplyCreate, ReplyOpen};
use std::time::Duration;
use tidemark_engine::cluster::Leave;
use tidemark_namespace::{Attr, FsError, OpenFile, RequestId};

/// The longest pause before other nodes are asked for leave again. If calls wait for room for seconds, eight ranks ask 32 times a second.
const ASK_AGAIN_MAX: Duration = Duration::from_millis(250);

/// More doublings of any pause exceed that limit.
const DOUBLINGS_MAX: u32 = 16;

/// Returns the pause before a call that has asked other nodes `asked` times is repeated; `look` is the pause of a call that asks no node.
fn pause_before_asking(look: Duration, asked: u32) -> Duration {
    look.saturating_mul(1 << asked.min(DOUBLINGS_MAX)).min(ASK_AGAIN_MAX).max(look)
}

/// Repeats a call while it finds no room. `pause` takes the leave of the last try, and returns the leave for the next.
fn until_room<L, R>(
    mut leave: L,
    call: impl Fn() -> Result<R, FsError>,
    mut pause: impl FnMut(L) -> Result<L, FsError>,
) -> Result<(R, L), FsError> {
    loop {
        match call() {
            Err(FsError::NoSpace) => leave = pause(leave)?,
            result => return result.map(|done| (done, leave)),
        }
    }
}

/// Repeats a call while it finds no room and room may still come: see `RoomWait`. Gives the leave back for each pause. Blocks.
///
/// # Errors
/// The errors of the call, and of getting leave again ([`gate::enter_again`]).
pub(crate) fn when_room<R>(
    shared: &Shared,
    leave: Leave,
    call: impl Fn() -> Result<R, FsError>,
) -> Result<(R, Leave), FsError> {
    let mut wait = shared.namespace.room().room_wait();
    let mut asked = 0;
    until_room(leave, call, |leave: Leave| {
        let look = wait.pause().ok_or(FsError::NoSpace)?;
        let pause = if leave.is_alone() {
            look
        } else {
            asked += 1;
            pause_before_asking(look, asked)
        };
        let wanted = leave.give_back();
        std::thread::sleep(pause);
        gate::enter_again(shared, wanted)
    })
}

/// Answers a CREATE with the result of `call`: now or, without room, on a worker that waits for room.
pub(crate) fn create(
    shared: &Shared,
    workers: &Workers,
    leave: Leave,
    request: RequestId,
    call: impl Fn(&Shared) -> Result<(Attr, OpenFile), FsError> + Send + 'static,
    reply: ReplyCreate,
) {
    let made = shared.unless_departing(|| call(shared));
    match made {
        Err(FsError::NoSpace) => workers.ask(Call::short_of_room(leave, move |shared, leave| {
            let made = leave.and_then(|leave| when_room(shared, leave, || call(shared)));
            let made = made.map(|(made, leave)| {
                drop(leave);
                shared.namespace.room().wait_for_expected(&made.1);
                made
            });
            shared.answer_create(request, made, reply);
        })),
        // The name existed, and its file is saved over.
        Ok(made) if made.1.awaits_bytes > 0 => {
            drop(leave);
            workers.ask(Call::short_of_room(Leave::default(), move |shared, thread| {
                if thread.is_ok() {
                    shared.namespace.room().wait_for_expected(&made.1);
                }
                shared.answer_create(request, Ok(made), reply);
            }));
        }
        made => shared.answer_create(request, made, reply),
    }
}

/// Makes a call that answers an OPEN for saving over a file once that file's room is free. No other call is kept waiting.
pub(crate) fn answer_open_later(request: RequestId, file: OpenFile, reply: ReplyOpen) -> Call {
    Call::short_of_room(Leave::default(), move |shared, thread| {
        if thread.is_ok() {
            shared.namespace.room().wait_for_expected(&file);
        }
        shared.answer_open(request, &file, reply);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    /// Counts the leaves that are held.
    struct Held<'a>(&'a Cell<u32>);

    impl<'a> Held<'a> {
        fn get(held: &'a Cell<u32>) -> Self {
            held.set(held.get() + 1);
            Self(held)
        }
    }

    impl Drop for Held<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    #[test]
    fn a_call_has_leave_whenever_it_is_made_and_none_while_it_waits() {
        let (held, tries) = (Cell::new(0), Cell::new(0));
        let call = || {
            assert_eq!(held.get(), 1);
            tries.set(tries.get() + 1);
            if tries.get() < 4 { Err(FsError::NoSpace) } else { Ok(tries.get()) }
        };
        let pause = |leave: Held<'_>| {
            drop(leave);
            assert_eq!(held.get(), 0);
            Ok(Held::get(&held))
        };
        let (made, leave) = until_room(Held::get(&held), call, pause).expect("there is room in the end");
        assert_eq!((made, held.get()), (4, 1));
        drop(leave);
        assert_eq!(held.get(), 0);
    }

    #[test]
    fn what_others_did_meanwhile_and_a_wait_in_vain_end_the_call() {
        let held = Cell::new(0);
        let full = || Err::<(), _>(FsError::NoSpace);
        for error in [FsError::NoSpace, FsError::Stale, FsError::Io] {
            let pause = |leave| {
                drop::<Held<'_>>(leave);
                Err(error)
            };
            assert_eq!(until_room(Held::get(&held), full, pause).err(), Some(error));
        }
        // Another node made the name during the wait.
        let answers = RefCell::new(vec![Err(FsError::Exists), Err(FsError::NoSpace)]);
        let call = || answers.borrow_mut().pop().expect("no third try").map(|()| 0);
        assert_eq!(until_room((), call, Ok).err(), Some(FsError::Exists));
        assert_eq!(held.get(), 0);
    }

    #[test]
    fn other_nodes_are_asked_ever_less_often_and_still_several_times_a_second() {
        let look = Duration::from_millis(5);
        let pauses: Vec<_> = (0..8).map(|asked| pause_before_asking(look, asked).as_millis()).collect();
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 250, 250]);
        assert_eq!(pause_before_asking(look, u32::MAX), ASK_AGAIN_MAX);
        let longer = 2 * ASK_AGAIN_MAX;
        assert_eq!(pause_before_asking(longer, 0), longer, "never before it is looked again");
    }
}
