//! A node that needs no mount: fixed answers, and work that runs until it is dropped.
//!
//! Shared by the tests of the server and client and by those of the `ckptctl` binary.

use async_trait::async_trait;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tidemark_api::{
    CommitRequest, EventSink, EventsRequest, ExportRequest, FlushRequest, GcRequest, ImportRequest,
    ListRequest, NodeApi, PinRequest, PrefetchRequest, ProgressSink, RecoverRequest, RemoveRequest,
    ShowRequest, UndeleteRequest, VerifyRequest, WhyRequest,
};
use tidemark_protocol::id::{Incarnation, StartId, Step, Timeline, Version};
use tidemark_protocol::report::{
    ApiError, Check, CheckVerdict, Checkpoint, CheckpointRef, CheckpointState, Commit, Copies, CopyCount,
    Doctor, ErrorCode, Event, EventLevel, Export, File, Flush, FuseMode, Gc, GcRow, Import, Marks,
    MountStatus, Node, NodeState, Pending, PendingReason, Pin, Placement, PlacementRow, Prefetch, Problem,
    Progress, Recovery, Removal, ReplicationStatus, RunRecovery, RunStatus, Show, Status, SurvivalRow,
    TierState, TierStatus, Undelete, Unfetched, Unrecoverable, Verify, VerifyRepair, Why, WhyFile, WhyWriter,
};
use tidemark_protocol::selector::{Place, Selector};

/// The mount of the fake node.
pub(crate) const MOUNT: &str = "/ckpt";

/// A node whose answer depends on the requested path: `lost`, `healed`, `endless`, `open`, `away`, `fenced`, `empty`;
/// anything else is found and in order, and `absent` is not found.
#[derive(Debug, Default)]
pub(crate) struct FakeNode {
    /// Whether the mount has a problem.
    pub(crate) degraded: bool,
    pub(crate) verify_started: AtomicBool,
    /// Set when the endless verify is dropped.
    pub(crate) verify_dropped: AtomicBool,
}

/// Reports that the future that held it was dropped.
struct Dropped<'a>(&'a AtomicBool);

impl Drop for Dropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

pub(crate) fn reference(path: &str) -> CheckpointRef {
    CheckpointRef { timeline: Timeline(0), step: Some(Step(1200)), version: Version(1), path: path.into() }
}

pub(crate) fn checkpoint(path: &str) -> Checkpoint {
    Checkpoint {
        run: Some("run7".into()),
        timeline: Timeline(0),
        step: Some(Step(1200)),
        version: Version(1),
        path: path.into(),
        bytes: 3 << 29,
        files: 2,
        framework: Some("torch_dcp".into()),
        state: CheckpointState::Committed,
        evidence: Some("index".into()),
        copies: Copies { object: CopyCount { files: 2, bytes: 3 << 29 }, ..Copies::default() },
        pinned: false,
        closed_ms: Some(1_700_000_000_000),
    }
}

/// Returns the path in a selector, as text.
fn text(selector: &Selector) -> String {
    match selector {
        Selector::Latest => "latest".into(),
        Selector::LatestOf(place) | Selector::At(place) => shown(place),
        Selector::Step(step) => format!("@{step}"),
        Selector::StepOf(place, step) => format!("{}@{step}", shown(place)),
    }
}

fn shown(place: &Place) -> String {
    tidemark_protocol::report::path_text(place.as_bytes())
}

fn absent(what: &str) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("no checkpoint {what}"), "`ckptctl ls` lists them")
}

#[async_trait]
impl NodeApi for FakeNode {
    async fn status(&self) -> Result<Status, ApiError> {
        let problem = Problem {
            code: "tier3_away".into(),
            what: "Tier-3 has not answered for 48 s".into(),
            action: "nothing is lost; check the store".into(),
        };
        Ok(Status {
            version: "0.1.0".into(),
            pid: std::process::id(),
            keeper_pid: None,
            start: StartId(1),
            node: "n0".into(),
            incarnation: Incarnation(2),
            state: if self.degraded { NodeState::Degraded } else { NodeState::Serving },
            listen: "127.0.0.1:7070".into(),
            http: "127.0.0.1:7071".into(),
            problems: if self.degraded { vec![problem] } else { vec![] },
            mount: MountStatus {
                path: MOUNT.into(),
                mode: FuseMode::Passthrough,
                reason: "probed".into(),
                requests: [("create".to_owned(), 2)].into(),
            },
            tiers: self.tiers().await?,
            runs: vec![RunStatus {
                run: "run7".into(),
                latest: Some(reference("run7/step-1200")),
                watermark: None,
                recoverable: Some(reference("run7/step-1200")),
                durable: None,
                lag_versions: 1,
                lag_bytes: 10,
                lag_seconds: 61.0,
            }],
            unsaved: CopyCount { files: 3, bytes: 40 },
            unsealed: CopyCount { files: 1, bytes: 20 },
            untold: None,
            replication: Some(ReplicationStatus {
                partner: (!self.degraded).then(|| "n1".into()),
                lacking_files: 2,
                lacking_bytes: 3 << 30,
                since_ms: Some(1_700_000_000_000),
                why: self.degraded.then(|| "node n1 is gone".into()),
            }),
            written_ms: 1_700_000_000_000,
        })
    }

    async fn list(&self, request: ListRequest) -> Result<Vec<Checkpoint>, ApiError> {
        match shown(&request.place).as_str() {
            "absent" => Err(absent("absent")),
            "empty" => Ok(vec![]),
            _ => Ok(vec![checkpoint("run7/step-1200"), checkpoint("run7/\u{fffd}")]),
        }
    }

    async fn show(&self, request: ShowRequest) -> Result<Show, ApiError> {
        let path = text(&request.checkpoint);
        if path.starts_with("absent") {
            return Err(absent(&path));
        }
        let file = File {
            path: format!("{path}/a"),
            bytes: 7,
            crc64nvme: None,
            copies: Copies::default(),
            host_path: None,
            state: "open".into(),
            node: "n0".into(),
            object_key: None,
            mtime_ms: None,
        };
        Ok(Show {
            checkpoint: checkpoint(&path),
            evidence_detail: Some(".metadata names 2 files, both there".into()),
            waits_for: vec!["Tier-3".into()],
            attempt: None,
            participants: vec!["n0".into()],
            marker_key: None,
            manifest_key: None,
            epoch: None,
            previous: None,
            lost: None,
            files: request.files.then(|| vec![file]),
        })
    }

    async fn why(&self, request: WhyRequest) -> Result<Why, ApiError> {
        let path = shown(&request.place);
        if path.starts_with("absent") {
            return Err(absent(&path));
        }
        let writer = WhyWriter {
            process: 7,
            session: "master:h:1#0\u{1b}".into(),
            rank: Some(0),
            world_size: Some(2),
            end: "ended well".into(),
            files: 1,
        };
        let file = WhyFile {
            path: format!("{path}/a\u{1b}"),
            bytes: 7,
            state: "sealed".into(),
            renamed: true,
            committed: false,
        };
        Ok(Why {
            path,
            state: CheckpointState::Settled,
            verdict: "a file is missing\u{1b}".into(),
            in_sight: true,
            sight: Some("nothing else is there\u{1b}".into()),
            fallback: false,
            writers: vec![writer],
            files: vec![file],
            files_left_out: 3,
        })
    }

    async fn tiers(&self) -> Result<Vec<TierStatus>, ApiError> {
        Ok(vec![TierStatus {
            name: "tier1".into(),
            used_bytes: 1 << 30,
            size_bytes: Some(4 << 30),
            warm_fraction: Some(0.5),
            state: TierState::Warming,
            medium: "private tmpfs".into(),
            files: 1,
            used_by: [("own files".to_owned(), 1 << 30)].into(),
            queued_bytes: 0,
            fencing: None,
            part_checksums: None,
            marks: Some(Marks { high_bytes: 3, low_bytes: 2 }),
            held_by: [("open".to_owned(), 1)].into(),
            notes: vec!["commits do not survive this machine".into()],
        }])
    }

    async fn nodes(&self) -> Result<Vec<Node>, ApiError> {
        Ok(vec![Node {
            name: "n0".into(),
            incarnation: Incarnation(2),
            start: StartId(1),
            state: NodeState::Serving,
            listen: "127.0.0.1:7070".into(),
            version: "0.1.0".into(),
            epoch: 1,
            coordinator: true,
            this: true,
            tier1_used_bytes: 1 << 30,
            tier1_size_bytes: 4 << 30,
            standing: if self.degraded { "cut_off" } else { "alive" }.into(),
            since_ms: self.degraded.then_some(1_700_000_000_000),
            why: self.degraded.then(|| "node n0 is cut off from the coordinator".into()),
            heard_ago_seconds: None,
            labels: [("rack".to_owned(), "r1".to_owned())].into(),
            partner: Some("n1".into()),
        }])
    }

    async fn placement(&self) -> Result<Placement, ApiError> {
        let row = |node: &str, other: &str| PlacementRow {
            node: node.into(),
            domain: Some("r1".into()),
            partner: Some(other.into()),
            partner_domain: None,
            keeps: Some(other.into()),
        };
        Ok(Placement {
            epoch: 1,
            number: 2,
            scheme: "ring".into(),
            label: "rack".into(),
            within: false,
            nodes: vec![row("n0", "n1"), row("n1", "n0")],
            survival: vec![SurvivalRow {
                lost: 2,
                of: "node".into(),
                combinations: 1,
                fatal: 1,
                worst: vec!["n0".into(), "n1".into()],
                worst_loses: 2,
            }],
            warnings: vec!["node n1 has no label rack".into()],
            more_warnings: 3,
        })
    }

    async fn doctor(&self) -> Result<Doctor, ApiError> {
        let verdict = if self.degraded { CheckVerdict::Fail } else { CheckVerdict::Ok };
        let fix = Some("load the fuse module".into());
        Ok(Doctor {
            checks: vec![Check { name: "fuse_device".into(), verdict, what: "/dev/fuse".into(), fix }],
        })
    }

    async fn prefetch(&self, request: PrefetchRequest, progress: ProgressSink) -> Result<Prefetch, ApiError> {
        let path = text(&request.checkpoint);
        progress.tell(Progress { done_bytes: 1, total_bytes: 2, ..Progress::default() });
        let prefetch =
            Prefetch { waited: request.wait, total_files: 2, total_bytes: 9, ..Prefetch::default() };
        match path.as_str() {
            "absent" => Err(absent("absent")),
            "large" if request.wait => {
                let large =
                    Unfetched { path: "large/a".into(), size_bytes: 8, what: "8 wanted, 7 available".into() };
                Ok(Prefetch { no_room: vec![large], fetched_files: 1, fetched_bytes: 1, ..prefetch })
            }
            _ => Ok(prefetch),
        }
    }

    async fn verify(&self, request: VerifyRequest, progress: ProgressSink) -> Result<Verify, ApiError> {
        let path = request.checkpoint.as_ref().map(text).unwrap_or_default();
        progress.tell(Progress { done_bytes: 1, total_bytes: 2, ..Progress::default() });
        let verify =
            Verify { checkpoints: 1, files: 2, copies: 3, bytes: 7, deep: request.deep, ..Verify::default() };
        match path.as_str() {
            "endless" => {
                let _dropped = Dropped(&self.verify_dropped);
                self.verify_started.store(true, Ordering::SeqCst);
                loop {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    progress.tell(Progress { now: Some("endless".into()), ..Progress::default() });
                }
            }
            "lost" => {
                let lost = Unrecoverable { path: "lost/a".into(), what: "host and object are bad".into() };
                Ok(Verify { unrecoverable: vec![lost], ..verify })
            }
            "healed" => {
                let repair = VerifyRepair {
                    path: "healed/a".into(),
                    copy: "host".into(),
                    what: "chunk 0 has 1, expected 2".into(),
                    from: "object".into(),
                };
                Ok(Verify { repaired: vec![repair], ..verify })
            }
            "open" => {
                let open = Unrecoverable { path: "open/a".into(), what: "it has 1 open writers".into() };
                Ok(Verify { unchecked: vec![open], ..verify })
            }
            "empty" => Ok(Verify { deep: request.deep, ..Verify::default() }),
            "absent" => Err(absent("absent")),
            _ => Ok(verify),
        }
    }

    async fn flush(&self, request: FlushRequest, progress: ProgressSink) -> Result<Flush, ApiError> {
        progress.tell(Progress::default());
        let done = Flush { waited: request.wait, uploaded_files: 2, uploaded_bytes: 7, ..Flush::default() };
        let pending =
            |reason| vec![Pending { path: "run7/x".into(), reason, what: "pid 4 writes it".into() }];
        Ok(match shown(&request.place).as_str() {
            "absent" => return Err(absent("absent")),
            "open" => Flush { pending: pending(PendingReason::Open), ..done },
            "away" => Flush {
                pending: pending(PendingReason::Uploading),
                timed_out: true,
                tier3_away: true,
                ..done
            },
            _ => Flush { committed: vec![reference("run7/step-1200")], ..done },
        })
    }

    async fn commit(&self, request: CommitRequest) -> Result<Commit, ApiError> {
        match shown(&request.place).as_str() {
            "fenced" => Err(ApiError::new(ErrorCode::Fenced, "epoch 2 decides now", "ask its coordinator")),
            "absent" => Err(absent("absent")),
            path => {
                Ok(Commit { checkpoint: reference(path), state: CheckpointState::Complete, already: false })
            }
        }
    }

    async fn gc(&self, request: GcRequest, progress: ProgressSink) -> Result<Gc, ApiError> {
        progress.tell(Progress { done_files: 1, total_files: 2, ..Progress::default() });
        let row = GcRow {
            run: "run7".into(),
            checkpoint: reference("run7/step-1200"),
            bytes: 7,
            given_up: true,
            reason: "no rule keeps it".into(),
        };
        Ok(Gc { dry_run: request.dry_run, rows: vec![row], left: 1, trouble: None })
    }

    async fn pin(&self, request: PinRequest) -> Result<Pin, ApiError> {
        Ok(Pin { checkpoint: reference(&text(&request.checkpoint)), pinned: request.pinned, already: false })
    }

    async fn remove(&self, request: RemoveRequest, progress: ProgressSink) -> Result<Removal, ApiError> {
        progress.tell(Progress::default());
        match text(&request.checkpoint).as_str() {
            "absent" => Err(absent("absent")),
            path => Ok(Removal { path: path.into(), versions: 2, left: 0, trouble: None }),
        }
    }

    async fn undelete(&self, request: UndeleteRequest) -> Result<Undelete, ApiError> {
        Ok(Undelete { checkpoint: reference(&text(&request.checkpoint)), files: 3 })
    }

    async fn export(&self, request: ExportRequest, progress: ProgressSink) -> Result<Export, ApiError> {
        progress.tell(Progress::default());
        match text(&request.checkpoint).as_str() {
            "absent" => Err(absent("absent")),
            "lost" => Err(ApiError::new(ErrorCode::NotRecoverable, "no copy of lost verifies", "")),
            path => Ok(Export {
                checkpoint: reference(path),
                directory: request.directory,
                files: 2,
                bytes: 3 << 29,
                host_files: 1,
                left_out: vec!["owners: Operation not permitted".into()],
            }),
        }
    }

    async fn import(&self, request: ImportRequest, progress: ProgressSink) -> Result<Import, ApiError> {
        progress.tell(Progress::default());
        match request.from.as_str() {
            "absent" => Err(absent("absent")),
            from => Ok(Import { from: from.into(), rows: vec![], loose: 2 }),
        }
    }

    async fn recover(&self, request: RecoverRequest) -> Result<Recovery, ApiError> {
        let run =
            RunRecovery { run: format!("{:?}", request.place), chosen: None, versions: vec![], removed: 0 };
        Ok(Recovery { runs: vec![run] })
    }

    async fn events(&self, request: EventsRequest, events: EventSink) -> Result<(), ApiError> {
        for number in request.since + 1..=3 {
            let what = format!("event {number}");
            let (time_ms, level) = (1_700_000_000_000, EventLevel::Info);
            events.send(Event { number, time_ms, level, kind: "sealed".into(), path: None, what }).await?;
        }
        if request.follow {
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    fn metrics_text(&self) -> String {
        "# EOF\n".into()
    }

    fn healthy(&self) -> Result<(), String> {
        if self.degraded { Err("the mount does not serve".into()) } else { Ok(()) }
    }
}
