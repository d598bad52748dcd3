//! Symbolic links in the tree document.
//!
//! Owns: which of them Tier-3 is told, and which wait for what they name. Does not own: files that name a checkpoint
//! (`visibility::tracker`), when the document is written (`tree`).
//!
//! A job follows `last.ckpt` as it follows a tracker. So Tier-3 hears of a link no sooner than of the checkpoint that it names, and until
//! then it keeps what the link named before: after the loss of the node that one is there.

use crate::namespace::TreeSnapshot;
use crate::node::book::Book;
use crate::node::run::Engine;
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
        let links = snapshot.symlinks.iter().filter_map(|(node, target)| {
            let path = RelPath::new(node.path.clone()).ok().filter(|path| is_known(path))?;
            if named(&path, target).is_some_and(|named| self.is_on_its_way(&named)) {
                waits = true;
                return self.tree.told.links.get(&path).cloned();
            }
            let (uid, gid, mtime_ns) = (node.uid, node.gid, node.mtime_ns);
            Some(Symlink { path, target: RawText(target.clone()), uid, gid, mtime_ns })
        });
        (links.collect(), waits)
    }

    /// Whether a path is a checkpoint, or a file of one, of which Tier-3 has nothing yet and will.
    fn is_on_its_way(&self, path: &RelPath) -> bool {
        let is_there = |book: &&Book| book.candidate.is_some();
        let above = std::iter::successors(Some(path.clone()), RelPath::parent);
        let mut above = above.filter_map(|at| self.ledger.books.get(&CheckpointId::at(&at)?));
        let book = above.find(is_there).or_else(|| self.ledger.beside(path).find(|book| book.holds(path)));
        book.is_some_and(|book| self.first_comes(book).is_some())
    }
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
