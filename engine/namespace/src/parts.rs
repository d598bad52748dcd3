//! The calls of a namespace, grouped by their users.
//!
//! Owns: which parts of a namespace each group of calls may use. Does not own: the calls. Each group is a view that borrows those parts:
//! making one costs nothing.

use super::gate::Gate;
use super::overwrite::Overwrites;
use super::{
    Adoption, CatalogTree, HandleCalls, HiddenNames, HostCopies, HostRoom, Mirror, NameCalls, Namespace,
    NodeViews, PeerCopies, Publications, Seals, SessionCalls, StandingNodes, Writers, XattrCalls,
};

impl Namespace {
    /// Whether programs may make files, and change them.
    #[inline]
    #[must_use]
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Freezing the bytes of closed files, and reading what is frozen.
    #[inline]
    #[must_use]
    pub fn seals(&self) -> Seals<'_> {
        Seals { state: &self.state, tier1: &self.tier1, courtesy: &self.courtesy }
    }

    /// Copies of other nodes' files that this node keeps.
    #[inline]
    #[must_use]
    pub fn peer_copies(&self) -> PeerCopies<'_> {
        PeerCopies { state: &self.state, seals: self.seals(), hosts: self.hosts() }
    }

    /// Publications to other nodes, for the sender.
    #[inline]
    #[must_use]
    pub fn publications(&self) -> Publications<'_> {
        Publications { state: &self.state }
    }

    /// Nodes as they stand, for publication to other nodes.
    #[inline]
    #[must_use]
    pub fn standing(&self) -> StandingNodes<'_> {
        StandingNodes { state: &self.state }
    }

    /// Nodes by path and by number, and the facts known of each.
    #[inline]
    #[must_use]
    pub fn nodes(&self) -> NodeViews<'_> {
        NodeViews { state: &self.state }
    }

    /// The tree as the catalog: the publications applied to it, and the changes that are not kept elsewhere.
    #[inline]
    #[must_use]
    pub fn catalog(&self) -> CatalogTree<'_> {
        CatalogTree { state: &self.state, fates: &self.fates }
    }

    /// Other nodes' names and states, applied to this tree.
    #[inline]
    #[must_use]
    pub fn mirror(&self) -> Mirror<'_> {
        Mirror { state: &self.state }
    }

    /// Names that the daemon hides, and removes from the tree.
    #[inline]
    #[must_use]
    pub fn hidden(&self) -> HiddenNames<'_> {
        HiddenNames { state: &self.state, namespace: self }
    }

    /// Files' bytes in this node's memory, and whether Tier-3 has them.
    #[inline]
    #[must_use]
    pub fn hosts(&self) -> HostCopies<'_> {
        HostCopies { state: &self.state }
    }

    /// Tier-3's names, brought into this tree.
    #[inline]
    #[must_use]
    pub fn adoption(&self) -> Adoption<'_> {
        Adoption { state: &self.state }
    }

    /// Memory for bytes that are to be written.
    #[inline]
    #[must_use]
    pub fn room(&self) -> HostRoom<'_> {
        HostRoom { state: &self.state, tier1: &self.tier1, waits: &self.room_waits }
    }

    /// Parts of the kernel's session that outlive a daemon.
    #[inline]
    #[must_use]
    pub fn session(&self) -> SessionCalls<'_> {
        SessionCalls { state: &self.state }
    }

    /// Calls on open files.
    #[inline]
    #[must_use]
    pub fn handles(&self) -> HandleCalls<'_> {
        HandleCalls { state: &self.state, namespace: self }
    }

    /// Calls that make, move and list names.
    #[inline]
    #[must_use]
    pub fn names(&self) -> NameCalls<'_> {
        NameCalls { state: &self.state, writers: &self.writers }
    }

    /// Calls on extended attributes.
    #[inline]
    #[must_use]
    pub fn xattrs(&self) -> XattrCalls<'_> {
        XattrCalls { state: &self.state, source: &self.xattr_source }
    }

    /// The processes that write, make, remove and read, and how they ended.
    #[inline]
    #[must_use]
    pub fn writers(&self) -> Writers<'_> {
        Writers { state: &self.state, cache: &self.writers, readers: &self.readers }
    }

    /// Preparing bytes for a change while other programs may hold them.
    #[inline]
    pub(super) fn overwrites(&self) -> Overwrites<'_> {
        Overwrites { state: &self.state, room: self.room(), prediction: &self.prediction, locks: &self.locks }
    }
}
