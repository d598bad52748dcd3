//! The end of a daemon, and the state that its successor finds.
//!
//! Owns: both ends, with the kernel's session and without. Does not own: the comparison afterwards (`compare`).

use super::{Content, O_RDONLY, World};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_namespace::{Namespace, OpenOutcome};
use tidemark_tier1::Backing;

impl World {
    /// Kills the daemon while the kernel's session goes on. The successor has every handle as it was.
    pub(super) fn take_over(&mut self) {
        let mut backings = self.backings();
        self.pins.clear();
        let mut grown = BTreeSet::new();
        for open in &self.handles {
            backings.insert(open.file.backing.number(), Arc::clone(&open.file.backing));
            // A successor finds backing files by their numbers and begins their growth itself.
            if open.file.writable && grown.insert(open.file.backing.number()) {
                open.file.backing.end_growth();
            }
        }
        self.namespace =
            Namespace::recover(self.settings.clone(), Arc::clone(&self.tier1), true, &mut |number| {
                backings.get(&number).cloned()
            })
            .unwrap();
        assert_eq!(self.namespace.handles().open_files().len(), self.handles.len());
        for open in &mut self.handles {
            let now = self.namespace.handles().handle(open.file.fh).expect("a handle outlives the daemon");
            let was = (open.file.node, open.file.writable, open.file.backing.number());
            assert_eq!((now.node, now.writable, now.backing.number()), was);
            open.file = now;
        }
    }

    /// Kills the daemon with all handles. The successor has the journal and the backing files.
    pub(super) fn crash(&mut self) {
        let backings = self.backings();
        self.pins.clear();
        let mut grown = BTreeSet::new();
        for open in std::mem::take(&mut self.handles) {
            if open.file.writable {
                // The kernel's handles die with a real daemon's process. Here, handles are the backing file's writers.
                if grown.insert(open.file.backing.number()) {
                    open.file.backing.end_growth();
                }
                self.reference.node(open.id).cut = true;
                self.reference.node(open.id).mtime_ns = None;
            }
        }
        self.namespace =
            Namespace::recover(self.settings.clone(), Arc::clone(&self.tier1), false, &mut |number| {
                backings.get(&number).cloned()
            })
            .unwrap();
    }

    /// Returns the backing files of all files that have a name.
    fn backings(&self) -> BTreeMap<u64, Arc<Backing>> {
        let mut backings: BTreeMap<u64, Arc<Backing>> = BTreeMap::new();
        for (path, id) in self.reference.paths() {
            if matches!(self.reference.nodes[&id].content, Content::File(_))
                && !self.reference.nodes[&id].cold
            {
                let node = self.namespace.nodes().node_at(&path).unwrap();
                self.verify(node);
                let OpenOutcome::Ready(open) = self.namespace.open(&self.caller(), node, O_RDONLY).unwrap()
                else {
                    panic!("cold, though its bytes should be here");
                };
                self.namespace.handles().release(open.fh).unwrap();
                backings.insert(open.backing.number(), open.backing);
            }
        }
        backings
    }
}
