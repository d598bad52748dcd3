//! Two situations at the end of a memory that random operations hardly reach: a file was renamed just before, or Tier-3 had an unproven
//! save.
//!
//! Owns: the calls that cause them, and the checks afterwards. Does not own: when they happen (`main`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidemark_tests::campaign::dice::Dice;
use tidemark_tests::process;

use crate::Life;
use crate::operation::Sequence;

/// Longest time between renames and the loss of the memory, in which Tier-3 gets some hundred files.
const LOST_WITHIN_MS: u64 = 300;

/// Share of lives, as one in this many, with a file whose upload takes longer than a tree document's.
const LONG_ONE_IN: u64 = 4;
const LONG_BYTES: usize = 64 << 20;

/// Number of files of a save by several processes, and of those that the next save rewrites.
const RANKS: usize = 3;
const RANKS_AGAIN: usize = 2;
/// Limit of settling, many times `settle_s`, for a busy machine.
const SETTLES_WITHIN: Duration = Duration::from_secs(20);

impl Life<'_> {
    /// Renames a file of each sequence, and loses the memory a moment later, while a flush waits for all of it to be in Tier-3. Afterwards,
    /// each file must be there with its bytes, under its new or its old name.
    pub(crate) fn rename_and_lose(&mut self, sequences: &[Sequence], dice: &mut Dice) -> Result<(), String> {
        let long = self.daemon.mount().join(format!("long{}", self.number));
        let mut files = Vec::new();
        if self.number.is_multiple_of(LONG_ONE_IN) {
            let (file, bytes) = (long.join("trace.log"), dice.bytes(LONG_BYTES));
            let saved = fs::create_dir(&long).and_then(|()| fs::write(&file, &bytes));
            saved.map_err(|error| format!("{}: {error}", file.display()))?;
            self.flush(&mut [])?;
            files.push((file, long.join("renamed"), bytes));
        }
        files.extend(sequences.iter().filter_map(|sequence| {
            let (file, bytes) = sequence.file_of_one_name()?;
            Some((file, sequence.root.join("renamed"), bytes.to_vec()))
        }));
        let mut renamed = Vec::new();
        for (from, to, bytes) in files {
            fs::rename(&from, &to).map_err(|error| format!("renaming {}: {error}", from.display()))?;
            renamed.push((from, to, bytes));
        }
        let after = Duration::from_millis(dice.within(0..LOST_WITHIN_MS));
        std::thread::scope(|scope| {
            // Removals go to Tier-3 at once if a flush waits.
            scope.spawn(|| self.daemon.ctl(&["flush", "--wait", "--timeout", "1"]));
            std::thread::sleep(after);
            process::kill_node(self.daemon.keeper_pid());
        });
        self.daemon.kill9();
        self.daemon.start_again();
        let holds = |path: &Path, bytes: &[u8]| fs::read(path).is_ok_and(|read| read == bytes);
        let lost = renamed.iter().filter(|(from, to, bytes)| !holds(from, bytes) && !holds(to, bytes));
        let lost: Vec<_> = lost
            .map(|(from, to, _)| format!("neither {} nor {} is there", from.display(), to.display()))
            .collect();
        if !lost.is_empty() {
            return Err(format!("lost {after:?} after a rename:\n{}", lost.join("\n")));
        }
        if long.exists() {
            fs::remove_dir_all(&long).map_err(|error| format!("removing {}: {error}", long.display()))?;
        }
        Ok(())
    }

    /// Saves only some files of a checkpoint, so that it is never proven whole. Tier-3 has the files all the same: after a stop
    /// without a flush before it, their names show what they showed.
    pub(crate) fn settle_and_stop(&mut self, dice: &mut Dice) -> Result<(), String> {
        let name = format!("settled{}", self.number);
        let (step, root) = (format!("{name}/step_9"), self.daemon.mount().join(name));
        let files: Vec<_> = (0..RANKS).map(|rank| root.join(format!("step_9/rank{rank}.pt"))).collect();
        fs::create_dir_all(root.join("step_9")).map_err(|error| format!("{step}: {error}"))?;
        let mut held: Vec<Vec<u8>> = (0..RANKS).map(|_| dice.bytes(5000)).collect();
        self.save_by_others(&files, &held)?;
        self.flush(&mut [])?;
        held[..RANKS_AGAIN].fill_with(|| dice.bytes(7000));
        self.save_by_others(&files[..RANKS_AGAIN], &held[..RANKS_AGAIN])?;
        // If a busy machine takes longer than `settle_s` between two processes, each is the only one of its save, and commits it.
        let ended = || {
            let row = self.daemon.checkpoint(&step)?;
            let there = row["copies"]["object"]["files"].as_u64().unwrap_or(0);
            match row["state"].as_str()? {
                "settled" if there > 0 => Some(true),
                "committed" if there == RANKS as u64 => Some(false),
                _ => None,
            }
        };
        let settled =
            process::until(SETTLES_WITHIN, ended).ok_or_else(|| format!("{step} does not settle"))?;
        self.counts.settled.fetch_add(settled.into(), Ordering::Relaxed);
        self.daemon.stop_with_status();
        self.daemon.start_again();
        let wrong = |(path, bytes): (&PathBuf, &Vec<u8>)| !fs::read(path).is_ok_and(|read| read == *bytes);
        if files.iter().zip(&held).any(wrong) {
            return Err(format!("{step} settled, and does not show what it showed"));
        }
        fs::remove_dir_all(&root).map_err(|error| format!("removing {step}: {error}"))
    }

    /// Saves each file from a process of its own, so that nothing proves that all are there.
    fn save_by_others(&self, files: &[PathBuf], held: &[Vec<u8>]) -> Result<(), String> {
        let aside = self.daemon.scratch("by-others").join("bytes");
        let copy = |path: &Path, bytes: &[u8]| {
            fs::write(&aside, bytes)?;
            Command::new("cp").arg(&aside).arg(path).status()
        };
        for (path, bytes) in files.iter().zip(held) {
            let copied = copy(path, bytes).map_err(|error| format!("{}: {error}", path.display()))?;
            assert!(copied.success(), "{}", path.display());
        }
        Ok(())
    }
}
