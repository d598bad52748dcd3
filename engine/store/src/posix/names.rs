//! Conversion of a key to a path below the root, and back.
//!
//! Owns: the splitting of parts that are too long for a file name. Does not own: the general rules for keys
//! (`check_key`).
//!
//! A part of up to 250 bytes is a file name as it is, so that a copy made with plain tools has the names that
//! the framework chose. A longer part is cut into directories: each piece but the last ends with `~+`. A part
//! that itself ends with one of our two marks gets `~-` appended, which keeps the mapping reversible.

use std::path::{Path, PathBuf};

/// Maximum number of bytes of a piece. File names hold 255 bytes on every file system we know of; the marks
/// need two.
const NAME_BYTES: usize = 250;
/// The mark of a piece whose part continues in the directory of that name.
const GOES_ON: &str = "~+";
/// The mark of a part that ended with a mark by itself.
const ENDS: &str = "~-";

/// The directory of files that are being written; no key begins with it.
pub(super) const STAGING: &str = ".tidemark-staging";

/// Returns the path of `key` below `root`. The key was checked: no part is empty, `.` or `..`.
pub(super) fn path_of(root: &Path, key: &str) -> PathBuf {
    let mut path = root.to_owned();
    for part in key.split('/') {
        let mut rest = part;
        while rest.len() > NAME_BYTES {
            let at = rest.floor_char_boundary(NAME_BYTES);
            let (piece, tail) = rest.split_at(at);
            path.push(format!("{piece}{GOES_ON}"));
            rest = tail;
        }
        if rest.ends_with(GOES_ON) || rest.ends_with(ENDS) {
            path.push(format!("{rest}{ENDS}"));
        } else {
            path.push(rest);
        }
    }
    path
}

/// The part of a key that a directory entry adds.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// The beginning of a part that continues in this directory.
    GoesOn(&'a str),
    /// The whole, or the end, of a part.
    Ends(&'a str),
}

pub(super) fn piece_of(name: &str) -> Piece<'_> {
    if let Some(piece) = name.strip_suffix(GOES_ON) {
        return Piece::GoesOn(piece);
    }
    Piece::Ends(name.strip_suffix(ENDS).unwrap_or(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the key of a path made by `path_of`, read the way a listing does.
    fn key_of(root: &Path, path: &Path) -> String {
        let mut key = String::new();
        for name in path.strip_prefix(root).expect("below the root").iter() {
            match piece_of(name.to_str().expect("UTF-8")) {
                Piece::GoesOn(piece) => key.push_str(piece),
                Piece::Ends(piece) => {
                    key.push_str(piece);
                    key.push('/');
                }
            }
        }
        key.pop();
        key
    }

    proptest! {
        #[test]
        fn every_key_comes_back_from_its_path(parts in prop::collection::vec("([a-zü~+-]{1,12}|[aé~+-]{240,700})", 1..4)) {
            let key = parts.join("/");
            prop_assume!(parts.iter().all(|p| p != "." && p != ".."));
            let root = Path::new("/root");
            let path = path_of(root, &key);
            prop_assert!(path.iter().all(|name| name.len() <= 255));
            prop_assert_eq!(key_of(root, &path), key);
        }
    }

    #[test]
    fn short_parts_keep_their_names() {
        assert_eq!(
            path_of(Path::new("/r"), "run/step.pt/_COMMITTED"),
            Path::new("/r/run/step.pt/_COMMITTED")
        );
    }
}
