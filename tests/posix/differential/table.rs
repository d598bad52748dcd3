//! All scenarios.
//!
//! Owns: the table and the form of a row. Does not own: the rows of each subject (the files beside
//! this).

use super::world::World;
use super::{bytes, locks, names, opens};

/// A sequence of calls.
pub(crate) struct Scenario {
    pub(crate) name: String,
    /// The mark of the paragraph that says that the mount differs.
    pub(crate) differs: Option<&'static str>,
    pub(crate) run: Box<dyn Fn(&World) + Sync>,
}

pub(crate) fn scenario(name: impl Into<String>, run: impl Fn(&World) + Sync + 'static) -> Scenario {
    Scenario { name: name.into(), differs: None, run: Box::new(run) }
}

/// Makes a scenario that the mount answers otherwise.
pub(crate) fn otherwise(mark: &'static str, name: &str, run: impl Fn(&World) + Sync + 'static) -> Scenario {
    Scenario { differs: Some(mark), ..scenario(name, run) }
}

/// Makes two scenarios, with a file that was just closed, and with one at rest. `make` makes the file.
pub(crate) fn fresh_and_at_rest(
    name: &str,
    run: impl Fn(&World, &dyn Fn(&str, &[u8])) + Sync + Send + Copy + 'static,
) -> [Scenario; 2] {
    [
        scenario(format!("{name}, just closed"), move |w| run(w, &|name, bytes| w.put(name, bytes))),
        scenario(format!("{name}, at rest"), move |w| run(w, &|name, bytes| w.at_rest(name, bytes))),
    ]
}

pub(crate) fn scenarios() -> Vec<Scenario> {
    [opens::scenarios(), names::scenarios(), bytes::scenarios(), locks::scenarios()]
        .into_iter()
        .flatten()
        .collect()
}
