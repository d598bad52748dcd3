//! The members that a coordinator without a lease knows, for the daemon after it.
//!
//! Owns: when their list is written, and how the next daemon begins with it. Does not own: the file (`state_dir`), who is a member and for how
//! long one of before is awaited (control's catalog).
//!
//! With an etcd the list lies beside the lease, and a successor answers for names once all in it have been heard, or are gone. A coordinator
//! that is fixed is its own successor: without the list it would say of names that only a member knows that they are not there (P8).

use crate::state_dir::StateDir;
use std::sync::Arc;
use std::time::Duration;
use tidemark_control::catalog::Catalog;
use tidemark_engine::cluster::Cluster;
use tidemark_protocol::id::NodeName;
use tidemark_protocol::membership::MemberList;

/// Interval between two tries to write the list: each that fails may be a line in the log.
const WRITE_AGAIN: Duration = Duration::from_secs(1);

/// Returns the members that the daemon before this one knew. `address`: where this node `own` is reached now. A list that cannot be read
/// counts as empty: then no node is awaited.
pub(crate) fn members_before(state_dir: &StateDir, own: &NodeName, address: &str) -> MemberList {
    let before = state_dir.last_members().unwrap_or_else(|error| {
        tracing::warn!(error = format!("{error:#}"), "the members of before are not known; none is awaited");
        None
    });
    taken_up(before.unwrap_or_default(), own, address)
}

/// Moves this node's earlier life to the present address. The node has the lock of the state directory with the list, so the earlier life
/// has ended, wherever it was reached. The membership knows that only of a life at the present address.
fn taken_up(mut before: MemberList, own: &NodeName, address: &str) -> MemberList {
    for listed in before.members.iter_mut().filter(|listed| listed.life.node == *own) {
        address.clone_into(&mut listed.address);
    }
    before
}

/// Writes the nodes that the next daemon is to await, at each change of the members, until dropped. At most some hundred bytes for each of
/// them, at each notice of changes to all nodes.
pub(crate) async fn keep_members(catalog: Arc<Catalog>, cluster: Arc<Cluster>, state_dir: StateDir) {
    let mut members = cluster.following.watch_members();
    let mut said = String::new();
    loop {
        members.mark_unchanged();
        let list = catalog.expected();
        let to = state_dir.clone();
        let written = tokio::task::spawn_blocking(move || to.write_members(&list)).await;
        match written.expect("writing a file does not panic") {
            Ok(()) => said.clear(),
            Err(error) => {
                let why = error.to_string();
                if why != said {
                    tracing::warn!(%why, "the members are not written: the next daemon may not await all");
                    said = why;
                }
                tokio::time::sleep(WRITE_AGAIN).await;
                continue;
            }
        }
        // The sender lives as long as the cluster, which we hold.
        let _ = members.changed().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::id::{Incarnation, StartId};
    use tidemark_protocol::label::Labels;
    use tidemark_protocol::membership::{Life, Listed};

    #[test]
    fn an_earlier_life_of_this_node_is_where_this_one_is_and_all_others_where_they_were() {
        let listed = |node: &str| {
            let node_name = node.parse().unwrap();
            let life = Life { node: node_name, incarnation: Incarnation(1), start: StartId(1) };
            Listed { life, address: format!("{node}:1"), labels: Labels::default() }
        };
        let before = MemberList { members: ["n1", "n2"].map(listed).to_vec(), ..MemberList::default() };
        let taken = taken_up(before, &"n1".parse().unwrap(), "elsewhere:2");
        let addresses: Vec<_> = taken.members.into_iter().map(|listed| listed.address).collect();
        assert_eq!(addresses, ["elsewhere:2", "n2:1"]);
        assert_eq!(taken_up(MemberList::default(), &"n1".parse().unwrap(), "n1:1"), MemberList::default());
    }
}
