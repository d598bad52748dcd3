//! Files that were changed at random, or made to cost much.

use super::build::{self, Zip};
use super::judged;
use crate::{Bytes, Limits, Verdict, judge};
use proptest::prelude::*;
use std::cell::Cell;
use std::io;
use std::time::Duration;

/// Makes whole files of each format.
fn samples() -> Vec<Vec<u8>> {
    let mut wide = build::torch_begun(&build::pickle(&[(0, 16)]));
    wide.add("step/data/0", build::PADDING, &[7; 16]);
    let mut npz = Zip::default();
    npz.add("a.npy", b"", &build::npy("'<f4'", "(2, 3)", 24));
    let mut keras = Zip::default();
    keras.add("metadata.json", b"", br#"{"keras_version": "3"}"#);
    keras.add("config.json", b"", b"{}");
    keras.add("model.weights.h5", b"", &build::hdf5_old(100));
    let header = r#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;
    vec![
        build::torch(&[(0, 64), (1, 16)]),
        wide.end_wide(),
        build::legacy(&[(0, 64), (1, 16)]),
        build::safetensors(header, 16),
        build::hdf5_old(100),
        build::hdf5_new(100, 0),
        [&b"\x80\x02]q\0("[..], &b"K\x01".repeat(9), b"e."].concat(),
        npz.end(),
        build::npy("'<f4'", "(2, 3)", 24),
        keras.end(),
        build::gguf(),
        build::tar(),
    ]
}

/// A file, and how much of it was read.
struct Counted<'a>(&'a [u8], Cell<u64>);

impl Bytes for Counted<'_> {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.1.set(self.1.get() + into.len() as u64);
        self.0.read_at(offset, into)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn no_change_makes_a_reader_panic(
        which in 0..12_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
        filled in prop::option::of((any::<prop::sample::Index>(), 0..200_usize)),
    ) {
        let mut bytes = samples().swap_remove(which);
        for (place, byte) in changes {
            let at = place.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some((place, length)) = filled {
            let at = place.index(bytes.len());
            let end = bytes.len().min(at + length);
            bytes[at..end].fill(0xff);
        }
        if let Some(place) = cut {
            bytes.truncate(place.index(bytes.len()));
        }
        let limits = Limits { read_bytes: 100_000, ..Limits::default() };
        let counted = Counted(&bytes, Cell::new(0));
        let found = judge(&counted, bytes.len() as u64, &limits, &|| Duration::ZERO);
        prop_assert!(counted.1.get() <= limits.read_bytes, "{} bytes were read", counted.1.get());
        prop_assert!(!found.reason.is_empty());
    }

    /// As [`crate::tests::whole_and_broken_when_cut`], with bytes of no format behind the cut.
    #[test]
    fn a_cut_file_is_never_whole(which in 0..12_usize, place in any::<prop::sample::Index>()) {
        let bytes = samples().swap_remove(which);
        let end = place.index(bytes.len());
        let found = judged(&bytes[..end]);
        prop_assert_ne!(found.verdict, Verdict::Whole, "cut at {} of {}: {}", end, bytes.len(), found.reason);
    }

    #[test]
    fn no_bytes_behind_a_beginning_make_a_reader_panic(
        which in 0..12_usize,
        kept in any::<prop::sample::Index>(),
        rest in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let sample = samples().swap_remove(which);
        let bytes = [&sample[..kept.index(sample.len())], &rest].concat();
        let _ = judged(&bytes);
    }

    #[test]
    fn no_opcodes_make_the_pickles_reader_panic(
        opcodes in prop::collection::vec(prop::sample::select(b"(}{)u.bKhQ\x94\x8c\x81N\x85ts2q\x00\x01lde0acRX".to_vec()), 0..80),
    ) {
        let _ = judged(&[b"\x80\x02", &opcodes[..]].concat());
    }
}

/// Each file claims to be enormous, or makes its reader keep as much as possible.
#[test]
fn bombs_end_at_their_bounds() {
    let mark = |count: usize| [&b"\x80\x02"[..], &vec![b'('; count], b"."].concat();
    let memo = |count: usize| [&b"\x80\x04N"[..], &vec![0x94; count], b"."].concat();
    let ids = |count: u64| {
        let ids: Vec<u8> = (0..count).flat_map(|key| build::id("ByteStorage", &key.to_string(), 1)).collect();
        build::torch_ended(build::torch_begun(&[&b"\x80\x02("[..], &ids, b"t."].concat()))
    };
    let header = |text: &str| build::safetensors(text, 16);
    let sides =
        format!(r#"{{"a":{{"dtype":"F32","shape":[{}4],"data_offsets":[0,16]}}}}"#, "1,".repeat(2_000_000));
    let gguf = [b"GGUF\x03\0\0\0", &[0xff; 16][..], &[0; 64]].concat();
    for (bytes, verdict, reason) in [
        (mark(300_000), Verdict::Unknown, "its stack has more than"),
        (memo(2_000_000), Verdict::Unknown, "memo slot"),
        (ids(1000), Verdict::Broken, "the archive has no data/0"),
        (header(&sides), Verdict::Whole, ""),
        (gguf, Verdict::Broken, "in its header"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.".to_vec(), Verdict::Unknown, "memo slot 2147483647 follows 0"),
    ] {
        let found = judged(&bytes);
        assert_eq!(found.verdict, verdict, "{}", found.reason);
        assert!(found.reason.contains(reason), "{}", found.reason);
    }
}
