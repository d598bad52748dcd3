//! The node's own side: the epoch that it follows, whether the coordinator hears it, and when its next beat is due.
//!
//! Owns: following, and refusing lower epochs. Does not own: finding the coordinator, sending (the control plane).

use super::wire::{Admit, Ask, Beat, Echo, Heard, Life};
use super::{BEAT_MS, Refusal, SUSPECT_BEATS, interval_ms};
use crate::id::{Epoch, NodeName};
use crate::placement::MEMBERS_MAX;

/// Whether a coordinator decides for this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Coordinator {
    /// No coordinator has admitted the node yet.
    Unknown,
    /// The coordinator answered a beat `ago_ms` ago.
    Heard { name: NodeName, ago_ms: u64 },
    /// The coordinator has been silent for `for_ms`: everything local goes on, and the node asks who holds the lease.
    /// With two nodes alone no more can be known: either the other node is dead, or the network is.
    Silent { name: NodeName, for_ms: u64 },
}

/// A node's view of the coordinator. Time is milliseconds of the node's own monotonic clock.
#[derive(Debug, Clone)]
pub struct View {
    me: Life,
    epoch: Epoch,
    coordinator: Option<NodeName>,
    heard_ms: u64,
    interval_ms: u64,
    next_beat_ms: u64,
    number: u64,
}

/// Clamps an interval from a coordinator to the possible range.
fn told_interval_ms(said_ms: u64) -> u64 {
    said_ms.clamp(BEAT_MS, interval_ms(MEMBERS_MAX))
}

impl View {
    /// Makes a view; `epoch` is the highest one in the node's journal.
    #[must_use]
    pub fn new(me: Life, epoch: Epoch) -> Self {
        Self { me, epoch, coordinator: None, heard_ms: 0, interval_ms: BEAT_MS, next_beat_ms: 0, number: 0 }
    }

    /// Returns the highest epoch heard of. Messages with a lower one are refused.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Checks that an order of `epoch` may be carried out. A higher epoch is followed from now on.
    ///
    /// # Errors
    /// When a newer coordinator decides.
    pub fn follow(&mut self, theirs: Epoch) -> Result<(), Refusal> {
        if theirs < self.epoch {
            return Err(Refusal::OldEpoch { theirs, ours: self.epoch });
        }
        if theirs > self.epoch {
            // The admission will name the coordinator of this epoch: until then no beat is sent.
            (self.epoch, self.coordinator) = (theirs, None);
        }
        Ok(())
    }

    /// Records that the coordinator admitted this node.
    ///
    /// # Errors
    /// When the coordinator is an older one, the admission is for another life, or two coordinators claim one epoch.
    pub fn admitted(&mut self, admit: &Admit, now_ms: u64) -> Result<(), Refusal> {
        self.follow(admit.epoch)?;
        if admit.to != self.me {
            return Err(Refusal::old_start(&admit.to.node, admit.to.start));
        }
        self.check_coordinator(&admit.coordinator)?;
        self.coordinator = Some(admit.coordinator.clone());
        (self.heard_ms, self.next_beat_ms) = (now_ms, now_ms);
        self.interval_ms = told_interval_ms(admit.interval_ms);
        Ok(())
    }

    fn check_coordinator(&self, theirs: &NodeName) -> Result<(), Refusal> {
        match &self.coordinator {
            Some(ours) if ours != theirs => {
                let (ours, theirs) = (ours.clone(), theirs.clone());
                Err(Refusal::TwoCoordinators { epoch: self.epoch, ours, theirs })
            }
            _ => Ok(()),
        }
    }

    /// Returns the next beat if it is due. None while no coordinator has admitted this life.
    pub fn beat(&mut self, tier1_used_bytes: u64, tier1_size_bytes: u64, now_ms: u64) -> Option<Beat> {
        self.coordinator.as_ref()?;
        if now_ms < self.next_beat_ms {
            return None;
        }
        // Missed beats are not sent later: after a sleep one beat says as much as ten.
        self.next_beat_ms = now_ms + self.interval_ms;
        self.number += 1;
        let (from, epoch, number) = (self.me.clone(), self.epoch, self.number);
        Some(Beat { from, epoch, number, tier1_used_bytes, tier1_size_bytes })
    }

    /// Records that the coordinator answered a beat.
    ///
    /// # Errors
    /// When the coordinator is an older one, or another of the same epoch.
    pub fn echoed(&mut self, echo: &Echo, now_ms: u64) -> Result<(), Refusal> {
        self.follow(echo.epoch)?;
        self.check_coordinator(&echo.coordinator)?;
        if self.coordinator.is_some() {
            self.heard_ms = self.heard_ms.max(now_ms);
            self.interval_ms = told_interval_ms(echo.interval_ms);
        }
        Ok(())
    }

    /// Records that the coordinator answered something else, which shows that it lives.
    pub fn heard(&mut self, now_ms: u64) {
        self.heard_ms = self.heard_ms.max(now_ms);
    }

    /// Records that the node was refused and has to join again: no beat until then.
    pub fn rejoin(&mut self) {
        self.coordinator = None;
    }

    /// Returns the answer to a coordinator's question; `heard` says whether exactly that life was heard since.
    ///
    /// # Errors
    /// When an older coordinator asks.
    pub fn answer(&mut self, ask: &Ask, heard: bool) -> Result<Heard, Refusal> {
        self.follow(ask.epoch)?;
        let (from, epoch) = (self.me.clone(), self.epoch);
        Ok(Heard { from, epoch, question: ask.question, about: ask.about.node.clone(), heard })
    }

    /// Returns whether a coordinator decides for this node.
    #[must_use]
    pub fn coordinator(&self, now_ms: u64) -> Coordinator {
        let Some(name) = self.coordinator.clone() else { return Coordinator::Unknown };
        let ago_ms = now_ms.saturating_sub(self.heard_ms);
        if ago_ms < self.interval_ms * SUSPECT_BEATS {
            Coordinator::Heard { name, ago_ms }
        } else {
            Coordinator::Silent { name, for_ms: ago_ms }
        }
    }
}
