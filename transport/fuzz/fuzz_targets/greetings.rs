//! Bytes as a stranger may greet with: no panic, and nothing is read that would not be written so.
//! Run: `cargo +nightly fuzz run greetings` in `transport`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidemark_transport::tcp::greeting::{Answer, Hello};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode(), bytes);
    }
    if let Ok(answer) = Answer::decode(bytes) {
        assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
    }
});
