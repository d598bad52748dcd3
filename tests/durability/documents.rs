//! A marker, a manifest or another document in Tier-3 is damaged or contradicts itself: the daemon never believes it, and
//! uses the version committed before it. The daemon rewrites documents whose content it knows.
//!
//! Owns: every kind of damage to the documents of one version, each tried on a daemon of its own. Does not own: the data
//! (`bytes`), the rules of the format (protocol).

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::{machine, tier3};

use crate::site::{CONFIG, assert_holds, noise, options, problems, save};

const PATH: &str = "run/step1.pt";
const FILE_BYTES: usize = 70_001;

/// Damage to the documents of the second version. Returns the key that `status` must name.
type Damage = fn(&Version) -> PathBuf;

/// A committed version in a directory.
struct Version {
    marker: PathBuf,
    manifest: PathBuf,
}

impl Version {
    fn newest(tier3: &Path) -> Self {
        let newest = tier3::commits(tier3, PATH)
            .into_iter()
            .max_by_key(|marker| marker.body["version"].as_u64())
            .expect("a committed version");
        let manifest = tier3.join(newest.body["manifest"].as_str().expect("a marker names its manifest"));
        Self { marker: newest.path, manifest }
    }

    fn change_marker(&self, change: impl FnOnce(&mut Value)) -> PathBuf {
        let mut body: Value = serde_json::from_slice(&fs::read(&self.marker).unwrap()).unwrap();
        change(&mut body);
        fs::write(&self.marker, body.to_string()).unwrap();
        self.marker.clone()
    }

    /// Changes the manifest, and the hashes of its bytes in all other documents, so that only its content is wrong.
    fn change_manifest(&self, change: impl FnOnce(&mut Value)) -> PathBuf {
        let mut body: Value = serde_json::from_slice(&fs::read(&self.manifest).unwrap()).unwrap();
        change(&mut body);
        self.replace_manifest(body.to_string().as_bytes())
    }

    fn replace_manifest(&self, bytes: &[u8]) -> PathBuf {
        let hash = blake3::hash(bytes).to_hex().to_string();
        let renamed = self.manifest.with_file_name(format!("manifest-{hash}.json"));
        fs::remove_file(&self.manifest).unwrap();
        fs::write(&renamed, bytes).unwrap();
        self.change_marker(|marker| {
            let key = marker["manifest"].as_str().unwrap();
            let folder = key.rsplit_once('/').unwrap().0;
            marker["manifest"] = format!("{folder}/manifest-{hash}.json").into();
            marker["manifest_hash"] = hash.into();
        });
        renamed
    }
}

fn truncate(path: &Path) -> PathBuf {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    path.to_owned()
}

const DAMAGES: &[(&str, Damage)] = &[
    ("a marker of other bytes", |v| {
        fs::write(&v.marker, b"\x00\xff not JSON").unwrap();
        v.marker.clone()
    }),
    ("an empty marker", |v| {
        fs::write(&v.marker, b"").unwrap();
        v.marker.clone()
    }),
    ("a truncated marker", |v| truncate(&v.marker)),
    ("a marker of a newer format", |v| v.change_marker(|m| m["format"] = json!(99))),
    ("a marker larger than any", |v| {
        fs::write(&v.marker, vec![b' '; 8 << 20]).unwrap();
        v.marker.clone()
    }),
    ("a marker nested deeper than any", |v| {
        fs::write(&v.marker, "[".repeat(60_000)).unwrap();
        v.marker.clone()
    }),
    ("a marker of another version", |v| v.change_marker(|m| m["version"] = json!(7))),
    ("a marker of a negative version", |v| v.change_marker(|m| m["version"] = json!(-2))),
    ("a marker that leaves the run", |v| v.change_marker(|m| m["run"] = json!("../run"))),
    ("a marker whose manifest is elsewhere", |v| {
        v.change_marker(|m| m["manifest"] = json!("../../../etc/passwd"))
    }),
    ("a missing manifest", |v| {
        fs::remove_file(&v.manifest).unwrap();
        v.manifest.clone()
    }),
    ("a manifest with one byte flipped", |v| {
        crate::site::flip(&v.manifest, 200);
        v.manifest.clone()
    }),
    ("a truncated manifest", |v| truncate(&v.manifest)),
    ("a truncated manifest under its own hash", |v| {
        let bytes = fs::read(&v.manifest).unwrap();
        v.replace_manifest(&bytes[..bytes.len() / 2])
    }),
    ("a manifest of a newer format", |v| v.change_manifest(|m| m["format"] = json!(99))),
    ("a file that leaves the mount", |v| {
        v.change_manifest(|m| m["files"][0]["path"] = json!("run/../../../etc/passwd"))
    }),
    ("an absolute path", |v| v.change_manifest(|m| m["files"][0]["path"] = json!("/etc/passwd"))),
    ("a file of another run", |v| v.change_manifest(|m| m["files"][0]["path"] = json!("other/step1.pt"))),
    ("a key that leaves Tier-3", |v| {
        v.change_manifest(|m| m["files"][0]["key"] = json!("../../../../../etc/passwd"))
    }),
    ("a key of the version before", |v| {
        v.change_manifest(|m| {
            let key = m["files"][0]["key"].as_str().unwrap().replace("/v0.2/", "/v0.1/");
            m["files"][0]["key"] = json!(key);
        })
    }),
    ("a path named twice", |v| {
        v.change_manifest(|m| {
            let file = m["files"][0].clone();
            m["files"].as_array_mut().unwrap().push(file);
        })
    }),
    ("a negative size", |v| v.change_manifest(|m| m["files"][0]["size_bytes"] = json!(-1))),
    ("a size beyond all disks", |v| v.change_manifest(|m| m["files"][0]["size_bytes"] = json!(u64::MAX))),
    ("a size that is not the checksums'", |v| {
        v.change_manifest(|m| m["files"][0]["size_bytes"] = json!(9 << 20))
    }),
    ("a checksum that is not the chunks'", |v| {
        v.change_manifest(|m| m["files"][0]["crc64nvme"] = json!("0123456789abcdef"))
    }),
    ("no files", |v| v.change_manifest(|m| m["files"] = json!([]))),
];

/// Makes two committed versions of one path. Each damage is done to a copy of their directory.
fn two_versions(first: &[u8], second: &[u8]) -> (Daemon, PathBuf) {
    let mut daemon = Daemon::start(options("128MiB", CONFIG));
    daemon.assert_passthrough();
    for bytes in [first, second] {
        save(&daemon, PATH, bytes);
        daemon.flush();
    }
    daemon.stop();
    let tier3 = daemon.tier3_dir();
    assert_eq!(tier3::commits(&tier3, PATH).len(), 2);
    (daemon, tier3)
}

#[test]
fn a_document_that_is_not_believed_is_never_served_and_the_version_before_it_is() {
    if !machine::can_mount() {
        return;
    }
    let (first, second, third) = (noise(1, FILE_BYTES), noise(2, FILE_BYTES + 1), noise(3, FILE_BYTES + 2));
    let (made, pristine) = two_versions(&first, &second);
    let mut wrong = vec![];
    for (number, (what, damage)) in DAMAGES.iter().enumerate() {
        let copy = made.scratch("copies").join(number.to_string());
        tier3::copy_out(&pristine, &copy);
        let key = damage(&Version::newest(&copy));
        // Each kind of damage is tried, even after a failure, because a list of all failures says more than the first.
        let tried = std::panic::catch_unwind(|| passes_over(&copy, &key, [&first, &third]));
        if tried.is_err() {
            wrong.push(*what);
        }
    }
    assert!(wrong.is_empty(), "believed, or not survived: {wrong:#?}");
}

/// Starts on damaged documents, twice, with a save between.
fn passes_over(tier3_dir: &Path, key: &Path, [first, third]: [&[u8]; 2]) {
    let tier3 = Some(format!("file://{}", tier3_dir.display()));
    let mut daemon = Daemon::start(DaemonOptions { tier3, ..options("128MiB", CONFIG) });
    let named = key.strip_prefix(tier3_dir).expect("a key below Tier-3").to_str().expect("text");
    // If an attempt's manifest is missing, the problem names the marker or the manifest. Both are the version's.
    let version = named.split("/a-").next().expect("a version").trim_end_matches("/_COMMITTED");
    let told = problems(&daemon);
    assert!(
        told.iter().any(|(code, what, action)| {
            code == "tier3_not_believed" && what.contains(version) && !action.is_empty()
        }),
        "{version} is not in {told:#?}"
    );
    assert_holds(&daemon, PATH, first, "the version before");
    assert_eq!(daemon.checkpoint(PATH).expect("it is listed")["version"], 1);
    // The job's next save is a new version, and no existing document is written again.
    let damaged = fs::read(key).ok();
    save(&daemon, PATH, third);
    daemon.flush();
    assert_eq!(fs::read(key).ok(), damaged, "{named} was written again");
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, PATH, third, "saved after the damage");
    assert_eq!(daemon.checkpoint(PATH).expect("it is listed")["state"], "committed");
}

/// Makes a committed checkpoint, a directory or a file, and a file outside. Then does the damage, and starts with empty
/// memory.
fn only_checkpoint(path: &str, damage: impl FnOnce(&Path)) -> Daemon {
    let mut daemon = Daemon::start(options("128MiB", CONFIG));
    daemon.assert_passthrough();
    save(&daemon, path, &noise(6, FILE_BYTES));
    if path.contains("checkpoint-") {
        save(&daemon, "run/checkpoint-5/trainer_state.json", b"{}");
    }
    save(&daemon, "run/log.txt", b"line\n");
    daemon.flush();
    daemon.stop();
    damage(&daemon.tier3_dir());
    daemon.start_again();
    daemon
}

fn code(daemon: &Daemon, words: &[&str]) -> Option<i32> {
    daemon.ctl(words).status.code()
}

/// Asserts that no call or command treats the run as one that never saved.
fn is_an_error_everywhere(daemon: &Daemon, path: &str, what: &str) {
    let listed = tier3::files_below(&daemon.mount().join("run"));
    assert!(listed.contains(&daemon.mount().join(path)), "{what}: {listed:?}");
    let error = fs::read(daemon.mount().join(path)).expect_err("nobody knows what it holds");
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{what}");
    assert_eq!(fs::read(daemon.mount().join("run/log.txt")).unwrap(), b"line\n");
    let out = daemon.scratch("out");
    let at = daemon.mount().join(path);
    let (at, target) = (at.to_str().unwrap(), out.join("x"));
    for words in [
        &["recover", "--plan"][..],
        &["verify"],
        &["verify", "--deep"],
        &["show", at],
        &["export", at, target.to_str().unwrap()],
        &["undelete", at],
        &["status", "--exit-code"],
    ] {
        assert_eq!(code(daemon, words), Some(4), "{what}: {words:?}");
    }
    assert!(problems(daemon).iter().any(|(code, ..)| code == "lost"), "{what}");
    daemon.flush();
    assert_eq!(code(daemon, &["recover", "--plan"]), Some(4), "{what}: a flush makes nothing of it");
}

#[test]
fn a_damaged_checkpoint_whose_name_other_bytes_have_is_not_said_to_be_removed() {
    if !machine::can_mount() {
        return;
    }
    let daemon = only_checkpoint(PATH, |tier3| {
        let markers = tier3::files_below(&tier3.join("run")).into_iter();
        let markers = markers.filter(|path| path.to_str().unwrap().contains("_COMMITTED"));
        markers.for_each(|path| fs::write(path, b"").unwrap());
    });
    let path = daemon.mount().join(PATH);
    let open = fs::File::create(&path).unwrap();
    let output = daemon.ctl(&["rm", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("is not removed") && path.exists(), "{}", shown(&output));
    drop(open);
}

#[test]
fn a_damaged_document_of_the_only_checkpoint_is_an_error_and_not_step_zero() {
    if !machine::can_mount() {
        return;
    }
    const DIRECTORY: &str = "run/checkpoint-5/model.safetensors";
    let all = |tier3: &Path, ends: &str| -> Vec<PathBuf> {
        let found = tier3::files_below(&tier3.join("run")).into_iter();
        found.filter(|path| path.to_str().unwrap().contains(ends)).collect()
    };
    let empty =
        |tier3: &Path, ends: &str| all(tier3, ends).iter().for_each(|path| fs::write(path, b"").unwrap());
    for (what, path, documents) in [
        ("a marker", PATH, &["_COMMITTED"][..]),
        ("a manifest", PATH, &["manifest-"]),
        ("the marker of a directory", DIRECTORY, &["_COMMITTED"]),
        ("a marker and its record", PATH, &["_COMMITTED", "attempt.json"]),
    ] {
        let mut daemon = only_checkpoint(path, |tier3| documents.iter().for_each(|name| empty(tier3, name)));
        is_an_error_everywhere(&daemon, path, what);
        // The next daemon reports the error too, with the same memory and with empty memory.
        let dead = daemon.kill_serving();
        daemon.wait_for_next(dead);
        is_an_error_everywhere(&daemon, path, what);
        daemon.stop_with_status();
        daemon.start_again();
        is_an_error_everywhere(&daemon, path, what);
        // The error ends when a person removes the checkpoint for good, or when the job has saved it again.
        let top = daemon.mount().join(path.split('/').take(2).collect::<Vec<_>>().join("/"));
        let output = daemon.ctl(&["rm", top.to_str().unwrap()]);
        assert!(output.status.success() && !top.exists(), "{what}: {}", shown(&output));
        daemon.flush();
        assert_eq!(code(&daemon, &["recover", "--plan"]), Some(0), "{what}");
        assert_eq!(code(&daemon, &["verify"]), Some(0), "{what}");
        daemon.stop();
        daemon.start_again();
        assert!(!top.exists(), "{what} came back");
        assert_eq!(code(&daemon, &["recover", "--plan"]), Some(0), "{what}");
    }
}

#[test]
fn a_manifest_that_is_damaged_while_the_daemon_runs_is_written_again() {
    if !machine::can_mount() {
        return;
    }
    let mut daemon = Daemon::start(options("128MiB", CONFIG));
    let bytes = noise(8, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    daemon.flush();
    let Version { manifest, .. } = Version::newest(&daemon.tier3_dir());
    let good = fs::read(&manifest).unwrap();
    let repaired = || {
        let verify = daemon.ctl_json(&["verify"]);
        (verify["repaired"].as_array().unwrap().len(), fs::read(&manifest).unwrap() == good)
    };
    crate::site::flip(&manifest, 200);
    assert_eq!(repaired(), (1, true));
    fs::remove_file(&manifest).unwrap();
    assert_eq!(repaired(), (1, true));
    assert_eq!(repaired(), (0, true));
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, PATH, &bytes, "after its manifest was written again");
}

#[test]
fn a_save_over_a_checkpoint_whose_marker_is_damaged_is_committed() {
    if !machine::can_mount() {
        return;
    }
    let mut daemon = only_checkpoint(PATH, |tier3| {
        fs::write(Version::newest(tier3).marker, b"").unwrap();
    });
    let bytes = noise(7, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    daemon.flush();
    assert_eq!(daemon.ctl_json(&["recover", "--plan"])["runs"][0]["chosen"]["version"], 2);
    assert!(!problems(&daemon).iter().any(|(code, ..)| code == "lost"));
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, PATH, &bytes, "saved after the damage");
}

#[test]
fn what_describes_files_and_is_lost_while_the_daemon_runs_is_written_again() {
    if !machine::can_mount() {
        return;
    }
    let mut daemon = Daemon::start(options("128MiB", CONFIG));
    let bytes = noise(9, FILE_BYTES);
    save(&daemon, PATH, &bytes);
    save(&daemon, "run/log.txt", b"line\n");
    std::os::unix::fs::symlink("log.txt", daemon.mount().join("run/link")).unwrap();
    daemon.flush();
    let all = daemon.tier3_dir();
    // The newest of each kind, since a rewritten document may have the next number.
    let newest = |folder: &str, ends: &str| {
        let mut files = tier3::files_below(&all.join(folder)).into_iter();
        files.rfind(|path| path.to_str().unwrap().ends_with(ends)).unwrap_or_else(|| panic!("no {ends}"))
    };
    let verify = |what: &str| {
        let output = daemon.ctl(&["verify", "--deep", "-o", "json"]);
        assert!(output.status.success(), "{what}: {}", shown(&output));
        let verify: Value = serde_json::from_slice(&output.stdout).unwrap();
        verify["repaired"].as_array().unwrap().len()
    };
    type Damage = fn(&Path);
    let (remove, empty): (Damage, Damage) =
        (|path| fs::remove_file(path).unwrap(), |path| fs::write(path, b"").unwrap());
    for (what, folder, ends, damage) in [
        ("no marker", "run", "_COMMITTED", remove),
        ("an empty marker", "run", "_COMMITTED", empty),
        ("no record", "run", "attempt.json", remove),
        ("an empty record", "run", "attempt.json", empty),
        ("no sidecar", ".tidemark/loose", ".json", remove),
        ("an empty sidecar", ".tidemark/loose", ".json", empty),
        ("a sidecar of another file", ".tidemark/loose", ".json", |path| {
            let mut body: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
            body["crc64nvme"] = json!("0123456789abcdef");
            fs::write(path, body.to_string()).unwrap();
        }),
        ("a sidecar with a flipped bit", ".tidemark/loose", ".json", flip_owner),
        ("no tree", ".tidemark/tree", "", remove),
        ("a tree with a flipped bit", ".tidemark/tree", "", flip_owner),
    ] {
        damage(&newest(folder, ends));
        assert_eq!((verify(what), verify(what)), (1, 0), "{what}");
    }
    for folder in ["run", ".tidemark"] {
        fs::remove_dir_all(all.join(folder)).unwrap();
    }
    // The six objects are the marker, the manifest, the record, both files and the tree.
    assert_eq!((verify("nothing"), verify("nothing")), (6, 0));
    assert!(problems(&daemon).is_empty());
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, PATH, &bytes, "after Tier-3 was lost");
    assert_holds(&daemon, "run/link", b"line\n", "after Tier-3 was lost");
    assert!(problems(&daemon).is_empty());
}

/// Flips one bit, so that the document stays valid and names another user as the owner of its first entry.
fn flip_owner(path: &Path) {
    flip_to(path, r#""uid":0,"#, r#""uid":1,"#);
}

/// Changes the first `from` of a document to `to`, which differs in one bit.
fn flip_to(path: &Path, from: &str, to: &str) {
    let differ: u32 = from.bytes().zip(to.bytes()).map(|(a, b)| (a ^ b).count_ones()).sum();
    assert_eq!((from.len(), differ), (to.len(), 1), "{from} and {to}");
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} is not in {text}");
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

/// The document stays valid, so that only its own checksum reveals the damage.
#[test]
fn one_flipped_bit_in_a_tree_or_a_sidecar_is_not_believed() {
    if !machine::can_mount() {
        return;
    }
    for (what, folder, ends, from, to) in [
        ("a removal", "tree", "", r#""path":"gone.txt""#, r#""path":"fone.txt""#),
        ("a link", "tree", "", r#""target":"step3.pt""#, r#""target":"step2.pt""#),
        ("an owner", "loose/keep.txt", ".json", r#""uid":0,"#, r#""uid":1,"#),
    ] {
        let mut daemon = Daemon::start(options("128MiB", CONFIG));
        for path in ["gone.txt", "keep.txt", "run/step2.pt", "run/step3.pt"] {
            save(&daemon, path, &noise(31, FILE_BYTES));
        }
        let keep = daemon.mount().join("keep.txt");
        std::os::unix::fs::symlink("step3.pt", daemon.mount().join("run/latest")).unwrap();
        daemon.flush();
        fs::remove_file(daemon.mount().join("gone.txt")).unwrap();
        daemon.flush();
        daemon.stop();
        let mut documents =
            tier3::files_below(&daemon.tier3_dir().join(".tidemark").join(folder)).into_iter();
        let newest = documents.rfind(|path| path.to_str().unwrap().ends_with(ends)).expect("a document");
        flip_to(&newest, from, to);
        daemon.start_again();
        let key = newest.strip_prefix(daemon.tier3_dir()).unwrap().to_str().unwrap();
        let told = problems(&daemon);
        let is_named = told.iter().any(|(code, what, _)| code == "tier3_not_believed" && what.contains(key));
        assert!(is_named, "{what}: {key} is not in {told:#?}");
        assert_eq!(code(&daemon, &["verify", "--deep"]), Some(4), "{what}");
        if folder == "tree" {
            let link = fs::read_link(daemon.mount().join("run/latest")).expect("an older tree has it");
            assert_eq!(link, Path::new("step3.pt"), "{what}");
        } else {
            let error = fs::read(&keep).expect_err("nobody knows what it was");
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{what}");
        }
        daemon.stop_with_status();
    }
}

#[test]
fn a_loose_file_whose_newest_sidecar_is_not_believed_is_an_error_and_a_tree_is_passed_over() {
    if !machine::can_mount() {
        return;
    }
    let long = ["l".repeat(250), "o".repeat(250), "n".repeat(250), "g".repeat(250)].join("/");
    let mut daemon = Daemon::start(options("128MiB", CONFIG));
    daemon.assert_passthrough();
    for text in ["first", "second"] {
        save(&daemon, "run/notes.txt", text.as_bytes());
        save(&daemon, &format!("{text}/empty/keep.txt"), b"");
        daemon.flush();
    }
    for path in ["run/once.txt", "run/bytes.txt", &long] {
        save(&daemon, path, b"once");
    }
    daemon.flush();
    daemon.stop();
    let ours = daemon.tier3_dir().join(".tidemark");
    let newest = |folder: &Path, ends: &str| {
        let mut names = tier3::files_below(folder).into_iter();
        names.rfind(|path| path.to_str().unwrap().ends_with(ends)).expect("a document")
    };
    let tree = newest(&ours.join("tree"), "");
    fs::write(&tree, br#"{"format":99}"#).unwrap();
    let sidecar = truncate(&newest(&ours.join("loose/run/notes.txt"), ".json"));
    let emptied = ["loose/run/once.txt", "loose/.tidemark/long"].map(|folder| {
        let sidecar = newest(&ours.join(folder), ".json");
        fs::write(&sidecar, b"").unwrap();
        sidecar
    });
    fs::remove_file(newest(&ours.join("loose/run/bytes.txt"), "g-1")).unwrap();
    daemon.start_again();
    let told = problems(&daemon);
    for damaged in [&sidecar, &tree, &emptied[0], &emptied[1]] {
        let key = damaged.strip_prefix(daemon.tier3_dir()).unwrap().to_str().unwrap();
        let names_it =
            |(code, what, _): &(String, String, String)| code == "tier3_not_believed" && what.contains(key);
        assert!(told.iter().any(names_it), "{key} is not in {told:#?}");
    }
    assert!(told.iter().any(|(_, what, _)| what.contains("only the hash of its file's path is known")));
    let are_errors = |daemon: &Daemon| {
        for path in ["run/bytes.txt", "run/notes.txt", "run/once.txt"] {
            let error = fs::read(daemon.mount().join(path)).expect_err("nobody knows what it held last");
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{path}");
        }
        let told = problems(daemon);
        let lost = |(code, what, _): &(String, String, String)| {
            code == "lost" && what.contains("run/bytes.txt") && what.contains("and 2 more files")
        };
        assert!(told.iter().any(lost), "{told:#?}");
        assert_eq!(code(daemon, &["verify", "--deep"]), Some(4));
    };
    are_errors(&daemon);
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    are_errors(&daemon);
    daemon.stop_with_status();
    daemon.start_again();
    are_errors(&daemon);
    // The error ends when the file is saved again, or removed. Then the older generation can be read, as the newest.
    save(&daemon, "run/once.txt", b"again");
    for path in ["run/notes.txt", "run/bytes.txt"] {
        fs::remove_file(daemon.mount().join(path)).unwrap();
    }
    let back = daemon.ctl(&["undelete", "run/notes.txt"]);
    assert!(back.status.success(), "{}", shown(&back));
    daemon.flush();
    assert!(!problems(&daemon).iter().any(|(code, ..)| code == "lost"));
    // The removed file without a good generation cannot be undeleted, and is the only such file.
    let verify = daemon.ctl(&["verify", "--deep", "run", "-o", "json"]);
    let answer: Value = serde_json::from_slice(&verify.stdout).unwrap();
    assert_eq!(verify.status.code(), Some(4), "{answer:#}");
    let named: Vec<_> = answer["unrecoverable"].as_array().unwrap().iter().map(|row| &row["path"]).collect();
    assert_eq!(named, ["run/bytes.txt"], "{answer:#}");
    daemon.stop();
    daemon.start_again();
    assert_holds(&daemon, "run/notes.txt", b"first", "the generation before, undeleted");
    assert_holds(&daemon, "run/once.txt", b"again", "saved after the damage");
    assert!(!daemon.mount().join("run/bytes.txt").exists());
}

#[test]
fn what_is_not_ours_in_tier3_is_left_alone() {
    if !machine::can_mount() {
        return;
    }
    let bytes = noise(4, FILE_BYTES);
    let (mut daemon, tier3) = two_versions(&noise(5, FILE_BYTES), &bytes);
    let strangers = [
        "README",
        "run/step1.pt/v0.2/README",
        "run/step1.pt/v0.x/_COMMITTED",
        "run/step1.pt/v00.3/_COMMITTED",
        "other/_COMMITTED",
        ".tidemark/epoch/latest",
        ".tidemark/tree/9",
        ".tidemark/loose/a/g-x.json",
        ".tidemark/unknown/00000000000000000009",
    ];
    for name in strangers {
        let path = tier3.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "not ours").unwrap();
    }
    daemon.start_again();
    assert_holds(&daemon, PATH, &bytes, "beside strangers");
    save(&daemon, "run/step2.pt", &bytes);
    daemon.flush();
    daemon.stop();
    for name in strangers {
        assert_eq!(fs::read(tier3.join(name)).unwrap(), b"not ours", "{name}");
    }
}
