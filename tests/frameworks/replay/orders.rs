//! The calls of each framework's save in order, and the names that its resume code looks for.
//!
//! Owns: both, as far as names go. Does not own: the bytes' meaning, except for the index that the daemon
//! reads.

use std::fs;
use std::path::Path;

use super::job::{Act, Call};

/// A framework, and its job's number of ranks here.
pub(crate) struct Framework {
    pub(crate) name: &'static str,
    pub(crate) ranks: usize,
    /// The calls that save a step.
    pub(crate) save: fn(u64) -> Vec<Call>,
    /// The step from which the framework resumes, by names and trackers.
    pub(crate) resume: fn(&Path) -> Option<u64>,
}

/// Megatron-LM: shards by all ranks, `.metadata` by rename, `metadata.json`, then the tracker beside the directory.
pub(crate) const MEGATRON: Framework = Framework {
    name: "megatron",
    ranks: 2,
    save: |step| {
        let directory = format!("iter_{step:07}");
        let mut calls = vec![make(0, &directory), make(1, &directory)];
        calls.push(write(0, format!("{directory}/common.pt"), step));
        calls.extend(dcp(&directory, step));
        calls.push(text(0, format!("{directory}/metadata.json"), r#"{"sharded_backend": "torch_dist"}"#));
        calls.push(text(0, "latest_checkpointed_iteration.txt".into(), &step.to_string()));
        calls
    },
    resume: |run| {
        let tracker = fs::read_to_string(run.join("latest_checkpointed_iteration.txt")).ok()?;
        tracker.trim().parse().ok()
    },
};

/// NeMo: `<directory>-unfinished` exists from before the first byte until all ranks are done.
pub(crate) const NEMO: Framework = Framework {
    name: "nemo",
    ranks: 2,
    save: |step| {
        let directory = format!("model--step={step}-consumed_samples={step}.0");
        let unfinished = format!("{directory}-unfinished");
        let mut calls = vec![text(0, unfinished.clone(), "")];
        calls.extend([make(0, &directory), make(0, &format!("{directory}/weights"))]);
        calls.extend([make(1, &format!("{directory}/weights")), make(0, &format!("{directory}/context"))]);
        calls.extend(dcp(&format!("{directory}/weights"), step));
        calls.push(text(0, format!("{directory}/weights/metadata.json"), "{}"));
        calls.push(text(0, format!("{directory}/context/model.yaml"), "model: 1"));
        calls.push(Call { rank: 0, act: Act::Remove(unfinished) });
        calls
    },
    resume: |run| {
        let listed = names(run);
        let directories = listed.iter().filter(|name| !name.ends_with("-unfinished"));
        let finished = directories.filter(|name| !listed.contains(&format!("{name}-unfinished")));
        finished.filter_map(|name| name.split("step=").nth(1)?.split('-').next()?.parse().ok()).max()
    },
};

/// Orbax: renames items and then the step into place.
pub(crate) const ORBAX: Framework = Framework {
    name: "orbax",
    ranks: 2,
    save: |step| {
        let step_tmp = format!("{step}.orbax-checkpoint-tmp");
        let item_tmp = format!("{step_tmp}/default.orbax-checkpoint-tmp");
        let part = |rank: usize| format!("{item_tmp}/ocdbt.process_{rank}/d");
        let mut calls = vec![make(0, &step_tmp), text(0, format!("{step_tmp}/_CHECKPOINT_METADATA"), "{}")];
        calls.extend([make(0, &item_tmp), make(0, &part(0)), make(1, &part(1))]);
        for rank in 0..2 {
            calls.push(write(rank, format!("{}/0123456789abcdef0123456789abcde{rank}", part(rank)), step));
            let manifest = format!("{item_tmp}/ocdbt.process_{rank}/manifest.ocdbt");
            calls.push(write(rank, manifest, step));
        }
        calls.push(write(0, format!("{item_tmp}/manifest.ocdbt"), step));
        calls.push(text(0, format!("{item_tmp}/_METADATA"), "{}"));
        calls.push(rename(0, &item_tmp, &format!("{step_tmp}/default")));
        calls.push(text(0, format!("{step_tmp}/_CHECKPOINT_METADATA"), r#"{"commit_timestamp_nsecs": 1}"#));
        calls.push(rename(0, &step_tmp, &step.to_string()));
        calls
    },
    resume: |run| names(run).iter().filter_map(|name| name.parse().ok()).max(),
};

/// torch_checkpointing: renames the directory when every rank has written.
pub(crate) const TORCH_CHECKPOINTING: Framework = Framework {
    name: "torch_checkpointing",
    ranks: 2,
    save: |step| {
        let tmp = format!("tmp_step_{step}");
        let mut calls = vec![make(0, &tmp), make(1, &tmp)];
        for rank in 0..2 {
            for item in ["model", "optimizer", "step"] {
                calls.push(write(rank, format!("{tmp}/{item}_{rank}.pt"), step));
            }
        }
        calls.push(rename(0, &tmp, &format!("step_{step}")));
        calls
    },
    resume: |run| names(run).iter().filter_map(|name| name.strip_prefix("step_")?.parse().ok()).max(),
};

/// torchtitan: a step counts when it has `.metadata`.
pub(crate) const TORCHTITAN: Framework = Framework {
    name: "torchtitan",
    ranks: 2,
    save: |step| {
        let directory = format!("checkpoint/step-{step}");
        let mut calls = vec![make(0, &directory), make(1, &directory)];
        calls.extend(dcp(&directory, step));
        calls
    },
    resume: |run| {
        let checkpoint = run.join("checkpoint");
        let indexed = |name: &&String| checkpoint.join(name).join(".metadata").exists();
        let listed = names(&checkpoint);
        listed.iter().filter(indexed).filter_map(|name| name.strip_prefix("step-")?.parse().ok()).max()
    },
};

/// DeepSpeed's ZeRO: rank 0 writes `latest` without a barrier.
pub(crate) const DEEPSPEED: Framework = Framework {
    name: "deepspeed",
    ranks: 2,
    save: |step| {
        let directory = format!("global_step{step}");
        let part = |rank: usize| format!("{directory}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
        vec![
            make(0, &directory),
            make(1, &directory),
            write(0, format!("{directory}/mp_rank_00_model_states.pt"), step),
            write(0, part(0), step),
            text(0, "latest".into(), &directory),
            write(1, part(1), step),
        ]
    },
    resume: |run| {
        let latest = fs::read_to_string(run.join("latest")).ok()?;
        latest.strip_prefix("global_step")?.parse().ok()
    },
};

/// Returns the calls of a DCP save: two shards, then the index by rename.
fn dcp(directory: &str, step: u64) -> Vec<Call> {
    let shards = [0, 1].map(|rank| (format!("__{rank}_0.distcp"), noise(step, rank)));
    let mut index = b"\x80\x02(".to_vec();
    for (name, bytes) in &shards {
        let word = |text: &str| {
            let length = u32::try_from(text.len()).expect("short");
            [b"X", &length.to_le_bytes()[..], text.as_bytes()].concat()
        };
        let length = i32::try_from(bytes.len()).expect("small").to_le_bytes();
        index.extend(b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(");
        index.extend([&word("relative_path")[..], &word(name), &word("offset"), b"K\x00"].concat());
        index.extend([&word("length")[..], b"J", &length, b"ub"].concat());
    }
    index.extend(b"t.");
    let mut calls: Vec<_> = (0..)
        .zip(shards)
        .map(|(rank, (name, bytes))| Call { rank, act: Act::Write(format!("{directory}/{name}"), bytes) })
        .collect();
    let tmp = format!("{directory}/.metadata.tmp");
    calls.push(Call { rank: 0, act: Act::Write(tmp.clone(), index) });
    calls.push(rename(0, &tmp, &format!("{directory}/.metadata")));
    calls
}

fn make(rank: usize, path: &str) -> Call {
    Call { rank, act: Act::Make(path.to_owned()) }
}

fn rename(rank: usize, from: &str, to: &str) -> Call {
    Call { rank, act: Act::Rename(from.to_owned(), to.to_owned()) }
}

/// Returns the call that writes a file of state.
fn write(rank: usize, path: String, step: u64) -> Call {
    let bytes = noise(step, path.len() as u64);
    Call { rank, act: Act::Write(path, bytes) }
}

fn text(rank: usize, path: String, content: &str) -> Call {
    Call { rank, act: Act::Write(path, content.as_bytes().to_vec()) }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Returns bytes that no other step has.
fn noise(step: u64, salt: u64) -> Vec<u8> {
    let mut state = step.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ salt.wrapping_mul(0xD1B5_4A32_D192_ED03) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next).take(3000 + usize::try_from(salt % 100).expect("small")).flatten().collect()
}
