//! Phase 1 of files whose bytes are on other nodes.
//!
//! Owns: asking the node that has the bytes, doing the part of a lost node, and this node's part if the coordinator asks. Does
//! not own: phase 1 itself (`commit`), which node coordinates (control).
//!
//! Data never passes the coordinator: each node uploads the files it wrote, and writes its own prepared marker. The one exception is a
//! lost node: the coordinator fetches its files from nodes with copies, and uploads them under a key part of its own.

use super::commit::{Attempt, AttemptFile, CommitError};
use crate::restore::{RestoreError, Restorer};
use crate::save::drain::Drain;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tidemark_namespace::{FileState, Namespace, SealPin};
use tidemark_protocol::cluster::wire::{self, Prepare, Preparing};
use tidemark_protocol::error::error_text;
use tidemark_protocol::format::{Document, FormatError};
use tidemark_protocol::id::{AttemptId, Epoch, Incarnation};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::manifest::{HardLink, Prepared};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::record::Record;

/// Pause between two questions about a node's progress.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// The other nodes, as far as phase 1 needs them.
#[async_trait::async_trait]
pub trait Participants: Send + Sync + fmt::Debug {
    /// Returns the epoch in which this node coordinates.
    fn epoch(&self) -> Epoch;

    /// Whether a life of a node is known, and not known to have ended.
    fn is_present(&self, life: Incarnation) -> bool;

    /// Asks a node that is present for its part. If the answer is `Working`, the caller asks again.
    ///
    /// # Errors
    /// The node did not answer in time; it is asked again with the next try of the attempt.
    async fn prepare(&self, life: Incarnation, prepare: Prepare) -> Result<Preparing, Unheard>;
}

/// The reason for a missing answer about a node's part.
pub type Unheard = Box<dyn std::error::Error + Send + Sync>;

/// The means by which this node does its own part, and the part of a lost node.
#[derive(Debug, Clone, Copy)]
pub struct Means<'a> {
    pub drain: &'a Arc<Drain>,
    pub namespace: &'a Namespace,
    pub restorer: &'a Restorer,
    /// None while there are no other nodes.
    pub others: Option<&'a dyn Participants>,
}

/// Maximum number of attempts that this node remembers as a participant: attempts in flight, and some whose answers were lost.
const REMEMBERED_MAX: usize = 64;

/// The part of an attempt whose files another node has.
#[derive(Debug)]
pub struct Share {
    pub life: NodeLife,
    /// The files, without pins, because the bytes are on the other node.
    pub files: Vec<AttemptFile>,
    pub hard_links: Vec<HardLink>,
    pub prepared: Option<Prepared>,
    /// An attempt by this node in place of the other node, if that one is lost.
    instead: Option<Box<Attempt>>,
}

/// The reason why another node's part is not done.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    #[error("{life} was not heard about its part; it is asked again")]
    Away { life: NodeLife, source: Unheard },
    #[error("{life} could not do its part: {why}")]
    Failed { life: NodeLife, why: String },
    #[error(
        "{life} says that it has other bytes at {path} than were recorded; the next save is the next version"
    )]
    NotHere { life: NodeLife, path: String },
    #[error(
        "{life} would write other bytes to {key} than are there, perhaps from before its daemon was started again; the next try takes \
         another attempt"
    )]
    Taken { life: NodeLife, key: String },
    #[error("what {life} says that it prepared cannot be read")]
    Garbled { life: NodeLife, source: FormatError },
    #[error("{life} is gone, and no copy of {path} that it wrote can be had now")]
    Lost { life: NodeLife, path: String, source: RestoreError },
    #[error(
        "{life} is gone, and {path} that it wrote has other bytes by now; the next save is the next version"
    )]
    Changed { life: NodeLife, path: String },
}

impl Share {
    /// Makes the part of `life` in an attempt.
    #[must_use]
    pub fn new(life: NodeLife, files: Vec<AttemptFile>, hard_links: Vec<HardLink>) -> Self {
        Self { life, files, hard_links, prepared: None, instead: None }
    }

    /// Returns how many bytes still have to be uploaded.
    #[must_use]
    pub fn bytes_left(&self) -> u64 {
        if self.prepared.is_some() { 0 } else { self.files.iter().map(|file| file.entry.size_bytes).sum() }
    }

    /// Makes sure that the files, and a marker for them, are in Tier-3.
    pub(super) async fn prepare(&mut self, record: &Record, means: Means<'_>) -> Result<(), CommitError> {
        if self.prepared.is_some() {
            return Ok(());
        }
        match means.others.filter(|others| others.is_present(self.life.incarnation)) {
            Some(others) if self.instead.is_none() => {
                self.ask(record, others).await.map_err(CommitError::from)
            }
            // A part that this node began in the other's place is finished here, so that no two nodes write one key.
            _ => self.stand_in(record, means).await,
        }
    }

    async fn ask(&mut self, record: &Record, others: &dyn Participants) -> Result<(), ShareError> {
        let life = self.life.clone();
        let text = record.encode().map_err(|source| ShareError::Garbled { life: life.clone(), source })?;
        let index = |path: &RelPath| record.files.iter().position(|file| file.path == *path);
        let files = self.files.iter().filter_map(|file| u32::try_from(index(&file.entry.path)?).ok());
        let links = self.hard_links.iter();
        let prepare = Prepare {
            epoch: others.epoch(),
            record: String::from_utf8_lossy(&text).into_owned(),
            life: life.clone(),
            by: None,
            files: files.collect(),
            hard_links: links
                .map(|link| (link.path.as_bytes().to_vec(), link.to.as_bytes().to_vec()))
                .collect(),
        };
        loop {
            let answer = others.prepare(life.incarnation, prepare.clone()).await;
            match answer.map_err(|source| ShareError::Away { life: life.clone(), source })? {
                Preparing::Working { .. } => tokio::time::sleep(ASK_EVERY).await,
                Preparing::Done { prepared } => {
                    let prepared = wire::prepared(&prepared)
                        .map_err(|source| ShareError::Garbled { life: life.clone(), source })?;
                    self.prepared = Some(prepared);
                    return Ok(());
                }
                Preparing::Failed { why } => return Err(ShareError::Failed { life, why }),
                Preparing::NotHere { path } => {
                    let path = String::from_utf8_lossy(&path).into_owned();
                    return Err(ShareError::NotHere { life, path });
                }
                Preparing::Taken { key } => return Err(ShareError::Taken { life, key }),
            }
        }
    }

    async fn stand_in(&mut self, record: &Record, means: Means<'_>) -> Result<(), CommitError> {
        let life = self.life.clone();
        if self.instead.is_none() {
            let mut files = Vec::with_capacity(self.files.len());
            for file in &self.files {
                files.push(AttemptFile {
                    entry: file.entry.clone(),
                    attributes: file.attributes.clone(),
                    chunks: Arc::clone(&file.chunks),
                    pin: Some(pin_of(means, &life, file).await?),
                });
            }
            let mut instead = Attempt::of_participant(record.clone(), files);
            instead.stands_for = Some(life);
            instead.hard_links.clone_from(&self.hard_links);
            self.instead = Some(Box::new(instead));
        }
        let instead = self.instead.as_mut().expect("it was made above");
        Box::pin(instead.prepare_own(means.drain)).await?;
        self.prepared = instead.own_marker().cloned();
        Ok(())
    }
}

/// Restores a lost node's file to this node's memory, and pins the bytes.
async fn pin_of(means: Means<'_>, life: &NodeLife, file: &AttemptFile) -> Result<Arc<SealPin>, ShareError> {
    let (id, seal) = (file.entry.file, file.entry.seal);
    let path = || file.entry.path.to_string();
    if let Some(cold) = means.namespace.hosts().cold_file(id) {
        means.restorer.restore(path(), cold).await.map_err(|source| ShareError::Lost {
            life: life.clone(),
            path: path(),
            source,
        })?;
    }
    let pin = means.namespace.seals().pin_seal(id, seal);
    pin.map(Arc::new).ok_or_else(|| ShareError::Changed { life: life.clone(), path: path() })
}

/// The parts that this node has in attempts that another node coordinates. Share it by `Arc`.
#[derive(Debug, Default)]
pub struct Participations {
    parts: Mutex<BTreeMap<AttemptId, Arc<Participation>>>,
}

#[derive(Debug)]
struct Participation {
    /// The attempt; taken out while a task works on it.
    attempt: Mutex<Option<Box<Attempt>>>,
    outcome: Mutex<Option<Preparing>>,
}

impl Participations {
    /// Begins this node's part, or returns its progress.
    pub fn prepare(&self, prepare: &Prepare, drain: &Arc<Drain>, namespace: &Namespace) -> Preparing {
        let record = match prepare.record() {
            Ok(record) => record,
            Err(error) => return Preparing::Failed { why: error.to_string() },
        };
        if prepare.life != drain.life {
            let why = format!("this is {}, and {} is asked", drain.life, prepare.life);
            return Preparing::Failed { why };
        }
        // The coordinator raised the epoch before it wrote the record.
        drain.set_epoch(prepare.epoch, true);
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if parts.len() >= REMEMBERED_MAX && !parts.contains_key(&record.attempt) {
            let done =
                |part: &Participation| part.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some();
            if let Some(old) = parts.iter().find(|(_, part)| done(part)).map(|(id, _)| *id) {
                parts.remove(&old);
            } else {
                return Preparing::Failed {
                    why: format!("{REMEMBERED_MAX} attempts are worked on here already"),
                };
            }
        }
        let id = record.attempt;
        let part = match parts.get(&id) {
            Some(part) => Arc::clone(part),
            None => match begin(prepare, record, namespace) {
                Ok(attempt) => {
                    let part = Arc::new(Participation {
                        attempt: Mutex::new(Some(Box::new(attempt))),
                        outcome: Mutex::default(),
                    });
                    parts.insert(id, Arc::clone(&part));
                    part
                }
                Err(path) => return Preparing::NotHere { path },
            },
        };
        drop(parts);
        part.go_on(drain)
    }
}

impl Participation {
    /// Returns the progress, and starts a task if none works on the part. A failure is reported once; the next call tries again.
    fn go_on(self: Arc<Self>, drain: &Arc<Drain>) -> Preparing {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        match &*outcome {
            Some(done @ Preparing::Done { .. }) => return done.clone(),
            Some(_) => return outcome.take().expect("it was looked at"),
            None => {}
        }
        drop(outcome);
        let taken = self.attempt.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut attempt) = taken else { return Preparing::Working { bytes_left: 0 } };
        let bytes_left = attempt.bytes_left();
        let (part, drain) = (Arc::clone(&self), Arc::clone(drain));
        tokio::spawn(async move {
            let result = attempt.prepare_own(&drain).await;
            let outcome = match (result, attempt.own_marker().map(Document::encode)) {
                (Ok(()), Some(Ok(text))) => {
                    Preparing::Done { prepared: String::from_utf8_lossy(&text).into_owned() }
                }
                (Err(CommitError::Taken { key }), _) => Preparing::Taken { key },
                (Err(error), _) => Preparing::Failed { why: error_text(&error) },
                (Ok(()), _) => Preparing::Failed { why: "the marker cannot be told".to_owned() },
            };
            *part.attempt.lock().unwrap_or_else(PoisonError::into_inner) = Some(attempt);
            *part.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        });
        Preparing::Working { bytes_left }
    }
}

/// Makes this node's part of an attempt. Fails with the path of a file whose recorded bytes are not here.
fn begin(prepare: &Prepare, record: Record, namespace: &Namespace) -> Result<Attempt, Vec<u8>> {
    let mut files = Vec::with_capacity(prepare.files.len());
    for index in &prepare.files {
        let entry = usize::try_from(*index).ok().and_then(|index| record.files.get(index));
        let Some(entry) = entry.cloned() else { return Err(b"?".to_vec()) };
        let missing = || entry.path.as_bytes().to_vec();
        let pin = namespace.seals().pin_seal(entry.file, entry.seal).ok_or_else(missing)?;
        let view = namespace.nodes().view_of(entry.file).ok_or_else(missing)?;
        let FileState::Sealed { chunks, .. } = &view.state else { return Err(missing()) };
        let chunks = Arc::clone(chunks);
        files.push(AttemptFile { attributes: view.attributes(), chunks, pin: Some(Arc::new(pin)), entry });
    }
    let mut attempt = Attempt::of_participant(record, files);
    for (path, to) in &prepare.hard_links {
        let (Ok(path), Ok(to)) = (RelPath::new(path.clone()), RelPath::new(to.clone())) else {
            return Err(path.clone());
        };
        attempt.hard_links.push(HardLink { path, to });
    }
    Ok(attempt)
}
