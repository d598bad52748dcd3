//! Keys as the format note gives them, and that each is read back as it was built.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

fn version(run: &str, directory: &str) -> VersionId {
    VersionId {
        run: if run == "_" { RunPath::root() } else { RunPath::new(RelPath::new(run).unwrap()).unwrap() },
        directory: CheckpointName::new(directory).unwrap(),
        timeline: Timeline(0),
        version: Version(1),
    }
}

fn data(run: &str, directory: &str, path: &str) -> String {
    let part = Part::from(AttemptId(0xab));
    Key::data(&version(run, directory), part, &RelPath::new(path).unwrap()).unwrap().to_string()
}

#[test]
fn keys_are_those_of_the_format_note() {
    assert_eq!(data("r", "step100.pt", "r/step100.pt"), "r/step100.pt/v0.1/a-00000000000000ab/step100.pt");
    assert_eq!(
        data("out/checkpoint", "step-100", "out/checkpoint/step-100/__0_0.distcp"),
        "out/checkpoint/step-100/v0.1/a-00000000000000ab/__0_0.distcp"
    );
    assert_eq!(data("_", "a.pt", "a.pt"), "_/a.pt/v0.1/a-00000000000000ab/a.pt");
    let committed = Key::Committed { version: version("r", "step100.pt") };
    assert_eq!(committed.to_string(), "r/step100.pt/v0.1/_COMMITTED");
    let boundary = Key::numbered(Series::Boundary(Label::of_run(&version("a/b", "x").run)), 7);
    assert_eq!(boundary.to_string(), ".tidemark/boundary-a%2Fb/00000000000000000007");
    let (bytes, sidecar) = Key::loose(&RelPath::new("r/latest").unwrap(), Generation(3));
    assert_eq!(bytes.to_string(), ".tidemark/loose/r/latest/g-3");
    assert_eq!(sidecar.to_string(), ".tidemark/loose/r/latest/g-3.json");
}

#[test]
fn names_of_users_never_pass_for_ours() {
    assert_eq!(
        data("v1.2", "_COMMITTED", "v1.2/_COMMITTED/.tidemark/attempt.json"),
        "%761.2/%5FCOMMITTED/v0.1/a-00000000000000ab/%2Etidemark/attempt.json"
    );
    let framework = data("r", "c", "r/c/a-model/v1.2/x.bin");
    assert!(framework.ends_with("/a-model/v1.2/x.bin"), "framework files keep their names: {framework}");
    assert_eq!(data("r", ".", "r/x"), "r/%2E/v0.1/a-00000000000000ab/x");
}

#[test]
fn a_path_that_does_not_fit_is_named_by_its_hash() {
    let deep = ["r/c", &"d".repeat(230), &"e".repeat(230), &"f".repeat(230), &"g".repeat(230)].join("/");
    for path in [deep.into_bytes(), [b"r/c/".to_vec(), vec![0xff; 100]].concat()] {
        let path = RelPath::new(path).unwrap();
        let key = Key::data(&version("r", "c"), Part::from(AttemptId(1)), &path).unwrap();
        assert!(key.to_string().contains("/a-0000000000000001/.tidemark/long/"), "{key}");
        assert_eq!(key.to_string().parse::<Key>().unwrap(), key);
    }
}

#[test]
fn a_path_outside_the_run_has_no_key() {
    let outside = RelPath::new("other/x").unwrap();
    assert_eq!(Key::data(&version("r", "c"), Part::from(AttemptId(1)), &outside), None);
}

#[test]
fn a_node_cannot_imitate_a_stand_in() {
    let life = |node: &str| NodeLife { node: node.parse().unwrap(), incarnation: Incarnation(1) };
    assert!(life("host-by-night").is_unambiguous());
    assert!(!life("a-0000000000000001-by-b").is_unambiguous());
}

fn components() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let special = prop::sample::select(vec![
        "_",
        "_COMMITTED",
        "_RETIRED",
        ".tidemark",
        "a-1",
        "v0.1",
        "v1",
        "g-1",
        "g-1.json",
        "%",
        "long",
        "é",
    ]);
    let any = vec(any::<u8>().prop_filter("one component", |b| *b != b'/' && *b != 0), 1..24);
    vec(prop_oneof![special.prop_map(|s| s.as_bytes().to_vec()), any], 1..5)
}

fn path() -> impl Strategy<Value = RelPath> {
    components().prop_filter_map("a path", |parts| RelPath::new(parts.join(&b'/')).ok())
}

fn life() -> impl Strategy<Value = NodeLife> {
    ("[a-z_][a-z.-]{0,20}", any::<u64>()).prop_map(|(node, incarnation)| NodeLife {
        node: node.parse().unwrap(),
        incarnation: Incarnation(incarnation),
    })
}

prop_compose! {
    fn versions()(run in prop::option::of(path()), name in components(), timeline: u64, number: u64)
        -> Option<VersionId>
    {
        Some(VersionId {
            run: match run { None => RunPath::root(), Some(path) => RunPath::new(path).ok()? },
            directory: CheckpointName::new(name.into_iter().next()?).ok()?,
            timeline: Timeline(timeline),
            version: Version(number),
        })
    }
}

proptest! {
    #[test]
    fn every_key_is_read_back_as_it_was_built(
        version in versions().prop_filter_map("valid", |v| v),
        file in path(), attempt: u64, other in prop::option::of(any::<u64>()), number: u64,
        life in life(), by in prop::option::of(life()), hash: [u8; 32],
    ) {
        let attempt = AttemptId(attempt);
        let part = Part { attempt, stand_in: other.map(Incarnation) };
        let run = Label::of_run(&version.run);
        let checkpoint = Label::of_checkpoint(&version.directory);
        let whole = match version.run.path() {
            None => file.clone(),
            Some(run) => run.join(&file).unwrap(),
        };
        let (loose, sidecar) = Key::loose(&file, Generation(number));
        let pins = Series::Pins {
            run: run.clone(), checkpoint, timeline: version.timeline, version: version.version,
        };
        let mut keys = vec![
            Key::data(&version, part, &whole).unwrap(),
            Key::Record { version: version.clone(), attempt },
            Key::Manifest { version: version.clone(), attempt, hash: ContentHash(hash) },
            Key::Committed { version: version.clone() },
            Key::Retired { version: version.clone() },
            Key::Nonce, loose, sidecar,
        ];
        keys.extend([Series::Epoch, Series::Members, Series::Tree, Series::Boundary(run.clone()),
            Series::Timelines(run), pins].map(|series| Key::numbered(series, number)));
        if life.is_unambiguous() {
            keys.push(Key::Prepared { version, attempt, life, by });
        }
        for key in keys {
            let text = key.to_string();
            prop_assert!(text.len() <= MAX_KEY_BYTES);
            prop_assert_eq!(text.parse::<Key>(), Ok(key), "{}", text);
        }
    }

    #[test]
    fn reading_a_key_never_panics_and_one_object_has_one_key(text in "[a-z_./%0-9A-F+-]{0,80}") {
        if let Ok(key) = text.parse::<Key>() {
            prop_assert_eq!(key.to_string(), text);
        }
    }
}

#[test]
fn an_object_of_others_lies_where_no_key_of_ours_is() {
    for foreign in ["a", "old/run/checkpoint-5/model.safetensors", "v1/x", "a-5/x", "r/step.pt"] {
        assert!(is_foreign(foreign), "{foreign}");
        assert!(foreign.parse::<Key>().is_err(), "{foreign}");
    }
    let long = "x/".repeat(MAX_KEY_BYTES / 2) + "x";
    for ours in [
        "",
        "a//b",
        "a/../b",
        "./a",
        "/a",
        "a/",
        "r/s/v0.1/a-5/x",
        "r/v1.2.3/x",
        ".tidemark/nonce",
        "a/.tidemark/x",
        "a/_COMMITTED",
        "a\0b",
        &long,
    ] {
        assert!(!is_foreign(ours), "{ours}");
    }
}
