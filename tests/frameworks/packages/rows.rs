//! Packages that resume from the highest step that they find, and the special behaviour of each.
//!
//! Owns: their rows. Does not own: the test of a row (`mod`).

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::machine;

use super::life::{Ending, Life, Steps};
use super::{KILLS_OF_A_SIBLING, LONG_ENOUGH_TO_COMMIT_S, Package, ROW, comes_back, resumed, start};
use crate::{content, environment};

/// Time longer than the settle time.
const SETTLED: Duration = Duration::from_secs(1);

const TWO_RANKS: Package = Package { ranks: 2, ranks_then: 2, ..ROW };

const ACCELERATE: Package = Package {
    name: "accelerate",
    script: "accelerate_saves.py",
    ranks: 2,
    ranks_then: 2,
    arguments: &["2"],
    // A checkpoint does not list what a user registered. For the first save, there is no earlier one to compare.
    between_chairs: |run| {
        let first = names(&run.join("checkpoints/checkpoint_0"));
        let only = names(&run.join("checkpoints")).len() == 1;
        only && first.iter().filter(|name| name.starts_with("random_states")).count() == 2
            && !first.iter().any(|name| name.starts_with("custom_checkpoint"))
    },
    ..ROW
};

/// The trainer removes the oldest by the directories' mtimes, which a restart with empty memory must restore.
#[test]
fn hugging_face_trainer_with_a_total_limit() {
    // Accelerate has the kills of Hugging Face's two packages. The start with empty memory, on which this row's order of removal
    // depends, comes with every kill count.
    let kills = KILLS_OF_A_SIBLING;
    comes_back(&Package { name: "hf-trainer", script: "hf_trainer.py", kills, ..TWO_RANKS });
}

/// Accelerate removes the oldest before it writes, so that one of two is left.
#[test]
fn accelerate_with_a_total_limit() {
    comes_back(&ACCELERATE);
}

/// Orbax writes in the background under a temporary name, with locks, renames over locked files, and fsync of directories.
#[test]
fn orbax_with_jax() {
    comes_back(&Package { name: "orbax", script: "orbax_saves.py", ..ROW });
}

/// torch_checkpointing writes with O_DIRECT into a directory that is renamed.
#[test]
fn torch_checkpointing() {
    comes_back(&Package { name: "torch-checkpointing", script: "torch_checkpointing_saves.py", ..TWO_RANKS });
}

/// The save has no common index. Each rank has its own, and nothing shows that all are there.
#[test]
fn torch_distributed_checkpoint_without_collectives() {
    comes_back(&Package { name: "dcp-alone", script: "dcp_alone.py", ..TWO_RANKS });
}

/// Two ranks save, then one, then two again.
#[test]
fn torch_distributed_checkpoint_by_fewer_ranks() {
    let kills = KILLS_OF_A_SIBLING;
    comes_back(&Package { name: "dcp-elastic", script: "dcp_elastic.py", ranks_then: 1, kills, ..TWO_RANKS });
}

/// A directory gets shards over a single file, which the job removes first, and a single file over shards, which transformers removes.
#[test]
fn hugging_face_sharded_and_single_by_turns() {
    comes_back(&Package {
        name: "hf-pretrained",
        script: "hf_pretrained.py",
        between_saves_s: LONG_ENOUGH_TO_COMMIT_S,
        kills: KILLS_OF_A_SIBLING,
        between_chairs: |run| is_young(&run.join("model.safetensors")),
        ..ROW
    });
}

/// The job saves an adapter, and the optimizer beside it.
#[test]
fn peft_adapters() {
    comes_back(&Package {
        name: "peft",
        script: "peft_adapters.py",
        between_saves_s: LONG_ENOUGH_TO_COMMIT_S,
        kills: KILLS_OF_A_SIBLING,
        // A card alone is hidden within a second or two. If the node is lost before, the card comes back.
        between_chairs: |run| {
            let checkpoints = names(run).into_iter().map(|checkpoint| run.join(checkpoint));
            let mut checkpoints = checkpoints.filter(|checkpoint| {
                names(checkpoint) == ["README.md"] || is_young(&checkpoint.join("random.pt"))
            });
            checkpoints.next().is_some()
        },
        ..ROW
    });
}

/// Whether a file is whole but too young: only the settle time shows that it is the last of its checkpoint.
fn is_young(last: &Path) -> bool {
    let age = fs::metadata(last).and_then(|found| found.modified()).ok().and_then(|at| at.elapsed().ok());
    age.is_some_and(|age| age < SETTLED) && content::is_whole(last)
}

/// Keras writes a new file at every epoch.
#[test]
fn keras_model_checkpoint() {
    let kills = KILLS_OF_A_SIBLING;
    comes_back(&Package { name: "keras", script: "keras_saves.py", kills, ..ROW });
}

/// Keras writes the same two files at every epoch.
#[test]
fn keras_backup_and_restore() {
    // In the short form only Keras's row with new files is killed: Lightning's `last.ckpt` covers a save in place.
    if !machine::long() {
        return;
    }
    comes_back(&Package {
        name: "keras-backup",
        script: "keras_saves.py",
        arguments: &["backup"],
        between_saves_s: LONG_ENOUGH_TO_COMMIT_S,
        kills: KILLS_OF_A_SIBLING,
        // While the weights are written and the other file is not, nothing shows the weights' epoch.
        between_chairs: |run| {
            let backup = run.join("backup");
            let (weights, epoch) = (backup.join("latest.weights.h5"), backup.join("training_metadata.json"));
            let written = |path: &Path| fs::metadata(path).and_then(|found| found.modified()).ok();
            let is_older = written(&epoch) < written(&weights);
            is_older && content::is_whole(&weights)
                || fs::metadata(&epoch).is_ok_and(|found| found.len() == 0)
        },
        ..ROW
    });
}

/// The handler of SIGTERM raises in the middle of `torch.save`, which closes the file as if it were whole. Since only the newest is
/// kept, counting it would cost the job its last good one.
#[test]
fn preempted_in_the_middle_of_torch_save() {
    comes_back(&Package {
        name: "preempted",
        script: "preempted.py",
        ending: Ending::Preempted,
        kills: KILLS_OF_A_SIBLING,
        config: "[retention]\nkeep_last = 1\n",
        ..ROW
    });
}

/// In the save of step 3, only the last file is missing, a user's registered object, without which Accelerate's load fails.
#[test]
fn accelerate_killed_before_it_writes_what_was_registered() {
    let Some(python) = environment() else { return };
    // The settle time is so long that the kill surely comes in it.
    let config = Some("[save]\nsettle_s = 30\n[tier3]\npaced = false\n".to_owned());
    let daemon = Daemon::start(DaemonOptions { tier1: "1GiB".into(), config, ..DaemonOptions::default() });
    let outside = daemon.scratch("outside");
    let row = |arguments| Package { arguments, ..ACCELERATE };
    let (well, stops) = (row(&["2"]), row(&["2", "random", "3"]));
    let run = daemon.mount().join(ACCELERATE.name).join("checkpoints");
    let files = |step: u64| names(&run.join(format!("checkpoint_{}", step - 1)));

    // By then, the last of the files is closed.
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

/// The directory exists and is empty. Accelerate would load from it, and fail.
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

/// With a limit of one, no checkpoint is left between delete and write. The removed checkpoint comes back.
#[test]
fn accelerate_killed_between_its_delete_and_its_write() {
    let Some(python) = environment() else { return };
    let daemon = crate::daemon("1GiB");
    let outside = daemon.scratch("outside");
    let row = |arguments| Package { arguments, ..ACCELERATE };
    let (well, stops) = (row(&["1"]), row(&["1", "deleted", "3"]));
    let run = daemon.mount().join(ACCELERATE.name).join("checkpoints");
    // The wait is longer than a running save leaves the directory empty.
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

/// Checks that a job killed in the save of step 3 resumes at 2, and then runs to its end.
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
