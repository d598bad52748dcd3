//! A coordinator's copy of the store: loaded at one revision, then followed.
//!
//! Owns: the copy and how it is brought forward. Does not own: when that is done (`role`).

use crate::key::Key;
use crate::state::State;
use crate::store::{Request, Response, Revision};
use std::sync::Arc;

/// Keys in a page. etcd counts the whole range for each page, so small pages are dear.
pub const PAGE_KEYS: usize = 50_000;

/// Transactions that are followed at once: some 100 KiB each at most.
pub const FOLLOW_TRANSACTIONS: usize = 64;

/// The result of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// More has to be requested.
    More,
    /// The copy is as of its revision, which was the newest.
    Current,
}

/// A copy.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Copy {
    pub(super) state: Arc<State>,
    /// The revision as of which the state is complete; `None`: nothing was loaded.
    pub(super) revision: Option<Revision>,
    loading: Option<Loading>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Loading {
    at: Option<Revision>,
    after: Option<Key>,
    state: State,
}

impl Copy {
    /// Returns the request that brings the copy forward.
    pub(super) fn request(&mut self) -> Request {
        if let (Some(after), None) = (self.revision, &self.loading) {
            return Request::Follow { after, limit: FOLLOW_TRANSACTIONS };
        }
        let loading = self.loading.get_or_insert_default();
        Request::Load { at: loading.at, after: loading.after.clone(), limit: PAGE_KEYS }
    }

    /// Takes the answer to [`Self::request`].
    pub(super) fn take(&mut self, response: Response) -> Progress {
        match (response, &mut self.loading) {
            (Response::Changes { to, changes }, None) => {
                let current = self.revision == Some(to);
                if !changes.is_empty() {
                    Arc::make_mut(&mut self.state).apply(&changes);
                }
                self.revision = Some(to);
                if current { Progress::Current } else { Progress::More }
            }
            (Response::Page { at, entries, more }, Some(loading)) => {
                loading.at = Some(at);
                loading.after = entries.last().map(|(key, _)| key.clone());
                let changes: Vec<_> = entries.into_iter().map(|(key, value)| (key, Some(value))).collect();
                loading.state.apply(&changes);
                if !more {
                    // A loaded state replaces the copy, because it lacks the keys that were removed meanwhile.
                    self.state = Arc::new(std::mem::take(&mut loading.state));
                    self.revision = Some(at);
                    self.loading = None;
                }
                Progress::More
            }
            (Response::Compacted, _) => {
                self.loading = Some(Loading::default());
                Progress::More
            }
            // No answer came: the same request is sent again.
            _ => Progress::More,
        }
    }
}
