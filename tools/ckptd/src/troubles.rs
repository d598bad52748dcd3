//! Resources removed from under this daemon: its mount, its state directory, its etcd.
//!
//! Owns: whether that is so now, and the report for people. Does not own: looking (`up`, `seat`).

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use tidemark_protocol::report::{Pending, PendingReason, Problem, ProblemCode};

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Troubles {
    mount_gone: AtomicBool,
    /// Why the state directory could not be made again.
    state_dir: Mutex<Option<String>>,
    /// Why the etcd that has the coordinator's lease did not answer last.
    etcd: Mutex<Option<String>>,
    /// Why the catalog of this coordinator is not kept in etcd.
    catalog: Mutex<Option<String>>,
}

impl Troubles {
    /// The mount is not at its path any more, and never comes back there. True the first time.
    pub(crate) fn mount_is_gone(&self) -> bool {
        !self.mount_gone.swap(true, Ordering::AcqRel)
    }

    /// The state directory is gone, and this is why it stays so. True where that was not known.
    pub(crate) fn state_dir_is_gone(&self, why: &str) -> bool {
        let known = self.state_dir.lock().unwrap_or_else(PoisonError::into_inner).replace(why.to_owned());
        known.as_deref() != Some(why)
    }

    pub(crate) fn state_dir_is_back(&self) {
        *self.state_dir.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Records how the last read of the lease failed; `None` if it did not.
    pub(crate) fn etcd_is(&self, away: Option<&String>) {
        *self.etcd.lock().unwrap_or_else(PoisonError::into_inner) = away.cloned();
    }

    /// Why etcd has not taken the last change of the catalog; none where it has.
    pub(crate) fn catalog_is(&self, not_kept: Option<String>) {
        *self.catalog.lock().unwrap_or_else(PoisonError::into_inner) = not_kept;
    }

    /// Describes the fault of the mount in a sentence; `None` if there is no fault.
    pub(crate) fn mount_gone(&self, mountpoint: &Path) -> Option<String> {
        self.mount_gone.load(Ordering::Acquire).then(|| {
            format!(
                "the mount is not at {} any more (it was unmounted by hand, or something was mounted over it); what is written \
                 there now is not saved here",
                mountpoint.display()
            )
        })
    }

    pub(crate) fn problems(&self, mountpoint: &Path) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(what) = self.mount_gone(mountpoint) {
            let action = "end the jobs that use the path, then stop ckptd, which drains what it has, and start it again";
            problems.push(Problem::new(ProblemCode::MountGone, what, action));
        }
        if let Some(why) = self.state_dir.lock().unwrap_or_else(PoisonError::into_inner).as_deref() {
            problems.push(Problem::new(
                ProblemCode::StateDirGone,
                format!("the state directory was removed, and ckptctl does not reach this daemon: {why}"),
                "make place for it, or stop ckptd by a signal to its keeper and start it again",
            ));
        }
        if let Some(why) = self.etcd.lock().unwrap_or_else(PoisonError::into_inner).as_deref() {
            problems.push(Problem::new(
                ProblemCode::EtcdAway,
                format!("this node cannot ask etcd who the coordinator is, and cannot become it: {why}"),
                "look at the etcd and at the network from this node to it",
            ));
        }
        if let Some(why) = self.catalog.lock().unwrap_or_else(PoisonError::into_inner).as_deref() {
            problems.push(Problem::new(
                ProblemCode::CatalogNotKept,
                format!("etcd does not take the changes of names: {why}"),
                "look at the etcd: its disk, its quota (`etcdctl endpoint status`, `etcdctl alarm list`)",
            ));
        }
        problems
    }

    /// A flush that found everything durable must not pass over files that went elsewhere.
    pub(crate) fn pending(&self, mountpoint: &Path) -> Option<Pending> {
        let what = self.mount_gone(mountpoint)?;
        Some(Pending { path: String::new(), reason: PendingReason::Unknown, what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_said_once_to_the_log_and_for_as_long_as_it_lasts_to_people() {
        let (troubles, mount) = (Troubles::default(), Path::new("/ckpt"));
        assert!(troubles.problems(mount).is_empty() && troubles.pending(mount).is_none());
        assert!(troubles.mount_is_gone() && !troubles.mount_is_gone());
        assert!(troubles.state_dir_is_gone("full") && !troubles.state_dir_is_gone("full"));
        assert!(troubles.state_dir_is_gone("held by another"));
        let codes: Vec<_> = troubles.problems(mount).into_iter().map(|problem| problem.code).collect();
        assert_eq!(codes, ["mount_gone", "state_dir_gone"]);
        assert!(troubles.pending(mount).unwrap().what.contains("/ckpt"));
        troubles.state_dir_is_back();
        troubles.etcd_is(Some(&"no route".to_owned()));
        let codes: Vec<_> = troubles.problems(mount).into_iter().map(|problem| problem.code).collect();
        assert_eq!(codes, ["mount_gone", "etcd_away"]);
        troubles.etcd_is(None);
        assert_eq!(troubles.problems(mount).len(), 1);
    }
}
