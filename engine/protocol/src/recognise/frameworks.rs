//! The built-in rules: the names in each framework's checkpoints, and what they prove.
//!
//! Owns: the table. Does not own: how a rule is applied (`rules`), its consequences (`evidence`). Sources and the order of each
//! framework's system calls: `engine/design/0010-recognition.md`.
//!
//! The order matters if a directory matches several rules: a framework that saves through another one stands before it.

use super::spec::{IndexKind, MarkerBy, RuleSpec, TrackerHolds};

const STEP_DIRECTORY: &str = r"(?i-u)^(?:(?:global_step|step|iter|iteration|checkpoint|ckpt|epoch|ep|ba)[-_=]?(?<step>\d+)[-_,.]?)+(?:ckpt)?$";
/// As [`STEP_DIRECTORY`], also with the prefix that torch_checkpointing uses while it writes.
const STEP_DIRECTORY_IN_FLIGHT: &str = r"(?i-u)^(?:tmp_)?(?:(?:global_step|step|iter|iteration|checkpoint|ckpt|epoch|ep|ba)[-_=]?(?<step>\d+)[-_,.]?)+(?:ckpt)?$";
/// Files that `save_pretrained` of transformers and of PEFT writes before any weights.
pub(super) const FOREWORDS: [&[u8]; 3] = [b"config.json", b"generation_config.json", b"README.md"];
/// Names that users of torch.save give to a rank's part.
const RANK_PART: &str = r"(?-u)(?:^|[^A-Za-z])(?:mp_rank_|rank[-_]?|shard[-_]?)(?<rank>\d+)";
/// Logs and pictures for people that a rank, often only one, leaves beside its state.
const RANK_LOG: &str = r"(?i-u)\.(?:log|out|err|txt|csv|tsv|jsonl|md|html?|pdf|png|jpe?g|gif|webp|svg|wav|mp[34]|trace\.json(?:\.gz)?)$";
const DCP_SHARD: &str = r"(?-u)^__(?<rank>\d+)_\d+\.distcp$";
/// As [`DCP_SHARD`]; Megatron may put a hint before it.
const MEGATRON_SHARD: &str = r"(?-u)__(?<rank>\d+)_\d+\.distcp$";
const SAFETENSORS: &str = r"(?-u)-of-\d{5}\.safetensors$|\.safetensors\.index\.json$";
/// Endings of torch.save's files, and of safetensors.
pub(super) const TORCH_FILE: &str = r"\.(?:pt|pth|bin|ckpt|safetensors|pth\.tar)$";
/// Endings of other formats: HDF5 and Keras, numpy, pickle, Flax, XGBoost, GGML, ONNX.
pub(super) const OTHER_FILE: &str = r"\.(?:h5|keras|npz|pkl|msgpack|ubj|gguf|onnx)$";
/// Files of general formats whose last word shows that they are no state of a training; also files that Accelerate numbers by rank
/// and object, not by step.
const OTHER_DATA: &str = concat!(
    r"(?i-u)(?:(?:^|[^a-z])(?:data|datasets?|samples?|features?|embeddings?|labels?|predictions?|preds|outputs?|results?",
    r"|scores?|metrics?|metadata|meta|history|logs?|stats|statistics|summary|vocab|vocabulary|tokens?|tokenizer|index",
    r"|indices|cache|config|args|hparams|settings|info)|^(?:[xy][-_])?(?:train|val|valid|validation|test|eval))",
    r"[^a-z]*\.(?:h5|npz|pkl|msgpack)$|^custom_checkpoint_\d+\.pkl$|^random_states_\d+\.pkl$",
);
/// ZeRO 1 and above: each rank's part of the optimizer, and with ZeRO 3 of the model.
const ZERO_PART: &str =
    r"(?-u)^(?:bf16_|fp16_)?zero_pp_rank_(?<rank>\d+)_mp_rank_\d+(?:_\d+)?_(?:optim|model)_states\.pt$";
const DEEPSPEED_FILE: &str =
    r"(?-u)^(?:(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_|mp_rank_|expp_rank_|layer_).*_states\.pt$";

pub(super) fn builtin() -> Vec<RuleSpec> {
    [&saved_by_trainers()[..], &saved_by_engines()[..], &formats()[..]].concat()
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

/// Returns the rules of trainers that wrap other formats, and know when their own part is done.
fn saved_by_trainers() -> Vec<RuleSpec> {
    vec![
        // The process that saves writes trainer_state.json last and waits for no other rank. Other ranks' random states may come
        // later, and so may their parts under DeepSpeed and FSDP.
        RuleSpec {
            name: "hf_trainer".into(),
            directory: some(r"(?-u)^checkpoint-(?<step>\d+)$"),
            signature: some(r"(?-u)^(?:trainer_state\.json|training_args\.bin|rng_state(?:_\d+)?\.pth)$"),
            on_top: true,
            marker: some(r"^trainer_state\.json$"),
            marker_by: MarkerBy::OneRank,
            each_rank: some(r"(?-u)^rng_state_(?<rank>\d+)\.pth$"),
            more_follows: true,
            ..RuleSpec::default()
        },
        // There is no marker. Each rank writes its random states last. The number counts saves, not steps.
        RuleSpec {
            name: "accelerate".into(),
            directory: some(r"(?-u)^checkpoint_(?<step>\d+)$"),
            signature: some(r"(?-u)^random_states_\d+\.pkl$"),
            on_top: true,
            each_rank: some(r"(?-u)^random_states_(?<rank>\d+)\.pkl$"),
            more_follows: true,
            ..RuleSpec::default()
        },
        // `<directory>-unfinished` exists beside it from before its first byte until all ranks are done.
        RuleSpec {
            name: "nemo".into(),
            directory: some(r"(?-u)(?:^|[-_])step=(?<step>\d+)-consumed_samples="),
            signature: some(MEGATRON_SHARD),
            unfinished: some(r"(?-u)^(?<name>.+)-unfinished$"),
            more_follows: true,
            ..RuleSpec::default()
        },
        // A directory if the strategy shards, else one file, which is renamed from $TMPDIR if that is on the mount.
        RuleSpec {
            name: "lightning".into(),
            directory: some(r"(?-u)^(?:(?:.*?epoch=\d+)?-?(?:.*?step=(?<step>\d+)).*|last(?:-v\d+)?)\.ckpt$"),
            signature: some(r"(?-u)^meta\.pt$|^__\d+_\d+\.distcp$|_states\.pt$"),
            single: some(r"(?-u)^(?:.*?epoch=\d+)?-?(?:.*?step=\d+).*\.ckpt$|^last(?:-v\d+)?\.ckpt$"),
            more_follows: true,
            ..RuleSpec::default()
        },
    ]
}

/// Returns the rules of training engines with formats of their own.
fn saved_by_engines() -> Vec<RuleSpec> {
    vec![
        // DCP's index proves it. Then metadata.json follows, hashes of all files, and files of programs that run on top of
        // Megatron. With `--ckpt-format torch_dcp` nothing follows.
        RuleSpec {
            name: "megatron".into(),
            directory: some(r"(?-u)^iter_(?<step>\d{7,})$|^release$"),
            signature: some(MEGATRON_SHARD),
            on_top: true,
            shard: some(MEGATRON_SHARD),
            index: some(r"^integrity\.json$"),
            index_kind: Some(IndexKind::Megatron),
            more_follows: true,
            tracker: some(r"^latest_checkpointed_iteration\.txt$"),
            tracker_holds: Some(TrackerHolds::Step),
            ..RuleSpec::default()
        },
        // The tracker lies outside, so the files do not show the number of ranks.
        RuleSpec {
            name: "megatron_torch".into(),
            directory: some(r"(?-u)^iter_(?<step>\d{7,})$|^release$"),
            signature: some(r"(?-u)^(?:model_optim_rng|distrib_optim)\.pt$|^layer_wise_optimizer_\d+\.pt$"),
            more_follows: true,
            tracker: some(r"^latest_checkpointed_iteration\.txt$"),
            tracker_holds: Some(TrackerHolds::Step),
            ..RuleSpec::default()
        },
        // `latest`, beside the directory, is written by rank 0 alone, before the other ranks are done.
        RuleSpec {
            name: "deepspeed".into(),
            directory: some(r"(?-u)^global_step(?<step>\d+)$"),
            signature: some(DEEPSPEED_FILE),
            each_rank: some(ZERO_PART),
            anywhere: true,
            more_follows: true,
            tracker: some(r"^latest$"),
            tracker_holds: Some(TrackerHolds::Name),
            ..RuleSpec::default()
        },
        // The same under a tag of the user's.
        RuleSpec {
            name: "deepspeed".into(),
            signature: some(DEEPSPEED_FILE),
            each_rank: some(ZERO_PART),
            anywhere: true,
            more_follows: true,
            tracker: some(r"^latest$"),
            tracker_holds: Some(TrackerHolds::Name),
            ..RuleSpec::default()
        },
        RuleSpec {
            name: "deepspeed_universal".into(),
            directory: some("^zero$"),
            signature: some(r"(?-u)^(?:fp32|exp_avg|exp_avg_sq|step)\.pt$"),
            more_follows: true,
            tracker: some(r"^latest_universal$"),
            tracker_holds: Some(TrackerHolds::Name),
            ..RuleSpec::default()
        },
        // The first process renames items and then the step's directory into place, after barriers.
        RuleSpec {
            name: "orbax".into(),
            directory: some(
                r"(?-u)^(?:(?:global_step|step|iter|checkpoint|ckpt|epoch)_)?(?<step>\d+)(?:\.orbax-checkpoint-tmp(?:-\d+)?)?$",
            ),
            signature: some("^_CHECKPOINT_METADATA$"),
            on_top: true,
            renamed: true,
            in_flight: some(r"(?-u)\.orbax-checkpoint-tmp(?:-\d+)?$"),
            temporary: some(r"\.__lock$"),
            ..RuleSpec::default()
        },
        // Rank 0 renames `tmp_<name>` after a barrier. Items have the names that the user gives them: these are its tutorial's and
        // torchtitan's. Other items match torch_save, which a rename proves too.
        RuleSpec {
            name: "torch_checkpointing".into(),
            directory: some(STEP_DIRECTORY_IN_FLIGHT),
            signature: some(r"(?-u)^(?:model|optimizer|train_state)_\d+\.pt$"),
            on_top: true,
            shard: some(RANK_PART),
            except: some(RANK_LOG),
            renamed: true,
            in_flight: some("^tmp_."),
            ..RuleSpec::default()
        },
        // Each rank's directory holds files with several ranks' data; each file is renamed when it is whole.
        RuleSpec {
            name: "nvrx_local".into(),
            single: some(r"(?-u)^iter_\d{7}_\d+_local\.pt$"),
            temporary: some(r"\.dirty\.pt$"),
            ..RuleSpec::default()
        },
        RuleSpec {
            name: "composer".into(),
            single: some(r"(?-u)^ep\d+-ba\d+-rank\d+(?:\.pt)?$"),
            shard: some(r"(?-u)^ep\d+-ba\d+-rank(?<rank>\d+)(?:\.pt)?$"),
            ..RuleSpec::default()
        },
    ]
}

/// Returns the rules of formats that others save through.
fn formats() -> Vec<RuleSpec> {
    vec![
        // The validity test of torchtitan itself: `step-N` below `checkpoint` with `.metadata` or the index.
        RuleSpec {
            name: "torchtitan".into(),
            directory: some(r"(?-u)^step-(?<step>\d+)$"),
            parent: some("^checkpoint$"),
            signature: Some(format!(r"(?-u)^__\d+_\d+\.distcp$|{SAFETENSORS}")),
            ..RuleSpec::default()
        },
        // The coordinator renames `.metadata` into place after all ranks reported; without collectives each rank renames its own.
        RuleSpec {
            name: "dcp".into(),
            signature: some(DCP_SHARD),
            shard: some(DCP_SHARD),
            index: some(r"^\.metadata$"),
            index_kind: Some(IndexKind::Dcp),
            rank_marker: some(r"(?-u)^__(?<rank>\d+)\.metadata$"),
            anywhere: true,
            temporary: some(r"(?-u)^\.metadata\.tmp$|^__\d+\.metadata\.tmp$"),
            ..RuleSpec::default()
        },
        RuleSpec {
            name: "safetensors".into(),
            signature: some(SAFETENSORS),
            shard: some(r"(?-u)-of-\d{5}\.safetensors$"),
            index: some(r"\.safetensors\.index\.json$"),
            index_kind: Some(IndexKind::Safetensors),
            anywhere: true,
            temporary: some(r"(?-u)^\.tmp[A-Za-z0-9]{6}$"),
            ..RuleSpec::default()
        },
        // Any file that torch.save writes. In a directory named for a step it makes that directory one checkpoint. A program that
        // writes under another name and then renames thereby declares all files written.
        RuleSpec {
            name: "torch_save".into(),
            directory: some(STEP_DIRECTORY),
            // Raw bytes of a rank have no extension; a rank's log or picture has one, and makes no checkpoint.
            signature: some(
                r"(?-u)\.(?:pt|pth|bin|ckpt|safetensors|distcp|pth\.tar)$|(?:^|[^A-Za-z])(?:mp_rank_|rank[-_]?|shard[-_]?)\d+[^.]*$",
            ),
            shard: some(RANK_PART),
            except: some(RANK_LOG),
            renamed: true,
            single: some(TORCH_FILE),
            temporary: some(r"(?-u)\.tmp$|^\.tmp|\.partial$|\.incomplete$|^tmp_.*\.(?:pt|pth)$"),
            ..RuleSpec::default()
        },
        // The same for files saved without torch. Such formats also hold data, and a run's results must not count as its newest
        // checkpoint.
        RuleSpec {
            name: "file".into(),
            directory: some(STEP_DIRECTORY),
            signature: some(OTHER_FILE),
            shard: some(RANK_PART),
            renamed: true,
            single: some(OTHER_FILE),
            except: Some(format!("{OTHER_DATA}|{RANK_LOG}")),
            ..RuleSpec::default()
        },
    ]
}
