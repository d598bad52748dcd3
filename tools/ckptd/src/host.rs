//! The mount's demands on the daemon: cold bytes, bytes to be verified, and the control files.
//!
//! Owns: the snapshots that `.tidemark/` serves, and waiting for the engine while a daemon that took over a mount is still
//! finding Tier-3. Does not own: fetching (engine), the directory itself (fuse).

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tidemark_engine::cluster::Cluster;
use tidemark_engine::node::{NotVerified, Shared, heal_at_open, verify_at_open};
use tidemark_fuse::Host;
use tidemark_namespace::{ColdFile, FsError, Namespace, NodeId};
use tidemark_protocol::report::path_text;

/// Limit of a call's wait for Tier-3 after a mount was taken over; later calls fail at once, as with any Tier-3 that is
/// away.
const ENGINE_PATIENCE: Duration = Duration::from_secs(60);

/// See the module's head.
#[derive(Debug)]
pub(crate) struct DaemonHost {
    namespace: Arc<Namespace>,
    threads: usize,
    engine: Mutex<Option<Arc<Shared>>>,
    begun: Condvar,
    runtime: tokio::runtime::Handle,
    files: Mutex<BTreeMap<String, Vec<u8>>>,
    cluster: OnceLock<Arc<Cluster>>,
}

impl DaemonHost {
    pub(crate) fn new(namespace: Arc<Namespace>, threads: usize, runtime: tokio::runtime::Handle) -> Self {
        let (engine, begun) = (Mutex::default(), Condvar::new());
        Self { namespace, threads, engine, begun, runtime, files: Mutex::default(), cluster: OnceLock::new() }
    }

    /// Enables fetching from now on.
    pub(crate) fn begin(&self, engine: Arc<Shared>) {
        *self.engine.lock().unwrap_or_else(PoisonError::into_inner) = Some(engine);
        self.begun.notify_all();
    }

    /// From now on other nodes are asked. Once, before the mount serves.
    pub(crate) fn join(&self, cluster: Arc<Cluster>) {
        assert!(self.cluster.set(cluster).is_ok(), "a node is of one cluster");
    }

    /// The engine, waited for within a bound.
    fn engine(&self) -> Result<Arc<Shared>, FsError> {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        let (engine, _) = self
            .begun
            .wait_timeout_while(engine, ENGINE_PATIENCE, |engine| engine.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        engine.clone().ok_or_else(|| {
            let waited_s = ENGINE_PATIENCE.as_secs();
            tracing::error!(
                waited_s,
                "a file needs Tier-3, which was not found since the daemon was restarted"
            );
            FsError::Io
        })
    }

    /// Replaces what one control file holds.
    pub(crate) fn publish(&self, name: &str, content: Vec<u8>) {
        self.files
            .lock()
            .expect("nothing panics while it holds the control files")
            .insert(name.to_owned(), content);
    }
}

impl Host for DaemonHost {
    fn fetch(&self, cold: ColdFile) -> Result<(), FsError> {
        let engine = self.engine()?;
        let path = engine.namespace.nodes().path_of(cold.node);
        let path = path.map_or_else(|| cold.file.to_string(), |path| path_text(&path));
        self.runtime.block_on(engine.restorer.restore(path.clone(), cold)).map_err(|error| {
            tracing::error!(%path, error = &error as &dyn std::error::Error, "a file could not be served");
            error.errno()
        })
    }

    fn verify(&self, node: NodeId) -> Result<(), FsError> {
        match verify_at_open(&self.namespace, node, self.threads) {
            Ok(()) => Ok(()),
            // Only what is bad needs another copy, and so Tier-3.
            Err(NotVerified::Bad(bad)) => self.runtime.block_on(heal_at_open(&self.engine()?, *bad)),
            Err(NotVerified::Unreadable(error)) => Err(error),
        }
    }

    fn cluster(&self) -> Option<&Arc<Cluster>> {
        self.cluster.get()
    }

    fn control_files(&self) -> Vec<String> {
        self.files.lock().expect("nothing panics while it holds the control files").keys().cloned().collect()
    }

    fn control_read(&self, name: &str) -> Option<Vec<u8>> {
        self.files.lock().expect("nothing panics while it holds the control files").get(name).cloned()
    }
}
