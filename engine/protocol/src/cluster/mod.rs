//! The rules of one tree over many nodes: how nodes publish names, and which node may change a directory without
//! asking.
//!
//! | file | owns |
//! |---|---|
//! | `wire` | the words between a node and the coordinator |
//! | `operation` | an operation on a name |
//! | `carried` | the names of an older document, after later operations |
//! | `kept` | the catalog as an etcd keeps it |
//! | `leases` | which node may answer for a directory |
//! | `moves` | directories that are about to move |
//! | `members` | the list of members, and its changes |
//! | `readers` | which node reads Tier-3 for the others |
//! | `clocks` | one node's times on another's clock |
//!
//! Does not own: the tree itself (each node's namespace; the coordinator's is the catalog), the links, membership. The
//! argument: `engine/design/0018-one-tree.md`.

pub mod carried;
pub mod clocks;
pub mod kept;
pub mod leases;
pub mod members;
pub mod moves;
mod operation;
pub mod readers;
pub mod wire;
