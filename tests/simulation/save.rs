//! The upload of an attempt to Tier-3: record, bytes, prepared markers, manifest, marker, as in the engine's
//! `save::{commit, share}`.
//!
//! Owns: the order of the writes, the meaning of a doubtful answer to each, a participant's part, also when another node does
//! it. Does not own: when (`decide`), the documents (protocol).

use super::coordinator::Catalog;
use super::names::Away;
use super::node::Node;
use super::store::{Object, Store};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{self, Prepare, Preparing, ToNode};
use tidemark_protocol::file::Seal;
use tidemark_protocol::format::Document;
use tidemark_protocol::id::{AttemptId, Epoch};
use tidemark_protocol::key::{Key, NodeLife, Part, Series, VersionId, VersionRef};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::manifest::{
    Attributes, Manifest, ManifestFile, Prepared, ValidatedManifest, format_of,
};
use tidemark_protocol::marker::{Marker, MarkerOutcome, doubt};
use tidemark_protocol::record::{Record, RecordFile};

/// Tries of a doubtful create before the attempt pauses.
const TRIES: u32 = 3;
const ASK_EVERY: Duration = Duration::from_millis(100);
const DEADLINE: Duration = Duration::from_secs(10);
/// Most attempts of whose parts a node remembers the result.
const REMEMBERED_MAX: usize = 64;

/// Reason why an attempt does not go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SaveError {
    /// A failure that may pass.
    Passing(String),
    /// A newer coordinator decides.
    Fenced,
    /// The attempt will never be committed.
    Otherwise(String),
}

/// Parts of other nodes' attempts that this node prepares.
#[derive(Debug, Default)]
pub(crate) struct Participations(RefCell<BTreeMap<AttemptId, Option<Preparing>>>);

type Bytes = (RecordFile, Seal, Vec<u64>);

impl Node {
    /// Begins this node's part, or returns its progress.
    pub(crate) fn prepare(self: &Rc<Self>, prepare: &Prepare) -> Preparing {
        let record = prepare.record().expect("the coordinator sends a record");
        if prepare.life != self.memory.life {
            return Preparing::Failed { why: format!("this is {}", self.memory.life) };
        }
        let mut parts = self.participations.0.borrow_mut();
        match parts.get_mut(&record.attempt) {
            Some(Some(done @ Preparing::Done { .. })) => return done.clone(),
            Some(None) => return Preparing::Working { bytes_left: 0 },
            Some(failed) => {
                let failed = failed.take().expect("it was looked at");
                parts.remove(&record.attempt);
                return failed;
            }
            None => {}
        }
        if parts.len() >= REMEMBERED_MAX {
            let done = parts.iter().find(|(_, part)| part.is_some()).map(|(attempt, _)| *attempt);
            match done {
                Some(done) => drop(parts.remove(&done)),
                None => return Preparing::Failed { why: "too many attempts at once".to_owned() },
            }
        }
        let mut files = Vec::new();
        for index in &prepare.files {
            let entry = record.files[usize::try_from(*index).expect("records are small here")].clone();
            match self.memory.bytes_of(entry.file, entry.seal) {
                Some((seal, chunks)) => files.push((entry, seal, chunks)),
                None => return Preparing::NotHere { path: entry.path.as_bytes().to_vec() },
            }
        }
        parts.insert(record.attempt, None);
        drop(parts);
        let epoch = prepare.epoch;
        self.run(|node| async move {
            let life = node.memory.life.clone();
            let outcome = match node.upload(&record, files, epoch, &life, None).await {
                Ok(prepared) => {
                    let text = prepared.encode().expect("it can be told");
                    Preparing::Done { prepared: String::from_utf8_lossy(&text).into_owned() }
                }
                Err(error) => Preparing::Failed { why: format!("{error:?}") },
            };
            node.participations.0.borrow_mut().insert(record.attempt, Some(outcome));
        });
        Preparing::Working { bytes_left: 1 }
    }

    /// Carries out phase 1 for some files: writes their bytes, then the prepared marker.
    async fn upload(
        self: &Rc<Self>,
        record: &Record,
        files: Vec<Bytes>,
        epoch: Epoch,
        life: &NodeLife,
        by: Option<NodeLife>,
    ) -> Result<Prepared, SaveError> {
        let stand_in = by.as_ref().map(|by| by.incarnation);
        let part = Part { attempt: record.attempt, stand_in };
        let mut uploaded = Vec::new();
        for (entry, seal, chunks) in files {
            let key = Key::data(&record.version, part, &entry.path).expect("a record names files of its run");
            let object = Object::Data { chunks, size_bytes: seal.size_bytes };
            self.write(epoch, &key, object).await?;
            uploaded.push(ManifestFile {
                path: entry.path.clone(),
                key: key.to_string(),
                size_bytes: entry.size_bytes,
                crc64nvme: entry.crc64nvme,
                chunks: seal.chunks.to_vec(),
                encoding: None,
                etag: None,
                file: entry.file,
                seal: entry.seal,
                attributes: Attributes { mode: 0o644, uid: 0, gid: 0, mtime_ns: 0, xattrs: BTreeMap::new() },
            });
        }
        let prepared = Prepared {
            format: format_of(&uploaded, record.format),
            version: record.version.clone(),
            attempt: record.attempt,
            epoch,
            life: life.clone(),
            by: by.clone(),
            chunk_bytes: CHUNK_BYTES,
            files: uploaded,
            directories: Vec::new(),
            symlinks: Vec::new(),
            hard_links: Vec::new(),
        };
        let key = Key::Prepared {
            version: record.version.clone(),
            attempt: record.attempt,
            life: life.clone(),
            by,
        };
        let bytes = prepared.encode().map_err(|error| SaveError::Otherwise(error.to_string()))?;
        match self.write(epoch, &key, Object::Document(bytes)).await {
            Ok(()) => Ok(prepared),
            // An earlier epoch wrote the marker. Equal files make it as good as ours.
            Err(SaveError::Otherwise(_)) => match document::<Prepared>(self, &key).await? {
                Some(found) if found.files == prepared.files => Ok(found),
                _ => Err(SaveError::Otherwise(format!("{key} says something else"))),
            },
            Err(error) => Err(error),
        }
    }

    /// Ensures that a key holds these bytes.
    async fn write(self: &Rc<Self>, epoch: Epoch, key: &Key, object: Object) -> Result<(), SaveError> {
        for _ in 0..TRIES {
            match Store::create(self, epoch, key.to_string(), object.clone()).await {
                Ok(true) => return Ok(()),
                Ok(false) => match Store::get(self, key.to_string()).await {
                    Ok(Some(found)) if found == object => return Ok(()),
                    Ok(Some(_)) => return Err(SaveError::Otherwise(format!("{key} holds other bytes"))),
                    Ok(None) | Err(_) => {}
                },
                Err(_) => {}
            }
        }
        Err(SaveError::Passing(format!("{key} was not written")))
    }
}

async fn document<T: Document>(node: &Rc<Node>, key: &Key) -> Result<Option<T>, SaveError> {
    match Store::get(node, key.to_string()).await {
        Ok(Some(Object::Document(bytes))) => {
            T::parse(&bytes).map(Some).map_err(|error| SaveError::Otherwise(error.to_string()))
        }
        Ok(_) => Ok(None),
        Err(_) => Err(SaveError::Passing(format!("{key} was not read"))),
    }
}

impl Catalog {
    /// Raises the epoch in Tier-3 to this coordinator's, and checks that none is higher. Comes before any other write there.
    pub(crate) async fn make_sure_of_epoch(&self) -> Result<(), SaveError> {
        let passing = |_| SaveError::Passing("the epoch was not raised".to_owned());
        let series = Series::Epoch.prefix();
        let highest = |keys: Vec<String>| {
            let number = |key: &String| match key.parse::<Key>() {
                Ok(Key::Numbered { series: Series::Epoch, number }) => Some(Epoch(number)),
                Ok(_) | Err(_) => None,
            };
            keys.iter().filter_map(number).max()
        };
        let listed = highest(Store::list(&self.node, series.clone()).await.map_err(passing)?);
        let newest = if listed >= Some(self.epoch) {
            listed
        } else {
            let key = Key::numbered(Series::Epoch, self.epoch.0).to_string();
            let body = Object::Document(format!("{}\n", self.epoch.0).into_bytes());
            Store::create(&self.node, self.epoch, key, body).await.map_err(passing)?;
            highest(Store::list(&self.node, series).await.map_err(passing)?)
        };
        if newest > Some(self.epoch) || self.is_closed() { Err(SaveError::Fenced) } else { Ok(()) }
    }

    /// Carries out phase 1: writes the record, then has each participant prepare its part.
    pub(crate) async fn prepare(self: &Rc<Self>, record: &Record) -> Result<Vec<Prepared>, SaveError> {
        self.make_sure_of_epoch().await?;
        let key = Key::Record { version: record.version.clone(), attempt: record.attempt };
        let bytes = record.encode().map_err(|error| SaveError::Otherwise(error.to_string()))?;
        self.node.write(self.epoch, &key, Object::Document(bytes)).await?;
        let mut prepared = Vec::new();
        for life in &record.participants {
            prepared.push(self.share(record, life).await?);
        }
        Ok(prepared)
    }

    async fn share(self: &Rc<Self>, record: &Record, life: &NodeLife) -> Result<Prepared, SaveError> {
        let own: Vec<_> =
            record.files.iter().filter(|entry| entry.file.incarnation == life.incarnation).cloned().collect();
        if let Some(found) = self.prepared_before(record, life).await? {
            return Ok(found);
        }
        if *life == self.node.memory.life {
            let bytes = |entry: &RecordFile| {
                let (seal, chunks) = self.node.memory.bytes_of(entry.file, entry.seal)?;
                Some((entry.clone(), seal, chunks))
            };
            let files: Option<Vec<_>> = own.iter().map(bytes).collect();
            let files = files.ok_or_else(|| SaveError::Otherwise("it was written again".to_owned()))?;
            return self.node.upload(record, files, self.epoch, life, None).await;
        }
        if self.is_gone(life.incarnation) {
            return self.stand_in(record, life, own).await;
        }
        let to = self.node.world.index_of(&life.node).expect("a participant is a machine");
        let index = |entry: &RecordFile| record.files.iter().position(|other| other.path == entry.path);
        let message = ToNode::Prepare(Box::new(Prepare {
            epoch: self.epoch,
            record: String::from_utf8_lossy(&record.encode().expect("it was written")).into_owned(),
            life: life.clone(),
            by: None,
            files: own.iter().filter_map(|entry| u32::try_from(index(entry)?).ok()).collect(),
            hard_links: Vec::new(),
        }));
        loop {
            let answer: Result<Preparing, Away> = self.node.ask_node(to, &message, DEADLINE).await;
            match answer {
                Ok(Preparing::Working { .. }) => self.node.world.sleep(ASK_EVERY).await,
                Ok(Preparing::Done { prepared }) => {
                    return wire::prepared(&prepared)
                        .map_err(|error| SaveError::Otherwise(error.to_string()));
                }
                Ok(Preparing::Failed { why }) => return Err(SaveError::Passing(why)),
                Ok(Preparing::Taken { key }) => {
                    return Err(SaveError::Otherwise(format!("{key} holds other bytes")));
                }
                Ok(Preparing::NotHere { path }) => {
                    return Err(SaveError::Otherwise(format!(
                        "{life} has other bytes at {}",
                        super::world::show(&path)
                    )));
                }
                Err(away) => return Err(SaveError::Passing(format!("{life}: {away:?}"))),
            }
        }
    }

    /// Returns an existing prepared marker, whichever node wrote it, so that no part is prepared twice.
    async fn prepared_before(&self, record: &Record, life: &NodeLife) -> Result<Option<Prepared>, SaveError> {
        let prefix = format!("{}/a-{}/.tidemark/prepared-{life}", record.version, record.attempt);
        let passing = |_| SaveError::Passing("what is prepared was not listed".to_owned());
        for key in Store::list(&self.node, prefix).await.map_err(passing)? {
            let key: Key = key.parse().expect("only our keys are there");
            if let Some(found) = document::<Prepared>(&self.node, &key).await?
                && found.life == *life
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Does the part of a lost node under this node's own key, with the files from any node that keeps copies.
    async fn stand_in(
        self: &Rc<Self>,
        record: &Record,
        life: &NodeLife,
        own: Vec<RecordFile>,
    ) -> Result<Prepared, SaveError> {
        self.node.world.count("part of a lost participant done by another");
        let mut files = Vec::new();
        for entry in own {
            let found = self.bytes_for(&entry).await;
            let Some((seal, chunks)) = found else {
                // A node that was declared gone may come back with the file.
                self.node.world.count("part of a lost participant that nobody has");
                return Err(SaveError::Passing(format!(
                    "{life} is gone, and {} cannot be had now",
                    entry.path
                )));
            };
            files.push((entry, seal, chunks));
        }
        let me = self.node.memory.life.clone();
        self.node.upload(record, files, self.epoch, life, Some(me)).await
    }

    async fn bytes_for(self: &Rc<Self>, entry: &RecordFile) -> Option<(Seal, Vec<u64>)> {
        if let Some(here) = self.node.memory.bytes_of(entry.file, entry.seal) {
            return Some(here);
        }
        let seal = self.seal_of(entry)?;
        for holder in self.suppliers(entry.file, entry.seal) {
            let from = self.node.world.index_of(&holder).expect("a member is a machine");
            if let Some(chunks) = self.node.fetch(entry.file, &seal, from).await {
                return Some((seal, chunks));
            }
        }
        None
    }

    /// Carries out phase 2: writes the manifest, then the marker, which is the one decision.
    pub(crate) async fn commit(
        &self,
        record: &Record,
        prepared: &[Prepared],
        previous: Option<VersionRef>,
    ) -> Result<(), SaveError> {
        let otherwise = |error: String| SaveError::Otherwise(error);
        let manifest = Manifest::join(record, prepared).map_err(|flaw| otherwise(flaw.to_string()))?;
        let (bytes, hash) = manifest.encode_named().map_err(|error| otherwise(error.to_string()))?;
        ValidatedManifest::parse(&bytes, &hash).map_err(|error| otherwise(error.to_string()))?;
        let key = Key::Manifest { version: record.version.clone(), attempt: record.attempt, hash };
        self.node.write(self.epoch, &key, Object::Document(bytes)).await?;
        self.make_sure_of_epoch().await?;
        let version = record.version.clone();
        let marker = Marker::commit(version, record.attempt, hash, record.step, self.epoch, previous);
        self.create_marker(&marker).await
    }

    /// Decides that a version is never committed.
    pub(crate) async fn abort(&self, record: &Record) -> Result<(), SaveError> {
        self.make_sure_of_epoch().await?;
        let marker = Marker::abort(record.version.clone(), record.attempt, record.step, self.epoch);
        self.create_marker(&marker).await
    }

    async fn create_marker(&self, mine: &Marker) -> Result<(), SaveError> {
        let key = Key::Committed { version: mine.version.clone() };
        let bytes = mine.encode().expect("a marker can be told");
        for _ in 0..TRIES {
            let created =
                Store::create(&self.node, self.epoch, key.to_string(), Object::Document(bytes.clone()));
            if created.await == Ok(true) {
                return Ok(());
            }
            let found = document::<Marker>(&self.node, &key).await?;
            match doubt(mine, found.as_ref()) {
                MarkerOutcome::Mine => return Ok(()),
                MarkerOutcome::Absent => {}
                MarkerOutcome::Lost { decision, attempt, epoch } => {
                    return Err(SaveError::Otherwise(format!(
                        "{decision} of attempt {attempt} in epoch {epoch}"
                    )));
                }
            }
        }
        Err(SaveError::Passing(format!("whether {} is committed stays unknown", mine.version)))
    }

    /// Lists the versions in Tier-3: their records, and the decisions on them.
    pub(crate) async fn list_tier3(&self) -> Result<Vec<(Record, Option<Marker>)>, SaveError> {
        let passing = |_| SaveError::Passing("Tier-3 was not listed".to_owned());
        let keys = Store::list(&self.node, "run".to_owned()).await.map_err(passing)?;
        let keys: Vec<Key> = keys.iter().filter_map(|key| key.parse().ok()).collect();
        let mut markers: BTreeMap<VersionId, Marker> = BTreeMap::new();
        for key in &keys {
            if let Key::Committed { version } = key
                && let Some(marker) = document::<Marker>(&self.node, key).await?
            {
                markers.insert(version.clone(), marker);
            }
        }
        let mut found = Vec::new();
        for key in &keys {
            if let Key::Record { version, attempt } = key {
                let marker = markers.get(version);
                if marker.is_some_and(|marker| marker.attempt != *attempt) {
                    continue;
                }
                let record = document::<Record>(&self.node, key).await?;
                found.extend(record.map(|record| (record, marker.cloned())));
            }
        }
        Ok(found)
    }
}
