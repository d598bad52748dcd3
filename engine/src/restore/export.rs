//! Writes a version's files into an ordinary directory outside the mount, all or nothing.
//!
//! Owns: the order (a name beside the target, files, links, attributes, fsync, rename), attributes that the target's file
//! system does not accept. Does not own: which version (`node::export`), chunks from Tier-3 (`fetch`).
//!
//! The daemon writes the files, not the client, because a version that the tree no longer shows has no name on the mount. Every
//! byte is verified against the manifest here, host copies too.

use crate::restore::Restorer;
use crate::restore::fetch::{FetchError, FetchPlan};
use futures::stream::{self, StreamExt, TryStreamExt};
use rustix::fs::{AtFlags, CWD, Gid, Mode, RenameFlags, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tidemark_namespace::{Namespace, SealPin};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::encoding::ObjectLayout;
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::key::{VersionId, checkpoint_path};
use tidemark_protocol::layout::{chunk_count, chunk_range};
use tidemark_protocol::manifest::{Attributes, Manifest, ManifestFile};
use tidemark_protocol::path::RelPath;

/// Maximum number of files on their way; each has as many chunks in flight as a cold open.
const FILES_IN_FLIGHT: usize = 2;

/// Mode of directories that the manifest does not list.
const DIRECTORY_MODE: u32 = 0o755;

/// Mode bits that the mount keeps: no suid, and sgid on directories only, so that an exported program never runs as another user.
const DIRECTORY_MODE_MAX: u32 = 0o3777;
const FILE_MODE_MAX: u32 = 0o1777;

/// The result of an export.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Exported {
    pub files: u64,
    pub bytes: u64,
    /// Number of these files whose bytes were in this node's memory.
    pub host_files: u64,
    /// Attributes that the target's file system refused, or the daemon lacks the rights for, each once.
    pub left_out: BTreeSet<String>,
}

/// The reason why nothing was exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("{} is there already, and nothing is overwritten", target.display())]
    Exists { target: PathBuf },
    #[error("{} is no place to export to: {why}", target.display())]
    Place { target: PathBuf, why: &'static str },
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("{what} {} failed", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
}

impl ExportError {
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Exists { .. } | Self::Place { .. } => ErrorKind::Invalid,
            // A failed write is the target's fault, not the checkpoint's.
            Self::Fetch(FetchError::Write { .. }) | Self::Io { .. } => ErrorKind::NoSpace,
            Self::Fetch(error) => error.kind(),
        }
    }
}

fn failed<'a>(what: &'static str, path: &'a Path) -> impl Fn(io::Error) -> ExportError + use<'a> {
    move |source| ExportError::Io { what, path: path.to_owned(), source }
}

/// Writes all that `manifest` lists into `target`, which is absolute and must not exist. When this returns `Ok`, the target is
/// whole and synced. Calls `tell` with the bytes and files done.
///
/// Costs a read of every byte, and `FILES_IN_FLIGHT` times the chunks in flight of memory. Dropping the future removes the draft.
/// A write still under way may leave files below the hidden name; the log reports them.
pub async fn export(
    restorer: &Restorer,
    manifest: &Arc<Manifest>,
    target: PathBuf,
    tell: impl Fn(u64, u64, &RelPath),
) -> Result<Exported, ExportError> {
    let places = Arc::new(Places::of(manifest));
    let plan = (Arc::clone(manifest), Arc::clone(&places), target.clone());
    let draft = blocking(move || Draft::make(&plan.0, &plan.1, plan.2)).await?;
    let mut exported = Exported::default();
    let files = (0..manifest.files.len()).map(|index| {
        let manifest = Arc::clone(manifest);
        let path = draft.path.join(places.of_file(&manifest.files[index].path));
        async move { write_file(restorer, &manifest.files[index], path).await.map(|written| (index, written)) }
    });
    let mut running = stream::iter(files).buffer_unordered(FILES_IN_FLIGHT);
    while let Some((index, (left_out, host))) = running.try_next().await? {
        let file = &manifest.files[index];
        exported.left_out.extend(left_out);
        exported.host_files += u64::from(host);
        exported.files += 1;
        exported.bytes += file.size_bytes;
        tell(exported.bytes, exported.files, &file.path);
    }
    drop(running);
    let (manifest, finished) = (Arc::clone(manifest), Arc::clone(&places));
    let left_out = blocking(move || draft.finish(&manifest, &finished)).await?;
    exported.left_out.extend(left_out);
    Ok(exported)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ExportError> + Send + 'static,
) -> Result<T, ExportError> {
    tokio::task::spawn_blocking(work).await.expect("writing files does not panic")
}

/// Translation of the mount's paths to paths below the target.
#[derive(Debug)]
struct Places {
    version: VersionId,
    top: Vec<u8>,
}

impl Places {
    fn of(manifest: &Manifest) -> Self {
        let version = manifest.version.clone();
        let top = checkpoint_path(&version.run, &version.directory);
        Self { version, top }
    }

    /// Returns the place of a file or a link. A checkpoint that is one file lies in the target under its own name.
    fn of_file(&self, path: &RelPath) -> PathBuf {
        if path.as_bytes() == self.top {
            return PathBuf::from(OsStr::from_bytes(path.name()));
        }
        self.of_path(path)
    }

    /// Returns the place of a path; empty for the checkpoint's own directory. A manifest's paths were checked when it was read:
    /// none is absolute, has `..` or leads through a link.
    fn of_path(&self, path: &RelPath) -> PathBuf {
        if path.as_bytes() == self.top {
            return PathBuf::new();
        }
        let relative = self.version.relative(path).unwrap_or_else(|| path.clone());
        PathBuf::from(OsStr::from_bytes(relative.as_bytes()))
    }
}

/// The export under a hidden name; removed on drop unless it was renamed to the target.
#[derive(Debug)]
struct Draft {
    path: PathBuf,
    target: PathBuf,
    done: bool,
}

impl Draft {
    fn make(manifest: &Manifest, places: &Places, target: PathBuf) -> Result<Self, ExportError> {
        let refused = |why| ExportError::Place { target: target.clone(), why };
        let (Some(above), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(refused("it is no new name in a directory"));
        };
        match fs::symlink_metadata(&target) {
            Ok(_) => return Err(ExportError::Exists { target }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("looking at", &target)(error)),
        }
        let number = getrandom::u64().expect("the kernel has random numbers");
        let hidden = [b".", name.as_bytes(), format!(".export-{number:016x}").as_bytes()].concat();
        let path = above.join(OsStr::from_bytes(&hidden));
        make_directory(&path, 0o700)?;
        let draft = Self { path, target, done: false };
        let single = manifest.files.iter().map(|file| &file.path);
        let links = manifest.hard_links.iter().map(|link| &link.path);
        let symlinks = manifest.symlinks.iter().map(|link| &link.path);
        let listed = manifest.directories.iter().map(|directory| places.of_path(&directory.path));
        let above = single
            .chain(links)
            .chain(symlinks)
            .filter_map(|path| places.of_file(path).parent().map(Path::to_owned));
        let all: BTreeSet<PathBuf> = listed.chain(above).collect();
        for directory in all.iter().filter(|directory| !directory.as_os_str().is_empty()) {
            let mut builder = DirBuilder::new();
            let path = draft.path.join(directory);
            builder.recursive(true).mode(DIRECTORY_MODE).create(&path).map_err(failed("making", &path))?;
        }
        Ok(draft)
    }

    /// Finishes the export after the files: links, then the attributes of directories from the innermost out, then the name.
    fn finish(mut self, manifest: &Manifest, places: &Places) -> Result<BTreeSet<String>, ExportError> {
        let mut left_out = BTreeSet::new();
        for link in &manifest.hard_links {
            let (from, to) =
                (self.path.join(places.of_file(&link.to)), self.path.join(places.of_file(&link.path)));
            fs::hard_link(&from, &to).map_err(failed("linking", &to))?;
        }
        for link in &manifest.symlinks {
            let path = self.path.join(places.of_file(&link.path));
            std::os::unix::fs::symlink(OsStr::from_bytes(&link.target.0), &path)
                .map_err(failed("linking", &path))?;
            let owner = rustix::fs::chownat(
                CWD,
                &path,
                Some(Uid::from_raw(link.uid)),
                Some(Gid::from_raw(link.gid)),
                AtFlags::SYMLINK_NOFOLLOW,
            );
            note_refusal(&mut left_out, "owners", owner, &path)?;
            rustix::fs::utimensat(CWD, &path, &times(link.mtime_ns), AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|error| failed("setting the time of", &path)(error.into()))?;
        }
        let listed: BTreeMap<PathBuf, &Attributes> = manifest
            .directories
            .iter()
            .map(|directory| (self.path.join(places.of_path(&directory.path)), &directory.attributes))
            .collect();
        let mut directories = vec![self.path.clone()];
        below(&self.path, &mut directories)?;
        directories.sort_unstable_by(|a, b| b.cmp(a));
        for path in &directories {
            let file = File::open(path).map_err(failed("opening", path))?;
            match listed.get(path) {
                Some(attributes) => {
                    left_out.extend(set_attributes(&file, attributes, DIRECTORY_MODE_MAX, path)?);
                }
                None => rustix::fs::fchmod(&file, Mode::from_raw_mode(DIRECTORY_MODE))
                    .map_err(|error| failed("setting the mode of", path)(error.into()))?,
            }
            file.sync_all().map_err(failed("syncing", path))?;
        }
        match rustix::fs::renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::EXIST | Errno::NOTEMPTY) => {
                return Err(ExportError::Exists { target: self.target.clone() });
            }
            // A file system that cannot refuse to replace a directory replaces only an empty one.
            Err(Errno::INVAL | Errno::NOSYS) => {
                fs::rename(&self.path, &self.target).map_err(failed("naming", &self.target))?;
            }
            Err(error) => return Err(failed("naming", &self.target)(error.into())),
        }
        self.done = true;
        let above = self.target.parent().unwrap_or_else(|| Path::new("/"));
        let synced = File::open(above).and_then(|above| above.sync_all());
        synced.map_err(failed("syncing", above))?;
        Ok(left_out)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.done
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "what was left of an export stays");
        }
    }
}

fn make_directory(path: &Path, mode: u32) -> Result<(), ExportError> {
    DirBuilder::new().mode(mode).create(path).map_err(failed("making", path))
}

/// Appends the directories below `path` to `found`. No other program makes names there, and links are not followed.
fn below(path: &Path, found: &mut Vec<PathBuf>) -> Result<(), ExportError> {
    for entry in fs::read_dir(path).map_err(failed("listing", path))? {
        let entry = entry.map_err(failed("listing", path))?;
        if entry.file_type().map_err(failed("listing", path))?.is_dir() {
            found.push(entry.path());
            below(&entry.path(), found)?;
        }
    }
    Ok(())
}

/// Writes one file, from this node's memory if that copy verifies, else from Tier-3. Returns the attributes that were left out,
/// and whether memory had the file.
async fn write_file(
    restorer: &Restorer,
    file: &ManifestFile,
    path: PathBuf,
) -> Result<(BTreeSet<String>, bool), ExportError> {
    let (made, at) = (path.clone(), path.clone());
    let target = blocking(move || {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        options.open(&made).map(Arc::new).map_err(failed("making", &made))
    });
    let target = target.await?;
    let chunks: Arc<[Crc64]> = file.chunks.clone().into();
    let pin = pinned(&restorer.namespace, file);
    let host = match pin {
        Some(pin) => {
            let (target, chunks) = (Arc::clone(&target), Arc::clone(&chunks));
            blocking(move || copy_host(&pin, &chunks, &target, &at)).await?
        }
        None => false,
    };
    if !host {
        let plan = FetchPlan {
            path: file.path.to_string(),
            key: file.key.clone(),
            size_bytes: file.size_bytes,
            chunks,
            layout: ObjectLayout::new(file.size_bytes, file.encoding.as_ref()),
        };
        restorer.fetch(plan, Arc::clone(&target)).await?;
    }
    let attributes = file.attributes.clone();
    let left_out = blocking(move || {
        let left_out = set_attributes(&target, &attributes, FILE_MODE_MAX, &path)?;
        target.sync_all().map_err(failed("syncing", &path))?;
        Ok(left_out)
    });
    Ok((left_out.await?, host))
}

fn pinned(namespace: &Namespace, file: &ManifestFile) -> Option<SealPin> {
    namespace.seals().pin_seal(file.file, file.seal).filter(|pin| pin.size_bytes == file.size_bytes)
}

/// Copies a host copy, chunk by chunk. Returns false if the copy differs from the manifest: the caller then reads Tier-3, and
/// overwrites the target.
fn copy_host(pin: &SealPin, chunks: &[Crc64], target: &File, path: &Path) -> Result<bool, ExportError> {
    let mut buffer = Vec::new();
    for (chunk, expected) in (0..chunk_count(pin.size_bytes)).zip(chunks) {
        let range = chunk_range(pin.size_bytes, chunk);
        buffer.resize(usize::try_from(range.end - range.start).expect("a chunk fits an address space"), 0);
        if pin.backing.read_exact_at(&mut buffer, range.start).is_err()
            || Crc64(tidemark_kernels::crc64(&buffer)) != *expected
        {
            return Ok(false);
        }
        target.write_all_at(&buffer, range.start).map_err(failed("writing", path))?;
    }
    Ok(true)
}

fn times(mtime_ns: i64) -> Timestamps {
    const NS_PER_S: i64 = 1_000_000_000;
    let last_modification =
        Timespec { tv_sec: mtime_ns.div_euclid(NS_PER_S), tv_nsec: mtime_ns.rem_euclid(NS_PER_S) };
    Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification }
}

/// Sets a file's attributes, without mode bits outside `mode_max`. Returns the attributes that were left out.
fn set_attributes(
    file: &File,
    attributes: &Attributes,
    mode_max: u32,
    path: &Path,
) -> Result<BTreeSet<String>, ExportError> {
    let mut left_out = BTreeSet::new();
    // The owner is set first, because a change of the owner clears mode bits.
    let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
    note_refusal(&mut left_out, "owners", rustix::fs::fchown(file, Some(uid), Some(gid)), path)?;
    let mode = attributes.mode & mode_max;
    rustix::fs::fchmod(file, Mode::from_raw_mode(mode))
        .map_err(|error| failed("setting the mode of", path)(error.into()))?;
    // If the group is not one of the daemon's, the kernel drops sgid without an error.
    let set = file.metadata().map_err(failed("looking at", path))?.mode() & 0o7777;
    if set != mode {
        left_out.insert(format!("modes: {mode:o} became {set:o}"));
    }
    for (name, value) in &attributes.xattrs {
        let set = rustix::fs::fsetxattr(file, name.0.as_slice(), &value.0, XattrFlags::empty());
        note_refusal(&mut left_out, "extended attributes", set, path)?;
    }
    rustix::fs::futimens(file, &times(attributes.mtime_ns))
        .map_err(|error| failed("setting the time of", path)(error.into()))?;
    Ok(left_out)
}

/// Notes an attribute that the file system refuses, or that the daemon has no right to set. Any other failure is an error.
fn note_refusal(
    left_out: &mut BTreeSet<String>,
    what: &str,
    result: rustix::io::Result<()>,
    path: &Path,
) -> Result<(), ExportError> {
    match result {
        Ok(()) => Ok(()),
        Err(error @ (Errno::PERM | Errno::INVAL | Errno::NOTSUP | Errno::NOSPC)) => {
            left_out.insert(format!("{what}: {}", io::Error::from(error)));
            Ok(())
        }
        Err(error) => Err(failed("setting the attributes of", path)(error.into())),
    }
}
