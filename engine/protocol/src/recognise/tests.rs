//! Names, and the checkpoints that they make.

use super::*;
use proptest::prelude::*;

fn paths(texts: &[&str]) -> Vec<RelPath> {
    texts.iter().map(|text| RelPath::new(*text).unwrap()).collect()
}

/// Groups the texts into `run|name|framework|step|files`, one line per candidate.
fn grouped(texts: &[&str]) -> Vec<String> {
    let paths = paths(texts);
    let grouping = Rules::builtin().group(&paths);
    let line = |c: &Candidate| {
        let step = c.step.map_or_else(|| "-".to_owned(), |step| step.to_string());
        format!("{}|{}|{}|{step}|{}", c.id.run, c.id.directory, c.framework, c.files.len())
    };
    grouping.candidates.iter().map(line).collect()
}

#[test]
fn dcp_is_any_directory_that_holds_its_shards() {
    let files =
        ["any/place/__0_0.distcp", "any/place/__1_0.distcp", "any/place/.metadata", "any/place/meta.pt"];
    assert_eq!(grouped(&files), ["any|place|dcp|-|4"]);
    assert_eq!(grouped(&["__0_0.distcp"]), ["_|%2E|dcp|-|1"]);
    let roles: Vec<_> =
        Rules::builtin().group(&paths(&files)).candidates[0].files.values().copied().collect();
    assert!(roles.contains(&Role::Index(IndexKind::Dcp)));
    assert!(roles.contains(&Role::Shard { rank: Some(1) }));
}

#[test]
fn torchtitan_is_dcp_under_its_own_names() {
    let files = ["out/checkpoint/step-100/__0_0.distcp", "out/checkpoint/step-100/.metadata"];
    assert_eq!(grouped(&files), ["out/checkpoint|step-100|torchtitan|100|2"]);
    assert_eq!(grouped(&["out/step-7/__0_0.distcp"]), ["out|step-7|dcp|7|1"]);
}

#[test]
fn plain_files_are_checkpoints_by_themselves() {
    assert_eq!(grouped(&["r/step100.pt"]), ["r|step100.pt|torch_save|100|1"]);
    assert_eq!(grouped(&["model.pt"]), ["_|model.pt|torch_save|-|1"]);
    assert_eq!(grouped(&["r/model_epoch=3-step=40.ckpt"]), ["r|model_epoch=3-step=40.ckpt|lightning|40|1"]);
    assert_eq!(grouped(&["r/notes.txt", "r/latest"]), [""; 0]);
}

#[test]
fn files_of_other_formats_are_checkpoints_by_themselves() {
    for name in [
        "latest.weights.h5",
        "model.keras",
        "state.npz",
        "model_final.pkl",
        "train_state.msgpack",
        "xgb.ubj",
        "test-model.gguf",
        "metadata.onnx",
        "optimizer.pkl",
    ] {
        assert_eq!(grouped(&[&format!("r/{name}")]), [format!("r|{name}|file|-|1")]);
    }
    assert_eq!(grouped(&["r/checkpoint_30.pth.tar"]), ["r|checkpoint_30.pth.tar|torch_save|30|1"]);
    assert_eq!(grouped(&["r/epoch_3/step_100.h5"]), ["r/epoch_3|step_100.h5|file|100|1"]);
    assert_eq!(grouped(&["r/w_rank0.npz", "r/w_rank1.npz"]), ["r|w_rank*.npz|file|-|2"]);
    let directory = ["r/step_5/model.h5", "r/step_5/optimizer.pkl", "r/step_5/metrics.pkl"];
    assert_eq!(grouped(&directory), ["r|step_5|file|5|3"]);
    // In a checkpoint of another kind they are its parts.
    let parts =
        ["hf/model-00001-of-00002.safetensors", "hf/optimizer.pkl", "hf/rng_state.pkl", "hf/model.onnx"];
    assert_eq!(grouped(&parts), ["_|hf|safetensors|-|4"]);
    let saved =
        ["r/checkpoint-9/trainer_state.json", "r/checkpoint-9/optimizer.pkl", "r/checkpoint-9/model.h5"];
    assert_eq!(grouped(&saved), ["r|checkpoint-9|hf_trainer|9|3"]);
}

#[test]
fn ranks_of_one_name_are_one_version() {
    let family = ["r/step5_rank0.pt", "r/step5_rank1.pt", "r/step6_rank0.pt"];
    assert_eq!(grouped(&family), ["r|step5_rank*.pt|torch_save|5|2", "r|step6_rank*.pt|torch_save|6|1"]);
    let directory = ["r/step_5/rank_0.pt", "r/step_5/rank_1.pt", "r/step_5/config.json"];
    assert_eq!(grouped(&directory), ["r|step_5|torch_save|5|3"]);
}

#[test]
fn a_word_that_ends_in_rank_is_none_and_a_rank_s_log_makes_no_checkpoint() {
    let files = ["r/frank1.pt", "r/frank2.pt"];
    assert_eq!(grouped(&files), ["r|frank1.pt|torch_save|-|1", "r|frank2.pt|torch_save|-|1"]);
    for name in ["samples_rank0.png", "train_rank0.log", "frank1", "rank0.trace.json"] {
        assert_eq!(grouped(&[&format!("r/epoch_3/{name}")]), [""; 0], "{name}");
    }
    for name in ["rank0", "mp_rank_00", "shard-3", "latest-rank1"] {
        assert_eq!(grouped(&[&format!("r/epoch_3/{name}")]), ["r|epoch_3|torch_save|3|1"], "{name}");
    }
}

#[test]
fn nested_checkpoints_fold_into_the_outermost() {
    let files = [
        "r/checkpoint-500/global_step500/mp_rank_00_model_states.pt",
        "r/checkpoint-500/trainer_state.json",
        "r/checkpoint-500/pytorch_model_fsdp_0/__0_0.distcp",
        "r/checkpoint-500/custom_checkpoint_0.pkl",
    ];
    assert_eq!(grouped(&files), ["r|checkpoint-500|hf_trainer|500|4"]);
    let run = ["hf/model-00001-of-00002.safetensors", "hf/checkpoint-5/model.safetensors"];
    assert_eq!(grouped(&run), ["_|hf|safetensors|-|1", "hf|checkpoint-5|torch_save|5|1"]);
    let steps = ["epoch_3/step_100.pt", "epoch_3/step_200.pt"];
    assert_eq!(
        grouped(&steps),
        ["epoch_3|step_100.pt|torch_save|100|1", "epoch_3|step_200.pt|torch_save|200|1"]
    );
}

/// A line for each framework: the files of one save as it makes them, and their roles.
#[test]
fn each_framework_is_known_by_its_files() {
    let table: &[(&[&str], &[&str])] = &[
        (
            &[
                "r/checkpoint-9/model.safetensors",
                "r/checkpoint-9/optimizer.pt",
                "r/checkpoint-9/trainer_state.json",
            ],
            &["r|checkpoint-9|hf_trainer|9|3"],
        ),
        (
            &[
                "r/checkpoints/checkpoint_3/model.safetensors",
                "r/checkpoints/checkpoint_3/random_states_0.pkl",
            ],
            &["r/checkpoints|checkpoint_3|accelerate|3|2"],
        ),
        (
            &[
                "nemo/gpt--val_loss=0.5-step=9-consumed_samples=80.0-last/weights/__0_0.distcp",
                "nemo/gpt--val_loss=0.5-step=9-consumed_samples=80.0-last/context/io.json",
            ],
            &["nemo|gpt--val_loss=0.5-step=9-consumed_samples=80.0-last|nemo|9|2"],
        ),
        (
            &["r/epoch=1-step=20.ckpt", "r/last.ckpt"],
            &["r|epoch=1-step=20.ckpt|lightning|20|1", "r|last.ckpt|lightning|-|1"],
        ),
        (
            &[
                "r/epoch=1-step=20.ckpt/__0_0.distcp",
                "r/epoch=1-step=20.ckpt/.metadata",
                "r/epoch=1-step=20.ckpt/meta.pt",
            ],
            &["r|epoch=1-step=20.ckpt|lightning|20|3"],
        ),
        (
            &["r/last.ckpt/checkpoint/mp_rank_00_model_states.pt", "r/last.ckpt/latest"],
            &["r|last.ckpt|lightning|-|2"],
        ),
        (
            &[
                "r/iter_0000100/__0_0.distcp",
                "r/iter_0000100/metadata.json",
                "r/latest_checkpointed_iteration.txt",
            ],
            &["r|iter_0000100|megatron|100|2"],
        ),
        (&["r/release/__0_0.distcp", "r/release/.metadata"], &["r|release|megatron|-|2"]),
        (
            &["r/iter_0000100/mp_rank_00/model_optim_rng.pt", "r/iter_0000100/mp_rank_01/model_optim_rng.pt"],
            &["r|iter_0000100|megatron_torch|100|2"],
        ),
        (
            &[
                "r/global_step8/mp_rank_00_model_states.pt",
                "r/global_step8/zero_pp_rank_0_mp_rank_00_optim_states.pt",
                "r/latest",
            ],
            &["r|global_step8|deepspeed|8|2"],
        ),
        (&["r/best/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], &["r|best|deepspeed|-|1"]),
        (
            &["out/zero/layer.weight/fp32.pt", "out/zero/layer.weight/exp_avg.pt"],
            &["out|zero|deepspeed_universal|-|2"],
        ),
        (
            &["r/7/_CHECKPOINT_METADATA", "r/7/default/d/0123", "r/7/default/manifest.ocdbt"],
            &["r|7|orbax|7|3"],
        ),
        (
            &[
                "r/7.orbax-checkpoint-tmp/_CHECKPOINT_METADATA",
                "r/7.orbax-checkpoint-tmp/default/manifest.ocdbt",
            ],
            &["r|7.orbax-checkpoint-tmp|orbax|7|2"],
        ),
        (
            &[
                "r/step_4/model_0.pt",
                "r/step_4/optimizer_1.pt",
                "r/step_4/step_0.pt",
                "r/step_4/metadata.pkl",
            ],
            &["r|step_4|torch_checkpointing|4|4"],
        ),
        (&["r/tmp_step_4/model_0.pt", "r/tmp_step_4/step_0.pt"], &["r|tmp_step_4|torch_checkpointing|4|2"]),
        (&["r/step_4/net_0.pt"], &["r|step_4|torch_save|4|1"]),
        (&["r/epoch_4/step_0.pt"], &["r/epoch_4|step_0.pt|torch_save|0|1"]),
        (&["s/0/iter_0000010_1_local.pt"], &["s/0|iter_0000010_1_local.pt|nvrx_local|10|1"]),
        (&["r/ep1-ba20-rank0.pt", "r/ep1-ba20-rank1.pt"], &["r|ep1-ba20-rank*.pt|composer|20|2"]),
        (&["r/ep1-ba20-rank0"], &["r|ep1-ba20-rank*|composer|20|1"]),
        (
            &[
                "verl/global_step_5/actor/model_world_size_2_rank_0.pt",
                "verl/global_step_5/actor/model_world_size_2_rank_1.pt",
            ],
            &["verl|global_step_5|torch_save|5|2"],
        ),
    ];
    for (files, expected) in table {
        assert_eq!(grouped(files), *expected, "{files:?}");
    }
}

#[test]
fn names_that_look_like_checkpoints_are_none_without_their_files() {
    for files in [
        &["r/2024/notes.txt"][..],
        &["r/7/data.bin.idx", "r/7/default/manifest.ocdbt"],
        &["r/checkpoint-9/README.md"],
        &["zero/a.txt", "release/a.txt"],
        &["r/step=3-consumed_samples=1-unfinished"],
    ] {
        assert_eq!(grouped(files), [""; 0], "{files:?}");
    }
    assert_eq!(grouped(&["2024/x/step_5.pt"]), ["2024/x|step_5.pt|torch_save|5|1"], "a year is no step");
    assert_eq!(grouped(&["r/1/model.pt"]), ["r/1|model.pt|torch_save|-|1"]);
}

#[test]
fn what_says_that_a_directory_is_unfinished_belongs_to_it() {
    let files = paths(&[
        "r/a-step=3-consumed_samples=1/weights/__0_0.distcp",
        "r/a-step=3-consumed_samples=1-unfinished",
    ]);
    let rules = Rules::builtin();
    let grouping = rules.group(&files);
    assert_eq!(grouping.candidates[0].temporaries.len(), 1);
    assert_eq!(rules.scope(&files[1]), rules.scope(&files[0]), "they are grouped together");
    assert!(rules.group(&files[1..]).temporaries.contains(&files[1]));
}

#[test]
fn markers_and_indices_are_some_only_in_their_own_framework() {
    let rules = Rules::builtin();
    let role = |framework, name| rules.role(framework, &RelPath::new(name).unwrap());
    assert_eq!(role("hf_trainer", "r/x/trainer_state.json"), Role::Marker);
    assert_eq!(role("torch_save", "r/x/trainer_state.json"), Role::Other);
    assert_eq!(role("megatron", "r/x/integrity.json"), Role::Index(IndexKind::Megatron));
    assert_eq!(role("torch_save", "r/x/integrity.json"), Role::Other, "anybody's file may be called so");
    assert_eq!(role("torch_save", "r/x/random_states_0.pkl"), Role::Other);
    let part = "r/x/zero_pp_rank_1_mp_rank_00_optim_states.pt";
    assert_eq!(
        role("hf_trainer", part),
        Role::EachRank { rank: 1 },
        "what another saves through counts there too"
    );
    assert_eq!(role("dcp", "r/x/ema_0.pt"), Role::Shard { rank: None });
}

#[test]
fn a_file_that_many_write_makes_no_checkpoint_of_its_directory() {
    assert_eq!(
        grouped(&["r/metadata.pkl", "r/step100.pt", "r/train.log"]),
        ["r|step100.pt|torch_save|100|1"],
        "a pickle beside checkpoints"
    );
    for data in
        ["metrics.pkl", "dataset.h5", "train_data.npz", "val-metrics_100.npz", "Test.h5", "tokens.msgpack"]
    {
        assert_eq!(grouped(&[&format!("r/{data}")]), [""; 0], "{data} is no state of a training");
        assert_eq!(
            grouped(&[&format!("r/step_5/{data}")]),
            [""; 0],
            "{data} makes no directory a checkpoint"
        );
    }
    assert_eq!(
        grouped(&["r/random_states_0.pkl", "r/custom_checkpoint_0.pkl"]),
        [""; 0],
        "parts of Accelerate's"
    );
    let nested = ["epoch_3/iteration_100/x.pt", "epoch_3/iteration_200/x.pt"];
    assert_eq!(
        grouped(&nested),
        ["epoch_3|iteration_100|torch_save|100|1", "epoch_3|iteration_200|torch_save|200|1"]
    );
}

#[test]
fn temporary_names_are_part_of_nothing() {
    let files = paths(&["r/s/__0_0.distcp", "r/s/.metadata.tmp", "r/.tmpAbc123", "r/x.pt.tmp"]);
    let grouping = Rules::builtin().group(&files);
    assert_eq!(grouping.candidates[0].files.len(), 1);
    assert_eq!(grouping.candidates[0].temporaries.len(), 1);
    assert_eq!(grouping.temporaries.len(), 2);
}

#[test]
fn what_says_that_a_file_is_filled_belongs_to_the_file_s_checkpoint() {
    let rules = Rules::builtin();
    for file in ["m.safetensors", "r/a_rank0.pt", "r/step_5/model.pt", "hf/a-00001-of-00002.safetensors"] {
        let files = paths(&[file, &format!("{file}.aria2")]);
        let grouping = rules.group(&files);
        assert_eq!(grouping.candidates[0].temporaries.first(), Some(&files[1]), "{file}");
        assert_eq!(rules.scope(&files[1]), rules.scope(&files[0]), "they are grouped together");
        assert!(rules.group(&files[1..]).temporaries.contains(&files[1]), "{file}: alone");
    }
}

#[test]
fn what_rsync_is_receiving_of_a_model_is_in_flight() {
    let rules = Rules::builtin();
    let is_temporary = |name: &str| rules.is_temporary(&RelPath::new(name).unwrap());
    for name in ["m/.model-00001-of-00003.safetensors.Xa3bQ1", "r/.step5_rank0.pt.0aB9cD", "r/.a.h5.ABCDEF"] {
        assert!(is_temporary(name), "{name}");
    }
    for name in [
        "m/.config.json.Xa3bQ1",
        "m/.model.pt.backup",
        "m/model.pt.Xa3bQ1",
        "m/.model.pt.Xa3bQ12",
        "m/.config.json.swp",
    ] {
        assert!(!is_temporary(name), "{name} is a file like others");
    }
    // A received file's rank is not counted, and the file makes no directory a checkpoint.
    let ranks = ["r/step5_rank0.pt", "r/.step5_rank1.pt.0aB9cD"];
    assert_eq!(grouped(&ranks), ["r|step5_rank*.pt|torch_save|5|1"]);
}

#[test]
fn a_user_adds_rules() {
    let text = r#"{"name":"mine","directory":"^save(?<step>\\d+)$","signature":"\\.npz$",
                   "shard":"^w(?<rank>\\d+)\\.npz$","marker":"^DONE$"}"#;
    let spec: RuleSpec = serde_json::from_str(text).unwrap();
    let rules = Rules::with(&[spec]).unwrap();
    let grouping = rules.group(&paths(&["r/save9/w0.npz", "r/save9/DONE"]));
    let found = &grouping.candidates[0];
    assert_eq!((found.framework.as_str(), found.step), ("mine", Some(Step(9))));
    assert!(found.files.values().any(|role| *role == Role::Marker));
    let broken = RuleSpec { name: "x".into(), signature: Some("(".into()), ..RuleSpec::default() };
    assert!(Rules::with(&[broken]).is_err());
    for ungrouped in [
        RuleSpec { name: "x".into(), each_rank: Some("a".into()), ..RuleSpec::default() },
        RuleSpec { name: "x".into(), unfinished: Some("(?<nam>a)".into()), ..RuleSpec::default() },
    ] {
        assert!(Rules::with(&[ungrouped]).unwrap_err().to_string().contains("without a group named"));
    }
    let large = format!("({}){{1,900}}", "a|".repeat(200));
    let large = RuleSpec { name: "x".into(), signature: Some(large), ..RuleSpec::default() };
    assert!(Rules::with(&[large]).is_err(), "a pattern cannot exhaust memory");
}

proptest! {
    #[test]
    fn every_path_is_grouped_once_and_scopes_decide_alone(
        mut texts in prop::collection::btree_set(
            "(r|step-1|checkpoint|epoch_2|7)(/(step-1|x|sub|step-3|7|step=3-consumed_samples=1)){0,2}\
             /(__0_0[.]distcp|[.]metadata|a[.]pt|rank1[.]pt|n|b[.]tmp|_CHECKPOINT_METADATA|step=3-consumed_samples=1-unfinished)",
            1..14,
        ),
    ) {
        // A path cannot be a file and a directory.
        let all = texts.clone();
        texts.retain(|text| !all.iter().any(|other| other.starts_with(&format!("{text}/"))));
        let files: Vec<_> = texts.iter().map(|text| RelPath::new(text.as_str()).unwrap()).collect();
        let rules = Rules::builtin();
        let whole = rules.group(&files);
        let count = whole.candidates.iter().map(|c| c.files.len() + c.temporaries.len()).sum::<usize>();
        prop_assert_eq!(count + whole.loose.len() + whole.temporaries.len(), files.len());
        for path in &files {
            let scope = rules.scope(path);
            let near: Vec<_> = files.iter()
                .filter(|f| rules.scope(f) == scope || scope.as_ref().is_none_or(|scope| f.is_below(scope)))
                .collect();
            let part = rules.group(near);
            let of = |g: &Grouping| g.candidates.iter().find(|c| c.files.contains_key(path)).cloned();
            prop_assert_eq!(of(&part), of(&whole), "{:?}", path);
            if rules.is_plain(path) && !whole.candidates.iter().any(Candidate::is_directory) {
                let mut without = rules.group(files.iter().filter(|other| *other != path));
                prop_assert!(without.loose.insert(path.clone()));
                prop_assert_eq!(&without, &whole, "{:?} is plain and decides nothing", path);
            }
        }
    }
}
