//! The members, as all nodes are told of them.
//!
//! Owns: the list, and the difference between two lists, so that a change in a cluster of thousands is told in a few hundred bytes.
//! Does not own: who is one and why (`membership`), partners (`placement`), telling.

use super::wire::{self, WireError};
use crate::id::{Epoch, NodeName};
use crate::key::NodeLife;
use crate::placement::PlacementVersion;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// Who is a member.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    pub epoch: Epoch,
    /// Rises with each change within an epoch.
    pub number: u64,
    /// By which the partners were chosen.
    pub placement: PlacementVersion,
    /// By [`Member::place`]: by name, and after them the last lives that are over, so that what they wrote has a name.
    pub members: Vec<Member>,
}

/// One member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub life: NodeLife,
    pub address: String,
    pub labels: BTreeMap<String, String>,
    /// Nothing is expected from it: it does not answer, its copies cannot be had, its processes have ended.
    pub gone: bool,
    /// Who keeps copies of its files.
    pub partners: Vec<NodeName>,
    pub standing: Standing,
    /// Since when it stands so, by the coordinator's wall clock, for people; 0 for one that lives.
    pub since_ms: i64,
    /// Why, in words, at most [`WHY_BYTES_MAX`](super::wire::WHY_BYTES_MAX); empty for one that lives.
    pub why: String,
}

/// What the coordinator makes of a node; `membership` has the reasons.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// A member of before that has not come yet.
    Awaited,
    #[default]
    Alive,
    Suspect,
    /// Others hear it, and the coordinator does not.
    CutOff,
    Gone,
    /// No member any more.
    Over,
}

impl Standing {
    /// As it is written for people.
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

/// What became another between two lists of one epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembersChange {
    pub epoch: Epoch,
    /// The list that it is a change of, and of all between that and `number`; 0 for one without members, which everybody has.
    pub from: u64,
    /// Of the list after it.
    pub number: u64,
    pub placement: PlacementVersion,
    /// New, or not as they were.
    pub members: Vec<Member>,
    /// No longer listed.
    pub dropped: Vec<NodeLife>,
}

impl Member {
    /// Its place in the list, which is also what tells it from all others.
    #[must_use]
    pub fn place(&self) -> (bool, &NodeLife) {
        (self.standing == Standing::Over, &self.life)
    }
}

impl Members {
    /// What became another since `before`, an older list. Linear in both.
    #[must_use]
    pub fn since(&self, before: &Self) -> MembersChange {
        // Of another epoch's list nobody can be sure who has it.
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

    /// What is now of `lives`, for all who have a list of this epoch from number `from` on: `lives` are those that became another since.
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

    /// Becomes the list after a change; nothing when that is known here, or older. A change of a later list than this one leaves it as
    /// it is, and the whole list is to be asked for.
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

/// A whole list as bytes: made once for the thousands that join at one moment, whom it costs a copy then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedMembers(Arc<[u8]>);

impl EncodedMembers {
    /// Costs about a microsecond for each member.
    ///
    /// # Errors
    /// The list is larger than a message may be.
    pub fn of(members: &Members) -> Result<Self, WireError> {
        wire::encode(members).map(|bytes| Self(bytes.into()))
    }

    /// The list.
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

/// A change of a list that is not known here: one before it did not arrive.
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

    /// One member of few, which differ in what changes.
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
