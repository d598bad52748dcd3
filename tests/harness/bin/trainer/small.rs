//! Saves a step of many parts: small files in a temporary directory, which is then renamed.
//!
//! Owns: the order of the calls. A promise made below the temporary name holds below the new name after the rename.

use std::fs::OpenOptions;
use std::time::Duration;

use crate::acts::{Stop, Trainer};

const PARTS: u64 = 24;
const PART_BYTES_MAX: u64 = 16 << 10;
/// Number of steps that are kept. Older steps are removed, part by part, as a rotation does.
const STEPS_KEPT: u64 = 3;

/// Saves a step: mkdir, parts, rename of the directory, and the removal of the step that is too old.
pub(crate) fn small(trainer: &mut Trainer) -> Result<(), Stop> {
    let step = trainer.round;
    trainer.round += 1;
    let (building, done) = (format!("step_{step}.tmp"), format!("step_{step}"));
    trainer.folder(&building)?;
    for part in 0..PARTS {
        let name = format!("{building}/part-{part}.bin");
        let size_bytes = trainer.dice.within(1..PART_BYTES_MAX);
        let bytes = trainer.dice.bytes(usize::try_from(size_bytes).expect("some KiB"));
        trainer.will(&name, None)?;
        let mut file = trainer.open(&name, OpenOptions::new().write(true).create_new(true))?;
        trainer.write(&name, &mut file, &bytes)?;
        trainer.close(&name, file, &bytes)?;
    }
    trainer.rename(&building, &done)?;
    // Stands for some training between two saves.
    std::thread::sleep(Duration::from_millis(trainer.dice.within(5..60)));
    if let Some(old) = step.checked_sub(STEPS_KEPT) {
        for part in 0..PARTS {
            trainer.unlink(&format!("step_{old}/part-{part}.bin"))?;
        }
        trainer.remove_folder(&format!("step_{old}"))?;
    }
    Ok(())
}
