//! setattr: modes, owners, times, and truncation to a size.
//!
//! Owns: [`Namespace::setattr`]. Does not own: which bytes may change in place (`open`).

use super::State;
use super::attr::{Attr, SetAttr, SetTime, attr, freeze, mark_unwritten, observe, rebase};
use super::open::Change;
use super::overwrite::Overwrites;
use super::stale::{Patience, Spared};
use super::{Caller, FsError, Namespace, NodeId};

impl Namespace {
    /// Changes attributes. A new size takes the path of an open for update (`open`): in place, or with a copy
    /// while a seal's bytes are being read; then other attributes are set.
    ///
    /// # Errors
    /// [`FsError::Busy`] for a new size of a file whose bytes are elsewhere: fetch it first
    /// ([`HostCopies::cold`](super::HostCopies::cold)); [`FsError::Stale`] once where the name is to be looked up again, and nothing has
    /// changed; [`FsError::NoSpace`], [`FsError::NeverFits`], [`FsError::IsDirectory`], [`FsError::TooBig`].
    pub fn setattr(&self, caller: &Caller, node: NodeId, set: &SetAttr) -> Result<Attr, FsError> {
        if let Some(size_bytes) = set.size {
            self.overwrites().set_size(caller, node, size_bytes)?;
        }
        self.state.change(|state| {
            let target = state.tree.node_mut(node)?;
            if set.mode.is_none()
                && set.uid.is_none()
                && set.gid.is_none()
                && set.atime.is_none()
                && set.mtime.is_none()
            {
                return attr(node, target);
            }
            if set.mtime.is_some() {
                // Earlier writes are recorded first, so that a later write can be told apart from them.
                freeze(target)?;
                if target.file().is_ok_and(|file| file.fate.writers() > 0) {
                    mark_unwritten(target)?;
                }
            }
            if let Some(mode) = set.mode {
                target.mode = mode & target.body.mode_bits();
            }
            if set.mode.is_none() && (set.uid.is_some() || set.gid.is_some()) {
                target.mode = target.body.mode_after_chown(target.mode);
            }
            target.uid = set.uid.unwrap_or(target.uid);
            target.gid = set.gid.unwrap_or(target.gid);
            target.atime_ns = resolve(set.atime, caller.now_ns).unwrap_or(target.atime_ns);
            if let Some(mtime_ns) = resolve(set.mtime, caller.now_ns) {
                target.mtime_ns = mtime_ns;
            }
            state.note_attributes(node, caller.now_ns)?;
            attr(node, state.tree.node(node)?)
        })
    }
}

impl<'a> Overwrites<'a> {
    fn set_size(&self, caller: &Caller, node: NodeId, size_bytes: u64) -> Result<(), FsError> {
        let could_hold = self.room.could_hold(size_bytes, size_bytes);
        let mut patience = Patience::begin(caller.pid, Spared::First(size_bytes));
        let (old_bytes, change) = loop {
            let mut state = self.state.settle(node)?;
            if !patience.is_nameless() {
                let State { tree, stale, .. } = &mut *state;
                stale.send_back_if_forsaken(node, tree.node(node)?, caller.pid)?;
            }
            let target = state.tree.node(node)?;
            let file = target.file()?;
            if file.backing.is_none() && size_bytes > 0 && file.size_bytes > 0 {
                return Err(FsError::Busy);
            }
            let old_bytes = observe(target, file)?.size_bytes;
            if size_bytes > old_bytes {
                could_hold?;
            }
            let mut change = file.change(old_bytes, Spared::First(size_bytes));
            if file.fate.writers() > 0 && !file.is_held() {
                change = Change::InPlace;
            }
            let Some((mut state, change)) = self.without_new_node(state, node, change, &mut patience)? else {
                continue;
            };
            state.tree.file_mut(node)?.busy = true;
            break (old_bytes, change);
        };
        if change == Change::InPlace {
            // Before a byte is touched: a daemon that dies in between must not leave a seal over other bytes.
            self.state.change(|state| state.withdraw_seal(node, self.state.file_id(node)))?;
        }
        let prepared = self.prepare(node, change, size_bytes, old_bytes);
        self.state.change(|state| {
            // Truncated bytes make room as removed ones do, also if the old bytes were being sealed or uploaded.
            if size_bytes < old_bytes && change != Change::InPlace && prepared.is_ok() {
                state.departing.leaves(state.tree.node(node)?.file()?);
            }
            state.apply_change(
                self.state.incarnation,
                node,
                change,
                prepared,
                Some(size_bytes),
                caller.now_ns,
            )?;
            state.stale.settle(caller.pid, node);
            let target = state.tree.node_mut(node)?;
            target.mtime_ns = caller.now_ns;
            target.ctime_ns = caller.now_ns;
            rebase(target, size_bytes)
        })
    }
}

fn resolve(time: Option<SetTime>, now_ns: i64) -> Option<i64> {
    time.map(|time| match time {
        SetTime::Now => now_ns,
        SetTime::At(ns) => ns,
    })
}
