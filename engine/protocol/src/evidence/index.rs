//! The content of a framework's index, in one form for all frameworks.
//!
//! Owns: the bounds on an index, the part of it that is kept, the errors that make it unusable. Does not own: the formats
//! (beside this file), the consequences for the checkpoint (`super`).
//!
//! Any user of the mount may write an index, and the daemon reads it: no part of an index costs more than its bound.

use crate::path::{PathProblem, RelPath};
use std::collections::BTreeMap;

/// Maximum number of bytes of an index that are read.
pub const MAX_INDEX_BYTES: usize = 256 << 20;

/// Maximum number of files that an index may name. A checkpoint of 100,000 ranks has a few each. Without this bound, an
/// index of the largest size with the shortest names would take gigabytes of the daemon's memory.
pub const MAX_INDEX_FILES: usize = 1 << 20;

/// The files that an index lists, relative to its directory, each with the exact size if the index gives it.
pub type Covered = BTreeMap<RelPath, Option<u64>>;

/// Why an index cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    #[error("the index has {bytes} bytes, and {MAX_INDEX_BYTES} are read at most")]
    TooLarge { bytes: usize },
    #[error("the index is not the JSON that it should be")]
    Json {
        #[source]
        source: serde_json::Error,
    },
    #[error("the pickle has {problem} at byte {at}")]
    Pickle { at: usize, problem: &'static str },
    #[error("the pickle has opcode {opcode:#04x} at byte {at}, which no checkpoint index has")]
    Opcode { at: usize, opcode: u8 },
    #[error("the index gives an extent of {length} bytes at {offset}")]
    Extent { offset: u64, length: u64 },
    #[error("the index names a file that cannot be: {problem}")]
    Path { problem: PathProblem },
    #[error("the index names no file")]
    Empty,
    #[error("the index names more than {MAX_INDEX_FILES} files")]
    Files,
}

/// The files that an index in JSON names; each name is kept when it is read, and nothing else of the index.
#[derive(Debug, Default)]
pub(super) struct NamedFiles {
    covered: Covered,
    problem: Option<IndexError>,
}

impl NamedFiles {
    pub(super) fn note(&mut self, name: &str) {
        match RelPath::new(name.as_bytes()) {
            _ if self.problem.is_some() => {}
            Ok(path) => {
                self.covered.insert(path, None);
                if self.covered.len() > MAX_INDEX_FILES {
                    self.problem = Some(IndexError::Files);
                    self.covered.clear();
                }
            }
            Err(problem) => self.problem = Some(IndexError::Path { problem }),
        }
    }

    pub(super) fn into_covered(self) -> Result<Covered, IndexError> {
        match self.problem {
            Some(problem) => Err(problem),
            None if self.covered.is_empty() => Err(IndexError::Empty),
            None => Ok(self.covered),
        }
    }
}
