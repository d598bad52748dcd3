//! Verifies copies on request: every host copy, and with `deep` every byte in Tier-3 and in other nodes' memory too.
//!
//! Owns: what is checked, and the sum of what was found. Does not own: healing a host copy (`scrub`), reading another node's
//! (`verify_peers`).

use crate::namespace::ObjectCopy;
use crate::node::run::{Node, error_text};
use crate::node::scrub::{Scrubbed, Target, scrub};
use crate::node::verify_peers::{PeerCopy, PeerProblem, check_peers};
use crate::restore::decode;
use crate::store::StoreError;
use futures::stream::{self, StreamExt};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::report::{Progress, Unrecoverable, Verify, VerifyRepair};

/// Files checked at once: one hashes while another waits for Tier-3.
const FILES_IN_FLIGHT: usize = 4;

/// What was found of one file.
struct Found {
    target: Target,
    /// Why the host copy was given up earlier.
    bad: Option<String>,
    host: Option<Scrubbed>,
    object: Option<Result<(), String>>,
    object_bad: bool,
    peers: Vec<PeerCopy>,
}

impl Node {
    /// Checks the copies of everything at or below `place`. Host copies are read whole; objects are asked for their
    /// size, and with `deep` they and other nodes' copies are read whole. A bad host copy is replaced from Tier-3 where that copy is good.
    ///
    /// Dropping the future stops it between two files.
    pub async fn verify(&self, place: Vec<u8>, deep: bool, progress: impl Fn(Progress)) -> Option<Verify> {
        let below = place.clone();
        let targets = self.ask(move |engine| engine.targets(&below)).await?;
        let total_files = u64::try_from(targets.len()).expect("a count fits 64 bits");
        let total_bytes = targets.iter().map(|target| target.size_bytes).sum();
        let mut verify = Verify { deep, files: total_files, ..Verify::default() };
        let checkpoints: std::collections::BTreeSet<_> =
            targets.iter().map(|target| target.checkpoint.clone()).collect();
        verify.checkpoints =
            u64::try_from(checkpoints.into_iter().flatten().count()).expect("a count fits 64 bits");
        let shared = self.shared();
        let looked = targets.into_iter().map(|listed| async move {
            let (target, bad) = (listed.target, listed.bad);
            let host = if target.host { Some(scrub(shared, target.clone()).await) } else { None };
            let (object, object_bad) = match &target.object {
                Some(object) => match check_object(self, &target, object, deep).await {
                    Ok(()) => (Some(Ok(())), false),
                    Err(ObjectProblem::Bad(why)) => (Some(Err(why)), true),
                    Err(ObjectProblem::Away(why)) => (Some(Err(why)), false),
                },
                None => (None, false),
            };
            let peers = check_peers(shared, &target, deep).await;
            Found { target, bad, host, object, object_bad, peers }
        });
        let mut looked = stream::iter(looked).buffer_unordered(FILES_IN_FLIGHT);
        let mut done_files = 0;
        while let Some(found) = looked.next().await {
            done_files += 1;
            verify.bytes += found.target.size_bytes;
            let now = Some(found.target.path.clone());
            let lost_before = verify.unrecoverable.len();
            add(&mut verify, &found);
            let of = (found.target.file, found.target.seal);
            match verify.unrecoverable.get(lost_before) {
                Some(lost) => shared.losses.note(of.0, of.1, format!("{}: {}", lost.path, lost.what)),
                None if deep && matches!(found.object, Some(Ok(()))) => shared.losses.mend(of.0, of.1),
                None => {}
            }
            if let Some(host) = found.host {
                self.ask(move |engine| engine.note_scrubbed(&host)).await?;
            }
            if found.object_bad {
                let (file, seal) = (found.target.file, found.target.seal);
                // A bad object is no copy: the host copy must not be reclaimed for its sake.
                if found.target.host {
                    shared.namespace.forget_object(file, seal);
                }
            }
            progress(Progress { done_bytes: verify.bytes, total_bytes, done_files, total_files, now });
        }
        verify.unrecoverable.sort_by(|a, b| a.path.cmp(&b.path));
        verify.repaired.sort_by(|a, b| a.path.cmp(&b.path));
        self.verify_proofs(place, &mut verify).await?;
        Some(verify)
    }
}

fn add(verify: &mut Verify, found: &Found) {
    let path = found.target.path.clone();
    let mut wrong = Vec::new();
    let mut good = false;
    let mut away = None;
    if let Some(host) = &found.host {
        verify.copies += 1;
        match (&host.bad, &host.healed) {
            (None, _) => good = true,
            (Some(bad), Some(Ok(())) | None) => {
                good = true;
                verify.repaired.push(VerifyRepair {
                    path: path.clone(),
                    copy: "host".to_owned(),
                    what: bad.to_string(),
                    from: "object".to_owned(),
                });
            }
            (Some(bad), Some(Err(error))) => wrong.push(format!("host: {bad}; {}", error_text(error))),
        }
    }
    match &found.object {
        Some(Ok(())) => {
            verify.copies += 1;
            // That it is there says nothing of one that was found damaged.
            good |= verify.deep || found.bad.is_none();
        }
        Some(Err(why)) if found.object_bad => wrong.push(format!("object: {why}")),
        Some(Err(why)) => away = Some(format!("object: {why}")),
        None => {}
    }
    for peer in &found.peers {
        let node = &peer.node;
        match &peer.result {
            Ok(()) => {
                verify.copies += u64::from(verify.deep);
                good |= verify.deep || found.bad.is_none();
            }
            Err(PeerProblem::Bad(why)) => wrong.push(format!("peer {node}: {why}")),
            Err(PeerProblem::Away(why)) => away = Some(format!("peer {node}: {why}")),
        }
    }
    if !good && away.is_none() {
        let copy = if found.target.object.is_some() { "object" } else { "host" };
        wrong.extend(found.bad.iter().map(|bad| format!("{copy}: {bad}")));
        let what = if wrong.is_empty() { "no copy is known".to_owned() } else { wrong.join("; ") };
        verify.unrecoverable.push(Unrecoverable { path, what });
    } else if let Some(what) = away {
        verify.unchecked.push(Unrecoverable { path, what });
    } else if !wrong.is_empty() {
        verify.unchecked.push(Unrecoverable { path, what: wrong.join("; ") });
    }
}

enum ObjectProblem {
    Bad(String),
    Away(String),
}

async fn check_object(
    node: &Node,
    target: &Target,
    object: &ObjectCopy,
    deep: bool,
) -> Result<(), ObjectProblem> {
    let store = &node.shared().drain.store;
    let away = |error: StoreError| match error {
        StoreError::NotFound { .. } | StoreError::Range { .. } | StoreError::Damaged { .. } => {
            ObjectProblem::Bad(error_text(&error))
        }
        error => ObjectProblem::Away(error_text(&error)),
    };
    let layout = std::sync::Arc::new(object.layout());
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
    let mismatch = || node.shared().metrics.verify_mismatches.get_or_create(&[("copy", "object")]).inc();
    for chunk in 0..layout.chunks() {
        let bytes = store.get_range(&object.key, layout.object_range(chunk)).await.map_err(away)?;
        let layout = std::sync::Arc::clone(&layout);
        let found = tokio::task::spawn_blocking(move || {
            decode::stored(&layout, chunk, bytes).map(|bytes| Crc64(tidemark_kernels::crc64(&bytes)))
        })
        .await
        .expect("hashing does not panic")
        .map_err(|why| {
            mismatch();
            ObjectProblem::Bad(format!("chunk {chunk} of {} is no encoded chunk: {why}", object.key))
        })?;
        let expected = target.chunks[usize::try_from(chunk).expect("a chunk index fits an address space")];
        if found != expected {
            mismatch();
            let what = format!("chunk {chunk} of {} has checksum {found}, expected {expected}", object.key);
            return Err(ObjectProblem::Bad(what));
        }
    }
    Ok(())
}
