//! Looks at removed files outside checkpoints, as `undelete` would bring them back.
//!
//! Owns: which of them, and what their sidecars say. Does not own: which generation comes back (`protocol::loose`), the bytes (`verify`).

use crate::node::answer::{Listed, stored_target};
use crate::node::run::Node;
use crate::node::verify_scope::VerifyScope;
use crate::restore::locate::FormatProblem;
use crate::save::generations::{self, GiveUpError};
use futures::stream;
use futures::stream::StreamExt;
use std::collections::{BTreeMap, BTreeSet};
use tidemark_namespace::ObjectCopy;
use tidemark_protocol::error::error_text;
use tidemark_protocol::loose;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{BrokenInvariant, Unrecoverable, Verify};

/// Names examined at once, each a listing and the reads of its sidecars: hides the round trip.
const NAMES_IN_FLIGHT: usize = 8;

/// Lists what `undelete` would bring back at or below `place`. Unreadable parts are added to `verify`. Costs a listing for
/// each removed name, and a read of each of its sidecars.
pub(super) async fn removed_stored(node: &Node, place: &[u8], verify: &mut Verify) -> Option<Vec<Listed>> {
    let below = place.to_vec();
    let removed = node.ask(move |engine| VerifyScope { engine }.removed_below(&below)).await?;
    let drain = &node.shared().drain;
    let reads = removed.into_iter().map(|(path, newest)| async move {
        let found = generations::read_all(drain, &path, newest).await;
        (path, found)
    });
    let mut reads = stream::iter(reads).buffer_unordered(NAMES_IN_FLIGHT);
    let mut stored = Vec::new();
    while let Some((path, found)) = reads.next().await {
        let (found, unreadable) = match found {
            Ok(found) => found,
            Err(error) => {
                verify.away = true;
                let what = error_text(&error);
                verify.unchecked.push(Unrecoverable { path: path.to_string(), what });
                continue;
            }
        };
        let unreadable = unreadable.filter(|why| !is_given_up(why));
        verify.broken.extend(unreadable.map(|why| not_described(&path, &why)));
        let held: Vec<_> = found.sidecars.iter().map(generations::held).collect();
        let wanted = loose::wanted(&held);
        let sidecar = found.sidecars.iter().find(|sidecar| Some(sidecar.generation) == wanted);
        stored.extend(sidecar.map(|sidecar| Listed {
            target: stored_target(&sidecar.file, ObjectCopy::of(&sidecar.file)),
            checkpoint: None,
            bad: None,
            suspects: BTreeSet::new(),
        }));
    }
    Some(stored)
}

/// Whether retention removed it since it was listed.
fn is_given_up(why: &GiveUpError) -> bool {
    matches!(why, GiveUpError::Unreadable { why: FormatProblem::Missing, .. })
}

fn not_described(path: &RelPath, why: &GiveUpError) -> BrokenInvariant {
    BrokenInvariant {
        path: path.to_string(),
        invariant: "a_removed_file_outside_checkpoints_has_its_sidecars".to_owned(),
        what: error_text(why),
    }
}

/// Adds to `targets` what they lack of `more`, and the further objects of what they have.
pub(super) fn add_stored(targets: &mut Vec<Listed>, more: Vec<Listed>) {
    let of = |listed: &Listed| (listed.target.file, listed.target.seal);
    let known: BTreeMap<_, _> =
        targets.iter().enumerate().map(|(index, listed)| (of(listed), index)).collect();
    for listed in more {
        match known.get(&of(&listed)) {
            Some(index) => {
                let target = &mut targets[*index].target;
                listed.target.objects().for_each(|object| target.add_object(object.clone()));
            }
            None => targets.push(listed),
        }
    }
}
