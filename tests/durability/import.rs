//! Import: checkpoints that other programs wrote into Tier-3 become committed versions, and stay unchanged at their place.
//!
//! Owns: the demands on the mount, and that no imported byte or name is ever changed. Does not own: which of them is whole
//! (protocol and engine, beside the code).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::{process, tier3};

use crate::site::{CHUNK_BYTES, CONFIG, assert_holds, flip, noise, options, save, start};

const DEATH_LIMIT: Duration = Duration::from_secs(30);
const STOP_AT: &str = "TIDEMARK_STOP_NODE_AT";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

fn shard(step: u64, shard: usize) -> Vec<u8> {
    noise(step * 10 + shard as u64, if shard == 0 { CHUNK_BYTES + 99 } else { 1000 })
}

/// Writes a checkpoint as a framework without Tidemark would, or as plain tools copy one.
fn put_foreign(place: &Path, step: u64, shards: usize) {
    fs::create_dir_all(place).unwrap();
    for (index, name) in SHARDS.iter().enumerate().take(shards) {
        fs::write(place.join(name), shard(step, index)).unwrap();
    }
    let index = json!({"metadata": {}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1]}});
    fs::write(place.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Returns every name with its time and its bytes.
fn state(place: &Path) -> BTreeMap<PathBuf, (SystemTime, Vec<u8>)> {
    let state = |path: PathBuf| {
        let written = (fs::metadata(&path).unwrap().modified().unwrap(), fs::read(&path).unwrap());
        (path, written)
    };
    tier3::files_below(place).into_iter().map(state).collect()
}

fn outcomes(import: &Value) -> Vec<(&str, &str)> {
    let rows = import["rows"].as_array().unwrap().iter();
    rows.map(|row| (row["path"].as_str().unwrap(), row["outcome"].as_str().unwrap())).collect()
}

fn import(daemon: &Daemon, args: &[&str], code: i32) -> Value {
    let output = daemon.ctl(&[&["import", "-o", "json"], args].concat());
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", shown(&output));
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

#[test]
fn what_others_wrote_is_on_the_mount_and_is_never_changed_or_deleted() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let old = daemon.tier3_dir().join("old/run");
    for step in [9, 20, 30, 100] {
        put_foreign(&old.join(format!("checkpoint-{step}")), step, 2);
    }
    put_foreign(&old.join("checkpoint-40"), 40, 1);
    fs::write(old.join("notes.txt"), b"of no checkpoint").unwrap();
    let before = state(&old);
    let url = format!("file://{}", old.display());
    let report = import(&daemon, &[&url, "--as", "team/run7"], 1);
    let place = |step: u64| format!("team/run7/checkpoint-{step}");
    let (p9, p20, p30, p40, p100) = (place(9), place(20), place(30), place(40), place(100));
    let expected = [
        (p9.as_str(), "imported"),
        (&p20, "imported"),
        (&p30, "imported"),
        (&p40, "refused"),
        (&p100, "imported"),
    ];
    assert_eq!(outcomes(&report), expected, "{report:#}");
    assert!(report["rows"][3]["reason"].as_str().unwrap().contains("missing"), "{report:#}");
    assert_eq!(report["loose"], 1);
    let again = import(&daemon, &["old/run", "--as", "team/run7"], 1);
    assert!(outcomes(&again).iter().all(|(path, word)| (*path == p40) == (*word == "refused")), "{again:#}");
    let holds = |daemon: &Daemon, steps: &[u64], when: &str| {
        for step in steps {
            for (index, name) in SHARDS.iter().enumerate() {
                assert_holds(daemon, &format!("{}/{name}", place(*step)), &shard(*step, index), when);
            }
        }
        assert_eq!(daemon.checkpoint(&p100).unwrap()["state"], "committed", "{when}");
        assert!(state(&old) == before, "{when}: something of the others' changed");
    };
    holds(&daemon, &[9, 20, 30, 100], "imported");
    assert_eq!(daemon.ctl_json(&["show", "team/run7@latest"])["checkpoint"]["step"], 100, "in order of step");
    daemon.stop();
    daemon.start_again();
    holds(&daemon, &[9, 20, 30, 100], "after a restart with empty memory");
    let verify = daemon.ctl_json(&["verify", "--deep"]);
    assert_eq!(
        (verify["broken"].as_array().map(Vec::len), verify["checkpoints"].as_u64()),
        (Some(0), Some(4)),
        "{verify:#}"
    );
    // A person retires one version, then retention another. Only the names go.
    daemon.ctl_json(&["rm", "team/run7@9"]);
    assert!(!daemon.mount().join(&p9).exists());
    holds(&daemon, &[20, 30, 100], "after rm");
    daemon.stop();
    daemon.set_config(&format!("{CONFIG}[retention]\nkeep_last = 2\n"));
    daemon.start_again();
    let gc = daemon.ctl_json(&["gc"]);
    assert_eq!(gc["left"], 0, "{gc:#}");
    assert!(!daemon.mount().join(&p20).exists(), "{gc:#}");
    daemon.stop();
    daemon.start_again();
    holds(&daemon, &[30, 100], "after retention and the sweep of the next start");
    // Later saves beside the imported checkpoints are ordinary, and an imported file moves into them like any file.
    fs::rename(daemon.mount().join(&p30).join(SHARDS[1]), daemon.mount().join("moved.bin")).unwrap();
    daemon.flush();
    assert_holds(&daemon, "moved.bin", &shard(30, 1), "renamed");
    assert!(state(&old) == before, "something of the others' changed");
}

#[test]
fn an_object_that_others_change_later_is_found_out_and_not_served() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let old = daemon.tier3_dir().join("old/checkpoint-5");
    put_foreign(&old, 5, 2);
    let report = import(&daemon, &["old", "--as", "new"], 0);
    assert_eq!(outcomes(&report), [("new/checkpoint-5", "imported")], "{report:#}");
    daemon.stop();
    daemon.start_again();
    flip(&old.join(SHARDS[0]), 12);
    let error = fs::read(daemon.mount().join("new/checkpoint-5").join(SHARDS[0])).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    assert_holds(&daemon, &format!("new/checkpoint-5/{}", SHARDS[1]), &shard(5, 1), "the other is as it was");
    assert_eq!(daemon.ctl(&["verify", "--deep"]).status.code(), Some(4));
}

#[test]
fn what_cannot_be_imported_is_refused_with_words_and_nothing_of_it_is_left() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, "own/step7.pt", &noise(7, 1000));
    daemon.flush();
    let old = daemon.tier3_dir().join("old");
    put_foreign(&old.join("checkpoint-5"), 5, 2);
    // The indices are one of a save that was cut, one that leads out of its directory, and one that is a program.
    for (name, metadata) in
        [("cut", &b"\x80\x02}q\x00("[..]), ("program", b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00trueR.")]
    {
        let place = old.join(name).join("step-1");
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("__0_0.distcp"), b"bytes").unwrap();
        fs::write(place.join(".metadata"), metadata).unwrap();
    }
    let out = old.join("out/checkpoint-1");
    fs::create_dir_all(&out).unwrap();
    fs::write(out.join("model.safetensors.index.json"), br#"{"weight_map":{"a":"../../../etc/passwd"}}"#)
        .unwrap();
    fs::write(out.join(SHARDS[0]), b"x").unwrap();
    let before = state(&daemon.tier3_dir());
    for (args, says) in [
        (&["old/cut", "--as", "cut"][..], "cannot be used"),
        (&["old/program", "--as", "program"], "cannot be used"),
        (&["old/out", "--as", "out"], "cannot be used"),
        (&["old", "--as", "old"], "among those of"),
        (&["old/checkpoint-5", "--as", "own/checkpoint-5"], "would be older"),
        (&["old/checkpoint-5", "--as", "own/step7.pt"], "checkpoint of that name"),
    ] {
        let report = import(&daemon, args, 1);
        let rows = report["rows"].as_array().unwrap();
        let told = rows
            .iter()
            .all(|row| row["outcome"] == "refused" && row["reason"].as_str().unwrap().contains(says));
        assert!(told && !rows.is_empty(), "{args:?} should say {says:?}: {report:#}");
    }
    for (args, code) in [
        (&["none"][..], 3),
        (&["old/../.tidemark"], 2),
        (&[".tidemark/epoch"], 2),
        (&["s3://other/run"], 2),
        (&["old/checkpoint-5", "--as", ".tidemark/x"], 2),
        (&["old/checkpoint-5", "--as", ".tidemark"], 2),
        (&[""], 2),
    ] {
        import(&daemon, args, code);
    }
    daemon.flush();
    assert!(state(&daemon.tier3_dir()) == before, "something was written");
}

#[test]
fn no_symbolic_link_in_tier3_is_imported() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let (old, aside) = (daemon.tier3_dir().join("old"), daemon.scratch("aside"));
    put_foreign(&old.join("checkpoint-5"), 5, 2);
    put_foreign(&aside.join("checkpoint-6"), 6, 2);
    put_foreign(&old.join("checkpoint-7"), 7, 1);
    symlink(aside.join("checkpoint-6"), old.join("checkpoint-6")).unwrap();
    symlink(aside.join("checkpoint-6").join(SHARDS[1]), old.join("checkpoint-7").join(SHARDS[1])).unwrap();
    let report = import(&daemon, &["old", "--as", "new"], 1);
    let expected = [("new/checkpoint-5", "imported"), ("new/checkpoint-7", "refused")];
    assert_eq!(outcomes(&report), expected, "{report:#}");
    for from in ["old/checkpoint-6", "old/checkpoint-6/checkpoint-6"] {
        let output = daemon.ctl(&["import", from, "--as", "led"]);
        assert!(!output.status.success() && shown(&output).contains("symbolic link"), "{}", shown(&output));
    }
    let led = daemon.mount().join("led");
    assert!(!led.exists() && !daemon.mount().join("new/checkpoint-6").exists());
}

/// If the daemon dies at any step of an import, the checkpoint is whole after the next start, or the import can be repeated.
#[test]
fn stopped_at_any_step_of_an_import_it_is_whole_or_not_there() {
    for (stop, there) in [
        ("commit.after_attempt", false),
        ("commit.after_prepared", true),
        ("commit.before_marker", true),
        ("commit.after_marker", true),
    ] {
        let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
        let old = daemon.tier3_dir().join("old");
        put_foreign(&old.join("checkpoint-5"), 5, 2);
        let before = state(&old);
        daemon.stop();
        daemon.set_env(STOP_AT, Some(&format!("{stop}:1")));
        daemon.start_again();
        daemon.ctl(&["import", "old", "--as", "new"]);
        let status = daemon.wait_for_death(DEATH_LIMIT).unwrap_or_else(|| panic!("{stop} was never reached"));
        assert_eq!(status.signal(), Some(9), "{stop}: {}", daemon.log_tail());
        daemon.set_env(STOP_AT, None);
        daemon.start_again();
        let name = format!("new/checkpoint-5/{}", SHARDS[0]);
        assert_eq!(daemon.mount().join(&name).exists(), there, "{stop}: {}", daemon.log_tail());
        let report = import(&daemon, &["old", "--as", "new"], 0);
        let word = if there { "already" } else { "imported" };
        assert_eq!(outcomes(&report), [("new/checkpoint-5", word)], "{stop}: {report:#}");
        assert_holds(&daemon, &name, &shard(5, 0), stop);
        process::until(DEATH_LIMIT, || (state(&old) == before).then_some(()))
            .expect("the others' bytes stay");
    }
}
