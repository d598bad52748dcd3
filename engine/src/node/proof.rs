//! Looks again at what committed versions rest on in Tier-3: the marker, the manifest, the record.
//!
//! Owns: which documents are read, and which invariant a finding breaks. Does not own: the invariants (protocol), the
//! bytes of files (`verify`).

use crate::node::flush::covers;
use crate::node::run::{Engine, Node, error_text};
use crate::save::commit::read_marker;
use crate::store::StoreError;
use futures::stream::{self, StreamExt};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::format::{Document, MAX_DOCUMENT_BYTES};
use tidemark_protocol::invariants;
use tidemark_protocol::key::Key;
use tidemark_protocol::record::Record;
use tidemark_protocol::report::{BrokenInvariant, Unrecoverable, Verify};

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
        let committed = self.ask(move |engine| engine.committed_below(&place)).await?;
        let looked = committed.into_iter().map(|(path, version)| async move {
            let problem = self.look_at_proof(&version).await.err()?;
            Some((String::from_utf8_lossy(&path).into_owned(), problem))
        });
        let mut looked = stream::iter(looked).buffer_unordered(VERSIONS_IN_FLIGHT);
        while let Some(found) = looked.next().await {
            match found {
                None => {}
                Some((path, Problem::Broken { invariant, what })) => {
                    verify.broken.push(BrokenInvariant { path, invariant: invariant.to_owned(), what });
                }
                Some((path, Problem::Away(what))) => verify.unchecked.push(Unrecoverable { path, what }),
            }
        }
        verify.broken.sort_by(|a, b| a.path.cmp(&b.path));
        verify.unchecked.sort_by(|a, b| a.path.cmp(&b.path));
        Some(())
    }

    async fn look_at_proof(&self, committed: &Checkpoint) -> Result<(), Problem> {
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
        let Some(marker) = marker else { return Ok(()) };
        let key = Key::Committed { version: version.clone() }.to_string();
        invariants::a_commit_marker_stands_where_its_body_says(&marker, &key).map_err(|flaw| {
            Problem::Broken {
                invariant: "a_commit_marker_stands_where_its_body_says",
                what: error_text(&flaw),
            }
        })?;
        let named = "a_commit_marker_names_a_manifest_that_hashes_to_its_name";
        let bytes = self.read(marker.manifest.as_deref().unwrap_or_default(), named).await?;
        let manifest = invariants::a_commit_marker_names_a_manifest_that_hashes_to_its_name(&marker, &bytes)
            .map_err(|error| Problem::Broken { invariant: named, what: error_text(&error) })?;
        let listed = "a_manifest_holds_exactly_the_files_of_its_record";
        let broken = |what| Problem::Broken { invariant: listed, what };
        let bytes = self.read(&Key::Record { version, attempt }.to_string(), listed).await?;
        let record = Record::parse(&bytes).map_err(|error| broken(error_text(&error)))?;
        invariants::a_manifest_holds_exactly_the_files_of_its_record(manifest.manifest(), &record)
            .map_err(|flaw| broken(error_text(&flaw)))
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
    fn committed_below(&self, place: &[u8]) -> Vec<(Vec<u8>, Checkpoint)> {
        let books = self.ledger.books.values().filter(|book| covers(place, &book.path()));
        let committed = books.flat_map(|book| {
            let versions = book.checkpoints().filter(|version| version.is_committed());
            versions.map(|version| (book.path(), version.clone()))
        });
        committed.collect()
    }
}
