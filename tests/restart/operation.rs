//! Operations on a tree: drawn at random, and applied to the model and to the mount.
//!
//! Owns: the set of operations and how likely each is. Does not own: their effects (`model`, the kernel).

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, Timespec, Timestamps, Uid, XattrFlags, chownat,
    linkat, lremovexattr, lsetxattr, mknodat, renameat_with, utimensat,
};
use tidemark_tests::campaign::dice::Dice;

use crate::model::{Id, Kind, Model, Refused, Time};

/// Names to draw from, few, so that operations meet. Two are of checkpoints in one file. The last two are of one checkpoint of two
/// files, one of which can be removed alone.
const NAMES: [&str; 10] =
    ["a", "b", "c", "log.txt", "d", "e", "step1.pt", "step2.pt", "rank0.pt", "rank1.pt"];
const XATTRS: [&str; 3] = ["user.a", "user.b", "user.long.name"];
/// Depth of nested directories.
const DEPTH_MOST: usize = 3;
/// Chance, as one in this many operations, to put a checkpoint's bytes aside and save others under its name, and the same chance to
/// bring them back.
const ASIDE_ONE_IN: u64 = 25;
/// Age from which a time cannot come from a write just now.
const CLOCK_WITHIN: Duration = Duration::from_secs(1);
/// Files that one sequence has open for writing at once.
const HELD_MOST: usize = 2;

/// An operation on a tree.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// An open, a write and a close, with `truncate`, or at an offset, where `None` is the end.
    Write {
        path: String,
        exclusive: bool,
        truncate: bool,
        offset: Option<usize>,
        bytes: Vec<u8>,
    },
    Truncate {
        path: String,
        size_bytes: usize,
    },
    Rename {
        from: String,
        to: String,
        no_replace: bool,
    },
    Exchange {
        one: String,
        other: String,
    },
    Link {
        from: String,
        to: String,
    },
    Symlink {
        path: String,
        target: String,
    },
    Pipe {
        path: String,
        mode: u32,
    },
    /// A regular file, by mknod(2).
    Mknod {
        path: String,
        mode: u32,
    },
    Unlink {
        path: String,
    },
    Mkdir {
        path: String,
        mode: u32,
    },
    Rmdir {
        path: String,
    },
    Chmod {
        path: String,
        mode: u32,
    },
    Chown {
        path: String,
        uid: u32,
        gid: u32,
    },
    Utimens {
        path: String,
        mtime: Time,
    },
    SetXattr {
        path: String,
        name: &'static str,
        value: Vec<u8>,
    },
    RemoveXattr {
        path: String,
        name: &'static str,
    },
    /// Opens a file for writing and keeps it open.
    Hold {
        path: String,
    },
    WriteHeld {
        which: usize,
        bytes: Vec<u8>,
    },
    CloseHeld {
        which: usize,
    },
}

/// A tree: a directory of the mount, its model, and its open files.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) root: PathBuf,
    pub(crate) model: Model,
    pub(crate) done: Vec<Operation>,
    held: Vec<(Id, File)>,
    /// Operations that follow from the last draw.
    planned: VecDeque<Operation>,
    /// Names of earlier bytes of checkpoints, and the names that they had.
    aside: Vec<(String, String)>,
    dice: Dice,
}

impl Sequence {
    /// Begins a sequence in a directory of its own, which it makes.
    pub(crate) fn begin(root: PathBuf, dice: Dice) -> io::Result<Self> {
        std::fs::create_dir(&root)?;
        std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o755))?;
        let (planned, aside) = (VecDeque::new(), Vec::new());
        Ok(Self { root, model: Model::new(0o755), done: Vec::new(), held: Vec::new(), planned, aside, dice })
    }

    /// Draws an operation and applies it to the model and to the mount.
    ///
    /// # Errors
    /// When the mount and the model do not agree whether it fails.
    pub(crate) fn step(&mut self) -> Result<(), String> {
        let operation = self.throw();
        let expected = self.expect(&operation);
        let done = self.perform(&operation);
        self.done.push(operation);
        match (expected, done) {
            (Ok(opened), Ok(file)) => {
                self.held.extend(opened.zip(file));
                Ok(())
            }
            (Err(Refused), Err(_)) => Ok(()),
            (Ok(_), Err(error)) => Err(format!("the mount refused the last operation: {error}")),
            (Err(Refused), Ok(_)) => {
                Err("the mount did what POSIX refuses with the last operation".to_owned())
            }
        }
    }

    /// Returns the path and the bytes of a file that has one name.
    pub(crate) fn file_of_one_name(&self) -> Option<(PathBuf, &[u8])> {
        let counts = self.model.link_counts();
        self.model.paths().into_iter().find_map(|(path, id)| {
            let Kind::File(bytes) = &self.model.node(id).kind else { return None };
            (counts[&id] == 1).then(|| (self.at(&path), bytes.as_slice()))
        })
    }

    pub(crate) fn close_all(&mut self) {
        self.held.clear();
    }

    /// Plans a save over a checkpoint in one file whose earlier bytes keep a name, as a "best" does: `ln`, `rm`, and a new file.
    fn put_aside(&mut self) {
        let is_one = |(path, id): &(String, Id)| {
            path.ends_with(".pt") && matches!(self.model.node(*id).kind, Kind::File(_))
        };
        let Some((path, _)) = self.model.paths().into_iter().find(is_one) else { return };
        let kept = format!("{path}.kept{}", self.done.len());
        self.aside.push((kept.clone(), path.clone()));
        let bytes = some_bytes(&mut self.dice);
        self.planned.extend([
            Operation::Link { from: path.clone(), to: kept },
            Operation::Unlink { path: path.clone() },
            Operation::Write { path, exclusive: false, truncate: true, offset: None, bytes },
        ]);
    }

    fn throw(&mut self) -> Operation {
        if self.dice.one_in(ASIDE_ONE_IN) {
            self.put_aside();
        }
        if let Some(planned) = self.planned.pop_front() {
            return planned;
        }
        if !self.aside.is_empty() && self.dice.one_in(ASIDE_ONE_IN) {
            let (from, to) = self.aside.remove(0);
            return Operation::Rename { from, to, no_replace: false };
        }
        let paths = self.model.paths();
        let dice = &mut self.dice;
        let any = |dice: &mut Dice| paths[below(dice, paths.len())].0.clone();
        let of_kind = |dice: &mut Dice, is: fn(&Kind) -> bool| {
            let fitting: Vec<_> = paths.iter().filter(|(_, id)| is(&self.model.node(*id).kind)).collect();
            if fitting.is_empty() { String::new() } else { fitting[below(dice, fitting.len())].0.clone() }
        };
        let file = |dice: &mut Dice| of_kind(dice, |kind| matches!(kind, Kind::File(_)));
        let no_symlink = |dice: &mut Dice| of_kind(dice, |kind| !matches!(kind, Kind::Symlink(_)));
        let with_xattrs =
            |dice: &mut Dice| of_kind(dice, |kind| matches!(kind, Kind::File(_) | Kind::Directory(_)));
        // The name exists, or may not exist.
        let name = |dice: &mut Dice| {
            let above = of_kind(dice, |kind| matches!(kind, Kind::Directory(_)));
            let name = NAMES[below(dice, NAMES.len())];
            let above = if above.matches('/').count() + 1 >= DEPTH_MOST { String::new() } else { above };
            if above.is_empty() { name.to_owned() } else { format!("{above}/{name}") }
        };
        match dice.within(0..100) {
            0..16 => {
                let (path, bytes) = (name(dice), some_bytes(dice));
                Operation::Write { path, exclusive: dice.one_in(8), truncate: true, offset: None, bytes }
            }
            16..24 => {
                let (path, bytes) = (file(dice), some_bytes(dice));
                let offset = dice.one_in(3).then(|| below(dice, 4096));
                Operation::Write { path, exclusive: false, truncate: false, offset, bytes }
            }
            24..28 => Operation::Truncate { path: file(dice), size_bytes: below(dice, 6000) },
            28..40 => Operation::Rename { from: any(dice), to: name(dice), no_replace: dice.one_in(6) },
            40..44 => Operation::Exchange { one: any(dice), other: any(dice) },
            44..50 => Operation::Link { from: any(dice), to: name(dice) },
            50 if dice.one_in(2) => Operation::Mknod { path: name(dice), mode: permissions(dice) },
            50 => Operation::Pipe { path: name(dice), mode: permissions(dice) | more_bits(dice) },
            51..55 => Operation::Symlink { path: name(dice), target: format!("to/{}", dice.within(0..1000)) },
            55..63 => Operation::Unlink { path: any(dice) },
            63..69 => Operation::Mkdir { path: name(dice), mode: permissions(dice) | 0o700 },
            69..72 => {
                // The root of the tree stays.
                let path = Some(of_kind(dice, |kind| matches!(kind, Kind::Directory(_))));
                Operation::Rmdir { path: path.filter(|path| !path.is_empty()).unwrap_or_else(|| name(dice)) }
            }
            72..77 => Operation::Chmod { path: no_symlink(dice), mode: permissions(dice) },
            77..81 => {
                let (path, uid, gid) = (any(dice), id(dice), id(dice));
                Operation::Chown { path, uid, gid }
            }
            81..86 => {
                let seconds = i64::try_from(dice.within(0..3_000_000_000)).expect("it fits");
                let nanoseconds = u32::try_from(dice.within(0..1_000_000_000)).expect("it fits");
                Operation::Utimens { path: any(dice), mtime: (seconds, nanoseconds) }
            }
            86..91 => {
                let (path, name) = (with_xattrs(dice), XATTRS[below(dice, XATTRS.len())]);
                let size_bytes = below(dice, 200);
                Operation::SetXattr { path, name, value: dice.bytes(size_bytes) }
            }
            91..93 => {
                Operation::RemoveXattr { path: with_xattrs(dice), name: XATTRS[below(dice, XATTRS.len())] }
            }
            93..96 if self.held.len() < HELD_MOST => Operation::Hold { path: file(dice) },
            93..98 if !self.held.is_empty() => {
                let which = below(dice, self.held.len());
                Operation::WriteHeld { which, bytes: some_bytes(dice) }
            }
            _ if !self.held.is_empty() => Operation::CloseHeld { which: below(dice, self.held.len()) },
            _ => Operation::Mkdir { path: name(dice), mode: 0o755 },
        }
    }

    /// Applies an operation to the model. Returns its result and the file that it opened to be held.
    fn expect(&mut self, operation: &Operation) -> Result<Option<Id>, Refused> {
        let model = &mut self.model;
        match operation {
            Operation::Write { path, exclusive, truncate, offset, bytes } => {
                let id = model.open(path, *truncate, *exclusive, *truncate, 0o644)?;
                model.write(id, *offset, bytes)
            }
            Operation::Truncate { path, size_bytes } => {
                let id = model.open(path, false, false, false, 0)?;
                model.truncate(id, *size_bytes)
            }
            Operation::Rename { from, to, no_replace } => model.rename(from, to, *no_replace),
            Operation::Exchange { one, other } => model.exchange(one, other),
            Operation::Link { from, to } => model.link(from, to),
            Operation::Symlink { path, target } => model.symlink(path, target),
            Operation::Pipe { path, mode } => model.pipe(path, *mode),
            Operation::Mknod { path, mode } => {
                model.open(path, true, true, false, 0)?;
                model.chmod(path, *mode)
            }
            Operation::Unlink { path } => model.unlink(path),
            Operation::Mkdir { path, mode } => model.mkdir(path, *mode),
            Operation::Rmdir { path } => model.rmdir(path),
            Operation::Chmod { path, mode } => model.chmod(path, *mode),
            Operation::Chown { path, uid, gid } => model.chown(path, *uid, *gid),
            Operation::Utimens { path, mtime } => model.utimens(path, *mtime),
            Operation::SetXattr { path, name, value } => model.set_xattr(path, name, value),
            Operation::RemoveXattr { path, name } => model.remove_xattr(path, name),
            Operation::Hold { path } => return model.open(path, false, false, false, 0).map(Some),
            Operation::WriteHeld { which, bytes } => model.write(self.held[*which].0, Some(0), bytes),
            Operation::CloseHeld { .. } => Ok(()),
        }
        .map(|()| None)
    }

    /// Performs an operation on the mount. Returns the file that is to stay open.
    fn perform(&mut self, operation: &Operation) -> io::Result<Option<File>> {
        let at = |path: &str| if path.is_empty() { self.root.clone() } else { self.root.join(path) };
        let open = |path: &str| no_follow().write(true).open(at(path));
        match operation {
            Operation::Write { path, exclusive, truncate, offset, bytes } => {
                let mut options = no_follow();
                options.create(*truncate).truncate(*truncate).create_new(*exclusive);
                options.append(!*truncate && offset.is_none()).write(true);
                let mut file = options.mode(0o644).open(at(path))?;
                match offset {
                    Some(offset) => file.write_all_at(bytes, *offset as u64)?,
                    None => file.write_all(bytes)?,
                }
            }
            Operation::Truncate { path, size_bytes } => open(path)?.set_len(*size_bytes as u64)?,
            Operation::Rename { from, to, no_replace } => {
                let flags = if *no_replace { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
                renameat_with(CWD, at(from), CWD, at(to), flags)?;
            }
            Operation::Exchange { one, other } => {
                renameat_with(CWD, at(one), CWD, at(other), RenameFlags::EXCHANGE)?;
            }
            Operation::Link { from, to } => linkat(CWD, at(from), CWD, at(to), AtFlags::empty())?,
            Operation::Symlink { path, target } => std::os::unix::fs::symlink(target, at(path))?,
            Operation::Pipe { path, mode } => {
                mknodat(CWD, at(path), FileType::Fifo, Mode::empty(), 0)?;
                std::fs::set_permissions(at(path), std::fs::Permissions::from_mode(*mode))?;
            }
            Operation::Mknod { path, mode } => {
                mknodat(CWD, at(path), FileType::RegularFile, Mode::empty(), 0)?;
                std::fs::set_permissions(at(path), std::fs::Permissions::from_mode(*mode))?;
            }
            Operation::Unlink { path } => std::fs::remove_file(at(path))?,
            Operation::Mkdir { path, mode } => {
                std::fs::create_dir(at(path))?;
                std::fs::set_permissions(at(path), std::fs::Permissions::from_mode(*mode))?;
            }
            Operation::Rmdir { path } => std::fs::remove_dir(at(path))?,
            Operation::Chmod { path, mode } => {
                std::fs::set_permissions(at(path), std::fs::Permissions::from_mode(*mode))?;
            }
            Operation::Chown { path, uid, gid } => {
                let (uid, gid) = (Some(Uid::from_raw(*uid)), Some(Gid::from_raw(*gid)));
                chownat(CWD, at(path), uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Operation::Utimens { path, mtime } => {
                let time = Timespec { tv_sec: mtime.0, tv_nsec: mtime.1.into() };
                let times = Timestamps { last_access: time, last_modification: time };
                utimensat(CWD, at(path), &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Operation::SetXattr { path, name, value } => {
                lsetxattr(at(path), *name, value, XattrFlags::empty())?
            }
            Operation::RemoveXattr { path, name } => lremovexattr(at(path), *name)?,
            Operation::Hold { path } => return open(path).map(Some),
            Operation::WriteHeld { which, bytes } => write_held(&self.held[*which].1, bytes)?,
            Operation::CloseHeld { which } => drop(self.held.swap_remove(*which)),
        }
        Ok(None)
    }
}

/// Writes, and checks that this moved a time that was not the clock's.
fn write_held(file: &File, bytes: &[u8]) -> io::Result<()> {
    let before = file.metadata()?.modified()?;
    file.write_all_at(bytes, 0)?;
    let was_set = !before.elapsed().is_ok_and(|ago| ago <= CLOCK_WITHIN);
    if was_set && !bytes.is_empty() && file.metadata()?.modified()? == before {
        return Err(io::Error::other("the write did not move the file's time"));
    }
    Ok(())
}

fn no_follow() -> OpenOptions {
    let mut options = File::options();
    // O_NONBLOCK refuses a pipe without a reader, which an open would wait for.
    options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    options
}

fn below(dice: &mut Dice, count: usize) -> usize {
    usize::try_from(dice.within(0..count as u64)).expect("below a length")
}

/// Returns bytes, mostly few, now and then none, seldom many.
fn some_bytes(dice: &mut Dice) -> Vec<u8> {
    let size_bytes = match dice.within(0..20) {
        0 => 0,
        1 => 300_000,
        _ => 1 + below(dice, 3000),
    };
    dice.bytes(size_bytes)
}

/// Returns permission bits that a mount keeps on files too: no suid, no sgid.
fn permissions(dice: &mut Dice) -> u32 {
    u32::try_from(dice.within(0..0o1000)).expect("nine bits")
}

/// Returns the bits that only files lose.
fn more_bits(dice: &mut Dice) -> u32 {
    u32::try_from(dice.within(0..8)).expect("three bits") << 9
}

fn id(dice: &mut Dice) -> u32 {
    u32::try_from(dice.within(0..5000)).expect("it fits")
}

/// The attributes of a name, as stat(2), read(2), readlink(2) and listxattr(2) show them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: Option<Time>,
    pub(crate) links: u64,
    /// The first path with the same inode.
    pub(crate) same_as: String,
    pub(crate) xattrs: BTreeMap<String, Vec<u8>>,
}

/// Entries of a tree, by path.
pub(crate) type Entries = BTreeMap<String, Entry>;

impl Sequence {
    /// Returns the entries that the model expects. A directory's content is compared by its entries' own rows.
    pub(crate) fn expected(&self) -> Entries {
        let counts = self.model.link_counts();
        let mut first: BTreeMap<Id, String> = BTreeMap::new();
        let row = |(path, id): (String, Id)| {
            let node = self.model.node(id);
            let same_as = first.entry(id).or_insert_with(|| path.clone()).clone();
            let kind = match &node.kind {
                Kind::Directory(_) => Kind::Directory(BTreeMap::new()),
                other => other.clone(),
            };
            let entry = Entry {
                kind,
                mode: node.mode,
                uid: node.uid,
                gid: node.gid,
                mtime: node.mtime,
                links: counts[&id],
                same_as,
                xattrs: node.xattrs.clone(),
            };
            (path, entry)
        };
        self.model.paths().into_iter().map(row).collect()
    }

    /// Reads the entries that the mount shows.
    pub(crate) fn seen(&self) -> io::Result<Entries> {
        let mut paths = vec![String::new()];
        let mut at = 0;
        while at < paths.len() {
            let path = paths[at].clone();
            let whole = self.at(&path);
            if whole.symlink_metadata()?.is_dir() {
                for entry in std::fs::read_dir(&whole)? {
                    let name = entry?.file_name().to_string_lossy().into_owned();
                    paths.push(if path.is_empty() { name } else { format!("{path}/{name}") });
                }
            }
            at += 1;
        }
        paths.sort();
        let mut first: BTreeMap<u64, String> = BTreeMap::new();
        let mut seen = Entries::new();
        for path in paths {
            let entry = look(&self.at(&path), &path, &mut first)?;
            seen.insert(path, entry);
        }
        Ok(seen)
    }

    fn at(&self, path: &str) -> PathBuf {
        if path.is_empty() { self.root.clone() } else { self.root.join(path) }
    }
}

fn look(whole: &Path, path: &str, first: &mut BTreeMap<u64, String>) -> io::Result<Entry> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let stat = whole.symlink_metadata()?;
    let kind = if stat.is_dir() {
        Kind::Directory(BTreeMap::new())
    } else if stat.is_symlink() {
        Kind::Symlink(std::fs::read_link(whole)?.to_string_lossy().into_owned())
    } else if stat.file_type().is_fifo() {
        Kind::Pipe
    } else {
        let bytes = std::fs::read(whole)?;
        if bytes.len() as u64 != stat.len() {
            return Err(io::Error::other(format!("{path}: {} bytes, st_size {}", bytes.len(), stat.len())));
        }
        Kind::File(bytes)
    };
    let mut xattrs = BTreeMap::new();
    if stat.is_file() || stat.is_dir() {
        let mut names = vec![0; 4096];
        let size_bytes = rustix::fs::llistxattr(whole, names.as_mut_slice())?;
        for name in names[..size_bytes].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let mut value = vec![0; 4096];
            let size_bytes = rustix::fs::lgetxattr(whole, name, value.as_mut_slice())?;
            value.truncate(size_bytes);
            xattrs.insert(String::from_utf8_lossy(name).into_owned(), value);
        }
    }
    Ok(Entry {
        kind,
        mode: stat.mode() & 0o7777,
        uid: stat.uid(),
        gid: stat.gid(),
        mtime: Some((stat.mtime(), u32::try_from(stat.mtime_nsec()).map_err(io::Error::other)?)),
        links: stat.nlink(),
        same_as: first.entry(stat.ino()).or_insert_with(|| path.to_owned()).clone(),
        xattrs,
    })
}

/// Returns the differences, a line each. Where no time is expected, any time is accepted.
pub(crate) fn differences(expected: &Entries, seen: &Entries) -> Vec<String> {
    let mut lines = Vec::new();
    for (path, entry) in expected {
        let Some(found) = seen.get(path) else {
            lines.push(format!("{path:?} is not there; it was {}", text(entry)));
            continue;
        };
        let mtime = entry.mtime.or(found.mtime);
        if *found != (Entry { mtime, ..entry.clone() }) {
            lines.push(format!("{path:?} is {}, and must be {}", text(found), text(entry)));
        }
    }
    let more = seen.iter().filter(|(path, _)| !expected.contains_key(*path));
    lines.extend(more.map(|(path, entry)| format!("{path:?} is there: {}", text(entry))));
    lines
}

/// Formats an entry without its bytes.
fn text(entry: &Entry) -> String {
    let kind = match &entry.kind {
        Kind::File(bytes) => format!("{} bytes, {}", bytes.len(), &blake3::hash(bytes).to_hex()[..8]),
        Kind::Directory(_) => "a directory".to_owned(),
        Kind::Pipe => "a pipe".to_owned(),
        Kind::Symlink(target) => format!("a link to {target}"),
    };
    let Entry { mode, uid, gid, mtime, links, same_as, xattrs, .. } = entry;
    let xattrs: Vec<_> =
        xattrs.iter().map(|(name, value)| format!("{name}={}", &blake3::hash(value).to_hex()[..6])).collect();
    format!("{kind}, {mode:o} {uid}:{gid} mtime {mtime:?} links {links} as {same_as:?} {xattrs:?}")
}
