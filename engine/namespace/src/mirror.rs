//! Names and files of other nodes, applied to this node's tree.
//!
//! Owns: carrying out other nodes' operations in their order, bringing a name or a directory to the coordinator's state, the facts known
//! of a file whose writers are on another node ([`Remote`]). Does not own: requesting and publishing (`cluster`), the effect of each
//! change on the tree (`mirroring`), the bytes (`cold`).
//!
//! On the coordinator the tree is the catalog: it has everything that was published. On other nodes the tree has only what was made there
//! or requested. A file of another node is cold here until a program opens it.

use super::catalog::Moment;
use super::guarded::Guarded;
use super::hidden::TORN;
use super::mirroring::meets_made;
use super::moved::Moved;
use super::outgoing::Question;
use super::{FsError, HIDDEN, NodeId};
use std::borrow::Cow;
use std::collections::BTreeSet;
use tidemark_protocol::cluster::wire::{NameOperation, NodeKind, NodeState};
use tidemark_protocol::file::FileState;
use tidemark_protocol::id::{FileId, Incarnation};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::path::split;

/// Facts known of a file whose writers are on another node.
#[derive(Debug, Clone, PartialEq)]
pub struct Remote {
    /// The life that published these facts.
    pub home: Incarnation,
    pub state: FileState,
    pub published_ns: i64,
    pub vouched: bool,
    /// Whether the bytes of the present seal are in that life's memory.
    pub host: bool,
}

impl Remote {
    /// Describes a file that is open for writing on `home` and of which nothing else is known yet.
    pub(super) fn begun(home: Incarnation, opened_ns: i64) -> Self {
        let state = FileState::Open { writers: 1 };
        Self { home, state, published_ns: opened_ns, vouched: false, host: false }
    }
}

/// Names settled in one hold of the lock.
const SETTLED_AT_ONCE: usize = 256;

/// Other nodes' names and states, applied to this tree.
#[derive(Debug, Clone, Copy)]
pub struct Mirror<'a> {
    pub(super) state: &'a Guarded,
}

impl Mirror<'_> {
    /// Carries out, in order, the operations on names in publication number `publication` of another node. Skips and logs an operation
    /// that cannot be carried out, since the other node has already done it. Skips operations that were carried out before the daemon was
    /// killed.
    ///
    /// Nodes that other nodes made while `from` counted as lost keep their names
    /// ([`CatalogTree::gives_up`](super::CatalogTree::gives_up)).
    pub fn follow(&self, operations: &[NameOperation], from: &NodeLife, publication: u64) {
        let now_ns = self.state.now_ns();
        let mut done = self.state.look(|state| state.heard.done(from, publication)).min(operations.len());
        while done < operations.len() {
            let next = operations.len().min(done + SETTLED_AT_ONCE);
            let followed = self.state.change(|state| {
                let mut mirroring = state.mirroring(self.state.incarnation);
                let away = mirroring.state.heard.made_while_away(from).cloned();
                for operation in &operations[done..next] {
                    let tree = &mirroring.state.tree;
                    let meets = |away| meets_made(tree, operation, away, from.incarnation);
                    if away.as_ref().is_some_and(meets) {
                        tracing::warn!(?operation, %from, "another node made something of this name while it was away, which stays");
                        continue;
                    }
                    mirroring.state.outgoing.carried.note(operation);
                    if let Err(error) = mirroring.follow(operation, from.incarnation, now_ns) {
                        tracing::debug!(?operation, %error, "an operation of another node finds another tree here");
                    }
                }
                mirroring.state.heard.note_done(from, publication, next);
                Ok(())
            });
            if let Err(error) = followed {
                tracing::error!(%error, "the journal did not take what another node did");
            }
            done = next;
        }
    }

    /// Applies the states of nodes, as published by `home`. If `makes` is set, creates nodes that are missing here, because no operation
    /// created them. Otherwise a missing node has lost its name here since and stays without one; returns the files among these.
    pub fn take_states(&self, states: &[NodeState], home: Incarnation, makes: bool) -> Vec<FileId> {
        let mut nameless = Vec::new();
        for states in states.chunks(SETTLED_AT_ONCE) {
            let taken = self.state.change(|state| {
                let mut mirroring = state.mirroring(self.state.incarnation);
                for told in states {
                    if !makes && !mirroring.has(told) {
                        if let NodeKind::File(facts) = &told.kind {
                            nameless.push(facts.file);
                        }
                        continue;
                    }
                    let makes_names = makes && !mirroring.was_told(told);
                    let taken = mirroring
                        .take_state(told, home)
                        .and_then(|node| if makes_names { mirroring.make_names(node, told) } else { Ok(()) });
                    if let Err(error) = taken {
                        let path = String::from_utf8_lossy(&told.path);
                        tracing::debug!(%path, %error, "what another node says of a name does not fit here");
                    }
                }
                Ok(())
            });
            if let Err(error) = taken {
                tracing::error!(%error, "the journal did not take how nodes stand elsewhere");
            }
        }
        nameless
    }

    /// Brings one name of a directory to the coordinator's state. If the name changed here after the question, keeps it, because the
    /// coordinator does not know of that change.
    ///
    /// # Errors
    /// [`FsError::NotFound`] where the directory itself is not here; those of the journal.
    pub fn settle_name(
        &self,
        directory: &[u8],
        name: &[u8],
        found: Option<&NodeState>,
        asked: Question,
    ) -> Result<(), FsError> {
        let now_ns = self.state.now_ns();
        self.state.change(|state| {
            let mut mirroring = state.mirroring(self.state.incarnation);
            let parent = mirroring.state.tree.resolve(directory)?;
            if asked.lets {
                mirroring.state.outgoing.note_let(parent, name);
            }
            if mirroring.state.outgoing.is_passed_over(parent, name, asked) {
                return Ok(());
            }
            mirroring.settle_name((parent, name), found, asked, now_ns)
        })
    }

    /// Brings a whole directory to the coordinator's state. Names that changed here after the question stay. Returns false if the answer has
    /// the file of such a name under another one: another node renamed it since, and the two names are of two moments. Ask again then.
    ///
    /// # Errors
    /// As [`Mirror::settle_name`].
    pub fn settle_directory(
        &self,
        directory: &[u8],
        found: &[NodeState],
        asked: Question,
    ) -> Result<bool, FsError> {
        if asked.lets {
            self.state.look(|state| {
                let parent = state.tree.resolve(directory)?;
                state.outgoing.note_let(parent, b"");
                Ok::<(), FsError>(())
            })?;
        }
        self.settle_names(directory, found, asked, NodeId::MAX)
    }

    /// Does the same as [`Mirror::settle_directory`], but what this node made since, with a number from `made_since` on, keeps its name
    /// too.
    pub(super) fn settle_names(
        &self,
        directory: &[u8],
        found: &[NodeState],
        asked: Question,
        made_since: NodeId,
    ) -> Result<bool, FsError> {
        let now_ns = self.state.now_ns();
        let name_of = |state: &NodeState| state.path.rsplit(|b| *b == b'/').next().unwrap_or(&[]).to_vec();
        let names: BTreeSet<Vec<u8>> = found.iter().map(name_of).collect();
        // A name that cannot be settled, or a batch that cannot be journaled, does not stop the others.
        let mut settled = Ok(());
        for states in found.chunks(SETTLED_AT_ONCE) {
            let result = self.state.change(|state| {
                let mut mirroring = state.mirroring(self.state.incarnation);
                let parent = mirroring.state.tree.resolve(directory)?;
                let mut settled = Ok(());
                for told in states {
                    let name = name_of(told);
                    if !mirroring.state.outgoing.is_passed_over(parent, &name, asked) {
                        let result = mirroring.settle_name((parent, &name), Some(told), asked, now_ns);
                        settled = settled.and(result);
                    }
                }
                settled
            });
            settled = settled.and(result);
        }
        settled?;
        let is_found = |file: FileId| {
            let mut files = found.iter().filter_map(|told| match &told.kind {
                NodeKind::File(facts) => Some(facts.file),
                NodeKind::Directory | NodeKind::Symlink { .. } => None,
            });
            files.any(|known| known == file)
        };
        self.state.change(|state| {
            let mut mirroring = state.mirroring(self.state.incarnation);
            let parent = mirroring.state.tree.resolve(directory)?;
            let here = mirroring.state.tree.node(parent)?.directory()?.by_name.keys();
            let surplus: Vec<_> = here.filter(|name| !names.contains(&***name)).cloned().collect();
            let mut is_one_moment = true;
            for name in surplus {
                if mirroring.state.outgoing.is_passed_over(parent, &name, asked) {
                    let node = mirroring.state.tree.child(parent, &name)?;
                    let file = mirroring.state.tree.node(node)?.file_id();
                    is_one_moment &= !file.is_some_and(is_found);
                } else if !mirroring.drop_before(parent, &name, (made_since, asked), now_ns)? {
                    mirroring.settle_name((parent, &name), None, asked, now_ns)?;
                }
            }
            Ok(is_one_moment)
        })
    }

    /// Removes these files' names and copies here, because the coordinator says that they have no name any more.
    pub fn end_removed(&self, files: &[FileId]) {
        let now_ns = self.state.now_ns();
        tracing::debug!(?files, "no name is left of them");
        for file in files {
            let ended = self.state.change(|state| {
                let mut mirroring = state.mirroring(self.state.incarnation);
                mirroring.state.forget_copies_of(*file);
                let Some(node) = mirroring.state.node_of(*file, mirroring.own) else { return Ok(()) };
                for link in mirroring.state.tree.node(node)?.links().collect::<Vec<_>>() {
                    let Some(name) = mirroring.state.tree.entry_at(link).map(|entry| entry.name.to_vec())
                    else {
                        continue;
                    };
                    mirroring.state.tree.unlink(link.parent, &name, now_ns)?;
                    mirroring.loses_name(link.parent, &name, node);
                }
                mirroring.state.tree.mark(node);
                mirroring.state.forsake(node);
                Ok(())
            });
            if let Err(error) = ended {
                tracing::error!(%file, %error, "a file that another node removed stays here");
            }
        }
    }

    /// Brings the tree to the last coordinator's: `directories` with their entries, parents first. Keeps the changes made here of which that
    /// coordinator did not know: names that are not in `publication`, the last of this node that it knew (none: it knew none), and attributes
    /// that were set after the moment `told`. Where operations are missing, names count by that moment, too. Returns false if a part could not
    /// be carried out or journaled.
    pub fn become_catalog(
        &self,
        directories: &[(Vec<u8>, Vec<NodeState>)],
        told: Moment,
        publication: Option<u64>,
    ) -> bool {
        let (moved, until, knows_own) = self.state.look(|state| {
            let (next, own) = (state.tree.next, self.state.incarnation);
            let last = publication.unwrap_or(0);
            let until = state.outgoing.told_until(last, next, own);
            // No operation is missing.
            let knows_own = until.is_some();
            let until = until.filter(|_| publication.is_some()).unwrap_or(told);
            state.outgoing.takes_up(until.names);
            (Moved::by(state.outgoing.untold_after(last)), until, knows_own)
        });
        let (mut is_complete, attributes_at) = (true, told.names);
        let asked = Question { at: until.names, attributes_at, lets: false };
        for (path, found) in directories {
            let settled = if path == HIDDEN {
                // Everything else that this node hides, copies above all, belongs to this node only.
                found.iter().try_for_each(|state| self.settle_name(HIDDEN, TORN, Some(state), asked))
            } else {
                let settled = self.settle_moved(path, found, &moved, (asked, until.next));
                settled.and_then(|()| {
                    if knows_own && !moved.is_empty() { self.give_back(found, &moved, asked) } else { Ok(()) }
                })
            };
            match settled {
                Ok(()) => {}
                Err(error) => {
                    is_complete = false;
                    let path = String::from_utf8_lossy(path);
                    tracing::error!(%path, %error, "a directory of the catalog cannot be made here");
                }
            }
        }
        is_complete
    }

    /// Brings to the last coordinator's state the directory that it knew at `path`, wherever that lies here.
    fn settle_moved(
        &self,
        path: &[u8],
        found: &[NodeState],
        moved: &Moved,
        (asked, made_since): (Question, NodeId),
    ) -> Result<(), FsError> {
        let Some(path) = moved.directory(path) else { return Ok(()) };
        if self.state.look(|state| state.tree.resolve(&path).is_err()) {
            // The directory was removed here since, with its entries.
            return Ok(());
        }
        let found = if moved.is_empty() {
            Cow::Borrowed(found)
        } else {
            Cow::Owned(found.iter().filter_map(|state| moved.state(state)).collect())
        };
        self.settle_names(&path, &found, asked, made_since).map(drop)
    }

    /// Gives names back to files of the catalog that this node took from other files: another node put them there since.
    fn give_back(&self, found: &[NodeState], moved: &Moved, asked: Question) -> Result<(), FsError> {
        let now_ns = self.state.now_ns();
        let missing = found.chunks(SETTLED_AT_ONCE).flat_map(|states| {
            self.state.look(|state| {
                let is_missing = |told: &&NodeState| state.tree.resolve(&told.path).is_err();
                states.iter().filter(is_missing).collect::<Vec<_>>()
            })
        });
        for told in missing {
            let NodeKind::File(facts) = &told.kind else { continue };
            for path in moved.names(&told.path, facts.file) {
                let (directory, name) = split(&path);
                self.state.change(|state| {
                    let mut mirroring = state.mirroring(self.state.incarnation);
                    let Ok(parent) = mirroring.state.tree.resolve(directory) else { return Ok(()) };
                    if mirroring.state.tree.child(parent, name).is_ok() {
                        return Ok(());
                    }
                    let told = NodeState { path: path.clone(), other_names: None, ..told.clone() };
                    mirroring.settle_name((parent, name), Some(&told), asked, now_ns)
                })?;
            }
        }
        Ok(())
    }
}
