//! Symbolic links and special files in the tree document.
//!
//! Owns: which of them are published to Tier-3, and which wait for what they name. Does not own: files that name a checkpoint
//! (`visibility::tracker`), when the document is written (`tree`).
//!
//! A job follows `last.ckpt` as it follows a tracker. So a link is published no sooner than the checkpoint that it names. Until
//! then Tier-3 keeps what the link named before: after the loss of the node that checkpoint is there.

use crate::node::tree_now::attributes_of;
use tidemark_namespace::{SnapshotNode, Special};
use tidemark_protocol::documents::{SpecialFile, SpecialKind};
use tidemark_protocol::path::RelPath;

/// Returns the path below the mount to which the text of a link leads. An absolute link has none, since the user chose where the
/// mount is.
pub(crate) fn named(link: &RelPath, target: &[u8]) -> Option<RelPath> {
    if target.first() == Some(&b'/') {
        return None;
    }
    let mut at: Vec<&[u8]> = link.components().collect();
    at.pop();
    for component in target.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => drop(at.pop()?),
            name => at.push(name),
        }
    }
    RelPath::new(at.join(&b'/')).ok()
}

pub(crate) fn special_file(path: RelPath, node: &SnapshotNode, special: Special) -> SpecialFile {
    let (kind, device) = match special {
        Special::Pipe => (SpecialKind::Pipe, 0),
        Special::Socket => (SpecialKind::Socket, 0),
        Special::CharacterDevice(device) => (SpecialKind::CharacterDevice, device),
        Special::BlockDevice(device) => (SpecialKind::BlockDevice, device),
    };
    SpecialFile { path, kind, device, attributes: attributes_of(node) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_where_its_text_says() {
        let of = |link: &str, target: &str| {
            named(&RelPath::new(link).unwrap(), target.as_bytes()).map(|path| path.to_string())
        };
        assert_eq!(of("run/last.ckpt", "step=4.ckpt").as_deref(), Some("run/step=4.ckpt"));
        assert_eq!(of("last", "./run//a/").as_deref(), Some("run/a"));
        assert_eq!(of("run/v/last", "../../other/b").as_deref(), Some("other/b"));
        assert_eq!(of("run/last", "../../b"), None, "it leads out of the mount");
        assert_eq!(of("run/last", "/ckpt/run/a"), None);
        assert_eq!(of("last", "."), None, "the mount is no checkpoint");
    }
}
