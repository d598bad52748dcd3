//! Faults while jobs save.
//!
//! Owns: the kinds of faults, their moments and how long they last. Does not own: what must hold all the same (`saves`).

use super::machine::Machine;
use super::saves::World;
use super::{etcd, tier3};
use std::sync::Arc;
use std::time::Duration;

/// How long no other node is lost after one was, until copies can be complete again.
const COPIES_COMPLETE: Duration = Duration::from_secs(60);

/// The kinds of faults in a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    None,
    /// Connections break, also in the middle of a file.
    Breaks,
    /// Daemons are killed, and started again.
    Kills,
    /// Nodes lose their power and their memory, and come back as others.
    PowerOff,
    /// Nodes hear for some seconds nothing at all, or not one other node, in one direction or both, or not etcd, or not Tier-3.
    Cuts,
    /// Tier-3 is away for some seconds, or so slow that some of its answers come too late.
    Tier3,
    /// Nodes have memory for few saves.
    Memory,
    /// A node loses its power and its memory while Tier-3 is away, and comes back as another.
    Loss,
    /// A node loses its power and its memory, and comes back as another. Whenever a save is removed, the coordinator's daemon is killed.
    Removals,
}

impl Trouble {
    pub(super) const ALL: [Self; 9] = [
        Self::None,
        Self::Breaks,
        Self::Kills,
        Self::PowerOff,
        Self::Cuts,
        Self::Tier3,
        Self::Memory,
        Self::Loss,
        Self::Removals,
    ];

    /// Whether anything happens at some moment.
    pub(super) fn strikes(self) -> bool {
        !matches!(self, Self::None | Self::Breaks | Self::Memory)
    }
}

/// Kills a daemon, and starts it again after `away`.
async fn kill_and_start(machine: &Arc<Machine>, away: Duration) {
    machine.kill();
    // Another thread ends what the killed daemon had begun there, before the next one reads its memory.
    tokio::task::spawn_blocking(|| ()).await.expect("nothing panics there");
    tokio::time::sleep(away).await;
    machine.start();
}

impl World {
    fn take_tier3_away(&self) {
        for machine in &self.machines {
            self.wire.cut(&machine.name, tier3::PLACE);
            self.wire.cut(tier3::PLACE, &machine.name);
        }
    }

    /// Lets things go wrong, some times.
    pub(super) async fn go_wrong(&self) {
        for round in 0..3 {
            tokio::time::sleep(self.some(500, 5000)).await;
            let at = self.below(self.machines.len());
            let machine = &self.machines[at];
            match self.trouble {
                Trouble::None | Trouble::Breaks | Trouble::Memory => return,
                Trouble::Kills => kill_and_start(machine, self.some(20, 1500)).await,
                Trouble::Removals => {
                    self.lose(at, round, self.some(500, 3000)).await;
                    self.ran.borrow_mut().faults += 1;
                    return;
                }
                Trouble::PowerOff => {
                    self.lose(at, round, self.some(500, 6000)).await;
                    tokio::time::sleep(COPIES_COMPLETE).await;
                }
                Trouble::Cuts => self.cut(&machine.name, at).await,
                Trouble::Tier3 => {
                    let (away, lasts) = (self.below(2) == 0, self.some(300, 20_000));
                    if away {
                        self.take_tier3_away();
                    } else {
                        self.tier3.takes_longer(self.some(500, 4000));
                    }
                    tokio::time::sleep(lasts).await;
                    self.wire.heal();
                    self.tier3.takes_longer(Duration::ZERO);
                }
                Trouble::Loss => {
                    self.take_tier3_away();
                    tokio::time::sleep(self.some(2000, 9000)).await;
                    self.lose(at, round, self.some(500, 6000)).await;
                    self.wire.heal();
                    tokio::time::sleep(COPIES_COMPLETE).await;
                }
            }
            self.ran.borrow_mut().faults += 1;
        }
    }

    /// Kills the coordinator's daemon, and starts it again.
    pub(super) async fn kill_coordinator(&self) {
        let decides = |machine: &&Arc<Machine>| {
            let serving = machine.running().and_then(|running| running.serving.clone());
            serving.is_some_and(|serving| serving.node.shared().decides())
        };
        if let Some(machine) = self.machines.iter().find(decides) {
            kill_and_start(machine, self.some(20, 500)).await;
        }
    }

    /// Takes a node's power and its memory. It comes back after `away` as another life.
    async fn lose(&self, at: usize, round: u64, away: Duration) {
        self.lives.borrow_mut()[at] += 1;
        self.machines[at].lose_power(1000 + 10 * round + at as u64);
        tokio::time::sleep(away).await;
        self.machines[at].start();
    }

    /// Cuts a node off for a while, from all or from one place.
    async fn cut(&self, name: &str, at: usize) {
        let nodes = self.machines.len();
        let other = self.machines[(at + 1 + self.below(nodes - 1)) % nodes].name.as_str();
        let all = self.machines.iter().map(|machine| machine.name.as_str());
        let all: Vec<_> = all.chain([etcd::PLACE, tier3::PLACE]).filter(|to| *to != name).collect();
        let (from, both) = match self.below(5) {
            0 => (all, true),
            1 => (vec![other], true),
            2 => (vec![other], false),
            3 => (vec![etcd::PLACE], true),
            _ => (vec![tier3::PLACE], true),
        };
        let (begun, healed) = self.cuts.get();
        self.cuts.set((begun + 1, healed));
        for to in from {
            self.wire.cut(name, to);
            if both {
                self.wire.cut(to, name);
            }
        }
        tokio::time::sleep(self.some(300, 9000)).await;
        self.wire.heal();
        // The node is a member again.
        tokio::time::sleep(Duration::from_secs(3)).await;
        self.cuts.set((begun + 1, healed + 1));
    }
}
