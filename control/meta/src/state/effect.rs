//! The changes of one call, or the acts that have to come first.
//!
//! Owns: the meaning of each call. Does not own: the order of calls and the chain of a node's numbers (`plan`).

use super::Call;
use super::draft::Draft;
use crate::key::{Key, Place, ROOT};
use crate::refusal::Refusal;
use crate::rules::{Rule, Rules};
use crate::value::Change;
use crate::value::{Entry, Inode, Kind, Member, Standing, Target, Value};
use std::collections::BTreeSet;
use tidemark_protocol::id::{FileId, Incarnation, NodeName};

/// An act of another life that has to come before a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Need {
    /// The life gives back a file or directory. `force`: also a file that is open for writing.
    GiveBack { life: Incarnation, id: FileId, version: u64, force: bool },
    /// The life publishes what it knows, and no longer answers for the file from its own memory.
    Publish { life: Incarnation, file: FileId },
}

impl Need {
    /// Returns the life that has to act.
    #[must_use]
    pub fn life(self) -> Incarnation {
        match self {
            Self::GiveBack { life, .. } | Self::Publish { life, .. } => life,
        }
    }
}

/// An obstacle to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waits {
    Refused(Refusal),
    /// All of these have to come first; sorted by life and inode.
    For(BTreeSet<Need>),
}

impl From<Refusal> for Waits {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The caller of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller<'a> {
    pub(super) node: &'a NodeName,
    pub(super) life: Incarnation,
    /// The needs of this call that were met by a publication.
    pub(super) heard: &'a BTreeSet<Need>,
    /// Whether the call has waited for other nodes as long as it may.
    pub(super) expired: bool,
    pub(super) rules: Rules,
}

/// A call at work.
struct Work<'a> {
    draft: &'a Draft<'a>,
    caller: Caller<'a>,
    needs: BTreeSet<Need>,
    changes: Vec<Change>,
}

/// Returns the changes of one call on top of a draft.
///
/// # Errors
/// [`Waits`] if the call is refused, or if other lives have to act first.
pub(super) fn effect(draft: &Draft<'_>, caller: Caller<'_>, call: &Call) -> Result<Vec<Change>, Waits> {
    let mut work = Work { draft, caller, needs: BTreeSet::new(), changes: vec![] };
    work.make(call)?;
    if work.needs.is_empty() { Ok(work.changes) } else { Err(Waits::For(work.needs)) }
}

impl Work<'_> {
    fn make(&mut self, call: &Call) -> Result<(), Waits> {
        match call {
            Call::Create { place, base, id, kind, attributes } => {
                let entry = self.reach(place, *base)?;
                if entry.target.is_some() {
                    return Err(Refusal::Exists.into());
                }
                if self.draft.inode(*id).is_some() {
                    return Err(Refusal::Stale.into());
                }
                let parent = (*kind == Kind::Directory).then_some(place.directory);
                let (holder, alone) = (self.caller.life, true);
                let (kind, attributes) = (*kind, *attributes);
                let inode =
                    Inode { kind, attributes, seal: None, links: 1, holder, alone, version: 1, parent };
                self.put_inode(*id, inode);
                self.put_name(place, entry, Some(Target { id: *id, kind }));
            }
            Call::Close { id, base, holder, seal } => {
                let mut inode = self.file(*id)?.clone();
                let compares = self.caller.rules.has(Rule::RebaseCompares) || *holder == self.caller.life;
                let mine = inode.holder == self.caller.life && inode.alone;
                let over = inode.holder == *holder && self.draft.state.node_of(*holder).is_none();
                if compares && (inode.version != *base || !(mine || over)) {
                    return Err(Refusal::Stale.into());
                }
                (inode.seal, inode.holder, inode.alone) = (Some(*seal), self.caller.life, true);
                inode.version += 1;
                self.put_inode(*id, inode);
            }
            Call::SetAttributes { id, attributes } => {
                let mut inode = self.draft.inode(*id).ok_or(Refusal::NoInode)?.clone();
                self.holder_publishes(*id, &inode);
                inode.attributes = *attributes;
                self.put_inode(*id, inode);
            }
            Call::Link { id, place } => {
                let entry = self.reach(place, None)?;
                let mut inode = self.file(*id)?.clone();
                self.holder_publishes(*id, &inode);
                if entry.target.is_some() {
                    return Err(Refusal::Exists.into());
                }
                inode.links += 1;
                self.put_inode(*id, inode);
                self.put_name(place, entry, Some(Target { id: *id, kind: Kind::File }));
            }
            Call::Unlink { place, base } => {
                let entry = self.reach(place, *base)?;
                let target = entry.target.ok_or(Refusal::NoEntry)?;
                if target.kind == Kind::Directory {
                    return Err(Refusal::IsDirectory.into());
                }
                self.unname(target)?;
                self.put_name(place, entry, None);
            }
            Call::Rename { from, to, bases, exchange, .. } => self.rename(from, to, *bases, *exchange)?,
            Call::Rmdir { place } => {
                let entry = self.reach(place, None)?;
                self.unname_directory(entry.target.ok_or(Refusal::NoEntry)?)?;
                self.put_name(place, entry, None);
            }
            Call::Take { id, truncate } => self.take(*id, *truncate)?,
            Call::Delegate { directory } => {
                let mut inode = self.directory(*directory)?.clone();
                match self.draft.state.alone(&inode) {
                    Some(life) if life == self.caller.life => return Ok(()),
                    Some(_) => return Err(Refusal::Held.into()),
                    None => {}
                }
                (inode.holder, inode.alone) = (self.caller.life, true);
                inode.version += 1;
                self.put_inode(*directory, inode);
            }
            Call::GiveBack { id, version } => {
                // An inode that is gone, or has another version, is not the caller's any more.
                if let Some(inode) = self.draft.inode(*id)
                    && (inode.holder, inode.alone, inode.version) == (self.caller.life, true, *version)
                {
                    let inode = Inode { alone: false, ..inode.clone() };
                    self.put_inode(*id, inode);
                }
            }
            Call::Returned => {
                let member = Member { life: self.caller.life, standing: Standing::Present };
                self.changes.push((Key::Member(self.caller.node.clone()), Some(Value::Member(member))));
            }
        }
        Ok(())
    }

    fn take(&mut self, id: FileId, truncate: bool) -> Result<(), Waits> {
        let mut inode = self.file(id)?.clone();
        let alone = self.draft.state.alone(&inode);
        if alone == Some(self.caller.life) && !truncate {
            return Ok(());
        }
        if let Some(life) = alone.filter(|life| *life != self.caller.life) {
            self.need(Need::GiveBack { life, id, version: inode.version, force: truncate });
        }
        (inode.holder, inode.alone) = (self.caller.life, true);
        inode.version += 1;
        if truncate {
            inode.seal = None;
        }
        self.put_inode(id, inode);
        Ok(())
    }

    fn rename(
        &mut self,
        from: &Place,
        to: &Place,
        bases: Option<(u64, u64)>,
        exchange: bool,
    ) -> Result<(), Waits> {
        let source = self.reach(from, bases.map(|bases| bases.0))?;
        let place = self.reach(to, bases.map(|bases| bases.1))?;
        let moved = source.target.ok_or(Refusal::NoEntry)?;
        // Two names of one file stay, as POSIX has it.
        if place.target.is_some_and(|target| target.id == moved.id) {
            return Ok(());
        }
        self.reparent(moved, from.directory, to.directory)?;
        match place.target {
            None if exchange => return Err(Refusal::NoEntry.into()),
            None => {}
            Some(other) if exchange => {
                self.reparent(other, to.directory, from.directory)?;
                self.put_name(to, place, Some(moved));
                self.put_name(from, source, Some(other));
                return Ok(());
            }
            Some(over) => match (moved.kind, over.kind) {
                (Kind::File, Kind::File) => self.unname(over)?,
                (Kind::Directory, Kind::Directory) => self.unname_directory(over)?,
                (Kind::File, Kind::Directory) => return Err(Refusal::IsDirectory.into()),
                (Kind::Directory, Kind::File) => return Err(Refusal::NotDirectory.into()),
            },
        }
        self.put_name(to, place, Some(moved));
        self.put_name(from, source, None);
        Ok(())
    }

    /// Gives a directory another parent.
    fn reparent(&mut self, moved: Target, from: FileId, to: FileId) -> Result<(), Waits> {
        if moved.kind != Kind::Directory || from == to {
            return Ok(());
        }
        if self.caller.rules.has(Rule::NoLoops) && self.lies_below(to, moved.id) {
            return Err(Refusal::Loop.into());
        }
        let inode = Inode { parent: Some(to), ..self.directory(moved.id)?.clone() };
        self.put_inode(moved.id, inode);
        let moves = self.draft.moves() + 1;
        self.changes.retain(|(key, _)| *key != Key::Moves);
        self.changes.push((Key::Moves, Some(Value::Number(moves))));
        Ok(())
    }

    /// Returns whether `directory` is `top` or lies below it. Costs the depth.
    fn lies_below(&self, directory: FileId, top: FileId) -> bool {
        let mut at = directory;
        loop {
            if at == top {
                return true;
            }
            match self.draft.inode(at).and_then(|inode| inode.parent) {
                Some(parent) => at = parent,
                None => return false,
            }
        }
    }

    /// Removes a name of a file.
    fn unname(&mut self, target: Target) -> Result<(), Waits> {
        let mut inode = self.file(target.id)?.clone();
        self.holder_publishes(target.id, &inode);
        assert!(inode.links > 0, "{} has a name and counts none", target.id);
        inode.links -= 1;
        let left = (inode.links > 0).then_some(Value::Inode(inode));
        self.changes.push((Key::Inode(target.id), left));
        Ok(())
    }

    /// Removes an empty directory.
    fn unname_directory(&mut self, target: Target) -> Result<(), Waits> {
        if target.kind == Kind::File {
            return Err(Refusal::NotDirectory.into());
        }
        let inode = self.directory(target.id)?.clone();
        // The caller, too: until then it makes names there without asking.
        if let Some(life) = self.draft.state.alone(&inode)
            && self.caller.rules.has(Rule::EmptyForAll)
        {
            self.need(Need::GiveBack { life, id: target.id, version: inode.version, force: false });
        } else if !self.draft.is_empty(target.id) {
            return Err(Refusal::NotEmpty.into());
        }
        self.changes.push((Key::Inode(target.id), None));
        Ok(())
    }

    /// Requires that the directory of a name is given back, and returns the name's entry.
    fn reach(&mut self, place: &Place, base: Option<u64>) -> Result<Entry, Waits> {
        let inode = self.directory(place.directory)?.clone();
        if let Some(life) = self.draft.state.alone(&inode).filter(|life| *life != self.caller.life)
            && self.caller.rules.has(Rule::Recall)
            && (self.caller.rules.has(Rule::NoExpiry) || !self.caller.expired)
        {
            let id = place.directory;
            self.needs.insert(Need::GiveBack { life, id, version: inode.version, force: false });
            // Changes that the delegate has not published may change the answer.
            return Err(Waits::For(std::mem::take(&mut self.needs)));
        }
        let entry = self.draft.entry(place);
        if base.is_some_and(|base| base != entry.version) {
            return Err(Refusal::Stale.into());
        }
        Ok(entry)
    }

    fn directory(&self, id: FileId) -> Result<&Inode, Refusal> {
        match self.draft.inode(id) {
            Some(inode) if inode.kind == Kind::Directory => Ok(inode),
            Some(_) => Err(Refusal::NotDirectory),
            None => Err(Refusal::NoDirectory),
        }
    }

    fn file(&self, id: FileId) -> Result<&Inode, Refusal> {
        match self.draft.inode(id) {
            Some(inode) if inode.kind == Kind::File => Ok(inode),
            Some(_) => Err(Refusal::IsDirectory),
            None => Err(Refusal::NoInode),
        }
    }

    fn holder_publishes(&mut self, file: FileId, inode: &Inode) {
        if let Some(life) = self.draft.state.alone(inode).filter(|life| *life != self.caller.life) {
            self.need(Need::Publish { life, file });
        }
    }

    fn need(&mut self, need: Need) {
        if !self.caller.heard.contains(&need) {
            self.needs.insert(need);
        }
    }

    fn put_inode(&mut self, id: FileId, inode: Inode) {
        assert!(id != ROOT || inode.parent.is_none(), "the root has no parent");
        self.changes.push((Key::Inode(id), Some(Value::Inode(inode))));
    }

    fn put_name(&mut self, place: &Place, was: Entry, target: Option<Target>) {
        let entry = Entry { version: was.version + 1, target };
        self.changes.push((Key::Name(place.clone()), Some(Value::Entry(entry))));
    }
}
