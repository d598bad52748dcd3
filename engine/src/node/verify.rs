//! Verifies copies on request: every host copy, and with `deep` every byte in Tier-3 and in other nodes' memory too.
//!
//! Owns: what is checked, writing bad objects again, and the sum of what was found. Does not own: healing a host copy (`scrub`),
//! reading another node's (`verify_peers`), the write itself (`save::again`), whether what was found counts yet (`given_up`).

use crate::chunk::decode;
use crate::node::Shared;
use crate::node::answer::Listed;
use crate::node::by_path::ByPath;
use crate::node::damage::BadCopies;
use crate::node::given_up::{Counts, Fate, Objects, StillCounts};
use crate::node::inventory::Inventory;
use crate::node::proof::Proofs;
use crate::node::run::{Engine, Node};
use crate::node::scrub::{HostFound, Scrub, Scrubbed, Target, Unseen, scrub};
use crate::node::verify_names::NamesAtRest;
use crate::node::verify_peers::{PeerCopy, PeerProblem, check_peers, from_a_peer};
use crate::node::verify_removed::{add_stored, removed_stored};
use crate::node::verify_scope::VerifyScope;
use crate::restore::fetch::FetchPlan;
use crate::save::again::write_again;
use crate::save::upload::SealedBytes;
use futures::stream;
use futures::stream::StreamExt;
use std::collections::BTreeSet;
use std::sync::Arc;
use tidemark_namespace::{FileState, ObjectCopy, SealPin};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::error::error_text;
use tidemark_protocol::report::{EventLevel, Progress, Unrecoverable, Verify, VerifyRepair, path_text};
use tidemark_store::StoreError;
use tokio::time::Instant;

/// Files checked at once: one hashes while another waits for Tier-3.
const FILES_IN_FLIGHT: usize = 4;

/// Files named that have no checksum yet: a person reads the first of them.
const UNSEALED_MAX: usize = 1000;

/// A file of the tree that has no checksum yet.
#[derive(Debug)]
pub(crate) struct Unsealed {
    pub(crate) path: String,
    pub(crate) size_bytes: u64,
    /// Whether the bytes are in this node's memory.
    pub(crate) host: bool,
    pub(crate) why: String,
}

/// Returns why a file has no checksum. `None`: it has one.
pub(crate) fn why_unsealed(state: &FileState) -> Option<String> {
    let why = match state {
        FileState::Open { writers } => format!("it has {writers} open writers"),
        FileState::Mapped => "it is mapped writable".to_owned(),
        FileState::Cut => "its writer ended without closing it".to_owned(),
        FileState::Closed => "it is closed, and about to be sealed".to_owned(),
        FileState::Sealed { .. } => return None,
    };
    Some(format!("{why}: it has no checksum yet"))
}

/// Returns the rows of a `verify` of `place` for files that it cannot check.
fn not_checked(place: &[u8], unsealed: Vec<Unsealed>) -> Vec<Unrecoverable> {
    let more = unsealed.len().saturating_sub(UNSEALED_MAX);
    let named = unsealed.into_iter().take(UNSEALED_MAX);
    let mut rows: Vec<_> = named.map(|file| Unrecoverable { path: file.path, what: file.why }).collect();
    if more > 0 {
        let what = format!("{more} more files have no checksum yet");
        rows.push(Unrecoverable { path: path_text(place), what });
    }
    rows
}

/// Findings about one file.
pub(crate) struct Found {
    target: Target,
    /// Why the host copy was withdrawn earlier.
    bad: Option<String>,
    /// Whether its objects and peer copies were read, not only asked for.
    deep: bool,
    host: Option<Scrubbed>,
    objects: Vec<(ObjectCopy, ObjectFound)>,
    peers: Vec<PeerCopy>,
}

/// Finding about one object.
enum ObjectFound {
    /// `read`: every byte was compared, not only the size.
    Good { read: bool },
    /// Bad or missing, and written again.
    Mended { what: String, from: String },
    /// Bad or missing, and still so.
    Bad(String),
    /// The object could not be read.
    Away(String),
    /// The version or file of the object was retired since the listing: the finding means nothing.
    GivenUp,
}

impl ObjectFound {
    /// Whether the object is good, and its bytes prove it.
    fn is_read(&self) -> bool {
        match self {
            Self::Good { read } => *read,
            Self::Mended { .. } => true,
            Self::Bad(_) | Self::Away(_) | Self::GivenUp => false,
        }
    }
}

/// Whether a file's objects and peer copies must be read. The caller may ask for that. If bytes of the file were bad before or are
/// now, the mere presence of a copy proves nothing.
fn reads_all(deep: bool, bad_before: bool, host: Option<&Scrubbed>) -> bool {
    deep || bad_before || host.is_some_and(Scrubbed::is_bad)
}

/// Adds what was found of one file to the sum.
fn add(verify: &mut Verify, found: &Found) {
    let path = found.target.path.clone();
    let mut wrong = Vec::new();
    let mut good = false;
    let (mut away, mut gone) = (None, None);
    if let Some(host) = &found.host {
        verify.copies += u64::from(!matches!(host.found, HostFound::Unseen(_)));
        match &host.found {
            HostFound::Good => good = true,
            HostFound::Healed { bad, from } => {
                good = true;
                verify.repaired.push(VerifyRepair {
                    path: path.clone(),
                    copy: "host".to_owned(),
                    what: bad.to_string(),
                    from: from.word().to_owned(),
                });
            }
            HostFound::Bad { bad, why } => wrong.push(format!("host: {bad}; {}", error_text(why))),
            // The other copies are what there is. Where none is, nothing is known: it may have been saved again.
            HostFound::Unseen(why @ Unseen::Gone) => gone = Some(format!("host: {why}")),
            HostFound::Unseen(why @ Unseen::Unreadable(_)) => {
                away = Some(format!("host: {}", error_text(why)));
            }
        }
    }
    for (_, object) in &found.objects {
        match object {
            ObjectFound::Good { .. } => {
                verify.copies += 1;
                good = true;
            }
            ObjectFound::Mended { what, from } => {
                verify.copies += 1;
                good = true;
                verify.repaired.push(VerifyRepair {
                    path: path.clone(),
                    copy: "object".to_owned(),
                    what: what.clone(),
                    from: from.clone(),
                });
            }
            ObjectFound::Bad(what) => {
                verify.bad_objects += 1;
                wrong.push(format!("object: {what}"));
            }
            ObjectFound::Away(why) => away = Some(format!("object: {why}")),
            ObjectFound::GivenUp => {}
        }
    }
    for peer in &found.peers {
        let node = &peer.node;
        match &peer.result {
            Ok(()) => {
                verify.copies += u64::from(found.deep);
                good = true;
            }
            Err(PeerProblem::Bad(why)) => wrong.push(format!("peer {node}: {why}")),
            Err(PeerProblem::Away(why)) => away = Some(format!("peer {node}: {why}")),
        }
    }
    verify.away |= away.is_some();
    let away = away.or_else(|| gone.filter(|_| !good));
    if !good && away.is_none() {
        let copy = if found.objects.is_empty() { "host" } else { "object" };
        wrong.extend(found.bad.iter().map(|bad| format!("{copy}: {bad}")));
        let what = if wrong.is_empty() { "no copy is known".to_owned() } else { wrong.join("; ") };
        verify.unrecoverable.push(Unrecoverable { path, what });
        return;
    }
    wrong.extend(away);
    if !wrong.is_empty() {
        verify.unchecked.push(Unrecoverable { path, what: wrong.join("; ") });
    }
}

/// Returns the row for a file that has no good copy. `None`: a copy is good, or may be.
fn lost(found: &Found) -> Option<Unrecoverable> {
    let mut alone = Verify::default();
    add(&mut alone, found);
    alone.unrecoverable.pop()
}

enum ObjectProblem {
    Bad(String),
    Away(String),
}

/// Says that Tier-3 has once more what it lacked, from what this daemon knows.
pub(super) fn note_repaired(shared: &Shared, path: String, what: String, how: &str, verify: &mut Verify) {
    tracing::warn!(path, what, how, "what Tier-3 lacked is there again");
    let said = format!("{what}; {how}");
    shared.events.add(shared.now_ns(), EventLevel::Warn, "repaired", Some(path.clone()), said);
    verify.repaired.push(VerifyRepair { path, copy: "object".to_owned(), what, from: "host".to_owned() });
}

impl Node {
    /// Checks the copies of everything at or below `place`, and the documents of the checkpoint in which it lies.
    ///
    /// - Host copies are read whole; objects are asked for their size.
    /// - With `deep`, or where bytes of the file were found bad, objects and other nodes' copies are read whole, too.
    /// - With `deep`, also checks what `undelete` would bring back of removed files outside checkpoints.
    /// - A bad host copy is replaced from another node or Tier-3, if a copy there is good.
    /// - A bad or missing object is written again, if memory, another node or another object has the bytes.
    /// - Files without a checksum are unchecked.
    ///
    /// Dropping the future stops it between two files.
    pub async fn verify(&self, place: Vec<u8>, deep: bool, progress: impl Fn(Progress)) -> Option<Verify> {
        let mut verify = Verify { deep, ..Verify::default() };
        let mut unmended = Vec::new();
        // Documents that name the bytes come first: without them no start finds the bytes, and what was lost together goes to
        // Tier-3 as one.
        NamesAtRest { node: self }.verify(&place, &mut verify, &mut unmended).await?;
        Proofs { node: self }.verify(place.clone(), &mut verify, &mut unmended).await?;
        verify.broken.extend(unmended.iter().cloned());
        let below = place.clone();
        let removed = if deep { removed_stored(self, &place, &mut verify).await? } else { Vec::new() };
        let (mut targets, unsealed, held) = self
            .ask(move |engine| {
                (
                    Inventory { engine }.targets_and_stored(&below),
                    VerifyScope { engine }.unsealed(&below),
                    engine.tier3_away.why_nothing_is_written(&engine.shared, &engine.rights),
                )
            })
            .await?;
        add_stored(&mut targets, removed);
        verify.unchecked.extend(not_checked(&place, unsealed));
        let total_files = u64::try_from(targets.len()).expect("a count fits 64 bits");
        let total_bytes = targets.iter().map(|target| target.size_bytes).sum();
        verify.files = total_files;
        let checkpoints: BTreeSet<_> = targets.iter().map(|target| target.checkpoint.clone()).collect();
        verify.checkpoints =
            u64::try_from(checkpoints.into_iter().flatten().count()).expect("a count fits 64 bits");
        let shared = self.shared();
        let held = held.as_deref();
        let looked = targets.into_iter().map(|listed| async move {
            let Listed { target, bad, suspects, .. } = listed;
            let host = if target.host { Some(scrub(shared, target.clone()).await) } else { None };
            let deep = reads_all(deep, bad.is_some(), host.as_ref());
            let objects = Objects { node: self }.check_objects(&target, &suspects, deep, held).await;
            let peers = check_peers(shared, &target, deep).await;
            Found { target, bad, deep, host, objects, peers }
        });
        let mut looked = stream::iter(looked).buffer_unordered(FILES_IN_FLIGHT);
        let mut done_files = 0;
        while let Some(found) = looked.next().await {
            done_files += 1;
            let now = Some(found.target.path.clone());
            match self.ask(move |engine| take_in(engine, found)).await? {
                Some(found) => {
                    verify.bytes += found.target.size_bytes;
                    add(&mut verify, &found);
                }
                // Neither good nor bad.
                None => verify.files -= 1,
            }
            progress(Progress { done_bytes: verify.bytes, total_bytes, done_files, total_files, now });
        }
        drop(looked);
        verify.unrecoverable.sort_by(|a, b| a.path.cmp(&b.path));
        verify.repaired.sort_by(|a, b| a.path.cmp(&b.path));
        verify.broken.sort_by(|a, b| a.path.cmp(&b.path));
        verify.unchecked.sort_by(|a, b| a.path.cmp(&b.path));
        let note = move |engine: &mut Engine| {
            let by_path = ByPath { shared: &engine.shared, ledger: &engine.ledger };
            engine.scrub.note_unmended(by_path, &place, unmended);
        };
        self.ask(note).await?;
        Some(verify)
    }
}

impl Objects<'_> {
    /// Tries once more, until `until`, to write objects again that are known to be bad and lie at or below `place`. Costs a read and a
    /// write of each known one. If Tier-3 does not answer, the rest is left as it is. Documents are for `verify`, which reads all of
    /// them.
    pub(super) async fn mend_known(self, place: &[u8], until: Option<Instant>) -> Option<()> {
        let mending = self.mend_all_known(place);
        match until {
            None => mending.await,
            // The rest stays known.
            Some(until) => tokio::time::timeout_at(until, mending).await.unwrap_or(Some(())),
        }
    }

    async fn mend_all_known(self, place: &[u8]) -> Option<()> {
        let below = place.to_vec();
        let (objects, held) = self
            .node
            .ask(move |engine| {
                (
                    BadCopies { engine }.known_bad(&below),
                    engine.tier3_away.why_nothing_is_written(&engine.shared, &engine.rights),
                )
            })
            .await?;
        for Listed { target, suspects, .. } in objects {
            let of = (target.file, target.seal);
            let objects = self.check_objects(&target, &suspects, false, held.as_deref()).await;
            let away = objects.iter().any(|(_, object)| matches!(object, ObjectFound::Away(_)));
            if objects.iter().any(|(_, object)| object.is_read()) {
                self.node.shared().restorer.losses.mend(of.0, of.1);
            }
            let found = Found { target, bad: None, deep: false, host: None, objects, peers: Vec::new() };
            let noted = self.node.ask(move |engine| {
                let (scrub, still_counts) = findings(engine);
                if let Some(found) = scrub.what_counts(still_counts, found) {
                    scrub.note_verified(still_counts.shared, &found);
                }
                engine.tier3_away.is_away()
            });
            // A write that failed says it by that.
            if noted.await? || away {
                break;
            }
        }
        Some(())
    }

    /// Checks every object that should hold the bytes, and writes those again that do not. `suspects`: keys found bad before, for
    /// which a matching size proves nothing. `held`: why nothing is written to Tier-3. Objects retired meanwhile are not written;
    /// they still count as bad where the tree shows them.
    async fn check_objects(
        self,
        target: &Target,
        suspects: &BTreeSet<String>,
        deep: bool,
        held: Option<&str>,
    ) -> Vec<(ObjectCopy, ObjectFound)> {
        let mut found = Vec::new();
        for object in target.objects() {
            let deep = deep || suspects.contains(&object.key);
            let result = match self.check_object(target, object, deep).await {
                Ok(()) => ObjectFound::Good { read: deep },
                Err(ObjectProblem::Bad(what)) => ObjectFound::Bad(what),
                Err(ObjectProblem::Away(why)) => ObjectFound::Away(why),
            };
            found.push((object.clone(), result));
        }
        let good = found.iter().find(|(_, result)| matches!(result, ObjectFound::Good { .. }));
        let good = good.map(|(object, _)| object.clone());
        for (object, result) in &mut found {
            let ObjectFound::Bad(what) = result else { continue };
            match self.fate((target.file, target.seal), &object.key).await {
                Fate::Counts => {}
                Fate::Missed { is_noted } if is_noted || good.is_none() => {
                    what.push_str("; its version was given up by another coordinator");
                    continue;
                }
                // Another object stands for the bytes.
                Fate::Missed { .. } | Fate::GivenUp => {
                    *result = ObjectFound::GivenUp;
                    continue;
                }
            }
            if let Some(why) = held {
                what.push_str(&format!("; this node writes nothing to Tier-3: {why}"));
                continue;
            }
            match self.mend(target, object, good.as_ref()).await {
                Ok(from) => *result = ObjectFound::Mended { what: std::mem::take(what), from },
                Err(why) => {
                    what.push_str("; ");
                    what.push_str(&why);
                }
            }
        }
        found
    }

    /// Writes an object again and reads it back. Gives where the good bytes came from: `host`, `object` or `peer NODE`.
    async fn mend(
        self,
        target: &Target,
        object: &ObjectCopy,
        good: Option<&ObjectCopy>,
    ) -> Result<String, String> {
        let shared = self.node.shared();
        let mut tried = Vec::new();
        // A copy that turns out bad on the way is not the last one.
        for source in ["host", "peer", "object"] {
            let (from, pin) = match source {
                "host" => match shared.namespace.seals().pin_seal(target.file, target.seal) {
                    Some(pin) => ("host".to_owned(), pin),
                    None => continue,
                },
                "peer" => match from_a_peer(shared, target).await {
                    Some((node, landing)) => {
                        (format!("peer {node}"), SealPin::of_landing(landing, target.size_bytes))
                    }
                    None => continue,
                },
                _ => match good {
                    Some(good) => match self.landed(target, good).await {
                        Ok(pin) => ("object".to_owned(), pin),
                        Err(why) => {
                            tried.push(why);
                            continue;
                        }
                    },
                    None => continue,
                },
            };
            let bytes = SealedBytes {
                path: target.path.clone(),
                pin: Arc::new(pin),
                chunks: Arc::clone(&target.chunks),
            };
            match write_again(&shared.drain, object, bytes).await {
                Ok(()) => {
                    return match self.check_object(target, object, true).await {
                        Ok(()) => Ok(from),
                        Err(ObjectProblem::Bad(what) | ObjectProblem::Away(what)) => {
                            Err(format!("it was written again from {from}, and reads back wrong: {what}"))
                        }
                    };
                }
                Err(error) => tried.push(error_text(&error)),
            }
        }
        if tried.is_empty() {
            tried.push("no good copy is left to write it again from".to_owned());
        }
        Err(tried.join("; "))
    }

    /// Returns the bytes of a good object in memory of their own.
    async fn landed(self, target: &Target, good: &ObjectCopy) -> Result<SealPin, String> {
        let shared = self.node.shared();
        let landing = shared
            .namespace
            .room()
            .backing_for_prefetch(target.size_bytes)
            .map_err(|error| format!("no memory to read {} into: {}", good.key, error_text(&error)))?;
        let plan = FetchPlan {
            path: target.path.clone(),
            key: good.key.clone(),
            size_bytes: target.size_bytes,
            chunks: Arc::clone(&target.chunks),
            layout: good.layout(),
        };
        let fetched = shared.restorer.fetch(plan, Arc::clone(&landing)).await;
        fetched.map_err(|error| error_text(&error))?;
        Ok(SealPin::of_landing(landing, target.size_bytes))
    }

    async fn check_object(
        self,
        target: &Target,
        object: &ObjectCopy,
        deep: bool,
    ) -> Result<(), ObjectProblem> {
        let store = &self.node.shared().drain.store;
        let away = |error: StoreError| match error {
            StoreError::NotFound { .. } | StoreError::Range { .. } | StoreError::Damaged { .. } => {
                ObjectProblem::Bad(error_text(&error))
            }
            error => ObjectProblem::Away(error_text(&error)),
        };
        let layout = Arc::new(object.layout());
        let object_bytes = layout.object_bytes();
        match store.head(&object.key).await.map_err(away)? {
            None => return Err(ObjectProblem::Bad(format!("{} is not there", object.key))),
            Some(head) if head.size_bytes != object_bytes => {
                let what = format!("{} has {} bytes, expected {object_bytes}", object.key, head.size_bytes);
                return Err(ObjectProblem::Bad(what));
            }
            Some(_) => {}
        }
        if !deep {
            return Ok(());
        }
        let mismatch =
            || self.node.shared().metrics.verify_mismatches.get_or_create(&[("copy", "object")]).inc();
        for chunk in 0..layout.chunks() {
            let bytes = store.get_range(&object.key, layout.object_range(chunk)).await.map_err(away)?;
            let layout = Arc::clone(&layout);
            let found = tokio::task::spawn_blocking(move || {
                decode::stored(&layout, chunk, bytes).map(|bytes| Crc64(tidemark_kernels::crc64(&bytes)))
            })
            .await
            .expect("hashing does not panic")
            .map_err(|why| {
                mismatch();
                ObjectProblem::Bad(format!("chunk {chunk} of {} is no encoded chunk: {why}", object.key))
            })?;
            let expected =
                target.chunks[usize::try_from(chunk).expect("a chunk index fits an address space")];
            if found != expected {
                mismatch();
                let what =
                    format!("chunk {chunk} of {} has checksum {found}, expected {expected}", object.key);
                return Err(ObjectProblem::Bad(what));
            }
        }
        Ok(())
    }
}

/// Borrows the memory of findings, beside what says whether one still counts.
fn findings(engine: &mut Engine) -> (&mut Scrub, StillCounts<'_>) {
    let Engine { shared, ledger, gc, scrub, .. } = engine;
    (scrub, StillCounts { shared, ledger, gc })
}

fn take_in(engine: &mut Engine, found: Found) -> Option<Found> {
    let (scrub, still_counts) = findings(engine);
    scrub.take_in(still_counts, found)
}

impl Scrub {
    /// Takes down what was found of a file.
    pub(crate) fn note_verified(&mut self, shared: &Shared, found: &Found) {
        if let Some(host) = &found.host {
            self.note_scrubbed(shared, host, Instant::now());
        }
        let (target, namespace) = (&found.target, Arc::clone(&shared.namespace));
        let mut stands = None;
        for (object, result) in &found.objects {
            match result {
                ObjectFound::Good { .. } => {
                    self.note_object_checked(shared, target, object, None);
                    stands = stands.or(Some(object));
                }
                ObjectFound::Mended { what, from } => {
                    self.note_object_checked(shared, target, object, None);
                    stands = stands.or(Some(object));
                    tracing::warn!(path = %target.path, what, from, "an object of Tier-3 was bad and has been written again");
                    let what = format!("{what}; the object was written again from {from}");
                    let (at, path) = (shared.now_ns(), Some(target.path.clone()));
                    shared.events.add(at, EventLevel::Warn, "repaired", path, what);
                }
                ObjectFound::Bad(what) => self.note_object_checked(shared, target, object, Some(what)),
                ObjectFound::Away(_) | ObjectFound::GivenUp => {}
            }
        }
        let bad = found.objects.iter().any(|(_, result)| matches!(result, ObjectFound::Bad(_)));
        match stands {
            Some(object) if bad || !namespace.hosts().has_object(target.file, target.seal) => {
                // False where the file has other bytes by now, or none of its names is in the tree.
                let _ = namespace.hosts().note_object(target.file, target.seal, object.clone());
            }
            // A bad object is no copy: the host copy must not be reclaimed for its sake.
            None if bad => namespace.hosts().forget_object(target.file, target.seal),
            Some(_) | None => {}
        }
    }
}

impl Scrub {
    /// Records the findings about a file and their consequences, and returns those that still count. Runs between two events of the
    /// loop, so that no retirement begins meanwhile.
    fn take_in(&mut self, still_counts: StillCounts<'_>, found: Found) -> Option<Found> {
        let found = self.what_counts(still_counts, found)?;
        let (file, seal) = (found.target.file, found.target.seal);
        match lost(&found) {
            Some(lost) => {
                still_counts.shared.restorer.losses.note(file, seal, format!("{}: {}", lost.path, lost.what))
            }
            None if found.objects.iter().any(|(_, object)| object.is_read()) => {
                still_counts.shared.restorer.losses.mend(file, seal);
            }
            None => {}
        }
        self.note_verified(still_counts.shared, &found);
        Some(found)
    }

    /// Returns those findings about a file that still count. Since the listing, retention, a person or the job may have retired
    /// some of its objects, or all. Earlier findings about the retired ones are forgotten.
    fn what_counts(&mut self, still_counts: StillCounts<'_>, mut found: Found) -> Option<Found> {
        let of = (found.target.file, found.target.seal);
        let listed = found.objects.len();
        let (objects, given_up) = found.objects.into_iter().partition::<Vec<_>, _>(|(object, result)| {
            !matches!(result, ObjectFound::GivenUp) && still_counts.counts(of, &object.key) != Counts::No
        });
        found.objects = objects;
        for (object, _) in given_up {
            self.bad_objects.remove(&(of.0, of.1, object.key));
        }
        if !found.objects.is_empty() {
            return Some(found);
        }
        // Another object, not examined yet, may stand for it by now. A good host copy says enough.
        let host = found.host.as_ref().map(|host| &host.found);
        let is_good = matches!(host, Some(HostFound::Good | HostFound::Healed { .. }));
        (still_counts.shared.is_held(of) && (listed == 0 || is_good)).then_some(found)
    }
}

#[cfg(test)]
#[path = "verify_test.rs"]
mod tests;
