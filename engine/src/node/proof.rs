//! Looks again at what committed versions rest on in Tier-3: the marker, the manifest, the record.
//!
//! Owns: which documents are read, and which invariant a finding breaks. Does not own: the invariants (protocol), the
//! bytes of files (`verify`).

use crate::node::flush::covers;
use crate::node::run::{Engine, Node, error_text};
use crate::save::again::write_manifest_again;
use crate::save::commit::read_marker;
use crate::store::StoreError;
use futures::stream::{self, StreamExt};
use std::sync::Arc;
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::format::{Document, MAX_DOCUMENT_BYTES};
use tidemark_protocol::invariants;
use tidemark_protocol::key::Key;
use tidemark_protocol::manifest::{Manifest, ValidatedManifest};
use tidemark_protocol::marker::Marker;
use tidemark_protocol::record::Record;
use tidemark_protocol::report::{BrokenInvariant, EventLevel, Unrecoverable, Verify, VerifyRepair};

/// Versions looked at at once: each is three small reads, one after the other.
const VERSIONS_IN_FLIGHT: usize = 8;

/// Why a version's proof does not hold, or is not known to.
enum Problem {
    Broken { invariant: &'static str, what: String },
    Away(String),
}

impl Node {
    /// Adds to `verify` the committed versions at or below `place` of which Tier-3 does not say what it must.
    pub(super) async fn verify_proofs(&self, place: Vec<u8>, verify: &mut Verify) -> Option<()> {
        let (committed, unreadable) =
            self.ask(move |engine| (engine.committed_below(&place), engine.unreadable_below(&place))).await?;
        verify.broken.extend(unreadable);
        let looked = committed.into_iter().map(|(path, version, manifest)| async move {
            let found = self.look_at_proof(&version, manifest.as_deref()).await;
            (String::from_utf8_lossy(&path).into_owned(), found)
        });
        let mut looked = stream::iter(looked).buffer_unordered(VERSIONS_IN_FLIGHT);
        while let Some(found) = looked.next().await {
            match found {
                (_, Ok(None)) => {}
                (path, Ok(Some(what))) => {
                    tracing::warn!(path, what, "a manifest was bad and has been written again");
                    let said = format!("{what}; the manifest was written again from memory");
                    let (events, now_ns) = (&self.shared().events, self.shared().now_ns());
                    events.add(now_ns, EventLevel::Warn, "repaired", Some(path.clone()), said);
                    let (copy, from) = ("object".to_owned(), "host".to_owned());
                    verify.repaired.push(VerifyRepair { path, copy, what, from });
                }
                (path, Err(Problem::Broken { invariant, what })) => {
                    verify.broken.push(BrokenInvariant { path, invariant: invariant.to_owned(), what });
                }
                (path, Err(Problem::Away(what))) => {
                    verify.away = true;
                    verify.unchecked.push(Unrecoverable { path, what });
                }
            }
        }
        verify.broken.sort_by(|a, b| a.path.cmp(&b.path));
        verify.unchecked.sort_by(|a, b| a.path.cmp(&b.path));
        Some(())
    }

    /// What was wrong with the manifest, where it was written again from the one that this daemon knows.
    async fn look_at_proof(
        &self,
        committed: &Checkpoint,
        known: Option<&Manifest>,
    ) -> Result<Option<String>, Problem> {
        let record = committed.record();
        let (version, attempt) = (record.version.clone(), record.attempt);
        let marker = match read_marker(&self.shared().drain, &version).await {
            Ok(marker) => marker,
            Err(error) if error.kind() == crate::error::ErrorKind::Corrupt => {
                let what = error_text(&error);
                return Err(Problem::Broken { invariant: "a_committed_version_has_its_marker", what });
            }
            Err(error) => return Err(Problem::Away(error_text(&error))),
        };
        invariants::a_committed_version_has_its_marker(committed, marker.as_ref())
            .map_err(|what| Problem::Broken { invariant: "a_committed_version_has_its_marker", what })?;
        let Some(marker) = marker else { return Ok(None) };
        let key = Key::Committed { version: version.clone() }.to_string();
        invariants::a_commit_marker_stands_where_its_body_says(&marker, &key).map_err(|flaw| {
            Problem::Broken {
                invariant: "a_commit_marker_stands_where_its_body_says",
                what: error_text(&flaw),
            }
        })?;
        let mut mended = None;
        let manifest = match self.read_manifest(&marker).await {
            Err(Problem::Broken { invariant, what }) => {
                self.mend_manifest(&marker, known)
                    .await
                    .map_err(|why| Problem::Broken { invariant, what: format!("{what}; {why}") })?;
                mended = Some(what);
                self.read_manifest(&marker).await?
            }
            read => read?,
        };
        let listed = "a_manifest_holds_exactly_the_files_of_its_record";
        let broken = |what| Problem::Broken { invariant: listed, what };
        let bytes = self.read(&Key::Record { version, attempt }.to_string(), listed).await?;
        let record = Record::parse(&bytes).map_err(|error| broken(error_text(&error)))?;
        invariants::a_manifest_holds_exactly_the_files_of_its_record(manifest.manifest(), &record)
            .map_err(|flaw| broken(error_text(&flaw)))?;
        Ok(mended)
    }

    async fn read_manifest(&self, marker: &Marker) -> Result<ValidatedManifest, Problem> {
        let named = "a_commit_marker_names_a_manifest_that_hashes_to_its_name";
        let bytes = self.read(marker.manifest.as_deref().unwrap_or_default(), named).await?;
        invariants::a_commit_marker_names_a_manifest_that_hashes_to_its_name(marker, &bytes)
            .map_err(|error| Problem::Broken { invariant: named, what: error_text(&error) })
    }

    /// Writes the manifest again that the marker names: the hash says that it is the same.
    async fn mend_manifest(&self, marker: &Marker, known: Option<&Manifest>) -> Result<(), String> {
        let (Some(known), Some(key)) = (known, &marker.manifest) else {
            return Err("this daemon does not know it".to_owned());
        };
        if self.ask(|engine| engine.fenced.is_some()).await != Some(false) {
            return Err("this node writes nothing to Tier-3".to_owned());
        }
        let (bytes, hash) = known.encode_named().map_err(|error| error_text(&error))?;
        if marker.manifest_hash != Some(hash) {
            return Err("the one that this daemon knows is another".to_owned());
        }
        write_manifest_again(&self.shared().drain, key, bytes).await.map_err(|error| error_text(&error))
    }

    async fn read(&self, key: &str, invariant: &'static str) -> Result<Vec<u8>, Problem> {
        let limit = u64::try_from(MAX_DOCUMENT_BYTES).expect("a constant");
        match self.shared().drain.store.get(key, limit).await {
            Ok(Some(bytes)) => Ok(bytes.to_vec()),
            Ok(None) => Err(Problem::Broken { invariant, what: format!("{key} is not there") }),
            Err(error @ StoreError::Damaged { .. }) => {
                Err(Problem::Broken { invariant, what: error_text(&error) })
            }
            Err(error) => Err(Problem::Away(error_text(&error))),
        }
    }
}

impl Engine {
    /// Versions of which the start could not read the marker or the manifest.
    fn unreadable_below(&self, place: &[u8]) -> Vec<BrokenInvariant> {
        let books = self.ledger.books.values().filter(|book| covers(place, &book.path()));
        let found = books.flat_map(|book| {
            let there = book.versions.iter().filter(|(number, version)| !self.is_removed(book, **number, version));
            let whys = there.filter_map(|(_, version)| version.checkpoint.why_unreadable());
            whys.map(|why| BrokenInvariant {
                path: String::from_utf8_lossy(&book.path()).into_owned(),
                invariant: "a_committed_version_has_its_marker_and_its_manifest".to_owned(),
                what: format!("{why}; restore that object from a copy of Tier-3 and restart the daemon, or remove the checkpoint"),
            })
        });
        found.collect()
    }

    fn committed_below(&self, place: &[u8]) -> Vec<(Vec<u8>, Checkpoint, Option<Arc<Manifest>>)> {
        let books = self.ledger.books.values().filter(|book| covers(place, &book.path()));
        let committed = books.flat_map(|book| {
            let versions = book.versions.values().filter(|version| version.checkpoint.is_committed());
            versions.map(|version| (book.path(), version.checkpoint.clone(), version.manifest().cloned()))
        });
        committed.collect()
    }
}
