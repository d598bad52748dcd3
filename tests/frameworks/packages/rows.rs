//! Packages that take the highest step they find, and what each does beside writing it.
//!
//! Owns: their rows. Does not own: what is done with a row (`mod`).

use super::{Package, ROW, comes_back};

/// Removes the oldest by the directories' mtimes, which a restart with empty memory must give back.
#[test]
fn hugging_face_trainer_with_a_total_limit() {
    comes_back(&Package { name: "hf-trainer", script: "hf_trainer.py", ranks: 2, ..ROW });
}

/// Removes the oldest before it writes: of two, one is left.
#[test]
fn accelerate_with_a_total_limit() {
    comes_back(&Package {
        name: "accelerate",
        script: "accelerate_saves.py",
        ranks: 2,
        arguments: &["2"],
        ..ROW
    });
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
