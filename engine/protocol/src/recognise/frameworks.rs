//! What each framework's checkpoints look like: names, and what they prove.
//!
//! Owns: the table. Does not own: how a rule is applied (`rules`), what follows (`evidence`). Sources and the order of each
//! framework's system calls: `engine/design/0010-recognition.md`.
//!
//! The order matters where a directory fits several: a framework that saves through another one stands before it.

use super::spec::{IndexKind, MarkerBy, RuleSpec, TrackerHolds};

const STEP_DIRECTORY: &str = r"(?i-u)^(?:(?:global_step|step|iter|iteration|checkpoint|ckpt|epoch|ep|ba)[-_=]?(?<step>\d+)[-_,.]?)+(?:ckpt)?$";
/// Also under the name that it has while torch_checkpointing writes it.
const STEP_DIRECTORY_IN_FLIGHT: &str = r"(?i-u)^(?:tmp_)?(?:(?:global_step|step|iter|iteration|checkpoint|ckpt|epoch|ep|ba)[-_=]?(?<step>\d+)[-_,.]?)+(?:ckpt)?$";
/// Files that `save_pretrained` of transformers and of PEFT writes before any weights.
pub(super) const FOREWORDS: [&[u8]; 3] = [b"config.json", b"generation_config.json", b"README.md"];
/// What torch.save's users call a rank's part.
const RANK_PART: &str = r"(?-u)(?:^|[^A-Za-z])(?:mp_rank_|rank[-_]?|shard[-_]?)(?<rank>\d+)";
/// Logs and pictures that a rank, often only one, leaves beside its state for people.
const RANK_LOG: &str = r"(?i-u)\.(?:log|out|err|txt|csv|tsv|jsonl|md|html?|pdf|png|jpe?g|gif|webp|svg|wav|mp[34]|trace\.json(?:\.gz)?)$";
const DCP_SHARD: &str = r"(?-u)^__(?<rank>\d+)_\d+\.distcp$";
/// Megatron may put a hint before it.
const MEGATRON_SHARD: &str = r"(?-u)__(?<rank>\d+)_\d+\.distcp$";
const SAFETENSORS: &str = r"(?-u)-of-\d{5}\.safetensors$|\.safetensors\.index\.json$";
/// Endings of torch.save's files, and of safetensors.
pub(super) const TORCH_FILE: &str = r"\.(?:pt|pth|bin|ckpt|safetensors|pth\.tar)$";
/// Endings of other formats: of HDF5 and Keras, numpy, pickle, Flax, XGBoost, GGML, ONNX.
pub(super) const OTHER_FILE: &str = r"\.(?:h5|keras|npz|pkl|msgpack|ubj|gguf|onnx)$";
/// Those of the formats that hold anything, where the last word says that it is no state of a training; and what Accelerate numbers
/// by rank and object, not by step.
const OTHER_DATA: &str = concat!(
    r"(?i-u)(?:(?:^|[^a-z])(?:data|datasets?|samples?|features?|embeddings?|labels?|predictions?|preds|outputs?|results?",
    r"|scores?|metrics?|metadata|meta|history|logs?|stats|statistics|summary|vocab|vocabulary|tokens?|tokenizer|index",
    r"|indices|cache|config|args|hparams|settings|info)|^(?:[xy][-_])?(?:train|val|valid|validation|test|eval))",
    r"[^a-z]*\.(?:h5|npz|pkl|msgpack)$|^custom_checkpoint_\d+\.pkl$|^random_states_\d+\.pkl$",
);
/// Of ZeRO 1 and above: each rank's part of the optimizer, and with ZeRO 3 of the model.
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

/// What wraps other formats, and knows when its own part is done.
fn saved_by_trainers() -> Vec<RuleSpec> {
    vec![
        // The process that saves writes trainer_state.json last and waits for nobody: other ranks' random states and, under
        // DeepSpeed and FSDP, their parts may come later.
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
        // No marker. Random states are the last that each rank writes. The number counts saves, not steps.
        RuleSpec {
            name: "accelerate".into(),
            directory: some(r"(?-u)^checkpoint_(?<step>\d+)$"),
            signature: some(r"(?-u)^random_states_\d+\.pkl$"),
            on_top: true,
            each_rank: some(r"(?-u)^random_states_(?<rank>\d+)\.pkl$"),
            more_follows: true,
            ..RuleSpec::default()
        },
        // `<directory>-unfinished` lies beside it from before its first byte until all ranks are done.
        RuleSpec {
            name: "nemo".into(),
            directory: some(r"(?-u)(?:^|[-_])step=(?<step>\d+)-consumed_samples="),
            signature: some(MEGATRON_SHARD),
            unfinished: some(r"(?-u)^(?<name>.+)-unfinished$"),
            more_follows: true,
            ..RuleSpec::default()
        },
        // A directory where the strategy shards, else one file, renamed from $TMPDIR where that is on the mount.
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

/// What trains, with formats of its own.
fn saved_by_engines() -> Vec<RuleSpec> {
    vec![
        // DCP's index is what proves it. metadata.json, hashes of all files and what runs on top of Megatron adds follow; with
        // `--ckpt-format torch_dcp` nothing does.
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
        // Its tracker lies outside, so the files say nothing of the number of ranks.
        RuleSpec {
            name: "megatron_torch".into(),
            directory: some(r"(?-u)^iter_(?<step>\d{7,})$|^release$"),
            signature: some(r"(?-u)^(?:model_optim_rng|distrib_optim)\.pt$|^layer_wise_optimizer_\d+\.pt$"),
            more_follows: true,
            tracker: some(r"^latest_checkpointed_iteration\.txt$"),
            tracker_holds: Some(TrackerHolds::Step),
            ..RuleSpec::default()
        },
        // `latest`, beside the directory, is written by rank 0 alone, before the others are done.
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
        // Under a tag of the user's.
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
        // Items and then the step's directory are renamed into place by the first process, after barriers.
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
        // `tmp_<name>` is renamed by rank 0 after a barrier. Items have the names that the user gives them: these are its
        // tutorial's and torchtitan's. Any others are torch_save's, which a rename proves too.
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
        // Each rank's directory holds files of several ranks' data; each is renamed when it is whole.
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

/// What others save through.
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
        // `.metadata` is renamed into place by the coordinator after all ranks reported; without collectives each
        // rank renames its own.
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
        // Whatever torch.save writes. In a directory named for a step it makes that directory one checkpoint. Who writes
        // under another name and renames, says so that all is there.
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
        // The same for what is saved without torch. These formats hold data, too, and a run's results must not count as its
        // newest checkpoint.
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
