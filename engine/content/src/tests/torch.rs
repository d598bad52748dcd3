//! Files of torch: archives, legacy files, plain pickles; and safetensors.

use super::build::{self, PADDING, Zip, id, torch_begun, torch_ended};
use super::{is, judged, whole_and_broken_when_cut};
use crate::Format::{Pickle, Safetensors, TorchLegacy, TorchZip};
use crate::Verdict::{Broken, Unknown, Whole};
use crate::{Limits, judge};
use std::cell::Cell;
use std::time::Duration;

#[test]
fn a_torch_file_is_whole_or_cut() {
    // An archive is recognised by its first four bytes.
    whole_and_broken_when_cut(&build::torch(&[(0, 64), (1, 16)]), TorchZip, 4);
}

/// `torch.save` and then `np.save` into one file, or any bytes that a program keeps behind its archive.
#[test]
fn an_archive_that_more_follows_than_a_comment_may_hold_is_not_broken() {
    let whole = build::torch(&[(0, 64)]);
    for follows in [1, 70_000, 1 << 20, (1 << 20) + 65_556, 3 << 20] {
        let bytes = [&whole[..], &vec![7; follows]].concat();
        is(&bytes, TorchZip, Unknown, &format!("ends at {}, and the file at {}", whole.len(), bytes.len()));
        // Four bytes that look like an end are no end.
        let cut = [&whole[..whole.len() - 40], b"PK\x05\x06", &vec![7; follows]].concat();
        is(&cut, TorchZip, Broken, "no end record");
    }
}

/// A copy that was broken off is refused on a slow machine, too, and very many apparent ends cost no more than the limits allow.
#[test]
fn a_cut_archive_is_broken_however_slowly_its_end_is_looked_for() {
    let whole = build::torch(&[(0, 64)]);
    let begun = &whole[..whole.len() - 40];
    let slowly = |bytes: &[u8], limits: &Limits| {
        let time = Cell::new(Duration::ZERO);
        let clock = || time.replace(time.get() + Duration::from_millis(10));
        judge(&bytes, bytes.len() as u64, limits, &clock)
    };
    let cut = [begun, &vec![7; 8 << 20]].concat();
    let found = slowly(&cut, &Limits::default());
    assert_eq!(found.verdict, Broken, "{}", found.reason);
    let many = [begun, &b"PK\x05\x06".repeat(1000), &vec![7; 70_000]].concat();
    let found = slowly(&many, &Limits { steps: 100, ..Limits::default() });
    assert_eq!(found.verdict, Unknown, "{}", found.reason);
    assert!(found.reason.contains("more than 100 parts"), "{}", found.reason);
}

/// The end record is there: torch writes it after an exception, too.
#[test]
fn a_save_that_an_exception_broke_off_lacks_what_its_pickle_names() {
    let pickle = build::pickle(&[(0, 64), (1, 16)]);
    let mut zip = torch_begun(&pickle);
    zip.add("step/data/0", PADDING, &[7; 64]);
    is(&torch_ended(zip), TorchZip, Broken, "a storage 1 of 16 bytes, and the archive has no data/1");

    let mut zip = torch_begun(&pickle);
    zip.add("step/data/0", PADDING, &[7; 64]);
    zip.add("step/data/1", PADDING, &[7; 12]);
    is(
        &torch_ended(zip),
        TorchZip,
        Broken,
        "data/1 has 12 bytes, and its pickle counts 4 items of 4: 16 bytes",
    );

    is(&torch_ended(Zip::default()), TorchZip, Broken, "data.pkl is not among them");

    let cut = torch_begun(&pickle[..pickle.len() - 8]);
    is(&torch_ended(cut), TorchZip, Broken, "in data.pkl, 4 bytes must follow");
}

#[test]
fn one_storage_may_have_many_names_and_a_part_of_an_item() {
    let ids =
        [id("FloatStorage", "0", 2), id("FloatStorage", "0", 2), id("UntypedStorage", "1", 10)].concat();
    let mut zip = torch_begun(&[&b"\x80\x02("[..], &ids, b"t."].concat());
    zip.add("step/data/0", PADDING, &[7; 11]);
    zip.add("step/data/1", PADDING, &[7; 10]);
    is(&torch_ended(zip), TorchZip, Whole, "each of the 2 storages");

    let mut zip = torch_begun(&build::pickle(&[(0, 8)]));
    zip.add("step/data/0", PADDING, &[7; 12]);
    is(&torch_ended(zip), TorchZip, Unknown, "data/0 has 12 bytes, more than the 8");
}

/// Protocol 4: STACK_GLOBAL and the memo instead of GLOBAL.
#[test]
fn newer_protocols_are_read() {
    let short = |text: &str| [&[0x8c, u8::try_from(text.len()).unwrap()], text.as_bytes(), &[0x94]].concat();
    let first = [
        &short("storage")[..],
        &short("torch"),
        &short("HalfStorage"),
        b"\x93\x94",
        &short("0"),
        &short("cpu"),
    ]
    .concat();
    let second = [&b"(h\0h\x03"[..], &short("1"), b"h\x05\x8a\x01\x03tQ"].concat();
    let body = [b"(", &first[..], b"K\x08tQ", &second, b"\x86."].concat();
    let pickle = [&b"\x80\x04\x95"[..], &(body.len() as u64).to_le_bytes(), &body].concat();
    let with = |bytes: usize| {
        let mut zip = torch_begun(&pickle);
        zip.add("step/data/0", PADDING, &[7; 16]);
        zip.add("step/data/1", PADDING, &vec![7; bytes]);
        torch_ended(zip)
    };
    is(&with(6), TorchZip, Whole, "each of the 2 storages");
    is(&with(5), TorchZip, Broken, "counts 3 items of 2: 6 bytes");
    let mut framed = torch_begun(&pickle[..pickle.len() - 1]);
    framed.add("step/data/0", PADDING, &[7; 16]);
    is(&torch_ended(framed), TorchZip, Broken, "in data.pkl");
}

#[test]
fn what_torch_save_does_not_write_is_unknown() {
    let mut script = torch_begun(&build::pickle(&[(0, 64)]));
    script.add("step/code/__torch__.py", PADDING, b"");
    is(&torch_ended(script), TorchZip, Unknown, "step/code/__torch__.py");

    let text =
        |text: &str| [b"X", &u32::try_from(text.len()).unwrap().to_le_bytes()[..], text.as_bytes()].concat();
    let own = torch_begun(&[&b"\x80\x02"[..], &text("mine"), b"Q."].concat());
    is(&torch_ended(own), TorchZip, Unknown, "not those of torch.save");

    let strange = torch_begun(&[&b"\x80\x02"[..], &id("TripleStorage", "0", 1), b"."].concat());
    is(&torch_ended(strange), TorchZip, Unknown, "not those of torch.save");

    let newer = torch_begun(b"\x80\x06N.");
    is(&torch_ended(newer), TorchZip, Unknown, "its protocol is 6");
}

/// Shards of torch.distributed.checkpoint are archives one after the other; their index contains the length of the file.
#[test]
fn archives_one_after_the_other_are_unknown() {
    let (first, second) = (build::torch(&[(0, 64)]), build::torch(&[(0, 16)]));
    is(&[&first[..], &second].concat(), TorchZip, Unknown, "other archives may precede it");
    is(&[&first[..], &first].concat(), TorchZip, Unknown, "other archives may precede it");
    is(&[&first[..], &second[..40]].concat(), TorchZip, Unknown, "an archive in it ends at");
    let wide = |bytes| {
        let mut zip = torch_begun(&build::pickle(&[(0, bytes)]));
        zip.add("step/data/0", PADDING, &vec![7; bytes]);
        zip.end_wide()
    };
    is(&wide(16), TorchZip, Whole, "");
    is(&[wide(16), wide(16)].concat(), TorchZip, Unknown, "other archives may precede it");
}

#[test]
fn entries_have_their_own_places() {
    let bytes = build::torch(&[(0, 64), (1, 64)]);
    let header = |text: &[u8]| bytes.windows(text.len()).position(|part| part == text).unwrap();
    let second = header(b"step/data/1") - 30;
    let mut zeros = bytes.clone();
    zeros[second..second + 4].fill(0);
    is(&zeros, TorchZip, Broken, &format!("no header is at {second}"));

    let mut zip = Zip::default();
    zip.add("step/version", PADDING, b"3\n");
    zip.entry("step/data/0", PADDING, b"", 60);
    zip.add("step/byteorder", PADDING, &[7; 80]);
    is(&zip.end(), TorchZip, Broken, "and the next begins at");

    let mut zip = Zip::default();
    zip.entry("step/version", PADDING, b"3\n", 4000);
    is(&zip.end(), TorchZip, Broken, "where the directory begins");
}

/// A writer that counts to 65535 and begins again lists more entries than it counts.
#[test]
fn a_directory_with_more_than_its_count_is_unknown() {
    let mut bytes = build::torch(&[(0, 64), (1, 64)]);
    let count = bytes.len() - 14;
    assert_eq!(bytes[count..count + 4], [6, 0, 6, 0]);
    bytes[count..count + 4].copy_from_slice(&[3, 0, 3, 0]);
    is(&bytes, TorchZip, Unknown, "bytes behind its 3 entries");
}

#[test]
fn a_comment_may_follow_the_end_record() {
    let mut bytes = build::torch(&[(0, 64)]);
    let length = bytes.len();
    bytes[length - 2] = 5;
    bytes.extend(b"hello");
    is(&bytes, TorchZip, Whole, "");
    bytes.extend(b"!");
    is(&bytes, TorchZip, Unknown, "an archive in it ends at");
}

#[test]
fn a_legacy_file_is_whole_or_cut() {
    let bytes = build::legacy(&[(94_000, 64), (95_000, 16)]);
    // Twelve bytes identify the first number.
    whole_and_broken_when_cut(&bytes, TorchLegacy, 14);
    is(&[&bytes[..], b"more"].concat(), TorchLegacy, Unknown, "and the file at");
    is(&build::legacy(&[]), TorchLegacy, Whole, "its 0 storages");
}

#[test]
fn a_pickle_is_whole_or_cut() {
    let list = [&b"\x80\x02]q\0("[..], &b"K\x01".repeat(9), b"e."].concat();
    whole_and_broken_when_cut(&list, Pickle, 14);
    is(&[&list[..], &list].concat(), Pickle, Whole, "2 pickle(s)");
    is(&[&list[..], b"raw"].concat(), Pickle, Unknown, "3 other bytes follow");
    let python2 = [&b"\x80\x02]q\x01("[..], &b"K\x01h\x01".repeat(9), b"e."].concat();
    is(&python2, Pickle, Whole, "1 pickle(s)");
    // A missing text of 1000 bytes is no proof so early in the file.
    assert_eq!(judged(b"\x80\x02X\xe8\x03\0\0").verdict, Unknown);
    // A frame is.
    is(b"\x80\x04\x95\xe8\x03\0\0\0\0\0\0]", Pickle, Broken, "1000 bytes must follow");
}

#[test]
fn a_pickle_with_arrays_between_its_opcodes_is_unknown() {
    let body = b"\x8c\x13joblib.numpy_pickle\x94\x8c\x11NumpyArrayWrapper\x94\x93\x94)\x81\x94b";
    let pickle = [&b"\x80\x04\x95"[..], &(body.len() as u64).to_le_bytes(), body, &[0x8c; 40]].concat();
    is(&pickle, Pickle, Unknown, "joblib");
}

#[test]
fn safetensors_are_whole_or_cut() {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"BF16","shape":[],"data_offsets":[16,18]}}   "#;
    let bytes = build::safetensors(header, 18);
    // Up to the end of the first name it could be something else.
    whole_and_broken_when_cut(&bytes, Safetensors, 8 + r#"{"__metadata__""#.len());
    is(&bytes[..bytes.len() - 1], Safetensors, Broken, "need 18 bytes after");
    is(&[&bytes[..], b"!"].concat(), Safetensors, Unknown, "its 2 tensors end at");
    is(&build::safetensors(r#"{"__metadata__":{}}"#, 0), Safetensors, Whole, "its 0 tensors");
}

#[test]
fn a_header_of_safetensors_contradicts_itself_or_is_not_understood() {
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let read =
        |header: &str, verdict, reason| is(&build::safetensors(header, 16), Safetensors, verdict, reason);
    read(&tensor("F32", "[4]", "[0,16]"), Whole, "");
    read(&tensor("F32", "[0,9]", "[0,0]"), Unknown, "its 1 tensors end at");
    read(&tensor("F32", "[3]", "[0,16]"), Broken, "3 items of 4 bytes has 16 bytes");
    read(&tensor("F32", "[4]", "[16,0]"), Broken, "begins at 16 and ends at 0");
    read(&tensor("F32", "[4294967296,4294967296,4294967296]", "[0,16]"), Broken, "more than 2^64");
    read(&tensor("F32", "[4]", "[4,20]"), Unknown, "begins at 4 of the data");
    read(&tensor("F4", "[32]", "[0,16]"), Unknown, "type is not known");
    read(&tensor("F32", "[-4]", "[0,16]"), Unknown, "not understood");
    read(r#"{"a":{"dtype":"F32","shape":[4]}}"#, Unknown, "not understood");
    read(&format!("{}x", tensor("F32", "[4]", "[0,16]")), Broken, "no JSON");
    let deep = format!(r#"{{"__metadata__":{}{}}}"#, "[".repeat(10_000), "]".repeat(10_000));
    read(&deep, Unknown, "");
}
