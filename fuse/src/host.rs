//! The interface that a mount needs from the daemon besides the namespace.
//!
//! Owns: the trait. Does not own: any implementation (the daemon's node has the real one).

use std::sync::Arc;
use tidemark_engine::cluster::Cluster;
use tidemark_namespace::{ColdFile, FsError, NodeId};

/// The daemon's side of a mount. All methods may be called from several threads at once.
pub trait Host: Send + Sync + 'static {
    /// Fetches a file whose bytes are elsewhere into Tier-1, verified, and notifies the namespace. Blocks until that is done; called on a
    /// restore thread only, never on one that answers requests.
    fn fetch(&self, cold: ColdFile) -> Result<(), FsError>;

    /// Verifies sealed bytes that lay in Tier-1 while no daemon ran, and replaces bad ones. Blocks; called on a worker thread only.
    fn verify(&self, node: NodeId) -> Result<(), FsError>;

    /// Returns the cluster, some of whose nodes may have to be asked before a call on a name is answered; `None` without other nodes.
    fn cluster(&self) -> Option<&Arc<Cluster>> {
        None
    }

    /// Lists the names of the files in `/ckpt/.tidemark/`. Must not block: called while a request waits.
    fn control_files(&self) -> Vec<String>;

    /// Returns the present content of one of them, `None` for an unknown name. Must not block.
    fn control_read(&self, name: &str) -> Option<Vec<u8>>;
}
