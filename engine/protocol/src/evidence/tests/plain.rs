//! Plain files: a single file, parts that carry their total, names with a rank or a number that only looks like one, and files whose
//! size was set before their bytes.

use super::*;

/// nanoGPT's `ckpt.pt` under `torchrun --nproc 8`, and Lightning's files under DDP: rank 0 writes the file, and no other rank writes
/// anything.
#[test]
fn one_file_is_whole_when_its_only_writer_closed_it_however_many_ranks_the_job_has() {
    for name in ["r/ckpt.pt", "r/last.pt", "r/last.ckpt", "r/epoch=0-step=100.ckpt", "r/step1.gguf"] {
        let mut world = World::new(&[(name, 1, writer(1, Some(8)))]);
        assert!(matches!(world.at(5), Verdict::Open { .. }), "{name}");
        assert_eq!(world.evidence(6), Some(Evidence::OneProcess), "{name}");
        world.file(name).writers.push(writer(2, Some(8)));
        assert!(matches!(world.at(99), Verdict::Settled { .. }), "{name}: several ranks write into it");
        world.file(name).writers.truncate(1);
        world.file(name).writers[0].fate = Fate::Failed;
        assert!(matches!(world.at(99), Verdict::Settled { .. }), "{name}: an exception closes files too");
        world.file(name).content = Content::Whole;
        assert_eq!(world.evidence(99), Some(Evidence::OneProcess), "{name}: its bytes say that it is whole");
        world.file(name).state = FileState::Cut;
        world.file(name).content = Content::Unknown;
        assert!(matches!(world.at(99), Verdict::Torn { .. }), "{name}: nobody closed it");
    }
}

/// Flax, TensorFlow and `datasets` count parts from 0, and transformers from 1.
#[test]
fn parts_count_from_0_or_from_1() {
    let of = |names: &[&str]| {
        let files: Vec<_> = names.iter().map(|name| (*name, 1, writer(1, None))).collect();
        World::new(&files).at(99)
    };
    let lacks = |names: &[&str], part: &str| match of(names) {
        Verdict::Incomplete { missing, .. } => assert_eq!(missing, [part], "{names:?}"),
        other => panic!("{names:?}: {other:?}"),
    };
    for stem in ["model-", "model.", ""] {
        let name = |part: u64| format!("m/{stem}{part:05}-of-00002.safetensors");
        let [zero, one, two] = [name(0), name(1), name(2)];
        for whole in [[&zero, &one], [&one, &two]] {
            let verdict = of(&[whole[0], whole[1]]);
            let counted = matches!(verdict, Verdict::Complete { evidence: Evidence::Count, .. });
            assert!(counted, "{whole:?}: {verdict:?}");
        }
        lacks(&[&zero], "1");
        lacks(&[&one], "2");
        lacks(&[&two], "1");
        lacks(&[&zero, &two], "1");
    }
    lacks(&["r/step_5/pytorch_model-00000-of-00002.bin"], "1");
}

/// A tokenizer's data set beside the weights, and a TensorFlow model in the same directory.
#[test]
fn parts_of_what_is_no_state_are_not_counted() {
    let trainer = |more: &str| {
        let names = ["r/checkpoint-5/model.safetensors", "r/checkpoint-5/rng_state.pth", more];
        let mut files: Vec<_> = names.iter().map(|name| (*name, 1, writer(1, None))).collect();
        files.push(("r/checkpoint-5/trainer_state.json", 2, writer(1, None)));
        World::new(&files).evidence(99)
    };
    for more in ["data-00000-of-00001.arrow", "variables.data-00000-of-00001", "sample-00003-of-00100.png"] {
        assert_eq!(trainer(&format!("r/checkpoint-5/{more}")), Some(Evidence::OneProcess), "{more}");
    }
    assert_eq!(trainer("r/checkpoint-5/optimizer-00001-of-00002.pt"), None, "a part of the state is missing");
}

/// Each shard of a data set is a checkpoint by itself.
#[test]
fn a_file_by_itself_is_no_part_of_a_family() {
    for name in ["r/tokens_00001-of-00010.npz", "r/model-00003-of-00004.h5"] {
        assert_eq!(
            World::new(&[(name, 1, writer(1, None))]).evidence(99),
            Some(Evidence::OneProcess),
            "{name}"
        );
    }
}

#[test]
fn parts_that_a_users_rule_names_are_counted() {
    let rule = crate::recognise::RuleSpec {
        name: "ours".into(),
        directory: Some("^save_(?<step>[0-9]+)$".into()),
        signature: Some("\\.part$".into()),
        ..Default::default()
    };
    let files = [
        ("r/save_7/w-00000-of-00002.part", 1, writer(1, None)),
        ("r/save_7/w-00001-of-00002.part", 2, writer(1, None)),
    ];
    let ours =
        |files: &[_]| World { rules: Rules::with(std::slice::from_ref(&rule)).unwrap(), ..World::new(files) };
    assert_eq!(ours(&files[..]).evidence(99), Some(Evidence::Count));
    assert!(matches!(ours(&files[..1]).at(99), Verdict::Incomplete { .. }));
}

/// An adapter of rank 8 in a job of two ranks.
#[test]
fn a_number_that_no_rank_of_the_job_has_is_no_rank() {
    let mut world = World::new(&[("r/lora_rank8.pt", 1, writer(1, Some(2)))]);
    assert_eq!(world.evidence(6), Some(Evidence::OneProcess));
    world.file("r/lora_rank8.pt").writers[0].fate = Fate::Failed;
    assert!(matches!(world.at(99), Verdict::Settled { .. }), "an exception closes files too");
    world.file("r/lora_rank8.pt").state = FileState::Cut;
    assert!(matches!(world.at(99), Verdict::Torn { .. }));
    let ranks = |world_size| {
        let files = [
            ("r/lora_rank8.pt", 1, writer(1, Some(world_size))),
            ("r/lora_rank16.pt", 1, writer(1, Some(world_size))),
        ];
        World::new(&files).at(99)
    };
    assert!(matches!(ranks(8), Verdict::Complete { evidence: Evidence::OneProcess, .. }));
    assert!(matches!(ranks(16), Verdict::Incomplete { .. }), "one of them may be a rank's");
    let with = |name: &str| {
        let listed = [("__0_0.distcp", None), ("__1_0.distcp", None)];
        let mut world = dcp().index("r/step-1/.metadata", &listed);
        let fact = world.file("r/step-1/__0_0.distcp").clone();
        world.files.insert(path(name), fact);
        world.evidence(99)
    };
    assert_eq!(with("r/step-1/lora_rank8.pt"), Some(Evidence::Index));
    assert_eq!(with("r/step-1/lora_rank1.pt"), None, "of two ranks, and no index names it");
}

/// `torch.save(state, f"shard_{rank + 1}.pt")`: each number is one more than the rank that wrote the file.
#[test]
fn ranks_that_count_from_one_are_counted_by_who_wrote_what() {
    let rank = |k: u32| Writer { rank: Some(u64::from(k)), ..writer(k + 1, Some(2)) };
    let both =
        |first, second| World::new(&[("r/shard_1.pt", 1, first), ("r/shard_2.pt", 2, second)]).evidence(2);
    assert_eq!(both(rank(0), rank(1)), Some(Evidence::Count));
    assert_eq!(both(rank(1), writer(3, Some(2))), None, "a rank 2 is left of a larger job, and rank 0 lacks");
    let last = World::new(&[("r/shard_2.pt", 1, rank(1))]);
    assert!(matches!(last.at(99), Verdict::Incomplete { .. }), "rank 1 was the first to save");
    let one = World::new(&[("r/lora_rank8.pt", 1, rank(0))]);
    assert_eq!(one.evidence(6), Some(Evidence::OneProcess), "no number of its writer");
    let mut alone = World::new(&[("r/lora_rank1.pt", 1, Writer { world_size: Some(1), ..rank(0) })]);
    alone.file("r/lora_rank1.pt").writers[0].fate = Fate::Killed;
    assert_eq!(alone.evidence(6), Some(Evidence::OneProcess), "a job of one rank has no parts");
}

#[test]
fn what_a_rank_tells_people_is_not_counted() {
    let of = |more: &str| {
        let files = [("r/epoch_3/model.pt", 1, writer(1, Some(2))), (more, 1, writer(1, Some(2)))];
        World::new(&files).at(99)
    };
    for more in ["train_rank0.log", "samples_rank0.png", "rank0.trace.json.gz", "frank1.pt"] {
        let verdict = of(&format!("r/epoch_3/{more}"));
        assert!(matches!(verdict, Verdict::Settled { .. }), "{more}: {verdict:?}");
    }
    for more in ["optimizer_rank0.pt", "loader_rank0.json", "rank_0", "shard-0.dat"] {
        let verdict = of(&format!("r/epoch_3/{more}"));
        assert!(matches!(verdict, Verdict::Incomplete { .. }), "{more}: {verdict:?}");
    }
}

/// A downloader of ranges sets the size, and fills the file in any order.
#[test]
fn what_was_sized_first_says_nothing_where_nobody_closed_it() {
    for (in_advance, cut, expected) in
        [(true, true, Content::Unknown), (true, false, Content::Whole), (false, true, Content::Whole)]
    {
        assert_eq!(believed(Content::Whole, in_advance, cut), expected, "{in_advance} {cut}");
        assert_eq!(believed(Content::Broken, in_advance, cut), Content::Broken);
    }
}

/// `save_file`, and then `push_to_hub` raises.
#[test]
fn who_closed_what_is_whole_and_failed_then_saved_it() {
    for fate in [Fate::Failed, Fate::Killed] {
        let by = Writer { fate, failed_at_ns: Some(2 * SECOND), ..writer(1, None) };
        let mut world = World::new(&[("m/model.safetensors", 1, by)]);
        world.file("m/model.safetensors").content = believed(Content::Whole, true, false);
        assert_eq!(world.evidence(99), Some(Evidence::OneProcess), "{fate:?}");
    }
}

/// `aria2c -x8 …/model.safetensors`, and the shards of a model below their index.
#[test]
fn nothing_is_whole_while_a_downloader_says_that_it_fills_a_file() {
    for control in ["aria2", "lftp-pget-status"] {
        for fate in [Fate::Exited, Fate::Failed, Fate::Killed] {
            let by = || Writer { fate, ..writer(1, None) };
            let beside = format!("m/model.pt.{control}");
            let mut world = World::new(&[("m/model.pt", 1, by()), (beside.as_str(), 1, by())]);
            for state in [FileState::Closed, FileState::Cut] {
                world.file("m/model.pt").state = state;
                world.file("m/model.pt").content = Content::Whole;
                for told in [Told::No, Told::Flush] {
                    world.told = told;
                    assert_eq!(world.evidence(99), None, "{control} {fate:?}");
                }
            }
            world.files.remove(&path(&beside));
            assert!(world.evidence(99).is_some(), "{control} {fate:?}: it is done");
        }
    }
    let by = || Writer { fate: Fate::Failed, ..writer(1, None) };
    let shard = "model-00001-of-00001.safetensors";
    let (whole, beside) = (format!("m/{shard}"), format!("m/{shard}.aria2"));
    let mut world = World::new(&[
        ("m/model.safetensors.index.json", 1, by()),
        (whole.as_str(), 2, by()),
        (beside.as_str(), 2, by()),
    ])
    .index("m/model.safetensors.index.json", &[(shard, None)]);
    assert!(matches!(world.at(99), Verdict::Torn { why } if why.contains("aria2")), "{:?}", world.at(99));
    world.files.remove(&path(&beside));
    assert_eq!(world.evidence(99), Some(Evidence::Index));
}
