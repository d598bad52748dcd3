//! What the suites share: real daemons, the Python environment, and what this machine can do.
//!
//! It owns processes and temporary directories of tests. It does not own what is right: each suite says that.

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
