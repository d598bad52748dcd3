//! Code shared by all benches: fair comparisons, and the things that are compared.
//!
//! Owns: the choice of a bench, its options, the order of samples, medians, the RESULT lines, warm memory, baselines, and starting a daemon
//! to measure. Does not own: the measurement of each bench (one file each beside this folder) or the targets (RESULTS-EARLIER.md).

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
pub mod stages;

pub use compare::Bench;
pub use daemon::Mount;
pub use footprint::Footprint;
pub use nodes::Nodes;
pub use s3::S3;
