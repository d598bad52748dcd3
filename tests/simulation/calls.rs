//! Programs' calls, as the kernel and the mount carry them out: a path is looked up name by name, and each step has its leave.
//!
//! Owns: the order of these steps, and what the kernel decides by itself. Does not own: leave and names (the product), what to call
//! (`mod`).
//!
//! Each call makes its node under an owner of its own: the owner's number says which file or directory a name means, on each node.

use super::history::{Call, Errno, Node, Told};
use super::machine::{Machine, Running};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tidemark_engine::cluster::{Leave, Wanted};
use tidemark_namespace::{Attr, Caller, FsError, Kind, Looked, NodeId, RENAME_NOREPLACE, ROOT};
use tidemark_protocol::checksum::Crc64;
use tokio::sync::OwnedMutexGuard;

const O_WRONLY: i32 = 1;
const O_EXCL: i32 = 0o200;

/// The kernel's locks of directories: two calls of one node that change a directory follow each other.
#[derive(Debug, Default)]
pub(super) struct Inodes(Mutex<BTreeMap<NodeId, Arc<tokio::sync::Mutex<()>>>>);

impl Inodes {
    pub(super) async fn lock(&self, nodes: &[NodeId]) -> Vec<OwnedMutexGuard<()>> {
        let mut nodes = nodes.to_vec();
        nodes.sort_unstable();
        nodes.dedup();
        let mut held = Vec::new();
        for node in nodes {
            let lock = {
                let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                Arc::clone(locks.entry(node).or_default())
            };
            held.push(lock.lock_owned().await);
        }
        held
    }
}

/// Carries out a call. If the daemon ends meanwhile, what became of it is not known.
pub(super) async fn carry_out(
    machine: &Machine,
    running: &Arc<Running>,
    inodes: &Inodes,
    call: &Call,
) -> Told {
    let mut told = tokio::select! {
        told = once(running, inodes, call) => told,
        () = machine.ended(running) => return Told::Unknown,
    };
    if told == Told::Refused(Errno::Stale) {
        // The kernel looks the path up once more.
        told = tokio::select! {
            told = once(running, inodes, call) => told,
            () = machine.ended(running) => return Told::Unknown,
        };
    }
    told
}

async fn once(running: &Running, inodes: &Inodes, call: &Call) -> Told {
    let calls = Calls { running, inodes };
    let done = match call {
        Call::Look { path } => calls.look(path).await,
        Call::Create { path, file, .. } => calls.create(path, *file).await,
        Call::Mkdir { path, directory } => calls.mkdir(path, *directory).await,
        Call::Unlink { path } => calls.remove(path, false).await,
        Call::Rmdir { path } => calls.remove(path, true).await,
        Call::Rename { from, to, no_replace } => calls.rename(from, to, *no_replace).await,
        Call::Link { from, to } => calls.link(from, to).await,
        Call::List { path } => calls.list(path).await,
    };
    done.unwrap_or_else(|error| match error {
        FsError::NotFound => Told::Refused(Errno::NotFound),
        FsError::Exists => Told::Refused(Errno::Exists),
        FsError::NotDirectory => Told::Refused(Errno::NotDirectory),
        FsError::IsDirectory => Told::Refused(Errno::IsDirectory),
        FsError::NotEmpty => Told::Refused(Errno::NotEmpty),
        FsError::Invalid => Told::Refused(Errno::Loop),
        FsError::Stale => Told::Refused(Errno::Stale),
        FsError::Io | FsError::Busy => Told::Unknown,
        other => panic!("{call:?} has no reason to meet {other:?}"),
    })
}

pub(super) fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

fn node_of(attr: &Attr) -> Node {
    match attr.kind {
        Kind::Directory => Node::Directory(if attr.node == ROOT { 0 } else { u64::from(attr.uid) }),
        Kind::File | Kind::Symlink | Kind::Special(_) => Node::File(u64::from(attr.uid)),
    }
}

/// The calls of one program.
pub(super) struct Calls<'a> {
    pub(super) running: &'a Running,
    pub(super) inodes: &'a Inodes,
}

impl Calls<'_> {
    pub(super) fn caller(&self, owner: u64) -> Caller {
        let uid = u32::try_from(owner).expect("no history has so many nodes");
        Caller { uid, gid: 0, pid: 0, now_ns: self.running.namespace.now_ns(), request: 0 }
    }

    pub(super) async fn leave(&self, wanted: Wanted) -> Result<Leave, FsError> {
        match Leave::at_once(&self.running.cluster, wanted) {
            Ok(leave) => Ok(leave),
            Err(wanted) => Leave::ask(&self.running.cluster, wanted).await,
        }
    }

    pub(super) async fn look_up(&self, parent: NodeId, name: &str) -> Result<Attr, FsError> {
        let name = name.as_bytes();
        let _leave = self.leave(Wanted::Look { parent, name: name.to_vec() }).await?;
        let namespace = &self.running.namespace;
        match namespace.lookup_by(0, parent, name)? {
            Looked::Found(attr) => {
                namespace.forget(attr.node, 1);
                Ok(attr)
            }
            Looked::Begun => namespace.lookup_anew(&self.caller(0), parent, name),
        }
    }

    /// Finds a directory by its path.
    pub(super) async fn walk(&self, path: &str) -> Result<NodeId, FsError> {
        let mut node = ROOT;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let attr = self.look_up(node, name).await?;
            if attr.kind != Kind::Directory {
                return Err(FsError::NotDirectory);
            }
            node = attr.node;
        }
        Ok(node)
    }

    pub(super) async fn find(&self, path: &str) -> Result<Attr, FsError> {
        let (above, name) = split(path);
        let parent = self.walk(above).await?;
        self.look_up(parent, name).await
    }

    async fn look(&self, path: &str) -> Result<Told, FsError> {
        self.find(path).await.map(|attr| Told::Is(node_of(&attr)))
    }

    /// Looks for a name that is to be made.
    pub(super) async fn is_free(&self, parent: NodeId, name: &str) -> Result<(), FsError> {
        match self.look_up(parent, name).await {
            Ok(_) => Err(FsError::Exists),
            Err(FsError::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn create(&self, path: &str, file: u64) -> Result<Told, FsError> {
        let (above, name) = split(path);
        let parent = self.walk(above).await?;
        let _locked = self.inodes.lock(&[parent]).await;
        self.is_free(parent, name).await?;
        let name = name.as_bytes().to_vec();
        let leave = self.leave(Wanted::Change { parent, name: name.clone(), sure: true }).await?;
        let (namespace, caller) = (&self.running.namespace, self.caller(file));
        let (attr, open) = namespace.create(&caller, parent, &name, 0o644, O_WRONLY | O_EXCL)?;
        drop(leave);
        namespace.handles().flush(open.fh, &caller, false)?;
        namespace.handles().release(open.fh)?;
        let tree = Arc::clone(namespace);
        // As the engine does, soon after the close.
        if let Ok(ticket) = tree.seals().begin_seal(attr.node) {
            let _ = tree.seals().finish_seal(&ticket, Crc64(1), Arc::from([]));
        }
        namespace.forget(attr.node, 1);
        Ok(Told::Is(Node::File(file)))
    }

    pub(super) async fn mkdir(&self, path: &str, directory: u64) -> Result<Told, FsError> {
        let (above, name) = split(path);
        let parent = self.walk(above).await?;
        let _locked = self.inodes.lock(&[parent]).await;
        self.is_free(parent, name).await?;
        let name = name.as_bytes().to_vec();
        let leave = self.leave(Wanted::Change { parent, name: name.clone(), sure: false }).await?;
        let made = self.running.namespace.names().mkdir(&self.caller(directory), parent, &name, 0o755)?;
        leave.made(made.node);
        drop(leave);
        self.running.namespace.forget(made.node, 1);
        Ok(Told::Done)
    }

    pub(super) async fn remove(&self, path: &str, directory: bool) -> Result<Told, FsError> {
        let (above, name) = split(path);
        let parent = self.walk(above).await?;
        let _locked = self.inodes.lock(&[parent]).await;
        let attr = self.look_up(parent, name).await?;
        match (attr.kind == Kind::Directory, directory) {
            (true, false) => return Err(FsError::IsDirectory),
            (false, true) => return Err(FsError::NotDirectory),
            _ => {}
        }
        let _victim = if directory { self.inodes.lock(&[attr.node]).await } else { Vec::new() };
        let (namespace, caller) = (&self.running.namespace, self.caller(0));
        let name = name.as_bytes().to_vec();
        let leave = if directory {
            let leave = self.leave(Wanted::RemoveDirectory { parent, name: name.clone() }).await?;
            namespace.names().rmdir(&caller, parent, &name)?;
            leave
        } else {
            let leave = self.leave(Wanted::Change { parent, name: name.clone(), sure: true }).await?;
            namespace.names().unlink(&caller, parent, &name)?;
            leave
        };
        leave.order().await?;
        Ok(Told::Done)
    }

    pub(super) async fn rename(&self, from: &str, to: &str, no_replace: bool) -> Result<Told, FsError> {
        let ((from_above, from_name), (to_above, to_name)) = (split(from), split(to));
        let (old, new) = (self.walk(from_above).await?, self.walk(to_above).await?);
        let _locked = self.inodes.lock(&[old, new]).await;
        let source = self.look_up(old, from_name).await?;
        let target = match self.look_up(new, to_name).await {
            Ok(target) => Some(target),
            Err(FsError::NotFound) => None,
            Err(error) => return Err(error),
        };
        if let Some(target) = &target {
            if no_replace || target.node == source.node {
                // The kernel says so of two look-ups. Of one moment it is only if the first is right still.
                let is_still = self.look_up(old, from_name).await?.node == source.node;
                return match (is_still, no_replace) {
                    (false, _) => Err(FsError::Stale),
                    (true, true) => Err(FsError::Exists),
                    (true, false) => Ok(Told::Done),
                };
            }
            match (source.kind == Kind::Directory, target.kind == Kind::Directory) {
                (true, false) => return Err(FsError::NotDirectory),
                (false, true) => return Err(FsError::IsDirectory),
                _ => {}
            }
        }
        // The kernel refuses to move a directory below itself, and over one that it is in.
        let namespace = &self.running.namespace;
        let path_of = |node| namespace.nodes().path_of(node);
        let is_below = |node: NodeId, of: NodeId| {
            let (Some(path), Some(above)) = (path_of(node), path_of(of)) else { return false };
            path == above || path.starts_with(&[above.as_slice(), b"/"].concat())
        };
        if source.kind == Kind::Directory && is_below(new, source.node) {
            return Err(FsError::Invalid);
        }
        if target.as_ref().is_some_and(|target| target.kind == Kind::Directory && is_below(old, target.node))
        {
            return Err(FsError::NotEmpty);
        }
        let (from, to) = ((old, from_name.as_bytes().to_vec()), (new, to_name.as_bytes().to_vec()));
        let leave = self.leave(Wanted::Rename { from: from.clone(), to: to.clone() }).await?;
        let flags = if no_replace { RENAME_NOREPLACE } else { 0 };
        namespace.names().rename(&self.caller(0), (from.0, &from.1), (to.0, &to.1), flags)?;
        leave.moved((from.0, &from.1), (to.0, &to.1), false);
        leave.order().await?;
        Ok(Told::Done)
    }

    async fn link(&self, from: &str, to: &str) -> Result<Told, FsError> {
        let ((from_above, from_name), (to_above, to_name)) = (split(from), split(to));
        let old = self.walk(from_above).await?;
        let source = self.look_up(old, from_name).await?;
        let new = self.walk(to_above).await?;
        let _locked = self.inodes.lock(&[new]).await;
        self.is_free(new, to_name).await?;
        if source.kind == Kind::Directory {
            return Err(FsError::NotDirectory);
        }
        let name = to_name.as_bytes().to_vec();
        let wanted = Wanted::Link { node: source.node, to: (new, name.clone()) };
        let leave = self.leave(wanted).await?;
        let namespace = &self.running.namespace;
        let linked = namespace.names().link(&self.caller(0), source.node, new, &name)?;
        namespace.forget(linked.node, 1);
        leave.order().await?;
        Ok(Told::Done)
    }

    async fn list(&self, path: &str) -> Result<Told, FsError> {
        let directory = self.walk(path).await?;
        let _leave = self.leave(Wanted::List { directory }).await?;
        let namespace = &self.running.namespace;
        let mut names = BTreeMap::new();
        for entry in namespace.names().readdir(directory, 0)? {
            let attr = namespace.getattr(entry.node)?;
            let name = String::from_utf8(entry.name).expect("names of tests are UTF-8");
            names.insert(name, node_of(&attr));
        }
        Ok(Told::Names(names))
    }
}
