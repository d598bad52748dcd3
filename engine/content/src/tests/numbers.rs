//! Arrays, models of other frameworks, and tar.

use super::build::{self, Zip};
use super::{is, judged, whole_and_broken_when_cut};
use crate::Format::{Gguf, Hdf5, Keras, Npy, Npz, Tar, Zip as OtherZip};
use crate::Verdict::{Broken, Unknown, Whole};

#[test]
fn an_array_is_whole_or_cut() {
    whole_and_broken_when_cut(&build::npy("'<f4'", "(2, 3)", 24), Npy, 6);
    for (descr, shape, bytes) in [
        ("'|b1'", "()", 1),
        ("'<U5'", "(3,)", 60),
        ("'<M8[ns]'", "(2,)", 16),
        ("'>c16'", "(0, 7)", 0),
        ("'<V2'", "(4,)", 8),
    ] {
        is(&build::npy(descr, shape, bytes), Npy, Whole, "");
    }
    for descr in ["'|O'", "[('a', '<f4')]", "'<f4"] {
        is(&build::npy(descr, "(2,)", 8), Npy, Unknown, "length of its items is not known");
    }
    is(&build::npy("'<f4'", "(2,)", 9), Npy, Unknown, "its 2 items end at");
    is(&build::npy("'<f8'", "(9999999999, 9999999999)", 9), Npy, Unknown, "");
}

#[test]
fn an_archive_of_arrays_has_the_lengths_that_they_say() {
    let mut zip = Zip::default();
    zip.add("a.npy", b"", &build::npy("'<f4'", "(2, 3)", 24));
    zip.add("b.npy", b"", &build::npy("'<i8'", "()", 8));
    whole_and_broken_when_cut(&zip.end(), Npz, 4);

    // A member that an exception broke off is closed with the bytes written so far.
    let mut zip = Zip::default();
    zip.add("a.npy", b"", &build::npy("'|O'", "(1,)", 5));
    zip.add("b.npy", b"", &build::npy("'<f4'", "(2, 3)", 20));
    is(&zip.end(), Npz, Broken, "in its member \"b.npy\", it has 20 bytes for 6 items of 4: 24 bytes");

    let mut zip = Zip::default();
    zip.add("a.npy", b"", &build::npy("'|O'", "(1,)", 5));
    is(&zip.end(), Npz, Unknown, "in its member \"a.npy\"");

    // A few bytes that are no array are returned by numpy as they are; a few bytes of an array are
    // cut.
    for (bytes, verdict) in [
        (&b"not npy"[..], Unknown),
        (b"\x93NUMB", Unknown),
        (b"", Broken),
        (b"\x93NUM", Broken),
        (b"\x93NUMPY\x01", Broken),
    ] {
        let mut zip = Zip::default();
        zip.add("a.npy", b"", bytes);
        is(&zip.end(), Npz, verdict, "in its member \"a.npy\"");
    }
}

fn keras(metadata: &str, members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = Zip::default();
    zip.add("metadata.json", b"", metadata.as_bytes());
    for (name, data) in members {
        zip.add(name, b"", data);
    }
    zip.end()
}

#[test]
fn a_model_of_keras_has_its_three_members() {
    let metadata = r#"{"keras_version": "3.11.0", "date_saved": "2026-01-01@00:00:00"}"#;
    let weights = build::hdf5_old(200);
    let config = ("config.json", &b"{}"[..]);
    whole_and_broken_when_cut(&keras(metadata, &[config, ("model.weights.h5", &weights)]), Keras, 4);
    is(&keras(metadata, &[config]), Keras, Broken, "model.weights.h5 is not among its 2 members");
    is(&keras(metadata, &[("model.weights.h5", &weights)]), Keras, Broken, "config.json is not among");
    let cut = keras(metadata, &[config, ("model.weights.h5", &weights[..150])]);
    is(&cut, Keras, Broken, "in its member \"model.weights.h5\", its superblock says that it ends at 200");
    is(&keras(metadata, &[config, ("model.weights.npz", b"")]), Keras, Unknown, "not in model.weights.h5");
    is(&keras("{}", &[config]), Keras, Unknown, "says which Keras");
}

#[test]
fn another_archive_is_broken_only_without_its_end() {
    let mut zip = Zip::default();
    zip.add("policy.pth", b"", b"x");
    let bytes = zip.end();
    is(&bytes, OtherZip, Unknown, "its directory of 1 entries is in order");
    is(&bytes[..bytes.len() - 1], OtherZip, Broken, "no end record");
}

#[test]
fn hdf5_knows_its_end() {
    whole_and_broken_when_cut(&build::hdf5_old(200), Hdf5, 8);
    whole_and_broken_when_cut(&build::hdf5_new(200, 0), Hdf5, 8);
    is(&build::hdf5_new(200, 1), Hdf5, Broken, "open for writing");
    is(&[&build::hdf5_old(200)[..], b"!"].concat(), Hdf5, Unknown, "goes on to 201");
    // If several files are one, the first contains the end of all.
    let mut family = build::hdf5_old(200);
    family[48..56].copy_from_slice(&96_u64.to_le_bytes());
    is(&family, Hdf5, Whole, "");
    is(&family[..150], Hdf5, Unknown, "may go on in other files");
    let mut sum = build::hdf5_new(200, 0);
    sum[30] ^= 1;
    is(&sum, Hdf5, Broken, "checksum");
    let mut newer = build::hdf5_old(200);
    newer[8] = 4;
    is(&newer, Hdf5, Unknown, "version 4");
}

#[test]
fn gguf_is_whole_or_cut() {
    let bytes = build::gguf();
    whole_and_broken_when_cut(&bytes, Gguf, 4);
    is(&bytes[..bytes.len() - 1], Gguf, Broken, "need 100 bytes after");
    let mut newer = bytes.clone();
    newer[4] = 4;
    is(&newer, Gguf, Unknown, "version is 4");
    let kind = bytes.windows(4).rposition(|part| part == 64_u32.to_le_bytes()).unwrap() - 4;
    let mut strange = bytes;
    strange[kind] = 99;
    is(&strange, Gguf, Unknown, "its type is 99");
}

#[test]
fn a_tar_file_is_whole_or_cut() {
    let bytes = build::tar();
    is(&bytes, Tar, Whole, "its 3 members end at 3072");
    let end = bytes.len() - 1024;
    for cut in 0..bytes.len() {
        let found = judged(&bytes[..cut]);
        // Readers accept missing zeros, and a member may end where the file does.
        let at_a_member = [1536, 2048].contains(&cut) || cut >= end;
        let expected = if cut < 512 || at_a_member { Unknown } else { Broken };
        assert_eq!(found.verdict, expected, "cut at {cut}: {}", found.reason);
    }
    is(&[&bytes[..], &[0; 8192]].concat(), Tar, Whole, "");
}

#[test]
fn a_tar_file_may_say_sizes_in_other_ways() {
    let pax = build::tar_member("PaxHeaders/a", b'x', b"12 size=700\n");
    let mut member = build::tar_member("a", b'0', &[7; 700]);
    member[124..136].copy_from_slice(&[b'0'; 12]);
    let sum: u32 = member[..148].iter().chain(&member[156..512]).map(|byte| u32::from(*byte)).sum();
    member[148..156].copy_from_slice(format!("{:06o}\0 ", sum + 256).as_bytes());
    let bytes = [&pax[..], &member, &[0; 1024]].concat();
    is(&bytes, Tar, Whole, "its 2 members");
    is(&bytes[..bytes.len() - 1536], Tar, Broken, "a member of 700 bytes");
    let sparse = [build::tar_member("s", b'S', b""), vec![0; 1024]].concat();
    is(&sparse, Tar, Unknown, "the type 0x53");
}
