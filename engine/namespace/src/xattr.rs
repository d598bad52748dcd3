//! Extended attributes: `user.*` is stored, `user.tidemark.*` is computed, except the metric, which is the job's own.
//!
//! Owns: their storage and bounds. Does not own: the computed values ([`XattrSource`]).

use super::guarded::Guarded;
use super::node::Name;
use super::session::Answer;
use super::{Caller, FsError, NodeId};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, RwLock};
use tidemark_protocol::retention::METRIC_XATTR;

/// XATTR_NAME_MAX of Linux.
const MAX_XATTR_NAME_BYTES: usize = 255;
/// XATTR_SIZE_MAX of Linux; one value must also fit one record of the journal.
const MAX_XATTR_VALUE_BYTES: usize = 64 << 10;
/// All names and values of one node: what a manifest can afford to repeat.
const MAX_XATTR_NODE_BYTES: usize = 128 << 10;

/// setxattr(2): fail where it exists, fail where it does not.
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;

const STORED: &[u8] = b"user.";
const COMPUTED: &[u8] = b"user.tidemark.";

fn is_computed(name: &[u8]) -> bool {
    name.starts_with(COMPUTED) && name != METRIC_XATTR.as_bytes()
}

/// Source of the `user.tidemark.*` attributes. Called without any lock held; may look at the namespace.
pub trait XattrSource: Send + Sync + fmt::Debug {
    /// Returns the value of `name` (whole, with its prefix) on `node`; none if there is no such attribute.
    ///
    /// # Errors
    /// Any, as the caller of getxattr(2) shall see it.
    fn get(&self, node: NodeId, name: &[u8]) -> Result<Option<Vec<u8>>, FsError>;

    /// Takes a value written to `name` as a command.
    ///
    /// # Errors
    /// Any, as the caller of setxattr(2) shall see it.
    fn set(&self, node: NodeId, name: &[u8], value: &[u8]) -> Result<(), FsError>;
}

/// The stored attributes of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Xattrs {
    pub(super) values: BTreeMap<Name, Box<[u8]>>,
}

impl Xattrs {
    /// None if the node has no attributes at all, as is true of nearly every node.
    pub(super) fn from_pairs(pairs: &[(Vec<u8>, Vec<u8>)]) -> Result<Option<Box<Self>>, FsError> {
        let mut xattrs = Self::default();
        for (name, value) in pairs {
            check(name, value)?;
            xattrs.values.insert(Arc::from(name.as_slice()), value.as_slice().into());
        }
        if xattrs.size_bytes() > MAX_XATTR_NODE_BYTES {
            return Err(FsError::TooBig);
        }
        Ok((!xattrs.values.is_empty()).then(|| Box::new(xattrs)))
    }

    pub(super) fn names(&self) -> impl Iterator<Item = Name> + '_ {
        self.values.keys().map(Arc::clone)
    }

    pub(super) fn pairs(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        self.values.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect()
    }

    fn size_bytes(&self) -> usize {
        self.values.iter().map(|(name, value)| name.len() + value.len()).sum()
    }
}

fn check(name: &[u8], value: &[u8]) -> Result<(), FsError> {
    if !name.starts_with(STORED) {
        return Err(FsError::Unsupported);
    }
    if name.len() == STORED.len() {
        return Err(FsError::Invalid);
    }
    if name.len() > MAX_XATTR_NAME_BYTES || name.contains(&0) {
        return Err(FsError::Range);
    }
    if value.len() > MAX_XATTR_VALUE_BYTES {
        return Err(FsError::TooBig);
    }
    Ok(())
}

/// Calls on extended attributes.
#[derive(Debug, Clone, Copy)]
pub struct XattrCalls<'a> {
    pub(super) state: &'a Guarded,
    pub(super) source: &'a RwLock<Option<Arc<dyn XattrSource>>>,
}

impl XattrCalls<'_> {
    /// Sets the source of `user.tidemark.*`.
    pub fn set_xattr_source(&self, source: Arc<dyn XattrSource>) {
        *self.source.write().expect(super::UNPOISONED) = Some(source);
    }

    fn computed_by(&self, name: &[u8]) -> Option<Arc<dyn XattrSource>> {
        if !is_computed(name) {
            return None;
        }
        self.source.read().expect(super::UNPOISONED).clone()
    }

    /// # Errors
    /// [`FsError::NoAttribute`], also for every name outside `user.`; [`FsError::Stale`].
    pub fn getxattr(&self, node: NodeId, name: &[u8]) -> Result<Vec<u8>, FsError> {
        if let Some(source) = self.computed_by(name) {
            return source.get(node, name)?.ok_or(FsError::NoAttribute);
        }
        self.state.look(|state| {
            let xattrs = state.tree.node(node)?.xattrs.as_ref().ok_or(FsError::NoAttribute)?;
            xattrs.values.get(name).map(|value| value.to_vec()).ok_or(FsError::NoAttribute)
        })
    }

    /// Stores an attribute; `flags` as setxattr(2) has them.
    ///
    /// # Errors
    /// [`FsError::Unsupported`] outside `user.`; [`FsError::Exists`], [`FsError::NoAttribute`] by the flags; [`FsError::Invalid`] for
    /// `user.` alone and other flags, [`FsError::Range`] for a bad name, [`FsError::TooBig`] over 64 KiB, [`FsError::NoSpace`] over 128
    /// KiB per node.
    pub fn setxattr(
        &self,
        node: NodeId,
        name: &[u8],
        value: &[u8],
        flags: u32,
        caller: &Caller,
    ) -> Result<(), FsError> {
        check(name, value)?;
        if let Some(source) = self.computed_by(name) {
            return source.set(node, name, value);
        }
        if is_computed(name) {
            return Err(FsError::NotPermitted);
        }
        let limit = self.state.weight_limit();
        self.state.change(|state| {
            let full = state.tree.weight_bytes + (name.len() + value.len()) as u64 > limit;
            let target = state.tree.node_mut(node)?;
            let old_bytes =
                target.xattrs.as_ref().and_then(|xattrs| xattrs.values.get(name)).map(|old| old.len());
            match old_bytes {
                _ if flags & !(XATTR_CREATE | XATTR_REPLACE) != 0 => return Err(FsError::Invalid),
                Some(_) if flags & XATTR_CREATE != 0 => return Err(FsError::Exists),
                None if flags & XATTR_REPLACE != 0 => return Err(FsError::NoAttribute),
                Some(_) | None => {}
            }
            let kept = target.xattrs.as_ref().map_or(0, |xattrs| xattrs.size_bytes());
            let replaced = old_bytes.map_or(0, |old| old + name.len());
            if full || kept - replaced + name.len() + value.len() > MAX_XATTR_NODE_BYTES {
                return Err(FsError::NoSpace);
            }
            let key: Name = Arc::from(name);
            target.xattrs.get_or_insert_default().values.insert(Arc::clone(&key), value.into());
            state.tree.weight_bytes += (name.len() + value.len()) as u64;
            state.tree.weight_bytes -= replaced as u64;
            state.tree.touched.xattrs.push((node, key));
            state.note_attributes(node, caller.now_ns)?;
            state.session.answer(caller.request, Answer::Done);
            Ok(())
        })
    }

    /// Names of the stored attributes; the computed ones are not listed, so that copying tools leave them.
    ///
    /// # Errors
    /// [`FsError::Stale`].
    pub fn listxattr(&self, node: NodeId) -> Result<Vec<Vec<u8>>, FsError> {
        self.state.look(|state| {
            let xattrs = state.tree.node(node)?.xattrs.as_ref();
            Ok(xattrs
                .map_or_else(Vec::new, |xattrs| xattrs.values.keys().map(|name| name.to_vec()).collect()))
        })
    }

    /// # Errors
    /// [`FsError::NoAttribute`]; [`FsError::NotPermitted`] for a computed one.
    pub fn removexattr(&self, node: NodeId, name: &[u8], caller: &Caller) -> Result<(), FsError> {
        if is_computed(name) {
            return Err(FsError::NotPermitted);
        }
        self.state.change(|state| {
            let target = state.tree.node_mut(node)?;
            let xattrs = target.xattrs.as_mut().ok_or(FsError::NoAttribute)?;
            let (key, old) = xattrs.values.remove_entry(name).ok_or(FsError::NoAttribute)?;
            if xattrs.values.is_empty() {
                target.xattrs = None;
            }
            state.tree.weight_bytes -= (key.len() + old.len()) as u64;
            state.tree.touched.xattrs.push((node, key));
            state.note_attributes(node, caller.now_ns)?;
            state.session.answer(caller.request, Answer::Done);
            Ok(())
        })
    }
}
