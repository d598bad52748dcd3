//! Listing what lies below the directory of the store.
//!
//! Owns: which entries are objects, and common prefixes. Does not own: the names (`names`), the proof that the directory is the store's
//! (`root`).
//!
//! The walk goes from descriptor to descriptor. If a mount goes away meanwhile, the walk ends with an error, and not with an answer that
//! lacks objects. Symbolic links count neither as objects nor as directories.

use super::names::{Piece, STAGING, path_of, piece_of};
use super::root::Root;
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;

/// An object that [`walk`] found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) key: String,
    pub(super) size_bytes: u64,
}

/// Returns objects and, with `delimiter`, common prefixes below `prefix`; at most `limit` of both, `None` beyond.
pub(super) fn walk(
    root: &Root,
    prefix: &str,
    delimiter: bool,
    limit: usize,
) -> io::Result<Option<(Vec<Found>, Vec<String>)>> {
    // Everything below the last `/` of the prefix lies in one directory, so the walk begins there.
    let folder = prefix.rfind('/').map_or("", |at| &prefix[..at]);
    let (start, base) = match folder {
        "" => (root.path().to_owned(), String::new()),
        folder => (path_of(root.path(), folder), format!("{folder}/")),
    };
    let inside = root.enter()?;
    inside.prove()?;
    let mut walk = Walk { root, prefix, delimiter, limit, found: Vec::new(), prefixes: Vec::new() };
    // If the directory is missing, or the prefix passes through an object, nothing is below.
    if let Some(start) = inside.found(inside.open(&start, OFlags::RDONLY | OFlags::DIRECTORY))?
        && !walk.directory(start, &base)?
    {
        return Ok(None);
    }
    walk.found.sort_by(|a, b| a.key.cmp(&b.key));
    walk.prefixes.sort();
    Ok(Some((walk.found, walk.prefixes)))
}

struct Walk<'a> {
    root: &'a Root,
    prefix: &'a str,
    delimiter: bool,
    limit: usize,
    found: Vec<Found>,
    prefixes: Vec<String>,
}

impl Walk<'_> {
    /// Walks one directory whose entries continue the key text `base`; returns `false` when the limit is reached. Keys have at most 1024
    /// bytes, which bounds the depth.
    fn directory(&mut self, directory: OwnedFd, base: &str) -> io::Result<bool> {
        if base.len() > super::super::MAX_KEY_BYTES {
            return Ok(true);
        }
        let mut entries = Dir::new(directory)?;
        while let Some((name, there)) = next_of(&mut entries)? {
            if base.is_empty() && name == STAGING {
                continue;
            }
            let kind = FileType::from_raw_mode(there.st_mode);
            let text = match piece_of(&name) {
                Piece::GoesOn(piece) if kind == FileType::Directory => {
                    let text = format!("{base}{piece}");
                    if self.leads_to(&text) && !self.below(&entries, &name, &text)? {
                        return Ok(false);
                    }
                    continue;
                }
                Piece::GoesOn(_) => continue,
                Piece::Ends(piece) => format!("{base}{piece}"),
            };
            if kind == FileType::Directory {
                let text = format!("{text}/");
                let folds = self.delimiter && text.len() > self.prefix.len() && text.starts_with(self.prefix);
                if folds {
                    if has_object(&entries, &name)? {
                        self.prefixes.push(text);
                    }
                } else if self.leads_to(&text) && !self.below(&entries, &name, &text)? {
                    return Ok(false);
                }
            } else if kind == FileType::Symlink && self.leads_to(&text) {
                self.root.leaves_out(&text);
            } else if kind == FileType::RegularFile && text.starts_with(self.prefix) {
                let size_bytes = u64::try_from(there.st_size).unwrap_or_default();
                self.found.push(Found { key: text, size_bytes });
            }
            if self.found.len() + self.prefixes.len() > self.limit {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn below(&mut self, above: &Dir, name: &str, text: &str) -> io::Result<bool> {
        match open_below(above, name)? {
            Some(directory) => self.directory(directory, text),
            None => Ok(true),
        }
    }

    /// Whether keys that begin with `text` can begin with the prefix.
    fn leads_to(&self, text: &str) -> bool {
        text.starts_with(self.prefix) || self.prefix.starts_with(text)
    }
}

/// Whether a directory holds an object. A directory without objects is no prefix: a crash between mkdir and link leaves such directories.
fn has_object(above: &Dir, name: &str) -> io::Result<bool> {
    let Some(directory) = open_below(above, name)? else { return Ok(false) };
    let mut entries = Dir::new(directory)?;
    while let Some((name, there)) = next_of(&mut entries)? {
        let found = match FileType::from_raw_mode(there.st_mode) {
            FileType::RegularFile => true,
            FileType::Directory => has_object(&entries, &name)?,
            _ => false,
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the next entry whose name can be one of ours, and its kind; none at the end.
fn next_of(entries: &mut Dir) -> io::Result<Option<(String, Stat)>> {
    while let Some(entry) = entries.read() {
        let entry = match entry {
            Ok(entry) => entry,
            // The directory was removed meanwhile.
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        // A name that is not UTF-8 is no key, so not ours.
        let Ok(name) = entry.file_name().to_str() else { continue };
        if name == "." || name == ".." {
            continue;
        }
        match fs::statat(entries.fd()?, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) => return Ok(Some((name.to_owned(), there))),
            // Removed meanwhile, or closed to the daemon's user.
            Err(Errno::NOENT | Errno::ACCESS) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(None)
}

/// Opens a directory that a listing found; none if it was removed, or replaced by something else, meanwhile.
fn open_below(above: &Dir, name: &str) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match fs::openat(above.fd()?, name, flags, Mode::empty()) {
        Ok(directory) => Ok(Some(directory)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}
