//! Attributes that other nodes publish: whose values count.
//!
//! Owns: when a call last set them, and which of two differing values stay. Does not own: the calls (`resize`, `xattr`), who publishes
//! (`mirror`).
//!
//! Mode, owner, mtime and extended attributes of a node may be set on any node; bytes change on the file's home only, and its mtime with
//! them. Each call that sets attributes notes a moment later than all noted before, so the last call counts, in whatever order nodes
//! publish it. A home that does not know of that call yet still publishes its bytes; a later write there shows in the mtime.

use super::attr::rebase;
use super::node::{Body, Node};
use super::tree::Tree;
use super::xattr::Xattrs;
use super::{FsError, NodeId, State};
use tidemark_protocol::cluster::wire::NodeState;

/// The node that publishes attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Teller {
    /// The file's home, or the coordinator in its name.
    Home,
    /// Any node, for a node without bytes.
    Any,
    /// The coordinator, for a node without bytes: the name may have been removed and recreated.
    Coordinator,
    /// Another node than the file's home.
    Other,
}

/// The part of published attributes that this node accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    All,
    Mtime,
    Nothing,
}

/// Decides which part counts of attributes last set at `told_ns`, with an mtime of `mtime_ns`; `here_ns`: when those here were set.
fn taken(teller: Teller, here_ns: i64, told_ns: i64, mtime_ns: i64) -> Taken {
    match teller {
        Teller::Coordinator => Taken::All,
        Teller::Home | Teller::Any if told_ns >= here_ns => Taken::All,
        Teller::Other if told_ns > here_ns => Taken::All,
        Teller::Home if mtime_ns > here_ns => Taken::Mtime,
        Teller::Home | Teller::Any | Teller::Other => Taken::Nothing,
    }
}

impl Node {
    /// Notes that a call set mode, owner, mtime or an extended attribute.
    pub(super) fn attributes_were_set(&mut self, now_ns: i64) {
        self.ctime_ns = self.ctime_ns.max(now_ns);
        self.attributes_ns = now_ns.max(self.attributes_ns.saturating_add(1));
    }
}

impl State {
    /// Notes that a call set a node's attributes. An answer about its names that is on its way does not know of that
    /// call.
    pub(super) fn note_attributes(&mut self, node: NodeId, now_ns: i64) -> Result<(), FsError> {
        let target = self.tree.node_mut(node)?;
        target.attributes_were_set(now_ns);
        self.outgoing.note_names_of(&self.tree, node);
        self.tree.touched.node(node);
        self.tree.mark(node);
        Ok(())
    }
}

/// Accepts the part that counts of published attributes.
pub(super) fn take_attributes(
    tree: &mut Tree,
    id: NodeId,
    told: &NodeState,
    teller: Teller,
) -> Result<(), FsError> {
    let (attributes, told_ns) = (&told.attributes, told.attributes_ns);
    let node = tree.node_mut(id)?;
    let taken = taken(teller, node.attributes_ns, told_ns, attributes.mtime_ns);
    if taken == Taken::Nothing {
        return Ok(());
    }
    let mut mtime_ns = attributes.mtime_ns;
    // A file that is being written here keeps its own time.
    if let Body::File(file) = &node.body
        && file.fate.writers() > 0
    {
        mtime_ns = node.mtime_ns;
    }
    let moved = node.mtime_ns != mtime_ns;
    let mut changed = moved;
    let mut xattrs_changed = Vec::new();
    if taken == Taken::All {
        let xattrs = Xattrs::from_pairs(&attributes.xattrs)?;
        let mode = attributes.mode & node.body.mode_bits();
        let told = (mode, attributes.uid, attributes.gid, told_ns);
        changed |= (node.mode, node.uid, node.gid, node.attributes_ns) != told;
        (node.mode, node.uid, node.gid, node.attributes_ns) = told;
        if node.xattrs != xattrs {
            changed = true;
            let names = [&node.xattrs, &xattrs].into_iter().flatten().flat_map(|xattrs| xattrs.names());
            xattrs_changed = names.map(|name| (id, name)).collect();
            node.xattrs = xattrs;
        }
    }
    if !changed {
        return Ok(());
    }
    (node.mtime_ns, node.ctime_ns) = (mtime_ns, node.ctime_ns.max(mtime_ns));
    let size_bytes = match &node.body {
        Body::File(file) => Some(file.size_bytes),
        Body::Directory(_) | Body::Symlink(_) | Body::Special(_) => None,
    };
    if let (true, Some(size_bytes)) = (moved, size_bytes) {
        rebase(node, size_bytes)?;
    }
    tree.touched.xattrs.extend(xattrs_changed);
    tree.touched.node(id);
    tree.mark(id);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_call_counts_whoever_tells_of_it() {
        for teller in [Teller::Home, Teller::Any, Teller::Other] {
            assert_eq!(taken(teller, 5, 6, 1), Taken::All, "{teller:?}");
            assert_eq!(taken(teller, 6, 5, 1), Taken::Nothing, "{teller:?}");
        }
    }

    #[test]
    fn of_what_no_call_set_its_home_knows_best() {
        assert_eq!(taken(Teller::Home, 5, 5, 1), Taken::All);
        assert_eq!(taken(Teller::Any, 0, 0, 1), Taken::All);
        assert_eq!(taken(Teller::Other, 5, 5, 9), Taken::Nothing);
    }

    #[test]
    fn what_a_home_wrote_after_a_call_it_has_not_heard_of_has_its_time() {
        assert_eq!(taken(Teller::Home, 6, 0, 7), Taken::Mtime);
        assert_eq!(taken(Teller::Home, 6, 0, 6), Taken::Nothing);
        assert_eq!(taken(Teller::Other, 6, 0, 7), Taken::Nothing);
    }

    #[test]
    fn a_name_made_anew_has_the_attributes_that_the_coordinator_knows() {
        assert_eq!(taken(Teller::Coordinator, 6, 0, 1), Taken::All);
    }
}
