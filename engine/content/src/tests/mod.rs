//! Files made by hand: whole, cut at each byte, and contradicting themselves.

mod build;
mod hostile;
mod numbers;
mod torch;

use crate::{Format, Judgement, Limits, Verdict, judge};
use std::time::Duration;

fn judged(bytes: &[u8]) -> Judgement {
    judge(&bytes, bytes.len() as u64, &Limits::default(), &|| Duration::ZERO)
}

#[track_caller]
fn is(bytes: &[u8], format: Format, verdict: Verdict, reason: &str) {
    let found = judged(bytes);
    assert_eq!((found.format, found.verdict), (Some(format), verdict), "{}", found.reason);
    assert!(found.reason.contains(reason), "{:?} is not in {:?}", reason, found.reason);
}

/// Checks that the file is whole as it is, and broken when cut anywhere from `from` bytes on. Cut before that, it is not
/// recognised, and never whole.
#[track_caller]
fn whole_and_broken_when_cut(bytes: &[u8], format: Format, from: usize) {
    is(bytes, format, Verdict::Whole, "");
    for end in 0..bytes.len() {
        let cut = judged(&bytes[..end]);
        let expected = if end < from { Verdict::Unknown } else { Verdict::Broken };
        assert_eq!(cut.verdict, expected, "cut at {end} of {}: {}", bytes.len(), cut.reason);
    }
}

#[test]
fn what_begins_as_nothing_known_is_unknown() {
    for bytes in [&b""[..], b"{}", &[0; 4096], b"step,loss\n1,0.5\n", b"\x7fELF", b"PK\x05\x06", &[0x80; 64]]
    {
        let found = judged(bytes);
        assert_eq!((found.verdict, found.format), (Verdict::Unknown, None), "{}", found.reason);
    }
}

#[test]
fn a_file_that_cannot_be_read_is_unknown() {
    let bytes = build::torch(&[(0, 64)]);
    let found = judge(&&bytes[..8], bytes.len() as u64, &Limits::default(), &|| Duration::ZERO);
    assert_eq!(found.verdict, Verdict::Unknown);
    assert!(found.reason.contains("cannot be read"), "{}", found.reason);
}

#[test]
fn each_limit_ends_in_unknown() {
    let bytes = build::torch(&[(0, 64), (1, 64), (2, 64)]);
    let size_bytes = bytes.len() as u64;
    let with = |limits: Limits, a_look: Duration| {
        let time = std::cell::Cell::new(Duration::ZERO);
        let clock = || time.replace(time.get() + a_look);
        judge(&&bytes[..], size_bytes, &limits, &clock)
    };
    let none = Duration::ZERO;
    assert_eq!(with(Limits::default(), none).verdict, Verdict::Whole);
    for (limits, reason) in [
        (Limits { read_bytes: 600, ..Limits::default() }, "more than 600 bytes would have to be read"),
        (Limits { steps: 10, ..Limits::default() }, "more than 10 parts"),
    ] {
        let found = with(limits, none);
        assert_eq!(found.verdict, Verdict::Unknown);
        assert!(found.reason.contains(reason), "{}", found.reason);
    }
    // Long enough for a second look at the clock.
    let long: Vec<u8> = [&b"\x80\x02]"[..], &[b'N', b'a'].repeat(40_000), b"."].concat();
    let time = std::cell::Cell::new(Duration::ZERO);
    let clock = || time.replace(time.get() + Duration::from_millis(51));
    let found = judge(&&long[..], long.len() as u64, &Limits::default(), &clock);
    assert_eq!(found.verdict, Verdict::Unknown);
    assert!(found.reason.contains("more than 50 ms"), "{}", found.reason);
}
