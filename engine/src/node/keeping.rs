//! Requests that people make about a version: keep it, retire it, bring it back, or list what would go now.
//!
//! Owns: carrying these requests out. Does not own: what may go (`gc`, `protocol::retention`), who asked (the daemon).

use crate::node::book::Number;
use crate::node::recover::above;
use crate::node::run::{Engine, Node};
use crate::node::select::Wanted;
use crate::restore::locate;
use std::collections::BTreeSet;
use std::time::Duration;
use tidemark_namespace::{FsError, Listed};
use tidemark_protocol::documents::PinDocument;
use tidemark_protocol::error::error_text;
use tidemark_protocol::format::{Document, FORMAT};
use tidemark_protocol::key::{Key, Series, VersionId};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::recovery::Sight;
use tidemark_protocol::report::{
    ApiError, CheckpointRef, ErrorCode, EventLevel, Gc, Pin, Progress, Removal, Undelete, path_text,
};
use tidemark_store::{Created, StoreError};

/// Interval between two checks of how far a removal is.
const ASK_EVERY: Duration = Duration::from_millis(50);
/// How often the number of a pin is tried that another took first.
const PIN_TRIES: u32 = 8;

pub(crate) fn ending() -> ApiError {
    ApiError::new(ErrorCode::Unavailable, "the daemon is ending", "ask again when it runs")
}

fn away(error: &StoreError) -> ApiError {
    let what = format!("Tier-3 does not answer: {}", error_text(error));
    ApiError::new(ErrorCode::Unavailable, what, "`ckptctl status` shows since when")
}

/// Returns the error for a request that needs writes to Tier-3 while nothing is written there, for the reason `why`. `is_away`:
/// Tier-3 failed; otherwise it is still being recovered.
fn nothing_is_written(why: &str, is_away: bool) -> ApiError {
    let action = if is_away {
        "repair Tier-3, which is tried again by itself, then say it again"
    } else {
        "say it again when Tier-3 has been read; `ckptctl status` says if it is away"
    };
    ApiError::new(ErrorCode::Unavailable, format!("nothing is written to Tier-3 yet: {why}"), action)
}

/// Returns why a checkpoint is not removed although its names were to go. `None`: no name is left.
fn names_stay(path: &[u8], withdrawn: Result<usize, FsError>, left: usize) -> Option<ApiError> {
    let path = path_text(path);
    let (what, action) = match withdrawn {
        Err(error) => {
            (format!("{path} is not removed, names of it stay: {error}"), "`ckptctl rm` goes on with it")
        }
        Ok(_) if left > 0 => (
            format!("{path} is not removed: {left} of its names stay, other bytes have them by now"),
            "`rm` on the mount removes those",
        ),
        Ok(_) => return None,
    };
    Some(ApiError::new(ErrorCode::Failed, what, action))
}

/// The version that a person named.
pub(crate) struct Chosen {
    pub(crate) id: CheckpointId,
    pub(crate) number: Number,
    pub(crate) version: VersionId,
    pub(crate) reference: CheckpointRef,
}

impl Node {
    /// Pins the newest committed version of a checkpoint, or takes the pin away. When it returns, the change is durable in Tier-3.
    ///
    /// # Errors
    /// Fails when nothing of it is committed, when `wanted` names several, when Tier-3 is away, or when the daemon is ending.
    pub async fn pin(&self, wanted: Wanted, pinned: bool, by: String) -> Result<Pin, ApiError> {
        let chosen = self
            .ask(move |engine| engine.selection().newest_committed(&wanted))
            .await
            .ok_or_else(ending)??;
        let Chosen { id, number, version, reference } = chosen;
        let entry = (id, number);
        let series = Series::pins_of(&version);
        let set = |pinned: bool| {
            let entry = entry.clone();
            move |engine: &mut Engine| engine.gc.pin(entry, pinned)
        };
        let already = if pinned {
            // From now on it stays; the pin that says so for ever follows.
            let new = self.ask(set(true)).await.ok_or_else(ending)??;
            if new && let Err(error) = self.write_pin(&series, true, by).await {
                self.ask(set(false)).await.ok_or_else(ending)??;
                return Err(error);
            }
            !new
        } else {
            self.write_pin(&series, false, by).await?;
            !self.ask(set(false)).await.ok_or_else(ending)??
        };
        Ok(Pin { checkpoint: reference, pinned, already })
    }

    /// Refuses a request that must be written to a Tier-3 that is not recovered yet.
    async fn needs_tier3(&self) -> Result<(), ApiError> {
        // If another daemon fences this one, the answers say so.
        let waits = |engine: &mut Engine| {
            let why = engine
                .tier3_away
                .why_nothing_is_written(&engine.shared, &engine.rights)
                .filter(|_| engine.rights.fenced.is_none())?;
            Some(nothing_is_written(&why, engine.tier3_away.trouble(&engine.shared).is_some()))
        };
        self.ask(waits).await.ok_or_else(ending)?.map_or(Ok(()), Err)
    }

    async fn write_pin(&self, series: &Series, pinned: bool, by: String) -> Result<(), ApiError> {
        let drain = &self.shared().drain;
        let document = PinDocument { format: FORMAT, pinned, by, at_ns: self.shared().now_ns() };
        let bytes = document
            .encode()
            .map_err(|error| ApiError::new(ErrorCode::Usage, error_text(&error), "give a shorter name"))?;
        for _ in 0..PIN_TRIES {
            let (highest, _) = locate::newest::<PinDocument>(&drain.store, series, &mut Vec::new())
                .await
                .map_err(|error| away(&error))?;
            let key = Key::numbered(series.clone(), highest + 1).to_string();
            match drain.store.create(&key, bytes.clone().into()).await {
                Ok(Created::Created) => return Ok(()),
                // Another one's pin has the number, or this one's answer was lost: the next number says it again.
                Ok(Created::AlreadyExists) => {}
                Err(error) if error.is_doubtful() => {}
                Err(error) => return Err(away(&error)),
            }
        }
        let what = format!("the pin was not written in {PIN_TRIES} tries");
        Err(ApiError::new(ErrorCode::Unavailable, what, "`ckptctl status` shows how Tier-3 is"))
    }

    /// Lists what retention lets go of. Without `dry_run`, returns when that is gone.
    ///
    /// # Errors
    /// Fails when the daemon is ending or has not recovered Tier-3 yet. Removals that Tier-3 does not take are no error: the answer
    /// lists them.
    pub async fn gc(&self, dry_run: bool, tell: impl Fn(Progress)) -> Result<Gc, ApiError> {
        if !dry_run {
            self.needs_tier3().await?;
        }
        let mut rows = self.ask(|engine| engine.retention().gc_rows()).await.ok_or_else(ending)?;
        let all = rows.iter().filter(|row| row.given_up).count() as u64;
        let (mut left, mut trouble) = (all, None);
        if !dry_run {
            self.ask(|engine: &mut Engine| engine.gc.collect_afresh()).await.ok_or_else(ending)?;
            (left, trouble) = self.until_gone(None, all, tell).await?;
        }
        let (loose, loose_left, loose_trouble) = self.sift(dry_run).await?;
        rows.extend(loose);
        Ok(Gc { dry_run, rows, left: left + loose_left, trouble: trouble.or(loose_trouble) })
    }

    /// Removes a checkpoint: its names from the tree, its committed versions from Tier-3.
    ///
    /// # Errors
    /// Fails when there is none, when `wanted` names several, or when the checkpoint has to stay: then nothing was done. Fails also when
    /// names of a damaged one stay, when the daemon is ending, or when it has not recovered Tier-3 yet. The error says why.
    pub async fn remove(&self, wanted: Wanted, tell: impl Fn(Progress)) -> Result<Removal, ApiError> {
        self.needs_tier3().await?;
        let forgotten = wanted.clone();
        if let Some(path) =
            self.ask(move |engine| engine.forget_unreadable(&forgotten)).await.ok_or_else(ending)??
        {
            return Ok(Removal { path: path_text(&path), versions: 0, left: 0, trouble: None });
        }
        if let Some(removal) = self.remove_loose(&wanted).await? {
            return Ok(removal);
        }
        let begun = self.ask(move |engine| {
            let Chosen { id, .. } = engine.selection().newest_committed(&wanted)?;
            let path = engine.ledger.books[&id].path();
            let refused = |why: String| {
                let what = format!("{} is not removed: {why}", path_text(&path));
                ApiError::new(ErrorCode::Failed, what, "`ckptctl gc --dry-run` shows why versions stay")
            };
            let numbers = engine.retiring().remove(&id).map_err(refused)?;
            Ok::<_, ApiError>((id, numbers, path))
        });
        let (id, numbers, path) = begun.await.ok_or_else(ending)??;
        let all = numbers.len() as u64;
        let (left, trouble) = self.until_gone(Some((id, numbers)), all, tell).await?;
        Ok(Removal { path: path_text(&path), versions: all - left, left, trouble })
    }

    /// Looks again and again, until none of `all` versions is left to go or nothing more happens by itself soon: how many
    /// are left then, and why.
    async fn until_gone(
        &self,
        wanted: Option<(CheckpointId, Vec<Number>)>,
        all: u64,
        tell: impl Fn(Progress),
    ) -> Result<(u64, Option<String>), ApiError> {
        loop {
            let these = wanted.clone();
            let look = move |engine: &mut Engine| engine.retiring().collect_now(these.as_ref());
            let (left, trouble) = self.ask(look).await.ok_or_else(ending)?;
            if left == 0 || trouble.is_some() {
                return Ok((left, trouble));
            }
            tell(Progress { done_files: all.saturating_sub(left), total_files: all, ..Progress::default() });
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// Puts the names of a removed checkpoint's newest committed version back into the tree, or those of them that were removed.
    /// Opening a file fetches its bytes. If the checkpoint is torn and hidden, its files come back as they are.
    ///
    /// # Errors
    /// Fails when nothing of it is hidden or committed any more, when `wanted` names several, when another entry has the name, or
    /// when the daemon is ending.
    pub async fn undelete(&self, wanted: Wanted) -> Result<Undelete, ApiError> {
        if let Some(undelete) = self.undelete_loose(&wanted).await? {
            return Ok(undelete);
        }
        self.ask(move |engine| engine.undelete(&wanted)).await.ok_or_else(ending)?
    }
}

impl Engine {
    /// Takes the names of an unreadable checkpoint out of the tree and returns its path: Tier-3 does not say what was committed.
    /// From now on it counts as removed. Nothing of it is deleted in Tier-3, since no node knows what it is. `None`: it is no such
    /// checkpoint.
    ///
    /// # Errors
    /// Fails when `wanted` names several, or when some of the names stay; the error says why.
    fn forget_unreadable(&mut self, wanted: &Wanted) -> Result<Option<Vec<u8>>, ApiError> {
        let found = self.selection().find(wanted)?.filter(|book| book.committed().is_none());
        let Some((book, (_, version))) = found.and_then(|book| Some((book, book.unreadable()?))) else {
            return Ok(None);
        };
        let (id, path) = (book.id.clone(), book.path());
        let files = &version.record().files;
        let listed: Vec<_> = files
            .iter()
            .map(|entry| Listed { path: &entry.path, file: entry.file, seal: entry.seal, key: "" })
            .collect();
        let above =
            files.iter().flat_map(|entry| std::iter::successors(entry.path.parent(), RelPath::parent));
        let inside = |above: &RelPath| above.as_bytes().starts_with(&path);
        let directories: BTreeSet<RelPath> = above.filter(inside).collect();
        let directories: Vec<_> = directories.into_iter().collect();
        let withdrawn = self.shared.withdraw(&listed, &directories);
        let is_there =
            |listed: &&Listed<'_>| self.shared.namespace.nodes().node_at(listed.path.as_bytes()).is_some();
        let left = listed.iter().filter(is_there).count();
        if let Some(refusal) = names_stay(&path, withdrawn, left) {
            return Err(refusal);
        }
        self.gc.is_shown_again(&id);
        self.ledger.tree_changed = true;
        let what = "it was removed; what Tier-3 holds of it stays there".to_owned();
        self.shared.event_of(EventLevel::Info, "removed", &id, what);
        Ok(Some(path))
    }

    fn undelete(&mut self, wanted: &Wanted) -> Result<Undelete, ApiError> {
        let refusal = |what: String, action: &str| ApiError::new(ErrorCode::Failed, what, action);
        let refused = |what, action| Err(refusal(what, action));
        let named = self.selection().path_out_of_sight(wanted)?.map(Wanted::Path);
        if let Some(Wanted::Path(path)) = &named
            && let Some(shown) = self.shielding().show_torn(path)
        {
            let again = "rename what has the name, then say it again";
            let (reference, files) = shown.map_err(|why| refusal(why, again))?;
            return Ok(Undelete { checkpoint: reference, files: files as u64 });
        }
        let Chosen { id, number, reference, .. } =
            self.selection().newest_committed(named.as_ref().unwrap_or(wanted))?;
        let path = self.ledger.books[&id].path();
        let book = &self.ledger.books[&id];
        let sight = self.selection().sight_of(book, number, self.books().version(&id, number));
        let has_name = self.shared.namespace.nodes().node_at(&path).is_some() || book.candidate.is_some();
        if has_name && !matches!(sight, Sight::InPart { .. }) {
            let what = format!("{} is in the tree", path_text(&path));
            return refused(what, "remove or rename what has the name, then say it again");
        }
        if let Some((newer, _)) = above(&self.ledger.books[&id], Some(number)).last() {
            let what = format!("version {} of {} is not committed yet", newer.1, path_text(&path));
            return refused(what, "`ckptctl flush --wait` waits for it");
        }
        self.gc.check_stays(&(id.clone(), number))?;
        if self.retention().lives_elsewhere(self.books().version(&id, number)) {
            let what = format!("a file of {} is in the tree under another name, or open", path_text(&path));
            return refused(what, "remove or close it, then say it again");
        }
        self.gc.unwish(&id);
        let (files, back) = self.shielding().put_back(&id, number);
        if back < files {
            let what = format!("{back} of the {files} names of {} could be put back", path_text(&path));
            return refused(
                what,
                "the log says why; make room or free the names, remove what came back, say it again",
            );
        }
        let what = format!("version {} is in the tree again, {files} files", number.1);
        self.shared.event_of(EventLevel::Info, "undeleted", &id, what);
        Ok(Undelete { checkpoint: reference, files: files as u64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_tier3_that_failed_is_to_be_repaired() {
        for (is_away, word) in [(true, "repair Tier-3"), (false, "has been read")] {
            let refusal = nothing_is_written("why", is_away);
            assert_eq!(refusal.code, ErrorCode::Unavailable);
            assert!(refusal.what.contains("why") && refusal.action.contains(word), "{refusal:?}");
            assert_eq!(refusal.action.contains("repair"), is_away, "{refusal:?}");
        }
    }

    #[test]
    fn a_checkpoint_is_not_removed_while_a_name_of_it_stays() {
        assert_eq!(names_stay(b"run/step1.pt", Ok(2), 0), None);
        assert_eq!(names_stay(b"run/step1.pt", Ok(0), 0), None, "nothing of it was in the tree");
        for (withdrawn, left) in [(Err(FsError::Io), 2), (Err(FsError::Io), 0), (Ok(1), 1)] {
            let refusal = names_stay(b"run/step1.pt", withdrawn, left).unwrap();
            assert_eq!(refusal.code, ErrorCode::Failed);
            assert!(refusal.what.starts_with("run/step1.pt is not removed"), "{refusal:?}");
        }
    }
}
