//! Files beside a whole checkpoint.

use super::*;

const SHARD: &str = "m/out/model-00001-of-00001.safetensors";
const INDEX: &str = "m/out/model.safetensors.index.json";
const LOG: &str = "m/out/train.log";

/// Makes a world in which `train.py >out/train.log` saved its model into `out`, and goes on.
fn logged(log: &str) -> World {
    let files = [(SHARD, 1, writer(1, None)), (INDEX, 2, writer(1, None)), (log, 9, writer(1, None))];
    let mut world = World::new(&files).index(INDEX, &[("model-00001-of-00001.safetensors", None)]);
    world.file(log).state = FileState::Open { writers: 1 };
    world.file(log).opened_at_ns = 0;
    world
}

fn is_cut(world: &mut World, name: &str, fate: Fate) {
    world.file(name).state = FileState::Cut;
    world.files.values_mut().for_each(|fact| fact.writers[0].fate = fate);
}

fn apart(world: &World, second: i64) -> Vec<String> {
    let grouping = world.rules.group(world.files.keys());
    let candidate = &grouping.candidates[0];
    let (_, apart) = world.with_facts(|facts| judge(&world.rules, candidate, facts, second * SECOND));
    apart.iter().map(RelPath::to_string).collect()
}

#[test]
fn an_index_proves_what_it_lists_beside_a_log_that_is_open_or_was_cut() {
    for log in [LOG, "m/out/.config.json.swp", "m/out/.config.json.Xa3bQ1"] {
        let mut world = logged(log);
        let waits =
            |verdict| matches!(verdict, Verdict::Open { again_at_ns: Some(at), .. } if at == 7 * SECOND);
        assert!(waits(world.at(6)), "{log}");
        assert_eq!((world.evidence(7), apart(&world, 7)), (Some(Evidence::Index), vec![log.to_owned()]));
        world.told = Told::Flush;
        assert_eq!(world.evidence(2), Some(Evidence::Index), "who flushes does not wait for it");
        world.told = Told::No;
        world.file(log).state = FileState::Mapped;
        assert_eq!(world.evidence(7), Some(Evidence::Index));
        // The process of the log fails, an hour later or at once.
        for second in [3, 3600] {
            is_cut(&mut world, log, Fate::Killed);
            assert_eq!(world.evidence(second), Some(Evidence::Index), "{log} at {second}");
            assert_eq!(apart(&world, second), [log]);
        }
        is_cut(&mut world, log, Fate::Ended);
        assert!(waits(world.at(3)), "it may have ended well, and the log is a part then");
        is_cut(&mut world, log, Fate::Exited);
        assert!(apart(&world, 7).is_empty(), "its program left it to its end to close it: it is a part");
        assert_eq!(world.evidence(14), Some(Evidence::Index), "and the index says that it is not needed");
        world.file(log).before = Before::Other;
        assert!(
            matches!(world.at(14), Verdict::Settled { undecided: true, .. }),
            "the version before had it"
        );
    }
}

/// A data loader's state after the index of the shards, a tokenizer after the index of the model.
#[test]
fn what_a_trainer_began_after_its_first_file_and_left_half_is_a_part() {
    for half in ["m/out/dataloader_state.json", "m/out/tokenizer.json"] {
        let mut world = logged(half);
        world.file(half).opened_at_ns = 3 * SECOND;
        is_cut(&mut world, half, Fate::Killed);
        assert!(apart(&world, 99).is_empty(), "{half}");
        assert!(matches!(world.at(99), Verdict::Torn { .. }), "{half}");
        world.file(half).writers[0].process = (9, 1);
        assert_eq!((world.evidence(99), apart(&world, 99)), (Some(Evidence::Index), vec![half.to_owned()]));
    }
}

/// `curl URL >model-00001-of-00001.safetensors`, for one file after the other.
#[test]
fn parts_that_were_fetched_by_who_closes_nothing_are_whole_below_their_index() {
    let mut world = World::new(&[(SHARD, 1, writer(1, None)), (INDEX, 2, writer(2, None))])
        .index(INDEX, &[("model-00001-of-00001.safetensors", None)]);
    is_cut(&mut world, SHARD, Fate::Exited);
    assert_eq!(world.evidence(7), Some(Evidence::Index));
    world.file(SHARD).writers[0].rank = Some(0);
    assert!(
        matches!(world.at(7), Verdict::Settled { undecided: true, .. }),
        "a trainer's thread may have written"
    );
    world.file(SHARD).writers[0] = Writer { fate: Fate::Killed, ..writer(1, None) };
    assert!(matches!(world.at(7), Verdict::Torn { .. }));
}

#[test]
fn an_index_proves_nothing_beside_an_unclosed_file_that_is_a_part() {
    let mut listed = logged(LOG);
    listed.indices.clear();
    let covered = [("model-00001-of-00001.safetensors", None), ("train.log", None)];
    listed = listed.index(INDEX, &covered);
    assert_eq!(listed.evidence(99), None, "the index lists it");
    is_cut(&mut listed, LOG, Fate::Killed);
    assert!(matches!(listed.at(99), Verdict::Torn { .. }));
    let mut state = logged("m/out/optimizer.bin");
    assert_eq!(state.evidence(99), None, "a rule knows its name");
    is_cut(&mut state, "m/out/optimizer.bin", Fate::Killed);
    assert!(matches!(state.at(99), Verdict::Torn { .. }));
    let mut over = logged("m/out/config.json");
    over.file("m/out/config.json").before = Before::Other;
    is_cut(&mut over, "m/out/config.json", Fate::Killed);
    assert!(matches!(over.at(99), Verdict::Torn { .. }), "the version before has it");
    let mut lacking = logged(LOG);
    lacking.files.remove(&path(SHARD));
    assert!(matches!(lacking.at(99), Verdict::Open { again_at_ns: None, .. }), "{:?}", lacking.at(99));
    is_cut(&mut lacking, LOG, Fate::Killed);
    assert!(matches!(lacking.at(99), Verdict::Torn { .. }), "the rest is not whole");
}

/// Accelerate writes objects that a user registered after the model's index and the random states; Orbax has data under
/// any name.
#[test]
fn where_more_follows_or_nothing_is_listed_an_unclosed_file_may_be_a_part() {
    let index = "r/checkpoint_1/model.safetensors.index.json";
    let object = "r/checkpoint_1/custom_checkpoint_0.pkl";
    let mut accelerate = World::new(&[
        ("r/checkpoint_1/model-00001-of-00001.safetensors", 1, writer(1, None)),
        (index, 2, writer(1, None)),
        ("r/checkpoint_1/random_states_0.pkl", 3, writer(1, None)),
        (object, 4, writer(1, None)),
    ])
    .index(index, &[("model-00001-of-00001.safetensors", None)]);
    is_cut(&mut accelerate, object, Fate::Killed);
    assert!(matches!(accelerate.at(99), Verdict::Torn { .. }));
    let data = "r/7/default/d/0123";
    let files = [("r/7/_CHECKPOINT_METADATA", 1, writer(1, None)), (data, 2, writer(1, None))];
    let mut orbax = World::new(&files);
    orbax.renamed_at_ns = Some(3 * SECOND);
    is_cut(&mut orbax, data, Fate::Killed);
    assert!(matches!(orbax.at(99), Verdict::Torn { .. }));
}

/// An evaluation writes into a checkpoint that is whole, by whatever evidence.
#[test]
fn what_the_version_before_holds_is_whole_beside_a_file_that_was_cut() {
    let (model, state) = ("r/checkpoint-5/model.safetensors", "r/checkpoint-5/trainer_state.json");
    let added = "r/checkpoint-5/predictions.jsonl";
    let mut world =
        World::new(&[(model, 1, writer(1, None)), (state, 2, writer(1, None)), (added, 50, writer(9, None))]);
    for name in [model, state] {
        (world.file(name).before, world.file(name).committed) = (Before::Same, true);
    }
    world.names_before = 2;
    world.file(added).state = FileState::Cut;
    world.file(added).writers[0].fate = Fate::Killed;
    assert!(!matches!(world.at(51), Verdict::Torn { .. }), "{:?}", world.at(51));
    assert_eq!(apart(&world, 51), [added]);
    world.file(added).state = FileState::Open { writers: 1 };
    assert_eq!(apart(&world, 51), [added]);
    world.file(added).state = FileState::Cut;
    world.names_before = 3;
    assert!(matches!(world.at(51), Verdict::Torn { .. }), "a name of it is missing");
    world.names_before = 2;
    world.file(model).before = Before::Other;
    assert!(matches!(world.at(51), Verdict::Torn { .. }), "something was saved over it");
}

/// An evaluation writes its results into a checkpoint, closes them, and fails.
#[test]
fn who_fails_takes_nothing_from_what_is_whole_by_adding_to_it() {
    let (model, state) = ("r/checkpoint-5/model.safetensors", "r/checkpoint-5/trainer_state.json");
    let with = |added: &str, world_size: Option<u64>| {
        let by = Writer { fate: Fate::Failed, failed_at_ns: Some(51 * SECOND), ..writer(9, world_size) };
        let mut world =
            World::new(&[(model, 1, writer(1, None)), (state, 2, writer(1, None)), (added, 50, by)]);
        for name in [model, state] {
            (world.file(name).before, world.file(name).committed) = (Before::Same, true);
        }
        world.names_before = 2;
        world
    };
    let added = "r/checkpoint-5/eval_results.json";
    let mut world = with(added, None);
    assert!(matches!(world.at(52), Verdict::Open { again_at_ns: Some(at), .. } if at == 55 * SECOND));
    for told in [Told::No, Told::Flush] {
        world.told = told;
        assert!(matches!(world.at(55), Verdict::Settled { undecided: false, .. }), "{:?}", world.at(55));
    }
    world.told = Told::No;
    world.file(added).writers[0].fate = Fate::Killed;
    assert!(matches!(world.at(55), Verdict::Settled { .. }));
    let mut ended = with("r/checkpoint-5/eval.log", None);
    ended.file("r/checkpoint-5/eval.log").state = FileState::Cut;
    let by = &mut ended.file("r/checkpoint-5/eval.log").writers[0];
    (by.fate, by.failed_at_ns) = (Fate::Exited, None);
    assert!(matches!(ended.at(55), Verdict::Settled { undecided: false, .. }), "left to its end to close");
    world.names_before = 3;
    assert!(matches!(world.at(55), Verdict::Torn { .. }), "a name of what was whole is missing");
    world.names_before = 2;
    world.file(state).before = Before::Other;
    assert!(matches!(world.at(55), Verdict::Torn { .. }), "it was saved over");
    assert!(
        matches!(with("r/checkpoint-5/optimizer.pt", None).at(55), Verdict::Torn { .. }),
        "a rule knows it"
    );

    // Written by more processes than the job ever had.
    let states = "r/checkpoint-5/rng_state_0.pth";
    let mut ranks = with(added, Some(8));
    let kept = FileFact { before: Before::Same, committed: true, ..ranks.file(model).clone() };
    ranks.files.insert(path(states), kept);
    ranks.names_before = 3;
    assert!(matches!(ranks.at(55), Verdict::Settled { .. }), "{:?}", ranks.at(55));
}
