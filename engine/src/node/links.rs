//! Symbolic links and special files in the tree document.
//!
//! Owns: which of them Tier-3 is told, and which wait for what they name. Does not own: files that name a checkpoint
//! (`visibility::tracker`), when the document is written (`tree`).
//!
//! A job follows `last.ckpt` as it follows a tracker. So Tier-3 hears of a link no sooner than of the checkpoint that it names, and until
//! then it keeps what the link named before: after the loss of the node that one is there.

use crate::node::book::Book;
use crate::node::run::Engine;
use crate::node::tree::attributes_of;
use std::collections::BTreeMap;
use tidemark_namespace::{SnapshotNode, Special, TreeSnapshot};
use tidemark_protocol::documents::{SpecialFile, SpecialKind};
use tidemark_protocol::manifest::Symlink;
use tidemark_protocol::path::{RawText, RelPath};
use tidemark_protocol::recognise::CheckpointId;

/// The path below the mount that a link leads to as its text says. An absolute one is none: where the mount is, its user chose.
fn named(link: &RelPath, target: &[u8]) -> Option<RelPath> {
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

impl Engine {
    /// The links that Tier-3 is told of, of those in directories that it knows; whether one of them waits for what it names.
    pub(crate) fn links_to_tell(
        &self,
        snapshot: &TreeSnapshot,
        is_known: impl Fn(&RelPath) -> bool,
    ) -> (Vec<Symlink>, bool) {
        let mut waits = false;
        let mut comes: BTreeMap<&CheckpointId, bool> = BTreeMap::new();
        let links = snapshot.symlinks.iter().filter_map(|(node, target)| {
            let path = RelPath::new(node.path.clone()).ok().filter(|path| is_known(path))?;
            let told = self.tree.told.links.get(&path);
            // There may be very many, and nearly all were told.
            let is_new = told.is_none_or(|told| told.target.0 != *target);
            let book =
                if is_new { named(&path, target).and_then(|named| self.checkpoint_at(&named)) } else { None };
            if let Some(book) = book
                && *comes.entry(&book.id).or_insert_with(|| self.first_comes(book).is_some())
            {
                waits = true;
                return told.cloned();
            }
            let (uid, gid, mtime_ns) = (node.uid, node.gid, node.mtime_ns);
            Some(Symlink { path, target: RawText(target.clone()), uid, gid, mtime_ns })
        });
        (links.collect(), waits)
    }

    /// The special files that Tier-3 is told of. On several nodes none is: their other ends live on one of them.
    pub(crate) fn specials_to_tell(
        &self,
        snapshot: &TreeSnapshot,
        is_known: impl Fn(&RelPath) -> bool,
    ) -> Vec<SpecialFile> {
        let alone = self.shared.cluster.get().is_none();
        let specials = snapshot.specials.iter().filter(|_| alone).filter_map(|(node, special)| {
            let path = RelPath::new(node.path.clone()).ok().filter(|path| is_known(path))?;
            Some(special_file(path, node, *special))
        });
        specials.collect()
    }

    /// The checkpoint that a path is, or lies in.
    fn checkpoint_at(&self, path: &RelPath) -> Option<&Book> {
        let above = std::iter::successors(Some(path.clone()), RelPath::parent);
        let mut books = above.filter_map(|at| self.ledger.books.get(&CheckpointId::at(&at)?));
        books.find(|book| book.candidate.is_some())
    }
}

fn special_file(path: RelPath, node: &SnapshotNode, special: Special) -> SpecialFile {
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
