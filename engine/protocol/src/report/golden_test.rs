//! The JSON that scripts see, written out: a changed name or shape fails here before it breaks a script.

use super::*;
use crate::checksum::Crc64;
use crate::id::{Incarnation, StartId, Step, Timeline, Version};
use crate::recovery::Standpoint;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

/// Checks that the value is written as `golden`, and reads back as itself.
fn is_golden<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T, golden: &Value) {
    assert_eq!(&serde_json::to_value(value).unwrap(), golden);
    assert_eq!(&serde_json::from_value::<T>(golden.clone()).unwrap(), value);
    let mut newer = golden.clone();
    newer["a_field_of_a_newer_daemon"] = json!(1);
    assert_eq!(&serde_json::from_value::<T>(newer).unwrap(), value, "unknown fields are ignored");
}

fn reference(step: Option<u64>) -> CheckpointRef {
    CheckpointRef {
        timeline: Timeline(0),
        step: step.map(Step),
        version: Version(1),
        path: "run7/step-1200".into(),
    }
}

#[test]
fn status_keeps_its_shape() {
    let status = Status {
        version: "0.1.0".into(),
        pid: 41,
        keeper_pid: None,
        start: StartId(3),
        node: "n0".into(),
        incarnation: Incarnation(u64::MAX),
        state: NodeState::Degraded,
        listen: "127.0.0.1:7070".into(),
        http: "127.0.0.1:7071".into(),
        problems: vec![Problem { code: "tier3_away".into(), what: "w".into(), action: "a".into() }],
        mount: MountStatus {
            path: "/ckpt".into(),
            mode: FuseMode::Passthrough,
            reason: "probed".into(),
            requests: [("create".to_owned(), 2)].into(),
        },
        tiers: vec![TierStatus {
            name: "tier1".into(),
            used_bytes: 1,
            size_bytes: Some(4),
            warm_fraction: Some(0.5),
            state: TierState::Warming,
            medium: "private tmpfs".into(),
            files: 1,
            used_by: [("own files".to_owned(), 1)].into(),
            queued_bytes: 0,
            fencing: None,
            part_checksums: None,
            marks: Some(Marks { high_bytes: 3, low_bytes: 2 }),
            held_by: [("open".to_owned(), 1)].into(),
            notes: vec![],
        }],
        runs: vec![RunStatus {
            run: "run7".into(),
            latest: Some(reference(Some(1200))),
            watermark: None,
            recoverable: Some(reference(None)),
            durable: None,
            lag_versions: 1,
            lag_bytes: 10,
            lag_seconds: 0.25,
        }],
        unsaved: CopyCount { files: 3, bytes: 40 },
        unsealed: CopyCount { files: 1, bytes: 20 },
        untold: Some(Untold { removals: 1 }),
        replication: Some(ReplicationStatus { lacking_files: 2, ..ReplicationStatus::default() }),
        written_ms: 1_700_000_000_000,
    };
    is_golden(
        &status,
        &json!({
            "version": "0.1.0", "pid": 41, "keeper_pid": null, "start": "0000000000000003", "node": "n0",
            "incarnation": "ffffffffffffffff", "state": "degraded", "listen": "127.0.0.1:7070",
            "http": "127.0.0.1:7071",
            "problems": [{"code": "tier3_away", "what": "w", "action": "a"}],
            "mount": {"path": "/ckpt", "mode": "passthrough", "reason": "probed", "requests": {"create": 2}},
            "tiers": [{"name": "tier1", "used_bytes": 1, "size_bytes": 4, "warm_fraction": 0.5,
                "state": "warming", "medium": "private tmpfs", "files": 1, "used_by": {"own files": 1},
                "queued_bytes": 0, "fencing": null, "part_checksums": null, "marks": {"high_bytes": 3, "low_bytes": 2},
                "held_by": {"open": 1}, "notes": []}],
            "runs": [{"run": "run7",
                "latest": {"timeline": 0, "step": 1200, "version": 1, "path": "run7/step-1200"},
                "watermark": null,
                "recoverable": {"timeline": 0, "step": null, "version": 1, "path": "run7/step-1200"},
                "durable": null, "lag_versions": 1, "lag_bytes": 10, "lag_seconds": 0.25}],
            "unsaved": {"files": 3, "bytes": 40}, "unsealed": {"files": 1, "bytes": 20}, "untold": {"removals": 1},
            "replication": {"partner": null, "lacking_files": 2, "lacking_bytes": 0, "since_ms": null, "why": null},
            "written_ms": 1_700_000_000_000_i64,
        }),
    );
}

fn checkpoint() -> Checkpoint {
    Checkpoint {
        run: Some("run7".into()),
        timeline: Timeline(0),
        step: Some(Step(1200)),
        version: Version(1),
        path: "run7/step-1200".into(),
        bytes: 30,
        files: 2,
        framework: Some("torch_dcp".into()),
        state: CheckpointState::Committed,
        evidence: Some("index".into()),
        copies: Copies { host: CopyCount { files: 2, bytes: 30 }, ..Copies::default() },
        pinned: false,
        closed_ms: Some(5),
    }
}

#[test]
fn a_plan_keeps_its_shape() {
    let version = RecoveryRow {
        checkpoint: checkpoint(),
        standpoint: Standpoint::PassedOver,
        reason: "r".into(),
        removed_in_part: true,
    };
    let mut run = RunRecovery { run: "run7".into(), chosen: None, versions: vec![version], removed: 2 };
    is_golden(
        &Recovery { runs: vec![run.clone()] },
        &json!({"runs": [{"run": "run7", "chosen": null, "versions": [
            {"checkpoint": checkpoint_golden(), "standpoint": "passed_over", "reason": "r", "removed_in_part": true}],
            "removed": 2}]}),
    );
    let exit_code = |run: &RunRecovery| Recovery { runs: vec![run.clone()] }.exit_code();
    assert_eq!(exit_code(&run), ExitCode::Done, "its job removed a part");
    let also_lost = RecoveryRow { removed_in_part: false, ..run.versions[0].clone() };
    run.versions.push(also_lost);
    assert_eq!(exit_code(&run), ExitCode::NotRecoverable);
}

fn checkpoint_golden() -> Value {
    json!({
        "run": "run7", "timeline": 0, "step": 1200, "version": 1, "path": "run7/step-1200", "bytes": 30,
        "files": 2, "framework": "torch_dcp", "state": "committed", "evidence": "index",
        "copies": {"host": {"files": 2, "bytes": 30}, "peer": {"files": 0, "bytes": 0},
            "object": {"files": 0, "bytes": 0}},
        "pinned": false, "closed_ms": 5,
    })
}

#[test]
fn a_row_of_ls_keeps_its_shape() {
    is_golden(&checkpoint(), &checkpoint_golden());
}

#[test]
fn show_keeps_its_shape() {
    let show = Show {
        checkpoint: checkpoint(),
        evidence_detail: Some("e".into()),
        waits_for: vec![],
        attempt: Some("a1".into()),
        participants: vec!["n0".into()],
        marker_key: Some("m".into()),
        manifest_key: Some("f".into()),
        epoch: Some(1),
        previous: None,
        lost: None,
        files: Some(vec![File {
            path: "run7/step-1200/a".into(),
            bytes: 30,
            crc64nvme: Some(Crc64(0xab)),
            copies: Copies::default(),
            host_path: None,
            state: "sealed".into(),
            node: "n0".into(),
            object_key: Some("k".into()),
            mtime_ms: None,
        }]),
    };
    let copies = &checkpoint_golden()["copies"];
    let no_copies = json!({"host": copies["peer"], "peer": copies["peer"], "object": copies["peer"]});
    let golden = json!({
        "checkpoint": checkpoint_golden(), "evidence_detail": "e", "waits_for": [], "attempt": "a1",
        "participants": ["n0"], "marker_key": "m", "manifest_key": "f", "epoch": 1, "previous": null, "lost": null,
        "files": [{"path": "run7/step-1200/a", "bytes": 30, "crc64nvme": "00000000000000ab",
            "copies": no_copies, "host_path": null, "state": "sealed", "node": "n0", "object_key": "k",
            "mtime_ms": null}],
    });
    is_golden(&show, &golden);
    let without_files = serde_json::to_value(Show { files: None, ..show }).unwrap();
    assert!(without_files.get("files").is_none());
}

#[test]
fn why_keeps_its_shape() {
    let why = Why {
        path: "run7/step-1200".into(),
        state: CheckpointState::Settled,
        verdict: "v".into(),
        in_sight: true,
        sight: None,
        fallback: true,
        writers: vec![WhyWriter {
            process: 7,
            session: "s".into(),
            rank: Some(1),
            world_size: None,
            end: "ended well".into(),
            files: 2,
        }],
        files: vec![WhyFile {
            path: "a".into(),
            bytes: 1,
            state: "cut".into(),
            renamed: false,
            committed: true,
        }],
        files_left_out: 0,
    };
    let golden = json!({
        "path": "run7/step-1200", "state": "settled", "verdict": "v", "in_sight": true, "sight": null,
        "fallback": true, "files_left_out": 0,
        "writers": [{"process": 7, "session": "s", "rank": 1, "world_size": null, "end": "ended well", "files": 2}],
        "files": [{"path": "a", "bytes": 1, "state": "cut", "renamed": false, "committed": true}],
    });
    is_golden(&why, &golden);
}

#[test]
fn the_ends_of_long_work_keep_their_shape() {
    let verify = Verify { files: 1, deep: true, ..Verify::default() };
    is_golden(
        &verify,
        &json!({"checkpoints": 0, "files": 1, "copies": 0, "bytes": 0, "deep": true, "repaired": [],
            "unrecoverable": [], "unchecked": [], "bad_objects": 0, "away": false, "broken": []}),
    );
    let pending = Pending { path: "p".into(), reason: PendingReason::Mapped, what: "w".into() };
    let flush = Flush { waited: true, pending: vec![pending], ..Flush::default() };
    is_golden(
        &flush,
        &json!({"waited": true, "uploaded_files": 0, "uploaded_bytes": 0, "committed": [],
            "pending": [{"path": "p", "reason": "mapped", "what": "w"}], "timed_out": false,
            "tier3_away": false}),
    );
    let commit = Commit { checkpoint: reference(None), state: CheckpointState::Complete, already: false };
    is_golden(
        &commit,
        &json!({"checkpoint": {"timeline": 0, "step": null, "version": 1, "path": "run7/step-1200"},
            "state": "complete", "already": false}),
    );
}

#[test]
fn what_is_kept_and_given_up_keeps_its_shape() {
    let checkpoint = || json!({"timeline": 0, "step": 7, "version": 1, "path": "run7/step-1200"});
    let row = GcRow {
        run: "run7".into(),
        checkpoint: reference(Some(7)),
        bytes: 5,
        given_up: true,
        reason: "r".into(),
    };
    let gc = Gc { dry_run: true, rows: vec![row], left: 1, trouble: None };
    is_golden(
        &gc,
        &json!({"dry_run": true, "rows": [{"run": "run7", "checkpoint": checkpoint(), "bytes": 5,
            "given_up": true, "reason": "r"}], "left": 1, "trouble": null}),
    );
    let pin = Pin { checkpoint: reference(Some(7)), pinned: true, already: false };
    is_golden(&pin, &json!({"checkpoint": checkpoint(), "pinned": true, "already": false}));
    let removal = Removal { path: "p".into(), versions: 1, left: 2, trouble: Some("t".into()) };
    is_golden(&removal, &json!({"path": "p", "versions": 1, "left": 2, "trouble": "t"}));
    let undelete = Undelete { checkpoint: reference(Some(7)), files: 3 };
    is_golden(&undelete, &json!({"checkpoint": checkpoint(), "files": 3}));
    let export = Export {
        checkpoint: reference(Some(7)),
        directory: "/d".into(),
        files: 3,
        bytes: 4,
        host_files: 1,
        left_out: vec!["owners".into()],
    };
    is_golden(
        &export,
        &json!({"checkpoint": checkpoint(), "directory": "/d", "files": 3, "bytes": 4, "host_files": 1,
            "left_out": ["owners"]}),
    );
    let row = ImportRow {
        path: "p".into(),
        checkpoint: Some(reference(Some(7))),
        files: 1,
        bytes: 2,
        outcome: ImportOutcome::Imported,
        reason: "r".into(),
    };
    let import = Import { from: "f".into(), rows: vec![row], loose: 3 };
    is_golden(
        &import,
        &json!({"from": "f", "rows": [{"path": "p", "checkpoint": checkpoint(), "files": 1, "bytes": 2,
            "outcome": "imported", "reason": "r"}], "loose": 3}),
    );
}

#[test]
fn events_nodes_and_checks_keep_their_shape() {
    let event = Event {
        number: 1,
        time_ms: 2,
        level: EventLevel::Warn,
        kind: "torn".into(),
        path: None,
        what: "w".into(),
    };
    is_golden(
        &event,
        &json!({"number": 1, "time_ms": 2, "level": "warn", "kind": "torn", "path": null, "what": "w"}),
    );
    let node = Node {
        name: "n0".into(),
        incarnation: Incarnation(1),
        start: StartId(2),
        state: NodeState::Serving,
        listen: "l".into(),
        version: "0.1.0".into(),
        epoch: 3,
        coordinator: true,
        this: true,
        tier1_used_bytes: 4,
        tier1_size_bytes: 5,
        standing: "cut_off".into(),
        since_ms: Some(6),
        why: Some("w".into()),
        heard_ago_seconds: Some(0.5),
        labels: [("rack".to_owned(), "r1".to_owned())].into(),
        partner: Some("n1".into()),
    };
    is_golden(
        &node,
        &json!({"name": "n0", "incarnation": "0000000000000001", "start": "0000000000000002",
            "state": "serving", "listen": "l", "version": "0.1.0", "epoch": 3, "coordinator": true,
            "this": true, "tier1_used_bytes": 4, "tier1_size_bytes": 5, "standing": "cut_off", "since_ms": 6,
            "why": "w", "heard_ago_seconds": 0.5, "labels": {"rack": "r1"}, "partner": "n1"}),
    );
    let check = Check { name: "fuse".into(), verdict: CheckVerdict::Warn, what: "w".into(), fix: None };
    is_golden(
        &Doctor { checks: vec![check] },
        &json!({"checks": [{"name": "fuse", "verdict": "warn", "what": "w", "fix": null}]}),
    );
}

#[test]
fn a_placement_keeps_its_shape_and_says_what_the_nodes_say() {
    use crate::id::Epoch;
    use crate::placement::{Candidate, Rules, Scheme, Scope, place};
    let labelled = |rack: Option<&str>| {
        rack.map(|rack| json!({"rack": rack}))
            .map_or_else(Default::default, |rack| serde_json::from_value(rack).unwrap())
    };
    let member = |(node, rack): (&str, Option<&str>)| Candidate {
        name: node.parse().unwrap(),
        labels: labelled(rack),
    };
    let members: Vec<_> =
        [("a", Some("r1")), ("b", Some("r1")), ("c", None)].into_iter().map(member).collect();
    let rules = Rules { scheme: Scheme::Pair, scope: Scope::default() };
    let placed = place(None, &members, &rules, Epoch(3));
    is_golden(
        &Placement::of(&placed.placement, &members, &placed.notes),
        &json!({"epoch": 3, "number": 1, "scheme": "pair", "label": "rack", "within": false,
            "nodes": [
                {"node": "a", "domain": "r1", "partner": "c", "partner_domain": null, "keeps": "b"},
                {"node": "b", "domain": "r1", "partner": "a", "partner_domain": "r1", "keeps": "c"},
                {"node": "c", "domain": null, "partner": "b", "partner_domain": "r1", "keeps": "a"},
            ],
            "survival": [
                {"lost": 1, "of": "node", "combinations": 3, "fatal": 0, "worst": [], "worst_loses": 0},
                {"lost": 2, "of": "node", "combinations": 3, "fatal": 3, "worst": ["a", "c"], "worst_loses": 1},
                {"lost": 3, "of": "node", "combinations": 1, "fatal": 1, "worst": ["a", "c", "b"], "worst_loses": 3},
                {"lost": 1, "of": "rack", "combinations": 2, "fatal": 1, "worst": ["r1"], "worst_loses": 1},
            ],
            "warnings": [
                "node b has no partner in another rack: its copies are at a, and the loss of rack r1 loses both; add nodes in other racks",
                "node c has no label rack, and counts as a rack of its own; start it with --label rack=NAME",
            ],
            "more_warnings": 0}),
    );
    let many: Vec<_> = (0..20).map(|at| member((&format!("n{at:02}"), Some("r1")))).collect();
    let placed = place(None, &many, &rules, Epoch(3));
    let report = Placement::of(&placed.placement, &many, &placed.notes);
    assert_eq!((report.warnings.len(), report.more_warnings), (WARNINGS_MAX, 4));
}

#[test]
fn words_on_the_wire_are_the_words_people_read() {
    use CheckpointState as C;
    for state in
        [C::Open, C::Settled, C::Torn, C::Complete, C::Replicated, C::Prepared, C::Committed, C::Loose]
    {
        assert_eq!(serde_json::to_value(state).unwrap(), json!(state.word()));
    }
    for state in [NodeState::Starting, NodeState::Serving, NodeState::Degraded, NodeState::Draining] {
        assert_eq!(serde_json::to_value(state).unwrap(), json!(state.word()));
    }
    for reason in
        [PendingReason::Open, PendingReason::Torn, PendingReason::Damaged, PendingReason::Unnameable]
    {
        assert_eq!(serde_json::to_value(reason).unwrap(), json!(reason.word()));
    }
    assert_eq!(serde_json::from_value::<C>(json!("a_newer_state")).unwrap(), C::Unknown);
}

#[test]
fn a_path_that_is_not_utf8_is_still_json() {
    let text = path_text(b"run/\xff.pt");
    assert_eq!(serde_json::to_string(&text).unwrap(), "\"run/%FF.pt\"");
}
