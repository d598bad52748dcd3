//! A daemon's dealings with its surroundings: its keeper, the processors, the mount that it leaves.
//!
//! Owns: waiting for these, and asking them. Does not own: the order of start and end (`up`).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tidemark_fuse::Mounted;
use tidemark_keeper::Keeper;
use tidemark_tier1::priority;

/// Raises this thread's priority: every program that uses the mount waits for it, on machines whose CPUs are
/// full. Returns false if this process may not ask for that.
pub(crate) fn before_others() -> bool {
    let asked = priority::run_before_others();
    if let Err(error) = &asked {
        tracing::debug!(%error, "a death is mended at the usual priority");
    }
    asked.is_ok()
}

pub(crate) fn as_usual() {
    if let Err(error) = priority::run_as_usual() {
        tracing::warn!(%error, "a thread keeps a priority that it no longer needs");
    }
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
}

pub(crate) fn keeper_pid(keeper: &Keeper) -> Option<u32> {
    match keeper {
        Keeper::Ours(_) => Some(std::os::unix::process::parent_id()),
        Keeper::Systemd(..) | Keeper::Nobody => None,
    }
}

/// Resolves when our keeper has died.
pub(crate) fn keeper_gone(keeper: &Keeper) -> std::io::Result<tokio::sync::oneshot::Receiver<()>> {
    let (tell, gone) = tokio::sync::oneshot::channel();
    match keeper.watch()? {
        Some(socket) => {
            std::thread::Builder::new().name("keeper-watch".to_owned()).spawn(move || {
                wait_for_hangup(&socket);
                // The receiver is gone when the daemon is ending anyway.
                let _ = tell.send(());
            })?;
        }
        // Never sent: systemd ends this process itself.
        None => std::mem::forget(tell),
    }
    Ok(gone)
}

pub(crate) fn wait_for_hangup(socket: &OwnedFd) {
    use rustix::event::{PollFd, PollFlags, poll};
    loop {
        // The end of the other side is always reported, and nothing else is asked for.
        let mut watched = [PollFd::new(socket, PollFlags::empty())];
        match poll(&mut watched, None) {
            Ok(_) => return,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return tracing::error!(%error, "the keeper cannot be watched"),
        }
    }
}

pub(crate) async fn ended(mounted: &Arc<Mounted>) {
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        if mounted.ended_within(Duration::ZERO) {
            return;
        }
    }
}

pub(crate) async fn unmount(mounted: &Arc<Mounted>) {
    let mounted = Arc::clone(mounted);
    let done = tokio::task::spawn_blocking(move || {
        if mounted.ended_within(Duration::ZERO) || !mounted.is_there() {
            tracing::info!("the mount was taken away before");
            return Ok(());
        }
        if let Err(error) = mounted.unmount(false) {
            tracing::warn!(error = &error as &dyn std::error::Error, "the mount is busy: unmounting lazily");
            mounted.unmount(true)?;
        }
        Ok::<_, tidemark_fuse::MountError>(())
    });
    if let Err(error) = done.await.expect("unmounting does not panic") {
        tracing::error!(error = &error as &dyn std::error::Error, "the mount could not be taken away");
    }
}
