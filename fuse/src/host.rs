//! What a mount needs from the daemon besides the namespace.
//!
//! Owns: the trait. Does not own: any implementation (the daemon's node has the real one).

use std::sync::Arc;
use tidemark_engine::cluster::Cluster;
use tidemark_namespace::{ColdFile, FsError, NodeId};

/// Answers for the daemon. All methods may be called from several threads at once.
pub trait Host: Send + Sync + 'static {
    /// Brings a file whose bytes are elsewhere into Tier-1, verified, and tells the namespace. Blocks until
    /// that is done; called on a restore thread only, never on one that answers requests.
    fn fetch(&self, cold: ColdFile) -> Result<(), FsError>;

    /// Looks at sealed bytes that lay in Tier-1 while no daemon looked after them, and replaces bad ones. Blocks; called on
    /// a worker thread only.
    fn verify(&self, node: NodeId) -> Result<(), FsError>;

    /// The other nodes, of which some may have to be asked before a name is answered for. None where there are none.
    fn cluster(&self) -> Option<&Arc<Cluster>> {
        None
    }

    /// Names of the files in `/ckpt/.tidemark/`. Must not block: called while a request waits.
    fn control_files(&self) -> Vec<String>;

    /// The present content of one of them, `None` for a name that is not there. Must not block.
    fn control_read(&self, name: &str) -> Option<Vec<u8>>;
}
