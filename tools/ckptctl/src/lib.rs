//! Shared by the benches and `ckptctl bench`: the samples, so that both measure the same. The command is `main`.

pub mod sample;
