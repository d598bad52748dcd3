//! Where a path leads: symbolic links, followed as the kernel follows them.
//!
//! Owns: the walk. Does not own: the tree; anything outside of the mount. The walk never accesses it: a path there may lead back through
//! the mount, and would wait for the very daemon that asks.

use super::view::NodeViews;
use super::{NodeId, ROOT};
use tidemark_protocol::report::path_text;

/// Most links followed for one path, as many as the kernel follows (MAXSYMLINKS).
const LINKS_MAX: usize = 40;

/// Treatment of a link that is the last name of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastLink {
    Followed,
    /// The link itself is meant.
    Kept,
}

/// Why a path leads nowhere in the mount.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Astray {
    #[error("it goes through more than {LINKS_MAX} symbolic links")]
    TooManyLinks,
    #[error("a symbolic link leads it to {to}, outside of the mount")]
    Outside { to: String },
}

impl NodeViews<'_> {
    /// Returns where `path`, relative to the mount, leads: a path without links, relative to the mount, as far as the tree has its names.
    /// Names that the tree lacks stay as they are. `mount`: the mount's path, for links with absolute targets. Costs a look-up for each
    /// name.
    ///
    /// # Errors
    /// The path leads out of the mount, or in circles.
    pub fn follow_links(&self, mount: &[u8], path: &[u8], last: LastLink) -> Result<Vec<u8>, Astray> {
        let child =
            |parent: NodeId, name: &[u8]| self.state.look(|state| state.tree.child(parent, name).ok());
        let target = |node: NodeId| self.state.look(|state| state.tree.target(node)).ok();
        follow(mount, path, last, child, target)
    }

    /// Returns the target of the symbolic link at a path, relative to the mount; none if there is no link.
    pub fn link_at(&self, path: &[u8]) -> Option<Vec<u8>> {
        self.state.look(|state| state.tree.target(state.tree.resolve(path).ok()?).ok())
    }
}

fn names(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."))
}

/// See [`NodeViews::follow_links`].
fn follow(
    mount: &[u8],
    path: &[u8],
    last: LastLink,
    child: impl Fn(NodeId, &[u8]) -> Option<NodeId>,
    target: impl Fn(NodeId) -> Option<Vec<u8>>,
) -> Result<Vec<u8>, Astray> {
    let mount: Vec<Vec<u8>> = names(mount).map(<[u8]>::to_vec).collect();
    // Position of the walk, from the machine's root, with the node of each name that is in the tree.
    let mut at: Vec<(Vec<u8>, Option<NodeId>)> = Vec::new();
    // Names left, the next one last. The path is absolute, so that a link may lead out of the mount and back.
    let mut left: Vec<Vec<u8>> = names(path).rev().map(<[u8]>::to_vec).collect();
    left.extend(mount.iter().rev().cloned());
    let mut links = 0;
    while let Some(name) = left.pop() {
        if name == b".." {
            at.pop();
            continue;
        }
        let above = at.last().map_or_else(|| mount.is_empty().then_some(ROOT), |(_, node)| *node);
        let is_mount = at.len() + 1 == mount.len()
            && mount.last() == Some(&name)
            && at.iter().zip(&mount).all(|((passed, _), expected)| passed == expected);
        let node = if is_mount { Some(ROOT) } else { above.and_then(|above| child(above, &name)) };
        let is_kept = last == LastLink::Kept && left.is_empty();
        let Some(text) = node.filter(|_| !is_kept).and_then(&target) else {
            at.push((name, node));
            continue;
        };
        links += 1;
        if links > LINKS_MAX {
            return Err(Astray::TooManyLinks);
        }
        if text.first() == Some(&b'/') {
            at.clear();
        }
        left.extend(names(&text).rev().map(<[u8]>::to_vec));
    }
    let at: Vec<Vec<u8>> = at.into_iter().map(|(name, _)| name).collect();
    match at.strip_prefix(&mount[..]) {
        Some(below) => Ok(below.join(&b'/')),
        None => Err(Astray::Outside { to: format!("/{}", path_text(&at.join(&b'/'))) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Follows `path` in a tree that has these names, with the targets of those that are links.
    fn led(
        nodes: &[(&str, Option<&str>)],
        mount: &str,
        path: &str,
        last: LastLink,
    ) -> Result<String, Astray> {
        let mut children: BTreeMap<(NodeId, Vec<u8>), NodeId> = BTreeMap::new();
        let mut targets: BTreeMap<NodeId, Vec<u8>> = BTreeMap::new();
        for (path, target) in nodes {
            let mut at = ROOT;
            for name in path.split('/') {
                let next = ROOT + 1 + children.len() as NodeId;
                at = *children.entry((at, name.as_bytes().to_vec())).or_insert(next);
            }
            targets.extend(target.map(|target| (at, target.as_bytes().to_vec())));
        }
        let child = |parent, name: &[u8]| children.get(&(parent, name.to_vec())).copied();
        let target = |node| targets.get(&node).cloned();
        follow(mount.as_bytes(), path.as_bytes(), last, child, target)
            .map(|path| String::from_utf8(path).unwrap())
    }

    const TREE: [(&str, Option<&str>); 11] = [
        ("run7/step100.pt", None),
        ("run7/last", Some("step100.pt")),
        ("current", Some("run7")),
        ("absolute", Some("/data/ckpt/run7/")),
        ("up/in", Some(".././run7")),
        ("around", Some("../ckpt/run7")),
        ("gone", Some("run9")),
        ("out", Some("/etc/passwd")),
        ("beside", Some("../ckptx/run7")),
        ("a", Some("b")),
        ("b", Some("a")),
    ];

    #[test]
    fn links_are_followed_wherever_they_stand_in_a_path() {
        for (path, expected) in [
            ("", ""),
            ("run7/step100.pt", "run7/step100.pt"),
            ("current", "run7"),
            ("current/step100.pt", "run7/step100.pt"),
            ("absolute/last", "run7/step100.pt"),
            ("up/in/last", "run7/step100.pt"),
            ("around/last", "run7/step100.pt"),
            ("gone/x", "run9/x"),
            ("absent/run7", "absent/run7"),
        ] {
            let found = led(&TREE, "/data/ckpt", path, LastLink::Followed);
            assert_eq!(found.as_deref(), Ok(expected), "{path}");
        }
        assert_eq!(led(&TREE, "/", "around/last", LastLink::Followed).as_deref(), Ok("ckpt/run7/last"));
    }

    #[test]
    fn the_last_link_is_kept_where_it_is_meant_itself() {
        for (path, expected) in
            [("run7/last", "run7/last"), ("current/last", "run7/last"), ("current", "current"), ("a", "a")]
        {
            assert_eq!(led(&TREE, "/data/ckpt", path, LastLink::Kept).as_deref(), Ok(expected), "{path}");
        }
    }

    #[test]
    fn a_path_that_leads_out_of_the_mount_or_in_circles_leads_nowhere() {
        let led = |path| led(&TREE, "/data/ckpt", path, LastLink::Followed);
        assert_eq!(led("out"), Err(Astray::Outside { to: "/etc/passwd".into() }));
        assert_eq!(led("beside/last"), Err(Astray::Outside { to: "/data/ckptx/run7/last".into() }));
        assert_eq!(led("a/x"), Err(Astray::TooManyLinks));
    }

    #[test]
    fn as_many_links_are_followed_as_the_kernel_follows() {
        let names: Vec<String> = (0..=LINKS_MAX + 1).map(|number| format!("l{number}")).collect();
        let chain: Vec<_> = names.windows(2).map(|pair| (pair[0].as_str(), Some(pair[1].as_str()))).collect();
        assert_eq!(led(&chain, "/ckpt", "l1", LastLink::Followed).as_deref(), Ok("l41"));
        assert_eq!(led(&chain, "/ckpt", "l0", LastLink::Followed), Err(Astray::TooManyLinks));
    }
}
