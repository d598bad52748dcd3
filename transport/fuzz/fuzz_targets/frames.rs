//! Bytes as a peer may send them after the greeting: no panic, and every frame that decodes is encoded to the same
//! bytes. Run: `cargo +nightly fuzz run frames` in `transport`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidemark_transport::frame::{HEADER_BYTES, Header};

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Some((header, after)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(read) = Header::decode(header) else { return };
        assert_eq!(Header::encode(read.kind, read.id, read.body_bytes), *header);
        rest = after.get(read.body_bytes..).unwrap_or(&[]);
    }
});
