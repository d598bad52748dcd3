//! Tools that the suites share: real daemons, the Python environment, and the abilities of this machine.
//!
//! Owns: processes and temporary directories of tests. Does not own: the expectations, which each suite
//! states.

pub mod audit;
pub mod campaign;
pub mod cgroup;
pub mod cloud;
pub mod daemon;
pub mod etcd;
mod fork_server;
pub mod machine;
pub mod moto;
pub mod net;
pub mod process;
pub mod python;
pub mod s3;
pub mod tier3;
