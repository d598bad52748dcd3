//! Leftovers: cut files, and the index of shards that are gone.

use super::*;

#[test]
fn a_cut_file_is_torn_unless_something_vouches_for_it() {
    let mut world = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    world.file("r/step1.pt").state = FileState::Cut;
    assert!(matches!(world.at(99), Verdict::Torn { .. }));
    world.told = Told::Flush;
    assert!(matches!(world.at(99), Verdict::Torn { .. }), "nobody's word mends it");
    world.file("r/step1.pt").vouched = true;
    assert!(world.evidence(99).is_some());

    let covered = [("__0_0.distcp", Some(100)), ("__1_0.distcp", Some(100))];
    let mut proven = dcp().index("r/step-1/.metadata", &covered);
    proven.file("r/step-1/__0_0.distcp").state = FileState::Cut;
    assert_eq!(proven.evidence(3), Some(Evidence::Index), "the index proves its exact size");
    proven.file("r/step-1/__0_0.distcp").size_bytes = 101;
    assert!(matches!(proven.at(3), Verdict::Torn { .. }));
}

/// `curl URL >step1.pt` leaves closing to its end; another thread may have been writing the file, too.
#[test]
fn what_a_process_left_open_that_ended_well_is_kept_and_not_committed_without_other_proof() {
    let mut world = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    world.file("r/step1.pt").state = FileState::Cut;
    for (fate, is_torn) in
        [(Fate::Exited, false), (Fate::Failed, true), (Fate::Killed, true), (Fate::Gone, true)]
    {
        world.file("r/step1.pt").writers[0].fate = fate;
        assert_eq!(matches!(world.at(99), Verdict::Torn { .. }), is_torn, "{fate:?}");
    }
    world.file("r/step1.pt").writers[0].fate = Fate::Ended;
    assert!(matches!(world.at(99), Verdict::Open { .. }), "the kernel will say it");
    world.file("r/step1.pt").writers[0].fate = Fate::Exited;
    assert!(matches!(world.at(5), Verdict::Open { .. }));
    world.told = Told::Flush;
    assert!(matches!(world.at(99), Verdict::Settled { undecided: true, .. }));
    world.file("r/step1.pt").content = Content::Whole;
    assert!(world.evidence(99).is_some(), "its own structure says so");
    world.file("r/step1.pt").content = Content::Unknown;
    world.told = Told::Commit;
    assert_eq!(world.evidence(99), Some(Evidence::Told));
}

/// A start with empty memory finds the bytes, but no writers.
#[test]
fn what_was_recorded_as_doubted_stays_in_doubt_where_nothing_more_is_known() {
    let mut world = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    world.file("r/step1.pt").writers.clear();
    let is_doubted = |verdict: Verdict| match verdict.in_doubt("who wrote it left it open") {
        Verdict::Settled { detail, undecided } => undecided && detail == "who wrote it left it open",
        _ => false,
    };
    assert!(!world.at(99).is_doubt());
    assert!(is_doubted(world.at(99)), "{:?}", world.at(99));
    world.told = Told::Flush;
    assert!(matches!(world.at(99), Verdict::Complete { evidence: Evidence::Told, .. }));
    assert!(is_doubted(world.at(99)), "a flush is no proof");
    world.file("r/step1.pt").state = FileState::Open { writers: 1 };
    assert!(matches!(world.at(99).in_doubt("it was left open"), Verdict::Open { .. }), "it is written again");
}

/// The daemon that saw the program end may be gone, and its knowledge with it. Only its record stays.
#[test]
fn a_recorded_doubt_wins_over_an_end_that_nobody_saw_and_over_no_other() {
    let mut world = World::new(&[("r/step1.pt", 1, writer(1, None))]);
    for (fate, recorded, is_torn) in [
        (Fate::Gone, false, true),
        (Fate::Gone, true, false),
        (Fate::Exited, true, false),
        (Fate::Failed, true, true),
        (Fate::Killed, true, true),
    ] {
        let file = world.file("r/step1.pt");
        (file.state, file.doubted, file.writers[0].fate) = (FileState::Cut, recorded, fate);
        let verdict = world.at(99);
        assert_eq!(matches!(verdict, Verdict::Torn { .. }), is_torn, "{fate:?}, {recorded}: {verdict:?}");
        assert_eq!(verdict.is_doubt(), !is_torn, "{fate:?}, {recorded}: {verdict:?}");
    }
    world.file("r/step1.pt").writers[0].fate = Fate::Ended;
    assert!(matches!(world.at(99), Verdict::Open { .. }), "the kernel will say it");
}

/// A thread writes on while its program ends: a count of all ranks proves nothing about the bytes of that
/// file.
#[test]
fn no_count_and_no_save_that_came_later_proves_a_file_that_was_left_open() {
    let ema = "r/checkpoint-5/ema.safetensors";
    let mut world = World::new(&[
        ("r/checkpoint-5/model.safetensors", 1, writer(1, Some(2))),
        ("r/checkpoint-5/trainer_state.json", 2, writer(1, Some(2))),
        ("r/checkpoint-5/rng_state_0.pth", 2, writer(1, Some(2))),
        ("r/checkpoint-5/rng_state_1.pth", 2, writer(2, Some(2))),
        (ema, 3, writer(1, Some(2))),
    ]);
    world.files.values_mut().for_each(|fact| fact.writers[0].fate = Fate::Exited);
    assert_eq!(world.evidence(99), Some(Evidence::Count));
    world.file(ema).state = FileState::Cut;
    for (told, succeeded) in [(Told::No, false), (Told::Flush, false), (Told::No, true)] {
        (world.told, world.succeeded) = (told, succeeded);
        let undecided = world.at(99);
        assert!(matches!(undecided, Verdict::Settled { undecided: true, .. }), "{told:?}: {undecided:?}");
    }
    world.succeeded = false;
    assert!(matches!(world.at(4), Verdict::Open { .. }), "it has not settled");
    world.told = Told::Commit;
    assert!(world.evidence(99).is_some(), "a person knows more");
    world.told = Told::No;
    world.file(ema).content = Content::Whole;
    assert_eq!(world.evidence(99), Some(Evidence::Count), "its own structure says so");
    world.file(ema).content = Content::Unknown;
    world.files.remove(&path("r/checkpoint-5/rng_state_1.pth"));
    assert!(matches!(world.at(99), Verdict::Incomplete { .. }), "what is missing is said first");

    // The shards have the size that the index gives; the files beside them are in no index.
    let covered = [("__0_0.distcp", Some(100)), ("__1_0.distcp", Some(100))];
    let mut shards = dcp().index("r/step-1/.metadata", &covered);
    shards.files.values_mut().for_each(|fact| fact.writers[0].fate = Fate::Exited);
    shards.file("r/step-1/__0_0.distcp").state = FileState::Cut;
    assert_eq!(shards.evidence(3), Some(Evidence::Index));
    let beside = FileFact { content: Content::Unknown, ..shards.file("r/step-1/__0_0.distcp").clone() };
    shards.files.insert(path("r/step-1/train_state.pt"), beside);
    assert!(matches!(shards.at(99), Verdict::Settled { undecided: true, .. }));
}

#[test]
fn a_whole_model_over_an_index_that_was_left_waits_for_no_end_of_its_job() {
    let shards = [("model-00001-of-00002.safetensors", None), ("model-00002-of-00002.safetensors", None)];
    let over = |file: &str| {
        let mut world = World::new(&[
            ("m/model.safetensors.index.json", 1, writer(1, None)),
            (file, 9, writer(1, None)),
            ("m/config.json", 8, writer(1, None)),
        ])
        .index("m/model.safetensors.index.json", &shards);
        world.file("m/model.safetensors.index.json").committed = true;
        world.file(file).content = Content::Whole;
        world.removed = shards.iter().map(|(name, _)| path(&format!("m/{name}"))).collect();
        world
    };
    let mut world = over("m/model.safetensors");
    assert_eq!((world.evidence(10), world.evidence(99)), (None, Some(Evidence::OneProcess)));
    for (content, second) in [(Content::Unknown, 9), (Content::Whole, 0)] {
        let file = world.file("m/model.safetensors");
        (file.content, file.published_at_ns) = (content, second * SECOND);
        assert!(matches!(world.at(99), Verdict::Incomplete { .. }), "{content:?}, written at {second}");
    }
    for other in ["m/optimizer.pt", "m/model-00001-of-00003.safetensors"] {
        assert!(matches!(over(other).at(99), Verdict::Incomplete { .. }), "{other} is no model in one file");
    }

    // Saved once more: the committed version has the index, and none of the files that it lists.
    let mut again = over("m/model.safetensors");
    again.removed.clear();
    assert_eq!(again.evidence(99), Some(Evidence::OneProcess));
    again.file("m/model.safetensors.index.json").committed = false;
    assert!(matches!(again.at(99), Verdict::Incomplete { .. }), "the shards of a new index are yet to come");
    let mut killed = over("m/model.safetensors");
    killed.removed.clear();
    killed.file("m/model.safetensors").writers[0].fate = Fate::Killed;
    killed.file("m/model.safetensors").writers[0].failed_at_ns = Some(10 * SECOND);
    assert!(matches!(killed.at(99), Verdict::Torn { .. }), "before it had settled");
}

/// `mv run/step_7 old/step_7` after a job was killed: whoever renames the directory does not know whether it
/// is whole.
#[test]
fn a_rename_of_a_directory_after_its_writer_was_killed_proves_nothing() {
    let names = ["r/step_7/model_0.pt", "r/step_7/model_1.pt"];
    let files = [(names[0], 1, writer(1, Some(2))), (names[1], 1, writer(2, Some(2)))];
    let mut world = World::new(&files);
    world.renamed_at_ns = Some(60 * SECOND);
    assert_eq!(world.evidence(60), Some(Evidence::Marker));
    let mut killed_at = |second: Option<i64>, renamed: i64| {
        for name in names {
            let writer = &mut world.file(name).writers[0];
            (writer.fate, writer.failed_at_ns) = (Fate::Killed, second.map(|second| second * SECOND));
        }
        world.renamed_at_ns = Some(renamed * SECOND);
        world.at(99)
    };
    for second in [Some(2), None] {
        let moved = killed_at(second, 60);
        assert!(matches!(moved, Verdict::Settled { undecided: true, .. }), "{second:?}: {moved:?}");
    }
    assert!(matches!(killed_at(Some(2), 2), Verdict::Complete { .. }), "renamed, and then killed");
    assert!(matches!(killed_at(Some(30), 60), Verdict::Complete { .. }), "it did other things first");
}

/// Processes of another pid namespace: none is known to live, and none is known to have ended well.
#[test]
fn what_unseen_writers_closed_is_kept_when_it_has_settled_and_not_committed() {
    for names in [&["r/step1.pt"][..], &["r/step-1/a.pt", "r/step-1/b.pt"]] {
        let files: Vec<_> = names.iter().map(|name| (*name, 1, writer(1, None))).collect();
        let mut world = World::new(&files);
        for content in [Content::Unknown, Content::Whole] {
            for name in names {
                let file = world.file(name);
                (file.writers, file.content) = (Vec::new(), content);
            }
            assert!(matches!(world.at(2), Verdict::Open { .. }), "{:?}", world.at(2));
            let settled = world.at(99);
            assert!(matches!(settled, Verdict::Settled { undecided: false, .. }), "{settled:?}");
            assert!(settled.kept_from().is_some(), "it goes to Tier-3");
        }
    }
    let mut lacking = dcp();
    lacking.files.remove(&path("r/step-1/.metadata"));
    lacking.files.values_mut().for_each(|file| file.writers.clear());
    let kept = lacking.at(99);
    assert!(matches!(kept, Verdict::Incomplete { kept_at_ns: Some(_), .. }), "{kept:?}");
}
