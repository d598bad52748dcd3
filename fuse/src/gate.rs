//! Leave for calls on names, which may depend on other nodes.
//!
//! Owns: on which thread a call waits for leave. Does not own: what it needs leave for, and asking (the engine's cluster), the calls
//! (`adapter`).
//!
//! A single node asks no other, and neither does a node that has the directory to itself: then the call continues on its thread. Otherwise
//! it moves to a worker, so that a coordinator that is slow or away holds up only the calls that need it.

use crate::cold::Workers;
use crate::shared::Shared;
use tidemark_engine::cluster::{Leave, Wanted};
use tidemark_namespace::FsError;

/// The rest of a call, run once leave is granted or refused.
type Act = Box<dyn FnOnce(&Shared, Result<Leave, FsError>) + Send>;

/// A call that a worker carries out once it has leave.
pub(crate) struct Call {
    /// The action that needs leave; `None` where no leave is needed.
    wanted: Option<Wanted>,
    /// Whether the call found no room: before asking for leave, the worker waits for files that were just removed.
    is_short: bool,
    act: Act,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.wanted.fmt(f)
    }
}

/// Carries out a call once it has leave: here if leave costs no question, otherwise on a worker.
pub(crate) fn pass(
    shared: &Shared,
    workers: &Workers,
    wanted: impl FnOnce() -> Wanted,
    act: impl FnOnce(&Shared, Result<Leave, FsError>) + Send + 'static,
) {
    let Some(cluster) = shared.host.cluster() else { return act(shared, Ok(Leave::default())) };
    match Leave::at_once(cluster, wanted()) {
        Ok(leave) => act(shared, Ok(leave)),
        Err(wanted) => workers.ask(Call { wanted: Some(wanted), is_short: false, act: Box::new(act) }),
    }
}

/// Waits for leave, up to a limit. For workers.
///
/// # Errors
/// [`FsError::Stale`] if the node to change has other names by now; the errors of asking.
pub(crate) fn enter(shared: &Shared, wanted: Wanted) -> Result<Leave, FsError> {
    match shared.host.cluster() {
        Some(cluster) => Leave::wait(cluster, wanted),
        None => Ok(Leave::default()),
    }
}

/// Waits for leave for a call that gave its leave back ([`Leave::give_back`]). The call may find other names than before.
///
/// # Errors
/// As [`enter`].
pub(crate) fn enter_again(shared: &Shared, wanted: Option<Wanted>) -> Result<Leave, FsError> {
    wanted.map_or_else(|| Ok(Leave::default()), |wanted| enter(shared, wanted))
}

impl Call {
    /// Makes a call that found no room. Gives its leave back, since no other node is to wait for memory of this one. The worker gets leave
    /// again when it repeats the call.
    pub(crate) fn short_of_room(
        leave: Leave,
        act: impl FnOnce(&Shared, Result<Leave, FsError>) + Send + 'static,
    ) -> Self {
        Self { wanted: leave.give_back(), is_short: true, act: Box::new(act) }
    }

    /// Carries out the call. For workers.
    pub(crate) fn go(self, shared: &Shared) {
        if self.is_short {
            shared.namespace.room().wait_for_departures();
        }
        (self.act)(shared, enter_again(shared, self.wanted));
    }

    /// Refuses the call, because no worker can do it.
    pub(crate) fn refuse(self, shared: &Shared) {
        (self.act)(shared, Err(FsError::Busy));
    }
}
