//! The catalog in etcd, beside the lease: written by its holder alone.
//!
//! Owns: reading all of it at one revision, steps that are made once. Does not own: the content (`catalog::keep`), its format
//! (`protocol::cluster::kept`).
//!
//! A step compares the lease's create revision, so that a coordinator that was replaced changes nothing however late its request arrives; and
//! the revision at which the mark was last put, so that a request that was delayed cannot undo a later one.

use super::client::{Came, Do, EtcdClient, Found, Is, Limits, Page};
use super::{EtcdAccess, EtcdError, LEASE_KEY};
use crate::catalog::{CatalogLog, Step, StepError};
use std::error::Error as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidemark_protocol::cluster::kept::{
    ALL, ALL_END, Change, Entry, KeptCatalog, KeptError, MARK, Mark, mark_bytes, read_mark,
};
use tidemark_protocol::id::Epoch;

/// Keys in one answer. For each answer etcd counts all keys that are left.
const PAGE_KEYS: usize = 16_384;

/// Limits of a page. A page of that many usual keys has some 8 MiB; a reader of longer keys asks for fewer.
const PAGE: Limits =
    Limits { within: Duration::from_secs(10), answer_bytes_max: 32 << 20, patience: Duration::from_secs(5) };

/// Why the catalog cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("etcd at {place} was not read")]
    Etcd { place: String, source: Box<EtcdError> },
    #[error("the catalog in etcd at {place} is not understood")]
    Kept { place: String, source: KeptError },
}

/// The catalog of the cluster, in a term.
#[derive(Debug)]
pub struct EtcdCatalog {
    client: EtcdClient,
    epoch: Epoch,
    /// The revision at which the mark was last put, as far as this coordinator knows; 0: there is none.
    mark_revision: AtomicU64,
}

impl EtcdCatalog {
    /// Makes the catalog for the holder of the lease in that epoch.
    #[must_use]
    pub fn new(access: EtcdAccess, epoch: Epoch) -> Self {
        Self { client: EtcdClient::new(access), epoch, mark_revision: AtomicU64::new(0) }
    }

    fn key(&self, name: &str) -> String {
        self.client.place().key(name)
    }

    fn failed(&self, source: EtcdError) -> LoadError {
        LoadError::Etcd { place: self.client.place().to_string(), source: Box::new(source) }
    }

    /// Reads the last kept catalog; `None` if it is not whole. Costs a request for each [`PAGE_KEYS`] keys.
    ///
    /// # Errors
    /// See [`LoadError`]. If the format is unknown, the next step may write the catalog anew.
    pub async fn load(&self) -> Result<Option<KeptCatalog>, LoadError> {
        let found = self.client.get(&self.key(MARK)).await.map_err(|source| self.failed(source))?;
        self.mark_revision.store(found.as_ref().map_or(0, |found| found.mod_revision), Ordering::Release);
        let Some(found) = found else { return Ok(None) };
        let malformed = |source| LoadError::Kept { place: self.client.place().to_string(), source };
        let mark = read_mark(&found.value).map_err(malformed)?;
        if !mark.whole {
            return Ok(None);
        }
        let entries = self.entries().await.map_err(|source| self.failed(source))?;
        KeptCatalog::read(mark, entries).map(Some).map_err(malformed)
    }

    /// Reads all keys of the catalog, at one revision: no other node writes them now, and a page may be lost on the way.
    async fn entries(&self) -> Result<Vec<Entry>, EtcdError> {
        let before = self.key("");
        let until = self.key(ALL_END);
        let (mut from, mut revision, mut most) = (self.key(ALL).into_bytes(), 0, PAGE_KEYS);
        let mut entries = Vec::new();
        loop {
            let page = match self.client.page((&from, &until), most, revision, PAGE).await {
                Err(EtcdError::TooLong { .. }) if most > 1 => {
                    most = most.div_ceil(4);
                    continue;
                }
                page => page?,
            };
            let Page { found, more, revision: now } = page;
            if revision == 0 {
                revision = now;
            }
            if let Some(last) = found.last() {
                from.clone_from(&last.key);
                from.push(0);
            }
            let is_end = found.is_empty() || !more;
            entries.extend(found.into_iter().filter_map(|found| entry(found, &before)));
            if is_end {
                return Ok(entries);
            }
        }
    }

    /// Decides about a step that found other revisions than it compared with.
    fn judge(&self, step: &Step, lease: Option<&Found>, mark: Option<&Found>) -> Result<(), StepError> {
        let holder = lease.map_or(0, |lease| lease.create_revision);
        if holder != self.epoch.0 {
            return Err(StepError::Lost(format!("the lease is of epoch {holder}, not of {}", self.epoch)));
        }
        let Some(found) = mark else {
            self.mark_revision.store(0, Ordering::Release);
            return Err(StepError::Changed("its mark was removed".to_owned()));
        };
        self.mark_revision.store(found.mod_revision, Ordering::Release);
        match read_mark(&found.value) {
            // The step was made, and its answer was lost.
            Ok(mark) if mark == step.mark => Ok(()),
            Ok(Mark { epoch, number, .. }) => Err(StepError::Changed(format!(
                "change {number} of epoch {epoch} is there, where the one before {} was left",
                step.mark.number
            ))),
            Err(error) => Err(StepError::Changed(error.to_string())),
        }
    }
}

/// Returns a key of the catalog without the prefix of the cluster, if it is text: all keys of Tidemark are.
fn entry(found: Found, before: &str) -> Option<Entry> {
    let key = String::from_utf8(found.key).ok()?;
    let key = key.strip_prefix(before)?.to_owned();
    Some(Entry { key, value: found.value, revision: found.mod_revision })
}

#[async_trait::async_trait]
impl CatalogLog for EtcdCatalog {
    async fn step(&self, step: &Step) -> Result<(), StepError> {
        let (lease, mark) = (self.key(LEASE_KEY), self.key(MARK));
        let compare =
            [Is::Created(&lease, self.epoch.0), Is::Put(&mark, self.mark_revision.load(Ordering::Acquire))];
        let keyed: Vec<_> = step
            .changes
            .iter()
            .map(|change| match change {
                Change::Put { key, value } => (self.key(key), Ok(value.as_slice())),
                Change::Delete { from, until } => (self.key(from), Err(self.key(until))),
            })
            .collect();
        let marked = mark_bytes(&step.mark);
        let changes = keyed.iter().map(|(key, what)| match what {
            Ok(value) => Do::Put(key, value, 0),
            Err(until) => Do::Delete(key, until),
        });
        let came = self.client.transact(&compare, changes.chain([Do::Put(&mark, &marked, 0)])).await;
        match came {
            Ok(Came::Done { revision }) => {
                self.mark_revision.store(revision, Ordering::Release);
                Ok(())
            }
            Ok(Came::Differs { found }) => {
                let mut found = found.iter().map(Option::as_ref);
                self.judge(step, found.next().flatten(), found.next().flatten())
            }
            Err(error) if error.is_full() => Err(StepError::Full(with_source(&error))),
            Err(error) => Err(StepError::Away(with_source(&error))),
        }
    }
}

fn with_source(error: &EtcdError) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
