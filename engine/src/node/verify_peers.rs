//! Reading the copies that other nodes keep, each of them whole.
//!
//! Owns: whose copies of a file are checked, and what was found of each. Does not own: the transfer (`restore::peer`), what a node
//! does whose bytes were bad (it must check again, `replicate::receive`).
//!
//! Only bytes that came from a node prove what it has: a node may acknowledge a copy and not have it.

use crate::node::Shared;
use crate::node::scrub::Target;
use crate::restore::peer::{PeerPlan, Suppliers, fetch_from_peers};
use std::sync::{Arc, Mutex, PoisonError};
use tidemark_namespace::ColdFile;
use tidemark_protocol::error::{ErrorKind, error_text};
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_tier1::Backing;
use tidemark_transport::{Address, Link};

/// Finding about one node's copy.
pub(super) struct PeerCopy {
    pub(super) node: String,
    pub(super) result: Result<(), PeerProblem>,
}

pub(super) enum PeerProblem {
    /// The bytes are not what was sealed.
    Bad(String),
    /// The copy could not be read.
    Away(String),
}

/// Checks the copies that other nodes should have of a file, as far as this node knows; the coordinator knows all. With `deep`,
/// each copy is read, which costs its bytes on the network and as much memory for a moment.
pub(super) async fn check_peers(shared: &Arc<Shared>, target: &Target, deep: bool) -> Vec<PeerCopy> {
    let (Some(cluster), Some(near)) = (shared.cluster.get(), shared.restorer.nearby.get()) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for keeper in cluster.keepers(target.file, target.seal) {
        let node = keeper.node.clone();
        let result = if deep { read(shared, target, keeper, near).await.map(drop) } else { Ok(()) };
        found.push(PeerCopy { node, result });
    }
    found
}

/// Returns the verified bytes of a file from the first node that has a good copy.
pub(super) async fn from_a_peer(shared: &Arc<Shared>, target: &Target) -> Option<(String, Arc<Backing>)> {
    let (cluster, near) = (shared.cluster.get()?, shared.restorer.nearby.get()?);
    for keeper in cluster.keepers(target.file, target.seal) {
        let node = keeper.node.clone();
        if let Ok(landing) = read(shared, target, keeper, near).await {
            return Some((node, landing));
        }
    }
    None
}

async fn read(
    shared: &Arc<Shared>,
    target: &Target,
    keeper: Address,
    near: &Arc<dyn Suppliers>,
) -> Result<Arc<Backing>, PeerProblem> {
    let landing = shared.namespace.room().backing_for_prefetch(target.size_bytes).map_err(|error| {
        let full = error.kind() == ErrorKind::NoSpace;
        let why = if full { "no memory to read it into: " } else { "" };
        PeerProblem::Away(format!("{why}{}", error_text(&error)))
    })?;
    let plan = PeerPlan {
        path: target.path.clone(),
        file: target.file,
        seal: target.seal,
        size_bytes: target.size_bytes,
        chunks: Arc::clone(&target.chunks),
    };
    let one = Arc::new(One { keeper, near: Arc::clone(near), bad: Mutex::default() });
    let suppliers: Arc<dyn Suppliers> = Arc::clone(&one) as _;
    let into = Arc::clone(&landing);
    let fetched = fetch_from_peers(&suppliers, plan, into, Arc::clone(&shared.metrics)).await;
    let bad = *one.bad.lock().unwrap_or_else(PoisonError::into_inner);
    fetched.map(|()| landing).map_err(|error| match bad {
        Some(_) => PeerProblem::Bad(error_text(&error)),
        None => PeerProblem::Away(error_text(&error)),
    })
}

/// Supplier that asks a single node.
#[derive(Debug)]
struct One {
    keeper: Address,
    near: Arc<dyn Suppliers>,
    /// A chunk from this node that was bad.
    bad: Mutex<Option<u64>>,
}

#[async_trait::async_trait]
impl Suppliers for One {
    async fn find(&self, cold: &ColdFile, _: &[Address]) -> ColdFile {
        cold.clone()
    }

    fn suppliers(&self, _: FileId, _: SealNumber) -> Vec<Address> {
        vec![self.keeper.clone()]
    }

    fn link(&self) -> Arc<dyn Link> {
        self.near.link()
    }

    fn is_bad(&self, node: &str, file: FileId, seal: SealNumber, chunk: u64) {
        *self.bad.lock().unwrap_or_else(PoisonError::into_inner) = Some(chunk);
        self.near.is_bad(node, file, seal, chunk);
    }
}
