//! Looks again at what committed versions rest on in Tier-3: the marker, the manifest, the record.
//!
//! Owns: which documents are read and written again, and which invariant a finding breaks. Does not own: the invariants (protocol), the
//! bytes of files (`verify`).

use crate::node::given_up::Objects;
use crate::node::recover::record_of;
use crate::node::run::Node;
use crate::node::verify::note_repaired;
use crate::save::again::{AgainError, write_document_again, write_marker_again};
use crate::save::commit::read_marker;
use futures::stream::{self, StreamExt};
use std::sync::Arc;
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::error::error_text;
use tidemark_protocol::format::{Document, FormatError, MAX_DOCUMENT_BYTES};
use tidemark_protocol::id::Epoch;
use tidemark_protocol::invariants;
use tidemark_protocol::key::{Key, VersionRef};
use tidemark_protocol::manifest::{Manifest, ValidatedManifest};
use tidemark_protocol::marker::Marker;
use tidemark_protocol::record::Record;
use tidemark_protocol::report::{BrokenInvariant, Unrecoverable, Verify, path_text};
use tidemark_store::StoreError;

/// Versions examined at once: each is three small reads, one after the other.
const VERSIONS_IN_FLIGHT: usize = 8;

/// Facts about a committed version that this daemon knows besides its record.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) epoch: Epoch,
    pub(crate) previous: Option<VersionRef>,
}

impl Known {
    /// Returns the marker that was written, or an equivalent one.
    fn marker(&self, record: &Record) -> Result<Marker, FormatError> {
        let (_, hash) = self.manifest.encode_named()?;
        let (version, previous) = (record.version.clone(), self.previous.clone());
        Ok(Marker::commit(version, record.attempt, hash, record.step, self.epoch, previous))
    }
}

fn said(result: Result<(), AgainError>) -> Result<(), String> {
    result.map_err(|error| error_text(&error))
}

/// Why a version's proof does not hold, or is not known to.
enum Problem {
    Broken { invariant: &'static str, what: String },
    Away(String),
}

/// Reading the documents of committed versions, and writing bad ones again.
#[derive(Clone, Copy)]
pub(super) struct Proofs<'a> {
    pub(super) node: &'a Node,
}

impl Proofs<'_> {
    /// Adds to `verify` the committed versions at or below `place`, or in which it lies, whose documents in Tier-3 are bad. `unmended` gets
    /// those whose documents this daemon cannot write again.
    pub(super) async fn verify(
        self,
        place: Vec<u8>,
        verify: &mut Verify,
        unmended: &mut Vec<BrokenInvariant>,
    ) -> Option<()> {
        let (committed, unreadable) = self
            .node
            .ask(move |engine| {
                (engine.by_path().committed_below(&place), engine.selection().unreadable_below(&place))
            })
            .await?;
        verify.broken.extend(unreadable);
        let looked = committed.into_iter().map(|(path, version, known)| async move {
            let found = match self.look_at_proof(&version, known.as_ref()).await {
                // Given up since it was listed: that goes on, and breaks nothing.
                Err(Problem::Broken { .. })
                    if Objects { node: self.node }.is_retired(&version.record().version).await =>
                {
                    Ok(Vec::new())
                }
                found => found,
            };
            (path_text(&path), found)
        });
        let mut looked = stream::iter(looked).buffer_unordered(VERSIONS_IN_FLIGHT);
        while let Some(found) = looked.next().await {
            match found {
                (path, Ok(mended)) => {
                    for (document, what) in mended {
                        let how = format!("the {document} was written again from memory");
                        note_repaired(self.node.shared(), path.clone(), what, &how, verify);
                    }
                }
                (path, Err(Problem::Broken { invariant, what })) => {
                    unmended.push(BrokenInvariant { path, invariant: invariant.to_owned(), what });
                }
                (path, Err(Problem::Away(what))) => {
                    verify.away = true;
                    verify.unchecked.push(Unrecoverable { path, what });
                }
            }
        }
        Some(())
    }

    /// Checks a version's documents, and writes bad ones again from what this daemon knows. Returns the names of those with what
    /// was wrong. The marker comes last: it says that the others are there.
    async fn look_at_proof(
        self,
        committed: &Checkpoint,
        known: Option<&Known>,
    ) -> Result<Vec<(&'static str, String)>, Problem> {
        let record = committed.record();
        let (version, attempt) = (record.version.clone(), record.attempt);
        let mut mended = Vec::new();
        let (marker, bad_marker) = match self.read_proof_marker(committed).await {
            Err(Problem::Broken { invariant, what }) => match known.map(|known| known.marker(record)) {
                Some(Ok(marker)) => (marker, Some((invariant, what))),
                _ => return Err(Problem::Broken { invariant, what }),
            },
            read => (read?, None),
        };
        let manifest = match self.read_manifest(&marker).await {
            Err(Problem::Broken { invariant, what }) => {
                self.mend_manifest(&marker, known)
                    .await
                    .map_err(|why| Problem::Broken { invariant, what: format!("{what}; {why}") })?;
                mended.push(("manifest", what));
                self.read_manifest(&marker).await?
            }
            read => read?,
        };
        let key = Key::Record { version: version.clone(), attempt }.to_string();
        match self.read_record(&key, manifest.manifest()).await {
            Err(Problem::Broken { invariant, what }) => {
                self.mend_record(&key, manifest.manifest())
                    .await
                    .map_err(|why| Problem::Broken { invariant, what: format!("{what}; {why}") })?;
                mended.push(("record", what));
                self.read_record(&key, manifest.manifest()).await?;
            }
            read => read?,
        }
        if let Some((invariant, what)) = bad_marker {
            self.mend_marker(&marker)
                .await
                .map_err(|why| Problem::Broken { invariant, what: format!("{what}; {why}") })?;
            mended.push(("marker", what));
            self.read_proof_marker(committed).await?;
        }
        Ok(mended)
    }

    async fn read_proof_marker(self, committed: &Checkpoint) -> Result<Marker, Problem> {
        let version = &committed.record().version;
        let stands = "a_committed_version_has_its_marker";
        let broken = |what| Problem::Broken { invariant: stands, what };
        let marker = match read_marker(&self.node.shared().drain, version).await {
            Ok(marker) => marker,
            Err(error) if error.kind() == tidemark_protocol::error::ErrorKind::Corrupt => {
                return Err(broken(error_text(&error)));
            }
            Err(error) => return Err(Problem::Away(error_text(&error))),
        };
        invariants::a_committed_version_has_its_marker(committed, marker.as_ref()).map_err(broken)?;
        let marker = marker.ok_or_else(|| broken("there is no marker".to_owned()))?;
        let key = Key::Committed { version: version.clone() }.to_string();
        invariants::a_commit_marker_stands_where_its_body_says(&marker, &key).map_err(|flaw| {
            Problem::Broken {
                invariant: "a_commit_marker_stands_where_its_body_says",
                what: error_text(&flaw),
            }
        })?;
        Ok(marker)
    }

    async fn read_record(self, key: &str, manifest: &Manifest) -> Result<(), Problem> {
        let listed = "a_manifest_holds_exactly_the_files_of_its_record";
        let broken = |what| Problem::Broken { invariant: listed, what };
        let bytes = self.read(key, listed).await?;
        let record = Record::parse(&bytes).map_err(|error| broken(error_text(&error)))?;
        invariants::a_manifest_holds_exactly_the_files_of_its_record(manifest, &record)
            .map_err(|flaw| broken(error_text(&flaw)))
    }

    async fn read_manifest(self, marker: &Marker) -> Result<ValidatedManifest, Problem> {
        let named = "a_commit_marker_names_a_manifest_that_hashes_to_its_name";
        let bytes = self.read(marker.manifest.as_deref().unwrap_or_default(), named).await?;
        invariants::a_commit_marker_names_a_manifest_that_hashes_to_its_name(marker, &bytes)
            .map_err(|error| Problem::Broken { invariant: named, what: error_text(&error) })
    }

    /// Writes the manifest again that the marker names: the hash says that it is the same.
    async fn mend_manifest(self, marker: &Marker, known: Option<&Known>) -> Result<(), String> {
        let (Some(known), Some(key)) = (known, &marker.manifest) else {
            return Err("this daemon does not know it".to_owned());
        };
        let (bytes, hash) = known.manifest.encode_named().map_err(|error| error_text(&error))?;
        if marker.manifest_hash != Some(hash) {
            return Err("the one that this daemon knows is another".to_owned());
        }
        self.may_mend().await?;
        said(write_document_again(&self.node.shared().drain, key, bytes).await)
    }

    /// Writes the record again as its manifest has it, which a hash vouches for.
    async fn mend_record(self, key: &str, manifest: &Manifest) -> Result<(), String> {
        let bytes = record_of(manifest).encode().map_err(|error| error_text(&error))?;
        self.may_mend().await?;
        said(write_document_again(&self.node.shared().drain, key, bytes).await)
    }

    async fn mend_marker(self, marker: &Marker) -> Result<(), String> {
        self.may_mend().await?;
        said(write_marker_again(&self.node.shared().drain, marker).await)
    }

    async fn may_mend(self) -> Result<(), String> {
        let may_write = self.node.ask(|engine| engine.rights.may_write()).await == Some(true);
        if may_write { Ok(()) } else { Err("this node writes nothing to Tier-3".to_owned()) }
    }

    async fn read(self, key: &str, invariant: &'static str) -> Result<Vec<u8>, Problem> {
        let limit = u64::try_from(MAX_DOCUMENT_BYTES).expect("a constant");
        match self.node.shared().drain.store.get(key, limit).await {
            Ok(Some(bytes)) => Ok(bytes.to_vec()),
            Ok(None) => Err(Problem::Broken { invariant, what: format!("{key} is not there") }),
            Err(error @ StoreError::Damaged { .. }) => {
                Err(Problem::Broken { invariant, what: error_text(&error) })
            }
            Err(error) => Err(Problem::Away(error_text(&error))),
        }
    }
}
