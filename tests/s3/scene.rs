//! The engine's work in the cells of the matrix. Each cell has a server of its own.
//!
//! Owns: how each scene is set up, played, and played again when the fault is gone. Does not own: faults and judgement
//! (`matrix`).

use super::cells::{Cell, Scene};
use super::save::{self, Content, PREFIX, Sealer, drain, fresh, version_id};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_engine::metrics::Metrics;
use tidemark_engine::node::{Events, Names, RecoverError, Shared, recover};
use tidemark_engine::restore::peer::Nearby;
use tidemark_engine::restore::{Restorer, locate};
use tidemark_engine::save::commit::{self, Attempt, CommitError};
use tidemark_engine::save::drain::Drain;
use tidemark_engine::save::loose::{self, LooseError};
use tidemark_engine::settings::Settings;
use tidemark_namespace::{Clock, Namespace, NamespaceSettings};
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::id::{Epoch, Incarnation};
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::retention::{Committed, Keep, Metric, Policy, Retirement, Standing, retain};
use tidemark_store::{Store, raise_epoch};
use tidemark_tests::audit::Files;
use tidemark_tests::s3::{S3Options, S3Server};

/// Limit within which a start has swept its leftovers, on a busy machine.
const SWEEP_LIMIT: Duration = Duration::from_secs(30);
/// Limit of a request without a scripted fault.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(20);
/// A file of an attempt that no version here has. A dead writer left its upload.
const LEFT: &str = "a-1f2e3d4c5b6a7988/model.bin";

/// A server with the state that a scene begins with.
pub(super) struct Site {
    pub(super) server: S3Server,
    pub(super) sealer: Arc<Sealer>,
    /// Drain of a client that meets no fault. The client keeps nothing that it reads, so it knows nothing of
    /// earlier runs.
    pub(super) clean: Arc<Drain>,
    scene: Scene,
    attempt: Option<Attempt>,
    version: u64,
    generation: u64,
    retired: Option<Manifest>,
}

/// Why a run failed, and what the loop would do next.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) why: String,
    pub(super) then: Then,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// Tries the same again.
    Again,
    /// Tries the next version, or the next generation.
    Next,
    /// Does nothing, so the save would be lost.
    Lost,
}

impl Failure {
    fn new(error: &(dyn std::error::Error + 'static), then: Then) -> Self {
        let mut why = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            why = format!("{why}: {error}");
            source = error.source();
        }
        Self { why, then }
    }

    fn of_kind(error: &(dyn std::error::Error + 'static), kind: ErrorKind) -> Self {
        let then = if kind == ErrorKind::Unavailable { Then::Again } else { Then::Lost };
        Self::new(error, then)
    }
}

impl From<CommitError> for Failure {
    fn from(error: CommitError) -> Self {
        match error {
            // A marker that cannot be read has used its number.
            CommitError::Lost { .. } | CommitError::Taken { .. } | CommitError::Marker { .. } => {
                Self::new(&error, Then::Next)
            }
            error => Self::of_kind(&error, error.kind()),
        }
    }
}

impl From<LooseError> for Failure {
    fn from(error: LooseError) -> Self {
        match error {
            LooseError::Taken { .. } => Self::new(&error, Then::Next),
            error => Self::of_kind(&error, error.kind()),
        }
    }
}

impl From<RecoverError> for Failure {
    /// A start that fails is tried again by its caller.
    fn from(error: RecoverError) -> Self {
        Self::new(&error, Then::Again)
    }
}

impl Site {
    pub(super) async fn start(cell: &Cell, sealer: Arc<Sealer>) -> Self {
        let scene = cell.target.scene;
        let checks_checksums = scene != Scene::SaveUnchecked;
        let server =
            S3Server::start(S3Options { checks_checksums, ..S3Options::default() }).expect("a server");
        let drain = client(&server, scene, CLEAN_TIMEOUT).await;
        let clean = Arc::clone(&drain);
        let mut site =
            Self { server, sealer, clean, scene, attempt: None, version: 1, generation: 1, retired: None };
        raise_epoch(drain.store.as_ref(), Epoch(1)).await.expect("the epoch is raised");
        match scene {
            Scene::Save | Scene::SaveUnchecked => {
                site.attempt = Some(site.sealer.attempt(Content::Whole, 1, 1));
            }
            Scene::Loose => {}
            Scene::Retire => {
                for version in [1, 2] {
                    let manifest = site.light(&drain, version).await.expect("saved");
                    site.retired.get_or_insert(manifest);
                }
            }
            Scene::Restart => {
                site.light(&drain, 1).await.expect("saved");
                let mut aborted = site.sealer.attempt(Content::Light, 2, 2);
                aborted.prepare(&drain).await.expect("prepared");
                commit::abort(&drain, &aborted.record).await.expect("aborted");
                site.sealer.attempt(Content::Light, 3, 3).prepare(&drain).await.expect("prepared");
                for version in [1, 2, 9] {
                    site.server.leave_upload(&format!("{PREFIX}/{}/{LEFT}", version_id(version)));
                }
            }
        }
        site
    }

    async fn light(&self, drain: &Arc<Drain>, version: u64) -> Result<Manifest, CommitError> {
        let mut attempt = self.sealer.attempt(Content::Light, version, version);
        attempt.prepare(drain).await?;
        attempt.commit(drain).await
    }

    /// Returns the drain of a client with this limit for its requests.
    pub(super) async fn drain(&self, request_timeout: Duration) -> Arc<Drain> {
        client(&self.server, self.scene, request_timeout).await
    }

    /// Plays the scene once.
    pub(super) async fn play(&mut self, drain: &Arc<Drain>) -> Result<(), Failure> {
        match self.scene {
            Scene::Save | Scene::SaveUnchecked => {
                let attempt = self.attempt.as_mut().expect("set at the start");
                attempt.prepare(drain).await?;
                attempt.commit(drain).await?;
            }
            Scene::Loose => {
                loose::upload(drain, self.sealer.loose(self.generation)).await?;
            }
            Scene::Retire => {
                let manifest = self.retired.as_ref().expect("set at the start");
                commit::retire(drain, manifest, &leave(manifest), 9).await?;
            }
            Scene::Restart => {
                recover(&shared(drain), Names::Empty).await?;
            }
        }
        Ok(())
    }

    /// Does what the loop does before it tries again.
    pub(super) fn go_on(&mut self, then: Then) {
        if then != Then::Next {
            return;
        }
        self.version += 1;
        self.generation += 1;
        if matches!(self.scene, Scene::Save | Scene::SaveUnchecked) {
            let attempt = self.sealer.attempt(Content::Whole, self.version, self.version);
            self.attempt = Some(attempt);
        }
    }

    /// Returns the files that must be committed, by version, before anything is played (`false`) and at the end
    /// (`true`).
    pub(super) fn must_stand(&self, at_the_end: bool) -> BTreeMap<String, Files> {
        let version = |number, content| (version_id(number).to_string(), self.sealer.files(content));
        match (self.scene, at_the_end) {
            (Scene::Save | Scene::SaveUnchecked, true) => [version(self.version, Content::Whole)].into(),
            (Scene::Save | Scene::SaveUnchecked, false) | (Scene::Loose, _) => BTreeMap::new(),
            (Scene::Retire, _) => [version(2, Content::Light)].into(),
            (Scene::Restart, _) => [version(1, Content::Light)].into(),
        }
    }

    /// Returns the files that may be committed besides.
    pub(super) fn may_stand(&self) -> BTreeMap<String, Files> {
        let version = |number, content| (version_id(number).to_string(), self.sealer.files(content));
        match self.scene {
            Scene::Save | Scene::SaveUnchecked => {
                (1..=self.version).map(|number| version(number, Content::Whole)).collect()
            }
            Scene::Loose => BTreeMap::new(),
            Scene::Retire => [version(1, Content::Light)].into(),
            Scene::Restart => [version(3, Content::Light)].into(),
        }
    }

    /// Waits for work that goes on after the scene was played again. The error says which part is missing.
    pub(super) async fn settled(&self) -> Result<(), String> {
        let version = |number: u64| format!("{}/a-", version_id(number));
        match self.scene {
            Scene::Retire => {
                let objects = self.server.objects(PREFIX).map_err(|error| error.to_string())?;
                let left: Vec<_> = objects.keys().filter(|key| key.starts_with(&version(1))).collect();
                if left.is_empty() { Ok(()) } else { Err(format!("retired, and there is still {left:?}")) }
            }
            Scene::Restart => {
                let alive = vec![format!("{PREFIX}/{}/{LEFT}", version_id(9))];
                let begun = Instant::now();
                loop {
                    let objects = self.server.objects(PREFIX).map_err(|error| error.to_string())?;
                    let remains = objects.keys().any(|key| key.starts_with(&version(2)));
                    let uploads = self.server.unfinished_keys();
                    if !remains && uploads == alive {
                        return Ok(());
                    }
                    if begun.elapsed() > SWEEP_LIMIT {
                        return Err(format!("not swept: {remains}, {uploads:?}"));
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
            Scene::Save | Scene::SaveUnchecked | Scene::Loose => Ok(()),
        }
    }

    pub(super) fn has_loose(&self) -> bool {
        self.scene == Scene::Loose
    }
}

async fn client(server: &S3Server, scene: Scene, request_timeout: Duration) -> Arc<Drain> {
    let checks = scene != Scene::SaveUnchecked;
    let mut variables = server.env();
    if !checks {
        // Any store checks a signed body. With an unsigned one, only the checksum is left.
        variables.push(("AWS_UNSIGNED_PAYLOAD".into(), "true".into()));
    }
    drain(fresh(&server.url(PREFIX), variables, request_timeout).await, checks)
}

/// Builds the state that a start has, with empty memory.
fn shared(drain: &Arc<Drain>) -> Arc<Shared> {
    let folder = save::folder();
    let tier1 = save::tier1(&folder, 16 << 20);
    let metrics = Arc::new(Metrics::new());
    let settings = NamespaceSettings::new(Incarnation(8));
    let namespace = Namespace::new(settings, Arc::clone(&tier1)).expect("a namespace");
    let (named, store) = (Arc::clone(&namespace), Arc::clone(&drain.store));
    let restorer = Restorer::new(named, store, Arc::clone(&metrics), 1, Nearby::alone());
    Arc::new(Shared {
        restorer,
        cluster: Default::default(),
        replicator: Default::default(),
        settings: Settings::default(),
        namespace,
        tier1,
        drain: Arc::clone(drain),
        metrics,
        events: Events::default(),
        clock: Clock::system(),
        sizes: Arc::default(),
        seal_threads: 1,
    })
}

/// Returns leave to retire a version: two newer ones are committed, and only the last is to be kept.
fn leave(manifest: &Manifest) -> Retirement {
    let at = |completed_at_ns| Committed {
        version: manifest.version.clone(),
        step: manifest.step,
        completed_at_ns,
        verified: true,
        pinned: false,
        held: false,
        standing: Standing::Shown,
        wished: false,
        metric: Metric::Unsaid,
    };
    let policy = Policy { keep_last: Some(1), ..Policy::default() };
    match retain(&policy, &[at(1), at(2), at(3)], 4).swap_remove(0) {
        Keep::Retired(leave) => leave,
        Keep::Kept { reason } => panic!("{reason}"),
    }
}

/// Reads every version that the engine considers committed, with each byte read by the client.
pub(super) async fn read_back(store: &Arc<dyn Store>) -> Result<BTreeMap<String, Files>, String> {
    let catalog = locate::read(store).await.map_err(|error| error.to_string())?;
    let mut found = BTreeMap::new();
    for version in catalog.committed {
        let mut files = Files::new();
        for file in &version.manifest.files {
            let bytes = store.get_range(&file.key, 0..file.size_bytes).await;
            files.insert(file.path.to_string(), bytes.map_err(|error| error.to_string())?);
        }
        found.insert(version.manifest.version.to_string(), files);
    }
    Ok(found)
}
