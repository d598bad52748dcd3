//! The file operations that are timed, the same for every place, and the same as in `ckptctl bench mount`.

pub use ckptctl::sample::{BLOCK_BYTES, buffer, map, read, remove, warm, write, write_new};
