//! What the benches share with `ckptctl bench`: the samples, so that both measure the same. The command is `main`.

pub mod sample;
