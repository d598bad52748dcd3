//! How this node's files are copied to another one, for people: what lacks a copy, since when, and why.
//!
//! Owns: the answer. Does not own: sending (`engine::replicate`), who the partner is (the coordinator).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tidemark_engine::node::Shared;
use tidemark_engine::replicate::Replicator;
use tidemark_namespace::FileState;
use tidemark_protocol::cluster::wire::{Member, Members, Standing};
use tidemark_protocol::report::{Problem, ProblemCode, ReplicationStatus};

/// Interval between two counts of files, which examine all of them.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// The last count.
#[derive(Debug, Default)]
pub(crate) struct Counted(Mutex<Option<(Instant, Lacking)>>);

/// Files without a copy elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Lacking {
    files: u64,
    bytes: u64,
}

impl Counted {
    /// None for a node that is alone.
    pub(crate) fn status(&self, shared: &Shared, now_ms: i64) -> Option<ReplicationStatus> {
        let (cluster, replicator) = (shared.cluster.get()?, shared.replicator.get()?);
        let members = cluster.following.members();
        let own = members.members.iter().find(|member| member.life == cluster.life)?;
        let partner = own.partners.first().and_then(|name| living(&members, name.as_str()));
        if let Some(partner) = partner.filter(|partner| !partner.gone && partner.standing != Standing::Gone) {
            return Some(on_its_way(replicator, partner, now_ms));
        }
        let Lacking { files, bytes } = self.lacking(shared, replicator, &members);
        let why = partner.map_or_else(|| "there is no other node".to_owned(), |partner| partner.why.clone());
        Some(ReplicationStatus {
            partner: None,
            lacking_files: files,
            lacking_bytes: bytes,
            since_ms: partner.filter(|_| files > 0).map(|partner| partner.since_ms),
            why: (files > 0).then_some(why),
        })
    }

    /// Sealed files of this node that no other node which lives has.
    fn lacking(&self, shared: &Shared, replicator: &Replicator, members: &Members) -> Lacking {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, lacking)) = *counted
            && at.elapsed() < COUNT_EVERY
        {
            return lacking;
        }
        let mut lacking = Lacking::default();
        for view in shared.namespace.nodes().views_below(b"") {
            let FileState::Sealed { seal, size_bytes, .. } = view.state else { continue };
            if view.remote.is_some() || !view.host || view.object.is_some() {
                continue;
            }
            let holders = replicator.holders(view.file, seal);
            let is_held =
                holders.iter().any(|holder| living(members, holder).is_some_and(|member| !member.gone));
            if !is_held {
                lacking.files += 1;
                lacking.bytes += size_bytes;
            }
        }
        *counted = Some((Instant::now(), lacking));
        lacking
    }
}

/// With a partner that takes copies: what it has not acknowledged.
fn on_its_way(replicator: &Replicator, partner: &Member, now_ms: i64) -> ReplicationStatus {
    let behind = replicator.behind();
    let oldest_ms = behind.iter().map(|file| file.for_ms).max();
    let troubled = matches!(partner.standing, Standing::Suspect | Standing::CutOff);
    let why = behind.iter().find_map(|file| file.why.clone());
    let why = if troubled { Some(partner.why.clone()) } else { why };
    ReplicationStatus {
        partner: Some(partner.life.node.to_string()),
        lacking_files: behind.len() as u64,
        lacking_bytes: behind.iter().map(|file| file.lacking_bytes).sum(),
        since_ms: oldest_ms.map(|for_ms| now_ms.saturating_sub(i64::try_from(for_ms).unwrap_or(i64::MAX))),
        why: why.filter(|_| !behind.is_empty()),
    }
}

/// The member of that name, not one whose life is over.
fn living<'a>(members: &'a Members, name: &str) -> Option<&'a Member> {
    let mut found = members.members.iter();
    found.find(|member| member.life.node.as_str() == name && member.standing != Standing::Over)
}

/// Files that would be lost with this node, where others could have them. A node that is the only one promises nothing else.
pub(crate) fn problem(status: &ReplicationStatus) -> Option<Problem> {
    if status.partner.is_some() || status.lacking_files == 0 || status.since_ms.is_none() {
        return None;
    }
    let bytes = tidemark_protocol::size::Shown(status.lacking_bytes);
    let (files, why) = (status.lacking_files, status.why.as_deref().unwrap_or_default());
    Some(Problem::new(
        ProblemCode::UnderReplicated,
        format!("{files} files ({bytes}) are in this node's memory alone, and not in Tier-3: {why}"),
        "bring that node back; when it has been gone for members.for_good_s its place is given away, and the copies are made \
         again",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_this_node_has_is_a_problem_where_it_had_a_partner() {
        let lost = ReplicationStatus {
            partner: None,
            lacking_files: 3,
            lacking_bytes: 3 << 30,
            since_ms: Some(1),
            why: Some("node n3 is gone".into()),
        };
        let said = problem(&lost).unwrap();
        assert!(said.what.contains("3 files (3.0 GiB)") && said.what.contains("node n3 is gone"), "{said:?}");
        assert_eq!(problem(&ReplicationStatus { partner: Some("n2".into()), ..lost.clone() }), None);
        assert_eq!(problem(&ReplicationStatus { lacking_files: 0, ..lost.clone() }), None);
        assert_eq!(problem(&ReplicationStatus { since_ms: None, ..lost }), None, "it is the only node");
    }
}
