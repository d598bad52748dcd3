//! What the mount needs from the daemon: cold bytes, and the control files.
//!
//! Owns: the snapshots that `.tidemark/` serves. Does not own: fetching (engine), the directory itself (fuse).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tidemark_engine::namespace::{ColdFile, FsError};
use tidemark_engine::node::{Shared, restore};
use tidemark_fuse::Host;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct DaemonHost {
    shared: Arc<Shared>,
    runtime: tokio::runtime::Handle,
    files: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl DaemonHost {
    pub(crate) fn new(shared: Arc<Shared>, runtime: tokio::runtime::Handle) -> Self {
        Self { shared, runtime, files: Mutex::default() }
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
        let path = self.shared.namespace.path_of(cold.node);
        let path =
            path.map_or_else(|| cold.file.to_string(), |path| String::from_utf8_lossy(&path).into_owned());
        self.runtime.block_on(restore(&self.shared, path.clone(), cold)).map_err(|error| {
            tracing::error!(%path, error = &error as &dyn std::error::Error, "a file could not be served");
            error.errno()
        })
    }

    fn control_files(&self) -> Vec<String> {
        self.files.lock().expect("nothing panics while it holds the control files").keys().cloned().collect()
    }

    fn control_read(&self, name: &str) -> Option<Vec<u8>> {
        self.files.lock().expect("nothing panics while it holds the control files").get(name).cloned()
    }
}
