//! Places and checkpoints as people name them, on the tree of this node.
//!
//! Owns: following symbolic links of the mount, and the reading of a name that leads nowhere. Does not own: the grammar of names
//! (protocol), the walk (namespace), which checkpoint is meant (engine).
//!
//! Links are followed where a command is answered, so that on several nodes the coordinator's tree decides.

use crate::api::{Daemon, stopped};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use tidemark_engine::node::Wanted;
use tidemark_namespace::LastLink;
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

/// A place that leads to `typed` as a name, and to `written` as the text that answers write for it.
fn means_two(place: &Place, typed: &[u8], written: &[u8]) -> ApiError {
    let (place, written) = (OsStr::from_bytes(place.as_bytes()), OsStr::from_bytes(written));
    let what = format!("{place:?} is a name itself, and how answers write {written:?}");
    let action = format!("write {:?} for the first, and the name itself for the second", path_text(typed));
    ApiError::new(ErrorCode::Usage, what, action)
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
    /// Follows a place to its path. A place with escapes, as answers write paths, is unescaped only if nothing has the name as it was
    /// typed: an existing name is never taken for another.
    ///
    /// # Errors
    /// Not found, if the place leads out of the mount or in circles.
    pub(crate) async fn led(&self, place: &Place, last: LastLink) -> Result<Vec<u8>, ApiError> {
        let typed = self.follow(place, last);
        let Some(unescaped) = place.unescaped() else { return typed };
        if let Some(path) = self.meant(place, last).await? {
            return Ok(path);
        }
        self.meant(&unescaped, last).await?.map_or(typed, Ok)
    }

    /// The same for a command that changes something: a place that was copied from an answer must not change another one whose name is that
    /// text.
    ///
    /// # Errors
    /// Usage, where the place means something both as it was typed and as answers write paths; as [`Daemon::led`].
    pub(crate) async fn led_to_change(&self, place: &Place, last: LastLink) -> Result<Vec<u8>, ApiError> {
        self.means_one(place, last).await?;
        self.led(place, last).await
    }

    async fn means_one(&self, place: &Place, last: LastLink) -> Result<(), ApiError> {
        let Some(unescaped) = place.unescaped() else { return Ok(()) };
        match (self.meant(place, last).await?, self.meant(&unescaped, last).await?) {
            (Some(typed), Some(written)) if typed != written => Err(means_two(place, &typed, &written)),
            _ => Ok(()),
        }
    }

    /// Where a place leads, if that means something.
    async fn meant(&self, place: &Place, last: LastLink) -> Result<Option<Vec<u8>>, ApiError> {
        let Ok(path) = self.follow(place, last) else { return Ok(None) };
        let is_meant = self.node.is_meant(path.clone()).await.ok_or_else(stopped)?;
        Ok(is_meant.then_some(path))
    }

    fn follow(&self, place: &Place, last: LastLink) -> Result<Vec<u8>, ApiError> {
        let namespace = &self.node.shared().namespace;
        let mount = self.mountpoint().as_os_str().as_bytes();
        namespace.nodes().follow_links(mount, place.as_bytes(), last).map_err(|why| {
            let what = format!("{} leads nowhere in the mount: {why}", path_text(place.as_bytes()));
            ApiError::new(ErrorCode::NotFound, what, "name the path in the mount itself")
        })
    }

    /// Resolves a person's selector. A run's name may be a link in any case; `last` is about a path.
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

    /// The same for a command that changes something.
    ///
    /// # Errors
    /// As [`Daemon::led_to_change`].
    pub(crate) async fn wanted_to_change(
        &self,
        selector: &Selector,
        last: LastLink,
    ) -> Result<Wanted, ApiError> {
        match selector {
            Selector::LatestOf(run) | Selector::StepOf(run, _) => {
                self.means_one(run, LastLink::Followed).await?;
            }
            Selector::At(place) => self.means_one(place, last).await?,
            Selector::Latest | Selector::Step(_) => {}
        }
        self.wanted(selector, last).await
    }

    /// Resolves a selector of what is to be removed for good. A link is never taken for its target: a person who removes a link means the
    /// link.
    ///
    /// # Errors
    /// The selector names a link; else as [`Daemon::led_to_change`].
    pub(crate) async fn wanted_to_remove(&self, selector: &Selector) -> Result<Wanted, ApiError> {
        let wanted = self.wanted_to_change(selector, LastLink::Kept).await?;
        if let Wanted::Path(path) = &wanted
            && let Some(target) = self.node.shared().namespace.nodes().link_at(path)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_means_two_names_both_and_how_each_is_written() {
        let place = Place::relative(b"run/a%25").unwrap();
        let refusal = means_two(&place, b"run/a%25", b"run/a%");
        assert_eq!(refusal.code, ErrorCode::Usage);
        assert!(refusal.what.contains("\"run/a%25\"") && refusal.what.contains("\"run/a%\""), "{refusal}");
        assert!(refusal.action.contains("\"run/a%2525\""), "{refusal}");
    }
}
