//! A checkpoint that its job removed in part, or saved in another shape: is it distinguished from a lost one?
//!
//! Owns: the output of `ckptctl recover --plan` and `why` for it, and undeleting it. Does not own: damage (`lost`), removals of a whole
//! checkpoint (`removed`).

use std::fs::File;
use std::io::Write;
use std::process::Command;
use std::time::Duration;

use tidemark_tests::daemon::Daemon;
use tidemark_tests::process;

use crate::lost::plan;
use crate::site::{CONFIG, assert_holds, noise, options, save, start};

const LIMIT: Duration = Duration::from_secs(60);

/// Removes a file by a process that ends well.
fn rm(daemon: &Daemon, path: &str) {
    let status = Command::new("rm").arg(daemon.mount().join(path)).status();
    assert!(status.unwrap().success(), "rm {path}");
}

/// Waits until the removal counts as meant, and returns the plan's reason for the only version.
fn wait_thinned(daemon: &Daemon) -> String {
    let said = || {
        let (_, said) = plan(daemon);
        let row = &said["runs"][0]["versions"][0];
        (row["removed_in_part"] == true).then(|| row["reason"].as_str().unwrap().to_owned())
    };
    process::until(LIMIT, said).unwrap_or_else(|| panic!("{:#}", plan(daemon).1))
}

#[test]
fn what_a_job_removed_a_part_of_is_not_lost_and_undelete_brings_the_rest_back() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    let [model, optimizer] = ["run/step_1/model.pt", "run/step_1/optim.pt"];
    save(&daemon, model, &noise(1, 300_000));
    save(&daemon, optimizer, &noise(2, 300_000));
    daemon.flush();
    for restart in [false, true] {
        rm(&daemon, optimizer);
        daemon.flush();
        if restart {
            daemon.stop();
            daemon.start_again();
        }
        let reason = wait_thinned(&daemon);
        assert!(reason.contains("1 of 2 files are left") && reason.contains("undelete"), "{reason}");
        let (code, thinned) = plan(&daemon);
        assert_eq!(code, Some(0), "{thinned:#}");
        assert!(thinned["runs"][0]["chosen"].is_null(), "it is not whole: {thinned:#}");
        daemon.ctl_json(&["undelete", "run/step_1"]);
        assert_holds(&daemon, model, &noise(1, 300_000), "it was not removed");
        assert_holds(&daemon, optimizer, &noise(2, 300_000), "undeleted");
        let whole = || (plan(&daemon).1["runs"][0]["chosen"]["step"] == 1).then_some(());
        process::until(LIMIT, whole).unwrap_or_else(|| panic!("{:#}", plan(&daemon).1));
    }
}

/// While a file of a checkpoint is being overwritten, the outcome is unknown.
#[test]
fn what_was_removed_in_part_and_is_written_over_is_not_taken_for_meant() {
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let [model, optimizer] = ["run/step_1/model.pt", "run/step_1/optim.pt"];
    save(&daemon, model, &noise(1, 300_000));
    save(&daemon, optimizer, &noise(2, 300_000));
    daemon.flush();
    rm(&daemon, optimizer);
    wait_thinned(&daemon);
    let mut open = File::create(daemon.mount().join(model)).unwrap();
    open.write_all(&noise(3, 70_000)).unwrap();
    let lost = || (plan(&daemon).0 == Some(4)).then_some(());
    process::until(LIMIT, lost).unwrap_or_else(|| panic!("{:#}", plan(&daemon).1));
    let (_, said) = plan(&daemon);
    assert_eq!(said["runs"][0]["versions"][0]["removed_in_part"], false, "{said:#}");
}

/// Returns a model of one tensor of 16 bytes.
fn safetensors(byte: u8) -> Vec<u8> {
    let header = br#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    let length = u64::try_from(header.len()).unwrap();
    [&length.to_le_bytes()[..], header, &[byte; 16]].concat()
}

#[test]
fn a_model_that_is_saved_in_shards_beside_its_one_file_is_not_lost() {
    const INDEX: &str = r#"{"metadata":{},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
    let Some(daemon) = start(options("256MiB", CONFIG)) else { return };
    let single = "models/m/model.safetensors";
    save(&daemon, "models/m/config.json", b"{}");
    save(&daemon, single, &safetensors(1));
    daemon.wait_committed(single, LIMIT);
    for (number, name) in [(2, "model-00001-of-00002.safetensors"), (3, "model-00002-of-00002.safetensors")] {
        save(&daemon, &format!("models/m/{name}"), &safetensors(number));
    }
    save(&daemon, "models/m/model.safetensors.index.json", INDEX.as_bytes());
    daemon.wait_committed("models/m", LIMIT);
    let (code, said) = plan(&daemon);
    assert_eq!(code, Some(0), "{said:#}");
    assert_eq!(said["runs"].as_array().unwrap().len(), 1, "the file is a part of another now: {said:#}");
    assert_eq!(said["runs"][0]["chosen"]["path"], "models/m", "{said:#}");
    let why = daemon.ctl_json(&["why", single]);
    assert_eq!(why["in_sight"], true, "{why:#}");
    assert!(why["sight"].as_str().is_some_and(|sight| sight.contains("models/m now")), "{why:#}");
    let listed = daemon.checkpoint(single).expect("ls lists it");
    assert_eq!(listed["state"], "committed", "{listed:#}");
    assert_eq!(listed["copies"]["host"]["files"], 1, "{listed:#}");
}
