//! What every bench shares: how two things are compared fairly, and the things that are compared.
//!
//! Owns: the options, the order of samples, medians, the RESULT lines, warm memory, baselines, and starting a
//! daemon to measure. Does not own: what a stage measures (one file per stage beside this folder) or the
//! targets (RESULTS-EARLIER.md).

pub mod compare;
pub mod crowd;
pub mod daemon;
pub mod direct_fuse;
pub mod files;
pub mod footprint;
pub mod memory;
pub mod nodes;
pub mod options;
pub mod python;
pub mod rivals;
pub mod s3;
pub mod simulated;

pub use compare::Bench;
pub use daemon::Mount;
pub use footprint::Footprint;
pub use nodes::Nodes;
pub use s3::S3;
