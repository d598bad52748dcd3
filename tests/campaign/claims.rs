//! The auditor's book: the promises about each name, and whether they are kept.
//!
//! Owns: the states in which a name may be, now and after a restart with empty memory. Does not own: the reading (`compare`), anything of
//! the daemon.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use tidemark_tests::campaign::event::{By, Event, Holds};

use crate::compare::{compare, is_there, look};

/// Suffix of temporary names. Such a name is part of no checkpoint, so nothing is promised of it: it reaches Tier-3 only with a
/// committed one.
const TEMPORARY: &str = ".tmp";
/// Broken promises that are shown, enough to see what is wrong.
const BROKEN_SHOWN: usize = 20;

/// The states that a name may have.
#[derive(Clone, Debug)]
struct Claim {
    is: Holds,
    by: By,
    /// The change that had begun at the trainer's last event. `Some(None)`: a change to any content.
    will: Option<Option<Holds>>,
    /// During a change to any content: the result of a close or removal that had begun too.
    last: Option<Holds>,
}

/// The content that a flush called committed, and the contents promised for the name since then, whose commit may be done or not.
#[derive(Clone, Debug)]
struct Durable {
    holds: Holds,
    since: Vec<Holds>,
    /// Whether a directory above it was renamed since. If so, no promise says which path it has after a restart.
    moved: bool,
}

/// Promises of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Count {
    /// Calls that returned.
    pub(crate) recorded: u64,
    /// How often a standing promise was compared, byte for byte.
    pub(crate) compared: u64,
    pub(crate) kept: u64,
}

/// Promises by the call that made them, and those of `flush --wait` apart.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Promised {
    pub(crate) by: BTreeMap<By, Count>,
    pub(crate) committed: Count,
    pub(crate) compared_bytes: u64,
}

/// All names in trainers' events.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    standing: BTreeMap<String, Claim>,
    /// Renames that had begun and not returned.
    moving: Vec<(String, String)>,
    durable: BTreeMap<String, Durable>,
    pub(crate) promised: Promised,
}

impl Claims {
    /// Records a trainer's event.
    pub(crate) fn apply(&mut self, event: Event) {
        match event {
            Event::Will { path, to } => {
                let claim = self.claim(path);
                // A file whose close or removal has begun while it is written may still hold anything.
                if claim.will == Some(None) {
                    claim.last = to;
                } else {
                    claim.will = Some(to);
                }
            }
            Event::Is { path, holds, by } => {
                self.promised.by.entry(by).or_default().recorded += 1;
                self.changed(&path, &holds);
                *self.claim(path) = Claim { is: holds, by, will: None, last: None };
            }
            Event::WillMove { from, to } => self.moving.push((from, to)),
            Event::Moved { from, to } => {
                self.promised.by.entry(By::Rename).or_default().recorded += 1;
                self.moved(&from, &to);
            }
            // Events about no name.
            Event::Paused { .. } | Event::Failed { .. } => {}
        }
    }

    fn claim(&mut self, path: String) -> &mut Claim {
        // Trainers work in new folders, so a name without an event is not there.
        self.standing.entry(path).or_insert(Claim {
            is: Holds::Absent,
            by: By::Unlink,
            will: None,
            last: None,
        })
    }

    /// Records that a name has other content than when it was last committed.
    fn changed(&mut self, path: &str, holds: &Holds) {
        if let Some(durable) = self.durable.get_mut(path) {
            durable.since.push(holds.clone());
        }
    }

    fn moved(&mut self, from: &str, to: &str) {
        self.moving.retain(|(begun, _)| begun != from);
        let below: Vec<String> = self.standing.keys().filter(|path| covers(from, path)).cloned().collect();
        for path in below {
            let claim = self.standing.remove(&path).expect("it was listed a moment ago");
            let new = format!("{to}{}", &path[from.len()..]);
            let absent = claim.is == Holds::Absent;
            self.changed(&path, &Holds::Absent);
            self.changed(&new, &claim.is);
            if path != from {
                for name in [&path, &new] {
                    self.durable.entry(name.clone()).and_modify(|durable| durable.moved = true);
                }
            }
            if !absent {
                self.standing.insert(new, Claim { by: By::Rename, ..claim });
            }
        }
        let gone = Claim { is: Holds::Absent, by: By::Rename, will: None, last: None };
        self.standing.insert(from.to_owned(), gone);
    }

    /// Compares every promise with the mount, while no trainer changes anything. If a dead trainer left a name half changed, records the
    /// content that the name has, which must then stay the same.
    pub(crate) fn audit(&mut self, mount: &Path) -> Result<(), String> {
        let mut broken = vec![];
        for (from, to) in std::mem::take(&mut self.moving) {
            match (is_there(&mount.join(&from)), is_there(&mount.join(&to))) {
                (Ok(true), _) => {}
                (Ok(false), Ok(true)) => self.moved(&from, &to),
                (before, after) => broken.push(format!(
                    "{from} was being renamed to {to} and is at neither name ({before:?}, {after:?})"
                )),
            }
        }
        let mut found = vec![];
        for (path, claim) in &self.standing {
            let place = mount.join(path);
            let mut kept = compare(&place, &claim.is, &mut self.promised.compared_bytes);
            match &claim.will {
                None => {
                    let count = self.promised.by.entry(claim.by).or_default();
                    count.compared += 1;
                    count.kept += u64::from(kept.is_ok());
                }
                Some(to) => {
                    if let (Err(_), Some(to)) = (&kept, to) {
                        kept = compare(&place, to, &mut self.promised.compared_bytes)
                            .map_err(|what| format!("{what}; nor is it what it was, {:?}", claim.is));
                    } else if to.is_none() {
                        kept = Ok(());
                    }
                    match look(&place) {
                        Ok(holds) => found.push((path.clone(), holds)),
                        Err(error) => kept = Err(format!("cannot be read: {error}")),
                    }
                }
            }
            if let Err(what) = kept {
                broken.push(format!("{path} (promised by {:?}): {what}", claim.by));
            }
        }
        for (path, holds) in found {
            self.changed(&path, &holds);
            self.standing.insert(path, Claim { is: holds, by: By::Found, will: None, last: None });
        }
        told(broken)
    }

    /// Records that `flush --wait` ended: every standing name is committed, except those that the flush named as pending. The flush may
    /// name only paths with a file that no process closed. Otherwise it could excuse everything.
    pub(crate) fn committed(&mut self, pending: &[String]) -> Result<(), String> {
        let unfinished: Vec<&String> = self
            .standing
            .iter()
            .filter(|(_, claim)| claim.by == By::Found || matches!(claim.is, Holds::Begins(_)))
            .map(|(path, _)| path)
            .collect();
        let excuses = |pending: &&String| !unfinished.iter().any(|path| covers(pending, path));
        let excused: Vec<String> = pending.iter().filter(excuses).cloned().collect();
        let excepted = |path: &str| pending.iter().any(|pending| covers(pending, path));
        for (path, claim) in &self.standing {
            // A file that was synced but not closed is not whole. The mount serves it as it is, and no flush calls it committed.
            let whole = !matches!(claim.is, Holds::Begins(_)) && claim.will.is_none();
            // An absent name is recorded too, because `flush` waits until its removal is committed.
            if !whole || claim.by == By::Found || path.ends_with(TEMPORARY) || excepted(path) {
                self.durable.remove(path);
                continue;
            }
            self.promised.committed.recorded += 1;
            let durable = Durable { holds: claim.is.clone(), since: vec![], moved: false };
            self.durable.insert(path.clone(), durable);
        }
        told(
            excused
                .iter()
                .map(|path| format!("{path} is not committed, and every file was closed"))
                .collect(),
        )
    }

    /// Checks the mount after a restart with empty memory. Each committed name must have its content of then, or a content that was
    /// promised since. Drops all other claims.
    pub(crate) fn audit_restart(&mut self, mount: &Path) -> Result<(), String> {
        self.begun_may_be_done();
        let mut broken = vec![];
        for (path, durable) in std::mem::take(&mut self.durable) {
            if durable.moved {
                continue;
            }
            let place = mount.join(&path);
            let mut kept = compare(&place, &durable.holds, &mut self.promised.compared_bytes);
            for holds in &durable.since {
                if kept.is_err() {
                    kept = compare(&place, holds, &mut self.promised.compared_bytes).or(kept);
                }
            }
            self.promised.committed.compared += 1;
            self.promised.committed.kept += u64::from(kept.is_ok());
            if let Err(what) = kept {
                let since = durable.since.len();
                broken.push(format!("{path} (committed; promised {since} times since): {what}"));
            }
        }
        self.standing.clear();
        self.moving.clear();
        told(broken)
    }

    /// Allows begun changes to be done. A daemon may outlive a trainer, and commit a change whose end the trainer never saw.
    fn begun_may_be_done(&mut self) {
        let begun = |(path, claim): (&String, &Claim)| {
            let to = match &claim.will {
                Some(Some(to)) => to,
                Some(None) => claim.last.as_ref()?,
                None => return None,
            };
            Some((path.clone(), to.clone()))
        };
        for (path, to) in self.standing.iter().filter_map(begun).collect::<Vec<_>>() {
            self.changed(&path, &to);
        }
        for (from, to) in std::mem::take(&mut self.moving) {
            let moves = self.standing.get(&from).map(|claim| claim.is.clone());
            self.changed(&from, &Holds::Absent);
            moves.iter().for_each(|holds| self.changed(&to, holds));
            for (path, durable) in &mut self.durable {
                let below = |folder: &str| path != folder && covers(folder, path);
                durable.moved |= below(&from) || below(&to);
            }
        }
    }

    /// Records that the auditor removed a whole folder, so that no name below it is there.
    pub(crate) fn removed(&mut self, folder: &str) {
        self.standing.retain(|path, _| !covers(folder, path));
        self.moving.retain(|(from, _)| !covers(folder, from));
        for (_, durable) in self.durable.iter_mut().filter(|(path, _)| covers(folder, path)) {
            durable.since.push(Holds::Absent);
        }
        let gone = Claim { is: Holds::Absent, by: By::Unlink, will: None, last: None };
        self.standing.insert(folder.to_owned(), gone);
        self.promised.by.entry(By::Unlink).or_default().recorded += 1;
    }

    /// Forgets absent names, which were compared once, so that a long campaign's book stays small.
    pub(crate) fn forget_absent(&mut self) {
        self.standing.retain(|_, claim| claim.is != Holds::Absent || claim.will.is_some());
    }
}

/// Whether `path` is `folder` or lies below it.
fn covers(folder: &str, path: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn told(mut broken: Vec<String>) -> Result<(), String> {
    let count = broken.len();
    if count == 0 {
        return Ok(());
    }
    broken.truncate(BROKEN_SHOWN);
    Err(format!("{count} promises are broken:\n  {}", broken.join("\n  ")))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tidemark_tests::campaign::event::Bytes;

    use super::*;

    fn whole(bytes: &[u8]) -> Holds {
        Holds::Whole(Bytes::of(bytes))
    }

    fn is(path: &str, holds: Holds, by: By) -> Event {
        Event::Is { path: path.into(), holds, by }
    }

    fn two_names() -> (tempfile::TempDir, Claims) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/a"), b"one").unwrap();
        fs::write(dir.path().join("d/b"), b"other").unwrap();
        let mut claims = Claims::default();
        claims.apply(is("d/a", whole(b"one"), By::Close));
        claims.apply(is("d/b", Holds::Begins(Bytes::of(b"oth")), By::Fsync));
        (dir, claims)
    }

    #[test]
    fn what_is_there_is_kept_and_one_wrong_byte_is_seen() {
        let (dir, mut claims) = two_names();
        claims.audit(dir.path()).unwrap();
        assert_eq!(claims.promised.by[&By::Close], Count { recorded: 1, compared: 1, kept: 1 });
        fs::write(dir.path().join("d/a"), b"onE").unwrap();
        assert!(claims.audit(dir.path()).unwrap_err().contains("d/a"));
        fs::remove_file(dir.path().join("d/a")).unwrap();
        assert!(claims.audit(dir.path()).unwrap_err().contains("cannot be read"));
        claims.apply(is("d/a", Holds::Absent, By::Unlink));
        claims.audit(dir.path()).unwrap();
        fs::write(dir.path().join("d/b"), b"otter").unwrap();
        assert!(claims.audit(dir.path()).unwrap_err().contains("d/b"));
    }

    #[test]
    fn what_a_dead_trainer_left_in_between_is_either_and_then_stays() {
        let (dir, mut claims) = two_names();
        claims.apply(Event::Will { path: "d/a".into(), to: Some(Holds::Absent) });
        claims.apply(Event::Will { path: "d/b".into(), to: None });
        claims.apply(Event::Will { path: "d/b".into(), to: Some(Holds::Absent) });
        fs::write(dir.path().join("d/b"), b"anything").unwrap();
        claims.audit(dir.path()).unwrap();
        fs::write(dir.path().join("d/b"), b"anything else").unwrap();
        assert!(claims.audit(dir.path()).unwrap_err().contains("d/b"), "found once, it must stay");
        fs::remove_file(dir.path().join("d/a")).unwrap();
        assert!(claims.audit(dir.path()).unwrap_err().contains("d/a"), "it was not removed then");
    }

    #[test]
    fn a_rename_that_was_cut_off_happened_whole_or_not_at_all() {
        for happened in [false, true] {
            let (dir, mut claims) = two_names();
            claims.apply(Event::WillMove { from: "d".into(), to: "e".into() });
            if happened {
                fs::rename(dir.path().join("d"), dir.path().join("e")).unwrap();
            }
            claims.audit(dir.path()).unwrap();
            let name = if happened { "e/a" } else { "d/a" };
            fs::remove_file(dir.path().join(name)).unwrap();
            assert!(claims.audit(dir.path()).unwrap_err().contains(name));
            claims.apply(Event::WillMove { from: "gone".into(), to: "away".into() });
            assert!(claims.audit(dir.path()).unwrap_err().contains("at neither name"));
        }
    }

    #[test]
    fn after_a_restart_what_was_committed_or_came_after_it_is_there() {
        let (dir, mut claims) = two_names();
        claims.committed(&[]).unwrap();
        assert_eq!(claims.promised.committed.recorded, 1, "a sync without a close is no whole file");
        claims.apply(is("d/a", whole(b"new"), By::Close));
        claims.audit_restart(dir.path()).unwrap();

        let (dir, mut claims) = two_names();
        claims.committed(&[]).unwrap();
        claims.apply(is("d/a", whole(b"new"), By::Close));
        fs::write(dir.path().join("d/a"), b"new").unwrap();
        claims.audit_restart(dir.path()).unwrap();

        let (dir, mut claims) = two_names();
        claims.committed(&[]).unwrap();
        fs::write(dir.path().join("d/a"), b"new").unwrap();
        assert!(claims.audit_restart(dir.path()).is_err(), "nobody promised that");

        let (dir, mut claims) = two_names();
        claims.committed(&["d".into()]).unwrap();
        fs::remove_file(dir.path().join("d/a")).unwrap();
        claims.audit_restart(dir.path()).unwrap();
        assert_eq!(claims.promised.committed, Count::default(), "flush said that it is not");

        let (_dir, mut claims) = two_names();
        assert!(claims.committed(&["d/a".into()]).unwrap_err().contains("every file was closed"));
    }

    #[test]
    fn after_a_restart_a_change_that_had_begun_may_be_done() {
        let (dir, mut claims) = two_names();
        claims.committed(&[]).unwrap();
        fs::remove_file(dir.path().join("d/a")).unwrap();
        assert!(claims.audit_restart(dir.path()).is_err(), "nobody began to remove it");

        let (dir, mut claims) = two_names();
        claims.committed(&[]).unwrap();
        claims.apply(Event::Will { path: "d/a".into(), to: Some(Holds::Absent) });
        fs::remove_file(dir.path().join("d/a")).unwrap();
        claims.audit_restart(dir.path()).unwrap();

        for (now, kept) in [("new", true), ("ne", false)] {
            let (dir, mut claims) = two_names();
            claims.committed(&[]).unwrap();
            claims.apply(Event::Will { path: "d/a".into(), to: None });
            claims.apply(Event::Will { path: "d/a".into(), to: Some(whole(b"new")) });
            fs::write(dir.path().join("d/a"), now).unwrap();
            assert_eq!(claims.audit_restart(dir.path()).is_ok(), kept, "{now}: closed, or cut");
        }

        for now in ["d/a", "d/c"] {
            let (dir, mut claims) = two_names();
            claims.committed(&[]).unwrap();
            claims.apply(Event::WillMove { from: "d/a".into(), to: "d/c".into() });
            fs::rename(dir.path().join("d/a"), dir.path().join(now)).unwrap();
            claims.audit_restart(dir.path()).unwrap();
        }
    }

    #[test]
    fn what_the_auditor_removed_must_stay_away() {
        let (dir, mut claims) = two_names();
        claims.removed("d");
        assert!(claims.audit(dir.path()).is_err());
        fs::remove_dir_all(dir.path().join("d")).unwrap();
        claims.audit(dir.path()).unwrap();
        claims.committed(&[]).unwrap();
        claims.forget_absent();
        claims.audit_restart(dir.path()).unwrap();
        assert_eq!(claims.promised.committed.kept, 1);
    }
}
