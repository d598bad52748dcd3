//! Fuzzes hostile files: no panic, no more reads than allowed, and the same verdict twice. Usage:
//! `cargo +nightly fuzz run files` in `engine/content`. Small files of each format are a good first corpus.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::time::Duration;
use tidemark_content::{Limits, judge};

fuzz_target!(|bytes: &[u8]| {
    let once = || judge(&bytes, bytes.len() as u64, &Limits::default(), &|| Duration::ZERO);
    assert_eq!(once(), once());
});
