//! Places and checkpoints as people name them, on the tree of this node.
//!
//! Owns: following symbolic links of the mount, and how a name that leads nowhere reads. Does not own: the grammar of names (protocol), the
//! walk (namespace), which checkpoint is meant (engine).
//!
//! Links are followed where a command is answered, so that on several nodes the coordinator's tree decides.

use crate::api::{Daemon, stopped};
use std::os::unix::ffi::OsStrExt;
use tidemark_engine::namespace::LastLink;
use tidemark_engine::node::Wanted;
use tidemark_protocol::report::{ApiError, ErrorCode, path_text};
use tidemark_protocol::selector::{Place, Selector};

const SHOWS: &str = "`ckptctl ls` shows what there is";

pub(crate) fn not_found(what: &str) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("there is no checkpoint {what}"), SHOWS)
}

fn nothing_at(place: &[u8]) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("there is nothing at {}", path_text(place)), SHOWS)
}

/// A command about the bytes of files found none.
pub(crate) fn no_file_at(place: &[u8]) -> ApiError {
    let what = format!("there is no file at or below {}", path_text(place));
    ApiError::new(ErrorCode::NotFound, what, SHOWS)
}

/// The place itself, or not found where nothing has that path.
pub(crate) fn known(place: Vec<u8>, is_known: Option<bool>) -> Result<Vec<u8>, ApiError> {
    if is_known.ok_or_else(stopped)? { Ok(place) } else { Err(nothing_at(&place)) }
}

/// A selector as a person types it.
pub(crate) fn described(selector: &Selector) -> String {
    let text = |place: &Place| path_text(place.as_bytes());
    match selector {
        Selector::Latest => "latest".to_owned(),
        Selector::LatestOf(run) => format!("{}@latest", text(run)),
        Selector::Step(step) => format!("@{step}"),
        Selector::StepOf(run, step) => format!("{}@{step}", text(run)),
        Selector::At(place) => text(place),
    }
}

impl Daemon {
    /// Where a place leads. One with escapes, as answers write paths, is read so where nothing has the name as it was typed: a name that is
    /// there is never taken for another.
    ///
    /// # Errors
    /// Not found, where it leads out of the mount or in circles.
    pub(crate) async fn led(&self, place: &Place, last: LastLink) -> Result<Vec<u8>, ApiError> {
        let typed = self.follow(place, last);
        let Some(unescaped) = place.unescaped() else { return typed };
        if let Ok(path) = &typed
            && self.node.is_meant(path.clone()).await.ok_or_else(stopped)?
        {
            return typed;
        }
        if let Ok(path) = self.follow(&unescaped, last)
            && self.node.is_meant(path.clone()).await.ok_or_else(stopped)?
        {
            return Ok(path);
        }
        typed
    }

    fn follow(&self, place: &Place, last: LastLink) -> Result<Vec<u8>, ApiError> {
        let namespace = &self.node.shared().namespace;
        let mount = self.mountpoint().as_os_str().as_bytes();
        namespace.follow_links(mount, place.as_bytes(), last).map_err(|why| {
            let what = format!("{} leads nowhere in the mount: {why}", path_text(place.as_bytes()));
            ApiError::new(ErrorCode::NotFound, what, "name the path in the mount itself")
        })
    }

    /// What a person names. A run's name may be a link in any case; `last` is about a path.
    ///
    /// # Errors
    /// As [`Daemon::led`].
    pub(crate) async fn wanted(&self, selector: &Selector, last: LastLink) -> Result<Wanted, ApiError> {
        let run = match selector {
            Selector::LatestOf(run) | Selector::StepOf(run, _) => {
                Some(self.led(run, LastLink::Followed).await?)
            }
            Selector::Latest | Selector::Step(_) | Selector::At(_) => None,
        };
        Ok(match selector {
            Selector::Latest | Selector::LatestOf(_) => Wanted::Latest { run },
            Selector::Step(step) | Selector::StepOf(_, step) => Wanted::Step { run, step: *step },
            Selector::At(place) => Wanted::Path(self.led(place, last).await?),
        })
    }

    /// What is to be removed for good. A link is never taken for what it leads to: somebody who removes a link means the link.
    ///
    /// # Errors
    /// It is a link; as [`Daemon::led`].
    pub(crate) async fn wanted_to_remove(&self, selector: &Selector) -> Result<Wanted, ApiError> {
        let wanted = self.wanted(selector, LastLink::Kept).await?;
        if let Wanted::Path(path) = &wanted
            && let Some(target) = self.node.shared().namespace.link_at(path)
        {
            let what = format!("{} is a symbolic link to {}", path_text(path), path_text(&target));
            let action = "name the checkpoint itself, or remove the link with `rm` in the mount";
            return Err(ApiError::new(ErrorCode::Usage, what, action));
        }
        Ok(wanted)
    }

    /// The place of what is in the tree, for commands about its bytes.
    ///
    /// # Errors
    /// Nothing in the tree has the path; a step or `latest` means none, or several.
    pub(crate) async fn place_of(&self, selector: &Selector) -> Result<Vec<u8>, ApiError> {
        match self.wanted(selector, LastLink::Followed).await? {
            Wanted::Path(place) => {
                let is_in_tree = self.node.is_in_tree(place.clone()).await;
                known(place, is_in_tree)
            }
            wanted => {
                let found = self.node.path_of(wanted).await.ok_or_else(stopped)??;
                found.ok_or_else(|| not_found(&described(selector)))
            }
        }
    }
}
