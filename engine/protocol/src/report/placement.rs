//! The report of `placement`: the partner of each node, and the cost of losing some nodes.
//!
//! Owns: the shapes, and how they follow from a placement. Does not own: the choice and the counts (`placement`).

use crate::id::NodeName;
use crate::label::Labels;
use crate::placement::{self, Candidate, Note, Scope, Survival, survival};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum number of warnings that are listed; each is about one node, and a cluster in one rack has one for
/// each.
pub const WARNINGS_MAX: usize = 16;

/// `ckptctl placement`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The coordinator's epoch in which the placement was made.
    pub epoch: u64,
    /// Number of the placement within its epoch.
    pub number: u64,
    /// `ring` or `pair`.
    pub scheme: String,
    /// The label that names failure domains.
    pub label: String,
    /// Whether partners are in one domain on purpose; otherwise they are in two if possible.
    pub within: bool,
    /// Every node, by name.
    pub nodes: Vec<PlacementRow>,
    /// Rows for one, two and three nodes lost at once, and then for one whole domain.
    pub survival: Vec<SurvivalRow>,
    /// Warnings, a sentence each; the first [`WARNINGS_MAX`].
    pub warnings: Vec<String>,
    /// Number of warnings that are not listed.
    pub more_warnings: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementRow {
    pub node: String,
    /// The node's failure domain; null without the label.
    pub domain: Option<String>,
    /// The node that keeps its copies; null if no node does.
    pub partner: Option<String>,
    pub partner_domain: Option<String>,
    /// The node whose copies it keeps.
    pub keeps: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurvivalRow {
    /// Number of nodes or domains lost at once.
    pub lost: u64,
    /// `node`, or the label that names failure domains.
    pub of: String,
    /// Number of ways to lose so many.
    pub combinations: u64,
    /// Number of ways that lose data which is not in Tier-3 yet.
    pub fatal: u64,
    /// A way that loses the most; empty if none loses any.
    pub worst: Vec<String>,
    /// Number of nodes whose data that way loses.
    pub worst_loses: u64,
}

impl Placement {
    /// Makes the report of a placement. `members` are those that it was made of, with the notes of that moment.
    #[must_use]
    pub fn of(placement: &placement::Placement, members: &[Candidate], notes: &[Note]) -> Self {
        let rules = &placement.rules;
        let label = rules.scope.label();
        let labels: BTreeMap<_, &Labels> =
            members.iter().map(|member| (&member.name, &member.labels)).collect();
        let domain =
            |node: &NodeName| labels.get(node).and_then(|labels| labels.get(label)).map(str::to_owned);
        let partners = placement.partners();
        let keeps: BTreeMap<_, _> =
            partners.iter().filter_map(|(node, partner)| Some(((*partner)?, *node))).collect();
        let nodes = partners.iter().map(|(node, partner)| PlacementRow {
            node: node.to_string(),
            domain: domain(node),
            partner: partner.map(NodeName::to_string),
            partner_domain: partner.and_then(domain),
            keeps: keeps.get(node).map(ToString::to_string),
        });
        Self {
            epoch: placement.version.epoch.0,
            number: placement.version.number,
            scheme: rules.scheme.word().to_owned(),
            label: label.to_owned(),
            within: matches!(rules.scope, Scope::Within(_)),
            nodes: nodes.collect(),
            survival: rows(survival(placement, members)),
            warnings: notes.iter().take(WARNINGS_MAX).map(Note::to_string).collect(),
            more_warnings: notes.len().saturating_sub(WARNINGS_MAX) as u64,
        }
    }
}

fn rows(survival: Survival) -> Vec<SurvivalRow> {
    let of_nodes = survival.losses.into_iter().map(|loss| SurvivalRow {
        lost: loss.lost as u64,
        of: "node".to_owned(),
        combinations: loss.combinations,
        fatal: loss.fatal,
        worst: loss.worst.iter().map(ToString::to_string).collect(),
        worst_loses: loss.worst_loses.len() as u64,
    });
    let of_domains = survival.domains.map(|domains| SurvivalRow {
        lost: 1,
        of: domains.label,
        combinations: domains.domains,
        fatal: domains.fatal,
        worst: domains.worst.into_iter().collect(),
        worst_loses: domains.worst_loses,
    });
    of_nodes.chain(of_domains).collect()
}
