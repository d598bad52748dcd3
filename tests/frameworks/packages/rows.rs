//! Packages that take the highest step they find, and what each does beside writing it.
//!
//! Owns: their rows. Does not own: what is done with a row (`mod`).

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, DaemonOptions};

use super::life::{Life, Steps};
use super::{KILLS_OF_A_SIBLING, Package, ROW, comes_back, resumed, start};
use crate::environment;

const ACCELERATE: Package = Package {
    name: "accelerate",
    script: "accelerate_saves.py",
    ranks: 2,
    arguments: &["2"],
    // Nothing says what a user registered; of the first save not even the one before it does.
    between_chairs: |run| {
        let first = names(&run.join("checkpoints/checkpoint_0"));
        let only = names(&run.join("checkpoints")).len() == 1;
        only && first.iter().filter(|name| name.starts_with("random_states")).count() == 2
            && !first.iter().any(|name| name.starts_with("custom_checkpoint"))
    },
    ..ROW
};

/// Removes the oldest by the directories' mtimes, which a restart with empty memory must give back.
#[test]
fn hugging_face_trainer_with_a_total_limit() {
    // Of Hugging Face's two, Accelerate has the kills. The start with empty memory, on which this row's order of removal depends,
    // comes with every kill count.
    let kills = KILLS_OF_A_SIBLING;
    comes_back(&Package { name: "hf-trainer", script: "hf_trainer.py", ranks: 2, kills, ..ROW });
}

/// Removes the oldest before it writes: of two, one is left.
#[test]
fn accelerate_with_a_total_limit() {
    comes_back(&ACCELERATE);
}

/// Writes in the background under a temporary name, with locks, renames over what is locked, and fsync of directories.
#[test]
fn orbax_with_jax() {
    comes_back(&Package { name: "orbax", script: "orbax_saves.py", ..ROW });
}

/// Writes with O_DIRECT into a directory that is renamed.
#[test]
fn torch_checkpointing() {
    comes_back(&Package {
        name: "torch-checkpointing",
        script: "torch_checkpointing_saves.py",
        ranks: 2,
        ..ROW
    });
}

/// Has no index of the whole: each rank has its own, and nobody says that all are there.
#[test]
fn torch_distributed_checkpoint_without_collectives() {
    comes_back(&Package { name: "dcp-alone", script: "dcp_alone.py", ranks: 2, ..ROW });
}

/// Of the save of step 3, all but the last file is there: what a user registered, which Accelerate loads or fails.
#[test]
fn accelerate_killed_before_it_writes_what_was_registered() {
    let Some(python) = environment() else { return };
    // A settle time in which the kill surely comes.
    let config = Some("[save]\nsettle_s = 30\n[tier3]\npaced = false\n".to_owned());
    let daemon = Daemon::start(DaemonOptions { tier1: "1GiB".into(), config, ..DaemonOptions::default() });
    let outside = daemon.scratch("outside");
    let row = |arguments| Package { arguments, ..ACCELERATE };
    let (well, stops) = (row(&["2"]), row(&["2", "random", "3"]));
    let run = daemon.mount().join(ACCELERATE.name).join("checkpoints");
    let files = |step: u64| names(&run.join(format!("checkpoint_{}", step - 1)));

    // Long enough for the last of them to be closed.
    let closed = Duration::from_millis(100);
    let life = start(&stops, &python, daemon.mount(), &outside, 4);
    let (found, killed) = life.killed_when("all but the last file", || {
        sleep(closed);
        let (before, now) = (files(2), files(3));
        now.len() + 1 == before.len()
            && now.iter().filter(|name| name.starts_with("random_states")).count() == 2
    });
    assert_eq!((killed.saved, killed.begun), (Some(2), Some(3)));
    let mut life = start(&well, &python, daemon.mount(), &outside, 4);
    assert_eq!(resumed(&mut life, &daemon, ACCELERATE.name), 2);
    let events = String::from_utf8(daemon.ctl(&["events"]).stdout).expect("text");
    assert!(events.contains("failed at 5 files, and the version before has 6"), "{events}");
    goes_on_as_before(life, &found);
}

/// The directory is there, and nothing in it: Accelerate would load from it, and fail.
#[test]
fn accelerate_killed_before_it_writes_anything() {
    let Some(python) = environment() else { return };
    let daemon = crate::daemon("1GiB");
    let outside = daemon.scratch("outside");
    let row = |arguments| Package { arguments, ..ACCELERATE };
    let (well, stops) = (row(&["2"]), row(&["2", "made", "1"]));
    let first = daemon.mount().join(ACCELERATE.name).join("checkpoints/checkpoint_0");
    let life = start(&stops, &python, daemon.mount(), &outside, 3);
    let (found, killed) = life
        .killed_when("an empty directory", || fs::read_dir(&first).is_ok_and(|listed| listed.count() == 0));
    assert_eq!((killed.saved, killed.begun), (None, Some(1)));
    let mut life = start(&well, &python, daemon.mount(), &outside, 3);
    assert_eq!(resumed(&mut life, &daemon, ACCELERATE.name), 0);
    let (again, _) = life.ends();
    assert!(found.iter().zip(&again).all(|(found, again)| found[&1] == again[&1]), "as it was before");
}

/// Of a limit of one nothing is left between the two. What was removed is back.
#[test]
fn accelerate_killed_between_its_delete_and_its_write() {
    let Some(python) = environment() else { return };
    let daemon = crate::daemon("1GiB");
    let outside = daemon.scratch("outside");
    let row = |arguments| Package { arguments, ..ACCELERATE };
    let (well, stops) = (row(&["1"]), row(&["1", "deleted", "3"]));
    let run = daemon.mount().join(ACCELERATE.name).join("checkpoints");
    // Longer than a save leaves it empty that goes on.
    let goes_on = Duration::from_secs(1);
    let is_empty = || fs::read_dir(&run).is_ok_and(|listed| listed.count() == 0);

    let life = start(&stops, &python, daemon.mount(), &outside, 4);
    let (found, killed) = life.killed_when("an empty directory", || {
        is_empty() && {
            sleep(goes_on);
            is_empty()
        }
    });
    assert_eq!((killed.saved, killed.begun), (Some(2), Some(3)));
    let mut life = start(&well, &python, daemon.mount(), &outside, 4);
    assert_eq!(resumed(&mut life, &daemon, ACCELERATE.name), 2);
    let events = String::from_utf8(daemon.ctl(&["events"]).stdout).expect("text");
    assert!(events.contains("removed it, and failed before anything else of the run was whole"), "{events}");
    goes_on_as_before(life, &found);
}

/// What was killed in the save of step 3 comes back at 2, and to its end.
fn goes_on_as_before(life: Life, found: &Steps) {
    let (again, _) = life.ends();
    for (rank, (found, again)) in found.iter().zip(&again).enumerate() {
        assert_eq!(found[&2], again[&2], "rank {rank}: as it was saved");
        assert_eq!(found[&3], again[&3], "rank {rank}: as it went on before");
    }
}

fn names(directory: &Path) -> Vec<String> {
    let Ok(listed) = fs::read_dir(directory) else { return vec![] };
    listed.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect()
}
