//! Saves over a version that is whole.

use super::*;

const RANK0: &str = "r/ckpt_rank0.pt";
const RANK1: &str = "r/ckpt_rank1.pt";

fn rank(k: u32) -> Writer {
    Writer { rank: Some(k.into()), ..writer(k + 1, Some(2)) }
}

/// Makes the file equal to the one in the version before.
fn waits(world: &mut World, name: &str) {
    let file = world.file(name);
    (file.before, file.committed) = (Before::Same, true);
}

fn ended(world: &mut World, name: &str, fate: Fate, at_ns: Option<i64>) {
    let writer = &mut world.file(name).writers[0];
    (writer.fate, writer.failed_at_ns) = (fate, at_ns);
}

/// Makes a world in which rank 0 has saved again at second 10.
fn half() -> World {
    let mut world = World::new(&[(RANK0, 10, rank(0)), (RANK1, 2, rank(1))]);
    world.file(RANK0).before = Before::Other;
    waits(&mut world, RANK1);
    world
}

/// Makes its processes the writers of the version before, too.
fn by_the_same_processes(mut world: World) -> World {
    world.history = Some(History {
        framework: "torch_save".into(),
        names: BTreeSet::new(),
        world_size: Some(2),
        processes: [(1, 1), (2, 1)].into(),
        session: "s".into(),
    });
    world
}

fn kept_and_undecided(world: &World) -> Option<(Option<i64>, bool)> {
    match world.at(99) {
        Verdict::Incomplete { kept_at_ns, undecided, .. } => Some((kept_at_ns, undecided)),
        _ => None,
    }
}

#[test]
fn a_rank_that_has_not_written_anew_is_missing() {
    for committed in [true, false] {
        let mut world = half();
        // The version before may not be committed yet.
        world.file(RANK1).committed = committed;
        for told in [Told::No, Told::Flush] {
            world.told = told;
            match world.at(99) {
                Verdict::Incomplete { missing, why, kept_at_ns: None, .. } => {
                    assert_eq!((missing, why.contains("1 of 2 ranks")), (vec!["rank 1".to_owned()], true));
                }
                other => panic!("{other:?}"),
            }
        }
        world.told = Told::Commit;
        assert_eq!(world.evidence(10), Some(Evidence::Told), "a person knows better");
        world.told = Told::No;
        ended(&mut world, RANK0, Fate::Killed, Some(11 * SECOND));
        ended(&mut world, RANK1, Fate::Killed, Some(11 * SECOND));
        assert!(matches!(world.at(99), Verdict::Torn { .. }));
    }
    let mut world = half();
    world.file(RANK1).before = Before::Other;
    assert_eq!(world.evidence(10), Some(Evidence::Count), "every rank has written");
    world.file(RANK0).before = Before::Nothing;
    assert_eq!(
        world.evidence(10),
        Some(Evidence::Count),
        "copied or linked from elsewhere, it is of this checkpoint anew"
    );
}

/// A person's tool has no ranks, and neither has a copy.
#[test]
fn one_rank_s_file_that_a_process_without_ranks_wrote_is_whole() {
    let mut world = half();
    world.file(RANK0).writers[0] = writer(7, None);
    assert_eq!(world.evidence(99), Some(Evidence::OneProcess));
}

#[test]
fn ranks_that_all_ended_well_left_on_purpose_what_they_did_not_write_anew() {
    let mut world = by_the_same_processes(half());
    ended(&mut world, RANK0, Fate::Exited, None);
    assert_eq!(kept_and_undecided(&world), Some((None, false)), "rank 1 may be about to write");
    ended(&mut world, RANK1, Fate::Exited, None);
    assert_eq!(world.evidence(11), Some(Evidence::Count));
    // A handler of SIGTERM saves and ends well; the other rank was killed earlier.
    ended(&mut world, RANK1, Fate::Killed, Some(9 * SECOND));
    assert!(matches!(world.at(99), Verdict::Torn { .. }));
    ended(&mut world, RANK1, Fate::Gone, None);
    assert_eq!(kept_and_undecided(&world), Some((Some(15 * SECOND), true)), "nobody saw how it ended");
}

/// The processes that wrote the version before may not be those that have to write the rest: a job came back, or a process lives
/// for one save.
#[test]
fn it_stays_without_a_commit_where_the_other_ranks_are_not_known() {
    for history in [false, true] {
        let mut world = if history { by_the_same_processes(half()) } else { half() };
        world.file(RANK0).writers[0].process = (7, 1);
        ended(&mut world, RANK0, Fate::Exited, None);
        ended(&mut world, RANK1, Fate::Killed, Some(3 * SECOND));
        assert_eq!(kept_and_undecided(&world), Some((Some(15 * SECOND), false)), "{history}");
        ended(&mut world, RANK1, Fate::Exited, None);
        assert_eq!(kept_and_undecided(&world), Some((Some(15 * SECOND), false)), "{history}");
        ended(&mut world, RANK0, Fate::Killed, Some(16 * SECOND));
        assert_eq!(kept_and_undecided(&world), Some((Some(15 * SECOND), true)), "long after: {history}");
        ended(&mut world, RANK0, Fate::Killed, Some(14 * SECOND));
        assert!(matches!(world.at(99), Verdict::Torn { .. }), "{history}");
    }
    let mut adopted = half();
    adopted.file(RANK1).writers.clear();
    ended(&mut adopted, RANK0, Fate::Exited, None);
    assert_eq!(
        kept_and_undecided(&adopted),
        Some((Some(15 * SECOND), false)),
        "after a restart of the daemon"
    );
}

/// DeepSpeed under a fixed tag: the model's state comes before any rank's part.
#[test]
fn parts_that_the_version_before_has_prove_nothing_of_a_save_over_it() {
    let name = |rank: u32| format!("r/global_step8/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
    let (model, parts) = ("r/global_step8/mp_rank_00_model_states.pt", [name(0), name(1)]);
    let files = [(model, 10, rank(0)), (parts[0].as_str(), 2, rank(0)), (parts[1].as_str(), 2, rank(1))];
    let mut world = World::new(&files);
    parts.iter().for_each(|part| waits(&mut world, part));
    assert_eq!(world.evidence(99), Some(Evidence::Count), "a file was added");
    world.file(model).before = Before::Other;
    assert!(matches!(world.at(99), Verdict::Settled { .. }), "{:?}", world.at(99));
    ended(&mut world, model, Fate::Killed, Some(11 * SECOND));
    assert!(matches!(world.at(99), Verdict::Torn { .. }), "{:?}", world.at(99));
    ended(&mut world, model, Fate::Alive, None);
    world.succeeded = true;
    assert_eq!(world.evidence(99), Some(Evidence::Succeeded), "its writers went on to the next");
    world.succeeded = false;

    let anew = |world: &mut World, part: &str| {
        let file = world.file(part);
        (file.before, file.committed, file.published_at_ns) = (Before::Other, false, 11 * SECOND);
    };
    anew(&mut world, &parts[0]);
    assert!(matches!(world.at(99), Verdict::Incomplete { missing, .. } if missing == ["rank 1"]));
    anew(&mut world, &parts[1]);
    assert_eq!(world.evidence(16), Some(Evidence::Count));
}

/// ZeRO 3 has two kinds of file of each rank.
#[test]
fn a_kind_of_file_that_no_rank_wrote_anew_is_missing_where_a_writer_was_killed() {
    let part = |rank: u32, kind: &str| format!("r/tag/zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt");
    let names = [part(0, "model"), part(1, "model"), part(0, "optim"), part(1, "optim")];
    let files: Vec<_> = (0..).zip(&names).map(|(k, name)| (name.as_str(), 10, rank(k % 2))).collect();
    let mut world = World::new(&files);
    for (k, name) in names.iter().enumerate() {
        world.file(name).before = Before::Other;
        if k > 1 {
            waits(&mut world, name);
        }
    }
    assert_eq!(world.evidence(99), Some(Evidence::Count), "the others may be left over");
    ended(&mut world, &names[0], Fate::Killed, Some(11 * SECOND));
    assert!(matches!(world.at(99), Verdict::Incomplete { kept_at_ns: None, .. }), "rank 1 lives");
    ended(&mut world, &names[1], Fate::Killed, Some(11 * SECOND));
    assert!(matches!(world.at(99), Verdict::Torn { .. }));
}

/// DCP without collectives: shards, and then each rank's own index.
#[test]
fn markers_of_ranks_are_needed_anew() {
    let file = |name: &str| format!("r/step-1/{name}");
    let names = ["__0_0.distcp", "__1_0.distcp", "__0.metadata", "__1.metadata"].map(file);
    let files: Vec<_> = (0..).zip(&names).map(|(k, name)| (name.as_str(), 10, rank(k % 2))).collect();
    let mut world = World::new(&files);
    let all = |world: &mut World| world.files.values_mut().for_each(|fact| fact.before = Before::Other);
    all(&mut world);
    assert_eq!(world.evidence(99), Some(Evidence::Count));
    waits(&mut world, &names[3]);
    assert!(matches!(world.at(99), Verdict::Incomplete { missing, .. } if missing == ["rank 1"]));
    waits(&mut world, &names[1]);
    waits(&mut world, &names[2]);
    assert!(matches!(world.at(99), Verdict::Settled { .. }), "{:?}", world.at(99));
    ended(&mut world, &names[0], Fate::Killed, Some(11 * SECOND));
    assert!(matches!(world.at(99), Verdict::Torn { .. }), "{:?}", world.at(99));
}

#[test]
fn of_a_rank_s_files_in_several_directories_each_is_needed_anew() {
    let names = ["model/rank0.pt", "model/rank1.pt", "optim/rank0.pt", "optim/rank1.pt"]
        .map(|name| format!("r/step_5/{name}"));
    let files: Vec<_> = (0..).zip(&names).map(|(k, name)| (name.as_str(), 10, rank(k % 2))).collect();
    let mut world = World::new(&files);
    world.files.values_mut().for_each(|fact| fact.before = Before::Other);
    assert_eq!(world.evidence(99), Some(Evidence::Count));
    waits(&mut world, &names[3]);
    assert!(matches!(world.at(99), Verdict::Incomplete { missing, .. } if missing == ["rank 1"]));
}
