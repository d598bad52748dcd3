//! The tree's nodes as they are published.
//!
//! Owns: the translation, with the fates of the processes that wrote. Does not own: the message (protocol), the tree.

use tidemark_namespace::{FileView, Namespace, OutgoingBody, OutgoingNode, WriterId, fate_of, object_of};
use tidemark_protocol::cluster::wire::{FileFacts, NodeKind, NodeState, WireFate, WriterFact};
use tidemark_protocol::evidence::{Fate, have_ended_well};

/// Returns a node's state for publication. Reads /proc for each process that wrote the node.
#[must_use]
pub fn state_of(namespace: &Namespace, node: OutgoingNode) -> NodeState {
    let kind = match node.body {
        OutgoingBody::Directory => NodeKind::Directory,
        OutgoingBody::Symlink(target) => NodeKind::Symlink { target },
        OutgoingBody::File(view) => NodeKind::File(Box::new(facts(namespace, &view))),
    };
    NodeState {
        path: node.path,
        attributes: node.attributes,
        attributes_ns: node.attributes_ns,
        other_names: node.other_names,
        kind,
    }
}

fn facts(namespace: &Namespace, view: &FileView) -> FileFacts {
    let cut = matches!(view.state, tidemark_namespace::FileState::Cut);
    let fates = view.writers.iter().map(|writer| fate_of(namespace, writer, cut).0);
    FileFacts {
        file: view.file,
        size_bytes: view.size_bytes,
        state: (&view.state).into(),
        seal: view.last_seal,
        opened_ns: view.opened_ns,
        closed_ns: view.closed_ns,
        published_ns: view.published_ns,
        vouched: view.renamed || view.renamed_cut && have_ended_well(fates),
        generation: view.generation,
        writers: view.writers.iter().map(|writer| writer_fact(namespace, writer, cut)).collect(),
        host: view.remote.as_ref().map_or(view.host, |remote| remote.host),
        object: view.object.as_ref().map(object_of),
    }
}

pub(super) fn writer_fact(namespace: &Namespace, writer: &WriterId, cut: bool) -> WriterFact {
    let (fate, failed_at_ns) = fate_of(namespace, writer, cut);
    WriterFact {
        session: writer.session.0.clone(),
        process: (writer.tgid, writer.start_time_ticks),
        environment_seen: writer.environment_seen,
        world_size: writer.world_size,
        rank: writer.rank,
        fate: match fate {
            Fate::Alive => WireFate::Alive,
            Fate::Exited => WireFate::Exited,
            Fate::Failed | Fate::Killed => WireFate::Killed,
            Fate::Ended | Fate::Gone => WireFate::Gone,
        },
        failed_at_ns,
    }
}
