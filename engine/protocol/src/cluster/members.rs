//! The list of members that all nodes are sent.
//!
//! Owns: the list, and the difference between two lists, so that a change in a cluster of thousands takes a few hundred bytes. Does not
//! own: which node is a member and why (`membership`), partners (`placement`), sending the list.

use super::wire::{self, WireError};
use crate::id::{Epoch, NodeName};
use crate::key::NodeLife;
use crate::placement::PlacementVersion;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// The list of members.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    pub epoch: Epoch,
    /// Rises with each change within an epoch.
    pub number: u64,
    /// The version of the placement by which the partners were chosen.
    pub placement: PlacementVersion,
    /// Members in the order of [`Member::place`]: by name. The last lives that are over follow, so that what they wrote has a name.
    pub members: Vec<Member>,
}

/// A member of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub life: NodeLife,
    pub address: String,
    pub labels: BTreeMap<String, String>,
    /// Whether nothing is expected of it: it does not answer, its copies cannot be fetched, its processes have ended.
    pub gone: bool,
    /// Nodes that keep copies of its files.
    pub partners: Vec<NodeName>,
    pub standing: Standing,
    /// Time of its present standing, by the coordinator's wall clock, for people; 0 for a live member.
    pub since_ms: i64,
    /// The reason for its standing in words, at most [`WHY_BYTES_MAX`](super::wire::WHY_BYTES_MAX); empty for a live member.
    pub why: String,
}

/// The coordinator's verdict on a node; `membership` has the reasons.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// A member from before the coordinator's start that has not joined yet.
    Awaited,
    #[default]
    Alive,
    Suspect,
    /// Other nodes hear it, but the coordinator does not.
    CutOff,
    Gone,
    /// No longer a member.
    Over,
}

impl Standing {
    /// Returns the word that people are shown.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Awaited => "awaited",
            Self::Alive => "alive",
            Self::Suspect => "suspect",
            Self::CutOff => "cut_off",
            Self::Gone => "gone",
            Self::Over => "over",
        }
    }
}

/// The difference between two lists of one epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembersChange {
    pub epoch: Epoch,
    /// Number of the list that the change applies to; it applies as well to every list between that and `number`. 0: the empty list,
    /// which every node has.
    pub from: u64,
    /// Number of the list after the change.
    pub number: u64,
    pub placement: PlacementVersion,
    /// Members that are new or have changed.
    pub members: Vec<Member>,
    /// Lives that are no longer listed.
    pub dropped: Vec<NodeLife>,
}

impl Member {
    /// Returns the member's place in the list, which also identifies the member.
    #[must_use]
    pub fn place(&self) -> (bool, &NodeLife) {
        (self.standing == Standing::Over, &self.life)
    }
}

impl Members {
    /// Returns the difference to `before`, an older list. Linear in both.
    #[must_use]
    pub fn since(&self, before: &Self) -> MembersChange {
        // The coordinator cannot know which nodes have a list of another epoch.
        let is_known = before.epoch == self.epoch;
        let mut known: BTreeMap<&NodeLife, &Member> =
            before.members.iter().filter(|_| is_known).map(|member| (&member.life, member)).collect();
        let other: Vec<&Member> =
            self.members.iter().filter(|member| known.remove(&member.life) != Some(*member)).collect();
        MembersChange {
            epoch: self.epoch,
            from: if is_known { before.number } else { 0 },
            number: self.number,
            placement: self.placement,
            members: other.into_iter().cloned().collect(),
            dropped: known.into_keys().cloned().collect(),
        }
    }

    /// Returns the change for all nodes that have a list of this epoch with a number from `from` on. `lives` are those that have changed
    /// since.
    #[must_use]
    pub fn touched(&self, from: u64, mut lives: BTreeSet<NodeLife>) -> MembersChange {
        let members = self.members.iter().filter(|member| lives.remove(&member.life)).cloned().collect();
        let dropped = lives.into_iter().collect();
        MembersChange {
            epoch: self.epoch,
            from,
            number: self.number,
            placement: self.placement,
            members,
            dropped,
        }
    }

    /// Applies a change to the list; returns false if the change is already known or older. If the change follows a later list than this
    /// one, the list stays as it is; the caller has to ask for the whole list.
    ///
    /// # Errors
    /// [`Missed`].
    pub fn follow(&mut self, change: MembersChange) -> Result<bool, Missed> {
        if (change.epoch, change.number) <= (self.epoch, self.number) {
            return Ok(false);
        }
        let MembersChange { epoch, from, number, placement, members, dropped } = change;
        if from != 0 && (epoch != self.epoch || from > self.number) {
            return Err(Missed { from, known: self.number });
        }
        if from == 0 {
            self.members.clear();
        }
        let other: BTreeSet<&NodeLife> = members.iter().map(|member| &member.life).chain(&dropped).collect();
        self.members.retain(|member| !other.contains(&member.life));
        self.members.extend(members);
        self.members.sort_by(|one, other| one.place().cmp(&other.place()));
        (self.epoch, self.number, self.placement) = (epoch, number, placement);
        Ok(true)
    }
}

/// A whole list as bytes, encoded once for the thousands that join at one moment; each of them costs only a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedMembers(Arc<[u8]>);

impl EncodedMembers {
    /// Encodes the list. Costs about a microsecond for each member.
    ///
    /// # Errors
    /// The list is larger than a message may be.
    pub fn of(members: &Members) -> Result<Self, WireError> {
        wire::encode(members).map(|bytes| Self(bytes.into()))
    }

    /// Decodes the list.
    ///
    /// # Errors
    /// As [`wire::decode`]'s.
    pub fn decode(&self) -> Result<Members, WireError> {
        wire::decode(&self.0)
    }
}

impl Serialize for EncodedMembers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for EncodedMembers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = EncodedMembers;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an encoded list of members")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<EncodedMembers, E> {
                Ok(EncodedMembers(bytes.into()))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

/// The error for a change of a list that is not known here: an earlier change did not arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a change of the members' list {from}, and {known} is the one that is known; the whole is asked for")]
pub struct Missed {
    pub from: u64,
    pub known: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Incarnation;
    use proptest::prelude::*;

    /// Generates a member out of few, which differ in all that changes.
    fn any_member() -> impl Strategy<Value = Member> {
        let standing = prop_oneof![Just(Standing::Alive), Just(Standing::Suspect), Just(Standing::Over)];
        (0_u8..6, 1_u64..3, standing, any::<bool>()).prop_map(|(node, incarnation, standing, gone)| Member {
            life: NodeLife {
                node: format!("n{node}").parse().unwrap(),
                incarnation: Incarnation(u64::from(node) * 10 + incarnation),
            },
            address: String::new(),
            labels: BTreeMap::new(),
            gone,
            partners: Vec::new(),
            standing,
            since_ms: 0,
            why: String::new(),
        })
    }

    fn any_list(number: u64) -> impl Strategy<Value = Members> {
        prop::collection::vec(any_member(), 0..8).prop_map(move |mut members| {
            members.sort_by(|one, other| one.life.cmp(&other.life));
            members.dedup_by(|one, other| one.life == other.life);
            members.sort_by(|one, other| one.place().cmp(&other.place()));
            Members { epoch: Epoch(2), number, members, ..Members::default() }
        })
    }

    proptest! {
        #[test]
        fn who_follows_every_change_has_the_list(
            lists in (any_list(1), any_list(2), any_list(3)), missed in any::<bool>(),
        ) {
            let (first, second, third) = lists;
            let mut known = Members { epoch: Epoch(1), number: 9, ..third.clone() };
            prop_assert_eq!(known.follow(first.since(&known.clone())), Ok(true), "of another epoch everything is told");
            prop_assert_eq!(&known, &first);
            let mut joined_between = second.clone();
            let changes = [second.since(&first), third.since(&second)];
            let lives = changes.into_iter().flat_map(|change| {
                change.members.into_iter().map(|member| member.life).chain(change.dropped)
            });
            prop_assert_eq!(joined_between.follow(third.touched(1, lives.collect())), Ok(true));
            prop_assert_eq!(&joined_between, &third);
            if missed {
                prop_assert_eq!(known.follow(third.since(&second)), Err(Missed { from: 2, known: 1 }));
                prop_assert_eq!(&known, &first);
                prop_assert_eq!(known.follow(third.since(&first)), Ok(true));
            } else {
                prop_assert_eq!(known.follow(second.since(&first)), Ok(true));
                prop_assert_eq!(&known, &second);
                prop_assert_eq!(known.follow(third.since(&second)), Ok(true));
            }
            prop_assert_eq!(&known, &third);
            prop_assert_eq!(known.follow(second.since(&first)), Ok(false), "it is older");
            prop_assert_eq!(&known, &third);
        }
    }

    #[test]
    fn a_change_of_one_is_told_as_one() {
        let member = |node: u64| Member {
            life: NodeLife { node: format!("n{node:04}").parse().unwrap(), incarnation: Incarnation(node) },
            address: format!("10.0.{}.{}:7070", node / 256, node % 256),
            labels: BTreeMap::new(),
            gone: false,
            partners: vec!["n0001".parse().unwrap()],
            standing: Standing::Alive,
            since_ms: 0,
            why: String::new(),
        };
        let before = Members {
            epoch: Epoch(1),
            number: 5,
            members: (0..1000).map(member).collect(),
            ..Members::default()
        };
        let mut after = Members { number: 6, ..before.clone() };
        after.members[500].standing = Standing::Suspect;
        let change = after.since(&before);
        assert_eq!((change.members.len(), change.dropped.len()), (1, 0));
        let (all, one) = (wire::encode(&before).unwrap(), wire::encode(&change).unwrap());
        assert!(one.len() * 500 < all.len(), "{} bytes of {}", one.len(), all.len());
        let whole = EncodedMembers::of(&before).unwrap();
        let told = wire::encode(&whole).unwrap();
        assert!(told.len() < all.len() + 16, "{} bytes for {}", told.len(), all.len());
        let read: EncodedMembers = wire::decode(&told).unwrap();
        assert_eq!(read.decode().unwrap(), before);
    }
}
