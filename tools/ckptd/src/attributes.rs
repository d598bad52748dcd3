//! `user.tidemark.*` of the mount, asked of the node loop.
//!
//! Owns: waiting for the loop, within a bound. Does not own: what the attributes say (engine), their threads (fuse).

use crate::api::Daemon;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tidemark_namespace::{FsError, NodeId, XattrSource};

/// The loop answers between two of its events, within milliseconds; a program must not wait for one that hangs.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Holds the daemon weakly: the namespace holds this, and must not keep alive what ends before it.
#[derive(Debug)]
pub(crate) struct Attributes {
    daemon: Weak<Daemon>,
    runtime: tokio::runtime::Handle,
}

impl Attributes {
    pub(crate) fn new(daemon: &Arc<Daemon>, runtime: tokio::runtime::Handle) -> Self {
        Self { daemon: Arc::downgrade(daemon), runtime }
    }
}

impl XattrSource for Attributes {
    fn get(&self, node: NodeId, name: &[u8]) -> Result<Option<Vec<u8>>, FsError> {
        let Some(daemon) = self.daemon.upgrade() else { return Ok(None) };
        let asked = daemon.node.attribute(node, name.to_vec());
        match self.runtime.block_on(async { tokio::time::timeout(ANSWER_LIMIT, asked).await }) {
            Ok(Some(value)) => Ok(value),
            // The daemon is ending, or its loop is not heard of.
            Ok(None) | Err(_) => Err(FsError::Io),
        }
    }

    fn set(&self, _: NodeId, _: &[u8], _: &[u8]) -> Result<(), FsError> {
        Err(FsError::NotPermitted)
    }
}
