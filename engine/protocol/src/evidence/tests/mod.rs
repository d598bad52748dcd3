//! Tests of the verdict, one per promise.

mod apart;
mod left;
mod over;
mod plain;

use super::*;

const SECOND: i64 = 1_000_000_000;

struct World {
    rules: Rules,
    files: BTreeMap<RelPath, FileFact>,
    indices: BTreeMap<RelPath, Result<Covered, IndexError>>,
    told: Told,
    history: Option<History>,
    older: Option<Older>,
    succeeded: bool,
    removed: BTreeSet<RelPath>,
    names_before: usize,
    renamed_at_ns: Option<i64>,
}

fn path(text: &str) -> RelPath {
    RelPath::new(text).unwrap()
}

fn writer(process: u32, world_size: Option<u64>) -> Writer {
    Writer {
        session: "s".into(),
        process: (process, 1),
        environment_seen: true,
        world_size,
        rank: None,
        fate: Fate::Alive,
        failed_at_ns: None,
    }
}

impl World {
    /// Makes files, each opened and closed at that second by that writer.
    fn new(files: &[(&str, i64, Writer)]) -> Self {
        let fact = |(name, second, writer): &(&str, i64, Writer)| {
            let fact = FileFact {
                state: FileState::Closed,
                size_bytes: 100,
                opened_at_ns: second * SECOND,
                published_at_ns: second * SECOND,
                closed_at_ns: second * SECOND,
                vouched: false,
                content: Content::Unknown,
                content_reason: String::new(),
                committed: false,
                before: Before::Nothing,
                doubted: false,
                writers: vec![writer.clone()],
            };
            (path(name), fact)
        };
        let files = files.iter().map(fact).collect();
        Self {
            rules: Rules::builtin(),
            files,
            indices: BTreeMap::new(),
            told: Told::No,
            history: None,
            older: None,
            succeeded: false,
            removed: BTreeSet::new(),
            names_before: 0,
            renamed_at_ns: None,
        }
    }

    fn index(mut self, name: &str, covered: &[(&str, Option<u64>)]) -> Self {
        let covered = covered.iter().map(|(name, size)| (path(name), *size)).collect();
        self.indices.insert(path(name), Ok(covered));
        self
    }

    fn file(&mut self, name: &str) -> &mut FileFact {
        self.files.get_mut(&path(name)).unwrap()
    }

    fn at(&self, second: i64) -> Verdict {
        let grouping = self.rules.group(self.files.keys());
        assert_eq!(grouping.candidates.len(), 1, "{grouping:?}");
        let at_ns = second * SECOND;
        self.with_facts(|facts| complete(&self.rules, &grouping.candidates[0], facts, at_ns))
    }

    fn with_facts<T>(&self, of: impl FnOnce(&Facts<'_>) -> T) -> T {
        of(&Facts {
            files: &self.files,
            indices: &self.indices,
            told: self.told,
            history: self.history.as_ref(),
            older: self.older,
            succeeded: self.succeeded,
            removed: &self.removed,
            names_before: self.names_before,
            renamed_at_ns: self.renamed_at_ns,
            settle_ns: SETTLE_NS,
        })
    }

    fn evidence(&self, second: i64) -> Option<Evidence> {
        match self.at(second) {
            Verdict::Complete { evidence, .. } => Some(evidence),
            _ => None,
        }
    }
}

fn dcp() -> World {
    World::new(&[
        ("r/step-1/__0_0.distcp", 1, writer(1, Some(2))),
        ("r/step-1/__1_0.distcp", 2, writer(2, Some(2))),
        ("r/step-1/.metadata", 3, writer(1, Some(2))),
    ])
}

#[test]
fn an_index_completes_at_once_what_it_covers() {
    assert!(matches!(dcp().at(3), Verdict::ReadIndex { .. }));
    let covered = [("__0_0.distcp", Some(100)), ("__1_0.distcp", Some(100))];
    let world = dcp().index("r/step-1/.metadata", &covered);
    assert_eq!(world.evidence(3), Some(Evidence::Index));
    let missing = dcp().index("r/step-1/.metadata", &[("__0_0.distcp", None), ("__2_0.distcp", None)]);
    assert!(matches!(missing.at(9), Verdict::Incomplete { .. }));
    let mut rewritten = dcp().index("r/step-1/.metadata", &covered);
    rewritten.file("r/step-1/__0_0.distcp").published_at_ns = 4 * SECOND;
    assert!(
        matches!(rewritten.at(99), Verdict::Incomplete { .. }),
        "a shard written after the index voids it"
    );
    let mut short = dcp().index("r/step-1/.metadata", &covered);
    short.file("r/step-1/__0_0.distcp").size_bytes = 99;
    assert!(matches!(short.at(99), Verdict::Incomplete { .. }));
}

#[test]
fn dcp_without_its_index_is_never_settled() {
    let mut world = dcp();
    world.files.remove(&path("r/step-1/.metadata"));
    assert!(matches!(world.at(999), Verdict::Incomplete { .. }));
    for name in ["r/step-1/__0_0.distcp", "r/step-1/__1_0.distcp"] {
        world.file(name).writers[0].fate = Fate::Killed;
    }
    assert!(matches!(world.at(999), Verdict::Torn { .. }));
}

/// A program that was killed in its index wrote no more of it, and such an index is not sealed, so it cannot be read.
#[test]
fn an_index_that_was_cut_is_read_where_its_program_ended_well_and_torn_elsewhere() {
    for name in ["r/step-1/.metadata", "r/step-1/model.safetensors.index.json"] {
        let mut world = World::new(&[("r/step-1/model-00001-of-00001.safetensors", 1, writer(1, None))]);
        let fact = world.file("r/step-1/model-00001-of-00001.safetensors").clone();
        world.files.insert(path(name), FileFact { state: FileState::Cut, ..fact });
        for fate in [Fate::Killed, Fate::Failed, Fate::Gone, Fate::Alive] {
            world.file(name).writers[0].fate = fate;
            assert!(matches!(world.at(99), Verdict::Torn { .. }), "{name} {fate:?}: {:?}", world.at(99));
        }
        world.file(name).writers[0].fate = Fate::Ended;
        assert!(matches!(world.at(99), Verdict::Open { .. }), "{name}: nobody knows how it ended");
        world.file(name).writers[0].fate = Fate::Exited;
        assert!(matches!(world.at(1), Verdict::ReadIndex { .. }), "{name}");
        world.file(name).writers[0].fate = Fate::Killed;
        world.file(name).vouched = true;
        assert!(matches!(world.at(1), Verdict::ReadIndex { .. }), "{name}: its program had renamed it");
    }
}

#[test]
fn an_index_that_others_follow_waits_for_the_settle_time() {
    let world = World::new(&[
        ("r/checkpoint-5/model-00001-of-00001.safetensors", 1, writer(1, None)),
        ("r/checkpoint-5/model.safetensors.index.json", 2, writer(1, None)),
    ])
    .index("r/checkpoint-5/model.safetensors.index.json", &[("model-00001-of-00001.safetensors", None)]);
    assert_eq!(world.at(3), world.at(6));
    assert!(matches!(world.at(6), Verdict::Open { again_at_ns: Some(at), .. } if at == 7 * SECOND));
    assert_eq!(world.evidence(7), Some(Evidence::Index));
    let mut mapped = world;
    mapped.file("r/checkpoint-5/model-00001-of-00001.safetensors").closed_at_ns = 6 * SECOND;
    assert!(
        matches!(mapped.at(7), Verdict::Open { again_at_ns: Some(at), .. } if at == 11 * SECOND),
        "a mapping that stays delays the settling, and does not make the index older than the shard"
    );
}

#[test]
fn one_process_is_complete_when_it_has_settled() {
    let world = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    assert!(matches!(world.at(5), Verdict::Open { .. }));
    assert_eq!(world.evidence(6), Some(Evidence::OneProcess));
    let mut unseen = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    unseen.file("r/step1.pt").writers[0].environment_seen = false;
    assert!(matches!(unseen.at(6), Verdict::Settled { .. }), "an environment nobody saw proves nothing");
    let several = World::new(&[("r/step_1/model.pt", 1, writer(1, Some(8)))]);
    assert!(matches!(several.at(6), Verdict::Settled { .. }), "others may have files to write");
}

#[test]
fn a_writer_killed_between_two_files_leaves_a_torn_directory() {
    let mut world = World::new(&[("r/step-1/model.pt", 1, writer(1, None))]);
    world.file("r/step-1/model.pt").writers[0].fate = Fate::Killed;
    assert!(matches!(world.at(99), Verdict::Torn { .. }));
    world.file("r/step-1/model.pt").writers[0].failed_at_ns = Some(5 * SECOND);
    assert!(matches!(world.at(99), Verdict::Torn { .. }), "it was still to settle");
    world.file("r/step-1/model.pt").writers[0].failed_at_ns = Some(6 * SECOND);
    assert_eq!(world.evidence(99), Some(Evidence::OneProcess), "it had settled");
    let mut ranks = World::new(&[("r/step-1/model.pt", 1, writer(1, Some(8)))]);
    ranks.file("r/step-1/model.pt").writers[0].fate = Fate::Killed;
    assert!(matches!(ranks.at(99), Verdict::Torn { .. }), "nobody knows what was to come");
    let mut single = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    single.file("r/step1.pt").writers[0].fate = Fate::Killed;
    assert_eq!(single.evidence(99), Some(Evidence::OneProcess), "a signal runs no handler that closes");
    single.file("r/step1.pt").writers[0].fate = Fate::Failed;
    assert!(matches!(single.at(99), Verdict::Settled { .. }), "an exception closes files too");
    single.told = Told::Flush;
    assert!(matches!(single.at(99), Verdict::Settled { .. }), "who flushes does not know either");
    single.file("r/step1.pt").content = Content::Whole;
    assert!(single.evidence(99).is_some(), "its bytes say that it is whole");
    let mut late = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    late.file("r/step1.pt").writers[0].fate = Fate::Failed;
    late.file("r/step1.pt").writers[0].failed_at_ns = Some(6 * SECOND);
    assert_eq!(late.evidence(99), Some(Evidence::OneProcess), "it did other things first");
}

/// `cp`, `wget` and `gsutil` have a process for each file, and these processes do not know of each other.
#[test]
fn what_lacks_files_stays_as_it_is_where_everybody_ended_well() {
    let copied = |fate: Fate| {
        let mut world = World::new(&[
            ("m/model.safetensors.index.json", 1, writer(1, None)),
            ("m/model-00001-of-00002.safetensors", 3, writer(2, None)),
        ]);
        world.file("m/model.safetensors.index.json").writers[0].fate = fate;
        world.file("m/model-00001-of-00002.safetensors").writers[0].fate = Fate::Exited;
        let listed = [("model-00001-of-00002.safetensors", None), ("model-00002-of-00002.safetensors", None)];
        world.index("m/model.safetensors.index.json", &listed)
    };
    let kept_at = |world: &World| match world.at(99) {
        Verdict::Incomplete { kept_at_ns, .. } => Some(kept_at_ns),
        _ => None,
    };
    assert_eq!(kept_at(&copied(Fate::Exited)), Some(Some(8 * SECOND)));
    assert_eq!(kept_at(&copied(Fate::Alive)), Some(None), "somebody may bring the rest");
    assert_eq!(kept_at(&copied(Fate::Ended)), Some(None), "how it ended is said in a moment");
    assert_eq!(kept_at(&copied(Fate::Gone)), Some(Some(8 * SECOND)), "nobody knows, and people copy models");
    assert!(matches!(copied(Fate::Killed).at(99), Verdict::Torn { .. }));
    let mut whole = copied(Fate::Exited);
    let last = whole.file("m/model-00001-of-00002.safetensors").clone();
    whole.files.insert(path("m/model-00002-of-00002.safetensors"), last);
    assert_eq!(whole.evidence(7), None, "more may follow");
    assert_eq!(whole.evidence(8), Some(Evidence::Index), "in whatever order it was copied");
    let last = |whole: &mut World, fate| {
        whole.file("m/model-00002-of-00002.safetensors").writers[0].fate = fate;
    };
    last(&mut whole, Fate::Alive);
    assert_eq!(whole.evidence(99), None, "a job writes its index last");
    last(&mut whole, Fate::Failed);
    assert_eq!(whole.evidence(99), Some(Evidence::Index), "`cp -a` could not keep an attribute");
    whole.file("m/model-00002-of-00002.safetensors").writers[0].rank = Some(0);
    assert!(matches!(whole.at(99), Verdict::Torn { .. }), "a trainer failed before it wrote the index anew");
    let mut told = copied(Fate::Exited);
    told.told = Told::Flush;
    assert!(kept_at(&told).is_some(), "nobody said that it is whole");
}

#[test]
fn a_framework_s_directory_that_lacks_files_is_torn_where_ranks_are_gone_and_nobody_saw_how() {
    let ranks = |rank: Option<u64>| {
        let mut world = dcp();
        world.files.remove(&path("r/step-1/.metadata"));
        for fact in world.files.values_mut() {
            fact.writers[0] = Writer { fate: Fate::Gone, rank, ..fact.writers[0].clone() };
        }
        world
    };
    assert!(matches!(ranks(Some(0)).at(99), Verdict::Torn { .. }));
    assert!(
        matches!(ranks(None).at(99), Verdict::Incomplete { kept_at_ns: Some(_), .. }),
        "it may be a copy"
    );
}

#[test]
fn a_broken_file_is_never_complete() {
    let mut world = dcp().index("r/step-1/.metadata", &[("__0_0.distcp", None), ("__1_0.distcp", None)]);
    assert!(world.evidence(3).is_some());
    world.file("r/step-1/__1_0.distcp").content = Content::Broken;
    for told in [Told::No, Told::Flush, Told::Commit] {
        world.told = told;
        assert!(matches!(world.at(99), Verdict::Broken { .. }), "{told:?}");
    }
}

/// A job that came back and is killed in its first save has written nothing else of the run.
#[test]
fn a_cut_file_is_torn_although_its_bytes_say_that_it_is_broken() {
    let mut world = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    let file = world.file("r/step1.pt");
    (file.state, file.content, file.writers[0].fate) = (FileState::Cut, Content::Broken, Fate::Killed);
    assert!(matches!(world.at(1), Verdict::Torn { .. }));
    world.file("r/step1.pt").writers[0].fate = Fate::Exited;
    assert!(matches!(world.at(99), Verdict::Broken { .. }), "it was left to the end of its program to close");
}

#[test]
fn a_cut_file_whose_bytes_say_that_it_is_whole_is_whole() {
    let mut world = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    world.file("r/step1.pt").state = FileState::Cut;
    world.file("r/step1.pt").content = Content::Whole;
    assert!(world.evidence(99).is_some());
}

/// transformers' `save_pretrained` in one file over shards removes the shards and leaves their index.
#[test]
fn an_index_of_files_that_its_job_took_away_proves_nothing_and_lacks_nothing() {
    let mut world = World::new(&[
        ("m/model.safetensors.index.json", 1, writer(1, None)),
        ("m/model.safetensors", 9, writer(2, None)),
        ("m/config.json", 9, writer(2, None)),
    ])
    .index("m/model.safetensors.index.json", &[("model-00001-of-00002.safetensors", None)]);
    world.file("m/model.safetensors.index.json").committed = true;
    for name in ["m/model.safetensors", "m/config.json"] {
        world.file(name).writers[0].fate = Fate::Exited;
    }
    assert!(matches!(world.at(99), Verdict::Incomplete { .. }), "it never was there");
    world.removed.insert(path("m/model-00001-of-00002.safetensors"));
    assert_eq!(world.evidence(99), Some(Evidence::OneProcess));
    world.file("m/config.json").writers[0].fate = Fate::Alive;
    assert!(matches!(world.at(99), Verdict::Incomplete { .. }), "new shards may follow");
    world.file("m/config.json").writers[0].fate = Fate::Killed;
    assert!(matches!(world.at(99), Verdict::Torn { .. }), "it was killed between the two");
}

#[test]
fn an_index_of_fewer_ranks_proves_what_it_lists_beside_what_more_ranks_left() {
    let mut world = dcp().index("r/step-1/.metadata", &[("__0_0.distcp", None), ("__1_0.distcp", None)]);
    let left =
        FileFact { published_at_ns: 0, committed: true, ..world.file("r/step-1/__0_0.distcp").clone() };
    world.files.insert(path("r/step-1/__2_0.distcp"), left);
    assert_eq!(world.evidence(3), Some(Evidence::Index));
}

#[test]
fn a_count_needs_every_rank() {
    let rank = |k: u32| writer(k + 1, Some(2));
    let mut world = World::new(&[("r/step1_rank0.pt", 1, rank(0))]);
    assert!(matches!(world.at(99), Verdict::Incomplete { .. }));
    world = World::new(&[("r/step1_rank0.pt", 1, rank(0)), ("r/step1_rank1.pt", 2, rank(1))]);
    assert_eq!(world.evidence(2), Some(Evidence::Count));
    let parts = [("m/a-00001-of-00002.safetensors", 1, writer(1, None))];
    assert!(matches!(World::new(&parts).at(99), Verdict::Incomplete { .. }));
    let mut gone = World::new(&[("r/step1_rank0.pt", 1, rank(0))]);
    gone.file("r/step1_rank0.pt").writers[0].fate = Fate::Killed;
    assert!(matches!(gone.at(99), Verdict::Torn { .. }));
}

#[test]
fn what_was_told_completes_what_has_no_better_evidence() {
    let mut world = World::new(&[("r/step1.pt", 1, writer(1, Some(8)))]);
    world.told = Told::Flush;
    assert_eq!(world.evidence(1), Some(Evidence::Told));
    world.file("r/step1.pt").state = FileState::Open { writers: 1 };
    assert_eq!(world.evidence(99), None, "not while it is open");
    let mut counted = World::new(&[("r/step1_rank0.pt", 1, writer(1, Some(2)))]);
    counted.told = Told::Flush;
    assert!(matches!(counted.at(99), Verdict::Incomplete { .. }), "flush waits for the count");
    counted.told = Told::Commit;
    assert_eq!(counted.evidence(1), Some(Evidence::Told));
}

#[test]
fn history_and_a_later_save_are_evidence() {
    let mut world = World::new(&[("r/step_0100.pt", 1, writer(1, Some(8)))]);
    world.succeeded = true;
    assert_eq!(world.evidence(2), Some(Evidence::Succeeded));
    world.succeeded = false;
    let names = std::iter::once("step_#.pt".to_owned()).collect();
    let processes = std::iter::once((1, 1)).collect();
    world.history = Some(History {
        framework: "torch_save".into(),
        names,
        world_size: Some(8),
        processes,
        session: "s".into(),
    });
    assert_eq!(world.evidence(2), None, "an exception may be on its way out of the process");
    assert_eq!(world.evidence(6), Some(Evidence::History));
    world.file("r/step_0100.pt").content = Content::Whole;
    assert_eq!(world.evidence(2), Some(Evidence::History));
    world.file("r/step_0100.pt").writers[0].fate = Fate::Killed;
    assert_eq!(world.evidence(2), None, "one of the writers died");
}

/// ZeRO 1 with two ranks: rank 0 has its part, and `latest` was written.
#[test]
fn deepspeed_is_complete_when_every_rank_has_written_its_part() {
    let rank = |k: u32| writer(k + 1, Some(2));
    let mut files = vec![
        ("r/global_step8/mp_rank_00_model_states.pt", 1, rank(0)),
        ("r/global_step8/zero_pp_rank_0_mp_rank_00_optim_states.pt", 2, rank(0)),
    ];
    match World::new(&files).at(99) {
        Verdict::Incomplete { missing, why, .. } => {
            assert_eq!(missing, ["rank 1"]);
            assert!(why.contains("1 of 2 ranks"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    files.push(("r/global_step8/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 5, rank(1)));
    assert!(
        matches!(World::new(&files).at(99), Verdict::Incomplete { .. }),
        "another family's file is not its"
    );
    files[2].0 = "r/global_step8/zero_pp_rank_1_mp_rank_00_optim_states.pt";
    assert!(matches!(World::new(&files).at(6), Verdict::Open { .. }), "more may follow");
    assert_eq!(World::new(&files).evidence(10), Some(Evidence::Count));
    let alone = World::new(&files[..1]);
    assert!(matches!(alone.at(99), Verdict::Settled { .. }), "ZeRO 0 has one file, which proves nothing");
}

/// Accelerate writes what a user registered after the random states, by which ranks are counted.
#[test]
fn fewer_files_than_before_by_a_writer_that_was_killed_are_not_whole() {
    let files = [
        ("r/checkpoint_7/random_states_0.pkl", 1, writer(1, Some(2))),
        ("r/checkpoint_7/random_states_1.pkl", 1, writer(2, Some(2))),
    ];
    let before = ["random_states_0.pkl", "random_states_1.pkl", "custom_checkpoint_0.pkl"];
    let history = |count: usize| History {
        framework: "accelerate".into(),
        names: before[..count].iter().map(|name| format!("checkpoint_#/{name}")).collect(),
        world_size: Some(2),
        processes: BTreeSet::new(),
        session: "another".into(),
    };
    let mut world = World::new(&files);
    world.history = Some(history(3));
    assert_eq!(world.evidence(99), Some(Evidence::Count), "nobody was killed");
    let writer = &mut world.file(files[0].0).writers[0];
    (writer.fate, writer.failed_at_ns) = (Fate::Killed, Some(2 * SECOND));
    assert!(
        matches!(world.at(99), Verdict::Torn { why } if why.contains("2 files") && why.contains("has 3"))
    );
    world.history = Some(history(2));
    assert_eq!(world.evidence(99), Some(Evidence::Count), "as many as before");
    world.history = Some(History { world_size: Some(4), ..history(3) });
    assert_eq!(world.evidence(99), Some(Evidence::Count), "that job was larger");
    world.history = Some(history(3));
    world.file(files[0].0).writers[0].failed_at_ns = Some(7 * SECOND);
    assert_eq!(world.evidence(99), Some(Evidence::Count), "it had settled");
}

/// A flush just after a job was killed: it is not known yet how its ranks ended, and the version before has not settled
/// either.
#[test]
fn a_flush_does_not_make_whole_what_has_fewer_files_than_the_one_before() {
    let files = [
        ("r/checkpoint_7/random_states_0.pkl", 1, writer(1, Some(2))),
        ("r/checkpoint_7/random_states_1.pkl", 1, writer(2, Some(2))),
    ];
    let mut world = World::new(&files);
    world.told = Told::Flush;
    assert_eq!(world.evidence(1), Some(Evidence::Count), "nothing was before");
    world.older = Some(Older { files: 4, ranks: 3 });
    assert_eq!(world.evidence(1), Some(Evidence::Count), "that job was larger");
    world.older = Some(Older { files: 3, ranks: 2 });
    assert!(matches!(world.at(1), Verdict::Open { again_at_ns: Some(at), .. } if at == 6 * SECOND));
    assert_eq!(world.evidence(6), Some(Evidence::Count), "nobody was killed");
    let writer = &mut world.file(files[0].0).writers[0];
    (writer.fate, writer.failed_at_ns) = (Fate::Killed, Some(2 * SECOND));
    assert!(matches!(world.at(2), Verdict::Torn { why } if why.contains("2 files") && why.contains("has 3")));
    world.succeeded = true;
    assert_eq!(world.evidence(2), Some(Evidence::Count), "it went on to the next");
}

/// If a directory's writer was killed and no rule knows the directory, a flush proves no more than time would.
#[test]
fn a_flush_does_not_make_whole_what_a_killed_writer_left() {
    let files = [("r/step_7/a.bin", 1, writer(1, Some(2))), ("r/step_7/b.bin", 1, writer(1, Some(2)))];
    let mut world = World::new(&files);
    world.told = Told::Flush;
    assert_eq!(world.evidence(1), Some(Evidence::Told));
    world.older = Some(Older { files: 3, ranks: 0 });
    assert!(
        matches!(world.at(5), Verdict::Open { again_at_ns: Some(at), why } if at == 6 * SECOND && why.contains("has 3"))
    );
    let mut unfinished = World::new(&[files[0].clone(), ("r/step_7/b.bin.tmp", 1, writer(1, Some(2)))]);
    (unfinished.told, unfinished.older) = (Told::Flush, world.older.take());
    assert_eq!(unfinished.evidence(6), None, "its writer lives, and may finish the file that is in flight");
    unfinished.file(files[0].0).writers[0].fate = Fate::Exited;
    assert_eq!(
        unfinished.evidence(6),
        Some(Evidence::Told),
        "a file that stays in flight is waited for no longer"
    );
    world.file(files[0].0).writers[0].fate = Fate::Ended;
    assert!(matches!(world.at(5), Verdict::Open { .. }), "how it ended is not told yet");
    assert_eq!(world.evidence(6), Some(Evidence::Told));
    let writer = &mut world.file(files[0].0).writers[0];
    (writer.fate, writer.failed_at_ns) = (Fate::Killed, Some(2 * SECOND));
    assert!(matches!(world.at(2), Verdict::Torn { .. }));
    world.told = Told::Commit;
    assert_eq!(world.evidence(2), Some(Evidence::Told), "a person knows better");
}

#[test]
fn a_marker_that_one_rank_writes_is_needed_and_proves_nothing() {
    let rank = |k: u32| writer(k + 1, Some(2));
    let mut files = vec![
        ("r/checkpoint-5/model.safetensors", 1, rank(0)),
        ("r/checkpoint-5/rng_state_0.pth", 1, rank(0)),
    ];
    let told = |files: &[(&str, i64, Writer)]| {
        let mut world = World::new(files);
        world.told = Told::Flush;
        world.at(99)
    };
    assert!(matches!(told(&files), Verdict::Incomplete { why, .. } if why.contains("marker")));
    files.push(("r/checkpoint-5/trainer_state.json", 2, rank(0)));
    assert!(matches!(told(&files), Verdict::Incomplete { why, .. } if why.contains("1 of 2 ranks")));
    files.push(("r/checkpoint-5/rng_state_1.pth", 4, rank(1)));
    assert_eq!(World::new(&files).evidence(9), Some(Evidence::Count));
    let one = [
        ("r/checkpoint-5/model.safetensors", 1, writer(1, None)),
        ("r/checkpoint-5/rng_state.pth", 1, writer(1, None)),
        ("r/checkpoint-5/trainer_state.json", 2, writer(1, None)),
    ];
    assert_eq!(World::new(&one).evidence(7), Some(Evidence::OneProcess));
}

#[test]
fn what_follows_megatrons_index_is_in_the_same_version() {
    let mut files = vec![
        ("r/iter_0000100/__0_0.distcp", 1, writer(1, Some(2))),
        ("r/iter_0000100/.metadata", 2, writer(1, Some(2))),
    ];
    let index = ("r/iter_0000100/.metadata", [("__0_0.distcp", Some(100))]);
    let world = |files: &[_]| World::new(files).index(index.0, &index.1);
    assert!(matches!(world(&files).at(3), Verdict::Open { .. }), "more may follow");
    assert_eq!(world(&files).evidence(7), Some(Evidence::Index), "torch_dcp writes no more");
    files.push(("r/iter_0000100/metadata.json", 3, writer(1, Some(2))));
    files.push(("r/iter_0000100/integrity.json", 4, writer(1, Some(2))));
    files.push(("r/iter_0000100/train_state.pt", 5, writer(1, Some(2))));
    let listed = [("__0_0.distcp", None), (".metadata", None), ("metadata.json", None)];
    let mut listing = world(&files).index("r/iter_0000100/integrity.json", &listed);
    assert_eq!(listing.evidence(10), Some(Evidence::Index));
    listing.file("r/iter_0000100/__0_0.distcp").size_bytes = 50;
    assert!(matches!(listing.at(99), Verdict::Incomplete { .. }), "one index does not outweigh the other");
}

#[test]
fn files_beside_shards_do_not_void_their_index() {
    let mut files = vec![
        ("r/step-1/__0_0.distcp", 1, writer(1, Some(2))),
        ("r/step-1/ema_0.pt", 1, writer(1, Some(2))),
        ("r/step-1/.metadata", 3, writer(1, Some(2))),
    ];
    let covered = [("__0_0.distcp", Some(100))];
    assert_eq!(World::new(&files).index("r/step-1/.metadata", &covered).evidence(3), Some(Evidence::Index));
    files[1].0 = "r/step-1/ema_rank1.pt";
    let stray = World::new(&files).index("r/step-1/.metadata", &covered);
    assert!(
        matches!(stray.at(99), Verdict::Incomplete { .. }),
        "one rank's file of two, and no index names it"
    );
}

#[test]
fn ranks_of_one_name_are_counted_whoever_names_files_so() {
    let rank = |k: u32| writer(k + 1, Some(2));
    let files = [("r/step=100_rank0.ckpt", 1, rank(0)), ("r/step=100_rank1.ckpt", 2, rank(1))];
    assert_eq!(World::new(&files).evidence(7), Some(Evidence::Count));
    assert!(matches!(World::new(&files[..1]).at(99), Verdict::Incomplete { .. }));
}

#[test]
fn a_directory_that_was_renamed_when_done_is_complete_at_once() {
    let files = |name: &'static str| {
        let metadata = if name == "7" {
            "r/7/_CHECKPOINT_METADATA"
        } else {
            "r/7.orbax-checkpoint-tmp/_CHECKPOINT_METADATA"
        };
        World::new(&[(metadata, 1, writer(1, Some(2)))])
    };
    let mut written = files("7.orbax-checkpoint-tmp");
    written.told = Told::Flush;
    assert!(matches!(written.at(99), Verdict::Incomplete { why, .. } if why.contains("temporary name")));
    written.file("r/7.orbax-checkpoint-tmp/_CHECKPOINT_METADATA").writers[0].fate = Fate::Killed;
    assert!(matches!(written.at(99), Verdict::Torn { .. }));
    let mut renamed = files("7");
    assert!(matches!(renamed.at(99), Verdict::Settled { .. }), "made in place, nothing is proved");
    renamed.renamed_at_ns = Some(2 * SECOND);
    assert_eq!(renamed.evidence(2), Some(Evidence::Marker));
    renamed.renamed_at_ns = Some(0);
    assert_eq!(renamed.evidence(99), None, "something came after it");
}

#[test]
fn a_directory_that_was_renamed_is_whole_although_its_writers_were_killed_at_once() {
    // Items of torch_checkpointing, and files of any writer that writes beside and renames.
    for item in ["model", "net"] {
        let names = [format!("r/step_7/{item}_0.pt"), format!("r/step_7/{item}_1.pt")];
        let files = [(names[0].as_str(), 1, writer(1, Some(2))), (names[1].as_str(), 1, writer(2, Some(2)))];
        let mut world = World::new(&files);
        for name in &names {
            let writer = &mut world.file(name).writers[0];
            (writer.fate, writer.failed_at_ns) = (Fate::Killed, Some(2 * SECOND));
        }
        assert!(
            matches!(world.at(99), Verdict::Torn { .. }),
            "{item}: made in place, more may have been to come"
        );
        world.renamed_at_ns = Some(2 * SECOND);
        assert_eq!(world.evidence(2), Some(Evidence::Marker), "{item}");
    }
}

#[test]
fn nemo_is_not_complete_while_something_says_so() {
    const CHECKPOINT: &str = "r/a-step=3-consumed_samples=1";
    let name = |rest: &str| format!("{CHECKPOINT}{rest}");
    let (shard, index, unfinished) =
        (name("/weights/__0_0.distcp"), name("/weights/.metadata"), name("-unfinished"));
    let files = [(shard.as_str(), 1, writer(1, Some(2))), (index.as_str(), 2, writer(1, Some(2)))];
    let covered = [("__0_0.distcp", Some(100))];
    assert_eq!(World::new(&files).index(&index, &covered).evidence(7), Some(Evidence::Index));
    let mut beside = World::new(&files).index(&index, &covered);
    let fact = beside.files[&path(&shard)].clone();
    beside.files.insert(path(&unfinished), fact);
    assert!(matches!(beside.at(99), Verdict::Incomplete { why, .. } if why.contains("not finished")));
}

#[test]
fn a_marker_that_a_users_rule_names_proves_all_that_came_before_it() {
    let rule = crate::recognise::RuleSpec {
        name: "ours".into(),
        directory: Some("^save_(?<step>[0-9]+)$".into()),
        signature: Some("\\.part$".into()),
        shard: Some("^rank(?<rank>[0-9]+)\\.part$".into()),
        marker: Some("^DONE$".into()),
        ..Default::default()
    };
    let mut files =
        vec![("r/save_7/rank0.part", 1, writer(1, None)), ("r/save_7/rank1.part", 2, writer(2, None))];
    let ours =
        |files: &[_]| World { rules: Rules::with(std::slice::from_ref(&rule)).unwrap(), ..World::new(files) };
    assert!(matches!(ours(&files).at(99), Verdict::Incomplete { .. }));
    files.push(("r/save_7/DONE", 3, writer(1, None)));
    assert_eq!(ours(&files).evidence(3), Some(Evidence::Marker));
}

#[test]
fn a_job_that_is_killed_after_its_marker_leaves_a_whole_checkpoint() {
    let files = |world_size| {
        [
            ("r/checkpoint-7/model.safetensors", 1, writer(1, world_size)),
            ("r/checkpoint-7/rng_state.pth", 2, writer(1, world_size)),
            ("r/checkpoint-7/trainer_state.json", 3, writer(1, world_size)),
        ]
    };
    let killed = |mut world: World| {
        world.files.values_mut().for_each(|fact| fact.writers[0].fate = Fate::Killed);
        world
    };
    assert_eq!(killed(World::new(&files(None))).evidence(8), Some(Evidence::OneProcess));
    assert!(
        matches!(killed(World::new(&files(Some(2)))).at(8), Verdict::Torn { .. }),
        "others were to write"
    );
    let half = killed(World::new(&files(None)[..2]));
    assert!(matches!(half.at(8), Verdict::Incomplete { .. } | Verdict::Torn { .. }), "{:?}", half.at(8));
}

#[test]
fn an_index_names_no_more_files_than_are_kept() {
    let names: Vec<_> = (0..=MAX_INDEX_FILES).map(|file| format!("\"{file:x}\":\"{file:x}\"")).collect();
    for (kind, field) in [(IndexKind::Safetensors, "weight_map"), (IndexKind::Megatron, "files")] {
        let index = |names: &[String]| format!("{{\"{field}\":{{{}}}}}", names.join(","));
        assert!(matches!(parse_index(kind, index(&names).as_bytes()), Err(IndexError::Files)));
        assert_eq!(parse_index(kind, index(&names[1..]).as_bytes()).unwrap().len(), MAX_INDEX_FILES);
        let deep = format!("{{\"{field}\":{}", "[".repeat(100_000));
        assert!(matches!(parse_index(kind, deep.as_bytes()), Err(IndexError::Json { .. })));
    }
}
