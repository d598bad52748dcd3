//! Prefetch: a checkpoint is fetched before it is opened, as far as there is room. Eviction keeps memory between its marks.
//!
//! Owns: the promises of `ckptctl prefetch` and `ckptctl tiers` about room. Does not own: fetching (suite s3, frameworks).

use std::fs;
use std::time::Duration;

use serde_json::Value;
use tidemark_tests::daemon::{Daemon, shown};
use tidemark_tests::process;

use crate::site::{CONFIG, MIB, NEVER_SETTLES, assert_holds, noise, options, save, start, tier};

const LIMIT: Duration = Duration::from_secs(60);

/// Returns the files of checkpoint `step`, each with its bytes.
fn shards(step: u64, count: usize, bytes: usize) -> Vec<(String, Vec<u8>)> {
    // The names have letters, because digits would make the files one series.
    let names = ["a", "b", "c", "d", "e", "f"].into_iter().zip(0..).take(count);
    names
        .map(|(name, number)| (format!("run/step{step}/{name}.bin"), noise(step * 10 + number, bytes)))
        .collect()
}

fn save_all(daemon: &Daemon, files: &[(String, Vec<u8>)]) {
    for (path, bytes) in files {
        save(daemon, path, bytes);
    }
}

fn fetched_bytes(daemon: &Daemon) -> f64 {
    daemon.metric("tidemark_fetch_bytes_total", &[])
}

#[test]
fn a_prefetched_checkpoint_opens_without_a_fetch() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let files = shards(1, 4, 20 * MIB + 7);
    save_all(&daemon, &files);
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    let came = daemon.ctl_json(&["prefetch", "run/step1"]);
    assert_eq!((&came["fetched_files"], &came["here_files"]), (&Value::from(4), &Value::from(0)), "{came:#}");
    let before = fetched_bytes(&daemon);
    assert!(before >= (80 * MIB) as f64, "it came from Tier-3: {before}");
    for (path, bytes) in &files {
        assert_holds(&daemon, path, bytes, "prefetched");
    }
    assert_eq!(fetched_bytes(&daemon), before, "opening and reading fetched nothing more");
    let again = daemon.ctl_json(&["prefetch", "run/step1"]);
    assert_eq!(again["here_files"], 4, "{again:#}");

    daemon.stop();
    daemon.start_again();
    let under_way = daemon.ctl_json(&["prefetch", "run/step1", "--no-wait"]);
    assert_eq!((&under_way["waited"], &under_way["total_files"]), (&Value::from(false), &Value::from(4)));
    let all = process::until(LIMIT, || (fetched_bytes(&daemon) >= (80 * MIB) as f64).then_some(()));
    assert!(all.is_some(), "it goes on by itself: {}", fetched_bytes(&daemon));
}

#[test]
fn a_prefetch_takes_nothing_from_what_is_not_committed_and_says_what_did_not_fit() {
    let Some(mut daemon) = start(options("256MiB", NEVER_SETTLES)) else { return };
    let old = shards(1, 5, 25 * MIB);
    save_all(&daemon, &old);
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    // The new bytes, 150 of some 240 MiB, have no other copy.
    let new = shards(2, 6, 25 * MIB);
    save_all(&daemon, &new);
    let output = daemon.ctl(&["prefetch", "run/step1", "-o", "json"]);
    assert_eq!(output.status.code(), Some(1), "some of it has no room: {}", shown(&output));
    let came: Value = serde_json::from_slice(&output.stdout).unwrap();
    let no_room = came["no_room"].as_array().unwrap();
    let fetched = came["fetched_files"].as_u64().unwrap();
    assert!(fetched >= 1 && !no_room.is_empty(), "{came:#}");
    assert_eq!(fetched + no_room.len() as u64, 5, "{came:#}");
    assert!(no_room[0]["what"].as_str().unwrap().contains("available"), "{came:#}");
    let before = fetched_bytes(&daemon);
    for (path, bytes) in &new {
        assert_holds(&daemon, path, bytes, "not committed");
    }
    assert_eq!(fetched_bytes(&daemon), before, "none of it had to come back");
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    for (path, bytes) in old.iter().chain(&new) {
        assert_holds(&daemon, path, bytes, "with empty memory");
    }
}

#[test]
fn memory_gives_way_above_the_high_mark_down_to_the_low_one_and_tiers_says_what_it_waits_for() {
    let config = format!("{NEVER_SETTLES}[tier1]\nhigh_percent = 60\nlow_percent = 30\n");
    let Some(daemon) = start(options("256MiB", &config)) else { return };
    let files = shards(1, 4, 40 * MIB);
    save_all(&daemon, &files);
    let full = tier(&daemon, "tier1");
    let marks = &full["marks"];
    let (high, low) = (marks["high_bytes"].as_u64().unwrap(), marks["low_bytes"].as_u64().unwrap());
    assert_eq!(
        (high * 10 / (256 << 20), low * 10 / (256 << 20)),
        (5, 2),
        "less than 60 and 30 percent by rounding: {marks:#}"
    );
    assert!(full["used_bytes"].as_u64().unwrap() > high, "{full:#}");
    let reasons = full["held_by"].as_object().unwrap();
    let waiting: u64 = ["closed, not sealed yet", "not committed yet"]
        .iter()
        .filter_map(|reason| reasons.get(*reason)?.as_u64())
        .sum();
    assert!(waiting >= 160 << 20, "{full:#}");
    // Eviction passes over an open file.
    let open = fs::File::open(daemon.mount().join(&files[0].0)).unwrap();
    daemon.flush();
    let fell = process::until(LIMIT, || {
        let now = tier(&daemon, "tier1");
        (now["used_bytes"].as_u64()? <= low).then_some(now)
    });
    let fell = fell.unwrap_or_else(|| panic!("{:#}", tier(&daemon, "tier1")));
    assert!(fell["held_by"].as_object().unwrap().is_empty(), "{fell:#}");
    assert!(fell["used_bytes"].as_u64().unwrap() >= 40 << 20, "the open one is here: {fell:#}");
    drop(open);
}
