//! Counts of names by the copies that they have.
//!
//! Owns: the counts. Does not own: the names (`ledger`).

use tidemark_namespace::FileView;

/// Counts of names by their copies, updated as names come and go, because `status` is written five times a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CopyCounts {
    pub(crate) host_files: u64,
    pub(crate) object_files: u64,
    pub(crate) object_bytes: u64,
    /// Names whose bytes are in this node's memory and not in Tier-3.
    pub(crate) unsaved_files: u64,
    pub(crate) unsaved_bytes: u64,
    /// Names whose bytes are in this node's memory and not sealed: no other node has a copy.
    pub(crate) unsealed_files: u64,
    pub(crate) unsealed_bytes: u64,
}

impl CopyCounts {
    fn of(view: &FileView) -> Self {
        // If a file is being written again, the noted object holds its former bytes.
        let object = view.object.is_some() && view.sealed().is_some();
        let unsaved = view.host && !object;
        let unsealed = view.host && view.sealed().is_none();
        Self {
            unsaved_files: u64::from(unsaved),
            unsaved_bytes: if unsaved { view.size_bytes } else { 0 },
            unsealed_files: u64::from(unsealed),
            unsealed_bytes: if unsealed { view.size_bytes } else { 0 },
            host_files: u64::from(view.host),
            object_files: u64::from(object),
            object_bytes: if object { view.size_bytes } else { 0 },
        }
    }

    pub(crate) fn add(&mut self, view: &FileView) {
        let more = Self::of(view);
        self.host_files += more.host_files;
        self.object_files += more.object_files;
        self.object_bytes += more.object_bytes;
        self.unsaved_files += more.unsaved_files;
        self.unsaved_bytes += more.unsaved_bytes;
        self.unsealed_files += more.unsealed_files;
        self.unsealed_bytes += more.unsealed_bytes;
    }

    pub(crate) fn take(&mut self, view: &FileView) {
        let less = Self::of(view);
        self.host_files -= less.host_files;
        self.object_files -= less.object_files;
        self.object_bytes -= less.object_bytes;
        self.unsaved_files -= less.unsaved_files;
        self.unsaved_bytes -= less.unsaved_bytes;
        self.unsealed_files -= less.unsealed_files;
        self.unsealed_bytes -= less.unsealed_bytes;
    }
}
