//! A bit flips in a copy: the damage is found, named, healed from another copy, and never served.
//!
//! Owns: data in Tier-1 and in Tier-3. Does not own: markers and manifests (`documents`).

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use serde_json::Value;
use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::{process, tier3};

use crate::site::{
    CHUNK_BYTES, CONFIG, MIB, NEVER_SETTLES, assert_holds, chunk_sum, events, flip, flip_host, flipped,
    has_problem, noise, object_path, open_for_update, options, problems, save, shown_file, start,
};

const PATH: &str = "run/step1.pt";
const ALONE: &str = "alone/step1.pt";
const GONE: &str = "gone/step1.pt";
/// Size of a file of three chunks, the last one odd.
const FILE_BYTES: usize = 20 * MIB + 7;
/// Offset in the second chunk.
const OFFSET: usize = CHUNK_BYTES + 12_345;
/// Limit of a scrub, which begins 30 s after the start and then passes over a small Tier-1 within a second.
const SCRUB_LIMIT: Duration = Duration::from_secs(75);
/// Limit until a closed file is healed, which must not wait for the next pass over a terabyte.
const HEAL_LIMIT: Duration = Duration::from_secs(20);

/// Asserts that a message names the file's second chunk and both checksums.
fn assert_names_chunk(text: &str, good: &[u8], bad: &[u8]) {
    for word in ["chunk 1", &chunk_sum(good, 1), &chunk_sum(bad, 1)] {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

fn verify(daemon: &Daemon, arguments: &[&str]) -> (Option<i32>, Value) {
    let output = daemon.ctl(&[&["verify"], arguments, &["-o", "json"]].concat());
    let answer = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("verify printed no JSON ({error}): {}", shown(&output)));
    (output.status.code(), answer)
}

fn only<'a>(answer: &'a Value, list: &str) -> &'a Value {
    match answer[list].as_array().map(Vec::as_slice) {
        Some([one]) => one,
        _ => panic!("not one entry in {list}: {answer:#}"),
    }
}

#[test]
fn a_byte_flipped_in_memory_is_named_and_healed_by_verify() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(1, FILE_BYTES);
    let bad = flipped(&bytes, OFFSET);
    save(&daemon, PATH, &bytes);
    daemon.flush();
    for arguments in [&[][..], &["--deep"]] {
        flip_host(&daemon, PATH, OFFSET as u64);
        assert!(fs::read(daemon.mount().join(PATH)).unwrap() == bad, "the damage reached the pages");
        let (code, answer) = verify(&daemon, arguments);
        assert_eq!(code, Some(0), "{answer:#}");
        let repair = only(&answer, "repaired");
        assert_eq!(
            (&repair["path"], &repair["copy"], &repair["from"]),
            (&PATH.into(), &"host".into(), &"object".into())
        );
        assert_names_chunk(repair["what"].as_str().unwrap(), &bytes, &bad);
        assert_holds(&daemon, PATH, &bytes, "healed");
        let (code, answer) = verify(&daemon, &["--deep"]);
        assert!(code == Some(0) && answer["repaired"] == Value::Array(vec![]), "{answer:#}");
    }
    let told = events(&daemon);
    assert_eq!(told.iter().filter(|event| event["kind"] == "repaired").count(), 2, "{told:#?}");
}

#[test]
fn a_byte_flipped_while_the_file_is_open_is_healed_when_it_is_closed() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(2, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    daemon.flush();
    let reader = File::open(daemon.mount().join(PATH)).unwrap();
    flip_host(&daemon, PATH, OFFSET as u64);
    let (code, answer) = verify(&daemon, &["--deep"]);
    assert_eq!((code, &answer["bad_objects"]), (Some(0), &0.into()), "its object is good: {answer:#}");
    assert_names_chunk(
        only(&answer, "unchecked")["what"].as_str().unwrap(),
        &bytes,
        &flipped(&bytes, OFFSET),
    );
    // The reader keeps its bytes, and no other open gets them.
    assert_io_error(&daemon, PATH);
    drop(reader);
    let healed = process::until(HEAL_LIMIT, || {
        // Each read opens the file again, and must not get a copy known to be bad. The daemon may see the close a moment later.
        let read = fs::read(daemon.mount().join(PATH)).ok()?;
        assert!(read == bytes, "a copy that is known to be bad is served");
        Some(())
    });
    assert!(healed.is_some(), "{:#?}", problems(&daemon));
}

#[test]
fn a_byte_flipped_in_memory_is_found_by_the_scrub_alone() {
    let config =
        "[save]\nsettle_s = 3600.0\n[tier3]\npaced = false\n[verify]\nscrub_bytes_per_s = 1073741824\n";
    let Some(daemon) = start(options("256MiB", config)) else { return };
    let (bytes, alone, gone) = (noise(3, FILE_BYTES), noise(4, FILE_BYTES), noise(16, FILE_BYTES));
    save(&daemon, PATH, &bytes);
    save(&daemon, GONE, &gone);
    daemon.flush();
    let object = object_path(&daemon, &daemon.tier3_dir(), GONE);
    let aside = daemon.scratch("aside").join("object");
    fs::rename(&object, &aside).unwrap();
    // A run without history, not flushed and never settled, has no copy but the one in memory.
    save(&daemon, ALONE, &alone);
    let sealed = process::until(Duration::from_secs(20), || {
        (shown_file(&daemon, ALONE)["state"] == "sealed").then_some(())
    });
    assert!(sealed.is_some(), "{}", shown_file(&daemon, ALONE));
    assert!(shown_file(&daemon, ALONE)["object_key"].is_null());
    flip_host(&daemon, PATH, OFFSET as u64);
    flip_host(&daemon, ALONE, OFFSET as u64);
    flip_host(&daemon, GONE, OFFSET as u64);
    // No program opens a file or asks for a verify, so only the scrub can find it.
    let found = process::until(SCRUB_LIMIT, || {
        let told = events(&daemon);
        let of = |kind: &str, path: &str| {
            told.iter().find(|event| event["kind"] == kind && event["path"] == path).cloned()
        };
        Some((of("repaired", PATH)?, of("corrupt", ALONE)?, of("corrupt", GONE)?))
    });
    let (repaired, corrupt, _) = found.unwrap_or_else(|| panic!("not found: {:#?}", events(&daemon)));
    assert_names_chunk(repaired["what"].as_str().unwrap(), &bytes, &flipped(&bytes, OFFSET));
    assert_names_chunk(corrupt["what"].as_str().unwrap(), &alone, &flipped(&alone, OFFSET));
    assert_holds(&daemon, PATH, &bytes, "healed by the scrub");
    assert!(has_problem(&daemon, "host_corrupt"));
    assert_io_error(&daemon, GONE);
    fs::rename(&aside, &object).unwrap();
    assert_holds(&daemon, GONE, &gone, "its object is back");
}

#[test]
fn what_is_known_to_be_bad_is_not_served_where_its_object_is_bad_too() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(17, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    daemon.flush();
    let object = object_path(&daemon, &daemon.tier3_dir(), PATH);
    flip_host(&daemon, PATH, OFFSET as u64);
    flip(&object, 70_000);
    // Without `--deep`, the object's bytes are verified too, because no other copy is left.
    let (code, answer) = verify(&daemon, &[]);
    assert_eq!((code, &only(&answer, "unrecoverable")["path"]), (Some(4), &PATH.into()), "{answer:#}");
    let (.., action) = problems(&daemon).into_iter().find(|(code, ..)| code == "host_corrupt").unwrap();
    assert!(action.contains("restore its object"), "it was committed: {action}");
    assert_io_error(&daemon, PATH);
    // A person restores the object from a copy of Tier-3, and reports that by `verify --deep`.
    flip(&object, 70_000);
    assert_eq!(verify(&daemon, &["--deep"]).0, Some(0));
    assert_holds(&daemon, PATH, &bytes, "restored");
}

#[test]
fn a_file_without_a_good_copy_is_named_and_never_served() {
    let Some(daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    let bytes = noise(5, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    process::until(Duration::from_secs(20), || {
        (shown_file(&daemon, PATH)["state"] == "sealed").then_some(())
    })
    .expect("the file is sealed");
    flip_host(&daemon, PATH, OFFSET as u64);
    for arguments in [&[][..], &["--deep"]] {
        let (code, answer) = verify(&daemon, arguments);
        assert_eq!(code, Some(4), "{answer:#}");
        let lost = only(&answer, "unrecoverable");
        assert_eq!(lost["path"], PATH);
        assert_names_chunk(lost["what"].as_str().unwrap(), &bytes, &flipped(&bytes, OFFSET));
    }
    assert!(has_problem(&daemon, "host_corrupt"));
    let read = fs::read(daemon.mount().join(PATH));
    assert!(
        matches!(&read, Err(error) if error.raw_os_error() == Some(libc::EIO)),
        "a copy that is known to be bad is served: {:?}",
        read.map(|bytes| bytes.len())
    );
    // Bytes that are known to be bad must not become durable either.
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "5"]);
    assert_ne!(output.status.code(), Some(0), "{}", shown(&output));
    assert_ne!(daemon.checkpoint(PATH).expect("it is listed")["state"], "committed");
    // As the problem advises, saving the file again ends it.
    save(&daemon, PATH, &bytes);
    daemon.flush();
    assert_holds(&daemon, PATH, &bytes, "saved again");
    assert!(!has_problem(&daemon, "host_corrupt"));
}

#[test]
fn memory_that_changed_after_the_seal_is_never_uploaded() {
    let Some(mut daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    let bytes = noise(6, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    process::until(Duration::from_secs(20), || {
        (shown_file(&daemon, PATH)["state"] == "sealed").then_some(())
    })
    .expect("the file is sealed");
    flip_host(&daemon, PATH, OFFSET as u64);
    // The page was not read since it was sealed, so the upload itself must notice.
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "10"]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert_names_chunk(&daemon.log(), &bytes, &flipped(&bytes, OFFSET));
    daemon.stop_with_status();
    daemon.start_again();
    assert!(daemon.checkpoint(PATH).is_none_or(|listed| listed["state"] != "committed"));
    assert!(fs::read(daemon.mount().join(PATH)).is_err());
}

/// Opens and reads a file that must answer EIO.
fn assert_io_error(daemon: &Daemon, path: &str) {
    let read = File::open(daemon.mount().join(path)).and_then(|mut file| {
        let mut bytes = vec![];
        file.read_to_end(&mut bytes).map(|_| bytes)
    });
    match read {
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}"),
        Ok(bytes) => panic!("{path} was served, {} bytes", bytes.len()),
    }
}

/// Whether a line of the log contains all of these words.
fn logged(daemon: &Daemon, words: &[&str]) -> bool {
    daemon.log().lines().any(|line| words.iter().all(|word| line.contains(word)))
}

#[test]
fn a_byte_flipped_in_tier3_is_never_served() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(7, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    save(&daemon, "run/step2.pt", &bytes);
    daemon.flush();
    let object = object_path(&daemon, &daemon.tier3_dir(), PATH);
    daemon.stop();
    flip(&object, OFFSET as u64);
    daemon.start_again();
    assert_io_error(&daemon, PATH);
    let (good, bad) = (chunk_sum(&bytes, 1), chunk_sum(&flipped(&bytes, OFFSET), 1));
    assert!(logged(&daemon, &[PATH, "chunk 1", &good, &bad]), "{}", daemon.log_tail());
    assert_holds(&daemon, "run/step2.pt", &bytes, "the file beside it");
    let (code, answer) = verify(&daemon, &["--deep"]);
    assert_eq!(code, Some(4), "{answer:#}");
    let lost = only(&answer, "unrecoverable");
    assert_eq!(lost["path"], PATH);
    assert_names_chunk(lost["what"].as_str().unwrap(), &bytes, &flipped(&bytes, OFFSET));
    assert_io_error(&daemon, PATH);
}

#[test]
fn a_truncated_or_missing_object_is_never_served() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(8, FILE_BYTES);
    for path in [PATH, "run/step2.pt", "run/step3.pt"] {
        save(&daemon, path, &bytes);
    }
    daemon.flush();
    let truncated = object_path(&daemon, &daemon.tier3_dir(), PATH);
    let missing = object_path(&daemon, &daemon.tier3_dir(), "run/step2.pt");
    daemon.stop();
    fs::OpenOptions::new().write(true).open(&truncated).unwrap().set_len(OFFSET as u64).unwrap();
    fs::remove_file(&missing).unwrap();
    daemon.start_again();
    for path in [PATH, "run/step2.pt"] {
        assert_io_error(&daemon, path);
        assert!(logged(&daemon, &[path, "chunk"]), "{}", daemon.log_tail());
    }
    assert_holds(&daemon, "run/step3.pt", &bytes, "the file beside them");
    for arguments in [&[][..], &["--deep"]] {
        let (code, answer) = verify(&daemon, arguments);
        assert_eq!(code, Some(4), "{answer:#}");
        let lost: Vec<_> = answer["unrecoverable"].as_array().unwrap().iter().map(|f| &f["path"]).collect();
        assert_eq!(lost, [PATH, "run/step2.pt"], "{answer:#}");
    }
}

#[test]
fn a_bad_or_missing_object_is_written_again_with_the_same_bytes() {
    const LOOSE: &str = "run/notes.txt";
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let (bytes, other, notes) = (noise(11, FILE_BYTES), noise(12, MIB), noise(13, 70_001));
    save(&daemon, PATH, &bytes);
    save(&daemon, "run/step2.pt", &other);
    save(&daemon, LOOSE, &notes);
    daemon.flush();
    let tier3 = daemon.tier3_dir();
    let (bad, gone) = (object_path(&daemon, &tier3, PATH), object_path(&daemon, &tier3, "run/step2.pt"));
    let loose = tier3::files_below(&tier3.join(".tidemark/loose/run/notes.txt"));
    let loose = loose.into_iter().find(|path| path.extension().is_none()).expect("its bytes");
    // Every verify checks the size, and `--deep` the bytes.
    fs::remove_file(&gone).unwrap();
    flip(&bad, OFFSET as u64);
    flip(&loose, 12_345);
    let (code, answer) = verify(&daemon, &[]);
    assert_eq!(code, Some(0), "{answer:#}");
    let repair = only(&answer, "repaired");
    assert_eq!(
        (&repair["path"], &repair["copy"], &repair["from"]),
        (&"run/step2.pt".into(), &"object".into(), &"host".into())
    );
    let (code, answer) = verify(&daemon, &["--deep"]);
    assert_eq!(code, Some(0), "{answer:#}");
    let repaired: Vec<_> = answer["repaired"].as_array().unwrap().iter().map(|r| &r["path"]).collect();
    assert_eq!(repaired, [LOOSE, PATH], "{answer:#}");
    assert_names_chunk(&answer["repaired"].to_string(), &bytes, &flipped(&bytes, OFFSET));
    for (path, expected) in [(&bad, &bytes), (&gone, &other), (&loose, &notes)] {
        assert!(fs::read(path).unwrap() == *expected, "{}", path.display());
    }
    let (code, answer) = verify(&daemon, &["--deep"]);
    assert!(code == Some(0) && answer["repaired"] == Value::Array(vec![]), "{answer:#}");
    assert_eq!(events(&daemon).iter().filter(|event| event["kind"] == "repaired").count(), 3);
    daemon.stop();
    daemon.start_again();
    for (path, expected) in [(PATH, &bytes), ("run/step2.pt", &other), (LOOSE, &notes)] {
        assert_holds(&daemon, path, expected, "from Tier-3 alone");
    }
}

#[test]
fn a_bad_object_of_a_version_that_the_tree_does_not_show_is_found() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, PATH, &noise(14, MIB));
    daemon.flush();
    let older = object_path(&daemon, &daemon.tier3_dir(), PATH);
    save(&daemon, PATH, &noise(15, MIB));
    daemon.flush();
    flip(&older, 70_000);
    let (code, answer) = verify(&daemon, &["--deep"]);
    assert_eq!((code, &only(&answer, "unrecoverable")["path"]), (Some(4), &PATH.into()), "{answer:#}");
    assert!(!has_problem(&daemon, "lost"), "a newer version took its place");
}

#[test]
fn a_removed_file_outside_checkpoints_is_read_as_undelete_would_bring_it_back() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, "gone.txt", &noise(41, MIB));
    daemon.flush();
    fs::remove_file(daemon.mount().join("gone.txt")).unwrap();
    daemon.flush();
    let object = daemon.tier3_dir().join(".tidemark/loose/gone.txt/g-1");
    assert_eq!(verify(&daemon, &["--deep"]).0, Some(0));
    flip(&object, 70_000);
    let (code, answer) = verify(&daemon, &["--deep"]);
    assert_eq!((code, &only(&answer, "unrecoverable")["path"]), (Some(4), &"gone.txt".into()), "{answer:#}");
    flip(&object, 70_000);
    assert_eq!(verify(&daemon, &["--deep"]).0, Some(0), "restored");
    fs::write(object.with_file_name("g-1.json"), b"").unwrap();
    let (code, answer) = verify(&daemon, &["--deep"]);
    assert_eq!((code, &only(&answer, "broken")["path"]), (Some(4), &"gone.txt".into()), "{answer:#}");
}

#[test]
fn a_version_whose_bytes_memory_holds_no_more_has_no_host_copy() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, PATH, &noise(18, MIB));
    daemon.flush();
    // A file that is updated in place stays the same file.
    let file = open_for_update(&daemon.mount().join(PATH)).unwrap();
    file.write_all_at(b"other bytes", 70_000).unwrap();
    drop(file);
    daemon.flush();
    let rows = daemon.ctl_json(&["ls", "--all"]);
    let versions = rows.as_array().unwrap().iter().filter(|row| row["path"] == PATH);
    let files = |row: &Value, copy: &str| row["copies"][copy]["files"].as_u64().unwrap();
    let counts = versions.map(|row| (row["version"].as_u64(), files(row, "host"), files(row, "object")));
    let mut counts: Vec<_> = counts.collect();
    counts.sort_unstable();
    assert_eq!(counts, [(Some(1), 0, 1), (Some(2), 1, 1)], "{rows:#}");
}

#[test]
fn a_bad_object_that_cannot_be_written_again_is_named_each_time_and_the_host_copy_stays() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(9, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    daemon.flush();
    let object = object_path(&daemon, &daemon.tier3_dir(), PATH);
    flip(&object, OFFSET as u64);
    let (code, answer) = verify(&daemon, &[]);
    assert_eq!(code, Some(0), "nobody asked for the bytes: {answer:#}");
    // The node that retired the version may be deleting it.
    let attempt = object.parent().unwrap();
    fs::write(attempt.parent().unwrap().join("_RETIRED"), "").unwrap();
    for arguments in [&["--deep"][..], &["--deep"], &[]] {
        let (code, answer) = verify(&daemon, arguments);
        assert_eq!(code, Some(1), "{answer:#}");
        let bad = only(&answer, "unchecked");
        assert_eq!((&bad["path"], &answer["bad_objects"]), (&PATH.into(), &1.into()));
        assert_names_chunk(bad["what"].as_str().unwrap(), &bytes, &flipped(&bytes, OFFSET));
        assert!(bad["what"].as_str().unwrap().contains("given up"), "{answer:#}");
        assert!(has_problem(&daemon, "object_corrupt"));
        let (listed, shown) = (daemon.checkpoint(PATH).unwrap(), shown_file(&daemon, PATH));
        for copies in [&listed["copies"], &shown["copies"]] {
            let files = |copy: &str| copies[copy]["files"].as_u64();
            assert_eq!((files("host"), files("object")), (Some(1), Some(0)), "{listed:#}\n{shown:#}");
        }
    }
    assert!(fs::read(&object).unwrap() == flipped(&bytes, OFFSET), "it was left alone");
    assert_holds(&daemon, PATH, &bytes, "the host copy");
    // When memory gets short, the only good copy is not evicted.
    let larger = noise(10, 100 * MIB);
    for step in 10..14 {
        let path = format!("run/step{step}.pt");
        save(&daemon, &path, &larger);
        let output = daemon.ctl(&["flush", "--wait", "--timeout", "240", &path]);
        assert!(output.status.success(), "the damage is elsewhere: {}", shown(&output));
    }
    assert_holds(&daemon, PATH, &bytes, "after 400 MiB passed a Tier-1 of 256 MiB");
}

/// Returns the exit status of `flush --wait`, and path and reason of each pending entry.
fn flushed(daemon: &Daemon) -> (Option<i32>, Vec<(String, String)>) {
    let output = daemon.ctl(&["flush", "--wait", "--timeout", "60", "-o", "json"]);
    let answer: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("flush printed no JSON ({error}): {}", shown(&output)));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let pending = answer["pending"].as_array().unwrap().iter();
    (output.status.code(), pending.map(|left| (text(&left["path"]), text(&left["reason"]))).collect())
}

#[test]
fn a_flush_and_an_end_name_what_only_memory_holds_and_write_it_again_when_they_can() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let bytes = noise(19, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    daemon.flush();
    let durable = |daemon: &Daemon| daemon.ctl_json(&["status"])["runs"][0]["durable"]["step"].clone();
    assert_eq!(durable(&daemon), 1);
    let object = object_path(&daemon, &daemon.tier3_dir(), PATH);
    let given_up = object.parent().unwrap().parent().unwrap().join("_RETIRED");
    let damage = |daemon: &Daemon| {
        flip(&object, OFFSET as u64);
        // The node that retired the version may be deleting it, so nothing is written there.
        fs::write(&given_up, "").unwrap();
        assert_eq!(verify(daemon, &["--deep"]).0, Some(1));
    };
    damage(&daemon);
    let left = vec![(PATH.to_owned(), "damaged".to_owned())];
    assert_eq!(flushed(&daemon), (Some(1), left), "the only good copy is in memory");
    assert_eq!(durable(&daemon), Value::Null);
    // Now the object can be written again, without a verify.
    fs::remove_file(&given_up).unwrap();
    assert_eq!(flushed(&daemon), (Some(0), vec![]));
    assert!(fs::read(&object).unwrap() == bytes, "it was not written again");
    assert_eq!(durable(&daemon), 1);
    damage(&daemon);
    assert_ne!(daemon.stop_with_status().code(), Some(0), "{}", daemon.log_tail());
    assert!(logged(&daemon, &[PATH, "not durable at the end", "damaged"]), "{}", daemon.log_tail());
}
