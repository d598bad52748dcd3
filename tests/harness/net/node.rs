//! A host with a real `ckptd` on it: a node of a cluster, which a test may take away as a whole.
//!
//! Owns: the daemon, and the loss of the node with all that runs on its host. Does not own: the host, where Tier-3 is.

use std::time::Duration;

use super::{Fault, Host};
use crate::daemon::{Daemon, DaemonOptions, is_mounted};

/// Limit of reaping a killed process: it has ended already, and only its parent must still be notified.
const REAP_LIMIT: Duration = Duration::from_secs(20);

/// A daemon on a host. Dropping it kills the daemon, unmounts, and removes its directories.
#[derive(Debug)]
pub struct Node {
    host: Host,
    daemon: Daemon,
    /// The isolation of the host while the node has no power.
    off: Option<Fault>,
}

impl Node {
    /// Starts a daemon with the host's name and address, and waits until its mount serves.
    ///
    /// By default its Tier-3 is a directory that is removed with it. For nodes of one cluster, `options` names a shared one.
    pub fn start(host: &Host, options: DaemonOptions) -> Self {
        let mut options = DaemonOptions { host: Some(host.clone()), ..options };
        options.flags.extend(["--name".into(), host.name().into()]);
        Self { host: host.clone(), daemon: Daemon::start(options), off: None }
    }

    /// Returns the node's host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Returns the daemon, whose mount this process sees too.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Returns the daemon, to stop it alone or to give it another configuration.
    pub fn daemon_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }

    /// Loses the node: keeper, daemon, ranks and whatever else runs on its host, its memory and its mount, without a
    /// notice to any node. Returns the pids that were killed.
    ///
    /// # Panics
    /// When any of it is still there. A test that goes on would claim to have survived a loss that did not happen.
    pub fn power_off(&mut self) -> Vec<u32> {
        assert!(self.off.is_none(), "{} has no power", self.host.name());
        let (keeper, serving) = (self.daemon.keeper_pid(), self.daemon.serving_pid());
        let mount = self.daemon.mount().to_path_buf();
        // Isolation comes first, because the kernel closes the killed processes' connections and would notify the other ends.
        self.off = Some(self.host.isolate());
        let killed = self.host.kill_all();
        assert!(
            killed.contains(&keeper) && serving.is_none_or(|pid| killed.contains(&pid)),
            "{keeper} and {serving:?} were to be among the killed {killed:?}"
        );
        let ended = self.daemon.wait_for_death(REAP_LIMIT);
        assert!(ended.is_some(), "the keeper {keeper} was killed and did not end");
        assert!(!is_mounted(&mount), "the mount of {} outlived it", self.host.name());
        assert_eq!(self.host.processes(), [0; 0], "processes of {} outlived it", self.host.name());
        killed
    }

    /// Returns the isolation of a node without power, which counts the packets that it drops.
    pub fn isolation(&self) -> Option<&Fault> {
        self.off.as_ref()
    }

    /// Brings the same machine back: same name, same address, same directories, empty memory.
    pub fn power_on(&mut self) {
        assert!(self.off.take().is_some(), "{} has power", self.host.name());
        self.daemon.start_again();
    }
}
