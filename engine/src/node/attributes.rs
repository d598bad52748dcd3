//! `user.tidemark.*`: extended attributes by which a program can ask about a name without a command.
//!
//! Owns: the attributes' names and values. Does not own: the answers of `ls` (`answer`), hiding the attributes from lists
//! (namespace), waiting for an answer (the daemon).

use crate::node::damage::BadCopies;
use crate::node::inventory::Inventory;
use crate::node::run::{Engine, Node};
use crate::replicate::Replicator;
use std::sync::Arc;
use tidemark_namespace::{FileState, FileView, NodeId};

const PREFIX: &[u8] = b"user.tidemark.";

impl Node {
    /// Returns the value of attribute `name` (whole, with its prefix) of a node of the namespace. `None` inside: the node has no such
    /// attribute.
    pub async fn attribute(&self, node: NodeId, name: Vec<u8>) -> Option<Option<Vec<u8>>> {
        self.ask(move |engine| XattrAnswers { engine }.attribute(node, &name)).await
    }
}

/// The answers to `getxattr` of `user.tidemark.*`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct XattrAnswers<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> XattrAnswers<'a> {
    /// Whether another node has the sealed bytes in memory, as far as this node was notified.
    fn is_at_peer(self, view: &FileView) -> bool {
        let FileState::Sealed { seal, .. } = view.state else { return false };
        let acknowledged = |replicator: &Arc<Replicator>| !replicator.holders(view.file, seal).is_empty();
        view.remote.as_ref().is_some_and(|remote| remote.host)
            || self.engine.shared.replicator.get().is_some_and(acknowledged)
            || self.engine.shared.is_copied(view.file, seal)
    }

    fn attribute(self, node: NodeId, name: &[u8]) -> Option<Vec<u8>> {
        let view = self.engine.shared.namespace.nodes().view(node);
        match name.strip_prefix(PREFIX)? {
            b"crc64nvme" => match view?.state {
                FileState::Sealed { crc, .. } => Some(crc.to_string().into_bytes()),
                FileState::Open { .. } | FileState::Closed | FileState::Cut | FileState::Mapped => None,
            },
            b"copies" => {
                let view = view?;
                let places = [
                    ("host", view.host && !BadCopies { engine: self.engine }.is_bad_host(&view)),
                    ("peer", self.is_at_peer(&view)),
                    ("object", view.object.is_some()),
                ];
                let held: Vec<_> =
                    places.into_iter().filter(|(_, held)| *held).map(|(place, _)| place).collect();
                Some(held.join(",").into_bytes())
            }
            b"checkpoint" => {
                let path = self.engine.shared.namespace.nodes().path_of(node)?;
                Some(self.engine.by_path().find_at(&path)?.path())
            }
            b"state" => {
                let path = self.engine.shared.namespace.nodes().path_of(node)?;
                let state = match self.engine.by_path().find_at(&path) {
                    Some(book) => Inventory { engine: self.engine }.standing_row(book)?.state.word(),
                    None => view.map(|_| "loose")?,
                };
                Some(state.as_bytes().to_vec())
            }
            _ => None,
        }
    }
}
